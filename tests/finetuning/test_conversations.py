"""Conversations with published models' templates, which have no tags; what is read and left out."""

# ruff: noqa: E501
import copy
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from launching import ROOT, refused, small_shape
from transformers import AutoTokenizer, Qwen2ForCausalLM

import common
import conversations
import fsdp2_grpo
import fsdp2_sft
from common import LeftOut
from conversations import chat_tokenizer

HEADER = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
# In the style of published models. «» are where tags would go: around an answer, without the header
# that the generation prompt has.
TEMPLATES = {
    "chatml": """{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n'}}«{{
message['content'] + '<|im_end|>' + '\\n'}}»{% endfor %}"""
    + HEADER,
    "default system": """{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>assistant\\n' }}«{{- message.content + '<|im_end|>\\n' }}»
    {%- endif %}
{%- endfor %}
"""
    + HEADER,
    "headers": """{% set loop_messages = messages %}{% for message in loop_messages %}{% set content =
'<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' %}{% if loop.index0 == 0 %}{%
set content = bos_token + content %}{% endif %}{{ content }}«{{ message['content'] | trim +
'<|eot_id|>' }}»{% endfor %}{% if add_generation_prompt %}{{
'<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}""",
    "turns": """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}{%
set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role
+ '\\n' }}«{{ message['content'] | trim + '<end_of_turn>\\n' }}»{% endfor %}{% if
add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}""",
    "instructions": """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{
'[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}«{{ ' ' +
message['content'] + eos_token }}»{% else %}{{ raise_exception('Only user and assistant!') }}{% endif
%}{% endfor %}""",
    "drops thoughts": """{%- for message in messages %}
{%- set content = message.content %}
{%- if message.role == 'assistant' and not loop.last and '</think>' in content %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' }}«{{- content + '<|im_end|>\\n' }}»
{%- endfor %}"""
    + HEADER,
    "end of text": """{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' }}«{{
message['content'] + '<|end|>\\n' }}»{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n'
}}{% else %}{{ eos_token }}{% endif %}""",
}
ENDS = {
    "chatml": "<|im_end|>\n", "default system": "<|im_end|>\n", "headers": "<|eot_id|>",
    "turns": "<end_of_turn>\n", "instructions": "</s>", "drops thoughts": "<|im_end|>\n",
    "end of text": "<|end|>\n",
}  # fmt: skip
TOKENS = """<|im_start|> <|im_end|> <|start_header_id|> <|end_header_id|> <|eot_id|> <start_of_turn>
    <end_of_turn> [INST] [/INST] <|user|> <|assistant|> <|system|> <|end|>""".split()


