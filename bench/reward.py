"""Pretrain, fine-tune and run GRPO as the README does, and draw how the reward rises.

    python bench/reward.py [SEEDS]

Runs fsdp2_grpo.py with SEEDS seeds (3 by default) from the same fine-tuned model, on 2 ranks.
Writes docs/images/reward.png and bench/results/reward.json: for each seed the mean reward of
held-out prompts by step. Prints how long each run took.
"""

import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import _tools  # noqa: F401
import losses
import shared
from shared import ROOT


def run(folder: str, script: str, *words: Any) -> float:
    """Run a script on 2 ranks, its files in `folder`; returns the seconds it took."""
    began = time.perf_counter()
    command = shared.torchrun(2, ROOT / f"{script}.py", *words)
    subprocess.run(command, cwd=folder, check=True)
    return time.perf_counter() - began


def draw(seen: list[dict[int, float]]) -> None:
    figure, axes = shared.plotting().subplots(figsize=(7, 3), dpi=150)
    for seed, line in enumerate(seen):
        axes.plot(line.keys(), line.values(), marker="o", label=f"seed {seed}")
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward, held-out prompts")
    axes.set_ylim(0, None)
    axes.legend(frameon=False)
    shared.finish(figure, ROOT / "docs/images/reward.png")


def main() -> None:
    [seeds] = shared.read(__doc__, seeds=3)
    seen = []
    with tempfile.TemporaryDirectory() as folder:
        run(folder, "fsdp2_pretrain")
        run(folder, "fsdp2_sft", "--init_from", "runs/fsdp2_pretrain")
        for seed in range(seeds):
            run_dir = Path(folder, f"runs/seed_{seed}")
            words = ["--init_from", "runs/fsdp2_sft", "--seed", seed, "--run_dir", run_dir]
            seconds = run(folder, "fsdp2_grpo", *words)
            seen.append(losses.read(run_dir, "validation_reward"))
            first, *_, last = seen[-1].values()
            print(f"seed {seed}: from {first:.2f} to {last:.2f} in {seconds:.0f} s")
    (ROOT / "bench/results/reward.json").write_text(json.dumps(seen, indent=2) + "\n")
    draw(seen)


if __name__ == "__main__":
    main()
