"""Run scripts on a CUDA that does not exist, and count what would cost time: fake_cuda.py RUNS.

RUNS is a JSON list of [script, flags]. A run calls the script's own init_process_group, builds its
model and optimizer, and runs two train steps and a validation (or sampling), as rank 1 of 4 GPUs,
on fake tensors of the device cuda:1. Tensors on different devices raise an error, as on a GPU. The
other ranks of collectives do not exist. Each run writes a JSON line: what it counted in the second
step ("step") and in validation, {event: times}, or "error".

The events are "wait WHERE" (the CPU waits until the GPU has computed a number), "blocking copy
WHERE", "async copy WHERE", "attention KERNEL" (the one that torch 2.13 chooses on an H100) and
"collective NAME on DEVICES".
"""

import contextlib
import ctypes
import importlib
import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import traceback
import types
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "bench")]
RANK, RANKS = 1, 4
os.environ |= {"RANK": str(RANK), "LOCAL_RANK": str(RANK), "CUDA_VISIBLE_DEVICES": ""}
os.environ |= {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


def load_guard() -> None:
    """Load the stand-in for CUDA. It must precede torch, which looks for its hooks only once."""
    torch_directory = Path(importlib.util.find_spec("torch").origin).parent
    libraries = torch_directory / "lib"
    with tempfile.TemporaryDirectory() as folder:
        guard = Path(folder, "guard.so")
        command = ["g++", "-O0", "-shared", "-fPIC", "-std=c++20", f"-I{torch_directory}/include"]
        command += [str(ROOT / "tests/support/fake_cuda.cpp"), "-o", str(guard), f"-L{libraries}"]
        subprocess.run([*command, "-lc10", "-ltorch_cpu"], check=True)
        # A CUDA build registers a device guard of its own. The last one to register is used.
        for name in ("libgomp.so.1", "libc10.so", "libtorch_cpu.so", "libtorch_cuda.so"):
            if (libraries / name).exists():
                ctypes.CDLL(str(libraries / name), ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(guard))


load_guard()
import dry_run  # noqa: E402
import numpy as np  # noqa: E402
import shared  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

import common  # noqa: E402
import model as model_file  # noqa: E402

aten = torch.ops.aten
SEEN: Counter = Counter()


# --- torch.cuda, as if there were GPUs ------------------------------------------------------------


class Stream:
    """A stream or an event, with the device that was current when it was created."""

    device_type, stream_id = 1, 0  # torch 2.15 makes a stream of these two and the index

    def __init__(self, *_: Any, **__: Any):
        self.device_index = torch.cuda.current_device()
        self.device = torch.device("cuda", self.device_index)

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Stream) and other.device == self.device

    def __hash__(self) -> int:
        return hash(str(self.device))

    def synchronize(self) -> None:
        SEEN[f"wait for {self.device}"] += 1

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def record_event(self, *_: Any) -> "Stream":
        return Stream()

    def nothing(self, *_: Any) -> None:
        pass

    record = wait_stream = wait_event = record_stream = wait = nothing


