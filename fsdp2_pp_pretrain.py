"""Causal-LM pretraining with FSDP2 and pipeline parallelism: each stage holds some of the blocks.

    torchrun --standalone --nproc-per-node=2 fsdp2_pp_pretrain.py

When to use it: the links between machines are too slow for FSDP2's all-gathers. Give each machine a
stage: stages send each other only hidden states and their gradients, and FSDP2 shards a stage
within its machine. A step needs many micro-batches to keep the bubble small.

The N ranks form S stages of N/S consecutive ranks. Each rank of a stage has a counterpart in every
other stage; these S ranks are a pipeline, and work on the same micro-batches. Within a stage, FSDP2
turns the parameters into DTensors. A DTensor is a tensor that is spread over ranks. Its `shape` is
the shape of the full tensor, and `to_local()` is this rank's part of it, for a parameter its shard.

Memory per rank: S/N of its stage's fp32 parameters, gradients and AdamW moments, 16S/N bytes for
each of these parameters. During a step also the stage's full parameters and full gradients, the
activations of up to S micro-batches, and receive buffers for all k micro-batches. The first and the
last stage both hold a tied embedding.

Communication volume per step, with A the bytes of [micro_batch_tokens, hidden size]: for each
micro-batch, a stage sends hidden states (A) to the next stage, and their gradients (A) come back.
The first and the last stage all-reduce the gradient of a tied embedding. Within a stage, with P the
bytes of the parameters in compute precision and G the bytes of the fp32 gradients, its N/S ranks
all-gather P/S and reduce-scatter G/S, (P+G)(N-S)/(SN) per step, however many micro-batches there
are.

`--schedule` is the order of forwards and backwards. A stage idles while it waits for other stages.
This is the bubble of the pipeline:
- `gpipe` (arXiv 1811.06965) runs all forwards, then all backwards. k micro-batches need k+S-1 slots
  to pass through S stages, and each stage idles in S-1 of them. A stage keeps the activations of
  all k micro-batches.
- `1f1b` (PipeDream-Flush, arXiv 2006.09503) has the same bubble but runs each backward as early as
  it can. A stage keeps the activations of up to S micro-batches instead of k.
- `interleaved` (arXiv 2104.04473) gives each rank two shorter stages. That halves the bubble, but
  keeps more activations, and a micro-batch is sent 2S-1 times instead of S-1: three times as much
  with two ranks in a pipeline, about twice as much with many.
- `zero_bubble` (ZB1P, arXiv 2401.10241) splits backward. The input's gradient comes first, because
  the previous stage waits for it. The weights' gradients fill two thirds of the bubble if forward
  and both gradients take equally long.
"""

import copy
import math
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
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

NEXT_COMMAND = "torchrun --standalone --nproc-per-node=2 fsdp2_ep_pretrain.py"


# The shared flags, such as learning rate and batch sizes, are in run.py.
@dataclass
class Config(Flags):
    """The flags of this script, beside the shared ones."""

    text_column: str = flag("text", "column of the dataset that holds the text")
    pipeline_parallel: PositiveInt = flag(2, "ranks of a pipeline, which share the blocks")
    schedule: Literal["1f1b", "gpipe", "interleaved", "zero_bubble"] = flag(
        "1f1b", "order of forwards and backwards; interleaved: two stages per rank"
    )
    dp_replicate: PositiveInt = flag(1, "replicas of each sharded stage (HSDP)")
    cpu_offload: bool = flag(False, "keep parameters, gradients and optimizer state in CPU memory")

    def __post_init__(self) -> None:
        """Check how flags fit together."""
        super().__post_init__()
        if self.schedule == "interleaved" and self.pipeline_parallel == 1:
            common.refuse("--schedule interleaved needs --pipeline_parallel 2 or more")
        selective = self.activation_checkpointing == "selective"
        if self.schedule == "zero_bubble" and (self.compile or selective):
            common.refuse(
                "--schedule zero_bubble works neither with --compile nor with "
                "--activation_checkpointing selective, because it splits backward"
            )


# --- Strategy -------------------------------------------------------------------------------------

# The classes for --schedule. A schedule runs the forwards and backwards of this rank's stages in
# its order, and sends and receives hidden states and their gradients.
SCHEDULES = {
    "1f1b": Schedule1F1B,
    "gpipe": ScheduleGPipe,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}
