"""Mixtures of experts in the section Model: shapes, FLOPs, decay, and what a count moves.

And weights whose files hold experts one by one.
"""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import EXPERTS, RUN_FLAGS, SCRIPTS, SIZES, SMALL, launch, metrics, small_mixture, tree
from safetensors.torch import load_file, save_file
from test_types import plain_model
from transformers import (
    AutoModelForCausalLM,
    Ernie4_5_MoeConfig,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    MixtralConfig,
    Qwen3MoeConfig,
)

import common
import fsdp2_ep_pretrain
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


def test_experts_that_kernels_do_not_take_are_refused(tmp_path):
    """Grouped products want rows of a multiple of 16 bytes."""
    small_mixture(intermediate_size=36).save_pretrained(tmp_path)
    with pytest.raises(common.Refusal, match=r"sizes of experts have to be multiples of 8, not \["):
        build(str(tmp_path))


@pytest.mark.parametrize(
    "shards, shape, dimension",
    [(2, (4, 6, 5), 0), (3, (4, 6, 5), 1), (4, (2, 8, 5), 1), (3, (4, 8, 5), 0), (1, (4, 6, 5), 0)],
)
def test_experts_that_do_not_go_into_the_shards_are_cut_by_rows(shards, shape, dimension):
    part = SimpleNamespace(to_local=lambda: torch.empty(shape))
    assert fsdp2_ep_pretrain.choose_dimension(shards, part).dim == dimension


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
    assert all("bias" in name or "norm" in name or "embed" in name for name in kept)
    assert not any("bias" in name for name in names - kept)


@pytest.mark.parametrize("name", ["afmoe", "ernie4_5_moe", "laguna"])
def test_a_bias_that_is_a_frozen_parameter_is_a_buffer_here(name, tmp_path):
    """So it stays in fp32, where FSDP2 would cast it, and is moved. Files have the same names."""
    plain = plain_model(name)
    plain.config.save_pretrained(tmp_path)
    model = build(str(tmp_path))
    script.initialize(model.modules(), model, torch.device("cpu"))
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert all(parameter.requires_grad for parameter in model.parameters())
    ends = ("e_score_correction_bias", "expert_bias")
    biases = [bias for name, bias in model.named_buffers() if name.endswith(ends)]
    assert len(biases) == len(model.moe_layers) > 0
    model.expert_counts = torch.tensor([[5, 3, 4, 4]] * len(biases))
    script.adjust_router_biases(model, 0.25)
    assert all(bias.flatten().tolist() == [-0.25, 0.25, 0.0, 0.0] for bias in biases)


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


# --- Files that hold experts one by one, as on the hub --------------------------------------------


def mixture(name: str) -> torch.nn.Module:
    """A random one in bf16, whose routers and norms are in fp32."""
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


def both_forms(name: str, folder: Path) -> tuple[Path, Path]:
    """The directories of one model with its experts one by one, and fused."""
    model = mixture(name)
    model.save_pretrained(folder / "hub")
    model.save_pretrained(folder / "fused", save_original_format=False)
    return folder / "hub", folder / "fused"


@pytest.mark.parametrize("name", ["minimax_m2", "mixtral", "qwen3_moe"])
def test_fused_experts_are_the_same_to_the_last_bit(tmp_path, name):
    hub, fused = both_forms(name, tmp_path)
    assert any(".experts.3." in key for key in load_file(hub / "model.safetensors"))
    assert common.fuse_experts(str(fused)) == str(fused)
    made = common.fuse_experts(str(hub))
    weights, expected = (load_file(Path(d, "model.safetensors")) for d in (made, fused))
    assert weights.keys() == expected.keys()
    for key, tensor in weights.items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, expected[key].float()), key
    assert (Path(made).parent, Path(made).name[:6]) == (cache(), "fused-")


def cache() -> Path:
    return Path(common.datasets.config.HF_DATASETS_CACHE)


def start(directory: Path, corpus: str, run_dir: Path, script: str, ranks: int) -> list[dict]:
    flags = RUN_FLAGS | {"steps": 2, "init_from": directory, "dataset": corpus, "run_dir": run_dir}
    done = launch(ranks, script, flags)
    assert done.returncode == 0, done.stderr
    keys = ("loss", "grad_norm", "expert_load")
    return [{key: line[key] for key in keys} for line in metrics(run_dir)[0]]


WITH_EXPERTS = [*SCRIPTS, "fsdp2_cp_pretrain.py", "fsdp2_pp_pretrain.py"]


