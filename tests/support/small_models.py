"""A small model of each type of transformers, with random weights."""

from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError

import model as shared_model

VOCABULARY = 320
# Names of sizes in the configs -> a small value.
SMALL_SIZES = {
    **dict.fromkeys(["hidden_size", "n_embd", "d_model", "word_embed_proj_dim"], 64),
    **dict.fromkeys(["intermediate_size", "ffn_dim", "n_inner", "intermediate_size_mlp"], 96),
    **dict.fromkeys(["decoder_ffn_dim", "encoder_ffn_dim", "dff", "ffn_hidden_size"], 96),
    **dict.fromkeys(["shared_intermediate_size", "dense_intermediate_size"], 96),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size"], 32),
    **dict.fromkeys(["moe_shared_expert_intermediate_size", "expert_ffn_hidden_size"], 32),
    **dict.fromkeys(["shared_experts_intermediate_size", "router_hidden_size"], 32),
    **dict.fromkeys(["q_lora_rank", "kv_lora_rank", "ple_embed_dim", "mamba_d_head"], 32),
    **dict.fromkeys(["qk_head_dim", "mamba_head_dim"], 32),
    **dict.fromkeys(["head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"], 16),
    **dict.fromkeys(["kv_channels", "rotary_dim", "linear_key_head_dim"], 16),
    **dict.fromkeys(["linear_value_head_dim", "linear_head_dim", "global_head_dim"], 16),
    **dict.fromkeys(["index_head_dim", "index_n_heads", "index_topk", "time_step_rank"], 16),
    **dict.fromkeys(["hidden_size_per_layer_input", "mamba_d_state", "state_size"], 16),
    **dict.fromkeys(["ssm_state_size", "chunk_size", "mamba_chunk_size", "mamba_dt_rank"], 16),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads"], 4),
    **dict.fromkeys(["decoder_attention_heads", "encoder_attention_heads"], 4),
    **dict.fromkeys(["linear_num_heads", "linear_num_key_heads", "linear_num_value_heads"], 4),
    **dict.fromkeys(["mamba_n_heads", "mamba_num_heads", "num_experts", "num_local_experts"], 4),
    **dict.fromkeys(["n_routed_experts", "moe_num_experts"], 4),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers", "num_layers"], 2),
    **dict.fromkeys(["decoder_layers", "encoder_layers", "moe_k", "moe_topk"], 2),
    **dict.fromkeys(["num_key_value_heads", "num_kv_heads", "zero_expert_num"], 2),
    **dict.fromkeys(["num_experts_per_tok", "num_experts_per_token", "top_k_experts"], 2),
    **dict.fromkeys(["n_group", "topk_group", "num_expert_group", "n_groups"], 1),
    **dict.fromkeys(["n_shared_experts", "num_shared_experts", "moe_num_shared_experts"], 1),
    **dict.fromkeys(["first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"], 1),
    **dict.fromkeys(["mamba_n_groups", "num_kv_shared_layers"], 1),
    **dict.fromkeys(["vocab_size", "decoder_vocab_size"], VOCABULARY),
    "vocab_size_per_layer_input": VOCABULARY,
}
# Sizes that do not go together in some types: use the first variant that transformers accepts.
VARIANTS = [{}, {"num_key_value_heads": 4}, {"num_key_value_heads": 4, "head_dim": None}]
ROTATION = {"rope_type": "default", "rope_theta": 1e4}
BOTH_KINDS = {"layer_types": ["linear_attention", "full_attention"]}
# What single types need besides, for example to have a layer of each kind.
CHANGES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere": {"logit_scale": 1.0},
    "cohere2": {"logit_scale": 1.0},
    "cohere2_moe": {"logit_scale": 1.0},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": ROTATION, "sliding_attention": ROTATION}
    },
    "deepseek_v2": {"num_key_value_heads": 4, "num_experts_per_tok": 2, "topk_group": 1},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_text": {
        "num_key_value_heads": 4,
        "per_layer_config": {
            "2": {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
        },
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 16},
    "granitemoehybrid": BOTH_KINDS,
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"head_dim": 32},
    "minicpm3": {"dim_model_base": 64},  # makes logits_scaling 1
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_topk_blocks": 2,
        "index_block_size": 8,
    },
    "ministral": {"head_dim": 16},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 32,
    },
    "zaya": {"layer_types": ["hybrid", "hybrid_sliding"], "sliding_window": 64},
}


def small_config(name: str, variant: dict[str, Any]) -> transformers.PreTrainedConfig:
    config_class = transformers.CONFIG_MAPPING[name]
    default = config_class()
    settings = default.to_dict()
    depth = getattr(default, "num_hidden_layers", 0)
    per_layer = {
        key: value
        for key, value in settings.items()
        if isinstance(value, (list, tuple)) and len(value) == depth > 5
    }
    # One layer of each kind, but at least two.
    columns = [per_layer.get(key, depth * [0]) for key in ("layer_types", "mlp_layer_types")]
    kinds = list(zip(*columns))
    chosen = sorted({kinds.index(kind) for kind in kinds} | {depth - 1})
    chosen = chosen[: max(2, len(set(kinds)))]
    changes: dict[str, Any] = {"pad_token_id": None}
    for key, value in settings.items():
        if key in per_layer:
            changes[key] = [value[i] for i in chosen]
        elif key in ("num_hidden_layers", "n_layer", "n_layers") and chosen:
            changes[key] = len(chosen)
        elif isinstance(value, float) and ("drop" in key or "jitter" in key):
            changes[key] = 0.0  # no chance: both sides have to see the same
        elif key in SMALL_SIZES and isinstance(value, int):
            changes[key] = min(value, SMALL_SIZES[key])
        elif value not in shared_model.NEUTRAL.get(key, [value]):
            changes[key] = None
        if key in variant:
            changes[key] = variant[key]
    return config_class(**changes | CHANGES.get(name, {}))


def plain_model(name: str, **changes) -> transformers.PreTrainedModel:
    """Return a small model of the type with random weights, and transformers' plainest attention.

    Args:
        changes: of the config.
    """
    problems = []
    for variant in VARIANTS:
        try:
            config = small_config(name, variant)
            for key, value in changes.items():
                setattr(config, key, value)
            # ALiBi is added twice in eager Falcon.
            attention = None if getattr(config, "alibi", False) else "eager"
            model = transformers.AutoModelForCausalLM.from_config(
                config, attn_implementation=attention, dtype=torch.float32
            )
            model(input_ids=torch.arange(8)[None], use_cache=False)
        except (TypeError, ValueError, RuntimeError, AttributeError, StrictDataclassError) as error:
            problems.append(error)
            continue
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn_like(parameter)
                parameter.copy_(noise * 0.1 if parameter.ndim > 1 else parameter + noise * 0.02)
        return model
    raise ValueError(f"{name} cannot be built: {problems}")
