"""What the workers share: do one case after the other, and let rank 0 write what was seen.

A worker is for `launching.launch_cases`. Its flags are --cases, JSON {case: flags}, and --out, the
file to write.
"""

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "bench")]
import shared  # noqa: E402


def given() -> dict[str, str]:
    """Return the flags of this worker."""
    return dict(zip(sys.argv[1::2], sys.argv[2::2]))


def each(do: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Return case -> what `do(case, flags)` returns."""
    seen = {}
    for case, flags in json.loads(given()["--cases"]).items():
        seen[case] = do(case, flags)
        gc.collect()
        torch._dynamo.reset()
    return seen


def leave(seen: dict[str, Any]) -> None:
    """Write what was seen, and end this rank. (How scripts end is tested with the scripts.)"""
    if dist.get_rank() == 0:
        torch.save(seen, given()["--out"])
    shared.leave()
