"""What a start may not destroy, what it must notice, and what it says then."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from conftest import ROOT, SMALL, arguments, launch, metrics, tree

import common

FLAGS = {**SMALL, "global_batch_tokens": 512, "steps": 4, "checkpoint_every": 2, "eval_every": 4}


@pytest.fixture(scope="module")
def flags(corpus, shape_directory) -> dict:
    return {**FLAGS, "dataset": corpus, "model": shape_directory}


@pytest.fixture(scope="module")
def whole(flags, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    done = launch(0, "fsdp2_pretrain", flags | {"run_dir": run_dir})
    assert (done.returncode, done.stderr) == (0, "")
    return run_dir


@pytest.fixture
def copied(whole, tmp_path) -> Path:
    shutil.copytree(whole, tmp_path / "copied")
    return tmp_path / "copied"


def refused(flags: dict, *unchanged: Path) -> str:
    """The one line with which a start is refused that leaves these folders as they are."""
    before = [tree(folder) for folder in unchanged]
    done = launch(0, "fsdp2_pretrain", flags)
    assert done.returncode == 2, (done.stdout, done.stderr)
    [line] = done.stderr.splitlines()
    assert [tree(folder) for folder in unchanged] == before
    return line


# --- A run directory is absent, empty, or a run of ours that this start goes on with --------------


def test_the_checkpoint_of_one_run_does_not_start_in_the_directory_of_another(flags, whole, copied):
    start = {"resume": whole / "checkpoints/step_00000002", "run_dir": copied}
    assert "holds a run that this start does not go on with" in refused(flags | start, copied)
    shutil.rmtree(copied / "checkpoints/step_00000002")  # nor where it has no such step
    assert "does not go on with" in refused(flags | start, copied, whole)


def test_a_run_whose_checkpoints_are_gone_keeps_its_metrics(flags, copied):
    shutil.rmtree(copied / "checkpoints")
    assert "does not go on with" in refused(flags | {"run_dir": copied}, copied)
    shutil.rmtree(copied / "hf")  # it was stopped before its end
    assert "does not go on with" in refused(flags | {"run_dir": copied}, copied)


def test_a_run_that_died_in_its_first_checkpoint_begins_anew(flags, whole, copied):
    shutil.rmtree(copied / "hf")
    shutil.rmtree(copied / "checkpoints/step_00000004")
    (copied / "checkpoints/step_00000002").rename(copied / "checkpoints/step_00000002.tmp")
    lines = (copied / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copied / "metrics.jsonl").write_text("".join(lines[:2]) + lines[2][:20])
    done = launch(0, "fsdp2_pretrain", flags | {"run_dir": copied})
    assert (done.returncode, done.stderr) == (0, "")
    assert [x["loss"] for x in metrics(copied)[0]] == [x["loss"] for x in metrics(whole)[0]]
    assert not (copied / "checkpoints/step_00000002.tmp").exists()


@pytest.mark.parametrize("name", ["x.tmp", "metrics.jsonl", "config.json", "hf/model.safetensors"])
def test_files_of_others_stay(flags, name, tmp_path):
    file = tmp_path / "theirs" / name
    file.parent.mkdir(parents=True)
    file.write_text('{"step": 1}\n')
    assert "than those of a run" in refused(flags | {"run_dir": tmp_path / "theirs"}, tmp_path)


def test_the_directory_of_the_model_is_no_run_directory(flags, shape_directory):
    line = refused(flags | {"run_dir": shape_directory}, Path(shape_directory))
    assert "holds other files than those of a run" in line


@pytest.mark.parametrize("link", ["checkpoints", "checkpoints/step_00000004"])
def test_linked_checkpoints_are_the_runs_own(flags, whole, copied, tmp_path, link):
    """They may lie on another disk: metrics stay, and an old one that is a link is unlinked."""
    shutil.move(copied / link, tmp_path / "elsewhere")
    (copied / link).symlink_to(tmp_path / "elsewhere")
    more = {"run_dir": copied, "steps": 6, "keep_checkpoints": 1}
    shutil.rmtree(copied / "hf")
    done = launch(0, "fsdp2_pretrain", flags | more)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line["step"] for line in metrics(copied)[0]] == [1, 2, 3, 4, 5, 6]
    assert metrics(copied)[0][:4] == metrics(whole)[0]
    done = launch(0, "fsdp2_pretrain", flags | more)  # and every start after it
    assert (done.returncode, done.stderr) == (0, "")


def test_an_old_checkpoint_that_stays_is_said(tmp_path, monkeypatch, capsys):
    def rmtree(path):
        raise OSError("Directory not empty")

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    common.remove(tmp_path)
    assert "cannot be removed: Directory not empty" in capsys.readouterr().out


def test_export_removes_nothing(whole, tmp_path):
    (tmp_path / "out.tmp").mkdir()
    checkpoint = whole / "checkpoints/step_00000004"
    command = [sys.executable, "common.py", "export", checkpoint, tmp_path / "out"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert {path.name for path in tmp_path.iterdir()} == {"out", "out.tmp"}
    made = tree(tmp_path)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "out exists already" in done.stderr
    assert tree(tmp_path) == made


def test_hf_says_its_step(whole):
    description = json.loads((whole / "hf/checkpoint.json").read_text())
    assert description["progress"]["step"] == 4


# --- Damaged and strange files of a run -----------------------------------------------------------


def test_metrics_of_no_step_are_said_in_one_line(flags, copied):
    shutil.rmtree(copied / "hf")
    with open(copied / "metrics.jsonl", "a") as file:
        file.write('{"note": "mine"}\n')
    line = refused(flags | {"run_dir": copied, "steps": 6}, copied)
    assert "metrics.jsonl holds a line that is of no step: 'step'" in line


def test_a_directory_in_place_of_config_json_is_said_in_one_line(flags, copied):
    (copied / "config.json").unlink()
    (copied / "config.json").mkdir()
    line = refused(flags | {"run_dir": copied, "steps": 6}, copied)
    assert "Is a directory" in line


def test_a_file_where_a_write_left_over_would_be_does_not_end_a_run(flags, copied):
    (copied / "checkpoints/step_00000009.tmp").write_text("")
    done = launch(0, "fsdp2_pretrain", flags | {"run_dir": copied, "steps": 6})
    assert (done.returncode, done.stderr) == (0, "")
    assert "step_00000009.tmp cannot be removed" in done.stdout


# --- What a start can know ------------------------------------------------------------------------


def two_ranks(flags: dict, folders: list[Path], changes: list[dict]) -> list[tuple[int, str]]:
    """Ranks that were started by hand, each with a folder and flags of its own: code and stderr."""
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
    return [(rank.wait(60), rank.stderr.read()) for rank in ranks]


@pytest.mark.parametrize(
    "what",
    [
        "a flag",
        pytest.param("the data", marks=pytest.mark.drill),
        pytest.param("the directory", marks=pytest.mark.drill),
        pytest.param("its checkpoints", marks=pytest.mark.drill),
    ],
)
def test_ranks_of_unlike_flags_or_data_are_refused(flags, texts, tmp_path, what):
    folders = [tmp_path / "first", tmp_path / "second"]
    for number, folder in enumerate(folders):
        folder.mkdir()
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        removed = number if what == "the data" else 0
        (folder / "documents.jsonl").write_text("".join(lines[removed:]))
    flags = flags | {"global_batch_tokens": 1024, "dataset": "documents.jsonl", "run_dir": "run"}
    if what == "its checkpoints":
        (folders[0] / "run/checkpoints/step_00000002").mkdir(parents=True)
    changes = [{}, {"seed": 7} if what == "a flag" else {}]
    expected = "another model, tokenizer or data than rank 0"
    if what == "a flag":
        expected = "rank 1 has another seed than rank 0: 7, 0"
    if what == "its checkpoints":  # which rank 0 alone sees
        expected = "no undamaged checkpoint to go on from"
    if what == "the directory":
        expected = "--run_dir run has to be the same directory on all nodes"
    for code, said in two_ranks(flags, folders, changes):
        assert code == 2 and expected in said, said
        assert "Traceback" not in said and said.count("error: ") == 1
    assert (folders[0] / "run").exists() == (what in ("the directory", "its checkpoints"))
    assert (folders[1] / "run").exists() is False


def test_an_upgrade_of_transformers_is_no_other_run(whole, shape_directory):
    rows = type("Rows", (), {"digest": common.np.arange(3), "lengths": common.np.arange(3)})
    tokenizer = common.load_tokenizer("bytes")
    descriptions = []
    for version in ("5.0.0", "6.0.0"):
        config = transformers.AutoConfig.from_pretrained(shape_directory)
        config.transformers_version = version
        descriptions.append(common.describe_contents(config, tokenizer, rows))
    assert descriptions[0] == descriptions[1]


@pytest.mark.drill
def test_who_prepares_the_data_is_said_to_those_who_wait(tmp_path, monkeypatch, capsys):
    cache = Path(common.datasets.config.HF_DATASETS_CACHE)
    code = f"""
