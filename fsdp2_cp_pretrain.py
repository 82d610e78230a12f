"""Causal-LM pretraining with FSDP2 and context parallelism (CP): C ranks share each sequence.

    torchrun --standalone --nproc-per-node=2 fsdp2_cp_pretrain.py

When to use it: the activations of one sequence do not fit on one GPU, as with long documents.

Each rank of a CP group has 1/C of each sequence. Norms and feed-forward treat each token alone, so
only attention needs the other ranks' tokens. `--context_attention` chooses how ranks exchange them:

- `ulysses` (DeepSpeed-Ulysses, arXiv 2309.14509): all-to-alls before attention turn a part of the
  sequence with all heads into the full sequence with 1/C of the heads, and one after it turns the
  outputs back. C has to divide the heads.
- `ring` (Ring Attention, arXiv 2310.01889): keys and values travel from rank to rank, while each
  rank attends with its own queries. Any number of heads will do, and the transfers overlap with
  compute. Each rank has an early and a late chunk of each sequence, so that causal attention is the
  same work for all (as in Llama 3, arXiv 2407.21783, which all-gathers keys and values instead).

FSDP2 turns the parameters into DTensors, sharded over all ranks. A DTensor is a tensor that is
spread over ranks. Its `shape` is the shape of the full tensor, and `to_local()` is this rank's part
of it, for a parameter its shard. FSDP2 shards each parameter along dimension 0.

Memory per rank, with N ranks in all: 1/N of the fp32 parameters, gradients and AdamW moments, 16/N
bytes per parameter. On top come the full parameters of one or two blocks and of the root (last
norm, head and a tied embedding), in backward also their full gradients. Of each sequence, a rank
keeps 1/C of the activations.

Communication volume inside each block, with Q and K the bytes of the queries and of the keys of a
micro-batch:

- `ulysses`: an all-to-all each for queries, keys, values and outputs in forward, and four in
  backward, 4(Q+K)(C-1)/C² in all, or 6(Q+K)(C-1)/C² if backward recomputes the block. (If C does
  not divide the key/value heads, they are repeated first, and K is the size of the repeated keys.)
- `ring`: keys and values in forward and in backward, and their gradients in backward,
  2K(3C-2)/C in all, and 2K(C-1)/C more if backward recomputes the block. That is less than
  `ulysses` if many query heads share a key/value head (Q much larger than K) and C is small.

Communication volume per micro-batch, with P the bytes of the parameters in compute precision and G
the bytes of the fp32 gradients: each block's parameters are all-gathered for its forward and again
for its backward, 2P(N-1)/N in all, and its gradients are reduce-scattered, G(N-1)/N. (The
embedding, the last norm and the head are gathered once.) Most of this overlaps with compute.
"""

