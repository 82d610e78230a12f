"""Supervised fine-tuning on conversations with FSDP2: fsdp2_pretrain.py, with other data.

What a conversation adds: a chat template that makes one text of its turns, single tokens that open
and close a turn, embeddings for them, and labels that leave out all but the assistant's tokens.
What a rank keeps and what moves is as in fsdp2_pretrain.py.

A model learns from every turn of the assistant, from its first token to the token that ends it, so
that it learns to stop; not from the header that opens it, which is part of the prompt. The loss of
a step is the sum over those tokens divided by their number, over all ranks and micro-batches:
conversations differ so much in that number that any mean of means would be far off.

Rows are conversations of similar length (`bucketed`: short ones in many rows, long ones in few), or
one row of several whole conversations that do not see each other (`packed`).

    torchrun --standalone --nproc-per-node=2 fsdp2_sft.py --init_from runs/fsdp2_pretrain

`diff fsdp2_pretrain.py fsdp2_sft.py` is what fine-tuning changes.
"""

import gc
import math
import os
import time
import types
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig, Qwen2Config

import common
from common import RowLength, flag

# --- Config ---------------------------------------------------------------------------------------


@dataclass
class Config:
    model: str = flag("tiny", "tiny, qwen2-0.5b, or a directory or hub id with a config.json")
    init_from: str | None = flag(None, "weights: checkpoint, run, Hugging Face directory or hub id")
    tokenizer: str = flag("bytes", "bytes, a tiktoken encoding (gpt2), or a directory or hub id")
    dataset: str = flag(
        "stdlib-docstrings", "stdlib-docstrings, a hub id, or .parquet .jsonl .json file, URL"
    )
    dataset_config: str | None = flag(None, "configuration name of a hub dataset")
    dataset_split: str = flag("train", "split, as in datasets.load_dataset")
    bucket_edges: list[RowLength] = flag(
        [256, 512, 1024, 2048], "row lengths in tokens; last: the maximum; or auto, from the data"
    )
    batching: Literal["bucketed", "packed"] = flag(
        "bucketed", "rows of like length, or packed rows"
    )
    micro_batch_tokens: int = flag(4096, "token positions of one forward pass, padding included")
    global_batch_tokens: int = flag(8192, "token positions of one optimizer step, over all ranks")
    steps: int = flag(100, "optimizer steps of the whole run")
    learning_rate: float = flag(2e-3, "peak learning rate of AdamW")
    min_learning_rate: float = flag(2e-4, "learning rate at the end of the cosine")
    warmup_steps: int = flag(10, "steps of linear warm-up")
    weight_decay: float = flag(0.1, "decay of matrices; embeddings, norms and biases have none")
    grad_clip: float = flag(1.0, "largest gradient norm; 0: no clipping")
    precision: Literal["auto", "fp32", "bf16"] = flag("auto", "of compute; auto: bf16 on CUDA only")
    activation_checkpointing: str = flag(
        "none", "none, full, selective or a fraction of the blocks"
    )
    compile: bool = flag(False, "compile each transformer block on its own")
    eval_every: int = flag(50, "steps between validations")
    eval_batches: int = flag(16, "micro-batches of one validation, over all ranks")
    checkpoint_every: int = flag(50, "steps between checkpoints; the last step writes one too")
    keep_checkpoints: int = flag(2, "newest checkpoints that stay; the best one stays as well")
    checkpoint_style: Literal["stateful", "separate"] = flag(
        "separate", "one state of everything, or model and optimizer apart; any loads"
    )
    async_checkpoint: bool = flag(False, "train on while a checkpoint is written")
    resume: str = flag("auto", "auto, never or a checkpoint; load only those you trust (pickle)")
    timeout_minutes: float = flag(10.0, "minutes without progress that end a stalled run")
    run_dir: str = flag("runs/fsdp2_sft", "directory of everything the run writes")
    trace_steps: list[int] = flag([], "first and last step to profile, into the run's directory")
    wandb_project: str | None = flag(None, "Weights & Biases project to log to as well")
    seed: int = flag(0, "seed of the initial weights and of the data order")
    reshard_after_forward: bool = flag(True, "free a block after forward; else after last backward")
    dp_replicate: int = flag(1, "replicas of the sharded model (HSDP)")
    cpu_offload: bool = flag(False, "keep parameters, gradients and moments in CPU memory")
    reduce_every_micro_batch: bool = flag(False, "less memory for gradients, more traffic")


