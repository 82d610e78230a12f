"""A step of each script, loop and metrics included, against one of a bare loop in the same process.

    python bench/step.py [STEPS]

In bench/compare.py the contestants are processes of their own, and even two of the same program
differ by a few per cent. Here script and bare loop train in turn, a step each, on the rows and from
the weights of that comparison; a step begins and ends on all ranks together. Prints milliseconds,
the ratio of the speeds and its standard error.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import arguments
import torch
import torch.distributed as dist
from compare import ROOT, STRATEGIES, common, prepare_pretraining
from contestant import bare_steps

FIRST = 4  # steps that are not counted


def alternate(folder: Path, strategy: str) -> None:
    """On one rank of a launch: train with the script, and take a bare step before each of its."""
    settings = json.loads((folder / "settings.json").read_text())
    module = importlib.import_module(f"{strategy}_pretrain")
    train_step = module.train_step
    bare: Any = None
    seconds: dict[str, list[float]] = {"script": [], "bare": []}
    losses: dict[str, list[float]] = {"script": [], "bare": []}
    started = 0.0

    def end(contestant: str) -> None:
        nonlocal started
        dist.barrier()  # the ranks wait for each other here if nowhere before
        seconds[contestant].append(time.perf_counter() - started)
        started = time.perf_counter()

    def both(*given: Any) -> tuple[float, float]:
        nonlocal bare, started
        if bare is None:
            bare = bare_steps(strategy, folder, settings)
            dist.barrier()
            started = time.perf_counter()
        else:
            end("script")
        loss, _ = next(bare)
        end("bare")
        dist.all_reduce(loss)
        losses["bare"].append(loss.item() / dist.get_world_size())
        started = time.perf_counter()
        result = train_step(*given)
        losses["script"].append(result[0])
        return result

    module.train_step = both
    common.export = common.Run.finish = lambda *_: None  # only training is compared
    sys.argv = [f"{strategy}_pretrain.py", *settings["flags"][f"{strategy}_pretrain"]]
    module.main()
    if any(abs(a / b - 1) > 1e-3 for a, b in zip(*losses.values(), strict=True)):
        raise SystemExit(f"{strategy}: they do different work: {losses}")
    # The script's last step has no end: validation and a checkpoint follow it.
    script, alone = (torch.tensor(seconds[name])[FIRST:] for name in seconds)
    alone = alone[: len(script)]
    ratios = alone / script
    if os.environ["RANK"] == "0":
        print(
            f"{strategy}: script {1000 * script.mean():.1f} ms, bare {1000 * alone.mean():.1f} ms, "
            f"ratio {ratios.median():.3f} ± {ratios.std() / len(ratios) ** 0.5:.3f}",
            flush=True,
        )
    os._exit(0)  # the bare model is alive


def main() -> None:
    [steps] = arguments.read(__doc__, steps=200)
    for strategy in STRATEGIES:
        with tempfile.TemporaryDirectory() as folder:
            prepare_pretraining(Path(folder), FIRST + steps + 1)
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
    if "TORCHELASTIC_RUN_ID" in os.environ:  # a rank of the launch in `main`
        alternate(Path(sys.argv[1]), sys.argv[2])
    else:
        main()
