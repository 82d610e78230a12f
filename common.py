"""Data and checkpoint helpers. This file imports no other file of the collection: copy it whole.

Data flows one way, and the sections below follow it:

    corpus -> tokens of whole documents (cached on disk) -> sequences -> batch plan (a pure function
    of lengths, seed and epoch) -> micro-batch

`dp_rank` and `dp_size`: a rank gets the micro-batches dp_rank, dp_rank + dp_size, ... of each
global batch. `config`: any object with the flags that a function reads, named as in run.py.

    python common.py export CHECKPOINT OUT [bfloat16]    write its weights in Hugging Face form

NOTE: the `.metadata` file of a checkpoint is a pickle, so loading a checkpoint can run any code.
Load only checkpoints that you trust, and share the Hugging Face form (safetensors) instead.
"""

import ast
import bisect
import errno
import functools
import glob
import inspect
import itertools
import json
import math
import os
import re
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import datasets
import fastokens
import filelock
import huggingface_hub
import numpy as np
import pyarrow
import tiktoken
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import tqdm
import transformers
import xxhash
from pyarrow import parquet
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.tokenization_auto import get_tokenizer_config

IGNORED = -100  # label of a position that is not in the loss, as in torch's cross entropy


# --- Errors that a user causes --------------------------------------------------------------------


class Refusal(Exception):
    """What a user has to change, in one line. `run.launch` prints it without a traceback."""


class LeftOut(Exception):
    """Why a row of the data is not trained on. A run counts the reasons: "12 documents ..."."""


def refuse(message: str) -> NoReturn:
    """End with the line `error: message`."""
    raise Refusal(" ".join(message.split()))


@contextmanager
def refusing(
    what: str,
    kinds: tuple = (Exception, dcp.CheckpointException),  # DCP's is not an Exception
) -> Iterator[None]:
    """End with one line, as `refuse`, if a library call in here fails, quoting its reason.

    Leave code out of it that somebody may edit, because bugs need their traceback. Or name the
    `kinds` of errors that do not come from bugs.
    """
    try:
        yield
    except Refusal:
        raise
    except kinds as error:
        if lost_connection(error) and dist.is_initialized():
            raise
        for failure, _ in getattr(error, "failures", {}).values():  # DCP's, of each rank
            error = failure
        while error.__cause__ and not isinstance(error, OSError | UnicodeError):
            error = error.__cause__
        refuse(f"{what}: {str(error)[:400] or 'nothing is there'}")


def lost_connection(error: BaseException) -> bool:
    """Return whether a collective failed because of another rank: it exited, or it is too slow."""
    # A web request of wandb or of a reward can time out too, with errors of other types.
    from_torch = isinstance(error, RuntimeError | dcp.CheckpointException)
    text = f"{error} {error.__cause__}".lower()  # pipelines wrap the error
    return from_torch and ("connection" in text or "timed out" in text)


# --- Small helpers --------------------------------------------------------------------------------


def say(text: str) -> None:
    """Print on rank 0. A closed pipe (`| head -1`) or a full disk does not end the run."""
    if os.environ.get("RANK", "0") != "0":
        return
    try:
        print(text, flush=True)
    except OSError:
        sys.stdout = open(os.devnull, "w")


def counted(number: int, noun: str, ending: str = "s") -> str:
    """Return a number with its noun: "1 rank", "2,000 ranks"."""
    return f"{number:,} {noun}{ending if number != 1 else ''}"


def gather(value: Any) -> list:
    """Return the values of all ranks. A collective."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def differences(before: dict, now: dict, names: list) -> list:
    """Return in which of these names two descriptions of a run differ, and how.

    A name that `before` lacks is not compared: an older version did not record it.
    """
    return [
        f"{name} {before[name]} (now {now.get(name)})"
        for name in names
        if name in before and before[name] != now.get(name)
    ]


def fingerprint(*values: Any) -> str:
    """Return a 128-bit hash of the values' JSON: a cache key, or a check for changes."""
    return xxhash.xxh3_128_hexdigest(json.dumps(values, sort_keys=True, default=str).encode())


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


# --- Tokenizers -----------------------------------------------------------------------------------


class PreTrainedTokenizerFast(transformers.PreTrainedTokenizerFast):
    """A tokenizer that AutoTokenizer returns unchanged, once it is saved.

    transformers saves this class name, which version 4 has, too. For some model types (qwen2)
    AutoTokenizer would load the type's class, with its own pre-tokenizer and normalizer, unless
    `auto_map` names code. That code runs only with `trust_remote_code`.
    """

    _auto_map = {"AutoTokenizer": [None, "tokenization.Tokenizer"]}