import math
import os
import re
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
from torch.distributed._functional_collectives import all_to_all_single_autograd, permute_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import AdamW, Optimizer
from transformers import AttentionInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import common
from model import (
    PACKED_TYPES,
    build_config,
    build_model,
    checkpoint_activations,
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

NEXT_COMMAND = "torchrun --standalone --nproc-per-node=2 fsdp2_pp_pretrain.py"


# The shared flags, such as learning rate and batch sizes, are in run.py.
@dataclass
class Config(Flags):
    """The flags of this script, beside the shared ones."""

    text_column: str = flag("text", "column of the dataset that holds the text")
    context_parallel: PositiveInt = flag(2, "ranks of a CP group, which share each sequence")
    context_attention: Literal["ulysses", "ring"] = flag(
        "ulysses",
        "ulysses: ranks exchange parts of the sequence for heads. ring: keys and values travel "
        "around the CP group (bucketed batches only)",
    )
    reshard_after_forward: bool = flag(
        True, "free a block's full parameters after forward and all-gather them for backward"
    )
    reduce_every_micro_batch: bool = flag(
        True,
        "reduce-scatter gradients in every micro-batch. false: once per step, which needs memory "
        "for a full set of gradients",
    )

    def __post_init__(self) -> None:
        """Check how flags fit together."""
        super().__post_init__()
        if self.context_attention == "ring":
            if self.batching == "packed":
                common.refuse("--context_attention ring needs --batching bucketed")
            if self.precision == "fp32" and torch.cuda.is_available():
                common.refuse("--context_attention ring needs --precision bf16 on GPUs")


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


def dp_rank_and_size(config: Config) -> tuple[int, int]:
    """Return this rank's index among the data-parallel ranks, and how many there are.

    NOTE: the ranks of a CP group share the same sequences, so a whole group counts as one
    data-parallel rank. A group is made of consecutive ranks.
    """
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return rank // config.context_parallel, ranks // config.context_parallel


def check_model(model_config: PreTrainedConfig, config: Config) -> None:
    """Refuse a model whose attention is not plainly causal, or whose heads cannot be split."""
    # Types outside this list mix tokens outside of attention, or need masks.
    if model_config.model_type not in PACKED_TYPES.split():
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

    CP replaces only the attention. FSDP shards parameters over all ranks, within and across CP
    groups.

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
    check_model(model.config, config)
    # This rank's CP group: consecutive ranks, so that they share a node.
    group, _ = dist.new_subgroups(config.context_parallel, group_desc="context")
    attention = ring_attention if config.context_attention == "ring" else ulysses_attention
    # NOTE: under the name "sdpa", transformers would build a mask where this rank's positions are
    # not consecutive: with padding, in packed batches, and with the ring's two chunks. Under a name
    # without a mask function it builds none.
    AttentionInterface.register("context_parallel", partial(attention, group))
    model.set_attn_implementation("context_parallel")
    blocks = transformer_blocks(model)
    # Recomputation replaces a block's `forward`. FSDP's hooks run around `forward`, so a recomputed
    # forward uses the parameters that were gathered for backward. The compiler takes the block's
    # whole call, recomputation included, but leaves FSDP's hooks as they are.
    checkpoint_activations(blocks, config.activation_checkpointing)
    if config.compile:
        compile_blocks(blocks, config)

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    options = {"mesh": mesh}
    if config.precision != "fp32":
        # Shards and optimizer state stay fp32. Parameters are cast to bf16 before they are
        # gathered, so blocks compute in bf16 and their full gradients are bf16. These are cast to
        # fp32 before they are reduced. FSDP would also cast the inputs of each unit. Leave them,
        # because some types (OLMo 2) pass rotary embeddings in fp32 on purpose.
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )

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


def local_micro_batch(
    micro_batch: dict[str, Any], config: Config, device: torch.device
) -> dict[str, Any]:
    """Return this rank's part of each sequence, [sequences, length / C], on its device.

    NOTE: the part needs the positions of its tokens. Otherwise each rank would count from 0.
    """
    ranks = config.context_parallel
    rank = dist.get_rank() % ranks
    num_chunks, own_chunks = ranks, [rank]
    if config.context_attention == "ring":
        # An early and a late chunk, so that causal attention is the same work for all ranks.
        num_chunks, own_chunks = 2 * ranks, [rank, 2 * ranks - 1 - rank]
    length = micro_batch["labels"].shape[1]
    padding = -length % num_chunks  # makes all chunks equally long
    # A packed micro-batch has positions, which restart at each document. A bucketed one has none.
    part = {"position_ids": torch.arange(length)[None], **micro_batch}
    padding_values = {"input_ids": 0, "position_ids": 0, "labels": common.IGNORED}
    for name, value in padding_values.items():
        padded = nn.functional.pad(part[name], (0, padding), value=value)
        chunks = padded.chunk(num_chunks, dim=1)
        part[name] = torch.cat([chunks[i] for i in own_chunks], dim=1)
    if config.batching == "packed":
        # Attention sees full sequences, so the cumulative sequence lengths are not split. The
        # padding counts as a document.
        end = length + padding
        part["cu_seq_lens_q"] = nn.functional.pad(part["cu_seq_lens_q"], (0, 1), value=end)
    return common.to_device(part, device)


