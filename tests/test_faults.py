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
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, SCRIPTS, SMALL, arguments, launch, metrics, torchrun
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import common  # conftest has put it on the path

FLAGS = {**SMALL, "global_batch_tokens": 2048, "eval_every": 4, "checkpoint_every": 2, "steps": 8}
FLAGS["keep_checkpoints"] = 3


@pytest.fixture(scope="module")
def flags(corpus, shape_directory) -> dict:
    return {**FLAGS, "dataset": corpus, "model": shape_directory}


def faulty(ranks: int, faults: list[dict], flags: dict, script: str = "fsdp2_pretrain"):
    """The script with faults planted, as tests/faults.py explains."""
    return launch(ranks, script, flags, faults)


def faulty_under_torchrun(faults: list[dict], flags: dict, *options: str):
    """The same under torchrun itself, which restarts ranks and holds the store they report to."""
    words = ["tests/faults.py", "fsdp2_pretrain", json.dumps(faults), *arguments(flags)]
    return torchrun(2, *options, *words)


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
    """Start-up, a step, a validation, a checkpoint: one after the other in one run."""
    flags = flags | {"run_dir": tmp_path}
    phases = [
        ({"call": "load_batches", "do": "terminate"}, None),
        ({"call": "Run.log_step", "number": 3, "rank": 1, "do": "interrupt twice"}, 3),
        ({"call": "Run.log_validation", "rank": 0, "do": "terminate"}, 4),
        ({"call": "Checkpoints.publish", "rank": 0, "do": "interrupt twice"}, 6),
    ]
    for fault, step in phases:
        done = faulty(2, [fault], flags)
        assert (done.returncode, done.stderr) == (0, ""), fault
        last = done.stdout.splitlines()[-1]
        if step is None:
            assert last == "stopped before the first step; the same command starts again"
            continue
        assert last.startswith(f"stopped after step {step} of 8, saved in {tmp_path}/checkpoints")
        assert last.endswith("; the same command goes on from there")
        assert kept(tmp_path)[-1] == f"step_0000000{step}"
        assert not (tmp_path / "hf").exists()
    done = launch(2, "fsdp2_pretrain.py", flags)
    assert (done.returncode, done.stderr) == (0, "")
    assert losses(tmp_path) == losses(whole) and same(tmp_path, whole)
    assert metrics(tmp_path)[1] == metrics(whole)[1]

    again = launch(2, "fsdp2_pretrain.py", flags)
    assert again.returncode == 0 and "nothing to do" in again.stdout
    assert losses(tmp_path) == losses(whole)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
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


def test_torchrun_restarts_go_on_from_the_newest_checkpoint(flags, whole, tmp_path):
    """Even with --resume never: only the first start is a fresh one."""
    faults = [
        {"call": "Run.log_step", "number": 5, "rank": 1, "restart": 0, "do": "kill"},
        {"call": "Run.log_step", "number": 3, "rank": 0, "restart": 1, "do": "raise"},
    ]
    flags = flags | {"run_dir": tmp_path, "resume": "never"}
    done = faulty_under_torchrun(faults, flags, "--max-restarts=3")
    assert done.returncode == 0, done.stderr
    assert "ValueError: a fault on purpose" in done.stderr
    assert losses(tmp_path) == losses(whole) and same(tmp_path, whole)


def test_a_rank_that_fails_speaks_alone(flags, tmp_path):
    fault = {"call": "to_device", "number": 4, "rank": 1, "do": "raise"}
    started = time.monotonic()
    done = faulty(2, [fault], flags | {"run_dir": tmp_path})
    assert done.returncode == 1 and time.monotonic() - started < 60
    assert "rank 1 failed:\nTraceback" in done.stderr
    assert "ValueError: a fault on purpose" in done.stderr
    assert "rank 0 failed" not in done.stderr


