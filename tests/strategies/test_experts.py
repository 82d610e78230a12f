"""MoE models: shapes and FLOPs, counting and balancing, and files with separate experts."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import script_parts as parts
import torch
from launching import EXPERTS, ROOT, RUN_FLAGS, SIZES, SMALL, launch, metrics, small_mixture
from safetensors.torch import load_file
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from transformers import (
    AutoModelForCausalLM,
    Ernie4_5_MoeConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)

import common
import fsdp2_ep_pretrain as script
import model as shared_model

CPU = torch.device("cpu")


def build(model: str, initialized: bool = True, **flags):
    config = script.Config(model=model, expert_parallel=1, **SMALL | flags)
    tokenizer = common.load_tokenizer("bytes")
    model = parts.build_model(script, parts.build_config(config, tokenizer), config)
    if initialized:
        shared_model.initialize(model, model.modules(), config.seed, CPU)
        model.tie_weights()
    return model


# --- Shapes ---------------------------------------------------------------------------------------


def test_the_shape_of_qwen3_30b_a3b():
    """It has 30.5 billion parameters, of which a token uses 3.3 billion."""
    config = script.Config(model="qwen3-30b-a3b", expert_parallel=1, **SMALL)
    tokenizer = SimpleNamespace(get_vocab=lambda: {"last": 151_935}, eos_token_id=151_645)
    model = parts.build_model(script, parts.build_config(config, tokenizer), config)
    assert model.num_parameters() == 30_532_122_624
    per_token, per_target, _ = shared_model.count_flops(model)
    embedding = 151_936 * 2048  # a look-up has no FLOPs
    assert per_token + per_target == 6 * (3_353_032_704 - embedding)


def test_tiny_moe_learns_from_every_parameter():
    model = build("tiny-moe")
    ids = torch.arange(256)[None]
    model(input_ids=ids, labels=ids.flip(1)).backward()
    assert all(parameter.grad.norm() > 0 for parameter in model.parameters())


@pytest.mark.parametrize(
    "shards, shape, dimension",
    [(2, (4, 6, 5), 0), (3, (4, 6, 5), 1), (4, (2, 8, 5), 1), (3, (4, 8, 5), 0), (1, (4, 6, 5), 0)],
)
def test_experts_that_shards_do_not_divide_are_sharded_by_rows(shards, shape, dimension):
    parameter = SimpleNamespace(to_local=lambda: torch.empty(shape))
    assert script.choose_dimension(shards, parameter).dim == dimension


def test_biases_do_not_decay_and_are_not_trained(tmp_path):
    """The bias of Ernie's routers is a frozen parameter of two dimensions."""
    sizes = {**SIZES, "moe_intermediate_size": 16, "num_key_value_heads": 2}
    shape = Ernie4_5_MoeConfig(**sizes, moe_num_experts=4, moe_k=2)
    shape.save_pretrained(tmp_path)
    model = build(str(tmp_path))
    assert model.state_dict().keys() == AutoModelForCausalLM.from_config(shape).state_dict().keys()
    [bias] = [name for name in model.state_dict() if "e_score" in name]
    assert bias in dict(model.named_buffers()) and bias not in shared_model.weight_decay_names(
        model
    )
    assert all(parameter.requires_grad for parameter in model.parameters())


# --- Counting and balancing -----------------------------------------------------------------------


def test_a_count_moves_each_bias_towards_the_mean(tmp_path):
    small_mixture().save_pretrained(tmp_path)
    model = build(str(tmp_path))
    layers = script.moe_layers(model)
    assert len(layers) == 2
    counts = torch.tensor([[5, 3, 4, 4], [16, 0, 0, 0]])
    assert script.balance_experts(layers, counts, 0.25) == 4.0  # 16 tokens, and 4 in the mean
    first, second = (layer.e_score_correction_bias.tolist() for layer in layers)
    assert first == [-0.25, 0.25, 0.0, 0.0]
    assert second == [-0.25, 0.25, 0.25, 0.25]


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_target_tokens_are_counted_once_and_in_training_only(tmp_path, mode):
    small_mixture().save_pretrained(tmp_path)
    model = build(str(tmp_path))
    shared_model.checkpoint_activations(shared_model.transformer_blocks(model), mode)
    ids = torch.arange(60).view(2, 30)
    labels = ids.masked_fill(ids % 3 == 0, -100)
    layers = script.moe_layers(model)
    counts = torch.zeros(2, 4, dtype=torch.int64)
    for micro_batches in (1, 2):
        with script.counting_experts(layers, labels, counts):
            loss = model(input_ids=ids, labels=labels)
        loss.backward()
        assert counts.sum(1).tolist() == [micro_batches * 40 * 2] * 2
    model(input_ids=ids, labels=labels)
    assert counts.sum(1).tolist() == [160, 160]