Tokenizer = PreTrainedTokenizerFast
TOKENIZER_CODE = """\
from transformers import PreTrainedTokenizerFast


class Tokenizer(PreTrainedTokenizerFast):
    pass
"""  # of the file tokenization.py


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer of --tokenizer: bytes, a tiktoken encoding, or a directory or hub id."""
    if name == "bytes":
        return from_tiktoken(
            tiktoken.Encoding(
                name,
                pat_str=r"[\s\S]",
                mergeable_ranks={bytes([value]): value for value in range(256)},
                special_tokens={"<|endoftext|>": 256},
            )
        )
    if name in tiktoken.list_encoding_names():
        with refusing(f"--tokenizer {name} (if offline, TIKTOKEN_CACHE_DIR must hold its files)"):
            return from_tiktoken(tiktoken.get_encoding(name))
    with refusing(f"tokenizer {name} is not bytes, a tiktoken encoding or a Hugging Face one"):
        by_class = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        # Many classes replace the pre-tokenizer of the file by their own, so that the ids differ.
        # But where the files name no eos token (gpt2), the class knows it.
        tokenizer = Tokenizer.from_pretrained(name, eos_token=by_class.eos_token)
    # transformers 5 ignores this setting beside a tokenizer.json.
    asked = get_tokenizer_config(name).get("add_bos_token")
    begins = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    if tokenizer.bos_token and asked not in (None, begins):
        tokenizer.add_bos_token = asked
    if tokenizer.eos_token_id is None:
        refuse(f"--tokenizer {name} lacks an end-of-text (eos) token")
    tokenizer.backend_tokenizer.no_truncation()  # a trainer may have left them on
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def from_tiktoken(encoding: tiktoken.Encoding) -> Tokenizer:
    """Return the transformers tokenizer that gives the same ids as a tiktoken encoding."""
    # NOTE: in tiktoken, {1,3}+ is one to three digits, possessive. In `tokenizers` it is any
    # number.
    pattern = encoding._pat_str.replace("{1,3}+", "{1,3}")
    special = {i: token for token, i in encoding._special_tokens.items()}
    converter = TikTokenConverter(pattern=pattern, extra_special_tokens=[*special.values()])
    converter.load_tiktoken_bpe = lambda _: encoding._mergeable_ranks  # there is no file to read
    vocabulary, merges = converter.extract_vocab_merges_from_model("")
    # Special tokens keep their ids, which may be anywhere. Ids without a token become unused ones.
    for i in set(range(encoding.n_vocab)) - set(vocabulary.values()):
        vocabulary[special.get(i, f"<|unused_{i}|>")] = i
    converter.extract_vocab_merges_from_model = lambda _: (vocabulary, merges)
    return Tokenizer(
        tokenizer_object=converter.converted(),
        eos_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,  # as in training: spelled-out special tokens are text
        name_or_path=encoding.name,
    )


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Return the largest id + 1. Some tokenizers skip ids, so it is not the number of tokens."""
    return 1 + max(tokenizer.get_vocab().values())


@functools.cache
def fast_tokenizer(tokenizer: Tokenizer) -> fastokens.Tokenizer | None:
    """Return the tokenizer in fastokens, or None where its ids could differ.

    fastokens encodes byte-level BPE (GPT-2, Llama 3, Qwen, ...) 20 to 60 times as fast as
    `tokenizers`. Call this once all tokens are added.
    """
    text = tokenizer.backend_tokenizer.to_str()
    model = json.loads(text)["model"]
    # Without these, BPE has no token for some characters, and the libraries skip them differently.
    complete = model.get("unk_token") or model.get("byte_fallback") or "ByteLevel" in text
    if model.get("dropout") or not complete:
        return None
    with suppress(ValueError):  # what fastokens does not support
        return fastokens.Tokenizer.from_json_str(text)


def encode_text(text: str, tokenizer: Tokenizer) -> np.ndarray:
    """Return the ids of a text (uint8 or uint32), with those that the tokenizer adds (bos).

    Special tokens that the text spells out stay plain text.
    """
    if tokenizer.name_or_path == "bytes":  # only `load_tokenizer` gives this name
        return np.frombuffer(text.encode(), np.uint8)
    fast = fast_tokenizer(tokenizer)
    # NOTE: fastokens 0.3.5 splits texts with these two characters differently than `tokenizers` (no
    # others, see tests/data/test_tokenizers.py). It splits texts of 64 KiB and more in threads, and
    # a fork of this process would wait for these forever.
    if fast and len(text.encode()) < 65_536 and not re.search("[\u017f\u180e]", text):
        ids = fast.encode(text, add_special_tokens=True, split_special_tokens=True).ids
    else:
        ids = tokenizer(text, split_special_tokens=True, verbose=False)["input_ids"]
    return np.array(ids, np.uint32)


# --- Corpus: anything that `datasets` reads -------------------------------------------------------

# Suffix -> reader of `datasets`, and its settings.
READERS = {
    ".parquet": ("parquet", {"batch_size": 1000}),  # or a file without rows fails
    ".jsonl": ("text", {}),
    # Or texts would be written as JSON where a column has values of other types.
    ".json": ("json", {"on_mixed_types": None}),
    ".txt": ("text", {}),
}
JSON = "a line of JSON"  # column of .jsonl files; `tokenize` parses it
# The first progress bar, even a disabled one, creates a lock, by default with a named semaphore. If
# the process then ends by `os._exit`, as after an error, Python 3.14 prints two lines about it.
tqdm.tqdm.set_lock(threading.RLock())


def standard_library_files() -> list:
    """Return the source files of Python's standard library, without tests and tables."""
    skipped = "site-packages test tests idlelib lib2to3 encodings ensurepip".split()
    files = []
    for folder, subfolders, _ in os.walk(Path(ast.__file__).parent):
        subfolders[:] = set(subfolders).difference(skipped)  # `walk` does not enter the others
        files += glob.glob(f"{folder}/*.py")
    return sorted(files)


def standard_library_documents(files: list) -> Iterator:
    """Yield each top-level function or class as a document."""
    for file in files:
        source = Path(file).read_text(encoding="utf-8", errors="replace")
        lines = source.splitlines(keepends=True)
        for node in ast.parse(source).body:
            if hasattr(node, "decorator_list"):  # functions and classes
                first = (node.decorator_list or [node])[0].lineno
                yield {"text": "".join(lines[first - 1 : node.end_lineno])}


CORPORA = {"stdlib": standard_library_documents}  # those that need no file


def suffix_of(name: str) -> str:
    """Return by which suffix a file is read, without the query of a URL; "" for others."""
    # The last one counts: a.txt.jsonl.gz is JSON.
    return ["", *filter(READERS.get, Path(name.split("?")[0]).suffixes)][-1]


def find_files(name: str) -> list:
    """Return the files that a file, glob or folder stands for. Other names stay as they are."""
    pattern = glob.escape(name) if os.path.exists(name) else name  # a file may have brackets
    pattern += "/*" * os.path.isdir(name)
    files = sorted(glob.glob(pattern, recursive=True))
    return [file for file in files if suffix_of(file)] or [name]


