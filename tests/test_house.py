"""The house stays small: sizes, differences between neighbours, and who imports whom."""

import ast
import io
import subprocess
import tokenize

import pytest
from conftest import ROOT

PRETRAINING = ["ddp_pretrain.py", "fsdp1_pretrain.py", "fsdp2_pretrain.py"]
INSIDE = ["fsdp2_tp_pretrain.py", "fsdp2_cp_pretrain.py"]
SCRIPTS = [*PRETRAINING, *INSIDE, "fsdp2_sft.py"]
NEIGHBOURS = [(a, b, 80) for a, b in zip(PRETRAINING, PRETRAINING[1:])]
NEIGHBOURS += [("fsdp2_pretrain.py", name, 80) for name in INSIDE]
NEIGHBOURS += [("fsdp2_pretrain.py", "fsdp2_sft.py", 130)]
NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip
WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def read(name: str) -> str:
    return (ROOT / name).read_text()


def lines_of_code(text: str) -> int:
    """Lines that are neither blank, comment nor docstring."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, WITH_DOCSTRING) and ast.get_docstring(node) is not None:
            docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - docstrings)


def test_the_counter_counts_code_alone():
    text = '"""Doc\nstring."""\n\n# comment\nx = 1  # more\n\n\ndef f():\n    """Doc."""\n'
    text += '    return """a\nb"""\n'
    assert lines_of_code(text) == 4


@pytest.mark.parametrize(
    "name, most",
    [("common.py", 800), *((name, 340) for name in SCRIPTS[:-1]), ("fsdp2_sft.py", 400)],
)
def test_lines_of_code(name, most):
    assert lines_of_code(read(name)) <= most


@pytest.mark.parametrize("one, other, most", NEIGHBOURS)
def test_neighbours_differ_in_few_lines(one, other, most):
    found = subprocess.run(["diff", ROOT / one, ROOT / other], capture_output=True, text=True)
    changed = [line for line in found.stdout.splitlines() if line.startswith(("<", ">"))]
    assert 0 < len(changed) <= most


def test_readme_is_short():
    assert len(read("README.md").splitlines()) <= 350


def imported(name: str) -> set[str]:
    """Modules of this repository that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(read(name))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found.add(node.module)
    return found & {path.stem for path in ROOT.glob("*.py")}


def test_scripts_import_common_alone_and_common_no_script():
    assert imported("common.py") == set()
    assert all(imported(name) == {"common"} for name in SCRIPTS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_uses_few_names_of_common(name):
    names: set[str] = set()
    for node in ast.walk(ast.parse(read(name))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names |= {node.attr} if node.value.id == "common" else set()
        if isinstance(node, ast.ImportFrom) and node.module == "common":
            names |= {alias.name for alias in node.names}
    assert len(names) <= 16, sorted(names)


def test_common_takes_values_not_a_config_and_knows_no_strategy():
    text = read("common.py")
    assert "config: Any" not in text
    takes_config = {
        node.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef)
        and any(argument.arg == "config" for argument in node.args.args)
    }
    assert takes_config == set()
    for word in ("fully_shard", "FullyShardedDataParallel", "DistributedDataParallel", "AdamW"):
        assert word not in text


def test_the_sections_of_the_scripts_are_the_same_in_the_same_order():
    def sections(name: str) -> list[str]:
        return [line for line in read(name).splitlines() if line.startswith("# --- ")]

    assert all(sections(name) == sections(SCRIPTS[0]) for name in SCRIPTS[:-1])
    tuning = [line for line in sections("fsdp2_sft.py") if "Conversations" not in line]
    assert tuning == sections(SCRIPTS[0])