@pytest.mark.parametrize(
    "script",
    [
        "fsdp2_pretrain",
        pytest.param("ddp_pretrain", marks=pytest.mark.drill),
        pytest.param("fsdp1_pretrain", marks=pytest.mark.drill),
    ],
)
def test_a_stalled_rank_is_named(flags, tmp_path, script):
    """It stops in the middle of step 3, between its two micro-batches."""
    fault = {"call": "to_device", "number": 6, "rank": 1, "do": "sleep"}
    flags = flags | {"run_dir": tmp_path, "timeout_minutes": 0.1}
    done = faulty(2, [fault], flags, script)
    assert done.returncode == 1
    assert "error: step 3 stalled for 0.1 minutes: rank 1 did not arrive" in done.stderr
    assert "rank 1 is late; it stands here" in done.stderr and "faults.py" in done.stderr
    recorded = [
        json.loads((tmp_path / f"stalled_rank_{rank}.json").read_text())["entries"]
        for rank in range(2)
    ]
    assert len(recorded[1]) < len(recorded[0])
    assert not recorded[0][-1]["retired"]  # what rank 0 waits for


@pytest.mark.drill  # torchrun waits 30 seconds for the frozen one
def test_a_frozen_rank_is_named_by_the_others(flags, tmp_path):
    fault = {"call": "Run.log_step", "number": 3, "rank": 0, "do": "freeze"}
    done = faulty_under_torchrun([fault], flags | {"run_dir": tmp_path, "timeout_minutes": 0.1})
    assert done.returncode == 1
    assert re.search("error: step [34] stalled .*: rank 0 did not arrive", done.stderr)


def test_two_runs_in_one_directory(flags, tmp_path):
    fault = {"call": "Run.log_step", "number": 2, "do": "sleep"}
    words = [str(ROOT / "tests/faults.py"), "fsdp2_pretrain", json.dumps([fault])]
    words += arguments(flags | {"run_dir": tmp_path})
    first = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL)
    try:
        wait_for_steps(tmp_path, 1)
        second = launch(1, "ddp_pretrain.py", flags | {"run_dir": tmp_path})
        assert second.returncode == 1
        assert f"error: --run_dir {tmp_path} is in use by another run" in second.stderr
        assert len(losses(tmp_path)) == 1
    finally:
        first.kill()
        first.wait()


# --- Disks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("background, full", [("false", True), ("true", True), ("true", False)])
def test_a_disk_that_cannot_be_written(flags, tmp_path, background, full):
    """Full for the shards of rank 1; or read-only, as rank 0 syncs the second checkpoint."""
    fault = {"call": "Run.log_validation", "rank": 1, "do": "limit file size"}
    if not full:
        fault = {"call": "Checkpoints.synced_sum", "number": 14, "rank": 0, "do": "read only"}
    flags = flags | {"run_dir": tmp_path, "async_checkpoint": background}
    flags |= {"global_batch_tokens": 32768}  # steps that take longer than a checkpoint
    done = faulty(2, [fault], flags)
    assert done.returncode == 1
    assert len(losses(tmp_path)) < 6  # the run ends before the next checkpoint is due
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "failed:\nTraceback" not in done.stderr
    assert f"error: cannot write {tmp_path}/checkpoints/step_00000004" in errors[0]
    assert f"{tmp_path}/checkpoints/step_00000002 is intact" in errors[0]
    assert kept(tmp_path) == ["step_00000002"]


def test_a_full_disk_at_the_end_keeps_the_last_checkpoint(flags, whole, tmp_path):
    fault = {"call": "Run.close", "rank": 0, "do": "limit file size"}
    flags = flags | {"run_dir": tmp_path}
    done = faulty(2, [fault], flags)
    assert done.returncode == 1 and "failed:\nTraceback" not in done.stderr
    assert f"error: cannot write {tmp_path}/hf: " in done.stderr
    assert kept(tmp_path)[-1] == "step_00000008"
    assert not [*tmp_path.glob("hf*")]
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
    "name", ["__1_0.distcp", ".metadata", "checkpoint.json", "SHA256SUMS", "tokenizer.json"]
)
def test_damage_is_noticed(copied, name, how):
    path = copied / "checkpoints/step_00000006"
    assert common.damage(path) is None
    harm(path, name, how)
    assert common.damage(path) is not None


