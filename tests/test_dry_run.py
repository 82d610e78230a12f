"""bench/dry_run.py against real ranks, torch's own tracker and the closed forms."""

import importlib
import json
import os
import sys

import pytest
from conftest import ROOT, torchrun

sys.path.insert(0, str(ROOT / "bench"))
import dry_run  # noqa: E402

MODES = {
    "plain": {},
    "accumulate": {"accumulate": 3},
    "bf16": {"precision": "bf16", "accumulate": 2},
    "full": {"activation_checkpointing": "full"},
    "selective": {"activation_checkpointing": "selective"},
}
OWN = {
    "ddp_pretrain": {},
    "fsdp1_pretrain": {
        "grad_op": {"sharding_strategy": "shard_grad_op", "accumulate": 2},
        "hybrid": {"sharding_strategy": "hybrid_shard"},
    },
    "fsdp2_pretrain": {
        "keep": {"reshard_after_forward": False, "accumulate": 2},
        "every": {"reduce_every_micro_batch": True, "accumulate": 2},
        "hybrid": {"dp_replicate": 2},
    },
    "fsdp2_sft": {},
}


def flags_of(mode: dict, ranks: int, **more) -> dict:
    """Rows of 128 tokens, 4 a micro-batch."""
    mode = {"precision": "fp32", **mode, **more}
    tokens = 512 * ranks * mode.pop("accumulate", 1)
    return {"bucket_edges": [128], "micro_batch_tokens": 512, "global_batch_tokens": tokens, **mode}


def cases(ranks: int, shape: str) -> dict[str, tuple[str, dict]]:
    return {
        f"{ranks} {name} {mode}": (name, flags_of(flags, ranks, model=shape))
        for name, own in OWN.items()
        for mode, flags in (MODES | own).items()
        if mode in ("plain", "hybrid") or ranks == 2 and name != "fsdp2_sft"
    }


FORMS = [f"{name} {mode}" for name, own in OWN.items() for mode in ["plain", "bf16", *own]]
CASES = [*cases(2, ""), *cases(4, "")]


@pytest.fixture(scope="module")
def real(shape_directory, tmp_path_factory) -> dict:
    out, seen = tmp_path_factory.mktemp("real") / "seen.json", {}
    for ranks in (2, 4):
        given = json.dumps(cases(ranks, shape_directory))
        done = torchrun(ranks, str(ROOT / "tests/dry_run_worker.py"), str(out), given)
        assert done.returncode == 0, done.stderr
        seen |= json.loads(out.read_text())
    return seen


def predict(name: str, flags: dict, ranks: int, ranks_per_node: int = 8) -> dry_run.Report:
    script = importlib.import_module(name)
    dry_run.be_rank_0(ranks, ranks_per_node)
    try:
        return dry_run.dry_run(script, script.Config(**flags), ranks_per_node, 320)
    finally:
        for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            del os.environ[variable]


@pytest.mark.parametrize("case", CASES)
def test_prediction_equals_real_ranks(real, shape_directory, case):
    ranks, name, mode = case.split()
    flags = cases(int(ranks), shape_directory)[case][1]
    report, seen = predict(name, flags, int(ranks)), real[case]
    calls = [[call.kind, call.group, call.ranks, call.bytes] for call in report.calls]
    assert sorted(calls) == sorted(seen["calls"])
    assert len(calls) == seen["gloo"]
    assert [report.parameters, report.gradients, report.optimizer] == seen["kept"]
    assert abs(sum(report.peak.values()) / seen["peak"] - 1) < 0.02


@pytest.mark.parametrize("ranks", [2, 8, 64, 1024])
@pytest.mark.parametrize("case", FORMS)
def test_closed_forms(case, ranks):
    """What a rank sends, but for the loss, the norm and model buffers: a few hundred bytes."""
    name, mode = case.split()
    if ranks == 1024 and mode not in ("plain", "hybrid"):
        pytest.skip("takes long and shows nothing new")
    script = importlib.import_module(name)
    flags = flags_of((MODES | OWN[name])[mode], ranks)
    report = predict(name, flags, ranks)
    config = script.Config(**flags)
    expected, _, root, padding = dry_run.closed_form_of(report, script, config)
    assert abs(report.sent - (expected - root + padding)) < 2000
    assert root < 0.1 * expected
    assert padding < 0.05 * expected or ranks == 1024  # more ranks than rows
