"""Run a real step of every strategy, watched as bench/dry_run.py watches it.

For conftest.launch, with two flags: --cases, JSON {case: [script, flags]}, and --out, the JSON file
to write: what rank 0 kept and which collectives it issued, and in pipelines the last rank too.
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
    """Do what dry_run.dry_run does, with real tensors and ranks."""
    model_config = dry_run.model_config_of(script, config, vocabulary)
    watch = dry_run.Watch()

    def step() -> None:
        script.train_step(model, optimizer, batch, 0.0, config, dry_run.CPU)

    with watch:
        model = script.build_model(config, model_config)
        model, optimizer = shared.build(script, config, model, dry_run.CPU)
        batch = dry_run.batch_of(script, config)
        for _ in range(2 * (script is ddp_pretrain)):  # it builds new buckets in its second step
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
    given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    ddp_pretrain.init_process_group(ddp_pretrain.Config(micro_batch_tokens=512))
    gc.freeze()  # collections need not look at what exists now
    seen = {}
    for case, (name, flags) in json.loads(given["--cases"]).items():
        script = importlib.import_module(name)
        if hasattr(script, "exchange_counts"):
            script.exchange_counts = dry_run.exchange_evenly
        seen[case] = really(script, script.Config(**flags), 320)
        gc.collect()
    of_last = [seen]
    dist.broadcast_object_list(of_last, src=dist.get_world_size() - 1)
    seen |= {f"{case} last": what for case, what in of_last[0].items() if "pp" in case}
    if dist.get_rank() == 0:
        Path(given["--out"]).write_text(json.dumps(seen))
    shared.leave()


if __name__ == "__main__":
    main()
