"""The scripts on GPUs, without one: on fake tensors, by counting (see fake_cuda.py)."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from conftest import EXPERTS, INSIDE, ROOT, SCRIPTS, small_shape
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

import common
import fsdp2_pretrain
import fsdp2_sft

sys.path.insert(0, str(ROOT / "bench"))
import gpu  # noqa: E402

ALL = [*SCRIPTS, *INSIDE, "fsdp2_sft.py", "fsdp2_grpo.py"]
SIZES = {"micro_batch_tokens": 4096}
GLOBAL = {"global_batch_tokens": 4096 * 4 * 2}  # of all but reinforcement, which counts prompts
RUNS: dict[str, tuple[str, dict[str, Any]]] = {}
for name in ALL:
    for batching in ("bucketed", "packed"):
        RUNS[f"{name} {batching}"] = name, {"batching": batching}
    RUNS[f"{name} fp32"] = name, {"precision": "fp32"}
for mode in ("full", "selective", "0.5"):
    RUNS[f"checkpointing {mode}"] = "fsdp2_pretrain.py", {"activation_checkpointing": mode}
for batching in ("bucketed", "packed"):
    RUNS[f"experts {batching}"] = EXPERTS, {"batching": batching, "model": "tiny-moe"}
RUNS["replicas"] = "fsdp2_pretrain.py", {"dp_replicate": 2}
RUNS["whole after forward"] = "fsdp2_pretrain.py", {"reshard_after_forward": False}
RUNS["offload"] = "fsdp2_pretrain.py", {"cpu_offload": True}
RUNS["fsdp2_pp_pretrain.py middle stage"] = "fsdp2_pp_pretrain.py", {"pipeline_parallel": 4}
RUNS["padded"] = "fsdp2_pretrain.py", {"pad_to_multiple_of": 64}
RUNS["packed fp32"] = "fsdp2_pretrain.py", {"batching": "packed", "precision": "fp32"}


@pytest.fixture(scope="module")
def seen() -> dict[str, dict]:
    """All runs of one launch."""
    runs = []
    for name, flags in RUNS.values():
        sizes = SIZES if "grpo" in name else SIZES | GLOBAL
        runs.append((name.removesuffix(".py"), sizes | flags))
    runs.append(("fsdp2_pretrain", "starts"))
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/fake_cuda.py"), json.dumps(runs)],
        env=os.environ, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip([*RUNS, "starts"], map(json.loads, done.stdout.splitlines())))


def events(run: dict, beginning: str) -> dict[str, int]:
    """What was counted in the second step and in validation."""
    both = [*run["step"].items(), *run["validation"].items()]
    return {event: times for event, times in both if event.startswith(beginning)}


@pytest.mark.parametrize("name", RUNS)
def test_all_is_on_this_ranks_gpu_and_nothing_waits(seen, name):
    run = seen[name]
    assert "error" not in run, run.get("error")
    offload = name == "offload"
    assert run["device"] == "cuda:1" and run["parameters"] == ["cpu" if offload else "cuda:1"]
    assert run["start"]["process group cpu:gloo,cuda:nccl on cuda:1"] == 1
    assert run["start"]["expandable_segments:True"] == 1
    # Every tensor of a micro-batch is copied from pinned memory, without a wait for the copy.
    assert not events(run, "blocking copy")
    micro_batches = run["micro_batches"]
    assert micro_batches > 1
    packed, context_parallel = "packed" in name, "_cp_" in name
    tensors = 2 + packed + (packed or context_parallel) + ("sft" in name)  # boundaries, positions
    tensors += 3 * ("grpo" in name)
    [copies] = [run["step"][event] for event in run["step"] if "async copy common.py" in event]
    assert run["step"]["pinned"] == copies == micro_batches * tensors
    waits = {event: times for event, times in run["step"].items() if "wait " in event}
    if name.startswith("fsdp1"):
        # Its own limit of all-gathers ahead of the GPU (`limit_all_gathers`): a wait a gather.
        assert waits.pop("wait for cuda:1") <= 5 * micro_batches
    if not offload:  # loss and norm, and how evenly experts are used
        several = 5 * ("grpo" in name)  # that are read with the loss, at once
        assert sum(waits.values()) <= 2 + ("experts" in name) + several
        assert all(event.endswith(" on cuda") for event in events(run, "collective"))
    assert not events(run, "wait for everything")


@pytest.mark.parametrize("batching", ["bucketed", "packed", "fp32"])
def test_sampling_waits_once_a_token(seen, batching):
    """For which answers have ended; it copies prompts and draws at its beginning."""
    sampling = seen[f"fsdp2_grpo.py {batching}"]["sampling"]
    copies = {event: times for event, times in sampling.items() if "copy" in event}
    assert len(copies) == 3 and set(copies.values()) == {1}, copies
    waits = sorted(times for event, times in sampling.items() if event.startswith("wait "))
    assert waits == [
        1,
        1,
        16,
    ]  # of 16 tokens; what is sampled and its probabilities come at the end
    assert (
        sampling["attention efficient, masked"] == 2 * 16
    )  # of two blocks; no kernel without heads
    assert len(sampling) == 7, sampling  # no collective among them


@pytest.mark.parametrize("name", RUNS)
def test_attention_is_by_the_fast_kernels(seen, name):
    """Variable-length attention with its own key/value heads; never whole matrices."""
    kernels = set(events(seen[name], "attention"))
    expected = {"attention flash"}
    if seen[name]["precision"] == "fp32":
        expected = {"attention efficient"}
        if "packed" in name:
            expected.add("attention document by document")
    elif "packed" in name:
        expected = {"attention varlen, own heads"}
    elif name == "padded":  # few shapes, for each of which cuDNN plans a kernel
        expected = {"attention cudnn"}
    assert kernels == expected
    assert set(events(seen[name], "boundaries")) <= {"boundaries on cuda:1"}


def test_what_a_start_does_with_too_few_and_old_gpus(seen):
    assert seen["starts"]["one GPU"].startswith("4 ranks cannot share 1 GPUs")
    for advice in ("--nproc-per-node=1", 'CUDA_VISIBLE_DEVICES=""'):
        assert advice in seen["starts"]["one GPU"]
    assert seen["starts"]["old GPU"] == "fp32"


def test_threads_use_the_gpu_of_their_rank(seen):
    """The one that writes checkpoints; by itself a thread uses GPU 0."""
    assert seen["starts"]["threads"] == {"plain": 0, "ours": 1}


@pytest.mark.parametrize(
    "name, peak",
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("Tesla T4", None),
    ],
)
def test_peaks_are_of_the_gpu_that_is_there(name, peak):
    assert common.peak_flops(name) == peak


def test_rotary_positions_do_not_go_through_a_matrix_product():
    """TF32 would round those above 2,048, as with transformers before 5.20 (its issue 48428)."""
    rotary = Qwen2RotaryEmbedding(small_shape())
    with FlopCounterMode(display=False) as flops:
        rotary(torch.zeros(1, 8, 8), torch.arange(8)[None])
    assert flops.get_total_flops() == 0


@pytest.fixture
def one_gpu(monkeypatch):
    """What init_process_group asks of CUDA and of torch.distributed, as on one Hopper GPU."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    answers = {"is_available": True, "device_count": 1, "set_device": None}
    answers |= {"get_device_capability": (9, 0), "memory._set_allocator_settings": None}
    for name, answer in answers.items():
        monkeypatch.setattr(f"torch.cuda.{name}", lambda *_, answer=answer: answer)
    monkeypatch.setattr("torch.backends.cuda.enable_cudnn_sdp", lambda _: None)
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *_, **__: None)


