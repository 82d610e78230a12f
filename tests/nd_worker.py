"""Train with every mesh and mode of fsdp2_nd_pretrain.py, and the modes of FSDP2, in one launch.

For conftest.launch, with two flags: --cases, JSON {case: flags}, and --out, the JSON file to write.
test_nd.py checks it.
"""

import gc
import json
import os
import sys
from functools import partialmethod
from pathlib import Path

import torch
import torch.distributed as dist
import worker  # also adds the root to sys.path

import fsdp2_nd_pretrain
import fsdp2_pretrain


def main() -> None:
    given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    device = fsdp2_pretrain.init_process_group(fsdp2_pretrain.Config(micro_batch_tokens=512))
    gc.freeze()
    # Graphs are traced and split. test_modes.py generates kernels.
    torch.nn.Module.compile = partialmethod(torch.nn.Module.compile, backend="aot_eager")
    seen = {}
    for case, flags in json.loads(given["--cases"]).items():
        script = fsdp2_pretrain if case.startswith("fsdp2") else fsdp2_nd_pretrain
        seen[case] = worker.train(script, flags, device)
        gc.collect()
        torch._dynamo.reset()
    if dist.get_rank() == 0:
        Path(given["--out"]).write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
