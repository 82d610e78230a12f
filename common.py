"""What the four training scripts share because it teaches nothing about a parallel strategy.

Data flows one way: corpus -> tokens (cached on disk) -> batch plan (a pure function of lengths,
seed and step) -> collate -> micro-batch. Around it stands the plumbing of a run: flags, errors,
signals, checkpoints as files, weights in Hugging Face form, metrics. Nothing here knows a loop or a
strategy.

    python common.py show CHECKPOINT          what a checkpoint holds
    python common.py export CHECKPOINT OUT    its weights and tokenizer in Hugging Face form

A checkpoint's `.metadata` is a pickle: loading one runs whatever code its writer put there. Load
only those you trust, and share the Hugging Face form (safetensors) instead.

Libraries that only one function needs are imported inside it: imports are most of the start-up.
"""

import contextlib
import dataclasses
import datetime
import faulthandler
import fcntl
import functools
import glob
import hashlib
import inspect
import json
import math
import os
import queue
import re
import shutil
import signal
import sys
import tempfile
import textwrap
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.attention.varlen import varlen_attn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


class Ended(BaseException):
    """There is nothing (more) to do, on all ranks: rank 0 prints why, exit code 0."""


class StopSignals:
    """SIGTERM and SIGINT. Before the first step they end the program; later the loop asks."""

    def __init__(self) -> None:
        self.received, self.at_once = False, True

    def install(self) -> None:
        self.process = os.getpid()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.handle)

    def handle(self, number: int, frame: Any) -> None:
        if os.getpid() != self.process:  # a helper of `datasets`, forked with this handler
            os._exit(1)
        self.received = True
        if self.at_once:
            self.at_once = False
            raise Ended("stopped before the first step; the same command starts again")


SIGNALS = StopSignals()


def launch(main: Callable[[], None]) -> None:
    """Run `main`; end with exit code 0 (done), 2 (bad input) or 1 (failure, with a traceback).

    `os._exit` after an error: an orderly shutdown with live communication threads can hang.
    """
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**alone, "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)  # without torchrun: one rank
    SIGNALS.install()
    try:
        code = exit_code(main)
    except Ended as end:
        if os.environ["RANK"] == "0":
            print(end)
        code = 0
    sys.stdout.flush()
    sys.stderr.flush()
    if code is not None:
        os._exit(code)


def exit_code(main: Callable[[], None]) -> int | None:
    """Run `main`, print the error it ends in; None if there is none."""
    try:
        return main()
    except (InputError, RunError) as error:
        # torchrun ends all ranks when one exits: rank 0 must print first. Who still lives after
        # that alone knows of the error.
        wait_for_the_end(os.environ["RANK"] != "0")
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    except Exception as error:
        # A lost connection is what the others see of a rank that failed: that one speaks first.
        wait_for_the_end("onnection" in str(error))
        report = f"rank {os.environ['RANK']} failed:\n{traceback.format_exc()}"
        print(report, file=sys.stderr)
        return 1


def wait_for_the_end(needed: bool) -> None:
    """Give the rank that knows more five seconds to print and to end the launch."""
    if needed:
        SIGNALS.at_once = False
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(5)


def flag(default: Any, help: str) -> Any:
    """A field of `Config`: a command-line flag with its default and its help text."""
    from transformers.hf_argparser import HfArg

    if isinstance(default, list):
        return HfArg(default_factory=lambda: list(default), help=help)
    return HfArg(default=default, help=help)


class RowLength(int):
    """A row length in tokens, or the word `auto`, from the command line."""

    def __new__(cls, text: str) -> "RowLength":
        return AUTO if text == "auto" else super().__new__(cls, text)


AUTO = RowLength("1")  # whatever the number: it is told by identity


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
        start = Path(config.init_from)
        if start.exists():
            found = complete_checkpoints(start) or [
                place
                for place in (start, start / "hf")
                if is_checkpoint(place)
                or (place / "config.json").exists()
                and [*place.glob("*.safetensors")]
            ]
            if not found:
                refuse(
                    f"--init_from {start}: neither a checkpoint nor config.json and *.safetensors "
                    "in it"
                )
            start = found[0]
            config.init_from = str(start)
        described = str(start / "hf") if is_checkpoint(start) else config.init_from
        given = {word[2:].split("=")[0] for word in sys.argv[1:] if word.startswith("--")}
        for name in {"model", "tokenizer"} - given:
            setattr(config, name, described)
    check_config(config)
    return config


def check_config(config: Any) -> None:
    """Settle `--precision auto`; raise InputError for flags that cannot work here."""
    ranks, cuda = int(os.environ["WORLD_SIZE"]), torch.cuda.is_available()
    in_node = int(os.environ["LOCAL_WORLD_SIZE"])
    if cuda and in_node > torch.cuda.device_count():
        raise InputError(f"--nproc-per-node: this machine has {torch.cuda.device_count()} GPUs")
    bf16 = not cuda or torch.cuda.is_bf16_supported(including_emulation=False)
    if config.precision == "auto":
        config.precision = "bf16" if cuda and bf16 else "fp32"
    positive = ["eval_every", "eval_batches", "bucket_edges", "micro_batch_tokens"]
    for name in [*positive, "checkpoint_every", "keep_checkpoints"]:
        if np.min(getattr(config, name), initial=1) < 1:
            raise InputError(f"--{name} {getattr(config, name)} must be at least 1")
    for name in ("steps", "warmup_steps", "weight_decay", "grad_clip", "seed", "min_learning_rate"):
        if getattr(config, name) < 0:
            raise InputError(f"--{name} {getattr(config, name)} must not be negative")
    if not 0 < config.timeout_minutes < 1e6:
        raise InputError(f"--timeout_minutes {config.timeout_minutes} must be above 0")
    if config.min_learning_rate > config.learning_rate:
        raise InputError(
            f"--min_learning_rate {config.min_learning_rate} is above --learning_rate "
            f"{config.learning_rate}"
        )
    traced = config.trace_steps
    if traced and not (len(traced) == 2 and 1 <= traced[0] <= traced[1] <= config.steps):
        raise InputError(f"--trace_steps {traced} must be a first and a last step of the run")
    edges, micro = config.bucket_edges, config.micro_batch_tokens
    if any(edge is AUTO for edge in edges[1:]) or len(edges) > 2 and edges[0] is AUTO:
        raise InputError("--bucket_edges auto stands alone or before the longest row")
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
    hybrid = getattr(config, "sharding_strategy", None) == "hybrid_shard"
    # Between replicas of one rank FSDP1 would reduce nothing, and say nothing.
    if hybrid and (in_node == 1 < ranks or ranks % in_node):
        raise InputError(
            "--sharding_strategy hybrid_shard needs as many ranks on each node, and at least 2; "
            f"here are {in_node} of {ranks}: use full_shard, or another --nproc-per-node"
        )
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
    """Number of this process among all; 0 without torchrun."""
    return int(os.environ.get("RANK", 0))


def world_size() -> int:
    """Number of processes of the run; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", 1))


def fresh_store(timeout: datetime.timedelta) -> dict[str, Any]:
    """`store`, `rank` and `world_size` for init_process_group, as torchrun's environment has them.

    torchrun keeps one store over its restarts, in which the ranks would find the addresses of
    their dead predecessors. So each start on one node gets a prefix. (Nodes count restarts
    differently; for several, README names the setting that gives each start a new store.)
    """
    store, number, ranks = next(iter(dist.rendezvous("env://", timeout=timeout)))
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    return {"store": store, "rank": number, "world_size": ranks}


PATIENT = ("preparation", "checkpoint")  # who waits patiently


@functools.cache
def patient_group(purpose: str = "preparation") -> dist.ProcessGroup:
    """A gloo group whose collectives wait a month: preparing data on one rank may take hours.

    One for each thread: collectives of two threads in one group would be mixed up. All ranks must
    ask for a new purpose at the same time.
    """
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(days=30))


def gather(value: T, purpose: str = "preparation") -> list[T]:
    """The `value` of every rank, on every rank. They are pickled: keep them small."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value, group=patient_group(purpose))
    return values


def first_on_each_node(function: Callable[[], T]) -> T:
    """Run `function` on the first rank of each node; every rank gets its node's result.

    An InputError on any node is raised on all ranks.
    """
    node, leads = int(os.environ.get("GROUP_RANK", 0)), int(os.environ.get("LOCAL_RANK", 0)) == 0
    outcomes = gather((node, *attempt(function if leads else None)))
    raise_first(error for _, _, error in outcomes)
    return next(result[0] for where, result, _ in outcomes if result and where == node)


def on_rank_0(function: Callable[[], T], purpose: str = "preparation") -> T:
    """Run `function` on rank 0; every rank gets its result, or its InputError or RunError."""
    outcomes = gather(attempt(None if rank() else function), purpose)
    raise_first(error for _, error in outcomes)
    return outcomes[0][0][0]


def attempt(function: Callable[[], T] | None) -> tuple[list[T], Exception | None]:
    """[result] of the function and None, or [] and the error that all ranks are to raise."""
    try:
        return ([function()] if function else []), None
    except (InputError, RunError) as error:
        return [], error


def raise_first(errors: Iterable[Exception | None]) -> None:
    for error in errors:
        if error is not None:
            raise error


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
        tokenizer.backend_tokenizer.no_truncation()  # as a trainer may have left them
        tokenizer.backend_tokenizer.no_padding()
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

CACHE_VERSION = 1  # raise it with any change of what is cached for the same texts
READERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".txt": "text"}


def standard_library_files() -> list[str]:
    """The source files of Python's standard library, without tests and tables."""
    import sysconfig

    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "ensurepip"}
    files = sorted(root.rglob("*.py"))
    return [str(f) for f in files if not skipped.intersection(f.relative_to(root).parts)]


def read_python(file: str) -> tuple[Any, list[str]]:
    """The syntax tree and the lines of a source file."""
    import ast

    source = Path(file).read_text(encoding="utf-8", errors="replace")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        return ast.parse(source), source.splitlines(keepends=True)


def standard_library_documents(files: list[str], version: str) -> Iterator[dict[str, str]]:
    """One document a top-level function or class; `version` is there for the cache's key."""
    import ast

    for file in files:
        tree, lines = read_python(file)
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                yield {"text": "".join(lines[first - 1 : node.end_lineno])}


