"""Which mesh of fsdp2_nd_pretrain.py for which model on how many GPUs: found by the dry run.

    python bench/meshes.py

Llama 3's shapes (8B, 70B, 405B) train on 64, 512 and 4,096 GPUs of 80 GB in bf16, with sequences of
8,192 tokens, one per micro-batch, and Llama 3's global batch of 16 million tokens. For every mesh
that divides the ranks, the model and the batch, the time of a step is estimated:

- compute: 6 FLOPs per parameter and token, and those of attention, at TFLOPS; recomputation adds a
  third
- the bubble of 1F1B: (S-1)/k of the compute
- exposed communication, in closed form: the collectives of TP and CP, FSDP's all-gather as far as
  it is longer than the forward that it overlaps with, and its reduce-scatter, which comes last

The dry run tells how much memory the first and the last stage need. The first mesh that fits, in
the order of the estimated time, is the one of the table. Writes docs/meshes.json.
"""

import contextlib
import dataclasses
import io
import itertools
import json
import tempfile
from collections.abc import Iterator
from typing import Any

import dry_run
import shared
from shared import ROOT

import fsdp2_nd_pretrain as script

SHAPES = {  # hidden size, feed-forward, blocks, heads; all have 8 K/V heads
    "8B": (4096, 14336, 32, 32),
    "70B": (8192, 28672, 80, 64),
    "405B": (16384, 53248, 126, 128),
}
RANKS = [64, 512, 4096]
LENGTH, BATCH, VOCABULARY = 8192, 2**24, 128256  # tokens
TFLOPS = 500  # of matmuls, in bf16 on an H100
NODE = 8  # GPUs
NVLINK, NETWORK = 300e9, 50e9  # bytes per second that a GPU sends in a node, and between nodes
MEMORY = 0.9 * 80e9  # the allocator and NCCL need a tenth
LLAMA = (8, 1, 16)  # TP, CP and PP of Llama 3 405B (arXiv 2407.21783, table 4)
FILE = ROOT / "docs/meshes.json"


