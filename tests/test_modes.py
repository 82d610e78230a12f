"""Every mode of every strategy on 2 ranks, judged against fp32 eager DDP (see worker.py)."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, SMALL, torchrun
from transformers import PhimoeConfig, Qwen2ForCausalLM
from worker import OWN_MODES, SCRIPTS, modes


@pytest.fixture(scope="module")
def run_worker(
    corpus, shape_directory, weights_directory, mixture_directory, starved_directory,
    tmp_path_factory,
):  # fmt: skip
    """A function: what the worker saw, of the plain modes or of those left to a drill."""

    def run(which: str = "plain", **variables: str) -> dict:
        out = tmp_path_factory.mktemp("modes") / "seen.json"
        shape, weights = shape_directory, weights_directory
        if "experts" in which:
            shape, weights = mixture_directory, starved_directory
        base = {"model": shape, "dataset": corpus, "run_dir": str(out.parent), **SMALL}
        base["global_batch_tokens"] = 2048  # two micro-batches a rank
        start = json.dumps({"model": weights, "init_from": weights})
        words = [str(ROOT / "tests/worker.py"), str(out), json.dumps(base), start, which]
        done = torchrun(2, *words, timeout=840, **variables)
        assert done.returncode == 0, done.stderr
        assert "Warning" not in done.stderr, done.stderr
        return json.loads(out.read_text())

    return run


@pytest.fixture(scope="module")
def seen(run_worker) -> dict:
    return run_worker()


def difference(a, b) -> float:
    """Largest relative difference of two lists, or of the values of two dictionaries."""
    a, b = (list(x.values()) if isinstance(x, dict) else x for x in (a, b))
    assert len(a) == len(b)
    return max(abs(x - y) / max(abs(y), 1e-12) for x, y in zip(a, b))


# mode -> (mode it must agree with, tolerance of losses and gradient norms, of final weights)
EXACT = (1e-6, 1e-5)
EXPECTED = {
    "packed": ("packed", *EXACT),
    "packed_odd": ("packed_odd", *EXACT),
    "no_clip": ("no_clip", *EXACT),
    "init_from": ("init_from", *EXACT),
    "compile_packed": ("packed", *EXACT),
    "compile": ("padded", *EXACT),
    "compile_ac_full": ("padded", *EXACT),
    "padded": ("padded", *EXACT),
    "bf16": ("fp32", 1e-2, 5e-2),
    "float8": ("fp32", 2e-2, 5e-2),
    "float8_selective": ("fp32", 2e-2, 5e-2),
    "large": ("large", *EXACT),
    "compile_bf16": ("large", 1e-2, 5e-2),
    "chunked_loss_bf16": ("fp32", 1e-2, 5e-2),
    "ac_selective_bf16": ("fp32", 1e-2, 5e-2),
    "reduce_every_bf16": ("fp32", 1e-2, 5e-2),
    "keep_bf16": ("fp32", 1e-2, 5e-2),
}
CASES = [f"{name} {mode}" for name in OWN_MODES for mode in [*modes(name), "init_from"]]


def losses(one: dict) -> list[float]:
    return [*one["losses"], one["validation"]]


def check_agreement(seen: dict, case: str) -> None:
    name, mode = case.split()
    reference, of_losses, of_weights = EXPECTED.get(mode, ("fp32", *EXACT))
    reference, got, of_norms = seen[f"ddp {reference}"], seen[case], of_losses
    if name in ("tp", "cp", "pp"):  # sums of parts, in another order
        of_losses, of_norms = 2e-6, 5e-6
        if "bf16" in mode or "float8" in mode:  # four times what FSDP2 itself loses by it
            own = seen[f"fsdp2 {mode}"]
            of_losses = 4 * difference(losses(own), losses(reference))
            of_norms = 4 * difference(own["norms"], reference["norms"])
    assert difference(losses(got), losses(reference)) < of_losses
    assert difference(got["norms"], reference["norms"]) < of_norms
    assert difference(got["final"], reference["final"]) < of_weights


@pytest.mark.parametrize("case", CASES)
def test_mode_agrees_with_ddp(seen, case):
    check_agreement(seen, case)


@pytest.mark.drill
def test_compiled_modes_of_every_script(run_worker):
    slow = run_worker("drill")
    for case in slow:
        check_agreement(slow, case)
    check_graphs(slow, 26)


@pytest.mark.parametrize("case", CASES)
def test_parameters_are_fp32_tied_and_sharded(seen, case):
    got = seen[case]
    assert got["dtypes"] == ["torch.float32"]
    assert got["tied"]
    whole = seen["ddp fp32"]["held"]
    one_copy_a_rank = case.startswith(("ddp", "fsdp2 hybrid", "pp hybrid"))
    more = 5 * 32 if case.startswith("tp") else 0  # norms, which each rank of a layer has
    if case.startswith("pp") and case != "pp one_stage":
        more = 320 * 32 - 32  # the embedding, which is on both stages; without the last norm
    assert got["held"] == (whole if one_copy_a_rank else (whole + more) // 2)
    # q, k, v, o and the three of the feed-forward in each of 2 blocks; embedding tied to the head.
    assert [number for _, number in got["decay"]] == [7 * 2, 5 * 2 + 2]
    assert [decay for decay, _ in got["decay"]] == [0.1, 0.0]


def float8_package() -> str:
    apart = ROOT / ".venv/torchao"  # where .ci/run puts it
    if not apart.exists() and importlib.util.find_spec("torchao") is None:
        pytest.skip("needs the package torchao")
    return str(apart)


@pytest.mark.drill
def test_float8_is_of_the_linear_layers_of_blocks(run_worker):
    """Seven in each of 2 blocks, and not the head; parameters keep their names. On CPUs too."""
    seen = run_worker("float8", PYTHONPATH=float8_package())
    for case, got in seen.items():
        layers = 7 if case.startswith("pp") else 14  # a stage has one of the blocks
        assert got["float8"] == (layers if "float8" in case else 0)
        assert got["final"].keys() == seen["ddp fp32"]["final"].keys()
        check_agreement(seen, case)
        if case.endswith("float8"):
            name = case.split()[0]
            assert difference(got["losses"], seen[f"{name} bf16"]["losses"]) > 1e-6
            assert seen[f"{name} float8_selective"]["losses"] == got["losses"]


@pytest.mark.drill
def test_float8_leaves_routers_as_they_are(tmp_path):
    """Phi's is a linear layer with a forward of its own."""
    apart = float8_package()
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 16}
    PhimoeConfig(**sizes, vocab_size=320).save_pretrained(tmp_path)
    program = f"""
import fsdp2_pretrain as script
config = script.Config(model={str(tmp_path)!r}, precision="float8", max_length=64)
model = script.build_model(config, script.build_model_config(config, 257, 256))
for name, module in model.named_modules():
    if hasattr(module, "weight"):
        print(name.rpartition(".")[2], type(module).__name__)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": apart}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    kinds = dict(line.split() for line in done.stdout.splitlines())
    assert kinds["q_proj"] == "Float8Linear" and kinds["router"] == "PhimoeTopKRouter"


@pytest.mark.parametrize("name", ["fsdp1", "fsdp2"])
def test_losses_are_equal_to_the_last_bit_without_clipping(seen, name):
    assert seen[f"{name} no_clip"]["losses"] == seen["ddp no_clip"]["losses"]


def test_gradients_accumulate_in_fp32_whether_parameters_stay_whole_or_not(seen):
    assert seen["fsdp2 keep_bf16"]["final"] == seen["fsdp2 bf16"]["final"]


def test_ddp_ranks_hold_the_same_parameters_after_each_step(seen):
    assert all(got["in_step"] for case, got in seen.items() if case.startswith("ddp"))


def test_initial_weights_are_the_same_numbers_everywhere(seen):
    initial = [got["initial"] for case, got in seen.items() if "init_from" not in case]
    assert all(one == initial[0] for one in initial)


def test_init_from_reads_the_weights_that_transformers_saved(seen, weights_directory):
    model = Qwen2ForCausalLM.from_pretrained(weights_directory, dtype=torch.float32)
    saved = {name: tensor.double().sum().item() for name, tensor in model.state_dict().items()}
    for name in OWN_MODES:
        assert difference(seen[f"{name} init_from"]["initial"], saved) < 1e-12


def test_rotary_buffers_are_those_of_transformers(seen, weights_directory):
    model = Qwen2ForCausalLM.from_pretrained(weights_directory)
    expected = model.model.rotary_emb.inv_freq.tolist()
    assert all(got["inverse_frequencies"] == expected for got in seen.values())


@pytest.mark.parametrize("name", OWN_MODES)
def test_activation_checkpointing_computes_again_what_its_name_says(seen, name):
    """FLOPs of matmuls: full repeats the forward of all blocks, 0.5 of half of them, selective of
    none (it keeps the matmuls)."""
    none, full, selective, half = (
        seen[f"{name} {mode}"]["flops"]
        for mode in ("fp32", "ac_full", "ac_selective", "ac_fraction")
    )
    assert full > 1.1 * none
    assert half - none == (full - none) // 2
    assert selective == none


def check_graphs(seen: dict, number: int) -> None:
    """A graph for each row length in training and in validation (one for all if they are dynamic);
    of packed rows for the parts of a block around attention, which is compiled with CUDA only, and
    of shared experts around these: some more where ranks share layers or rows. Packed rows have two
    numbers of boundaries here, each a power of two, and parts for each. Two more are of the loss:
    of its first length, and of any."""
    graphs = {case: got["graphs"] for case, got in seen.items() if " compile" in case}
    assert len(graphs) == number
    for case, (first, second) in graphs.items():
        most = 14 if case.startswith("ep") else 8 + 2
        if "packed" in case:
            most = 2 * 14
        assert 0 < first == second <= most, (case, graphs)


def test_nothing_is_compiled_twice(seen):
    check_graphs(seen, 2)


@pytest.mark.parametrize("name", [name for name in OWN_MODES if name != "pp"])
def test_accumulating_gradients_equals_one_larger_micro_batch(seen, name):
    assert seen[f"{name} fp32"]["micro_batches"] == (4 if name in ("tp", "cp") else 2)
    assert seen[f"{name} merged"]["micro_batches"] == 1
    assert difference(seen[f"{name} merged"]["norms"], seen[f"{name} fp32"]["norms"]) < 1e-6


# --- Mixtures of experts --------------------------------------------------------------------------

EXPERT_CASES = [f"{name} {mode}" for name in SCRIPTS for mode in modes(name, "experts")]
EXPERT_CASES += ["fsdp2 init_from", "ep init_from"]


@pytest.fixture(scope="module")
def experts(run_worker) -> dict:
    return run_worker("experts")


def check_experts(seen: dict, case: str) -> None:
    """Against fsdp2 in the same mode: losses, norms, loads and weights, biases among them."""
    name, mode = case.split()
    mode = {"alone": "fp32", "compile": "padded"}.get(mode, mode)
    got, reference = seen[case], seen[f"fsdp2 {mode}"]
    of_losses, of_norms, of_weights = 2e-6, 5e-6, 1e-5
    if mode == "bf16":
        # What FSDP2 itself loses by it: DDP, which casts elsewhere, may be four times as far away.
        exact = seen["fsdp2 fp32"]
        of_spread = 4 if name == "ddp" else 0.25
        of_losses = of_spread * difference(losses(reference), losses(exact))
        of_norms = of_spread * difference(reference["norms"], exact["norms"])
        of_weights = 5e-2
    if name != "ddp" or mode != "bf16":
        assert got["expert_load"] == reference["expert_load"]
    assert difference(losses(got), losses(reference)) < of_losses
    assert difference(got["norms"], reference["norms"]) < of_norms
    biases = [name for name in got["final"] if name.endswith("e_score_correction_bias")]
    assert len(biases) == 2
    if mode not in ("bf16", "padded"):  # when compiled there are more steps, for biases alone
        assert all(got["final"][name] == reference["final"][name] > 0 for name in biases)
    others = got["final"].keys() - biases
    assert max(abs(got["final"][n] / reference["final"][n] - 1) for n in others) < of_weights


@pytest.mark.drill
@pytest.mark.parametrize("case", EXPERT_CASES)
def test_experts_agree_with_fsdp2(experts, case):
    check_experts(experts, case)


@pytest.mark.drill
@pytest.mark.parametrize("case", [case for case in EXPERT_CASES if case.startswith("ep")])
def test_ranks_share_experts_and_decay_spares_biases(experts, case):
    got = experts[case]
    assert got["dtypes"] == ["torch.float32"] and got["tied"]
    assert got["held"] == experts["ddp fp32"]["held"] // 2
    # q, k, v, o, the router and two of the experts in each of 2 blocks; embedding and norms.
    assert got["decay"] == [[0.1, 7 * 2], [0.0, 4 * 2 + 2]]
    if "init_from" not in case:
        assert got["initial"] == experts["ddp fp32"]["initial"]


@pytest.mark.drill
def test_a_rank_without_a_token_trains_on(experts):
    assert experts["ep init_from"]["expert_load"] == [2.0] * 2  # all tokens in two of four


@pytest.mark.drill
def test_recomputed_blocks_count_nothing_twice(experts):
    """Neither of the two kinds, nor accumulation: all the same numbers of tokens."""
    for case in ("ep ac_full", "ep ac_selective", "fsdp1 ac_full", "fsdp2 ac_full"):
        assert experts[case]["expert_load"] == experts["ddp fp32"]["expert_load"]


@pytest.mark.drill
def test_compiled_experts(run_worker):
    seen = run_worker("compiled experts")
    for case in seen:
        check_experts(seen, case)
    check_graphs(seen, 2)
