"""fsdp2_muon_pretrain.py: its updates, what they send and keep, and which checkpoints fit."""

import inspect
from types import SimpleNamespace

import muon_worker
import pytest
import shared
import torch
from launching import (
    MUON,
    RUN_FLAGS,
    SCRIPTS,
    SMALL,
    launch,
    launch_cases,
    metrics,
    small_mixture,
    small_shape,
)
from safetensors.torch import load_file
from small_models import plain_model
from test_agreement import SHORT, STEPS, PlainLoop, losses, worst
from test_dry_run import flags_of, predict
from torch.optim import _muon
from transformers import Qwen2ForCausalLM

import fsdp2_muon_pretrain as script
import model as shared_model

CPU = torch.device("cpu")
# Directories of models, and how they differ from the usual small one.
SHAPES = {
    "plain": {},
    "uneven": {"intermediate_size": 67, "num_key_value_heads": 1},  # 67 rows: 17, 17, 17, 16
    "few_rows": {"intermediate_size": 3, "num_hidden_layers": 1},  # the fourth rank has none
    "untied": {"tie_word_embeddings": False},
}
CASES = {
    **{name: {"model": name} for name in SHAPES},
    # Two matrices, so that with four ranks two have nothing to do.
    "two_matrices": {"model": "plain", "trained": "layers.0.self_attn.k_proj.weight"},
    # Parameters that hold q, k and v: below each other, side by side, and for each head.
    **{name: {"model": name} for name in ("phi3", "gpt2", "gpt_neox")},
    "experts": {"model": "four_experts"},
    "three_experts": {"model": "three_experts"},  # the fourth rank has none
    "offloaded": {"model": "plain", "cpu_offload": True},
    "replicas": {"model": "plain", "dp_replicate": 2},
    "bf16": {"model": "plain", "precision": "bf16", "double": False},
}
GRID = [(ranks, case) for ranks in (1, 2, 4) for case in CASES if ranks > 1 or case != "replicas"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the models' directories."""
    folder = tmp_path_factory.mktemp("muon")
    for name, changes in SHAPES.items():
        small_shape(**changes).save_pretrained(folder / name)
    for name in ("phi3", "gpt2", "gpt_neox"):
        plain_model(name, tie_word_embeddings=True).config.save_pretrained(folder / name)
    for name, number in {"three": 3, "four": 4}.items():
        shape = small_mixture(num_local_experts=number)
        shape.save_pretrained(folder / f"{name}_experts")
    return folder


def flags_in(folder, case: str) -> dict:
    return CASES[case] | {"model": str(folder / CASES[case]["model"])}


@pytest.fixture(scope="module")
def updated(folder):
    """Return what the ranks of a launch saw in all cases."""
    seen: dict[int, dict] = {}

    def of(ranks: int) -> dict:
        if ranks not in seen:
            cases = {case: flags_in(folder, case) for n, case in GRID if n == ranks}
            seen[ranks] = launch_cases(ranks, "muon_worker", folder, cases)
        return seen[ranks]

    return of


@pytest.fixture
def exact(monkeypatch):
    """Let torch.optim.Muon compute in the precision of the weights instead of bf16."""
    source = inspect.getsource(_muon._zeropower_via_newtonschulz)
    assert source.count("grad.bfloat16()") == 1
    names: dict = dict(vars(_muon))
    exec(source.replace("grad.bfloat16()", "grad.clone()"), names)
    changed = names["_zeropower_via_newtonschulz"]
    monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", changed)


def matrices_in(name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the matrices that a parameter in a block of one of the cases' models holds."""
    if "experts.gate_up_proj" in name:
        return [half for expert in tensor for half in expert.chunk(2)]
    if "experts." in name:
        return [*tensor]
    if "gate_up_proj" in name:
        return [*tensor.chunk(2)]
    if "qkv_proj" in name:
        return [*tensor.split([64, 32, 32])]  # 4 heads of 16, 2 of keys and values
    if "c_attn" in name:
        return [*tensor.chunk(3, dim=1)]
    if "query_key_value" in name:
        return [part.flatten(0, 1) for part in tensor.view(4, 3, 16, 64).unbind(1)]
    return [tensor]


class Reference:
    """torch.optim.Muon for the matrices of blocks, AdamW for the rest, of a model in one process.

    It knows no stacks, and no weights for several matrices, so each matrix is a parameter of its
    own.
    """

    def __init__(self, model: torch.nn.Module):
        self.places, matrices, head, others = [], [], [], []
        for name, p in model.named_parameters():
            if any(word in name for word in ("embed", "wte", "wpe")) or p.ndim == 1:
                others.append(p)
            elif "layers." in name or ".h." in name:
                for place in matrices_in(name, torch.arange(p.numel()).view(p.shape)):
                    matrices.append(torch.nn.Parameter(p.detach().flatten()[place]))
                    self.places.append((p, place, matrices[-1]))
            else:
                head.append(p)
        options = {"weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw", "nesterov": True}
        groups = [{"params": head, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.muon = torch.optim.Muon(matrices, lr=0.02, momentum=0.7, **options)
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=0.02, betas=(0.9, 0.95)
        )
        self.param_groups = [*self.muon.param_groups, *self.adamw.param_groups]

    @torch.no_grad()
    def step(self) -> None:
        for parameter, place, matrix in self.places:
            if parameter.grad is not None:
                matrix.grad = parameter.grad.flatten()[place]
        self.muon.step()
        for parameter, place, matrix in self.places:
            parameter.view(-1)[place] = matrix
        self.adamw.step()

    def zero_grad(self) -> None:
        self.muon.zero_grad()
        self.adamw.zero_grad()
        for parameter, _, _ in self.places:
            parameter.grad = None


def expected(folder, case: str) -> tuple[dict, dict]:
    """Return the weights before and after the steps, computed in one process."""
    flags = flags_in(folder, case)
    trained, double = flags.pop("trained", ""), flags.pop("double", True)
    flags |= {"dp_replicate": 1}
    model, config = muon_worker.model_of(flags, double)
    shared_model.initialize(model, model.modules(), config.seed, CPU)
    model.tie_weights()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = Reference(model)
    for step in muon_worker.gradients(model, trained):
        for name, parameter in model.named_parameters():
            parameter.grad = step.get(name)
        optimizer.step()
        optimizer.zero_grad()
    return before, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("ranks, case", GRID)
def test_updates_are_those_of_one_process(updated, folder, request, ranks, case):
    if case != "bf16":  # torch.optim.Muon always computes in bf16
        request.getfixturevalue("exact")
    seen = updated(ranks)[case]
    assert seen["equal_on_all_ranks"]
    before, after = expected(folder, case)
    for name, weights in seen["weights"].items():
        error = (weights - after[name]).abs().max()
        moved = (after[name] - before[name]).abs().max()
        assert error <= (1e-6 if case != "bf16" else 0.1) * moved, name


def test_the_momentum_depends_on_the_number_of_parameters(monkeypatch):
    """Unless the flag sets it."""
    for rows, expected in ((9_999, 0.7), (10_000, 0.95)):
        matrix = torch.empty(rows, 1000, device="meta")
        monkeypatch.setattr(script, "muon_layouts", lambda model, matrix=matrix: {matrix: ()})
        for given in (None, 0.5):
            script.set_momentum(config := SimpleNamespace(momentum=given), None)
            assert config.momentum == (given or expected)


def test_muon_finds_its_matrices_in_every_group(one_rank, shape_directory):
    """Whoever lists the groups the other way round gets Muon too, and not AdamW without a word."""
    config = script.Config(model=shape_directory, **SMALL)
    model, optimizer = shared.build(script, small_shape(), config, CPU)
    options = {"lr": 0.01, "fused": True}
    turned = script.Muon(
        optimizer.param_groups[::-1], optimizer.layouts, 0.7, torch.float32, **options
    )
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    turned.step()
    with_one_moment = {p for p in model.parameters() if len(turned.state[p]) == 2}
    assert with_one_moment == optimizer.layouts.keys() and len(with_one_moment) == 2 * 7


@pytest.mark.parametrize("case", ["untied", "experts"])
def test_muon_keeps_one_moment_of_the_matrices_of_blocks_only(updated, case):
    for name, moments in updated(2)[case]["moments"].items():
        in_block = "layers." in name and "norm" not in name and not name.endswith("bias")
        one = ["exp_avg", "step"]
        assert moments == (one if in_block else [one[0], "exp_avg_sq", one[1]]), name


@pytest.mark.parametrize("ranks, case", [(2, "plain"), (4, "plain"), (2, "bf16"), (4, "experts")])
def test_bytes_sent_are_the_closed_form(updated, folder, ranks, case):
    seen = updated(ranks)[case]
    matrices = [
        weights for name, weights in seen["weights"].items()
        if "layers." in name and weights.ndim == 2 and "norm" not in name
    ]  # fmt: skip
    size = 2 if case == "bf16" else 8
    size_of_all = size * sum(matrix.numel() for matrix in matrices)
    mean = seen["sent"] / ranks
    assert mean == 2 * size_of_all * (ranks - 1) / ranks**2
    if ranks == 2:  # no rank has more to send than another
        assert seen["ledger"] == seen["sent"]


def test_orthogonalized_matrices_have_the_singular_vectors_of_the_matrix():
    """By an SVD in float64. Their singular values are about 1, except for tiny ones."""
    generator = torch.Generator().manual_seed(0)
    for shape in ((1, 24, 40), (1, 40, 24), (3, 24, 24)):
        matrix = torch.randn(shape, generator=generator, dtype=torch.float64)
        u, values, vh = torch.linalg.svd(matrix, full_matrices=False)
        assert (values / values.square().sum(-1, keepdim=True).sqrt()).min() > 1e-3
        turned = u.mT @ script.newton_schulz(matrix) @ vh.mT
        found = turned.diagonal(dim1=-2, dim2=-1)
        assert (turned - torch.diag_embed(found)).abs().max() < 1e-12
        large = found[values > 0.02 * values.amax()]
        assert 0.6 < large.min() and large.max() < 1.25


def test_a_matrix_of_zeros_stays_zero():
    assert not script.newton_schulz(torch.zeros(1, 3, 5)).any()


# --- Runs -----------------------------------------------------------------------------------------


class MuonLoop(PlainLoop):
    def __init__(self, model: torch.nn.Module, corpus: str, **flags: str):
        super().__init__(model, corpus, **flags)
        self.optimizer = Reference(model)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("batching", ["bucketed", "packed"])
def test_plain_loop_gives_the_same_losses(run, corpus, weights_directory, tmp_path, batching):
    directory = run(MUON, 2, init_from=weights_directory, batching=batching)
    model = Qwen2ForCausalLM.from_pretrained(weights_directory, dtype=torch.float32)
    loop = MuonLoop(model, corpus, batching=batching)
    for step in range(STEPS):
        loop.step(step)
    loop.check(directory, tmp_path)


MODES = {
    "hybrid": {"dp_replicate": 2},
    "offloaded": {"cpu_offload": True},
    "recomputed": {"activation_checkpointing": "full", "reshard_after_forward": False},
    "reduced once": {"reduce_every_micro_batch": False},
}


@pytest.mark.parametrize(
    "ranks, own",
    [(1, {}), (4, {})]
    + [
        pytest.param(4 if name == "hybrid" else 2, own, id=name, marks=pytest.mark.drill)
        for name, own in MODES.items()
    ],
)
def test_ranks_and_modes_change_nothing(run, shape_directory, ranks, own):
    one = run(MUON, 2, model=shape_directory)
    other = run(MUON, ranks, model=shape_directory, **own)
    assert worst(losses(one), losses(other)) < 1e-5
    validation = [[line["validation_loss"] for line in metrics(d)[1]] for d in (one, other)]
    assert worst(*validation) < 1e-5


@pytest.mark.drill
@pytest.mark.parametrize("ranks", [2, 4])
def test_an_moe_model_trains_alike(run, mixture_directory, ranks):
    one, other = (run(MUON, n, init_from=mixture_directory, **SHORT) for n in (1, ranks))
    assert worst(losses(one, SHORT["steps"]), losses(other, SHORT["steps"])) < 1e-5


def test_a_run_resumes_to_the_last_bit(run, shape_directory):
    flags = {"model": shape_directory, "checkpoint_every": 2, "keep_checkpoints": 3}
    whole = run(MUON, 2, **flags)
    again = run(MUON, 2, **flags, resume=whole / "checkpoints/step_00000002")
    assert [line["loss"] for line in metrics(again)[0]] == losses(whole).tolist()[2:]
    weights, others = (load_file(path / "hf/model.safetensors") for path in (whole, again))
    assert all(torch.equal(others[name], tensor) for name, tensor in weights.items())


def test_it_resumes_other_scripts_and_they_refuse_its_checkpoints(
    run, corpus, shape_directory, tmp_path
):
    flags = {"model": shape_directory, "checkpoint_every": 2, "keep_checkpoints": 3}
    before = run(SCRIPTS[0], 2, **flags)
    after = run(MUON, 2, **flags, resume=before / "checkpoints/step_00000002")
    assert [line["step"] for line in metrics(after)[0]] == [3, 4]
    # The loss of a step is that of the weights before its update.
    assert metrics(after)[0][0]["loss"] == pytest.approx(losses(before)[2], rel=1e-6)
    flags |= RUN_FLAGS | {"dataset": corpus, "run_dir": tmp_path / "refused", "steps": 6}
    checkpoint = after / "checkpoints/step_00000004"
    for name in (SCRIPTS[0], SCRIPTS[2]):
        done = launch(2, name, flags | {"resume": checkpoint})
        assert done.returncode and not (tmp_path / "refused").exists()
        [line] = done.stderr.splitlines()
        assert line.startswith(f"error: {checkpoint} of torch ") and " and Muon cannot" in line
        assert line.endswith(".exp_avg_sq.") and "Missing key in checkpoint" in line


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_dry_run_keeps_12_bytes_per_parameter_of_matrices(shape_directory, ranks, monkeypatch):
    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(variable, "0")  # what the prediction sets ends with the test
    flags = flags_of({}, ranks, model=shape_directory)
    ours, adamw = (predict(name, flags, ranks) for name in (MUON[:-3], "fsdp2_pretrain"))
    kept = [report.parameters + report.gradients + report.optimizer for report in (ours, adamw)]
    assert kept[1] - kept[0] == 4 * ours.exchanged / ranks
    assert ours.parameters == ours.gradients


def test_muon_updates_matrices_but_no_kernels_of_convolutions(one_rank, tmp_path):
    """And nothing without weight decay, as the state-space parameters A_log."""
    shape = plain_model("mamba").config
    shape.save_pretrained(tmp_path)
    config = script.Config(model=str(tmp_path), **SMALL)
    model, optimizer = shared.build(script, shape, config, CPU)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = {name: len(optimizer.state[p]) for name, p in model.named_parameters()}
    found = {name.split(".", 3)[-1] for name, number in state.items() if number == 2}
    projections = {f"mixer.{name}_proj.weight" for name in ("in", "x", "dt", "out")}
    assert found == projections and len(state) > 2 * len(found)


def test_batches_hold_matrices_of_one_shape_and_layout(monkeypatch):
    """Equally many per rank, up to a limit. A matrix above it is alone on its rank."""
    monkeypatch.setattr(script, "BATCH_NUMBERS", 20)
    mesh = SimpleNamespace(size=lambda dimension: 2)
    sizes = [(4, 4), (2, 4), (3, 8, 8), (4, 4), *[(2, 4)] * 4, (9, 9), (4, 4), (3, 8, 8)]
    layouts = {}
    for size in sizes:
        layouts[parameter := torch.zeros(size)] = (-2, 1, (size[-2],))
        parameter.device_mesh = mesh
    optimizer = SimpleNamespace(layouts=layouts)

    def shapes(parameters) -> list[list]:
        batches = script.Muon.batches(optimizer, parameters)
        return [[tuple(matrix.shape) for matrix in batch] for batch in batches]

    squares, stacks = [[(4, 4)] * 2, [(4, 4)]], [[(3, 8, 8)], [(3, 8, 8)]]
    assert shapes([*layouts]) == [*squares, [(2, 4)] * 4, [(2, 4)], *stacks, [(9, 9)]]
    fused, apart = [p for p in layouts if p.shape == (2, 4)][:2]
    layouts[fused] = (-2, 1, (1, 1))
    assert shapes([fused, apart]) == [[(2, 4)], [(2, 4)]]
    assert shapes([]) == []


FUSED = {  # type -> names of what holds several matrices
    **dict.fromkeys(["gpt_neox", "bloom", "falcon", "persimmon"], ["query_key_value"]),
    **dict.fromkeys(["gpt2", "gpt_bigcode"], ["c_attn"]),
    **dict.fromkeys(["glm", "glm4", "gpt_oss", "aria_text", "qwen3_moe", "zaya"], ["gate_up_proj"]),
    "phi3": ["qkv_proj", "gate_up_proj"],
    "mpt": ["Wqkv"],
    "jetmoe": ["input_linear"],
    "granitemoehybrid": ["gate_up_proj", "input_linear"],
}


@torch.no_grad()
def depends(name: str, model, places: list, zeroed: int, changed: list[int]) -> bool:
    """Whether the output of a parameter's module depends on some of its matrices without another.

    Args:
        name: of the parameter.
        places: of the matrices among its outputs.
    """
    weight, seen = model.get_parameter(name), []
    before = weight.clone()
    module = model.get_submodule(name.removesuffix(".weight").rpartition(".")[0])
    hook = module.register_forward_hook(
        lambda module, given, output: seen.append(
            output if output.__class__ is torch.Tensor else output[0]
        )
    )
    dim = script.fused_outputs(name, weight.shape, model.config)[0]
    weight.index_fill_(dim, places[zeroed], 0.0)
    for seed in (0, 1):
        torch.manual_seed(seed)
        for i in changed:
            weight.index_copy_(
                dim, places[i], torch.randn_like(weight.index_select(dim, places[i]))
            )
        model(torch.arange(3, 15)[None], use_cache=False)
    hook.remove()
    weight.copy_(before)
    return not torch.equal(*seen)


@pytest.mark.parametrize("name", FUSED)
def test_fused_weights_are_divided_as_the_model_uses_them(name):
    """Without its values an attention does not depend on queries and keys, without queries not on
    keys; without its gate an MLP does not depend on the rest, nor the other way round."""
    model = plain_model(name)
    for parameter in (p for other, p in model.named_parameters() if other.endswith("bias")):
        torch.nn.init.zeros_(parameter)
    found = set()
    for other, parameter in model.named_parameters():
        if "input_linear" in other and "attention" in other:
            continue  # JetMoe's experts of attention
        kind = next((kind for kind in FUSED[name] if kind in other and parameter.ndim > 1), None)
        if kind in found or kind is None:
            continue
        found.add(kind)
        dim, groups, sizes = script.fused_outputs(other, parameter.shape, model.config)
        outputs = torch.arange(parameter.shape[dim]).view(groups, -1)
        places = [part.flatten() for part in outputs.split(sizes, 1)]
        if len(places) == 3:
            assert (
                depends(other, model, places, 0, [2])
                and depends(other, model, places, 2, []) is False
            )
            for zeroed, changed in ((2, [0, 1]), (0, [1]), (1, [0])):
                assert not depends(other, model, places, zeroed, changed)
        else:
            assert not depends(other, model, places, 0, [1])
            assert depends(other, model, places, 1, [0]) == (name == "gpt_oss")  # which has up + 1
    assert found == {*FUSED[name]}


def test_no_kernel_of_a_convolution_is_a_matrix():
    """Also those of groups of channels, [channels, channels of a group, width]."""
    kernels = 0
    for name in ("zaya", "lfm2", "jamba", "nemotron_h", "kimi_linear", "qwen3_next"):
        model = plain_model(name)
        layouts = script.muon_layouts(model)
        for module in model.modules():
            if isinstance(module, torch.nn.Conv1d):
                kernels += 1
                assert module.weight not in layouts
        assert min(p.ndim for p in layouts) == 2 < max(p.ndim for p in layouts) or name == "lfm2"
    assert kernels > 6
