"""Causal-LM pretraining with DDP (DistributedDataParallel): every rank holds the whole model.

    torchrun --standalone --nproc-per-node=2 ddp_pretrain.py

When to use it: parameters, gradients and optimizer state fit on one GPU with room to spare.

A rank is one process, usually with one GPU. An all-reduce gives every rank the sum of all ranks'
tensors, a broadcast the tensor of one rank (docs/collectives.md shows both).

Memory per rank: all fp32 parameters, gradients and AdamW moments, 16 bytes per parameter. (In bf16,
autocast also keeps bf16 copies of the matrices from forward to backward.) Ranks differ only in the
micro-batches that they train on. With --shard_optimizer (ZeRO-1), N ranks divide the moments among
themselves, so a rank needs 8 + 8/N bytes per parameter.

Communication volume per step, with G the bytes of the fp32 gradients: one all-reduce of the
gradients, 2G(N-1)/N. It runs in buckets that overlap with the backward of earlier layers. ZeRO-1
also broadcasts each updated parameter from the rank that owns it, at most G per rank.

PyTorch DDP is described in arXiv 2006.15704, ZeRO in arXiv 1910.02054.
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
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

import common
from model import (
    build_config,
    build_model,
    checkpoint_activations,
    compile_blocks,
    count_flops,
    initialize,
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

NEXT_COMMAND = "torchrun --standalone --nproc-per-node=2 fsdp1_pretrain.py"


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
    shard_optimizer: bool = flag(
        False,
        "ZeRO-1: each rank keeps the AdamW moments of some parameters, and updates only these",
    )


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


def parallelize(model: nn.Module, config: Config, device: torch.device) -> DistributedDataParallel:
    """Give the model memory and initial weights, the same on every rank, and wrap it in DDP.

    DDP adds a hook to each parameter, which autograd calls when the gradient is ready, and collects
    gradients in buckets of 25 MiB (the first has 1 MiB). A full bucket is all-reduced, which
    averages it over the ranks, while backward computes the gradients of earlier layers. (In the
    first step of a process one bucket holds all gradients, so nothing overlaps. Then DDP knows in
    which order they come, and builds the buckets.)
    """
    blocks = transformer_blocks(model)
    checkpoint_activations(blocks, config.activation_checkpointing)
    if config.compile:
        compile_blocks(blocks, config)
        # By default the compiler splits a graph where a bucket ends, so that an all-reduce starts
        # earlier. Here each block has a graph of its own already.
        torch._dynamo.config.optimize_ddp = False

    # The model is on the meta device: it has shapes but no memory. Each rank draws the same
    # weights, because a module is seeded by its name.
    initialize(model, model.modules(), config.seed, device)
    model.tie_weights()  # `initialize` gave each module memory of its own, which untied them
    if config.precision != "fp32":
        # Matmuls run in bf16. Parameters, gradients and optimizer state stay fp32.
        model.forward = torch.autocast(device.type, torch.bfloat16)(model.forward)
    # Gradients are views of the buckets, so they need no memory beside these. Buffers are constants
    # here, such as rotary frequencies. By default rank 0 would broadcast them in every step. (Once,
    # here, it does, and its weights too, though they are equal already.)
    return DistributedDataParallel(model, gradient_as_bucket_view=True, forward_sync_buffers=False)


def train_step(
    model: DistributedDataParallel,
    optimizer: Optimizer,
    batch: common.GlobalBatch,
    step: int,
    config: Config,
    device: torch.device,
) -> dict[str, float]:
    """Run one optimizer step; returns the mean loss of the global batch and the gradient norm.

    `model(**micro_batch)` returns the cross entropy summed over the micro-batch's target tokens
    (`forward_with_loss` in model.py).

    Under `no_sync`, each rank adds up its own gradients without communication. The backward of the
    last micro-batch all-reduces the sums.
    """
    # The loss of a step is the sum over all target tokens, divided by their number in the global
    # batch, which every rank counts by itself. A mean of micro-batch means would give tokens of
    # small micro-batches more weight.
    # DDP averages gradients over the ranks, so multiply by their number to get a sum. (AdamW would
    # hide a missing factor: its updates hardly depend on gradients' scale. The norm shows it.)
    scale = dist.get_world_size() / batch.num_targets
    total_loss = torch.zeros((), device=device)
    for i, micro_batch in enumerate(batch.micro_batches):
        last = i == len(batch.micro_batches) - 1
        # NOTE: with a `last` that is one micro-batch early, each rank would add its own gradients
        # to the averaged ones. The replicas would drift apart, without an error. The forward is
        # inside too, because DDP decides in it whether to sync.
        with contextlib.nullcontext() if last else model.no_sync():
            loss = model(**common.to_device(micro_batch, device))
            (loss * scale).backward()  # all-reduces if gradients sync
        total_loss += loss.detach()
    dist.all_reduce(total_loss)

    # All ranks have the same gradients now, so each computes the same norm without communication.
    norm = nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)

    # `.item()` waits for the GPU. Do it here, not after the update, because non-finite values must
    # not reach the weights.
    measured = {"loss": total_loss.item() / batch.num_targets, "grad_norm": norm.item()}
    refuse_non_finite(step, **measured)
    measured["learning_rate"] = learning_rate_at(step, config)
    for group in optimizer.param_groups:
        group["lr"] = measured["learning_rate"]
    optimizer.step()
    if config.shard_optimizer:
        broadcast_updates(model)
    # Set gradients to zero in place, because they are views of DDP's buckets. Freed ones would be
    # allocated again beside these. It is the model's `zero_grad`, because ZeRO-1's optimizer has
    # only some of the parameters.
    model.zero_grad(set_to_none=False)
    return measured


@torch.no_grad()
def evaluate(model: DistributedDataParallel, validation: common.Batches, run: Run) -> float | None:
    """Return the mean loss per target token in nats, on the same data for every world size.

    None if a signal asks to stop.
    """
    total = torch.zeros(2, dtype=torch.float64, device=run.device)  # loss, target tokens
    model.eval()
    for micro_batch in validation.evaluation(dist.get_rank(), dist.get_world_size()):
        micro_batch = common.to_device(micro_batch, run.device)
        total[0] += model.module(**micro_batch)  # without DDP, which only backward needs
        total[1] += (micro_batch["labels"] != common.IGNORED).sum()
        if run.stops_validation():  # a small all-reduce in CPU memory
            return None
    model.train()
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


# --- ZeRO-1: --shard_optimizer --------------------------------------------------------------------


def assign_owners(model: DistributedDataParallel) -> dict[nn.Parameter, int]:
    """Return the rank that updates each parameter: its owner.

    Each parameter, from the largest to the smallest, goes to the rank that has the fewest elements.
    """
    owners = {}
    elements = [0] * dist.get_world_size()  # of each rank
    for parameter in sorted(model.parameters(), key=torch.numel, reverse=True):
        owner = elements.index(min(elements))
        owners[parameter] = owner
        elements[owner] += parameter.numel()
    return owners


def broadcast_updates(model: DistributedDataParallel) -> None:
    """Send each parameter from the rank that has updated it to all others."""
    broadcasts = [
        dist.broadcast(parameter.detach(), owner, async_op=True)
        for parameter, owner in assign_owners(model).items()
    ]
    for broadcast in broadcasts:
        broadcast.wait()


# --- Optimizer and schedule -----------------------------------------------------------------------


def build_optimizer(model: DistributedDataParallel, config: Config) -> AdamW:
    """Build AdamW: matrices have weight decay, embeddings, norms and biases do not.

    With ZeRO-1, over this rank's parameters only. AdamW has moments for these alone.
    """
    rank = dist.get_rank()
    owners = assign_owners(model) if config.shard_optimizer else {}
    decayed = weight_decay_names(model)
    with_decay, without_decay = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and owners.get(parameter, rank) == rank:
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
    # The default learning rate depends on the number of parameters. (GPT-3 has 6e-4 for 125M, Llama
    # 2 3e-4 for 7B.) Such rates ruin pretrained weights, so --init_from uses a tenth.
    default = 3e-3 if model.num_parameters() < 10_000_000 else 3e-4
    set_learning_rates(config, default / 10 if config.init_from else default)
    run = Run(config, model, count_flops(model), tokenizer, documents, device)
    # Check whether this run may start before the model takes memory and time.
    checkpoints = common.Checkpoints(config, run.directory, run.facts, run.save_files, device)
    checkpoint, progress = checkpoints.find(config.resume)
    model = parallelize(model, config, device)
    optimizer = build_optimizer(model, config)
    if checkpoint:
        common.load_checkpoint(checkpoint, model, optimizer)
    elif config.init_from:
        common.load_weights(model, config.init_from)
    micro_batches = common.counted(accumulation, "micro-batch", "es")
    work = f"{micro_batches} per rank and step, {config.global_batch_tokens:,} tokens"
    run.begin(checkpoints, progress, common.counted(ranks, "replica"), work)

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
