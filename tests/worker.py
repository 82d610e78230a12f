"""Runs under torchrun with 2 ranks: every mode of every strategy, in one launch.

Writes what it saw to the JSON file given as its argument; test_modes.py judges it.
"""

import gc
import json
import os
import sys
from functools import partialmethod
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parents[1]))
import common  # noqa: E402
import ddp_pretrain  # noqa: E402
import fsdp1_pretrain  # noqa: E402
import fsdp2_cp_pretrain  # noqa: E402
import fsdp2_ep_pretrain  # noqa: E402
import fsdp2_pp_pretrain  # noqa: E402
import fsdp2_pretrain  # noqa: E402
import fsdp2_tp_pretrain  # noqa: E402

SCRIPTS = {"ddp": ddp_pretrain, "fsdp1": fsdp1_pretrain, "fsdp2": fsdp2_pretrain}
SCRIPTS |= {"tp": fsdp2_tp_pretrain, "cp": fsdp2_cp_pretrain, "pp": fsdp2_pp_pretrain}
SCRIPTS |= {"ep": fsdp2_ep_pretrain}
COMMON_MODES = {
    "fp32": {},
    "packed": {"batching": "packed"},
    "packed_odd": {
        "batching": "packed",
        "micro_batch_tokens": 513,
        "global_batch_tokens": 4 * 513,
    },
    "no_clip": {"grad_clip": 0.0},
    "bf16": {"precision": "bf16"},
    "ac_full": {"activation_checkpointing": "full"},
    "ac_selective": {"activation_checkpointing": "selective"},
    "ac_fraction": {"activation_checkpointing": "0.5"},
    "ac_selective_bf16": {"activation_checkpointing": "selective", "precision": "bf16"},
    "compile": {"compile": True, "pad_to_multiple_of": 256},
    "compile_dynamic": {"compile": True},
    "compile_ac_full": {
        "compile": True,
        "pad_to_multiple_of": 256,
        "activation_checkpointing": "full",
    },
    "compile_packed": {"compile": True, "batching": "packed"},
    "padded": {"pad_to_multiple_of": 256},
    "large": {"micro_batch_tokens": 1024, "pad_to_multiple_of": 256},
    "compile_bf16": {
        "compile": True,
        "precision": "bf16",
        "micro_batch_tokens": 1024,
        "pad_to_multiple_of": 256,
    },
    "chunked_loss": {"CHUNK_TOKENS": 100},  # about 5 chunks a micro-batch
    "chunked_loss_bf16": {"CHUNK_TOKENS": 100, "precision": "bf16"},
    "merged": {"merge": True},  # one large micro-batch in place of several
}
OWN_MODES = {
    "ddp": {},
    "fsdp1": {
        "reduce_every": {"reduce_every_micro_batch": True},
        "shard_grad_op": {"sharding_strategy": "shard_grad_op"},
        "hybrid": {"sharding_strategy": "hybrid_shard"},
    },
    "fsdp2": {
        "reduce_every": {"reduce_every_micro_batch": True},
        "reduce_every_bf16": {"reduce_every_micro_batch": True, "precision": "bf16"},
        "keep_after_forward": {"reshard_after_forward": False},
        "keep_bf16": {"reshard_after_forward": False, "precision": "bf16"},
        "hybrid": {"dp_replicate": 2},
        "hybrid_every": {"dp_replicate": 2, "reduce_every_micro_batch": True},
        "cpu_offload": {"cpu_offload": True},
    },
    "tp": {"keep_after_forward": {"reshard_after_forward": False}},
    "cp": {"reduce_every": {"reduce_every_micro_batch": True}},
    "pp": {
        "one_stage": {"pipeline_parallel": 1},
        "hybrid": {"pipeline_parallel": 1, "dp_replicate": 2},
        "cpu_offload": {"cpu_offload": True},
    },
}
# Of a mixture of experts; each of ep's is one of fsdp2's too. All but it are of the dense model.
EXPERTS = {
    "fp32": {},
    "packed": {"batching": "packed"},
    "no_clip": {"grad_clip": 0.0},
    "bf16": {"precision": "bf16"},
    "ac_full": {"activation_checkpointing": "full"},
    "ac_selective": {"activation_checkpointing": "selective"},
    "reduce_every": {"reduce_every_micro_batch": True},
    "keep_after_forward": {"reshard_after_forward": False},
}
COMPILED_EXPERTS = {
    "padded": {"pad_to_multiple_of": 256},
    "compile": {"compile": True, "pad_to_multiple_of": 256},
}
EXPERTS_IN_FEW_MODES = {"ddp": ["fp32", "bf16"], "fsdp1": ["fp32", "ac_full"], "cp": ["fp32"]}
EXPERTS_IN_FEW_MODES |= {"pp": ["fp32", "packed"], "tp": []}  # tensor parallelism refuses them
# With torchao, which is optional, and what to compare with.
FLOAT8 = {
    "fp32": {},
    "bf16": {"precision": "bf16"},
    "float8": {"precision": "float8"},
    "float8_selective": {"precision": "float8", "activation_checkpointing": "selective"},
}
# Compiling takes a quarter of a minute each time: the plain suite has some, by one script each.
SLOW = {
    "compile": "fsdp2", "compile_packed": "fsdp1",
    "compile_bf16": None, "compile_dynamic": None, "compile_ac_full": None,
}  # fmt: skip
# Of those left to the drill, these generate kernels; the rest trace and partition graphs alone.
GENERATED = {"tp": "compile", "cp": "compile", "pp": "compile"}
# What torch cannot compile of DTensors, and the script refuses; and a pipeline of one micro-batch.
REFUSED = {"tp": ("compile_dynamic", "compile_ac_full"), "pp": ("merged",)}
COMPILE = torch.nn.Module.compile
STEPS = 2


