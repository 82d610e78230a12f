"""Run a copy of a script as a user would: the one that the environment variable COPIED names.

For conftest.launch. Such a copy has its own function `reward`, and uses the common.py of here.
"""

import os
import runpy


def main() -> None:
    runpy.run_path(os.environ["COPIED"], run_name="__main__")
