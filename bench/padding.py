"""Padding of a whole epoch, of both embedded corpora, bucketed and packed, also compiled.

python bench/padding.py
"""

import itertools
import sys
from pathlib import Path

import arguments
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
    arguments.read(__doc__)
    cpu, chat = torch.device("cpu"), (fsdp2_sft.TEMPLATE, fsdp2_sft.TURN, fsdp2_sft.INSIDE)
    for batching, compiled in itertools.product(("bucketed", "packed"), (False, True)):
        text = fsdp2_pretrain.Config(batching=batching, compile=compiled)
        talk = fsdp2_sft.Config(batching=batching, compile=compiled)
        batches = {"stdlib": common.load_batches(text, cpu)[1]}
        batches["stdlib-docstrings"] = common.load_conversations(talk, cpu, *chat)[1]
        for name, made in batches.items():
            kind = batching + (", compiled" if compiled else "")
            print(f"{name}, {kind}: {100 * padding(made):.1f} % padding")


if __name__ == "__main__":
    main()
