"""Data and checkpoint helpers of the training scripts, and the plumbing of a run.

Nothing here knows a parallel strategy, an optimizer or a training loop. Those are in the scripts.
Data flows one way, and the sections below follow it:

    corpus -> tokens of whole documents (cached on disk) -> sequences -> batch plan (a pure function
    of lengths, seed and epoch) -> micro-batch

Functions that read data take a data-parallel rank and size: which part of each global batch this
rank trains on, and in how many parts it is split.

    python common.py export CHECKPOINT OUT [bfloat16]    write its weights in Hugging Face form

NOTE: the `.metadata` file of a checkpoint is a pickle, so loading a checkpoint can run any code.
Load only checkpoints that you trust, and share the Hugging Face form (safetensors) instead.
"""

import ast
import bisect
import contextlib
import ctypes
import dataclasses
import datetime
import fcntl
import functools
import gc
import glob
import inspect
import itertools
import json
import math
import os
import re
import shutil
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

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
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, ValidationError
from pydantic.dataclasses import dataclass
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.core_model_loading import revert_weight_conversion

SHARED = [__file__]  # files whose copy a run keeps; chat.py adds itself
IGNORED = -100  # label of a position that is not in the loss, as in torch's cross entropy


# --- Flags ----------------------------------------------------------------------------------------


def flag(default: Any, help: str):
    """Declare a command-line flag: a dataclass field with a default and a help text."""
    return field(default=default, metadata={"help": help})


@dataclass
class Flags:
    """The flags that all scripts share."""

    # data
    tokenizer: str = flag("bytes", "bytes, a tiktoken encoding (gpt2), or a directory or hub id")
    dataset: str = flag(
        "stdlib", "stdlib, a hub id, or a .parquet .jsonl .json .txt file, glob or URL"
    )
    dataset_config: str | None = flag(None, "configuration name of a hub dataset")
    dataset_split: str = flag("train", "split, as in datasets.load_dataset")
    max_length: PositiveInt = flag(512, "longest sequence in tokens; longer documents are split")
    pad_to_multiple_of: PositiveInt = flag(1, "round sequence lengths up to a multiple of this")
    batching: Literal["bucketed", "packed"] = flag(
        "bucketed",
        "bucketed: sequences of similar length, padded on the right. packed: whole documents "
        "packed into one sequence, with attention within each document",
    )
    micro_batch_tokens: PositiveInt = flag(
        2048, "token positions of one forward pass of one rank, padding included"
    )
    seed: NonNegativeInt = flag(0, "seed of initial weights and data order")

    # checkpoints
    checkpoint_every: PositiveInt = flag(100, "steps between checkpoints; the last step saves too")
    keep_checkpoints: PositiveInt = flag(2, "how many of the newest checkpoints to keep")
    checkpoint_style: Literal["stateful", "separate"] = flag(
        "separate",
        "stateful: model and optimizer in one Stateful object. separate: a state dict for each. "
        "Every script reads both",
    )
    async_checkpoint: bool = flag(False, "continue training while a checkpoint is written")
    resume: str = flag(
        "auto", "auto, never, or a checkpoint's path (it holds a pickle: use only trusted ones)"
    )

    # the run
    steps: NonNegativeInt = flag(
        550, "optimizer steps of the whole run; 0 prepares the data and exits"
    )
    run_dir: str = flag(f"runs/{Path(sys.argv[0]).stem}", "directory for everything a run writes")
    untested_model: bool = flag(
        False, "train a model type that was never compared with plain transformers, with a warning"
    )
    timeout_minutes: PositiveFloat = flag(10.0, "longest wait for another rank, in minutes")
    trace_steps: list[PositiveInt] | None = flag(None, "first and last step to profile")
    wandb_project: str | None = flag(None, "also log to this Weights & Biases project")

    def __post_init__(self):
        multiple = self.pad_to_multiple_of
        if math.ceil(self.max_length / multiple) * multiple > self.micro_batch_tokens:
            raise ValueError("--micro_batch_tokens cannot hold a padded sequence of --max_length")


def check_global_batch(config: Any, dp_size: int):
    """Raise ValueError unless all data-parallel ranks get equally many micro-batches."""
    unit = config.micro_batch_tokens * dp_size
    if config.global_batch_tokens % unit:
        raise ValueError(
            f"--global_batch_tokens {config.global_batch_tokens} is not a multiple of {unit} "
            f"(--micro_batch_tokens x {dp_size} data-parallel ranks)"
        )


def parse_config(config_class: type):
    """Parse the command line into the script's Config."""
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks != "1" and os.environ["WORLD_SIZE"] == "1":
        refuse(
            f"srun runs this {tasks} times, each on its own: let it start torchrun (docs/runs.md)"
        )
    parser = transformers.HfArgumentParser(config_class, allow_abbrev=False)
    parser.error = refuse
    try:
        config = config_class(**vars(parser.parse_args()))
    except ValidationError as error:
        problem = error.errors()[0]
        # `loc` has the flag; it is empty if `__post_init__` raised the error.
        name = "".join(f"--{name} " for name in problem["loc"])
        refuse(name + problem["msg"].removeprefix("Value error, "))
    if config.init_from:
        config.init_from = fetch_weights(config.init_from)
        # Weights bring their architecture and tokenizer, unless the command line sets others.
        given = {word.split("=")[0] for word in sys.argv}
        for name in ("model", "tokenizer"):
            if f"--{name}" not in given:
                setattr(config, name, config.init_from)
    return config


# --- Errors and endings ---------------------------------------------------------------------------


class Refusal(Exception):
    """Ends the program with one line on stderr, see `launch`."""


def refuse(message: str):
    """End with the line `error: message`."""
    raise Refusal(" ".join(message.split()))


@contextlib.contextmanager
def refusing(what: str):
    """End with one line, as `refuse`, if a library call in here fails, quoting its reason."""
    try:
        yield
    except Refusal:
        raise
    except (Exception, dcp.CheckpointException) as error:  # DCP's is not an Exception
        if lost_connection(error) and dist.is_initialized():
            raise
        for failure, _ in getattr(error, "failures", {}).values():  # DCP's, of each rank
            error = failure
        while error.__cause__ and not isinstance(error, OSError):
            error = error.__cause__
        refuse(f"{what}: {str(error)[:400] or 'nothing is there'}")


