"""Run a script of by_hand/ and measure what its two optimizers hold; test_by_hand.py compares.

Of by_hand/collectives.py it prints instead whether sums have the bits of additions in ring order.

For launching.launch, with the flags --script, the file to run, and --words, its arguments.
"""

import os
import runpy
import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def held(optimizer) -> int:
    """Return the bytes of parameters, gradients and both moments on this rank."""
    total = 0
    for parameter, state in optimizer.state.items():
        for tensor in (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            total += local.untyped_storage().nbytes() if local._base is None else local.nbytes
    return total


def ring_order(all_reduce) -> int:
    """Return 1 if a piece's sum begins at the rank after the one that keeps it, on every rank."""
    ranks = dist.get_world_size()
    seeds = [torch.Generator().manual_seed(rank) for rank in range(ranks)]
    tensors = [torch.randn(8 * ranks, generator=seed) for seed in seeds]
    pieces = []
    for owner in range(ranks):
        total = torch.zeros(8)
        for step in range(1, ranks + 1):
            total += tensors[(owner + step) % ranks].chunk(ranks)[owner]
        pieces.append(total)
    return int(torch.equal(all_reduce(tensors[dist.get_rank()]), torch.cat(pieces)))


def main() -> None:
    _, _, path, *more = sys.argv
    sys.argv = [path, *more[1:]]
    leave = os._exit
    os._exit = lambda code: None  # at the end of the script, which this process goes on after
    script = runpy.run_path(path)
    if "COLLECTIVES" in script:
        measured = [ring_order(script["all_reduce"])]
    else:
        measured = [held(optimizer) for *_, optimizer in script.get("runs", [])]
    if dist.get_rank() == 0:
        print("measured", *measured, flush=True)
    leave(0)
