"""Causal-LM pretraining with several dimensions of parallelism on one mesh: FSDP2, TP, CP and PP.

    torchrun --standalone --nproc-per-node=4 fsdp2_nd_pretrain.py --tensor_parallel 2

When to use it: one dimension alone reaches its limit. TP is limited by the GPUs of a node, CP by
the heads, PP by the micro-batches of a step, and data parallelism by the global batch.

    world size = pipeline_parallel x dp_replicate x shards x context_parallel x tensor_parallel

Every dimension may be 1. `shards` is the world size divided by the other dimensions. Neighboring
ranks differ in the last dimension, and sit in the same node. So the dimensions are ordered by their
exposed communication, from the last one, which has the most, to the first:
- tensor: collectives inside each block, exposed. Keep the TP group inside a node.
- context: all-to-alls around each attention, exposed. Inside a node too, if there is room.
- shard: an all-gather of a stage's parameters per step, which overlaps, and a reduce-scatter.
- replicate: one all-reduce of a shard's gradients per step.
- stage: hidden states and their gradients between neighbors. Across nodes.

A DTensor is a tensor that is spread over ranks. Its `shape` is the shape of the full tensor, but
each rank holds only a part, `to_local()`. Its placements say which part: with `Shard(1)` a slice of
dimension 1, with `Replicate()` the full tensor. Parameters are DTensors here, and with TP hidden
states too.

Memory per rank, with N ranks in all, in TP, CP and PP groups of T, C and S, and R replicas: R/N of
the fp32 parameters, gradients and AdamW moments, 16R/N bytes per parameter. During a step also
1/(TS) of the full parameters and of the full gradients, and the activations of up to S
micro-batches, between layers 1/(TC) of each.

Communication volume per micro-batch and block, with A, Q and K the bytes of its hidden states,
queries and keys: 8A(T-1)/(TC) for TP, and 4(Q+K)(C-1)/(C²T) for CP. Between stages A/(TC) each way.
Per step, with P the bytes of the parameters in compute precision and G the bytes of the fp32
gradients, about (P+G)/(TS).

A recipe: choose TP up to the size of a node until a block fits, then PP until a stage fits, CP for
long sequences, and shards for the rest. Llama 3 was trained like this, with data parallelism
outermost and CP by all-gathers (arXiv 2407.21783, section 3.3.2). See also Megatron-LM (arXiv
2104.04473).
"""

