"""The scripts against bare loops of their strategies and against the libraries people would pick.

    python -m venv .peers && .peers/bin/pip install -r bench/requirements.txt
    python bench/compare.py [TURNS]

One model, Qwen2's shape with 4 layers of width 256, in fp32 on 2 gloo ranks with one thread each.
Contestants that are compared are alive at the same time, and one after the other trains three steps
while the others stand still: the speed of a shared machine changes within minutes. Three runs of
several such turns each (TURNS: at most so many), there and back without pause; the first three
steps of all are left out. Pretraining: rows of 256 tokens, 8 a rank; the same rows from the same
weights, so that all must show the same losses. Fine-tuning: 2,000 conversations of up to 2,048
bytes, about 8,000 tokens a step; the floor is what matrix products and attention of the blocks take
for the same batches. Where steps are of short rows or of long ones, a run is about an epoch.
Prints tokens per second without padding and the ratio to a reference, both the median of the runs,
and the standard error of the ratios of single turns. Writes them into docs/compare.json, under the
name of this machine's CPU, and draws compare.png.
"""

import json
import math
import os
import re
import select
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import arguments
import numpy as np
import torch
from contestant import TURN
from transformers import Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import common  # noqa: E402
import ddp_pretrain  # noqa: E402
import fsdp2_sft  # noqa: E402

RUNS = 3
FEW, EPOCH = 5, 19  # turns of a run: of steps that are all alike, of about an epoch
PEERS = "python -m venv .peers && .peers/bin/pip install -r bench/requirements.txt"
STRATEGIES = ["ddp", "fsdp1", "fsdp2"]
BEST = "bf16, compiled"
# Groups that take turns: how many a run, and contestant -> what it is compared with.
Groups = list[tuple[int, dict[str, str]]]
PRETRAINING: Groups = [
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
]
FINE_TUNING: Groups = [
    (
        EPOCH,
        {
            name: "trl grouped"
            for name in ("trl default", "trl grouped", "fsdp2_sft bucketed", "floor bucketed")
        },
    ),
    (FEW, {name: "trl packed" for name in ("trl packed", "fsdp2_sft packed")}),
]
FLAGS: dict[str, Any] = {
    "learning_rate": 1e-3, "min_learning_rate": 1e-3, "warmup_steps": 0, "weight_decay": 0,
    "grad_clip": 0, "eval_every": 10**6, "eval_batches": 2, "checkpoint_every": 10**6,
    "resume": "never",
}  # fmt: skip


def words(flags: dict[str, Any]) -> list[str]:
    made = []
    for name, value in flags.items():
        made += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return made


