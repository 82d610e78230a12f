"""The mistakes that check.py can name, as one list.

Most are edits of the plain loop in make.py. Those without edits cannot be written that way: their
logs come from a planted run of the collection's scripts, and stand in recorded.json. Mistakes in
validation, export, the order of data, or the balancing of experts are not here, because a reference
run has none of these.
"""

from dataclasses import dataclass

FOLDERS = ("dense", "moe", "packed", "chat")
ANY = (1, 2, 4)  # numbers of ranks
SEVERAL = (2, 4)
FEW = (1, 2)  # there, a rank has several of the four micro-batches


@dataclass
class Mistake:
    """One mistake.

    Args:
        sentence: what goes wrong, and what to do.
        threads: who reported it, as "owner/repository#number ...".
        edits: pairs of a text that make.py has once, and its replacement. None: it is recorded.
        ranks: the numbers of ranks for which it holds.
        per_ranks: its numbers depend on the number of ranks.
        alone: each rank trains a model of its own. The loss is that of all ranks, the gradient norm
            that of rank 0.
        folders: where it can happen.
    """

    name: str
    sentence: str
    threads: str
    edits: list[tuple[str, str]] | None
    ranks: tuple[int, ...] = ANY
    per_ranks: bool = False
    alone: bool = False
    folders: tuple[str, ...] = FOLDERS

    def apply(self, text: str) -> str:
        """Return the text of make.py with this mistake."""
        for before, after in self.edits or []:
            assert text.count(before) == 1, (
                f"{self.name}: make.py has {text.count(before)}x {before}"
            )
            text = text.replace(before, after)
        return text

    def links(self) -> str:
        """Return the addresses of the threads. GitHub redirects issues to pull requests."""
        threads = [thread.split("#") for thread in self.threads.split()]
        return " ".join(f"https://github.com/{name}/issues/{number}" for name, number in threads)


SCALE = "scale = 1 / targets\n"
LOGGED = "summed.item() / targets"
OF_RANKS = "micro_batches[rank::RANKS]"
NORM = 'norm = clip_grad_norm_(w.values(), hyper["grad_clip"]).item()\n'
OWN_NORM = (
    "norms = [math.sqrt(sum(p.grad.chunk(RANKS)[rank].pow(2).sum().item() for p in w.values()))\n"
    "            for rank in range(RANKS)]\n"
)
COUNT = "return sum(int((labels != IGNORED).sum()) for _, labels, _ in rows(micro_batch))\n"


def weighted(
    name: str, sentence: str, threads: str, weight: str, logged: str = "", **more
) -> list[Mistake]:
    """Return a mistake in how micro-batches are weighted.

    The loss in the log is right, or has the same mistake, or is `logged`.
    """
    logs = ["summed.item() / targets", "summed.item() * scale", logged]
    return [
        Mistake(name, sentence, threads, [(SCALE, f"scale = {weight}\n"), (LOGGED, line)], **more)
        for line in logs
        if line
    ]