def sources_of(function: Callable) -> list:
    """Return hashes of this file, of a function's file and of the modules that it imports.

    As a part of cache keys, they make an edit read the data again.
    """
    modules = filter(inspect.ismodule, function.__globals__.values())
    files = {getattr(module, "__file__", None) or __file__ for module in modules}
    files |= {__file__, inspect.getfile(function)}
    return sorted(xxhash.xxh3_64_hexdigest(Path(file).read_bytes()) for file in files)


def open_dataset(config: Any, columns: list, corpora: dict) -> datasets.Dataset:
    """Open --dataset: one of `corpora`, files (also globs, folders and URLs), or a hub id."""
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # our error line says what matters
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    names, split = config.dataset, config.dataset_split
    names = [names] if isinstance(names, str) else names
    name = " ".join(names)
    if name in corpora:
        arguments = {"files": standard_library_files()}
        key = fingerprint(sources_of(corpora[name]), arguments)
        return datasets.Dataset.from_generator(corpora[name], gen_kwargs=arguments, fingerprint=key)
    with refusing(
        f"--dataset (hub id, .parquet, .jsonl, .json, .txt or FOLDER/*.txt) {name} cannot be read"
    ):
        files = [file for pattern in names for file in find_files(pattern)]
        suffix, *others = {*map(suffix_of, files)}
        if others:
            raise ValueError("files of one kind can be read together")
        if not suffix:
            return datasets.load_dataset(
                name, config.dataset_config, split=split, revision=config.dataset_revision
            )
        reader, settings = READERS[suffix]
        local = [file for file in files if os.path.exists(file)]
        groups = [files]
        # datasets would cast values to the types of the first file (007 would be 7). So if columns
        # differ, read each file alone, and those without rows not at all.
        if suffix == ".parquet" and len({*map(parquet.read_schema, local)}) > 1:
            groups = [[file] for file in files if parquet.read_metadata(file).num_rows]
        parts = []
        for files in groups:
            part = datasets.load_dataset(
                reader,
                # Part of the cache key, which has names and times of files.
                fingerprint(*map(os.path.getsize, local)),
                data_files=[glob.escape(file) if file in local else file for file in files],
                split=split,
                download_config=datasets.DownloadConfig(),  # downloads a changed file again
                **settings,
            )
            read = [name for name in columns if name in part.column_names]
            parts.append(part.select_columns(read) if len(groups) > 1 else part)
        corpus = datasets.concatenate_datasets(parts)  # it refuses columns of several types
        return corpus.rename_column("text", JSON) if suffix == ".jsonl" else corpus


# --- Documents: tokens on disk --------------------------------------------------------------------


def tokenize_text(row: dict, tokenizer: Tokenizer) -> tuple:
    """Tokenize a text and its end-of-text token. Every prediction is in the loss.

    Returns:
        tokens: ids, of any integer type, [length + 1].
        in_loss: bool [length + 1], which tokens are targets (the first one never is).
        group: documents with equal groups go to the same side of the split. Here those are equal
            texts; in fine-tuning, all answers to one prompt.
        num_bytes: of the text, for bits per byte; 0 for conversations.
        note (not here): that only a part of a document is trained on, and why, or "".

    Raises:
        LeftOut: why the document is left out.
    """
    [text] = row.values() or [None]
    if not isinstance(text, str) or not text:
        raise LeftOut("hold no text")
    tokens = encode_text(text, tokenizer)
    if tokenizer.eos_token_id not in tokens[-1:]:  # some tokenizers write it
        tokens = np.append(tokens, np.uint32(tokenizer.eos_token_id))
    return tokens, np.ones(len(tokens), bool), text, len(text.encode())


def tokenize(
    batch: dict,
    columns: list,
    function: Callable,
    tokenizer: Tokenizer,
    dtype: np.dtype,
) -> pyarrow.Table:
    """Return what the cache holds of a batch of rows, as a table, with token ids of this type.

    Args:
        batch: the rows as columns, name -> list of values.
    """
    documents = []
    for values in zip(*batch.values()):  # fails for text that is not UTF-8
        tokens = in_loss = []
        group = note = ""
        num_bytes = 0
        try:
            row = parse_row(dict(zip(batch, values)))
            row = {name: row[name] for name in columns if name in row}
            tokens, in_loss, group, num_bytes, *notes = function(row, tokenizer)
            note = "".join(notes)
        except LeftOut as reason:
            note = f"left out, because they {reason}"
        except UnicodeEncodeError:
            note = "left out, because they hold half a surrogate pair, which is no character"
        documents.append(
            {
                "tokens": np.asarray(tokens, dtype),
                "in_loss": np.asarray(in_loss, bool),
                "lengths": len(tokens[1:]),  # predictions
                "num_targets": np.count_nonzero(in_loss[1:]),
                "num_bytes": num_bytes,
                "group": int(fingerprint(group)[:7], 16),  # 28 bits
                "note": note,
            }
        )
    return pyarrow.Table.from_pylist(documents)


def parse_row(row: dict) -> dict:
    """Return a row. A line of JSON has its own types."""
    # A reader that parses full columns would guess one type for all rows.
    if JSON not in row:
        return drop_nulls(row)
    row = parse_json(row[JSON].removeprefix("\ufeff"))  # a byte order mark
    return row if isinstance(row, dict) else {}


def drop_nulls(value: Any) -> Any:
    """Return a value without nulls: Parquet gives each object the keys of all others."""
    if isinstance(value, dict):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None}
    return list(map(drop_nulls, value)) if isinstance(value, list) else value


