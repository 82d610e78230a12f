"""What the programs here share: their command line, launches, and a script's parts made as it does.

Importing it puts the scripts on the path. It is no program.
"""

import argparse
import gc
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
STRATEGIES = ["ddp", "fsdp1", "fsdp2"]
# Ranks share layers, rows, the depth or experts.
INSIDE = ["fsdp2_tp", "fsdp2_cp", "fsdp2_pp", "fsdp2_ep"]


def parser(docstring: str | None) -> argparse.ArgumentParser:
    """A parser whose --help prints the docstring; what it cannot read ends the program with 2."""
    return argparse.ArgumentParser(
        description=docstring,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def positive(word: str) -> int:
    """A whole number of at least 1, for `add_argument(type=...)`."""
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number above 0")
    return int(word)


def read(docstring: str | None, **defaults: int) -> list[int]:
    """The positive whole numbers that were given, in that order, or their defaults."""
    reader = parser(docstring)
    for name, default in defaults.items():
        reader.add_argument(name, metavar=name.upper(), nargs="?", type=positive, default=default)
    return [*vars(reader.parse_args()).values()]


def torchrun(ranks: int, *words: Any, python: str = sys.executable) -> list[str]:
    """The command that launches so many ranks of a program on this machine."""
    command = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*command, *map(str, words)]


def plotting() -> Any:
    """matplotlib's pyplot, for files alone."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def finish(figure: Any, path: str | Path) -> None:
    """Save a figure without the frame's upper and right line."""
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)


def qwen2(width: int, inner: int, blocks: int, heads: int, groups: int, vocabulary: int, tied=True):
    """A model's shape: hidden and feed-forward size, blocks, heads, key/value heads."""
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=inner,
        num_hidden_layers=blocks, num_attention_heads=heads, num_key_value_heads=groups,
        tie_word_embeddings=tied,
    )  # fmt: skip


# --- What a script's `main` makes -----------------------------------------------------------------
# (The libraries are imported where they are used, as the peers of bench/compare.py lack some.)


def script_and_config(docstring: str | None) -> tuple[Any, Any]:
    """The script that a launch names on its command line, and its Config of the words after it."""
    import common

    reader = parser(docstring)
    reader.add_argument("script", choices=[f"{name}_pretrain.py" for name in STRATEGIES + INSIDE])
    given, words = reader.parse_known_args()
    script = importlib.import_module(Path(given.script).stem)
    sys.argv = [given.script, *words]
    try:
        return script, common.parse_config(script.Config)
    except common.Refusal as refusal:
        sys.exit(f"error: {refusal}")


def load_data(script: Any, config: Any, kind: type | None = None) -> SimpleNamespace:
    """`tokenizer`, `rows`, `training` and `validation`, `model_config`.

    Batches are of class `kind`, or of the script's own.
    """
    import common

    if hasattr(script, "chat_tokenizer"):
        tokenizer, _ = script.chat_tokenizer(config.tokenizer)
        columns = script.CONVERSATIONS
        function = script.chat_rows
    else:
        tokenizer = common.load_tokenizer(config.tokenizer)
        columns = [config.text_column]
        function = common.text_rows
    rows = common.load_rows(
        config.dataset,
        config.dataset_config,
        config.dataset_split,
        columns,
        function,
        tokenizer,
        config.max_length,
    )
    training, validation = (
        (kind or getattr(script, "ConversationBatches", common.Batches))(
            part.lengths,
            part.num_labels,
            part.read,
            batching=config.batching,
            max_length=config.max_length,
            micro_batch_tokens=config.micro_batch_tokens,
            pad_to_multiple_of=config.pad_to_multiple_of,
            padding_id=tokenizer.eos_token_id,
            seed=config.seed,
        )
        for part in rows.split()
    )
    return SimpleNamespace(
        tokenizer=tokenizer,
        rows=rows,
        training=training,
        validation=validation,
        model_config=script.build_model_config(config, len(tokenizer), tokenizer.eos_token_id),
    )


