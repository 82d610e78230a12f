"""LoRA fine-tuning with FSDP2: fsdp2_sft.py with a frozen base and small trained adapters.

    torchrun --standalone --nproc-per-node=2 fsdp2_lora.py --init_from runs/fsdp2_pretrain

When to use it: fsdp2_sft.py needs too much memory, or you want a small file per task beside one
base. Read fsdp2_sft.py before it. `diff fsdp2_sft.py fsdp2_lora.py` shows what LoRA changes: the
section Adapters, in which precision the base is kept and sharded, what a checkpoint holds, what a
run writes at its end, and a chat format without new tokens.

A linear layer with the frozen weight W computes W x + alpha / rank * B A x. Only the thin matrices
A and B are trained. B starts at zero, so training starts from the base model. FSDP shards frozen
and trained parameters in the same groups, but frozen ones get no gradient. So they are not
reduce-scattered, and they need no optimizer state and no fp32 copy. With --base_precision nf4 the
layers that have adapters are kept and all-gathered in 4 bits per weight (QLoRA).

Memory per rank at rest is (w n₁ + 2 n₂ + 16 a) / N, with N ranks, n₁ parameters of the base in the
layers with adapters (w bytes each: 4, 2 in bf16, 0.53 in NF4), n₂ other ones (2 bytes each, 4 in
fp32) and a of the adapters. fsdp2_sft.py needs 16 (n₁ + n₂) / N. Like there, the unsharded
parameters of the block that computes come on top.

Communication volume of a step with k micro-batches: (2k P + 4a)(N-1)/N, with P the bytes of base
and adapters as they are all-gathered. That is twice per micro-batch, because the gradients of
activations need the frozen weights too. (The root is gathered once.) Only the gradients of the
adapters are reduced, so prefer few large micro-batches.

NOTE: `mfu` in metrics.jsonl counts FLOPs as if all parameters were trained. A frozen matrix needs
two thirds of them.

LoRA is described in arXiv 2106.09685, NF4 in arXiv 2305.14314, ZeRO-3 in arXiv 1910.02054.
"""

import contextlib
import copy
import gc
import math
import os
import re
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import empty as empty_dtensor
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
)

import chat
import common
from common import flag

# --- Config ---------------------------------------------------------------------------------------

