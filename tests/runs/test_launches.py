"""How a run ends: in order after its last step, or at once when the numbers are not finite."""

import re

import pytest
from launching import (
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
    """The first step moves all weights so far that the matmuls of the second one overflow.

    The checkpoint of the first step is being written meanwhile, and becomes complete.
    """
    model = mixture_directory if script == EXPERTS else shape_directory
    flags = RUN_FLAGS | {"dataset": corpus, "run_dir": tmp_path, "model": model}
    flags |= {"learning_rate": 1e38, "checkpoint_every": 1, "async_checkpoint": "true"}
    done = launch(2, script, flags, [{"call": "common.sync_to_disk", "rank": 0, "do": "nap"}])
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
    [check] = re.finditer(r"refuse_non_finite\(", text)
    update = re.compile(r"optimizer\.step\(\)").search(text, check.end())
    assert "def " not in text[check.end() : update.start()]


def test_hooks_for_the_end_of_a_process_run(corpus, shape_directory, tmp_path, monkeypatch):
    """Those of a copier's libraries: only an error ends a process without them."""
    text = (ROOT / "fsdp2_pretrain.py").read_text()
    start = "    launch(main)\n"
    assert text.endswith(start)
    hook = "    import atexit\n\n    atexit.register(print, 'a hook has run')\n"
    copy = tmp_path / "fsdp2_pretrain.py"
    copy.write_text(text.removesuffix(start) + hook + start)
    monkeypatch.setenv("COPIED", str(copy))
    flags = {**SMALL, "steps": 1, "dataset": corpus, "model": shape_directory}
    done = launch(2, "copied", flags | {"run_dir": tmp_path / "run"}, orderly=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("a hook has run") == 2


ENDINGS = ["ddp_pretrain.py", "fsdp1_pretrain.py", "fsdp2_pretrain.py", "fsdp2_pp_pretrain.py"]


@pytest.mark.drill
def test_fifty_launches_end_cleanly(corpus, shape_directory, tmp_path):
    """The end of a run does not abort, hang or complain. torchrun launches the first run. The
    others are forked, and end as Python ends."""
    flags = {**SMALL, "steps": 2, "eval_every": 2, "dataset": corpus, "model": shape_directory}
    for number in share(range(50)):
        script = ENDINGS[number % len(ENDINGS)]
        own = flags | {"run_dir": tmp_path / str(number)}
        if number == 0:
            done = torchrun(2, script, *arguments(own))
        else:
            done = launch(2, script, own, orderly=True)
        assert (done.returncode, done.stderr) == (0, ""), f"launch {number}, {script}"
