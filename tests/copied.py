"""Run a copy of a script as a user would: the one that the environment variable COPIED names.

For conftest.launch. Such a copy has its own function `reward`, or a planted mistake. It uses the
shared files beside it, such as common.py. Those that are not there are used from here.
"""

import os
import runpy
import sys
from pathlib import Path

SHARED = ["common", "model", "run", "conversations"]


def main() -> None:
    copy = Path(os.environ["COPIED"])
    if any((copy.parent / f"{name}.py").exists() for name in SHARED):
        for name in SHARED:  # all of them, because they import each other
            sys.modules.pop(name, None)
        sys.path.insert(0, str(copy.parent))
    runpy.run_path(str(copy), run_name="__main__")
