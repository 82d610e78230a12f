"""Causal-LM pretraining with Muon under FSDP2: each rank orthogonalizes some of the matrices.

    torchrun --standalone --nproc-per-node=2 fsdp2_muon_pretrain.py

When to use it: to reach the same loss in fewer steps than with AdamW, and with less optimizer
state.

AdamW updates each number on its own, so each rank can update its shards alone. Muon sets all
singular values of a matrix's momentum, the moving average of its gradients, to about 1, and updates
the matrix in this direction. So rare directions move as far as frequent ones. This needs the full
matrix, but `fully_shard` of FSDP2 leaves each rank only some of its rows.

The ranks therefore process several matrices of one shape at a time. An all-to-all gives each rank
an equal share of full matrices to orthogonalize. A second all-to-all returns the updates' rows.
AdamW still updates embeddings, head, norms and biases.

A DTensor is a tensor that is spread over ranks. Its `shape` is the shape of the full tensor, and
`to_local()` is this rank's part of it, for a parameter its shard. FSDP2 shards each parameter along
dimension 0.

Memory per rank, with N ranks: 1/N of the fp32 parameters, gradients and moments. That is 12/N bytes
per parameter of the matrices of the blocks, because Muon keeps one moment, and 16/N bytes per
parameter of the rest. On top come the full parameters of one or two blocks and of the root (last
norm, head and a tied embedding), in backward also their full gradients.

Communication volume per micro-batch, with P the bytes of the parameters in compute precision and G
the bytes of the fp32 gradients: each block's parameters are all-gathered for its forward and again
for its backward, 2P(N-1)/N in all, and its gradients are reduce-scattered, G(N-1)/N. (The
embedding, the last norm and the head are gathered once.) Most of this overlaps with compute.

With M the bytes of the blocks' matrices in compute precision (not of stacked experts), Muon's
all-to-alls send 2M(N-1)/N² per step, and overlap with nothing. All-gathering all matrices on every
rank would send M(N-1)/N, and every rank would repeat the work.

Compute per step: 5(4r²c + 2r³) FLOPs on one rank for a matrix of r x c, where r is the smaller
size. Forward and backward take 6rc per token, so Muon's share is at most 5r / (tokens of a step).

Muon is from Keller Jordan, https://kellerjordan.github.io/posts/muon. Its scale and its weight
decay are from arXiv 2502.16982.
"""

import math
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Annotated, Any

import torch
import torch.distributed as dist
from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.optim import AdamW, Optimizer

import common
from model import (
    build_config,
    build_model,
    checkpoint_activations,
    compile_blocks,
    count_flops,
    fused_outputs,
    initialize,
    modules_outside_blocks,
    seed_by_name,
    transformer_blocks,
    weight_decay_names,
)
from run import (
    Flags,
    Run,
    flag,
    launch,
    max_over_ranks,
    micro_batches_per_rank,
    parse_config,
    refuse_non_finite,
    refuse_untrained,
    set_learning_rates,
    set_up_gpu,
)

NEXT_COMMAND = "torchrun --standalone --nproc-per-node=2 fsdp2_sft.py --init_from {run_dir}"


# The shared flags, such as learning rate and batch sizes, are in run.py.
@dataclass
class Config(Flags):
    """The flags of this script, beside the shared ones."""

    text_column: str = flag("text", "column of the dataset that holds the text")
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = flag(
        None,
        "decay of Muon's moving average of gradients. The default depends on the model: 0.7 with "
        "fewer than 10 million parameters in the matrices of its blocks, otherwise 0.95",
    )
    reshard_after_forward: bool = flag(
        True, "free a block's full parameters after forward and all-gather them for backward"
    )
    dp_replicate: PositiveInt = flag(1, "replicas of the sharded model (HSDP)")
    cpu_offload: bool = flag(False, "keep parameters, gradients and optimizer state in CPU memory")
    reduce_every_micro_batch: bool = flag(
        True,
        "reduce-scatter gradients in every micro-batch. false: once per step, which needs memory "
        "for a full set of gradients",
    )


# --- Strategy -------------------------------------------------------------------------------------


def init_process_group(config: Config) -> torch.device:
    """Create the process group from torchrun's variables; returns the device of this rank."""
    timeout = timedelta(minutes=config.timeout_minutes)
    if not torch.cuda.is_available():
        dist.init_process_group("gloo", timeout=timeout)
        return torch.device("cpu")
    device = set_up_gpu(config)
    # gloo beside NCCL handles tensors in CPU memory: pickled Python objects, the numbers of
    # `max_over_ranks` and, with --cpu_offload, the norm of the gradients.
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout, device_id=device)
    return device


