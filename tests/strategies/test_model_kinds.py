"""What real model types need: fp32 inputs, no decay of state-space parameters, many lengths."""

import copy
import importlib
import warnings

import pytest
import script_parts as parts
import torch
from launching import SMALL, small_mixture, small_shape
from small_models import plain_model
from test_types import CPU, build, summed_loss
from torch.distributed.fsdp import FSDPModule

import common
import fsdp1_pretrain
import fsdp2_pretrain
import model as shared_model
import run

# Flags for one rank.
ALONE = {
    "fsdp2_pretrain": {},
    "fsdp2_muon_pretrain": {},
    "fsdp2_tp_pretrain": {"tensor_parallel": 1},
    "fsdp2_cp_pretrain": {"context_parallel": 1},
    "fsdp2_pp_pretrain": {"pipeline_parallel": 1},
    "fsdp2_ep_pretrain": {"expert_parallel": 1},
    "fsdp2_nd_pretrain": {"tensor_parallel": 1, "context_parallel": 1, "pipeline_parallel": 1},
    "fsdp2_sft": {},
    "fsdp2_lora": {},
    "fsdp2_grpo": {},
}
pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("name", ["olmo", "mpt"])
def test_bf16_losses_of_fsdp1_and_fsdp2_are_equal_to_the_last_bit(name, tmp_path):
    """OLMo's rotary embeddings and MPT's attention biases are fp32 inputs of a block."""
    plain_model(name).save_pretrained(tmp_path, save_original_format=False)
    tokenizer = common.load_tokenizer("bytes")
    losses = []
    for script in (fsdp1_pretrain, fsdp2_pretrain):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # FSDP1 says that one rank shards nothing
            model = build(script, tmp_path, tokenizer, precision="bf16")
            common.load_weights(model, str(tmp_path))
            losses.append(summed_loss(model.train(), "bucketed").item())
    assert losses[0] == losses[1]


@pytest.mark.parametrize("name", ALONE)
def test_no_fsdp2_script_casts_the_inputs_of_blocks(name, tmp_path):
    script = importlib.import_module(name)
    shape = small_mixture() if name == "fsdp2_ep_pretrain" else small_shape()
    shape.save_pretrained(tmp_path)
    flags = {} if name == "fsdp2_grpo" else SMALL
    config = script.Config(model=str(tmp_path), precision="bf16", **flags | ALONE[name])
    model = script.parallelize(parts.build_model(script, shape, config), config, CPU)
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    assert len(units) >= 2
    for unit in units:
        policy = unit._get_fsdp_state()._mp_policy
        assert policy.param_dtype == torch.bfloat16 and not policy.cast_forward_inputs


@pytest.mark.parametrize("name", ["afmoe", "ernie4_5_moe", "laguna"])
def test_the_biases_of_routers_stay_fp32(name, tmp_path):
    """In these types they are frozen parameters, which FSDP would round to bf16."""
    model = plain_model(name)
    expected = {
        key: torch.randn_like(tensor, dtype=torch.float32)
        for key, tensor in model.state_dict().items()
        if key.endswith(("e_score_correction_bias", "expert_bias", "moe_statics.bias"))
    }
    assert expected
    model.load_state_dict(expected, strict=False)
    model.save_pretrained(tmp_path, save_original_format=False)
    tokenizer = common.load_tokenizer("bytes")
    for script in (fsdp1_pretrain, fsdp2_pretrain):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # FSDP1 says that one rank shards nothing
            sharded = build(script, tmp_path, tokenizer, precision="bf16")
            common.load_weights(sharded, str(tmp_path))
            summed_loss(sharded, "bucketed")
        found = {key.replace("_fsdp_wrapped_module.", ""): b for key, b in sharded.named_buffers()}
        for key, bias in expected.items():
            assert found[key].dtype == torch.float32 and torch.equal(found[key], bias), key


# --- Weight decay ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mamba", "jamba", "kimi_linear", "falcon_mamba", "qwen3_next"])
def test_state_space_parameters_do_not_decay(name):
    """Mamba's own code excludes them. Decay would pull each rate exp(A_log) towards 1."""
    model = plain_model(name)
    own = {key for key, _ in model.named_parameters() if key.endswith((".A_log", ".D", ".dt_bias"))}
    assert own
    decayed = shared_model.weight_decay_names(model)
    assert decayed and not own & decayed


# --- Compiling many lengths -----------------------------------------------------------------------


class Block(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def test_more_lengths_than_torch_expects_are_still_compiled(monkeypatch):
    """By default torch stops at 256 graphs in all, whatever `recompile_limit` is."""
    compile_block = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda block, **more: compile_block(block, **more, backend=seen)
    )
    graphs = []

    def seen(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    block = Block()
    config = fsdp2_pretrain.Config(compile=True, pad_to_multiple_of=2)
    shared_model.compile_blocks([block], config)
    for length in range(1, 301):
        block(torch.zeros(length, 2))
    torch._dynamo.reset()
    assert len(graphs) == 300


def test_a_parameter_that_no_rank_trains_ends_the_run(monkeypatch):
    """A single rank may lack a gradient, and the optimizer may lack parameters of the model."""
    model = torch.nn.ModuleDict({name: torch.nn.Linear(1, 1, bias=False) for name in "abc"})
    model["c"].requires_grad_(False)
    optimizer = torch.optim.AdamW([model["a"].weight, model["b"].weight])
    model["a"](torch.ones(1)).sum().backward()
    optimizer.step()
    monkeypatch.setattr(run, "gather", lambda named: [named, {"b.weight": True}, {}])
    run.refuse_untrained(model, optimizer)
    monkeypatch.setattr(run, "gather", lambda value: [value, value])
    with pytest.raises(common.Refusal, match="^no gradient reaches b.weight: "):
        run.refuse_untrained(model, optimizer)


def test_selective_recomputation_changes_no_gradient_of_experts_with_biases():
    """transformers adds the biases in place to results of matmuls, which would be kept."""
    ids, gradients = torch.arange(64)[None], []
    plain = plain_model("gpt_oss").train()
    for mode in ("none", "selective"):
        model = copy.deepcopy(plain)
        shared_model.checkpoint_activations(shared_model.transformer_blocks(model), mode)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))
