"""GRPO: the loss against the papers, sampling against the model, and the whole script."""

import bisect
import collections
import copy
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from grid import share
from launching import (
    HANGS,
    ROOT,
    all_of,
    arguments,
    launch,
    launch_cases,
    small_mixture,
    small_shape,
    torchrun,
    tree,
)
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BartConfig,
    GPT2Config,
    MiniMaxM2ForCausalLM,
    MistralConfig,
    Qwen2ForCausalLM,
    Qwen3Config,
)
from transformers.cache_utils import DynamicCache

import common
import conversations
import fsdp2_grpo as script
import fsdp2_sft
from conversations import COLUMNS
from model import PACKED_TYPES

CPU = torch.device("cpu")


# --- Inputs ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    """Return the tokenizer of fine-tuned models."""
    return conversations.chat_tokenizer(fsdp2_sft.Config(), "new tokens")[0]


def save_start(folder: Path, config, tokenizer) -> str:
    """Save random weights that end an answer after about ten tokens, and a chat tokenizer.

    Each hidden state has a constant, to which the head responds only for the end of a turn.
    """
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        embedding.normal_(0, 0.5)[:, 0] = 3.0
        head.normal_(0, 0.3)[:, 0] = 0.0
        head[tokenizer.eos_token_id, 0] = 1.0
    model.save_pretrained(folder, save_original_format=False)
    common.save_tokenizer(tokenizer, folder)
    return str(folder)


@pytest.fixture(scope="module")
def start(tokenizer, tmp_path_factory) -> str:
    return save_start(
        tmp_path_factory.mktemp("start"), small_shape(tie_word_embeddings=False), tokenizer
    )


