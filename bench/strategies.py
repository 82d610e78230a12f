"""The strategies side by side, by formula and by tools/dry_run.py: tables and pictures.

    python bench/strategies.py traffic      memory and communication per rank, by formula
    python bench/strategies.py choosing     which script fits where: choosing.json (minutes)
    python bench/strategies.py inside       TP and CP: inside.json (minutes)
    python bench/strategies.py stages       pipelines over slow links: stages.json (minutes)
    python bench/strategies.py experts      an MoE model: experts.json (minutes)
    python bench/strategies.py sampling     memory for sampling answers, by formula
    python bench/strategies.py timeline     memory and collectives over a step: timeline_*.png
    python bench/strategies.py ranks        memory and traffic by number of ranks: ranks.png

Files are in bench/results/, pictures in docs/images/.

traffic: qwen2-0.5b with the GPT-2 vocabulary on 8 ranks, AdamW, bf16 compute, 1 and 4 micro-batches
of 4,096 tokens per rank and step.
choosing: Qwen2.5's shapes, two micro-batches of 4,096 tokens per rank and step in sequences of
2,048, bf16. Hybrid is two replicas. A setting fits if it leaves a tenth of the GPU free.
inside: the same shapes on 8 ranks, micro-batches of one sequence, full activation checkpointing,
bf16.
stages: the 7B shape on two machines of 8 GPUs, 2^20 tokens per step in micro-batches of one
sequence of 8,192, full activation checkpointing, bf16; for a pipeline the stage that needs or sends
more.
experts: qwen3-30b-a3b, one micro-batch of 8,192 tokens per rank, full activation checkpointing,
bf16, with evenly used experts.
sampling: Qwen2.5's shapes on 8 ranks of 80 GB, bf16, a tenth left free.
timeline: 6 blocks of qwen2-0.5b's width on 8 ranks; time is measured in FLOPs.
ranks: qwen2-0.5b, a micro-batch of 4,096 tokens per rank and step.
"""

import copy
import functools
import json
import tempfile
from collections.abc import Callable
from typing import Any

import _tools  # noqa: F401
import shared
import torch
from dry_run import GIB, MIB, Report, Watch, report
from shared import ROOT, STRATEGIES, qwen2
from transformers import AutoModelForCausalLM

from model import build_config, build_model
from run import Flags

SHAPES = {  # Qwen2.5's
    "0.5B": qwen2(896, 4864, 24, 14, 2, 151936),
    "1.5B": qwen2(1536, 8960, 28, 12, 2, 151936),
    "7B": qwen2(3584, 18944, 28, 28, 4, 152064, tied=False),
    "32B": qwen2(5120, 27648, 64, 40, 8, 152064, tied=False),
}
FULL = {"activation_checkpointing": "full"}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {  # the first one that fits is chosen
    "DDP": ("ddp", {}),
    "hybrid": ("fsdp2", {"dp_replicate": 2}),
    "FSDP": ("fsdp2", {}),
    "DDP, full checkpointing": ("ddp", FULL),
    "FSDP, full checkpointing": ("fsdp2", FULL),
    "FSDP and TP of 4, full checkpointing": ("fsdp2_tp", FULL | {"tensor_parallel": 4}),
    "FSDP, full checkpointing, offload": ("fsdp2", FULL | {"cpu_offload": True}),
}
CARDS = (24, 80)  # GB of a GPU
TOKENS = 4096  # per micro-batch
FILE = ROOT / "bench/results/choosing.json"
SHARING: dict[str, tuple[str, dict[str, Any]]] = {  # of 8 ranks
    "FSDP alone": ("fsdp2", {}),
    "TP of 2": ("fsdp2_tp", {"tensor_parallel": 2}),
    "TP of 4": ("fsdp2_tp", {"tensor_parallel": 4}),
    "CP of 2": ("fsdp2_cp", {"context_parallel": 2}),
    "CP of 4": ("fsdp2_cp", {"context_parallel": 4}),
}
CARD_OF = {"0.5B": 24, "7B": 80}  # GB of a GPU
LENGTH = 8192  # tokens of the sequence whose memory and traffic are shown
FILE_INSIDE = ROOT / "bench/results/inside.json"
ACROSS: dict[str, tuple[str, dict[str, Any]]] = {  # of two machines of 8 GPUs
    "FSDP over both": ("fsdp2", {}),
    "FSDP in each, replicas across": ("fsdp2", {"dp_replicate": 2}),
    "FSDP in each, 2 stages across": ("fsdp2_pp", {"pipeline_parallel": 2}),
}
STEP = 2**20  # tokens of an optimizer step
FILE_STAGES = ROOT / "bench/results/stages.json"
EXPERT_PARALLEL = 8  # a machine
FILE_EXPERTS = ROOT / "bench/results/experts.json"


