"""What a run must survive: signals, dead, failing and stalled ranks, damaged files, full disks."""

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, SCRIPTS, SMALL, arguments, launch, metrics, small_shape, torchrun, tree
from transformers import Qwen2ForCausalLM

import common  # conftest has put it on the path

FLAGS = {**SMALL, "global_batch_tokens": 2048, "eval_every": 4, "checkpoint_every": 2, "steps": 8}
FLAGS["keep_checkpoints"] = 3


@pytest.fixture(scope="module")
def flags(corpus, shape_directory) -> dict:
    return {**FLAGS, "dataset": corpus, "model": shape_directory}


def faulty(ranks: int, faults: list[dict], flags: dict, script: str = "fsdp2_pretrain"):
    """The script with faults planted, as tests/faults.py explains."""
    return launch(ranks, script, flags, faults)


def faulty_under_torchrun(faults: list[dict], flags: dict, *options: str, **variables: str):
    """The same under torchrun itself, which restarts ranks and holds the store they meet at."""
    words = ["tests/faults.py", "fsdp2_pretrain", json.dumps(faults), *arguments(flags)]
    return torchrun(2, *options, *words, **variables)


def kept(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def losses(run_dir: Path) -> list[float]:
    training, _ = metrics(run_dir)
    assert [line["step"] for line in training] == list(range(1, len(training) + 1))
    return [line["loss"] for line in training]


def same(a: Path, b: Path) -> bool:
    return (a / "hf/model.safetensors").read_bytes() == (b / "hf/model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(flags, tmp_path_factory) -> Path:
    """A run that nothing happened to."""
    run_dir = tmp_path_factory.mktemp("whole")
    done = launch(2, "fsdp2_pretrain.py", flags | {"run_dir": run_dir})
    assert (done.returncode, done.stderr) == (0, "")
    return run_dir


@pytest.fixture
def copied(whole, tmp_path) -> Path:
    """A copy of it that may be harmed, as it was after step 6."""
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir)
    shutil.rmtree(run_dir / "checkpoints/step_00000008")
    return run_dir


# --- Signals --------------------------------------------------------------------------------------


def test_signals_in_every_phase_lose_nothing(flags, whole, tmp_path):
    """A step, a validation, a checkpoint: one after the other in one run."""
    flags = flags | {"run_dir": tmp_path}
    phases = [
        ({"call": "Run.log_step", "number": 3, "rank": 1, "do": "interrupt twice"}, 3),
        ({"call": "Run.log_validation", "rank": 0, "do": "terminate"}, 5),  # of step 4
        ({"call": "Checkpoints.complete", "rank": 0, "do": "interrupt twice"}, 7),  # of step 6
    ]
    for fault, step in phases:
        done = faulty(2, [fault], flags)
        assert (done.returncode, done.stderr) == (0, ""), fault
        last = done.stdout.splitlines()[-1]
        there = f"{tmp_path}/checkpoints/step_0000000{step}"
        assert last.startswith(f"stopped after step {step} of 8, saved in {there}")
        assert last.endswith("; the same command goes on from there")
        assert kept(tmp_path)[-1] == f"step_0000000{step}"
        assert not (tmp_path / "hf").exists()
    done = launch(2, "fsdp2_pretrain.py", flags)
    assert (done.returncode, done.stderr) == (0, "")
    assert losses(tmp_path) == losses(whole) and same(tmp_path, whole)
    assert metrics(tmp_path)[1] == metrics(whole)[1]

    again = launch(2, "fsdp2_pretrain.py", flags)
    assert again.returncode == 0 and "going on from" in again.stdout
    assert losses(tmp_path) == losses(whole) and same(tmp_path, whole)


def test_a_signal_before_the_first_step_ends_the_run_and_leaves_nothing(flags, tmp_path):
    fault = {"call": "load_rows", "do": "terminate"}
    done = faulty(0, [fault], flags | {"run_dir": tmp_path / "run"})
    assert done.returncode == -signal.SIGTERM
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.drill), signal.SIGINT]
)
def test_signal_to_the_launcher(flags, tmp_path, number):
    """torchrun passes it on, and itself ends with 1; one process alone ends with 0."""
    alone = number == signal.SIGINT
    command = [sys.executable]
    command += (
        [] if alone else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    )
    words = arguments(flags | {"run_dir": tmp_path, "steps": 100_000})
    with subprocess.Popen(
        [*command, "ddp_pretrain.py", *words], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    ) as run:  # fmt: skip
        wait_for_steps(tmp_path, 5)
        run.send_signal(number)
        run.send_signal(number) if alone else None
        out, _ = run.communicate(timeout=60)
    assert run.returncode == (0 if alone else 1)
    step = metrics(tmp_path)[0][-1]["step"]
    assert f"stopped after step {step} of 100000" in out
    assert kept(tmp_path)[-1] == f"step_{step:08d}"


