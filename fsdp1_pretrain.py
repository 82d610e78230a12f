"""Causal-LM pretraining with FSDP1: FullyShardedDataParallel shards flat parameters.

    torchrun --standalone --nproc-per-node=2 fsdp1_pretrain.py

When to use it: to read or maintain code that was built on FSDP1. Use FSDP2 for anything new.

FSDP1 flattens the parameters of each block into one tensor, and each rank holds a shard of it.

Memory per rank, with N ranks: 1/N of the fp32 parameters, gradients and AdamW moments, 16/N bytes
per parameter. On top come the full parameters of the block that computes, of the next block (its
all-gather overlaps), and of the root (embedding, last norm and head). In backward also the full
gradients of a block.

Communication volume per micro-batch, with P the bytes of the parameters in compute precision and G
the bytes of the fp32 gradients: each block's parameters are all-gathered for its forward and again
for its backward, 2P(N-1)/N in all, and its gradients are reduce-scattered, G(N-1)/N. (The
embedding, the last norm and the head are gathered once.) DDP all-reduces once per step, which sends
2G(N-1)/N. With one micro-batch per step, FSDP1 sends 1.5 times as much in fp32, where P equals G,
and as much as DDP in bf16, where P is half of G.

The idea is ZeRO-3 (arXiv 1910.02054). PyTorch FSDP is described in arXiv 2304.11277.
"""

import contextlib
import math
import os
import time
from datetime import timedelta
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from pydantic.dataclasses import dataclass
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.optim import AdamW, Optimizer

import common
from model import (
    build_config,
    build_model,
    checkpoint_activations,
    compile_blocks,
    count_flops,
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

NEXT_COMMAND = "torchrun --standalone --nproc-per-node=2 fsdp2_pretrain.py"


# The shared flags, such as learning rate and batch sizes, are in run.py.
@dataclass
class Config(Flags):
    """The flags of this script, beside the shared ones."""

    text_column: str = flag("text", "column of the dataset that holds the text")
    checkpoint_style: Literal["stateful", "separate"] = flag(
        "stateful",
        "stateful: model and optimizer in one Stateful object. separate: a state dict for each. "
        "Every script reads both",
    )
    sharding_strategy: Literal["full_shard", "shard_grad_op", "hybrid_shard"] = flag(
        "full_shard",
        "full_shard: shard everything (ZeRO-3). shard_grad_op: keep parameters full from "
        "forward to backward (ZeRO-2). hybrid_shard: shard within a node, replicate across nodes",
    )
    reduce_every_micro_batch: bool = flag(
        True,
        "reduce-scatter gradients in every micro-batch. false: once per step, which needs memory "
        "for a full set of gradients, and has no effect in bf16",
    )

    def __post_init__(self) -> None:
        """Check how flags fit together."""
        super().__post_init__()
        world_size = int(os.environ.get("WORLD_SIZE", 1))
        alone = world_size > 1 and os.environ["LOCAL_WORLD_SIZE"] == "1"
        if alone and self.sharding_strategy == "hybrid_shard":
            common.refuse("--sharding_strategy hybrid_shard: FSDP1 needs 2 ranks on each node")
        # The compiler cannot trace bf16 parameters with fp32 gradients from another micro-batch.
        accumulates = self.global_batch_tokens > self.micro_batch_tokens * world_size
        if accumulates and self.compile and self.precision == "bf16":
            common.refuse("--compile in bf16 needs one micro-batch per rank under FSDP1")


# --- Strategy -------------------------------------------------------------------------------------


def init_process_group(config: Config) -> torch.device:
    """Create the process group from torchrun's variables; returns the device of this rank."""
    timeout = timedelta(minutes=config.timeout_minutes)
    if not torch.cuda.is_available():
        dist.init_process_group("gloo", timeout=timeout)
        return torch.device("cpu")
    device = set_up_gpu(config)
    # gloo beside NCCL handles tensors in CPU memory: pickled Python objects and the numbers of
    # `max_over_ranks`.
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout, device_id=device)
    return device


def parallelize(model: nn.Module, config: Config, device: torch.device) -> nn.Module:
    """Shard a model that is on the meta device, and give the shards memory and initial weights.

    FSDP1 wraps each block, and then the whole model. The parameters of a wrapped module become one
    flat tensor, of which each rank holds a shard. Hooks do the rest:

    - Before forward, an all-gather makes the flat tensor full, and the parameters are views of it.
      After forward it is freed.
    - Before backward, another all-gather makes it full again. After backward, a reduce-scatter
      leaves each rank the averaged gradient of its shard, and the full tensors are freed.

    On GPUs this communication runs on its own streams and overlaps with compute.
    """
    blocks = list(transformer_blocks(model))
    # Recomputation wraps a block's forward, and FSDP's hooks run around it. So a forward that is
    # recomputed uses the parameters that were gathered for backward.
    checkpoint_activations(blocks, config.activation_checkpointing)
    if config.compile:
        compile_blocks(blocks, config)

    ranks = dist.get_world_size()
    mesh = init_device_mesh(device.type, (ranks,))
    if config.sharding_strategy == "hybrid_shard":
        # Shard over the ranks of a row of the mesh, a node, and replicate across rows.
        in_node = int(os.environ["LOCAL_WORLD_SIZE"])
        mesh = init_device_mesh(
            device.type, (ranks // in_node, in_node), mesh_dim_names=("replicate", "shard")
        )
    # Shards and optimizer state stay fp32. Parameters are cast to bf16 before they are gathered, so
    # blocks compute in bf16. Gradients are cast to fp32 before they are reduced.
    bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    # On the meta device the model has shapes but no memory. Each rank draws the same full weights,
    # because a module is seeded by its name, and keeps its shards: nothing is broadcast.
    initialize(model, modules_outside_blocks(model), config.seed, device)
    model.tie_weights()  # `initialize` gave each module memory of its own, which untied them

    def wrap_policy(module, recurse, nonwrapped_numel):
        """Return whether to look inside a module (recurse), or whether to wrap it."""
        return recurse or module in blocks

    def initialize_block(module):
        """FSDP calls this for a block, then for each module in it, and then shards the block."""
        if module in blocks:
            initialize(model, module.modules(), config.seed, device)

    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=wrap_policy,  # the root gets the rest, embeddings included
        param_init_fn=initialize_block,  # one at a time: no rank holds more than one full block
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy[config.sharding_strategy.upper()],
        mixed_precision=None if config.precision == "fp32" else bf16,
        use_orig_params=True,  # parameters with and without weight decay stay apart
        device_id=device,
    )


