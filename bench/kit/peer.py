"""Scripts and bare loops of the same shape take turns on one GPU: python peer.py

qwen2-0.5b's shape with 50,304 ids, 8 sequences of 2,048 random tokens a step, bf16, AdamW, gradient
clipping, the loss read each step. Bare loops: transformers compiled as a whole, the same without
the compiler, and a plain decoder written out below, as nanoGPT's train.py trains one. All live in
one process and take turns, so ratios hold although clocks change.
"""

import os
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import kit

kit.alone()
import gpu  # noqa: E402 (tools/gpu.py)
import torch  # noqa: E402
from kit import emit, guarded, synchronize  # noqa: E402
from shared import Session, architecture  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

import common  # noqa: E402

GPU = gpu.CUDA
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
TURNS, STEPS = (4, 8) if GPU else (2, 1)
LENGTH = 2048


class Norm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), 1e-6)


class Block(nn.Module):
    def __init__(self, shape: Any):
        super().__init__()
        self.heads, self.groups = shape.num_attention_heads, shape.num_key_value_heads
        self.size = shape.hidden_size // self.heads
        width, inner = shape.hidden_size, shape.intermediate_size
        self.norms = nn.ModuleList(Norm(width) for _ in range(2))
        self.qkv = nn.Linear(width, (self.heads + 2 * self.groups) * self.size)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(batch, length, -1, self.size).transpose(1, 2)
        q, k, v = parts.split([self.heads, self.groups, self.groups], dim=1)

        def rotate(t: torch.Tensor) -> torch.Tensor:
            a, b = t.chunk(2, dim=-1)
            return t * cos + torch.cat([-b, a], dim=-1) * sin

        y = F.scaled_dot_product_attention(
            rotate(q).to(v.dtype), rotate(k).to(v.dtype), v, is_causal=True, enable_gqa=True
        )
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Plain(nn.Module):
    """The same decoder, written out."""

    def __init__(self, shape: Any):
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_hidden_layers))
        self.norm = Norm(shape.hidden_size)
        nn.init.normal_(self.embedding.weight, std=0.02)
        size = shape.hidden_size // shape.num_attention_heads
        speeds = 1e6 ** -(torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(LENGTH), torch.cat([speeds, speeds]))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, self.cos[: ids.shape[1]], self.sin[: ids.shape[1]])
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class Transformers(nn.Module):
    def __init__(self, shape: Any):
        super().__init__()
        self.model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.model(input_ids=ids, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def bare(model: nn.Module, compiled: bool, batches: list[dict]) -> Callable[[int], float]:
    """Return a function that runs a step, as a tutorial's loop."""
    model = model.to(DEVICE)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    call = torch.compile(model) if compiled and GPU else model

    def step(i: int) -> float:
        batch = batches[i % len(batches)]
        ids, labels = (
            batch[key].pin_memory() if GPU else batch[key] for key in ("input_ids", "labels")
        )
        ids, labels = ids.to(DEVICE, non_blocking=True), labels.to(DEVICE, non_blocking=True)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = call(ids, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def ours(strategy: str, flags: dict[str, Any]) -> Callable[[int], float]:
    gpu.SETTINGS["ours"] = strategy, flags
    script, config = gpu.script_and_config("ours", 1)
    sequences = gpu.RandomSequences(False, config.max_length)
    training = common.Batches(sequences, config, padding_id=0)
    model_config = architecture(script, config, gpu.VOCABULARY)
    data = SimpleNamespace(training=training, model_config=model_config)
    session = Session(script, config, data)
    batches = list(session.batches(0, 16))
    return lambda i: session.train_step(batches[i % 16])


def main() -> None:
    kit.quiet()
    script, config = gpu.script_and_config("FSDP2", 1)
    script.init_process_group(config)
    sequences = gpu.RandomSequences(False, config.max_length)
    training = common.Batches(sequences, config, padding_id=0)
    batches = [training.collate(indices) for indices in training.plan(0)[:16]]
    tokens = int((batches[0]["labels"] >= 0).sum())
    shape = architecture(script, config, gpu.VOCABULARY)
    makers: dict[str, Callable[[], Callable[[int], float]]] = {
        "plain decoder, compiled": lambda: bare(Plain(shape), True, batches),
        "transformers, compiled": lambda: bare(Transformers(shape), True, batches),
        "DDP script, compiled": lambda: ours("ddp", {}),
        "FSDP2 script, compiled": lambda: ours("fsdp2", {}),
        "transformers, not compiled": lambda: bare(Transformers(shape), False, batches),
        "DDP script, not compiled": lambda: ours("ddp", {"compile": False}),
    }
    if not GPU:  # the decoder keeps angles for this many positions
        assert config.max_length <= LENGTH
    contestants: dict[str, Callable[[int], float]] = {}
    first: dict[str, list[float]] = {}
    for what, make in makers.items():
        with guarded("peer", what):
            kit.need(70 if GPU else 2)
            began = time.perf_counter()
            step = make()
            first[what] = [step(i) for i in range(4 if GPU else 1)]
            contestants[what] = step
            emit("peer", f"{what}: start", seconds=time.perf_counter() - began, losses=first[what])
    taken: dict[str, list[float]] = {what: [] for what in contestants}
    for turn in range(TURNS):
        for what, step in contestants.items():
            if kit.left() < 10:
                break
            with guarded("peer", what):
                step(0)
                synchronize()
                began = time.perf_counter()
                for i in range(STEPS):
                    step(4 + turn * STEPS + i)
                synchronize()
                taken[what].append((time.perf_counter() - began) / STEPS)
    reference = taken.get("plain decoder, compiled") or [float("nan")]
    for what, seconds in taken.items():
        if not seconds:
            continue
        ratios = [r / s for r, s in zip(reference, seconds)]
        emit(
            "peer", what, tokens_per_second=tokens / min(seconds),
            step_ms=[1e3 * s for s in seconds],
            speed_beside_plain=sum(ratios) / max(1, len(ratios)),
        )  # fmt: skip
    sys.stdout.flush()
    os._exit(0)


main()
