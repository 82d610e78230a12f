"""Causal-LM pretraining with FSDP2 and expert parallelism: ranks split the experts of each block.

    torchrun --standalone --nproc-per-node=2 fsdp2_ep_pretrain.py

A mixture-of-experts (MoE) model has many feed-forward networks in a block, the experts. A router
sends each token to a few of them.

When to use it: FSDP2 alone all-gathers all experts of a block, although each token uses only a few.
Here each rank of an EP group has some experts, and tokens travel to them. Keep the ranks of a group
inside one node.

FSDP2 shards these experts and all other parameters, and turns them into DTensors. A DTensor is a
tensor that is spread over ranks. Its `shape` is the shape of the full tensor, and `to_local()` is
this rank's part of it, for a parameter its shard.

Memory per rank, with N ranks in groups of E: 1/N of the fp32 parameters, gradients and AdamW
moments, 16/N bytes per parameter. On top come the full parameters of one or two blocks, with only
1/E of their experts, and of the root (last norm, head and a tied embedding), in backward also their
full gradients.

Communication volume inside a block, with A the bytes of [tokens, hidden size] and t experts for
each token: all-to-alls of 4tA(E-1)/E in forward plus backward, or 6tA(E-1)/E with full activation
checkpointing. They are exposed. All ranks wait for the rank whose experts got the most tokens. This
rank also needs the most memory, so the routers have to be balanced.

Communication volume per micro-batch, with P the bytes of all parameters except experts and X the
bytes of a rank's experts, both in compute precision: each block's parameters are all-gathered for
its forward and again for its backward, at most 2P(N-1)/N + 2X(N-E)/N in all, and its fp32 gradients
are reduce-scattered, half as much in fp32 and equally much in bf16. In forward, and when backward
recomputes a block, the CPU waits for the token counts. Before that, a forward issues the
all-gathers of the block's experts and of the next block, so that they overlap with compute. So do
the reduce-scatters.

GShard (arXiv 2006.16668) introduced expert parallelism. It drops the tokens that exceed an expert's
capacity, and so does Switch Transformer (arXiv 2101.03961). Nothing is dropped here, as in
DeepSeek-V3 (arXiv 2412.19437).
"""

import contextlib
import math
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from pydantic import NonNegativeFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
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

NEXT_COMMAND = "torchrun --standalone --nproc-per-node=4 fsdp2_nd_pretrain.py --tensor_parallel 2"


