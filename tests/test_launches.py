"""Twenty launches in a row: the end of a run must not abort, hang or complain.

All launches of the other tests end in this way too; the first three here are torchrun's own.
"""

import pytest
from conftest import SCRIPTS, SMALL, arguments, launch, torchrun


@pytest.mark.drill
def test_twenty_launches_end_cleanly(corpus, shape_directory, tmp_path):
    flags = {**SMALL, "steps": 2, "eval_every": 2, "dataset": corpus, "model": shape_directory}
    for number in range(20):
        script = SCRIPTS[number % 3]
        own = flags | {"run_dir": tmp_path / str(number)}
        done = torchrun(2, script, *arguments(own)) if number < 3 else launch(2, script, own)
        assert (done.returncode, done.stderr) == (0, ""), f"launch {number}, {script}"