# Every stage runs the decoder's own forward, so each would repeat its work before the first block:
# position embeddings (a fifth module), scaling, or dropout.
DECODER_PARTS = {"embed_tokens", "layers", "norm", "rotary_emb"}
REPEATED = {"embedding_multiplier": 1, "mup_enabled": False, "embedding_dropout": 0}
# Model types whose blocks pass more to each other than the hidden states.
CONNECTED_TYPES = {"glm_moe_dsa", "zaya"}


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


def dp_rank_and_size(config: Config) -> tuple[int, int]:
    """Return this rank's index among the data-parallel ranks, and how many there are.

    Ranks of the same stage are data parallel. A stage consists of consecutive ranks.

    NOTE: the ranks of a pipeline work on the same micro-batches, so they have the same index.
    """
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    stage_size = max(1, ranks // config.pipeline_parallel)  # --steps 0 runs on one rank too
    return rank % stage_size, stage_size


def stages_per_rank(config: Config) -> int:
    return 2 if config.schedule == "interleaved" else 1


def check_batch(config: Config, dp_size: int, number: int) -> None:
    """Refuse a global batch whose `number` of micro-batches per rank does not fit the schedule.

    PyTorch's 1F1B needs at least one micro-batch per stage, and with fewer, some rank is always
    idle. The schedules `interleaved` and `zero_bubble` also need rounds of equal size.
    """
    smallest = config.micro_batch_tokens * dp_size * config.pipeline_parallel
    if number < config.pipeline_parallel:
        common.refuse(
            f"--global_batch_tokens {config.global_batch_tokens} holds fewer micro-batches than "
            f"there are stages: use at least {smallest}"
        )
    rounds = number // config.pipeline_parallel
    if config.schedule in ("interleaved", "zero_bubble") and number % rounds:
        common.refuse(
            f"--schedule {config.schedule} needs micro-batches that fill the pipeline evenly: "
            f"make --global_batch_tokens a multiple of {smallest}"
        )


def check_model(model: nn.Module, config: Config) -> None:
    """Refuse a model with fewer blocks than stages, or one that stages would compute wrongly."""
    parts = {name for name, _ in model.get_decoder().named_children()}
    if parts != DECODER_PARTS:
        needed = ", ".join(sorted(DECODER_PARTS))
        common.refuse(
            f"--model {config.model} cannot be split into stages: its decoder must consist of "
            f"{needed}"
        )
    for setting, neutral in REPEATED.items():
        if getattr(model.config, setting, neutral) != neutral:
            common.refuse(f"--model {config.model}: each stage would repeat its {setting}")
    if model.config.model_type in CONNECTED_TYPES:
        common.refuse(
            f"--model {config.model} cannot be split into stages: its blocks share more than "
            "hidden states"
        )
    num_blocks = len(transformer_blocks(model))
    if num_blocks < config.pipeline_parallel * stages_per_rank(config):
        common.refuse(
            f"--pipeline_parallel {config.pipeline_parallel} x {stages_per_rank(config)} stages is "
            f"more than the {num_blocks} blocks"
        )


def parallelize(model: nn.Module, config: Config, device: torch.device) -> nn.Module:
    """Keep this rank's stages of the model, shard and initialize them.

    The model keeps this rank's modules under their original names, for the checkpoint, and gets two
    attributes:

    - `model.stages`: a `PipelineStage` for each stage of this rank. It has the stage's module, runs
      its forward and backward, and sends and receives hidden states and their gradients.
    - `model.embedding_group`: the process group of the first and the last rank of a pipeline, if
      they share the embedding.

    `fully_shard(module)` makes one unit of the module's parameters that no earlier call on a
    submodule has claimed. It turns them into DTensors, and adds hooks that communicate:

    - Before the first forward of a step, one all-gather makes the unit's parameters full. With 1f1b
      and gpipe it runs when the first micro-batch reaches the unit, with the other schedules at the
      start of the step. The parameters stay full during the whole step.
    - Full gradients accumulate over all micro-batches. After the stage's last backward, one
      reduce-scatter leaves each rank the averaged gradient of its shard, and the full tensors are
      freed.
    """
    check_model(model, config)
    blocks = transformer_blocks(model)
    # Recomputation replaces a block's `forward`. FSDP's hooks run around `forward`, so a recomputed
    # forward uses the parameters that were gathered for backward. The compiler takes the block's
    # whole call, recomputation included, but leaves FSDP's hooks as they are.
    checkpoint_activations(blocks, config.activation_checkpointing)
    if config.compile:
        compile_blocks(blocks, config)

    # Each stage is a slice of the mesh: consecutive ranks, so that they share a machine. HSDP
    # replicates the shards within the stage.
    _, dp_size = dp_rank_and_size(config)
    mesh = init_device_mesh(
        device.type,
        (config.pipeline_parallel, config.dp_replicate, dp_size // config.dp_replicate),
        mesh_dim_names=("stage", "replicate", "shard"),
    )
    # Keep parameters full after a forward, because the next micro-batch follows.
    options = {"mesh": mesh["shard"], "reshard_after_forward": False}
    if config.dp_replicate > 1:
        options["mesh"] = mesh["replicate", "shard"]
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

    model.stages, model.embedding_group = build_stages(model, config, device)
    keep_own_modules(model)
    # On the meta device the model has shapes but no memory. Each rank draws the same full weights,
    # because a module is seeded by its name, and keeps its shards: nothing is broadcast.
    initialize(model, modules_outside_blocks(model), config.seed, device)
    if model.config.tie_word_embeddings and model.stages[-1].is_last:
        model.tie_weights()  # `initialize` gave each module memory of its own, which untied them
    for stage in model.stages:
        # From the inside out: blocks first, then the stage, which gets the rest.
        for block in transformer_blocks(stage.submod.model):
            if not isinstance(block, PassThrough):
                # One block at a time, so that a rank never holds more than one full block.
                initialize(model, block.modules(), config.seed, device)
                fully_shard(block, **options)
        fully_shard(stage.submod, **options)
    return model


class PassThrough(nn.Module):
    """Takes the place of another stage's block, so that this stage's blocks keep their names."""

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden


class Stage(nn.Module):
    """One stage of the model, with a forward for PyTorch's pipelining.

    It is a copy of the model with only the stage's modules, because a rank may have two stages, and
    a schedule gathers and reduces each separately. The modules themselves are not copied: `model`
    has them, too, under their original names.

    The first stage has the embedding, and the last one has the last norm and the head. Stages get
    equally many blocks, plus or minus one, although the head and the loss are extra work for the
    last stage.

    Args:
        model: the full model. It is on the meta device, where a copy takes no memory.
        num_positions: --micro_batch_tokens, the largest number of sequences x length.
    """

    def __init__(self, model: nn.Module, index: int, num_stages: int, num_positions: int):
        super().__init__()
        self.num_positions = num_positions
        self.is_last = index == num_stages - 1
        self.micro_batches: Iterator[dict] = iter([])  # of the next forward passes
        self.model = copy.deepcopy(model)  # its modules are replaced below
        full, own = model.get_decoder(), self.model.get_decoder()
        own.layers = nn.ModuleList(
            block if i * num_stages // len(full.layers) == index else PassThrough()
            for i, block in enumerate(full.layers)
        )
        has_tied_head = self.is_last and model.config.tie_word_embeddings
        own.embed_tokens = full.embed_tokens if index == 0 or has_tied_head else None
        own.rotary_emb = full.rotary_emb
        own.norm = full.norm if self.is_last else nn.Identity()
        self.model.lm_head = model.lm_head if self.is_last else None

    def forward(self, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Run the stage's blocks on its next micro-batch.

        Every stage reads the micro-batches itself, so labels, positions and cumulative sequence
        lengths need not be sent.

        NOTE: PyTorch's pipelines send one fixed shape, so pad hidden states to the largest. A
        tensor of another shape would be received wrongly or abort the run.

        Args:
            hidden: [num_positions, hidden size] from the previous stage; None on the first stage.

        Returns:
            The hidden states for the next stage, of the same shape; on the last stage, the summed
            loss.
        """
        micro_batch = dict(next(self.micro_batches))
        sequences, length = micro_batch["labels"].shape
        if hidden is not None:
            hidden = hidden[: sequences * length].unflatten(0, (sequences, length))
            micro_batch |= {"input_ids": None, "inputs_embeds": hidden}
        if self.is_last:
            return self.model(**micro_batch)  # `forward_with_loss` in model.py
        del micro_batch["labels"]
        output = self.model.get_decoder()(use_cache=False, **micro_batch)
        padding = self.num_positions - sequences * length
        return nn.functional.pad(output.last_hidden_state.flatten(0, 1), (0, 0, 0, padding))


def build_stages(
    model: nn.Module, config: Config, device: torch.device
) -> tuple[list[PipelineStage], dist.ProcessGroup | None]:
    """Build this rank's stages and, for a tied embedding, the group of the ranks that hold it."""
    _, dp_size = dp_rank_and_size(config)
    # The ranks of a pipeline work on the same micro-batches. NOTE: give sends and receives a group
    # of their own. Stages make unequal numbers of them. In a group that has collectives, too, that
    # confuses the checks of TORCH_DISTRIBUTED_DEBUG=DETAIL.
    pipelines = [list(range(i, dist.get_world_size(), dp_size)) for i in range(dp_size)]
    # Under gloo, a send waits as long as its group's timeout.
    timeout = timedelta(minutes=config.timeout_minutes)
    group, _ = dist.new_subgroups_by_enumeration(pipelines, timeout=timeout, group_desc="pipeline")
    # Declare what stages send. Otherwise PyTorch infers it with an extra forward for each new
    # schedule, that is in every step.
    hidden = torch.empty(
        (config.micro_batch_tokens, model.config.hidden_size),
        dtype=torch.bfloat16 if config.precision == "bf16" else torch.float32,
        device="meta",
        requires_grad=True,
    )
    num_stages = config.pipeline_parallel * stages_per_rank(config)
    stages = []
    # A pipeline's first rank has the stages 0, S, ..., its second one 1, S+1, ...
    for index in range(dist.get_rank() // dp_size, num_stages, config.pipeline_parallel):
        stage = PipelineStage(
            Stage(model, index, num_stages, config.micro_batch_tokens),
            index,
            num_stages,
            device,
            input_args=hidden if index > 0 else (),
            output_args=hidden,
            group=group,
        )
        stages.append(stage)
    embedding_group = None
    if model.config.tie_word_embeddings and config.pipeline_parallel > 1:
        ends = [[ranks[0], ranks[-1]] for ranks in pipelines]
        embedding_group, _ = dist.new_subgroups_by_enumeration(ends, group_desc="embedding")
    return stages, embedding_group


def keep_own_modules(model: nn.Module) -> None:
    """Drop the modules of other ranks' stages from the model."""
    own = {module for stage in model.stages for module in stage.submod.modules()}
    blocks, decoder = transformer_blocks(model), model.get_decoder()
    for i, block in enumerate(blocks):
        if block not in own:
            blocks[i] = PassThrough()
    if not model.stages[-1].is_last:
        decoder.norm = nn.Identity()
        model.lm_head = None
    if decoder.embed_tokens not in own:
        decoder.embed_tokens = None


def build_schedule(stages: list[PipelineStage], name: str, *arguments: Any) -> Any:
    """Return a schedule; 1f1b and gpipe accept only one stage."""
    own = stages[0] if name in ("1f1b", "gpipe") else stages
    # NOTE: scale_grads=True would divide the gradients by the number of micro-batches as well.
    return SCHEDULES[name](own, *arguments, scale_grads=False)


def train_step(
    model: nn.Module,
    optimizer: Optimizer,
    batch: common.GlobalBatch,
    step: int,
    config: Config,
    device: torch.device,
) -> dict[str, float]:
    """Run one optimizer step; returns the mean loss of the global batch and the gradient norm.

    On the last stage, `stage.submod(hidden)` returns the cross entropy summed over the
    micro-batch's target tokens (`Stage.forward`), on the others the hidden states for the next
    stage. The weights are sure to be full only inside the stage's forward.

    With 1F1B, once the first micro-batches have filled the pipeline, each stage alternates one
    forward and one backward of an earlier micro-batch.
    """
    # The loss of a step is the sum over all target tokens, divided by their number in the global
    # batch, which every rank counts by itself. A mean of micro-batch means would give tokens of
    # small micro-batches more weight.
    # FSDP averages gradients over the ranks of a stage, so multiply by their number to get a sum.
    _, dp_size = dp_rank_and_size(config)
    scale = dp_size / batch.num_targets
    total_loss = torch.zeros((), device=device)

    def scaled_loss(loss: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Return the scaled loss, from which backward starts."""
        total_loss.add_(loss.detach())
        return loss * scale

    micro_batches = [common.to_device(micro_batch, device) for micro_batch in batch.micro_batches]
    for stage in model.stages:
        stage.submod.micro_batches = iter(micro_batches)
    schedule = build_schedule(model.stages, config.schedule, len(micro_batches), scaled_loss)
    # The schedule splits `target`, so that `scaled_loss` gets one scale for each micro-batch.
    scales = torch.full((len(micro_batches),), scale, device=device)
    # All-gathers, sends and receives, and reduce-scatters.
    schedule.step(target=scales, return_outputs=False)
    if model.embedding_group is not None:
        # The first stage computes the gradient of the tied weight as the embedding, and the last
        # stage as the head. Both need the sum, which keeps their copies equal.
        gradient = model.get_input_embeddings().weight.grad.to_local()
        dist.all_reduce(gradient, group=model.embedding_group)
    dist.all_reduce(total_loss)

    # The norm covers all stages, but a rank has only its own stages' gradients.
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    counted = parameters
    if model.embedding_group is not None and model.stages[-1].is_last:
        # The first stage counts the tied embedding.
        embedding = model.get_input_embeddings().weight
        counted = [parameter for parameter in parameters if parameter is not embedding]
    # One all-reduce over the ranks of this stage (of one replica). All of them get the stage's
    # norm.
    stage_norm = nn.utils.get_total_norm([parameter.grad for parameter in counted]).full_tensor()
    squared_norm = stage_norm**2
    dist.all_reduce(squared_norm)  # over all ranks, so it counts each stage dp_size times
    norm = (squared_norm / dp_size).sqrt()
    nn.utils.clip_grads_with_norm_(parameters, config.grad_clip or math.inf, norm)

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

    def add_loss(loss: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Runs on the last stage only."""
        total[0] += loss
        total[1] += (labels != common.IGNORED).sum()
        return loss

    # Without a backward, a stage can start on the next micro-batch as soon as it has sent its
    # hidden states. So a schedule of one micro-batch at a time fills the pipeline too.
    name = "interleaved" if len(model.stages) > 1 else "gpipe"
    schedule = build_schedule(model.stages, name, 1, add_loss)
    for stage in model.stages:
        stage.submod.eval()
    # Forward all-gathers, so a rank with one more micro-batch would hang, waiting for the others.
    # All ranks get equally many.
    for i, micro_batch in enumerate(validation.evaluation(*dp_rank_and_size(run.config))):
        micro_batch = common.to_device(micro_batch, run.device)
        for stage in model.stages:
            stage.submod.micro_batches = iter([micro_batch])
        schedule.eval(target=micro_batch["labels"], return_outputs=False)
        # This all-reduce makes all stages wait, so run it after every 16th micro-batch only.
        if i % 16 == 0 and run.stops_validation():
            return None
    for stage in model.stages:
        stage.submod.train()
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
    stages, replicas = config.pipeline_parallel, config.dp_replicate
    if config.steps and ranks % stages:
        common.refuse(f"--pipeline_parallel {stages} does not divide {ranks} ranks")
    dp_rank, dp_size = dp_rank_and_size(config)
    if config.steps and dp_size % replicas:
        common.refuse(f"--dp_replicate {replicas} does not divide the {dp_size} ranks of a stage")
    accumulation = micro_batches_per_rank(config, dp_size)
    check_batch(config, dp_size, accumulation)

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
    mesh = f"{stages} stages x {replicas} x {dp_size // replicas} shards"
    micro_batches = common.counted(accumulation, "micro-batch", "es")
    work = f"{micro_batches} per rank and step, {config.global_batch_tokens:,} tokens"
    run.begin(checkpoints, progress, mesh, work)

    # Step and tokens are the position in the data, so a resumed run needs no other data state.
    step, tokens = progress["step"], progress["tokens"]
    # Data-parallel ranks get the micro-batches of a global batch round-robin.
    batches = training.stream(tokens, accumulation, dp_rank, dp_size)
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