# --- Traffic, by formula --------------------------------------------------------------------------


MICRO_BATCHES = (1, 4)  # of a rank and step


def traffic_table(ranks: int = 8) -> str:
    """Return Markdown; sizes in GB = 10^9 bytes, traffic is what each rank sends."""
    config = Flags(model="qwen2-0.5b")
    shape = build_config(config, 50257, None)
    model = build_model(shape, config)
    head = model.get_output_embeddings().weight.numel()  # and embedding, which are tied
    blocks, width = shape.num_hidden_layers, shape.hidden_size
    keys = width * shape.num_key_value_heads // shape.num_attention_heads
    gb, share = model.num_parameters() / 1e9, (ranks - 1) / ranks
    blocks_gb = gb - head / 1e9
    stage_gb = blocks_gb / 2 + head / 1e9
    gathers, reduction = (2 * gb + 2 * blocks_gb) * share, 4 * gb * share
    half = (ranks / 2 - 1) / (ranks / 2) / share  # of what 1/2 of the model sends on N/2 ranks
    hidden = width * 2 * TOKENS / 1e9
    rows: list[tuple[str, str, float, str, Callable[[int], float]]] = [  # the last one is of k
        (
            "`ddp_pretrain.py`", "everything", 16 * gb,
            "all-reduce of gradients: 2G(N-1)/N", lambda _: 2 * reduction,
        ),
        (
            "`ddp_pretrain.py --shard_optimizer true`",
            "parameters and gradients, 1/N of the moments",
            (8 + 8 / ranks) * gb,
            "as DDP, and broadcasts of the updated parameters, 4 bytes each: G(N-1)/N",
            lambda _: 3 * reduction,
        ),
        (
            "`fsdp1_pretrain.py`, `fsdp2_pretrain.py`",
            "1/N of everything; the root and one or two blocks are unsharded while needed (not in "
            "the figure)", 16 * gb / ranks,
            "per micro-batch: all-gather of parameters before forward, P(N-1)/N, and again before "
            "backward but for the root; reduce-scatter of gradients, G(N-1)/N",
            lambda k: k * (gathers + reduction),
        ),
        (
            "`fsdp2_pretrain.py --reshard_after_forward false`",
            "1/N of everything; unsharded parameters from the first forward to the last backward",
            16 * gb / ranks + 2 * gb,
            "all-gather before the first forward, P(N-1)/N; reduce-scatter per micro-batch, "
            "G(N-1)/N", lambda k: 2 * gb * share + k * reduction,
        ),
        (
            "`fsdp2_pretrain.py --reduce_every_micro_batch false`",
            "1/N of everything; with several micro-batches, unsharded gradients until the last one",
            16 * gb / ranks + 4 * gb,
            "all-gathers per micro-batch, as above; reduce-scatter once, G(N-1)/N",
            lambda k: k * gathers + reduction,
        ),
        (
            "`fsdp2_tp_pretrain.py`, T = 2, micro-batches of 8,192 tokens",
            "1/N of everything; 1/T of a block while it computes",
            16 * gb / ranks,
            "as FSDP2 with 1/T of the model on N/T ranks; in each block 8A(T-1)/T, half of that "
            "for embedding and head, A: bytes of [tokens, hidden size]",
            lambda k: k * ((gathers + reduction) / 2 * half + (8 * blocks + 4) * hidden),
        ),
        (
            "`fsdp2_cp_pretrain.py`, C = 2, micro-batches of 8,192 tokens",
            "1/N of everything; 1/C of each sequence's activations",
            16 * gb / ranks,
            "as FSDP2; in each block 4(Q+K)(C-1)/C², Q and K: bytes of queries and of keys",
            lambda k: k * (gathers + reduction + blocks * 2 * (1 + keys / width) * hidden),
        ),
        (
            "`fsdp2_pp_pretrain.py`, S = 2, a pipeline has Sk micro-batches",
            "S/N of its stage: 1/S of the blocks, and embedding or head; in a step the stage's "
            "unsharded parameters and gradients, and the activations of S micro-batches",
            16 * stage_gb * 2 / ranks,
            "as FSDP2 for a stage on N/S ranks, with one all-gather per step whatever k; SkA to "
            "each neighbor; the gradient of a tied embedding between the ends",
            lambda k: (2 + 4) * stage_gb * half * share + 2 * k * hidden
            + 4 * head / 1e9 / (ranks / 2),
        ),
    ]  # fmt: skip
    counts = [f"k = {k}" for k in MICRO_BATCHES]
    lines = [
        f"| script | memory per rank | {ranks} ranks | a rank sends in a step | "
        + " | ".join(counts) + " |",
        "| --- " * (4 + len(counts)) + "|",
    ]  # fmt: skip
    for script, memory, gigabytes, traffic, sent in rows:
        cells = [script, memory, f"{gigabytes:.2f} GB", traffic]
        cells += [f"{sent(k):.2f} GB" for k in MICRO_BATCHES]
        lines.append(f"| {' | '.join(cells)} |")
    elsewhere = "[MoE models](scale.md#mixtures-of-experts)"
    lines.append(
        "| `fsdp2_ep_pretrain.py`, E = 2, t experts per token | 1/N of everything; 1/E of a "
        f"block's experts while it computes | {elsewhere} | as FSDP2, with 1/E of the experts on "
        "N/E ranks; in each block 4tA(E-1)/E, or 6tA(E-1)/E if it is recomputed | | |"
    )
    return "\n".join(lines)


