"""Model FLOPs utilization (MFU), tokens/s and memory on GPUs, setting by setting.

    torchrun --standalone --nproc-per-node=1 bench/gpu.py

qwen2-0.5b's shape with the GPT-2 vocabulary, rows of up to 2,048 random tokens, bf16. With two GPUs
also pipeline parallelism with 8 micro-batches a step, tensor and context parallelism, the latter
beside FSDP2 with rows of 16,384. Every setting builds the script's own model and optimizer and runs
its own train step. Prints a line a setting and writes docs/gpu.json. Without a GPU a small model
shows that this program works; its numbers mean nothing.
"""

import gc
import importlib
import json
import math
import os
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import shared
import torch
import torch.distributed as dist
from shared import ROOT, Session

import common

CUDA = torch.cuda.is_available()
NAME = torch.cuda.get_device_name() if CUDA else "cpu"
PEAK = common.peak_flops(NAME)
VOCABULARY = 50257 if CUDA else 256
WARM, STEPS = (6, 10) if CUDA else (2, 2)
BASE: dict[str, Any] = {
    "model": "qwen2-0.5b" if CUDA else "tiny", "precision": "bf16", "compile": CUDA,
    "max_length": 2048, "micro_batch_tokens": 16384 if CUDA else 4096, "pad_to_multiple_of": 256,
}  # fmt: skip
ONE_ROW = {"max_length": BASE["micro_batch_tokens"]}  # as long as a micro-batch
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "DDP": ("ddp", {}),
    "FSDP1": ("fsdp1", {}),
    "FSDP2": ("fsdp2", {}),
    "FSDP2, not compiled": ("fsdp2", {"compile": False}),
    "FSDP2, selective checkpointing": ("fsdp2", {"activation_checkpointing": "selective"}),
    "FSDP2, full checkpointing": ("fsdp2", {"activation_checkpointing": "full"}),
    "FSDP2, ragged": ("fsdp2", {}),
    "FSDP2, ragged, packed": ("fsdp2", {"batching": "packed"}),
    "FSDP2, 2 stages": ("fsdp2_pp", {"pipeline_parallel": 2}),
    "FSDP2, 2 a layer": ("fsdp2_tp", {"tensor_parallel": 2}),
    "FSDP2, one row": ("fsdp2", ONE_ROW),
    "FSDP2, one row, 2 a row": ("fsdp2_cp", ONE_ROW | {"context_parallel": 2}),
}


class RandomRows:
    """Replace common.Sequences: full sequences, or ragged ones like documents. No download."""

    def __init__(self, ragged: bool, longest: int):
        drawn = np.random.default_rng(0).lognormal(6, 1, 20_000).astype(np.int64)
        self.lengths = np.clip(drawn, 16, longest) if ragged else np.full(20_000, longest)
        self.num_targets = self.lengths

    def read(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        size = self.lengths[row] + 1
        tokens = np.random.default_rng(row).integers(VOCABULARY, size=size, dtype=np.uint32)
        return tokens, np.ones(size, bool)


def ranks_together(flags: dict[str, Any]) -> int:
    """How many ranks work on the same rows."""
    groups = ("tensor_parallel", "context_parallel", "pipeline_parallel")
    return math.prod(flags.get(name, 1) for name in groups)


def script_and_config(what: str, ranks: int) -> tuple[Any, Any]:
    """Of a setting; each rank with data of its own has one micro-batch a step, in a pipeline 8."""
    strategy, flags = SETTINGS[what]
    script = importlib.import_module(f"{strategy}_pretrain")
    micro_batches = 8 if strategy == "fsdp2_pp" else 1
    shares = ranks // ranks_together(flags) * micro_batches
    tokens = {"global_batch_tokens": BASE["micro_batch_tokens"] * shares}
    return script, script.Config(**BASE | flags | tokens)


def measure(what: str) -> dict[str, Any]:
    """Some steps of a script; tokens per second without padding, MFU, peak memory in GiB."""
    ranks = dist.get_world_size()
    script, config = script_and_config(what, ranks)
    rows = RandomRows("ragged" in what, config.max_length)
    training = common.Batches(rows, config, padding_id=0)
    tokenizer = SimpleNamespace(get_vocab=lambda: {"last": VOCABULARY - 1}, eos_token_id=None)
    model_config = script.build_model_config(config, tokenizer)
    data = SimpleNamespace(training=training, model_config=model_config)
    session = Session(script, config, data)
    peak_flops = PEAK and PEAK * ranks
    shapes = {training.shape(part): part for part in training.plan(0)[: 500 * config.compile]}
    for part in shapes.values():  # compile each before the clock runs
        micro_batch = training.collate(part)
        stages = getattr(config, "pipeline_parallel", 1)
        session.train_step(common.GlobalBatch([micro_batch] * stages, 1, 1, 1, 0.0))
    read = flops = 0
    for step, batch in enumerate(session.batches(0, WARM + STEPS)):
        if step == WARM:
            if CUDA:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            started = time.perf_counter()
        session.train_step(batch, 1e-4)  # returns numbers, so the GPU has ended the step
        if step >= WARM:
            read += batch.num_tokens
            flops += common.step_flops(session.full, batch)
    seconds = time.perf_counter() - started
    peak_memory = torch.cuda.max_memory_allocated() if CUDA else 0
    return {
        "tokens_per_second": read / seconds,
        "mfu": peak_flops and flops / seconds / peak_flops,
        "peak_gib": peak_memory / 2**30,
        "step_seconds": seconds / STEPS,
    }


def main() -> None:
    shared.read(__doc__)
    script, config = script_and_config("DDP", int(os.environ["WORLD_SIZE"]))
    script.init_process_group(config)
    table: dict[str, dict] = {}
    for what, (_, flags) in SETTINGS.items():
        if dist.get_world_size() % ranks_together(flags):
            continue
        try:
            table[what] = measure(what)
        except torch.OutOfMemoryError as error:
            table[what] = {"error": str(error).split(".")[0]}
        gc.collect()  # the next one's peak must not count this model, also after an error
        torch._dynamo.reset()
        if CUDA:
            torch.cuda.empty_cache()
        if dist.get_rank() == 0:
            print(what, table[what], flush=True)
    if CUDA and dist.get_rank() == 0:
        result = {"device": NAME, "torch": torch.__version__, "settings": table}
        (ROOT / "docs/gpu.json").write_text(json.dumps(result, indent=1) + "\n")
    shared.leave()


if __name__ == "__main__":
    main()
