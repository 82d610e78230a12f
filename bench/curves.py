"""Train with DDP, FSDP1 and FSDP2, and draw their loss curves over each other.

    python bench/curves.py

Runs the scripts on 2 ranks with their default flags, except that nothing is clipped. Writes
docs/images/curves.png and bench/results/curves.json.
"""

import json
import subprocess
import tempfile

import _tools  # noqa: F401
import losses
import shared
from shared import ROOT, STRATEGIES


def train(script: str, run_dir: str) -> list[float]:
    """Run a script; returns the loss of every step."""
    command = shared.torchrun(2, script, "--run_dir", run_dir, "--grad_clip", 0)
    subprocess.run(command, cwd=ROOT, check=True)
    return [*losses.read(run_dir, "loss").values()]


def draw(curves: dict[str, list[float]]) -> None:
    figure, axes = shared.plotting().subplots(figsize=(7, 3.4), dpi=150)
    # Wide lines under narrow ones: where all three are visible, they coincide.
    styles = zip((9, 5, 1.6), ("#bcd4ee", "#f2a65a", "#1d3557"))
    for (name, curve), (width, colour) in zip(curves.items(), styles):
        axes.plot(range(1, len(curve) + 1), curve, linewidth=width, color=colour, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss (nats per byte)")
    axes.legend(frameon=False)
    shared.finish(figure, ROOT / "docs/images/curves.png")


def main() -> None:
    shared.read(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        scripts = [f"{name}_pretrain.py" for name in STRATEGIES]
        curves = {script: train(script, f"{folder}/{script}") for script in scripts}
    (ROOT / "bench/results/curves.json").write_text(json.dumps(curves) + "\n")
    draw(curves)
    reference, *_ = curves.values()
    worst = max(abs(a - b) / b for c in curves.values() for a, b in zip(c, reference))
    print(f"{len(reference)} steps; largest relative difference of a loss: {worst:.1e}")


if __name__ == "__main__":
    main()
