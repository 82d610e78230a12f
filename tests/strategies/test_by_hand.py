"""by_hand/: each strategy in plain torch has the losses of PyTorch's own API."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from launching import ROOT, launch

SCRIPTS = ["ddp", "fsdp", "tensor", "sequence", "pipeline"]
ROW = re.compile(r"(?m)^\| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([-\d.e+]+) \|$")
# The bytes of all parameters (equally many in gradients), of the embedding's and the head's, and of
# the hidden states of a batch.
PARAMETERS, OUTER, HIDDEN = 819_200, 2 * 64 * 64 * 4, 16 * 32 * 64 * 4
BLOCKS = 4


def outcome(path: Path, ranks: int, **flags: Path) -> SimpleNamespace:
    """Run a script; returns what it printed, and how it ended."""
    done = launch(ranks, "by_hand_worker", {"script": path} | flags)
    rows = [[float(number) for number in row] for row in ROW.findall(done.stdout)]
    figures = [line.replace(",", "").split() for line in done.stdout.splitlines()]
    return SimpleNamespace(
        code=done.returncode,
        stdout=done.stdout,
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


# --- collectives.py and checkpoint.py -------------------------------------------------------------

COLLECTIVE = re.compile(r"(?m)^\| (\w+) \| ([\d,]+) \| ([\d.]+) \| ([\d.e+-]+) \|$")
FULL = 4_194_240  # bytes of the full tensor


@pytest.mark.parametrize("ranks", [2, 4])
def test_collectives_by_hand_are_pytorch_s(ran, ranks):
    """To the last bit, but for sums of four numbers, whose order PyTorch's ring may choose."""
    found = ran("collectives", ranks)
    assert found.stderr == ""
    seen = {name: (int(sent.replace(",", "")), float(difference))
            for name, sent, _, difference in COLLECTIVE.findall(found.stdout)}  # fmt: skip
    part = FULL * (ranks - 1) // ranks
    sent = {"broadcast": FULL, "all_gather": part, "reduce_scatter": part,
            "all_reduce": 2 * part, "all_to_all": part}  # fmt: skip
    assert {name: size for name, (size, _) in seen.items()} == sent
    for name, (_, difference) in seen.items():
        sums = "reduce" in name and ranks > 2
        assert difference <= (1e-6 if sums else 0), name
    assert found.measured == [[1]]  # and the sums have the bits of the order that the ring has


def test_collectives_show_small_numbers(ran):
    lines = ran("collectives", 4).stdout.splitlines()
    shown = {tuple(line.split()[:3:2]): line.split("  ->  ")[1] for line in lines if "->" in line}
    assert shown["broadcast", "3"] == "[10, 11, 12, 13]"
    assert shown["all_gather", "3"] == "[10, 20, 30, 40]"
    assert shown["reduce_scatter", "1"] == "[104]"
    assert shown["all_reduce", "2"] == "[100, 104, 108, 112]"
    assert shown["all_to_all", "1"] == "[11, 21, 31, 41]"


RESUMED = re.compile(r"(?m)^\| ([5-8]) \| ([\d.]+) \| ([-+\d.e]+) \| ([-+\d.e]+) \|$")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Save by 2 ranks; returns the folder, and what that run printed."""
    folder = tmp_path_factory.mktemp("by_hand")
    return folder, outcome(ROOT / "by_hand/checkpoint.py", 2, words=folder)


def fingerprints(stdout: str) -> set[str]:
    found = re.findall(r"weights and moments ([0-9a-f]{16})", stdout)
    assert len(found) == 2
    return {*found}


def test_a_checkpoint_by_hand_resumes_with_equal_bits(saved):
    folder, found = saved
    assert found.code == 0 and found.stderr == "", found.stderr
    rows = RESUMED.findall(found.stdout)
    assert len(rows) == 4 and all(float(ours) == float(theirs) == 0 for *_, ours, theirs in rows)
    assert sorted(path.name for path in folder.iterdir()) == [
        "step_4_by_hand",
        "step_4_with_pytorch",
    ]


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_checkpoint_by_hand_has_equal_bits_on_other_ranks(saved, ranks):
    folder, before = saved
    found = outcome(ROOT / "by_hand/checkpoint.py", ranks, words=folder)
    assert found.code == 0, found.stderr
    assert fingerprints(found.stdout) == fingerprints(before.stdout)
    assert len(fingerprints(found.stdout)) == 1
    rows = RESUMED.findall(found.stdout)
    assert len(rows) == 4 and all(abs(float(ours)) < 1e-6 for *_, ours, _ in rows)


def changed(before: str, after: str, folder: Path) -> SimpleNamespace:
    """Run checkpoint.py with one part of its text replaced, on two ranks."""
    text = (ROOT / "by_hand/checkpoint.py").read_text()
    assert text.count(before) == 1
    (folder / "script.py").write_text(text.replace(before, after))
    return outcome(folder / "script.py", 2, words=folder / "out")


def test_a_run_killed_while_it_saves_leaves_no_checkpoint_by_hand(tmp_path):
    found = changed("temporary.rename(final)", "os.kill(os.getpid(), 9)", tmp_path)
    assert found.code == 1
    assert not (tmp_path / "out/step_4_by_hand").exists()
    files = sorted(path.name for path in (tmp_path / "out/step_4_by_hand.tmp").iterdir())
    assert files == ["rank_0.pt", "rank_1.pt"]


def test_a_checkpoint_by_hand_that_lacks_a_file_is_not_loaded(saved, tmp_path):
    folder, _ = saved
    (tmp_path / "out/damaged").mkdir(parents=True)
    shutil.copy(folder / "step_4_by_hand/rank_0.pt", tmp_path / "out/damaged")
    found = changed("step_{SAVED}_by_hand", "damaged", tmp_path)
    assert found.code == 1
    assert "damaged lacks a part of the tensors" in found.stderr


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
