"""The model of every script: a transformers model whose forward returns the summed loss.

Nothing here depends on ranks. A script calls these functions in this order, and shards the model on
the way:

    build_config   the architecture of --model
    build_model    on the meta device: the model has shapes, but no memory and no weights yet
    checkpoint_activations, compile_blocks, use_float8
    initialize     memory and initial weights, module by module

Most functions need nothing else from this file, so copy the ones that you can use. `config`: any
object with the flags that a function reads, named as in run.py.
"""

import math
import re
import zlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from common import fingerprint, refuse, refusing, say

# --- Architecture ---------------------------------------------------------------------------------

TINY = {
    "hidden_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "initializer_range": 0.07,
    "tie_word_embeddings": True,
}
# The architectures that --model knows by name.
SHAPES = {
    "tiny": {**TINY, "model_type": "qwen2", "intermediate_size": 640},
    "qwen2-0.5b": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": True,
    },
    "tiny-moe": {
        **TINY,
        "model_type": "minimax_m2",
        "bos_token_id": None,  # its own ones are not in small vocabularies
        "eos_token_id": None,
        "intermediate_size": 320,  # of an expert
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "head_dim": 48,
    },
    "qwen3-30b-a3b": {  # 128 experts, 8 per token; transformers has this and more as defaults
        "model_type": "qwen3_moe",
        "norm_topk_prob": True,
        "num_hidden_layers": 48,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
}

# Model types of transformers that train here exactly as with plain transformers, packed, and
# bucketed. tests/strategies/test_types.py compares loss and gradients of each.
PACKED_TYPES = """
    afmoe arcee aria_text axk1 beam biogpt bitnet codegen cohere cohere2 cohere2_moe
    cohere_compass_text ctrl deepseek_v2 deepseek_v3 diffllama dots1 ernie4_5 ernie4_5_moe
    exaone exaone4 exaone_moe flex_olmo gemma gemma2 gemma3_text gemma4_text gemma4_unified_text
    glm glm4 glm4_moe glm4_moe_lite gpt2 gpt_bigcode gpt_neox gptj granite granitemoe
    granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3
    iquestcoder jais2 jetmoe kolibri1 laguna llama longcat_flash mellum minicpm3 minimax_m2
    ministral ministral3 mistral mixtral moshi olmo olmo2 olmo3 olmoe opt persimmon phi phi3
    phimoe qwen2 qwen2_moe qwen3 qwen3_moe sarvam_mla sarvam_moe seed_oss smollm3 solar_open
    starcoder2 vaultgemma whisper youtu
"""
ONLY_BUCKETED_TYPES = """
    axk2 bailing_hybrid bamba bart blenderbot blenderbot-small bloom deepseek_v32 doge
    dots3_note_text falcon falcon_mamba flint glm_moe_dsa gpt_neo gpt_neox_japanese gpt_oss
    granite_swa granitemoe_swa granitemoehybrid hy_v4 jamba kimi_linear lara_mini lfm2 lfm2_moe
    lfm3 mamba mamba2 marian mbart mimo_v2_flash minimax_m3_vl_text mpt mvp nemotron nemotron_h
    olmo_hybrid pegasus plbart qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp_text stablelm
    trocr zaya
"""
BUCKETED_TYPES = PACKED_TYPES + ONLY_BUCKETED_TYPES
# Settings that the loss or the attention below ignores -> the values that change nothing.
NEUTRAL = {
    "attn_logit_softcapping": [None],
    "final_logit_softcapping": [None],
    "is_causal": [None, True],
    "is_moe": [None, False],  # the routers of Doge mix tokens, so they see later ones
    "logit_scale": [None, 1],
    "logits_scaling": [None, 1],
    "output_router_logits": [False, None],
    "quantization_config": [None],
    "use_bidirectional_attention": [None, False, "vision"],
    "z_loss_coefficient": [None, 0],
}


