"""Run the commands that stand under "Try it" on the pages, and write what they print beside them.

    python bench/tryit.py            all pages (about five minutes)
    python bench/tryit.py fsdp2      one page

A command block follows the line `<!-- try -->`, and the block after it has what the commands print.
They run in a copy of the repository, so they leave nothing behind.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import _tools  # noqa: F401
import shared
from shared import ROOT

BLOCK = re.compile(r"(<!-- try -->\n```bash\n(.*?)```\n\n```text\n)(.*?)```", re.DOTALL)
# Name -> file.
PAGES = {
    page.stem: page
    for page in [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    if "<!-- try -->" in page.read_text()
}
SPEED = re.compile(r"[\d,]+ tokens/s")  # differs from run to run


def run_blocks(
    page: str, programs: Path = Path(sys.executable).parent
) -> Iterator[tuple[str, str]]:
    """Run a page's blocks in order. Yields what the page shows, and what is printed now.

    Args:
        programs: the folder that has the blocks' `python` and `torchrun`.
    """
    text = PAGES[page].read_text()
    with tempfile.TemporaryDirectory() as folder:
        for file in ROOT.glob("*.py"):
            shutil.copy(file, folder)
        for name in ("bench", "by_hand", "reference", "tools", "try"):
            shutil.copytree(ROOT / name, Path(folder, name))
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
        environment["PATH"] = f"{programs}:{environment['PATH']}"
        for _, commands, shown in BLOCK.findall(text):
            done = subprocess.run(
                ["bash", "-c", commands], cwd=folder, env=environment, text=True,
                capture_output=True, timeout=900,
            )  # fmt: skip
            if not done.stdout:
                raise RuntimeError(f"{commands}\nprints nothing: {done.stderr[-2000:]}")
            yield shown, done.stdout


def is_similar(shown: str, printed: str) -> bool:
    """Compare two outputs word by word: numbers may differ by 2 %, and speeds by any factor."""
    words = [SPEED.sub("", text).split() for text in (shown, printed)]
    return len(words[0]) == len(words[1]) and all(map(is_similar_word, *words))


def is_similar_word(shown: str, printed: str) -> bool:
    number = r"-?\d[\d,]*\.?\d*(?:e[+-]\d+)?"
    if re.sub(number, "", shown) != re.sub(number, "", printed):
        return False
    values = [
        [float(each.replace(",", "")) for each in re.findall(number, word)]
        for word in (shown, printed)
    ]
    return len(values[0]) == len(values[1]) and all(
        abs(a - b) <= max(0.02 * abs(a), 1e-4) for a, b in zip(*values)
    )


def main() -> None:
    reader = shared.parser(__doc__)
    reader.add_argument("pages", metavar="PAGE", nargs="*", choices=[*PAGES, []])
    for page in reader.parse_args().pages or PAGES:
        file = PAGES[page]
        text = file.read_text()
        for (begin, _, shown), (_, printed) in zip(BLOCK.findall(text), run_blocks(page)):
            text = text.replace(f"{begin}{shown}```", f"{begin}{printed}```")
            print(page, printed, sep="\n", flush=True)
        file.write_text(text)


if __name__ == "__main__":
    main()