# --- Which script fits where ----------------------------------------------------------------------


def choosing() -> None:
    """Compute the table: model -> ranks -> setting -> GiB at the peak."""
    seen: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for model, shape in SHAPES.items():
            shape.save_pretrained(f"{folder}/{model}")
            seen[model] = {"1": {}, "4": {}, "8": {}}
            for ranks, fits in seen[model].items():
                for setting, (strategy, own) in SETTINGS.items():
                    if ranks == "1" and strategy != "ddp":
                        continue  # there is nothing to shard over
                    if shape.num_key_value_heads % own.get("tensor_parallel", 1):
                        continue
                    # A second micro-batch adds the gradients of the first. A third adds nothing.
                    dp_size = int(ranks) // own.get("tensor_parallel", 1)
                    step = {"global_batch_tokens": 2 * TOKENS * dp_size}
                    given = (strategy, f"{folder}/{model}", shape.vocab_size, int(ranks))
                    gib = report(*given, **step, **own).on_device / GIB
                    fits[setting] = round(gib, 2)
                    print(model, ranks, setting, fits[setting], flush=True)
                    if gib < 0.9 * CARDS[0] * 1e9 / GIB:
                        break  # the rest would not be chosen
    FILE.write_text(json.dumps(seen, indent=1) + "\n")
    print(choosing_table())


