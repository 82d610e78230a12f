"""Published chat templates x random conversations: what is read, left out, or wrong.

The templates are those of TRL. No oracle here uses the marks of `conversations.find_answers`:

- The text is what transformers renders of the conversation in its standard form.
- Every text of a conversation holds words that occur nowhere else. The loss has all words of an
  answer or none. Without any, the template dropped its thought. The last answer is in the loss.
- Where the conversation up to an answer renders to the beginning of the text, the answer's span is
  what follows.
- TRL's own training templates, which have tags, mark the same.
"""

import copy
import json
import random
import re
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

import common
import conversations
import fsdp2_sft
from common import LeftOut

FOLDER = Path(sys.prefix, "trl", "trl", "chat_templates")  # where .ci/run installs it
SEED = random.randrange(10**6)
NUMBER = 30  # conversations of each template
WORD = re.compile("(?:[bdfgklmnprtvz][aeiou]){4}")
FORMS = [
    *("{} {}", "{} {}.\n", "  {}\n\n{}  ", "{} é漢🙂 {}", "{}\n- `{}`\n", "«{}» {}\u00a0x"),
    *("{}\t{}\r\n", "**{}**: \"{}\" & 'x' <b>"),
]
# Turns: user, answer, one call, two calls, result of a tool.
SHAPES = "UA UA UAUA UAUA UAUAUA UCTA UCTA UPTTA UCTCTA UCTAUA UAUCTA UC UCTAUCTA UATUA".split()
LAST = "<|tool_response>"
OPENED = ["", "<think>", "</think>", "<think></think>", "<|START_THINKING|>"]  # by a prompt


