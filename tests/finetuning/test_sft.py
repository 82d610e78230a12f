"""Conversations: templates and loss masks, what is left out, new embeddings, fine-tuning."""

import copy
import functools
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from launching import (
    SMALL,
    all_of,
    data_config,
    launch,
    make_batches,
    metrics,
    refused,
    small_shape,
    split,
)
from tokenizers import processors
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM
from transformers.utils import logging

import common
import conversations
import fsdp2_sft
from common import LeftOut
from conversations import INSIDE, TURN, ConversationBatches, truncate
from model import build_config, chunk_loss, document_attention, forward_with_loss

logging.disable_progress_bar()
# Chat formats of other families, with generation tags. One drops the thoughts of earlier
# turns.
TEMPLATES = {
    "headers": """{{- '<|begin|>' -}}{%- for m in messages -%}
{{- '<|header|>' + m.role + '<|header_end|>\\n\\n' -}}
{%- if m.role == 'assistant' -%}{%- generation -%}{{- m.content | trim + '<|eot|>' -}}
{%- endgeneration -%}{%- else -%}{{- m.content | trim + '<|eot|>' -}}{%- endif -%}
{%- endfor -%}""",
    "brackets": """{%- for m in messages -%}
{%- if m.role == 'assistant' -%}{%- generation -%}{{- ' ' + m.content + '<|eot|>' -}}
{%- endgeneration -%}{%- else -%}{{- '[INST] ' + m.content + ' [/INST]' -}}{%- endif -%}
{%- endfor -%}""",
    "tags": """{%- for m in messages %}
<|{{ m.role }}|>
{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|eot|>
{% endgeneration %}{% else %}{{ m.content }}<|eot|>
{% endif %}{% endfor -%}""",
    "drops thoughts": """{%- for m in messages -%}
{%- set text = m.content if loop.last else m.content.split('</think>')[-1] -%}
{{- '<|header|>' + m.role + '\\n' -}}
{%- if m.role == 'assistant' -%}{%- generation -%}{{- text + '<|eot|>' -}}{%- endgeneration -%}
{%- else -%}{{- text + '<|eot|>' -}}{%- endif -%}
{%- endfor -%}""",
    "two spans": """{%- for m in messages -%}
{%- if m.role == 'assistant' -%}{%- generation -%}{{- 'A:' -}}{%- endgeneration -%}{{- ' ' -}}
{%- generation -%}{{- m.content + '<|eot|>' -}}{%- endgeneration -%}
{%- else -%}{{- '<|header|>' + m.content + '\n' -}}{%- endif -%}
{%- endfor -%}""",
}


