"""A step of each script, loop and metrics included, against one of a bare loop in the same process.

    python bench/step.py [STEPS]

In bench/compare.py the contestants are processes of their own, and even two of the same program
differ by a few per cent. Here script and bare loop train in turn, a step each, on the rows and from
the weights of that comparison. Prints milliseconds, the ratio of the speeds and its standard error.
"""

import importlib
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from compare import ROOT, STRATEGIES, common, prepare_pretraining
from contestant import bare_steps

FIRST = 4  # steps that are not counted


def alternate(folder: Path, strategy: str) -> None:
    """On one rank of a launch: train with the script, and take a bare step beside each of its."""
    settings = json.loads((folder / "settings.json").read_text())
    module = importlib.import_module(f"{strategy}_pretrain")
    train_step = module.train_step
    bare: Any = None
    called, beside, bare_seconds = [], [], []  # when; seconds of the bare step with its barriers
    losses: dict[str, list[float]] = {"script": [], "bare": []}

    def bare_step() -> None:
        started = time.perf_counter()
        dist.barrier()  # neither pays for ranks that the other leaves apart
        begun = time.perf_counter()
        loss, _ = next(bare)
        bare_seconds.append(time.perf_counter() - begun)
        dist.all_reduce(loss)
        losses["bare"].append(loss.item() / dist.get_world_size())
        beside.append(time.perf_counter() - started)

    def both(*arguments: Any) -> tuple[float, float]:
        nonlocal bare
        bare = bare or bare_steps(strategy, folder, settings)
        called.append(time.perf_counter())
        bare_first = len(called) % 2
        if bare_first:
            bare_step()
        result = train_step(*arguments)
        if not bare_first:
            bare_step()
        losses["script"].append(result[0])
        return result

    module.train_step = both
    common.export = common.Run.finish = lambda *_: None  # only training is compared
    sys.argv = [f"{strategy}_pretrain.py", *settings["flags"][f"{strategy}_pretrain"]]
    module.main()
    if any(abs(a / b - 1) > 1e-3 for a, b in zip(*losses.values(), strict=True)):
        raise SystemExit(f"{strategy}: they do different work: {losses}")
    between = [after - before for before, after in itertools.pairwise(called)]
    script_seconds = [whole - one for whole, one in zip(between, beside)][FIRST:]
    ratios = [a / b for a, b in zip(bare_seconds[FIRST:], script_seconds)]
    if os.environ["RANK"] == "0":
        print(
            f"{strategy}: script {1000 * statistics.mean(script_seconds):.1f} ms, "
            f"bare {1000 * statistics.mean(bare_seconds[FIRST:]):.1f} ms, "
            f"ratio {statistics.median(ratios):.3f} "
            f"± {statistics.stdev(ratios) / math.sqrt(len(ratios)):.3f}",
            flush=True,
        )
    os._exit(0)  # the bare model is alive


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    for strategy in STRATEGIES:
        with tempfile.TemporaryDirectory() as folder:
            prepare_pretraining(Path(folder), steps)
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += ["--nproc-per-node=2", str(ROOT / "bench/step.py"), folder, strategy]
            seen = subprocess.run(
                command, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True, capture_output=True
            )
        found = [line for line in seen.stdout.splitlines() if line.startswith(f"{strategy}: ")]
        if seen.returncode or not found:
            raise SystemExit(seen.stderr[-8000:])
        print(found[0], flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        alternate(Path(sys.argv[1]), sys.argv[2])
    else:
        main()