@dataclasses.dataclass
class Mesh:
    """A mesh, and how long a step takes on it, in seconds."""

    model: str
    ranks: int
    tp: int
    cp: int
    pp: int
    recompute: bool
    compute: float = 0.0
    bubble: float = 0.0
    exposed: float = 0.0
    peak_gb: float = 0.0

    @property
    def dp(self) -> int:
        return self.ranks // (self.tp * self.cp * self.pp)

    @property
    def micro_batches(self) -> int:
        return BATCH // LENGTH // self.dp

    @property
    def seconds(self) -> float:
        return self.compute + self.bubble + self.exposed

    def estimate(self) -> None:
        width, feed_forward, blocks, heads = SHAPES[self.model]
        head_size = width // heads
        keys = 8 * head_size
        block = 2 * width * width + 2 * width * keys + 3 * width * feed_forward
        numbers = block * blocks + 2 * VOCABULARY * width
        in_stage = numbers / (self.tp * self.pp)
        own_blocks = blocks / self.pp
        flops = 6 * (numbers - VOCABULARY * width) + 6 * blocks * width * LENGTH  # causal
        self.compute = flops * BATCH / self.ranks / (TFLOPS * 1e12)
        self.compute *= 4 / 3 if self.recompute else 1
        self.bubble = self.compute * (self.pp - 1) / self.micro_batches
        hidden = LENGTH / self.cp * width * 2  # bytes
        times = 11 if self.recompute else 8
        tensor = times * own_blocks * hidden * (self.tp - 1) / self.tp
        times = 6 if self.recompute else 4
        repeated = max(keys // self.tp, head_size * self.cp)
        heads_and_keys = LENGTH * 2 * (width / self.tp + repeated)
        context = times * own_blocks * heads_and_keys * (self.cp - 1) / self.cp**2
        link = NVLINK if self.tp * self.cp <= NODE else NETWORK
        self.exposed = self.micro_batches * (tensor / NVLINK + context / link)
        shards = self.dp * self.cp
        share = (shards - 1) / shards
        forward = self.compute / self.micro_batches / (4 if self.recompute else 3)
        self.exposed += max(0.0, 2 * in_stage * share / NETWORK - forward)
        self.exposed += 4 * in_stage * share / NETWORK

    def may_fit(self) -> bool:
        """Return whether a lower bound of what the first stage keeps leaves room.

        Per parameter 6 bytes unsharded (bf16, and the gradient in fp32) and 16 sharded; per token
        and block at least 12 numbers in bf16, or one if blocks are recomputed.
        """
        width, feed_forward, blocks, heads = SHAPES[self.model]
        numbers = blocks * (2 * width**2 + 16 * width * width // heads + 3 * width * feed_forward)
        in_stage = numbers / (self.tp * self.pp)
        of_token = (2 if self.recompute else 24) * width * blocks  # S micro-batches of L/S blocks
        activations = of_token * LENGTH / (self.tp * self.cp)
        return in_stage * (6 + 16 / (self.dp * self.cp)) + activations < MEMORY

    def fits(self, folder: str) -> bool:
        """Ask the dry run for the peak of the first and the last stage."""
        config_flags: dict[str, Any] = {
            "model": f"{folder}/{self.model}",
            "precision": "bf16",
            "max_length": LENGTH,
            "micro_batch_tokens": LENGTH,
            "pad_to_multiple_of": self.tp * self.cp,
            "global_batch_tokens": LENGTH * self.dp * self.pp,  # more would not change the peak
            "tensor_parallel": self.tp,
            "context_parallel": self.cp,
            "pipeline_parallel": self.pp,
            "activation_checkpointing": "full" if self.recompute else "none",
        }
        # But a stage has receive buffers for all micro-batches.
        sent = LENGTH // (self.tp * self.cp) * SHAPES[self.model][0] * 2
        more = (self.micro_batches - self.pp) * sent if self.pp > 1 else 0
        for rank in sorted({0, self.ranks - 1}) if self.pp > 1 else [0]:
            dry_run.be_rank(rank, self.ranks, NODE)
            with contextlib.redirect_stdout(io.StringIO()):  # the script prints its mesh
                report = dry_run.dry_run(script, script.Config(**config_flags), VOCABULARY)
            self.peak_gb = max(self.peak_gb, (report.on_device + more) / 1e9)
            if self.peak_gb * 1e9 > MEMORY:
                return False
        return True


def meshes(model: str, ranks: int) -> Iterator[Mesh]:
    _, _, blocks, heads = SHAPES[model]
    powers = [1, 2, 4, 8, 16]
    for tp, cp, pp in itertools.product(powers[:4], powers[:4], powers):
        sharing = tp * cp * pp
        divides = ranks % sharing == 0 and heads % (tp * cp) == 0 and pp <= blocks
        if not divides or BATCH // LENGTH % (ranks // sharing):
            continue
        for recompute in (False, True):
            mesh = Mesh(model, ranks, tp, cp, pp, recompute)
            if mesh.micro_batches >= pp and mesh.may_fit():
                mesh.estimate()
                yield mesh


def save_shapes(folder: str) -> None:
    from transformers import LlamaConfig

    for name, (width, feed_forward, blocks, heads) in SHAPES.items():
        LlamaConfig(
            hidden_size=width, intermediate_size=feed_forward, num_hidden_layers=blocks,
            num_attention_heads=heads, num_key_value_heads=8, vocab_size=VOCABULARY,
            max_position_embeddings=131072, tie_word_embeddings=False,
        ).save_pretrained(f"{folder}/{name}")  # fmt: skip


def row(mesh: Mesh) -> dict[str, Any]:
    return dataclasses.asdict(mesh) | {"dp": mesh.dp, "seconds": mesh.seconds}


def search() -> list[dict[str, Any]]:
    """Return the best mesh for each model and number of ranks, and Llama 3's beside it."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        save_shapes(folder)
        for model, ranks in itertools.product(SHAPES, RANKS):
            candidates = sorted(meshes(model, ranks), key=lambda mesh: mesh.seconds)
            best = next((mesh for mesh in candidates if mesh.fits(folder)), None)
            same = [m for m in candidates if (m.tp, m.cp, m.pp) == LLAMA and model == "405B"]
            theirs = next((mesh for mesh in same if mesh.fits(folder)), None)
            entry = {"model": model, "ranks": ranks, "best": best and row(best)}
            found.append(entry | {"llama": theirs and row(theirs)})
            print(found[-1], flush=True)
    return found


def meshes_table() -> str:
    """Return Markdown: the best mesh for each model and number of ranks."""
    titles = "| model | GPUs | TP x CP x PP x DP | recompute | peak | a step | bubble | exposed |"
    lines = [titles, "| --- " * 8 + "|"]
    for entry in json.loads(FILE.read_text()):
        for name in ("best", "llama"):
            mesh = entry[name]
            model = entry["model"] + (" (Llama 3's mesh)" if name == "llama" else "")
            if mesh is None:
                if name == "best":
                    lines.append(f"| {model} | {entry['ranks']:,} | no mesh fits | | | | | |")
                continue
            sizes = " x ".join(str(mesh[size]) for size in ("tp", "cp", "pp", "dp"))
            cells = [model, f"{entry['ranks']:,}", sizes, "all" if mesh["recompute"] else "none"]
            cells += [f"{mesh['peak_gb']:.0f} GB", f"{mesh['seconds']:.1f} s"]
            cells += [f"{mesh[part] / mesh['seconds']:.0%}" for part in ("bubble", "exposed")]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    shared.read(__doc__)
    FILE.write_text(json.dumps(search(), indent=1) + "\n")
    print(meshes_table())


if __name__ == "__main__":
    main()
