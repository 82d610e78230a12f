"""What the CPU waits for in a step, and what the GPU does in it: python steps.py waits|profile

waits: each script trains a small model for three steps of two micro-batches. In the third step,
torch.cuda.set_sync_debug_mode("warn") reports synchronizing calls by the line of the script. Then
a profile of one more step counts the calls of the CUDA runtime that can block.

profile: qwen2-0.5b's shape, 16,384 positions a step: busy and idle time of the GPU, time by kind of
kernel, the longest kernels. Writes traces to $OUT.
"""

import collections
import gc
import gzip
import os
import shutil
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kit

kit.alone()
import gpu  # noqa: E402 (tools/gpu.py)
import numpy as np  # noqa: E402
import torch  # noqa: E402
from kit import emit, guarded  # noqa: E402
from shared import Session, architecture, batches_class  # noqa: E402

BLOCKING = ["cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy"]
LAUNCHES = ["cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"]
KINDS = {
    "attention": ["flash", "fmha", "attention", "cudnn_generated"],
    "matmul": ["gemm", "nvjet", "cutlass", "sm90_xmma", "matmul", "cublas"],
    "communication": ["nccl"],
    "optimizer": ["adam"],
    "copies": ["memcpy", "memset", "copy", "cat", "split"],
    "compiled": ["triton"],
}


class Data:
    """Sequences of random tokens, half of them in the loss for fine-tuning."""

    def __init__(self, vocabulary: int, longest: int, in_loss: float):
        drawn = np.random.default_rng(0).lognormal(6, 1, 4000).astype(np.int64)
        self.lengths = np.clip(drawn, 16, longest)
        self.num_targets = self.lengths
        self.vocabulary, self.in_loss = vocabulary, in_loss

    def read(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(i)
        size = int(self.lengths[i]) + 1
        return rng.integers(self.vocabulary, size=size), rng.random(size) < self.in_loss


def session_of(name: str, flags: dict[str, Any]) -> Session:
    """Return a script's session with random data and the GPT-2 vocabulary, 320 ids if small."""
    script = gpu.importlib.import_module(name)
    config = script.Config(**flags)
    vocabulary = 50257 if config.model == "qwen2-0.5b" else 320
    model_config = architecture(script, config, vocabulary)
    sequences = Data(vocabulary, config.max_length, 0.5 if "sft" in name else 1.0)
    training = batches_class(script)(sequences, config, padding_id=0)
    return Session(script, config, SimpleNamespace(training=training, model_config=model_config))


def place() -> str:
    """Return the innermost lines of the repository, of this file not, that are running."""
    frames = traceback.extract_stack()
    own = [f for f in frames if Path(f.filename).parent == kit.ROOT]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno} {own[-1].line}" if own else "?"