def wait_for_steps(run_dir: Path, number: int) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        file = run_dir / "metrics.jsonl"
        if file.exists() and len(file.read_text().splitlines()) >= number:
            return
        time.sleep(0.1)
    raise TimeoutError(f"no {number} lines in {file}")


# --- Dead, failing and stalled ranks --------------------------------------------------------------


@pytest.fixture(scope="module")
def frozen(flags, tmp_path_factory):
    """Futures: how many seconds runs take whose rank 0 freezes.

    torchrun waits half a minute of it for the frozen rank, in which other tests go on. In the
    second run rank 0 itself holds the store, as in docs/runs.md for several nodes.
    """
    fault = {"call": "Run.log_step", "number": 3, "rank": 0, "do": "freeze"}

    def seconds(share: str) -> float:
        own = flags | {"run_dir": tmp_path_factory.mktemp("frozen"), "timeout_minutes": 0.2}
        began = time.monotonic()
        done = faulty_under_torchrun([fault], own, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=share)
        assert done.returncode == 1
        return time.monotonic() - began

    with ThreadPoolExecutor() as both:
        yield [both.submit(seconds, share) for share in "01"]


@pytest.mark.drill
@pytest.mark.usefixtures("frozen")
def test_torchrun_restarts_go_on_from_the_newest_checkpoint(flags, whole, tmp_path):
    """Even with --resume never: only the first start is a fresh one."""
    faults = [
        {"call": "Run.log_step", "number": 5, "rank": 1, "restart": 0, "do": "kill"},
        {"call": "Run.log_step", "number": 3, "rank": 0, "restart": 1, "do": "raise"},
    ]
    flags = flags | {"run_dir": tmp_path, "resume": "never"}
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # as docs/runs.md has it
    done = faulty_under_torchrun(faults, flags, "--max-restarts=3", **variables)
    assert done.returncode == 0, done.stderr
    assert "ValueError: a fault on purpose" in done.stderr
    assert losses(tmp_path) == losses(whole) and same(tmp_path, whole)


@pytest.mark.parametrize(
    "ranks, script",
    [(2, "fsdp2_pretrain"), pytest.param(4, "fsdp2_pp_pretrain", marks=pytest.mark.drill)],
)
def test_a_rank_that_fails_speaks_alone(flags, tmp_path, ranks, script):
    """torch's pipelines hide the cause: there the other rank of a stage fails in its forward."""
    fault = {"call": "to_device", "number": 9, "rank": ranks - 1, "do": "raise"}
    started = time.monotonic()
    done = faulty(ranks, [fault], flags | {"run_dir": tmp_path}, script)
    assert done.returncode == 1 and time.monotonic() - started < 60
    assert done.stderr.count("Traceback") == 1
    assert "ValueError: a fault on purpose" in done.stderr