def parallelize(model: nn.Module, config: Config, device: torch.device) -> nn.Module:
    """Shard a model that is on the meta device, and give the shards memory and initial weights.

    `fully_shard(module)` makes one unit of the module's parameters: they are gathered and freed
    together. Parameters that an earlier call on a submodule has claimed stay in the submodule's
    unit. The call turns the parameters into DTensors, gives the module a class with the methods of
    `FSDPModule`, and adds these hooks:

    - Before forward, one all-gather makes the unit's parameters full. After forward they are freed.
    - Before backward, another all-gather makes them full again. After backward, one reduce-scatter
      leaves each rank the averaged gradient of its shard, and the full tensors are freed.

    On GPUs this communication runs on its own streams and overlaps with compute. In forward, the
    CPU runs ahead and starts the next block's all-gather while the GPU still computes this block.
    In backward, the hook before a block's backward also starts the all-gather of the preceding
    block, whose backward comes next.
    """
    blocks = transformer_blocks(model)
    # Recomputation replaces a block's `forward`. FSDP's hooks run around `forward`, so a recomputed
    # forward uses the parameters that were gathered for backward. The compiler takes the block's
    # whole call, recomputation included, but leaves FSDP's hooks as they are.
    checkpoint_activations(blocks, config.activation_checkpointing)
    if config.compile:
        compile_blocks(blocks, config)

    ranks = dist.get_world_size()
    mesh = init_device_mesh(device.type, (ranks,))
    if config.dp_replicate > 1:
        # HSDP (hybrid sharding): the mesh arranges the ranks in a grid. Shard over the ranks of a
        # row, such as the GPUs of one machine, and replicate across rows. Then all-gathers stay in
        # a row. After a row's reduce-scatter, an all-reduce across rows averages the shards of the
        # gradients.
        mesh = init_device_mesh(
            device.type,
            (config.dp_replicate, ranks // config.dp_replicate),
            mesh_dim_names=("replicate", "shard"),
        )
    options = {"mesh": mesh}
    if config.precision != "fp32":
        # Shards and optimizer state stay fp32. Parameters are cast to bf16 before they are
        # gathered, so blocks compute in bf16 and their full gradients are bf16. These are cast to
        # fp32 before they are reduced. FSDP would also cast the inputs of each unit. Leave them,
        # because some types (OLMo 2) pass rotary embeddings in fp32 on purpose.
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    if config.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")

    # On the meta device the model has shapes but no memory. Each rank draws the same full weights,
    # because a module is seeded by its name, and keeps its shards: nothing is broadcast.
    initialize(model, modules_outside_blocks(model), config.seed, device)
    model.tie_weights()  # `initialize` gave each module memory of its own, which untied them
    # From the inside out: blocks first, then the root, which gets the rest. (The other order raises
    # an error in torch 2.13.) With the root alone, one all-gather would bring all parameters at
    # once, and overlap with nothing.
    for block in blocks:
        # One block at a time, so that a rank never holds more than one full block.
        initialize(model, block.modules(), config.seed, device)
        fully_shard(block, reshard_after_forward=config.reshard_after_forward, **options)
    if not model.config.tie_word_embeddings:
        # A tied embedding is the head's weight too, and stays in the root's unit. An untied one can
        # be a unit of its own, which is freed after its forward. Its backward needs no weights, so
        # do not gather them.
        fully_shard(
            model.get_input_embeddings(),
            reshard_after_forward=config.reshard_after_forward,
            **options,
        ).set_unshard_in_backward(False)
    # Do not free the root's parameters after forward, because backward begins with the head.
    fully_shard(model, reshard_after_forward=False, **options)
    return model


# A rank orthogonalizes small matrices together, up to this many numbers: 64 MB in bf16.
BATCH_NUMBERS = 2**25


class Muon(AdamW):
    """Muon for the parameters in `layouts`, AdamW for the others.

    Muon's momentum has the name of AdamW's first moment, because both average the gradients. So
    this script can resume a checkpoint of any other pretraining script. The others cannot resume
    its checkpoints, which lack AdamW's second moments.

    NOTE: torch.optim.Muon accepts DTensors and updates them correctly. But each of its matmuls
    communicates, in all up to 15 times the bytes of the matrix.

    Args:
        groups: parameter groups, as for AdamW.
        layouts: parameters of the groups, sharded [rows, columns] or [experts, rows, columns],
            and which matrices each parameter holds (`fused_outputs` in model.py).
        momentum: decay of the moving average.
        dtype: of the orthogonalization and of its all-to-alls.
    """

    def __init__(
        self,
        groups: list[dict],
        layouts: dict[nn.Parameter, tuple],
        momentum: float,
        dtype: torch.dtype,
        **options: Any,
    ):
        super().__init__(groups, **options)
        if not layouts.keys() <= {p for group in self.param_groups for p in group["params"]}:
            # `layouts` is from before `parallelize`, for example. AdamW would update all matrices.
            raise ValueError("some of Muon's matrices are in no parameter group")
        self.layouts = layouts
        self.momentum = momentum
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Update this rank's shards of all parameters. A collective."""
        for group in self.param_groups:
            trained = [p for p in group["params"] if p in self.layouts and p.grad is not None]
            for matrices in self.batches(trained):
                self.update(matrices, group["lr"], group["weight_decay"])
        super().step()  # AdamW, for all other parameters

    def batches(self, parameters: list[nn.Parameter]) -> Iterator:
        """Group parameters of one shape and layout, which the ranks process at the same time.

        Small matrices are batched, because a kernel launch takes longer than one small matmul.
        """
        alike = {}
        for parameter in parameters:
            alike.setdefault((parameter.shape, self.layouts[parameter]), []).append(parameter)
        for matrices in alike.values():
            size = max(1, BATCH_NUMBERS // matrices[0].numel())
            if matrices[0].ndim == 2:  # `size` per rank; experts are sharded already
                size *= matrices[0].device_mesh.size(-1)
            yield from (matrices[i : i + size] for i in range(0, len(matrices), size))

    def update(self, matrices: list[nn.Parameter], rate: float, weight_decay: float) -> None:
        """Update matrices of one layout and free their gradients. A collective."""
        shards = [matrix.to_local() for matrix in matrices]
        gradients = [matrix.grad.to_local() for matrix in matrices]
        for matrix in matrices:
            if not self.state[matrix]:  # AdamW expects a step when it loads a checkpoint
                self.state[matrix] = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(matrix)}
        momenta = [self.state[matrix]["exp_avg"].to_local() for matrix in matrices]
        torch._foreach_lerp_(momenta, gradients, 1 - self.momentum)
        # Nesterov: look one step ahead, as if the next gradient equaled this one.
        directions = torch._foreach_lerp(gradients, momenta, self.momentum)
        # The shards may be offloaded, so move them to the device: [parameters, own rows, columns]
        stack = torch.stack(directions).to(matrices[0].device_mesh.device_type, self.dtype)
        updates = orthogonalize(stack, matrices[0], self.layouts[matrices[0]])  # two all-to-alls
        torch._foreach_mul_(shards, 1 - rate * weight_decay)
        torch._foreach_add_(shards, list(updates.to(shards[0])), alpha=-rate)
        for matrix in matrices:
            matrix.grad = None  # AdamW skips a parameter without a gradient


def orthogonalize(
    stack: torch.Tensor,
    matrix: nn.Parameter,
    layout: tuple,
) -> torch.Tensor:
    """Orthogonalize and scale sharded matrices of one layout, or stacks of experts. A collective.

    Args:
        stack: this rank's shards, [parameters, its rows, columns] or [parameters, its experts,
            rows, columns]. It may be overwritten.
        matrix: one of the parameters, for its full shape and its device mesh.
        layout: which matrices each parameter holds.

    Returns:
        This rank's shards of the updates.
    """
    if matrix.ndim == 3:  # FSDP2 shards the stack, so each rank has full matrices
        return orthogonal_updates(stack.flatten(0, 1), *layout).view_as(stack)

    group = matrix.device_mesh.get_group(-1)  # with HSDP, one row; all rows repeat the work
    rank = group.rank()
    ranks = group.size()
    rows, columns = matrix.shape
    rows_of = shares(rows, ranks)  # of each rank, as FSDP2 shards them
    matrices_of = shares(len(stack), ranks)  # of each rank

    # Send this rank's rows of each matrix to the rank that gets the matrix. Sizes by rank:
    sent = [count * rows_of[rank] * columns for count in matrices_of]
    received = [matrices_of[rank] * count * columns for count in rows_of]
    flat = stack.view(-1)
    full = flat.new_empty(sum(received))
    dist.all_to_all_single(full, flat, received, sent, group)
    # Rows arrive by rank, which is their order in a matrix.
    parts = [
        part.view(matrices_of[rank], count, columns)
        for part, count in zip(full.split(received), rows_of)
    ]
    full = orthogonal_updates(torch.cat(parts, dim=1), *layout)  # [matrices, rows, columns]
    full = torch.cat([part.flatten() for part in full.split(rows_of, dim=1)])
    dist.all_to_all_single(flat, full, sent, received, group)  # the way back, into `stack`
    return stack


def shares(number: int, ranks: int) -> list[int]:
    """Divide a number among ranks: equal shares, but the last ranks may get less, or nothing."""
    most = math.ceil(number / ranks)
    return [max(0, min(most, number - rank * most)) for rank in range(ranks)]


def orthogonal_updates(
    full: torch.Tensor,
    dim: int,
    groups: int,
    sizes: tuple,
) -> torch.Tensor:
    """Orthogonalize and scale every matrix of (fused) parameters, such as q, k and v in one.

    Args:
        full: [parameters, rows, columns].
        dim: dimension of the outputs: `groups` groups, each with sizes[i] outputs of matrix i.
    """
    updates = []
    for part in full.unflatten(dim, (groups, -1)).split(sizes, dim):
        update = newton_schulz(part.flatten(dim - 1, dim))
        # Orthonormal rows or columns have entries with a root mean square of 1 / sqrt(max(rows,
        # columns)). Scale it to 0.2, about the value of AdamW's updates, so that both can use the
        # same learning rate.
        scale = 0.2 * math.sqrt(max(update.shape[1:]))
        updates.append(scale * update.unflatten(dim, (groups, -1)))
    return torch.cat(updates, dim).flatten(dim - 1, dim)


def newton_schulz(matrices: torch.Tensor) -> torch.Tensor:
    """Return matrices with the same singular vectors, and singular values of about 1.

    X, (X Xᵀ) X and (X Xᵀ)² X have the same singular vectors. So an iteration applies a polynomial
    to every singular value. With these coefficients it grows small values fast: after five
    iterations all but the smallest are between 0.7 and 1.2. An SVD would be exact, but slow.

    Args:
        matrices: [matrices, rows, columns].
    """
    if matrices.shape[-2] > matrices.shape[-1]:
        return newton_schulz(matrices.mT).mT  # so that X Xᵀ has the smaller size
    # No singular value exceeds this norm, and the iteration needs values of at most 1.
    x = matrices / matrices.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, polynomial, x, beta=3.4445)
    return x