@pytest.mark.parametrize(
    "script, ranks",
    [
        (EXPERTS, 2),
        pytest.param("fsdp2_pretrain.py", 1, marks=pytest.mark.drill),
        *(pytest.param(script, 2, marks=pytest.mark.drill) for script in WITH_EXPERTS),
        pytest.param(EXPERTS, 4, marks=pytest.mark.drill),
    ],
)
def test_a_start_from_either_form_is_the_same(corpus, tmp_path, script, ranks):
    hub, fused = both_forms("minimax_m2", tmp_path)
    for made in cache().glob("fused-*"):
        shutil.rmtree(made)  # by other tests
    expected = start(fused, corpus, tmp_path / "one", script, ranks)
    assert start(hub, corpus, tmp_path / "other", script, ranks) == expected
    before = tree(cache())
    flags = json.loads((tmp_path / "other/config.json").read_text())["flags"]
    assert flags["model"] == str(hub) and Path(flags["init_from"]).parent == cache()
    assert start(hub, corpus, tmp_path / "again", script, ranks) == expected
    made = [name for name in before if name.startswith("fused-")]
    assert made and {name: before[name] for name in made}.items() <= tree(cache()).items()


def left_in_the_cache() -> set[str]:
    """Directories of fused weights, and those that are to become some."""
    return {path.name for path in cache().iterdir() if "fused-" in path.name}


@pytest.mark.parametrize("what", ["kill", "limit file size"])
def test_what_dies_while_it_fuses_leaves_nothing_under_the_name(corpus, tmp_path, what):
    """A killed one leaves what the next start removes, one on a full disk nothing at all."""
    torch.manual_seed(6)
    model = MiniMaxM2ForCausalLM(small_mixture(hidden_size=48 if what == "kill" else 40))
    model.save_pretrained(tmp_path / "hub")
    flags = RUN_FLAGS | {"steps": 1, "init_from": tmp_path / "hub", "dataset": corpus}
    flags |= {"run_dir": tmp_path / "run"}
    before = left_in_the_cache()
    fault = {"call": "transformers.modeling_utils.safe_save_file", "do": what}
    fault["after"] = what == "kill"  # all is written, but has no name yet
    done = launch(0, "fsdp2_pretrain", flags, [fault])
    left = left_in_the_cache() - before
    if what == "kill":
        [name] = left
        assert done.returncode == -9 and name.startswith(".fused-")
        assert (cache() / name / "model.safetensors").exists()
    else:
        [line] = done.stderr.splitlines()
        assert done.returncode == 2 and "hub cannot be prepared: " in line
        assert "File too large" in line
        assert not left
    done = launch(0, "fsdp2_pretrain", flags)
    assert (done.returncode, done.stderr) == (0, "")
    [name] = left_in_the_cache() - before
    assert name.startswith("fused-")


@pytest.mark.parametrize(
    "what, said",
    [
        ("a norm", "model.norm.weight is missing or not the model's"),
        ("experts of a layer", "model.layers.1.mlp.experts.down_proj is missing"),
        ("an expert", "cannot be prepared: "),
        ("nothing, but there is more", "model.layers.7.x.weight is missing or not the model's"),
    ],
)
def test_weights_that_lack_something_are_not_made_up(tmp_path, what, said):
    """transformers would draw them at random."""
    hub, _ = both_forms("minimax_m2", tmp_path)
    file = hub / "model.safetensors"
    weights = load_file(file)
    lost = {
        "a norm": "model.norm.weight",
        "experts of a layer": "layers.1.block_sparse_moe.experts",
        "an expert": "layers.1.block_sparse_moe.experts.2.",
        "nothing, but there is more": "nowhere",
    }[what]
    weights = {key: tensor for key, tensor in weights.items() if lost not in key}
    if lost == "nowhere":
        weights["model.layers.7.x.weight"] = torch.zeros(3)
    save_file(weights, file, metadata={"format": "pt"})
    before = left_in_the_cache()
    with pytest.raises(common.Refusal, match=said):
        common.fuse_experts(str(hub))
    assert left_in_the_cache() == before


def test_files_with_another_config_are_fused_anew(tmp_path):
    hub, _ = both_forms("minimax_m2", tmp_path)
    first = common.fuse_experts(str(hub))
    moved = shutil.copytree(hub, tmp_path / "moved")
    assert common.fuse_experts(str(moved)) == first
    config = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    assert common.fuse_experts(str(moved)) != first
