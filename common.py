"""What the four training scripts share because it teaches nothing about a parallel strategy.

Data flows one way: corpus -> tokens (cached on disk) -> batch plan (a pure function of lengths,
seed and step) -> collate -> micro-batch. Around it stands the plumbing of a run: flags, errors,
weights in Hugging Face form, metrics. Nothing here knows an optimizer, a loop or a strategy.

Libraries that only one function needs are imported inside it: imports are most of the start-up.
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
from torch.nn.attention.varlen import varlen_attn

try:
    from flash_attn import flash_attn_varlen_func
except ImportError:
    flash_attn_varlen_func = None  # then torch's own, `varlen_attn`

T = TypeVar("T")
IGNORED = -100  # label of a position without loss: cross entropy's own default


# --- Flags and endings ----------------------------------------------------------------------------


class InputError(Exception):
    """Flags or input that cannot work, found alike on all ranks: one line, exit code 2."""


class RunError(Exception):
    """The run cannot go on, found alike on all ranks: one line, exit code 1."""


def launch(main: Callable[[], None]) -> None:
    """Run `main`; end with exit code 0 (done), 2 (bad input) or 1 (failure, with a traceback).

    `os._exit` after an error: an orderly shutdown with live communication threads can hang.
    """
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**alone, "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)  # without torchrun: one rank
    rank = int(os.environ["RANK"])
    try:
        return main()
    except (InputError, RunError) as error:
        if rank:
            # torchrun ends all ranks when one exits: rank 0 must print first. Who still lives
            # after that alone knows of the error.
            time.sleep(5)
        print(f"error: {error}", file=sys.stderr)
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
    """Parse the command line into the script's `Config`; InputError names what is off."""
    from transformers import HfArgumentParser

    def refuse(message: str) -> None:
        raise InputError(message)

    parser = HfArgumentParser(config_class, allow_abbrev=False)
    parser.error = refuse
    config, unknown = parser.parse_args_into_dataclasses(
        return_remaining_strings=True, look_for_args_file=False
    )
    if unknown:
        refuse(f"unknown flag {unknown[0]}; --help lists the flags")
    if config.init_from:  # the weights bring their architecture and vocabulary, unless given
        if Path(config.init_from).exists():
            places = [Path(config.init_from), Path(config.init_from, "hf")]
            found = [
                p for p in places if (p / "config.json").exists() and [*p.glob("*.safetensors")]
            ]
            if not found:
                refuse(f"--init_from {config.init_from}: no config.json and *.safetensors in it")
            config.init_from = str(found[0])
        given = {word[2:].split("=")[0] for word in sys.argv[1:] if word.startswith("--")}
        for name in {"model", "tokenizer"} - given:
            setattr(config, name, config.init_from)
    check_config(config)
    return config


def check_config(config: Any) -> None:
    """Settle `--precision auto`; raise InputError for flags that cannot work here."""
    ranks, cuda = int(os.environ["WORLD_SIZE"]), torch.cuda.is_available()
    if cuda and int(os.environ["LOCAL_WORLD_SIZE"]) > torch.cuda.device_count():
        raise InputError(f"--nproc-per-node: this machine has {torch.cuda.device_count()} GPUs")
    bf16 = not cuda or torch.cuda.is_bf16_supported(including_emulation=False)
    if config.precision == "auto":
        config.precision = "bf16" if cuda and bf16 else "fp32"
    for name in ("steps", "eval_every", "eval_batches", "bucket_edges", "micro_batch_tokens"):
        if np.min(getattr(config, name), initial=1) < 1:
            raise InputError(f"--{name} {getattr(config, name)} must be at least 1")
    for name in ("warmup_steps", "weight_decay", "grad_clip", "seed", "min_learning_rate"):
        if getattr(config, name) < 0:
            raise InputError(f"--{name} {getattr(config, name)} must not be negative")
    if config.min_learning_rate > config.learning_rate:
        raise InputError(
            f"--min_learning_rate {config.min_learning_rate} is above --learning_rate "
            f"{config.learning_rate}"
        )
    edges, micro = config.bucket_edges, config.micro_batch_tokens
    if any(a >= b for a, b in zip(edges, edges[1:])):
        raise InputError(f"--bucket_edges {edges} must increase")
    if edges[-1] > micro:
        raise InputError(
            f"--micro_batch_tokens {micro} cannot hold the longest row, --bucket_edges {edges[-1]}"
        )
    below, rest = divmod(config.global_batch_tokens, micro * ranks)
    if rest or not below:
        fitting = " or ".join(str(n * micro * ranks) for n in (below, below + 1) if n)
        raise InputError(
            f"--global_batch_tokens {config.global_batch_tokens} is not a multiple of "
            f"--micro_batch_tokens {micro} x {ranks} ranks; {fitting} would be"
        )
    replicas = getattr(config, "dp_replicate", 1)
    if replicas < 1 or ranks % replicas:
        raise InputError(f"--dp_replicate {replicas} does not divide {ranks} ranks")
    if config.activation_checkpointing not in ("none", "full", "selective"):
        try:
            fraction = float(config.activation_checkpointing)
        except ValueError:
            fraction = -1.0
        if not 0 < fraction < 1:
            raise InputError(
                f"--activation_checkpointing {config.activation_checkpointing} is neither none, "
                "full, selective nor a fraction of the blocks such as 0.5"
            )
    if config.precision == "bf16" and not bf16:
        raise InputError(f"--precision bf16: {torch.cuda.get_device_name()} lacks it, use fp32")
    from torch.utils._triton import has_triton

    compilers = [] if cuda else [os.environ.get("CXX", "g++"), "clang++"]
    if config.compile and not (any(map(shutil.which, compilers)) or cuda and has_triton()):
        raise InputError(f"--compile needs {'triton' if cuda else 'a C++ compiler'} here")
    fsdp1 = hasattr(config, "sharding_strategy")
    if fsdp1 and config.compile and config.precision == "bf16" and below > 1:
        raise InputError(
            "--compile: FSDP1 in bf16 cannot accumulate gradients then (the compiler refuses bf16 "
            "parameters with fp32 gradients); raise --micro_batch_tokens, or use fsdp2_pretrain.py"
        )
    kernel = cuda and config.precision == "bf16"  # variable-length attention that can be compiled
    if config.compile and config.batching == "packed" and not kernel:
        if config.activation_checkpointing != "none":
            raise InputError(
                "--compile with --batching packed and --activation_checkpointing compiles nothing "
                "without CUDA and bf16; leave one of them out"
            )


