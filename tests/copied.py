"""Run a copy of a script as a user would: the one that the environment variable COPIED names.

For conftest.launch. Such a copy has its own function `reward`, or a planted mistake. It uses the
common.py beside it, if there is one, and otherwise that of here.
"""

import os
import runpy
import sys
from pathlib import Path


def main() -> None:
    copy = Path(os.environ["COPIED"])
    if (copy.parent / "common.py").exists():
        del sys.modules["common"]
        sys.path.insert(0, str(copy.parent))
    runpy.run_path(str(copy), run_name="__main__")
