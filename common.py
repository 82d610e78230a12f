"""Data and checkpoint helpers of the training scripts, and a run's little plumbing.

Nothing here knows a parallel strategy, an optimizer or a training loop: those are in the scripts.
Data flows one way, and each section below is a stretch of that way:

    corpus -> rows of tokens (cached on disk) -> batch plan (a pure function of lengths and seed)
    -> collate -> micro-batch

A function takes the values that it needs, so each can be copied alone. What reads data takes a
data-parallel rank and size: which part of the data this rank trains on, of how many parts. They are
rank and world size where each rank has data of its own; ranks that work on the same rows together
have the same data-parallel rank.

    python common.py export CHECKPOINT OUT    a checkpoint's weights in Hugging Face form

A checkpoint's `.metadata` is a pickle: loading one runs whatever code its writer put there. Load
only those you trust, and share the Hugging Face form (safetensors) instead.
"""

import ast
import base64
import bisect
import contextlib
import ctypes
import datetime
import fcntl
import functools
import glob
import inspect
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
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import datasets
import filelock
import huggingface_hub
import jinja2
import numpy as np
import pyarrow.compute as pc
import tiktoken
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
import xxhash
from pydantic import ValidationError
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from transformers.convert_slow_tokenizer import TikTokenConverter

Tokenizer = transformers.PreTrainedTokenizerFast
ModelConfig = transformers.PreTrainedConfig
transformers.logging.disable_progress_bar()  # of loading and saving weights
IGNORED = -100  # label of a position without loss: cross entropy's own default


# --- Flags, errors and endings --------------------------------------------------------------------


def flag(default: Any, help: str) -> Any:
    """A field of a script's `Config`: a command-line flag with its default and help text."""
    return field(default=default, metadata={"help": help})


class Refusal(Exception):
    """Ends the program with one line on stderr and an exit code, see `launch`."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


def refuse(message: str, code: int = 2) -> NoReturn:
    """End with the line `error: message`: code 2 for bad input, 1 for a failure while running."""
    raise Refusal(" ".join(message.split()), code)


@contextlib.contextmanager
def refusing(what: str, code: int = 2) -> Iterator[None]:
    """End with one line, as `refuse`, if a library fails at `what`, with its own words for why."""
    try:
        yield
    except Refusal:
        raise
    except (Exception, dcp.CheckpointException) as error:  # DCP's is no Exception
        if lost_connection(error) and dist.is_initialized():
            raise
        if isinstance(error, dcp.CheckpointException):
            error, _ = list(error.failures.values())[0]  # of one of the ranks
        words = str(root_cause(error))[:400]
        refuse(f"{what}: {words or 'nothing is there'}", code)


def root_cause(error: BaseException) -> BaseException:
    """What the system said (such as a full disk) before libraries raised errors of their own."""
    cause = error.__cause__ or error
    while error is not None:
        if isinstance(error, OSError):
            cause = error
        error = error.__context__
    return cause


def lost_connection(error: BaseException) -> bool:
    """Whether a collective failed since another rank has ended: that one reports the cause.

    What a stage of a pipeline raises has the collective's error as its cause.
    """
    return "connection" in f"{error} {error.__cause__}".lower()


def parse_config(config_class: type) -> Any:
    """The command line as the script's `Config`, a pydantic dataclass that knows its limits."""
    parser = transformers.HfArgumentParser(config_class, allow_abbrev=False)
    parser.error = refuse
    for word in sys.argv:
        with refusing(f"{ascii(word)} cannot be written to a file"):
            word.encode()
    try:
        config, rest = parser.parse_args_into_dataclasses(return_remaining_strings=True)
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:  # raised by the Config's own __post_init__
            refuse(str(first["ctx"]["error"]))
        refuse(f"--{first['loc'][0]} {first['input']}: {first['msg']}")
    if rest:
        refuse(f"unknown flag or word {rest[0]}; --help lists the flags, and a glob needs quotes")
    if config.init_from:
        directory = fetch_weights(config.init_from)
        # Weights bring their architecture and tokenizer, unless the command line names others.
        given = {word[2:].split("=")[0] for word in sys.argv[1:] if word.startswith("--")}
        for name in {"model", "tokenizer"} - given:
            setattr(config, name, directory)
        config.init_from = fuse_experts(directory)
    return config


def launch(main: Callable) -> None:
    """Run a script's `main`. An error ends this rank at once, with exit code 1 and a traceback.

    `os._exit` then, as an orderly shutdown with live communication threads can hang or abort.
    """
    alone = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
    }
    os.environ.update(alone | os.environ)  # without torchrun: one rank
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that cannot print a character
    try:
        end_with_launcher()
        return main()
    except BaseException as error:  # SystemExit and DCP's CheckpointException are no Exception
        message, code = last_words(error)
        # torchrun ends all ranks once one has exited, so who knows most must speak first. That is
        # the first rank of a node, if all refuse, and a failed rank before those that lost it. Who
        # still lives five seconds later is alone in knowing of the error.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        knows_less = lost_connection(error)
        if isinstance(error, Refusal | SystemExit):
            knows_less = os.environ["LOCAL_RANK"] != "0"
        if knows_less:
            time.sleep(5)
        if message:
            print(message, file=sys.stderr, flush=True)
    say("", end="")  # flushed, even if nobody reads any more
    os._exit(code)


def last_words(error: BaseException) -> tuple[str, int]:
    """What an error that ends the program says on stderr, and its exit code."""
    if isinstance(error, Refusal):
        return f"error: {error}", error.code
    if isinstance(error, SystemExit):  # of --help, or of a `main` that leaves early
        return (error.code, 1) if isinstance(error.code, str) else ("", error.code or 0)
    rank = f"rank {os.environ['RANK']}"
    if lost_connection(error):
        return f"{rank} lost another rank: {error}", 1
    if isinstance(error, KeyboardInterrupt):
        return f"error: {rank} was interrupted before its first step", 1
    return f"{rank} failed:\n{traceback.format_exc()}", 1


