"""How tokens per second and memory grow with length, width, accumulation and ranks; planning time.

    python bench/scaling.py

On 2 gloo ranks of one thread (but for the sweep over ranks), fp32, documents that fill their rows.
Writes docs/scaling.json and docs/scaling.png. Planning is timed for up to 10^8 documents.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from compare import FLAGS, ROOT, common, run, words
from transformers import Qwen2Config

STEPS, SKIPPED = 8, 3
SCRIPTS = ["ddp_pretrain", "fsdp2_pretrain"]
BASE = {"length": 512, "width": 256, "accumulation": 1, "ranks": 2}
SWEEPS: dict[str, list[int]] = {
    "length": [128, 256, 512, 1024, 2048, 4096],
    "width": [128, 256, 512],
    "accumulation": [1, 2, 4, 8],
    "ranks": [1, 2, 4],
}


def measure(script: str, length: int, width: int, accumulation: int, ranks: int) -> dict[str, Any]:
    """Median tokens per second and most memory of a rank of a short run."""
    with tempfile.TemporaryDirectory() as own:
        folder = Path(own)
        Qwen2Config(
            vocab_size=512, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
        ).save_pretrained(folder / "shape")  # fmt: skip
        files = common.standard_library_files()[:250]
        text = "".join(Path(f).read_text("ascii", "ignore") for f in files)
        documents = [text[i : i + length] for i in range(0, len(text) - length, length)]
        lines = [json.dumps({"text": document}) + "\n" for document in documents]
        (folder / "rows.jsonl").write_text("".join(lines))
        flags = FLAGS | {
            "model": folder / "shape", "dataset": folder / "rows.jsonl", "bucket_edges": [length],
            "micro_batch_tokens": 4096, "global_batch_tokens": 4096 * ranks * accumulation,
            "steps": STEPS, "run_dir": folder / "run",
        }  # fmt: skip
        settings = {"flags": {script: words(flags)}}
        (folder / "settings.json").write_text(json.dumps(settings))
        seen = run(sys.executable, folder, script, ranks)
    rates = [tokens / seconds for tokens, seconds in zip(seen["tokens"], seen["seconds"])]
    return {"tokens_per_second": statistics.median(rates[SKIPPED:]), "peak_gib": seen["peak_gib"]}


def planning() -> dict[str, dict[int, float]]:
    """Seconds to plan an epoch of documents of lognormal length, cut at 2,048 tokens."""
    took: dict[str, dict[int, float]] = {"bucketed": {}, "packed": {}}
    for exponent in (4, 5, 6, 7, 8):
        rng = np.random.default_rng(0)
        length = np.minimum(rng.lognormal(5.5, 1, 10**exponent).astype(np.int32) + 1, 2048)
        started = time.perf_counter()
        common.plan_bucketed(length, [256, 512, 1024, 2048], 8192, rng)
        took["bucketed"][10**exponent] = time.perf_counter() - started
        started = time.perf_counter()
        common.plan_packed(length, 8192, rng)
        took["packed"][10**exponent] = time.perf_counter() - started
        print(exponent, {name: round(times[10**exponent], 2) for name, times in took.items()})
    return took


def draw(seen: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, len(SWEEPS), figsize=(11, 5), dpi=150, sharex="col")
    kinds = {"tokens_per_second": "tokens/s", "peak_gib": "GiB of a rank"}
    for column, (sweep, values) in enumerate(SWEEPS.items()):
        for row, (kind, label) in enumerate(kinds.items()):
            for script, colour in zip(SCRIPTS, ("#1d3557", "#f2a65a")):
                points = [seen[sweep][script][str(value)][kind] for value in values]
                axes[row, column].plot(values, points, marker="o", color=colour, label=script)
            axes[row, column].set_xscale("log", base=2)
            axes[row, column].set_ylim(bottom=0)
            axes[row, column].spines[["top", "right"]].set_visible(False)
            axes[row, 0].set_ylabel(label)
        axes[1, column].set_xlabel(sweep)
        axes[1, column].set_xticks(values, map(str, values))
    axes[0, 0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    seen: dict[str, Any] = {"planning": planning()}
    for sweep, values in SWEEPS.items():
        seen[sweep] = {script: {} for script in SCRIPTS}
        for value in values:
            for script in SCRIPTS:
                point = measure(script, **BASE | {sweep: value})
                seen[sweep][script][str(value)] = point
                print(sweep, value, script, {k: round(v, 2) for k, v in point.items()}, flush=True)
    (ROOT / "docs/scaling.json").write_text(json.dumps(seen, indent=1) + "\n")
    draw(seen, ROOT / "docs/scaling.png")


if __name__ == "__main__":
    main()
