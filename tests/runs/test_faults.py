"""What a run must survive: signals, dead, failing and stalled ranks, full disks, damaged files."""

import copy
import importlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from launching import (
    HANGS,
    ROOT,
    SMALL,
    arguments,
    launch,
    metrics,
    small_shape,
    torchrun,
    tree,
)
from grid import share

import common  # conftest has put it on the path
import ddp_pretrain

FLAGS = {**SMALL, "global_batch_tokens": 2048, "eval_every": 4, "checkpoint_every": 2, "steps": 8}
FLAGS["keep_checkpoints"] = 3


@pytest.fixture(scope="module")
def flags(corpus, shape_directory) -> dict:
    return {**FLAGS, "dataset": corpus, "model": shape_directory}


def faulty(ranks: int, faults: list[dict], flags: dict, script: str = "fsdp2_pretrain"):
    """Launch a script with planted faults, see tests/support/faults.py."""
    return launch(ranks, script, flags, faults)


def faulty_under_torchrun(faults: list[dict], flags: dict, *options: str, **variables: str):
    """Do the same with torchrun, which restarts ranks and hosts the store."""
    words = ["tests/support/faults.py", "fsdp2_pretrain", json.dumps(faults), *arguments(flags)]
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
    """A copy of it, as it was after step 6."""
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir)
    shutil.rmtree(run_dir / "checkpoints/step_00000008")
    return run_dir


def test_files_that_stay_and_fsync_that_fails_end_no_run(flags, whole, copied):
    """Old checkpoints, one that was not complete, and hf/ of fewer steps."""
    leftover = copied / "checkpoints/step_00000007.tmp"
    shutil.copytree(copied / "checkpoints/step_00000006", leftover)
    fault = {"call": "run.Run.begin", "do": "keep files"}
    done = faulty(2, [fault], flags | {"run_dir": copied, "keep_checkpoints": 1})
    assert (done.returncode, done.stderr) == (0, "")
    assert [name for name in kept(copied) if not name.endswith(".tmp")] == ["step_00000008"]
    assert losses(copied) == losses(whole) and same(copied, whole)


# --- Signals --------------------------------------------------------------------------------------


def test_signals_in_every_phase_lose_nothing(flags, whole, tmp_path):
    """Before the first step, then during a step, validations and a checkpoint of the same run.

    A validation is cut off, and the next start does it first. So its line has the usual place.
    """
    flags = flags | {"run_dir": tmp_path}
    phases = [
        ({"call": "run.Run.begin", "after": True, "rank": 1, "do": "terminate"}, 1),
        ({"call": "fsdp2_pretrain.train_step", "number": 2, "rank": 1, "do": "interrupt twice"}, 3),
        ({"call": "fsdp2_pretrain.evaluate", "rank": 1, "do": "terminate"}, 4),
        ({"call": "common.sync_to_disk", "rank": 0, "do": "hang up"}, 7),  # of step 6
        ({"call": "fsdp2_pretrain.evaluate", "rank": 1, "do": "terminate"}, 8),
    ]
    for fault, step in phases:
        done = faulty(2, [fault], flags)
        assert (done.returncode, done.stderr) == (0, ""), fault
        last = done.stdout.splitlines()[-1]
        saved = f"stopped after step {step}, saved in {tmp_path}/checkpoints/step_0000000{step}"
        assert last == f"{saved}; rerun the same command with --resume auto to continue"
        assert kept(tmp_path)[-1] == f"step_0000000{step}"
        assert not (tmp_path / "hf").exists()
    done = launch(2, "fsdp2_pretrain.py", flags)
    assert (done.returncode, done.stderr) == (0, "")
    assert losses(tmp_path) == losses(whole) and same(tmp_path, whole)
    assert metrics(tmp_path)[1] == metrics(whole)[1]
    for run_dir in (tmp_path, whole):
        lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
        assert [line["step"] for line in lines] == [1, 2, 3, 4, 4, 5, 6, 7, 8, 8]

    again = launch(2, "fsdp2_pretrain.py", flags)
    assert again.returncode == 0 and "resuming from" in again.stdout
    assert losses(tmp_path) == losses(whole) and same(tmp_path, whole)


@pytest.mark.parametrize(
    "do, number", [("terminate", signal.SIGTERM), ("interrupt", signal.SIGINT)]
)
def test_a_signal_before_the_first_step_ends_the_start(flags, tmp_path, do, number):
    fault = {"call": "common.load_documents", "do": do}
    done = faulty(0, [fault], flags | {"run_dir": tmp_path / "run"})
    assert (done.returncode, done.stderr) == (-number, "")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.drill), signal.SIGINT]
)
def test_signal_to_the_launcher(flags, tmp_path, number):
    """torchrun passes it on, and itself exits with 1. A process without torchrun exits with 0."""
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
        out, _ = run.communicate(timeout=HANGS)
    assert run.returncode == (0 if alone else 1)
    step = metrics(tmp_path)[0][-1]["step"]
    assert f"stopped after step {step}, saved in " in out
    assert kept(tmp_path)[-1] == f"step_{step:08d}"