def train_step(
    model: nn.Module,
    optimizer: Optimizer,
    batch: common.GlobalBatch,
    step: int,
    config: Config,
    device: torch.device,
) -> dict[str, float]:
    """Run one optimizer step; returns the mean loss of the global batch and the gradient norm.

    `model(**micro_batch)` returns the cross entropy summed over the micro-batch's target tokens
    (`forward_with_loss` in model.py). The root's forward computes it, because only there is the
    head's weight sure to be full. It takes the target tokens in chunks, so that the full logits
    never exist at once, and sums in fp32.

    FSDP reduce-scatters the gradients of every micro-batch, overlapped with its backward, so a rank
    accumulates only its shards. With `--reduce_every_micro_batch false` it casts each micro-batch's
    full gradients to fp32, adds them up, and reduce-scatters the sum once, on the last micro-batch.
    That saves communication but needs memory for a full set of gradients.
    """
    # The loss of a step is the sum over all target tokens, divided by their number in the global
    # batch, which every rank counts by itself. A mean of micro-batch means would give tokens of
    # small micro-batches more weight.
    # FSDP averages gradients over the ranks, so multiply by their number to get a sum. (AdamW would
    # hide a missing factor: its updates hardly depend on gradients' scale. The norm shows it.)
    scale = dist.get_world_size() / batch.num_targets
    total_loss = torch.zeros((), device=device)
    for i, micro_batch in enumerate(batch.micro_batches):
        last = i == len(batch.micro_batches) - 1
        # The setters reach all units in the model.
        # NOTE: with --reduce_every_micro_batch false, a `last` that is one micro-batch early would
        # leave full gradients in FSDP, where `zero_grad` does not reach them. The next step would
        # add them, without an error.
        model.set_requires_gradient_sync(last or config.reduce_every_micro_batch)
        # HSDP only: accumulate shards of gradients, and all-reduce them across rows once. (The call
        # above sets this flag, too, so keep this order.)
        model.set_requires_all_reduce(last)
        # With --reshard_after_forward false, parameters stay full from the first micro-batch's
        # forward to the last one's backward, so only the first forward gathers them.
        model.set_reshard_after_backward(last or config.reshard_after_forward)
        loss = model(**common.to_device(micro_batch, device))  # all-gathers
        (loss * scale).backward()  # all-gathers, and reduce-scatters if gradients sync
        total_loss += loss.detach()
    dist.all_reduce(total_loss)

    # Each rank sums the squares of its shards, and one all-reduce adds up the sums. So call it on
    # every rank. If the norm exceeds --grad_clip, all gradients are scaled down to it.
    norm = nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
    norm = norm.full_tensor()  # unwraps a replicated DTensor: each rank has it

    # `.item()` waits for the GPU. Do it here, not after the update, because non-finite values must
    # not reach the weights.
    measured = {"loss": total_loss.item() / batch.num_targets, "grad_norm": norm.item()}
    refuse_non_finite(step, **measured)
    measured["learning_rate"] = learning_rate_at(step, config)
    for group in optimizer.param_groups:
        group["lr"] = measured["learning_rate"]
    optimizer.step()  # of this rank's shards, after all-to-alls
    optimizer.zero_grad()
    return measured


