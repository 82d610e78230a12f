"""What a script would need on N GPUs, computed on this CPU: memory per rank and communication.

    python tools/dry_run.py SCRIPT --ranks N [--rank 0] [--ranks_per_node 8] [--vocabulary V]
        [--memory_gib 24] [--link_gbps 400 --tflops 400] [flags of SCRIPT]

Builds the script's own model, strategy and optimizer, and runs its own train step, as one rank of N
under PyTorch's fake process group, with fake tensors: they have shapes, but no memory. All ranks
are alike, except for the stages of a pipeline: --rank 0 is in the first one, N-1 in the last one.
Prints the memory of a rank and the collectives of one optimizer step, beside the closed form.
Without --global_batch_tokens, a step is one micro-batch per rank. `--precision auto` is bf16, as on
a GPU, and --compile is left out. All sequences have the longest length.

A step of fsdp2_grpo.py begins with the all-gather before sampling, and includes the --teacher (a
config.json is enough) and the reference. Keys and values of sampling are left out (docs/scale.md).

Sizes are those of PyTorch's tensors. The allocator, CUDA and NCCL need memory beside them: leave a
tenth of the GPU free.
"""

import argparse
import contextlib
import dataclasses
import gc
import importlib
import math
import os
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # not needed
warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # FSDP1 does
warnings.filterwarnings("ignore", ".*NO_SHARD")  # FSDP1, on a single rank

import collectives  # noqa: E402
import shared  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import _disable_current_modes  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from torch.utils.flop_counter import (  # noqa: E402
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)
from torch.utils.weak import WeakIdKeyDictionary  # noqa: E402

import common  # noqa: E402
from model import transformer_blocks  # noqa: E402
from run import launch, micro_batches_per_rank, parse_config  # noqa: E402

SCRIPT_NAMES = shared.STRATEGIES + shared.MUON + shared.INSIDE
SCRIPTS = [f"{name}_pretrain" for name in SCRIPT_NAMES]
SCRIPTS += ["fsdp2_sft", "fsdp2_lora", "fsdp2_grpo"]
CPU = torch.device("cpu")
ATTENTION = {  # the CPU's, which the registry lacks: how to count it, its tensors, `is_causal`
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (sdpa_flop_count, 3, 4),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        sdpa_backward_flop_count, 4, 7,
    ),
}  # fmt: skip
GIB, MIB = 2**30, 2**20


# --- Watching one rank ----------------------------------------------------------------------------


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the storages behind the tensors, each counted once."""
    return sum({storage._cdata: storage.nbytes() for storage in map(storage_of, tensors)}.values())


@dataclasses.dataclass
class Piece:
    """A living storage."""

    kind: str
    bytes: int


class Watch(collectives.Ledger):
    """Also tracks how much memory is held, and for what.

    Works on real and on fake tensors, under every strategy. (PyTorch's own MemTracker only supports
    FSDP2: its module hooks fail with FSDP1 and DDP.)
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.pieces: WeakIdKeyDictionary = WeakIdKeyDictionary()  # storage -> Piece
        self.held: Counter[str] = Counter()  # bytes, by kind
        self.peak: dict[str, int] = {}  # at the moment when the device holds most
        self.elsewhere: tuple[str, ...] = ()  # kinds that are not on the device

    def __enter__(self) -> "Watch":
        resize, watch = torch.UntypedStorage.resize_, self

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            """FSDP calls this to free the parameters that it gathered, and to get memory again."""
            result = resize(storage, size)
            watch.add(storage, "gathered parameters")
            return result

        self.resize, torch.UntypedStorage.resize_ = resize, resize_
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self.resize
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 1.0 if args[0].is_floating_point() else 1  # fake tensors have no numbers
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if result is NotImplemented:
            return result
        packet = func._overloadpacket
        if packet in flop_registry:
            self.flops += flop_registry[packet](*args, **kwargs or {}, out_val=result)
        elif packet in ATTENTION:
            count, tensors, causal = ATTENTION[packet]
            half = args[causal:] == (True,)  # of all pairs of tokens
            self.flops += count(*(x.shape for x in args[:tensors])) // (1 + half)
        elif packet is torch.ops.aten._grouped_mm:  # the registry lacks it too
            self.flops += 2 * math.prod(args[0].shape[-2:]) * args[1].shape[-1]
        if func._opname == "split_with_sizes_copy":  # FSDP2 splits a gathered tensor
            for tensor in kwargs["out"]:
                self.add(tensor.untyped_storage(), "gathered parameters")
        # What forward creates is kept for backward, or soon freed.
        kind = "activations" if torch._C._current_graph_task_id() == -1 else "backward"
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor.untyped_storage(), kind, known_better=False)
        return result

    def note(self, func: Any, arguments: tuple, result: Any) -> None:
        super().note(func, arguments, result)
        if func.namespace != "c10d":  # functional collectives, of TP, CP and EP: activations
            return
        kind = {"all-gather": "gathered parameters", "reduce-scatter": "gradients"}
        for tensor in tree_leaves(arguments[0]):  # the output
            if isinstance(tensor, torch.Tensor):
                self.add(tensor.untyped_storage(), kind.get(self.calls[-1].kind))

    def add(self, storage: torch.UntypedStorage, kind: str | None, known_better: bool = True):
        """Note that a storage was created, is now known to be of a kind, or has another size."""
        piece = self.pieces.get(storage)
        if piece is None:
            piece = self.pieces[storage] = Piece(kind or "activations", 0)
            weakref.finalize(storage, self.freed, piece)
        self.held[piece.kind] -= piece.bytes
        if known_better and kind:
            piece.kind = kind
        piece.bytes = storage.nbytes()
        self.held[piece.kind] += piece.bytes
        if self.on_device(self.held) > self.on_device(self.peak):
            self.peak = {kind: size for kind, size in self.held.items() if size}

    def on_device(self, held: dict[str, int]) -> int:
        return sum(size for kind, size in held.items() if kind not in self.elsewhere)

    def restart(self) -> None:
        """Forget what has been seen, except for what is held now."""
        self.calls, self.peak, self.flops = [], {}, 0

    def freed(self, piece: Piece) -> None:
        self.held[piece.kind] -= piece.bytes


