"""Causal-LM pretraining with FSDP2 and context parallelism (CP): C ranks share each sequence.

    torchrun --standalone --nproc-per-node=2 fsdp2_cp_pretrain.py

When to use it: the activations of one sequence do not fit on one GPU, as with long documents. Read
fsdp2_pretrain.py before it, and fsdp2_pp_pretrain.py next.

Memory per rank, with N ranks in all and C in a CP group: 1/N of the parameters, gradients and AdamW
moments. While a block computes, its unsharded parameters as well. The activations of 1/C of each
sequence.

`--context_attention` is how a token attends to tokens that other ranks have:
- `ulysses` (DeepSpeed-Ulysses, arXiv 2309.14509): all-to-alls around attention turn all heads of a
  part of the sequence into some heads of the full sequence, and back. C has to divide the heads.
- `ring` (Ring Attention, arXiv 2310.01889): keys and values travel from rank to rank, while each
  rank attends with its own queries. Any number of heads will do, and the transfers overlap with
  compute. Each rank has an early and a late part of the sequence, so that causal attention is the
  same work for all (as in Llama 3, arXiv 2407.21783, which all-gathers keys and values instead).

Communication volume inside each block, with Q and K the bytes of the queries and of the keys:
- `ulysses`: an all-to-all each for queries, keys, values and outputs in forward, and the same in
  backward, 4(Q+K)(C-1)/C² in all, or 6(Q+K)(C-1)/C² if backward recomputes the block.
- `ring`: keys and values in forward and in backward, and their gradients in backward,
  2K(3C-2)/C in all, and 2K(C-1)/C more if backward recomputes the block. That is less if many
  queries share a key (Q much larger than K) and C is small.

Communication volume per step, with P and G the bytes of parameters and gradients: all-gathers and
reduce-scatters over all ranks, (2P+G)(N-1)/N, as in fsdp2_pretrain.py. Most of it overlaps.
"""

import gc
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd, permute_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
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