class Writer:
    """Random conversations, in transformers' form, and the rows in which people write them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.used: set[str] = set()

    def word(self) -> str:
        rng = self.rng
        word = "".join(rng.choice("bdfgklmnprtvz") + rng.choice("aeiou") for _ in range(4))
        return self.word() if word in self.used or self.used.add(word) else word

    def text(self) -> str:
        return self.rng.choice(FORMS).format(self.word(), self.word())

    def call(self, number: int) -> dict:
        values = [
            lambda: f"{self.word()} {self.word()}", lambda: 3, lambda: -1.5, lambda: True, str,
            lambda: [self.word(), 2], lambda: {"k": self.word()}, lambda: f'q"{self.word()}\\n',
        ]  # fmt: skip
        count = self.rng.randint(0, 3)
        arguments = {f"a{key}": self.rng.choice(values)() for key in range(count)}
        function = {"name": self.word(), "arguments": arguments}
        return {"type": "function", "id": f"call{number:05d}", "function": function}

    def conversation(self) -> tuple[list[dict], list[dict] | None]:
        rng, shape = self.rng, self.rng.choice(SHAPES)
        think = rng.choice("none none all all some last inside first".split())
        said = [{"role": "system", "content": self.text()}] if rng.random() < 0.4 else []
        answers = [place for place, turn in enumerate(shape) if turn in "ACP"]
        waiting: list[dict] = []
        for place, turn in enumerate(shape):
            message: dict[str, Any] = {"role": "user", "content": self.text()}
            if turn == "T":
                message["role"] = "tool"
                message["content"] = rng.choice([self.text(), json.dumps({"r": self.word()})])
                if waiting:
                    call = waiting.pop(0)
                    message |= {"tool_call_id": call["id"], "name": call["function"]["name"]}
            if place in answers:
                message["role"] = "assistant"
                thinks = {"all": True, "some": rng.random() < 0.5, "last": place == answers[-1]}
                if thinks.get(think, think == "first" and place == answers[0]):
                    message["reasoning_content"] = self.text()
                if think == "inside":
                    thought = f"<think>\n{self.word()} {self.word()}\n</think>\n\n"
                    message["content"] = thought + self.text()
            if turn in "CP":
                calls = [self.call(10 * place + i) for i in range(1 + (turn == "P"))]
                message["tool_calls"], waiting = calls, copy.copy(calls)
                if rng.random() < 0.6:
                    message["content"] = ""
            said.append(message)
        names = [call["function"]["name"] for m in said for call in m.get("tool_calls", [])]
        if not (names and rng.random() < 0.7 or rng.random() < 0.1):
            return said, None
        return said, list(map(self.tool, names or [self.word()]))

    def tool(self, name: str) -> dict:
        keys = {"a0": {"type": "string", "description": self.word()}, "a1": {"type": "integer"}}
        schema = {"type": "object", "properties": keys, "required": ["a0"]}
        function = {"name": name, "description": self.word(), "parameters": schema}
        return {"type": "function", "function": function}

    def row(self, messages: list[dict], tools: list[dict] | None) -> dict:
        """Write a conversation with other names, with JSON texts, or with parts."""
        rng = self.rng
        thought = rng.choice(conversations.THOUGHTS)
        as_text, shared, parts = rng.random() < 0.5, rng.random() < 0.2, rng.random() < 0.2
        written = copy.deepcopy(messages)
        for message in written:
            if "reasoning_content" in message:
                message[thought] = message.pop("reasoning_content")
            for call in message.get("tool_calls", []) if as_text else []:
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
            if "tool_calls" in message and not message["content"]:
                message["content"] = rng.choice(["", None])
            elif parts:
                message["content"] = [{"type": "text", "text": message["content"]}]
            if shared:
                names = {"user": "human", "assistant": "gpt", "tool": "observation"}
                role = message.pop("role")
                message |= {"from": names.get(role, role), "value": message.pop("content")}
        row: dict[str, Any] = {"conversations" if shared else "messages": written}
        if tools:
            row["tools"] = json.dumps(tools) if rng.random() < 0.5 else copy.deepcopy(tools)
        return row


def words(value: Any) -> set[str]:
    return set(WORD.findall(value if isinstance(value, str) else str(value)))


TOKEN = re.compile(
    r"<[|｜][^<>|｜\n'\"{}]{1,40}[|｜]>|<\|\"\|>|</?[A-Za-z_:]{1,30}>|\[/?[A-Z_]{3,30}\]"
    r"|<\|[a-z_]+>|<[a-z_]+\|>"
)
PLAIN = re.compile(r"</?(think|tool_call|tool_response|tools?|function|parameter|arg_\w+)\b[^>]*>")
ENDS = "<|im_end|> <|eot_id|> <｜end▁of▁sentence｜> <|return|> <end_of_turn>".split()


def save_tokenizer(template: str, folder: Path) -> str:
    """Save the `bytes` tokenizer with a template and with what look like tokens in it."""
    tokenizer = copy.deepcopy(common.load_tokenizer("bytes"))
    found = list(dict.fromkeys(TOKEN.findall(template)))
    special = [token for token in found if not PLAIN.fullmatch(token)]
    end = next((token for token in ENDS if token in special), "</s>")
    tokenizer.add_special_tokens({"additional_special_tokens": [*special, "<s>", "</s>"]})
    tokenizer.add_tokens([token for token in found if PLAIN.fullmatch(token)])
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": end, "pad_token": "<s>"})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


def judge(tokenizer, messages: list, tools: list | None, row: dict, tagged: str | None) -> str:
    """Compare what is read of a row with the oracles; returns what became of it."""

    def render(count: int, **more) -> str | None:
        try:
            said = messages[:count]
            return tokenizer.apply_chat_template(said, tools=tools, tokenize=False, **more)
        except Exception:  # of the template: it does not accept the messages
            return None

    try:
        read, start = conversations.read_conversation(copy.deepcopy(row))
        found = conversations.read_tools(copy.deepcopy(row))
        conversations.refuse_special_tokens(tokenizer, read, found)
        text, spans, note = conversations.find_answers(tokenizer, read, start, found)
    except LeftOut as reason:
        return "left out: " + str(reason).partition(":")[0]
    assert text == render(len(messages))
    ids, in_loss = fsdp2_sft.encode(tokenizer, text, spans)
    encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    assert ids.tolist() == encoding.ids
    inside = np.zeros(len(text) + 1, bool)
    for begin, end in spans:
        inside[begin:end] = True
    assert in_loss.tolist() == [bool(inside[begin:end].any()) for begin, end in encoding.offsets]

    answers = [place for place, m in enumerate(messages) if m["role"] == "assistant"]
    trained = words(" ".join(text[begin:end] for begin, end in spans))
    others = words([m["content"] for m in messages if m["role"] != "assistant"])
    assert not trained & others and others <= words(text)
    assert {tool["function"]["name"] for tool in tools or []} <= words(text)
    kept = []
    for place in answers:
        own = words({k: v for k, v in messages[place].items() if k != "role"})
        assert own <= trained or not own & trained
        if own <= trained:
            kept.append(place)
        else:
            content = messages[place]["content"]
            thought = messages[place].get("reasoning_content", content.partition("</think>")[0])
            assert own - words(text) and own - words(text) <= words(thought)
    assert answers[-1] in kept and bool(note) == (kept != answers)

    if "endgeneration" not in tokenizer.get_chat_template() and len(spans) == len(kept):
        for place, (begin, end) in zip(kept, spans):
            before = render(place, add_generation_prompt=True)
            if before and text.startswith(before):
                opened = "".join(text[begin : len(before)].split())
                assert len(before) >= begin and opened in OPENED
            after = render(place + 1)
            if after and text.startswith(after) and place + 1 < len(messages):
                assert not text[end : len(after)].strip() and not text[len(after) : end].strip()
    if tagged and not note:
        compare_with_tags(tokenizer, tagged, messages, tools, text, spans)
    return "read"


def compare_with_tags(tokenizer, template: str, messages, tools, text: str, spans: list) -> None:
    """Compare with the tags of TRL's training template, where it writes the same text."""
    try:
        [same], [tags] = render_jinja_template(
            [messages],
            tools=tools,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )
    except Exception:  # of the template
        return
    if same == text:
        header = conversations.find_header(tokenizer)
        # Of DiffusionGemma's turns, the tags leave out the token that calls end with.
        ours = "".join(text[begin:end].removesuffix(LAST) for begin, end in spans)
        # A tag may begin anywhere in the header.
        theirs = [
            "".join(
                text[begin:end].removeprefix(header[cut:]).removesuffix(LAST) for begin, end in tags
            )
            for cut in range(len(header) + 1)
        ]
        assert "".join(ours.split()) in ["".join(each.split()) for each in theirs]


