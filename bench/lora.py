"""LoRA beside full fine-tuning: memory and communication by the dry run, and CPU time of a step.

    python bench/lora.py                                              memory (15 minutes)
    torchrun --standalone --nproc-per-node=2 bench/lora.py [ROUNDS]   CPU time

Memory: Llama 3's 8B and 70B shapes on 1 to 8 GPUs, one micro-batch of 4,096 tokens in one sequence
per rank and step, full activation checkpointing, bf16, adapters of rank 16 on all linear layers.

CPU time: fsdp2_sft.py and fsdp2_lora.py train the same shape, with random weights, on the same
batches in fp32, a step of each after the other. Seconds are user and system time of both ranks.

Each writes its part of bench/results/lora.json.
"""

import contextlib
import importlib
import io
import itertools
import json
import os
import statistics
import tempfile
import time
from typing import Any

import _tools  # noqa: F401
import shared
from meshes import VOCABULARY, save_shapes
from shared import ROOT

FILE = ROOT / "bench/results/lora.json"
LENGTH = 4096
RANKS = (1, 2, 4, 8)
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("fsdp2_sft", {}),
    "LoRA, bf16": ("fsdp2_lora", {"base_precision": "bf16"}),
    "LoRA, NF4": ("fsdp2_lora", {"base_precision": "nf4"}),
}


# --- Memory ---------------------------------------------------------------------------------------


def predict(way: str, path: str, ranks: int) -> dict[str, float]:
    """Return GiB of a rank at rest and at the peak, and the GB that it sends."""
    import dry_run

    dry_run.be_rank(0, ranks, 8)
    name, own = WAYS[way]
    script = importlib.import_module(name)
    config = script.Config(
        model=path, precision="bf16", activation_checkpointing="full", max_length=LENGTH,
        micro_batch_tokens=LENGTH, global_batch_tokens=LENGTH * ranks, **own,
    )  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):  # the script prints what it adapts
        report = dry_run.dry_run(script, config, VOCABULARY)
    rest = report.parameters + report.gradients + report.optimizer
    sizes = {"rest": rest / dry_run.GIB, "peak": report.on_device / dry_run.GIB}
    return sizes | {"sent": report.sent / 1e9}


def predict_all() -> list[dict[str, Any]]:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        save_shapes(folder)
        for name, ranks, way in itertools.product(("8B", "70B"), RANKS, WAYS):
            sizes = predict(way, f"{folder}/{name}", ranks)
            found.append({"model": name, "ranks": ranks, "way": way} | sizes)
            print(found[-1], flush=True)
    return found


def lora_table() -> str:
    """Return Markdown: by model and GPUs, GiB at the peak and at rest, and GB sent, of each way.

    Below it are the CPU seconds of a step.
    """
    titles = "".join(f" {way}: peak, at rest | sent |" for way in WAYS)
    lines = [f"| model | GPUs |{titles}", "| --- " * (2 + 2 * len(WAYS)) + "|"]
    result = json.loads(FILE.read_text())
    found = result["memory"]
    for model, ranks in dict.fromkeys((one["model"], one["ranks"]) for one in found):
        line = f"| {model} | {ranks} |"
        for one in found:
            if (one["model"], one["ranks"]) == (model, ranks):
                line += f" {one['peak']:,.1f}, {one['rest']:,.1f} GiB | {one['sent']:.1f} GB |"
        lines.append(line)
    return "\n".join([*lines, "", *seconds_table(result["seconds"])])


def seconds_table(seconds: dict[str, list[float]]) -> list[str]:
    """Return lines of Markdown: CPU seconds of a step of each way, best and median."""
    best = {way: (min(each), statistics.median(each)) for way, each in seconds.items()}
    cells = []
    for way, (least, median) in best.items():
        ratios = f"{least / best['full'][0]:.2f}, {median / best['full'][1]:.2f}"
        cells.append(f"{least:.2f}, {median:.2f} s" + f": {ratios}" * (way != "full"))
    return [
        f"| CPU time of a step | {' | '.join(seconds)} |",
        "| --- " * (1 + len(seconds)) + "|",
        f"| best, median: ratios | {' | '.join(cells)} |",
    ]


def note(part: str, value: Any) -> None:
    """Write a part of the file, and keep the other."""
    result = json.loads(FILE.read_text())
    FILE.write_text(json.dumps(result | {part: value}, indent=1) + "\n")


# --- CPU time -------------------------------------------------------------------------------------


def measure(rounds: int) -> None:
    import torch
    import torch.distributed as dist

    import fsdp2_lora
    import fsdp2_sft

    flags: dict[str, Any] = {"precision": "fp32", "steps": rounds + 1, "max_length": 512}
    flags |= {"micro_batch_tokens": 1024, "global_batch_tokens": 4096}
    data = shared.load_data(fsdp2_lora, fsdp2_lora.Config(**flags))
    wide = shared.qwen2(512, 1536, 4, 8, 4, data.model_config.vocab_size)
    data.model_config = wide
    ways = {
        "full": fsdp2_sft.Config(**flags),
        "LoRA, fp32": fsdp2_lora.Config(base_precision="fp32", **flags),
        "LoRA, bf16": fsdp2_lora.Config(base_precision="bf16", **flags),
        "LoRA, NF4": fsdp2_lora.Config(base_precision="nf4", **flags),
    }
    sessions = {}
    for way, config in ways.items():
        script = fsdp2_sft if way == "full" else fsdp2_lora
        sessions[way] = shared.Session(script, config, data)
    streams = {way: session.batches(0, rounds + 1) for way, session in sessions.items()}
    seconds = torch.zeros(rounds + 1, len(ways))
    for i in range(rounds + 1):  # the first one warms up
        for j, (way, session) in enumerate(sessions.items()):
            batch = next(streams[way])
            dist.barrier()
            began = time.process_time()
            session.train_step(batch)
            seconds[i, j] = time.process_time() - began
    dist.all_reduce(seconds)
    if dist.get_rank() == 0:
        numbers = sum(p.numel() for p in sessions["full"].full.parameters())
        print(f"{numbers:,} parameters, {rounds} steps of 4,096 positions on 2 ranks")
        note("seconds", dict(zip(ways, seconds[1:].T.tolist())))
        print("\n".join(seconds_table(json.loads(FILE.read_text())["seconds"])), flush=True)
    del sessions, streams, session
    shared.leave()


def main() -> None:
    [rounds] = shared.read(__doc__, rounds=5)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # under torchrun
        measure(rounds)
    note("memory", predict_all())
    print(lora_table())


if __name__ == "__main__":
    main()
