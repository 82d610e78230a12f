"""Which script for my model and machine? Memory of a rank by bench/dry_run.py, for the README.

    python bench/choose.py            computes the table (minutes) and writes docs/choosing.json

Micro-batches of 4,096 tokens in rows of 2,048, bf16; Qwen2.5's shapes. Hybrid is two replicas. A
setting fits if it leaves a tenth of the GPU free.
"""

import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import arguments
from dry_run import GIB, ROOT, be_rank_0, dry_run, on_device
from transformers import Qwen2Config

SHAPES = {  # hidden size, feed-forward size, blocks, heads, key/value heads, vocabulary, tied
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
    "32B": (5120, 27648, 64, 40, 8, 152064, False),
}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {  # the first that fits is the choice
    "DDP": ("ddp_pretrain", {}),
    "hybrid": ("fsdp2_pretrain", {"dp_replicate": 2}),
    "FSDP": ("fsdp2_pretrain", {}),
    "DDP, full checkpointing": ("ddp_pretrain", {"activation_checkpointing": "full"}),
    "FSDP, full checkpointing": ("fsdp2_pretrain", {"activation_checkpointing": "full"}),
    "FSDP, full checkpointing, offload": (
        "fsdp2_pretrain", {"activation_checkpointing": "full", "cpu_offload": True},
    ),
}  # fmt: skip
RANKS, CARDS = (1, 4, 8), (24, 80)  # GPUs; GB of one
FILE = ROOT / "docs/choosing.json"


def peaks(folder: Path) -> dict[str, dict[str, dict[str, float]]]:
    """model -> ranks -> setting -> GiB at the peak."""
    seen: dict[str, dict[str, dict[str, float]]] = {}
    for model, (hidden, inner, blocks, heads, groups, vocabulary, tied) in SHAPES.items():
        Qwen2Config(
            vocab_size=vocabulary, hidden_size=hidden, intermediate_size=inner,
            num_hidden_layers=blocks, num_attention_heads=heads, num_key_value_heads=groups,
            tie_word_embeddings=tied,
        ).save_pretrained(folder / model)  # fmt: skip
        seen[model] = {}
        for ranks in RANKS:
            seen[model][str(ranks)] = {}
            for setting, (script, own) in SETTINGS.items():
                if ranks == 1 and script == "fsdp2_pretrain":
                    continue  # one rank has nobody to share with
                be_rank_0(ranks, 8)
                module = importlib.import_module(script)
                config = module.Config(
                    model=str(folder / model), precision="bf16", bucket_edges=[2048],
                    micro_batch_tokens=4096, global_batch_tokens=4096 * ranks, **own,
                )  # fmt: skip
                gib = on_device(dry_run(module, config, 8, vocabulary), config) / GIB
                seen[model][str(ranks)][setting] = round(gib, 2)
                print(model, ranks, setting, round(gib, 2), flush=True)
                if gib < 0.9 * CARDS[0] * 1e9 / GIB:
                    break  # the rest would not be chosen
    return seen


def table(seen: dict[str, dict[str, dict[str, float]]]) -> str:
    """Markdown: for each model, number of GPUs and card, the first setting that fits."""
    lines = ["| model | GPUs | of 24 GB | of 80 GB |", "| --- | --- | --- | --- |"]
    for model, by_ranks in seen.items():
        for ranks, settings in by_ranks.items():
            cells = []
            for card in CARDS:
                room = 0.9 * card * 1e9 / GIB
                fits = [f"{name} ({gib:.1f} GiB)" for name, gib in settings.items() if gib <= room]
                least = min(settings.values())
                cells.append(fits[0] if fits else f"more GPUs (least: {least:.1f} GiB)")
            lines.append(f"| {model} | {ranks} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    arguments.read(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        FILE.write_text(json.dumps(peaks(Path(folder)), indent=1) + "\n")
    print(table(json.loads(FILE.read_text())))


if __name__ == "__main__":
    sys.exit(main())