def wait_for_steps(run_dir: Path, number: int) -> None:
    file = run_dir / "metrics.jsonl"
    wait_until(lambda: file.exists() and len(file.read_text().splitlines()) >= number)


def wait_until(condition: Callable) -> None:
    deadline = time.monotonic() + HANGS
    while not condition():
        assert time.monotonic() < deadline, f"not within {HANGS} seconds"
        time.sleep(0.1)


# --- Dead, failing and stalled ranks --------------------------------------------------------------


@pytest.fixture(scope="module")
def frozen(flags, tmp_path_factory):
    """Futures: what a run prints whose rank 0 freezes.

    torchrun waits for the frozen rank for half a minute, in which other tests run. In the second
    run rank 0 hosts the store, as docs/runs.md has it for several nodes.
    """
    fault = {"call": "run.Run.log_step", "number": 3, "rank": 0, "do": "freeze"}

    def said(share: str) -> str:
        own = flags | {"run_dir": tmp_path_factory.mktemp("frozen"), "timeout_minutes": 0.2}
        done = faulty_under_torchrun([fault], own, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=share)
        assert done.returncode == 1
        return done.stderr

    with ThreadPoolExecutor() as both:
        yield [both.submit(said, share) for share in "01"]


@pytest.mark.drill
@pytest.mark.usefixtures("frozen")
def test_restarts_by_torchrun_resume_from_the_newest_checkpoint(flags, whole, tmp_path):
    faults = [
        {"call": "run.Run.log_step", "number": 5, "rank": 1, "restart": 0, "do": "kill"},
        {"call": "run.Run.log_step", "number": 3, "rank": 0, "restart": 1, "do": "raise"},
    ]
    flags = flags | {"run_dir": tmp_path}
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # as in docs/runs.md
    done = faulty_under_torchrun(faults, flags, "--max-restarts=3", **variables)
    assert done.returncode == 0, done.stderr
    assert "ValueError: a fault on purpose" in done.stderr
    assert losses(tmp_path) == losses(whole) and same(tmp_path, whole)


@pytest.mark.parametrize(
    "ranks, script",
    [(2, "fsdp2_pretrain"), pytest.param(4, "fsdp2_pp_pretrain", marks=pytest.mark.drill)],
)
def test_only_the_rank_that_failed_prints_its_traceback(flags, tmp_path, ranks, script):
    """PyTorch's pipelines hide the cause. There another rank loses its connection in forward."""
    fault = {"call": "common.to_device", "number": 9, "rank": ranks - 1, "do": "raise"}
    flags = flags | {"run_dir": tmp_path, "timeout_minutes": HANGS}
    done = faulty(ranks, [fault], flags, script)
    assert done.codes[-1] == 1  # the rank that failed waited for nobody
    assert done.stderr.count("Traceback") == 1
    assert "ValueError: a fault on purpose" in done.stderr


def test_only_a_collective_can_lose_a_rank():
    """A web request of wandb, or of a reward, times out with an error of another type."""
    for message in ("[...] Timed out waiting 6000ms for recv", "Connection closed by peer"):
        assert common.lost_connection(RuntimeError(message))
    assert not common.lost_connection(TimeoutError("the read operation timed out"))


@pytest.mark.drill
@pytest.mark.parametrize(
    "script, late, own",
    [
        ("fsdp2_pretrain", 1, {"dp_replicate": 2}),
        ("fsdp2_pp_pretrain", 0, {"global_batch_tokens": 1024}),
    ],
)
def test_a_stalled_rank_ends_the_run_in_time(flags, tmp_path, script, late, own):
    """It stalls in the middle of step 3, between its two micro-batches."""
    fault = {"call": "common.to_device", "number": 6, "rank": late, "do": "sleep"}
    flags = flags | {"run_dir": tmp_path, "timeout_minutes": 0.1} | own
    done = faulty(2, [fault], flags, script)
    assert done.codes[1 - late] == 1
    [line] = done.stderr.splitlines()
    assert "lost another rank, or waited for it longer than --timeout_minutes" in line
    assert re.search("[Tt]imed out waiting (6|12)000ms", line)
    assert len(losses(tmp_path)) == 2


@pytest.mark.drill
def test_a_frozen_rank_0_ends_the_run_in_time(frozen):
    """The other rank says that it has waited for 12 seconds, and torchrun kills the frozen one."""
    for run in frozen:
        [line] = [line for line in run.result().splitlines() if line.startswith("rank ")]
        assert line.startswith("rank 1 lost another rank")
        assert re.search("[Tt]imed out waiting (12|24)000ms", line)


