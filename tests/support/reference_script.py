"""Train a script of ours on a reference run: the script that the environment variable COPIED names.

For launching.launch. REFERENCE names the folder. The script's `main` runs as it is, but the data is
that of batches.json, in its order. `flags` of record_reference.py are what the script needs for it.
"""

import json
import os
from pathlib import Path

import copied  # first, because it decides which shared files the next imports find
import datasets
import tiktoken

import common
import conversations


class WholeSequences(common.Sequences):
    """The sequences of a reference run. Targets are those of the file, and nothing is split."""

    def split(self, max_length: int) -> common.Sequences:
        assert self.lengths.max() <= max_length
        return self


def load_tokenizer(_) -> common.Tokenizer:
    """Return a tokenizer with 96 ids."""
    ranks = {bytes([value]): value for value in range(95)}
    special = {"<|endoftext|>": 95}
    return common.from_tiktoken(
        tiktoken.Encoding(
            "reference", pat_str=r"[\s\S]", mergeable_ranks=ranks, special_tokens=special
        )
    )


def load_documents(*_, **__) -> datasets.Dataset:
    """Return the sequences of all steps, as `common.load_documents` returns documents."""
    data = json.loads((Path(os.environ["REFERENCE"]) / "batches.json").read_text())
    rows = [
        {
            "tokens": sequence["tokens"],
            "in_loss": [target == 1 for target in sequence["targets"]],
            "lengths": len(sequence["tokens"]) - 1,
            "num_targets": sum(sequence["targets"]),
            "num_bytes": 0,
            "group": micro_batch,
        }
        for micro_batch, sequences in enumerate(sum(data["steps"], []))
        for sequence in sequences
    ]
    return datasets.Dataset.from_list(rows)


def train_validation_split(documents: datasets.Dataset, _) -> tuple:
    """Return all sequences in order for training, and those of the first step for validation."""
    table = documents.data.select(["lengths", "num_targets", "group"]).to_pandas()
    table = table.assign(start=0).reset_index(names="document").astype("int32")
    parts = []
    for chosen in (table, table[table.group < 4]):
        columns = chosen[["document", "start", "lengths", "num_targets"]]
        part = WholeSequences(documents, columns.to_records(index=False))
        part.plan = [rows.index.to_numpy() for _, rows in chosen.groupby("group")]
        parts.append(part)
    return tuple(parts)


def main() -> None:
    common.load_tokenizer = load_tokenizer
    common.load_documents = load_documents
    common.train_validation_split = train_validation_split
    common.Batches.plan = lambda self, epoch: self.sequences.plan
    # Of fine-tuning. The model has all tokens, and the sequences their targets.
    conversations.chat_tokenizer = lambda *_: (load_tokenizer(_), None, 96)
    conversations.truncate = lambda documents, _: documents
    copied.main()