def choosing_table() -> str:
    """Return Markdown: the first setting that fits, by model, number of GPUs and card."""
    lines = ["| model | GPUs | of 24 GB | of 80 GB |", "| --- | --- | --- | --- |"]
    for model, by_ranks in json.loads(FILE.read_text()).items():
        for ranks, settings in by_ranks.items():
            cells = []
            for card in CARDS:
                room = 0.9 * card * 1e9 / GIB
                fits = [f"{name} ({gib:.1f} GiB)" for name, gib in settings.items() if gib <= room]
                least = min(settings.values())
                cells.append(fits[0] if fits else f"more GPUs (least: {least:.1f} GiB)")
            lines.append(f"| {model} | {ranks} | {' | '.join(cells)} |")
    return "\n".join(lines)


# --- TP and CP ------------------------------------------------------------------------------------


def of_one_sequence(*given: Any, length: int, **own: Any) -> Report:
    return report(*given, max_length=length, micro_batch_tokens=length, **own)


def longest_sequence(report_of: Callable[..., Report], card: int) -> int:
    """Return the tokens of the longest sequence that fits a card, in steps of 1,024, or 0.

    Memory grows nearly in proportion to the length.
    """
    room, lengths = 0.9 * card * 1e9, [LENGTH, 8 * LENGTH]
    needed = [report_of(length=length).on_device for length in lengths]
    for _ in range(3):  # follow the line through the last two
        slope = (needed[-1] - needed[-2]) / (lengths[-1] - lengths[-2])
        length = int(lengths[-1] + (room - needed[-1]) / slope) // 1024 * 1024
        if length <= 0 or length == lengths[-1]:
            break
        lengths.append(length)
        needed.append(report_of(length=length).on_device)
    return max((each for each, size in zip(lengths, needed) if size <= room), default=0)


def inside() -> None:
    """Compute the table: model -> setting -> memory and traffic of a rank, longest sequence."""
    seen: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for model, card in CARD_OF.items():
            shape = copy.copy(SHAPES[model])
            shape.max_position_embeddings = 2**24
            shape.save_pretrained(f"{folder}/{model}")
            seen[model] = {}
            for setting, (strategy, own) in SHARING.items():
                group = [*own.values(), 1][0]
                if shape.num_attention_heads % group:
                    continue
                given = (strategy, f"{folder}/{model}", shape.vocab_size, 8)
                report_of = functools.partial(of_one_sequence, *given, **FULL, **own)
                shown, groups = report_of(length=LENGTH), 8 // group
                seen[model][setting] = {
                    "gib": shown.on_device / GIB,
                    "sent": shown.sent / (groups * LENGTH) / 1000,  # GB for a million tokens
                    "longest": longest_sequence(report_of, card),
                }
                print(model, setting, seen[model][setting], flush=True)
    FILE_INSIDE.write_text(json.dumps(seen, indent=1) + "\n")
    print(inside_table())


def inside_table() -> str:
    """Return Markdown: what TP and CP save and cost, for each model."""
    lines = [
        f"| model | on 8 ranks | peak of a rank, sequences of {LENGTH:,} | a rank sends for a "
        "million tokens | longest sequence |",
        "| --- " * 5 + "|",
    ]
    for model, settings in json.loads(FILE_INSIDE.read_text()).items():
        for setting, row in settings.items():
            longest = f"{row['longest']:,}" if row["longest"] else "none"
            cells = [f"{model}, GPUs of {CARD_OF[model]} GB", setting, f"{row['gib']:.1f} GiB"]
            cells += [f"{row['sent']:,.0f} GB", longest]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# --- Across machines ------------------------------------------------------------------------------


def sent_across(seen: Report) -> float:
    """Return the bytes that a machine of 8 ranks sends to the other one in a step.

    A ring over all 16 ranks leaves a machine once, so what one rank sends also crosses. Of groups
    of two ranks, one on each machine, there are eight.
    """
    pairs = sum(call.sent for call in seen.calls if call.ranks == 2)
    return 8 * pairs + sum(call.sent for call in seen.calls if call.ranks == 16)


