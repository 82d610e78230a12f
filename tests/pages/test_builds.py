"""Other builds of torch than the tests' own, and other Pythons, each in an environment of its own.

    FULL_TORCH=2.13.0 pytest -m drill tests/pages/test_builds.py

FULL_TORCH is a version of torch, whose CUDA build (6 GB) this installs from PyPI, or 1 for the
lowest versions that requirements.txt admits. Two more variables:

FULL_PYTHON: a version such as 3.13, found in PATH or by pyenv. The tests' own if not set.
FULL_ENVIRONMENT: a directory in which the environment stays, so that the next run uses it again.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launching import HANGS, ROOT, metrics
from test_readme import ALL_SCRIPTS, block

TORCH = os.environ.get("FULL_TORCH")
LOWEST = TORCH == "1"
BEFORE = {"fsdp2_sft.py": "fsdp2_pretrain.py", "fsdp2_grpo.py": "fsdp2_sft.py"}
BEFORE["fsdp2_lora.py"] = "fsdp2_pretrain.py"
pytestmark = [
    pytest.mark.drill,
    pytest.mark.skipif(not TORCH, reason="installs 6 GB: set FULL_TORCH to a version of torch"),
]


def requirements() -> list[str]:
    """Return what to install: one version of torch with all else, or the lowest versions."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    lines = [line for line in lines if not line.startswith("#")]
    if LOWEST:
        return [re.sub(r"[>=]=([\d.]*\d).*", r"==\1", line) for line in lines]
    lines += (ROOT / "requirements-dev.txt").read_text().splitlines()
    # Unlike `==`, `===` does not take a local build such as 2.13.0+cpu.
    others = [line for line in lines if not line.startswith(("torch==", "-r "))]
    return [f"torch==={TORCH}", *others]


def find_python() -> str:
    """Return the interpreter that FULL_PYTHON names, or skip."""
    wanted = os.environ.get("FULL_PYTHON")
    if not wanted:
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    found = [shutil.which(f"python{wanted}"), *sorted(pyenv.glob(f"{wanted}*/bin/python"))]
    for python in filter(None, found):
        if python_version(python).startswith(f"{wanted}."):
            return str(python)
    pytest.skip(f"there is no Python {wanted} in PATH or in {pyenv}")


def python_version(python: str | Path) -> str:
    """Return a version such as 3.13.0., or nothing if the program does not run."""
    code = "import platform; print(platform.python_version() + '.')"
    return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """Return the directory of the programs of an environment, which is made if it is not there."""
    python = find_python()
    made = tmp_path_factory.mktemp("built")
    folder = Path(os.environ.get("FULL_ENVIRONMENT", made / "environment")).absolute()
    if not (folder / "bin/python").exists():
        subprocess.run([python, "-m", "venv", folder], check=True)
        nothing, wanted = made / "no_constraints.txt", made / "requirements.txt"
        nothing.touch()
        wanted.write_text("\n".join(requirements()))
        # A machine's own constraints may cap torch. pip reads these in their place.
        variables = os.environ | {"PIP_CONSTRAINT": str(nothing)}
        command = [folder / "bin/pip", "install", "--quiet", "-r", wanted]
        installed = subprocess.run(command, env=variables, capture_output=True, text=True)
        assert installed.returncode == 0, f"delete {folder}\n{installed.stderr}"
    code = "import torch; print(torch.__version__, torch.version.cuda)"
    seen = output([folder / "bin/python", "-c", code])
    version = requirements()[0].rpartition("=")[2]
    assert seen.startswith(f"{version}+cu"), f"FULL_ENVIRONMENT has torch {seen}"
    own = python_version(folder / "bin/python")
    assert own == python_version(python), f"FULL_ENVIRONMENT has Python {own}"
    if LOWEST:
        frozen = output([folder / "bin/pip", "list", "--format=freeze"])
        for name, lowest in (line.split("==") for line in requirements()):
            assert re.search(rf"(?m)^{name}=={re.escape(lowest)}(\.0)*$", frozen), (name, frozen)
    return folder / "bin"


def output(command: list) -> str:
    """Run a program of an environment. It must succeed without a word on standard error."""
    environment = {name: os.environ[name] for name in os.environ if not name.startswith("PYTEST")}
    environment["PATH"] = f"{Path(command[0]).parent}:{environment['PATH']}"
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True,
        timeout=4 * HANGS,
    )  # fmt: skip
    errors = re.sub(r"(?m)^[WI]\d{4} .*torch/distributed/run\.py.*\n", "", done.stderr)
    assert (done.returncode, errors) == (0, ""), done.stdout[-5000:] + errors
    return done.stdout


@pytest.fixture(scope="module")
def train(built, tmp_path_factory):
    """Return a function that trains a script for 6 steps, and what it starts from before it."""
    runs = {}

    def once(script: str) -> Path:
        if script not in runs:
            folder = tmp_path_factory.mktemp("run")
            flags = ["--steps", "6", "--run_dir", folder]
            if script in BEFORE:
                flags += ["--init_from", once(BEFORE[script])]
            launcher = [built / "torchrun", "--standalone", "--nproc-per-node=2"]
            output([*launcher, script, *flags])
            runs[script] = folder
        return runs[script]

    return once


@pytest.mark.parametrize("script", ALL_SCRIPTS)
def test_a_script_trains_in_silence(script, train):
    lines, _ = metrics(train(script))
    assert [line["step"] for line in lines] == [*range(1, 7)]


def test_first_command(built, tmp_path):
    """With 30 steps, after which the loss has fallen from 6.1 to 2.6."""
    command = f"{block('first run')[-1]} --steps 30 --run_dir {tmp_path}"
    program, *words = shlex.split(command)
    printed = output([built / program, *words])
    _, [*_, validation] = metrics(tmp_path)
    assert validation["step"] == 30 and validation["validation_loss"] < 2.8
    assert "--- the model continues" in printed


@pytest.mark.skipif(LOWEST, reason="requirements-dev.txt is not installed")
def test_the_tests_for_gpus(built):
    chosen = ["-m", "not drill and not gpu", "tests/test_gpu.py"]
    passed = output([built / "python", "-m", "pytest", "-q", *chosen])
    assert re.search(r"\d\d passed", passed) and "skipped" not in passed, passed
