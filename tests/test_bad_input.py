"""What a user can get wrong ends in one clear line, exit code 2, and no hang."""

import re
import subprocess
import sys
import time

import pytest
from conftest import ROOT, SMALL, arguments, launch, metrics, small_shape, torchrun
from transformers import BloomConfig

BASE = {**SMALL, "steps": 2, "eval_every": 2}


START = {"init_from": "WEIGHTS", "tokenizer": "bytes"}
# Name -> flags beside the good ones, and what the error line must hold. FOLDER and WEIGHTS are
# replaced; "script" is not a flag but the script, fsdp2_pretrain if not given.
CASES = {
    "unknown flag": ({"learning_rat": 1}, "unknown flag --learning_rat"),
    "not a number": ({"steps": "many"}, "--steps: invalid int value: 'many'"),
    "not a choice": ({"batching": "sorted"}, "--batching: invalid choice: 'sorted'"),
    "not a strategy": (
        {"sharding_strategy": "some", "script": "fsdp1_pretrain"},
        "--sharding_strategy.*: invalid choice: 'some'",
    ),
    "other script's flag": (
        {"cpu_offload": "true", "script": "ddp_pretrain"},
        "unknown flag --cpu_offload",
    ),
    "no steps": ({"steps": -1}, "--steps -1 must not be negative"),
    "no time": ({"timeout_minutes": 0}, "--timeout_minutes 0.0 must be above 0"),
    "no checkpoint": ({"resume": "FOLDER"}, "neither auto, never nor a checkpoint"),
    "falling edges": ({"bucket_edges": [128, 64]}, "--bucket_edges .* must increase"),
    "edge zero": ({"bucket_edges": [0, 64]}, "--bucket_edges .* at least 1"),
    "late auto": ({"bucket_edges": [64, "auto"]}, "--bucket_edges auto stands alone or before"),
    "no edge": ({"bucket_edges": ["many"]}, "--bucket_edges.* invalid RowLength value: 'many'"),
    "long edge": ({"bucket_edges": [64, 1024]}, "--micro_batch_tokens 512 .* 1024"),
    "indivisible": ({"global_batch_tokens": 1000}, "512 or 1024 would be"),
    "too small": ({"global_batch_tokens": 100}, "; 512 would be"),
    "rates": ({"min_learning_rate": 1}, "--min_learning_rate 1.0 is above --learning_rate"),
    "negative": ({"weight_decay": -1}, "--weight_decay -1.0 must not be negative"),
    "fraction": ({"activation_checkpointing": 1.5}, "neither none, full"),
    "word": ({"activation_checkpointing": "half"}, "neither none, full"),
    "replicas": ({"dp_replicate": 3}, "--dp_replicate 3 does not divide"),
    "no replicas": ({"dp_replicate": 0}, "--dp_replicate 0 does not divide"),
    "missing file": ({"dataset": "FOLDER/no.jsonl"}, "no.jsonl: no such file"),
    "missing glob": ({"dataset": "FOLDER/no*.parquet"}, "no such file"),
    "missing hub dataset": ({"dataset": "nobody/nothing"}, "nobody/nothing cannot be read"),
    "missing split": ({"dataset_split": "dev"}, "cannot be read: .*dev"),
    "empty file": ({"dataset": "FOLDER/empty.jsonl"}, "empty.jsonl"),
    "no text": ({"dataset": "FOLDER/blank.txt"}, "holds no text"),
    "one document": ({"dataset": "FOLDER/one.txt"}, "a second document .* is needed"),
    "numbers": ({"dataset": "FOLDER/numbers.jsonl"}, "--text_column text holds"),
    "no conversations": (
        {"script": "fsdp2_sft"},
        "its columns are text; conversations are looked for in messages, in conversations, or in",
    ),
    "rows that do not fit": (
        START
        | {"script": "fsdp2_sft", "dataset": "FOLDER/talk.jsonl", "model": "FOLDER/fewer_rows"},
        "a vocabulary of 320 rows does not fit the 257 ids of --tokenizer and the 300 rows",
    ),
    "broken json": ({"dataset": "FOLDER/broken.jsonl"}, "cannot be read"),
    "broken parquet": ({"dataset": "FOLDER/broken.parquet"}, "cannot be read"),
    "missing column": ({"text_column": "body"}, "--text_column body: .* only text"),
    "tokenizer": ({"tokenizer": "gpt9"}, "tokenizer gpt9 .*is neither bytes"),
    "no network": ({"tokenizer": "o200k_base"}, "TIKTOKEN_CACHE_DIR"),
    "large tokenizer": (
        {"model": "FOLDER/few_ids"},
        "--tokenizer bytes has 257 ids, .* vocabulary of .*few_ids, 256",
    ),
    "model": ({"model": "gigantic"}, "model gigantic .*is neither tiny"),
    "short model": (
        {"model": "FOLDER/short"},
        "--bucket_edges 512 exceeds max_position_embeddings 256",
    ),
    "attention without our mask": ({"model": "FOLDER/bloom"}, "cannot be kept within documents"),
    "fsdp1 in bf16": (
        {"compile": "true", "precision": "bf16", "script": "fsdp1_pretrain"},
        "FSDP1 in bf16 cannot accumulate gradients",
    ),
    "compiles nothing": (
        {"compile": "true", "batching": "packed", "activation_checkpointing": "full"},
        "compiles nothing",
    ),
    "sliding window": ({"model": "FOLDER/window"}, "exceeds sliding_window 128"),
    "no weights": (
        {"init_from": "FOLDER/shallow"},
        "neither a checkpoint nor config.json and .*safetensors in it",
    ),
    "no directory": ({"init_from": "no/where"}, "no/where .*--init_from"),
    "missing weights": (
        START | {"model": "FOLDER/deep"},
        "lack model.layers.4.*and 19 more",
    ),
    "unexpected weights": (START, "also hold model.layers.2.*and 19 more"),
    "mis-shaped weights": (
        START | {"model": "FOLDER/narrow"},
        r"another shape model.embed_tokens.weight \[320, 32\] instead of \[320, 16\]",
    ),
    "run_dir is a file": ({"run_dir": "FOLDER/file"}, "cannot be written: .*exists"),
    "run_dir under a file": ({"run_dir": "FOLDER/file/run"}, "cannot be written"),
    "read-only run_dir": ({"run_dir": "/proc/run"}, "cannot be written"),
}