@torch.no_grad()
def evaluate(model: nn.Module, validation: common.Batches, run: Run) -> float | None:
    """Return the mean loss per target token in nats, on the same data for every world size.

    None if a signal asks to stop.
    """
    total = torch.zeros(2, dtype=torch.float64, device=run.device)  # loss, target tokens
    model.eval()
    # Forward all-gathers, so a rank with one more micro-batch would hang, waiting for the others.
    # All ranks get equally many.
    for micro_batch in validation.evaluation(dist.get_rank(), dist.get_world_size()):
        micro_batch = common.to_device(micro_batch, run.device)
        total[0] += model(**micro_batch)
        total[1] += (micro_batch["labels"] != common.IGNORED).sum()
        if run.stops_validation():  # a small all-reduce in CPU memory
            return None
    model.train()
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


# --- Optimizer and schedule -----------------------------------------------------------------------


def muon_layouts(model: nn.Module) -> dict[nn.Parameter, tuple]:
    """Return the parameters that Muon updates, the matrices of the blocks, with their layouts.

    They decay. Convolution kernels, [channels, channels of a group, width], are not matrices.
    """
    decayed, in_blocks = weight_decay_names(model), set(transformer_blocks(model).parameters())
    return {
        parameter: fused_outputs(name, parameter.shape, model.config)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        if parameter in in_blocks
        if name in decayed and (parameter.ndim == 2 or "conv" not in name)
    }


