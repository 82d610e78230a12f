"""Causal-LM pretraining with FSDP2 and expert parallelism: ranks split the experts of each block.

    torchrun --standalone --nproc-per-node=2 fsdp2_ep_pretrain.py

A mixture-of-experts (MoE) model has many feed-forward networks in a block, the experts. A router
sends each token to a few of them.

When to use it: FSDP2 alone all-gathers all experts of a block, although each token uses only a few.
Here tokens travel to the experts instead. Keep the ranks of a group inside one node. Read
fsdp2_pretrain.py before it, and fsdp2_nd_pretrain.py next.

Memory per rank, with N ranks in groups of E: 1/N of the parameters, gradients and AdamW moments.
While a block computes, its unsharded parameters as well, but only 1/E of its experts.

Communication volume inside a block, with A the bytes of [tokens, hidden size] and t experts for
each token: all-to-alls of 4tA(E-1)/E in forward and backward, or 6tA(E-1)/E with full activation
checkpointing. Nothing overlaps with them. All ranks wait for the one whose experts got the most
tokens, and this rank also needs the most memory, so the routers have to be balanced.

Communication volume per step, with P the bytes of all parameters except experts and X the bytes of
a rank's experts: all-gathers before a block's forward and before its backward, at most
2P(N-1)/N + 2X(N-E)/N in all, and reduce-scatters of its gradients, half as much (equally much
in bf16, which halves the all-gathers). They overlap with compute although the CPU waits for the
token counts in each block, because a block issues the all-gathers of its experts and of the next
block before that.

GShard (arXiv 2006.16668) introduced expert parallelism. It drops the tokens that exceed an expert's
capacity, and so does Switch Transformer (arXiv 2101.03961). Nothing is dropped here, as in
DeepSeek-V3 (arXiv 2412.19437).
"""

import contextlib
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
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
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

NEXT_COMMAND = "torchrun --standalone --nproc-per-node=4 fsdp2_nd_pretrain.py --tensor_parallel 2"
# The default peak learning rate of a model with fewer than 10 million parameters.
SMALL_MODEL_PEAK = 3e-3
# The architectures that --model knows by name.
SHAPES = {
    "tiny-moe": {
        "model_type": "minimax_m2",
        "bos_token_id": None,  # its own ones are not in small vocabularies
        "eos_token_id": None,
        "hidden_size": 192,
        "intermediate_size": 320,  # of an expert
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 48,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "initializer_range": 0.07,
        "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "moe_intermediate_size": 768,  # of an expert
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
    },
}


