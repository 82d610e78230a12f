"""A third of a large grid of cases, for .ci/run.

Grids of pairs, meshes, types, modes and mistakes took most of the drills' time, and a change rarely
breaks one of their cases alone. With GRID_SHARE, a number, each grid has only the third that the
number selects. Without it, as in `pytest -m drill`, all cases run. If you change what a grid
covers, run all of it.
"""

import os
from collections.abc import Iterable


def share(cases: Iterable) -> list:
    """Return the cases of a grid that run."""
    chosen = os.environ.get("GRID_SHARE")
    return list(cases) if chosen is None else list(cases)[int(chosen) % 3 :: 3]