NEXT_COMMAND = "torchrun --standalone --nproc-per-node=2 fsdp2_grpo.py --init_from {run_dir}"
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
        "the base model: a run directory, or a Hugging Face directory or hub id. Its model and "
        "tokenizer replace --model and --tokenizer unless you set these",
    )

    # adapters
    rank: PositiveInt = flag(16, "rank of the adapters")
    alpha: PositiveFloat = flag(32.0, "the adapters' output is scaled by alpha / rank")
    target: list[str] | None = flag(
        None,
        "names of the linear layers to adapt, such as q_proj v_proj; default: all in the blocks",
    )
    base_precision: Literal["auto", "fp32", "bf16", "nf4"] = flag(
        "auto",
        "how the base is kept; auto: as --precision; nf4: adapted layers in 4 bits, the rest bf16",
    )

    # data
    dataset: str = flag(
        "stdlib-docstrings",
        "stdlib-docstrings, a hub id, or a file, glob or URL of .parquet or .jsonl",
    )
    chat_template: Literal["own", "collection"] = flag(
        "own",
        "own: that of the tokenizer, or ours if it has none. collection: ours, also in place of "
        "the tokenizer's",
    )
    max_length: PositiveInt = flag(
        2048, "longest sequence in tokens; longer conversations are truncated"
    )
    micro_batch_tokens: PositiveInt = flag(
        4096, "token positions, padding included, of one forward pass on one rank"
    )

    # optimization
    steps: NonNegativeInt = flag(
        100, "optimizer steps of the whole run; 0 prepares the data and exits"
    )
    global_batch_tokens: PositiveInt = flag(
        8192, "token positions of one optimizer step, over all ranks and micro-batches"
    )
    learning_rate: PositiveFloat | None = flag(
        None,
        "peak learning rate of AdamW. The default depends on the model: 1e-2 with fewer than 10 "
        "million parameters, otherwise 2e-4",
    )
    min_learning_rate: NonNegativeFloat | None = flag(
        None, "learning rate at the end of the cosine decay; default: a tenth of the peak"
    )
    warmup_steps: NonNegativeInt = flag(20, "steps of linear warm-up")
    decay_steps: PositiveInt | None = flag(
        None, "decay over the last N steps only (warmup-stable-decay); default: after the warm-up"
    )
    weight_decay: NonNegativeFloat = flag(0.0, "weight decay of the adapters")
    grad_clip: NonNegativeFloat = flag(1.0, "clip the gradient norm to this; 0 disables clipping")
    eval_every: PositiveInt = flag(200, "steps between validations")
    eval_tokens: PositiveInt = flag(
        500_000, "size of the validation set in tokens (whole conversations, the first by hash)"
    )

    # precision, memory and speed
    precision: Literal["auto", "fp32", "bf16"] = flag(
        "auto", "compute precision; auto: bf16 on GPUs that have it, otherwise fp32"
    )
    activation_checkpointing: Annotated[str, Field(pattern=r"^(none|full|selective|0?\.\d+)$")] = (
        flag("none", "none, full, selective, or a fraction of the blocks such as 0.5")
    )
    compile: bool = flag(False, "compile each transformer block")

    # this strategy
    reshard_after_forward: bool = flag(
        True, "free a block's unsharded parameters after forward and all-gather them for backward"
    )
    dp_replicate: PositiveInt = flag(1, "replicas of the sharded model (HSDP)")
    cpu_offload: bool = flag(False, "keep parameters, gradients and optimizer state in CPU memory")
    reduce_every_micro_batch: bool = flag(
        False,
        "reduce-scatter gradients in every micro-batch, not once per step: less memory, more sent",
    )

    def __post_init__(self) -> None:
        """Check how flags fit together. The limits of a single flag are in its type."""
        super().__post_init__()
        if self.precision == "auto":
            # GPUs before Ampere only emulate bf16.
            bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported(False)
            self.precision = "bf16" if bf16 else "fp32"
        if self.base_precision == "auto":
            self.base_precision = self.precision
        world_size = int(os.environ.get("WORLD_SIZE", 1))
        if self.steps and world_size % self.dp_replicate:
            raise ValueError(
                f"--dp_replicate {self.dp_replicate} does not divide {world_size} ranks"
            )
        common.check_global_batch(self, world_size)


# --- Conversations --------------------------------------------------------------------------------

# The collection's chat format without new tokens. Their embeddings would be frozen as they are. So
# the marks are plain text, and an answer ends with the tokenizer's own end-of-text token.
TEMPLATE = chat.TEMPLATE.replace("'<|im_end|>' -}}{%- endgen", "eos_token -}}{%- endgen")


def chat_tokenizer(config: Config) -> tuple[common.Tokenizer, int]:
    """Load the tokenizer of a chat model as it is; also returns the first id that is free.

    One without a chat template (or with --chat_template collection) gets `TEMPLATE`. The attribute
    `turn_end` is the id that ends an answer.
    """
    name = config.tokenizer
    tokenizer = copy.deepcopy(common.load_tokenizer(name))
    known_ids = 1 + max(tokenizer.get_vocab().values())  # some tokenizers skip ids
    tokenizer.split_special_tokens = False  # parse the template's tokens as tokens
    if config.chat_template == "collection" or not tokenizer.chat_template:
        tokenizer.chat_template = TEMPLATE
        if tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]:  # it starts each text so
            tokenizer.chat_template = "{{- bos_token -}}" + TEMPLATE
    with common.refusing(f"--tokenizer {name}: its chat template fails (see --chat_template)"):
        chat.tag_answers(tokenizer)
        ids, in_loss = encode(tokenizer, chat.SAMPLE, start=2)
    # An answer ends with the last token in the loss that is not blank.
    added = tokenizer.added_tokens_decoder
    *_, tokenizer.turn_end = [i for i in ids[in_loss].tolist() if tokenizer.decode([i]).strip()]
    if tokenizer.turn_end not in added:
        common.refuse(
            f"--tokenizer {name}: in its chat template no single token ends an answer, so a model "
            "would not learn to stop; --chat_template collection has one"
        )
    return tokenizer, known_ids


