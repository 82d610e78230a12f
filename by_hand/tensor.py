"""Tensor parallelism by hand, beside PyTorch's parallelize_module.

    torchrun --standalone --nproc-per-node=2 by_hand/tensor.py

The ranks compute each block together, on the same batch. Each has some of the heads and a part of
the feed-forward (Megatron-LM, arXiv 1909.08053). Embedding and head are on every rank.

PyTorch's parameters are DTensors, which know their full shape. Checkpoints, gradient norms and
FSDP build on that. By hand, layers with biases need more: add a row-parallel bias once, after the
all-reduce. And a gradient norm over this rank's weights alone would be too small.
"""

import copy
import os

import torch
import torch.nn.functional as F
from torch import distributed as dist, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import parallel as tp

dist.init_process_group()  # NCCL for tensors on GPUs, gloo for those in CPU memory
RANK, RANKS = dist.get_rank(), dist.get_world_size()
SENT = []  # what this rank sends by hand: the bytes of each call
if torch.cuda.is_available():
    torch.cuda.set_device(RANK % torch.cuda.device_count())
    torch.set_default_device("cuda")


class Communicate(torch.autograd.Function):
    """Apply `operation` in forward and `conjugate` in backward. (`torch.clone` changes nothing.)"""

    @staticmethod
    def forward(ctx, x, operation, conjugate):
        ctx.conjugate = conjugate
        return operation(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.conjugate(gradient), None, None


def all_reduce(x):
    total = x.clone()  # autograd may still need x
    dist.all_reduce(total)
    SENT.append(2 * x.nbytes * (RANKS - 1) / RANKS)
    return total


def by_hand(model):
    for block in model[1:-1]:
        for column, row in ((block.qkv, block.out), (block.up, block.down)):
            # Column-parallel: this rank computes some of the outputs. All outputs depend on the
            # input, so its gradient is a sum over the ranks (Megatron's f).
            weight = column.weight.detach().chunk(RANKS, dim=0)[RANK]
            column.weight = nn.Parameter(weight.clone())
            column.register_forward_pre_hook(
                lambda _, inputs: Communicate.apply(*inputs, torch.clone, all_reduce)
            )
            # Row-parallel: this rank has some of the inputs, so outputs are partial sums (g).
            weight = row.weight.detach().chunk(RANKS, dim=1)[RANK]
            row.weight = nn.Parameter(weight.clone())
            row.register_forward_hook(lambda _, x, y: Communicate.apply(y, all_reduce, torch.clone))
    return model, torch.optim.AdamW(model.parameters(), lr=0.003)


def with_pytorch(model):
    mesh = init_device_mesh(torch.get_default_device().type, (RANKS,))
    column, row = tp.ColwiseParallel(), tp.RowwiseParallel()
    plan = {"qkv": column, "out": row, "up": column, "down": row}
    for block in model[1:-1]:
        tp.parallelize_module(block, mesh, plan)
    return model, torch.optim.AdamW(model.parameters(), lr=0.003)


# --- A small transformer learns to count, by hand and with PyTorch, step by step ------------------
VOCAB, WIDTH, HEAD, BLOCKS = 64, 64, 16, 4  # HEAD is the width of an attention head
BATCH, LENGTH, STEPS = 16, 32, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):  # [batch, length, WIDTH]
        # A head's query, key and value are neighbors, so a slice of qkv's outputs is full heads.
        qkv = self.qkv(F.rms_norm(x, (WIDTH,))).unflatten(2, (-1, 3, HEAD))
        q, k, v = qkv.permute(3, 0, 2, 1, 4)  # each [batch, heads, length, HEAD]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))  # [batch, length, WIDTH]
        return x + self.down(F.gelu(self.up(F.rms_norm(x, (WIDTH,)))))


torch.manual_seed(0)  # all ranks start from the same weights and draw the same batches
blocks = [Block() for _ in range(BLOCKS)]
model = nn.Sequential(nn.Embedding(VOCAB, WIDTH), *blocks, nn.Linear(WIDTH, VOCAB, bias=False))
runs = by_hand(copy.deepcopy(model)), with_pytorch(model)
say = print if RANK == 0 else lambda *_, **__: None
say(f"{__doc__}\n| step | by hand | PyTorch | difference |\n| --- | --- | --- | --- |")
for step in range(1, STEPS + 1):
    # Each sequence counts up from a random number.
    tokens = (torch.randint(VOCAB, (BATCH, 1)) + torch.arange(LENGTH + 1)) % VOCAB
    losses = []
    for model, optimizer in runs:
        optimizer.zero_grad()
        logits = model(tokens[:, :-1]).mT  # [sequences, VOCAB, LENGTH]
        loss = F.cross_entropy(logits, tokens[:, 1:])
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach())
        losses.append(loss.item() / RANKS)
    say("| {} | {:.8f} | {:.8f} | {:.1e} |".format(step, *losses, losses[0] - losses[1]))
# Gradients and both AdamW moments are as large as the parameters (of DTensors: as the shards).
held = [4 * sum(getattr(p, "_local_tensor", p).nbytes for p in o.state) for _, o in runs]
say("| bytes held by rank 0 | {:,} | {:,} | |".format(*held))
say(f"| bytes sent by rank 0 per step | {sum(SENT) / STEPS:,.0f} | | |", flush=True)
os._exit(0)  # skip the regular exit, in which gloo's threads can abort
