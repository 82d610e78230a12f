"""Causal-LM pretraining with all dimensions of parallelism on one mesh: DP, FSDP2, TP, CP and PP.

    torchrun --standalone --nproc-per-node=4 fsdp2_nd_pretrain.py --tensor_parallel 2

When to use it: one dimension alone reaches its limit. TP is limited by the GPUs of a node, CP by
the heads, PP by the micro-batches of a step, and data parallelism by the global batch. Read the
chapters of the dimensions before it: fsdp2_tp_pretrain.py, fsdp2_cp_pretrain.py and
fsdp2_pp_pretrain.py, whose Strategy this script puts together. Read fsdp2_sft.py next.

    world size = pipeline_parallel x dp_replicate x shards x context_parallel x tensor_parallel

Every dimension may be 1. What the flags leave of the world size are the shards. Neighboring ranks
differ in the last dimension, and sit in the same node. So the dimensions are in the order of what
they communicate, and whether that overlaps with compute:
- tensor: collectives inside each block, exposed. Keep the TP group inside a node.
- context: all-to-alls around each attention, exposed. Inside a node too, if there is room.
- shard: an all-gather of a stage's parameters per step, which overlaps, and a reduce-scatter.
- replicate: one all-reduce of a shard's gradients per step.
- stage: hidden states between neighbors, the least of all. Across nodes.

Memory per rank, with N ranks in all, in TP, CP and PP groups of T, C and S, and R replicas: R/N of
the parameters, gradients and AdamW moments. During a step, as in fsdp2_pp_pretrain.py, also 1/(TS)
of the parameters and gradients, unsharded, and the activations of up to S micro-batches, of which
each rank has 1/(TC) between layers.

Communication volume per micro-batch and block, with A, Q and K the bytes of its hidden states,
queries and keys: 8A(T-1)/(TC) for TP, and 4(Q+K)(C-1)/(C²T) for CP. Between stages A/(TC) each way.
Per step, about (P+G)/(TS) for P and G bytes of parameters and gradients.

A recipe: choose TP up to the size of a node until a block fits, then PP until a stage fits, CP for
long sequences, and shards for the rest. This is how Llama 3 was trained (arXiv 2407.21783, section
3.3.2, with CP by all-gathers). See also Megatron-LM (arXiv 2104.04473).
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
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, parallel as tp
from torch.nn.attention.varlen import varlen_attn
from torch.optim import AdamW, Optimizer
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import common
from common import flag

# --- Config ---------------------------------------------------------------------------------------

NEXT_COMMAND = "torchrun --standalone --nproc-per-node=2 fsdp2_sft.py --init_from {run_dir}"
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
    pipeline_parallel: PositiveInt = flag(1, "pipeline stages that the blocks are split into")
    dp_replicate: PositiveInt = flag(1, "replicas of each sharded stage (HSDP)")
    context_parallel: PositiveInt = flag(1, "ranks of a CP group, which share each sequence")
    tensor_parallel: PositiveInt = flag(1, "ranks of a TP group, which share each layer's matmuls")

    def __post_init__(self) -> None:
        """Check how flags fit together. The limits of a single flag are in its type."""
        super().__post_init__()
        if self.precision == "auto":
            # GPUs before Ampere only emulate bf16.
            bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported(False)
            self.precision = "bf16" if bf16 else "fp32"
        world_size = int(os.environ.get("WORLD_SIZE", 1))
        sharing = self.pipeline_parallel * self.context_parallel * self.tensor_parallel
        dp_size = max(1, world_size // sharing)
        if self.steps and world_size % (sharing * self.dp_replicate):
            raise ValueError(
                "--pipeline_parallel x --dp_replicate x --context_parallel x --tensor_parallel = "
                f"{sharing * self.dp_replicate} does not divide {world_size} ranks"
            )
        recomputes = self.activation_checkpointing not in ("none", "selective")
        if self.compile and self.tensor_parallel > 1 and recomputes:
            raise ValueError("--compile needs --activation_checkpointing none or selective")
        common.check_global_batch(self, dp_size)
        smallest = self.micro_batch_tokens * dp_size * self.pipeline_parallel
        if self.global_batch_tokens < smallest:
            raise ValueError(
                f"--global_batch_tokens {self.global_batch_tokens} holds fewer micro-batches than "
                f"there are stages: use at least {smallest}"
            )


# --- Strategy -------------------------------------------------------------------------------------

# The dimensions of the mesh, and what the ranks of a group along each of them share.
DIMENSIONS = {
    "stage": "each rank has some of the blocks of a model",
    "replicate": "each rank has a copy of the same shards",
    "shard": "each rank has a shard of the parameters of the same stage",
    "context": "each rank has a part of the same sequences",
    "tensor": "each rank has a part of the same layers",
}

# How TP shards a block. Between layers, hidden states [sequences, length, hidden size] are DTensors
# with Shard(1): each rank has a part of every sequence. Attention and feed-forward need full
# sequences.
#
# Column-wise shards the outputs of a linear layer: a rank computes some of the heads, or a part of
# the feed-forward's width. Row-wise shards the inputs. A row-wise layer after a column-wise one
# needs no communication in between, because each rank already has the inputs for its weights. But
# each rank then has only one summand of every output. A reduce-scatter adds them up and leaves each
# rank its part of the sequences.
#
# Norms are not sharded. They are in the plan because their inputs are DTensors, and DTensor sums
# the gradients of their weights over the TP group: each rank sees only a part of the tokens.
#
# NOTE: use_local_output=False keeps the hidden states DTensors, which know the full length. With
# plain tensors, positions would be wrong wherever T does not divide the length.
BLOCK_PLAN = {
    "input_layernorm": tp.SequenceParallel(),
    "self_attn": tp.PrepareModuleInput(  # an all-gather
        input_kwarg_layouts={"hidden_states": Shard(1)},
        desired_input_kwarg_layouts={"hidden_states": Replicate()},
    ),
    "self_attn.q_proj": tp.ColwiseParallel(),
    "self_attn.k_proj": tp.ColwiseParallel(),
    "self_attn.v_proj": tp.ColwiseParallel(),
    "self_attn.o_proj": tp.RowwiseParallel(  # a reduce-scatter
        output_layouts=Shard(1), use_local_output=False
    ),
    "post_attention_layernorm": tp.SequenceParallel(),
    "mlp": tp.PrepareModuleInput(  # an all-gather
        input_layouts=Shard(1), desired_input_layouts=Replicate()
    ),
    "mlp.gate_proj": tp.ColwiseParallel(),
    "mlp.up_proj": tp.ColwiseParallel(),
    "mlp.down_proj": tp.RowwiseParallel(  # a reduce-scatter
        output_layouts=Shard(1), use_local_output=False
    ),
}

# Embedding and head are sharded by vocabulary. Each rank looks up the tokens of its own shard, and
# the reduce-scatter adds what the other ranks looked up.
ROOT_PLAN = {
    "model.embed_tokens": tp.RowwiseParallel(  # a reduce-scatter
        input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
    ),
    "model.norm": tp.SequenceParallel(),
    "lm_head": tp.ColwiseParallel(),
}


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

    NOTE: ranks that differ only in stage, context or tensor work on the same micro-batches, so they
    share an index.
    """
    same_sequences = config.context_parallel * config.tensor_parallel
    size = dist.get_world_size() // (config.pipeline_parallel * same_sequences)
    return dist.get_rank() // same_sequences % size, size


