"""Commands that a user would run, one at a time: python commands.py first|real

first: README's first command and the chain to GRPO, on the embedded corpora, with default flags.
real: qwen2-0.5b's shape, packed, compiled, 65,536 positions a step, 20 steps, with validation, a
checkpoint (blocking, then in the background) and the export.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import kit

GPU = kit.on_gpu()
RUNS = Path(os.environ.get("KIT_RUNS", "/tmp/kit_runs")) / "commands"


def run(name: str, script: str, flags: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Run a command; returns its directory, and seconds until lines that begin with some words."""
    directory = RUNS / name
    shutil.rmtree(directory, ignore_errors=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    command += [f"{script}.py", "--run_dir", str(directory)]
    for flag, value in flags.items():
        command += [f"--{flag}", str(value)]
    RUNS.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    when: dict[str, float] = {}
    with (RUNS / f"{name}.err").open("w") as err, (RUNS / f"{name}.txt").open("w") as out:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            now = time.monotonic() - began
            out.write(f"{now:7.1f} {line}")
            for key, start in {
                "first step": "step 1/",
                "validated": "step ",
                "saved": "--- ",
                "ended": "next:",
            }.items():
                if line.startswith(start):
                    when[key] = round(now, 1)
    code = process.wait()
    return directory, {"code": code, "seconds": round(time.monotonic() - began, 1), "when": when}


def lines_of(directory: Path) -> list[dict]:
    file = directory / "metrics.jsonl"
    return [json.loads(line) for line in file.open()] if file.exists() else []


def middle(lines: list[dict], key: str, skip: int) -> float | None:
    values = [x[key] for x in lines if x.get(key) is not None and x["step"] > skip]
    return statistics.median(values) if values else None


def first() -> None:
    short = {} if GPU else {"steps": 4, "eval_tokens": 2048, "max_length": 256}
    directory, seen = run("pretrain", "fsdp2_pretrain", short)
    lines = lines_of(directory)
    validation = [x["validation_loss"] for x in lines if "validation_loss" in x]
    speed = middle(lines, "tokens_per_second", 20)
    kit.emit("first", "pretrain", **seen, validation=validation, tokens_per_second=speed)
    tuned, seen = run("sft", "fsdp2_sft", short | {"init_from": directory})
    validation = [x["validation_loss"] for x in lines_of(tuned) if "validation_loss" in x]
    kit.emit("first", "sft", **seen, validation=validation)
    more = (
        {}
        if GPU
        else {"steps": 2, "eval_prompts": 4, "prompts": 4, "answers": 2, "answer_length": 8}
    )
    rewarded, seen = run("grpo", "fsdp2_grpo", more | {"init_from": tuned})
    lines = lines_of(rewarded)
    rewards = {
        x["step"]: round(x["validation_reward"], 4) for x in lines if "validation_reward" in x
    }
    sampling = middle(lines, "sample_seconds", 2)
    step = middle(lines, "step_seconds", 2)
    kit.emit("first", "grpo", **seen, rewards=rewards, sample_seconds=sampling, step_seconds=step)


def real() -> None:
    sizes = {
        "model": kit.INPUTS / "0.5b", "tokenizer": "bytes", "max_length": 2048,
        "micro_batch_tokens": 16384, "global_batch_tokens": 65536, "steps": 20, "compile": True,
    }  # fmt: skip
    if not GPU:
        sizes |= {
            "model": "tiny",
            "micro_batch_tokens": 2048,
            "global_batch_tokens": 2048,
            "steps": 3,
            "compile": False,
        }
    common = sizes | {
        "batching": "packed",
        "eval_every": 1000,
        "eval_tokens": 4096,
        "warmup_steps": 2,
    }
    for name, own in {
        "blocking checkpoint": {"checkpoint_every": 1000},
        "checkpoint in the background": {"checkpoint_every": 8, "async_checkpoint": True},
    }.items():
        with kit.guarded("real", name):
            kit.need(45 if GPU else 5)
            directory, seen = run(name.replace(" ", "_"), "fsdp2_pretrain", common | own)
            lines = [x for x in lines_of(directory) if "loss" in x]
            steps = {x["step"]: round(x["step_seconds"], 3) for x in lines}
            values = {
                key: middle(lines, key, 3)
                for key in ("tokens_per_second", "mfu", "peak_memory_gib", "data_seconds")
            }
            kit.emit("real", name, **seen, **values, step_seconds=steps)
            shutil.rmtree(directory, ignore_errors=True)


{"first": first, "real": real}[sys.argv[1]]()