def parse_json(text: str) -> Any:
    """Parse JSON of the data, or raise LeftOut."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise LeftOut("are broken JSON") from None


def load_documents(
    config: Any,
    columns: list,
    function: Callable,
    tokenizer: Tokenizer,
    corpora: dict = CORPORA,
) -> datasets.Dataset:
    """Tokenize --dataset with several processes, once for all runs and all --max_length.

    Returns a dataset, memory-mapped from disk, with the columns that `tokenize` writes. Documents
    that are left out have no target tokens.

    Args:
        columns: those to read if they are there.
        function: a module-level function as `tokenize_text`.
        corpora: name -> generator of documents, for names of --dataset that are no files.
    """
    corpus = open_dataset(config, columns, corpora)
    present = [column for column in [JSON, *columns] if column in corpus.column_names]
    if not present:
        wanted = " or ".join(columns[:4])
        refuse(f"--dataset {config.dataset} has no column {wanted}: {corpus.column_names}")
    # NOTE: without a key of our own, datasets would hash the function. One that it cannot hash gets
    # a new key each time, so every rank and every run would tokenize again.
    key = fingerprint(
        corpus._fingerprint,
        columns,
        sources_of(function),
        tokenizer.special_tokens_map,
        tokenizer.chat_template,
        tokenizer.backend_tokenizer.to_str(),
    )
    # macOS cannot tell which CPUs a process may use.
    num_cpus = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    # The first rank of a node tokenizes, and the others wait and read the cache. This happens
    # before `init_process_group`, because collectives have a timeout.
    lock = filelock.FileLock(f"{datasets.config.HF_DATASETS_CACHE}/{key}.lock")
    with (
        lock,
        refusing(
            f"--dataset {config.dataset} cannot be tokenized",
            # A full disk, or text that is not UTF-8. A bug in `function` shows its traceback.
            (OSError, UnicodeError, pyarrow.ArrowException),
        ),
    ):
        documents = corpus.select_columns(present).map(
            tokenize,
            # The table that a call returns replaces the columns of the batch.
            batched=True,
            fn_kwargs={
                "columns": columns,
                "function": function,
                "tokenizer": tokenizer,
                "dtype": np.min_scalar_type(vocabulary_size(tokenizer) - 1),  # holds all ids
            },
            new_fingerprint=key,
            num_proc=min(num_cpus, len(corpus) // 1000),
        )
    count_left_out(config, documents, corpus)
    return documents


def count_left_out(config: Any, documents: datasets.Dataset, corpus: datasets.Dataset) -> None:
    """Print how many documents are left out, and why; refuse a dataset of which none is left."""
    counts = documents.data["note"].value_counts().to_pylist()
    notes = {each["values"]: each["counts"] for each in counts}
    for note, count in notes.items():
        if note:
            say(f"{counted(count, 'document')} {'is' if count == 1 else 'are'} {note}")
    if notes and not np.any(documents.data["num_targets"]):
        names = corpus.column_names
        if JSON in names:
            with suppress(LeftOut):
                names = parse_row(corpus[0])
        refuse(
            f"--dataset {config.dataset} has fewer than two different documents with target "
            f"tokens: most are {max(notes, key=notes.get)}. "
            f"Its columns are {', '.join(names)}; docs/data.md lists what is read"
        )


@dataclass
class Sequences:
    """Token sequences, each a whole document or a piece of one, memory-mapped from disk.

    Args:
        documents: of `load_documents`, with the tokens and loss masks of whole documents.
        index: a record array, int32, with one entry per sequence: document and start (where it
            begins), lengths (predictions, one fewer than tokens), num_targets (predictions in the
            loss).
    """

    documents: datasets.Dataset
    index: np.recarray

    def __post_init__(self):
        self.lengths = self.index.lengths
        self.num_targets = self.index.num_targets

    def read(self, i: int) -> tuple:
        """Return tokens (int64) and loss mask (bool) of sequence i, [length + 1]."""
        document, start, length, _ = self.index[i].tolist()
        part = slice(start, start + length + 1)
        # A view of this part alone. NOTE: `self.documents[...]` would copy the whole document, and
        # without the 1, or as `data["tokens"][...]`, the time would grow with the corpus.
        row = self.documents.data.fast_slice(document, 1)
        tokens = np.asarray(row["tokens"][0].values[part], np.int64)
        return tokens, np.asarray(row["in_loss"][0].values[part])

    def split(self, max_length: int) -> "Sequences":
        """Return all documents in pieces of at most `max_length`.

        Splitting loses no prediction: the last token of a piece is the first of the next one.
        """
        pieces = -(-self.lengths // max_length)  # rounded up
        index = np.repeat(self.index, pieces)
        before = np.repeat(np.cumsum(pieces) - pieces, pieces)  # pieces of earlier documents
        index.start = (np.arange(len(index)) - before) * max_length
        index.lengths = np.minimum(index.lengths - index.start, max_length)
        index.num_targets = index.lengths
        return Sequences(self.documents, index)


def train_validation_split(documents: datasets.Dataset, validation_tokens: float) -> tuple:
    """Return the documents for training and for validation, in the order of their hashes.

    The documents with the smallest hashes are held out: about 2 %, and at most about 5,000. A
    document is on the same side in every run and script, whatever rows are left out. (With fewer
    than about 50 groups, one is held out: the first that is not left out.) The validation set is
    the first of the held-out documents that have `validation_tokens`.
    """
    table = documents.data.select(["group", "lengths", "num_targets"]).to_pandas()
    table = table.query("num_targets > 0").sort_values("group", kind="stable")
    index = np.rec.fromarrays(
        [table.index, 0 * table.index, table.lengths, table.num_targets],
        formats="i4,i4,i4,i4",
        names="document,start,lengths,num_targets",
    )
    # At least one is held out.
    limit = max(2**28 * min(0.02, 5000 / len(documents)), table.group.min())
    number = table.group.searchsorted(limit, "right")
    training, held_out = index[number:], index[:number]
    if not len(training):
        refuse("--dataset has fewer than two different documents with target tokens (see above)")
    enough = 1 + np.searchsorted(held_out.lengths.cumsum(), validation_tokens)
    return Sequences(documents, training), Sequences(documents, held_out[:enough])


# --- Batch plan: which sequences form each micro-batch -------------------------------------------


def bucket(lengths: np.ndarray, budget: int) -> Iterator[slice]:
    """Split descending lengths into micro-batches with sequences x longest <= budget."""
    start = 0
    while start < len(lengths):
        stop = start + budget // lengths[start]
        yield slice(start, stop)
        start = stop


def pack(lengths: np.ndarray, budget: int) -> list:
    """Pack descending lengths into micro-batches by best-fit decreasing (arXiv 2404.10830).

    Each sequence, the longest first, goes into the fullest micro-batch that has room for it.
    """
    packed = []  # free positions and sequences of each micro-batch, sorted
    for sequence, length in enumerate(lengths.tolist()):
        fullest = bisect.bisect_left(packed, (length,))
        room, sequences = packed.pop(fullest) if fullest < len(packed) else (budget, [])
        sequences.append(sequence)
        bisect.insort(packed, (room - length, sequences))
    return [sequences for _, sequences in packed]


# --- Batches: plan -> tensors ---------------------------------------------------------------------


@dataclass
class GlobalBatch:
    """What one optimizer step trains on: this rank's micro-batches, and counts over all ranks.

    Args:
        micro_batches: arguments of the model, see `Batches.collate`.
        num_targets: target tokens, by which the summed loss is divided.
        num_tokens: tokens without padding.
        squared_lengths: sum of squared sequence lengths, for the FLOPs of attention.
        padding_fraction: padding, as a fraction of all positions.
    """

    micro_batches: list
    num_targets: int
    num_tokens: int
    squared_lengths: int
    padding_fraction: float


@dataclass
class Batches:
    """The endless stream of micro-batches: epoch after epoch, each with its own plan.

    With k = global / micro batch tokens, step s trains on micro-batches s * k to (s + 1) * k - 1.
    So what a step holds does not depend on the number of ranks.

    Args:
        sequences: `Sequences`, or an object with the same `lengths`, `num_targets` and `read`.
        padding_id: token id of padding. It has no label, and no token attends to it.
    """

    sequences: Any
    config: Any
    padding_id: int

    def plan(self, epoch: int) -> list:
        """Return the micro-batches of an epoch, each an array of indices into `sequences`, int64.

        A pure function of lengths, flags and epoch. Micro-batches of all lengths are shuffled
        together. One length after the other would be an accidental curriculum.
        """
        rng = np.random.default_rng([self.config.seed, epoch])
        lengths, budget = self.sequences.lengths, self.config.micro_batch_tokens
        fill = pack
        if self.config.batching == "bucketed":
            fill = bucket
            multiple = self.config.pad_to_multiple_of
            lengths = -(-lengths // multiple) * multiple  # rounded up
        assert lengths.max() <= budget, "a sequence exceeds a micro-batch"
        micro_batches = []
        # Sort within windows of about 256 micro-batches. Neighbors have similar lengths then, and
        # each epoch has other neighbors.
        order = rng.permutation(len(lengths))
        window_size = math.ceil(256 * budget / lengths.mean())
        for begin in range(0, len(order), window_size):
            window = order[begin : begin + window_size]
            window = window[np.argsort(-lengths[window], kind="stable")]
            micro_batches += [window[part] for part in fill(lengths[window], budget)]
        return [micro_batches[i] for i in rng.permutation(len(micro_batches))]

    def shape(self, indices: np.ndarray) -> tuple:
        """Return the number of sequences and the padded length of a micro-batch."""
        budget, multiple = self.config.micro_batch_tokens, self.config.pad_to_multiple_of
        if self.config.batching == "packed":
            return 1, budget
        length = math.ceil(self.sequences.lengths[indices].max() / multiple) * multiple
        # Compiled blocks need few shapes, so fill up with empty sequences: one shape per length.
        return len(indices) if multiple == 1 else budget // length, length

    def collate(self, indices: np.ndarray) -> dict:
        """Return the model's arguments for a micro-batch of these sequences.

        Right padding needs no attention mask, because no real token attends to what comes after it.

        Returns:
            input_ids: int64 [sequences, length].
            labels: int64 [sequences, length], shifted: labels[i, t] is the token after
                input_ids[i, t], or -100 if it is not in the loss.

            A packed micro-batch, [1, micro_batch_tokens], also has
            position_ids: int64 [1, length], from 0 in each document.
            cu_seq_lens_q: int32 [documents + 1], cumulative sequence lengths.
            max_length_q: int, the longest a document can be.
        """
        height, width = self.shape(indices)
        packed = self.config.batching == "packed"
        inputs = np.full(height * width, self.padding_id)
        labels = np.full(height * width, IGNORED)
        ends = [0]  # of the sequences
        for i, index in enumerate(indices.tolist()):
            tokens, in_loss = self.sequences.read(index)
            begin = ends[-1] if packed else i * width
            ends.append(begin + len(tokens) - 1)
            inputs[begin : ends[-1]] = tokens[:-1]
            # Ids may have an unsigned type, and NumPy would cast IGNORED itself to that type.
            labels[begin : ends[-1]] = np.where(in_loss, tokens, np.int64(IGNORED))[1:]
        micro_batch = {
            "input_ids": torch.from_numpy(inputs).view(height, width),
            "labels": torch.from_numpy(labels).view(height, width),
        }
        if packed:
            longest = self.config.max_length
            # The padding forms documents of its own. Empty ones raise the number of boundaries to
            # the next power of two, so that compiled blocks see few shapes.
            ends += range(ends[-1] + longest, width, longest)
            ends += [width] * (2 ** len(ends).bit_length() - len(ends))
            boundaries = torch.tensor(ends, dtype=torch.int32)
            starts = boundaries[:-1].repeat_interleave(boundaries.diff())
            micro_batch["position_ids"] = (torch.arange(width) - starts)[None]
            micro_batch["cu_seq_lens_q"] = boundaries
            micro_batch["max_length_q"] = longest
        return micro_batch

    def global_batch(self, micro_batches: list, dp_rank: int, dp_size: int) -> GlobalBatch:
        """Collate one rank's share of a step's micro-batches, and count over all of them."""
        indices = np.concatenate(micro_batches)
        lengths = self.sequences.lengths[indices].astype(int)  # int64, for the squares
        num_tokens = int(lengths.sum())
        positions = sum(math.prod(self.shape(part)) for part in micro_batches)
        return GlobalBatch(
            [self.collate(part) for part in micro_batches[dp_rank::dp_size]],
            num_targets=int(self.sequences.num_targets[indices].sum()),
            num_tokens=num_tokens,
            squared_lengths=int((lengths**2).sum()),
            padding_fraction=1 - num_tokens / positions,
        )

    def stream(self, tokens: int, number: int, dp_rank: int, dp_size: int) -> Iterator[GlobalBatch]:
        """Yield a rank's global batches of `number` micro-batches per rank, without end.

        A thread prepares the next one while the model trains on the current one.

        Args:
            tokens: target tokens that the run has trained on already.
        """
        # All epochs have equally many target tokens. Their number so far therefore gives the epoch
        # and the place in it, without planning earlier epochs.
        targets = self.sequences.num_targets
        epoch, done = divmod(tokens, targets.sum())
        micro_batches = itertools.chain.from_iterable(map(self.plan, itertools.count(epoch)))
        while done > 0:
            done -= targets[next(micro_batches)].sum()

        def prepare():
            step = list(itertools.islice(micro_batches, number * dp_size))
            return self.global_batch(step, dp_rank, dp_size)

        with ThreadPoolExecutor(1) as thread:
            prepared = thread.submit(prepare)
            while True:
                batch = prepared.result()
                prepared = thread.submit(prepare)
                yield batch

    def evaluation(self, dp_rank: int, dp_size: int) -> Iterator[dict]:
        """Yield this rank's share of all sequences.

        All ranks get equally many micro-batches, because FSDP's forward is a collective. If the
        number does not divide, some ranks repeat the last micro-batch without labels.
        """
        plan = self.plan(0)
        for k in range(dp_rank, len(plan) + -len(plan) % dp_size, dp_size):
            micro_batch = self.collate(plan[min(k, len(plan) - 1)])
            if k >= len(plan):
                micro_batch["labels"].fill_(IGNORED)
            yield micro_batch

    def bytes_per_target(self) -> float:
        """Return the bytes of text per target token; 0 for conversations, which have no count."""
        index = self.sequences.index
        documents = self.sequences.documents.data.fast_gather(np.unique(index.document))
        return np.sum(documents["num_bytes"]) / index.num_targets.sum()


def to_device(micro_batch: dict, device: torch.device) -> dict:
    """Copy a micro-batch's tensors to the device, without waiting for the copies.

    Returns a new dict, on CPUs too: callers take entries out of it.
    """
    if device.type != "cuda":
        return dict(micro_batch)
    return {
        # Copies are asynchronous from pinned memory only.
        name: value.pin_memory().to(device, non_blocking=True) if torch.is_tensor(value) else value
        for name, value in micro_batch.items()
    }


# --- Weights in Hugging Face form -----------------------------------------------------------------


def fetch_weights(name: str, flag: str = "--init_from") -> str:
    """Return the directory of --init_from: the hf/ of a run, itself, or a download from the hub."""
    with refusing(f"{flag} {name} has no *.safetensors here, and is not on the hub"):
        for directory in (Path(name, "hf"), Path(name)):
            if any(directory.glob("*.safetensors")):
                return str(directory.absolute())
        return huggingface_hub.snapshot_download(
            name,
            allow_patterns=["*.json", "*.jinja", "*.txt", "*.model", "*.safetensors"],
            ignore_patterns="consolidated*",  # Mistral's own format beside the usual one
        )


def load_weights(model: nn.Module, directory: str, skip: tuple = ()) -> None:
    """Fill full or sharded parameters from the safetensors files of a Hugging Face directory.

    Every rank reads only the slices that it holds, and casts them on the way. A collective, because
    a rank of a pipeline holds only some parameters. `skip` are names to leave as they are.
    """
    state_dict = get_model_state_dict(model)
    tied = getattr(model, "module", model).all_tied_weights_keys  # head -> embedding, if any
    # Only the embedding is in the files.
    wanted = {name: state_dict[name] for name in state_dict.keys() - tied.keys() - set(skip)}
    # NOTE: DCP would ignore names that only the files have.
    reader = dcp.HuggingFaceStorageReader(directory)
    with refusing(f"--init_from {directory}"):  # names what is missing or has another shape
        stored = reader.read_metadata().state_dict_metadata
        unknown = stored.keys() - set().union(*gather(list(state_dict)))
        if unknown:
            refuse(
                f"--init_from {directory} has {min(unknown)}, which the model lacks (docs/runs.md "
                "says what to do with experts that are stored one by one)"
            )
        for name in stored:
            if len(stored[name].chunks) > 1:
                raise ValueError(f"{name} is in several files; leave only the one to read there")
            if name in tied:
                raise ValueError(f"it has a {name}, so set tie_word_embeddings to false there")
        dcp.load(wanted, storage_reader=reader)
    state_dict |= wanted
    for head in tied.keys() & state_dict.keys():
        state_dict[head] = state_dict[tied[head]]
    set_model_state_dict(model, state_dict)


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Save a tokenizer beside a config.json, so that AutoTokenizer returns it unchanged."""
    tokenizer.save_pretrained(directory)
    (directory / "tokenization.py").write_text(TOKENIZER_CODE)


