"""Validation loss of a byte-bigram model on the text that the scripts hold out by default.

    python bench/bigram.py

The floor that a language model must get under: how well a byte is predicted from the one before it,
with counts from all of the training documents.
"""

import math
import os
import sys
from pathlib import Path

import arguments
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("WORLD_SIZE", "1")
import common  # noqa: E402
import fsdp2_pretrain  # noqa: E402


def bigram_loss(config: fsdp2_pretrain.Config) -> float:
    """Nats per label over `evaluation(config.eval_batches)`, with add-0.1 smoothing."""
    import torch

    tokenizer, training, validation = common.load_batches(config, torch.device("cpu"))
    counts = np.full((tokenizer.vocab_size, tokenizer.vocab_size), 0.1)
    documents = training.documents
    for document in np.unique(training.pieces.document):
        ids = documents.tokens(document, 0, documents.lengths[document])
        np.add.at(counts, (ids[:-1], ids[1:]), 1)
    nats = -np.log(counts / counts.sum(axis=1, keepdims=True))
    total = labels = 0.0
    for batch in validation.evaluation(config.eval_batches):
        kept = batch["labels"] != common.IGNORED
        total += nats[batch["input_ids"][kept].numpy(), batch["labels"][kept].numpy()].sum()
        labels += kept.sum().item()
    return total / labels


if __name__ == "__main__":
    arguments.read(__doc__)
    loss = bigram_loss(fsdp2_pretrain.Config())
    print(f"byte-bigram model: validation loss {loss:.4f}, {loss / math.log(2):.4f} bits per byte")