NEXT_COMMAND = "torchrun --standalone --nproc-per-node=2 fsdp2_pp_pretrain.py"
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
    context_parallel: PositiveInt = flag(2, "ranks of a CP group, which share each sequence")
    context_attention: Literal["ulysses", "ring"] = flag(
        "ulysses",
        "ulysses: ranks exchange parts of the sequence for heads. ring: keys and values travel "
        "around the CP group (bucketed batches only)",
    )
    reshard_after_forward: bool = flag(
        True, "free a block's unsharded parameters after forward and all-gather them for backward"
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
        if self.steps and world_size % self.context_parallel:
            raise ValueError(
                f"--context_parallel {self.context_parallel} must divide {world_size} ranks"
            )
        common.check_global_batch(self, max(1, world_size // self.context_parallel))
        if self.context_attention == "ring":
            if self.batching == "packed":
                raise ValueError("--context_attention ring does not support --batching packed")
            if self.precision == "fp32" and torch.cuda.is_available():
                raise ValueError("--context_attention ring needs --precision bf16 on GPUs")


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

    NOTE: the ranks of a CP group share the same sequences, so a whole group counts as one
    data-parallel rank. A group is made of consecutive ranks.
    """
    group = dist.get_rank() // config.context_parallel
    return group, dist.get_world_size() // config.context_parallel


def local_micro_batch(
    micro_batch: dict[str, Any], config: Config, device: torch.device
) -> dict[str, Any]:
    """Return this rank's part of each sequence, [sequences, length / C], on its device.

    NOTE: the part needs the positions of its tokens. Otherwise each rank would count from 0.
    """
    ranks = config.context_parallel
    rank = dist.get_rank() % ranks
    if config.context_attention == "ring":
        # An early and a late chunk, so that causal attention is the same work for all ranks.
        num_chunks, own_chunks = 2 * ranks, [rank, 2 * ranks - 1 - rank]
    else:
        num_chunks, own_chunks = ranks, [rank]
    length = micro_batch["labels"].shape[1]
    padding = -length % num_chunks  # makes all chunks equally long
    part = {"position_ids": torch.arange(length)[None], **micro_batch}
    padding_values = {
        "input_ids": 0,
        "position_ids": 0,
        "labels": common.IGNORED,
    }
    for name, value in padding_values.items():
        padded = nn.functional.pad(part[name], (0, padding), value=value)
        chunks = padded.chunk(num_chunks, dim=1)
        part[name] = torch.cat([chunks[i] for i in own_chunks], dim=1)
    if config.batching == "packed":
        # Attention sees full sequences, so the cumulative sequence lengths stay those of the full
        # sequence. The padding is one more document.
        end = length + padding
        part["cu_seq_lens_q"] = nn.functional.pad(part["cu_seq_lens_q"], (0, 1), value=end)
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
    if "cu_seq_lens_q" in kwargs:  # packed
        attend = document_attention
    else:
        attend = sdpa_attention_forward
    output, _ = attend(module, query, key, value, attention_mask, **kwargs)
    return exchange(output, group), None  # [sequences, length / C, heads, head size]


def pass_on(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Send a tensor to the next rank of the ring; returns that of the rank before.

    The transfer overlaps with compute until the result is used.
    """
    to = [*range(1, group.size()), 0]
    return permute_tensor(tensor.flatten(), to, group).view(tensor.shape)


def travel(tensor: torch.Tensor, group: dist.ProcessGroup) -> Iterable[torch.Tensor]:
    """Yield the tensors of all ranks of the ring: the own one, the one of the rank before, ..."""
    for _ in range(group.size() - 1):
        following = pass_on(tensor, group)
        yield tensor
        tensor = following
    yield tensor


def visible(turn: int, group: dist.ProcessGroup, length: int) -> tuple[slice, slice, bool]:
    """Return which own queries see which keys in a turn, and whether that needs a causal mask.

    Each rank has an early and a late chunk of the sequence. In the first turn it has its own keys.
    After that it sees half of all pairs in each turn.
    """
    everything = slice(None)
    if turn == 0:
        return everything, everything, True
    if turn <= group.rank():  # keys of a lower rank: only the early chunk is before the queries
        return everything, slice(0, length // 2), False
    return slice(length // 2, None), everything, False  # only late queries are after the keys


class RingAttention(torch.autograd.Function):
    """Causal attention of a rank's own queries to keys and values that travel around the ring.

    Args:
        query: [sequences, heads, length / C, head size], an early and a late chunk of the sequence.
        keys_values: [2, sequences, key/value heads, length / C, head size].
        scale: factor of the scores; None for 1 / sqrt(head size).
    """

    @staticmethod
    def forward(ctx, query, keys_values, scale, group):
        # The kernels of SDPA also return the logarithm of the sum of exponentials of the scores, by
        # which the outputs of the turns are weighted.
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        if query.is_cuda:
            flash = torch.ops.aten._scaled_dot_product_flash_attention
        copies = query.shape[1] // keys_values.shape[2]
        output = torch.zeros_like(query, dtype=torch.float32)
        log_sums = output.new_full(query.shape[:3], -math.inf)  # [sequences, heads, length / C]
        for turn, traveling in enumerate(travel(keys_values, group)):
            own, theirs, causal = visible(turn, group, query.shape[2])
            key, value = traveling[:, :, :, theirs].repeat_interleave(copies, dim=2)
            part, part_sum, *_ = flash(
                query[:, :, own],
                key,
                value,
                0.0,  # dropout
                causal,
                scale=scale,
            )
            log_sum = log_sums[:, :, own]  # a view, as the next one
            sum_of_parts = output[:, :, own]
            total = torch.logaddexp(log_sum, part_sum)
            sum_of_parts *= (log_sum - total).exp().unsqueeze(-1)
            sum_of_parts += (part_sum - total).exp().unsqueeze(-1) * part
            log_sum.copy_(total)
        output = output.to(query.dtype)
        ctx.save_for_backward(query, keys_values, output, log_sums)
        ctx.scale = scale
        ctx.group = group
        return output

    @staticmethod
    def backward(ctx, gradient):
        query, keys_values, output, log_sums = ctx.saved_tensors
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        sizes = dropout_state = ()  # arguments that only the kernel for GPUs has
        if query.is_cuda:
            flash = torch.ops.aten._scaled_dot_product_flash_attention_backward
            dropout_state = torch.empty(2, 2, dtype=torch.uint64, device=query.device)
        copies = query.shape[1] // keys_values.shape[2]
        query_gradient = torch.zeros_like(query)
        gradients = torch.zeros_like(keys_values)  # they travel too, one turn behind
        for turn, traveling in enumerate(travel(keys_values, ctx.group)):
            own, theirs, causal = visible(turn, ctx.group, query.shape[2])
            key, value = traveling[:, :, :, theirs].repeat_interleave(copies, dim=2)
            if query.is_cuda:
                sizes = None, None, query[:, :, own].shape[2], key.shape[2]
            of_query, *more = flash(
                gradient[:, :, own],
                query[:, :, own],
                key,
                value,
                output[:, :, own],
                # NOTE: the kernel for GPUs ignores their strides. It would read others, silently.
                log_sums[:, :, own].contiguous(),
                *sizes,
                0.0,  # dropout
                causal,
                *dropout_state,
                scale=ctx.scale,
            )
            query_gradient[:, :, own] += of_query
            of_heads = torch.stack(more).unflatten(2, (-1, copies))
            gradients[:, :, :, theirs] += of_heads.sum(dim=3)
            # After the last turn they are back at the rank whose keys and values these are.
            gradients = pass_on(gradients, ctx.group)
        return query_gradient, gradients, None, None


@torch.compiler.disable  # the transfers would not overlap
def ring_attention(
    group: dist.ProcessGroup,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple:
    """Causal attention over full sequences, of which each rank has an early and a late chunk."""
    output = RingAttention.apply(query, torch.stack([key, value]), scaling, group)
    return output.transpose(1, 2).contiguous(), None  # [sequences, length / C, heads, size]


def check_model(model_config: PreTrainedConfig, config: Config) -> None:
    """Refuse a model whose attention is not plainly causal, or whose heads cannot be split."""
    # Other types mix tokens outside of attention, or need masks.
    if model_config.model_type not in common.PACKED_TYPES.split():
        common.refuse(f"--model {config.model}: CP cannot train type {model_config.model_type}")
    window = getattr(model_config, "sliding_window", None)
    if window and window < config.max_length:
        common.refuse(f"--max_length {config.max_length} exceeds the sliding window of {window}")
    heads = getattr(
        model_config, "num_attention_heads_per_layer", [model_config.num_attention_heads]
    )
    if config.context_attention == "ring":
        for setting, value in model_config.to_dict().items():
            if value and re.search("att.*drop|v_head_dim", setting):
                common.refuse(f"--model {config.model}: ring attention does not support {setting}")
    elif math.gcd(*heads) % config.context_parallel:
        common.refuse(
            f"--context_parallel must divide the attention heads of the model: {heads}; or use "
            "--context_attention ring"
        )


def parallelize(model: nn.Module, config: Config, device: torch.device) -> nn.Module:
    """Shard a model that is on the meta device, and give the shards memory and initial weights.

    CP replaces only the attention. FSDP shards parameters over all ranks, whichever tokens of
    whichever sequences they have. (See fsdp2_pretrain.py for `fully_shard` and the order.)
    """
    check_model(model.config, config)
    group, _ = dist.new_subgroups(config.context_parallel, group_desc="context")
    # NOTE: transformers makes no masks for an attention with a name of our own. For "sdpa" it would
    # make masks of this rank's part of the sequence.
    attention = ring_attention if config.context_attention == "ring" else ulysses_attention
    AttentionInterface.register("context_parallel", partial(attention, group))
    model.set_attn_implementation("context_parallel")
    blocks = transformer_blocks(model)
    checkpoint_activations(blocks, config.activation_checkpointing)
    if config.compile:
        compile_blocks(blocks, config)

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    options = {"mesh": mesh}
    if config.precision != "fp32":
        # Parameters are cast to bf16 as they are all-gathered, so blocks compute in bf16. The
        # shards and the optimizer state stay fp32. Reduce gradients in fp32 too. The default is
        # bf16 in torch 2.13, and the type of the shards from 2.15 on. Do not cast a block's inputs
        # either: what the model computes in fp32 (rotary embeddings in some types) stays fp32.
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )

    initialize(model, modules_outside_blocks(model), config.seed, device)
    model.tie_weights()  # `initialize` gave each module memory of its own, which untied them
    # `fully_shard` claims only parameters that no submodule has claimed yet, so apply it bottom-up:
    # blocks first, then the root. With the root alone, all parameters would be gathered at once.
    for block in blocks:
        # Initialize one block at a time, so that no rank ever holds more than one full block.
        initialize(model, block.modules(), config.seed, device)
        fully_shard(block, reshard_after_forward=config.reshard_after_forward, **options)
    if not model.config.tie_word_embeddings:
        # A tied embedding has to be in the same group as the head. An untied one can be freed
        # during the step. Backward needs no embeddings, so do not all-gather them for it.
        fully_shard(
            model.get_input_embeddings(),
            reshard_after_forward=config.reshard_after_forward,
            **options,
        ).set_unshard_in_backward(False)
    # The root claims the rest. Do not reshard it after forward, because backward starts with it.
    fully_shard(model, reshard_after_forward=False, **options)
    return model


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
    gradients and reduce-scatters them once, on the last micro-batch. That saves communication but
    needs memory for a full set of gradients.
    """
    # The loss of a step is the sum over all target tokens, divided by their number in the global
    # batch. A mean of micro-batch means would give tokens of small micro-batches more weight.
    # FSDP averages gradients over the ranks, so multiply by their number to get a sum.
    # NOTE: not by the number of CP groups. Each rank has the loss of its own tokens only.
    scale = dist.get_world_size() / batch.num_targets
    total_loss = torch.zeros((), device=device)
    for i, micro_batch in enumerate(batch.micro_batches):
        last = i == len(batch.micro_batches) - 1
        # NOTE: off by one here, and ranks train on their local gradients without an error.
        model.set_requires_gradient_sync(last or config.reduce_every_micro_batch)
        # Without resharding after backward, the next micro-batch needs no all-gather.
        model.set_reshard_after_backward(last or config.reshard_after_forward)
        loss = model(**local_micro_batch(micro_batch, config, device))
        (loss * scale).backward()
        total_loss += loss.detach()
    dist.all_reduce(total_loss)
    return total_loss


def clip_grad_norm(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Clip the gradient norm to `max_norm`; returns the norm before clipping."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    # NOTE: the norm is a DTensor, and its local value may cover only this rank's shards.
    return norm.full_tensor()  # a collective, so call it on every rank


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
        micro_batch = local_micro_batch(micro_batch, config, device)
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