# --- Process group and device ---------------------------------------------------------------------
def init_process_group(config: Config) -> torch.device:
    """Join the ranks that torchrun started; returns the device of this one."""
    # The watchdog of common.Run ends a stalled run earlier, and says which rank is missing.
    timeout = timedelta(minutes=20 * config.timeout_minutes + 1)
    join = partial(dist.init_process_group, **common.fresh_store(timeout), timeout=timeout)
    if not torch.cuda.is_available():
        join("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    # gloo beside NCCL, for what lies in CPU memory: Python objects, offloaded gradients.
    join("cpu:gloo,cuda:nccl", device_id=device)
    return device


# --- Conversations --------------------------------------------------------------------------------

TURN = ("<|im_start|>", "<|im_end|>")
INSIDE = (  # an answer may think before it gives the solution
    "<|begin_of_thought|>",
    "<|end_of_thought|>",
    "<|begin_of_solution|>",
    "<|end_of_solution|>",
)
# What stands between `generation` and `endgeneration` is learned: the answer and the turn's end.
TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.role == 'assistant' -%}
{%- generation -%}{{- message.content + '<|im_end|>' -}}{%- endgeneration -%}
{%- else -%}
{{- message.content + '<|im_end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


# --- Model ----------------------------------------------------------------------------------------

SHAPES = {  # hidden size, feed-forward size, blocks, attention heads, rotary base, initial std
    "tiny": (192, 640, 2, 4, 1e4, 0.07),
    "qwen2-0.5b": (896, 4864, 24, 14, 1e6, 0.02),
}
CHUNK_LOGITS = 2**26  # that the loss computes at a time: 256 MiB in fp32
KEPT = [  # by selective activation checkpointing; the cheap rest of a block is computed again
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    *common.VARIABLE_LENGTH_OPS,
    # Collectives inside a block, as tensor parallelism has; those of this script are around it.
    torch.ops._c10d_functional.all_gather_into_tensor.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
]


def architecture(config: Config, vocabulary: int, known: int) -> PreTrainedConfig:
    """The model's shape: built here, or read from the config.json that --model names.

    The vocabulary grows from `known` ids by the tokens of the chat template.
    """
    if config.model not in SHAPES:
        shape = common.read_architecture(config, known)
        if vocabulary > shape.vocab_size:
            shape.vocab_size = math.ceil(vocabulary / 64) * 64
        return shape
    hidden, feed_forward, blocks, heads, rotary_base, initial_std = SHAPES[config.model]
    return Qwen2Config(
        vocab_size=math.ceil(vocabulary / 64) * 64,  # a multiple of 64 keeps matmuls fast
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": rotary_base},
        initializer_range=initial_std,
        tie_word_embeddings=True,
    )


def summed_loss(
    self: nn.Module, input_ids: torch.Tensor, labels: torch.Tensor, learned: torch.Tensor,
    **kwargs: Any,
):  # fmt: skip
    """The model's forward: cross entropy summed over all labels but those of -100, in fp32.

    The logits of a whole micro-batch, [tokens, vocabulary], would be its largest tensor by far.
    Here they exist a chunk at a time, and inside the root's forward, where a sharded head is whole.
    (F.linear_cross_entropy would do, but returns the sum of bf16 inputs in bf16: 0.4 % off.)
    In bf16 the chunks' gradients of the head add up in bf16, within a micro-batch.
    """
    hidden = self.get_decoder()(input_ids=input_ids, use_cache=False, **kwargs).last_hidden_state
    # Only positions that have a label go through the head: `learned`, int64 [labels].
    hidden, labels = hidden.flatten(0, 1)[learned], labels.flatten()[learned]
    head = self.get_output_embeddings()

    def chunk_loss(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = F.linear(hidden, head.weight, head.bias).float()  # [chunk, vocabulary]
        return F.cross_entropy(logits, labels, reduction="sum")

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
            raise common.InputError(f"--model: transformers leaves {names[module]} uninitialized")


def build_model(config: Config, shape: PreTrainedConfig, device: torch.device):
    """Returns the model, ready to train, and the names of the parameters with weight decay.

    The order matters: patch, checkpoint activations, compile, wrap or shard. The compiler must see
    the checkpointing (around a compiled block, both would recompute), but not the strategy.
    """
    AttentionInterface.register("documents", common.document_attention)
    with torch.device("meta"):  # shapes only, no memory yet
        model = AutoModelForCausalLM.from_config(
            shape, dtype=torch.float32, attn_implementation="documents"
        )
    names = {module: f"{config.seed} {name}" for name, module in model.named_modules()}
    blocks = next(
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and type(module[0]).__name__ in model._no_split_modules
    )
    model.forward = types.MethodType(summed_loss, model)

    mode = config.activation_checkpointing
    fraction = {"none": 0.0, "full": 1.0, "selective": 1.0}.get(mode)
    fraction = float(mode) if fraction is None else fraction
    options = {}
    # A graph for each length of rows, in training and in validation; 8 is the default.
    torch._dynamo.config.recompile_limit = 8 + 2 * len(config.bucket_edges)
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, KEPT)
    for i, block in enumerate(blocks):
        if int((i + 1) * fraction) > int(i * fraction):  # a fraction, spread over the depth
            blocks[i] = checkpoint_wrapper(block, **options)
        if config.compile:
            blocks[i].compile(dynamic=False)

    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    decayed = {n for n, p in model.named_parameters() if p.ndim > 1 and p not in embeddings}
    in_blocks = {module for block in blocks for module in block.modules()}
    initialize([m for m in model.modules() if m not in in_blocks], names, model, device)
    if shape.tie_word_embeddings:
        model.tie_weights()  # giving memory to each module on its own has untied them

    ranks, shards = dist.get_world_size(), dist.get_world_size() // config.dp_replicate
    mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("shard",))
    if config.dp_replicate > 1:  # shard in a group of ranks, all-reduce between groups
        mesh = init_device_mesh(
            device.type, (ranks // shards, shards), mesh_dim_names=("replicate", "shard")
        )
    sharding: dict[str, Any] = {"mesh": mesh}
    if config.precision == "bf16":  # all that a block computes; shards, and so AdamW, stay fp32
        sharding["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    if config.cpu_offload:
        sharding["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    for block in blocks:  # one at a time: here no rank holds more than one whole block
        initialize(block.modules(), names, model, device)
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
class State(Stateful):
    """Model, optimizer and progress as one object that DCP can ask and fill.

    Tensors go by the model's own parameter names and whole shapes, whatever the strategy: so any
    script at any world size can load what another one saved.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, progress: common.Progress
    ):
        self.model, self.optimizer, self.progress = model, optimizer, progress

    def state_dict(self) -> dict[str, Any]:
        model = common.without_tied(self.model, get_model_state_dict(self.model))
        state = {"model": model, "progress": asdict(self.progress)}
        # optimizer.state_dict() would be empty before the first step, with nothing for a load to
        # fill; this makes moments then, by a step with a learning rate of 0. AdamW counts that
        # one too, so what never stepped is not saved.
        if self.progress.updates:
            state["optimizer"] = get_optimizer_state_dict(self.model, self.optimizer)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self.model, common.with_tied(self.model, state["model"]))
        if "optimizer" in state:
            set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])
        vars(self.progress).update(state["progress"])


def save_checkpoint(state: State, config: Config, stager: Any, directory: Path) -> Callable:
    """Returns what writes this moment's state, each rank its part: to call now or in a thread.

    `stateful` is one tree of everything; `separate` is a tree for the model, one for the optimizer.
    """
    trees = state.state_dict()  # DCP would ask `state` itself, but only once it writes
    if config.checkpoint_style == "stateful":
        trees = {".": {"app": trees}}
    else:
        del trees["progress"]
    if config.async_checkpoint:  # a copy in CPU memory, as training goes on
        trees = stager.stage(trees)

    def write() -> None:
        # One after the other: dcp.async_save would write both at once, on a core that trains.
        for name, tree in trees.items():
            group = common.patient_group("checkpoint")
            dcp.save(tree, checkpoint_id=directory / name, process_group=group)

    return write


def load_checkpoint(state: State, config: Config, directory: Path) -> None:
    """Each rank reads what it keeps, into the tensors of the state that it has now."""
    if (directory / "model").is_dir():
        trees = state.state_dict()
        for name in sorted(trees.keys() - {"progress"}):  # in one order on all ranks
            dcp.load(trees[name], checkpoint_id=directory / name)
        state.load_state_dict(trees)
    else:
        dcp.load({"app": state}, checkpoint_id=directory)
    # Hyper-parameters come with the moments, but the flag may have changed since.
    state.optimizer.param_groups[0]["weight_decay"] = config.weight_decay


# --- Training -------------------------------------------------------------------------------------
def add_gradients(model: nn.Module, micro_batch: dict, scale: float, last: bool, config: Config):
    """Forward and backward of one micro-batch; returns its summed loss.

    Gradients of all but the last micro-batch are kept whole on each rank, and the sum is reduced
    once: less communication, but the memory of a whole model's gradients.
    """
    model.set_requires_gradient_sync(last or config.reduce_every_micro_batch)
    model.set_requires_all_reduce(last)  # between replicas, of what is summed in shards until then
    model.set_reshard_after_backward(last or config.reshard_after_forward)  # else stay whole
    loss = model(**micro_batch)
    (loss * scale).backward()
    return loss.detach()


def clip_gradients(model: nn.Module, largest: float) -> torch.Tensor:
    """Clip to the norm `largest`; returns the norm before, of the whole gradient."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), largest)
    return norm.full_tensor()  # a DTensor: its local value may cover this rank's shards alone


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: common.GlobalBatch, config: Config,
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
    loss = summed.item() / batch.labels
    if math.isfinite(loss) and math.isfinite(grad_norm):  # the same numbers on all ranks
        optimizer.step()
    optimizer.zero_grad()
    return loss, grad_norm


# --- Validation -----------------------------------------------------------------------------------
@torch.no_grad()
def evaluate(model: nn.Module, batches: common.Batches, config: Config, device: torch.device):
    """Mean loss per label, in nats, over the same micro-batches whatever the world size."""
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=device)  # summed loss, labels
    for micro_batch in batches.evaluation(config.eval_batches):
        micro_batch = common.to_device(micro_batch, device)
        total[0] += model(**micro_batch)
        total[1] += (micro_batch["labels"] != common.IGNORED).sum()
    model.train()
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


# --- Main -----------------------------------------------------------------------------------------
def main() -> None:
    config = common.parse_config(Config)
    device = init_process_group(config)
    run = common.Run(config, device)

    # Labels are -100, which the loss ignores, but for the tokens of the template's `generation`.
    tokenizer, training, validation = common.load_conversations(
        config, device, TEMPLATE, TURN, INSIDE
    )
    run.say(common.describe_conversations(config, tokenizer, training, validation))

    shape = architecture(config, tokenizer.vocab_size, tokenizer.known)
    checkpoints = common.Checkpoints(run, shape, tokenizer, training)
    model, decayed = build_model(config, shape, device)
    optimizer = build_optimizer(model, decayed, config)
    progress = run.progress
    state = State(model, optimizer, progress)
    if checkpoints.resumed:
        load_checkpoint(state, config, checkpoints.resumed)
    elif config.init_from:
        common.load_weights(model, config.init_from, tokenizer.known, tokenizer.vocab_size)
    else:
        run.say("no --init_from: starting from random weights")
    save = partial(save_checkpoint, state, config, checkpoints.stager)
    run.start(shape, optimizer)
    if config.steps == 0:  # a prepared start, to resume from in place of --init_from
        checkpoints.write(save)
    batches = training.stream(progress.step, config.steps)  # the step is the position in the data
    for step in range(progress.step + 1, config.steps + 1):
        started = time.perf_counter()
        batch = next(batches)
        waited = time.perf_counter() - started
        torch.manual_seed(config.seed + step * dist.get_world_size() + dist.get_rank())  # dropout
        learning_rate = learning_rate_at(step, config)
        with run.trace(step):
            loss, grad_norm = train_step(model, optimizer, batch, config, device, learning_rate)
        seconds = time.perf_counter() - started
        run.log_step(step, batch, loss, grad_norm, learning_rate, seconds, waited)
        if step % config.eval_every == 0 or step == config.steps:
            run.log_validation(step, evaluate(model, validation, config, device), validation)
        if step % config.checkpoint_every == 0 or step == config.steps:
            checkpoints.write(save)
        if run.should_stop(checkpoints):  # a signal came to any rank
            checkpoints.write(save)  # does nothing if this step has just been written
            break
    checkpoints.wait()
    run.close()

    if not run.stopping:
        common.export(run.directory / "hf", shape, get_model_state_dict(model), tokenizer)
    # Leaving with the model alive can abort in the communication threads: drop it, then the group.
    del model, optimizer, batches, state, save
    gc.collect()
    dist.barrier(common.patient_group())
    dist.destroy_process_group()
    run.finish(validation.prompt(), f"chat as in README.md, with {run.directory}/hf")


if __name__ == "__main__":
    common.launch(main)
