"""The scripts compared with bare loops of their strategies, and with Trainer and TRL.

    python -m venv .peers && .peers/bin/pip install -r bench/requirements.txt
    python bench/compare.py [--only pretraining|fine-tuning|steps] [--turns N]

One model, Qwen2's shape with 4 layers of width 256, in fp32 on 2 gloo ranks with one thread each,
on Linux.
The speed of a shared machine changes within minutes. So contestants that are compared are alive at
the same time, and take turns of three steps while the others stand still, in alternating order, for
up to N turns. The first turn of each does not count.

pretraining: sequences of 256 tokens, 8 per rank. All train on the same sequences from the same
weights, so their losses have to be equal. fine-tuning: 2,000 conversations of up to 2,048 bytes,
about 8,000 tokens per step, with the script's default flags. Where the lengths of steps differ, the
turns cover a whole epoch. Prints tokens per second without padding, the ratio to a reference, and
the standard error of the ratios of single turns.

steps: script and bare loop in one process, one step each in turn, on the data of pretraining. Two
processes of the same program would differ by a few per cent.

Writes into bench/results/compare.json, under the name of this machine's CPU, and draws
docs/images/compare.png.
"""

import itertools
import json
import math
import os
import re
import select
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import _tools  # noqa: F401
import numpy as np
import shared
import torch
from contestant import TURN
from shared import ROOT, STRATEGIES

import common
import ddp_pretrain
import fsdp2_sft

FEW, MANY = 10, 48  # turns: of steps that are alike; of a whole epoch of short and long steps
PEERS = "python -m venv .peers && .peers/bin/pip install -r bench/requirements.txt"
BEST = "bf16, compiled"
# Groups that take turns: the number of turns, and contestant -> what it is compared with.
GROUPS: dict[str, list[tuple[int, dict[str, str]]]] = {
    "pretraining": [
        (
            FEW,
            {
                f"bare {name}": f"bare {name}",
                f"{name}_pretrain": f"bare {name}",
                **({"trainer ddp": "bare ddp"} if name == "ddp" else {}),
                f"{name}_pretrain {BEST}": f"{name}_pretrain",
            },
        )
        for name in STRATEGIES
    ],
    "fine-tuning": [
        (MANY, {name: "trl grouped" for name in ("trl grouped", "fsdp2_sft bucketed")}),
        (FEW, {name: "trl packed" for name in ("trl default", "trl packed", "fsdp2_sft packed")}),
    ],
}
FLAGS: dict[str, Any] = {
    "learning_rate": 1e-3, "min_learning_rate": 1e-3, "warmup_steps": 0, "weight_decay": 0,
    "grad_clip": 0,
}  # fmt: skip


# --- What they train on ---------------------------------------------------------------------------


def words(flags: dict[str, Any]) -> list[str]:
    return [str(word) for name, value in flags.items() for word in (f"--{name}", value)]


def save_weights(folder: Path) -> None:
    from transformers import Qwen2ForCausalLM

    torch.manual_seed(0)
    Qwen2ForCausalLM(shared.qwen2(256, 1024, 4, 4, 2, 512)).save_pretrained(folder / "weights")


def prepare_pretraining(folder: Path, steps: int) -> dict[str, Any]:
    """Write documents of one full sequence each, and these in the order of our batch plan."""
    text = "".join(Path(f).read_text("ascii", "ignore") for f in common.standard_library_files())
    with open(folder / "rows.jsonl", "w") as file:
        for i in range(800):  # 784 to train on, so all micro-batches are full
            file.write(json.dumps({"text": text[256 * i : 256 * i + 256]}) + "\n")
    flags = {
        "dataset": str(folder / "rows.jsonl"), "tokenizer": "bytes", "max_length": 256,
        "micro_batch_tokens": 2048, "global_batch_tokens": 4096,
    }  # fmt: skip
    training = shared.load_data(ddp_pretrain, ddp_pretrain.Config(**flags)).training
    sequences = [
        torch.cat([micro_batch["input_ids"], micro_batch["labels"][:, -1:]], dim=1)
        for batch in itertools.islice(training.stream(0, 2, 0, 1), steps)
        for micro_batch in batch.micro_batches
    ]
    torch.save(torch.stack(sequences).view(steps, 16, 257), folder / "sequences.pt")
    flags |= FLAGS | {"init_from": folder / "weights", "steps": steps}
    given = {}
    for name in STRATEGIES:
        given[f"{name}_pretrain"] = words(flags | {"run_dir": folder / name})
        best = {"run_dir": folder / f"{name} best", "precision": "bf16", "compile": True}
        best["pad_to_multiple_of"] = 256  # one length
        given[f"{name}_pretrain {BEST}"] = words(flags | best)
    return {"flags": given, "steps": steps}