@pytest.mark.parametrize(
    "capability, expected", [((8, 0), []), ((9, 0), ["FA3"]), ((10, 0), ["FA4"])]
)
@pytest.mark.parametrize("script", [fsdp2_pretrain, fsdp2_sft])
def test_an_installed_flash_attention_is_activated(
    monkeypatch, one_gpu, script, capability, expected
):
    activated = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activated.append)
    script.init_process_group(script.Config(precision="bf16"))
    assert activated == expected


@pytest.mark.parametrize("script", [fsdp2_pretrain, fsdp2_sft])
def test_without_the_package_torchs_own_flash_attention_stays(monkeypatch, one_gpu, script):
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    script.init_process_group(script.Config(precision="bf16"))
    assert torch.nn.attention.current_flash_attention_impl() is None


def test_float8_says_what_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(common.Refusal, match="needs the package torchao"):
        fsdp2_pretrain.use_float8(torch.nn.Module())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(common.Refusal, match="needs GPUs that compute in it"):
        fsdp2_pretrain.use_float8(torch.nn.Module())


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_the_benchmark_takes_its_own_settings(monkeypatch, ranks):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    for what, (_, flags) in gpu.SETTINGS.items():
        if ranks % gpu.ranks_together(flags) == 0:
            gpu.script_and_config(what, ranks)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_first_command_on_one_gpu(tmp_path):
    words = ["--run_dir", str(tmp_path / "run"), "--steps", "20", "--eval_batches", "4"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    done = subprocess.run(
        [*command, "fsdp2_pretrain.py", *words], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    losses = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    assert losses[19]["loss"] < losses[0]["loss"]