def ranks_of(launcher: subprocess.Popen) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(launcher.pid)], capture_output=True, text=True)
    return [int(number) for number in found.stdout.split()]


@pytest.mark.drill
@pytest.mark.parametrize("moment", ["importing", "training"])
def test_ranks_of_a_killed_launcher_end(flags, tmp_path, moment):
    """Ranks that are training save first. Those that import torch find that it is gone."""
    run_dir = tmp_path / "run"
    words = arguments(flags | {"run_dir": run_dir, "steps": 10**7, "checkpoint_every": 10**7})
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with open(tmp_path / "out.txt", "w") as out:
        launcher = subprocess.Popen(
            [*command, "ddp_pretrain.py", *words], cwd=ROOT, stdout=out, stderr=out
        )
        wait_until(lambda: len(ranks_of(launcher)) == 2)
        ranks = ranks_of(launcher)
        if moment == "training":
            wait_for_steps(run_dir, 3)
        launcher.kill()
        launcher.wait()
    wait_until(lambda: not any(Path(f"/proc/{rank}/exe").exists() for rank in ranks))
    said = (tmp_path / "out.txt").read_text()
    if moment == "training":
        step = metrics(run_dir)[0][-1]["step"]
        assert kept(run_dir) == [f"step_{step:08d}"] and f"stopped after step {step}" in said
    else:
        assert not said and not run_dir.exists()


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.drill)])
def test_a_shell_script_may_start_the_ranks(flags, tmp_path, real):
    """torchrun --no-python ./wrapper.sh, where the wrapper stays the parent of the rank."""
    words = ["-c", "import run; run.launch(lambda: print('trained'))"]
    if real:
        words = ["ddp_pretrain.py", *arguments(flags | {"run_dir": tmp_path / "run", "steps": 1})]
    wrapper = tmp_path / "wrapper.sh"
    quoted = " ".join(f'"{word}"' for word in [sys.executable, *words])
    wrapper.write_text(f"#!/bin/sh\n{quoted}\nexit $?\n")
    wrapper.chmod(0o755)
    if real:
        done = torchrun(2, "--no-python", str(wrapper))
        assert done.returncode == 0 and (tmp_path / "run/hf").exists(), done.stderr
        return
    environment = os.environ | {"TORCHELASTIC_RUN_ID": "x"}
    done = subprocess.run([wrapper], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n", "")


def test_ranks_on_macos(tmp_path):
    """It has no signal for the death of a parent, and no /proc."""
    code = """if True:
        import sys
        import run
        sys.platform = "darwin"
        run.ctypes = None
        run.launch(lambda: print("trained"))
    """
    environment = os.environ | {"TORCHELASTIC_RUN_ID": "x"}
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("trained\n", "")


def test_two_runs_in_one_directory(flags, tmp_path):
    fault = {"call": "run.Run.log_step", "number": 2, "do": "sleep"}
    words = [str(ROOT / "tests/support/faults.py"), "fsdp2_pretrain", json.dumps([fault])]
    words += arguments(flags | {"run_dir": tmp_path})
    first = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL)
    try:
        wait_for_steps(tmp_path, 1)
        second = launch(0, "ddp_pretrain.py", flags | {"run_dir": tmp_path})
        assert second.returncode == 2
        assert f"error: --run_dir {tmp_path} cannot be written or is in use" in second.stderr
        assert len(losses(tmp_path)) == 1
    finally:
        first.kill()
        first.wait()


# --- A loss that is not finite --------------------------------------------------------------------


@pytest.mark.parametrize("loss, norm", [(math.nan, 1.0), (1.0, math.inf)])
@pytest.mark.usefixtures("one_rank")
def test_what_is_not_finite_does_not_reach_the_weights(monkeypatch, loss, norm):
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model.forward = lambda: loss + model.weight.sum()
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: torch.tensor(norm))
    before = copy.deepcopy(model.state_dict())
    batch = common.GlobalBatch([{}], 1, 1, 0, 0.0)
    config = SimpleNamespace(grad_clip=1.0)
    with pytest.raises(common.Refusal, match="step 2: the loss .* is not finite; lower"):
        ddp_pretrain.train_step(model, optimizer, batch, 2, config, torch.device("cpu"))
    assert model.weight.grad.isfinite().all()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


