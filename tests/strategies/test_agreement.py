"""The scripts themselves: the same losses in every strategy and at every world size."""

import json
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import script_parts as parts
import torch
import torch.distributed.checkpoint as dcp
from grid import share
from launching import (
    EXPERTS,
    INSIDE,
    ROOT,
    RUN_FLAGS,
    SCRIPTS,
    SIZES,
    SMALL,
    arguments,
    launch,
    load_documents,
    make_batches,
    metrics,
    small_shape,
    split,
)
from safetensors.torch import load_file
from small_models import plain_model
from torch.distributed.checkpoint import FileSystemReader
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    MiniMaxM2ForCausalLM,
)

import common
import fsdp2_ep_pretrain
import fsdp2_pretrain
import model as shared_model

STEPS = RUN_FLAGS["steps"]
# For ranks that share a model. DTensor takes long where it sees a shape for the first time, so all
# micro-batches have one, and an odd one.
SHORT = {"steps": 2, "eval_every": 2, "eval_tokens": 1500, "batching": "packed"}
SHORT |= {"micro_batch_tokens": 513, "global_batch_tokens": 4 * 513}


def losses(directory, steps: int = STEPS) -> np.ndarray:
    lines, _ = metrics(directory)
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    return np.array([line["loss"] for line in lines])


def worst(a, b) -> float:
    a, b = np.asarray(a), np.asarray(b)
    return float(np.abs(a / b - 1).max())


@pytest.mark.parametrize("script", SCRIPTS[1:])
def test_strategies_agree_to_the_last_bit_on_two_ranks(run, shape_directory, script):
    once = {"reduce_every_micro_batch": "false"}  # adds up micro-batches in the order of DDP
    one = run(SCRIPTS[0], 2, model=shape_directory)
    other = run(script, 2, model=shape_directory, **once)
    check_equal_bits(one, other)


@pytest.mark.parametrize("script", SCRIPTS[1:])
def test_one_micro_batch_a_step_needs_no_flag_for_that(run, shape_directory, script):
    """It is the default on two ranks."""
    config = fsdp2_pretrain.Config()
    assert config.global_batch_tokens == 2 * config.micro_batch_tokens
    flags = {"model": shape_directory, "global_batch_tokens": 2 * SMALL["micro_batch_tokens"]}
    check_equal_bits(*(run(each, 2, **flags) for each in (SCRIPTS[0], script)))


def check_equal_bits(one: Path, other: Path) -> None:
    """Compare losses, validation and final weights of two runs."""
    assert losses(one).tolist() == losses(other).tolist()
    norms = [[line["grad_norm"] for line in metrics(d)[0]] for d in (one, other)]
    assert worst(*norms) < 1e-5
    validation = [[line["validation_loss"] for line in metrics(d)[1]] for d in (one, other)]
    assert validation[0] == validation[1]
    weights = [load_file(d / "hf/model.safetensors") for d in (one, other)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


@pytest.mark.parametrize(
    "script, ranks",
    [("fsdp2_pretrain.py", 1)]
    + [(script, 4) for script in SCRIPTS[::2]]
    + [pytest.param(script, 1, marks=pytest.mark.drill) for script in SCRIPTS[:2]]
    + [pytest.param(SCRIPTS[1], 4, marks=pytest.mark.drill)],
)
def test_world_sizes_agree(run, shape_directory, script, ranks):
    one, other = run(script, 2, model=shape_directory), run(script, ranks, model=shape_directory)
    assert worst(losses(one), losses(other)) < 1e-4
    for name in ("validation_loss", "validation_bits_per_byte"):
        values = [[line[name] for line in metrics(d)[1]] for d in (one, other)]
        assert worst(*values) < 1e-4
    tokens = [[line["tokens"] for line in metrics(d)[0]] for d in (one, other)]
    assert tokens[0] == tokens[1]
    norms = [[line["grad_norm"] for line in metrics(d)[0]] for d in (one, other)]
    assert worst(*norms) < 1e-3
    weights = [load_file(d / "hf/model.safetensors") for d in (one, other)]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], rtol=1e-3, atol=2e-4)


def check_agreement(one: Path, other: Path) -> None:
    """Compare two short runs."""
    assert worst(*(losses(directory, SHORT["steps"]) for directory in (one, other))) < 2e-6
    training, validation = zip(metrics(one), metrics(other))
    assert worst(*([line["grad_norm"] for line in lines] for lines in training)) < 5e-6
    assert worst(*([line["validation_loss"] for line in lines] for lines in validation)) < 2e-6
    assert training[0][-1]["tokens"] == training[1][-1]["tokens"]