def docstring_conversations(files: list[str], version: str) -> Iterator[dict[str, Any]]:
    """A conversation for each documented function: write its docstring, with a thought before."""
    import ast

    for file in files:
        tree, lines = read_python(file)
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                docstring = ast.get_docstring(node)
                if (
                    docstring
                    and len(node.body) > 1
                    and node.body[1].lineno > node.body[0].end_lineno
                ):
                    yield {"messages": docstring_conversation(node, docstring, lines)}


def docstring_conversation(node: Any, docstring: str, lines: list[str]) -> list[dict[str, str]]:
    """System, user (the function without its docstring) and assistant (what `ast` finds in it)."""
    import ast

    first, last = node.body[0].lineno - 1, node.body[0].end_lineno
    code = "".join(lines[node.lineno - 1 : first] + lines[last : node.end_lineno])
    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    found: dict[str, list[str]] = {"arguments": [a.arg for a in given], "returns": [], "raises": []}
    for inner in ast.walk(node):
        if isinstance(inner, ast.Return) and inner.value:
            found["returns"].append(ast.unparse(inner.value))
        if isinstance(inner, ast.Raise) and inner.exc:
            found["raises"].append(ast.unparse(getattr(inner.exc, "func", inner.exc)))
    thought = "".join(
        f"{what}: {', '.join(dict.fromkeys(names)) or 'nothing'}\n" for what, names in found.items()
    )
    answer = (
        f"<|begin_of_thought|>\n{thought}<|end_of_thought|>\n\n"
        f"<|begin_of_solution|>\n{docstring}\n<|end_of_solution|>"
    )
    return [
        {"role": "system", "content": "You write docstrings. Think first, then answer."},
        {"role": "user", "content": f"Write the docstring of:\n\n{textwrap.dedent(code)}"},
        {"role": "assistant", "content": answer},
    ]


EMBEDDED = {"stdlib": standard_library_documents, "stdlib-docstrings": docstring_conversations}


def open_dataset(config: Any) -> Any:
    """The `datasets.Dataset` that --dataset names."""
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # InputError says what matters
    if rank() or not sys.stderr.isatty():
        datasets.disable_progress_bars()
    name, split = config.dataset, config.dataset_split
    reader = next((READERS[end] for end in Path(name).suffixes if end in READERS), None)
    if reader and "://" not in name and not glob.glob(name, recursive=True):
        raise InputError(f"--dataset {name}: no such file")
    try:
        if name in EMBEDDED:
            return datasets.Dataset.from_generator(
                EMBEDDED[name],
                gen_kwargs={
                    "files": standard_library_files(),
                    "version": f"{sys.version} {CACHE_VERSION}",
                },
            )
        if reader:
            return datasets.load_dataset(reader, data_files=name, split=split)
        return datasets.load_dataset(name, config.dataset_config, split=split)
    except Exception as error:  # of whatever reader, file system or hub client is behind the name
        reason = " ".join(str(error.__cause__ or error).split())
        raise InputError(f"--dataset {name} cannot be read: {reason[:300]}") from error


def load_text(config: Any) -> Any:
    """The text column of --dataset."""
    corpus, name, column = open_dataset(config), config.dataset, config.text_column
    if column not in corpus.column_names:
        raise InputError(
            f"--text_column {column}: --dataset {name} has no such column, only "
            f"{', '.join(corpus.column_names)}"
        )
    if "string" not in str(getattr(corpus.features[column], "dtype", "")):
        raise InputError(f"--text_column {column} holds {corpus.features[column]}, not text")
    return corpus.select_columns([column])


