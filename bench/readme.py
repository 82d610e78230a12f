"""Renews the parts of README.md that are made of other files: diffs with reasons, and tables.

    python bench/readme.py

A hunk of a diff belongs to the first reason below that has one of its pieces of text; one without
a reason is an error, and so is a reason without a hunk: the README cannot drift from the scripts.
"""

import functools
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import arguments
import choose
import compare
import traffic

ROOT = Path(__file__).parents[1]
NAMES = [  # in hunks that only name things: they are left out if no reason has them
    '"""Causal-LM', "What a rank keeps", "What moves in a step", "parameters whole. FSDP",
    "Choose ", "torchrun --standalone", "`diff ", "import ", "run_dir: str",
]  # fmt: skip
FRAMES = {  # of the stack that py-spy shows: the line that each function of fsdp2_pretrain.py is at
    "add_gradients": "(loss * scale).backward()",
    "train_step": "summed += add_gradients(",
    "main": "loss, grad_norm = train_step(",
}
LESSONS: dict[tuple[str, str], list[tuple[str, list[str]]]] = {
    ("ddp_pretrain", "fsdp1_pretrain"): [
        (
            "How much to shard is a choice now: everything all the time, everything but the "
            "parameters between forward and backward, or only inside a node.",
            ["sharding_strategy: Literal"],
        ),
        (
            "DDP gives every rank all parameters before it wraps the model. FSDP1 asks for the "
            "parameters of one block at a time (`param_init_fn`), cuts them into shards and goes "
            "on, so no rank ever holds the whole model. A mesh says which ranks share shards. "
            "Mixed precision moves from autocast into the wrapper: parameters are cast as they "
            "are gathered, so bf16 also halves what travels; and the residual stream is bf16 "
            "too, which autocast keeps in fp32.",
            ["units = set(blocks)", "auto_wrap_policy"],
        ),
        (
            "FSDP1 puts each block into a module of its own, whose name is taken out again, so "
            "that names are the same in all scripts and checkpoints.",
            ["_fsdp_wrapped_module"],
        ),
        (
            "Under `no_sync` both add up whole gradients without communication, in memory of their "
            "own: DDP beside its buckets, FSDP1 beside its shards. In bf16 FSDP1 would also add "
            "them up in bf16, so there every micro-batch is reduced.",
            ["Gradients of all but the last", "if last else model.no_sync()"],
        ),
        (
            "A rank sees the gradient of its shards. FSDP1's own clipping adds up the squares "
            "over the ranks; the plain function would clip by a part of the norm.",
            ["clip_grad_norm_"],
        ),
    ],
    ("fsdp1_pretrain", "fsdp2_pretrain"): [
        (
            "What was one enumeration are independent choices, and parameters can stay in CPU "
            "memory.",
            ["reshard_after_forward: bool"],
        ),
        (
            "Each script writes either style of checkpoint and reads both; by default, FSDP2 the "
            "other one.",
            ['"separate", "one state'],
        ),
        (
            "No wrapper and no callback: `fully_shard` is called on a block that the script has "
            "just given its parameters, and changes them into DTensors in place. So the script "
            "says in its own order what a unit is, and the rest (embedding, last norm, head) is "
            "the root's unit because it comes last. Replicas are a second dimension of the mesh.",
            ["units = set(blocks)", "config.dp_replicate > 1", "sharding: dict", "fully_shard("],
        ),
        (
            "The model is still itself: its parameters have their own names.",
            ["list(model.named_parameters())"],
        ),
        (
            "Whether to reduce is a property of the model, not a context around it, and whether to "
            "free parameters after backward another one: they may stay whole for the next "
            "micro-batch (FSDP1's `no_sync` implies that for `shard_grad_op`). Whole gradients are "
            "kept in fp32 (the reduction's precision), so bf16 needs no exception. Replicas "
            "all-reduce their shards once a step even if every micro-batch is reduced into these.",
            ["Under bf16 they would add up", "set_requires_gradient_sync"],
        ),
        (
            "A DTensor knows that it is sharded, so the plain function computes the whole norm; "
            "`full_tensor` hands it to every rank.",
            ["full_tensor()"],
        ),
    ],
    ("fsdp2_pretrain", "fsdp2_sft"): [
        (
            "Conversations have their own columns, are longer than functions, and a model that "
            "has been trained already wants smaller steps and fewer of them.",
            ["dataset: str", "text_column", "bucket_edges: list", "[256, 512, 1024", "steps: int"],
        ),
        (
            "The text of a conversation: single tokens open and close a turn, and `generation` "
            "marks what the assistant says, for that alone is learned.",
            ["# --- Conversations"],
        ),
        (
            "The tokens of the template are new ids. A model of an unknown vocabulary gets rows "
            "for them, and the loader draws them with mean and covariance of the old rows.",
            ["known: int", "shape = common.read_architecture", "tokenizer.known", "load_weights"],
        ),
        (
            "Only positions with a label go through the head, which is a large part of a small "
            "model with a large vocabulary.",
            ["learned"],
        ),
        (
            "The data: the same batches, with labels of -100 on all that is not the assistant's. "
            "Nothing in the loop changes, since the loss is a sum over labels divided by their "
            "number in the whole global batch.",
            ["load_conversations"],
        ),
        ("And at the end there is somebody to talk to.", ["chat as in README"]),
    ],
}  # fmt: skip


