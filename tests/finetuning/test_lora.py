"""fsdp2_lora.py: adapters beside PEFT's, the frozen base and its codes, exports, checkpoints."""

import dataclasses
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cases import shared
from grid import share
from launching import launch, launch_cases, metrics, refused, small_mixture, small_shape
from safetensors.torch import load_file, save_file
from small_models import plain_model
from test_sft import write
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config

import common
import fsdp2_lora as script
from model import BUCKETED_TYPES, freeze_unused

STEPS = 20
TUNED = {"max_length": 256, "micro_batch_tokens": 512, "global_batch_tokens": 2048, "steps": 6}
TUNED |= {"warmup_steps": 1, "decay_steps": 1, "learning_rate": 1e-3}
TUNED |= {"min_learning_rate": 1e-4, "precision": "fp32", "eval_tokens": 2000}
CASES = {
    "fp32": {"steps": STEPS},
    "nf4": {"steps": STEPS, "base_precision": "nf4"},
    "untied": {"steps": STEPS, "init_from": "untied", "base_precision": "nf4"},
    "two kinds": {"steps": STEPS, "target": ["q_proj", "v_proj"], "alpha": 6.0, "rank": 4},
    "bf16 base": {"steps": STEPS, "base_precision": "bf16"},
    "few rows": {"rank": 2},  # two of four ranks have no row of A
    "recomputed": {"activation_checkpointing": "full"},
    "recomputed nf4": {"activation_checkpointing": "full", "base_precision": "nf4"},
    "offloaded": {"cpu_offload": True},
    "replicas": {"dp_replicate": 2},
    "kept": {"reshard_after_forward": False},
    "reduced often": {"reduce_every_micro_batch": True},
    "packed": {"batching": "packed"},
    "bf16": {"precision": "bf16"},
    "padded": {"pad_to_multiple_of": 256},
    "compiled": {"compile": True, "pad_to_multiple_of": 256},
    "padded nf4": {"pad_to_multiple_of": 256, "base_precision": "nf4"},
    "compiled nf4": {"compile": True, "pad_to_multiple_of": 256, "base_precision": "nf4"},
}
SHORT = {
    1: ["fp32", "nf4"],
    2: ["fp32", "nf4", "few rows", "recomputed nf4", "offloaded", "replicas", "packed"],
    4: ["fp32", "nf4", "few rows"],
}
LONG = [case for case in CASES if case not in SHORT[2]]  # drills, on 2 ranks


def marked(cases: list) -> list:
    """Return parameters of a test, of which those in LONG are drills."""
    return [pytest.param(c, marks=[pytest.mark.drill] * (c in LONG)) for c in cases]


