"""Muon beside AdamW: CPU time until a loss, the optimizer's share of a step, bytes that are sent.

    torchrun --standalone --nproc-per-node=2 bench/muon.py [STEPS]

Trains the first run's model on its data in turns, a step of each contestant after the other: Muon
and AdamW (fsdp2_pretrain.py) with their default learning rates, 1e-2 and 3e-3, and AdamW with 5e-3.
Other programs on the machine change CPU time little, and what they change is the same for all.
Writes bench/results/muon.json while it runs, and at the end docs/images/muon.png. `python
bench/muon.py` only draws and prints again.
"""

import functools
import json
import os
import time
from typing import Any

import _tools  # noqa: F401
import collectives
import numpy as np
import shared
import torch
import torch.distributed as dist
from shared import ROOT

import fsdp2_muon_pretrain
import fsdp2_pretrain

FILE = ROOT / "bench/results/muon.json"
RATES = {"Muon, 1e-2": 1e-2, "AdamW, 3e-3": 3e-3, "AdamW, 5e-3": 5e-3}
COLOURS = {"Muon, 1e-2": "#e07a1f", "AdamW, 3e-3": "#1d3557", "AdamW, 5e-3": "#8fb0d3"}
GOAL = 1.50
WINDOW = 20  # steps: the loss of a single one depends on its data


def timed(function: Any, seconds: list[float]) -> Any:
    """Return `function`, which then notes the CPU time of each call."""

    @functools.wraps(function)
    def wrapped(*arguments: Any) -> Any:
        began = time.process_time()
        result = function(*arguments)
        seconds.append(time.process_time() - began)
        return result

    return wrapped


class Contestant:
    """A script's session, with the CPU seconds of its steps."""

    def __init__(self, name: str, steps: int, data: Any):
        script = fsdp2_muon_pretrain if "Muon" in name else fsdp2_pretrain
        config = script.Config(steps=steps, learning_rate=RATES[name], precision="fp32")
        self.session = shared.Session(script, config, data)
        self.stream = self.session.batches(0, steps)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.optimizer_seconds: list[float] = []
        optimizer = self.session.optimizer
        optimizer.step = timed(optimizer.step, self.optimizer_seconds)

    def step(self) -> None:
        train = timed(self.session.train_step, self.seconds)
        self.losses.append(train(next(self.stream), 1 + len(self.losses)))

    def result(self) -> dict[str, Any]:
        """Return losses and CPU seconds over all ranks. A collective."""
        seconds = torch.tensor([self.seconds, self.optimizer_seconds])
        dist.all_reduce(seconds)
        step, optimizer = seconds.tolist()
        return {"losses": self.losses, "seconds": step, "optimizer_seconds": optimizer}


def sent(optimizer: torch.optim.Optimizer) -> float:
    """Return the bytes that this rank sends in a step of an optimizer."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    with collectives.Ledger() as ledger:
        optimizer.step()
    optimizer.zero_grad()
    return sum(call.sent for call in ledger.calls)


def measure_bytes(data: Any) -> dict[str, float]:
    """Return what Muon and torch.optim.Muon, which knows only bf16, send on the same shards."""
    config = fsdp2_muon_pretrain.Config(precision="bf16")
    session = shared.Session(fsdp2_muon_pretrain, config, data)
    matrices = [p for p in session.model.parameters() if p in session.optimizer.layouts]
    peer = torch.optim.Muon(matrices, lr=1e-3, adjust_lr_fn="match_rms_adamw")
    return {"ours": sent(session.optimizer), "torch.optim.Muon": sent(peer)}


def means(losses: list[float]) -> np.ndarray:
    """Return the mean of the last WINDOW losses at each step, of fewer ones in the beginning."""
    sums = np.cumsum([0.0, *losses])
    ends = np.arange(1, len(losses) + 1)
    begins = np.maximum(0, ends - WINDOW)
    return (sums[ends] - sums[begins]) / (ends - begins)


def steps_to_goal(losses: list[float]) -> int | None:
    """Return the number of steps after which the mean loss stays below the goal."""
    above = np.flatnonzero(means(losses) >= GOAL)
    steps = 1 + int(above[-1]) + 1
    return steps if steps <= len(losses) else None


def describe(result: dict[str, Any]) -> str:
    lines = [f"| | steps to {GOAL:.2f} | CPU seconds | last loss | validation | optimizer |"]
    lines.append("| --- " * 6 + "|")
    for name, one in result["runs"].items():
        steps = steps_to_goal(one["losses"])
        seconds = f"{sum(one['seconds'][:steps]):.0f}" if steps else "never"
        share = np.sum(one["optimizer_seconds"]) / np.sum(one["seconds"])
        validation = f"{one['validation']:.4f}" if "validation" in one else ""
        lines.append(
            f"| {name} | {steps or 'never'} | {seconds} | {means(one['losses'])[-1]:.4f} | "
            f"{validation} | {share:.1%} |"
        )
    ours, theirs = result["bytes"].values()
    lines.append(f"bytes of a step: {ours:,.0f}, torch.optim.Muon's {theirs / ours:.1f} times that")
    return "\n".join(lines)


def draw(result: dict[str, Any]) -> None:
    figure, axes = shared.plotting().subplots(figsize=(7, 3.4), dpi=150)
    for name, one in reversed(result["runs"].items()):
        seconds = np.cumsum(one["seconds"])
        axes.plot(seconds, means(one["losses"]), color=COLOURS[name], label=name)
    axes.axhline(GOAL, color="#999999", linewidth=0.8, linestyle=":")
    axes.set_ylim(1.1, 3)
    axes.set_xlabel("CPU seconds of both ranks")
    axes.set_ylabel("training loss (nats per byte)")
    axes.legend(frameon=False)
    shared.finish(figure, ROOT / "docs/images/muon.png")


def train(steps: int) -> None:
    """Train all contestants in turns, and write what they measured."""
    config = fsdp2_pretrain.Config()
    data = shared.load_data(fsdp2_pretrain, config)
    fsdp2_pretrain.init_process_group(config)
    result: dict[str, Any] = {"bytes": measure_bytes(data)}
    contestants = {name: Contestant(name, steps, data) for name in RATES}
    for step in range(1, steps + 1):
        for contestant in contestants.values():
            contestant.step()
        if step % 25 == 0 or step == steps:
            result["runs"] = {name: one.result() for name, one in contestants.items()}
            if dist.get_rank() == 0:
                FILE.write_text(json.dumps(result) + "\n")
                print(f"step {step}\n{describe(result)}", flush=True)
    for name, contestant in contestants.items():
        one = contestant.session
        loss = shared.evaluate(one.script, one.model, data.validation, one.config, one.device)
        result["runs"][name]["validation"] = loss
        one.close()
    if dist.get_rank() == 0:
        FILE.write_text(json.dumps(result) + "\n")
        print(describe(result), flush=True)
        draw(result)
    del contestants, contestant, one
    shared.leave()


def main() -> None:
    [steps] = shared.read(__doc__, steps=550)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # under torchrun
        train(steps)
    result = json.loads(FILE.read_text())
    print(describe(result))
    draw(result)


if __name__ == "__main__":
    main()
