"""Draws what moves and what is resident during one optimizer step, of each strategy.

    python bench/timeline.py

A model of 6 blocks of qwen2-0.5b's width on 8 ranks, one micro-batch of 4,096 tokens, bf16, as
bench/dry_run.py sees it. Time is counted in FLOPs. Writes docs/timeline.png.
"""

import importlib
import tempfile
from typing import Any

import arguments
from dry_run import MIB, ROOT, Watch, be_rank_0, dry_run
from transformers import Qwen2Config

import common

HELD = {  # what is resident, and its colour
    "parameters": "#1d3557", "optimizer state": "#457b9d", "gradients": "#a8dadc",
    "gathered parameters": "#f2a65a", "activations": "#e9ecef", "backward": "#cdb4db",
}  # fmt: skip
MOVES = {"all-gather": "#e76f51", "reduce-scatter": "#2a9d8f", "all-reduce": "#6a4c93"}


class Recorder(Watch):
    """Remembers how much was held when, and when which collective began."""

    def __init__(self) -> None:
        super().__init__()
        self.moments: list[tuple[int, dict[str, int]]] = []
        self.moves: list[tuple[int, common.Collective]] = []

    def __torch_dispatch__(self, *arguments: Any) -> Any:
        result = super().__torch_dispatch__(*arguments)
        self.moments.append((self.flops, dict(self.held)))
        return result

    def note(self, *arguments: Any) -> None:
        super().note(*arguments)
        self.moves.append((self.flops, self.calls[-1]))


def record(script: str, shape: str) -> Recorder:
    be_rank_0(8, 8)
    module, recorder = importlib.import_module(script), Recorder()
    config = module.Config(
        model=shape, precision="bf16", bucket_edges=[2048], global_batch_tokens=8 * 4096
    )
    dry_run(module, config, 8, 50304, recorder)
    return recorder


def main() -> None:
    arguments.read(__doc__)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(3, 1, figsize=(9, 8), dpi=150, sharex=True)
    with tempfile.TemporaryDirectory() as folder:
        Qwen2Config(
            vocab_size=50304, hidden_size=896, intermediate_size=4864, num_hidden_layers=6,
            num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True,
        ).save_pretrained(folder)  # fmt: skip
        scripts = ["ddp_pretrain", "fsdp1_pretrain", "fsdp2_pretrain"]
        recorders = [record(script, folder) for script in scripts]
    for axis, script, seen in zip(axes, scripts, recorders):
        start = next(i for i, (flops, _) in enumerate(seen.moments) if flops)
        moments = seen.moments[start:]
        times = [flops / 1e12 for flops, _ in moments]
        layers = [[max(held.get(kind, 0), 0) / MIB for _, held in moments] for kind in HELD]
        axis.stackplot(times, layers, labels=HELD, colors=HELD.values(), step="post", linewidth=0)
        top = 1.12 * max(map(sum, zip(*layers)))
        for flops, call in seen.moves:
            if call.kind in MOVES and call.bytes > MIB:
                height = top * (1.08 if call.kind == "reduce-scatter" else 1)
                axis.plot(flops / 1e12, height, "v", color=MOVES[call.kind], markersize=5)
        axis.set_ylim(0, 1.2 * top)
        axis.set_ylabel("MiB of a rank")
        axis.set_title(f"{script}.py", fontsize=9, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
    for kind, colour in MOVES.items():
        axes[0].plot([], [], "v", color=colour, label=kind)
    axes[0].legend(frameon=False, fontsize=7, ncol=5, loc="upper center", bbox_to_anchor=(0.5, 1.4))
    axes[-1].set_xlabel("TFLOPs of the step: forward, backward, then AdamW (without FLOPs)")
    figure.tight_layout()
    figure.savefig(ROOT / "docs/timeline.png")


if __name__ == "__main__":
    main()
