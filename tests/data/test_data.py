"""The data side: tokenizers, cache, split, batch plans, collate, attention within documents."""

import copy
import gzip
import importlib
import itertools
import json
import math
import os
import re
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import tiktoken
import torch
from datasets.arrow_writer import ArrowWriter
from launching import HANGS, ROOT, all_of, data_config, make_batches, refused, split
from tiktoken_ext.openai_public import r50k_pat_str
from transformers import (
    AttentionInterface,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2ForCausalLM,
)

import common
import conversations
import fsdp2_sft
from model import attend_one_by_one, document_attention
from run import Run

TRICKY = [
    "def f(x):\n\treturn x  # comment\n",
    "naïve café — 漢字 🙂 \u200d",
    "before <|endoftext|> after",
    "1234567 12 12345",
    "   leading, trailing   ",
    "I'll don't WE'RE",
    "\r\n\r\n mixed \n\n\n newlines",
]


@pytest.fixture(autouse=True)
def rank_0(monkeypatch):
    """`common.say` prints on rank 0."""
    monkeypatch.setenv("RANK", "0")


def load(
    dataset, column: str = "text", tokenizer: str = "bytes", function=common.tokenize_text
) -> common.Sequences:
    """Call `load_documents` as the pretraining scripts do."""
    config = data_config(dataset=str(dataset), tokenizer=tokenizer)
    tokenizer = common.load_tokenizer(tokenizer)
    return all_of(common.load_documents(config, [column], function, tokenizer))


def texts_of(documents: common.Sequences) -> list[str]:
    """Return the texts of documents of the `bytes` tokenizer, which end with an end token."""
    tokens = [documents.read(i)[0] for i in range(len(documents.lengths))]
    assert all(ids[-1] == 256 for ids in tokens)
    return [bytes(ids[:-1].astype(np.uint8)).decode() for ids in tokens]


@pytest.fixture(scope="module")
def batches(corpus):
    """Return a function: training batches of the small corpus with some flags."""

    def make(batching="bucketed", budget=512, multiple=1, seed=0):
        training, _ = split(load(corpus))
        return make_batches(
            training.split(512),
            batching=batching,
            micro_batch_tokens=budget,
            pad_to_multiple_of=multiple,
            seed=seed,
        )

    return make


def test_the_texts_of_the_tests_are_the_same_everywhere(texts, python_files):
    """Otherwise the limits of the tests would hold with some versions of Python and NumPy only."""
    rows = [*conversations.docstring_conversations(python_files)]
    assert common.fingerprint(texts) == "821732a42114675d3dd10285b4cd1aa8"
    assert common.fingerprint(rows) == "91786e15f46eae33b24a4afd72c59203"


# --- Tokenizers -----------------------------------------------------------------------------------


def encoding(name: str) -> tiktoken.Encoding:
    """Return bytes, gpt2, or an encoding with gpt2's regex and a few merges."""
    if name == "gpt2":
        return tiktoken.get_encoding(name)
    pattern = r"[\s\S]" if name == "bytes" else r50k_pat_str
    merges = (b"12", b"123", b"67", b"re", b"ret", b"  ", b"\n\n", b"caf")
    tokens = [bytes([value]) for value in range(256)] + list(merges) * (name == "merges")
    special = {"<|endoftext|>": len(tokens)}
    if name == "merges":
        special["<|other|>"] = len(tokens) + 1
    ranks = {token: i for i, token in enumerate(tokens)}
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


@pytest.mark.parametrize("name", ["bytes", "gpt2", "merges"])
def test_tokenizer_and_its_export_give_the_ids_of_tiktoken(name, request, tmp_path, texts):
    """Before and after export. A special token that a text spells out stays text."""
    if name == "gpt2":
        request.getfixturevalue("gpt2_vocabulary")
    oracle = encoding(name)
    made = common.from_tiktoken(oracle) if name == "merges" else common.load_tokenizer(name)
    samples = TRICKY + texts[:50]
    expected = [oracle.encode_ordinary(text) for text in samples]
    made.save_pretrained(tmp_path)
    exported = AutoTokenizer.from_pretrained(tmp_path)
    assert [exported(text)["input_ids"] for text in samples] == expected
    assert [exported.decode(ids) for ids in expected] == samples
    for tokenizer in (made, common.load_tokenizer(str(tmp_path))):
        assert [common.encode_text(text, tokenizer).tolist() for text in samples] == expected
        assert (len(tokenizer), tokenizer.eos_token_id) == (oracle.n_vocab, oracle.eot_token)


def test_tokenizers_that_truncate_or_lack_an_end_token(tmp_path):
    """Truncation and padding that a trainer left on are turned off."""
    tokenizer = copy.deepcopy(common.load_tokenizer("bytes"))
    tokenizer.backend_tokenizer.enable_truncation(16)
    tokenizer.backend_tokenizer.enable_padding(length=16)
    tokenizer.save_pretrained(tmp_path / "cuts")
    loaded = common.load_tokenizer(str(tmp_path / "cuts"))
    assert [len(common.encode_text("x" * n, loaded)) for n in (3, 40)] == [3, 40]
    endless = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    endless.save_pretrained(tmp_path / "endless")
    assert "lacks an end-of-text" in refused(common.load_tokenizer, str(tmp_path / "endless"))
    line = refused(common.load_tokenizer, str(tmp_path / "nowhere"))
    assert "nowhere is not bytes" in line


