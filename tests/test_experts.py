"""Mixtures of experts in the section Model: shapes, FLOPs, decay, and what a count moves."""

import pytest
import torch
from conftest import EXPERTS, SMALL, metrics, small_mixture
from transformers import AutoModelForCausalLM, Ernie4_5_MoeConfig, MiniMaxM2Config

import fsdp2_pretrain as script


def build(model: str, **flags):
    config = script.Config(model=model, **SMALL | flags)
    return script.build_model(config, script.build_model_config(config, 257, 256))


def test_the_shape_of_qwen3_30b_a3b():
    """30.5 billion parameters, of which a token uses 3.3 billion, with the hub's vocabulary."""
    config = script.Config(model="qwen3-30b-a3b", **SMALL)
    model = script.build_model(config, script.build_model_config(config, 151_936, 151_645))
    size = script.ModelSize(model)
    assert size.num_parameters == 30_532_122_624
    assert size.in_blocks + 2 * size.in_head == 3_353_032_704


@pytest.mark.parametrize("model", ["tiny", "tiny-moe"])
def test_small_shapes_are_initialized_and_learn_from_every_parameter(model):
    model = build(model)
    script.initialize(model.modules(), model, torch.device("cpu"))
    model.tie_weights()
    ids = torch.arange(256)[None]
    model(input_ids=ids, labels=ids.flip(1)).backward()
    assert all(parameter.grad.norm() > 0 for parameter in model.parameters())


def test_decay_spares_what_is_added_to_scores(tmp_path):
    """Ernie's bias of its routers is a parameter of two dimensions."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    Ernie4_5_MoeConfig(**sizes, vocab_size=320, moe_num_experts=4, moe_k=2).save_pretrained(
        tmp_path
    )
    model = build(str(tmp_path))
    names = dict(model.named_parameters()).keys()
    kept = names - script.weight_decay_names(model)
    assert any("e_score_correction_bias" in name for name in names)
    assert all("bias" in name or "norm" in name or "embed" in name for name in kept)
    assert not any("bias" in name for name in names - kept)


def test_a_count_moves_each_bias_towards_the_mean(tmp_path):
    small_mixture().save_pretrained(tmp_path)
    model = build(str(tmp_path))
    script.initialize(model.modules(), model, torch.device("cpu"))
    model.expert_counts = torch.tensor([[5, 3, 4, 4], [16, 0, 0, 0]])
    load = script.adjust_router_biases(model, 0.25)
    assert load == 4.0  # 16 of 4 in the mean
    first, second = (layer.mlp.e_score_correction_bias for layer in model.model.layers)
    assert first.tolist() == [-0.25, 0.25, 0.0, 0.0]
    assert second.tolist() == [-0.25, 0.25, 0.25, 0.25]
    assert model.expert_counts.sum() == 0


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_tokens_with_a_label_are_counted_once_and_in_training_alone(tmp_path, mode):
    small_mixture().save_pretrained(tmp_path)
    model = build(str(tmp_path), activation_checkpointing=mode)
    script.initialize(model.modules(), model, torch.device("cpu"))
    model.tie_weights()
    ids = torch.arange(60).view(2, 30)
    labels = ids.masked_fill(ids % 3 == 0, -100)
    model.eval()
    model(input_ids=ids, labels=labels)
    assert model.expert_counts is None
    model.train()
    for micro_batches in (1, 2):
        model(input_ids=ids, labels=labels).backward()
        assert model.expert_counts.sum(1).tolist() == [micro_batches * 40 * 2] * 2


def test_a_model_without_experts_counts_nothing(shape_directory):
    model = build(shape_directory)
    script.initialize(model.modules(), model, torch.device("cpu"))
    ids = torch.arange(60).view(2, 30)
    model(input_ids=ids, labels=ids).backward()
    assert model.expert_counts is None


def test_a_bias_is_saved_and_loaded_by_plain_transformers(tmp_path):
    model = AutoModelForCausalLM.from_config(small_mixture())
    assert isinstance(model.config, MiniMaxM2Config)
    model.model.layers[0].mlp.e_score_correction_bias += torch.arange(4.0)
    model.save_pretrained(tmp_path, save_original_format=False)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.model.layers[0].mlp.e_score_correction_bias.tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    "script, ranks",
    [(EXPERTS, 2), pytest.param("fsdp2_pretrain.py", 1, marks=pytest.mark.drill)],
)
def test_a_resumed_run_goes_on_with_the_same_biases(run, mixture_directory, script, ranks):
    """To the last bit on as many ranks. The new start writes in the background."""
    whole = run(EXPERTS, 2, model=mixture_directory, checkpoint_every=4, keep_checkpoints=3)
    start = {"model": mixture_directory, "resume": whole / "checkpoints/step_00000004"}
    resumed = run(script, ranks, **start, async_checkpoint="true", checkpoint_style="stateful")
    lines, again = metrics(whole)[0][4:], metrics(resumed)[0]
    for key in ("step", "loss", "grad_norm", "expert_load", "tokens"):
        one, other = ([line[key] for line in part] for part in (lines, again))
        assert one == other if script == EXPERTS else one == pytest.approx(other, rel=1e-4)
    if script == EXPERTS:
        files = [(each / "hf/model.safetensors").read_bytes() for each in (whole, resumed)]
        assert files[0] == files[1]
