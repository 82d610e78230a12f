"""Data side: tokenizers, cache, split, plans, collate, attention within documents."""

import gzip
import importlib
import json
import re
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from conftest import ROOT, make_batches
from transformers import (
    AttentionInterface,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2ForCausalLM,
)

import common
import fsdp2_sft

TRICKY = [
    "def f(x):\n\treturn x  # comment\n",
    "naïve café — 漢字 🙂 \u200d",
    "before <|endoftext|> after",
    "1234567 12 12345",
    "   leading, trailing   ",
    "I'll don't WE'RE",
    "\r\n\r\n mixed \n\n\n newlines",
]


def rows_of(dataset, column: str = "text", tokenizer: str = "bytes", max_length: int = 512):
    """`load_rows` as the pretraining scripts call it."""
    made = common.load_tokenizer(tokenizer)
    where = (str(dataset), None, "train")
    return common.load_rows(*where, [column], common.text_rows, made, max_length)


def texts_of(rows: common.Rows) -> list[str]:
    """What rows of the `bytes` tokenizer say, without their end tokens."""
    tokens = [rows.read(i)[0] for i in np.flatnonzero(rows.num_labels)]
    assert all(ids[-1] == 256 for ids in tokens)
    return [bytes(ids[:-1].astype(np.uint8)).decode() for ids in tokens]


@pytest.fixture(scope="module")
def batches(corpus):
    """A function: training batches of the small corpus under some settings."""

    def make(batching="bucketed", budget=512, multiple=1, seed=0):
        training, _ = rows_of(corpus).split()
        made = make_batches(
            training,
            batching=batching,
            micro_batch_tokens=budget,
            pad_to_multiple_of=multiple,
            seed=seed,
        )
        made.rows = training
        return made

    return make


def refused(function, *arguments) -> str:
    """The one line on stderr with which a call is refused."""
    with pytest.raises(common.Refusal) as end:
        function(*arguments)
    line = str(end.value)
    assert end.value.code == 2 and "\n" not in line
    return line


# --- Tokenizers -----------------------------------------------------------------------------------