# --- Disks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "background, do",
    [("false", "limit file size"), ("true", "limit file size"), ("true", "read only")],
)
def test_a_disk_that_cannot_be_written(flags, tmp_path, background, do):
    """It is full when rank 1 writes its shards, or broken when rank 0 completes a checkpoint."""
    fault = {"call": "run.Run.log_validation", "rank": 1, "do": do}
    if do == "read only":
        fault = {"call": "common.sync_to_disk", "number": 14, "rank": 0, "do": do}  # of step 4
    flags = flags | {"run_dir": tmp_path, "async_checkpoint": background}
    done = faulty(2, [fault], flags)
    assert done.returncode == 1
    assert len(losses(tmp_path)) <= 6  # the run ends no later than at the next checkpoint
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "Traceback" not in done.stderr, done.stderr
    assert f"error: cannot write {tmp_path}/checkpoints/step_00000004" in errors[0]
    assert f"(the newest checkpoint is {tmp_path}/checkpoints/step_00000002)" in errors[0]
    assert [name for name in kept(tmp_path) if not name.endswith(".tmp")] == ["step_00000002"]


def test_a_full_disk_at_the_end_keeps_the_last_checkpoint(flags, whole, tmp_path):
    fault = {"call": "run.Run.finish", "rank": 0, "do": "limit file size"}
    flags = flags | {"run_dir": tmp_path}
    done = faulty(2, [fault], flags)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    complete = f"{tmp_path}/checkpoints/step_00000008 is complete"
    assert line.startswith(f"error: cannot write {tmp_path}/hf ({complete}): ")
    assert not (tmp_path / "hf").exists()
    done = launch(2, "fsdp2_pretrain.py", flags)
    assert (done.returncode, done.stderr) == (0, "")
    assert same(tmp_path, whole)


def test_a_change_of_directory_does_not_move_the_run(flags, whole, tmp_path):
    """A `reward` that runs code may call os.chdir. The default --run_dir is relative."""
    run_dir = os.path.relpath(tmp_path / "run", ROOT)
    faults = [
        {"call": "run.Run.log_step", "number": 3, "rank": rank, "do": "change directory"}
        for rank in range(2)
    ]
    done = faulty(2, faults, flags | {"run_dir": run_dir})
    assert (done.returncode, done.stderr) == (0, "")
    assert kept(tmp_path / "run") == kept(whole) and same(tmp_path / "run", whole)
    assert losses(tmp_path / "run") == losses(whole)


# --- Damage ---------------------------------------------------------------------------------------


def harm(checkpoint: Path, name: str, how: str) -> None:
    file = checkpoint / name
    data = file.read_bytes()
    file.unlink()
    if how == "truncated":
        file.write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize("how", ["missing", "truncated"])
@pytest.mark.parametrize("name", ["__1_0.distcp", ".metadata", "checkpoint.json"])
def test_a_checkpoint_that_cannot_be_loaded_ends_the_start_in_one_line(flags, copied, name, how):
    newest = copied / "checkpoints/step_00000006"
    harm(newest, name, how)
    before = tree(copied)
    done = launch(2, "fsdp2_pretrain.py", flags | {"run_dir": copied})
    [line] = done.stderr.splitlines()
    if name == "checkpoint.json":
        assert line.startswith(f"error: {newest} is not a complete checkpoint: ")
    else:
        assert line.startswith(f"error: {newest} of torch ")
        assert "cannot be loaded (remove it if it is damaged; " in line
    assert 2 in done.codes and tree(copied) == before


def test_a_run_goes_on_once_a_damaged_checkpoint_is_removed(flags, whole, copied):
    shutil.rmtree(copied / "checkpoints/step_00000006")
    (copied / "checkpoints/step_00000007.tmp").mkdir()
    done = launch(2, "fsdp2_pretrain.py", flags | {"run_dir": copied})
    assert (done.returncode, done.stderr) == (0, "")
    assert losses(copied) == losses(whole) and same(copied, whole)
    assert kept(copied) == ["step_00000004", "step_00000006", "step_00000008"]


@pytest.mark.parametrize("call", ["run.Run.open_files", "run.Run.log"])
def test_a_start_that_is_killed_before_its_first_line_loses_none(flags, whole, copied, call):
    """It has dropped the lines of later steps, and hf/, which is that of later steps too."""
    fault = {"call": call, "after": call == "run.Run.open_files", "do": "kill"}
    done = faulty(0, [fault], flags | {"run_dir": copied})
    assert done.returncode == -signal.SIGKILL
    before = (whole / "metrics.jsonl").read_bytes()
    step_6 = before[
        : common.read_description(copied / "checkpoints/step_00000006")["metrics_bytes"]
    ]
    assert json.loads(step_6.splitlines()[-1])["step"] == 6
    assert (copied / "metrics.jsonl").read_bytes() == step_6
    assert not (copied / "hf").exists()
    done = launch(2, "fsdp2_pretrain.py", flags | {"run_dir": copied})
    assert (done.returncode, done.stderr) == (0, "")
    assert (copied / "metrics.jsonl").read_bytes().startswith(step_6)
    assert losses(copied) == losses(whole) and same(copied, whole)