def said(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


CONVERSATIONS = {
    "one turn": said(("user", "What is 2 + 2?"), ("assistant", "4")),
    "two turns": said(
        ("system", "Be brief."),
        ("user", "Hi"),
        ("assistant", "<think>a greeting</think>Hello!\n\nHow are you?"),
        ("user", "Fine.\n"),
        ("assistant", "<think>done</think>Good."),
    ),
    "unicode": said(
        ("user", "naïve 漢字 🙂"), ("assistant", "café 🙂\u200d"), ("user", "ß"), ("assistant", "é")
    ),
    "assistant first": said(("assistant", "Welcome"), ("user", "Thanks"), ("assistant", "Bye")),
    "one role twice": said(("user", "a"), ("user", "b"), ("assistant", "c"), ("assistant", "d")),
    "empty answer": said(("user", "Quiet"), ("assistant", ""), ("user", "k"), ("assistant", "x")),
    "thought": said(
        ("user", "Why?"),
        (
            "assistant",
            "<|begin_of_thought|>\nhm\n<|end_of_thought|><|begin_of_solution|>So<|end_of_solution|>",
        ),
    ),
}  # fmt: skip


def chat_tokenizer(name: str, template: str = "own") -> tuple:
    """Return tokenizer, end of a turn and first new id, from the flags that are read."""
    config = SimpleNamespace(tokenizer=name, chat_template=template)
    return conversations.chat_tokenizer(config, "new tokens")


def save_base(folder: Path, change=None, template: str | None = None, more: tuple = ()) -> str:
    """Save the `bytes` tokenizer with more special tokens, a template and a change."""
    tokenizer = copy.deepcopy(common.load_tokenizer("bytes"))
    tokenizer.add_special_tokens({"additional_special_tokens": [*more]})
    tokenizer.chat_template = template
    if change:
        change(tokenizer)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """Return a function: `chat_tokenizer` of another family's template or our own."""

    def make(base: str = "bytes", template: str | None = None) -> tuple:
        if template is None:
            return chat_tokenizer(base)
        tokenizer = copy.deepcopy(common.load_tokenizer(base))
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|header|>", "<|eot|>"]})
        tokenizer.chat_template = TEMPLATES[template]
        directory = tmp_path_factory.mktemp("tokenizer")
        tokenizer.save_pretrained(directory)
        return chat_tokenizer(str(directory))

    return make


def encode(made: tuple, messages: list) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and loss mask of a conversation with every answer in the loss.

    made: of `chat_tokenizer`.
    """
    tokenizer, *_ = made
    text, spans, _ = conversations.find_answers(tokenizer, messages, 0, tools=[])
    return fsdp2_sft.encode(tokenizer, text, spans)


def tokenize(row: dict, made: tuple) -> tuple[str, str]:
    """Return a row as the script reads it, as text: all of it, and what is in the loss."""
    tokenizer, *_ = made
    ids, in_loss, *_ = fsdp2_sft.tokenize_conversation(row, tokenizer)
    return tokenizer.decode(ids), tokenizer.decode(ids[in_loss])


def in_transformers(exported, messages: list) -> tuple[list, list]:
    """Return ids and loss mask as plain transformers makes them."""
    made = exported.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    return made["input_ids"], made["assistant_masks"]


# --- Loss masks -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "base, template",
    [
        ("gpt2", None),
        ("gpt2", "drops thoughts"),
        ("bytes", None),
        *(("bytes", t) for t in TEMPLATES),
    ],
)
def test_ids_and_mask_are_those_of_transformers(chat, base, template, tmp_path, request):
    """With the tokenizer that is exported beside the weights."""
    if base == "gpt2":
        request.getfixturevalue("gpt2_vocabulary")
    made = chat(base, template)
    tokenizer, turn_end, _ = made
    assert tokenizer.decode([turn_end]) == ("<|eot|>" if template else "<|im_end|>")
    assert tokenizer.eos_token == ("<|endoftext|>" if template else "<|im_end|>")
    tokenizer.save_pretrained(tmp_path)
    exported = AutoTokenizer.from_pretrained(tmp_path)
    for name, messages in CONVERSATIONS.items():
        ids, in_loss = encode(made, messages)
        expected_ids, mask = in_transformers(exported, messages)
        if template == "drops thoughts" and name == "two turns":
            # Its first answer is not trained without its thought.
            last = np.flatnonzero(np.diff(mask, prepend=0) == 1)[-1]
            mask[:last] = [0] * last
        assert (ids.tolist(), in_loss.astype(int).tolist()) == (expected_ids, mask), name


IN_LOSS = {  # arguments: the answer, and whether it is the last message
    None: lambda text, last: text + "<|im_end|>",
    "headers": lambda text, last: text.strip() + "<|eot|>",
    "brackets": lambda text, last: " " + text + "<|eot|>",
    "tags": lambda text, last: text + "<|eot|>\n",
    # An answer is not trained without its thought.
    "drops thoughts": lambda text, last: text + "<|eot|>" if last or "<think" not in text else "",
    "two spans": lambda text, last: "A:" + text + "<|eot|>",
}


@pytest.mark.parametrize("template", IN_LOSS)
def test_the_loss_covers_the_answers_and_the_ends_of_their_turns(chat, template):
    made = chat("bytes", template)
    tokenizer, *_ = made
    for name, messages in CONVERSATIONS.items():
        expected = [
            IN_LOSS[template](message["content"], message is messages[-1])
            for message in messages
            if message["role"] == "assistant"
        ]
        ids, in_loss = encode(made, messages)
        assert tokenizer.decode(ids[in_loss]) == "".join(expected), name
        assert tokenizer.decode(ids) == tokenizer.apply_chat_template(messages, tokenize=False)


def test_all_bytes_of_a_character_are_in_the_loss(tmp_path):
    """At the end of an answer, transformers' own mask loses the last bytes."""
    outside = """{%- for m in messages -%}{%- if m.role == 'assistant' -%}{%- generation -%}
{{- m.content -}}{%- endgeneration -%}{%- else -%}{{- m.content -}}{%- endif -%}
{{- '<|eot|>' -}}{%- endfor -%}"""
    tokenizer = common.load_tokenizer(save_base(tmp_path, None, outside, ("<|eot|>",)))
    made = tokenizer, None, 0
    for answer in ("café", "漢", "🙂", "a🙂", "x"):
        ids, in_loss = encode(made, said(("user", "é🙂"), ("assistant", answer)))
        assert tokenizer.decode(ids[in_loss]) == answer


# --- Templates and tokenizers of other kinds ------------------------------------------------------


def test_tokenizers_of_other_kinds(tmp_path):
    """Markers that exist but are not special, truncation that a trainer left on, a start token."""

    def plain_markers(tokenizer):
        tokenizer.add_tokens(list(TURN))
        tokenizer.backend_tokenizer.enable_truncation(16)
        tokenizer.backend_tokenizer.enable_padding(length=16)

    made = tokenizer, _, known = chat_tokenizer(save_base(tmp_path / "a", plain_markers))
    assert max(tokenizer.convert_tokens_to_ids(TURN)) < known  # not added again
    ids, in_loss = encode(made, said(("user", "x"), ("assistant", "y" * 40)))
    assert (ids == tokenizer.convert_tokens_to_ids("<|im_start|>")).sum() == 2
    assert tokenizer.decode(ids[in_loss]) == "y" * 40 + "<|im_end|>"
    assert tokenize({"messages": CONVERSATIONS["one turn"]}, made)[1] == "4<|im_end|>"
    for marker in TURN:
        with pytest.raises(LeftOut, match="spell out a special token"):
            tokenize({"prompt": marker, "completion": "y"}, made)

    def with_start(tokenizer):
        from tokenizers.processors import TemplateProcessing

        tokenizer.add_special_tokens({"bos_token": "<s>"})
        processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 257)])
        tokenizer.backend_tokenizer.post_processor = processor

    made = chat_tokenizer(save_base(tmp_path / "b", with_start))
    ids, _ = encode(made, CONVERSATIONS["one turn"])
    assert ids[0] == 257 and (ids == 257).sum() == 1


GEMMA = """{%- for m in messages -%}{{- '<turn>' + m.role + '\n' -}}
{%- if m.role == 'assistant' -%}{%- generation -%}{{- m.content + '<|eot|>\n' -}}
{%- endgeneration -%}{%- else -%}{{- m.content + '<|eot|>\n' -}}{%- endif -%}{%- endfor -%}"""
OUTSIDE = """{%- for m in messages -%}{%- if m.role == 'assistant' -%}{%- generation -%}
{{- '<think>\n</think>' + m.content -}}{%- endgeneration -%}{%- else -%}
{{- m.role + m.content -}}{%- endif -%}{{- '<|eot|>' -}}{%- endfor -%}"""


def test_a_hub_models_template_comes_along(tmp_path, monkeypatch):
    """transformers saves it in its own file, chat_template.jinja."""
    hub, here = tmp_path / "hub", tmp_path / "here"
    Qwen2ForCausalLM(small_shape()).save_pretrained(hub)
    save_base(hub, None, TEMPLATES["headers"], ("<|header|>", "<|eot|>"))

    (hub / "consolidated.safetensors").write_text("the same weights again, under other names")

    def download(name: str, allow_patterns: list[str], ignore_patterns: str) -> str:
        assert name == "someone/chat"
        kept = {path for pattern in allow_patterns for path in hub.glob(pattern)}
        kept -= {*hub.glob(ignore_patterns)}
        shutil.copytree(hub, here, ignore=lambda _, names: {*names} - {p.name for p in kept})
        return str(here)

    monkeypatch.setattr(common.huggingface_hub, "snapshot_download", download)
    tokenizer, _, known = chat_tokenizer(common.fetch_weights("someone/chat"))
    assert tokenizer.chat_template == TEMPLATES["headers"]
    assert len(tokenizer) == known  # no token of our own template
    assert {path.name for path in here.glob("*.safetensors")} == {"model.safetensors"}


