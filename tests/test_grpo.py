"""Reinforcement: the loss against the papers, sampling against the model, and the whole script."""

import collections
import copy
import json
import math
import re
import shutil
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, arguments, launch, small_mixture, small_shape, torchrun, tree
from test_sft import save_base
from test_types import plain_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    MiniMaxM2ForCausalLM,
    MistralConfig,
    Qwen2ForCausalLM,
)
from transformers.cache_utils import DynamicCache

import common
import fsdp2_grpo as script

CPU = torch.device("cpu")


# --- Inputs ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    return script.chat_tokenizer("bytes")[0]


def save_start(folder: Path, config, tokenizer) -> str:
    """Random weights that end an answer about every tenth token, and a chat tokenizer.

    A constant in each hidden state, which the head has for the end of a turn alone.
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
def experts(tokenizer, tmp_path_factory) -> str:
    config = small_mixture(tie_word_embeddings=False)
    return save_start(tmp_path_factory.mktemp("experts"), config, tokenizer)


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def questions(texts, tmp_path_factory) -> Path:
    """150 prompts of 1 to 60 bytes, with answers; three of them are held out."""
    rows = [
        {"prompt": f"{number}" + texts[number][: number % 40 * 3 // 2], "completion": f"{number}!"}
        for number in range(150)
    ]
    return write(tmp_path_factory.mktemp("questions") / "questions.jsonl", rows)


@pytest.fixture(scope="module")
def flags(start, questions) -> dict:
    """Micro-batches of a few answers each."""
    made = {"dataset": str(questions), "init_from": start, "model": start, "tokenizer": start}
    made |= {"max_length": 128, "answer_length": 16, "micro_batch_tokens": 160}
    made |= {"prompts": 4, "answers": 4, "eval_prompts": 3, "eval_answers": 2}
    return made | {"grad_clip": 0.0, "precision": "fp32"}


# --- The loss -------------------------------------------------------------------------------------


def log_probs_of(model, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Of an answer's tokens, by transformers' own forward of this row alone."""
    ids = torch.tensor([[*prompt, *tokens]])
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0, len(prompt) - 1 :]
    return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]


def oracle(start: str, weights: dict, old: dict, answers: list, own: dict) -> dict:
    """Loss and gradients of a step as the papers have them, in fp64, one row at a time.

    Args:
        weights, old: of the model now, and when it sampled.
        answers: groups of (prompt, tokens, log-probs, reward).
        own: clip_low, clip_high; reference_weight, where weights of `start` are the reference.
    """
    models = []
    for state in (weights, old, None):
        model = AutoModelForCausalLM.from_pretrained(start, attn_implementation="eager")
        if state is not None:
            model.load_state_dict(state)
        models.append(model.double())
    now, before, reference = models
    total, count, low, high, divergence, of_reference, entropy = 0.0, 0, 0, 0, 0.0, 0.0, 0.0
    for group in answers:
        mean = sum(reward for *_, reward in group) / len(group)
        for prompt, tokens, _, reward in group:
            advantage = reward - mean
            log_probs = log_probs_of(now, prompt, tokens)
            with torch.no_grad():
                old_log_probs = log_probs_of(before, prompt, tokens)
                reference_log_probs = log_probs_of(reference, prompt, tokens)
            for current, earlier, first in zip(log_probs, old_log_probs, reference_log_probs):
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
        "gradients": {name: p.grad for name, p in now.named_parameters()},
    }  # fmt: skip


BOUNDS = {"clip_low": 0.2, "clip_high": 0.28}


def check_step(start: str, seen: dict, number: int, first: int, step: int, own: dict) -> dict:
    """The optimizer step `number` of a mode, on the answers of `step`; the first one is `first`."""
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


# mode -> flags; all of two ranks.
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
    "compile": {"compile": True, "batching": "packed"},
    "recomputed": {"activation_checkpointing": "full"},
    "reduced": {"reduce_every_micro_batch": True},
    "padded": {"pad_to_multiple_of": 16},
    "one at a time": {"sample_prompts": 1},
    "uneven": {"answer_length": 64, "uneven": True},
    "experts": {},
}  # fmt: skip
ALONE = ["plain", "inner", "packed inner"]  # of one rank too


def watch(ranks: int, modes: dict, folder: Path) -> dict:
    out = folder / "seen.pt"
    done = launch(ranks, "grpo_worker", {"asked": json.dumps(modes), "out": out})
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return torch.load(out, weights_only=False)


