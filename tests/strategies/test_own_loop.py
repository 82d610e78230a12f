"""docs/own_loop.md: each piece, with a model of its own, agrees with a plain loop."""

import math

import pytest
import torch
import torch.nn.functional as F
from launching import launch_cases
from own_loop import CHUNK, build, make_batches

STEPS, MICRO_BATCHES = 6, 4


def plain_loop(logits_of):
    """Train in this process: no strategy, one mean over all target tokens, torch's clipping."""
    model = build()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        lr=0.003, betas=(0.9, 0.95),
    )  # fmt: skip
    batches = make_batches()
    plan, seen = batches.plan(0), []
    for step in range(STEPS):
        parts = plan[step * MICRO_BATCHES : (step + 1) * MICRO_BATCHES]
        losses = []
        for indices in parts:
            for index in indices.tolist():  # one sequence at a time: no padding
                tokens, in_loss = batches.sequences.read(index)
                logits = logits_of(model, torch.from_numpy(tokens[None, :-1]))[0]
                each = F.cross_entropy(logits, torch.from_numpy(tokens[1:]), reduction="none")
                losses += each[torch.from_numpy(in_loss[1:])]
        loss = torch.stack(losses).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen.append((loss.item(), norm.item()))
    return seen


def logits_of(model, input_ids):
    x = model.embedding(input_ids) + model.positions.weight[: input_ids.shape[1]]
    for block in model.blocks:
        x = block(x)
    return model.norm(x) @ model.embedding.weight.T


@pytest.fixture(scope="module")
def right():
    return plain_loop(logits_of)


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """The cases on 2 ranks, and then on 1, which resumes what 2 have saved."""
    folder = tmp_path_factory.mktemp("own_loop")
    resumed = {"to": str(folder / "step_3")}
    cases = {"fsdp2": {}, "muon": {}, "resumed": resumed}
    two = launch_cases(2, "own_loop", folder, cases | {"tensor parallel": {}, "claims": {}})
    return {2: two, 1: launch_cases(1, "own_loop", folder, cases)}


def is_close(pairs, others, bound):
    return len(pairs) == len(others) and all(
        math.isclose(a, b, rel_tol=bound)
        for pair, other in zip(pairs, others)
        for a, b in zip(pair, other)
    )


@pytest.mark.parametrize("ranks, case", [(1, "fsdp2"), (2, "fsdp2"), (2, "tensor parallel")])
def test_an_own_model_trains_as_in_a_plain_loop(seen, right, ranks, case):
    pairs, _ = seen[ranks][case]
    assert is_close(pairs, right, 5e-6), (pairs, right)
    assert pairs[-1][0] < 0.9 * pairs[0][0]


def test_an_own_model_resumes_on_as_many_ranks_and_on_fewer(seen):
    assert seen[2]["resumed"] == seen[2]["fsdp2"]  # to the last bit
    pairs, tokens = seen[1]["resumed"]
    assert tokens == seen[2]["fsdp2"][1]
    assert is_close(pairs, seen[2]["fsdp2"][0], 5e-6)


def test_muon_of_an_own_model_does_not_depend_on_the_ranks(seen, right):
    pairs, _ = seen[2]["muon"]
    assert is_close(pairs, seen[1]["muon"][0], 5e-6)
    assert not is_close(pairs[1:], right[1:], 1e-3)


def test_mistakes_look_as_the_page_says(seen):
    found = seen[2]["claims"]
    assert found["weights stay"]  # an optimizer that was built before `fully_shard`
    assert "mixed torch.Tensor and DTensor" in found["clip_grad_norm_"]
    assert 1e-6 < abs(found["heads by number"]) < 1e-2  # and no error
    cast, not_cast = found["bf16"]  # the largest of eight errors
    assert cast < 1e-3 < not_cast


def test_the_loss_in_chunks_is_the_loss():
    """And so are its gradients. The last micro-batch of a step has more than one chunk."""
    model, batches = build(), make_batches()
    micro_batch = batches.collate(batches.plan(0)[0])
    assert micro_batch["labels"].numel() > CHUNK
    model(**micro_batch).backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    logits = logits_of(model, micro_batch["input_ids"]).flatten(0, 1)
    F.cross_entropy(logits, micro_batch["labels"].flatten(), reduction="sum").backward()
    for gradient, parameter in zip(gradients, model.parameters()):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-5)
