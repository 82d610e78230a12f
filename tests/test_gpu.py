"""The scripts on GPUs without a GPU: events are counted on fake tensors (see fake_cuda.py)."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from grid import share
from launching import EXPERTS, HANGS, INSIDE, MUON, ROOT, SCRIPTS, small_shape
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

import common
import fsdp2_cp_pretrain
from model import use_float8
from run import CORES, Flags, advise_on_threads, peak_tflops, report, set_up_gpu

sys.path.insert(0, str(ROOT / "tools"))
import gpu  # noqa: E402

ALL = [*SCRIPTS, MUON, *INSIDE, "fsdp2_sft.py", "fsdp2_lora.py", "fsdp2_grpo.py"]
SIZES = {"micro_batch_tokens": 4096}
GLOBAL = {"global_batch_tokens": 4096 * 4 * 2}  # RL counts prompts instead
RUNS: dict[str, tuple[str, dict[str, Any]]] = {}
for name in ALL:
    RUNS[f"{name} bucketed"] = name, {"batching": "bucketed"}
RUNS["experts bucketed"] = EXPERTS, {"batching": "bucketed", "model": "tiny-moe"}
RUNS["fsdp2_cp_pretrain.py ring"] = "fsdp2_cp_pretrain.py", {"context_attention": "ring"}
for name in ("fsdp2_pretrain.py", "fsdp2_sft.py", "fsdp2_grpo.py"):
    RUNS[f"{name} packed"] = name, {"batching": "packed"}
RUNS["fsdp2_lora.py nf4"] = "fsdp2_lora.py", {"base_precision": "nf4"}
SHORT = list(RUNS)  # the others are for the drills
for name in ("ddp_pretrain.py", "fsdp1_pretrain.py", *INSIDE):
    RUNS[f"{name} packed"] = name, {"batching": "packed"}
RUNS["experts packed"] = EXPERTS, {"batching": "packed", "model": "tiny-moe"}
for name in ("ddp_pretrain.py", "fsdp2_pretrain.py", "fsdp2_grpo.py"):
    RUNS[f"{name} fp32"] = name, {"precision": "fp32"}
for mode in ("full", "selective"):
    RUNS[f"checkpointing {mode}"] = "fsdp2_pretrain.py", {"activation_checkpointing": mode}
RUNS["replicas"] = "fsdp2_pretrain.py", {"dp_replicate": 2}
RUNS["unsharded after forward"] = "fsdp2_pretrain.py", {"reshard_after_forward": False}
RUNS["offload"] = "fsdp2_pretrain.py", {"cpu_offload": True}
RUNS["Muon, offloaded"] = MUON, {"cpu_offload": True}
RUNS["fsdp2_pp_pretrain.py middle stage"] = "fsdp2_pp_pretrain.py", {"pipeline_parallel": 4}
RUNS["experts, full checkpointing"] = (
    EXPERTS,
    {"model": "tiny-moe", "activation_checkpointing": "full"},
)
RUNS["padded"] = "fsdp2_pretrain.py", {"pad_to_multiple_of": 64}
RUNS["packed fp32"] = "fsdp2_pretrain.py", {"batching": "packed", "precision": "fp32"}
LONG = [name for name in RUNS if name not in SHORT]
kept = {*SHORT, "fsdp2_grpo.py fp32", *share(LONG)}  # a test of sampling looks at that one too
RUNS = {name: run for name, run in RUNS.items() if name in kept}
NAMES = [pytest.param(name, marks=[pytest.mark.drill] * (name not in SHORT)) for name in RUNS]


class Seen(dict):
    """What runs saw. The first look at one starts all short or all long runs."""

    def __missing__(self, name: str) -> dict:
        names = [each for each in RUNS if (each in SHORT) == (name in [*SHORT, "starts"])]
        runs: list[tuple[str, Any]] = []
        for script, flags in map(RUNS.get, names):
            sizes = SIZES if "grpo" in script else SIZES | GLOBAL
            runs.append((script.removesuffix(".py"), sizes | flags))
        runs.append(("fsdp2_pretrain", "starts"))
        done = subprocess.run(
            [sys.executable, str(ROOT / "tests/support/fake_cuda.py"), json.dumps(runs)],
            env=os.environ, capture_output=True, text=True, timeout=HANGS,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        self.update(zip([*names, "starts"], map(json.loads, done.stdout.splitlines())))
        return self[name]


@pytest.fixture(scope="module")
def seen() -> Seen:
    return Seen()


def events(run: dict, beginning: str) -> dict[str, int]:
    """Return the counts of the second step and of validation."""
    both = [*run["step"].items(), *run["validation"].items()]
    return {event: times for event, times in both if event.startswith(beginning)}


@pytest.mark.parametrize("name", NAMES)
def test_everything_is_on_this_ranks_gpu_and_nothing_waits(seen, name):
    run = seen[name]
    assert "error" not in run, run.get("error")
    offload = "offload" in name
    assert run["device"] == "cuda:1" and run["parameters"] == ["cpu" if offload else "cuda:1"]
    assert run["start"]["process group cpu:gloo,cuda:nccl on cuda:1"] == 1
    # Every tensor of a micro-batch is copied from pinned memory, and nothing waits for the copy.
    # (Muon takes offloaded shards to the GPU, which waits.)
    blocking = [
        event for event in events(run, "blocking copy") if not (offload and "muon" in event)
    ]
    assert not blocking
    micro_batches = run["micro_batches"]
    assert micro_batches > 1
    packed, context_parallel = "packed" in name, "_cp_" in name
    tensors = 2 + packed + (packed or context_parallel) + ("sft" in name or "lora" in name)
    tensors += 3 * ("grpo" in name)
    [copies] = [run["step"][event] for event in run["step"] if "async copy common.py" in event]
    assert run["step"]["pinned"] == copies == micro_batches * tensors
    waits = {event: times for event, times in run["step"].items() if "wait " in event}
    if name.startswith("fsdp1"):
        # FSDP1 limits how many all-gathers run ahead of the GPU, and waits once per all-gather.
        assert waits.pop("wait for cuda:1") <= 5 * micro_batches
    # With sdpa, transformers checks in each forward whether the positions are of packed documents.
    masks = sum(waits.pop(event) for event in list(waits) if "for the mask" in event)
    assert masks == (0 if packed or context_parallel else micro_batches)
    if not offload:  # a script reads the loss, the norm, and how evenly experts are used
        several = 5 * ("grpo" in name)  # RL reads more values with the loss, all at once
        assert sum(waits.values()) <= 2 + ("experts" in name) + several
        assert all(event.endswith(" on cuda") for event in events(run, "collective"))
    assert not events(run, "wait for everything")


@pytest.mark.parametrize(
    "batching", ["bucketed", "packed", pytest.param("fp32", marks=pytest.mark.drill)]
)
def test_sampling_waits_for_answers_and_masks(seen, batching):
    """At each token, it reads which answers have ended, and transformers whether there is padding.

    It copies prompts and draws once, at the beginning.
    """
    sampling = seen[f"fsdp2_grpo.py {batching}"]["sampling"]
    copies = {event: times for event, times in sampling.items() if "copy" in event}
    assert len(copies) == 2 and set(copies.values()) == {1}, copies
    waits = sorted(times for event, times in sampling.items() if event.startswith("wait "))
    # The first two are for the sampled tokens and their probabilities, at the end. Prompts have a
    # second check of their padding.
    assert waits == [2, 16, 16 + 1], sampling
    assert sampling["attention efficient, masked"] == 2 * 16  # 2 blocks
    assert len(sampling) == 6, sampling  # no collective among them


@pytest.mark.parametrize("name", NAMES)
def test_attention_uses_the_fast_kernels(seen, name):
    """Packed batches use the variable-length kernel, with its own key/value heads. In bf16 no
    kernel computes full matrices. (In fp32, torch has no fast kernel for grouped heads.)"""
    kernels = set(events(seen[name], "attention"))
    packed = "packed" in name
    expected = {"attention varlen, own heads"} if packed else {"attention flash"}
    if seen[name]["precision"] == "fp32":
        expected = {"attention math", *["attention document by document"] * packed}
    elif name == "padded":  # cuDNN plans a kernel for each shape, and there are few
        expected = {"attention cudnn"}
    if "ring" in name:  # it calls the kernel itself
        assert events(seen[name], "flash kernel")
        expected = set()
    assert kernels == expected
    assert set(events(seen[name], "boundaries")) <= {"boundaries on cuda:1"}


def test_ring_attention_needs_no_strides_of_the_log_sums(monkeypatch):
    """The flash backward of GPUs reads them as if they were contiguous. The CPU's uses strides."""
    kernel = "_scaled_dot_product_flash_attention_for_cpu_backward"
    backward = getattr(torch.ops.aten, kernel)

    def as_on_gpus(gradient, query, key, value, output, log_sums, *rest, **more):
        contiguous = torch.empty(log_sums.shape, device="meta").stride()
        log_sums = log_sums.as_strided(log_sums.shape, contiguous)
        return backward(gradient, query, key, value, output, log_sums, *rest, **more)

    torch.manual_seed(0)
    query = torch.randn(3, 4, 64, 16, requires_grad=True)
    keys_values = torch.randn(2, 3, 2, 64, 16)
    loss_weights = torch.randn(3, 4, 64, 16)

    def of_rank_0(tensor):  # of 2
        return torch.cat([tensor.chunk(4, dim=-2)[i] for i in (0, 3)], dim=-2)

    full = sdpa(query, *keys_values, is_causal=True, enable_gqa=True)
    [expected] = torch.autograd.grad((of_rank_0(full) * of_rank_0(loss_weights)).sum(), query)
    others = torch.cat(keys_values.chunk(4, dim=-2)[1:3], dim=-2)
    monkeypatch.setattr(torch.ops.aten, kernel, as_on_gpus)
    monkeypatch.setattr(fsdp2_cp_pretrain, "travel", lambda own, _: [own, others])
    monkeypatch.setattr(fsdp2_cp_pretrain, "pass_on", lambda gradients, _: gradients)
    group = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    output = fsdp2_cp_pretrain.RingAttention.apply(
        of_rank_0(query), of_rank_0(keys_values), None, group
    )
    [got] = torch.autograd.grad((output * of_rank_0(loss_weights)).sum(), query)
    torch.testing.assert_close(got, expected)