def check_tied_copies(directory: Path, ranks: int = 4) -> None:
    """The first stage writes its copy as the embedding, and the last one its own as the head."""
    checkpoint = max((directory / "checkpoints").iterdir())
    metadata = FileSystemReader(checkpoint).read_metadata()
    names = ["model.model.embed_tokens.weight", "model.lm_head.weight"]
    copies = {name: torch.empty(metadata.state_dict_metadata[name].size) for name in names}
    files = {index.fqn: info.relative_path for index, info in metadata.storage_data.items()}
    writers = [files[name][:4] for name in names]
    assert writers == ["__0_", f"__{ranks - 1}_"]  # the first and the last rank
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no process group is there
        dcp.load(copies, checkpoint_id=checkpoint, no_dist=True)
    assert torch.equal(*copies.values())


@pytest.mark.drill
@pytest.mark.parametrize(
    "tied, own",
    share(
        [
            pytest.param(True, {}, id="tied"),
            pytest.param(False, {}, id="untied"),
            pytest.param(False, {"batching": "bucketed", "grad_clip": 0.3}, id="bucketed, clipped"),
        ]
    ),
)
def test_four_stages_change_nothing(run, tmp_path_factory, tied, own):
    """With 5 blocks, stages have unequally many. Two stages have neither embedding nor head."""
    directory = tmp_path_factory.mktemp("deep")
    small_shape(num_hidden_layers=5, tie_word_embeddings=tied).save_pretrained(directory)
    flags = SHORT | {"model": directory} | own
    one = run("fsdp2_pretrain.py", 4, **flags)
    other = run(INSIDE[2], 4, pipeline_parallel=4, **flags)
    check_agreement(one, other)
    if tied:
        check_tied_copies(other)
        more = {"resume": other / "checkpoints/step_00000002", "steps": 4}
        check_tied_copies(run(INSIDE[2], 4, pipeline_parallel=4, **flags | more))


ZERO_BUBBLE = {"schedule": "zero_bubble", "pipeline_parallel": 4, "grad_clip": 0.3}
SCHEDULES = [(2, {"schedule": "interleaved"}, True), (4, {"schedule": "interleaved"}, False)]
SCHEDULES += [(4, ZERO_BUBBLE, True)]


@pytest.mark.drill
@pytest.mark.parametrize("ranks, own, tied", share(SCHEDULES))
def test_schedules_change_nothing(run, tmp_path_factory, ranks, own, tied):
    """Several stages per rank, with unequally many blocks. A checkpoint goes into FSDP2."""
    directory = tmp_path_factory.mktemp("deep")
    small_shape(num_hidden_layers=5, tie_word_embeddings=tied).save_pretrained(directory)
    flags = SHORT | {"model": directory, "grad_clip": own.get("grad_clip", 0)}
    one = run("fsdp2_pretrain.py", ranks, **flags)
    other = run(INSIDE[2], ranks, **flags | own)
    check_agreement(one, other)
    if tied:
        check_tied_copies(other, ranks)
    ends = [
        run("fsdp2_pretrain.py", ranks, **flags | {"resume": end, "steps": 3})
        for end in (run_dir / "checkpoints/step_00000002" for run_dir in (one, other))
    ]
    last = [metrics(end)[0][-1]["loss"] for end in ends]
    assert last[1] == pytest.approx(last[0], rel=2e-6)


def learning_rate(step: int, peak=0.01, least=4e-4, warmup=1) -> float:
    if step <= warmup:
        return peak * step / warmup
    return least + (peak - least) * (1 + math.cos(math.pi * (step - warmup) / (STEPS - warmup))) / 2


