"""Each collective of a train_step is named at the line that issues it, and no other is."""

import ast
import importlib
import inspect
import os
import re
import sys
from unittest import mock

import pytest
from launching import ROOT, small_shape

sys.path.insert(0, str(ROOT / "tools"))
import dry_run  # noqa: E402

PLAIN = ("ddp_pretrain", "fsdp2_pretrain", "fsdp2_tp_pretrain")
SCRIPTS = [
    pytest.param(name, marks=[] if name in PLAIN else pytest.mark.drill) for name in dry_run.SCRIPTS
]
FLAGS = {"max_length": 128, "micro_batch_tokens": 512, "precision": "fp32"}
MODES = {
    "ddp_pretrain": [{}, {"shard_optimizer": True}],
    "fsdp1_pretrain": [{}, {"reduce_every_micro_batch": False}],
    "fsdp2_pretrain": [{}, {"reduce_every_micro_batch": False}, {"dp_replicate": 2}],
    "fsdp2_cp_pretrain": [{}, {"context_attention": "ring"}],
    "fsdp2_grpo": [{"answer_length": 32}],
    "fsdp2_nd_pretrain": [{"tensor_parallel": 2, "pipeline_parallel": 2}, {"context_parallel": 2}],
}
NAMES = {
    "all-gather": "all-gather",
    "reduce-scatter": "reduce-scatter",
    "all-reduce": "all-reduce",
    "all-to-all": "all-to-all",
    "broadcast": "broadcast",
    "send": "send|transfer",
    "receive": "receive",
}


class Lines(dry_run.Watch):
    """Notes at which line of train_step each collective is issued."""

    def __init__(self, code):
        super().__init__()
        self.code, self.seen = code, set()

    def note(self, func, arguments, result):
        super().note(func, arguments, result)
        frame = sys._getframe()
        while frame and frame.f_code is not self.code:
            frame = frame.f_back
        if frame:
            self.seen.add((self.calls[-1].kind, frame.f_lineno))


def remarks(function) -> tuple[dict[int, str], dict[int, str]]:
    """Return what is said of each line: with its statement, and also in what it refers to.

    The first has the statement and the comments beside and above it. The second has also what is
    said above the `with` around it, of setters before it, and what "as above" means.
    """
    source, first = inspect.getsourcelines(function)
    lines = [line.strip().replace("_", "-").lower() for line in source]
    statements = sorted(
        (
            node
            for node in ast.walk(ast.parse(inspect.cleandoc("".join(source))).body[0])
            if isinstance(node, ast.With | ast.Expr | ast.Assign | ast.AugAssign)
        ),
        key=lambda node: node.lineno,
    )
    own, referred = {}, {}
    pending = forward = ""
    for node in statements[1:]:  # the first is the docstring
        begin = node.lineno - 1
        while lines[begin - 1].startswith("#"):
            begin -= 1
        text = " ".join(lines[begin : node.end_lineno])
        if isinstance(node, ast.With) or "model.set-" in text:
            pending += " ".join(lines[begin : node.lineno])
            continue
        more = text
        if "model(" in text or "backward()" in text or ".step(" in text:
            more += pending
        if "as above" in text:
            more += forward
        if "model(" in text:
            forward = text
        for line in range(first + node.lineno - 1, first + node.end_lineno):
            own[line], referred[line] = text, more
    return own, referred


@pytest.fixture(scope="module")
def shape(tmp_path_factory) -> str:
    directory = tmp_path_factory.mktemp("shape")
    small_shape(num_hidden_layers=2).save_pretrained(directory)
    return str(directory)


@pytest.mark.parametrize("name", SCRIPTS)
def test_comments_name_the_collectives_of_their_line(name, shape):
    """PyTorch's fake ranks issue what real ones do, see test_dry_run.py."""
    script = importlib.import_module(name)
    model = "tiny-moe" if "ep" in name else shape
    own, referred = remarks(script.train_step)
    seen = set()
    for mode in MODES.get(name, [{}]):
        watch = Lines(script.train_step.__code__)
        config = script.Config(**FLAGS, model=model, global_batch_tokens=4096, **mode)
        with mock.patch.dict(os.environ):
            dry_run.be_rank(0, 4, 4)
            dry_run.dry_run(script, config, 320, watch)
        seen |= watch.seen
    for kind, line in seen:
        assert re.search(NAMES[kind], referred[line]), (kind, line, referred[line])
    for line, text in own.items():
        same = {at for at, what in own.items() if what == text}  # a statement of several lines
        for kind, pattern in NAMES.items():
            if re.search(pattern, text):
                assert {(kind, at) for at in same} & seen, (kind, line, text)