def lost_connection(error: BaseException):
    """Return whether a collective failed because of another rank: it exited, or it is too slow."""
    # A web request of wandb or of a reward can time out too, with errors of other types.
    from_torch = isinstance(error, RuntimeError | dcp.CheckpointException)
    text = f"{error} {error.__cause__}".lower()  # pipelines wrap the error
    return from_torch and ("connection" in text or "timed out" in text)


def launch(main: Callable):
    """Run a script's `main`. On an error, print it and exit at once.

    The exit code is 2 for input that cannot work, and 1 for a failure once training has begun.
    `os._exit`, because a regular shutdown with live communication threads can hang or abort.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        # The kernel sends SIGTERM when torchrun dies. Otherwise ranks would train on unseen.
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1: PR_SET_PDEATHSIG
        # If it has died already, init has adopted this rank. (In containers, init can be torchrun.)
        if os.getppid() == 1 and b"python" not in Path("/proc/1/cmdline").read_bytes():
            os._exit(1)
    if "WORLD_SIZE" not in os.environ:  # without torchrun: one rank
        os.environ |= {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "0",
        }
    # Sequences of many lengths fragment the GPU's memory; expandable segments avoid that.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    sys.stdout.reconfigure(errors="backslashreplace")  # for terminals that are not UTF-8
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # before the first step there is nothing to save
    try:
        return main()
    except (Exception, dcp.CheckpointException) as error:  # DCP's is not an Exception
        message, code, cause = traceback.format_exc(), 1, True
        if isinstance(error, Refusal):
            message, code = f"error: {error}", 1 if Run.current else 2
            cause = os.environ["LOCAL_RANK"] == "0"  # one of a node's ranks prints it
        elif lost_connection(error):
            cause = False
            message = (
                f"rank {os.environ['RANK']} lost another rank, or waited for it longer than "
                f"--timeout_minutes: {error!r:.400}"
            )
    # torchrun kills every rank as soon as one exits, so the rank with the root cause prints first
    # and the others wait five seconds.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if not cause:
        time.sleep(5)
    print(message, file=sys.stderr)
    if Run.current and Run.current.wandb:
        Run.current.wandb.finish(exit_code=code)  # otherwise the last steps would be lost
    os._exit(code)


def say(text: str):
    """Print on rank 0. A closed pipe (`| head -1`) or a full disk does not end the run."""
    if os.environ.get("RANK", "0") != "0":
        return
    try:
        print(text, flush=True)
    except OSError:
        sys.stdout = open(os.devnull, "w")


# --- Tokenizers -----------------------------------------------------------------------------------


class PreTrainedTokenizerFast(transformers.PreTrainedTokenizerFast):
    """A tokenizer that AutoTokenizer returns unchanged, once it is saved.

    transformers writes the name of the class, which its version 4 knows, too. For some model types
    AutoTokenizer uses the type's class instead: for qwen2 one with its own pre-tokenizer and
    normalizer. It does not if `auto_map` names code. That code runs only if somebody allows it.
    """

    _auto_map = {"AutoTokenizer": [None, "tokenization.Tokenizer"]}


Tokenizer = PreTrainedTokenizerFast
TOKENIZER_CODE = """\
from transformers import PreTrainedTokenizerFast


class Tokenizer(PreTrainedTokenizerFast):
    pass
"""  # of the file tokenization.py


def fingerprint(*values: Any):
    """Return a 128-bit hash of the values' JSON: a cache key, or a check for changes."""
    return xxhash.xxh3_128_hexdigest(json.dumps(values, sort_keys=True, default=str).encode())


@functools.cache
def load_tokenizer(name: str):
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
    if tokenizer.eos_token_id is None:
        refuse(f"--tokenizer {name} lacks an end-of-text (eos) token")
    tokenizer.backend_tokenizer.no_truncation()  # a trainer may have left them on
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def from_tiktoken(encoding: tiktoken.Encoding):
    """Return the transformers tokenizer that gives the same ids as a tiktoken encoding."""
    converter = TikTokenConverter(
        pattern=encoding._pat_str, extra_special_tokens=encoding._special_tokens
    )
    converter.load_tiktoken_bpe = lambda _: encoding._mergeable_ranks  # there is no file to read
    tokenizer = Tokenizer(
        tokenizer_object=converter.converted(),
        eos_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,  # as in training: spelled-out special tokens are text
        name_or_path=encoding.name,
    )
    if tokenizer.eos_token_id != encoding.eot_token:
        raise ValueError("it has gaps between its ids; use a Hugging Face tokenizer like it")
    return tokenizer


@functools.cache
def fast_tokenizer(tokenizer: Tokenizer):
    """Return the tokenizer in fastokens, or None if fastokens does not support all of it.

    It encodes byte-level BPE (GPT-2, Llama 3, Qwen, ...) several times as fast. Call this once all
    tokens are added.
    """
    with contextlib.suppress(ValueError):
        return fastokens.Tokenizer.from_json_str(tokenizer.backend_tokenizer.to_str())


def encode_text(text: str, tokenizer: Tokenizer):
    """Return the ids of a text (uint8 or uint32), with those that the tokenizer adds (bos).

    Special tokens that the text spells out stay plain text.
    """
    if tokenizer.name_or_path == "bytes":  # only `load_tokenizer` gives this name
        return np.frombuffer(text.encode(), np.uint8)
    fast = fast_tokenizer(tokenizer)
    # NOTE: fastokens 0.3.5 splits texts with these two characters differently than `tokenizers` (no
    # others, see tests/test_tokenizers.py). It splits texts of 64 KiB and more in threads, and a
    # fork of this process would wait for these forever.
    if fast and len(text.encode()) < 65_536 and not re.search("[\u017f\u180e]", text):
        ids = fast.encode(text, add_special_tokens=True, split_special_tokens=True).ids
    else:
        ids = tokenizer(text, split_special_tokens=True, verbose=False)["input_ids"]
    return np.array(ids, np.uint32)


# --- Corpus: anything that `datasets` reads -------------------------------------------------------

READERS = {".parquet": "parquet", ".jsonl": "text", ".json": "json", ".txt": "text"}
JSON = "a line of JSON"  # column of .jsonl files; `tokenize` parses it
# The first progress bar, even a disabled one, creates a lock, by default with a named semaphore. If
# the process then ends by `os._exit`, as in `launch`, Python 3.14 prints two lines about it.
tqdm.tqdm.set_lock(threading.RLock())


