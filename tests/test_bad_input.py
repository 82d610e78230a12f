"""What a user can get wrong ends in one clear line, exit code 2, and no hang."""

import contextlib
import itertools
import re
import time
from types import SimpleNamespace

import pytest
from conftest import (
    SIZES,
    SMALL,
    arguments,
    launch,
    small_mixture,
    small_shape,
    torchrun,
)
from transformers import (
    AfmoeConfig,
    AriaTextConfig,
    BloomConfig,
    GPT2Config,
    GraniteConfig,
    Starcoder2Config,
)

import common
import fsdp2_cp_pretrain

BASE = {**SMALL, "steps": 2, "eval_every": 2}


TP, CP = {"script": "fsdp2_tp_pretrain"}, {"script": "fsdp2_cp_pretrain"}
PP = {"script": "fsdp2_pp_pretrain"}
EP = {"script": "fsdp2_ep_pretrain"}
# It counts prompts, not positions: None takes a flag away.
GRPO = {"script": "fsdp2_grpo", "global_batch_tokens": None, "eval_batches": None}
START = {"init_from": "WEIGHTS", "tokenizer": "bytes"}
# Name -> flags beside the good ones, and what the error line must hold. FOLDER and WEIGHTS are
# replaced; "script" is not a flag but the script, fsdp2_pretrain if not given.
CASES = {
    "unknown flag": ({"learning_rat": 1}, "unknown flag or word --learning_rat"),
    "unquoted glob": ({"dataset": ["a.jsonl", "b.jsonl"]}, "word b.jsonl; .*a glob needs quotes"),
    "not a number": ({"steps": "many"}, "--steps: invalid int value: 'many'"),
    "not a choice": ({"batching": "sorted"}, "--batching: invalid choice: 'sorted'"),
    "not a strategy": (
        {"sharding_strategy": "some", "script": "fsdp1_pretrain"},
        "--sharding_strategy.*: invalid choice: 'some'",
    ),
    "other script's flag": (
        {"cpu_offload": "true", "script": "ddp_pretrain"},
        "unknown flag or word --cpu_offload",
    ),
    "no steps": ({"steps": -1}, "--steps -1: .*greater than or equal to 0"),
    "too many steps": ({"steps": 10**8}, "--steps 100000000: .*less than 100000000"),
    "no time": ({"timeout_minutes": 1e-6}, "--timeout_minutes 1e-06: .*or equal to 0.05"),
    "no checkpoint": ({"resume": "FOLDER"}, "no undamaged checkpoint to go on from"),
    "negative length": ({"max_length": -5}, "--max_length -5: .*greater than 0"),
    "long rows": ({"max_length": 1024}, "--micro_batch_tokens cannot hold a row of --max_length"),
    "long when padded": ({"max_length": 500, "pad_to_multiple_of": 300}, "cannot hold a row"),
    "indivisible": ({"global_batch_tokens": 1000}, "no multiple of 512 .*; 1024 would be"),
    "too small": ({"global_batch_tokens": 100}, "; 512 would be"),
    "negative size": ({"micro_batch_tokens": -512}, "--micro_batch_tokens -512: .*greater than 0"),
    "rates": ({"min_learning_rate": 1}, "--min_learning_rate is above --learning_rate"),
    "negative": ({"weight_decay": -1}, "--weight_decay -1.0: .*greater than or equal to 0"),
    "nan clip": ({"grad_clip": "nan"}, "--grad_clip nan: "),
    "nan decay": ({"weight_decay": "nan"}, "--weight_decay nan: "),
    "nan rate": ({"min_learning_rate": "nan"}, "--min_learning_rate nan: "),
    "infinite rate": ({"learning_rate": "inf"}, "--learning_rate inf: .*finite"),
    "large seed": ({"seed": 2**64}, "--seed 18446744073709551616: .*less than"),
    "fraction": ({"activation_checkpointing": 1.5}, "--activation_checkpointing 1.5: .*pattern"),
    "word": ({"activation_checkpointing": "half"}, "none.full.selective"),
    "trace": ({"trace_steps": [2, 1]}, "--trace_steps"),
    "trace of one step": ({"trace_steps": [1]}, "--trace_steps takes two numbers"),
    "trace of three steps": ({"trace_steps": [1, 1, 1]}, "--trace_steps takes two numbers"),
    "replicas": ({"dp_replicate": 3}, "--dp_replicate 3 does not divide"),
    "layers shared by more than all": (TP, "--tensor_parallel 2 must divide 1 ranks"),
    "rows shared by more than all": (CP, "--context_parallel 2 must divide 1"),
    "more stages than ranks": (PP, "--pipeline_parallel 2 must divide 1 ranks"),
    "replicas of a stage": (
        PP | {"pipeline_parallel": 1, "dp_replicate": 2},
        "--dp_replicate 2 does not divide the 1 ranks of a stage",
    ),
    "nothing to reduce early": (
        PP | {"pipeline_parallel": 1, "reduce_every_micro_batch": "true"},
        "unknown flag or word --reduce_every_micro_batch",
    ),
    "positions before the blocks": (
        PP | {"pipeline_parallel": 1, "model": "FOLDER/gpt2"},
        "gpt2: only models of embed_tokens, layers, norm, rotary_emb can be cut into stages",
    ),
    **{
        f"{setting} of stages": (
            PP | {"pipeline_parallel": 1, "model": f"FOLDER/{model}"},
            f"{model}: each stage would apply its {setting} again",
        )
        for model, setting in {
            "granite": "embedding_multiplier",
            "afmoe": "mup_enabled",
            "starcoder2": "embedding_dropout",
        }.items()
    },
    "experts shared by more than all": (EP, "--expert_parallel 2 must divide 1 ranks"),
    "no experts": (EP | {"expert_parallel": 1}, "shallow has no experts that go through"),
    "other experts": (
        EP | {"expert_parallel": 1, "model": "FOLDER/aria"},
        "aria: its AriaExperts cannot be dealt",
    ),
    "experts compiled and computed again": (
        EP | {"expert_parallel": 1, "compile": "true", "activation_checkpointing": "selective"},
        "--compile takes --activation_checkpointing none",
    ),
    "experts in layers that are cut": (
        TP | {"tensor_parallel": 1, "model": "FOLDER/mixture"},
        "mixture: only blocks with the layers of Llama's can be cut",
    ),
    "negative rate of biases": ({"balance_rate": -1}, "--balance_rate -1.0: .*or equal to 0"),
    "other script's replicas": (
        TP | {"tensor_parallel": 1, "dp_replicate": 1},
        "unknown flag or word --dp_replicate",
    ),
    "other blocks": (
        TP | {"tensor_parallel": 1, "model": "FOLDER/gpt2"},
        "gpt2: only blocks with the layers of Llama's can be cut",
    ),
    "compiled and computed again": (
        TP | {"tensor_parallel": 1, "compile": "true", "activation_checkpointing": "full"},
        "--compile takes --activation_checkpointing none or selective",
    ),
    "float8 of cut layers": (
        TP | {"tensor_parallel": 1, "precision": "float8"},
        "--precision float8 does not go with tensor parallelism",
    ),
    "missing file": ({"dataset": "FOLDER/no.jsonl"}, "no.jsonl cannot be read: .*no.jsonl"),
    "missing glob": ({"dataset": "FOLDER/no*.parquet"}, "no.*parquet cannot be read: ."),
    "missing hub dataset": ({"dataset": "nobody/nothing"}, "nobody/nothing cannot be read"),
    "missing split": ({"dataset_split": "dev"}, "cannot be read: .*dev"),
    "empty file": (
        {"dataset": "FOLDER/empty.jsonl"},
        "empty.jsonl cannot be read: nothing is there",
    ),
    "invalid UTF-8": ({"dataset": "FOLDER/latin.jsonl"}, "latin.jsonl cannot be read: .*utf-8"),
    "no text": ({"dataset": "FOLDER/blank.txt"}, "fewer than two documents"),
    "one document": ({"dataset": "FOLDER/one.txt"}, "fewer than two documents"),
    "numbers": ({"dataset": "FOLDER/numbers.jsonl"}, "fewer than two documents"),
    "no conversations": ({"script": "fsdp2_sft"}, "has no column messages or .*only .*text"),
    "no prompts": (GRPO, "has no column messages or .*only .*text"),
    "one answer": (GRPO | {"answers": 1}, "--answers 1: .*greater than or equal to 2"),
    "answers without prompts": (
        GRPO | {"answer_length": 512},
        "--answer_length leaves no room for a prompt in --max_length",
    ),
    "answers longer than a micro-batch": (
        GRPO | {"micro_batch_tokens": 500},
        "--micro_batch_tokens cannot hold a row of --max_length",
    ),
    "more than all prompts": (
        GRPO | {"dataset": "FOLDER/prompts.jsonl", "prompts": 9},
        "--prompts 9, but only 8 are there to train on",
    ),
    "prompts without room": (
        GRPO | {"dataset": "FOLDER/prompts.jsonl", "answer_length": 490},
        "fewer than two documents .* have a prompt of more than 22 tokens",
    ),
    "a reference of nothing": (
        GRPO | {"reference_weight": 0.1},
        "--reference_weight: the reference is the model of --init_from",
    ),
    "a ratio below 0": (GRPO | {"clip_low": 1.5}, "--clip_low 1.5: .*less than or equal to 1"),
    "nan bound": (GRPO | {"clip_high": "nan"}, "--clip_high nan: "),
    "no inner step": (GRPO | {"inner_steps": 0}, "--inner_steps 0: .*greater than 0"),
    "broken json": ({"dataset": "FOLDER/broken.jsonl"}, "cannot be read"),
    "broken parquet": ({"dataset": "FOLDER/broken.parquet"}, "cannot be read"),
    "missing column": ({"text_column": "body"}, "has no column body, only .*text"),
    "tokenizer": ({"tokenizer": "gpt9"}, "tokenizer gpt9 is neither bytes"),
    "no network": ({"tokenizer": "o200k_base"}, "TIKTOKEN_CACHE_DIR"),
    "large tokenizer": (
        {"model": "FOLDER/few_ids"},
        "--tokenizer has 257 ids, --model .*few_ids only 256",
    ),
    "model": ({"model": "gigantic"}, "model gigantic is neither built in"),
    "short model": ({"model": "FOLDER/short"}, "--max_length 512 exceeds max_position_embeddings"),
    "attention without our mask": ({"model": "FOLDER/bloom"}, "its type, bloom, is none of"),
    "sliding window": ({"model": "FOLDER/window"}, "exceeds sliding_window"),
    "no weights": ({"init_from": "FOLDER/shallow"}, "no config.json and .*safetensors in it"),
    "no directory": ({"init_from": "no/where"}, "--init_from no/where is neither here nor"),
    "missing weights": (START | {"model": "FOLDER/deep"}, "[Mm]issing key.* model.layers.2"),
    "unexpected weights": (START, "also has model.layers.1.* .12 too many"),
    "mis-shaped weights": (START | {"model": "FOLDER/narrow"}, "[Ss]ize mismatch"),
    "run_dir is a file": ({"run_dir": "FOLDER/file"}, "cannot be written.*Not a directory"),
    "run_dir under a file": ({"run_dir": "FOLDER/file/run"}, "cannot be written"),
    "read-only run_dir": ({"run_dir": "/proc/run"}, "cannot be written"),
}


