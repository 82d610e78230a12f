"""Validation loss of a byte-bigram model on the text that the scripts hold out by default.

    python bench/bigram.py

The floor that a language model must get under: how well a byte is predicted from the one before it,
with counts of all training documents and 0.1 added to each.
"""

import numpy as np
import shared

import common
import fsdp2_pretrain


def main() -> None:
    shared.read(__doc__)
    config = fsdp2_pretrain.Config()
    data = shared.load_data(fsdp2_pretrain, config)
    counts = np.full((len(data.tokenizer), len(data.tokenizer)), 0.1)
    training_rows, validation_rows = data.rows.split()
    for row in range(len(training_rows.lengths)):
        ids, _ = training_rows.read(row)
        np.add.at(counts, (ids[:-1], ids[1:]), 1)
    nats = -np.log(counts / counts.sum(axis=1, keepdims=True))
    total = labels = 0
    for batch in data.validation.evaluation(config.eval_batches, 0, 1):
        kept = batch["labels"] != common.IGNORED
        total += nats[batch["input_ids"][kept].numpy(), batch["labels"][kept].numpy()].sum()
        labels += kept.sum().item()
    read = data.validation.evaluation_rows(config.eval_batches)
    bits = total / labels / np.log(2) * validation_rows.labels_per_byte(read)
    print(f"byte-bigram model: validation loss {total / labels:.4f}, {bits:.4f} bits per byte")


if __name__ == "__main__":
    main()
