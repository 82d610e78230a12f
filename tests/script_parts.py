"""Build and run the parts of a script as its `main` does. The scripts differ in their signatures."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

import common
import model as shared_model
from run import micro_batches_per_rank


def call(function: Callable, **values: Any) -> Any:
    """Call a function with those of these values that it takes."""
    taken = inspect.signature(function).parameters
    return function(**{name: value for name, value in values.items() if name in taken})


def build_config(config: Any, tokenizer: common.Tokenizer) -> Any:
    """Return the architecture of a pretraining script."""
    vocabulary_size = common.vocabulary_size(tokenizer)
    return shared_model.build_config(config, vocabulary_size, tokenizer.eos_token_id)


def build_model(script: Any, model_config: Any, config: Any) -> Any:
    """Return the script's model on the meta device."""
    build = getattr(script, "build_model", shared_model.build_model)
    loss = getattr(script, "vocabulary_parallel_loss", None)  # of tensor parallelism
    return build(model_config, config, loss) if loss else build(model_config, config)


def build(script: Any, model_config: Any, config: Any, device: Any) -> tuple[Any, Any]:
    """Return the script's model, parallelized, and its optimizer."""
    model = build_model(script, model_config, config)
    decayed = shared_model.weight_decay_names(model)
    model = script.parallelize(model, config, device)
    return model, build_optimizer(script, model, decayed, config)


def build_optimizer(script: Any, model: Any, decayed: set, config: Any) -> Any:
    return call(script.build_optimizer, model=model, decayed=decayed, config=config)


def evaluate(script: Any, model: Any, validation: Any, config: Any, device: Any) -> float:
    return call(
        script.evaluate, model=model, validation=validation, config=config, device=device
    )


def dp_rank_and_size(script: Any, config: Any) -> tuple[int, int]:
    """Return this rank's index among the data-parallel ranks, and how many there are."""
    if hasattr(script, "dp_rank_and_size"):
        return script.dp_rank_and_size(config)
    return dist.get_rank(), dist.get_world_size()


def stream(script: Any, config: Any, training: common.Batches) -> Iterator[common.GlobalBatch]:
    """Yield this rank's global batches from the first step on."""
    dp_rank, dp_size = dp_rank_and_size(script, config)
    return training.stream(0, micro_batches_per_rank(config, dp_size), dp_rank, dp_size)
