"""Model FLOPs utilization (MFU), tokens/s and memory on one GPU, setting by setting.

    torchrun --standalone --nproc-per-node=1 bench/gpu.py

qwen2-0.5b's shape with the GPT-2 vocabulary, rows of up to 2,048 random tokens, bf16. Every setting
builds the script's own model and optimizer and runs its own train step. Prints a table, profiles
the best setting, and writes docs/gpu.json. Without a GPU a small model shows that this program
works; its numbers mean nothing.
"""

import datetime
import gc
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import arguments
import numpy as np
import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import common  # noqa: E402
import ddp_pretrain  # noqa: E402

CUDA = torch.cuda.is_available()
VOCABULARY = 50257 if CUDA else 256
WARM, STEPS = (6, 10) if CUDA else (2, 2)
BASE: dict[str, Any] = {
    "model": "qwen2-0.5b" if CUDA else "tiny", "precision": "bf16", "compile": CUDA,
    "bucket_edges": [2048], "micro_batch_tokens": 16384 if CUDA else 4096,
}  # fmt: skip
RAGGED = {"bucket_edges": [256, 512, 1024, 2048]}
CHUNK_LOGITS = ddp_pretrain.CHUNK_LOGITS  # the same in all scripts
ALL_LOGITS = 2**62  # at a time: none is computed again
SETTINGS: list[tuple[str, str, dict[str, Any]]] = [  # what, script, flags
    ("DDP", "ddp_pretrain", {}),
    ("FSDP1", "fsdp1_pretrain", {}),
    ("FSDP2", "fsdp2_pretrain", {}),
    ("FSDP2, not compiled", "fsdp2_pretrain", {"compile": False}),
    ("FSDP2, all logits at once", "fsdp2_pretrain", {"CHUNK_LOGITS": ALL_LOGITS}),
    ("FSDP2, selective checkpointing", "fsdp2_pretrain", {"activation_checkpointing": "selective"}),
    ("FSDP2, full checkpointing", "fsdp2_pretrain", {"activation_checkpointing": "full"}),
    ("FSDP2, the same in 20 GiB", "fsdp2_pretrain", {"activation_checkpointing": "full"}),
    ("FSDP2, ragged, bucketed", "fsdp2_pretrain", RAGGED),
    ("FSDP2, ragged, packed", "fsdp2_pretrain", RAGGED | {"batching": "packed"}),
]
CAP = 20 * 2**30


class RandomDocuments:
    """Stands in for common.Documents: needs no vocabulary and no download."""

    def __init__(self, positions: np.ndarray):
        self.lengths = self.bytes = positions + 1

    def tokens(self, document: int, start: int, stop: int) -> np.ndarray:
        numbers = np.random.default_rng(document).integers(VOCABULARY, size=stop)
        return numbers[start:]

    labels = tokens


def batches(config: Any, device: torch.device) -> common.Batches:
    """Full rows; with several edges, lengths that spread like those of documents."""
    positions = np.full(20_000, 2048)
    if len(config.bucket_edges) > 1:
        drawn = np.random.default_rng(0).lognormal(6, 1, len(positions))
        positions = np.clip(drawn.astype(np.int64), 16, 2048)
    documents = RandomDocuments(positions)
    return common.Batches(documents, np.arange(len(positions)), config, device, padding=0)


def measure(name: str, flags: dict[str, Any], device: torch.device, profile: bool = False) -> dict:
    """Some steps of a script; tokens per second without padding, MFU, peak memory in GiB."""
    script, flags = importlib.import_module(name), BASE | flags
    script.CHUNK_LOGITS = flags.pop("CHUNK_LOGITS", CHUNK_LOGITS)
    flags["global_batch_tokens"] = flags["micro_batch_tokens"] * dist.get_world_size()
    config = script.Config(**flags)
    common.check_config(config)
    shape = script.architecture(config, VOCABULARY)
    size = common.size_of(shape)
    model, decayed = script.build_model(config, shape, device)
    optimizer = script.build_optimizer(model, decayed, config)
    training = batches(config, device)
    shapes = {training.shape(training.micro_batch(k)): k for k in range(500 * config.compile)}
    for number in shapes.values():  # each is compiled before the clock runs
        micro_batch = training.collate(training.micro_batch(number))
        batch = common.GlobalBatch([micro_batch], labels=1, tokens=1, attended=1, fractions={})
        script.train_step(model, optimizer, batch, config, device, 0.0)
    tokens = flops = 0
    for step, batch in enumerate(training.stream(0, WARM + STEPS)):
        if step == WARM:
            synchronize()
            if CUDA:
                torch.cuda.reset_peak_memory_stats()
            started = time.perf_counter()
        script.train_step(model, optimizer, batch, config, device, 1e-4)
        if step >= WARM:
            tokens += batch.tokens
            flops += size.flops(batch.tokens, batch.labels, batch.attended)
    synchronize()
    seconds = time.perf_counter() - started
    peak = common.peak_flops(device)
    seen = {
        "tokens_per_second": tokens / seconds,
        "mfu": peak and flops / seconds / peak / dist.get_world_size(),
        "peak_gib": common.peak_memory(device) / 2**30,
        "floor_seconds": peak and flops / STEPS / peak / dist.get_world_size(),
        "step_seconds": seconds / STEPS,
    }
    if profile:
        with torch.profiler.profile() as profiler:
            script.train_step(model, optimizer, batch, config, device, 1e-4)
            synchronize()
        kernels = [  # without the operators that launch them, and without FSDP's annotations
            event
            for event in profiler.key_averages()
            if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
        ]
        kernels.sort(key=lambda event: -event.self_device_time_total)
        seen["kernels_ms"] = {e.key[:120]: e.self_device_time_total / 1e3 for e in kernels[:20]}
        seen["busy_ms"] = sum(e.self_device_time_total for e in kernels) / 1e3
    return seen


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def clean_up() -> None:
    """Free the last model, also after an error: the next one's peak must not count it."""
    gc.collect()
    torch._dynamo.reset()
    if CUDA:
        torch.cuda.empty_cache()


def main() -> None:
    arguments.read(__doc__)
    device = ddp_pretrain.init_process_group(ddp_pretrain.Config())
    table: dict[str, dict] = {}
    for what, script, flags in SETTINGS:
        capped = CUDA and "20 GiB" in what
        if capped:
            memory = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, CAP / memory))
        try:
            table[what] = measure(script, flags, device)
        except torch.OutOfMemoryError as error:
            table[what] = {"error": str(error).split(".")[0]}
        clean_up()
        if capped:
            torch.cuda.set_per_process_memory_fraction(1.0)
        print(what, table[what], flush=True)
    working = {what: seen for what, seen in table.items() if "error" not in seen}
    best = max(working, key=lambda what: working[what]["mfu"] or 0)
    script, flags = next((s, f) for what, s, f in SETTINGS if what == best)
    result = {
        "device": torch.cuda.get_device_name() if CUDA else "cpu",
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "settings": table,
        "best": {"setting": best} | measure(script, flags, device, profile=True),
    }
    clean_up()
    print(json.dumps(result["best"], indent=1))
    if CUDA and dist.get_rank() == 0:
        (ROOT / "docs/gpu.json").write_text(json.dumps(result, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # as the models are gone, nothing is left to wait for


if __name__ == "__main__":
    main()