def hunks(before: str, after: str) -> list[str]:
    """Changed lines of `diff`, a string a hunk, with - and + in front."""
    command = ["diff", "-U0", f"{before}.py", f"{after}.py"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    return [part.split("\n", 1)[1].rstrip("\n") for part in re.split(r"(?m)^@@", output)[1:]]


def lesson(pair: tuple[str, str]) -> str:
    """Reasons and hunks in the order of the files, as Markdown."""
    reasons = LESSONS[pair]
    chosen: dict[str, list[str]] = {reason: [] for reason, _ in reasons}
    for hunk in hunks(*pair):
        fitting = [reason for reason, pieces in reasons if any(piece in hunk for piece in pieces)]
        if fitting:
            chosen[fitting[0]].append(hunk)
        elif not any(piece in hunk for piece in NAMES):
            raise SystemExit(f"no reason for this hunk of {' and '.join(pair)}:\n{hunk}")
    lines = []
    for reason, found in chosen.items():
        if not found:
            raise SystemExit(f"no hunk for: {reason}")
        lines += [f"{reason}\n", "```diff", *"\n \n".join(found).splitlines(), "```\n"]
    return "\n".join(lines).rstrip()


def sections() -> dict[str, Callable[[], str]]:
    """What stands between which markers of the README."""
    choosing, compared = (
        json.loads((ROOT / "docs" / name).read_text()) for name in ("choosing.json", "compare.json")
    )
    made: dict[str, Callable[[], str]] = {
        "traffic": lambda: traffic.table(*traffic.parameters(), ranks=8),
        "choosing": lambda: choose.table(choosing),
        "pretraining": lambda: compare.markdown(compared, "pretraining"),
        "fine-tuning": lambda: compare.markdown(compared, "fine-tuning"),
    }
    for pair in LESSONS:
        made[" ".join(pair)] = functools.partial(lesson, pair)
    return made


def renewed(text: str) -> str:
    """The README's text with its generated parts as they are now."""
    lines = (ROOT / "fsdp2_pretrain.py").read_text().splitlines()
    for function, start in FRAMES.items():
        [number] = [i for i, line in enumerate(lines, 1) if line.lstrip().startswith(start)]
        text = re.sub(
            rf"{function} \(fsdp2_pretrain.py:\d+\)",
            f"{function} (fsdp2_pretrain.py:{number})",
            text,
        )
    for name, make in sections().items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise SystemExit(f"README.md lacks the markers of {name}")
        head, rest = text.split(begin)
        text = f"{head}{begin}\n{make()}\n\n{end}{rest.split(end)[1]}"
    return text


def main() -> None:
    arguments.read(__doc__)
    readme = ROOT / "README.md"
    readme.write_text(renewed(readme.read_text()))


if __name__ == "__main__":
    main()