MISTAKES = [
    # --- how micro-batches and ranks are added up
    Mistake(
        "gradients averaged over ranks, but not multiplied by their number",
        "FSDP and DDP average gradients over the ranks. If the loss is divided by the targets of "
        "all ranks, multiply it by the number of ranks. Context parallelism: by all ranks that see "
        "different tokens, not by the number of groups.",
        "pytorch/torchtitan#2318 NVIDIA/Megatron-LM#906",
        [(SCALE, "scale = 1 / targets / RANKS\n")],
        SEVERAL,
        per_ranks=True,
    ),
    Mistake(
        "gradients too large by the number of ranks",
        "The loss is multiplied by the number of ranks, but gradients are summed and not averaged. "
        "Or a tensor-parallel group shares one loss, and each of its ranks counts it.",
        "meta-pytorch/torchtune#2436 verl-project/verl#5983",
        [(SCALE, "scale = RANKS / targets\n")],
        SEVERAL,
        per_ranks=True,
    ),
    *weighted(
        "gradients too large by the number of accumulation steps",
        "The loss is divided by the targets of the whole step, and then multiplied by the number "
        "of accumulation steps, to undo a division that does not happen.",
        "huggingface/transformers#37766 huggingface/transformers#35207",
        "len(mine) / targets",
        ranks=FEW,
        per_ranks=True,
    ),
    Mistake(
        "gradients not divided by the number of targets before clipping",
        "The loss is divided by the targets only after backward, for the log. Divide before.",
        "pytorch/torchtitan#4194",
        [(SCALE, "scale = 1\n")],
    ),
    *weighted(
        "mean of the micro-batches' means",
        "Micro-batches have different numbers of targets, so a mean of their means weights targets "
        "unequally. Divide the summed loss by the targets of all micro-batches and ranks.",
        "huggingface/transformers#34191 pytorch/torchtitan#2206",
        "1 / count_targets(micro_batch) / len(micro_batches)",
    ),
    *weighted(
        "sum of the micro-batches' means",
        "Each micro-batch's mean loss goes backward without a division by the number of "
        "micro-batches. Divide the summed loss by the targets of all micro-batches and ranks.",
        "huggingface/transformers#34191 karpathy/nanoGPT#206",
        "1 / count_targets(micro_batch) / RANKS",
        logged="summed.item() / count_targets(micro_batch) / len(micro_batches)",
        ranks=FEW,
        per_ranks=True,
    ),
    *weighted(
        "mean over each rank's targets, then over the ranks",
        "Ranks have different numbers of targets. All-reduce their number, and divide by that.",
        "huggingface/transformers#34242 huggingface/transformers#37474",
        "1 / sum(map(count_targets, mine)) / RANKS",
        ranks=SEVERAL,
        per_ranks=True,
    ),
    Mistake(
        "gradients zeroed between micro-batches",
        "Only the last micro-batch of each rank counts. Zero the gradients once per step.",
        "pytorch/torchtitan#3575",
        [(SCALE, "scale = (micro_batch is mine[-1]) / targets\n")],
        FEW,
        per_ranks=True,
    ),
    Mistake(
        "gradients never synchronized, only the loss is",
        "Each rank trains on its own gradients, and the models drift apart. Look for a no_sync "
        "that covers the last micro-batch too, or a forward that bypasses the DDP wrapper.",
        "pytorch/pytorch#118298 huggingface/trl#7245",
        [
            ("        for mine in of_ranks:\n", "        for mine in of_ranks[RANK : RANK + 1]:\n"),
            (SCALE, "scale = RANKS / targets\n"),
        ],
        SEVERAL,
        per_ranks=True,
        alone=True,
    ),
    Mistake(
        "one rank trains alone",
        "Nothing is reduced over the ranks, neither gradients nor the loss.",
        "jingyaogong/minimind#854",
        [("for rank in range(RANKS)]\n", "for rank in [0]]\n")],
        SEVERAL,
        per_ranks=True,
    ),
    Mistake(
        "all ranks train on the data of rank 0",
        "The data loader does not know the rank, so every rank gets the same micro-batches. Use a "
        "DistributedSampler, or split by rank yourself.",
        "Lightning-AI/pytorch-lightning#7813 karpathy/llama2.c#522",
        [(OF_RANKS, "micro_batches[0::RANKS]")],
        SEVERAL,
        per_ranks=True,
    ),
    # --- which tokens are predicted, and from what
    Mistake(
        "loss divided by all tokens, not by the targets",
        "The loss mask zeroes losses, but the mean is over all tokens. Divide by the mask's sum.",
        "d2l-ai/d2l-en#2076",
        [(COUNT, "return sum(len(labels) for _, labels, _ in rows(micro_batch))\n")],
        folders=("chat",),
    ),
    Mistake(
        "loss divided by all positions, with padding",
        "Padded positions have no loss, but count in the mean. Divide by the number of targets.",
        "d2l-ai/d2l-en#2076",
        [
            (
                COUNT,
                "return len(micro_batch) * max(len(row[1]) for row in rows(micro_batch))\n",
            )
        ],
        folders=("dense", "moe", "chat"),
    ),
    Mistake(
        "loss on the prompt too",
        "The loss mask is lost on the way, so questions are targets like answers.",
        "karpathy/nanochat#582",
        [
            (
                "labels = torch.where(targets == 1, tokens, IGNORED)\n",
                "labels = tokens.clone()\n",
            )
        ],
        folders=("chat",),
    ),
    Mistake(
        "labels not shifted",
        "Each position predicts the token that it reads. Its label should be the next token.",
        "KempnerInstitute/KempnerForge#154",
        [("tokens, labels = tokens[:-1], labels[1:]\n", "pass\n")],
    ),
    Mistake(
        "labels shifted twice",
        "Labels are shifted in the data, and again in the model: each position predicts the token "
        "after the next one. transformers' models shift the labels they get.",
        "huggingface/transformers#44642",
        [
            (
                "tokens, labels = tokens[:-1], labels[1:]\n",
                "tokens, labels = tokens[:-2], labels[2:]\n",
            )
        ],
    ),
    Mistake(
        "attention across the sequences of a packed row",
        "Positions restart, but attention is plainly causal, so that a sequence sees those before "
        "it in the row. Use a block mask, or a kernel with cumulative sequence lengths.",
        "axolotl-ai-cloud/axolotl#3796 huggingface/transformers#46634",
        [
            (
                "        found.append([tokens, labels, positions])\n    return found\n",
                "        found.append([tokens, labels, positions])\n"
                "    return [[torch.cat(parts) for parts in zip(*found)]]\n",
            )
        ],
        folders=("packed",),
    ),
    Mistake(
        "CP: each rank counts positions from 0",
        "Ranks of a context-parallel group hold consecutive parts of each sequence, and the "
        "positions of each part start at 0. Split the positions together with the tokens.",
        "",
        [
            (
                "positions = torch.arange(len(tokens))\n",
                'longest = max(len(other["tokens"]) for other in micro_batch) - 1\n'
                "        positions = torch.arange(len(tokens)) % -(-longest // RANKS)\n",
            )
        ],
        SEVERAL,
        per_ranks=True,
        folders=("dense", "moe", "chat"),
    ),
    # --- parameters
    *(
        Mistake(
            "tied embedding untied",
            "Embedding and head begin with the same weights, but are two parameters. Tie them "
            "again after to_empty, or after whatever replaces parameters.",
            "pytorch/torchtitan#2495 verl-project/verl#7834",
            [
                (
                    "    decayed = [",
                    '    w["lm_head.weight"] = w["model.embed_tokens.weight"].detach().clone()\n'
                    '    w["lm_head.weight"].requires_grad_()\n'
                    f'    hyper["decay"] = hyper["decay"] + {head}\n'
                    "    decayed = [",
                ),
                ('batches["hyper"], batches', 'dict(batches["hyper"]), batches'),
            ],
            folders=("dense", "packed"),
        )
        for head in ('["lm_head.weight"]', "[]")  # whether the head decays
    ),
    Mistake(
        "norms not trained",
        "The weights of the norms are frozen.",
        "huggingface/transformers#24243",
        [
            (
                "tensor.double().requires_grad_() for",
                'tensor.double().requires_grad_("norm" not in name) for',
            )
        ],
    ),
    Mistake(
        "TP: the bias of a row-wise layer added by every rank",
        "Each rank of a tensor-parallel group adds the bias to its part of the sum, and the "
        "all-reduce adds the parts. Add it once, after the all-reduce.",
        "pytorch/torchtitan#4245",
        [
            (
                '    return linear(w, f"{name}.o_proj", mixed)\n',
                '    bias = w[f"{name}.o_proj.bias"].detach()\n'
                '    return linear(w, f"{name}.o_proj", mixed) + bias * (RANKS - 1)\n',
            )
        ],
        SEVERAL,
        per_ranks=True,
        folders=("moe",),
    ),
    Mistake(
        "EP: gradients of experts too large by the ranks of the group",
        "An expert gets tokens of all ranks of its group, so its gradient is already a sum over "
        "them. It must be divided like the others, although fewer ranks hold it.",
        "pytorch/pytorch#160285 NVIDIA/Megatron-LM#5956",
        [
            (
                "        " + NORM,
                "        for name, p in w.items():\n"
                '            p.grad *= RANKS if ".experts." in name else 1\n'
                "        " + NORM,
            )
        ],
        SEVERAL,
        per_ranks=True,
        folders=("moe",),
    ),
    # --- gradient norm
    Mistake(
        "gradient norm of one rank's shards",
        "Gradients are clipped by the full norm, but the log has that of rank 0's shards. Call "
        "full_tensor() on the norm, on every rank.",
        "pytorch/pytorch#126457 pytorch/torchtitan#766",
        [
            (
                NORM,
                f'{OWN_NORM}        clip_grad_norm_(w.values(), hyper["grad_clip"])\n'
                "        norm = norms[0]\n",
            )
        ],
        SEVERAL,
        per_ranks=True,
        folders=("dense", "packed", "chat"),
    ),
    Mistake(
        "clipped by the norm of each rank's own shards",
        "Each rank scales its shards by its own norm. All-reduce the squared norms first.",
        "pytorch/pytorch#72548",
        [
            (
                NORM,
                f"{OWN_NORM}"
                "        for p in w.values():\n"
                "            for shard, norm in zip(p.grad.chunk(RANKS), norms):\n"
                '                shard *= min(1, hyper["grad_clip"] / (norm + 1e-6))\n'
                "        norm = norms[0]\n",
            )
        ],
        SEVERAL,
        per_ranks=True,
        folders=("dense", "packed", "chat"),
    ),
    Mistake(
        "no clipping",
        "Gradients are not clipped, or only after the optimizer has used them.",
        "awslabs/graphstorm#1366",
        [(NORM, NORM.replace('hyper["grad_clip"]', "math.inf"))],
    ),
    # --- optimizer and schedule
    Mistake(
        "weight decay on norms, biases and the embedding",
        "All parameters are in one group. Only matrices other than the embedding decay.",
        "ServiceNow/Fast-LLM#542",
        [('others, "weight_decay": 0.0', 'others, "weight_decay": hyper["weight_decay"]')],
    ),
    Mistake(
        "no weight decay",
        "No parameter decays.",
        "",
        [('decayed, "weight_decay": hyper["weight_decay"]', 'decayed, "weight_decay": 0.0')],
    ),
    Mistake(
        "Adam with L2 in place of AdamW",
        "Weight decay is added to the gradients (torch.optim.Adam), and not to the update.",
        "pytorch/pytorch#48793",
        [("torch.optim.AdamW(", "torch.optim.Adam(")],
    ),
    Mistake(
        "betas left at (0.9, 0.999)",
        "These are PyTorch's defaults. Pass the betas.",
        "",
        [('betas=tuple(hyper["betas"])', "betas=(0.9, 0.999)")],
    ),
    Mistake(
        "learning rate one step late",
        "The first step has the rate 0, the second that of the first. Schedulers count from 0.",
        "huggingface/transformers#34754 NVIDIA-NeMo/Megatron-Bridge#5399",
        [("rate = learning_rate(step, hyper)", "rate = learning_rate(step - 1, hyper)")],
    ),
    Mistake(
        "optimizer built too early",
        "It holds parameters that the model no longer uses, so nothing is updated, and zero_grad "
        "clears nothing. Build the optimizer after whatever replaces parameters.",
        "huggingface/accelerate#3256",
        [
            (
                "    log = []\n",
                "    w = {name: p.detach().clone().requires_grad_() for name, p in w.items()}\n"
                "    log = []\n",
            )
        ],
    ),
    Mistake(
        "optimizer state lost after step 6",
        "A run was resumed without AdamW's moments. A fresh optimizer has no state to load into.",
        "pytorch/pytorch#140898 huggingface/accelerate#3971",
        [
            (
                "        optimizer.zero_grad()\n",
                "        optimizer.zero_grad()\n"
                "        if step == 6:\n"
                "            optimizer.state.clear()\n",
            )
        ],
    ),
    Mistake(
        "data starts anew after step 6",
        "A run was resumed without its position in the data.",
        "pytorch/torchtitan#3908",
        [
            (
                "micro_batches = steps[step - 1]\n",
                "micro_batches = steps[(step - 1) % 6]\n",
            )
        ],
    ),
    # --- recorded
    Mistake(
        "CP: parts of a sequence joined along the wrong dimension",
        "After the all-to-all that distributes heads, parts of a sequence are interleaved in place "
        "of one after the other.",
        "pytorch/torchtitan#3206 pytorch/torchtitan#3681",
        None,
        (2,),
        folders=("dense", "packed", "chat"),
    ),
    Mistake(
        "TP: `to_local` of a norm's weight, so that its gradients are not summed over the group",
        "With sequence parallelism, each rank of a group sees a part of the tokens, and its "
        "gradient of a norm's weight covers this part. All-reduce it over the group.",
        "pytorch/torchtitan#2532 pytorch/torchtitan#4054 NVIDIA/Megatron-LM#1446",
        None,
        (2,),
        folders=("dense", "packed", "chat"),
    ),
    Mistake(
        "TP: data by rank and not by group",
        "Ranks of a tensor-parallel group need the same sequences. Give the data loader the index "
        "of the group, and the number of groups.",
        "deepspeedai/DeepSpeed#99 huggingface/accelerate#3092",
        None,
        (2,),
        folders=("packed",),
    ),
    Mistake(
        "PP: gradients of a tied embedding not summed over the two stages that hold it",
        "It is the embedding of the first stage, and the head of the last one. All-reduce its "
        "gradient over the two, otherwise the copies drift apart.",
        "",
        None,
        (2,),
        folders=("dense", "packed"),
    ),
]