def test_blanks_are_in_the_loss_if_the_tokenizer_skips_them():
    """A byte-level post-processor gives a token of blanks an empty span by default."""
    made = chat_tokenizer("bytes")
    answer = "if x:\n    y\n    z"
    turns = said(("user", " é "), ("assistant", answer), ("user", "\n"), ("assistant", " x"))
    for trim in (False, True):
        made[0].backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
        assert tokenize({"messages": turns}, made)[1] == f"{answer}<|im_end|> x<|im_end|>"


def test_a_tokenizer_that_skips_ids_keeps_all_its_tokens(tmp_path):
    """As that of Phi-4-mini. New tokens come after the largest id, not after the number of ids."""
    base = Path(save_base(tmp_path))
    content = json.loads((base / "tokenizer.json").read_text())
    content["model"]["vocab"]["<|far|>"] = 400
    content["added_tokens"].append(content["added_tokens"][0] | {"id": 400, "content": "<|far|>"})
    (base / "tokenizer.json").write_text(json.dumps(content))
    made, _, known = chat_tokenizer(str(base))
    assert known == 401 and len(made) < 401
    assert made.convert_tokens_to_ids("<|im_start|>") >= 401


def test_the_end_of_a_turn_is_the_last_token_in_the_loss(tmp_path):
    """But not a newline that is an added token (Gemma), or a token inside the answer."""

    def newlines(tokenizer):
        tokenizer.add_tokens(["\n", "\n\n"])

    base = save_base(tmp_path / "gemma", newlines, GEMMA, ("<turn>", "<|eot|>"))
    made = tokenizer, turn_end, _ = chat_tokenizer(base)
    assert tokenizer.decode([turn_end]) == "<|eot|>"
    ids, in_loss = encode(made, CONVERSATIONS["one turn"])
    assert tokenizer.decode(ids[in_loss]) == "4<|eot|>\n"
    assert tokenizer.convert_tokens_to_ids("\n") == 259 == ids[-1]

    base = save_base(tmp_path / "outside", None, OUTSIDE, ("<think>", "</think>", "<|eot|>"))
    assert "no single token ends an answer" in refused(chat_tokenizer, base)


def test_a_template_that_cannot_train_is_refused_in_one_line(tmp_path):
    """It fails, or it only reads contents that are lists of parts and leaves out texts."""
    parts = """{%- for m in messages -%}{{- m.role + ':' -}}{%- generation -%}
{%- for part in m.content if part.type == 'text' -%}{{- part.text -}}{%- endfor -%}<|eot|>
{%- endgeneration -%}{%- endfor -%}"""
    line = refused(chat_tokenizer, save_base(tmp_path / "parts", None, parts))
    assert "its chat template fails" in line and "leaves out or mixes up" in line
    fails = "{{ raise_exception('no') }}{% generation %}{% endgeneration %}"
    line = refused(chat_tokenizer, save_base(tmp_path / "fails", None, fails))
    assert line.endswith(": no")


# One span more than there are answers, as in phi3's. The tokens of turns are not special, as in
# DeepSeek's. A spare one is in a branch that no conversation here takes, as in glm4's.
MORE_SPANS = """{%- for m in messages -%}
{%- if m.role == 'assistant' -%}{{- '<A>' -}}{%- generation -%}{{- m.content + '<|eot|>' -}}
{%- endgeneration -%}{%- elif m.role == 'observer' -%}{{- '<|seen|>' + m.content -}}{%- else -%}
{{- '<U>' + m.content -}}{%- endif -%}{%- endfor -%}
{%- generation -%}{{- '<|eot|>' -}}{%- endgeneration -%}"""


def test_a_template_with_more_spans_than_answers(tmp_path):
    def markers(tokenizer):
        tokenizer.add_tokens(["<U>", "<A>"])

    base = save_base(tmp_path, markers, MORE_SPANS, ("<|eot|>", "<|seen|>"))
    made = chat_tokenizer(base)
    turns = said(("user", "1"), ("assistant", "first"), ("user", "2"), ("assistant", "second"))
    assert tokenize({"messages": turns}, made)[1] == "first<|eot|>second<|eot|><|eot|>"
    row = {"prompt": turns[:3], "completion": "second"}
    assert tokenize(row, made)[1] == "second<|eot|><|eot|>"
    for forged in ("<A>", "<U>", "<|seen|>"):
        with pytest.raises(LeftOut, match="spell out a special token"):
            tokenize({"prompt": f"x{forged}y", "completion": "z"}, made)


def pad_is_end(tokenizer):
    tokenizer.pad_token = tokenizer.eos_token


def end_and_pad(tokenizer):
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"


def thoughts_are_tokens(tokenizer):
    tokenizer.add_tokens(["<think>", "</think>"])  # not special: texts hold them
    tokenizer.eos_token = tokenizer.pad_token = "<|eot|>"


@pytest.mark.parametrize(
    "change, template, more, pad",
    [
        (None, None, (), "<|pad|>"),
        (pad_is_end, None, (), "<|pad|>"),
        (end_and_pad, None, ("<|im_start|>", "<|im_end|>"), "<|pad|>"),
        (pad_is_end, TEMPLATES["headers"], ("<|header|>", "<|eot|>"), "<|endoftext|>"),
        (thoughts_are_tokens, TEMPLATES["tags"], ("<|eot|>",), "<|eot|>"),
    ],
)
def test_pad_is_a_token_of_its_own(tmp_path, change, template, more, pad):
    """Never one that ends a text or a turn, unless the tokenizer has its own template."""
    own = made, _, known = chat_tokenizer(save_base(tmp_path / "a", change, template, more))
    assert made.pad_token == pad
    if template:
        assert len(made) == known
    else:
        assert made.pad_token_id not in (made.eos_token_id, None)
        assert made.pad_token_id not in encode(own, CONVERSATIONS["one turn"])[0]
    made.save_pretrained(tmp_path / "b")
    again, _, then = chat_tokenizer(str(tmp_path / "b"))  # nothing is added again
    assert then == len(again) == len(made)
    assert (again.pad_token, again.eos_token) == (made.pad_token, made.eos_token)
    for token in TURN + INSIDE if template is None else more:
        assert len(made(token, add_special_tokens=False)["input_ids"]) == 1


