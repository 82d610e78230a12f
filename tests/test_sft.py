"""Conversations: templates and masks, what is left out, a growing vocabulary, fine-tuning."""

import functools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SMALL, launch, make_batches, metrics, small_shape
from test_data import refused
from tokenizers import processors
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM
from transformers.utils import logging

import common
import fsdp2_sft

logging.disable_progress_bar()
# Chat formats of other families, written down here with a generation tag. The last two rewrite
# earlier turns: one drops their thoughts, one all but the last question.
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
    "two stretches": """{%- for m in messages -%}
{%- if m.role == 'assistant' -%}{%- generation -%}{{- 'A:' -}}{%- endgeneration -%}{{- ' ' -}}
{%- generation -%}{{- m.content + '<|eot|>' -}}{%- endgeneration -%}
{%- else -%}{{- '<|header|>' + m.content + '\n' -}}{%- endif -%}
{%- endfor -%}""",
    "keeps the last question": """{%- for m in messages[-2:] -%}
{{- '<|header|>' + m.role + '\\n' -}}
{%- if m.role == 'assistant' -%}{%- generation -%}{{- m.content + '<|eot|>' -}}
{%- endgeneration -%}{%- else -%}{{- m.content + '<|eot|>' -}}{%- endif -%}
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


def save_base(folder: Path, change=None, template: str | None = None, more: tuple = ()) -> str:
    """The `bytes` tokenizer with more special tokens, a template and changes, as a directory."""
    tokenizer = common.to_transformers(common.tiktoken_encoding("bytes"))
    tokenizer.add_special_tokens({"additional_special_tokens": [*more]})
    tokenizer.chat_template = template
    if change:
        change(tokenizer)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """A function: the tokenizer of the script, with another family's template or our own."""

    def make(base: str = "bytes", template: str | None = None):
        if template is None:
            return fsdp2_sft.chat_tokenizer(base)[0]
        tokenizer = common.to_transformers(common.tiktoken_encoding(base))
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|header|>", "<|eot|>"]})
        tokenizer.chat_template = TEMPLATES[template]
        directory = tmp_path_factory.mktemp("tokenizer")
        tokenizer.save_pretrained(directory)
        return fsdp2_sft.chat_tokenizer(str(directory))[0]

    return make


def encode(tokenizer, messages: list) -> tuple[np.ndarray, np.ndarray]:
    """Ids and mask of a conversation of which every answer is learned."""
    return fsdp2_sft.encode(tokenizer, messages, sum(m["role"] == "assistant" for m in messages))


def in_transformers(exported, messages: list) -> tuple[list, list]:
    """Ids and mask as plain transformers makes them."""
    made = exported.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    return made["input_ids"], made["assistant_masks"]


# --- Masks ----------------------------------------------------------------------------------------


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
    tokenizer = chat(base, template)
    assert tokenizer.eos_token == ("<|eot|>" if template else "<|im_end|>")
    tokenizer.save_pretrained(tmp_path)
    exported = AutoTokenizer.from_pretrained(tmp_path)
    for name, messages in CONVERSATIONS.items():
        ids, learned = encode(tokenizer, messages)
        expected = in_transformers(exported, messages)
        assert (ids.tolist(), learned.astype(int).tolist()) == expected, name


LEARNED = {  # of an answer, and whether it is the last message
    None: lambda text, last: text + "<|im_end|>",
    "headers": lambda text, last: text.strip() + "<|eot|>",
    "brackets": lambda text, last: " " + text + "<|eot|>",
    "tags": lambda text, last: text + "<|eot|>\n",
    "drops thoughts": lambda text, last: (text if last else text.split("</think>")[-1]) + "<|eot|>",
    "two stretches": lambda text, last: "A:" + text + "<|eot|>",
    "keeps the last question": lambda text, last: text + "<|eot|>",
}


@pytest.mark.parametrize("template", LEARNED)
def test_learned_are_the_answers_and_the_ends_of_their_turns(chat, template):
    tokenizer = chat("bytes", template)
    for name, messages in CONVERSATIONS.items():
        shown = messages[-2:] if template == "keeps the last question" else messages
        expected = [
            LEARNED[template](message["content"], message is shown[-1])
            for message in shown
            if message["role"] == "assistant"
        ]
        ids, learned = encode(tokenizer, messages)
        assert tokenizer.decode(ids[learned]) == "".join(expected), name
        assert tokenizer.decode(ids) == tokenizer.apply_chat_template(messages, tokenize=False)