# --- Corpus and documents -------------------------------------------------------------------------


def test_documents_are_the_texts_with_one_end_token(corpus, texts):
    documents = load(corpus)
    assert texts_of(documents) == texts
    num_bytes = [len(text.encode()) for text in texts]
    assert documents.lengths.tolist() == documents.num_targets.tolist() == num_bytes
    assert all(documents.read(i)[1].all() for i in range(len(texts)))
    training, held_out = split(documents)
    assert len(training.lengths) + len(held_out.lengths) == len(texts)
    assert training.index.itemsize == 16  # bytes of memory per document and rank


def test_documents_on_macos(corpus, monkeypatch, texts):
    """It does not tell which CPUs a process may use."""
    monkeypatch.setattr(common, "sys", SimpleNamespace(platform="darwin", stderr=sys.stderr))
    monkeypatch.delattr(os, "sched_getaffinity")
    if hasattr(os, "process_cpu_count"):  # Python 3.13 and later: there it is this alias
        monkeypatch.setattr(os, "process_cpu_count", os.cpu_count)
    assert texts_of(load(corpus)) == texts


def test_each_prediction_of_a_long_document_is_in_exactly_one_sequence(corpus, texts):
    """Splitting loses and repeats nothing."""
    sequences, start = load(corpus).split(70), 0
    assert sequences.lengths.max() == 70 and sequences.lengths.min() >= 1
    assert sequences.num_targets.tolist() == sequences.lengths.tolist()
    for text in texts:
        ids = [*text.encode(), 256]
        number = -(-(len(ids) - 1) // 70)
        pieces = [sequences.read(i) for i in range(start, start + number)]
        lengths = sequences.lengths[start : start + number] + 1
        assert [len(tokens) for tokens, _ in pieces] == lengths.tolist()
        assert all(in_loss.all() for _, in_loss in pieces)
        pairs = [list(zip(tokens.tolist(), tokens.tolist()[1:])) for tokens, _ in pieces]
        assert sum(pairs, []) == [*zip(ids, ids[1:])]
        assert sequences.index.start[start : start + number].tolist() == [
            *range(0, len(ids) - 1, 70)
        ]
        start += number
    assert start == len(sequences.lengths)


def masked_tokenizer(row, tokenizer):
    """Take a text of 0 and 1 for a loss mask."""
    in_loss = [mark == "1" for mark in row["text"]]
    return np.arange(len(in_loss), dtype=np.uint32), in_loss, row["text"], 0


def test_truncation_keeps_beginnings_that_have_targets(tmp_path, capsys):
    """For conversations. The target tokens are those that are left, and what is cut is said."""
    path = tmp_path / "masks.jsonl"
    lines = [
        json.dumps({"text": mask}) + "\n" for mask in ("0011", "000011", "011001", "01", "00001")
    ]
    path.write_text("".join(lines))
    documents = load(path, function=masked_tokenizer)
    assert documents.num_targets.tolist() == [2, 2, 3, 1, 1]
    sequences = conversations.truncate(documents, 3)
    assert sequences.lengths.tolist() == [3, 3, 1]
    assert sequences.num_targets.tolist() == [2, 2, 1]
    tokens, in_loss = sequences.read(1)
    assert tokens.tolist() == [0, 1, 2, 3] and in_loss.tolist() == [False, True, True, False]
    assert documents.num_targets.tolist() == [2, 2, 3, 1, 1]
    said = capsys.readouterr().out
    assert "3 of 5 conversations are cut to 3 tokens; 2 of these are left out" in said


def test_stdlib_corpus_holds_the_functions_of_the_standard_library():
    import inspect
    import textwrap

    found = {d["text"] for d in common.standard_library_documents([textwrap.__file__])}
    assert inspect.getsource(textwrap.dedent) in found
    assert inspect.getsource(textwrap.TextWrapper) in found


def test_an_edit_tokenizes_again(tmp_path, monkeypatch, corpus):
    """Of the file of the function, also of what it calls, or of a module that the file imports."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def first_tokens(end: int, more: int) -> list[int]:
        (tmp_path / "own_reader.py").write_text(f"LAST = {more}\n")
        (tmp_path / "own_corpus.py").write_text(
            f"import own_reader\n\n\ndef called():\n    return [5, {end}, own_reader.LAST]\n\n\n"
            "def tokenize(row, tokenizer):\n    return called(), [1, 1, 1], '', 1\n"
        )
        for name in ("own_corpus", "own_reader"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        function = importlib.import_module("own_corpus").tokenize
        return load(corpus, function=function).read(0)[0].tolist()

    for numbers in ((1, 6), (22, 6), (22, 17)):
        assert first_tokens(*numbers) == [5, *numbers]


def test_an_edited_generator_is_run_again(tmp_path, monkeypatch):
    """datasets knows a function of a module by its name alone."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for text in ("one", "another"):
        source = f"def generate(files):\n    yield {{'text': '{text}'}}\n"
        (tmp_path / "own_texts.py").write_text(source)
        sys.modules.pop("own_texts", None)
        importlib.invalidate_caches()
        corpora = {"own": importlib.import_module("own_texts").generate}
        rows = common.open_dataset(data_config(dataset="own"), ["text"], corpora)
        assert {*rows["text"]} == {text}  # once for each file


FORMS = ["data.parquet", "data.jsonl", "data.json", "data.txt", "part*.jsonl"]
FORMS += ["data.jsonl.gz", "x.txt.jsonl", "x.json.txt.gz"]


@pytest.mark.parametrize("form", FORMS)
def test_local_files(tmp_path, texts, form):
    """Each kind, compressed, and several. The last suffix counts."""
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
    elif "*" in form:
        for i in range(2):
            table.shard(2, i, contiguous=True).to_json(tmp_path / f"part{i}.jsonl")
    else:
        table.to_json(name, compression="gzip" if form.endswith(".gz") else None)
    assert texts_of(load(name, column)) == lines


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("utf.jsonl", b'{"text": "a\xff"}\n{"text": "b"}\n', "utf-8"),
        ("utf.txt", b"a\xff\nb\n", "utf-8"),
        ("empty.jsonl", b"", "empty|no rows|nothing"),
        ("broken.jsonl.gz", b"no gzip", "[Nn]ot a gzip"),
        ("column.json", b'{"content": "a"}\n', r"has no column text: \['content'\]"),
        ("mixed.json", b'[{"text": "a"}, {"text": ["b"]}]', "cannot be read"),
        ("table.csv", b"text\n007\n", "hub id, .parquet, .jsonl, .json, .txt"),
        ("missing.jsonl", None, "missing.jsonl"),
        ("none*.jsonl", None, r"none\*.jsonl"),
        ("a folder of nothing", None, "a folder of nothing"),
    ],
)
def test_a_corpus_that_cannot_be_read_is_refused_in_one_line(name, content, words, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    line = refused(load, tmp_path / name)
    assert name in line and re.search(words, line) and "StopIteration" not in line


def test_documents_without_text_are_left_out_and_counted(tmp_path, capsys):
    path = tmp_path / "some.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in ["one", None, "", "two"]))
    documents = load(path)
    assert texts_of(documents) == ["one", "two"]
    said = capsys.readouterr().out
    assert "2 documents are left out, because they hold no text" in said
    assert [len(part.lengths) for part in split(documents)] == [1, 1]
    path = tmp_path / "numbers.jsonl"
    path.write_text("".join(json.dumps({"text": n}) + "\n" for n in range(5)))
    line = refused(load, path)
    assert "fewer than two different documents" in line
    assert line.endswith("they hold no text. Its columns are text; docs/data.md lists what is read")


def test_a_hub_dataset_may_pin_a_revision(monkeypatch):
    asked = {}
    monkeypatch.setattr("datasets.load_dataset", lambda name, *_, **more: asked.update(more))
    common.open_dataset(data_config(dataset="a/b", dataset_revision="v1.0"), ["text"], {})
    assert asked["revision"] == "v1.0"


def test_s3(texts, monkeypatch):
    boto3, s3fs = pytest.importorskip("boto3"), pytest.importorskip("s3fs")
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
        for part in (texts[:30], texts[30:50]):  # the second run finds another file
            body = "".join(json.dumps({"text": text}) + "\n" for text in part)
            client.put_object(Bucket="corpus", Key="a/part.jsonl", Body=body.encode())
            s3fs.S3FileSystem.clear_instance_cache()  # as in another process
            assert texts_of(load("s3://corpus/a/part.jsonl")) == part
    finally:
        server.stop()


def test_split_never_overlaps_and_is_stable(tmp_path):
    """The hash of a document alone decides, whatever is beside it and in whatever order."""

    def sides(texts: list[str]) -> list[list[str]]:
        path = tmp_path / f"{common.fingerprint(texts)}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return [texts_of(part) for part in split(load(path))]

    texts = [f"document {i}" for i in range(500)] + ["the same"] * 50 + [""] * 50
    training, validation = sides(texts)
    assert sorted(training + validation) == sorted(filter(None, texts))
    assert not set(training) & set(validation)
    hashes = {text: int(common.fingerprint(text)[:7], 16) / 2**28 for text in texts if text}
    expected = {text for text, fraction in hashes.items() if fraction <= 0.02}
    assert set(validation) == expected and 3 < len(expected) < 20
    shuffled = [texts[i] for i in np.random.default_rng(0).permutation(len(texts))]
    assert sides(shuffled)[1] == validation  # by hash, so in the same order
    fewer = [text for text in texts if text.endswith(("1", "3", validation[0][-1]))]
    assert sides(fewer)[1] == [text for text in validation if text in fewer] != []
    assert [len(part) for part in sides(["one", "two"])] == [1, 1]
    for few in (["one", "one"], ["one", ""]):
        with pytest.raises(common.Refusal, match="fewer than two different documents"):
            sides(few)


# --- Cache ----------------------------------------------------------------------------------------

tokenized: list[str] = []


def counting_tokenizer(document, tokenizer):
    tokenized.append(document["text"])
    return common.tokenize_text(document, tokenizer)


def test_flags_of_the_batch_plan_tokenize_nothing_again(corpus, texts):
    """The cache holds tokens of whole documents, so these flags only change views of them."""
    tokenized.clear()
    seen = []
    for flags in (
        {},
        {"max_length": 70},
        {"max_length": 1000, "micro_batch_tokens": 2048},
        {"batching": "packed"},
        {"batching": "packed", "max_length": 70, "micro_batch_tokens": 4096},
        {"pad_to_multiple_of": 64, "seed": 1},
    ):
        config = data_config(dataset=corpus, **flags)
        tokenizer = common.load_tokenizer("bytes")
        documents = common.load_documents(config, ["text"], counting_tokenizer, tokenizer)
        sequences = all_of(documents).split(config.max_length)
        make_batches(sequences, **flags).plan(0)
        seen.append(int(sequences.lengths.max()))
        assert tokenized == texts
    assert seen[:3] == [512, 70, max(len(text.encode()) for text in texts)]


PREPARE = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import common, datasets
from types import SimpleNamespace

def slow_tokenizer(document, tokenizer):
    with open(log, "a") as file:  # one line for each document
        file.write(".\\n")
    time.sleep(0.002)  # so that the ranks overlap
    return common.tokenize_text(document, tokenizer)

config = SimpleNamespace(dataset=sys.argv[2], dataset_config=None, dataset_split="train")
tokenizer = common.load_tokenizer("bytes")
for group in sys.argv[3:]:  # CACHE=RANKS
    cache, ranks = group.split("=")
    datasets.config.HF_DATASETS_CACHE, log = Path(cache), cache + ".log"
    children = []
    for rank in range(int(ranks)):
        children.append(os.fork())
        if not children[-1]:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": ranks}
            documents = common.load_documents(config, ["text"], slow_tokenizer, tokenizer)
            parts = [part.lengths for part in common.train_validation_split(documents, 1e9)]
            tokens = sum(int(lengths.sum()) for lengths in parts)
            os.write(1, f"{tokens} {[*map(len, parts)]}\\n".encode())
            os._exit(0)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
"""


def test_one_rank_tokenizes(corpus, texts, tmp_path):
    """The cache does not depend on the ranks."""
    program, a, b = tmp_path / "prepare.py", tmp_path / "a", tmp_path / "b"
    program.write_text(PREPARE)

    def files(cache: Path) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in cache.rglob("cache-*.arrow")}

    # The ranks of a group are forked from a process that has prepared nothing itself. Python 3.12
    # and later warn of that, because Arrow has started threads.
    quiet = ["-W", "ignore:This process:DeprecationWarning"]
    command = [sys.executable, *quiet, str(program), str(ROOT)]
    command += [corpus, f"{a}=1", f"{a}=2", f"{b}=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(set(done.stdout.splitlines())) == 1
    for cache in (a, b):
        assert Path(f"{cache}.log").read_text() == ".\n" * len(texts)
    assert len(files(a)) == 1 and files(a) == files(b)


def test_the_end_token_is_in_the_key_of_the_cache(tmp_path, corpus, texts):
    """Also of tokenizers that differ in nothing else."""
    tokenizer = copy.deepcopy(common.load_tokenizer("bytes"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    for name in ("<|endoftext|>", "<|im_end|>"):
        tokenizer.eos_token = name
        tokenizer.save_pretrained(tmp_path / name)
        documents = load(corpus, tokenizer=str(tmp_path / name))
        ends = {int(documents.read(i)[0][-1]) for i in range(len(texts))}
        assert ends == {tokenizer.convert_tokens_to_ids(name)}


# --- Plans ----------------------------------------------------------------------------------------


def lengths_of(number: int, longest: int = 2048) -> np.ndarray:
    rng = np.random.default_rng(1)
    return np.minimum(rng.lognormal(5.5, 1, number).astype(np.int64) + 1, longest)


def plan_epoch(
    lengths: np.ndarray, batching: str, budget: int, multiple: int, seed: int, epoch: int
) -> list[np.ndarray]:
    config = data_config(
        batching=batching, micro_batch_tokens=budget, pad_to_multiple_of=multiple, seed=seed
    )
    return common.Batches(SimpleNamespace(lengths=lengths), config, 0).plan(epoch)


def correlations(values: np.ndarray) -> list[float]:
    """Return the correlation of neighbors, of those two apart and of those five apart."""
    return [abs(np.corrcoef(values[:-lag], values[lag:])[0, 1]) for lag in (1, 2, 5)]


@pytest.mark.parametrize("batching", ["bucketed", "packed"])
@pytest.mark.parametrize("multiple", [1, 64])
def test_an_epoch_loses_and_repeats_nothing_within_the_budget(batching, multiple):
    """Over several windows, in no order of length. Another epoch groups other sequences."""
    length = lengths_of(50_000)
    plans = [plan_epoch(length, batching, 8192, multiple, 0, epoch) for epoch in (0, 1)]
    for plan in plans:
        assert np.array_equal(np.sort(np.concatenate(plan)), np.arange(len(length)))
        for indices in plan:
            longest = -(-length[indices].max() // multiple) * multiple
            used = length[indices].sum() if batching == "packed" else len(indices) * longest
            assert 0 < used <= 8192
        mean = np.array([length[indices].mean() for indices in plan])
        assert max(correlations(mean)) < 0.08
        halves = mean[: len(mean) // 2].mean(), mean[len(mean) // 2 :].mean()
        assert abs(halves[0] / halves[1] - 1) < 0.1
    again = plan_epoch(length, batching, 8192, multiple, 0, 0)
    assert all(np.array_equal(a, b) for a, b in zip(plans[0], again))
    groups = [{frozenset(part.tolist()) for part in plan if len(part) > 1} for plan in plans]
    assert not groups[0] & groups[1]
    other = plan_epoch(length, batching, 8192, multiple, 1, 0)
    assert not np.array_equal(np.concatenate(other), np.concatenate(plans[0]))
    if batching == "packed":
        assert length.sum() / (len(plans[0]) * 8192) >= 0.99
        assert abs(len(plans[0]) - len(plans[1])) <= 2


@pytest.mark.parametrize("batching", ["bucketed", "packed"])
def test_a_sequence_that_no_micro_batch_can_hold_is_an_error(batching):
    """Whoever copies the plan alone has no Config that refuses it, and would wait forever."""
    lengths = np.array([5, 9, 7])
    with pytest.raises(AssertionError, match="a sequence exceeds a micro-batch"):
        plan_epoch(lengths, batching, 8, 1, 0, 0)


def embedded(corpus: str) -> common.Sequences:
    """Return the training sequences of an embedded corpus, as the scripts read it by default."""
    if corpus == "stdlib":
        return split(load(corpus))[0].split(512)
    tokenizer, *_ = conversations.chat_tokenizer(fsdp2_sft.Config(), "new tokens")
    documents = common.load_documents(
        data_config(dataset=corpus),
        ["prompt", "completion", "system"],
        fsdp2_sft.tokenize_conversation,
        tokenizer,
        conversations.CORPORA,
    )
    return conversations.truncate(common.train_validation_split(documents, math.inf)[0], 2048)


@pytest.mark.parametrize(
    "corpus, max_length, times",
    [
        ("stdlib", 512, 8),
        pytest.param("stdlib-docstrings", 2048, 4, marks=pytest.mark.drill),
    ],
)
def test_embedded_corpora_fill_the_budget_with_little_padding(corpus, max_length, times):
    """At most 1 % is padding, and at least 94 % of the budget is tokens (packed: 99 %)."""
    sequences, budget = embedded(corpus), times * max_length
    length = sequences.lengths
    made = make_batches(sequences, max_length=max_length, micro_batch_tokens=budget)
    for epoch in (0, 1):
        plan = made.plan(epoch)
        tokens = sum(int(length[part].sum()) for part in plan)
        assert tokens == length.sum() > 10**6
        positions = [np.prod(made.shape(part)) for part in plan]
        assert max(positions) <= budget
        assert 1 - tokens / sum(positions) <= 0.01
        assert tokens / (len(plan) * budget) >= 0.94
        assert max(correlations(np.array([length[part].mean() for part in plan]))) < 0.1
        packed = plan_epoch(length, "packed", budget, 1, 0, epoch)
        assert tokens / (len(packed) * budget) >= 0.99


def first_principles_best_fit(length: list[int], capacity: int) -> list[int]:
    """Return the free space of each bin after best-fit decreasing, one item at a time."""
    free: list[int] = []
    for size in sorted(length, reverse=True):
        fitting = [i for i, space in enumerate(free) if space >= size]
        if fitting:
            free[min(fitting, key=lambda i: free[i])] -= size
        else:
            free.append(capacity - size)
    return sorted(free)


@pytest.mark.parametrize("capacity, longest", [(100, 100), (100, 30), (64, 64), (1000, 90)])
def test_packing_is_best_fit_decreasing(capacity, longest):
    """400 sequences are one window."""
    length = np.random.default_rng(capacity + longest).integers(1, longest + 1, 400)
    plan = plan_epoch(length, "packed", capacity, 1, 5, 0)
    assert sorted(np.concatenate(plan).tolist()) == [*range(400)]
    free = sorted(capacity - int(length[part].sum()) for part in plan)
    assert free == first_principles_best_fit(length.tolist(), capacity)


def test_an_epoch_is_planned_with_a_python_step_per_micro_batch_not_per_document():
    """Lines run and objects kept are counted. bench/padding.py measures the seconds."""
    length, lines = lengths_of(1_000_000), 0

    def count(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        return count if "common" in frame.f_code.co_filename else None

    sys.settrace(count)
    try:
        plan = plan_epoch(length, "bucketed", 16384, 1, 0, 0)
    finally:
        sys.settrace(None)
    assert lines < 8 * len(plan) < len(length) / 4
    assert len(plan) < length.sum() / 16384 / 0.94

    tracemalloc.start(1)
    plan = plan_epoch(length, "bucketed", 16384, 1, 0, 0)
    peak = tracemalloc.get_traced_memory()[1]
    objects = len(tracemalloc.take_snapshot().traces)
    tracemalloc.stop()
    assert objects < 6 * len(plan)  # not one per document
    assert peak < 60 * len(length)  # bytes: a few arrays of 8 bytes per document


# --- Batches --------------------------------------------------------------------------------------


def contents(micro_batches) -> list[tuple]:
    """Return micro-batches as something that can be compared and sorted."""
    return [
        tuple(batch[name].numpy().tobytes() for name in ("input_ids", "labels"))
        for batch in micro_batches
    ]


def position(made: common.Batches, order: list, step: int) -> int:
    """Return the target tokens of so many steps of 8 micro-batches."""
    seen = np.concatenate([np.zeros(0, int), *order[: 8 * step]])
    return int(made.sequences.num_targets[seen].sum())


def order_of(made: common.Batches, epochs: int) -> list[np.ndarray]:
    """Return the micro-batches of the first epochs, in the order of the stream."""
    return sum((made.plan(epoch) for epoch in range(epochs)), [])


@pytest.mark.parametrize("batching", ["bucketed", "packed"])
def test_global_batches_do_not_depend_on_the_number_of_ranks(batches, batching):
    """1, 2 and 4 ranks together have the same micro-batches, equally many each, and one count."""

    def step(made, dp_size: int) -> list:
        chosen = order_of(made, 1)[24:32]
        parts = [made.global_batch(chosen, rank, dp_size) for rank in range(dp_size)]
        assert {len(part.micro_batches) for part in parts} == {8 // dp_size}
        [numbers] = {
            (p.num_targets, p.num_tokens, p.squared_lengths, p.padding_fraction) for p in parts
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
@pytest.mark.parametrize("kind", [np.uint8, np.uint32, np.int64])
def test_labels_do_not_depend_on_the_type_of_the_ids(kind, batching):
    """The `read` of `Sequences` gives int64. An own one may give what a tokenizer gave."""
    lengths = np.array([3, 2])
    documents = [
        (np.array([10, 11, 12, 13], kind), np.array([True, False, True, False])),
        (np.array([20, 21, 255], kind), np.array([False, False, True])),
    ]
    sequences = SimpleNamespace(lengths=lengths, num_targets=lengths, read=documents.__getitem__)
    made = make_batches(sequences, batching=batching, max_length=4, micro_batch_tokens=6)
    micro_batch = made.collate(np.array([0, 1]))
    expected = [-100, 12, -100, -100, 255, -100]
    assert micro_batch["labels"].dtype == micro_batch["input_ids"].dtype == torch.int64
    assert micro_batch["labels"].flatten().tolist() == expected
    padding = [256]
    assert micro_batch["input_ids"].flatten().tolist() == [10, 11, 12, 20, 21, *padding]


def test_attention_of_a_long_sequence_is_counted():
    """The square of its length does not fit into 32 bits, as the lengths in the index do."""
    length = np.array([70_000], np.int32)
    sequences = SimpleNamespace(lengths=length, num_targets=length, read=lambda _: one_sequence)
    one_sequence = np.zeros(70_001, int), np.ones(70_001, bool)
    made = make_batches(sequences, max_length=70_000, micro_batch_tokens=70_000)
    assert made.global_batch([np.array([0])], 0, 1).squared_lengths == 4_900_000_000


@pytest.mark.parametrize("batching", ["bucketed", "packed"])
def test_steps_and_tokens_are_the_position_in_the_data(batches, batching, monkeypatch):
    """A stream may begin anywhere, its steps may span two epochs, and it plans no earlier epoch."""
    made, planned = batches(batching), []
    plan = made.plan
    epoch = len(plan(0))
    order = order_of(made, 4)
    assert sorted(np.concatenate(order[:epoch])) == [*range(len(made.sequences.lengths))]
    monkeypatch.setattr(made, "plan", lambda n: planned.append(int(n)) or plan(n))
    for step in (0, epoch // 8, epoch // 8 + 1, 2 * epoch // 8, 3 * epoch // 8):
        planned.clear()
        batch = next(made.stream(position(made, order, step), 8, 0, 1))
        expected = contents(map(made.collate, order[8 * step : 8 * step + 8]))
        assert contents(batch.micro_batches) == expected
        before = next(n for n in range(4) if 8 * step < sum(len(plan(e)) for e in range(n + 1)))
        assert planned[0] == before and len(planned) <= 2  # the next step is prepared, too


def test_stream_yields_the_steps_in_order_and_raises_errors(batches, monkeypatch):
    """A stream that is closed early ends its thread."""
    made = batches()
    order = order_of(made, 1)
    expected = [contents(map(made.collate, order[8 * s + 1 : 8 * s + 8 : 2])) for s in range(2, 6)]
    stream = itertools.islice(made.stream(position(made, order, 2), 4, 1, 2), 4)
    assert [contents(batch.micro_batches) for batch in stream] == expected
    before = threading.active_count()
    left = made.stream(0, 8, 0, 1)
    next(left)
    left.close()
    assert threading.active_count() == before

    def fail(*arguments):
        raise OSError("disk gone")

    monkeypatch.setattr(made, "global_batch", fail)
    with pytest.raises(OSError, match="disk gone"):
        next(made.stream(0, 8, 0, 1))


@pytest.mark.parametrize("batching", ["bucketed", "packed"])
def test_evaluation_does_not_depend_on_the_number_of_ranks(batches, batching):
    """Each rank gets equally many micro-batches, and no sequence comes twice."""
    made = batches(batching)
    number = len(made.plan(0))

    def seen(dp_size: int) -> list:
        parts = [[*made.evaluation(rank, dp_size)] for rank in range(dp_size)]
        assert {len(part) for part in parts} == {-(-number // dp_size)}
        return sorted(contents(b for part in parts for b in part if (b["labels"] >= 0).any()))

    assert len(seen(1)) == number
    assert seen(1) == seen(2) == seen(3) == seen(4)


def test_bits_per_byte_count_each_document_once(corpus, texts):
    """Whatever the tokens and the pieces: the bits of all predictions, over the bytes of text."""
    logged = []
    run = SimpleNamespace(log=logged.append)
    for max_length in (64, 512):
        made = make_batches(split(load(corpus))[1].split(max_length), max_length=max_length)
        Run.log_validation(run, 3, 2.0, made.bytes_per_target())
    held_out = texts_of(split(load(corpus))[1])
    num_bytes = sum(len(text.encode()) for text in held_out)
    # The bytes of a text and its end token are as many predictions as the text has bytes.
    assert num_bytes == made.sequences.num_targets.sum() > 64 * len(held_out)
    for line in logged:
        assert line["validation_bits_per_byte"] == pytest.approx(2.0 / math.log(2))
        assert line["validation_perplexity"] == math.exp(2.0)


@pytest.mark.parametrize("batching", ["bucketed", "packed"])
def test_compiled_blocks_see_few_shapes(batches, batching):
    """With --pad_to_multiple_of, over several epochs. No target token is lost by it."""
    made = batches(batching, budget=2048, multiple=64)
    shapes, targets = {}, 0
    for indices in order_of(made, 4):
        batch = made.collate(indices)
        shape = tuple(t.shape for t in batch.values() if torch.is_tensor(t))
        width = batch["input_ids"].shape[1]
        assert width % 64 == 0 and batch["input_ids"].numel() <= 2048
        shapes.setdefault(width, set()).add(shape)
        targets += int((batch["labels"] >= 0).sum())
    assert targets == 4 * made.sequences.num_targets.sum()
    # Packed, the number of boundaries is a power of two: at most 11 of them up to 2,048.
    assert max(map(len, shapes.values())) <= (4 if batching == "packed" else 1)
    assert len(shapes) <= (1 if batching == "packed" else 512 // 64)


# --- Attention: what a document's tokens see ------------------------------------------------------


@pytest.fixture(scope="module")
def models(weights_directory):
    """Return the same weights with transformers' plain attention, with SDPA, and with ours."""
    AttentionInterface.register("documents", document_attention)
    load = Qwen2ForCausalLM.from_pretrained
    return {
        kind: load(weights_directory, dtype=torch.float32, attn_implementation=kind)
        for kind in ("eager", "sdpa", "documents")
    }


@torch.no_grad()
def validate(models, corpus: str, eval_tokens: float, **flags) -> tuple[list, int, float]:
    """Return documents, target tokens and the mean loss of a model, as the scripts validate."""
    _, held_out = split(load(corpus), eval_tokens)
    made = make_batches(held_out.split(flags.get("max_length", 64)), **{"max_length": 64} | flags)
    model = models["documents" if made.config.batching == "packed" else "sdpa"]
    total = torch.zeros(2, dtype=torch.float64)
    for batch in made.evaluation(0, 1):
        labels = batch.pop("labels").flatten()
        logits = model(**batch, use_cache=False).logits.flatten(0, 1)
        total[0] += torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        total[1] += (labels >= 0).sum()
    documents = sorted(set(made.sequences.index.document.tolist()))
    return documents, int(total[1]), (total[0] / total[1]).item()


def test_all_runs_validate_on_the_same_documents(models, corpus, texts):
    """So that their validation losses can be compared, whatever the seed and the batches are."""
    documents, targets, loss = validate(models, corpus, 1200)
    assert targets == sum(len(texts[i].encode()) for i in documents) >= 1200
    every, *_ = validate(models, corpus, math.inf)
    assert set(documents) < set(every)  # the first by hash, and no more than it takes
    assert split(load(corpus), 1200)[1].lengths[:-1].sum() < 1200
    for flags in (
        {"seed": 5},
        {"micro_batch_tokens": 4096},
        {"batching": "packed"},
        {"batching": "packed", "seed": 1, "micro_batch_tokens": 64},
        {"pad_to_multiple_of": 64},
    ):
        assert validate(models, corpus, 1200, **flags) == (
            documents, targets, pytest.approx(loss, rel=1e-6),
        )  # fmt: skip
    for max_length in (7, 512):  # the context of a prediction changes, but not what is predicted
        assert validate(models, corpus, 1200, max_length=max_length)[:2] == (documents, targets)
    training = [split(load(corpus), n)[0].index.document.tolist() for n in (1200, math.inf)]
    assert training[0] == training[1]


@pytest.mark.parametrize(
    "batching, multiple", [("bucketed", 1), ("bucketed", 64), ("packed", 1), ("packed", 64)]
)
@torch.no_grad()
def test_logits_of_a_document_equal_those_of_the_document_alone(
    batches, models, batching, multiple
):
    """Packed: no leak between documents. Bucketed: right padding needs no mask."""
    packed = batching == "packed"
    model = models["documents" if packed else "sdpa"]
    made = batches(batching, budget=2048, multiple=multiple)
    checked = 0
    for indices in made.plan(0)[:4]:
        batch = made.collate(indices)
        labels, column = batch.pop("labels"), 0
        if packed:
            boundaries = batch["cu_seq_lens_q"]
            lengths = boundaries.diff()
            assert 0 <= lengths.min() and lengths.max() <= batch["max_length_q"]
            assert (boundaries[0], boundaries[-1]) == (0, 2048)
        logits = model(**batch, use_cache=False).logits
        for row, index in enumerate(indices):
            ids = torch.from_numpy(made.sequences.read(index)[0].astype(np.int64))
            length = len(ids) - 1
            place = (0, slice(column, column + length)) if packed else (row, slice(0, length))
            column += length
            assert torch.equal(labels[place], ids[1:])
            expected = models["eager"](input_ids=ids[None, :-1]).logits[0]
            torch.testing.assert_close(logits[place], expected, rtol=1e-4, atol=1e-5)
            checked += 1
        assert (labels >= 0).sum() == made.sequences.lengths[indices].sum()
    assert checked > 10


@pytest.mark.parametrize(
    "asked",
    [
        {"attention_mask": torch.ones(1, 1, 8, 8)},
        {"s_aux": torch.zeros(4)},
        {"sliding_window": 3},
    ],
    ids=lambda asked: [*asked][0],
)
def test_packed_attention_refuses_what_it_does_not_apply(asked):
    """And accepts a window that no document is longer than."""
    query, key, value = torch.randn(3, 1, 4, 8, 16)
    boundaries = torch.tensor([0, 4, 8], dtype=torch.int32)
    known = {"attention_mask": None, "cu_seq_lens_q": boundaries, "max_length_q": 4}
    with pytest.raises(ValueError, match="packed attention has no mask, no sinks and no sliding"):
        document_attention(None, query, key, value, **known | asked)
    document_attention(None, query, key, value, **known, sliding_window=4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="variable-length kernels need CUDA")
def test_variable_length_kernels_equal_attention_one_by_one():
    torch.manual_seed(0)
    shape = {"q": (1, 8, 512, 64), "k": (1, 2, 512, 64), "v": (1, 2, 512, 64)}
    q, k, v = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shape.values())
    limits = torch.tensor([0, 5, 200, 201, 512, 512, 512], dtype=torch.int32, device="cuda")
    got, _ = document_attention(None, q, k, v, None, 0.125, limits, 512)
    expected = attend_one_by_one(q, k, v, limits, 0.125)
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("largest", "bits"), [(255, 8), (256, 16), (65535, 16), (65536, 32)])
def test_the_cache_holds_ids_in_the_smallest_type(tmp_path, monkeypatch, largest, bits):
    """Tokenizers can skip ids, so the number of tokens is not enough."""
    tokenizer = copy.deepcopy(common.load_tokenizer("bytes"))
    monkeypatch.setattr(tokenizer, "get_vocab", lambda: {"a": 0, "z": largest}, raising=False)
    path = tmp_path / "some.txt"
    path.write_text(f"{largest}\nb\n")

    config = data_config(dataset=str(path))
    documents = all_of(common.load_documents(config, ["text"], largest_id_first, tokenizer))
    column = documents.documents.data.column("tokens")
    assert column.type.value_type.bit_width == bits
    assert documents.read(0)[0].tolist() == [largest, 0, 1] == documents.read(1)[0].tolist()


