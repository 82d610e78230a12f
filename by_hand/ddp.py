"""Data parallelism by hand, beside PyTorch's DistributedDataParallel (DDP).

    torchrun --standalone --nproc-per-node=2 by_hand/ddp.py

Each rank has the whole model and a part of the batch. Gradients are collected in buckets, and a
full bucket is all-reduced while backward computes the other gradients (arXiv 2006.15704).
DDP also broadcasts rank 0's weights at the start, and rebuilds the buckets after the first step in
the order in which gradients came.
"""

import copy
import os

import torch
import torch.nn.functional as F
from torch import distributed as dist, nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group()  # NCCL for tensors on GPUs, gloo for those in CPU memory
RANK, RANKS = dist.get_rank(), dist.get_world_size()
SENT = []  # what this rank sends by hand: the bytes of each call
if torch.cuda.is_available():
    torch.cuda.set_device(RANK % torch.cuda.device_count())
    torch.set_default_device("cuda")


class Bucket:
    """The gradients of some parameters, in one flat tensor that is all-reduced at once."""

    def __init__(self, parameters):
        self.size = self.missing = len(parameters)
        self.flat = torch.zeros(sum(p.numel() for p in parameters))
        views = self.flat.split([p.numel() for p in parameters])
        for parameter, view in zip(parameters, views):
            parameter.grad = view.view_as(parameter)  # backward adds to it in place
            parameter.register_post_accumulate_grad_hook(self.on_gradient)

    def on_gradient(self, parameter):
        self.missing -= 1
        if self.missing == 0:
            # Do not wait here, so that the all-reduce overlaps with the rest of backward.
            self.work = dist.all_reduce(self.flat, async_op=True)
            SENT.append(2 * self.flat.nbytes * (RANKS - 1) / RANKS)

    def wait(self, *_):
        self.work.wait()
        self.flat /= RANKS  # a mean over all sequences of the batch
        self.missing = self.size


def by_hand(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    # Backward goes from the last layer to the first, so fill the buckets in that order.
    groups = [[]]
    for parameter in reversed(list(model.parameters())):
        if sum(p.nbytes for p in groups[-1]) > 300_000:  # DDP: 25 MiB
            groups.append([])
        groups[-1].append(parameter)
    for group in groups:
        optimizer.register_step_pre_hook(Bucket(group).wait)
    return model, optimizer


def with_pytorch(model):
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
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
    # Each sequence counts up from a random number. This rank trains on every RANKS-th sequence.
    tokens = (torch.randint(VOCAB, (BATCH, 1)) + torch.arange(LENGTH + 1)) % VOCAB
    losses = []
    for model, optimizer in runs:
        optimizer.zero_grad(set_to_none=False)
        logits = model(tokens[RANK::RANKS, :-1]).mT  # [sequences, VOCAB, LENGTH]
        loss = F.cross_entropy(logits, tokens[RANK::RANKS, 1:])
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
