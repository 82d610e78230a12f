"""Which script's checkpoint can go on in which script: all pairs and both styles, for docs/runs.md.

    torchrun --standalone --nproc-per-node=2 bench/pairs.py

Each writer trains 2 steps, saves in each style and trains 2 more. Each reader loads every one of
these checkpoints into a model of other weights and trains the same 2 steps. A table cell says what
differs: losses, moments of AdamW as loaded (to the last bit), or nothing: "equal". Losses are
compared to the last bit too, but to 2e-6 where ranks share layers, rows, the blocks or experts, and
so sum otherwise. The first table is of a dense model, the second of a mixture of experts, whose
routers' biases are neither parameters nor moments: losses show whether they came along.
"""

import logging
import tempfile
from pathlib import Path
from typing import Any

import shared
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from shared import Session
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor

import common
import ddp_pretrain
import fsdp1_pretrain
import fsdp2_cp_pretrain
import fsdp2_ep_pretrain
import fsdp2_pp_pretrain
import fsdp2_pretrain
import fsdp2_tp_pretrain

SCRIPTS = {"ddp": ddp_pretrain, "fsdp1": fsdp1_pretrain, "fsdp2": fsdp2_pretrain}
INSIDE = {"tp": fsdp2_tp_pretrain, "cp": fsdp2_cp_pretrain, "pp": fsdp2_pp_pretrain}
INSIDE |= {"ep": fsdp2_ep_pretrain}
SCRIPTS |= INSIDE
# Tensor parallelism refuses experts, and expert parallelism models without.
DENSE = [name for name in SCRIPTS if name != "ep"]
WITH_EXPERTS = [name for name in SCRIPTS if name != "tp"]
STYLES = ["stateful", "separate"]
STEPS = 2
FLAGS: dict[str, Any] = {  # without clipping: its norm is summed up in another order by each script
    "grad_clip": 0.0, "micro_batch_tokens": 512, "global_batch_tokens": 4096,
    "activation_checkpointing": "0.5",  # of some blocks, which must not show in the names
}  # fmt: skip


def config_of(name: str, flags: dict[str, Any]) -> Any:
    """Return a script's Config. Only expert parallelism would balance experts."""
    own = {"balance_rate": 0.0} if name == "ep" else {}
    return SCRIPTS[name].Config(**flags | own)


def train(session: Session, first: int, last: int) -> list[float]:
    return [session.train_step(batch, 1e-2) for batch in session.batches(first, last)]


def moments(session: Session) -> dict[str, torch.Tensor]:
    """Of AdamW, whole, of all ranks: parameter and name -> tensor."""
    state = get_optimizer_state_dict(session.model, session.optimizer)["state"]
    own = {
        f"{parameter} {name}": (x.full_tensor() if isinstance(x, DTensor) else x).clone()
        for parameter, tensors in state.items()
        for name, x in tensors.items()
    }
    every: dict[str, torch.Tensor] = {}
    for part in common.gather(own):  # a stage has those of its own blocks
        every |= part
    return every


def same(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[k], others[k]) for k in some)


def table(folder: Path, names: list[str], data: Any, flags: dict[str, Any]) -> list[list[str]]:
    """Rows: writer and style; columns: reader."""
    rows = []
    for writer in names:
        script = SCRIPTS[writer]
        session = Session(script, config_of(writer, flags), data)
        train(session, 0, STEPS)
        saved = moments(session)
        for style in STYLES:
            state = common.AppState(session.model, session.optimizer).state_dict()
            for name, part in common.parts_of(state, style).items():
                dcp.save(part, checkpoint_id=folder / writer / style / name)
        losses = train(session, STEPS, 2 * STEPS)
        session.close()
        for style in STYLES:
            rows.append([writer, style])
            for reader_name in names:
                reader = SCRIPTS[reader_name]
                other = Session(reader, config_of(reader_name, flags | {"seed": 7}), data)
                common.load_checkpoint(folder / writer / style, other.model, other.optimizer)
                wrong = [] if same(moments(other), saved) else ["moments"]
                near = 0 if {writer, reader_name}.isdisjoint(INSIDE) else 2e-6
                pairs = zip(train(other, STEPS, 2 * STEPS), losses)
                wrong += ["losses"] if any(abs(a / b - 1) > near for a, b in pairs) else []
                rows[-1].append(" and ".join(wrong) or "equal")
                other.close()
    return rows


def small_mixture() -> Any:
    from transformers import MiniMaxM2Config

    return MiniMaxM2Config(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=4,
        num_experts_per_tok=2, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip


def print_table(names: list[str], rows: list[list[str]]) -> None:
    print(f"| written by | style | {' | '.join(f'into {name}' for name in names)} |")
    print("| --- " * (2 + len(names)) + "|")
    for row in rows:
        print(f"| {' | '.join(row)} |")


def main() -> None:
    shared.read(__doc__)
    # Of the two gathers that a tensor takes which is cut twice.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    ddp_pretrain.init_process_group(ddp_pretrain.Config())
    shapes = {"dense": shared.qwen2(32, 64, 2, 4, 2, 320), "experts": small_mixture()}
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders)
        for kind, names in {"dense": DENSE, "experts": WITH_EXPERTS}.items():
            shapes[kind].save_pretrained(f"{own}/{kind}")
            flags = FLAGS | {"model": f"{own}/{kind}"}
            data = shared.load_data(ddp_pretrain, ddp_pretrain.Config(**flags))
            rows = table(Path(folders[0]) / f"{kind}_runs", names, data, flags)
            dist.barrier()
            if dist.get_rank() == 0:
                print_table(names, rows)
    shared.leave()


if __name__ == "__main__":
    main()
