"""by_hand/: each strategy in plain torch has the losses of PyTorch's own API."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, launch

SCRIPTS = ["ddp", "fsdp", "tensor", "sequence", "pipeline"]
ROW = re.compile(r"(?m)^\| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([-\d.e+]+) \|$")
# The bytes of all parameters (equally many in gradients), of the embedding's and the head's, and of
# the hidden states of a batch.
PARAMETERS, OUTER, HIDDEN = 819_200, 2 * 64 * 64 * 4, 16 * 32 * 64 * 4
BLOCKS = 4


def outcome(path: Path, ranks: int) -> SimpleNamespace:
    """Run a script; returns what it printed, and how it ended."""
    done = launch(ranks, "by_hand_worker", {"script": path})
    rows = [[float(number) for number in row] for row in ROW.findall(done.stdout)]
    figures = [line.replace(",", "").split() for line in done.stdout.splitlines()]
    return SimpleNamespace(
        code=done.returncode,
        stderr=done.stderr,
        ours=[ours for _, ours, _, _ in rows],
        differences=[abs(difference) for *_, difference in rows],
        held=[[int(line[7]), int(line[9])] for line in figures if line[1:3] == ["bytes", "held"]],
        sent=[int(line[9]) for line in figures if line[1:3] == ["bytes", "sent"]],
        measured=[[int(word) for word in line[1:]] for line in figures if line[:1] == ["measured"]],
    )


@pytest.fixture(scope="module")
def ran():
    """Return a function that runs a script once for all tests."""
    done = {}

    def once(name: str, ranks: int = 2) -> SimpleNamespace:
        if (name, ranks) not in done:
            done[name, ranks] = outcome(ROOT / f"by_hand/{name}.py", ranks)
            assert done[name, ranks].code == 0, done[name, ranks].stderr
        return done[name, ranks]

    return once


@pytest.mark.parametrize("name", SCRIPTS)
def test_losses_by_hand_are_pytorch_s_to_the_last_bit(ran, name):
    found = ran(name)
    assert found.differences == [0] * 8
    assert found.ours[0] > 4 and found.ours[-1] < 0.3  # it learns
    assert found.stderr == ""


@pytest.mark.drill
@pytest.mark.parametrize("name", SCRIPTS)
def test_losses_on_four_ranks_agree(ran, name):
    found = ran(name, 4)
    assert len(found.differences) == 8 and max(found.differences) < 1e-6
    assert found.ours == pytest.approx(ran(name).ours, abs=2e-6)


def test_all_strategies_have_the_same_losses(ran):
    for name in SCRIPTS[1:]:
        assert ran(name).ours == pytest.approx(ran("ddp").ours, abs=1e-6)


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_table_tells_what_a_rank_holds(ran, name):
    """Both ways hold as much, and so do the tensors themselves."""
    found = ran(name)
    assert found.held == found.measured
    assert len(set(found.held[0])) == 1


def test_the_table_tells_what_a_rank_sends(ran):
    """The formulas are those of the pages, for two ranks."""
    assert ran("ddp").sent == [2 * PARAMETERS // 2]
    assert ran("fsdp").sent == [3 * PARAMETERS // 2]
    assert ran("tensor").sent == [BLOCKS * 8 * HIDDEN // 2]
    assert ran("sequence").sent == [BLOCKS * 8 * HIDDEN // 2 + 2 * OUTER // 2]
    assert ran("pipeline").sent == [HIDDEN]


MISTAKES = {
    "the optimizer does not wait for the all-reduces": ("ddp", {"self.work.wait()": "pass"}),
    "parameters stay gathered, and get old": (
        "fsdp",
        {
            "            free()\n": "",
            "        full.untyped_storage().resize_(full.nbytes)\n": (
                "        if full.untyped_storage().size():\n            return\n"
                "        full.untyped_storage().resize_(full.nbytes)\n"
            ),
        },
    ),
    "gradients of a column-parallel layer's input are not summed": (
        "tensor",
        {"torch.clone, all_reduce)": "torch.clone, torch.clone)"},
    ),
    "gradients of the head and the embedding are those of a part of the sequence": (
        "sequence",
        {"layer.weight.register_hook(lambda g: AllGather.apply(ReduceScatter.apply(g)))": "pass"},
    ),
    "the gradient of a part of the sequence is that of one rank's columns": (
        "sequence",
        {"ReduceScatter.apply(gradient)": "gradient.chunk(RANKS, dim=1)[RANK]"},
    ),
    "gradients go to the wrong micro-batch": ("pipeline", {"pop(0)": "pop()"}),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_changes_the_losses(mistake, tmp_path):
    name, edits = MISTAKES[mistake]
    text = (ROOT / f"by_hand/{name}.py").read_text()
    for before, after in edits.items():
        assert text.count(before) == 1
        text = text.replace(before, after)
    (tmp_path / "script.py").write_text(text)
    found = outcome(tmp_path / "script.py", 2)
    assert found.code == 0, found.stderr
    assert len(found.differences) == 8 and max(found.differences) > 1e-4
