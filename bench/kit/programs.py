"""Run the scripts as a user would, many at a time, and compare logs: python programs.py [WORD ...]

Every program trains a tiny model from the weights of inputs.py, so CPU (fp32) and GPU (bf16, TF32)
start from the same numbers. A line for each run says how far its losses are from the CPU's. More
lines say whether two equal runs are equal, whether a resumed run goes on as the one without a stop,
whether DDP, FSDP1 and FSDP2 agree, and what the scripts printed to stderr. Timings mean nothing
here, because the runs share the card.

With WORDs, only runs whose name contains one of them (and those that they need). With --check it
only parses the flags of all runs, which needs no GPU.
"""

import collections
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import kit
from kit import INPUTS, OUT, emit

GPU = kit.on_gpu()
RUNS = Path(os.environ.get("KIT_RUNS", "/tmp/kit_runs"))
LOGS = RUNS / "logs"
JOBS = int(os.environ.get("KIT_JOBS", "14" if GPU else "1"))
CORES = sorted(os.sched_getaffinity(0))
ONE_RUN = float(os.environ.get("KIT_ONE_RUN", "150"))  # seconds
STEPS = 5
SIZES = {"max_length": 512, "micro_batch_tokens": 2048, "global_batch_tokens": 8192}
COMMON = SIZES | {
    "steps": STEPS, "eval_every": STEPS, "eval_tokens": 4096, "warmup_steps": 1,
    "checkpoint_every": 1000, "tokenizer": "bytes", "dataset": INPUTS / "documents.jsonl",
    "learning_rate": 1e-3, "min_learning_rate": 1e-4,
}  # fmt: skip
if not GPU:
    COMMON |= {"micro_batch_tokens": 1024, "global_batch_tokens": 2048, "eval_tokens": 2048}
SHARING = {
    "fsdp2_tp": {"tensor_parallel": 1}, "fsdp2_cp": {"context_parallel": 1},
    "fsdp2_pp": {"pipeline_parallel": 1}, "fsdp2_ep": {"expert_parallel": 1},
}  # fmt: skip
PRETRAINING = ["ddp", "fsdp1", "fsdp2", *SHARING, "fsdp2_nd"]
BATCHES = {
    "bucketed": {"batching": "bucketed"},
    "padded": {"batching": "bucketed", "pad_to_multiple_of": 64},
    "packed": {"batching": "packed"},
}