# --- Documents ------------------------------------------------------------------------------------

ONE = said(("user", "a"), ("assistant", "b"))
FORMS = {
    "messages": {"messages": ONE},
    "sharegpt": {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    "roles": {"conversations": ONE, "system": None},
    "prompt": {"prompt": "a", "completion": "b"},
    "conversational": {"prompt": ONE[:1], "completion": ONE[1:]},
    "mixed": {"prompt": ONE[:1], "completion": "b"},
    "text parts": {"messages": [ONE[0], {**ONE[1], "content": [{"type": "text", "text": "b"}]}]},
    "dict": {"prompt": ONE[0], "completion": "b"},
    "question twice": {"prompt": "a", "messages": ONE},  # as in UltraChat
    "no tools": {"messages": ONE, "tools": "[]", "chat_template_kwargs": {}},
    "json text": {"messages": json.dumps(ONE)},
    "empty extras": {"messages": [ONE[0], ONE[1] | {"tool_calls": None, "weight": 1}], "tools": []},
}


def documents_of(path, made: tuple | None = None) -> common.Sequences:
    """Call `load_documents` as the script does."""
    tokenizer, turn_end, _ = made or chat_tokenizer("bytes")
    documents = common.load_documents(
        data_config(dataset=str(path)),
        conversations.COLUMNS,
        fsdp2_sft.tokenize_conversation,
        tokenizer,
        conversations.CORPORA,
    )
    return all_of(documents)


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def shown(sequences: common.Sequences) -> list[tuple[str, str]]:
    """Return sequences as text: all of it, and what is in the loss."""
    tokenizer = chat_tokenizer("bytes")[0]
    read = [sequences.read(i) for i in range(len(sequences.lengths))]
    return [(tokenizer.decode(ids), tokenizer.decode(ids[in_loss])) for ids, in_loss in read]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_conversation_is_found(form, tmp_path):
    """Each in its own file, with and without a system prompt beside it."""
    turns = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    documents = documents_of(write(tmp_path / "rows.jsonl", [FORMS[form] | {"other": 1}] * 2))
    assert shown(documents) == [(turns, "b<|im_end|>")] * 2
    documents = documents_of(write(tmp_path / "system.jsonl", [FORMS[form] | {"system": "s"}]))
    assert shown(documents)[0][0] == "<|im_start|>system\ns<|im_end|>\n" + turns


def test_rows_of_unlike_types_and_keys_are_read_as_they_are(tmp_path, capsys):
    """Columns that `datasets` types as Json hold the values, not JSON text. Keys may differ."""
    parts = [{"type": "text", "text": "p"}, {"type": "text", "text": "q"}]
    messages = [
        said(("user", 'yes\nno "x"'), ("assistant", "a\n\\b")),
        [{"role": "user", "content": parts}, {"role": "assistant", "content": "parts"}],
        [{"role": "user", "content": "n", "name": "x"}, ONE[1] | {"weight": 1}],
        ["neither", "nor"],
    ]
    texts = shown(documents_of(write(tmp_path / "m.jsonl", [{"messages": m} for m in messages])))
    assert [end for _, end in texts] == ["a\n\\b<|im_end|>", "parts<|im_end|>", "b<|im_end|>"]
    assert 'yes\nno "x"' in texts[0][0] and "\npq<" in texts[1][0]
    assert "1 document is left out, because they hold no messages" in capsys.readouterr().out
    uneven = [{"prompt": "one\n", "completion": "x"}, {"prompt": ONE[:1], "completion": "y"}]
    uneven += [{"prompt": ONE[:1], "completion": said(("assistant", 'x"'))}]
    texts = shown(documents_of(write(tmp_path / "prompts.jsonl", uneven)))
    assert [end for _, end in texts] == [x + "<|im_end|>" for x in ("x", "y", 'x"')]
    assert texts[0][0].startswith("<|im_start|>user\none\n<|im_end|>\n")


def test_objects_of_parquet_lose_the_keys_of_other_rows(tmp_path, capsys):
    """Parquet gives all objects of a column all keys, with nulls. In a .jsonl, nulls stay."""
    calls = {"f": {"a": 1}, "g": {"b": "x"}}
    rows = []
    for name, arguments in calls.items():
        call = {"function": {"name": name, "arguments": arguments}}
        answer = {"role": "assistant", "content": None, "tool_calls": [call]}
        rows.append({"messages": [ONE[0], answer], "tools": [{"name": name, "parameters": {}}]})
    rows.append({"messages": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]})
    rows[0]["tools"][0]["parameters"] = {"type": "object"}
    expected = [end for _, end in shown(documents_of(write(tmp_path / "a.jsonl", rows)))]
    assert '{"name": "f", "arguments": {"a": 1}}' in expected[0]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    typed = shown(documents_of(tmp_path / "a.parquet"))
    assert [end for _, end in typed] == expected
    assert '"name": "g", "parameters": {}}}<|im_end|>' in typed[1][0] and "null" not in typed[0][0]
    calls["f"]["a"] = None
    text = shown(documents_of(write(tmp_path / "b.jsonl", rows)))[0][1]
    assert '{"name": "f", "arguments": {"a": null}}' in text
    assert "left out" not in capsys.readouterr().out


def test_answers_without_their_thoughts_are_counted(chat, tmp_path, capsys):
    turns = said(("user", "a"), ("assistant", "<think>x</think>b"))
    row = {"messages": [*turns, ONE[0], ONE[1]]}
    documents_of(write(tmp_path / "a.jsonl", [row, row]), chat("bytes", "drops thoughts"))
    line = "2 documents are trained in part, because they have earlier answers whose thoughts"
    assert line in capsys.readouterr().out