import sys, time; sys.path.insert(0, {str(ROOT)!r}); import common
with common.prepare_in_turn():
    print("in", flush=True); time.sleep(12)
"""
    holder = subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"HF_DATASETS_CACHE": str(cache)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout.readline() == "in\n"
    with common.prepare_in_turn():
        said = capsys.readouterr().out
    holder.wait()
    assert f"waiting for process {holder.pid}, which prepares data in {cache}" in said


# --- Full disks and closed terminals --------------------------------------------------------------


def limited(kilobytes: int, flags: dict, cache: Path) -> subprocess.CompletedProcess:
    """A launch in which no file may grow beyond a size, as on a disk that is almost full."""
    command = f"ulimit -f {kilobytes}; exec {sys.executable} fsdp2_pretrain.py "
    environment = os.environ | {"HF_HOME": str(cache), "HF_DATASETS_CACHE": str(cache)}
    command += " ".join(arguments(flags))
    return subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True
    )


@pytest.mark.drill
def test_a_disk_that_is_full_while_workers_tokenize(flags, tmp_path):
    documents = tmp_path / "documents.jsonl"
    documents.write_text(
        "".join(json.dumps({"text": f"{n} words " * 40}) + "\n" for n in range(4000))
    )
    flags = flags | {"dataset": documents, "run_dir": tmp_path / "run", "steps": 0}
    done = limited(2000, flags, tmp_path / "cache")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: --dataset")
    assert "File too large" in done.stderr and "Traceback" not in done.stderr
    assert not list((tmp_path / "cache").rglob("tmp*"))
    assert limited(100_000, flags, tmp_path / "cache").returncode == 0


def test_a_terminal_that_is_gone_does_not_end_a_run(flags, tmp_path):
    words = [sys.executable, "fsdp2_pretrain.py", *arguments(flags | {"run_dir": tmp_path / "run"})]
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "run/hf/model.safetensors").exists()


def test_ctrl_c_before_the_first_step_is_one_line(flags, tmp_path):
    fault = {"call": "load_rows", "do": "interrupt"}
    done = launch(0, "fsdp2_pretrain", flags | {"run_dir": tmp_path / "run"}, [fault])
    assert done.returncode == 1
    assert done.stderr == "error: rank 0 was interrupted before its first step\n"


def test_a_path_that_cannot_be_written_is_refused_at_the_start(tmp_path):
    words = [sys.executable.encode(), b"fsdp2_pretrain.py", b"--run_dir", b"/tmp/caf\xe9"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True)
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: '/tmp/caf\\udce9' cannot be written to a file")
