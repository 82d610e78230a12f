"""Twenty launches in a row: the end of a run must not abort, hang or complain.

The first of each script is torchrun's own; the others are forked and end as Python ends.
"""

import pytest
from conftest import EXPERTS, INSIDE, SCRIPTS, SMALL, arguments, launch, torchrun


@pytest.mark.drill
def test_twenty_launches_end_cleanly(corpus, shape_directory, mixture_directory, tmp_path):
    flags = {**SMALL, "steps": 2, "eval_every": 2, "dataset": corpus}
    scripts = [*SCRIPTS, *INSIDE, EXPERTS]
    for number in range(20):
        script, own = scripts[number % len(scripts)], flags | {"run_dir": tmp_path / str(number)}
        own["model"] = mixture_directory if script == EXPERTS else shape_directory
        if number < len(scripts):
            done = torchrun(2, script, *arguments(own))
        else:
            done = launch(2, script, own, orderly=True)
        assert (done.returncode, done.stderr) == (0, ""), f"launch {number}, {script}"
