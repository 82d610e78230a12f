"""Train with every mode of every strategy, on 2 ranks in one launch; test_modes.py checks it.

For launching.launch_cases (without cases), with more flags: --which, the kind of modes; --base and
--start, flags in JSON; --untied, the directory of a model; --packages, where torchao is.
"""

import gc
import itertools
import json
import sys
from functools import partial, partialmethod

import cases  # also adds the root to sys.path
import script_parts as parts
import torch
import torch.distributed as dist
from grid import share
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import FlopCounterMode

import common
import ddp_pretrain
import fsdp1_pretrain
import fsdp2_cp_pretrain
import fsdp2_ep_pretrain
import fsdp2_pp_pretrain
import fsdp2_pretrain
import fsdp2_tp_pretrain
import model as shared_model
from run import set_learning_rates

SCRIPTS = {"ddp": ddp_pretrain, "fsdp1": fsdp1_pretrain, "fsdp2": fsdp2_pretrain}
SCRIPTS |= {"tp": fsdp2_tp_pretrain, "cp": fsdp2_cp_pretrain, "pp": fsdp2_pp_pretrain}
SCRIPTS |= {"ep": fsdp2_ep_pretrain}
DENSE = [name for name in SCRIPTS if name != "ep"]

# Modes of every strategy. "untied" is the model directory that the launch names so.
COMMON_MODES = {
    "fp32": {},
    "untied": {"model": "untied", "CHUNK_TOKENS": 100},  # about 5 chunks per micro-batch
    "packed": {"batching": "packed"},
    # A length that no group of ranks divides.
    "packed_odd": {
        "batching": "packed",
        "micro_batch_tokens": 513,
        "global_batch_tokens": 4 * 513,
    },
    "bf16": {"precision": "bf16", "CHUNK_TOKENS": 100},
    "ac_full": {"activation_checkpointing": "full"},
    "ac_selective": {"activation_checkpointing": "selective"},
    "recomputed_bf16": {
        "activation_checkpointing": "selective",
        "CHUNK_TOKENS": 100,
        "precision": "bf16",
    },
    # One large micro-batch instead of several.
    "merged": {"merge": True, "CHUNK_TOKENS": 100},
}
# What compiled modes are compared with.
REFERENCE_MODES = {
    "fp32": {},
    "packed": {"batching": "packed"},
    "padded": {"pad_to_multiple_of": 256},
    "large": {"micro_batch_tokens": 1024, "pad_to_multiple_of": 256},
}
NO_CLIP = {"no_clip": {"grad_clip": 0.0}}
# Gradients are added up in the order of DDP.
NO_CLIP_ONCE = {"no_clip": {"grad_clip": 0.0, "reduce_every_micro_batch": False}}
ONCE_BF16 = {"reduce_every_micro_batch": False, "precision": "bf16"}
AC_FRACTION = {"ac_fraction": {"activation_checkpointing": "0.5"}}
OWN_MODES = {
    "ddp": {
        **NO_CLIP,
        **AC_FRACTION,
        "zero1": {"shard_optimizer": True},
        "zero1_bf16": COMMON_MODES["bf16"] | {"shard_optimizer": True},
    },
    "fsdp1": {
        **NO_CLIP_ONCE,
        "shard_grad_op": {"sharding_strategy": "shard_grad_op"},
        "hybrid": {"sharding_strategy": "hybrid_shard"},
    },
    "fsdp2": {
        **NO_CLIP_ONCE,
        **AC_FRACTION,
        "keep_after_forward": {"reshard_after_forward": False},
        "reduce_once_bf16": ONCE_BF16,
        "keep_bf16": ONCE_BF16 | {"reshard_after_forward": False},
        "hybrid": {"dp_replicate": 2},
        "hybrid_once": {"dp_replicate": 2, "reduce_every_micro_batch": False},
        "cpu_offload": {"cpu_offload": True},
    },
    "tp": {
        "untied": COMMON_MODES["untied"] | {"reshard_after_forward": False},
        "packed_odd": COMMON_MODES["packed_odd"] | {"reduce_every_micro_batch": False},
    },
    "cp": {
        "packed_odd": COMMON_MODES["packed_odd"] | {"reduce_every_micro_batch": False},
        "ring": {"context_attention": "ring"},
        "ring_full": {"context_attention": "ring", "activation_checkpointing": "full"},
        "ring_selective": {"context_attention": "ring", "activation_checkpointing": "selective"},
        "ring_bf16": {"context_attention": "ring", "precision": "bf16"},
    },
    "pp": {
        "one_stage": {"pipeline_parallel": 1},
        "hybrid": {"pipeline_parallel": 1, "dp_replicate": 2},
        "cpu_offload": {"cpu_offload": True},
        "gpipe": {"schedule": "gpipe"},
        "zero_bubble": {"schedule": "zero_bubble"},
        "zero_bubble_bf16": COMMON_MODES["bf16"] | {"schedule": "zero_bubble"},
        "zero_bubble_full": {"schedule": "zero_bubble", "activation_checkpointing": "full"},
    },
}
# Only a strategy that splits sequences has to pad an odd length. All share the code of
# "recomputed_bf16". Those that agree with DDP on several micro-batches accumulate as it does.
LEFT_OUT = {"ddp": ["recomputed_bf16"], "fsdp2": ["packed_odd"]}
LEFT_OUT |= {"fsdp1": ["packed_odd", "recomputed_bf16", "merged"]}
LEFT_OUT |= {name: ["packed", "recomputed_bf16", "merged"] for name in ("tp", "cp", "pp")}

