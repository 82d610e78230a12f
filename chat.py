"""Conversations: reading their messages, and what their chat template makes of them.

fsdp2_sft.py, fsdp2_lora.py and fsdp2_grpo.py use this file; pretraining never does. What people
have in files becomes messages, each with a role and a text. A chat template turns messages into one
text, and `find_answers` says where in this text the answers are. What cannot be read, or cannot be
proved to be right, is left out with a reason (a ValueError), which the start of a run counts and
prints.
"""

import ast
import json
import os
import re
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

import common

# --- Messages -------------------------------------------------------------------------------------

Messages = list[dict[str, str]]  # each with `role` and `content`
# Roles of chat templates -> the names that data has for them. A row with any other is left out.
ROLES = {
    "system": "system developer",
    "user": "user human",
    "assistant": "assistant ai bard bing bot chatgpt gpt model",
    "tool": "tool function ipython observation tool_response",
}
# What a row or a message may hold beside its text. A chat template would silently leave it out, or
# write it in a form that `find_answers` does not prove.
BEYOND_TEXT = """audio audios chat_template_kwargs function_call functions image images reasoning
    reasoning_content thinking thought tool_calls tools video videos""".split()
NOTHING = r"([\[\]{}, ]|'\w+':|''|None|null)*"  # as Parquet fills structs that a row does not have
# What may say whether a row or a message is for training.
FLAGS = "learnable loss loss_mask loss_weight masked train trainable training weight".split()
COLUMNS = "messages conversations prompt completion answer system label".split()
COLUMNS += BEYOND_TEXT + FLAGS  # what is read of a row


def read_conversation(row: dict) -> tuple[Messages, int]:
    """Return the messages of a row, and the index of the first one that may be trained on.

    With `messages` or `conversations` that is 0. (A `prompt` beside them repeats the first
    question.) With `prompt` and `completion` it is the first one of the completion.

    Raises:
        ValueError: why the row is left out.
    """
    refuse_more_than_text(row)
    messages = read_messages(row.get("system"), "system")
    turns = row.get("messages") or row.get("conversations")
    if turns:
        turns = read_messages(turns, "")
        return turns if turns[:1] == messages else messages + turns, 0
    messages += read_messages(row.get("prompt"), "user")
    return messages + read_messages(row.get("completion"), "assistant"), len(messages)


def refuse_more_than_text(item: dict) -> None:
    """Raise ValueError if a row or a message is more than text for training."""
    for name in BEYOND_TEXT:
        if not re.fullmatch(NOTHING, str(item.get(name))):
            raise ValueError(f"hold more than text: {name}")
    for name in FLAGS:
        trained = "none false 0 0.0" if name == "masked" else "none true 1 1.0"
        if str(item.get(name)).lower() not in trained.split():
            raise ValueError(f"are not for training, or only in part: {name}")
    if str(item.get("label")) in ["False", "0"]:  # of KTO's data
        raise ValueError("have a label that says that the answer is bad")


def read_messages(value: Any, role: str) -> Messages:
    """Return the messages of a column: a list of them, a single one, or the text of `role`.

    Without a role, a text is the JSON of messages.
    """
    if isinstance(value, str):
        value = {"role": role, "content": value} if role else json.loads(value)
    if not isinstance(value, list | None):
        value = [value]
    messages = map(read_message, value or [])
    # An empty system prompt stands for none.
    return [m for m in messages if m["role"] != "system" or m["content"].strip()]


def read_message(message: dict) -> dict[str, str]:
    """Return role and content of a message, or raise ValueError if it is not plain text."""
    if not isinstance(message, dict):
        raise ValueError("hold no messages")
    refuse_more_than_text(message)
    name = str(message.get("role") or message.get("from"))
    roles = [role for role in ROLES if name.lower() in ROLES[role].split()]
    content = message.get("content", message.get("value"))
    if isinstance(content, list):  # of parts, which may also be thoughts or images
        parts = [part for part in content if isinstance(part, dict)]
        texts = [part.get("text") for part in parts if "text" in str(part.get("type"))]
        is_text = len(texts) == len(content) and None not in texts
        content = "".join(map(str, texts)) if is_text else None
    if not roles or not isinstance(content, str):
        raise ValueError("hold messages of an unknown role, or without text")
    if roles == ["assistant"] and not content.strip():
        raise ValueError("hold an empty answer")
    return {"role": roles[0], "content": content}


def docstring_conversations(files: list[str]) -> Iterator[dict]:
    """Yield a conversation for each documented function: think, then write its docstring."""
    warnings.simplefilter("ignore", SyntaxWarning)
    for file in files:
        source = Path(file).read_text(encoding="utf-8", errors="replace")
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            docstring = ast.get_docstring(node)
            if not docstring or len(node.body) == 1:
                continue
            del node.body[0]
            arguments = ", ".join(argument.arg for argument in node.args.args) or "none"
            thought = f"<|begin_of_thought|>\narguments: {arguments}\n<|end_of_thought|>\n\n"
            solution = f"<|begin_of_solution|>\n{docstring}\n<|end_of_solution|>"
            yield {
                "system": "You write docstrings. Think first, then answer.",
                "prompt": f"Write the docstring of:\n\n{ast.unparse(node)}",
                "completion": thought + solution,
            }


common.EMBEDDED["stdlib-docstrings"] = docstring_conversations
common.SHARED += [__file__]

