"""Checkpoints of both styles, on 2 ranks: one Stateful object, or a state dict for each part."""

import pytest
from launching import launch_cases

CASES = {f"{script} {style}": style
         for script in ("fsdp1", "fsdp2") for style in ("stateful", "separate")}  # fmt: skip


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("checkpoints")
    return launch_cases(2, "checkpoint_worker", folder, CASES, folder=folder)


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_is_loaded_bit_for_bit(seen, case):
    """By the script that wrote it and by the other one, and the next loss is the same."""
    assert seen[case]["wrong"] == []
    assert seen[case]["tensors"] > 80  # each parameter with three tensors of its optimizer


@pytest.mark.parametrize("case", CASES)
def test_dcp_gets_a_stateful_object_in_one_style_only(seen, case):
    """From `dcp.save` and from both calls of `dcp.load`."""
    expected = {"app": True} if CASES[case] == "stateful" else {"model": False, "optimizer": False}
    assert seen[case]["handed"] == 3 * [expected]
