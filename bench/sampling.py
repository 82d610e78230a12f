"""CPU seconds of sampling and of a GRPO step, beside transformers, TRL, and a plain cache.

    pip install --no-deps --target .trl trl==1.16.0 accelerate==1.15.0
    PYTHONPATH=.trl python bench/sampling.py [ROUNDS]

One process with one thread, the tiny model with random weights, and prompts of the embedded data.
The contestants take turns, ROUNDS times (5 by default) after one that does not count.

128 tokens: `sample` of fsdp2_grpo.py, and `model.generate` as TRL calls it, for 8 answers to each
of 16 prompts. Generate reads each prompt 8 times, and goes on with answers that have ended.

1024 tokens: `sample`, and the same with a cache that copies all keys and values for each token
and whenever an answer ends, for 8 answers to each of 4 prompts. Both have to give the same bits.

GRPO step: a step of the script, and one of TRL's GRPOTrainer with its defaults, with 8 answers of
at most 64 tokens to each of 8 prompts. Both train on 64 answers in micro-batches. Left out if TRL
is not installed.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import _tools  # noqa: F401
import numpy as np
import shared
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

import common
import conversations
import fsdp2_grpo as script
import fsdp2_sft
from model import SHAPES

ANSWERS = 8
CPU = torch.device("cpu")
left_padded = partial(nn.utils.rnn.pad_sequence, batch_first=True, padding_side="left")


@torch.no_grad()
def sample_by_copying(
    model: nn.Module, prompts: list[np.ndarray], draws: np.ndarray, end_ids: list[int]
) -> list[tuple]:
    """Sample as the script's `sample` does, with the cache of transformers as it is."""
    rows = [torch.from_numpy(prompt.astype(np.int64)) for prompt in prompts]
    ids, mask = left_padded(rows), left_padded([row >= 0 for row in rows])
    draws = torch.from_numpy(draws)
    answers = [([], []) for _ in draws]
    unfinished = torch.arange(len(draws))
    cache = DynamicCache()
    for t in range(draws.shape[1]):
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        logits = model(input_ids=ids, position_ids=positions, attention_mask=mask, cache=cache)
        if t == 0:
            group = len(draws) // len(prompts)
            cache.batch_repeat_interleave(group)
            logits, mask = (states.repeat_interleave(group, 0) for states in (logits, mask))
        ids = script.draw_tokens(logits, draws[unfinished, t])
        log_probs = logits.log_softmax(-1).gather(1, ids)
        for i, token, log_prob in zip(unfinished.tolist(), ids.tolist(), log_probs.tolist()):
            answers[i][0].extend(token)
            answers[i][1].extend(log_prob)
        kept = torch.tensor([i for i, [token] in enumerate(ids.tolist()) if token not in end_ids])
        if len(kept) == 0:
            break
        if len(kept) < len(ids):
            unfinished, ids, mask = unfinished[kept], ids[kept], mask[kept]
            cache.batch_select_indices(kept)
        mask = nn.functional.pad(mask, (0, 1), value=True)
    return [(np.array(t, np.uint32), np.array(p, np.float32)) for t, p in answers]


def generate(model: nn.Module, prompts: list[np.ndarray], length: int, end_ids: list[int]) -> None:
    rows = [torch.from_numpy(p.astype(np.int64)) for p in prompts for _ in range(ANSWERS)]
    model.generate(
        left_padded(rows), attention_mask=left_padded([row >= 0 for row in rows]).long(),
        max_new_tokens=length, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
        eos_token_id=end_ids, pad_token_id=end_ids[0], disable_compile=True,
    )  # fmt: skip


def cpu_seconds(function: Callable) -> float:
    began = time.process_time()
    function()
    return time.process_time() - began


def show(task: str, own: str, other: str, seen: list[tuple[float, float]]) -> None:
    """Print a row of the table; `seen` has the CPU seconds of both in each round."""
    columns = [*zip(*seen)]
    best, median = ([pick(column) for column in columns] for pick in (min, statistics.median))
    ratios = [f"{b / a:.2f}" for a, b in (best, median)]
    cells = [f"{b:.2f}, {m:.2f}" for b, m in zip(best, median)]
    print(
        f"| {task} | {own} | {cells[0]} | {other} | {cells[1]} | {', '.join(ratios)} |", flush=True
    )


def take_turns(rounds: int, own: Callable, other: Callable) -> list[tuple[float, float]]:
    """Return the CPU seconds of both in each round; the first does not count."""
    return [(cpu_seconds(own), cpu_seconds(other)) for _ in range(1 + rounds)][1:]