# --- Checkpoints: directories that are complete or absent -----------------------------------------

# The facts that a resumed run must share with its checkpoint: they decide what a step trains on.
PLAN = """max_length pad_to_multiple_of batching micro_batch_tokens global_batch_tokens seed
    init_from weights_hash model_hash tokenizer_hash data_hash""".split()


@dataclass
class ApplicationState(Stateful):
    """Model and optimizer as one object, whose two methods `dcp.save` and `dcp.load` can call.

    Tensors have the model's own parameter names and full shapes, whatever the strategy, so any
    script can load them at any world size. Learning rate and weight decay are not saved; a resumed
    run uses its own flags.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def state_dict(self) -> dict:
        # NOTE: before its first step an optimizer has no state, so a load would have nothing to
        # fill. `get_state_dict` creates it, by a step with a learning rate of 0.
        model_state, optimizer_state = get_state_dict(self.model, self.optimizer)
        return {"model": model_state, "optimizer": {"state": optimizer_state["state"]}}

    def load_state_dict(self, state_dict: dict) -> None:
        now = get_optimizer_state_dict(self.model, self.optimizer)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=now | state_dict["optimizer"],
        )


def load_checkpoint(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load model and optimizer from a checkpoint of either style; each rank reads what it holds."""
    application = ApplicationState(model, optimizer)
    if read_description(checkpoint)["checkpoint_style"] == "stateful":
        return read_checkpoint(checkpoint, {"app": application})
    state_dict = application.state_dict()
    read_checkpoint(checkpoint, state_dict)
    application.load_state_dict(state_dict)


