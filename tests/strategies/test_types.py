"""Every model type in common's lists trains as in plain transformers. All others are refused.

Each listed type is built small and random. The loss and every gradient of what the scripts make of
it are compared with transformers' own forward of each document alone.
"""

import contextlib
import itertools
import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import script_parts as parts
import torch
import transformers
from grid import share
from huggingface_hub.errors import StrictDataclassError
from launching import SMALL
from small_models import plain_model
from torch.utils.flop_counter import FlopCounterMode

import common
import fsdp2_ep_pretrain
import fsdp2_pp_pretrain
import fsdp2_pretrain as script
import model as shared_model

BUCKETED_TYPES = shared_model.BUCKETED_TYPES.split()
PACKED_TYPES = shared_model.PACKED_TYPES.split()
# Types whose experts fsdp2_ep_pretrain.py can split.
MIXTURES = """
    afmoe axk1 axk2 bailing_hybrid beam cohere2_moe deepseek_v2 deepseek_v3 deepseek_v32 dots1
    dots3_note_text ernie4_5_moe exaone_moe flex_olmo glm4_moe glm4_moe_lite glm_moe_dsa
    granitemoe granitemoe_swa granitemoehybrid granitemoeshared hunyuan_v1_moe hy_v3 hy_v4
    jamba kimi_linear kolibri1 laguna lara_mini lfm2_moe mellum mimo_v2_flash minimax_m2
    minimax_m3_vl_text mixtral olmoe phimoe qwen2_moe qwen3_5_moe_text qwen3_moe qwen3_next
    qwen4_exp_text sarvam_mla sarvam_moe solar_open zaya
""".split()
# Types that fsdp2_pp_pretrain.py refuses.
NOT_IN_STAGES = """
    bamba bart biogpt blenderbot blenderbot-small bloom codegen ctrl falcon falcon_mamba
    gemma4_text glm_moe_dsa gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gptj
    granite_swa granitemoe_swa granitemoehybrid hrm_text hy_v4 jamba kimi_linear lfm2 lfm2_moe
    lfm3 mamba mamba2 marian mbart moshi mpt mvp nemotron_h opt pegasus persimmon phi plbart
    qwen4_exp_text trocr whisper zaya
""".split()
WINDOWED = "afmoe cohere2 exaone4 gemma3_text gpt_oss mimo_v2_flash mistral olmo3".split()
CPU = torch.device("cpu")
DOCUMENTS = [np.random.default_rng(n).integers(0, 256, n + 1) for n in (40, 25, 64, 7, 33)]
FLAGS = SMALL | {"max_length": 64, "micro_batch_tokens": 192, "global_batch_tokens": 192}


def micro_batches(batching: str) -> list[dict[str, Any]]:
    lengths = np.array([len(document) - 1 for document in DOCUMENTS])
    sequences = SimpleNamespace(
        lengths=lengths,
        num_targets=lengths,
        read=lambda i: (DOCUMENTS[i].astype(np.uint32), np.ones(len(DOCUMENTS[i]), bool)),
    )
    config = script.Config(**FLAGS, batching=batching)
    batches = common.Batches(sequences, config, padding_id=256)
    return [batches.collate(indices) for indices in batches.plan(0)]


def loss_alone(model: torch.nn.Module) -> torch.Tensor:
    """Return the loss summed over all target tokens, in plain transformers, without padding."""
    total = torch.zeros(())
    for document in DOCUMENTS:
        ids = torch.from_numpy(document)
        logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0]
        total += torch.nn.functional.cross_entropy(logits.float(), ids[1:], reduction="sum")
    return total


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    parameters = model.named_parameters()
    return {name: full(p.grad) for name, p in parameters if p.grad is not None}


def assert_equal(seen: dict, expected: dict, tolerance: float) -> None:
    """Compare gradients, relative to the norm of all of them."""
    norm = math.sqrt(sum(gradient.double().square().sum() for gradient in expected.values()))
    assert seen.keys() == expected.keys()
    for name, gradient in seen.items():
        assert (gradient - expected[name]).norm() < tolerance * norm, name


def summed_loss(model: torch.nn.Module, batching: str) -> torch.Tensor:
    loss = torch.zeros(())
    for micro_batch in micro_batches(batching):
        loss += model(**micro_batch)
    return loss