class Anything:
    """An object that accepts any call and does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def set_device(device: Any) -> None:
    index = device if isinstance(device, int) else torch.device(device).index
    if index >= torch.cuda.device_count():
        raise RuntimeError("CUDA error: invalid device ordinal")
    torch._C._accelerator_setDeviceIndex(index)


def fake_cuda(gpus: int = RANKS, capability: tuple[int, int] = (9, 0)) -> None:
    """Replace the functions that would ask the driver."""
    import torch._subclasses.fake_tensor as fake_tensor
    import torch.distributed.fsdp._common_utils as fsdp1
    from torch.distributed.pipelining import _utils, schedules

    fake_tensor.init_gpu_context = lambda *_: None
    torch._C._set_only_lift_cpu_tensors(True)
    nothing = Anything().nothing
    cuda: Any = torch.cuda
    properties = types.SimpleNamespace(
        name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132,
        total_memory=80 << 30,
    )  # fmt: skip
    replaced = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: gpus,
        "current_device": torch._C._accelerator_getDeviceIndex,
        "set_device": set_device,
        "Stream": Stream,
        "Event": Stream,
        "current_stream": lambda *_: Stream(),
        "default_stream": lambda *_: Stream(),
        "stream": lambda _: contextlib.nullcontext(),
        "synchronize": lambda *_: SEEN.update(["wait for everything"]),
        "get_device_name": lambda *_: properties.name,
        "get_device_capability": lambda *_: capability,
        "get_device_properties": lambda *_: properties,
        "is_bf16_supported": lambda including_emulation=True: capability >= (8, 0),
        "max_memory_allocated": lambda *_: 0,
        "memory_allocated": lambda *_: 0,
        "get_rng_state_all": lambda *_: [],
        "_is_in_bad_fork": lambda: False,
    }
    for name in ("init", "_lazy_init", "empty_cache", "get_rng_state", "set_rng_state"):
        replaced[name] = nothing
    for name in ("manual_seed", "manual_seed_all"):
        replaced[name] = nothing
    for name, value in replaced.items():
        setattr(cuda, name, value)
    torch.Stream = Stream
    accelerator: Any = torch.accelerator
    accelerator.is_available = lambda: True
    accelerator.current_accelerator = lambda *_, **__: torch.device("cuda")
    accelerator.current_device_index = cuda.current_device
    accelerator.current_stream = cuda.current_stream
    accelerator.synchronize = cuda.synchronize
    fsdp1._no_dispatch_record_stream = nothing
    for name in ("_flat_param", "_runtime_utils"):
        module = importlib.import_module(f"torch.distributed.fsdp.{name}")
        if hasattr(module, "_no_dispatch_record_stream"):
            module._no_dispatch_record_stream = nothing
    parallel = torch.nn.parallel.DistributedDataParallel
    made = parallel.__init__

    def init(self: Any, *arguments: Any, **keywords: Any) -> None:
        made(self, *arguments, **keywords)
        self.logger = Anything()

    parallel.__init__ = init
    # A fake mode would really move a constant to the device.
    tensor = torch.tensor

    def constant(data: Any, device: Any = None, **more: Any) -> torch.Tensor:
        if device and isinstance(data, float):
            return torch.full((), data, device=device, **more)
        if device and data == []:  # an empty cache
            return torch.empty(0, device=device, **more)
        return tensor(data, **more)

    torch.tensor = constant
    schedule: Any = schedules._PipelineSchedule

    def agree(self: Any, stages: list, *_: Any) -> None:
        """Replace the vote of all stages on whether they have declared what they receive."""
        for stage in stages:
            assert not _utils.InferenceMode.needs_dynamic(stage._user_meta, True)
            stage._inference_mode = _utils.InferenceMode.STATIC

    schedule._warmup_p2p = agree
    joined = dist.init_process_group

    def join(backend: str, timeout: Any = None, device_id: Any = None) -> None:
        SEEN[f"process group {backend} on {device_id}"] += 1
        joined("fake", store=FakeStore(), rank=RANK, world_size=RANKS)

    dist.init_process_group = join


def fake_attention() -> None:
    """Let scaled_dot_product_attention choose its kernel as it does on an H100."""
    on_cpu = torch.nn.functional.scaled_dot_product_attention

    def attention(
        query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
        enable_gqa=False,
    ):  # fmt: skip
        if torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
            query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
        grouped = query.shape[1] != key.shape[1]
        arguments = (query, key, value)
        if query.is_cuda and attn_mask is not None:  # sdpa converts a bool mask to numbers
            SEEN["attention efficient, masked" if not grouped else "attention math"] += 1
            bias = query.new_zeros(()).expand(*query.shape[:3], key.shape[2])
            efficient = aten._scaled_dot_product_efficient_attention
            return efficient(*arguments, bias, False, dropout_p, is_causal, scale=scale)[0]
        options = {"scale": scale, "enable_gqa": enable_gqa}
        if not query.is_cuda:
            return on_cpu(*arguments, attn_mask, dropout_p, is_causal, **options)
        if query.dtype == torch.float32 and grouped:
            # torch 2.13 has no memory-efficient kernel for grouped heads. sdpa itself would ask for
            # the version of cuDNN in a CUDA build, to choose a kernel.
            SEEN["attention math"] += 1
            math = aten._scaled_dot_product_attention_math
            return math(*arguments, attn_mask, dropout_p, is_causal, **options)[0]
        if query.dtype == torch.float32:
            SEEN["attention efficient"] += 1
            efficient = aten._scaled_dot_product_efficient_attention
            return efficient(*arguments, None, True, dropout_p, is_causal, scale=scale)[0]
        kernel = "cudnn" if torch.backends.cuda.cudnn_sdp_enabled() else "flash"
        SEEN[f"attention {kernel}"] += 1
        flash = aten._scaled_dot_product_flash_attention
        return flash(*arguments, dropout_p, is_causal, scale=scale)[0]

    torch.nn.functional.scaled_dot_product_attention = attention


def fake_masks() -> None:
    """Let transformers make masks as on a GPU. On fake tensors it would act as if it were compiled.

    It reads whether positions are those of packed documents, and whether there is padding at all.
    """

    def no_packed_documents(position_ids: torch.Tensor) -> None:
        if position_ids.is_cuda:
            SEEN[f"wait for the mask in {place()}"] += 1

    masking: Any = importlib.import_module("transformers.masking_utils")
    masking.find_packed_sequence_indices = no_packed_documents
    masking.is_tracing = lambda *_: False


# --- What is counted ------------------------------------------------------------------------------


def place() -> str:
    """Return the line of the project that is being executed."""
    frames = [frame for frame in traceback.extract_stack() if Path(frame.filename).parent == ROOT]
    if not frames:
        return "?"
    return f"{Path(frames[-1].filename).name}: {frames[-1].line}"


class Recorder(TorchDispatchMode):
    """Counts events, and answers calls that would need numbers."""

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in kinds):
            return NotImplemented
        kwargs = kwargs or {}
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        on_cuda = first is not None and first.device.type == "cuda"
        if func is aten._local_scalar_dense.default and isinstance(first, FakeTensor):
            if on_cuda:
                SEEN[f"wait {place()}"] += 1
            return 1.0 if first.is_floating_point() else int(first.dtype != torch.bool)
        if func is aten.nonzero.default or func is aten.index.Tensor and is_mask(args):
            if on_cuda:
                SEEN[f"wait {place()}"] += 1
            if on_cuda and func is aten.nonzero.default:  # none is zero
                return first.new_empty((first.numel(), first.dim()), dtype=torch.int64)
        if func is aten._to_copy.default and on_cuda:
            if torch.device(kwargs.get("device") or first.device).type == "cpu":
                SEEN[f"wait {place()}"] += 1
        if func is aten._to_copy.default and first is not None and not on_cuda:
            target = kwargs.get("device")
            if target is not None and torch.device(target).type == "cuda":
                kind = "async" if kwargs.get("non_blocking") else "blocking"
                SEEN[f"{kind} copy {place()}"] += 1
        if func._opname == "_varlen_attn":
            heads = "own heads" if args[0].shape[1] != args[1].shape[1] else "equal heads"
            SEEN[f"attention varlen, {heads}"] += 1
            SEEN[f"boundaries on {args[3].device}"] += 1
        if func is aten._scaled_dot_product_flash_attention.default:
            SEEN["flash kernel"] += 1
        if func is aten._pin_memory.default:
            SEEN["pinned"] += 1
            return torch.empty_like(first)  # a copy of a constant would be a real one
        if func is aten.is_pinned.default:
            # Offloaded parameters are. The real tensors of a micro-batch are not yet.
            return isinstance(first, FakeTensor) and first.is_floating_point()
        if func.namespace in ("c10d", "_c10d_functional"):
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            devices = sorted({tensor.device.type for tensor in tensors})
            SEEN[f"collective {func._opname} on {'/'.join(devices)}"] += 1
        return func(*args, **kwargs)


def is_mask(args: Any) -> bool:
    """Return whether aten.index gets a boolean mask, whose sum is the size of the result."""
    return any(index is not None and index.dtype == torch.bool for index in args[1])


def by_document(heads: list, boundaries: Any, scale: Any) -> Any:
    """Replace the loop over documents, because fake tensors have no lengths of documents."""
    if heads[0].is_cuda:
        SEEN["attention document by document"] += 1
    attention = torch.nn.functional.scaled_dot_product_attention
    output = attention(*heads, is_causal=True, scale=scale, enable_gqa=True)
    return output.transpose(1, 2)


def texts(script: Any, config: Any, vocabulary: int) -> Any:
    """Return the batches of a script that trains on documents or conversations."""
    drawn = np.random.default_rng(0).lognormal(5, 1, 4000).astype(np.int64)
    lengths = np.clip(drawn, 16, config.max_length)
    in_loss = 0.5 if hasattr(script, "tokenize_conversation") else 1.0

    def read(index: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(index)
        size = lengths[index] + 1
        return rng.integers(vocabulary, size=size), rng.random(size) < in_loss

    sequences = types.SimpleNamespace(lengths=lengths, num_targets=lengths, read=read)
    return shared.batches_class(script)(sequences, config, padding_id=256)


def answers(script: Any, config: Any, vocabulary: int) -> Any:
    """Return the batches of an RL step, whose answers have different lengths."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(config.prompts * config.answers):
        prompt = rng.integers(vocabulary, size=rng.integers(16, 800))
        tokens = rng.integers(vocabulary, size=rng.integers(1, 128))
        log_probs = np.zeros(len(tokens), np.float32)
        made.append(script.Answer(prompt, np.array([256]), tokens, log_probs, 0.5))
    run = types.SimpleNamespace(config=config, tokenizer=types.SimpleNamespace(eos_token_id=256))
    return script.AnswerBatches(made, np.zeros(len(made), np.float32), run)