def encode(
    tokenizer: common.Tokenizer, messages: chat.Messages, start: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of a conversation, and whether each is in the loss.

    The loss covers the answers after the messages before `start`. A token is in the loss if it
    overlaps an answer. (Transformers' own mask loses the last bytes of a character that is several
    tokens.)
    """
    text, spans = chat.find_answers(tokenizer, messages, start)
    encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    starts, ends = np.array(encoding.offsets).T  # in characters
    starts = np.minimum(starts, np.roll(ends, 1))  # some tokenizers skip blanks between tokens
    in_loss = np.zeros(len(encoding.ids), bool)
    for begin, end in spans:
        in_loss |= (starts < ends) & (starts < end) & (ends > begin)
    return np.array(encoding.ids, np.uint32), in_loss


def tokenize_conversation(row: dict, tokenizer: common.Tokenizer) -> tuple:
    """Tokenize a conversation, as `common.tokenize_text` does with a text.

    What comes before the first answer decides on which side of the split a conversation is.
    Otherwise a prompt with several answers would be on both.

    Raises:
        ValueError: why the conversation is left out.
    """
    messages, start = chat.read_conversation(row)
    roles = [message["role"] for message in messages]
    if "assistant" not in roles[start:]:
        raise ValueError("hold no answer: no message of the assistant, and no column completion")
    chat.refuse_special_tokens(tokenizer, messages)
    for mark in chat.TURN:  # in `TEMPLATE` they may be plain text
        if mark in tokenizer.chat_template and mark in str(messages):
            raise ValueError("spell out a mark of turns")
    prompt = messages[: roles.index("assistant")]
    return *encode(tokenizer, messages, start), prompt, 0


def truncate(documents: common.Sequences, max_length: int) -> common.Sequences:
    """Return the first `max_length` predictions of each conversation that keep a target token."""
    index = documents.index.copy()
    index.lengths = np.minimum(index.lengths, max_length)
    cut = np.flatnonzero(documents.lengths > max_length)
    found = common.Sequences(documents.documents, index)
    for i in cut.tolist():
        index.num_targets[i] = found.read(i)[1][1:].sum()
    kept = index[index.num_targets > 0]
    common.say(
        f"{len(cut):,} of {len(index):,} conversations are cut to {max_length:,} tokens; "
        f"{len(index) - len(kept):,} of these are left out, because no target token remains"
    )
    if len(kept) == 0:
        common.refuse(f"--max_length {max_length} cuts off every answer; use a larger one")
    return common.Sequences(documents.documents, kept)


class ConversationBatches(common.Batches):
    """Batches that also say which positions have a target. A GPU would need a sync to find out."""

    def collate(self, indices: np.ndarray) -> dict:
        """Add to `common.Batches.collate` target_positions, int64 [targets], of all sequences."""
        micro_batch = super().collate(indices)
        is_target = micro_batch["labels"].flatten() != common.IGNORED
        return micro_batch | {"target_positions": is_target.nonzero().flatten()}


# --- Adapters -------------------------------------------------------------------------------------

# A checkpoint lacks the base, so a resumed run has to have the same one, and the same adapters.
common.PLAN += ["base", "base_precision", "rank", "alpha", "target"]
A, B = ".lora_A.weight", ".lora_B.weight"  # how the names of an adapter's parameters end


class LoraLinear(nn.Linear):
    """A frozen linear layer plus the product of two thin trained matrices: W x + b + scale B A x.

    W and b keep their names, so the files of the base fit as they are, and the names of A and B are
    PEFT's but for a prefix.
    """

    def __init__(self, base: nn.Linear, config: Config):
        super().__init__(base.in_features, base.out_features, bias=False)
        self.weight = base.weight
        self.bias = base.bias
        self.lora_A = nn.Linear(base.in_features, config.rank, bias=False)
        self.lora_B = nn.Linear(config.rank, base.out_features, bias=False)
        self.scale = config.alpha / config.rank
        # A block of codes lies within a row, so that rows can be sharded.
        self.is_quantized = config.base_precision == "nf4" and base.in_features % BLOCK == 0

    def start(self) -> None:
        """Draw A as PEFT does, and let B be zero. Then the layer computes what the base does.

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


# NF4, in plain torch: bitsandbytes and torchao need CUDA or tensors of a class of their own. Its
# 16 values are quantiles of a normal distribution, scaled to [-1, 1].
NF4 = """
    -1 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635
    -0.18477343022823334 -0.09105003625154495 0 0.07958029955625534 0.16093020141124725
    0.24611230194568634 0.33791524171829224 0.44070982933044434 0.5626170039176941
    0.7229568362236023 1
"""
# Weights that share a scale: 32 bytes of codes, and 2 of the scale. Quantizing the scales too, as
# QLoRA does, would save another 0.12 of these 4.25 bits per weight.
BLOCK = 64


def nf4_values(device: torch.device) -> torch.Tensor:
    """Return the values that the codes 0 to 15 stand for, fp32."""
    return torch.tensor([float(word) for word in NF4.split()]).to(device)


def quantize(weight: torch.Tensor) -> torch.Tensor:
    """Return the NF4 codes and scales of a matrix, uint8 [rows, columns / 64 * 34]."""
    blocks = weight.float().unflatten(1, (-1, BLOCK))
    scales = blocks.abs().amax(2, keepdim=True).clamp(min=1e-30).bfloat16()
    values = nf4_values(weight.device)
    # The nearest value: count the midpoints between values that are smaller.
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


def add_adapters(model: nn.Module, config: Config) -> None:
    """Give the linear layers of the blocks adapters, and freeze all else. Says what it adapts.

    What is no nn.Linear stays as it is: stacked experts of MoE models, Conv1D of GPT-2. So does a
    subclass, whose forward may do more, and what `freeze_unused` froze.
    """
    blocks = transformer_blocks(model)
    layers = {
        name: module
        for name, module in blocks.named_modules()
        if type(module) is nn.Linear and module.weight.requires_grad
    }
    kinds = {name.rpartition(".")[2] for name in layers}
    targets = set(config.target or kinds or ["all"])
    if targets - kinds:
        common.refuse(
            f"--target {min(targets - kinds)}: the blocks of this model have no such nn.Linear "
            f"layer, but {' '.join(sorted(kinds)) or 'none'}"
        )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        # NOTE: not model.bfloat16(), which would also round buffers, as the rotary frequencies.
        if config.base_precision != "fp32":
            parameter.data = parameter.data.bfloat16()
    adapted = Counter()
    for name, module in layers.items():
        parent, _, kind = name.rpartition(".")
        if kind in targets:
            layer = LoraLinear(module, config)
            setattr(blocks.get_submodule(parent), kind, layer)
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


def identify_base(config: Config) -> None:
    """Set `config.base`, a hash of the base, which a run records and a resumed run must share.

    It covers the config, and of each file of weights its size and last million bytes. To read
    all of a large model would take minutes.
    """
    if config.init_from is None:
        common.refuse("--init_from is missing: adapters change a pretrained model")
    directory = Path(config.init_from)
    if (directory / "adapter_config.json").exists():
        common.refuse(f"--init_from {directory} holds adapters; give the base that they belong to")
    facts = []
    with common.refusing(f"--init_from {directory}"):
        for path in sorted([*directory.glob("config.json"), *directory.glob("*.safetensors")]):
            content = np.memmap(path, mode="r")
            facts += [path.name, len(content), zlib.crc32(content[-1_000_000:])]
    config.base = common.fingerprint(facts)


def write_adapter(run: common.Run, adapters: dict) -> None:
    """Write adapter/, the adapters and the tokenizer as PEFT and AutoTokenizer load them."""
    temporary = run.directory / ".adapter.tmp"
    with common.refusing(f"cannot write {temporary} ({run.checkpoints.last} is complete)"):
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
            # All names, so that PEFT adapts exactly these layers. By their kind (q_proj), or by
            # "all-linear", it could find others.
            "target_modules": [name[: -len(A)] for name in adapters if name.endswith(A)],
        }
        common.write_json(temporary / "adapter_config.json", description)
        in_peft = {f"base_model.model.{name}": tensor for name, tensor in adapters.items()}
        save_file(in_peft, temporary / "adapter_model.safetensors", metadata={"format": "pt"})
        temporary.rename(run.directory / "adapter")


