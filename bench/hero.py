"""Draw docs/images/strategies.png: what each of four ranks holds and computes under each strategy.

    python bench/hero.py

A model of four blocks trains one step on four sequences, as ranks 0 to 3 of a fake process group
(see tools/dry_run.py). What is drawn is what the scripts do: the sequences of a rank are those of
`dp_rank_and_size`, its positions those of `local_micro_batch`. Parameters, gradients after backward
and optimizer state have the sizes of its local tensors, and what it sends are the bytes of the
collectives that it issues.

The blocks have the shape of Llama 3 8B's, the sequences 8,192 tokens, in bf16. Expert parallelism
trains an MoE model with as many parameters per token. All strategies train on the same four
sequences, with 8,192 tokens on a rank at a time, so the bytes can be compared.
"""

import contextlib
import importlib
import io
import tempfile
from collections import Counter
from typing import Any

import _tools  # noqa: F401
import dry_run
import shared
import torch
from shared import ROOT
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule

RANKS = BLOCKS = SEQUENCES = CHUNKS = 4
LENGTH, VOCABULARY = 8192, 256  # so few ids that embedding and head do not show
WIDTH, FEED_FORWARD, HEADS, KEYS = 4096, 14336, 32, 8
STRATEGIES: dict[str, tuple[str, dict[str, int], str]] = {
    "DDP": ("ddp_pretrain", {}, "every rank has\nthe whole model"),
    "ZeRO-1": ("ddp_pretrain", {"shard_optimizer": 1}, "shards the\noptimizer state"),
    "FSDP": ("fsdp2_pretrain", {}, "shards everything, gathers\na block to compute it"),
    "Tensor parallel": (
        "fsdp2_tp_pretrain",
        {"tensor_parallel": 4, "micro_batch_tokens": 4 * LENGTH},
        "ranks share the\nmatmuls of a layer",
    ),
    "Context parallel": (
        "fsdp2_cp_pretrain",
        {"context_parallel": 4, "micro_batch_tokens": 4 * LENGTH},
        "ranks share\neach sequence",
    ),
    "Pipeline parallel": (
        "fsdp2_pp_pretrain",
        {"pipeline_parallel": 4},
        "each rank has\nsome blocks",
    ),
    "Expert parallel": ("fsdp2_ep_pretrain", {"expert_parallel": 4}, "tokens travel\nto experts"),
}
DATA, HELD, GATHERED, EMPTY = "#2a9d8f", "#1d3557", "#b8cbe4", "#eef0f3"
GRADIENTS, STATE = "#e9c46a", "#e07a5f"
PITCH = 4.2  # from a rank to the next


