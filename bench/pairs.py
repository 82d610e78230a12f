"""Which script can resume which script's checkpoint: all pairs.

    torchrun --standalone --nproc-per-node=2 bench/pairs.py            all pairs
    torchrun --standalone --nproc-per-node=2 bench/pairs.py ddp tp     what these two write

Each writer trains 2 steps, saves in both checkpoint styles, and trains 2 more. Each reader loads a
checkpoint of each writer, of both styles in turn, into a model with other weights and trains the
same 2 steps. A cell of the table says what differs: the losses, the AdamW moments as loaded (to the
last bit), or nothing: "equal". Losses are compared to the last bit too, or to 2e-6 if a TP, CP, PP
or EP group sums in another order.

Muon has one moment for its matrices and AdamW has two, so it reads every checkpoint and continues
with another optimizer: only the first loss is compared. The others refuse its checkpoints.

The first table is for a dense model, the second for an MoE model. The biases of its routers are
neither parameters nor moments, so the losses show whether they are in the checkpoint. (Only EP
moves them, so it stops doing so when it has saved.)
"""

import gc
import logging
import tempfile
from pathlib import Path
from typing import Any

import _tools  # noqa: F401
import shared
import torch
import torch.distributed as dist
from shared import Session
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor

import common
import ddp_pretrain
import fsdp1_pretrain
import fsdp2_cp_pretrain
import fsdp2_ep_pretrain
import fsdp2_muon_pretrain
import fsdp2_nd_pretrain
import fsdp2_pp_pretrain
import fsdp2_pretrain
import fsdp2_tp_pretrain

SCRIPTS = {"ddp": ddp_pretrain, "fsdp1": fsdp1_pretrain, "fsdp2": fsdp2_pretrain}
INSIDE = {"tp": fsdp2_tp_pretrain, "cp": fsdp2_cp_pretrain, "pp": fsdp2_pp_pretrain}
INSIDE |= {"ep": fsdp2_ep_pretrain}
INSIDE |= {"nd": fsdp2_nd_pretrain}
SCRIPTS |= INSIDE | {"zero1": ddp_pretrain, "muon": fsdp2_muon_pretrain}
# TP and N-D parallelism refuse MoE models, and EP refuses dense models.
DENSE = [name for name in SCRIPTS if name != "ep"]
WITH_EXPERTS = [name for name in SCRIPTS if name not in ("tp", "nd")]
STYLES = ["stateful", "separate"]
STEPS = 2
FLAGS: dict[str, Any] = {  # without clipping, because each script sums the norm in its own order
    "learning_rate": 1e-2, "min_learning_rate": 1e-2, "warmup_steps": 0, "grad_clip": 0.0,
    "micro_batch_tokens": 512, "global_batch_tokens": 1024,
    "activation_checkpointing": "0.5",  # must not show in the names
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "zero1": {"shard_optimizer": True},
    "nd": {"context_parallel": 2},
}


def train(session: Session, first: int, last: int) -> list[float]:
    return [session.train_step(batch) for batch in session.batches(first, last)]


def moments(session: Session) -> dict[str, torch.Tensor]:
    """Return the unsharded AdamW moments of all ranks: parameter and name -> tensor."""
    state = get_optimizer_state_dict(session.model, session.optimizer)["state"]
    own = {
        f"{parameter} {name}": (x.full_tensor() if isinstance(x, DTensor) else x).clone()
        for parameter, tensors in state.items()
        for name, x in tensors.items()
    }
    every: dict[str, torch.Tensor] = {}
    for part in common.gather(own):  # a pipeline stage has only its blocks' values
        every |= part
    return every


def same(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[k], others[k]) for k in some)


def save(session: Session, run_dir: Path, style: str) -> Path:
    """Save a checkpoint as the script's `main` does; returns its directory."""
    session.config.run_dir = str(run_dir)
    session.config.checkpoint_style = style
    _, checkpoints = session.run()
    checkpoints.save(session.model, session.optimizer, {"step": STEPS, "tokens": 0})
    return checkpoints.newest


