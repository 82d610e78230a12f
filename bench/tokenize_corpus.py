"""Tokens per second of the whole way from a .jsonl file to the cache, against tiktoken alone.

    python bench/tokenize_corpus.py [MEGABYTES]

The encoding is gpt2 (downloaded, or found in TIKTOKEN_CACHE_DIR). Both use all cores: the pipeline
as many processes, tiktoken as many threads, on texts that are in memory and thrown away after.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import arguments

sys.path.insert(0, str(Path(__file__).parents[1]))
import common  # noqa: E402
import ddp_pretrain  # noqa: E402

ROUNDS = 3


def main() -> None:
    [megabytes] = arguments.read(__doc__, megabytes=200)
    rows = [*common.standard_library_documents(common.standard_library_files(), "")]
    texts = [row["text"] for row in rows]
    texts *= 1 + megabytes * 10**6 // sum(map(len, texts))
    encoding = common.load_tokenizer("gpt2").encoding
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        import datasets

        datasets.config.HF_DATASETS_CACHE = Path(folder)
        for number in range(ROUNDS):
            path = Path(folder) / f"{number}.jsonl"
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
            started = time.perf_counter()
            ids = encoding.encode_ordinary_batch(texts, num_threads=os.cpu_count())
            alone = sum(map(len, ids)) / (time.perf_counter() - started)
            del ids
            started = time.perf_counter()
            files = common.tokenize_corpus(ddp_pretrain.Config(dataset=str(path), tokenizer="gpt2"))
            seconds = time.perf_counter() - started
            whole = int(common.Documents(files).lengths.sum()) / seconds
            ratios.append(whole / alone)
            print(f"tiktoken {alone:,.0f}, pipeline {whole:,.0f} tokens/s: {ratios[-1]:.2f}")
            texts.append(f"round {number}")  # another text, so that nothing is cached
    print(f"median {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