@pytest.fixture
def fill_with_nan(monkeypatch):
    """Fill memory that nothing has initialized with NaN."""
    to_empty = torch.nn.Module.to_empty

    def to_nan(module: torch.nn.Module, **options) -> torch.nn.Module:
        to_empty(module, **options)
        for tensor in itertools.chain(module.parameters(False), module.buffers(False)):
            tensor.data.fill_(math.nan if tensor.is_floating_point() else 12345)
        return module

    monkeypatch.setattr(torch.nn.Module, "to_empty", to_nan)


def build(module: Any, directory: Any, tokenizer: Any, **flags) -> torch.nn.Module:
    """Make of a config.json in `directory` what a script makes of it."""
    config = module.Config(model=str(directory), **FLAGS | flags)
    model = parts.build_model(module, parts.build_config(config, tokenizer), config)
    return module.parallelize(model, config, CPU)


@pytest.fixture(scope="module")
def tokenizer():
    return common.load_tokenizer("bytes")


@pytest.mark.drill
@pytest.mark.usefixtures("one_rank", "fill_with_nan")
@pytest.mark.parametrize("name", share(BUCKETED_TYPES))
def test_a_type_trains_as_in_plain_transformers(name, tokenizer, tmp_path):
    check_type(plain_model(name), tokenizer, tmp_path)


@pytest.mark.drill
@pytest.mark.usefixtures("one_rank", "fill_with_nan")
@pytest.mark.parametrize(
    "name, changes",
    share([("falcon", {"alibi": True})] + [(name, {"sliding_window": 16}) for name in WINDOWED]),
)
def test_settings_that_transformers_applies_itself(name, changes, tokenizer, tmp_path):
    check_type(plain_model(name, **changes), tokenizer, tmp_path, packed=False)


def check_type(
    plain: transformers.PreTrainedModel, tokenizer: Any, directory: Any, packed: bool = True
) -> None:
    buffers = dict(plain.named_buffers())
    total = loss_alone(plain)
    total.backward()
    expected = gradients(plain)
    # Under the model's own names, as `common.export` writes and `common.load_weights` reads them.
    plain.save_pretrained(directory, save_original_format=False)
    again = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    weights = again.state_dict()
    for key, weight in plain.state_dict().items():
        assert weights[key].equal(weight), key
    for batching in ("bucketed", "packed"):
        if batching == "packed" and not (packed and plain.config.model_type in PACKED_TYPES):
            continue
        model = build(script, directory, tokenizer, batching=batching)
        for key, parameter in model.named_parameters():
            assert full(parameter).isfinite().all(), f"{key} has no initial weights"
        for key, buffer in model.named_buffers():
            # Frozen biases of routers are buffers here. They begin as zeros.
            assert buffer.equal(buffers.get(key, torch.zeros_like(buffer))), f"buffer {key}"
        common.load_weights(model, str(directory))
        loss = summed_loss(model.train(), batching)
        loss.backward()
        assert loss.item() == pytest.approx(total.item(), rel=1e-6)
        assert_equal(gradients(model), expected, tolerance=1e-4)
        # DDP would wait for a gradient that never comes, and a checkpoint would lack its moments.
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
        with torch.no_grad():
            # Some types compute something else in evaluation, or change their weights for it.
            evaluated = summed_loss(model.eval(), batching).item()
        assert evaluated == pytest.approx(loss.item(), rel=1e-5)
        model = build(script, directory, tokenizer, batching=batching, precision="bf16")
        common.load_weights(model, str(directory))
        loss = summed_loss(model.train(), batching)
        loss.backward()
        assert loss.item() == pytest.approx(total.item(), rel=1e-2)


