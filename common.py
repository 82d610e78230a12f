"""Data and checkpoint helpers of the training scripts, and a run's little plumbing.

Nothing here knows a parallel strategy, an optimizer or a training loop: those are in the scripts.
Data flows one way, and each section below is a stretch of that way:

    corpus -> rows of tokens (cached on disk) -> batch plan (a pure function of lengths and seed)
    -> collate -> micro-batch

A function takes the values that it needs, so each can be copied alone. What reads data takes
`share` and `shares`: which part of the data this rank trains on, of how many. They are rank and
world size for data parallelism; ranks that work on the same rows together have the same share.

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
from concurrent.futures import ThreadPoolExecutor
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
from torch.nn.attention.varlen import varlen_attn
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

Tokenizer = transformers.PreTrainedTokenizerFast
Shape = transformers.PreTrainedConfig  # the architecture of a model
transformers.logging.disable_progress_bar()  # of loading and saving weights
IGNORED = -100  # label of a position without loss: cross entropy's own default


# --- Flags, errors and endings --------------------------------------------------------------------


def flag(default: Any, help: str) -> Any:
    """A field of a script's `Config`: a command-line flag with its default and help text."""
    return field(default=default, metadata={"help": help})


def refuse(message: str, code: int = 2) -> NoReturn:
    """End the program with one line on stderr: code 2 for bad input, 1 for a failure while running.

    `launch` prints the line; without it Python does, and ends with code 1.
    """
    ended = SystemExit(f"error: {' '.join(message.split())}")
    ended.status = code
    raise ended


@contextlib.contextmanager
def refusing(what: str, code: int = 2) -> Iterator[None]:
    """End with one line, as `refuse`, if a library fails at `what`, with its own words for why."""
    try:
        yield
    except (Exception, dcp.CheckpointException) as error:  # DCP's is no Exception
        if "onnection" in str(error) and dist.is_initialized():
            raise  # another rank has failed, and reports it
        # DCP holds what failed by rank; a dataset's error hides the cause behind a general one.
        cause = next(iter(getattr(error, "failures", {}).values()), (error,))[0]
        refuse(f"{what}: {str(cause.__cause__ or cause)[:400] or 'nothing is there'}", code)


def parse_config(config_class: type) -> Any:
    """The command line as the script's `Config`, a pydantic dataclass that knows its limits."""
    parser = transformers.HfArgumentParser(config_class, allow_abbrev=False)
    parser.error = refuse
    try:
        config, rest = parser.parse_args_into_dataclasses(return_remaining_strings=True)
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:  # raised by the Config's own __post_init__
            refuse(str(first["ctx"]["error"]))
        refuse(f"--{first['loc'][0]} {first['input']}: {first['msg']}")
    if rest:
        refuse(f"unknown flag or word {rest[0]}; --help lists the flags, and a glob needs quotes")
    if config.init_from:  # weights bring their architecture and tokenizer
        config.init_from = fetch_weights(config.init_from)
        given = {word[2:].split("=")[0] for word in sys.argv[1:] if word.startswith("--")}
        for name in {"model", "tokenizer"} - given:
            setattr(config, name, config.init_from)
    return config


def launch(main: Callable[[], None]) -> None:
    """Run a script's `main`. An error ends this rank at once, with exit code 1 and a traceback.

    `os._exit` then, as an orderly shutdown with live communication threads can hang or abort.
    """
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    alone |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    os.environ |= alone | os.environ  # without torchrun: one rank
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that cannot print a character
    try:
        end_with_launcher()
        return main()
    except BaseException as error:  # SystemExit and DCP's CheckpointException are no Exception
        # torchrun ends all ranks once one has exited: who knows most must speak first. That is the
        # first rank of a node, if all refuse, and a failed rank before those that lost it. Who
        # still lives five seconds later is alone in knowing of the error.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        refused = isinstance(error, SystemExit)
        if "onnection" in str(error) or refused and os.environ["LOCAL_RANK"] != "0":
            time.sleep(5)
        if not refused:
            traceback.print_exc()
        elif isinstance(error.code, str):
            print(error.code, file=sys.stderr, flush=True)
        code = getattr(error, "status", error.code) if refused else 1
    say("", end="")  # flushed, even if nobody reads any more
    os._exit(code)


def end_with_launcher() -> None:
    """Have the kernel send this rank SIGTERM when its launcher dies (Linux only).

    Else ranks whose torchrun was killed would wait for a store that is gone, or train on unseen.
    The launcher may have died before, while this rank imported torch: it is a Python program, what
    adopts its orphans (init, systemd, slurmstepd) is not.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1: PR_SET_PDEATHSIG
    if b"python" not in Path(f"/proc/{os.getppid()}/cmdline").read_bytes():
        refuse("the launcher of this rank has died", code=1)


def say(text: str, end: str = "\n") -> None:
    """Print at once. A reader who has left (`| head -1`) is no reason to end a run."""
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# --- Tokenizers -----------------------------------------------------------------------------------


def fingerprint(*values: Any) -> str:
    """128 bits of what the values are as JSON: the key of a cache, or whether they changed."""
    return xxhash.xxh3_128_hexdigest(json.dumps(values, sort_keys=True, default=str).encode())


@functools.cache
def tiktoken_encoding(name: str) -> tiktoken.Encoding:
    """A tiktoken encoding; `bytes` is one of the 256 byte values and an end-of-text token."""
    if name == "bytes":
        ranks = {bytes([value]): value for value in range(256)}
        more = {"pat_str": r"[\s\S]", "special_tokens": {"<|endoftext|>": 256}}
        return tiktoken.Encoding(name, mergeable_ranks=ranks, **more)
    with refusing(f"--tokenizer {name} (without network, TIKTOKEN_CACHE_DIR must hold its files)"):
        return tiktoken.get_encoding(name)


def to_transformers(encoding: tiktoken.Encoding) -> Tokenizer:
    """The `transformers` tokenizer that gives the same ids."""
    ranks = encoding._mergeable_ranks
    names = {index: name for name, index in encoding._special_tokens.items()}
    # Added tokens get consecutive ids, so the gaps (cl100k_base has some) need names too.
    added = [names.get(i, f"<|unused_{i}|>") for i in range(len(ranks), encoding.n_vocab)]
    # a{1,3}+ is a possessive repetition in tiktoken's regexes, a repeated one in the others.
    pattern = re.sub(r"(\\p\{N\}\{\d+,\d+\})\+", r"(?>\1)", encoding._pat_str)
    with tempfile.NamedTemporaryFile(suffix=".tiktoken") as file:
        file.writelines(base64.b64encode(b) + b" %d\n" % ranks[b] for b in ranks)
        file.flush()
        converted = TikTokenConverter(file.name, pattern, extra_special_tokens=added).converted()
    return Tokenizer(
        tokenizer_object=converted, eos_token=names[encoding.eot_token],
        name_or_path=encoding.name, clean_up_tokenization_spaces=False,
        split_special_tokens=True,  # as in training: spelled-out special tokens are text
    )  # fmt: skip


@functools.cache
def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of `--tokenizer`: bytes, a tiktoken encoding, or a directory or hub id."""
    if name == "bytes" or name in tiktoken.list_encoding_names():
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
    name, backend = tokenizer.name_or_path, tokenizer.backend_tokenizer
    if name == "bytes":
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint32)
    if name in tiktoken.list_encoding_names():  # four times as fast as its conversion
        return tiktoken_encoding(name).encode_to_numpy(text, disallowed_special=())
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
    return [str(f) for f in files if not skipped.intersection(f.relative_to(root).parts)]


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


