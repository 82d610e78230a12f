"""What a user can get wrong ends in one clear line and exit code 2, and nothing hangs."""

import contextlib
import importlib
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from launching import (
    HANGS,
    ROOT,
    SIZES,
    SMALL,
    arguments,
    launch,
    metrics,
    small_mixture,
    small_shape,
    torchrun,
)
from transformers import (
    AfmoeConfig,
    AriaTextConfig,
    BertConfig,
    BloomConfig,
    GPT2Config,
    GraniteConfig,
    Starcoder2Config,
    XGLMConfig,
)

import common
import fsdp2_cp_pretrain
from model import BUCKETED_TYPES, checkpoint_activations

BASE = {**SMALL, "steps": 2, "eval_every": 2}


# --- Flags ----------------------------------------------------------------------------------------

TP, CP, PP = "fsdp2_tp_pretrain", "fsdp2_cp_pretrain", "fsdp2_pp_pretrain"
EP, MUON, GRPO = "fsdp2_ep_pretrain", "fsdp2_muon_pretrain", "fsdp2_grpo"
PRETRAINING = ["ddp_pretrain", "fsdp1_pretrain", "fsdp2_pretrain", MUON, TP, CP, PP, EP]
# All at once, because a parser changes the types of fields that later classes would inherit.
MODULES = {name: importlib.import_module(name) for name in [*PRETRAINING, GRPO]}
# GRPO counts prompts. None means that the flag is not given.
PROMPTS = {"global_batch_tokens": None, "eval_tokens": None}
# Flags beside the good ones, and what the error must contain. Optional: script, and ranks.
FLAGS = [
    ({"learning_rat": 1}, "unrecognized arguments: --learning_rat"),
    ({"steps": "many"}, "--steps: invalid int value: 'many'"),
    ({"batching": "sorted"}, "--batching: invalid choice: 'sorted'"),
    ({"sharding_strategy": "some"}, "--sharding_.*: invalid choice: 'some'", "fsdp1_pretrain"),
    ({"cpu_offload": "true"}, "unrecognized arguments: --cpu_offload", "ddp_pretrain"),
    ({"steps": -1}, "--steps Input should be greater than or equal to 0"),
    ({"timeout_minutes": 0}, "--timeout_minutes .*greater than 0"),
    ({"max_length": -5}, "--max_length .*greater than 0"),
    ({"max_length": 1024}, "--micro_batch_tokens cannot hold a padded sequence of --max_length"),
    ({"max_length": 500, "pad_to_multiple_of": 300}, "cannot hold a padded sequence"),
    ({"global_batch_tokens": 1000}, "--global_batch_tokens 1000 is not a multiple of 512 "),
    ({"global_batch_tokens": 1024}, "not a multiple of 2048 .*4 data-parallel ranks",
     "ddp_pretrain", 4),
    ({"micro_batch_tokens": -512}, "--micro_batch_tokens .*greater than 0"),
    ({"decay_steps": 0}, "--decay_steps .*greater than 0"),
    ({"eval_tokens": 0}, "--eval_tokens .*greater than 0"),
    ({"weight_decay": -1}, "--weight_decay .*greater than or equal to 0"),
    ({"grad_clip": "nan"}, "--grad_clip .*finite"),
    ({"weight_decay": "nan"}, "--weight_decay .*finite"),
    ({"min_learning_rate": "nan"}, "--min_learning_rate .*finite"),
    ({"learning_rate": "inf"}, "--learning_rate .*finite"),
    ({"seed": -1}, "--seed .*greater than or equal to 0"),
    ({"activation_checkpointing": 1.5}, "--activation_checkpointing .*pattern"),
    ({"activation_checkpointing": "half"}, "none.full.selective"),
    ({"activation_checkpointing": -0.5}, "--activation_checkpointing .*pattern"),
    ({"checkpoint_every": -1}, "--checkpoint_every .*greater than or equal to 0"),
    ({"peak_tflops": 0}, "--peak_tflops .*greater than 0"),
    ({"flash_attention": "FA2"}, "--flash_attention.*invalid choice: 'FA2'"),
    ({"flash_attention": "FA4", "precision": "bf16"}, "--flash_attention FA3 and FA4 need a GPU"),
    ({"dp_replicate": 3}, "--dp_replicate 3 does not divide"),
    ({"dp_replicate": 3}, "--dp_replicate 3 does not divide 2 ranks", MUON, 2),
    ({"init_from": "no/where"}, "--init_from no/where has no .* here, and is not on the hub"),
    ({}, "--tensor_parallel 2 does not divide 1 ranks", TP),
    ({"tensor_parallel": 1, "dp_replicate": 1}, "unrecognized arguments: --dp_replicate", TP),
    ({"compile": "true"}, "--compile needs sequence lengths that --tensor_parallel divides", TP, 2),
    ({"compile": "true", "precision": "bf16"}, "--compile in bf16 needs one micro-batch per rank",
     "fsdp1_pretrain"),
    ({"compile": "true", "activation_checkpointing": "full", "pad_to_multiple_of": 2},
     "--compile needs --activation_checkpointing none or selective", TP, 2),
    ({"precision": "float8"}, "--precision: invalid choice: 'float8'", TP, 2),
    ({}, "--context_parallel 2 does not divide 1 ranks", CP),
    ({}, "--pipeline_parallel 2 does not divide 1 ranks", PP),
    ({}, "--pipeline_parallel 2 does not divide 3 ranks", PP, 3),
    ({"dp_replicate": 2}, "--dp_replicate 2 does not divide the 1 ranks of a stage", PP, 2),
    ({"reduce_every_micro_batch": "true"}, "unrecognized arguments: --reduce_every_micro", PP, 2),
    ({"global_batch_tokens": 512}, "fewer micro-batches than there are stages: use at least 1024",
     PP, 2),
    ({"schedule": "zero_bubble", "compile": "true"}, "works neither with --compile nor", PP, 2),
    ({"schedule": "zero_bubble", "activation_checkpointing": "selective"},
     "zero_bubble works neither with .*selective, because it splits backward", PP, 2),
    ({"schedule": "interleaved", "global_batch_tokens": 5 * 512},
     "--schedule interleaved needs .*make --global_batch_tokens a multiple of 1024", PP, 2),
    ({"context_attention": "ring", "batching": "packed"}, "ring needs --batching bucketed", CP,
     2),
    ({}, "--expert_parallel 2 does not divide 1 ranks", EP),
    ({"compile": "true", "activation_checkpointing": "selective"},
     "--compile needs --activation_checkpointing none", EP, 2),
    ({"balance_rate": -1}, "--balance_rate .*or equal to 0", EP, 2),
    (PROMPTS | {"answers": 1}, "--answers 1 makes the rewards' advantages 0", GRPO),
    (PROMPTS | {"answers": 1, "teacher": "a", "teacher_weight": 1}, "--answers 1 makes the", GRPO),
    (PROMPTS | {"teacher_weight": 1}, "--teacher_weight needs --teacher", GRPO),
    (PROMPTS | {"teacher": "a", "teacher_weight": 0}, "--teacher_weight .*greater than 0", GRPO),
    (PROMPTS | {"answer_length": 512}, "--answer_length leaves no room for a prompt", GRPO),
    (PROMPTS | {"micro_batch_tokens": 500}, "cannot hold a padded sequence of --max_length", GRPO),
    (PROMPTS | {"reference_weight": 0.1}, "--reference_weight needs --init_from", GRPO),
    (PROMPTS | {"clip_low": 1.5}, "--clip_low .*less than or equal to 1", GRPO),
    (PROMPTS | {"clip_high": "nan"}, "--clip_high .*finite", GRPO),
    (PROMPTS | {"inner_steps": 0}, "--inner_steps .*greater than 0", GRPO),
    (PROMPTS | {"prompts": 3}, "--prompts 3 is not a multiple of 2 ranks", GRPO, 2),
]  # fmt: skip


