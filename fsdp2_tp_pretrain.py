"""Causal-LM pretraining with FSDP2 and tensor parallelism: T ranks compute each layer together.

What each of TN ranks keeps: 1/(TN) of parameters, gradients and AdamW moments (norms: 1/N); while a
block computes, a T-th of it; between layers a T-th of each row. In a block T ranks wait for
all-gathers and reduce-scatters of 8A(T-1)/T, A: bytes of [tokens, hidden size] (11A if computed
again): keep them in a node (arXiv 1909.08053, 2205.05198). Below, P is a T-th of the model.

What moves in a step, with P the bytes of the model: before a block's forward and again before its
backward an all-gather of its parameters, at most 2P(N-1)/N in all; after its backward a
reduce-scatter of its gradients, P(N-1)/N. That is 1.5 times DDP's (1.0 in bf16, which halves the
gathers), most of it while a neighbouring block computes. Each of k micro-batches gathers anew.

Choose it when a block is too large for one GPU, or more data-parallel ranks would be too many.

    torchrun --standalone --nproc-per-node=2 fsdp2_tp_pretrain.py

`diff fsdp2_pretrain.py fsdp2_tp_pretrain.py` is what it adds. Read fsdp2_cp_pretrain.py next.
"""

import gc
import math
import os
import time
import zlib
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, parallel as tp
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig, Qwen2Config

import common
from common import flag

# --- Config ---------------------------------------------------------------------------------------


