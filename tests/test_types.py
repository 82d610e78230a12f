"""Every type of causal language model trains as in plain transformers, or is refused.

Each proven type is built tiny and random. What the scripts' section Model makes of it is compared
with transformers' own forward of each row alone: the loss, every gradient, the names of weights.
"""

import contextlib
import itertools
import json
import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from huggingface_hub.errors import StrictDataclassError

import common
import fsdp2_ep_pretrain
import fsdp2_pp_pretrain
import fsdp2_pretrain as script

VOCABULARY = 320
# Names of sizes in the configs -> a small value. Not all of them go together in each type.
SMALL_SIZES = {
    **dict.fromkeys(["hidden_size", "n_embd", "word_embed_proj_dim"], 64),
    **dict.fromkeys(["intermediate_size", "ffn_dim", "n_inner", "intermediate_size_mlp"], 96),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size"], 32),
    **dict.fromkeys(["expert_ffn_hidden_size", "q_lora_rank", "kv_lora_rank"], 32),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "num_layers", "moe_k"], 2),
    **dict.fromkeys(["num_key_value_heads", "num_experts_per_tok", "moe_topk"], 2),
    **dict.fromkeys(["num_attention_heads", "n_head", "num_experts", "num_local_experts"], 4),
    **dict.fromkeys(["n_routed_experts", "moe_num_experts"], 4),
    **dict.fromkeys(["head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"], 16),
    **dict.fromkeys(["kv_channels"], 16),
    **dict.fromkeys(["n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"], 1),
    "vocab_size": VOCABULARY,
}
# What else to try: the first that transformers takes is used.
VARIANTS = [{}, {"num_key_value_heads": 4}, {"num_key_value_heads": 4, "head_dim": None}]
# Those that stages of a pipeline are not made for.
OTHER_PARTS = set("gpt2 gpt_bigcode gpt_neox hrm_text moshi opt persimmon phi".split())
# Those whose experts `fsdp2_ep_pretrain.py` takes.
MIXTURES = (
    "afmoe axk1 deepseek_v3 ernie4_5_moe exaone_moe flex_olmo glm4_moe glm4_moe_lite granitemoe "
    "granitemoeshared hy_v3 kolibri1 laguna mellum minimax_m2 mixtral olmoe phimoe qwen2_moe "
    "qwen3_moe solar_open"
).split()
ROWS = [np.random.default_rng(n).integers(0, 256, n + 1) for n in (40, 25, 64, 7, 33)]


def small_config(name: str, variant: dict[str, Any]) -> transformers.PreTrainedConfig:
    config_class = transformers.CONFIG_MAPPING[name]
    sizes = SMALL_SIZES | variant
    changes: dict[str, Any] = {"pad_token_id": None}
    for key, value in config_class().to_dict().items():
        if key in sizes and sizes[key] is not None:
            changes[key] = sizes[key]
        elif isinstance(value, float) and ("drop" in key or "jitter" in key):
            changes[key] = 0.0  # no chance: both sides have to see the same
        elif key in ("layer_types", "mlp_layer_types") and value:
            changes[key] = value[-2:]
    return config_class(**changes)


def plain_model(name: str) -> transformers.PreTrainedModel:
    """A small model of the type with random weights, and transformers' plainest attention."""
    problems = []
    for variant in VARIANTS:
        try:
            config = small_config(name, variant)
            model = transformers.AutoModelForCausalLM.from_config(
                config, attn_implementation="eager", dtype=torch.float32
            )
            model(input_ids=torch.arange(8)[None], use_cache=False)
        except (TypeError, ValueError, RuntimeError, AttributeError) as problem:
            problems.append(problem)
            continue
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn_like(parameter)
                parameter.copy_(noise * 0.1 if parameter.ndim > 1 else parameter + noise * 0.02)
        return model
    raise ValueError(f"{name} cannot be built: {problems}")


