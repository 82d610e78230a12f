"""Shared by the programs of tools/ and bench/: command line, launches, the parts of a script.

The parts are as the script's `main` makes them. Importing this puts the scripts on the path. It is
not a program.
"""

import argparse
import gc
import importlib
import inspect
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as run.launch
STRATEGIES = ["ddp", "fsdp1", "fsdp2"]
MUON = ["fsdp2_muon"]
# A group of ranks shares each layer, each sequence, the blocks, or the experts.
INSIDE = ["fsdp2_tp", "fsdp2_cp", "fsdp2_pp", "fsdp2_ep", "fsdp2_nd"]


def parser(docstring: str | None) -> argparse.ArgumentParser:
    """Return a parser whose --help prints the docstring. Unknown words end the program with 2."""
    return argparse.ArgumentParser(
        description=docstring,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def positive(word: str) -> int:
    """Parse a whole number of at least 1, for `add_argument(type=...)`."""
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number above 0")
    return int(word)


def read(docstring: str | None, **defaults: int) -> list[int]:
    """Return the positive whole numbers of the command line, in this order, or their defaults."""
    reader = parser(docstring)
    for name, default in defaults.items():
        reader.add_argument(name, metavar=name.upper(), nargs="?", type=positive, default=default)
    return [*vars(reader.parse_args()).values()]


def torchrun(ranks: int, *words: Any, python: str = sys.executable) -> list[str]:
    """Return the command that launches ranks of a program on this machine."""
    command = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*command, *map(str, words)]


def plotting() -> Any:
    """Return matplotlib's pyplot, set up to write files only."""
    try:
        import matplotlib
    except ImportError:
        sys.exit("error: pictures need matplotlib: pip install -r requirements-dev.txt")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def finish(figure: Any, path: str | Path) -> None:
    """Save a figure without the frame's top and right line."""
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)


def qwen2(width: int, inner: int, blocks: int, heads: int, groups: int, vocabulary: int, tied=True):
    """Return a model's shape: hidden and feed-forward size, blocks, heads, key/value heads."""
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=inner,
        num_hidden_layers=blocks, num_attention_heads=heads, num_key_value_heads=groups,
        tie_word_embeddings=tied,
    )  # fmt: skip


# --- What a script's `main` makes -----------------------------------------------------------------
# What differs between the scripts' mains is known here alone. Libraries are imported inside
# functions, because the peers of bench/compare.py lack some of them.

# Of scripts that fine-tune: what marks a turn, and the default peak learning rates of small and
# large models.
MARKS = {"fsdp2_sft": "new tokens", "fsdp2_lora": "text"}
RATES = {"fsdp2_sft": (2e-3, 2e-5), "fsdp2_lora": (1e-2, 2e-4), "fsdp2_grpo": (5e-4, 1e-6)}


def call(function: Callable, **values: Any) -> Any:
    """Call a script's function with the values that its parameters name."""
    names = inspect.signature(function).parameters
    return function(**{name: values[name] for name in values if name in names})


def script_and_config(docstring: str | None) -> tuple[Any, Any]:
    """Return the script that the command line names, and its Config of the words that follow."""
    from common import Refusal
    from run import parse_config

    reader, names = parser(docstring), STRATEGIES + MUON + INSIDE
    reader.add_argument("script", choices=[f"{name}_pretrain.py" for name in names])
    given, words = reader.parse_known_args()
    script = importlib.import_module(Path(given.script).stem)
    sys.argv = [given.script, *words]
    try:
        return script, parse_config(script.Config)
    except Refusal as refusal:
        sys.exit(f"error: {refusal}")


def dp_rank_and_size(script: Any, config: Any) -> tuple[int, int]:
    """Return this rank's index among the data-parallel ranks, and how many there are."""
    if hasattr(script, "dp_rank_and_size"):
        return script.dp_rank_and_size(config)
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def batches_class(script: Any) -> type:
    """Return the class of the script's batches."""
    import common
    import conversations

    return conversations.ConversationBatches if script.__name__ in MARKS else common.Batches


