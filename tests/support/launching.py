"""What tests have in common: small inputs, and launches of the real scripts."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

# PyTorch reads this once, at its import. With more threads than cores, threads that wait for each
# other keep spinning, which made the tests of sampling 30 times slower.
os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).parents[2]
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
    """The process that runs tests/support/forked.py. The first launch starts it."""

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
        program = [sys.executable, str(ROOT / "tests/support/forked.py")]
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
    # PyTorch's compiler says so where there is an nvcc, but no GPU.
    lines = [line for line in done.stderr.splitlines() if "No CUDA runtime is found" not in line]
    assert not (silent and lines), done.stderr
    return torch.load(out, weights_only=False)


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


def refused(function, *arguments) -> str:
    """Return the one line on stderr with which a call is refused."""
    import common

    with pytest.raises(common.Refusal) as end:
        function(*arguments)
    line = str(end.value)
    assert "\n" not in line
    return line
