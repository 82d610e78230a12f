""".ci/python: which Python tests a commit."""

import re
import shutil
import subprocess
from pathlib import Path

from launching import ROOT


def test_the_workflow_runs_what_ci_runs():
    """On the oldest and the newest Python, of which .ci/python chooses one."""
    workflow = (ROOT / ".github/workflows/test.yml").read_text()
    assert re.findall(r"(?m)^ +- run: (.*)$", workflow) == [".ci/run"]
    versions = re.findall(r"(?m)^ +(3\.\d+)$", workflow)
    [known] = re.findall(r"for version in (.*); do", (ROOT / ".ci/python").read_text())
    assert versions == [known.split()[0], known.split()[-1]]


def test_git_ignores_what_the_pages_commands_write():
    """And keeps the folder, so that commands can write to it."""
    names = ["try/a.py", "try/b.log", "try/fewer/c.py", "runs/a/metrics.jsonl"]
    done = subprocess.run(["git", "check-ignore", *names], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == names
    assert (ROOT / "try/.gitignore").exists()
    for page in (ROOT / "docs").glob("*.md"):
        for code in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
            written = re.findall(r"(?<!2)> *([\w$/().-]+)", code)
            assert all(name.startswith(("try/", "/dev/null")) for name in written), page.name


def choose(folder: Path, number: int) -> subprocess.CompletedProcess:
    """Run .ci/python where no other Python than those of the folder is found."""
    environment = {"PATH": str(folder), "PYENV_ROOT": str(folder / "pyenv")}
    command = [shutil.which("bash"), ROOT / ".ci/python", str(number)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def place(file: Path, version: str) -> str:
    """Write a program that runs as this version of Python; one without a version runs nothing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f'#!/bin/sh\ncase "$2" in *"\'{version}.\'"*) echo "$0";; *) exit 127; esac\n')
    file.chmod(0o755)
    return str(file)


def test_the_oldest_and_the_newest_python_take_turns(tmp_path):
    oldest = place(tmp_path / "python3.11", "3.11")
    place(tmp_path / "python3.12", "3.12")
    newest = place(tmp_path / "pyenv/versions/3.13.0/bin/python", "3.13")
    for version in ("3.13", "3.14"):  # shims of pyenv
        place(tmp_path / f"python{version}", "")
    place(tmp_path / "pyenv/versions/3.14.10/bin/python", "3.1")
    [third] = re.findall(r"GRID_SHARE=\$\(\(number (.*)\)\)", (ROOT / ".ci/run").read_text())
    chosen = [(choose(tmp_path, n).stdout.strip(), eval(f"{n} {third}")) for n in range(48)]
    assert {python for python, _ in chosen} == {oldest, newest}
    # Each with every third of the drills, equally often.
    assert {chosen.count(pair) for pair in chosen} == {8}


def test_a_machine_with_one_python_or_none(tmp_path):
    done = choose(tmp_path, 1)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: there is no Python 3.11 to 3.14")
    only = place(tmp_path / "pyenv/versions/3.12.1/bin/python", "3.12")
    assert {choose(tmp_path, number).stdout.strip() for number in range(6)} == {only}