@pytest.mark.parametrize(
    "script, late, own",
    [
        pytest.param("fsdp2_pretrain", 1, {"dp_replicate": 2}, marks=pytest.mark.drill),
        pytest.param(
            "fsdp2_pp_pretrain", 0, {"global_batch_tokens": 1024}, marks=pytest.mark.drill
        ),
        pytest.param("ddp_pretrain", 0, {}, marks=pytest.mark.drill),
        pytest.param("fsdp1_pretrain", 1, {}, marks=pytest.mark.drill),
    ],
)
def test_a_stalled_rank_ends_the_run_in_time(flags, tmp_path, script, late, own):
    """It stops in the middle of step 3, between its two micro-batches."""
    fault = {"call": "to_device", "number": 6, "rank": late, "do": "sleep"}
    began = time.monotonic()
    flags = flags | {"run_dir": tmp_path, "timeout_minutes": 0.1} | own
    done = faulty(2, [fault], flags, script)
    assert done.returncode == 1 and time.monotonic() - began < 66
    assert re.search("[Tt]imed out waiting (6|12)000ms", done.stderr), done.stderr
    assert len(losses(tmp_path)) == 2


@pytest.mark.drill
def test_a_frozen_rank_0_ends_the_run_in_time(frozen):
    assert all(run.result() < 90 for run in frozen)


def ranks_of(launcher: subprocess.Popen) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(launcher.pid)], capture_output=True, text=True)
    return [int(number) for number in found.stdout.split()]


def wait_until(condition: Callable, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} seconds"
        time.sleep(0.1)


@pytest.mark.parametrize("moment", ["importing", pytest.param("training", marks=pytest.mark.drill)])
def test_ranks_without_a_launcher_end_within_a_minute(flags, tmp_path, moment):
    """torchrun is killed; ranks that train save first."""
    run_dir = tmp_path / "run"
    words = arguments(flags | {"run_dir": run_dir, "steps": 100_000, "checkpoint_every": 10**6})
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with open(tmp_path / "out.txt", "w") as out:
        launcher = subprocess.Popen(
            [*command, "ddp_pretrain.py", *words], cwd=ROOT, stdout=out, stderr=out
        )
        wait_until(lambda: len(ranks_of(launcher)) == 2, 30)
        ranks = ranks_of(launcher)
        if moment == "training":
            wait_for_steps(run_dir, 3)
        launcher.kill()
        launcher.wait()
    wait_until(lambda: not any(Path(f"/proc/{rank}/exe").exists() for rank in ranks), 60)
    said = (tmp_path / "out.txt").read_text()
    if moment == "training":
        step = metrics(run_dir)[0][-1]["step"]
        assert kept(run_dir) == [f"step_{step:08d}"] and f"stopped after step {step}" in said
    else:
        assert "the launcher of this rank has died" in said


def test_two_runs_in_one_directory(flags, tmp_path):
    fault = {"call": "Run.log_step", "number": 2, "do": "sleep"}
    words = [str(ROOT / "tests/faults.py"), "fsdp2_pretrain", json.dumps([fault])]
    words += arguments(flags | {"run_dir": tmp_path})
    first = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL)
    try:
        wait_for_steps(tmp_path, 1)
        second = launch(1, "ddp_pretrain.py", flags | {"run_dir": tmp_path})
        assert second.returncode == 1
        assert f"error: --run_dir {tmp_path} cannot be written or is in use" in second.stderr
        assert len(losses(tmp_path)) == 1
    finally:
        first.kill()
        first.wait()


# --- Disks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("background, full", [("false", True), ("true", True), ("true", False)])
def test_a_disk_that_cannot_be_written(flags, tmp_path, background, full):
    """Full for the shards of rank 1; or broken, as rank 0 sums up the second checkpoint."""
    fault = {"call": "Run.log_validation", "rank": 1, "do": "limit file size"}
    if not full:
        fault = {"call": "sum_of", "number": 10, "rank": 0, "do": "read only"}
    flags = flags | {"run_dir": tmp_path, "async_checkpoint": background}
    done = faulty(2, [fault], flags)
    assert done.returncode == 1
    assert len(losses(tmp_path)) <= 6  # the run ends when the next checkpoint is due, if not before
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "Traceback" not in done.stderr, done.stderr
    assert f"error: cannot write {tmp_path}/checkpoints/step_00000004" in errors[0]
    assert f"({tmp_path}/checkpoints/step_00000002 is intact)" in errors[0]
    assert [name for name in kept(tmp_path) if not name.endswith(".tmp")] == ["step_00000002"]
    assert common.damage(tmp_path / "checkpoints/step_00000002") is None