def test_characters_of_several_tokens_are_learned_whole(tmp_path):
    """Where the answer ends what is learned: transformers' own mask loses the last bytes."""
    outside = """{%- for m in messages -%}{%- if m.role == 'assistant' -%}{%- generation -%}
{{- m.content -}}{%- endgeneration -%}{%- else -%}{{- m.content -}}{%- endif -%}
{{- '<|eot|>' -}}{%- endfor -%}"""
    tokenizer, _ = fsdp2_sft.chat_tokenizer(save_base(tmp_path, None, outside, ("<|eot|>",)))
    for answer in ("café", "漢", "🙂", "a🙂", "x"):
        ids, learned = encode(tokenizer, said(("user", "é🙂"), ("assistant", answer)))
        assert tokenizer.decode(ids[learned]) == answer


# --- Templates and tokenizers of other habits -----------------------------------------------------


def test_tokenizers_of_other_habits(tmp_path):
    """Markers that are there but not special, truncation left by a trainer, a start token."""

    def plain_markers(tokenizer):
        tokenizer.add_tokens(list(fsdp2_sft.TURN))
        tokenizer.backend_tokenizer.enable_truncation(16)
        tokenizer.backend_tokenizer.enable_padding(length=16)

    made, known = fsdp2_sft.chat_tokenizer(save_base(tmp_path / "a", plain_markers))
    assert max(made.convert_tokens_to_ids(fsdp2_sft.TURN)) < known  # what is there is not added
    ids, learned = encode(made, said(("user", "x"), ("assistant", "y" * 40)))
    assert (ids == made.convert_tokens_to_ids("<|im_start|>")).sum() == 2
    assert made.decode(ids[learned]) == "y" * 40 + "<|im_end|>"
    [*_] = fsdp2_sft.chat_rows({"messages": CONVERSATIONS["one turn"]}, made, 99)
    for marker in fsdp2_sft.TURN:
        with pytest.raises(ValueError, match="spell out a special token"):
            [*fsdp2_sft.chat_rows({"prompt": marker, "completion": "y"}, made, 99)]

    def with_start(tokenizer):
        from tokenizers.processors import TemplateProcessing

        tokenizer.add_special_tokens({"bos_token": "<s>"})
        processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 257)])
        tokenizer.backend_tokenizer.post_processor = processor

    made, _ = fsdp2_sft.chat_tokenizer(save_base(tmp_path / "b", with_start))
    ids, _ = encode(made, CONVERSATIONS["one turn"])
    assert ids[0] == 257 and (ids == 257).sum() == 1


GEMMA = """{%- for m in messages -%}{{- '<turn>' + m.role + '\n' -}}
{%- if m.role == 'assistant' -%}{%- generation -%}{{- m.content + '<|eot|>\n' -}}
{%- endgeneration -%}{%- else -%}{{- m.content + '<|eot|>\n' -}}{%- endif -%}{%- endfor -%}"""
OUTSIDE = """{%- for m in messages -%}{%- if m.role == 'assistant' -%}{%- generation -%}
{{- '<think>\n</think>' + m.content -}}{%- endgeneration -%}{%- else -%}
{{- m.role + m.content -}}{%- endif -%}{{- '<|eot|>' -}}{%- endfor -%}"""


def test_a_hub_models_template_comes_along(tmp_path, monkeypatch):
    """transformers saves it in a file of its own, chat_template.jinja."""
    hub, here = tmp_path / "hub", tmp_path / "here"
    Qwen2ForCausalLM(small_shape()).save_pretrained(hub)
    save_base(hub, None, TEMPLATES["headers"], ("<|header|>", "<|eot|>"))

    (hub / "consolidated.safetensors").write_text("the same once more, under other names")

    def download(name: str, allow_patterns: list[str], ignore_patterns: str) -> str:
        assert name == "someone/chat"
        kept = {path for pattern in allow_patterns for path in hub.glob(pattern)}
        kept -= {*hub.glob(ignore_patterns)}
        shutil.copytree(hub, here, ignore=lambda _, names: {*names} - {p.name for p in kept})
        return str(here)

    monkeypatch.setattr(common.huggingface_hub, "snapshot_download", download)
    tokenizer, known = fsdp2_sft.chat_tokenizer(common.fetch_weights("someone/chat"))
    assert tokenizer.chat_template == TEMPLATES["headers"]
    assert len(tokenizer) == known + 1  # a pad token alone, none of our own template
    assert {path.name for path in here.glob("*.safetensors")} == {"model.safetensors"}


def test_blanks_are_learned_if_the_tokenizer_counts_them_to_no_token(tmp_path):
    """The default of a byte-level post-processor: a token of blanks alone is at no characters."""
    made, _ = fsdp2_sft.chat_tokenizer("bytes")
    answer = "if x:\n    y\n    z"
    for trim in (False, True):
        made.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
        turns = said(("user", " é "), ("assistant", answer), ("user", "\n"), ("assistant", " "))
        [(tokens, learned, *_)] = fsdp2_sft.chat_rows({"messages": turns}, made, 99)
        assert made.decode(tokens[learned]) == f"{answer}<|im_end|> <|im_end|>"