# --- Ranks ----------------------------------------------------------------------------------------


def rank() -> int:
    """Number of this process among all; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of processes of the run; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


@functools.cache
def patient_group() -> dist.ProcessGroup:
    """A group whose collectives wait a month: preparing data on one rank may take hours."""
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(days=30))


def first_on_each_node(function: Callable[[], T]) -> T:
    """Run `function` on the first rank of each node; every rank gets its node's result.

    An InputError on any node is raised on all ranks. The result is pickled: keep it small.
    """
    if not dist.is_initialized():
        return function()
    node, result, error = int(os.environ.get("GROUP_RANK", 0)), None, None
    leads = int(os.environ.get("LOCAL_RANK", 0)) == 0
    if leads:
        try:
            result = function()
        except InputError as problem:
            error = str(problem)
    outcomes: list[Any] = [None] * world_size()
    dist.all_gather_object(outcomes, (leads, node, result, error), group=patient_group())
    for *_, problem in outcomes:
        if problem is not None:
            raise InputError(problem)
    return next(value for led, where, value, _ in outcomes if led and where == node)


# --- Tokenizers -----------------------------------------------------------------------------------


class TiktokenTokenizer:
    """A tiktoken encoding, or `bytes`: one built here from the 256 byte values."""

    def __init__(self, name: str):
        import tiktoken

        self.name, end = name, "<|endoftext|>"
        if name == "bytes":
            ranks = {bytes([value]): value for value in range(256)}
            self.encoding = tiktoken.Encoding(
                name, pat_str=r"[\s\S]", mergeable_ranks=ranks, special_tokens={end: 256}
            )
        else:
            try:
                self.encoding = tiktoken.get_encoding(name)
            except Exception as error:  # of the HTTP library that tiktoken happens to use
                raise InputError(
                    f"--tokenizer {name}: cannot fetch its vocabulary ({type(error).__name__}); "
                    "without a network TIKTOKEN_CACHE_DIR must name a folder that holds it"
                ) from error
        self.vocab_size, self.end_of_text = self.encoding.n_vocab, self.encoding.eot_token
        self.fingerprint = f"{name} {self.vocab_size}"

    def encode_batch(self, texts: list[str], threads: int = 1) -> list[np.ndarray]:
        """Ids of each text; a special token spelled out in a text stays plain text."""
        if self.name == "bytes":
            return [np.frombuffer(text.encode(), np.uint8) for text in texts]
        encode = functools.partial(self.encoding.encode_to_numpy, disallowed_special=())
        if threads == 1:
            return [encode(text) for text in texts]
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(threads) as pool:  # tiktoken encodes without the GIL
            return list(pool.map(encode, texts))

    def to_transformers(self) -> Any:
        """The `transformers` tokenizer that gives the same ids."""
        import base64
        import re

        from transformers import PreTrainedTokenizerFast
        from transformers.convert_slow_tokenizer import TikTokenConverter

        ranks = self.encoding._mergeable_ranks
        names = {index: name for name, index in self.encoding._special_tokens.items()}
        # Added tokens get consecutive ids, so the gaps (cl100k_base has some) need names too.
        added = [names.get(i, f"<|unused_{i}|>") for i in range(len(ranks), self.vocab_size)]
        # a{1,3}+ is a possessive repetition in tiktoken's regexes, a repeated one in the others.
        pattern = re.sub(r"(\\p\{N\}\{\d+,\d+\})\+", r"(?>\1)", self.encoding._pat_str)
        with tempfile.NamedTemporaryFile(suffix=".tiktoken") as file:
            file.writelines(base64.b64encode(b) + b" %d\n" % ranks[b] for b in ranks)
            file.flush()
            converter = TikTokenConverter(file.name, pattern, extra_special_tokens=added)
            converted = converter.converted()
        return PreTrainedTokenizerFast(
            tokenizer_object=converted,
            eos_token=names[self.end_of_text],
            clean_up_tokenization_spaces=False,
            split_special_tokens=True,  # as in training: spelled-out special tokens are text
        )


class HuggingFaceTokenizer:
    """A fast tokenizer from a directory or the hub, with the interface of TiktokenTokenizer."""

    def __init__(self, name: str):
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"tokenizer {name} (of --tokenizer or --init_from) is neither bytes, a tiktoken "
                f"encoding ({', '.join(tiktoken_names())}) nor a fast Hugging Face tokenizer"
            ) from error
        if not tokenizer.is_fast or tokenizer.eos_token_id is None:
            lacks = "end-of-text (eos) token" if tokenizer.is_fast else "fast implementation"
            raise InputError(f"--tokenizer {name} has no {lacks}")
        self.name, self.tokenizer = name, tokenizer
        self.vocab_size, self.end_of_text = len(tokenizer), tokenizer.eos_token_id
        definition = tokenizer.backend_tokenizer.to_str().encode()
        self.fingerprint = hashlib.sha256(definition).hexdigest()

    def encode_batch(self, texts: list[str], threads: int = 1) -> list[np.ndarray]:
        """As above; the library itself decides over the threads."""
        backend = self.tokenizer.backend_tokenizer
        backend.encode_special_tokens = True  # keep spelled-out special tokens plain text
        encoded = backend.encode_batch_fast(texts, add_special_tokens=False)
        backend.encode_special_tokens = False
        return [np.array(encoding.ids, np.uint32) for encoding in encoded]

    def to_transformers(self) -> Any:
        return self.tokenizer


def tiktoken_names() -> list[str]:
    """The encodings that the installed tiktoken knows."""
    import tiktoken

    return tiktoken.list_encoding_names()


@functools.cache
def load_tokenizer(name: str) -> TiktokenTokenizer | HuggingFaceTokenizer:
    """The tokenizer of `--tokenizer name`."""
    known = name == "bytes" or name in tiktoken_names()
    return TiktokenTokenizer(name) if known else HuggingFaceTokenizer(name)


# --- Corpus: text -> tokens on disk ---------------------------------------------------------------

READERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".txt": "text"}


def standard_library_files() -> list[str]:
    """The source files of Python's standard library, without tests and tables."""
    import sysconfig

    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "ensurepip"}
    files = sorted(root.rglob("*.py"))
    return [str(f) for f in files if not skipped.intersection(f.relative_to(root).parts)]