def test_a_full_disk_at_the_end_keeps_the_last_checkpoint(flags, whole, tmp_path):
    fault = {"call": "Run.finish", "rank": 0, "do": "limit file size"}
    flags = flags | {"run_dir": tmp_path}
    done = faulty(2, [fault], flags)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert (
        f"error: cannot write {tmp_path}/hf ({tmp_path}/checkpoints/step_00000008 is intact)"
        in (done.stderr)
    )
    assert not (tmp_path / "hf").exists()
    done = launch(2, "fsdp2_pretrain.py", flags)
    assert (done.returncode, done.stderr) == (0, "")
    assert same(tmp_path, whole)


# --- Damage ---------------------------------------------------------------------------------------


def harm(checkpoint: Path, name: str, how: str) -> None:
    file = next(checkpoint.rglob(name))
    data = bytearray(file.read_bytes())
    if how == "missing":
        file.unlink()
        return
    if how == "flipped":
        data[len(data) // 2] ^= 1
    file.write_bytes(data[: len(data) // 2] if how == "truncated" else data)


@pytest.mark.parametrize("how", ["missing", "truncated", "flipped"])
@pytest.mark.parametrize(
    "name", ["__1_0.distcp", ".metadata", "checkpoint.json", "config.json", "tokenizer.json"]
)
def test_damage_is_noticed(copied, name, how):
    path = copied / "checkpoints/step_00000006"
    assert common.damage(path) is None
    harm(path, name, how)
    assert common.damage(path) is not None


def test_a_file_that_cannot_be_read_is_damage(copied, monkeypatch):
    def fails(file: Path) -> str:
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(common, "sum_of", fails)
    assert "Permission denied" in common.damage(copied / "checkpoints/step_00000006")


def test_the_newest_checkpoint_may_be_named_in_another_way(flags, copied):
    path = copied / "checkpoints" / ".." / "checkpoints/step_00000006"
    done = launch(0, "fsdp2_pretrain", flags | {"run_dir": copied, "resume": path})
    assert (done.returncode, done.stderr) == (0, "")
    assert f"going on from {path}" in done.stdout


def test_auto_takes_the_newest_undamaged_checkpoint(flags, whole, copied):
    newest = copied / "checkpoints/step_00000006"
    harm(newest, "__0_0.distcp", "flipped")
    (copied / "checkpoints/step_00000007.tmp").mkdir()
    done = launch(2, "fsdp2_pretrain.py", flags | {"run_dir": copied})
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{newest} is damaged or no checkpoint: model/__0_0.distcp" in done.stdout
    assert losses(copied) == losses(whole) and same(copied, whole)
    assert kept(copied) == ["step_00000004", "step_00000006", "step_00000008"]


def test_what_a_resume_refuses(flags, texts, copied, tmp_path):
    newest, harmed = copied / "checkpoints/step_00000006", tmp_path / "harmed"
    shutil.copytree(newest, harmed)
    harm(harmed, "__1_0.distcp", "flipped")
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[1:]))
    flags = flags | {"resume": newest, "run_dir": tmp_path / "new"}
    cases = [
        ({"resume": harmed}, "no undamaged checkpoint to go on from"),
        ({"resume": tmp_path}, "no undamaged checkpoint to go on from"),
        ({"dataset": other}, f"--dataset {flags['dataset']} \\(now {other}\\)"),
        ({"model": "tiny"}, f"--model {flags['model']} \\(now tiny\\)"),
        (
            {"seed": 5, "batching": "packed"},
            "--batching bucketed \\(now packed\\), --seed 0 .now 5",
        ),
        ({"max_length": 256}, "--max_length 512 \\(now 256\\)"),
        ({"global_batch_tokens": 4096}, "--global_batch_tokens 2048 \\(now 4096\\)"),
        (
            {"tokenizer": newest / "hf", "dataset": other},
            f"--tokenizer bytes \\(now {newest}/hf\\)",
        ),
        (
            {"run_dir": copied, "resume": copied / "checkpoints/step_00000004"},
            "6 is later; to begin anew take",
        ),
        ({"run_dir": copied, "resume": "never"}, "holds checkpoints; to begin anew take"),
    ]
    before = tree(copied)
    for change, expected in cases:
        done = launch(0, "fsdp1_pretrain", flags | change)
        assert done.returncode == 2 and re.search(expected, done.stderr), (change, done.stderr)
        assert done.stderr.count("\n") == 1
    assert tree(copied) == before
    assert not (tmp_path / "new").exists()
    del flags["dataset"]
    done = launch(0, "fsdp2_sft", flags)
    assert done.returncode == 2 and "(now stdlib-docstrings)" in done.stderr, done.stderr


def test_a_refused_start_changes_nothing(flags, weights_directory, tmp_path):
    """Metrics of a run that died before its first checkpoint, and weights that do not fit."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    facts = {"flags": {"checkpoint_every": 2, "async_checkpoint": False}}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    before = tree(tmp_path)
    start = {"init_from": weights_directory, "model": "tiny", "tokenizer": "bytes"}
    done = launch(2, "fsdp2_pretrain", flags | start | {"run_dir": tmp_path})
    assert done.returncode == 1 and "error: --init_from" in done.stderr, done.stderr
    assert tree(tmp_path) == before


def test_names_that_are_no_checkpoints_and_old_ones_without_description(flags, whole, copied):
    """They are passed over, with a line where one could have been meant, and never removed."""
    folder = copied / "checkpoints"
    for name in ("step_00000006_1", "step_00000006 (copy)", "step_00000007", "step_6"):
        shutil.copytree(folder / "step_00000006", folder / name)
    (folder / "step_00000002").mkdir(exist_ok=True)
    (folder / "step_00000002/checkpoint.json").write_text("")
    (folder / "step_00000001").mkdir()
    strange = {
        "step_00000006_1",
        "step_00000006 (copy)",
        "step_6",
        "step_00000001",
        "step_00000002",
    }
    done = launch(2, "fsdp2_pretrain.py", flags | {"run_dir": copied, "keep_checkpoints": 1})
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{folder}/step_00000007 is damaged or no checkpoint" in done.stdout
    assert f"{folder}/step_00000002 is left alone" in done.stdout
    assert losses(copied) == losses(whole) and same(copied, whole)
    assert strange <= set(kept(copied)) and "step_00000008" in kept(copied)


def test_steps_0_prepares_the_data_alone(flags, tmp_path):
    done = launch(0, "fsdp2_pretrain", flags | {"run_dir": tmp_path / "run", "steps": 0})
    assert (done.returncode, done.stderr) == (0, "")
    assert "prepared" in done.stdout and not (tmp_path / "run").exists()


# --- What comes after training must not fail it ---------------------------------------------------


def test_a_reader_who_leaves_and_a_terminal_of_ascii_do_not_fail_a_run(flags, tmp_path):
    words = arguments(flags | {"run_dir": tmp_path / "run", "steps": 2})
    command = f"{sys.executable} fsdp2_pretrain.py {' '.join(words)} | head -1"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], cwd=ROOT, env=environment, capture_output=True
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert (tmp_path / "run/hf/model.safetensors").exists()


def test_weights_of_nan_leave_outputs_and_no_sample(flags, tmp_path):
    model = Qwen2ForCausalLM(small_shape())
    model.model.norm.weight.data.fill_(torch.nan)
    model.save_pretrained(tmp_path / "weights")
    flags = flags | {"init_from": tmp_path / "weights", "run_dir": tmp_path / "run", "steps": 2}
    done = launch(
        1,
        "fsdp2_pretrain",
        {k: v for k, v in flags.items() if k != "model"} | {"tokenizer": "bytes"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "no sample of the model" in done.stdout
    training, _ = metrics(tmp_path / "run")
    assert [line["loss"] for line in training] == [None, None]  # JSON knows no NaN


# --- Checkpoints move -----------------------------------------------------------------------------


@pytest.mark.drill
def test_all_pairs_of_scripts_and_styles():
    done = torchrun(2, "bench/pairs.py")
    assert (done.returncode, done.stderr) == (0, "")
    rows = [row for row in done.stdout.splitlines() if " stateful " in row or " separate " in row]
    assert len(rows) == 12 + 12  # of a dense model, and of a mixture of experts
    assert all(row.count("| equal") == 6 for row in rows), done.stdout


@pytest.mark.parametrize(
    "ranks, script, style",
    [
        (1, "ddp_pretrain", "stateful"),
        pytest.param(4, "fsdp1_pretrain", "separate", marks=pytest.mark.drill),
        pytest.param(4, "fsdp2_tp_pretrain", "separate", marks=pytest.mark.drill),
        pytest.param(4, "fsdp2_cp_pretrain", "stateful", marks=pytest.mark.drill),
        pytest.param(4, "fsdp2_pp_pretrain", "separate", marks=pytest.mark.drill),
        pytest.param(2, "fsdp2_pp_pretrain", "stateful", marks=pytest.mark.drill),
    ],
)
def test_another_world_size_goes_on(flags, whole, tmp_path, ranks, script, style):
    """From 2 ranks to 1 and 4; and from there back to 2. The flags that may change, change."""
    change = {"run_dir": tmp_path, "checkpoint_style": style, "eval_every": 3}
    start = whole / "checkpoints/step_00000006"
    done = launch(ranks, script, flags | change | {"resume": start})
    assert (done.returncode, done.stderr) == (0, "")
    expected = [line["loss"] for line in metrics(whole)[0]]
    got = {line["step"]: line["loss"] for line in metrics(tmp_path)[0]}
    assert list(got) == [7, 8]
    assert all(abs(got[step] / expected[step - 1] - 1) < 1e-4 for step in got)

    done = launch(2, "fsdp2_pretrain.py", flags | change | {"steps": 9})
    assert (done.returncode, done.stderr) == (0, "")
    again = {"run_dir": tmp_path / "longer", "resume": whole / "checkpoints/step_00000008"}
    longer = launch(2, "fsdp2_pretrain.py", flags | again | {"steps": 9})
    assert longer.returncode == 0
    one, other = (metrics(run_dir)[0][-1] for run_dir in (tmp_path, tmp_path / "longer"))
    assert one["step"] == other["step"] == 9 and one["tokens"] == other["tokens"]
    assert abs(one["loss"] / other["loss"] - 1) < 1e-4


def test_another_weight_decay_holds_after_a_resume(flags, whole, tmp_path):
    """Hyper-parameters come with the moments, but the flag of the new start counts."""
    start = {"resume": whole / "checkpoints/step_00000008", "steps": 9}
    for decay in (0.0, 0.1, 0.5):  # 0.1 is what it was written with
        change = {"run_dir": tmp_path / str(decay), "weight_decay": decay}
        assert launch(2, "fsdp2_pretrain", flags | start | change).returncode == 0
    assert not same(tmp_path / "0.0", tmp_path / "0.1")
    assert not same(tmp_path / "0.5", tmp_path / "0.1")


def test_export_and_init_from_a_run(flags, whole, tmp_path):
    path = whole / "checkpoints/step_00000008"

    def command(*words: object) -> subprocess.CompletedProcess:
        program = [sys.executable, "common.py", *map(str, words)]
        return subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=120)

    out = tmp_path / "out"
    done = command("export", path, out)
    assert (done.returncode, done.stderr) == (0, "")
    assert {p.name for p in out.iterdir()} == {p.name for p in (whole / "hf").iterdir()}
    assert (out / "model.safetensors").read_bytes() == (whole / "hf/model.safetensors").read_bytes()
    for words in (("export", path, out), ("export", tmp_path, tmp_path / "x"), ("show", path)):
        refused = command(*words)
        assert refused.returncode == 2 and refused.stderr.startswith("error: ")

    flags = {key: value for key, value in flags.items() if key != "model"} | {"steps": 1}
    for name, start in {"run": whole, "hf": whole / "hf", "out": out}.items():
        change = {"init_from": start, "run_dir": tmp_path / f"from_{name}"}
        assert launch(1, "fsdp1_pretrain.py", flags | change).returncode == 0
    from_run, from_hf, from_out = (
        losses(tmp_path / f"from_{name}") for name in ("run", "hf", "out")
    )
    assert from_run == from_hf == from_out


# --- The order of things --------------------------------------------------------------------------


def checkpoints_of(run_dir: Path, monkeypatch, keep: int = 2) -> common.Checkpoints:
    """Of one rank, without model and process group."""

    monkeypatch.setattr(common, "gather", lambda value, group: [value])
    monkeypatch.setattr(common.dist, "new_group", lambda **_: None)
    monkeypatch.setattr(common.dist, "barrier", lambda group: None)
    return common.Checkpoints(
        run_dir / "checkpoints",
        keep=keep,
        facts={"flags": {}, "contents": "x"},
        rank=0,
        world_size=1,
        timeout=timedelta(minutes=1),
    )


def save_file(directory: Path) -> None:
    directory.mkdir(parents=True)
    (directory / "__0_0.distcp").write_bytes(b"tensors")


@pytest.mark.parametrize("style", ["stateful", "separate"])
@pytest.mark.parametrize("script", [*SCRIPTS, "fsdp2_sft.py", "fsdp2_grpo.py"])
def test_what_the_background_writes_is_the_state_of_that_moment(script, style, monkeypatch):
    module, seen = importlib.import_module(script.removesuffix(".py")), {}
    weight = torch.ones(3)
    tree = {"model": {"w": weight}, "optimizer": {"m": weight + 1}}
    state = SimpleNamespace(state_dict=lambda: dict(tree))
    config = SimpleNamespace(checkpoint_style=style, async_checkpoint=True)
    monkeypatch.setattr(
        module.dcp, "save", lambda tree, checkpoint_id, **_: seen.update({checkpoint_id: tree})
    )
    monkeypatch.setattr(module.dist, "get_rank", lambda: 1)  # rank 0 writes hf/, too
    write = module.save_checkpoint(state, None, None, config, None)
    assert not seen
    weight.add_(1)  # training goes on
    write(Path("x"))
    if style == "separate":
        assert list(seen) == [Path("x/model"), Path("x/optimizer")]
        model = seen[Path("x/model")]
    else:
        assert list(seen) == [Path("x")]
        model = seen[Path("x")]["app"]["model"]
    assert model["w"].tolist() == [1, 1, 1]


def test_all_is_on_the_disk_before_the_rename_and_old_ones_go_after(tmp_path, monkeypatch):
    happened, real_rename = [], Path.rename
    synced = set()
    monkeypatch.setattr(common, "sync", lambda *paths: synced.update(paths))

    def rename(path: Path, target: Path) -> Path:
        if path.suffix == ".tmp":  # all of it is on the disk
            assert {path, *path.rglob("*")} <= synced
        else:
            assert (path.parent / "step_00000002").exists() and path.parent in synced
        happened.append(f"rename {path.name}")
        return real_rename(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    made = checkpoints_of(tmp_path, monkeypatch, keep=1)
    for step in (1, 2):
        happened.clear()
        synced.clear()
        made.write_now(save_file, {"step": step})
    assert happened == ["rename step_00000002.tmp", "rename step_00000001"]
    assert kept(tmp_path) == ["step_00000002"]
    assert common.damage(made.directory / "step_00000002") is None


def test_a_save_waits_until_the_one_before_is_written(tmp_path, monkeypatch):
    """Both use the stager's memory: the second's state must not get into the first."""
    made, written = checkpoints_of(tmp_path, monkeypatch), {}
    staged = {}  # the memory that each save copies into

    def save(value: int) -> Callable[[Path], None]:
        staged["value"] = value

        def write(directory: Path) -> None:
            time.sleep(0.2)
            written[directory.name] = staged["value"]
            save_file(directory)

        return write

    for step in (1, 2):
        made.write(partial(save, step), {"step": step}, in_background=True)
    made.wait()
    assert written == {"step_00000001.tmp": 1, "step_00000002.tmp": 2}


def test_left_overs_of_a_write_go_before_the_next(tmp_path, monkeypatch):
    made = checkpoints_of(tmp_path, monkeypatch)
    for name in ("step_00000001.tmp", "mine.tmp"):
        save_file(tmp_path / "checkpoints" / name)
    made.write_now(save_file, {"step": 1})
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"step_00000001", "mine.tmp"}


@pytest.mark.parametrize(
    "ending, code, said",
    [("sys.exit()", 0, ""), ("sys.exit(3)", 3, ""), ("sys.exit('why')", 1, "why\n")],
)
def test_a_main_may_leave_by_sys_exit(ending, code, said):
    program = f"import sys, common\ndef main(): {ending}\ncommon.launch(main)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, said)


def test_the_newest_by_number_and_the_best_stay(tmp_path, monkeypatch):
    made = checkpoints_of(tmp_path, monkeypatch)
    for step, loss in ((9, 3.0), (10, 1.0), (9_999, 2.0), (10_000, None), (99_999_999, 4.0)):
        made.write_now(save_file, {"step": step, "validation_loss": loss})
    names = [path.name for path in made.all()]
    assert names == ["step_99999999", "step_00010000", "step_00000010"]


def test_wandb_goes_on_with_the_same_run(flags, tmp_path):
    flags = flags | {"run_dir": tmp_path, "wandb_project": "test", "steps": 4}
    fault = {"call": "Run.log_step", "number": 2, "do": "terminate"}
    assert faulty(1, [fault], flags).returncode == 0
    assert launch(1, "fsdp2_pretrain.py", flags).returncode == 0
    logs = {path.name.split("-")[-1] for path in tmp_path.glob("wandb/offline-run-*")}
    assert len(logs) == 1 and len(list(tmp_path.glob("wandb/offline-run-*"))) >= 1


@pytest.mark.drill
def test_a_pipeline_passes_torchs_own_checks(flags, tmp_path, monkeypatch):
    """They compare the calls of all ranks, of which stages make unequally many."""
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    small_shape(num_hidden_layers=4).save_pretrained(tmp_path / "shape")
    own = {"pipeline_parallel": 4, "model": tmp_path / "shape", "run_dir": tmp_path / "run"}
    done = launch(4, "fsdp2_pp_pretrain", flags | own)
    assert done.returncode == 0, done.stderr


# --- Kill storm -----------------------------------------------------------------------------------


@pytest.mark.drill
@pytest.mark.parametrize(
    "script, background, kills, tokens",
    [
        ("ddp_pretrain", "false", 8, 16384),
        ("fsdp2_pretrain", "true", 12, 16384),
        ("fsdp2_tp_pretrain", "false", 4, 2048),
        ("fsdp2_cp_pretrain", "true", 4, 8192),
        ("fsdp2_pp_pretrain", "true", 4, 8192),
        ("fsdp2_ep_pretrain", "false", 4, 8192),
    ],
)
def test_a_run_killed_again_and_again_ends_as_if_nothing_had_happened(
    flags, mixture_directory, tmp_path, script, background, kills, tokens
):
    """With global batches that make steps slow enough to be hit."""
    if script == "fsdp2_ep_pretrain":
        flags = flags | {"model": mixture_directory}
    flags = flags | {"steps": 3 * kills, "checkpoint_every": 2, "async_checkpoint": background}
    flags |= {"global_batch_tokens": tokens}
    whole, storm = tmp_path / "whole", tmp_path / "storm"
    program = [sys.executable, str(ROOT / "tests/storm.py"), script]
    for number, run_dir in ((0, whole), (kills, storm)):
        words = [str(number), "1", *arguments(flags | {"run_dir": run_dir})]
        done = subprocess.run([*program, *words], capture_output=True, text=True, timeout=900)
        assert (done.returncode, done.stderr) == (0, ""), done.stdout
    print(done.stdout)
    assert sum("-9" in line for line in done.stdout.splitlines()) == kills
    assert losses(storm) == losses(whole) and same(storm, whole)
    assert kept(storm) == kept(whole)
    assert {p.name for p in storm.iterdir()} == {p.name for p in whole.iterdir()}
