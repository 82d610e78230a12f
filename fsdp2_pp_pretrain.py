"""Causal-LM pretraining with FSDP2 and pipeline parallelism: each stage holds some of the blocks.

    torchrun --standalone --nproc-per-node=2 fsdp2_pp_pretrain.py

When to use it: the links between machines are too slow for FSDP2's all-gathers. Give each machine a
stage: stages only send each other hidden states, and FSDP2 shards a stage within its machine. A
step needs many micro-batches to keep the bubble small. Read fsdp2_pretrain.py before it, and
fsdp2_ep_pretrain.py next.

Memory per rank, with N ranks in S stages: S/N of its stage's parameters, gradients and AdamW
moments. During a step also the stage's unsharded parameters and gradients, the activations of up to
S micro-batches, and receive buffers for all k micro-batches. The first and the last stage both hold
a tied embedding.

Communication volume per step, with A the bytes of [micro_batch_tokens, hidden size]: for each
micro-batch, a stage sends hidden states (A) to the next stage, and their gradients (A) come back.
Within a stage, with P and G the bytes of parameters and gradients, its N/S ranks all-gather P/S and
reduce-scatter G/S, (P+G)(N-S)/(SN) per step, however many micro-batches there are.

`--schedule` is the order of forwards and backwards. While a stage waits for others, it idles, which
is the bubble of the pipeline:
- `gpipe` (arXiv 1811.06965) runs all forwards, then all backwards. k micro-batches need k+S-1 slots
  to pass through S stages, and each stage idles in S-1 of them. It keeps the activations of k.
- `1f1b` (PipeDream-Flush, arXiv 2006.09503) has the same bubble but runs each backward as early as
  it can. So a stage keeps the activations of S micro-batches instead of k.
- `interleaved` (arXiv 2104.04473) gives each rank two shorter stages. That halves the bubble,
  doubles the volume between stages, and keeps more activations.
- `zero_bubble` (ZB1P, arXiv 2401.10241) splits backward: the gradient of the input, for which the
  previous stage waits, comes first. The gradients of the weights fill the bubble.
"""

import gc
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
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
from torch.nn.attention.varlen import varlen_attn
from torch.optim import AdamW, Optimizer
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedConfig

import common
from common import flag

# --- Config ---------------------------------------------------------------------------------------

NEXT_COMMAND = "torchrun --standalone --nproc-per-node=2 fsdp2_ep_pretrain.py"
# The default peak learning rate of a model with fewer than 10 million parameters.
SMALL_MODEL_PEAK = 3e-3
# The architectures that --model knows by name.
SHAPES = {
    "tiny": {
        "model_type": "qwen2",
        "hidden_size": 192,
        "intermediate_size": 640,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "initializer_range": 0.07,
        "tie_word_embeddings": True,
    },
    "qwen2-0.5b": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
    },
}


