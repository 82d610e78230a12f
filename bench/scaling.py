"""Tokens per second and memory over row length, width, accumulation and ranks; planning time.

    python bench/scaling.py

A model of 4 layers in fp32 on gloo ranks of one thread each, in rows of one length without padding;
one of length, width, micro-batches a step and ranks varies, the others stay at 512, 256, 1 and 2.
Memory is a whole process, libraries included. Then the batch plan of an epoch of 10^4 to 10^8
documents. Writes docs/scaling.json and docs/scaling.png.
"""

import functools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import arguments
import numpy as np
from compare import FLAGS, ROOT, Contestant, common, words
from transformers import Qwen2Config

STEPS, SKIPPED = 8, 3
MICRO_BATCH = 2048
SCRIPTS = ["ddp_pretrain", "fsdp2_pretrain"]
BASE = {"length": 512, "width": 256, "micro-batches": 1, "ranks": 2}
SWEEPS: dict[str, list[int]] = {
    "length": [128, 256, 512, 1024, 2048],
    "width": [128, 256, 512],
    "micro-batches": [1, 2, 4],
    "ranks": [1, 2, 4],
}


@functools.cache
def measure(script: str, length: int, width: int, micro_batches: int, ranks: int) -> dict[str, Any]:
    """Median tokens per second, and most memory of rank 0, of a short run."""
    with tempfile.TemporaryDirectory() as own:
        folder = Path(own)
        Qwen2Config(
            vocab_size=512, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
        ).save_pretrained(folder / "shape")  # fmt: skip
        files = common.standard_library_files()[:100]
        text = "".join(Path(file).read_text("ascii", "ignore") for file in files)
        documents = [text[i : i + length] for i in range(0, len(text) - length, length)]
        lines = [json.dumps({"text": document}) + "\n" for document in documents]
        (folder / "rows.jsonl").write_text("".join(lines))
        flags = FLAGS | {
            "model": folder / "shape", "dataset": folder / "rows.jsonl", "bucket_edges": [length],
            "micro_batch_tokens": MICRO_BATCH, "steps": STEPS, "run_dir": folder / "run",
            "global_batch_tokens": MICRO_BATCH * ranks * micro_batches,
        }  # fmt: skip
        (folder / "settings.json").write_text(json.dumps({"flags": {script: words(flags)}}))
        seen = Contestant(sys.executable, folder, script, ranks).finish()
    rates = [tokens / seconds for tokens, seconds in zip(seen["tokens"], seen["seconds"])]
    return {"tokens_per_second": statistics.median(rates[SKIPPED:]), "peak_gib": seen["peak_gib"]}


def planning() -> dict[str, dict[int, float]]:
    """Seconds to plan an epoch of documents of lognormal length, cut at 2,048 tokens."""
    took: dict[str, dict[int, float]] = {"bucketed": {}, "packed": {}}
    for documents in (10**exponent for exponent in range(4, 9)):
        rng = np.random.default_rng(0)
        length = np.minimum(rng.lognormal(5.5, 1, documents).astype(np.int32) + 1, 2048)
        started = time.perf_counter()
        common.plan_bucketed(length, [256, 512, 1024, 2048], 8192, rng)
        took["bucketed"][documents] = time.perf_counter() - started
        started = time.perf_counter()
        common.plan_packed(length, 8192, rng)
        took["packed"][documents] = time.perf_counter() - started
        seconds = ", ".join(f"{kind} {times[documents]:.2f} s" for kind, times in took.items())
        print(f"plan of {documents:,} documents: {seconds}", flush=True)
    return took


def draw(seen: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, len(SWEEPS) + 1, figsize=(12, 4.6), dpi=150)
    colours = ("#1d3557", "#f2a65a")
    kinds = {"tokens_per_second": "tokens/s", "peak_gib": "GiB of a rank"}
    for column, (sweep, values) in enumerate(SWEEPS.items()):
        for row, (kind, label) in enumerate(kinds.items()):
            axis = axes[row, column]
            for script, colour in zip(SCRIPTS, colours):
                points = np.array([seen[sweep][script][str(value)][kind] for value in values])
                axis.plot(values, points, marker="o", color=colour, label=script)
            axis.set_xscale("log", base=2)
            axis.set_xticks(values, map(str, values))
            axis.set_ylim(0, 1.1 * max(line.get_ydata().max() for line in axis.lines))
            axis.tick_params(labelsize=7)
            axes[row, 0].set_ylabel(label)
        axes[1, column].set_xlabel(sweep)
    axes[0, 0].legend(frameon=False, fontsize=8)
    plan = axes[0, -1]
    for (kind, times), colour in zip(seen["planning"].items(), colours):
        plan.loglog([*map(int, times)], [*times.values()], marker="o", color=colour, label=kind)
    plan.set(ylabel="seconds to plan", xlabel="documents")
    plan.legend(frameon=False, fontsize=8)
    axes[1, -1].remove()
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    arguments.read(__doc__)
    seen: dict[str, Any] = {"planning": planning()}
    for sweep, values in SWEEPS.items():
        seen[sweep] = {script: {} for script in SCRIPTS}
        for value in values:
            for script in SCRIPTS:
                point = measure(script, *(BASE | {sweep: value}).values())
                seen[sweep][script][str(value)] = point
                rate, memory = point.values()
                print(
                    f"{script}, {value} {sweep}: {rate:,.0f} tokens/s, {memory:.2f} GiB", flush=True
                )
    (ROOT / "docs/scaling.json").write_text(json.dumps(seen, indent=1) + "\n")
    draw(seen, ROOT / "docs/scaling.png")


if __name__ == "__main__":
    main()
