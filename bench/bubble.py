"""The bubble of a pipeline: how long its stages wait, by the number of micro-batches in a step.

    torchrun --standalone --nproc-per-node=2 bench/bubble.py

Two stages of four blocks each (width 256, sequences of 512 tokens, and 320 ids, so that the head is
little work for the last stage) run the train step of fsdp2_pp_pretrain.py with k micro-batches, in
turn over k, and the median counts. A slot is the forward and backward of a micro-batch in a stage.
It takes as long as one more micro-batch makes a step longer. What a step takes beyond k slots is
the bubble: S-1 of k+S-1 slots by the formula. (Clipping and AdamW do not grow with k and are left
out.) Writes docs/bubble.json.
"""

import json
import statistics
import tempfile
import time
from typing import Any

import shared
import torch
import torch.distributed as dist
from shared import ROOT, Session

import common
import fsdp2_pp_pretrain as script

COUNTS = [2, 4, 8, 16]  # micro-batches per step
TURNS = 7  # the median counts
TOKENS = 1024  # per micro-batch


def seconds_of_forward_and_backward(session: Session, micro_batches: list[dict[str, Any]]) -> float:
    """Return the seconds of a step, until all ranks have ended it."""
    batch = common.GlobalBatch(micro_batches, 1, 1, 1, 0.0)
    dist.barrier()
    started = time.perf_counter()
    script.forward_backward(session.model, batch, session.config, session.device)
    dist.barrier()
    seconds = time.perf_counter() - started
    session.optimizer.zero_grad()
    return seconds


def measure() -> dict[int, float]:
    """Return the seconds of a step by the number of micro-batches."""
    stages = dist.get_world_size()
    with tempfile.TemporaryDirectory() as folder:
        model_config = shared.qwen2(256, 1024, 4 * stages, 4, 2, 320)
        model_config.save_pretrained(folder)
        config = script.Config(
            model=folder, precision="fp32", max_length=512, pipeline_parallel=stages,
            micro_batch_tokens=TOKENS, global_batch_tokens=TOKENS * stages,
        )  # fmt: skip
        data = type("Data", (), {"model_config": model_config})
        session = Session(script, config, data)
    ids = torch.randint(0, 256, (TOKENS // 512, 512), generator=torch.Generator().manual_seed(0))
    seen: dict[int, list[float]] = {count: [] for count in COUNTS}
    for turn in range(TURNS + 1):
        for count, seconds in seen.items():
            micro_batches = [{"input_ids": ids, "labels": ids} for _ in range(count)]
            took = seconds_of_forward_and_backward(session, micro_batches)
            if turn > 0:  # the first one is a warm-up
                seconds.append(took)
    session.close()
    return {count: statistics.median(seconds) for count, seconds in seen.items()}


def bubble_table() -> str:
    """Return Markdown: time of a step and the bubble by the number of micro-batches."""
    seen = json.loads((ROOT / "docs/bubble.json").read_text())
    steps = {int(count): seconds for count, seconds in seen["steps"].items()}
    few, many = min(steps), max(steps)
    slot = (steps[many] - steps[few]) / (many - few)
    lines = ["| micro-batches | a step | waiting, measured | by the formula |", "| --- " * 4 + "|"]
    for count, seconds in steps.items():
        waiting = 1 - count * slot / seconds
        formula = (seen["stages"] - 1) / (count + seen["stages"] - 1)
        lines.append(f"| {count} | {1000 * seconds:,.0f} ms | {waiting:.0%} | {formula:.0%} |")
    return "\n".join(lines)


def main() -> None:
    shared.read(__doc__)
    script.init_process_group(script.Config())
    result = {"stages": dist.get_world_size(), "steps": measure()}
    if dist.get_rank() == 0:
        (ROOT / "docs/bubble.json").write_text(json.dumps(result, indent=1) + "\n")
        print(bubble_table())
    shared.leave()


if __name__ == "__main__":
    main()