def test_of_prompt_and_completion_only_the_completion_is_in_the_loss(chat):
    """Even if the prompt has answers, and with two spans per answer. Of `messages` every answer."""
    before = said(("user", "1"), ("assistant", "earlier"), ("user", "2"))
    twice = said(("assistant", "x"), ("user", "3"), ("assistant", "y"))
    for template, in_loss in (None, "{}<|im_end|>"), ("two spans", "A:{}<|eot|>"):
        for row, answers in (
            ({"prompt": before, "completion": said(("assistant", "last"))}, ["last"]),
            ({"prompt": before, "completion": twice}, ["x", "y"]),
            ({"messages": before + said(("assistant", "last"))}, ["earlier", "last"]),
        ):
            text, ends = tokenize(row, chat("bytes", template))
            assert ends == "".join(in_loss.format(answer) for answer in answers)
            assert "earlier" in text


BEYOND = "hold more than text"
NO_TEXT = "hold messages of an unknown role, or without text"
PART = "hold a part that is not text"
FUNCTION = {"name": "f", "arguments": "{}"}
LEFT_OUT = [
    ({"messages": [ONE[0], ONE[1] | {"content": None, "function_call": FUNCTION}]}, BEYOND),
    ({"messages": [ONE[0], ONE[1] | {"thought": "hm"}]}, BEYOND),
    ({"messages": ONE, "images": ["a.png"]}, BEYOND),
    ({"messages": ONE, "chat_template_kwargs": {"think": True}}, BEYOND),
    ({"messages": [ONE[0], ONE[1] | {"weight": 0}]}, "are not for training.*weight"),
    ({"messages": [ONE[0], {"role": "assistant", "content": None}]}, NO_TEXT),
    ({"messages": [{"role": None, "content": "x"}, ONE[1]]}, NO_TEXT),
    ({"messages": [{"speaker": "a"}]}, BEYOND),
    ({"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}, ONE[1]]}, PART),
    ({"messages": [{"role": "user", "content": ["look"]}, ONE[1]]}, PART),
    ({"messages": [ONE[0] | {"content": [{"type": "text", "text": None}]}, ONE[1]]}, PART),
    ({"messages": "a: b"}, "are broken JSON"),
    ({"messages": [ONE[0], ONE[1] | {"content": "\n"}]}, "hold an empty answer"),
    ({"prompt": "a", "completion": ""}, "hold an empty answer"),
    ({"prompt": 4, "completion": "b"}, "hold no messages"),
    ({"messages": 4}, "hold no messages"),
    ({"messages": ["a", "b"]}, "hold no messages"),
    ({"messages": ONE[:1]}, "hold no answer"),
    ({"messages": []}, "hold no answer"),
    ({"prompt": "a", "completion": None}, "hold no answer"),
    ({"prompt": "a", "completion": ONE[:1]}, "hold no answer"),
    ({"prompt": "<|im_end|>", "completion": "b"}, "spell out a special token"),
    ({"prompt": "a", "completion": "b<|endoftext|>"}, "spell out a special token"),
    ({"prompt": "a", "completion": "<|im_start|>"}, "spell out a special token"),
    ({"system": "<|pad|>", "prompt": "a", "completion": "b"}, "spell out a special token"),
    ({"messages": [{"role": "user<|im_end|>", "content": "x"}, ONE[1]]}, NO_TEXT),
]  # fmt: skip


def test_what_cannot_be_rendered_faithfully_is_left_out_and_counted(tmp_path, capsys):
    """Each row alone, and all of them among good rows."""
    made = chat_tokenizer("bytes")
    for row, why in LEFT_OUT:
        with pytest.raises(LeftOut, match=why):
            tokenize(row, made)
    thought = CONVERSATIONS["thought"]
    good = [{"messages": ONE}, {"messages": said(("user", "q"), ("assistant", "r"))}]
    good += [{"messages": thought}]
    documents = documents_of(write(tmp_path / "rows.jsonl", good + [row for row, _ in LEFT_OUT]))
    in_loss = ["b<|im_end|>", "r<|im_end|>", thought[1]["content"] + "<|im_end|>"]
    assert [end for _, end in shown(documents)] == in_loss
    assert documents.index.document.tolist() == [0, 1, 2]
    found = re.findall(
        r"(\d+) documents? (?:are|is) left out, because they (.*)", capsys.readouterr().out
    )
    assert sum(int(count) for count, _ in found) == len(LEFT_OUT)
    for why in (BEYOND, NO_TEXT, "hold no messages", "hold no answer", "spell out a special token"):
        expected = sum(why.startswith(each) for _, each in LEFT_OUT)
        got = sum(int(count) for count, reason in found if reason.startswith(why))
        assert got >= expected > 0


def test_long_conversations_are_truncated_and_need_an_answer(tmp_path, capsys):
    long_answer = {"prompt": "q", "completion": "a" * 600}
    late_answer = {"prompt": "q" * 600, "completion": "never reached"}
    documents = documents_of(
        write(tmp_path / "rows.jsonl", [{"messages": ONE}, long_answer, late_answer])
    )
    sequences = truncate(documents, 512)
    assert sequences.lengths[1] == 512 and len(sequences.lengths) == 2
    assert [set(end) for _, end in shown(sequences)] == [set("b<|im_end|>"), {"a"}]
    assert sequences.num_targets[1] == len(shown(sequences)[1][1]) < documents.num_targets[1]
    assert "2 of 3 conversations are cut to 512 tokens; 1 of these" in capsys.readouterr().out
    assert len(truncate(documents, 1024).lengths) == 3


def test_a_validation_set_that_truncation_empties_is_refused(tmp_path):
    """What is held out is decided before truncation, so none of it is replaced by other rows."""
    rows = [
        {"prompt": said(("user", str(n)), ("assistant", "x"), ("user", "")), "completion": "y"}
        for n in range(40)
    ]
    _, held_out = split(documents_of(write(tmp_path / "short.jsonl", rows)))
    for row in held_out.index.document.tolist():
        rows[row]["prompt"][1]["content"] *= 600
    flags = {"dataset": write(tmp_path / "long.jsonl", rows), "max_length": 512, "steps": 0}
    done = launch(0, "fsdp2_sft", flags)
    line = "error: --max_length 512 cuts off every answer; use a larger one\n"
    assert (done.returncode, done.stderr) == (2, line)
    assert (launch(0, "fsdp2_sft", flags | {"max_length": 1024})).returncode == 0


def test_data_without_conversations_is_refused(tmp_path):
    """The line names the columns of a .jsonl, the commonest reason and the page."""
    rows = [{"reply": "a", "meta": None}] * 3 + [{"messages": ["a"]}]
    line = refused(documents_of, write(tmp_path / "a.jsonl", rows))
    assert "fewer than two different documents" in line and "because they hold no answer" in line
    assert line.endswith("Its columns are reply, meta; docs/data.md lists what is read")
    # Where another thing is the reason, it is named.
    rows = [{"messages": said(("user", "<|im_end|>"), ("assistant", "b"))}] * 3
    line = refused(documents_of, write(tmp_path / "b.jsonl", rows))
    assert "most are left out, because they spell out a special token" in line


@pytest.mark.drill
def test_stdlib_docstrings_have_a_wide_spread_of_lengths():
    config = data_config(dataset="stdlib-docstrings")
    rows = common.open_dataset(config, ["prompt", "completion"], conversations.CORPORA).to_list()
    lengths = [len(row["prompt"]) + len(row["completion"]) for row in rows]
    assert len(rows) > 3000
    assert np.quantile(lengths, 0.95) > 5 * np.quantile(lengths, 0.05)
    asked = next(row for row in rows if "def dedent(text)" in row["prompt"])
    assert asked["prompt"].startswith("Write the docstring of:\n\ndef dedent(text):\n")
    assert "Remove any common leading whitespace" not in asked["prompt"]
    assert "Remove any common leading whitespace" in asked["completion"]
    assert "arguments: text\n" in asked["completion"]


# --- Batches --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chats(texts, tmp_path_factory) -> Path:
    """Return a .jsonl file of 60 conversations of one to three turns and very different length."""
    rng, rows = np.random.default_rng(0), []
    for number in range(60):
        turns = []
        for _ in range(rng.integers(1, 4)):
            chosen = [texts[i] for i in rng.integers(0, 300, 2)]
            question, answer = (text[: int(rng.integers(5, 160))] for text in chosen)
            turns += [("user", question), ("assistant", f"{number} {answer}")]
        rows.append({"messages": said(*turns)})
    return write(tmp_path_factory.mktemp("chats") / "chats.jsonl", rows)


def training_of(path: Path, made: tuple | None = None, **changes) -> common.Batches:
    """Return the training batches of the script."""
    training, _ = split(documents_of(path, made))
    return make_batches(truncate(training, 512), ConversationBatches, **changes)


@pytest.fixture(scope="module")
def model():
    """Return a function: a small model with the loss of the script, for a kind of batches."""

    def make(batching: str):
        attention = {"bucketed": "sdpa", "packed": "documents"}[batching]
        torch.manual_seed(0)
        made = Qwen2ForCausalLM._from_config(small_shape(), attn_implementation=attention)
        made.plain_forward = made.forward
        made.forward = functools.partial(forward_with_loss, made, chunk_loss)
        return made

    AttentionInterface.register("documents", document_attention)
    return make


def gradient(model, loss: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def labels_in_transformers(tokenizer, path, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and (not shifted) labels of a conversation in plain transformers, [1, n]."""
    messages = json.loads(Path(path).read_text().splitlines()[row])["messages"]
    ids, mask = (torch.tensor([x[:513]]) for x in in_transformers(tokenizer, messages))
    return ids, torch.where(mask.bool(), ids, -100)


def test_bucketed_packed_and_one_at_a_time_agree(chats, model):
    """The same conversations. One at a time uses the loss mask and the loss of transformers."""
    tokenizer, training = chat_tokenizer("bytes")[0], training_of(chats)
    alone, one, labels, sequences = model("bucketed"), 0.0, 0, training.sequences
    assert sequences.num_targets.sum() < 0.8 * sequences.lengths.sum()
    truncated = sequences.lengths == 512
    assert truncated.any() and not truncated.all()
    for line in sequences.index.document:
        ids, wanted = labels_in_transformers(tokenizer, chats, line)
        count = int((wanted[:, 1:] != -100).sum())
        one = one + count * alone.plain_forward(input_ids=ids, labels=wanted).loss
        labels += count
    expected = gradient(alone, one)
    for batching, multiple in ("bucketed", 1), ("packed", 1), ("bucketed", 64), ("packed", 64):
        training = training_of(chats, batching=batching, pad_to_multiple_of=multiple)
        tuned, loss, counted = model(batching), 0.0, 0
        for indices in training.plan(0):
            batch = training.collate(indices)
            assert (batch["labels"] != common.IGNORED).any()
            counted += int((batch["labels"] != common.IGNORED).sum())
            loss = loss + tuned(**batch)
        assert counted == labels == sequences.num_targets.sum()
        assert loss.item() == pytest.approx(one.item(), rel=1e-5)
        assert (gradient(tuned, loss) - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("batching", ["bucketed", "packed"])
def test_only_target_tokens_have_a_gradient(chats, model, batching):
    """And only they go through the head."""
    tokenizer, model = chat_tokenizer("bytes")[0], model(batching)
    training, hidden = training_of(chats, batching=batching), []
    indices = max(training.plan(0), key=len)
    hook = model.model.register_forward_hook(lambda _, __, out: hidden.append(out[0]))
    batch = training.collate(indices)
    with FlopCounterMode(display=False) as all_flops:
        loss = model(**batch)
    hook.remove()
    decoded = {name: x for name, x in batch.items() if name not in ("labels", "target_positions")}
    with FlopCounterMode(display=False) as decoder_flops:
        model.model(**decoded, use_cache=False)
    in_head = all_flops.get_total_flops() - decoder_flops.get_total_flops()
    targets = int(training.sequences.num_targets[indices].sum())
    assert in_head == 2 * targets * model.lm_head.weight.numel() > 0
    hidden[0].retain_grad()
    reference = gradient(model, loss)
    trained = hidden[0].grad.abs().sum(-1) > 0  # [sequences, length]
    lines = training.sequences.index.document[indices]
    made = [labels_in_transformers(tokenizer, chats, line) for line in lines]
    wanted = [each[0, 1:] != -100 for _, each in made]
    if batching == "packed":
        wanted = [torch.cat(wanted)]
    assert len(made) > 1 and trained.sum() == targets
    for row, expected in zip(trained, wanted):
        assert torch.equal(row[: len(expected)], expected)
        assert not row[len(expected) :].any()
    row, column = trained.nonzero()[5].tolist()
    batch["labels"][row, column] = (batch["labels"][row, column] + 1) % 256
    assert not torch.equal(gradient(model, model(**batch)), reference)


# --- What a run starts from -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def flags(chats) -> dict:
    return {**SMALL, "dataset": chats, "global_batch_tokens": 2048, "steps": 3}


def tune(flags: dict, ranks: int = 2) -> str:
    """Run the script; returns its output."""
    done = launch(ranks, "fsdp2_sft", flags)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def losses(run_dir: Path) -> list[float]:
    return [line["loss"] for line in metrics(run_dir)[0]]


def save_start(directory: Path, model) -> None:
    model.save_pretrained(directory)
    common.load_tokenizer("bytes").save_pretrained(directory)


def test_new_embeddings_have_the_mean_and_the_covariance_of_the_known_ones(flags, tmp_path):
    """Only the ids that the tokenizer did not have are drawn, in the embedding and in the head.

    The learning rate is so small that the run ends with the weights it started from.
    """
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "head_dim": 8, "vocab_size": 2048, "tie_word_embeddings": False}
    old, mix = Qwen2ForCausalLM(small_shape(**sizes)), torch.randn(8, 8)
    for embeddings in (old.get_input_embeddings(), old.get_output_embeddings()):
        embeddings.weight.data = torch.randn(2048, 8) @ mix + 3
        embeddings.weight.data[257:] = 0  # padding
    save_start(tmp_path / "start", old)
    made = []
    for ranks in (1, 2):
        run_dir = tmp_path / str(ranks)
        rates = {"learning_rate": 1e-12, "steps": 1}
        tune(flags | rates | {"init_from": tmp_path / "start", "run_dir": run_dir}, ranks)
        made.append(AutoModelForCausalLM.from_pretrained(run_dir / "hf").state_dict())
    for name, before in old.state_dict().items():
        torch.testing.assert_close(made[0][name], made[1][name], rtol=1e-6, atol=1e-9)
        if len(before) < 2048:
            torch.testing.assert_close(made[0][name], before, rtol=1e-6, atol=1e-9)
            continue
        known, drawn = made[0][name].split([257, 2048 - 257])
        torch.testing.assert_close(known, before[:257], rtol=1e-6, atol=1e-9)
        assert len(drawn.unique(dim=0)) == len(drawn)
        torch.testing.assert_close(drawn.mean(0), known.mean(0), rtol=0.05, atol=0.2)
        torch.testing.assert_close(torch.cov(drawn.T), torch.cov(known.T), rtol=0.15, atol=0.5)
    assert not torch.equal(made[0]["model.embed_tokens.weight"], made[0]["lm_head.weight"])


def test_the_vocabulary_grows_under_any_number_of_ranks_and_resumes(flags, tmp_path):
    """From 258 embeddings for 257 ids. The template needs 264, padded to 320."""
    start, run_dir, direct = tmp_path / "start", tmp_path / "run", tmp_path / "direct"
    torch.manual_seed(1)
    old = Qwen2ForCausalLM(small_shape(vocab_size=258)).to(torch.bfloat16)
    save_start(start, old)
    flags = flags | {"init_from": start, "run_dir": run_dir}
    stop = {"call": "fsdp2_sft.train_step", "number": 2, "rank": 1, "do": "terminate"}
    done = launch(2, "fsdp2_sft", flags, [stop])
    assert (done.returncode, done.stderr) == (0, "")
    assert "stopped after step 2, saved" in done.stdout
    assert "resuming from" in tune(flags)

    cache = Path(common.datasets.config.HF_DATASETS_CACHE)
    before = {file: file.stat().st_mtime_ns for file in cache.rglob("*.arrow")}
    tune(flags | {"run_dir": direct, "checkpoint_style": "stateful", "async_checkpoint": True})
    after = {file: file.stat().st_mtime_ns for file in cache.rglob("*.arrow")}
    assert before == after  # nothing was tokenized again
    assert losses(direct) == losses(run_dir) and len(losses(direct)) == 3
    tune(flags | {"run_dir": tmp_path / "one"}, ranks=1)
    assert losses(tmp_path / "one") == pytest.approx(losses(direct), rel=1e-5)
    used = json.loads((direct / "config.json").read_text())
    assert (used["learning_rate"], used["min_learning_rate"]) == (2e-3, 2e-4)

    tokenizer = AutoTokenizer.from_pretrained(direct / "hf")
    assert len(tokenizer) == 264 and tokenizer.pad_token == "<|pad|>"
    grown = AutoModelForCausalLM.from_pretrained(direct / "hf")
    assert grown.config.vocab_size == 320 and grown.config.tie_word_embeddings
    weight, was = grown.get_input_embeddings().weight, old.get_input_embeddings().weight.float()
    assert (weight[:257] - was[:257]).abs().max() < 0.02 < was.std()  # three steps from the start
    assert weight[257:].std().item() == pytest.approx(was[:257].std().item(), rel=0.3)
    assert grown.generation_config.eos_token_id == [tokenizer.convert_tokens_to_ids("<|im_end|>")]
    last = metrics(direct)[1][-1]
    assert last["step"] == 3 and "validation_bits_per_byte" not in last


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path):
    """Only the tokens of a chat template get new embeddings."""
    save_start(tmp_path, Qwen2ForCausalLM(small_shape(vocab_size=250)))
    *_, known = chat_tokenizer(str(tmp_path))
    line = refused(build_config, fsdp2_sft.Config(model=str(tmp_path)), known, None)
    assert "--tokenizer has 257 ids" in line and "only 250" in line


def test_a_model_with_its_own_template_is_not_changed(flags, chats, tmp_path):
    """Nothing is added to its tokenizer, and its first loss is that of plain transformers."""
    start = tmp_path / "start"
    more = ("<|header|>", "<|eot|>", "<|begin|>", "<|spare|>")
    own = TEMPLATES["headers"]
    save_base(start, lambda t: t.add_special_tokens({"pad_token": "<|spare|>"}), own, more)
    torch.manual_seed(2)
    model = Qwen2ForCausalLM(small_shape(vocab_size=270))
    model.save_pretrained(start)
    flags = flags | {"init_from": start, "run_dir": tmp_path / "run", "steps": 1}
    output = tune(flags, ranks=1)
    exported = AutoTokenizer.from_pretrained(tmp_path / "run/hf")
    assert len(exported) == 261 and exported.chat_template == own
    config = json.loads((tmp_path / "run/hf/config.json").read_text())
    assert config["vocab_size"] == 270

    made = tokenizer, _, known = chat_tokenizer(str(start))
    assert known == len(tokenizer) == 261
    training, summed, targets = training_of(chats, made), 0.0, 0
    documents, _ = split(documents_of(chats, made))
    cut = (documents.lengths > 512).sum()
    assert f"{cut} of {len(documents.lengths)} conversations are cut to 512 tokens" in output
    with torch.no_grad():
        for line in training.sequences.index.document[np.concatenate(training.plan(0)[:4])]:
            ids, wanted = labels_in_transformers(tokenizer, chats, line)
            count = int((wanted[:, 1:] != -100).sum())
            summed += count * model(input_ids=ids, labels=wanted).loss.item()
            targets += count
    [line] = metrics(tmp_path / "run")[0]
    assert line["tokens"] == targets and line["loss"] == pytest.approx(summed / targets, rel=1e-6)


# --- The whole script -----------------------------------------------------------------------------


def test_every_pretraining_script_is_a_start(run, shape_directory, flags, tmp_path):
    """Their run directories hold the same weights, and one rank and two train alike on them."""
    seen = []
    for name in ("ddp", "fsdp1", "fsdp2"):
        once = {} if name == "ddp" else {"reduce_every_micro_batch": "false"}  # as DDP adds up
        start = run(f"{name}_pretrain.py", 2, model=shape_directory, **once)
        tune(flags | {"init_from": start, "run_dir": tmp_path / name, "steps": 2})
        seen.append(losses(tmp_path / name))
    assert seen[0] == seen[1] == seen[2]
    tune(flags | {"init_from": start / "hf", "run_dir": tmp_path / "hf", "steps": 2}, ranks=1)
    assert losses(tmp_path / "hf") == pytest.approx(seen[0], rel=1e-4)
    norms = [[line["grad_norm"] for line in metrics(tmp_path / d)[0]] for d in ("hf", "ddp")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)  # though ranks have unlike many targets


# As open-thoughts/OpenThoughts-114k has them: the system prompt names the tokens of an answer.
OPEN_THOUGHTS = """Put what you consider between <|begin_of_thought|> and <|end_of_thought|>, and
the result between <|begin_of_solution|> and <|end_of_solution|>."""


def test_the_recipes_own_chain(run, shape_directory, flags, tmp_path):
    """Pretraining, then fine-tuning on thoughts and solutions."""
    rows = []
    for number in range(60):
        thought = f"<|begin_of_thought|>\n\n{number} and 1\n\n<|end_of_thought|>\n\n"
        answer = f"{thought}<|begin_of_solution|>\n\n{number + 1}\n\n<|end_of_solution|>"
        turns = ("user", f"Add 1 to {number}."), ("assistant", answer)
        shared = [{"from": role, "value": text} for role, text in turns]
        rows.append({"system": OPEN_THOUGHTS, "conversations": shared})
    start = run("ddp_pretrain.py", 2, model=shape_directory)
    tuned = flags | {"init_from": start, "run_dir": tmp_path / "run", "steps": 2}
    tuned["dataset"] = write(tmp_path / "rows.jsonl", rows)
    assert "left out" not in tune(tuned)  # nor cut
    made = tokenizer, *_ = chat_tokenizer(str(tmp_path / "run/hf"))
    text, in_loss = tokenize(rows[0], made)
    assert in_loss == rows[0]["conversations"][1]["value"] + "<|im_end|>"
    assert text.startswith(f"<|im_start|>system\n{OPEN_THOUGHTS}<|im_end|>\n<|im_start|>user\nAdd")
    ids = tokenizer.convert_tokens_to_ids([*INSIDE, *INSIDE])
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert [token for token in tokens if token in ids] == ids


def test_overfitted_answers_come_back_and_stop(tmp_path):
    """Learn ten conversations by heart, then ask plain transformers."""
    answers = {f"Number {n}?": f"It is {word}." for n, word in enumerate(
        "zero one two three four five six seven eight nine".split()
    )}  # fmt: skip
    rows = [{"prompt": question, "completion": answer} for question, answer in answers.items()]
    path = write(tmp_path / "ten.jsonl", rows)
    flags = {"dataset": path, "run_dir": tmp_path / "run", "max_length": 128, "steps": 120}
    flags |= {"micro_batch_tokens": 256, "global_batch_tokens": 512, "learning_rate": 4e-3}
    flags |= {"eval_every": 120, "checkpoint_every": 120, "weight_decay": 0.0}
    tune(flags, ranks=1)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run/hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run/hf")
    right = 0
    for question, answer in answers.items():
        asked = tokenizer.apply_chat_template(
            said(("user", question)),
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
        made = model.generate(**asked, max_new_tokens=40, do_sample=False)[0]
        right += tokenizer.decode(made[asked["input_ids"].shape[1] :]) == answer + "<|im_end|>"
    assert right == 9  # one of the ten was held out for validation
