"""README.md and docs/*.md are true: their commands work, and generated parts are current."""

import importlib
import inspect
import json
import math
import os
import re
import resource
import runpy
import shlex
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import transformers
from grid import share
from launching import EXPERTS, HANGS, INSIDE, MUON, ROOT, SCRIPTS, metrics, read_lines

import common
import fsdp2_grpo
import model
import run as running

ALL_SCRIPTS = [*SCRIPTS, MUON, *INSIDE, EXPERTS, "fsdp2_nd_pretrain.py"]
ALL_SCRIPTS += ["fsdp2_sft.py", "fsdp2_lora.py", "fsdp2_grpo.py"]
# All are imported before one is parsed, because HfArgumentParser changes the types of the fields
# that the scripts inherit.
CONFIGS = {script: importlib.import_module(script[:-3]).Config for script in ALL_SCRIPTS}
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))
RESULTS = sorted((ROOT / "bench/results").glob("*.md"))
# What else links to files, or names them.
TEXTS = [*PAGES, *RESULTS, *ROOT.glob("reference/*.md")]
PROGRAMS = [path for name in ("by_hand", "tools", "bench") for path in (ROOT / name).glob("*.py")]
TEXT = {page.name: page.read_text() for page in PAGES}


def add_to_path(monkeypatch):
    for folder in ("bench", "tools"):
        monkeypatch.syspath_prepend(str(ROOT / folder))


def block(marker: str, page: str = "README.md") -> list[str]:
    """Return the lines of a page's code block after a marker."""
    found = re.search(rf"<!-- {marker} -->\n```bash\n(.*?)```", TEXT[page], re.DOTALL)
    return found[1].splitlines()


def commands() -> list[str]:
    """Every command of the pages, each on one line; what is typed into Python is left out.

    Those under "Try it" are left out too: `test_experiments_print_what_the_pages_show` runs them.
    """
    pages = re.sub(r"<!-- try -->\n```bash\n.*?```", "", "".join(TEXT.values()), flags=re.DOTALL)
    blocks = re.findall(r"```bash\n(.*?)```", pages, re.DOTALL)
    text = re.sub(r"<<'EOF'\n.*?\nEOF", "", "".join(blocks).replace("\\\n", " "), flags=re.DOTALL)
    return [*dict.fromkeys(text.splitlines())]


def launches() -> list[str]:
    """Those that start one of the scripts; tests/runs/test_nodes.py runs the one of Slurm."""
    return [
        command for command in commands()
        if set(command.split()) & set(ALL_SCRIPTS) and not command.startswith(("srun", "python"))
        and " bench/" not in command and " tools/" not in command
    ]  # fmt: skip


@pytest.mark.parametrize("command", launches())
def test_flags_of_the_pages_are_accepted(command, monkeypatch):
    words = shlex.split(command)
    [script] = [word for word in words if word in ALL_SCRIPTS]
    sizes = [re.search(rf"--{name}=(\d+)", command) for name in ("nnodes", "nproc-per-node")]
    ranks = math.prod(int(size[1]) for size in sizes if size)
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setattr(common, "fetch_weights", lambda name: name)  # of a run that is not there
    monkeypatch.setattr(sys, "argv", words[words.index(script) :])
    config = running.parse_config(CONFIGS[script])
    assert config.steps > 0 or "--steps 0" in command


# Flags in running text that are not the scripts': torchrun's, pytest's, and those of tools/ and
# bench/.
OTHERS = """nnodes nproc-per-node max-restarts shutdown-timeout rdzv-backend rdzv-id rdzv-endpoint
    standalone help nonblocking pid signal cpus-per-task ntasks-per-node gpus-per-node nodes
    requeue ranks vocabulary memory_gib link_gbps tflops no-build-isolation turns only pre
    check model_args tasks batch_size prompt bf16 weights""".split()


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_flags_and_files_that_a_page_names_are_there(page):
    text = re.sub(r"```diff\n.*?```", "", page.read_text(), flags=re.DOTALL)
    known = {flag for config in CONFIGS.values() for flag in config.__dataclass_fields__}
    named = set(re.findall(r"(?<![\w-])--([a-z][\w-]*)", text))
    assert named - known - set(OTHERS) == set()
    assert missing_files(text) == []
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in tests, name