# --- The script, on fake tensors ------------------------------------------------------------------


def be_rank(rank: int, ranks: int, ranks_per_node: int) -> None:
    """Set the environment variables that torchrun would set."""
    local_ranks = min(ranks, ranks_per_node)
    told = {"RANK": rank, "LOCAL_RANK": rank % local_ranks, "LOCAL_WORLD_SIZE": local_ranks}
    os.environ |= {name: str(value) for name, value in told.items()}
    os.environ["WORLD_SIZE"] = str(ranks)


@contextlib.contextmanager
def fake_ranks() -> Iterator[None]:
    """Join a fake process group as the rank that `be_rank` has set. No other rank exists."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore

    _clear_sharding_prop_cache()  # it may hold groups of another rank
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def allocate(
    model: torch.nn.Module, modules: Iterable[torch.nn.Module], seed: int, device: torch.device
) -> None:
    """Replace the scripts' `initialize`: give modules shapes on the device instead of numbers."""
    for module in reversed(list(modules)):
        for name, parameter in module.named_parameters(recurse=False):
            empty = torch.empty_like(parameter, device=device)
            setattr(module, name, torch.nn.Parameter(empty, parameter.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device=device)


def unseen(function: Callable) -> Callable:
    """Return `function`, so that it is neither watched nor runs on fake tensors."""

    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        with _disable_current_modes():
            return function(*arguments, **keywords)

    return wrapped


def exchange_evenly(expert_of_row: torch.Tensor, num_experts: int, group: Any) -> tuple:
    """Replace `exchange_counts`, as if routers chose evenly: fake tensors cannot be counted."""
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    ranks, num_rows = group.size(), len(expert_of_row)
    counts = expert_of_row.new_full((ranks, num_experts // ranks), num_rows // num_experts)
    rows = [num_rows // ranks] * ranks
    return all_to_all_single_autograd(counts, None, None, group), rows, rows


def numbers_of(tolist: Callable) -> Callable:
    """Return a `tolist` that gives ones for fake tensors, which have no numbers."""

    def replaced(tensor: torch.Tensor) -> list:
        return [1.0] * len(tensor) if isinstance(tensor, FakeTensor) else tolist(tensor)

    return replaced


def of_any_precision(grouped_mm: Callable) -> Callable:
    """Allow grouped matmuls in fp32: PyTorch computes them, but not their shapes."""

    def shapes(a: torch.Tensor, b: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
        result = grouped_mm(a.bfloat16(), b.bfloat16(), *arguments, **keywords)
        return result.to(a.dtype)

    return shapes


def without_others(parallel: type) -> type:
    """Return a DDP that needs no other rank at its start, and whose all-reduce `Watch` sees."""

    compute = dist._compute_bucket_assignment_by_size

    def as_rebuilt(parameters: list, limits: list, *more: Any) -> tuple[list, list]:
        """DDP rebuilds its buckets after the first step, in about reverse order of parameters."""
        limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, 25 * MIB]
        buckets, limits = compute(parameters[::-1], limits, *more)
        last = len(parameters) - 1
        return [[last - i for i in bucket] for bucket in buckets[::-1]], limits[::-1]

    def all_reduce(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        dist.all_reduce(bucket.buffer())
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    class Reducer:
        """DDP's own, which already has the buckets that it would now rebuild."""

        def __init__(self, reducer: Any):
            self.reducer = reducer

        def __getattr__(self, name: str) -> Any:
            return getattr(self.reducer, name)

        def _rebuild_buckets(self) -> bool:
            return False

    class Parallel(parallel):
        def __init__(self, *arguments: Any, **keywords: Any):
            dist._compute_bucket_assignment_by_size = as_rebuilt
            super().__init__(*arguments, **keywords)
            dist._compute_bucket_assignment_by_size = compute
            self.register_comm_hook(None, all_reduce)
            self.reducer = Reducer(self.reducer)

    return Parallel


@contextlib.contextmanager
def adapted(script: Any) -> Iterator[None]:
    """Replace what needs real numbers or ranks. Strategy and train step stay the script's own."""
    import torch.distributed.fsdp._flat_param as fsdp1
    import torch.nn.parallel.distributed as ddp
    import transformers.masking_utils as masking
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    changes: list[tuple[Any, str, Any]] = [
        (script, "initialize", allocate),
        (common, "load_weights", lambda *_: None),
        (torch.Tensor, "tolist", numbers_of(torch.Tensor.tolist)),
        (ddp, "_verify_param_shape_across_processes", lambda *_: None),
        (fsdp1, "_data_ptr_allocated", lambda tensor: tensor.untyped_storage().nbytes() > 0),
        # For fake tensors, transformers creates masks that it leaves out for real ones.
        (masking, "is_tracing", lambda *_: False),
    ]
    # DTensor tries operators on full shapes, in a fake mode of its own.
    trial = ShardingPropagator, "_propagate_tensor_meta_non_cached"
    for owner, name in (trial, (DeviceMesh, "__init__")):
        changes.append((owner, name, unseen(getattr(owner, name))))
    grouped_mm = torch._meta_registrations._meta_grouped_mm_common
    changes.append(
        (torch._meta_registrations, "_meta_grouped_mm_common", of_any_precision(grouped_mm))
    )
    for name in ("new_subgroups_by_enumeration", "new_subgroups"):
        changes.append((dist, name, unseen(getattr(dist, name))))
    for name in ("init_device_mesh", "build_mesh"):
        if hasattr(script, name):
            changes.append((script, name, unseen(getattr(script, name))))
    if hasattr(script, "exchange_counts"):
        changes.append((script, "exchange_counts", exchange_evenly))
    if hasattr(script, "DistributedDataParallel"):
        parallel = without_others(script.DistributedDataParallel)
        changes.append((script, "DistributedDataParallel", parallel))
    before = [getattr(owner, name) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name, _), value in zip(changes, before):
            setattr(owner, name, value)


@dataclasses.dataclass
class Frozen:
    """A parameter that is not trained."""

    shape: torch.Size
    size: int  # bytes of a number that a rank keeps; codes of NF4 count as numbers of one byte
    in_block: bool  # or in another unit that is freed after its forward


@dataclasses.dataclass
class Report:
    """Memory and communication of one rank in an optimizer step; sizes in bytes."""

    rank: int
    ranks: int
    numbers: int  # parameters of the model
    own: int  # parameters of the stage, if there are stages
    micro_batches: int
    elsewhere: tuple[str, ...]  # kinds of memory that are offloaded
    parameters: int
    gradients: int
    optimizer: int
    peak: dict[str, int]
    calls: list[collectives.Collective]
    flops: int
    root: list[torch.Size]  # shapes of the parameters outside the blocks
    experts: list[torch.Size]  # shapes of the experts' parameters, [experts, ...]
    exchanged: int  # numbers in the matrices that Muon exchanges
    frozen: list["Frozen"]  # parameters beside adapters, if there are adapters
    adapters: list[torch.Size]  # shapes of the adapters' parameters
    others: list["Frozen"]  # parameters of a reference and a teacher
    shape: Any  # the model's configuration

    @property
    def frozen_bytes(self) -> int:
        """Return the bytes of this rank's shards of a reference and a teacher."""
        return self.peak.get("frozen parameters", 0)

    @property
    def sent(self) -> float:
        return sum(call.sent for call in self.calls)

    @property
    def on_device(self) -> int:
        """Return the peak, without what is offloaded."""
        return sum(size for kind, size in self.peak.items() if kind not in self.elsewhere)


def load_others(script: Any, config: Any, shape: Any) -> dict[str, Any]:
    """Return the reference and the teacher of an RL step, by the names that the script has."""
    run = SimpleNamespace(config=config, model_config=shape, device=CPU)
    wanted = {}
    if getattr(config, "reference_weight", 0):
        wanted["reference_log_probs"] = config.init_from
    if getattr(config, "teacher", None):
        wanted["teacher_log_probs"] = config.teacher
    return {name: script.load_frozen(directory, run) for name, directory in wanted.items()}


def run_step(
    script: Any, config: Any, model: Any, optimizer: Any, batch: Any, others: dict[str, Any]
) -> None:
    """Run an optimizer step; in RL, after sampling's all-gather and the other models."""
    if hasattr(script, "unsharded_parameters"):
        with script.unsharded_parameters(model, config):
            pass
        script.add_log_probs(others, batch.micro_batches, CPU)
    script.train_step(model, optimizer, batch, 1, config, CPU)


def observe(
    script: Any,
    config: Any,
    model: Any,
    optimizer: Any,
    batch: Any,
    watch: Watch,
    others: dict[str, Any],
) -> tuple[int, int, int]:
    """Watch the second optimizer step of a script.

    The first step creates the AdamW moments, and makes DDP's gradients views of its buckets.

    Returns:
        Bytes of this rank's parameters, gradients and moments.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # DDP: with ZeRO-1, the optimizer of a rank has some of them. LoRA: most are frozen.
    if getattr(config, "shard_optimizer", False) or hasattr(script, "LoraLinear"):
        parameters = list(model.parameters())
    run_step(script, config, model, optimizer, batch, others)
    moments = [value for state in optimizer.state.values() for value in state.values()]
    gc.collect()  # recomputation leaves cycles of references
    for storage in list(watch.pieces):  # those left are DDP's buckets, and a few KiB
        watch.add(storage, "gradients")
    kinds = {"parameters": parameters, "optimizer state": moments}
    kinds["frozen parameters"] = [p for each in others.values() for p in each.parameters()]
    for kind, tensors in kinds.items():
        for tensor in tensors:
            watch.add(storage_of(tensor), kind)
    watch.restart()
    gradients: list[int] = []
    optimizer.register_step_pre_hook(
        lambda *_: gradients.append(nbytes(p.grad for p in parameters if p.grad is not None))
    )
    run_step(script, config, model, optimizer, batch, others)
    return nbytes(parameters), gradients[0], nbytes(moments)


def shape_of(config: Any) -> tuple[int, int]:
    """Return the number of sequences of a micro-batch and their length, the longest."""
    micro, multiple = config.micro_batch_tokens, config.pad_to_multiple_of
    length = math.ceil(config.max_length / multiple) * multiple
    return (1, micro) if config.batching == "packed" else (micro // length, length)


def batch_of(script: Any, config: Any) -> common.GlobalBatch:
    """Return this rank's micro-batches of a step.

    All tokens of a conversation are in the loss, which is the most that can be. In RL, answers are
    as long as they may be.
    """
    _, dp_size = shared.dp_rank_and_size(script, config)
    sequences, length = shape_of(config)
    ids = torch.zeros(sequences, length, dtype=torch.int64)
    micro_batch = {"input_ids": ids, "labels": ids}
    if script.__name__ in shared.MARKS:
        micro_batch["target_positions"] = torch.arange(sequences * length)
    if not hasattr(script, "unsharded_parameters"):
        number = micro_batches_per_rank(config, dp_size)
    else:
        number = math.ceil(config.prompts * config.answers / dp_size / sequences)
        positions = torch.arange(sequences * length).view(sequences, length)
        answered = positions[:, -config.answer_length :].flatten()
        micro_batch["target_positions"] = answered
    micro_batches = [
        {name: values.clone() for name, values in micro_batch.items()} for _ in range(number)
    ]
    if hasattr(script, "unsharded_parameters"):
        for each in micro_batches:
            zeros = torch.zeros(len(answered))
            each["loss_arguments"] = {"sampled_log_probs": zeros, "advantages": zeros.clone()}
    return common.GlobalBatch(
        micro_batches, num_targets=1, num_tokens=1, squared_lengths=1, padding_fraction=0.0
    )


def parameters_of(model: Any) -> list["Frozen"]:
    """Describe the parameters of a reference or a teacher; the last unit is the root's."""
    inside = set(transformer_blocks(model).parameters())
    if not model.config.tie_word_embeddings:
        inside |= set(model.get_input_embeddings().parameters())
    return [Frozen(p.shape, p.element_size(), p in inside) for p in model.parameters()]


def dry_run(script: Any, config: Any, vocabulary: int, watch: Watch | None = None) -> Report:
    """Build the model and train a step as the rank that `be_rank` has named, on fake tensors."""
    shape = shared.architecture(script, config, vocabulary)
    fake, watch = FakeTensorMode(allow_non_fake_inputs=True), watch or Watch()
    watch.elsewhere = elsewhere(config)
    if config.batching == "packed":  # as one document: no kernel keeps the square of attention
        changes = {"max_length": config.micro_batch_tokens, "pad_to_multiple_of": 1}
        config = dataclasses.replace(config, batching="bucketed", **changes)
    with fake_ranks(), adapted(script), fake, watch:
        model, optimizer = shared.build(script, shape, config, CPU)
        others = load_others(script, config, shape)
        batch = batch_of(script, config)
        kept = observe(script, config, model, optimizer, batch, watch, others)
        exchanged = [p for p in getattr(optimizer, "layouts", ()) if p.ndim == 2]
        frozen, adapters = [], []
        in_others = [each for other in others.values() for each in parameters_of(other)]
        if hasattr(script, "LoraLinear"):
            inside = set(transformer_blocks(model).parameters())
            adapters = [p.shape for p in model.parameters() if p.requires_grad]
            frozen = [
                Frozen(p.shape, p.element_size(), p in inside)
                for p in model.parameters()
                if not p.requires_grad
            ]
    with torch.device("meta"):
        from transformers import AutoModelForCausalLM

        full = AutoModelForCausalLM.from_config(shape)
    # A stage of a pipeline has some of the blocks, and of the rest what it needs.
    part = model if hasattr(config, "pipeline_parallel") else full
    lists = (module for module in part.modules() if isinstance(module, torch.nn.ModuleList))
    in_blocks = set(next(lists).parameters())
    return Report(
        rank=int(os.environ["RANK"]),
        ranks=int(os.environ["WORLD_SIZE"]),
        numbers=full.num_parameters(),
        own=sum(p.numel() for p in part.parameters()),
        micro_batches=len(batch.micro_batches),
        elsewhere=watch.elsewhere,
        parameters=kept[0],
        gradients=kept[1],
        optimizer=kept[2],
        peak=watch.peak,
        calls=watch.calls,
        flops=watch.flops,
        root=[p.shape for p in part.parameters() if p not in in_blocks],
        experts=[p.shape for p in full.parameters() if p.ndim == 3],
        exchanged=sum(p.numel() for p in exchanged),
        frozen=frozen,
        adapters=adapters,
        others=in_others,
        shape=shape,
    )


# --- What to say about it -------------------------------------------------------------------------


def closed_form(
    report: Report, script: Any, config: Any, numbers: float, experts: float = 0
) -> tuple[float, str]:
    """Return the bytes that a rank sends in a step by the textbook, and the formula.

    P: bytes of the parameters that are gathered, G: of the gradients that are reduced, N:
    ranks, k: micro-batches per step, S: ranks that shard, R: replicas (N = S R). With EP, X and Y
    are P and G of a rank's `experts`, 1/E of all, which are not in `numbers`. `sent_inside` adds
    what TP, CP, EP and PP send.
    """
    gathered, gradients = size_of_compute(config) * numbers, 4 * numbers
    ranks = report.ranks // getattr(config, "tensor_parallel", 1)  # with equal parts of the model
    ranks //= getattr(config, "pipeline_parallel", 1)
    micro_batches = report.micro_batches
    if script.__name__ == "ddp_pretrain":
        times, formula = (3, "(2G+P)") if config.shard_optimizer else (2, "2G")
        return times * gradients * (ranks - 1) / ranks, f"{formula}(N-1)/N"
    every = reduces_every_micro_batch(config)
    gathers, reductions = gathers_of_block(config), micro_batches if every else 1
    if keeps_between_micro_batches(config):
        passes, times = 1, ""
    else:
        passes, times = micro_batches, f"{gathers}k".removeprefix("1")
    shards = shards_of(report, config)
    sent = (gathers * passes * gathered + reductions * gradients) * (shards - 1) / shards
    formula = f"({times}P + {'k' if every else ''}G)(S-1)/S"
    if hasattr(config, "expert_parallel"):
        each = gathers * passes * size_of_compute(config) + reductions * 4
        sent += each * experts * (ranks - config.expert_parallel) / ranks
        formula += f" + ({times}X + {'k' if every else ''}Y)(N-E)/N"
    if shards == ranks:
        return sent, formula.replace("S", "N")
    replicas = ranks // shards
    fsdp1 = hasattr(config, "sharding_strategy")  # FSDP2 accumulates shards and all-reduces once
    all_reduces, times = (micro_batches, "k") if fsdp1 and every else (1, "")
    sent += all_reduces * 2 * gradients / shards * (replicas - 1) / replicas
    return sent, f"{formula} + {times}2(G/S)(R-1)/R"


def size_of_compute(config: Any) -> int:
    return 4 if config.precision == "fp32" else 2


def reduces_every_micro_batch(config: Any) -> bool:
    fsdp1 = hasattr(config, "sharding_strategy")
    every = getattr(config, "reduce_every_micro_batch", False)
    return every or fsdp1 and config.precision != "fp32"


def keeps_between_micro_batches(config: Any) -> bool:
    """Return whether parameters stay unsharded from the first micro-batch to the last."""
    if hasattr(config, "sharding_strategy"):
        return config.sharding_strategy == "shard_grad_op" and not reduces_every_micro_batch(config)
    return not getattr(config, "reshard_after_forward", False)  # a pipeline has no such flag


def gathers_of_block(config: Any) -> int:
    """Return how often a micro-batch gathers a block's parameters."""
    if hasattr(config, "sharding_strategy"):
        return 1 if config.sharding_strategy == "shard_grad_op" else 2
    return 1 if keeps_between_micro_batches(config) else 2


def shards_of(report: Report, config: Any) -> int:
    if hasattr(config, "tensor_parallel"):
        return report.ranks // config.tensor_parallel
    if hasattr(config, "pipeline_parallel"):
        return report.ranks // config.pipeline_parallel // config.dp_replicate
    if hasattr(config, "expert_parallel"):
        return report.ranks
    return next((call.ranks for call in report.calls if call.kind == "all-gather"), 1)


def sent_inside(report: Report, config: Any) -> tuple[float, str, float]:
    """Return the bytes that a rank sends for Muon, TP, CP, EP or PP, and their formula.

    Also returns what embedding, norms, head and loss add.

    L: blocks, T, C or E: ranks of a group, A: bytes of a micro-batch's [tokens, hidden size], A': A
    times experts per token, Q and K: bytes of its queries and keys (K/V heads are repeated if C
    exceeds them), M: bytes of the matrices that Muon exchanges. R blocks are recomputed, up to the
    last tensor that backward needs, and send again.
    """
    shape, (sequences, length) = report.shape, shape_of(config)
    tokens, size = sequences * length * report.micro_batches, size_of_compute(config)
    blocks = shape.num_hidden_layers
    again = {"none": 0, "selective": 0, "full": blocks}.get(config.activation_checkpointing)
    if again is None:
        again = int(blocks * float(config.activation_checkpointing))
    if report.exchanged:
        shards = shards_of(report, config)
        sent = 2 * report.exchanged * size * (shards - 1) / shards**2
        # Matrices differ in size, and the last ones may be fewer than ranks.
        uneven = sum(call.sent for call in report.calls if call.kind in ("all-to-all", "send"))
        letter = "N" if shards == report.ranks else "S"
        return sent, f" + 2M({letter}-1)/{letter}²", uneven - sent
    if ranks := getattr(config, "tensor_parallel", 0):
        share = tokens * shape.hidden_size * size * (ranks - 1) / ranks
        # Embedding and head: one each way. All-reduced: three numbers per token for the loss, and
        # the gradients of the norms' weights.
        norms = (2 * blocks + 1) * shape.hidden_size
        # Gradients that accumulate are fp32.
        every = reduces_every_micro_batch(config) or report.micro_batches == 1
        norms *= report.micro_batches * size if every else 4
        ends = 4 * share + 2 * (3 * 4 * tokens + norms) * (ranks - 1) / ranks
        times = "(8L+3R)" if again else "8L"
        return (8 * blocks + 3 * again) * share, f" + {times}kA(T-1)/T", ends
    if ranks := getattr(config, "context_parallel", 0):
        heads, head_size = shape.num_attention_heads, shape.hidden_size // shape.num_attention_heads
        if config.context_attention == "ring":
            keys = tokens * shape.num_key_value_heads * head_size * size
            turns = (ranks - 1) / ranks  # gradients of keys and values take one more
            times = "2L(3C-2)/C" + (" + 2R(C-1)/C" if again else "")
            sent = 2 * keys * (blocks * (2 * turns + 1) + again * turns)
            return (sent if ranks > 1 else 0.0), f" + kK({times})", 0.0
        width = head_size * (heads + max(shape.num_key_value_heads, ranks))
        share = tokens * width * size * (ranks - 1) / ranks**2
        times = "(4L+2R)" if again else "4L"
        return (4 * blocks + 2 * again) * share, f" + {times}k(Q+K)(C-1)/C²", 0.0
    if ranks := getattr(config, "expert_parallel", 0):
        layers, chosen = len(report.experts) // 2, shape.num_experts_per_tok
        share = chosen * tokens * shape.hidden_size * size * (ranks - 1) / ranks
        times = "(4L+2R)" if again else "4L"  # a token travels to each of its experts and back
        return (4 * layers + 2 * again) * share, f" + {times}kA'(E-1)/E", 0.0
    if (stages := getattr(config, "pipeline_parallel", 1)) > 1:
        stage = report.rank * stages // report.ranks
        neighbours = 1 if stage in (0, stages - 1) else 2
        # Hidden states go to the next stage, and their gradients to the one before.
        hidden = config.micro_batch_tokens * shape.hidden_size * size
        embedding = report.root[0].numel() * 4 / shards_of(report, config)
        tied = shape.tie_word_embeddings and neighbours == 1
        times = "" if neighbours == 1 else "2"
        return neighbours * report.micro_batches * hidden, f" + {times}kA", tied * embedding
    return 0.0, "", 0.0


def form_with_adapters(report: Report, config: Any) -> tuple[float, str, dict[str, float]]:
    """Return what `closed_form_of` does, if only adapters are trained.

    P: bytes of base and adapters that are gathered, H: of embedding, last norm and head,
    which are gathered only once per micro-batch, a: parameters of the adapters.
    """
    shards, compute = shards_of(report, config), size_of_compute(config)
    micro_batches = report.micro_batches
    once = keeps_between_micro_batches(config)
    gathers = [1, 1] if once else [2 * micro_batches, micro_batches]  # of a block and of the rest
    reductions = micro_batches if reduces_every_micro_batch(config) else 1

    def sent(padded: bool) -> float:
        def numbers(shape: torch.Size) -> int:
            rows = math.ceil(shape[0] / shards) * shards if padded else shape[0]
            return rows * shape[1:].numel()

        total = 0
        for each in report.frozen:
            size = 1 if each.size == 1 else compute
            total += gathers[not each.in_block] * size * numbers(each.shape)
        adapters = sum(map(numbers, report.adapters))
        return (total + (gathers[0] * compute + 4 * reductions) * adapters) * (shards - 1) / shards

    expected, letter = sent(padded=False), "N" if shards == report.ranks else "S"
    gathered = "P" if once else "2kP - kH"
    formula = f"({gathered} + {'k' if reductions > 1 else ''}4a)({letter}-1)/{letter}"
    parts = {"for shards of equal size": sent(padded=True) - expected}
    if replicas := report.ranks // shards - 1:  # shards of gradients are all-reduced once
        all_reduced = 2 * 4 * sum(shape.numel() for shape in report.adapters) / shards
        expected += all_reduced * replicas / (replicas + 1)
        formula += " + 2(4a/S)(R-1)/R"
    return expected, formula, parts


def closed_form_of(report: Report, script: Any, config: Any) -> tuple[float, str, dict[str, float]]:
    """Return the closed form in bytes, its formula, and what to add to it: reason -> bytes.

    The root (last norm, head and a tied embedding) stays unsharded between forward and backward,
    so it is gathered once, not twice. Backward does not need an untied embedding.
    """
    if report.adapters:
        return form_with_adapters(report, config)
    tensor_parallel = getattr(config, "tensor_parallel", 1)
    shards, parts = shards_of(report, config), {}
    numbers, held = report.own // tensor_parallel, report.parameters * shards // 4
    experts = held_experts = 0
    if share := getattr(config, "expert_parallel", 0):
        groups = report.ranks // share
        for number, rows, columns in report.experts:
            number //= share
            experts += number * rows * columns
            if number % groups and rows % groups == 0:
                held_experts += number * rows * columns  # sharded by rows, with nothing to pad
            else:
                held_experts += math.ceil(number / groups) * groups * rows * columns
        numbers -= experts * share
        held -= held_experts * share
    expected, formula = closed_form(report, script, config, numbers, experts)
    if script.__name__ != "ddp_pretrain" and shards > 1:
        padding = closed_form(report, script, config, held, held_experts)[0] - expected
        # FSDP2 shards rows. The rows of matrices are already split over the TP group.
        root = [
            [shape[0] // tensor_parallel if len(shape) > 1 else shape[0], shape[1:].numel()]
            for shape in report.root
        ]
        if hasattr(config, "sharding_strategy"):  # FSDP1 shards one flat parameter
            root = [[sum(rows * row for rows, row in root), 1]]
        numbers = sum(math.ceil(rows / shards) * shards * row for rows, row in root)
        gathers = (gathers_of_block(config) - 1) * report.micro_batches
        share = gathers * size_of_compute(config) * numbers * (shards - 1) / shards
        parts["as the root (embedding, last norm, head) is gathered once per micro-batch"] = -share
        parts["for shards of equal size"] = padding
    inside, more, ends = sent_inside(report, config)
    if ends:
        muon = "as ranks do not divide the matrices of a shape"
        parts[muon if report.exchanged else "for embedding, norms, head and loss"] = ends
    if hasattr(script, "unsharded_parameters"):
        sampling = size_of_compute(config) * report.own * (shards - 1) / shards
        padding = size_of_compute(config) * held * (shards - 1) / shards - sampling
        parts["for shards of equal size"] = parts.get("for shards of equal size", 0.0) + padding
        letter = "N" if shards == report.ranks else "S"
        more += f" + P({letter}-1)/{letter}"
        inside += sampling
        if report.others:
            sent, formula_of_others = sent_by_others(report, config, shards, parts)
            inside, more = inside + sent, f"{more} + {formula_of_others}({letter}-1)/{letter}"
    return expected + inside, formula + more, parts


def sent_by_others(
    report: Report, config: Any, shards: int, parts: dict[str, float]
) -> tuple[float, str]:
    """Return the bytes that a reference and a teacher send, and their formula; add to `parts`.

    P': bytes of their parameters. A forward gathers all of them, except that the root stays
    unsharded until the last micro-batch.
    """
    times = report.micro_batches if config.reshard_after_forward else 1
    expected = really = padded = 0.0
    for each in report.others:
        gathers = times if each.in_block else 1
        rows = math.ceil(each.shape[0] / shards) * shards
        share = each.size * each.shape[1:].numel() * (shards - 1) / shards
        expected += times * each.shape[0] * share
        really += gathers * each.shape[0] * share
        padded += gathers * rows * share
    parts["as the root of another model is gathered once per step"] = really - expected
    parts["for equal shards of another model"] = padded - really
    return expected, "kP'" if config.reshard_after_forward else "P'"


def explain(report: Report, script: Any, config: Any) -> str:
    """Say what was sent beside the closed form, and where the difference comes from."""
    known = getattr(config, "schedule", "1f1b") in ("1f1b", "gpipe")
    if script.__name__ == "fsdp2_nd_pretrain" or not known:  # no closed form
        return f"sent by a rank: {report.sent / MIB:,.2f} MiB"
    expected, formula, parts = closed_form_of(report, script, config)
    line = f"sent by a rank: {report.sent / MIB:,.2f} MiB; {formula} is {expected / MIB:,.2f} MiB"
    if not expected:
        return line
    rest = report.sent - expected - sum(parts.values())
    parts["for the norm and the loss"] = rest
    parts = {why: share / expected for why, share in parts.items() if share}
    told = ", ".join(f"{share:+.2%} {why}" for why, share in parts.items())
    return f"{line} ({report.sent / expected - 1:+.2%}: {told})"


def describe(report: Report, script: Any, config: Any, options: argparse.Namespace) -> str:
    rows = {
        "parameters": report.parameters,
        "gradients": report.gradients,
        "optimizer state": report.optimizer,
    }
    if report.others:
        rows["frozen parameters"] = report.frozen_bytes
    lines = [
        f"{script.__name__} as rank {report.rank} of {report.ranks}: {config.model}, "
        f"{report.numbers:,} parameters, {config.precision}; micro-batches a rank and step: "
        f"{report.micro_batches} of {config.micro_batch_tokens:,} tokens\n",
        "| memory of a rank, all of a step | |",
        "| --- | --- |",
        *(f"| {kind} | {size / MIB:,.2f} MiB |" for kind, size in rows.items()),
        "\n| at the peak | |",
        "| --- | --- |",
    ]
    for kind, size in sorted(report.peak.items(), key=lambda item: -item[1]):
        label = kind
        if kind == "backward":
            label = "backward: unsharded gradients, buffers, temporaries"
        label += " (in CPU memory)" if kind in report.elsewhere else ""
        lines.append(f"| {label} | {size / MIB:,.2f} MiB |")
    lines.append(f"| **peak** | **{report.on_device / MIB:,.2f} MiB** |\n")
    lines.append(collectives.table(report.calls))
    lines.append(f"\n{explain(report, script, config)}")
    if options.link_gbps and options.tflops:
        lines.append(estimate(report, options))
    if options.memory_gib:
        lines.append(advice(report, script, config, options))
    return "\n".join(lines)


def elsewhere(config: Any) -> tuple[str, ...]:
    """Return the kinds of memory that are offloaded."""
    offloads = getattr(config, "cpu_offload", False)
    kinds = ("parameters", "gradients", "optimizer state", "frozen parameters")
    return kinds if offloads else ()


def estimate(report: Report, options: argparse.Namespace) -> str:
    """Say how long FLOPs and bytes take, if kernels and links are never slower than given."""
    compute = report.flops / (options.tflops * 1e12)
    network = report.sent * 8 / (options.link_gbps * 1e9)
    bound = "computing" if compute > network else "the network"
    return (
        f"\na step: {report.flops / 1e12:,.2f} TFLOPs take {compute:.3f} s at {options.tflops:g} "
        f"TFLOP/s, {report.sent / 1e9:,.2f} GB take {network:.3f} s at {options.link_gbps:g} "
        f"Gbit/s: {compute + network:.3f} s one after the other, {max(compute, network):.3f} s "
        f"with full overlap, bound by {bound}"
    )


def advice(report: Report, script: Any, config: Any, options: argparse.Namespace) -> str:
    """Say whether it fits, and what to change until it does, each with its effect."""
    room = 0.9 * options.memory_gib * GIB  # the allocator and NCCL need some
    verdict = "fits" if report.on_device <= room else "does not fit"
    lines = [f"\n{verdict} {options.memory_gib:g} GiB if a tenth stays free"]
    while report.on_device > room:
        step = next_step(script, config)
        if step is None:
            lines.append("nothing is left to turn on: more ranks, or a smaller model")
            break
        script, config, change = step
        report = dry_run(script, config, options.vocabulary)
        lines.append(
            f"+ {change}: {report.on_device / GIB:,.2f} GiB, {report.flops / 1e12:,.2f} "
            f"TFLOPs and {report.sent / 1e9:,.2f} GB sent a step"
        )
    return "\n".join(lines)


def next_step(script: Any, config: Any) -> tuple[Any, Any, str] | None:
    """Return what to change next, the cheapest in time first, or None."""
    config = dataclasses.replace(config)
    if config.activation_checkpointing == "none":
        config.activation_checkpointing = "selective"
        return script, config, "--activation_checkpointing selective"
    if script.__name__ == "ddp_pretrain" and int(os.environ["WORLD_SIZE"]) > 1:
        script = importlib.import_module("fsdp2_pretrain")
        shared = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
        return script, script.Config(**shared), "fsdp2_pretrain.py: sharding"
    if config.activation_checkpointing != "full":
        config.activation_checkpointing = "full"
        return script, config, "--activation_checkpointing full"
    half, odd = divmod(config.micro_batch_tokens, 2)
    if half >= config.max_length and not odd:
        config.micro_batch_tokens = half  # and twice as many of them
        return script, config, f"--micro_batch_tokens {half}"
    if not getattr(config, "reduce_every_micro_batch", True):
        config.reduce_every_micro_batch = True
        return script, config, "--reduce_every_micro_batch true"
    if hasattr(config, "cpu_offload") and not config.cpu_offload:
        config.cpu_offload = True
        return script, config, "--cpu_offload"
    return None


def read_options() -> tuple[argparse.Namespace, list[str]]:
    """Return the options of this program, and the words that are the script's flags."""
    parser = shared.parser(__doc__)
    parser.add_argument("script", choices=[f"{name}.py" for name in SCRIPTS])
    parser.add_argument("--ranks", type=shared.positive, required=True, help="GPUs of the run")
    parser.add_argument("--rank", type=int, default=0, help="the rank to describe")
    parser.add_argument(
        "--ranks_per_node", type=shared.positive, default=8, help="for FSDP1's hybrid_shard"
    )
    parser.add_argument(
        "--vocabulary", type=int, help="number of ids, instead of loading --tokenizer"
    )
    parser.add_argument("--memory_gib", type=float, help="memory of a GPU: does the run fit?")
    parser.add_argument("--link_gbps", type=float, help="speed of a rank's link, in Gbit/s")
    parser.add_argument("--tflops", type=float, help="speed of the kernels, in TFLOP/s")
    kinds = {"precision": str, "micro_batch_tokens": int, "global_batch_tokens": int}
    for name, kind in kinds.items():
        parser.add_argument(f"--{name}", type=kind, help="as in the script")
    return parser.parse_known_args()


class Accepted(Exception):
    """A script's `main` has accepted its flags."""


def checked_config(script: Any) -> Any:
    """Return the script's Config of the command line. Its `main` refuses what does not fit."""

    def accept(*_: Any) -> None:
        raise Accepted

    owner, name = common, "load_tokenizer"  # after all checks
    if hasattr(script, "LoraLinear"):  # before it asks for a base, which is not needed here
        owner, name = script, "micro_batches_per_rank"
    plain = getattr(owner, name)
    setattr(owner, name, accept)
    try:
        script.main()
    except Accepted:
        return parse_config(script.Config)
    finally:
        setattr(owner, name, plain)


def report(
    strategy: str,
    model: str,
    vocabulary: int,
    ranks: int,
    watch: Any = None,
    rank: int = 0,
    **own: Any,
) -> Report:
    """Dry-run a step of one micro-batch per rank: 2 sequences of 2,048 tokens, bf16."""
    be_rank(rank, ranks, 8)
    script = importlib.import_module(f"{strategy}_pretrain")
    flags = {"max_length": 2048, "micro_batch_tokens": 4096, "precision": "bf16", **own}
    dp_size = ranks // own.get("tensor_parallel", own.get("context_parallel", 1))
    flags.setdefault("global_batch_tokens", flags["micro_batch_tokens"] * dp_size)
    return dry_run(script, script.Config(model=model, **flags), vocabulary, watch)


def main() -> None:
    options, words = read_options()
    if options.rank >= options.ranks:
        common.refuse(f"--rank {options.rank}: the {options.ranks} ranks are counted from 0")
    be_rank(options.rank, options.ranks, options.ranks_per_node)
    # Import all before parsing, because HfArgumentParser changes the types of the fields that they
    # share: a script that is imported later would refuse None.
    scripts = {f"{name}.py": importlib.import_module(name) for name in SCRIPTS}
    script = scripts[options.script]
    defaults = {field.name: field.default for field in dataclasses.fields(script.Config)}
    micro = options.micro_batch_tokens or defaults["micro_batch_tokens"]
    precision = "bf16" if options.precision in (None, "auto") else options.precision
    words += ["--precision", precision, "--micro_batch_tokens", str(micro)]
    if not hasattr(script, "unsharded_parameters"):  # prompts and answers set the size of a step
        total = options.global_batch_tokens or options.ranks * micro
        words += ["--global_batch_tokens", str(total)]
    words += ["--compile", "False"]
    sys.argv = [options.script, *words]
    config = checked_config(script)
    if options.vocabulary is None:
        options.vocabulary = len(common.load_tokenizer(config.tokenizer))
    report = dry_run(script, config, options.vocabulary)
    print(describe(report, script, config, options))


if __name__ == "__main__":
    launch(main)
