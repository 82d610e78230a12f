"""Print the losses of two runs side by side, step by step.

    python tools/losses.py RUN_DIR OTHER_RUN_DIR [grad_norm]

Both must have a metrics.jsonl. Steps that only one of them has are left out. With `grad_norm`, or
another name of metrics.jsonl, it prints that instead of the losses.
"""

import json
from pathlib import Path

import shared


def read(run_dir: str | Path, name: str) -> dict[int, float]:
    """Return step -> a number of metrics.jsonl."""
    lines = map(json.loads, Path(run_dir, "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line[name] for line in lines if name in line}


def main() -> None:
    reader = shared.parser(__doc__)
    reader.add_argument("run_dir")
    reader.add_argument("other_run_dir")
    reader.add_argument("name", nargs="?", default="loss")
    given = reader.parse_args()
    first, other = (read(path, given.name) for path in (given.run_dir, given.other_run_dir))
    print(f"| step | {given.run_dir} | {given.other_run_dir} | relative difference |")
    print("| --- | --- | --- | --- |")
    for step in sorted(first.keys() & other.keys()):
        a, b = first[step], other[step]
        print(f"| {step} | {a:.8f} | {b:.8f} | {abs(a - b) / abs(a):.1e} |")


if __name__ == "__main__":
    main()