def build_config(config: Any, vocabulary_size: int, eos_token_id: Any) -> PreTrainedConfig:
    """Build the architecture of a named shape, or read the config.json that --model points to."""
    if config.model in SHAPES:
        padded_size = math.ceil(vocabulary_size / 64) * 64  # keeps the head's matmul fast
        model_config = AutoConfig.for_model(vocab_size=padded_size, **SHAPES[config.model])
    else:
        model_config = read_config(config, vocabulary_size)
    model_config.eos_token_id = eos_token_id  # where generation stops
    # transformers would keep the embedding of a pad token at zero, unless it is tied to the head.
    # Padding needs no token of its own, because it is masked by position.
    model_config.pad_token_id = None
    model_config.bos_token_id = None
    return model_config


def read_config(config: Any, vocabulary_size: int) -> PreTrainedConfig:
    """Read the config.json of --model, without running code from the hub.

    For a multimodal model, return the config of its language model. Refuses models that would not
    train on this data as they should.
    """
    name = f"--model {config.model}"
    with refusing(f"{name} is not built in (see --help) and has no config.json"):
        model_config = AutoConfig.from_pretrained(
            config.model, trust_remote_code=False
        ).get_text_config()
    tested, neutral = BUCKETED_TYPES.split(), dict(NEUTRAL)
    limits = ["max_position_embeddings", "max_seq_len", "max_target_positions"]
    if config.batching == "packed":
        tested = PACKED_TYPES.split()
        dropouts = [key for key in model_config.to_dict() if re.search("att.*drop", key)]
        neutral |= dict.fromkeys(dropouts, [None, 0])
        limits += ["sliding_window", "attention_chunk_size"]
    if model_config.model_type not in tested:
        untested = f"{name}: type {model_config.model_type} is not tested with {config.batching}"
        if model_config.model_type in BUCKETED_TYPES.split() or not config.untested_model:
            refuse(f"{untested} batches (--untested_model trains types that are tested with none)")
        say(f"WARNING: {untested} batches; compare the loss with that of plain transformers")
    for setting, values in neutral.items():
        if getattr(model_config, setting, None) not in values:
            refuse(f"{name}: its {setting} is not supported")
    if vocabulary_size > model_config.vocab_size:
        refuse(f"--tokenizer has {vocabulary_size} ids, {name} only {model_config.vocab_size}")
    rotation = getattr(model_config, "rope_parameters", None) or {}
    if rotation.get("rope_type") == "longrope":  # past it, rotations depend on the padded length
        limits.append("original_max_position_embeddings")
    for limit in limits:
        length = getattr(model_config, limit, None) or rotation.get(limit) or math.inf
        if config.max_length > length:
            refuse(f"--max_length {config.max_length} exceeds {limit} of {name}")
    return model_config


def weights_fingerprint(directory: str) -> str:
    """Return a hash of a directory's safetensors files, to refuse other files later.

    Of each file it reads the name, the size, and the first and last MiB, or all if the files are
    below 1 GiB together. To read a large model would take minutes.
    """
    read = []
    with refusing(f"cannot read {directory}"):
        paths = sorted(Path(directory).glob("*.safetensors"))
        small = sum(path.stat().st_size for path in paths) < 2**30
        for path in paths:
            content = np.memmap(path, mode="r")
            part = content if small else np.append(content[: 2**20], content[-(2**20) :])
            read += [path.name, len(content), xxhash.xxh3_128_hexdigest(part)]
    return fingerprint(read)


def build_model(
    model_config: PreTrainedConfig, config: Any, loss: Callable | None = None
) -> nn.Module:
    """Build the model on the meta device: it has shapes, but no memory and no weights yet.

    `loss` replaces `chunk_loss`.
    """
    AttentionInterface.register("documents", document_attention)
    # For bucketed batches, transformers picks SDPA, or eager attention where a type lacks it.
    attention = "documents" if config.batching == "packed" else None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            model_config, dtype=torch.float32, attn_implementation=attention
        )
    freeze_unused(model)
    if loss is None:
        loss = torch.compile(chunk_loss) if config.compile else chunk_loss
    model.forward = partial(forward_with_loss, model, loss)
    return model


