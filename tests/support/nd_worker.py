"""Train with every mesh and mode of fsdp2_nd_pretrain.py, and the modes of FSDP2, in one launch.

See cases.py. test_nd.py checks it.
"""

import gc
from functools import partialmethod

import cases  # also adds the root to sys.path
import torch
import worker

import fsdp2_nd_pretrain
import fsdp2_pretrain


def main() -> None:
    device = fsdp2_pretrain.init_process_group(fsdp2_pretrain.Config(micro_batch_tokens=512))
    gc.freeze()
    # Graphs are traced and split. test_modes.py generates kernels.
    torch.nn.Module.compile = partialmethod(torch.nn.Module.compile, backend="aot_eager")

    def train(case: str, flags: dict) -> dict:
        script = fsdp2_pretrain if case.startswith("fsdp2") else fsdp2_nd_pretrain
        return worker.train(script, flags, device)

    cases.leave(cases.each(train))


if __name__ == "__main__":
    main()