def train_step(
    model: FullyShardedDataParallel,
    optimizer: Optimizer,
    batch: common.GlobalBatch,
    step: int,
    config: Config,
    device: torch.device,
) -> dict[str, float]:
    """Run one optimizer step; returns the mean loss of the global batch and the gradient norm.

    `model(**micro_batch)` returns the cross entropy summed over the micro-batch's target tokens
    (`forward_with_loss` in model.py). The root's forward computes it, because only there is the
    head's weight sure to be full.

    FSDP reduce-scatters the gradients of every micro-batch, overlapped with its backward, so a rank
    accumulates only its shards. With `--reduce_every_micro_batch false` it accumulates full
    gradients and reduce-scatters them once, on the last micro-batch. That saves communication but
    needs memory for a full set of gradients.
    """
    # The loss of a step is the sum over all target tokens, divided by their number in the global
    # batch, which every rank counts by itself. A mean of micro-batch means would give tokens of
    # small micro-batches more weight.
    # FSDP averages gradients over the ranks, so multiply by their number to get a sum. (AdamW would
    # hide a missing factor: its updates hardly depend on gradients' scale. The norm shows it.)
    scale = dist.get_world_size() / batch.num_targets
    # NOTE: under no_sync FSDP1 accumulates unsharded gradients in the compute precision. bf16 would
    # lose small ones, so reduce every micro-batch then, into fp32 shards.
    reduce_every = config.reduce_every_micro_batch or config.precision != "fp32"
    total_loss = torch.zeros((), device=device)
    for i, micro_batch in enumerate(batch.micro_batches):
        last = i == len(batch.micro_batches) - 1
        # NOTE: with --reduce_every_micro_batch false, a step would lack gradients if `last` came
        # one micro-batch early, without an error.
        with contextlib.nullcontext() if last or reduce_every else model.no_sync():
            loss = model(**common.to_device(micro_batch, device))  # all-gathers
            (loss * scale).backward()  # all-gathers, and reduce-scatters if gradients sync
        total_loss += loss.detach()
    dist.all_reduce(total_loss)

    # NOTE: nn.utils.clip_grad_norm_ would see only this rank's shards. FSDP1's own method adds up
    # the squares of all ranks: one all-reduce, so call it on every rank.
    norm = model.clip_grad_norm_(config.grad_clip or math.inf)

    # `.item()` waits for the GPU. Do it here, not after the update, because non-finite values must
    # not reach the weights.
    measured = {"loss": total_loss.item() / batch.num_targets, "grad_norm": norm.item()}
    refuse_non_finite(step, **measured)
    measured["learning_rate"] = learning_rate_at(step, config)
    for group in optimizer.param_groups:
        group["lr"] = measured["learning_rate"]
    optimizer.step()  # of this rank's shards, without communication
    optimizer.zero_grad()
    return measured


@torch.no_grad()
def evaluate(model: FullyShardedDataParallel, validation: common.Batches, run: Run) -> float | None:
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


def build_optimizer(model: FullyShardedDataParallel, decayed: set[str], config: Config) -> AdamW:
    """Build AdamW over this rank's shards; `decayed` are the names with weight decay.

    NOTE: call it after `parallelize`, in which `initialize` replaces all parameters. The old
    parameters never get gradients, so an optimizer over them would change nothing.
    """
    with_decay, without_decay = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            name = name.replace("_fsdp_wrapped_module.", "")
            (with_decay if name in decayed else without_decay).append(parameter)
    groups = [
        {"params": with_decay, "weight_decay": config.weight_decay},
        {"params": without_decay, "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)


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
    # Count parameters and FLOPs before the model is sharded. The default learning rate depends on
    # the number of parameters. (GPT-3 has 6e-4 for 125M, Llama 2 3e-4 for 7B.) Such rates ruin
    # pretrained weights, so --init_from uses a tenth.
    default = 3e-3 if model.num_parameters() < 10_000_000 else 3e-4
    set_learning_rates(config, default / 10 if config.init_from else default)
    run = Run(config, model, count_flops(model), tokenizer, documents, device)
    # Check whether this run may start before the model takes memory and time.
    checkpoints = common.Checkpoints(config, run.directory, run.facts, run.save_files, device)
    checkpoint, progress = checkpoints.find(config.resume)
    decayed = weight_decay_names(model)  # before FSDP1 flattens parameters to one dimension
    model = parallelize(model, config, device)
    optimizer = build_optimizer(model, decayed, config)
    # Load last: model and optimizer are sharded now, and each rank reads its shards only.
    if checkpoint:
        common.load_checkpoint(checkpoint, model, optimizer)
    elif config.init_from:
        common.load_weights(model, config.init_from)
    micro_batches = common.counted(accumulation, "micro-batch", "es")
    work = f"{micro_batches} per rank and step, {config.global_batch_tokens:,} tokens"
    run.begin(checkpoints, progress, config.sharding_strategy, work)

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