def test_what_a_resume_refuses(flags, texts, weights_directory, copied, tmp_path):
    newest = copied / "checkpoints/step_00000006"
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[1:]))
    flags = flags | {"resume": newest, "run_dir": tmp_path / "new"}
    tokenizer = copy.deepcopy(common.load_tokenizer("bytes"))
    tokenizer.add_tokens("<another>")
    common.save_tokenizer(tokenizer, tmp_path / "tokenizer")
    changed = r"[0-9a-f]{32} \(now [0-9a-f]{32}\); resume with"
    cases = [
        ({"resume": tmp_path}, f"{tmp_path} is not a complete checkpoint: "),
        ({"dataset": other}, f"was written with data_hash {changed}"),
        ({"model": "tiny"}, f"was written with model_hash {changed}"),
        ({"tokenizer": tmp_path / "tokenizer"}, f"was written with tokenizer_hash {changed}"),
        (
            {"init_from": weights_directory, "tokenizer": "bytes"},
            rf"was written with init_from None \(now {weights_directory}\), weights_hash None ",
        ),
        (
            {"seed": 5, "batching": "packed"},
            r"batching bucketed \(now packed\), seed 0 \(now 5\); resume with its values, or",
        ),
        ({"max_length": 256}, r"max_length 512 \(now 256\);"),
        ({"global_batch_tokens": 4096}, r"global_batch_tokens 2048 \(now 4096\);"),
        (
            {"run_dir": copied, "resume": copied / "checkpoints/step_00000004"},
            "is neither empty nor a run that this start resumes: use another",
        ),
        (
            {"run_dir": copied, "resume": "never"},
            "is neither empty nor a run that this start resumes: use another",
        ),
    ]
    before = tree(copied)
    for change, expected in cases:
        done = launch(0, "fsdp1_pretrain", flags | change)
        assert done.returncode == 2, (change, done.stderr)
        assert re.search(expected, done.stderr), (change, done.stderr)
        assert done.stderr.count("\n") == 1
    assert tree(copied) == before
    assert not (tmp_path / "new").exists()


def test_a_refused_start_changes_nothing(flags, weights_directory, tmp_path):
    """The directory has metrics of a run that died early, and the weights do not fit."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    (tmp_path / "config.json").write_text('{"checkpoint_every": 2}')
    before = tree(tmp_path)
    start = {"init_from": weights_directory, "model": "tiny", "tokenizer": "bytes"}
    done = launch(2, "fsdp2_pretrain", flags | start | {"run_dir": tmp_path})
    assert 2 in done.codes and "error: --init_from" in done.stderr, done.stderr
    assert tree(tmp_path) == before


def test_copies_with_other_names_stay(flags, whole, copied):
    """They are not checkpoints."""
    folder = copied / "checkpoints"
    strange = {"step_00000006_1", "step_00000006 (copy)", "step_6"}
    for name in strange:
        shutil.copytree(folder / "step_00000006", folder / name)
    done = launch(2, "fsdp2_pretrain.py", flags | {"run_dir": copied, "keep_checkpoints": 1})
    assert (done.returncode, done.stderr) == (0, "")
    assert losses(copied) == losses(whole) and same(copied, whole)
    assert strange | {"step_00000008"} == set(kept(copied))


# --- Checkpoints move -----------------------------------------------------------------------------


@pytest.mark.drill
def test_all_pairs_of_scripts():
    writers = share("ddp fsdp1 fsdp2 tp cp pp ep nd zero1 muon".split())
    done = torchrun(2, "bench/pairs.py", *writers)
    assert (done.returncode, done.stderr) == (0, "")
    rows = [row for row in done.stdout.splitlines() if "(stateful)" in row]
    # Of a dense model, which EP refuses, and of an MoE model, which TP and N-D parallelism refuse.
    # Muon reads every checkpoint, and the others refuse its own.
    names = "ddp fsdp1 fsdp2 tp cp pp ep nd zero1 muon".split()
    expected = []
    for without in ({"ep"}, {"tp", "nd"}):
        readers = len({*names} - without)
        expected += [1 if name == "muon" else readers for name in writers if name not in without]
    assert [row.count("| equal (") for row in rows] == expected, done.stdout
    refused = [row.count("| refused (") for row in rows if row.startswith("| muon")]
    assert refused == [8, 7][: len(refused)], done.stdout


@pytest.fixture(scope="module")
def longer(flags, whole, tmp_path_factory) -> dict:
    """The line of step 9 that follows the whole run."""
    run_dir = tmp_path_factory.mktemp("longer") / "run"
    more = {"run_dir": run_dir, "resume": whole / "checkpoints/step_00000008", "steps": 9}
    assert launch(2, "fsdp2_pretrain.py", flags | more).returncode == 0
    [line] = metrics(run_dir)[0]
    return line


@pytest.mark.parametrize(
    "ranks, script, style",
    [
        (1, "ddp_pretrain", "stateful"),
        *share(
            [
                pytest.param(4, "fsdp1_pretrain", "separate", marks=pytest.mark.drill),
                pytest.param(4, "fsdp2_tp_pretrain", "separate", marks=pytest.mark.drill),
                pytest.param(4, "fsdp2_cp_pretrain", "stateful", marks=pytest.mark.drill),
                pytest.param(4, "fsdp2_pp_pretrain", "separate", marks=pytest.mark.drill),
            ]
        ),
    ],
)
def test_another_world_size_resumes(flags, whole, longer, tmp_path, ranks, script, style):
    """From 2 ranks to 1 or 4, and back to 2. Flags that may change do change."""
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
    last = metrics(tmp_path)[0][-1]
    assert (last["step"], last["tokens"]) == (9, longer["tokens"])
    assert abs(last["loss"] / longer["loss"] - 1) < 1e-4


def test_the_weight_decay_of_a_resumed_run_is_its_flag(flags, whole, tmp_path):
    """Not that of the checkpoint, which comes with the optimizer state."""
    start = {"resume": whole / "checkpoints/step_00000008", "steps": 9}
    for decay in (0.1, 0.5):
        change = {"run_dir": tmp_path / str(decay), "weight_decay": decay}
        assert launch(0, "fsdp2_pretrain", flags | start | change).returncode == 0
    assert not same(tmp_path / "0.1", tmp_path / "0.5")


def records(data: bytes) -> Iterator[bytes]:
    """Yield the records of an offline file: LevelDB's log format, in blocks of 32 KiB."""
    place, record = 7, b""
    while place + 7 <= len(data):
        if 2**15 - place % 2**15 < 7:  # no room for a header: the block ends
            place += -place % 2**15
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        record += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # complete, or the last part
            yield record
            record = b""


