"""LoRA fine-tuning with FSDP2: train small adapters beside the linear layers of a frozen model.

    torchrun --standalone --nproc-per-node=2 fsdp2_lora.py --init_from runs/fsdp2_pretrain

When to use it: fine-tuning all parameters needs too much memory, or you want a small file per task
beside one base model.

A linear layer with the frozen weight W computes W x + alpha / rank * B A x. Only the thin matrices
A and B are trained. B starts at zero, so training starts from the base model. Frozen parameters get
no gradient, so FSDP2 only all-gathers them, and they need no optimizer state and no fp32 copy. With
--base_precision nf4 the layers that have adapters are kept and all-gathered in 4 bits per weight
(QLoRA).

FSDP2 shards the model: `fully_shard` turns each parameter into a DTensor, a tensor that is spread
over ranks. Its `shape` is the shape of the full tensor, and `to_local()` is this rank's part of it,
for a parameter its shard. FSDP2 shards each parameter along dimension 0.

Memory per rank at rest is (w n₁ + 2 n₂ + 16 a) / N, with N ranks, n₁ base parameters in adapted
layers (w bytes each: 4, 2 in bf16, 0.53 in NF4), n₂ other base parameters (2 bytes each, 4 in fp32)
and a parameters of adapters. Full fine-tuning needs 16 (n₁ + n₂) / N. On top come the full
parameters of one or two blocks and of the root (last norm, head and a tied embedding).

Communication volume of a step with k micro-batches: (2k P + 4a)(N-1)/N, with P the bytes of base
and adapters in an all-gather. Each micro-batch gathers them twice, because the gradients of
activations need the frozen weights, too, so prefer few large micro-batches. (The embedding, the
last norm and the head are gathered once.) Only the gradients of the adapters are reduced.

NOTE: `mfu` in metrics.jsonl counts FLOPs as if all parameters were trained. A frozen matrix needs
two thirds of them.

LoRA is described in arXiv 2106.09685, NF4 in arXiv 2305.14314, ZeRO-3 in arXiv 1910.02054.
"""

import math
import os
import re
import time
from collections import Counter
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import empty as empty_dtensor
from torch.optim import AdamW, Optimizer

import common
import conversations
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

NEXT_COMMAND = "torchrun --standalone --nproc-per-node=2 fsdp2_grpo.py --init_from {run_dir}"


