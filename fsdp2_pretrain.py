"""Causal-LM pretraining with FSDP2: `fully_shard` turns each parameter into a sharded DTensor.

    torchrun --standalone --nproc-per-node=2 fsdp2_pretrain.py

When to use it: parameters, gradients and optimizer state do not fit on one GPU, or leave too little
room for activations.

FSDP is data parallelism: each rank (a process, usually with one GPU) computes all blocks, on
micro-batches of its own. Only what is stored is sharded. In an all-gather each rank brings its
shard and gets the full tensor. In a reduce-scatter each rank brings a full tensor and gets its
shard of the sum (docs/collectives.md shows both).

A DTensor is a tensor that is spread over ranks. Its `shape` is the shape of the full tensor, and
`to_local()` is this rank's part of it, for a parameter its shard. FSDP2 shards each parameter along
dimension 0.

Memory per rank, with N ranks: 1/N of the fp32 parameters, gradients and AdamW moments, 16/N bytes
per parameter. On top come the full parameters of the block that computes, of the next block (its
all-gather overlaps), and of the root (last norm, head and a tied embedding). Backward adds full
gradients: of the block that computes, of the block that is being reduce-scattered, and of the root
until backward ends.

Communication volume per micro-batch, with P the bytes of the parameters in compute precision and G
the bytes of the fp32 gradients: each block's parameters are all-gathered for its forward and again
for its backward, 2P(N-1)/N in all, and its gradients are reduce-scattered, G(N-1)/N. (The
embedding, the last norm and the head are gathered once.) DDP all-reduces once per step, which sends
2G(N-1)/N. With one micro-batch per step, FSDP2 sends 1.5 times as much in fp32, where P equals G,
and as much as DDP in bf16, where P is half of G.

The idea is ZeRO-3 (arXiv 1910.02054). PyTorch FSDP is described in arXiv 2304.11277.
docs/own_loop.md has these pieces for a model that is not transformers'.
"""

import math
import os
import time
from datetime import timedelta
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from pydantic import PositiveInt
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
    initialize,
    modules_outside_blocks,
    seed_by_name,
    transformer_blocks,
    use_float8,
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

NEXT_COMMAND = "torchrun --standalone --nproc-per-node=2 fsdp2_tp_pretrain.py"


# The shared flags, such as learning rate and batch sizes, are in run.py.
@dataclass
class Config(Flags):
    """The flags of this script, beside the shared ones."""

    text_column: str = flag("text", "column of the dataset that holds the text")
    precision: Literal["auto", "fp32", "bf16", "float8"] = flag(
        "auto",
        "compute precision. auto: bf16 on GPUs that have it, otherwise fp32. float8: bf16, but the "
        "linear layers of the blocks run in float8 (torchao, rowwise scales)",
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
    if config.precision == "float8":
        use_float8(model)
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
    optimizer.step()  # of this rank's shards, without communication
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


def build_optimizer(model: nn.Module, config: Config) -> AdamW:
    """Build AdamW over this rank's shards; matrices decay, embeddings, norms and biases do not.

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
    # Count parameters and FLOPs before the model is sharded. The default learning rate depends on
    # the number of parameters. (GPT-3 has 6e-4 for 125M, Llama 2 3e-4 for 7B.) Such rates ruin
    # pretrained weights, so --init_from uses a tenth.
    default = 3e-3 if model.num_parameters() < 10_000_000 else 3e-4
    set_learning_rates(config, default / 10 if config.init_from else default)
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
