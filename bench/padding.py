"""How well the batch plan fills its token budget on the embedded corpora, and how long it takes.

    python bench/padding.py [DOCUMENTS]

Prints which part of an epoch's positions is padding, and which part of its token budget
(micro-batches x --micro_batch_tokens) is tokens: bucketed, in multiples of 64, and packed. Then the
seconds to plan an epoch of DOCUMENTS documents of lognormal length (10,000,000 by default).
"""

import math
import time
from types import SimpleNamespace

import _tools  # noqa: F401
import numpy as np
import shared

import common
import fsdp2_pretrain
import fsdp2_sft
from run import Flags

PLANS = {
    "bucketed": {},
    "bucketed, multiples of 64": {"pad_to_multiple_of": 64},
    "packed": {"batching": "packed"},
}


def fill(batches: common.Batches) -> tuple[float, float]:
    """Return the padding in an epoch's positions, and how much of its token budget is tokens."""
    plan = batches.plan(0)
    tokens = batches.sequences.lengths.sum()
    positions = sum(math.prod(batches.shape(indices)) for indices in plan)
    return 1 - tokens / positions, tokens / (len(plan) * batches.config.micro_batch_tokens)


def main() -> None:
    [documents] = shared.read(__doc__, documents=10**7)
    print("| corpus | plan | padding | budget filled |\n| --- | --- | --- | --- |")
    for script in (fsdp2_pretrain, fsdp2_sft):
        for plan, flags in PLANS.items():
            config = script.Config(**flags)
            padding, filled = fill(shared.load_data(script, config).training)
            print(f"| {config.dataset} | {plan} | {padding:.1%} | {filled:.1%} |")
    rng = np.random.default_rng(0)
    length = np.minimum(rng.lognormal(5.5, 1, documents).astype(np.int64) + 1, 2048)
    for batching in ("bucketed", "packed"):
        config = Flags(batching=batching, micro_batch_tokens=8192)
        started = time.perf_counter()
        common.Batches(SimpleNamespace(lengths=length), config, 0).plan(0)
        print(f"plan of {documents:,} documents, {batching}: {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