def standard_library_documents(files: list[str], version: str) -> Iterator[dict[str, str]]:
    """One document a top-level function or class; `version` is there for the cache's key."""
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


def load_text(config: Any) -> Any:
    """The `datasets.Dataset` that --dataset names, its text column alone."""
    import datasets

    name, column, split = config.dataset, config.text_column, config.dataset_split
    reader = next((READERS[end] for end in Path(name).suffixes if end in READERS), None)
    if reader and "://" not in name and not glob.glob(name, recursive=True):
        raise InputError(f"--dataset {name}: no such file")
    try:
        if name == "stdlib":
            corpus = datasets.Dataset.from_generator(
                standard_library_documents,
                gen_kwargs={"files": standard_library_files(), "version": sys.version},
            )
        elif reader:
            corpus = datasets.load_dataset(reader, data_files=name, split=split)
        else:
            corpus = datasets.load_dataset(name, config.dataset_config, split=split)
    except Exception as error:  # of whatever reader, file system or hub client is behind the name
        reason = " ".join(str(error.__cause__ or error).split())
        raise InputError(f"--dataset {name} cannot be read: {reason[:300]}") from error
    if column not in corpus.column_names:
        raise InputError(
            f"--text_column {column}: --dataset {name} has no such column, only "
            f"{', '.join(corpus.column_names)}"
        )
    if "string" not in str(getattr(corpus.features[column], "dtype", "")):
        raise InputError(f"--text_column {column} holds {corpus.features[column]}, not text")
    return corpus.select_columns([column])


def tokenize_batch(table: Any, tokenizer_name: str, fingerprint: str) -> Any:
    """Arrow table of texts -> table of documents: tokens, bytes of text, digest of content.

    Runs in the worker processes of `datasets.map`. A plain function of plain arguments, since the
    cache's key is a hash of them; `fingerprint` is there for that alone.
    """
    import pyarrow as pa

    tokenizer = load_tokenizer(tokenizer_name)
    texts = [text for text in table[0].to_pylist() if text]
    end = np.array([tokenizer.end_of_text])
    parts = [part for ids in tokenizer.encode_batch(texts) for part in (ids, end)]
    offsets = np.cumsum([0] + [len(ids) + 1 for ids in parts[::2]], dtype=np.int32)
    flat = np.concatenate([end[:0], *parts]).astype(np.min_scalar_type(tokenizer.vocab_size - 1))
    encoded = [text.encode() for text in texts]
    digests = b"".join(hashlib.blake2b(text, digest_size=8).digest() for text in encoded)
    columns = {
        "tokens": pa.ListArray.from_arrays(offsets, flat),
        "bytes": np.array([len(text) for text in encoded], np.int32),
        "digest": np.frombuffer(digests, np.uint64),
    }
    return pa.table(columns)