def standard_library_files():
    """Return the source files of Python's standard library, without tests and tables."""
    skipped = {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "ensurepip"}
    files = []
    for folder, subfolders, _ in os.walk(Path(ast.__file__).parent):
        subfolders[:] = set(subfolders) - skipped  # `walk` does not enter the others
        files += glob.glob(f"{folder}/*.py")
    return sorted(files)


def standard_library_documents(files: list):
    """Yield each top-level function or class as a document."""
    for file in files:
        source = Path(file).read_text(encoding="utf-8", errors="replace")
        lines = source.splitlines(keepends=True)
        for node in ast.parse(source).body:
            if hasattr(node, "decorator_list"):  # functions and classes
                first = (node.decorator_list or [node])[0].lineno
                yield {"text": "".join(lines[first - 1 : node.end_lineno])}


EMBEDDED = {"stdlib": standard_library_documents}  # fine-tuning adds its own


def open_dataset(name: str, configuration: str | None, split: str):
    """Open --dataset: an embedded corpus, a file, glob or URL, or a hub id."""
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # our error line says what matters
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    if name in EMBEDDED:
        return datasets.Dataset.from_generator(
            EMBEDDED[name], gen_kwargs={"files": standard_library_files()}
        )
    known_suffixes = [suffix for suffix in Path(name).suffixes if suffix in READERS]
    if not known_suffixes:
        return datasets.load_dataset(name, configuration, split=split)
    suffix = known_suffixes[-1]  # the last one counts: a.txt.jsonl.gz is JSON
    size = sum(map(os.path.getsize, glob.glob(name, recursive=True)))
    corpus = datasets.load_dataset(
        READERS[suffix],
        fingerprint(size),  # part of the cache key, which has names and times of files
        data_files=name,
        split=split,
        download_config=datasets.DownloadConfig(),  # downloads a file again that has changed
        # Or datasets would write texts as JSON where a column has values of other types.
        **({"on_mixed_types": None} if suffix == ".json" else {}),
    )
    return corpus.rename_column("text", JSON) if suffix == ".jsonl" else corpus


# --- Documents: tokens on disk --------------------------------------------------------------------

# Part of the cache key. NOTE: raise it when you change what the cache holds. The key also has the
# source of the function that tokenizes a document, but not of the functions that this one calls.
CACHE_VERSION = 4


def tokenize_text(row: dict, tokenizer: Tokenizer):
    """Tokenize a text and its end-of-text token. Every prediction is in the loss.

    Returns:
        tokens: ids, of any integer type, [length + 1].
        in_loss: bool [length + 1], which tokens are targets (the first one never is).
        group: what decides on which side of the split the document is. Documents with the same are
            on the same side: equal texts, or all answers to one prompt.
        num_bytes: of the text, for bits per byte; 0 for conversations.

    Raises:
        ValueError: why the document is left out.
    """
    [text] = row.values() or [None]
    if not isinstance(text, str) or not text:
        raise ValueError("hold no text")
    tokens = encode_text(text, tokenizer)
    if tokenizer.eos_token_id not in tokens[-1:]:  # some tokenizers write it
        tokens = np.append(tokens, np.uint32(tokenizer.eos_token_id))
    return tokens, np.ones(len(tokens), bool), text, len(text.encode())


def tokenize(batch: dict, columns: list, function: Callable, tokenizer: Tokenizer, dtype: np.dtype):
    """Return what the cache holds of a batch of rows, as a table, with token ids of this type.

    Args:
        batch: the rows as columns, name -> list of values.
    """
    documents = []
    for values in zip(*batch.values()):  # read here, so that a file with broken UTF-8 is refused
        row = dict(zip(batch, values))
        tokens = in_loss = []
        group = left_out = ""
        num_bytes = 0
        try:
            # Each row has its own types. A reader of whole columns would guess one for all of them.
            if JSON in row:
                row = json.loads(row[JSON].removeprefix("\ufeff"))  # a byte order mark
            row = {name: row[name] for name in columns if isinstance(row, dict) and name in row}
            tokens, in_loss, group, num_bytes = function(row, tokenizer)
        except json.JSONDecodeError:
            left_out = "are broken JSON"
        except ValueError as problem:
            left_out = str(problem)
        documents.append(
            {
                "tokens": np.asarray(tokens, dtype),
                "in_loss": np.asarray(in_loss, bool),
                "lengths": len(tokens[1:]),  # predictions
                "num_targets": np.count_nonzero(in_loss[1:]),
                "num_bytes": num_bytes,
                "group": int(fingerprint(group)[:7], 16),  # 28 bits
                "left_out": left_out,
            }
        )
    return pyarrow.Table.from_pylist(documents)


