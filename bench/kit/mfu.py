"""Run settings of tools/gpu.py and more, each guarded: python mfu.py SET

Sets: core (as tools/gpu.py has them), more, sizes, large. Prints a line per setting as soon as it
is known, and writes gpu.json in $OUT, in the form of bench/results/gpu.json. Runs as the only rank,
without torchrun.
"""

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import kit

kit.alone()
import gpu  # noqa: E402 (tools/gpu.py)
import torch  # noqa: E402

SMALL = not gpu.CUDA
PACKED, EAGER = {"batching": "packed"}, {"compile": False}
SELECTIVE = {"activation_checkpointing": "selective"}
FULL = {"activation_checkpointing": "full"}


def positions(number: int) -> dict[str, Any]:
    return {"micro_batch_tokens": number if not SMALL else 2048}


def shape(name: str) -> dict[str, Any]:
    return {"model": str(kit.INPUTS / name) if not SMALL else "tiny"}


SETS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    # in the order of what matters most, because time may end
    "core": {
        name: gpu.SETTINGS[name]
        for name in (
            "FSDP2", "FSDP2, ragged, packed", "DDP", "FSDP2, ragged", "FSDP2, not compiled",
            "FSDP1", "FSDP2, selective checkpointing", "FSDP2, full checkpointing",
            "FSDP2, one sequence",
        )
    },
    "more": {
        "FSDP2, packed": ("fsdp2", PACKED),
        "FSDP2, ragged, packed, not compiled": ("fsdp2", PACKED | EAGER),
        "FSDP2, ragged, not compiled": ("fsdp2", EAGER | {"pad_to_multiple_of": 1}),
        "DDP, ragged, packed": ("ddp", PACKED),
        "FSDP2, float8": ("fsdp2", {"precision": "float8"}),
        "FSDP2, unsharded after forward": ("fsdp2", {"reshard_after_forward": False}),
        "ND at one rank": ("fsdp2_nd", {}),
        "TP at one rank": ("fsdp2_tp", {"tensor_parallel": 1}),
        "PP at one rank": ("fsdp2_pp", {"pipeline_parallel": 1}),
    },
    "sizes": {
        "FSDP2, 4,096 positions": ("fsdp2", positions(4096)),
        "FSDP2, 8,192 positions": ("fsdp2", positions(8192)),
        "FSDP2, 32,768 positions": ("fsdp2", positions(32768)),
        "FSDP2, 65,536 positions, selective": ("fsdp2", positions(65536) | SELECTIVE),
        "FSDP2, 131,072 positions, full": ("fsdp2", positions(131072) | FULL),
    },
    "large": {
        "1.5B, FSDP2": ("fsdp2", shape("1.5b") | positions(8192)),
        "1.5B, FSDP2, packed": ("fsdp2", shape("1.5b") | positions(8192) | PACKED),
        "1.5B, FSDP2, float8": ("fsdp2", shape("1.5b") | positions(8192) | {"precision": "float8"}),
        "3B, FSDP2, full": ("fsdp2", shape("3b") | positions(8192) | FULL),
    },
}  # fmt: skip
# Seconds to keep in hand for a setting: mostly compiling
SECONDS = 45 if gpu.CUDA else 5


def script_and_config(what: str, ranks: int) -> tuple[Any, Any]:
    """As in tools/gpu.py, but a setting may have its own micro-batch, and pipelines need no 8."""
    strategy, flags = gpu.SETTINGS[what]
    script = gpu.importlib.import_module(f"{strategy}_pretrain")
    settings = gpu.BASE | flags
    settings["global_batch_tokens"] = settings["micro_batch_tokens"]
    return script, script.Config(**settings)


def main() -> None:
    kit.quiet()
    name = sys.argv[1]
    gpu.SETTINGS = SETS[name]  # `measure` looks settings up there
    gpu.script_and_config = script_and_config
    script, config = script_and_config(next(iter(SETS[name])), 1)
    script.init_process_group(config)
    file = kit.OUT / "gpu.json"
    result = {"device": gpu.NAME, "torch": torch.__version__, "settings": {}}
    if file.exists():
        result = json.loads(file.read_text())
    for what, (_, flags) in SETS[name].items():
        began = time.monotonic()
        with kit.guarded("mfu", what):
            kit.need(SECONDS)
            # `init_process_group` sets this by the flags of the first setting only.
            multiple = (gpu.BASE | flags)["pad_to_multiple_of"]
            torch.backends.cuda.enable_cudnn_sdp(multiple > 1)
            try:
                line = gpu.measure(what)
            except torch.OutOfMemoryError as error:
                line = {"error": str(error).split(".")[0]}
            if gpu.CUDA:
                line["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
            result["settings"][what] = line
            kit.emit("mfu", what, **line, whole_seconds=time.monotonic() - began)
        gc.collect()
        torch._dynamo.reset()
        if gpu.CUDA:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        Path(file).write_text(json.dumps(result, indent=1) + "\n")
    gpu.os._exit(0)


main()