def test_a_tokenizer_that_leaves_out_ids_keeps_all_its_tokens(tmp_path):
    """As that of Phi-4-mini: what is new comes after the largest id, not after their number."""
    base = Path(save_base(tmp_path))
    content = json.loads((base / "tokenizer.json").read_text())
    content["model"]["vocab"]["<|far|>"] = 400
    content["added_tokens"].append(content["added_tokens"][0] | {"id": 400, "content": "<|far|>"})
    (base / "tokenizer.json").write_text(json.dumps(content))
    made, known = fsdp2_sft.chat_tokenizer(str(base))
    assert known == 401 and len(made) < 401
    assert made.convert_tokens_to_ids("<|im_start|>") >= 401


def test_the_end_of_a_turn_is_the_token_that_ends_what_is_learned(tmp_path):
    """Not a newline that is an added token (Gemma), nor one inside the answer."""

    def newlines(tokenizer):
        tokenizer.add_tokens(["\n", "\n\n"])

    base = save_base(tmp_path / "gemma", newlines, GEMMA, ("<turn>", "<|eot|>"))
    made, _ = fsdp2_sft.chat_tokenizer(base)
    assert made.eos_token == "<|eot|>" and made.pad_token.strip()
    ids, learned = encode(made, CONVERSATIONS["one turn"])
    assert made.decode(ids[learned]) == "4<|eot|>\n"
    assert made.convert_tokens_to_ids("\n") == 259 == ids[-1]

    base = save_base(tmp_path / "outside", None, OUTSIDE, ("<think>", "</think>", "<|eot|>"))
    assert fsdp2_sft.chat_tokenizer(base)[0].eos_token == "<|endoftext|>"  # as it was


def test_a_template_that_cannot_train_is_refused_in_one_line(tmp_path):
    """It fails, or reads contents that are lists of parts only and leaves texts out."""
    parts = """{%- for m in messages -%}{{- m.role + ':' -}}{%- generation -%}
{%- for part in m.content if part.type == 'text' -%}{{- part.text -}}{%- endfor -%}<|eot|>
{%- endgeneration -%}{%- endfor -%}"""
    line = refused(fsdp2_sft.chat_tokenizer, save_base(tmp_path / "parts", None, parts))
    assert "its chat template" in line and "leaves the text of messages out" in line
    fails = "{{ raise_exception('no') }}{% generation %}{% endgeneration %}"
    line = refused(fsdp2_sft.chat_tokenizer, save_base(tmp_path / "fails", None, fails))
    assert line.endswith("its chat template fails: no")


# As that of phi3: one stretch more than there are answers. The tokens of turns are not special, as
# DeepSeek's, and a spare one is named in a branch that no conversation here takes, as in glm4's.
MORE_STRETCHES = """{%- for m in messages -%}
{%- if m.role == 'assistant' -%}{{- '<A>' -}}{%- generation -%}{{- m.content + '<|eot|>' -}}
{%- endgeneration -%}{%- elif m.role == 'observer' -%}{{- '<|seen|>' + m.content -}}{%- else -%}
{{- '<U>' + m.content -}}{%- endif -%}{%- endfor -%}
{%- generation -%}{{- '<|eot|>' -}}{%- endgeneration -%}"""


def test_a_template_with_more_stretches_than_answers(tmp_path):
    def markers(tokenizer):
        tokenizer.add_tokens(["<U>", "<A>"])

    base = save_base(tmp_path, markers, MORE_STRETCHES, ("<|eot|>", "<|seen|>"))
    made, _ = fsdp2_sft.chat_tokenizer(base)
    turns = said(("user", "1"), ("assistant", "first"), ("user", "2"), ("assistant", "second"))
    [(tokens, learned, *_)] = fsdp2_sft.chat_rows({"messages": turns}, made, 99)
    assert made.decode(tokens[learned]) == "first<|eot|>second<|eot|><|eot|>"
    row = {"prompt": turns[:3], "completion": "second"}
    [(tokens, learned, *_)] = fsdp2_sft.chat_rows(row, made, 99)
    assert made.decode(tokens[learned]) == "second<|eot|><|eot|>"
    assert made.pad_token not in ("<|seen|>", "<|eot|>")
    for forged in ("<A>", "<U>", "<|seen|>"):
        with pytest.raises(ValueError, match="spell out a special token"):
            [*fsdp2_sft.chat_rows({"prompt": f"x{forged}y", "completion": "z"}, made, 99)]


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
        (end_and_pad, None, ("<|im_start|>", "<|im_end|>"), "<|endoftext|>"),
        (pad_is_end, TEMPLATES["headers"], ("<|header|>", "<|eot|>", "<|spare|>"), "<|spare|>"),
        (pad_is_end, TEMPLATES["headers"], ("<|header|>", "<|eot|>", "<|begin|>"), "<|pad|>"),
        (thoughts_are_tokens, TEMPLATES["tags"], ("<|eot|>",), "<|endoftext|>"),
    ],
)
def test_pad_is_a_token_of_its_own(tmp_path, change, template, more, pad):
    """A spare special token rather than a new one, never one that ends or stands in a text."""
    made, known = fsdp2_sft.chat_tokenizer(save_base(tmp_path / "a", change, template, more))
    assert made.pad_token == pad
    assert made.pad_token_id not in (made.eos_token_id, None)
    ids = encode(made, said(("user", "<think>"), ("assistant", "x")))[0]
    assert made.pad_token_id not in ids
    if template:
        assert len(made) == known + (pad == "<|pad|>")
    made.save_pretrained(tmp_path / "b")
    again, then = fsdp2_sft.chat_tokenizer(str(tmp_path / "b"))  # what is there is not added
    assert then == len(again) == len(made)
    assert (again.pad_token, again.eos_token) == (made.pad_token, made.eos_token)
    for token in fsdp2_sft.TURN + fsdp2_sft.INSIDE if template is None else more:
        assert len(made(token, add_special_tokens=False)["input_ids"]) == 1


