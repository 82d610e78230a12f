"""Run a copy of a script as a user would: the one that the environment variable COPIED names.

For launching.launch. Such a copy has its own function `reward`, or a planted mistake. It uses the
shared files beside it, such as common.py. Those that are not there are used from here.
"""

import os
import runpy
import sys
from pathlib import Path

SHARED = ["common", "model", "run", "conversations"]
COPY = Path(os.environ["COPIED"])
if any((COPY.parent / f"{name}.py").exists() for name in SHARED):
    for name in SHARED:  # all of them, because they import each other
        sys.modules.pop(name, None)
    sys.path.insert(0, str(COPY.parent))


def main() -> None:
    runpy.run_path(str(COPY), run_name="__main__")