# --- Chat templates -------------------------------------------------------------------------------

# The single tokens of the collection's chat format: those around a turn, and those that an answer
# may contain.
TURN = ["<|im_start|>", "<|im_end|>"]
INSIDE = [
    "<|begin_of_thought|>",
    "<|end_of_thought|>",
    "<|begin_of_solution|>",
    "<|end_of_solution|>",
]
# The loss covers what is between `generation` and `endgeneration`: the answer and the end of the
# turn. Without the latter, a model would not learn to stop.
TEMPLATE = """\
{%- for message in messages -%}{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.role != 'assistant' -%}{{- message.content + '<|im_end|>' -}}{%- else -%}
{%- generation -%}{{- message.content + '<|im_end|>' -}}{%- endgeneration -%}{%- endif -%}
{{- '\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
# Most templates have no such tags. These patterns and their replacements put them into the source:
# each loop collects what it writes for an item, and tags it if the item is the assistant's.
LOOP = r"(?s)(\{%[-+]?\s*for\s+(?:\w+\s*,\s*)*(\w+)\s+in\b.*?)([-+]?%\})"
COLLECT = r"\1%}{% set role_of_item = \2.role %}{% set of_item \3"
LOOP_END = r"(\{%[-+]?\s*end)for(\s*[-+]?%\})"
TAG = (
    r"\1set\2{% if role_of_item == 'assistant' and of_item.strip() %}"
    "{% generation %}{{ of_item }}{% endgeneration %}"
    "{% else %}{{ of_item }}{% endif %}{% endfor %}"
)
SAMPLE = 2 * (read_messages("question", "user") + read_messages("answer", "assistant"))


def tag_answers(tokenizer: common.Tokenizer) -> None:
    """Set attributes that no file holds: `tagged_template`, and `answer_header`.

    Tags of the template's own say exactly what is in the loss. Otherwise an answer is all that the
    template writes for a message, without the header that the generation prompt gives already.
    """
    tokenizer.tagged_template = tokenizer.get_chat_template()
    tokenizer.answer_header = ""
    if "endgeneration" in tokenizer.tagged_template:
        return
    collecting = re.sub(LOOP, COLLECT, tokenizer.tagged_template)
    tokenizer.tagged_template = re.sub(LOOP_END, TAG, collecting)
    text, [(first, _), (second, _)] = find_answers(tokenizer, SAMPLE, 0)
    prompt = tokenizer.apply_chat_template(SAMPLE[:1], tokenize=False, add_generation_prompt=True)
    header = os.path.commonprefix([prompt[first:], text[first:], text[second:]])
    # The prompt may continue with a thought. Not all answers have one, so that stays in the loss.
    more = prompt.removeprefix(text[:first] + header)
    if more.strip() and not text.startswith("answer", first + len(header)):
        raise ValueError("answers do not begin like the generation prompt")
    tokenizer.answer_header = header


def find_answers(
    tokenizer: common.Tokenizer, messages: Messages, start: int
) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a conversation, and the spans of its answers, in characters.

    Answers are what the tags mark after the messages before `start`. The proof: the text is
    rendered again, with a mark at the end of each content. Without the marks it has to be the
    original rendering. The marks of answers have to be in the spans, and no others.

    Raises:
        ValueError: this is not so, or the template does not accept the messages.
    """
    marks = [f"␞{i}␞" for i in range(len(messages))]
    marked = [
        # Before the blanks at the end, which templates may strip.
        message | {"content": re.sub(r"\s*\Z", mark + r"\g<0>", message["content"], count=1)}
        for mark, message in zip(marks, messages)
    ]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        [found], [spans] = render_jinja_template(
            [marked],
            chat_template=tokenizer.tagged_template,
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )
    except jinja2.TemplateError as problem:
        raise ValueError(f"have no place in the chat template: {problem}") from problem
    inside = "".join(found[begin:end] for begin, end in spans)
    in_answers = [inside.count(mark) for mark in marks]
    unmark = partial(re.sub, "␞[0-9]+␞", "")
    if (
        unmark(found) != text
        or not all(mark in found for mark in marks)
        or in_answers != [message["role"] == "assistant" for message in messages]
    ):
        raise ValueError("have parts that the chat template leaves out or mixes up")
    if start:
        spans = [span for span in spans if span[0] > found.find(marks[start - 1])]
    spans = [[len(unmark(found[:edge])) for edge in span] for span in spans]
    header = tokenizer.answer_header
    if not spans or not all(text.startswith(header, begin) for begin, _ in spans):
        raise ValueError("have an answer that does not begin like the generation prompt")
    if header and text[spans[-1][1] :].strip() == tokenizer.eos_token:
        spans[-1][1] = len(text)  # some templates end a text so, after their loop
    return text, [(begin + len(header), end) for begin, end in spans]


def refuse_special_tokens(tokenizer: common.Tokenizer, messages: Messages) -> None:
    """Raise ValueError if a text spells out a token of the tokenizer, which could forge a turn."""
    template = tokenizer.get_chat_template()
    for token in tokenizer.added_tokens_decoder.values():
        text = str(token)
        for message in messages:
            if message["role"] == "assistant":
                forges = token.special and text not in INSIDE
            else:  # some tokenizers mark turns by added tokens that are not special
                forges = token.special or text in template
            if forges and text.strip() and text in message["content"]:
                raise ValueError("spell out a special token")