def save_weights(folder: Path) -> None:
    shape = Qwen2Config(
        vocab_size=512, hidden_size=256, intermediate_size=1024, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen2ForCausalLM(shape).save_pretrained(folder / "weights")


def prepare_pretraining(folder: Path, steps: int) -> None:
    """Documents that fill a row each, and the rows in the order of our batch plan."""
    save_weights(folder)
    text = "".join(Path(f).read_text("ascii", "ignore") for f in common.standard_library_files())
    with open(folder / "rows.jsonl", "w") as file:
        for i in range(800):  # 784 to train on, so that all micro-batches are full
            file.write(json.dumps({"text": text[256 * i : 256 * i + 256]}) + "\n")
    flags = {
        "dataset": str(folder / "rows.jsonl"), "tokenizer": "bytes", "bucket_edges": [256],
        "micro_batch_tokens": 2048, "global_batch_tokens": 4096,
    }  # fmt: skip
    config = ddp_pretrain.Config(**flags)
    _, training, _ = common.load_batches(config, torch.device("cpu"))
    rows = []
    for k in range(2 * steps):
        batch = training.collate(training.micro_batch(k))
        rows.append(torch.cat([batch["input_ids"], batch["labels"][:, -1:]], dim=1))
    torch.save(torch.stack(rows).view(steps, 16, 257), folder / "rows.pt")
    flags |= FLAGS | {"init_from": folder / "weights", "steps": steps}
    given = {}
    for name in STRATEGIES:
        given[f"{name}_pretrain"] = words(flags | {"run_dir": folder / name})
        best = {"run_dir": folder / f"{name} best", "precision": "bf16", "compile": True}
        given[f"{name}_pretrain {BEST}"] = words(flags | best)
    settings = {"learning_rate": FLAGS["learning_rate"], "flags": given}
    (folder / "settings.json").write_text(json.dumps(settings))


def prepare_fine_tuning(folder: Path, steps: int) -> None:
    """Conversations, a tokenizer with our template, and those of them that ours trains on."""
    save_weights(folder)
    files = common.standard_library_files()
    rows = [*common.docstring_conversations(files, "")]
    rows = [row for row in rows if sum(len(m["content"].encode()) for m in row["messages"]) < 1950]
    rows = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))[:2000]]
    lines = [json.dumps(row) + "\n" for row in rows]
    (folder / "conversations.jsonl").write_text("".join(lines))
    flags = {"dataset": str(folder / "conversations.jsonl"), "tokenizer": "bytes"}
    config = fsdp2_sft.Config(**flags)
    chat, training, _ = common.load_conversations(
        config, torch.device("cpu"), fsdp2_sft.TEMPLATE, fsdp2_sft.TURN, fsdp2_sft.INSIDE
    )
    chat.to_transformers().save_pretrained(folder / "weights")
    chosen = [lines[i] for i in np.sort(training.pieces.document)]
    (folder / "trained.jsonl").write_text("".join(chosen))
    print(f"{len(chosen)} conversations, {training.pieces.labels.sum():,} tokens to learn")
    flags |= FLAGS | {"init_from": folder / "weights", "steps": steps}
    flags |= {"tokenizer": folder / "weights", "reshard_after_forward": False}
    bucketed = {"bucket_edges": ["auto", 2048], "micro_batch_tokens": 2560}
    bucketed |= {"global_batch_tokens": 4 * 2560}
    given = {
        "fsdp2_sft bucketed": words(flags | bucketed | {"run_dir": folder / "bucketed"}),
        "floor bucketed": words(flags | bucketed | {"run_dir": folder / "floor"}),
        "fsdp2_sft packed": words(flags | {"batching": "packed", "run_dir": folder / "packed"}),
    }
    rows_per_rank = round(8000 / training.pieces.length.mean() / 2)
    settings = {"learning_rate": FLAGS["learning_rate"], "flags": given, "steps": steps}
    learned = int(training.pieces.labels.sum())
    settings |= {"rows_per_rank": rows_per_rank, "learned": learned}
    (folder / "settings.json").write_text(json.dumps(settings))


