"""Runs under torchrun: one real step of every strategy under the eyes of bench/dry_run.py.

Writes what rank 0 kept and issued to the JSON file given as its argument.
"""

import dataclasses
import gc
import importlib
import json
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
import dry_run  # noqa: E402
from worker import write_and_leave  # noqa: E402

import ddp_pretrain  # noqa: E402


def really(script, config, vocabulary: int) -> dict:
    """As dry_run.dry_run, with numbers and other ranks."""
    shape = dry_run.shape_of(script, config, vocabulary)
    watch = dry_run.Watch()
    batch = dry_run.batch_of(script, config)
    with watch:
        model, decayed = script.build_model(config, shape, dry_run.CPU)
        first = script.build_optimizer(model, decayed, config)
        for _ in range(2):  # DDP makes new buckets in its second step
            script.train_step(model, first, batch, config, dry_run.CPU, 0.0)
        del first
        gc.collect()
        with torch.profiler.profile() as profiler:
            kept = dry_run.observe(script, config, model, decayed, batch, watch)
    return {
        "kept": kept,
        "calls": [dataclasses.astuple(call) for call in watch.calls],
        "peak": sum(watch.peak.values()),
        "gloo": sum(event.name.startswith("gloo:") for event in profiler.events()),
    }


def main() -> None:
    out, cases = sys.argv[1], json.loads(sys.argv[2])
    ddp_pretrain.init_process_group(ddp_pretrain.Config())
    seen = {}
    for case, (name, flags) in cases.items():
        script = importlib.import_module(name)
        seen[case] = really(script, script.Config(**flags), 320)
        gc.collect()
    write_and_leave(out, seen)


if __name__ == "__main__":
    main()
