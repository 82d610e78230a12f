"""What a start must not destroy, what it must notice, and what it says then."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import filelock
import pytest
from conftest import HANGS, ROOT, SMALL, arguments, launch, load_documents, metrics, tree

import common

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

FOREIGN = "holds a run that this start does not resume; use another"


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
    assert "holds files that are not a run's; use another one" in line


@pytest.mark.parametrize("link", ["checkpoints", "checkpoints/step_00000004"])
def test_linked_checkpoints_are_the_runs_own(flags, complete, copied, tmp_path, link):
    """They may be on another disk. Metrics stay, and an old checkpoint that is a link is unlinked.

    The second start fails if the first one has left half of a checkpoint.
    """
    shutil.move(copied / link, tmp_path / "elsewhere")
    (copied / link).symlink_to(tmp_path / "elsewhere")
    more = {"run_dir": copied, "steps": 6, "keep_checkpoints": 1}
    shutil.rmtree(copied / "hf")
    for _ in range(2):
        done = launch(0, "fsdp2_pretrain", flags | more)
        assert (done.returncode, done.stderr) == (0, "")
    assert [line["step"] for line in metrics(copied)[0]] == [1, 2, 3, 4, 5, 6]
    assert metrics(copied)[0][:4] == metrics(complete[0])[0]


# --- Edited and damaged files of a run ------------------------------------------------------------


def test_a_resumed_run_keeps_the_bytes_of_edited_metrics(flags, copied):
    """Someone has added a note, saved with CRLF, and sorted the lines."""
    lines = [line.encode() for line in (copied / "metrics.jsonl").read_text().splitlines()]
    note = '{"step": 2, "note": "größer\u2028二"}'.encode()
    lines = [lines[1], lines[0], lines[3], note, lines[2], *lines[4:]]
    lines = [line + b"\r\n" for line in lines]
    (copied / "metrics.jsonl").write_bytes(b"".join(lines) + b'{"step": 1, "half')
    shutil.rmtree(copied / "hf")
    shutil.rmtree(copied / "checkpoints/step_00000004")
    done = launch(0, "fsdp2_pretrain", flags | {"run_dir": copied})
    assert (done.returncode, done.stderr) == (0, "")
    kept = lines[0] + lines[1] + note + b"\r\n"
    assert (copied / "metrics.jsonl").read_bytes().startswith(kept + b'{"step": 3')
    steps = [json.loads(line)["step"] for line in (copied / "metrics.jsonl").open("rb")]
    assert steps == [2, 1, 2, 3, 4, 4]


def test_a_line_without_a_step_is_refused(flags, copied):
    with open(copied / "metrics.jsonl", "a") as file:
        file.write('{"note": "mine"}\n')
    line = refused(flags | {"run_dir": copied, "steps": 6}, copied)
    assert "metrics.jsonl has a line without a step: 'step'" in line


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
        ("flags", "rank 1 has seed 7, but rank 0 has 0"),
        pytest.param("data", "rank 1 has model, tokenizer or data ", marks=pytest.mark.drill),
        pytest.param(
            "directory", "ranks do not write to the same directory", marks=pytest.mark.drill
        ),
        pytest.param(
            "checkpoints", "no undamaged checkpoint", marks=pytest.mark.drill
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
        assert expected in said or "rank 1 lost another rank" in said
    # A directory that differs is noticed at the first checkpoint.
    assert (folders[0] / "run").exists() == (what in ("directory", "checkpoints"))
    assert not list(folders[0].glob("run/checkpoints/*/checkpoint.json"))


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


def test_ranks_with_a_full_cache_take_no_lock(flags, complete, tmp_path):
    """Otherwise the ranks of a node would wait for each other, one after the other."""
    lock = common.datasets.config.HF_DATASETS_CACHE / "prepared/lock"
    assert lock.exists()  # of the run that has filled the cache
    with filelock.FileLock(lock):
        change = {"global_batch_tokens": 1024, "run_dir": tmp_path, "steps": 1}
        done = launch(2, "ddp_pretrain", flags | change)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


def test_ranks_that_wait_say_for_what(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(common.datasets.config, "HF_DATASETS_CACHE", tmp_path)

    def acquire(self, timeout=None):
        if timeout is not None:
            raise filelock.Timeout("lock")

    monkeypatch.setattr(filelock.FileLock, "acquire", acquire)
    with common.prepare_in_turn("key"):
        said = capsys.readouterr().out
    assert said == f"waiting for another process, which prepares data in {tmp_path}/prepared\n"


def test_a_preparation_that_fails_is_not_done(tmp_path, monkeypatch):
    """The lock is free again, and the next start prepares the data."""
    monkeypatch.setattr(common.datasets.config, "HF_DATASETS_CACHE", tmp_path)
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), common.prepare_in_turn("key"):
            raise error
        assert not (tmp_path / "prepared/key").exists()
    with common.prepare_in_turn("key"):
        pass
    assert (tmp_path / "prepared/key").exists()


def test_data_is_prepared_on_the_cpus_of_this_process(tmp_path, monkeypatch):
    """Containers and schedulers give a process some CPUs of the machine."""
    file = tmp_path / "documents.jsonl"
    file.write_text('{"text": "a"}\n' * 5000)
    asked = []

    def prepare(self, *_, num_proc: int, **__):
        asked.append(num_proc)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 6, 7})
    monkeypatch.setattr(common.datasets.Dataset, "map", prepare)
    with pytest.raises(KeyboardInterrupt):
        load_documents(str(file))
    assert asked == [3]


@pytest.mark.drill
def test_a_disk_that_is_full_while_processes_tokenize(flags, tmp_path):
    documents = tmp_path / "documents.jsonl"
    documents.write_text(
        "".join(json.dumps({"text": f"{n} words " * 40}) + "\n" for n in range(4000))
    )
    flags = flags | {"dataset": documents, "run_dir": tmp_path / "run", "steps": 0}
    done = limited(2000, ["fsdp2_pretrain.py", *arguments(flags)], tmp_path / "cache")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: --dataset")
    assert "File too large" in done.stderr and "Traceback" not in done.stderr
    done = limited(100_000, ["fsdp2_pretrain.py", *arguments(flags)], tmp_path / "cache")
    assert (done.returncode, done.stderr) == (0, "")


def limited(kilobytes: int, words: list[str], cache: Path) -> subprocess.CompletedProcess:
    """Run a program that cannot write more than this into a file, as on a full disk."""
    words = ["bash", "-c", f'ulimit -f {kilobytes}; exec "$@"', "bash", sys.executable, *words]
    environment = os.environ | {"HF_HOME": str(cache), "HF_DATASETS_CACHE": str(cache)}
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)


# --- Export, and the end of a run -----------------------------------------------------------------


def export(checkpoint: Path, out: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["common.py", "export", str(checkpoint), str(out)])
    common.command_line()


def test_export_writes_what_the_run_writes_and_removes_nothing(
    flags, complete, tmp_path, monkeypatch
):
    run_dir, out = complete[0], tmp_path / "out"
    (tmp_path / "out.tmp").mkdir()
    export(run_dir / "checkpoints/step_00000004", out, monkeypatch)
    assert {path.name for path in tmp_path.iterdir()} == {"out", "out.tmp"}
    files = tree(out)
    assert {name: content for name, (_, content) in files.items()} == {
        name: content for name, (_, content) in tree(run_dir / "hf").items()
    }
    assert json.loads((out / "checkpoint.json").read_text())["progress"]["step"] == 4
    with pytest.raises(common.Refusal, match="out exists already"):
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


@pytest.mark.parametrize(
    "checkpoint, message",
    [(".", "checkpoint.json is missing"), ("nowhere", "checkpoint.json is missing")],
)
def test_export_of_what_is_not_a_checkpoint_is_refused(checkpoint, message, tmp_path, monkeypatch):
    with pytest.raises(common.Refusal, match=message):
        export(tmp_path / checkpoint, tmp_path / "out", monkeypatch)
    monkeypatch.setattr(sys, "argv", ["common.py", "show"])
    with pytest.raises(common.Refusal, match="usage: python common.py export"):
        common.command_line()


def test_export_to_a_full_disk_is_one_line(complete, tmp_path):
    checkpoint = complete[0] / "checkpoints/step_00000004"
    words = ["common.py", "export", str(checkpoint), str(tmp_path / "out")]
    done = limited(8, words, tmp_path)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith(f"error: export to {tmp_path}/out: ")
    assert not (tmp_path / "out").exists()


def test_export_to_a_place_that_cannot_be_written_is_one_line(complete, monkeypatch):
    checkpoint = complete[0] / "checkpoints/step_00000004"
    for out in ("/proc/out", f"{checkpoint}/checkpoint.json/out"):
        with pytest.raises(common.Refusal, match=f"export to {out}: ") as refusal:
            export(checkpoint, Path(out), monkeypatch)
        assert refusal.value.code == 1 and "\n" not in str(refusal.value)


def test_the_last_line_is_a_command_that_runs(complete):
    """`--standalone` too, without which torchrun would need the address of a rendezvous."""
    last = complete[1].splitlines()[-1]
    assert last == "next:  torchrun --standalone --nproc-per-node=2 fsdp2_tp_pretrain.py"
    assert (ROOT / last.split()[-1]).exists()


# --- Terminals and paths --------------------------------------------------------------------------


def test_a_terminal_that_is_gone_does_not_end_a_run(monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        common.say("a line")
        assert os.readlink(f"/proc/self/fd/{full.fileno()}") == os.devnull
        common.say("another line")


def test_a_reader_that_leaves_and_an_ascii_terminal_do_not_end_a_run(flags, tmp_path):
    words = arguments(flags | {"run_dir": tmp_path / "run", "steps": 2})
    command = f"{sys.executable} fsdp2_pretrain.py {' '.join(words)} | head -1"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], cwd=ROOT, env=environment, capture_output=True
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert (tmp_path / "run/hf/model.safetensors").exists()


def test_a_run_dir_that_is_not_utf_8_is_refused(flags, tmp_path):
    """Otherwise the first checkpoint would fail, after the steps before it."""
    run_dir = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    line = refused(flags | {"run_dir": run_dir}, tmp_path)
    assert "caf\\udce9 cannot be read: 'utf-8' codec can't encode" in line