# The shared flags, such as learning rate and batch sizes, are in run.py.
@dataclass
class Config(Flags):
    """The flags of this script, beside the shared ones."""

    model: str = flag(
        "tiny-moe", "tiny-moe, qwen3-30b-a3b, or a directory or hub id with a config.json"
    )
    text_column: str = flag("text", "column of the dataset that holds the text")
    expert_parallel: PositiveInt = flag(2, "ranks that the experts of each block are split over")
    balance_rate: NonNegativeFloat = flag(
        1e-2,
        "how far a step moves the routers' biases to balance the experts, if the model has such "
        "biases (DeepSeek-V3: 0.001, over many more steps)",
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
        # The compiler has to leave out the dispatch of tokens. It cannot do that in a block that
        # is recomputed, and would silently compile nothing.
        if self.compile and self.activation_checkpointing != "none":
            common.refuse("--compile needs --activation_checkpointing none")


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


def moe_layers(module: nn.Module) -> list:
    """Return the MoE layers in `module` whose experts use transformers' ExpertsInterface.

    transformers stores all experts of a layer in one module, as parameters [experts, ...].
    """
    return [
        layer for layer in module.modules() if hasattr(getattr(layer, "experts", None), "has_gate")
    ]


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
            # `grouped_mm` needs strides in multiples of 16 bytes: 8 bf16 numbers (4 fp32).
            if any(size % 8 for size in parameter.shape[1:]):
                shape = list(parameter.shape)
                common.refuse(f"{name}: sizes of experts must be multiples of 8, not {shape}")
        if experts.num_experts % config.expert_parallel:
            common.refuse(
                f"--expert_parallel {config.expert_parallel} does not divide "
                f"{experts.num_experts} experts"
            )


def parallelize(model: nn.Module, config: Config, device: torch.device) -> nn.Module:
    """Split experts over each EP group, shard all parameters, and give the shards initial weights.

    `fully_shard(module)` makes one unit of the module's parameters: they are gathered and freed
    together. Parameters that an earlier call on a submodule has claimed stay in the submodule's
    unit. The call turns the parameters into DTensors, gives the module a class with the methods of
    `FSDPModule`, and adds these hooks:

    - Before forward, one all-gather makes the unit's parameters full. After forward they are freed.
    - Before backward, another all-gather makes them full again. After backward, one reduce-scatter
      leaves each rank the gradient of its shard, here summed over the ranks, and the full tensors
      are freed.

    On GPUs this communication runs on its own streams and overlaps with compute. In forward, each
    block also starts the all-gathers of its experts and of the next block. In backward, the hook
    before a unit's backward also starts the all-gather of the unit whose backward comes next.

    The experts of a block are a unit of their own, which FSDP shards over the ranks that have the
    same experts. All other parameters are sharded over all ranks.
    """
    check_model(model, config)
    blocks = transformer_blocks(model)
    # Recomputation replaces a block's `forward`. The block's FSDP hooks run around it, its experts'
    # hooks inside. A recomputed forward uses the parameters that were gathered for backward. The
    # compiler takes the call of a block, but leaves FSDP's hooks and `dispatch` as they are.
    checkpoint_activations(blocks, config.activation_checkpointing)
    if config.compile:
        compile_blocks(blocks, config)

    # Each row of the mesh is an EP group: consecutive ranks in one node, which split the experts of
    # each block. The ranks of a column have the same experts, and FSDP shards these experts over
    # the column.
    ranks = dist.get_world_size()
    shards = ranks // config.expert_parallel
    mesh = init_device_mesh(
        device.type, (shards, config.expert_parallel), mesh_dim_names=("shard", "expert")
    )
    world = init_device_mesh(device.type, (ranks,))  # of all other parameters
    options = {}
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
    # From the inside out: experts first, then their block, then the root, which gets the rest. With
    # the root alone, one all-gather would bring all parameters at once, and overlap with nothing.
    for block in blocks:
        # One block at a time, so that a rank never holds more than one full block.
        initialize(model, block.modules(), config.seed, device)
        for layer in moe_layers(block):
            split_experts(layer.experts, mesh["expert"])
            fully_shard(
                layer.experts,
                mesh=mesh["shard"],
                shard_placement_fn=partial(choose_dimension, shards),
                reshard_after_forward=config.reshard_after_forward,
                **options,
            )
        fully_shard(
            block, mesh=world, reshard_after_forward=config.reshard_after_forward, **options
        )
    if not model.config.tie_word_embeddings:
        # A tied embedding is the head's weight too, and stays in the root's unit. An untied one can
        # be a unit of its own, which is freed after its forward. Its backward needs no weights, so
        # do not gather them.
        fully_shard(
            model.get_input_embeddings(),
            mesh=world,
            reshard_after_forward=config.reshard_after_forward,
            **options,
        ).set_unshard_in_backward(False)
    # Do not free the root's parameters after forward, because backward begins with the head.
    fully_shard(model, mesh=world, reshard_after_forward=False, **options)
    for i, block in enumerate(blocks):
        # The CPU waits for the GPU in every dispatch, so FSDP would issue the next all-gathers too
        # late to overlap. Issue them when the block begins.
        experts = [layer.experts for layer in moe_layers(block)]
        block.set_modules_to_forward_prefetch([*experts, *blocks[i + 1 : i + 2]])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Sum gradients over the ranks instead of averaging them, see `train_step`. Without the
            # second call FSDP would reduce with PREMUL_SUM, which gloo does not have.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def split_experts(experts: nn.Module, mesh: DeviceMesh) -> None:
    """Keep this rank's slice of a layer's experts, and replace their forward by `dispatch`."""
    for name, parameter in list(experts.named_parameters()):
        # A DTensor whose shards are slices of the experts. Every rank has initialized the same
        # experts, so each can slice its own without a collective.
        own = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None)
        experts.register_parameter(name, nn.Parameter(own))
    experts.forward = partial(dispatch, experts, mesh.get_group())