def missing_files(text: str) -> list[str]:
    """Return the files of this repository that a text names and that are not there."""
    folders = "bench|tests|docs|tools|by_hand|reference"
    names = re.findall(rf"(?<![\w/.])((?:{folders})/[\w/]+\.(?:py|md|json|png|txt|sh))\b", text)
    return [name for name in names if not (ROOT / name).exists()]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_a_program_names_are_there(program):
    assert missing_files(program.read_text()) == []


def anchors(text: str) -> set[str]:
    """How GitHub calls the headings of a page."""
    headings = re.findall(r"(?m)^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page):
    links = re.findall(
        r"\]\(([^)\s]*)\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    )
    for link in (link for link in links if not link.startswith("https://")):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.is_relative_to(ROOT) and target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link


def test_every_page_is_linked_from_the_readme():
    linked = {Path(name).name for name in re.findall(r"\]\((docs/\w+\.md)\)", README)}
    assert linked == TEXT.keys() - {"README.md", "CONTRIBUTING.md", "AGENTS.md"}
    assert "(CONTRIBUTING.md)" in README and "(CONTRIBUTING.md)" in TEXT["AGENTS.md"]


def first_losses() -> dict[str, str]:
    """Return the validation loss of the first command by the version of Python."""
    [claims] = re.findall(r"validation loss is about (.*?), because", " ".join(README.split()))
    found = re.findall(r"([\d.]+) (?:nats per byte )?with (?:Python )?(3\.\d+)", claims)
    return {version: loss for loss, version in found}


@pytest.mark.drill
def test_first_run(tmp_path):
    """The first block and the chain as they stand, but for making the environment (this is one),
    and with a quarter of the steps of RL, after which the reward has risen a fifth as far."""
    *setup, command = block("first run")
    assert setup == [
        "python3 -m venv .venv",
        "source .venv/bin/activate",
        "pip install -r requirements.txt",
    ]
    for name in (*ALL_SCRIPTS, "common.py", "model.py", "run.py", "conversations.py", "sample.py"):
        shutil.copy(ROOT / name, tmp_path)
    cache = str(tmp_path / "cache")  # nothing is cached yet
    environment = os.environ | {"HF_HOME": cache, "HF_DATASETS_CACHE": cache}
    environment["PATH"] = f"{os.path.dirname(sys.executable)}:{environment['PATH']}"
    seconds = {}

    def run(words: str, quiet: bool = True) -> str:
        began = time.monotonic()
        process = subprocess.Popen(
            words, shell=True, cwd=tmp_path, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        timer = threading.Timer(HANGS, lambda: os.killpg(process.pid, 9))
        timer.start()
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("step 1/"):
                seconds[words] = time.monotonic() - began
        errors = process.stderr.read()
        timer.cancel()
        assert process.wait() == 0, errors
        assert errors == "" or not quiet  # transformers shows a bar as it loads
        return "".join(lines)

    printed = run(command)
    assert seconds[command] < 30
    run_dir = tmp_path / "runs/fsdp2_pretrain"
    _, validation = metrics(run_dir)
    claimed = float(first_losses()["{}.{}".format(*sys.version_info)])
    assert validation[-1]["validation_loss"] == pytest.approx(claimed, abs=0.06)
    assert f"files: {run_dir.relative_to(tmp_path)}/metrics.jsonl" in printed
    [write] = re.findall("`(python sample.py .* --prompt .*?)`", README)
    assert re.search(r"try:   (.*)", printed)[1] in write
    # A newcomer sees that it is Python. Samples are random, and some end before such a word.
    words = r"\b(self|def|return|if|for|import|raise|list|None|True|False)\b"
    assert any(re.search(words, run(write, quiet=False)) for _ in range(5))
    following = re.search(r"next:  (.*)", printed)[1]
    pretrain, tune, reinforce, chat = block("chain", "recipes.md")
    assert pretrain == command and "fsdp2_tp_pretrain.py" in following
    following = re.search(r"next:  (.*)", run(tune))[1]
    assert reinforce == following
    run(f"{following} --steps 20")
    rewards = [
        line["validation_reward"] for line in read_lines(tmp_path / "runs/fsdp2_grpo")
        if "validation_reward" in line
    ]  # fmt: skip
    rises = re.search(r"rises from ([\d.]+) to ([\d.]+)", TEXT["recipes.md"])
    before, after = map(float, rises.groups())
    assert rewards[0] < before + 0.03
    assert rewards[-1] > before + 0.2 * (after - before)
    message = r"Write the docstring of:\\\n\\\ndef add(a, b):\\\n    return a + b\\\n\n"
    streamed = run(f"printf '{message}' | {chat}", quiet=False)
    assert "<|begin_of_thought|>" in streamed and len(streamed) > 60
    held_out = subprocess.run(
        [sys.executable, ROOT / "bench/bigram.py"], env=environment, capture_output=True, text=True
    )
    measured = float(re.search(r"validation loss ([\d.]+)", held_out.stdout)[1])
    lowest, highest = map(float, re.search(r"reaches ([\d.]+) to ([\d.]+)", README).groups())
    assert lowest - 0.005 < measured < highest + 0.005
    assert claimed < measured - 0.4


def test_all_places_name_the_same_versions_of_python():
    [versions] = re.findall(r"for version in (.*); do", (ROOT / ".ci/python").read_text())
    first, *_, last = versions.split()
    assert README.count(f"Python {first} to {last}") == 3
    assert f"/badge/python-{first}%20to%20{last}-blue" in README
    assert f'\nrequires-python = ">={first}"\n' in (ROOT / "pyproject.toml").read_text()
    assert [*first_losses()] == versions.split()


def test_all_environments_install_what_the_readme_says():
    install, command = block("test command")
    assert (install, command) == ("pip install -r requirements-dev.txt", "pytest -n 2")
    assert install.removeprefix("pip ") in (ROOT / ".ci/run").read_text().replace(" --quiet", "")
    wanted, development, peers = (
        (ROOT / name).read_text().splitlines()
        for name in ("requirements.txt", "requirements-dev.txt", "bench/requirements.txt")
    )
    assert "-r requirements.txt" in development
    [pin] = [line for line in wanted if line.startswith("torch==")]
    assert pin in peers


def test_rewards_of_the_recipe_are_those_of_the_picture():
    seeds = [
        list(seen.values()) for seen in json.loads((ROOT / "bench/results/reward.json").read_text())
    ]
    claimed = re.search(r"rises from ([\d.]+) to ([\d.]+) in 80 steps", TEXT["recipes.md"])
    for number, place in ((1, 0), (2, -1)):
        mean = sum(rewards[place] for rewards in seeds) / len(seeds)
        assert float(claimed[number]) == pytest.approx(mean, abs=0.005)


def test_the_types_that_train_are_counted():
    pattern = r"(\d+) types of .* in transformers (\S+), (\d+) train here, (\d+) of them"
    counted = re.search(pattern, " ".join(README.split()))
    there = len(transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    version = transformers.__version__.rpartition(".")[0]
    listed = [len(types.split()) for types in (model.BUCKETED_TYPES, model.PACKED_TYPES)]
    assert counted.groups() == (str(there), version, *map(str, listed))


def test_the_other_reward_is_one():
    """The page's example of an own reward works in the place of the script's."""
    code = re.search(r"<!-- own reward -->\n```python\n(.*?)```", TEXT["rl.md"], re.DOTALL)[1]
    assert len(code.splitlines()) <= 10
    made = {"json": json}
    exec(code, made)
    reference = '{"name": "a", "size": 2}'
    for answer, expected in {
        "name": 0.0, "[1]": 0.1, "{}": 0.2, '{"size": 0}': 0.6, '{"size": 1, "name": []}': 1.0,
    }.items():  # fmt: skip
        assert made["reward"]("which file?", answer, reference) == pytest.approx(expected)
    own, theirs = (inspect.signature(function) for function in (made["reward"], fsdp2_grpo.reward))
    assert own == theirs


def dry_run(*words: str) -> str:
    done = subprocess.run([sys.executable, *words], cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.drill
def test_prediction_for_the_real_run():
    """The dry run takes the real run's flags as they stand, and says what the README says.

    But for 2 micro-batches a step in place of 16: from the second on each peaks like the other.
    """
    [command] = [command for command in launches() if "fineweb-edu" in command]
    words = shlex.split(command)
    flags = words[words.index("fsdp2_pretrain.py") + 1 :]
    flags += ["--global_batch_tokens", str(2 * 4 * 8192)]
    program = ["tools/dry_run.py", "fsdp2_pretrain.py", "--ranks", "4", "--vocabulary", "50257"]
    peak = re.search(r"\*\*peak\*\* \| \*\*([\d,.]+) MiB", dry_run(*program, *flags))[1]
    claimed = re.search(r"GPU needs ([\d.]+) GiB", " ".join(README.split()))[1]
    assert float(peak.replace(",", "")) / 1024 == pytest.approx(float(claimed), abs=0.05)


@pytest.mark.drill
def test_dry_run_prints_what_the_page_on_scale_shows():
    [command] = [command for command in commands() if "--memory_gib" in command]
    printed = " ".join(dry_run(*shlex.split(command)[1:]).split())
    page = re.sub(r"```.*?```", "", TEXT["scale.md"], flags=re.DOTALL)
    shown = re.findall(r"(?m)(?:^    .*\n)+", page)
    assert len(shown) >= 4
    for lines in shown:
        assert " ".join(lines.split()) in printed


def chapters() -> dict[str, str]:
    """Return script -> page, as the README's table of chapters pairs them."""
    return dict(re.findall(r"\((\w+\.py)\), \[page\]\(docs/(\w+)\.md\)", README))


def test_symbols_of_formulas_are_explained_once():
    [symbols] = re.findall(r"## Symbols\n(.*?)\n## ", TEXT["scale.md"], re.DOTALL)
    explained = re.findall(r"(?m)^\| ([A-Za-z, ]+) \|", symbols)
    names = [name for cell in explained for name in cell.split(", ")]
    assert len(names) == len({*names}) > 15
    table = re.search(r"<!-- begin traffic -->(.*?)<!-- end", TEXT["scale.md"], re.DOTALL)[1]
    formulas = re.sub(r"\w*[A-Z]{2,}[A-Z0-9]+\w*|\[.*?\]|`.*?`", "", table)
    used = {*re.findall(r"(?<![A-Za-z])[A-Z](?![a-zA-Z]| is)", formulas)}
    assert used <= {*names} and {*"NPGAQK"} <= used, used - {*names}
    for script in ALL_SCRIPTS:
        docstring = re.sub(r"`.*?`|DeepSeek-V3", "", sys.modules[script[:-3]].__doc__)
        letters = {*re.findall(r"(?<![A-Za-z])[A-Z](?![a-zA-Z])", docstring)}
        matrices = {"W"} if script == "fsdp2_lora.py" else set()
        assert letters - matrices <= {*names}, script


def test_every_script_has_a_page():
    assert sorted(chapters()) == sorted(ALL_SCRIPTS)


@pytest.mark.parametrize("script, page", chapters().items())
def test_a_page_is_short_and_has_code_and_experiments(script, page):
    text = TEXT[f"{page}.md"]
    assert 80 <= len(text.splitlines()) <= 160
    assert f"[`{script}`](../{script})" in text
    headings = re.findall(r"(?m)^## (.*)$", text)
    expected = ["The idea", "The lines that matter", "Memory and communication", "When to use it"]
    assert [each for each in headings if each in expected] == expected
    assert headings[-2:] == ["Pitfalls", "Try it"]
    excerpts = re.findall(r"<!-- begin lines .*?```python\n(.*?)```", text, re.DOTALL)
    assert 5 <= sum(len(code.splitlines()) for code in excerpts) <= 40
    experiments = re.findall(r"<!-- try -->\n```bash\n.*?```\n\n```text\n(.*?)```", text, re.DOTALL)
    assert len(experiments) >= 2 and all(experiments)


@pytest.fixture(scope="module")
def quick_programs(tmp_path_factory):
    """Yield a folder with a `torchrun` and a `python` that fork, see tests/support/quick.py."""
    folder = tmp_path_factory.mktemp("quick")
    path, quick = folder / "socket", [sys.executable, str(ROOT / "tests/support/quick.py")]
    for name in ("torchrun", "python"):
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.join(quick)} ask {path} {name} "$@"\n')
        (folder / name).chmod(0o755)
    with subprocess.Popen([*quick, "serve", path]) as server:
        while not path.exists():
            assert server.poll() is None
            time.sleep(0.1)
        yield folder
        server.kill()


@pytest.mark.drill
@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="the pages train on the library of Python 3.11"
)
@pytest.mark.parametrize(
    "page", share(page.stem for page in PAGES if "<!-- try -->" in TEXT[page.name])
)
def test_experiments_print_what_the_pages_show(page, monkeypatch, quick_programs):
    add_to_path(monkeypatch)
    import tryit

    for shown, printed in tryit.run_blocks(page, quick_programs):
        assert tryit.is_similar(shown, printed), f"shown:\n{shown}\nprinted:\n{printed}"


def test_experiments_write_to_run_directories_of_their_own():
    """So a reader can run them in any order: none meets the checkpoints of another one."""
    owners = {Path("runs", script[:-3]): "a script's default" for script in ALL_SCRIPTS}
    for page, text in TEXT.items():
        for number, block in enumerate(re.findall(r"```bash\n(.*?)```", text, re.DOTALL)):
            names = re.findall(r"--run_dir (runs/\S+)", block)
            for variable, values in re.findall(r"for (\w+) in (.*?);", block):
                names = [n.replace(f"${variable}", each) for n in names for each in values.split()]
            for directory in {*map(Path, names)}:
                for other, owner in owners.items():
                    nested = directory.is_relative_to(other) or other.is_relative_to(directory)
                    assert not nested or owner == (page, number), f"{page}: {directory}, {owner}"
                owners[directory] = page, number
    assert Path("runs/new/fsdp2_tp_pretrain") in owners  # a loop's variable is replaced


def test_every_exercise_has_a_folded_answer_that_is_run():
    """And what an exercise's diff removes is in a script, once."""
    sections = re.split(r"(?m)^## ", TEXT["exercises.md"])[1:]
    scripts = "".join(path.read_text() for path in [*ROOT.glob("*.py"), *ROOT.glob("by_hand/*.py")])
    numbers = []
    for section in sections:
        _, *exercises = re.split(r"(?m)^(?=\*\*\d+\. )", section)
        assert 2 <= len(exercises) <= 5, section[:20]
        for exercise in exercises:
            numbers.append(int(exercise[2:].partition(".")[0]))
            _, answer = exercise.split("<details><summary>Answer</summary>\n\n")
            assert re.search(r"<!-- try -->\n```bash\n.*?```\n\n```text\n\S", answer, re.DOTALL)
            assert answer.endswith("</details>\n\n") or answer.endswith("</details>\n")
        for removed in re.findall(r"(?m)^-(\s.*)$", section):
            assert scripts.count(f"\n{removed}\n") == 1, removed
    assert numbers == [*range(1, len(numbers) + 1)]


def test_outputs_are_compared_by_their_numbers(monkeypatch):
    add_to_path(monkeypatch)
    import tryit

    shown = "| 1 | 6.1341 | 1.0e-07 |\nsent 2,614.89 MiB  9,000 tokens/s\n"
    same = "| 1 | 6.1300 | 0.0e+00 |\nsent 2,615.00 MiB  12 tokens/s\n"
    assert tryit.is_similar(shown, same)
    for part, other in (("6.1", "6.9"), ("sent", "got"), ("2,614", "3,614"), ("| 1 ", "")):
        assert not tryit.is_similar(shown, shown.replace(part, other))


@pytest.mark.parametrize(
    "program",
    [  # test_dry_run.py tests the last one
        path for path in sorted(PROGRAMS)
        if path.parent.name != "by_hand"
        and path.stem not in ("shared", "_tools", "contestant", "dry_run")
    ],
    ids=lambda path: path.stem,
)  # fmt: skip
def test_benchmarks_explain_themselves(program, monkeypatch, capsys):
    """--help prints what a program measures, and a wrong word ends it before it begins."""
    monkeypatch.setattr(sys, "path", [str(program.parent), str(ROOT / "tools"), *sys.path])
    for words, code in ((["--help"], 0), (["-1"], 2), (["fast"], 2)):
        monkeypatch.setattr(sys, "argv", [str(program), *words])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(program), run_name="__main__")
        assert ended.value.code == code
        seen = capsys.readouterr()
        if code == 0:
            assert program.read_text()[3:].splitlines()[0] in seen.out
        else:
            assert "error: " in seen.err.splitlines()[-1]


def test_the_estimate_of_meshes_is_as_good_as_its_page_says(monkeypatch):
    add_to_path(monkeypatch)
    import meshes

    meshes.published_table()
    off = {(m.pp, m.interleaved): 0.0 for m, _ in meshes.PUBLISHED.values()}
    for mesh, measured in meshes.PUBLISHED.values():
        kind = mesh.pp, mesh.interleaved
        off[kind] = max(off[kind], abs(mesh.tokens_per_second / measured - 1))
    bound, of_1f1b = re.search(
        r"to (\d+) % without a pipeline, and (\d+) % too", " ".join(TEXT["scale.md"].split())
    ).groups()
    assert off[1, 1] < int(bound) / 100
    assert off[8, 1] == pytest.approx(int(of_1f1b) / 100, abs=0.01)


def test_generated_parts_are_current(monkeypatch):
    """`python bench/readme.py` would change nothing."""
    add_to_path(monkeypatch)
    import readme

    assert sorted(readme.PAGES) == sorted([*PAGES, *RESULTS])
    for page in readme.PAGES:
        assert readme.renewed(page.read_text()) == page.read_text(), page


def test_the_proofs_that_contributors_are_asked_for_exist():
    text = TEXT["CONTRIBUTING.md"]
    assert 40 <= len(text.splitlines()) <= 75
    [proof] = re.findall(r"<!-- proof -->\n```bash\n(.*?)```", text, re.DOTALL)
    named = re.findall(r"\S+\.py", proof)
    assert len(named) == 5 and all((ROOT / name).is_file() for name in named)
    [lint, format_check] = proof.splitlines()[0].split(" && ")
    assert {lint, format_check} < {*(ROOT / ".ci/run").read_text().splitlines()}


def test_help_lists_every_flag_quickly():
    """In 15 seconds of processor time, most of which are imports."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "fsdp2_pretrain.py", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 15
    assert done.returncode == 0
    import fsdp2_pretrain

    for name in fsdp2_pretrain.Config.__dataclass_fields__:
        assert f"--{name}" in done.stdout
    groups = dict(re.findall(r"(?m)^(\S.*):\n((?:  .*\n)+)", done.stdout))
    own = "this script's own flags and defaults"
    assert [*groups] == ["options", own, *running.SUBJECTS.values()]
    flags = {title: re.findall(r"(?m)^  --(\w+)", text) for title, text in groups.items()}
    assert "dp_replicate" in flags[own] and flags["checkpoints"][0] == "checkpoint_every"
    assert {"batching", "seed"} < {*flags["data"]} and flags["the run"][0] == "run_dir"
    assert "(default: 4096)" in " ".join(done.stdout.split())  # the terminal's width breaks lines