def build_mesh(config: Config, device: torch.device) -> tuple[DeviceMesh, DeviceMesh]:
    """Arrange all ranks in the dimensions of DIMENSIONS, and print which ranks form the groups.

    Also returns the mesh of FSDP, which shards parameters over all ranks with the same part of the
    layers, whichever tokens of whichever sequences they have.
    """
    _, dp_size = dp_rank_and_size(config)
    sizes = (
        config.pipeline_parallel,
        config.dp_replicate,
        dp_size // config.dp_replicate,
        config.context_parallel,
        config.tensor_parallel,
    )
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=tuple(DIMENSIONS))
    for name, purpose in DIMENSIONS.items():
        group = mesh[name]
        if group.size() > 1:
            common.say(f"{name} {group.size()}: {purpose}: ranks {group.mesh.tolist()[:8]}, ...")
    sharding = mesh["shard", "context"]._flatten("sharding")
    mesh["shard", "context", "tensor"]._flatten()  # one all-reduce for the gradient norm
    if config.dp_replicate > 1:
        sharding = DeviceMesh._concatenate([mesh["replicate"], sharding])
    return mesh, sharding


class Stage(PipelineStage):
    """The stage of this rank, and what its forward and backward need.

    `parallelize` stores it as `model.stage`. The training loop passes only the model around, and
    a checkpoint must hold the model under its own names, so a module around it would not do.

    Args:
        micro_batches: what the next forward passes run on, see `stage_forward`.
        num_positions: how many positions a stage sends for each micro-batch, padding included.
        embedding_group: the first and the last stage of a pipeline, if they share the embedding.
    """

    micro_batches: Iterator[dict]
    embedding_group: dist.ProcessGroup | None = None


