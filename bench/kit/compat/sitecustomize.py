"""Lets the scripts, written for torch 2.13, run with torch 2.11. Python imports this file at start.

Put its folder first in PYTHONPATH. It changes a module of torch right after its import, and only
where the installed torch differs. Each change is as small as possible.
"""

import importlib.abc
import importlib.util
import inspect
import os
import sys
from functools import wraps


def grouped_heads(varlen):
    """Before 2.13, `varlen_attn` has no `enable_gqa`: its kernel takes grouped heads anyway."""
    plain = varlen.varlen_attn
    if "enable_gqa" in inspect.signature(plain).parameters:
        return

    def varlen_attn(*arguments, enable_gqa=False, **options):
        return plain(*arguments, **options)

    varlen.varlen_attn = varlen_attn


def loss_of_the_last_stage(stage):
    """Before 2.13, a stage's outputs are checked against the shape that is declared to be sent.

    The last stage sends nothing; it returns the loss, a scalar.
    """
    base = stage._PipelineStageBase
    if hasattr(stage, "_StageMeta"):
        return
    check = base._validate_fwd_outputs

    @wraps(check)
    def validate(self, outputs):
        if not self.is_last:
            check(self, outputs)

    base._validate_fwd_outputs = validate


def reset_after_a_forward_alone(fully_shard):
    """Before 2.13, FSDP2 has no `reset_iter_state`: reshard, and forget the forward's order."""
    module_class = fully_shard.FSDPModule
    if hasattr(module_class, "reset_iter_state"):
        return

    def reset_iter_state(self):
        for module in self.modules():
            if isinstance(module, module_class):
                module.reshard()
                group = module._get_fsdp_state()._fsdp_param_group
                if group is not None:
                    group._post_forward_indices.clear()
        state = self._get_fsdp_state()
        state._comm_ctx.post_forward_order.clear()
        state._state_ctx.iter_forward_root = None

    module_class.reset_iter_state = reset_iter_state


def switches(torch):
    """What the programs of the kit ask for by environment variables."""
    if os.environ.get("KIT_DETERMINISTIC"):
        torch.use_deterministic_algorithms(True)


def gloo_for_a_shared_gpu(c10d):
    """NCCL refuses two ranks on one GPU. gloo accepts them, slowly: good for checks of numbers."""
    if not os.environ.get("KIT_SHARE_GPU"):
        return
    plain = c10d.init_process_group

    @wraps(plain)
    def init_process_group(backend=None, *arguments, device_id=None, **options):
        backend = "cpu:gloo,cuda:gloo" if "nccl" in str(backend) else backend
        return plain(backend, *arguments, **options)

    c10d.init_process_group = init_process_group


CHANGES = {
    "torch.distributed.fsdp._fully_shard._fully_shard": reset_after_a_forward_alone,
    "torch.distributed.distributed_c10d": gloo_for_a_shared_gpu,
    "torch": switches,
    "torch.nn.attention.varlen": grouped_heads,
    "torch.distributed.pipelining.stage": loss_of_the_last_stage,
}


class AfterImport(importlib.abc.MetaPathFinder):
    """Finds the modules to change, and changes each once it has been executed."""

    def find_spec(self, name, path=None, target=None):
        change = CHANGES.pop(name, None)
        if change is None:
            return None
        spec = importlib.util.find_spec(name)  # by the other finders, as `name` is no longer there
        execute = spec.loader.exec_module

        def execute_and_change(module):
            execute(module)
            change(module)

        spec.loader.exec_module = execute_and_change
        return spec


sys.meta_path.insert(0, AfterImport())
