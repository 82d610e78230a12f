"""A loop and a model that are not of this collection, with pieces of it: docs/own_loop.md.

See cases.py. test_own_loop.py compares the losses and gradient norms with a plain loop.
"""

from pathlib import Path
from types import SimpleNamespace

import cases  # also adds the root to sys.path
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, parallel as tp
from torch.utils.checkpoint import checkpoint

import common
import fsdp2_muon_pretrain

# --- A model with biases, fused q/k/v, learned positions and a tied head --------------------------

VOCABULARY, WIDTH, HEAD, BLOCKS, LENGTH = 64, 32, 8, 3, 48
CHUNK = 100  # tokens; thousands in real models


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    @staticmethod
    def split_heads(qkv):
        # -1: the number of heads follows from the size, because a rank of a TP group has fewer.
        # Rows of qkv are ordered by head, so that a slice of them is full heads.
        return qkv.unflatten(2, (-1, 3, HEAD))

    def forward(self, x):
        q, k, v = self.split_heads(self.qkv(self.norm1(x))).permute(3, 0, 2, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, input_ids, labels):
        x = self.embedding(input_ids) + self.positions.weight[: input_ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return summed_loss(self.norm(x), self.embedding.weight, labels)


def summed_loss(hidden, head, labels):
    """Sum the cross entropy over the targets, chunk by chunk; -100 is not a target."""
    total = 0.0
    for x, targets in zip(hidden.flatten(0, 1).split(CHUNK), labels.flatten().split(CHUNK)):
        # `checkpoint` recomputes a chunk's logits in backward, so only one chunk's exist at a time.
        total = total + checkpoint(chunk_loss, x, head, targets, use_reentrant=False)
    return total


def chunk_loss(hidden, head, targets):
    # Cast the logits: FSDP2's mixed precision is no autocast, and would leave them in bf16.
    logits = F.linear(hidden, head).float()
    return F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")


# --- Data -----------------------------------------------------------------------------------------


class Sequences:
    """What `common.Batches` reads: any object with `lengths`, `num_targets` and `read`."""

    def __init__(self, tokens, in_loss):
        self.tokens, self.in_loss = tokens, in_loss
        self.lengths = np.array([len(each) - 1 for each in tokens])  # predictions
        self.num_targets = np.array([each[1:].sum() for each in in_loss])

    def read(self, i):
        return self.tokens[i], self.in_loss[i]


def count_up(number=400):
    """Return sequences that count up from random numbers; the first third is a prompt."""
    rng = np.random.default_rng(0)
    tokens, in_loss = [], []
    for length in rng.integers(6, LENGTH, number):
        tokens.append((rng.integers(VOCABULARY) + np.arange(length + 1)) % VOCABULARY)
        in_loss.append(np.arange(length + 1) >= length // 3)
    return Sequences(tokens, in_loss)


def make_batches():
    config = SimpleNamespace(
        seed=0, batching="bucketed", max_length=LENGTH, pad_to_multiple_of=1, micro_batch_tokens=192
    )
    return common.Batches(count_up(), config, padding_id=0)


# --- Strategies -----------------------------------------------------------------------------------


def shard(model):
    """FSDP2: blocks first, then the root, which gets the embeddings and the last norm."""
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model, reshard_after_forward=False)


def split_layers(model):
    """Tensor parallelism over all ranks: column-wise layers split outputs, row-wise ones inputs."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    column, row = tp.ColwiseParallel(), tp.RowwiseParallel()
    for block in model.blocks:
        plan = {"qkv": column, "out": row, "up": column, "down": row}
        tp.parallelize_module(block, mesh, plan)


def clip(model, limit):
    """Clip the gradients; returns their norm. Norms and embeddings are plain tensors under TP."""
    gradients = [p.grad for p in model.parameters()]
    groups = [[g for g in gradients if isinstance(g, DTensor) == kind] for kind in (True, False)]
    norms = [nn.utils.get_total_norm(group) for group in groups if group]
    full = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    norm = torch.stack(full).norm()
    for group in groups:
        if group:
            scale = (limit / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_([getattr(g, "_local_tensor", g) for g in group], scale)
    return norm


# --- The loop -------------------------------------------------------------------------------------


def train(model, optimizer, steps, dp_rank, dp_size, micro_batches=4, tokens=0):
    """Train; returns each step's loss and gradient norm, and the target tokens so far."""
    stream = make_batches().stream(tokens, micro_batches // dp_size, dp_rank, dp_size)
    seen = []
    for _, batch in zip(range(steps), stream):
        # Sum the losses, and divide by the targets of the whole global batch. FSDP averages
        # gradients over its ranks, so multiply by their number.
        scale = dp_size / batch.num_targets
        total = torch.zeros(())
        for i, micro_batch in enumerate(batch.micro_batches):
            if hasattr(model, "set_requires_gradient_sync"):
                last = i == len(batch.micro_batches) - 1
                model.set_requires_gradient_sync(last)  # reduce-scatter on the last one
            loss = model(**micro_batch)
            (loss * scale).backward()
            total += loss.detach()
        if dp_size > 1:
            dist.all_reduce(total)
        norm = clip(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen.append((total.item() / batch.num_targets, norm.item()))
        tokens += batch.num_targets
    return seen, int(tokens)


def adamw(model):
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": vectors, "weight_decay": 0.0}, {"params": matrices, "weight_decay": 0.1}]
    return torch.optim.AdamW(groups, lr=0.003, betas=(0.9, 0.95))


def muon(model):
    """Muon for the blocks' matrices, AdamW for all else. Build it after `shard`."""
    # One matrix each: its outputs are rows, in one group. `fused_outputs` in model.py has others.
    matrices = (p for p in model.blocks.parameters() if p.ndim == 2)
    layouts = {p: (-2, 1, (p.shape[-2],)) for p in matrices}
    groups = [{"params": list(model.parameters()), "weight_decay": 0.0}]
    return fsdp2_muon_pretrain.Muon(groups, layouts, 0.7, torch.float32, lr=0.003)


# --- Checkpoints ----------------------------------------------------------------------------------


def save(model, optimizer, tokens, final):
    """Write model, optimizer and position; the name appears once all of it is there."""
    temporary = Path(final).with_suffix(".tmp")
    state = common.ApplicationState(model, optimizer)
    dcp.save({"app": state, "tokens": tokens}, checkpoint_id=temporary)  # a barrier is in it
    if dist.get_rank() == 0:
        temporary.rename(final)
    dist.barrier()


def load(model, optimizer, final):
    state = {"app": common.ApplicationState(model, optimizer), "tokens": 0}
    dcp.load(state, checkpoint_id=final)
    return state["tokens"]  # the position in the data, at any number of ranks


# --- Cases ----------------------------------------------------------------------------------------


def build(seed=0):
    torch.manual_seed(seed)
    return GPT()


def weights(model):
    return torch.cat([p.detach().full_tensor().flatten() for p in model.parameters()])


def claims(rank, ranks):
    """What the page says that one sees, if something is wrong."""
    seen = {}
    model = build()
    early = adamw(model)  # before `shard`
    shard(model)
    before = weights(model)
    train(model, early, 2, rank, ranks)
    seen["weights stay"] = torch.equal(before, weights(model))

    model = build()
    split_layers(model)
    micro_batch = next(make_batches().evaluation(0, 1))
    model(**micro_batch).backward()
    try:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    except Exception as error:
        seen["clip_grad_norm_"] = str(error)
    heads = WIDTH // HEAD
    right = model(**micro_batch).item()
    for block in model.blocks:  # heads by number: each rank has as many, but smaller ones
        block.split_heads = lambda qkv: qkv.unflatten(2, (heads, 3, -1))
    seen["heads by number"] = model(**micro_batch).item() / right - 1

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = build()
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, reshard_after_forward=False, mp_policy=policy)
    plain = build()
    micro_batches = list(make_batches().evaluation(0, 1))[:8]
    seen["bf16"] = []
    restore = torch.Tensor.float
    for cast in (restore, lambda logits: logits):  # the second one leaves the logits in bf16
        ratios = []
        for micro_batch in micro_batches:
            right = plain(**micro_batch).item()
            torch.Tensor.float = cast
            ratios.append(model(**micro_batch).item() / right)
            torch.Tensor.float = restore
        seen["bf16"].append(max(abs(ratio - 1) for ratio in ratios))
    return seen


def do(case, flags):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if case == "claims":
        return claims(rank, ranks)
    model = build()
    if case == "tensor parallel":
        split_layers(model)  # the ranks of a TP group share their micro-batches
        return train(model, adamw(model), 6, 0, 1)
    shard(model)
    optimizer = muon(model) if case == "muon" else adamw(model)
    if case in ("fsdp2", "muon"):
        return train(model, optimizer, 6, rank, ranks)
    seen, tokens = train(model, optimizer, 3, rank, ranks)
    if not Path(flags["to"]).exists():
        save(model, optimizer, tokens, flags["to"])
    other = build(seed=1)
    shard(other)
    optimizer = adamw(other)
    rest, tokens = train(
        other, optimizer, 3, rank, ranks, tokens=load(other, optimizer, flags["to"])
    )
    return seen + rest, tokens


def main() -> None:
    dist.init_process_group("gloo")
    cases.leave(cases.each(do))


if __name__ == "__main__":
    main()
