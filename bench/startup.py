"""CPU seconds from the start of a program to the end of its first step, beside a bare FSDP2 loop.

    python bench/startup.py [ROUNDS]

Both are one rank that trains the default model on the default micro-batches. The bare loop reads
token ids from a flat file, and has no flags, checks, metrics or checkpoints. They take turns; a row
has the best and the median of ROUNDS rounds (5 by default). Runs the script once before that, so
that the data is tokenized.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import _tools  # noqa: F401
import numpy as np
import shared

OURS = """
import os, sys, time
import fsdp2_pretrain
step = fsdp2_pretrain.train_step

def first(*arguments):
    step(*arguments)
    print("CPU seconds", time.process_time(), flush=True)
    os._exit(0)

fsdp2_pretrain.train_step = first
sys.argv = ["fsdp2_pretrain.py", "--run_dir", sys.argv[1] + "/run"]
fsdp2_pretrain.launch(fsdp2_pretrain.main)
"""

BARE = """
import os, sys, time
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
dist.init_process_group("gloo")
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1]))
for block in model.model.layers:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
ids = np.fromfile(sys.argv[1] + "/ids.bin", np.uint16).astype(np.int64)
for micro_batch in torch.from_numpy(ids).view(2, 4, 513):
    logits = model(input_ids=micro_batch[:, :-1], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), micro_batch[:, 1:].flatten())
    loss.backward()
optimizer.step()
print("CPU seconds", time.process_time(), flush=True)
os._exit(0)
"""


def cpu_seconds(program: str, folder: str) -> float:
    environment = os.environ | {"PYTHONPATH": str(shared.ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program, folder], env=environment, cwd=shared.ROOT,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return float(done.stdout.split("CPU seconds")[1].split()[0])


def main() -> None:
    [rounds] = shared.read(__doc__, rounds=5)
    from transformers import AutoConfig

    from model import SHAPES

    shape = SHAPES["tiny"]
    with tempfile.TemporaryDirectory() as folder:
        AutoConfig.for_model(vocab_size=320, **shape).save_pretrained(folder)
        ids = np.random.default_rng(0).integers(0, 256, 2 * 4 * 513)
        Path(folder, "ids.bin").write_bytes(ids.astype(np.uint16).tobytes())
        cpu_seconds(OURS, folder)
        pairs = [(cpu_seconds(OURS, folder), cpu_seconds(BARE, folder)) for _ in range(rounds)]
    ours, bare = zip(*pairs)
    print("| to the end of step 1 | best | median |\n| --- | --- | --- |")
    for name, seconds in (("fsdp2_pretrain.py", ours), ("bare loop", bare)):
        print(f"| {name} | {min(seconds):.2f} s | {statistics.median(seconds):.2f} s |")
    ratios = min(ours) / min(bare), statistics.median(ours) / statistics.median(bare)
    print("| ratio | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")


if __name__ == "__main__":
    main()