def words_of(flags: dict) -> list[str]:
    return arguments({name: value for name, value in flags.items() if value is not None})


@pytest.mark.parametrize("case", FLAGS, ids=lambda case: " ".join(words_of(case[0])))
def test_flags_that_cannot_work(case, monkeypatch):
    """They are refused before the data is loaded."""
    flags, expected = case[:2]
    script = case[2] if len(case) > 2 else "fsdp2_pretrain"
    ranks = case[3] if len(case) > 3 else 1
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *words_of(BASE | flags)])
    monkeypatch.delattr(common, "load_tokenizer")
    with pytest.raises(common.Refusal) as refusal:
        MODULES[script].main()
    assert re.search(expected, str(refusal.value)), refusal.value
    assert "\n" not in str(refusal.value)


# --- Data, models, weights and directories --------------------------------------------------------

START = {"init_from": "WEIGHTS", "tokenizer": "bytes"}
ALONE = {"tensor_parallel": 1}, {"pipeline_parallel": 1}, {"expert_parallel": 1}
TP_ALONE, PP_ALONE, EP_ALONE = (
    {"script": script} | flags for script, flags in zip((TP, PP, EP), ALONE)
)
TEMPLATE = """{% for message in messages %}{{ message.role }}: {{ message.content }}
<|endoftext|>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
CHAT = PROMPTS | {"script": GRPO, "tokenizer": "FOLDER/chat"}
COLUMNS = "Its columns are text; docs/data.md lists what is read"
# Name -> flags beside the good ones, and what the error line must contain. FOLDER and WEIGHTS are
# replaced. "script" is not a flag but the script, fsdp2_pretrain if not given.
CASES = {
    # one for each way to refuse a flag
    "unknown flag": ({"learning_rat": 1}, "unrecognized arguments: --learning_rat"),
    "not a number": ({"steps": "many"}, "--steps: invalid int value: 'many'"),
    "too small": ({"steps": -1}, "--steps Input should be"),
    "flags that do not fit": ({"min_learning_rate": 1}, "--min_learning_rate is above"),
    # data
    "missing file": ({"dataset": "FOLDER/no.jsonl"}, "no.jsonl cannot be read: .*no.jsonl"),
    "missing glob": ({"dataset": "FOLDER/no*.parquet"}, "no.*parquet cannot be read: ."),
    "missing hub dataset": ({"dataset": "nobody/nothing"}, "nobody/nothing cannot be read"),
    "missing split": ({"dataset_split": "dev"}, "cannot be read: .*dev"),
    "empty file": ({"dataset": "FOLDER/empty.jsonl"}, "empty.jsonl"),
    "invalid UTF-8": ({"dataset": "FOLDER/latin.jsonl"}, "latin.jsonl cannot be read: .*utf-8"),
    "no text": ({"dataset": "FOLDER/blank.txt"}, "fewer than two different documents"),
    "one document": ({"dataset": "FOLDER/one.txt"}, "fewer than two different documents"),
    "numbers": ({"dataset": "FOLDER/numbers.jsonl"}, "fewer than two different documents"),
    "broken json": ({"dataset": "FOLDER/broken.jsonl"}, "fewer than two different documents"),
    "broken parquet": ({"dataset": "FOLDER/broken.parquet"}, "cannot be read"),
    "missing column": ({"text_column": "body"}, "they hold no text. " + COLUMNS),
    "no conversations": ({"script": "fsdp2_sft"}, "fewer than two .* no answer.* " + COLUMNS),
    "no chat template": (PROMPTS | {"script": GRPO}, "fine-tune the model with fsdp2_sft.py first"),
    "no prompts": (CHAT, "hold no prompt. " + COLUMNS),
    "more than all prompts": (
        CHAT | {"dataset": "FOLDER/prompts.jsonl", "prompts": 9},
        "--prompts 9 exceeds the 8 training prompts",
    ),
    "prompts without room": (
        CHAT | {"dataset": "FOLDER/prompts.jsonl", "answer_length": 505},
        "--max_length 512 leaves no prompt",
    ),
    # tokenizer and model
    "tokenizer": ({"tokenizer": "gpt9"}, "tokenizer gpt9 is not bytes"),
    "no network": ({"tokenizer": "o200k_base"}, "TIKTOKEN_CACHE_DIR"),
    "large tokenizer": (
        {"model": "FOLDER/few_ids"},
        "--tokenizer has 257 ids, --model .*few_ids only 256",
    ),
    "model": ({"model": "gigantic"}, "--model gigantic is not built in"),
    "short model": ({"model": "FOLDER/short"}, "--max_length 512 exceeds max_position_embeddings"),
    "unknown type": (
        {"model": "FOLDER/bert"},
        "type bert is not tested with bucketed batches .--untested_model",
    ),
    "unpacked type": (
        {"model": "FOLDER/bloom", "batching": "packed", "untested_model": "true"},
        "type bloom is not tested with packed batches",
    ),
    "sliding window": (
        {"model": "FOLDER/window", "batching": "packed"},
        "--max_length 512 exceeds sliding_window",
    ),
    "setting": ({"model": "FOLDER/scaled"}, "its logits_scaling is not supported"),
    "other blocks": (
        TP_ALONE | {"model": "FOLDER/gpt2"},
        "gpt2: TP needs blocks with Llama's layers",
    ),
    "experts in split layers": (TP_ALONE | {"model": "FOLDER/mixture"}, "mixture: TP needs blocks"),
    "positions before the blocks": (
        PP_ALONE | {"model": "FOLDER/gpt2"},
        "must consist of embed_tokens, layers, norm, rotary_emb",
    ),
    "factor of stages": (PP_ALONE | {"model": "FOLDER/granite"}, "repeat its embedding_multiplier"),
    "muP of stages": (PP_ALONE | {"model": "FOLDER/afmoe"}, "repeat its mup_enabled"),
    "dropout of stages": (
        PP_ALONE | {"model": "FOLDER/starcoder2"},
        "repeat its embedding_dropout",
    ),
    "no experts": (EP_ALONE, "shallow has no experts"),
    "other experts": (EP_ALONE | {"model": "FOLDER/aria"}, "its AriaExperts cannot be split"),
    # weights
    "no weights": ({"init_from": "FOLDER/shallow"}, r"shallow has no \*.safetensors here"),
    "missing weights": (START | {"model": "FOLDER/deep"}, "[Mm]issing key.* model.layers.2"),
    "unexpected weights": (START, "has model.layers.1.*, which the model lacks"),
    "weights of other shapes": (START | {"model": "FOLDER/narrow"}, "[Ss]ize mismatch"),
    # directories
    "no checkpoint": ({"resume": "FOLDER"}, "is not a complete checkpoint"),
    "run_dir is a file": (
        {"run_dir": "FOLDER/file"},
        "error: --run_dir .*File exists",
    ),
    "run_dir under a file": ({"run_dir": "FOLDER/file/run"}, "Not a directory"),
    "read-only run_dir": ({"run_dir": "/proc/run"}, "--run_dir /proc/run cannot be written"),
    "long run_dir": ({"run_dir": "FOLDER/" + "x" * 256}, "--run_dir .*File name too long"),
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
        "broken.parquet": "this is not a parquet file",
        "prompts.jsonl": "".join(f'{{"prompt": "number {n}"}}\n' for n in range(9)),
        "file": "a file where a directory should be",
    }
    for name, content in files.items():
        (folder / name).write_text(content)
    (folder / "latin.jsonl").write_bytes(b'{"text": "caf\xe9"}\n{"text": "b"}\n')
    save_models(folder)
    common.save_tokenizer(common.load_tokenizer("bytes"), folder / "chat")
    (folder / "chat/chat_template.jinja").write_text(TEMPLATE)
    good = BASE | {"dataset": corpus, "run_dir": "FOLDER/run", "model": "FOLDER/shallow"}
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


def save_models(folder: Path) -> None:
    for name, change in {
        "few_ids": {"vocab_size": 256},
        "short": {"max_position_embeddings": 256},
        "window": {"sliding_window": 128, "use_sliding_window": True},
        "narrow": {"hidden_size": 16},
        "shallow": {"num_hidden_layers": 1},
        "deep": {"num_hidden_layers": 3},
    }.items():
        small_shape(**change).save_pretrained(folder / name)
    sizes = {"vocab_size": 320, "hidden_size": 32, "n_layer": 2, "n_head": 4}
    none = {"bos_token_id": None, "eos_token_id": None}
    others = {
        "bert": BertConfig(**SIZES),
        "bloom": BloomConfig(**sizes),
        "gpt2": GPT2Config(**sizes, n_embd=32, **none),
        "granite": GraniteConfig(**SIZES, embedding_multiplier=12.0),
        "scaled": GraniteConfig(**SIZES, logits_scaling=8.0),
        "afmoe": AfmoeConfig(**SIZES, mup_enabled=True),
        "starcoder2": Starcoder2Config(**SIZES, **none, embedding_dropout=0.1),
        "mixture": small_mixture(),
        "aria": AriaTextConfig(
            **SIZES, num_key_value_heads=2, moe_num_experts=4, pad_token_id=None
        ),
    }
    for name, config in others.items():
        config.save_pretrained(folder / name)


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_line_and_exit_code_2(commands, name, monkeypatch, tmp_path):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    done = launch(0, *commands[name])
    assert done.returncode == 2, done.stderr
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert re.search(CASES[name][1], line), line


@pytest.mark.parametrize("fraction, recomputed", [("0", 0), ("0.5", 2), (".25", 1), ("1.0", 4)])
def test_any_fraction_of_the_blocks_recomputes(fraction, recomputed):
    config = MODULES["fsdp2_pretrain"].Config(activation_checkpointing=fraction)
    blocks = torch.nn.ModuleList(torch.nn.Identity() for _ in range(4))
    checkpoint_activations(blocks, config.activation_checkpointing)
    assert sum("forward" in vars(block) for block in blocks) == recomputed


# --- Types of models that nobody has compared -----------------------------------------------------


def test_an_untested_type_trains_if_asked_to(corpus, tmp_path):
    """With a warning. The case "unknown type" above is refused."""
    assert "xglm" not in BUCKETED_TYPES.split()
    XGLMConfig(**SIZES).save_pretrained(tmp_path / "model")
    flags = {"dataset": corpus, "model": tmp_path / "model", "run_dir": tmp_path / "run"}
    done = launch(0, "fsdp2_pretrain", BASE | flags | {"untested_model": "true"})
    assert (done.returncode, done.stderr) == (0, "")
    assert len(metrics(tmp_path / "run")[0]) == BASE["steps"]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("WARNING: ")]
    assert "type xglm is not tested with bucketed batches; compare the loss" in line


# --- Bugs in code that users edit -----------------------------------------------------------------


@pytest.mark.parametrize(
    "bug, error",
    [
        ("text_of_row", "NameError: name 'text_of_row' is not defined"),
        ("text + str(np.ones(2) + np.ones(3))", "ValueError: operands could not be broadcast"),
    ],
)
def test_a_bug_in_tokenize_text_shows_its_traceback_once(
    corpus, shape_directory, tmp_path, monkeypatch, bug, error
):
    """No row is left out because of it. numpy raises ValueError for a mistake in a shape."""
    text = (ROOT / "common.py").read_text()
    right = "    tokens = encode_text(text, tokenizer)\n"
    before, found, _ = text.partition(right)
    assert found
    (tmp_path / "common.py").write_text(text.replace(right, right.replace("(text", f"({bug}")))
    shutil.copy(ROOT / "fsdp2_pretrain.py", tmp_path)
    monkeypatch.setenv("COPIED", str(tmp_path / "fsdp2_pretrain.py"))
    flags = {"dataset": corpus, "model": shape_directory, "run_dir": tmp_path / "run"}
    done = launch(2, "copied", BASE | flags)
    assert done.returncode == 1 and done.stderr.count(error) == 1, done.stderr
    line = before.count("\n") + 1
    assert f'{tmp_path}/common.py", line {line}, in tokenize_text' in done.stderr
    assert done.stdout == "" and not (tmp_path / "run").exists()


# --- Several ranks --------------------------------------------------------------------------------


def test_under_torchrun_it_is_said_once_and_all_ranks_end(commands):
    """The weights are read by both ranks together. A rank that waits would do so for too long."""
    script, flags = commands["missing weights"]
    flags = flags | {"global_batch_tokens": 1024, "timeout_minutes": HANGS}
    done = torchrun(2, f"{script}.py", *arguments(flags))
    assert done.returncode == 1  # torchrun's own, for any rank that fails
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1, done.stderr
    *_, summary = done.stderr.split("Root Cause")
    assert said[0].removeprefix("error: ") in summary
    assert "exitcode  : 2" in done.stderr
    assert "forcefully" not in done.stderr  # torchrun's line about a rank that SIGTERM did not end
    assert "common.py" not in done.stderr  # no traceback of ours


@pytest.mark.parametrize(
    "ranks, script, shape, expected",
    [
        (2, TP, {"vocab_size": 321}, "feed-forward width and the vocabulary .*: .2, 64, 321"),
        (3, CP, {}, "--context_parallel must divide the attention heads of the model: .4"),
        (4, PP, {}, "--pipeline_parallel 4 x 1 stages is more than the 2 blocks"),
        (2, EP, {"num_local_experts": 3}, "--expert_parallel 2 does not divide 3 experts"),
    ],
)
def test_a_model_that_does_not_fit_the_ranks_is_refused_once(
    corpus, tmp_path, ranks, script, shape, expected
):
    make = small_mixture if script == EP else small_shape
    make(**shape, hidden_size=48).save_pretrained(tmp_path / "shape")
    flags = {"dataset": corpus, "model": tmp_path / "shape", "run_dir": tmp_path / "run"}
    flags |= {"global_batch_tokens": 512 * 12}
    if script in (CP, PP):
        flags["context_parallel" if script == CP else "pipeline_parallel"] = ranks
    done = launch(ranks, script, BASE | flags)
    assert done.returncode == 1
    line, *more = done.stderr.splitlines()
    assert line.startswith("error: ") and re.search(expected, line), line
    # Rank 0 hosts the store here. If it leaves while others connect, PyTorch warns of that.
    assert not more or "TCPStore" in more[0]
    assert "Traceback" not in done.stderr and "\nerror: " not in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "ranks, shape, refusal",
    [
        (4, {"num_attention_heads_per_layer": [8, 6]}, "attention heads of the model: .8, 6"),
        (2, {"num_attention_heads_per_layer": [8, 6]}, None),
        (2, {"sliding_window": 64}, None),
        (2, {"sliding_window": 63}, "--max_length 64 exceeds the sliding window of 63"),
        (2, {"model_type": "mamba"}, "CP cannot train type mamba"),
    ],
)
def test_models_that_fit_context_parallelism(ranks, shape, refusal):
    shape = {"model_type": "qwen2", "num_attention_heads": 8, "num_key_value_heads": 4} | shape
    config = fsdp2_cp_pretrain.Config(steps=0, context_parallel=ranks, max_length=64)
    with pytest.raises(common.Refusal, match=refusal) if refusal else contextlib.nullcontext():
        fsdp2_cp_pretrain.check_model(SimpleNamespace(**shape), config)