@dataclass(config=ConfigDict(allow_inf_nan=False))
class Config:
    model: str = flag("tiny", "tiny, qwen2-0.5b, or a directory or hub id with a config.json")
    init_from: str | None = flag(None, "weights: a run, or a Hugging Face directory or hub id")
    tokenizer: str = flag("bytes", "bytes, a tiktoken encoding (gpt2), or a directory or hub id")
    dataset: str = flag("stdlib", "stdlib, hub id, or .parquet .jsonl .csv .txt file, glob or URL")
    dataset_config: str | None = flag(None, "configuration name of a hub dataset")
    dataset_split: str = flag("train", "split, as in datasets.load_dataset")
    text_column: str = flag("text", "column that holds the text")
    max_length: PositiveInt = flag(512, "longest row in tokens; longer documents become several")
    pad_to_multiple_of: PositiveInt = flag(1, "row lengths are rounded up to a multiple of this")
    batching: Literal["bucketed", "packed"] = flag("bucketed", "rows of like length, or packed")
    micro_batch_tokens: PositiveInt = flag(1024, "token positions of a forward pass, padding too")
    global_batch_tokens: PositiveInt = flag(4096, "token positions of a step, over all ranks")
    steps: Annotated[int, Field(ge=0, lt=10**8)] = flag(550, "optimizer steps; 0: prepare the data")
    learning_rate: PositiveFloat = flag(5e-3, "peak learning rate of AdamW")
    min_learning_rate: NonNegativeFloat = flag(1e-4, "learning rate at the end of the cosine")
    warmup_steps: NonNegativeInt = flag(20, "steps of linear warm-up")
    weight_decay: NonNegativeFloat = flag(0.1, "of matrices; embeddings, norms and biases: none")
    grad_clip: NonNegativeFloat = flag(1.0, "largest gradient norm; 0: no clipping")
    precision: Literal["auto", "fp32", "bf16"] = flag("auto", "of compute; auto: bf16 on CUDA only")
    activation_checkpointing: Annotated[str, Field(pattern=r"^(none|full|selective|0?\.\d+)$")] = (
        flag("none", "none, full, selective or a fraction of the blocks such as 0.5")
    )
    compile: bool = flag(False, "compile each transformer block on its own")
    eval_every: PositiveInt = flag(200, "steps between validations")
    eval_batches: PositiveInt = flag(256, "micro-batches of one validation, over all ranks")
    checkpoint_every: PositiveInt = flag(100, "steps between checkpoints; the last writes one too")
    keep_checkpoints: PositiveInt = flag(2, "newest checkpoints that stay; the best one does too")
    checkpoint_style: Literal["stateful", "separate"] = flag("separate", "a state, or two trees")
    async_checkpoint: bool = flag(False, "train on while a checkpoint is written")
    resume: str = flag("auto", "auto, never or a checkpoint; load only those you trust (pickle)")
    timeout_minutes: PositiveFloat = flag(10.0, "longest wait for another rank")
    run_dir: str = flag("runs/fsdp2_tp_pretrain", "directory of everything the run writes")
    trace_steps: list[PositiveInt] | None = flag(None, "first and last step to profile")
    wandb_project: str | None = flag(None, "Weights & Biases project to log to as well")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = flag(0, "of initial weights and data order")
    reshard_after_forward: bool = flag(True, "free a block after forward; else after last backward")
    tensor_parallel: PositiveInt = flag(2, "ranks that compute each layer together")
    reduce_every_micro_batch: bool = flag(False, "less memory for gradients, more traffic")

    def __post_init__(self) -> None:
        """What flags say together; the limits of each one stand beside it."""
        if self.precision == "auto":
            self.precision = "bf16" if torch.cuda.is_available() else "fp32"
        if self.min_learning_rate > self.learning_rate:
            raise ValueError("--min_learning_rate is above --learning_rate")
        multiple = self.pad_to_multiple_of
        if math.ceil(self.max_length / multiple) * multiple > self.micro_batch_tokens:
            raise ValueError("--micro_batch_tokens cannot hold a row of --max_length, padded")
        first, *_, last = self.trace_steps or (1, 1)
        if not first <= last <= max(1, self.steps):
            raise ValueError("--trace_steps are a first and a last step of the run")
        ranks = int(os.environ.get("WORLD_SIZE", 1))
        if self.steps and ranks % self.tensor_parallel:
            raise ValueError(f"--tensor_parallel {self.tensor_parallel} must divide {ranks} ranks")
        ranks = max(1, ranks // self.tensor_parallel)  # those with data of their own
        length = self.micro_batch_tokens if self.batching == "packed" else multiple
        if self.compile and length % self.tensor_parallel:
            raise ValueError("--compile needs rows whose length --tensor_parallel divides")
        if self.compile and self.activation_checkpointing not in ("none", "selective"):
            raise ValueError("--compile takes --activation_checkpointing none or selective")
        unit = self.micro_batch_tokens * ranks
        if self.global_batch_tokens % unit:
            more = self.global_batch_tokens // unit * unit + unit
            words = f"--global_batch_tokens {self.global_batch_tokens} is no multiple of {unit}"
            raise ValueError(f"{words} (--micro_batch_tokens x {ranks} ranks); {more} would be")


# --- Process group and device ---------------------------------------------------------------------
def init_process_group(config: Config) -> torch.device:
    """Join the ranks that torchrun started; returns the device of this one."""
    timeout = timedelta(minutes=config.timeout_minutes)
    if not torch.cuda.is_available():
        dist.init_process_group("gloo", timeout=timeout)
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    # gloo beside NCCL, for what lies in CPU memory: Python objects, offloaded gradients.
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout, device_id=device)
    return device


