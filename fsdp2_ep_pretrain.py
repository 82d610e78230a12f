"""Causal-LM pretraining with FSDP2 and expert parallelism: E ranks share the experts of each block.

    torchrun --standalone --nproc-per-node=2 fsdp2_ep_pretrain.py

Choose it for mixtures of experts: FSDP2 alone gathers all experts, while a token uses a few.
`diff fsdp2_pretrain.py fsdp2_ep_pretrain.py` is what it adds: in the section Strategy. Read
fsdp2_sft.py next.

What each of EN ranks, N groups of E, keeps: 1/(EN) of parameters, gradients and AdamW moments;
while a block computes, that block's parameters whole, but of its experts an E-th.

What moves inside a block, with A the bytes of [tokens, hidden size] and k experts of a token:
all-to-alls of 4kA(E-1)/E in forward and backward, 6kA(E-1)/E if the whole block is computed again.
Nothing hides them, and all ranks wait for the one whose experts have most tokens, which also needs
most memory: routers have to choose evenly, and the E ranks belong in one node. (GShard, arXiv
2006.16668, has experts dealt over ranks and all-to-alls, and drops what exceeds an expert's share;
so does the Switch Transformer, arXiv 2101.03961, with k=1. Here nothing is dropped, as in
DeepSeek-V3, arXiv 2412.19437.)

What moves in a step, with P the bytes of all parameters but experts and X those of an E-th of the
experts: before a block's forward and again before its backward an all-gather of its parameters, at
most 2P(EN-1)/(EN) + 2X(N-1)/N in all; after its backward a reduce-scatter of its gradients, half as
much, or in bf16 as much, since gradients are reduced in fp32. It moves while the neighbouring block
computes, as far as the CPU is ahead: it waits once in each block, for the numbers of tokens.
"""

import contextlib
import gc
import math
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.integrations.sdpa_attention import repeat_kv

import common
from common import flag

# --- Config ---------------------------------------------------------------------------------------

# What the end of a run suggests to try next.
NEXT_COMMAND = "torchrun --nproc-per-node=2 fsdp2_sft.py --init_from {run_dir}"


