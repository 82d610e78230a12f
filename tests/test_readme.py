"""The README's commands are the ones that work."""

import math
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import threading
import time

import pytest
from conftest import ROOT, SCRIPTS, metrics

import common

README = (ROOT / "README.md").read_text()


def block(marker: str) -> list[str]:
    """Lines of the code block after a marker."""
    found = re.search(rf"<!-- {marker} -->\n```bash\n(.*?)```", README, re.DOTALL)
    return found[1].splitlines()


def launches() -> list[str]:
    """Every command of the README that starts one of the scripts."""
    blocks = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith("torchrun")]


@pytest.mark.parametrize("command", launches())
def test_flags_in_the_readme_are_accepted(command, monkeypatch):
    import importlib

    words = shlex.split(command)
    [script] = [word for word in words if word.endswith(".py")]
    sizes = [re.search(rf"--{name}=(\d+)", command) for name in ("nnodes", "nproc-per-node")]
    ranks = math.prod(int(size[1]) for size in sizes if size)
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    if ranks > 2:  # meant for machines with GPUs
        for name in ("cuda.is_available", "cuda.is_bf16_supported", "utils._triton.has_triton"):
            monkeypatch.setattr(f"torch.{name}", lambda **_: True)
        monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.setattr(sys, "argv", words[words.index(script) :])
    config = common.parse_config(importlib.import_module(script[:-3]).Config)
    assert config.steps >= 1


@pytest.mark.drill
def test_first_run(tmp_path):
    """The first block as it stands, but for making the environment (this is one), timed."""
    *setup, command = block("first run")
    assert setup == [
        "python3 -m venv .venv",
        "source .venv/bin/activate",
        "pip install -r requirements.txt",
    ]
    for name in (*SCRIPTS, "fsdp2_sft.py", "common.py"):
        shutil.copy(ROOT / name, tmp_path)
    cache = str(tmp_path / "cache")  # nothing is cached yet
    environment = os.environ | {"HF_HOME": cache, "HF_DATASETS_CACHE": cache}
    environment["PATH"] = f"{os.path.dirname(sys.executable)}:{environment['PATH']}"
    seconds = {}

    def run(words: str, limit: float, quiet: bool = True) -> str:
        began = time.monotonic()
        process = subprocess.Popen(
            words, shell=True, cwd=tmp_path, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        timer = threading.Timer(limit, lambda: os.killpg(process.pid, 9))
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

    printed = run(command, 240)
    assert seconds[command] < 30
    run_dir = tmp_path / "runs/fsdp2_pretrain"
    _, validation = metrics(run_dir)
    claims = re.search(r"about ([\d.]+) nats.* reaches ([\d.]+)", README, re.DOTALL)
    claimed, bigram = map(float, claims.groups())
    assert validation[-1]["validation_loss"] == pytest.approx(claimed, abs=0.06)
    assert claimed < bigram - 0.4
    assert re.search(r"--- the model continues .*\n(.|\n)+\n---\n", printed)
    assert f"files: {run_dir.relative_to(tmp_path)}/metrics.jsonl" in printed
    following = re.search(r"next:  (.*)", printed)[1]
    run(f"{following} --steps 1 --eval_batches 2", 60)
    assert seconds[f"{following} --steps 1 --eval_batches 2"] < 20
    pretrain, tune, *chat = block("chain")
    assert pretrain == command
    run(tune, 240)
    streamed = run("\n".join(chat), 120, quiet=False)
    assert streamed.startswith("<|begin_of_thought|>") and len(streamed) > 50
    held_out = subprocess.run(
        [sys.executable, ROOT / "bench/bigram.py"], env=environment, capture_output=True, text=True
    )
    measured = re.search(r"validation loss ([\d.]+)", held_out.stdout)[1]
    assert float(measured) == pytest.approx(bigram, abs=0.005)


@pytest.mark.drill
def test_prediction_for_the_real_run():
    """The dry run takes the real run's flags as they stand, and says what the README says."""
    [command] = [command for command in launches() if "fineweb-edu" in command]
    words = shlex.split(command)
    flags = words[words.index("fsdp2_pretrain.py") + 1 :]
    program = [sys.executable, ROOT / "bench/dry_run.py", "fsdp2_pretrain.py"]
    done = subprocess.run(
        [*program, "--ranks", "4", "--vocabulary", "50257", *flags], text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    peak = re.search(r"\*\*peak\*\* \| \*\*([\d,.]+) MiB", done.stdout)[1]
    claimed = re.search(r"GPU needs ([\d.]+) GiB", " ".join(README.split()))[1]
    assert float(peak.replace(",", "")) / 1024 == pytest.approx(float(claimed), abs=0.05)


PROGRAMS = [
    path for path in sorted((ROOT / "bench").glob("*.py"))
    if path.stem not in ("arguments", "contestant", "dry_run")  # test_dry_run.py tests the last
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_benchmarks_explain_themselves(program, monkeypatch, capsys):
    """--help prints what a program measures, and a wrong word ends it before it begins."""
    monkeypatch.setattr(sys, "path", [str(program.parent), *sys.path])
    for words, code in ((["--help"], 0), (["-1"], 2), (["fast"], 2)):
        monkeypatch.setattr(sys, "argv", [str(program), *words])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(program), run_name="__main__")
        assert ended.value.code == code
        seen = capsys.readouterr()
        if code == 0:
            assert program.read_text()[3:].splitlines()[0] in seen.out
        else:
            assert seen.err.splitlines()[-1].startswith(f"{program.name}: error: ")


def test_generated_parts_are_current(monkeypatch):
    """Diffs with their reasons, and the tables: `python bench/readme.py` would change nothing."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import readme

    assert readme.renewed(README) == README


def test_help_lists_every_flag_quickly():
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "fsdp2_pretrain.py", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert time.monotonic() - began < 15
    assert done.returncode == 0
    import fsdp2_pretrain

    for name in fsdp2_pretrain.Config.__dataclass_fields__:
        assert f"--{name}" in done.stdout
    assert "(default: 4096)" in done.stdout