def test_auto_takes_the_newest_undamaged_checkpoint(flags, whole, copied):
    newest = copied / "checkpoints/step_00000006"
    harm(newest, "__0_0.distcp", "flipped")
    (copied / "checkpoints/step_00000007.tmp").mkdir()
    done = launch(2, "fsdp2_pretrain.py", flags | {"run_dir": copied})
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{newest} is damaged (model/__0_0.distcp is damaged)" in done.stdout
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
        ({"resume": harmed}, "the checkpoint is damaged, .*__1_0.distcp is damaged"),
        ({"resume": tmp_path}, "neither auto, never nor a checkpoint"),
        ({"dataset": other}, f"--dataset {flags['dataset']} \\(now {other}\\)"),
        ({"model": "tiny"}, f"--model {flags['model']} \\(now tiny\\)"),
        (
            {"seed": 5, "batching": "packed"},
            "--batching bucketed \\(now packed\\), --seed 0 .now 5",
        ),
        ({"global_batch_tokens": 4096}, "--global_batch_tokens 2048 \\(now 4096\\)"),
        ({"tokenizer": newest / "hf"}, f"--tokenizer bytes \\(now {newest}/hf\\)"),
    ]
    for change, expected in cases:
        done = launch(0, "fsdp1_pretrain", flags | change)
        assert done.returncode == 2 and re.search(expected, done.stderr), (change, done.stderr)
        assert done.stderr.count("\n") == 1
    del flags["dataset"]
    done = launch(0, "fsdp2_sft", flags)
    assert done.returncode == 2 and "(now stdlib-docstrings)" in done.stderr, done.stderr


# --- Checkpoints move -----------------------------------------------------------------------------


def test_all_pairs_of_scripts_and_styles():
    done = torchrun(2, "bench/pairs.py")
    assert (done.returncode, done.stderr) == (0, "")
    rows = done.stdout.splitlines()[2:]
    assert len(rows) == 6
    assert all(row.count("| equal") == 3 for row in rows), done.stdout


