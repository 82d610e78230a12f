"""One contestant of bench/compare.py on one rank of a torchrun launch: trains and notes times.

    torchrun ... bench/contestant.py OUT FOLDER NAME

After every TURN steps it stands still until it is told to continue, because it is another one's
turn. FOLDER holds `weights` (a Hugging Face model), `sequences.pt` (int64 [steps, sequences of all
ranks, 257]) and `settings.json`. A script runs its own data, model and train step, with metrics and
signals, in the loop of its `main` without validation and checkpoints. A bare loop is the strategy
and nothing else. `steps STRATEGY` runs both in one process, one step each in turn. `bare`, `steps`
and scripts run in our environment, `trainer` and `trl` in the peers'.
"""

import importlib
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _tools  # noqa: F401
import shared
import torch
import torch.distributed as dist
from torch.nn import functional as F

TURN = 3  # steps


class Notes:
    """Seconds, tokens and loss of each step. `go` and `done` are pipes, two for each rank."""

    def __init__(self, folder: Path) -> None:
        self.started = time.perf_counter()
        self.seconds: list[float] = []
        self.losses: list[Any] = []
        self.tokens: list[int] = []  # of all ranks, without padding
        self.more: dict[str, Any] = {}
        self.running = threading.Event()  # for other threads of this rank
        self.running.set()
        rank = os.environ["RANK"]
        self.done = open(folder / f"done {rank}", "wb", buffering=0)
        self.go = open(folder / f"go {rank}", "rb", buffering=0)

    def start(self) -> None:
        self.started = time.perf_counter()

    def step(self, loss: Any = None, tokens: int = 0) -> None:
        self.seconds.append(time.perf_counter() - self.started)
        self.losses.append(loss)
        self.tokens.append(tokens)
        if len(self.seconds) % TURN == 0:
            self.running.clear()
            self.done.write(b".")
            self.go.read(1)
            self.running.set()
        self.start()

    def write(self, out: str) -> None:
        if int(os.environ["RANK"]) == 0:
            # In bytes on macOS, otherwise in KiB.
            unit = 1 if sys.platform == "darwin" else 1024
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
            seen = {"seconds": self.seconds, "losses": self.losses, "tokens": self.tokens}
            Path(out).write_text(json.dumps(seen | {"peak_gib": peak} | self.more))


def script_steps(
    name: str, flags: list[str], more: dict[str, Any], running: threading.Event | None = None
) -> Iterator[tuple[float, int]]:
    """Train with one of ours; yields each step's mean loss and tokens of all ranks.

    Args:
        more: gets the fraction of padding, and the number of target tokens in the data.
        running: while it is not set, no batch is prepared.
    """
    from run import parse_config

    script = importlib.import_module(name)

    class InTurn(shared.batches_class(script)):
        def global_batch(self, *step: Any) -> Any:
            if running is not None:
                running.wait()
            return super().global_batch(*step)

    sys.argv = [f"{name}.py", *flags]
    session = shared.Session(script, parse_config(script.Config), kind=InTurn)
    more["num_targets"] = int(session.data.training.sequences.num_targets.sum())
    padding = []
    for batch, loss in session.steps():
        padding.append(batch.padding_fraction)
        more["padding"] = sum(padding) / len(padding)
        yield loss, batch.num_tokens


