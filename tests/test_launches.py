"""How a run ends: in order after its last step, or at once when the numbers are not finite."""

import re

import pytest
from conftest import (
    EXPERTS,
    INSIDE,
    MUON,
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

PRETRAINING = [*SCRIPTS, MUON, *INSIDE, EXPERTS]


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
    assert line.startswith("error: step 2: the loss (")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]
    assert line.endswith("lower --learning_rate, or look at the data of this step")
    assert not (tmp_path / "hf").exists()
    assert [line["step"] for line in read_lines(tmp_path) if "loss" in line] == [1]


@pytest.mark.parametrize("script", [*PRETRAINING, "fsdp2_sft.py", "fsdp2_lora.py", "fsdp2_grpo.py"])
def test_every_script_checks_before_the_update(script):
    text = (ROOT / script).read_text()
    [check] = re.finditer("common.refuse_non_finite", text)
    update = re.compile(r"optimizer_step\(model|optimizer\.step\(\)").search(text, check.end())
    assert "def " not in text[check.end() : update.start()]


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