def compare_sampling(rounds: int, folder: str, prompts: list[np.ndarray], ends: list[int]) -> None:
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.forward = partial(script.forward_with_log_probs, model, script.chunk_log_probs)
    rng = np.random.default_rng(0)
    for number, length in ((16, 128), (4, 1024)):
        chosen = [prompts[i] for i in rng.choice(len(prompts), number, replace=False)]
        draws = rng.random((number * ANSWERS, length))
        own = partial(torch.no_grad()(script.sample), model, chosen, draws, ends, CPU)
        other = partial(sample_by_copying, model, chosen, draws, ends)
        for answer, as_answer in zip(own(), other(), strict=True):
            assert all(map(np.array_equal, answer, as_answer)), "both have to give the same bits"
        name = "copying cache"
        if length == 128:
            name, other = "generate", partial(generate, plain, chosen, length, ends)
        show(f"{length} tokens", "sample", name, take_turns(rounds, own, other))


def compare_steps(rounds: int, folder: str, asked: list[conversations.Messages]) -> None:
    """Run TRL's trainer, with a step of the script before each of its own."""
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    script.reward = lambda prompt, answer, reference: float(len(answer) % 7)
    config = script.Config(
        init_from=folder, model=folder, tokenizer=folder, prompts=8, answers=ANSWERS,
        answer_length=64, max_length=448, learning_rate=1e-6, warmup_steps=0, precision="fp32",
    )  # fmt: skip
    own_tokenizer, turn_end, known_ids = conversations.chat_tokenizer(config, "known tokens")
    documents = common.load_documents(
        config, conversations.COLUMNS, script.tokenize_prompt, own_tokenizer, conversations.CORPORA
    )
    prompts, _ = common.train_validation_split(documents, 0)
    training = script.leave_out_long(prompts, config)
    generation = conversations.base_generation(config, own_tokenizer, turn_end)
    model_config = shared.architecture(script, config, known_ids, ends=generation.eos_token_id)
    model, optimizer = shared.build(script, model_config, config, CPU)
    common.load_weights(model, folder)
    run = SimpleNamespace(
        config=config, tokenizer=own_tokenizer, model_config=model_config, device=CPU,
        stop_signals=0, rank=0, world_size=1,
    )  # fmt: skip

    def step(number: int) -> None:
        batch, _ = script.roll_out(model, training, number, run)
        script.train_step(model, optimizer, batch, number, config, CPU)

    seen: list[tuple[float, float]] = []

    class Turns(TrainerCallback):
        def on_step_begin(self, _: Any, state: Any, *more: Any, **named: Any) -> None:
            self.own = cpu_seconds(partial(step, 1 + state.global_step))
            self.began = time.process_time()

        def on_step_end(self, *_: Any, **named: Any) -> None:
            seen.append((self.own, time.process_time() - self.began))

    arguments = trl.GRPOConfig(
        output_dir=f"{folder}/trl", max_steps=1 + rounds, report_to=[], use_cpu=True, bf16=False,
        per_device_train_batch_size=8, gradient_accumulation_steps=8, num_generations=ANSWERS,
        max_completion_length=64, disable_tqdm=True, optim="adamw_torch_fused",
        learning_rate=1e-6, gradient_checkpointing=False, save_strategy="no",
        logging_strategy="no",
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), args=arguments,
        train_dataset=Dataset.from_list([{"prompt": messages} for messages in asked]),
        processing_class=tokenizer, callbacks=[Turns()],
        reward_funcs=lambda completions, **_: [float(len(str(c)) % 7) for c in completions],
    )  # fmt: skip
    trainer.train()
    show("GRPO step", "fsdp2_grpo.py", "GRPOTrainer", seen[1:])


def main() -> None:
    [rounds] = shared.read(__doc__, rounds=5)
    torch.set_num_threads(1)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    script.init_process_group(script.Config())
    with tempfile.TemporaryDirectory() as folder:
        tokenizer, _, _ = conversations.chat_tokenizer(fsdp2_sft.Config(), "new tokens")
        torch.manual_seed(0)
        shape = AutoConfig.for_model(vocab_size=320, **SHAPES["tiny"])
        AutoModelForCausalLM.from_config(shape, dtype=torch.float32).save_pretrained(folder)
        common.save_tokenizer(tokenizer, Path(folder))
        asked, prompts = [], []
        for row in conversations.docstring_conversations(common.standard_library_files()):
            texts = {"system": row["system"], "user": row["prompt"]}
            messages = [{"role": role, "content": text} for role, text in texts.items()]
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
            ids = np.array(encoding.ids, np.uint32)
            if len(ids) <= 384:
                asked.append(messages)
                prompts.append(ids)
        print("| what | ours | CPU s, best, median | against | CPU s | ratio, best, median |")
        print("| --- | --- | --- | --- | --- | --- |", flush=True)
        compare_sampling(rounds, folder, prompts, [tokenizer.eos_token_id])
        try:
            import trl  # noqa: F401
        except ImportError as problem:
            print(f"GRPO step: left out, because TRL is missing ({problem}); see --help")
        else:
            compare_steps(rounds, folder, asked)


if __name__ == "__main__":
    main()