def docstring_conversations(files: list[str], version: str) -> Iterator[dict[str, Any]]:
    """A conversation for each documented function: write its docstring, with a thought before."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for tree, _ in read_python(files) for node in ast.walk(tree))
    for node in (node for node in nodes if isinstance(node, functions) and len(node.body) > 1):
        if docstring := ast.get_docstring(node):
            del node.body[0]
            arguments = ", ".join(argument.arg for argument in node.args.args) or "none"
            thought = f"<|begin_of_thought|>\narguments: {arguments}\n<|end_of_thought|>\n\n"
            answer = f"{thought}<|begin_of_solution|>\n{docstring}\n<|end_of_solution|>"
            question = f"Write the docstring of:\n\n{ast.unparse(node)}"
            system = "You write docstrings. Think first, then answer."
            yield {"system": system, "prompt": question, "completion": answer}


EMBEDDED = {"stdlib": standard_library_documents, "stdlib-docstrings": docstring_conversations}


def open_dataset(name: str, configuration: str | None, split: str) -> datasets.Dataset:
    """What `--dataset` names: an embedded corpus, a file, glob or URL, or a hub id."""
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # the error line says what matters
    if os.environ.get("LOCAL_RANK", "0") != "0" or not sys.stderr.isatty():
        datasets.disable_progress_bars()
    if name in EMBEDDED:
        arguments = {"files": standard_library_files(), "version": sys.version}
        return datasets.Dataset.from_generator(EMBEDDED[name], gen_kwargs=arguments)
    # The last known suffix counts: a.txt.jsonl.gz is JSON.
    reader = next((READERS[end] for end in reversed(Path(name).suffixes) if end in READERS), None)
    files = glob.escape(name) if Path(name).is_file() else name  # a file's name may hold [1]
    if reader:
        return datasets.load_dataset(reader, data_files=files, split=split)
    return datasets.load_dataset(name, configuration, split=split)


ROLES = {"human": "user", "gpt": "assistant"}  # as in ShareGPT's columns
# What a message or a row may hold beside its text, and what no template here would bring out.
BEYOND_TEXT = """tool_calls function_call tools functions images image audio audios videos video
    reasoning reasoning_content thinking thought""".split()


CONVERSATIONS = ["messages", "conversations", "prompt", "completion", "system", *BEYOND_TEXT]


def read_conversation(row: dict[str, Any]) -> tuple[list[dict[str, str]], int]:
    """Messages (role, content) of a row in any of the known forms, and how many answers to learn.

    Of `messages` or `conversations` every answer is learned, of `prompt` and `completion` those in
    the completion.

    Raises:
        ValueError: why the row is left out.
    """
    if any(row.get(name) for name in BEYOND_TEXT):
        raise ValueError("hold tools, thoughts or media beside the text")
    turns = row.get("messages") or row.get("conversations")
    answered = [turns] if isinstance(turns, str) else turns or row.get("completion")
    parts = {"system": row.get("system"), "user": row.get("prompt"), "assistant": answered}
    messages, part = [], []
    for role, value in parts.items():
        value = [{"role": role, "content": value}] if isinstance(value, str) else value
        part = [read_message(m) for m in value] if isinstance(value, list) else []
        messages += part
    answers = sum(message["role"] == "assistant" for message in part)
    if not answers:
        raise ValueError("hold no answer")
    return messages, answers


def read_message(message: dict[str, Any]) -> dict[str, str]:
    """Role and content of a message; ValueError if it is no message, or more than text."""
    if not isinstance(message, dict):
        raise ValueError("hold no messages")
    role, content = message.get("role") or message.get("from"), message.get("content")
    content = message.get("value") if content is None else content
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        if all(part.get("type") == "text" for part in content):
            content = "".join(str(part.get("text")) for part in content)
    if any(message.get(name) for name in BEYOND_TEXT) or message.get("weight") == 0:
        raise ValueError("hold tools, thoughts or media beside the text")
    if not isinstance(role, str) or not isinstance(content, str):
        raise ValueError("hold messages without role or text")
    return {"role": ROLES.get(role, role), "content": content}


# --- Rows: tokens on disk -------------------------------------------------------------------------


COLUMNS = {"labels": "int32", "digest": "int64", "bytes": "float32", "note": "string"}
COLUMNS = {name: datasets.Value(kind) for name, kind in COLUMNS.items()}
COLUMNS["tokens"] = datasets.List(datasets.Value("uint32"))
COLUMNS["learned"] = datasets.List(datasets.Value("bool"))


class Rows:
    """Rows of tokens, memory-mapped from Arrow files; one array entry or list a row.

    A row of n + 1 `tokens` reads the first n and predicts the last n, so n is its length, int64.
    `learned` says of each token whether predicting it counts: always in text, in conversations if
    the assistant wrote it. `labels` is the number of predictions that count, `digest` a hash of the
    document that the row is of, `bytes` the row's share of that text's bytes. `note` says why a row
    is cut, or was left out and has no tokens.
    """

    def __init__(self, table: Any):
        self.tokens, self.learned = table["tokens"], table["learned"]
        notes = table["note"].value_counts().to_pylist()
        self.notes = {note["values"]: note["counts"] for note in notes}
        self.lengths = pc.list_value_length(self.tokens).to_numpy().astype(np.int64) - 1
        numbers = (table[name].to_numpy() for name in ("labels", "digest", "bytes"))
        self.labels, self.digest, self.bytes = numbers

    def read(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and learned, [length + 1]: views of the mapped file."""
        parts = (self.tokens[row], self.learned[row])
        return tuple(part.values.to_numpy(zero_copy_only=False) for part in parts)

    def split(self) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of the rows for training and for validation, of those that have labels.

        Validation gets the 2 % of the documents with the smallest hashes (1 to 5,000). So the split
        is the same in every run, and equal documents and pieces of one land on the same side.
        """
        usable = np.flatnonzero(self.labels)
        documents = np.unique(self.digest[usable])
        if len(documents) < 2:
            notes = ", ".join(f"{number} are {note}" for note, number in self.notes.items() if note)
            refuse(f"--dataset: fewer than two documents hold anything to learn; {notes}")
        held_out = documents[min(max(1, len(documents) // 50), 5000) - 1]
        validation = self.digest[usable] <= held_out
        return usable[~validation], usable[validation]


def prepare_in_turn() -> filelock.FileLock:
    """A lock for the work that each rank starts before it joins the process group.

    The first rank of a node does the work, the others wait and find its cache. So nothing slow
    happens while ranks wait for each other in a collective, whose time is limited.
    """
    folder = Path(datasets.config.HF_DATASETS_CACHE)
    folder.mkdir(parents=True, exist_ok=True)
    return filelock.FileLock(folder / "prepare.lock")


def load_rows(
    dataset: str, configuration: str | None, split: str, columns: list[str], function: Callable,
    tokenizer: Tokenizer, max_length: int,
) -> Rows:  # fmt: skip
    """Map `--dataset` to rows of at most `max_length`, in several processes, once for all runs.

    Args:
        columns: those to read, as far as they are there; one of the first four has to be.
        function: module-level, as `text_rows`: yields the rows of one document.
    """
    with prepare_in_turn(), refusing(f"--dataset {dataset} cannot be read"):
        corpus = open_dataset(dataset, configuration, split)
        there = corpus.column_names
        if not set(columns[:4]) & set(there):
            refuse(f"--dataset {dataset} has no column {' or '.join(columns[:4])}, only {there}")
        # The key of the cache. Hashing the function would give a new one where it cannot be hashed.
        key = [corpus._fingerprint, inspect.getsource(function), columns, max_length]
        key += [tokenizer.special_tokens_map, tokenizer.chat_template]
        corpus = corpus.select_columns([column for column in columns if column in there])
        processes = min(os.cpu_count(), len(corpus) // 1000)
        mapped = corpus.map(
            make_rows, batched=True, remove_columns=corpus.column_names,
            features=datasets.Features(COLUMNS),
            fn_kwargs={"function": function, "tokenizer": tokenizer, "max_length": max_length},
            new_fingerprint=fingerprint(*key, tokenizer.backend_tokenizer.to_str()),
            num_proc=processes if processes > 1 else None,
        )  # fmt: skip
    return Rows(mapped.data.table)


def make_rows(batch: dict, function: Callable, tokenizer: Tokenizer, max_length: int) -> dict:
    """The rows of a batch of documents, lists for COLUMNS; a document may be left out, with why."""
    rows: list[tuple] = []
    for values in zip(*batch.values()):
        digest = int(fingerprint(*values)[:16], 16) >> 1  # 63 bits
        try:
            made = [*function(dict(zip(batch, values)), tokenizer, max_length)]
        except (ValueError, jinja2.TemplateError) as problem:
            nothing = np.zeros(0, np.uint32), np.zeros(0, bool)
            made = [(*nothing, 0.0, f"left out, as they {problem}")]
        for tokens, learned, size, note in made:
            rows.append((int(learned[1:].sum()), digest, size, note, tokens, learned))
    return dict(zip(COLUMNS, map(list, zip(*rows))))


def text_rows(document: dict[str, str], tokenizer: Tokenizer, max_length: int) -> Iterator[tuple]:
    """A text and its end-of-text token as rows (tokens, learned, bytes, note) of max_length each.

    A cut loses no prediction: the last token of a row is predicted there and read in the next one.
    """
    [text] = document.values()
    if not isinstance(text, str) or not text:
        raise ValueError("hold no text")
    ids = np.append(encode_text(text, tokenizer), np.uint32(tokenizer.eos_token_id))
    for start in range(0, len(ids) - 1, max_length):
        tokens = ids[start : start + max_length + 1]
        share = (len(tokens) - 1) / (len(ids) - 1)
        yield tokens, np.ones(len(tokens), bool), len(text.encode()) * share, ""


# --- Batch plan: which rows form micro-batch k of an epoch ----------------------------------------


def windows(length: np.ndarray, budget: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Shuffled rows in windows of about 256 micro-batches, each sorted: the longest row first.

    Neighbours are alike in length then, and which rows are neighbours changes from epoch to epoch.
    """
    order = rng.permutation(len(length))
    shortness = (length.max() - length).astype(np.min_scalar_type(length.max()))
    window = math.ceil(256 * budget / length.mean())  # rows
    for begin in range(0, len(order), window):
        inside = order[begin : begin + window]
        yield inside[np.argsort(shortness[inside], kind="stable")]  # a radix sort up to 16 bits