def odd_encoding():
    """A tiktoken encoding with the regex of cl100k_base, merges and a gap before a special id."""
    import tiktoken

    ranks = {bytes([value]): value for value in range(256)}
    for token in (b"12", b"123", b"67", b"re", b"ret", b"  ", b"\n\n", b"caf"):
        ranks[token] = len(ranks)
    pattern = (
        r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"""
        r"""| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"""
    )
    special = {"<|endoftext|>": len(ranks) + 2, "<|other|>": len(ranks) + 5}
    return tiktoken.Encoding("odd", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


@pytest.mark.parametrize("name", ["bytes", "gpt2", "odd"])
def test_tokenizer_and_its_export_give_the_ids_of_tiktoken(name, request, tmp_path, texts):
    """Here, exported, and back in again; a special token that a text spells out stays text."""
    if name == "gpt2":
        request.getfixturevalue("gpt2_vocabulary")
    encoding = odd_encoding() if name == "odd" else common.tiktoken_encoding(name)
    made = common.to_transformers(encoding) if name == "odd" else common.load_tokenizer(name)
    samples = TRICKY + texts[:50]
    expected = [encoding.encode_ordinary(text) for text in samples]
    made.save_pretrained(tmp_path)
    exported = AutoTokenizer.from_pretrained(tmp_path)
    assert [exported(text)["input_ids"] for text in samples] == expected
    assert [exported.decode(ids) for ids in expected] == samples
    for tokenizer in (made, common.load_tokenizer(str(tmp_path))):
        assert [common.encode_text(text, tokenizer).tolist() for text in samples] == expected
        assert (len(tokenizer), tokenizer.eos_token_id) == (encoding.n_vocab, encoding.eot_token)


def test_encodings_of_other_habits_are_right_or_refused():
    """As p50k_base, whose end token stands between the others; as Llama 3, with another name."""
    import tiktoken

    ranks = {bytes([value]): value for value in range(256)}

    def encoding(ranks: dict, special: dict) -> tiktoken.Encoding:
        return tiktoken.Encoding(
            "x", pat_str=r"[\s\S]", mergeable_ranks=ranks, special_tokens=special
        )

    gap = encoding(ranks | {b"ab": 257}, {"<|endoftext|>": 256})
    assert "gaps" in refused(common.to_transformers, gap)
    llama = encoding(ranks, {"<|begin_of_text|>": 256, "<|end_of_text|>": 257})
    assert "no token for the end of a text" in refused(common.to_transformers, llama)


def test_tokenizers_that_cannot_train_or_were_left_cutting(tmp_path):
    """Without an end token: refused. Truncation and padding that a trainer left are taken off."""
    tokenizer = common.to_transformers(common.tiktoken_encoding("bytes"))
    tokenizer.backend_tokenizer.enable_truncation(16)
    tokenizer.backend_tokenizer.enable_padding(length=16)
    tokenizer.save_pretrained(tmp_path / "cuts")
    loaded = common.load_tokenizer(str(tmp_path / "cuts"))
    assert [len(common.encode_text("x" * n, loaded)) for n in (3, 40)] == [3, 40]
    endless = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    endless.save_pretrained(tmp_path / "endless")
    assert "lacks an end-of-text" in refused(common.load_tokenizer, str(tmp_path / "endless"))
    line = refused(common.load_tokenizer, str(tmp_path / "nowhere"))
    assert "nowhere is neither bytes" in line


# --- Corpus and cache -----------------------------------------------------------------------------


def test_rows_are_the_texts_with_one_end_token(corpus, texts):
    rows = rows_of(corpus, max_length=1000)
    assert texts_of(rows) == texts
    assert rows.lengths.tolist() == rows.num_labels.tolist() == [len(t.encode()) for t in texts]
    assert rows.num_bytes.tolist() == [len(text.encode()) for text in texts]
    assert all(rows.read(i)[1].all() for i in range(len(texts)))


def test_every_prediction_of_a_long_document_is_in_exactly_one_row(corpus, texts):
    """A cut loses and repeats nothing, and pieces of a document share its hash and bytes."""
    rows, start = rows_of(corpus, max_length=70), 0
    assert rows.lengths.max() == 70 and rows.lengths.min() >= 1
    for text in texts:
        ids = [*text.encode(), 256]
        number = -(-(len(ids) - 1) // 70)
        pieces = [rows.read(i)[0].tolist() for i in range(start, start + number)]
        assert sum((list(zip(piece, piece[1:])) for piece in pieces), []) == [*zip(ids, ids[1:])]
        assert len(set(rows.digest[start : start + number])) == 1
        nbytes = rows.num_bytes[start : start + number].sum(dtype=np.float64)
        assert nbytes == pytest.approx(len(text.encode()), rel=1e-6)
        start += number
    assert start == len(rows.lengths)
    training, validation = (set(part.digest) for part in rows.split())
    assert training and validation and not training & validation


def test_stdlib_corpus_holds_the_functions_of_the_standard_library():
    import inspect
    import textwrap

    found = {d["text"] for d in common.standard_library_documents([textwrap.__file__], "")}
    assert inspect.getsource(textwrap.dedent) in found
    assert inspect.getsource(textwrap.TextWrapper) in found


def test_an_edited_embedded_corpus_is_made_anew(tmp_path, monkeypatch):
    """datasets knows a function of a module by its name alone."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for text in ("short", "a longer text"):
        source = f"def documents(files, version):\n    yield {{'text': {text!r}}}\n"
        (tmp_path / "own_corpus.py").write_text(source)
        sys.modules.pop("own_corpus", None)
        importlib.invalidate_caches()
        function = importlib.import_module("own_corpus").documents
        monkeypatch.setitem(common.EMBEDDED, "own", function)
        assert {*common.open_dataset("own", None, "train")["text"]} == {text}


FORMS = ["data.parquet", "data.jsonl", "data.json", "data.txt", "data.csv", "part*.jsonl"]
FORMS += ["data.jsonl.gz", "data[1].jsonl", "x.txt.jsonl", "x.json.txt.gz"]


@pytest.mark.parametrize("form", FORMS)
def test_local_files(tmp_path, texts, form):
    """Any kind, compressed, several, with brackets in the name; the last known suffix counts."""
    import datasets

    lines = [" ".join(text.split()) for text in texts[:40]]  # .txt: one document a line
    assert all(lines)
    table = datasets.Dataset.from_dict({"content": lines, "other": range(40)})
    name, column = tmp_path / form, "content"
    if form.endswith(".parquet"):
        table.to_parquet(name)
    elif ".txt" in form and ".jsonl" not in form:
        write = gzip.open if form.endswith(".gz") else open
        with write(name, "wt", encoding="utf-8") as file:
            file.write("\n".join(lines))
        column = "text"
    elif form.endswith(".csv"):
        table.to_csv(name, index=False)
    elif "*" in form:
        for i in range(2):
            table.shard(2, i, contiguous=True).to_json(tmp_path / f"part{i}.jsonl")
    else:
        table.to_json(name, compression="gzip" if form.endswith(".gz") else None)
        if "[1]" in form:  # what the name would match as a pattern
            (tmp_path / "data1.jsonl").write_text('{"content": "the other file"}\n')
    assert texts_of(rows_of(name, column, max_length=1000)) == lines


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("utf.jsonl", b'{"text": "a\xff"}\n{"text": "b"}\n', "utf-8"),
        ("utf.txt", b"a\xff\nb\n", "utf-8"),
        ("empty.jsonl", b"", "empty|no rows|nothing"),
        ("broken.jsonl", b'{"text": "a"\n{"text"', "cannot be read: .*JSON"),
        ("broken.jsonl.gz", b"no gzip", "[Nn]ot a gzip"),
        ("column.jsonl", b'{"content": "a"}\n', r"has no column text, only \['content'\]"),
        ("missing.jsonl", None, "missing.jsonl"),
        ("none*.jsonl", None, r"none\*.jsonl"),
        ("a folder of nothing", None, "a folder of nothing"),
    ],
)
def test_a_corpus_that_cannot_be_read_is_refused_in_one_line(name, content, words, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    line = refused(rows_of, tmp_path / name)
    assert name in line and re.search(words, line) and "StopIteration" not in line


def test_what_is_no_text_is_left_out_and_counted(tmp_path):
    """Null and empty texts leave the rest; numbers instead of text leave nothing, which is said."""
    path = tmp_path / "some.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in ["one", None, "", "two"]))
    rows = rows_of(path)
    assert texts_of(rows) == ["one", "two"]
    assert rows.notes["left out, as they hold no text"] == 2
    assert [len(part.lengths) for part in rows.split()] == [1, 1]
    path = tmp_path / "numbers.jsonl"
    path.write_text("".join(json.dumps({"text": n}) + "\n" for n in range(5)))
    line = refused(rows_of(path).split)
    assert "fewer than two documents" in line and "hold no text" in line


def test_s3(texts, monkeypatch):
    boto3 = pytest.importorskip("boto3")
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", port=0)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)  # it means S3 as well
    server.start()
    try:
        host, port = server.get_host_and_port()
        for name, value in (
            ("AWS_ENDPOINT_URL", f"http://{host}:{port}"),
            ("AWS_ACCESS_KEY_ID", "test"),
            ("AWS_SECRET_ACCESS_KEY", "test"),
            ("AWS_DEFAULT_REGION", "us-east-1"),
        ):
            monkeypatch.setenv(name, value)
        client = boto3.client("s3")
        client.create_bucket(Bucket="corpus")
        body = "".join(json.dumps({"text": text}) + "\n" for text in texts[:30])
        client.put_object(Bucket="corpus", Key="a/part.jsonl", Body=body.encode())
        rows = rows_of("s3://corpus/a/part.jsonl", max_length=1000)
        assert texts_of(rows) == texts[:30]
    finally:
        server.stop()


PREPARE = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import common, datasets

def slow_rows(document, tokenizer, max_length):
    with open(log, "a") as file:  # one line a document that is tokenized
        file.write(".\\n")
    time.sleep(0.002)  # so that whoever comes at the same time comes in the middle
    yield from common.text_rows(document, tokenizer, max_length)

for group in sys.argv[3:]:  # CACHE=RANKS
    cache, ranks = group.split("=")
    datasets.config.HF_DATASETS_CACHE, log = Path(cache), cache + ".log"
    children = []
    for rank in range(int(ranks)):
        children.append(os.fork())
        if not children[-1]:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": ranks}
            where = (sys.argv[2], None, "train")
            tokenizer = common.load_tokenizer("bytes")
            rows = common.load_rows(*where, ["text"], slow_rows, tokenizer, 512)
            print(rows.lengths.sum(), [len(part.lengths) for part in rows.split()])
            sys.stdout.flush()
            os._exit(0)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
"""


def test_a_second_run_tokenizes_nothing_and_of_ranks_at_once_one_does_it(corpus, texts, tmp_path):
    """The cache does not depend on the ranks, which prepare in turn, under the file lock."""
    program, a, b = tmp_path / "prepare.py", tmp_path / "a", tmp_path / "b"
    program.write_text(PREPARE)

    def prepare(*groups: str) -> set[str]:
        command = [sys.executable, str(program), str(ROOT), corpus, *groups]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")
        return set(done.stdout.splitlines())

    def files(cache: Path) -> dict[str, tuple[bytes, int]]:
        found = sorted(cache.rglob("cache-*.arrow"))
        return {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in found}

    said = prepare(f"{a}=1")
    first = files(a)
    assert len(first) == 1 and len(said) == 1
    assert prepare(f"{a}=2", f"{b}=2") == said  # a process of its own: no hash is left over
    assert files(a) == first
    for cache in (a, b):
        assert Path(f"{cache}.log").read_text() == ".\n" * len(texts)
    [[name, (one, _)]], [[other, (two, _)]] = first.items(), files(b).items()
    assert one == two and name == other


def test_what_changes_rows_changes_the_key_of_the_cache(tmp_path, corpus, texts):
    """Length, and tokenizers that differ in nothing but what their end token is."""
    tokenizer = common.to_transformers(common.tiktoken_encoding("bytes"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    for name in ("<|endoftext|>", "<|im_end|>"):
        tokenizer.eos_token = name
        tokenizer.save_pretrained(tmp_path / name)
        rows = rows_of(corpus, tokenizer=str(tmp_path / name), max_length=1000)
        ends = {int(rows.read(i)[0][-1]) for i in range(len(texts))}
        assert ends == {tokenizer.convert_tokens_to_ids(name)}
    assert rows_of(corpus, max_length=100).lengths.max() == 100


def test_code_that_makes_rows_is_part_of_the_key():
    """What the functions of a corpus call, and the constants that they read, at any depth."""
    found = common.sources(fsdp2_sft.chat_rows, common.sources(common.make_rows, {}))
    assert {"make_rows", "chat_rows", "encode", "read_conversation", "read_message"} <= found.keys()
    assert {"ROLES", "BEYOND_TEXT", "INSIDE", "COLUMNS", "fingerprint"} <= found.keys()
    text = common.sources(common.text_rows, {})
    assert {"text_rows", "encode_text"} <= text.keys()
    assert all("def " in text[name] for name in text if name.islower())


def test_split_never_overlaps_and_is_stable():
    def split(digest: np.ndarray, labels: np.ndarray):
        columns = {"labels": labels, "digest": digest, "bytes": labels}
        columns["note"] = [""] * len(digest)
        columns["tokens"] = columns["learned"] = [[]] * len(digest)
        return [part.chosen for part in common.Rows(pa.table(columns)).split()]

    rng = np.random.default_rng(0)
    digest, labels = rng.integers(0, 2**62, 1000), rng.integers(0, 9, 1000)
    digest[::10] = digest[0]  # the same document a hundred times
    training, validation = split(digest, labels)
    assert sorted([*training, *validation]) == np.flatnonzero(labels).tolist()
    assert not set(digest[training]) & set(digest[validation])
    assert len(set(digest[validation])) == len(set(digest[labels > 0])) // 50
    shuffled = rng.permutation(1000)
    other = split(digest[shuffled], labels[shuffled])[1]
    assert set(digest[shuffled][other]) == set(digest[validation])
    assert [len(part) for part in split(digest[1:3], np.ones(2))] == [1, 1]
    assert "fewer than two" in refused(split, digest[:1], np.ones(1))
    assert "fewer than two" in refused(split, digest[1:3], np.array([0, 3]))


# --- Plans ----------------------------------------------------------------------------------------


def lengths_of(number: int, longest: int = 2048) -> np.ndarray:
    rng = np.random.default_rng(1)
    return np.minimum(rng.lognormal(5.5, 1, number).astype(np.int64) + 1, longest)


def correlations(values: np.ndarray) -> list[float]:
    """Of neighbours, of those two apart and of those five apart."""
    return [abs(np.corrcoef(values[:-lag], values[lag:])[0, 1]) for lag in (1, 2, 5)]


@pytest.mark.parametrize("batching", ["bucketed", "packed"])
@pytest.mark.parametrize("multiple", [1, 64])
def test_an_epoch_loses_and_repeats_nothing_within_the_budget(batching, multiple):
    """Several windows, in no order of length; another epoch puts other rows together."""
    length = lengths_of(50_000)
    plans = [common.plan_epoch(length, batching, 8192, multiple, 0, epoch) for epoch in (0, 1)]
    for plan in plans:
        assert np.array_equal(np.sort(np.concatenate(plan)), np.arange(len(length)))
        for rows in plan:
            widest = -(-length[rows].max() // multiple) * multiple
            used = length[rows].sum() if batching == "packed" else len(rows) * widest
            assert 0 < used <= 8192
        mean = np.array([length[rows].mean() for rows in plan])
        assert max(correlations(mean)) < 0.08
        halves = mean[: len(mean) // 2].mean(), mean[len(mean) // 2 :].mean()
        assert abs(halves[0] / halves[1] - 1) < 0.1
    again = common.plan_epoch(length, batching, 8192, multiple, 0, 0)
    assert all(np.array_equal(a, b) for a, b in zip(plans[0], again))
    together = [{frozenset(rows.tolist()) for rows in plan if len(rows) > 1} for plan in plans]
    assert not together[0] & together[1]
    other = common.plan_epoch(length, batching, 8192, multiple, 1, 0)
    assert not np.array_equal(np.concatenate(other), np.concatenate(plans[0]))
    if batching == "packed":
        assert length.sum() / (len(plans[0]) * 8192) >= 0.99
        assert abs(len(plans[0]) - len(plans[1])) <= 2


@pytest.mark.parametrize("batching", ["bucketed", "packed"])
def test_a_row_that_no_micro_batch_can_hold_is_an_error(batching):
    """Whoever copies the plan alone has no Config that refuses it, and would wait for ever."""
    lengths = np.array([5, 9, 7])
    with pytest.raises(ValueError, match="a row of 9 positions exceeds a micro-batch of 8"):
        common.plan_epoch(lengths, batching, 8, 1, 0, 0)


def embedded(corpus: str) -> common.Rows:
    """Rows of an embedded corpus, as the scripts read it by default."""
    if corpus == "stdlib":
        return rows_of(corpus)
    where, (tokenizer, _) = (corpus, None, "train"), fsdp2_sft.chat_tokenizer("bytes")
    return common.load_rows(*where, fsdp2_sft.CONVERSATIONS, fsdp2_sft.chat_rows, tokenizer, 2048)


@pytest.mark.parametrize(
    "corpus, max_length, times",
    [
        ("stdlib", 512, 8),
        pytest.param("stdlib-docstrings", 2048, 4, marks=pytest.mark.drill),
    ],
)
def test_embedded_corpora_fill_the_budget_with_little_padding(corpus, max_length, times):
    """Padding at most 1 %, at least 94 % of the budget is tokens; packed 99 %."""
    training, _ = embedded(corpus).split()
    length = training.lengths
    made = make_batches(training, max_length=max_length, micro_batch_tokens=times * max_length)
    for epoch in (0, 1):
        chosen = made.plan(epoch)
        tokens = sum(int(length[part].sum()) for part in chosen)
        assert tokens == length.sum() > 10**6
        positions = sum(np.prod(made.shape(part)) for part in chosen)
        assert max(np.prod(made.shape(part)) for part in chosen) <= times * max_length
        assert 1 - tokens / positions <= 0.01
        assert tokens / (len(chosen) * times * max_length) >= 0.94
        assert max(correlations(np.array([length[part].mean() for part in chosen]))) < 0.1
        packed = common.plan_epoch(length, "packed", times * max_length, 1, 0, epoch)
        assert tokens / (len(packed) * times * max_length) >= 0.99


def first_principles_best_fit(length: list[int], capacity: int) -> list[int]:
    """Free space of the rows after best-fit decreasing, one piece at a time."""
    free: list[int] = []
    for size in sorted(length, reverse=True):
        fitting = [i for i, space in enumerate(free) if space >= size]
        if fitting:
            free[min(fitting, key=lambda i: free[i])] -= size
        else:
            free.append(capacity - size)
    return sorted(free)


@pytest.mark.parametrize("capacity, longest", [(100, 100), (100, 30), (64, 64), (1000, 90)])
def test_packing_is_best_fit_decreasing_within_a_window(capacity, longest):
    """400 rows are one window; 2,000 may be several, each packed on its own."""
    rng = np.random.default_rng(capacity + longest)
    for number in (400, 2000):
        length = rng.integers(1, longest + 1, number)
        plan = common.plan_epoch(length, "packed", capacity, 1, 5, 0)
        assert sorted(np.concatenate(plan).tolist()) == [*range(number)]
        windows = [*common.windows(length, capacity, np.random.default_rng([5, 0]))]
        assert number == 2000 or len(windows) == 1
        assert sorted(np.concatenate(windows).tolist()) == [*range(number)]
        expected = [first_principles_best_fit(length[w].tolist(), capacity) for w in windows]
        assert sorted(capacity - int(length[rows].sum()) for rows in plan) == sorted(
            sum(expected, [])
        )


def test_ten_million_documents_are_planned_with_a_python_step_a_micro_batch():
    """In less than 3 s of processor time; lines run and objects kept are counted, which is firm."""
    length = lengths_of(10_000_000)
    began = time.thread_time()
    plan = common.plan_epoch(length, "bucketed", 16384, 1, 0, 0)
    seconds = time.thread_time() - began
    print(f"{seconds:.2f} s for {len(plan):,} micro-batches")
    assert seconds < 3
    assert len(plan) < length.sum() / 16384 / 0.94

    length, lines = length[:1_000_000], 0

    def count(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        return count if "common" in frame.f_code.co_filename else None

    sys.settrace(count)
    try:
        plan = common.plan_epoch(length, "bucketed", 16384, 1, 0, 0)
    finally:
        sys.settrace(None)
    assert lines < 8 * len(plan) < len(length) / 4

    tracemalloc.start(1)
    plan = common.plan_epoch(length, "bucketed", 16384, 1, 0, 0)
    peak = tracemalloc.get_traced_memory()[1]
    objects = len(tracemalloc.take_snapshot().traces)
    tracemalloc.stop()
    assert objects < 6 * len(plan)  # not one a document
    assert peak < 60 * len(length)  # bytes: a few arrays of 8 bytes a document


# --- Batches --------------------------------------------------------------------------------------


def contents(micro_batches) -> list[tuple]:
    """Micro-batches as something that can be compared and sorted."""
    return [tuple(batch[k].numpy().tobytes() for k in ("input_ids", "labels"))
            for batch in micro_batches]  # fmt: skip


@pytest.mark.parametrize("batching", ["bucketed", "packed"])
def test_global_batches_do_not_depend_on_the_shares(batches, batching):
    """1, 2 and 4 shares together hold the same micro-batches, equally many each, and one count."""

    def step(made, shares: int) -> list:
        parts = [made.global_batch(3, 8, share, shares) for share in range(shares)]
        assert {len(part.micro_batches) for part in parts} == {8 // shares}
        [numbers] = {
            (p.num_labels, p.num_tokens, p.squared_lengths, p.padding_fraction) for p in parts
        }
        micro_batches = [batch for part in parts for batch in part.micro_batches]
        labels = [batch["labels"] for batch in micro_batches]
        assert numbers[0] == numbers[1] == sum(int((x >= 0).sum()) for x in labels)
        assert numbers[3] == 1 - numbers[1] / sum(x.numel() for x in labels)
        return sorted(contents(micro_batches))

    made = batches(batching)
    assert step(made, 1) == step(made, 2) == step(made, 4)
    assert step(batches(batching, seed=1), 1) != step(made, 1)


@pytest.mark.parametrize("batching", ["bucketed", "packed"])
def test_the_step_is_the_position_and_each_epoch_has_every_row_once(batches, batching):
    """Whatever was read before: a stream may begin anywhere, also after other epochs."""
    made, fresh = batches(batching), batches(batching)
    sizes = [len(made.plan(epoch)) for epoch in range(4)]
    order = [made.micro_batch(k).tolist() for k in range(sum(sizes))]
    for epoch, end in enumerate(np.cumsum(sizes)):
        rows = sum(order[end - sizes[epoch] : end], [])
        assert sorted(rows) == [*range(len(made.lengths))]
    for number in (sum(sizes) - 1, 0, sizes[0], sizes[0] - 1):
        assert fresh.micro_batch(number).tolist() == order[number]
    step = sizes[0] // 8  # its micro-batches are of two epochs
    got = contents(fresh.global_batch(step, 8, 0, 1).micro_batches)
    assert got == contents(made.collate(np.array(r)) for r in order[step * 8 : step * 8 + 8])


def test_stream_hands_out_the_steps_in_order_and_passes_errors_on(batches, monkeypatch):
    """Also a stream that is left early ends its thread."""
    made = batches()
    expected = [contents(made.global_batch(s, 8, 1, 2).micro_batches) for s in range(2, 6)]
    stream = [*made.stream(2, 6, 8, 1, 2)]
    assert [contents(batch.micro_batches) for batch in stream] == expected
    before = threading.active_count()
    left = made.stream(0, 9, 8, 0, 1)
    next(left)
    left.close()
    assert threading.active_count() == before

    def fail(*arguments):
        raise OSError("disk gone")

    monkeypatch.setattr(made, "global_batch", fail)
    with pytest.raises(OSError, match="disk gone"):
        next(made.stream(0, 1, 8, 0, 1))


@pytest.mark.parametrize("batching", ["bucketed", "packed"])
def test_evaluation_is_the_same_whatever_the_shares_and_gives_each_as_many(batches, batching):
    """Of an epoch at most; the bits are those of all its labels over the bytes of their texts."""
    made = batches(batching)
    epoch = len(made.plan(0))

    def seen(number: int, shares: int) -> tuple[list, set[int]]:
        parts = [[*made.evaluation(number, share, shares)] for share in range(shares)]
        with_labels = [b for part in parts for b in part if (b["labels"] >= 0).any()]
        return sorted(contents(with_labels)), {len(part) for part in parts}

    for number, most in ((5, 5), (10**6, epoch)):
        one, two, four = seen(number, 1), seen(number, 2), seen(number, 4)
        assert one[0] == two[0] == four[0] and len(one[0]) == most
        assert [one[1], two[1], four[1]] == [{-(-most // shares)} for shares in (1, 2, 4)]
    rows = made.rows
    every = range(len(rows.lengths))
    num_bytes = sum(len(rows.read(i)[0]) - (rows.read(i)[0][-1] == 256) for i in every)
    read = made.evaluation_rows(10**6)
    assert sorted(read) == [*every]
    expected = rows.num_labels.sum() / num_bytes
    assert rows.labels_per_byte(read) == pytest.approx(expected, rel=0.01)
    assert rows.prompt().tolist() == rows.read(0)[0][:64].tolist()


@pytest.mark.parametrize("batching", ["bucketed", "packed"])
def test_compiled_blocks_see_few_shapes_a_width(batches, batching):
    """With --pad_to_multiple_of, over several epochs; no label is lost by it."""
    made = batches(batching, budget=2048, multiple=64)
    shapes, labels, number = {}, 0, sum(len(made.plan(epoch)) for epoch in range(4))
    for k in range(number):
        batch = made.collate(made.micro_batch(k))
        shape = tuple(t.shape for t in batch.values() if torch.is_tensor(t))
        width = batch["input_ids"].shape[1]
        assert width % 64 == 0 and batch["input_ids"].numel() <= 2048
        shapes.setdefault(width, set()).add(shape)
        labels += int((batch["labels"] >= 0).sum())
    assert labels == 4 * made.num_labels.sum()
    # Packed, the number of boundaries is a power of two: at most 11 of them up to 2,048.
    assert max(map(len, shapes.values())) <= (4 if batching == "packed" else 1)
    assert len(shapes) <= (1 if batching == "packed" else 512 // 64)


# --- Attention: what a document's tokens see ------------------------------------------------------


@pytest.fixture(scope="module")
def models(weights_directory):
    """The same weights with transformers' own attention, and with ours."""
    AttentionInterface.register("documents", fsdp2_sft.document_attention)
    kinds = ("eager", "documents")
    load = Qwen2ForCausalLM.from_pretrained
    return [load(weights_directory, dtype=torch.float32, attn_implementation=k) for k in kinds]


@pytest.mark.parametrize(
    "batching, multiple", [("bucketed", 1), ("bucketed", 64), ("packed", 1), ("packed", 64)]
)
@torch.no_grad()
def test_logits_of_a_document_equal_those_of_the_document_alone(
    batches, models, batching, multiple
):
    """Packed: no leak between documents. Bucketed: right padding needs no mask."""
    alone, ours = models
    made = batches(batching, budget=2048, multiple=multiple)
    checked = 0
    for number in range(4):
        rows = made.micro_batch(number)
        batch = made.collate(rows)
        labels, column = batch.pop("labels"), 0
        if made.packed:
            limits = batch["cu_seq_lens_q"]
            assert 0 <= limits.diff().min() and limits.diff().max() <= batch["max_length_q"]
            assert (limits[0], limits[-1]) == (0, 2048)
        logits = ours(**batch, use_cache=False).logits
        for row, document in enumerate(rows):
            ids = torch.from_numpy(made.rows.read(document)[0].astype(np.int64))
            length = len(ids) - 1
            place = (0, slice(column, column + length)) if made.packed else (row, slice(0, length))
            column += length
            assert torch.equal(labels[place], ids[1:])
            expected = alone(input_ids=ids[None, :-1]).logits[0]
            torch.testing.assert_close(logits[place], expected, rtol=1e-4, atol=1e-5)
            checked += 1
        assert (labels >= 0).sum() == made.rows.lengths[rows].sum()
    assert checked > 10


@pytest.mark.parametrize(
    "asked, words",
    [
        ({"attention_mask": torch.ones(1, 1, 8, 8)}, "an attention mask"),
        ({"s_aux": torch.zeros(4)}, "attention sinks"),
        ({"softcap": 30.0}, "a softcap"),
        ({"is_causal": False}, "bidirectional"),
        ({"sliding_window": 7}, "a sliding window"),
        ({"sliding_window": 3, "cu_seq_lens_q": [0, 4, 8], "max_length_q": 4}, "a sliding window"),
        ({"rows": 2, "cu_seq_lens_q": [0, 4, 8], "max_length_q": 4}, "one row"),
        ({"dropout": 0.1, "cu_seq_lens_q": [0, 4, 8], "max_length_q": 4}, "no dropout"),
    ],
)
def test_attention_refuses_what_it_does_not_apply(asked, words):
    """And takes a window that no row is longer than."""
    asked = {"attention_mask": None, **asked}
    if "cu_seq_lens_q" in asked:
        asked["cu_seq_lens_q"] = torch.tensor(asked["cu_seq_lens_q"], dtype=torch.int32)
    query, key, value = torch.randn(3, asked.pop("rows", 1), 4, 8, 16)
    module = torch.nn.Identity()
    with pytest.raises(ValueError, match=words):
        fsdp2_sft.document_attention(module, query, key, value, **asked)
    fsdp2_sft.document_attention(module, query, key, value, None, sliding_window=8, softcap=None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="variable-length kernels need CUDA")
def test_variable_length_kernels_equal_attention_document_by_document():
    torch.manual_seed(0)
    shape = {"q": (1, 8, 512, 64), "k": (1, 2, 512, 64), "v": (1, 2, 512, 64)}
    q, k, v = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shape.values())
    limits = torch.tensor([0, 5, 200, 201, 512, 512, 512], dtype=torch.int32, device="cuda")
    got, _ = fsdp2_sft.document_attention(None, q, k, v, None, limits, 512, scaling=0.125)
    k, v = (x.repeat_interleave(4, dim=1) for x in (k, v))
    expected = fsdp2_sft.attention_document_by_document(q, k, v, limits, 0.125)
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
