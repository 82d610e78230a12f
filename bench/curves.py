"""Train with the three strategies, and draw their loss curves over each other.

    python bench/curves.py

Runs the scripts with their default flags but for clipping, on 2 ranks; then writes
docs/curves.png and docs/curves.json.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import arguments

ROOT = Path(__file__).parents[1]
SCRIPTS = ["ddp_pretrain", "fsdp1_pretrain", "fsdp2_pretrain"]


def losses(script: str, run_dir: str) -> list[float]:
    """Loss of every step of a default run of the script."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [f"{script}.py", "--run_dir", run_dir, "--grad_clip", "0"]
    subprocess.run(command, cwd=ROOT, check=True)
    lines = map(json.loads, (Path(run_dir) / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def draw(curves: dict[str, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.4), dpi=150)
    # Wide under narrow: where all three show, they coincide.
    for (name, curve), width, colour in zip(
        curves.items(), (9, 5, 1.6), ("#bcd4ee", "#f2a65a", "#1d3557")
    ):
        axes.plot(range(1, len(curve) + 1), curve, linewidth=width, color=colour, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss (nats per byte)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    arguments.read(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        curves = {f"{name}.py": losses(name, f"{folder}/{name}") for name in SCRIPTS}
    (ROOT / "docs/curves.json").write_text(json.dumps(curves) + "\n")
    draw(curves, ROOT / "docs/curves.png")
    reference = curves["ddp_pretrain.py"]
    worst = max(abs(a - b) / b for c in curves.values() for a, b in zip(c, reference))
    print(f"{len(reference)} steps; largest relative difference of a loss: {worst:.1e}")


if __name__ == "__main__":
    main()