def modes(name: str, which: str = "plain") -> dict[str, dict]:
    """What a script runs: all modes but the slow ones; of the drill, these and their references."""
    if which == "float8":
        return {} if name in ("tp", "ep") else FLOAT8  # refused, and a model of experts
    if which == "compiled experts":
        return COMPILED_EXPERTS if name in ("fsdp2", "ep") else {}
    if which == "experts":
        few = EXPERTS_IN_FEW_MODES.get(name, list(EXPERTS))
        own = {"alone": {"expert_parallel": 1}} if name == "ep" else {}
        return {mode: EXPERTS[mode] for mode in few} | own
    if name == "ep":
        return {}
    every = COMMON_MODES | OWN_MODES[name]
    one_row = ("packed_odd",)  # which does not divide: nothing special where nothing divides it
    left_out = {"ddp": (), "fsdp1": one_row, "fsdp2": one_row}.get(name, ("padded", "large"))
    for mode in (*left_out, *REFUSED.get(name, ())):
        del every[mode]
    if which == "drill":
        references = ("fp32", "padded", "packed", "large") if name == "ddp" else ()
        left = [mode for mode, where in SLOW.items() if where != name and mode in every]
        return {mode: every[mode] for mode in (*references, *left)}
    return {mode: flags for mode, flags in every.items() if SLOW.get(mode, name) == name}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def of_all_ranks(values: dict[str, float]) -> dict[str, float]:
    """Where each rank has only some of the names; those that have the same one have to agree."""
    merged: dict[str, float] = {}
    for part in common.gather(values):
        for name, value in part.items():
            assert merged.setdefault(name, value) == value, name
    return merged


def state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Whole tensors, those of this rank's part of the model."""
    return {name: whole(tensor) for name, tensor in get_model_state_dict(model).items()}


def same_on_all_ranks(tensor: torch.Tensor) -> bool:
    copies = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, tensor.contiguous())
    return all(torch.equal(copy, copies[0]) for copy in copies)


def merged(micro_batches: list[dict]) -> dict:
    """The rows of all micro-batches in one, padded to the longest."""
    width = max(batch["labels"].shape[1] for batch in micro_batches)
    padding = {"input_ids": 0, "labels": common.IGNORED}

    def pad(tensor: torch.Tensor, value: int) -> torch.Tensor:
        return torch.nn.functional.pad(tensor, (0, width - tensor.shape[1]), value=value)

    return {n: torch.cat([pad(b[n], v) for b in micro_batches]) for n, v in padding.items()}