def read_merged(config: Config, adapters: dict, checkpoint: Path, state_dict: dict) -> None:
    """Fill the tensors of hf/ from the base, and add the adapters to them.

    `common.export` calls this for one file of weights after the other.
    """
    tensors = state_dict["model"]
    dcp.load(tensors, storage_reader=HuggingFaceStorageReader(config.init_from))
    for name, weight in tensors.items():
        layer = name.removesuffix(".weight")
        if layer + A in adapters:
            merged = weight.float()
            # NOTE: the adapters were trained on the dequantized weights, and also correct what
            # quantization does to these. Added to the original weights, they would be worse.
            if config.base_precision == "nf4" and weight.shape[1] % BLOCK == 0:
                merged = dequantize(quantize(merged), nf4_values(weight.device))
            product = adapters[layer + B] @ adapters[layer + A]
            weight.copy_(merged + product * (config.alpha / config.rank))


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


def parallelize(model: nn.Module, config: Config, device: torch.device) -> nn.Module:
    """Shard a model that is on the meta device, and give the shards memory and initial weights.

    Frozen and trained parameters of a block share a group. They may have different dtypes, as long
    as all trained ones have the same: the others get no gradient and are not reduce-scattered.

    `fully_shard` turns the parameters of a module into DTensors and adds hooks to the module. An
    all-gather before forward makes the parameters full, and they are freed after it. Another
    all-gather comes before backward. After backward a reduce-scatter leaves each rank the averaged
    gradient of its shard.

    The order matters: activation checkpointing, then compile (the other way round, the compiled
    block would be recomputed twice), then FSDP, whose hooks the compiler should not see.
    """
    blocks = transformer_blocks(model)
    checkpoint_activations(blocks, config.activation_checkpointing)
    if config.compile:
        compile_blocks(blocks, config)

    # HSDP: shard within a row of the mesh, replicate across rows (one row by default).
    shards = dist.get_world_size() // config.dp_replicate
    if config.dp_replicate == 1:
        mesh = init_device_mesh(device.type, (shards,))
    else:
        mesh = init_device_mesh(
            device.type, (config.dp_replicate, shards), mesh_dim_names=("replicate", "shard")
        )
    # Parameters are cast to one dtype as they are all-gathered, so blocks compute in it, however
    # the base is kept. (FSDP casts no integers, so NF4 codes stay as they are.) The shards of the
    # adapters and the optimizer state stay fp32. Reduce gradients in fp32 too. The default is bf16
    # in torch 2.13, and the type of the shards from 2.15 on. Do not cast a block's inputs either:
    # what the model computes in fp32 (rotary embeddings in some types) stays fp32.
    compute = torch.float32 if config.precision == "fp32" else torch.bfloat16
    policy = MixedPrecisionPolicy(
        param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    options = {"mesh": mesh, "mp_policy": policy}
    if config.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")

    initialize(model, modules_outside_blocks(model), config.seed, device)
    model.tie_weights()  # `initialize` gave each module memory of its own, which untied them
    # `fully_shard` claims only parameters that no submodule has claimed yet, so apply it bottom-up:
    # blocks first, then the root. With the root alone, all parameters would be gathered at once.
    for block in blocks:
        # Initialize one block at a time, so that no rank ever holds more than one full block.
        initialize(model, block.modules(), config.seed, device)
        for module in block.modules():
            if isinstance(module, LoraLinear):
                module.start()  # the seed is that of the block's name
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


@torch.no_grad()
def load_weights(model: nn.Module, directory: str) -> None:
    """Load the base from --init_from. For NF4, a rank quantizes the rows that it reads.

    So no rank holds an unquantized matrix, and no collective is needed.
    """
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    quantized = {
        f"{name}.weight": module
        for name, module in model.named_modules()
        if isinstance(module, LoraLinear) and module.is_quantized
    }
    common.load_weights(model, directory, skip=[*trained, *quantized])
    reader = HuggingFaceStorageReader(directory)
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

    A rank accumulates unsharded gradients of the adapters, which are small, and reduce-scatters
    them once, on the last micro-batch. With `--reduce_every_micro_batch` it accumulates only its
    shard.
    """
    # The loss of a step is the sum over all target tokens, divided by their number in the global
    # batch. A mean of micro-batch means would give tokens of small micro-batches more weight.
    # FSDP averages gradients over the ranks, so multiply by their number to get a sum.
    scale = dist.get_world_size() / batch.num_targets
    total_loss = torch.zeros((), device=device)
    for i, micro_batch in enumerate(batch.micro_batches):
        last = i == len(batch.micro_batches) - 1
        # NOTE: off by one here, and ranks train on their local gradients without an error.
        model.set_requires_gradient_sync(last or config.reduce_every_micro_batch)
        # HSDP only: accumulate shards of gradients, and all-reduce them over the replicas once.
        model.set_requires_all_reduce(last)
        # Without resharding after backward, the next micro-batch needs no all-gather.
        model.set_reshard_after_backward(last or config.reshard_after_forward)
        loss = model(**common.to_device(micro_batch, device))  # all-gathers
        (loss * scale).backward()  # all-gathers, and reduce-scatters if gradients sync
        total_loss += loss.detach()
    dist.all_reduce(total_loss)
    return total_loss


def clip_grad_norm(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Clip the gradient norm to `max_norm`; returns the norm before clipping."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    # NOTE: the norm is a DTensor, and its local value may cover only this rank's shards.
    return norm.full_tensor()  # a collective, so call it on every rank


def optimizer_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
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


# --- Model ----------------------------------------------------------------------------------------
# An ordinary transformers model that returns its loss. It knows nothing of ranks.

# The loss computes the logits of this many tokens at a time: 1.2 GB in fp32 for 150,000 ids.
CHUNK_TOKENS = 2048


def build_model_config(
    config: Config, tokenizer: common.Tokenizer, known_ids: int
) -> PreTrainedConfig:
    """Build the architecture of a named shape, or read the config.json that --model points to."""
    vocabulary_size = 1 + max(tokenizer.get_vocab().values())  # some tokenizers skip ids
    padded_size = math.ceil(vocabulary_size / 64) * 64  # keeps the head's matmul fast
    if config.model in SHAPES:
        model_config = AutoConfig.for_model(vocab_size=padded_size, **SHAPES[config.model])
    else:
        model_config = common.read_model_config(config, known_ids)
    model_config.eos_token_id = end_tokens(config, tokenizer)  # where generation stops
    # transformers would keep the embedding of a pad token at zero. Padding is masked by position.
    model_config.pad_token_id = None
    model_config.bos_token_id = None
    return model_config


def end_tokens(config: Config, tokenizer: common.Tokenizer) -> list[int]:
    """Return the ids that end an answer: the end of a turn, and those of the base model."""
    listed = base_generation(config).eos_token_id
    ends = set(listed if isinstance(listed, list) else [listed])
    return sorted((ends | {tokenizer.turn_end, tokenizer.eos_token_id}) - {None})


def base_generation(config: Config) -> GenerationConfig:
    """Return the base model's settings of `generate`, such as its temperature, for hf/."""
    if config.model == config.tokenizer:  # so that the ids mean the same
        with contextlib.suppress(OSError):  # not every model has this file
            return GenerationConfig.from_pretrained(config.model)
    return GenerationConfig()


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
        add_adapters(model, config)
    loss = torch.compile(chunk_loss) if config.compile else chunk_loss
    model.generation_config = base_generation(config)
    model.generation_config.eos_token_id = model_config.eos_token_id
    model.forward = partial(forward_with_loss, model, loss)
    return model


def forward_with_loss(
    self: nn.Module,
    loss: Callable,
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    target_positions: torch.Tensor,
    **kwargs: Any,
) -> torch.Tensor:
    """Replace the model's forward; returns the cross entropy summed over the target tokens.

    The logits of a whole micro-batch, [tokens, vocabulary], would be its largest tensor by far.
    Computing them chunk by chunk, and again in backward, never holds more than one chunk.

    NOTE: the loss has to be inside the root's forward. FSDP all-gathers the parameters of a module
    for its forward only, and the head belongs to the root.

    Args:
        loss: `chunk_loss`, or the same compiled.
        input_ids, labels: int64 [sequences, length]. Labels are already shifted.
        target_positions: int64 [targets], which of the flattened positions go through the head.
        kwargs: the other keys of a micro-batch, see `common.Batches.collate`.
    """
    output = self.get_decoder()(input_ids=input_ids, use_cache=False, **kwargs)
    hidden = output.last_hidden_state.flatten(0, 1)[target_positions]  # [targets, hidden size]
    head = self.get_output_embeddings()
    labels = labels.flatten()[target_positions]  # [targets]
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


def build_optimizer(model: nn.Module, decayed: set[str], config: Config) -> torch.optim.AdamW:
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
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)


