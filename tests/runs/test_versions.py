"""The scripts run with torch 2.13, which requirements.txt pins, and with 2.14 and 2.15."""

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import ROOT, SMALL, arguments, launch
from torch.distributed.checkpoint.metadata import TensorProperties

# What the scripts use of torch although it is private or not documented. torch 2.13, 2.14 and 2.15
# have all of these; a later version may change them without notice.
PRIVATE = """
torch._dynamo.config.accumulated_recompile_limit
torch._dynamo.config.optimize_ddp
torch._dynamo.config.recompile_limit
torch._foreach_add_
torch._foreach_lerp
torch._foreach_lerp_
torch._foreach_mul_
torch._functorch.config.enable_autograd_cache
torch.distributed._functional_collectives.all_to_all_single_autograd
torch.distributed._functional_collectives.permute_tensor
torch.distributed.device_mesh.DeviceMesh._concatenate
torch.distributed.device_mesh.DeviceMesh._flatten
torch.distributed.distributed_c10d._world.pg_map
torch.distributed.pipelining.schedules._Action.computation_type
torch.distributed.pipelining.schedules._PipelineScheduleRuntime.pipeline_order_with_comms
torch.ops.aten._scaled_dot_product_flash_attention
torch.ops.aten._scaled_dot_product_flash_attention_backward
torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
""".split()
# The same of os, typing, tiktoken, datasets and transformers.
OTHERS = """
_exit _replace _optionals _group_actions _mergeable_ranks _special_tokens _pat_str _fingerprint
_init_weights _apply_gate
_attn_implementation
""".split()


@pytest.mark.parametrize("name", PRIVATE)
def test_torch_has_the_private_names(name):
    owner, _, attribute = name.rpartition(".")
    found: Any = torch
    for part in owner.split(".")[1:]:
        if not hasattr(found, part):  # a module that nothing has imported yet
            importlib.import_module(f"{found.__name__}.{part}")
        found = getattr(found, part)
    # Only the instances of a schedule have its attributes.
    assert hasattr(found, attribute) or f"self.{attribute}" in inspect.getsource(found)


def private_names(file: Path) -> Iterator[str]:
    """Yield what a file uses whose name begins with one underscore, from that name on."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        names = []
        if isinstance(node, ast.ImportFrom):
            names = [f".{node.module}.{each.name}" for each in node.names]
        elif isinstance(node, ast.Attribute) and id(node) not in inner:
            names = [ast.unparse(node)]
        yield from (found[0] for name in names if (found := re.search(r"\._[a-z].*", name)))


@pytest.mark.parametrize("file", sorted(ROOT.glob("*.py")), ids=lambda file: file.name)
def test_the_list_of_private_names_is_complete(file):
    for name in private_names(file):
        of_torch = any(each.endswith(name) for each in PRIVATE)
        assert of_torch or name.split(".")[1] in OTHERS, name


# A program of one rank whose checkpoints are those of a newer torch: 2.15 added a sixth field.
NEWER = """
import torch
from torch.distributed.checkpoint.metadata import TensorProperties as Properties
write, read = Properties.__getstate__, Properties.__setstate__
Properties.__getstate__ = lambda self: (*write(self)[:5], None)
Properties.__setstate__ = lambda self, state: read(self, state[:5])
torch.__version__ = "2.99.0"
import fsdp2_pretrain, run
run.launch(fsdp2_pretrain.main)
"""


@pytest.mark.skipif("strides" in TensorProperties.__dataclass_fields__, reason="it can read them")
@pytest.mark.parametrize("use", ["resume", "export"])
def test_a_checkpoint_of_a_newer_torch_is_refused_in_one_line(
    use, corpus, shape_directory, tmp_path
):
    flags = {**SMALL, "dataset": corpus, "model": shape_directory, "run_dir": tmp_path / "run"}
    words = arguments(flags | {"steps": 2})
    script = tmp_path / "newer.py"
    script.write_text(NEWER)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, script, *words], env=environment, check=True)
    checkpoint = tmp_path / "run/checkpoints/step_00000002"
    if use == "resume":
        done = launch(0, "fsdp2_pretrain", flags | {"steps": 4})
    else:
        command = [sys.executable, "common.py", "export", checkpoint, tmp_path / "out"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith(f"error: {checkpoint} of torch 2.99.0 and AdamW cannot be loaded (")
