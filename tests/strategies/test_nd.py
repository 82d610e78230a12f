"""fsdp2_nd_pretrain.py: every mesh gives the losses of FSDP2 on as many ranks."""

import sys
from types import SimpleNamespace

import pytest
import script_parts as parts
from grid import share
from launching import SMALL, arguments, launch, launch_cases, metrics, small_shape
from test_modes import difference, losses

import common
import fsdp2_nd_pretrain

NAMES = {"tp": "tensor_parallel", "cp": "context_parallel", "pp": "pipeline_parallel"}
NAMES |= {"rep": "dp_replicate"}
MODES = {
    "fp32": {},
    "untied": {"model": "untied", "grad_clip": 0.1},
    "packed": {"batching": "packed", "micro_batch_tokens": 257, "global_batch_tokens": 8 * 257},
    "full": {"activation_checkpointing": "full"},
    "selective": {"activation_checkpointing": "selective"},
    "bf16": {"precision": "bf16", "global_batch_tokens": 16 * 256},
    "exact": {"global_batch_tokens": 16 * 256},  # what bf16 loses is measured against it
    "compiled": {"compile": True, "pad_to_multiple_of": 256},
}


def flags_of(mesh: str) -> dict[str, int]:
    """`tp2 pp2` -> the flags of that mesh; the other ranks are shards."""
    return {NAMES[word[:-1]]: int(word[-1]) for word in mesh.split()}


# Meshes and modes; tests/strategies/test_agreement.py has `tp2 pp2` in the plain suite.
FOUR = [(mesh, "fp32") for mesh in ("tp2 cp2", "pp2 cp2", "tp2 rep2", "pp2 rep2")]
FOUR += [("tp2 pp2", mode) for mode in ("untied", "selective", "bf16", "compiled")]
FOUR = share(FOUR + [("tp2 cp2", mode) for mode in ("packed", "full")])
EIGHT = [("tp2 pp2 cp2", "fp32"), ("tp2 pp2 rep2", "fp32"), ("tp2 pp2 cp2", "packed")]
EIGHT = share(EIGHT)


@pytest.fixture(scope="module")
def run_worker(corpus, shape_directory, tmp_path_factory):
    """Return a function that trains the given cases, and FSDP2 in their modes, in one launch."""

    def run(ranks: int, cases: list[tuple[str, str]]) -> dict:
        directory = tmp_path_factory.mktemp("nd")
        untied = directory / "untied"
        small_shape(tie_word_embeddings=False).save_pretrained(untied)
        base = {"model": shape_directory, "dataset": corpus, "run_dir": str(directory), **SMALL}
        base |= {"max_length": 256, "micro_batch_tokens": 256, "global_batch_tokens": 8 * 256}
        flags = {}
        for mesh, mode in [("fsdp2", "exact"), *(("fsdp2", mode) for _, mode in cases), *cases]:
            own = base | MODES[mode] | (flags_of(mesh) if mesh != "fsdp2" else {})
            own["model"] = {"untied": str(untied)}.get(own["model"], own["model"])
            flags[f"{mesh} {mode}"] = own
        return launch_cases(ranks, "nd_worker", directory, flags)

    return run


@pytest.fixture(scope="module")
def four(run_worker) -> dict:
    return run_worker(4, FOUR)


@pytest.fixture(scope="module")
def eight(run_worker) -> dict:
    return run_worker(8, EIGHT)


def check(seen: dict, mesh: str, mode: str) -> None:
    got, reference = seen[f"{mesh} {mode}"], seen[f"fsdp2 {mode}"]
    of_losses, of_norms = 2e-6, 5e-6
    if mode == "bf16":  # four times what FSDP2 itself loses by bf16
        exact = seen["fsdp2 exact"]
        of_losses = 4 * difference(losses(reference), losses(exact))
        of_norms = 4 * difference(reference["norms"], exact["norms"])
    assert difference(losses(got), losses(reference)) < of_losses
    assert difference(got["norms"], reference["norms"]) < of_norms
    assert difference(got["final"], reference["final"]) < max(1e-5, 10 * of_losses)
    assert got["initial"] == reference["initial"]
    assert got["decay"] == reference["decay"]
    assert got["dtypes"] == ["torch.float32"] and got["gradients"] == "none"
    # Stages and shards hold the model once; norms are on all ranks of a TP group.
    assert got["held"] < 0.8 * reference["held"] * (2 if "rep2" in mesh else 1) + 320 * 32


@pytest.mark.drill
@pytest.mark.parametrize("mesh, mode", FOUR)
def test_meshes_of_four_ranks_change_nothing(four, mesh, mode):
    check(four, mesh, mode)


