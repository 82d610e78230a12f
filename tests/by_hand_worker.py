"""Run a script of by_hand/ and measure what its two optimizers hold; test_by_hand.py compares.

For conftest.launch, with one flag: --script, the file to run.
"""

import os
import runpy
import sys

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


def main() -> None:
    _, _, path = sys.argv
    leave = os._exit
    os._exit = lambda code: None  # at the end of the script, which this process goes on after
    script = runpy.run_path(path)
    measured = [held(optimizer) for *_, optimizer in script["runs"]]
    if dist.get_rank() == 0:
        print("measured", *measured, flush=True)
    leave(0)