def bucket(rows: np.ndarray, length: np.ndarray, budget: int) -> Iterator[np.ndarray]:
    """Cut sorted rows into micro-batches: rows x longest row <= budget, in token positions."""
    start = 0
    while start < len(rows):  # the first row is the longest, and tells how many fit
        stop = start + budget // int(length[rows[start]])
        yield rows[start:stop]
        start = stop


def pack(rows: np.ndarray, length: np.ndarray, budget: int) -> Iterator[np.ndarray]:
    """Best-fit-decreasing packing (arXiv 2404.10830) of sorted rows, whole documents, into one row.

    The longest first, each into the fullest micro-batch that still takes it.
    """
    packed: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # free positions of a micro-batch and its number, sorted
    for row, size in zip(rows.tolist(), length[rows].tolist()):
        fullest = bisect.bisect_left(spaces, (size, 0))
        if fullest == len(spaces):
            spaces.append((budget, len(packed)))
            packed.append([])
        space, number = spaces.pop(fullest)
        packed[number].append(row)
        bisect.insort(spaces, (space - size, number))
    yield from map(np.array, packed)


def plan_epoch(
    length: np.ndarray, batching: str, budget: int, multiple: int, seed: int, epoch: int
) -> list[np.ndarray]:
    """The micro-batches of an epoch: for each the indices into `length` of its rows.

    Micro-batches of all lengths are shuffled together: one length after the other would be an
    accidental curriculum.

    Args:
        length: int64 [rows], each at most `budget`, the token positions of a micro-batch.
        batching: `bucketed` (`bucket`; rows are padded to a multiple of `multiple`) or `packed`.
    """
    rng, fill = np.random.default_rng([seed, epoch]), pack if batching == "packed" else bucket
    width = length if batching == "packed" else -(-length // multiple) * multiple
    plan: list[np.ndarray] = []
    for rows in windows(width, budget, rng):
        plan += fill(rows, width, budget)
    return [plan[i] for i in rng.permutation(len(plan))]


# --- Batches: plan -> tensors ---------------------------------------------------------------------


@dataclass
class GlobalBatch:
    """What one optimizer step trains on: this rank's micro-batches, the numbers of all ranks.

    Each micro-batch is a dict of model arguments. The loss is divided by `labels`; `tokens` are
    read, `attended` is the sum of their rows' squared lengths, for the FLOPs of attention.
    """

    micro_batches: list[dict[str, Any]]
    labels: int
    tokens: int
    attended: int
    padding_fraction: float


class Batches:
    """The endless stream of micro-batches of some rows: epoch after epoch, each a plan of its own.

    Step s takes the micro-batches s * G to (s + 1) * G - 1 of the stream, G = global / micro batch
    tokens: the step number is the position in the data, and what a step holds does not depend on
    how many ranks share it.

    Args:
        chosen: numbers of the rows, as `Rows.split` returns them.
        padding: token id of padding, for the shape only: it has no label and no token sees it.
    """

    def __init__(
        self, rows: Rows, batching: str, max_length: int, micro_batch_tokens: int,
        pad_to_multiple_of: int, padding: int, seed: int, chosen: np.ndarray,
    ):  # fmt: skip
        self.rows, self.chosen, self.max_length, self.padding = rows, chosen, max_length, padding
        self.micro_batch_tokens, self.multiple = micro_batch_tokens, pad_to_multiple_of
        self.packed, self.ends = batching == "packed", [0]  # of the epochs so far, in micro-batches
        settings = batching, micro_batch_tokens, pad_to_multiple_of, seed
        plan = functools.partial(plan_epoch, rows.lengths[chosen], *settings)
        self.plan = functools.lru_cache(maxsize=2)(plan)
        self.most_rows = max(map(len, self.plan(0)))

    def micro_batch(self, number: int) -> np.ndarray:
        """The rows of micro-batch `number` of the stream."""
        while number >= self.ends[-1]:
            self.ends.append(self.ends[-1] + len(self.plan(len(self.ends) - 1)))
        epoch = bisect.bisect(self.ends, number) - 1
        return self.chosen[self.plan(epoch)[number - self.ends[epoch]]]

    def shape(self, rows: np.ndarray) -> tuple[int, int]:
        """Rows and row length of a micro-batch, padding included."""
        if self.packed:
            return 1, self.micro_batch_tokens
        width = math.ceil(self.rows.lengths[rows].max() / self.multiple) * self.multiple
        # With few widths, for compiled blocks, each has one shape: empty rows fill the last
        # micro-batch of a window.
        return len(rows) if self.multiple == 1 else self.micro_batch_tokens // width, width

    def collate(self, rows: np.ndarray) -> dict[str, Any]:
        """Model arguments: `input_ids` and `labels`, int64 [rows, length], padded on the right.

        Labels are shifted already: labels[r, i] is the token after input_ids[r, i]. Right padding
        needs no attention mask, for no real token sees what comes after it. A packed row also has
        `position_ids` and its document boundaries, as transformers' flash attention takes them.
        """
        height, width = self.shape(rows)
        inputs, labels = np.full((height, width), self.padding), np.full((height, width), IGNORED)
        column, boundaries = 0, [0]
        for number, row in enumerate(rows.tolist()):
            tokens, learned = self.rows.read(row)
            place = (0 if self.packed else number, slice(column, column + len(tokens) - 1))
            inputs[place] = tokens[:-1]
            labels[place] = np.where(learned[1:], tokens[1:].astype(np.int64), IGNORED)
            if self.packed:
                column += len(tokens) - 1
                boundaries.append(column)
        arguments = {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}
        if self.packed:
            # The padding makes documents of its own, and empty ones fill up the boundaries: the
            # same number for every row, so that compiled blocks see one shape.
            boundaries += [*range(column + self.max_length, width, self.max_length), width]
            number = self.most_rows + 2 + width // self.max_length
            boundaries += [width] * (number - len(boundaries))
            starts = np.repeat(boundaries[:-1], np.diff(boundaries))
            limits = torch.tensor(boundaries, dtype=torch.int32)
            arguments["position_ids"] = torch.from_numpy(np.arange(width) - starts)[None]
            arguments |= {"cu_seq_lens_q": limits, "cu_seq_lens_k": limits}
            arguments |= {"max_length_q": self.max_length, "max_length_k": self.max_length}
        return arguments

    def global_batch(self, step: int, number: int, share: int, shares: int) -> GlobalBatch:
        """Step `step`, from 0, of `number` micro-batches; every shares-th is this rank's."""
        chosen = [self.micro_batch(k) for k in range(step * number, (step + 1) * number)]
        length = self.rows.lengths[np.concatenate(chosen)]
        positions = sum(math.prod(self.shape(rows)) for rows in chosen)
        return GlobalBatch(
            [self.collate(rows) for rows in chosen[share::shares]],
            labels=int(self.rows.labels[np.concatenate(chosen)].sum()), tokens=int(length.sum()),
            attended=int((length**2).sum()), padding_fraction=1 - int(length.sum()) / positions,
        )  # fmt: skip

    def stream(
        self, first: int, last: int, number: int, share: int, shares: int
    ) -> Iterator[GlobalBatch]:
        """The global batches of the steps [first, last); a thread makes the next one meanwhile."""
        with ThreadPoolExecutor(1) as thread:
            made = thread.submit(self.global_batch, first, number, share, shares)
            for step in range(first, last):
                batch = made.result()
                made = thread.submit(self.global_batch, step + 1, number, share, shares)
                yield batch

    def evaluation(self, number: int, share: int, shares: int) -> Iterator[dict[str, Any]]:
        """This rank's part of the first `number` micro-batches of the stream (one epoch at most).

        All ranks get equally many, since a forward pass is a collective under FSDP: where they do
        not divide, a rank repeats the last one without labels.
        """
        number = min(number, len(self.plan(0)))
        for k in range(share, math.ceil(number / shares) * shares, shares):
            batch = self.collate(self.micro_batch(min(k, number - 1)))
            if k >= number:
                batch["labels"] = torch.full_like(batch["labels"], IGNORED)
            yield batch

    def bits_per_byte(self, loss: float, number: int) -> float | None:
        """Nats per label over `evaluation(number)` -> bits per byte of the text behind it."""
        number = min(number, len(self.plan(0)))
        rows = np.concatenate([self.micro_batch(k) for k in range(number)])
        nbytes = self.rows.bytes[rows].sum(dtype=np.float64)
        return loss / math.log(2) * self.rows.labels[rows].sum() / nbytes if nbytes else None

    def prompt(self) -> np.ndarray:
        """The first tokens of some row, or those up to the assistant's turn, to be continued."""
        tokens, learned = self.rows.read(int(self.chosen[0]))
        first = int(learned[1:].argmax())  # 0 in text
        return tokens[: first + 1 if first else 64]


def to_device(micro_batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """A copy whose tensors are on the device."""
    return {k: v.to(device) if torch.is_tensor(v) else v for k, v in micro_batch.items()}


# --- Attention within documents -------------------------------------------------------------------


def document_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: None, cu_seq_lens_q: torch.Tensor | None = None, max_length_q: int = 0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Causal attention that stays within each document, without a mask: for `AttentionInterface`.

    Args:
        query: [rows, heads, length, head size]; key and value may have fewer heads.
        cu_seq_lens_q: int32 [documents + 1], the boundaries in a packed row; None if every row is
            one document, padded on the right.
        max_length_q: length of the longest document of a packed row.

    Returns:
        [rows, length, heads, head size] and None, as transformers wants it.
    """
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(module, query, key, value, None, **kwargs)
    if torch.is_autocast_enabled(query.device.type):  # rotary embedding returns fp32 under it
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    groups, scale = query.shape[1] // key.shape[1], kwargs.get("scaling")
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    if query.is_cuda and query.dtype != torch.float32:  # what the variable-length kernel takes
        flat = [x[0].transpose(0, 1) for x in (query, key, value)]  # [tokens, heads, head size]
        limits = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
        return varlen_attn(*flat, *limits, scale=scale, window_size=(-1, 0))[None], None
    return attention_document_by_document(query, key, value, cu_seq_lens_q, scale), None


@torch.compiler.disable  # every row has other lengths
def attention_document_by_document(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, limits: torch.Tensor, scale: float
) -> torch.Tensor:
    """Without a variable-length kernel, faster than one attention with a block-diagonal mask."""
    lengths = limits.diff().tolist()
    attend = torch.nn.functional.scaled_dot_product_attention
    documents = zip(*(x.split(lengths, dim=2) for x in (query, key, value)))
    attend = functools.partial(attend, is_causal=True, scale=scale)
    outputs = [attend(*document) for document in documents if document[0].shape[2]]
    return torch.cat(outputs, dim=2).transpose(1, 2)


# --- Architecture and weights in Hugging Face form ------------------------------------------------

UNKNOWN_SETTINGS = """final_logit_softcapping attn_logit_softcapping logit_scale logits_scaling
    output_router_logits""".split()  # the loss of these scripts has none of them


def read_architecture(name: str, vocabulary: int, max_length: int) -> Shape:
    """The config.json that `--model` names (code from the hub is never run).

    Refuses a model that would not train on this data as it is meant to.
    """
    with refusing(f"model {name} is neither tiny, qwen2-0.5b nor has a config.json to go by"):
        shape = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(shape), None)
    odd = set(getattr(shape, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if not getattr(kind, "_supports_attention_backend", False) or odd:
        refuse(f"--model {name}: its attention cannot be kept within documents")
    for setting in UNKNOWN_SETTINGS:
        if getattr(shape, setting, None) not in (None, 1, False):
            refuse(f"--model {name}: its {setting} is not supported")
    if vocabulary > shape.vocab_size:
        refuse(f"--tokenizer has {vocabulary} ids, --model {name} only {shape.vocab_size}")
    # The second is LongRoPE's: past it, a token's rotation depends on its neighbours in the row.
    limits = ["max_position_embeddings", "original_max_position_embeddings"]
    limits += ["attention_chunk_size", "sliding_window"]
    if exceeded := [x for x in limits if max_length > (getattr(shape, x, None) or math.inf)]:
        refuse(f"--max_length {max_length} exceeds {exceeded[0]} of --model {name}")
    return shape


def fetch_weights(name: str) -> str:
    """The directory of `--init_from`: itself, the hf/ of a run, or what a hub id has downloaded."""
    directory = Path(name, "hf") if Path(name, "hf").is_dir() else Path(name)
    if not directory.is_dir():
        files = ["*.json", "*.safetensors"]
        with prepare_in_turn(), refusing(f"--init_from {name} is neither here nor on the hub"):
            directory = Path(huggingface_hub.snapshot_download(name, allow_patterns=files))
    if not (directory / "config.json").exists() or not [*directory.glob("*.safetensors")]:
        refuse(f"--init_from {name}: no config.json and *.safetensors in it, nor in its hf/")
    return str(directory)


def load_weights(model: torch.nn.Module, directory: str) -> None:
    """Fill whole or sharded parameters from the safetensors files of a Hugging Face directory.

    Every rank reads just the slices that it keeps, cast on the way: none holds a second copy.
    """
    state, inner = get_model_state_dict(model), getattr(model, "module", model)
    tied = inner._tied_weights_keys if inner.config.tie_word_embeddings else {}  # head: embedding
    wanted = {name: tensor for name, tensor in state.items() if name not in tied}
    reader = HuggingFaceStorageReader(directory)
    if more := reader.read_metadata().state_dict_metadata.keys() - state.keys():
        refuse(f"--init_from {directory}: its files also hold {min(more)} ({len(more)} too many)")
    with refusing(f"--init_from {directory}"):  # names what is missing or of another shape
        dcp.load(wanted, storage_reader=reader)
    set_model_state_dict(model, wanted | {head: wanted[own] for head, own in tied.items()})


def grow_vocabulary(directory: str, known: int, vocabulary: int) -> str:
    """The same model with new embeddings for the ids from `known` to `vocabulary`.

    One rank of a node makes it, in Hugging Face form beside the cached data; all read it then. New
    rows are drawn from a normal distribution with the mean and covariance of the known ones: a new
    token starts as likely as some other one, where zeros or fresh noise would shift the whole
    softmax (Hewitt 2021, Initializing New Word Embeddings for Pretrained Language Models;
    transformers scales the covariance by 1e-9, which leaves all new rows alike).
    """
    if vocabulary == known:
        return directory
    stamps = [file.stat().st_mtime_ns for file in sorted(Path(directory).glob("*.safetensors"))]
    key = fingerprint(str(Path(directory).resolve()), stamps, known, vocabulary)
    grown = Path(datasets.config.HF_DATASETS_CACHE) / f"grown-{key}"
    chance = torch.Generator().manual_seed(0)
    with prepare_in_turn():
        if grown.exists():
            return str(grown)
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        if known > model.config.vocab_size:
            refuse(f"--tokenizer has {known} ids, {directory} only {model.config.vocab_size}")
        rows = max(model.config.vocab_size, math.ceil(vocabulary / 64) * 64)
        model.resize_token_embeddings(rows, mean_resizing=False)
        for embeddings in (model.get_input_embeddings(), model.get_output_embeddings()):
            weight = embeddings.weight.data  # [rows, width]; one and the same where they are tied
            mean, noise = weight[:known].mean(0), torch.randn(rows - known, known, generator=chance)
            weight[known:] = mean + noise @ (weight[:known] - mean) / known**0.5
        temporary = grown.with_suffix(".tmp")
        model.save_pretrained(temporary)
        temporary.rename(grown)
    return str(grown)


def export(checkpoint: Path, directory: Path) -> None:
    """Any checkpoint -> what AutoModelForCausalLM and AutoTokenizer load, in one process on a CPU.

    The directory is complete, or not there at all.
    """
    with torch.device("meta"):
        shape = transformers.AutoConfig.from_pretrained(checkpoint / "hf")
        model = transformers.AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
    model.to_empty(device="cpu").tie_weights()
    state = model.state_dict()
    warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)")
    if (checkpoint / "model").is_dir():
        dcp.load(state, checkpoint_id=checkpoint / "model", no_dist=True)
    else:
        dcp.load({"app": {"model": state}}, checkpoint_id=checkpoint, no_dist=True)
    temporary = directory.with_name(directory.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(checkpoint / "hf", temporary)
    model.save_pretrained(temporary)
    shutil.rmtree(directory, ignore_errors=True)
    temporary.rename(directory)


# --- Checkpoints: directories that are complete or absent -----------------------------------------

# Flags that a resumed run shares with its checkpoint: those of the batch plan, and of what else it
# trains on, if that differs.
PLAN = "max_length pad_to_multiple_of batching micro_batch_tokens global_batch_tokens seed".split()
CONTENTS = ["model", "tokenizer", "dataset", "dataset_config", "dataset_split", "text_column"]
STEP = re.compile(r"step_\d{8}")


def read_description(path: Path) -> dict[str, Any]:
    """A checkpoint's checkpoint.json; ValueError says what is wrong with it."""
    try:
        description = json.loads((path / "checkpoint.json").read_text())
        sound = description.pop("sum_of_this_file") == fingerprint(description)
        sound &= path.name == step_name(description) or not STEP.fullmatch(path.name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        sound = False
    if not sound:
        raise ValueError("checkpoint.json is missing, damaged or of another step")
    return description


def step_name(description: dict[str, Any]) -> str:
    return f"step_{description['progress']['step']:08d}"


def sum_of(file: Path) -> str:
    """A file's xxh3 checksum: torch, DCP and safetensors would load flipped bytes in silence."""
    return xxhash.xxh3_128_hexdigest(np.memmap(file, np.uint8, "r"))


def damage(path: Path, rank: int = 0, ranks: int = 1) -> str | None:
    """What is wrong with a checkpoint, or None; a collective, as ranks share the reading."""
    problems: list[str | None] = [None] * ranks
    try:
        sums = read_description(path)["sums"]
        for name in sorted(sums)[rank::ranks]:
            if not (path / name).is_file() or sum_of(path / name) != sums[name]:
                raise ValueError(f"{name} is missing or damaged")
    except ValueError as error:
        problems[rank] = str(error)
    if ranks > 1:
        dist.all_gather_object(problems, problems[rank])
    return next((problem for problem in problems if problem), None)


class Checkpoints:
    """The checkpoints of a run directory, which holds one line of training and nothing else.

    The `keep` newest stay, and the best by validation loss. `group` is one of all ranks, for the
    thread that writes: its collectives must not mix with those of training.
    """

    def __init__(self, run: "Run", shape: Shape, tokenizer: Tokenizer, rows: Rows, keep: int):
        self.run, self.rank, self.ranks, self.keep = run, run.rank, run.ranks, keep
        self.directory, self.shape, self.tokenizer = run.directory / "checkpoints", shape, tokenizer
        shape.eos_token_id = tokenizer.eos_token_id  # where generation stops
        shape.bos_token_id = shape.pad_token_id = None  # transformers freezes a pad's embedding
        model = {k: v for k, v in shape.to_dict().items() if k != "_name_or_path"}
        spelling = tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template
        self.contents = fingerprint(model, spelling, xxhash.xxh3_128_hexdigest(rows.digest))
        self.group = dist.new_group(backend="gloo", timeout=run.timeout)
        self.thread, self.last, self.damaged = ThreadPoolExecutor(1), None, set()
        self.pending = self.thread.submit(int)  # nothing yet

    def all(self) -> list[Path]:
        """Those not known as damaged, newest first: names of eight digits sort as numbers do."""
        found = {path for path in self.directory.glob("step_*") if STEP.fullmatch(path.name)}
        return sorted(found - self.damaged, reverse=True)

    def find(self, resume: str) -> tuple[Path | None, dict[str, Any]]:
        """Where the run goes on from, as `--resume` says, and its progress; None to begin.

        What would write over a part of the directory's line of training is refused, and the disk
        stays as it is.
        """
        self.last = self.choose(resume)
        if self.last is None:
            return None, {"step": 0, "tokens": 0}
        self.run.say(f"going on from {self.last}")
        return self.last, self.same(self.last)["progress"]

    def choose(self, resume: str) -> Path | None:
        """The newest undamaged one of the run, the one that `resume` names, or none."""
        own, elsewhere = self.all(), "to begin anew take another --run_dir"
        if own and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0:
            resume = "auto"  # a restart by torchrun goes on, whatever the run began from
        if resume == "never" and own:
            refuse(f"--resume never: --run_dir {self.run.directory} holds checkpoints; {elsewhere}")
        candidates = {"auto": own, "never": []}.get(resume, [Path(resume)])
        for path in candidates:
            problem = damage(path, self.rank, self.ranks)
            if problem is None:
                if resume != "auto" and own and own[0].name > step_name(read_description(path)):
                    refuse(f"--resume {resume}: {own[0]} is later; {elsewhere}")
                return path
            self.damaged.add(path)
            self.run.say(f"{path} is damaged or no checkpoint: {problem}")
        if candidates:
            refuse(f"--resume {resume}: no undamaged checkpoint to go on from; {elsewhere}")
        return None

    def same(self, path: Path) -> dict[str, Any]:
        """A checkpoint's description; refuses one of another model, data or batch plan."""
        description, now = read_description(path), self.run.flags
        before, other = description["flags"], description["contents"] != self.contents
        changed = [
            f"--{name} {before.get(name)} (now {now.get(name)})"
            for name in PLAN + CONTENTS * other
            if before.get(name) != now.get(name)
        ]
        if changed or other:
            difference = ", ".join(changed) or "another content of the same paths"
            way = "resume with that, or take the weights alone: --init_from and another --run_dir"
            refuse(f"checkpoint {path} was written with {difference}; {way}")
        return description

    def write(self, save: Callable, progress: dict[str, Any], background: bool) -> None:
        """Write what `save()` returns a writer of: this moment's state. One at a time.

        What went wrong with one in the background is raised here, or by `wait`.
        """
        self.wait()
        self.pending = self.thread.submit(self.write_now, save(), dict(progress))
        if not background:
            self.wait()

    def wait(self) -> None:
        self.pending.result()

    def write_now(self, writer: Callable[[Path], None], progress: dict[str, Any]) -> None:
        """Write under a temporary name; once all ranks have, rename. A collective."""
        self.last = self.directory / f"step_{progress['step']:08d}"
        intact = next(map(str, self.all()), "no checkpoint")
        with refusing(f"cannot write {self.last} ({intact} is intact)", code=1):
            temporary = self.last.with_suffix(".tmp")
            if self.rank == 0:
                self.shape.save_pretrained(temporary / "hf")
                self.tokenizer.save_pretrained(temporary / "hf")
            writer(temporary)
            self.complete(temporary, progress)

    def complete(self, temporary: Path, progress: dict[str, Any]) -> None:
        """Give a checkpoint that all ranks have written its name; then remove old ones.

        A collective. Each rank sums the files that DCP had it write; once all of it is on
        the disk, rank 0 renames: a checkpoint is complete or absent, even if the power goes.
        """
        mine, parts = {}, [None] * self.ranks
        for file in (file for file in temporary.rglob("*") if file.is_file()):
            writer = re.match(r"__(\d+)_", file.name)  # of DCP's files; the others are rank 0's
            if int(writer[1] if writer else 0) == self.rank:
                mine[str(file.relative_to(temporary))] = sum_of(file)
        dist.all_gather_object(parts, mine, group=self.group)
        if self.rank:
            return
        sums = {name: value for part in parts for name, value in part.items()}
        description = {"progress": {"validation_loss": None} | progress, "contents": self.contents}
        description |= self.run.facts | {"sums": sums}
        description["sum_of_this_file"] = fingerprint(description)
        (temporary / "checkpoint.json").write_text(json.dumps(description, indent=2) + "\n")
        os.sync()  # directories too: DCP has synced its files alone
        shutil.rmtree(self.last, ignore_errors=True)  # a damaged one, passed over at the start
        temporary.rename(self.last)
        self.damaged.discard(self.last)
        os.sync()
        self.remove_old()

    def remove_old(self) -> None:
        losses = {}
        for path in self.all():
            try:
                losses[path] = read_description(path)["progress"]["validation_loss"]
            except ValueError as problem:
                say(f"{path} is left alone: {problem}")
        known = [p for p in losses if losses[p] is not None and math.isfinite(losses[p])]
        best = min(known, key=losses.get, default=None)
        for path in [*losses][self.keep :]:
            if path != best:
                path.rename(path.with_suffix(".tmp"))  # gone at once, whatever happens now
                shutil.rmtree(path.with_suffix(".tmp"))


# --- A run: its directory, metrics and progress ---------------------------------------------------

# Dense bf16 FLOP/s from the makers' data sheets (where "with sparsity" stands for twice as much).
PEAK_FLOPS = {"B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12}
PEAK_FLOPS |= {"A100": 312e12, "L40S": 362e12, "A10G": 70e12, "RTX 4090": 165e12}


class ModelSize:
    """Parameters of a model, and those that take part in matrix products of blocks and head."""

    def __init__(self, shape: Shape):
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(shape)
        self.parameters = model.num_parameters()
        # The input embedding is a look-up, not a product; tied to the head it is a product there.
        look_up = 0 if shape.tie_word_embeddings else model.get_input_embeddings().weight.numel()
        self.in_head = model.get_output_embeddings().weight.numel()
        self.in_blocks = self.parameters - look_up - self.in_head
        width = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
        self.attention_width = shape.num_hidden_layers * shape.num_attention_heads * width

    def flops(self, batch: GlobalBatch) -> int:
        """Of forward and backward of a step.

        As in PaLM (arXiv 2204.02311, appendix B): 6 a parameter and token, in the head a parameter
        and label, and 12 x width x length a token for attention. Neither recomputation nor padding
        counts.
        """
        products = self.in_blocks * batch.tokens + self.in_head * batch.labels
        return 6 * products + 12 * self.attention_width * batch.attended


def peak_memory(device: torch.device) -> int:
    """Most bytes held so far: on the GPU by torch's allocator, else by the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Run:
    """A run's directory, metrics, words on the terminal and Weights & Biases; rank 0 writes.

    Every rank makes one. It locks the directory and changes nothing there until `begin`. `facts` is
    what is recorded of the run beside its numbers.
    """

    def __init__(self, flags: dict, shape: Shape, device: torch.device, rank: int, ranks: int):
        self.directory, run_dir = Path(flags["run_dir"]), flags["run_dir"]
        self.flags, self.device, self.rank, self.ranks = flags, device, rank, ranks
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        self.peak_flops = next((peak for key, peak in PEAK_FLOPS.items() if key in name), None)
        self.timeout = datetime.timedelta(minutes=flags["timeout_minutes"])
        self.wandb, self.profiler, self.stop_requested = None, None, False
        self.size = ModelSize(shape)
        self.facts = {"flags": flags, "parameters": self.size.parameters, "world_size": ranks}
        self.facts |= {"script": Path(sys.argv[0]).name, "device": name, "torch": torch.__version__}
        file = self.directory / "metrics.jsonl"
        if rank == 0:
            with refusing(f"--run_dir {run_dir} cannot be written or is in use by another run"):
                self.directory.mkdir(parents=True, exist_ok=True)
                self.metrics = open(file, "a+", buffering=1)  # written line by line
                # This lock ends with the process, however it dies, and is not inherited by forks.
                fcntl.lockf(self.metrics, fcntl.LOCK_EX | fcntl.LOCK_NB)
        dist.barrier()
        places: list[Any] = [None] * ranks
        dist.all_gather_object(places, file.stat().st_ino if file.exists() else None)
        if len(set(places)) > 1:
            refuse(f"--run_dir {run_dir} is not the same directory on all nodes; it has to be one")

    def begin(self, resumed: Path | None, step: int) -> None:
        """All checks have passed and training begins after `step`; signals now ask it to stop."""
        self.first_step, self.spoken, self.started = step, 0.0, time.perf_counter()
        for group in dist.distributed_c10d._world.pg_map:  # those of a mesh have torch's default
            dist.distributed_c10d._set_pg_timeout(self.timeout, group)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: setattr(self, "stop_requested", True))
        if self.rank:
            return
        for leftover in [*self.directory.glob("*.tmp"), *self.directory.glob("checkpoints/*.tmp")]:
            shutil.rmtree(leftover)  # of a run that died while writing
        own = resumed and resumed.resolve().parents[1] == self.directory.resolve()
        self.metrics.seek(0)  # keep the lines up to `step`; the last one may be half written
        whole = [line for line in self.metrics.readlines() if line.endswith("\n")]
        kept = [line for line in whole if own and json.loads(line)["step"] <= step]
        self.metrics.truncate(len("".join(kept)))
        self.trace(step)
        (self.directory / "config.json").write_text(json.dumps(self.facts, indent=2) + "\n")
        if self.flags["wandb_project"]:
            import wandb

            # One id as long as the directory lives, so that a resumed run goes on in wandb too.
            run_id = fingerprint(os.fstat(self.metrics.fileno()).st_ino, self.flags["run_dir"])[:16]
            options = {"project": self.flags["wandb_project"], "id": run_id, "dir": self.directory}
            self.wandb = wandb.init(config=self.facts, resume="allow", **options)
            # Not wandb's own step, which must grow: a resumed run repeats some.
            self.wandb.define_metric("*", step_metric="step")

    def trace(self, step: int) -> None:
        """`step` is done: profile on rank 0 from the first of --trace_steps to the last."""
        first, last = self.flags["trace_steps"] or (0, 0)
        if self.rank == 0 and step + 1 == first:
            self.profiler = torch.profiler.profile()
            self.profiler.start()
        if self.profiler is not None and step == last:
            self.profiler.stop()
            self.profiler.export_chrome_trace(str(self.directory / "trace.json"))

    def should_stop(self) -> bool:
        """Whether any rank was asked to stop; a collective, so that all stop after one step."""
        requested = torch.tensor(int(self.stop_requested))
        dist.all_reduce(requested, dist.ReduceOp.MAX)
        return bool(requested)

    def say(self, text: str) -> None:
        if self.rank == 0:
            say(text)

    def log(self, line: dict[str, Any]) -> None:
        """A line of metrics.jsonl, and the same for Weights & Biases; NaN becomes null."""
        if self.rank:
            return
        finite = {k: v if v is None or math.isfinite(v) else None for k, v in line.items()}
        with refusing(f"cannot write {self.metrics.name}", code=1):
            self.metrics.write(json.dumps(finite) + "\n")
        if self.wandb is not None:
            self.wandb.log(finite)

    def log_step(self, batch: GlobalBatch, step: int, loss: float, **measured: float) -> None:
        """Log an optimizer step (`measured` as it is); the terminal hears of one in ten seconds."""
        peak, seconds = self.peak_flops and self.peak_flops * self.ranks, measured["step_seconds"]
        line = {"step": step, "loss": loss, **measured, "padding_fraction": batch.padding_fraction}
        line["tokens_per_second"] = batch.labels / seconds
        line["mfu"] = peak and self.size.flops(batch) / seconds / peak
        self.log(line | {"peak_memory_gib": peak_memory(self.device) / 2**30})
        self.trace(step)
        now, steps = time.perf_counter(), self.flags["steps"]
        if step in (self.first_step + 1, steps) or now - self.spoken > 10:
            left = (now - self.started) / (step - self.first_step) * (steps - step)
            speed = f"{line['tokens_per_second']:,.0f} tokens/s  {left:,.0f} s left"
            self.say(f"step {step}/{steps}  loss {loss:.4f}  {speed}")
            self.spoken = now

    def log_validation(self, step: int, loss: float, validation: Batches, number: int) -> None:
        """Log a validation, in nats per label, under the training step it belongs to."""
        bits = validation.bits_per_byte(loss, number)
        line = {"validation_loss": loss, "validation_perplexity": math.exp(min(loss, 700))}
        line |= {} if bits is None else {"validation_bits_per_byte": bits}
        self.log({"step": step} | line)
        self.say(f"step {step}: validation loss {loss:.4f}")

    def finish(self, step: int, checkpoint: Path, prompt: np.ndarray, following: str) -> None:
        """Training is over: rank 0 writes `hf/`, shows what the model writes, says what is next."""
        if self.rank:
            return
        if step < self.flags["steps"]:
            again = "" if self.flags["resume"] == "auto" else " with --resume auto"
            there = f"saved in {checkpoint}; the same command{again} goes on from there"
            return say(f"stopped after step {step} of {self.flags['steps']}, {there}")
        with refusing(f"cannot write {self.directory}/hf ({checkpoint} is intact)", code=1):
            export(checkpoint, self.directory / "hf")
        try:
            sample = continue_prompt(self.directory / "hf", prompt)
            say(f"--- the model continues the first tokens of a held-out text:\n{sample}\n---")
        except Exception as error:  # all outputs are there: the run has succeeded
            say(f"no sample of the model: {error}")
        files = f"{self.directory}/metrics.jsonl, and {self.directory}/hf for transformers"
        say(f"files: {files}\nnext:  {following}")


SAMPLING = {"max_new_tokens": 160, "do_sample": True, "temperature": 0.6}


def continue_prompt(directory: Path, prompt: np.ndarray) -> str:
    """How an exported model continues the ids of `prompt`, as plain transformers does it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    torch.manual_seed(0)
    options = {"attention_mask": torch.ones_like(ids), "pad_token_id": tokenizer.eos_token_id}
    return tokenizer.decode(model.generate(ids, **SAMPLING, **options)[0])


def command_line() -> None:
    if len(sys.argv) != 4 or sys.argv[1] != "export":
        refuse("usage: python common.py export CHECKPOINT OUT")
    checkpoint, out = Path(sys.argv[2]), Path(sys.argv[3])
    if problem := (f"{out} exists already" if out.exists() else damage(checkpoint)):
        refuse(f"export of {checkpoint}: {problem}")
    export(checkpoint, out)


if __name__ == "__main__":
    launch(command_line)
