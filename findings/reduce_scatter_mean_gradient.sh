#!/usr/bin/env bash
# torch.distributed.nn.functional has collectives with a backward. Expected: the gradient of the
# mean over N ranks is 1/N of that of the sum, or ReduceOp.AVG is refused. Seen with torch 2.13.0,
# gloo, 2 ranks and the loss that sums all outputs of all ranks:
#
#   - all_reduce: the sum's gradient is 2, the mean's 1, as it should be;
#   - reduce_scatter: the sum's gradient is 1, as it should be, and the mean's is 1 as well, in place
#     of 0.5. The output is the right mean. There is no error and no warning about it;
#   - all_reduce with ReduceOp.MAX gives each rank the largest of the ranks' incoming gradients, even
#     a rank that does not hold the maximum. Its gradient should be 0.
#
# AdamW hides a constant factor, but clipping does not. Sums, divided afterwards, are right. The
# private torch.distributed._functional_collectives raises for both in backward. The cause is
# _Reduce_Scatter.backward in torch/distributed/nn/functional.py, which does not look at the
# operation, and _AllReduce.backward, which uses it again. Fails if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/gradients.py" <<'END'
import warnings

import torch
import torch.distributed as dist

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # they say that these functions are deprecated
    from torch.distributed.nn.functional import all_reduce, reduce_scatter

    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def all_reduced(x, op):
        return all_reduce(x * 1, op)

    def scattered(x, op):
        return reduce_scatter(torch.zeros(1), [x[:1], x[1:]], op)

    seen = {}
    for collective in (all_reduced, scattered):
        for name, op in (("sum", dist.ReduceOp.SUM), ("mean", dist.ReduceOp.AVG)):
            x = torch.tensor([1.0, 3.0]).add(rank).requires_grad_()
            output = collective(x, op)
            output.sum().backward()
            seen[f"{collective.__name__}, {name}"] = (output.tolist(), x.grad.tolist())
    x = torch.tensor([float(rank)], requires_grad=True)  # rank 1 holds the maximum
    output = all_reduced(x, dist.ReduceOp.MAX)
    output.sum().backward()
    seen["all_reduced, max"] = (output.tolist(), x.grad.tolist())

if rank == 0:
    for name, (output, gradient) in seen.items():
        print(f"{name}: output {output}, gradient {gradient}")
    assert seen == {
        "all_reduced, sum": ([3, 7], [2, 2]),
        "all_reduced, mean": ([1.5, 3.5], [1, 1]),
        "scattered, sum": ([3], [1, 1]),
        "scattered, mean": ([1.5], [1, 1]),
        "all_reduced, max": ([1], [1]),
    }
dist.destroy_process_group()
END
OMP_NUM_THREADS=1 "$folder/env/bin/torchrun" --standalone --nproc-per-node=2 "$folder/gradients.py"
