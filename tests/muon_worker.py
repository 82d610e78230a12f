"""Update small models with Muon, for known gradients; test_muon.py compares the weights.

See cases.py.
"""

import hashlib
from collections.abc import Iterator

import cases  # also adds the root and bench to sys.path
import collectives
import shared
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import common
import fsdp2_muon_pretrain as script

STEPS, CPU = 3, torch.device("cpu")


def gradients(model: torch.nn.Module, trained: str) -> Iterator[dict[str, torch.Tensor]]:
    """Yield for each step random gradients of the parameters whose name contains `trained`.

    They have few large singular values, as real ones.
    """
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        found = {}
        for name, parameter in model.named_parameters():
            full = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            if full.ndim > 1:
                full = full * torch.arange(1.0, 1 + full.shape[-1]) ** -1.0
            if trained in name:
                found[name] = full
        yield found


def model_of(flags: dict, double: bool) -> tuple:
    """Return the script's model on the meta device, and its config."""
    config = script.Config(learning_rate=0.02, micro_batch_tokens=512, **flags)
    model = script.build_model(
        config, script.build_model_config(config, common.load_tokenizer("bytes"))
    )
    return (model.double() if double else model), config


def digest(tensors: dict[str, torch.Tensor]) -> str:
    return hashlib.sha1(b"".join(t.numpy().tobytes() for t in tensors.values())).hexdigest()


def update(flags: dict) -> dict:
    """Return the full weights after some steps, and what the ranks sent in one of them."""
    flags = dict(flags)
    trained, double = flags.pop("trained", ""), flags.pop("double", True)
    sent = []
    exchange = dist.all_to_all_single

    def counted(output, flat, received, given, group):
        others = sum(given) - given[dist.get_rank(group)]
        sent.append(others * flat.itemsize)
        exchange(output, flat, received, given, group)

    model, config = model_of(flags, double)
    model, optimizer = shared.build(script, config, model, CPU)
    parameters = dict(model.named_parameters())
    if double:
        for parameter in parameters.values():
            if hasattr(parameter, "muon_dtype"):
                parameter.muon_dtype = torch.float64
    dist.all_to_all_single = counted
    for step in gradients(model, trained):
        for name, full in step.items():
            sharded = parameters[name]
            sharded.grad = distribute_tensor(full, sharded.device_mesh, sharded.placements)
        sent.clear()
        with collectives.Ledger() as ledger:
            script.optimizer_step(model, optimizer)
    dist.all_to_all_single = exchange
    assert all(parameter.grad is None for parameter in parameters.values())
    weights = {
        name: parameter.detach().full_tensor().clone() if isinstance(parameter, DTensor) else None
        for name, parameter in parameters.items()
    }
    copies = common.gather(digest(weights))
    moments = {name: sorted(optimizer.state.get(p, {})) for name, p in parameters.items()}
    return {
        "weights": weights,
        "moments": moments,
        "equal_on_all_ranks": len(set(copies)) == 1,
        "sent": sum(common.gather(sum(sent))),
        "ledger": sum(common.gather(sum(call.sent for call in ledger.calls))),
    }


def momentum(rows: int) -> float:
    """Return the momentum of a model with one matrix, [rows, 1000]."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    zeros = distribute_tensor(torch.zeros(rows, 1000), mesh, [Shard(0)])
    matrix = torch.nn.Parameter(zeros)
    matrix.muon_dtype = torch.float32
    matrix.grad = torch.ones_like(zeros)
    optimizer = script.Muon([matrix], lr=0.0)
    orthogonalize, script.orthogonalize = script.orthogonalize, lambda directions, _: directions
    optimizer.step()
    script.orthogonalize = orthogonalize
    return 1 - optimizer.state[matrix]["exp_avg"].to_local()[0, 0].item()


def main() -> None:
    script.init_process_group(script.Config(micro_batch_tokens=512))
    seen = cases.each(lambda case, flags: update(flags))
    seen["momentum"] = {"small": momentum(9_999), "large": momentum(10_000)}
    cases.leave(seen)


if __name__ == "__main__":
    main()
