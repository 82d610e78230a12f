"""Draws computing and communication of a real step over time, from a run's own trace.

    python bench/overlap.py

Runs fsdp2_pretrain.py on 2 ranks with --trace_steps; writes docs/overlap.png.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import arguments

ROOT = Path(__file__).parents[1]
COMPUTING = ("aten::mm", "aten::addmm", "aten::_scaled_dot_product", "aten::_fused_adamw")
ROWS = {  # what is drawn: label, colour
    "computing": ("products, attention, AdamW", "#1d3557"),
    "gathering": ("gloo: all-gather of parameters", "#f2a65a"),
    "reducing": ("gloo: all-reduce (and reduce-scatter)", "#2a9d8f"),
}


def trace(folder: str) -> list[dict[str, Any]]:
    """Complete events of one step of rank 0."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["fsdp2_pretrain.py", "--steps", "8", "--trace_steps", "6", "6", "--run_dir", folder]
    command += ["--micro_batch_tokens", "2048"]  # two micro-batches a rank
    subprocess.run(command, cwd=ROOT, check=True)
    events = json.loads((Path(folder) / "trace.json").read_text())["traceEvents"]
    return [event for event in events if event.get("ph") == "X" and "dur" in event]


def row(name: str) -> str | None:
    if name.startswith(COMPUTING):
        return "computing"
    return {"gloo:all_gather": "gathering", "gloo:all_reduce": "reducing"}.get(name)


def main() -> None:
    arguments.read(__doc__)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with tempfile.TemporaryDirectory() as folder:
        events = [event for event in trace(folder) if row(event["name"])]
    start = min(event["ts"] for event in events)
    figure, axis = plt.subplots(figsize=(9, 1.9), dpi=150)
    for place, (kind, (_, colour)) in enumerate(ROWS.items()):
        spans = [
            ((event["ts"] - start) / 1e3, event["dur"] / 1e3)
            for event in events
            if row(event["name"]) == kind
        ]
        axis.broken_barh(spans, (-place - 0.4, 0.8), color=colour)
    axis.set_yticks([0, -1, -2], [label for label, _ in ROWS.values()], fontsize=8)
    axis.set_xlabel("ms since the step began")
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(ROOT / "docs/overlap.png")


if __name__ == "__main__":
    main()