def test_a_start_with_too_few_or_old_gpus(seen):
    assert seen["starts"]["one GPU"].startswith("4 ranks cannot share 1 GPUs")
    for advice in ("--nproc-per-node=1", 'CUDA_VISIBLE_DEVICES=""'):
        assert advice in seen["starts"]["one GPU"]
    assert seen["starts"]["old GPU"] == "fp32"


@pytest.mark.parametrize("own", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_a_launch_sets_up_the_allocator_unless_the_user_has(own):
    """PyTorch must not have read the variable before, while it was imported."""
    variables = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    if own:
        variables[own] = "max_split_size_mb:512"
    settings = "torch._C._accelerator_getAllocatorSettings()"
    program = f"import torch, run; run.launch(lambda: print({settings}))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=variables, capture_output=True, text=True
    )
    expected = "max_split_size_mb:512\n" if own else "expandable_segments:True\n"
    assert (done.stdout, done.stderr) == (expected, "")


def test_threads_use_the_gpu_of_their_rank(seen):
    """A new thread uses GPU 0, unless it is told otherwise, as the one that writes checkpoints."""
    assert seen["starts"]["threads"] == {"plain": 0, "ours": 1}


@pytest.mark.skipif(not CORES.exists(), reason="Linux tells its cores")
def test_an_offloaded_optimizer_is_told_its_threads(monkeypatch, capsys):
    """Physical cores, divided by the ranks of the machine, if torch has fewer."""
    cores = len({path.read_text() for path in CORES.glob("cpu*/topology/core_cpus_list")})
    said = []
    for threads, ranks in ((0, 1), (0, cores), (1, cores), (0, 2 * cores)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        advise_on_threads()
        said.append(capsys.readouterr().out)
    lines = [f"the optimizer runs on the CPU: export OMP_NUM_THREADS={n}\n" for n in (cores, 1)]
    assert said == [*lines, "", ""]


@pytest.mark.parametrize(
    "name, peak",
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA GB200", 2500),
        ("NVIDIA B200", 2250),
        ("NVIDIA B300 SXM6 AC", 2250),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 70),
        ("NVIDIA A30", 165),
        ("NVIDIA A40", 150),
        ("NVIDIA H20", 148),
        ("NVIDIA L40", 181),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA RTX A5000", 111),
        ("NVIDIA RTX A6000", 155),
        ("NVIDIA RTX 6000 Ada Generation", 364),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 504),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA GeForce RTX 3090", 71),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 5090", 210),
        ("Tesla V100-SXM2-16GB", None),
        ("Tesla T4", None),
        ("none", None),
    ],
)
def test_a_peak_belongs_to_the_full_name_of_a_gpu(name, peak):
    assert peak_tflops(name) == peak