def check_flops(name: str) -> bool:
    """Whether the FLOPs of a type are counted. They have to be torch's own count then."""
    model, length = plain_model(name), 64
    per_token, per_target, per_square = shared_model.count_flops(model)
    if per_token == 0:
        return False
    if "experts" in str(model):
        model.set_experts_implementation("eager")
    ids = torch.randint(3, 256, (1, length), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    counted = length * (per_token + per_target) + length**2 * per_square
    # The formula takes biases and norms for matrices.
    counted -= 6 * length * sum(p.numel() for p in model.parameters() if p.ndim == 1)
    assert counted == pytest.approx(counter.get_total_flops(), rel=0.01), name
    return True


@pytest.mark.parametrize(
    "name, counted",
    [
        *[(name, True) for name in ("qwen2", "gpt2", "mixtral", "qwen3_moe", "ministral3")],
        *[(name, False) for name in ("mistral", "gpt_oss", "deepseek_v3", "qwen3_next", "lfm2")],
        *[(name, False) for name in ("aria_text", "jetmoe", "whisper", "gemma4_text", "mamba")],
    ],
)
def test_flops_are_torch_s_or_unknown(name, counted):
    """Unknown with windows, latent or linear attention, and where layers are used otherwise."""
    assert check_flops(name) == counted


@pytest.mark.drill
def test_flops_of_every_type_are_torch_s_or_unknown():
    counted = [name for name in BUCKETED_TYPES if check_flops(name)]
    assert len(counted) > 50


@pytest.mark.drill
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "name, precision",
    share(
        [(name, "fp32") for name in MIXTURES]
        + [(name, "bf16") for name in ("mixtral", "qwen3_moe")]
    ),
)
def test_split_experts_compute_the_same(name, precision, tokenizer, tmp_path):
    """One rank, so that only the computation of the experts differs."""
    plain_model(name).save_pretrained(tmp_path, save_original_format=False)
    seen = []
    for module, own in ((script, {}), (fsdp2_ep_pretrain, {"expert_parallel": 1})):
        model = build(module, tmp_path, tokenizer, precision=precision, **own)
        common.load_weights(model, str(tmp_path))
        torch.manual_seed(0)  # the routers of Phi are random
        loss = summed_loss(model.train(), "bucketed")
        loss.backward()
        seen.append((loss.item(), gradients(model)))
    (expected_loss, expected), (loss, found) = seen
    assert loss == pytest.approx(expected_loss, rel=1e-6 if precision == "fp32" else 1e-4)
    assert_equal(found, expected, tolerance=1e-4 if precision == "fp32" else 1e-2)


def stage_of(
    config: fsdp2_pp_pretrain.Config, tokenizer: Any, weights: dict[str, torch.Tensor], index: int
) -> torch.nn.Module:
    """Return one of two stages without ranks: what `parallelize` makes, with given weights."""
    pp = fsdp2_pp_pretrain
    model_config = parts.build_config(config, tokenizer)
    model = parts.build_model(pp, model_config, config)
    stage = pp.Stage(model, index, 2, config.micro_batch_tokens)
    model.stages = [SimpleNamespace(submod=stage, is_last=index == 1)]
    pp.keep_own_modules(model)
    shared_model.initialize(model, model.modules(), config.seed, CPU)
    if model_config.tie_word_embeddings and stage.is_last:
        model.tie_weights()
    missing, _ = model.load_state_dict(weights, strict=False)
    assert not missing
    return model.train()


@pytest.mark.drill
@pytest.mark.parametrize("name", share(BUCKETED_TYPES))
def test_a_type_in_two_stages_is_right_or_refused(name, tokenizer, tmp_path):
    """The loss and the gradients of both stages are those of the full model."""
    plain = plain_model(name)
    plain.config.save_pretrained(tmp_path)
    for batching in ("bucketed", "packed"):
        if batching == "packed" and name not in PACKED_TYPES:
            continue
        config = fsdp2_pp_pretrain.Config(
            model=str(tmp_path), **FLAGS, batching=batching, pipeline_parallel=1
        )
        model_config = parts.build_config(config, tokenizer)
        model = parts.build_model(fsdp2_pp_pretrain, model_config, config)
        try:
            fsdp2_pp_pretrain.check_model(model, config)
        except common.Refusal:
            assert name in NOT_IN_STAGES
            return
        assert name not in NOT_IN_STAGES
        shared_model.initialize(model, model.modules(), config.seed, CPU)
        if model_config.tie_word_embeddings:
            model.tie_weights()
        model.load_state_dict(plain.state_dict())
        model.train()
        first, last = (stage_of(config, tokenizer, plain.state_dict(), i) for i in (0, 1))
        for micro_batch in micro_batches(batching):
            expected = model(**micro_batch)
            expected.backward()
            stages = [model.stages[0].submod for model in (first, last)]
            for stage in stages:
                stage.micro_batches = itertools.repeat(micro_batch)
            loss = stages[1](stages[0]())
            loss.backward()
            assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        seen = gradients(first)
        for key, gradient in gradients(last).items():  # both have a tied embedding
            seen[key] = seen[key] + gradient if key in seen else gradient
        assert_equal(seen, gradients(model), tolerance=1e-5)