def stages() -> None:
    """Compute the table: setting -> GiB per rank, GB between the machines, and the bubble."""
    seen: dict[str, dict[str, float]] = {}
    shape = SHAPES["7B"]
    flags = {"max_length": LENGTH, "micro_batch_tokens": LENGTH, "global_batch_tokens": STEP} | FULL
    with tempfile.TemporaryDirectory() as folder:
        shape.save_pretrained(folder)
        for setting, (strategy, own) in ACROSS.items():
            ends = [
                report(strategy, folder, shape.vocab_size, 16, rank=rank, **flags, **own)
                for rank in ([0, 15] if strategy == "fsdp2_pp" else [0])
            ]
            seen[setting] = {
                "gib": max(end.on_device for end in ends) / GIB,
                "sent": max(end.sent for end in ends) / 1e9,
                "across": max(map(sent_across, ends)) / 1e9,
                "micro_batches": ends[0].micro_batches,
                "stages": own.get("pipeline_parallel", 1),
            }
            print(setting, seen[setting], flush=True)
    FILE_STAGES.write_text(json.dumps(seen, indent=1) + "\n")
    print(stages_table())


def stages_table() -> str:
    """Return Markdown: what two machines send each other, and how long stages wait."""
    lines = [
        "| two machines of 8 GPUs | peak of a rank | a rank sends in a step | a machine sends to "
        "the other | at 100 Gbit/s | a stage waits |",
        "| --- " * 6 + "|",
    ]
    for setting, row in json.loads(FILE_STAGES.read_text()).items():
        bubble = (row["stages"] - 1) / (row["micro_batches"] + row["stages"] - 1)
        lines.append(
            f"| {setting} | {row['gib']:.1f} GiB | {row['sent']:.1f} GB | {row['across']:.1f} GB | "
            f"{row['across'] * 8 / 100:.1f} s | {bubble:.1%} of a step |"
        )
    return "\n".join(lines)


# --- Experts --------------------------------------------------------------------------------------