def build(script: Any, config: Any, model_config: Any, device: Any) -> tuple[Any, Any]:
    """The script's model, ready to train, and its optimizer."""
    model = script.build_model(config, model_config)
    decayed = script.weight_decay_names(model)
    model = script.parallelize(model, config, device)
    return model, script.build_optimizer(model, decayed, config)


def make_run(config: Any, data: SimpleNamespace, size: Any, device: Any) -> Any:
    """The run of a script's `main`; `size` is its ModelSize."""
    import torch.distributed as dist

    import common

    contents = common.describe_contents(data.model_config, data.tokenizer, data.rows)
    ranks = dist.get_rank(), dist.get_world_size()
    return common.Run(vars(config), size.num_parameters, contents, device, *ranks)


class Session:
    """A script's data, model and optimizer as its `main` makes them, on one rank of a launch.

    Args:
        data: of `load_data`, where several sessions share it.
        kind: the class of the batches, if not common's.
    """

    def __init__(self, script: Any, config: Any, data: Any = None, kind: type | None = None):
        import torch
        import torch.distributed as dist

        import common

        self.script, self.config = script, config
        self.data = data or load_data(script, config, kind)
        if not dist.is_initialized():
            script.init_process_group(config)
        self.device = torch.device("cuda" if script.CUDA else "cpu")
        self.size = script.ModelSize(script.build_model(config, self.data.model_config))
        self.model, self.optimizer = build(script, config, self.data.model_config, self.device)
        self.state = script.State(self.model, self.optimizer)
        if config.init_from:
            common.load_weights(self.model, config.init_from)

    def batches(self, first: int, last: int) -> Iterator[Any]:
        """This rank's part of the global batches of the steps [first, last)."""
        number = self.config.global_batch_tokens // self.config.micro_batch_tokens
        part = self.script.data_parallel_rank_and_size(self.config)
        return self.data.training.stream(first, last, number, *part)

    def train_step(self, batch: Any, learning_rate: float = 0.0) -> float:
        """The mean loss of a step."""
        measured = self.script.train_step(
            self.model, self.optimizer, batch, learning_rate, self.config, self.device
        )
        return measured["loss"]

    def save_checkpoint(self, group: Any) -> Callable[[Path], None]:
        """What writes this moment's checkpoint to a directory."""
        data = self.data
        return self.script.save_checkpoint(
            self.state, data.model_config, data.tokenizer, self.config, group
        )

    def steps(self) -> Iterator[tuple[Any, float]]:
        """The loop of `main` without validation and checkpoints: each step's batch and loss."""
        import torch
        import torch.distributed as dist

        config, rank, ranks = self.config, dist.get_rank(), dist.get_world_size()
        run = make_run(config, self.data, self.size, self.device)
        run.begin(None, 0)
        batches, tokens = self.batches(0, config.steps), 0
        for step in range(1, config.steps + 1):
            started = time.perf_counter()
            batch = next(batches)
            waited = time.perf_counter() - started
            torch.manual_seed(config.seed + step * ranks + rank)
            learning_rate = self.script.learning_rate_at(step, config)
            measured = self.script.train_step(
                self.model, self.optimizer, batch, learning_rate, config, self.device
            )
            tokens += batch.num_labels
            run.log_step(
                batch, self.size.flops(batch), step=step, tokens=tokens, **measured,
                learning_rate=learning_rate, data_seconds=waited,
                step_seconds=time.perf_counter() - started,
            )  # fmt: skip
            run.should_stop()
            yield batch, measured["loss"]

    def close(self) -> None:
        """Drop the model and all that refers to it."""
        del self.model, self.optimizer, self.state
        gc.collect()


def leave() -> None:
    """End this rank in order, once nothing refers to a model any more."""
    import torch.distributed as dist

    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)
