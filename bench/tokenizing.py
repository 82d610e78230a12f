"""Measure how fast text becomes tokens on disk, beside what people use instead, in CPU seconds.

    python bench/tokenizing.py [ROUNDS]

Tokenizes the embedded corpus, four times over, from an Arrow file into the cache, index included:

- bpe: a byte-level BPE of 16,384 tokens that is trained on the corpus, with the pattern of Llama 3,
  beside `datasets.map`, batched, with the tokenizer of transformers, as TRL and run_clm do
- gpt2: beside the preparation of nanoGPT, tiktoken's encode_ordinary into a flat file of uint16
  (needs the files of tiktoken's gpt2 in TIKTOKEN_CACHE_DIR, or a network)
- bytes: beside `datasets.map` with the same tokenizer in the form of transformers

They take turns on one core (Linux only). Speeds are those of the best of ROUNDS rounds (5 by
default), ratios of the best and of the median.
"""

import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import _tools  # noqa: F401
import datasets
import numpy as np
import shared
import tiktoken
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

import common
from run import Flags

END = "<|endoftext|>"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train(texts: list[str], directory: Path) -> None:
    """Save a byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    trainer = trainers.BpeTrainer(
        vocab_size=16384,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[END],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    common.save_tokenizer(common.Tokenizer(tokenizer_object=tokenizer, eos_token=END), directory)


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its ended children, which `map` may start."""
    return sum(os.times()[:4])


def ours(name: str, turn: int) -> int:
    common.sources_of = lambda _: [name, turn]  # nothing is in the cache
    config = Flags(tokenizer=name)
    tokenizer = common.load_tokenizer(name)
    documents = common.load_documents(config, ["text"], common.tokenize_text, tokenizer)
    return int(np.sum(documents.data["lengths"]))


def mapped(corpus: datasets.Dataset, tokenizer, name: str, turn: int) -> int:
    """As TRL and run_clm do; the end-of-text token is appended, too."""

    def encode(batch: dict) -> dict:
        encoded = tokenizer(batch["text"])["input_ids"]
        return {"input_ids": [[*ids, tokenizer.eos_token_id] for ids in encoded]}

    tokens = corpus.map(
        encode, batched=True, remove_columns="text", new_fingerprint=f"{name}{turn}"
    )
    return len(tokens.data["input_ids"].combine_chunks().flatten()) - len(tokens)


def flat_file(corpus: datasets.Dataset, path: Path) -> int:
    """As nanoGPT's prepare.py."""
    encoding = tiktoken.get_encoding("gpt2")

    def encode(row: dict) -> dict:
        ids = encoding.encode_ordinary(row["text"])
        ids.append(encoding.eot_token)
        return {"ids": ids, "len": len(ids)}

    tokens = corpus.map(encode, remove_columns="text", load_from_cache_file=False)
    total = sum(tokens["len"])
    file = np.memmap(path, np.uint16, "w+", shape=(total,))
    start = 0
    for shard in range(16):
        part = tokens.shard(16, shard, contiguous=True).with_format("numpy")
        ids = np.concatenate(part["ids"][:])
        file[start : start + len(ids)] = ids
        start += len(ids)
    file.flush()
    return total - len(tokens)


def main() -> None:
    [rounds] = shared.read(__doc__, rounds=5)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one process
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as folder:
        datasets.config.HF_DATASETS_CACHE = folder
        corpus = datasets.concatenate_datasets(
            [common.open_dataset(Flags(), ["text"], common.CORPORA)] * 4
        )
        common.open_dataset = lambda *_: corpus
        bpe, of_bytes = f"{folder}/bpe", f"{folder}/bytes"
        train(corpus["text"][:], Path(bpe))
        common.save_tokenizer(common.load_tokenizer("bytes"), Path(of_bytes))
        plain = {path: AutoTokenizer.from_pretrained(path) for path in (bpe, of_bytes)}
        pairs: dict[str, dict[str, Callable]] = {
            "byte-level BPE, 16,384 tokens": {
                "ours": lambda turn: ours(bpe, turn),
                "datasets.map": lambda turn: mapped(corpus, plain[bpe], "bpe", turn),
            },
            "gpt2": {
                "ours": lambda turn: ours("gpt2", turn),
                "nanoGPT": lambda turn: flat_file(corpus, Path(folder, "flat")),
            },
            "bytes": {
                "ours": lambda turn: ours("bytes", turn),
                "datasets.map": lambda turn: mapped(corpus, plain[of_bytes], "bytes", turn),
            },
        }
        print("| tokenizer | against | ours, M tokens per CPU s | theirs | ratio, best, median |")
        print("| --- | --- | --- | --- | --- |")
        for tokenizer, ways in pairs.items():
            seconds: dict[str, list[float]] = {name: [] for name in ways}
            counts = set()
            for turn in range(rounds):
                for name, work in ways.items():
                    started = cpu_seconds()
                    counts.add(work(turn))
                    seconds[name].append(cpu_seconds() - started)
            [count] = counts  # all made the same number of tokens
            [mine, theirs] = seconds.values()
            best = min(theirs) / min(mine)
            median = statistics.median(theirs) / statistics.median(mine)
            print(
                f"| {tokenizer} | {[*ways][1]} | {count / min(mine) / 1e6:.1f} "
                f"| {count / min(theirs) / 1e6:.1f} | {best:.1f}, {median:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
