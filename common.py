"""Data and checkpoint helpers of the training scripts, and the plumbing of a run.

Nothing here knows a parallel strategy, an optimizer or a training loop. Those are in the scripts.
Data flows one way, and the sections below follow it:

    corpus -> tokens of whole documents (cached on disk) -> sequences -> batch plan (a pure function
    of lengths, seed and epoch) -> micro-batch

Functions that read data take a data-parallel rank and size: which part of each global batch this
rank trains on, and in how many parts it is split.

    python common.py export CHECKPOINT OUT    write a checkpoint's weights in Hugging Face form

NOTE: the `.metadata` file of a checkpoint is a pickle, so loading a checkpoint can run any code.
Load only checkpoints that you trust, and share the Hugging Face form (safetensors) instead.
"""

import ast
import base64
import bisect
import collections
import contextlib
import ctypes
import dataclasses
import datetime
import fcntl
import functools
import glob
import inspect
import itertools
import json
import math
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import datasets
import filelock
import huggingface_hub
import jinja2
import numpy as np
import tiktoken
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
import xxhash
from pydantic import Field, PositiveInt, ValidationError
from pydantic.dataclasses import dataclass
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from transformers.convert_slow_tokenizer import TikTokenConverter

Tokenizer = transformers.PreTrainedTokenizerFast
transformers.logging.disable_progress_bar()  # of loading and saving weights
IGNORED = -100  # label of a position that is not in the loss, as in torch's cross entropy


# --- Flags ----------------------------------------------------------------------------------------


def flag(default: Any, help: str) -> Any:
    """Declare a command-line flag: a dataclass field with a default and a help text."""
    return field(default=default, metadata={"help": help})


