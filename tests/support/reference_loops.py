"""Mistakes made for real: edits of the loop in reference/README.md, and of copies of our scripts.

test_reference.py runs them on 2 and 4 ranks, and reference/check.py has to name each. The
page's table is what this prints:

    python tests/support/reference_loops.py
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import mistakes

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "reference"))
from known_mistakes import FEW, MISTAKES, SEVERAL  # noqa: E402


@dataclass
class Real:
    """A mistake in a program that trains.

    Args:
        name: of a mistake in reference/known_mistakes.py.
        edits: pairs of a text that the program has once, and its replacement.
        folder: which reference run it trains on.
        ranks: numbers of ranks to train on.
        file: a file of ours to edit; none: the loop of the page.
        group: the flag for the size of a group, which has all ranks.
    """

    name: str
    edits: list[tuple[str, str]]
    folder: str = "chat"
    ranks: tuple[int, ...] = SEVERAL
    file: str = ""
    group: str = ""

    @property
    def script(self) -> str:
        """Return the script to run."""
        return "fsdp2_pretrain.py" if self.file == "model.py" else self.file

    def flags(self, ranks: int) -> dict:
        flags = {self.group: ranks} if self.group else {}
        return flags | ({"balance_rate": 0} if self.group == "expert_parallel" else {})

    def apply(self, text: str) -> str:
        """Return the program with the mistake."""
        for before, after in self.edits:
            assert text.count(before) == 1, f"{self.name}: {text.count(before)}x {before}"
            text = text.replace(before, after)
        return text


def planted(name: str) -> list[tuple[str, str]]:
    """Return the edits of a mistake of tests/support/mistakes.py."""
    [mistake] = [each for each in mistakes.MISTAKES if each.name == name]
    return mistake.edits


def loop() -> str:
    """Return the loop of the page."""
    page = (ROOT / "reference/README.md").read_text()
    return page.split("```python\n")[1].split("```")[0]


TOKENS = 'tokens, is_target = torch.tensor(sequence["tokens"]), torch.tensor(sequence["targets"])'
BACKWARD = "(summed / targets).backward()\n"
LOSS = "loss += summed.detach() / targets\n"
REDUCED = "        dist.all_reduce(tensor)  # sums over the ranks\n"
AVERAGED = REDUCED + "    for p in model.parameters():\n        p.grad /= ranks\n"
COUNTED = "targets = sum(sum(sequence["
OWN = (COUNTED, "micro_batches = micro_batches[rank::ranks]\n    targets = sum(sum(sequence[")
MINE = ("in micro_batches[rank::ranks]:", "in micro_batches:")
FORWARD = "logits = model(tokens[None, :-1]).logits[0]\n"
LOADED = "  # in fp32, as config.json says\n"
OPTIMIZER = "optimizer = torch.optim.AdamW(groups, "
ZEROED = "    optimizer.zero_grad()\n"
NORM = "    norm = nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)\n"
FULL_NORM = "    norm = norm.full_tensor()  # unwraps a replicated DTensor: each rank has it\n"
SHARDS = "[p.grad.to_local() for p in model.parameters()]"
TARGETS_OF = 'sum(sum(each["targets"]) for each in micro_batch)'

SHARD = "for layer in [*model.model.layers, model]:\n    fully_shard(layer)\n"
# The loop with FSDP2. Ranks then need equally many forward passes, so a micro-batch is one.
FSDP2 = [
    (
        "        for sequence in micro_batch:\n",
        "        longest = max(len(each['tokens']) for each in micro_batch)\n"
        "        pad = lambda values: values + [0] * (longest - len(values))\n"
        "        tokens = torch.tensor([pad(each['tokens']) for each in micro_batch])\n"
        "        is_target = torch.tensor([pad(each['targets']) for each in micro_batch])\n"
        "        for _ in range(1):\n",
    ),
    (
        TOKENS,
        "pass",
    ),
    (FORWARD, "logits = model(tokens[:, :-1]).logits.flatten(0, 1)\n"),
    ("labels[1:]", "labels[:, 1:].flatten()"),
    (BACKWARD, "(summed * ranks / targets).backward()  # FSDP averages over the ranks\n"),
    ("[loss, *(p.grad for p in model.parameters())]", "[loss]"),
    ('hyper["grad_clip"])\n', 'hyper["grad_clip"]).full_tensor()\n'),
    ("import torch\n", "import torch\nfrom torch.distributed.fsdp import fully_shard\n"),
]
SHARDED = [*FSDP2, (LOADED, "\n" + SHARD)]  # right
SHARDED_LATE = [*FSDP2, ("for step, ", SHARD + "for step, ")]  # after the optimizer

BF16 = [
    (
        FORWARD,
        'with torch.autocast("cpu", torch.bfloat16):\n'
        "                logits = model(tokens[None, :-1]).logits[0].float()\n",
    )
]
# Errors of one unit in the last place of each gradient.
NOISE = [
    (LOADED, "\ntorch.manual_seed(0)\n"),
    (
        REDUCED,
        REDUCED + "    for p in model.parameters():\n"
        "        p.grad *= 1 + torch.randint(-1, 2, p.grad.shape) * 2.0**-23\n",
    ),
]

REAL = [
    Real(
        "gradients averaged over ranks, but not multiplied by their number",
        [("scale = dist.get_world_size() / batch", "scale = 1 / batch")],
        file="fsdp2_pretrain.py",
    ),
    Real(
        "gradients too large by the number of ranks",
        [(BACKWARD, "(summed / targets * ranks).backward()\n")],
    ),
    Real(
        "gradients too large by the number of accumulation steps",
        [(BACKWARD, "(summed / targets * (4 // ranks)).backward()\n")],
        ranks=FEW,
    ),
    Real(
        "gradients not divided by the number of targets before clipping",
        [(BACKWARD, "summed.backward()\n")],
    ),
    Real(
        "mean of the micro-batches' means",
        [
            (BACKWARD, f"(summed / {TARGETS_OF} / 4).backward()\n"),
            (LOSS, f"loss += summed.detach() / {TARGETS_OF} / 4\n"),
        ],
    ),
    Real(
        "sum of the micro-batches' means",
        [
            (BACKWARD, f"(summed / {TARGETS_OF}).backward()\n"),
            (LOSS, f"loss += summed.detach() / {TARGETS_OF} / 4\n"),
            (REDUCED, AVERAGED),
        ],
        ranks=FEW,
    ),
    Real(
        "mean over each rank's targets, then over the ranks",
        [OWN, MINE, (LOSS, "loss += summed.detach() / targets / ranks\n"), (REDUCED, AVERAGED)],
    ),
    Real(
        "gradients zeroed between micro-batches",
        [
            (
                "        for sequence in micro_batch:\n",
                "        optimizer.zero_grad()\n        for sequence in micro_batch:\n",
            )
        ],
        ranks=FEW,
    ),
    Real(
        "gradients never synchronized, only the loss is",
        [("last = i == len(batch.micro_batches) - 1", "last = i == len(batch.micro_batches)")],
        file="ddp_pretrain.py",
    ),
    Real("one rank trains alone", [OWN, MINE, (REDUCED, "        pass\n")]),
    Real(
        "all ranks train on the data of rank 0",
        [
            (
                COUNTED,
                "micro_batches = micro_batches[::ranks]\n    targets = ranks * sum(sum(sequence[",
            ),
            MINE,
        ],
    ),
    Real(
        "loss divided by all tokens, not by the targets",
        [(COUNTED + '"targets"]) for', 'targets = sum(len(sequence["tokens"]) - 1 for')],
    ),
    Real(
        "loss divided by all positions, with padding",
        [
            (
                COUNTED + '"targets"]) for each in micro_batches for sequence in each)',
                "targets = sum(\n"
                "        len(each) * (max(len(sequence['tokens']) for sequence in each) - 1)\n"
                "        for each in micro_batches\n"
                "    )",
            )
        ],
    ),
    Real(
        "loss on the prompt too",
        [
            (COUNTED + '"targets"]) for', 'targets = sum(len(sequence["tokens"]) - 1 for'),
            ("labels = tokens.where(is_target == 1, -100)", "labels = tokens"),
        ],
    ),
    Real(
        "labels not shifted",
        [
            (FORWARD, "logits = model(tokens[None]).logits[0]\n"),
            ("cross_entropy(logits, labels[1:],", "cross_entropy(logits, labels,"),
        ],
    ),
    Real(
        "labels shifted twice",
        [
            (COUNTED + '"targets"]) for', 'targets = sum(sum(sequence["targets"][2:]) for'),
            (FORWARD, "pass\n"),
            (
                'cross_entropy(logits, labels[1:], reduction="sum")',
                "model(tokens[None, :-1], labels=labels[None, 1:], num_items_in_batch=1).loss",
            ),
        ],
    ),
    Real(
        "attention across the sequences of a packed row",
        planted("attention across the documents of a packed sequence"),
        folder="packed",
        file="model.py",
    ),
    Real(
        "CP: each rank counts positions from 0",
        planted("CP: each rank counts positions from 0"),
        file="fsdp2_cp_pretrain.py",
        group="context_parallel",
    ),
    Real(
        "tied embedding untied",
        [
            (
                LOADED,
                "\nhead = model.lm_head\n"
                "head.weight = torch.nn.Parameter(head.weight.detach().clone())\n",
            )
        ],
        folder="dense",
    ),
    Real(
        "norms not trained",
        [
            (
                LOADED,
                "\nfor name, p in model.named_parameters():\n"
                '    p.requires_grad_("norm" not in name)\n',
            ),
            (
                "p.grad for p in model.parameters()",
                "p.grad for p in model.parameters() if p.requires_grad",
            ),
        ],
    ),
    Real(
        "TP: the bias of a row-wise layer added by every rank",
        [
            (
                LOADED,
                "\nfor layer in model.model.layers:\n"
                "    layer.self_attn.o_proj.register_forward_hook(\n"
                "        lambda module, _, out: out + module.bias.detach() * (ranks - 1)\n"
                "    )\n",
            )
        ],
        folder="moe",
    ),
    Real(
        "EP: gradients of experts too large by the ranks of the group",
        planted("EP: gradients of experts averaged like the others"),
        folder="moe",
        file="fsdp2_ep_pretrain.py",
        group="expert_parallel",
    ),
    Real(
        "gradient norm of one rank's shards",
        [
            (NORM, f"    norm = nn.utils.get_total_norm({SHARDS})\n"),
            (FULL_NORM, NORM.replace("norm = ", "")),
        ],
        file="fsdp2_pretrain.py",
    ),
    Real(
        "clipped by the norm of each rank's own shards",
        [
            (NORM, f"    norm = nn.utils.get_total_norm({SHARDS})\n"),
            (
                FULL_NORM,
                f"    for shard in {SHARDS}:\n"
                "        shard *= min(1, config.grad_clip / (norm.item() + 1e-6))\n",
            ),
        ],
        file="fsdp2_pretrain.py",
    ),
    Real("no clipping", [('hyper["grad_clip"])', "math.inf)")]),
    Real(
        "weight decay on norms, biases and the embedding",
        [('{"params": others}', '{"params": others, "weight_decay": hyper["weight_decay"]}')],
    ),
    Real("no weight decay", [('"weight_decay": hyper["weight_decay"]', '"weight_decay": 0.0')]),
    Real("Adam with L2 in place of AdamW", [(OPTIMIZER, OPTIMIZER.replace("AdamW", "Adam"))]),
    Real("betas left at (0.9, 0.999)", [(' betas=hyper["betas"],', "")]),
    Real(
        "learning rate one step late",
        [("    cosine = ", "    step -= 1\n    cosine = ")],
    ),
    Real("optimizer built too early", SHARDED_LATE),
    Real(
        "optimizer state lost after step 6",
        [
            (
                ZEROED,
                ZEROED
                + "    if step == 6:\n        "
                + OPTIMIZER
                + 'weight_decay=0, betas=hyper["betas"], eps=hyper["eps"])\n',
            )
        ],
    ),
    Real(
        "data starts anew after step 6",
        [("enumerate(steps, 1):", "enumerate(steps[:6] * 2, 1):")],
    ),
]

# Mistakes that the list does not have, as edits of reference/make.py.
GRADED = "tensor.double().requires_grad_() for"
RATE = "rate = learning_rate(step, hyper)"
UNKNOWN = {
    "rotary base": [('config["rope_theta"] **', '(10 * config["rope_theta"]) **')],
    "epsilon of norms": [('config["rms_norm_eps"]).sqrt()', "1e-6).sqrt()")],
    "no biases": [('@ w[f"{name}.weight"].T + bias', '@ w[f"{name}.weight"].T')],
    "attention to later tokens": [("dtype=torch.bool).triu(1)", "dtype=torch.bool).triu(99)")],
    "the last target left out": [("tokens[:-1], labels[1:]", "tokens[:-2], labels[1:-1]")],
    "data of the next step": [("steps[step - 1]", "steps[step % 12]")],
    "a micro-batch left out": [
        ("micro_batches = steps[step - 1]", "micro_batches = steps[step - 1][:3]")
    ],
    "gradients never zeroed": [("        optimizer.zero_grad()\n", "")],
    "twice the learning rate": [(RATE, f"{RATE} * 2")],
    "no warm-up": [("return peak * step / warmup", "return peak")],
    "linear decay": [("(1 + math.cos(math.pi * progress)) / 2", "(1 - progress)")],
    "another first beta": [('betas=tuple(hyper["betas"])', "betas=(0.8, 0.95)")],
    "epsilon of AdamW": [('eps=hyper["eps"]', "eps=1e-5")],
    "SGD": [
        ("torch.optim.AdamW(", "torch.optim.SGD("),
        (', betas=tuple(hyper["betas"]), eps=hyper["eps"])', ", lr=1.0)"),
    ],
    "embedding frozen": [(GRADED, GRADED.replace("_()", "_('embed' not in name)"))],
    "biases frozen": [(GRADED, GRADED.replace("_()", "_('bias' not in name)"))],
}


def table() -> str:
    """Return the table of the page. test_reference.py proves that each name comes first."""
    lines = ["| mistake | made in | ranks | place of its name |", "| --- | --- | --- | --- |"]
    for real in REAL:
        where = f"a copy of `{real.file}`" if real.file else "the loop above"
        ranks = " and ".join(map(str, real.ranks))
        lines.append(f"| {real.name} | {where}, `{real.folder}` | {ranks} | 1 |")
    for mistake in MISTAKES:
        if mistake.edits is None:
            folders = ", ".join(f"`{folder}`" for folder in mistake.folders)
            lines.append(f"| {mistake.name} | recorded from a script, {folders} | 2 | 1 |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
