#!/usr/bin/env bash
# A hook on a parameter's gradient (Tensor.register_hook), as for training only the rows of new
# tokens in an embedding. Expected: fully_shard runs it, as DDP does, or refuses it. Seen with torch
# 2.13.0, gloo, 2 ranks and a hook that returns the gradient times 0, so nothing should train:
#
#   - DDP runs it, and the weight stays as it was;
#   - under fully_shard it never runs, and the weight is trained. It does not matter if the hook was
#     registered on the parameter before fully_shard, or after it on the sharded one;
#   - register_post_accumulate_grad_hook, called after fully_shard, does run. Its gradient is the
#     reduced shard. Registered before fully_shard, it is lost as well.
#
# There is no error and no warning. The reason is that FSDP assigns the reduced gradient itself
# (foreach_reduce in torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py), so autograd never
# accumulates into the parameter that carries the hook. See also meta-pytorch/torchrec#4268. Fails
# if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/hooks.py" <<'END'
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def zero(parameter):
    parameter.grad.mul_(0)


def is_frozen(wrap, register, first):
    """Whether a hook that zeroes the gradient, registered before or after `wrap`, has an effect."""
    torch.manual_seed(0)
    model = nn.Linear(2, 2, bias=False)
    before = model.weight.detach().clone()
    if first == "hook":
        register(model.weight)
    wrapped = wrap(model)
    if first == "wrap":
        register(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    wrapped(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    after = model.weight.detach()
    return torch.equal(after.full_tensor() if wrap is fully_shard else after, before)


dist.init_process_group("gloo")
strategies = {"DDP": DistributedDataParallel, "fully_shard": fully_shard}
hooks = {
    "register_hook": lambda parameter: parameter.register_hook(lambda gradient: gradient * 0),
    "post_accumulate": lambda parameter: parameter.register_post_accumulate_grad_hook(zero),
}
seen = {
    f"{strategy}, {hook}, {first} first": is_frozen(wrap, register, first)
    for strategy, wrap in strategies.items()
    for hook, register in hooks.items()
    for first in ("hook", "wrap")
}
if dist.get_rank() == 0:
    for case, frozen in seen.items():
        print(f"{case}: {'frozen' if frozen else 'trained'}")
    frozen = {case for case, has_effect in seen.items() if has_effect}
    assert frozen == {
        "DDP, register_hook, hook first",
        "DDP, register_hook, wrap first",
        "DDP, post_accumulate, hook first",
        "DDP, post_accumulate, wrap first",
        "fully_shard, post_accumulate, wrap first",
    }
dist.destroy_process_group()
END
OMP_NUM_THREADS=1 "$folder/env/bin/torchrun" --standalone --nproc-per-node=2 "$folder/hooks.py"
