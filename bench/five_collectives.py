"""Draw docs/images/collectives.png: five collectives on four ranks, before and after.

    python bench/five_collectives.py

Runs by_hand/collectives.py on four ranks and draws the small numbers and the bytes that it prints.
The color of a number says which rank it comes from. A sum has a strip of all four.
"""

import re
import subprocess
from typing import Any

import _tools  # noqa: F401
import shared
from shared import ROOT

RANKS = 4
IDEAS = {
    "broadcast": "every rank gets\nrank 0's tensor",
    "all_gather": "every rank gets\nall the pieces",
    "reduce_scatter": "each rank gets\na piece of the sum",
    "all_reduce": "every rank gets\nthe whole sum",
    "all_to_all": "each rank gets a\npiece from every rank",
}
COLORS = ["#1d3557", "#2a9d8f", "#c9962c", "#c65b3c"]  # of ranks 0 to 3
SUM = "#5b6570"
CELL, PITCH, GAP = 0.5, 2.4, 1.1
Rows = dict[str, list[tuple[list[int], list[int]]]]


def printed() -> tuple[Rows, dict[str, str]]:
    """Run the script; returns each rank's numbers before and after, and what rank 0 sends."""
    command = shared.torchrun(RANKS, ROOT / "by_hand/collectives.py")
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows: Rows = {}
    for name, *lists in re.findall(r"(?m)^(\w+) +rank \d  \[(.*?)\] +->  \[(.*?)\]$", out):
        before, after = ([int(number) for number in text.split(", ")] for text in lists)
        rows.setdefault(name, []).append((before, after))
    return rows, dict(re.findall(r"(?m)^\| (\w+) \| [\d,]+ \| ([\d.]+) \|", out))


def draw_numbers(axis: Any, x: float, y: float, numbers: list[int], first: int) -> None:
    """Draw a rank's numbers as cells; `first` is the place of the first one in a full tensor."""
    for place in range(RANKS):
        left = x + CELL * place
        box = shared.plotting().Rectangle
        axis.add_patch(box((left, y), 0.46, CELL, color="#eef0f3", linewidth=0))
        if not first <= place < first + len(numbers):
            continue
        number = numbers[place - first]
        is_sum = number >= 100
        color = SUM if is_sum else COLORS[number // 10 - 1]
        axis.add_patch(box((left, y), 0.46, CELL, color=color, linewidth=0))
        for rank in range(RANKS * is_sum):
            axis.add_patch(
                box((left + 0.115 * rank, y), 0.115, 0.1, color=COLORS[rank], linewidth=0)
            )
        axis.text(
            *(left + 0.23, y + CELL / 2, str(number)),
            ha="center", va="center", fontsize=7, color="white", weight="bold",
        )  # fmt: skip


def main() -> None:
    shared.read(__doc__)
    rows, sent = printed()
    figure, axis = shared.plotting().subplots(figsize=(13.5, 4.6), dpi=150)
    middle = PITCH * RANKS
    right = 2 * middle + GAP
    for number, (name, idea) in enumerate(IDEAS.items()):
        y = -number
        axis.text(-2.9, y + 0.36, name.replace("_", "-"), fontsize=9.5, weight="bold")
        axis.text(-2.9, y + 0.3, idea, fontsize=7.5, va="top", color="#444444")
        for rank, (before, after) in enumerate(rows[name]):
            # A piece stands at its place in the full tensor.
            places = [rank if len(numbers) == 1 else 0 for numbers in (before, after)]
            draw_numbers(axis, PITCH * rank, y, before, places[0])
            draw_numbers(axis, middle + GAP + PITCH * rank, y, after, places[1])
        axis.annotate(
            "",
            (middle + 0.75, y + 0.25),
            (middle - 0.05, y + 0.25),
            arrowprops={"arrowstyle": "->"},
        )
        axis.text(right + 0.1, y + 0.25, f"{sent[name]}", fontsize=10, va="center")
    for rank in range(RANKS):
        for start in (0.0, middle + GAP):
            axis.text(start + PITCH * rank + 1, 0.7, f"rank {rank}", fontsize=9, ha="center")
    for x, text in ((middle / 2 - 0.2, "before"), (middle * 1.5 + GAP - 0.2, "after")):
        axis.text(x, 1.1, text, fontsize=11, weight="bold", ha="center")
    axis.text(right + 0.1, 1.1, "rank 0 sends", fontsize=9)
    axis.text(right + 0.1, 0.7, "full tensors", fontsize=7, color="#666666")
    axis.set_xlim(-3, right + 1.8)
    axis.set_ylim(1 - len(IDEAS) - 0.2, 1.5)
    axis.axis("off")
    figure.patch.set_facecolor("white")
    figure.savefig(ROOT / "docs/images/collectives.png", bbox_inches="tight")


if __name__ == "__main__":
    main()
