"""Save and load the state of FSDP1 and FSDP2 in both checkpoint styles.

For launching.launch_cases. A case is a script and a style. One more flag: --folder, where
checkpoints go.
"""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import cases  # also adds the root to sys.path
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from launching import small_shape
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

import common
import fsdp1_pretrain
import fsdp2_pretrain
from model import build_model, weight_decay_names

CPU = torch.device("cpu")
SCRIPTS = {"fsdp1": fsdp1_pretrain, "fsdp2": fsdp2_pretrain}


def build(name: str, seed: int) -> tuple[Any, Any]:
    """Return a model and its optimizer, which have no state yet."""
    script = SCRIPTS[name]
    config = script.Config(seed=seed, learning_rate=0.01)
    model = build_model(small_shape(), config)
    decayed = weight_decay_names(model)
    model = script.parallelize(model, config, CPU)
    given = (model, decayed, config) if name == "fsdp1" else (model, config)
    return model, script.build_optimizer(*given)


def step(model: Any, optimizer: Any) -> float:
    """Train a step on tokens that each rank draws for itself; returns this rank's loss before."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(256, (2, 33), generator=generator)
    loss = model(input_ids=ids[:, :-1].contiguous(), labels=ids[:, 1:].contiguous())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def full_state(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Return all tensors of model and optimizer, unsharded. A collective."""
    tensors, moments = get_state_dict(model, optimizer)
    for name, state in moments["state"].items():
        tensors |= {f"{name} {key}": value for key, value in state.items()}
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
        for name, tensor in tensors.items()
    }


def same(some: dict, others: dict) -> bool:
    return some.keys() == others.keys() and all(some[name].equal(others[name]) for name in some)


def save_and_load(case: str, style: str) -> dict[str, Any]:
    """Save with one script, load with both; returns what DCP was handed, and what differs."""
    seen: dict[str, Any] = {"handed": [], "wrong": []}

    def note(do: Any) -> Any:
        def noting(state: dict, **options: Any) -> Any:
            seen["handed"].append({name: isinstance(state[name], Stateful) for name in state})
            return do(state, **options)

        return noting

    writer, _ = case.split()
    config = SCRIPTS[writer].Config(checkpoint_style=style)
    folder = Path(cases.given()["--folder"]) / case
    facts = {"torch": torch.__version__, "checkpoint_style": style}
    shape = small_shape().save_pretrained
    checkpoints = common.Checkpoints(config, folder, facts, shape, CPU)
    trained = build(writer, seed=0)
    step(*trained)
    with patch.object(dcp, "save", note(dcp.save)):
        checkpoints.save(*trained, {"step": 1, "tokens": 0})
    saved, loss = full_state(*trained), step(*trained)
    for reader in SCRIPTS:
        loaded = build(reader, seed=1)
        with patch.object(dcp, "load", note(dcp.load)):
            common.load_checkpoint(checkpoints.newest, *loaded)
        state = full_state(*loaded)
        if not same(state, saved):
            seen["wrong"].append(f"{reader}'s tensors")
        if set(common.gather(step(*loaded) == loss)) != {True}:
            seen["wrong"].append(f"{reader}'s next loss")
    seen["tensors"] = len(saved)
    return seen


def main() -> None:
    dist.init_process_group("gloo")
    cases.leave(cases.each(save_and_load))
