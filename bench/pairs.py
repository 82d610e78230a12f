"""Which script's checkpoint can go on in which script: all pairs and both styles, for the README.

    torchrun --standalone --nproc-per-node=2 bench/pairs.py

Each writer trains 3 steps, saves in each style and trains 3 more. Each reader loads every one of
these checkpoints into a model of other weights and trains the same 3 steps. A table cell says what
differs: losses (to the last bit), moments of AdamW as loaded, or nothing: "equal".
"""

import gc
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import arguments
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from transformers import Qwen2Config

sys.path.insert(0, str(Path(__file__).parents[1]))
import common  # noqa: E402
import ddp_pretrain  # noqa: E402
import fsdp1_pretrain  # noqa: E402
import fsdp2_pretrain  # noqa: E402

SCRIPTS = {"ddp": ddp_pretrain, "fsdp1": fsdp1_pretrain, "fsdp2": fsdp2_pretrain}
STYLES = ["stateful", "separate"]
STEPS = 3
SHAPE = Qwen2Config(
    vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
)  # fmt: skip
FLAGS: dict[str, Any] = {  # without clipping: its norm is summed up in another order by each script
    "grad_clip": 0.0, "micro_batch_tokens": 512, "global_batch_tokens": 4096, "warmup_steps": 1,
    "activation_checkpointing": "0.5",  # wraps some blocks, which must not show in the names
}  # fmt: skip


class Session:
    """One script's model, optimizer and progress, as its `main` makes them."""

    def __init__(self, name: str, shape: str, device: torch.device, data: Any, **flags: Any):
        self.script, self.device, self.training = SCRIPTS[name], device, data
        self.config = self.script.Config(**FLAGS, model=shape, **flags)
        common.check_config(self.config)
        shape = self.script.architecture(self.config, 257)
        self.model, decayed = self.script.build_model(self.config, shape, device)
        self.optimizer = self.script.build_optimizer(self.model, decayed, self.config)
        self.progress = common.Progress()
        self.state = self.script.State(self.model, self.optimizer, self.progress)

    def train(self, last: int) -> list[float]:
        losses = []
        for step in range(self.progress.step, last):
            batch = self.training.global_batch(step)
            arguments = (self.model, self.optimizer, batch, self.config, self.device, 1e-2)
            losses.append(self.script.train_step(*arguments)[0])
            self.progress.step += 1
        return losses

    def moments(self) -> dict[str, torch.Tensor]:
        """Of AdamW, whole: parameter and name -> tensor."""
        state = get_optimizer_state_dict(self.model, self.optimizer)["state"]
        return {
            f"{parameter} {name}": whole(tensor).clone()
            for parameter, tensors in state.items()
            for name, tensor in tensors.items()
        }


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def difference(session: Session, losses: list[float], moments: dict, saved: dict) -> str:
    """What differs from the run that was not interrupted."""
    wrong = []
    if moments.keys() != saved.keys() or any(
        not torch.equal(moments[name], saved[name]) for name in saved
    ):
        wrong.append("moments")
    if session.train(2 * STEPS) != losses:
        wrong.append("losses")
    return " and ".join(wrong) or "equal"


def table(folder: Path, device: torch.device) -> list[list[str]]:
    """Rows: writer and style; columns: reader."""
    SHAPE.save_pretrained(folder / "shape")
    shape, rows = str(folder / "shape"), []
    data = common.load_batches(ddp_pretrain.Config(**FLAGS), device)[1]
    for writer in SCRIPTS:
        session = Session(writer, shape, device, data)
        session.train(STEPS)
        saved = session.moments()
        for style in STYLES:
            session.config.checkpoint_style = style
            path = folder / writer / style
            session.script.save_checkpoint(session.state, session.config, None, path)()
        losses = session.train(2 * STEPS)
        for style in STYLES:
            row = [writer, style]
            for reader in SCRIPTS:
                other = Session(reader, shape, device, data, seed=7)
                path = folder / writer / style
                other.progress.step = STEPS  # `main` knows it from checkpoint.json
                other.script.load_checkpoint(other.state, other.config, path)
                row.append(difference(other, losses, other.moments(), saved))
                del other
                gc.collect()
            rows.append(row)
        del session
        gc.collect()
    return rows


def leave() -> None:
    """End this rank in order, once nothing refers to a model any more."""
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    arguments.read(__doc__)
    device = ddp_pretrain.init_process_group(ddp_pretrain.Config())
    for purpose in common.PATIENT:
        common.patient_group(purpose)
    with tempfile.TemporaryDirectory() as own:
        folder = common.on_rank_0(lambda: Path(own))
        rows = table(folder, device)
        dist.barrier()
    if common.rank() == 0:
        print("| written by | style | " + " | ".join(f"into {name}" for name in SCRIPTS) + " |")
        print("| --- " * (2 + len(SCRIPTS)) + "|")
        for row in rows:
            print("| " + " | ".join(row) + " |")
    leave()


if __name__ == "__main__":
    main()