COMPILED_MODES = {
    "compile": {"compile": True, "pad_to_multiple_of": 256},
    "compile_packed": {"compile": True, "batching": "packed"},
    "compile_dynamic": {"compile": True},
    "compile_ac_full": {
        "compile": True,
        "pad_to_multiple_of": 256,
        "activation_checkpointing": "full",
    },
    "compile_bf16": {
        "compile": True,
        "precision": "bf16",
        "micro_batch_tokens": 1024,
        "pad_to_multiple_of": 256,
    },
}
# Compiling takes long, and all strategies share its code. So only a drill does it: FSDP2 in every
# way, and the others in one.
COMPILED = [("ddp", "compile_bf16"), ("tp", "compile")]
COMPILED += [("fsdp2", mode) for mode in COMPILED_MODES]
COMPILED += [(name, "compile_packed") for name in ("fsdp1", "cp", "pp")]
# Graphs are traced and split, but kernels are generated in these cases only.
GENERATED = {("fsdp2", "compile_dynamic"), ("tp", "compile"), ("cp", "compile_packed")}

# MoE modes. EP without balancing is compared with FSDP2, EP with it with one rank per group.
MOE_MODES = {
    "fp32": {},
    "packed": {"batching": "packed"},
    "bf16": {"precision": "bf16"},
    "ac_full": {"activation_checkpointing": "full"},
    "ac_selective": {"activation_checkpointing": "selective"},
    "reduce_once": {"reduce_every_micro_batch": False},
    "keep_after_forward": {"reshard_after_forward": False},
}
BALANCED_MODES = {
    "balanced_alone": {"expert_parallel": 1},
    "balanced": {},
    "balanced_full": {"activation_checkpointing": "full"},
    "balanced_selective": {"activation_checkpointing": "selective"},
    "balanced_once": {"reduce_every_micro_batch": False},
}
COMPILED_MOE_MODES = {
    "padded": {"pad_to_multiple_of": 512},
    "compile": {"compile": True, "pad_to_multiple_of": 512},
}
# With torchao, which is optional.
FLOAT8_MODES = {
    "fp32": {},
    "bf16": {"precision": "bf16"},
    "float8": {"precision": "float8"},
    "float8_selective": {"precision": "float8", "activation_checkpointing": "selective"},
}
COMPILE = torch.nn.Module.compile
STEPS = 2