# The shared flags, such as learning rate and batch sizes, are in run.py.
@dataclass
class Config(Flags):
    """The flags of this script, beside the shared ones."""

    rank: PositiveInt = flag(16, "rank of the adapters")
    alpha: PositiveFloat = flag(32.0, "the adapters' output is scaled by alpha / rank")
    target: list[str] | None = flag(
        None,
        "names of the linear layers to adapt, such as q_proj v_proj; default: all in the blocks",
    )
    base_precision: Literal["auto", "fp32", "bf16", "nf4"] = flag(
        "auto",
        "format of the base. auto: as --precision. nf4: adapted layers in 4 bits, the rest bf16",
    )
    dataset: str | list[str] = flag(
        "stdlib-docstrings",
        "stdlib-docstrings, a hub id, or .parquet or .jsonl files, globs, folders or URLs",
    )
    chat_template: Literal["own", "collection"] = flag(
        "own",
        "own: the tokenizer's, or this collection's if it has none. collection: this "
        "collection's, also in place of the tokenizer's",
    )
    max_length: PositiveInt = flag(
        2048, "longest sequence in tokens; longer conversations are truncated"
    )
    micro_batch_tokens: PositiveInt = flag(
        4096, "token positions of one forward pass of one rank, padding included"
    )
    global_batch_tokens: PositiveInt = flag(
        8192, "token positions of one optimizer step, over all ranks and micro-batches"
    )
    eval_tokens: PositiveInt = flag(
        500_000, "size of the validation set in tokens (whole conversations, the first by hash)"
    )
    steps: NonNegativeInt = flag(
        100, "optimizer steps of the whole run; 0 prepares the data and exits"
    )
    learning_rate: PositiveFloat | None = flag(
        None,
        "peak learning rate of AdamW. The default depends on the model: 1e-2 with fewer than 10 "
        "million parameters, otherwise 2e-4",
    )
    min_learning_rate: NonNegativeFloat | None = flag(
        None, "learning rate at the end of the decay; default: a tenth of the peak"
    )
    weight_decay: NonNegativeFloat = flag(0.0, "weight decay of the adapters")
    reshard_after_forward: bool = flag(
        True, "free a block's full parameters after forward and all-gather them for backward"
    )
    dp_replicate: PositiveInt = flag(1, "replicas of the sharded model (HSDP)")
    cpu_offload: bool = flag(False, "keep parameters, gradients and optimizer state in CPU memory")
    reduce_every_micro_batch: bool = flag(
        False,
        "reduce-scatter in every micro-batch, not once per step: less memory, more communication",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.base_precision == "auto":
            self.base_precision = self.precision


# --- Conversations --------------------------------------------------------------------------------


def tokenize_conversation(row: dict, tokenizer: common.Tokenizer) -> tuple:
    """Tokenize a conversation; returns the values of `common.tokenize_text`, and its note or "".

    Conversations with the same messages before the first answer go to the same side of the split.
    Otherwise a prompt with several answers could be on both.

    Raises:
        LeftOut: why the conversation is left out.
    """
    messages, start = conversations.read_conversation(row)
    tools = conversations.read_tools(row)
    roles = [message["role"] for message in messages]
    if "assistant" not in roles[start:]:
        raise common.LeftOut(
            "hold no answer: no message of the assistant, and no column completion"
        )
    conversations.refuse_special_tokens(tokenizer, messages, tools)
    text, spans, note = conversations.find_answers(tokenizer, messages, start, tools)
    tokens, in_loss = encode(tokenizer, text, spans)
    before_answers = messages[: roles.index("assistant")]
    return tokens, in_loss, before_answers, 0, note


def encode(
    tokenizer: common.Tokenizer, text: str, spans: list[tuple[int, int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of a conversation, and whether each is in the loss.

    A token is in the loss if it overlaps an answer. `spans` are the answers, in characters. Labels
    are shifted later, when `common.Batches.collate` builds a micro-batch.
    """
    encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    starts, ends = np.array(encoding.offsets).T  # in characters
    # Some tokenizers skip blanks, so extend each token back to the end of the one before it.
    starts = np.minimum(starts, np.roll(ends, 1))
    in_loss = np.zeros(len(encoding.ids), bool)
    for begin, end in spans:
        in_loss |= (starts < ends) & (starts < end) & (ends > begin)
    return np.array(encoding.ids, np.uint32), in_loss


# --- Adapters -------------------------------------------------------------------------------------

A, B = ".lora_A.weight", ".lora_B.weight"  # how the names of an adapter's parameters end


class LoraLinear(nn.Linear):
    """A frozen linear layer plus the product of two thin trained matrices: W x + b + scale B A x.

    W and b keep their names, so the base's files load as they are. A and B have PEFT's names
    without its prefix.
    """

    def __init__(self, base: nn.Linear, config: Config):
        super().__init__(base.in_features, base.out_features, bias=False)
        self.weight = base.weight
        self.bias = base.bias
        self.lora_A = nn.Linear(base.in_features, config.rank, bias=False)
        self.lora_B = nn.Linear(config.rank, base.out_features, bias=False)
        self.scale = config.alpha / config.rank
        # Weights that share a scale must be in one row, because FSDP shards rows.
        self.is_quantized = config.base_precision == "nf4" and base.in_features % BLOCK == 0

    def start(self) -> None:
        """Draw A as PEFT does and set B to zero, so that the layer starts as the base layer.

        In NF4, also replace the weight by its codes.
        """
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)
        if self.is_quantized:
            self.weight = nn.Parameter(quantize(self.weight), requires_grad=False)
            self.register_buffer("values", nf4_values(self.weight.device), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.is_quantized:
            values = self.values.to(inputs.dtype)
            outputs = QuantizedLinear.apply(inputs, self.weight, self.bias, values)
        else:
            outputs = super().forward(inputs)
        return outputs + self.lora_B(self.scale * self.lora_A(inputs))  # scale the thin result


# The model uses these layers' weights without calling the layers, so adapters would get no
# gradient: Mamba's dt_proj, LongCat's router. PEFT rejects out_proj of Mamba's mixer.
UNUSUAL = r"dt_proj|classifier|mixer\.out_proj"
# In an MoE model, PEFT treats layers with these names as stacked experts. It would not load the
# adapters of dense layers and shared experts.
EXPERTS = "gate|gate_proj|up_proj|down_proj|w1|w2|w3"


def add_adapters(model: nn.Module, config: Config) -> None:
    """Add adapters to the blocks' linear layers and freeze the rest. Says what it adapts.

    Only plain nn.Linear layers are adapted, not stacked experts of MoE models or GPT-2's Conv1D. It
    skips subclasses (their forward may do more), layers of `freeze_unused`, and the names above.
    """
    blocks = transformer_blocks(model)
    left_out = UNUSUAL
    if any(".experts." in name for name, _ in blocks.named_parameters()):
        left_out += "|" + EXPERTS
    layers = {
        name: module
        for name, module in blocks.named_modules()
        if type(module) is nn.Linear
        and module.weight.requires_grad
        and not re.search(rf"\.({left_out})$", name)
    }
    kinds = {name.rpartition(".")[2] for name in layers}
    targets = set(config.target or kinds or ["all"])
    if targets - kinds:
        common.refuse(
            f"--target {min(targets - kinds)}: the blocks of this model have no such layer to "
            f"adapt, but {' '.join(sorted(kinds)) or 'none'}"
        )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        # NOTE: not model.bfloat16(), which would round buffers, too, such as rotary frequencies.
        if config.base_precision != "fp32":
            parameter.data = parameter.data.bfloat16()
    adapted = Counter()
    for name, module in layers.items():
        kind = name.rpartition(".")[2]
        if kind in targets:
            layer = LoraLinear(module, config)
            blocks.set_submodule(name, layer)
            adapted[f"{kind} in nf4" if layer.is_quantized else kind] += 1
    numbers = ", ".join(f"{number} {kind}" for kind, number in adapted.items())
    common.say(
        f"adapters of rank {config.rank} on {numbers}: "
        f"{model.num_parameters(only_trainable=True):,} trained parameters"
    )


def adapters_of(model: nn.Module) -> nn.Module:
    """Return a module that holds only the trained parameters of `model`, under the same names.

    (`ignore_frozen_params` of torch's state dicts would leave a tied head in a checkpoint.)

    NOTE: call it while the parameters are sharded, because it keeps the shards.
    """
    adapters = nn.Module()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            *path, last = name.split(".")
            module = adapters
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = getattr(module, part)
            module.register_parameter(last, parameter)
    return adapters


# --- The base in 4 bits ---------------------------------------------------------------------------

# NF4, in plain PyTorch to show how it works. (bitsandbytes and torchao bring layers or tensor
# classes of their own.) Its 16 values are quantiles of a normal distribution, scaled to [-1, 1].
NF4 = [
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
]
# Weights that share a scale: 32 bytes of codes, and 2 of the scale. Quantizing the scales too, as
# QLoRA does, would save another 0.12 of these 4.25 bits per weight.
BLOCK = 64


def nf4_values(device: torch.device) -> torch.Tensor:
    """Return the values that the codes 0 to 15 stand for, fp32."""
    return torch.tensor(NF4).to(device)


def quantize(weight: torch.Tensor) -> torch.Tensor:
    """Return the NF4 codes and scales of a matrix, uint8 [rows, columns / 64 * 34]."""
    blocks = weight.float().unflatten(1, (-1, BLOCK))
    scales = blocks.abs().amax(2, keepdim=True).clamp(min=1e-30).bfloat16()
    values = nf4_values(weight.device)
    # The code of the nearest value: the number of midpoints below a weight.
    codes = torch.bucketize(blocks / scales, (values[1:] + values[:-1]) / 2).to(torch.uint8)
    pairs = codes[..., ::2] << 4 | codes[..., 1::2]
    return torch.cat([pairs, scales.view(torch.uint8)], dim=2).flatten(1)


def dequantize(codes: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the matrix that codes stand for, in the dtype of `values`, see `nf4_values`."""
    pairs, scales = codes.unflatten(1, (-1, BLOCK // 2 + 2)).split([BLOCK // 2, 2], dim=2)
    values = torch.cartesian_prod(values, values)  # of each byte, [256, 2]
    weight = nn.functional.embedding(pairs.int(), values).flatten(2)  # [rows, blocks, 64]
    return (weight * scales.contiguous().view(torch.bfloat16)).flatten(1)


class QuantizedLinear(torch.autograd.Function):
    """A frozen linear layer in NF4. Backward dequantizes again, instead of keeping the matrix."""

    @staticmethod
    def forward(ctx, inputs, codes, bias, values):
        ctx.save_for_backward(codes, values)
        return nn.functional.linear(inputs, dequantize(codes, values), bias)

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ dequantize(*ctx.saved_tensors), None, None, None


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

    Frozen and trained parameters of a block form one unit. Their dtypes may differ, but all trained
    parameters need the same dtype. Only trained parameters have gradients to reduce-scatter.
    """
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
    # Parameters are cast to one dtype before they are gathered, so blocks compute in it, whatever
    # the base's dtype. (FSDP casts no integers, so NF4 codes stay as they are.) The shards of the
    # adapters and the optimizer state stay fp32, and gradients are reduced in fp32. FSDP would also
    # cast the inputs of each unit. Leave them, because some types (OLMo 2) pass rotary embeddings
    # in fp32 on purpose.
    options = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=torch.float32 if config.precision == "fp32" else torch.bfloat16,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        ),
    }
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
        for module in block.modules():
            if isinstance(module, LoraLinear):
                module.start()  # the block's name has seeded the random numbers
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


@torch.no_grad()
def load_weights(model: nn.Module, directory: str) -> None:
    """Load the base from --init_from. For NF4, each rank reads and quantizes only its own rows.

    So loading needs no full unquantized matrix, and quantizing no collective.
    """
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    quantized = {
        f"{name}.weight": module
        for name, module in model.named_modules()
        if isinstance(module, LoraLinear) and module.is_quantized
    }
    common.load_weights(model, directory, skip=[*trained, *quantized])
    reader = dcp.HuggingFaceStorageReader(directory)
    for name, module in quantized.items():
        codes = module.weight
        rows = empty_dtensor(
            module.out_features,
            module.in_features,
            device_mesh=codes.device_mesh,
            placements=codes.placements,
        )
        with common.refusing(f"--init_from {directory}"):
            dcp.load({name: rows}, storage_reader=reader)
        codes.to_local().copy_(quantize(rows.to_local()))


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

    A rank accumulates full gradients of the adapters, which are small, and FSDP reduce-scatters
    them once, on the last micro-batch. With `--reduce_every_micro_batch true` FSDP reduce-scatters
    them in every micro-batch, so a rank accumulates only its shards.
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


# --- Files of a run -------------------------------------------------------------------------------


def write_adapter(run: Run, adapters: dict) -> None:
    """Write adapter/, the adapters and the tokenizer as PEFT and AutoTokenizer load them."""
    temporary = run.directory / ".adapter.tmp"
    with common.refusing(f"cannot write {temporary} ({run.checkpoints.newest} is complete)"):
        common.save_tokenizer(run.tokenizer, temporary)
        description = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            # In the hub's cache: .../models--OWNER--NAME/snapshots/COMMIT
            "base_model_name_or_path": re.sub(
                "^.*/models--(.+?)--(.+?)/.*", r"\1/\2", run.config.init_from
            ),
            "r": run.config.rank,
            "lora_alpha": run.config.alpha,
            # Full names, so that PEFT adapts exactly these layers. Short names (q_proj), or
            # "all-linear", could match others.
            "target_modules": [name[: -len(A)] for name in adapters if name.endswith(A)],
        }
        common.write_json(temporary / "adapter_config.json", description)
        in_peft = {f"base_model.model.{name}": tensor for name, tensor in adapters.items()}
        save_file(in_peft, temporary / "adapter_model.safetensors", metadata={"format": "pt"})
        temporary.rename(run.directory / "adapter")
    common.say(f"files: {run.directory}/adapter for PEFT")


def read_merged(config: Config, adapters: dict, checkpoint: Path, state_dict: dict) -> None:
    """Fill the tensors of hf/ from the base, and merge the adapters into them.

    `common.export` calls this once for each file of weights, in place of `common.read_checkpoint`.
    """
    tensors = state_dict["model"]
    dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(config.init_from))
    for name, weight in tensors.items():
        layer = name.removesuffix(".weight")
        if layer + A in adapters:
            merged = weight.float()
            # NOTE: merge into the dequantized weights. The adapters were trained on these, and also
            # correct their quantization error, which the original weights lack.
            if config.base_precision == "nf4" and weight.shape[1] % BLOCK == 0:
                merged = dequantize(quantize(merged), nf4_values(weight.device))
            product = adapters[layer + B] @ adapters[layer + A]
            weight.copy_(merged + product * (config.alpha / config.rank))


# --- Main -----------------------------------------------------------------------------------------


def main() -> partial | None:
    config = parse_config(Config)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if config.steps and ranks % config.dp_replicate:
        common.refuse(f"--dp_replicate {config.dp_replicate} does not divide {ranks} ranks")
    accumulation = micro_batches_per_rank(config, ranks)
    if config.init_from is None:
        common.refuse("--init_from is missing: name the pretrained model to adapt")
    if Path(config.init_from, "adapter_config.json").exists():
        common.refuse(f"--init_from {config.init_from} holds adapters; use their base")

    # Tokenizing can take longer than the timeout of collectives, so do it before they begin.
    tokenizer, turn_end, known_ids = conversations.chat_tokenizer(config, "text")
    documents = common.load_documents(
        config,
        conversations.COLUMNS,
        tokenize_conversation,
        tokenizer,
        conversations.CORPORA,
    )
    # Split before truncating, so that the split does not depend on --max_length.
    training, validation = (
        conversations.ConversationBatches(
            conversations.truncate(part, config.max_length), config, tokenizer.eos_token_id
        )
        for part in common.train_validation_split(documents, config.eval_tokens)
    )
    generation = conversations.base_generation(config, tokenizer, turn_end)
    model_config = build_config(config, known_ids, generation.eos_token_id)
    if config.steps == 0:
        return common.say("the data is prepared; python tools/rows.py FILE shows what is trained")

    device = init_process_group(config)
    model = build_model(model_config, config)
    with torch.device("meta"):
        add_adapters(model, config)
    model.generation_config = generation
    # Count parameters and FLOPs before the model is sharded.
    default = 1e-2 if model.num_parameters() < 10_000_000 else 2e-4
    set_learning_rates(config, default, ratio=10)  # a high rate ruins pretrained weights
    run = Run(config, model, count_flops(model), tokenizer, documents, device)
    plan = [*common.PLAN, "base_precision", "rank", "alpha", "target"]
    # Check whether this run may start before the model takes memory and time.
    checkpoints = common.Checkpoints(config, run.directory, run.facts, run.save_files, device)
    checkpoint, progress = checkpoints.find(config.resume, plan)
    model = parallelize(model, config, device)
    optimizer = build_optimizer(model, config)
    load_weights(model, config.init_from)
    adapters = adapters_of(model)  # all that a checkpoint holds
    if checkpoint:
        common.load_checkpoint(checkpoint, adapters, optimizer)
    mesh = f"{config.dp_replicate} x {ranks // config.dp_replicate} shards"
    micro_batches = common.counted(accumulation, "micro-batch", "es")
    work = f"{micro_batches} per rank and step, {config.global_batch_tokens:,} tokens"
    run.begin(checkpoints, progress, mesh, work)
    if rank == 0:
        common.remove(run.directory / "adapter")  # of fewer steps

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
            checkpoints.save(adapters, optimizer, run.position(step, tokens))
    checkpoints.wait()
    # One all-gather per adapter matrix. They go to adapter/ and, merged, to hf/.
    trained = {name: p.full_tensor().detach().cpu() for name, p in adapters.named_parameters()}
    finished = step >= config.steps and not run.unvalidated
    if rank == 0 and finished and config.checkpoint_every:
        write_adapter(run, trained)
    read = partial(read_merged, config, trained)
    # `launch` calls it once the model is gone and the ranks have left the process group.
    return partial(run.finish, step, NEXT_COMMAND, read)


if __name__ == "__main__":
    launch(main)