def tokenize_batch(table: Any, tokenizer_name: str) -> Any:
    """Arrow table of texts -> table of documents: tokens, bytes of text, digest of content.

    Runs in the worker processes of `datasets.map`.
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
    tokenizer, corpus = load_tokenizer(config.tokenizer), load_text(config)
    arguments = {"tokenizer_name": tokenizer.name}
    return map_to_files(corpus, tokenize_batch, tokenizer, "bytes", arguments)


def map_to_files(
    corpus: Any, function: Callable, tokenizer: Any, column: str, arguments: dict[str, Any]
) -> list[str]:
    """Map Arrow batches of texts, in several processes; returns Arrow files in the cache.

    `function` makes three columns: tokens, digest, and `column`, which is bytes or trained. The
    cache's key is what the tokenizer does, not where it lies.
    """
    import datasets

    key = [corpus._fingerprint, function.__name__, tokenizer.fingerprint, CACHE_VERSION]
    smallest = np.min_scalar_type(tokenizer.vocab_size - 1).name
    features = {
        "tokens": datasets.List(datasets.Value(smallest)),
        "bytes": datasets.Value("int32"),
        "trained": datasets.List(datasets.Value("uint8")),
        "digest": datasets.Value("uint64"),
    }
    del features["trained" if column == "bytes" else "bytes"]
    processes = min(os.cpu_count(), len(corpus) // 1000)
    tokenized = corpus.with_format("arrow").map(
        function,
        batched=True,
        remove_columns=corpus.column_names,
        features=datasets.Features(features),
        fn_kwargs=arguments,
        new_fingerprint=hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32],
        num_proc=processes if processes > 1 else None,
    )
    return [file["filename"] for file in tokenized.cache_files]


class Documents:
    """Tokenized documents or conversations, memory-mapped from Arrow files.

    `lengths` (tokens, the end-of-text token included), `bytes` (of text; None for conversations)
    and `digest` (hash of the text) are arrays with one number a document.
    """

    def __init__(self, files: list[str]):
        import pyarrow as pa

        table = pa.concat_tables(pa.ipc.open_stream(pa.memory_map(f)).read_all() for f in files)
        self.digest = table["digest"].to_numpy()
        if not len(self.digest):
            raise InputError("--dataset holds no text")
        self.bytes = table["bytes"].to_numpy() if "bytes" in table.column_names else None
        lists = table["tokens"].chunks
        offsets = [chunk.offsets.to_numpy() for chunk in lists]
        self.lengths = np.concatenate([np.diff(o) for o in offsets]).astype(np.int64)
        self._flat = [chunk.values.to_numpy() for chunk in lists]
        self._chunk = np.repeat(np.arange(len(lists)), [len(o) - 1 for o in offsets])
        self._begin = np.concatenate([o[:-1] for o in offsets])
        self._trained = None  # of conversations: 1 for each token to learn, else 0
        if self.bytes is None:
            self._trained = [chunk.values.to_numpy() for chunk in table["trained"].chunks]

    def fingerprint(self) -> str:
        """Of the texts and their order."""
        return hashlib.blake2b(self.digest.tobytes(), digest_size=8).hexdigest()

    def tokens(self, document: int, start: int, stop: int) -> np.ndarray:
        """The ids `start` to `stop` of a document: a view of the mapped file."""
        begin = self._begin[document]
        return self._flat[self._chunk[document]][begin + start : begin + stop]

    def labels(self, document: int, start: int, stop: int) -> np.ndarray:
        """The same ids, with IGNORED in place of those that the loss leaves out."""
        tokens, begin = self.tokens(document, start, stop), self._begin[document]
        if self._trained is None:
            return tokens
        trained = self._trained[self._chunk[document]][begin + start : begin + stop]
        return np.where(trained, tokens.astype(np.int64), IGNORED)

    def count_labels(self, document: np.ndarray, start: np.ndarray, length: np.ndarray):
        """Labels of the pieces that read `length` ids each, and predict the ids one further."""
        if self._trained is None:
            return length
        count = np.zeros(len(document), np.int64)
        for number, trained in enumerate(self._trained):
            chosen = np.flatnonzero((self._chunk[document] == number) & (length > 0))
            begin = self._begin[document[chosen]] + start[chosen] + 1
            bounds = np.stack([begin, begin + length[chosen]], axis=1).ravel()
            bounds = bounds[:-1] if len(bounds) and bounds[-1] == len(trained) else bounds
            count[chosen] = np.add.reduceat(trained, bounds, dtype=np.int64)[::2]
        return count


def split_by_content(digest: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the documents for training and for validation.

    Validation gets the 2 % with the smallest hashes (1 to 5,000 documents). So the split of the
    same documents is the same in every run, and equal ones always land on the same side.
    """
    held_out = min(max(1, len(digest) // 50), 5000)
    validation = digest <= np.partition(digest, held_out - 1)[held_out - 1]
    if validation.all():
        raise InputError("--dataset: a second document (or conversation) is needed for validation")
    return np.flatnonzero(~validation), np.flatnonzero(validation)


# --- Conversations: messages -> tokens, and which of them to learn --------------------------------

ROLES = {"human": "user", "gpt": "assistant"}  # as in ShareGPT's columns
MARKS = "\ufdd0", "\ufdd1"  # around a special token that a message spells out; no text has them
NEVER = re.compile("(?!)")


def one_of(tokens: Iterable[str]) -> re.Pattern:
    return re.compile("|".join(re.escape(token) for token in sorted(tokens, reverse=True)))


class ChatTokenizer:
    """A tokenizer with a chat template and single tokens for all that stands between the texts.

    The tokenizer's own template is used if it marks the assistant's tokens with `{% generation %}`,
    else `template`. `turn` tokens open and close a turn; `inside` are others that an assistant may
    write. `known` is the number of ids before any were added; `end_of_text` ends a learned turn.

    Raises:
        InputError: no such tokenizer, or its template fails.
    """

    def __init__(self, name: str, template: str, turn: tuple[str, ...], inside: tuple[str, ...]):
        import copy

        from jinja2 import TemplateError
        from transformers import AddedToken

        tokenizer = copy.deepcopy(load_tokenizer(name).to_transformers())
        self.name, self.tokenizer, self.known = name, tokenizer, len(tokenizer)
        own = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
        self.own_template = bool(re.search(r"\{%-?\s*generation\s*-?%\}", own))
        self.added = [t for t in (*turn, *inside) if t not in tokenizer.added_tokens_encoder]

        def add(*tokens: str) -> None:  # or make special, if there already
            new = [AddedToken(token, special=True, normalized=False) for token in tokens]
            tokenizer.add_tokens(new, special_tokens=True)

        add(*turn, *inside)
        tokenizer.split_special_tokens = False  # the template's are to be parsed
        special = {tokenizer.eos_token, tokenizer.bos_token, *turn}
        ends = {tokenizer.eos_token_id}
        if not self.own_template:
            begins = tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]
            tokenizer.chat_template = "{{- bos_token -}}" * begins + template
            tokenizer.eos_token = turn[-1]

        self.plain: dict[str, list[int]] = {}  # ids of a special token that is spelled out
        self.forged = self.forged_by_assistant = self.forged_in_text = NEVER
        sample = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        try:
            ids, learned = self.encode(sample)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise InputError(f"--tokenizer {name}: its chat template fails: {error}") from error
        known = tokenizer.added_tokens_decoder
        last = [int(i) for i in ids[learned] if int(i) in known or tokenizer.decode(i).strip()][-1:]
        self.learns_to_stop = bool(last) and last[0] in known
        self.end_of_text = last[0] if self.learns_to_stop else tokenizer.eos_token_id
        ends |= {tokenizer.eos_token_id, self.end_of_text}
        if tokenizer.pad_token_id is None or tokenizer.pad_token_id in ends:
            self.added.append("<|pad|>")
            add("<|pad|>")
            tokenizer.pad_token = "<|pad|>"
        self.vocab_size, self.padding = len(tokenizer), tokenizer.pad_token_id

        # What a message must not bring along: special tokens and what else the template writes.
        known = tokenizer.added_tokens_decoder
        special |= {tokenizer.pad_token, *(known[i].content for i in ids[~learned] if i in known)}
        special |= {known[self.end_of_text].content} if self.end_of_text in known else set()
        every = special | {token.content for token in known.values() if token.special}
        self.plain = {token: self.spell(token) for token in every - {None}}
        self.forged, self.forged_by_assistant = one_of(self.plain), one_of(special - {None})
        self.forged_in_text = re.compile(
            f"{MARKS[0]}({self.forged.pattern}){MARKS[1]}|[{MARKS[0]}{MARKS[1]}]"
        )
        definition = [tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template]
        definition.append(json.dumps(tokenizer.special_tokens_map, sort_keys=True))
        self.fingerprint = hashlib.sha256("\n".join(definition).encode()).hexdigest()

    def spell(self, token: str) -> list[int]:
        """Ids of a special token as plain text."""
        backend = self.tokenizer.backend_tokenizer
        backend.encode_special_tokens = True
        ids = backend.encode(token, add_special_tokens=False).ids
        if self.tokenizer.convert_tokens_to_ids(token) in ids:  # it is a word of the vocabulary too
            parts = (token[:1], token[1:])
            ids = [i for part in parts for i in backend.encode(part, add_special_tokens=False).ids]
        backend.encode_special_tokens = False
        return ids

    def mark(self, text: str, by_assistant: bool) -> str:
        forged = self.forged_by_assistant if by_assistant else self.forged
        text = re.sub(f"[{MARKS[0]}{MARKS[1]}]", "", text)
        return forged.sub(lambda found: MARKS[0] + found[0] + MARKS[1], text)

    def encode(self, messages: list[dict[str, str]]) -> tuple[np.ndarray, np.ndarray]:
        """Ids of a conversation, and whether each is to be learned: bool, same length.

        A special token that is spelled out in a message is encoded on its own and as plain text.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        marked = [
            {
                "role": self.mark(message["role"], False),
                "content": self.mark(message["content"], message["role"] == "assistant"),
            }
            for message in messages
        ]
        [rendered], [spans] = render_jinja_template(
            [marked],
            chat_template=self.tokenizer.chat_template,
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
        )
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []  # of each token, in characters
        position = 0
        for found in [*self.forged_in_text.finditer(rendered), None]:
            text = rendered[position : found.start()] if found else rendered[position:]
            encoding = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
            ids += encoding.ids
            offsets += [(position + start, position + stop) for start, stop in encoding.offsets]
            if found:
                spelled = self.plain.get(found[1], [])  # none for a mark that lost its partner
                ids += spelled
                offsets += [found.span()] * len(spelled)
                position = found.end()
        start, stop = np.array(offsets, np.int64).reshape(-1, 2).T
        learned = np.zeros(len(ids), bool)
        for begin, end in spans:
            learned |= (start < end) & (stop > begin)
        return np.array(ids, np.int64), learned

    def to_transformers(self) -> Any:
        return self.tokenizer


load_chat_tokenizer = functools.cache(ChatTokenizer)


def messages_of(row: dict[str, Any]) -> list[dict[str, str]]:
    """The messages (role and content) of a row in any of the known forms; [] if it has no form."""
    parts = [*(row.get("messages") or row.get("conversations") or [])]
    for role, column in (("user", "prompt"), ("assistant", "completion")):
        value = row.get(column)
        parts += [{"role": role, "content": value}] if isinstance(value, str) else value or []
    if row.get("system"):
        parts = [{"role": "system", "content": row["system"]}, *parts]
    messages = []
    for part in parts:
        role, content = part.get("role") or part.get("from"), part.get("content")
        content = part.get("value") if content is None else content
        if content is None and part.get("tool_calls"):
            return []  # to learn an empty answer in its place would be wrong
        if isinstance(content, list):  # of parts, as multimodal templates have them
            content = "".join(piece.get("text") or "" for piece in content)
        messages.append({"role": ROLES.get(role, role), "content": content or ""})
    texts = [text for message in messages for text in message.values()]
    return messages if all(isinstance(text, str) for text in texts) else []


def load_conversations_table(config: Any) -> Any:
    """The columns of --dataset that hold conversations."""
    corpus = open_dataset(config)
    names = corpus.column_names
    for columns in (["messages"], ["conversations"], ["prompt", "completion"]):
        if set(columns) <= set(names):
            columns += ["system"] if "system" in names else []
            break
    else:
        raise InputError(
            f"--dataset {config.dataset}: its columns are {', '.join(names)}; conversations are "
            "looked for in messages, in conversations, or in prompt and completion"
        )
    corpus = corpus.select_columns(columns)
    try:
        fits = any(messages_of(row) for row in corpus.select(range(min(100, len(corpus)))))
    except (AttributeError, TypeError):
        fits = False
    if not fits:
        raise InputError(
            f"--dataset {config.dataset}: column {columns[0]} holds neither role and content nor "
            "from and value"
        )
    return corpus


def tokenize_conversations(table: Any, tokenizer: tuple) -> Any:
    """Arrow table of conversations -> tokens, which of them are trained on, digest of content.

    As `tokenize_batch`; `tokenizer` has the arguments of ChatTokenizer. What is no conversation, or
    is refused by the template, becomes one without tokens.
    """
    import pyarrow as pa
    from jinja2 import TemplateError

    chat, none = load_chat_tokenizer(*tokenizer), np.zeros(0, np.int64)
    ids, learned, digests = [none], [none.astype(bool)], b""
    for row in table.to_pylist():
        encoded = none, none.astype(bool)
        try:
            if messages := messages_of(row):
                encoded = chat.encode(messages)
        except (TemplateError, AttributeError, TypeError, ValueError, KeyError):
            pass  # counted, and said at the start of the run
        ids.append(encoded[0])
        learned.append(encoded[1])
        content = json.dumps(row, default=str).encode()
        digests += hashlib.blake2b(content, digest_size=8).digest()
    offsets = np.cumsum([len(part) for part in ids], dtype=np.int32)
    flat = np.concatenate(ids).astype(np.min_scalar_type(chat.vocab_size - 1))
    columns = {
        "tokens": pa.ListArray.from_arrays(offsets, flat),
        "trained": pa.ListArray.from_arrays(offsets, np.concatenate(learned).astype(np.uint8)),
        "digest": np.frombuffer(digests, np.uint64),
    }
    return pa.table(columns)


# --- Batch plan: which pieces form micro-batch k of an epoch --------------------------------------


@dataclasses.dataclass
class Pieces:
    """Stretches of documents, no longer than the longest row; one array entry a piece.

    A piece of length n reads the n tokens from `start` on and predicts those from `start + 1` on.
    So cutting a document loses no prediction, and length = positions. In text every prediction has
    a label, in a conversation those of the assistant's tokens.
    """

    document: np.ndarray
    start: np.ndarray
    length: np.ndarray
    labels: np.ndarray


def cut_into_pieces(documents: Documents, chosen: np.ndarray, longest: int) -> Pieces:
    """Cut documents into pieces of at most `longest` positions."""
    positions = documents.lengths[chosen] - 1  # the last token is predicted, never read
    count = -(-positions // longest)
    owner = np.repeat(np.arange(len(chosen)), count)
    start = (np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)) * longest
    length = np.minimum(longest, positions[owner] - start)
    return Pieces(chosen[owner], start, length, labels=length)


def truncate(documents: Documents, chosen: np.ndarray, longest: int) -> Pieces:
    """The first `longest` positions of each conversation, of those that keep a label."""
    length = np.clip(documents.lengths[chosen] - 1, 0, longest)
    labels = documents.count_labels(chosen, np.zeros_like(length), length)
    kept = np.flatnonzero(labels)
    return Pieces(chosen[kept], np.zeros_like(kept), length[kept], labels[kept])


def choose_edges(length: np.ndarray, micro_batch_tokens: int, most: int = 12) -> list[int]:
    """Bucket edges that leave the least of the micro-batches unused, `most` of them or fewer.

    A row of a bucket takes micro_batch_tokens // rows positions of a micro-batch, whatever it
    holds: the rest is padding (where rows are padded to the edge) or not there. Worth trying are
    the lengths of which one row fewer fits if they grow by one. The best choice among them comes
    from dynamic programming over the candidates: the cheapest way to serve all lengths up to
    candidate j with one more edge, the last of them j.
    """
    shortest, longest = int(length.min()), int(length.max())
    candidates = np.unique(micro_batch_tokens // np.arange(1, micro_batch_tokens + 1))
    inside = (candidates >= shortest) & (candidates < longest)
    candidates = np.append(candidates[inside], longest)
    taken = micro_batch_tokens / (micro_batch_tokens // candidates)  # positions of one row
    upto = np.searchsorted(np.sort(length), candidates, side="right")  # rows of that length or less
    cost, before = upto * taken, []
    for _ in range(most - 1):
        longer = cost[:, None] + (upto[None] - upto[:, None]) * taken[None]  # [edge before, last]
        longer[np.tril_indices(len(candidates), -1)] = np.inf
        before.append(longer.argmin(axis=0))
        cost = longer.min(axis=0)
    chosen = [len(candidates) - 1]
    for previous in reversed(before):
        chosen.append(int(previous[chosen[-1]]))
    return candidates[np.unique(chosen)].tolist()


def cut(documents: Documents, chosen: np.ndarray, longest: int) -> Pieces:
    """Text is cut into pieces, a conversation loses its end."""
    return (truncate if documents.bytes is None else cut_into_pieces)(documents, chosen, longest)


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

    Bucket b holds the lengths above edges[b - 1] and up to edges[b]. In a bucket, the rows of 16
    micro-batches at a time, drawn at random, are sorted by length, which leaves little to pad. The
    micro-batches of all buckets are shuffled together: one bucket after the other would be an
    accidental curriculum.
    """
    bucket = np.searchsorted(edges, length).astype(np.uint16)  # 16 bits are sorted by radix
    order = rng.permutation(len(length))
    order = order[np.argsort(bucket[order], kind="stable")]
    last = np.cumsum(np.bincount(bucket, minlength=len(edges)))
    start, stop = [], []
    for edge, begin, end in zip(edges, [0, *last], last):
        rows, inside = micro_batch_tokens // edge, order[begin:end]
        window = np.arange(len(inside)) // (16 * rows)
        order[begin:end] = inside[np.lexsort((length[inside], window))]
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


# Row length at which attention costs as much as the products with weights: 12 x the hidden size,
# here of a small model, since wider ones hardly notice attention.
ATTENTION_EQUALS = 4096


def deal(costs: list[int], ranks: int) -> list[list[int]]:
    """Which micro-batches each rank runs: equally many, about as costly at any time and in all.

    Ranks wait for each other in every collective. So they get neighbours in cost at the same time,
    the costliest first, and who had least to do so far gets the costliest of these.
    """
    order = sorted(range(len(costs)), key=costs.__getitem__, reverse=True)
    hands: list[list[int]] = [[] for _ in range(ranks)]
    for first in range(0, len(order), ranks):
        hands.sort(key=lambda hand: sum(costs[i] for i in hand))
        for hand, i in zip(hands, order[first : first + ranks]):
            hand.append(i)
    return hands


@dataclasses.dataclass
class GlobalBatch:
    """What one optimizer step trains on.

    `micro_batches` are this rank's, each a dict of model arguments. The numbers are those of all
    ranks: `labels` (the loss is divided by them), `tokens` (read), `attended` (sum of the squared
    lengths, for the FLOPs of attention), `fractions` (for metrics.jsonl).
    """

    micro_batches: list[dict[str, Any]]
    labels: int
    tokens: int
    attended: int
    fractions: dict[str, float]


class Batches:
    """The endless stream of micro-batches of some documents, as one rank sees it.

    Epoch e is a plan seeded with (seed, e), and one epoch follows the other. Step s takes the
    micro-batches s * G to (s + 1) * G - 1 of that stream, G = global / micro batch tokens: the step
    number is the position in the data, and a step's content does not depend on the world size.
    """

    def __init__(
        self, documents: Documents, chosen: np.ndarray, config: Any, device: torch.device,
        padding: int,
    ):  # fmt: skip
        self.documents, self.config, self.padding = documents, config, padding
        self.pin, self.of_text = device.type == "cuda", documents.bytes is not None
        self.packed, self.edges = config.batching == "packed", config.bucket_edges
        self.pieces = cut(documents, chosen, self.edges[-1])
        if not len(self.pieces.length):
            raise InputError("--dataset: no document has two tokens or more")
        self.plan = functools.lru_cache(maxsize=2)(self._plan)
        first = self.plan(0)
        self.epoch_length = len(first.start)
        self.most_pieces = int((first.stop - first.start).max())

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
        Conversations also have `learned`, int64 [labels]: where in the flattened rows labels are.
        """
        rows, width = self.shape(pieces)
        inputs = np.full((rows, width), self.padding)
        labels = np.full((rows, width), IGNORED)
        row, column, boundaries = 0, 0, [0]
        for piece in pieces.tolist():
            start, length = self.pieces.start[piece], int(self.pieces.length[piece])
            document = self.pieces.document[piece]
            read = slice(column, column + length)
            inputs[row, read] = self.documents.tokens(document, start, start + length)
            labels[row, read] = self.documents.labels(document, start + 1, start + length + 1)
            if self.packed:
                column += length
                boundaries.append(column)
            else:
                row += 1
        tensors = {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}
        if not self.of_text:
            tensors["learned"] = torch.from_numpy(np.flatnonzero(labels != IGNORED))
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
        everything = np.concatenate(chosen)
        length, labels = self.pieces.length[everything], int(self.pieces.labels[everything].sum())
        tokens = int(length.sum())
        fractions = {"padding_fraction": 1 - tokens / sum(rows * width for rows, width in shapes)}
        if not self.of_text:
            fractions["assistant_fraction"] = labels / tokens
        products = [ATTENTION_EQUALS * rows * width for rows, width in shapes]
        attention = [int((self.pieces.length[pieces] ** 2).sum()) for pieces in chosen]
        mine = deal([a + b for a, b in zip(products, attention)], world_size())[rank()]
        return GlobalBatch(
            [self.collate(chosen[i]) for i in mine],
            labels=labels,
            tokens=tokens,
            attended=int((length**2).sum()),
            fractions=fractions,
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

    def bits_per_byte(self, loss: float, number: int) -> float | None:
        """Nats per label over `evaluation(number)` -> bits per byte of the text behind it."""
        if not self.of_text:
            return None
        number = min(number, self.epoch_length)
        pieces = np.concatenate([self.micro_batch(k) for k in range(number)])
        document, labels = self.pieces.document[pieces], self.pieces.length[pieces]
        share = labels / (self.documents.lengths[document] - 1)  # of a document that was cut
        return loss * labels.sum() / (share * self.documents.bytes[document]).sum() / math.log(2)

    def prompt(self) -> np.ndarray:
        """The first tokens of some document, or up to the assistant's turn, to be continued."""
        document, length = self.pieces.document[0], int(self.pieces.length[0])
        learned = np.flatnonzero(self.documents.labels(document, 1, length + 1) != IGNORED)
        stop = min(16, length) if self.of_text else int(learned[0]) + 1
        return self.documents.tokens(document, 0, stop)


def load_batches(config: Any, device: torch.device) -> tuple[Any, Batches, Batches]:
    """Tokenizer, training batches and validation batches, as the flags say."""
    documents = Documents(first_on_each_node(lambda: tokenize_corpus(config)))
    tokenizer = load_tokenizer(config.tokenizer)
    return tokenizer, *split_batches(documents, config, device, tokenizer.end_of_text)


def load_conversations(
    config: Any, device: torch.device, template: str, turn: tuple[str, ...], inside: tuple[str, ...]
) -> tuple[ChatTokenizer, Batches, Batches]:
    """As `load_batches`, of conversations; the arguments are those of ChatTokenizer."""

    def tokenize() -> list[str]:
        chat, corpus = load_chat_tokenizer(*settings), load_conversations_table(config)
        return map_to_files(
            corpus, tokenize_conversations, chat, "trained", {"tokenizer": settings}
        )

    settings = (config.tokenizer, template, turn, inside)
    documents = Documents(first_on_each_node(tokenize))
    chat = load_chat_tokenizer(*settings)
    return chat, *split_batches(documents, config, device, chat.padding)


def describe_conversations(
    config: Any, chat: ChatTokenizer, training: Batches, validation: Batches
) -> str:
    """What the data and its template are, and one conversation with the learned tokens marked."""
    lengths, longest = training.documents.lengths, config.bucket_edges[-1]
    numbers = [len(batches.pieces.length) for batches in (training, validation)]
    refused = int((lengths == 0).sum())
    on, off, marks = "[[", "]]", "in [[ ]]"
    if sys.stdout.isatty():
        on, off, marks = "\033[32m", "\033[0m", "in green"
    piece = int(np.argsort(training.pieces.length)[numbers[0] // 4])  # a short one
    document, stop = training.pieces.document[piece], int(training.pieces.length[piece]) + 1
    ids = training.documents.tokens(document, 0, stop)
    learned = training.documents.labels(document, 0, stop) != IGNORED
    bounds = [0, *(np.flatnonzero(np.diff(learned)) + 1).tolist(), stop]
    example = ""
    for begin, end in zip(bounds, bounds[1:]):
        text = chat.tokenizer.decode(ids[begin:end])
        example += f"{on}{text}{off}" if learned[begin] else text
    lines = [
        f"data       {numbers[0]:,} conversations, {numbers[1]:,} more for validation; "
        f"{(lengths - 1 > longest).sum():,} cut to {longest:,} tokens; left out: {refused:,} that "
        f"are none or that the template refuses, {len(lengths) - sum(numbers) - refused:,} with "
        "nothing to learn",
        f"template   {'the tokenizer' if chat.own_template else 'this script'}'s own; "
        f"added to the tokenizer: {' '.join(chat.added) or 'nothing'}",
        f"--- an example; learned is what stands {marks}\n{example.rstrip()}\n---",
    ]
    if not chat.learns_to_stop:
        lines.append("the template leaves the end of a turn out: the model will not learn to stop")
    return "\n".join(lines)


def split_batches(documents: Documents, config: Any, device: torch.device, padding: int):
    """Training batches and validation batches; settles `--bucket_edges auto`."""
    edges = config.bucket_edges
    longest = config.micro_batch_tokens if edges[-1] is AUTO else edges[-1]
    usable = np.arange(len(documents.lengths))
    if documents.bytes is None:
        usable = truncate(documents, usable, longest).document
        if not len(usable):
            refused = (documents.lengths == 0).sum()
            raise InputError(
                f"--dataset: no conversation holds anything to learn; {refused} of "
                f"{len(documents.lengths)} are none or are refused by the chat template"
            )
    if edges[0] is AUTO:
        lengths = cut(documents, usable, longest).length
        config.bucket_edges = choose_edges(lengths, config.micro_batch_tokens)
    split = split_by_content(documents.digest[usable])
    return [Batches(documents, usable[chosen], config, device, padding) for chosen in split]


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
# Fewer heads of keys and values than of queries; torch's own kernel takes them from 2.12 on.
KERNEL_TAKES_GROUPS = (
    flash_attn_varlen_func is not None or "enable_gqa" in inspect.signature(varlen_attn).parameters
)


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
    kernel = query.is_cuda and query.dtype != torch.float32  # what variable-length kernels take
    if not (kernel and KERNEL_TAKES_GROUPS):
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    if kernel:
        flat = [x[0].transpose(0, 1) for x in (query, key, value)]  # [tokens, heads, head size]
        limits = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
        if flash_attn_varlen_func is not None:
            output = flash_attn_varlen_func(*flat, *limits, softmax_scale=scale, causal=True)
        else:
            grouped = {"enable_gqa": True} if KERNEL_TAKES_GROUPS else {}
            output = varlen_attn(*flat, *limits, scale=scale, window_size=(-1, 0), **grouped)
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


def tied_names(model: Any) -> dict[str, str]:
    """Names under which a state dict repeats a tensor, and its own: head -> embedding."""
    model = getattr(model, "module", model)
    return dict(model._tied_weights_keys or {}) if model.config.tie_word_embeddings else {}


def without_tied(model: Any, state: dict[str, Any]) -> dict[str, Any]:
    """A model's state without those repetitions: in FSDP1's the head is a stale copy of its own."""
    tied = tied_names(model)
    return {name: tensor for name, tensor in state.items() if name not in tied}


def with_tied(model: Any, state: dict[str, Any]) -> dict[str, Any]:
    """The inverse, for `set_model_state_dict`."""
    return state | {name: state[own] for name, own in tied_names(model).items()}


def draw_new_rows(old: torch.Tensor, known: int, vocabulary: int, rows: int) -> torch.Tensor:
    """Embeddings of a grown vocabulary: [rows, width], the old ones unchanged.

    Rows of ids from `known` to `vocabulary`, which may lie in the padding of the old matrix, and
    padding past it are drawn from a normal distribution with the mean and covariance of the known
    rows: a new token starts as likely as some other one, where zeros or fresh noise would shift
    the whole softmax (Hewitt 2021, Initializing New Word Embeddings for Pretrained Language Models;
    he scales the covariance by 1e-5, but alike rows took `tiny` longer to tell apart).
    """
    mean = old[:known].mean(0)
    new = torch.arange(rows)
    new = new[((new >= known) & (new < vocabulary)) | (new >= len(old))]
    noise = torch.randn(len(new), known, generator=torch.Generator().manual_seed(0))
    noise = noise @ old[:known] - noise.sum(1, keepdim=True) * mean  # covariance: known x theirs
    grown = torch.empty(rows, old.shape[1])
    grown[: len(old)] = old
    grown[new] = mean + noise / known**0.5
    return grown


def load_weights(
    model: torch.nn.Module, name: str, known: int | None = None, vocabulary: int = 0
) -> None:
    """Fill whole or sharded parameters from a checkpoint, a Hugging Face directory or a hub id.

    Every rank reads just the slices that it keeps, cast on the way: none holds a second copy. (But
    for embeddings that grow: with `known`, ids from there to `vocabulary` are new.)

    Raises:
        InputError: names the parameters that are missing, unexpected or of another shape.
    """
    import torch.distributed.checkpoint as dcp
    from safetensors import safe_open
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.tensor import distribute_tensor
    from transformers import AutoConfig

    def fetch() -> str:
        from huggingface_hub import snapshot_download

        try:
            return snapshot_download(name, allow_patterns=["*.json", "*.safetensors"])
        except Exception as error:  # of the hub client and its HTTP library
            raise InputError(f"--init_from {name}: {' '.join(str(error).split())}") from error

    def old_rows(number: int, tensor: torch.Tensor) -> torch.Tensor:
        if not known <= number <= len(tensor):
            raise InputError(
                f"--init_from {name}: a vocabulary of {number} rows does not fit the {known} ids "
                f"of --tokenizer and the {len(tensor)} rows of --model"
            )
        return torch.empty(number, tensor.shape[1])

    def take(state: dict[str, Any]) -> None:
        for key, tensor in growing.items():
            grown = draw_new_rows(state[key], known, vocabulary, len(tensor)).to(tensor.device)
            state[key] = distribute_tensor(grown, tensor.device_mesh, tensor.placements)
        set_model_state_dict(model, with_tied(model, state))

    state = get_model_state_dict(model)
    wanted = without_tied(model, state)
    growing = {}  # in the same order on all ranks
    if known not in (None, vocabulary):
        embeddings = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}
        names = [key for key, parameter in model.named_parameters() if parameter in embeddings]
        growing = {key: wanted[key] for key in names}
    if is_checkpoint(Path(name)):
        path = find_checkpoint(name)
        rows = AutoConfig.from_pretrained(path / "hf").vocab_size
        wanted |= {key: old_rows(rows, tensor) for key, tensor in growing.items()}
        read_weights(path, wanted)
        take(wanted)
        return
    directory = name if Path(name).is_dir() else first_on_each_node(fetch)
    stored = {}
    for path in Path(directory).glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            stored |= {key: file.get_slice(key).get_shape() for key in file.keys()}
    for key in growing.keys() & stored.keys():
        wanted[key] = old_rows(stored[key][0], growing[key])
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
    take(wanted)


def export(directory: Path, shape: Any, state: dict[str, torch.Tensor], tokenizer: Any) -> None:
    """Write what AutoModelForCausalLM and AutoTokenizer load; complete, or not there at all.

    Every rank must call it: gathering a sharded tensor is a collective. They are gathered one at a
    time, and rank 0 alone keeps them, in CPU memory.
    """
    from torch.distributed.tensor import DTensor
    from transformers import AutoModelForCausalLM

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

    def write() -> None:
        try:
            save_pretrained(directory, model, weights, tokenizer.to_transformers())
        except Exception as error:  # safetensors and tokenizers have their own for a full disk
            raise RunError(
                f"cannot write {directory}: {error}; the checkpoint of the last step is complete, "
                "the same command goes on from there"
            ) from error

    on_rank_0(write)


def save_pretrained(directory: Path, model: Any, weights: dict, tokenizer: Any) -> None:
    from transformers import logging

    logging.disable_progress_bar()
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    temporary = directory.with_name(directory.name + ".tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        model.save_pretrained(temporary, state_dict=weights)
        tokenizer.save_pretrained(temporary)
        shutil.rmtree(directory, ignore_errors=True)
        temporary.rename(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_sample(directory: Path, prompt: np.ndarray, device: torch.device) -> str:
    """How the exported model continues the ids of `prompt`, as plain transformers does it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory).to(device)
    ids = torch.from_numpy(prompt.astype(np.int64))[None].to(device)
    torch.manual_seed(0)
    room = getattr(model.config, "max_position_embeddings", 4096) - ids.shape[1]
    options = {"max_new_tokens": max(1, min(160, room)), "do_sample": True, "temperature": 0.7}
    options |= {"attention_mask": torch.ones_like(ids), "pad_token_id": tokenizer.eos_token_id}
    return tokenizer.decode(model.generate(ids, **options)[0])


# --- Checkpoints: directories that are complete or absent -----------------------------------------

SUMS = "SHA256SUMS"  # of every file of a checkpoint, as `sha256sum --check` reads them
# Flags that a resumed run must share with the checkpoint, and what they stand for.
FIXED_FLAGS = {
    "model": ["model"],
    "tokenizer": ["tokenizer"],
    "data": ["dataset", "dataset_config", "dataset_split", "text_column"],
    "batch plan": [
        "bucket_edges", "batching", "micro_batch_tokens", "global_batch_tokens", "seed",
    ],
}  # fmt: skip


@dataclasses.dataclass
class Progress:
    """Where a run stands: what a checkpoint holds beside model and optimizer."""

    step: int = 0
    tokens: int = 0  # labels that were trained on
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    loss: float | None = None
    validation_loss: float | None = None  # None unless measured after this very step
    best_validation_loss: float | None = None
    wandb_run: str | None = None

    @property
    def updates(self) -> int:
        """Steps that the optimizer took; before the first one it has no moments."""
        return self.step - self.skipped_steps


def is_checkpoint(path: Path) -> bool:
    return (path / SUMS).exists() or (path / "checkpoint.json").exists()


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """The complete checkpoints of a run, newest first. Steps are compared as numbers."""
    found = Path(run_dir, "checkpoints").glob("step_*")
    return sorted((p for p in found if not p.suffix), key=step_of, reverse=True)


def step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))


def read_description(path: Path) -> dict[str, Any]:
    return json.loads((path / "checkpoint.json").read_text())


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(2**22):
            digest.update(block)
    return digest.hexdigest()


def damage(path: Path) -> str | None:
    """What is wrong with the files of a checkpoint, or None; the ranks share the reading."""

    def check(line: str) -> str | None:
        expected, _, name = line.partition("  ")
        if not name or not (path / name).is_file():
            return f"{name or SUMS} is missing"
        return None if sha256(path / name) == expected else f"{name} is damaged"

    problems: list[str | None] = []
    try:
        lines = (path / SUMS).read_text().splitlines()
        mine = lines[rank() :: world_size()] if dist.is_initialized() else lines
        problems = [check(line) for line in mine]
        if not any(line.endswith("  checkpoint.json") for line in lines):
            problems.append(f"{SUMS} is cut off")
    except (OSError, ValueError) as error:
        problems = [f"{SUMS} cannot be read ({error})"]
    return next((p for found in gather(problems) for p in found if p), None)


def sync(path: Path) -> None:
    """Have a file or a directory survive the loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Checkpoints:
    """The checkpoints of a run: where it goes on from, writing new ones, removing old ones.

    A checkpoint is written under a temporary name, every file and directory is synced, then it is
    renamed. RUN_DIR must be on a disk that all nodes share. `shape` is the model's `transformers`
    config. `resumed` is the checkpoint to go on from, or None; `stager` copies a state to CPU
    memory before it is written in a thread.

    Raises:
        InputError: no such checkpoint, a damaged one, or one of another model, data or batch plan.
        Ended: the run is finished.
    """

    def __init__(self, run: "Run", shape: Any, tokenizer: Any, training: Batches):
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self.run, self.config, self.directory = run, run.config, run.directory / "checkpoints"
        shape.bos_token_id, shape.eos_token_id = None, tokenizer.end_of_text  # where to stop
        shape.pad_token_id = None  # transformers would freeze its embedding, whatever it is
        self.shape, self.tokenizer = shape, tokenizer
        self.contents = {
            "model": json.loads(shape.to_json_string(use_diff=False)),
            "tokenizer": tokenizer.fingerprint,
            "data": training.documents.fingerprint(),
            "batch plan": [getattr(self.config, name) for name in FIXED_FLAGS["batch plan"]],
        }
        self.thread: threading.Thread | None = None
        self.failure: Exception | None = None
        for purpose in PATIENT:
            patient_group(purpose)
        pinned = run.device.type == "cuda"
        self.stager = DefaultStager(StagingOptions(pinned, False, False, pinned))
        self.resumed = self.find()
        self.written = run.progress.step if self.resumed else None

    def find(self) -> Path | None:
        """Decide where the run goes on from, as --resume says; sets the run's progress."""
        wanted, steps = self.config.resume, self.config.steps
        candidates = on_rank_0(self.clear_leftovers)
        if candidates and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0:
            wanted = "auto"  # a restart by torchrun goes on, whatever it began from
        chosen = None
        if wanted == "auto":
            for path in candidates:
                problem = damage(path)
                if problem is None:
                    chosen = path
                    break
                self.run.say(f"{path} is damaged ({problem}): trying the one before")
            if candidates and chosen is None:
                raise InputError(
                    f"--run_dir {self.run.directory}: all its checkpoints are damaged; "
                    "--resume never starts again"
                )
        elif wanted != "never":
            chosen = Path(wanted)
            if not is_checkpoint(chosen):
                raise InputError(f"--resume {wanted}: neither auto, never nor a checkpoint")
            if problem := damage(chosen):
                raise InputError(f"--resume {wanted}: the checkpoint is damaged, {problem}")
        mine = chosen is not None and chosen.resolve().parent == self.directory.resolve()
        if chosen is not None:
            unused = "; --init_from is not read again" if self.config.init_from else ""
            self.run.say(f"going on from {chosen}{unused}")
            description = read_description(chosen)
            self.refuse_difference(chosen, description)
            self.run.progress = Progress(**description["progress"])
            done = self.run.progress.step
            if done > steps or (done == steps and mine and self.run.finished == steps):
                raise Ended(
                    f"nothing to do: {chosen} has done {done} of {steps} steps; raise --steps to "
                    "train on, or --resume never to start again"
                )
        self.run.continues = mine
        on_rank_0(lambda: self.set_aside(self.run.progress.step if mine else -1))
        self.run.keep_metrics(self.run.progress.step if mine else 0)
        return chosen

    def clear_leftovers(self) -> list[Path]:
        """Remove what a run that died while writing left behind; returns the complete ones."""
        self.directory.mkdir(exist_ok=True)
        for path in [*self.directory.glob("*.tmp"), self.run.directory / "hf.tmp"]:
            shutil.rmtree(path, ignore_errors=True)
        return complete_checkpoints(self.run.directory)

    def set_aside(self, step: int) -> None:
        """Rename checkpoints past `step`: this run replaces them once it has one of its own."""
        for path in complete_checkpoints(self.run.directory):
            if step_of(path) > step:
                replaced = path.with_suffix(".replaced")
                shutil.rmtree(replaced, ignore_errors=True)
                path.rename(replaced)

    def refuse_difference(self, path: Path, description: dict[str, Any]) -> None:
        """Raise InputError, naming flags and values, if the checkpoint is of something else."""
        ignored = {"transformers_version", "dtype", "architectures", "_name_or_path"}
        flags, changed, named = description["flags"], [], []
        for kind, now in self.contents.items():
            before = description["contents"][kind]
            if kind == "model":
                shared = now.keys() & before.keys() - ignored
                now, before = ({key: x[key] for key in shared} for x in (now, before))
            if now != before:
                changed.append(kind)
                both = [(n, flags.get(n), getattr(self.config, n, None)) for n in FIXED_FLAGS[kind]]
                named += [f"--{n} {old} (now {new})" for n, old, new in both if old != new]
        if changed:
            difference = ", ".join(named) or f"another {' and '.join(changed)} under the same flags"
            raise InputError(
                f"checkpoint {path} was written with {difference}; resume with what it was written "
                "with, or take its weights alone with --init_from"
            )

    def write(self, save: Callable[[Path], Callable[[], None]]) -> None:
        """Write a checkpoint of this moment: what `save(directory)` returns does so.

        With --async_checkpoint that and the rest happen in a thread.

        Raises:
            RunError: it failed, or the one that was still being written; older ones are intact.
        """
        self.wait()
        progress = dataclasses.replace(self.run.progress)
        if progress.step == self.written:  # the loop is about to end
            return
        temporary = self.directory / f"step_{progress.step:08d}.tmp"
        on_rank_0(lambda: self.begin(temporary))
        writing = self.together(temporary, lambda: save(temporary))
        self.written = progress.step
        if self.config.async_checkpoint:
            self.thread = threading.Thread(
                target=self.complete_later, args=(temporary, progress, writing), daemon=True
            )
            self.thread.start()
        else:
            self.complete(temporary, progress, writing)
        self.run.watchdog.expect(progress.step + 1)

    def begin(self, temporary: Path) -> None:
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            self.shape.save_pretrained(temporary / "hf")
            self.tokenizer.to_transformers().save_pretrained(temporary / "hf")
        except Exception as error:  # the tokenizers library raises a bare Exception on a full disk
            shutil.rmtree(temporary, ignore_errors=True)
            raise self.cannot_write(temporary, error) from error

    def complete_later(self, *arguments: Any) -> None:
        try:
            if self.run.device.type == "cuda":
                torch.cuda.set_device(self.run.device)  # a new thread has device 0
            self.complete(*arguments)
        except Exception as error:  # raised by `wait`, in the thread that trains
            self.failure = error

    def complete(self, temporary: Path, progress: Progress, writing: Callable[[], None]) -> None:
        """Have all ranks write; once they have: sync, describe, rename, remove old ones."""

        def write() -> dict[str, str]:
            writing()
            mine = temporary.rglob(f"__{rank()}_*")
            return {str(path.relative_to(temporary)): self.synced_sum(path) for path in mine}

        parts = gather(self.together(temporary, write), "checkpoint")
        sums = {name: value for part in parts for name, value in part.items()}
        on_rank_0(lambda: self.publish(temporary, progress, sums), "checkpoint")

    def together(self, temporary: Path, work: Callable[[], Any]) -> Any:
        """Do this rank's work; if it fails on any rank, raises RunError on all."""
        result, problem = None, None
        try:
            result = work()
        except failures() as error:
            problem = self.cannot_write(temporary, error)
        problems = gather(problem, "checkpoint")
        if any(problems):
            if rank() == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise_first(problems)
        return result

    def synced_sum(self, path: Path) -> str:
        sync(path)
        return sha256(path)

    def publish(self, temporary: Path, progress: Progress, sums: dict[str, str]) -> None:
        try:
            description = self.run.description() | {
                "progress": dataclasses.asdict(progress),
                "style": self.config.checkpoint_style,
                "contents": self.contents,
            }
            (temporary / "checkpoint.json").write_text(json.dumps(description, indent=2) + "\n")
            for path in sorted(temporary.rglob("*")):
                name = str(path.relative_to(temporary))
                if path.is_file() and name not in sums:
                    sums[name] = self.synced_sum(path)
            lines = [f"{value}  {name}\n" for name, value in sorted(sums.items())]
            (temporary / SUMS).write_text("".join(lines))
            sync(temporary / SUMS)
            for path in [*temporary.rglob("*"), temporary]:
                if path.is_dir():
                    sync(path)
            temporary.rename(temporary.with_suffix(""))
            sync(self.directory)
            self.remove_old()
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise self.cannot_write(temporary, error) from error

    def remove_old(self) -> None:
        """All but the newest --keep_checkpoints and the best by validation loss."""
        complete = complete_checkpoints(self.run.directory)
        losses = {}
        for path in complete:
            loss = read_description(path)["progress"]["validation_loss"]
            if loss is not None:
                losses[path] = loss
        kept = {
            *complete[: self.config.keep_checkpoints],
            min(losses, key=losses.get, default=None),
        }
        for path in complete:
            if path not in kept:
                path.rename(path.with_suffix(".tmp"))  # gone at once, whatever happens now
                shutil.rmtree(path.with_suffix(".tmp"))
        for path in self.directory.glob("*.replaced"):
            shutil.rmtree(path)

    def cannot_write(self, temporary: Path, error: BaseException) -> RunError:
        causes = [cause for cause, _ in getattr(error, "failures", {}).values()] or [error]
        free = shutil.disk_usage(self.directory).free / 2**20
        intact = complete_checkpoints(self.run.directory)
        return RunError(
            f"cannot write {temporary.with_suffix('')}: {' '.join(str(causes[0]).split())[:300]} "
            f"({free:,.0f} MiB free); "
            + (f"{intact[0]} is intact" if intact else "there is no earlier checkpoint")
        )

    def failed(self) -> bool:
        """Whether writing in the background has failed on this rank."""
        return self.failure is not None

    def wait(self) -> None:
        """Wait for what is written in the background; raises its RunError."""
        self.run.watchdog.expect(self.run.progress.step, patience=10)  # a slow disk is no stall
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure


def failures() -> tuple[type[BaseException], ...]:
    """What saving with DCP raises when a file cannot be written."""
    from torch.distributed.checkpoint import CheckpointException

    return CheckpointException, OSError, RuntimeError


def read_weights(path: Path, state: dict[str, torch.Tensor], **options: Any) -> None:
    """Fill `state` from the model in a checkpoint of either style."""
    import torch.distributed.checkpoint as dcp

    if (path / "model").is_dir():
        dcp.load(state, checkpoint_id=path / "model", **options)
    else:
        dcp.load({"app": {"model": state}}, checkpoint_id=path, **options)


def find_checkpoint(name: str) -> Path:
    """A checkpoint, or the newest one of a run directory, undamaged; else InputError."""
    path = next(iter(complete_checkpoints(Path(name))), Path(name))
    if not is_checkpoint(path):
        raise InputError(f"{name} is neither a checkpoint nor a run directory that holds one")
    if problem := damage(path):
        raise InputError(f"checkpoint {path} is damaged: {problem}")
    return path


def show_checkpoint(name: str) -> None:
    """Print what a checkpoint holds; nothing is unpickled."""
    path = find_checkpoint(name)
    description = read_description(path)
    flags = " ".join(f"--{flag} {value}" for flag, value in description["flags"].items())
    described = {"checkpoint": path, **description["progress"]}
    for key in ("parameters", "script", "world_size", "style", "torch"):
        described[key] = description[key]
    for key, value in {**described, "flags": flags}.items():
        print(f"{key:21} {value}")


def export_checkpoint(name: str, out: str) -> None:
    """Any checkpoint -> what transformers loads, in one process on the CPU."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    path, directory = find_checkpoint(name), Path(out)
    if directory.exists():
        raise InputError(f"{directory} exists already")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(path / "hf"), dtype=torch.float32
        )
    tied = tied_names(model)
    state = {
        key: torch.empty_like(tensor, device="cpu")
        for key, tensor in model.state_dict().items()
        if key not in tied
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # it is meant to be
        read_weights(path, state, no_dist=True)
    save_pretrained(directory, model, state, AutoTokenizer.from_pretrained(path / "hf"))


def command_line() -> None:
    """`python common.py show CHECKPOINT` and `python common.py export CHECKPOINT OUT`."""
    import argparse

    trust = "Load only checkpoints you trust: they hold a pickle, which can run code."
    parser = argparse.ArgumentParser(description=f"Look into a checkpoint. {trust}")
    commands = parser.add_subparsers(required=True)
    show = commands.add_parser("show", help="print what a checkpoint holds")
    export = commands.add_parser("export", help="write it in Hugging Face form", description=trust)
    for command in (show, export):
        command.add_argument("checkpoint", help="a checkpoint, or a run directory: its newest one")
    export.add_argument("out", help="directory to write")
    show.set_defaults(call=lambda given: show_checkpoint(given.checkpoint))
    export.set_defaults(call=lambda given: export_checkpoint(given.checkpoint, given.out))
    given = parser.parse_args()
    given.call(given)


# --- A run: its directory, metrics and progress ---------------------------------------------------

# Dense bf16 FLOP/s from the makers' data sheets (where "with sparsity" stands for twice as much).
PEAK_FLOPS = {
    "B200": 2250e12, "GH200": 989e12, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12,
    "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L40": 181e12, "RTX 6000 Ada": 364e12,
    "L4": 121e12, "A10G": 70e12, "A10": 125e12, "RTX 4090": 165e12, "RTX A6000": 155e12,
    "RTX 3090": 71e12,
}  # fmt: skip


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s; None where they are not known."""
    name = name_of(device)
    return next((peak for key, peak in PEAK_FLOPS.items() if key in name), None)


@dataclasses.dataclass
class ModelSize:
    """Parameters, those in matrix products of blocks and head, width of attention in all blocks."""

    parameters: int
    in_blocks: int
    in_head: int
    attention_width: int

    def flops(self, tokens: int, labels: int, attended: int) -> int:
        """Of forward and backward; `attended` is the sum of the squared lengths of the documents.

        As in PaLM (arXiv 2204.02311, appendix B): 6 a parameter and token, in the head a parameter
        and label, and 12 x width x length a token for attention. Neither recomputation nor padding
        counts.
        """
        products = self.in_blocks * tokens + self.in_head * labels
        return 6 * products + 12 * self.attention_width * attended


def size_of(shape: Any) -> ModelSize:
    """Of a model with the `transformers` config `shape`."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape)
    # The input embedding is a look-up, not a product; tied to the head it is a product there.
    look_up = 0 if shape.tie_word_embeddings else model.get_input_embeddings().weight.numel()
    in_head = model.get_output_embeddings().weight.numel()
    in_blocks = model.num_parameters() - look_up - in_head
    head = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    width = shape.num_hidden_layers * shape.num_attention_heads * head
    return ModelSize(model.num_parameters(), in_blocks, in_head, width)


def peak_memory(device: torch.device) -> int:
    """Most bytes held so far: on the GPU by torch's allocator, else by the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Run:
    """A run's directory, metrics, progress and Weights & Biases; watches that it does not stall.

    Every rank calls it, rank 0 alone writes.

    Raises:
        InputError: --run_dir cannot be written, or another run is using it.
    """

    def __init__(self, config: Any, device: torch.device):
        self.config, self.device, self.directory = config, device, Path(config.run_dir)
        self.progress, self.stopping, self.first_step = Progress(), False, 0
        self.continues = False  # the run that this directory holds
        self.bar = self.metrics = self.wandb = self.profiler = self.collectives = None
        first_on_each_node(self.make_directory)
        self.finished = on_rank_0(self.open)
        if int(os.environ.get("GROUP_WORLD_SIZE", 1)) > 1:
            token = self.directory / on_rank_0(self.leave_token)
            try:
                first_on_each_node(lambda: self.look_for(token))
            finally:
                if rank() == 0:
                    token.unlink()

    def make_directory(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.directory) as file:
                file.write(b"written")
        except OSError as error:
            raise InputError(f"--run_dir {self.directory} cannot be written: {error}") from error

    def leave_token(self) -> str:
        name = f".seen_by_all_{os.urandom(8).hex()}"
        (self.directory / name).touch()
        return name

    def look_for(self, token: Path) -> None:
        """A file that rank 0 wrote must be seen on each node; a network disk may be a bit late."""
        for _ in range(10):
            if token.exists():
                return
            time.sleep(0.5)
        raise InputError(
            f"--run_dir {self.directory} is not the same directory on all nodes; checkpoints need "
            "one that every node sees"
        )

    def open(self) -> int | None:
        """Lock the directory for this run; returns the step at which it was finished before."""
        self.metrics = open(self.directory / "metrics.jsonl", "a+", buffering=1)  # line by line
        try:  # this lock ends with the process, however it dies, and is not inherited by forks
            fcntl.lockf(self.metrics, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InputError(
                f"--run_dir {self.directory} is in use by another run; choose another directory"
            ) from error
        try:
            return json.loads((self.directory / "config.json").read_text()).get("finished")
        except (OSError, ValueError):  # a new directory, or a run that died at its start
            return None

    def keep_metrics(self, step: int) -> None:
        """Cut metrics.jsonl to the lines up to `step`; the last one may be half written."""
        if self.metrics is None:
            return
        self.metrics.seek(0)
        kept = 0
        for line in self.metrics.read().splitlines(keepends=True):
            try:
                if not line.endswith("\n") or json.loads(line)["step"] > step:
                    break
            except ValueError:
                break
            kept += len(line)
        self.metrics.truncate(kept)

    def start(self, shape: Any, optimizer: Any) -> None:
        """Training begins: print what the run will do. `shape` is the `transformers` config."""
        self.size = size_of(shape)
        self.parameters = self.size.parameters
        self.device_name = name_of(self.device)
        self.peak_flops = peak_flops(self.device)
        self.started = self.spoken = time.perf_counter()
        self.first_step = self.progress.step
        first_on_each_node(self.check_space)
        SIGNALS.at_once = False
        self.watchdog = Watchdog(self.config.timeout_minutes, self.directory, self.device)
        self.watchdog.expect(self.first_step + 1, patience=10 if self.config.compile else 1)
        if rank():
            return
        self.write_config()
        self.summarize(optimizer)
        if sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(
                initial=self.first_step, total=self.config.steps, unit="step", dynamic_ncols=True
            )
        if self.config.wandb_project:
            import wandb

            options = {"project": self.config.wandb_project, "name": self.directory.name}
            if self.continues and self.progress.wandb_run:
                options |= {"id": self.progress.wandb_run, "resume": "allow"}
            self.wandb = wandb.init(config=self.description(), dir=self.directory, **options)
            self.progress.wandb_run = self.wandb.id
            # Not wandb's own step, which must grow: a resumed run repeats some.
            self.wandb.define_metric("*", step_metric="step")

    def description(self) -> dict[str, Any]:
        """What is written about a run beside its numbers."""
        return {
            "flags": dataclasses.asdict(self.config),
            "parameters": self.parameters,
            "script": Path(sys.argv[0]).name,
            "world_size": world_size(),
            "device": self.device_name,
            "python": sys.version.split()[0],
            "torch": torch.__version__,
        }

    def write_config(self, **more: Any) -> None:
        text, path = json.dumps(self.description() | more, indent=2) + "\n", "config.json"
        try:
            (self.directory / path).write_text(text)
        except OSError as error:
            raise RunError(f"cannot write {self.directory / path}: {error}") from error

    def should_stop(self, checkpoints: Checkpoints) -> bool:
        """Whether any rank was told to stop; raises on all if a checkpoint could not be written."""
        flags = torch.tensor([SIGNALS.received, checkpoints.failed()], dtype=torch.int32)
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        self.stopping, failed = flags.bool().tolist()
        if failed:
            checkpoints.wait()
        return self.stopping

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
        flops = self.size.flops(1, 1, longest)
        held = [p for group in optimizer.param_groups for p in group["params"]]
        held = sum(getattr(p, "_local_tensor", p).numel() for p in held)
        self.say(
            f"model      {config.model}: {self.parameters:,} parameters, {flops / 1e6:,.1f} MFLOPs "
            f"a token at length {longest}\n"
            f"rows       of up to {' '.join(map(str, config.bucket_edges))} tokens\n"
            f"step       {config.global_batch_tokens:,} tokens = {ranks} ranks x {accumulation} "
            f"micro-batches x {config.micro_batch_tokens:,}\n"
            f"each rank  {held:,} parameters: {held / 2**18:,.1f} MiB in fp32, the same for "
            f"gradients, twice that for AdamW; computes in {config.precision} on {self.device.type}"
        )

    @contextlib.contextmanager
    def trace(self, step: int) -> Iterator[None]:
        """Profile the train step if it is one of --trace_steps, and note its collectives."""
        first, last = self.config.trace_steps or (0, 0)
        if rank() or not first <= step <= last:
            yield
            return
        from torch.profiler import profile

        if self.profiler is None:
            self.profiler, self.collectives = profile(record_shapes=True), CollectiveLog()
            self.profiler.start()
        with self.collectives:
            yield
        if step == last:
            self.profiler.stop()
            trace, table = (self.directory / name for name in ("trace.json", "collectives.md"))
            self.profiler.export_chrome_trace(str(trace))
            heading = f"Collectives of rank 0 in the steps {first} to {last}\n\n"
            table.write_text(f"{heading}{collectives_table(self.collectives.calls)}\n")
            self.say(f"traced the steps {first} to {last}: {trace} (ui.perfetto.dev), {table}")

    def say(self, text: str) -> None:
        """Print on rank 0, above the progress bar if there is one."""
        if self.bar is not None:
            self.bar.write(text)
        elif rank() == 0:
            print(text, flush=True)

    def log(self, step: int, line: dict[str, Any]) -> None:
        """One line of metrics.jsonl, and the same for Weights & Biases; NaN becomes null."""
        line = {"step": step} | {
            k: v if v is None or math.isfinite(v) else None for k, v in line.items()
        }
        if self.metrics is not None:
            try:
                self.metrics.write(json.dumps(line) + "\n")
            except OSError as error:
                raise RunError(f"cannot write {self.metrics.name}: {error}") from error
        if self.wandb is not None:
            self.wandb.log(line)

    def log_step(
        self, step: int, batch: GlobalBatch, loss: float, grad_norm: float, learning_rate: float,
        step_seconds: float, data_seconds: float,
    ) -> None:  # fmt: skip
        """Log an optimizer step, and count it as skipped if loss or norm is not finite.

        Raises:
            RunError: five steps in a row were skipped.
        """
        progress = self.progress
        progress.step, progress.loss, progress.validation_loss = step, None, None
        progress.skipped_in_a_row += 1
        if math.isfinite(loss) and math.isfinite(grad_norm):
            progress.loss, progress.skipped_in_a_row = loss, 0
        else:
            progress.skipped_steps += 1
            self.say(f"step {step} skipped: loss {loss}, gradient norm {grad_norm}")
        progress.tokens += batch.labels
        compiles = self.config.compile and step <= self.first_step + self.config.eval_every
        self.watchdog.expect(step + 1, patience=10 if compiles else 1)
        flops = self.size.flops(batch.tokens, batch.labels, batch.attended)
        peak = self.peak_flops and self.peak_flops * world_size()
        line = {
            "loss": loss,
            "learning_rate": learning_rate,
            "grad_norm": grad_norm,
            "tokens": progress.tokens,
            **batch.fractions,
            "tokens_per_second": batch.labels / step_seconds,
            "step_seconds": step_seconds,
            "data_seconds": data_seconds,
            "mfu": peak and flops / step_seconds / peak,
            "peak_memory_gib": peak_memory(self.device) / 2**30,
            "skipped_steps": progress.skipped_steps,
        }
        self.log(step, line)
        if progress.skipped_in_a_row == 5:
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
        elif step in (self.first_step + 1, self.config.steps) or now - self.spoken > 10:
            pace = (now - self.started) / (step - self.first_step)
            left = pace * (self.config.steps - step)
            self.say(f"step {step}/{self.config.steps}  {state}  {left:,.0f} s left")
            self.spoken = now

    def log_validation(self, step: int, loss: float, batches: Batches) -> None:
        """Log a validation under the training step it belongs to."""
        bits, perplexity = (
            batches.bits_per_byte(loss, self.config.eval_batches),
            math.exp(min(loss, 700)),
        )
        progress = self.progress
        if math.isfinite(loss):
            best = progress.best_validation_loss
            progress.validation_loss = loss
            progress.best_validation_loss = loss if best is None else min(loss, best)
        self.watchdog.expect(step + 1)
        line = {"validation_loss": loss, "validation_perplexity": perplexity}
        said = f"step {step}: validation loss {loss:.4f}"
        if bits is not None:
            line["validation_bits_per_byte"] = bits
            said += f", {bits:.4f} bits per byte"
        self.log(step, line)
        self.say(said)

    def close(self) -> None:
        """Training is over: what follows may take its time."""
        self.watchdog.stop()
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def finish(self, prompt: np.ndarray, next_command: str) -> None:
        """Show what the model writes by now, or how to go on with a run that was stopped."""
        if rank():
            return
        if self.wandb is not None:
            self.wandb.finish()
        step, steps = self.progress.step, self.config.steps
        if self.stopping:
            again = "" if self.config.resume == "auto" else " with --resume auto"
            print(
                f"stopped after step {step} of {steps}, saved in {self.directory}/checkpoints/"
                f"step_{step:08d}; the same command{again} goes on from there"
            )
            return
        self.write_config(finished=step)
        if self.parameters < 2e9:
            sample = write_sample(self.directory / "hf", prompt, self.device)
            print(f"--- the model continues the first tokens of a held-out text:\n{sample}\n---")
        print(f"files: {self.directory}/metrics.jsonl, and {self.directory}/hf for transformers")
        print(f"next:  {next_command}", flush=True)


COLLECTIVES = {  # what the dispatcher calls them
    "allgather_": "all-gather",
    "_allgather_base_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "broadcast_": "broadcast",
}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One call. `bytes` are those of the whole tensor: gathered, or to be reduced."""

    kind: str
    group: str
    ranks: int
    bytes: int

    @property
    def sent(self) -> float:
        """Bytes that each rank sends if the ranks form a ring."""
        if self.kind == "broadcast":
            return self.bytes
        rounds = 2 if self.kind == "all-reduce" else 1
        return rounds * self.bytes * (self.ranks - 1) / self.ranks


class CollectiveLog(TorchDispatchMode):
    """While entered, notes the collectives that this rank issues in `calls`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Collective] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled blocks stay compiled; they hold no collectives

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.distributed.tensor import DTensor

        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does to its shard comes by on its own
        result = func(*args, **kwargs or {})
        if func.namespace in ("c10d", "_c10d_functional") and func._opname in COLLECTIVES:
            self.note(func, args)
        return result

    def note(self, func: Any, arguments: tuple) -> None:
        sides = [
            sum(leaf.nbytes for leaf in tree_leaves(side) if torch.is_tensor(leaf))
            for side in arguments[:2]  # output and input, or one that is both
        ]
        if func.namespace == "c10d":
            boxed = next(each for each in arguments if isinstance(each, torch.ScriptObject))
            group = dist.ProcessGroup.unbox(boxed)
        else:
            group = dist.distributed_c10d._resolve_process_group(arguments[-1])
        name = group.group_desc.removeprefix("mesh_").replace("default_pg", "all")
        kind = COLLECTIVES[func._opname]
        self.calls.append(Collective(kind, name, group.size(), max(sides)))


def collectives_table(calls: list[Collective]) -> str:
    """Markdown: calls, bytes and what each rank sends, by kind and group."""
    rows: dict[tuple, list[Collective]] = {}
    for call in calls:
        rows.setdefault((call.kind, call.group, call.ranks), []).append(call)
    total = sum(call.sent for call in calls) or 1
    lines = [
        "| collective | ranks | calls | tensors | sent by a rank | share |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for (kind, group, ranks), same in rows.items():
        size, sent = sum(call.bytes for call in same), sum(call.sent for call in same)
        lines.append(
            f"| {kind} | {ranks} ({group}) | {len(same)} | {size / 2**20:,.2f} MiB | "
            f"{sent / 2**20:,.2f} MiB | {sent / total:.0%} |"
        )
    return "\n".join(lines)


class Watchdog:
    """Ends a run that stands still, and says at which step and because of which ranks.

    A rank moves as long as steps end or collectives begin. If it did not for `minutes`, all ranks
    leave their position in the store; those that others wait for have begun fewer collectives, or
    do not answer. (A collective's own timeout names no rank, and on GPUs just aborts.) What torch's
    flight recorder holds, the latest collectives of each rank, goes to stalled_rank_N.json.
    """

    def __init__(self, minutes: float, directory: Path, device: torch.device):
        from torch._C import _distributed_c10d
        from torch.distributed.distributed_c10d import (
            _get_default_store,
            _set_pg_timeout,
            _world,
        )

        recorder = "_dump_nccl_trace_json" if device.type == "cuda" else "_dump_fr_trace_json"
        self.recorded = getattr(_distributed_c10d, recorder, None)
        self.directory = directory
        self.minutes, self.step, self.patience, self.marks = minutes, 0, 1, 0
        self.tick = min(1.0, minutes * 6)
        self.store = _get_default_store().clone()  # a connection of its own: the other may block
        patient = {patient_group(purpose) for purpose in PATIENT}
        self.groups = [group for group in _world.pg_map if group not in patient]
        for group in self.groups:  # those of a mesh have torch's default, 10 or 30 minutes
            _set_pg_timeout(datetime.timedelta(minutes=20 * minutes + 1), group)
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def expect(self, step: int, patience: float = 1) -> None:
        """This rank is on its way to the end of `step`; `patience` times longer than usual."""
        self.step, self.patience, self.marks = step, patience, self.marks + 1

    def position(self) -> list[int]:
        collectives = sum(group._get_sequence_number_for_group() for group in self.groups)
        return [self.marks, collectives]

    def watch(self) -> None:
        last, idle = None, 0.0
        while not self.ended.wait(self.tick):
            position = self.position()
            # Counting ticks, not the clock: a suspended laptop is not a stall.
            idle = idle + self.tick if position == last else 0.0
            last = position
            if idle >= 60 * self.minutes * self.patience:
                self.report(position)

    def dump(self) -> None:
        if self.recorded is not None:
            (self.directory / f"stalled_rank_{rank()}.json").write_bytes(self.recorded())

    def report(self, position: list[int]) -> None:
        self.store.set(f"stalled at step {self.step} {rank()}", json.dumps(position))
        threading.Thread(target=self.dump, daemon=True).start()  # the disk may be what hangs
        time.sleep(max(2.0, 3 * self.tick))
        seen = {}
        for other in range(world_size()):
            key = f"stalled at step {self.step} {other}"
            if self.store.check([key]):
                seen[other] = json.loads(self.store.get(key))
        late = [r for r in range(world_size()) if r not in seen]
        late = late or [r for r in seen if seen[r] < max(seen.values())]
        if rank() in late:
            print(f"rank {rank()} is late; it stands here:", file=sys.stderr, flush=True)
            faulthandler.dump_traceback(all_threads=True)
        reports = rank() == min(set(seen) - set(late), default=min(seen))
        if reports:
            who = f"rank {', '.join(map(str, late))} did not arrive" if late else (
                "all ranks began the same collectives, so a link or a GPU hangs"
            )  # fmt: skip
            print(
                f"error: step {self.step} stalled for {self.minutes * self.patience:g} minutes: "
                f"{who}; if steps are this slow, raise --timeout_minutes",
                file=sys.stderr,
                flush=True,
            )
        # The first exit ends the launch, and late ranks may still be writing.
        time.sleep(2 * self.tick if reports else 5)
        os._exit(1)

    def stop(self) -> None:
        self.ended.set()
        self.thread.join()


if __name__ == "__main__":
    launch(command_line)
