"""Tensor and sequence parallelism by hand, beside PyTorch's parallelize_module.

    torchrun --standalone --nproc-per-node=2 by_hand/sequence.py

As tensor.py, but each all-reduce is split into a reduce-scatter and an all-gather. Between the two,
norms and residuals have only this rank's part of every sequence (arXiv 2205.05198). Megatron-LM
also frees what it has gathered for forward, and gathers it again in backward.
"""

import copy
import os

import torch
import torch.nn.functional as F
from torch import distributed as dist, nn
from torch.distributed.tensor import Shard, parallel as tp

dist.init_process_group()  # NCCL for tensors on GPUs, gloo for those in CPU memory
RANK, RANKS = dist.get_rank(), dist.get_world_size()
SENT = []  # what this rank sends by hand: the bytes of each call
if torch.cuda.is_available():
    torch.cuda.set_device(RANK % torch.cuda.device_count())
    torch.set_default_device("cuda")


class AllGather(torch.autograd.Function):  # full sequences from the ranks' parts
    @staticmethod
    def forward(ctx, x):  # [batch, length / RANKS, WIDTH]
        parts = [torch.empty_like(x) for _ in range(RANKS)]
        dist.all_gather(parts, x.contiguous())
        SENT.append((RANKS - 1) * x.nbytes)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx, gradient):
        return ReduceScatter.apply(gradient)


class ReduceScatter(torch.autograd.Function):  # this rank's part of the sum over the ranks
    @staticmethod
    def forward(ctx, x):  # [batch, length, WIDTH]
        parts = [part.contiguous() for part in x.chunk(RANKS, dim=1)]
        dist.reduce_scatter(parts[RANK], parts)
        SENT.append((RANKS - 1) * parts[RANK].nbytes)
        return parts[RANK]

    @staticmethod
    def backward(ctx, gradient):
        return AllGather.apply(gradient)


def by_hand(model):
    for block in model[1:-1]:
        for column, row in ((block.qkv, block.out), (block.up, block.down)):
            column.weight = nn.Parameter(column.weight.detach().chunk(RANKS, dim=0)[RANK].clone())
            column.register_forward_pre_hook(lambda _, inputs: AllGather.apply(*inputs))
            row.weight = nn.Parameter(row.weight.detach().chunk(RANKS, dim=1)[RANK].clone())
            row.register_forward_hook(lambda _, x, y: ReduceScatter.apply(y))
    for layer in (model[0], model[-1]):  # on every rank: sum the gradients of all parts
        layer.weight.register_hook(lambda g: AllGather.apply(ReduceScatter.apply(g)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.003)


def with_pytorch(model):
    mesh = dist.init_device_mesh(torch.get_default_device().type, (RANKS,))
    column = tp.ColwiseParallel(input_layouts=Shard(1))
    row = tp.RowwiseParallel(output_layouts=Shard(1))
    for block in model[1:-1]:
        tp.parallelize_module(block, mesh, {"qkv": column, "out": row, "up": column, "down": row})
    for layer in (model[0], model[-1]):
        tp.parallelize_module(layer, mesh, tp.SequenceParallel(use_local_output=True))
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
    # Each sequence counts up from a random number. This rank has a part of each.
    tokens = (torch.randint(VOCAB, (BATCH, 1)) + torch.arange(LENGTH + 1)) % VOCAB
    losses = []
    for model, optimizer in runs:
        optimizer.zero_grad()
        logits = model(tokens[:, :-1].chunk(RANKS, dim=1)[RANK]).mT  # [batch, VOCAB, part]
        loss = F.cross_entropy(logits, tokens[:, 1:].chunk(RANKS, dim=1)[RANK]) / RANKS
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach())
        losses.append(loss.item())
    say("| {} | {:.8f} | {:.8f} | {:.1e} |".format(step, *losses, losses[0] - losses[1]))
# Gradients and both AdamW moments are as large as the parameters (of DTensors: as the shards).
held = [4 * sum(getattr(p, "_local_tensor", p).nbytes for p in o.state) for _, o in runs]
say("| bytes held by rank 0 | {:,} | {:,} | |".format(*held))
say(f"| bytes sent by rank 0 per step | {sum(SENT) / STEPS:,.0f} | | |", flush=True)
os._exit(0)  # skip the regular exit, in which gloo's threads can abort