@pytest.fixture(scope="module")
def seen(flags, experts, tmp_path_factory) -> dict:
    modes = {mode: flags | own for mode, own in MODES.items()}
    modes["experts"] |= dict.fromkeys(("init_from", "model", "tokenizer"), experts)
    return watch(2, modes, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def alone(flags, tmp_path_factory) -> dict:
    modes = {mode: flags | MODES[mode] for mode in ALONE}
    return watch(1, modes, tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize(
    "ranks, mode",
    [*((1, mode) for mode in ALONE), *((2, mode) for mode in [*ALONE, "packed"])],
)
def test_loss_and_gradients_are_those_of_the_papers(request, start, ranks, mode):
    """Of the first and of a second inner step; over several micro-batches of unlike lengths."""
    every = request.getfixturevalue("seen" if ranks == 2 else "alone")
    seen = every[mode]
    assert seen["steps"][0]["micro_batches"] >= 3
    lengths = {len(tokens) for group in seen["answers"][1] for _, tokens, *_ in group}
    assert len(lengths) > 4  # answers[0] are of the validation
    first = check_step(start, seen, 0, 0, 1, {})
    assert (first["low"], first["high"]) == (0, 0)
    if "inner" in mode:
        second = check_step(start, seen, 1, 0, 1, {})
        assert second["low"] >= 5 and second["high"] >= 5
        check_step(start, seen, 2, 2, 2, {})
    else:
        check_step(start, seen, 1, 1, 2, {})


def test_the_reference_model(seen, start, flags, tmp_path):
    """Its divergence is 0 at first; loss and gradients with it; it is the same after a resume."""
    got, own = seen["reference"], {"reference_weight": 0.5}
    assert got["reference"]["in shards"] == [True] * 3 and got["reference"]["whole"] == 0
    assert got["steps"][0]["measured"]["reference_kl"] == 0
    for number, first, step in ((0, 0, 1), (1, 0, 1), (2, 2, 2), (3, 2, 2)):
        expected = check_step(start, got, number, first, step, own)
        measured = got["steps"][number]["measured"]
        assert measured["reference_kl"] == pytest.approx(
            expected["reference_kl"], rel=1e-5, abs=1e-9
        )
    assert all(step["measured"]["reference_kl"] > 1e-3 for step in got["steps"][1:])
    assert all(step["measured"]["reference_kl"] == 0 for step in seen["inner"]["steps"])


@pytest.mark.parametrize("weight", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["dapo", "bnpo"])  # both are means over tokens
def test_the_loss_is_that_of_trl(kind, weight):
    """On the same log-probabilities and advantages: loss, gradient, divergence, what is clipped.

    TRL is in no requirements. In an environment of its own beside this one:

        python -m venv apart && apart/bin/pip install -r requirements.txt
        apart/bin/pip install --no-deps trl==1.16.0 accelerate==1.15.0
        apart/bin/python -m pytest tests/test_grpo.py -k trl
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


@pytest.mark.parametrize("mode", ["plain", "packed", "bf16", "compile", "experts", "recomputed"])
def test_the_ratio_is_exactly_1_at_first(seen, mode):
    for step in seen[mode]["steps"]:
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
def test_nothing_is_sent_while_ranks_sample(seen, mode):
    """Each block and the root are gathered once, before; no shard is left whole after it."""
    of_ranks = seen[mode]["sampling"]
    assert len(of_ranks) == 2 and all(len(sampled) == 3 for sampled in of_ranks)
    groups = 3  # two blocks, and the rest
    for sampled in [each for of_rank in of_ranks for each in of_rank]:
        assert sampled["kinds"] == ([] if mode == "replicas" else ["all-gather"])
        gathers, inside, after = sampled["collectives"]
        assert gathers == (0 if mode == "replicas" else groups)  # a replica is whole as it is
        assert (inside, after) == (0, 0)
        assert sampled["after"] == sampled["before"]
        assert sampled["after"]["in shards"] == [True] * groups
        assert sampled["after"]["whole"] == 0
        root, *blocks = sampled["after"]["reshard"]
        assert root is False and blocks == [mode != "kept"] * 2
        assert sampled["training"] is False and sampled["attention"] == "documents"
        assert sampled["cudnn"] == [False, True]


def test_a_rank_with_long_answers_does_not_hang_the_other(seen):
    """The first rank ends after one token each, the second after 64."""
    of_step = seen["uneven"]["answers"][1]
    lengths = [[len(tokens) for _, tokens, *_ in group] for group in of_step]
    assert lengths == [[1] * 4, [64] * 4] * 2
    assert all(math.isfinite(step["measured"]["loss"]) for step in seen["uneven"]["steps"])


EXACT = ["packed", "kept", "replicas", "offload", "compile", "recomputed", "reduced", "padded"]


def check_same(got: dict, expected: dict) -> None:
    """Answers, rewards, losses and norms."""
    for one, other in zip(got["answers"], expected["answers"], strict=True):
        for group, as_group in zip(one, other, strict=True):
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
    assert seen["experts"]["measured"][0]["expert_load"] > 1
    first, exact = seen["bf16"]["measured"][0], seen["plain"]["measured"][0]
    assert abs(first["entropy"] - exact["entropy"]) < 0.5


def test_prompts_and_random_numbers_do_not_depend_on_the_ranks(seen, alone):
    one, two = alone["plain"], seen["plain"]
    assert one["chosen"] == two["chosen"] and one["draws"] == two["draws"]
    assert len(one["draws"]) > 4
    of_a_prompt = [draws for each in one["draws"].values() for draws in each]
    assert len({json.dumps(draws) for draws in of_a_prompt}) == len(of_a_prompt)
    assert one["validation_reward"] == two["validation_reward"]
    for answers, others in zip(one["answers"][:2], two["answers"][:2]):
        for group, as_group in zip(answers, others, strict=True):
            for answer, as_answer in zip(group, as_group, strict=True):
                assert answer[:2] == as_answer[:2] and answer[3] == as_answer[3]
    losses = [[step["measured"]["loss"] for step in each["steps"]] for each in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


# --- Sampling -------------------------------------------------------------------------------------


def sampler(model):
    """A model of transformers with the script's forward, as ranks have it while they sample."""
    sampling = copy.deepcopy(model)
    sampling.forward = partial(script.forward_with_log_probs, sampling, script.chunk_log_probs)
    sampling.set_attn_implementation("sdpa")
    script.find_experts(sampling)
    return sampling.eval()


@torch.no_grad()
def one_alone(model, prompt: np.ndarray, draws: np.ndarray, end: int) -> tuple[list, list]:
    """An answer as the inverse of the distribution function gives it, each token by all of the row.

    Without cache and padding.
    """
    ids, log_probs = prompt.tolist(), []
    for draw in draws.tolist():
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        probabilities = logits.double().softmax(-1).tolist()
        reached, token = probabilities[0], 0
        while reached <= draw * sum(probabilities):
            token += 1
            reached += probabilities[token]
        ids.append(token)
        log_probs.append(math.log(probabilities[token]))
        if token == end:
            break
    return ids[len(prompt) :], log_probs


@torch.no_grad()
def sample(model, prompts: list, draws: np.ndarray, end: int) -> list:
    return script.sample(sampler(model), prompts, draws, end, CPU)


def check_sampling(model, vocabulary: int = 256, end: int = 7) -> list:
    """Prompts of unlike lengths, groups, early ends: as each answer alone. Returns the answers."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, vocabulary, n).astype(np.uint32) for n in (3, 19, 8, 1)]
    draws = rng.random((12, 20))
    draws[4, 2] = draws[9, 0] = np.nextafter(1, 0)  # the last token, whatever its probability
    made = sample(model, prompts, draws, end)
    for number, (tokens, log_probs) in enumerate(made):
        expected, of_expected = one_alone(model, prompts[number // 3], draws[number], end)
        assert tokens.tolist() == expected, number
        assert tokens.dtype == np.uint32 and log_probs.dtype == np.float32
        assert log_probs.tolist() == pytest.approx(of_expected, abs=1e-5)
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


def test_experts_and_windows_sample_as_they_compute():
    torch.manual_seed(0)
    check_sampling(MiniMaxM2ForCausalLM(small_mixture(initializer_range=0.3)).eval())
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320}
    config = MistralConfig(**sizes, sliding_window=6, initializer_range=0.3)
    model = AutoModelForCausalLM.from_config(config).eval()
    made = check_sampling(model)
    model.config.sliding_window = 64  # there and not there is not the same
    assert any(a[0].tolist() != b[0].tolist() for a, b in zip(made, check_sampling(model)))


def test_positions_are_counted_without_padding():
    """Where they are learned; rotations do not tell, for they go by differences."""
    check_sampling(plain_model("gpt2").eval())


@pytest.mark.drill
@pytest.mark.parametrize("name", sorted(common.MODEL_TYPES))
def test_a_type_samples_as_in_plain_transformers(name):
    check_sampling(plain_model(name).eval())


def test_the_distribution_of_samples_is_the_models():
    """30,000 answers to each of two prompts of unlike lengths, sampled in one call.

    Pairs of first and second token, or an end at once: chi-square against the exact probabilities.
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


def test_a_model_that_keeps_nothing_is_refused():
    """As with transformers before 5.24, which take no `cache`: answers would be wrong."""
    model = sampler(Qwen2ForCausalLM(small_shape()))
    forward = model.forward
    model.forward = lambda cache, **inputs: forward(**inputs)
    with pytest.raises(common.Refusal, match="needs transformers 5.24 or newer"):
        script.sample(model, [np.ones(3, np.uint32)], np.zeros((2, 4)), 7, CPU)


def test_what_is_kept_of_a_token_is_what_the_page_says(monkeypatch):
    """Keys and values as `sample` keeps them, in bf16, against the formula of the table."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import strategies

    torch.manual_seed(0)
    shape = small_shape(num_hidden_layers=3, num_key_value_heads=2)
    model = sampler(Qwen2ForCausalLM(shape).bfloat16())
    caches = []
    monkeypatch.setattr(script, "DynamicCache", lambda: caches.append(DynamicCache()) or caches[-1])
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, 6).astype(np.uint32) for _ in range(2)]
    with torch.no_grad():
        script.sample(model, prompts, rng.random((6, 5)), eos_token_id=-1, device=CPU)
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in caches[0].layers)
    tokens = 6 * (6 + 4)  # what the last of five tokens would add is not computed
    assert kept == tokens * strategies.bytes_of_cached_token(shape)


# --- The whole script -----------------------------------------------------------------------------

GRADED = "import zlib\nreturn zlib.crc32((prompt + answer).encode()) % 8 / 7"
SHORT = "return 1 / (1 + len(answer))"
RUN = {"steps": 4, "eval_every": 2, "checkpoint_every": 2, "warmup_steps": 1, "learning_rate": 1e-2}
RUN |= {"min_learning_rate": 1e-3, "timeout_minutes": 1.0, "reference_weight": 0.1}


def with_reward(folder: Path, body: str) -> Path:
    """The script with another body of `reward`: the one edit of a user."""
    folder.mkdir(exist_ok=True)
    text = (ROOT / "fsdp2_grpo.py").read_text()
    own = textwrap.indent(body, "    ")
    function = re.compile(r"(def reward\(.*?\) -> float:\n).*?(?=\n\n\n)", re.DOTALL)
    copy, count = function.subn(lambda found: found[1] + own, text)
    assert count == 1
    path = folder / "fsdp2_grpo.py"
    path.write_text(copy)
    return path


@pytest.fixture
def reinforce(flags, tmp_path, monkeypatch):
    """Launch the script with a reward of one's own; the run is in tmp_path/run if not told."""

    def run(body: str = GRADED, faults: list | None = None, ranks: int = 2, **own):
        monkeypatch.setenv("COPIED", str(with_reward(tmp_path / "copy", body)))
        given = {name: value for name, value in flags.items() if name not in ("model", "tokenizer")}
        return launch(ranks, "copied", given | RUN | {"run_dir": tmp_path / "run"} | own, faults)

    return run


TIMINGS = ["sample_seconds", "step_seconds", "tokens_per_second", "peak_memory_gib"]


def lines(run_dir: Path) -> list[dict]:
    """metrics.jsonl without what depends on the clock."""
    read = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: x for name, x in line.items() if name not in TIMINGS} for line in read]


