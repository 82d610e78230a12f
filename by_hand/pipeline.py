"""Pipeline parallelism by hand, beside PyTorch's Schedule1F1B.

    torchrun --standalone --nproc-per-node=2 by_hand/pipeline.py

Each rank is a stage: it has some of the layers, and passes hidden states to the next rank and
their gradients back. 1F1B (arXiv 2006.09503) runs each backward as soon as it can.
PyTorch also batches a send with the receive that follows, and knows more schedules: interleaved
stages, zero bubble.
"""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

dist.init_process_group()  # NCCL for tensors on GPUs, gloo for those in CPU memory
RANK, RANKS = dist.get_rank(), dist.get_world_size()
SENT = []  # what this rank sends by hand: the bytes of each call
if torch.cuda.is_available():
    torch.cuda.set_device(RANK % torch.cuda.device_count())
    torch.set_default_device("cuda")


MICRO_BATCHES = 4
FIRST, LAST = RANK == 0, RANK == RANKS - 1


def loss_of(logits, targets):  # [sequences, LENGTH, VOCAB], [sequences, LENGTH]
    return F.cross_entropy(logits.transpose(1, 2), targets)


def send(x, peer):
    dist.send(x, peer)
    SENT.append(x.nbytes)


def receive(peer):
    x = torch.empty(BATCH // MICRO_BATCHES, LENGTH, WIDTH)
    dist.recv(x, peer)
    return x.requires_grad_()


def stage_of(model):
    size = -(-len(model) // RANKS)  # rounded up
    return model[RANK * size : (RANK + 1) * size]


def by_hand(model):
    stage = stage_of(model)
    later = RANKS - 1 - RANK  # stages after this one

    def forward_backward(tokens):
        micro_batches = tokens.chunk(MICRO_BATCHES)
        in_flight, total = [], torch.zeros(())
        x = micro_batches[0][:, :-1] if FIRST else receive(RANK - 1)
        # In slot i, run the forward of micro-batch i and the backward of an earlier one. There is a
        # lag of one slot for each later stage.
        for i in range(MICRO_BATCHES + later):
            if i < MICRO_BATCHES:
                y = stage(x)
                if LAST:
                    y = loss_of(y, micro_batches[i][:, 1:]) / MICRO_BATCHES
                    total += y.detach()
                else:
                    send(y.detach(), RANK + 1)
                in_flight.append((x, y))
            if i >= later:
                x_then, y_then = in_flight.pop(0)
                y_then.backward(None if LAST else receive(RANK + 1))
            # NOTE: receive before sending back. Two ranks that both send wait forever.
            if i + 1 < MICRO_BATCHES:
                x = micro_batches[i + 1][:, :-1] if FIRST else receive(RANK - 1)
            if i >= later and not FIRST:
                send(x_then.grad, RANK - 1)
        return total

    return forward_backward, torch.optim.AdamW(stage.parameters(), lr=0.01)


def with_pytorch(model):
    stage = stage_of(model)
    device = torch.get_default_device()
    schedule = Schedule1F1B(
        PipelineStage(stage, RANK, RANKS, device), MICRO_BATCHES, loss_fn=loss_of
    )

    def forward_backward(tokens):
        losses = []
        inputs = (tokens[:, :-1],) if FIRST else ()
        schedule.step(
            *inputs, target=tokens[:, 1:] if LAST else None, losses=losses if LAST else None
        )
        return torch.stack(losses).mean() if LAST else torch.zeros(())

    return forward_backward, torch.optim.AdamW(stage.parameters(), lr=0.01)


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
say = print if RANK == 0 else lambda _: None
say(f"{__doc__}\n| step | by hand | PyTorch | difference |\n| --- | --- | --- | --- |")
for step in range(1, STEPS + 1):
    # Each sequence counts from a random start, by a random stride, modulo VOCAB.
    start, stride = torch.randint(VOCAB, (2, BATCH, 1))
    tokens = (start + stride * torch.arange(LENGTH + 1)) % VOCAB  # [BATCH, LENGTH + 1]
    losses = []
    for model, optimizer in runs:
        optimizer.zero_grad()
        loss = model(tokens)
        optimizer.step()
        dist.all_reduce(loss)  # only the last stage has it
        losses.append(loss.item())
    say("| {} | {:.8f} | {:.8f} | {:.1e} |".format(step, *losses, losses[0] - losses[1]))
# Gradients and AdamW's two moments are as large as the parameters.
held = [4 * sum(getattr(p, "_local_tensor", p).nbytes for p in o.state) for _, o in runs]
say("| bytes held by rank 0 | {:,} | {:,} | |".format(*held))
say(f"| bytes sent by rank 0 per step | {sum(SENT) / STEPS:,.0f} | | |")
dist.destroy_process_group()