@pytest.mark.parametrize(
    "resumed_by, ranks",
    [(EXPERTS, 2), pytest.param("fsdp2_pretrain.py", 1, marks=pytest.mark.drill)],
)
def test_a_resumed_run_continues_with_the_same_biases(run, mixture_directory, resumed_by, ranks):
    """To the last bit on as many ranks. FSDP2 does not balance, so its second step may differ."""
    full = run(EXPERTS, 2, model=mixture_directory, checkpoint_every=2, keep_checkpoints=3)
    start = {"model": mixture_directory, "resume": full / "checkpoints/step_00000002"}
    resumed = run(resumed_by, ranks, **start, async_checkpoint="true", checkpoint_style="stateful")
    lines, again = metrics(full)[0][2:], metrics(resumed)[0]
    if resumed_by != EXPERTS:
        for key in ("loss", "grad_norm", "tokens"):
            assert again[0][key] == pytest.approx(lines[0][key], rel=1e-4)
        return
    for key in ("step", "loss", "grad_norm", "expert_load", "tokens"):
        assert [line[key] for line in lines] == [line[key] for line in again]
    one, other = ((each / "hf/model.safetensors").read_bytes() for each in (full, resumed))
    assert one == other


# --- Order of collectives -------------------------------------------------------------------------


def test_all_gathers_are_issued_before_the_host_waits(one_rank, tmp_path, monkeypatch):
    """A block's experts and the next block are all-gathered from when the block begins.

    The dispatch waits for the GPU. All-gathers that the CPU issues after it overlap with less.
    """
    small_mixture(num_hidden_layers=3).save_pretrained(tmp_path)
    issued: list[str] = []

    def unshard(state: FSDPParamGroup, async_op: bool = False) -> None:
        if state._all_gather_result is None and not state.is_unsharded:
            issued.extend(re.findall("layers[.](.*)", state._module_fqn))  # not the root
        all_gather(state, async_op)

    def exchange(*words):
        issued.append("wait")
        return exchange_counts(*words)

    all_gather, exchange_counts = FSDPParamGroup.unshard, script.exchange_counts
    monkeypatch.setattr(FSDPParamGroup, "unshard", unshard)
    monkeypatch.setattr(script, "exchange_counts", exchange)
    config = script.Config(model=str(tmp_path), expert_parallel=1, **SMALL)
    model = script.parallelize(build(str(tmp_path), initialized=False), config, CPU)
    for block in shared_model.transformer_blocks(model):
        block.self_attn.register_forward_pre_hook(lambda *_: issued.append("attention"))
    ids = torch.arange(60).view(2, 30)
    model(input_ids=ids, labels=ids)
    assert issued == [
        *("0", "0.mlp.experts", "1", "attention", "wait"),
        *("1.mlp.experts", "2", "attention", "wait"),
        *("2.mlp.experts", "attention", "wait"),
    ]


# --- Files that hold experts one by one, as on the hub --------------------------------------------


def random_weights(name: str) -> torch.nn.Module:
    """Return a random model in bf16, with routers in fp32."""
    more = {"num_key_value_heads": 2, "head_dim": 8, "num_experts_per_tok": 2, "pad_token_id": None}
    more |= {"bos_token_id": None, "eos_token_id": None, "initializer_range": 0.1}
    config = {
        "minimax_m2": small_mixture(),
        "mixtral": MixtralConfig(**SIZES, **more, num_local_experts=4),
        "qwen3_moe": Qwen3MoeConfig(**SIZES, **more, num_experts=4, moe_intermediate_size=16),
    }[name]
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "gate.weight" in key or "e_score" in key:
            tensor.data = tensor.data.float() + 0.1 * torch.rand(tensor.shape)
    return model


@pytest.mark.parametrize("name", ["minimax_m2", "mixtral", "qwen3_moe"])
def test_the_command_for_such_files_converts_them_to_the_last_bit(monkeypatch, tmp_path, name):
    """Neither bf16 experts nor fp32 routers lose anything. docs/runs.md has the command."""
    hub, converted = tmp_path / "hub", tmp_path / "converted"
    model = random_weights(name)
    model.save_pretrained(hub)
    assert any(".experts.3." in key for key in load_file(hub / "model.safetensors"))
    monkeypatch.setattr(common, "gather", lambda value: [value])
    with pytest.raises(common.Refusal, match="docs/runs.md says .* one by one"):
        common.load_weights(build(str(hub)), str(hub))
    [code] = re.findall(r"`(M.from_pretrained\(.*\))`", (ROOT / "docs/runs.md").read_text())
    names = {"M": AutoModelForCausalLM, "DIR": str(hub), "OUT": str(converted)}
    exec(code, names)
    weights = load_file(converted / "model.safetensors")
    for key, tensor in model.state_dict().items():
        if key in weights:  # a tied head is not
            assert torch.equal(weights[key].float(), tensor.float()), key
    assert weights.keys() >= {key for key in model.state_dict() if "lm_head" not in key}


@pytest.mark.parametrize("name", ["hub", "converted"])
def test_a_run_starts_from_the_converted_files_only(corpus, tmp_path, name):
    model = random_weights("minimax_m2")
    model.save_pretrained(tmp_path / name, save_original_format=name == "hub")
    flags = RUN_FLAGS | {"steps": 1, "dataset": corpus, "run_dir": tmp_path / "run"}
    done = launch(2, EXPERTS, flags | {"init_from": tmp_path / name})
    if name == "converted":
        assert (done.returncode, done.stderr) == (0, "")
        return
    [line] = done.stderr.splitlines()
    assert done.returncode == 1 and line.startswith("error: ") and str(tmp_path / name) in line
    assert not Path(flags["run_dir"]).exists()