class Contestant:
    """A launch of contestant.py, which trains the first turn and then waits for the next."""

    def __init__(self, python: str, folder: Path, name: str, ranks: int = 2):
        self.name, self.folder = name, folder / name
        self.folder.mkdir(parents=True)
        self.pipes = {}  # open at both ends: opening waits for nobody
        for pipe in (f"{kind} {rank}" for kind in ("go", "done") for rank in range(ranks)):
            os.mkfifo(self.folder / pipe)
            self.pipes[pipe] = os.open(self.folder / pipe, os.O_RDWR)
        command = [python, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={ranks}", str(ROOT / "bench/contestant.py")]
        command += [str(self.folder / "out.json"), str(folder), name]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        with open(self.folder / "stderr", "w") as errors:
            self.process = subprocess.Popen(
                command, env=environment, stdout=subprocess.DEVNULL, stderr=errors
            )

    def go(self, turns: int = 1) -> None:
        for name, pipe in self.pipes.items():
            if name.startswith("go"):
                os.write(pipe, b"." * turns)

    def wait(self) -> None:
        """Until all ranks have ended their turn."""
        for name, pipe in self.pipes.items():
            while name.startswith("done") and not select.select([pipe], [], [], 1)[0]:
                if self.process.poll() is not None:
                    self.fail()
            if name.startswith("done"):
                os.read(pipe, 1)

    def finish(self) -> dict[str, Any]:
        """Train to the end; what contestant.py notes."""
        self.go(1000)
        if self.process.wait():
            self.fail()
        for pipe in self.pipes.values():
            os.close(pipe)
        return json.loads((self.folder / "out.json").read_text())

    def fail(self) -> None:
        raise SystemExit(f"{self.name}: {(self.folder / 'stderr').read_text()[-8000:]}")


def prove_equal_work(seen: dict[str, dict[str, Any]], settings: dict[str, Any]) -> None:
    """Pretraining: the losses of every step are equal. Fine-tuning: so many tokens are learned."""
    for name, one in seen.items():
        if "learned" in settings:
            equal = one["learned"] == settings["learned"]
        else:
            within = 0.05 if BEST in name else 1e-3  # bf16 rounds to 3 digits
            pairs = zip(one["losses"], seen["bare ddp"]["losses"], strict=True)
            equal = all(abs(a / b - 1) < within for a, b in pairs)
        if not equal:
            raise SystemExit(f"{name} does other work: {one['losses']}, {one.get('learned')}")


def take_turns(group: dict[str, str], turns: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Train with the contestants of a group, a turn each; what each notes."""
    running = []
    for name in group:  # one after the other also at the start
        peer = name.split()[0] in ("trainer", "trl")
        python = str(ROOT / ".peers/bin/python") if peer else sys.executable
        running.append(Contestant(python, folder, name))
        running[-1].wait()
    for _ in range(RUNS * turns):
        running.reverse()  # the machine's drift favours nobody
        for contestant in running:
            contestant.go()
            contestant.wait()
    return {contestant.name: contestant.finish() for contestant in running}


def speeds(one: dict[str, Any], parts: int) -> np.ndarray:
    """Tokens per second of every such part of the steps, without the first turn."""
    tokens, seconds = (
        np.array(one[kind][TURN:]).reshape(parts, -1).sum(axis=1) for kind in ("tokens", "seconds")
    )
    return tokens / seconds


def contest(
    prepare: Callable[[Path, int], None], groups: Groups, most: int
) -> dict[str, dict[str, Any]]:
    """The table of all contestants; at most so many turns a run."""
    seen: dict[str, dict[str, Any]] = {}
    by_run: dict[str, np.ndarray] = {}
    error = {}
    for turns, group in groups:
        turns = min(turns, most)
        with tempfile.TemporaryDirectory() as folder:
            prepare(Path(folder), TURN * (1 + RUNS * turns))
            seen |= take_turns(group, turns, Path(folder))
            settings = json.loads((Path(folder) / "settings.json").read_text())
        print(", ".join(group), "are done", flush=True)
        by_turn = {name: speeds(seen[name], RUNS * turns) for name in group}
        for name, reference in group.items():
            by_run[name] = speeds(seen[name], RUNS)
            ratios = by_turn[name] / by_turn[reference]
            error[name] = statistics.stdev(ratios) / math.sqrt(len(ratios))
    prove_equal_work(seen, settings)
    return {
        name: {
            "tokens_per_second": statistics.median(by_run[name]),
            "reference": reference,
            "ratio": statistics.median(by_run[name] / by_run[reference]),
            "error": error[name],
            "padding": seen[name].get("padding", 0.0),
            "waited": seen[name].get("waited"),
            "peak_gib": seen[name]["peak_gib"],
            "losses": seen[name]["losses"],
            "all": by_run[name].tolist(),
            "learned": seen[name].get("learned"),
        }
        for _, group in groups
        for name, reference in group.items()
    }


def markdown(result: dict[str, Any], work: str) -> str:
    """The table as the README has it, of every machine; from "padding" on that of the last."""
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


def draw(tables: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), dpi=150)
    for axis, work in zip(axes, WORKS):
        names = [*tables[work]][::-1]
        for place, name in enumerate(names):
            row = tables[work][name]
            ours = name.split()[0] not in ("bare", "trainer", "trl", "floor")
            colour = "#1d3557" if ours else "#a8b3c2"
            axis.barh(place, row["tokens_per_second"], color=colour)
            axis.plot(row["all"], [place] * len(row["all"]), "|", color="#f2a65a")  # the runs
        axis.set_yticks(range(len(names)), names, fontsize=8)
        axis.set_title(f"{work}: tokens/s", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)


WORKS: dict[str, tuple[Callable[[Path, int], None], Groups]] = {
    "pretraining": (prepare_pretraining, PRETRAINING),
    "fine-tuning": (prepare_fine_tuning, FINE_TUNING),
}


def main() -> None:
    [most] = arguments.read(__doc__, turns=EPOCH)
    if not (ROOT / ".peers/bin/python").exists():
        raise SystemExit(f"first: {PEERS}")
    cpu = re.search("model name.*: (.*)", Path("/proc/cpuinfo").read_text())
    name = re.sub(r"\([^)]*\)", "", cpu[1]) if cpu else "CPU"  # without (R) and the like
    tables: dict[str, Any] = {"cores": os.cpu_count(), "torch": torch.__version__}
    for work, (prepare, groups) in WORKS.items():
        tables[work] = contest(prepare, groups, most)
        print(markdown({name: tables}, work), flush=True)
    file = ROOT / "docs/compare.json"
    result = json.loads(file.read_text())
    result.pop(name, None)  # the newest is the last
    file.write_text(json.dumps(result | {name: tables}, indent=1) + "\n")
    draw(tables, ROOT / "docs/compare.png")


if __name__ == "__main__":
    main()
