"""Seconds from the command to the end of the first step, of each script on 2 ranks.

    python bench/start.py

The corpus is cached (a run before the first one that counts sees to it); median of 3 in turn.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import arguments

ROOT = Path(__file__).parents[1]
SCRIPTS = ["ddp_pretrain", "fsdp1_pretrain", "fsdp2_pretrain", "fsdp2_sft"]


def first_step(script: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node=2", f"{script}.py", "--steps", "1", "--run_dir", folder]
        started = time.perf_counter()
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
            ended = [time.perf_counter() for line in run.stdout if line.startswith("step 1/")]
    if run.returncode:
        raise SystemExit(f"{script} ended with {run.returncode}")
    return ended[0] - started


def main() -> None:
    arguments.read(__doc__)
    seconds: dict[str, list[float]] = {script: [] for script in SCRIPTS}
    for _ in range(4):
        for script in SCRIPTS:
            seconds[script].append(first_step(script))
    for script, taken in seconds.items():
        print(f"{script}: {statistics.median(taken[1:]):.1f} s")


if __name__ == "__main__":
    main()