@pytest.mark.drill
def test_nothing_is_wrong_in_any_published_template(tmp_path):
    """TRL's 72 templates. Half of them are training templates, with tags."""
    if not FOLDER.exists():
        pytest.skip("needs the package trl beside the environment")
    print("seed", SEED)
    writer = Writer(SEED)
    rows = []
    for _ in range(NUMBER):
        messages, tools = writer.conversation()
        rows.append((messages, tools, writer.row(messages, tools)))
    found = Counter()
    refused = []
    for path in sorted(FOLDER.glob("*.jinja")):
        name = save_tokenizer(path.read_text(), tmp_path / path.stem)
        flags = fsdp2_sft.Config(tokenizer=name)
        try:
            tokenizer, *_ = conversations.chat_tokenizer(flags, "known tokens")
        except common.Refusal:
            refused.append(path.stem)
            continue
        training = path.with_name(f"{path.stem}_training.jinja")
        tagged = training.read_text() if training.exists() else None
        check = partial(judge, tokenizer, tagged=tagged)
        for number, (messages, tools, row) in enumerate(rows):
            try:
                found[check(messages, tools, row)] += 1
            except AssertionError as wrong:
                raise AssertionError(f"seed {SEED}, row {number}, {path.stem}") from wrong
    print(found, refused)
    assert len(refused) <= 16
    assert found["read"] > found.total() / 4
