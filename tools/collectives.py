"""Which collectives a rank really issues in a step, their bytes, and between which ranks.

    torchrun --standalone --nproc-per-node=2 tools/collectives.py SCRIPT [flags of SCRIPT]

Runs a few steps of a script on its own data, and prints the collectives of rank 0 in one of them.
tools/dry_run.py watches its fake ranks in the same way.
"""

import dataclasses
from typing import Any

import shared
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KINDS = {  # by their names in the dispatcher
    "allgather_": "all-gather", "_allgather_base_": "all-gather",
    "all_gather_into_tensor": "all-gather", "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter", "allreduce_": "all-reduce",
    "all_reduce": "all-reduce", "broadcast_": "broadcast", "all_to_all_single": "all-to-all",
    "alltoall_base_": "all-to-all", "send": "send", "recv_": "receive",
}  # fmt: skip


@dataclasses.dataclass
class Collective:
    """One call. `bytes` is the size of the full tensor that is gathered, reduced or exchanged."""

    kind: str
    group: str
    ranks: int
    bytes: int

    @property
    def sent(self) -> float:
        """Return the bytes that each rank sends if the ranks form a ring."""
        if self.kind == "receive":
            return 0
        if self.kind == "send":
            return self.bytes
        rounds = 2 if self.kind == "all-reduce" else 1
        return rounds * self.bytes * (self.ranks - 1) / self.ranks


class Ledger(TorchDispatchMode):
    """While entered, notes in `calls` the collectives that this rank issues."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Collective] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled blocks stay compiled: they have no collectives

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.distributed.tensor import DTensor

        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operations on the local shard come by on their own
        result = func(*args, **kwargs or {})
        if func.namespace in ("c10d", "_c10d_functional") and func._opname in KINDS:
            self.note(func, args, result)
        return result

    def note(self, func: Any, arguments: tuple, result: Any) -> None:
        sides = [
            sum(leaf.nbytes for leaf in tree_leaves(side) if torch.is_tensor(leaf))
            # c10d: output and input, or one that is both. Functional: input, and a new output.
            for side in (*arguments[:2], result)
        ]
        if func.namespace == "c10d":
            boxed = next(each for each in arguments if isinstance(each, torch.ScriptObject))
            group = dist.ProcessGroup.unbox(boxed)
        else:
            group = dist.distributed_c10d._resolve_process_group(arguments[-1])
        name = group.group_desc.removeprefix("mesh_").replace("default_pg", "all").split(":")[0]
        kind = KINDS[func._opname]
        if func._opname == "all_to_all_single" and 1 < group.size() == 1 + arguments[2].count(0):
            if not arguments[2][group.rank()]:
                kind = "send"  # everything goes to one other rank, as ring attention does
        self.calls.append(Collective(kind, name, group.size(), max(sides)))


def table(calls: list[Collective]) -> str:
    """Return Markdown: calls, bytes and what each rank sends, by kind and group."""
    rows: dict[tuple, list[Collective]] = {}
    for call in calls:
        rows.setdefault((call.kind, call.group, call.ranks), []).append(call)
    total = sum(call.sent for call in calls) or 1
    lines = [
        "| collective | ranks | calls | tensors | sent by a rank | share |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for (kind, group, ranks), same in rows.items():
        size, sent = sum(call.bytes for call in same), sum(call.sent for call in same)
        lines.append(
            f"| {kind} | {ranks} ({group}) | {len(same)} | {size / 2**20:,.2f} MiB | "
            f"{sent / 2**20:,.2f} MiB | {sent / total:.0%} |"
        )
    return "\n".join(lines)


def main() -> None:
    session = shared.Session(*shared.script_and_config(__doc__))
    batches = session.batches(0, 3)
    for _ in range(2):  # DDP builds new buckets in its second step
        session.train_step(next(batches))
    with Ledger() as ledger:
        session.train_step(next(batches))
    if dist.get_rank() == 0:
        print(table(ledger.calls))
    session.close()
    shared.leave()


if __name__ == "__main__":
    main()
