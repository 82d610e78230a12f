"""Reference runs: the folders, the checker, and the proofs that both are right."""

import ast
import importlib.util
import json
import math
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import check
import make
import pytest
import torch
from grid import share
from known_mistakes import MISTAKES
from launching import EXPERTS, INSIDE, MUON, ROOT, SCRIPTS, launch_cases, metrics
from record_reference import PLANTED, record, train
from reference_loops import BF16, NOISE, REAL, SHARDED, UNKNOWN, Real, loop, table
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import common

REFERENCE = ROOT / "reference"
FOLDERS = ["dense", "moe", "packed", "chat"]
KEYS = ["loss", "grad_norm"]


def read(folder: str, file: str = "expected.json") -> dict:
    return json.loads((REFERENCE / folder / file).read_text())


def write_log(path: Path, lines: list[dict]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run_check(*words: str | Path) -> subprocess.CompletedProcess:
    """Run the checker without any installed package."""
    command = [sys.executable, "-I", "-S", REFERENCE / "check.py", *words]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True)


def answer(folder: str, lines: list[dict], tmp_path: Path, capsys, bf16: bool = False) -> str:
    """Return what the checker prints."""
    log = write_log(tmp_path / "log.jsonl", lines)
    check.main(str(REFERENCE / folder), str(log), None, bf16)
    return capsys.readouterr().out


def places(printed: str) -> dict[str, int]:
    """Return the names that an answer has, with their places. Those that do the same share one."""
    found = {}
    for place, part in enumerate(printed.split("\ndistance ")[1:], 1):
        found |= dict.fromkeys(re.findall(r"^  (\S.*) \(ranks: [124, ]+\)$", part, re.M), place)
    return found


# --- The folders ----------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", FOLDERS)
def test_batches_keep_to_the_schema(folder):
    batches = read(folder, "batches.json")
    hyper, steps = batches["hyper"], batches["steps"]
    names = ["learning_rate", "min_learning_rate", "warmup_steps", "steps", "betas", "eps"]
    assert set(hyper) == {*names, "weight_decay", "grad_clip", "decay", "packed"}
    assert len(steps) == hyper["steps"] == 12 and hyper["packed"] == (folder == "packed")
    counts = []
    for step in steps:
        assert len(step) == 4
        counts.append([sum(sum(s["targets"]) for s in micro_batch) for micro_batch in step])
        for micro_batch in step:
            for sequence in micro_batch:
                tokens, targets = sequence["tokens"], sequence["targets"]
                assert set(sequence) == {"tokens", "targets"} and 3 <= len(tokens) == len(targets)
                assert all(0 <= token < 96 for token in tokens)
                assert targets[0] == 0 and 0 < sum(targets) < len(targets)
                assert folder == "chat" or sum(targets) == len(targets) - 1
    lengths = {len(s["tokens"]) for step in steps for micro_batch in step for s in micro_batch}
    assert len(lengths) > 20
    # Otherwise a mean of means would not show.
    assert all(max(count) > 1.25 * min(count) for count in counts)


@pytest.mark.parametrize("folder", FOLDERS)
def test_expected_numbers_keep_to_the_schema(folder):
    expected = read(folder)
    assert set(expected) == {"right", "sums", "bf16_tolerance", "mistakes"}
    logs = [expected["right"]]
    for mistake in expected["mistakes"]:
        keys = {"name", "sentence", "thread", "ranks", "recorded", "steps"}
        assert set(mistake) == keys and set(mistake["ranks"]) <= {1, 2, 4} and mistake["ranks"]
        assert all(url.startswith("https://github.com/") for url in mistake["thread"].split())
        logs.append(mistake["steps"])
    for log in logs:
        assert [line["step"] for line in log] == list(range(1, 13))
        assert all(set(line) == {"step", "loss", "grad_norm", "learning_rate"} for line in log)
    norms = [line["grad_norm"] for line in expected["right"]]
    clip = read(folder, "batches.json")["hyper"]["grad_clip"]
    assert min(norms) < clip < max(norms)


def test_all_folders_have_a_few_hundred_kilobytes():
    files = [file for folder in FOLDERS for file in (REFERENCE / folder).iterdir()]
    names = {"config.json", "model.safetensors", "batches.json", "expected.json"}
    assert {file.name for file in files} == names
    assert sum(file.stat().st_size for file in files) < 700_000


