"""Padding of a whole epoch, of both embedded corpora, bucketed and packed: for the README.

python bench/padding.py
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import common  # noqa: E402
import fsdp2_pretrain  # noqa: E402
import fsdp2_sft  # noqa: E402


def padding(batches: common.Batches) -> float:
    """Share of the positions of an epoch that hold no token."""
    positions = 0
    for number in range(batches.epoch_length):
        rows, length = batches.shape(batches.micro_batch(number))
        positions += rows * length
    return 1 - batches.pieces.length.sum() / positions


def main() -> None:
    cpu, chat = torch.device("cpu"), (fsdp2_sft.TEMPLATE, fsdp2_sft.TURN, fsdp2_sft.INSIDE)
    for batching in ("bucketed", "packed"):
        text = fsdp2_pretrain.Config(batching=batching)
        talk = fsdp2_sft.Config(batching=batching)
        batches = {"stdlib": common.load_batches(text, cpu)[1]}
        batches["stdlib-docstrings"] = common.load_conversations(talk, cpu, *chat)[1]
        for name, made in batches.items():
            print(f"{name}, {batching}: {100 * padding(made):.1f} % padding")


if __name__ == "__main__":
    main()