def build_optimizer(model: nn.Module, config: Config) -> Muon:
    """Build Muon over this rank's shards; matrices decay, embeddings, norms and biases do not.

    NOTE: call it after `parallelize`, which replaces all parameters. The old parameters never get
    gradients, so an optimizer over them would change nothing.
    """
    decayed = weight_decay_names(model)
    with_decay, without_decay = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (with_decay if name in decayed else without_decay).append(parameter)
    groups = [
        {"params": with_decay, "weight_decay": config.weight_decay},
        {"params": without_decay, "weight_decay": 0.0},
    ]
    return Muon(
        groups,
        muon_layouts(model),
        config.momentum,
        torch.float32 if config.precision == "fp32" else torch.bfloat16,
        lr=config.learning_rate,
        betas=(0.9, 0.95),
        fused=True,
    )


def default_learning_rate(config: Config, num_parameters: int) -> float:
    """Return the peak learning rate of Muon and AdamW for a model of this size."""
    rate = 1e-2 if num_parameters < 10_000_000 else 3e-4
    return rate / 10 if config.init_from else rate


def set_momentum(config: Config, model: nn.Module) -> None:
    """Set the momentum if --momentum does not.

    Small models learn faster with a moving average of about 3 steps than of 20 (docs/muon.md).
    """
    if config.momentum is None:
        size = sum(matrix.numel() for matrix in muon_layouts(model))
        config.momentum = 0.7 if size < 10_000_000 else 0.95


