"""What the four training scripts share and what teaches nothing about a parallel strategy.

Data flows one way: corpus -> tokens (cached on disk) -> batch plan (a pure function of lengths,
seed and step) -> collate -> micro-batch. Beside it stands the plumbing of a run: flags, errors,
metrics, progress. Nothing here knows a model, an optimizer or a strategy.
"""

import dataclasses
import datetime
import functools
import glob
import hashlib
import json
import math
import os
import queue
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

T = TypeVar("T")
IGNORED = -100  # label of a position without loss: cross entropy's own default `ignore_index`


# ---------------------------------------------------------------------------------------------
# Flags and endings
# ---------------------------------------------------------------------------------------------


class InputError(Exception):
    """Flags or input that cannot work, found alike on all ranks: one line, exit code 2."""


class RunError(Exception):
    """The run cannot go on, found alike on all ranks: one line, exit code 1."""


def launch(main: Callable[[], None]) -> None:
    """Run `main` so that every ending is a clean one: 0 finished, 2 bad input, 1 failure.

    `os._exit` after an error, because interpreter shutdown with live communication threads can
    abort or hang, and the other ranks must learn of the failure at once.
    """
    rank = int(os.environ.get("RANK", 0))
    try:
        return main()
    except (InputError, RunError) as error:
        if rank == 0:
            print(f"error: {error}", file=sys.stderr)
        else:
            time.sleep(5)  # torchrun ends all ranks when one exits: rank 0 must print first
        code = 2 if isinstance(error, InputError) else 1
    except Exception:
        print(f"rank {rank} failed:\n{traceback.format_exc()}", file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def flag(default: Any, help: str) -> Any:
    """A field of `Config`: a command-line flag with its default and its help text."""
    from transformers.hf_argparser import HfArg

    if isinstance(default, list):
        return HfArg(default_factory=lambda: list(default), help=help)
    return HfArg(default=default, help=help)


def parse_config(config_class: type[T]) -> T:
    """Parse the command line into the script's `Config` dataclass; InputError names what is off."""
    from transformers import HfArgumentParser

    def complain(message: str) -> None:
        raise InputError(message)

    parser = HfArgumentParser(config_class, allow_abbrev=False)
    parser.error = complain
    config, unknown = parser.parse_args_into_dataclasses(
        return_remaining_strings=True, look_for_args_file=False
    )
    if unknown:
        complain(f"unknown flag {unknown[0]}; --help lists the flags")
    given = {word.split("=")[0].lstrip("-").replace("-", "_") for word in sys.argv[1:]}
    if config.init_from:
        # The weights bring their architecture and their vocabulary, unless flags say otherwise.
        config.init_from = hugging_face_directory(config.init_from)
        config.model = config.model if "model" in given else config.init_from
        config.tokenizer = config.tokenizer if "tokenizer" in given else config.init_from
    return config


def hugging_face_directory(name: str) -> str:
    """Where the weights `name` lie: a directory, the `hf/` of a run directory, or a hub id."""
    path = Path(name)
    if not path.exists():
        return name  # a hub id, fetched by `first_on_each_node`
    for directory in (path, path / "hf"):
        if (directory / "config.json").exists() and list(directory.glob("*.safetensors")):
            return str(directory)
    raise InputError(f"--init_from {name}: no config.json with *.safetensors there or in its hf/")


def check_config(config: Any, device: torch.device) -> None:
    """Settle `--precision auto`; InputError for flags that cannot work, before anything is slow."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if config.precision == "auto":
        config.precision = "bf16" if device.type == "cuda" else "fp32"
    if world_size % getattr(config, "dp_replicate", 1):
        raise InputError(f"--dp_replicate {config.dp_replicate} does not divide {world_size} ranks")
    edges, micro = config.bucket_edges, config.micro_batch_tokens
    if not edges or edges[0] < 1 or any(a >= b for a, b in zip(edges, edges[1:])):
        raise InputError(f"--bucket_edges {edges} must be positive and increasing")
    if edges[-1] > micro:
        raise InputError(
            f"--micro_batch_tokens {micro} is less than the longest row, --bucket_edges {edges[-1]}"
        )
    unit = micro * world_size
    if config.global_batch_tokens < 1 or config.global_batch_tokens % unit:
        below = config.global_batch_tokens // unit * unit
        fitting = f"{below} or {below + unit}" if below else f"{unit}"
        raise InputError(
            f"--global_batch_tokens {config.global_batch_tokens} is not a multiple of "
            f"--micro_batch_tokens {micro} x {world_size} ranks = {unit}; {fitting} would fit"
        )
    for name in ("steps", "eval_every", "eval_batches"):
        if getattr(config, name) < 1:
            raise InputError(f"--{name} {getattr(config, name)} must be at least 1")
    for name in ("warmup_steps", "weight_decay", "grad_clip", "seed"):
        if getattr(config, name) < 0:
            raise InputError(f"--{name} {getattr(config, name)} must not be negative")
    if not 0 <= config.min_learning_rate <= config.learning_rate:
        raise InputError(
            f"--min_learning_rate {config.min_learning_rate} must lie between 0 and "
            f"--learning_rate {config.learning_rate}"
        )
    checkpointing = config.activation_checkpointing
    if checkpointing not in ("none", "full", "selective"):
        try:
            fits = 0 < float(checkpointing) < 1
        except ValueError:
            fits = False
        if not fits:
            raise InputError(
                f"--activation_checkpointing {checkpointing} is not none, full, selective or a "
                "fraction of the blocks such as 0.5"
            )
    if config.precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise InputError(f"--precision bf16: {torch.cuda.get_device_name()} cannot, use fp32")
    if config.compile:
        needed = "triton" if device.type == "cuda" else "a C++ compiler"
        found = (
            torch.utils._triton.has_triton()
            if device.type == "cuda"
            else any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++")))
        )
        if not found:
            raise InputError(f"--compile needs {needed}, which this machine lacks")


# ---------------------------------------------------------------------------------------------
# Ranks that wait for one another
# ---------------------------------------------------------------------------------------------


@functools.cache
def patient_group() -> dist.ProcessGroup:
    """A group whose collectives wait a month: one rank may prepare data for hours meanwhile."""
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(days=30))


def first_on_each_node(function: Callable[[], T]) -> T:
    """What `function` returned on the first rank of this node (it runs nowhere else).

    An InputError on any node is raised on all ranks. What is returned is pickled, so keep it small.
    """
    if not dist.is_initialized():
        return function()
    node = int(os.environ.get("GROUP_RANK", 0))
    result, error = None, None
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        try:
            result = function()
        except InputError as problem:
            error = str(problem)
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, (node, result, error), group=patient_group())
    for _, _, problem in outcomes:
        if problem:
            raise InputError(problem)
    return next(value for where, value, _ in outcomes if where == node and value is not None)


# ---------------------------------------------------------------------------------------------
# Tokenizers
# ---------------------------------------------------------------------------------------------

END_OF_TEXT = "<|endoftext|>"


class TiktokenTokenizer:
    """A `tiktoken.Encoding` (https://github.com/openai/tiktoken), or `bytes`: one built here."""

    def __init__(self, name: str):
        import tiktoken

        if name == "bytes":
            self.encoding = tiktoken.Encoding(
                name="bytes",
                pat_str=r"[\s\S]",
                mergeable_ranks={bytes([value]): value for value in range(256)},
                special_tokens={END_OF_TEXT: 256},
            )
        else:
            try:
                self.encoding = tiktoken.get_encoding(name)
            except Exception as error:  # requests' errors, which are tiktoken's choice of library
                raise InputError(
                    f"--tokenizer {name}: its vocabulary could not be fetched "
                    f"({type(error).__name__}); without network set TIKTOKEN_CACHE_DIR to a folder "
                    "that holds it"
                ) from error
        self.name = name
        self.vocab_size = self.encoding.n_vocab
        self.end_of_text = self.encoding.eot_token

    def encode_batch(self, texts: list[str], threads: int = 1) -> list[np.ndarray]:
        """Ids of each text, without special tokens: `<|endoftext|>` in a text stays plain text."""
        if self.name == "bytes":
            return [np.frombuffer(t.encode("utf-8", "replace"), np.uint8) for t in texts]
        encode = functools.partial(
            self.encoding.encode_to_numpy, allowed_special=set(), disallowed_special=()
        )
        if threads == 1:
            return [encode(text) for text in texts]
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(threads) as pool:  # tiktoken encodes outside the GIL
            return list(pool.map(encode, texts, chunksize=max(1, len(texts) // (8 * threads))))

    def fingerprint(self) -> str:
        """Changes when the ids that a text gets may change."""
        return f"tiktoken/{self.name}/{self.vocab_size}"

    def to_transformers(self) -> Any:
        """The same tokenizer as a `transformers` fast tokenizer."""
        import base64
        import re

        from transformers import PreTrainedTokenizerFast
        from transformers.convert_slow_tokenizer import TikTokenConverter

        ranks, special = self.encoding._mergeable_ranks, dict(self.encoding._special_tokens)
        # Added tokens get consecutive ids, so gaps (cl100k_base has some) need a name too.
        names = {index: name for name, index in special.items()}
        every = [names.get(i, f"<|unused_{i}|>") for i in range(len(ranks), self.vocab_size)]
        # In the regex dialect of `tokenizers` a{1,3}+ is a repetition of a{1,3}, not possessive.
        pattern = re.sub(r"(\\p\{\w+\}\{\d+,\d+\})\+", r"(?>\1)", self.encoding._pat_str)
        with tempfile.NamedTemporaryFile("wb", suffix=".tiktoken") as file:
            for token, rank in ranks.items():
                file.write(base64.b64encode(token) + b" %d\n" % rank)
            file.flush()
            converted = TikTokenConverter(
                file.name, pattern=pattern, extra_special_tokens=every
            ).converted()
        return PreTrainedTokenizerFast(
            tokenizer_object=converted,
            eos_token=names[self.end_of_text],
            clean_up_tokenization_spaces=False,
        )


class HuggingFaceTokenizer:
    """A fast tokenizer from a directory or the hub; no code is ever loaded from there."""

    def __init__(self, name: str):
        from transformers import AutoTokenizer

        try:
            self.tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            raise InputError(
                f"--tokenizer {name} is neither bytes, a tiktoken encoding ({tiktoken_names()}) "
                "nor a Hugging Face tokenizer that can be loaded"
            ) from error
        if not self.tokenizer.is_fast:
            raise InputError(f"--tokenizer {name} has no fast (tokenizers) implementation")
        if self.tokenizer.eos_token_id is None:
            raise InputError(f"--tokenizer {name} has no end-of-text (eos) token")
        self.name = name
        self.vocab_size = len(self.tokenizer)
        self.end_of_text = self.tokenizer.eos_token_id

    def encode_batch(self, texts: list[str], threads: int = 1) -> list[np.ndarray]:
        """Ids of each text, without special tokens; the library spreads it over its own threads."""
        backend = self.tokenizer.backend_tokenizer
        backend.encode_special_tokens = True  # a special token spelled in a text stays plain text
        encoded = backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encoded]

    def fingerprint(self) -> str:
        """Changes when the ids that a text gets may change."""
        return hashlib.sha256(self.tokenizer.backend_tokenizer.to_str().encode()).hexdigest()

    def to_transformers(self) -> Any:
        """The same tokenizer as a `transformers` fast tokenizer."""
        self.tokenizer.backend_tokenizer.encode_special_tokens = False
        return self.tokenizer


def tiktoken_names() -> str:
    """The encodings that this tiktoken knows, for error messages."""
    import tiktoken

    return ", ".join(tiktoken.list_encoding_names())


@functools.lru_cache
def load_tokenizer(name: str) -> TiktokenTokenizer | HuggingFaceTokenizer:
    """The tokenizer of `--tokenizer name`: vocab_size, end_of_text, encode_batch."""
    if name == "bytes" or name in tiktoken_names().split(", "):
        return TiktokenTokenizer(name)
    return HuggingFaceTokenizer(name)


# ---------------------------------------------------------------------------------------------
# Corpus: text -> tokens on disk
# ---------------------------------------------------------------------------------------------


def standard_library_files() -> list[str]:
    """Python's own standard library without tests and tables: real text on every machine."""
    import sysconfig

    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "ensurepip"}
    return [
        str(path)
        for path in sorted(root.rglob("*.py"))
        if not skipped.intersection(path.relative_to(root).parts)
    ]


def standard_library_documents(files: list[str], version: str) -> Iterator[dict[str, str]]:
    """One document for each top-level function and class. `version` keeps caches apart."""
    import ast
    import warnings

    for file in files:
        source = Path(file).read_text(encoding="utf-8", errors="replace")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(source)
        lines = source.splitlines(keepends=True)
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                yield {"text": "".join(lines[first - 1 : node.end_lineno])}


FILE_READERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".txt": "text"}


def load_text(config: Any) -> Any:
    """The `datasets.Dataset` behind --dataset, with its text column checked."""
    import datasets

    name, column = config.dataset, config.text_column
    try:
        if name == "stdlib":
            files = standard_library_files()
            corpus = datasets.Dataset.from_generator(
                standard_library_documents, gen_kwargs={"files": files, "version": sys.version}
            )
        elif reader := next((r for end, r in FILE_READERS.items() if end in name), None):
            if "://" not in name and not glob.glob(name, recursive=True):
                raise InputError(f"--dataset {name}: no such file")
            corpus = datasets.load_dataset(reader, data_files=name, split=config.dataset_split)
        else:
            corpus = datasets.load_dataset(name, config.dataset_config, split=config.dataset_split)
    except InputError:
        raise
    except Exception as error:  # whatever reader, file system or hub client is behind the name
        cause = error.__cause__ or error
        reason = " ".join(f"{type(cause).__name__}: {cause}".split())
        raise InputError(f"--dataset {name} cannot be read: {reason[:300]}") from error
    if column not in corpus.column_names:
        raise InputError(
            f"--dataset {name} has no column {column!r}; --text_column can be one of "
            f"{', '.join(corpus.column_names)}"
        )
    if corpus.features[column].dtype not in ("string", "large_string"):
        raise InputError(f"--text_column {column} holds {corpus.features[column]}, not text")
    return corpus.select_columns([column])


def tokenize_batch(table: Any, tokenizer_name: str, fingerprint: str) -> Any:
    """Arrow table of texts -> table of documents: `tokens`, `bytes` of text, `digest` of content.

    Runs in the worker processes of `datasets.map`; a plain function of plain arguments, because
    the cache's key is a hash of them (`fingerprint` is there for that alone).
    """
    import pyarrow as pa

    tokenizer = load_tokenizer(tokenizer_name)
    texts = [text for text in table[0].to_pylist() if text]
    end = np.array([tokenizer.end_of_text])
    pieces = [part for ids in tokenizer.encode_batch(texts) for part in (ids, end)]
    lengths = [len(ids) + 1 for ids in pieces[::2]]
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int32)]).astype(np.int32)
    flat = np.concatenate(pieces or [end[:0]]).astype(token_dtype(tokenizer.vocab_size))
    encoded = [text.encode("utf-8", "replace") for text in texts]
    digests = [hashlib.blake2b(text, digest_size=8).digest() for text in encoded]
    return pa.table(
        {
            "tokens": pa.ListArray.from_arrays(offsets, flat),
            "bytes": np.array([len(text) for text in encoded], np.int32),
            "digest": np.frombuffer(b"".join(digests), np.uint64),
        }
    )


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest unsigned integer type that holds every id of the vocabulary."""
    return np.min_scalar_type(vocab_size - 1)


def tokenize_corpus(config: Any) -> list[str]:
    """Tokenize the corpus once; returns the Arrow files in the Hugging Face cache."""
    import datasets

    if not (sys.stderr.isatty() and int(os.environ.get("RANK", 0)) == 0):
        datasets.disable_progress_bars()
    tokenizer = load_tokenizer(config.tokenizer)
    corpus = load_text(config)
    dtype = token_dtype(tokenizer.vocab_size).name
    features = {"tokens": datasets.List(datasets.Value(dtype))}
    features |= {"bytes": datasets.Value("int32"), "digest": datasets.Value("uint64")}
    processes = min(len(os.sched_getaffinity(0)), math.ceil(len(corpus) / 1000))
    tokenized = corpus.with_format("arrow").map(
        tokenize_batch,
        batched=True,
        remove_columns=corpus.column_names,
        features=datasets.Features(features),
        fn_kwargs={"tokenizer_name": tokenizer.name, "fingerprint": tokenizer.fingerprint()},
        num_proc=processes if processes > 1 else None,
    )
    return [file["filename"] for file in tokenized.cache_files]


class Documents:
    """Tokenized documents, memory-mapped from Arrow files.

    Attributes (one entry a document):
        lengths: int64, tokens including the end-of-text token.
        bytes: int32, bytes of its text in UTF-8.
        digest: uint64, hash of its text.
    """

    def __init__(self, files: list[str]):
        import pyarrow as pa

        tables = [pa.ipc.open_stream(pa.memory_map(file)).read_all() for file in files]
        table = pa.concat_tables(tables)
        lists = table["tokens"].chunks
        self.bytes = table["bytes"].to_numpy()
        self.digest = table["digest"].to_numpy()
        offsets = [chunk.offsets.to_numpy() for chunk in lists]
        self._flat = [chunk.values.to_numpy() for chunk in lists]
        self._begin = np.concatenate([o[:-1] for o in offsets] or [np.zeros(0, np.int64)])
        self._chunk = np.repeat(np.arange(len(lists)), [len(o) - 1 for o in offsets])
        self.lengths = np.concatenate(
            [np.diff(o) for o in offsets] or [np.zeros(0, np.int64)]
        ).astype(np.int64)

    def tokens(self, document: int, start: int, stop: int) -> np.ndarray:
        """Ids of a document from `start` to `stop`: a view of the mapped file."""
        begin = self._begin[document]
        return self._flat[self._chunk[document]][begin + start : begin + stop]


def split_by_content(digest: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Document numbers for training and for validation.

    Validation gets the 2 % of the documents (at most 5,000, at least one) with the smallest
    hashes. So the split depends on nothing but the corpus, a document never moves when others
    are added far from the limit, and equal documents always land on the same side.

    Raises:
        InputError: fewer than two different documents.
    """
    if len(digest) == 0:
        raise InputError("--dataset holds no text")
    held_out = max(1, min(len(digest) // 50, 5000))
    validation = digest <= np.partition(digest, held_out - 1)[held_out - 1]
    if validation.all():
        raise InputError("--dataset holds only one document; one more is needed for validation")
    return np.flatnonzero(~validation), np.flatnonzero(validation)


# ---------------------------------------------------------------------------------------------
# Batch plan: which rows form micro-batch k of an epoch
# ---------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Pieces:
    """Stretches of documents, at most as long as the longest row.

    A piece of length n reads the n tokens from `start` and predicts the n tokens from `start + 1`:
    so a split document loses no prediction, and length = positions = labels.
    """

    document: np.ndarray
    start: np.ndarray
    length: np.ndarray


def cut_into_pieces(document: np.ndarray, tokens: np.ndarray, longest: int) -> Pieces:
    """Cut documents of `tokens[i]` tokens into pieces of at most `longest` positions each."""
    positions = tokens - 1  # the last token is predicted but never read
    count = -(-positions // longest)
    owner = np.repeat(np.arange(len(document)), count)
    start = (np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)) * longest
    length = np.minimum(longest, positions[owner] - start)
    return Pieces(document[owner], start, length)


@dataclasses.dataclass
class Plan:
    """Micro-batch k of an epoch holds the pieces `order[start[k]:stop[k]]`."""

    order: np.ndarray
    start: np.ndarray
    stop: np.ndarray

    def pieces(self, k: int) -> np.ndarray:
        """The numbers of the pieces in micro-batch k."""
        return self.order[self.start[k] : self.stop[k]]


def plan_bucketed(
    length: np.ndarray, edges: list[int], micro_batch_tokens: int, rng: np.random.Generator
) -> Plan:
    """Micro-batches of rows from one length bucket each, shuffled together.

    Bucket b holds the lengths in (edges[b-1], edges[b]]; its micro-batches have
    micro_batch_tokens // edges[b] rows, so each costs about the same. Shuffling the micro-batches
    of all buckets matters: one bucket after the other would be an accidental curriculum.
    """
    bucket = np.searchsorted(edges, length).astype(np.uint16)  # 16 bits: a radix sort below
    order = rng.permutation(len(length))
    order = order[np.argsort(bucket[order], kind="stable")]
    stops = np.cumsum(np.bincount(bucket, minlength=len(edges)))
    starts, ends = [], []
    for edge, first, last in zip(edges, [0, *stops[:-1]], stops):
        rows = micro_batch_tokens // edge
        begin = np.arange(first, last, rows)
        starts.append(begin)
        ends.append(np.minimum(begin + rows, last))
    shuffled = rng.permutation(sum(map(len, starts)))
    return Plan(order, np.concatenate(starts)[shuffled], np.concatenate(ends)[shuffled])


def plan_packed(length: np.ndarray, capacity: int, rng: np.random.Generator) -> Plan:
    """Best-fit-decreasing packing of pieces into rows of `capacity` (arXiv 2404.10830).

    The longest piece first, each into the fullest row that still takes it. Rows with the same free
    space and pieces of the same length are interchangeable, so both are handled in groups and the
    work grows with the number of different lengths, not with the number of pieces.
    """
    order = rng.permutation(len(length))
    order = order[np.argsort(length[order], kind="stable")[::-1]]
    sizes, counts = np.unique(length, return_counts=True)
    row_of = np.empty(len(length), np.int64)  # of the pieces in `order`
    rows_with = [[] for _ in range(capacity + 1)]  # free space -> arrays of row numbers
    is_open = np.zeros(capacity + 1, bool)
    placed, rows = 0, 0

    def place(space: int, which: np.ndarray, size: int, left: int) -> int:
        """Fill rows of equal free space with up to `left` pieces; returns how many went in."""
        nonlocal placed
        each = space // size
        used = min(len(which), -(-left // each))
        taken = min(left, used * each)
        row_of[placed : placed + taken] = np.repeat(which[:used], each)[:taken]
        placed += taken
        full = taken // each
        for free, group in (
            (space - each * size, which[:full]),
            (space - (taken - full * each) * size, which[full:used]),
            (space, which[used:]),
        ):
            if len(group):
                rows_with[free].append(group)
                is_open[free] = True
        return taken

    for size, left in zip(sizes[::-1].tolist(), counts[::-1].tolist()):
        for space in (np.flatnonzero(is_open[size:]) + size).tolist():
            if not left:
                break
            which, rows_with[space], is_open[space] = np.concatenate(rows_with[space]), [], False
            left -= place(space, which, size, left)
        if left:
            new = -(-left // (capacity // size))
            place(capacity, np.arange(rows, rows + new), size, left)
            rows += new
    order = order[np.argsort(row_of, kind="stable")]
    stop = np.cumsum(np.bincount(row_of, minlength=rows))
    start = np.concatenate([[0], stop[:-1]])
    shuffled = rng.permutation(rows)
    return Plan(order, start[shuffled], stop[shuffled])


# ---------------------------------------------------------------------------------------------
# Batches: plan -> tensors
# ---------------------------------------------------------------------------------------------


@dataclasses.dataclass
class GlobalBatch:
    """What one optimizer step trains on.

    Attributes:
        micro_batches: this rank's, each a dict of arguments for the model.
        labels: label tokens over all ranks and micro-batches: what the loss is divided by.
        positions: token positions computed for them, padding included.
        attended: sum of the squared row (or document) lengths, for the FLOPs of attention.
    """

    micro_batches: list[dict[str, Any]]
    labels: int
    positions: int
    attended: int


class Batches:
    """The endless stream of micro-batches of one set of documents, seen by one rank.

    Epoch e is a plan seeded with (seed, e); the stream is one epoch after the other, and step s
    takes its micro-batches number s*G to (s+1)*G - 1, where G = global / micro batch tokens. So
    the step number is the position in the data, whatever the world size.
    """

    def __init__(self, documents: Documents, chosen: np.ndarray, config: Any, device: torch.device):
        self.documents, self.config = documents, config
        self.pieces = cut_into_pieces(chosen, documents.lengths[chosen], config.bucket_edges[-1])
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.pin = device.type == "cuda"
        # Compiled blocks want few shapes; otherwise rows are only as long as they need to be.
        self.fixed_shapes = config.compile
        self.plan = functools.lru_cache(maxsize=2)(self._plan)
        first = self.plan(0)
        self.micro_batches_per_epoch = len(first.start)
        self.most_pieces = int((first.stop - first.start).max())

    def _plan(self, epoch: int) -> Plan:
        rng = np.random.default_rng([self.config.seed, epoch])
        micro = self.config.micro_batch_tokens
        if self.config.batching == "packed":
            return plan_packed(self.pieces.length, micro, rng)
        return plan_bucketed(self.pieces.length, self.config.bucket_edges, micro, rng)

    def shape(self, pieces: np.ndarray) -> tuple[int, int]:
        """Rows and row length of the micro-batch that holds these pieces."""
        length = self.pieces.length[pieces]
        micro = self.config.micro_batch_tokens
        if self.config.batching == "packed":
            return 1, micro if self.fixed_shapes else int(length.sum())
        longest = int(length.max())
        if not self.fixed_shapes:
            return len(pieces), longest
        edge = self.config.bucket_edges[np.searchsorted(self.config.bucket_edges, longest)]
        return micro // edge, edge

    def collate(self, pieces: np.ndarray) -> dict[str, Any]:
        """Model arguments: `input_ids` and `labels`, int64 [rows, length], padded on the right.

        Labels are already shifted: labels[r, i] is the token that follows input_ids[r, i]. Right
        padding needs no attention mask, since no real token sees the padding after it. Packed
        rows also have `position_ids` and the document boundaries under the names by which
        transformers hands them to variable-length attention.
        """
        rows, width = self.shape(pieces)
        # [input ids | labels], each [rows, width]; padding is read as the end-of-text token.
        both = np.full((2, rows, width), IGNORED, np.int64)
        both[0] = load_tokenizer(self.config.tokenizer).end_of_text
        packed = self.config.batching == "packed"
        row, column, boundaries = 0, 0, [0]
        for piece in pieces.tolist():
            start, length = self.pieces.start[piece], int(self.pieces.length[piece])
            tokens = self.documents.tokens(self.pieces.document[piece], start, start + length + 1)
            both[0, row, column : column + length] = tokens[:-1]
            both[1, row, column : column + length] = tokens[1:]
            if packed:
                column += length
                boundaries.append(column)
            else:
                row += 1
        tensors = dict(zip(("input_ids", "labels"), torch.from_numpy(both)))
        if packed:
            longest = self.config.bucket_edges[-1]
            if self.fixed_shapes:
                # The padding forms documents of its own, and empty ones fill up the boundaries:
                # as many of them for every row, so that nothing is compiled twice.
                most = self.most_pieces + 1 + -(-width // longest)
                boundaries += [*range(column + longest, width, longest), width]
                boundaries += [width] * (most - len(boundaries))
            starts = np.repeat(boundaries[:-1], np.diff(boundaries))
            tensors["position_ids"] = torch.from_numpy(np.arange(width) - starts)[None]
            limits = torch.tensor(boundaries, dtype=torch.int32)
            tensors |= {"cu_seq_lens_q": limits, "cu_seq_lens_k": limits}
        if self.pin:
            tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
        if packed:
            tensors |= {"max_length_q": longest, "max_length_k": longest}
        return tensors

    def global_batch(self, step: int) -> GlobalBatch:
        """What step `step` (counted from 0) trains on, with the micro-batches of this rank."""
        size = self.config.global_batch_tokens // self.config.micro_batch_tokens
        numbers = [
            divmod(k, self.micro_batches_per_epoch) for k in range(step * size, (step + 1) * size)
        ]
        chosen = [self.plan(epoch).pieces(k) for epoch, k in numbers]
        # Neighbours in cost run at the same time on different ranks, so that none waits.
        shapes = [self.shape(pieces) for pieces in chosen]
        by_cost = sorted(range(size), key=lambda i: (shapes[i][0] * shapes[i][1], shapes[i][1]))
        length = self.pieces.length[np.concatenate(chosen)]
        return GlobalBatch(
            [self.collate(chosen[i]) for i in by_cost[self.rank :: self.world_size]],
            labels=int(length.sum()),
            positions=sum(rows * width for rows, width in shapes),
            attended=int((length.astype(np.int64) ** 2).sum()),
        )

    def stream(self, first_step: int, last_step: int) -> Iterator[GlobalBatch]:
        """Global batches of the steps [first_step, last_step), made ahead in a thread."""
        ready: queue.Queue[GlobalBatch | BaseException] = queue.Queue(maxsize=2)

        def fill() -> None:
            try:
                for step in range(first_step, last_step):
                    ready.put(self.global_batch(step))
            except BaseException as error:  # raised below, in the thread that trains
                ready.put(error)

        threading.Thread(target=fill, daemon=True).start()
        for _ in range(first_step, last_step):
            item = ready.get()
            if isinstance(item, BaseException):
                raise item
            yield item

    def prompt(self) -> np.ndarray:
        """The first tokens of a document, for the model to continue."""
        document = self.pieces.document[0]
        return self.documents.tokens(document, 0, min(16, self.documents.lengths[document] - 1))

    def evaluation(self, number: int) -> Iterator[dict[str, Any]]:
        """This rank's share of the first `number` micro-batches of epoch 0: always the same ones.

        Every rank gets equally many, because each forward pass is a collective under FSDP; where
        they do not divide, a rank repeats one without labels.
        """
        plan, number = self.plan(0), min(number, self.micro_batches_per_epoch)
        for k in range(self.rank, -(-number // self.world_size) * self.world_size, self.world_size):
            batch = self.collate(plan.pieces(min(k, number - 1)))
            if k >= number:
                batch["labels"] = torch.full_like(batch["labels"], IGNORED)
            yield batch

    def bits_per_byte(self, loss: float, number: int) -> float:
        """Turn nats per token over `evaluation(number)` into bits per byte of its text."""
        plan = self.plan(0)
        pieces = np.concatenate([plan.pieces(k) for k in range(min(number, len(plan.start)))])
        document = self.pieces.document[pieces]
        labels = self.documents.lengths[document] - 1
        share = self.pieces.length[pieces] / labels  # of its document, for documents that were cut
        bytes_of_text = (share * self.documents.bytes[document]).sum()
        return loss * self.pieces.length[pieces].sum() / bytes_of_text / math.log(2)


def load_batches(config: Any, device: torch.device) -> tuple[Any, Batches, Batches]:
    """Tokenizer, training batches and validation batches of the corpus that the flags name."""
    files = first_on_each_node(lambda: tokenize_corpus(config))
    documents = Documents(files)
    training, validation = split_by_content(documents.digest)
    return (
        load_tokenizer(config.tokenizer),
        Batches(documents, training, config, device),
        Batches(documents, validation, config, device),
    )


def to_device(micro_batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The same micro-batch on the device; the copy overlaps with what runs there already."""
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for name, value in micro_batch.items()
    }


# ---------------------------------------------------------------------------------------------
# Attention within documents
# ---------------------------------------------------------------------------------------------


def document_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int = 0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention that never crosses a document boundary and never needs a mask.

    Args:
        query: [rows, heads, length, head dimension]; key and value may have fewer heads.
        cu_seq_lens_q: int32 [documents + 1], where the documents of a packed row begin and end;
            None for rows that hold one document each, padded on the right.
        max_length_q: length of the longest document of a packed row.

    Returns:
        [rows, length, heads, head dimension] and None, as transformers expects.
    """
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    if cu_seq_lens_q is None:
        return sdpa_attention_forward(module, query, key, value, None, **kwargs)
    scale = kwargs.get("scaling")
    groups = query.shape[1] // key.shape[1]
    if query.is_cuda and query.dtype != torch.float32:  # [tokens, heads, head dimension]
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        ends = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
        try:
            from flash_attn import flash_attn_varlen_func
        except ImportError:
            from torch.nn.attention.varlen import varlen_attn

            k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
            return varlen_attn(q, k, v, *ends, scale=scale, window_size=(-1, 0))[None], None
        return flash_attn_varlen_func(q, k, v, *ends, softmax_scale=scale, causal=True)[None], None
    return per_document_attention(
        query, repeat_kv(key, groups), repeat_kv(value, groups), cu_seq_lens_q, scale
    ), None


@torch.compiler.disable  # its shapes differ in every row
def per_document_attention(query, key, value, boundaries: torch.Tensor, scale: float | None):
    """Where no variable-length kernel exists: causal attention, one document after the other."""
    lengths = boundaries.diff()
    parts = (x.split(lengths.tolist(), dim=2) for x in (query, key, value))
    outputs = [
        torch.nn.functional.scaled_dot_product_attention(*part, is_causal=True, scale=scale)
        for part in zip(*parts)
        if part[0].shape[2]
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2)


# ---------------------------------------------------------------------------------------------
# Architecture and weights in Hugging Face form
# ---------------------------------------------------------------------------------------------


def read_architecture(config: Any, vocabulary: int) -> Any:
    """The `config.json` that --model names; code from the hub is never run.

    Raises:
        InputError: it cannot be read, or would not train on this data as it is meant to.
    """
    from transformers import AutoConfig

    try:
        shape = AutoConfig.from_pretrained(config.model, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"--model {config.model} is neither tiny, qwen2-0.5b nor a directory or hub id with a "
            "config.json that this transformers knows"
        ) from error
    if vocabulary > shape.vocab_size:
        raise InputError(
            f"--tokenizer {config.tokenizer} has {vocabulary} ids, but --model {config.model} "
            f"has a vocabulary of {shape.vocab_size}"
        )
    slides = getattr(shape, "use_sliding_window", True)
    for name in ("max_position_embeddings", "attention_chunk_size") + ("sliding_window",) * slides:
        limit = getattr(shape, name, None)
        if limit is not None and config.bucket_edges[-1] > limit:
            raise InputError(
                f"--bucket_edges {config.bucket_edges[-1]} exceeds {name} {limit} of --model "
                f"{config.model}"
            )
    for name in (
        "final_logit_softcapping",
        "attn_logit_softcapping",
        "logit_scale",
        "logits_scaling",
    ):
        if getattr(shape, name, None) not in (None, 1):
            raise InputError(f"--model {config.model} changes its logits ({name}): not supported")
    return shape


# ---------------------------------------------------------------------------------------------
# Weights in Hugging Face form
# ---------------------------------------------------------------------------------------------


def load_weights(model: torch.nn.Module, name: str) -> None:
    """Fill the model's parameters from a Hugging Face directory or hub id, in place.

    Works on whole and on sharded parameters: every rank reads just the slices it holds, cast on
    the way, so no rank ever holds a second copy.

    Raises:
        InputError: names the parameters that are missing, unexpected or of another shape.
    """
    import torch.distributed.checkpoint as dcp
    from safetensors import safe_open
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    def fetch() -> str:
        from huggingface_hub import snapshot_download

        try:
            return snapshot_download(name, allow_patterns=["*.json", "*.safetensors"])
        except OSError as error:
            raise InputError(f"--init_from {name}: {error}") from error

    directory = name if Path(name).is_dir() else first_on_each_node(fetch)
    stored = {}
    for file in Path(directory).glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            stored |= {key: tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()}
    state = get_model_state_dict(model)
    # A tied output embedding is the input embedding; most files hold it once.
    tied = set(model._tied_weights_keys or ()) if model.config.tie_word_embeddings else set()
    wanted = {key: tuple(value.shape) for key, value in state.items() if key not in tied}
    problems = {
        "missing": sorted(wanted.keys() - stored.keys()),
        "unexpected": sorted(stored.keys() - wanted.keys() - tied),
        "of another shape": [
            f"{key} {list(stored[key])} instead of {list(shape)}"
            for key, shape in wanted.items()
            if stored.get(key, shape) != shape
        ],
    }
    for problem, keys in problems.items():
        if keys:
            raise InputError(
                f"--init_from {name} does not fit --model: {problem}: {', '.join(keys[:5])}"
                + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")
            )
    wanted = {key: state[key] for key in wanted}
    dcp.load(wanted, storage_reader=HuggingFaceStorageReader(str(directory)))
    set_model_state_dict(model, state)


def export(directory: Path, shape: Any, state: dict[str, torch.Tensor], tokenizer: Any) -> None:
    """Write what AutoModelForCausalLM and AutoTokenizer load; complete, or not there at all.

    Every rank must call it: gathering a sharded tensor is a collective. One tensor is gathered at
    a time, and rank 0 alone keeps them, in CPU memory.
    """
    from torch.distributed.tensor import DTensor
    from transformers import AutoModelForCausalLM, logging

    first, weights = not dist.is_initialized() or dist.get_rank() == 0, {}
    for name, tensor in state.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if first:
            weights[name] = whole.detach().cpu()
    if not first:
        return
    logging.disable_progress_bar()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape)
    temporary = directory.with_name(directory.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary, state_dict=weights)
    tokenizer.to_transformers().save_pretrained(temporary)
    shutil.rmtree(directory, ignore_errors=True)
    temporary.rename(directory)


def write_sample(directory: Path, prompt: np.ndarray, device: torch.device) -> str:
    """How the exported model continues a few tokens, as plain transformers does it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory).to(device)
    ids = torch.from_numpy(prompt.astype(np.int64))[None].to(device)
    torch.manual_seed(0)
    written = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=160,
        do_sample=True,
        temperature=0.7,
        pad_token_id=tokenizer.eos_token_id,
    )
    return tokenizer.decode(written[0])


# ---------------------------------------------------------------------------------------------
# A run: its directory, metrics and progress
# ---------------------------------------------------------------------------------------------

# Dense bf16 FLOP/s by the makers' data sheets (those list twice as much "with sparsity").
PEAK_FLOPS = {
    "B200": 2250e12, "GH200": 989e12, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12,
    "H100": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 6000 Ada": 364e12, "L4": 121e12,
    "A10G": 70e12, "A10": 125e12, "RTX 4090": 165e12, "RTX A6000": 155e12, "RTX 3090": 71e12,
}  # fmt: skip


def open_run_directory(config: Any) -> Path:
    """Make --run_dir and see that it can be written."""

    def make() -> Path:
        directory = Path(config.run_dir)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory) as file:
                file.write(b"\0" * 4096)
        except OSError as error:
            raise InputError(
                f"--run_dir {directory} cannot be written: {error.strerror}"
            ) from error
        return directory

    return first_on_each_node(make)


class Run:
    """metrics.jsonl, progress and Weights & Biases. Every rank calls it, rank 0 writes.

    Args:
        directory: the run directory.
        config: the flags.
        device: where this rank computes.
        shape: the model's architecture.
        optimizer: its parameters are what this rank keeps between steps.
    """

    def __init__(
        self, directory: Path, config: Any, device: torch.device, shape: Any, optimizer: Any
    ):
        from transformers import AutoModelForCausalLM

        self.directory, self.config, self.device = directory, config, device
        self.first = not dist.is_initialized() or dist.get_rank() == 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(shape)
        self.parameters = parameters = model.num_parameters()
        # The input embedding is a look-up, no product; tied weights are a product as the head.
        look_up = 0 if shape.tie_word_embeddings else model.get_input_embeddings().weight.numel()
        self.matmul_parameters = parameters - look_up
        head = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
        self.attention_width = shape.num_hidden_layers * shape.num_attention_heads * head
        held = [p for group in optimizer.param_groups for p in group["params"]]
        self.held = sum(getattr(p, "_local_tensor", p).numel() for p in held)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self.peak_flops = next((peak for key, peak in PEAK_FLOPS.items() if key in name), None)
        self.tokens, self.skipped, self.skipped_in_a_row = 0, 0, 0
        self.bar, self.metrics, self.wandb = None, None, None
        self.spoke = self.began = time.perf_counter()

        def check_space() -> int:
            free, needed = shutil.disk_usage(directory).free, 5 * parameters
            if free < needed:
                raise InputError(
                    f"--run_dir {directory} has {free / 2**30:.3f} GiB left; the weights at the "
                    f"end of the run need {needed / 2**30:.3f} GiB"
                )
            return free

        first_on_each_node(check_space)
        if not self.first:
            return
        described = {"flags": dataclasses.asdict(config), "parameters": parameters}
        described |= {
            "world_size": self.world_size,
            "python": sys.version.split()[0],
            "torch": torch.__version__,
        }
        (directory / "config.json").write_text(json.dumps(described, indent=2) + "\n")
        self.metrics = open(directory / "metrics.jsonl", "w", buffering=1)  # flushed line by line
        if sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=config.steps, unit="step", dynamic_ncols=True)
        if config.wandb_project:
            import wandb

            self.wandb = wandb.init(
                project=config.wandb_project, name=directory.name, dir=directory, config=described
            )
        self.summarize()

    def summarize(self) -> None:
        """Print what the run will do, so that it explains itself."""
        config, longest = self.config, self.config.bucket_edges[-1]
        accumulation = config.global_batch_tokens // config.micro_batch_tokens // self.world_size
        flops = 6 * self.matmul_parameters + 12 * self.attention_width * longest
        self.say(
            f"model        {config.model}, {self.parameters:,} parameters, "
            f"{flops / 1e6:,.1f} MFLOPs a token at length {longest}\n"
            f"ranks        {self.world_size} x {self.device.type}, compute in {config.precision}\n"
            f"step         {config.global_batch_tokens:,} tokens = {self.world_size} ranks x "
            f"{accumulation} micro-batches x {config.micro_batch_tokens:,}; {config.steps} steps\n"
            f"each rank    holds {self.held:,} parameters: {4 * self.held / 2**20:,.1f} MiB, "
            "the same for gradients, twice that for AdamW (fp32)\n"
            f"run_dir      {self.directory}"
        )

    def say(self, text: str) -> None:
        """Print on rank 0, above the progress bar if there is one."""
        if self.bar is not None:
            self.bar.write(text)
        elif self.first:
            print(text, flush=True)

    def log(self, line: dict[str, Any]) -> None:
        """Append one line to metrics.jsonl and to Weights & Biases. NaN becomes null."""
        if self.first:
            finite = {k: v if v is None or math.isfinite(v) else None for k, v in line.items()}
            self.metrics.write(json.dumps(finite) + "\n")
        if self.wandb is not None:
            self.wandb.log({k: v for k, v in line.items() if k != "step"}, step=line["step"])

    def log_step(
        self, step: int, batch: GlobalBatch, loss: float, grad_norm: float, learning_rate: float,
        step_seconds: float, data_seconds: float,
    ) -> None:  # fmt: skip
        """Write the metrics of an optimizer step; count steps that were skipped as not finite.

        Model FLOPs are those of PaLM (arXiv 2204.02311, appendix B): 6 a parameter and token, and
        12 x attention width x row length for attention; recomputation and padding do not count.

        Raises:
            RunError: five steps in a row were not finite.
        """
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.skipped_in_a_row = 0
        else:
            self.skipped, self.skipped_in_a_row = self.skipped + 1, self.skipped_in_a_row + 1
            self.say(f"step {step} skipped: loss {loss}, gradient norm {grad_norm}")
            if self.skipped_in_a_row == 5:
                raise RunError(
                    f"loss or gradient norm was not finite in the five steps up to {step}. Likely "
                    "causes: --learning_rate too high, --grad_clip off, or damaged --init_from"
                )
        self.tokens += batch.labels
        flops = 6 * self.matmul_parameters * batch.labels
        flops += 12 * self.attention_width * batch.attended
        peak = self.peak_flops and self.peak_flops * self.world_size
        tokens_per_second = batch.labels / step_seconds
        self.log(
            {
                "step": step,
                "loss": loss,
                "learning_rate": learning_rate,
                "grad_norm": grad_norm,
                "tokens": self.tokens,
                "padding_fraction": 1 - batch.labels / batch.positions,
                "tokens_per_second": tokens_per_second,
                "step_seconds": step_seconds,
                "data_seconds": data_seconds,
                "mfu": peak and flops / step_seconds / peak,
                "peak_memory_gib": peak_memory(self.device) / 2**30,
                "skipped_steps": self.skipped,
            }
        )
        now, left = time.perf_counter(), self.config.steps - step
        if self.bar is not None:
            self.bar.update()
            self.bar.set_postfix_str(f"loss {loss:.4f}, {tokens_per_second:,.0f} tokens/s")
        elif step == 1 or left == 0 or now - self.spoke > 10:
            self.spoke, remaining = now, (now - self.began) / step * left
            self.say(
                f"step {step}/{self.config.steps}  loss {loss:.4f}  "
                f"{tokens_per_second:,.0f} tokens/s  {remaining:,.0f} s left"
            )

    def log_validation(self, step: int, loss: float, batches: Batches) -> None:
        """Write a validation's metrics, under the training step it belongs to."""
        bits = batches.bits_per_byte(loss, self.config.eval_batches)
        perplexity = math.exp(min(loss, 700.0))
        line = {"validation_loss": loss, "validation_perplexity": perplexity}
        self.log({"step": step, **line, "validation_bits_per_byte": bits})
        self.say(f"step {step}: validation loss {loss:.4f}, {bits:.4f} bits per byte")

    def finish(self, next_command: str, prompt: np.ndarray) -> None:
        """Close the files, show what the model writes by now, and where to go on."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None
        if not self.first:
            return
        self.metrics.close()
        if self.wandb is not None:
            self.wandb.finish()
        if self.parameters < 2e9:
            text = write_sample(self.directory / "hf", prompt, self.device)
            print(f"--- the model continues a held-out text:\n{text}\n---")
        print(f"files of the run: {self.directory}/ (metrics.jsonl; hf/ for transformers)")
        print(f"try next: {next_command}", flush=True)


def peak_memory(device: torch.device) -> int:
    """Most bytes held so far: of the GPU by torch's allocator, else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
