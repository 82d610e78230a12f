"""Speed of fine-tuning and of GRPO on one GPU: python post.py sft|grpo

Qwen2.5-0.5B's shape with its vocabulary and random weights; invented conversations, half of whose
tokens are targets. GRPO: 16 prompts of 256 tokens, 8 answers each. With random weights hardly any
answer ends early, so each gets its full length.
"""

import gc
import os
import sys
import time
from types import SimpleNamespace
from typing import Any

import kit

kit.alone()
import numpy as np  # noqa: E402
import torch  # noqa: E402
from kit import emit, guarded, synchronize  # noqa: E402
from shared import Session, architecture, batches_class, build  # noqa: E402

import common  # noqa: E402

GPU = torch.cuda.is_available()
MODEL = str(kit.INPUTS / "0.5b-chat") if GPU else "tiny"
VOCABULARY = 151936 if GPU else 320
LONGEST, POSITIONS = (2048, 16384) if GPU else (256, 1024)
WARM, STEPS = (4, 8) if GPU else (1, 2)


class Conversations:
    def __init__(self) -> None:
        drawn = np.random.default_rng(0).lognormal(5.5, 1, 20_000).astype(np.int64)
        self.lengths = np.clip(drawn, 16, LONGEST)
        self.num_targets = self.lengths // 2

    def read(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        size = int(self.lengths[i]) + 1
        tokens = np.random.default_rng(i).integers(VOCABULARY, size=size)
        return tokens, np.arange(size) >= size - self.num_targets[i]


def clean() -> None:
    gc.collect()
    torch._dynamo.reset()
    if GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak() -> float | None:
    return torch.cuda.max_memory_allocated() / 2**30 if GPU else None


def flags_of(**more: Any) -> dict[str, Any]:
    sizes = {"max_length": LONGEST, "micro_batch_tokens": POSITIONS, "precision": "bf16"}
    return {"model": MODEL, "learning_rate": 1e-5, "min_learning_rate": 1e-6} | sizes | more


def sft() -> None:
    import fsdp2_sft as script

    cases = {
        "packed, compiled": {"batching": "packed", "compile": GPU},
        "bucketed": {},
        "packed": {"batching": "packed"},
        "padded, compiled": {"pad_to_multiple_of": 256, "compile": GPU},
    }
    for what, own in cases.items():
        with guarded("sft", what):
            kit.need(60 if GPU else 5)
            config = script.Config(**flags_of(global_batch_tokens=POSITIONS, **own))
            torch.backends.cuda.enable_cudnn_sdp(config.pad_to_multiple_of > 1)
            training = batches_class(script)(Conversations(), config, padding_id=0)
            model_config = architecture(script, config, VOCABULARY)
            data = SimpleNamespace(training=training, model_config=model_config)
            session = Session(script, config, data)
            if config.compile:  # every shape, before the clock runs
                plan = training.plan(0)[:500]
                shapes = {training.shape(indices): indices for indices in plan}
                if config.batching == "packed":  # and each number of boundaries
                    shapes |= {len(training.collate(x)["cu_seq_lens_q"]): x for x in plan[:100]}
                for indices in shapes.values():
                    one = common.GlobalBatch([training.collate(indices)], 1, 1, 1, 0.0)
                    session.train_step(one)
            tokens = targets = padding = 0.0
            for step, batch in enumerate(session.batches(0, WARM + STEPS)):
                if step == WARM:
                    synchronize()
                    began = time.perf_counter()
                session.train_step(batch)
                if step >= WARM:
                    tokens += batch.num_tokens
                    targets += batch.num_targets
                    padding += batch.padding_fraction / STEPS
            seconds = time.perf_counter() - began
            emit(
                "sft", what, tokens_per_second=tokens / seconds,
                targets_per_second=targets / seconds,
                padding=padding, step_seconds=seconds / STEPS, peak_gib=peak(),
            )  # fmt: skip
        session = data = training = None
        clean()


def grpo() -> None:
    import fsdp2_grpo as script

    prompts, answers, prompt, length = (16, 8, 256, 256) if GPU else (2, 2, 16, 8)
    cases = {
        "bucketed": {},
        "packed, compiled": {"batching": "packed", "compile": GPU},
        "packed": {"batching": "packed"},
    }
    for what, own in cases.items():
        with guarded("grpo", what):
            kit.need(60 if GPU else 5)
            config = script.Config(
                **flags_of(prompts=prompts, answers=answers, answer_length=length, **own)
            )
            if not torch.distributed.is_initialized():
                script.init_process_group(config)
            device = torch.device("cuda", 0) if GPU else torch.device("cpu")
            torch.backends.cuda.enable_cudnn_sdp(False)
            model, optimizer = build(
                script, architecture(script, config, VOCABULARY), config, device
            )
            rng = np.random.default_rng(0)
            asked = [rng.integers(VOCABULARY, size=prompt) for _ in range(prompts)]
            draws = rng.random((prompts * answers, length))
            sampling, training = [], []
            for _ in range(3):
                synchronize()
                began = time.perf_counter()
                with script.unsharded_parameters(model, config):
                    made = script.sample(model, asked, draws, [VOCABULARY - 1], device)
                synchronize()
                sampling.append(time.perf_counter() - began)
                drawn = sum(len(tokens) for tokens, _ in made)
                empty = np.zeros(0, np.uint32)
                found = [
                    script.Answer(asked[i // answers], empty, *answer)
                    for i, answer in enumerate(made)
                ]
                advantages = rng.standard_normal(len(found)).astype(np.float32)
                batches = script.AnswerBatches(found, advantages, config, padding_id=0)
                batch = batches.global_batch(batches.plan(0), 0, 1)
                began = time.perf_counter()
                measured = script.train_step(model, optimizer, batch, 1, config, device)
                synchronize()
                training.append(time.perf_counter() - began)
                kit.need(10)
            emit(
                "grpo", what, sampled_per_second=drawn / min(sampling[1:]),
                trained_per_second=batch.num_tokens / min(training[1:]),
                sample_seconds=sampling, train_seconds=training,
                ms_per_token_of_all=1e3 * min(sampling[1:]) / length,
                sampling_gap=measured["sampling_gap"], loss=measured["loss"],
                grad_norm=measured["grad_norm"], peak_gib=peak(),
            )  # fmt: skip
        model = optimizer = batches = batch = None
        clean()


kit.quiet()
{"sft": sft, "grpo": grpo}[sys.argv[1]]()
sys.stdout.flush()
os._exit(0)
