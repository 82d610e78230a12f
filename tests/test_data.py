"""Data side: tokenizers, cache, split, plans, collate, attention within documents."""

import itertools
import json
import os
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, RUN_FLAGS, Config, launch, metrics
from transformers import (
    AttentionInterface,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2ForCausalLM,
)

import common

CPU = torch.device("cpu")
TRICKY = [
    "def f(x):\n\treturn x  # comment\n",
    "naïve café — 漢字 🙂 \u200d",
    "before <|endoftext|> after",
    "1234567 12 12345",
    "   leading, trailing   ",
    "I'll don't WE'RE",
    "\r\n\r\n mixed \n\n\n newlines",
]


@pytest.fixture(scope="module")
def batches(corpus):
    """A function: training batches of the small corpus under some flags."""

    def make(**flags):
        config = Config(dataset=corpus, **flags)
        documents = common.Documents(common.tokenize_corpus(config))
        training, _ = common.split_by_content(documents.digest)
        return common.Batches(documents, training, config, CPU, padding=256)

    return make


# --- Tokenizers


def odd_encoding():
    """A tiktoken encoding with the regex of cl100k_base, merges and a gap before a special id."""
    import tiktoken

    ranks = {bytes([value]): value for value in range(256)}
    for token in (b"12", b"123", b"re", b"ret", b"  ", b"\n\n", b"caf"):
        ranks[token] = len(ranks)
    pattern = (
        r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"""
        r"""| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"""
    )
    special = {"<|endoftext|>": len(ranks) + 2, "<|other|>": len(ranks) + 5}
    return tiktoken.Encoding("odd", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


@pytest.mark.parametrize("name", ["bytes", "gpt2", "odd"])
def test_tokenizer_and_its_export_give_the_ids_of_tiktoken(name, request, tmp_path, texts):
    if name == "gpt2":
        request.getfixturevalue("gpt2_vocabulary")
    tokenizer = common.TiktokenTokenizer("bytes" if name == "odd" else name)
    if name == "odd":
        encoding = odd_encoding()
        tokenizer.name, tokenizer.encoding = "odd", encoding
        tokenizer.vocab_size, tokenizer.end_of_text = encoding.n_vocab, encoding.eot_token
    samples = TRICKY + texts[:50]
    expected = [tokenizer.encoding.encode_ordinary(text) for text in samples]
    for threads in (1, 4):
        got = tokenizer.encode_batch(samples, threads=threads)
        assert [ids.tolist() for ids in got] == expected
    tokenizer.to_transformers().save_pretrained(tmp_path)
    exported = AutoTokenizer.from_pretrained(tmp_path)
    assert exported.eos_token_id == tokenizer.end_of_text
    assert len(exported) == tokenizer.vocab_size
    got = [exported(text)["input_ids"] for text in samples]
    assert got == expected
    for text, ids in zip(samples, expected):
        assert exported.decode(ids) == text
    loaded = common.HuggingFaceTokenizer(str(tmp_path))  # and back in again
    assert [ids.tolist() for ids in loaded.encode_batch(samples)] == expected
    assert (loaded.vocab_size, loaded.end_of_text) == (tokenizer.vocab_size, tokenizer.end_of_text)


def test_end_of_text_in_a_text_stays_text(gpt2_vocabulary):
    ids = common.TiktokenTokenizer("gpt2").encode_batch(["a <|endoftext|> b"])[0]
    assert 50256 not in ids and len(ids) > 5
    assert common.TiktokenTokenizer("gpt2").end_of_text == 50256


# --- Corpus and cache


def test_documents_are_the_texts_with_one_end_token_in_the_smallest_type(corpus, texts):
    documents = common.Documents(common.tokenize_corpus(Config(dataset=corpus)))
    assert len(documents.lengths) == len(texts)
    for i, text in enumerate(texts):
        ids = documents.tokens(i, 0, documents.lengths[i])
        assert ids.dtype == np.uint16
        assert ids.tolist() == [*text.encode(), 256]
        assert documents.bytes[i] == len(text.encode())


def test_stdlib_corpus_holds_the_functions_of_the_standard_library():
    import inspect
    import textwrap

    found = {d["text"] for d in common.standard_library_documents([textwrap.__file__], "")}
    assert inspect.getsource(textwrap.dedent) in found
    assert inspect.getsource(textwrap.TextWrapper) in found


@pytest.mark.parametrize("form", ["parquet", "jsonl", "json", "txt", "glob", "jsonl.gz"])
def test_local_files(tmp_path, texts, form):
    import datasets

    lines = [" ".join(text.split()) for text in texts[:40]]  # .txt: one document a line
    table = datasets.Dataset.from_dict({"content": lines, "other": range(40)})
    name, column = tmp_path / f"data.{form}", "content"
    if form == "parquet":
        table.to_parquet(name)
    elif form == "txt":
        name.write_text("\n".join(lines))
        column = "text"
    elif form == "glob":
        for i in range(2):
            table.shard(2, i, contiguous=True).to_json(tmp_path / f"part{i}.jsonl")
        name = tmp_path / "part*.jsonl"
    elif form == "jsonl.gz":
        table.to_json(name, compression="gzip")
    else:
        table.to_json(name)
    config = Config(dataset=str(name), text_column=column)
    documents = common.Documents(common.tokenize_corpus(config))
    kept = [line for line in lines if line]
    assert [bytes(documents.tokens(i, 0, n - 1).astype(np.uint8)).decode()
            for i, n in enumerate(documents.lengths)] == kept  # fmt: skip


def test_s3(tmp_path, texts, monkeypatch):
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
        config = Config(dataset="s3://corpus/a/part.jsonl")
        documents = common.Documents(common.tokenize_corpus(config))
        assert documents.lengths.tolist() == [len(text.encode()) + 1 for text in texts[:30]]
    finally:
        server.stop()


def test_second_run_tokenizes_nothing_and_the_cache_does_not_depend_on_ranks(corpus, tmp_path):
    """1 and 2 ranks fill fresh caches with the same bytes; a further run changes nothing."""
    program = tmp_path / "prepare.py"
    program.write_text(
        "import sys, torch, torch.distributed as dist\n"
        f"sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n"
        "import common, conftest\n"
        "def main():\n"
        "    dist.init_process_group('gloo')\n"
        f"    config = conftest.Config(dataset={corpus!r})\n"
        "    tokenizer, training, _ = common.load_batches(config, torch.device('cpu'))\n"
        "    print(training.pieces.length.sum())\n"
        "    dist.barrier()\n"
        "    dist.destroy_process_group()\n"
        "common.launch(main)\n"
    )

    def prepare(ranks: int, cache: Path) -> dict[str, tuple[bytes, int]]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={ranks}", str(program)]
        environment = os.environ | {"HF_HOME": str(cache), "HF_DATASETS_CACHE": str(cache)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert len(set(done.stdout.split())) == 1
        files = sorted(cache.rglob("cache-*.arrow"))
        return {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in files}

    first = prepare(1, tmp_path / "a")
    assert len(first) == 1
    assert prepare(1, tmp_path / "a") == first
    assert prepare(2, tmp_path / "a") == first
    [[one, _]], [[two, _]] = first.values(), prepare(2, tmp_path / "b").values()
    assert one == two


def test_split_never_overlaps_and_is_stable():
    rng = np.random.default_rng(0)
    digest = rng.integers(0, 2**63, 1000).astype(np.uint64)
    digest[::10] = digest[0]  # the same document a hundred times
    training, validation = common.split_by_content(digest)
    assert len(training) + len(validation) == 1000
    assert not set(digest[training]) & set(digest[validation])
    shuffled = rng.permutation(1000)
    other = common.split_by_content(digest[shuffled])[1]
    assert set(digest[shuffled][other]) == set(digest[validation])
    assert [len(part) for part in common.split_by_content(digest[1:3])] == [1, 1]
    with pytest.raises(common.InputError, match="a second document .* is needed"):
        common.split_by_content(digest[:1])


# --- Plans


def lengths_of(number: int, longest: int = 2048) -> np.ndarray:
    rng = np.random.default_rng(1)
    return np.minimum(rng.lognormal(5.5, 1, number).astype(np.int64) + 1, longest)


def test_pieces_cover_every_prediction_once():
    tokens = np.array([1, 2, 5, 11, 12, 31])
    documents = SimpleNamespace(lengths=np.repeat(tokens, 10))
    pieces = common.cut_into_pieces(documents, np.arange(6) * 10, 10)
    predicted = [
        (document, target)
        for document, start, length in zip(pieces.document, pieces.start, pieces.length)
        for target in range(start + 1, start + length + 1)
    ]
    expected = [(i * 10, t) for i, n in enumerate(tokens) for t in range(1, n)]
    assert sorted(predicted) == expected
    assert pieces.length.max() <= 10 and pieces.length.min() >= 1


EDGES = [64, 128, 256, 512, 1024, 2048]


def test_bucketed_epoch_loses_and_repeats_nothing_within_the_budget():
    length = lengths_of(20_000)
    plan = common.plan_bucketed(length, EDGES, 8192, np.random.default_rng(0))
    micro = [plan.order[a:b] for a, b in zip(plan.start, plan.stop)]
    assert sorted(np.concatenate(micro).tolist()) == list(range(len(length)))
    for pieces in micro:
        edge = EDGES[np.searchsorted(EDGES, length[pieces].max())]
        assert 0 < len(pieces) <= 8192 // edge
        assert np.searchsorted(EDGES, length[pieces]).std() == 0  # one bucket
    positions = sum(len(pieces) * length[pieces].max() for pieces in micro)
    assert 1 - length.sum() / positions < 0.03  # padding
    mean = np.array([length[pieces].mean() for pieces in micro])
    for lag in (1, 2, 5):
        assert abs(np.corrcoef(mean[:-lag], mean[lag:])[0, 1]) < 0.08
    halves = mean[: len(mean) // 2].mean(), mean[len(mean) // 2 :].mean()
    assert abs(halves[0] / halves[1] - 1) < 0.1


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


@pytest.mark.parametrize("most", [1, 2, 3, 4])
@pytest.mark.parametrize("micro, longest", [(64, 30), (100, 100), (20, 9)])
def test_chosen_edges_leave_the_least_unused(micro, longest, most):
    """The oracle tries every set of edges that ends with the longest row."""
    length = np.random.default_rng(micro).geometric(0.08, 200).clip(1, longest)
    length[0] = longest

    def used(edges) -> float:
        edge = np.array(edges)[np.searchsorted(edges, length)]
        return (micro / (micro // edge)).sum()

    others = [
        [*some, longest]
        for number in range(most)
        for some in itertools.combinations(range(1, longest), number)
        if number < 3 or longest < 40
    ]
    edges = common.choose_edges(length, micro, most)
    assert edges == sorted(set(edges)) and edges[-1] == longest and len(edges) <= most
    assert used(edges) <= min(map(used, others)) + 1e-6


def test_auto_edges_are_settled_by_the_data_and_resumable(corpus, tmp_path):
    flags = RUN_FLAGS | {"dataset": corpus, "run_dir": tmp_path, "bucket_edges": ["auto", 300]}
    for steps in (2, 3):
        done = launch(2, "ddp_pretrain", flags | {"steps": steps})
        assert (done.returncode, done.stderr) == (0, "")
    edges = json.loads((tmp_path / "config.json").read_text())["flags"]["bucket_edges"]
    assert 4 < len(edges) <= 12 and edges[-1] == 300
    assert [line["step"] for line in metrics(tmp_path)[0]] == [1, 2, 3]


@pytest.mark.parametrize("capacity, longest", [(100, 100), (100, 30), (64, 64), (1000, 90)])
def test_packing_is_best_fit_decreasing(capacity, longest):
    rng = np.random.default_rng(capacity + longest)
    length = rng.integers(1, longest + 1, 400)
    plan = common.plan_packed(length, capacity, rng)
    rows = [plan.order[a:b] for a, b in zip(plan.start, plan.stop)]
    assert sorted(np.concatenate(rows).tolist()) == list(range(400))
    free = sorted(capacity - int(length[row].sum()) for row in rows)
    assert free[0] >= 0
    assert free == first_principles_best_fit(length.tolist(), capacity)


def test_packed_epoch_has_little_padding_and_as_many_rows_every_time():
    length = lengths_of(20_000)
    plans = [common.plan_packed(length, 8192, np.random.default_rng(seed)) for seed in (0, 1)]
    assert len(plans[0].start) == len(plans[1].start)
    assert 1 - length.sum() / (len(plans[0].start) * 8192) < 0.01
    assert not np.array_equal(plans[0].order, plans[1].order)
    mean = [length[plans[0].order[a:b]].mean() for a, b in zip(plans[0].start, plans[0].stop)]
    assert abs(np.corrcoef(mean[:-1], mean[1:])[0, 1]) < 0.15


def test_an_epoch_of_ten_million_documents_is_planned_in_a_few_numpy_passes(record_property):
    """Time and memory are printed; the bound on Python objects is what can fail."""
    length = lengths_of(10_000_000)
    for plan in (
        lambda: common.plan_bucketed(length, EDGES, 16384, np.random.default_rng(0)),
        lambda: common.plan_packed(length, 16384, np.random.default_rng(0)),
    ):
        tracemalloc.start(1)
        began = time.perf_counter()
        result = plan()
        seconds = time.perf_counter() - began
        peak = tracemalloc.get_traced_memory()[1]
        objects = len(tracemalloc.take_snapshot().traces)
        tracemalloc.stop()
        print(f"{seconds:.1f} s, {peak / 2**20:,.0f} MiB at most, {objects} objects kept")
        assert len(result.order) == len(length)
        assert objects < 1000  # not one a document
        assert peak < 100 * len(length)  # bytes: a dozen arrays of 8 bytes a document


@pytest.mark.parametrize("batching", ["bucketed", "packed"])
def test_global_batches_do_not_depend_on_the_world_size(batches, monkeypatch, batching):
    def step(made, ranks: int) -> set[bytes]:
        rows = []
        for rank in range(ranks):
            monkeypatch.setattr(common, "rank", lambda rank=rank: rank)
            monkeypatch.setattr(common, "world_size", lambda: ranks)
            rows += [
                batch["labels"].numpy().tobytes() for batch in made.global_batch(3).micro_batches
            ]
        return sorted(rows)

    made = batches(batching=batching)
    assert step(made, 1) == step(made, 2) == step(made, 4)
    assert step(batches(batching=batching, seed=1), 1) != step(made, 1)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_run_alike_micro_batches_at_a_time_and_as_much_in_all(ranks):
    costs = np.random.default_rng(0).integers(1000, 4000, 32).tolist()
    hands = [[costs[i] for i in hand] for hand in common.deal(costs, ranks)]
    turns = [sorted(turn, reverse=True) for turn in zip(*hands)]
    assert sum(turns, []) == sorted(costs, reverse=True)
    totals = [sum(hand) for hand in hands]
    assert max(totals) - min(totals) < 0.01 * sum(totals) / ranks


def test_ranks_run_micro_batches_of_like_cost_at_the_same_time(batches, monkeypatch):
    """Cost: products with weights over all positions, attention over the square of each length."""
    made, seen = batches(), {0: [], 1: []}

    def cost(batch) -> int:
        lengths = (batch["labels"] != common.IGNORED).sum(1)
        return 4096 * batch["labels"].numel() + int((lengths**2).sum())

    monkeypatch.setattr(common, "world_size", lambda: 2)
    for rank in seen:
        monkeypatch.setattr(common, "rank", lambda rank=rank: rank)
        steps = (made.global_batch(step).micro_batches for step in range(10))
        seen[rank] = [[cost(batch) for batch in micro_batches] for micro_batches in steps]
    for hands in zip(*seen.values()):
        in_time = sum((sorted(turn, reverse=True) for turn in zip(*hands)), [])
        assert in_time == sorted(in_time, reverse=True)
        assert len(set(in_time)) > 1


def test_stream_hands_out_the_steps_in_order_and_passes_errors_on(batches, monkeypatch):
    made = batches()
    for step, batch in zip(range(2, 6), made.stream(2, 6)):
        assert batch.labels == made.global_batch(step).labels

    def fail(step):
        raise OSError("disk gone")

    monkeypatch.setattr(made, "global_batch", fail)
    with pytest.raises(OSError, match="disk gone"):
        next(made.stream(0, 1))


def test_evaluation_is_the_same_whatever_the_ranks_and_gives_each_as_many(batches, monkeypatch):
    def seen(ranks: int) -> tuple[list[bytes], set[int]]:
        labels, counts = [], set()
        for rank in range(ranks):
            monkeypatch.setattr(common, "rank", lambda rank=rank: rank)
            monkeypatch.setattr(common, "world_size", lambda: ranks)
            mine = [batch["labels"] for batch in made.evaluation(5)]
            labels += [m.numpy().tobytes() for m in mine if (m != common.IGNORED).any()]
            counts.add(len(mine))
        return sorted(labels), counts

    made = batches()
    one, two, four = seen(1), seen(2), seen(4)
    assert one[0] == two[0] == four[0] and len(one[0]) == 5
    assert (one[1], two[1], four[1]) == ({5}, {3}, {2})


def test_compiled_blocks_see_few_shapes(batches):
    for batching in ("bucketed", "packed"):
        made = batches(batching=batching, compile=True)
        shapes = {
            tuple(t.shape for t in batch.values() if torch.is_tensor(t))
            for step in range(10)
            for batch in made.global_batch(step).micro_batches
        }
        assert len(shapes) <= (len(made.edges) if batching == "bucketed" else 1)


# --- Attention: what a document's tokens see


@pytest.fixture(scope="module")
def models(weights_directory):
    """The same weights with transformers' own attention, and with ours."""
    AttentionInterface.register("documents", common.document_attention)
    kinds = ("eager", "documents")
    load = Qwen2ForCausalLM.from_pretrained
    return [load(weights_directory, dtype=torch.float32, attn_implementation=k) for k in kinds]


@pytest.mark.parametrize(
    "flags", [{}, {"batching": "packed"}, {"batching": "packed", "compile": True}]
)
@torch.no_grad()
def test_logits_of_a_document_equal_those_of_the_document_alone(batches, models, flags):
    """Packed: no leak between documents. Bucketed: right padding needs no mask."""
    alone, ours = models
    made = batches(micro_batch_tokens=2048, **flags)
    checked = 0
    for number in range(4):
        pieces = made.micro_batch(number)
        batch = made.collate(pieces)
        labels = batch.pop("labels")
        logits = ours(**batch, use_cache=False).logits
        column = 0
        for row, piece in enumerate(pieces):
            start, length = made.pieces.start[piece], made.pieces.length[piece]
            ids = made.documents.tokens(made.pieces.document[piece], start, start + length + 1)
            ids = torch.from_numpy(ids.astype(np.int64))
            place = (0, slice(column, column + length)) if made.packed else (row, slice(0, length))
            column += length
            assert torch.equal(labels[place], ids[1:])
            expected = alone(input_ids=ids[None, :-1]).logits[0]
            torch.testing.assert_close(logits[place], expected, rtol=1e-4, atol=1e-5)
            checked += 1
        assert (labels != common.IGNORED).sum() == made.pieces.length[pieces].sum()
    assert checked > 10


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="variable-length kernels need CUDA")
def test_variable_length_kernels_equal_attention_document_by_document():
    torch.manual_seed(0)
    shape = {"q": (1, 8, 512, 64), "k": (1, 2, 512, 64), "v": (1, 2, 512, 64)}
    q, k, v = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shape.values())
    limits = torch.tensor([0, 5, 200, 201, 512, 512, 512], dtype=torch.int32, device="cuda")
    got, _ = common.document_attention(None, q, k, v, None, limits, 512, scaling=0.125)
    k, v = (x.repeat_interleave(4, dim=1) for x in (k, v))
    expected = common.attention_document_by_document(q, k, v, limits, 0.125)
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


def test_tokenizer_without_end_of_text_is_refused(tmp_path):
    tokenizer = common.TiktokenTokenizer("bytes").to_transformers()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer).save_pretrained(tmp_path)
    with pytest.raises(common.InputError, match="has no end-of-text"):
        common.HuggingFaceTokenizer(str(tmp_path))