@pytest.fixture(scope="module")
def commands(tmp_path_factory, corpus, weights_directory) -> dict[str, tuple[str, dict]]:
    """Name -> script and flags."""
    folder = tmp_path_factory.mktemp("bad")
    files = {
        "empty.jsonl": "",
        "blank.txt": "\n\n\n",
        "one.txt": "one document\n",
        "numbers.jsonl": '{"text": 1}\n{"text": 2}\n',
        "broken.jsonl": '{"text": "a"}\n{"text": \n',
        "broken.parquet": "this is no parquet file",
        "prompts.jsonl": "".join(f'{{"prompt": "number {n}"}}\n' for n in range(9)),
        "file": "a file where a directory should be",
    }
    for name, content in files.items():
        (folder / name).write_text(content)
    (folder / "latin.jsonl").write_bytes(b'{"text": "caf\xe9"}\n{"text": "b"}\n')
    for name, change in {
        "few_ids": {"vocab_size": 256},
        "short": {"max_position_embeddings": 256},
        "window": {"sliding_window": 128, "use_sliding_window": True},
        "narrow": {"hidden_size": 16},
        "shallow": {"num_hidden_layers": 1},
        "deep": {"num_hidden_layers": 3},
    }.items():
        small_shape(**change).save_pretrained(folder / name)
    BloomConfig(vocab_size=320, hidden_size=32, n_layer=2, n_head=4).save_pretrained(
        folder / "bloom"
    )
    sizes = {"vocab_size": 320, "n_embd": 32, "n_layer": 2, "n_head": 4}
    GPT2Config(**sizes, bos_token_id=None, eos_token_id=None).save_pretrained(folder / "gpt2")
    GraniteConfig(**SIZES, embedding_multiplier=12.0).save_pretrained(folder / "granite")
    AfmoeConfig(**SIZES, mup_enabled=True).save_pretrained(folder / "afmoe")
    none = {"bos_token_id": None, "eos_token_id": None}
    Starcoder2Config(**SIZES, **none, embedding_dropout=0.1).save_pretrained(folder / "starcoder2")
    good = BASE | {"dataset": corpus, "run_dir": "FOLDER/run", "model": "FOLDER/shallow"}
    small_mixture().save_pretrained(folder / "mixture")
    AriaTextConfig(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, moe_num_experts=4, pad_token_id=None,
    ).save_pretrained(folder / "aria")  # fmt: skip
    made = {}
    for name, (flags, _) in CASES.items():
        flags = good | flags
        for flag, value in flags.items():
            if isinstance(value, str):
                value = value.replace("WEIGHTS", weights_directory)
                flags[flag] = value.replace("FOLDER", str(folder))
        script = flags.pop("script", "fsdp2_pretrain")
        made[name] = script, {flag: value for flag, value in flags.items() if value is not None}
    return made


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_line_and_exit_code_2(commands, name, monkeypatch, tmp_path):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    done = launch(0, *commands[name])
    assert done.returncode == 2, done.stderr
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert re.search(CASES[name][1], line), line


