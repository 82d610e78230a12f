"""How fast data reaches the model, beside Hugging Face's data loader, in CPU time of one process.

    python bench/feeding.py [ROUNDS]

Collates the embedded corpus with the bytes tokenizer (pieces of at most 1,024 tokens, micro-batches
of 16,384 positions): bucketed and packed, and with a Dataset, torch's DataLoader and transformers'
DataCollatorForLanguageModeling, 32 pieces at a time. They take turns; a row has the best and the
median of ROUNDS rounds (5 by default). Then the time to read one piece, for documents of several
lengths and corpora of several numbers of record batches.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import _tools  # noqa: F401
import datasets
import numpy as np
import shared
import torch
from datasets.arrow_writer import ArrowWriter
from transformers import DataCollatorForLanguageModeling

import common
import fsdp2_pretrain

LONGEST, BUDGET = 1024, 16384
SHAPES = [  # tokens of a document, documents of a record batch, record batches
    (500, 1000, 1),
    (50_000, 10, 1),
    (2_000_000, 1, 1),
    (500, 1, 1000),
    (500, 1, 20_000),
]


def cpu_seconds(work: Callable[[], int]) -> float:
    """Return the CPU seconds of work for each token, or whatever it counts."""
    started = time.process_time()
    count = work()
    return (time.process_time() - started) / count


def training(batching: str) -> common.Batches:
    """Return the micro-batches of the embedded corpus."""
    flags = {"max_length": LONGEST, "micro_batch_tokens": BUDGET, "batching": batching}
    config = fsdp2_pretrain.Config(**flags, global_batch_tokens=BUDGET)
    return shared.load_data(fsdp2_pretrain, config).training


def ours(batches: common.Batches) -> int:
    """Collate an epoch, and count target tokens."""
    labels = (batches.collate(indices)["labels"] for indices in batches.plan(0))
    return sum(int((of_batch != common.IGNORED).sum()) for of_batch in labels)


def hugging_face(pieces: common.Sequences) -> torch.utils.data.DataLoader:
    """Return Hugging Face's loader of the same pieces."""
    rows = [pieces.read(i)[0] for i in range(len(pieces.lengths))]
    tokenizer = common.load_tokenizer("bytes")
    tokenizer.pad_token = tokenizer.eos_token
    return torch.utils.data.DataLoader(
        datasets.Dataset.from_dict({"input_ids": rows}),
        batch_size=32,
        shuffle=True,
        collate_fn=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )


def stored(folder: str, length: int, documents: int, batches: int) -> common.Sequences:
    """Write a corpus in Arrow form, and return pieces of it."""
    path = str(Path(folder, f"{length}_{batches}.arrow"))
    row = {"tokens": np.zeros(length, np.uint32), "in_loss": np.ones(length, bool)}
    with ArrowWriter(path=path, writer_batch_size=documents) as writer:
        for _ in range(documents * batches):
            writer.write(row)
        writer.finalize()
    count = documents * batches
    lengths = np.full(count, length - 1)
    columns = [np.arange(count), np.zeros(count, int), lengths, lengths]
    index = np.rec.fromarrays(columns, names="document,start,lengths,num_targets")
    return common.Sequences(datasets.Dataset.from_file(path), index).split(499)


def main() -> None:
    [rounds] = shared.read(__doc__, rounds=5)
    torch.set_num_threads(1)
    batches = {name: training(name) for name in ("bucketed", "packed")}
    loader = hugging_face(batches["packed"].sequences)
    ways = {name: partial(ours, batches[name]) for name in batches}
    ways["Hugging Face"] = lambda: sum(int(batch["attention_mask"].sum()) for batch in loader)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, work in ways.items():
            seconds[name].append(cpu_seconds(work))
    reference = seconds["Hugging Face"]
    print("| million tokens per CPU second | best | median | median to Hugging Face |")
    print("| --- | --- | --- | --- |")
    for name, of_way in seconds.items():
        best, median = 1e-6 / min(of_way), 1e-6 / statistics.median(of_way)
        ratio = statistics.median(reference) / statistics.median(of_way)
        print(f"| {name} | {best:.2f} | {median:.2f} | {ratio:.1f} |")

    print("\n| tokens of a document | record batches | µs to read a piece, best | median |")
    print("| --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        corpora = {shape: stored(folder, *shape) for shape in SHAPES}
        times: dict[tuple, list[float]] = {shape: [] for shape in SHAPES}
        for _ in range(rounds):
            for shape, pieces in corpora.items():
                chosen = np.random.default_rng(0).integers(0, len(pieces.lengths), 2000).tolist()
                times[shape].append(
                    cpu_seconds(lambda p=pieces, c=chosen: sum(1 for i in c if p.read(i)))
                )
        for (length, _, batches), of_shape in times.items():
            best, median = 1e6 * min(of_shape), 1e6 * statistics.median(of_shape)
            print(f"| {length:,} | {batches:,} | {best:.0f} | {median:.0f} |")


if __name__ == "__main__":
    main()
