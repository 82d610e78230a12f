"""Update small models with Muon, for known gradients; test_muon.py compares the weights.

See cases.py.
"""

import hashlib
from collections.abc import Iterator

import cases  # also adds the root, tools and bench to sys.path
import collectives
import script_parts as parts
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

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
    model_config = parts.build_config(config, common.load_tokenizer("bytes"))
    model = parts.build_model(script, model_config, config)
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
    script.set_momentum(config, model)
    model = script.parallelize(model, config, CPU)
    optimizer = script.build_optimizer(model, config)
    parameters = dict(model.named_parameters())
    if double:
        optimizer.dtype = torch.float64
    dist.all_to_all_single = counted
    for step in gradients(model, trained):
        for name, full in step.items():
            sharded = parameters[name]
            sharded.grad = distribute_tensor(full, sharded.device_mesh, sharded.placements)
        sent.clear()
        with collectives.Ledger() as ledger:
            optimizer.step()
        optimizer.zero_grad()
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


def main() -> None:
    script.init_process_group(script.Config(micro_batch_tokens=512))
    cases.leave(cases.each(lambda case, flags: update(flags)))


if __name__ == "__main__":
    main()
