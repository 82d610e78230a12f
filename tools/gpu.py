"""Model FLOPs utilization (MFU), tokens per second and memory on GPUs, setting by setting.

    torchrun --standalone --nproc-per-node=1 tools/gpu.py

qwen2-0.5b's shape with the GPT-2 vocabulary, sequences of up to 2,048 random tokens, bf16. With two
GPUs also PP with 8 micro-batches per step, TP, and CP beside FSDP2 with sequences of 16,384. Every
setting builds the script's own model and optimizer and runs its own train step. Prints a line for
each setting and writes bench/results/gpu.json. Without a GPU, a small model shows that this program
works, but its numbers mean nothing.
"""

import gc
import importlib
import json
import math
import os
import resource
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import shared
import torch
import torch.distributed as dist
import transformers
from shared import ROOT, Session

import common
from model import count_flops
from run import peak_tflops, set_up_gpu

CUDA = torch.cuda.is_available()
NAME = torch.cuda.get_device_name() if CUDA else "cpu"
PEAK = (peak_tflops(NAME) or 0) * 1e12
VOCABULARY = 50257 if CUDA else 256
WARM, STEPS = (6, 10) if CUDA else (2, 2)
BASE: dict[str, Any] = {
    "model": "qwen2-0.5b" if CUDA else "tiny", "precision": "bf16", "compile": CUDA,
    "max_length": 2048, "micro_batch_tokens": 16384 if CUDA else 4096, "pad_to_multiple_of": 256,
}  # fmt: skip
ONE_SEQUENCE = {"max_length": BASE["micro_batch_tokens"]}  # as long as a micro-batch
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "DDP": ("ddp", {}),
    "FSDP1": ("fsdp1", {}),
    "FSDP2": ("fsdp2", {}),
    "FSDP2, not compiled": ("fsdp2", {"compile": False}),
    "FSDP2, selective checkpointing": ("fsdp2", {"activation_checkpointing": "selective"}),
    "FSDP2, full checkpointing": ("fsdp2", {"activation_checkpointing": "full"}),
    "FSDP2, ragged": ("fsdp2", {}),
    "FSDP2, ragged, packed": ("fsdp2", {"batching": "packed"}),
    "Muon": ("fsdp2_muon", {}),
    "FSDP2, 2 stages": ("fsdp2_pp", {"pipeline_parallel": 2}),
    "FSDP2, TP of 2": ("fsdp2_tp", {"tensor_parallel": 2}),
    "FSDP2, one sequence": ("fsdp2", ONE_SEQUENCE),
    "FSDP2, one sequence, CP of 2": ("fsdp2_cp", ONE_SEQUENCE | {"context_parallel": 2}),
}
if CUDA:  # needs pip install --pre flash-attn-4
    SETTINGS["FSDP2, one sequence, FlashAttention 4"] = (
        "fsdp2", ONE_SEQUENCE | {"flash_attention": "FA4"}
    )  # fmt: skip


class RandomSequences:
    """Stands in for common.Sequences: all of the longest length, or ragged as documents are."""

    def __init__(self, ragged: bool, longest: int):
        drawn = np.random.default_rng(0).lognormal(6, 1, 20_000).astype(np.int64)
        self.lengths = np.clip(drawn, 16, longest) if ragged else np.full(20_000, longest)
        self.num_targets = self.lengths

    def read(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        size = self.lengths[i] + 1
        tokens = np.random.default_rng(i).integers(VOCABULARY, size=size)
        return tokens, np.ones(size, bool)


def group_size(flags: dict[str, Any]) -> int:
    """Return how many ranks share a micro-batch."""
    groups = ("tensor_parallel", "context_parallel", "pipeline_parallel")
    return math.prod(flags.get(name, 1) for name in groups)


def script_and_config(what: str, ranks: int) -> tuple[Any, Any]:
    """Return a setting's script and Config: one micro-batch per data-parallel rank, 8 with PP."""
    strategy, flags = SETTINGS[what]
    script = importlib.import_module(f"{strategy}_pretrain")
    micro_batches = 8 if strategy == "fsdp2_pp" else 1
    accumulation = ranks // group_size(flags) * micro_batches
    tokens = {"global_batch_tokens": BASE["micro_batch_tokens"] * accumulation}
    return script, script.Config(**BASE | flags | tokens)


def measure(what: str) -> dict[str, Any]:
    """Run some steps; returns tokens per second without padding, MFU, and peak memory in GiB."""
    ranks = dist.get_world_size()
    left = torch.cuda.memory_allocated() if CUDA else 0  # by the model of FSDP1
    script, config = script_and_config(what, ranks)
    if config.flash_attention != "torch":  # the last setting, so nothing has to be restored
        set_up_gpu(config)
    sequences = RandomSequences("ragged" in what, config.max_length)
    training = common.Batches(sequences, config, padding_id=0)
    model_config = shared.architecture(script, config, VOCABULARY)
    data = SimpleNamespace(training=training, model_config=model_config)
    session = Session(script, config, data)
    per_token, per_target, per_square = count_flops(session.full)
    shapes = {
        training.shape(indices): indices for indices in training.plan(0)[: 500 * config.compile]
    }
    for indices in shapes.values():  # compile each before the clock runs
        micro_batch = training.collate(indices)
        stages = getattr(config, "pipeline_parallel", 1)
        session.train_step(common.GlobalBatch([micro_batch] * stages, 1, 1, 1, 0.0))
    tokens = flops = 0
    for step, batch in enumerate(session.batches(0, WARM + STEPS)):
        if step == WARM:
            if CUDA:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            started = time.perf_counter()
        session.train_step(batch)  # it returns numbers, so the GPU has finished the step
        if step >= WARM:
            tokens += batch.num_tokens
            flops += per_token * batch.num_tokens + per_target * batch.num_targets
            flops += per_square * batch.squared_lengths
    seconds = time.perf_counter() - started
    peak_memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if CUDA:
        peak_memory = torch.cuda.max_memory_allocated() - left
    return {
        "tokens_per_second": tokens / seconds,
        "mfu": flops / seconds / (PEAK * ranks) if PEAK else None,
        "peak_gib": peak_memory / 2**30,
        "step_seconds": seconds / STEPS,
    }


def main() -> None:
    shared.read(__doc__)
    script, config = script_and_config("DDP", int(os.environ["WORLD_SIZE"]))
    script.init_process_group(config)
    table: dict[str, dict] = {}
    result = {
        "device": NAME, "ranks": dist.get_world_size(), "torch": torch.__version__,
        "transformers": transformers.__version__, "settings": table,
    }  # fmt: skip
    for what, (_, flags) in SETTINGS.items():
        if dist.get_world_size() % group_size(flags):
            continue
        try:
            table[what] = measure(what)
        except Exception as error:  # out of memory, or a kernel is missing: run the others
            table[what] = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        gc.collect()  # the next one's peak must not count this model
        torch._dynamo.reset()
        if CUDA:
            torch.cuda.empty_cache()
        if dist.get_rank() == 0:
            print(what, table[what], flush=True)
        if CUDA and dist.get_rank() == 0:
            (ROOT / "bench/results/gpu.json").write_text(json.dumps(result, indent=1) + "\n")
    shared.leave()


if __name__ == "__main__":
    main()