def heard_by_wandb(run_dir: Path) -> tuple[set, dict[int, int], list[int]]:
    """Return ids and names of runs, the step in the line of each step with a loss, exit codes."""
    wandb_internal = importlib.import_module("wandb.proto.wandb_internal_pb2")
    runs, steps, codes = set(), {}, []
    for file in sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb")):
        for data in records(file.read_bytes()):
            record = wandb_internal.Record.FromString(data)
            if record.HasField("run"):
                runs.add((record.run.run_id, record.run.display_name))
            if record.HasField("exit"):
                codes.append(record.exit.exit_code)
            if record.HasField("history"):
                items = {
                    item.key or item.nested_key[0]: item.value_json for item in record.history.item
                }
                if "loss" in items:
                    steps[record.history.step.num] = int(items["step"])
    return runs, steps, codes


def test_wandb_hears_of_a_failure_and_continues_the_same_run(flags, tmp_path):
    """Under the name of the directory. A run that starts anew in a directory is another run."""
    run_dir = tmp_path / "a run"
    flags = flags | {"run_dir": run_dir, "wandb_project": "test", "steps": 6}
    fault = {"call": "run.Run.log_step", "number": 5, "after": True, "do": "raise"}
    done = faulty(1, [fault], flags)
    assert done.returncode == 1 and "ValueError: a fault on purpose" in done.stderr
    assert heard_by_wandb(run_dir)[1:] == ({step: step for step in range(1, 6)}, [1])
    assert launch(1, "fsdp2_pretrain.py", flags, orderly=True).returncode == 0
    [(first, name)], steps, codes = heard_by_wandb(run_dir)
    assert (steps, codes) == ({step: step for step in range(1, 7)}, [1, 0])
    assert name == "a run" and first == (run_dir / "wandb_id").read_text()
    shutil.rmtree(run_dir)
    assert launch(1, "fsdp2_pretrain.py", flags | {"steps": 1}).returncode == 0
    [(second, _)], *_ = heard_by_wandb(run_dir)
    assert second != first


# --- What the ranks share -------------------------------------------------------------------------


def test_the_slowest_ranks_wait_for_data_is_logged(flags, tmp_path):
    fault = {"call": "common.Batches.global_batch", "rank": 1, "do": "nap"}
    done = faulty(2, [fault], flags | {"run_dir": tmp_path, "steps": 1})
    assert (done.returncode, done.stderr) == (0, "")
    [line] = metrics(tmp_path)[0]
    assert line["data_seconds"] > 1.9


