"""Mistakes that others made are planted in copies of our files, and the tests notice each one."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import check
import pytest
import test_agreement
from grid import share
from launching import EXPERTS, ROOT, RUN_FLAGS, SIZES, launch, metrics, read_lines
from mistakes import MISTAKES, Mistake, table
from record_reference import train
from safetensors.torch import load_file
from test_agreement import SHORT, check_agreement, losses
from test_by_hand import ROW
from transformers import AutoModelForCausalLM, LlamaConfig


@pytest.fixture(scope="session")
def biased_directory(tmp_path_factory) -> str:
    """Return a shape whose row-wise layers have a bias."""
    directory = tmp_path_factory.mktemp("biased")
    shape = LlamaConfig(**SIZES, num_key_value_heads=2, attention_bias=True)
    shape.save_pretrained(directory)
    return str(directory)


@pytest.fixture
def files(request, corpus, tmp_path):
    """Return what the tests behind the checks take, by name."""
    names = ["shape", "mixture", "biased"]
    directories = {name: request.getfixturevalue(f"{name}_directory") for name in names}
    return directories | {"corpus": corpus, "folder": tmp_path}


def agreement(run: Callable, mistake: Mistake, files: dict) -> None:
    """Losses, gradient norms and validation are those of FSDP2 (for FSDP2, those of DDP)."""
    script = "fsdp2_pretrain.py" if mistake.file in SHARED else mistake.file
    shape = "mixture" if script == EXPERTS else mistake.own.get("model", "shape")
    flags = SHORT | mistake.own | {"model": files[shape]}
    reference = "ddp_pretrain.py" if script == "fsdp2_pretrain.py" else "fsdp2_pretrain.py"
    own = {"balance_rate": 0} if script == EXPERTS else {}
    runs = run(reference, 2, **flags), run(script, 2, **flags | own)
    try:
        check_agreement(*runs)
    except AssertionError:
        raise AssertionError(what_differs(*runs)) from None


def what_differs(one: Path, other: Path) -> str:
    """Return which numbers differ by more than their bounds, and by how much."""
    found = []
    for name, bound in {"loss": 2e-6, "grad_norm": 5e-6, "validation_loss": 2e-6}.items():
        values = [
            [line[name] for line in read_lines(each) if name in line] for each in (other, one)
        ]
        if not test_agreement.worst(*values) < bound:
            found.append(f"{name.replace('_', ' ')} {test_agreement.worst(*values):.0e}")
    return ", ".join(found).replace("grad ", "gradient ")


def reference(run: Callable, mistake: Mistake, files: dict) -> None:
    """A packed reference run has the numbers of the oracle."""
    folder = ROOT / "reference/packed"
    lines = train("fsdp2_pretrain.py", 2, folder, files["folder"] / "run", files["planted"])
    for key in ("loss", "grad_norm"):
        right = [line[key] for line in json.loads((folder / "expected.json").read_text())["right"]]
        assert test_agreement.worst([line[key] for line in lines], right) < check.TOLERANCE


def world_sizes(run: Callable, mistake: Mistake, files: dict) -> None:
    """One rank and two train on the same sequences."""
    runs = [run("fsdp2_pretrain.py", ranks, **SHORT, model=files["shape"]) for ranks in (1, 2)]
    assert test_agreement.worst(*(losses(each, SHORT["steps"]) for each in runs)) < 1e-4


def experts(run: Callable, mistake: Mistake, files: dict) -> None:
    """A loop in one process gives the same losses, and moves biases alike."""
    test_agreement.test_plain_loop_balances_experts_alike(
        run, files["corpus"], files["mixture"], files["folder"]
    )


def resumes(run: Callable, mistake: Mistake, files: dict) -> None:
    """A run that is resumed, and resumed again, has the bits of one without a stop."""
    flags = {"model": files["shape"], "checkpoint_every": 1, "keep_checkpoints": 4}
    whole = run("fsdp2_pretrain.py", 2, **flags)
    once = run("fsdp2_pretrain.py", 2, **flags, resume=whole / "checkpoints/step_00000001")
    twice = run("fsdp2_pretrain.py", 2, **flags, resume=once / "checkpoints/step_00000002")
    for resumed, first in ((once, 1), (twice, 2)):
        lines, _ = metrics(resumed)
        assert [line["loss"] for line in lines] == losses(whole)[first:].tolist()


def export(run: Callable, mistake: Mistake, files: dict) -> None:
    """hf/ has the tensors of the checkpoint, and a tied head is not stored again."""
    hf = run("fsdp2_pretrain.py", 2, model=files["shape"]) / "hf"
    model = AutoModelForCausalLM.from_pretrained(hf)
    assert load_file(hf / "model.safetensors").keys() == dict(model.named_parameters()).keys()


def bf16(run: Callable, mistake: Mistake, files: dict) -> None:
    """The first loss in bf16 is nearly that in fp32, as its cross entropy is fp32."""
    flags = SHORT | {"model": files["shape"]}
    runs = [run("fsdp2_pretrain.py", 2, **flags, precision=each) for each in ("fp32", "bf16")]
    fp32, rounded = (losses(each, SHORT["steps"])[0] for each in runs)
    assert abs(rounded / fp32 - 1) < 1e-4


def by_hand(run: Callable, mistake: Mistake, files: dict) -> None:
    """Both ways have the losses of DDP in every step."""
    name, path = Path(mistake.file).name, ROOT / mistake.file
    if files["planted"]:
        (files["folder"] / name).write_text(mistake.apply(path.read_text()))
        path = files["folder"] / name
    done, right = (
        launch(2, "by_hand_worker", {"script": each}) for each in (path, ROOT / "by_hand/ddp.py")
    )
    if done.returncode or done.stderr:
        pytest.fail(f"not silent: {done.stderr}")
    (ours, theirs), (expected, _) = (
        [[float(row[column]) for row in ROW.findall(each.stdout)] for column in (1, 2)]
        for each in (done, right)
    )
    assert len(expected) == 8
    assert ours == pytest.approx(expected, abs=1e-6)
    assert theirs == pytest.approx(expected, abs=1e-6)


SHARED = ["common.py", "model.py"]
CHECKS = {
    "agreement": agreement,
    "reference": reference,
    "world sizes": world_sizes,
    "experts": experts,
    "resumes": resumes,
    "export": export,
    "bf16": bf16,
    "by hand": by_hand,
}
PASSED = set()  # checks without a mistake


def with_mistake(mistake: Mistake, run: Callable, corpus: str, monkeypatch, folder: Path):
    """Return a function like `run` that launches copies with the mistake instead.

    The copies end as if nothing were wrong: these are mistakes without an error.
    """
    folder.mkdir()

    def launch_copy(script: str, ranks: int, **flags) -> Path:
        if mistake.file not in (script, *SHARED):
            return run(script, ranks, **flags)
        copies = folder / f"copy_{len(list(folder.iterdir()))}"
        copies.mkdir()
        for name in {script, mistake.file}:
            shutil.copy(ROOT / name, copies)
        edited = copies / mistake.file
        edited.write_text(mistake.apply(edited.read_text()))
        monkeypatch.setenv("COPIED", str(copies / script))
        given = RUN_FLAGS | {"dataset": corpus, "run_dir": copies / "run"} | flags
        done = launch(ranks, "copied", given)
        if done.returncode or done.stderr:
            pytest.fail(f"not silent: {done.stderr}")
        return copies / "run"

    return launch_copy


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_fits_the_file(mistake):
    text = (ROOT / mistake.file).read_text()
    compile(mistake.apply(text), mistake.file, "exec")


@pytest.mark.drill
@pytest.mark.parametrize("mistake", share(MISTAKES), ids=lambda mistake: mistake.name)
def test_a_planted_mistake_is_noticed(mistake, run, files, corpus, monkeypatch, tmp_path):
    check = CHECKS[mistake.check]
    case = f"{mistake.check} {mistake.file} {mistake.own}"
    if case not in PASSED:
        (tmp_path / "right").mkdir()
        check(run, mistake, files | {"folder": tmp_path / "right", "planted": None})
        PASSED.add(case)
    wrong = with_mistake(mistake, run, corpus, monkeypatch, tmp_path / "copies")
    with pytest.raises(AssertionError) as noticed:
        check(wrong, mistake, files | {"planted": mistake})
    if mistake.check == "agreement":
        found, shown = (re.findall(r"([a-z ]+) ([\de.+-]+)", text) for text in (
            str(noticed.value).splitlines()[0], mistake.shows
        ))  # fmt: skip
        assert [name for name, _ in found] == [name for name, _ in shown]
        for (name, difference), (_, expected) in zip(found, shown):
            assert float(expected) / 4 < float(difference) < float(expected) * 4, name


def test_the_page_on_traps_shows_all():
    assert table() in (ROOT / "docs/traps.md").read_text()