def tokenize_corpus(config: Any) -> list[str]:
    """Tokenize the corpus, once for all runs; returns Arrow files in the Hugging Face cache."""
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # InputError says what matters
    if rank() or not sys.stderr.isatty():
        datasets.disable_progress_bars()
    tokenizer, corpus = load_tokenizer(config.tokenizer), load_text(config)
    smallest = np.min_scalar_type(tokenizer.vocab_size - 1).name
    features = {
        "tokens": datasets.List(datasets.Value(smallest)),
        "bytes": datasets.Value("int32"),
        "digest": datasets.Value("uint64"),
    }
    processes = min(os.cpu_count(), len(corpus) // 1000)
    tokenized = corpus.with_format("arrow").map(
        tokenize_batch,
        batched=True,
        remove_columns=corpus.column_names,
        features=datasets.Features(features),
        fn_kwargs={"tokenizer_name": tokenizer.name, "fingerprint": tokenizer.fingerprint},
        num_proc=processes if processes > 1 else None,
    )
    return [file["filename"] for file in tokenized.cache_files]


class Documents:
    """Tokenized documents, memory-mapped from Arrow files.

    `lengths` (tokens, the end-of-text token included), `bytes` (of text) and `digest` (hash of the
    text) are arrays with one number a document.
    """

    def __init__(self, files: list[str]):
        import pyarrow as pa

        table = pa.concat_tables(pa.ipc.open_stream(pa.memory_map(f)).read_all() for f in files)
        self.bytes, self.digest = table["bytes"].to_numpy(), table["digest"].to_numpy()
        if not len(self.digest):
            raise InputError("--dataset holds no text")
        lists = table["tokens"].chunks
        offsets = [chunk.offsets.to_numpy() for chunk in lists]
        self.lengths = np.concatenate([np.diff(o) for o in offsets]).astype(np.int64)
        self._flat = [chunk.values.to_numpy() for chunk in lists]
        self._chunk = np.repeat(np.arange(len(lists)), [len(o) - 1 for o in offsets])
        self._begin = np.concatenate([o[:-1] for o in offsets])

    def tokens(self, document: int, start: int, stop: int) -> np.ndarray:
        """The ids `start` to `stop` of a document: a view of the mapped file."""
        begin = self._begin[document]
        return self._flat[self._chunk[document]][begin + start : begin + stop]


def split_by_content(digest: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the documents for training and for validation.

    Validation gets the 2 % with the smallest hashes (1 to 5,000 documents). So the split is the
    same in every run, and equal documents always land on the same side.
    """
    held_out = min(max(1, len(digest) // 50), 5000)
    validation = digest <= np.partition(digest, held_out - 1)[held_out - 1]
    if validation.all():
        raise InputError("--dataset holds one document; a second one is needed for validation")
    return np.flatnonzero(~validation), np.flatnonzero(validation)


# --- Batch plan: which pieces form micro-batch k of an epoch --------------------------------------


@dataclasses.dataclass
class Pieces:
    """Stretches of documents, no longer than the longest row; one array entry a piece.

    A piece of length n reads the n tokens from `start` on and predicts those from `start + 1` on.
    So cutting a document loses no prediction, and length = positions = labels.
    """

    document: np.ndarray
    start: np.ndarray
    length: np.ndarray


def cut_into_pieces(document: np.ndarray, tokens: np.ndarray, longest: int) -> Pieces:
    """Cut documents of `tokens[i]` tokens into pieces of at most `longest` positions."""
    positions = tokens - 1  # the last token is predicted, never read
    count = -(-positions // longest)
    owner = np.repeat(np.arange(len(document)), count)
    start = (np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)) * longest
    return Pieces(document[owner], start, np.minimum(longest, positions[owner] - start))


@dataclasses.dataclass
class Plan:
    """Micro-batch k of an epoch holds the pieces `order[start[k]:stop[k]]`."""

    order: np.ndarray
    start: np.ndarray
    stop: np.ndarray


def plan_bucketed(
    length: np.ndarray, edges: list[int], micro_batch_tokens: int, rng: np.random.Generator
) -> Plan:
    """Micro-batches of micro_batch_tokens // edge rows from one bucket, so all cost about the same.

    Bucket b holds the lengths above edges[b - 1] and up to edges[b]. The micro-batches of all
    buckets are shuffled together: one bucket after the other would be an accidental curriculum.
    """
    bucket = np.searchsorted(edges, length).astype(np.uint16)  # 16 bits are sorted by radix
    order = rng.permutation(len(length))
    order = order[np.argsort(bucket[order], kind="stable")]
    last = np.cumsum(np.bincount(bucket, minlength=len(edges)))
    start, stop = [], []
    for edge, begin, end in zip(edges, [0, *last], last):
        rows = micro_batch_tokens // edge
        start.append(np.arange(begin, end, rows))
        stop.append(np.minimum(start[-1] + rows, end))
    shuffled = rng.permutation(sum(map(len, start)))
    return Plan(order, np.concatenate(start)[shuffled], np.concatenate(stop)[shuffled])


def plan_packed(length: np.ndarray, capacity: int, rng: np.random.Generator) -> Plan:
    """Best-fit-decreasing packing (arXiv 2404.10830): one row of `capacity` a micro-batch.

    Longest pieces first, each into the fullest row that still takes it. Rows of equal free space
    are interchangeable, so are pieces of equal length: both are moved in groups, and the time
    grows with the number of different lengths.
    """
    order = rng.permutation(len(length))
    order = order[np.argsort(-length[order], kind="stable")]
    row = np.empty(len(length), np.int64)  # of the pieces in `order`
    groups: list[list[np.ndarray]] = [[] for _ in range(capacity + 1)]  # rows, by free space
    filled = np.zeros(capacity + 1, bool)  # which groups hold rows
    rows = done = 0
    sizes, counts = np.unique(length, return_counts=True)
    for size, count in zip(sizes[::-1].tolist(), counts[::-1].tolist()):
        end = done + count
        spaces = (np.flatnonzero(filled[size:]) + size).tolist()
        while done < end:
            if spaces:
                space = spaces.pop(0)
                group, groups[space], filled[space] = np.concatenate(groups[space]), [], False
            else:
                space, new = capacity, -(-(end - done) // (capacity // size))
                group, rows = np.arange(rows, rows + new), rows + new
            each = space // size  # pieces that a row of this group takes
            full, rest = divmod(min(len(group) * each, end - done), each)
            used = full + (rest > 0)
            row[done : done + full * each + rest] = np.repeat(group[:used], each)[
                : full * each + rest
            ]
            done += full * each + rest
            for free, members in (
                (space - each * size, group[:full]),
                (space - rest * size, group[full:used]),
                (space, group[used:]),
            ):
                if len(members):
                    groups[free].append(members)
                    filled[free] = True
    order = order[np.argsort(row, kind="stable")]
    stop = np.cumsum(np.bincount(row))
    shuffled = rng.permutation(rows)
    return Plan(order, np.concatenate([[0], stop[:-1]])[shuffled], stop[shuffled])


# --- Batches: plan -> tensors ---------------------------------------------------------------------


@dataclasses.dataclass
class GlobalBatch:
    """What one optimizer step trains on.

    `micro_batches` are this rank's, each a dict of model arguments. The numbers are those of all
    ranks: `labels` (the loss is divided by them), `positions` (padding included), `attended` (sum
    of the squared lengths, for the FLOPs of attention).
    """

    micro_batches: list[dict[str, Any]]
    labels: int
    positions: int
    attended: int


class Batches:
    """The endless stream of micro-batches of some documents, as one rank sees it.

    Epoch e is a plan seeded with (seed, e), and one epoch follows the other. Step s takes the
    micro-batches s * G to (s + 1) * G - 1 of that stream, G = global / micro batch tokens: the step
    number is the position in the data, and a step's content does not depend on the world size.
    """

    def __init__(self, documents: Documents, chosen: np.ndarray, config: Any, device: torch.device):
        self.documents, self.config, self.pin = documents, config, device.type == "cuda"
        self.packed, self.edges = config.batching == "packed", config.bucket_edges
        self.pieces = cut_into_pieces(chosen, documents.lengths[chosen], self.edges[-1])
        self.plan = functools.lru_cache(maxsize=2)(self._plan)
        first = self.plan(0)
        self.epoch_length = len(first.start)
        self.most_pieces = int((first.stop - first.start).max(initial=0))
        if not self.epoch_length:
            raise InputError("--dataset: no document has two tokens or more")

    def _plan(self, epoch: int) -> Plan:
        rng, micro = (
            np.random.default_rng([self.config.seed, epoch]),
            self.config.micro_batch_tokens,
        )
        if self.packed:
            return plan_packed(self.pieces.length, micro, rng)
        return plan_bucketed(self.pieces.length, self.edges, micro, rng)

    def micro_batch(self, number: int) -> np.ndarray:
        """The pieces of micro-batch `number` of the stream."""
        epoch, k = divmod(number, self.epoch_length)
        plan = self.plan(epoch)
        return plan.order[plan.start[k] : plan.stop[k]]

    def shape(self, pieces: np.ndarray) -> tuple[int, int]:
        """Rows and row length of a micro-batch; few different ones for compiled blocks."""
        length, micro = self.pieces.length[pieces], self.config.micro_batch_tokens
        if self.packed:
            return 1, micro if self.config.compile else int(length.sum())
        longest = int(length.max())
        if not self.config.compile:
            return len(pieces), longest
        edge = self.edges[np.searchsorted(self.edges, longest)]
        return micro // edge, edge

    def collate(self, pieces: np.ndarray) -> dict[str, Any]:
        """Model arguments: `input_ids` and `labels`, int64 [rows, length], padded on the right.

        Labels are shifted already: labels[r, i] is the token after input_ids[r, i]. Right padding
        needs no attention mask, for no real token sees what comes after it. A packed row also has
        `position_ids` and its document boundaries, as transformers' flash attention takes them.
        """
        rows, width = self.shape(pieces)
        inputs = np.full((rows, width), load_tokenizer(self.config.tokenizer).end_of_text)
        labels = np.full((rows, width), IGNORED)
        row, column, boundaries = 0, 0, [0]
        for piece in pieces.tolist():
            start, length = self.pieces.start[piece], int(self.pieces.length[piece])
            tokens = self.documents.tokens(self.pieces.document[piece], start, start + length + 1)
            inputs[row, column : column + length] = tokens[:-1]
            labels[row, column : column + length] = tokens[1:]
            if self.packed:
                column += length
                boundaries.append(column)
            else:
                row += 1
        tensors = {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}
        lengths = {}
        if self.packed:
            longest = self.edges[-1]
            if self.config.compile:
                # The padding makes documents of its own, and empty ones fill up the boundaries:
                # the same number for every row, so that nothing is compiled twice.
                boundaries += [*range(column + longest, width, longest), width]
                number = self.most_pieces + 2 + -(-width // longest)
                boundaries += [width] * (number - len(boundaries))
            starts = np.repeat(boundaries[:-1], np.diff(boundaries))
            limits = torch.tensor(boundaries, dtype=torch.int32)
            tensors["position_ids"] = torch.from_numpy(np.arange(width) - starts)[None]
            tensors |= {"cu_seq_lens_q": limits, "cu_seq_lens_k": limits}
            lengths = {"max_length_q": longest, "max_length_k": longest}
        if self.pin:
            tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
        return tensors | lengths

    def global_batch(self, step: int) -> GlobalBatch:
        """What step `step`, counted from 0, trains on, with the micro-batches of this rank."""
        size = self.config.global_batch_tokens // self.config.micro_batch_tokens
        chosen = [self.micro_batch(k) for k in range(step * size, (step + 1) * size)]
        shapes = [self.shape(pieces) for pieces in chosen]
        length = self.pieces.length[np.concatenate(chosen)]
        # Neighbours in row length run at the same time on different ranks, so that none waits.
        order = sorted(range(size), key=lambda i: (shapes[i][1], shapes[i][0]))
        return GlobalBatch(
            [self.collate(chosen[i]) for i in order[rank() :: world_size()]],
            labels=int(length.sum()),
            positions=sum(rows * width for rows, width in shapes),
            attended=int((length**2).sum()),
        )

    def stream(self, first_step: int, last_step: int) -> Iterator[GlobalBatch]:
        """The global batches of the steps [first_step, last_step), made ahead in a thread."""
        ready: queue.Queue[Any] = queue.Queue(maxsize=2)

        def fill() -> None:
            try:
                for step in range(first_step, last_step):
                    ready.put(self.global_batch(step))
            except BaseException as error:  # raised below, by the thread that trains
                ready.put(error)

        threading.Thread(target=fill, daemon=True).start()
        for _ in range(first_step, last_step):
            item = ready.get()
            if isinstance(item, BaseException):
                raise item
            yield item

    def evaluation(self, number: int) -> Iterator[dict[str, Any]]:
        """This rank's share of the first `number` micro-batches of the stream (one epoch at most).

        All ranks get equally many, since a forward pass is a collective under FSDP: where they do
        not divide, a rank repeats one without labels.
        """
        number, ranks = min(number, self.epoch_length), world_size()
        for k in range(rank(), -(-number // ranks) * ranks, ranks):
            batch = self.collate(self.micro_batch(min(k, number - 1)))
            if k >= number:
                batch["labels"] = torch.full_like(batch["labels"], IGNORED)
            yield batch

    def bits_per_byte(self, loss: float, number: int) -> float:
        """Nats per label over `evaluation(number)` -> bits per byte of the text behind it."""
        number = min(number, self.epoch_length)
        pieces = np.concatenate([self.micro_batch(k) for k in range(number)])
        document, labels = self.pieces.document[pieces], self.pieces.length[pieces]
        share = labels / (self.documents.lengths[document] - 1)  # of a document that was cut
        return loss * labels.sum() / (share * self.documents.bytes[document]).sum() / math.log(2)

    def prompt(self) -> np.ndarray:
        """The first tokens of some document, for a model to continue."""
        document = self.pieces.document[0]
        return self.documents.tokens(document, 0, min(16, self.documents.lengths[document] - 1))


def load_batches(config: Any, device: torch.device) -> tuple[Any, Batches, Batches]:
    """Tokenizer, training batches and validation batches, as the flags say."""
    documents = Documents(first_on_each_node(lambda: tokenize_corpus(config)))
    split = split_by_content(documents.digest)
    training, validation = (Batches(documents, chosen, config, device) for chosen in split)
    return load_tokenizer(config.tokenizer), training, validation


def to_device(micro_batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """A copy on the device, made while the device still computes."""
    return {
        name: value.to(device, non_blocking=True) if torch.is_tensor(value) else value
        for name, value in micro_batch.items()
    }


# --- Attention within documents -------------------------------------------------------------------

VARIABLE_LENGTH_OPS = [torch.ops.torch_attn._varlen_attn.default]
if flash_attn_varlen_func is not None:
    VARIABLE_LENGTH_OPS.append(torch.ops.flash_attn._flash_attn_varlen_forward.default)


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
    """Causal attention that stays within each document, without a mask: for `AttentionInterface`.

    Args:
        query: [rows, heads, length, head size]; key and value may have fewer heads.
        cu_seq_lens_q: int32 [documents + 1], the boundaries in a packed row; None if every row is
            one document, padded on the right.
        max_length_q: length of the longest document of a packed row.

    Returns:
        [rows, length, heads, head size] and None, as transformers wants it.
    """
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    if cu_seq_lens_q is None:
        return sdpa_attention_forward(module, query, key, value, None, **kwargs)
    if torch.is_autocast_enabled(query.device.type):  # rotary embedding returns fp32 under it
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    scale, groups = kwargs.get("scaling"), query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    if query.is_cuda and query.dtype != torch.float32:  # what the variable-length kernels take
        flat = [x[0].transpose(0, 1) for x in (query, key, value)]  # [tokens, heads, head size]
        limits = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
        if flash_attn_varlen_func is not None:
            output = flash_attn_varlen_func(*flat, *limits, softmax_scale=scale, causal=True)
        else:
            output = varlen_attn(*flat, *limits, scale=scale, window_size=(-1, 0))
        return output[None], None
    return attention_document_by_document(query, key, value, cu_seq_lens_q, scale), None


@torch.compiler.disable  # every row has other lengths
def attention_document_by_document(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, limits: torch.Tensor, scale: float
) -> torch.Tensor:
    """Without a variable-length kernel, faster than one attention with a block-diagonal mask."""
    lengths = limits.diff().tolist()
    documents = zip(*(x.split(lengths, dim=2) for x in (query, key, value)))
    attend = functools.partial(
        torch.nn.functional.scaled_dot_product_attention, is_causal=True, scale=scale
    )
    outputs = [attend(*qkv) for qkv, length in zip(documents, lengths) if length]
    return torch.cat(outputs, dim=2).transpose(1, 2)


# --- Architecture and weights in Hugging Face form ------------------------------------------------


def read_architecture(config: Any, vocabulary: int) -> Any:
    """The config.json that --model names (code from the hub is never run).

    Raises:
        InputError: unreadable, or the model would not train on this data as it is meant to.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    name, longest = config.model, config.bucket_edges[-1]
    try:
        shape = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"model {name} (of --model or --init_from) is neither tiny, qwen2-0.5b nor a directory "
            "or hub id with a config.json that this transformers knows"
        ) from error
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(shape), None)
    layers = set(getattr(shape, "layer_types", None) or ()) - {
        "full_attention",
        "sliding_attention",
    }
    if not getattr(kind, "_supports_attention_backend", False) or layers:
        raise InputError(f"--model {name}: its attention cannot be kept within documents")
    if getattr(shape, "output_router_logits", False):
        raise InputError(f"--model {name}: a loss on its router is not supported")
    if vocabulary > shape.vocab_size:
        raise InputError(
            f"--tokenizer {config.tokenizer} has {vocabulary} ids, more than the vocabulary of "
            f"--model {name}, {shape.vocab_size}"
        )
    limits = ["max_position_embeddings", "attention_chunk_size"]
    limits += ["sliding_window"] if getattr(shape, "use_sliding_window", True) else []
    for limit in limits:
        bound = getattr(shape, limit, None)
        if bound is not None and longest > bound:
            raise InputError(f"--bucket_edges {longest} exceeds {limit} {bound} of --model {name}")
    scalings = (
        "final_logit_softcapping",
        "attn_logit_softcapping",
        "logit_scale",
        "logits_scaling",
    )
    for scaling in scalings:
        if getattr(shape, scaling, None) not in (None, 1):
            raise InputError(f"--model {name}: its {scaling} is not supported")
    return shape


