"""How a run ends: in order after its last step, or at once when the numbers are not finite."""

import math
from types import SimpleNamespace

import pytest
from conftest import (
    EXPERTS,
    INSIDE,
    ROOT,
    RUN_FLAGS,
    SCRIPTS,
    SMALL,
    arguments,
    launch,
    read_lines,
    torchrun,
)
from grid import share

import common

PRETRAINING = [*SCRIPTS, *INSIDE, EXPERTS]


@pytest.mark.parametrize(
    "script",
    ["fsdp2_pretrain.py"]
    + [
        pytest.param(script, marks=pytest.mark.drill)
        for script in share(s for s in PRETRAINING if s != "fsdp2_pretrain.py")
    ],
)
def test_a_loss_that_is_not_finite_ends_the_run_before_a_checkpoint(
    corpus, shape_directory, mixture_directory, tmp_path, script
):
    """The first step moves all weights so far that the matmuls of the second one overflow."""
    model = mixture_directory if script == EXPERTS else shape_directory
    flags = RUN_FLAGS | {"dataset": corpus, "run_dir": tmp_path, "model": model}
    flags |= {"learning_rate": 1e38, "checkpoint_every": 1}
    done = launch(2, script, flags)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    newest = tmp_path / "checkpoints/step_00000001"
    assert line.startswith("error: step 2: the loss is not finite")
    assert f"the newest checkpoint is {newest}" in line
    assert line.endswith("lower --learning_rate, or look at the data of this step")
    assert [path.name for path in newest.parent.iterdir()] == [newest.name]
    assert not (tmp_path / "hf").exists()
    assert [line["step"] for line in read_lines(tmp_path) if "loss" in line] == [1, 2]
    assert read_lines(tmp_path)[-1]["loss"] is None


@pytest.mark.parametrize("last", [None, "runs/x/checkpoints/step_00000100"])
@pytest.mark.parametrize("name, value", [("loss", math.nan), ("grad_norm", math.inf)])
def test_what_is_not_finite_is_said_with_the_newest_checkpoint(name, value, last):
    checkpoints = SimpleNamespace(last=last, wait=lambda: None)
    measured = {"loss": 1.0, "grad_norm": 1.0}
    common.Checkpoints.refuse_non_finite(checkpoints, 150, measured)
    with pytest.raises(common.Refusal) as refusal:
        common.Checkpoints.refuse_non_finite(checkpoints, 150, measured | {name: value})
    assert refusal.value.code == 1
    for part in ("step 150", name, last or "no checkpoint yet"):
        assert part in str(refusal.value)


@pytest.mark.parametrize("script", [*PRETRAINING, "fsdp2_sft.py", "fsdp2_grpo.py"])
def test_every_script_checks_before_it_saves(script):
    main = (ROOT / script).read_text().partition("def main() -> None:")[2]
    assert 0 < main.index("checkpoints.refuse_non_finite(") < main.index("checkpoints.save(")


@pytest.mark.drill
def test_twelve_launches_end_cleanly(corpus, shape_directory, mixture_directory, tmp_path):
    """The end of a run does not abort, hang or complain. torchrun launches the first run. The
    others are forked, and end as Python ends."""
    flags = {**SMALL, "steps": 2, "eval_every": 2, "dataset": corpus}
    for number in range(12):
        script = PRETRAINING[number % len(PRETRAINING)]
        own = flags | {"run_dir": tmp_path / str(number)}
        own["model"] = mixture_directory if script == EXPERTS else shape_directory
        if number == 0:
            done = torchrun(2, script, *arguments(own))
        else:
            done = launch(2, script, own, orderly=True)
        assert (done.returncode, done.stderr) == (0, ""), f"launch {number}, {script}"