class Job:
    """One run of a script.

    Args:
        like: the name of the run whose losses it should have, and how far they may be.
        after: the name of a run that must have ended.
        cpu: hide the GPU.
        ranks: with 2, both use the same GPU, and gloo in the place of NCCL, which refuses that.
    """

    def __init__(
        self, name: str, script: str, flags: dict, like: str = "", within: float = 0.02,
        after: str = "", cpu: bool = False, variables: dict | None = None, ranks: int = 1,
    ):  # fmt: skip
        self.name, self.script, self.flags = name, script, flags
        self.like, self.within, self.after, self.cpu = like, within, after, cpu
        self.variables, self.ranks = variables or {}, ranks
        self.directory = RUNS / re.sub(r"\W+", "_", name)
        self.code: int | str = "not run"
        self.seconds = 0.0
        self.stderr = ""

    def command(self) -> list[str]:
        words = [sys.executable, f"{self.script}.py", "--run_dir", self.directory]
        for flag, value in self.flags.items():
            words += [f"--{flag}", value]
        return [str(word) for word in words]

    def run(self, cores: list[int]) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
        LOGS.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        environment |= self.variables
        if self.cpu:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        if self.ranks > 1:
            # As if each rank were on a machine of its own, with the same GPU.
            with socket.socket() as free:
                free.bind(("localhost", 0))
                environment |= {"MASTER_PORT": str(free.getsockname()[1])}
            environment |= {"MASTER_ADDR": "localhost", "WORLD_SIZE": str(self.ranks)}
            environment |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "KIT_SHARE_GPU": "1"}
        began = time.monotonic()
        file = LOGS / f"{self.directory.name}.txt"
        started = []
        with file.open("w+") as out, file.with_suffix(".err").open("w+") as err:
            out.write(f"$ {' '.join(self.command())}\n")
            out.flush()
            for rank in range(self.ranks):
                own = environment | ({"RANK": str(rank)} if self.ranks > 1 else {})
                # As many cores as are this run's share: it would use all of them for its sample.
                process = subprocess.Popen(
                    self.command(), env=own, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                    preexec_fn=lambda: os.sched_setaffinity(0, cores),
                )  # fmt: skip
                started.append(process)
            while time.monotonic() - began < ONE_RUN and kit.left() > 15:
                codes = [process.poll() for process in started]
                if None not in codes or any(codes):
                    break
                time.sleep(0.05)
            for process in started:  # of a run that hangs, or whose other rank has failed
                if process.poll() is None:
                    process.kill()
                    codes = [*codes, "killed"] if not any(codes) else codes
                process.wait()
            self.code = next((code for code in codes if code), 0)
            err.seek(0)
            self.stderr = err.read()
        self.seconds = time.monotonic() - began

    def lines(self) -> list[dict]:
        file = self.directory / "metrics.jsonl"
        return [json.loads(line) for line in file.open()] if file.exists() else []

    def values(self, key: str) -> dict[int, float]:
        return {line["step"]: line[key] for line in self.lines() if key in line}


def worst(one: dict[int, float], other: dict[int, float]) -> float | None:
    """Return the largest relative distance over common steps, None if there are none."""
    both = one.keys() & other.keys()
    return max((abs(one[step] / other[step] - 1) for step in both), default=None)