def experts() -> None:
    """Compute the table: GPUs -> with and without EP, GiB and GB per rank."""
    seen: dict[str, dict[str, dict[str, float]]] = {}
    flags = {"max_length": LENGTH // 2, "micro_batch_tokens": LENGTH} | FULL
    own = {"fsdp2": {}, "fsdp2_ep": {"expert_parallel": EXPERT_PARALLEL}}
    with tempfile.TemporaryDirectory() as folder:
        named = build_config(Flags(model="qwen3-30b-a3b"), 151936, None)
        named.save_pretrained(folder)
        for ranks in (8, 64, 512):
            seen[str(ranks)] = {}
            for strategy, more in own.items():
                made = report(strategy, folder, 151936, ranks, **flags, **more)
                exchanged = sum(call.sent for call in made.calls if call.kind == "all-to-all")
                seen[str(ranks)][strategy] = {
                    "gib": made.on_device / GIB,
                    "sent": made.sent / 1e9,
                    "exchanged": exchanged / 1e9,
                }
                print(ranks, strategy, seen[str(ranks)][strategy], flush=True)
    FILE_EXPERTS.write_text(json.dumps(seen, indent=1) + "\n")
    print(experts_table())


def experts_table() -> str:
    """Return Markdown: memory and traffic, and up to which micro-batch EP sends less.

    Its exchanges grow with the tokens. All-gathers and reduce-scatters do not.
    """
    lines = [
        f"| GPUs | FSDP2: peak | sends | EP of {EXPERT_PARALLEL}: peak | all-gathers and "
        "reduce-scatters | all-to-alls | sends less up to |",
        "| --- " * 7 + "|",
    ]
    for ranks, row in json.loads(FILE_EXPERTS.read_text()).items():
        alone, split = row["fsdp2"], row["fsdp2_ep"]
        rest = split["sent"] - split["exchanged"]
        tokens = LENGTH * (alone["sent"] - rest) / split["exchanged"]
        lines.append(
            f"| {ranks} | {alone['gib']:.1f} GiB | {alone['sent']:,.0f} GB | "
            f"{split['gib']:.1f} GiB | {rest:,.0f} GB | {split['exchanged']:,.0f} GB | "
            f"{tokens:,.0f} tokens |"
        )
    return "\n".join(lines)


def bytes_of_cached_token(shape: Any) -> int:
    """Return the bytes of a token's keys and values in all blocks, in bf16."""
    head_size = shape.hidden_size // shape.num_attention_heads
    return 2 * 2 * shape.num_hidden_layers * shape.num_key_value_heads * head_size


def sampling_table(ranks: int = 8, card: int = 80) -> str:
    """Return Markdown: memory while `fsdp2_grpo.py` samples, and for how many tokens it lasts."""
    lines = [
        f"| | shards on {ranks} ranks | unsharded parameters | keys and values of 1,000 tokens | "
        f"tokens at a time on {card} GB |",
        "| --- " * 5 + "|",
    ]
    for name, shape in SHAPES.items():
        with torch.device("meta"):
            parameters = AutoModelForCausalLM.from_config(shape).num_parameters()
        of_token = bytes_of_cached_token(shape)
        # Parameters and moments. There are no gradients while a model samples.
        shards, unsharded = 12 * parameters / ranks, 2 * parameters
        tokens = (0.9 * card * 1e9 - shards - unsharded) / of_token
        room = f"{tokens / 1e6:.1f} million" if tokens > 0 else "none"
        lines.append(
            f"| {name} | {shards / 1e9:.1f} GB | {unsharded / 1e9:.1f} GB | "
            f"{of_token / 1e3:.0f} MB | {room} |"
        )
    return "\n".join(lines)


# --- Pictures -------------------------------------------------------------------------------------

HELD = {  # kinds of memory, and their colors
    "parameters": "#1d3557", "optimizer state": "#457b9d", "gradients": "#a8dadc",
    "gathered parameters": "#f2a65a", "activations": "#e9ecef", "backward": "#cdb4db",
}  # fmt: skip
MOVES = {"all-gather": "#e76f51", "reduce-scatter": "#2a9d8f", "all-reduce": "#6a4c93"}
MOVES |= {"all-to-all": "#b5838d", "send": "#606c38"}
REMARKS = {
    "fsdp2_pp": " (first stage, two micro-batches)",
    "fsdp2_nd": " (two stages of tensor-parallel pairs; the first stage, two micro-batches)",
    "fsdp2_ep": " (each block has 8 experts of a quarter of the width; a token uses 2)",
}
COLORS = {"ddp": "#e76f51", "fsdp1": "#f2a65a", "fsdp2": "#1d3557"}


class Recorder(Watch):
    """Remembers how much memory was held when, and which collective began when."""

    def __init__(self) -> None:
        super().__init__()
        self.restart()

    def restart(self) -> None:
        super().restart()
        self.moments: list[tuple[int, dict[str, int]]] = []
        self.moves: list[tuple[int, Any]] = []

    def __torch_dispatch__(self, *arguments: Any) -> Any:
        result = super().__torch_dispatch__(*arguments)
        self.moments.append((self.flops, dict(self.held)))
        return result

    def note(self, *arguments: Any) -> None:
        super().note(*arguments)
        self.moves.append((self.flops, self.calls[-1]))


def mixture() -> Any:
    """Return the shape of the other strategies' model, with experts instead of a feed-forward."""
    from transformers import MiniMaxM2Config

    return MiniMaxM2Config(
        vocab_size=50304, hidden_size=896, intermediate_size=1216, num_hidden_layers=6,
        num_attention_heads=14, num_key_value_heads=2, head_dim=64, num_local_experts=8,
        num_experts_per_tok=2, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip


def timeline() -> None:
    pyplot = shared.plotting()
    own: dict[str, dict[str, int]] = {name: {} for name in STRATEGIES}
    own |= {"fsdp2_tp": {"tensor_parallel": 2}, "fsdp2_cp": {"context_parallel": 2}}
    own |= {"fsdp2_pp": {"pipeline_parallel": 2}, "fsdp2_ep": {"expert_parallel": 2}}
    own |= {"fsdp2_nd": {"tensor_parallel": 2, "pipeline_parallel": 2}}
    for strategy, flags in own.items():
        figure, axis = pyplot.subplots(figsize=(9, 3), dpi=150)
        seen = Recorder()
        with tempfile.TemporaryDirectory() as folder:
            shape = mixture() if strategy == "fsdp2_ep" else qwen2(896, 4864, 6, 14, 2, 50304)
            shape.save_pretrained(folder)
            report(strategy, folder, 50304, 8, seen, **flags)
        start = next(i for i, (flops, _) in enumerate(seen.moments) if flops)
        times = [flops / 1e12 for flops, _ in seen.moments[start:]]
        layers = [[max(held.get(k, 0), 0) / MIB for _, held in seen.moments[start:]] for k in HELD]
        axis.stackplot(times, layers, labels=HELD, colors=HELD.values(), step="post", linewidth=0)
        top = 1.12 * max(map(sum, zip(*layers)))
        kinds = set()
        for flops, call in seen.moves:
            if call.kind in MOVES and call.bytes > MIB:
                kinds.add(call.kind)
                height = top * (1.08 if call.kind == "reduce-scatter" else 1)
                axis.plot(flops / 1e12, height, "v", color=MOVES[call.kind], markersize=5)
        for kind in sorted(kinds):
            axis.plot([], [], "v", color=MOVES[kind], label=kind)
        axis.set_ylim(0, 1.2 * top)
        axis.set_ylabel("MiB of a rank")
        axis.set_xlabel("TFLOPs of the step: forward, backward, then AdamW (without FLOPs)")
        title = f"{strategy}_pretrain.py{REMARKS.get(strategy, '')}"
        axis.set_title(title, fontsize=9, loc="left")
        axis.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
        shared.finish(figure, ROOT / f"docs/images/timeline_{strategy}.png")


def ranks() -> None:
    figure, axes = shared.plotting().subplots(1, 2, figsize=(9, 3.4), dpi=150)
    counts = [1, 2, 4, 8, 16, 64, 256, 1024]
    for number, (strategy, color) in enumerate(COLORS.items()):
        reports = [report(strategy, "qwen2-0.5b", 50257, count) for count in counts]
        style = {"color": color, "marker": "o", "markersize": 9 - 3 * number, "label": strategy}
        axes[0].plot(counts, [each.on_device / GIB for each in reports], **style)
        axes[1].plot(counts, [each.sent / 1e9 for each in reports], **style)
    for axis, title in zip(axes, ("peak memory of a rank, GiB", "sent by a rank in a step, GB")):
        axis.set_xscale("log", base=2)
        axis.set_xticks(counts, map(str, counts))
        axis.set_xlabel("ranks")
        axis.set_ylim(bottom=0)
        axis.set_title(title, fontsize=9)
    axes[0].legend(frameon=False, fontsize=8)
    shared.finish(figure, ROOT / "docs/images/ranks.png")


def main() -> None:
    made = {
        "traffic": lambda: print(traffic_table()), "choosing": choosing, "inside": inside,
        "stages": stages, "experts": experts, "sampling": lambda: print(sampling_table()),
        "timeline": timeline, "ranks": ranks,
    }  # fmt: skip
    reader = shared.parser(__doc__)
    reader.add_argument("what", choices=made)
    made[reader.parse_args().what]()


if __name__ == "__main__":
    main()