@pytest.mark.drill
@pytest.mark.parametrize("mesh, mode", EIGHT)
def test_meshes_of_eight_ranks_change_nothing(eight, mesh, mode):
    check(eight, mesh, mode)


@pytest.mark.drill
def test_a_run_says_its_mesh_and_resumes_on_another(corpus, shape_directory, tmp_path):
    """A checkpoint of one mesh continues on another one, with the losses of the first."""
    flags = {**SMALL, "dataset": corpus, "model": shape_directory, "steps": 4}
    flags |= {"checkpoint_every": 2, "grad_clip": 0}
    one, other = tmp_path / "one", tmp_path / "other"
    done = launch(4, "fsdp2_nd_pretrain.py", flags | flags_of("tp2 pp2") | {"run_dir": one})
    assert (done.returncode, done.stderr) == (0, "")
    assert "stage 2: each rank has some of the blocks of a model: ranks [0, 2], ..." in done.stdout
    assert "tensor 2: each rank has a part of the same layers: ranks [0, 1], ..." in done.stdout
    resumed = flags | {"run_dir": other, "resume": one / "checkpoints/step_00000002"}
    done = launch(2, "fsdp2_nd_pretrain.py", resumed | flags_of("cp2"))
    assert (done.returncode, done.stderr) == (0, "")
    both = [[line["loss"] for line in metrics(run)[0][-2:]] for run in (one, other)]
    assert difference(*both) < 2e-6


@pytest.mark.parametrize(
    "mesh, shape, refusal",
    [
        ("tp2", {}, None),
        ("tp2 cp2 pp2", {}, None),
        ("tp4", {}, "--tensor_parallel must divide the K/V heads, .*: .2, 64, 320"),
        ("tp2", {"vocab_size": 321}, "--tensor_parallel must divide .*: .2, 64, 321"),
        ("tp2 cp4", {}, "--context_parallel x --tensor_parallel must divide the attention heads"),
        ("pp4", {}, "--pipeline_parallel is more than the 2 blocks"),
        ("cp2", {"sliding_window": 8, "use_sliding_window": True}, "sliding window of 8"),
        ("tp2", {"model_type": "qwen3"}, "needs Llama's layers"),
        ("tp2", {"model_type": "granite", "embedding_multiplier": 3}, "repeat its embedding_mult"),
    ],
)
def test_models_that_fit_a_mesh(mesh, shape, refusal):
    from transformers import AutoConfig

    kind = shape.pop("model_type", "qwen2")
    shape = {**small_shape().to_dict(), "model_type": kind, **shape}
    for name in ("model_type", "layer_types"):
        shape.pop(name)
    sizes = {"max_length": 64, "micro_batch_tokens": 512}
    config = fsdp2_nd_pretrain.Config(steps=0, **sizes, **flags_of(mesh))
    model = parts.build_model(fsdp2_nd_pretrain, AutoConfig.for_model(kind, **shape), config)
    if refusal is None:
        fsdp2_nd_pretrain.check_model(model, config)
    else:
        with pytest.raises(common.Refusal, match=refusal):
            fsdp2_nd_pretrain.check_model(model, config)


@pytest.mark.parametrize(
    "ranks, flags, refusal",
    [
        (4, {"tensor_parallel": 3}, "= 3 does not divide 4 ranks"),
        (8, {"tensor_parallel": 2, "dp_replicate": 3}, "= 6 does not divide 8 ranks"),
        (2, {"tensor_parallel": 2, "context_parallel": 2}, "= 4 does not divide 2 ranks"),
        (2, {"tensor_parallel": 2, "compile": True, "activation_checkpointing": "full"},
         "--compile needs --activation_checkpointing none or selective"),
        (4, {"pipeline_parallel": 4, "global_batch_tokens": 2048}, "use at least 8192"),
    ],
)  # fmt: skip
def test_flags_that_do_not_fit(monkeypatch, ranks, flags, refusal):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(sys, "argv", ["fsdp2_nd_pretrain.py", *arguments(flags)])
    with pytest.raises(common.Refusal, match=refusal):
        fsdp2_nd_pretrain.main()


def test_the_groups_of_a_mesh(monkeypatch):
    """Data-parallel ranks share an index with the ranks that work on the same sequences."""
    config = SimpleNamespace(pipeline_parallel=2, context_parallel=2, tensor_parallel=2)
    monkeypatch.setenv("WORLD_SIZE", "16")
    found = []
    for rank in range(16):
        monkeypatch.setenv("RANK", str(rank))
        found.append(fsdp2_nd_pretrain.dp_rank_and_size(config))
    assert found == 2 * (4 * [(0, 2)] + 4 * [(1, 2)])
