"""The house as it was designed: one section for the strategy, plain text, who imports whom."""

import ast
import io
import tokenize

import pytest
from conftest import ROOT

PRETRAINING = [
    "ddp_pretrain.py",
    "fsdp1_pretrain.py",
    "fsdp2_pretrain.py",
    "fsdp2_tp_pretrain.py",
    "fsdp2_cp_pretrain.py",
    "fsdp2_pp_pretrain.py",
    "fsdp2_ep_pretrain.py",
]
SCRIPTS = [*PRETRAINING, "fsdp2_sft.py", "fsdp2_grpo.py"]
SECTIONS = [
    "Config",
    "Process group and device",
    "Model",
    "Strategy",
    "Optimizer and schedule",
    "Checkpoints",
    "Training",
    "Validation",
    "Main",
]
# What the section Strategy defines, in every script.
STRATEGY = [
    "data_parallel_rank_and_size",
    "parallelize",
    "named_parameters",
    "forward_backward",
    "clip_gradients",
    "balance_experts",
    "validation_loss",
]
# Reinforcement validates by sampling, for which a rank needs all parameters.
SAMPLING = ["whole_parameters", *STRATEGY[:-1]]
# Lines of fsdp2_pretrain.py that may be another one outside of Config and Strategy: script, line ->
# what stands there.
EXCEPTIONS = {
    # DDP's gradients are views of its buckets; dropped, they would be made anew beside these.
    ("ddp_pretrain.py", "    optimizer.zero_grad()"): "    optimizer.zero_grad(set_to_none=False)"
    "  # else gradients would lie beside DDP's buckets",
}
LAYOUT = [
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
]


def read(name: str) -> str:
    return (ROOT / name).read_text()


def sections(name: str) -> dict[str, list[str]]:
    """Title of each section of a script -> its lines; what is before the first one is left out."""
    found: dict[str, list[str]] = {}
    for line in read(name).splitlines():
        if line.startswith("# --- "):
            title = line.removeprefix("# --- ").rstrip("-").strip()
            found[title] = []
        elif found:
            found[title].append(line)
    return found


def size_of_code(text: str) -> tuple[int, int]:
    """Tokens and lines of code: comments, docstrings and layout do not count."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            if ast.get_docstring(node) is not None:
                documented.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    tokens = 0
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT and token.start[0] not in documented:
            tokens += 1
            lines.update(range(token.start[0], token.end[0] + 1))
    return tokens, len(lines)


def test_the_counter_counts_code_alone():
    text = '"""Doc\nstring."""\n\n# comment\nx = 1  # more\n\n\ndef f():\n    """Doc."""\n'
    text += '    return """a\nb"""\n'
    assert size_of_code(text) == (3 + 5 + 2, 4)


@pytest.mark.parametrize("name", ["common.py", *SCRIPTS])
def test_a_line_is_one_thought(name):
    """nanoGPT, nanochat and torchtitan have 6 to 9 tokens a line of code."""
    tokens, lines = size_of_code(read(name))
    assert tokens / lines <= 9.5


def test_common_stays_small():
    """No more than it had when its text was made plain."""
    assert size_of_code(read("common.py"))[0] <= 9597


def test_sections_are_the_same_in_the_same_order():
    for name in PRETRAINING:
        assert list(sections(name)) == SECTIONS
    tuned = [*SECTIONS[:2], "Conversations", *SECTIONS[2:]]
    assert list(sections("fsdp2_sft.py")) == tuned
    reinforced = [*tuned[:3], "Reward and loss", *tuned[3:5], "Sampling", *tuned[5:]]
    assert list(sections("fsdp2_grpo.py")) == reinforced


@pytest.mark.parametrize("name", PRETRAINING)
def test_pretraining_scripts_differ_in_config_and_strategy_alone(name):
    reference, own = sections("fsdp2_pretrain.py"), sections(name)
    needed = dict.fromkeys(line for script, line in EXCEPTIONS if script == name)
    for title in set(SECTIONS) - {"Config", "Strategy"}:
        expected = [EXCEPTIONS.get((name, line), line) for line in reference[title]]
        assert own[title] == expected, title
        for line in needed:
            needed[line] = needed[line] or line in reference[title]
    assert all(needed.values()), "an exception that is none"


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_strategy_is_in_its_section(name):
    """Under the same names everywhere; what ranks do together is nowhere else."""
    found = sections(name)
    strategy = ast.parse("\n".join(found["Strategy"]))
    functions = [node.name for node in strategy.body if isinstance(node, ast.FunctionDef)]
    expected = SAMPLING if name == "fsdp2_grpo.py" else STRATEGY
    assert {function for function in functions if function in expected} == {*expected}
    in_order = [function for function in functions if function in STRATEGY]
    assert in_order == [function for function in STRATEGY if function in expected]
    others = ("Model", "Reward and loss", "Sampling", "Optimizer and schedule", "Training")
    for title in (*others, "Validation"):
        assert not any("dist." in line for line in found.get(title, [])), title


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