def prepare_fine_tuning(folder: Path, steps: int) -> dict[str, Any]:
    """Write conversations, a tokenizer with our template, and the conversations we train on."""
    rows = shared.short_conversations(common.standard_library_files(), 1950)
    chosen = np.random.default_rng(0).permutation(len(rows))[:2000]
    lines = [json.dumps({"messages": rows[i]}) + "\n" for i in chosen]
    (folder / "conversations.jsonl").write_text("".join(lines))
    flags = {"dataset": str(folder / "conversations.jsonl")}
    data = shared.load_data(fsdp2_sft, fsdp2_sft.Config(**flags))
    data.tokenizer.save_pretrained(folder / "weights")
    sequences = data.training.sequences
    usable = np.sort(sequences.index.document)  # each conversation is one sequence
    (folder / "trained.jsonl").write_text("".join(lines[i] for i in usable))
    num_targets = int(sequences.num_targets.sum())
    print(f"{len(usable)} conversations, {num_targets:,} target tokens")
    flags |= FLAGS | {"init_from": folder / "weights", "steps": steps}
    given = {
        f"fsdp2_sft {batching}": words(flags | {"batching": batching, "run_dir": folder / batching})
        for batching in ("bucketed", "packed")
    }
    per_rank = round(8000 / sequences.lengths.mean() / 2)
    return {
        "flags": given, "steps": steps, "sequences_per_rank": per_rank, "num_targets": num_targets,
    }  # fmt: skip


def prepare(work: str, folder: Path, steps: int) -> dict[str, Any]:
    """Fill the folder that contestants read; returns their settings."""
    save_weights(folder)
    make = prepare_fine_tuning if work == "fine-tuning" else prepare_pretraining
    settings = make(folder, steps) | {"learning_rate": FLAGS["learning_rate"]}
    (folder / "settings.json").write_text(json.dumps(settings))
    return settings


# --- The contest ----------------------------------------------------------------------------------


ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def torchrun(folder: Path, name: str, python: str) -> list[str]:
    program = ROOT / "bench/contestant.py"
    return shared.torchrun(2, program, folder / name / "out.json", folder, name, python=python)


class Contestant:
    """A launch of contestant.py, which trains the first turn and then waits for the next."""

    def __init__(self, python: str, folder: Path, name: str):
        self.name, self.folder = name, folder / name
        self.folder.mkdir(parents=True)
        self.pipes = {}  # opened at both ends, because opening one end would wait
        for pipe in (f"{kind} {rank}" for kind in ("go", "done") for rank in range(2)):
            os.mkfifo(self.folder / pipe)
            self.pipes[pipe] = os.open(self.folder / pipe, os.O_RDWR)
        command = torchrun(folder, name, python)
        with open(self.folder / "stderr", "w") as errors:
            self.process = subprocess.Popen(
                command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=errors
            )

    def go(self, turns: int = 1) -> None:
        for name, pipe in self.pipes.items():
            if name.startswith("go"):
                os.write(pipe, b"." * turns)

    def wait(self) -> None:
        """Wait until all ranks have ended their turn."""
        for name, pipe in self.pipes.items():
            while name.startswith("done") and not select.select([pipe], [], [], 1)[0]:
                if self.process.poll() is not None:
                    self.fail()
            if name.startswith("done"):
                os.read(pipe, 1)

    def finish(self) -> dict[str, Any]:
        """Let it train to the end; returns what contestant.py noted."""
        self.go(1000)
        if self.process.wait():
            self.fail()
        for pipe in self.pipes.values():
            os.close(pipe)
        return json.loads((self.folder / "out.json").read_text())

    def fail(self) -> None:
        raise SystemExit(f"{self.name}: {(self.folder / 'stderr').read_text()[-8000:]}")


