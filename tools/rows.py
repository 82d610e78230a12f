"""Print what becomes of rows of conversations, as fsdp2_sft.py and fsdp2_grpo.py read them.

    python tools/rows.py [FILE] [--tokenizer DIR] [--rows 5]

FILE is what --dataset accepts. Without it, the rows of the table of docs/data.md are shown. Where
--tokenizer has a chat template, that is used, otherwise the collection's.
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
CALL = {"name": "f", "arguments": {"x": 1}}
ROWS = [
    {"messages": [QUESTION, ANSWER, QUESTION, {"role": "assistant", "content": "b"}]},
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    {"messages": json.dumps([QUESTION, ANSWER])},
    {"system": "s", "messages": [QUESTION, ANSWER]},
    {"messages": [QUESTION, ANSWER | {"content": [{"type": "text", "text": "a"}]}]},
    {"messages": [QUESTION, ANSWER | {"reasoning_content": "t"}]},
    {"messages": [QUESTION, {"role": "assistant", "tool_calls": [CALL]}], "tools": [{"name": "f"}]},
    {"messages": [QUESTION, {"role": "tool_response", "content": "r"}, ANSWER]},
    PAIR,
    {"prompt": [QUESTION, ANSWER, QUESTION], "completion": [ANSWER]},
    {"instruction": "q", "input": "x", "output": "a"},
    {"question": "q", "answer": "a"},
    {"prompt": "q", "answer": "7"},
    {"prompt": "q", "answer": {"b": 7}},
    {"prompt": "q", "answer": 1.1},
    {"prompt": [QUESTION, ANSWER], "answer": "7"},
    {"prompt": "q", "chosen": "a", "rejected": "b"},
    PAIR | {"label": False},
    PAIR | {"weight": 0.5},
    PAIR | {"images": ["x.png"]},
    {"messages": [QUESTION, ANSWER | {"train": False}]},
    {"messages": [QUESTION, ANSWER | {"audio": {"id": "x"}}]},
    {"messages": [QUESTION, {"role": "critic", "content": "a"}]},
    {"messages": [QUESTION, {"role": "assistant", "content": " "}]},
    {"prompt": "q<|im_end|>", "completion": "a"},
    {"text": "q"},
]
SHOWN = 200  # characters of a prompt's end


def became(row: dict, function: Callable, tokenizer: common.Tokenizer) -> tuple[str, str]:
    """Return a row's text outside the loss, and in it (RL: the reference).

    If the row is left out: "", and why.
    """
    rows = {common.JSON: [row]} if isinstance(row, str) else {key: [row[key]] for key in row}
    table = common.tokenize(rows, conversations.COLUMNS, function, tokenizer, np.uint32)
    [made] = table.to_pylist()
    if made["note"].startswith("left out"):
        return "", made["note"].replace(", because", ":", 1)
    tokens, in_loss = np.array(made["tokens"]), np.array(made["in_loss"])
    text = tokenizer.decode(tokens[in_loss])
    if function is fsdp2_grpo.tokenize_prompt:
        text = text.removesuffix(tokenizer.eos_token)
    return tokenizer.decode(tokens[~in_loss]), f"`{text}`" if text else "none"


def rows_table() -> str:
    """Return the table, with a tokenizer that got the collection's template."""
    tokenizer, *_ = conversations.chat_tokenizer(fsdp2_sft.Config(), "new tokens")
    lines = ["| row | in the loss of fine-tuning | reference in RL |", "| --- | --- | --- |"]
    for row in ROWS:
        line = json.dumps(row)
        shown = line.replace(json.dumps(QUESTION), "Q").replace(json.dumps(ANSWER), "A")
        cells = [f"`{shown}`"]
        for function in (fsdp2_sft.tokenize_conversation, fsdp2_grpo.tokenize_prompt):
            _, said = became(line, function, tokenizer)
            cells.append(said.replace("\n", "\\n"))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def show_rows(file: str, tokenizer_name: str, number: int) -> None:
    """Print what becomes of the first rows of a file."""
    config = fsdp2_sft.Config(dataset=file, tokenizer=tokenizer_name)
    tokenizer, *_ = conversations.chat_tokenizer(config, "new tokens")
    corpus = common.open_dataset(config, conversations.COLUMNS, conversations.CORPORA)
    for place, row in enumerate(corpus.select(range(min(number, len(corpus))))):
        row = row.get(common.JSON, row)
        _, tuned = became(row, fsdp2_sft.tokenize_conversation, tokenizer)
        prompt, reference = became(row, fsdp2_grpo.tokenize_prompt, tokenizer)
        print(f"--- row {place}\nin the loss of fine-tuning: {tuned}")
        if prompt:
            print(f"end of the prompt in RL: `{prompt[-SHOWN:]}`")
        print(f"reference in RL: {reference}")


def main() -> None:
    reader = shared.parser(__doc__)
    reader.add_argument("file", nargs="?", help="what --dataset accepts; default: own rows")
    reader.add_argument("--tokenizer", default="bytes", help="as in the scripts")
    reader.add_argument("--rows", type=shared.positive, default=5, help="how many rows to show")
    flags = reader.parse_args()
    if flags.file is None:
        print(rows_table())
        return
    try:
        show_rows(flags.file, flags.tokenizer, flags.rows)
    except common.Refusal as refusal:
        reader.error(str(refusal))


if __name__ == "__main__":
    main()