def freeze_unused(model: nn.Module) -> None:
    """Freeze parameters that no gradient reaches, so that nothing waits for their gradients.

    These are the cross attention of decoders that are used without an encoder, and the indexers of
    sparse attention. The frozen biases of routers become buffers of the same name, because mixed
    precision rounds parameters to bf16 and leaves buffers in fp32.
    """
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if "encoder_attn" in path or "indexer" in path:
                parameter.requires_grad_(False)
            elif name.endswith("bias") and not parameter.requires_grad:
                delattr(module, name)
                module.register_buffer(name, parameter.data)


# --- Loss -----------------------------------------------------------------------------------------

# The logits of this many tokens exist at a time: 1.2 GB in fp32 for 150,000 ids.
CHUNK_TOKENS = 2048


def forward_with_loss(
    self: nn.Module,
    loss: Callable,
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    target_positions: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Replace the model's forward; returns the cross entropy summed over the target tokens.

    The logits of a whole micro-batch, [tokens, vocabulary], would be its largest tensor by far.
    Computing them chunk by chunk never holds more than one chunk. In fp32, backward computes them
    again. In bf16, `LossOfChunks` computes their gradients at once.

    NOTE: the loss is inside the model's forward, because a sharded model has its full weights only
    there.

    Args:
        loss: `chunk_loss`, or the same compiled.
        input_ids, labels: int64 [sequences, length]. Labels are already shifted.
        target_positions: int64 [targets], the flattened positions that go through the head.
        kwargs: the other keys of a micro-batch, see `common.Batches.collate`.
    """
    output = self.get_decoder()(input_ids=input_ids, use_cache=False, **kwargs)
    hidden = output.last_hidden_state.flatten(0, 1)  # [tokens, hidden size]
    labels = labels.flatten()  # [tokens]
    if target_positions is not None:
        hidden = hidden[target_positions]  # [targets, hidden size]
        labels = labels[target_positions]  # [targets]
    head = [*self.get_output_embeddings().parameters()]  # weight, and in some types a bias
    if len(labels) <= CHUNK_TOKENS:
        return loss(hidden, labels, *head)
    in_bf16 = head[0].dtype == torch.bfloat16 or torch.is_autocast_enabled(hidden.device.type)
    if in_bf16 and torch.is_grad_enabled():
        return LossOfChunks.apply(loss, hidden, labels, *head)
    return sum(
        checkpoint(loss, chunk, targets, *head, use_reentrant=False)
        for chunk, targets in zip(hidden.split(CHUNK_TOKENS), labels.split(CHUNK_TOKENS))
    )


class LossOfChunks(torch.autograd.Function):
    """The sum of `loss` over chunks, with the head's gradient summed in fp32.

    autograd would sum the chunks' gradients of a bf16 head in bf16: 0.4 % off with 8 chunks. Here
    each chunk's backward runs while its logits exist, so that they are computed only once. From
    this forward to its backward, the head's gradient takes 4 bytes per element.
    """

    @staticmethod
    def forward(ctx, loss, hidden, labels, *head):
        # Leaves of their own, in the same memory: their gradients stay in here.
        head = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in head]
        for tensor in head:
            tensor.grad_dtype = torch.float32
        chunks = hidden.detach().split(CHUNK_TOKENS)
        total = 0
        for chunk, targets in zip(chunks, labels.split(CHUNK_TOKENS)):
            with torch.enable_grad():
                chunk_total = loss(chunk.requires_grad_(), targets, *head)
            chunk_total.backward()
            total += chunk_total.detach()
        of_hidden = torch.cat([chunk.grad for chunk in chunks])
        ctx.save_for_backward(of_hidden, *(tensor.grad for tensor in head))
        return total

    @staticmethod
    def backward(ctx, scale):
        of_hidden, *of_head = (g if g is None else g * scale for g in ctx.saved_tensors)
        return None, of_hidden, None, *of_head  # autograd casts them to the dtype of the head


def chunk_loss(
    hidden: torch.Tensor,
    labels: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the summed cross entropy in fp32. (F.linear_cross_entropy sums in bf16: 0.4 % off.)"""
    # Some decoders (Mamba) return fp32 hidden states although the parameters are bf16.
    logits = nn.functional.linear(hidden.to(weight.dtype), weight, bias)  # [chunk, vocabulary]
    return nn.functional.cross_entropy(logits.float(), labels, reduction="sum")


# --- Attention within documents ------------------------------------------------------------------


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
    # Under autocast, rotary embeddings return fp32 queries and keys.
    query, key = query.to(value.dtype), key.to(value.dtype)
    if not query.is_cuda or query.dtype == torch.float32:
        return attend_one_by_one([query, key, value], cu_seq_lens_q, scaling), None
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
    heads: list[torch.Tensor], boundaries: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """Attend as `document_attention`, without the kernel that needs CUDA and half precision."""
    lengths = [length for length in boundaries.diff().tolist() if length]
    outputs = [
        nn.functional.scaled_dot_product_attention(
            *document, is_causal=True, scale=scaling, enable_gqa=True
        )
        for document in zip(*(tensor.split(lengths, dim=2) for tensor in heads))
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()  # [1, length, heads, size]


# --- Blocks: recomputation, compilation, initial weights -----------------------------------------


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
        # transformers adds the biases of experts to the results of their matmuls in place, so
        # these cannot be kept.
        biased = any(
            "experts." in name and name.endswith("bias")
            for block in blocks
            for name, _ in block.named_parameters()
        )
        policy = partial(keep_expensive, biased)
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    elif mode != "full":
        fraction = float(mode)

    def recompute(forward: Callable) -> Callable:
        # NOTE: from partial(checkpoint, forward), torch 2.13 compiles nothing, without a word.
        return lambda *args, **kwargs: checkpoint(forward, *args, **options, **kwargs)

    for i, block in enumerate(blocks):
        # Spread the blocks over the depth: 0.5 takes every second one, 0.25 every fourth.
        if int((i + 1) * fraction) > int(i * fraction):
            block.forward = recompute(block.forward)


def keep_expensive(biased: bool, _, operator: Any, *args, **kwargs) -> CheckpointPolicy:
    """Keep the results of matmuls, attention and collectives, and recompute the cheap rest.

    Matmuls of `biased` experts are recomputed, too.
    """
    # Parts of operators' names, such as aten.addmm.default. c10d: collectives.
    kept = re.search("mm[.]|attention|attn|c10d", str(operator))
    if kept and not (biased and "grouped_mm" in str(operator)):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def compile_blocks(blocks: Iterable[nn.Module], config: Any) -> None:
    """Compile each block on its own: blocks are alike, so they share the compiled graphs."""
    # With few lengths, compile a graph for each, for training and for validation. Otherwise let the
    # compiler find one graph for all lengths.
    few_lengths = config.pad_to_multiple_of > 1 or config.batching == "packed"
    # After so many graphs, blocks would run in eager mode. The second limit counts all of them.
    torch._dynamo.config.recompile_limit = 10_000
    torch._dynamo.config.accumulated_recompile_limit = 10_000
    for block in blocks:
        block.compile(dynamic=False if few_lengths else None)


def use_float8(model: nn.Module) -> None:
    """Run the matmuls of the blocks' linear layers in float8, in forward and backward.

    Inputs, weights and gradients are scaled by their largest value along the dimension that a
    matmul sums over, and rounded to 8 bits (arXiv 2209.05433). Parameters keep their names and
    their precision.
    """
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
        refuse("--precision float8 needs a GPU with float8 (Ada, Hopper or newer)")
    with refusing("--precision float8 needs the package torchao"):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def is_convertible(module: nn.Module, name: str) -> bool:
        divisible = all(size % 16 == 0 for size in module.weight.shape)  # the kernels require it
        return divisible and "router" not in name  # rounding could change which experts it picks

    # The gradient of a weight is a sum over tokens. The kernels need a multiple of 16, so pad them.
    recipe = replace(Float8LinearConfig.from_recipe_name("rowwise"), pad_inner_dim=True)
    convert_to_float8_training(model.get_decoder(), config=recipe, module_filter_fn=is_convertible)


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
        seed_by_name(seed, names[module])
        # NOTE: this also rebuilds the rotary frequencies. They are a buffer that no checkpoint
        # holds, and `to_empty` leaves garbage in it.
        model._init_weights(module)


def seed_by_name(seed: int, *names: Any) -> None:
    """Seed the random numbers of torch by --seed and by what they are for."""
    torch.manual_seed(zlib.crc32(" ".join(map(str, [seed, *names])).encode()))


# --- What optimizer and metrics ask of a model ----------------------------------------------------


def weight_decay_names(model: nn.Module) -> set[str]:
    """Return the names of parameters with weight decay: matrices except embeddings.

    NOTE: it looks at shapes, so call it before anything flattens the parameters.
    """
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim > 1
        and parameter not in embeddings
        and not name.endswith(("bias", "A_log"))  # A_log: decay rates of state-space models
    }


def fused_outputs(name: str, shape: torch.Size, config: Any) -> tuple:
    """Return which matrices of one input a parameter in a block holds: one or, if fused, several.

    Phi-3 has q, k and v in one parameter, and gate and up in another. Llama has each in its own. If
    an optimizer took them for one matrix, both would not train alike, though they compute the same.

    Returns:
        The dimension of the outputs, in how many groups they are, and how many outputs of a group
        belong to each matrix.
    """
    dim = -2 if shape[-1] == config.hidden_size else -1
    outputs = shape[dim]
    if re.search("gate_up_proj|mlp.input_linear", name):
        half = outputs // 2
        groups = half if config.model_type == "gpt_oss" else 1  # in turns, or one after the other
        return dim, groups, (half // groups,) * 2
    if re.search("self_attn.qkv_proj.weight|Wqkv|c_attn|query_key_value", name):
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        keys = (outputs // size - heads) // 2
        groups = keys if "query_key_value" in name else 1  # a head of keys with its queries
        return dim, groups, tuple(n * size // groups for n in (heads, keys, keys))
    return -2, 1, shape[-2:-1]


# Types whose layers use some parameters several times, or never.
OTHER_FLOPS = """
    aria_text bart blenderbot blenderbot-small diffllama gpt_neo hrm_text jetmoe laguna marian mbart
    mvp pegasus plbart trocr whisper
""".split()


def count_flops(model: nn.Module) -> tuple[int, int, int]:
    """Return the FLOPs of forward and backward per token, target token and squared length.

    NOTE: call it before the model is sharded.

    As in PaLM (arXiv 2204.02311, appendix B): 6 per parameter and token, in the head per parameter
    and target token, and 12 x heads x head size x length per token and layer for attention.
    Recomputation and padding do not count. Zeros if a model computes otherwise, as with windows,
    latent or linear attention. tests/strategies/test_types.py compares with torch's own count.
    """
    config = model.config
    if (
        set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}
        or config.model_type in OTHER_FLOPS
        or config.model_type not in BUCKETED_TYPES.split()
        or getattr(config, "sliding_window", None)
        or hasattr(config, "kv_lora_rank")
    ):
        return 0, 0, 0
    in_head = model.get_output_embeddings().weight.numel()
    in_blocks = model.num_parameters(exclude_embeddings=True)  # these are looked up
    if not config.tie_word_embeddings:
        in_blocks -= in_head
    used = getattr(config, "num_experts_per_tok", None)  # by each token
    for name, parameter in model.named_parameters():
        if used and ".experts." in name and parameter.ndim == 3:  # [experts, ...]
            in_blocks -= parameter[used:].numel()
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 6 * in_blocks, 6 * in_head, 12 * config.num_hidden_layers * heads * head_size