def table(
    folder: Path, names: list[str], writers: list[str], data: Any, flags: dict[str, Any]
) -> list[list[str]]:
    """Return a row for each writer, with a column for each of the names as reader."""
    rows = []
    for i, writer in enumerate(names):
        if writer not in writers:
            continue
        script = SCRIPTS[writer]
        session = Session(script, script.Config(**flags, **OWN.get(writer, {})), data)
        train(session, 0, STEPS)
        saved = moments(session)
        paths = {style: save(session, folder / writer / style, style) for style in STYLES}
        stop_balancing(session)
        losses = train(session, STEPS, 2 * STEPS)
        session.close()
        rows.append([writer])
        for j, reader_name in enumerate(names):
            style = STYLES[(i + j) % 2]
            reader = SCRIPTS[reader_name]
            own = OWN.get(reader_name, {})
            other = Session(reader, reader.Config(**flags, **own, seed=7), data)
            stop_balancing(other)
            rows[-1].append(f"{read(other, writer, paths[style], saved, losses)} ({style})")
            other.close()
    return rows


def read(
    session: Session, writer: str, path: Path, saved: dict[str, torch.Tensor], losses: list[float]
) -> str:
    """Load a checkpoint, and return what differs from its writer's moments and next losses."""
    reads_muon = session.script is fsdp2_muon_pretrain
    try:
        common.load_checkpoint(path, session.model, session.optimizer)
    except common.Refusal:
        return "refused"
    loaded = moments(session)
    if reads_muon:  # it has no use for the second moments of its matrices
        saved = {name: saved[name] for name in loaded if name in saved}
    wrong = [] if same(loaded, saved) else ["moments"]
    next_losses = train(session, STEPS, 2 * STEPS)
    if reads_muon and writer != "muon":  # the first one precedes its own optimizer step
        next_losses = next_losses[:1]
    names = {writer, next(name for name, script in SCRIPTS.items() if script is session.script)}
    near = 0 if names.isdisjoint(INSIDE) else 2e-6
    different = any(abs(a / b - 1) > near for a, b in zip(next_losses, losses))
    return " and ".join(wrong + ["losses"] * different) or "equal"


def stop_balancing(session: Session) -> None:
    if session.script is fsdp2_ep_pretrain:
        session.config.balance_rate = 0.0


def small_mixture() -> Any:
    from transformers import MiniMaxM2Config

    return MiniMaxM2Config(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=4,
        num_experts_per_tok=2, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip


def print_table(names: list[str], rows: list[list[str]]) -> None:
    print(f"| written by | {' | '.join(f'into {name}' for name in names)} |")
    print("| --- " * (1 + len(names)) + "|")
    for row in rows:
        print(f"| {' | '.join(row)} |")


def main() -> None:
    reader = shared.parser(__doc__)
    reader.add_argument("writers", metavar="WRITER", nargs="*", choices=[*SCRIPTS, []])
    writers = reader.parse_args().writers or list(SCRIPTS)
    # It warns of the two all-gathers of a tensor that is sharded twice.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    ddp_pretrain.init_process_group(ddp_pretrain.Config())
    gc.freeze()  # the garbage collector need not search what is here now
    shapes = {"dense": shared.qwen2(32, 64, 2, 4, 2, 320), "experts": small_mixture()}
    with tempfile.TemporaryDirectory() as own:
        folders = [own]  # all ranks need the one of rank 0
        dist.broadcast_object_list(folders)
        for kind, names in {"dense": DENSE, "experts": WITH_EXPERTS}.items():
            folder = Path(folders[0], kind)
            if dist.get_rank() == 0:
                shapes[kind].save_pretrained(folder)
            dist.barrier()
            flags = FLAGS | {"model": str(folder)}
            data = shared.load_data(ddp_pretrain, ddp_pretrain.Config(**flags))
            rows = table(folder / "runs", names, writers, data, flags)
            dist.barrier()
            if dist.get_rank() == 0:
                print_table(names, rows)
    shared.leave()


if __name__ == "__main__":
    main()