def modes(name: str, which: str = "plain") -> dict[str, dict]:
    """Return the modes in which a launch of kind `which` trains with a script."""
    if which == "float8":
        return FLOAT8_MODES if name == "fsdp2" else {}
    if which == "experts":
        if name == "fsdp2":
            return MOE_MODES
        unbalanced = {mode: flags | {"balance_rate": 0.0} for mode, flags in MOE_MODES.items()}
        return unbalanced | BALANCED_MODES if name == "ep" else {}
    if which == "compiled experts":
        off = {"balance_rate": 0.0} if name == "ep" else {}
        compiled = {mode: flags | off for mode, flags in COMPILED_MOE_MODES.items()}
        return compiled if name in ("fsdp2", "ep") else {}
    if name == "ep":
        return {}
    if which == "compiled":
        compiled = {mode: COMPILED_MODES[mode] for own, mode in share(COMPILED) if own == name}
        return REFERENCE_MODES | compiled if name == "ddp" else compiled
    every = COMMON_MODES | OWN_MODES[name]
    return {mode: flags for mode, flags in every.items() if mode not in LEFT_OUT.get(name, [])}


def of_all_ranks(values: dict[str, float]) -> dict[str, float]:
    """Merge the values of ranks that each have some of the names. Equal names need equal values."""
    merged: dict[str, float] = {}
    for part in common.gather(values):
        for name, value in part.items():
            assert merged.setdefault(name, value) == value, name
    return merged


def state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the unsharded tensors of this rank's part of the model."""
    return {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in get_model_state_dict(model).items()
    }


def same_on_all_ranks(tensor: torch.Tensor) -> bool:
    copies = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, tensor.contiguous())
    return all(torch.equal(copy, copies[0]) for copy in copies)


def merged(micro_batches: list[dict]) -> dict:
    """Return the sequences of all micro-batches in one, padded to the longest."""
    width = max(batch["labels"].shape[1] for batch in micro_batches)
    padding = {"input_ids": 0, "labels": common.IGNORED}

    def pad(tensor: torch.Tensor, value: int) -> torch.Tensor:
        return torch.nn.functional.pad(tensor, (0, width - tensor.shape[1]), value=value)

    return {n: torch.cat([pad(b[n], v) for b in micro_batches]) for n, v in padding.items()}