@pytest.fixture(scope="module")
def finished(flags, tmp_path_factory) -> Path:
    """A run that nothing happened to."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COPIED", str(with_reward(folder / "copy", GRADED)))
        done = launch(2, "copied", flags | RUN | {"run_dir": folder / "run"})
    assert (done.returncode, done.stderr) == (0, "")
    return folder / "run"


def test_metrics_are_those_of_the_interface(finished):
    every = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    validation = [line for line in every if "validation_reward" in line]
    training = [line for line in every if "loss" in line]
    assert [line["step"] for line in validation] == [0, 2, 4]
    assert all(line.keys() == {"step", "validation_reward"} for line in validation)
    assert [line["step"] for line in training] == [1, 2, 3, 4]
    names = """step loss learning_rate grad_norm tokens padding_fraction tokens_per_second mfu
        step_seconds sample_seconds peak_memory_gib reward answer_length truncated entropy policy_kl
        clip_fraction""".split()
    for line in training:
        assert set(names) <= line.keys()
        assert line["sample_seconds"] < line["step_seconds"]
        assert 0 <= line["reward"] <= 1 and 0 <= line["truncated"] <= 1
    best = {}  # the checkpoint that stays, however old, is the one of the best reward
    for path in (finished / "checkpoints").iterdir():
        progress = common.read_description(path)["progress"]
        best[progress["step"]] = -progress["validation_loss"]
    assert best == {x["step"]: x["validation_reward"] for x in validation[1:]}
    tokens = np.diff([0] + [line["tokens"] for line in training])
    assert tokens.tolist() == [round(16 * line["answer_length"]) for line in training]


@pytest.mark.parametrize(
    "rank, number, step",
    [(0, 1, 1), (1, 6, 3)],
    ids=["first validation", "step 3"],
)
def test_a_signal_while_ranks_sample_loses_nothing(
    reinforce, finished, tmp_path, rank, number, step
):
    """The run stops after that step; resumed, its answers and losses have the same bits.

    The reference model goes on too, from the weights of --init_from.
    """
    fault = {"call": "Rows.read", "do": "terminate", "rank": rank, "number": number}
    stopped = reinforce(faults=[fault])
    assert (stopped.returncode, stopped.stderr) == (0, "")
    last = stopped.stdout.splitlines()[-1]
    assert last.startswith(f"stopped after step {step} of 4, saved in"), stopped.stdout
    resumed = reinforce()
    assert (resumed.returncode, resumed.stderr) == (0, "") and "going on from" in resumed.stdout
    assert lines(tmp_path / "run") == lines(finished)
    distances = [line["reference_kl"] for line in lines(finished) if "loss" in line]
    assert distances[0] == 0 and all(distance > 0 for distance in distances[1:])
    weights = [run / "hf/model.safetensors" for run in (tmp_path / "run", finished)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.drill
def test_rewards_rise_where_they_can(reinforce, tmp_path):
    """Short answers are worth more; after some steps the model gives them."""
    own = {"steps": 10, "eval_every": 10, "checkpoint_every": 10, "answers": 8}
    own |= {"answer_length": 32, "reference_weight": 0.0}
    done = reinforce(SHORT, **own)
    assert (done.returncode, done.stderr) == (0, "")
    rewards = [line["reward"] for line in lines(tmp_path / "run") if "reward" in line]
    assert np.mean(rewards[-3:]) > rewards[0] + 0.2, rewards
    held_out = [x["validation_reward"] for x in lines(tmp_path / "run") if "validation_reward" in x]
    assert len(held_out) == 2 and held_out[1] > held_out[0] + 0.1, held_out


def test_what_a_reward_is_given(tokenizer, monkeypatch):
    """The prompt as the template writes it; answer and reference without the end of the turn."""
    seen = []
    monkeypatch.setattr(script, "reward", lambda *texts: seen.append(texts) or 1)
    row = {"system": "s", "prompt": "p", "completion": "the reference"}
    [(tokens, learned, *_)] = script.chat_rows(row, tokenizer, 99)
    end = np.array([tokenizer.eos_token_id], np.uint32)
    answer = np.concatenate([np.frombuffer("né".encode(), np.uint8).astype(np.uint32), end])
    logged = np.zeros(len(answer), np.float32)
    judged = script.judge(tokenizer, tokens[~learned], answer, logged, tokens[learned])
    prompt = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\np<|im_end|>\n"
    assert seen == [(prompt + "<|im_start|>assistant\n", "né", "the reference")]
    assert judged.reward == 1 and isinstance(judged.reward, float)
    unended = script.judge(tokenizer, tokens[~learned], answer[:-1], logged[:-1], tokens[learned])
    assert unended.reward == 0 and len(seen) == 1


ON_RANK_1 = (
    "import os\nif os.environ['RANK'] == '1':\n    raise ValueError('on purpose')\nreturn 0.5"
)
BAD_REWARDS = {
    "raises on one rank": (
        ON_RANK_1,
        r"reward\(\) fails in reward, line \d+: ValueError: on purpose",
    ),
    "is no number": (
        "return float('nan')",
        r"reward\(\) has to return a number, 0 or more, not nan",
    ),
    "has words of torch": (
        "raise ConnectionError('Connection refused')",
        r"reward\(\) fails in reward, line \d+: ConnectionError: Connection refused",
    ),
    "runs what calls exit": (
        "exec('exit(0)')",
        r"reward\(\) fails in reward, line \d+: SystemExit: 0",
    ),
}


@pytest.mark.parametrize("name", BAD_REWARDS)
def test_a_bad_reward_ends_the_run_in_one_line(reinforce, name):
    """Of all ranks or of one; that of the last asks a service which is not there."""
    body, expected = BAD_REWARDS[name]
    done = reinforce(body, eval_prompts=3, eval_answers=8)
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "Traceback" not in done.stderr, done.stderr
    assert re.fullmatch(f"error: {expected}", errors[0])


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
    monkeypatch.setattr(script, "reward", lambda *_: value)
    with pytest.raises(common.Refusal) as refused:
        script.checked_reward("", "", "")
    assert str(refused.value) == f"reward() has to return a number, 0 or more, not {shown}"
    assert refused.value.code == 1


def test_where_a_library_fails_is_said_by_the_line_that_calls_it(monkeypatch):
    program = compile("def reward(*_):\n    json.loads('')", script.__file__, "exec")
    exec(program, script.__dict__ | {"json": json}, own := {})
    monkeypatch.setattr(script, "reward", own["reward"])
    with pytest.raises(common.Refusal, match="fails in reward, line 2: JSONDecodeError"):
        script.checked_reward("", "", "")


@pytest.mark.parametrize("value", [True, 0, 2, 3.5, np.float32(0.5), np.int64(4)])
def test_any_kind_of_number_is_a_reward(monkeypatch, value):
    monkeypatch.setattr(script, "reward", lambda *_: value)
    checked = script.checked_reward("", "", "")
    assert checked == value and type(checked) is float


@pytest.mark.drill
def test_a_bad_reward_of_one_rank_under_torchrun(flags, tmp_path):
    """A copy of the script beside common.py, as a user has it."""
    path = with_reward(tmp_path / "copy", ON_RANK_1)
    (path.parent / "common.py").write_text((ROOT / "common.py").read_text())
    done = torchrun(2, str(path), *arguments(flags | RUN | {"run_dir": tmp_path / "run"}))
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and re.fullmatch(r"error: reward\(\) fails in .*on purpose", errors[0])
    assert done.returncode == 1 and f"{path.parent}/common.py" not in done.stderr


def test_equal_rewards_are_said_and_trained_on(reinforce, tmp_path):
    done = reinforce("return 0", steps=2, grad_clip=1.0, reference_weight=0.0)
    assert (done.returncode, done.stderr) == (0, "")
    said = [line for line in done.stdout.splitlines() if "no gradient" in line]
    assert [line.split(":")[0] for line in said] == ["step 1", "step 2"]
    training = [line for line in lines(tmp_path / "run") if "loss" in line]
    assert [(x["loss"], x["grad_norm"], x["mixed"]) for x in training] == [(0, 0, 0)] * 2


def test_prompts_alone_and_prompts_without_room(reinforce, tmp_path):
    """No reference is there; a prompt of more than max_length - answer_length is left out."""
    rows = [{"prompt": f"number {n}"} for n in range(60)] + [{"prompt": None}] * 2
    rows += [{"prompt": "x" * (80 + n)} for n in range(3)] + [{"prompt": "y" * 200}] * 4
    body = "if reference:\n    raise ValueError(reference)\nreturn len(answer) % 3"
    dataset = write(tmp_path / "prompts.jsonl", rows)
    done = reinforce(body, dataset=dataset, steps=2)
    assert (done.returncode, done.stderr) == (0, "")
    assert "4 prompts are left out, as they have a prompt of more than 112 tokens" in done.stdout
    assert "2 prompts are left out, as they hold no prompt" in done.stdout


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
    with pytest.raises(ValueError, match="hold no prompt"):
        [*script.chat_rows(row, tokenizer, 99)]


def test_the_longest_prompt_has_room(tokenizer):
    """And its answer does not count: it is the reference alone."""
    row = {"prompt": "x" * 50, "completion": "y" * 500}
    [(tokens, learned, *_)] = script.chat_rows(row, tokenizer, 99)
    length = int((~learned).sum())
    assert 50 < length < 99
    [(again, *_)] = script.chat_rows(row, tokenizer, length)
    assert again.tolist() == tokens.tolist() and tokens[-1] == tokenizer.eos_token_id
    with pytest.raises(ValueError, match=f"have a prompt of more than {length - 1} tokens"):
        [*script.chat_rows(row, tokenizer, length - 1)]


def test_of_a_conversation_the_last_answer_is_asked_for(tokenizer):
    """What is before it is the prompt, answers too."""
    turns = [("user", "1"), ("assistant", "first"), ("user", "2"), ("assistant", "last")]
    messages = [{"role": role, "content": text} for role, text in turns]
    for row in ({"messages": messages}, {"prompt": messages[:3], "completion": "last"}):
        [(tokens, learned, *_)] = script.chat_rows(row, tokenizer, 200)
        assert tokenizer.decode(tokens[learned]) == "last<|im_end|>"
        assert tokenizer.decode(tokens[~learned]).endswith("2<|im_end|>\n<|im_start|>assistant\n")
        assert "first<|im_end|>" in tokenizer.decode(tokens[~learned])
    [(tokens, learned, *_)] = script.chat_rows({"prompt": messages[:3]}, tokenizer, 200)
    assert tokenizer.decode(tokens[learned]) == "<|im_end|>"


ASKS = "{%- if add_generation_prompt -%}{{- '<|header|>assistant ' -}}{%- endif -%}"
ANSWERS = {  # how templates write what they say is an answer
    "with its header": """{%- generation -%}
{{- '<|header|>assistant ' + m.content + '<|eot|>' -}}{%- endgeneration -%}""",
    "with what follows": """{{- '<|header|>assistant ' -}}
{%- generation -%}{{- m.content + '<|eot|>' + '\n' -}}{%- endgeneration -%}""",
    "its text alone": """{{- '<|header|>assistant ' -}}
{%- generation -%}{{- m.content -}}{%- endgeneration -%}{{- '<|eot|>' -}}""",
}  # fmt: skip


def asking(answer: str, asks: str = ASKS) -> str:
    return (
        "{%- for m in messages -%}{%- if m.role == 'assistant' -%}" + answer + "{%- else -%}"
        "{{- '<|header|>' + m.role + ' ' + m.content + '<|eot|>' -}}"
        "{%- endif -%}{%- endfor -%}" + asks
    )  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_a_prompt_is_what_the_template_asks_for_an_answer_with(tmp_path, name):
    """Whatever part of an answer it marks; and the reference is the answer's text."""
    base = save_base(tmp_path, None, asking(ANSWERS[name]), ("<|header|>", "<|eot|>"))
    made, _ = script.chat_tokenizer(base)
    for completion in ("c", ""):
        [(tokens, learned, *_)] = script.chat_rows(
            {"prompt": "p", "completion": completion}, made, 99
        )
        expected = made.apply_chat_template(
            [{"role": "user", "content": "p"}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        assert tokens[~learned].tolist() == expected
        assert made.decode(tokens[learned][:-1]) == completion
        assert tokens[-1] == made.eos_token_id
    [(tokens, learned, *_)] = script.chat_rows({"prompt": "p", "completion": None}, made, 99)
    assert tokens[~learned].tolist() == expected and learned.sum() == 1


INSTRUCT = {  # as hub models have them: nothing says what is an answer
    "ends": "{{- '<|header|>assistant ' + m.content + '<|eot|>' -}}",
    "ends with a blank line": "{{- '<|header|>assistant ' + m.content + '\n' + '<|eot|>\n' -}}",
    "ends, and so does the text": """{{- '<|header|>assistant ' + m.content + '<|eot|>' -}}
{%- if loop.last and not add_generation_prompt -%}{{- eos_token -}}{%- endif -%}""",
}


@pytest.mark.parametrize("name", INSTRUCT)
def test_an_instruct_model_keeps_its_template(tmp_path, name):
    """Without marks too: it is asked as it has learned to be, and ends its turn as it has."""
    template = asking(INSTRUCT[name])
    base = save_base(tmp_path, None, template, ("<|header|>", "<|eot|>"))
    made, known = script.chat_tokenizer(base)
    assert made.chat_template == template and made.eos_token == "<|eot|>"
    assert made.pad_token != "<|eot|>" and len(made) <= known + 1
    [(tokens, learned, *_)] = script.chat_rows({"prompt": "p", "completion": "c"}, made, 99)
    assert made.decode(tokens) == "<|header|>user p<|eot|><|header|>assistant c<|eot|>"
    assert learned.sum() == 2


def test_of_several_templates_the_default_is_taken(tmp_path):
    plain = asking(INSTRUCT["ends"])
    several = {"default": plain, "tools": "{{- no -}}"}
    made, _ = script.chat_tokenizer(save_base(tmp_path, None, several, ("<|header|>", "<|eot|>")))
    assert made.chat_template == plain


def test_a_template_that_cannot_ask_is_refused(tmp_path):
    """The model would have to write the header of an answer, which it has never learned."""
    made, _ = script.chat_tokenizer(
        save_base(tmp_path, None, asking(ANSWERS["with its header"], ""), ("<|header|>", "<|eot|>"))
    )
    with pytest.raises(ValueError, match="have a chat template that does not ask for an answer"):
        [*script.chat_rows({"prompt": "p", "completion": "c"}, made, 99)]


def test_nothing_is_dropped_at_random(start):
    """In training either: else it would be of another policy than the one that has sampled."""
    config = script.Config(model=start, tokenizer=start)
    shape = small_shape(attention_dropout=0.5)
    model = script.build_model(config, shape)
    assert shape.attention_dropout == 0.5 and not any(m.training for m in model.modules())


def test_equal_rewards_of_any_size_are_equal(monkeypatch, tokenizer):
    """The deviation of three times 0.1 is not 0 in floating point."""
    one = np.array([tokenizer.eos_token_id], np.uint32)
    group = [script.Answer(one, one, np.zeros(1, np.float32), 0.1)] * 3
    monkeypatch.setattr(script, "answer_prompts", lambda *_: [group, group])
    monkeypatch.setattr(script, "data_parallel_rank_and_size", lambda _: (0, 1))
    config = script.Config(prompts=2, answers=3)
    rows = SimpleNamespace(lengths=np.ones(5, int))
    _, measured = script.roll_out(None, rows, 1, tokenizer, config, CPU)
    assert measured["mixed"] == 0


def test_resume_with_other_prompts_is_refused(reinforce, finished, tmp_path):
    """Or other answers: a resumed run would sample something else."""
    before = tree(finished)
    done = reinforce(run_dir=finished, prompts=8, answers=2, answer_length=8)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    changed = (
        "was written with --prompts 4 (now 8), --answers 4 (now 2), --answer_length 16 (now 8)"
    )
    assert changed in done.stderr
    assert tree(finished) == before


@pytest.mark.drill
def test_resume_with_another_reference_is_refused(reinforce, start, tmp_path):
    """The same path, trained anew in between; without a reference it is not looked at."""
    weights = Path(shutil.copytree(start, tmp_path / "weights"))
    reinforce(init_from=weights, steps=2)
    done = reinforce(init_from=weights, steps=4, reference_weight=0)
    assert done.returncode != 0 and "--reference_weight 0.1 (now 0.0)" in done.stderr
    model = AutoModelForCausalLM.from_pretrained(weights)
    model.model.norm.weight.data += 0.01
    model.save_pretrained(weights, save_original_format=False)
    done = reinforce(init_from=weights, steps=4)
    assert done.returncode != 0 and "another content of the same paths" in done.stderr
    own = {"init_from": weights, "run_dir": tmp_path / "other", "reference_weight": 0.0}
    reinforce(**own, steps=2)
    model.save_pretrained(weights, save_original_format=False)
    done = reinforce(**own, steps=4)
    assert (done.returncode, done.stderr) == (0, "")


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


def test_a_model_of_nan_ends_in_one_line(reinforce, start, tmp_path):
    """Not in an index that is out of range, which would be a GPU's last words."""
    model = AutoModelForCausalLM.from_pretrained(start)
    model.model.norm.weight.data.fill_(torch.nan)
    shutil.copytree(start, tmp_path / "nan")
    model.save_pretrained(tmp_path / "nan")
    done = reinforce(init_from=tmp_path / "nan", steps=1)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert len(errors) == 1 and "logits are not finite" in errors[0]


def test_weights_that_became_nan_are_not_saved(reinforce, tmp_path):
    """Else each later start would go on from them. (A norm of infinity makes gradients of nan.)"""
    done = reinforce(
        "return 1e29 * (len(answer) % 3)", steps=4, checkpoint_every=1, reference_weight=0.0
    )
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert len(errors) == 1 and "gradients are no longer finite" in errors[0]
    assert not [*(tmp_path / "run").glob("checkpoints/step_*")]


# --- Drills ---------------------------------------------------------------------------------------


@pytest.mark.drill
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fault", ["freeze", "sleep"])
def test_a_rank_that_stalls_while_sampling_ends_the_run_in_time(reinforce, tmp_path, rank, fault):
    """In step 3, with its answers begun; the other rank waits for them."""
    fault = {"call": "Rows.read", "rank": rank, "number": 8 - rank, "do": fault}
    began = time.monotonic()
    done = reinforce(faults=[fault], timeout_minutes=0.1)
    assert done.returncode == 1 and time.monotonic() - began < 60
    assert re.search("[Tt]imed out waiting (6|12)000ms", done.stderr), done.stderr
    assert [line["step"] for line in lines(tmp_path / "run") if "loss" in line] == [1, 2]


@pytest.mark.drill
def test_a_run_killed_again_and_again_repeats_its_answers(flags, tmp_path, monkeypatch):
    """At random moments and while a checkpoint is written; all its numbers keep their bits."""
    monkeypatch.setenv("COPIED", str(with_reward(tmp_path / "copy", GRADED)))
    own = flags | RUN | {"steps": 24, "prompts": 16, "answers": 8, "answer_length": 64}
    own |= {"learning_rate": 1e-3, "inner_steps": 2, "async_checkpoint": "true"}
    program = [sys.executable, str(ROOT / "tests/storm.py"), "copied"]
    for number, run_dir in ((0, tmp_path / "whole"), (8, tmp_path / "storm")):
        words = [str(number), "1", *arguments(own | {"run_dir": run_dir})]
        done = subprocess.run([*program, *words], capture_output=True, text=True, timeout=600)
        assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert sum("-9" in line for line in done.stdout.splitlines()) == 8, done.stdout
    assert lines(tmp_path / "storm") == lines(tmp_path / "whole")
    weights = [tmp_path / run / "hf/model.safetensors" for run in ("storm", "whole")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.drill
def test_compiled_rows_of_many_lengths(seen, flags, tmp_path):
    """Which the plain suite leaves out, for it takes long."""
    modes = {"compile": flags | {"compile": True}}
    modes["few"] = modes["compile"] | {"pad_to_multiple_of": 16, "inner_steps": 2}
    compiled = watch(2, modes, tmp_path)
    check_same(compiled["compile"], seen["plain"])
    check_same(compiled["few"], seen["inner"])
