"""What a start must not destroy, what it must notice, and what it says then."""

import contextlib
import errno
import fcntl
import inspect
import json
import math
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
import textwrap
import weakref
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
    load_documents,
    metrics,
    tree,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import common
import fsdp2_grpo
import fsdp2_lora
import fsdp2_pretrain
import fsdp2_sft
from run import CORES, Run

FLAGS = {**SMALL, "global_batch_tokens": 512, "steps": 4, "checkpoint_every": 2, "eval_every": 4}


@pytest.fixture(scope="module")
def flags(corpus, shape_directory) -> dict:
    return {**FLAGS, "dataset": corpus, "model": shape_directory}


@pytest.fixture(scope="module")
def complete(flags, tmp_path_factory) -> tuple[Path, str]:
    """A complete run, and what it printed."""
    run_dir = tmp_path_factory.mktemp("complete") / "run"
    done = launch(0, "fsdp2_pretrain", flags | {"run_dir": run_dir})
    assert (done.returncode, done.stderr) == (0, "")
    return run_dir, done.stdout


@pytest.fixture
def copied(complete, tmp_path) -> Path:
    shutil.copytree(complete[0], tmp_path / "copied")
    return tmp_path / "copied"


def refused(flags: dict, *unchanged: Path) -> str:
    """Start a run that is refused and leaves these folders as they are; returns its one line."""
    before = [tree(folder) for folder in unchanged]
    done = launch(0, "fsdp2_pretrain", flags)
    assert done.returncode == 2, (done.stdout, done.stderr)
    [line] = done.stderr.splitlines()
    assert [tree(folder) for folder in unchanged] == before
    return line


# --- A run directory is absent, empty, or the run that this start resumes -------------------------

FOREIGN = "is neither empty nor a run that this start resumes"


def test_a_checkpoint_of_one_run_does_not_start_in_the_directory_of_another(
    flags, complete, copied
):
    start = {"resume": complete[0] / "checkpoints/step_00000002", "run_dir": copied}
    assert FOREIGN in refused(flags | start, copied)
    shutil.rmtree(copied / "checkpoints/step_00000002")  # the same without a step of this name
    assert FOREIGN in refused(flags | start, copied, complete[0])


def test_a_run_that_lost_its_checkpoints_keeps_its_metrics(flags, copied):
    shutil.rmtree(copied / "checkpoints")
    assert FOREIGN in refused(flags | {"run_dir": copied}, copied)
    shutil.rmtree(copied / "hf")  # the same for a run that was stopped early
    lines = (copied / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copied / "metrics.jsonl").write_text("".join(lines[:2] * 3))  # more than one checkpoint's
    assert FOREIGN in refused(flags | {"run_dir": copied}, copied)


def test_a_run_that_died_in_its_first_checkpoint_starts_again(flags, complete, copied):
    shutil.rmtree(copied / "hf")
    shutil.rmtree(copied / "checkpoints/step_00000004")
    (copied / "checkpoints/step_00000002").rename(copied / "checkpoints/step_00000002.tmp")
    lines = (copied / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copied / "metrics.jsonl").write_text("".join(lines[:2]) + lines[2][:20])
    done = launch(0, "fsdp2_pretrain", flags | {"run_dir": copied})
    assert (done.returncode, done.stderr) == (0, "")
    assert [x["loss"] for x in metrics(copied)[0]] == [x["loss"] for x in metrics(complete[0])[0]]
    assert not (copied / "checkpoints/step_00000002.tmp").exists()


@pytest.mark.parametrize("name", ["x.tmp", "metrics.jsonl", "config.json", "hf/model.safetensors"])
def test_files_that_are_not_a_runs_are_left_alone(flags, name, tmp_path):
    file = tmp_path / "theirs" / name
    file.parent.mkdir(parents=True)
    file.write_text('{"step": 1}\n')
    line = refused(flags | {"run_dir": tmp_path / "theirs"}, tmp_path)
    assert FOREIGN in line


