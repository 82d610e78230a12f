"""The form of the scripts: budgets of code, the same sections everywhere, who imports whom."""

import ast
import io
import re
import sys
import tokenize

import pytest
from conftest import ROOT

# Tokens of code that a file may have.
BUDGETS = {
    "ddp_pretrain.py": 3700,
    "fsdp1_pretrain.py": 3700,
    "fsdp2_pretrain.py": 3900,
    "fsdp2_muon_pretrain.py": 4800,
    "fsdp2_tp_pretrain.py": 4250,
    "fsdp2_cp_pretrain.py": 5300,
    "fsdp2_pp_pretrain.py": 5300,
    "fsdp2_ep_pretrain.py": 5100,
    "fsdp2_nd_pretrain.py": 6000,
    "fsdp2_sft.py": 5000,
    "fsdp2_lora.py": 6400,
    "fsdp2_grpo.py": 7500,
    "chat.py": 1500,
    "common.py": 7800,
    "sample.py": 550,
}
SCRIPTS = [name for name in BUDGETS if name not in ("common.py", "chat.py", "sample.py")]
PRETRAINING = [name for name in SCRIPTS if name.endswith("_pretrain.py")]
SAME_FROM_HERE = "The rest is the same text in every pretraining script"
REST = ["Model", "Optimizer and schedule", "Training and validation", "Main"]
SECTIONS = {
    **dict.fromkeys(PRETRAINING, ["Config", "Strategy", SAME_FROM_HERE, *REST]),
    "fsdp2_sft.py": ["Config", "Conversations", "Strategy", *REST],
    "fsdp2_lora.py": ["Config", "Conversations", "Adapters", "Strategy", *REST],
    "fsdp2_grpo.py": [
        "Config",
        "Conversations",
        "Strategy",
        "Reward and loss",
        "Sampling",
        *REST,
    ],
}
# Lines that a script of by_hand/ may have, with docstring, imports and the model.
BY_HAND = {f"by_hand/{name}.py": 120 for name in ("ddp", "fsdp", "tensor", "sequence", "pipeline")}
# Where its strategy begins and ends.
AFTER_SETUP, LEARNS = '    torch.set_default_device("cuda")\n', "\n# --- A small transformer learns"
# What Strategy defines, in this order. RL validates by sampling, so it has no validation loss.
STRATEGY = [
    "init_process_group",
    "dp_rank_and_size",
    "parallelize",
    "optimizer_parameters",
    "forward_backward",
    "clip_grad_norm",
    "optimizer_step",
    "validation_loss",
]
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


def sections(name: str) -> dict[str, str]:
    """Return the title and the text of each section of a script, without what precedes them."""
    _, *parts = read(name).split("\n# --- ")
    titles = [part.partition("\n")[0].rstrip("- ") for part in parts]
    assert len(set(titles)) == len(titles)
    return dict(zip(titles, parts))