def jobs() -> list[Job]:
    made: list[Job] = []

    def add(name: str, script: str, flags: dict, **more: Any) -> None:
        made.append(Job(name, script, flags, **more))

    dense, moe = {"init_from": INPUTS / "dense"}, {"init_from": INPUTS / "moe"}
    chat = COMMON | dense | {"dataset": INPUTS / "conversations.jsonl"}
    # The CPU in fp32, which all others are compared with
    for batches, flags in BATCHES.items():
        add(f"cpu dense {batches}", "fsdp2_pretrain", COMMON | dense | flags, cpu=True)
        add(
            f"cpu moe {batches}",
            "fsdp2_ep_pretrain",
            COMMON | moe | SHARING["fsdp2_ep"] | flags,
            cpu=True,
        )
        add(f"cpu sft {batches}", "fsdp2_sft", chat | flags, cpu=True)
    # Every script, bucketed and packed, compiled and not
    for script in PRETRAINING:
        kind, weights = ("moe", moe) if script == "fsdp2_ep" else ("dense", dense)
        own = COMMON | weights | SHARING.get(script, {})
        name = f"{script}_pretrain"
        for batches in ("bucketed", "packed"):
            add(f"{script} {batches}", name, own | BATCHES[batches], like=f"cpu {kind} {batches}")
        for batches in ("padded", "packed"):
            add(
                f"{script} {batches} compiled", name, own | BATCHES[batches] | {"compile": True},
                like=f"cpu {kind} {batches}",
            )  # fmt: skip
    for batches in ("bucketed", "packed"):
        add(f"sft {batches}", "fsdp2_sft", chat | BATCHES[batches], like=f"cpu sft {batches}")
    for batches in ("padded", "packed"):
        flags = chat | BATCHES[batches] | {"compile": True}
        add(f"sft {batches} compiled", "fsdp2_sft", flags, like=f"cpu sft {batches}")
    # Modes
    plain, like = COMMON | dense, {"like": "cpu dense bucketed"}
    packed, like_packed = plain | BATCHES["packed"], {"like": "cpu dense packed"}
    modes: list[tuple[str, str, dict, dict]] = [
        ("fsdp2 fp32", "fsdp2", plain | {"precision": "fp32"}, like | {"within": 3e-3}),
        (
            "fsdp2 packed fp32", "fsdp2", packed | {"precision": "fp32"},
            like_packed | {"within": 3e-3},
        ),
        ("ddp fp32", "ddp", plain | {"precision": "fp32"}, like | {"within": 3e-3}),
        ("fsdp2 full", "fsdp2", plain | {"activation_checkpointing": "full"}, like),
        (
            "fsdp2 packed selective compiled", "fsdp2",
            packed | {"activation_checkpointing": "selective", "compile": True}, like_packed,
        ),
        ("fsdp2 offload", "fsdp2", plain | {"cpu_offload": True}, like),
        ("ddp zero1", "ddp", plain | {"shard_optimizer": True}, like),
        ("fsdp1 shard_grad_op", "fsdp1", plain | {"sharding_strategy": "shard_grad_op"}, like),
        (
            "fsdp2_cp ring", "fsdp2_cp",
            plain | {"context_parallel": 1, "context_attention": "ring"}, like,
        ),
        ("fsdp2_pp gpipe", "fsdp2_pp", plain | {"pipeline_parallel": 1, "schedule": "gpipe"}, like),
    ]  # fmt: skip
    for name, script, flags, more in modes:
        add(name, f"{script}_pretrain", flags, **more)
    float8 = packed | {"precision": "float8", "compile": True}
    add(
        "fsdp2 float8 packed compiled", "fsdp2_pretrain", float8, like="cpu dense packed",
        variables={"PYTHONPATH": f"{os.environ['PYTHONPATH']}:{os.environ.get('KIT_AO', '')}"},
    )  # fmt: skip
    # Twice the same, and once more from the middle
    long = plain | {"steps": 8, "eval_every": 4, "checkpoint_every": 4, "keep_checkpoints": 3}
    exact = {
        "ddp": ("ddp", {}), "fsdp1": ("fsdp1", {}), "fsdp2": ("fsdp2", {}),
        "packed": ("fsdp2", BATCHES["packed"]),
        "compiled": ("fsdp2", BATCHES["padded"] | {"compile": True}),
        "async": ("fsdp2", {"async_checkpoint": True}),
    }  # fmt: skip
    deterministic = {"KIT_DETERMINISTIC": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    for name, (script, flags) in exact.items():
        script = f"{script}_pretrain"
        add(f"exact {name} once", script, long | flags)
        if name != "async":
            add(f"exact {name} again", script, long | flags)
        middle = RUNS / f"exact_{name}_once/checkpoints/step_00000004"
        add(
            f"exact {name} resumed",
            script,
            long | flags | {"resume": middle},
            after=f"exact {name} once",
        )
    for name in ("fsdp2", "packed"):
        script, flags = exact[name]
        for time_ in ("once", "again"):
            add(
                f"exact {name} deterministic {time_}", f"{script}_pretrain", long | flags,
                variables=deterministic,
            )  # fmt: skip
    middle = RUNS / "exact_ddp_once/checkpoints/step_00000004"
    flags = long | {"resume": middle}
    add("exact fsdp2 from ddp", "fsdp2_pretrain", flags, after="exact ddp once")
    # Two ranks on one GPU. (No pipeline: gloo sends and receives CPU tensors only.)
    two: list[tuple[str, str, dict]] = [
        ("ddp", "ddp", {}), ("fsdp1", "fsdp1", {}), ("fsdp2", "fsdp2", {}),
        ("fsdp2 replicas", "fsdp2", {"dp_replicate": 2}),
        ("tp", "fsdp2_tp", {}), ("cp", "fsdp2_cp", {}),
        ("cp ring", "fsdp2_cp", {"context_attention": "ring"}),
        ("nd tp", "fsdp2_nd", {"tensor_parallel": 2}),
    ]  # fmt: skip
    for name, script, flags in two:
        name = f"two ranks {name}"
        # torch 2.11's TP needs lengths that 2 divides; ring attention has no packed batches.
        for batches in ("padded" if "tp" in name else "bucketed", "packed"):
            if "ring" in name and batches == "packed":
                continue
            own = plain | BATCHES[batches] | flags
            like_cpu = f"cpu dense {batches}"
            add(f"{name} {batches}", f"{script}_pretrain", own, like=like_cpu, ranks=2)
    for batches in ("bucketed", "packed"):
        own = COMMON | moe | BATCHES[batches]
        name = f"two ranks ep {batches}"
        add(name, "fsdp2_ep_pretrain", own, like=f"cpu moe {batches}", ranks=2)
    # Sampling: from the model that `sft bucketed` has made
    answers = {
        "init_from": RUNS / "sft_bucketed", "dataset": INPUTS / "conversations.jsonl", "steps": 3,
        "prompts": 8, "answers": 4, "answer_length": 32, "eval_prompts": 8, "eval_every": 3,
    }  # fmt: skip
    for batches in BATCHES:
        compiled = {"compile": True} if batches == "padded" else {}
        flags = answers | BATCHES[batches] | compiled
        add(f"grpo {batches}", "fsdp2_grpo", flags, after="sft bucketed")
    flags = answers | {"reference_weight": 0.1, "inner_steps": 2}
    add("grpo reference", "fsdp2_grpo", flags, after="sft bucketed")
    return made


def chosen(words: list[str]) -> dict[str, Job]:
    """Return the jobs to run by name, with those that they need."""
    every = {job.name: job for job in jobs()}
    wanted = {name for name in every if not words or any(word in name for word in words)}
    for _ in range(3):
        wanted |= {getattr(every[name], of) for name in wanted for of in ("like", "after")} - {""}
    return {name: job for name, job in every.items() if name in wanted}


def run_all(every: dict[str, Job]) -> None:
    """Run as many at a time as there are slots, each slot with its own cores."""
    share = max(1, len(CORES) // JOBS)
    slots = [CORES[i * share : (i + 1) * share] or CORES for i in range(JOBS)]
    waiting = list(every.values())
    ended: set[str] = set()
    running: dict[Any, tuple[Job, list[int]]] = {}
    with ThreadPoolExecutor(JOBS) as pool:
        while waiting or running:
            ready = [job for job in waiting if not job.after or job.after in ended]
            while slots and ready and kit.left() > 25:
                job, cores = ready.pop(0), slots.pop(0)
                waiting.remove(job)
                running[pool.submit(job.run, cores)] = job, cores
            if kit.left() <= 25:
                waiting.clear()
            for future in [future for future in running if future.done()]:
                job, cores = running.pop(future)
                future.result()
                slots.append(cores)
                ended.add(job.name)
            time.sleep(0.05)


def report(every: dict[str, Job]) -> None:
    good = 0
    for job in every.values():
        line: dict[str, Any] = {"code": job.code, "seconds": round(job.seconds, 1)}
        if job.code != 0 and job.code != "not run":
            useful = [x for x in job.stderr.splitlines() if "Error" in x or "error" in x]
            line["error"] = " | ".join(useful[-3:])[-500:]
        if job.like:
            like = every[job.like]
            for key in ("loss", "grad_norm", "validation_loss"):
                line[key] = worst(job.values(key), like.values(key))
            line["ok"] = job.code == 0 and line["loss"] is not None and line["loss"] < job.within
        else:
            line["ok"] = job.code == 0
        if job.name.startswith("grpo"):
            logged = job.lines()
            line["sampling_gap"] = [x["sampling_gap"] for x in logged if "sampling_gap" in x]
        good += line["ok"]
        emit("programs", job.name, **line)
    emit("programs", "all", ok=good, of=len(every))


def compare(every: dict[str, Job], one: str, other: str, what: str, start: int = 0) -> None:
    """Say whether two runs logged the same after a step."""
    if one not in every or other not in every:
        return
    line: dict[str, Any] = {}
    for key in ("loss", "grad_norm", "validation_loss"):
        a, b = (
            {s: v for s, v in every[name].values(key).items() if s > start} for name in (one, other)
        )
        line[key] = worst(a, b)
        line[f"{key} equal"] = f"{sum(a[s] == b[s] for s in a.keys() & b.keys())} of {len(a)}"
    emit("exact", what, **line)


def report_exactness(every: dict[str, Job]) -> None:
    for name in ("ddp", "fsdp1", "fsdp2", "packed", "compiled"):
        compare(every, f"exact {name} once", f"exact {name} again", f"{name}: two equal runs")
    for name in ("ddp", "fsdp1", "fsdp2", "packed", "compiled", "async"):
        compare(
            every, f"exact {name} once", f"exact {name} resumed", f"{name}: resumed after step 4", 4
        )
    for name in ("fsdp2", "packed"):
        one, other = (f"exact {name} deterministic {x}" for x in ("once", "again"))
        compare(every, one, other, f"{name}: two equal runs, deterministic algorithms")
        compare(every, f"exact {name} once", one, f"{name}: deterministic or not")
    compare(every, "exact ddp once", "exact fsdp2 from ddp", "fsdp2 from a checkpoint of ddp", 4)
    compare(
        every, "exact fsdp2 once", "exact async once", "asynchronous checkpoints change nothing"
    )
    for one, other in (("ddp", "fsdp1"), ("ddp", "fsdp2"), ("fsdp1", "fsdp2")):
        compare(every, f"exact {one} once", f"exact {other} once", f"{one} and {other} at one rank")
        compare(every, f"{one} packed", f"{other} packed", f"{one} and {other} at one rank, packed")
    compare(every, "ddp fp32", "fsdp2 fp32", "ddp and fsdp2 at one rank, fp32")


def report_noise(every: dict[str, Job]) -> None:
    """Lines that users would see on stderr, with how many runs printed each."""
    lines: collections.Counter = collections.Counter()
    example: dict[str, str] = {}
    for job in every.values():
        if job.code != 0 or job.cpu:
            continue
        for text in {re.sub(r"[\d.]+", "#", x.strip())[:300] for x in job.stderr.splitlines()}:
            if text:
                lines[text] += 1
                example.setdefault(text, job.name)
    for text, times in lines.most_common(25):
        emit("stderr", text, runs=times, first=example[text])


def check() -> None:
    """Parse the flags of every run as its script would, and run nothing."""
    import importlib

    from common import Refusal
    from run import parse_config

    # All before the first is parsed: the parser changes fields that the scripts share.
    scripts = {job.script: importlib.import_module(job.script) for job in jobs()}
    wrong = 0
    for job in jobs():
        os.environ |= {"WORLD_SIZE": str(job.ranks), "LOCAL_WORLD_SIZE": str(job.ranks)}
        made_later = {"init_from": INPUTS / "dense"} if "grpo" in job.name else {}
        job.flags |= made_later
        sys.argv = job.command()[1:]
        try:
            parse_config(scripts[job.script].Config)
        except Refusal as refusal:
            wrong += 1
            print(f"{job.name}: {refusal}")
    print(f"{len(jobs())} runs, {wrong} with flags that their script refuses")


def main() -> None:
    words = sys.argv[1:]
    if words == ["--check"]:
        return check()
    every = chosen(words)
    RUNS.mkdir(parents=True, exist_ok=True)
    run_all(every)
    report(every)
    report_exactness(every)
    report_noise(every)
    if LOGS.exists():
        shutil.make_archive(str(OUT / "programs"), "gztar", LOGS)


if __name__ == "__main__":
    main()
