"""Fully sharded data parallelism by hand, beside PyTorch's fully_shard (FSDP2).

    torchrun --standalone --nproc-per-node=2 by_hand/fsdp.py

Each rank keeps a flat shard of each layer. It all-gathers the layer before forward and again before
backward, frees it afterwards, and reduce-scatters the gradients (ZeRO-3, arXiv 1910.02054).
FSDP2 shards each parameter by rows, and gathers the next layer while this one computes.
"""

import copy
import os

import torch
import torch.nn.functional as F
from torch import distributed as dist, nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group()  # NCCL for tensors on GPUs, gloo for those in CPU memory
RANK, RANKS = dist.get_rank(), dist.get_world_size()
SENT = []  # what this rank sends by hand: the bytes of each call
if torch.cuda.is_available():
    torch.cuda.set_device(RANK % torch.cuda.device_count())
    torch.set_default_device("cuda")


def shard(layer):
    """Keep 1/RANKS of a layer's parameters, and gather the rest when the layer computes."""
    parameters = list(layer.parameters())
    sizes = [p.numel() for p in parameters]
    padding = torch.zeros(-sum(sizes) % RANKS)  # so that all shards are equally large
    full = torch.cat([*(p.detach().flatten() for p in parameters), padding])
    mine = nn.Parameter(full.chunk(RANKS)[RANK].clone())

    def gather(*_):
        full.untyped_storage().resize_(full.nbytes)
        dist.all_gather(list(full.chunk(RANKS)), mine.detach())
        SENT.append((RANKS - 1) * mine.nbytes)

    def free():
        full.untyped_storage().resize_(0)

    def after_forward(layer, inputs, output):
        free()  # fsdp2_pretrain.py keeps the last layer, whose backward comes next
        output.register_hook(gather)  # the layer's backward begins with this gradient

    def reduce(_):
        if all(p.grad is not None for p in parameters):  # the layer's last gradient is there
            gradients = torch.cat([*(p.grad.flatten() for p in parameters), padding]) / RANKS
            mine.grad = torch.empty_like(mine)
            dist.reduce_scatter(mine.grad, list(gradients.chunk(RANKS)))
            SENT.append((RANKS - 1) * mine.nbytes)
            layer.zero_grad()
            free()

    # The parameters become views of `full`, and stay so while its memory comes and goes.
    for parameter, view in zip(parameters, full.split([*sizes, len(padding)])):
        parameter.data = view.view_as(parameter)
        parameter.register_post_accumulate_grad_hook(reduce)
    layer.register_forward_pre_hook(gather)
    layer.register_forward_hook(after_forward)
    free()
    return mine


def by_hand(model):
    return model, torch.optim.AdamW([shard(layer) for layer in model], lr=0.003)


def with_pytorch(model):
    for layer in [*model, model]:
        fully_shard(layer)
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
        optimizer.zero_grad()
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
