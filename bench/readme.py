"""Renew the parts of the pages that come from other files: code, tables.

    python bench/readme.py

A part stands between the lines `<!-- begin NAME -->` and `<!-- end NAME -->` of a page. The .json
files are in bench/results/. NAME is

    lines FILE | FIRST | LAST        lines of a script, from the one that contains FIRST to LAST
    traffic                          what a strategy keeps and moves (bench/strategies.py)
    choosing                         which script fits where, of choosing.json
    inside                           tensor and context parallel, of inside.json
    stages                           pipelines across machines, of stages.json
    experts                          a mixture of experts on many GPUs, of experts.json
    lora                             LoRA beside full fine-tuning, of lora.json
    lora_peer                        LoRA beside PEFT and TRL, of lora_peer.json
    meshes                           meshes for Llama 3's shapes, of meshes.json
    published                        their estimate beside torchtitan's figures (bench/meshes.py)
    sampling                         what sampling takes beside training (bench/strategies.py)
    bubble                           what stages wait, of bubble.json
    distill                          learning from a teacher, of distill.json
    rows                             what becomes of rows of conversations (tools/rows.py)
    break_even                       compute or network, by formula (tools/break_even.py)
    pretraining, fine-tuning, steps  speed beside bare loops and libraries, of compare.json
"""

import functools
import json
import re
import textwrap
from collections.abc import Callable

import _tools  # noqa: F401
import break_even
import bubble
import compare
import distill
import lora
import lora_peer
import meshes
import rows
import shared
import strategies
from shared import ROOT

PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md")]
PAGES += sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "bench/results").glob("*.md")])


def parts() -> dict[str, Callable[[], str]]:
    """What stands between which markers."""
    compared = json.loads((ROOT / "bench/results/compare.json").read_text())
    made: dict[str, Callable[[], str]] = {
        "traffic": strategies.traffic_table,
        "choosing": strategies.choosing_table,
        "inside": strategies.inside_table,
        "stages": strategies.stages_table,
        "bubble": bubble.bubble_table,
        "lora": lora.lora_table,
        "lora_peer": lora_peer.lora_peer_table,
        "meshes": meshes.meshes_table,
        "published": meshes.published_table,
        "experts": strategies.experts_table,
        "distill": distill.distill_table,
        "rows": rows.rows_table,
        "sampling": strategies.sampling_table,
        "break_even": break_even.table,
        "steps": lambda: compare.steps_table(compared),
    }
    for work in ("pretraining", "fine-tuning"):
        made[work] = functools.partial(compare.markdown, compared, work)
    return made


def lines_of(file: str, first: str, last: str) -> str:
    """Return lines of a script as a code block, without the indentation that they share.

    The first is the first one that contains `first` below the header of the file's first section,
    in by_hand/ below the imports.
    """
    lines = (ROOT / file).read_text().splitlines()
    above = "dist.init_process_group" if file.startswith("by_hand/") else "# --- "
    start = next(i for i, line in enumerate(lines) if line.startswith(above))
    begin = next(i for i in range(start, len(lines)) if first in lines[i])
    end = next(i for i in range(begin, len(lines)) if last in lines[i])
    code = textwrap.dedent("\n".join(lines[begin : end + 1]))
    return f"```python\n{code}\n```"


def renewed(text: str) -> str:
    """A page's text with its generated parts as they are now."""
    known = parts()
    for name in re.findall(r"(?m)^<!-- begin (.*) -->$", text):
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->\n"
        if name.startswith("lines "):
            known[name] = functools.partial(lines_of, *name.removeprefix("lines ").split(" | "))
        if name not in known or text.count(begin) != 1 or text.count(end) != 1:
            raise SystemExit(f"no part of a page is called {name}, or its markers are no pair")
        head, rest = text.split(begin)
        text = f"{head}{begin}\n{known[name]()}\n\n{end}{rest.split(end)[1]}"
    return text


def main() -> None:
    shared.read(__doc__)
    for page in PAGES:
        page.write_text(renewed(page.read_text()))


if __name__ == "__main__":
    main()
