"""Runs the copy of a script that the environment variable COPIED names, as its users run theirs.

For conftest.launch: such a copy has another function `reward`, and uses the common.py of here.
"""

import os
import runpy


def main() -> None:
    runpy.run_path(os.environ["COPIED"], run_name="__main__")