def load_documents(config: Flags, columns: list, function: Callable, tokenizer: Tokenizer):
    """Tokenize --dataset with several processes, once for all runs and all --max_length.

    Returns a dataset, memory-mapped from disk, with the columns that `tokenize` writes. Documents
    that are left out have no target tokens.

    Args:
        columns: those to read if they are there.
        function: a module-level function as `tokenize_text`.
    """
    with refusing(
        f"--dataset (hub id, .parquet, .jsonl, .json, .txt or FOLDER/*.txt) {config.dataset} "
        "cannot be read"
    ):
        corpus = open_dataset(config.dataset, config.dataset_config, config.dataset_split)
        present = [column for column in [JSON, *columns] if column in corpus.column_names]
        if not present:
            raise ValueError(f"it has no column {' or '.join(columns[:4])}: {corpus.column_names}")
        corpus = corpus.select_columns(present)
        # NOTE: without a key of our own, datasets would hash the function. One that it cannot hash
        # gets a new key each time, so every rank and every run would tokenize again.
        key = fingerprint(
            corpus._fingerprint,
            CACHE_VERSION,
            columns,
            inspect.getsource(function),
            tokenizer.special_tokens_map,
            tokenizer.chat_template,
            tokenizer.backend_tokenizer.to_str(),
        )
        # macOS cannot tell which CPUs a process may use.
        num_cpus = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
        # The first rank of a node does the work, and the others wait and read the cache. This
        # happens before the ranks meet, because the time that a collective may take is limited.
        with filelock.FileLock(f"{datasets.config.HF_DATASETS_CACHE}/{key}.lock"):
            documents = corpus.map(
                tokenize,
                # Each call takes as long as the tokens of a short document. The table that it
                # returns replaces the columns of the batch.
                batched=True,
                fn_kwargs={
                    "columns": columns,
                    "function": function,
                    "tokenizer": tokenizer,
                    # The smallest type that holds all ids. Some tokenizers skip ids.
                    "dtype": np.min_scalar_type(max(tokenizer.get_vocab().values())),
                },
                new_fingerprint=key,
                num_proc=min(num_cpus, len(corpus) // 1000),
            )
    for found in documents.data["left_out"].value_counts().to_pylist():
        if found["values"]:
            say(f"{found['counts']:,} documents are left out, because they {found['values']}")
    return documents


@dataclasses.dataclass
class Sequences:
    """Token sequences: views of tokenized documents, which are memory-mapped from disk.

    Args:
        documents: a dataset with the tokens and loss masks of whole documents.
        index: a record array, int32, with one entry per sequence: document and start (where it
            begins), lengths (predictions, one fewer than tokens), num_targets (predictions in the
            loss).
    """

    documents: datasets.Dataset
    index: np.recarray

    def __post_init__(self):
        self.lengths = self.index.lengths
        self.num_targets = self.index.num_targets

    def read(self, i: int):
        """Return tokens (int64) and loss mask (bool) of sequence i, [length + 1]."""
        document, start, length, _ = self.index[i].tolist()
        part = slice(start, start + length + 1)
        # A view of this part alone. NOTE: `self.documents[...]` would copy the whole document, and
        # without the 1, or as `data["tokens"][...]`, the time would grow with the corpus.
        row = self.documents.data.fast_slice(document, 1)
        tokens = np.asarray(row["tokens"][0].values[part], np.int64)
        return tokens, np.asarray(row["in_loss"][0].values[part])

    def sequences(self, max_length: int):
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


def split(documents: datasets.Dataset, validation_tokens: float):
    """Return the documents for training and for validation, as sequences in the order of hashes.

    Held out are those with the smallest hashes: 2 % of all possible ones, or 5,000 documents.
    So a document is on the same side in every run and script, whatever is left out beside it.
    Validation gets the first of them that have `validation_tokens`.
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
        refuse(
            "--dataset has fewer than two different documents with target tokens: see above "
            "what is left out, and whether its columns have the names that this script reads"
        )
    enough = 1 + np.searchsorted(held_out.lengths.cumsum(), validation_tokens)
    return Sequences(documents, training), Sequences(documents, held_out[:enough])


# --- Batch plan: which sequences form each micro-batch -------------------------------------------


def bucket(lengths: np.ndarray, budget: int):
    """Split descending lengths into micro-batches with sequences x longest <= budget."""
    start = 0
    while start < len(lengths):
        stop = start + budget // lengths[start]
        yield slice(start, stop)
        start = stop


def pack(lengths: np.ndarray, budget: int):
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


@dataclasses.dataclass
class GlobalBatch:
    """What one optimizer step trains on: this rank's micro-batches, and counts over all ranks.

    Args:
        micro_batches: arguments of the model, see `Batches.collate`.
        num_targets: target tokens, by which the summed loss is divided.
        num_tokens: tokens without padding.
        squared_lengths: sum of squared sequence lengths, for the FLOPs of attention.
        padding_fraction: padding, as a fraction of all positions.
        step: of training, from 1.
        started, data_seconds: when the training loop asked for it, and how long it waited.
        measured: what a strategy measures in the step, for metrics.jsonl.
    """

    micro_batches: list[dict]
    num_targets: int
    num_tokens: int
    squared_lengths: int
    padding_fraction: float
    step: int = 0
    started: float = 0.0
    data_seconds: float = 0.0
    measured: dict = field(default_factory=dict)


@dataclasses.dataclass
class Batches:
    """The endless stream of micro-batches: epoch after epoch, each with its own plan.

    With k = global / micro batch tokens, step s trains on micro-batches s * k to (s + 1) * k - 1.
    So what a step holds does not depend on the number of ranks.

    Args:
        sequences: `Sequences`, or an object with the same `lengths`, `num_targets` and `read`.
        padding_id: token id of padding. It has no label, and no token attends to it.
    """

    sequences: Any
    config: Flags
    padding_id: int

    def plan(self, epoch: int):
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

    def shape(self, indices: np.ndarray):
        """Return the number of sequences and the padded length of a micro-batch."""
        budget, multiple = self.config.micro_batch_tokens, self.config.pad_to_multiple_of
        if self.config.batching == "packed":
            return 1, budget
        length = math.ceil(self.sequences.lengths[indices].max() / multiple) * multiple
        # Compiled blocks need few shapes, so fill up with empty sequences: one shape per length.
        return len(indices) if multiple == 1 else budget // length, length

    def collate(self, indices: np.ndarray):
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

    def global_batch(self, micro_batches: list, dp_rank: int, dp_size: int):
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

    def stream(self, progress: dict, last_step: int, accumulation: int, dp_rank: int, dp_size: int):
        """Yield the global batches of the steps after `progress`, up to `last_step`.

        `progress` has the steps so far, and the target tokens that they trained on ("tokens").
        A thread prepares the next one while the model trains on the current one. `accumulation` is
        the number of micro-batches of a step, over all ranks.
        """
        # Every epoch has the same target tokens. So their number tells the epoch, and how much of
        # it is done, and no earlier epoch has to be planned.
        targets = self.sequences.num_targets
        epoch, done = divmod(progress["tokens"], targets.sum())
        micro_batches = itertools.chain.from_iterable(map(self.plan, itertools.count(epoch)))
        while done > 0:
            done -= targets[next(micro_batches)].sum()

        def prepare():
            step = list(itertools.islice(micro_batches, accumulation))
            return self.global_batch(step, dp_rank, dp_size)

        with ThreadPoolExecutor(1) as thread:
            prepared = thread.submit(prepare)
            for step in range(progress["step"], last_step):
                started = time.perf_counter()
                batch = prepared.result()
                batch.step, batch.started = step + 1, started
                batch.data_seconds = time.perf_counter() - started
                prepared = thread.submit(prepare)
                yield batch

    def evaluation(self, dp_rank: int, dp_size: int):
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


def to_device(micro_batch: dict, device: torch.device):
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


# --- Architecture and weights in Hugging Face form ------------------------------------------------

# Model types of transformers that train here exactly as with plain transformers, bucketed and
# packed. tests/test_types.py compares loss and gradients of each.
BUCKETED_TYPES = """
    afmoe arcee aria_text axk1 axk2 bailing_hybrid bamba bart beam biogpt bitnet blenderbot
    blenderbot-small bloom codegen cohere cohere2 cohere2_moe cohere_compass_text ctrl
    deepseek_v2 deepseek_v3 deepseek_v32 diffllama doge dots1 dots3_note_text ernie4_5
    ernie4_5_moe exaone exaone4 exaone_moe falcon falcon_mamba flex_olmo flint gemma gemma2
    gemma3_text gemma4_text gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt2
    gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj granite granite_swa granitemoe
    granitemoe_swa granitemoehybrid granitemoeshared helium hrm_text hunyuan_v1_dense
    hunyuan_v1_moe hy_v3 hy_v4 hyperclovax internlm3 iquestcoder jais2 jamba jetmoe kimi_linear
    kolibri1 laguna lara_mini lfm2 lfm2_moe lfm3 llama longcat_flash mamba mamba2 marian mbart
    mellum mimo_v2_flash minicpm3 minimax_m2 minimax_m3_vl_text ministral ministral3 mistral
    mixtral moshi mpt mvp nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe opt pegasus
    persimmon phi phi3 phimoe plbart qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text
    qwen3_moe qwen3_next qwen4_exp_text sarvam_mla sarvam_moe seed_oss smollm3 solar_open
    stablelm starcoder2 trocr vaultgemma whisper youtu zaya
"""
PACKED_TYPES = """
    afmoe arcee aria_text axk1 beam biogpt bitnet codegen cohere cohere2 cohere2_moe
    cohere_compass_text ctrl deepseek_v2 deepseek_v3 diffllama dots1 ernie4_5 ernie4_5_moe
    exaone exaone4 exaone_moe flex_olmo gemma gemma2 gemma3_text gemma4_text gemma4_unified_text
    glm glm4 glm4_moe glm4_moe_lite gpt2 gpt_bigcode gpt_neox gptj granite granitemoe
    granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3
    iquestcoder jais2 jetmoe kolibri1 laguna llama longcat_flash mellum minicpm3 minimax_m2
    ministral ministral3 mistral mixtral moshi olmo olmo2 olmo3 olmoe opt persimmon phi phi3
    phimoe qwen2 qwen2_moe qwen3 qwen3_moe sarvam_mla sarvam_moe seed_oss smollm3 solar_open
    starcoder2 vaultgemma whisper youtu
"""
# Settings that the loss or the attention of the scripts ignores -> values that change nothing.
NEUTRAL_SETTINGS = """\
    attn_logit_softcapping None
    final_logit_softcapping None
    is_causal None True
    is_moe None False
    logit_scale None 1 1.0
    logits_scaling None 1 1.0
    output_router_logits None False
    quantization_config None
    use_bidirectional_attention None False vision
    z_loss_coefficient None 0 0.0
"""  # is_moe: the routers of Doge mix tokens, so they see later ones


def read_model_config(config: Any, vocabulary_size: int):
    """Read the config.json of --model (without running code from the hub).

    A model that also sees or hears gives the config of its language model. Refuses models that
    would not train on this data as they should.
    """
    name = f"--model {config.model}"
    with refusing(f"{name} is not built in (see --help) and has no config.json"):
        model_config = transformers.AutoConfig.from_pretrained(
            config.model, trust_remote_code=False
        ).get_text_config()
    settings = [line.split() for line in NEUTRAL_SETTINGS.splitlines()]
    known = BUCKETED_TYPES.split()
    limits = ["max_position_embeddings", "max_seq_len", "max_target_positions"]
    if config.batching == "packed":
        dropouts = [key for key in model_config.to_dict() if re.search("att.*drop", key)]
        settings += [[key, "None", "0", "0.0"] for key in dropouts]
        limits += ["sliding_window", "attention_chunk_size"]
        known = PACKED_TYPES.split()
    if model_config.model_type not in known:
        untested = f"{name}: type {model_config.model_type} is not tested with {config.batching}"
        if model_config.model_type in BUCKETED_TYPES.split() or not config.untested_model:
            refuse(f"{untested} batches (--untested_model trains types that are tested with none)")
        say(f"WARNING: {untested} batches; compare the loss with that of plain transformers")
    for setting, *neutral in settings:
        if str(getattr(model_config, setting, None)) not in neutral:
            refuse(f"{name}: its {setting} is not supported")
    if vocabulary_size > model_config.vocab_size:
        refuse(f"--tokenizer has {vocabulary_size} ids, {name} only {model_config.vocab_size}")
    rotation = getattr(model_config, "rope_parameters", None) or {}
    if rotation.get("rope_type") == "longrope":  # past it, rotations depend on the padded length
        limits.append("original_max_position_embeddings")
    for limit in limits:
        length = getattr(model_config, limit, None) or rotation.get(limit) or math.inf
        if config.max_length > length:
            refuse(f"--max_length {config.max_length} exceeds {limit} of {name}")
    return model_config


def freeze_unused(model: nn.Module):
    """Freeze parameters that no gradient reaches. DDP would wait for their gradients.

    These are the cross attention of decoders that are used without an encoder, and the indexers of
    sparse attention. Frozen biases, those of routers, become buffers of the same name: a buffer
    stays fp32 and unsharded, where FSDP would round a parameter to bf16.
    """
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if "encoder_attn" in path or "indexer" in path:
                parameter.requires_grad_(False)
            elif name.endswith("bias") and not parameter.requires_grad:
                delattr(module, name)
                module.register_buffer(name, parameter.data)


def fetch_weights(name: str):
    """Return the directory of --init_from: the hf/ of a run, itself, or a download from the hub."""
    with refusing(f"--init_from {name[:200]} has no *.safetensors here, and is not on the hub"):
        for directory in (Path(name, "hf"), Path(name)):
            if any(directory.glob("*.safetensors")):
                return str(directory.absolute())
        return huggingface_hub.snapshot_download(
            name,
            allow_patterns=["*.json", "*.jinja", "*.txt", "*.model", "*.safetensors"],
            ignore_patterns="consolidated*",  # Mistral's own format beside the usual one
        )


def load_weights(model: nn.Module, directory: str, skip: tuple = ()):
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


def save_tokenizer(tokenizer: Tokenizer, directory: Path):
    """Save a tokenizer beside a config.json, so that AutoTokenizer returns it unchanged."""
    tokenizer.save_pretrained(directory)
    (directory / "tokenization.py").write_text(TOKENIZER_CODE)


# --- Checkpoints: directories that are complete or absent -----------------------------------------

# What a resumed run must share with its checkpoint: the flags of the batch plan, the weights that
# it started from, and a hash of architecture, tokenizer and documents.
PLAN = """max_length pad_to_multiple_of batching micro_batch_tokens global_batch_tokens seed
    init_from model_tokenizer_data""".split()


def application_state(model_state: dict, optimizer_state: dict):
    """Return what a checkpoint holds of the state dicts of model and optimizer.

    Tensors have the model's own parameter names and full shapes, whatever the strategy, so the
    scripts of a stage can load each other's checkpoints at any world size. (Muon's and LoRA's load
    only into the script that wrote them.) The hyper-parameters are not in it, because those of a
    resumed run are its flags.
    """
    return {"model": model_state, "optimizer": {"state": optimizer_state["state"]}}


def in_style(state_dict: dict, style: str):
    """Return what DCP saves: one application state, or model and optimizer side by side."""
    return {"app": state_dict} if style == "stateful" else state_dict


def read_description(checkpoint: Path):
    """Return checkpoint.json: the progress, and the facts of the run that wrote it."""
    with refusing(f"{checkpoint} is not a complete checkpoint"):
        return json.loads((checkpoint / "checkpoint.json").read_text())


def read_checkpoint(checkpoint: Path, state_dict: dict):
    """Fill the tensors of a state dict from a checkpoint of either style."""
    description = read_description(checkpoint)
    with refusing(
        f"{checkpoint} of torch {description['torch']} cannot be loaded (remove it? If it lacks "
        "exp_avg_sq, Muon wrote it: only fsdp2_muon_pretrain.py resumes it, --init_from works too)"
    ):
        # For metadata that it cannot read, `dcp.load` would log 56 lines before it fails.
        dcp.FileSystemReader(checkpoint).read_metadata()
        dcp.load(in_style(state_dict, description["checkpoint_style"]), checkpoint_id=checkpoint)


def load_checkpoint(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer):
    """Load model and optimizer; each rank reads what it holds."""
    # NOTE: optimizer.state_dict() is empty before the first step, so a load would have nothing
    # to fill. `get_state_dict` creates the AdamW moments, by a step with a learning rate of 0.
    model_state, optimizer_state = get_state_dict(model, optimizer)
    read_checkpoint(checkpoint, application_state(model_state, optimizer_state))
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)


def export(checkpoint: Path, directory: Path, dtype="", hub_names=False, read=read_checkpoint):
    """Write a checkpoint as a directory for AutoModelForCausalLM and AutoTokenizer, on one CPU.

    The CPU's memory holds one file of weights at a time, 5 GB at most (or one larger tensor). The
    default dtype is that of --init_from's files, or fp32. With `hub_names` the experts of MoE
    models are stored one by one, as other programs expect. `load_weights` needs the model's names.
    `read(checkpoint, {"model": tensors})` fills the tensors of one file, in place.
    """
    temporary = directory.with_name(f".{directory.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # of an export that did not end
    shutil.copytree(checkpoint / "hf", temporary)
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
    split = huggingface_hub.split_torch_state_dict_into_shards(tensors)
    weight_map = {}
    warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)")
    for file, names in split.filename_to_tensors.items():
        part = {name: torch.empty_like(tensors[name], device="cpu") for name in names}
        read(checkpoint, {"model": part})
        if hub_names:
            part = revert_weight_conversion(model, part)
        weight_map |= dict.fromkeys(part, file)
        save_file(part, temporary / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": weight_map}
        write_json(temporary / "model.safetensors.index.json", index)
    temporary.rename(directory)


def gather(value: Any):
    """Return the values of all ranks. A collective."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def differences(before: dict, now: dict, names: list):
    """Return in which of these names two descriptions of a run differ, and how."""
    return [
        f"{name} {before.get(name)} (now {now.get(name)})"
        for name in names
        if before.get(name) != now.get(name)
    ]


