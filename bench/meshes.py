"""Which mesh of fsdp2_nd_pretrain.py for which model on how many GPUs: found by the dry run.

    python bench/meshes.py              search, and write bench/results/meshes.json (many minutes)
    python bench/meshes.py published    the estimate beside what torchtitan has measured

The time of a step is estimated:

- matmuls, tile by tile: a multiprocessor computes a tile of the result, 128 x 128 numbers, and the
  last wave of tiles leaves some idle, so small matmuls are slower. The rate of full waves is chosen
  so that the first figure in PUBLISHED comes out, and that of float8 from the second one.
- causal attention at 0.6 of that rate, and 2.5 times as long in backward
- norms, rotary embeddings and the like, by the bytes that they read and write
- recomputation: the forward again (`selective`, half of the matmuls)
- the bubble of 1F1B, S-1 slots
- exposed communication: the collectives of TP and CP, with a latency for each, and what FSDP sends
  as far as it is longer than the compute beside it. The script gathers a stage before the first
  micro-batch and reduces after the last one. FSDP2 on its own overlaps both block by block.

`published` compares with the benchmarks of torchtitan (arXiv 2410.06511, and benchmarks/ there),
Llama 3.1 on H100s. The estimate is good to 20 % without a pipeline. It is 31 % too fast for 1F1B,
so it ranks no pipelines. The search finds the fastest mesh without a pipeline that fits, for the
shapes that need none (8B, 70B). It cannot tell meshes apart that are within 20 %, so the table says
how many more may fit and are. 405B needs a pipeline: the table has Llama 3's own mesh.

The models train on 64, 512 and 4,096 GPUs of 80 GB in bf16, with sequences of 8,192 tokens, one per
micro-batch, and Llama 3's global batch of 16 million tokens. All meshes that divide the ranks, the
model and the batch are candidates. The dry run tells how much memory the first and the last stage
need.
"""

import contextlib
import dataclasses
import functools
import io
import itertools
import json
import math
import tempfile
from collections.abc import Iterator
from typing import Any

import _tools  # noqa: F401
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
PROCESSORS, TILE = 132, 128  # multiprocessors of an H100; a tile of a result is 128 x 128 numbers
MEMORY_RATE = 2e12  # bytes per second
LATENCY = 20e-6  # seconds of a collective, beside the time for its bytes
NODE = 8  # GPUs
NVLINK, NETWORK = 300e9, 50e9  # bytes per second that a GPU sends in a node, and between nodes
MEMORY = 0.9 * 80e9  # the allocator and NCCL need a tenth
LLAMA = (8, 1, 16)  # TP, CP and PP of Llama 3 405B (arXiv 2407.21783, table 4)
FILE = ROOT / "bench/results/meshes.json"