def test_linked_checkpoints_are_the_runs_own(flags, complete, copied, tmp_path):
    """They may be on another disk. The second start fails if the first has left half of one."""
    link = "checkpoints"
    shutil.move(copied / link, tmp_path / "elsewhere")
    (copied / link).symlink_to(tmp_path / "elsewhere")
    more = {"run_dir": copied, "steps": 6, "keep_checkpoints": 1}
    shutil.rmtree(copied / "hf")
    for _ in range(2):
        done = launch(0, "fsdp2_pretrain", flags | more)
        assert (done.returncode, done.stderr) == (0, "")
    assert [line["step"] for line in metrics(copied)[0]] == [1, 2, 3, 4, 5, 6]
    assert metrics(copied)[0][:4] == metrics(complete[0])[0]


def test_other_weights_do_not_start_in_the_directory_of_a_run(flags, weights_directory, copied):
    """The old run would continue, and nobody would read the new weights."""
    start = flags | {"init_from": weights_directory, "tokenizer": "bytes", "run_dir": copied}
    line = refused(start, copied)
    assert f"was written with init_from None (now {weights_directory}), weights_hash None" in line


# --- What a start says and keeps ------------------------------------------------------------------


def test_a_start_says_what_begins(flags, complete, copied):
    """In three lines at most, also if it resumes. With offloading, one more on threads."""
    before, first, _ = complete[1].partition("step 1/4  loss ")
    assert first
    documents = load_documents(flags["dataset"])
    data, ranks = before.splitlines()
    count = f"{len(documents.lengths)} documents, {documents.lengths.sum():,} tokens"
    assert re.fullmatch(f"[0-9,]+ parameters, {count}; writing {complete[0]}", data)
    work = "1 micro-batch per rank and step, 512 tokens, learning rate 0.003"
    assert ranks == f"fp32 on 1 rank (1 x 1 shards), {work}"
    own = {"run_dir": copied, "steps": 5, "cpu_offload": True}
    said = launch(0, "fsdp2_pretrain", flags | own).stdout.partition("step 5/5")[0].splitlines()
    cores = len({path.read_text() for path in CORES.glob("cpu*/topology/core_cpus_list")})
    if cores > 1:  # a launch here sets one thread
        assert said.pop() == f"the optimizer runs on the CPU: export OMP_NUM_THREADS={cores}"
    assert said[0] == f"resuming from {copied}/checkpoints/step_00000004" and len(said) == 3


def test_a_run_directory_keeps_the_code_as_it_ran(complete):
    for name in ("fsdp2_pretrain.py", "common.py", "model.py", "run.py"):
        assert (complete[0] / name).read_bytes() == (ROOT / name).read_bytes()
    facts = json.loads((complete[0] / "config.json").read_text())
    given = fsdp2_pretrain.Config.__dataclass_fields__.keys()
    assert facts.keys() - given == {
        *("model_hash", "tokenizer_hash", "data_hash", "weights_hash"),
        *("parameters", "world_size", "torch", "transformers"),
    }
    assert facts["learning_rate"] == 0.003  # which no flag has set


NO_LOCKS = [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP]


