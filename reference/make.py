"""Make the reference runs: weights, batches, and what a plain loop in float64 measures on them.

    python reference/make.py [FOLDER ...]        dense, moe, packed, chat; without a name: all

The loop is the oracle that check.py compares a log with. It imports no other file of the collection
but the list of mistakes, computes everything in float64 with a forward of its own, and trains on
one sequence at a time. (transformers' forward computes norms, softmax and rotary embeddings in
fp32, even in a float64 model. It has to agree to 1e-6.)

Each mistake of known_mistakes.py is an edit of this file's text. The edited loop runs too, so that
check.py can tell a mistake by what it does to the loss and the gradient norm. recorded.json has the
logs of mistakes that cannot be written as an edit of a plain loop.
"""

import json
import math
import sys
from pathlib import Path

import numpy as np
import torch
from known_mistakes import MISTAKES, Mistake
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy, silu
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
STEPS, MICRO_BATCHES = 12, 4  # micro-batch i of a step belongs to rank i mod N
POSITIONS = 48  # of a micro-batch: sequences x (longest - 1), or without padding if it is packed
LONGEST = 32  # tokens of a sequence
IGNORED = -100  # label of a token that is not in the loss
# Edited copies have other values. The right numbers do not depend on them.
RANKS = 1  # how many ranks the loop plays, one after the other
RANK = 0  # which of them it is, where each rank trains on its own

# --- Models ---------------------------------------------------------------------------------------

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_theta": 1000.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "eos_token_id": None,
    "dtype": "float32",  # to train in; the file has bf16, which holds the weights exactly
}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **SIZES}
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    **SIZES,
    "attention_bias": True,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "output_router_logits": False,
}
FOLDERS = {
    "dense": QWEN2 | {"tie_word_embeddings": True},
    "moe": QWEN3_MOE | {"tie_word_embeddings": False},
    "packed": QWEN2 | {"tie_word_embeddings": True},
    "chat": QWEN2 | {"tie_word_embeddings": False},
}
# Twice the largest relative difference of a right loop in bf16, see test_reference.py.
BF16_TOLERANCE = {"dense": 7e-3, "moe": 3e-3, "packed": 5e-3, "chat": 6e-3}
MARGIN = 0.5  # between router logits of the last expert chosen and the first one not chosen


def shapes(config: dict) -> dict[str, list[int]]:
    """Return the shape of each tensor of model.safetensors, by its Hugging Face name."""
    hidden, vocabulary, size = config["hidden_size"], config["vocab_size"], config["head_dim"]
    queries, keys = size * config["num_attention_heads"], size * config["num_key_value_heads"]
    moe = config["model_type"] == "qwen3_moe"
    found = {"model.embed_tokens.weight": [vocabulary, hidden]}
    for layer in range(config["num_hidden_layers"]):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        found[f"model.layers.{layer}.input_layernorm.weight"] = [hidden]
        found[f"model.layers.{layer}.post_attention_layernorm.weight"] = [hidden]
        for name, width in (("q", queries), ("k", keys), ("v", keys)):
            found[f"{attention}.{name}_proj.weight"] = [width, hidden]
            found[f"{attention}.{name}_proj.bias"] = [width]
        found[f"{attention}.o_proj.weight"] = [hidden, queries]
        networks, width = [mlp], config["intermediate_size"]
        if moe:
            found[f"{attention}.o_proj.bias"] = [hidden]
            found[f"{attention}.q_norm.weight"] = found[f"{attention}.k_norm.weight"] = [size]
            found[f"{mlp}.gate.weight"] = [config["num_experts"], hidden]
            networks = [f"{mlp}.experts.{expert}" for expert in range(config["num_experts"])]
            width = config["moe_intermediate_size"]
        for network in networks:
            found[f"{network}.gate_proj.weight"] = [width, hidden]
            found[f"{network}.up_proj.weight"] = [width, hidden]
            found[f"{network}.down_proj.weight"] = [hidden, width]
    found["model.norm.weight"] = [hidden]
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = [vocabulary, hidden]
    return found


def make_weights(config: dict, rng: np.random.Generator) -> dict[str, torch.Tensor]:
    """Draw weights from integers, so that they are the same on every machine, and exact in bf16.

    Biases and norms are not at their usual initial values, because a loop that forgets a bias or a
    norm's weight would not show otherwise.
    """
    weights = {}
    for name, shape in shapes(config).items():
        if name.endswith("norm.weight"):
            drawn = 1 + rng.integers(-32, 33, shape) / 2**7
        else:
            drawn = rng.integers(-128, 129, shape) / 2**10
        weights[name] = torch.from_numpy(drawn)
    if config["model_type"] == "qwen3_moe":
        separate_experts(weights, config)
    return {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}