def load_data(script: Any, config: Any, kind: type | None = None) -> SimpleNamespace:
    """Return `tokenizer`, `documents`, `training` and `validation` batches, and `model_config`.

    Args:
        kind: the class of the batches, if not the script's own.
    """
    import common
    import conversations

    os.environ.setdefault("RANK", "0")  # `common.say` prints on rank 0
    kind = kind or batches_class(script)
    if script.__name__ in MARKS:
        marks = MARKS[script.__name__]
        tokenizer, turn_end, known_ids = conversations.chat_tokenizer(config, marks)
        columns, function = conversations.COLUMNS, script.tokenize_conversation
        more = {"corpora": conversations.CORPORA}
        ends = conversations.base_generation(config, tokenizer, turn_end).eos_token_id
        shorten = conversations.truncate
    else:
        tokenizer = common.load_tokenizer(config.tokenizer)
        known_ids, ends = common.vocabulary_size(tokenizer), tokenizer.eos_token_id
        columns, function, more = [config.text_column], common.tokenize_text, {}
        shorten = common.Sequences.split
    documents = common.load_documents(config, columns, function, tokenizer, **more)
    data = SimpleNamespace(tokenizer=tokenizer, documents=documents)
    parts = common.train_validation_split(documents, config.eval_tokens)
    data.training, data.validation = (
        kind(shorten(part, config.max_length), config, tokenizer.eos_token_id) for part in parts
    )
    added = common.vocabulary_size(tokenizer) - known_ids
    data.model_config = architecture(script, config, known_ids, added, ends)
    return data


def short_conversations(files: list[str], longest: int) -> list[list[dict[str, str]]]:
    """Return embedded conversations of fewer characters, as messages.

    Only in ASCII, so that each character is one byte.
    """
    from conversations import docstring_conversations

    found = []
    for row in docstring_conversations(files):
        texts = {"system": row["system"], "user": row["prompt"], "assistant": row["completion"]}
        text = "".join(texts.values())
        if len(text) < longest and text.isascii():
            found.append([{"role": role, "content": text} for role, text in texts.items()])
    return found


def architecture(
    script: Any, config: Any, known_ids: int, added: int | None = None, ends: Any = None
) -> Any:
    """Return the script's model configuration for a tokenizer with so many ids.

    Args:
        added: ids of the chat template; by default as many as fine-tuning adds to a tokenizer.
        ends: ids that end a text.
    """
    import conversations
    from model import build_config

    model_config = build_config(config, known_ids, ends)
    if script.__name__ == "fsdp2_sft":
        tokens = [*conversations.TURN, *conversations.INSIDE, "<|pad|>"]
        vocabulary = known_ids + (len(tokens) if added is None else added)
        if vocabulary > model_config.vocab_size:
            model_config.vocab_size = math.ceil(vocabulary / 64) * 64
    return model_config


def build_model(script: Any, model_config: Any, config: Any) -> Any:
    """Return the script's model on the meta device."""
    import torch

    import model

    if script.__name__ == "fsdp2_grpo":
        return script.build_policy(model_config, config)
    loss = None
    if script.__name__ == "fsdp2_tp_pretrain" or getattr(config, "tensor_parallel", 1) > 1:
        loss = script.vocabulary_parallel_loss
    made = model.build_model(model_config, config, loss)
    if script.__name__ == "fsdp2_lora":
        with torch.device("meta"):
            script.add_adapters(made, config)
    return made