def train(script, flags: dict, device: torch.device, merge=False, count=False) -> dict:
    """Train a few steps with the script's own functions; returns what test_modes.py checks.

    Args:
        merge: run one large micro-batch per step.
        count: count the FLOPs too.
    """
    config = script.Config(**flags)
    set_learning_rates(config, 1e-2)
    config.warmup_steps, config.min_learning_rate = 0, config.learning_rate  # a constant rate
    tokenizer = common.load_tokenizer(config.tokenizer)
    documents = common.load_documents(config, ["text"], common.tokenize_text, tokenizer)
    training, validation = (
        common.Batches(part.split(config.max_length), config, tokenizer.eos_token_id)
        for part in common.train_validation_split(documents, config.eval_tokens)
    )
    batches = parts.stream(script, config, training)
    steps = list(itertools.islice(batches, STEPS))
    model = parts.build_model(script, parts.build_config(config, tokenizer), config)
    decayed = shared_model.weight_decay_names(model)
    model = script.parallelize(model, config, device)

    inner = getattr(model, "module", model)
    head, embedding = inner.get_output_embeddings(), inner.get_input_embeddings()
    has_both = head is not None and embedding is not None
    seen = {"tied": any(common.gather(has_both and head.weight is embedding.weight))}
    seen["embedding_unit"] = isinstance(embedding, FSDPModule)
    seen["inverse_frequencies"] = inner.get_decoder().rotary_emb.inv_freq.tolist()
    kinds = [type(module).__name__ for module in inner.modules()]
    seen["float8"] = kinds.count("Float8Linear")
    if config.init_from:
        common.load_weights(model, config.init_from)

    optimizer = parts.build_optimizer(script, model, decayed, config)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    seen["decay"] = []
    for group in optimizer.param_groups:
        of_ranks = common.gather([names[id(parameter)] for parameter in group["params"]])
        seen["decay"].append([group["weight_decay"], len(set().union(*of_ranks))])
    state = state_of(model)
    seen["initial"] = of_all_ranks({name: x.double().sum().item() for name, x in state.items()})
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    seen["held"] = sum(getattr(p, "_local_tensor", p).numel() for p in parameters)

    seen["losses"], seen["norms"], seen["expert_load"], seen["in_step"] = [], [], [], True
    for step, batch in enumerate(steps, 1):
        if merge:
            batch.micro_batches = [merged(batch.micro_batches)]
        measured = script.train_step(model, optimizer, batch, step, config, device)
        seen["losses"].append(measured["loss"])
        seen["norms"].append(measured["grad_norm"])
        seen["expert_load"].append(measured.get("expert_load"))
        if script is ddp_pretrain:
            seen["in_step"] &= all(same_on_all_ranks(p.detach()) for p in model.parameters())
    seen["micro_batches"] = len(batch.micro_batches)
    kept = [p.grad for p in parameters if p.grad is not None]
    seen["gradients"] = "none" if not kept else "zero" if not any(map(torch.any, kept)) else "some"
    seen["final"] = of_all_ranks(
        {name: x.double().norm().item() for name, x in state_of(model).items()}
    )
    validate = partial(parts.evaluate, script, model, validation, config, device)
    seen["validation"] = validate()
    seen["dtypes"] = sorted(
        {str(p.dtype) for p in parameters}
        | {str(v.dtype) for s in optimizer.state.values() for v in s.values() if v.dim()}
    )
    config.learning_rate = config.min_learning_rate = 0.0
    if count:
        with FlopCounterMode(display=False) as flops:
            script.train_step(model, optimizer, batch, 1, config, device)
        seen["flops"] = sum(common.gather(flops.get_total_flops()))
    if config.compile:  # train and validate on the same shapes again
        seen["graphs"] = [torch._dynamo.utils.counters["stats"]["unique_graphs"]]
        for batch in steps:
            script.train_step(model, optimizer, batch, 1, config, device)
        validate()
        seen["graphs"].append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return seen


def main() -> None:
    given = cases.given()
    which, base, start = given["--which"], json.loads(given["--base"]), json.loads(given["--start"])
    if given["--packages"]:
        sys.path.insert(0, given["--packages"])
    device = ddp_pretrain.init_process_group(ddp_pretrain.Config())
    gc.freeze()  # the garbage collector need not search what is here now
    seen = {}
    for name, script in SCRIPTS.items():
        chosen = dict(modes(name, which))
        if which == "plain" and name != "ep" or which == "experts" and name in ("fsdp2", "ep"):
            chosen["init_from"] = start
        for mode, flags in chosen.items():
            flags = base | flags
            if flags["model"] == "untied":
                flags["model"] = given["--untied"]
            merge, full_loss = flags.pop("merge", False), shared_model.CHUNK_TOKENS
            shared_model.CHUNK_TOKENS = flags.pop("CHUNK_TOKENS", full_loss)
            count = which == "plain" and mode in ("fp32", "ac_full", "ac_selective", "ac_fraction")
            kernels = which != "compiled" or (name, mode) in GENERATED
            backend = "inductor" if kernels else "aot_eager"
            torch.nn.Module.compile = partialmethod(COMPILE, backend=backend)
            seen[f"{name} {mode}"] = train(script, flags, device, merge, count)
            shared_model.CHUNK_TOKENS = full_loss
            gc.collect()
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
    cases.leave(seen)


if __name__ == "__main__":
    main()
