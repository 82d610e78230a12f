"""Build and run the parts of a script as its `main` does, with the helpers of tools/shared.py."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from shared import build_model, call, dp_rank_and_size, evaluate  # noqa: E402, F401

import common  # noqa: E402
import model as shared_model  # noqa: E402
from run import micro_batches_per_rank  # noqa: E402


def build_config(config: Any, tokenizer: common.Tokenizer) -> Any:
    """Return the architecture of a pretraining script."""
    vocabulary_size = common.vocabulary_size(tokenizer)
    return shared_model.build_config(config, vocabulary_size, tokenizer.eos_token_id)


def build_optimizer(script: Any, model: Any, decayed: set, config: Any) -> Any:
    return call(script.build_optimizer, model=model, decayed=decayed, config=config)


def stream(script: Any, config: Any, training: common.Batches) -> Iterator[common.GlobalBatch]:
    """Yield this rank's global batches from the first step on."""
    dp_rank, dp_size = dp_rank_and_size(script, config)
    return training.stream(0, micro_batches_per_rank(config, dp_size), dp_rank, dp_size)