def sample(script: Any, model: Any, config: Any, device: Any) -> None:
    """Sample answers of 16 tokens to two prompts. None of them ends before."""
    prompts = [np.arange(length, dtype=np.uint32) for length in (40, 100)]
    draws = np.zeros((2 * config.answers, 16))
    numpy = torch.Tensor.numpy
    torch.Tensor.numpy = lambda tensor: np.ones(tensor.shape)  # type: ignore[method-assign]
    try:
        with script.unsharded_parameters(model, config):
            SEEN.clear()
            made = script.sample(model, prompts, draws, [256], device)
    finally:
        torch.Tensor.numpy = numpy  # type: ignore[method-assign]
    assert [len(tokens) for tokens, _ in made] == [16] * len(draws)


def run(script: Any, flags: dict[str, Any]) -> dict[str, Any]:
    """Run two steps, and a validation or sampling; returns the counts of all but the first step."""
    torch._C._accelerator_setDeviceIndex(0)
    SEEN.clear()
    config = script.Config(**{"model": "qwen2-0.5b", "max_length": 1024} | flags)
    device = script.init_process_group(config)
    seen = {"start": dict(SEEN), "device": str(device), "precision": config.precision}
    vocabulary = 320
    uses_rl = hasattr(script, "AnswerBatches")
    batches = (answers if uses_rl else texts)(script, config, vocabulary)
    # Batches are made on the CPU, where tensors have numbers.
    batches.collate = dry_run.unseen(batches.collate)
    plan = batches.plan(0)
    number = len(plan) if uses_rl else config.global_batch_tokens // config.micro_batch_tokens
    share = shared.dp_rank_and_size(script, config)
    number -= number % share[1]
    model_config = shared.architecture(script, config, vocabulary)
    model_config.num_hidden_layers = max(2, getattr(config, "pipeline_parallel", 2))
    model_file.attend_one_by_one = by_document
    try:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with dry_run.adapted(script), fake, Recorder():
            model, optimizer = shared.build(script, model_config, config, device)
            seen["parameters"] = sorted({str(p.device) for p in model.parameters()})
            for step in range(2):
                SEEN.clear()
                chosen = plan[:number] if uses_rl else plan[step * number :][:number]
                batch = batches.global_batch(chosen, *share)
                script.train_step(model, optimizer, batch, 1, config, device)
            seen |= {"micro_batches": len(batch.micro_batches), "step": dict(SEEN)}
            SEEN.clear()
            if uses_rl:
                sample(script, model, config, device)
                seen |= {"validation": {}, "sampling": dict(SEEN)}
            else:
                batches.plan = lambda _: plan[: 8 * share[1]]
                shared.evaluate(script, model, batches, config, device)
                seen["validation"] = dict(SEEN)
    finally:
        dist.destroy_process_group()
    return seen