def read_description(checkpoint: Path) -> dict:
    """Return checkpoint.json: the progress, and the facts of the run that wrote it."""
    with refusing(f"{checkpoint} is not a complete checkpoint"):
        return json.loads((checkpoint / "checkpoint.json").read_text())


def read_checkpoint(checkpoint: Path, state_dict: dict) -> None:
    """Fill the tensors of a state dict from a checkpoint of either style."""
    before = read_description(checkpoint)
    if before["checkpoint_style"] == "stateful" and "app" not in state_dict:
        state_dict = {"app": state_dict}
    optimizer = before.get("optimizer", "an unknown optimizer")
    with refusing(
        f"{checkpoint} of torch {before['torch']} and {optimizer} cannot be loaded (remove it if "
        "it is damaged; if another optimizer wrote it, use its weights alone: --init_from, another "
        "--run_dir)"
    ):
        # For metadata that it cannot read, `dcp.load` would log 56 lines before it fails.
        dcp.FileSystemReader(checkpoint).read_metadata()
        dcp.load(state_dict, checkpoint_id=checkpoint)


def sync_to_disk(path: Path) -> bool:
    """Make a file, or the list of names in a directory, survive a power failure.

    Returns whether the file system supports that. Some with FUSE or SMB do not.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
            raise
        return False
    finally:
        os.close(descriptor)
    return True


def remove(directory: Path) -> None:
    """Remove a directory. It is renamed first, so that no half of it keeps its name.

    NFS keeps open files, and their directory. A failure does not end the run.
    """
    with suppress(OSError):  # usually it is gone
        renamed = directory.rename(directory.with_suffix(f".{time.time_ns()}.tmp"))
        shutil.rmtree(renamed, ignore_errors=True)


@dataclass
class Checkpoints:
    """The newest checkpoints in a directory, each complete or absent.

    `newest` is the one that this process has resumed from or written last.

    Args:
        config: with `checkpoint_style`, `async_checkpoint` and `keep_checkpoints`.
        run_dir: checkpoints go to its folder `checkpoints`.
        facts: what checkpoint.json records beside the progress: `torch`, `checkpoint_style`, and
            what a resumed run must share.
        save_files: writes config.json and the tokenizer's files into a directory, for `export`.
        device: of the model.
    """

    config: Any
    run_dir: Path
    facts: dict
    save_files: Callable
    device: torch.device

    def __post_init__(self):
        self.directory = self.run_dir / "checkpoints"
        self.newest = self.pending = None
        # A write runs in its own thread, with its own group: training continues meanwhile, and its
        # collectives must not mix with the write's.
        self.group = dist.new_group(backend="gloo")
        self.thread = ThreadPoolExecutor(1)
        # Copies a state dict to CPU memory. NOTE: with a GPU that is the same, pinned memory each
        # time, so a copy is valid until the next one.
        self.stager = dcp.staging.BlockingAsyncStager(self.device.type == "cuda")

    def complete(self) -> list:
        """Return the complete checkpoints, newest first (eight digits sort as numbers)."""
        return sorted(self.directory.glob("step_????????"), reverse=True)

    def find(self, resume: str, plan: list = PLAN) -> tuple:
        """Return the checkpoint that --resume asks for (None: start), and its progress.

        A collective. Nothing on disk changes.

        Args:
            resume: `auto`, `never`, or the path of a checkpoint.
            plan: the facts that must be equal.

        Raises:
            Refusal: the facts differ, or run_dir is neither new, empty, nor this run's own.
        """
        with refusing(f"--run_dir {self.run_dir} cannot be read"):
            own = gather(self.complete())[0]  # a node could see another list
        if resume == "auto":
            self.newest = own[0] if own else None
        elif resume != "never":
            self.newest = Path(resume).absolute()
        in_other_run = self.newest not in own[:1]
        if in_other_run:
            self.refuse_foreign_directory(own)
        if self.newest is None:
            return None, {"step": 0, "tokens": 0, "metrics_bytes": 0}
        progress = read_description(self.newest)
        changed = differences(progress, self.facts, plan)
        if changed:
            refuse(
                f"checkpoint {self.newest} was written with {', '.join(changed)}; resume with its "
                "values, or use only the weights: --init_from, another --run_dir"
            )
        if in_other_run:  # this directory has none of that run's lines
            progress["metrics_bytes"] = 0
        return self.newest, progress

    def refuse_foreign_directory(self, own: list) -> None:
        """Refuse a run directory with results that this start would overwrite.

        A run that died before its first checkpoint may start again.
        """
        with refusing(
            f"--run_dir {self.run_dir} is neither empty nor a run that this start resumes"
        ):
            if any(path.stat().st_size for path in self.run_dir.glob("*")):
                before = json.loads((self.run_dir / "config.json").read_text())
                lines = (self.run_dir / "metrics.jsonl").read_bytes().splitlines()
                # While a checkpoint is written in the background, training may reach the next one.
                lost = len(lines) > 2 * before["checkpoint_every"] > 0
                if lost or own or (self.run_dir / "hf").exists():
                    raise ValueError("use another --run_dir")

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, progress: dict) -> None:
        """Save the current state, each rank its part. A collective.

        With --async_checkpoint a failure is raised by the next `save`, or by `wait`.
        """
        # NOTE: first wait, then copy, because the pending write uses the copy's memory.
        self.wait()
        application = ApplicationState(model, optimizer)
        progress = progress | {"optimizer": type(optimizer).__name__}
        if self.config.async_checkpoint:
            # Training is about to change the original.
            state_dict = self.stager.stage(application.state_dict())
            self.pending = self.thread.submit(self.write, state_dict, progress)
        elif self.config.checkpoint_style == "stateful":
            self.write(application, progress)
        else:
            self.write(application.state_dict(), progress)

    def wait(self) -> None:
        """Wait for the pending write, if there is one."""
        if self.pending:
            self.pending.result()

    def write(self, state: dict | Stateful, progress: dict) -> None:
        """Write to a temporary name, and rename once all ranks are done. A collective."""
        rank = dist.get_rank()
        final = self.directory / f"step_{progress['step']:08d}"
        temporary = final.with_suffix(".tmp")
        with refusing(f"cannot write {final} (the newest checkpoint is {self.newest})"):
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # a new thread would use GPU 0
            if rank == 0:
                for leftover in self.directory.glob("step_*.tmp"):
                    remove(leftover)  # of a run that died while writing
                self.save_files(temporary / "hf")
                write_json(temporary / "checkpoint.json", self.facts | progress)
            dist.barrier(self.group)
            if not temporary.exists():
                raise ValueError("the ranks do not write to the same directory")
            # One state for model and optimizer, or a state for each.
            parts = {"app": state} if self.config.checkpoint_style == "stateful" else state
            writer = dcp.FileSystemWriter(
                temporary, sync_files=sync_to_disk(temporary / "checkpoint.json")
            )
            dcp.save(parts, storage_writer=writer, process_group=self.group)
            if rank == 0:
                # Everything has to be on the disk first, so that the checkpoint is complete or
                # absent even after a power failure.
                for path in [*temporary.rglob("*"), temporary]:
                    sync_to_disk(path)
                temporary.rename(final)
                sync_to_disk(self.directory)
                for old in self.complete()[self.config.keep_checkpoints :]:
                    remove(old)
        self.newest = final


# --- Export: a checkpoint in Hugging Face form ----------------------------------------------------


def export(
    checkpoint: Path,
    directory: Path,
    dtype: str = "",
    hub_names: bool = False,
    read: Callable = read_checkpoint,
) -> None:
    """Write a checkpoint as a directory for AutoModelForCausalLM and AutoTokenizer, on one CPU.

    The CPU's memory holds one file of weights at a time, 5 GB at most (or one larger tensor). The
    default dtype is that of --init_from's files, or fp32.

    Args:
        hub_names: store the experts of MoE models one by one, as other programs expect.
            `load_weights` needs the model's own names.
        read: `read(checkpoint, {"model": tensors})` fills the tensors of one file, in place.
    """
    temporary = directory.with_name(f".{directory.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # of an export that did not end
    shutil.copytree(checkpoint / "hf", temporary, dirs_exist_ok=True)
    model_config = transformers.AutoConfig.from_pretrained(temporary)
    model_config.dtype = dtype or model_config.dtype
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(model_config)
    model_config.architectures = [type(model).__name__]
    rotation = getattr(model_config, "rope_parameters", None) or {}
    if "rope_theta" in rotation:  # for transformers 4, which has silent defaults
        vars(model_config).update(rotation, rope_scaling=rotation)
    model_config.save_pretrained(temporary)
    tensors = model.state_dict()
    for head in model.all_tied_weights_keys:
        del tensors[head]
    files = huggingface_hub.split_torch_state_dict_into_shards(tensors)
    weight_map = {}
    warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)")
    for file, names in files.filename_to_tensors.items():
        part = {name: torch.empty_like(tensors[name], device="cpu") for name in names}
        read(checkpoint, {"model": part})
        if hub_names:
            part = revert_weight_conversion(model, part)
        weight_map |= dict.fromkeys(part, file)
        save_file(part, temporary / file, metadata={"format": "pt"})
    if files.is_sharded:
        index = {"metadata": files.metadata, "weight_map": weight_map}
        write_json(temporary / "model.safetensors.index.json", index)
    temporary.rename(directory)


def command_line() -> None:
    with refusing("python common.py export CHECKPOINT OUT [bfloat16]"):
        checkpoint, out, *dtype = sys.argv[2:]
        export(Path(checkpoint), Path(out), *dtype, hub_names=True)


if __name__ == "__main__":
    try:
        command_line()
    except Refusal as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        sys.exit(2)
