"""One contestant of bench/compare.py on one rank of a torchrun launch: trains, notes times, losses.

    torchrun ... bench/contestant.py OUT FOLDER NAME

After every TURN steps it stands still until it is told to go on, as the next one has its turn.
FOLDER holds `weights` (a Hugging Face model), `rows.pt` (int64 [steps, rows of all ranks, 257]) and
`settings.json`. The scripts run as they are: only the end of a step is noted. A bare loop is the
strategy and nothing else. Runs in either environment: ours for `bare` and scripts, the peers' for
`trainer` and `trl`.
"""

import functools
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

ROOT = Path(__file__).parents[1]
TURN = 3  # steps


class Notes:
    """Seconds of each step, its tokens and loss. `go` and `done` are pipes, of every rank."""

    def __init__(self, folder: Path) -> None:
        self.started = time.perf_counter()
        self.seconds: list[float] = []
        self.losses: list[Any] = []
        self.tokens: list[int] = []  # read by all ranks, without padding
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
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            seen = {"seconds": self.seconds, "losses": self.losses, "tokens": self.tokens}
            Path(out).write_text(json.dumps(seen | {"peak_gib": peak} | self.more))


ones = functools.cache(functools.partial(torch.ones, requires_grad=True))  # made once a shape


def products(model: torch.nn.Module, optimizer: Any, batch: Any, *_: Any) -> tuple[float, float]:
    """For `train_step`: matrix products and attention of the blocks, forward and backward."""
    heads, size = model.config.num_attention_heads, model.config.hidden_size
    for micro_batch in batch.micro_batches:
        rows, width = micro_batch["input_ids"].shape
        for block in model.model.layers:
            for linear in block.modules():
                if isinstance(linear, torch.nn.Linear):
                    x = ones(rows * width, linear.in_features)
                    weight = ones(linear.out_features, linear.in_features)
                    y = F.linear(x, weight)
                    torch.autograd.grad(y, (x, weight), y)
            q, k, v = ones(3, rows, heads, width, size // heads)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            torch.autograd.grad(y, (q, k, v), y)
    dist.barrier()
    return 0.0, 0.0


def script(name: str, notes: Notes, flags: list[str], train_step: Any = None) -> None:
    """One of ours; `main` is the script's own."""
    sys.path.insert(0, str(ROOT))
    import importlib

    import common

    log_step, make = common.Run.log_step, common.Batches.global_batch
    split_batches = common.split_batches

    def noted(run: Any, step: int, batch: Any, loss: float, *arguments: Any) -> None:
        log_step(run, step, batch, loss, *arguments)
        notes.step(loss, batch.tokens)
        padding.append(batch.fractions["padding_fraction"])
        waited.append(arguments[-1] / arguments[-2])

    def made_in_turn(training: Any, step: int) -> Any:
        notes.running.wait()
        return make(training, step)

    def counted(*arguments: Any) -> list:
        training, validation = split_batches(*arguments)
        notes.more["learned"] = int(training.pieces.labels.sum())
        return [training, validation]

    padding: list[float] = []
    waited: list[float] = []  # for data, of the time of the step
    common.Run.log_step, common.Batches.global_batch = noted, made_in_turn
    common.split_batches = counted
    common.export = common.Run.finish = lambda *_: None  # only training is compared
    sys.argv = [f"{name}.py", *flags]
    module = importlib.import_module(name)
    module.train_step = train_step or module.train_step
    module.main()
    notes.more["padding"] = sum(padding) / len(padding)
    notes.more["waited"] = sorted(waited)[len(waited) // 2]


def bare_steps(
    strategy: str, folder: Path, settings: dict[str, Any]
) -> Iterator[tuple[torch.Tensor, int]]:
    """The strategy, AdamW and the rows: what a tutorial of PyTorch shows.

    Returns the steps to come, each this rank's mean loss (a scalar) and the tokens of all ranks.
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
    rows = torch.load(folder / "rows.pt").chunk(ranks, dim=1)[rank]  # [steps, rows, 257]

    def train() -> Iterator[tuple[torch.Tensor, int]]:
        for batch in rows:
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss.detach(), batch[:, 1:].numel() * ranks

    return train()


def bare(strategy: str, folder: Path, notes: Notes, settings: dict[str, Any]) -> None:
    """A bare loop of the strategy."""
    dist.init_process_group("gloo")
    steps = bare_steps(strategy, folder, settings)
    dist.barrier()
    notes.start()
    for loss, tokens in steps:
        notes.step(loss, tokens)
    losses = torch.stack(notes.losses)
    dist.all_reduce(losses)
    notes.losses = (losses / dist.get_world_size()).tolist()


def trainer(strategy: str, folder: Path, notes: Notes, settings: dict[str, Any]) -> None:
    """transformers' Trainer on the same rows in the same order."""
    from torch.utils.data import TensorDataset
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            notes.start()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            notes.step(tokens=rows.shape[1] * 256)

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            if "loss" in logs:
                notes.losses[len([x for x in notes.losses if x is not None])] = logs["loss"]

    rows = torch.load(folder / "rows.pt")
    ranks = int(os.environ["WORLD_SIZE"])
    # The sampler deals single batches out to the ranks in turn.
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"), per_device_train_batch_size=rows.shape[1] // ranks,
        max_steps=len(rows), learning_rate=settings["learning_rate"], lr_scheduler_type="constant",
        weight_decay=0.0, adam_beta2=0.95, max_grad_norm=0.0, logging_steps=1, report_to=[],
        save_strategy="no", use_cpu=True, train_sampling_strategy="sequential", bf16=False,
        disable_tqdm=True, optim="adamw_torch_fused", dataloader_drop_last=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder / "weights", dtype=torch.float32)
    data = TensorDataset(rows.flatten(0, 1))

    def collate(chosen: list) -> dict[str, torch.Tensor]:
        ids = torch.stack([row for (row,) in chosen])
        return {"input_ids": ids[:, :-1], "shift_labels": ids[:, 1:], "labels": ids[:, 1:]}

    made = Trainer(model, arguments, train_dataset=data, data_collator=collate, callbacks=[Clock()])
    made.train()


def trl(mode: str, folder: Path, notes: Notes, settings: dict[str, Any]) -> None:
    """TRL's SFTTrainer on the conversations that ours trains on, loss on the assistant's tokens."""
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    rows = settings["rows_per_rank"]
    modes: dict[str, dict[str, Any]] = {
        "default": {"per_device_train_batch_size": rows, "max_length": 2048},
        "grouped": {
            "per_device_train_batch_size": rows, "max_length": 2048,
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
    learned = sum(label != -100 for row in made.train_dataset["labels"] for label in row)
    made.train()
    counts = torch.tensor([notes.tokens, positions])
    dist.all_reduce(counts)
    notes.tokens, notes.losses = counts[0].tolist(), []
    notes.more = {"padding": 1 - int(counts[0].sum()) / int(counts[1].sum()), "learned": learned}


def main() -> None:
    out, folder, name = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    settings = json.loads((folder / "settings.json").read_text())
    notes = Notes(folder / name)
    kind, _, strategy = name.partition(" ")
    if kind == "bare":
        bare(strategy, folder, notes, settings)
    elif kind == "trainer":
        trainer(strategy, folder, notes, settings)
    elif kind == "trl":
        trl(strategy, folder, notes, settings)
    elif kind == "floor":
        script("fsdp2_sft", notes, settings["flags"][name], products)
        notes.losses = []
    else:
        script(kind, notes, settings["flags"][name])
    notes.write(out)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