def read(
    directory: Any, batching: str = "packed", untested: bool = False
) -> transformers.PreTrainedConfig:
    config = SimpleNamespace(
        model=str(directory), batching=batching, max_length=64, untested_model=untested
    )
    return shared_model.read_config(config, 257)


def test_the_lists_are_long_enough():
    assert set(PACKED_TYPES) <= set(BUCKETED_TYPES)
    assert len(set(BUCKETED_TYPES)) == len(BUCKETED_TYPES) >= 130
    assert len(set(PACKED_TYPES)) == len(PACKED_TYPES) >= 58


def test_a_flag_trains_types_that_are_in_no_list(tmp_path, capsys):
    """Not those that are known to train in buckets only."""
    transformers.MambaConfig().save_pretrained(tmp_path / "mamba")
    transformers.XGLMConfig(attention_dropout=0.0).save_pretrained(tmp_path / "xglm")
    for batching in ("bucketed", "packed"):
        with pytest.raises(common.Refusal, match=f"xglm is not tested with {batching} batches"):
            read(tmp_path / "xglm", batching)
        assert read(tmp_path / "xglm", batching, untested=True).model_type == "xglm"
        assert capsys.readouterr().out.startswith("WARNING: --model")
    with pytest.raises(common.Refusal, match="mamba is not tested with packed"):
        read(tmp_path / "mamba", untested=True)


def test_all_other_types_are_refused_in_one_line(tmp_path):
    refused = 0
    for name in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        config_class = transformers.CONFIG_MAPPING[name]
        # Some types refuse their own defaults.
        with contextlib.suppress(StrictDataclassError, ValueError):
            if config_class().get_text_config().model_type in BUCKETED_TYPES:
                continue
        directory = tmp_path / name
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps({"model_type": name}))
        with pytest.raises(common.Refusal, match=f"model {directory}.*"):
            read(directory, "bucketed")
        refused += 1
    assert refused > 40


def test_the_language_model_of_a_composite_trains(tmp_path):
    text = {"hidden_size": 32, "num_hidden_layers": 2, "sliding_window": 64}
    transformers.Gemma3Config(text_config=text).save_pretrained(tmp_path)
    config = read(tmp_path)
    assert config.model_type == "gemma3_text" and config.hidden_size == 32


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 16.0,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
}


@pytest.mark.parametrize(
    "model_type, settings, expected",
    [
        ("mixtral", {"output_router_logits": True}, "its output_router_logits"),
        ("granite", {"logits_scaling": 8.0}, "its logits_scaling"),
        ("cohere", {}, "its logit_scale"),
        ("cohere_compass_text", {"logit_scale": 0.5}, "its logit_scale"),
        ("bamba", {"z_loss_coefficient": 0.1}, "its z_loss_coefficient"),
        ("doge", {"is_moe": True}, "its is_moe"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "its use_bidirectional"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "its is_causal"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "its final_logit_softcapping"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "its attn_logit_softcapping"),
        ("llama", {"is_causal": False}, "its is_causal"),
        ("gpt2", {"n_positions": 32}, "exceeds max_position_embeddings"),
        ("mpt", {"max_seq_len": 32}, "exceeds max_seq_len"),
        ("whisper", {"max_target_positions": 32}, "exceeds max_target_positions"),
        (
            "llama",
            {"hidden_size": 64, "num_attention_heads": 4, "rope_parameters": LONGROPE},
            "exceeds original_max_position_embeddings",
        ),
    ],
    ids=itertools.count(),
)
def test_settings_that_are_not_applied_are_refused(model_type, settings, expected, tmp_path):
    transformers.CONFIG_MAPPING[model_type](**settings).save_pretrained(tmp_path)
    with pytest.raises(common.Refusal, match=expected):
        read(tmp_path, "bucketed")


@pytest.mark.parametrize(
    "model_type, settings, expected",
    [
        ("gpt2", {}, "its attn_pdrop"),
        ("mistral", {"sliding_window": 32}, "exceeds sliding_window"),
        ("mamba", {}, "type mamba is not tested with packed batches"),
    ],
    ids=itertools.count(),
)
def test_settings_that_packed_attention_lacks_are_refused(model_type, settings, expected, tmp_path):
    transformers.CONFIG_MAPPING[model_type](**settings).save_pretrained(tmp_path)
    with pytest.raises(common.Refusal, match=expected):
        read(tmp_path)
    read(tmp_path, "bucketed")
