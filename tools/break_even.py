"""Print where strategies stop being bound by the network, on H100s, by formula.

    python tools/break_even.py           by formula
    python tools/break_even.py counted   beside what the dry run counts

These are the tables of docs/scale.md, which derives the formulas. Rates are from the data sheet:
989 TFLOP/s in bf16 (dense), 450 GB/s over NVLink in each direction, and 400 Gbit/s to another
machine.

counted: eight blocks of Llama 3 8B on 8 ranks, micro-batches of 8,192 tokens in sequences of 2,048.
PP: a middle one of 4 stages. EP: two blocks of qwen3-30b-a3b, with evenly used experts.
The dry run tells how many FLOPs a rank computes and how many bytes it sends. Below the table: how
long a block of EP's model computes in all, and how long its all-to-alls take.
"""

import tempfile
from typing import Any

import shared
import torch
from dry_run import Watch, report

FLOPS = 989e12
LINKS = {"NVLink": 450e9, "between machines": 50e9}  # bytes per second that a rank sends


def break_even(link: float) -> dict[str, str]:
    """Return strategy -> what has to be larger than which number."""
    ratio = FLOPS / link  # FLOPs in the time in which a byte is sent
    return {
        "DDP": f"{2 * ratio:,.0f} tokens per rank and step",
        "FSDP2": f"{4 / 3 * ratio:,.0f} tokens per micro-batch",
        "TP of 2": f"hidden size {ratio / 4.5:,.0f}",
        "TP of 8": f"hidden size {7 * ratio / 4.5:,.0f}",
        "CP of 8 (Ulysses)": f"12 x hidden size + length {8.75 * ratio / 6:,.0f}",
        "PP": f"parameters per stage / hidden size {ratio:,.0f}",
        "EP": f"width of an expert {4 / 9 * ratio:,.0f}",
    }


def table() -> str:
    columns = [break_even(link) for link in LINKS.values()]
    lines = [f"| bound by compute above | {' | '.join(LINKS)} |", "| --- | --- | --- |"]
    for strategy in columns[0]:
        lines.append(f"| {strategy} | {' | '.join(column[strategy] for column in columns)} |")
    return "\n".join(lines)


WIDTH, RANKS, TOKENS, LENGTH = 4096, 8, 8192, 2048
# Strategy -> the script, its flags and rank, what the formula asks for, and how much this step has.
COUNTED: dict[str, tuple[str, dict[str, int], str, float]] = {
    "DDP": ("ddp", {}, "tokens per rank and step", TOKENS),
    "FSDP2": ("fsdp2", {}, "tokens per micro-batch", TOKENS),
    "TP of 2": ("fsdp2_tp", {"tensor_parallel": 2}, "hidden size", WIDTH),
    "TP of 8": ("fsdp2_tp", {"tensor_parallel": 8}, "hidden size", WIDTH),
    "CP of 8 (Ulysses)": (
        "fsdp2_cp",
        {"context_parallel": 8},
        "12 x hidden size + length",
        12 * WIDTH + LENGTH,
    ),
    "PP": (
        "fsdp2_pp",
        {"pipeline_parallel": 4, "rank": 2},
        "parameters per stage / hidden size",
        2 * 13 * WIDTH,  # of two blocks
    ),
    "EP": ("fsdp2_ep", {"expert_parallel": 8}, "width of an expert", 768),
}


class PartWatch(Watch):
    """Counts only the FLOPs of one part of a step: of backward, say, or of the experts."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part

    def __torch_dispatch__(self, func: Any, *arguments: Any) -> Any:
        backward = torch._C._current_graph_task_id() != -1
        experts = func._overloadpacket is torch.ops.aten._grouped_mm
        parts = {"step": True, "forward": not backward, "backward": backward}
        parts |= {"experts": experts, "rest": not experts}
        before = self.flops
        result = super().__torch_dispatch__(func, *arguments)
        if not parts[self.part]:
            self.flops = before
        return result


def shape_for(script: str, blocks: int) -> Any:
    if script != "fsdp2_ep":
        return shared.qwen2(WIDTH, 14336, 8, 32, 8, 32000, tied=False)
    from transformers import AutoConfig

    from model import SHAPES

    shape = SHAPES["qwen3-30b-a3b"] | {"num_hidden_layers": blocks}
    return AutoConfig.for_model(vocab_size=32000, **shape)


def observed(strategy: str, part: str, blocks: int = 2) -> tuple[float, int]:
    """Return the bytes that the strategy sends in a dry run, and the FLOPs of a part of it.

    `blocks` is for EP only.
    """
    script, own, _, _ = COUNTED[strategy]
    flags: dict[str, Any] = {"max_length": LENGTH, "micro_batch_tokens": TOKENS} | own
    with tempfile.TemporaryDirectory() as folder:
        shape_for(script, blocks).save_pretrained(folder)
        seen = report(script, folder, 32000, RANKS, PartWatch(part), **flags)
    calls = seen.calls
    if script == "fsdp2_tp":  # FSDP's own collectives are in the line of FSDP2
        calls = [call for call in calls if call.ranks == own["tensor_parallel"]]
    if script in ("fsdp2_cp", "fsdp2_ep"):
        calls = [call for call in calls if call.kind == "all-to-all"]
    if script == "fsdp2_pp":
        calls = [call for call in calls if call.kind == "send"]
    return sum(call.sent for call in calls), seen.flops


def counted(strategy: str) -> float:
    """Return the break-even point by the bytes and FLOPs of a dry run."""
    # The compute that each formula on the page compares with.
    part = {"DDP": "backward", "PP": "forward", "EP": "experts"}.get(strategy, "step")
    sent, flops = observed(strategy, part)
    if strategy == "PP":
        sent /= 2  # a middle stage sends as much in backward
    return COUNTED[strategy][-1] * (sent / LINKS["NVLink"]) / (flops / FLOPS)


def counted_table() -> str:
    lines = ["| over NVLink | by formula | counted | |", "| --- | --- | --- | --- |"]
    formulas = break_even(LINKS["NVLink"])
    for strategy, (_, _, unit, _) in COUNTED.items():
        formula = formulas[strategy].replace(unit, "").strip()
        lines.append(f"| {strategy} | {formula} | {counted(strategy):,.0f} | {unit} |")
    return "\n".join(lines)


def block_with_experts() -> str:
    """Return what a block of EP's model computes in a step, beside its all-to-alls."""
    flops = {}
    for part in ("experts", "rest"):
        # One more block: embedding and head are in both.
        (less, before), (more, after) = observed("EP", part), observed("EP", part, blocks=3)
        flops[part] = after - before
    inside, between = ((more - less) / link * 1e3 for link in LINKS.values())
    parts = [f"{part} {number / TOKENS / 1e6:.0f}" for part, number in flops.items()]
    return (
        f"EP, MFLOPs per token and block: {', '.join(parts)}\n"
        f"A block computes for {sum(flops.values()) / FLOPS * 1e3:.1f} ms. "
        f"Its all-to-alls take {inside:.1f} ms over NVLink, {between:.1f} ms between machines."
    )


def main() -> None:
    reader = shared.parser(__doc__)
    reader.add_argument("what", nargs="?", choices=["formula", "counted"], default="formula")
    if reader.parse_args().what == "formula":
        print(table())
    else:
        print(counted_table(), block_with_experts(), sep="\n\n")


if __name__ == "__main__":
    main()