@pytest.mark.parametrize("folder", FOLDERS)
def test_weights_have_the_names_of_the_hub_and_no_default_values(folder):
    weights = load_file(REFERENCE / folder / "model.safetensors")
    assert weights.keys() == read(folder)["sums"].keys()
    assert set(read(folder, "batches.json")["hyper"]["decay"]) == {
        name for name, x in weights.items() if x.ndim > 1 and "embed" not in name
    }
    for name, tensor in weights.items():
        assert tensor.dtype == torch.bfloat16
        if tensor.ndim == 1:  # biases and norms
            assert len(tensor.unique()) > len(tensor) / 4, name
    model, report = AutoModelForCausalLM.from_pretrained(
        REFERENCE / folder, output_loading_info=True
    )
    assert model.dtype == torch.float32 and not any(report.values())


@pytest.mark.drill
@pytest.mark.parametrize("folder", share(FOLDERS))
def test_the_program_makes_the_folder_again(folder, tmp_path):
    make.make(folder, tmp_path)
    for file in ("config.json", "batches.json", "model.safetensors"):
        assert (tmp_path / file).read_bytes() == (REFERENCE / folder / file).read_bytes(), file
    made, expected = json.loads((tmp_path / "expected.json").read_text()), read(folder)

    def compare(one, other):
        assert type(one) is type(other)
        if isinstance(one, float):
            assert one == pytest.approx(other, rel=1e-9, abs=1e-9)
        elif isinstance(one, dict):
            assert one.keys() == other.keys()
            for key in one:
                compare(one[key], other[key])
        elif isinstance(one, list):
            assert len(one) == len(other)
            for pair in zip(one, other):
                compare(*pair)
        else:
            assert one == other

    compare(made, expected)


# --- The oracle -----------------------------------------------------------------------------------


def test_the_oracle_imports_nothing_of_ours_but_the_list():
    tree = ast.parse((REFERENCE / "make.py").read_text())
    names = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names += [a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names]
    ours = {path.stem for path in [*ROOT.glob("*.py"), *REFERENCE.glob("*.py")]}
    assert {name.split(".")[0] for name in names} & ours == {"known_mistakes"}


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_oracles_forward_is_that_of_transformers(folder, monkeypatch):
    some = read(folder, "batches.json")["steps"][0]
    make.compare_with_transformers(REFERENCE / folder, some)
    monkeypatch.setattr(make, "silu", torch.nn.functional.gelu)
    with pytest.raises(SystemExit, match="^error: .*/[a-z]+: the forward is [0-9e-]+ from that of"):
        make.compare_with_transformers(REFERENCE / folder, some)


def test_each_mistake_is_an_edit_that_fits_and_happens_somewhere():
    text = (REFERENCE / "make.py").read_text()
    happen = {mistake["name"] for folder in FOLDERS for mistake in read(folder)["mistakes"]}
    for mistake in MISTAKES:
        assert mistake.name in happen
        assert (mistake.edits is None) or mistake.apply(text) != text
        compile(mistake.apply(text), mistake.name, "exec")


# --- The checker ----------------------------------------------------------------------------------


