"""Byte-level BPE of Hugging Face, which fastokens encodes: the ids are those of `tokenizers`."""

import functools
import itertools
import random
import subprocess
import sys

import numpy as np
import pytest
import tiktoken
import transformers
from grid import share
from launching import ROOT
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, trainers
from tokenizers.pre_tokenizers import (
    BertPreTokenizer,
    ByteLevel,
    Digits,
    Metaspace,
    Sequence,
    Split,
)
from tokenizers.processors import TemplateProcessing

import common

END = "<|endoftext|>"
# As in the tokenizer.json of these models.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT_OSS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENDING}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PLAIN = ByteLevel(add_prefix_space=False)


def split(*patterns: str):
    steps = [Split(Regex(pattern), "isolated") for pattern in patterns]
    return Sequence([*steps, ByteLevel(add_prefix_space=False, use_regex=False)])


KINDS = {  # pre-tokenizer, normalizer, added tokens
    "GPT-2": (PLAIN, None, []),
    "GPT-2 of tiktoken": (split(GPT2), None, []),
    "RoBERTa": (ByteLevel(add_prefix_space=True), None, []),
    "GPT-NeoX": (PLAIN, normalizers.NFC(), ["  ", "    "]),
    "Llama 3": (split(LLAMA3), None, [AddedToken("<x>", lstrip=True, rstrip=True)]),
    "Qwen 2": (split(QWEN2), normalizers.NFC(), ["<tool_call>", AddedToken("é", normalized=True)]),
    "GPT-OSS": (split(GPT_OSS), None, []),
    "DeepSeek 3": (split(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK), None, []),
    "StarCoder": (Sequence([Digits(individual_digits=True), PLAIN]), None, []),
}
UNKNOWN = {  # fastokens lacks a part of them
    "NFKC": (PLAIN, normalizers.NFKC(), []),
    "BERT's words": (Sequence([BertPreTokenizer(), PLAIN]), None, []),
    "spaces as ▁": (Metaspace(), None, []),
}


@functools.cache
def make(kind: str) -> common.Tokenizer:
    """All pairs of bytes are tokens, so each place where a text is split shows in its ids."""
    letters = sorted(ByteLevel.alphabet())
    merges = list(itertools.product(letters, repeat=2))
    vocabulary = {token: i for i, token in enumerate([*letters, *map("".join, merges)])}
    for token in ("the", "Ġthe", "abc"):  # no merge reaches them
        vocabulary[token] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=kind == "Llama 3"))
    backend.pre_tokenizer, normalizer, added = (KINDS | UNKNOWN)[kind]
    if normalizer:
        backend.normalizer = normalizer
    backend.add_special_tokens([END, "<bos>"])
    backend.add_tokens(added)
    bos = [("<bos>", backend.token_to_id("<bos>"))]
    backend.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=bos)
    return common.Tokenizer(tokenizer_object=backend, eos_token=END)