def micro_batches(batching: str) -> list[dict[str, Any]]:
    lengths = np.array([len(row) - 1 for row in ROWS])
    batches = common.Batches(
        lengths,
        lengths,
        lambda i: (ROWS[i].astype(np.uint32), np.ones(len(ROWS[i]), bool)),
        batching=batching,
        max_length=64,
        micro_batch_tokens=192,
        pad_to_multiple_of=1,
        padding_id=256,
        seed=0,
    )
    return [batches.collate(rows) for rows in batches.plan(0)]


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:  # a router's bias may be a parameter that is not
            found[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return found


@pytest.fixture(scope="module")
def one_rank():
    """A process group, as `common.load_weights` asks all ranks."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.drill
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", sorted(common.MODEL_TYPES))
def test_a_type_trains_as_in_plain_transformers(name, tmp_path, monkeypatch):
    monkeypatch.setattr(common, "gather", lambda value: [value])  # there is one rank
    plain = plain_model(name)
    total = torch.zeros(())
    for row in ROWS:
        ids = torch.from_numpy(row)
        logits = plain(input_ids=ids[None, :-1], use_cache=False).logits[0]
        total += torch.nn.functional.cross_entropy(logits.float(), ids[1:], reduction="sum")
    total.backward()
    expected = gradients(plain)
    norm = math.sqrt(sum(gradient.double().square().sum() for gradient in expected.values()))
    plain.config.save_pretrained(tmp_path)
    # Under the names of the model, as `common.export` writes and `common.load_weights` reads them.
    plain.save_pretrained(tmp_path, save_original_format=False)
    for batching in ("bucketed", "packed"):
        config = script.Config(
            model=str(tmp_path),
            batching=batching,
            max_length=64,
            micro_batch_tokens=192,
            global_batch_tokens=192,
        )
        model_config = script.build_model_config(config, 257, 256)
        model = script.build_model(config, model_config)
        script.initialize(model.modules(), model, torch.device("cpu"))
        if model_config.tie_word_embeddings:
            model.tie_weights()
        script.ModelSize(model)
        common.load_weights(model, str(tmp_path))
        model.train()
        loss = torch.zeros(())
        for micro_batch in micro_batches(batching):
            loss += model(**micro_batch)
        loss.backward()
        assert loss.item() == pytest.approx(total.item(), rel=1e-6)
        seen = gradients(model)
        assert seen.keys() == expected.keys()
        for key, gradient in seen.items():
            assert (gradient - expected[key]).norm() < 1e-4 * norm, key


@pytest.mark.drill
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MIXTURES)
def test_dealt_experts_compute_the_same(name, precision, tmp_path, monkeypatch):
    """Of one rank, so that nothing but the computation of experts is another one."""
    monkeypatch.setattr(common, "gather", lambda value: [value])
    plain = plain_model(name)
    plain.config.save_pretrained(tmp_path)
    plain.save_pretrained(tmp_path, save_original_format=False)
    flags = {"model": str(tmp_path), "precision": precision, "max_length": 64}
    flags |= {"micro_batch_tokens": 192, "global_batch_tokens": 192}
    seen = []
    for module, own in ((script, {}), (fsdp2_ep_pretrain, {"expert_parallel": 1})):
        config = module.Config(**flags, **own)
        model = module.build_model(config, module.build_model_config(config, 257, 256))
        model = module.parallelize(model, config, torch.device("cpu"))
        common.load_weights(model, str(tmp_path))
        model.train()
        torch.manual_seed(0)  # Phi's routers draw lots
        loss = torch.zeros(())
        for micro_batch in micro_batches("bucketed"):
            loss += model(**micro_batch)
        loss.backward()
        of_model = {key: whole.full_tensor() for key, whole in gradients(model).items()}
        seen.append((loss.item(), model.expert_counts, of_model))
    (loss, counts, expected), (got_loss, got_counts, got) = seen
    assert got_counts.equal(counts) and counts.sum() > 0
    assert got_loss == loss
    norm = math.sqrt(sum(gradient.double().square().sum() for gradient in expected.values()))
    for key, gradient in expected.items():
        assert (got[key] - gradient).norm() < 1e-4 * norm, key


def stage_of(
    config: fsdp2_pp_pretrain.Config, weights: dict[str, torch.Tensor], stage: int
) -> torch.nn.Module:
    """One of two stages, without ranks: what `parallelize` makes, with given weights."""
    pp = fsdp2_pp_pretrain
    model_config = pp.build_model_config(config, 257, 256)
    model = pp.build_model(config, model_config)
    pp.check_model(model, config)
    model.stage = SimpleNamespace(is_last=stage == 1)
    model.forward = partial(pp.stage_forward, model, model.forward, config.micro_batch_tokens)
    pp.keep_stage(model, stage, 2)
    pp.initialize(model.modules(), model, torch.device("cpu"))
    if model_config.tie_word_embeddings and stage == 1:
        model.tie_weights()
    missing, _ = model.load_state_dict(weights, strict=False)
    assert not missing
    return model.train()


@pytest.mark.drill
@pytest.mark.parametrize("name", sorted(common.MODEL_TYPES))
def test_a_type_in_two_stages_is_right_or_refused(name, tmp_path):
    """Loss and gradients, of both stages together, are those of the whole model."""
    weights = plain_model(name).state_dict()
    config = plain_model(name).config
    config.save_pretrained(tmp_path)
    flags = {"model": str(tmp_path), "max_length": 64, "pipeline_parallel": 1}
    flags |= {"micro_batch_tokens": 192, "global_batch_tokens": 192}
    for batching in ("bucketed", "packed"):
        config = fsdp2_pp_pretrain.Config(**flags, batching=batching)
        model_config = script.build_model_config(config, 257, 256)
        model = script.build_model(config, model_config)
        if name in OTHER_PARTS:
            with pytest.raises(common.Refusal, match="can be cut into stages"):
                fsdp2_pp_pretrain.check_model(model, config)
            continue
        script.initialize(model.modules(), model, torch.device("cpu"))
        if model_config.tie_word_embeddings:
            model.tie_weights()
        model.load_state_dict(weights)
        model.train()
        first, last = (stage_of(config, weights, stage) for stage in (0, 1))
        for micro_batch in micro_batches(batching):
            expected = model(**micro_batch)
            expected.backward()
            first.micro_batches = last.micro_batches = itertools.repeat(micro_batch)
            loss = last(first())
            loss.backward()
            assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        norm = math.sqrt(sum(g.double().square().sum() for g in gradients(model).values()))
        seen = gradients(first)
        for key, gradient in gradients(last).items():  # both have a tied embedding
            seen[key] = seen[key] + gradient if key in seen else gradient
        assert seen.keys() == gradients(model).keys()
        for key, gradient in gradients(model).items():
            assert (seen[key] - gradient).norm() < 1e-5 * norm, key


def test_all_other_types_are_refused_in_one_line(tmp_path):
    refused = 0
    for name in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        config_class = transformers.CONFIG_MAPPING[name]
        # Some types refuse their own defaults.
        with contextlib.suppress(StrictDataclassError, ValueError):
            if config_class().get_text_config().model_type in common.MODEL_TYPES:
                continue
        directory = tmp_path / name
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps({"model_type": name}))
        with pytest.raises(common.Refusal, match=f"model {directory}.*"):
            common.read_model_config(str(directory), 1, 1, "bucketed")
        refused += 1
    assert refused > 100


def test_the_language_model_of_a_composite_trains(tmp_path):
    text = {"hidden_size": 32, "num_hidden_layers": 2, "sliding_window": 64}
    transformers.Gemma3Config(text_config=text).save_pretrained(tmp_path)
    config = common.read_model_config(str(tmp_path), 257, 64, "packed")
    assert config.model_type == "gemma3_text" and config.hidden_size == 32


def test_what_quantized_files_say_of_themselves_is_not_said_of_ours(tmp_path):
    config = transformers.LlamaConfig(quantization_config={"quant_method": "fp8"})
    config.save_pretrained(tmp_path)
    common.read_model_config(str(tmp_path), 257, 64, "packed").save_pretrained(tmp_path / "hf")
    assert "quantization" in (tmp_path / "config.json").read_text()
    assert "quantization" not in (tmp_path / "hf/config.json").read_text()


def longrope(length: int) -> dict[str, Any]:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    return {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 16.0,
        "original_max_position_embeddings": length,
        **factors,
    }


@pytest.mark.parametrize(
    "config, expected",
    [
        (transformers.MixtralConfig(output_router_logits=True), "its output_router_logits"),
        (transformers.GraniteConfig(logits_scaling=8.0), "its logits_scaling"),
        (transformers.Gemma3TextConfig(use_bidirectional_attention=True), "its use_bidirectional"),
        (transformers.Gemma3TextConfig(final_logit_softcapping=30.0), "its final_logit_softcap"),
        (transformers.GPT2Config(), "packed knows no attn_pdrop, 0.1"),
        (
            transformers.LlamaConfig(
                hidden_size=64,
                num_attention_heads=4,
                rope_parameters=longrope(32),
                max_position_embeddings=4096,
            ),
            "exceeds original_max_position_embeddings",
        ),
        (
            transformers.LlamaConfig(layer_types=["linear_attention"] * 32),
            "its layers of linear_attention",
        ),
    ],
    ids=itertools.count(),
)
def test_settings_that_are_not_applied_are_refused(config, expected, tmp_path):
    config.save_pretrained(tmp_path)
    with pytest.raises(common.Refusal, match=expected):
        common.read_model_config(str(tmp_path), 257, 64, "packed")
