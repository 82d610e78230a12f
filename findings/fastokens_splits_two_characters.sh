#!/usr/bin/env bash
# fastokens, a faster drop-in for the byte-level BPE of tokenizers, gives other ids for two characters
# (with the two patterns below). Expected: the same ids for all, or other ones for whole classes of
# characters, as regex engines follow different versions of Unicode. Seen with fastokens 0.3.5 and
# tokenizers 0.23.3:
#
#   - U+180E (Mongolian vowel separator): one engine still counts it as white space, which it was
#     until Unicode 6.3;
#   - U+017F (long s) after an apostrophe: only one engine matches it with (?i:'s) of Llama 3.
#
# All pairs of bytes are tokens here, so each place where a text is split shows in its ids. Each
# character stands beside letters, digits, spaces and an apostrophe. Fails if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet fastokens==0.3.5 tokenizers==0.23.3
"$folder/env/bin/python" - <<'END'
import itertools
import sys

import fastokens
from tokenizers import Regex, Tokenizer, models
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

PATTERNS = {
    "Llama 3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "GPT-2, as tiktoken has it": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++"
    r"| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
}
letters = sorted(ByteLevel.alphabet())
merges = list(itertools.product(letters, repeat=2))
vocabulary = {token: i for i, token in enumerate([*letters, *map("".join, merges)])}
characters = [chr(i) for i in range(sys.maxunicode) if not 0xD800 <= i < 0xE000]
texts = [f"a{c}b'{c}x1{c}2 {c}\n{c} {c}." for c in characters]

different = {}
for name, pattern in PATTERNS.items():
    ours = Tokenizer(models.BPE(vocabulary, merges))
    to_bytes = ByteLevel(add_prefix_space=False, use_regex=False)
    ours.pre_tokenizer = Sequence([Split(Regex(pattern), "isolated"), to_bytes])
    fast = fastokens.Tokenizer.from_json_str(ours.to_str())
    different[name] = [
        f"U+{ord(character):04X}"
        for character, text in zip(characters, texts)
        if fast.encode(text).ids != ours.encode(text).ids
    ]
    print(f"{name}: of {len(texts):,} characters, other ids for {different[name]}", flush=True)
assert different == {"Llama 3": ["U+017F"], "GPT-2, as tiktoken has it": ["U+180E"]}
END