@dataclass
class DataFlags:
    """data"""

    tokenizer: str = flag("bytes", "bytes, a tiktoken encoding (gpt2), or a directory or hub id")
    dataset: str = flag(
        "stdlib", "stdlib, a hub id, or a .parquet .jsonl .csv .txt file, glob or URL"
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
        1024, "token positions of one forward pass of one rank, padding included"
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = flag(0, "seed of initial weights and data order")


@dataclass
class CheckpointFlags(DataFlags):
    """checkpoints"""

    checkpoint_every: PositiveInt = flag(100, "steps between checkpoints; the last step saves too")
    keep_checkpoints: PositiveInt = flag(
        2,
        "how many of the newest checkpoints to keep. The best one is kept too, by the validations "
        "that fall on the step of a checkpoint",
    )
    checkpoint_style: Literal["stateful", "separate"] = flag(
        "separate",
        "stateful: model and optimizer in one Stateful object. separate: a directory for each. "
        "Every script reads both",
    )
    async_checkpoint: bool = flag(False, "continue training while a checkpoint is written")
    resume: str = flag(
        "auto", "auto, never, or a checkpoint's path (it holds a pickle: use only trusted ones)"
    )


@dataclass
class RunFlags(CheckpointFlags):
    """the run"""

    steps: Annotated[int, Field(ge=0, lt=10**8)] = flag(
        550, "optimizer steps of the whole run; 0 prepares the data and exits"
    )
    run_dir: str = flag(f"runs/{Path(sys.argv[0]).stem}", "directory for everything a run writes")
    timeout_minutes: Annotated[float, Field(ge=0.05)] = flag(
        10.0, "longest wait for another rank, in minutes"
    )
    trace_steps: list[PositiveInt] | None = flag(None, "first and last step to profile")
    wandb_project: str | None = flag(None, "also log to this Weights & Biases project")

    def __post_init__(self) -> None:
        multiple = self.pad_to_multiple_of
        if math.ceil(self.max_length / multiple) * multiple > self.micro_batch_tokens:
            raise ValueError("--micro_batch_tokens cannot hold a padded sequence of --max_length")
        steps = self.trace_steps
        if steps and not (len(steps) == 2 and steps[0] <= steps[1] <= self.steps):
            raise ValueError("--trace_steps needs the first and the last step, within the run")


def check_global_batch(config: Any, dp_size: int) -> None:
    """Raise ValueError unless all data-parallel ranks get equally many micro-batches."""
    unit = config.micro_batch_tokens * dp_size
    if config.global_batch_tokens % unit:
        larger = (config.global_batch_tokens // unit + 1) * unit
        raise ValueError(
            f"--global_batch_tokens {config.global_batch_tokens} is not a multiple of {unit} "
            f"(--micro_batch_tokens x {dp_size} data-parallel ranks); use {larger}"
        )


def parse_config(config_class: type) -> Any:
    """Parse the command line into the script's Config."""
    parser = transformers.HfArgumentParser(config_class, allow_abbrev=False)
    parser.error = refuse
    for declaring in config_class.__mro__[:-1]:  # group --help by the class that declares a flag
        group = parser.add_argument_group(declaring.__doc__)
        for option in parser._optionals._group_actions[:]:
            if option.dest in inspect.get_annotations(declaring):
                parser._optionals._group_actions.remove(option)
                group._group_actions.append(option)
    try:
        config, rest = parser.parse_args_into_dataclasses(return_remaining_strings=True)
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:  # raised by `__post_init__`
            refuse(str(first["ctx"]["error"]))
        refuse(f"--{first['loc'][0]} {first['input']}: {first['msg']}")
    if rest:
        refuse(f"unknown flag or word {rest[0]}; --help lists the flags, and globs need quotes")
    if config.init_from:
        config.init_from = fetch_weights(config.init_from)
        # Weights bring their architecture and tokenizer, unless the command line sets others.
        given = {word[2:].split("=")[0] for word in sys.argv[1:] if word.startswith("--")}
        for name in {"model", "tokenizer"} - given:
            setattr(config, name, config.init_from)
    return config


# --- Errors and endings ---------------------------------------------------------------------------


class Refusal(Exception):
    """Ends the program with one line on stderr and an exit code, see `launch`."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


def refuse(message: str, code: int = 2) -> NoReturn:
    """End with the line `error: message`; code 2 is for bad input, 1 for a failure in training."""
    raise Refusal(" ".join(message.split()), code)


@contextlib.contextmanager
def refusing(what: str, code: int = 2) -> Iterator[None]:
    """End with one line, as `refuse`, if a library call in here fails, quoting its reason."""
    try:
        yield
    except Refusal:
        raise
    except (Exception, dcp.CheckpointException) as error:  # DCP's is not an Exception
        if lost_connection(error) and dist.is_initialized():
            raise
        if isinstance(error, dcp.CheckpointException):
            error, _ = list(error.failures.values())[0]  # of one rank
        while error.__cause__ and not isinstance(error, OSError):
            error = error.__cause__
        refuse(f"{what}: {str(error)[:400] or 'nothing is there'}", code)


def lost_connection(error: BaseException) -> bool:
    """Return whether a collective failed because of another rank: it exited, or it is too slow."""
    # A web request of wandb or of a reward can time out too, with errors of other types.
    from_torch = isinstance(error, RuntimeError | dcp.CheckpointException)
    text = f"{error} {error.__cause__}".lower()  # pipelines wrap the error
    return from_torch and ("connection" in text or "timed out" in text)


def launch(main: Callable) -> None:
    """Run a script's `main`. On an error, print it and exit at once.

    `os._exit`, because a regular shutdown with live communication threads can hang or abort.
    """
    os.environ |= {
        # Without torchrun: one rank
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        # Sequences of many lengths fragment a GPU's memory; expandable segments avoid that. PyTorch
        # reads this before its first allocation.
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        **os.environ,
    }
    sys.stdout.reconfigure(errors="backslashreplace")  # for terminals that are not UTF-8
    rank = f"rank {os.environ['RANK']}"
    try:
        end_with_launcher()
        return main()
    except Refusal as refusal:
        message, code = f"error: {refusal}", refusal.code
        cause = os.environ["LOCAL_RANK"] == "0"  # one of a node's ranks prints it
    except KeyboardInterrupt:
        message, code, cause = f"error: {rank} was interrupted before its first step", 1, True
    except (Exception, dcp.CheckpointException) as error:  # DCP's is not an Exception
        message, code, cause = f"{rank} failed:\n{traceback.format_exc()}", 1, True
        if lost_connection(error):
            reason = "lost another rank, or waited for it longer than --timeout_minutes"
            message, cause = f"{rank} {reason}: {' '.join(str(error).split())[:400]}", False
    # torchrun kills every rank as soon as one exits, so the rank with the root cause prints first
    # and the others wait five seconds.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if not cause:
        time.sleep(5)
    print(message, file=sys.stderr, flush=True)
    say("", end="")  # flushes stdout
    os._exit(code)


def end_with_launcher() -> None:
    """Ask the kernel to send this rank SIGTERM when torchrun dies (Linux only).

    Otherwise the ranks of a killed torchrun would train on unseen, or wait for each other.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1: PR_SET_PDEATHSIG
    # torchrun may have died before, while this rank imported torch. The parent is then what adopts
    # orphans. It is neither a Python program, nor a wrapper with torchrun's environment.
    parent = Path(f"/proc/{os.getppid()}")
    alive = b"python" in (parent / "cmdline").read_bytes()
    with contextlib.suppress(PermissionError):  # init's environment is not readable
        alive |= b"TORCHELASTIC_RUN_ID" in (parent / "environ").read_bytes()
    if not alive:
        refuse("the launcher of this rank has died", code=1)


def say(text: str, end: str = "\n") -> None:
    """Print on rank 0. A closed pipe (`| head -1`) or a full disk does not end the run."""
    if os.environ.get("RANK", "0") != "0":
        return
    try:
        print(text, end=end, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# --- Tokenizers -----------------------------------------------------------------------------------

ENCODINGS = ["bytes", *tiktoken.list_encoding_names()]


def fingerprint(*values: Any) -> str:
    """Return a 128-bit hash of the values' JSON: a cache key, or a check for changes."""
    return xxhash.xxh3_128_hexdigest(json.dumps(values, sort_keys=True, default=str).encode())


@functools.cache
def tiktoken_encoding(name: str) -> tiktoken.Encoding:
    """Return a tiktoken encoding; `bytes` has the 256 byte values and an end-of-text token."""
    if name == "bytes":
        return tiktoken.Encoding(
            name,
            pat_str=r"[\s\S]",
            mergeable_ranks={bytes([value]): value for value in range(256)},
            special_tokens={"<|endoftext|>": 256},
        )
    with refusing(f"--tokenizer {name} (without network, TIKTOKEN_CACHE_DIR must hold its files)"):
        return tiktoken.get_encoding(name)


def to_transformers(encoding: tiktoken.Encoding) -> Tokenizer:
    """Return the transformers tokenizer that gives the same ids as a tiktoken encoding."""
    ranks = encoding._mergeable_ranks
    special = {index: name for name, index in encoding._special_tokens.items()}
    if (
        sorted(ranks.values()) != list(range(len(ranks)))
        or "<|endoftext|>" not in encoding._special_tokens
    ):
        refuse(f"--tokenizer {encoding.name} has gaps between its ids, or no end-of-text token")
    # Added tokens get consecutive ids, so name the unused ids (cl100k_base has some) too.
    added_ids = range(len(ranks), encoding.n_vocab)
    added = [special.get(index, f"<|unused_{index}|>") for index in added_ids]
    # tiktoken's a{1,3}+ is possessive. In the regexes of tokenizers it is a repetition.
    pattern = re.sub(r"(\\p\{N\}\{\d+,\d+\})\+", r"(?>\1)", encoding._pat_str)
    with tempfile.NamedTemporaryFile(suffix=".tiktoken") as file:
        for token, rank in ranks.items():
            file.write(base64.b64encode(token) + b" %d\n" % rank)
        file.flush()
        converter = TikTokenConverter(file.name, pattern, extra_special_tokens=added)
        converted = converter.converted()
    return Tokenizer(
        tokenizer_object=converted,
        eos_token=special[encoding.eot_token],
        name_or_path=encoding.name,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,  # as in training: spelled-out special tokens are text
    )


@functools.cache
def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer of --tokenizer: bytes, a tiktoken encoding, or a directory or hub id."""
    if name in ENCODINGS:
        return to_transformers(tiktoken_encoding(name))
    with refusing(f"tokenizer {name} is not bytes, a tiktoken encoding or a Hugging Face one"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    if not tokenizer.is_fast or tokenizer.eos_token_id is None:
        refuse(f"--tokenizer {name} lacks an end-of-text (eos) token or a fast implementation")
    tokenizer.backend_tokenizer.no_truncation()  # a trainer may have left them on
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def encode_text(text: str, tokenizer: Tokenizer) -> np.ndarray:
    """Return the ids of a text, uint32. Special tokens that it spells out stay plain text."""
    name = tokenizer.name_or_path
    if name in ENCODINGS:  # four times as fast as its conversion
        return tiktoken_encoding(name).encode_to_numpy(text, disallowed_special=())
    backend = tokenizer.backend_tokenizer
    backend.encode_special_tokens = True
    ids = backend.encode(text, add_special_tokens=False).ids
    backend.encode_special_tokens = False
    return np.array(ids, np.uint32)


# --- Corpus: anything that `datasets` reads -------------------------------------------------------


def source_of(function: Callable) -> str:
    """Return the source of a function's module and of this one, for cache keys.

    Because datasets identifies a function of a module by its name alone.
    """
    return sys.version + inspect.getsource(inspect.getmodule(function)) + Path(__file__).read_text()


READERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".txt": "text", ".csv": "csv"}


def standard_library_files() -> list[str]:
    """Return the source files of Python's standard library, without tests and tables."""
    root = Path(ast.__file__).parent
    skipped = {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "ensurepip"}
    files = sorted(root.rglob("*.py"))
    return [str(file) for file in files if skipped.isdisjoint(file.relative_to(root).parts)]


def read_python(files: list[str]) -> Iterator[tuple[ast.Module, list[str]]]:
    """Yield the syntax tree and the lines of each source file."""
    warnings.simplefilter("ignore", SyntaxWarning)
    for file in files:
        source = Path(file).read_text(encoding="utf-8", errors="replace")
        yield ast.parse(source), source.splitlines(keepends=True)


def standard_library_documents(files: list[str], version: str) -> Iterator[dict[str, str]]:
    """Yield each top-level function or class as a document; `version` is for the cache key."""
    for tree, lines in read_python(files):
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                yield {"text": "".join(lines[first - 1 : node.end_lineno])}


EMBEDDED = {"stdlib": standard_library_documents}  # fine-tuning adds its own


def open_dataset(name: str, configuration: str | None, split: str) -> datasets.Dataset:
    """Open --dataset: an embedded corpus, a file, glob or URL, or a hub id."""
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # our error line says what matters
    if os.environ.get("LOCAL_RANK", "0") != "0" or not sys.stderr.isatty():
        datasets.disable_progress_bars()
    if embedded := EMBEDDED.get(name):
        arguments = {"files": standard_library_files(), "version": source_of(embedded)}
        return datasets.Dataset.from_generator(embedded, gen_kwargs=arguments)
    known_suffixes = [suffix for suffix in Path(name).suffixes if suffix in READERS]
    if not known_suffixes:
        return datasets.load_dataset(name, configuration, split=split)
    return datasets.load_dataset(
        READERS[known_suffixes[-1]],  # the last one counts: a.txt.jsonl.gz is JSON
        data_files=glob.escape(name) if Path(name).is_file() else name,  # it may contain [1]
        split=split,
        download_config=datasets.DownloadConfig(),  # downloads a file again that has changed
    )


# --- Documents: tokens on disk --------------------------------------------------------------------

COLUMNS = {
    "tokens": datasets.List(datasets.Value("uint32")),
    "in_loss": datasets.List(datasets.Value("bool")),
    "lengths": datasets.Value("int64"),
    "num_targets": datasets.Value("int64"),
    "bytes_per_token": datasets.Value("float32"),
    "digest": datasets.Value("int64"),
    "left_out": datasets.Value("string"),
}


class Sequences:
    """Token sequences: views of tokenized documents, which are memory-mapped from disk.

    Args:
        documents: a dataset of COLUMNS.
        index: a record array with one entry per sequence: document and start (where it begins),
            lengths (predictions, one fewer than tokens), num_targets (predictions in the loss),
            digest (a hash of the document), bytes_per_token.
    """

    def __init__(self, documents: datasets.Dataset, index: np.recarray):
        self.documents = documents
        self.index = index
        self.lengths = index.lengths
        self.num_targets = index.num_targets

    def read(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens (uint32) and loss mask (bool) of sequence i, [length + 1]."""
        begin = self.index.start[i]
        part = slice(begin, begin + self.lengths[i] + 1)
        document = self.documents[int(self.index.document[i])]
        tokens = document["tokens"][part]
        return tokens, document["in_loss"][part] if len(document["in_loss"]) else tokens >= 0

    def split(self) -> tuple["Sequences", "Sequences"]:
        """Return the documents for training and for validation.

        Validation gets the 2 % with the smallest hashes (1 to 5,000 documents). So the split is the
        same in every run, and equal documents are on the same side.
        """
        hashes = np.unique(self.index.digest)
        if len(hashes) < 2:
            refuse("--dataset has fewer than two different documents with target tokens")
        held_out = self.index.digest <= hashes[min(max(1, len(hashes) // 50), 5000) - 1]
        training, validation = self.index[~held_out], self.index[held_out]
        return Sequences(self.documents, training), Sequences(self.documents, validation)

    def sequences(self, max_length: int, truncate: bool = False) -> "Sequences":
        """Return pieces of at most `max_length`; with `truncate`, only each document's first.

        Splitting loses no prediction: the last token of a piece is the first of the next one.
        """
        pieces = -(-self.lengths // max_length)  # rounded up
        index = np.repeat(self.index, pieces)
        first_piece = np.repeat(np.cumsum(pieces) - pieces, pieces)
        index.start = (np.arange(len(index)) - first_piece) * max_length
        index.lengths = np.minimum(index.lengths - index.start, max_length)
        if not truncate:
            index.num_targets = index.lengths
            return Sequences(self.documents, index)
        found = Sequences(self.documents, index[index.start == 0])
        cut = np.flatnonzero(pieces > 1)
        for i in cut.tolist():
            found.num_targets[i] = found.read(i)[1][1:].sum()
        kept = found.index[found.num_targets > 0]
        say(
            f"{len(cut):,} of {len(pieces):,} documents are cut to {max_length:,} tokens; "
            f"{len(pieces) - len(kept):,} of these are left out, because no target token remains"
        )
        return Sequences(self.documents, kept)

    def prompt(self) -> np.ndarray:
        """Return the first tokens of the first document, or those up to the assistant's turn."""
        tokens, in_loss = self.read(0)
        answer = int(in_loss[1:].argmax())  # 0 in text
        return tokens[: answer + 1 if answer else 64]


def load_documents(
    config: DataFlags, columns: list[str], function: Callable, tokenizer: Tokenizer
) -> Sequences:
    """Tokenize --dataset with several processes, once for all runs and all --max_length.

    Args:
        columns: those to read if they are there. One of the first four has to be.
        function: a module-level function as `tokenize_text`.
    """
    with refusing(f"--dataset {config.dataset} cannot be read"):
        corpus = open_dataset(config.dataset, config.dataset_config, config.dataset_split)
        present = [column for column in columns if column in corpus.column_names]
        if not set(columns[:4]) & set(present):
            wanted = " or ".join(columns[:4])
            refuse(f"--dataset {config.dataset} has no column {wanted}: {corpus.column_names}")
        corpus = corpus.select_columns(present)
        # NOTE: without a key of our own, datasets would hash the function. One that it cannot hash
        # gets a new key each time, so every rank and every run would tokenize again.
        key = fingerprint(
            corpus._fingerprint,
            source_of(function),
            columns,
            tokenizer.special_tokens_map,
            tokenizer.chat_template,
            tokenizer.backend_tokenizer.to_str(),
        )
        # datasets forks these. Python 3.12 and later warn that this process has threads, but hide
        # it because a library forks. They are tqdm's and Arrow's; tokenizing does not use them.
        processes = min(available_cpus(), len(corpus) // 1000)
        with prepare_in_turn(key):
            documents = corpus.map(
                tokenize,
                remove_columns=present,
                features=datasets.Features(COLUMNS),
                fn_kwargs={"function": function, "tokenizer": tokenizer},
                new_fingerprint=key,
                num_proc=processes if processes > 1 else None,
            ).with_format("numpy")
    for reason, count in collections.Counter(documents.data["left_out"].to_pylist()).items():
        if reason:
            say(f"{count:,} documents are left out, because they {reason}")
    names = ["lengths", "num_targets", "digest", "bytes_per_token"]
    columns = [documents.data[name].to_numpy() for name in names]
    document = np.arange(len(documents))
    columns += [document, np.zeros_like(document)]
    index = np.rec.fromarrays(columns, names=[*names, "document", "start"])
    return Sequences(documents, index[index.num_targets > 0])


def available_cpus() -> int:
    """Return how many CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()


@contextlib.contextmanager
def prepare_in_turn(key: str) -> Iterator[None]:
    """Lock work that every rank starts, unless its result, named by `key`, is already cached.

    The first rank of a node does the work, and the others wait and read the cache. This happens
    before the ranks meet, because the time that a collective may take is limited.
    """
    folder = Path(datasets.config.HF_DATASETS_CACHE, "prepared")
    folder.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder / "lock")
    if not (folder / key).exists():
        try:
            lock.acquire(timeout=10)
        except filelock.Timeout:
            say(f"waiting for another process, which prepares data in {folder}")
            lock.acquire()
    try:
        yield
        (folder / key).touch()
    finally:
        lock.release()


def tokenize(row: dict[str, Any], function: Callable, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return COLUMNS of a document."""
    tokens, in_loss, num_bytes, left_out = [], [], 0.0, ""
    try:
        tokens, in_loss, num_bytes = function(row, tokenizer)
    except (ValueError, jinja2.TemplateError) as problem:
        left_out = str(problem)
    length = max(0, len(tokens) - 1)
    return {
        "tokens": np.asarray(tokens, np.uint32),
        "in_loss": np.asarray(in_loss, bool),
        "lengths": length,
        "num_targets": sum(in_loss[1:]) if len(in_loss) else length,
        "bytes_per_token": num_bytes / max(1, length),
        "digest": int(fingerprint(*row.values())[:16], 16) >> 1,  # 63 bits
        "left_out": left_out,
    }


def tokenize_text(
    row: dict[str, str], tokenizer: Tokenizer
) -> tuple[np.ndarray, Sequence[bool], float]:
    """Tokenize a text and its end-of-text token.

    Returns:
        Tokens (uint32), loss mask (empty: every prediction is in the loss), bytes of the text.

    Raises:
        ValueError: why the document is left out.
    """
    [text] = row.values()
    if not isinstance(text, str) or not text:
        raise ValueError("hold no text")
    tokens = np.append(encode_text(text, tokenizer), np.uint32(tokenizer.eos_token_id))
    return tokens, [], float(len(text.encode()))


# --- Batch plan: which sequences form each micro-batch of an epoch --------------------------------


def bucket(window: np.ndarray, lengths: np.ndarray, budget: int) -> Iterator[np.ndarray]:
    """Split a sorted window into micro-batches with sequences x longest <= budget."""
    start = 0
    while start < len(window):
        stop = start + budget // int(lengths[window[start]])
        yield window[start:stop]
        start = stop


def pack(window: np.ndarray, lengths: np.ndarray, budget: int) -> Iterator[np.ndarray]:
    """Pack a sorted window into micro-batches by best-fit decreasing (arXiv 2404.10830).

    Each sequence, the longest first, goes into the fullest micro-batch that has room for it.
    """
    packed: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # free positions and index of each micro-batch, sorted
    for sequence, length in zip(window.tolist(), lengths[window].tolist()):
        fullest = bisect.bisect_left(spaces, (length, 0))
        if fullest == len(spaces):  # no micro-batch has room
            spaces.append((budget, len(packed)))
            packed.append([])
        space, index = spaces.pop(fullest)
        packed[index].append(sequence)
        bisect.insort(spaces, (space - length, index))
    yield from map(np.array, packed)


def plan_epoch(
    lengths: np.ndarray, batching: str, budget: int, multiple: int, seed: int, epoch: int
) -> list[np.ndarray]:
    """Return the micro-batches of an epoch, each an array of indices into `lengths`.

    Micro-batches of all lengths are shuffled together. One length after the other would be an
    accidental curriculum.

    Args:
        lengths: int64 [sequences].
        batching: `bucketed` (lengths are padded to a multiple of `multiple`) or `packed`.
        budget: token positions of a micro-batch.

    Raises:
        ValueError: a sequence is longer than the budget.
    """
    rng = np.random.default_rng([seed, epoch])
    fill = pack
    if batching == "bucketed":
        fill = bucket
        lengths = -(-lengths // multiple) * multiple  # rounded up
    if lengths.max() > budget:
        raise ValueError(f"a sequence of {lengths.max()} exceeds a micro-batch of {budget}")
    micro_batches: list[np.ndarray] = []
    # Sort within windows of about 256 micro-batches. Neighbors have similar lengths then, and each
    # epoch has other neighbors.
    order = rng.permutation(len(lengths))
    window_size = math.ceil(256 * budget / lengths.mean())
    for begin in range(0, len(order), window_size):
        window = order[begin : begin + window_size]
        longest_first = np.argsort(-lengths[window], kind="stable")
        micro_batches += fill(window[longest_first], lengths, budget)
    return [micro_batches[i] for i in rng.permutation(len(micro_batches))]


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
        started, data_seconds: when the training loop asked for it, and how long it waited.
        measured: what a strategy measures in the step, for metrics.jsonl.
    """

    micro_batches: list[dict[str, Any]]
    num_targets: int
    num_tokens: int
    squared_lengths: int
    padding_fraction: float
    started: float = 0.0
    data_seconds: float = 0.0
    measured: dict[str, float] = field(default_factory=dict)


class Batches:
    """The endless stream of micro-batches: epoch after epoch, each with its own plan.

    With G = global / micro batch tokens, step s trains on micro-batches s * G to (s + 1) * G - 1.
    So the step number is the position in the data, and what a step holds does not depend on the
    number of ranks.

    Args:
        sequences: `Sequences`, or an object with the same `lengths`, `num_targets` and `read`.
        padding_id: token id of padding. It has no label, and no token attends to it.
    """

    def __init__(self, sequences: Any, config: DataFlags, padding_id: int):
        self.sequences = sequences
        self.config = config
        self.packed = config.batching == "packed"
        self.padding_id = padding_id
        self.plan = functools.partial(  # of an epoch
            plan_epoch,
            sequences.lengths,
            config.batching,
            config.micro_batch_tokens,
            config.pad_to_multiple_of,
            config.seed,
        )

    def shape(self, indices: np.ndarray) -> tuple[int, int]:
        """Return the number of sequences and the padded length of a micro-batch."""
        budget, multiple = self.config.micro_batch_tokens, self.config.pad_to_multiple_of
        if self.packed:
            return 1, budget
        length = math.ceil(self.sequences.lengths[indices].max() / multiple) * multiple
        # Compiled blocks need few shapes, so fill up with empty sequences: one shape per length.
        return len(indices) if multiple == 1 else budget // length, length

    def collate(self, indices: np.ndarray) -> dict[str, Any]:
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
        inputs = np.full(height * width, self.padding_id)
        labels = np.full(height * width, IGNORED)
        ends = [0]
        for i, index in enumerate(indices.tolist()):
            tokens, in_loss = self.sequences.read(index)
            begin = ends[-1] if self.packed else i * width
            ends.append(begin + len(tokens) - 1)
            inputs[begin : ends[-1]] = tokens[:-1]
            labels[begin : ends[-1]] = np.where(in_loss[1:], tokens[1:].astype(int), IGNORED)
        micro_batch: dict[str, Any] = {
            "input_ids": torch.from_numpy(inputs).view(height, width),
            "labels": torch.from_numpy(labels).view(height, width),
        }
        if self.packed:
            longest = self.config.max_length
            # The padding forms documents of its own. Empty ones round the number of documents up
            # to a power of two, so that compiled blocks see few shapes.
            ends += [*range(ends[-1] + longest, width, longest), width]
            ends += [width] * (2 ** math.ceil(math.log2(len(ends))) - len(ends))
            starts = np.repeat(ends[:-1], np.diff(ends))
            micro_batch["position_ids"] = torch.from_numpy(np.arange(width) - starts)[None]
            micro_batch["cu_seq_lens_q"] = torch.tensor(ends, dtype=torch.int32)
            micro_batch["max_length_q"] = longest
        return micro_batch

    def global_batch(
        self, micro_batches: list[np.ndarray], dp_rank: int, dp_size: int
    ) -> GlobalBatch:
        """Collate one rank's share of a step's micro-batches, and count over all of them."""
        indices = np.concatenate(micro_batches)
        lengths = self.sequences.lengths[indices]
        positions = sum(math.prod(self.shape(part)) for part in micro_batches)
        return GlobalBatch(
            [self.collate(part) for part in micro_batches[dp_rank::dp_size]],
            num_targets=int(self.sequences.num_targets[indices].sum()),
            num_tokens=int(lengths.sum()),
            squared_lengths=int((lengths**2).sum()),
            padding_fraction=1 - int(lengths.sum()) / positions,
        )

    def stream(
        self, first_step: int, last_step: int, accumulation: int, dp_rank: int, dp_size: int
    ) -> Iterator[GlobalBatch]:
        """Yield the global batches of the steps [first_step, last_step).

        A thread prepares the next one while the model trains on the current one. `accumulation` is
        the number of micro-batches of a step, over all ranks.
        """
        endless = itertools.chain.from_iterable(map(self.plan, itertools.count()))
        micro_batches = itertools.islice(endless, first_step * accumulation, None)

        def prepare() -> GlobalBatch:
            step = list(itertools.islice(micro_batches, accumulation))
            return self.global_batch(step, dp_rank, dp_size)

        with ThreadPoolExecutor(1) as thread:
            prepared = thread.submit(prepare)
            for _ in range(first_step, last_step):
                started = time.perf_counter()
                batch = prepared.result()
                batch.started = started
                batch.data_seconds = time.perf_counter() - started
                prepared = thread.submit(prepare)
                yield batch

    def evaluation(
        self, num_micro_batches: int, dp_rank: int, dp_size: int
    ) -> Iterator[dict[str, Any]]:
        """Yield this rank's share of the first micro-batches of the stream, within one epoch.

        All ranks get equally many, because FSDP's forward is a collective. If the number does not
        divide, some ranks repeat the last micro-batch without labels.
        """
        plan = self.plan(0)[:num_micro_batches]
        rounds = math.ceil(len(plan) / dp_size)
        for k in range(dp_rank, rounds * dp_size, dp_size):
            micro_batch = self.collate(plan[min(k, len(plan) - 1)])
            if k >= len(plan):
                micro_batch["labels"].fill_(IGNORED)
            yield micro_batch

    def tokens_per_byte(self, num_micro_batches: int) -> float | None:
        """Return target tokens per byte of the text in `evaluation`, None for conversations."""
        part = self.sequences.index[np.concatenate(self.plan(0)[:num_micro_batches])]
        num_bytes = (part.lengths * part.bytes_per_token).sum(dtype=np.float64)
        return part.num_targets.sum() / num_bytes if num_bytes else None


def to_device(micro_batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Copy a micro-batch's tensors to the device, without waiting for the copies."""
    copies = dict(micro_batch)
    for name, value in micro_batch.items():
        if torch.is_tensor(value):
            if device.type == "cuda":
                value = value.pin_memory()  # copies are asynchronous from pinned memory only
            copies[name] = value.to(device, non_blocking=True)
    return copies


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
NEUTRAL_SETTINGS: dict[str, tuple] = {
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "is_causal": (None, True),
    "is_moe": (None, False),  # the routers of Doge mix tokens, so they see later ones
    "logit_scale": (None, 1),
    "logits_scaling": (None, 1),
    "output_router_logits": (None, False),
    "use_bidirectional_attention": (None, False, "vision"),
    "z_loss_coefficient": (None, 0),
}
LENGTH_LIMITS = ["max_position_embeddings", "max_seq_len", "max_target_positions"]


def read_model_config(config: Any, vocabulary_size: int) -> transformers.PreTrainedConfig:
    """Read the config.json of --model (without running code from the hub).

    A model that also sees or hears gives the config of its language model. Refuses models that
    would not train on this data as they should.
    """
    name = f"--model {config.model}"
    with refusing(f"{name} is not built in (see --help) and has no config.json"):
        model_config = transformers.AutoConfig.from_pretrained(
            config.model, trust_remote_code=False
        ).get_text_config()
    types, settings, limits = BUCKETED_TYPES, dict(NEUTRAL_SETTINGS), list(LENGTH_LIMITS)
    if config.batching == "packed":
        types = PACKED_TYPES
        dropouts = [key for key in model_config.to_dict() if re.search("att.*drop", key)]
        settings |= dict.fromkeys(dropouts, (None, 0))
        limits += ["sliding_window", "attention_chunk_size"]
    if model_config.model_type not in types.split():
        refuse(
            f"{name}: type {model_config.model_type} cannot train with {config.batching} batches"
        )
    for setting, neutral in settings.items():
        if getattr(model_config, setting, None) not in neutral:
            refuse(f"{name}: its {setting} is not supported")
    if vocabulary_size > model_config.vocab_size:
        refuse(f"--tokenizer has {vocabulary_size} ids, {name} only {model_config.vocab_size}")
    lengths = {limit: getattr(model_config, limit, None) for limit in limits}
    rotation = getattr(model_config, "rope_parameters", None) or {}
    if rotation.get("rope_type") == "longrope":  # past it, rotations depend on the padded length
        lengths["original_max_position_embeddings"] = rotation["original_max_position_embeddings"]
    for limit, length in lengths.items():
        if config.max_length > (length or math.inf):
            refuse(f"--max_length {config.max_length} exceeds {limit} of {name}")
    vars(model_config).pop("quantization_config", None)  # of the hub's files, not of ours
    return model_config


def freeze_unused(model: torch.nn.Module) -> None:
    """Freeze parameters that no gradient reaches. DDP would wait for their gradients.

    These are the cross attention of decoders that are used without an encoder, and the indexers of
    sparse attention.
    """
    for name, parameter in model.named_parameters():
        if "encoder_attn" in name or "indexer" in name:
            parameter.requires_grad_(False)


def fetch_weights(name: str) -> str:
    """Return the directory of --init_from: itself, the hf/ of a run, or a download from the hub."""
    with refusing(f"--init_from {name[:200]} is neither here nor on the hub"):
        directory = Path(name, "hf") if Path(name, "hf").is_dir() else Path(name)
        if not directory.is_dir():
            directory = huggingface_hub.snapshot_download(
                name,
                allow_patterns=["*.json", "*.jinja", "*.txt", "*.model", "*.safetensors"],
                ignore_patterns="consolidated*",  # Mistral's own format beside the usual one
            )
        directory = Path(directory).absolute()
    if not (directory / "config.json").exists() or not list(directory.glob("*.safetensors")):
        refuse(f"--init_from {name} has no config.json and *.safetensors, nor has its hf/")
    return str(directory)


def load_weights(model: torch.nn.Module, directory: str, skip: Collection[str] = ()) -> None:
    """Fill full or sharded parameters from the safetensors files of a Hugging Face directory.

    Every rank reads only the slices that it holds, and casts them on the way. A collective, because
    a rank of a pipeline holds only some parameters. `skip` are names to leave as they are.
    """
    state_dict = get_model_state_dict(model)
    inner = getattr(model, "module", model)
    # Name of the head -> name of the embedding. Only the embedding is in the files.
    tied = inner._tied_weights_keys if inner.config.tie_word_embeddings else {}
    wanted = {name: state_dict[name] for name in state_dict.keys() - tied.keys() - set(skip)}
    reader = HuggingFaceStorageReader(directory)
    stored = reader.read_metadata().state_dict_metadata.keys()
    # NOTE: DCP would ignore names that only the files have.
    unknown = stored - set().union(*gather(list(state_dict)))
    if unknown:
        convert = (
            "from transformers import AutoModelForCausalLM as M; "
            f"M.from_pretrained('{directory}', dtype='float32')"
            ".save_pretrained('OUT', save_original_format=False)"
        )
        advice = f'experts that are stored one by one need this once: python -c "{convert}"'
        refuse(f"--init_from {directory} has {min(unknown)}, which the model lacks; {advice}")
    with refusing(f"--init_from {directory}"):  # names what is missing or has another shape
        dcp.load(wanted, storage_reader=reader)
    state_dict |= wanted
    for head in tied.keys() & state_dict.keys():
        state_dict[head] = state_dict[tied[head]]
    set_model_state_dict(model, state_dict)


TOKENIZER_CODE = """\
from transformers import PreTrainedTokenizerFast


class Tokenizer(PreTrainedTokenizerFast):
    pass
"""


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Save a tokenizer beside a config.json, so that AutoTokenizer returns it unchanged.

    For some model types AutoTokenizer uses the type's class instead of the one that
    tokenizer_config.json names: for qwen2 a class with its own pre-tokenizer and normalizer. It
    does not if `auto_map` names code. That code runs only if somebody allows it.
    """
    tokenizer.save_pretrained(directory)
    file = directory / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    if settings["tokenizer_class"] == "TokenizersBackend":  # not a class that transformers knows
        settings["auto_map"] = {"AutoTokenizer": [None, "tokenization.Tokenizer"]}
        file.write_text(json.dumps(settings, indent=2) + "\n")
        (directory / "tokenization.py").write_text(TOKENIZER_CODE)


def export(checkpoint: Path, directory: Path) -> None:
    """Write a checkpoint as a directory for AutoModelForCausalLM and AutoTokenizer, on one CPU."""
    with torch.device("meta"):
        model_config = transformers.AutoConfig.from_pretrained(checkpoint / "hf")
        model = transformers.AutoModelForCausalLM.from_config(model_config, dtype=torch.float32)
    model.to_empty(device="cpu").tie_weights()
    state_dict = model.state_dict()
    warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)")
    if (checkpoint / "model").is_dir():
        dcp.load(state_dict, checkpoint_id=checkpoint / "model", no_dist=True)
    else:
        dcp.load({"app": {"model": state_dict}}, checkpoint_id=checkpoint, no_dist=True)
    temporary = directory.with_name(f".{directory.name}.tmp")
    shutil.copytree(checkpoint / "hf", temporary, dirs_exist_ok=True)
    # With the names of the model, not those of older files, because `load_weights` needs these.
    model.save_pretrained(temporary, save_original_format=False)
    shutil.copy(checkpoint / "checkpoint.json", temporary)  # holds the step
    shutil.rmtree(directory, ignore_errors=True)
    temporary.rename(directory)


# --- Checkpoints: directories that are complete or absent -----------------------------------------

# Flags that a resumed run must share with its checkpoint, those of the batch plan.
PLAN = [
    "max_length",
    "pad_to_multiple_of",
    "batching",
    "micro_batch_tokens",
    "global_batch_tokens",
    "seed",
]
# The flags to name if model, tokenizer or documents have changed.
CONTENTS = ["model", "tokenizer", "dataset", "dataset_config", "dataset_split", "text_column"]
STEP = "step_" + 8 * "[0-9]"


class AppState(dcp.stateful.Stateful):
    """Model and optimizer as one object that DCP (torch.distributed.checkpoint) saves and loads.

    Tensors have the model's own parameter names and full shapes, whatever the strategy, so every
    script can load the checkpoints of every other one at any world size.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer):
        self.model = model
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        # NOTE: optimizer.state_dict() is empty before the first step, so a load would have nothing
        # to fill. `get_state_dict` creates the AdamW moments, by a step with a learning rate of 0.
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": {"state": optimizer["state"]}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # The hyper-parameters stay those of the flags, which may have changed.
        _, optimizer = get_state_dict(self.model, self.optimizer)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=optimizer | state_dict["optimizer"],
        )


def parts_of(state_dict: dict[str, Any], style: str) -> dict[str, dict]:
    """Return what DCP writes for a checkpoint style: directory -> state dict."""
    return state_dict if style == "separate" else {".": {"app": state_dict}}


def load_checkpoint(
    directory: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Load a checkpoint of either style; each rank reads what it holds."""
    app = AppState(model, optimizer)
    state_dict = app.state_dict()
    style = "separate" if (directory / "model").is_dir() else "stateful"
    for name, part in parts_of(state_dict, style).items():
        dcp.load(part, checkpoint_id=directory / name)
    app.load_state_dict(state_dict)


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks. A collective."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def read_description(path: Path) -> dict[str, Any]:
    """Return a checkpoint's checkpoint.json. Raises ValueError if it is damaged."""
    try:
        description = json.loads((path / "checkpoint.json").read_text())
        intact = description.pop("sum_of_this_file") == fingerprint(description)
        step = description["progress"]["step"]
        intact &= path.name == f"step_{step:08d}" or not path.match(STEP)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        intact = False
    if not intact:
        raise ValueError("checkpoint.json is missing, damaged or of another step")
    return description


def sum_of(file: Path) -> str:
    """Return a file's xxh3 checksum. torch, DCP and safetensors load flipped bytes silently."""
    return xxhash.xxh3_128_hexdigest(np.memmap(file, np.uint8, "r"))


def damage(path: Path, rank: int = 0, world_size: int = 1) -> str:
    """Return what is wrong with a rank's share of a checkpoint's files, or an empty text."""
    try:
        sums = read_description(path)["sums"]
        for name in sorted(sums)[rank::world_size]:
            if sum_of(path / name) != sums[name]:
                raise ValueError(f"{name} is damaged")
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def read_metrics(run_dir: Path) -> list[tuple[int, bytes]]:
    """Return the step and the bytes of each full line of metrics.jsonl."""
    file = run_dir / "metrics.jsonl"
    with refusing(f"{file} has a line without a step"):
        lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
        return [(int(json.loads(line)["step"]), line) for line in lines if line.endswith(b"\n")]


class Checkpoints:
    """The checkpoints of a run: the newest ones, and the best by validation loss."""

    def __init__(self, run: "Run"):
        self.run = run
        self.directory = run.directory / "checkpoints"
        self.last: Path | None = None
        self.damaged: set[Path] = set()
        self.best = [sys.float_info.max, ""]  # validation loss and name; JSON has no infinity
        # A write runs in its own thread, with its own group: training continues meanwhile, and its
        # collectives must not mix with those of the write.
        self.pending: Future | None = None
        self.group = dist.new_group(backend="gloo", timeout=run.timeout)
        on_gpu = run.device.type == "cuda"
        # A new thread would use GPU 0.
        use_gpu = functools.partial(torch.cuda.set_device, run.device) if on_gpu else None
        self.thread = ThreadPoolExecutor(1, initializer=use_gpu)
        # Copies a state dict to CPU memory. NOTE: it uses the same memory each time, so a copy is
        # valid until the next one.
        options = dcp.staging.StagingOptions(
            use_pinned_memory=on_gpu,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=on_gpu,
        )
        self.stager = dcp.staging.DefaultStager(options)

    def all(self) -> list[Path]:
        """Return those not known to be damaged, newest first (eight digits sort as numbers)."""
        return sorted(set(self.directory.glob(STEP)) - self.damaged, reverse=True)

    def find(self) -> tuple[Path | None, dict[str, Any]]:
        """Return the checkpoint that --resume asks for, and its progress; None to start.

        A collective: each rank verifies a part of a checkpoint's files. Nothing on disk changes.
        """
        with refusing(f"--run_dir {self.run.directory} cannot be read"):
            str(self.run.directory).encode()  # torch and safetensors accept UTF-8 only
            own = gather(self.all())[0]  # one list for all ranks, even if a node sees another one
        resume = self.run.config.resume
        if own and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0:
            resume = "auto"  # a restart by torchrun continues, however the run began
        candidates = own if resume == "auto" else [Path(resume).absolute()]
        for path in candidates if resume != "never" else []:
            problem = "".join(gather(damage(path, self.run.rank, self.run.world_size)))
            if not problem:
                self.last = path
                break
            self.damaged.add(path)
            say(f"{path} is damaged or not a checkpoint: {problem}")
        if self.last is None and candidates and resume != "never":
            refuse(f"--resume {resume}: no undamaged checkpoint; use another --run_dir to start")
        self.refuse_foreign()
        if self.last is None:
            return None, {"step": 0, "tokens": 0}
        say(f"resuming from {self.last}")
        description = read_description(self.last)
        before, now = description["flags"], self.run.facts["flags"]
        another = description["contents"] != self.run.facts["contents"]
        changed = [
            f"--{name} {before.get(name)} (now {now.get(name)})"
            for name in PLAN + CONTENTS * another
            if before.get(name) != now.get(name)
        ]
        if changed or another:
            difference = ", ".join(changed) or "other contents of the same paths"
            advice = "resume with the same, or use only the weights: --init_from, another --run_dir"
            refuse(f"checkpoint {self.last} was written with {difference}; {advice}")
        if (self.directory / description["best"][1]).exists():  # not that of another run
            self.best = description["best"]
        return self.last, description["progress"]

    def refuse_foreign(self) -> None:
        """Refuse a run directory unless it is absent, empty, or the run that this start resumes.

        A run that died before its first checkpoint was complete may start again.
        """
        run_dir, saved = self.run.directory, self.all()
        if saved and self.last and self.last.exists() and self.last.samefile(saved[0]):
            return
        with refusing(f"--run_dir {run_dir} holds files that are not a run's; use another one"):
            names = {path.name for path in run_dir.iterdir()} if run_dir.exists() else set()
            lines = read_metrics(run_dir)
            if not lines and names <= {"metrics.jsonl"}:  # a start that died at once
                return
            flags = json.loads((run_dir / "config.json").read_text())["flags"]
            # An asynchronous checkpoint is complete before the next one begins.
            first = flags["checkpoint_every"] * (1 + flags["async_checkpoint"])
        if saved or "hf" in names or max(lines, default=(0, b""))[0] > first:
            refuse(f"--run_dir {run_dir} holds a run that this start does not resume; use another")

    def refuse_non_finite(self, step: int, measured: dict[str, float]) -> None:
        """End the run if the loss or the gradient norm is not finite, before it is saved."""
        broken = [name for name in ("loss", "grad_norm") if not math.isfinite(measured[name])]
        if broken:
            self.wait()
            good = f"the newest checkpoint is {self.last}" if self.last else "no checkpoint yet"
            advice = "lower --learning_rate, or look at the data of this step"
            refuse(f"step {step}: the {broken[0]} is not finite ({good}); {advice}", code=1)

    def save(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, progress: dict[str, Any]
    ) -> None:
        """Save the current state, each rank its part.

        With --async_checkpoint a failure is raised by the next `save`, or by `wait`.
        """
        # NOTE: first wait, then copy, because the pending write uses the copy's memory.
        self.wait()
        state = AppState(model, optimizer).state_dict()
        in_background = self.run.config.async_checkpoint
        if in_background:
            state = self.stager.stage(state)  # training is about to change the original
        self.pending = self.thread.submit(self.write, state, dict(progress))
        if not in_background:
            self.wait()

    def wait(self) -> None:
        """Wait for the pending write, if there is one."""
        if self.pending is not None:
            self.pending.result()

    def write(self, state: dict[str, Any], progress: dict[str, Any]) -> None:
        """Write to a temporary name, and rename once all ranks are done. A collective."""
        final = self.directory / f"step_{progress['step']:08d}"
        temporary = final.with_suffix(".tmp")
        what = f"{self.last} is intact" if self.last else "there is no other checkpoint"
        with refusing(f"cannot write {final} ({what})", code=1):
            if self.run.rank == 0:
                for leftover in self.directory.glob("step_*.tmp"):
                    remove(leftover)  # of a run that died while writing
                self.run.model_config.save_pretrained(temporary / "hf")
                save_tokenizer(self.run.tokenizer, temporary / "hf")
            dist.barrier(self.group)
            for name, part in parts_of(state, self.run.config.checkpoint_style).items():
                dcp.save(part, checkpoint_id=temporary / name, process_group=self.group)
            # Each rank sums the files that it wrote. Rank 0 wrote those that are not DCP's.
            sums = {}
            for file in temporary.rglob("*"):
                writer = re.match(r"__(\d+)_", file.name)
                if file.is_file() and int(writer[1] if writer else 0) == self.run.rank:
                    sums[str(file.relative_to(temporary))] = sum_of(file)
            sums = functools.reduce(dict.__or__, gather(sums, self.group))
            if self.run.rank == 0:
                if not all((temporary / name).exists() for name in sums):
                    raise ValueError("the ranks do not write to the same directory")
                self.complete(temporary, final, progress, sums)
        self.last = final

    def complete(
        self, temporary: Path, final: Path, progress: dict[str, Any], sums: dict[str, str]
    ) -> None:
        """Give a checkpoint that all ranks have written its name, and remove old ones."""
        loss = progress.get("validation_loss", math.inf)
        if loss < self.best[0]:
            self.best = [loss, final.name]
        description = {"progress": progress, "best": self.best, **self.run.facts, "sums": sums}
        description["sum_of_this_file"] = fingerprint(description)
        (temporary / "checkpoint.json").write_text(json.dumps(description, indent=2) + "\n")
        # Everything has to be on the disk first, so that the checkpoint is complete or absent even
        # after a power failure.
        os.sync()
        shutil.rmtree(final, ignore_errors=True)  # a damaged one that `find` skipped
        temporary.rename(final)
        os.sync()
        self.damaged.discard(final)
        for path in self.all()[self.run.config.keep_checkpoints :]:
            if path.name != self.best[1]:
                # Rename first, so that no half of it is left under its name.
                remove(path.rename(path.with_suffix(".tmp")))


def remove(directory: Path) -> None:
    """Remove a directory, or a link to one. A failure is only printed: nothing depends on it."""
    try:
        directory.unlink() if directory.is_symlink() else shutil.rmtree(directory)
    except OSError as error:
        say(f"{directory} cannot be removed: {error}")


# --- A run: its directory, metrics and progress ---------------------------------------------------

# Dense bf16 FLOP/s from the makers' data sheets (half of what they quote with sparsity), by the
# words of a GPU's name. The first entry whose words are all there counts.
PEAK_FLOPS = {
    "Laptop": None,  # slower than the cards they are named after
    "4090 D": None,
    "GB200": 2500e12,
    "B200": 2250e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10G": 70e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


def peak_flops(name: str) -> float | None:
    """Return the peak of a GPU by its CUDA name, None if it is not known."""
    words = set(name.replace("-", " ").split())
    return next((PEAK_FLOPS[key] for key in PEAK_FLOPS if words.issuperset(key.split())), None)


def step_flops(model: transformers.PreTrainedModel) -> Callable[[GlobalBatch], int]:
    """Return a function for the FLOPs of forward and backward of a step, for the MFU.

    NOTE: call it before the model is parallelized. A stage or a shard has fewer parameters.

    As in PaLM (arXiv 2204.02311, appendix B): 6 per parameter and token, in the head per parameter
    and target token, and 12 x heads x head size x length per token and layer for attention.
    Recomputation and padding do not count.
    """
    config = model.config
    in_head = model.get_output_embeddings().weight.numel()
    in_blocks = model.num_parameters() - in_head
    if not config.tie_word_embeddings:
        in_blocks -= model.get_input_embeddings().weight.numel()  # a look-up, not a matmul
    for name, parameter in model.named_parameters():
        if ".experts." in name and parameter.ndim == 3:  # [experts, ...]: a token uses some
            used = getattr(config, "num_experts_per_tok", None) or config.moe_topk
            in_blocks -= parameter[0].numel() * (len(parameter) - used)
    try:
        heads = config.num_attention_heads
        head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
        width = config.num_hidden_layers * heads * head_size
    except (AttributeError, RuntimeError):  # no attention, or heads of several sizes
        width = 0

    def flops(batch: GlobalBatch) -> int:
        matmuls = in_blocks * batch.num_tokens + in_head * batch.num_targets
        return 6 * matmuls + 12 * width * batch.squared_lengths

    return flops


class Run:
    """A run's directory, metrics, terminal output and Weights & Biases. Rank 0 writes.

    Every rank creates one. It changes nothing in the directory until `begin`, which locks it.
    `facts` is what is recorded of the run beside its metrics.
    """

    def __init__(
        self,
        config: Any,
        model: transformers.PreTrainedModel,
        tokenizer: Tokenizer,
        documents: Sequences,
        device: torch.device,
    ):
        self.config = config
        self.directory = Path(config.run_dir).absolute()
        self.timeout = datetime.timedelta(minutes=config.timeout_minutes)
        self.model_config = model.config
        self.tokenizer = tokenizer
        self.device = device
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.flops = step_flops(model)
        self.wandb = None
        self.profiler = None
        self.stop_requested = 0  # signals so far
        # What the run trains and on what, by which a resume knows its own checkpoints.
        architecture = model.config.to_diff_dict()
        for changing in ("_name_or_path", "transformers_version", "dtype"):
            architecture.pop(changing, None)
        spelling = [tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template]
        data = xxhash.xxh3_128_hexdigest(documents.index.digest ^ documents.lengths)
        self.facts = {
            "flags": vars(config),
            "contents": fingerprint(architecture, spelling, data),
            "parameters": model.num_parameters(),
            "world_size": self.world_size,
            "script": Path(sys.argv[0]).name,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        every = gather(vars(config) | {"model, tokenizer or data": self.facts["contents"]})
        for rank, given in enumerate(every):
            for name, value in every[0].items():
                if given.get(name) != value:
                    refuse(f"rank {rank} has {name} {given.get(name)}, but rank 0 has {value}")

    def begin(self, resumed: Path | None, step: int) -> None:
        """Start training after `step`: all checks have passed.

        Rank 0 locks the directory, drops the lines of metrics.jsonl after `step`, and writes
        config.json. From here on SIGTERM and SIGINT only request a stop, see `should_stop`.
        """
        self.first_step = step
        self.started = self.printed = time.perf_counter()
        for group in dist.distributed_c10d._world.pg_map:  # those of a mesh have torch's default
            group.set_timeout(self.timeout)
        stops = [signal.SIGTERM, signal.SIGINT]
        for number in stops:
            signal.signal(number, self.request_stop)
            # Forked children (of a dataset or a reward) have to die of it.
            os.register_at_fork(after_in_child=functools.partial(signal.signal, number, 0))
        # Also of a signal that arrives before the line above: it waits until then.
        unblock = functools.partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, stops)
        block = functools.partial(signal.pthread_sigmask, signal.SIG_BLOCK, stops)
        os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=unblock)
        if self.rank == 0:
            with refusing(f"--run_dir {self.directory} cannot be written or is in use"):
                self.open_files(resumed, step)
            if self.config.wandb_project:
                with refusing("--wandb_project"):
                    self.begin_wandb()
        self.trace(step)
        dist.barrier()

    def open_files(self, resumed: Path | None, step: int) -> None:
        """Lock the directory, write config.json, and drop the metrics after `step`."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.metrics = open(self.directory / "metrics.jsonl", "a+b", buffering=0)
        # This lock ends with the process, however it dies. Forks do not inherit it.
        fcntl.lockf(self.metrics, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lines = read_metrics(self.directory) if resumed else []
        (self.directory / "config.json").write_text(json.dumps(self.facts, indent=2) + "\n")
        self.metrics.truncate(0)
        self.metrics.write(b"".join(line for of, line in lines if of <= step))

    def begin_wandb(self) -> None:
        import wandb

        self.wandb = wandb.init(
            project=self.config.wandb_project,
            # One id for the life of the directory, so that a resumed run continues in wandb too.
            id=fingerprint(os.fstat(self.metrics.fileno()).st_ino, self.config.run_dir),
            dir=self.directory,
            config=self.facts,
            resume="allow",
        )
        # wandb's own step has to increase, but a resumed run repeats some steps.
        self.wandb.define_metric("*", step_metric="step")

    def request_stop(self, *_: Any) -> None:
        self.stop_requested += 1

    def should_stop(self) -> bool:
        """Return whether any rank received a signal. A collective, so that all stop together."""
        requested = torch.tensor(self.stop_requested)
        dist.all_reduce(requested, dist.ReduceOp.MAX)
        return bool(requested)

    def trace(self, step: int) -> None:
        """Profile rank 0 from the first of --trace_steps to the last; `step` is done."""
        first, last = self.config.trace_steps or (0, 0)
        if self.rank == 0 and step + 1 == first:
            self.profiler = torch.profiler.profile()
            self.profiler.start()
        if self.profiler and step == last:
            self.profiler.stop()
            self.profiler.export_chrome_trace(str(self.directory / "trace.json"))

    def log(self, line: dict[str, Any]) -> None:
        """Write a line of metrics.jsonl, and log it to Weights & Biases. NaN becomes null."""
        if self.rank:
            return
        for name, value in line.items():
            if value is not None and not math.isfinite(value):
                line[name] = None
        with refusing(f"cannot write {self.metrics.name}", code=1):
            self.metrics.write((json.dumps(line) + "\n").encode())
        if self.wandb:
            self.wandb.log(line)

    def log_step(self, batch: GlobalBatch, step: int, aim: str = "loss", **measured: float) -> None:
        """Log an optimizer step, and print its `aim` every ten seconds."""
        now = time.perf_counter()
        seconds = now - batch.started
        peak = peak_flops(self.facts["device"])  # of one GPU
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if self.device.type == "cuda":
            memory = torch.cuda.max_memory_allocated(self.device)
        line = {
            "step": step,
            **measured,
            **batch.measured,
            "padding_fraction": batch.padding_fraction,
            "tokens_per_second": batch.num_tokens / seconds,
            "step_seconds": seconds,
            "data_seconds": batch.data_seconds,
            "mfu": self.flops(batch) / seconds / self.world_size / peak if peak else None,
            "peak_memory_gib": memory / 2**30,
        }
        self.log(line)
        self.trace(step)
        steps = self.config.steps
        if step in (self.first_step + 1, steps) or now - self.printed > 10:
            left = (now - self.started) / (step - self.first_step) * (steps - step)
            speed = f"{line['tokens_per_second']:,.0f} tokens/s  {left:,.0f} s left"
            say(f"step {step}/{steps}  {aim} {measured[aim]:.4f}  {speed}")
            self.printed = now

    def log_validation(self, step: int, loss: float, validation: Batches) -> None:
        """Log a validation, in nats per target token, under its training step."""
        perplexity = math.exp(min(loss, 700))
        line = {"step": step, "validation_loss": loss, "validation_perplexity": perplexity}
        tokens_per_byte = validation.tokens_per_byte(self.config.eval_batches)
        if tokens_per_byte is not None:
            line["validation_bits_per_byte"] = loss / math.log(2) * tokens_per_byte
        self.log(line)
        say(f"step {step}: validation loss {loss:.4f}")

    def finish(self, step: int, checkpoint: Path, prompt: np.ndarray, next_command: str) -> None:
        """End the run: rank 0 writes hf/, shows a sample of the model, and says what is next."""
        run_dir = self.config.run_dir
        if step < self.config.steps:
            again = "" if self.config.resume == "auto" else " with --resume auto"
            advice = f"rerun the same command{again} to continue"
            return say(f"stopped after step {step}, saved in {checkpoint}; {advice}")
        if self.rank:
            return
        with refusing(f"cannot write {run_dir}/hf ({checkpoint} is intact)", code=1):
            export(checkpoint, self.directory / "hf")
        if self.facts["parameters"] < 2e9:  # larger ones would keep the GPUs waiting for minutes
            show_sample(self.directory / "hf", prompt)
        say(f"files: {run_dir}/metrics.jsonl, and {run_dir}/hf for transformers")
        say(f"next:  {next_command.format(run_dir=run_dir)}")


def show_sample(directory: Path, prompt: np.ndarray) -> None:
    """Print how an exported model continues the ids of `prompt`, with plain transformers."""
    torch.set_num_threads(available_cpus())
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        model = transformers.AutoModelForCausalLM.from_pretrained(directory)
        torch.manual_seed(0)
        continued = model.generate(
            torch.from_numpy(prompt.astype(int))[None],
            max_new_tokens=160,
            do_sample=True,
            temperature=0.6,
            pad_token_id=tokenizer.eos_token_id,
        )
        sample = tokenizer.decode(continued[0])
        say(f"--- the model continues the first tokens of a held-out text:\n{sample}\n---")
    except Exception as error:  # the run has succeeded: all its outputs are there
        say(f"no sample of the model: {error}")


def command_line() -> None:
    if len(sys.argv) != 4 or sys.argv[1] != "export":
        refuse("usage: python common.py export CHECKPOINT OUT")
    checkpoint, out = map(Path, sys.argv[2:])
    problem = f"{out} exists already" if out.exists() else damage(checkpoint)
    if problem:
        refuse(f"export of {checkpoint}: {problem}")
    with refusing(f"export to {out}", code=1):
        export(checkpoint, out)


if __name__ == "__main__":
    launch(command_line)