def largest_id_first(row: dict, tokenizer) -> tuple:
    largest = max(tokenizer.get_vocab().values())
    return np.array([largest, 0, 1]), np.ones(3, bool), row["text"], 1


def test_pieces_are_read_from_any_record_batch(tmp_path):
    """A corpus of a terabyte has thousands; `read` finds a piece by the number of its document."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 9, 3000)
    documents = [rng.integers(0, 300, length).astype(np.uint32) for length in lengths]
    with ArrowWriter(path=str(tmp_path / "many.arrow"), writer_batch_size=1) as writer:
        for tokens in documents:
            writer.write({"tokens": tokens, "in_loss": tokens % 2 == 0})
        writer.finalize()
    stored = datasets.Dataset.from_file(str(tmp_path / "many.arrow"))
    assert stored.data["tokens"].num_chunks == 3000
    index = np.rec.fromarrays(
        [np.arange(3000), np.zeros(3000, int), lengths - 1, lengths - 1],
        names="document,start,lengths,num_targets",
    )
    pieces = common.Sequences(stored, index).split(3)
    for i in rng.permutation(len(pieces.lengths))[:500]:
        tokens, in_loss = pieces.read(i)
        found = pieces.index[i]
        expected = documents[found.document][found.start : found.start + 4]
        assert tokens.dtype == np.int64 and tokens.tolist() == expected.tolist()
        assert in_loss.dtype == bool and in_loss.tolist() == (expected % 2 == 0).tolist()