# --- Rows -----------------------------------------------------------------------------------------

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
    "empty extras": {"messages": [ONE[0], ONE[1] | {"tool_calls": None, "weight": 1}], "tools": []},
}


def rows_of(path, tokenizer=None, max_length: int = 512) -> common.Rows:
    """`load_rows` as the script calls it."""
    tokenizer = tokenizer or fsdp2_sft.chat_tokenizer("bytes")[0]
    where = (str(path), None, "train")
    return common.load_rows(
        *where, fsdp2_sft.CONVERSATIONS, fsdp2_sft.chat_rows, tokenizer, max_length
    )


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def shown(rows: common.Rows, row: int) -> tuple[str, str]:
    """A row as text, all of it and what is learned."""
    tokenizer = fsdp2_sft.chat_tokenizer("bytes")[0]
    ids, learned = rows.read(row)
    return tokenizer.decode(ids), tokenizer.decode(ids[learned])


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_conversation_is_found(form, tmp_path):
    """Each in a file of its own, with and without a system prompt beside it."""
    turns = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    rows = rows_of(write(tmp_path / "rows.jsonl", [FORMS[form] | {"other": 1}] * 2))
    assert [shown(rows, i) for i in range(2)] == [(turns, "b<|im_end|>")] * 2
    rows = rows_of(write(tmp_path / "system.jsonl", [FORMS[form] | {"system": "s"}]))
    assert shown(rows, 0)[0] == "<|im_start|>system\ns<|im_end|>\n" + turns


def test_rows_of_unlike_types_and_keys_are_read_as_they_are(tmp_path):
    """What `datasets` types as Json comes out as it was, not as JSON text; keys may be uneven."""
    parts = [{"type": "text", "text": "p"}, {"type": "text", "text": "q"}]
    messages = [
        said(("user", 'yes\nno "x"'), ("assistant", "a\n\\b")),
        [{"role": "user", "content": parts}, {"role": "assistant", "content": "parts"}],
        [{"role": "user", "content": "n", "name": "x"}, ONE[1] | {"weight": 1}],
        ["neither", "nor"],
    ]
    rows = rows_of(write(tmp_path / "messages.jsonl", [{"messages": m} for m in messages]))
    learned = ["a\n\\b", "parts", "b"]
    assert [shown(rows, i)[1] for i in range(3)] == [text + "<|im_end|>" for text in learned]
    assert ['yes\nno "x"' in shown(rows, 0)[0], "\npq<" in shown(rows, 1)[0]] == [True, True]
    assert rows.notes["left out, as they hold no messages"] == 1 and rows.num_labels[3] == 0
    uneven = [{"prompt": "one\n", "completion": "x"}, {"prompt": ONE[:1], "completion": "y"}]
    uneven += [{"prompt": ONE[:1], "completion": said(("assistant", 'x"'))}]
    rows = rows_of(write(tmp_path / "prompts.jsonl", uneven))
    assert [shown(rows, i)[1] for i in range(3)] == [x + "<|im_end|>" for x in ("x", "y", 'x"')]
    assert shown(rows, 0)[0].startswith("<|im_start|>user\none\n<|im_end|>\n")


def test_of_prompt_and_completion_the_completion_alone_is_learned(tmp_path):
    """Though answers stand in the prompt; of `messages` every answer is."""
    before = said(("user", "1"), ("assistant", "earlier"), ("user", "2"))
    twice = said(("assistant", "x"), ("user", "3"), ("assistant", "y"))
    rows = [
        {"prompt": before, "completion": said(("assistant", "last"))},
        {"prompt": before, "completion": twice},
        {"messages": before + said(("assistant", "last"))},
    ]
    rows = rows_of(write(tmp_path / "rows.jsonl", rows))
    ends = [["last"], ["x", "y"], ["earlier", "last"]]
    assert [shown(rows, i)[1] for i in range(3)] == [
        "".join(text + "<|im_end|>" for text in texts) for texts in ends
    ]
    assert all("earlier" in shown(rows, i)[0] for i in range(3))