class PlainLoop:
    """A loop in one process, one sequence at a time, through transformers' own forward.

    It has no padding, packing or ranks. It asks common.py which sequences a step holds; that they
    are the documents is checked here and in tests/data/test_data.py.
    """

    def __init__(self, model: torch.nn.Module, corpus: str, **flags: str):
        self.model = model
        self.sequences = split(load_documents(corpus))[0].split(512)
        self.micro_batches = make_batches(self.sequences, **flags).plan(0)
        decayed, others = [], []
        for name, parameter in model.named_parameters():
            (decayed if parameter.ndim > 1 and "embed" not in name else others).append(parameter)
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
        self.losses: list[float] = []
        self.norms: list[float] = []

    def step(self, step: int) -> int:
        """Run one optimizer step of 8 micro-batches; returns the number of target tokens."""
        total, num_targets = 0.0, 0
        for index in np.concatenate(self.micro_batches[step * 8 : step * 8 + 8]):
            tokens, _ = self.sequences.read(index)
            ids = torch.from_numpy(tokens)
            logits = self.model(input_ids=ids[None, :-1]).logits[0]
            loss = F.cross_entropy(logits, ids[1:], reduction="sum")
            loss.backward()
            total, num_targets = total + loss.item(), num_targets + len(ids) - 1
        parameters = list(self.model.parameters())
        for parameter in parameters:
            parameter.grad /= num_targets
        self.norms.append(math.sqrt(sum(p.grad.pow(2).sum().item() for p in parameters)))
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step + 1)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(total / num_targets)
        return num_targets

    def check(self, directory: Path, folder: Path) -> None:
        """Compare losses, gradient norms and final weights with those of a run."""
        assert worst(losses(directory), self.losses) < 1e-5
        assert worst([line["grad_norm"] for line in metrics(directory)[0]], self.norms) < 1e-4
        checkpoint = max((directory / "checkpoints").iterdir())
        common.export(checkpoint, folder / "fp32", "float32")  # hf/ has the dtype of --init_from
        exported = AutoModelForCausalLM.from_pretrained(folder / "fp32").state_dict()
        for name, tensor in self.model.state_dict().items():
            torch.testing.assert_close(exported[name], tensor, rtol=1e-3, atol=2e-4)


def test_plain_loop_balances_experts_alike(run, corpus, mixture_directory, tmp_path):
    """What the run counts, and how that moves the biases of the routers."""
    directory = run(EXPERTS, 2, init_from=mixture_directory)
    model = MiniMaxM2ForCausalLM.from_pretrained(mixture_directory, dtype=torch.float32)
    layers = [layer.mlp for layer in model.model.layers]
    counts = torch.zeros(len(layers), 4)
    for layer, layer_counts in zip(layers, counts):

        def count(module, inputs, layer_counts=layer_counts):
            layer_counts += inputs[1].flatten().bincount(minlength=4)

        layer.experts.register_forward_pre_hook(count)
    loop = PlainLoop(model, corpus)
    loads = []
    for step in range(STEPS):
        num_targets = loop.step(step)
        assert counts.sum(1).tolist() == [2 * num_targets] * len(layers)
        loads.append((4 * counts.amax(1) / (2 * num_targets)).max().item())
        for layer, layer_counts in zip(layers, counts):
            layer.e_score_correction_bias += 0.01 * (num_targets / 2 - layer_counts).sign()
        counts.zero_()
    loop.check(directory, tmp_path)
    assert worst([line["expert_load"] for line in metrics(directory)[0]], loads) < 1e-6


def small_models() -> dict:
    """Return architectures that differ in tying, names, biases, and ways to initialize."""
    from transformers import GPT2Config, LlamaConfig, PhiConfig

    return {
        "llama": LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=False),
        "phi": PhiConfig(**SIZES, tie_word_embeddings=False),  # its head has a bias
        "gpt2": GPT2Config(
            vocab_size=320,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=1024,
            bos_token_id=None,
            eos_token_id=None,
        ),
    }


def check_initial_weights(monkeypatch, script, name: str, **flags) -> None:
    """Initialize a model in memory that is full of NaN, and see that none is left."""
    config = script.Config(model=name, **SMALL | flags)
    model_config = parts.build_config(config, common.load_tokenizer("bytes"))
    model = parts.build_model(script, model_config, config)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan()  # integers are filled with their maximum
        shared_model.initialize(model, model.modules(), config.seed, torch.device("cpu"))
    finally:
        torch.use_deterministic_algorithms(False)
    for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert tensor.isfinite().all(), key
        if not tensor.is_floating_point() and tensor.dtype != torch.bool:
            assert (tensor < torch.iinfo(tensor.dtype).max).all(), key


@pytest.mark.parametrize("name", ["tiny", "tiny-moe", "llama", "phi", "gpt2"])
def test_initial_weights_leave_nothing_uninitialized(monkeypatch, tmp_path, name):
    """Neither parameters nor buffers, whether a checkpoint holds them or not."""
    if name == "tiny-moe":
        check_initial_weights(monkeypatch, fsdp2_ep_pretrain, name, expert_parallel=1)
        return
    if name != "tiny":
        small_models()[name].save_pretrained(tmp_path)
        name = str(tmp_path)
    check_initial_weights(monkeypatch, fsdp2_pretrain, name)