def parallelize(model: nn.Module, config: Config, device: torch.device) -> nn.Module:
    """Keep this rank's stage of the model, split its layers, shard the parts, and initialize them.

    From the inside out: TP adds hooks to the layers inside a block, CP replaces the attention,
    activation checkpointing and compile replace the block's forward, FSDP adds hooks around the
    block, and the pipeline schedule calls the forward of the stage.

    The schedule keeps a stage's parameters unsharded during the whole step, and accumulates
    unsharded gradients. So FSDP all-gathers once and reduce-scatters once per step.
    """
    check_model(model, config)
    checkpoint_activations(transformer_blocks(model), config.activation_checkpointing)
    if config.compile:
        compile_blocks(transformer_blocks(model), config)
        # NOTE: what torch 2.13 reads from this cache gives DTensors wrong gradients, without an
        # error. Only a second run shows it, because the first one fills the cache. With 2.15 a
        # second run was right, but only because it found no graph of the first one in the cache.
        torch._functorch.config.enable_autograd_cache = config.tensor_parallel == 1

    mesh, sharding = build_mesh(config, device)
    options = {"mesh": sharding, "reshard_after_forward": False}
    if config.precision == "bf16":
        # Parameters are cast to bf16 as they are all-gathered, so blocks compute in bf16. The
        # shards and the optimizer state stay fp32. Reduce gradients in fp32 too. The default is
        # bf16 in torch 2.13, and the type of the shards from 2.15 on. Do not cast a block's inputs
        # either: what the model computes in fp32 (rotary embeddings in some types) stays fp32.
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    # All ranks draw the same initial weights, so each takes its TP shard without communication.
    tensor_parallel = partial(tp.parallelize_module, device_mesh=mesh["tensor"], src_data_rank=None)
    if config.tensor_parallel > 1:
        # torch 2.13 cannot compile the loss of DTensors that have several lengths.
        model.forward = partial(forward_with_loss, model, vocabulary_parallel_loss)
    if config.context_parallel > 1:
        group = mesh.get_group("context")
        AttentionInterface.register("ulysses", partial(ulysses_attention, group))
        model.set_attn_implementation("ulysses")

    stage = build_stage(model, config, mesh, device)
    own_blocks = keep_stage(model, stage)
    model.stage = stage
    model.forward = partial(stage_forward, stage, model.forward, mesh["tensor"])

    initialize(model, modules_outside_blocks(model), config.seed, device)
    if config.tensor_parallel > 1:
        modules = dict(model.named_modules())
        own_plan = {name: style for name, style in ROOT_PLAN.items() if name in modules}
        tensor_parallel(model, parallelize_plan=own_plan)
        if stage.is_last:
            model.get_decoder().norm.register_forward_hook(gather_sequences)
    if model.config.tie_word_embeddings and stage.is_last:
        model.tie_weights()  # `initialize` and TP gave each module a parameter of its own
    # `fully_shard` claims only parameters that no submodule has claimed yet, so apply it bottom-up:
    # blocks first, then the root.
    for block in own_blocks:
        # Initialize one block at a time, so that no rank ever holds more than one full block.
        initialize(model, block.modules(), config.seed, device)
        if config.tensor_parallel > 1:
            tensor_parallel(block, parallelize_plan=BLOCK_PLAN)
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


# Every stage runs the decoder's own forward, so all of them would repeat what it does before the
# first block: positions (a module besides these four), a factor, or dropout.
DECODER_PARTS = {"embed_tokens", "layers", "norm", "rotary_emb"}
REPEATED = {"embedding_multiplier": 1, "mup_enabled": False, "embedding_dropout": 0}