def end_with_launcher() -> None:
    """Have the kernel send this rank SIGTERM when its launcher dies.

    Else ranks whose torchrun was killed would wait for a store that is gone, or train on unseen.
    The launcher may have died before, while this rank imported torch: it is a Python program, what
    adopts its orphans (init, systemd, slurmstepd) is not.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1: PR_SET_PDEATHSIG
    if b"python" not in Path(f"/proc/{os.getppid()}/cmdline").read_bytes():
        refuse("the launcher of this rank has died", code=1)


def say(text: str, end: str = "\n") -> None:
    """Print at once. A reader who has left (`| head -1`), a full disk: no reason to end a run."""
    try:
        print(text, end=end, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# --- Tokenizers -----------------------------------------------------------------------------------

ENCODINGS = ["bytes", *tiktoken.list_encoding_names()]


def fingerprint(*values: Any) -> str:
    """128 bits of what the values are as JSON: the key of a cache, or whether they changed."""
    return xxhash.xxh3_128_hexdigest(json.dumps(values, sort_keys=True, default=str).encode())


@functools.cache
def tiktoken_encoding(name: str) -> tiktoken.Encoding:
    """A tiktoken encoding; `bytes` is one of the 256 byte values and an end-of-text token."""
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
    """The `transformers` tokenizer that gives the same ids; a `Refusal` if there can be none."""
    ranks = encoding._mergeable_ranks
    special = {index: name for name, index in encoding._special_tokens.items()}
    if sorted(ranks.values()) != list(range(len(ranks))):
        refuse(f"--tokenizer {encoding.name}: its ids have gaps between its tokens")
    with refusing(f"--tokenizer {encoding.name} has no token for the end of a text"):
        end_of_text = special[encoding.eot_token]
    # Added tokens get consecutive ids, so the gaps (cl100k_base has some) need names too.
    added_ids = range(len(ranks), encoding.n_vocab)
    added = [special.get(index, f"<|unused_{index}|>") for index in added_ids]
    # a{1,3}+ is a possessive repetition in tiktoken's regexes, a repeated one in the others.
    pattern = re.sub(r"(\\p\{N\}\{\d+,\d+\})\+", r"(?>\1)", encoding._pat_str)
    with tempfile.NamedTemporaryFile(suffix=".tiktoken") as file:
        for token, rank in ranks.items():
            file.write(base64.b64encode(token) + b" %d\n" % rank)
        file.flush()
        converter = TikTokenConverter(file.name, pattern, extra_special_tokens=added)
        converted = converter.converted()
    return Tokenizer(
        tokenizer_object=converted,
        eos_token=end_of_text,
        name_or_path=encoding.name,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,  # as in training: spelled-out special tokens are text
    )


@functools.cache
def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of `--tokenizer`: bytes, a tiktoken encoding, or a directory or hub id."""
    if name in ENCODINGS:
        return to_transformers(tiktoken_encoding(name))
    with refusing(f"tokenizer {name} is neither bytes nor known to tiktoken or Hugging Face"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    if not tokenizer.is_fast or tokenizer.eos_token_id is None:
        refuse(f"--tokenizer {name} lacks an end-of-text (eos) token or a fast implementation")
    tokenizer.backend_tokenizer.no_truncation()  # as a trainer may have left them
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def encode_text(text: str, tokenizer: Tokenizer) -> np.ndarray:
    """Ids of a text, uint32; a special token that it spells out stays plain text."""
    name = tokenizer.name_or_path
    if name in ENCODINGS:  # four times as fast as its conversion
        return tiktoken_encoding(name).encode_to_numpy(text, disallowed_special=())
    backend = tokenizer.backend_tokenizer
    backend.encode_special_tokens = True
    ids = backend.encode(text, add_special_tokens=False).ids
    backend.encode_special_tokens = False
    return np.array(ids, np.uint32)


# --- Corpus: anything that `datasets` reads -------------------------------------------------------

READERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".txt": "text", ".csv": "csv"}


def standard_library_files() -> list[str]:
    """The source files of Python's standard library, without tests and tables."""
    root = Path(ast.__file__).parent
    skipped = {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "ensurepip"}
    files = sorted(root.rglob("*.py"))
    return [str(file) for file in files if skipped.isdisjoint(file.relative_to(root).parts)]


def read_python(files: list[str]) -> Iterator[tuple[ast.Module, list[str]]]:
    """The syntax tree and the lines of each source file."""
    warnings.simplefilter("ignore", SyntaxWarning)
    for file in files:
        source = Path(file).read_text(encoding="utf-8", errors="replace")
        yield ast.parse(source), source.splitlines(keepends=True)


def standard_library_documents(files: list[str], version: str) -> Iterator[dict[str, str]]:
    """One document a top-level function or class; `version` is there for the cache's key."""
    for tree, lines in read_python(files):
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                yield {"text": "".join(lines[first - 1 : node.end_lineno])}


EMBEDDED = {"stdlib": standard_library_documents}  # fine-tuning adds its own


def open_dataset(name: str, configuration: str | None, split: str) -> datasets.Dataset:
    """What `--dataset` names: an embedded corpus, a file, glob or URL, or a hub id."""
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # the error line says what matters
    if os.environ.get("LOCAL_RANK", "0") != "0" or not sys.stderr.isatty():
        datasets.disable_progress_bars()
    if name in EMBEDDED:
        # The cache notices another Python and another source of the function.
        version = sys.version + str(sources(EMBEDDED[name], {}))
        arguments = {"files": standard_library_files(), "version": version}
        return datasets.Dataset.from_generator(EMBEDDED[name], gen_kwargs=arguments)
    known_suffixes = [suffix for suffix in Path(name).suffixes if suffix in READERS]
    if not known_suffixes:
        return datasets.load_dataset(name, configuration, split=split)
    reader = READERS[known_suffixes[-1]]  # the last one counts: a.txt.jsonl.gz is JSON
    files = glob.escape(name) if Path(name).is_file() else name  # a file's name may hold [1]
    return datasets.load_dataset(reader, data_files=files, split=split)


# --- Rows: tokens on disk -------------------------------------------------------------------------

COLUMNS = {
    "labels": datasets.Value("int32"),
    "digest": datasets.Value("int64"),
    "bytes": datasets.Value("float32"),
    "note": datasets.Value("string"),
    "tokens": datasets.List(datasets.Value("uint32")),
    "learned": datasets.List(datasets.Value("bool")),
}