def prove_equal_work(seen: dict[str, dict[str, Any]], settings: dict[str, Any]) -> None:
    """Check that losses are equal, in fine-tuning that the numbers of target tokens are."""
    for name, one in seen.items():
        if "num_targets" in settings:
            equal = one["num_targets"] == settings["num_targets"]
        else:
            within = 0.05 if BEST in name else 1e-3  # bf16 rounds to 3 digits
            pairs = zip(one["losses"], seen["bare ddp"]["losses"], strict=True)
            equal = all(abs(a / b - 1) < within for a, b in pairs)
        if not equal:
            raise SystemExit(f"{name} does other work: {one['losses']}, {one.get('num_targets')}")


def take_turns(group: dict[str, str], turns: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Let the contestants of a group train in turns; returns what each noted."""
    running = []
    for name in group:  # start them one after the other, too
        peer = name.split()[0] in ("trainer", "trl")
        python = str(ROOT / ".peers/bin/python") if peer else sys.executable
        running.append(Contestant(python, folder, name))
        running[-1].wait()
    for _ in range(turns):
        running.reverse()  # so that a drift of the machine favors nobody
        for contestant in running:
            contestant.go()
            contestant.wait()
    return {contestant.name: contestant.finish() for contestant in running}


def speeds(one: dict[str, Any]) -> tuple[float, np.ndarray]:
    """Return tokens per second of all turns but the first, and of each of them."""
    tokens, seconds = (
        np.array(one[kind][TURN:]).reshape(-1, TURN).sum(axis=1) for kind in ("tokens", "seconds")
    )
    return tokens.sum() / seconds.sum(), tokens / seconds


def contest(work: str, most: int) -> dict[str, dict[str, Any]]:
    """Return the table of all contestants, after at most so many turns."""
    seen: dict[str, dict[str, Any]] = {}
    table = {}
    for turns, group in GROUPS[work]:
        turns = min(turns, most)
        with tempfile.TemporaryDirectory() as folder:
            settings = prepare(work, Path(folder), TURN * (1 + turns))
            seen |= take_turns(group, turns, Path(folder))
        print(", ".join(group), "are done", flush=True)
        for name, reference in group.items():
            speed, by_turn = speeds(seen[name])
            reference_speed, reference_by_turn = speeds(seen[reference])
            ratios = by_turn / reference_by_turn
            table[name] = {
                "tokens_per_second": speed,
                "reference": reference,
                "ratio": speed / reference_speed,
                "error": ratios.std() / math.sqrt(len(ratios)),
                "padding": seen[name].get("padding", 0.0),
                "peak_gib": seen[name]["peak_gib"],
                "losses": seen[name]["losses"],
            }
    prove_equal_work(seen, settings)
    return table


def step_by_step(most: int) -> dict[str, dict[str, float]]:
    """Return milliseconds per step of script and bare loop, their ratio and its standard error."""
    seen = {}
    for strategy in STRATEGIES:
        with tempfile.TemporaryDirectory() as own:
            folder, name = Path(own), f"steps {strategy}"
            prepare("steps", folder, TURN * (1 + most))
            (folder / name).mkdir()
            command = torchrun(folder, name, sys.executable)
            done = subprocess.run(command, env=ENVIRONMENT, text=True, capture_output=True)
            if done.returncode:
                raise SystemExit(done.stderr[-8000:])
            took = json.loads((folder / name / "out.json").read_text())
        script, bare = (np.array(took[kind][TURN:]) for kind in ("script", "bare"))
        error = (bare / script).std() / math.sqrt(len(bare))
        seen[strategy] = {"script_ms": 1000 * script.mean(), "bare_ms": 1000 * bare.mean()}
        seen[strategy] |= {"ratio": float(np.median(bare / script)), "error": error}
    return seen


# --- What to say about it -------------------------------------------------------------------------


def markdown(result: dict[str, Any], work: str) -> str:
    """Return the table of all machines that have one; the last one's are from padding on."""
    result = {machine: tables for machine, tables in result.items() if work in tables}
    titles = ["", "against"]
    titles += [f"{machine}: tokens/s | ratio" for machine in result]
    titles += ["padding", "memory of a rank", "losses"]
    head = f"| {' | '.join(titles)} |"
    lines = [head, "|" + " --- |" * (head.count("|") - 1)]
    *_, last = result.values()
    for name, row in last[work].items():
        cells = [name, row["reference"]]
        for each in (tables[work][name] for tables in result.values()):
            error = f" ± {each['error']:.2f}" if each["error"] else ""
            cells += [f"{each['tokens_per_second']:,.0f}", f"{each['ratio']:.2f}{error}"]
        cells += [f"{100 * row['padding']:.1f} %", f"{row['peak_gib']:.2f} GiB"]
        losses = row["losses"] or [math.nan]
        cells += ["" if math.isnan(losses[0]) else f"{losses[0]:.4f} ... {losses[-1]:.4f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def steps_table(result: dict[str, Any]) -> str:
    """Return the table of script and bare loop in one process, of all machines measured."""
    lines = ["| | machine | script | bare loop | ratio of speeds |", "| --- " * 5 + "|"]
    for machine, tables in result.items():
        for strategy, row in tables.get("steps", {}).items():
            cells = [f"{strategy}_pretrain", machine]
            cells += [f"{row['script_ms']:.0f} ms", f"{row['bare_ms']:.0f} ms"]
            lines.append(f"| {' | '.join(cells)} | {row['ratio']:.3f} ± {row['error']:.3f} |")
    return "\n".join(lines)


def draw(tables: dict[str, Any], path: Path) -> None:
    figure, axes = shared.plotting().subplots(1, 2, figsize=(10, 3.6), dpi=150)
    for axis, work in zip(axes, GROUPS):
        names = [*tables[work]][::-1]
        for place, name in enumerate(names):
            row = tables[work][name]
            ours = name.split()[0] not in ("bare", "trainer", "trl")
            colour = "#1d3557" if ours else "#a8b3c2"
            axis.barh(place, row["tokens_per_second"], color=colour)
        axis.set_yticks(range(len(names)), names, fontsize=8)
        axis.set_title(f"{work}: tokens/s", fontsize=9)
    shared.finish(figure, path)


def main() -> None:
    reader = shared.parser(__doc__)
    works = [*GROUPS, "steps"]
    reader.add_argument("--only", choices=works, help="not all three")
    reader.add_argument("--turns", type=shared.positive, default=MANY, help="at most")
    given = reader.parse_args()
    chosen = [given.only] if given.only else works
    if chosen != ["steps"] and not (ROOT / ".peers/bin/python").exists():
        raise SystemExit(f"first: {PEERS}")
    cpu = re.search("model name.*: (.*)", Path("/proc/cpuinfo").read_text())
    name = re.sub(r"\([^)]*\)", "", cpu[1]) if cpu else "CPU"  # without (R) and the like
    file = ROOT / "bench/results/compare.json"
    result = json.loads(file.read_text())
    tables = result.pop(name, {}) | {"cores": os.cpu_count(), "torch": torch.__version__}
    result[name] = tables  # the newest is the last
    for work in chosen:
        tables[work] = step_by_step(given.turns) if work == "steps" else contest(work, given.turns)
        one = {name: tables}
        print(steps_table(one) if work == "steps" else markdown(one, work), flush=True)
        file.write_text(json.dumps(result, indent=1) + "\n")
    if tables.keys() >= GROUPS.keys():
        draw(tables, ROOT / "docs/images/compare.png")


if __name__ == "__main__":
    main()