@pytest.mark.parametrize(
    "ranks, script, style",
    [
        (1, "ddp_pretrain", "stateful"),
        pytest.param(4, "fsdp1_pretrain", "separate", marks=pytest.mark.drill),
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


def test_a_prepared_start_equals_a_direct_one(flags, weights_directory, tmp_path):
    flags = {**flags, "init_from": weights_directory, "tokenizer": "bytes", "steps": 3}
    del flags["model"]
    script = "fsdp2_pretrain.py"
    runs = {
        "direct": {"run_dir": tmp_path / "direct"},
        "prepared": {"run_dir": tmp_path / "prepared", "steps": 0},
        "later": {"run_dir": tmp_path / "prepared"},
    }
    for change in runs.values():
        done = launch(2, script, flags | change)
        assert (done.returncode, done.stderr) == (0, "")
    assert losses(tmp_path / "direct") == losses(tmp_path / "prepared")
    assert same(tmp_path / "direct", tmp_path / "prepared")


def test_show_export_and_init_from_a_checkpoint(flags, whole, tmp_path):
    path = whole / "checkpoints/step_00000008"

    def command(*words: object) -> subprocess.CompletedProcess:
        program = [sys.executable, "common.py", *map(str, words)]
        return subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=120)

    shown = command("show", whole)
    assert shown.returncode == 0
    for line in (
        f"checkpoint .*{path}",
        "step +8",
        "world_size +2",
        "style +separate",
        r"loss +\d",
    ):
        assert re.search(line, shown.stdout), (line, shown.stdout)
    out = tmp_path / "out"
    done = command("export", path, out)
    assert (done.returncode, done.stderr) == (0, "")
    assert {p.name for p in out.iterdir()} == {p.name for p in (whole / "hf").iterdir()}
    assert (out / "model.safetensors").read_bytes() == (whole / "hf/model.safetensors").read_bytes()
    assert command("export", path, out).returncode == 2
    assert command("show", tmp_path).returncode == 2

    flags = {key: value for key, value in flags.items() if key != "model"} | {"steps": 1}
    starts = {"checkpoint": path, "run": whole, "hf": whole / "hf"}
    for name, start in starts.items():
        change = {"init_from": start, "run_dir": tmp_path / name}
        assert launch(1, "fsdp1_pretrain.py", flags | change).returncode == 0
    assert losses(tmp_path / "checkpoint") == losses(tmp_path / "run") == losses(tmp_path / "hf")


# --- The order of things --------------------------------------------------------------------------


class FakeRun:
    def __init__(self, directory: Path):
        self.directory, self.progress = directory, common.Progress()
        self.watchdog = SimpleNamespace(expect=lambda step, patience=1: None)

    def description(self) -> dict:
        return {"flags": {}}


def checkpoints_of(run_dir: Path, keep: int = 2) -> common.Checkpoints:
    """Without model and process group."""
    made = object.__new__(common.Checkpoints)
    made.run, made.directory = FakeRun(run_dir), run_dir / "checkpoints"
    made.config = type("Config", (), {"keep_checkpoints": keep, "checkpoint_style": "stateful"})
    made.config.async_checkpoint = False
    made.contents, made.thread, made.failure, made.written = {}, None, None, None
    made.begin = lambda temporary: temporary.mkdir(parents=True)
    return made


def save_file(directory: Path) -> Callable[[], None]:
    return lambda: (directory / "__0_0.distcp").write_bytes(b"tensors")


@pytest.mark.parametrize("style", ["stateful", "separate"])
@pytest.mark.parametrize("script", [*SCRIPTS, "fsdp2_sft.py"])
def test_what_the_background_writes_is_the_state_of_that_moment(script, style, monkeypatch):
    module, seen = importlib.import_module(script.removesuffix(".py")), {}
    weight = torch.ones(3)
    tree = {"model": {"w": weight}, "optimizer": {"m": weight + 1}, "progress": {"step": 1}}
    state = SimpleNamespace(state_dict=lambda: dict(tree))
    config = SimpleNamespace(checkpoint_style=style, async_checkpoint=True)
    stager = DefaultStager(StagingOptions(False, False, False, False))
    monkeypatch.setattr(common, "patient_group", lambda purpose: None)
    monkeypatch.setattr(
        module.dcp, "save", lambda tree, checkpoint_id, **_: seen.update({checkpoint_id: tree})
    )
    write = module.save_checkpoint(state, config, stager, Path("x"))
    assert not seen
    weight.add_(1)  # training goes on
    write()
    if style == "separate":
        assert list(seen) == [Path("x/model"), Path("x/optimizer")]
        model = seen[Path("x/model")]
    else:
        assert list(seen) == [Path("x")]
        model = seen[Path("x")]["app"]["model"]
    assert model["w"].tolist() == [1, 1, 1]


def test_a_state_that_cannot_be_copied_is_reported_and_leaves_nothing(tmp_path):
    def save(directory: Path) -> None:
        raise RuntimeError("DefaultCPUAllocator: not enough memory")

    made = checkpoints_of(tmp_path)
    made.directory.mkdir()
    made.run.progress.step = 1
    with pytest.raises(common.RunError, match="not enough memory"):
        made.write(save)
    assert not list(made.directory.iterdir())


def test_everything_is_synced_before_the_rename_and_old_ones_go_after(tmp_path, monkeypatch):
    happened, real_sync, real_rename = [], os.fsync, Path.rename

    def fsync(descriptor: int) -> None:
        happened.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
        real_sync(descriptor)

    def rename(path: Path, target: Path) -> Path:
        happened.append(("rename", str(path)))
        return real_rename(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    made = checkpoints_of(tmp_path, keep=1)
    for step in (1, 2):
        made.run.progress.step = step
        happened.clear()
        made.write(save_file)
    temporary = str(made.directory / "step_00000002.tmp")
    at = happened.index(("rename", temporary))
    files = {f"{temporary}/{name}" for name in ("__0_0.distcp", "checkpoint.json", "SHA256SUMS")}
    assert {path for what, path in happened[:at] if what == "sync"} == files | {temporary}
    assert happened[at + 1] == ("sync", str(made.directory))
    assert happened[at + 2] == ("rename", str(made.directory / "step_00000001"))
    assert kept(tmp_path) == ["step_00000002"]


def test_the_newest_by_number_and_the_best_stay(tmp_path):
    made = checkpoints_of(tmp_path)
    for step, loss in (
        (9, 3.0),
        (10, 1.0),
        (99_999_999, 2.0),
        (100_000_000, None),
        (100_000_001, 4),
    ):
        made.run.progress.step, made.run.progress.validation_loss = step, loss
        made.write(save_file)
    assert [common.step_of(path) for path in common.complete_checkpoints(tmp_path)] == [
        100_000_001, 100_000_000, 10,
    ]  # fmt: skip


def test_wandb_goes_on_with_the_same_run(flags, tmp_path):
    flags = flags | {"run_dir": tmp_path, "wandb_project": "test", "steps": 4}
    fault = {"call": "Run.log_step", "number": 2, "do": "terminate"}
    assert faulty(1, [fault], flags).returncode == 0
    first = common.read_description(tmp_path / "checkpoints/step_00000002")["progress"]["wandb_run"]
    assert launch(1, "fsdp2_pretrain.py", flags).returncode == 0
    last = common.read_description(tmp_path / "checkpoints/step_00000004")["progress"]["wandb_run"]
    assert first and first == last
    assert len({path.name.split("-")[-1] for path in tmp_path.glob("wandb/offline-run-*")}) == 1


# --- Kill storm -----------------------------------------------------------------------------------


@pytest.mark.drill
@pytest.mark.parametrize(
    "script, background", [("ddp_pretrain", "false"), ("fsdp2_pretrain", "true")]
)
def test_a_run_killed_twenty_times_ends_as_if_nothing_had_happened(
    flags, tmp_path, script, background
):
    flags = flags | {"steps": 60, "checkpoint_every": 2, "async_checkpoint": background}
    flags |= {"global_batch_tokens": 16384}  # steps slow enough to be hit
    whole, storm = tmp_path / "whole", tmp_path / "storm"
    program = [sys.executable, str(ROOT / "tests/storm.py"), script]
    for kills, run_dir in ((0, whole), (22, storm)):
        words = [str(kills), "1", *arguments(flags | {"run_dir": run_dir})]
        done = subprocess.run([*program, *words], capture_output=True, text=True, timeout=900)
        assert (done.returncode, done.stderr) == (0, ""), done.stdout
    print(done.stdout)
    assert sum("-9" in line for line in done.stdout.splitlines()) >= 20
    assert losses(storm) == losses(whole) and same(storm, whole)
    assert kept(storm) == kept(whole)
    assert {p.name for p in storm.iterdir()} == {p.name for p in whole.iterdir()}


def test_groups_of_a_mesh_wait_as_long_as_the_watchdog_needs():
    code = """
import datetime, os, pathlib, torch, torch.distributed as dist
import common
os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
watchdog = common.Watchdog(60, pathlib.Path("."), torch.device("cpu"))
for name in mesh.mesh_dim_names:
    options = mesh.get_group(name)._get_backend(torch.device("cpu")).options
    assert options._timeout == datetime.timedelta(minutes=1201), options._timeout
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
