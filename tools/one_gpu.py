"""Where the memory of one GPU goes, by the dry run: one row for each setting.

    python tools/one_gpu.py
    python tools/one_gpu.py seconds

Qwen2-0.5B's shape with the GPT-2 vocabulary under DDP on one rank, which is the plain case, in
bf16. A step has 16,384 tokens in sequences of 2,048. It is the table of docs/one_gpu.md.

seconds: what recomputation costs the default model on this CPU, for 20 steps of each mode in turns.
"""

import os
import statistics
import time
from typing import Any

import shared
import torch
from dry_run import GIB, report

import ddp_pretrain
import model

VOCABULARY = 50257
STEP = 16384  # tokens
HALF = {"micro_batch_tokens": 8192}
# Setting -> flags, and the tokens whose logits exist at the same time.
SETTINGS: dict[str, tuple[dict[str, Any], int]] = {
    "one micro-batch of 16,384": ({}, 2048),
    "2 micro-batches of 8,192": (HALF, 2048),
    "8,192, all logits at once": (HALF, 8192),
    "8,192, in fp32": (HALF | {"precision": "fp32"}, 2048),
    "half of the blocks recomputed": (HALF | {"activation_checkpointing": "0.5"}, 2048),
    "all but matmuls recomputed": (HALF | {"activation_checkpointing": "selective"}, 2048),
    "every block recomputed": (HALF | {"activation_checkpointing": "full"}, 2048),
}


def row(setting: str) -> str:
    flags, model.CHUNK_TOKENS = SETTINGS[setting]
    flags = {"micro_batch_tokens": STEP, "global_batch_tokens": STEP} | flags
    seen = report("ddp", "qwen2-0.5b", VOCABULARY, 1, **flags)
    state = ("parameters", "gradients", "optimizer state")
    peak = dict(seen.peak)
    cells = [sum(peak.pop(kind, 0) for kind in state), peak.pop("activations", 0)]
    cells += [sum(peak.values()), sum(cells) + sum(peak.values())]
    sizes = " | ".join(f"{size / GIB:.1f}" for size in cells)
    return f"| {setting} | {sizes} | {seen.flops / 1e12:.0f} |"


def print_seconds() -> None:
    """Print the CPU seconds of a step with and without recomputation."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    torch.set_num_threads(1)  # threads that wait for each other would count too
    sessions, streams, data = {}, {}, None
    for mode in ("none", "selective", "full"):
        config = ddp_pretrain.Config(activation_checkpointing=mode)
        sessions[mode] = shared.Session(ddp_pretrain, config, data)
        data = sessions[mode].data
        streams[mode] = sessions[mode].batches(0, 21)
    seconds: dict[str, list[float]] = {mode: [] for mode in sessions}
    for _ in range(21):
        for mode, session in sessions.items():
            batch = next(streams[mode])
            began = time.process_time()
            session.train_step(batch)
            seconds[mode].append(time.process_time() - began)
    print("| CPU seconds of a step | best | median |", "| --- | --- | --- |", sep="\n")
    for mode, found in seconds.items():
        found = found[1:]  # the first one warms up
        print(f"| {mode} | {min(found):.2f} | {statistics.median(found):.2f} |")


def main() -> None:
    reader = shared.parser(__doc__)
    reader.add_argument("what", nargs="?", choices=["memory", "seconds"], default="memory")
    if reader.parse_args().what == "seconds":
        return print_seconds()
    print("| a step of 16,384 tokens | state | activations | other | peak in GiB | TFLOPs |")
    print("| --- | --- | --- | --- | --- | --- |")
    for setting in SETTINGS:
        print(row(setting), flush=True)


if __name__ == "__main__":
    main()