@pytest.fixture(scope="module")
def conversations(python_files, tmp_path_factory) -> str:
    """Return a .jsonl file of 200 conversations of unlike lengths."""
    rows = []
    for row in script.conversations.docstring_conversations(python_files):
        prompt, completion = row["prompt"][-40:], row["completion"][-len(rows) // 2 - 20 :]
        rows.append({"prompt": prompt, "completion": completion})
    return str(write(tmp_path_factory.mktemp("data") / "conversations.jsonl", rows[:200]))


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> Path:
    """Return a folder with base models, in fp32, with the tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("bases")
    # Rows of 64, and one matrix with rows of 96, which NF4 leaves as it is.
    sizes = {"hidden_size": 64, "intermediate_size": 96, "initializer_range": 0.1}
    for name, changes in {"tied": {}, "untied": {"tie_word_embeddings": False}}.items():
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(small_shape(**sizes, **changes))
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.1)
        save(model, folder / name)
    return folder


def save(model: torch.nn.Module, directory: Path) -> str:
    model.save_pretrained(directory)
    common.load_tokenizer("bytes").save_pretrained(directory)
    return str(directory)


def flags_of(case: str, bases: Path, conversations: str) -> dict:
    flags = {**TUNED, "init_from": "tied", "dataset": conversations, **CASES[case]}
    base = str(bases / flags["init_from"])
    return flags | {"init_from": base, "model": base, "tokenizer": base}


@pytest.fixture(scope="module")
def trained(bases, conversations, tmp_path_factory):
    """Return what a launch of so many ranks saw in a case."""
    seen: dict = {}

    def of(ranks: int, case: str) -> dict:
        key = (ranks, case in LONG)
        if key not in seen:
            chosen = LONG if case in LONG else SHORT[ranks]
            cases = {name: flags_of(name, bases, conversations) for name in chosen}
            folder = tmp_path_factory.mktemp("trained")
            seen[key] = launch_cases(ranks, "lora_worker", folder, cases)
        return seen[key][case]

    return of


def distance(one: dict, other: dict) -> float:
    """Return the largest difference between the losses of two runs, of which one may be longer."""
    pairs = [*zip(one["losses"], other["losses"])]
    assert len(pairs) >= 6
    return max(abs(a - b) for a, b in pairs)


# --- Training -------------------------------------------------------------------------------------


def peft():
    """Return the package, or skip. It is no requirement of the scripts."""
    pytest.importorskip("accelerate", reason="peft needs it")
    return pytest.importorskip("peft", reason="requirements-dev.txt has it")


@torch.no_grad()
def as_kept(model: torch.nn.Module, precision: str) -> torch.nn.Module:
    """Give a plain model the numbers that a base of this precision has."""
    codes = {
        layer.weight: script.quantize(layer.weight)
        for layer in model.model.layers.modules()
        if type(layer) is torch.nn.Linear and layer.in_features % 64 == 0
    }
    for parameter in model.parameters():
        if precision != "fp32":
            parameter.copy_(parameter.bfloat16())
        if precision == "nf4" and parameter in codes:
            values = script.nf4_values(parameter.device)
            parameter.copy_(script.dequantize(codes[parameter], values))
    return model


@pytest.mark.parametrize("case", marked(["fp32", "nf4", "untied", "two kinds", "bf16 base"]))
def test_peft_in_one_process_trains_alike(trained, bases, conversations, case):
    """Same initial values and data: the same losses, norms and adapters."""
    seen, library = trained(2, case), peft()
    config = script.Config(**flags_of(case, bases, conversations))
    plain = AutoModelForCausalLM.from_pretrained(config.init_from, dtype=torch.float32)
    settings = library.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, target_modules=config.target or "all-linear"
    )
    model = library.get_peft_model(as_kept(plain, config.base_precision), settings)
    ours = {f"base_model.model.{n}".replace(".w", ".default.w"): n for n in seen["before"]}
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert weights.keys() == ours.keys()
    for name, parameter in weights.items():
        initial = seen["before"][ours[name]]
        # PEFT's own: A within the same bounds, B zero.
        assert initial.abs().max() <= 1.1 * parameter.abs().max()
        assert initial.any() == parameter.any() == ("lora_A" in name)
        parameter.data.copy_(initial)
    optimizer = torch.optim.AdamW(weights.values(), betas=(0.9, 0.95), weight_decay=0.0)
    losses, norms = [], []
    batches = shared.load_data(script, config).training.stream(0, 4, 0, 1)
    for step, batch in enumerate(itertools.islice(batches, STEPS), 1):
        total = 0.0
        for micro in batch.micro_batches:
            logits = model(input_ids=micro["input_ids"]).logits.flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(
                logits, micro["labels"].flatten(), reduction="sum"
            )
            (loss / batch.num_targets).backward()
            total += loss.item()
        losses.append(total / batch.num_targets)
        norms.append(torch.nn.utils.clip_grad_norm_(weights.values(), 1.0).item())
        optimizer.param_groups[0]["lr"] = script.learning_rate_at(step, config)
        optimizer.step()
        optimizer.zero_grad()
    assert distance(seen, {"losses": losses}) < 1e-6 * losses[0]
    assert seen["norms"] == pytest.approx(norms, rel=1e-4)
    assert losses[-1] < losses[0] - 0.1
    for name, parameter in weights.items():
        assert (seen["after"][ours[name]] - parameter).abs().max() < 1e-5, name


@pytest.mark.parametrize("case", marked([*CASES]))
def test_only_adapters_change_and_training_starts_from_the_base(trained, case):
    seen = trained(2, case)
    assert seen["frozen as before"] and not seen["frozen gradients"] and not seen["updated"]
    assert seen["start"] == seen["base"] > seen["validation"]
    assert bool(seen["graphs"]) == case.startswith("compiled")
    assert not any(seen["before"][name].equal(after) for name, after in seen["after"].items())


SAME_BITS = ["recomputed", "offloaded", "replicas", "kept"]


@pytest.mark.parametrize("case", marked(SAME_BITS + ["recomputed nf4"]))
def test_modes_change_no_bit(trained, case):
    seen, plain = trained(2, case), trained(2, "nf4" if "nf4" in case else "fp32")
    # Replicas add up the squares of the norm in another order, and gradients are clipped by it.
    tolerance = 1e-6 if case == "replicas" else 0
    for what in ("losses", "norms"):
        assert seen[what] == pytest.approx(plain[what][:6], rel=tolerance, abs=0)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("case", ["fp32", "nf4"])
def test_any_number_of_ranks_trains_alike(trained, ranks, case):
    seen, two = trained(ranks, case), trained(2, case)
    assert distance(seen, two) < 1e-6 * two["losses"][0]
    for name, after in seen["after"].items():
        assert torch.equal(seen["before"][name], two["before"][name])
        assert (after - two["after"][name]).abs().max() < 1e-5, name


def test_codes_are_gathered_not_numbers(trained, bases):
    """34 bytes for 64 weights, in forward and in backward of each micro-batch."""
    weights = load_file(bases / "tied/model.safetensors")
    others = ("down_proj.weight", "bias", "norm.weight", "embed_tokens.weight")
    numbers = sum(w.numel() for name, w in weights.items() if not name.endswith(others))
    micro_batches, ranks = 2, 2
    saved = 2 * micro_batches * (4 - 34 / 64) * numbers * (ranks - 1) / ranks
    assert trained(2, "fp32")["sent"] - trained(2, "nf4")["sent"] == saved


def test_ranks_without_a_row_train_alike(trained):
    four, two = trained(4, "few rows"), trained(2, "few rows")
    assert four["rows"][0] == two["rows"][0] == 1  # and B's rows
    assert distance(four, two) < 1e-6 * two["losses"][0]


@pytest.mark.parametrize(
    "case, other, tolerance",
    [("packed", "fp32", 1e-5)]
    + [
        pytest.param(*pair, marks=pytest.mark.drill)
        for pair in [
            ("reduced often", "fp32", 1e-6),
            ("compiled", "padded", 1e-5),
            ("compiled nf4", "padded nf4", 1e-5),
            ("bf16", "fp32", 2e-2),
        ]
    ],
)
def test_other_modes_are_near(trained, case, other, tolerance):
    """Packed micro-batches hold other conversations, so compare them before training."""
    seen, plain = trained(2, case), trained(2, other)
    assert seen["start"] == pytest.approx(plain["start"], rel=tolerance)
    if case != "packed":
        assert distance(seen, plain) < tolerance * plain["losses"][0]
    assert seen["losses"] != plain["losses"][:6]


# --- NF4 ------------------------------------------------------------------------------------------


def test_codes_are_the_nearest_values():
    torch.manual_seed(0)
    weight = torch.randn(8, 128) * 0.02
    weight[0, :64] = 0.0
    values = script.nf4_values(weight.device)
    codes = script.quantize(weight)
    assert codes.dtype == torch.uint8 and codes.shape == (8, 2 * 34)
    assert values[0] == -1 and values[7] == 0 and values[15] == 1 and len(values) == 16
    blocks = weight.view(-1, 64)
    scales = blocks.abs().amax(1, keepdim=True).bfloat16().float()
    nearest = (blocks[:, :, None] - scales[:, :, None] * values).abs().min(2).values
    found = script.dequantize(codes, values)
    assert torch.allclose((found.view(-1, 64) - blocks).abs(), nearest, rtol=1e-4, atol=1e-9)
    assert not found[0, :64].any()
    # Rows do not depend on each other, so a rank can quantize its own ones, or none.
    assert torch.equal(script.quantize(weight[3:5]), codes[3:5])
    assert script.quantize(weight[:0]).shape == (0, 2 * 34)
    assert torch.equal(script.quantize(found), codes)


def test_a_quantized_layer_multiplies_by_the_dequantized_matrix():
    torch.manual_seed(0)
    codes, bias = script.quantize(torch.randn(48, 64)), torch.randn(48)
    values = script.nf4_values(codes.device)
    inputs, gradient = torch.randn(5, 64, requires_grad=True), torch.randn(5, 48)
    outputs = script.QuantizedLinear.apply(inputs, codes, bias, values)
    kept = outputs.grad_fn.saved_tensors
    outputs.backward(gradient)
    matrix = script.dequantize(codes, values)
    assert torch.equal(outputs, torch.nn.functional.linear(inputs, matrix, bias))
    assert torch.equal(inputs.grad, gradient @ matrix)
    assert sum(tensor.nbytes for tensor in kept) < 0.6 * matrix.numel()


BITSANDBYTES = """
import sys
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit

weight = torch.load(sys.argv[1])
codes, state = quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=False)
torch.save([codes.flatten(), dequantize_4bit(codes, state), state.code.float()], sys.argv[2])
"""


@pytest.mark.drill
def test_codes_are_those_of_bitsandbytes(tmp_path):
    """It rounds no scales, so a few codes at the border between two values differ."""
    packages, weight = tmp_path / "packages", 0.02 * torch.randn(1024, 1024)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", packages]
    if subprocess.run([*pip, "bitsandbytes==0.50.*"], capture_output=True).returncode:
        pytest.skip("bitsandbytes cannot be installed here")
    torch.save(weight, tmp_path / "weight.pt")
    command = [sys.executable, "-c", BITSANDBYTES, tmp_path / "weight.pt", tmp_path / "found.pt"]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": str(packages)}, check=True)
    pairs, theirs, values = torch.load(tmp_path / "found.pt")
    assert torch.equal(values[:16], script.nf4_values(weight.device))
    codes = script.quantize(weight)
    ours = script.dequantize(codes, values[:16])
    own_pairs = codes.unflatten(1, (-1, 34))[..., :32].flatten()
    # A byte holds two codes.
    equal = ((own_pairs >> 4 == pairs >> 4).sum() + (own_pairs % 16 == pairs % 16).sum()).item()
    assert equal / weight.numel() > 0.995
    errors = [((each - weight).norm() / weight.norm()).item() for each in (ours, theirs)]
    assert errors[0] == pytest.approx(errors[1], rel=5e-3) and 0.09 < errors[0] < 0.095


# --- What is adapted, and what is refused ---------------------------------------------------------


def meta_model(shape, **flags) -> torch.nn.Module:
    config = script.Config(**TUNED | flags)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape)
        freeze_unused(model)
        script.add_adapters(model, config)
    return model


def test_it_says_what_it_adapts(capsys):
    shape = small_shape(hidden_size=64, intermediate_size=96)
    model = meta_model(shape, base_precision="nf4", target=["down_proj", "q_proj"])
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    layers = [
        f"model.layers.{i}.{name}" for i in (0, 1) for name in ("self_attn.q_proj", "mlp.down_proj")
    ]
    assert trained == {f"{layer}.lora_{matrix}.weight" for layer in layers for matrix in "AB"}
    said = capsys.readouterr().out
    assert "of rank 16 on 2 q_proj in nf4, 2 down_proj:" in said
    assert f"{2 * 16 * (64 + 64 + 96 + 64):,} trained parameters" in said
    dtypes = {p.dtype for p in model.parameters() if not p.requires_grad}
    assert dtypes == {torch.bfloat16}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_stacked_experts_are_not_adapted(capsys):
    model = meta_model(small_mixture())
    adapted = {
        name.rpartition(".lora_")[0] for name, p in model.named_parameters() if p.requires_grad
    }
    assert {name.rpartition(".")[2] for name in adapted} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert "2 q_proj, 2 k_proj, 2 v_proj, 2 o_proj" in capsys.readouterr().out


def test_targets_that_match_nothing_are_refused():
    line = refused(partial(meta_model, small_shape(), target=["q_proj", "query"]))
    assert line == (
        "--target query: the blocks of this model have no such layer to adapt, but "
        "down_proj gate_proj k_proj o_proj q_proj up_proj v_proj"
    )
    gpt2 = GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=320)
    line = refused(meta_model, gpt2)
    assert line.startswith("--target all: the blocks") and line.endswith("to adapt, but none")


@pytest.mark.parametrize("base", ["none", "adapter", "no weights"])
def test_what_is_no_base_is_refused(bases, conversations, tmp_path, base):
    flags = {"dataset": conversations, "run_dir": tmp_path / "run", **TUNED}
    expected = "--init_from is missing: name the pretrained model to adapt"
    if base == "adapter":
        shutil.copytree(bases / "tied", tmp_path / "adapter")
        (tmp_path / "adapter/adapter_config.json").write_text("{}")
        flags["init_from"] = tmp_path / "adapter"
        expected = f"--init_from {tmp_path}/adapter holds adapters; use their base"
    if base == "no weights":
        small_shape().save_pretrained(tmp_path / "empty")
        flags["init_from"] = tmp_path / "empty"
        expected = f"--init_from {tmp_path}/empty has no *.safetensors here, and is not on the hub"
    done = launch(0, "fsdp2_lora", flags)
    assert done.returncode == 2 and not (tmp_path / "run").exists()
    [line] = done.stderr.splitlines()
    assert line.startswith(f"error: {expected}")


# --- Conversations --------------------------------------------------------------------------------


def test_the_chat_format_needs_no_new_tokens(bases):
    config = SimpleNamespace(tokenizer="bytes", chat_template="own")
    tokenizer, turn_end, known = script.conversations.chat_tokenizer(config, "text")
    assert known == len(tokenizer) == 257
    row = {"prompt": "a", "completion": "b"}
    ids, in_loss, *_ = script.tokenize_conversation(row, tokenizer)
    turns = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|endoftext|>\n"
    assert tokenizer.decode(ids) == turns and len(ids) == len(turns.encode()) - 12
    assert tokenizer.decode(ids[in_loss]) == "b<|endoftext|>"
    assert turn_end == tokenizer.eos_token_id == 256
    for mark in script.conversations.TURN:
        with pytest.raises(common.LeftOut, match="spell out a mark of turns"):
            script.tokenize_conversation({"prompt": mark, "completion": "b"}, tokenizer)


# --- Runs -----------------------------------------------------------------------------------------


def tune(flags: dict, ranks: int = 2, faults: list | None = None) -> str:
    """Run the script; returns its output."""
    done = launch(ranks, "fsdp2_lora", flags, faults)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


RUN = {"steps": 4, "eval_every": 2, "checkpoint_every": 2}
RUN |= {"learning_rate": 1e-2, "keep_checkpoints": 3}


@pytest.fixture(scope="module")
def finished(bases, conversations, tmp_path_factory):
    """Return the directory of a run with so many bits per weight of the base."""
    done: dict = {}

    def of(precision: str, base: str) -> Path:
        key = (precision, base)
        if key not in done:
            done[key] = tmp_path_factory.mktemp("run")
            flags = {**TUNED, **RUN, "dataset": conversations, "init_from": bases / base}
            tune(flags | {"base_precision": precision, "run_dir": done[key]})
        return done[key]

    return of


@torch.no_grad()
def validation_loss(model, run: Path) -> float:
    """Return the mean loss of a plain model on the validation set of a run."""
    used = json.loads((run / "config.json").read_text())
    names = [field.name for field in dataclasses.fields(script.Config)]
    config = script.Config(**{name: used[name] for name in names})
    validation = shared.load_data(script, config).validation
    total = count = 0
    for micro in validation.evaluation(0, 1):
        labels = micro["labels"].flatten()
        logits = model(input_ids=micro["input_ids"]).logits.flatten(0, 1)
        total += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
        count += (labels >= 0).sum().item()
    return total / count


@pytest.mark.parametrize("precision, base", [("fp32", "tied"), ("nf4", "untied")])
def test_adapters_and_merged_weights_are_those_of_peft(finished, bases, precision, base):
    run, library = finished(precision, base), peft()
    reported = metrics(run)[1][-1]["validation_loss"]
    plain = AutoModelForCausalLM.from_pretrained(bases / base, dtype=torch.float32)
    before = validation_loss(plain, run)
    kept = as_kept(plain, precision)
    loaded = library.PeftModel.from_pretrained(kept, run / "adapter").eval()
    assert validation_loss(loaded, run) == pytest.approx(reported, abs=1e-5)
    merged = AutoModelForCausalLM.from_pretrained(run / "hf")
    assert merged.dtype == torch.float32 and before > reported + 0.1
    tolerance = {"fp32": 1e-5, "nf4": 1e-2}[precision]  # of an NF4 run, the rest is not rounded
    assert validation_loss(merged, run) == pytest.approx(reported, abs=tolerance)
    weights = dict(merged.named_parameters())
    for name, parameter in loaded.merge_and_unload().named_parameters():
        if precision == "fp32" or "_proj.weight" in name and "down" not in name:
            assert torch.equal(weights[name], parameter), name


@pytest.mark.parametrize("precision", ["bf16", "nf4"])
def test_files_in_bf16_are_merged_in_fp32_and_rounded_once(tmp_path, precision):
    """In NF4, the adapters are added to what the codes stand for."""
    torch.manual_seed(0)
    weights = {f"{name}.weight": torch.randn(32, 64).bfloat16() for name in ("adapted", "other")}
    save_file(weights, tmp_path / "model.safetensors")
    adapters = {
        "adapted.lora_A.weight": torch.randn(4, 64),
        "adapted.lora_B.weight": torch.randn(32, 4),
    }
    flags = TUNED | {"rank": 4, "alpha": 3.0, "init_from": str(tmp_path)}
    config = script.Config(base_precision=precision, **flags)
    merged = {name: torch.empty_like(weight) for name, weight in weights.items()}
    script.read_merged(config, adapters, tmp_path, {"model": merged})
    kept = weights["adapted.weight"].float()
    if precision == "nf4":
        kept = script.dequantize(script.quantize(kept), script.nf4_values(kept.device))
    product = adapters["adapted.lora_B.weight"] @ adapters["adapted.lora_A.weight"]
    assert torch.equal(merged["adapted.weight"], (kept + 0.75 * product).bfloat16())
    assert torch.equal(merged["other.weight"], weights["other.weight"])


# Types that PEFT or the model treats in its own way: Mamba kinds, and MoE models with dense layers.
UNUSUAL = ["mamba", "nemotron_h", "deepseek_v3", "longcat_flash"]


@pytest.mark.parametrize(
    "name",
    UNUSUAL
    + [
        pytest.param(name, marks=pytest.mark.drill)
        for name in share(sorted({*BUCKETED_TYPES.split()} - {*UNUSUAL}))
    ],
)
def test_each_adapter_is_trained_and_peft_loads_it(name, tmp_path, capsys):
    """By default. The losses of the model that was trained and of PEFT's are equal."""
    library, model = peft(), plain_model(name)
    model.save_pretrained(tmp_path, save_original_format=False)
    eager = {} if getattr(model.config, "alibi", False) else {"attn_implementation": "eager"}
    base = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **eager)
    freeze_unused(model)
    config = SimpleNamespace(
        target=None, rank=2, alpha=4.0, base_precision="fp32", init_from=str(tmp_path)
    )
    try:
        script.add_adapters(model, config)
    except common.Refusal:
        return  # it has no nn.Linear
    for module in model.modules():
        if isinstance(module, script.LoraLinear):
            module.start()
            torch.nn.init.normal_(module.lora_B.weight, std=0.1)
    ids = torch.arange(48)[None]
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all(p.grad is not None for p in trained.values())
    checkpoints = SimpleNamespace(newest=None)
    run = SimpleNamespace(
        directory=tmp_path, config=config, checkpoints=checkpoints,
        tokenizer=common.load_tokenizer("bytes"),
    )  # fmt: skip
    script.write_adapter(run, {name: p.detach() for name, p in trained.items()})
    before = base(input_ids=ids, labels=ids, use_cache=False).loss.item()
    loaded = library.PeftModel.from_pretrained(base, tmp_path / "adapter")
    after = loaded(input_ids=ids, labels=ids, use_cache=False).loss.item()
    assert after == pytest.approx(loss.item(), rel=1e-5) and abs(after - before) > 1e-4