def separate_experts(weights: dict[str, torch.Tensor], config: dict) -> None:
    """Let the first dimensions of the hidden states say which experts a token goes to.

    Little else writes to these dimensions or reads them, so routers choose by wide margins.
    """
    experts = config["num_experts"]
    embedding = weights["model.embed_tokens.weight"]
    embedding[:, :experts] = 0
    for token in range(config["vocab_size"]):
        first = token % experts
        second = (first + 1 + token // experts % (experts - 1)) % experts
        embedding[token, first], embedding[token, second] = 1.0, 0.875
    for name, tensor in weights.items():
        if name.endswith("mlp.gate.weight"):
            tensor /= 16
            tensor[:, :experts] = torch.eye(experts)
        elif name.endswith(("o_proj.weight", "o_proj.bias", "down_proj.weight")):
            tensor[:experts] /= 16


# --- Batches --------------------------------------------------------------------------------------


def make_sequence(length: int, chat: bool, config: dict, rng: np.random.Generator) -> dict:
    """Return tokens that can be predicted to a degree. In a chat only the answers are targets."""
    start, stride = rng.integers(0, config["vocab_size"]), rng.integers(1, 8)
    tokens = [int(start + i * stride + i * i % 5) % config["vocab_size"] for i in range(length)]
    targets = [1] * length
    if chat:  # turns of 2 to 6 tokens; the last one is an answer
        turns: list[int] = []
        answers = 1
        while len(turns) < length:
            turns = [answers] * int(rng.integers(2, 7)) + turns
            answers = 1 - answers
        targets = turns[-length:]
    targets[0] = 0
    return {"tokens": tokens, "targets": targets}


def make_micro_batch(name: str, config: dict, rng: np.random.Generator) -> list[dict]:
    """Return the sequences of a micro-batch. Lengths and numbers of targets differ widely."""
    longest = int(rng.integers(5, LONGEST + 1))
    if name == "packed":
        lengths, room = [], int(rng.integers(POSITIONS // 4, POSITIONS + 1))
        while room >= 4:
            lengths.append(min(int(rng.integers(4, longest + 1)), room + 1))
            room -= lengths[-1] - 1
    else:
        number = int(rng.integers(1, POSITIONS // (longest - 1) + 1))
        lengths = [longest, *rng.integers(max(3, longest - 3), longest + 1, number - 1)]
    return [make_sequence(int(length), name == "chat", config, rng) for length in lengths]


def make_batches(name: str, config: dict, rng: np.random.Generator) -> dict:
    """Return what batches.json holds."""
    hyper = {
        "learning_rate": 4e-3,
        "min_learning_rate": 4e-4,
        "warmup_steps": 3,
        "steps": STEPS,
        "betas": [0.9, 0.95],
        "eps": 1e-8,
        "weight_decay": 0.5,  # large, so that it shows in a few steps
        "grad_clip": {"moe": 0.8, "chat": 1.5}.get(name, 1.2),  # clips some of the steps
        "decay": [
            tensor
            for tensor, shape in shapes(config).items()
            if len(shape) > 1 and tensor != "model.embed_tokens.weight"
        ],
        "packed": name == "packed",
    }
    steps = [
        [make_micro_batch(name, config, rng) for _ in range(MICRO_BATCHES)] for _ in range(STEPS)
    ]
    return {"hyper": hyper, "steps": steps}


# --- Forward, in float64 --------------------------------------------------------------------------

Weights = dict[str, torch.Tensor]


def linear(w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    bias = w.get(f"{name}.bias", torch.zeros((), dtype=x.dtype))
    return x @ w[f"{name}.weight"].T + bias


def rms_norm(w: Weights, name: str, x: torch.Tensor, config: dict) -> torch.Tensor:
    mean_square = x.pow(2).mean(-1, keepdim=True)
    return x / (mean_square + config["rms_norm_eps"]).sqrt() * w[f"{name}.weight"]


def rotate(x: torch.Tensor, positions: torch.Tensor, config: dict) -> torch.Tensor:
    """Apply rotary embeddings to x, [length, heads, head size], as Hugging Face lays them out."""
    half = x.shape[-1] // 2
    frequencies = config["rope_theta"] ** -(torch.arange(half, dtype=x.dtype) / half)
    angles = positions[:, None, None] * frequencies  # [length, 1, half]
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attention(
    w: Weights, name: str, x: torch.Tensor, positions: torch.Tensor, config: dict
) -> torch.Tensor:
    """Causal attention; queries share the heads of keys and values in groups."""
    length, size = len(x), config["head_dim"]
    q, k, v = (linear(w, f"{name}.{part}_proj", x).view(length, -1, size) for part in "qkv")
    if f"{name}.q_norm.weight" in w:
        q, k = (rms_norm(w, f"{name}.{p}_norm", t, config) for p, t in (("q", q), ("k", k)))
    q, k = rotate(q, positions, config), rotate(k, positions, config)
    groups = config["num_attention_heads"] // config["num_key_value_heads"]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(size)
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    probabilities = scores.masked_fill(later, -math.inf).softmax(dim=-1)
    mixed = torch.einsum("hqk,khd->qhd", probabilities, v).flatten(1)
    return linear(w, f"{name}.o_proj", mixed)


def feed_forward(w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    gate, up = linear(w, f"{name}.gate_proj", x), linear(w, f"{name}.up_proj", x)
    return linear(w, f"{name}.down_proj", silu(gate) * up)


def mixture(w: Weights, name: str, x: torch.Tensor, config: dict) -> torch.Tensor:
    """Send each token to the experts with the largest router logits, and add their outputs."""
    logits = linear(w, f"{name}.gate", x)  # [length, experts]
    chosen = logits.topk(config["num_experts_per_tok"] + 1)
    margins = chosen.values[:, -2] - chosen.values[:, -1]
    assert margins.min() > MARGIN, "rounding could change which experts a token goes to"
    probabilities = logits.softmax(dim=-1)
    picked = torch.zeros_like(logits).scatter(1, chosen.indices[:, :-1], 1.0)
    shares = probabilities * picked
    shares = shares / shares.sum(dim=-1, keepdim=True)
    outputs = [
        shares[:, expert, None] * feed_forward(w, f"{name}.experts.{expert}", x)
        for expert in range(config["num_experts"])
    ]
    return sum(outputs)


def forward(w: Weights, tokens: torch.Tensor, positions: torch.Tensor, config: dict):
    """Return the logits of one sequence, [length, vocabulary]."""
    x = w["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        normed = rms_norm(w, f"{name}.input_layernorm", x, config)
        x = x + attention(w, f"{name}.self_attn", normed, positions, config)
        normed = rms_norm(w, f"{name}.post_attention_layernorm", x, config)
        if config["model_type"] == "qwen3_moe":
            x = x + mixture(w, f"{name}.mlp", normed, config)
        else:
            x = x + feed_forward(w, f"{name}.mlp", normed)
    x = rms_norm(w, "model.norm", x, config)
    return x @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T


def compare_with_transformers(folder: Path, micro_batches: list[list[dict]]) -> None:
    """Check the logits of some micro-batches, on the weights as they are in the folder."""
    config = json.loads((folder / "config.json").read_text())
    weights = {n: x.double() for n, x in load_file(folder / "model.safetensors").items()}
    model = AutoModelForCausalLM.from_pretrained(folder)
    for tokens, _, positions in sum(map(rows, micro_batches), []):
        with torch.no_grad():
            wanted = model(tokens[None]).logits[0]
        away = (forward(weights, tokens, positions, config) - wanted).abs().max().item()
        if away > 1e-6:
            sys.exit(f"error: {folder}: the forward is {away:.0e} from that of transformers")


# --- The plain loop -------------------------------------------------------------------------------


def rows(micro_batch: list[dict]) -> list[list[torch.Tensor]]:
    """Return tokens, labels and positions of each sequence, which is a row of its own."""
    found = []
    for sequence in micro_batch:
        tokens, targets = torch.tensor(sequence["tokens"]), torch.tensor(sequence["targets"])
        labels = torch.where(targets == 1, tokens, IGNORED)
        tokens, labels = tokens[:-1], labels[1:]
        positions = torch.arange(len(tokens))
        found.append([tokens, labels, positions])
    return found


def count_targets(micro_batch: list[dict]) -> int:
    return sum(int((labels != IGNORED).sum()) for _, labels, _ in rows(micro_batch))


def summed_loss(w: Weights, micro_batch: list[dict], config: dict) -> torch.Tensor:
    """Return the cross entropy summed over the targets of a micro-batch."""
    total = torch.zeros((), dtype=torch.float64)
    for tokens, labels, positions in rows(micro_batch):
        logits = forward(w, tokens, positions, config)
        total = total + cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    return total


def learning_rate(step: int, hyper: dict) -> float:
    """Linear warm-up, then cosine decay to the minimum, which the last step reaches."""
    peak, least = hyper["learning_rate"], hyper["min_learning_rate"]
    warmup, steps = hyper["warmup_steps"], hyper["steps"]
    if step <= warmup:
        return peak * step / warmup
    progress = (step - warmup) / (steps - warmup)
    return least + (peak - least) * (1 + math.cos(math.pi * progress)) / 2


def train(weights: Weights, batches: dict, config: dict) -> tuple[list[dict], Weights]:
    """Train; returns the log and the weights after the last step."""
    hyper, steps = batches["hyper"], batches["steps"]
    w = {name: tensor.double().requires_grad_() for name, tensor in weights.items()}
    decayed = [p for name, p in w.items() if name in hyper["decay"]]
    others = [p for name, p in w.items() if name not in hyper["decay"]]
    groups = [
        {"params": decayed, "weight_decay": hyper["weight_decay"]},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=tuple(hyper["betas"]), eps=hyper["eps"])
    log = []
    for step in range(1, hyper["steps"] + 1):
        micro_batches = steps[step - 1]
        of_ranks = [micro_batches[rank::RANKS] for rank in range(RANKS)]
        targets = sum(count_targets(micro_batch) for mine in of_ranks for micro_batch in mine)
        loss = 0.0
        for mine in of_ranks:
            for micro_batch in mine:
                summed = summed_loss(w, micro_batch, config)
                scale = 1 / targets
                (summed * scale).backward()
                loss += summed.item() / targets
        norm = clip_grad_norm_(w.values(), hyper["grad_clip"]).item()
        rate = learning_rate(step, hyper)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        log.append({"step": step, "loss": loss, "grad_norm": norm, "learning_rate": rate})
    return log, w


# --- Mistakes -------------------------------------------------------------------------------------


def edited_train(mistake: Mistake, ranks: int, rank: int = 0):
    """Return `train` of a copy of this file with the mistake."""
    text = mistake.apply(Path(__file__).read_text())
    module = {"__name__": "edited", "__file__": __file__}
    exec(compile(text, mistake.name, "exec"), module)
    module |= {"RANKS": ranks, "RANK": rank, "MARGIN": 0.0}
    return module["train"]


def run_mistake(
    mistake: Mistake, ranks: int, weights: Weights, batches: dict, config: dict
) -> list[dict]:
    """Return the log of the edited loop."""
    logs = [
        edited_train(mistake, ranks, rank)(weights, batches, config)[0]
        for rank in range(ranks if mistake.alone else 1)
    ]
    log = logs[0]
    for step, line in enumerate(log):
        line["loss"] = sum(other[step]["loss"] for other in logs)
    return log


def difference(log: list[dict], other: list[dict]) -> float:
    """Return the largest relative difference of losses and gradient norms."""
    pairs = [(a[key], b[key]) for a, b in zip(log, other) for key in ("loss", "grad_norm")]
    return max(abs(a / b - 1) for a, b in pairs)


def make_mistakes(
    name: str, right: list[dict], weights: Weights, batches: dict, config: dict
) -> list[dict]:
    """Return the logs of all mistakes that change the numbers in this folder."""
    recorded = json.loads((HERE / "recorded.json").read_text())
    found: list[dict] = []
    for mistake in MISTAKES:
        if name not in mistake.folders:
            continue
        logs = [
            (log["ranks"], log["steps"])
            for log in recorded
            if mistake.edits is None and (log["folder"], log["name"]) == (name, mistake.name)
        ]
        if mistake.edits is not None:
            groups = [[n] for n in mistake.ranks] if mistake.per_ranks else [mistake.ranks]
            logs = [(g, run_mistake(mistake, g[0], weights, batches, config)) for g in groups]
        for ranks, log in logs:
            about = {
                "name": mistake.name,
                "sentence": mistake.sentence,
                "thread": mistake.links(),
                "ranks": list(ranks),
                "recorded": mistake.edits is None,
            }
            if difference(log, right) > 1e-5:
                found.append(about | {"steps": log})
    return found


def rounded(value):
    """Return JSON data with 12 digits of each float. Others differ between machines."""
    if isinstance(value, float):
        return float(f"{value:.12g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def dump(value, indent: str = "") -> str:
    """Return JSON whose lists and objects are on one line if they are short."""
    flat = json.dumps(value)
    if len(flat) < 300 or not isinstance(value, dict | list):
        return flat
    inner = indent + " "
    if isinstance(value, dict):
        items = [f"{json.dumps(key)}: {dump(item, inner)}" for key, item in value.items()]
        opening, closing = "{}"
    else:
        items = [dump(item, inner) for item in value]
        opening, closing = "[]"
    lines = ",\n".join(inner + item for item in items)
    return f"{opening}\n{lines}\n{indent}{closing}"


def make(name: str, folder: Path) -> None:
    """Write a folder of reference runs."""
    config = FOLDERS[name]
    rng = np.random.default_rng(list(FOLDERS).index(name))
    weights, batches = make_weights(config, rng), make_batches(name, config, rng)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "batches.json").write_text(dump(batches) + "\n")
    compare_with_transformers(folder, batches["steps"][0])

    right, trained = train(weights, batches, config)
    expected = {
        "right": right,
        "sums": {n: [p.sum().item(), p.abs().sum().item()] for n, p in trained.items()},
        "bf16_tolerance": BF16_TOLERANCE[name],
        "mistakes": make_mistakes(name, right, weights, batches, config),
    }
    (folder / "expected.json").write_text(dump(rounded(expected)) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:] or FOLDERS:
        make(name, HERE / name)