@pytest.mark.parametrize(
    "ranks, flags, heads, expected",
    [
        (2, TP | {"compile": "true"}, (4, 2), "--compile needs rows whose length --tensor_par"),
        (4, TP | {"tensor_parallel": 4}, (4, 2), "feed-forward, vocabulary: (2, 64, 320)"),
        (2, TP, (4, 2, 321), "must divide K/V heads, feed-forward, vocabulary: (2, 64, 321)"),
        (
            3,
            CP | {"context_parallel": 3},
            (4, 2),
            "--context_parallel 3 must divide 4 heads, and divide",
        ),
        (2, CP, (6, 3), "must divide 6 heads, and divide 3 key/value heads or be a multiple"),
        (4, PP | {"pipeline_parallel": 4}, (4, 2), "--pipeline_parallel 4 exceeds 2 blocks"),
        (3, PP, (4, 2), "--pipeline_parallel 2 must divide 3 ranks"),
        (
            2,
            PP | {"micro_batch_tokens": 1024},
            (4, 2),
            "1024 is fewer micro-batches than --pipeline_parallel; 2048 would do",
        ),
        (2, GRPO | {"prompts": 3}, (4, 2), "--prompts 3 is no multiple of 2 ranks; 4 would be"),
    ],
)
def test_what_ranks_cannot_share_is_refused_once(corpus, tmp_path, ranks, flags, heads, expected):
    names = ("num_attention_heads", "num_key_value_heads", "vocab_size")
    shape = dict(zip(names, heads))
    small_shape(**shape, hidden_size=48).save_pretrained(tmp_path / "shape")
    flags = (
        BASE | {"dataset": corpus, "model": tmp_path / "shape", "run_dir": tmp_path / "run"} | flags
    )
    flags["global_batch_tokens"] = flags["global_batch_tokens"] and 512 * ranks
    given = {flag: value for flag, value in flags.items() if value is not None}
    done = launch(ranks, given.pop("script"), given)
    assert done.returncode == 1
    line, *more = done.stderr.splitlines()
    assert line.startswith("error: ") and expected in line
    # Ranks may still be at the store as rank 0, which holds it here, leaves: torch warns of that.
    assert not more or "TCPStore" in more[0]
    assert "Traceback" not in done.stderr and "\nerror: " not in done.stderr
    assert not (tmp_path / "run").exists()