def count_waits(session: Session, batch: Any) -> dict[str, int]:
    """Return the synchronizing calls of a step by line."""
    seen: collections.Counter = collections.Counter()

    def show(message: Any, *_: Any, **__: Any) -> None:
        if "called a synchronizing" in str(message):
            seen[place()] += 1

    plain = warnings.showwarning
    warnings.showwarning = show
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        torch.cuda.set_sync_debug_mode("warn")
        try:
            session.train_step(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    warnings.showwarning = plain
    return dict(seen)


def profiled(session: Session, batch: Any) -> torch.profiler.profile:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if gpu.CUDA:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        session.train_step(batch)
        kit.synchronize()
    return profiler


def waits() -> None:
    small = {
        "model": "tiny", "precision": "bf16", "max_length": 512, "micro_batch_tokens": 2048,
        "global_batch_tokens": 4096,
    }  # fmt: skip
    own = {
        "fsdp2_tp_pretrain": {"tensor_parallel": 1}, "fsdp2_cp_pretrain": {"context_parallel": 1},
        "fsdp2_pp_pretrain": {"pipeline_parallel": 1},
        "fsdp2_ep_pretrain": {"expert_parallel": 1, "model": "tiny-moe"},
    }  # fmt: skip
    scripts = ["ddp_pretrain", "fsdp1_pretrain", "fsdp2_pretrain", *own, "fsdp2_nd_pretrain"]
    for name in [*scripts, "fsdp2_sft"]:
        for batching in ("bucketed", "packed"):
            with guarded("waits", f"{name} {batching}"):
                kit.need(15)
                session = session_of(name, small | own.get(name, {}) | {"batching": batching})
                batches = list(session.batches(0, 5))
                for batch in batches[:3]:
                    session.train_step(batch)
                lines = count_waits(session, batches[3]) if gpu.CUDA else {}
                calls = collections.Counter(
                    event.name for event in profiled(session, batches[4]).events()
                )
                blocking = {call: n for call, n in calls.items() if call in BLOCKING}
                kernels = sum(calls[call] for call in LAUNCHES)
                emit(
                    "waits", f"{name} {batching}", micro_batches=len(batches[3].micro_batches),
                    waits=sum(lines.values()), lines=lines, blocking=blocking, launches=kernels,
                )  # fmt: skip
            session = None
            gc.collect()


def kind_of(name: str) -> str:
    low = name.lower()
    return next((kind for kind, words in KINDS.items() if any(w in low for w in words)), "other")


def busy(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of spans."""
    total, end = 0.0, -1.0
    for begin, stop in sorted(spans):
        total += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return total


def profile() -> None:
    real = {
        "model": gpu.BASE["model"], "precision": "bf16", "max_length": 2048,
        "micro_batch_tokens": gpu.BASE["micro_batch_tokens"],
        "global_batch_tokens": gpu.BASE["micro_batch_tokens"],
        "compile": gpu.CUDA,
    }  # fmt: skip
    cases = {
        "FSDP2 packed": ("fsdp2_pretrain", {"batching": "packed"}),
        "FSDP2 padded": ("fsdp2_pretrain", {"pad_to_multiple_of": 256}),
        "DDP packed": ("ddp_pretrain", {"batching": "packed"}),
        "FSDP2 packed, not compiled": ("fsdp2_pretrain", {"batching": "packed", "compile": False}),
    }
    for what, (name, flags) in cases.items():
        with guarded("profile", what):
            kit.need(50 if gpu.CUDA else 5)
            session = session_of(name, real | flags)
            torch.backends.cuda.enable_cudnn_sdp(session.config.pad_to_multiple_of > 1)
            batches = list(session.batches(0, 9))
            for batch in batches[:8]:
                session.train_step(batch)
            plain = kit.seconds_of(lambda: session.train_step(batches[8]), 3, 1)  # noqa: B023
            profiler = profiled(session, batches[8])  # another could compile again
            events = profiler.events()
            on_gpu = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
            # Annotations of the profiler are spans on the GPU too, but not kernels.
            on_gpu = [e for e in on_gpu if not e.is_user_annotation]
            spans = [(e.time_range.start, e.time_range.end) for e in on_gpu]
            by_kind: collections.Counter = collections.Counter()
            by_name: collections.Counter = collections.Counter()
            for event in on_gpu:
                by_kind[kind_of(event.name)] += event.time_range.elapsed_us()
                by_name[event.name[:70]] += event.time_range.elapsed_us()
            whole = max((s[1] for s in spans), default=0) - min((s[0] for s in spans), default=0)
            emit(
                "profile", what, step_ms=plain * 1e3, gpu_ms=whole / 1e3,
                busy_ms=busy(spans) / 1e3, kernels=len(on_gpu),
                by_kind_ms={kind: round(us / 1e3, 2) for kind, us in by_kind.most_common()},
                longest_ms={n: round(us / 1e3, 2) for n, us in by_name.most_common(12)},
            )  # fmt: skip
            if what in ("FSDP2 packed", "FSDP2 padded"):
                with tempfile.TemporaryDirectory() as folder:
                    raw = Path(folder, "trace.json")
                    profiler.export_chrome_trace(str(raw))
                    target = kit.OUT / f"trace_{what.split()[-1]}.json.gz"
                    with raw.open("rb") as source, gzip.open(target, "wb", 6) as packed:
                        shutil.copyfileobj(source, packed)
                if target.stat().st_size > 15 << 20:
                    target.unlink()
        session = profiler = events = on_gpu = None
        gc.collect()
        torch._dynamo.reset()
        if gpu.CUDA:
            torch.cuda.empty_cache()


kit.quiet()
{"waits": waits, "profile": profile}[sys.argv[1]]()
sys.stdout.flush()
os._exit(0)
