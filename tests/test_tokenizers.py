"""Ids are those of tiktoken, `tokenizers`, and what AutoTokenizer reads from a run's files."""

import os
import signal
import sys

import tiktoken
import transformers

import common

END = "<|endoftext|>"
# As in the tokenizer.json of Llama 3, with {1,3}+ as in cl100k_base.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def test_an_encoding_with_gaps_between_its_ids_keeps_them(tmp_path):
    """As cl100k_base and o200k_base: ids without a token, and a pattern that ends in {1,3}+."""
    ranks = {bytes([value]): value for value in range(256)}
    parts = [f"{n:02}" for n in range(100)] + [f"{n:03}" for n in range(1000)] + [" a", "'s"]
    ranks |= {part.encode(): 256 + i for i, part in enumerate(parts)}
    size = len(ranks)
    encoding = tiktoken.Encoding(
        "gaps",
        pat_str=PATTERN,
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


def test_gpt2_is_encoded_by_tiktoken_as_by_the_files_of_a_run(gpt2_vocabulary, tmp_path):
    """A text is encoded by tiktoken, hf/ has the form of `tokenizers`."""
    tokenizer = common.load_tokenizer("gpt2")
    common.save_tokenizer(tokenizer, tmp_path)
    saved = transformers.AutoTokenizer.from_pretrained(tmp_path)
    characters = [chr(i) for i in range(0, sys.maxunicode, 331) if not 0xD800 <= i < 0xE000]
    for text in ["", f"spelled {END} out", *(f"a{c}b'{c}x1{c}2 {c}\n{c} {c}." for c in characters)]:
        ids = common.encode_text(text, tokenizer).tolist()
        assert ids == tokenizer(text)["input_ids"] == saved(text)["input_ids"], ascii(text)


def test_a_process_can_tokenize_after_its_parent_did(gpt2_vocabulary):
    """`datasets.map` forks. A thread pool of the parent's would be dead in the child."""
    tokenizers = [common.load_tokenizer(name) for name in ("gpt2", "bytes")]
    tokenizers[1].name_or_path = ""  # otherwise its ids need no tokenizer
    text = "some words, " * 10_000
    before = [len(common.encode_text(text, tokenizer)) for tokenizer in tokenizers]
    child = os.fork()
    if not child:
        signal.alarm(60)
        os._exit(before != [len(common.encode_text(text, tokenizer)) for tokenizer in tokenizers])
    assert os.waitpid(child, 0)[1] == 0