def test_the_checker_is_short():
    text = (REFERENCE / "check.py").read_text()
    assert len(text.splitlines()) <= 100
    top = [node for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert {a.name for node in top for a in node.names} <= set(sys.stdlib_module_names)


def test_the_right_log_passes_without_any_package(tmp_path):
    for folder in FOLDERS:
        done = run_check(
            REFERENCE / folder, write_log(tmp_path / "log.jsonl", read(folder)["right"])
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == "right to 0e+00 over 12 steps\n"


def edit(lines: list[str], number: int, **values) -> list[str]:
    """Change values of a line. None removes one."""
    line = json.loads(lines[number]) | values
    line = {key: value for key, value in line.items() if value is not None}
    return [*lines[:number], json.dumps(line), *lines[number + 1 :]]


BAD = {
    "empty": lambda lines: [],
    "one line": lambda lines: lines[:1],
    "a line less": lambda lines: lines[:-1],
    "written twice": lambda lines: lines * 2,
    "no loss": lambda lines: edit(lines, 3, loss=None),
    "no norm": lambda lines: edit(lines, 3, grad_norm=None),
    "no norms": lambda lines: [re.sub('"grad_norm": [^,]*, ', "", line) for line in lines],
    "zero": lambda lines: edit(lines, 3, grad_norm=0.0),
    "negative": lambda lines: edit(lines, 3, loss=-1.0),
    "not a number": lambda lines: edit(lines, 3, loss=math.nan),
    "infinite": lambda lines: edit(lines, 3, grad_norm=math.inf),
    "text": lambda lines: edit(lines, 3, loss="4.6"),
    "true": lambda lines: edit(lines, 3, loss=True),
    "a list": lambda lines: edit(lines, 3, loss=[4.6]),
    "broken": lambda lines: [*lines[:3], lines[3][:20], *lines[4:]],
    "not an object": lambda lines: [*lines[:3], "[4.6, 1.2]", *lines[4:]],
    "a blank line": lambda lines: [*lines[:3], "", *lines[3:]],
    "not JSON": lambda lines: ["step 1: loss 4.6"],
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_log_is_refused_in_one_line(bad, tmp_path):
    lines = [json.dumps(line) for line in read("dense")["right"]]
    changed = BAD[bad](lines)
    assert changed != lines
    log = tmp_path / "log.jsonl"
    log.write_text("".join(line + "\n" for line in changed))
    done = run_check(REFERENCE / "dense", log)
    assert done.returncode == 1 and done.stdout == ""
    assert re.fullmatch(r"error: .*\n", done.stderr) and str(log) in done.stderr


def test_missing_files_are_refused_in_one_line(tmp_path):
    log = write_log(tmp_path / "log.jsonl", read("dense")["right"])
    for folder, path in ((REFERENCE / "dense", tmp_path / "none"), (tmp_path, log)):
        done = run_check(folder, path)
        assert done.returncode == 1 and re.fullmatch(r"error: .*\n", done.stderr)


def test_lines_of_validations_are_skipped(tmp_path, capsys):
    lines = read("dense")["right"]
    lines.insert(6, {"step": 6, "validation_loss": 3.0})
    assert answer("dense", lines, tmp_path, capsys) == "right to 0e+00 over 12 steps\n"


def noisy(lines: list[dict], size: float, seed: int = 0) -> list[dict]:
    """Return a log with relative errors of this size."""
    rng = random.Random(seed)
    return [
        line | {key: line[key] * (1 + size * rng.choice([-1, 1])) for key in KEYS} for line in lines
    ]


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_tolerance_is_where_a_log_stops_being_right(folder, tmp_path, capsys):
    right = read(folder)["right"]
    for bf16, tolerance in ((False, check.TOLERANCE), (True, read(folder)["bf16_tolerance"])):
        inside = answer(folder, noisy(right, 0.99 * tolerance), tmp_path, capsys, bf16)
        assert inside.startswith("right to ")
        one = [line | {"loss": line["loss"] * (1 + 1.1 * tolerance)} for line in right[:1]]
        outside = answer(folder, one + right[1:], tmp_path, capsys, bf16)
        assert outside.startswith(f"wrong from step 1 on: loss +{1.1 * tolerance:.1e}, gradient")


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_mistake_is_named_first(folder, tmp_path, capsys):
    """Also with errors such as those of fp32."""
    for mistake in read(folder)["mistakes"]:
        printed = answer(folder, noisy(mistake["steps"], 5e-7), tmp_path, capsys)
        assert printed.startswith("wrong from step ") and "like none" not in printed
        assert places(printed)[mistake["name"]] == 1, mistake["name"]
        assert mistake["sentence"] in printed and mistake["thread"] in printed


def test_mistakes_that_do_the_same_are_printed_as_one(tmp_path, capsys):
    for mistake in read("dense")["mistakes"]:
        if mistake["name"] == "one rank trains alone":
            found = places(answer("dense", mistake["steps"], tmp_path, capsys))
            assert found["one rank trains alone"] == 1
            assert found["all ranks train on the data of rank 0"] == 1
            assert sorted(set(found.values())) == [1, 2, 3]


def test_bf16_names_what_it_cannot_tell_from_right(tmp_path, capsys):
    expected = read("chat")
    small = {
        mistake["name"]
        for mistake in expected["mistakes"]
        if make.difference(mistake["steps"], expected["right"]) < expected["bf16_tolerance"]
    }
    printed = answer("chat", expected["right"], tmp_path, capsys, bf16=True)
    assert small == set(re.findall("cannot be told from right in bf16: (.*)", printed))
    assert 1 <= len(small) < 6


def test_wrong_weights_are_noticed(tmp_path):
    """The file of the start, one that lacks a tensor, with another head, NaN, and no weights."""
    start, file = REFERENCE / "dense/model.safetensors", tmp_path / "model.safetensors"
    found = check.check_weights(str(start), read("dense")["sums"], 1e-3)
    assert re.fullmatch("wrong weights: the sums of model.embed_tokens.weight differ by .*", found)
    weights, name = load_file(start), "model.norm.weight"
    sums = {n: [x.double().sum().item(), x.double().abs().sum().item()] for n, x in weights.items()}
    head = {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    cases = [
        (weights, None),
        (weights | head, None),  # stored twice
        ({key: x for key, x in weights.items() if key != name}, f"{name} is missing"),
        (weights | {"lm_head.weight": torch.ones(96, 32)}, "the sums of lm_head.weight differ by"),
        (weights | {name: weights[name] * math.nan}, f"the sums of {name} differ by nan"),
    ]
    for tensors, wrong in cases:
        save_file(tensors, file)
        found = check.check_weights(str(file), {**sums}, 1e-6)
        assert found == wrong if wrong is None else f"wrong weights: {wrong}" in found
    file.write_text("no weights")
    assert check.check_weights(str(file), sums, 1e-6).startswith(f"error: {file}: ")


def test_weights_need_packages_and_say_so_in_one_line(tmp_path):
    log = write_log(tmp_path / "log.jsonl", read("dense")["right"])
    done = run_check(REFERENCE / "dense", log, "--weights", "weights.safetensors")
    assert done.returncode == 1 and done.stdout == "right to 0e+00 over 12 steps\n"
    assert done.stderr == "error: No module named 'safetensors'\n"


# --- Right loops and strategies -------------------------------------------------------------------


def loops(ranks: int, cases: dict, folder: Path) -> dict:
    """Return the logs of the page's loop, edited. A case has a folder, edits, and `trained`."""
    cases = {
        case: {"folder": str(REFERENCE / name), "edits": edits, "trained": trained}
        for case, (name, edits, trained) in cases.items()
    }
    return launch_cases(ranks, "reference_worker", folder, cases)


def off(folder: str, lines: list[dict]) -> float:
    """Return the largest logarithm of a ratio to the right numbers."""
    return max(map(abs, check.ratios(lines, read(folder)["right"])))


def check_right(folder: str, lines: list[dict], tmp_path: Path, weights: Path) -> None:
    log = write_log(tmp_path / "right.jsonl", lines)
    assert not check.main(str(REFERENCE / folder), str(log), str(weights), False)
    assert off(folder, lines) < check.TOLERANCE / 10


def test_the_loop_of_the_page_is_right(tmp_path):
    """In fp32, with noise in the last bit of gradients, and in bf16."""
    trained = {folder: str(tmp_path / f"trained_{folder}") for folder in FOLDERS}
    cases = {folder: (folder, [], trained[folder]) for folder in ("dense", "moe")}
    cases |= {"packed": ("packed", NOISE, trained["packed"]), "chat": ("chat", BF16, "")}
    seen = loops(2, cases, tmp_path)
    for folder in ("dense", "moe", "packed"):
        check_right(folder, seen[folder], tmp_path, Path(trained[folder], "model.safetensors"))
    assert check.TOLERANCE < off("chat", seen["chat"]) < read("chat")["bf16_tolerance"]


def test_the_command_of_the_page_copies_the_loop(tmp_path):
    page = (REFERENCE / "README.md").read_text()
    [command, *_] = page.split("<!-- example -->\n```bash\n")[1].splitlines()
    words = command.replace("loop.py", str(tmp_path / "loop.py"))
    subprocess.run(words, shell=True, cwd=ROOT, check=True)
    assert (tmp_path / "loop.py").read_text() == loop()


def test_the_loop_of_the_page_is_short():
    assert len([line for line in loop().splitlines() if line.strip()]) <= 40
    assert all(len(line) <= 100 for line in loop().splitlines())


@pytest.mark.drill
@pytest.mark.parametrize("ranks", share([1, 2, 4]))
def test_right_loops_are_right_on_any_number_of_ranks(ranks, tmp_path):
    kinds = {"fp32": [], "noise": NOISE, "bf16": BF16, "FSDP2": SHARDED}
    cases = {
        f"{folder} {kind}": (folder, edits, "")
        for folder in FOLDERS
        for kind, edits in kinds.items()
    }
    for case, lines in loops(ranks, cases, tmp_path).items():
        folder, kind = case.split()
        bf16 = read(folder)["bf16_tolerance"]
        assert off(folder, lines) < (bf16 if kind == "bf16" else check.TOLERANCE / 10), case
        assert (off(folder, lines) > bf16 / 30) == (kind == "bf16")


# Name -> script and flags. In fp32 each is right on every reference run that it can train on.
STRATEGIES = {
    "ddp": (SCRIPTS[0], {}),
    "zero1": (SCRIPTS[0], {"shard_optimizer": "true"}),
    "fsdp1": (SCRIPTS[1], {}),
    "fsdp2": (SCRIPTS[2], {}),
    "hsdp": (SCRIPTS[2], {"dp_replicate": 2}),
    "tp": (INSIDE[0], {}),
    "cp": (INSIDE[1], {}),
    "ring": (INSIDE[1], {"context_attention": "ring"}),
    "cp 4": (INSIDE[1], {"context_parallel": 4}),
    "ring 4": (INSIDE[1], {"context_attention": "ring", "context_parallel": 4}),
    "pp": (INSIDE[2], {}),
    "gpipe": (INSIDE[2], {"schedule": "gpipe"}),
    "zero bubble": (INSIDE[2], {"schedule": "zero_bubble"}),
    "pp hsdp": (INSIDE[2], {"pipeline_parallel": 2, "dp_replicate": 2}),
    "nd tp pp": ("fsdp2_nd_pretrain.py", {"tensor_parallel": 2, "pipeline_parallel": 2}),
    "nd cp": ("fsdp2_nd_pretrain.py", {"context_parallel": 2}),
    "ep": (EXPERTS, {"balance_rate": 0}),
    "ep 4": (EXPERTS, {"balance_rate": 0, "expert_parallel": 4}),
    "sft": ("fsdp2_sft.py", {}),
}
# The first three are on odd lengths.
PLAIN = [("cp", "chat", 4), ("pp", "chat", 4), ("nd tp pp", "packed", 4), ("ep", "moe", 4)]
PLAIN += [("ddp", "dense", 2), ("fsdp2", "packed", 2)]  # FSDP1 has the bits of DDP


def trains(name: str, folder: str) -> bool:
    """Return whether a strategy can train on a reference run."""
    script, own = STRATEGIES[name]
    if "tp" in name:  # DTensor takes long where it sees a shape for the first time
        return folder == "packed"
    if folder == "moe" or script == EXPERTS:
        return folder == "moe" and script in (*SCRIPTS, EXPERTS)
    if folder == "packed":
        return name != "sft" and own.get("context_attention") != "ring"
    return name != "sft" or folder == "chat"


def grid() -> Iterator[tuple[str, str, int]]:
    """Yield each strategy with each folder, on 2 ranks, or on 4."""
    for folder in FOLDERS:
        for name, (_, own) in STRATEGIES.items():
            if trains(name, folder):
                groups = [
                    value for flag, value in own.items() if "parallel" in flag or "dp" in flag
                ]
                yield name, folder, 4 if folder == "chat" or math.prod(groups) == 4 else 2
    yield from [("ddp", "packed", 1), ("fsdp2", "chat", 1)]


@pytest.fixture(scope="session")
def starts(tmp_path_factory) -> dict[str, Path]:
    """Return a directory to start from for each reference run.

    In memory transformers has the experts of a layer in one tensor, and `load_weights` reads that.
    """
    fused = tmp_path_factory.mktemp("fused")
    model = AutoModelForCausalLM.from_pretrained(REFERENCE / "moe")
    model.save_pretrained(fused, save_original_format=False)
    return {folder: REFERENCE / folder for folder in FOLDERS} | {"moe": fused}


def check_strategy(name: str, folder: str, ranks: int, tmp_path: Path, start: Path) -> None:
    """Train with a script's own `main`, and compare log, weights and validation."""
    script, own = STRATEGIES[name]
    run = tmp_path / "run"
    lines = train(script, ranks, REFERENCE / folder, run, init_from=start, **own)
    common.export(max((run / "checkpoints").iterdir()), tmp_path / "hub", hub_names=True)
    weights = tmp_path / "hub/model.safetensors"
    check_right(folder, lines, tmp_path, weights)
    # Validation has the sequences of the first step.
    first = read(folder, "batches.json")["steps"][0]
    config = json.loads((REFERENCE / folder / "config.json").read_text())
    trained = {name: tensor.double() for name, tensor in load_file(weights).items()}
    summed = sum(make.summed_loss(trained, micro_batch, config).item() for micro_batch in first)
    [validation] = [line["validation_loss"] for line in metrics(run)[1]]
    assert validation == pytest.approx(summed / sum(map(make.count_targets, first)), rel=5e-7)


@pytest.mark.parametrize("name, folder, ranks", PLAIN)
def test_a_strategy_is_right(name, folder, ranks, tmp_path, starts):
    check_strategy(name, folder, ranks, tmp_path, starts[folder])


@pytest.mark.drill
@pytest.mark.parametrize(
    "name, folder, ranks",
    share(case for case in grid() if case not in PLAIN),
)
def test_every_strategy_is_right(name, folder, ranks, tmp_path, starts):
    check_strategy(name, folder, ranks, tmp_path, starts[folder])


@pytest.mark.drill
@pytest.mark.parametrize(
    "script, folder, ranks, right", [(MUON, "dense", 2, 2), ("fsdp2_lora.py", "chat", 1, 1)]
)
def test_others_begin_right(script, folder, ranks, right, tmp_path):
    """Muon with loss and gradient norm, LoRA with the loss. (GRPO draws its own sequences.)"""
    lines = train(script, ranks, REFERENCE / folder, tmp_path / "run")
    found = check.ratios(lines, read(folder)["right"])
    assert max(map(abs, found[:right])) < check.TOLERANCE / 10
    assert abs(found[2]) > 1e-4


@pytest.mark.drill
@pytest.mark.parametrize("folder", share(FOLDERS))
def test_the_tolerance_of_bf16_is_twice_what_scripts_need(folder, tmp_path, starts):
    """And no token goes to another expert."""
    found = []
    for script in SCRIPTS:
        run = tmp_path / script
        own = {"init_from": starts[folder], "precision": "bf16"}
        found.append(off(folder, train(script, 2, REFERENCE / folder, run, **own)))
    assert 0.25 < max(found) / read(folder)["bf16_tolerance"] < 0.75


# --- Mistakes made for real -----------------------------------------------------------------------


def test_every_mistake_is_made_for_real_or_recorded():
    made, recorded = {real.name for real in REAL}, {planted.name for planted in PLANTED}
    assert made == {mistake.name for mistake in MISTAKES if mistake.edits}
    assert recorded == {mistake.name for mistake in MISTAKES if not mistake.edits}


def test_the_edits_fit():
    for real in REAL:
        text = (ROOT / real.file).read_text() if real.file else loop()
        assert real.apply(text) != text
        compile(real.apply(text), real.name, "exec")


def check_named(real: Real, ranks: int, lines: list[dict], tmp_path: Path, capsys) -> None:
    """The mistake is named first, with this number of ranks, and nothing else is as near."""
    printed = answer(real.folder, lines, tmp_path, capsys)
    assert "like none" not in printed and places(printed).get(real.name) == 1, (real.name, printed)
    first = printed.split("\ndistance ")[1]
    assert float(first.split()[0]) < 0.05
    found = re.search(re.escape(f"  {real.name} (ranks: ") + r"([124, ]+)\)", first)
    assert str(ranks) in found[1].split(", ")


@pytest.mark.drill
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_mistake_in_a_real_loop_is_named(ranks, tmp_path, capsys):
    chosen = {real.name: real for real in share(REAL) if ranks in real.ranks and not real.file}
    cases = {name: (real.folder, real.edits, "") for name, real in chosen.items()}
    for name, lines in loops(ranks, cases, tmp_path).items():
        check_named(chosen[name], ranks, lines, tmp_path, capsys)


@pytest.mark.drill
@pytest.mark.parametrize(
    "real, ranks",
    share((real, ranks) for real in REAL if real.file for ranks in real.ranks),
    ids=lambda value: getattr(value, "name", value),
)
def test_a_mistake_in_a_copy_of_a_script_is_named(real, ranks, tmp_path, starts, capsys):
    flags = real.flags(ranks) | {"init_from": starts[real.folder]}
    folder = REFERENCE / real.folder
    lines = train(real.script, ranks, folder, tmp_path / "run", real, **flags)
    check_named(real, ranks, lines, tmp_path, capsys)


@pytest.mark.drill
@pytest.mark.parametrize(
    "planted",
    share(each for each in PLANTED if each.folder == "packed" or "TP" not in each.name),
    ids=lambda planted: f"{planted.name} {planted.folder}",
)
def test_a_recorded_mistake_does_it_again(planted, tmp_path, capsys):
    lines = record(planted, tmp_path / "run")
    printed = answer(planted.folder, lines, tmp_path, capsys)
    assert places(printed)[planted.name] == 1 and "distance 0.0" in printed


@pytest.mark.drill
@pytest.mark.parametrize("folder", share(FOLDERS))
def test_other_mistakes_are_like_none(folder, tmp_path, capsys):
    """They are further from all of the list than a mistake made for real is from its numbers."""
    config = json.loads((REFERENCE / folder / "config.json").read_text())
    weights = load_file(REFERENCE / folder / "model.safetensors")
    for name, edits in UNKNOWN.items():
        train_wrong = make.edited_train(Real(name, edits), 1)
        lines, _ = train_wrong(weights, read(folder, "batches.json"), config)
        printed = answer(folder, lines, tmp_path, capsys)
        assert "This is like none of the known mistakes." in printed, name
        assert float(printed.split("\ndistance ")[1].split()[0]) > 0.8, name


def test_the_page_shows_the_table():
    assert table() in (REFERENCE / "README.md").read_text()


# --- Loops that nobody here wrote -----------------------------------------------------------------


def trl_package() -> str:
    apart = Path(sys.prefix, "trl")  # where .ci/run installs it
    if not apart.exists() and importlib.util.find_spec("trl") is None:
        pytest.skip("needs the package trl")
    return str(apart)


@pytest.mark.drill
@pytest.mark.parametrize(
    "which, optimizer",
    share(
        [
            ("trainer", "given"),
            ("trainer", "means"),
            ("trainer", "own"),
            ("sft", "given"),
            ("sft", "own"),
            ("sft_bf16", "given"),
        ]
    ),
)
def test_trainers_of_others_give_what_the_page_says(which, optimizer, tmp_path, capsys):
    folders = [REFERENCE / "dense", REFERENCE / "chat"]
    packages = trl_package() if which.startswith("sft") else ""
    # A rank in the environment is a distributed run for accelerate.
    environment = {name: os.environ[name] for name in os.environ if "RANK" not in name}
    program = [sys.executable, ROOT / "tests/support/reference_trainer.py"]
    done = subprocess.run(
        [*program, which, optimizer, tmp_path, *folders],
        cwd=tmp_path, env=environment | {"PYTHONPATH": packages}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for folder in ("dense", "chat"):
        log = tmp_path / f"{folder}.jsonl"
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        if which == "sft_bf16":
            assert check.TOLERANCE < off(folder, lines) < read(folder)["bf16_tolerance"]
        elif optimizer == "given":
            assert off(folder, lines) < check.TOLERANCE / 10
        else:
            printed = answer(folder, lines, tmp_path, capsys)
            name = "learning rate one step late"
            if optimizer == "means":
                name = "mean of the micro-batches' means"
            assert places(printed)[name] == 1
            assert ("This is like none" in printed) == (optimizer == "own")
