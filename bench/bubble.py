"""The bubble of a pipeline: how long its stages wait, by schedule and number of micro-batches.

    torchrun --standalone --nproc-per-node=2 bench/bubble.py

Two ranks with four blocks each (width 256, sequences of 512 tokens, and 320 ids, so that the head
is little work for the last stage) run the train step of fsdp2_pp_pretrain.py with k micro-batches,
in turn over schedules and k, and the median counts. A slot is the forward and backward of a
micro-batch in a rank. It takes as long as one more micro-batch makes a step of 1F1B longer. What a
step takes beyond k slots is the bubble. The formulas assume that forward, the gradients of inputs
and the gradients of weights take equally long. (Clipping and AdamW do not grow with k and are left
out.)

Writes bench/results/bubble.json, and draws one step of each schedule as it ran,
docs/images/schedules.png.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import _tools  # noqa: F401
import shared
import torch
import torch.distributed as dist
from shared import ROOT, Session
from torch import nn

import common
import fsdp2_pp_pretrain as script

COUNTS = [2, 4, 8]  # micro-batches per step
DRAWN = 6  # of the picture
TURNS = 3  # the median counts
TOKENS = 1024  # per micro-batch
COLORS = {"forward": "#1d3557", "backward": "#e07a5f", "weights": "#f2cc8f"}
ACTIONS = {  # methods of PipelineStage
    "forward_one_chunk": "forward",
    "backward_one_chunk": "backward",
    "backward_weight_one_chunk": "weights",
}


def batch_of(count: int) -> common.GlobalBatch:
    ids = torch.randint(0, 256, (TOKENS // 512, 512), generator=torch.Generator().manual_seed(0))
    return common.GlobalBatch([{"input_ids": ids, "labels": ids}] * count, 1, 1, 1, 0.0)


def seconds_of_step(session: Session, count: int) -> float:
    """Return the seconds of forward and backward, until all ranks have ended them."""
    total_norm, ended = nn.utils.get_total_norm, []

    def end(*arguments: Any) -> torch.Tensor:
        """Is called in a train step once backward has ended."""
        dist.barrier()
        ended.append(time.perf_counter())
        return total_norm(*arguments)

    nn.utils.get_total_norm = end
    batch = batch_of(count)
    dist.barrier()
    started = time.perf_counter()
    session.train_step(batch)
    nn.utils.get_total_norm = total_norm
    return ended[0] - started


def open_session(schedule: str, folder: str) -> Session:
    stages = dist.get_world_size()
    model_config = shared.qwen2(256, 1024, 4 * stages, 4, 2, 320)
    model_config.save_pretrained(folder)
    config = script.Config(
        model=folder, precision="fp32", max_length=512, pipeline_parallel=stages,
        micro_batch_tokens=TOKENS, global_batch_tokens=TOKENS * stages, schedule=schedule,
    )  # fmt: skip
    return Session(script, config, type("Data", (), {"model_config": model_config}))


def record(session: Session) -> list[tuple[str, int, float, float]]:
    """Return what this rank did in a step: kind, stage, and when it began and ended."""
    seen = []

    def timed(run: Callable, kind: str, stage: int) -> Callable:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = run(*args, **kwargs)
            seen.append((kind, stage, started, time.perf_counter()))
            return result

        return wrapped

    for stage in session.model.stages:
        for name, kind in ACTIONS.items():
            setattr(stage, name, timed(getattr(stage, name), kind, stage.stage_index))
    seconds_of_step(session, DRAWN)
    for stage in session.model.stages:
        for name in ACTIONS:
            delattr(stage, name)
    return seen


def measure() -> tuple[dict[str, dict[int, float]], dict[str, list]]:
    """Return the seconds of a step by schedule and number of micro-batches, and what ranks did."""
    seconds: dict[str, dict[int, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        sessions = {name: open_session(name, folder) for name in script.SCHEDULES}
    for turn in range(TURNS + 1):
        for name, session in sessions.items():
            for count in COUNTS:
                took = seconds_of_step(session, count)
                if turn > 0:  # the first one is a warm-up
                    seconds.setdefault(name, {}).setdefault(count, []).append(took)
    traces = {name: common.gather(record(session)) for name, session in sessions.items()}
    medians = {
        name: {count: statistics.median(all_of) for count, all_of in steps.items()}
        for name, steps in seconds.items()
    }
    for session in sessions.values():
        session.close()
    return medians, traces


def formula(schedule: str, count: int, stages: int) -> float:
    """Return the bubble as a fraction of a step."""
    waiting = {"interleaved": 1 / 2, "zero_bubble": 1 / 3}.get(schedule, 1) * (stages - 1)
    return waiting / (count + waiting)


def bubble_table() -> str:
    """Return Markdown: the time that a rank waits, measured and by the formula."""
    seen = json.loads((ROOT / "bench/results/bubble.json").read_text())
    steps = {int(count): seconds for count, seconds in seen["steps"]["1f1b"].items()}
    few, many = min(steps), max(steps)
    slot = (steps[many] - steps[few]) / (many - few)
    lines = [f"| micro-batches | {' | '.join(seen['steps'])} |"]
    lines.append("| --- " * (1 + len(seen["steps"])) + "|")
    for count in steps:
        cells = [str(count)]
        for schedule, of_schedule in seen["steps"].items():
            waiting = 1 - count * slot / of_schedule[str(count)]
            cells.append(f"{waiting:.0%} ({formula(schedule, count, seen['stages']):.0%})")
        lines.append(f"| {' | '.join(cells)} |")
    # A step takes k times as long as one micro-batch more, and the rest is what ranks wait.
    more = {name: (s[str(many)] - s[str(few)]) / (many - few) for name, s in seen["steps"].items()}
    rest = {name: s[str(few)] - few * more[name] for name, s in seen["steps"].items()}
    for title, times in (("one micro-batch more", more), ("the rest of a step", rest)):
        lines.append(f"| {title} | {' | '.join(f'{1000 * t:.0f} ms' for t in times.values())} |")
    return "\n".join(lines)


def draw(traces: dict[str, list]) -> None:
    """Draw a row for each rank, with boxes where it computes."""
    plots = shared.plotting()
    figure, axes = plots.subplots(len(traces), 1, figsize=(10, 1.25 * len(traces)), dpi=150)
    longest = 0.0
    for axis, (name, ranks) in zip(axes, traces.items()):
        first = min(action[2] for actions in ranks for action in actions)
        for rank, actions in enumerate(ranks):
            for kind, stage, started, ended in actions:
                shade = 0.6 if stage >= len(ranks) else 1.0  # the second stage of a rank
                axis.broken_barh(
                    [(1000 * (started - first), 1000 * (ended - started))], (-rank - 0.4, 0.8),
                    facecolors=COLORS[kind], alpha=shade, edgecolor="white", linewidth=0.5,
                )  # fmt: skip
                longest = max(longest, 1000 * (ended - first))
        axis.set_yticks(
            [-rank for rank in range(len(ranks))], [f"rank {r}" for r in range(len(ranks))]
        )
        axis.set_title(name, fontsize=9, loc="left")
        axis.tick_params(labelsize=8)
    for axis in axes:
        axis.set_xlim(0, longest)
        axis.spines[["top", "right", "left"]].set_visible(False)
    axes[-1].set_xlabel("ms", fontsize=8)
    patches = [plots.Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
    labels = ["forward", "backward (zero_bubble: of inputs)", "backward of weights"]
    figure.legend(patches, labels, ncols=3, fontsize=8, loc="upper right", frameon=False)
    shared.finish(figure, ROOT / "docs/images/schedules.png")


def main() -> None:
    shared.read(__doc__)
    script.init_process_group(script.Config())
    steps, traces = measure()
    if dist.get_rank() == 0:
        result = {"stages": dist.get_world_size(), "steps": steps}
        (ROOT / "bench/results/bubble.json").write_text(json.dumps(result, indent=1) + "\n")
        draw(traces)
        print(bubble_table())
    shared.leave()


if __name__ == "__main__":
    main()