def write_json(path: Path, value: dict):
    path.write_text(json.dumps(value, indent=2) + "\n")


def sync_to_disk(path: Path):
    """Make a file, or the list of names in a directory, survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


class Checkpoints:
    """The newest checkpoints of a run."""

    def __init__(self, run: "Run"):
        self.run = run
        run.checkpoints = self
        self.directory = run.directory / "checkpoints"
        self.last = self.pending = None
        # A write runs in its own thread, with its own group: training continues meanwhile, and its
        # collectives must not mix with those of the write.
        self.group = dist.new_group(backend="gloo")
        self.thread = ThreadPoolExecutor(1)
        # Copies a state dict to CPU memory. NOTE: with a GPU that is the same, pinned memory each
        # time, so a copy is valid until the next one.
        self.stager = dcp.staging.BlockingAsyncStager(run.device.type == "cuda")

    def all(self):
        """Return the complete ones, newest first (eight digits sort as numbers)."""
        return sorted(self.directory.glob("step_????????"), reverse=True)

    def find(self):
        """Set `last` to the checkpoint that --resume asks for (None: start); return its progress.

        A collective. Nothing on disk changes. Refuses a run directory unless it is absent, empty,
        the run that this start resumes, or a run that died before its first checkpoint.
        """
        run_dir, resume = self.run.directory, self.run.config.resume
        with refusing(f"--run_dir {run_dir} is neither empty nor a run that this start resumes"):
            own = gather(self.all())[0]  # one list for all ranks, even if a node sees another one
            if resume == "auto":
                self.last = own[0] if own else None
            elif resume != "never":
                self.last = Path(resume).absolute()
            new = self.last not in own[:1]
            if new and any(path.stat().st_size for path in run_dir.glob("*")):
                before = json.loads((run_dir / "config.json").read_text())
                lines = (run_dir / "metrics.jsonl").read_bytes().splitlines()
                # A run that died before its first checkpoint may start again.
                some = len(lines) > 2 * before["checkpoint_every"]
                if some or own or (run_dir / "hf").exists():
                    raise ValueError("use another --run_dir")
        if self.last is None:
            return {"step": 0, "tokens": 0, "metrics_bytes": 0}
        say(f"resuming from {self.last}")
        description = read_description(self.last)
        changed = differences(description, self.run.facts, PLAN)
        if changed:
            refuse(
                f"checkpoint {self.last} was written with {', '.join(changed)}; resume with the "
                "same, or use only the weights: --init_from, another --run_dir"
            )
        if new:  # this directory has none of that run's lines
            description["metrics_bytes"] = 0
        return description

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, progress: dict):
        """Save the current state, each rank its part.

        With --async_checkpoint a failure is raised by the next `save`, or by `wait`.
        """
        # NOTE: first wait, then copy, because the pending write uses the copy's memory.
        self.wait()
        state = application_state(*get_state_dict(model, optimizer))
        progress = progress | {"metrics_bytes": self.run.metrics.tell()}
        if self.run.config.async_checkpoint:
            state = self.stager.stage(state)  # training is about to change the original
            self.pending = self.thread.submit(self.write, state, progress)
        else:
            self.write(state, progress)

    def wait(self):
        """Wait for the pending write, if there is one."""
        if self.pending:
            self.pending.result()

    def write(self, state: dict, progress: dict):
        """Write to a temporary name, and rename once all ranks are done. A collective."""
        run = self.run
        final = self.directory / f"step_{progress['step']:08d}"
        temporary = final.with_suffix(".tmp")
        with refusing(f"cannot write {final} (the newest checkpoint is {self.last})"):
            if run.device.type == "cuda":
                torch.cuda.set_device(run.device)  # a new thread would use GPU 0
            if run.rank == 0:
                for leftover in self.directory.glob("step_*.tmp"):
                    shutil.rmtree(leftover)  # of a run that died while writing
                run.model_config.save_pretrained(temporary / "hf")
                run.generation_config.to_json_file(temporary / "hf/generation_config.json")
                save_tokenizer(run.tokenizer, temporary / "hf")
                write_json(temporary / "checkpoint.json", run.facts | progress)
            dist.barrier(self.group)
            if not temporary.exists():
                raise ValueError("the ranks do not write to the same directory")
            parts = in_style(state, run.config.checkpoint_style)
            dcp.save(parts, checkpoint_id=temporary, process_group=self.group)
            if run.rank == 0:
                # Everything has to be on the disk first, so that the checkpoint is complete or
                # absent even after a power failure.
                for path in [*temporary.rglob("*"), temporary]:
                    sync_to_disk(path)
                temporary.rename(final)
                sync_to_disk(self.directory)
                for old in self.all()[run.config.keep_checkpoints :]:
                    # Rename first, so that no half of it is left under its name.
                    shutil.rmtree(old.rename(old.with_suffix(".tmp")), ignore_errors=True)
        self.last = final


# --- A run: its directory, metrics and progress ---------------------------------------------------

# Dense bf16 FLOP/s from the makers' data sheets (half of what they quote with sparsity), by a
# pattern of a GPU's name. The first one that fits counts.
PEAK_FLOPS = {
    "B200": 2250e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H[12]00": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090$": 165e12,
}


def peak_flops(name: str):
    """Return the peak of a GPU by its CUDA name, None if it is not known."""
    return next((PEAK_FLOPS[key] for key in PEAK_FLOPS if re.search(rf"\b{key}\b", name)), None)


def step_flops(model: transformers.PreTrainedModel):
    """Return a function for the FLOPs of forward and backward of a step, for the MFU.

    NOTE: call it before the model is parallelized. A stage or a shard has fewer parameters.

    As in PaLM (arXiv 2204.02311, appendix B): 6 per parameter and token, in the head per parameter
    and target token, and 12 x heads x head size x length per token and layer for attention.
    Recomputation and padding do not count.
    """
    config = model.config
    in_head = model.get_output_embeddings().weight.numel()
    in_blocks = model.num_parameters(exclude_embeddings=True)  # these are looked up
    if not config.tie_word_embeddings:
        in_blocks -= in_head
    used = getattr(config, "num_experts_per_tok", None)  # by each token
    for name, parameter in model.named_parameters():
        if used and ".experts." in name and parameter.ndim == 3:  # [experts, ...]
            in_blocks -= parameter[used:].numel()
    try:
        heads = config.num_attention_heads
        head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
        width = config.num_hidden_layers * heads * head_size
    except (AttributeError, RuntimeError):  # no attention, or heads of several sizes
        width = 0

    def flops(batch: GlobalBatch):
        matmuls = in_blocks * batch.num_tokens + in_head * batch.num_targets
        return 6 * matmuls + 12 * width * batch.squared_lengths

    return flops


@dataclasses.dataclass
class Run:
    """A run's directory, metrics, terminal output and Weights & Biases. Rank 0 writes.

    Every rank creates one. It changes nothing in the directory until `begin`, which locks it.
    `facts` is what is recorded of the run beside its metrics.
    """

    config: Any
    model: dataclasses.InitVar
    tokenizer: Tokenizer
    documents: datasets.Dataset
    device: torch.device
    current = None  # the run of this process, once it trains
    wandb = profiler = None
    printed = -1e9  # when a step was printed last: never
    stop_requested = 0  # signals that this rank has received
    stopping = False  # whether any rank has received one

    def __post_init__(self, model: transformers.PreTrainedModel):
        config, data = self.config, self.documents.data
        self.directory = Path(config.run_dir).absolute()
        self.model_config = model.config
        self.generation_config = model.generation_config
        if config.init_from:  # export in the same dtype
            model.config.dtype = transformers.AutoConfig.from_pretrained(config.init_from).dtype
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.flops = step_flops(model)
        self.metrics = open(os.devnull, "ab", buffering=0)  # rank 0 opens another file in `begin`
        architecture = model.config.to_diff_dict() | {"transformers_version": "", "dtype": ""}
        self.facts = vars(config) | {
            "model_tokenizer_data": fingerprint(
                architecture,
                self.tokenizer.backend_tokenizer.to_str(),
                xxhash.xxh3_128_hexdigest(np.bitwise_xor(data["group"], data["lengths"])),
            ),
            "parameters": model.num_parameters(),
            "world_size": self.world_size,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        for rank, facts in enumerate(gather(self.facts)):
            different = differences(facts, self.facts, facts)
            if different:
                refuse(f"rank {rank} has {', '.join(different)}")

    def begin(self, progress: dict, work: str):
        """Start training after `progress`: all checks have passed.

        Rank 0 locks the directory, drops the lines of metrics.jsonl that the checkpoint did not
        have, and says what begins; `work` is what a step does. From here on signals only request a
        stop. A collective.
        """
        config, data = self.config, self.documents.data
        for group in dist.distributed_c10d._world.pg_map:  # those of a mesh have torch's default
            group.set_timeout(datetime.timedelta(minutes=config.timeout_minutes))
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self.request_stop)
        if self.rank == 0:
            with refusing(f"--run_dir {self.directory} cannot be written or is in use"):
                self.open_files(progress["metrics_bytes"])
        say(
            f"{self.facts['parameters']:,} parameters, {np.count_nonzero(data['num_targets']):,} "
            f"documents, {np.sum(data['lengths']):,} tokens; writing {config.run_dir}\n"
            f"{config.precision} on {self.world_size} ranks, {work}"
        )
        self.trace(progress["step"])
        # The ranks collect garbage together (`log_step`). Each at a moment of its own, they would
        # wait for one after the other.
        gc.disable()
        Run.current = self
        dist.barrier()

    def open_files(self, metrics_bytes: int):
        """Lock the directory, and write to it all that is known before the first step."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.metrics = open(f"{self.directory}/metrics.jsonl", "ab", buffering=0)
        try:
            # This lock ends with the process, however it dies. Forks do not inherit it.
            fcntl.lockf(self.metrics, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # EAGAIN and EACCES: somebody else has it
            raise
        except OSError as error:  # some NFS and Lustre
            say(f"no file lock here ({error}): take care that no two runs write to one directory")
        write_json(self.directory / "config.json", self.facts)
        self.metrics.truncate(metrics_bytes)
        shutil.rmtree(f"{self.directory}/hf", ignore_errors=True)  # of fewer steps
        for source in (sys.argv[0], *SHARED):  # as they run now
            shutil.copy(source, self.directory)
        if self.config.wandb_project:
            with refusing("--wandb_project"):
                import wandb

                self.wandb = wandb.init(
                    project=self.config.wandb_project,
                    # One id for the life of the directory, so that a resumed run continues there.
                    id=fingerprint(self.directory.stat().st_ino, self.config.run_dir),
                    dir=self.directory,
                    config=self.facts,
                    resume="allow",
                )

    def request_stop(self, *_):
        self.stop_requested += 1

    def trace(self, step: int):
        """Profile rank 0 from the first of --trace_steps to the last; `step` is done."""
        steps = self.config.trace_steps or [0]
        if self.rank == 0 and step + 1 == min(steps):
            self.profiler = torch.profiler.profile()
            self.profiler.start()
        if self.profiler and step == max(steps):
            self.profiler.stop()
            self.profiler.export_chrome_trace(f"{self.directory}/trace.json")

    def log(self, line: dict):
        """Write a line of metrics.jsonl, and log it to Weights & Biases."""
        self.metrics.write((json.dumps(line) + "\n").encode())
        if self.wandb:
            self.wandb.log(line, step=line["step"])  # it ignores what a resumed run repeats

    def log_step(self, batch: GlobalBatch, step: int, aim: str = "loss", **measured: float):
        """Log an optimizer step, and print its `aim` every ten seconds.

        A collective: all ranks learn the longest wait for data, and whether any is to stop.
        """
        now = time.perf_counter()
        seconds = now - batch.started
        slowest = torch.tensor([batch.data_seconds, self.stop_requested])
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        self.stopping = bool(slowest[1])
        peak = self.device.type == "cuda" and peak_flops(torch.cuda.get_device_name(self.device))
        line = {
            "step": step,
            **measured,
            **batch.measured,
            "padding_fraction": batch.padding_fraction,
            "tokens_per_second": batch.num_tokens / seconds,
            "step_seconds": seconds,
            "data_seconds": slowest[0].item(),
            "mfu": self.flops(batch) / seconds / self.world_size / peak if peak else None,
            "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30,
        }
        self.log(line)
        self.trace(step)
        if step % 100 == 0:
            gc.collect(1)  # what is new: the imports' objects would take longer than a step
        if step == self.config.steps or now - self.printed > 10:
            say(
                f"step {step}/{self.config.steps}  {aim} {measured[aim]:.4f}  "
                f"{line['tokens_per_second']:,.0f} tokens/s"
            )
            self.printed = now

    def log_validation(self, step: int, loss: float, validation: Batches):
        """Log a validation, in nats per target token, under its training step."""
        line = {
            "step": step,
            "validation_loss": loss,
            "validation_perplexity": math.exp(min(loss, 700)),
        }
        sequences = validation.sequences
        documents = sequences.documents.data.fast_gather(np.unique(sequences.index.document))
        num_bytes = np.sum(documents["num_bytes"])  # of text; conversations have none
        if num_bytes:
            line["validation_bits_per_byte"] = (
                loss / math.log(2) * sequences.num_targets.sum() / num_bytes
            )
        self.log(line)
        say(f"step {step}: validation loss {loss:.4f}")

    def finish(self, step: int, checkpoint: Path, next_command: str, read=read_checkpoint):
        """End the run: rank 0 writes hf/ and says what is next. `read` is that of `export`."""
        if step < self.config.steps:
            return say(
                f"stopped after step {step}, saved in {checkpoint}; "
                "rerun the same command with --resume auto to continue"
            )
        if self.rank:
            return
        with refusing(f"cannot write {self.directory}/hf ({checkpoint} is complete)"):
            export(checkpoint, self.directory / "hf", read=read)
        say(
            f"files: {self.config.run_dir}/metrics.jsonl, and hf/ beside it for transformers\n"
            f"try:   python sample.py {self.config.run_dir}\n"
            f"next:  {next_command.format(run_dir=self.config.run_dir)}"
        )


def refuse_non_finite(step: int, loss: float, grad_norm: float):
    """End the run if the loss or the gradient norm is not finite. Call it before the update."""
    if not math.isfinite(loss + grad_norm):
        Run.current.checkpoints.wait()  # one that is being written is still good
        refuse(
            f"step {step}: the loss ({loss}) or the gradient norm ({grad_norm}) is not finite; "
            "lower --learning_rate, or look at the data of this step"
        )


def command_line():
    with refusing("python common.py export CHECKPOINT OUT [bfloat16]"):
        checkpoint, out, *dtype = sys.argv[2:]
        export(Path(checkpoint), Path(out), *dtype, hub_names=True)


if __name__ == "__main__":
    launch(command_line)