@pytest.mark.drill
def test_initial_weights_of_every_type(monkeypatch, tmp_path):
    for name in share(shared_model.BUCKETED_TYPES.split()):
        plain_model(name).config.save_pretrained(tmp_path / name)
        flags = {"max_length": 64, "micro_batch_tokens": 512}
        check_initial_weights(monkeypatch, fsdp2_pretrain, str(tmp_path / name), **flags)


@pytest.mark.parametrize(
    "script, name",
    [
        ("fsdp2_pretrain.py", "qwen2"),
        ("fsdp2_pretrain.py", "llama"),
        ("fsdp1_pretrain.py", "phi"),
        pytest.param("fsdp2_tp_pretrain.py", "llama", marks=pytest.mark.drill),
        ("fsdp2_cp_pretrain.py", "gpt2"),
        ("fsdp2_pp_pretrain.py", "qwen2"),
        pytest.param("fsdp2_pp_pretrain.py", "llama", marks=pytest.mark.drill),
        (EXPERTS, "minimax_m2"),
    ],
)
def test_exported_model_has_the_validation_loss_in_plain_transformers(
    run, texts, corpus, shape_directory, mixture_directory, tmp_path, script, name
):
    if name == "qwen2":
        directory = run(script, 2, model=shape_directory)
    elif name == "minimax_m2":
        directory = run(script, 2, init_from=mixture_directory)
    else:
        small_models()[name].save_pretrained(tmp_path)
        directory = run(script, 2, model=tmp_path)
    model = AutoModelForCausalLM.from_pretrained(directory / "hf")
    tokenizer = AutoTokenizer.from_pretrained(directory / "hf")
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 256

    # Validation gets the documents with the smallest hashes, see `common.train_validation_split`.
    held_out = [texts[i] for i in split(load_documents(corpus))[1].index.document]
    nats, labels = 0.0, 0
    with torch.no_grad():
        for text in held_out:
            ids = torch.tensor(tokenizer(text)["input_ids"] + [tokenizer.eos_token_id])
            for start in range(0, len(ids) - 1, 512):
                piece = ids[start : start + 513]
                mean = model(input_ids=piece[None], labels=piece[None]).loss
                nats, labels = nats + mean.item() * (len(piece) - 1), labels + len(piece) - 1
    last = metrics(directory)[1][-1]
    assert last["step"] == STEPS
    assert last["validation_loss"] == pytest.approx(nats / labels, rel=1e-5)
    assert last["validation_perplexity"] == pytest.approx(math.exp(nats / labels), rel=1e-5)
    bits = nats / math.log(2) / sum(len(text.encode()) for text in held_out)
    assert last["validation_bits_per_byte"] == pytest.approx(bits, rel=1e-5)


@pytest.mark.usefixtures("gpt2_vocabulary")
@pytest.mark.parametrize("name", ["bytes", pytest.param("gpt2", marks=pytest.mark.drill)])
def test_the_tokenizer_of_a_runs_hf_gives_the_ids_that_the_model_learned(run, corpus, name):
    """Its config.json has the type qwen2, for which AutoTokenizer would use its own class."""
    hf = run(SCRIPTS[0], 1, model="tiny", tokenizer=name, steps=1) / "hf"
    trained_on = common.load_tokenizer(name)
    texts = [json.loads(line)["text"] for line in open(corpus).readlines()[:20]]
    texts += ["e\u0301 in 2024, 12345.67", "  two  spaces\n\n\ttab", "漢字とかな"]
    texts += ["a<|endoftext|>b"]
    texts += ["don't WE'LL", "\u00a0\u2003x", "Å \u212b ﬁ", "🙂👩‍👩‍👧"]
    for trust in (False, None):
        tokenizer = AutoTokenizer.from_pretrained(hf, trust_remote_code=trust)
        for text in texts:
            ids = common.encode_text(text, trained_on).tolist()
            assert tokenizer(text)["input_ids"] == ids
            assert tokenizer.decode(ids) == text
    again = common.load_tokenizer(str(hf))
    assert all(common.encode_text(texts[0], again) == common.encode_text(texts[0], trained_on))