import math
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, parallel as tp
from torch.optim import AdamW, Optimizer
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import common
from model import (
    PACKED_TYPES,
    build_config,
    build_model,
    checkpoint_activations,
    chunk_loss,
    compile_blocks,
    count_flops,
    document_attention,
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

NEXT_COMMAND = "torchrun --standalone --nproc-per-node=2 fsdp2_muon_pretrain.py"


# The shared flags, such as learning rate and batch sizes, are in run.py.
@dataclass
class Config(Flags):
    """The flags of this script, beside the shared ones."""

    text_column: str = flag("text", "column of the dataset that holds the text")
    pipeline_parallel: PositiveInt = flag(1, "pipeline stages that the blocks are split into")
    dp_replicate: PositiveInt = flag(1, "replicas of each sharded stage (HSDP)")
    context_parallel: PositiveInt = flag(1, "ranks of a CP group, which share each sequence")
    tensor_parallel: PositiveInt = flag(1, "ranks of a TP group, which share each layer's matmuls")

    def __post_init__(self) -> None:
        """Check how flags fit together."""
        super().__post_init__()
        # torch 2.13 cannot compile DTensors under full activation checkpointing.
        recomputes = self.activation_checkpointing not in ("none", "selective")
        if self.compile and self.tensor_parallel > 1 and recomputes:
            common.refuse("--compile needs --activation_checkpointing none or selective")


# --- Strategy -------------------------------------------------------------------------------------

# The dimensions of the mesh, and what the ranks of a group along each of them share.
DIMENSIONS = {
    "stage": "each rank has some of the blocks of a model",
    "replicate": "each rank has a copy of the same shards",
    "shard": "each rank has a shard of the parameters of the same stage",
    "context": "each rank has a part of the same sequences",
    "tensor": "each rank has a part of the same layers",
}

# How TP shards a block. In norms and residual additions, hidden states [sequences, length, hidden
# size] are DTensors with Shard(1): each rank has a part of every sequence. Attention and
# feed-forward need all tokens on each rank, because each rank has only a part of their weights.
#
# Column-wise shards the outputs of a linear layer, dimension 0 of its weight [outputs, inputs]: a
# rank computes some of the attention heads, or a part of the feed-forward's width. Row-wise shards
# the inputs, dimension 1. A row-wise layer after a column-wise one needs no communication in
# between, because each rank already has the inputs for its weights. But each rank then has only a
# partial sum of every output. A reduce-scatter adds these and leaves each rank its part of the
# sequences.
#
# Norms are not sharded. The plan makes their weights replicated DTensors. Each rank sees only some
# of the tokens, so FSDP all-reduces the gradients of these weights over the TP group before it
# reduce-scatters them.
#
# NOTE: use_local_output=False keeps hidden states DTensors of the full length, as `Stage.forward`
# expects.
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

# Embedding and head are sharded by vocabulary, dimension 0 of their weights. (For an embedding this
# is called row-wise, because its inputs are token ids.) Each rank looks up the tokens of its own
# shard and gets zeros for others. The reduce-scatter adds up the results.
ROOT_PLAN = {
    "model.embed_tokens": tp.RowwiseParallel(  # a reduce-scatter
        input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
    ),
    "model.norm": tp.SequenceParallel(),
    "lm_head": tp.ColwiseParallel(),
}

# Every stage runs the decoder's own forward, so each would repeat its work before the first block:
# position embeddings (a fifth module), scaling, or dropout.
DECODER_PARTS = {"embed_tokens", "layers", "norm", "rotary_emb"}
REPEATED = {"embedding_multiplier": 1, "mup_enabled": False, "embedding_dropout": 0}


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


def dp_rank_and_size(config: Config) -> tuple[int, int]:
    """Return this rank's index among the data-parallel ranks, and how many there are.

    NOTE: ranks that differ only in stage, context or tensor work on the same micro-batches, so they
    share an index.
    """
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    same_sequences = config.context_parallel * config.tensor_parallel
    stage_size = ranks // config.pipeline_parallel
    dp_size = max(1, stage_size // same_sequences)  # --steps 0 runs on one rank too
    return rank // same_sequences % dp_size, dp_size


def check_model(model: nn.Module, config: Config) -> None:
    """Refuse a model that a dimension would compute wrongly, or leave unsharded."""
    shape = model.config
    parts = dict(model.get_decoder().named_children())
    layers = {
        parameter.rpartition(".")[0]
        for block in transformer_blocks(model)
        for parameter, _ in block.named_parameters()
    }
    known = shape.model_type in PACKED_TYPES.split() and shape.base_model_tp_plan
    has_layers = layers == BLOCK_PLAN.keys() - {"self_attn", "mlp"}
    if not known or not has_layers or parts.keys() != DECODER_PARTS:
        common.refuse(f"--model {config.model}: this script needs Llama's layers")
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


def build_mesh(config: Config, device: torch.device) -> tuple[DeviceMesh, DeviceMesh]:
    """Arrange all ranks in a mesh with DIMENSIONS, and print which ranks form the first groups.

    Also returns the mesh of FSDP, which shards parameters over all ranks with the same part of the
    layers, whichever tokens they have.
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
        part = mesh[name]
        if part.size() > 1:
            common.say(f"{name} {part.size()}: {purpose}: ranks {part.mesh.tolist()[:8]}, ...")
    sharding = mesh["shard", "context"]._flatten("sharding")
    mesh["shard", "context", "tensor"]._flatten()  # then the gradient norm is one all-reduce
    if config.dp_replicate > 1:
        sharding = DeviceMesh._concatenate([mesh["replicate"], sharding])
    return mesh, sharding


def parallelize(model: nn.Module, config: Config, device: torch.device) -> nn.Module:
    """Keep this rank's stage of the model, split its layers, shard the parts, and initialize them.

    From the inside out:

    - TP: `tp.parallelize_module` follows a plan. It turns a layer's parameters into DTensors over
      the TP group, and adds hooks that bring inputs and outputs to the placements in the plan.
    - CP: `ulysses_attention` replaces the attention.
    - FSDP: `fully_shard(module)` makes one unit of the module's parameters that no earlier call on
      a submodule has claimed, and shards this rank's part of them over `sharding`. Its hooks
      all-gather a unit when the first micro-batch of a step reaches it. After the stage's last
      backward, `PipelineStage` starts the reduce-scatters. Until then, parameters and gradients
      stay full.
    - PP: a `PipelineStage` runs the forward and backward of the stage's module, and sends and
      receives hidden states and their gradients.

    The model keeps this rank's modules under their original names, for the checkpoint, and gets two
    attributes. `model.stage` is the `PipelineStage`. `model.embedding_group` is the process group
    of the first and the last rank of a pipeline, if they share the embedding.
    """
    check_model(model, config)
    blocks = transformer_blocks(model)
    # Recomputation replaces a block's `forward`. TP's hooks are on the layers inside, and FSDP's
    # hooks run around it. So `full` repeats TP's collectives, but not FSDP's.
    checkpoint_activations(blocks, config.activation_checkpointing)
    if config.compile:
        compile_blocks(blocks, config)
        # NOTE: torch 2.13 caches compiled graphs on disk under a key that has neither a DTensor's
        # local shape nor the names of process groups. If PYTHONHASHSEED is set, a second run can
        # load graphs of other ranks, and fail.
        torch._functorch.config.enable_autograd_cache = config.tensor_parallel == 1

    mesh, sharding = build_mesh(config, device)
    # Keep parameters full after a forward, because the next micro-batch follows.
    options = {"mesh": sharding, "reshard_after_forward": False}
    if config.precision != "fp32":
        # Shards and optimizer state stay fp32. Parameters are cast to bf16 before they are
        # gathered, so blocks compute in bf16 and their full gradients are bf16. These are cast to
        # fp32 before they are reduced. FSDP would also cast the inputs of each unit. Leave them,
        # because some types (OLMo 2) pass rotary embeddings in fp32 on purpose.
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )

    # Without a source rank, TP broadcasts nothing: all ranks draw the same weights.
    tensor_parallel = partial(tp.parallelize_module, device_mesh=mesh["tensor"], src_data_rank=None)
    if config.context_parallel > 1:
        group = mesh.get_group("context")
        AttentionInterface.register("ulysses", partial(ulysses_attention, group))
        model.set_attn_implementation("ulysses")

    own_blocks = keep_stage(model, mesh.get_local_rank("stage"), config.pipeline_parallel)
    model.stage, model.embedding_group = build_stage(model, config, mesh, device)
    # On the meta device the model has shapes but no memory. Each rank draws the same full weights,
    # because a module is seeded by its name, and keeps its shards: nothing is broadcast.
    initialize(model, modules_outside_blocks(model), config.seed, device)
    if config.tensor_parallel > 1:
        modules = dict(model.named_modules())
        own_plan = {name: style for name, style in ROOT_PLAN.items() if name in modules}
        tensor_parallel(model, parallelize_plan=own_plan)
        if model.stage.is_last:
            model.get_decoder().norm.register_forward_hook(gather_sequences)
    if model.config.tie_word_embeddings and model.stage.is_last:
        model.tie_weights()  # `initialize` and TP gave each module a new parameter: now untied
    # From the inside out: blocks first, then the stage, which gets the rest.
    for block in own_blocks:
        # One block at a time, so that a rank never holds more than one full block.
        initialize(model, block.modules(), config.seed, device)
        if config.tensor_parallel > 1:
            tensor_parallel(block, parallelize_plan=BLOCK_PLAN)  # before FSDP, which shards these
        fully_shard(block, **options)
    fully_shard(model.stage.submod, **options)
    return model


class PassThrough(nn.Module):
    """Takes the place of another stage's block, so that this stage's blocks keep their names."""

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden


def keep_stage(model: nn.Module, index: int, num_stages: int) -> list[nn.Module]:
    """Drop the modules of other stages; returns this stage's blocks.

    The first stage has the embedding, and the last one has the last norm and the head. Stages get
    equally many blocks, plus or minus one, although the head and the loss are extra work for the
    last stage.
    """
    blocks = transformer_blocks(model)
    own_blocks = []
    for i, block in enumerate(blocks):
        if i * num_stages // len(blocks) == index:
            own_blocks.append(block)
        else:
            blocks[i] = PassThrough()
    decoder = model.get_decoder()
    is_last = index == num_stages - 1
    if not is_last:
        decoder.norm = nn.Identity()
        model.lm_head = None
    has_tied_head = is_last and model.config.tie_word_embeddings
    if index > 0 and not has_tied_head:
        decoder.embed_tokens = None
    return own_blocks


class Stage(nn.Module):
    """This rank's stage of the model, with a forward for PyTorch's pipelining.

    Args:
        model: without the modules of other stages.
        num_positions: how many positions a rank sends for each micro-batch, padding included.
    """

    def __init__(
        self, model: nn.Module, is_last: bool, num_positions: int, tensor_mesh: DeviceMesh
    ):
        super().__init__()
        self.model, self.is_last = model, is_last
        self.num_positions, self.tensor_mesh = num_positions, tensor_mesh
        self.micro_batches: Iterator[dict] = iter([])  # of the next forward passes

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
        parts = self.tensor_mesh.size()
        length //= parts  # between layers, a rank of a TP group has a part
        if hidden is not None:
            hidden = hidden[: sequences * length].unflatten(0, (sequences, length))
            if parts > 1:
                hidden = DTensor.from_local(hidden, self.tensor_mesh, [Shard(1)])
            micro_batch |= {"input_ids": None, "inputs_embeds": hidden}
        if self.is_last:
            return self.model(**micro_batch)  # `forward_with_loss` in model.py
        del micro_batch["labels"]
        output = self.model.get_decoder()(use_cache=False, **micro_batch).last_hidden_state
        if parts > 1:
            output = output.to_local()
        padding = self.num_positions - sequences * length
        return nn.functional.pad(output.flatten(0, 1), (0, 0, 0, padding))


def build_stage(
    model: nn.Module, config: Config, mesh: DeviceMesh, device: torch.device
) -> tuple[PipelineStage, dist.ProcessGroup | None]:
    """Build this rank's stage and, for a tied embedding, the group of the ranks that hold it."""
    # The ranks of a pipeline work on the same micro-batches. NOTE: give sends and receives a group
    # of their own. Stages make unequal numbers of them. In a group that has collectives, too, that
    # confuses the checks of TORCH_DISTRIBUTED_DEBUG=DETAIL.
    ranks = range(dist.get_world_size())
    stage_size = len(ranks) // config.pipeline_parallel
    pipelines = [ranks[i::stage_size] for i in range(stage_size)]
    # Under gloo, a send waits as long as its group's timeout.
    timeout = timedelta(minutes=config.timeout_minutes)
    group, _ = dist.new_subgroups_by_enumeration(pipelines, timeout=timeout, group_desc="pipeline")
    # Declare what stages send. Otherwise PyTorch infers it with an extra forward for each new
    # schedule, that is in every step.
    parts = config.context_parallel * config.tensor_parallel  # of the positions
    num_positions = config.micro_batch_tokens
    if config.batching == "packed" or config.pad_to_multiple_of % parts == 0:
        num_positions = math.ceil(num_positions / parts)  # otherwise keep room for padding
    hidden = torch.empty(
        (num_positions, model.config.hidden_size),
        dtype=torch.bfloat16 if config.precision == "bf16" else torch.float32,
        device="meta",
        requires_grad=True,
    )
    index, num_stages = mesh.get_local_rank("stage"), config.pipeline_parallel
    stage = PipelineStage(
        Stage(model, index == num_stages - 1, num_positions, mesh["tensor"]),
        index,
        num_stages,
        device,
        input_args=hidden if index > 0 else (),
        output_args=hidden,
        group=group,
    )
    embedding_group = None
    if model.config.tie_word_embeddings and num_stages > 1:
        ends = [[ranks[0], ranks[-1]] for ranks in pipelines]
        embedding_group, _ = dist.new_subgroups_by_enumeration(ends, group_desc="embedding")
    return stage, embedding_group


def gather_sequences(module: nn.Module, inputs: Any, output: DTensor) -> DTensor:
    """Gather the output of the last norm, as a forward hook: the head needs full sequences."""
    return output.redistribute(placements=[Replicate()])  # an all-gather


def vocabulary_parallel_loss(*arguments: Any) -> torch.Tensor:
    """Return `chunk_loss` of DTensors as a plain tensor, equal on all ranks of a TP group.

    It is never compiled: torch 2.13 cannot compile it for several lengths.
    """
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
        # Attention sees full sequences, so the cumulative sequence lengths are not split. The
        # padding counts as a document.
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
    full sequences, but treats each head alone. All-to-alls therefore switch from sequence shards to
    head shards, and back.
    """
    # If C does not divide the number of key/value heads, several ranks need a copy of one head.
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


def train_step(
    model: nn.Module,
    optimizer: Optimizer,
    batch: common.GlobalBatch,
    step: int,
    config: Config,
    device: torch.device,
) -> dict[str, float]:
    """Run one optimizer step; returns the mean loss of the global batch and the gradient norm.

    On the last stage, `stage.submod(hidden)` returns the cross entropy summed over the rank's part
    of a micro-batch's target tokens (`Stage.forward`), on the others the hidden states for the next
    stage. The weights are sure to be full only inside the stage's forward.

    The schedule is 1F1B: once the first micro-batches have filled the pipeline, each stage
    alternates one forward and one backward of an earlier micro-batch.
    """
    # The loss of a step is the sum over all target tokens, divided by their number in the global
    # batch, which every rank counts by itself. A mean of micro-batch means would give tokens of
    # small micro-batches more weight.
    # FSDP averages gradients over all ranks with the same part of the layers, so multiply by their
    # number to get a sum.
    _, dp_size = dp_rank_and_size(config)
    scale = dp_size * config.context_parallel / batch.num_targets
    total_loss = torch.zeros((), device=device)

    def scaled_loss(loss: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Return the scaled loss, from which backward starts."""
        total_loss.add_(loss.detach())
        return loss * scale

    micro_batches = [
        local_micro_batch(micro_batch, config, device) for micro_batch in batch.micro_batches
    ]
    model.stage.submod.micro_batches = iter(micro_batches)
    # NOTE: scale_grads=True would divide the gradients by the number of micro-batches as well.
    schedule = Schedule1F1B(model.stage, len(micro_batches), scaled_loss, scale_grads=False)
    # The schedule splits `target`, so that `scaled_loss` gets one scale for each micro-batch.
    scales = torch.full((len(micro_batches),), scale, device=device)
    # With TP, each rank has the logits of its shard of the vocabulary. loss_parallel computes the
    # loss from them with three small all-reduces: of the maxima, of the sums of exponentials, and
    # of the targets' logits. NOTE: it replaces the backward of cross entropy as well, so backward
    # has to run inside of it.
    with tp.loss_parallel():
        # FSDP's all-gathers. For each micro-batch sends and receives between stages, and in each
        # block TP's all-gathers and reduce-scatters, and CP's all-to-alls. Last, all-reduces of the
        # norms' gradients over the TP group, and FSDP's reduce-scatters.
        schedule.step(target=scales, return_outputs=False)
    if model.embedding_group is not None:
        # The first stage computes the gradient of the tied weight as the embedding, and the last
        # stage as the head. Both need the sum, which keeps their copies equal.
        gradient = model.get_input_embeddings().weight.grad.to_local()
        dist.all_reduce(gradient, group=model.embedding_group)
    dist.all_reduce(total_loss)
    total_loss /= config.tensor_parallel  # each rank of a TP group added the same loss

    # The norm covers all stages, but a rank has only its own stages' gradients.
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    counted = parameters
    if model.embedding_group is not None and model.stage.is_last:
        # The first stage counts the tied embedding.
        embedding = model.get_input_embeddings().weight
        counted = [parameter for parameter in parameters if parameter is not embedding]
    # One all-reduce over the ranks of this stage (of one replica). All of them get the stage's
    # norm.
    stage_norm = nn.utils.get_total_norm([parameter.grad for parameter in counted]).full_tensor()
    squared_norm = stage_norm**2
    dist.all_reduce(squared_norm)  # over all ranks, so each rank of a stage adds the same value
    stage_size = dist.get_world_size() // config.pipeline_parallel
    norm = (squared_norm / stage_size).sqrt()
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
    schedule = ScheduleGPipe(model.stage, 1, add_loss)
    model.eval()
    # Forward all-gathers, so a rank with one more micro-batch would hang, waiting for the others.
    # All ranks get equally many.
    for i, micro_batch in enumerate(validation.evaluation(*dp_rank_and_size(run.config))):
        micro_batch = local_micro_batch(micro_batch, run.config, run.device)
        model.stage.submod.micro_batches = iter([micro_batch])
        with tp.loss_parallel():
            schedule.eval(target=micro_batch["labels"], return_outputs=False)
        # This all-reduce makes all stages wait, so run it after every 16th micro-batch only.
        if i % 16 == 0 and run.stops_validation():
            return None
    model.train()
    dist.all_reduce(total)  # each rank of a TP group added both, so the quotient is right
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
    same_sequences = config.context_parallel * config.tensor_parallel
    flags = config.pipeline_parallel * config.dp_replicate * same_sequences
    if config.steps and ranks % flags:
        common.refuse(
            "--pipeline_parallel x --dp_replicate x --context_parallel x --tensor_parallel = "
            f"{flags} does not divide {ranks} ranks"
        )
    dp_rank, dp_size = dp_rank_and_size(config)
    accumulation = micro_batches_per_rank(config, dp_size)
    if accumulation < config.pipeline_parallel:
        smallest = config.micro_batch_tokens * dp_size * config.pipeline_parallel
        common.refuse(
            f"--global_batch_tokens {config.global_batch_tokens} holds fewer micro-batches than "
            f"there are stages: use at least {smallest}"
        )

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
    loss = vocabulary_parallel_loss if config.tensor_parallel > 1 else None
    model = build_model(model_config, config, loss)
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
    mesh = f"{dp_size} data-parallel x {ranks // dp_size}"
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