@dataclass(config=ConfigDict(allow_inf_nan=False))
class Config:
    # model
    model: str = flag(
        "tiny-moe",
        "tiny, qwen2-0.5b; tiny-moe, qwen3-30b-a3b (mixtures of experts); or a directory or hub id "
        "with a config.json",
    )
    init_from: str | None = flag(
        None,
        "weights to start from: a run directory, or a Hugging Face directory or hub id. Its model "
        "and tokenizer take the place of --model and --tokenizer, unless these are given",
    )
    tokenizer: str = flag("bytes", "bytes, a tiktoken encoding (gpt2), or a directory or hub id")

    # data
    dataset: str = flag("stdlib", "stdlib, hub id, or .parquet .jsonl .csv .txt file, glob or URL")
    dataset_config: str | None = flag(None, "configuration name of a hub dataset")
    dataset_split: str = flag("train", "split, as in datasets.load_dataset")
    text_column: str = flag("text", "column that holds the text")
    max_length: PositiveInt = flag(512, "longest row in tokens; longer documents become several")
    pad_to_multiple_of: PositiveInt = flag(1, "row lengths are rounded up to a multiple of this")
    batching: Literal["bucketed", "packed"] = flag(
        "bucketed",
        "bucketed: rows of similar length, padded on the right; packed: whole documents fill one "
        "row, and attention stays within each",
    )
    micro_batch_tokens: PositiveInt = flag(
        1024, "token positions of one forward pass of one rank, padding included"
    )
    global_batch_tokens: PositiveInt = flag(
        4096, "token positions of one optimizer step, over all ranks"
    )

    # optimization
    steps: Annotated[int, Field(ge=0, lt=10**8)] = flag(
        550, "optimizer steps of the whole run; 0 prepares the data and ends"
    )
    learning_rate: PositiveFloat = flag(5e-3, "peak learning rate of AdamW")
    min_learning_rate: NonNegativeFloat = flag(1e-4, "learning rate at the end of the cosine")
    warmup_steps: NonNegativeInt = flag(20, "steps of linear warm-up")
    weight_decay: NonNegativeFloat = flag(
        0.1, "weight decay of matrices; embeddings, norms and biases have none"
    )
    grad_clip: NonNegativeFloat = flag(1.0, "clip gradients to this norm; 0 does not clip")
    balance_rate: NonNegativeFloat = flag(
        1e-2,
        "how much a step moves the bias of a router, so that experts get equally many tokens; for "
        "mixtures of experts that have one (DeepSeek-V3: 0.001, in many more steps)",
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = flag(0, "seed of initial weights and data order")

    # precision, memory and speed
    precision: Literal["auto", "fp32", "bf16", "float8"] = flag(
        "auto",
        "precision of compute; auto is bf16 on GPUs that have it and fp32 elsewhere; float8 is "
        "bf16 with the products of blocks' linear layers in float8 (torchao, rowwise scales)",
    )
    activation_checkpointing: Annotated[str, Field(pattern=r"^(none|full|selective|0?\.\d+)$")] = (
        flag("none", "none, full, selective, or a fraction of the blocks such as 0.5")
    )
    compile: bool = flag(False, "compile each transformer block on its own")

    # validation and checkpoints
    eval_every: PositiveInt = flag(200, "steps between validations")
    eval_batches: PositiveInt = flag(256, "micro-batches of one validation, over all ranks")
    checkpoint_every: PositiveInt = flag(100, "steps between checkpoints; the last step has one")
    keep_checkpoints: PositiveInt = flag(
        2, "how many of the newest checkpoints stay; the best by validation loss stays too"
    )
    checkpoint_style: Literal["stateful", "separate"] = flag(
        "separate",
        "stateful: model and optimizer in one Stateful object; separate: a directory for each. "
        "Either is read by every script",
    )
    async_checkpoint: bool = flag(False, "train on while a checkpoint is written")
    resume: str = flag(
        "auto",
        "auto, never, or a checkpoint's path (it holds a pickle: load only those you trust)",
    )

    # the run
    run_dir: str = flag("runs/fsdp2_ep_pretrain", "directory of everything that the run writes")
    timeout_minutes: Annotated[float, Field(ge=0.05)] = flag(
        10.0, "longest wait for another rank, in minutes"
    )
    trace_steps: list[PositiveInt] | None = flag(None, "first and last step to profile")
    wandb_project: str | None = flag(None, "Weights & Biases project to log to as well")

    # this strategy
    reshard_after_forward: bool = flag(
        True, "free a block's whole parameters after its forward and gather them for backward again"
    )
    expert_parallel: PositiveInt = flag(2, "ranks that share the experts of each block")
    reduce_every_micro_batch: bool = flag(
        False, "reduce gradients after every micro-batch: less memory, more traffic"
    )

    def __post_init__(self) -> None:
        """Check what flags mean together; the limits of each one stand beside it."""
        if self.precision == "auto":
            # Before Ampere, GPUs only emulate bf16.
            bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported(False)
            self.precision = "bf16" if bf16 else "fp32"
        if self.min_learning_rate > self.learning_rate:
            raise ValueError("--min_learning_rate is above --learning_rate")
        multiple = self.pad_to_multiple_of
        padded_length = math.ceil(self.max_length / multiple) * multiple
        if padded_length > self.micro_batch_tokens:
            raise ValueError("--micro_batch_tokens cannot hold a row of --max_length, padded")
        if self.trace_steps is not None:
            if len(self.trace_steps) != 2:
                raise ValueError("--trace_steps takes two numbers, a first and a last step")
            first, last = self.trace_steps
            if not first <= last <= self.steps:
                raise ValueError("--trace_steps are a first and a last step of the run")
        world_size = int(os.environ.get("WORLD_SIZE", 1))
        if self.steps and world_size % self.expert_parallel:
            raise ValueError(
                f"--expert_parallel {self.expert_parallel} must divide {world_size} ranks"
            )
        # The compiler has to leave out how tokens are sent. Inside of what activation checkpointing
        # computes again it cannot, and so it would compile nothing, without a word.
        if self.compile and self.activation_checkpointing != "none":
            raise ValueError("--compile takes --activation_checkpointing none")
        unit = self.micro_batch_tokens * world_size
        if self.global_batch_tokens % unit:
            larger = (self.global_batch_tokens // unit + 1) * unit
            raise ValueError(
                f"--global_batch_tokens {self.global_batch_tokens} is no multiple of {unit} "
                f"(--micro_batch_tokens x {world_size} ranks); {larger} would be"
            )


# --- Process group and device ---------------------------------------------------------------------


def init_process_group(config: Config) -> torch.device:
    """Join the ranks that torchrun started; returns the device of this one."""
    timeout = timedelta(minutes=config.timeout_minutes)
    if not torch.cuda.is_available():
        dist.init_process_group("gloo", timeout=timeout)
        return torch.device("cpu")
    ranks, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
    if ranks > gpus:
        advice = f'--nproc-per-node={gpus}, or CUDA_VISIBLE_DEVICES="" to train on CPUs'
        common.refuse(f"{ranks} ranks cannot share {gpus} GPUs: take {advice}")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    if config.precision == "fp32":
        # Matrix products take TF32, 10 bits of mantissa for 23: several times as fast.
        torch.set_float32_matmul_precision("high")
    # Rows of many lengths would leave memory in pieces that fit no other length.
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    # cuDNN's attention plans a kernel for each new shape, which takes longer than many runs of it.
    torch.backends.cuda.enable_cudnn_sdp(config.pad_to_multiple_of > 1)
    # Kernels of the flash-attn package, if it is there, in place of torch's own (its version 2).
    generation, _ = torch.cuda.get_device_capability()
    flash_attention = {9: "FA3", 10: "FA4"}.get(generation)  # Hopper, Blackwell
    if flash_attention:
        with contextlib.suppress(ModuleNotFoundError):
            torch.nn.attention.activate_flash_attention_impl(flash_attention)
    # gloo beside NCCL serves what lies in CPU memory: Python objects and offloaded gradients.
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout, device_id=device)
    return device


# --- Model ----------------------------------------------------------------------------------------
# This section knows nothing of ranks: it is an ordinary model that returns its loss.

SHAPES = {
    "tiny": {
        "model_type": "qwen2",
        "hidden_size": 192,
        "intermediate_size": 640,  # of the feed-forward network
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
    # Mixtures of experts: a block has many feed-forward networks, of which each token uses a few.
    "tiny-moe": {
        "model_type": "minimax_m2",
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
        "moe_intermediate_size": 768,
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

# The loss computes the logits of so many tokens at a time: 1.2 GB in fp32 for 150,000 ids.
CHUNK_TOKENS = 2048

# Selective activation checkpointing keeps what these operators return, the expensive part of a
# block, and computes the cheap rest again in backward.
KEPT = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._grouped_mm.default,  # products of experts
    torch.ops.aten._scaled_mm.default,  # products in float8
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.torch_attn._varlen_attn.default,  # attention within documents, on CUDA
    # Tensor, context and expert parallelism have collectives inside a block.
    torch.ops._c10d_functional.all_gather_into_tensor.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_to_all_single.default,
]


def build_model_config(
    config: Config, vocabulary_size: int, eos_token_id: int | None
) -> PreTrainedConfig:
    """The model's architecture: built here, or read from the config.json that --model names."""
    if config.model in SHAPES:
        model_config = AutoConfig.for_model(
            vocab_size=math.ceil(vocabulary_size / 64) * 64,  # keeps the head's products fast
            bos_token_id=None,
            eos_token_id=eos_token_id,
            **SHAPES[config.model],
        )
    else:
        model_config = common.read_model_config(
            config.model, vocabulary_size, config.max_length, config.batching
        )
    model_config.eos_token_id = eos_token_id  # where generation stops
    # The embedding of a pad token would never be trained, so the model is told of none.
    model_config.pad_token_id = None
    model_config.bos_token_id = None
    return model_config


def document_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    dropout: float = 0.0,
    scaling: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int = 0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """`causal_attention` in the form of transformers' `AttentionInterface`.

    Raises:
        ValueError: the model asks for something that this attention does not apply.
    """
    longest = query.shape[2] if cu_seq_lens_q is None else max_length_q
    is_causal = kwargs.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    unknown = {
        "an attention mask": attention_mask is not None,
        "attention sinks": kwargs.get("s_aux") is not None,
        "a softcap": kwargs.get("softcap") is not None,
        "bidirectional attention": not is_causal,
        "a sliding window": (kwargs.get("sliding_window") or longest) < longest,
    }
    for setting, asked in unknown.items():
        if asked:
            raise ValueError(f"{type(module).__name__} wants {setting}: not supported here")
    output = causal_attention(query, key, value, cu_seq_lens_q, max_length_q, scaling, dropout)
    return output, None


def causal_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: torch.Tensor | None,
    max_document_length: int,
    scale: float | None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Causal attention that stays within each document, without a mask.

    Args:
        query: [rows, heads, length, head size]; key and value may have fewer heads.
        boundaries: int32 [documents + 1], where the documents of a single packed row begin and end;
            None if every row is one document, padded on the right.
        max_document_length: of a packed row.
        scale: of the products of queries and keys; None for 1 / sqrt(head size).

    Returns:
        [rows, length, heads, head size]
    """
    if torch.is_autocast_enabled(query.device.type):  # rotary embedding returns fp32 under it
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    groups = query.shape[1] // key.shape[1]
    half_on_cuda = query.is_cuda and query.dtype != torch.float32
    if not half_on_cuda and (query.is_cuda or boundaries is not None):
        # The other kernels do not know groups: CUDA would make whole [length, length] matrices.
        key = repeat_kv(key, groups)
        value = repeat_kv(value, groups)
        groups = 1
    if boundaries is None:
        options = {"is_causal": True, "scale": scale, "dropout_p": dropout}
        output = nn.functional.scaled_dot_product_attention(
            query, key, value, enable_gqa=groups > 1, **options
        )
        return output.transpose(1, 2).contiguous()
    if len(query) > 1 or dropout:
        raise ValueError("packed attention is of one row, and has no dropout (--batching bucketed)")
    if not half_on_cuda:  # no variable-length kernel takes it
        return attention_document_by_document(query, key, value, boundaries, scale)
    output = varlen_attn(
        *(tensor[0].transpose(0, 1) for tensor in (query, key, value)),  # [tokens, heads, size]
        boundaries,
        boundaries,
        max_document_length,
        max_document_length,
        scale=scale,
        window_size=(-1, 0),  # all tokens before, none after
        enable_gqa=groups > 1,
    )
    return output[None]


@torch.compiler.disable  # every row has other lengths
def attention_document_by_document(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: torch.Tensor,
    scale: float | None,
) -> torch.Tensor:
    """Without a variable-length kernel, faster than one attention with a block-diagonal mask."""
    lengths = boundaries.diff().tolist()
    documents = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)))
    outputs = [
        nn.functional.scaled_dot_product_attention(*document, is_causal=True, scale=scale)
        for document in documents
        if document[0].shape[2]
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


def chunk_loss(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor
) -> torch.Tensor:
    """Cross entropy of logits in fp32, summed over all labels but those of -100."""
    logits = nn.functional.linear(hidden, weight, bias)  # [chunk, vocabulary]
    return nn.functional.cross_entropy(logits.float(), labels, reduction="sum")


def summed_cross_entropy(
    hidden: torch.Tensor, head: nn.Linear, labels: torch.Tensor, loss: Callable = chunk_loss
) -> torch.Tensor:
    """Cross entropy summed over all labels but those of -100, in fp32.

    The logits of a whole micro-batch, [tokens, vocabulary], would be its largest tensor by far.
    Here they exist a chunk at a time. (F.linear_cross_entropy would do, but returns the sum of bf16
    inputs in bf16: 0.4 % off.) In bf16 the chunks' gradients of the head add up in bf16.

    Args:
        hidden: [tokens, hidden size], what the decoder returns.
        head: the output embedding, weight [vocabulary, hidden size].
        labels: int64 [tokens], each the token to predict.
        loss: `chunk_loss`, or the same compiled.
    """
    if len(labels) <= CHUNK_TOKENS:
        return loss(hidden, head.weight, head.bias, labels)
    # Backward computes the logits of a chunk again, rather than to keep those of all.
    of_chunk = partial(checkpoint, loss, use_reentrant=False)
    chunks = zip(hidden.split(CHUNK_TOKENS), labels.split(CHUNK_TOKENS))
    return sum(of_chunk(part, head.weight, head.bias, targets) for part, targets in chunks)


def forward_with_loss(
    self: nn.Module,
    loss: Callable,
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    **kwargs: Any,
) -> torch.Tensor:
    """The forward of a transformers model: the summed loss of a micro-batch.

    NOTE: the loss belongs inside the root's forward. FSDP gathers the parameters of a module for
    its forward alone, and the head is one of the root's.

    Args:
        loss: of a chunk, see `summed_cross_entropy`.
        input_ids, labels: int64 [rows, length]; labels are shifted already.
        kwargs: the other keys of a micro-batch, see `common.Batches.collate`.
    """
    with counting_experts(self, labels):
        output = self.get_decoder()(input_ids=input_ids, use_cache=False, **kwargs)
    hidden = output.last_hidden_state  # [rows, length, hidden size]
    return summed_cross_entropy(
        hidden.flatten(0, 1), self.get_output_embeddings(), labels.flatten(), loss
    )


def find_experts(model: nn.Module) -> None:
    """Prepare the layers of a mixture of experts (MoE layers) to count which experts tokens choose.

    transformers keeps the experts of a layer in one module, parameters [experts, ...]. Those whose
    forward is one of its `ExpertsInterface` are given what the layer's router has chosen.
    """
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.requires_grad:
                # A router's bias that is not learned. As a buffer it stays whole and in fp32.
                delattr(module, name)
                module.register_buffer(name, parameter.data)
    model.moe_layers = [
        module
        for module in model.modules()
        if hasattr(getattr(module, "experts", None), "has_gate")
    ]
    model.expert_counts = None
    model.tokens_to_count = None
    for layer in model.moe_layers:
        layer.experts.register_forward_pre_hook(partial(count_chosen_experts, model))
        for parameter in layer.experts.parameters():
            if any(width % 8 for width in parameter.shape[1:]):
                shape = list(parameter.shape)
                common.refuse(f"sizes of experts have to be multiples of 8, not {shape}")


@contextlib.contextmanager
def counting_experts(model: nn.Module, labels: torch.Tensor) -> Iterator[None]:
    """In training, add to `model.expert_counts` what the forward of a micro-batch in here chooses.

    Tokens that have a label are counted: no padding (and no prompts, when fine-tuning).
    """
    if model.training and model.moe_layers:
        if model.expert_counts is None:
            num_experts = model.moe_layers[0].experts.num_experts
            model.expert_counts = torch.zeros(  # [MoE layers, experts]
                len(model.moe_layers), num_experts, dtype=torch.int64, device=labels.device
            )
            for layer, counts in zip(model.moe_layers, model.expert_counts):
                layer.experts.counts = counts
        model.tokens_to_count = (labels.flatten() >= 0).long()
    yield
    # NOTE: activation checkpointing runs blocks again in backward, which must not count them again.
    model.tokens_to_count = None


def count_chosen_experts(model: nn.Module, experts: nn.Module, inputs: tuple) -> None:
    """A forward pre-hook of a layer's experts."""
    if model.tokens_to_count is None:
        return
    _, chosen, _ = inputs  # int64 [tokens, k], the numbers of each token's experts
    counted = model.tokens_to_count.repeat_interleave(chosen.shape[1])
    experts.counts.scatter_add_(0, chosen.flatten(), counted)


@torch.no_grad()
def adjust_router_biases(model: nn.Module, rate: float) -> torch.Tensor:
    """Have the next step choose experts more evenly than the counted one, and begin a new count.

    An expert that had fewer tokens than the mean gets a larger bias, one that had more a smaller
    one. The router adds it to its scores to choose with, and for nothing else: so loss and
    gradients stay as they are, where a loss of balance would disturb them (DeepSeek, arXiv
    2408.15664). Routers without such a bias are left to themselves.

    Returns:
        Tokens of the fullest expert, divided by the mean, in the worst layer; 1.0 is even.
    """
    counts = model.expert_counts.double()
    mean = counts.mean(1, keepdim=True)
    for layer, direction in zip(model.moe_layers, (mean - counts).sign()):
        for name, bias in layer.named_buffers():
            # Layers that another stage of a pipeline has are on the meta device.
            if name.endswith(("e_score_correction_bias", "expert_bias")) and not bias.is_meta:
                bias += rate * direction
    model.expert_counts.zero_()
    return (counts / mean).max()


def build_model(config: Config, model_config: PreTrainedConfig) -> nn.Module:
    """The model on the meta device: it has shapes, but no memory and no numbers yet.

    NOTE: the order matters. First activation checkpointing, then compile: around a compiled block,
    both would compute it again. Then DDP or FSDP, which the compiler should not see.
    """
    AttentionInterface.register("documents", document_attention)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            model_config, dtype=torch.float32, attn_implementation="documents"
        )
    if config.precision == "float8":
        use_float8(model)
    loss = torch.compile(chunk_loss) if config.compile else chunk_loss
    model.forward = partial(forward_with_loss, model, loss)
    find_experts(model)
    # Initial weights depend on seed and module alone, so that every strategy and every world size
    # starts from the same model. See `initialize`.
    for name, module in model.named_modules():
        module.seed_text = f"{config.seed} {name}"
    checkpoint_activations(transformer_blocks(model), config.activation_checkpointing)
    if config.compile:
        compile_blocks(transformer_blocks(model), config)
    return model


def use_float8(model: nn.Module) -> None:
    """Have the linear layers of blocks compute in float8, forward and backward.

    Rows of inputs, weights and gradients are scaled, each by its largest value, and rounded to
    eight bits for the product (arXiv 2209.05433). Parameters keep their names and their precision.
    """
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
        common.refuse("--precision float8 needs GPUs that compute in it (Ada, Hopper or newer)")
    with common.refusing("--precision float8 needs the package torchao"):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def fits(module: nn.Module, name: str) -> bool:
        fitting = all(size % 16 == 0 for size in module.weight.shape)  # as the kernels want it
        return fitting and "router" not in name  # of experts, whose choice is to be exact

    recipe = Float8LinearConfig.from_recipe_name("rowwise")
    convert_to_float8_training(model.get_decoder(), config=recipe, module_filter_fn=fits)


def transformer_blocks(model: nn.Module) -> nn.ModuleList:
    """The list of the model's blocks, which transformers knows as the modules not to split."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            # With activation checkpointing a block is inside of the list's module. Not every one
            # has to be a block: a rank may have only some of them.
            names = {type(inner).__name__ for inner in module.modules()}
            if not names.isdisjoint(model._no_split_modules):
                return module
    raise ValueError(f"{type(model).__name__} has no list of transformer blocks")


def checkpoint_activations(blocks: nn.ModuleList, mode: str) -> None:
    """Have blocks computed again in backward, so that their activations need not be kept.

    `full` keeps a block's input alone; `selective` also what the operators of KEPT return; a
    fraction does the same as `full` for this part of the blocks.
    """
    if mode == "none":
        return
    wrap, fraction = checkpoint_wrapper, 1.0
    if mode == "selective":
        keep = partial(create_selective_checkpoint_contexts, KEPT)
        wrap = partial(checkpoint_wrapper, context_fn=keep)
    elif mode != "full":
        fraction = float(mode)
    for i, block in enumerate(blocks):
        # The blocks at which the running sum of fractions reaches a whole number: they are spread
        # over the depth. 0.5 takes every second one, 0.25 every fourth.
        if int((i + 1) * fraction) > int(i * fraction):
            blocks[i] = wrap(block)


def compile_blocks(blocks: nn.ModuleList, config: Config) -> None:
    """Compile each block on its own: all are alike, so a graph is compiled once and used by all."""
    # With few row lengths there is a graph for each, in training and in validation. Padded to no
    # multiple, lengths are too many: then the compiler is to find one graph for all.
    few_lengths = config.pad_to_multiple_of > 1 or config.batching == "packed"
    lengths = config.max_length // config.pad_to_multiple_of
    torch._dynamo.config.recompile_limit = 8 + 2 * lengths
    for block in blocks:
        block.compile(dynamic=False if few_lengths else None)


def modules_outside_blocks(model: nn.Module) -> list[nn.Module]:
    """The embedding, the last norm, the head, and the modules that hold them."""
    inside = set(transformer_blocks(model).modules())
    return [module for module in model.modules() if module not in inside]


def initialize(modules: Iterable[nn.Module], model: nn.Module, device: torch.device) -> None:
    """Give memory and initial weights to modules of `model` that are on the meta device."""
    for module in reversed(list(modules)):  # children first
        if not hasattr(module, "seed_text"):
            continue  # a wrapper of activation checkpointing, which has no weights of its own
        module.to_empty(device=device, recurse=False)
        tensors = list(module.parameters(recurse=False)) + list(module.buffers(recurse=False))
        floating = [tensor for tensor in tensors if tensor.is_floating_point()]
        cuda_devices = [device] if device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(cuda_devices):
            for tensor in floating:
                tensor.fill_(math.nan)
            torch.manual_seed(zlib.crc32(module.seed_text.encode()))
            # NOTE: this rebuilds the rotary frequencies too. They are a buffer that is in no
            # checkpoint, and `to_empty` has left garbage there.
            model._init_weights(module)
        if any(tensor.isnan().any() for tensor in floating):
            raise ValueError(f"transformers leaves {module.seed_text} uninitialized")


class ModelSize:
    """Parameters of a model, and those that take part in matrix products of blocks and head."""

    def __init__(self, model: nn.Module):
        config = model.config
        self.num_parameters = model.num_parameters()
        self.in_head = model.get_output_embeddings().weight.numel()
        self.in_blocks = self.num_parameters - self.in_head
        if not config.tie_word_embeddings:
            # The input embedding is a look-up, not a product.
            self.in_blocks -= model.get_input_embeddings().weight.numel()
        for parameter in model.parameters():
            if parameter.ndim == 3:  # [experts, ...], of which a token uses some
                used = getattr(config, "num_experts_per_tok", None) or config.moe_topk
                self.in_blocks -= parameter[0].numel() * (len(parameter) - used)
        head_size = getattr(config, "head_dim", None)
        if head_size is None:
            head_size = config.hidden_size // config.num_attention_heads
        self.attention_width = config.num_hidden_layers * config.num_attention_heads * head_size

    def flops(self, batch: common.GlobalBatch) -> int:
        """Floating-point operations of forward and backward of a step, for the MFU.

        As in PaLM (arXiv 2204.02311, appendix B): 6 a parameter and token, in the head a parameter
        and label, and 12 x width x length a token for attention. Neither recomputation nor padding
        counts.
        """
        products = self.in_blocks * batch.num_tokens + self.in_head * batch.num_labels
        return 6 * products + 12 * self.attention_width * batch.squared_lengths


def weight_decay_names(model: nn.Module) -> set[str]:
    """Names of the parameters that decay: matrices, but not embeddings and biases of experts."""
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim > 1 and parameter not in embeddings and not name.endswith("bias")
    }


# --- Strategy -------------------------------------------------------------------------------------


def data_parallel_rank_and_size(config: Config) -> tuple[int, int]:
    """Which part of each global batch this rank trains on, of how many: each rank has its own."""
    return dist.get_rank(), dist.get_world_size()


@torch.compiler.disable  # how many tokens go where is another number each time
def send_to_experts(
    experts: nn.Module,
    group: dist.ProcessGroup,
    hidden: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """The forward of a layer's experts: send each token to the ranks of its experts, and back.

    Padding travels too, for a layer does not know it.

    Args:
        group: the ranks that share the experts: the first has the first ones, and so on.
        hidden: [tokens, hidden size], of this rank's micro-batch.
        chosen: int64 [tokens, k], the numbers of each token's experts.
        weights: [tokens, k], by which their results are added up.
    """
    numbers = chosen.flatten()
    # Ordered by expert, rows are ordered by rank as well: each rank gets a stretch of them.
    order = numbers.argsort(stable=True)
    tokens = order // chosen.shape[1]
    counts, sent, received = exchange_counts(numbers, experts.num_experts, group)
    # An all-to-all; autograd sends the gradients back by another one.
    rows = all_to_all_single_autograd(hidden[tokens], received, sent, group)

    # They come by rank, and of each rank by expert. The products want them by expert alone.
    own_experts = torch.arange(counts.shape[1], device=rows.device)
    expert_of_row = own_experts.repeat(group.size()).repeat_interleave(
        counts.flatten(), output_size=len(rows)
    )
    by_expert = expert_of_row.argsort(stable=True)
    rows = compute_experts(experts, rows[by_expert], counts.sum(0))
    rows = rows[by_expert.argsort()]  # as they came

    rows = all_to_all_single_autograd(rows, sent, received, group)  # the all-to-all back
    results = rows[order.argsort()].view(*chosen.shape, -1)  # [tokens, k, hidden size]
    # Many routers give fp32 weights; the sum is fp32 then, too.
    return (results * weights[..., None]).sum(1).to(hidden.dtype)


def exchange_counts(
    numbers: torch.Tensor, num_experts: int, group: dist.ProcessGroup
) -> tuple[torch.Tensor, list[int], list[int]]:
    """An all-to-all of how many rows are to go to each expert, since none knows what will come.

    Args:
        numbers: int64 [rows], the expert of each row.

    Returns:
        Rows to come, int64 [ranks, own experts]; how many go to each rank; how many come from each.
    """
    # For a GPU's `bincount` the CPU would wait, too.
    counts = numbers.new_zeros(num_experts).scatter_add(0, numbers, torch.ones_like(numbers))
    to_send = counts.view(group.size(), -1)
    to_receive = all_to_all_single_autograd(to_send, None, None, group)
    # NOTE: the CPU waits for the GPU here. It has to know how much memory the rows need.
    sent, received = torch.stack([to_send.sum(1), to_receive.sum(1)]).tolist()
    return to_receive, sent, received


def compute_experts(experts: nn.Module, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The experts that this rank has, each on its rows.

    Args:
        rows: [rows, hidden size], those of the first expert first, and so on.
        counts: int64 [own experts], how many rows each has; it may be none.
    """
    # Parameters are DTensors, of which a rank has some experts: [own experts, ...].
    gate_up = experts.gate_up_proj.to_local()
    down = experts.down_proj.to_local()
    ends = counts.cumsum(0, dtype=torch.int32)
    inner = nn.functional.grouped_mm(rows, gate_up.mT, offs=ends)
    return nn.functional.grouped_mm(experts._apply_gate(inner), down.mT, offs=ends)


def deal_experts(experts: nn.Module, mesh: DeviceMesh) -> None:
    """Keep this rank's part of a layer's experts, a stretch of them, and send tokens to them."""
    for name, parameter in list(experts.named_parameters()):
        # All ranks have drawn the same numbers, so nothing has to be sent for each to take a part.
        part = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None)
        experts.register_parameter(name, nn.Parameter(part))
    experts.forward = partial(send_to_experts, experts, mesh.get_group())


def choose_dimension(shards: int, parameter: nn.Parameter) -> Shard:
    """Along which dimension a rank's experts, [own experts, rows, columns], are cut into shards.

    Where experts do not go into the shards evenly, some would be padded to the size of the others.
    """
    own_experts, rows, _ = parameter.to_local().shape
    by_rows = own_experts % shards != 0 and rows % shards == 0
    return Shard(1 if by_rows else 0)


def check_model(model: nn.Module, config: Config) -> None:
    """Refuse a model without experts, or with such as cannot be dealt or computed here."""
    if not model.moe_layers:
        common.refuse(
            f"--model {config.model} has no experts that go through transformers' ExpertsInterface"
        )
    for layer in model.moe_layers:
        shapes = {name: parameter.ndim for name, parameter in layer.experts.named_parameters()}
        if shapes != {"gate_up_proj": 3, "down_proj": 3} or layer.experts.is_transposed:
            common.refuse(
                f"--model {config.model}: its {type(layer.experts).__name__} cannot be dealt"
            )
        if layer.experts.num_experts % config.expert_parallel:
            number = layer.experts.num_experts
            common.refuse(
                f"--expert_parallel {config.expert_parallel} does not divide {number} experts"
            )


def parallelize(model: nn.Module, config: Config, device: torch.device) -> nn.Module:
    """Deal experts over groups of ranks, shard all parameters, and initialize the shards.

    `fully_shard` turns the parameters of a module into DTensors, of which a rank keeps its rows. It
    also installs hooks around the module: an all-gather makes the parameters whole before forward,
    they are freed after it, another all-gather before backward, and after that a reduce-scatter
    leaves each rank the summed gradient of its rows.
    """
    check_model(model, config)
    # The ranks of a row of the mesh share the experts of each block. They are neighbours, and so in
    # one machine if E divides its ranks. Those of a column have the same experts, and shard these.
    shards = dist.get_world_size() // config.expert_parallel
    mesh = init_device_mesh(
        device.type, (shards, config.expert_parallel), mesh_dim_names=("shard", "expert")
    )
    # All other parameters are sharded over all ranks.
    all_ranks = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))
    precision = MixedPrecisionPolicy()
    if config.precision != "fp32":
        # Parameters are cast as they are gathered, so all of a block computes in bf16. The shards
        # stay fp32, and so does all that AdamW does.
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard = partial(fully_shard, mp_policy=precision)

    initialize(modules_outside_blocks(model), model, device)
    if model.config.tie_word_embeddings:
        model.tie_weights()  # giving memory to each module on its own has untied them
    # Experts come before their block, and blocks before the root, since a module takes the
    # parameters that no module inside of it has taken.
    for block in transformer_blocks(model):
        # One at a time, so that no rank ever holds more than one whole block.
        initialize(block.modules(), model, device)
        for layer in model.moe_layers:
            if layer in block.modules():
                deal_experts(layer.experts, mesh["expert"])
                shard(
                    layer.experts,
                    mesh=mesh["shard"],
                    shard_placement_fn=partial(choose_dimension, shards),
                    reshard_after_forward=config.reshard_after_forward,
                    # The weights that a router gives experts may be fp32, and are to stay so.
                    mp_policy=replace(precision, cast_forward_inputs=False),
                )
        shard(block, mesh=all_ranks, reshard_after_forward=config.reshard_after_forward)
    # The root has the rest, in one group, for tied embeddings must share a group. It stays whole
    # after forward, since backward begins with it.
    shard(model, mesh=all_ranks, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Gradients are summed over the ranks of a mesh, not averaged: see `forward_backward`.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """This rank's part of the parameters: DTensors under their own names.

    NOTE: an optimizer is built of these, so after `parallelize`. One that was built before would
    hold the whole parameters that the model no longer uses.
    """
    return list(model.named_parameters())


def forward_backward(
    model: nn.Module, batch: common.GlobalBatch, config: Config, device: torch.device
) -> torch.Tensor:
    """Forward and backward of all micro-batches of a step; returns their summed loss, of all ranks.

    Gradients of all but the last micro-batch are kept whole on each rank, and the sum is reduced
    once: less communication, but the memory of whole gradients, of experts' those of an E-th.
    """
    # The loss of a step is a sum over labels divided by the labels of the whole global batch. A
    # mean of the micro-batches' means would weigh the tokens of short ones more.
    # NOTE: no mean over ranks. An expert's gradient is of the tokens of all E ranks of its group
    # already, and FSDP has N groups to add up, but EN ranks for the other parameters: two means
    # would weigh experts E times too much. AdamW would hide that, but not from the norm.
    scale = 1 / batch.num_labels
    total_loss = torch.zeros((), device=device)
    for i, micro_batch in enumerate(batch.micro_batches):
        last = i == len(batch.micro_batches) - 1
        model.set_requires_gradient_sync(last or config.reduce_every_micro_batch)
        # What is not freed after backward stays whole for the next micro-batch.
        model.set_reshard_after_backward(last or config.reshard_after_forward)
        # All-gathers and all-to-alls: all ranks have equally many micro-batches.
        loss = model(**common.to_device(micro_batch, device))
        (loss * scale).backward()  # the same and, if gradients are to sync, reduce-scatters
        total_loss += loss.detach()
    dist.all_reduce(total_loss)
    return total_loss


def clip_gradients(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Clip the gradients to a norm of at most `max_norm`; returns the norm before."""
    # Each number of a gradient is on one rank alone, on whichever mesh its parameter is sharded: so
    # the squares of what ranks have add up to the square of the norm.
    # Some types of models have parameters that are never trained, and so have no gradient.
    gradients = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
    squared_norm = nn.utils.get_total_norm(gradients) ** 2
    dist.all_reduce(squared_norm)  # a collective: every rank must call it
    norm = squared_norm.sqrt()
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient *= coefficient
    return norm


def balance_experts(model: nn.Module, rate: float) -> torch.Tensor | None:
    """Even out how many tokens experts get; returns their load (None without experts).

    NOTE: it is the global batch that is to be even. A micro-batch may well be of one subject.
    """
    if model.expert_counts is None:
        return None
    dist.all_reduce(model.expert_counts)  # each rank has counted its own tokens
    return adjust_router_biases(model, rate)


@torch.no_grad()
def validation_loss(
    model: nn.Module, micro_batches: Iterable[dict], config: Config, device: torch.device
) -> torch.Tensor:
    """Float64 [2]: the summed loss of the micro-batches of all ranks, and how many labels."""
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for micro_batch in micro_batches:
        micro_batch = common.to_device(micro_batch, device)
        total[0] += model(**micro_batch)  # all-gathers: all ranks have equally many micro-batches
        total[1] += (micro_batch["labels"] >= 0).sum()
    dist.all_reduce(total)
    return total


# --- Optimizer and schedule -----------------------------------------------------------------------


def build_optimizer(model: nn.Module, decayed: set[str], config: Config) -> torch.optim.AdamW:
    """AdamW on the parameters as this rank holds them."""
    parameters = named_parameters(model)
    groups = [
        {
            "params": [parameter for name, parameter in parameters if name in decayed],
            "weight_decay": config.weight_decay,
        },
        {
            "params": [parameter for name, parameter in parameters if name not in decayed],
            "weight_decay": 0.0,
        },
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)


def learning_rate_at(step: int, config: Config) -> float:
    """Linear warm-up, then a cosine down to the minimum, reached at the last step."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    progress = (step - config.warmup_steps) / (config.steps - config.warmup_steps)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return config.min_learning_rate + cosine * (config.learning_rate - config.min_learning_rate)


# --- Checkpoints ----------------------------------------------------------------------------------

CUDA = torch.cuda.is_available()
# Copies a state dict to CPU memory. NOTE: it uses the same memory each time, so a copy is good
# until the next one; `common.Checkpoints` waits for a write before it asks for the next.
STAGER = dcp.staging.DefaultStager(
    dcp.staging.StagingOptions(
        use_pinned_memory=CUDA,
        use_shared_memory=False,
        use_async_staging=False,
        use_non_blocking_copy=CUDA,
    )
)


class State(dcp.stateful.Stateful):
    """Model and optimizer as one object that DCP, torch.distributed.checkpoint, can ask and fill.

    Tensors go by the model's own parameter names and whole shapes, whatever the strategy: so any
    script at any world size can load what another one saved.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        self.model = model
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        # NOTE: optimizer.state_dict() would be empty before the first step, with nothing for a load
        # to fill. This makes the moments then, by a step with a learning rate of 0.
        model, optimizer = get_state_dict(self.model, self.optimizer)
        for group in optimizer["param_groups"]:
            # A rank may have only some of the parameters, but a file has one list of their names.
            names = common.gather(group["params"])  # a collective: those of each rank
            group["params"] = sorted(set().union(*names))
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        own = {name for name, _ in named_parameters(self.model)}
        for group in state_dict["optimizer"]["param_groups"]:
            group["params"] = [name for name in group["params"] if name in own]
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )


def save_checkpoint(
    state: State,
    model_config: PreTrainedConfig,
    tokenizer: Any,
    config: Config,
    group: dist.ProcessGroup,
) -> Callable[[Path], None]:
    """Returns what writes this moment's state to a directory, each rank its part.

    `common.Checkpoints` calls it in a thread of its own, with a group of its own: training may go
    on meanwhile, and its collectives must not mix with those of the write.
    """
    state_dict = state.state_dict()
    if config.async_checkpoint:
        state_dict = STAGER.stage(state_dict)  # training is about to change the original

    def write(directory: Path) -> None:
        if dist.get_rank() == 0:
            model_config.save_pretrained(directory / "hf")
            common.save_tokenizer(tokenizer, directory / "hf")
        if config.checkpoint_style == "stateful":
            dcp.save({"app": state_dict}, checkpoint_id=directory, process_group=group)
        else:
            for name, part in state_dict.items():
                dcp.save(part, checkpoint_id=directory / name, process_group=group)

    return write


def load_checkpoint(state: State, config: Config, directory: Path) -> None:
    """Each rank reads what it keeps, into the tensors of the state that it has now."""
    groups = state.optimizer.param_groups
    given = [{key: group[key] for key in group if key != "params"} for group in groups]
    if (directory / "model").is_dir():
        state_dict = state.state_dict()
        for name, part in state_dict.items():
            dcp.load(part, checkpoint_id=directory / name)
        state.load_state_dict(state_dict)
    else:
        dcp.load({"app": state}, checkpoint_id=directory)
    # Hyper-parameters come with the moments, but those of the flags hold: they may have changed.
    for group, hyper_parameters in zip(state.optimizer.param_groups, given):
        group.update(hyper_parameters)


# --- Training -------------------------------------------------------------------------------------


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: common.GlobalBatch,
    learning_rate: float,
    config: Config,
    device: torch.device,
) -> dict[str, float]:
    """One optimizer step; returns what is measured: mean loss over the global batch, norm, ...."""
    total_loss = forward_backward(model, batch, config, device)
    grad_norm = clip_gradients(model, config.grad_clip or math.inf)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad()
    expert_load = balance_experts(model, config.balance_rate)
    # Reading a number waits for the GPU, so it comes last.
    measured = {"loss": total_loss.item() / batch.num_labels, "grad_norm": grad_norm.item()}
    if expert_load is not None:
        measured["expert_load"] = expert_load.item()
    return measured


# --- Validation -----------------------------------------------------------------------------------


def evaluate(
    model: nn.Module, validation: common.Batches, config: Config, device: torch.device
) -> float:
    """Mean loss per label, in nats, over the same micro-batches whatever the world size."""
    micro_batches = validation.evaluation(config.eval_batches, *data_parallel_rank_and_size(config))
    model.eval()
    total = validation_loss(model, micro_batches, config, device)
    model.train()
    return (total[0] / total[1]).item()


# --- Main -----------------------------------------------------------------------------------------


def main() -> None:
    config = common.parse_config(Config)

    # Preparing data may take long, so it comes before the ranks meet and wait for each other: the
    # first rank of a node does it, the others find it in the cache.
    tokenizer = common.load_tokenizer(config.tokenizer)
    rows = common.load_rows(
        config.dataset,
        config.dataset_config,
        config.dataset_split,
        columns=[config.text_column],
        function=common.text_rows,
        tokenizer=tokenizer,
        max_length=config.max_length,
    )
    training_rows, validation_rows = rows.split()
    training, validation = (
        common.Batches(
            part.lengths,
            part.num_labels,
            part.read,
            batching=config.batching,
            max_length=config.max_length,
            micro_batch_tokens=config.micro_batch_tokens,
            pad_to_multiple_of=config.pad_to_multiple_of,
            padding_id=tokenizer.eos_token_id,
            seed=config.seed,
        )
        for part in (training_rows, validation_rows)
    )
    vocabulary_size = 1 + max(tokenizer.get_vocab().values())  # some leave out ids in between
    model_config = build_model_config(config, vocabulary_size, tokenizer.eos_token_id)
    if config.steps == 0:
        print("the data is prepared")
        return

    device = init_process_group(config)
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    contents = common.describe_contents(model_config, tokenizer, rows)
    model = build_model(config, model_config)
    size = ModelSize(model)
    run = common.Run(vars(config), size.num_parameters, contents, device, rank, world_size)
    for note, count in rows.notes.items():
        if note:
            run.say(f"{count:,} documents are {note}")
    checkpoints = common.Checkpoints(
        run.directory / "checkpoints",
        keep=config.keep_checkpoints,
        facts=run.facts,
        rank=rank,
        world_size=world_size,
        timeout=run.timeout,
    )
    # Where the run goes on from, if there is something: every rank checks a part of its files.
    resumed, progress = checkpoints.find(config.resume)

    decayed = weight_decay_names(model)
    model = parallelize(model, config, device)
    optimizer = build_optimizer(model, decayed, config)
    state = State(model, optimizer)
    if resumed:
        load_checkpoint(state, config, resumed)
    elif config.init_from:
        common.load_weights(model, config.init_from)
    save = partial(save_checkpoint, state, model_config, tokenizer, config, checkpoints.group)

    run.begin(resumed, progress["step"])
    # The position in the data is the step number: nothing else of it has to be saved.
    batches = training.stream(
        progress["step"],
        config.steps,
        config.global_batch_tokens // config.micro_batch_tokens,
        *data_parallel_rank_and_size(config),
    )
    labels_per_byte = validation_rows.labels_per_byte(
        validation.evaluation_rows(config.eval_batches)
    )
    for step in range(progress["step"] + 1, config.steps + 1):
        started = time.perf_counter()
        batch = next(batches)
        data_seconds = time.perf_counter() - started
        torch.manual_seed(config.seed + step * world_size + rank)  # of dropout
        learning_rate = learning_rate_at(step, config)
        measured = train_step(model, optimizer, batch, learning_rate, config, device)
        progress = {"step": step, "tokens": progress["tokens"] + batch.num_labels}
        run.log_step(
            batch,
            size.flops(batch),
            **progress,
            **measured,
            learning_rate=learning_rate,
            data_seconds=data_seconds,
            step_seconds=time.perf_counter() - started,
        )
        stopping = run.should_stop()  # a signal came to any rank
        if step % config.eval_every == 0 or step == config.steps:
            progress["validation_loss"] = evaluate(model, validation, config, device)
            run.log_validation(step, progress["validation_loss"], labels_per_byte)
        if step % config.checkpoint_every == 0 or step == config.steps or stopping:
            checkpoints.write(save, progress, config.async_checkpoint)
        if stopping:
            break
    checkpoints.wait()

    # Leaving with the model alive can abort in the communication threads: drop it, then the group.
    del model, optimizer, state, save
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
    next_command = NEXT_COMMAND.format(run_dir=config.run_dir)
    run.finish(progress["step"], checkpoints.last, validation_rows.prompt(), next_command)


if __name__ == "__main__":
    common.launch(main)
