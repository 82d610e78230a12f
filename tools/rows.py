"""Print what becomes of rows of conversations, as fsdp2_sft.py and fsdp2_grpo.py read them.

    python tools/rows.py

It is the table of docs/data.md.
"""

import json
from collections.abc import Callable

import numpy as np
import shared

import common
import conversations
import fsdp2_grpo
import fsdp2_sft

QUESTION = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
PAIR = {"prompt": "q", "completion": "a"}
ROWS = [
    {"messages": [QUESTION, ANSWER, QUESTION, {"role": "assistant", "content": "b"}]},
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    {"messages": json.dumps([QUESTION, ANSWER])},
    {"system": "s", "messages": [QUESTION, ANSWER]},
    {"messages": [QUESTION, ANSWER | {"content": [{"type": "text", "text": "a"}]}]},
    PAIR,
    {"prompt": [QUESTION, ANSWER, QUESTION], "completion": [ANSWER]},
    {"prompt": "q", "answer": "7"},
    {"prompt": "q", "answer": {"b": 7}},
    {"prompt": "q", "answer": 1.1},
    {"prompt": "q", "chosen": "a", "rejected": "b"},
    PAIR | {"label": False},
    PAIR | {"weight": 0.5},
    PAIR | {"images": ["x.png"]},
    {"messages": [QUESTION, ANSWER | {"train": False}]},
    {"messages": [QUESTION, ANSWER | {"tool_calls": [{"name": "f"}]}]},
    {"messages": [QUESTION, {"role": "tool_response", "content": "r"}, ANSWER]},
    {"messages": [QUESTION, {"role": "critic", "content": "a"}]},
    {"messages": [QUESTION, {"role": "assistant", "content": " "}]},
    {"prompt": "q<|im_end|>", "completion": "a"},
    {"text": "q"},
]


def became(row: dict, function: Callable, tokenizer: common.Tokenizer, **arguments: str) -> str:
    """Return the text of a row that is in the loss (in RL, the reference), or why there is none."""
    rows = {common.JSON: [json.dumps(row)]}
    columns = conversations.COLUMNS
    table = common.tokenize(rows, columns, function, tokenizer, np.uint32, **arguments)
    [made] = table.to_pylist()
    if made["left_out"]:
        return f"left out: they {made['left_out']}"
    text = tokenizer.decode(np.array(made["tokens"])[made["in_loss"]])
    if function is fsdp2_grpo.tokenize_prompt:
        text = text.removesuffix(tokenizer.eos_token)
    return f"`{text}`" if text else "none"


def rows_table() -> str:
    """Return the table, with a tokenizer that got the collection's template."""
    tokenizer, form, _ = conversations.chat_tokenizer(fsdp2_sft.Config(), "new tokens")
    lines = ["| row | in the loss of fine-tuning | reference in RL |", "| --- | --- | --- |"]
    for row in ROWS:
        shown = json.dumps(row).replace(json.dumps(QUESTION), "Q").replace(json.dumps(ANSWER), "A")
        tuned = became(row, fsdp2_sft.tokenize_conversation, tokenizer, header=form.header)
        cells = [f"`{shown}`", tuned, became(row, fsdp2_grpo.tokenize_prompt, tokenizer)]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def main() -> None:
    shared.read(__doc__)
    print(rows_table())


if __name__ == "__main__":
    main()