def tied_names(model: Any) -> set[str]:
    """Names under which a state dict repeats another tensor: the head tied to the embedding."""
    return set(model._tied_weights_keys or ()) if model.config.tie_word_embeddings else set()


def load_weights(model: torch.nn.Module, name: str) -> None:
    """Fill whole or sharded parameters in place from a Hugging Face directory or hub id.

    Every rank reads just the slices that it keeps, cast on the way: none holds a second copy.

    Raises:
        InputError: names the parameters that are missing, unexpected or of another shape.
    """
    import torch.distributed.checkpoint as dcp
    from safetensors import safe_open
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        set_model_state_dict,
    )

    def fetch() -> str:
        from huggingface_hub import snapshot_download

        try:
            return snapshot_download(name, allow_patterns=["*.json", "*.safetensors"])
        except Exception as error:  # of the hub client and its HTTP library
            raise InputError(f"--init_from {name}: {' '.join(str(error).split())}") from error

    directory = name if Path(name).is_dir() else first_on_each_node(fetch)
    stored = {}
    for path in Path(directory).glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            stored |= {key: file.get_slice(key).get_shape() for key in file.keys()}
    state = get_model_state_dict(model)
    tied = tied_names(getattr(model, "module", model))
    wanted = {key: tensor for key, tensor in state.items() if key not in tied}
    problems = {
        "lack": sorted(wanted.keys() - stored.keys()),
        "also hold": sorted(stored.keys() - state.keys()),
        "hold in another shape": [
            f"{key} {stored[key]} instead of {list(tensor.shape)}"
            for key, tensor in wanted.items()
            if stored.get(key, [*tensor.shape]) != [*tensor.shape]
        ],
    }
    for problem, keys in problems.items():
        if keys:
            more = f" and {len(keys) - 5} more" if len(keys) > 5 else ""
            raise InputError(f"--init_from {name}: its files {problem} {', '.join(keys[:5])}{more}")
    dcp.load(wanted, storage_reader=HuggingFaceStorageReader(directory))
    # Not strict: without the tied head, which in FSDP1's state is a stale copy of its own.
    set_model_state_dict(model, wanted, options=StateDictOptions(strict=False))