@pytest.mark.parametrize("number", [*NO_LOCKS, errno.EACCES, errno.EAGAIN], ids=os.strerror)
def test_file_locks_that_a_file_system_lacks(number, tmp_path, monkeypatch, capsys):
    """A run goes on without its lock, with a word. A lock that another process holds ends it."""

    def lockf(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", lockf)
    monkeypatch.setattr(sys, "argv", [str(ROOT / "fsdp2_pretrain.py")])
    config = SimpleNamespace(run_dir="run", wandb_project=None)
    run = SimpleNamespace(directory=tmp_path / "run", config=config, facts={"seed": 0})
    lacks = number in NO_LOCKS
    with contextlib.nullcontext() if lacks else pytest.raises((PermissionError, BlockingIOError)):
        Run.open_files(run, {"metrics_bytes": 0})
    assert (tmp_path / "run/config.json").exists() == lacks
    assert ("no file lock here" in capsys.readouterr().out) == lacks


# --- Invariants and learning rates ----------------------------------------------------------------


def test_a_weight_that_nothing_initializes_ends_the_first_step(flags, tmp_path, monkeypatch):
    text = (ROOT / "model.py").read_text()
    right = "        model._init_weights(module)\n"
    assert text.count(right) == 1
    wrong = f"        if not names[module].endswith('up_proj'):\n    {right}"
    (tmp_path / "model.py").write_text(text.replace(right, wrong))
    shutil.copy(ROOT / "fsdp2_pretrain.py", tmp_path)
    monkeypatch.setenv("COPIED", str(tmp_path / "fsdp2_pretrain.py"))
    done = launch(0, "copied", flags | {"run_dir": tmp_path / "run"})
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("error: step 1: the loss (nan) or the gradient norm (nan) is not finite")
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == b""


# Peak for a model below 10 million parameters, peak for a larger one, and peak over minimum.
RATES = {
    fsdp2_pretrain: (3e-3, 3e-4, 50),
    fsdp2_sft: (2e-3, 2e-5, 10),
    fsdp2_lora: (1e-2, 2e-4, 10),
    fsdp2_grpo: (5e-4, 1e-6, 10),
}


@pytest.mark.parametrize("script", RATES, ids=lambda script: script.__name__)
def test_learning_rates_depend_on_the_model(script):
    """Unless flags set them. The rates of a tiny model would ruin a large one."""
    source = inspect.getsource(script.main)
    lines = re.search(r"(    default = .*\n)?    set_learning_rates\(.*\n", source)[0]

    def rates(parameters: int, **flags) -> tuple[float, float]:
        config = {"learning_rate": None, "min_learning_rate": None, "init_from": None} | flags
        made = SimpleNamespace(**config)
        model = SimpleNamespace(num_parameters=lambda: parameters)
        exec(textwrap.dedent(lines), vars(script) | {"config": made, "model": model})
        return made.learning_rate, made.min_learning_rate

    small, large, part = RATES[script]
    assert rates(9_999_999) == (small, small / part)
    assert rates(10_000_000) == (large, large / part)
    if script is fsdp2_pretrain:
        assert rates(10_000_000, init_from="run") == (large / 10, large / 10 / part)
    assert rates(10**9, learning_rate=0.5, init_from="run") == (0.5, 0.5 / part)
    assert rates(1, learning_rate=0.5, min_learning_rate=0.0) == (0.5, 0.0)
    assert rates(1, learning_rate=0.5, min_learning_rate=0.5) == (0.5, 0.5)
    with pytest.raises(common.Refusal, match="--min_learning_rate is above --learning_rate"):
        rates(1, min_learning_rate=1.0)


def test_the_learning_rate_decays_from_the_warm_up_on_or_at_the_end_alone():
    """In every script, because `learning_rate_at` is the same text in all (tests/pages/test_house.py)."""

    def rates(decay_steps: int | None, steps: int = 20) -> list[float]:
        config = SimpleNamespace(learning_rate=0.03, min_learning_rate=0.001, warmup_steps=5)
        vars(config).update(steps=steps, decay_steps=decay_steps)
        return [fsdp2_pretrain.learning_rate_at(step, config) for step in range(1, steps + 1)]

    cosine = [(1 + math.cos(math.pi * (step - 5) / 15)) / 2 for step in range(6, 21)]
    warm_up = [0.03 * step / 5 for step in range(1, 6)]
    expected = warm_up + [0.001 + part * (0.03 - 0.001) for part in cosine]
    assert rates(None) == rates(15) == rates(99) == expected
    late = rates(8)
    assert late[:12] == warm_up + 7 * [0.03] == rates(8, steps=30)[:12]
    assert sorted(late[11:], reverse=True) == late[11:] and len({*late[11:]}) == 9
    assert late[-1] == pytest.approx(0.001)
    assert late[12:] == rates(8, steps=30)[22:]


def test_a_longer_run_cools_down_to_the_shorter_one(flags, tmp_path):
    """With --decay_steps. From its checkpoint on, another directory gets the same bits."""

    def run(name: str, **more) -> list[float]:
        own = {"run_dir": tmp_path / name, "decay_steps": 2, "keep_checkpoints": 9, "eval_every": 9}
        done = launch(0, "fsdp2_pretrain", flags | own | more)
        assert (done.returncode, done.stderr) == (0, "")
        return [line["loss"] for line in metrics(tmp_path / name)[0]]

    def weights(name: str, step: int) -> bytes:
        return (tmp_path / name / f"hf{step}/model.safetensors").read_bytes()

    short, long = run("short", steps=4), run("long", steps=6)
    common.export(tmp_path / "long/checkpoints/step_00000002", tmp_path / "long/hf2")
    common.export(tmp_path / "short/checkpoints/step_00000002", tmp_path / "short/hf2")
    assert weights("long", 2) == weights("short", 2)
    assert long[:3] == short[:3] and long[3] != short[3]  # the rate of step 3 shows in step 4
    cooled = run("cooled", steps=4, resume=tmp_path / "long/checkpoints/step_00000002")
    assert cooled == short[2:]
    assert weights("cooled", "") == weights("short", "")


def test_a_run_without_checkpoints(flags, complete, tmp_path):
    """It may start over, and a signal to stop ends it. With a peak, CPUs have an MFU."""
    own = {"run_dir": tmp_path / "run", "checkpoint_every": 0, "peak_tflops": 0.1}
    stop = [{"call": "run.Run.log_step", "do": "terminate"}]  # step 2 is the next one to notice
    for steps, faults in (4, []), (2, stop):
        done = launch(0, "fsdp2_pretrain", flags | own, faults)
        assert (done.returncode, done.stderr) == (0, "")
        last = f"ended after step {steps}; no checkpoint and no hf/ (--checkpoint_every 0)"
        assert done.stdout.splitlines()[-1] == last
        lines = metrics(tmp_path / "run")[0]
        expected = [x["loss"] for x in metrics(complete[0])[0]]
        assert [x["loss"] for x in lines] == expected[:steps]
        assert all(0 < x["mfu"] < 1 and x["allocator_retries"] == 0 for x in lines)
        names = {path.name for path in (tmp_path / "run").iterdir() if path.suffix != ".py"}
        assert names == {"config.json", "metrics.jsonl"}
    own |= {"checkpoint_every": 2, "resume": "never"}  # nothing is lost
    assert launch(0, "fsdp2_pretrain", flags | own).returncode == 0
    assert FOREIGN in refused(flags | own | {"checkpoint_every": 0}, tmp_path)


# --- A checkpoint in one file ---------------------------------------------------------------------


def test_a_checkpoint_becomes_one_file_and_a_checkpoint_again(
    flags, complete, tmp_path, monkeypatch
):
    """By the commands of docs/checkpoints.md. The resumed run has the same losses."""

    def convert(*words: Path | str) -> None:
        monkeypatch.setattr(sys, "argv", ["format_utils", *map(str, words)])
        runpy.run_module("torch.distributed.checkpoint.format_utils", run_name="__main__")

    checkpoint, file = complete[0] / "checkpoints/step_00000002", tmp_path / "state.pt"
    convert("dcp_to_torch", checkpoint, file)
    state = torch.load(file, mmap=True, weights_only=True)
    assert state.keys() == {"model", "optimizer"}
    common.export(checkpoint, tmp_path / "hf")
    exported = load_file(tmp_path / "hf/model.safetensors")
    assert all(torch.equal(state["model"][name], exported[name]) for name in exported)
    assert exported.keys() <= state["optimizer"]["state"].keys()
    back = tmp_path / "back"
    convert("torch_to_dcp", file, back)
    shutil.copy(checkpoint / "checkpoint.json", back)
    shutil.copytree(checkpoint / "hf", back / "hf")
    done = launch(0, "fsdp2_pretrain", flags | {"resume": back, "run_dir": tmp_path / "run"})
    assert (done.returncode, done.stderr) == (0, "")
    expected = [x["loss"] for x in metrics(complete[0])[0]]
    assert [x["loss"] for x in metrics(tmp_path / "run")[0]] == expected[2:]


# --- Edited and damaged files of a run ------------------------------------------------------------


def test_a_resumed_run_keeps_the_lines_that_its_checkpoint_had(flags, complete, copied):
    """By their number of bytes, whatever they hold. Later ones go, also one that is incomplete."""
    lines = (copied / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    note = b'{"note": "mine"}'.ljust(len(lines[1]) - 1) + b"\n"
    (copied / "metrics.jsonl").write_bytes(lines[0] + note + lines[2] + lines[3][:20])
    shutil.rmtree(copied / "hf")
    shutil.rmtree(copied / "checkpoints/step_00000004")
    done = launch(0, "fsdp2_pretrain", flags | {"run_dir": copied})
    assert (done.returncode, done.stderr) == (0, "")
    kept, *added = (copied / "metrics.jsonl").read_bytes().split(note)
    assert kept == lines[0]
    added = [json.loads(line) for line in added[0].splitlines()]
    expected = [json.loads(line) for line in lines[2:]]
    for name in ("step", "loss", "validation_loss"):
        assert [x.get(name) for x in added] == [x.get(name) for x in expected]


def test_metrics_stay_if_config_json_cannot_be_written(flags, copied):
    (copied / "config.json").unlink()
    (copied / "config.json").mkdir()
    resumed = {"resume": "auto", "run_dir": copied, "steps": 6}
    assert "Is a directory" in refused(flags | resumed, copied)


# --- Flags, data and directories of the ranks -----------------------------------------------------


def two_ranks(flags: dict, folders: list[Path], changes: list[dict]) -> list[tuple[int, str]]:
    """Start two ranks by hand, each in a folder of its own; returns their codes and stderr."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for rank, (folder, change) in enumerate(zip(folders, changes)):
        variables = {"RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        variables |= {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        words = [sys.executable, str(ROOT / "fsdp2_pretrain.py"), *arguments(flags | change)]
        started = subprocess.Popen(
            words, cwd=folder, env=os.environ | variables, stderr=subprocess.PIPE, text=True
        )
        ranks.append(started)
    return [(rank.wait(HANGS), rank.stderr.read()) for rank in ranks]


@pytest.mark.parametrize(
    "what, expected",
    [
        ("flags", "rank [01] has seed [07] .now [07]."),
        pytest.param("data", "rank [01] has data_hash [^,]*$", marks=pytest.mark.drill),
        pytest.param(
            "directory", "ranks do not write to the same directory", marks=pytest.mark.drill
        ),
        pytest.param(
            "checkpoints", "is not a complete checkpoint", marks=pytest.mark.drill
        ),  # of rank 0
    ],
)
def test_ranks_with_different_inputs_are_refused(flags, texts, tmp_path, what, expected):
    folders = [tmp_path / "first", tmp_path / "second"]
    for number, folder in enumerate(folders):
        folder.mkdir()
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        removed = number if what == "data" else 0
        (folder / "documents.jsonl").write_text("".join(lines[removed:]))
    flags = flags | {"global_batch_tokens": 1024, "dataset": "documents.jsonl", "run_dir": "run"}
    flags["timeout_minutes"] = HANGS  # a rank that waits for the other one would not end in time
    if what == "checkpoints":
        (folders[0] / "run/checkpoints/step_00000002").mkdir(parents=True)
    for code, said in two_ranks(flags, folders, [{}, {"seed": 7} if what == "flags" else {}]):
        assert code == (1 if what == "directory" else 2) and "Traceback" not in said, said
        assert re.search(f"{expected}|rank [01] lost another rank", said), said
    # A directory that differs is noticed at the first checkpoint.
    assert (folders[0] / "run").exists() == (what in ("directory", "checkpoints"))
    assert not list(folders[0].glob("run/checkpoints/step_????????/checkpoint.json"))


def test_an_upgrade_of_transformers_does_not_make_another_run(flags, copied, tmp_path):
    """And the same architecture from another directory is the same model."""
    model = tmp_path / "model"
    shutil.copytree(flags["model"], model)
    config = json.loads((model / "config.json").read_text())
    config["transformers_version"] = "99.0.0"
    (model / "config.json").write_text(json.dumps(config))
    change = {"model": model, "run_dir": copied, "steps": 5}
    done = launch(0, "fsdp2_pretrain", flags | change)
    assert (done.returncode, done.stderr) == (0, "")
    assert "resuming from" in done.stdout


# --- Preparing data -------------------------------------------------------------------------------


@pytest.mark.drill
def test_a_disk_that_is_full_while_processes_tokenize(flags, tmp_path):
    """The copy of 1.8 MB fits. What each of two processes writes, 2.15 bytes a token, does not."""
    documents = tmp_path / "documents.jsonl"
    documents.write_text(
        "".join(json.dumps({"text": f"{n} words " * 40}) + "\n" for n in range(4000))
    )
    flags = flags | {"dataset": documents, "run_dir": tmp_path / "run", "steps": 0}
    done = limited(1800, ["fsdp2_pretrain.py", *arguments(flags)], tmp_path / "cache")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: --dataset")
    assert "File too large" in done.stderr and "Traceback" not in done.stderr
    done = limited(100_000, ["fsdp2_pretrain.py", *arguments(flags)], tmp_path / "cache")
    assert (done.returncode, done.stderr) == (0, "")


def limited(kilobytes: int, words: list[str], cache: Path) -> subprocess.CompletedProcess:
    """Run a program that cannot write more than this into a file, as on a full disk."""
    words = ["bash", "-c", f'ulimit -f {kilobytes}; exec "$@"', "bash", sys.executable, *words]
    environment = os.environ | {"HF_HOME": str(cache), "HF_DATASETS_CACHE": str(cache)}
    two = sorted(os.sched_getaffinity(0))[:2]  # as many processes write
    return subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, two),
    )  # fmt: skip


# --- Export, and the end of a run -----------------------------------------------------------------


def export(checkpoint: Path, out: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["common.py", "export", str(checkpoint), str(out)])
    common.command_line()


def test_export_writes_what_the_run_writes_and_removes_nothing(
    flags, complete, tmp_path, monkeypatch
):
    run_dir, out = complete[0], tmp_path / "out"
    export(run_dir / "checkpoints/step_00000004", out, monkeypatch)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    files = tree(out)
    assert {name: content for name, (_, content) in files.items()} == {
        name: content for name, (_, content) in tree(run_dir / "hf").items()
    }
    with pytest.raises(common.Refusal, match="Directory not empty"):
        export(run_dir / "checkpoints/step_00000004", out, monkeypatch)
    assert tree(out) == files

    start = {"init_from": out, "run_dir": tmp_path / "from_out", "steps": 1}
    start = {name: value for name, value in (flags | start).items() if name != "model"}
    first = {}
    for name, weights in (("out", out), ("run", run_dir)):
        change = {"init_from": weights, "run_dir": tmp_path / f"from_{name}"}
        assert launch(0, "fsdp1_pretrain", start | change).returncode == 0
        first[name] = metrics(tmp_path / f"from_{name}")[0][0]["loss"]
    assert first["out"] == first["run"] != metrics(run_dir)[0][0]["loss"]


@pytest.mark.parametrize("checkpoint", [".", "nowhere"])
def test_export_of_what_is_not_a_checkpoint_is_refused(checkpoint, tmp_path, monkeypatch):
    with pytest.raises(common.Refusal, match="No such file or directory: .*hf"):
        export(tmp_path / checkpoint, tmp_path / "out", monkeypatch)
    monkeypatch.setattr(sys, "argv", ["common.py", "export"])
    with pytest.raises(common.Refusal, match="^python common.py export CHECKPOINT OUT"):
        common.command_line()


def test_export_holds_one_file_of_weights_at_a_time(complete, tmp_path, monkeypatch):
    """In bf16 here. Plain transformers loads what it writes."""
    split = common.huggingface_hub.split_torch_state_dict_into_shards
    save, sizes, alive = common.save_file, [], weakref.WeakSet()

    def save_and_count(tensors, *words, **options):
        assert not alive  # the tensors of the file before are gone
        alive.update(tensors.values())
        sizes.append(sum(tensor.nbytes for tensor in tensors.values()))
        save(tensors, *words, **options)

    monkeypatch.setattr(common, "save_file", save_and_count)
    monkeypatch.setattr(
        common.huggingface_hub,
        "split_torch_state_dict_into_shards",
        lambda tensors: split(tensors, max_shard_size=30_000),
    )
    common.export(complete[0] / "checkpoints/step_00000004", tmp_path / "out", "bfloat16")
    assert len(sizes) == len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 2
    assert max(sizes) <= 30_000
    exact, rounded = (
        AutoModelForCausalLM.from_pretrained(path)
        for path in (complete[0] / "hf", tmp_path / "out")
    )
    assert (exact.dtype, rounded.dtype) == (torch.float32, torch.bfloat16)
    expected = exact.state_dict()
    for name, tensor in rounded.state_dict().items():
        assert tensor.equal(expected[name].bfloat16()), name


def test_export_to_places_that_cannot_be_written_is_one_line(complete, tmp_path, monkeypatch):
    checkpoint = complete[0] / "checkpoints/step_00000004"
    words = ["common.py", "export", str(checkpoint), str(tmp_path / "out")]
    done = limited(8, words, tmp_path)  # the disk is full
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("error: python common.py export ") and "File too large" in line
    assert not (tmp_path / "out").exists()
    for out in ("/proc/out", f"{checkpoint}/checkpoint.json/out"):
        with pytest.raises(common.Refusal, match="^python common.py export .*Errno"):
            export(checkpoint, Path(out), monkeypatch)


def test_the_last_lines_are_commands_that_run(complete):
    """None is "next:" after data of one's own, because the next script would read other data."""
    assert complete[1].splitlines()[-1] == f"try:   python sample.py {complete[0]}"
    for path in ROOT.glob("*_pretrain.py"):
        following = re.findall(r'^NEXT_COMMAND = "torchrun .* (\w+\.py)', path.read_text(), re.M)
        assert len(following) == 1 and (ROOT / following[0]).exists()


# --- Terminals and paths --------------------------------------------------------------------------


def test_a_terminal_that_is_gone_does_not_end_a_run(monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        common.say("a line")
        assert sys.stdout.name == os.devnull
        common.say("another line")
        with contextlib.suppress(OSError):
            full.close()


def test_a_reader_that_leaves_and_an_ascii_terminal_do_not_end_a_run(flags, tmp_path):
    words = arguments(flags | {"run_dir": tmp_path / "läuft", "steps": 2})
    command = f"{sys.executable} fsdp2_pretrain.py {' '.join(words)} | head -1"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], cwd=ROOT, env=environment, capture_output=True
    )
    assert (done.returncode, done.stderr) == (0, b"")
    run_dir = tmp_path / "läuft"
    assert (run_dir / "hf/model.safetensors").exists()
    kept = {path.name for path in run_dir.glob("*.py")}
    assert kept == {"fsdp2_pretrain.py", "common.py", "model.py", "run.py"}  # what it imports