class Rows:
    """Rows of tokens, memory-mapped from Arrow files; one array entry a row.

    A row of n + 1 tokens reads the first n and predicts the last n, so n is its length. `learned`
    says of each token whether predicting it counts: always in text, in conversations if the
    assistant wrote it.

    Args:
        table: an Arrow table of COLUMNS.
        chosen: int64, which rows of the table these are; all of them if None.

    Attributes:
        lengths: int64 [rows].
        num_labels: [rows], the predictions that count.
        digest: [rows], a hash of the document that the row is of.
        num_bytes: [rows], the row's share of that text's bytes.
        notes: why rows of the table were cut, or left out with no tokens -> how many.
    """

    def __init__(self, table: Any, chosen: np.ndarray | None = None):
        self.table = table
        self.chosen = np.arange(len(table)) if chosen is None else chosen
        lengths = pc.list_value_length(table["tokens"]).to_numpy() - 1
        self.lengths = lengths[self.chosen].astype(np.int64)
        self.num_labels = table["labels"].to_numpy()[self.chosen]
        self.digest = table["digest"].to_numpy()[self.chosen]
        self.num_bytes = table["bytes"].to_numpy()[self.chosen]
        counted = table["note"].value_counts().to_pylist()
        self.notes = {each["values"]: each["counts"] for each in counted}

    def read(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens (uint32) and learned (bool), [length + 1]: views of the mapped file."""
        index = int(self.chosen[row])
        tokens = self.table["tokens"][index].values.to_numpy(zero_copy_only=False)
        learned = self.table["learned"][index].values.to_numpy(zero_copy_only=False)
        return tokens, learned

    def split(self) -> tuple["Rows", "Rows"]:
        """The rows for training and those for validation, of all that have labels.

        Validation gets the 2 % of the documents with the smallest hashes (1 to 5,000). So the split
        is the same in every run, and equal documents and pieces of one land on the same side.
        """
        usable = np.flatnonzero(self.num_labels)
        documents = np.unique(self.digest[usable])
        if len(documents) < 2:
            notes = ", ".join(f"{count} are {note}" for note, count in self.notes.items() if note)
            refuse(f"--dataset: fewer than two documents hold anything to learn; {notes}")
        held_out = documents[min(max(1, len(documents) // 50), 5000) - 1]
        validation = self.digest[usable] <= held_out
        training_rows = self.chosen[usable[~validation]]
        return Rows(self.table, training_rows), Rows(self.table, self.chosen[usable[validation]])

    def labels_per_byte(self, rows: np.ndarray) -> float | None:
        """Labels of these rows per byte of their text, None for conversations."""
        num_bytes = self.num_bytes[rows].sum(dtype=np.float64)
        return self.num_labels[rows].sum() / num_bytes if num_bytes else None

    def prompt(self) -> np.ndarray:
        """The first tokens of the first row, or those up to the assistant's turn."""
        tokens, learned = self.read(0)
        answer = int(learned[1:].argmax())  # 0 in text
        return tokens[: answer + 1 if answer else 64]


@contextlib.contextmanager
def prepare_in_turn() -> Iterator[None]:
    """A lock for the work that each rank starts before it joins the process group.

    The first rank of a node does the work, the others wait and find its cache. So nothing slow
    happens while ranks wait for each other in a collective, whose time is limited.
    """
    folder = Path(datasets.config.HF_DATASETS_CACHE)
    holder = folder / "prepare.pid"
    with refusing(f"the cache {folder} cannot be written (HF_HOME is where it is)"):
        folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(folder / "prepare.lock")
        try:
            lock.acquire(timeout=10)
        except filelock.Timeout:
            say(f"waiting for process {holder.read_text()}, which prepares data in {folder}")
            lock.acquire()
        holder.write_text(str(os.getpid()))
    try:
        yield
    finally:
        lock.release()


def load_rows(
    dataset: str,
    configuration: str | None,
    split: str,
    columns: list[str],
    function: Callable,
    tokenizer: Tokenizer,
    max_length: int,
) -> Rows:
    """Map `--dataset` to rows of at most `max_length`, in several processes, once for all runs.

    Args:
        columns: those to read, as far as they are there; one of the first four has to be.
        function: module-level, as `text_rows`: yields the rows of one document.
    """
    with prepare_in_turn(), refusing(f"--dataset {dataset} cannot be read"):
        corpus = open_dataset(dataset, configuration, split)
        present = [column for column in columns if column in corpus.column_names]
        if not set(columns[:4]) & set(present):
            wanted = " or ".join(columns[:4])
            refuse(f"--dataset {dataset} has no column {wanted}, only {corpus.column_names}")
        corpus = corpus.select_columns(present)
        # The key of the cache. datasets would hash the function, and give a new key to one that it
        # cannot hash.
        key = fingerprint(
            corpus._fingerprint,
            sources(function, sources(make_rows, {})),
            columns,
            max_length,
            tokenizer.special_tokens_map,
            tokenizer.chat_template,
            tokenizer.backend_tokenizer.to_str(),
        )
        processes = min(os.cpu_count(), len(corpus) // 1000)
        try:
            mapped = corpus.map(
                make_rows,
                batched=True,
                remove_columns=corpus.column_names,
                features=datasets.Features(COLUMNS),
                fn_kwargs={"function": function, "tokenizer": tokenizer, "max_length": max_length},
                new_fingerprint=key,
                num_proc=processes if processes > 1 else None,
            )
        except Exception:
            for file in corpus.cache_files:  # datasets leaves what its workers had begun
                for half_made in Path(file["filename"]).parent.glob("tmp*"):
                    half_made.unlink()
            raise
    return Rows(mapped.data.table)


def sources(function: Callable, found: dict[str, str]) -> dict[str, str]:
    """Add the source of a function, and of what it names in its module: functions, constants."""
    found[function.__name__] = inspect.getsource(function)
    for word in re.findall(r"\w+", found[function.__name__]):
        named = function.__globals__.get(word)
        if inspect.isfunction(named) and named.__module__ == function.__module__:
            if word not in found:
                sources(named, found)
        elif word.isupper():  # a constant
            found[word] = str(named)
    return found


def make_rows(batch: dict, function: Callable, tokenizer: Tokenizer, max_length: int) -> dict:
    """The rows of a batch of documents, lists for COLUMNS; a document may be left out, with why."""
    rows: dict[str, list] = {name: [] for name in COLUMNS}
    for values in zip(*batch.values()):
        digest = int(fingerprint(*values)[:16], 16) >> 1  # 63 bits
        try:
            made = list(function(dict(zip(batch, values)), tokenizer, max_length))
        except (ValueError, jinja2.TemplateError) as problem:
            no_tokens, no_learned = np.zeros(0, np.uint32), np.zeros(0, bool)
            made = [(no_tokens, no_learned, 0.0, f"left out, as they {problem}")]
        for tokens, learned, num_bytes, note in made:
            num_labels = int(learned[1:].sum())
            values = (num_labels, digest, num_bytes, note, tokens, learned)  # as in COLUMNS
            for column, value in zip(rows.values(), values):
                column.append(value)
    return rows


def text_rows(document: dict[str, str], tokenizer: Tokenizer, max_length: int) -> Iterator[tuple]:
    """A text and its end-of-text token as rows (tokens, learned, bytes, note) of max_length each.

    A cut loses no prediction: the last token of a row is predicted there and read in the next one.
    """
    [text] = document.values()
    if not isinstance(text, str) or not text:
        raise ValueError("hold no text")
    ids = np.append(encode_text(text, tokenizer), np.uint32(tokenizer.eos_token_id))
    predictions = len(ids) - 1
    for start in range(0, predictions, max_length):
        tokens = ids[start : start + max_length + 1]
        num_bytes = len(text.encode()) * ((len(tokens) - 1) / predictions)
        yield tokens, np.ones(len(tokens), bool), num_bytes, ""


# --- Batch plan: which rows form micro-batch k of an epoch ----------------------------------------


def windows(lengths: np.ndarray, budget: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Shuffled rows in windows of about 256 micro-batches, each sorted: the longest row first.

    Neighbours are alike in length then, and which rows are neighbours changes from epoch to epoch.
    """
    order = rng.permutation(len(lengths))
    rows_per_window = math.ceil(256 * budget / lengths.mean())
    for begin in range(0, len(order), rows_per_window):
        window = order[begin : begin + rows_per_window]
        yield window[np.argsort(-lengths[window], kind="stable")]


def bucket(rows: np.ndarray, lengths: np.ndarray, budget: int) -> Iterator[np.ndarray]:
    """Cut sorted rows into micro-batches: rows x longest row <= budget, in token positions."""
    start = 0
    while start < len(rows):
        longest = int(lengths[rows[start]])  # the first one
        stop = start + budget // longest
        yield rows[start:stop]
        start = stop


def pack(rows: np.ndarray, lengths: np.ndarray, budget: int) -> Iterator[np.ndarray]:
    """Best-fit-decreasing packing (arXiv 2404.10830) of sorted rows, whole documents, into one row.

    The longest first, each into the fullest micro-batch that still takes it.
    """
    packed: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # free positions of a micro-batch and its index, sorted
    for row, length in zip(rows.tolist(), lengths[rows].tolist()):
        fullest = bisect.bisect_left(spaces, (length, 0))
        if fullest == len(spaces):  # it fits nowhere: begin a micro-batch
            spaces.append((budget, len(packed)))
            packed.append([])
        space, index = spaces.pop(fullest)
        packed[index].append(row)
        bisect.insort(spaces, (space - length, index))
    yield from map(np.array, packed)


def plan_epoch(
    lengths: np.ndarray, batching: str, budget: int, multiple: int, seed: int, epoch: int
) -> list[np.ndarray]:
    """The micro-batches of an epoch: for each the indices into `lengths` of its rows.

    Micro-batches of all lengths are shuffled together: one length after the other would be an
    accidental curriculum.

    Args:
        lengths: int64 [rows], each at most `budget`, the token positions of a micro-batch.
        batching: `bucketed` (`bucket`; rows are padded to a multiple of `multiple`) or `packed`.
    """
    rng = np.random.default_rng([seed, epoch])
    fill = pack
    if batching == "bucketed":
        fill = bucket
        lengths = -(-lengths // multiple) * multiple  # rounded up
    if lengths.max() > budget:
        raise ValueError(f"a row of {lengths.max()} positions exceeds a micro-batch of {budget}")
    micro_batches: list[np.ndarray] = []
    for rows in windows(lengths, budget, rng):
        micro_batches += fill(rows, lengths, budget)
    return [micro_batches[i] for i in rng.permutation(len(micro_batches))]


# --- Batches: plan -> tensors ---------------------------------------------------------------------


@dataclass
class GlobalBatch:
    """What one optimizer step trains on: this rank's micro-batches, and counts over all ranks.

    Args:
        micro_batches: each a dict of model arguments, see `Batches.collate`.
        num_labels: tokens to predict, by which the summed loss is divided.
        num_tokens: tokens that are read.
        squared_lengths: sum over rows of length squared, for the FLOPs of attention.
        padding_fraction: of all positions.
    """

    micro_batches: list[dict[str, Any]]
    num_labels: int
    num_tokens: int
    squared_lengths: int
    padding_fraction: float


@dataclass
class Batches:
    """The endless stream of micro-batches of some rows: epoch after epoch, each a plan of its own.

    Step s takes the micro-batches s * G to (s + 1) * G - 1 of the stream, G = global / micro batch
    tokens: the step number is the position in the data, and what a step holds does not depend on
    how many ranks share it.

    Args:
        lengths: int64 [rows], at most `max_length`.
        num_labels: [rows], how many tokens of a row are to be predicted.
        read: index of a row -> its tokens and which of them are learned, [length + 1].
        padding_id: token id of padding, for the shape only: it has no label and no token sees it.
    """

    lengths: np.ndarray
    num_labels: np.ndarray
    read: Callable
    batching: str
    max_length: int
    micro_batch_tokens: int
    pad_to_multiple_of: int
    padding_id: int
    seed: int

    def __post_init__(self) -> None:
        self.packed = self.batching == "packed"
        plan = functools.partial(
            plan_epoch,
            self.lengths,
            self.batching,
            self.micro_batch_tokens,
            self.pad_to_multiple_of,
            self.seed,
        )
        self.plan = functools.lru_cache(maxsize=2)(plan)
        self.epoch_ends = [0]  # position in the stream after each of the epochs so far

    def micro_batch(self, index: int) -> np.ndarray:
        """The rows of a micro-batch of the stream."""
        while index >= self.epoch_ends[-1]:
            next_epoch = self.plan(len(self.epoch_ends) - 1)
            self.epoch_ends.append(self.epoch_ends[-1] + len(next_epoch))
        epoch = bisect.bisect(self.epoch_ends, index) - 1
        return self.plan(epoch)[index - self.epoch_ends[epoch]]

    def shape(self, rows: np.ndarray) -> tuple[int, int]:
        """Rows and row length of a micro-batch, padding included."""
        if self.packed:
            return 1, self.micro_batch_tokens
        multiple = self.pad_to_multiple_of
        length = math.ceil(self.lengths[rows].max() / multiple) * multiple
        if multiple == 1:
            return len(rows), length
        # Compiled blocks want few shapes, so each length has one number of rows: empty ones fill
        # the last micro-batch of a window.
        return self.micro_batch_tokens // length, length

    def collate(self, rows: np.ndarray) -> dict[str, Any]:
        """The arguments of a model for a micro-batch of these rows.

        Right padding needs no attention mask, for no real token sees what comes after it.

        Returns:
            input_ids: int64 [rows, length], padded on the right.
            labels: int64 [rows, length], shifted already: labels[r, i] is the token after
                input_ids[r, i], or -100 where that is not learned.

            A packed micro-batch, [1, micro_batch_tokens], also has
            position_ids: int64 [1, length], from 0 in each document.
            cu_seq_lens_q: int32 [documents + 1], where documents begin and end.
            max_length_q: int, the most tokens that a document can have.
        """
        height, width = self.shape(rows)
        inputs = np.full((height, width), self.padding_id)
        labels = np.full((height, width), IGNORED)
        boundaries = [0]
        for i, row in enumerate(rows.tolist()):
            tokens, learned = self.read(row)
            line, begin = (0, boundaries[-1]) if self.packed else (i, 0)
            end = begin + len(tokens) - 1
            inputs[line, begin:end] = tokens[:-1]
            labels[line, begin:end] = np.where(learned[1:], tokens[1:].astype(np.int64), IGNORED)
            boundaries.append(end)
        arguments: dict[str, Any] = {
            "input_ids": torch.from_numpy(inputs),
            "labels": torch.from_numpy(labels),
        }
        if self.packed:
            arguments |= self.document_arguments(boundaries, width)
        return arguments

    def document_arguments(self, boundaries: list[int], width: int) -> dict[str, Any]:
        """What tells attention where the documents of a packed row are, see `collate`."""
        # The padding makes documents of its own. Empty ones at the end round the number of
        # boundaries up to a power of two, so that compiled blocks see few shapes.
        padding = range(boundaries[-1] + self.max_length, width, self.max_length)
        boundaries = [*boundaries, *padding, width]
        rounded = 2 ** math.ceil(math.log2(len(boundaries)))
        boundaries += [width] * (rounded - len(boundaries))
        starts = np.repeat(boundaries[:-1], np.diff(boundaries))
        return {
            "position_ids": torch.from_numpy(np.arange(width) - starts)[None],
            "cu_seq_lens_q": torch.tensor(boundaries, dtype=torch.int32),
            "max_length_q": self.max_length,
        }

    def global_batch(
        self,
        step: int,
        micro_batches_per_step: int,
        data_parallel_rank: int,
        data_parallel_size: int,
    ) -> GlobalBatch:
        """Step `step`, counted from 0: the micro-batches of one rank, the counts of all."""
        first = step * micro_batches_per_step
        chosen = [self.micro_batch(first + i) for i in range(micro_batches_per_step)]
        rows = np.concatenate(chosen)
        lengths = self.lengths[rows]
        positions = sum(math.prod(self.shape(part)) for part in chosen)
        return GlobalBatch(
            [self.collate(part) for part in chosen[data_parallel_rank::data_parallel_size]],
            num_labels=int(self.num_labels[rows].sum()),
            num_tokens=int(lengths.sum()),
            squared_lengths=int((lengths**2).sum()),
            padding_fraction=1 - int(lengths.sum()) / positions,
        )

    def stream(self, first_step: int, last_step: int, *part: int) -> Iterator[GlobalBatch]:
        """The global batches of the steps [first_step, last_step).

        A thread makes the next one while the model trains on one. `part` are the other arguments
        of `global_batch`.
        """
        with ThreadPoolExecutor(1) as thread:
            made = thread.submit(self.global_batch, first_step, *part)
            for step in range(first_step, last_step):
                batch = made.result()
                made = thread.submit(self.global_batch, step + 1, *part)
                yield batch

    def evaluation(
        self, num_micro_batches: int, data_parallel_rank: int, data_parallel_size: int
    ) -> Iterator[dict[str, Any]]:
        """This rank's part of the first micro-batches of the stream, of one epoch at most.

        All ranks get equally many, since a forward pass is a collective under FSDP: where they do
        not divide, a rank repeats the last one without labels.
        """
        plan = self.plan(0)[:num_micro_batches]
        rounds = math.ceil(len(plan) / data_parallel_size)
        for k in range(data_parallel_rank, rounds * data_parallel_size, data_parallel_size):
            batch = self.collate(plan[min(k, len(plan) - 1)])
            if k >= len(plan):
                batch["labels"] = torch.full_like(batch["labels"], IGNORED)
            yield batch

    def evaluation_rows(self, num_micro_batches: int) -> np.ndarray:
        """The rows that `evaluation` reads on all ranks together."""
        return np.concatenate(self.plan(0)[:num_micro_batches])


def to_device(micro_batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """A copy whose tensors are on the device. The CPU does not wait for the copies."""
    copy = dict(micro_batch)
    for name, value in micro_batch.items():
        if torch.is_tensor(value):
            if device.type == "cuda":
                value = value.pin_memory()  # a GPU copies by itself only from such memory
            copy[name] = value.to(device, non_blocking=True)
    return copy


# --- Architecture and weights in Hugging Face form ------------------------------------------------

# The types of transformers' causal language models that train here as they do there: for each of
# them tests/test_types.py compares loss and gradients, bucketed and packed, with plain
# transformers. The others want masks, sinks or state that attention here does not have.
MODEL_TYPES = set(
    """
    afmoe arcee aria_text axk1 bitnet deepseek_v3 diffllama ernie4_5 ernie4_5_moe exaone4 exaone_moe
    flex_olmo gemma gemma3_text glm glm4 glm4_moe glm4_moe_lite gpt2 gpt_bigcode gpt_neox granite
    granitemoe granitemoeshared helium hrm_text hy_v3 hyperclovax internlm3 iquestcoder jais2 jetmoe
    kolibri1 laguna llama longcat_flash mellum minimax_m2 ministral3 mistral mixtral moshi olmo
    olmo2 olmo3 olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3
    solar_open starcoder2 youtu
    """.split()
)
# What the loss and the attention of the scripts do not do -> the value that does not ask for it.
NEUTRAL_SETTINGS = {
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "logits_scaling": 1,
    "output_router_logits": False,
    "use_bidirectional_attention": False,
}
LENGTH_LIMITS = ["max_position_embeddings", "attention_chunk_size", "sliding_window"]


def read_model_config(
    name: str, vocabulary_size: int, max_length: int, batching: str
) -> ModelConfig:
    """The config.json that `--model` names (code from the hub is never run).

    Of a model that also sees or hears it is the config of the language model inside. Refuses a
    model that would not train on this data as it is meant to.
    """
    with refusing(f"model {name} is neither built in (--help) nor has a config.json to go by"):
        model_config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        model_config = model_config.get_text_config()
    if model_config.model_type not in MODEL_TYPES:
        refuse(
            f"--model {name}: its type, {model_config.model_type}, is none of the "
            f"{len(MODEL_TYPES)} in common.MODEL_TYPES"
        )
    other_layers = set(getattr(model_config, "layer_types", None) or [])
    other_layers -= {"full_attention", "sliding_attention"}
    if other_layers:
        refuse(f"--model {name}: its layers of {min(other_layers)} are not supported")
    for setting, neutral in NEUTRAL_SETTINGS.items():
        if getattr(model_config, setting, None) not in (None, neutral):
            refuse(f"--model {name}: its {setting} is not supported")
    if batching == "packed":
        for setting, value in model_config.to_dict().items():
            if re.search("att.*drop", setting) and value:
                refuse(f"--batching packed knows no {setting}, {value} in --model {name}")
    if vocabulary_size > model_config.vocab_size:
        ids = f"--tokenizer has {vocabulary_size} ids"
        refuse(f"{ids}, --model {name} only {model_config.vocab_size}")
    limits = {limit: getattr(model_config, limit, None) for limit in LENGTH_LIMITS}
    rotation = getattr(model_config, "rope_parameters", None) or {}
    if rotation.get("rope_type") == "longrope":
        # Past it, a token's rotation depends on how long its row is.
        limits["original_max_position_embeddings"] = rotation["original_max_position_embeddings"]
    for limit, length in limits.items():
        if max_length > (length or math.inf):
            refuse(f"--max_length {max_length} exceeds {limit} of --model {name}")
    vars(model_config).pop("quantization_config", None)  # it is that of files on the hub
    return model_config


def fetch_weights(name: str) -> str:
    """The directory of `--init_from`: itself, the hf/ of a run, or where a hub id was loaded to."""
    with refusing(f"--init_from {name[:200]} is no path"):
        directory = Path(name, "hf") if Path(name, "hf").is_dir() else Path(name)
    if not directory.is_dir():
        with prepare_in_turn(), refusing(f"--init_from {name} is neither here nor on the hub"):
            directory = Path(
                huggingface_hub.snapshot_download(
                    name,
                    allow_patterns=["*.json", "*.jinja", "*.txt", "*.model", "*.safetensors"],
                    ignore_patterns="consolidated*",  # Mistral's own format beside the usual one
                )
            )
    if not (directory / "config.json").exists() or not list(directory.glob("*.safetensors")):
        refuse(f"--init_from {name}: no config.json and *.safetensors in it, nor in its hf/")
    return str(directory)


def fuse_experts(directory: str) -> str:
    """The directory, or another one where the experts of a layer are one tensor, as in memory.

    Hub files of mixtures of experts hold them one by one.
    """
    with refusing(f"--init_from {directory}"):
        names = HuggingFaceStorageReader(directory).read_metadata().state_dict_metadata
    if any(".experts.0." in name for name in names):
        return change_once(directory, "fused", lambda model: None)  # transformers fuses as it reads
    return directory


def change_once(directory: str, kind: str, change: Callable, *settings: Any) -> str:
    """The directory of what `change(model, *settings)` makes of the model in another one.

    One rank of a node makes it beside the cached data, with the whole model in CPU memory; the
    others and later runs find it. It is in fp32: files may mix precisions, and transformers would
    round them all to one.
    """
    files = [Path(directory, "config.json"), *sorted(Path(directory).glob("*.safetensors"))]
    sums = [sum_of(file) for file in files]
    # Parameters have other names in other versions.
    key = fingerprint(sums, inspect.getsource(change), settings, transformers.__version__)
    changed = Path(datasets.config.HF_DATASETS_CACHE, f"{kind}-{key}")
    with prepare_in_turn(), refusing(f"--init_from {directory} cannot be prepared"):
        if changed.exists():
            return str(changed)
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, trust_remote_code=False, output_loading_info=True
        )
        # NOTE: only a warning tells of these, and what is missing has random numbers now.
        unlike = found["missing_keys"] | found["unexpected_keys"]
        if unlike:
            refuse(f"--init_from {directory}: {min(unlike)} is missing or not the model's")
        change(model, *settings)
        with complete_or_absent(changed) as temporary:
            model.save_pretrained(temporary, save_original_format=False)
    return str(changed)


def load_weights(model: torch.nn.Module, directory: str) -> None:
    """Fill whole or sharded parameters from the safetensors files of a Hugging Face directory.

    Every rank reads just the slices that it keeps, cast on the way: none holds a second copy. A
    collective, for a rank may have only some of the parameters.
    """
    state_dict = get_model_state_dict(model)
    inner = getattr(model, "module", model)
    # The head's name -> the embedding's, which alone is in the files.
    tied = inner._tied_weights_keys if inner.config.tie_word_embeddings else {}
    wanted = {name: tensor for name, tensor in state_dict.items() if name not in tied}
    reader = HuggingFaceStorageReader(directory)
    known = set().union(*gather(list(state_dict)))  # by all ranks
    unknown = reader.read_metadata().state_dict_metadata.keys() - known
    if unknown:
        refuse(f"--init_from {directory}: also has {min(unknown)} ({len(unknown)} too many)")
    with refusing(f"--init_from {directory}"):  # names what is missing or of another shape
        dcp.load(wanted, storage_reader=reader)
    for head in tied.keys() & state_dict.keys():
        wanted[head] = wanted[tied[head]]
    set_model_state_dict(model, wanted)


TOKENIZER_CODE = """\
from transformers import PreTrainedTokenizerFast


class Tokenizer(PreTrainedTokenizerFast):
    pass
"""


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Save a tokenizer beside a config.json, so that AutoTokenizer gives it back as it is.

    For some model types AutoTokenizer takes the class that they usually have instead of the one in
    tokenizer_config.json: of qwen2, Qwen2Tokenizer, with a pre-tokenizer and a normalizer of its
    own. Where `auto_map` names code it does not; the code runs if somebody asks for it.
    """
    tokenizer.save_pretrained(directory)
    file = directory / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    if settings["tokenizer_class"] != "TokenizersBackend":
        return  # a class that transformers knows
    settings["auto_map"] = {"AutoTokenizer": [None, "tokenization.Tokenizer"]}
    file.write_text(json.dumps(settings, indent=2) + "\n")
    (directory / "tokenization.py").write_text(TOKENIZER_CODE)


@contextlib.contextmanager
def complete_or_absent(directory: Path) -> Iterator[Path]:
    """A path to write a directory to, which gets its own name once all of it is there."""
    temporary = directory.with_name(f".{directory.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that died while writing
    try:
        yield temporary
        shutil.rmtree(directory, ignore_errors=True)
        temporary.rename(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # if anything has failed


def export(checkpoint: Path, directory: Path) -> None:
    """Any checkpoint -> what AutoModelForCausalLM and AutoTokenizer load, in one CPU process."""
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
    with complete_or_absent(directory) as temporary:
        shutil.copytree(checkpoint / "hf", temporary)
        # Under the names that the model has, not those of older files: `load_weights` reads these.
        model.save_pretrained(temporary, save_original_format=False)
        shutil.copy(checkpoint / "checkpoint.json", temporary)  # says its step


# --- Checkpoints: directories that are complete or absent -----------------------------------------

# Flags that a resumed run shares with its checkpoint: those of the batch plan, always.
PLAN = [
    "max_length",
    "pad_to_multiple_of",
    "batching",
    "micro_batch_tokens",
    "global_batch_tokens",
    "seed",
]
# And those that say what it trains on, if model, tokenizer or rows are others than before.
CONTENTS = ["model", "tokenizer", "dataset", "dataset_config", "dataset_split", "text_column"]
STEP = re.compile(r"step_\d{8}")


def describe_contents(model_config: ModelConfig, tokenizer: Tokenizer, rows: Rows) -> str:
    """What a run trains, and on what: the fingerprint by which a resumed run knows its own."""
    architecture = model_config.to_diff_dict()
    for changing in ("_name_or_path", "transformers_version"):
        architecture.pop(changing, None)
    spelling = (tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template)
    return fingerprint(
        architecture, spelling, xxhash.xxh3_128_hexdigest(rows.digest ^ rows.lengths)
    )


def read_description(path: Path) -> dict[str, Any]:
    """A checkpoint's checkpoint.json; ValueError says what is wrong with it."""
    try:
        description = json.loads((path / "checkpoint.json").read_text())
        sound = description.pop("sum_of_this_file") == fingerprint(description)
        sound &= path.name == step_name(description["progress"]) or not STEP.fullmatch(path.name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        sound = False
    if not sound:
        raise ValueError("checkpoint.json is missing, damaged or of another step")
    return description


def step_name(progress: dict[str, Any]) -> str:
    return f"step_{progress['step']:08d}"


def sum_of(file: Path) -> str:
    """A file's xxh3 checksum: torch, DCP and safetensors would load flipped bytes in silence."""
    return xxhash.xxh3_128_hexdigest(np.memmap(file, np.uint8, "r"))


def damage(path: Path, rank: int = 0, world_size: int = 1) -> str | None:
    """What is wrong with a checkpoint, or None; a collective, as ranks share the reading."""
    problem = None
    try:
        sums = read_description(path)["sums"]
        for name in sorted(sums)[rank::world_size]:
            if not (path / name).is_file() or sum_of(path / name) != sums[name]:
                raise ValueError(f"{name} is missing or damaged")
    except (OSError, ValueError) as error:
        problem = str(error)
    problems = gather(problem) if world_size > 1 else [problem]
    return next(filter(None, problems), None)


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The values of all ranks; a collective."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def is_own(checkpoint: Path, run_dir: Path) -> bool:
    """Whether a checkpoint is one of a run directory's, be it through symbolic links."""
    own = run_dir / "checkpoints" / checkpoint.name
    return own.exists() and own.samefile(checkpoint)


def read_metrics(run_dir: Path) -> list[tuple[int, str]]:
    """The step and the text of each whole line of metrics.jsonl; the last may be half written."""
    file = run_dir / "metrics.jsonl"
    with refusing(f"{file} holds a line that is of no step"):
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [(int(json.loads(line)["step"]), line) for line in lines if line.endswith("\n")]


def refuse_foreign(run_dir: Path, resumed: Path | None) -> None:
    """A run directory is absent, empty, or a run of ours that this start goes on with.

    A run that died before its first checkpoint was complete may begin anew.
    """
    if not run_dir.exists() or (resumed and is_own(resumed, run_dir)):
        return
    with refusing(f"--run_dir {run_dir} cannot be written"):
        names = {path.name for path in run_dir.iterdir()}
    steps = [step for step, _ in read_metrics(run_dir)]
    if names <= {"metrics.jsonl"} and not steps:  # empty, or a start that died at once
        return
    with refusing(f"--run_dir {run_dir} holds other files than those of a run; take another one"):
        flags = json.loads((run_dir / "config.json").read_text())["flags"]
        # In the background a checkpoint is complete before the next one begins.
        first = flags["checkpoint_every"] * (2 if flags["async_checkpoint"] else 1)
    checkpoints = any(STEP.fullmatch(path.name) for path in run_dir.glob("checkpoints/*"))
    if checkpoints or "hf" in names or max(steps, default=0) > first:
        refuse(f"--run_dir {run_dir} holds a run that this start does not go on with; take another")


def remove(directory: Path) -> None:
    """Remove a directory, or a link to one. If that fails it is said: nothing depends on it."""
    try:
        if directory.is_symlink():
            directory.unlink()
        else:
            shutil.rmtree(directory)
    except OSError as error:
        say(f"{directory} cannot be removed: {error}")


def sync(*paths: Path) -> None:
    """Return once files or directories are on the disk, as DCP does for its own files alone."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


@dataclass
class Checkpoints:
    """A directory of checkpoints, all of one line of training.

    The `keep` newest stay, and the best by validation loss. `group` is one of all ranks, for the
    thread that writes: its collectives must not mix with those of training.

    Args:
        facts: flags and contents of the run, recorded in every checkpoint. One with others is
            refused.
        timeout: longest wait for another rank.
    """

    directory: Path
    keep: int
    facts: dict[str, Any]
    rank: int
    world_size: int
    timeout: datetime.timedelta
    pending: Future | None = None  # a write in the background
    last: Path | None = None
    damaged: set[Path] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.group = dist.new_group(backend="gloo", timeout=self.timeout)
        # A new thread works on GPU 0, not on the one of this rank.
        on_this_gpu = None
        if torch.cuda.is_available():
            on_this_gpu = functools.partial(torch.cuda.set_device, torch.cuda.current_device())
        self.thread = ThreadPoolExecutor(1, initializer=on_this_gpu)

    def all(self) -> list[Path]:
        """Those not known as damaged, newest first: names of eight digits sort as numbers do."""
        found = {path for path in self.directory.glob("step_*") if STEP.fullmatch(path.name)}
        return sorted(found - self.damaged, reverse=True)

    def find(self, resume: str) -> tuple[Path | None, dict[str, Any]]:
        """Where the run goes on from, as `--resume` says, and its progress; None to begin.

        A collective: every rank checks a part of a checkpoint's files. What would write over a part
        of the directory's line of training is refused, and the disk stays as it is.
        """
        self.last = self.choose(resume)
        refuse_foreign(self.directory.parent, self.last)
        if self.last is None:
            return None, {"step": 0, "tokens": 0}
        if self.rank == 0:
            say(f"going on from {self.last}")
        description = read_description(self.last)
        self.refuse_another_run(description)
        return self.last, description["progress"]

    def choose(self, resume: str) -> Path | None:
        """The newest undamaged one, the one that `resume` names, or none."""
        own = gather(self.all())[0]  # one list for all ranks, even if a node sees another directory
        advice = "to begin anew take another --run_dir"
        if own and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0:
            resume = "auto"  # a restart by torchrun goes on, whatever the run began from
        if resume == "never":
            if own:
                refuse(f"--resume never: {self.directory} holds checkpoints; {advice}")
            return None
        candidates = own if resume == "auto" else [Path(resume)]
        for path in candidates:
            problem = damage(path, self.rank, self.world_size)
            if problem:
                self.damaged.add(path)
                if self.rank == 0:
                    say(f"{path} is damaged or no checkpoint: {problem}")
                continue
            later = own and path.name != own[0].name and is_own(path, self.directory.parent)
            if later and resume != "auto":
                refuse(f"--resume {resume}: {own[0]} is later; {advice}")
            return path
        if candidates:
            refuse(f"--resume {resume}: no undamaged checkpoint to go on from; {advice}")
        return None

    def refuse_another_run(self, description: dict[str, Any]) -> None:
        """Refuse to go on from a checkpoint of another model, data or batch plan."""
        another = description["contents"] != self.facts["contents"]
        before = description["flags"]
        now = self.facts["flags"]
        changed = [
            f"--{name} {before.get(name)} (now {now.get(name)})"
            for name in (PLAN + CONTENTS if another else PLAN)
            if before.get(name) != now.get(name)
        ]
        if changed or another:
            difference = ", ".join(changed) or "another content of the same paths"
            way = "resume with that, or take the weights alone: --init_from and another --run_dir"
            refuse(f"checkpoint {self.last} was written with {difference}; {way}")

    def write(self, save: Callable, progress: dict[str, Any], in_background: bool) -> None:
        """Write this moment's state; one write at a time.

        `save()` returns a function that writes the state to a directory. A thread calls that, and
        its collectives use `group`. What goes wrong in the background is raised by the next
        `write`, or by `wait`.
        """
        # NOTE: first wait, then save. A copy for the background is good until the next one is made.
        self.wait()
        self.pending = self.thread.submit(self.write_now, save(), dict(progress))
        if not in_background:
            self.wait()

    def wait(self) -> None:
        if self.pending is not None:
            self.pending.result()

    def write_now(self, writer: Callable, progress: dict[str, Any]) -> None:
        """Write under a temporary name; once all ranks have, rename. A collective."""
        self.last = self.directory / step_name(progress)
        intact = self.all()
        what = f"{intact[0]} is intact" if intact else "no checkpoint is intact"
        with refusing(f"cannot write {self.last} ({what})", code=1):
            temporary = self.last.with_suffix(".tmp")
            if self.rank == 0:
                for leftover in self.directory.glob("step_*.tmp"):
                    remove(leftover)  # of a run that died while writing
            dist.barrier(self.group)
            writer(temporary)
            self.complete(temporary, progress)

    def complete(self, temporary: Path, progress: dict[str, Any]) -> None:
        """Give a checkpoint that all ranks have written its name; then remove old ones.

        A collective. Each rank sums the files that DCP had it write; once all of it is on
        the disk, rank 0 renames: a checkpoint is complete or absent, even if the power goes.
        """
        sums = {}
        for file in temporary.rglob("*"):
            writer = re.match(r"__(\d+)_", file.name)  # of DCP's files; the others are rank 0's
            if file.is_file() and int(writer[1] if writer else 0) == self.rank:
                sums[str(file.relative_to(temporary))] = sum_of(file)
        for part in gather(sums, self.group):
            sums |= part
        if self.rank:
            return
        description = {"progress": {"validation_loss": None} | progress, **self.facts, "sums": sums}
        description["sum_of_this_file"] = fingerprint(description)
        (temporary / "checkpoint.json").write_text(json.dumps(description, indent=2) + "\n")
        sync(temporary, *temporary.rglob("*"))
        shutil.rmtree(self.last, ignore_errors=True)  # a damaged one, passed over at the start
        temporary.rename(self.last)
        sync(self.directory, self.directory.parent)
        self.damaged.discard(self.last)
        self.remove_old()

    def remove_old(self) -> None:
        """Remove all but the `keep` newest and the best; unreadable ones stay."""
        losses = {}
        for path in self.all():
            try:
                losses[path] = read_description(path)["progress"]["validation_loss"]
            except ValueError as problem:
                say(f"{path} is left alone: {problem}")
        known = [path for path, loss in losses.items() if loss is not None and math.isfinite(loss)]
        best = min(known, key=losses.get, default=None)
        for path in list(losses)[self.keep :]:
            if path != best:
                removed = path.with_suffix(".tmp")
                path.rename(removed)  # gone at once, whatever happens now
                remove(removed)


# --- A run: its directory, metrics and progress ---------------------------------------------------

# Dense bf16 FLOP/s from the makers' data sheets (where "with sparsity" stands for twice as much).
PEAK_FLOPS = {
    "Laptop": None,  # slower than what they are named after
    "4090 D": None,
    "GB200": 2500e12,
    "B200": 2250e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


def peak_flops(name: str) -> float | None:
    """Of a GPU by its name as CUDA tells it; None if it is not known."""
    return next((peak for model, peak in PEAK_FLOPS.items() if model in name), None)


def peak_memory(device: torch.device) -> int:
    """Most bytes held so far: on the GPU by torch's allocator, else by the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Run:
    """A run's directory, metrics, words on the terminal and Weights & Biases; rank 0 writes.

    Every rank makes one. It changes nothing in the directory until `begin`, which locks it. `facts`
    is what is recorded of the run beside its numbers.
    """

    def __init__(
        self,
        flags: dict[str, Any],
        num_parameters: int,
        contents: str,
        device: torch.device,
        rank: int,
        world_size: int,
    ):
        self.directory = Path(flags["run_dir"])
        self.flags = flags
        self.device = device
        self.rank = rank
        self.timeout = datetime.timedelta(minutes=flags["timeout_minutes"])
        self.wandb = None
        self.profiler = None
        self.stop_requested = False
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        peak = peak_flops(name)
        self.peak_flops = peak * world_size if peak else None  # of all ranks
        self.facts = {
            "flags": flags,
            "contents": contents,
            "parameters": num_parameters,
            "world_size": world_size,
            "script": Path(sys.argv[0]).name,
            "device": name,
            "torch": torch.__version__,
            "flash_attention": torch.nn.attention.current_flash_attention_impl(),
        }
        self.refuse_unlike_ranks()

    def refuse_unlike_ranks(self) -> None:
        """All ranks have to have the same flags, data, tokenizer and model; a collective."""
        every = gather(self.flags | {"model, tokenizer or data": self.facts["contents"]})
        for rank, given in enumerate(every):
            for name, value in every[0].items():
                if given.get(name) != value:
                    refuse(
                        f"rank {rank} has another {name} than rank 0: {given.get(name)}, {value}"
                    )

    def begin(self, resumed: Path | None, step: int) -> None:
        """All checks have passed and training begins after `step`.

        From here on SIGTERM and SIGINT only ask the run to stop, see `should_stop`. Rank 0 cuts the
        lines of metrics.jsonl that come after `step`, and writes config.json.
        """
        self.first_step = step
        self.started = time.perf_counter()
        self.last_spoken = 0.0
        for group in dist.distributed_c10d._world.pg_map:  # those of a mesh have torch's default
            dist.distributed_c10d._set_pg_timeout(self.timeout, group)
        for stop_signal in (signal.SIGTERM, signal.SIGINT):
            signal.signal(stop_signal, self.request_stop)
        if self.rank == 0:
            with refusing(
                f"--run_dir {self.directory} cannot be written or is in use by another run"
            ):
                self.open_files(resumed, step)
            self.trace(step)
            if self.flags["wandb_project"]:
                with refusing("--wandb_project"):
                    self.begin_wandb()
        dist.barrier()
        file = self.directory / "metrics.jsonl"
        inodes = gather(file.stat().st_ino if file.exists() else None)
        if len(set(inodes)) > 1:
            refuse(f"--run_dir {self.directory} has to be the same directory on all nodes")

    def open_files(self, resumed: Path | None, step: int) -> None:
        """Lock the directory, write config.json and cut metrics.jsonl after `step`."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.metrics = open(self.directory / "metrics.jsonl", "a+", buffering=1)  # line by line
        # This lock ends with the process, however it dies, and is not inherited by forks.
        fcntl.lockf(self.metrics, fcntl.LOCK_EX | fcntl.LOCK_NB)
        kept = ""
        if resumed and is_own(resumed, self.directory):
            for line_step, line in read_metrics(self.directory):
                if line_step <= step:
                    kept += line
        (self.directory / "config.json").write_text(json.dumps(self.facts, indent=2) + "\n")
        self.metrics.truncate(len(kept))

    def begin_wandb(self) -> None:
        import wandb

        self.wandb = wandb.init(
            project=self.flags["wandb_project"],
            # One id as long as the directory lives, so that a resumed run goes on in wandb too.
            id=fingerprint(os.fstat(self.metrics.fileno()).st_ino, self.flags["run_dir"]),
            dir=self.directory,
            config=self.facts,
            resume="allow",
        )
        # Not wandb's own step, which must grow: a resumed run repeats some.
        self.wandb.define_metric("*", step_metric="step")

    def request_stop(self, *_: Any) -> None:
        self.stop_requested = True

    def should_stop(self) -> bool:
        """Whether any rank was asked to stop; a collective, so that all stop after one step."""
        requested = torch.tensor(int(self.stop_requested))
        dist.all_reduce(requested, dist.ReduceOp.MAX)
        return bool(requested)

    def trace(self, step: int) -> None:
        """`step` is done: profile on rank 0 from the first of --trace_steps to the last."""
        first, last = self.flags["trace_steps"] or (0, 0)
        if self.rank == 0 and step + 1 == first:
            self.profiler = torch.profiler.profile()
            self.profiler.start()
        if self.profiler and step == last:
            self.profiler.stop()
            self.profiler.export_chrome_trace(str(self.directory / "trace.json"))

    def say(self, text: str) -> None:
        if self.rank == 0:
            say(text)

    def log(self, line: dict[str, Any]) -> None:
        """A line of metrics.jsonl, and the same for Weights & Biases; NaN becomes null."""
        if self.rank:
            return
        finite = {
            name: value if value is None or math.isfinite(value) else None
            for name, value in line.items()
        }
        with refusing(f"cannot write {self.metrics.name}", code=1):
            self.metrics.write(json.dumps(finite) + "\n")
        if self.wandb:
            self.wandb.log(finite)

    def log_step(
        self, batch: GlobalBatch, flops: int, step: int, aim: str = "loss", **measured: float
    ) -> None:
        """Log an optimizer step; the terminal hears of its `aim` every ten seconds."""
        seconds = measured["step_seconds"]
        line = {
            "step": step,
            **measured,
            "padding_fraction": batch.padding_fraction,
            "tokens_per_second": batch.num_labels / seconds,
            "mfu": flops / seconds / self.peak_flops if self.peak_flops else None,
            "peak_memory_gib": peak_memory(self.device) / 2**30,
        }
        self.log(line)
        self.trace(step)
        now = time.perf_counter()
        steps = self.flags["steps"]
        if step in (self.first_step + 1, steps) or now - self.last_spoken > 10:
            left = (now - self.started) / (step - self.first_step) * (steps - step)
            speed = f"{line['tokens_per_second']:,.0f} tokens/s  {left:,.0f} s left"
            self.say(f"step {step}/{steps}  {aim} {measured[aim]:.4f}  {speed}")
            self.last_spoken = now

    def log_validation(self, step: int, loss: float, labels_per_byte: float | None) -> None:
        """Log a validation, in nats per label, under the training step it belongs to."""
        line = {
            "step": step,
            "validation_loss": loss,
            "validation_perplexity": math.exp(min(loss, 700)),
        }
        if labels_per_byte is not None:
            line["validation_bits_per_byte"] = loss / math.log(2) * labels_per_byte
        self.log(line)
        self.say(f"step {step}: validation loss {loss:.4f}")

    def finish(self, step: int, checkpoint: Path, prompt: np.ndarray, next_command: str) -> None:
        """Training is over: rank 0 writes `hf/`, shows what the model writes, says what is next."""
        if self.rank:
            return
        if step < self.flags["steps"]:
            again = "" if self.flags["resume"] == "auto" else " with --resume auto"
            there = f"saved in {checkpoint}; the same command{again} goes on from there"
            return say(f"stopped after step {step} of {self.flags['steps']}, {there}")
        torch.set_num_threads(os.cpu_count())  # the other ranks have ended
        with refusing(f"cannot write {self.directory}/hf ({checkpoint} is intact)", code=1):
            export(checkpoint, self.directory / "hf")
        if self.facts["parameters"] < 2e9:  # else it takes minutes, while GPUs are kept from others
            show_sample(self.directory / "hf", prompt)
        files = f"{self.directory}/metrics.jsonl, and {self.directory}/hf for transformers"
        say(f"files: {files}\nnext:  {next_command}")


SAMPLING = {"max_new_tokens": 160, "do_sample": True, "temperature": 0.6}


def show_sample(directory: Path, prompt: np.ndarray) -> None:
    """Show how an exported model continues the ids of `prompt`, as plain transformers does it."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        model = transformers.AutoModelForCausalLM.from_pretrained(directory)
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        torch.manual_seed(0)
        continued = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            pad_token_id=tokenizer.eos_token_id,
            **SAMPLING,
        )
        sample = tokenizer.decode(continued[0])
        say(f"--- the model continues the first tokens of a held-out text:\n{sample}\n---")
    except Exception as error:  # all outputs are there: the run has succeeded
        say(f"no sample of the model: {error}")


def command_line() -> None:
    if len(sys.argv) != 4 or sys.argv[1] != "export":
        refuse("usage: python common.py export CHECKPOINT OUT")
    checkpoint, out = map(Path, sys.argv[2:])
    problem = f"{out} exists already" if out.exists() else damage(checkpoint)
    if problem:
        refuse(f"export of {checkpoint}: {problem}")
    export(checkpoint, out)


if __name__ == "__main__":
    launch(command_line)
