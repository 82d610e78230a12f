"""Run a real step of every strategy, watched as tools/dry_run.py watches it.

See cases.py; a case is [script, flags]. Tells what rank 0 kept and which collectives it issued, and
in pipelines the last rank too.
"""

import dataclasses
import gc
import importlib

import cases  # also adds the root, tools and bench to sys.path
import dry_run
import shared
import torch
import torch.distributed as dist

import common
import ddp_pretrain


def really(script, config, vocabulary: int) -> dict:
    """Do what dry_run.dry_run does, with real tensors and ranks."""
    model_config = shared.architecture(script, config, vocabulary)
    watch = dry_run.Watch()

    def step() -> None:
        dry_run.run_step(script, config, model, optimizer, batch, others)

    with watch:
        model, optimizer = shared.build(script, model_config, config, dry_run.CPU)
        others = dry_run.load_others(script, config, model_config)
        batch = dry_run.batch_of(script, config)
        for _ in range(2 * (script is ddp_pretrain)):  # it builds new buckets in its second step
            step()
        gc.collect()
        with torch.profiler.profile() as profiler:
            kept = dry_run.observe(script, config, model, optimizer, batch, watch, others)
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
    ddp_pretrain.init_process_group(ddp_pretrain.Config(micro_batch_tokens=512))
    gc.freeze()  # collections need not look at what exists now
    common.load_weights = lambda *_: None  # a teacher's initial weights do

    def step(case: str, asked: list) -> dict:
        name, flags = asked
        script = importlib.import_module(name)
        if hasattr(script, "exchange_counts"):
            script.exchange_counts = dry_run.exchange_evenly
        return really(script, script.Config(**flags), 320)

    seen = cases.each(step)
    of_last = [seen]
    dist.broadcast_object_list(of_last, src=dist.get_world_size() - 1)
    seen |= {f"{case} last": what for case, what in of_last[0].items() if "pp" in case}
    cases.leave(seen)


if __name__ == "__main__":
    main()