@pytest.mark.drill
def test_memory_stays_flat_and_garbage_is_collected_on_purpose_only(flags, tmp_path):
    """Automatic collections, at other moments, change no bit."""
    flags = flags | {"steps": 1000, "global_batch_tokens": 512, "eval_every": 1000}
    flags |= {"checkpoint_every": 1000, "micro_batch_tokens": 256, "max_length": 256}
    # Just after the ranks have collected garbage.
    faults = [
        {"call": "run.Run.log_step", "number": number, "do": "say memory"} for number in (201, 901)
    ]
    automatic = {"call": "gc.disable", "after": True, "do": "collect garbage automatically"}
    said = {}
    for planted in (faults, [*faults, automatic]):
        run_dir = tmp_path / str(len(planted))
        done = faulty(0, planted, flags | {"run_dir": run_dir})
        assert (done.returncode, done.stderr) == (0, "")
        said[run_dir] = re.findall(r"(\d+) pages, (\d+) objects, automatic (\w+)", done.stdout)
    assert [line[2] for lines in said.values() for line in lines] == ["False"] * 2 + ["True"] * 2
    first, second = said
    (pages, objects, _), (pages_later, objects_later, _) = said[first]
    assert int(pages_later) < 1.02 * int(pages), said
    assert int(objects_later) < 1.01 * int(objects), said
    assert losses(first) == losses(second) and same(first, second)


# --- The order of things --------------------------------------------------------------------------


@pytest.fixture
def make_checkpoints(one_rank, tmp_path) -> Callable:
    """Return a function that makes the checkpoints of a run in tmp_path."""

    def make(directory: Path = tmp_path, **changes) -> common.Checkpoints:
        flags = {"keep_checkpoints": 2, "checkpoint_style": "separate", "async_checkpoint": False}
        flags |= changes
        return common.Checkpoints(
            SimpleNamespace(**flags),
            directory,
            {"torch": "2.13"} | flags,
            small_shape().save_pretrained,
            torch.device("cpu"),
        )

    return make


STATE = {"model": {"weight": torch.ones(3)}, "optimizer": {"state": {"weight": torch.ones(3)}}}