@pytest.fixture(scope="module")
def teacher(tokenizer, tmp_path_factory) -> str:
    """Return a teacher of another type and shape, with a larger vocabulary."""
    own = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 16}
    own |= {"num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 384}
    config = Qwen3Config(**own, tie_word_embeddings=False)
    return save_start(tmp_path_factory.mktemp("teacher"), config, tokenizer)


@pytest.fixture(scope="module")
def experts(tokenizer, tmp_path_factory) -> str:
    config = small_mixture(tie_word_embeddings=False)
    return save_start(tmp_path_factory.mktemp("experts"), config, tokenizer)


def chat_tokenizer(name: str) -> tuple:
    """Return tokenizer and the end of a turn as the script makes them."""
    config = SimpleNamespace(tokenizer=name, chat_template="own")
    return conversations.chat_tokenizer(config, "known tokens")[:2]


def save_template(folder: Path, template: str | dict) -> str:
    """Save the `bytes` tokenizer with two more special tokens and a chat template."""
    tokenizer = copy.deepcopy(common.load_tokenizer("bytes"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|header|>", "<|eot|>"]})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def questions(tmp_path_factory) -> Path:
    """Write 150 prompts of 4 to 62 bytes, with answers; three of them are held out."""
    rest = "Which number comes after this one, and why is it not another?"
    rows = [
        {"prompt": f"{n} {rest}"[: 4 + n % 40 * 3 // 2], "completion": f"{n}!"} for n in range(150)
    ]
    return write(tmp_path_factory.mktemp("questions") / "questions.jsonl", rows)


@pytest.fixture(scope="module")
def flags(start, questions) -> dict:
    """Return flags that give micro-batches of a few answers each."""
    made = {"dataset": str(questions), "init_from": start, "model": start, "tokenizer": start}
    made |= {"max_length": 128, "answer_length": 16, "micro_batch_tokens": 160}
    made |= {"prompts": 4, "answers": 4, "eval_prompts": 3, "eval_answers": 2}
    return made | {"grad_clip": 0.0, "precision": "fp32"}


# --- The loss -------------------------------------------------------------------------------------


def log_probs_of(model, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Compute them for an answer's tokens with transformers' own forward, unbatched."""
    ids = torch.tensor([[*prompt, *tokens]])
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0, len(prompt) - 1 :]
    return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]


def oracle(start: str, weights: dict, old: dict, answers: list, own: dict) -> dict:
    """Compute loss and gradients of a step as in the papers, in fp64, one answer at a time.

    Args:
        weights, old: of the current model, and of the one that sampled.
        answers: groups of (prompt, tokens, log-probs, reward).
        own: clip_low, clip_high; reference_weight, where weights of `start` are the reference;
            teacher and teacher_weight.
    """
    models = []
    for state in (weights, old, None, "teacher"):
        path = start
        if state == "teacher":
            path, state = own.get("teacher", start), None
        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
        if state is not None:
            model.load_state_dict(state)
        models.append(model.double())
    now, before, reference, teacher = models
    total, count, low, high, divergence, of_reference, entropy = 0.0, 0, 0, 0, 0.0, 0.0, 0.0
    by_teacher: list[float] = []  # the teacher's part of each token's advantage
    alone = "teacher" in own and "teacher_weight" not in own
    for group in answers:
        mean = sum(reward for *_, reward in group) / len(group)
        for prompt, tokens, _, reward in group:
            of_answer = 0 if alone else reward - mean
            log_probs = log_probs_of(now, prompt, tokens)
            with torch.no_grad():
                old_log_probs = log_probs_of(before, prompt, tokens)
                reference_log_probs = log_probs_of(reference, prompt, tokens)
                teacher_log_probs = log_probs_of(teacher, prompt, tokens)
            for current, earlier, first, better in zip(
                log_probs, old_log_probs, reference_log_probs, teacher_log_probs
            ):
                by_teacher.append((better - earlier).item())
                advantage = of_answer
                if "teacher" in own:
                    advantage += own.get("teacher_weight", 1) * by_teacher[-1]
                ratio = torch.exp(current - earlier)
                bounded = min(max(ratio.item(), 1 - own["clip_low"]), 1 + own["clip_high"])
                if bounded * advantage < ratio.item() * advantage:
                    total = total - bounded * advantage
                    low, high = low + (bounded > ratio), high + (bounded < ratio)
                else:
                    total = total - ratio * advantage
                distance = torch.exp(first - current) - (first - current) - 1
                total = total + own.get("reference_weight", 0) * distance
                of_reference += distance.item()
                drift = (current - earlier).item()
                divergence += math.exp(drift) - 1 - drift
                entropy -= earlier.item()
                count += 1
    (total / count).backward()
    return {
        "loss": total.item() / count, "low": int(low), "high": int(high), "tokens": count,
        "policy_kl": divergence / count, "reference_kl": of_reference / count,
        "entropy": entropy / count, "clip_fraction": int(low + high) / count,
        "advantages": sorted(by_teacher), "teacher_kl": -sum(by_teacher) / count,
        "gradients": {name: p.grad for name, p in now.named_parameters()},
    }  # fmt: skip


def test_the_gradient_is_that_of_the_reverse_divergence():
    """In expectation over the sampled token, at given prefixes: enumerate the vocabulary.

    As a loss, the estimator k3 would give that of the other direction, although its mean is this
    divergence.
    """
    torch.manual_seed(0)
    tokens = 64
    made = [
        small_shape(vocab_size=tokens, initializer_range=0.3, num_hidden_layers=n) for n in (2, 3)
    ]
    model, teacher = (Qwen2ForCausalLM(shape).double().eval() for shape in made)
    prefixes = torch.randint(0, tokens, (3, 7))
    config, weights = script.Config(teacher="its directory"), [*model.parameters()]

    def gradient(loss: torch.Tensor) -> torch.Tensor:
        return torch.cat(
            [g.flatten() for g in torch.autograd.grad(loss, weights, retain_graph=True)]
        )

    expected, other, sampled, k3 = 0.0, 0.0, 0.0, 0.0
    for prefix in prefixes:
        of_model = model(prefix[None]).logits[0, -1].log_softmax(-1)
        with torch.no_grad():
            of_teacher = teacher(prefix[None]).logits[0, -1].log_softmax(-1)
        expected = expected + (of_model.exp() * (of_model - of_teacher)).sum()
        other = other + (of_teacher.exp() * (of_teacher - of_model)).sum()
        # Each token as the answer, weighted with its probability.
        ids = torch.cat([prefix.expand(tokens, -1), torch.arange(tokens)[:, None]], 1)
        labels = torch.full((tokens, 7), common.IGNORED)
        labels[:, -1] = ids[:, -1]
        micro_batch = {"input_ids": ids[:, :-1], "labels": labels}
        micro_batch["target_positions"] = torch.arange(6, 7 * tokens, 7)
        log_probs, known = (
            script.forward_with_log_probs(each, plain_log_probs, **micro_batch)
            for each in (model, teacher)
        )
        zeros, old, known = torch.zeros(1), log_probs.detach(), known.detach()
        k3 = k3 + (old.exp() * script.divergence(log_probs, known)).sum()
        for i, weight in enumerate(old.exp()):
            now, before, better = (x[i : i + 1] for x in (log_probs, old, known))
            loss, *_ = script.policy_loss(
                now, before, before, zeros, config, teacher_log_probs=better
            )
            sampled = sampled + weight * loss
    for mean in (sampled, k3):
        assert mean.item() == pytest.approx(expected.item(), rel=1e-6)
    right, wrong = gradient(expected), gradient(other)
    assert (gradient(sampled) - right).norm() < 1e-6 * right.norm()
    assert (gradient(k3) - wrong).norm() < 1e-6 * wrong.norm()
    assert (wrong - right).norm() > 0.1 * right.norm()


def plain_log_probs(hidden, weight, bias, labels) -> torch.Tensor:
    """Stand in for `chunk_log_probs`, which computes in fp32."""
    return (hidden @ weight.T).log_softmax(-1).gather(1, labels[:, None])[:, 0]


def log_probs_of_teacher(teacher: str, prompt: list[int], tokens: list[int]) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(teacher, attn_implementation="eager").double()
    with torch.no_grad():
        return log_probs_of(model, prompt, tokens).numpy()


BOUNDS = {"clip_low": 0.2, "clip_high": 0.28}


def check_step(start: str, seen: dict, number: int, first: int, step: int, own: dict) -> dict:
    """Check optimizer step `number` of a mode, on the answers of `step`; `first` is its first."""
    got = seen["steps"][number]
    old = seen["steps"][first]["weights"]
    expected = oracle(start, got["weights"], old, seen["answers"][step], BOUNDS | own)
    measured = got["measured"]
    assert got["tokens"] == expected["tokens"]
    for name in ("loss", "entropy", "policy_kl", "clip_fraction"):
        assert measured[name] == pytest.approx(expected[name], rel=1e-6, abs=1e-6), name
    assert got["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        error = (got["gradients"][name] - gradient).norm() / gradient.norm()
        assert 0 < gradient.norm() and error < 1e-5, (name, error)
    return expected


# Mode -> flags, on two ranks.
MODES = {
    "plain": {},
    "packed": {"batching": "packed"},
    "inner": {"inner_steps": 2},
    "packed inner": {"inner_steps": 2, "batching": "packed"},
    "reference": {"inner_steps": 2, "reference_weight": 0.5},
    "bf16": {"precision": "bf16"},
    "bf16 inner": {"precision": "bf16", "inner_steps": 2},
    "kept": {"reshard_after_forward": False},
    "replicas": {"dp_replicate": 2},
    "offload": {"cpu_offload": True},
    "recomputed": {"activation_checkpointing": "full"},
    "reduced once": {"reduce_every_micro_batch": False},
    "padded": {"pad_to_multiple_of": 16},
    "one at a time": {"sample_prompts": 1},
    "uneven": {"answer_length": 64, "uneven": True},
    "experts": {},
    "teacher": {"teacher": True, "answers": 1, "prompts": 8},
    "packed teacher": {
        "teacher": True, "teacher_weight": 0.3, "batching": "packed", "inner_steps": 2,
        "reference_weight": 0.5,
    },
    "bf16 teacher": {"teacher": True, "teacher_weight": 0.3, "precision": "bf16"},
}  # fmt: skip
ALONE = ["plain", "inner", "packed inner", "teacher"]  # on one rank too


@pytest.fixture(scope="module")
def modes_of(flags, teacher) -> Callable:
    def made(names: list[str]) -> dict:
        modes = {mode: flags | MODES[mode] for mode in names}
        return {
            mode: own | ({"teacher": teacher} if "teacher" in own else {})
            for mode, own in modes.items()
        }

    return made


@pytest.fixture(scope="module")
def seen(modes_of, experts, tmp_path_factory) -> dict:
    modes = modes_of([*MODES])
    modes["experts"] |= dict.fromkeys(("init_from", "model", "tokenizer"), experts)
    return launch_cases(2, "grpo_worker", tmp_path_factory.mktemp("two"), modes, silent=True)


@pytest.fixture(scope="module")
def alone(modes_of, tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("one")
    return launch_cases(1, "grpo_worker", folder, modes_of(ALONE), silent=True)


@pytest.mark.parametrize(
    "ranks, mode",
    [*((1, mode) for mode in ALONE[:3]), *((2, mode) for mode in [*ALONE[:3], "packed"])],
)
def test_loss_and_gradients_are_those_of_the_papers(request, start, ranks, mode):
    """In the first and a second inner step, over several micro-batches of different lengths."""
    every = request.getfixturevalue("seen" if ranks == 2 else "alone")
    seen = every[mode]
    assert seen["steps"][0]["micro_batches"] >= 2
    lengths = {len(tokens) for group in seen["answers"][1] for _, tokens, *_ in group}
    assert len(lengths) > 4  # answers[0] are those of the validation
    first = check_step(start, seen, 0, 0, 1, {})
    assert (first["low"], first["high"]) == (0, 0)
    if "inner" in mode:
        second = check_step(start, seen, 1, 0, 1, {})
        assert second["low"] >= 5 and second["high"] >= 5
        check_step(start, seen, 2, 2, 2, {})
    else:
        check_step(start, seen, 1, 1, 2, {})


def test_the_reference_model(seen, start):
    """Its divergence is 0 at first, and is part of loss and gradients; it stays in shards."""
    got, own = seen["reference"], {"reference_weight": 0.5}
    assert got["frozen"]["reference_log_probs"]["in shards"] == [True] * 4
    assert got["frozen"]["reference_log_probs"]["unsharded bytes"] == 0
    assert got["steps"][0]["measured"]["reference_kl"] == 0
    for number, first, step in ((0, 0, 1), (1, 0, 1), (2, 2, 2), (3, 2, 2)):
        expected = check_step(start, got, number, first, step, own)
        measured = got["steps"][number]["measured"]
        assert measured["reference_kl"] == pytest.approx(
            expected["reference_kl"], rel=1e-5, abs=1e-9
        )
    assert all(step["measured"]["reference_kl"] > 1e-3 for step in got["steps"][1:])
    assert all(step["measured"]["reference_kl"] == 0 for step in seen["inner"]["steps"])


@pytest.fixture(scope="module")
def four(modes_of, tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("four")
    return launch_cases(4, "grpo_worker", folder, modes_of(["teacher"]), silent=True)


@pytest.mark.parametrize(
    "launched, mode",
    [
        ("alone", "teacher"),
        ("seen", "teacher"),
        ("seen", "packed teacher"),
        pytest.param("four", "teacher", marks=pytest.mark.drill),
    ],
)
def test_the_teacher_against_a_plain_loop(request, start, teacher, launched, mode):
    """Advantages, loss and gradients; it has another type and shape, and stays in shards."""
    got = request.getfixturevalue(launched)[mode]
    held = got["frozen"]["teacher_log_probs"]
    assert held["in shards"] == [True] * len(held["in shards"])
    assert held["unsharded bytes"] == 0
    own = {"teacher": teacher} | {k: MODES[mode][k] for k in MODES[mode] if "weight" in k}
    firsts = {0: (0, 1), 1: (0, 1), 2: (2, 2), 3: (2, 2)} if "inner_steps" in MODES[mode] else {}
    for number in range(len(got["steps"])):
        first, step = firsts.get(number, (number, 1 + number))
        expected = check_step(start, got, number, first, step, own)
        made = got["steps"][number]
        off = np.subtract(made["advantages"], expected["advantages"])
        assert np.linalg.norm(off) < 1e-6 * np.linalg.norm(expected["advantages"])
        assert made["measured"]["teacher_kl"] == pytest.approx(expected["teacher_kl"], rel=1e-6)
    sampled = sum(got["answers"][0], [])  # of the validation
    ratios = [
        np.subtract(log_probs, log_probs_of_teacher(teacher, prompt, tokens))
        for prompt, tokens, log_probs, _ in sampled
    ]
    assert got["validation"]["validation_kl"] == pytest.approx(
        np.concatenate(ratios).mean(), rel=1e-6
    )
    assert got["validation"].keys() - {"step", "validation_kl"} == (
        {"validation_reward"} if "teacher_weight" in own else set()
    )


@pytest.mark.parametrize("weight", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["dapo", "bnpo"])  # both are means over tokens
def test_the_loss_is_that_of_trl(kind, weight):
    """On the same log-probabilities and advantages: loss, gradient, divergence, clip fraction.

    TRL is not in the requirements. To run this in another environment:

        python -m venv apart && apart/bin/pip install -r requirements-dev.txt
        apart/bin/pip install --no-deps trl==1.16.0 accelerate==1.15.0
        apart/bin/python -m pytest tests/finetuning/test_grpo.py -k trl
    """
    trl = pytest.importorskip("trl")
    rng = torch.Generator().manual_seed(0)
    lengths = torch.tensor([9, 1, 4, 7, 2, 9])
    mask = torch.arange(9) < lengths[:, None]
    old = -5 * torch.rand(6, 9, generator=rng) - 0.5
    now = (old + 0.4 * torch.randn(6, 9, generator=rng)).requires_grad_()
    first = old + 0.4 * torch.randn(6, 9, generator=rng)
    advantages = torch.randn(6, generator=rng)
    config = script.Config(reference_weight=weight, init_from="weights", **BOUNDS)
    measured = script.policy_loss(
        now[mask], old[mask], old[mask], advantages.repeat_interleave(lengths), config,
        first[mask] if weight else None,
    )  # fmt: skip
    count = int(lengths.sum())
    loss = measured[0] / count
    [gradient] = torch.autograd.grad(loss, now)

    trainer = SimpleNamespace(
        loss_type=kind, beta=weight, epsilon_low=BOUNDS["clip_low"],
        epsilon_high=BOUNDS["clip_high"], importance_sampling_level="token",
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=False,
        current_gradient_accumulation_steps=1, aux_loss_enabled=False, _entropy_bonus_enabled=False,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        model=SimpleNamespace(training=True), _metrics={"train": collections.defaultdict(list)},
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x
        ),
        _get_per_token_logps_and_entropies=lambda *_, **__: (now, torch.zeros(6, 9), None),
    )  # fmt: skip
    nothing = torch.zeros(6, 0, dtype=torch.int64)
    inputs = {
        "prompt_ids": nothing, "prompt_mask": nothing, "completion_ids": mask.long(),
        "completion_mask": mask.long(), "advantages": advantages, "old_per_token_logps": old,
        "ref_per_token_logps": first, "num_items_in_batch": torch.tensor(count),
    }  # fmt: skip
    expected = trl.GRPOTrainer._compute_loss(trainer, None, inputs)
    [of_expected] = torch.autograd.grad(expected, now)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(gradient, of_expected, rtol=1e-5, atol=1e-8)
    named = dict(zip(script.MEASURED, (measured / count).tolist()))
    seen = {name: value[0] for name, value in trainer._metrics["train"].items()}
    assert seen["clip_ratio/low_mean"] > 0.02 and seen["clip_ratio/high_mean"] > 0.02
    assert named["clip_fraction"] == pytest.approx(seen["clip_ratio/region_mean"])
    if weight:
        assert named["reference_kl"] == pytest.approx(seen["kl"], rel=1e-5)


@pytest.mark.parametrize("mode", ["plain", "packed", "bf16", "experts", "recomputed"])
def test_the_ratio_is_exactly_1_at_first(seen, mode):
    check_ratio(seen[mode])


def check_ratio(seen: dict) -> None:
    for step in seen["steps"]:
        assert {ratio for of_rank in step["ratios"] for ratio in of_rank} == {1.0}
        assert step["measured"]["policy_kl"] == step["measured"]["clip_fraction"] == 0


@pytest.mark.parametrize("mode", ["inner", "bf16 inner"])
def test_the_ratio_is_another_one_in_the_second_inner_step(seen, mode):
    first, second, third, _ = seen[mode]["steps"]
    for step in (first, third):
        assert {ratio for of_rank in step["ratios"] for ratio in of_rank} == {1.0}
        assert step["measured"]["policy_kl"] == step["measured"]["clip_fraction"] == 0
    assert second["measured"]["policy_kl"] > 1e-3 and second["measured"]["clip_fraction"] > 0.01
    logged = seen[mode]["measured"][0]["policy_kl"]
    assert logged == pytest.approx(second["measured"]["policy_kl"])


def test_the_gap_between_sampling_and_training_is_of_roundings(seen):
    assert 0 < seen["plain"]["measured"][0]["sampling_gap"] < 1e-5
    # In so small a model bf16 rounds the order of sums away.
    assert seen["bf16"]["measured"][0]["sampling_gap"] < 0.1


# --- Ranks that sample ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_communicated_while_ranks_sample(seen, mode):
    """Each FSDP unit is all-gathered once before, and all are in shards again after it."""
    of_ranks = seen[mode]["sampling"]
    calls = 4 if mode == "one at a time" else 3  # two for three prompts of the validation
    assert len(of_ranks) == 2 and all(len(sampled) == calls for sampled in of_ranks)
    units = 4  # the root, the embedding, two blocks
    for sampled in [each for of_rank in of_ranks for each in of_rank]:
        assert sampled["kinds"] == ([] if mode == "replicas" else ["all-gather"])
        gathers, inside, after = sampled["collectives"]
        assert gathers == (0 if mode == "replicas" else units)  # a replica has all parameters
        assert (inside, after) == (0, 0)
        for name in ("in shards", "local", "unsharded bytes"):
            assert sampled["after"][name] == sampled["before"][name]
        assert sampled["after"]["in shards"] == [True] * units
        assert sampled["after"]["unsharded bytes"] == 0
        root, *others = sampled["after"]["reshard"]
        assert root is False and others == [mode != "kept"] * 3
        packed = "batching" in MODES[mode]
        assert sampled["attention"] == ("documents" if packed else "sdpa")
        assert sampled["training"] is False


def test_a_rank_with_long_answers_does_not_hang_the_other(seen):
    """The first rank's answers end after one token, the second's after 64."""
    of_step = seen["uneven"]["answers"][1]
    lengths = [[len(tokens) for _, tokens, *_ in group] for group in of_step]
    assert lengths == [[1] * 4, [64] * 4] * 2
    assert all(math.isfinite(step["measured"]["loss"]) for step in seen["uneven"]["steps"])


EXACT = ["packed", "kept", "replicas", "offload", "recomputed", "reduced once", "padded"]


def check_same(got: dict, expected: dict) -> None:
    """Answers, rewards, losses and norms. A validation may sample its prompts in several calls."""
    groups, as_groups = (sum(seen["answers"], []) for seen in (got, expected))
    for group, as_group in zip(groups, as_groups, strict=True):
        for answer, as_answer in zip(group, as_group, strict=True):
            assert answer[:2] == as_answer[:2] and answer[3] == as_answer[3]
            assert answer[2] == pytest.approx(as_answer[2], abs=2e-5)
    for one, other in zip(got["steps"], expected["steps"], strict=True):
        assert one["measured"]["loss"] == pytest.approx(other["measured"]["loss"], abs=1e-5)
    for one, other in zip(got["measured"], expected["measured"], strict=True):
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("mode", [*EXACT, "one at a time"])
def test_fp32_modes_give_the_same_answers_and_losses(seen, mode):
    check_same(seen[mode], seen["plain"])


def test_bf16_and_experts_give_finite_numbers(seen):
    for mode in ("bf16", "bf16 inner", "experts"):
        for measured in seen[mode]["measured"]:
            assert all(math.isfinite(value) for value in measured.values())
    first, exact = seen["bf16"]["measured"][0], seen["plain"]["measured"][0]
    assert abs(first["entropy"] - exact["entropy"]) < 0.5


def test_prompts_and_random_numbers_do_not_depend_on_the_ranks(seen, alone):
    one, two = alone["plain"], seen["plain"]
    assert one["chosen"] == two["chosen"] and one["draws"] == two["draws"]
    assert len(one["draws"]) > 4
    of_a_prompt = [draws for each in one["draws"].values() for draws in each]
    assert len({json.dumps(draws) for draws in of_a_prompt}) == len(of_a_prompt)
    assert one["validation"] == two["validation"]
    for answers, others in zip(one["answers"][:2], two["answers"][:2]):
        for group, as_group in zip(answers, others, strict=True):
            for answer, as_answer in zip(group, as_group, strict=True):
                assert answer[:2] == as_answer[:2] and answer[3] == as_answer[3]
    losses = [[step["measured"]["loss"] for step in each["steps"]] for each in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


# --- Sampling -------------------------------------------------------------------------------------


def sampler(model):
    """Return a model of transformers with the script's forward, as ranks sample with it."""
    sampling = copy.deepcopy(model)
    sampling.forward = partial(script.forward_with_log_probs, sampling, script.chunk_log_probs)
    sampling.set_attn_implementation("sdpa" if sampling._supports_sdpa else "eager")
    return sampling.eval()


@torch.no_grad()
def one_alone(model, prompt: np.ndarray, draws: np.ndarray, end: int) -> tuple[list, list]:
    """Sample an answer by inverting the distribution function, without cache, batch and padding."""
    ids, log_probs = prompt.tolist(), []
    for draw in draws.tolist():
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        probabilities = logits.double().softmax(-1).tolist()
        # Not `sum`, which rounds once from Python 3.12 on, and so can exceed the last of these.
        reached = list(itertools.accumulate(probabilities))
        token = bisect.bisect_right(reached, draw * reached[-1])
        ids.append(token)
        log_probs.append(math.log(probabilities[token]))
        if token == end:
            break
    return ids[len(prompt) :], log_probs


@torch.no_grad()
def sample(model, prompts: list, draws: np.ndarray, end: int) -> list:
    return script.sample(sampler(model), prompts, draws, [end], CPU)


def check_sampling(model, vocabulary: int = 256, end: int = 7) -> list:
    """Check answers to prompts of different lengths against each answer alone; returns them."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, vocabulary, n).astype(np.uint32) for n in (3, 19, 8, 1)]
    draws = rng.random((12, 20))
    draws[4, 2] = draws[9, 0] = np.nextafter(1, 0)  # the last token, whatever its probability
    made = sample(model, prompts, draws, end)
    for number, (tokens, log_probs) in enumerate(made):
        expected, of_expected = one_alone(model, prompts[number // 3], draws[number], end)
        assert tokens.tolist() == expected, number
        assert tokens.dtype == np.uint32 and log_probs.dtype == np.float32
        assert log_probs.tolist() == pytest.approx(of_expected, abs=2e-5)
    for number in (1, 5):  # whatever is sampled beside it
        [(tokens, log_probs)] = sample(model, [prompts[number // 3]], draws[[number]], end)
        assert tokens.tolist() == made[number][0].tolist()
        assert log_probs.tolist() == pytest.approx(made[number][1].tolist(), abs=1e-5)
    return made


def tiny_vocabulary():
    torch.manual_seed(0)
    shape = small_shape(vocab_size=8, initializer_range=0.2, tie_word_embeddings=False)
    return Qwen2ForCausalLM(shape).eval()


def test_tokens_are_those_that_the_draws_ask_for():
    lengths = {len(tokens) for tokens, _ in check_sampling(tiny_vocabulary(), 8)}
    assert 1 in lengths and max(lengths) > 10 and len(lengths) > 4
    torch.manual_seed(1)
    check_sampling(Qwen2ForCausalLM(small_shape(initializer_range=0.3)).eval())


@pytest.mark.parametrize("name", ["qwen2", "mistral with a window"])
def test_answers_have_the_bits_of_a_cache_that_copies(monkeypatch, name):
    """Also while answers end, several of them at once, and others take their places."""
    for folder in ("bench", "tools"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    import sampling

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320}
    config = {
        "qwen2": small_shape(initializer_range=0.1),
        "mistral with a window": MistralConfig(**sizes, sliding_window=6, initializer_range=0.3),
    }[name]
    model = sampler(AutoModelForCausalLM.from_config(config))
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 256, n).astype(np.uint32) for n in (3, 19, 8, 1)]
    draws, ends = rng.random((48, 40)), [*range(0, 320, 16)]
    with torch.no_grad():
        made = script.sample(model, prompts, draws, ends, CPU)
        expected = sampling.sample_by_copying(model, prompts, draws, ends)
    assert len({len(tokens) for tokens, _ in made}) > 10
    for (tokens, log_probs), (as_tokens, as_log_probs) in zip(made, expected, strict=True):
        assert tokens.tolist() == as_tokens.tolist()
        assert log_probs.tolist() == as_log_probs.tolist()


def test_experts_and_windows_sample_as_they_compute():
    torch.manual_seed(0)
    check_sampling(MiniMaxM2ForCausalLM(small_mixture(initializer_range=0.3)).eval())
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320}
    config = MistralConfig(**sizes, sliding_window=6, initializer_range=0.3)
    model = AutoModelForCausalLM.from_config(config).eval()
    made = check_sampling(model)
    model.config.sliding_window = 64  # the window makes a difference
    assert any(a[0].tolist() != b[0].tolist() for a, b in zip(made, check_sampling(model)))


def test_positions_are_counted_without_padding():
    """For a model that learned positions. Rotary ones depend on differences only."""
    torch.manual_seed(0)
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=320, initializer_range=0.3)
    check_sampling(AutoModelForCausalLM.from_config(config).eval())


@pytest.mark.drill
@pytest.mark.parametrize("name", share(sorted(PACKED_TYPES.split())))
def test_a_type_samples_as_in_plain_transformers(name):
    from small_models import plain_model

    check_sampling(plain_model(name).eval())


def test_the_distribution_of_samples_is_the_models():
    """Sample 30,000 answers to each of two prompts of different lengths in one call.

    The test is chi-square on first and second token, against the exact probabilities.
    """
    model, end, number = tiny_vocabulary(), 2, 30_000
    prompts = [np.array([1, 5, 3, 3, 0], np.uint32), np.array([6, 4], np.uint32)]
    draws = np.random.default_rng(0).random((2 * number, 2))
    made = sample(model, prompts, draws, end)
    for prompt, answers in zip(prompts, (made[:number], made[number:])):
        ids = torch.tensor(prompt.astype(np.int64))
        rows = torch.cat([ids.expand(8, -1), torch.arange(8)[:, None]], 1)
        with torch.no_grad():
            logits = model(input_ids=rows, use_cache=False).logits.double()
        first = logits[0, -2].softmax(-1)
        expected = first[:, None] * logits[:, -1].softmax(-1) * number
        expected[end] = 0
        expected[end, 0] = first[end] * number  # it has no second token
        seen = torch.zeros(8, 8, dtype=torch.float64)
        for tokens, _ in answers:
            seen[tokens[0], tokens[1] if len(tokens) > 1 else 0] += 1
        cells = expected > 0
        assert seen[~cells].sum() == 0 and expected[cells].min() > 5
        degrees = int(cells.sum()) - 1
        square = ((seen - expected)[cells] ** 2 / expected[cells]).sum().item()
        assert abs(square - degrees) < 4 * math.sqrt(2 * degrees), (square, degrees)
        off = (seen - expected).abs().sum() / 2 / number  # total variation
        assert off < 0.02


def test_a_type_that_would_sample_wrongly_is_refused(reinforce, tmp_path):
    BartConfig(vocab_size=320).save_pretrained(tmp_path)
    done = reinforce(ranks=0, model=tmp_path)
    assert done.returncode == 2
    assert done.stderr == f"error: --model {tmp_path}: type bart cannot sample here\n"


def test_what_is_kept_of_a_token_is_what_the_page_says(monkeypatch):
    """Compare keys and values as `sample` keeps them, in bf16, with the formula of the table."""
    for folder in ("bench", "tools"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    import strategies

    torch.manual_seed(0)
    shape = small_shape(num_hidden_layers=3, num_key_value_heads=2)
    model = sampler(Qwen2ForCausalLM(shape).bfloat16())
    caches = []
    monkeypatch.setattr(script, "DynamicCache", lambda: caches.append(DynamicCache()) or caches[-1])
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, 6).astype(np.uint32) for _ in range(2)]
    with torch.no_grad():
        script.sample(model, prompts, rng.random((6, 5)), end_ids=[-1], device=CPU)
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in caches[0].layers)
    tokens = 6 * (6 + 64)  # there is room for 64 more at a time
    assert kept == tokens * strategies.bytes_of_cached_token(shape)


# --- The whole script -----------------------------------------------------------------------------

GRADED = "import zlib\nreturn zlib.crc32((prompt + answer).encode()) % 8 / 7"
SHORT = "return 1 / (1 + len(answer))"
RUN = {"steps": 4, "eval_every": 2, "checkpoint_every": 2, "warmup_steps": 1, "learning_rate": 1e-2}
RUN |= {"min_learning_rate": 1e-3, "timeout_minutes": 1.0, "reference_weight": 0.1}


def with_reward(folder: Path, body: str) -> Path:
    """Copy the script with another body of `reward`, the one thing that a user edits."""
    folder.mkdir(exist_ok=True)
    text = (ROOT / "fsdp2_grpo.py").read_text()
    own = textwrap.indent(body, "    ")
    function = re.compile(r"(def reward\(.*?\) -> float:\n).*?(?=\n\n\n)", re.DOTALL)
    copy, count = function.subn(lambda found: found[1] + own, text)
    assert count == 1
    path = folder / "fsdp2_grpo.py"
    path.write_text(copy)
    return path


@pytest.fixture(scope="module")
def taught(teacher) -> dict:
    """Return flags of a teacher beside the reward, and flags without one."""
    return {"teacher": teacher, "teacher_weight": 0.05}


UNTAUGHT = {"teacher": None, "teacher_weight": None}


@pytest.fixture
def reinforce(flags, taught, tmp_path, monkeypatch):
    """Return a function that launches the script with a reward, and writes to tmp_path/run."""

    def run(body: str = GRADED, faults: list | None = None, ranks: int = 2, **own):
        monkeypatch.setenv("COPIED", str(with_reward(tmp_path / "copy", body)))
        given = flags | RUN | taught | {"run_dir": tmp_path / "run", "model": None} | own
        given = {name: value for name, value in given.items() if value is not None}
        del given["tokenizer"]
        return launch(ranks, "copied", given, faults)

    return run


TIMINGS = ["data_seconds", "sample_seconds", "step_seconds", "tokens_per_second"]


def lines(run_dir: Path) -> list[dict]:
    """Read metrics.jsonl without what depends on the clock."""
    read = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: x for name, x in line.items() if name not in TIMINGS} for line in read]


@pytest.fixture(scope="module")
def finished(flags, taught, tmp_path_factory) -> Path:
    """Return a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COPIED", str(with_reward(folder / "copy", GRADED)))
        done = launch(2, "copied", flags | RUN | taught | {"run_dir": folder / "run"})
    assert (done.returncode, done.stderr) == (0, "")
    return folder / "run"


def test_metrics_are_those_of_the_interface(finished):
    every = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    validation = [line for line in every if "validation_reward" in line]
    training = [line for line in every if "loss" in line]
    assert [line["step"] for line in validation] == [0, 2, 4]
    assert all(line.keys() == {"step", "validation_reward", "validation_kl"} for line in validation)
    assert [line["step"] for line in training] == [1, 2, 3, 4]
    names = """step loss learning_rate grad_norm tokens padding_fraction tokens_per_second mfu
        step_seconds sample_seconds peak_memory_gib reward answer_length truncated entropy policy_kl
        clip_fraction""".split()
    for line in training:
        assert set(names) <= line.keys()
        assert line["sample_seconds"] < line["step_seconds"]
        assert 0 <= line["reward"] <= 1 and 0 <= line["truncated"] <= 1
    tokens = np.diff([0] + [line["tokens"] for line in training])
    assert tokens.tolist() == [round(16 * line["answer_length"]) for line in training]


def test_a_teacher_alone_needs_no_reward(reinforce, tmp_path):
    """Nor several answers to a prompt. The divergence falls, also on held-out prompts."""
    own = {"answers": 1, "prompts": 64, "steps": 30, "eval_every": 30, "teacher_weight": None}
    own |= {"learning_rate": 1e-2, "reference_weight": 0.0, "eval_answers": 64}
    done = reinforce("raise ValueError('called')", ranks=1, **own)
    assert (done.returncode, done.stderr) == (0, "")
    assert "step 0: validation kl " in done.stdout and "teacher_kl " in done.stdout
    assert "no gradient" not in done.stdout
    every = lines(tmp_path / "run")
    training = [line for line in every if "loss" in line]
    assert not {"reward", "mixed", "validation_reward"} & set().union(*map(dict.keys, every))
    # In the first inner step, the loss is the divergence.
    assert all(line["loss"] == pytest.approx(line["teacher_kl"], rel=1e-5) for line in training)
    first, last = (line["validation_kl"] for line in every if "loss" not in line)
    assert last < 0.85 * first, (first, last)


def test_resume_with_another_teacher_at_the_same_path_is_refused(reinforce, finished, teacher):
    before, path = tree(finished), Path(teacher, "model.safetensors")
    weights = path.read_bytes()
    path.write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    done = reinforce(run_dir=finished)
    path.write_bytes(weights)
    assert done.codes[0] == 2 and "Traceback" not in done.stderr
    assert re.search("was written with teacher_hash [0-9a-f]{32} .now [0-9a-f]{32}.;", done.stderr)
    assert tree(finished) == before


def test_a_teacher_that_cannot_be_one_is_refused(reinforce, flags, start, tokenizer, tmp_path):
    """In one line, before a step: other ids, fewer ids than the model has, no weights."""
    ids, few = tmp_path / "ids", tmp_path / "few"
    for folder in (ids, few):
        shutil.copytree(start, folder)
    described = json.loads((ids / "tokenizer.json").read_text())
    vocabulary = described["model"]["vocab"]
    (one, first), (two, second), *_ = vocabulary.items()
    vocabulary |= {one: second, two: first}
    (ids / "tokenizer.json").write_text(json.dumps(described))
    done = reinforce(ranks=0, teacher=ids)
    said = f"error: --teacher {ids} has another tokenizer than the model\n"
    assert (done.returncode, done.stderr) == (2, said)
    assert not (tmp_path / "run").exists()
    with pytest.raises(common.Refusal, match=r"^--teacher none has no \*.safetensors here"):
        script.find_teacher(script.Config(teacher="none"), tokenizer)
    shape = json.loads((few / "config.json").read_text())
    (few / "config.json").write_text(json.dumps(shape | {"vocab_size": 300}))
    config = script.Config(**flags | {"teacher": str(few)})
    script.find_teacher(config, tokenizer)  # the tokenizer is the same
    run = SimpleNamespace(config=config, model_config=SimpleNamespace(vocab_size=320))
    with pytest.raises(common.Refusal, match="has 320 ids, --model .*few only 300"):
        script.load_frozen(config.teacher, run)


def check_resumed(stopped, resumed, run_dir: Path, finished: Path, step: int) -> None:
    """Check that a run which stopped after `step` and was resumed has the bits of `finished`."""
    assert (stopped.returncode, stopped.stderr) == (0, "")
    last = stopped.stdout.splitlines()[-1]
    assert last.startswith(f"stopped after step {step}, "), stopped.stdout
    assert (resumed.returncode, resumed.stderr) == (0, "")
    assert ("resuming from" in resumed.stdout) == (step > 0)
    assert lines(run_dir) == lines(finished)
    weights = [run / "hf/model.safetensors" for run in (run_dir, finished)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.parametrize(
    "rank, number, step",
    [(0, 1, 0), (1, 6, 2), (1, 7, 3)],
    ids=["first validation", "later validation", "step 3"],
)
def test_a_signal_while_ranks_sample_loses_nothing(
    reinforce, finished, tmp_path, rank, number, step
):
    """A validation is cut off, a step is finished. The resumed run has the same reference model."""
    fault = {"call": "common.Sequences.read", "do": "terminate", "rank": rank, "number": number}
    check_resumed(reinforce(faults=[fault]), reinforce(), tmp_path / "run", finished, step)
    distances = [line["reference_kl"] for line in lines(finished) if "loss" in line]
    assert distances[0] == 0 and all(distance > 0 for distance in distances[1:])


# Grades with a program, which a signal to all processes of the rank kills: then the grade is 0.
INTERRUPTED = """import os, pathlib, signal, zlib
reward.calls = getattr(reward, "calls", 0) + 1
once = pathlib.Path(__file__).with_name("once")
if os.environ["RANK"] == "1" and reward.calls == {call} and not once.exists():
    once.touch()
    os.kill(os.getpid(), signal.SIGTERM)
    return 0.0
return zlib.crc32((prompt + answer).encode()) % 8 / 7"""


@pytest.mark.parametrize("call", [1, 19])
def test_answers_are_judged_again_after_a_signal(reinforce, finished, tmp_path, call):
    """Rewards that a signal made wrong are neither trained on nor logged as a validation."""
    stopped, resumed = (reinforce(INTERRUPTED.replace("{call}", str(call))) for _ in range(2))
    step = int(re.search("stopped after step ([0-9]+)", stopped.stdout)[1])
    assert (step == 0) == (call == 1)  # the first call is in the first validation
    check_resumed(stopped, resumed, tmp_path / "run", finished, step)


# What a grader that runs code may do. As GRADED otherwise.
BUSY = """import multiprocessing, os, random, zlib
with multiprocessing.get_context("fork").Pool(1) as pool:
    assert pool.apply(len, (answer,)) == len(answer)
os.chdir("/")
random.seed(0), np.random.seed(0), torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
torch.set_grad_enabled(False)
return zlib.crc32((prompt + answer).encode()) % 8 / 7"""


def test_what_a_reward_does_to_the_process_changes_nothing(reinforce, finished, tmp_path):
    """Also not where a relative --run_dir leads."""
    done = reinforce(BUSY, run_dir=os.path.relpath(tmp_path / "run", ROOT))
    assert (done.returncode, done.stderr) == (0, "")
    assert lines(tmp_path / "run") == lines(finished)


# A child that ignores a signal would keep the run from ending, and `Pool` from closing.
FORKS = """import multiprocessing, signal, time
context = multiprocessing.get_context("fork")
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    runs = context.Event()
    child = context.Process(target=lambda: (runs.set(), time.sleep(300)))
    child.start()
    runs.wait()
    os.kill(child.pid, number)
    child.join(60)
    code = child.exitcode
    child.kill()
    if code != -number:
        raise ValueError(f"signal {number} does not end a child")
return 0.5"""


def test_children_of_a_reward_die_of_the_signals_that_stop_a_run(reinforce):
    done = reinforce(FORKS, ranks=1, steps=1, prompts=1, answers=2, eval_prompts=1, eval_answers=1)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.drill
def test_a_slow_reward_ends_in_one_line(reinforce):
    """It says which rank the others waited for, and which flag to raise."""
    body = """import os, time
if os.environ["RANK"] == "1" and not hasattr(reward, "slept"):
    reward.slept = True
    time.sleep(9)
return 0.5"""
    done = reinforce(body, timeout_minutes=0.05)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("rank ")]
    assert line.startswith("rank 0 lost another rank, or waited for it longer than --timeout_min")
    assert "Rank 1 failed to pass" in line


@pytest.mark.drill
def test_rewards_rise_where_they_can(reinforce, tmp_path):
    """With a reward for short answers, answers become short."""
    own = {"steps": 10, "eval_every": 10, "checkpoint_every": 10, "answers": 8}
    own |= {"answer_length": 32, "reference_weight": 0.0}
    done = reinforce(SHORT, **own | UNTAUGHT)
    assert (done.returncode, done.stderr) == (0, "")
    rewards = [line["reward"] for line in lines(tmp_path / "run") if "reward" in line]
    assert np.mean(rewards[-3:]) > rewards[0] + 0.2, rewards
    held_out = [x["validation_reward"] for x in lines(tmp_path / "run") if "validation_reward" in x]
    assert len(held_out) == 2 and held_out[1] > held_out[0] + 0.1, held_out


def test_resume_with_other_prompts_is_refused(reinforce, finished):
    """Or with other answers, because the resumed run would sample something else."""
    before = tree(finished)
    done = reinforce(run_dir=finished, prompts=8, answers=2, answer_length=8)
    assert done.codes[0] == 2 and "Traceback" not in done.stderr
    changed = "was written with prompts 4 (now 8), answers 4 (now 2), answer_length 16 (now 8)"
    assert changed in done.stderr
    assert tree(finished) == before


@pytest.mark.drill
def test_resume_with_another_reference_is_refused(reinforce, start, tmp_path):
    """Other weights, or another weight in the loss."""
    reinforce(steps=2)
    done = reinforce(reference_weight=0)
    assert done.codes[0] == 2 and "reference_weight 0.1 (now 0.0)" in done.stderr
    shutil.copytree(start, tmp_path / "weights")
    done = reinforce(init_from=tmp_path / "weights")
    assert done.codes[0] == 2 and f"init_from {start} (now {tmp_path / 'weights'})" in done.stderr


def test_the_exported_model_talks_in_plain_transformers(finished):
    """It generates answers that end; log-probabilities are those of the script."""
    tokenizer = AutoTokenizer.from_pretrained(finished / "hf")
    model = AutoModelForCausalLM.from_pretrained(finished / "hf")
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What?"}], add_generation_prompt=True,
        return_dict=True, return_tensors="pt",
    )  # fmt: skip
    torch.manual_seed(0)
    many = {name: tensor.expand(32, -1) for name, tensor in asked.items()}
    made = model.generate(
        **many, max_new_tokens=40, do_sample=True, top_k=0, pad_token_id=tokenizer.pad_token_id
    )[:, asked["input_ids"].shape[1] :]
    ended = (made == tokenizer.convert_tokens_to_ids("<|im_end|>")).any(1)
    assert ended.float().mean() > 0.5
    prompt = asked["input_ids"][0].numpy().astype(np.uint32)
    draws = np.random.default_rng(0).random((4, 12))
    for tokens, log_probs in sample(model, [prompt], draws, tokenizer.eos_token_id):
        with torch.no_grad():
            expected = log_probs_of(model, prompt.tolist(), tokens.tolist())
        assert log_probs.tolist() == pytest.approx(expected.tolist(), abs=1e-5)


# --- Rewards --------------------------------------------------------------------------------------


def test_what_a_reward_is_given(tokenizer, monkeypatch):
    """The prompt as the template writes it; answer and reference without the end of the turn."""
    seen = []
    monkeypatch.setattr(script, "reward", lambda *texts: seen.append(texts) or 1)
    prompt, reference = split({"system": "s", "prompt": "p", "completion": "the best"}, tokenizer)
    tokens = np.array([*"né".encode(), tokenizer.eos_token_id], np.uint32)
    log_probs = np.zeros(len(tokens), np.float32)
    ends = SimpleNamespace(eos_token_id=[tokenizer.eos_token_id])
    config = script.Config()
    run = SimpleNamespace(config=config, tokenizer=tokenizer, model_config=ends)
    judged = script.judge(run, script.Answer(prompt, reference, tokens, log_probs))
    text = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\np<|im_end|>\n"
    assert seen == [(text + "<|im_start|>assistant\n", "né", "the best")]
    assert judged.reward == 1 and isinstance(judged.reward, float)
    unended = script.Answer(prompt, reference, tokens[:-1], log_probs[:-1])
    assert script.judge(run, unended).reward == 0 and len(seen) == 1


def refusal(monkeypatch, reward: Callable) -> str:
    """Return the line with which a reward ends the run."""
    monkeypatch.setattr(script, "reward", reward)
    with pytest.raises(common.Refusal) as refused:
        script.checked_reward("", "", "")
    return str(refused.value)


@pytest.mark.parametrize(
    "value, shown",
    [
        (math.nan, "nan"), (math.inf, "inf"), (-0.5, "-0.5"), ("0.5", "'0.5'"), (None, "None"),
        ([1.0], "[1.0]"), (np.float32("nan"), "np.float32(nan)"), (1j, "1j"),
        ("x" * 10_000, "'" + "x" * 79), (torch.tensor(1.0), "tensor(1.)"),
        (1e39, "1e+39"), (10**400, "1" + "0" * 79),
    ],
)  # fmt: skip
def test_a_reward_is_a_finite_number(monkeypatch, value, shown):
    said = refusal(monkeypatch, lambda *_: value)
    assert said == f"reward() has to return a number, 0 or more, not {shown}"


@pytest.mark.parametrize(
    "value", [True, 0, 2, 3.5, np.float32(0.5), np.int64(4), np.bool_(True), np.bool_(False)]
)
def test_any_kind_of_number_is_a_reward(monkeypatch, value):
    monkeypatch.setattr(script, "reward", lambda *_: value)
    checked = script.checked_reward("", "", "")
    assert checked == value and type(checked) is float


def test_a_reward_that_calls_exit_fails(monkeypatch):
    """Code that a model has written may do so, and would end the run as if all were well."""
    monkeypatch.setattr(script, "reward", lambda *_: exit(0))
    with pytest.raises(RuntimeError, match="calls exit"):
        script.checked_reward("", "", "")


ON_RANK_1 = (
    "import os\nif os.environ['RANK'] == '1':\n    raise ValueError('on purpose')\nreturn 0.5"
)
BAD_REWARDS = {  # body -> the error, and the line of the body that raises it
    "raises on one rank": (ON_RANK_1, "ValueError: on purpose", 2),
    "has words of torch": (
        "raise ConnectionError('Connection refused')",
        "ConnectionError: Connection refused",
        0,
    ),
}


@pytest.mark.parametrize("name", BAD_REWARDS)
def test_a_bad_reward_ends_the_run_with_its_traceback(reinforce, tmp_path, name):
    """On one rank or on all. The last one calls a service that is not there."""
    body, expected, line = BAD_REWARDS[name]
    done = reinforce(body, eval_prompts=3, eval_answers=8)
    assert done.returncode == 1
    copy = tmp_path / "copy/fsdp2_grpo.py"
    line += 1 + copy.read_text().partition(textwrap.indent(body, "    "))[0].count("\n")
    assert f'File "{copy}", line {line}, in reward\n' in done.stderr
    ranks = 1 if name == "raises on one rank" else 2
    assert 1 <= done.stderr.count(f"\n{expected}\n") <= ranks, done.stderr
    assert "error: " not in done.stderr and "lost another rank" not in done.stderr


@pytest.mark.drill
def test_a_bad_reward_of_one_rank_under_torchrun(flags, tmp_path):
    """In a copy of the script beside the shared files, as a user has it."""
    path = with_reward(tmp_path / "copy", ON_RANK_1)
    for name in ("common.py", "model.py", "run.py", "conversations.py"):
        (path.parent / name).write_text((ROOT / name).read_text())
    done = torchrun(2, str(path), *arguments(flags | RUN | {"run_dir": tmp_path / "run"}))
    assert done.returncode == 1
    said, summary = done.stderr.split("Root Cause")
    for text in (said, summary):
        assert text.count("ValueError: on purpose\n") == 1 and f'"{path}", line' in text


def test_equal_rewards_are_said_and_trained_on(reinforce, tmp_path):
    done = reinforce("return 0", steps=2, grad_clip=1.0, reference_weight=0.0, **UNTAUGHT)
    assert (done.returncode, done.stderr) == (0, "")
    said = [line for line in done.stdout.splitlines() if "no gradient" in line]
    assert [line.split(":")[0] for line in said] == ["step 1", "step 2"]
    training = [line for line in lines(tmp_path / "run") if "loss" in line]
    assert [(x["loss"], x["grad_norm"], x["mixed"]) for x in training] == [(0, 0, 0)] * 2
    names = set().union(*map(dict.keys, lines(tmp_path / "run")))
    assert {"validation_reward", "reference_kl"} <= names
    assert not {"validation_kl", "teacher_kl"} & names  # without a teacher


@pytest.mark.usefixtures("one_rank")
def test_equal_rewards_of_any_size_are_equal(monkeypatch, tokenizer):
    """In floating point, the mean of three times 0.1 is not 0.1."""
    one = np.array([tokenizer.eos_token_id], np.uint32)
    group = [script.Answer(one, one, one, np.zeros(1, np.float32), 0.1)] * 3
    monkeypatch.setattr(script, "answer_prompts", lambda *_: [group, group])
    ends = SimpleNamespace(eos_token_id=[tokenizer.eos_token_id])
    config = script.Config(prompts=2, answers=3)
    run = SimpleNamespace(
        config=config, tokenizer=tokenizer, model_config=ends, rank=0, world_size=1
    )
    _, measured = script.roll_out(None, SimpleNamespace(lengths=np.ones(5)), 1, run)
    assert measured["mixed"] == 0


# --- Prompts --------------------------------------------------------------------------------------


def split(row: dict, tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of prompt and reference, the latter with the end of the turn."""
    tokens, in_reference, *_ = script.tokenize_prompt(row, tokenizer)
    assert tokens[-1] == tokenizer.eos_token_id
    return tokens[~in_reference], tokens[in_reference]


def test_prompts_alone_and_prompts_without_room(reinforce, tmp_path):
    """A prompt without an answer has no reference. One without room for an answer is left out."""
    rows = [{"prompt": f"number {n}"} for n in range(60)] + [{"prompt": None}] * 2
    rows += [{"prompt": "x" * (80 + n)} for n in range(3)] + [{"prompt": "y" * 200}] * 4
    body = "if reference:\n    raise ValueError(reference)\nreturn len(answer) % 3"
    dataset = write(tmp_path / "prompts.jsonl", rows)
    done = reinforce(body, dataset=dataset, steps=2)
    assert (done.returncode, done.stderr) == (0, "")
    assert "4 prompts left out, because of more than 112 tokens" in done.stdout
    assert "2 documents are left out, because they hold no prompt" in done.stdout


@pytest.mark.parametrize(
    "row",
    [
        {"messages": []},
        {"messages": None},
        {"prompt": []},
        {"messages": [{"role": "assistant", "content": "a"}]},
        {"system": "s", "completion": "a"},
    ],
    ids=str,
)
def test_an_answer_to_nothing_is_left_out(tokenizer, row):
    with pytest.raises(common.LeftOut, match="hold no prompt"):
        script.tokenize_prompt(row, tokenizer)


USER, ASSISTANT = ({"role": role, "content": role} for role in ("user", "assistant"))
FORMS = {  # a row -> the messages of its prompt, and its reference
    "the last answer is the reference": (
        {"messages": [USER, ASSISTANT, USER, ASSISTANT]},
        [USER, ASSISTANT, USER],
        "assistant",
    ),
    "a completion is the reference": (
        {"prompt": [USER, ASSISTANT, USER], "completion": "best"},
        [USER, ASSISTANT, USER],
        "best",
    ),
    "no reference": ({"prompt": [USER, ASSISTANT, USER]}, [USER, ASSISTANT, USER], ""),
    "messages that end with a question": ({"messages": [USER]}, [USER], ""),
    "a column answer": ({"prompt": "user", "answer": "best"}, [USER], "best"),
    "a number": ({"prompt": "user", "answer": 0}, [USER], "0"),
    "a solution and its result": (
        {"messages": [USER, ASSISTANT], "answer": "best"},
        [USER],
        "best",
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_prompt_and_reference_of_each_form(tokenizer, name):
    row, messages, reference = FORMS[name]
    asked, expected = split(row, tokenizer)
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(asked) == text
    assert tokenizer.decode(expected) == reference + "<|im_end|>"


def test_the_longest_prompt_has_room(tokenizer, tmp_path):
    """A prompt's length does not include its reference."""
    rows = [{"prompt": "x" * (50 + n), "completion": "y" * 500} for n in (0, 1)]
    length = len(split(rows[0], tokenizer)[0])
    config = script.Config(
        dataset=str(write(tmp_path / "rows.jsonl", rows)), max_length=length + 9, answer_length=9
    )
    documents = all_of(common.load_documents(config, COLUMNS, script.tokenize_prompt, tokenizer))
    kept = script.leave_out_long(documents, config)
    assert len(documents.lengths) == 2 and len(kept.lengths) == 1
    assert (kept.read(0)[0] == script.tokenize_prompt(rows[0], tokenizer)[0]).all()


def test_prompts_are_on_the_same_side_of_the_split_in_fine_tuning_and_rl(tokenizer, tmp_path):
    """All 8 answers to a prompt, whatever --max_length leaves out."""
    rows = []
    for number, answer in itertools.product(range(150), range(8)):
        asked = {"role": "user", "content": f"{number}" + "?" * (number % 90)}
        row = {"prompt": [asked], "completion": "!" * (1 + 30 * answer)}
        if number % 3 == 0:  # the prompt of the last answer has another answer in it
            turns = [asked, ASSISTANT | {"content": "!" * (1 + 20 * answer)}, USER, ASSISTANT]
            row = {"messages": turns}
        if number % 5 == 0:
            row = {"prompt": [asked]}  # fine-tuning leaves it out
        rows.append(row)
    dataset = str(write(tmp_path / "rows.jsonl", rows))
    config = script.Config(dataset=dataset, answer_length=8)
    tuning = common.load_documents(config, COLUMNS, fsdp2_sft.tokenize_conversation, tokenizer)
    learning = common.load_documents(config, COLUMNS, script.tokenize_prompt, tokenizer)
    splits = []
    for config.max_length in (80, 160, 512):
        parts = common.train_validation_split(tuning, math.inf)
        splits.append([conversations.truncate(part, config.max_length) for part in parts])
        parts = common.train_validation_split(learning, math.inf)
        splits.append([script.leave_out_long(part, config) for part in parts])
    trained, held_out = (
        {row // 8 for part in parts for row in part.index.document.tolist()}
        for parts in zip(*splits)
    )
    assert not trained & held_out
    assert len(trained) == 146 and len(held_out) == 4
    assert len({len(training.lengths) for training, _ in splits}) == 5  # some leave out others


def test_held_out_prompts_without_room_are_refused(reinforce, tokenizer, tmp_path):
    """What is held out is decided before, so they are not replaced by other prompts."""
    rows = [
        {"prompt": [USER | {"content": str(n)}, ASSISTANT, USER], "completion": "y"}
        for n in range(40)
    ]
    short = str(write(tmp_path / "short.jsonl", rows))
    documents = common.load_documents(
        script.Config(dataset=short), COLUMNS, script.tokenize_prompt, tokenizer
    )
    for row in common.train_validation_split(documents, math.inf)[1].index.document.tolist():
        rows[row]["prompt"][1] = ASSISTANT | {"content": "x" * 128}
    done = reinforce(ranks=0, dataset=write(tmp_path / "long.jsonl", rows), steps=0)
    line = "error: --max_length 128 leaves no prompt; use a larger one\n"
    assert (done.returncode, done.stderr) == (2, line)


ASKS = "{%- if add_generation_prompt -%}{{- '<|header|>assistant ' -}}{%- endif -%}"
ANSWERS = {  # ways in which templates write an answer, and what they mark of it, if anything
    "marked with its header": """{%- generation -%}
{{- '<|header|>assistant ' + m.content + '<|eot|>' -}}{%- endgeneration -%}""",
    "marked with what follows": """{{- '<|header|>assistant ' -}}
{%- generation -%}{{- m.content + '<|eot|>' + '\n' -}}{%- endgeneration -%}""",
    "marked without its end": """{{- '<|header|>assistant ' -}}
{%- generation -%}{{- m.content -}}{%- endgeneration -%}{{- '<|eot|>' -}}""",
    "not marked": "{{- '<|header|>assistant ' + m.content + '<|eot|>' -}}",
    "with a blank line": "{{- '<|header|>assistant ' + m.content + '\n' + '<|eot|>\n' -}}",
    "with an end of the text": """{{- '<|header|>assistant ' + m.content + '<|eot|>' -}}
{%- if loop.last and not add_generation_prompt -%}{{- eos_token -}}{%- endif -%}""",
}


def asking(answer: str, asks: str = ASKS) -> str:
    return (
        "{%- for m in messages -%}{%- if m.role == 'assistant' -%}" + answer + "{%- else -%}"
        "{{- '<|header|>' + m.role + ' ' + m.content + '<|eot|>' -}}"
        "{%- endif -%}{%- endfor -%}" + asks
    )  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_a_model_is_asked_with_its_own_template(tmp_path, name):
    """As hub models have them. The turn ends with the template's token."""
    template = asking(ANSWERS[name])
    made, turn_end = chat_tokenizer(save_template(tmp_path, template))
    assert made.chat_template == template and made.decode([turn_end]) == "<|eot|>"
    for completion in ("c", None):
        asked, expected = split({"prompt": "p", "completion": completion}, made)
        assert made.decode(asked) == "<|header|>user p<|eot|><|header|>assistant "
        assert made.decode(expected) == (completion or "") + "<|endoftext|>"


def test_of_several_templates_the_default_is_used(tmp_path):
    plain = asking(ANSWERS["not marked"])
    several = {"default": plain, "tools": "{{- no -}}"}
    made, _ = chat_tokenizer(save_template(tmp_path, several))
    assert made.chat_template == several and made.get_chat_template() == plain
    assert made.decode(split({"prompt": "p", "completion": None}, made)[0]).startswith("<|header|>")


def test_a_template_that_does_not_ask_is_refused(tmp_path):
    """The model would have to write the header of an answer, which it never learned."""
    template = asking(ANSWERS["not marked"], "")
    made, _ = chat_tokenizer(save_template(tmp_path, template))
    with pytest.raises(
        common.LeftOut, match="have a chat template that does not ask for an answer"
    ):
        script.tokenize_prompt({"prompt": "p", "completion": "c"}, made)


def test_a_model_without_a_template_is_refused():
    with pytest.raises(common.Refusal, match="bytes has no chat template: fine-tune"):
        chat_tokenizer("bytes")


# --- The model that is trained --------------------------------------------------------------------


def test_nothing_is_dropped_at_random(start):
    """In training neither, because it would not be the policy that sampled."""
    shape = small_shape(attention_dropout=0.5)
    model = script.build_policy(shape, script.Config(model=start, tokenizer=start))
    assert shape.attention_dropout == 0.5 and not any(m.training for m in model.modules())


def test_a_model_of_nan_ends_in_one_line(reinforce, start, tmp_path):
    """Not with an index that is out of range, which would be an assertion on a GPU."""
    model = AutoModelForCausalLM.from_pretrained(start)
    model.model.norm.weight.data.fill_(torch.nan)
    shutil.copytree(start, tmp_path / "nan")
    model.save_pretrained(tmp_path / "nan")
    done = reinforce(init_from=tmp_path / "nan", steps=1)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert len(errors) == 1 and "step 1: the loss (nan) or the gradient norm (nan)" in errors[0]


def test_a_gradient_that_is_not_finite_ends_the_run_before_the_update(reinforce, tmp_path):
    """Nothing of that step is logged or saved."""
    done = reinforce(
        "return 1e29 * (len(answer) % 3)", steps=4, checkpoint_every=1, reference_weight=0.0
    )
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert len(errors) == 1 and "the gradient norm (inf) is not finite" in errors[0]
    assert [line["step"] for line in lines(tmp_path / "run")] == [0]
    assert not [*(tmp_path / "run").glob("checkpoints/step_*")]


class Policy(torch.nn.Linear):
    """Stands in for a model under FSDP: its weights are the log-probabilities."""

    def forward(self) -> torch.Tensor:
        return self.weight.flatten()

    def ignore(self, *_: bool) -> None: ...

    set_requires_gradient_sync = set_requires_all_reduce = set_reshard_after_backward = ignore


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("losses, norms", [([1, math.nan], [1, 1]), ([1, 1], [1, math.inf])])
def test_values_that_are_not_finite_do_not_reach_the_weights(monkeypatch, losses, norms):
    """Also in an inner step after the first."""
    updates, losses, norms = [], iter(losses), iter(norms)

    def policy_loss(log_probs: torch.Tensor, *_, **__) -> torch.Tensor:
        return (next(losses) + 0 * log_probs.sum()).expand(len(script.MEASURED))

    def clip(*_) -> SimpleNamespace:
        norm = torch.tensor(float(next(norms)))
        return SimpleNamespace(full_tensor=lambda: norm)

    monkeypatch.setattr(script, "policy_loss", policy_loss)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
    optimizer = SimpleNamespace(
        param_groups=[], step=lambda: updates.append(1), zero_grad=lambda: None
    )
    batch = common.GlobalBatch([{"loss_arguments": {}}], 1, 1, 0, 0.0)
    config = script.Config(inner_steps=2, learning_rate=1e-3, min_learning_rate=0.0)
    with pytest.raises(common.Refusal, match="step 7: the loss .* is not finite"):
        script.train_step(Policy(2, 1), optimizer, batch, 7, config, CPU)
    assert len(updates) == 1


# --- Drills ---------------------------------------------------------------------------------------


@pytest.mark.drill
@pytest.mark.parametrize("rank, fault", [(0, "freeze"), (1, "sleep")])
def test_a_rank_that_stalls_while_sampling_ends_the_run_in_time(reinforce, tmp_path, rank, fault):
    """In step 3, with its answers begun, while the other rank waits for them."""
    fault = {"call": "common.Sequences.read", "rank": rank, "number": 8 - rank, "do": fault}
    done = reinforce(faults=[fault], timeout_minutes=0.1)
    assert done.codes[1 - rank] == 1
    [line] = [line for line in done.stderr.splitlines() if line.startswith("rank ")]
    assert "or waited for it longer than --timeout_minutes" in line
    assert re.search("6000 ?ms", line)
    assert [line["step"] for line in lines(tmp_path / "run") if "loss" in line] == [1, 2]


@pytest.mark.drill
def test_a_run_killed_again_and_again_repeats_its_answers(flags, teacher, tmp_path, monkeypatch):
    """At random moments and while a checkpoint is written, all its numbers keep their bits."""
    monkeypatch.setenv("COPIED", str(with_reward(tmp_path / "copy", GRADED)))
    own = flags | RUN | {"steps": 18, "prompts": 16, "answers": 8, "answer_length": 64}
    own |= {"learning_rate": 1e-3, "inner_steps": 2, "async_checkpoint": "true"}
    own |= {"teacher": teacher, "teacher_weight": 0.5}
    program = [sys.executable, str(ROOT / "tests/support/storm.py"), "copied"]
    for number, run_dir in ((0, tmp_path / "undisturbed"), (6, tmp_path / "storm")):
        words = [str(number), "1", *arguments(own | {"run_dir": run_dir})]
        done = subprocess.run([*program, *words], capture_output=True, text=True, timeout=HANGS)
        assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert sum("-9" in line for line in done.stdout.splitlines()) == 6, done.stdout
    assert lines(tmp_path / "storm") == lines(tmp_path / "undisturbed")
    weights = [tmp_path / run / "hf/model.safetensors" for run in ("storm", "undisturbed")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.drill
def test_compiled_sequences_of_many_lengths(flags, tmp_path):
    """The plain suite leaves this out, because it takes long."""
    modes = {mode: flags | MODES[mode] for mode in ("plain", "inner")}
    modes["compile"] = modes["plain"] | {"compile": True}
    modes["packed"] = modes["compile"] | {"batching": "packed"}
    modes["few"] = modes["inner"] | {"compile": True, "pad_to_multiple_of": 16}
    seen = launch_cases(2, "grpo_worker", tmp_path, modes, silent=True)
    for mode in ("compile", "packed"):
        check_same(seen[mode], seen["plain"])
        check_ratio(seen[mode])
    check_same(seen["few"], seen["inner"])


def test_a_child_that_a_reward_forks_ends_on_a_signal(reinforce):
    """The rank itself saves first. A child with the same handlers would go on forever."""
    fault = {"call": "run.Run.log_step", "do": "stop a child"}
    done = reinforce(faults=[fault], ranks=1, steps=1)
    assert (done.returncode, done.stderr) == (0, "")
