"""Measure what a rank keeps in memory of a large corpus, and how long it takes to resume.

    python bench/index.py [DOCUMENTS]

DOCUMENTS (10,000,000 by default) of lognormal length are written in Arrow form, as `load_documents`
leaves them on disk. Then, as every script does, they are split into training and validation.
Memory is what Linux calls anonymous: files that are mapped into memory do not count.
"""

import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import _tools  # noqa: F401
import datasets
import numpy as np
import pyarrow
import shared

import common
from run import Flags

BATCH = 1000  # documents of a record batch, as `datasets` writes them


def write(path: Path, documents: int) -> datasets.Dataset:
    """Write a cache of so many documents, rounded up to full record batches, of one token each."""
    rng = np.random.default_rng(0)
    writer = None
    for _ in range(-(-documents // BATCH)):
        lengths = np.minimum(rng.lognormal(5.5, 1, BATCH).astype(np.int64) + 1, 2048)
        columns = {"tokens": [[1]] * BATCH, "in_loss": [[True]] * BATCH, "lengths": lengths}
        columns |= {"num_targets": lengths, "num_bytes": lengths}
        table = pyarrow.table(columns | {"group": rng.integers(0, 2**28, BATCH)})
        writer = writer or pyarrow.ipc.new_stream(path, table.schema)
        writer.write_table(table)
    writer.close()
    return datasets.Dataset.from_file(str(path))


def anonymous() -> int:
    """Return this process's anonymous memory in bytes."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * int(text.split("Anonymous:")[1].split()[0])


def measure(work: Callable) -> tuple[Any, int]:
    """Return what a function returns, and by how many bytes the memory grew at its peak."""
    pyarrow.default_memory_pool().release_unused()
    seen, ended = [anonymous()], threading.Event()

    def watch() -> None:
        while not ended.wait(0.005):
            seen.append(anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    found = work()
    ended.set()
    watcher.join()
    return found, max(seen) - seen[0]


def main() -> None:
    [documents] = shared.read(__doc__, documents=10**7)
    with tempfile.TemporaryDirectory() as folder:
        corpus = write(Path(folder, "corpus.arrow"), documents)
        (training, validation), peak = measure(lambda: common.train_validation_split(corpus, 10**6))
        kept = training.index.nbytes / len(training.lengths)
        print(f"index: {kept:.0f} bytes a document, {peak / len(corpus):.0f} while it is made")
        config = Flags(micro_batch_tokens=8192)
        targets = int(training.num_targets.sum())
        for epoch in (0, 20.5):
            batches = common.Batches(training, config, 0)
            batches.global_batch = lambda *_: SimpleNamespace()
            started = time.process_time()
            next(batches.stream(int(epoch * targets), 8, 0, 1))
            print(f"start in epoch {epoch}: {time.process_time() - started:.1f} CPU s")


if __name__ == "__main__":
    main()