def bare_steps(
    strategy: str, folder: Path, settings: dict[str, Any]
) -> Iterator[tuple[torch.Tensor, int]]:
    """Train with the strategy, AdamW and the sequences, as PyTorch's tutorials do.

    Returns an iterator over steps: this rank's mean loss (a scalar) and the tokens of all ranks.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from torch.nn.parallel import DistributedDataParallel
    from transformers import AutoModelForCausalLM
    from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = AutoModelForCausalLM.from_pretrained(folder / "weights", dtype=torch.float32)
    if strategy == "ddp":
        model = DistributedDataParallel(model)
    elif strategy == "fsdp1":
        policy = ModuleWrapPolicy({Qwen2DecoderLayer})
        cpu = torch.device("cpu")
        model = FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=True, device_id=cpu
        )
    else:
        for block in model.model.layers:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings["learning_rate"], betas=(0.9, 0.95), weight_decay=0.0,
        fused=True,
    )  # fmt: skip
    sequences = torch.load(folder / "sequences.pt").chunk(ranks, dim=1)[rank]

    def train() -> Iterator[tuple[torch.Tensor, int]]:
        for batch in sequences:  # [sequences, 257]
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss.detach(), batch[:, 1:].numel() * ranks

    return train()


def bare(strategy: str, folder: Path, notes: Notes, settings: dict[str, Any]) -> None:
    """Run only a bare loop of the strategy."""
    dist.init_process_group("gloo")
    steps = bare_steps(strategy, folder, settings)
    dist.barrier()
    notes.start()
    for loss, tokens in steps:
        notes.step(loss, tokens)
    losses = torch.stack(notes.losses)
    dist.all_reduce(losses)
    notes.losses = (losses / dist.get_world_size()).tolist()


def step_by_step(strategy: str, folder: Path, settings: dict[str, Any], out: str) -> None:
    """Run script and bare loop in one process, one step each in turn, with all ranks in step."""
    name = f"{strategy}_pretrain"
    script = script_steps(name, settings["flags"][name], {})
    losses, seconds = [next(script)[0]], {"script": [], "bare": []}  # also joins the process group
    bare = bare_steps(strategy, folder, settings)
    for _ in range(settings["steps"] - 1):
        dist.barrier()
        started = time.perf_counter()
        loss, _ = next(bare)
        dist.barrier()
        between = time.perf_counter()
        dist.all_reduce(loss)
        if abs(loss.item() / dist.get_world_size() / losses[-1] - 1) > 1e-3:
            raise SystemExit(f"{strategy}: they do different work")
        dist.barrier()
        again = time.perf_counter()
        losses.append(next(script)[0])
        dist.barrier()
        seconds["bare"].append(between - started)
        seconds["script"].append(time.perf_counter() - again)
    if os.environ["RANK"] == "0":
        Path(out).write_text(json.dumps(seconds))
    dist.barrier()


def trainer(strategy: str, folder: Path, notes: Notes, settings: dict[str, Any]) -> None:
    """Run transformers' Trainer on the same sequences in the same order."""
    from torch.utils.data import TensorDataset
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            notes.start()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            notes.step(tokens=sequences.shape[1] * 256)

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            if "loss" in logs:
                notes.losses[len([x for x in notes.losses if x is not None])] = logs["loss"]

    sequences = torch.load(folder / "sequences.pt")
    ranks = int(os.environ["WORLD_SIZE"])
    # The sampler hands out single batches to the ranks in turn.
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"), max_steps=len(sequences), lr_scheduler_type="constant",
        per_device_train_batch_size=sequences.shape[1] // ranks,
        learning_rate=settings["learning_rate"],
        weight_decay=0.0, adam_beta2=0.95, max_grad_norm=0.0, logging_steps=1, report_to=[],
        save_strategy="no", use_cpu=True, train_sampling_strategy="sequential", bf16=False,
        disable_tqdm=True, optim="adamw_torch_fused", dataloader_drop_last=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder / "weights", dtype=torch.float32)
    data = TensorDataset(sequences.flatten(0, 1))

    def collate(chosen: list) -> dict[str, torch.Tensor]:
        ids = torch.stack([sequence for (sequence,) in chosen])
        return {"input_ids": ids[:, :-1], "shift_labels": ids[:, 1:], "labels": ids[:, 1:]}

    made = Trainer(model, arguments, train_dataset=data, data_collator=collate, callbacks=[Clock()])
    made.train()


def trl(mode: str, folder: Path, notes: Notes, settings: dict[str, Any]) -> None:
    """Run TRL's SFTTrainer on our conversations, with the loss on the assistant's tokens."""
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    size = settings["sequences_per_rank"]
    modes: dict[str, dict[str, Any]] = {
        "default": {"per_device_train_batch_size": size, "max_length": 2048},
        "grouped": {
            "per_device_train_batch_size": size, "max_length": 2048,
            "train_sampling_strategy": "group_by_length",
        },
        "packed": {"per_device_train_batch_size": 1, "max_length": 4096, "packing": True},
    }  # fmt: skip
    arguments = SFTConfig(
        output_dir=str(folder / "trl"), max_steps=settings["steps"], report_to=[], use_cpu=True,
        learning_rate=settings["learning_rate"], lr_scheduler_type="constant", weight_decay=0.0,
        max_grad_norm=0.0, adam_beta2=0.95, logging_steps=1, save_strategy="no", bf16=False,
        disable_tqdm=True, optim="adamw_torch_fused", assistant_only_loss=True,
        gradient_checkpointing=False, **modes[mode],
    )  # fmt: skip

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            notes.start()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            notes.step(tokens=read.pop(), loss=None)

    class Counting(SFTTrainer):
        def training_step(self, model: Any, inputs: dict, *more: Any) -> torch.Tensor:
            mask = inputs.get("attention_mask")
            read.append(int(inputs["input_ids"].numel() if mask is None else mask.sum()))
            positions.append(inputs["input_ids"].numel())
            return super().training_step(model, inputs, *more)

    read: list[int] = []
    positions: list[int] = []
    model = AutoModelForCausalLM.from_pretrained(folder / "weights", dtype=torch.float32)
    made = Counting(
        model, arguments, callbacks=[Clock()],
        train_dataset=load_dataset("json", data_files=str(folder / "trained.jsonl"), split="train"),
        processing_class=AutoTokenizer.from_pretrained(folder / "weights"),
    )  # fmt: skip
    num_targets = sum(label != -100 for row in made.train_dataset["labels"] for label in row)
    made.train()
    counts = torch.tensor([notes.tokens, positions])
    dist.all_reduce(counts)
    notes.tokens, notes.losses = counts[0].tolist(), []
    padding = 1 - int(counts[0].sum()) / int(counts[1].sum())
    notes.more = {"padding": padding, "num_targets": num_targets}


def main() -> None:
    out, folder, name = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    settings = json.loads((folder / "settings.json").read_text())
    kind, _, strategy = name.partition(" ")
    if kind == "steps":
        step_by_step(strategy, folder, settings, out)
    else:
        notes = Notes(folder / name)
        if kind in (others := {"bare": bare, "trainer": trainer, "trl": trl}):
            others[kind](strategy, folder, notes, settings)
        else:
            steps = script_steps(kind, settings["flags"][name], notes.more, notes.running)
            for loss, tokens in steps:
                notes.step(loss, tokens)
        notes.write(out)
    sys.stdout.flush()
    os._exit(0)  # models are alive


if __name__ == "__main__":
    main()
