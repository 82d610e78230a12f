"""Run under torchrun: every mesh and mode of fsdp2_nd_pretrain.py, and the modes of FSDP2.

Writes what it saw to the JSON file given as its first argument, and test_nd.py checks that.
"""

import gc
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import worker  # also adds the root to sys.path

import fsdp2_nd_pretrain
import fsdp2_pretrain


def main() -> None:
    out, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    device = fsdp2_pretrain.init_process_group(fsdp2_pretrain.Config(micro_batch_tokens=512))
    gc.freeze()
    seen = {}
    for case, flags in cases.items():
        script = fsdp2_pretrain if case.startswith("fsdp2") else fsdp2_nd_pretrain
        seen[case] = worker.train(script, flags, device)
        gc.collect()
        torch._dynamo.reset()
    if dist.get_rank() == 0:
        out.write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
