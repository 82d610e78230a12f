"""Steps of fsdp2_grpo.py by its own functions, in many modes; test_grpo.py judges what was seen.

For conftest.launch, with two flags: --asked, JSON {mode: flags}, and --out, the file to write.
"""

import contextlib
import gc
import json
import os
import sys
import zlib
from collections.abc import Iterator
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "bench")]
import collectives  # noqa: E402

import common  # noqa: E402
import fsdp2_grpo as script  # noqa: E402

STEPS = 2
REAL = {name: getattr(script, name) for name in (
    "answer_prompts", "whole_parameters", "sample", "forward_backward", "clip_gradients",
    "policy_loss",
)}  # fmt: skip


def graded(prompt: str, answer: str, reference: str) -> float:
    """A reward of 0 to 1 that answers of random bytes get too."""
    return zlib.crc32((prompt + answer).encode()) % 8 / 7


def whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().clone()


class Watched:
    """The functions of the script that are worth watching, and what was seen in them."""

    def __init__(self, uneven: bool):
        self.uneven = uneven
        self.answers: list = []
        self.draws: dict = {}
        self.sampling: list[dict] = []
        self.steps: list[dict] = []  # of the optimizer
        self.ratios: list[float] = []

    def answer_prompts(self, *arguments: Any) -> Any:
        groups = REAL["answer_prompts"](*arguments)
        self.answers.append([
            [(a.prompt.tolist(), a.tokens.tolist(), a.log_probs.tolist(), a.reward) for a in group]
            for group in groups
        ])  # fmt: skip
        self.chosen = arguments[2]
        return groups

    @contextlib.contextmanager
    def whole_parameters(self, model: torch.nn.Module, config: Any) -> Iterator[None]:
        before = states(model)
        with collectives.Ledger() as ledger:
            with REAL["whole_parameters"](model, config):
                entered = len(ledger.calls)
                cudnn = [torch.backends.cuda.cudnn_sdp_enabled()]
                yield
                sampled = len(ledger.calls)
        cudnn.append(torch.backends.cuda.cudnn_sdp_enabled())
        after = states(model)
        kinds = sorted({call.kind for call in ledger.calls})
        counted = [entered, sampled - entered, len(ledger.calls) - sampled]
        self.sampling.append({
            "before": before, "after": after, "kinds": kinds, "collectives": counted,
            "training": model.training, "attention": model.config._attn_implementation,
            "cudnn": cudnn,
        })  # fmt: skip

    def sample(
        self, model: Any, prompts: list, draws: np.ndarray, eos_token_id: int, *more: Any
    ) -> list:
        group = len(draws) // len(prompts)
        for i, prompt in enumerate(prompts):
            of_prompt = draws[i * group : (i + 1) * group]
            self.draws.setdefault(str(prompt.tolist()), []).append(of_prompt.tolist())
        if self.uneven and dist.get_rank() == 0:
            draws = draws[:, :1]
        elif self.uneven:
            eos_token_id = -1
        return REAL["sample"](model, prompts, draws, eos_token_id, *more)

    def policy_loss(self, log_probs: Any, old_log_probs: Any, *more: Any, **named: Any) -> Any:
        ratio = (log_probs - old_log_probs).exp()
        self.ratios += [ratio.min().item(), ratio.max().item()]
        return REAL["policy_loss"](log_probs, old_log_probs, *more, **named)

    def forward_backward(self, model: Any, batch: common.GlobalBatch, *more: Any) -> torch.Tensor:
        self.ratios = []
        weights = {name: whole(p) for name, p in model.named_parameters()}
        total = REAL["forward_backward"](model, batch, *more)
        gradients = {name: whole(p.grad) for name, p in model.named_parameters()}
        measured = dict(zip(script.MEASURED, (total.double() / batch.num_labels).tolist()))
        self.steps.append({
            "weights": weights, "gradients": gradients, "measured": measured,
            "ratios": common.gather(self.ratios), "micro_batches": len(batch.micro_batches),
            "tokens": batch.num_labels,
        })  # fmt: skip
        return total


def states(model: torch.nn.Module) -> dict[str, Any]:
    """How FSDP keeps the parameters right now."""
    groups = [
        group
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in module._get_fsdp_state()._fsdp_param_groups
    ]
    held = 0
    for group in groups:
        for parameter in group.fsdp_params:
            held += sum(out.untyped_storage().size() for out in parameter.all_gather_outputs)
    return {
        "in shards": [group.is_sharded for group in groups],
        "reshard": [group._reshard_after_forward for group in groups],
        "local": sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor)),
        "whole": held,
    }


def run(flags: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Two steps, with the script's own functions as its `main` calls them."""
    flags = dict(flags)
    watched = Watched(flags.pop("uneven", False))
    config = script.Config(**flags)
    tokenizer, _ = script.chat_tokenizer(config.tokenizer)
    rows = common.load_rows(
        config.dataset, None, "train", script.CONVERSATIONS, script.chat_rows, tokenizer,
        config.max_length - config.answer_length,
    )  # fmt: skip
    training, validation = rows.split()
    model_config = script.build_model_config(config, len(tokenizer), tokenizer.eos_token_id)
    model = script.build_model(config, model_config)
    decayed = script.weight_decay_names(model)
    model = script.parallelize(model, config, device)
    optimizer = script.build_optimizer(model, decayed, config)
    common.load_weights(model, config.init_from)
    reference = None
    if config.reference_weight:
        reference = script.parallelize(script.build_model(config, model_config), config, device)
        common.load_weights(reference, config.init_from)
    measured = []
    names = [name for name in REAL if name != "clip_gradients"]
    with mock.patch.multiple(script, **{name: getattr(watched, name) for name in names}):
        reward = script.evaluate(model, validation, tokenizer, config, device)
        for step in range(1, STEPS + 1):
            batch, of_answers = script.roll_out(model, training, step, tokenizer, config, device)
            trained = script.train_step(model, reference, optimizer, batch, 1e-2, config, device)
            measured.append(of_answers | trained)
    draws = {}
    for part in common.gather(watched.draws):
        draws |= part
    return {
        "validation_reward": reward, "measured": measured, "answers": watched.answers,
        "draws": draws, "chosen": watched.chosen, "sampling": common.gather(watched.sampling),
        "steps": watched.steps, "reference": reference and states(reference),
    }  # fmt: skip


def main() -> None:
    given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    device = script.init_process_group(script.Config(timeout_minutes=1.0))
    script.reward = graded
    # Tracing and partitioning graphs is what a mode has of its own; kernels are tested elsewhere.
    torch.nn.Module.compile = partialmethod(torch.nn.Module.compile, backend="aot_eager")
    seen = {}
    for mode, flags in json.loads(given["--asked"]).items():
        seen[mode] = run(flags, device)
        gc.collect()
        torch._dynamo.reset()
    if dist.get_rank() == 0:
        torch.save(seen, given["--out"])
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)