def exchange(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Split dimension 1 over the ranks of a CP group, and join their parts of dimension 2.

    In an all-to-all, each rank sends a different part of its tensor to each rank.

    [sequences, heads, length / C, head size] -> [sequences, heads / C, length, head size], and back
    [sequences, length, heads / C, head size] -> [sequences, length / C, heads, head size].

    Backward is another all-to-all, in the other direction.
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

    Attention needs full sequences, but treats each head alone. All-to-alls therefore switch from
    sequence shards to head shards, and back.

    Args:
        query: [sequences, heads, length / C, head size]; key and value may have fewer heads.
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
    packed = "cu_seq_lens_q" in kwargs
    attend = document_attention if packed else sdpa_attention_forward
    output, _ = attend(module, query, key, value, attention_mask, **kwargs)
    return exchange(output, group), None  # [sequences, length / C, heads, head size]


@torch.compiler.disable  # a graph break; compiled, the transfers would not overlap
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
    """Causal attention over full sequences, of which each rank has an early and a late chunk.

    Args:
        query: [sequences, heads, length / C, head size]; key and value may have fewer heads.
    """
    output = RingAttention.apply(query, torch.stack([key, value]), scaling, group)
    return output.transpose(1, 2).contiguous(), None  # [sequences, length / C, heads, size]


class RingAttention(torch.autograd.Function):
    """Causal attention of a rank's own queries to keys and values that travel around the ring.

    In each turn a rank attends to the keys and values of one rank. The output is the mean over all
    turns, weighted by each turn's sum of exponentials (online softmax).

    Args:
        query: [sequences, heads, length / C, head size], an early and a late chunk of the sequence.
        keys_values: [2, sequences, key/value heads, length / C, head size].
        scale: factor of the scores; None for 1 / sqrt(head size).
    """

    @staticmethod
    def forward(ctx, query, keys_values, scale, group):
        # SDPA's flash kernels. They also return the logsumexp of each query's scores.
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        if query.is_cuda:
            kernel = torch.ops.aten._scaled_dot_product_flash_attention
        copies = query.shape[1] // keys_values.shape[2]
        output = torch.zeros_like(query, dtype=torch.float32)
        log_sums = output.new_full(query.shape[:3], -math.inf)  # [sequences, heads, length / C]
        for turn, traveling in enumerate(travel(keys_values, group)):
            own, theirs, causal = visible(turn, group, query.shape[2])
            key, value = traveling[:, :, :, theirs].repeat_interleave(copies, dim=2)
            part, part_sum, *_ = kernel(
                query[:, :, own],
                key,
                value,
                0.0,  # dropout
                causal,
                scale=scale,
            )
            log_sum = log_sums[:, :, own]  # views, updated in place below
            sum_of_parts = output[:, :, own]
            total = torch.logaddexp(log_sum, part_sum)
            sum_of_parts *= (log_sum - total).exp().unsqueeze(-1)
            sum_of_parts += (part_sum - total).exp().unsqueeze(-1) * part
            log_sum.copy_(total)
        output = output.to(query.dtype)
        ctx.save_for_backward(query, keys_values, output, log_sums)
        ctx.scale, ctx.group = scale, group
        return output

    @staticmethod
    def backward(ctx, gradient):
        query, keys_values, output, log_sums = ctx.saved_tensors
        copies = query.shape[1] // keys_values.shape[2]
        query_gradient = torch.zeros_like(query)
        gradients = torch.zeros_like(keys_values)  # passed on after each turn's kernel
        for turn, traveling in enumerate(travel(keys_values, ctx.group)):
            own, theirs, causal = visible(turn, ctx.group, query.shape[2])
            key, value = traveling[:, :, :, theirs].repeat_interleave(copies, dim=2)
            tensors = [
                gradient[:, :, own],
                query[:, :, own],
                key,
                value,
                output[:, :, own],
                # NOTE: the CUDA kernel ignores the strides of this one, and would silently read
                # other values.
                log_sums[:, :, own].contiguous(),
            ]
            of_query, *of_heads = flash_attention_backward(tensors, causal, ctx.scale)
            query_gradient[:, :, own] += of_query
            # Sum over the query heads that share a key/value head.
            of_heads = torch.stack(of_heads).unflatten(2, (-1, copies))
            gradients[:, :, :, theirs] += of_heads.sum(dim=3)
            # After the last turn, each gradient is on the rank that owns its keys and values.
            gradients = pass_on(gradients, ctx.group)
        return query_gradient, gradients, None, None


def travel(tensor: torch.Tensor, group: dist.ProcessGroup) -> Iterator[torch.Tensor]:
    """Yield each rank's tensor: first this rank's own, then the previous rank's, and so on."""
    for _ in range(group.size() - 1):
        following = pass_on(tensor, group)
        yield tensor
        tensor = following
    yield tensor


def pass_on(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Send a tensor to the ring's next rank; returns the previous rank's tensor.

    The transfer overlaps with compute until the result is used.
    """
    to = [*range(1, group.size()), 0]
    return permute_tensor(tensor.flatten(), to, group).view(tensor.shape)


def visible(turn: int, group: dist.ProcessGroup, length: int) -> tuple[slice, slice, bool]:
    """Return which own queries see which keys in a turn, and whether that needs a causal mask.

    Each rank has an early and a late chunk of the sequence. In the first turn it attends to its own
    keys. Each later turn has half of all query-key pairs.
    """
    everything = slice(None)
    if turn == 0:
        return everything, everything, True
    if turn <= group.rank():  # keys of a lower rank: only the early chunk is before the queries
        return everything, slice(0, length // 2), False
    return slice(length // 2, None), everything, False  # only late queries are after the keys


def flash_attention_backward(
    tensors: list[torch.Tensor], causal: bool, scale: float | None
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of query, key and value.

    Args:
        tensors: [gradient of the output, query, key, value, output, logsumexp].
    """
    _, query, key, *_ = tensors
    if not query.is_cuda:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return kernel(*tensors, 0.0, causal, scale=scale)  # 0.0: dropout
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_backward
    lengths = query.shape[2], key.shape[2]
    random_state = torch.empty(2, 2, dtype=torch.uint64, device=query.device)  # of dropout
    return kernel(*tensors, None, None, *lengths, 0.0, causal, *random_state, scale=scale)


def train_step(
    model: nn.Module,
    optimizer: Optimizer,
    batch: common.GlobalBatch,
    step: int,
    config: Config,
    device: torch.device,
) -> dict[str, float]:
    """Run one optimizer step; returns the mean loss of the global batch and the gradient norm.

    `model(**part)` returns the cross entropy summed over the target tokens of this rank's part of
    each sequence (`forward_with_loss` in model.py). The root's forward computes it, because only
    there is the head's weight sure to be full.

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
    # NOTE: count all ranks, not CP groups. Each rank has the loss of its own tokens only.
    scale = dist.get_world_size() / batch.num_targets
    total_loss = torch.zeros((), device=device)
    for i, micro_batch in enumerate(batch.micro_batches):
        last = i == len(batch.micro_batches) - 1
        # The setters reach all units in the model.
        # NOTE: with --reduce_every_micro_batch false, a `last` that is one micro-batch early would
        # leave full gradients in FSDP, where `zero_grad` does not reach them. The next step would
        # add them, without an error.
        model.set_requires_gradient_sync(last or config.reduce_every_micro_batch)
        # With --reshard_after_forward false, parameters stay full from the first micro-batch's
        # forward to the last one's backward, so only the first forward gathers them.
        model.set_reshard_after_backward(last or config.reshard_after_forward)
        part = local_micro_batch(micro_batch, config, device)
        loss = model(**part)  # all-gathers, and in attention all-to-alls or the ring's transfers
        (loss * scale).backward()  # as above, and reduce-scatters if gradients sync
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
    for micro_batch in validation.evaluation(*dp_rank_and_size(run.config)):
        micro_batch = local_micro_batch(micro_batch, run.config, run.device)
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
    if config.steps and ranks % config.context_parallel:
        common.refuse(f"--context_parallel {config.context_parallel} does not divide {ranks} ranks")
    dp_rank, dp_size = dp_rank_and_size(config)
    accumulation = micro_batches_per_rank(config, max(1, dp_size))

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
    mesh = f"{common.counted(dp_size, 'CP group')} of {config.context_parallel}"
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