def save_shape(script: str, folder: str) -> None:
    if script != "fsdp2_ep_pretrain":
        shape = shared.qwen2(WIDTH, FEED_FORWARD, BLOCKS, HEADS, KEYS, VOCABULARY)
    else:
        from transformers import MiniMaxM2Config

        shape = MiniMaxM2Config(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=FEED_FORWARD // 2,
            num_hidden_layers=BLOCKS, num_attention_heads=HEADS, num_key_value_heads=KEYS,
            head_dim=WIDTH // HEADS, num_local_experts=4, num_experts_per_tok=2,
            tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
    shape.save_pretrained(folder)


def by_block(parameters: Any) -> Counter[int]:
    """Return the numbers of elements of local tensors, by block."""
    sizes: Counter[int] = Counter()
    for name, parameter in parameters:
        if ".layers." in name:
            local = getattr(parameter, "_local_tensor", parameter)
            sizes[int(name.split(".layers.")[1].split(".")[0])] += local.numel()
    return sizes


def observe(script_name: str, flags: dict[str, int], rank: int) -> dict[str, Any]:
    """Return fractions of each block that a rank holds, computes with and updates, and its data."""
    dry_run.be_rank(rank, RANKS, RANKS)
    script = importlib.import_module(script_name)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        save_shape(script_name, folder)
        config = script.Config(
            model=folder, precision="bf16", max_length=LENGTH,
            global_batch_tokens=LENGTH * SEQUENCES, **{"micro_batch_tokens": LENGTH, **flags},
        )  # fmt: skip
        shape = shared.architecture(script, config, VOCABULARY)
        watch = dry_run.Watch()
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with dry_run.fake_ranks(), dry_run.adapted(script), fake, watch:
            full = by_block(shared.build_model(script, shape, config).named_parameters())
            model, optimizer = shared.build(script, shape, config, dry_run.CPU)
            inner = getattr(model, "module", model)
            seen: dict[str, Any] = {"held": by_block(inner.named_parameters())}
            batch = dry_run.batch_of(script, config)
            script.train_step(model, optimizer, batch, 1, config, dry_run.CPU)
            parameters = dict(inner.named_parameters())
            seen["updated"] = by_block(
                (name, p) for name, p in parameters.items() if p in optimizer.state
            )
            watch.restart()
            gradients: dict[str, Any] = {}
            optimizer.register_step_pre_hook(
                lambda *_: gradients.update((name, p.grad) for name, p in parameters.items())
            )
            script.train_step(model, optimizer, batch, 2, config, dry_run.CPU)
            seen["gradients"] = by_block(pair for pair in gradients.items() if pair[1] is not None)
            seen["sent"] = Counter()
            for call in watch.calls:
                seen["sent"][call.kind] += call.sent
            for module in inner.modules():
                if isinstance(module, FSDPModule):
                    module.unshard()
            seen["computed"] = by_block(inner.named_parameters())
            index, size = shared.dp_rank_and_size(script, config)
        chunks = range(CHUNKS)
        if hasattr(script, "local_micro_batch"):
            ids = torch.zeros(1, LENGTH, dtype=torch.int64)
            with dry_run.fake_ranks():
                part = script.local_micro_batch(
                    {"input_ids": ids, "labels": ids}, config, dry_run.CPU
                )
            positions = part["position_ids"].flatten().tolist()
            chunks = sorted({position * CHUNKS // LENGTH for position in positions})
    for name in ("held", "computed", "gradients", "updated"):
        seen[name] = [seen[name][block] / full[block] for block in range(BLOCKS)]
    return seen | {"sequences": range(index, SEQUENCES, size), "chunks": chunks}


def draw_rank(axis: Any, x: float, y: float, rank: int, seen: dict[str, Any]) -> None:
    """Draw four boxes: data, parameters, gradients, and optimizer state."""

    def box(left: float, bottom: float, width: float, height: float, color: str) -> None:
        axis.add_patch(
            shared.plotting().Rectangle((left, bottom), width, height, color=color, linewidth=0)
        )

    cell = 0.17
    for sequence in range(SEQUENCES):
        for chunk in range(CHUNKS):
            mine = sequence in seen["sequences"] and chunk in seen["chunks"]
            bottom = y + 0.8 - 0.2 * (sequence + 1)
            box(x + 0.2 * chunk, bottom, cell, cell, DATA if mine else EMPTY)
    for block in range(BLOCKS):
        bottom = y + 0.8 - 0.2 * (block + 1)
        for left, wide, narrow, color in (
            (x + 0.95, "computed", "held", HELD),
            (x + 1.95, None, "gradients", GRADIENTS),
            (x + 2.95, None, "updated", STATE),
        ):
            box(left, bottom, 0.9, 0.17, EMPTY)
            if wide:
                box(left, bottom, 0.9 * seen[wide][block], 0.17, GATHERED)
            part = seen[narrow][block]
            # If all blocks are sharded alike, the rank's shard is at its own place.
            alike = len(set(seen[narrow])) == 1
            offset = 0.9 * rank / RANKS if alike and part < 1 else 0.0
            if wide and seen[wide][block] <= 0.3:  # computes with its part only
                box(left, bottom, 0.9, 0.17, EMPTY)
            box(left + offset, bottom, 0.9 * part, 0.17, color)


def gigabytes(sent: Counter[str]) -> str:
    """Return what a rank sends in all, and by collective."""
    kinds = [f"{kind}: {size / 1e9:.1f}" for kind, size in sent.most_common() if size > 5e7]
    return "\n".join([f"{sum(sent.values()) / 1e9:.1f} GB", *(kinds if len(kinds) > 1 else [])])


def main() -> None:
    shared.read(__doc__)
    figure, axis = shared.plotting().subplots(figsize=(13.5, 8.6), dpi=150)
    right = PITCH * RANKS
    for row, (title, (script, flags, idea)) in enumerate(STRATEGIES.items()):
        y = -1.28 * row
        ranks = [observe(script, flags, rank) for rank in range(RANKS)]
        axis.text(-3.25, y + 0.62, title, fontsize=11, weight="bold", va="center")
        axis.text(-3.25, y + 0.2, idea, fontsize=7.5, va="center", color="#444444")
        for rank, seen in enumerate(ranks):
            draw_rank(axis, PITCH * rank, y, rank, seen)
        most = max((seen["sent"] for seen in ranks), key=Counter.total)
        first, *others = gigabytes(most).splitlines()
        axis.text(right, y + 0.7, first, fontsize=9, weight="bold", va="center")
        axis.text(right, y + 0.55, "\n".join(others), fontsize=7, va="top", color="#444444")
        axis.plot([-3.25, right + 2.2], [y - 0.14] * 2, color="#dddddd", linewidth=0.6)
        print(title, gigabytes(most), sep="\n", flush=True)
    headings = ((0.4, "data"), (1.4, "parameters"), (2.4, "gradients"), (3.4, "AdamW"))
    for rank in range(RANKS):
        axis.text(PITCH * rank + 1.9, 1.28, f"rank {rank}", fontsize=10, ha="center")
        for offset, text in headings:
            x = PITCH * rank + offset
            axis.text(x, 0.95, text, fontsize=5.8, ha="center", color="#666666")
    axis.text(right, 1.28, "a rank sends", fontsize=10)
    axis.text(right, 0.95, "for the same tokens", fontsize=6.5, color="#666666")
    colors = (DATA, HELD, GATHERED, GRADIENTS, STATE)
    handles = [shared.plotting().Rectangle((0, 0), 1, 1, color=color) for color in colors]
    labels = [
        "sequences (rows) and positions (columns) that a rank computes",
        "parameters that it holds, of four blocks",
        "gathered while it computes a block",
        "gradients that it holds after backward",
        "AdamW moments that it holds",
    ]
    axis.legend(
        handles, labels, ncols=3, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 0.02),
        frameon=False,
    )  # fmt: skip
    axis.set_xlim(-3.3, right + 2.3)
    axis.set_ylim(-1.28 * len(STRATEGIES) + 1.0, 1.5)
    axis.axis("off")
    figure.patch.set_facecolor("white")
    figure.savefig(ROOT / "docs/images/strategies.png", bbox_inches="tight")


if __name__ == "__main__":
    main()
