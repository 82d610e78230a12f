"""The five collectives by hand, from sends and receives, beside PyTorch's own.

    torchrun --standalone --nproc-per-node=4 by_hand/collectives.py

A collective is a call that every rank of a group makes. Reduce-scatter and all-gather pass tensors
around a ring: each rank sends to the next rank only, and all ranks send at the same time. An
all-reduce is a reduce-scatter and then an all-gather.
"""

import os

import torch
from torch import distributed as dist

dist.init_process_group()  # NCCL for tensors on GPUs, gloo for those in CPU memory
RANK, RANKS = dist.get_rank(), dist.get_world_size()
SENT = []  # what this rank sends by hand: the bytes of each call
if torch.cuda.is_available():
    torch.cuda.set_device(RANK % torch.cuda.device_count())
    torch.set_default_device("cuda")


def exchange(outgoing, to, source):
    """Send a tensor to one rank, and receive a tensor of equal size from another."""
    arrived = torch.empty_like(outgoing)
    calls = [dist.P2POp(dist.isend, outgoing, to), dist.P2POp(dist.irecv, arrived, source)]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    SENT.append(outgoing.nbytes)
    return arrived


def pass_on(outgoing):
    """Send to the next rank of the ring, and receive from the rank before."""
    return exchange(outgoing, (RANK + 1) % RANKS, (RANK - 1) % RANKS)


def broadcast(tensor):
    """Every rank gets rank 0's tensor, from one rank to the next. The last rank sends nothing."""
    tensor = tensor.clone()
    if RANK > 0:
        dist.recv(tensor, RANK - 1)
    if RANK < RANKS - 1:
        dist.send(tensor, RANK + 1)
        SENT.append(tensor.nbytes)
    return tensor


def all_gather(piece):
    """Each rank has one piece of a tensor, and gets the full tensor."""
    pieces = [piece] * RANKS
    for step in range(RANKS - 1):
        # Pass on the piece that arrived last, at first this rank's own.
        piece = pass_on(piece)
        pieces[(RANK - step - 1) % RANKS] = piece
    return torch.cat(pieces)


def reduce_scatter(tensor):
    """Each rank has a full tensor, and gets one piece of the sum over the ranks."""
    pieces = tensor.chunk(RANKS)
    total = pieces[(RANK - 1) % RANKS]
    for step in range(RANKS - 1):
        # A partial sum travels around the ring and ends at the rank that keeps it. Each rank on
        # its way adds its own piece.
        total = pass_on(total) + pieces[(RANK - step - 2) % RANKS]
    return total


def all_reduce(tensor):
    """Each rank has a full tensor, and gets the sum over the ranks."""
    return all_gather(reduce_scatter(tensor))


def all_to_all(tensor):
    """Each rank has a piece for every rank, and gets the pieces that the ranks have for it."""
    pieces = list(tensor.chunk(RANKS))
    arrived = pieces.copy()  # its own piece stays
    for shift in range(1, RANKS):
        to, source = (RANK + shift) % RANKS, (RANK - shift) % RANKS
        arrived[source] = exchange(pieces[to], to, source)
    return torch.cat(arrived)


def with_pytorch(name, tensor):
    if name == "all_gather":
        pieces = [torch.empty_like(tensor) for _ in range(RANKS)]
        dist.all_gather(pieces, tensor)
        output = torch.cat(pieces)
    elif name == "reduce_scatter":
        output = tensor.new_empty(len(tensor) // RANKS)
        dist.reduce_scatter(output, list(tensor.chunk(RANKS)))
    elif name == "all_to_all":
        output = torch.empty_like(tensor)
        dist.all_to_all_single(output, tensor)
    else:
        output = tensor.clone()
        dist.broadcast(output, 0) if name == "broadcast" else dist.all_reduce(output)
    return output


# --- Small numbers to look at, then a million to compare and to count -----------------------------
COLLECTIVES = [broadcast, all_gather, reduce_scatter, all_reduce, all_to_all]
NUMBERS = 1_048_560  # of a full tensor; 1 to 6 or 8 ranks can split it evenly
say = print if RANK == 0 else lambda *_, **__: None
say(__doc__)
for collective in COLLECTIVES:
    count = 1 if collective is all_gather else RANKS
    before = 10 * (RANK + 1) + torch.arange(count)  # rank 2 has 30, 31, ...
    rows = [None] * RANKS
    dist.all_gather_object(rows, (before.tolist(), collective(before).tolist()))
    for rank, (old, new) in enumerate(rows):
        say(f"{collective.__name__:14}  rank {rank}  {old!s:20} ->  {new}")
    say()

seen = []
torch.manual_seed(RANK)  # each rank draws other numbers
for collective in COLLECTIVES:
    name = collective.__name__
    tensor = torch.randn(NUMBERS // RANKS if collective is all_gather else NUMBERS)
    SENT.clear()
    output = collective(tensor)
    theirs = with_pytorch(name, tensor)
    difference = ((output - theirs).abs().max() / theirs.abs().max()).item()
    seen.append((name, sum(SENT), sum(SENT) / (4 * NUMBERS), difference))
say(f"| of {4 * NUMBERS:,} bytes | rank 0 sends | in full tensors | relative difference |")
say("| --- | --- | --- | --- |")
for name, sent, parts, difference in seen:
    say(f"| {name} | {sent:,} | {parts:.2f} | {difference:.1e} |", flush=True)
dist.barrier()
os._exit(0)  # skip the regular exit, in which gloo's threads can abort