def set_learning_rates(config: Config, num_parameters: int) -> None:
    """Fill in the learning rates that no flag sets. A high one ruins what a large model knows."""
    if config.learning_rate is None:
        config.learning_rate = 1e-2 if num_parameters < 10_000_000 else 2e-4
    if config.min_learning_rate is None:
        config.min_learning_rate = config.learning_rate / 10
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
    optimizer: torch.optim.Optimizer,
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
    identify_base(config)

    # Tokenizing can take longer than a collective may wait, so do it before the ranks meet. The
    # first rank of a node does the work, and the others find it in the cache.
    tokenizer, known_ids = chat_tokenizer(config)
    ours = tokenizer.chat_template.endswith((TEMPLATE, chat.TEMPLATE))
    common.say(f"chat template: {'that of this collection' if ours else 'the model has its own'}")
    documents = common.load_documents(config, chat.COLUMNS, tokenize_conversation, tokenizer)
    # Split before truncating, so that the split does not depend on --max_length.
    training, validation = (
        ConversationBatches(truncate(part, config.max_length), config, tokenizer.eos_token_id)
        for part in common.split(documents, config.eval_tokens)
    )
    model_config = build_model_config(config, tokenizer, known_ids)
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
    load_weights(model, config.init_from)
    adapters = adapters_of(model)  # all that a checkpoint holds
    if checkpoints.last:
        common.load_checkpoint(checkpoints.last, adapters, optimizer)

    rank, size = dp_rank_and_size(config)
    accumulation = config.global_batch_tokens // config.micro_batch_tokens  # over all ranks
    run.begin(
        progress,
        f"mesh {size} x {run.world_size // size}, {accumulation // size} micro-batches per rank "
        f"and step, {config.global_batch_tokens:,} tokens, learning rate {config.learning_rate:g}",
    )
    if run.rank == 0:
        shutil.rmtree(run.directory / "adapter", ignore_errors=True)  # of fewer steps
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
            checkpoints.save(adapters, optimizer, progress)
        if run.stopping:
            break
    checkpoints.wait()
    # The full adapters, to be exported once the process group is gone. A collective.
    trained = {name: p.full_tensor().detach().cpu() for name, p in adapters.named_parameters()}

    # The communication threads can abort at exit while a model is alive, so free it first.
    del model, adapters, optimizer
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
    if run.rank == 0 and progress["step"] >= config.steps:
        write_adapter(run, trained)
    # The export to hf/ reads the base instead of the checkpoint, and merges the adapters into it.
    read = partial(read_merged, config, trained)
    run.finish(progress["step"], checkpoints.last, NEXT_COMMAND, read)


if __name__ == "__main__":
    common.launch(main)