def test_metrics_and_config_hold_what_the_interface_says(run, shape_directory):
    directory = run("ddp_pretrain.py", 2, model=shape_directory)
    training, validation = metrics(directory)
    keys = "step loss learning_rate grad_norm tokens padding_fraction tokens_per_second "
    keys += "step_seconds data_seconds mfu peak_memory_gib"
    assert set(keys.split()) <= training[0].keys()
    assert [line["step"] for line in validation] == [2, STEPS]
    rates = [line["learning_rate"] for line in training]
    assert rates == pytest.approx([learning_rate(step) for step in range(1, STEPS + 1)])
    assert training[0]["mfu"] is None or torch.cuda.is_available()
    assert all(0 <= line["padding_fraction"] < 0.5 for line in training)
    assert all(0 <= line["data_seconds"] <= line["step_seconds"] for line in training)
    # Without padding. In pretraining, all tokens but the first of a document are targets.
    speeds = [line["tokens_per_second"] * line["step_seconds"] for line in training]
    assert speeds == pytest.approx(np.diff([0, *(line["tokens"] for line in training)]))
    config = json.loads((directory / "config.json").read_text())
    assert config["grad_clip"] == 0 and config["world_size"] == 2
    model = AutoModelForCausalLM.from_pretrained(directory / "hf")
    assert config["parameters"] == sum(p.numel() for p in model.parameters())


def test_one_process_without_torchrun_and_wandb_offline(corpus, shape_directory, tmp_path):
    words = RUN_FLAGS | {"dataset": corpus, "model": shape_directory, "run_dir": tmp_path / "run"}
    words |= {"wandb_project": "tests", "steps": 2, "eval_every": 1}
    done = launch(0, "ddp_pretrain", words, orderly=True)  # W&B writes the rest at the exit
    assert done.returncode == 0, done.stderr
    assert "next:" not in done.stdout  # it would read other data
    [log] = (tmp_path / "run").rglob("*.wandb")
    content = log.read_bytes()
    for key in (b"validation_bits_per_byte", b"grad_norm"):
        assert key in content


def test_tokens_per_second_counts_tokens_without_padding(shape_directory, tmp_path):
    """In fine-tuning, only a part of the tokens are targets. The number of tokens follows from the
    fraction of padding, because packed batches all have the same size."""
    lines = []
    for i in range(40):
        question = {"role": "user", "content": f"{i} {'?' * 90}"}
        answer = {"role": "assistant", "content": "!"}
        lines.append(json.dumps({"messages": [question, answer]}) + "\n")
    file = tmp_path / "conversations.jsonl"
    file.write_text("".join(lines))
    flags = {"dataset": file, "run_dir": tmp_path / "run", "model": shape_directory}
    flags |= {"batching": "packed", "max_length": 256, "micro_batch_tokens": 512}
    flags |= {"global_batch_tokens": 1024, "steps": 1}
    done = launch(0, "fsdp2_sft.py", flags)
    assert done.returncode == 0, done.stderr
    [line], _ = metrics(tmp_path / "run")
    num_tokens = line["tokens_per_second"] * line["step_seconds"]
    assert num_tokens == pytest.approx(1024 * (1 - line["padding_fraction"]))
    assert line["tokens"] < num_tokens / 10


@pytest.mark.drill
def test_wandb_without_a_key_is_said_in_one_line(corpus, shape_directory, tmp_path):
    words = RUN_FLAGS | {"dataset": corpus, "model": shape_directory, "run_dir": tmp_path / "run"}
    command = [sys.executable, "ddp_pretrain.py", *arguments(words | {"wandb_project": "tests"})]
    variables = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    variables |= {"NETRC": str(tmp_path / "no file")}
    done = subprocess.run(
        command, cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: --wandb_project: No API key configured")


@pytest.mark.drill
def test_a_resume_on_four_ranks(run, shape_directory):
    """To the last bit, but for DDP, which builds new buckets after its first step."""
    flags = SHORT | {"model": shape_directory, "steps": 5, "checkpoint_every": 2}
    flags |= {"keep_checkpoints": 5}
    for script, tolerance in {"fsdp2_pretrain.py": 0.0, "ddp_pretrain.py": 1e-7}.items():
        whole = run(script, 4, **flags)
        resumed = run(script, 4, **flags, resume=whole / "checkpoints/step_00000002")
        weights, again = (load_file(path / "hf/model.safetensors") for path in (whole, resumed))
        for name, tensor in weights.items():
            torch.testing.assert_close(again[name], tensor, rtol=0, atol=tolerance)
