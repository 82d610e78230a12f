"""Validation loss of a byte-bigram model on the text that the scripts hold out by default.

    python bench/bigram.py

A language model has to get below it. The model predicts a byte from the one before it, by counts
over all training documents, with 0.1 added to each count.
"""

import _tools  # noqa: F401
import numpy as np
import shared

import common
import fsdp2_pretrain


def main() -> None:
    shared.read(__doc__)
    config = fsdp2_pretrain.Config()
    data = shared.load_data(fsdp2_pretrain, config)
    counts = np.full((len(data.tokenizer), len(data.tokenizer)), 0.1)
    training = data.training.sequences
    for i in range(len(training.lengths)):
        ids, _ = training.read(i)
        np.add.at(counts, (ids[:-1], ids[1:]), 1)
    nats = -np.log(counts / counts.sum(axis=1, keepdims=True))
    total = num_targets = 0
    for batch in data.validation.evaluation(0, 1):
        is_target = batch["labels"] != common.IGNORED
        total += nats[
            batch["input_ids"][is_target].numpy(), batch["labels"][is_target].numpy()
        ].sum()
        num_targets += is_target.sum().item()
    loss = total / num_targets
    bits = loss / np.log(2) / data.validation.bytes_per_target()
    print(f"byte-bigram model: validation loss {loss:.4f}, {bits:.4f} bits per byte")


if __name__ == "__main__":
    main()
