"""Run steps of fsdp2_grpo.py in many modes, by its own functions; test_grpo.py judges the results.

See cases.py.
"""

import contextlib
import math
import zlib
from collections.abc import Iterator
from functools import partialmethod
from types import SimpleNamespace
from typing import Any
from unittest import mock

import cases  # also adds the root, tools and bench to sys.path
import collectives
import numpy as np
import shared
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import common
import conversations
import fsdp2_grpo as script
from model import build_config

STEPS = 2
WATCHED = ["answer_prompts", "unsharded_parameters", "sample", "policy_loss"]
REAL = {name: getattr(script, name) for name in WATCHED}
CLIP = torch.nn.utils.clip_grad_norm_


def graded(prompt: str, answer: str, reference: str) -> float:
    """Return a reward from 0 to 1 that answers of random bytes get too."""
    return zlib.crc32((prompt + answer).encode()) % 8 / 7


def unsharded(tensor: torch.Tensor) -> torch.Tensor:
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
        self.batch: Any = None  # of the current step
        self.ratios: list[float] = []  # since the last optimizer step
        self.total = 0
        self.advantages: list[float] = []  # of tokens, by the teacher alone

    def answer_prompts(self, model: Any, documents: Any, chosen: list[int], *more: Any) -> Any:
        groups = REAL["answer_prompts"](model, documents, chosen, *more)
        self.answers.append([
            [(a.prompt.tolist(), a.tokens.tolist(), a.log_probs.tolist(), a.reward) for a in group]
            for group in groups
        ])  # fmt: skip
        self.chosen = chosen
        return groups

    @contextlib.contextmanager
    def unsharded_parameters(self, model: torch.nn.Module, config: Any) -> Iterator[None]:
        before = states(model)
        with collectives.Ledger() as ledger:
            with REAL["unsharded_parameters"](model, config):
                entered = len(ledger.calls)
                yield
                sampled = len(ledger.calls)
        kinds = sorted({call.kind for call in ledger.calls})
        counted = [entered, sampled - entered, len(ledger.calls) - sampled]
        self.sampling.append({
            "before": before, "after": states(model), "kinds": kinds, "collectives": counted,
            "training": model.training, "attention": model.config._attn_implementation,
        })  # fmt: skip

    def sample(
        self, model: Any, prompts: list, draws: np.ndarray, end_ids: list, *more: Any
    ) -> list:
        group = len(draws) // len(prompts)
        for i, prompt in enumerate(prompts):
            of_prompt = draws[i * group : (i + 1) * group]
            self.draws.setdefault(str(prompt.tolist()), []).append(of_prompt.tolist())
        if self.uneven and dist.get_rank() == 0:
            draws = draws[:, :1]
        elif self.uneven:
            end_ids = [-1]
        return REAL["sample"](model, prompts, draws, end_ids, *more)

    def policy_loss(self, log_probs: Any, old_log_probs: Any, *more: Any, **named: Any) -> Any:
        ratio = (log_probs - old_log_probs).exp()
        self.ratios += [ratio.min().item(), ratio.max().item()]
        if "teacher_log_probs" in named:
            self.advantages += (named["teacher_log_probs"] - old_log_probs).tolist()
        sums = REAL["policy_loss"](log_probs, old_log_probs, *more, **named)
        self.total += sums.detach()
        return sums

    def clip_grad_norm(self, model: torch.nn.Module, *more: Any) -> torch.Tensor:
        """Note an optimizer step: it has its gradients, and the weights that they are for."""
        dist.all_reduce(self.total)
        measured = (self.total.double() / self.batch.num_targets).tolist()
        self.steps.append({
            "weights": {name: unsharded(p) for name, p in model.named_parameters()},
            "gradients": {name: unsharded(p.grad) for name, p in model.named_parameters()},
            "measured": dict(zip(script.MEASURED, measured)),
            "ratios": common.gather(self.ratios), "tokens": self.batch.num_targets,
            "advantages": sorted(sum(common.gather(self.advantages), [])),
            "micro_batches": len(self.batch.micro_batches),
        })  # fmt: skip
        self.ratios, self.advantages, self.total = [], [], 0
        return CLIP(model.parameters(), *more)


def states(model: torch.nn.Module) -> dict[str, Any]:
    """Return how FSDP holds the parameters right now."""
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
        "unsharded bytes": held,
    }


def run(flags: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Run a validation and two steps, with the script's own functions as its `main` calls them."""
    flags = dict(flags)
    watched = Watched(flags.pop("uneven", False))
    rates = {"learning_rate": 1e-2, "min_learning_rate": 1e-2, "warmup_steps": 0}
    config = script.Config(**rates, **flags)
    tokenizer, turn_end, known_ids = conversations.chat_tokenizer(config, "known tokens")
    documents = common.load_documents(
        config, conversations.COLUMNS, script.tokenize_prompt, tokenizer
    )
    parts = common.train_validation_split(documents, math.inf)
    training, validation = (script.leave_out_long(part, config) for part in parts)
    generation = conversations.base_generation(config, tokenizer, turn_end)
    model_config = build_config(config, known_ids, generation.eos_token_id)
    model, optimizer = shared.build(script, model_config, config, device)
    common.load_weights(model, config.init_from)
    logged: list = []
    plumbing = SimpleNamespace(
        config=config, tokenizer=tokenizer, model_config=model_config, device=device,
        stop_signals=0, stops_validation=lambda: False, log=logged.append, rank=dist.get_rank(),
        world_size=dist.get_world_size(),
    )  # fmt: skip
    frozen = {}
    if config.reference_weight:
        frozen["reference_log_probs"] = script.load_frozen(config.init_from, plumbing)
    if config.teacher:
        frozen["teacher_log_probs"] = script.load_frozen(config.teacher, plumbing)
    measured = []
    clip = mock.patch.object(
        torch.nn.utils, "clip_grad_norm_", lambda _, most: watched.clip_grad_norm(model, most)
    )
    with clip, mock.patch.multiple(script, **{name: getattr(watched, name) for name in WATCHED}):
        script.evaluate(model, frozen, validation, 0, plumbing)
        for step in range(1, STEPS + 1):
            watched.batch, of_answers = script.roll_out(model, training, step, plumbing)
            script.add_log_probs(frozen, watched.batch.micro_batches, device)
            trained = script.train_step(model, optimizer, watched.batch, step, config, device)
            measured.append(of_answers | trained)
    draws = {}
    for part in common.gather(watched.draws):
        draws |= part
    return {
        "validation": logged[0], "measured": measured,
        "answers": watched.answers, "draws": draws, "chosen": watched.chosen,
        "sampling": common.gather(watched.sampling), "steps": watched.steps,
        "frozen": {name: states(other) for name, other in frozen.items()},
    }  # fmt: skip


def main() -> None:
    device = script.init_process_group(script.Config(timeout_minutes=1.0))
    script.reward = graded
    # Graphs are traced and split. test_modes.py generates kernels.
    torch.nn.Module.compile = partialmethod(torch.nn.Module.compile, backend="aot_eager")
    cases.leave(cases.each(lambda mode, flags: run(flags, device)))