def choose_dimension(shards: int, parameter: nn.Parameter) -> Shard:
    """Choose the dimension along which FSDP shards a rank's experts, [own experts, rows, columns].

    Choose rows if only they divide evenly, because FSDP would pad uneven shards of experts.
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
    """Replace the experts' forward: send tokens to their experts' ranks, and outputs back.

    The layer cannot tell which tokens are padding, so it sends these, too.

    Args:
        group: the EP group. Its first rank has the first experts, and so on.
        hidden: [tokens, hidden size] of this rank's micro-batch.
        chosen: int64 [tokens, t], the experts of each token.
        weights: [tokens, t], the router's weights for the experts' outputs.
    """
    # A row is one token for one expert. Sorted by expert, rows are also sorted by rank.
    expert_of_row = chosen.flatten()  # [tokens x t]
    order = expert_of_row.argsort(stable=True)
    rows = hidden[order // chosen.shape[1]]  # [tokens x t, hidden size]
    counts, sent, received = exchange_counts(expert_of_row, experts.num_experts, group)
    # An all-to-all. Its backward is another one, which returns the gradients.
    rows = all_to_all_single_autograd(rows, received, sent, group)  # [received, hidden size]

    # Rows arrive sorted by rank, then by expert. The matmuls need them sorted by expert alone.
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
    """Exchange by an all-to-all how many rows each rank will get for each of its experts.

    Returns:
        The numbers of rows to receive, int64 [ranks, own experts]; to send to each rank; to receive
        from each rank.
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


@contextlib.contextmanager
def counting_experts(
    layers: list[nn.Module], labels: torch.Tensor, counts: torch.Tensor
) -> Iterator[None]:
    """Add to `counts` [layers, experts] how many target tokens of a forward choose each expert.

    The hooks exist during this forward only, because activation checkpointing recomputes blocks in
    backward, which would count everything twice.
    """
    is_target = (labels.flatten() != common.IGNORED).long()

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
    The router adds the bias to its scores only to choose experts. So it adds nothing to the
    gradients, unlike an auxiliary loss (DeepSeek, arXiv 2408.15664). Routers without such a bias
    stay as they are.

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


def train_step(
    model: nn.Module,
    optimizer: Optimizer,
    batch: common.GlobalBatch,
    step: int,
    config: Config,
    device: torch.device,
) -> dict[str, float]:
    """Run one optimizer step; returns its mean loss, gradient norm and expert load.

    `model(**micro_batch)` returns the cross entropy summed over the micro-batch's target tokens
    (`forward_with_loss` in model.py). The root's forward computes it, because only there is the
    head's weight sure to be full. It takes the target tokens in chunks, so that the full logits
    never exist at once, and sums in fp32.

    FSDP reduce-scatters the gradients of every micro-batch, overlapped with its backward, so a rank
    accumulates only its shards. With `--reduce_every_micro_batch false` FSDP accumulates full
    gradients in fp32 (of 1/E of the experts), and reduce-scatters them once, on the last
    micro-batch. That saves communication but needs memory for all these gradients.
    """
    layers = moe_layers(model)
    num_experts = layers[0].experts.num_experts
    # How many target tokens of this rank choose each expert.
    counts = torch.zeros(len(layers), num_experts, dtype=torch.int64, device=device)
    # The loss of a step is the sum over all target tokens, divided by their number in the global
    # batch, which every rank counts by itself. A mean of micro-batch means would give tokens of
    # small micro-batches more weight.
    # NOTE: here FSDP adds gradients over ranks and does not average them. An expert's gradient
    # already covers the tokens of its EP group, so FSDP adds N/E gradients for experts, and N for
    # the other parameters. Averages would weight experts E times too much. AdamW hides that, but
    # the norm does not.
    scale = 1 / batch.num_targets
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
        micro_batch = common.to_device(micro_batch, device)
        with counting_experts(layers, micro_batch["labels"], counts):
            loss = model(**micro_batch)  # all-gathers, and all-to-alls of tokens
        (loss * scale).backward()  # as above, and reduce-scatters if gradients sync
        total_loss += loss.detach()
    dist.all_reduce(total_loss)
    dist.all_reduce(counts)  # of all ranks

    # DTensors on different meshes cannot be combined. But each element of a gradient is on exactly
    # one rank, so the squares of all local elements add up to the squared norm.
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    gradients = [parameter.grad.to_local() for parameter in parameters]
    squared_norm = nn.utils.get_total_norm(gradients) ** 2
    dist.all_reduce(squared_norm)
    norm = squared_norm.sqrt()
    factor = ((config.grad_clip or math.inf) / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient *= factor

    # `.item()` waits for the GPU. Do it here, not after the update, because non-finite values must
    # not reach the weights.
    measured = {"loss": total_loss.item() / batch.num_targets, "grad_norm": norm.item()}
    refuse_non_finite(step, **measured)
    # Update the routers' biases, which have no gradients.
    measured["expert_load"] = balance_experts(layers, counts, config.balance_rate)
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
    if config.steps and ranks % config.expert_parallel:
        common.refuse(f"--expert_parallel {config.expert_parallel} does not divide {ranks} ranks")
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
    mesh = f"{ranks // config.expert_parallel} EP groups of {config.expert_parallel}"
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