def threads() -> dict[str, Any]:
    """Return the devices of threads: of a plain one, and of the one that writes checkpoints."""
    set_device(RANK)
    dist.new_group = lambda **_: None
    dist.get_rank = lambda *_: RANK
    device = torch.device("cuda", RANK)
    checkpoints = common.Checkpoints(None, Path("nowhere"), {}, print, device)
    devices = []
    dist.barrier = lambda *_: devices.append(torch.cuda.current_device())
    # It ends after the barrier, because nobody has created the directory.
    error = checkpoints.thread.submit(checkpoints.write, {}, {"step": 1}).exception()
    assert isinstance(error, common.Refusal) and "same directory" in str(error)
    plain = ThreadPoolExecutor(1).submit(torch.cuda.current_device).result()
    return {"plain": plain, "ours": devices[0]}


def starts(script: Any) -> dict[str, Any]:
    """Return the error on a machine with one GPU, and the precision on an old GPU."""
    fake_cuda(gpus=1)
    try:
        script.init_process_group(script.Config(micro_batch_tokens=512))
        said = ""
    except common.Refusal as refusal:
        said = str(refusal)
    fake_cuda(capability=(7, 5))
    return {"one GPU": said, "old GPU": script.Config(micro_batch_tokens=512).precision}


def see(asked: tuple[str, Any]) -> dict[str, Any]:
    script, flags = sys.modules[asked[0]], asked[1]
    try:
        return starts(script) | {"threads": threads()} if flags == "starts" else run(script, flags)
    except Exception:
        return {"error": traceback.format_exc()[:6000]}


def start(asked: tuple[str, Any]) -> tuple:
    """Fork for each run: in a process that had seen a dozen, torch 2.13 at times crashed."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    child = context.Process(target=lambda: sending.send(see(asked)))
    child.start()
    sending.close()
    return asked, child, receiving


def finish(asked: tuple[str, Any], child: Any, receiving: Any) -> None:
    """Print what a run saw."""
    try:
        seen = receiving.recv()
    except EOFError:
        seen = {"error": f"the process of {asked} died"}
    child.join()
    print(json.dumps(seen), flush=True)


def main() -> None:
    warnings.filterwarnings("ignore")
    runs = json.loads(sys.argv[1])
    for name, _ in runs:
        importlib.import_module(name)  # without CUDA
    fake_cuda()
    fake_attention()
    fake_masks()
    # Two at a time, forked by one thread: filelock 4.3 makes `os.fork` raise if another forks.
    running: list[tuple] = []
    for asked in runs:
        running.append(start(asked))
        if len(running) == 2:
            finish(*running.pop(0))
    for each in running:
        finish(*each)
    os._exit(0)


if __name__ == "__main__":
    main()
