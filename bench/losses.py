"""Print the losses of two runs side by side, step by step.

    python bench/losses.py RUN_DIR OTHER_RUN_DIR

Both must have a metrics.jsonl. Steps that only one of them has are left out.
"""

import json
from pathlib import Path

import shared


def losses(run_dir: str) -> dict[int, float]:
    """Return step -> loss, in nats per target token."""
    lines = map(json.loads, Path(run_dir, "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def main() -> None:
    reader = shared.parser(__doc__)
    reader.add_argument("run_dir")
    reader.add_argument("other_run_dir")
    given = reader.parse_args()
    first, other = losses(given.run_dir), losses(given.other_run_dir)
    print(f"| step | {given.run_dir} | {given.other_run_dir} | relative difference |")
    print("| --- | --- | --- | --- |")
    for step in sorted(first.keys() & other.keys()):
        a, b = first[step], other[step]
        print(f"| {step} | {a:.8f} | {b:.8f} | {abs(a - b) / abs(a):.1e} |")


if __name__ == "__main__":
    main()