def share_of_data(config: Config) -> tuple[int, int]:
    """Which part of the data this rank trains on, and of how many: consecutive ranks share."""
    return tuple(n // config.tensor_parallel for n in (dist.get_rank(), dist.get_world_size()))


# --- Model ----------------------------------------------------------------------------------------

SHAPES = {  # hidden size, feed-forward size, blocks, attention heads, rotary base, initial std
    "tiny": (192, 640, 2, 4, 1e4, 0.07),
    "qwen2-0.5b": (896, 4864, 24, 14, 1e6, 0.02),
}
CHUNK_LOGITS = 2**26  # that the loss computes at a time: 256 MiB in fp32
# By selective activation checkpointing; the cheap rest of a block is computed again.
KINDS = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
KEPT = [getattr(torch.ops.aten, f"_scaled_dot_product_{kind}").default for kind in KINDS]
KEPT += [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
KEPT += [torch.ops.torch_attn._varlen_attn.default]  # attention within documents, on CUDA
# Collectives inside a block, as tensor and context parallelism have: here they are around it.
COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
KEPT += [getattr(torch.ops._c10d_functional, kind).default for kind in COLLECTIVES]

# How the layers of a block are cut. What flows between blocks is cut along its length.
PART, WHOLE = {"hidden_states": Shard(1)}, {"hidden_states": Replicate()}
SUMMED = {"output_layouts": Shard(1), "use_local_output": False}  # by a reduce-scatter
BLOCK = {
    **{f"{name}_layernorm": tp.SequenceParallel() for name in ("input", "post_attention")},
    "self_attn": tp.PrepareModuleInput(input_kwarg_layouts=PART, desired_input_kwarg_layouts=WHOLE),
    **{f"self_attn.{name}_proj": tp.ColwiseParallel() for name in "qkv"},  # some of the heads
    "self_attn.o_proj": tp.RowwiseParallel(**SUMMED),
    "mlp": tp.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    **{f"mlp.{name}_proj": tp.ColwiseParallel() for name in ("gate", "up")},
    "mlp.down_proj": tp.RowwiseParallel(**SUMMED),
}
ENDS = {"model.norm": tp.SequenceParallel(), "lm_head": tp.ColwiseParallel()}  # by vocabulary
ENDS["model.embed_tokens"] = tp.RowwiseParallel(input_layouts=Replicate(), **SUMMED)


def architecture(config: Config, vocabulary: int) -> PreTrainedConfig:
    """The model's shape: built here, or read from the config.json that --model names."""
    if config.model not in SHAPES:
        return common.read_architecture(config.model, vocabulary, config.max_length)
    hidden, feed_forward, blocks, heads, rotary_base, initial_std = SHAPES[config.model]
    return Qwen2Config(
        vocab_size=math.ceil(vocabulary / 64) * 64,  # a multiple of 64 keeps matmuls fast
        hidden_size=hidden, intermediate_size=feed_forward, num_hidden_layers=blocks,
        num_attention_heads=heads, initializer_range=initial_std, tie_word_embeddings=True,
        num_key_value_heads=2, rope_parameters={"rope_type": "default", "rope_theta": rotary_base},
    )  # fmt: skip


def summed_loss(self: nn.Module, input_ids: torch.Tensor, labels: torch.Tensor, **kwargs: Any):
    """The model's forward: cross entropy summed over all labels but those of -100, in fp32.

    The logits of a whole micro-batch, [tokens, vocabulary], would be its largest tensor by far.
    Here they exist a chunk at a time, and inside the root's forward, where a sharded head is whole.
    (F.linear_cross_entropy would do, but returns the sum of bf16 inputs in bf16: 0.4 % off.)
    In bf16 the chunks' gradients of the head add up in bf16, within a micro-batch.
    """
    hidden = self.get_decoder()(input_ids=input_ids, use_cache=False, **kwargs).last_hidden_state
    hidden, labels = hidden.redistribute(placements=[Replicate()]).flatten(0, 1), labels.flatten()
    head = self.get_output_embeddings()

    def chunk_loss(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = nn.functional.linear(hidden, head.weight, head.bias).float()  # [chunk, vocabulary]
        return nn.functional.cross_entropy(logits, labels, reduction="sum").to_local().clone()

    tokens = max(1, CHUNK_LOGITS // head.weight.shape[0])
    chunks = [*zip(hidden.split(tokens), labels.split(tokens))]
    if len(chunks) == 1:  # few enough to keep, rather than to compute again in backward
        return chunk_loss(*chunks[0])
    return sum(checkpoint(chunk_loss, *chunk, use_reentrant=False) for chunk in chunks)


def initialize(modules: Iterable[nn.Module], names: dict, model: nn.Module, device: torch.device):
    """Give memory and initial weights to modules that were built on the meta device.

    A module's numbers depend on `names[module]` (seed and name) and the kind of device alone, so
    every strategy and world size starts from the same model.
    """
    for module in reversed([module for module in modules if module in names]):  # children first
        module.to_empty(device=device, recurse=False)
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            for tensor in filter(torch.is_floating_point, own):
                tensor.fill_(math.nan)
            torch.manual_seed(zlib.crc32(names[module].encode()))
            model._init_weights(module)  # rebuilds rotary buffers too: to_empty left garbage
        if any(tensor.isnan().any() for tensor in own):
            raise ValueError(f"transformers leaves {names[module]} uninitialized")


def build_model(config: Config, shape: PreTrainedConfig, device: torch.device):
    """Returns the model, ready to train, and the names of the parameters with weight decay.

    The order matters: patch, checkpoint activations, compile, wrap or shard. The compiler must see
    the checkpointing (around a compiled block, both would recompute), but not DDP or FSDP.
    """
    AttentionInterface.register("documents", common.document_attention)
    with torch.device("meta"):  # shapes only, no memory yet
        options = {"dtype": torch.float32, "attn_implementation": "documents"}
        model = AutoModelForCausalLM.from_config(shape, **options)
    names = {module: f"{config.seed} {name}" for name, module in model.named_modules()}
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    blocks = next(each for each in lists if type(each[0]).__name__ in model._no_split_modules)
    model.forward = partial(summed_loss, model)
    layers = {name.rpartition(".")[0] for name, _ in blocks[0].named_parameters()}
    if layers != BLOCK.keys() - {"self_attn", "mlp"}:
        common.refuse(f"--model {config.model}: only blocks with the layers of Llama's can be cut")
    sizes = shape.num_key_value_heads, shape.intermediate_size, shape.vocab_size
    if math.gcd(*sizes) % config.tensor_parallel:
        common.refuse(f"--tensor_parallel must divide K/V heads, feed-forward, vocabulary: {sizes}")

    mode = config.activation_checkpointing
    fraction = float({"none": 0, "full": 1, "selective": 1}.get(mode, mode))
    kept = partial(create_selective_checkpoint_contexts, KEPT)
    options = {"context_fn": kept} if mode == "selective" else {}
    # A graph for each row length, in training and in validation. Padded to no multiple, lengths are
    # too many: then the compiler is to find one graph for all.
    static = config.pad_to_multiple_of > 1 or config.batching == "packed"
    torch._dynamo.config.recompile_limit = 8 + 2 * config.max_length // config.pad_to_multiple_of
    for i, block in enumerate(blocks):
        if int((i + 1) * fraction) > int(i * fraction):  # a fraction, spread over the depth
            blocks[i] = checkpoint_wrapper(block, **options)
        if config.compile:
            blocks[i].compile(dynamic=False if static else None)

    sizes = (dist.get_world_size() // config.tensor_parallel, config.tensor_parallel)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("shard", "tensor"))
    mesh._flatten()  # the gradient norm is summed over both by one all-reduce
    sharding: dict[str, Any] = {"mesh": mesh["shard"]}

    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    decayed = {n for n, p in model.named_parameters() if p.ndim > 1 and p not in embeddings}
    in_blocks = {module for block in blocks for module in block.modules()}
    initialize([m for m in model.modules() if m not in in_blocks], names, model, device)
    # All ranks have drawn the same numbers (src_data_rank=None): each keeps its part.
    cut = partial(tp.parallelize_module, device_mesh=mesh["tensor"], src_data_rank=None)
    cut(model, parallelize_plan=ENDS)
    model.get_input_embeddings().register_forward_hook(lambda *given: given[-1] + 0)  # waits
    if shape.tie_word_embeddings:
        model.tie_weights()  # giving memory to each module on its own has untied them

    if config.precision == "bf16":  # all that a block computes; shards, and so AdamW, stay fp32
        sharding["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    for block in blocks:  # one at a time: here no rank holds more than one whole block
        initialize(block.modules(), names, model, device)
        cut(getattr(block, "_checkpoint_wrapped_module", block), parallelize_plan=BLOCK)
        fully_shard(block, reshard_after_forward=config.reshard_after_forward, **sharding)
    # The rest is one group, for tied embeddings must share a group. It stays whole after forward,
    # since backward begins with it.
    fully_shard(model, reshard_after_forward=False, **sharding)
    return model, decayed


# --- Optimizer and schedule -----------------------------------------------------------------------
def build_optimizer(model: nn.Module, decayed: set[str], config: Config) -> torch.optim.AdamW:
    """AdamW on the parameters as this rank holds them."""
    parameters = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in parameters if n in decayed], "weight_decay": config.weight_decay},
        {"params": [p for n, p in parameters if n not in decayed], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)


def learning_rate_at(step: int, config: Config) -> float:
    """Linear warm-up, then a cosine down to the minimum, reached at the last step."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    progress = (step - config.warmup_steps) / (config.steps - config.warmup_steps)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return config.min_learning_rate + cosine * (config.learning_rate - config.min_learning_rate)


# --- Checkpoints ----------------------------------------------------------------------------------

CUDA = torch.cuda.is_available()
# Copies to (pinned) CPU memory.
STAGER = dcp.staging.DefaultStager(dcp.staging.StagingOptions(CUDA, False, False, CUDA))


class State(dcp.stateful.Stateful):
    """Model and optimizer as one object that DCP can ask and fill.

    Tensors go by the model's own parameter names and whole shapes, whatever the strategy: so any
    script at any world size can load what another one saved.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        # optimizer.state_dict() would be empty before the first step, with nothing for a load to
        # fill; this makes moments then, by a step with a learning rate of 0.
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trees = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **trees)


def save_checkpoint(state: State, config: Config, group: dist.ProcessGroup) -> Callable:
    """Returns what writes this moment's state, each rank its part; a thread may call it.

    `stateful` is one tree of everything; `separate` is a tree for the model, one for the optimizer.
    """
    trees = state.state_dict()  # DCP would ask `state` itself, but only once it writes
    if config.checkpoint_style == "stateful":
        trees = {".": {"app": trees}}
    if config.async_checkpoint:  # a copy in CPU memory, as training goes on
        trees = STAGER.stage(trees)

    def write(directory: Path) -> None:
        for name, tree in trees.items():
            dcp.save(tree, checkpoint_id=directory / name, process_group=group)

    return write


def load_checkpoint(state: State, config: Config, directory: Path) -> None:
    """Each rank reads what it keeps, into the tensors of the state that it has now."""
    if (directory / "model").is_dir():
        trees = state.state_dict()
        for name, tree in trees.items():
            dcp.load(tree, checkpoint_id=directory / name)
        state.load_state_dict(trees)
    else:
        dcp.load({"app": state}, checkpoint_id=directory)
    # Hyper-parameters come with the moments, but the flag may have changed since.
    state.optimizer.param_groups[0]["weight_decay"] = config.weight_decay


# --- Training -------------------------------------------------------------------------------------
@tp.loss_parallel()
def add_gradients(model: nn.Module, micro_batch: dict, scale: float, last: bool, config: Config):
    """Forward and backward of one micro-batch; returns its summed loss.

    Gradients of all but the last micro-batch are kept whole on each rank, and the sum is reduced
    once: less communication, but the memory of a whole model's gradients.
    """
    model.set_requires_gradient_sync(last or config.reduce_every_micro_batch)
    model.set_reshard_after_backward(last or config.reshard_after_forward)  # else stay whole
    loss = model(**micro_batch) / config.tensor_parallel  # all ranks of a layer have the same
    (loss * scale).backward()
    return loss.detach()


def clip_gradients(model: nn.Module, largest: float) -> torch.Tensor:
    """Clip to the norm `largest`; returns the norm before, of the whole gradient."""
    # The norm is a DTensor: its local value may cover this rank's shards alone.
    return nn.utils.clip_grad_norm_(model.parameters(), largest).full_tensor()


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, config: Config,
    device: torch.device, learning_rate: float,
) -> tuple[float, float]:  # fmt: skip
    """One optimizer step; returns the mean loss over the global batch and the gradient norm."""
    # The loss is a sum over labels divided by the labels of the whole global batch. A mean of
    # means would weigh tokens of short micro-batches more. Times the ranks, as gradients are
    # averaged over them.
    scale = dist.get_world_size() / batch.labels
    summed = torch.zeros((), device=device)
    for i, micro_batch in enumerate(batch.micro_batches):
        last = i == len(batch.micro_batches) - 1
        summed += add_gradients(model, common.to_device(micro_batch, device), scale, last, config)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    grad_norm = clip_gradients(model, config.grad_clip or math.inf).item()
    dist.all_reduce(summed)
    optimizer.step()
    optimizer.zero_grad()
    return summed.item() / batch.labels, grad_norm


# --- Validation -----------------------------------------------------------------------------------
@torch.no_grad()
@tp.loss_parallel()
def evaluate(model: nn.Module, batches: common.Batches, config: Config, device: torch.device):
    """Mean loss per label, in nats, over the same micro-batches whatever the world size."""
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=device)  # summed loss, labels
    for micro_batch in batches.evaluation(config.eval_batches, *share_of_data(config)):
        micro_batch = common.to_device(micro_batch, device)
        total[0] += model(**micro_batch)
        total[1] += (micro_batch["labels"] >= 0).sum()
    model.train()
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


# --- Main -----------------------------------------------------------------------------------------
def main() -> None:
    config = common.parse_config(Config)
    # What may take long comes before the ranks meet: the first one of a node does it, the others
    # find it in the cache.
    tokenizer = common.load_tokenizer(config.tokenizer)
    place = config.dataset, config.dataset_config, config.dataset_split, [config.text_column]
    rows = common.load_rows(*place, common.text_rows, tokenizer, config.max_length)
    plan = config.batching, config.max_length, config.micro_batch_tokens, config.pad_to_multiple_of
    batches_of = partial(common.Batches, rows, *plan, tokenizer.eos_token_id, config.seed)
    training, validation = map(batches_of, rows.split())
    shape = architecture(config, len(tokenizer))
    if config.steps == 0:
        return print("the data is prepared")

    device = init_process_group(config)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    run = common.Run(vars(config), shape, device, rank, ranks)
    checkpoints = common.Checkpoints(run, shape, tokenizer, rows, config.keep_checkpoints)
    resumed, progress = checkpoints.find(config.resume)
    model, decayed = build_model(config, shape, device)
    optimizer = build_optimizer(model, decayed, config)
    state = State(model, optimizer)
    if resumed:
        load_checkpoint(state, config, resumed)
    elif config.init_from:
        common.load_weights(model, config.init_from)
    save = partial(save_checkpoint, state, config, checkpoints.group)

    run.begin(resumed, progress["step"])
    number = config.global_batch_tokens // config.micro_batch_tokens
    # The step is the position in the data.
    batches = training.stream(progress["step"], config.steps, number, *share_of_data(config))
    for step in range(progress["step"] + 1, config.steps + 1):
        started = time.perf_counter()
        batch = next(batches)
        waited = time.perf_counter() - started
        torch.manual_seed(config.seed + step * ranks + rank)  # of dropout
        learning_rate = learning_rate_at(step, config)
        loss, grad_norm = train_step(model, optimizer, batch, config, device, learning_rate)
        progress = {"step": step, "tokens": progress["tokens"] + batch.labels}
        measured = {"loss": loss, "grad_norm": grad_norm, "learning_rate": learning_rate}
        seconds = {"data_seconds": waited, "step_seconds": time.perf_counter() - started}
        run.log_step(batch, **progress, **measured, **seconds)
        stopping = run.should_stop()  # a signal came to any rank
        if step % config.eval_every == 0 or step == config.steps:
            progress["validation_loss"] = evaluate(model, validation, config, device)
            run.log_validation(step, progress["validation_loss"], validation, config.eval_batches)
        if step % config.checkpoint_every == 0 or step == config.steps or stopping:
            checkpoints.write(save, progress, config.async_checkpoint)
        if stopping:
            break
    checkpoints.wait()

    # Leaving with the model alive can abort in the communication threads: drop it, then the group.
    del model, optimizer, state, save
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
    following = f"torchrun --nproc-per-node=2 fsdp2_sft.py --init_from {config.run_dir}"
    run.finish(progress["step"], checkpoints.last, validation.prompt(), following)


if __name__ == "__main__":
    common.launch(main)