@pytest.fixture
def one_gpu(monkeypatch):
    """Return a function that says which compute capability the only GPU has."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()

    def pretend(major: int, minor: int) -> None:
        for name, value in [
            ("is_available", True), ("device_count", 1), ("set_device", None),
            ("is_bf16_supported", True), ("get_device_capability", (major, minor)),
        ]:  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)

    yield pretend
    torch.backends.cuda.enable_cudnn_sdp(cudnn)


def test_flash_attention_says_what_it_needs(one_gpu):
    one_gpu(9, 0)
    with pytest.raises(common.Refusal, match="need a GPU and --precision bf16"):
        Flags(flash_attention="FA4", precision="fp32")
    for capability, version in [((8, 9), "FA4"), ((12, 0), "FA4"), ((10, 0), "FA3")]:
        one_gpu(*capability)
        numbers = "{}.{}".format(*capability)
        with pytest.raises(common.Refusal, match=f"not run on compute capability {numbers}"):
            set_up_gpu(Flags(flash_attention=version))
    for capability, version in [((9, 0), "FA3"), ((10, 3), "FA4")]:
        one_gpu(*capability)
        with pytest.raises(common.Refusal, match="FA4: pip install --pre flash-attn-4.*No module"):
            set_up_gpu(Flags(flash_attention=version))


def test_flash_attention_comes_before_cudnn(one_gpu, monkeypatch):
    """Which SDPA would choose otherwise, with padded lengths, so that the flag did nothing."""
    one_gpu(9, 0)
    chosen = []
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", chosen.append)
    for version, expected in [("torch", []), ("FA4", ["FA4"])]:
        set_up_gpu(Flags(flash_attention=version, pad_to_multiple_of=64))
        assert torch.backends.cuda.cudnn_sdp_enabled() == (version == "torch")
        assert chosen == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_flash_attention_4_has_the_losses_of_torchs(tmp_path):
    pytest.importorskip("flash_attn.cute.interface")
    losses = []
    for version in ("torch", "FA4"):
        for batching in ("bucketed", "packed"):
            words = ["--steps", "3", "--eval_tokens", "2000", "--batching", batching]
            words += ["--flash_attention", version, "--run_dir", str(tmp_path / version / batching)]
            command = [sys.executable, "fsdp2_pretrain.py", *words]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            lines = (tmp_path / version / batching / "metrics.jsonl").open()
            losses += [x["loss"] for x in map(json.loads, lines) if "loss" in x]
    assert losses[:6] == pytest.approx(losses[6:], rel=2e-3)


def test_a_gpu_without_memory_ends_with_advice(monkeypatch, capsys):
    """In one line after the traceback."""
    monkeypatch.setattr("run.get_error_handler", lambda: SimpleNamespace(record_exception=id))
    try:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    except torch.OutOfMemoryError as error:
        report(error)
    first, *_, message, advice = capsys.readouterr().err.splitlines()
    assert first.startswith("Traceback") and "Tried to allocate" in message
    flags = ["--micro_batch_tokens", "--activation_checkpointing selective", "--cpu_offload true"]
    places = [advice.index(flag) for flag in flags]
    assert advice.startswith("error: out of GPU memory") and places == sorted(places)


def test_rotary_positions_do_not_go_through_a_matmul():
    """TF32 would round positions above 2,048, as in transformers before 5.20 (issue 48428)."""
    rotary = Qwen2RotaryEmbedding(small_shape())
    with FlopCounterMode(display=False) as flops:
        rotary(torch.zeros(1, 8, 8), torch.arange(8)[None])
    assert flops.get_total_flops() == 0


def test_float8_says_what_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(common.Refusal, match="needs the package torchao"):
        use_float8(torch.nn.Module())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(common.Refusal, match="needs a GPU with float8"):
        use_float8(torch.nn.Module())


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_the_benchmark_accepts_its_own_settings(monkeypatch, ranks):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    for what, (_, flags) in gpu.SETTINGS.items():
        if ranks % gpu.group_size(flags) == 0:
            gpu.script_and_config(what, ranks)


def test_the_benchmark_continues_after_a_setting_that_fails(monkeypatch, tmp_path):
    written = tmp_path / "bench/results/gpu.json"
    written.parent.mkdir(parents=True)
    known = []  # what the file has before each setting

    def measure(what):
        known.append(len(json.loads(written.read_text())["settings"]) if written.exists() else 0)
        if what == "FSDP1":
            raise NotImplementedError("no kernel\nand more")
        return {"mfu": 0.5}

    for module, name, value in [
        (gpu, "measure", measure), (gpu, "CUDA", True), (gpu, "ROOT", tmp_path),
        (gpu, "script_and_config", lambda *_: (SimpleNamespace(init_process_group=id), None)),
        (gpu.shared, "read", id), (gpu.shared, "leave", list),
        (gpu.dist, "get_world_size", lambda: 1), (gpu.dist, "get_rank", lambda: 0),
    ]:  # fmt: skip
        monkeypatch.setattr(module, name, value)
    monkeypatch.setenv("WORLD_SIZE", "1")
    gpu.main()
    settings = json.loads(written.read_text())["settings"]
    assert settings.pop("FSDP1") == {"error": "NotImplementedError: no kernel"}
    assert known == [*range(len(settings) + 1)] and {"mfu": 0.5} in settings.values()


@pytest.mark.drill
def test_the_scripts_accept_the_flags_of_the_kit(tmp_path):
    """Without a GPU nothing else of bench/kit is run here."""
    kit = ROOT / "bench/kit"
    paths = {"KIT_INPUTS": str(tmp_path), "OUT": str(tmp_path), "PYTHONPATH": f"{kit}:{ROOT}"}
    for words in (["inputs.py"], ["programs.py", "--check"]):
        command = [sys.executable, str(kit / words[0]), *words[1:]]
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | paths, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(" runs, 0 with flags that their script refuses\n"), done.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_first_command_on_one_gpu(tmp_path):
    words = ["--run_dir", str(tmp_path / "run"), "--steps", "20", "--eval_tokens", "20000"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    done = subprocess.run(
        [*command, "fsdp2_pretrain.py", *words], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    losses = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    assert losses[19]["loss"] < losses[0]["loss"]
