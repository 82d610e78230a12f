#!/usr/bin/env bash
# dist.all_reduce of a view with gaps, such as a column of a matrix, on CPUs. Expected: the sums in
# the view, as for a transposed matrix, or the error that NCCL raises ("Tensors must be contiguous").
# Seen with torch 2.13.0, gloo, 2 ranks and the first column of [[0, 1, 2], [3, 4, 5]]:
#
#   - all_reduce raises nothing, and sums the first two numbers in memory. So the column is 0, 3 in
#     place of 0, 6, and the 1 beside it is 2;
#   - broadcast sends these two numbers as well. On the other rank, the second number of the column
#     stays as it was, and the number beside the first one is overwritten;
#   - all_reduce of the transposed matrix, which has no gaps, is right.
#
# Fails if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/reduce.py" <<'END'
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()


def matrix():
    return torch.arange(6.0).view(2, 3)


transposed = matrix().t()
dist.all_reduce(transposed)
assert torch.equal(transposed, 2 * matrix().t())

summed = matrix()
dist.all_reduce(summed[:, 0])
received = matrix() * (1 + 9 * rank)  # rank 0 has the matrix, rank 1 ten times that
dist.broadcast(received[:, 0], 0)
if rank == 1:
    print("all_reduce of the first column:", summed.tolist())
    print("broadcast of the first column:", received.tolist())
    assert summed.tolist() == [[0, 2, 2], [3, 4, 5]], "all_reduce has changed"
    assert received.tolist() == [[0, 1, 20], [30, 40, 50]], "broadcast has changed"
dist.destroy_process_group()
END
OMP_NUM_THREADS=1 "$folder/env/bin/torchrun" --standalone --nproc-per-node=2 "$folder/reduce.py"
