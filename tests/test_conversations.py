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
from conftest import small_shape
from test_data import refused
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
    """Return what `chat_tokenizer` makes of a template: tokenizer, answer format, known ids."""
    return chat_tokenizer(flags_of(save_template(folder, template)), "new tokens")


def encode(made: tuple, messages: list) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and loss mask of a conversation with every answer in the loss."""
    tokenizer, answer_format, _ = made
    found = conversations.find_answers(tokenizer, messages, 0, answer_format.header)
    return fsdp2_sft.encode(tokenizer, *found)


def in_loss(row: dict, made: tuple) -> str:
    tokenizer, answer_format, _ = made
    ids, mask, *_ = fsdp2_sft.tokenize_conversation(row, tokenizer, answer_format.header)
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
    "for training": ({"messages": [ONE[0], ONE[1] | {"weight": 1.0, "masked": False}],
                      "train": "True", "loss_mask": 1}, ONE),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_messages_are_read(name):
    row, messages = READ[name]
    start = messages.index(ONE[1]) if "completion" in row else 0
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
    (
        {"messages": [ONE[0], ONE[1] | {"tool_calls": [{"name": "f"}]}]},
        "more than text: tool_calls",
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


def test_pairs_of_answers_are_left_out():
    """DPO's files. As prompt, chosen and rejected there is no answer to train on."""
    made = chat_tokenizer(flags_of("bytes"), "new tokens")
    with pytest.raises(LeftOut, match="no column completion"):
        in_loss({"prompt": "a", "chosen": "b", "rejected": "c"}, made)
    with pytest.raises(LeftOut, match="no column completion"):
        in_loss({"chosen": ONE, "rejected": ONE}, made)


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


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_is_what_stands_before_the_answer(name, tmp_path):
    """Also with [INST], where no generation prompt is needed."""
    folder = save_template(tmp_path, plain(TEMPLATES[name]))
    made, answer_format, _ = chat_tokenizer(flags_of(folder), "known tokens")
    assert made.decode([answer_format.turn_end]) == ENDS[name].strip()
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
    made, answer_format, _ = chat_tokenizer(config, marks)
    eot, eos = made.convert_tokens_to_ids(["<|eot_id|>", "</s>"])

    def settings() -> dict:
        found = conversations.base_generation(config, made, answer_format.turn_end)
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
    made, answer_format, _ = chat_tokenizer(flags_of(base), "known tokens")
    ends = [256, 300, answer_format.turn_end]
    run = SimpleNamespace(tokenizer=made, model_config=SimpleNamespace(eos_token_id=ends))
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