def export(directory: Path, shape: Any, state: dict[str, torch.Tensor], tokenizer: Any) -> None:
    """Write what AutoModelForCausalLM and AutoTokenizer load; complete, or not there at all.

    Every rank must call it: gathering a sharded tensor is a collective. They are gathered one at a
    time, and rank 0 alone keeps them, in CPU memory.
    """
    from torch.distributed.tensor import DTensor
    from transformers import AutoModelForCausalLM, logging

    shape.bos_token_id, shape.eos_token_id = None, tokenizer.end_of_text  # where to stop writing
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape)
    weights = {}
    tied = tied_names(model)
    for name, tensor in state.items():
        if name in tied:
            continue
        tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if rank() == 0:
            weights[name] = tensor.detach().cpu()
    if rank():
        return
    logging.disable_progress_bar()
    temporary = directory.with_name(directory.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary, state_dict=weights)
    tokenizer.to_transformers().save_pretrained(temporary)
    shutil.rmtree(directory, ignore_errors=True)
    temporary.rename(directory)


def write_sample(directory: Path, prompt: np.ndarray, device: torch.device) -> str:
    """How the exported model continues the ids of `prompt`, as plain transformers does it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory).to(device)
    ids = torch.from_numpy(prompt.astype(np.int64))[None].to(device)
    torch.manual_seed(0)
    room = getattr(model.config, "max_position_embeddings", 4096) - ids.shape[1]
    options = {"max_new_tokens": min(160, room), "do_sample": True, "temperature": 0.7}
    options |= {"attention_mask": torch.ones_like(ids), "pad_token_id": tokenizer.eos_token_id}
    return tokenizer.decode(model.generate(ids, **options)[0])


# --- A run: its directory, metrics and progress ---------------------------------------------------

# Dense bf16 FLOP/s from the makers' data sheets (where "with sparsity" stands for twice as much).
PEAK_FLOPS = {
    "B200": 2250e12, "GH200": 989e12, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12,
    "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L40": 181e12, "RTX 6000 Ada": 364e12,
    "L4": 121e12, "A10G": 70e12, "A10": 125e12, "RTX 4090": 165e12, "RTX A6000": 155e12,
    "RTX 3090": 71e12,
}  # fmt: skip


def open_run_directory(config: Any) -> Path:
    """Make --run_dir on every node and see that it can be written."""

    def make() -> Path:
        directory = Path(config.run_dir)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory) as file:
                file.write(b"written")
        except OSError as error:
            raise InputError(f"--run_dir {directory} cannot be written: {error}") from error
        return directory

    return first_on_each_node(make)


def peak_memory(device: torch.device) -> int:
    """Most bytes held so far: on the GPU by torch's allocator, else by the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Run:
    """Metrics, progress and Weights & Biases. Every rank calls it, rank 0 alone writes.

    `optimizer` tells what a rank keeps of the model of this `shape` (its `transformers` config).
    """

    def __init__(
        self, directory: Path, config: Any, device: torch.device, shape: Any, optimizer: Any
    ):
        from transformers import AutoModelForCausalLM

        self.directory, self.config, self.device = directory, config, device
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(shape)
        self.parameters = model.num_parameters()
        # The input embedding is a look-up, not a product; tied to the head it is a product there.
        look_up = 0 if shape.tie_word_embeddings else model.get_input_embeddings().weight.numel()
        self.matmul_parameters = self.parameters - look_up
        head = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
        self.attention_width = shape.num_hidden_layers * shape.num_attention_heads * head
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self.peak_flops = next((peak for key, peak in PEAK_FLOPS.items() if key in name), None)
        self.tokens = self.skipped = self.skipped_in_a_row = 0
        self.bar = self.metrics = self.wandb = None
        self.started = self.spoken = time.perf_counter()
        first_on_each_node(self.check_space)
        if rank():
            return
        described = {"flags": dataclasses.asdict(config), "parameters": self.parameters}
        described |= {"world_size": world_size(), "device": name or "cpu"}
        described |= {"python": sys.version.split()[0], "torch": torch.__version__}
        (directory / "config.json").write_text(json.dumps(described, indent=2) + "\n")
        self.metrics = open(directory / "metrics.jsonl", "w", buffering=1)  # flushed at each line
        self.summarize(optimizer)
        if sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=config.steps, unit="step", dynamic_ncols=True)
        if config.wandb_project:
            import wandb

            options = {"project": config.wandb_project, "name": directory.name, "dir": directory}
            self.wandb = wandb.init(config=described, **options)

    def check_space(self) -> None:
        """The weights that the run ends with must fit on the disk."""
        free, needed = shutil.disk_usage(self.directory).free, 4 * self.parameters + 2**20
        if free < needed:
            raise InputError(
                f"--run_dir {self.directory} has {free / 2**20:,.0f} MiB left; the weights at the "
                f"end of the run need {needed / 2**20:,.0f} MiB"
            )

    def summarize(self, optimizer: Any) -> None:
        """Print what the run will do, so that it explains itself."""
        config, longest, ranks = self.config, self.config.bucket_edges[-1], world_size()
        accumulation = config.global_batch_tokens // config.micro_batch_tokens // ranks
        flops = 6 * self.matmul_parameters + 12 * self.attention_width * longest
        held = [p for group in optimizer.param_groups for p in group["params"]]
        held = sum(getattr(p, "_local_tensor", p).numel() for p in held)
        self.say(
            f"model      {config.model}: {self.parameters:,} parameters, {flops / 1e6:,.1f} MFLOPs "
            f"a token at length {longest}\n"
            f"step       {config.global_batch_tokens:,} tokens = {ranks} ranks x {accumulation} "
            f"micro-batches x {config.micro_batch_tokens:,}\n"
            f"each rank  {held:,} parameters: {held / 2**18:,.1f} MiB in fp32, the same for "
            f"gradients, twice that for AdamW; computes in {config.precision} on {self.device.type}"
        )

    def say(self, text: str) -> None:
        """Print on rank 0, above the progress bar if there is one."""
        if self.bar is not None:
            self.bar.write(text)
        elif rank() == 0:
            print(text, flush=True)

    def log(self, step: int, line: dict[str, Any]) -> None:
        """One line of metrics.jsonl, and the same for Weights & Biases; NaN becomes null."""
        if self.metrics is not None:
            line = {k: v if v is None or math.isfinite(v) else None for k, v in line.items()}
            self.metrics.write(json.dumps({"step": step, **line}) + "\n")
        if self.wandb is not None:
            self.wandb.log(line, step=step)

    def log_step(
        self, step: int, batch: GlobalBatch, loss: float, grad_norm: float, learning_rate: float,
        step_seconds: float, data_seconds: float,
    ) -> None:  # fmt: skip
        """Log an optimizer step, and count it as skipped if loss or norm is not finite.

        FLOPs as in PaLM (arXiv 2204.02311, appendix B): 6 a parameter and token, and 12 x width x
        length a token for attention. Neither recomputation nor padding counts.

        Raises:
            RunError: five steps in a row were skipped.
        """
        self.skipped_in_a_row += 1
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.skipped_in_a_row = 0
        else:
            self.skipped += 1
            self.say(f"step {step} skipped: loss {loss}, gradient norm {grad_norm}")
        self.tokens += batch.labels
        flops = (
            6 * self.matmul_parameters * batch.labels + 12 * self.attention_width * batch.attended
        )
        peak = self.peak_flops and self.peak_flops * world_size()
        line = {
            "loss": loss,
            "learning_rate": learning_rate,
            "grad_norm": grad_norm,
            "tokens": self.tokens,
            "padding_fraction": 1 - batch.labels / batch.positions,
            "tokens_per_second": batch.labels / step_seconds,
            "step_seconds": step_seconds,
            "data_seconds": data_seconds,
            "mfu": peak and flops / step_seconds / peak,
            "peak_memory_gib": peak_memory(self.device) / 2**30,
            "skipped_steps": self.skipped,
        }
        self.log(step, line)
        if self.skipped_in_a_row == 5:
            raise RunError(
                f"loss or gradient norm was not finite in five steps in a row, up to step {step}; "
                "likely causes: --learning_rate too high, no --grad_clip, damaged --init_from"
            )
        now, state = (
            time.perf_counter(),
            f"loss {loss:.4f}  {line['tokens_per_second']:,.0f} tokens/s",
        )
        if self.bar is not None:
            self.bar.update()
            self.bar.set_postfix_str(state)
        elif step in (1, self.config.steps) or now - self.spoken > 10:
            left = (now - self.started) / step * (self.config.steps - step)
            self.say(f"step {step}/{self.config.steps}  {state}  {left:,.0f} s left")
            self.spoken = now

    def log_validation(self, step: int, loss: float, batches: Batches) -> None:
        """Log a validation under the training step it belongs to."""
        bits, perplexity = (
            batches.bits_per_byte(loss, self.config.eval_batches),
            math.exp(min(loss, 700)),
        )
        line = {"validation_loss": loss, "validation_perplexity": perplexity}
        self.log(step, line | {"validation_bits_per_byte": bits})
        self.say(f"step {step}: validation loss {loss:.4f}, {bits:.4f} bits per byte")

    def finish(self, prompt: np.ndarray, next_command: str) -> None:
        """Close the files, show what the model writes by now, and where to go on."""
        if self.metrics is None:
            return
        if self.bar is not None:
            self.bar.close()
        self.metrics.close()
        if self.wandb is not None:
            self.wandb.finish()
        if self.parameters < 2e9:
            sample = write_sample(self.directory / "hf", prompt, self.device)
            print(f"--- the model continues the first tokens of a held-out text:\n{sample}\n---")
        print(f"files: {self.directory}/metrics.jsonl, and {self.directory}/hf for transformers")
        print(f"next:  {next_command}", flush=True)
