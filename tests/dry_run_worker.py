"""Runs under torchrun: a real step of every strategy under the eyes of bench/dry_run.py.

Writes what rank 0 kept and issued to the JSON file given as its argument, and of a pipeline also
what the last rank did.
"""

import dataclasses
import gc
import importlib
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
import dry_run  # noqa: E402
import shared  # noqa: E402

import ddp_pretrain  # noqa: E402


def really(script, config, vocabulary: int) -> dict:
    """As dry_run.dry_run, with numbers and other ranks."""
    model_config = dry_run.model_config_of(script, config, vocabulary)
    watch = dry_run.Watch()

    def step() -> None:
        script.train_step(model, optimizer, batch, 0.0, config, dry_run.CPU)

    with watch:
        model, optimizer = shared.build(script, config, model_config, dry_run.CPU)
        batch = dry_run.batch_of(script, config)
        for _ in range(2 * (script is ddp_pretrain)):  # it makes new buckets in its second step
            step()
        gc.collect()
        with torch.profiler.profile() as profiler:
            kept = dry_run.observe(script, config, model, optimizer, batch, watch)
    events = profiler.profiler.kineto_results.events()  # torch's own list of them takes seconds
    seen = {
        "kept": kept,
        "calls": [dataclasses.astuple(call) for call in watch.calls],
        "peak": sum(watch.peak.values()),
        "gloo": sum(event.name().startswith("gloo:") for event in events),
    }
    if script is ddp_pretrain:
        places = [p.grad.data_ptr() for p in model.parameters()]
        step()
        seen["stay"] = places == [p.grad.data_ptr() for p in model.parameters()]
        seen["storages"] = len({p.grad.untyped_storage().data_ptr() for p in model.parameters()})
    return seen


def main() -> None:
    out, cases = sys.argv[1], json.loads(sys.argv[2])
    ddp_pretrain.init_process_group(ddp_pretrain.Config())
    gc.freeze()  # what is there now needs no search
    seen = {}
    for case, (name, flags) in cases.items():
        script = importlib.import_module(name)
        if hasattr(script, "exchange_counts"):
            script.exchange_counts = dry_run.exchange_evenly
        seen[case] = really(script, script.Config(**flags), 320)
        gc.collect()
    of_last = [seen]  # once it has come from there
    dist.broadcast_object_list(of_last, src=dist.get_world_size() - 1)
    seen |= {f"{case} last": what for case, what in of_last[0].items() if "pp" in case}
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(seen))
    shared.leave()


if __name__ == "__main__":
    main()