def test_files_of_a_run(finished, bases):
    run = finished("fp32", "tied")
    description = json.loads((run / "adapter/adapter_config.json").read_text())
    assert description["base_model_name_or_path"] == str(bases / "tied")
    assert (description["r"], description["lora_alpha"]) == (16, 32.0)
    kinds = [f"self_attn.{name}_proj" for name in "qkvo"]
    kinds += [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    layers = {f"model.layers.{i}.{kind}" for i in (0, 1) for kind in kinds}
    assert {*description["target_modules"]} == layers
    assert {path.name for path in (run / "adapter").iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "chat_template.jinja",
        "tokenization.py", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    for part in ("adapter", "hf"):
        tokenizer = AutoTokenizer.from_pretrained(run / part)
        assert tokenizer.eos_token == "<|endoftext|>" and len(tokenizer) == 257
        assert tokenizer.chat_template == script.conversations.TEXT_TEMPLATE
    assert not [*run.glob(".*")]
    # A checkpoint holds the adapters and their two moments, and nothing of the base.
    adapters = load_file(run / "adapter/adapter_model.safetensors")
    checkpoint = run / "checkpoints/step_00000004"
    keys = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    assert all("lora_" in key for key in keys) and len(keys) == 4 * len(adapters)


def test_a_run_without_checkpoints_writes_no_adapters(bases, conversations, tmp_path):
    flags = {**TUNED, "dataset": conversations, "init_from": bases / "tied", "steps": 1}
    said = tune(flags | {"checkpoint_every": 0, "run_dir": tmp_path}, ranks=1)
    assert said.endswith("after step 1; no checkpoint and no hf/ (--checkpoint_every 0)\n")
    assert not [*tmp_path.glob("*/")]


def test_a_run_resumes_to_the_last_bit(finished, bases, conversations, tmp_path):
    """It is killed, or its checkpoint goes on in another directory. The base must be the same."""
    whole = finished("nf4", "untied")
    flags = {**TUNED, **RUN, "dataset": conversations, "base_precision": "nf4"}
    flags |= {"init_from": bases / "untied", "run_dir": tmp_path / "run"}
    kill = {"call": "run.Run.log_step", "number": 4, "rank": 1, "do": "kill"}
    assert launch(2, "fsdp2_lora", flags, [kill]).returncode == 1
    assert "resuming from" in tune(flags)
    for part in ("loss", "grad_norm"):
        lines = [[line[part] for line in metrics(d)[0]] for d in (whole, tmp_path / "run")]
        assert lines[0] == lines[1] and len(lines[0]) == 4
    names = ("adapter/adapter_model.safetensors", "hf/model.safetensors")
    for name in names:
        assert (whole / name).read_bytes() == (tmp_path / "run" / name).read_bytes()

    # A start with fewer steps has none to do. It writes the same again.
    tune(flags | {"steps": 3})
    for name in names:
        assert (whole / name).read_bytes() == (tmp_path / "run" / name).read_bytes()

    # The other base has the same path: other weights were written to it since.
    base, other = tmp_path / "base", tmp_path / "other"
    shutil.copytree(bases / "untied", base)
    tune(flags | {"init_from": base, "run_dir": other, "steps": 2, "checkpoint_every": 1})
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"] += 1e-3
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    for changed in ({}, {"init_from": bases / "untied"}, {"rank": 8}, {"base_precision": "fp32"}):
        given = flags | {"init_from": base, "run_dir": other, **changed}
        done = launch(2, "fsdp2_lora", given)
        assert done.returncode == 1
        [line] = done.stderr.splitlines()
        assert re.match(
            r"error: checkpoint .*step_00000002 was written with (init_from|weights_hash) ", line
        )