def train(script, flags: dict, device: torch.device, merge=False, count=False) -> dict:
    """A few steps of the script's own functions; what is worth knowing about them.

    Args:
        merge: one large micro-batch a step.
        count: the FLOPs too.
    """
    config = script.Config(**flags)
    tokenizer = common.load_tokenizer(config.tokenizer)
    rows = common.load_rows(
        config.dataset, None, "train", ["text"], common.text_rows, tokenizer, config.max_length
    )
    training, validation = (
        common.Batches(
            part.lengths,
            part.num_labels,
            part.read,
            batching=config.batching,
            max_length=config.max_length,
            micro_batch_tokens=config.micro_batch_tokens,
            pad_to_multiple_of=config.pad_to_multiple_of,
            padding_id=tokenizer.eos_token_id,
            seed=config.seed,
        )
        for part in rows.split()
    )
    number = config.global_batch_tokens // config.micro_batch_tokens
    share = number, *script.data_parallel_rank_and_size(config)
    model_config = script.build_model_config(config, len(tokenizer), tokenizer.eos_token_id)
    model = script.build_model(config, model_config)
    decayed = script.weight_decay_names(model)
    model = script.parallelize(model, config, device)
    inner = getattr(model, "module", model)
    head, embedding = inner.get_output_embeddings(), inner.get_input_embeddings()
    seen = {"tied": all(common.gather(head is None or head.weight is embedding.weight))}
    seen["inverse_frequencies"] = inner.get_decoder().rotary_emb.inv_freq.tolist()
    kinds = [type(module).__name__ for module in inner.modules()]
    seen["float8"] = kinds.count("Float8Linear")
    if config.init_from:
        common.load_weights(model, config.init_from)
    optimizer = script.build_optimizer(model, decayed, config)
    groups = optimizer.param_groups
    names = {id(parameter): name for name, parameter in script.named_parameters(model)}
    seen["decay"] = []
    for group in groups:
        parts = common.gather([names[id(parameter)] for parameter in group["params"]])
        seen["decay"].append([group["weight_decay"], len(set().union(*parts))])
    state = state_of(model)
    seen["initial"] = of_all_ranks({name: x.double().sum().item() for name, x in state.items()})
    parameters = [p for group in groups for p in group["params"]]
    seen["held"] = sum(getattr(p, "_local_tensor", p).numel() for p in parameters)
    seen["losses"], seen["norms"], seen["expert_load"], seen["in_step"] = [], [], [], True
    for step in range(STEPS):
        batch = training.global_batch(step, *share)
        if merge:
            batch.micro_batches = [merged(batch.micro_batches)]
        measured = script.train_step(model, optimizer, batch, 1e-2, config, device)
        seen["losses"].append(measured["loss"])
        seen["norms"].append(measured["grad_norm"])
        seen["expert_load"].append(measured.get("expert_load"))
        if script is ddp_pretrain:
            seen["in_step"] &= all(same_on_all_ranks(p.detach()) for p in parameters)
    seen["micro_batches"] = len(batch.micro_batches)
    seen["gradients_freed"] = all(p.grad is None for p in parameters)
    if count:
        with FlopCounterMode(display=False) as flops:
            script.train_step(model, optimizer, batch, 0.0, config, device)
        seen["flops"] = sum(common.gather(flops.get_total_flops()))
    seen["validation"] = script.evaluate(model, validation, config, device)
    if config.compile:  # the same shapes again
        seen["graphs"] = [torch._dynamo.utils.counters["stats"]["unique_graphs"]]
        for step in range(STEPS):
            batch = training.global_batch(step, *share)
            script.train_step(model, optimizer, batch, 0.0, config, device)
        script.evaluate(model, validation, config, device)
        seen["graphs"].append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    seen["dtypes"] = sorted(
        {str(p.dtype) for p in parameters}
        | {str(v.dtype) for s in optimizer.state.values() for v in s.values() if v.dim()}
    )
    state = state_of(model)
    seen["final"] = of_all_ranks({name: x.double().norm().item() for name, x in state.items()})
    return seen


def write_and_leave(out: str, seen: dict) -> None:
    """Rank 0 writes what it saw; how the scripts themselves leave is tested with the scripts."""
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    out, base, start, which = sys.argv[1], *map(json.loads, sys.argv[2:4]), sys.argv[4]
    device = ddp_pretrain.init_process_group(ddp_pretrain.Config())
    gc.freeze()  # what is there now needs no search
    seen = {}
    for name, script in SCRIPTS.items():
        for mode, flags in modes(name, which).items():
            flags = dict(flags)
            merge, whole_loss = flags.pop("merge", False), script.CHUNK_TOKENS
            script.CHUNK_TOKENS = flags.pop("CHUNK_TOKENS", whole_loss)
            count = mode in ("fp32", "ac_full", "ac_selective", "ac_fraction")
            count &= which == "plain"  # it is one more step, which would move routers' biases
            kernels = which != "drill" or GENERATED.get(name) == mode
            backend = "inductor" if kernels else "aot_eager"
            torch.nn.Module.compile = partialmethod(COMPILE, backend=backend)
            seen[f"{name} {mode}"] = train(script, base | flags, device, merge, count)
            script.CHUNK_TOKENS = whole_loss
            gc.collect()
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
        if which == "plain" and name != "ep" or which == "experts" and name in ("fsdp2", "ep"):
            seen[f"{name} init_from"] = train(script, base | start, device)
            gc.collect()
    write_and_leave(out, seen)


if __name__ == "__main__":
    main()
