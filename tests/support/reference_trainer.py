"""Train on a reference run with the Trainer of transformers, or with TRL's SFTTrainer.

    python tests/support/reference_trainer.py WHICH {own,given,means} LOGS FOLDER ...

WHICH is trainer, sft or sft_bf16. It writes LOGS/NAME.jsonl for each folder. With `own`, optimizer
and schedule are those that the trainer makes from its arguments. With `given`, they are those that
reference/README.md asks for. With `means` too, but the model does not get the number of targets. An
example of the data is a micro-batch, because micro-batches have different numbers of sequences.
"""

import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM


def micro_batch(sequences: list[dict]) -> dict[str, torch.Tensor]:
    """Return the sequences as a batch, padded on the right."""
    tokens = [torch.tensor(sequence["tokens"]) for sequence in sequences]
    targets = [torch.tensor(sequence["targets"]) == 1 for sequence in sequences]
    labels = [ids.where(target, -100) for ids, target in zip(tokens, targets)]
    return {
        "input_ids": pad_sequence(tokens, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(ids) for ids in tokens], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }


def arguments(hyper: dict, kind: type, **more: Any) -> Any:
    return kind(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        max_steps=hyper["steps"],
        learning_rate=hyper["learning_rate"],
        adam_beta1=hyper["betas"][0],
        adam_beta2=hyper["betas"][1],
        adam_epsilon=hyper["eps"],
        weight_decay=hyper["weight_decay"],
        max_grad_norm=hyper["grad_clip"],
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr": hyper["min_learning_rate"]},
        warmup_steps=hyper["warmup_steps"],
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
        **more,
    )


def optimizer_and_schedule(model: torch.nn.Module, hyper: dict) -> tuple:
    """Return what the page asks for. A schedule of PyTorch counts from 0."""
    names = [(name, p.ndim > 1 and "embed" not in name) for name, p in model.named_parameters()]
    parameters = dict(model.named_parameters())
    groups = [
        {
            "params": [parameters[name] for name, decays in names if decays == chosen],
            "weight_decay": hyper["weight_decay"] * chosen,
        }
        for chosen in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=hyper["betas"], eps=hyper["eps"])

    def rate(index: int) -> float:
        peak, least = hyper["learning_rate"], hyper["min_learning_rate"]
        warmup, step = hyper["warmup_steps"], index + 1
        if step <= warmup:
            return peak * step / warmup
        progress = (step - warmup) / (hyper["steps"] - warmup)
        return least + (peak - least) * (1 + math.cos(math.pi * progress)) / 2

    return optimizer, LambdaLR(optimizer, rate)


def train(which: str, optimizer: str, folder: Path) -> list[dict]:
    """Return the trainer's log."""
    batches = json.loads((folder / "batches.json").read_text())
    hyper = batches["hyper"]
    model = AutoModelForCausalLM.from_pretrained(folder)
    given = {
        "model": model,
        "train_dataset": [micro_batch(each) for step in batches["steps"] for each in step],
        "data_collator": lambda examples: examples[0],
    }
    if optimizer != "own":
        given["optimizers"] = optimizer_and_schedule(model, hyper)
    if which == "trainer":
        trainer = transformers.Trainer(
            args=arguments(hyper, transformers.TrainingArguments), **given
        )
    else:
        import datasets
        import trl

        given["train_dataset"] = datasets.Dataset.from_list(
            [{name: x.tolist() for name, x in each.items()} for each in given["train_dataset"]]
        )
        given["data_collator"] = lambda examples: {
            name: torch.tensor(x) for name, x in examples[0].items()
        }
        more: dict = {"dataset_kwargs": {"skip_prepare_dataset": True}}
        more |= {"bf16": False} if which == "sft" else {}
        trainer = trl.SFTTrainer(args=arguments(hyper, trl.SFTConfig, **more), **given)
    if optimizer == "means":
        trainer.model_accepts_loss_kwargs = False
    trainer.train()
    return [line for line in trainer.state.log_history if "grad_norm" in line]


def main(which: str, optimizer: str, logs: str, *folders: str) -> None:
    transformers.logging.set_verbosity_error()
    for folder in map(Path, folders):
        lines = train(which, optimizer, folder)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (Path(logs) / f"{folder.name}.jsonl").write_text(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