def check(tokenizer: common.Tokenizer, texts: list[str]) -> None:
    """Compare with `tokenizers` itself, in which a special token that is spelled out is text."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.encode_special_tokens = True
    for text, expected in zip(texts, backend.encode_batch_fast(texts)):
        ids = common.encode_text(text, tokenizer)
        assert (ids.tolist(), ids.dtype) == (expected.ids, np.uint32), ascii(text)


@pytest.mark.parametrize(
    "kind, step",
    [(kind, 101) for kind in KINDS]
    + [pytest.param(kind, 1, marks=pytest.mark.drill) for kind in share(KINDS)],
)
def test_characters_are_split_alike(kind, step):
    """Beside letters, digits, spaces, an apostrophe and itself: a sample here, all in the drill."""
    assert common.fast_tokenizer(make(kind))
    wanted = map(chr, [*range(0x250), 0x180E, *range(0x250, sys.maxunicode, step)])
    texts = [f"a{c}b'{c}x1{c}2 {c}\n{c} {c}." for c in wanted if not "\ud800" <= c <= "\udfff"]
    check(make(kind), texts)


def test_an_encoding_with_gaps_between_its_ids_keeps_them(tmp_path):
    """As cl100k_base and o200k_base: ids without a token, and a pattern that ends in {1,3}+."""
    ranks = {bytes([value]): value for value in range(256)}
    parts = [f"{n:02}" for n in range(100)] + [f"{n:03}" for n in range(1000)] + [" a", "'s"]
    ranks |= {part.encode(): 256 + i for i, part in enumerate(parts)}
    size = len(ranks)
    encoding = tiktoken.Encoding(
        "gaps",
        pat_str=LLAMA3.replace("{1,3}", "{1,3}+"),
        mergeable_ranks=ranks,
        special_tokens={END: size, "<|end_of_prompt|>": size + 20, "<|middle|>": size + 5},
    )
    tokenizer = common.from_tiktoken(encoding)
    common.save_tokenizer(tokenizer, tmp_path)
    saved = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert common.vocabulary_size(tokenizer) == len(saved) == encoding.n_vocab == size + 21
    assert tokenizer.eos_token_id == saved.eos_token_id == encoding.eot_token
    assert tokenizer.convert_tokens_to_ids("<|end_of_prompt|>") == size + 20
    characters = [chr(i) for i in range(0, sys.maxunicode, 331) if not 0xD800 <= i < 0xE000]
    characters += map(chr, range(512))
    texts = [f"a{c}b'{c}x1{c}2 {c}\n{c} 12345678 {c}'s" for c in characters]
    for text in [*texts, f"1234 12 1 {END} <|middle|> a's 12345", "١٢٣٤٥"]:
        ids = encoding.encode_ordinary(text)
        assert common.encode_text(text, tokenizer).tolist() == ids == saved(text)["input_ids"], text


@pytest.mark.parametrize("kind", KINDS | UNKNOWN)
def test_mixed_texts_have_the_same_ids(kind):
    """Also an empty text, and texts around 64 KiB, where fastokens would start threads."""
    source = "".join(path.read_text() for path in sorted(ROOT.glob("*.py")))
    parts = [" ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "\x85", "'s", "'LL", "don't", END]
    parts += [
        "<tool_call>",
        "e\u0301",
        "\u212b",
        "é",
        "ﬁ",
        "漢字",
        "かな",
        "7",
        "1234567",
        "🙂👩‍👩‍👧",
    ]
    draw = random.Random(0)
    texts = ["", source[:65_000], source[:66_000]]
    for _ in range(1000):
        start = draw.randrange(len(source))
        words = [*draw.choices(parts, k=draw.randrange(12)), source[start : start + 40]]
        texts.append("".join(draw.sample(words, len(words))))
    assert (common.fast_tokenizer(make(kind)) is None) == (kind in UNKNOWN)
    check(make(kind), texts)


@pytest.mark.parametrize("kind", ["letters without a token", "dropout"])
def test_fastokens_is_not_used_where_its_ids_would_differ(kind):
    """It splits words at letters that have no token, and it ignores dropout."""
    backend = Tokenizer.from_str(make("GPT-2").backend_tokenizer.to_str())
    backend.model.dropout = 0.1
    if kind == "letters without a token":
        backend = Tokenizer(models.BPE())
        trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=[END], show_progress=False)
        words = ["need feed seed deed weed", "edge hedge ledge"] * 9
        backend.train_from_iterator(words, trainer)
    tokenizer = common.Tokenizer(tokenizer_object=backend, eos_token=END)
    assert common.fast_tokenizer(tokenizer) is None
    if kind == "letters without a token":
        check(tokenizer, ["need", "ne\u0301ed", "de漢ge", "se🙂ed"])


def test_a_process_can_tokenize_after_its_parent_did():
    """`datasets.map` forks. A thread pool of the parent's would be dead in the child."""
    program = """\
import os
import signal
import common
tokenizer = common.load_tokenizer("bytes")
tokenizer.name_or_path = ""  # otherwise its ids need no tokenizer
assert common.fast_tokenizer(tokenizer)
source = open("common.py").read()
texts = [source[:60_000], source * 4]
before = [len(common.encode_text(text, tokenizer)) for text in texts]
child = os.fork()
if not child:
    signal.alarm(60)
    os._exit(before != [len(common.encode_text(text, tokenizer)) for text in texts])
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=120, check=False)
    assert done.returncode == 0