@dataclasses.dataclass
class Mesh:
    """A mesh, and how long a step takes on it, in seconds."""

    model: str
    ranks: int
    tp: int
    cp: int
    pp: int
    recompute: str = "none"  # or selective, full
    micro_batches: int = 0  # of a rank and step
    sequences: int = 1  # of a micro-batch
    float8: bool = False
    hidden_tp: float = 0.0  # the part of TP's communication that overlaps (asynchronous TP)
    interleaved: int = 1  # stages of a rank
    overlaps: bool = False  # FSDP2 gathers and reduces block by block
    compute: float = 0.0
    bubble: float = 0.0
    exposed: float = 0.0
    peak_gb: float = 0.0

    def __post_init__(self) -> None:
        self.micro_batches = self.micro_batches or BATCH // LENGTH // self.dp

    @property
    def dp(self) -> int:
        return self.ranks // (self.tp * self.cp * self.pp)

    @property
    def seconds(self) -> float:
        return self.compute + self.bubble + self.exposed

    @property
    def tokens_per_second(self) -> float:
        """Of one GPU."""
        tokens = self.sequences * LENGTH * self.micro_batches * self.dp
        return tokens / self.seconds / self.ranks

    def estimate(self, rate: float, float8_rate: float) -> None:
        """Fill in the seconds, for full waves of tiles that run at these FLOP/s."""
        width, feed_forward, blocks, heads = SHAPES[self.model]
        keys = 8 * width // heads
        tokens = LENGTH * self.sequences // self.cp
        own = {"width": width // self.tp, "keys": keys // self.tp, "inner": feed_forward // self.tp}
        # Outputs and inputs of the weights of a block: query, key, value, output; gate, up, down.
        weights = [(own["width"], width), (own["keys"], width), (own["keys"], width)]
        weights += [(width, own["width"]), (own["inner"], width), (own["inner"], width)]
        weights += [(width, own["inner"])]
        fast = float8_rate if self.float8 else rate
        matmuls = sum(matmul(tokens, n, k, fast) for n, k in weights)
        of_gradients = sum(
            matmul(tokens, k, n, fast) + matmul(n, k, tokens, fast) for n, k in weights
        )
        attention = 2 * tokens * LENGTH * own["width"] / (0.6 * rate)
        numbers = 14 * own["width"] + 8 * own["keys"] + 4 * own["inner"]  # read or written, 2 bytes
        elementwise = 2 * tokens * numbers / MEMORY_RATE
        forward = matmuls + attention + elementwise
        block = forward + of_gradients + 2.5 * attention + 2 * elementwise
        recomputed = {"none": 0, "selective": matmuls / 2 + elementwise, "full": forward}
        head = 3 * matmul(tokens, VOCABULARY // self.tp, width, rate)
        per_stage = math.ceil(blocks / self.pp)
        slot = per_stage * (block + recomputed[self.recompute]) + head  # the slowest stage's
        self.compute = self.micro_batches * slot
        self.bubble = slot * (self.pp - 1) / self.interleaved

        times = 11 if self.recompute == "full" else 8
        bytes_sent = tokens * width * 2 * (self.tp - 1) / self.tp
        tensor = (times * (bytes_sent / NVLINK + LATENCY) if self.tp > 1 else 0) * per_stage
        times = 6 if self.recompute == "full" else 4
        repeated = max(own["keys"], width // heads * self.cp)
        bytes_sent = LENGTH * 2 * (own["width"] + repeated) * (self.cp - 1) / self.cp**2
        link = NVLINK if self.tp * self.cp <= NODE else NETWORK
        context = (times * (bytes_sent / link + LATENCY) if self.cp > 1 else 0) * per_stage
        self.exposed = (self.micro_batches + self.pp - 1) * (
            tensor * (1 - self.hidden_tp) + context
        )
        block_numbers = 2 * width * width + 2 * width * keys + 3 * width * feed_forward
        in_stage = (block_numbers * blocks + 2 * VOCABULARY * width) / (self.tp * self.pp)
        shards = self.dp * self.cp
        share = (shards - 1) / shards
        link = NVLINK if self.ranks <= NODE else NETWORK
        gather, reduction = 2 * in_stage * share / link, 4 * in_stage * share / link
        if self.overlaps:
            sent = (2 * gather + reduction) * self.micro_batches
            self.exposed += max(0.0, sent - self.compute)
        else:
            self.exposed += max(0.0, gather - per_stage * forward) + reduction

    def may_fit(self) -> bool:
        """Return whether a lower bound of what the first stage keeps leaves room.

        Per parameter 6 bytes unsharded (bf16, and the gradient in fp32) and 16 sharded; per token
        and block at least 12 numbers in bf16, or one if blocks are recomputed.
        """
        width, feed_forward, blocks, heads = SHAPES[self.model]
        numbers = blocks * (2 * width**2 + 16 * width * width // heads + 3 * width * feed_forward)
        in_stage = numbers / (self.tp * self.pp)
        # S micro-batches of L/S blocks.
        of_token = (2 if self.recompute == "full" else 24) * width * blocks
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
            "activation_checkpointing": self.recompute,
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


def matmul(rows: int, columns: int, inner: int, rate: float) -> float:
    """Return the seconds of a matmul: of its waves of tiles."""
    tiles = math.ceil(rows / TILE) * math.ceil(columns / TILE)
    return math.ceil(tiles / PROCESSORS) * PROCESSORS * 2 * TILE**2 * inner / rate


# What torchtitan measured on H100s at the end of 2024: tokens per second and GPU, all compiled.
ONE_NODE = Mesh("8B", 8, 1, 1, 1, "selective", 1, 2, overlaps=True)
LARGE = Mesh("70B", 256, 8, 1, 1, "full", 1, 16, float8=True, overlaps=True)
LARGEST = Mesh("405B", 512, 8, 1, 8, "full", 32, float8=True, hidden_tp=0.5)
PUBLISHED: dict[str, tuple[Mesh, int]] = {
    "8B, FSDP": (ONE_NODE, 6667),
    "8B, FSDP, float8": (dataclasses.replace(ONE_NODE, float8=True), 8532),
    "8B, FSDP, 16 nodes": (dataclasses.replace(ONE_NODE, ranks=128), 6514),
    "8B, FSDP, 16 nodes, float8": (dataclasses.replace(ONE_NODE, ranks=128, float8=True), 8380),
    "70B, FSDP 32 x TP 8, float8": (LARGE, 829),
    "70B, the same with asynchronous TP": (dataclasses.replace(LARGE, hidden_tp=0.5), 876),
    "405B, FSDP 8 x TP 8 x PP 8, float8, asynchronous TP, 1F1B": (LARGEST, 100),
    "405B, the same, interleaved": (dataclasses.replace(LARGEST, interleaved=2), 128),
}


def fitted(mesh: Mesh, measured: float, rates_of: Any) -> float:
    """Return the rate with which a mesh is as fast as measured, by bisection."""
    low, high = 1e14, 4e15
    for _ in range(50):
        middle = (low + high) / 2
        mesh.estimate(*rates_of(middle))
        low, high = (middle, high) if mesh.tokens_per_second < measured else (low, middle)
    return low


@functools.cache
def rates() -> tuple[float, float]:
    """Return the FLOP/s of full waves in bf16 and in float8."""
    (bf16, measured), (float8, measured_float8), *_ = PUBLISHED.values()
    rate = fitted(bf16, measured, lambda rate: (rate, rate))
    return rate, fitted(float8, measured_float8, lambda faster: (rate, faster))


def published_table() -> str:
    """Return Markdown: tokens per second of a GPU, estimated and measured."""
    lines = ["| Llama 3.1 on H100s | GPUs | torchtitan | estimate | |", "| --- " * 5 + "|"]
    for number, (name, (mesh, measured)) in enumerate(PUBLISHED.items()):
        mesh.estimate(*rates())
        difference = f"{mesh.tokens_per_second / measured - 1:+.0%}" if number > 1 else "fitted"
        cells = [name, str(mesh.ranks), f"{measured:,}", f"{mesh.tokens_per_second:,.0f}"]
        lines.append(f"| {' | '.join([*cells, difference])} |")
    return "\n".join(lines)


def meshes(model: str, ranks: int) -> Iterator[Mesh]:
    _, _, blocks, heads = SHAPES[model]
    powers = [1, 2, 4, 8, 16]
    for tp, cp, pp in itertools.product(powers[:4], powers[:4], powers):
        sharing = tp * cp * pp
        divides = ranks % sharing == 0 and heads % (tp * cp) == 0 and pp <= blocks
        if not divides or BATCH // LENGTH % (ranks // sharing):
            continue
        for recompute in ("none", "full"):
            mesh = Mesh(model, ranks, tp, cp, pp, recompute)
            if mesh.micro_batches >= pp and mesh.may_fit():
                mesh.estimate(*rates())
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
    """Return the fastest mesh that fits for each model and number of ranks; for 405B, Llama 3's."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        save_shapes(folder)
        for model, ranks in itertools.product(SHAPES, RANKS):
            candidates = sorted(meshes(model, ranks), key=lambda mesh: mesh.seconds)
            if model == "405B":
                candidates = [m for m in candidates if (m.tp, m.cp, m.pp) == LLAMA]
            else:
                candidates = [m for m in candidates if m.pp == 1]
            best = next((mesh for mesh in candidates if mesh.fits(folder)), None)
            if best:
                alike = sum(1 < m.seconds / best.seconds < 1.2 for m in candidates)
                found.append(row(best) | {"alike": alike})
                print(found[-1], flush=True)
    return found


def meshes_table() -> str:
    """Return Markdown: a mesh for each model and number of ranks."""
    titles = "| model | GPUs | TP x CP x PP x DP | recompute | peak | a step | bubble | exposed |"
    lines = [f"{titles} within 20 % |", "| --- " * 9 + "|"]
    for mesh in json.loads(FILE.read_text()):
        sizes = " x ".join(str(mesh[size]) for size in ("tp", "cp", "pp", "dp"))
        theirs = " (Llama 3's mesh)" if mesh["pp"] > 1 else ""
        cells = [mesh["model"] + theirs, f"{mesh['ranks']:,}", sizes, mesh["recompute"]]
        cells += [f"{mesh['peak_gb']:.0f} GB", f"{mesh['seconds']:.1f} s"]
        cells += [f"{mesh[part] / mesh['seconds']:.0%}" for part in ("bubble", "exposed")]
        cells += ["" if theirs else f"{mesh['alike']} more"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    reader = shared.parser(__doc__)
    reader.add_argument("what", nargs="?", choices=["search", "published"], default="search")
    if reader.parse_args().what == "search":
        FILE.write_text(json.dumps(search(), indent=1) + "\n")
        print(meshes_table())
    print(published_table())


if __name__ == "__main__":
    main()