@dataclass(config=ConfigDict(allow_inf_nan=False))
class Config(common.Flags):
    """The flags of this script, after those that all scripts share."""

    # model
    model: str = flag("tiny", "tiny, qwen2-0.5b, or a directory or hub id with a config.json")
    init_from: str | None = flag(
        None,
        "weights to start from: a run directory, or a Hugging Face directory or hub id. Its model "
        "and tokenizer replace --model and --tokenizer unless you set these",
    )
    text_column: str = flag("text", "column of the dataset that holds the text")

    # optimization
    global_batch_tokens: PositiveInt = flag(
        4096, "token positions of one optimizer step, over all ranks and micro-batches"
    )
    learning_rate: PositiveFloat | None = flag(
        None,
        "peak learning rate of AdamW. The default depends on the model: 3e-3 with fewer than 10 "
        "million parameters, otherwise 3e-4; a tenth of that with --init_from",
    )
    min_learning_rate: NonNegativeFloat | None = flag(
        None, "learning rate at the end of the decay; default: a fiftieth of the peak"
    )
    warmup_steps: NonNegativeInt = flag(20, "steps of linear warm-up")
    decay_steps: PositiveInt | None = flag(
        None, "decay over the last N steps only (warmup-stable-decay); default: after the warm-up"
    )
    weight_decay: NonNegativeFloat = flag(
        0.1, "weight decay of matrices (embeddings, norms and biases have none)"
    )
    grad_clip: NonNegativeFloat = flag(1.0, "clip the gradient norm to this; 0 disables clipping")
    eval_every: PositiveInt = flag(200, "steps between validations")
    eval_tokens: PositiveInt = flag(
        250_000, "size of the validation set in tokens (whole documents, the first by hash)"
    )

    # precision, memory and speed
    precision: Literal["auto", "fp32", "bf16"] = flag(
        "auto", "compute precision. auto: bf16 on GPUs that have it, otherwise fp32"
    )
    activation_checkpointing: Annotated[str, Field(pattern=r"^(none|full|selective|0?\.\d+)$")] = (
        flag("none", "none, full, selective, or a fraction of the blocks such as 0.5")
    )
    compile: bool = flag(False, "compile each transformer block")

    # this strategy
    pipeline_parallel: PositiveInt = flag(2, "ranks that the blocks are split over")
    schedule: Literal["1f1b", "gpipe", "interleaved", "zero_bubble"] = flag(
        "1f1b", "order of forwards and backwards; interleaved: two stages per rank"
    )
    dp_replicate: PositiveInt = flag(1, "replicas of each sharded stage (HSDP)")
    cpu_offload: bool = flag(False, "keep parameters, gradients and optimizer state in CPU memory")

    def __post_init__(self) -> None:
        """Check how flags fit together. The limits of a single flag are in its type."""
        super().__post_init__()
        if self.precision == "auto":
            # GPUs before Ampere only emulate bf16.
            bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported(False)
            self.precision = "bf16" if bf16 else "fp32"
        world_size = int(os.environ.get("WORLD_SIZE", 1))
        if self.steps and world_size % self.pipeline_parallel:
            raise ValueError(
                f"--pipeline_parallel {self.pipeline_parallel} does not divide {world_size} ranks"
            )
        stage_size = max(1, world_size // self.pipeline_parallel)  # ranks of a stage
        if self.steps and stage_size % self.dp_replicate:
            raise ValueError(
                f"--dp_replicate {self.dp_replicate} does not divide the {stage_size} ranks of a "
                "stage"
            )
        common.check_global_batch(self, stage_size)
        smallest = self.micro_batch_tokens * stage_size * self.pipeline_parallel
        if self.global_batch_tokens < smallest:
            raise ValueError(
                f"--global_batch_tokens {self.global_batch_tokens} holds fewer micro-batches than "
                f"there are stages: use at least {smallest}"
            )
        # How many times the micro-batches of a rank fill the pipeline.
        count = self.global_batch_tokens // (self.micro_batch_tokens * stage_size)
        rounds = count // self.pipeline_parallel
        if self.schedule in ("interleaved", "zero_bubble") and count % rounds:
            raise ValueError(
                f"--schedule {self.schedule} needs micro-batches that fill the pipeline evenly: "
                f"make --global_batch_tokens a multiple of {smallest}"
            )
        selective = self.activation_checkpointing == "selective"
        if self.schedule == "zero_bubble" and (self.compile or selective):
            raise ValueError(
                "--schedule zero_bubble works neither with --compile nor with "
                "--activation_checkpointing selective, because it splits backward"
            )


# --- Strategy -------------------------------------------------------------------------------------


def init_process_group(config: Config) -> torch.device:
    """Join the process group that torchrun set up; returns the device of this rank."""
    timeout = timedelta(minutes=config.timeout_minutes)
    if not torch.cuda.is_available():
        dist.init_process_group("gloo", timeout=timeout)
        return torch.device("cpu")
    ranks, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
    if ranks > gpus:
        advice = f'--nproc-per-node={gpus}, or CUDA_VISIBLE_DEVICES="" to train on CPUs'
        common.refuse(f"{ranks} ranks cannot share {gpus} GPUs: use {advice}")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    if config.precision == "fp32":
        # Use TF32 matmuls: several times faster, with 10 instead of 23 bits of mantissa.
        torch.set_float32_matmul_precision("high")
    # cuDNN attention builds a plan for each new shape, which costs more than it saves unless
    # padding keeps the number of shapes small.
    torch.backends.cuda.enable_cudnn_sdp(config.pad_to_multiple_of > 1)
    # gloo beside NCCL handles tensors in CPU memory: Python objects and offloaded gradients.
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout, device_id=device)
    return device


def dp_rank_and_size(config: Config) -> tuple:
    """Return this rank's index among the data-parallel ranks, and how many there are.

    Ranks of the same stage are data parallel. A stage consists of consecutive ranks.

    NOTE: the stages of a pipeline all work on the same micro-batches, so they share an index.
    """
    size = dist.get_world_size() // config.pipeline_parallel
    return dist.get_rank() % size, size


SCHEDULES = {
    "1f1b": Schedule1F1B,
    "gpipe": ScheduleGPipe,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}
# Actions of a schedule. torch 2.15 waits for each send in an action of its own.
FORWARD = {"F", "SEND_F", "WAIT_SEND_F", "RECV_F", "UNSHARD", "RESHARD"}