@dataclass(config=ConfigDict(allow_inf_nan=False))
class Config(common.Flags):
    """The flags of this script, after those that all scripts share."""

    # model
    model: str = flag(
        "tiny-moe", "tiny-moe, qwen3-30b-a3b, or a directory or hub id with a config.json"
    )
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
    reshard_after_forward: bool = flag(
        True, "free a block's unsharded parameters after forward and all-gather them for backward"
    )
    expert_parallel: PositiveInt = flag(2, "ranks that the experts of each block are split over")
    balance_rate: NonNegativeFloat = flag(
        1e-2,
        "how far a step moves the routers' biases to balance the experts, if the model has such "
        "biases (DeepSeek-V3: 0.001, over many more steps)",
    )
    reduce_every_micro_batch: bool = flag(
        True,
        "reduce-scatter gradients in every micro-batch. false: once per step, which needs memory "
        "for a full set of gradients",
    )

    def __post_init__(self) -> None:
        """Check how flags fit together. The limits of a single flag are in its type."""
        super().__post_init__()
        if self.precision == "auto":
            # GPUs before Ampere only emulate bf16.
            bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported(False)
            self.precision = "bf16" if bf16 else "fp32"
        world_size = int(os.environ.get("WORLD_SIZE", 1))
        if self.steps and world_size % self.expert_parallel:
            raise ValueError(
                f"--expert_parallel {self.expert_parallel} does not divide {world_size} ranks"
            )
        # The compiler has to leave out the dispatch of tokens. It cannot do that in a block that
        # is recomputed, and would silently compile nothing.
        if self.compile and self.activation_checkpointing != "none":
            raise ValueError("--compile needs --activation_checkpointing none")
        common.check_global_batch(self, world_size)


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

    Here every rank trains on its own micro-batches of the global batch.
    """
    return dist.get_rank(), dist.get_world_size()


def moe_layers(module: nn.Module) -> list:
    """Return the MoE layers in `module`: those whose experts use transformers' ExpertsInterface.

    transformers stores all experts of a layer in one module, as parameters [experts, ...].
    """
    return [
        layer for layer in module.modules() if hasattr(getattr(layer, "experts", None), "has_gate")
    ]


def parallelize(model: nn.Module, config: Config, device: torch.device) -> nn.Module:
    """Split the experts over groups of ranks, shard all parameters, and initialize the shards.

    `fully_shard` works as in fsdp2_pretrain.py: it all-gathers parameters before forward and
    backward, and reduce-scatters gradients after backward. Experts have a mesh of their own.
    """
    check_model(model, config)
    blocks = transformer_blocks(model)
    checkpoint_activations(blocks, config.activation_checkpointing)
    if config.compile:
        compile_blocks(blocks, config)

    # The ranks of a row of the mesh split the experts of each block (the EP group). They are
    # consecutive ranks, so that they share a node. The ranks of a column have the same experts, and
    # FSDP shards these over them.
    shards = dist.get_world_size() // config.expert_parallel
    mesh = init_device_mesh(
        device.type, (shards, config.expert_parallel), mesh_dim_names=("shard", "expert")
    )
    # All other parameters are sharded over all ranks.
    world = init_device_mesh(device.type, (dist.get_world_size(),))
    precision = MixedPrecisionPolicy()
    if config.precision == "bf16":
        # Parameters are cast to bf16 as they are all-gathered, so blocks compute in bf16. The
        # shards and the optimizer state stay fp32. Reduce gradients in fp32 too. The default is
        # bf16 in torch 2.13, and the type of the shards from 2.15 on. Do not cast a block's inputs
        # either: what the model computes in fp32 (rotary embeddings in some types) stays fp32.
        precision = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )

    initialize(model, modules_outside_blocks(model), config.seed, device)
    model.tie_weights()  # `initialize` gave each module memory of its own, which untied them
    # `fully_shard` claims only parameters that no submodule has claimed yet, so apply it bottom-up:
    # experts first, then their block, then the root.
    for block in blocks:
        # Initialize one block at a time, so that no rank ever holds more than one full block.
        initialize(model, block.modules(), config.seed, device)
        for layer in moe_layers(block):
            split_experts(layer.experts, mesh["expert"])
            fully_shard(
                layer.experts,
                mesh=mesh["shard"],
                shard_placement_fn=partial(choose_dimension, shards),
                mp_policy=precision,
                reshard_after_forward=config.reshard_after_forward,
            )
        fully_shard(
            block,
            mesh=world,
            mp_policy=precision,
            reshard_after_forward=config.reshard_after_forward,
        )
    if not model.config.tie_word_embeddings:
        # A tied embedding has to be in the same group as the head. An untied one can be freed
        # during the step. Backward needs no embeddings, so do not all-gather them for it.
        fully_shard(
            model.get_input_embeddings(),
            mesh=world,
            mp_policy=precision,
            reshard_after_forward=config.reshard_after_forward,
        ).set_unshard_in_backward(False)
    # The root claims the rest. Do not reshard it after forward, because backward starts with it.
    fully_shard(model, mesh=world, mp_policy=precision, reshard_after_forward=False)
    for i, block in enumerate(blocks):
        # The CPU waits for the GPU in every dispatch, so FSDP would issue the all-gathers that
        # follow it too late to overlap. Issue them when the block begins.
        experts = [layer.experts for layer in moe_layers(block)]
        block.set_modules_to_forward_prefetch([*experts, *blocks[i + 1 : i + 2]])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Sum gradients over the ranks instead of averaging them, see `forward_backward`.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def check_model(model: nn.Module, config: Config) -> None:
    """Refuse a model without experts, or with experts that cannot be split or computed here."""
    name = f"--model {config.model}"
    layers = moe_layers(model)
    if not layers:
        common.refuse(f"{name} has no experts that use transformers' ExpertsInterface")
    for layer in layers:
        experts = layer.experts
        parameters = {key for key, _ in experts.named_parameters()}
        if parameters != {"gate_up_proj", "down_proj"} or experts.is_transposed:
            common.refuse(f"{name}: its {type(experts).__name__} cannot be split over ranks")
        for parameter in experts.parameters():
            if any(size % 8 for size in parameter.shape[1:]):  # `grouped_mm` requires it
                shape = list(parameter.shape)
                common.refuse(f"{name}: sizes of experts must be multiples of 8, not {shape}")
        if experts.num_experts % config.expert_parallel:
            common.refuse(
                f"--expert_parallel {config.expert_parallel} does not divide "
                f"{experts.num_experts} experts"
            )


def split_experts(experts: nn.Module, mesh: DeviceMesh) -> None:
    """Keep this rank's slice of a layer's experts, and let its forward dispatch tokens to ranks."""
    for name, parameter in list(experts.named_parameters()):
        # Every rank has initialized the same experts, so each can slice its own without a
        # collective.
        own = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None)
        experts.register_parameter(name, nn.Parameter(own))
    experts.forward = partial(dispatch, experts, mesh.get_group())


def choose_dimension(shards: int, parameter: nn.Parameter) -> Shard:
    """Choose the dimension along which FSDP shards a rank's experts, [own experts, rows, columns].

    If it cannot shard the experts evenly, it would pad the smaller shards, so it shards the rows.
    """
    own_experts, rows, _ = parameter.to_local().shape
    is_even = own_experts % shards == 0
    if not is_even and rows % shards == 0:
        return Shard(1)
    return Shard(0)


@torch.compiler.disable  # the number of tokens for each rank differs every time
def dispatch(
    experts: nn.Module,
    group: dist.ProcessGroup,
    hidden: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Replace the experts' forward: send each token to the ranks of its experts, and back.

    The layer does not know which tokens are padding, so it sends these too.

    Args:
        group: the EP group. Its first rank has the first experts, and so on.
        hidden: [tokens, hidden size] of this rank's micro-batch.
        chosen: int64 [tokens, t], the experts of each token.
        weights: [tokens, t], the factors of the experts' outputs in their sum.
    """
    # A row is one token for one expert. Sorted by expert, rows are also sorted by rank.
    expert_of_row = chosen.flatten()  # [tokens x t]
    order = expert_of_row.argsort(stable=True)
    rows = hidden[order // chosen.shape[1]]  # [tokens x t, hidden size]
    counts, sent, received = exchange_counts(expert_of_row, experts.num_experts, group)
    # An all-to-all. Its backward is another one, which returns the gradients.
    rows = all_to_all_single_autograd(rows, received, sent, group)  # [received, hidden size]

    # Rows arrive sorted by rank, and by expert for each rank. The matmuls need them by expert.
    own_experts = torch.arange(counts.shape[1], device=rows.device)
    expert_of_row = own_experts.repeat(group.size()).repeat_interleave(
        counts.flatten(), output_size=len(rows)
    )
    by_expert = expert_of_row.argsort(stable=True)
    rows = compute_experts(experts, rows[by_expert], counts.sum(0))
    rows = rows[by_expert.argsort()]  # [received, hidden size]

    rows = all_to_all_single_autograd(rows, sent, received, group)  # [tokens x t, hidden size]
    outputs = rows[order.argsort()].view(*chosen.shape, -1)  # [tokens, t, hidden size]
    # Many routers return fp32 weights, which make the sum fp32.
    return (outputs * weights[..., None]).sum(1).to(hidden.dtype)


def exchange_counts(
    expert_of_row: torch.Tensor, num_experts: int, group: dist.ProcessGroup
) -> tuple:
    """Tell each rank how many rows it will get for each of its experts, by an all-to-all.

    Returns:
        The rows to receive, int64 [ranks, own experts]; the rows to send to each rank; the rows to
        receive from each rank.
    """
    # `bincount` would synchronize with the GPU.
    ones = torch.ones_like(expert_of_row)
    counts = expert_of_row.new_zeros(num_experts).scatter_add(0, expert_of_row, ones)
    to_send = counts.view(group.size(), -1)  # [ranks, own experts]
    to_receive = all_to_all_single_autograd(to_send, None, None, group)
    # NOTE: this synchronizes with the GPU, because the CPU has to allocate memory for the rows.
    sent, received = torch.stack([to_send.sum(1), to_receive.sum(1)]).tolist()
    return to_receive, sent, received


def compute_experts(experts: nn.Module, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Run this rank's experts, each on its own rows.

    Args:
        rows: [rows, hidden size], sorted by expert.
        counts: int64 [own experts], rows of each expert, which may be 0.
    """
    # FSDP has all-gathered this rank's slice of the DTensors, [own experts, ...].
    gate_up = experts.gate_up_proj.to_local()
    down = experts.down_proj.to_local()
    ends = counts.cumsum(0, dtype=torch.int32)
    inner = nn.functional.grouped_mm(rows, gate_up.mT, offs=ends)  # [rows, 2 x inner size]
    return nn.functional.grouped_mm(experts._apply_gate(inner), down.mT, offs=ends)


def optimizer_parameters(model: nn.Module) -> list:
    """Return the parameters that this rank's optimizer updates, with their names.

    NOTE: call it after `parallelize`. An optimizer that was built before would hold the unsharded
    parameters, which the model no longer uses.
    """
    return list(model.named_parameters())


def forward_backward(
    model: nn.Module, batch: common.GlobalBatch, config: Config, device: torch.device
) -> torch.Tensor:
    """Run forward and backward on all micro-batches; returns the loss summed over all ranks.

    FSDP reduce-scatters the gradients of every micro-batch, overlapped with its backward, so a rank
    accumulates only its shard. With `--reduce_every_micro_batch false` it accumulates unsharded
    gradients (of the experts, those of its slice) and reduce-scatters them once.
    """
    layers = moe_layers(model)
    # How many target tokens chose each expert.
    counts = torch.zeros(
        len(layers), layers[0].experts.num_experts, dtype=torch.int64, device=device
    )
    # The loss of a step is the sum over all target tokens, divided by their number in the global
    # batch. A mean of micro-batch means would give tokens of small micro-batches more weight.
    # NOTE: do not average gradients over ranks. An expert's gradient already covers the tokens of
    # its EP group, so FSDP adds N gradients for experts, and EN for the other parameters. Two
    # averages would weight experts E times too much. AdamW hides that, but the norm does not.
    scale = 1 / batch.num_targets
    total_loss = torch.zeros((), device=device)
    for i, micro_batch in enumerate(batch.micro_batches):
        last = i == len(batch.micro_batches) - 1
        # NOTE: off by one here, and ranks train on their local gradients without an error.
        model.set_requires_gradient_sync(last or config.reduce_every_micro_batch)
        # Without resharding after backward, the next micro-batch needs no all-gather.
        model.set_reshard_after_backward(last or config.reshard_after_forward)
        micro_batch = common.to_device(micro_batch, device)
        with counting_experts(layers, micro_batch["labels"], counts):
            loss = model(**micro_batch)  # all-gathers and all-to-alls
        (loss * scale).backward()  # the same, and reduce-scatters if gradients sync
        total_loss += loss.detach()
    dist.all_reduce(total_loss)
    dist.all_reduce(counts)
    batch.measured["expert_load"] = balance_experts(layers, counts, config.balance_rate)
    return total_loss


@contextlib.contextmanager
def counting_experts(
    layers: list[nn.Module], labels: torch.Tensor, counts: torch.Tensor
) -> Iterator[None]:
    """Add to `counts` [layers, experts] which experts the target tokens of a forward choose.

    The hooks exist during this forward only, because activation checkpointing recomputes blocks in
    backward, which would count everything twice.
    """
    is_target = (labels.flatten() >= 0).long()

    def count(layer_counts: torch.Tensor, experts: nn.Module, inputs: tuple) -> None:
        _, chosen, _ = inputs  # see `dispatch`
        repeated = is_target.repeat_interleave(chosen.shape[1])
        layer_counts.scatter_add_(0, chosen.flatten(), repeated)

    hooks = [
        layer.experts.register_forward_pre_hook(partial(count, layer_counts))
        for layer, layer_counts in zip(layers, counts)
    ]
    yield
    for hook in hooks:
        hook.remove()


@torch.no_grad()
def balance_experts(layers: list[nn.Module], counts: torch.Tensor, rate: float) -> float:
    """Move the routers' biases, so that the next step chooses experts more evenly.

    An expert with fewer tokens than the mean gets a larger bias, and one with more a smaller bias.
    The router adds the bias to its scores only to choose experts. So it changes neither the loss
    nor the gradients, which an auxiliary loss would disturb (DeepSeek, arXiv 2408.15664). Routers
    without such a bias stay as they are.

    NOTE: balance over the global batch. A single micro-batch may well be about one subject.

    Returns:
        The tokens of the fullest expert, divided by the mean, in the worst layer. 1.0 is balanced.
    """
    tokens = counts.double()
    mean = tokens.mean(1, keepdim=True)
    for layer, direction in zip(layers, (mean - tokens).sign()):
        for name, bias in layer.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                bias += rate * direction
    return (tokens / mean).max().item()


def clip_grad_norm(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Clip the gradient norm to `max_norm`; returns the norm before clipping."""
    # DTensors on different meshes cannot be combined. But each element of a gradient is on exactly
    # one rank, so the squares of all local elements add up to the squared norm.
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    gradients = [parameter.grad.to_local() for parameter in parameters]
    squared_norm = nn.utils.get_total_norm(gradients) ** 2
    dist.all_reduce(squared_norm)  # a collective, so call it on every rank
    norm = squared_norm.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient *= factor
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
    for micro_batch in micro_batches:  # forward all-gathers, so each rank needs equally many
        micro_batch = common.to_device(micro_batch, device)
        total[0] += model(**micro_batch)
        total[1] += (micro_batch["labels"] >= 0).sum()
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
