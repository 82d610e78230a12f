"""Import this first: it puts tools/ on the path, whose shared.py the programs here use."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