def stages_per_rank(config: Config) -> int:
    return 2 if config.schedule == "interleaved" else 1


def parallelize(model: nn.Module, config: Config, device: torch.device) -> nn.Module:
    """Keep this rank's stage of the model, shard it over the stage's ranks, and initialize it.

    Within a stage, `fully_shard` works as in fsdp2_pretrain.py, with one difference: the pipeline
    schedule keeps the parameters unsharded and accumulates unsharded gradients during the whole
    step. It all-gathers once before the first forward, and reduce-scatters once after the last
    backward. So the flags --reshard_after_forward and --reduce_every_micro_batch do not exist here.

    The model keeps the modules of this rank under its own names, for the checkpoint. `model.stages`
    are what PyTorch's pipelining runs. `model.embedding_group` has the first and the last rank of a
    pipeline, if they share the embedding.
    """
    check_model(model, config)
    checkpoint_activations(transformer_blocks(model), config.activation_checkpointing)
    if config.compile:
        compile_blocks(transformer_blocks(model), config)

    # Each stage is a slice of the mesh: consecutive ranks, so that they share a machine. HSDP
    # replicates the shards within the stage.
    num_stages = config.pipeline_parallel
    _, dp_size = dp_rank_and_size(config)
    mesh = init_device_mesh(
        device.type,
        (num_stages, config.dp_replicate, dp_size // config.dp_replicate),
        mesh_dim_names=("stage", "replicate", "shard"),
    )
    options = {"mesh": mesh["shard"], "reshard_after_forward": False}
    if config.dp_replicate > 1:
        options["mesh"] = mesh["replicate", "shard"]
    if config.precision == "bf16":
        # Parameters are cast to bf16 as they are all-gathered, so blocks compute in bf16. The
        # shards and the optimizer state stay fp32. Reduce gradients in fp32 too. The default is
        # bf16 in torch 2.13, and the type of the shards from 2.15 on. Do not cast a block's inputs
        # either: what the model computes in fp32 (rotary embeddings in some types) stays fp32.
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    if config.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")

    build_stages(model, config, device)
    keep_own_modules(model)
    initialize(model, modules_outside_blocks(model), config.seed, device)
    if model.config.tie_word_embeddings and model.stages[-1].is_last:
        model.tie_weights()  # `initialize` gave each module memory of its own, which unties them
    for stage in model.stages:
        # `fully_shard` claims only parameters that no submodule has claimed yet, so apply it
        # bottom-up: blocks first, then the stage.
        for block in stage.submod.blocks:
            if not isinstance(block, PassThrough):
                # Initialize one block at a time, so that no rank ever holds more than one full one.
                initialize(model, block.modules(), config.seed, device)
                fully_shard(block, **options)
        fully_shard(stage.submod, **options)
    return model


# Every stage runs the decoder's own forward, so all of them would repeat what it does before the
# first block: positions (a module besides these four), a factor, or dropout.
DECODER_PARTS = {"embed_tokens", "layers", "norm", "rotary_emb"}
REPEATED = {"embedding_multiplier": 1, "mup_enabled": False, "embedding_dropout": 0}
# Model types whose blocks pass more to each other than the hidden states.
CONNECTED_TYPES = {"glm_moe_dsa", "zaya"}


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


class PassThrough(nn.Module):
    """Replaces a block of another stage, so that this stage's blocks keep their names."""

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden


class Stage(nn.Module):
    """What one stage has of the model, with a forward for PyTorch's pipelining.

    It is a module of its own because a rank may have several stages, and a schedule gathers and
    reduces the parameters of one at a time.

    The first stage has the embedding, and the last one has the last norm and the head. Every stage
    gets equally many blocks, although the head and the loss are extra work for the last one.

    Args:
        num_positions: --micro_batch_tokens, the largest number of sequences x length.
    """

    def __init__(self, model: nn.Module, index: int, num_stages: int, num_positions: int):
        super().__init__()
        self.run_model = (model, model.forward)  # in a tuple, so that it is not a submodule
        self.num_positions = num_positions
        self.is_last = index == num_stages - 1
        self.micro_batches: Iterator[dict] = iter([])  # of the next forward passes
        blocks = transformer_blocks(model)
        self.blocks = nn.ModuleList(
            block if i * num_stages // len(blocks) == index else PassThrough()
            for i, block in enumerate(blocks)
        )
        decoder = model.get_decoder()
        has_tied_head = self.is_last and model.config.tie_word_embeddings
        self.embedding = decoder.embed_tokens if index == 0 or has_tied_head else None
        self.norm = decoder.norm if self.is_last else nn.Identity()
        self.head = model.lm_head if self.is_last else None

    def forward(self, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Run the stage's blocks on its next micro-batch.

        Every stage reads the micro-batches itself, so labels, positions and cumulative sequence
        lengths need not be sent.

        NOTE: PyTorch's pipelines send tensors of one shape, so pad them to the largest. A tensor of
        another shape would be received wrongly or abort the run.

        Args:
            hidden: [num_positions, hidden size] from the previous stage; None on the first stage.

        Returns:
            The hidden states for the next stage, of the same shape, or on the last one the summed
            loss.
        """
        micro_batch = dict(next(self.micro_batches))
        sequences, length = micro_batch["labels"].shape
        if hidden is not None:
            hidden = hidden[: sequences * length].unflatten(0, (sequences, length))
            micro_batch |= {"input_ids": None, "inputs_embeds": hidden}
        model, full_forward = self.run_model
        decoder = model.get_decoder()
        of_all_stages = decoder.layers, decoder.norm
        decoder.layers, decoder.norm = self.blocks, self.norm
        try:
            if self.is_last:
                return full_forward(**micro_batch)
            del micro_batch["labels"]
            output = decoder(use_cache=False, **micro_batch)
        finally:
            decoder.layers, decoder.norm = of_all_stages
        padding = self.num_positions - sequences * length
        return nn.functional.pad(output.last_hidden_state.flatten(0, 1), (0, 0, 0, padding))


def build_stages(model: nn.Module, config: Config, device: torch.device) -> None:
    """Describe this rank's stages to PyTorch's pipelining, and create the groups they use."""
    _, dp_size = dp_rank_and_size(config)
    # The ranks of a pipeline work on the same micro-batches. NOTE: give sends and receives a group
    # of their own. Stages make unequal numbers of them, which confuses the checks of collectives
    # (TORCH_DISTRIBUTED_DEBUG=DETAIL) in a group that has both.
    pipelines = [list(range(i, dist.get_world_size(), dp_size)) for i in range(dp_size)]
    # Under gloo, a send waits as long as its group's timeout.
    timeout = timedelta(minutes=config.timeout_minutes)
    group, _ = dist.new_subgroups_by_enumeration(pipelines, timeout=timeout, group_desc="pipeline")
    # Declare what stages send. Otherwise PyTorch runs an extra forward to find out, for each new
    # schedule, which means at every step.
    hidden = torch.empty(
        (config.micro_batch_tokens, model.config.hidden_size),
        dtype=torch.bfloat16 if config.precision == "bf16" else torch.float32,
        device="meta",
        requires_grad=True,
    )
    num_stages = config.pipeline_parallel * stages_per_rank(config)
    model.stages = []
    # Rank 0 has the stages 0, S, ..., rank 1 has 1, S+1, ...
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
        model.stages.append(stage)
    model.embedding_group = None
    if model.config.tie_word_embeddings and config.pipeline_parallel > 1:
        ends = [[ranks[0], ranks[-1]] for ranks in pipelines]
        model.embedding_group, _ = dist.new_subgroups_by_enumeration(ends, group_desc="embedding")


def keep_own_modules(model: nn.Module) -> None:
    """Drop from the model what belongs to stages of other ranks."""
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
    """Return a schedule; the simple ones take a single stage."""
    own = stages[0] if name in ("1f1b", "gpipe") else stages
    # NOTE: scale_grads=True would divide the gradients by the number of micro-batches as well.
    return SCHEDULES[name](own, *arguments, scale_grads=False)


def optimizer_parameters(model: nn.Module) -> list:
    """Return the parameters that this rank's optimizer updates, with their names.

    These are this rank's shards of its stage's parameters.

    NOTE: call it after `parallelize`. An optimizer that was built before would hold the unsharded
    parameters, which the model no longer uses.
    """
    return list(model.named_parameters())


def forward_backward(
    model: nn.Module, batch: common.GlobalBatch, config: Config, device: torch.device
) -> torch.Tensor:
    """Run forward and backward on all micro-batches; returns the loss summed over all ranks.

    With 1F1B, once the first micro-batches have filled the pipeline, each stage alternates one
    forward and one backward of an earlier micro-batch.
    """
    total_loss = torch.zeros((), device=device)

    def scaled_loss(loss: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Return what the last stage starts backward from."""
        total_loss.add_(loss.detach())
        return loss * scale

    micro_batches = [common.to_device(micro_batch, device) for micro_batch in batch.micro_batches]
    for stage in model.stages:
        stage.submod.micro_batches = iter(micro_batches)
    # The loss of a step is the sum over all target tokens, divided by their number in the global
    # batch. A mean of micro-batch means would give tokens of small micro-batches more weight.
    # FSDP averages gradients over the ranks of a stage, so multiply by their number to get a sum.
    _, dp_size = dp_rank_and_size(config)
    scales = torch.full((len(micro_batches),), dp_size / batch.num_targets, device=device)
    schedule = build_schedule(model.stages, config.schedule, len(micro_batches), scaled_loss)
    # All-gathers, then sends and receives, then reduce-scatters. The schedule splits `target`, so
    # that `scaled_loss` gets one scale for each micro-batch.
    schedule.step(target=scales, return_outputs=False)
    if model.embedding_group is not None:
        # The first stage computes the gradient of the tied embedding as the embedding, and the last
        # one as the head. Both need the sum, which keeps their copies equal.
        gradient = model.get_input_embeddings().weight.grad.to_local()
        dist.all_reduce(gradient, group=model.embedding_group)
    dist.all_reduce(total_loss)
    return total_loss


def clip_grad_norm(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Clip the gradient norm to `max_norm`; returns the norm before clipping.

    NOTE: the norm covers all stages, but a rank only has gradients of its own.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    if model.embedding_group is not None and model.stages[-1].is_last:
        # The first stage counts the tied embedding.
        embedding = model.get_input_embeddings().weight
        counted = [parameter.grad for parameter in parameters if parameter is not embedding]
    else:
        counted = [parameter.grad for parameter in parameters]
    squared_norm = nn.utils.get_total_norm(counted).full_tensor() ** 2  # of this rank's stages
    # All ranks of a stage have the same value, so the sum counts each stage that many times.
    dist.all_reduce(squared_norm)
    stage_size = dist.get_world_size() / model.stages[0].group_size
    norm = (squared_norm / stage_size).sqrt()
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def optimizer_step(model: nn.Module, optimizer: Optimizer) -> None:
    """Update the shards of this rank, and free their gradients.

    NOTE: model.zero_grad() would miss some. While a module is unsharded, as the root is after a
    validation, model.parameters() are not the sharded ones that have the gradients.
    """
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def validation_loss(
    model: nn.Module, micro_batches: Iterable[dict], config: Config, device: torch.device
) -> torch.Tensor:
    """Return the summed loss and the number of target tokens over all ranks, float64 [2]."""
    total = torch.zeros(2, dtype=torch.float64, device=device)

    def add_loss(loss: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Runs on the last stage only."""
        total[0] += loss
        total[1] += (labels >= 0).sum()
        return loss

    # Without a backward, a stage can start on the next micro-batch as soon as it has sent its
    # hidden states. So a schedule of one micro-batch at a time fills the pipeline too.
    name = "interleaved" if len(model.stages) > 1 else "gpipe"
    schedule = build_schedule(model.stages, name, 1, add_loss)
    if name == "interleaved":
        # NOTE: torch (2.13 to 2.15) would run the backward between two stages of a rank here too.
        for actions in schedule.pipeline_order_with_comms.values():
            actions[:] = [action for action in actions if action.computation_type in FORWARD]
    for micro_batch in micro_batches:  # forward all-gathers, so each rank needs equally many
        micro_batch = common.to_device(micro_batch, device)
        for stage in model.stages:
            stage.submod.micro_batches = iter([micro_batch])
        schedule.eval(target=micro_batch["labels"], return_outputs=False)
    dist.all_reduce(total)
    return total


# --- The rest is the same text in every pretraining script ----------------------------------------
# --- Model ----------------------------------------------------------------------------------------
# An ordinary transformers model that returns its loss. It knows nothing of ranks.

# The loss computes the logits of this many tokens at a time: 1.2 GB in fp32 for 150,000 ids.
CHUNK_TOKENS = 2048


def build_model_config(config: Config, tokenizer: common.Tokenizer) -> PreTrainedConfig:
    """Build the architecture of a named shape, or read the config.json that --model points to."""
    vocabulary_size = 1 + max(tokenizer.get_vocab().values())  # some tokenizers skip ids
    if config.model in SHAPES:
        padded_size = math.ceil(vocabulary_size / 64) * 64  # keeps the head's matmul fast
        model_config = AutoConfig.for_model(vocab_size=padded_size, **SHAPES[config.model])
    else:
        model_config = common.read_model_config(config, vocabulary_size)
    model_config.eos_token_id = tokenizer.eos_token_id  # where generation stops
    # transformers would keep the embedding of a pad token at zero. Padding is masked by position.
    model_config.pad_token_id = None
    model_config.bos_token_id = None
    return model_config


def build_model(config: Config, model_config: PreTrainedConfig) -> nn.Module:
    """Build the model on the meta device: it has shapes, but no memory and no weights yet."""
    AttentionInterface.register("documents", document_attention)
    # For bucketed batches, transformers picks SDPA, or eager attention where a type lacks it.
    attention = "documents" if config.batching == "packed" else None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            model_config, dtype=torch.float32, attn_implementation=attention
        )
    common.freeze_unused(model)
    loss = torch.compile(chunk_loss) if config.compile else chunk_loss
    model.forward = partial(forward_with_loss, model, loss)
    return model


def forward_with_loss(
    self: nn.Module, loss: Callable, input_ids: torch.Tensor, labels: torch.Tensor, **kwargs: Any
) -> torch.Tensor:
    """Replace the model's forward; returns the cross entropy summed over the target tokens.

    The logits of a whole micro-batch, [tokens, vocabulary], would be its largest tensor by far.
    Computing them chunk by chunk, and again in backward, never holds more than one chunk.

    NOTE: the loss has to be inside the root's forward. FSDP all-gathers the parameters of a module
    for its forward only, and the head belongs to the root.

    Args:
        loss: `chunk_loss`, or the same compiled.
        input_ids, labels: int64 [sequences, length]. Labels are already shifted.
        kwargs: the other keys of a micro-batch, see `common.Batches.collate`.
    """
    output = self.get_decoder()(input_ids=input_ids, use_cache=False, **kwargs)
    hidden = output.last_hidden_state.flatten(0, 1)  # [tokens, hidden size]
    head = self.get_output_embeddings()
    labels = labels.flatten()  # [tokens]
    if len(labels) <= CHUNK_TOKENS:
        return loss(hidden, head.weight, head.bias, labels)
    total = torch.zeros((), device=hidden.device)
    for chunk, targets in zip(hidden.split(CHUNK_TOKENS), labels.split(CHUNK_TOKENS)):
        total += checkpoint(loss, chunk, head.weight, head.bias, targets, use_reentrant=False)
    return total


def chunk_loss(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor
) -> torch.Tensor:
    """Return the summed cross entropy in fp32. (F.linear_cross_entropy sums in bf16: 0.4 % off.)"""
    # Some decoders (Mamba) return fp32 hidden states although the parameters are bf16.
    logits = nn.functional.linear(hidden.to(weight.dtype), weight, bias)  # [chunk, vocabulary]
    return nn.functional.cross_entropy(logits.float(), labels, reduction="sum")


def document_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple:
    """Causal attention within each document of a packed sequence, for `AttentionInterface`.

    SDPA would need a [length, length] mask, and would compute what the mask hides.

    Args:
        query: [1, heads, length, head size]; key and value may have fewer heads.
        cu_seq_lens_q: int32 [documents + 1], cumulative sequence lengths.
        max_length_q: the longest a document can be.
        scaling: factor of the scores; None for 1 / sqrt(head size).

    Raises:
        ValueError: the model asks for something that this attention does not apply.
    """
    window = kwargs.get("sliding_window") or max_length_q
    if attention_mask is not None or kwargs.get("s_aux") is not None or window < max_length_q:
        raise ValueError("packed attention has no mask, no sinks and no sliding window")
    # Under autocast (DDP in bf16), rotary embeddings return fp32 queries and keys.
    query, key = query.to(value.dtype), key.to(value.dtype)
    if not query.is_cuda or query.dtype == torch.float32:
        return attend_one_by_one(query, key, value, cu_seq_lens_q, scaling), None
    output = varlen_attn(
        *(tensor[0].transpose(0, 1) for tensor in (query, key, value)),  # [length, heads, size]
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        scale=scaling,
        window_size=(-1, 0),  # all tokens before, none after
        enable_gqa=True,
    )
    return output[None], None  # [1, length, heads, head size]


@torch.compiler.disable  # document lengths differ in every micro-batch
def attend_one_by_one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """Compute the same without the variable-length kernel, which needs CUDA and half precision."""
    lengths = [length for length in boundaries.diff().tolist() if length]
    outputs = [
        nn.functional.scaled_dot_product_attention(
            *document, is_causal=True, scale=scaling, enable_gqa=True
        )
        for document in zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)))
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()  # [1, length, heads, size]


def transformer_blocks(model: nn.Module) -> nn.ModuleList:
    """Return the list of transformer blocks: the first list of modules in the decoder."""
    return next(m for m in model.get_decoder().modules() if isinstance(m, nn.ModuleList))


def modules_outside_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the embedding, the last norm, the head, and the modules that contain them."""
    inside = set(transformer_blocks(model).modules())
    return [module for module in model.modules() if module not in inside]


def checkpoint_activations(blocks: Iterable[nn.Module], mode: str) -> None:
    """Recompute the activations of blocks in backward, so that they need not be kept.

    `full` keeps only a block's input, `selective` also the results that `keep_expensive` chooses. A
    fraction applies `full` to that part of the blocks.
    """
    if mode == "none":
        return
    options = {"use_reentrant": False}
    fraction = 1.0
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, keep_expensive)
    elif mode != "full":
        fraction = float(mode)

    def recompute(forward: Callable) -> Callable:
        # NOTE: not functools.partial, of which torch.compile would ignore the `context_fn`.
        return lambda *args, **kwargs: checkpoint(forward, *args, **options, **kwargs)

    for i, block in enumerate(blocks):
        # Spread the blocks over the depth: 0.5 takes every second one, 0.25 every fourth.
        if int((i + 1) * fraction) > int(i * fraction):
            block.forward = recompute(block.forward)


def keep_expensive(_, operator: Any, *args, **kwargs) -> CheckpointPolicy:
    """Keep the results of matmuls, attention and collectives, and recompute the cheap rest."""
    expensive = ["mm.", "attention", "attn", "c10d"]  # in names such as aten.addmm.default
    if any(part in str(operator) for part in expensive):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def compile_blocks(blocks: Iterable[nn.Module], config: Config) -> None:
    """Compile each block on its own: blocks are alike, so they share the compiled graphs."""
    # With few lengths, compile a graph for each, for training and for validation. Otherwise let the
    # compiler find one graph for all lengths.
    few_lengths = config.pad_to_multiple_of > 1 or config.batching == "packed"
    # After so many graphs, blocks would run in eager mode. The second limit counts all of them.
    torch._dynamo.config.recompile_limit = 10_000
    torch._dynamo.config.accumulated_recompile_limit = 10_000
    for block in blocks:
        block.compile(dynamic=False if few_lengths else None)


@torch.no_grad()
def initialize(
    model: nn.Module, modules: Iterable[nn.Module], seed: int, device: torch.device
) -> None:
    """Give modules of `model` that are on the meta device memory and initial weights.

    The weights depend only on the seed and the module's name, so every strategy and every world
    size starts from the same model.
    """
    names = {module: name for name, module in model.named_modules()}
    for module in reversed(list(modules)):  # children first
        module.to_empty(device=device, recurse=False)
        for parameter in module.parameters(recurse=False):
            parameter.fill_(math.nan)  # a weight that nothing initializes fails in the first step
        torch.manual_seed(zlib.crc32(f"{seed} {names[module]}".encode()))
        # NOTE: this also rebuilds the rotary frequencies. They are a buffer that no checkpoint
        # holds, and `to_empty` leaves garbage in it.
        model._init_weights(module)


# --- Optimizer and schedule -----------------------------------------------------------------------


def weight_decay_names(model: nn.Module) -> set[str]:
    """Return the names of parameters with weight decay: matrices except embeddings.

    NOTE: call it before `parallelize`, because FSDP1 flattens parameters to one dimension.
    """
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim > 1
        and parameter not in embeddings
        and not name.endswith(("bias", "A_log"))  # A_log: decay rates of state-space models
    }


def build_optimizer(model: nn.Module, decayed: set[str], config: Config) -> AdamW:
    """Build AdamW over this rank's parameters; `decayed` are the names with weight decay."""
    trained = [(name, p) for name, p in optimizer_parameters(model) if p.requires_grad]
    with_decay, without_decay = [], []
    for name, parameter in trained:
        (with_decay if name in decayed else without_decay).append(parameter)
    assert len({*with_decay, *without_decay}) == len(trained), "each parameter is in one group"
    groups = [
        {"params": with_decay, "weight_decay": config.weight_decay},
        {"params": without_decay, "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)


def set_learning_rates(config: Config, num_parameters: int) -> None:
    """Fill in the learning rates that no flag sets, by the number of parameters.

    Published recipes use 6e-4 for 125M parameters and 2e-4 for 1.3B (GPT-3, arXiv 2005.14165), and
    3e-4 for 7B and 13B (Llama 2, arXiv 2307.09288). Such rates would ruin pretrained weights.
    """
    peak = SMALL_MODEL_PEAK if num_parameters < 10_000_000 else 3e-4
    if config.learning_rate is None:
        config.learning_rate = peak / 10 if config.init_from else peak
    if config.min_learning_rate is None:
        config.min_learning_rate = config.learning_rate / 50
    if config.min_learning_rate > config.learning_rate:
        common.refuse("--min_learning_rate is above --learning_rate")


def learning_rate_at(step: int, config: Config) -> float:
    """Linear warm-up, then cosine decay to the minimum, which the last step reaches.

    With --decay_steps the rate stays at its peak until the decay (WSD, arXiv 2404.06395). So runs
    of different lengths share their steps until the shorter one decays.
    """
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    begin = max(config.warmup_steps, config.steps - (config.decay_steps or config.steps))
    progress = max(0, step - begin) / (config.steps - begin)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return config.min_learning_rate + cosine * (config.learning_rate - config.min_learning_rate)


# --- Training and validation ----------------------------------------------------------------------


def train_step(
    model: nn.Module,
    optimizer: Optimizer,
    batch: common.GlobalBatch,
    learning_rate: float,
    config: Config,
    device: torch.device,
) -> dict[str, float]:
    """Run one optimizer step; returns the mean loss of the global batch and the gradient norm."""
    total_loss = forward_backward(model, batch, config, device)
    grad_norm = clip_grad_norm(model, config.grad_clip or math.inf)
    # `.item()` waits for the GPU. Wait here and not after the update, because values that are not
    # finite must not reach the weights.
    measured = {"loss": total_loss.item() / batch.num_targets, "grad_norm": grad_norm.item()}
    common.refuse_non_finite(batch.step, **measured)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer_step(model, optimizer)
    return measured


def evaluate(
    model: nn.Module, validation: common.Batches, config: Config, device: torch.device
) -> float:
    """Return the mean loss per target token in nats, on the same data for every world size."""
    micro_batches = validation.evaluation(*dp_rank_and_size(config))
    model.eval()
    total = validation_loss(model, micro_batches, config, device)
    model.train()
    return (total[0] / total[1]).item()


# --- Main -----------------------------------------------------------------------------------------


def main() -> None:
    config = common.parse_config(Config)

    # Tokenizing can take longer than a collective may wait, so do it before the ranks meet. The
    # first rank of a node does the work, and the others find it in the cache.
    tokenizer = common.load_tokenizer(config.tokenizer)
    documents = common.load_documents(config, [config.text_column], common.tokenize_text, tokenizer)
    training, validation = (
        common.Batches(part.sequences(config.max_length), config, tokenizer.eos_token_id)
        for part in common.split(documents, config.eval_tokens)
    )
    model_config = build_model_config(config, tokenizer)
    if config.steps == 0:
        print("the data is prepared")
        return

    device = init_process_group(config)
    model = build_model(config, model_config)
    set_learning_rates(config, model.num_parameters())
    run = common.Run(config, model, tokenizer, documents, device)
    checkpoints = common.Checkpoints(run)
    progress = checkpoints.find()

    decayed = weight_decay_names(model)
    model = parallelize(model, config, device)
    optimizer = build_optimizer(model, decayed, config)
    if checkpoints.last:
        common.load_checkpoint(checkpoints.last, model, optimizer)
    elif config.init_from:
        common.load_weights(model, config.init_from)

    rank, size = dp_rank_and_size(config)
    accumulation = config.global_batch_tokens // config.micro_batch_tokens  # over all ranks
    run.begin(
        progress,
        f"mesh {size} x {run.world_size // size}, {accumulation // size} micro-batches per rank "
        f"and step, {config.global_batch_tokens:,} tokens, learning rate {config.learning_rate:g}",
    )
    # Steps and tokens are the position in the data, so a resumed run needs no other data state.
    for batch in training.stream(progress, config.steps, accumulation, rank, size):
        step = batch.step
        # For dropout.
        torch.manual_seed(zlib.crc32(f"{config.seed} {step} {run.rank}".encode()))
        learning_rate = learning_rate_at(step, config)
        measured = train_step(model, optimizer, batch, learning_rate, config, device)
        progress = {"step": step, "tokens": progress["tokens"] + batch.num_targets}
        run.log_step(batch, **progress, **measured, learning_rate=learning_rate)
        if step % config.eval_every == 0 or step == config.steps:
            loss = evaluate(model, validation, config, device)
            run.log_validation(step, loss, validation)
        if step % config.checkpoint_every == 0 or step == config.steps or run.stopping:
            checkpoints.save(model, optimizer, progress)
        if run.stopping:
            break
    checkpoints.wait()

    # The communication threads can abort at exit while a model is alive, so free it first.
    del model, optimizer
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
    run.finish(progress["step"], checkpoints.last, NEXT_COMMAND)


if __name__ == "__main__":
    common.launch(main)