def build(script: Any, model_config: Any, config: Any, device: Any) -> tuple[Any, Any]:
    """Return the script's model, parallelized and initialized, and its optimizer."""
    from model import weight_decay_names
    from run import set_learning_rates

    model = build_model(script, model_config, config)
    size = model.num_parameters()
    if rates := RATES.get(script.__name__):
        set_learning_rates(config, rates[size >= 10_000_000], ratio=10)
    elif hasattr(script, "default_learning_rate"):
        set_learning_rates(config, script.default_learning_rate(config, size))
    else:
        default = 3e-3 if size < 10_000_000 else 3e-4
        set_learning_rates(config, default / 10 if config.init_from else default)
    if hasattr(script, "set_momentum"):
        script.set_momentum(config, model)
    decayed = weight_decay_names(model)
    model = script.parallelize(model, config, device)
    return model, call(script.build_optimizer, model=model, decayed=decayed, config=config)


def evaluate(script: Any, model: Any, validation: Any, config: Any, device: Any) -> float:
    """Return the mean loss of the validation batches."""
    run = SimpleNamespace(config=config, device=device, stops_validation=lambda: False)
    return script.evaluate(model, validation, run)


class Session:
    """A script's data, model and optimizer as its `main` makes them, on one rank of a launch.

    `full` is the model before it is parallelized, on the meta device.

    Args:
        data: of `load_data`, if several sessions share it.
        kind: the class of the batches, if not the script's own.
    """

    def __init__(self, script: Any, config: Any, data: Any = None, kind: type | None = None):
        import torch
        import torch.distributed as dist

        import common

        self.script, self.config = script, config
        self.data = data or load_data(script, config, kind)
        if not dist.is_initialized():
            script.init_process_group(config)
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", torch.cuda.current_device())
        model_config = self.data.model_config
        self.full = build_model(script, model_config, config)
        self.model, self.optimizer = build(script, model_config, config, self.device)
        if config.init_from:
            common.load_weights(self.model, config.init_from)

    def batches(self, first: int, last: int) -> Iterator[Any]:
        """Yield this rank's part of the global batches of the steps [first, last)."""
        from run import micro_batches_per_rank

        dp_rank, dp_size = dp_rank_and_size(self.script, self.config)
        number = micro_batches_per_rank(self.config, dp_size)
        stream = self.data.training.stream(0, number, dp_rank, dp_size)
        return itertools.islice(stream, first, last)

    def measured_step(self, batch: Any, step: int) -> dict[str, float]:
        """Run a step, with the learning rate of the step of this number."""
        model, optimizer = self.model, self.optimizer
        return self.script.train_step(model, optimizer, batch, step, self.config, self.device)

    def train_step(self, batch: Any, step: int = 1) -> float:
        """Run a step; returns its mean loss."""
        return self.measured_step(batch, step)["loss"]

    def run(self) -> tuple[Any, Any]:
        """Return the run of the script's `main`, which has not begun, and its checkpoints."""
        from common import Checkpoints
        from model import count_flops
        from run import Run

        config, data, flops = self.config, self.data, count_flops(self.full)
        run = Run(config, self.full, flops, data.tokenizer, data.documents, self.device)
        return run, Checkpoints(config, run.directory, run.facts, run.save_files, self.device)

    def steps(self) -> Iterator[tuple[Any, float]]:
        """Run the loop of `main` without validation and checkpoints: each step's batch and loss."""
        from model import seed_by_name
        from run import max_over_ranks

        (run, checkpoints), config = self.run(), self.config
        run.begin(checkpoints, {"step": 0, "metrics_bytes": 0}, "as in a benchmark", "steps")
        batches, tokens = self.batches(0, config.steps), 0
        for step in range(1, config.steps + 1):
            started = time.perf_counter()
            batch = next(batches)
            data_seconds = time.perf_counter() - started
            seed_by_name(config.seed, step, run.rank)
            measured = self.measured_step(batch, step)
            tokens += batch.num_targets
            data_seconds, _ = max_over_ranks(data_seconds, run.stop_signals)
            run.log_step(step, batch, started, data_seconds, tokens=tokens, **measured)
            yield batch, measured["loss"]

    def close(self) -> None:
        """Drop the model and all that refers to it."""
        del self.model, self.optimizer
        gc.collect()


def leave() -> None:
    """End this rank in order, once nothing refers to a model any more."""
    import torch.distributed as dist

    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)