def size_of_code(text: str) -> tuple[int, int]:
    """Count tokens and lines of code, without comments, docstrings and layout."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            if ast.get_docstring(node) is not None:
                documented.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    tokens = depth = 0
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT and token.start[0] not in documented:
            tokens += depth == 0
            lines.update(range(token.start[0], token.end[0] + 1))
        # From Python 3.12 on an f-string is many tokens. Count one, as before.
        name = tokenize.tok_name[token.type]
        depth += (name == "FSTRING_START") - (name == "FSTRING_END")
    return tokens, len(lines)


def test_the_counter_counts_nothing_but_code():
    text = '"""Doc\nstring."""\n\n# comment\nx = 1  # more\n\n\ndef f():\n    """Doc."""\n'
    text += '    return """a\nb"""\n'
    text += 'f"{x:{f(1)}} {{}}" f"{f(1)}"\n'
    assert size_of_code(text) == (3 + 5 + 2 + 2, 5)


@pytest.mark.parametrize("name", BUDGETS)
def test_a_file_keeps_to_its_budget(name):
    """Its lines stay simple, too: nanoGPT, nanochat and torchtitan have 6 to 9 tokens per line."""
    tokens, lines = size_of_code(read(name))
    assert tokens <= BUDGETS[name]
    assert tokens / lines <= 9.05


def test_common_has_no_long_function():
    for node in ast.walk(ast.parse(read("common.py"))):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 60, node.name


@pytest.mark.parametrize("name", SCRIPTS)
def test_sections_are_the_same_in_the_same_order(name):
    assert list(sections(name)) == SECTIONS[name]


@pytest.mark.parametrize("name", PRETRAINING)
def test_the_rest_is_the_same_text_in_every_pretraining_script(name):
    line = f"\n# --- {SAME_FROM_HERE} ---"
    rest, reference = (read(script).partition(line)[2] for script in (name, PRETRAINING[0]))
    assert rest == reference != ""


def is_used(name: str, text: str) -> bool:
    return any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(ast.parse(text)))


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_ranks_do_together_is_in_strategy(name):
    """The functions have the same names in every script. Other functions may be among them."""
    found = sections(name)
    tree = ast.parse("# " + found["Strategy"])
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    expected = STRATEGY[: -1 if name == "fsdp2_grpo.py" else None]
    assert [function for function in functions if function in STRATEGY] == expected
    for title in ("Model", "Optimizer and schedule", "Reward and loss"):
        assert not is_used("dist", "# " + found.get(title, "")), title


def imported(name: str) -> set[str]:
    """Return the modules of this repository that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(read(name))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found.add(node.module)
    return found & {path.stem for path in ROOT.glob("*.py")}


def test_scripts_import_only_the_shared_files_and_these_no_script():
    assert imported("common.py") == set()
    assert imported("chat.py") == {"common"}
    assert imported("sample.py") == set()
    for name in SCRIPTS:
        assert imported(name) == ({"common"} if name in PRETRAINING else {"chat", "common"})


@pytest.mark.parametrize(
    "word",
    [
        *("fully_shard", "FullyShardedDataParallel", "FSDPModule", "DistributedDataParallel"),
        *("DTensor", "DeviceMesh", "PipelineStage", "parallelize_module", "AdamW("),
        *("backward(", "optimizer.step(", "_parallel", "dp_replicate", "balance_rate"),
    ],
)
def test_common_knows_no_strategy_no_optimizer_and_no_loop(word):
    assert word not in read("common.py")


def test_all_scripts_by_hand_are_listed():
    assert sorted(BY_HAND) == sorted(f"by_hand/{f.name}" for f in (ROOT / "by_hand").glob("*.py"))


@pytest.mark.parametrize("name", BY_HAND)
def test_a_script_by_hand_is_short_and_needs_only_torch(name):
    text = read(name)
    assert len(text.splitlines()) <= BY_HAND[name]
    strategy = text.partition(AFTER_SETUP)[2].partition(LEARNS)[0]
    assert 30 < len(strategy.strip().splitlines()) <= 60
    nodes = list(ast.walk(ast.parse(text)))
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    roots = {module.split(".")[0] for module in modules}
    assert roots <= {"torch", *sys.stdlib_module_names}


@pytest.mark.parametrize("name", BY_HAND)
def test_scripts_by_hand_have_the_same_setup_and_transformer(name):
    found = []
    for script in (name, [*BY_HAND][0]):
        text = read(script)
        setup = text[text.index("dist.init_process_group()") : text.index(AFTER_SETUP)]
        model = text[text.index(LEARNS) : text.index("\ntorch.manual_seed(0)")]
        found.append((setup, model))
    assert found[0] == found[1]


def test_pages_are_short():
    """Lines too. Exercises, with all their output, and diffs, which are generated, may be long."""
    limits = {"README.md": 250, "AGENTS.md": 60, "docs/runs.md": 300}
    for path in [ROOT / "README.md", ROOT / "AGENTS.md", *ROOT.glob("docs/*.md")]:
        page, text = str(path.relative_to(ROOT)), path.read_text()
        if path.stem not in ("exercises", "diffs"):
            assert len(text.splitlines()) <= limits.get(page, 150), page
        prose = re.sub(r"(?ms)^```.*?^```$", "", text)
        wide = [line for line in prose.splitlines() if len(line) > 120]
        assert all(line.startswith(("|", "![", "<!--")) for line in wide), (page, wide)