def test_adamw_counts_on_from_a_checkpoint(make_checkpoints, tmp_path):
    """`get_state_dict` makes a fresh optimizer count a step that it has not done (pytorch#164929).

    The first update would be 0.744 of its size. No script saves before its first step, and a load
    replaces the count.
    """
    torch.manual_seed(0)
    first = torch.nn.Linear(3, 1)
    second = copy.deepcopy(first)
    optimizers = [torch.optim.AdamW(model.parameters()) for model in (first, second)]

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(3)).backward()
        optimizer.step()

    for i in range(3):
        step(first, optimizers[0])
        if i == 0:
            make_checkpoints().save(first, optimizers[0], {"step": 1})
    common.load_checkpoint(tmp_path / "checkpoints/step_00000001", second, optimizers[1])
    counts = [optimizers[1].state[parameter]["step"].item() for parameter in second.parameters()]
    assert counts == [1.0, 1.0]
    for _ in range(2):
        step(second, optimizers[1])
    torch.testing.assert_close(second.state_dict(), first.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("style", ["stateful", "separate"])
def test_a_checkpoint_in_the_background_holds_the_state_of_its_step(
    make_checkpoints, tmp_path, monkeypatch, style
):
    """Training changes the weights meanwhile, and all writes use the same staging memory."""
    checkpoints = make_checkpoints(checkpoint_style=style, async_checkpoint=True)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    write = checkpoints.write

    def write_later(*arguments) -> None:
        time.sleep(0.2)
        write(*arguments)

    monkeypatch.setattr(checkpoints, "write", write_later)
    for step in (1, 2):
        model.weight.data.fill_(step)
        checkpoints.save(model, optimizer, {"step": step})
    model.weight.data.fill_(3)
    checkpoints.wait()
    for step in (1, 2):
        path = tmp_path / f"checkpoints/step_{step:08d}"
        common.load_checkpoint(path, model, optimizer)
        assert (model.weight == step).all()
    assert checkpoints.newest == path


def test_all_is_on_the_disk_before_the_rename_and_old_ones_go_after(
    make_checkpoints, tmp_path, monkeypatch
):
    """Only what the checkpoint wrote: os.sync would wait for all disks of the machine."""
    happened: list[str] = []
    folder, real_rename, real_fsync = tmp_path / "checkpoints", Path.rename, os.fsync

    def rename(path: Path, target: Path) -> Path:
        if path.parent == folder and path.suffix == ".tmp":
            written = {str(file.relative_to(path)) for file in path.rglob("*")} | {"."}
            assert written <= {os.path.relpath(synced, path) for synced in happened}
            assert {"checkpoint.json", ".metadata", "hf/config.json"} < written
        happened.append(f"rename {path.name}")
        return real_rename(path, target)

    def fsync(descriptor: int) -> None:
        real_fsync(descriptor)
        happened.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(Path, "rename", rename)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.delattr(os, "sync")
    checkpoints = make_checkpoints(keep_checkpoints=1)
    for step in (1, 2):
        happened.clear()
        checkpoints.write(STATE, {"step": step})
    assert happened[-3:] == ["rename step_00000002.tmp", str(folder), "rename step_00000001"]
    assert kept(tmp_path) == ["step_00000002"]


def test_facts_that_an_older_checkpoint_lacks_are_not_compared(make_checkpoints, tmp_path):
    facts = {"model_hash": "one", "tokenizer_hash": "one", "data_hash": "one", "seed": 0}
    make_checkpoints(**facts).write(STATE, {"step": 1})
    now = {"model_hash": "two", "tokenizer_hash": "two", "data_hash": "one", "seed": 0}
    with pytest.raises(common.Refusal, match="model_hash one .now two., tokenizer_hash one .now"):
        make_checkpoints(**now).find("auto")
    file = tmp_path / "checkpoints/step_00000001/checkpoint.json"
    facts = json.loads(file.read_text())
    older = {"model_tokenizer_data": "one"} | facts
    for name in ("model_hash", "tokenizer_hash", "data_hash"):
        del older[name]
    common.write_json(file, older)
    newest, progress = make_checkpoints(**now).find("auto")
    assert (newest, progress["step"]) == (file.parent, 1)


def test_what_an_unfinished_write_left_is_removed_before_the_next(make_checkpoints, tmp_path):
    folder = tmp_path / "checkpoints"
    for name in ("step_00000001.tmp", "step_00000009.tmp", "mine.tmp"):
        (folder / name).mkdir(parents=True)
        (folder / name / "old").write_text("old")
    make_checkpoints().write(STATE, {"step": 1})
    assert kept(tmp_path) == ["mine.tmp", "step_00000001"]
    assert not (folder / "step_00000001/old").exists()


def test_the_newest_by_number_stay(make_checkpoints, tmp_path):
    checkpoints = make_checkpoints()
    for step in (9, 10, 9_999, 10_000, 99_999_999):
        checkpoints.write(STATE, {"step": step})
    assert kept(tmp_path) == ["step_00010000", "step_99999999"]


@pytest.mark.drill
def test_a_pipeline_passes_torchs_own_checks(flags, tmp_path, monkeypatch):
    """PyTorch compares the collectives of all ranks, which differ between stages."""
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    small_shape(num_hidden_layers=4).save_pretrained(tmp_path / "shape")
    own = {"pipeline_parallel": 4, "model": tmp_path / "shape", "run_dir": tmp_path / "run"}
    done = launch(4, "fsdp2_pp_pretrain", flags | own)
    assert done.returncode == 0, done.stderr


# --- Kill storm -----------------------------------------------------------------------------------


@pytest.mark.drill
@pytest.mark.parametrize(
    "script, background, kills, tokens",
    share(
        [
            ("fsdp2_pretrain", "true", 6, 16384),
            ("fsdp2_muon_pretrain", "true", 4, 8192),
            ("fsdp2_pp_pretrain", "true", 4, 8192),
            ("fsdp2_ep_pretrain", "false", 4, 8192),
            ("fsdp2_nd_pretrain", "true", 4, 4096),
        ]
    ),
)
def test_a_run_that_is_killed_again_and_again_ends_like_an_undisturbed_one(
    flags, mixture_directory, tmp_path, script, background, kills, tokens
):
    """The global batches make steps slow enough to be hit."""
    if script == "fsdp2_ep_pretrain":
        flags = flags | {"model": mixture_directory}
    if script == "fsdp2_nd_pretrain":
        flags = flags | {"tensor_parallel": 2, "batching": "packed"}
    flags = flags | {"steps": 3 * kills, "checkpoint_every": 2, "async_checkpoint": background}
    flags |= {"global_batch_tokens": tokens}
    whole, storm = tmp_path / "whole", tmp_path / "storm"
    program = [sys.executable, str(ROOT / "tests/support/storm.py"), script]
    for number, run_dir in ((0, whole), (kills, storm)):
        words = [str(number), "1", *arguments(flags | {"run_dir": run_dir})]
        done = subprocess.run([*program, *words], capture_output=True, text=True, timeout=HANGS)
        assert (done.returncode, done.stderr) == (0, ""), done.stdout
    print(done.stdout)
    assert sum("-9" in line for line in done.stdout.splitlines()) == kills
    assert losses(storm) == losses(whole) and same(storm, whole)
    assert kept(storm) == kept(whole)
    assert {p.name for p in storm.iterdir()} == {p.name for p in whole.iterdir()}