@pytest.fixture(scope="module")
def commands(tmp_path_factory, corpus, weights_directory) -> dict[str, tuple[str, dict]]:
    """Name -> script and flags."""
    folder = tmp_path_factory.mktemp("bad")
    files = {
        "empty.jsonl": "",
        "blank.txt": "\n\n\n",
        "one.txt": "one document\n",
        "numbers.jsonl": '{"text": 1}\n{"text": 2}\n',
        "talk.jsonl": '{"prompt": "a", "completion": "b"}\n{"prompt": "c", "completion": "d"}\n',
        "broken.jsonl": '{"text": "a"}\n{"text": \n',
        "broken.parquet": "this is no parquet file",
        "file": "a file where a directory should be",
    }
    for name, content in files.items():
        (folder / name).write_text(content)
    for name, change in {
        "few_ids": {"vocab_size": 256},
        "fewer_rows": {"vocab_size": 300},
        "short": {"max_position_embeddings": 256},
        "window": {"sliding_window": 128, "use_sliding_window": True},
        "narrow": {"hidden_size": 16},
        "shallow": {"num_hidden_layers": 2},
        "deep": {"num_hidden_layers": 6},
    }.items():
        small_shape(**change).save_pretrained(folder / name)
    BloomConfig(vocab_size=320, hidden_size=32, n_layer=2, n_head=4).save_pretrained(
        folder / "bloom"
    )
    good = BASE | {"dataset": corpus, "run_dir": "FOLDER/run", "model": "FOLDER/shallow"}
    made = {}
    for name, (flags, _) in CASES.items():
        flags = good | flags
        for flag, value in flags.items():
            if isinstance(value, str):
                value = value.replace("WEIGHTS", weights_directory)
                flags[flag] = value.replace("FOLDER", str(folder))
        made[name] = flags.pop("script", "fsdp2_pretrain"), flags
    return made


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_line_and_exit_code_2(commands, name, monkeypatch, tmp_path):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    done = launch(0, *commands[name])
    assert done.returncode == 2, done.stderr
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert re.search(CASES[name][1], line), line


@pytest.mark.parametrize("name", ["unknown flag", "missing column", "missing weights", "replicas"])
def test_under_torchrun_it_is_said_once_and_ends_within_30_seconds(commands, name):
    script, flags = commands[name]
    began = time.monotonic()
    done = torchrun(2, f"{script}.py", *arguments(flags), timeout=60)
    assert time.monotonic() - began < 30
    assert done.returncode == 1  # torchrun's own, for any rank that fails
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1, done.stderr
    assert "exitcode  : 2" in done.stderr
    assert " failed:" not in done.stderr  # no traceback of ours


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 200 KiB."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(tmp_path)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a small tmpfs is not allowed here")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_no_space_for_the_weights_is_said_before_training(small_disk, corpus):
    words = arguments(BASE | {"dataset": corpus, "run_dir": small_disk / "run"})
    done = subprocess.run(
        [sys.executable, "fsdp2_pretrain.py", *words], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "MiB left" in done.stderr and len(done.stderr.splitlines()) == 1


def test_compile_without_a_compiler_is_refused(corpus, tmp_path):
    words = arguments(BASE | {"dataset": corpus, "run_dir": tmp_path, "compile": "true"})
    done = subprocess.run(
        [sys.executable, "ddp_pretrain.py", *words],
        cwd=ROOT,
        env={"PATH": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    assert "--compile needs a C++ compiler" in done.stderr


def test_diverging_run_skips_steps_then_ends_naming_step_and_causes(corpus, tmp_path):
    """Weights of infinity: every loss is NaN, on all ranks alike."""
    import torch
    from transformers import Qwen2ForCausalLM

    model = Qwen2ForCausalLM(small_shape())
    model.model.norm.weight.data.fill_(torch.inf)
    model.save_pretrained(tmp_path / "weights")
    flags = BASE | {"dataset": corpus, "run_dir": tmp_path / "run", "steps": 20, "eval_every": 20}
    flags |= {"init_from": tmp_path / "weights", "tokenizer": "bytes"}
    done = launch(2, "fsdp2_pretrain.py", flags)
    assert done.returncode == 1
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "five steps in a row, up to step 5" in line and "--learning_rate" in line
    training, _ = metrics(tmp_path / "run")
    assert [line["skipped_steps"] for line in training] == [1, 2, 3, 4, 5]
    assert training[0]["loss"] is None
    assert done.stdout.count("skipped: loss nan") == 5
