"""A checkpoint by hand, beside torch.distributed.checkpoint (DCP).

    torchrun --standalone --nproc-per-node=2 by_hand/checkpoint.py
    torchrun --standalone --nproc-per-node=4 by_hand/checkpoint.py    # loads the checkpoint of 2

Each rank writes a file with its shards and their places in the full tensors. Any number of ranks
can load such files: a rank copies the parts that overlap with its new shards. A checkpoint gets its
name once it is complete. DCP does this for any kind of sharding.
"""

import hashlib
import os
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import distributed as dist, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group()  # NCCL for tensors on GPUs, gloo for those in CPU memory
RANK, RANKS = dist.get_rank(), dist.get_world_size()
FOLDER = Path(*(sys.argv[1:] or ["runs/by_hand"]))
if torch.cuda.is_available():
    torch.cuda.set_device(RANK % torch.cuda.device_count())
    torch.set_default_device("cuda")


def shards(model, optimizer):
    """Yield name, this rank's part, and the index of the part's first number in the tensor."""
    for name, parameter in model.named_parameters():
        rows = -(-parameter.shape[0] // RANKS)  # FSDP2's rows per rank; the last ones have fewer
        first = rows * RANK * parameter[0].numel()
        state = optimizer.state[parameter]
        tensors = parameter, state["exp_avg"], state["exp_avg_sq"]
        for key, tensor in zip(("weight", "exp_avg", "exp_avg_sq"), tensors):
            yield f"{name} {key}", tensor.detach().to_local().flatten(), first
        yield f"{name} step", state["step"].view(1), 0  # the same on every rank


def save(model, optimizer, final):
    temporary = final.with_suffix(".tmp")
    if RANK == 0:
        shutil.rmtree(temporary, ignore_errors=True)  # of a run that died while it saved
        temporary.mkdir(parents=True)
    dist.barrier()
    mine = [(name, part.clone(), first) for name, part, first in shards(model, optimizer)]
    torch.save(mine, temporary / f"rank_{RANK}.pt")
    dist.barrier()  # all files are written
    if RANK == 0:
        temporary.rename(final)  # a kill before this line leaves no checkpoint of this name


def load(model, optimizer, folder):
    """Fill this rank's shards from the files of however many ranks."""
    place = {name: (part, first) for name, part, first in shards(model, optimizer)}
    missing = {name: part.numel() for name, (part, _) in place.items()}
    for file in folder.glob("rank_*.pt"):
        for name, stored, begin in torch.load(file, map_location="cpu"):
            part, first = place[name]
            low = max(begin, first)
            high = min(begin + stored.numel(), first + part.numel())
            if low < high:
                part[low - first : high - first] = stored[low - begin : high - begin]
                missing[name] -= high - low
    if max(missing.values()) > 0:
        raise ValueError(f"{folder} lacks a part of the tensors")


def save_with_pytorch(model, optimizer, folder):
    state, moments = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": moments}, checkpoint_id=folder)


def load_with_pytorch(model, optimizer, folder):
    state, moments = get_state_dict(model, optimizer)  # `load` fills its tensors in place
    dcp.load({"model": state, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=moments)


# --- A small model learns to count; two others resume in the middle -------------------------------
VOCAB, WIDTH, BATCH, LENGTH, STEPS, SAVED = 64, 64, 16, 32, 8, 4


def build(seed):
    """Return a sharded model with weights of its own, and an optimizer that has its state."""
    torch.manual_seed(seed)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)]  # VOCAB equals WIDTH
    model = nn.Sequential(nn.Embedding(VOCAB, WIDTH), *layers)
    for layer in [*model, model]:
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # creates the moments for `load` to fill
    return model, optimizer


def train(model, optimizer, step):
    torch.manual_seed(step)  # the batch depends on the step only, so no file has to record it
    tokens = (torch.randint(VOCAB, (BATCH, 1)) + torch.arange(LENGTH + 1)) % VOCAB
    optimizer.zero_grad()
    loss = F.cross_entropy(model(tokens[RANK::RANKS, :-1]).mT, tokens[RANK::RANKS, 1:])
    loss.backward()
    optimizer.step()
    dist.all_reduce(loss.detach())
    return loss.item() / RANKS


def fingerprint(model, optimizer):
    """Hash the full weights and moments. A collective."""
    hashed = hashlib.sha256()
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        for tensor in (parameter, state["exp_avg"], state["exp_avg_sq"]):
            hashed.update(tensor.detach().full_tensor().cpu().numpy().tobytes())
    return hashed.hexdigest()[:16]


say = print if RANK == 0 else lambda *_, **__: None
paths = [FOLDER / f"step_{SAVED}_by_hand", FOLDER / f"step_{SAVED}_with_pytorch"]
never_stopped, losses, resumed = build(0), [], []
for step in range(1, STEPS + 1):
    losses.append(train(*never_stopped, step))
    if step == SAVED and not paths[0].exists():
        save(*never_stopped, paths[0])
        save_with_pytorch(*never_stopped, paths[1])
dist.barrier()  # the checkpoint has its name
for load_from, path in zip((load, load_with_pytorch), paths):
    model, optimizer = build(1)
    load_from(model, optimizer, path)
    say(f"{path}: weights and moments {fingerprint(model, optimizer)}")
    resumed.append([train(model, optimizer, step) for step in range(SAVED + 1, STEPS + 1)])
say("\n| step | never stopped | by hand | with PyTorch |\n| --- | --- | --- | --- |")
for step, right, ours, theirs in zip(range(SAVED + 1, STEPS + 1), losses[SAVED:], *resumed):
    say(f"| {step} | {right:.8f} | {ours - right:+.1e} | {theirs - right:+.1e} |", flush=True)
os._exit(0)  # skip the regular exit, in which gloo's threads can abort