def said(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


ONE = said(("user", "a"), ("assistant", "b"))
CONVERSATIONS = [
    ONE,
    said(("user", " What?\n"), ("assistant", "  4\n\n"), ("user", "é🙂"), ("assistant", "漢 x")),
    said(("user", "q"), ("assistant", "<think>\nhm\n</think>\n\nyes"), ("user", "r"),
         ("assistant", "<think>\nso\n</think>\n\nno")),
    said(("user", "assistant\n"), ("assistant", "assistant\nuser\n"), ("user", "b"),
         ("assistant", "b")),
]  # fmt: skip


def plain(template: str) -> str:
    return template.translate({ord("«"): None, ord("»"): None})


def save_template(folder: Path, template: str) -> str:
    """Save the `bytes` tokenizer with the tokens of many families and a chat template."""
    tokenizer = copy.deepcopy(common.load_tokenizer("bytes"))
    tokenizer.add_special_tokens({"additional_special_tokens": TOKENS})
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


def flags_of(name: str, template: str = "own") -> SimpleNamespace:
    return SimpleNamespace(tokenizer=name, chat_template=template)


def tune_with(folder: Path, template: str) -> tuple:
    """Return what `chat_tokenizer` makes of a template: tokenizer, end of a turn, known ids."""
    return chat_tokenizer(flags_of(save_template(folder, template)), "new tokens")


def encode(made: tuple, messages: list) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and loss mask of a conversation with every answer in the loss."""
    tokenizer, *_ = made
    text, spans, _ = conversations.find_answers(tokenizer, messages, 0, tools=[])
    return fsdp2_sft.encode(tokenizer, text, spans)


def in_loss(row: dict, made: tuple) -> str:
    tokenizer, *_ = made
    ids, mask, *_ = fsdp2_sft.tokenize_conversation(row, tokenizer)
    return tokenizer.decode(ids[mask])


# --- Templates without tags -----------------------------------------------------------------------


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_without_tags_trains_as_with_tags_put_in_by_hand(name, tmp_path):
    """Ids and mask are those of transformers. The template itself keeps every byte."""
    template = TEMPLATES[name]
    own = tune_with(tmp_path / "own", plain(template))
    made, *_ = own
    tags = "{% if message.role == 'assistant' %}{% generation %}X{% endgeneration %}"
    tags += "{% else %}X{% endif %}"
    tagged = re.sub("«(.*?)»", lambda found: tags.replace("X", found[1]), template, flags=re.S)
    oracle = AutoTokenizer.from_pretrained(save_template(tmp_path / "tagged", tagged))
    oracle.split_special_tokens = False
    made.save_pretrained(tmp_path / "exported")
    exported = AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert exported.chat_template == plain(template) and exported.eos_token == "</s>"
    assert exported.pad_token is None and len(exported) == len(oracle)
    for messages in CONVERSATIONS:
        ids, mask = encode(own, messages)
        expected = oracle.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        wanted = np.array(expected["assistant_masks"], bool)
        if name == "end of text":
            wanted[-1] = True  # the end of the text is in the loss too
        if name == "drops thoughts" and "think" in str(messages):
            # An answer is not trained without its thought.
            wanted[: np.flatnonzero(wanted & ~np.roll(wanted, 1))[-1]] = False
        assert (
            ids.tolist()
            == expected["input_ids"]
            == exported.apply_chat_template(messages)["input_ids"]
        )
        # Transformers' mask loses the last bytes of characters.
        assert made.decode(ids[mask]) == made.decode(ids[wanted]), messages
        assert (mask == wanted).all()
        assert made.decode(ids[mask]).removesuffix("</s>").endswith(ENDS[name].removesuffix("</s>"))


@pytest.mark.parametrize("name", TEMPLATES)
def test_only_the_completion_of_a_prompt_is_in_the_loss(name, tmp_path):
    """Though the earlier answer reads the same."""
    made = tune_with(tmp_path, plain(TEMPLATES[name]))
    before = said(("user", "b"), ("assistant", "same"), ("user", "b"))
    blank = " " if name == "instructions" else ""
    end = ENDS[name] + ("</s>" if name == "end of text" else "")
    assert in_loss({"prompt": before, "completion": "same"}, made) == blank + "same" + end
    both = (blank + "same" + ENDS[name]) * 2
    row = {"messages": before + said(("assistant", "same"))}
    assert in_loss(row, made) == both + ("</s>" if name == "end of text" else "")


def test_answers_with_unlike_many_spans(tmp_path):
    """A thought is a span of its own, which only some answers have."""
    template = """{% for m in messages %}{% if m.role == 'assistant' %}A:{% set parts =
m.content.split('</t>') %}{% for part in parts %}{% generation %}{{ part }}{% if loop.last
%}<|im_end|>{% else %}</t>{% endif %}{% endgeneration %}{% endfor %}{% else %}{{ '[INST]' +
m.content }}{% endif %}{% endfor %}"""
    made = tune_with(tmp_path, template)
    for earlier, last in ("x", "p</t>q"), ("x</t>y", "z"), ("x</t>y", "p</t>q"):
        before = said(("user", "1"), ("assistant", earlier), ("user", "2"))
        assert in_loss({"prompt": before, "completion": last}, made) == f"{last}<|im_end|>"
        row = {"messages": before + said(("assistant", last))}
        assert in_loss(row, made) == f"{earlier}<|im_end|>{last}<|im_end|>"


LEAVES_OUT = {
    "the last two messages": plain(TEMPLATES["chatml"]).replace("in messages", "in messages[-2:]"),
    "the system prompt": plain(TEMPLATES["chatml"]).replace(
        "in messages %}", "in messages if message.role != 'system' %}"
    ),
    "upper case": plain(TEMPLATES["chatml"]).replace("message['content']", "message.content[:3]"),
}


@pytest.mark.parametrize("name", LEAVES_OUT)
def test_a_conversation_of_which_the_template_leaves_out_parts_is_left_out(name, tmp_path):
    template = LEAVES_OUT[name].replace("in messages[-2:]", "in messages[-4:]")
    long = said(("system", "sys"), ("user", "1234"), *[("assistant", "5678"), ("user", "90ab")] * 2)
    try:
        made = tune_with(tmp_path, template)
    except common.Refusal as refusal:
        assert "leaves out or mixes up" in str(refusal)
        return
    with pytest.raises(LeftOut, match="have parts that the chat template leaves out"):
        in_loss({"prompt": long, "completion": "last"}, made)


def test_a_template_that_cannot_take_the_messages_leaves_them_out(tmp_path):
    made = tune_with(tmp_path, plain(TEMPLATES["instructions"]))
    with pytest.raises(LeftOut, match="no place in the chat template: Only user and assistant"):
        in_loss({"system": "s", "messages": ONE}, made)


def test_a_template_where_no_token_ends_an_answer_is_refused(tmp_path):
    """As GLM-4's. The refusal names the way out, which works."""
    template = """{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
    name = save_template(tmp_path, template)
    line = refused(chat_tokenizer, flags_of(name), "new tokens")
    assert "no single token ends an answer" in line and "--chat_template collection" in line
    made = chat_tokenizer(flags_of(name, "collection"), "new tokens")
    assert made[0].chat_template.endswith(conversations.TEMPLATE)
    assert made[0].eos_token == "<|im_end|>"
    assert in_loss({"messages": ONE}, made) == "b<|im_end|>"


# --- Thoughts, calls and tools --------------------------------------------------------------------

FULL = (
    """{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}{{
'<|im_start|>' + m.role + '\\n' }}{% if m.reasoning_content %}<think>{{ m.reasoning_content
}}</think>{% endif %}{{ m.content }}{% for call in m.tool_calls or [] %}<call>{{ call.function.name
}}: {{ call.function.arguments | tojson }}</call>{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"""
    + HEADER
)
CALLS = [
    {"function": {"name": "f", "arguments": {"a": "x", "n": 1, "d": {"e": ["y"]}}}},
    {"function": {"name": "g", "arguments": '{"n": null}'}},
]
WITH_CALLS = {
    "tools": [{"name": "f", "description": "what f does"}],
    "messages": [
        ONE[0],
        {"role": "assistant", "content": "say", "reasoning": "hm", "tool_calls": CALLS},
        {"role": "tool", "content": "result", "name": "f"},
        {"role": "assistant", "content": "b", "reasoning": "so"},
    ],
}


def test_the_loss_covers_thoughts_and_calls(tmp_path):
    made = tune_with(tmp_path, FULL)
    trained = """<think>hm</think>say<call>f: {"a": "x", "n": 1, "d": {"e": ["y"]}}</call>"""
    trained += """<call>g: {"n": null}</call><|im_end|>\n<think>so</think>b<|im_end|>\n"""
    assert in_loss(WITH_CALLS, made) == trained


def test_the_collections_template_has_a_place_for_them():
    """And writes other conversations as before."""
    tokenizer, *_ = made = chat_tokenizer(flags_of("bytes"), "new tokens")
    tool = '{"type": "function", "function": {"name": "f", "description": "what f does"}}'
    call = """<tool_call>\n{"name": "f", "arguments": {"a": "x", "n": 1, "d": {"e": ["y"]}}}
</tool_call>\n<tool_call>\n{"name": "g", "arguments": {"n": null}}\n</tool_call><|im_end|>"""
    thought = "<|begin_of_thought|>\n{}\n<|end_of_thought|>\n\n"
    answers = [thought.format("hm") + "say\n" + call, thought.format("so") + "b<|im_end|>"]
    assert in_loss(WITH_CALLS, made) == "".join(answers)
    turns = [
        f"user\na<|im_end|>\n<|im_start|>assistant\n{answers[0]}",
        f"tool\nresult<|im_end|>\n<|im_start|>assistant\n{answers[1]}\n",
    ]
    for system, more in ("", ""), ("\ns", "s"):
        ids, *_ = fsdp2_sft.tokenize_conversation(WITH_CALLS | {"system": more}, tokenizer)
        text = "\n<|im_start|>".join([f"<|im_start|>system{system}\n{tool}<|im_end|>", *turns])
        assert tokenizer.decode(ids) == text
        assert len(ids) == len(made[0](text, add_special_tokens=False)["input_ids"])
    silent = {"role": "assistant", "content": None, "tool_calls": CALLS}
    assert in_loss({"messages": [ONE[0], silent]}, made) == call


DROPS = {  # what a template leaves out -> the change, and why the row is left out
    "thoughts": ("{% if m.reasoning_content %}", "{% if false %}", "without its thought"),
    "calls": ("m.tool_calls or []", "[]", "mixes up: assistant"),
    "the second call": ("m.tool_calls or []", "(m.tool_calls or [])[:1]", "mixes up: assistant"),
    "names": ("{{ call.function.name\n}}: {{", "{{", "mixes up: assistant"),
    "arguments": ("{{ call.function.arguments | tojson }}", "", "mixes up: assistant"),
    "the second name": ("{{ call.function.name\n", "{{ call.function.name * 2 if loop.first else ''",
                        "mixes up: assistant"),
    "one argument": ("call.function.arguments |", "(call.function.arguments.items() | list)[:2] |",
                     "mixes up: assistant"),
    "one of two texts": ("{{ call.function.arguments |", "{{ call.function.name * 2 }}{{ {} |",
                         "mixes up: assistant"),
    "text beside calls": ("{{ m.content }}", "{% if not m.tool_calls %}{{ m.content }}{% endif %}",
                          "mixes up: assistant"),
    "results": ("in messages %}", "in messages if m.role != 'tool' %}", "mixes up: tool"),
    "tools": ("tools or []", "[]", "mixes up: tools"),
    "calls at once": ("{% for call", "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ "
                      "raise_exception('one at a time') }}{% endif %}{% for call", "one at a time"),
}  # fmt: skip


@pytest.mark.parametrize("name", DROPS)
def test_a_template_that_drops_a_field_leaves_the_row_out(name, tmp_path):
    old, new, why = DROPS[name]
    assert old in FULL
    made = tune_with(tmp_path, FULL.replace(old, new))
    with pytest.raises(LeftOut, match=why):
        in_loss(WITH_CALLS, made)
    assert in_loss({"messages": ONE}, made) == "b<|im_end|>\n"


def test_tags_of_the_templates_own_have_to_be_around_answers(tmp_path):
    """Around all of them, and nothing else. A dash at the end of a loop stays."""
    calls_outside = """{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}{%
generation %}{{ m.reasoning_content }}{{ m.content }}{% endgeneration %}{{ m.tool_calls | tojson }}{%
else %}{{ m.content }}{% endif %}{% endfor %}"""
    users_inside = """{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{%
endfor %}"""
    call = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    for template, answer, who in (
        (calls_outside, ONE[1] | {"tool_calls": call}, "assistant"),
        (users_inside, ONE[1], "user"),
    ):
        tokenizer = common.load_tokenizer(save_template(tmp_path, template))
        with pytest.raises(LeftOut, match=f"mixes up: {who}"):
            conversations.find_answers(tokenizer, [ONE[0], answer], 0, [])
    made = tune_with(tmp_path, FULL.replace("{% endfor %}{% if add", "{% endfor -%} {% if add"))
    assert in_loss({"messages": ONE}, made) == "b<|im_end|>\n"


def test_sorted_arguments_stay_in_order(tmp_path):
    """As a template sorts them that writes them one by one. The marks must not change that."""
    one_by_one = "{% for key, value in call.function.arguments | dictsort %}{{ key }}={{ value }} "
    template = FULL.replace("{{ call.function.arguments | tojson }}", one_by_one + "{% endfor %}")
    made = tune_with(tmp_path, template)
    call = {"name": "f", "arguments": {"date_end": "2", "date": "1", "b": "", "B": {}}}
    row = {"messages": [ONE[0], {"role": "assistant", "tool_calls": [call]}]}
    trained = "<call>f: b= B={} date=1 date_end=2 </call><|im_end|>\n"
    assert in_loss(row, made) == trained


def test_an_earlier_answer_is_not_trained_without_its_thought(tmp_path):
    """A note says so, and the last answer has to have its thought."""
    last = "loop.last and m.reasoning_content"
    template = FULL.replace("m.reasoning_content %}", f"{last} %}}")
    tokenizer, *_ = made = tune_with(tmp_path, template)
    turns = [ONE[0], ONE[1] | {"thinking": "hm"}, ONE[0], ONE[1] | {"thinking": "so"}]
    assert in_loss({"messages": turns}, made) == "<think>so</think>b<|im_end|>\n"
    note = "trained in part, because they have earlier answers whose thoughts the chat template"
    assert fsdp2_sft.tokenize_conversation({"messages": turns}, tokenizer)[4] == f"{note} drops"
    # Without a thought of its own, the earlier one is trained.
    row = {"messages": [*ONE, *turns[2:]]}
    assert in_loss(row, made) == "b<|im_end|>\n<think>so</think>b<|im_end|>\n"
    assert fsdp2_sft.tokenize_conversation(row, tokenizer)[4] == ""
    # Before a completion, it is not in the loss anyway.
    row = {"prompt": turns[:3], "completion": turns[3:]}
    assert fsdp2_sft.tokenize_conversation(row, tokenizer)[4] == ""
    with pytest.raises(LeftOut, match="without its thought"):
        in_loss({"messages": [*turns, ONE[0]]}, made)


def test_texts_cannot_forge_turns_but_name_thoughts(tmp_path):
    """The tokens of thoughts and solutions structure no turn, so any text may hold them."""
    made = chat_tokenizer(flags_of("bytes"), "new tokens")
    for token in conversations.INSIDE:
        for name in ("system", "prompt", "completion"):
            row = {"system": "s", "prompt": "a", "completion": "b"} | {name: f"x{token}y"}
            ids, *_ = fsdp2_sft.tokenize_conversation(row, made[0])
            assert (ids == made[0].convert_tokens_to_ids(token)).sum() == 1
    with pytest.raises(UnicodeEncodeError):  # which costs the row
        fsdp2_sft.tokenize_conversation({"prompt": "\ud83d", "completion": "b"}, made[0])
    forged = "x<|im_end|>"
    calls = [{"name": "f", "arguments": {"a": forged}}], [{"name": forged}]
    for row in (
        {"messages": [ONE[0], ONE[1] | {"reasoning": forged}]},
        *({"messages": [ONE[0], ONE[1] | {"tool_calls": each}]} for each in calls),
        {"messages": [*ONE, {"role": "tool", "content": forged}, ONE[1]]},
        {"messages": ONE, "tools": [{"name": "f", "description": forged}]},
    ):
        with pytest.raises(LeftOut, match="spell out a special token"):
            in_loss(row, made)


# --- What is read ---------------------------------------------------------------------------------

SYSTEM = said(("system", "s"))
READ = {  # a row -> its messages
    "messages as JSON": ({"messages": json.dumps(ONE)}, ONE),
    "nulls of Parquet": (
        {"messages": ONE, "images": [{"path": None, "bytes": None}], "tools": [None]}, ONE),
    "nulls in a message": (
        {"messages": [m | {"tool_calls": [{"function": {"name": None}}]} for m in ONE]}, ONE),
    "empty system column": ({"messages": ONE, "system": ""}, ONE),
    "blank system turn": ({"messages": said(("system", " \n")) + ONE}, ONE),
    "system column": ({"messages": ONE, "system": "s"}, SYSTEM + ONE),
    "system twice": ({"messages": SYSTEM + ONE, "system": "s"}, SYSTEM + ONE),
    "system twice, pair": ({"prompt": SYSTEM + ONE[:-1], "completion": ONE[-1:], "system": "s"}, SYSTEM + ONE),
    "no system": ({"prompt": "a", "completion": "b", "system": None}, ONE),
    "good label": ({"prompt": "a", "completion": "b", "label": True}, ONE),
    "names of roles": (
        {"conversations": [{"from": "Human", "value": "a"}, {"from": "ChatGPT", "value": "b"}]},
        ONE),
    "model": ({"messages": [ONE[0], {"role": "model", "content": "b"}]}, ONE),
    "developer": ({"messages": [{"role": "developer", "content": "s"}, *ONE]}, SYSTEM + ONE),
    "tools are context": (
        {"messages": [ONE[0], {"role": "observation", "content": "x"}, ONE[1]]},
        [ONE[0], {"role": "tool", "content": "x"}, ONE[1]]),
    "both forms": (
        {"messages": [m | {"from": None, "value": None} for m in ONE]}, ONE),
    "ShareGPT's form in a file of both": (
        {"messages": [{"from": "human", "value": "a", "role": None, "content": None}, ONE[1]]},
        ONE),
    "flags of a question": (
        {"messages": [ONE[0] | {"weight": 0, "train": False}, ONE[1] | {"weight": 1}]}, ONE),
    "words about the mode": ({"messages": ONE, "reasoning": "off", "thinking": None}, ONE),
    "metadata": ({"messages": ONE, "score": 0.1, "source": {"url": "x"}}, ONE),
    "system_prompt": ({"messages": ONE, "system_prompt": "s"}, SYSTEM + ONE),
    "instruction": ({"instruction": "a", "input": "", "output": "b"}, ONE),
    "instruction and input": (
        {"instruction": "a", "input": "x", "output": "b"},
        said(("user", "a\n\nx"), ("assistant", "b"))),
    "question": ({"question": "a", "answer": "b"}, ONE),
    "answer beside the messages": (
        {"messages": [*ONE, ONE[0]], "completion": "c"},
        [*ONE, ONE[0], {"role": "assistant", "content": "c"}]),
    "thought": (
        {"messages": [ONE[0], ONE[1] | {"thinking": "hm", "reasoning": "hm"}]},
        [ONE[0], ONE[1] | {"reasoning_content": "hm"}]),
    "calls": (
        {"messages": [ONE[0], {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": null}'}},
            {"name": "g", "arguments": {"y": [1]}}]},
            {"role": "tool", "content": "r", "tool_call_id": "c", "name": "f"}]},
        [ONE[0], {"role": "assistant", "content": "", "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": None}}},
            {"type": "function", "function": {"name": "g", "arguments": {"y": [1]}}}]},
            {"role": "tool", "content": "r", "name": "f", "tool_call_id": "c"}]),
    "for training": ({"messages": [ONE[0], ONE[1] | {"weight": 1.0, "masked": False}],
                      "train": "True", "loss_mask": 1}, ONE),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_messages_are_read(name):
    row, messages = READ[name]
    is_pair = {"completion", "output", "question"} & {*row}
    start = len(messages) - 1 if is_pair else 0
    assert conversations.read_conversation(row) == (messages, start)


NOT_FOR_TRAINING = [
    *({"weight": value} for value in (0, 0.0, "0", 0.5, "0.5", False)),
    *({name: False} for name in ("loss", "train", "training", "trainable", "learnable")),
    *({name: 0} for name in ("loss_mask", "loss_weight")),
    *({"masked": value} for value in (True, 1, "true")),
    {"loss": "False"},
]
PART = "are not for training, or only in part: "


@pytest.mark.parametrize("flag", NOT_FOR_TRAINING, ids=str)
def test_what_is_not_for_training_is_left_out(flag):
    """Whether the flag is on the row or on a message."""
    for row in {"messages": ONE} | flag, {"messages": [ONE[0], ONE[1] | flag]}:
        with pytest.raises(LeftOut, match=PART + next(iter(flag))):
            conversations.read_conversation(row)


LEFT_OUT = [
    ({"prompt": "a", "completion": "b", "label": False}, "a label that says .* bad"),
    ({"prompt": "a", "completion": "b", "label": 0}, "a label that says .* bad"),
    ({"messages": [ONE[0], {"role": "critic", "content": "b"}]}, "unknown role"),
    ({"messages": [ONE[0], {"role": "function_call", "content": "b"}]}, "unknown role"),
    ({"messages": [ONE[0], {"content": "b"}]}, "unknown role"),
    ({"messages": [ONE[0], ONE[1] | {"content": " \n"}]}, "an empty answer"),
    # A part that is a thought is not trained as an answer, and a row costs only itself.
    ({"messages": [ONE[0], ONE[1] | {"content": [{"type": "thinking", "text": "b"}]}]}, "text"),
    ({"messages": [ONE[0], ONE[1] | {"content": [{"type": "image", "text": None}]}]}, "text"),
    ({"messages": [ONE[0], ONE[1] | {"content": ["b"]}]}, "text"),
    ({"messages": [ONE[0], ONE[1] | {"tool_calls": [{"id": "f"}]}]}, "a call without a name"),
    ({"messages": [ONE[0], ONE[1] | {"tool_calls": 4}]}, "a call without a name"),
    ({"messages": [ONE[0], ONE[1] | {"tool_calls": [{"name": "f", "arguments": "x"}]}]}, "JSON"),
    ({"messages": [ONE[0], ONE[1] | {"tool_calls": [{"name": "f", "arguments": [1]}]}]}, "no obj"),
    (
        {"messages": [ONE[0], ONE[1] | {"tool_calls": [{"name": "f", "parameters": {"a": 1}}]}]},
        "more than text: parameters",
    ),
    ({"messages": [ONE[0] | {"tool_calls": [{"name": "f"}]}, ONE[1]]}, "text: tool_calls"),
    ({"messages": [ONE[0] | {"thinking": "hm"}, ONE[1]]}, "more than text: thinking"),
    ({"messages": [ONE[0], ONE[1] | {"thinking": ["hm"]}]}, "a thought that is not text"),
    ({"messages": [ONE[0], ONE[1] | {"thinking": "hm", "reasoning": "oh"}]}, "more than one of"),
    ({"messages": [ONE[0], ONE[1] | {"value": "c"}]}, "more than one of content, value"),
    ({"messages": [ONE[0], ONE[1] | {"train_detail": [{"train": False}]}]}, "text: train_detail"),
    ({"messages": [ONE[0], ONE[1] | {"reasoning_details": [{"a": 1}]}]}, "reasoning_details"),
    ({"messages": ONE, "reasoning": "hm"}, "a thought beside the messages"),
    ({"messages": ONE, "kto_tag": False}, "a label that says .* bad"),
    ({"messages": ONE, "label": 0.0}, "a label that says .* bad"),
    ({"messages": ONE, "system": "s", "system_prompt": "t"}, "more than one of system"),
    ({"messages": ONE, "documents": ["d"]}, "more than text: documents"),
    ({"messages": ONE, "sample_weight": 0.5}, "not for training"),
    ({"question": "a", "answer": "b", "choices": ["x"]}, "more than text: choices"),
    ({"instruction": "a", "input": {"b": 1}, "output": "c"}, "more than text: b"),
    *(
        ({"messages": [ONE[0], ONE[1] | {"content": [{"type": kind, "text": "b"} | more]}]}, why)
        for kind, more, why in (
            ("reasoning_text", {}, "a part that is not text"),
            ("text", {"train": False}, "not for training, or only in part: train"),
            ("text", {"weight": 0}, "not for training, or only in part: weight"),
            ("text", {"annotations": ["x"]}, "more than text: annotations"),
        )
    ),
    ({"messages": ONE, "images": [{"path": "x.png"}]}, "more than text: images"),
    ({"messages": "no JSON"}, "are broken JSON"),
    ({"messages": 4}, "hold no messages"),
    ({"prompt": 4, "completion": "b"}, "hold no messages"),
]


@pytest.mark.parametrize("row, why", LEFT_OUT, ids=str)
def test_what_is_no_example_is_left_out_with_a_reason(row, why):
    with pytest.raises(LeftOut, match=why):
        conversations.read_conversation(row)


def test_tools_are_read():
    """As a list or as JSON texts, with and without what wraps a function."""
    function = {"name": "f", "parameters": {"type": "object", "default": None}}
    wrapped = [{"type": "function", "function": function}]
    for tools in (wrapped, [function], json.dumps(wrapped), [json.dumps(function)], function):
        assert conversations.read_tools({"tools": tools}) == wrapped
    for tools in (None, [], "[]", "", {}, [None]):
        assert conversations.read_tools({"tools": tools}) == []
    for tools in (["f"], [5], 5, [{"parameters": {"type": "object"}}]):
        with pytest.raises(LeftOut, match="broken JSON|without a name"):
            conversations.read_tools({"tools": tools})


def test_pairs_of_answers_are_left_out():
    """DPO's files. As prompt, chosen and rejected there is no answer to train on."""
    made = chat_tokenizer(flags_of("bytes"), "new tokens")
    with pytest.raises(LeftOut, match="no column completion"):
        in_loss({"prompt": "a", "chosen": "b", "rejected": "c"}, made)
    with pytest.raises(LeftOut, match="no column completion"):
        in_loss({"chosen": ONE, "rejected": ONE}, made)


def test_a_program_shows_what_becomes_of_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import rows

    file = tmp_path / "a.jsonl"
    lines = [{"question": "a", "answer": "b"}, {"messages": [ONE[0], ONE[1] | {"x": 1}]}, {}]
    file.write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setattr("sys.argv", ["rows.py", str(file), "--rows", "2"])
    rows.main()
    first, second = capsys.readouterr().out.split("--- row ")[1:]
    assert first.startswith(
        "0\nin the loss of fine-tuning: `b<|im_end|>`\nend of the prompt in RL: `"
    )
    assert first.endswith("<|im_start|>assistant\n`\nreference in RL: `b`\n")
    why = "left out: they hold more than text: x\n"
    assert second == f"1\nin the loss of fine-tuning: {why}reference in RL: {why}"
    monkeypatch.setattr("sys.argv", ["rows.py", str(tmp_path / "none.jsonl")])
    with pytest.raises(SystemExit, match="2"):
        rows.main()
    assert "error: --dataset" in capsys.readouterr().err


# --- Reinforcement learning -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer, reference",
    [
        ("007", "007"), ("1.10", "1.10"), (7, "7"), (["é", 1], '["é", 1]'),
        ({"x": None}, '{"x": null}'),
    ],
)  # fmt: skip
def test_a_reference_is_text_or_becomes_json(answer, reference):
    assert fsdp2_grpo.read_prompt({"prompt": "a", "answer": answer}) == (ONE[:1], reference)


def test_a_float_as_reference_is_left_out():
    """It may have been written as 1.10."""
    with pytest.raises(LeftOut, match="hold an answer that is not text"):
        fsdp2_grpo.read_prompt({"prompt": "a", "answer": 1.1})


def test_a_prompt_holds_no_answer_and_no_calls():
    """They are neither dropped nor a reference."""
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}
    for row, why in (
        ({"prompt": ONE}, "a prompt that begins the answer"),
        ({"prompt": ONE, "answer": "b"}, "a prompt that begins the answer"),
        ({"prompt": ONE, "completion": "b"}, "a prompt that begins the answer"),
        ({"messages": [*ONE, ONE[1]]}, "a prompt that begins the answer"),
        ({"messages": ONE, "tools": [{"name": "f"}]}, "hold tools or calls"),
        ({"messages": [ONE[0], call]}, "hold tools or calls"),
        ({"messages": [ONE[0], call, {"role": "tool", "content": "r"}, ONE[1]]}, "hold tools or"),
    ):
        with pytest.raises(LeftOut, match=why):
            fsdp2_grpo.read_prompt(row)
    thought = ONE[1] | {"reasoning_content": "hm"}
    assert fsdp2_grpo.read_prompt({"messages": [ONE[0], thought]}) == (ONE[:1], "b")
    assert fsdp2_grpo.read_prompt({"question": "a", "answer": "b"}) == (ONE[:1], "b")
    assert fsdp2_grpo.read_prompt({"question": "a", "answer": 7}) == (ONE[:1], "7")
    row = {"messages": [*ONE, ONE[0]], "answer": "b"}
    assert fsdp2_grpo.read_prompt(row) == ([*ONE, ONE[0]], "b")


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_is_what_stands_before_the_answer(name, tmp_path):
    """Also with [INST], where no generation prompt is needed."""
    folder = save_template(tmp_path, plain(TEMPLATES[name]))
    made, turn_end, _ = chat_tokenizer(flags_of(folder), "known tokens")
    assert made.decode([turn_end]) == ENDS[name].strip()
    tokens, in_reference, *_ = fsdp2_grpo.tokenize_prompt({"prompt": "a", "answer": "b"}, made)
    prompt = made.decode(tokens[~in_reference])
    trained = chat_tokenizer(flags_of(folder), "new tokens")
    ids, mask = encode(trained, ONE)
    assert made.decode(ids).startswith(prompt)
    assert made.decode(ids[~mask]) == prompt


@pytest.fixture
def base(tmp_path) -> str:
    """Save a model whose generation_config.json lists three ids that end an answer."""
    folder = save_template(tmp_path / "base", plain(TEMPLATES["headers"]))
    model = Qwen2ForCausalLM(small_shape(vocab_size=320))
    model.generation_config.eos_token_id = [256, 300]
    model.save_pretrained(folder)
    return folder


MARKS = ["new tokens", "text", "known tokens"]  # of fsdp2_sft.py, fsdp2_lora.py, fsdp2_grpo.py


@pytest.mark.parametrize("marks", MARKS)
def test_the_export_samples_like_the_base_model(marks, base, tmp_path):
    """And ends where the base model ends, also with settings that transformers would not save: a
    temperature without sampling."""
    config = SimpleNamespace(model=base, tokenizer=base, chat_template="own")
    made, turn_end, _ = chat_tokenizer(config, marks)
    eot, eos = made.convert_tokens_to_ids(["<|eot_id|>", "</s>"])

    def settings() -> dict:
        found = conversations.base_generation(config, made, turn_end)
        found.to_json_file(tmp_path / "written.json")
        return json.loads((tmp_path / "written.json").read_text())

    assert settings()["eos_token_id"] == sorted({256, 300, eot, eos})
    own = {"temperature": 0.6, "top_p": 0.8, "eos_token_id": 256}
    file = Path(base, "generation_config.json")
    file.write_text(json.dumps(own))
    assert settings().items() >= (own | {"eos_token_id": sorted({256, eot, eos})}).items()
    file.unlink()
    assert settings()["eos_token_id"] == sorted({eot, eos})


def test_an_answer_ends_with_any_of_the_end_tokens(monkeypatch, base):
    """It samples no further, and gets its reward."""
    made, turn_end, _ = chat_tokenizer(flags_of(base), "known tokens")
    ends = [256, 300, turn_end]
    run = SimpleNamespace(
        tokenizer=made,
        config=SimpleNamespace(rewarded=True),
        model_config=SimpleNamespace(eos_token_id=ends),
    )
    monkeypatch.setattr(fsdp2_grpo, "reward", lambda prompt, answer, reference: 1 + len(answer))
    one = np.array([65], np.uint32)
    for last, reward in *((end, 2.0) for end in ends), (66, 0.0):
        tokens = np.array([65, last], np.uint32)
        answer = fsdp2_grpo.Answer(one, tokens, tokens, np.zeros(2, np.float32))
        assert fsdp2_grpo.judge(run, answer).reward == reward

    def model(input_ids: torch.Tensor, cache, **_) -> torch.Tensor:
        logits = torch.full((len(input_ids), 320), -100.0)
        logits[:, 300] = 100.0
        return logits

    nothing = SimpleNamespace(batch_repeat_interleave=int, batch_select_indices=int)
    monkeypatch.setattr(fsdp2_grpo, "DynamicCache", lambda: nothing)
    sampled = fsdp2_grpo.sample(model, [one], np.full((2, 8), 0.5), ends, torch.device("cpu"))
    assert [tokens.tolist() for tokens, _ in sampled] == [[300], [300]]
