"""Pipeline parallelism by hand, beside PyTorch's Schedule1F1B.

    torchrun --standalone --nproc-per-node=2 by_hand/pipeline.py

Each rank has some of the layers. It sends hidden states to the next rank and gets their gradients
back. 1F1B (arXiv 2006.09503) runs each backward as soon as it can, to keep few activations.
PyTorch also has schedules with more stages per rank or a smaller bubble.
"""

import copy
import os

import torch
import torch.nn.functional as F
from torch import distributed as dist, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

dist.init_process_group()  # NCCL for tensors on GPUs, gloo for those in CPU memory
RANK, RANKS = dist.get_rank(), dist.get_world_size()
SENT = []  # what this rank sends by hand: the bytes of each call
if torch.cuda.is_available():
    torch.cuda.set_device(RANK % torch.cuda.device_count())
    torch.set_default_device("cuda")


MICRO_BATCHES = 4
FIRST, LAST = RANK == 0, RANK == RANKS - 1


def send(x, peer):
    dist.send(x, peer)
    SENT.append(x.nbytes)


def receive(peer):
    x = torch.empty(BATCH // MICRO_BATCHES, LENGTH, WIDTH)
    dist.recv(x, peer)
    return x.requires_grad_()


def by_hand(stage, tokens):
    """Run one forward and one backward in each slot (1F1B); returns the loss, on the last stage."""
    micro_batches = tokens.chunk(MICRO_BATCHES)
    in_flight, total = [], torch.zeros(())
    lag = RANKS - 1 - RANK  # slots from a micro-batch's forward to its backward
    x = micro_batches[0][:, :-1] if FIRST else receive(RANK - 1)
    for slot in range(MICRO_BATCHES + lag):
        if slot < MICRO_BATCHES:
            y = stage(x)  # hidden states, or on the last stage logits
            if LAST:
                y = F.cross_entropy(y.mT, micro_batches[slot][:, 1:]) / MICRO_BATCHES
                total += y.detach()
            else:
                send(y.detach(), RANK + 1)
            in_flight.append((x, y))
        if slot >= lag:
            x_then, y_then = in_flight.pop(0)
            y_then.backward(None if LAST else receive(RANK + 1))
        # NOTE: the previous stage sends first. If this one did too, both would wait forever.
        if slot + 1 < MICRO_BATCHES:
            x = micro_batches[slot + 1][:, :-1] if FIRST else receive(RANK - 1)
        if slot >= lag and not FIRST:
            send(x_then.grad, RANK - 1)
    return total


def with_pytorch(stage, tokens):
    pipeline = PipelineStage(stage, RANK, RANKS, torch.get_default_device())
    schedule = Schedule1F1B(pipeline, MICRO_BATCHES, lambda y, t: F.cross_entropy(y.mT, t))
    inputs, losses = [tokens[:, :-1]] if FIRST else [], []
    schedule.step(*inputs, target=tokens[:, 1:], losses=losses)
    return sum(losses, torch.zeros(())) / MICRO_BATCHES


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
stage = model[len(model) * RANK // RANKS : len(model) * (RANK + 1) // RANKS]
runs = [(step, copy.deepcopy(stage)) for step in (by_hand, with_pytorch)]
runs = [(step, stage, torch.optim.AdamW(stage.parameters(), lr=0.003)) for step, stage in runs]
say = print if RANK == 0 else lambda *_, **__: None
say(f"{__doc__}\n| step | by hand | PyTorch | difference |\n| --- | --- | --- | --- |")
for step in range(1, STEPS + 1):
    # Each sequence counts up from a random number.
    tokens = (torch.randint(VOCAB, (BATCH, 1)) + torch.arange(LENGTH + 1)) % VOCAB
    losses = []
    for run, stage, optimizer in runs:
        optimizer.zero_grad()
        loss = run(stage, tokens)
        optimizer.step()
        dist.all_reduce(loss)  # only the last stage has it
        losses.append(loss.item())
    say("| {} | {:.8f} | {:.8f} | {:.1e} |".format(step, *losses, losses[0] - losses[1]))
# Gradients and both AdamW moments are as large as the parameters (of DTensors: as the shards).
held = [4 * sum(getattr(p, "_local_tensor", p).nbytes for p in o.state) for _, _, o in runs]
say("| bytes held by rank 0 | {:,} | {:,} | |".format(*held))
say(f"| bytes sent by rank 0 per step | {sum(SENT) / STEPS:,.0f} | | |", flush=True)
os._exit(0)  # skip the regular exit, in which gloo's threads can abort