BEYOND, NO_TEXT = (
    "hold tools, thoughts or media beside the text",
    "hold messages without role or text",
)
FUNCTION = {"name": "f", "arguments": "{}"}
LEFT_OUT = [
    ({"messages": [ONE[0], ONE[1] | {"content": "", "tool_calls": [FUNCTION]}]}, BEYOND),
    ({"messages": [ONE[0], ONE[1] | {"content": None, "function_call": FUNCTION}]}, BEYOND),
    ({"messages": [ONE[0], ONE[1] | {"reasoning_content": "hm"}]}, BEYOND),
    ({"messages": [ONE[0], ONE[1] | {"thinking": "hm"}]}, BEYOND),
    ({"messages": ONE, "tools": [FUNCTION]}, BEYOND),
    ({"messages": ONE, "images": ["a.png"]}, BEYOND),
    ({"messages": [ONE[0], ONE[1] | {"weight": 0}]}, "hold messages of weight 0"),
    ({"messages": [ONE[0], {"role": "assistant", "content": None}]}, NO_TEXT),
    ({"messages": [{"role": None, "content": "x"}, ONE[1]]}, NO_TEXT),
    ({"messages": [{"speaker": "a"}]}, NO_TEXT),
    ({"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}, ONE[1]]}, NO_TEXT),
    ({"messages": [{"role": "user", "content": ["look"]}, ONE[1]]}, NO_TEXT),
    ({"messages": [ONE[0] | {"content": [{"type": "text", "text": None}]}, ONE[1]]}, NO_TEXT),
    ({"messages": ONE, "chat_template_kwargs": {"think": True}}, "hold arguments of a template"),
    ({"prompt": 4, "completion": "b"}, "hold no messages"),
    ({"messages": ONE[:1]}, "hold no answer"),
    ({"messages": []}, "hold no answer"),
    ({"prompt": "a", "completion": None}, "hold no answer"),
    ({"prompt": "a", "completion": ONE[:1]}, "hold no answer"),
    ({"messages": "a: b"}, "hold no messages"),
    ({"messages": 4}, "hold no messages"),
    ({"messages": ["a", "b"]}, "hold no messages"),
    ({"prompt": "<|im_end|>", "completion": "b"}, "spell out a special token"),
    ({"prompt": "a", "completion": "b<|endoftext|>"}, "spell out a special token"),
    ({"prompt": "a", "completion": "<|im_start|>"}, "spell out a special token"),
    ({"prompt": "<|begin_of_thought|>", "completion": "b"}, "spell out a special token"),
    ({"system": "<|pad|>", "prompt": "a", "completion": "b"}, "spell out a special token"),
    ({"messages": [{"role": "user<|im_end|>", "content": "x"}, ONE[1]]}, "spell out a special"),
    ({"prompt": "a" * 500, "completion": "never reached"}, "have no answer in the first 512"),
]  # fmt: skip


def test_what_cannot_be_rendered_faithfully_is_left_out_and_counted(tmp_path):
    """Each alone, and all among good rows; an empty answer still ends, an answer may think."""
    tokenizer, _ = fsdp2_sft.chat_tokenizer("bytes")
    for row, why in LEFT_OUT:
        with pytest.raises(ValueError, match=why):
            [*fsdp2_sft.chat_rows(row, tokenizer, 512)]
    thought = CONVERSATIONS["thought"]
    good = [{"messages": ONE}, {"messages": said(("user", "q"), ("assistant", ""))}]
    good += [{"messages": thought}, {"messages": said(("user", "q"), ("assistant", "a" * 600))}]
    rows = rows_of(write(tmp_path / "rows.jsonl", good + [row for row, _ in LEFT_OUT]))
    learned = ["b<|im_end|>", "<|im_end|>", thought[1]["content"] + "<|im_end|>"]
    assert [shown(rows, i)[1] for i in range(3)] == learned
    assert rows.lengths[3] == 512 and set(shown(rows, 3)[1]) == {"a"}
    assert rows.num_labels[:4].all() and not rows.num_labels[4:].any()
    training, _ = rows.split()
    assert len(rows.lengths) == len(LEFT_OUT) + 4 and not set(training.chosen) & {*range(4, 99)}
    for why in (BEYOND, NO_TEXT, "hold no messages", "spell out a special token"):
        expected = sum(why.startswith(each) for _, each in LEFT_OUT)
        assert rows.notes[f"left out, as they {why}"] >= expected > 0
    assert rows.notes["cut to 512 tokens"] == 1


def test_data_without_conversations_is_refused(tmp_path):
    line = refused(rows_of, write(tmp_path / "rows.jsonl", [{"text": "a", "tools": None}] * 3))
    assert "no column messages or conversations" in line and "text" in line and len(line) < 300
    nothing = rows_of(write(tmp_path / "none.jsonl", [{"messages": ["a", "b"]}] * 3))
    assert "hold no messages" in refused(nothing.split)


@pytest.mark.drill
def test_stdlib_docstrings_have_a_wide_spread_of_lengths():
    rows = common.open_dataset("stdlib-docstrings", None, "train").to_list()
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
def conversations(texts, tmp_path_factory) -> Path:
    """60 conversations of one to three turns, of very different length, as a .jsonl file."""
    rng, rows = np.random.default_rng(0), []
    for number in range(60):
        turns = []
        for _ in range(rng.integers(1, 4)):
            chosen = [texts[i] for i in rng.integers(0, 300, 2)]
            question, answer = (text[: int(rng.integers(5, 160))] for text in chosen)
            turns += [("user", question), ("assistant", f"{number} {answer}")]
        rows.append({"messages": said(*turns)})
    return write(tmp_path_factory.mktemp("conversations") / "conversations.jsonl", rows)


def training_of(path: Path, tokenizer=None, batching="bucketed", multiple=1) -> common.Batches:
    training, _ = rows_of(path, tokenizer).split()
    changes = {"batching": batching, "pad_to_multiple_of": multiple}
    made = make_batches(training, fsdp2_sft.ConversationBatches, **changes)
    made.rows = training
    return made


@pytest.fixture(scope="module")
def model():
    """A small model with the loss of the script, in one process."""
    AttentionInterface.register("documents", fsdp2_sft.document_attention)
    torch.manual_seed(0)
    made = Qwen2ForCausalLM._from_config(small_shape(), attn_implementation="documents")
    made.plain_forward = made.forward
    fsdp2_sft.find_experts(made)
    made.forward = functools.partial(fsdp2_sft.forward_with_loss, made, fsdp2_sft.chunk_loss)
    return made


def gradient(model, loss: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def labels_in_transformers(tokenizer, path, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and (not shifted) labels of a conversation as plain transformers makes them, [1, n]."""
    messages = json.loads(Path(path).read_text().splitlines()[row])["messages"]
    ids, mask = (torch.tensor([x[:513]]) for x in in_transformers(tokenizer, messages))
    return ids, torch.where(mask.bool(), ids, -100)


def test_bucketed_packed_and_one_at_a_time_agree(conversations, model):
    """The same conversations; one at a time goes through transformers' own mask and loss."""
    tokenizer, training = fsdp2_sft.chat_tokenizer("bytes")[0], training_of(conversations)
    one, labels, rows = 0.0, 0, training.rows
    assert rows.num_labels.sum() < 0.8 * rows.lengths.sum()
    cut = rows.lengths == 512
    assert cut.any() and not cut.all()
    for row in rows.chosen:
        ids, wanted = labels_in_transformers(tokenizer, conversations, row)
        count = int((wanted[:, 1:] != -100).sum())
        one = one + count * model.plain_forward(input_ids=ids, labels=wanted).loss
        labels += count
    expected = gradient(model, one)
    for batching, multiple in ("bucketed", 1), ("packed", 1), ("bucketed", 64), ("packed", 64):
        training = training_of(conversations, batching=batching, multiple=multiple)
        loss, counted = 0.0, 0
        for number in range(len(training.plan(0))):
            batch = training.collate(training.micro_batch(number))
            assert (batch["labels"] != common.IGNORED).any()
            counted += int((batch["labels"] != common.IGNORED).sum())
            loss = loss + model(**batch)
        assert counted == labels == rows.num_labels.sum()
        assert loss.item() == pytest.approx(one.item(), rel=1e-5)
        got = gradient(model, loss)
        assert (got - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("batching", ["bucketed", "packed"])
def test_only_predictions_of_the_assistants_tokens_have_a_gradient(conversations, model, batching):
    """And only they go through the head."""
    tokenizer = fsdp2_sft.chat_tokenizer("bytes")[0]
    training, hidden = training_of(conversations, batching=batching), []
    rows = max(map(training.micro_batch, range(len(training.plan(0)))), key=len)
    hook = model.model.register_forward_hook(lambda _, __, out: hidden.append(out[0]))
    batch = training.collate(rows)
    with FlopCounterMode(display=False) as all_flops:
        loss = model(**batch)
    hook.remove()
    decoded = {name: x for name, x in batch.items() if name != "labels"}
    with FlopCounterMode(display=False) as decoder_flops:
        model.model(**decoded, use_cache=False)
    in_head = all_flops.get_total_flops() - decoder_flops.get_total_flops()
    labels = int(training.num_labels[rows].sum())
    assert in_head == 2 * labels * model.lm_head.weight.numel() > 0
    hidden[0].retain_grad()
    reference = gradient(model, loss)
    trained = hidden[0].grad.abs().sum(-1) > 0  # [rows, length]
    lines = training.rows.chosen[rows]
    made = [labels_in_transformers(tokenizer, conversations, line) for line in lines]
    wanted = [each[0, 1:] != -100 for _, each in made]
    if batching == "packed":
        wanted = [torch.cat(wanted)]
    assert len(made) > 1 and trained.sum() == labels
    for row, expected in zip(trained, wanted):
        assert torch.equal(row[: len(expected)], expected)
        assert not row[len(expected) :].any()
    row, column = trained.nonzero()[5].tolist()
    batch["labels"][row, column] = (batch["labels"][row, column] + 1) % 256
    assert not torch.equal(gradient(model, model(**batch)), reference)


def test_the_prompt_of_the_sample_ends_where_the_assistant_begins(conversations):
    tokenizer, training = fsdp2_sft.chat_tokenizer("bytes")[0], training_of(conversations)
    text = tokenizer.decode(training.rows.prompt())
    whole = shown(training.rows, 0)[0]
    assert text.endswith("<|im_start|>assistant\n") and whole.startswith(text)
    assert text.count("<|im_start|>assistant") == 1


# --- A growing vocabulary -------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_new_rows_have_the_mean_and_the_covariance_of_the_old(tied, tmp_path):
    """From 490 ids in 495 rows: old rows stay, new ones are all different, in both embeddings."""
    torch.manual_seed(0)
    shape = small_shape(hidden_size=8, vocab_size=495, tie_word_embeddings=tied, head_dim=8)
    old, mix = Qwen2ForCausalLM(shape), torch.randn(8, 8)
    for embeddings in (old.get_input_embeddings(), old.get_output_embeddings()):
        embeddings.weight.data = torch.randn(495, 8) @ mix + 3
        embeddings.weight.data[490:] = 0  # padding, of which five become ids
    old.tie_weights() if tied else None
    old.save_pretrained(tmp_path)
    grow = functools.partial(common.change_once, str(tmp_path), "grown", fsdp2_sft.grow_vocabulary)
    directory = grow(490, 4000)
    assert grow(490, 4000) == directory != grow(490, 4001)
    assert directory != common.change_once(str(tmp_path), "grown", lambda *_: None, 490, 4000)
    new = AutoModelForCausalLM.from_pretrained(directory)
    assert new.config.vocab_size == 4032 and new.config.tie_word_embeddings == tied
    for which in ("get_input_embeddings", "get_output_embeddings"):
        grown, before = getattr(new, which)().weight.data, getattr(old, which)().weight.data[:490]
        assert torch.equal(grown[:490], before)
        drawn = grown[490:]
        assert len(drawn.unique(dim=0)) == len(drawn) == 4032 - 490
        torch.testing.assert_close(drawn.mean(0), before.mean(0), rtol=0.05, atol=0.2)
        torch.testing.assert_close(torch.cov(drawn.T), torch.cov(before.T), rtol=0.15, atol=0.5)
    layers = old.model.layers.state_dict()
    assert all(torch.equal(x, layers[n]) for n, x in new.model.layers.state_dict().items())
    heads = [new.get_input_embeddings().weight.data, new.get_output_embeddings().weight.data]
    assert torch.equal(*heads) == tied
    assert "has 500 ids" in refused(grow, 500, 501)


@pytest.fixture(scope="module")
def flags(conversations) -> dict:
    return {**SMALL, "dataset": conversations, "global_batch_tokens": 2048, "steps": 3}


def tune(flags: dict, ranks: int = 2) -> str:
    done = launch(ranks, "fsdp2_sft", flags)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def losses(run_dir: Path) -> list[float]:
    return [line["loss"] for line in metrics(run_dir)[0]]


def test_the_vocabulary_grows_under_two_ranks_and_resumes(flags, tmp_path):
    """From 257 ids in 258 rows: the new ids begin in the padding, and 264 do not fit."""
    start, run_dir, direct = tmp_path / "start", tmp_path / "run", tmp_path / "direct"
    torch.manual_seed(1)
    old = Qwen2ForCausalLM(small_shape(vocab_size=258)).to(torch.bfloat16)
    old.save_pretrained(start)
    common.load_tokenizer("bytes").save_pretrained(start)
    flags = flags | {"init_from": start, "run_dir": run_dir}
    stop = {"call": "Run.log_step", "number": 2, "rank": 1, "do": "terminate"}
    done = launch(2, "fsdp2_sft", flags, [stop])
    assert (done.returncode, done.stderr) == (0, "") and "stopped after step 2 of 3" in done.stdout
    assert "going on from" in tune(flags)

    cache = Path(common.datasets.config.HF_DATASETS_CACHE)
    before = {file: file.stat().st_mtime_ns for file in cache.rglob("*.arrow")}
    tune(flags | {"run_dir": direct, "checkpoint_style": "stateful", "async_checkpoint": True})
    after = {file: file.stat().st_mtime_ns for file in cache.rglob("*.arrow")}
    assert before == after  # nothing was tokenized again
    assert losses(direct) == losses(run_dir) and len(losses(direct)) == 3
    tokenizer = AutoTokenizer.from_pretrained(direct / "hf")
    assert len(tokenizer) == 264 and tokenizer.pad_token == "<|pad|>"
    grown = AutoModelForCausalLM.from_pretrained(direct / "hf")
    assert grown.config.vocab_size == 320
    weight, was = grown.get_input_embeddings().weight, old.get_input_embeddings().weight.float()
    assert (weight[:257] - was[:257]).abs().max() < 0.02 < was.std()  # three steps from the start
    assert weight[257:].std().item() == pytest.approx(was[:257].std().item(), rel=0.3)
    assert grown.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    last = metrics(direct)[1][-1]
    assert last["step"] == 3 and "validation_bits_per_byte" not in last


def test_a_model_with_a_template_of_its_own_is_not_changed(flags, conversations, tmp_path):
    """Nothing is added to its tokenizer, and its first loss is that of plain transformers."""
    start = tmp_path / "start"
    more = ("<|header|>", "<|eot|>", "<|begin|>", "<|spare|>")
    own = TEMPLATES["headers"]
    save_base(start, lambda t: t.add_special_tokens({"pad_token": "<|spare|>"}), own, more)
    torch.manual_seed(2)
    model = Qwen2ForCausalLM(small_shape(vocab_size=270))
    model.save_pretrained(start)
    flags = flags | {"init_from": start, "run_dir": tmp_path / "run", "steps": 1}
    said_so = tune(flags, ranks=1)
    exported = AutoTokenizer.from_pretrained(tmp_path / "run/hf")
    assert len(exported) == 261 and exported.chat_template == own
    config = json.loads((tmp_path / "run/hf/config.json").read_text())
    assert config["vocab_size"] == 270

    tokenizer, known = fsdp2_sft.chat_tokenizer(str(start))
    assert known == len(tokenizer) == 261
    training, summed, labels = training_of(conversations, tokenizer), 0.0, 0
    assert f"{training.rows.notes['cut to 512 tokens']:,} conversations are cut" in said_so
    with torch.no_grad():
        read = np.concatenate([training.micro_batch(k) for k in range(4)])
        for line in training.rows.chosen[read]:
            ids, wanted = labels_in_transformers(tokenizer, conversations, line)
            count = int((wanted[:, 1:] != -100).sum())
            summed += count * model(input_ids=ids, labels=wanted).loss.item()
            labels += count
    [line] = metrics(tmp_path / "run")[0]
    assert line["tokens"] == labels and line["loss"] == pytest.approx(summed / labels, rel=1e-6)


# --- The whole script -----------------------------------------------------------------------------


def test_every_pretraining_script_is_a_start(run, shape_directory, flags, tmp_path):
    """A run directory of each holds the same weights; one rank and two train alike on them."""
    seen = []
    for name in ("ddp", "fsdp1", "fsdp2"):
        start = run(f"{name}_pretrain.py", 2, model=shape_directory)
        tune(flags | {"init_from": start, "run_dir": tmp_path / name, "steps": 2})
        seen.append(losses(tmp_path / name))
    assert seen[0] == seen[1] == seen[2]
    tune(flags | {"init_from": start / "hf", "run_dir": tmp_path / "hf", "steps": 2}, ranks=1)
    assert losses(tmp_path / "hf") == pytest.approx(seen[0], rel=1e-4)
    norms = [[line["grad_norm"] for line in metrics(tmp_path / d)[0]] for d in ("hf", "ddp")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)  # though ranks hold unlike many labels


def test_overfitted_answers_come_back_and_stop(tmp_path):
    """Ten conversations learned by heart, then asked in plain transformers."""
    answers = {f"Number {n}?": f"It is {word}." for n, word in enumerate(
        "zero one two three four five six seven eight nine".split()
    )}  # fmt: skip
    rows = [{"prompt": question, "completion": answer} for question, answer in answers.items()]
    path = write(tmp_path / "ten.jsonl", rows)
    flags = {"dataset": path, "run_dir": tmp_path / "run", "max_length": 128, "steps": 120}
    flags |= {"micro_batch_tokens": 256, "global_batch_tokens": 512, "learning_rate": 4e-3}
    tune(flags | {"eval_every": 120, "checkpoint_every": 120, "weight_decay": 0.0}, ranks=1)
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