def learning_rate_at(step: int, config: Config) -> float:
    """Linear warm-up, then cosine decay to the minimum, which the last step reaches.

    With --decay_steps the rate stays at its peak until the decay (WSD, arXiv 2404.06395). So runs
    of different lengths have the same rates until the shorter one decays.
    """
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    begin = max(config.warmup_steps, config.steps - (config.decay_steps or config.steps))
    progress = max(0, step - begin) / (config.steps - begin)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return config.min_learning_rate + cosine * (config.learning_rate - config.min_learning_rate)


# --- Main -----------------------------------------------------------------------------------------


def main() -> partial | None:
    config = parse_config(Config)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if config.steps and ranks % config.dp_replicate:
        common.refuse(f"--dp_replicate {config.dp_replicate} does not divide {ranks} ranks")
    accumulation = micro_batches_per_rank(config, ranks)

    # Tokenizing can take longer than the timeout of collectives, so do it before they begin.
    tokenizer = common.load_tokenizer(config.tokenizer)
    documents = common.load_documents(config, [config.text_column], common.tokenize_text, tokenizer)
    training, validation = (
        common.Batches(part.split(config.max_length), config, tokenizer.eos_token_id)
        for part in common.train_validation_split(documents, config.eval_tokens)
    )
    vocabulary_size = common.vocabulary_size(tokenizer)
    model_config = build_config(config, vocabulary_size, tokenizer.eos_token_id)
    if config.steps == 0:
        return common.say("the data is prepared")

    device = init_process_group(config)
    model = build_model(model_config, config)
    # Count parameters and FLOPs before the model is sharded.
    set_learning_rates(config, default_learning_rate(config, model.num_parameters()))
    set_momentum(config, model)
    run = Run(config, model, count_flops(model), tokenizer, documents, device)
    # Check whether this run may start before the model takes memory and time.
    checkpoints = common.Checkpoints(config, run.directory, run.facts, run.save_files, device)
    checkpoint, progress = checkpoints.find(config.resume)
    model = parallelize(model, config, device)
    optimizer = build_optimizer(model, config)
    # Load last: model and optimizer are sharded now, and each rank reads its shards only.
    if checkpoint:
        common.load_checkpoint(checkpoint, model, optimizer)
    elif config.init_from:
        common.load_weights(model, config.init_from)
    mesh = f"{config.dp_replicate} x {ranks // config.dp_replicate} shards"
    micro_batches = common.counted(accumulation, "micro-batch", "es")
    work = f"{micro_batches} per rank and step, {config.global_batch_tokens:,} tokens"
    run.begin(checkpoints, progress, mesh, work)
    common.say(f"Muon with momentum {config.momentum:g} for the matrices of the blocks")

    # Step and tokens are the position in the data, so a resumed run needs no other data state.
    step, tokens = progress["step"], progress["tokens"]
    # Data-parallel ranks get the micro-batches of a global batch round-robin.
    batches = training.stream(tokens, accumulation, rank, ranks)
    if run.unvalidated:  # a signal has stopped the validation of this step
        loss = evaluate(model, validation, run)
        run.log_validation(step, loss, validation.bytes_per_target())
    while step < config.steps and not run.stopping:
        step += 1
        started = time.perf_counter()
        batch = next(batches)
        data_seconds = time.perf_counter() - started
        seed_by_name(config.seed, step, rank)  # for dropout, so no RNG state is saved
        measured = train_step(model, optimizer, batch, step, config, device)
        if step == 1:
            refuse_untrained(model, optimizer)  # a collective
        tokens += batch.num_targets
        # A signal only increments `stop_signals`, so that the step ends first. `max_over_ranks`
        # returns the longest wait for data, and whether any rank got a signal.
        data_seconds, run.stopping = max_over_ranks(data_seconds, run.stop_signals)
        run.log_step(step, batch, started, data_seconds, tokens=tokens, **measured)
        if step % config.eval_every == 0 or step == config.steps:
            loss = evaluate(model, validation, run)
            run.log_validation(step, loss, validation.bytes_per_target())
        last = step == config.steps or run.stopping
        if config.checkpoint_every and (last or step % config.checkpoint_every == 0):
            # Each rank writes a part of the checkpoint, under full names and shapes. So any number
            # of ranks can load it.
            checkpoints.save(model, optimizer, run.position(step, tokens))
    checkpoints.wait()
    # `launch` calls it once the model is gone and the ranks have left the process group.
    return partial(run.finish, step, NEXT_COMMAND)


if __name__ == "__main__":
    launch(main)