def check_model(model: nn.Module, config: Config) -> None:
    """Refuse a model that a dimension would compute wrongly, or leave unsharded.

    The chapters of single dimensions accept more model types.
    """
    shape = model.config
    parts = dict(model.get_decoder().named_children())
    layers = {
        parameter.rpartition(".")[0]
        for block in transformer_blocks(model)
        for parameter, _ in block.named_parameters()
    }
    known = shape.model_type in common.PACKED_TYPES.split() and shape.base_model_tp_plan
    has_layers = layers == BLOCK_PLAN.keys() - {"self_attn", "mlp"}
    if not known or not has_layers or parts.keys() != DECODER_PARTS:
        common.refuse(f"--model {config.model}: this script needs the layers of Llama's")
    for setting, neutral in REPEATED.items():
        if getattr(shape, setting, neutral) != neutral:
            common.refuse(f"--model {config.model}: each stage would repeat its {setting}")
    window = getattr(shape, "sliding_window", None) or math.inf
    if config.max_length > window:
        common.refuse(f"--max_length {config.max_length} exceeds the sliding window of {window}")
    if shape.num_hidden_layers < config.pipeline_parallel:
        common.refuse(f"--pipeline_parallel is more than the {shape.num_hidden_layers} blocks")
    sizes = shape.num_key_value_heads, shape.intermediate_size, shape.vocab_size
    if math.gcd(*sizes) % config.tensor_parallel:
        common.refuse(
            "--tensor_parallel must divide the K/V heads, the feed-forward width and the "
            f"vocabulary of the model: {sizes}"
        )
    if shape.num_attention_heads % (config.context_parallel * config.tensor_parallel):
        common.refuse(
            "--context_parallel x --tensor_parallel must divide the attention heads of the model: "
            f"{shape.num_attention_heads}"
        )


def build_stage(model: nn.Module, config: Config, mesh: DeviceMesh, device: torch.device) -> Stage:
    """Describe this rank's stage to PyTorch's pipelining, and create the process groups it uses."""
    # The ranks of a pipeline work on the same micro-batches. NOTE: give sends and receives a group
    # of their own. Stages make unequal numbers of them, which confuses the checks of collectives
    # (TORCH_DISTRIBUTED_DEBUG=DETAIL) in a group that has both.
    ranks = range(dist.get_world_size())
    stage_size = len(ranks) // config.pipeline_parallel
    pipelines = [ranks[i::stage_size] for i in range(stage_size)]
    # Under gloo, a send waits as long as its group's timeout.
    timeout = timedelta(minutes=config.timeout_minutes)
    group, _ = dist.new_subgroups_by_enumeration(pipelines, timeout=timeout, group_desc="pipeline")
    # Declare what stages send. Otherwise PyTorch runs an extra forward to find out, for each new
    # schedule, which means at every step.
    parts = config.context_parallel * config.tensor_parallel  # of the positions
    num_positions = config.micro_batch_tokens
    if config.batching == "packed" or config.pad_to_multiple_of % parts == 0:
        num_positions = math.ceil(num_positions / parts)  # otherwise, padding may need more
    hidden = torch.empty(
        (num_positions, model.config.hidden_size),
        dtype=torch.bfloat16 if config.precision == "bf16" else torch.float32,
        device="meta",
        requires_grad=True,
    )
    index = mesh.get_local_rank("stage")
    stage = Stage(
        model,
        index,
        config.pipeline_parallel,
        device,
        input_args=hidden if index > 0 else (),
        output_args=hidden,
        group=group,
    )
    stage.num_positions = num_positions
    if model.config.tie_word_embeddings and config.pipeline_parallel > 1:
        ends = [[ranks[0], ranks[-1]] for ranks in pipelines]
        stage.embedding_group, _ = dist.new_subgroups_by_enumeration(ends, group_desc="embedding")
    return stage


class PassThrough(nn.Module):
    """Replaces a block of another stage, so that this stage's blocks keep their names."""

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden


def keep_stage(model: nn.Module, stage: Stage) -> list[nn.Module]:
    """Drop what belongs to other stages; returns the blocks of this one.

    The first stage has the embedding, and the last one has the last norm and the head. Every stage
    gets equally many blocks, although the head and the loss are extra work for the last one.
    """
    blocks = transformer_blocks(model)
    own_blocks = []
    for i, block in enumerate(blocks):
        if i * stage.num_stages // len(blocks) == stage.stage_index:
            own_blocks.append(block)
        else:
            blocks[i] = PassThrough()
    decoder = model.get_decoder()
    if not stage.is_last:
        decoder.norm = nn.Identity()
        model.lm_head = None
    has_tied_head = stage.is_last and model.config.tie_word_embeddings
    if not stage.is_first and not has_tied_head:
        decoder.embed_tokens = None
    return own_blocks


def stage_forward(
    stage: Stage,
    full_forward: Callable,
    tensor_mesh: DeviceMesh,
    hidden: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run a stage's blocks on its next micro-batch.

    Every stage reads the micro-batches itself, so labels, positions and cumulative sequence lengths
    need not be sent.

    NOTE: PyTorch's pipelines send tensors of one shape, so pad them to the largest. A tensor of
    another shape would be received wrongly or abort the run.

    Args:
        full_forward: the forward of the full model, `forward_with_loss`.
        hidden: [num_positions, hidden size] from the previous stage; None on the first stage.

    Returns:
        The hidden states for the next stage, of the same shape, or the summed loss on the last one.
    """
    micro_batch = dict(next(stage.micro_batches))
    sequences, length = micro_batch["labels"].shape
    parts = tensor_mesh.size()
    length //= parts  # between layers, a rank of a TP group has a part
    if hidden is not None:
        hidden = hidden[: sequences * length].unflatten(0, (sequences, length))
        if parts > 1:
            hidden = DTensor.from_local(hidden, tensor_mesh, [Shard(1)])
        micro_batch |= {"input_ids": None, "inputs_embeds": hidden}
    if stage.is_last:
        return full_forward(**micro_batch)
    del micro_batch["labels"]
    output = stage.submod.get_decoder()(use_cache=False, **micro_batch).last_hidden_state
    if parts > 1:
        output = output.to_local()
    padding = stage.num_positions - sequences * length
    return nn.functional.pad(output.flatten(0, 1), (0, 0, 0, padding))


def gather_sequences(module: nn.Module, inputs: Any, output: DTensor) -> DTensor:
    """Gather the output of the last norm, as a forward hook: the head needs full sequences."""
    return output.redistribute(placements=[Replicate()])  # an all-gather


def vocabulary_parallel_loss(*arguments: Any) -> torch.Tensor:
    """Return `chunk_loss` of DTensors as a plain tensor, the same on all ranks of a TP group."""
    return chunk_loss(*arguments).to_local().clone()  # FSDP warns of an output that is a view


def local_micro_batch(
    micro_batch: dict[str, Any], config: Config, device: torch.device
) -> dict[str, Any]:
    """Return this rank's part of each sequence, [sequences, length / C], on its device.

    NOTE: the part needs the positions of its tokens. Otherwise each rank would count from 0.
    """
    ranks = config.context_parallel
    rank = dist.get_rank() // config.tensor_parallel % ranks
    length = micro_batch["labels"].shape[1]
    # All parts are equally long, also those that a rank of a TP group has between layers.
    padding = -length % (ranks * config.tensor_parallel)
    part = {"position_ids": torch.arange(length)[None], **micro_batch}
    padding_values = {"input_ids": 0, "position_ids": 0, "labels": common.IGNORED}
    for name, value in padding_values.items():
        padded = nn.functional.pad(part[name], (0, padding), value=value)
        part[name] = padded.chunk(ranks, dim=1)[rank]
    if config.batching == "packed":
        # Attention sees full sequences, so the cumulative sequence lengths stay those of the full
        # sequence. The padding is one more document.
        ends = part["cu_seq_lens_q"]
        part["cu_seq_lens_q"] = nn.functional.pad(ends, (0, 1), value=length + padding)
    return common.to_device(part, device)


def exchange(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Split dimension 1 over the ranks of a CP group, and join their parts of dimension 2.

    [sequences, heads, length / C, head size] -> [sequences, heads / C, length, head size], and back
    [sequences, length, heads / C, head size] -> [sequences, length / C, heads, head size]. Backward
    runs the all-to-all in the other direction.
    """
    parts = torch.stack(tensor.chunk(group.size(), dim=1))  # [ranks, sequences, ...]
    received = all_to_all_single_autograd(parts, None, None, group)
    return torch.cat(received.unbind(), dim=2)


def ulysses_attention(
    group: dist.ProcessGroup,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    **kwargs: Any,
) -> tuple:
    """Causal attention over full sequences, of which each rank has a part.

    Norms and feed-forward treat each token alone, so they need no communication. Attention needs
    full sequences, but it treats each head alone. So all-to-alls turn all heads of a part of the
    sequence into some heads of the full sequence, and back.
    """
    # Where the CP group does not divide the key/value heads, several ranks need the same one.
    ranks = group.size()
    copies = ranks // math.gcd(ranks, key.shape[1])
    if copies > 1:
        key = key.repeat_interleave(copies, dim=1)
        value = value.repeat_interleave(copies, dim=1)
    query = exchange(query, group)  # [sequences, heads / C, length, head size]
    key = exchange(key, group)
    value = exchange(value, group)
    attend = document_attention if "cu_seq_lens_q" in kwargs else sdpa_attention_forward
    output, _ = attend(module, query, key, value, attention_mask, **kwargs)
    return exchange(output, group), None  # [sequences, length / C, heads, head size]


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

    The schedule is 1F1B: once the first micro-batches have filled the pipeline, each stage
    alternates one forward and one backward of an earlier micro-batch.
    """
    total_loss = torch.zeros((), device=device)

    def scaled_loss(loss: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Return what the last stage starts backward from."""
        total_loss.add_(loss.detach())
        return loss * scale

    micro_batches = [
        local_micro_batch(micro_batch, config, device) for micro_batch in batch.micro_batches
    ]
    model.stage.micro_batches = iter(micro_batches)
    # The loss of a step is the sum over all target tokens, divided by their number in the global
    # batch. A mean of micro-batch means would give tokens of small micro-batches more weight.
    # FSDP averages gradients over all ranks with the same part of the layers, so multiply by their
    # number to get a sum.
    _, dp_size = dp_rank_and_size(config)
    scale = dp_size * config.context_parallel / batch.num_targets
    scales = torch.full((len(micro_batches),), scale, device=device)
    # NOTE: scale_grads=True would divide the gradients by the number of micro-batches as well.
    schedule = Schedule1F1B(model.stage, len(micro_batches), scaled_loss, scale_grads=False)
    # All-gathers, then sends and receives, then reduce-scatters. The schedule splits `target`, so
    # that `scaled_loss` gets one scale for each micro-batch.
    with tp.loss_parallel():  # see fsdp2_tp_pretrain.py
        schedule.step(target=scales, return_outputs=False)
    if model.stage.embedding_group is not None:
        # The first stage computes the gradient of the tied embedding as the embedding, and the last
        # one as the head. Both need the sum, which keeps their copies equal.
        gradient = model.get_input_embeddings().weight.grad.to_local()
        dist.all_reduce(gradient, group=model.stage.embedding_group)
    # All ranks of a TP group have the same loss, so the sum over all ranks counts it T times.
    dist.all_reduce(total_loss)
    return total_loss / config.tensor_parallel


def clip_grad_norm(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Clip the gradient norm to `max_norm`; returns the norm before clipping.

    NOTE: the norm covers all stages, but a rank only has gradients of its own.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    if model.stage.embedding_group is not None and model.stage.is_last:
        # The first stage counts the tied embedding.
        embedding = model.get_input_embeddings().weight
        counted = [parameter.grad for parameter in parameters if parameter is not embedding]
    else:
        counted = [parameter.grad for parameter in parameters]
    squared_norm = nn.utils.get_total_norm(counted).full_tensor() ** 2  # of this stage
    # All ranks of a stage have the same value, so the sum counts each stage that many times.
    dist.all_reduce(squared_norm)
    stage_size = dist.get_world_size() / model.stage.num_stages
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
    schedule = ScheduleGPipe(model.stage, 1, add_loss)
    for micro_batch in micro_batches:  # forward all-gathers, so each rank needs equally many
        micro_batch = local_micro_batch(micro_batch, config, device)
        model.stage.micro_batches = iter([micro_batch])
        with tp.loss_parallel():
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