def test_experts_that_ranks_cannot_share_are_refused_once(corpus, tmp_path):
    small_mixture(num_local_experts=3).save_pretrained(tmp_path / "shape")
    flags = {"dataset": corpus, "model": tmp_path / "shape", "run_dir": tmp_path / "run"}
    done = launch(2, "fsdp2_ep_pretrain", BASE | flags | {"global_batch_tokens": 1024})
    assert done.returncode == 1
    line, *more = done.stderr.splitlines()
    assert line == "error: --expert_parallel 2 does not divide 3 experts"
    assert not more or "TCPStore" in more[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["missing column", "missing weights"])
def test_under_torchrun_it_is_said_once_and_ends_within_30_seconds(commands, name):
    script, flags = commands[name]
    began = time.monotonic()
    done = torchrun(2, f"{script}.py", *arguments(flags), timeout=60)
    assert time.monotonic() - began < 30
    assert done.returncode == 1  # torchrun's own, for any rank that fails
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1, done.stderr
    assert "exitcode  : 2" in done.stderr
    assert "common.py" not in done.stderr  # no traceback of ours


@pytest.mark.parametrize(
    "ranks, shape, refusal",
    [
        (
            4,
            {"num_attention_heads_per_layer": [8, 6]},
            "must divide 8 heads, and divide 4 key/value",
        ),
        (2, {"num_attention_heads_per_layer": [8, 6]}, None),
        (3, {"num_attention_heads": 6, "num_key_value_heads": 3, "sliding_window": 66}, None),
        (
            3,
            {"num_attention_heads": 6, "num_key_value_heads": 3, "sliding_window": 64},
            "--max_length 64, padded, exceeds the window of 64",
        ),
        (2, {"sliding_window": 64}, None),
    ],
    ids=itertools.count(),
)
def test_what_ranks_that_share_rows_can_compute(ranks, shape, refusal):
    """Heads of each layer; and 64 tokens become 66 where three ranks have to divide them."""
    shape = {"num_attention_heads": 8, "num_key_value_heads": 4} | shape
    model = SimpleNamespace(config=SimpleNamespace(**shape))
    config = fsdp2_cp_pretrain.Config(steps=0, context_parallel=ranks, max_length=64)
    with pytest.raises(common.Refusal, match=refusal) if refusal else contextlib.nullcontext():
        fsdp2_cp_pretrain.check_model(model, config)
