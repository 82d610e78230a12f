"""Print what each script changes of fsdp2_pretrain.py, with line counts.

    python bench/diffs.py

It is the generated part of docs/diffs.md.
"""

import difflib

import shared
from shared import ROOT

BASE = "fsdp2_pretrain.py"
OTHERS = ["ddp_pretrain.py", "fsdp1_pretrain.py", "fsdp2_muon_pretrain.py"]
OTHERS += [f"{name}_pretrain.py" for name in shared.INSIDE]
OTHERS += ["fsdp2_sft.py", "fsdp2_lora.py", "fsdp2_grpo.py"]


def code_of(script: str) -> list[str]:
    """Return the lines of a script from its section Config on, after docstring and imports."""
    text = (ROOT / script).read_text()
    return text[text.index("# --- Config") :].splitlines()


def difference(script: str) -> list[str]:
    """Return the unified diff from fsdp2_pretrain.py to a script, without its two title lines."""
    return [*difflib.unified_diff(code_of(BASE), code_of(script), lineterm="", n=2)][2:]


def counts(lines: list[str]) -> tuple[int, int]:
    """Return how many lines a diff adds and removes."""
    return tuple(sum(line.startswith(sign) for line in lines) for sign in "+-")


def diffs() -> str:
    """Return a table of line counts, and the diffs, folded."""
    length = len(code_of(BASE))
    table = ["| script | added | removed | kept |", "| --- | --- | --- | --- |"]
    folded = []
    for script in OTHERS:
        lines = difference(script)
        added, removed = counts(lines)
        table.append(f"| [`{script}`](../{script}) | {added} | {removed} | {length - removed} |")
        title = f"<code>{script}</code>: {added} lines added, {removed} removed"
        code = "\n".join(line.rstrip() for line in lines)  # of lines that are empty
        folded.append(
            f"<details>\n<summary>{title}</summary>\n\n```diff\n{code}\n```\n\n</details>"
        )
    return "\n\n".join(["\n".join(table), *folded])


def main() -> None:
    shared.read(__doc__)
    print(diffs())


if __name__ == "__main__":
    main()
