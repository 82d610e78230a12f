"""What each strategy keeps on a rank and moves in a step: the README's table, by formula.

    python bench/traffic.py [RANKS]

For qwen2-0.5b with the GPT-2 vocabulary, parameters of 4 bytes, AdamW, bf16 compute: parameters
travel as 2 bytes, gradients as 4 (fp32 reduction), and a micro-batch a step.
"""

import sys
from pathlib import Path

import arguments

sys.path.insert(0, str(Path(__file__).parents[1]))


def parameters() -> tuple[int, int]:
    """Parameters of qwen2-0.5b and of its blocks, in the shape that the script gives it."""
    import torch
    from transformers import AutoModelForCausalLM

    import fsdp2_pretrain

    shape = fsdp2_pretrain.architecture(fsdp2_pretrain.Config(model="qwen2-0.5b"), 50257)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape)
    in_blocks = sum(parameter.numel() for parameter in model.model.layers.parameters())
    return model.num_parameters(), in_blocks


def table(whole: int, in_blocks: int, ranks: int) -> str:
    """Markdown; sizes in GB = 10^9 bytes, traffic as sent by each rank."""
    gb, blocks_gb, share = whole / 1e9, in_blocks / 1e9, (ranks - 1) / ranks
    rows = [
        (
            "`ddp_pretrain.py`",
            "everything",
            16 * gb,
            "all-reduce of gradients: 2G(N-1)/N",
            2 * 4 * gb * share,
        ),
        (
            "`fsdp1_pretrain.py`, `fsdp2_pretrain.py`",
            "1/N of everything; whole only while needed, and not in the figure: the root, one or "
            "two blocks",
            16 * gb / ranks,
            "all-gather of parameters before forward, P(N-1)/N, and again before backward but for "
            "the root; reduce-scatter of gradients, G(N-1)/N",
            (2 * gb + 2 * blocks_gb + 4 * gb) * share,
        ),
        (
            "`fsdp2_pretrain.py --reshard_after_forward false`",
            "1/N of everything; the whole parameters from first forward to last backward",
            16 * gb / ranks + 2 * gb,
            "all-gather before forward, P(N-1)/N; reduce-scatter, G(N-1)/N",
            (2 + 4) * gb * share,
        ),
    ]
    lines = [
        f"| script | each rank keeps | {ranks} ranks | collectives of a step | {ranks} ranks |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [f"| {a} | {b} | {c:.2f} GB | {d} | {e:.2f} GB |" for a, b, c, d, e in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    [ranks] = arguments.read(__doc__, ranks=8)
    print(table(*parameters(), ranks))
