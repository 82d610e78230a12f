"""How fast fsdp2_grpo.py samples, beside transformers' `generate`, in CPU time of one process.

    python bench/sampling.py [TOKENS] [ROUNDS]

Samples 8 answers of up to TOKENS tokens (128 by default) to each of 16 prompts with a model of the
shape `tiny` and random weights: with the script, with the cache that copies all keys and values for
each token (transformers' own), and with `generate` as TRL's GRPOTrainer calls it, which reads each
prompt 8 times and goes on with answers that have ended. They take turns; a row has the best and the
median of ROUNDS rounds (5 by default). The first two give the same answers, to the last bit.
"""

import copy
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import shared
import torch
from transformers.cache_utils import DynamicLayer

import fsdp2_grpo
import fsdp2_sft

CPU = torch.device("cpu")
PROMPTS, ANSWERS = 16, 8


def with_copies(work: Callable[[], list]) -> list:
    """Sample as before there was room for answers in the cache."""
    layer = fsdp2_grpo.AnswerLayer
    fsdp2_grpo.AnswerLayer = type("Copying", (DynamicLayer,), {})
    try:
        return work()
    finally:
        fsdp2_grpo.AnswerLayer = layer


def main() -> None:
    tokens, rounds = shared.read(__doc__, tokens=128, rounds=5)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = fsdp2_sft.Config()
    tokenizer, known = fsdp2_sft.chat_tokenizer(config)
    shape = fsdp2_sft.build_model_config(config, tokenizer, known)
    plain = fsdp2_sft.AutoModelForCausalLM.from_config(shape, dtype=torch.float32).eval()
    model = copy.deepcopy(plain)
    model.forward = partial(fsdp2_grpo.forward_with_log_probs, model, fsdp2_grpo.chunk_log_probs)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, n) for n in rng.integers(50, 400, PROMPTS)]
    draws = rng.random((PROMPTS * ANSWERS, tokens))
    [end] = shape.eos_token_id
    rows = [torch.from_numpy(prompt) for prompt in prompts for _ in range(ANSWERS)]
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True, padding_side="left")

    def ours() -> list:
        return fsdp2_grpo.sample(model, prompts, draws, [end], CPU)

    def generate() -> list:
        ids = pad(rows)
        found = plain.generate(
            ids,
            attention_mask=pad([torch.ones_like(row) for row in rows]),
            max_new_tokens=tokens,
            do_sample=True,
            top_k=0,
            eos_token_id=end,
            pad_token_id=end,
        )[:, ids.shape[1] :]
        # An answer has the tokens up to the first `end`. Later ones are padding.
        return [(row[: 1 + int((row != end).long().cumprod(0).sum())],) for row in found]

    ways = {
        "fsdp2_grpo.py": ours,
        "with a cache that copies": partial(with_copies, ours),
        "generate": generate,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    answers = {}
    with torch.no_grad():
        for _ in range(rounds):
            for name, work in ways.items():
                started = time.process_time()
                answers[name] = work()
                used = time.process_time() - started
                seconds[name].append(used / sum(len(answer[0]) for answer in answers[name]))
    for one, other in zip(answers["fsdp2_grpo.py"], answers["with a cache that copies"]):
        if not all(map(np.array_equal, one, other)):
            raise SystemExit("the answers differ")
    reference = statistics.median(seconds["generate"])
    print(f"| tokens per CPU second, up to {tokens:,} | best | median | median to generate |")
    print("| --- | --- | --- | --- |")
    for name, of_way in seconds.items():
        median = statistics.median(of_way)
        print(f"| {name} | {1 / min(of_way):,.0f} | {1 / median:,.0f} | {reference / median:.1f} |")


if __name__ == "__main__":
    main()
