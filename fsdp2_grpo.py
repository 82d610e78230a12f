"""Reinforcement learning with FSDP2 (GRPO): fsdp2_sft.py on answers that the model samples itself.

    torchrun --standalone --nproc-per-node=2 fsdp2_grpo.py --init_from runs/fsdp2_sft

When to use it: a program can tell good answers from bad ones, and a fine-tuned model already finds
some of the good ones. Read fsdp2_sft.py before it. `diff fsdp2_sft.py fsdp2_grpo.py` shows what
reinforcement learning changes: where the answers come from, the loss, and that a sharded model has
to sample.

In each step the model samples a group of answers to each of some prompts, and `reward` scores them.
The advantage of an answer is its reward minus the mean reward of its group, so there is no second
model that learns what to expect of a prompt (GRPO, arXiv 2402.03300). Training makes the tokens of
better answers more likely, and those of worse answers less likely. Advantages are not divided by
the standard deviation of the group, which would make a rare mistake on an easy prompt count as much
as a prompt in doubt, nor by the length of the answer (Dr. GRPO, arXiv 2503.20783). The loss of a
step is the sum over all tokens divided by their number, so every token of the global batch counts
the same (DAPO, arXiv 2503.14476).

Memory per rank, with N ranks: 1/N of the parameters, gradients and AdamW moments. While a block
trains, its unsharded parameters as well. While answers are sampled, all parameters unsharded, and
keys and values for the prompts and answers of --sample_prompts x --answers sequences: 2 x layers x
key-value heads x head size numbers per token. --reference_weight adds 1/N of a second model.

Communication volume per step, with P and G the bytes of parameters and gradients: one all-gather,
P(N-1)/N, and nothing more while a rank samples, however long its answers are. Then the tokens of
the answers go to all ranks. Each inner step communicates as fsdp2_pretrain.py, (2P+G)(N-1)/N.
"""

import contextlib
import copy
import gc
import itertools
import json
import math
import numbers
import os
import re
import signal
import time
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial
from pydoc_data.topics import topics
from types import SimpleNamespace
from typing import Annotated, Any, Literal, NamedTuple

import jinja2
import numpy as np
import torch
import torch.distributed as dist
from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
)
from transformers.cache_utils import DynamicCache, DynamicLayer

import chat
import common
from common import flag

# --- Config ---------------------------------------------------------------------------------------

NEXT_COMMAND = "README.md says how to train on a reward of your own"
# The architectures that --model knows by name.
SHAPES = {
    "tiny": {
        "model_type": "qwen2",
        "hidden_size": 192,
        "intermediate_size": 640,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "initializer_range": 0.07,
        "tie_word_embeddings": True,
    },
    "qwen2-0.5b": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
    },
}


@dataclass(config=ConfigDict(allow_inf_nan=False))
class Config(common.Flags):
    """The flags of this script, after those that all scripts share."""

    # model
    model: str = flag("tiny", "tiny, qwen2-0.5b, or a directory or hub id with a config.json")
    init_from: str | None = flag(
        None,
        "weights to start from: a run directory, or a Hugging Face directory or hub id. Its model "
        "and tokenizer replace --model and --tokenizer unless you set these",
    )

    # data
    dataset: str = flag(
        "stdlib-docstrings",
        "stdlib-docstrings, a hub id, or a file, glob or URL of .parquet or .jsonl",
    )
    chat_template: Literal["own", "collection"] = flag(
        "own",
        "own: that of the tokenizer. collection: ours, if the model was trained with it",
    )
    max_length: PositiveInt = flag(
        512, "longest sequence of prompt and answer in tokens; longer prompts are left out"
    )
    answer_length: PositiveInt = flag(
        128, "longest answer in tokens; an answer that has not ended by then gets a reward of 0"
    )
    micro_batch_tokens: PositiveInt = flag(
        4096, "token positions, padding included, of one forward pass on one rank"
    )

    # sampling and reward
    prompts: PositiveInt = flag(16, "prompts of one step, over all ranks")
    answers: Annotated[int, Field(ge=2)] = flag(8, "answers to each prompt (a group)")
    sample_prompts: PositiveInt = flag(
        16, "prompts that a rank samples answers to at a time; sets the memory of keys and values"
    )
    inner_steps: PositiveInt = flag(1, "optimizer steps on the answers of one step")
    clip_low: Annotated[float, Field(ge=0, le=1)] = flag(
        0.2,
        "a token's ratio (its probability now, divided by the one at the start of the step) is "
        "clipped below 1 minus this; matters from the second inner step on",
    )
    clip_high: NonNegativeFloat = flag(0.28, "and above 1 plus this")
    reference_weight: NonNegativeFloat = flag(
        0.0, "weight in the loss of the KL divergence from the --init_from model, kept in shards"
    )

    # optimization
    steps: Annotated[int, Field(ge=0, lt=10**8)] = flag(
        80, "steps of the whole run, each with new answers; 0 prepares the data and ends"
    )
    learning_rate: PositiveFloat | None = flag(
        None,
        "peak learning rate of AdamW; default: 5e-4 below 10 million parameters, otherwise 1e-6",
    )
    min_learning_rate: NonNegativeFloat | None = flag(
        None, "learning rate at the end of the cosine decay; default: a tenth of the peak"
    )
    warmup_steps: NonNegativeInt = flag(5, "steps of linear warm-up")
    decay_steps: PositiveInt | None = flag(
        None, "decay over the last N steps only (warmup-stable-decay); default: after the warm-up"
    )
    weight_decay: NonNegativeFloat = flag(
        0.1, "weight decay of matrices (embeddings, norms and biases have none)"
    )
    grad_clip: NonNegativeFloat = flag(1.0, "clip the gradient norm to this; 0 disables clipping")
    eval_every: PositiveInt = flag(20, "steps between validations; one comes before the first step")
    eval_prompts: PositiveInt = flag(64, "held-out prompts of one validation, over all ranks")
    eval_answers: PositiveInt = flag(4, "answers to each held-out prompt")
    checkpoint_every: PositiveInt = flag(20, "steps between checkpoints; the last step saves too")

    # precision, memory and speed
    precision: Literal["auto", "fp32", "bf16"] = flag(
        "auto", "compute precision; auto: bf16 on GPUs that have it, otherwise fp32"
    )
    activation_checkpointing: Annotated[str, Field(pattern=r"^(none|full|selective|0?\.\d+)$")] = (
        flag("none", "none, full, selective, or a fraction of the blocks such as 0.5")
    )
    compile: bool = flag(False, "compile each transformer block")

    # this strategy
    reshard_after_forward: bool = flag(
        True, "free a block's unsharded parameters after forward and all-gather them for backward"
    )
    dp_replicate: PositiveInt = flag(1, "replicas of the sharded model (HSDP)")
    cpu_offload: bool = flag(False, "keep parameters, gradients and optimizer state in CPU memory")
    reduce_every_micro_batch: bool = flag(
        True,
        "reduce-scatter gradients in every micro-batch. false: once per step, which needs memory "
        "for a full set of gradients",
    )

    def __post_init__(self) -> None:
        """Check how flags fit together. The limits of a single flag are in its type."""
        super().__post_init__()
        if self.precision == "auto":
            # GPUs before Ampere only emulate bf16.
            bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported(False)
            self.precision = "bf16" if bf16 else "fp32"
        world_size = int(os.environ.get("WORLD_SIZE", 1))
        if self.steps and world_size % self.dp_replicate:
            raise ValueError(
                f"--dp_replicate {self.dp_replicate} does not divide {world_size} ranks"
            )
        if self.prompts % world_size:
            raise ValueError(f"--prompts {self.prompts} is not a multiple of {world_size} ranks")
        if self.reference_weight and not self.init_from:
            raise ValueError("--reference_weight needs --init_from, which names the reference")
        if self.answer_length >= self.max_length:
            raise ValueError("--answer_length leaves no room for a prompt in --max_length")


# --- Conversations --------------------------------------------------------------------------------

# A resumed run samples the same answers, and has the same reference.
common.PLAN += ["prompts", "answers", "answer_length", "reference_weight"]


def chat_tokenizer(config: Config) -> common.Tokenizer:
    """Load a tokenizer with a chat template, in which the model has learned to answer.

    The attribute `turn_end` is the id that ends an answer, or None if there is no single one.
    """
    name = config.tokenizer
    tokenizer = copy.deepcopy(common.load_tokenizer(name))
    tokenizer.split_special_tokens = False  # parse the template's tokens as tokens
    if config.chat_template == "collection":
        tokenizer.chat_template = chat.TEMPLATE
    if not tokenizer.chat_template:
        common.refuse(
            f"--tokenizer {name} has no chat template: fine-tune the model with fsdp2_sft.py first"
        )
    with common.refusing(f"--tokenizer {name}: its chat template fails"):
        chat.tag_answers(tokenizer)
        text, _ = chat.find_answers(tokenizer, chat.SAMPLE, 0)
    # An answer ends with the first added token after its text that is not blank.
    added = tokenizer.added_tokens_decoder
    _, _, rest = text.rpartition("answer")
    endings = [i for i in encode(tokenizer, rest) if i in added and str(added[i]).strip()]
    tokenizer.turn_end = endings[0] if endings else None
    return tokenizer


def encode(tokenizer: common.Tokenizer, text: str) -> list[int]:
    """Return the ids of a text, with special tokens parsed as tokens."""
    return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids


def read_prompt(row: dict) -> tuple[chat.Messages, str]:
    """Return the messages of a row that are the prompt, and a reference answer.

    A last message of the assistant is the reference, unless there is a column `answer`. Without
    either, the reference is empty.

    Raises:
        ValueError: why the row is left out.
    """
    messages, _ = chat.read_conversation(row)
    reference = ""
    if messages and messages[-1]["role"] == "assistant":
        reference = messages.pop()["content"]
    if row.get("answer") is not None:
        reference = row["answer"]
    # Numbers and dates of a typed column may not be what was written: 1.10 became 1.1.
    if not isinstance(reference, str | int | list | dict):
        raise ValueError("hold an answer that is not text")
    if not isinstance(reference, str):
        reference = json.dumps(reference, ensure_ascii=False, default=str)
    if all(message["role"] == "system" for message in messages):
        raise ValueError("hold no prompt")
    return messages, reference


def tokenize_prompt(row: dict, tokenizer: common.Tokenizer) -> tuple:
    """Tokenize a prompt and its reference, as `common.tokenize_text` does with a text.

    The reference is what is in the loss. The split is that of fsdp2_sft.py: what comes before the
    first answer decides.

    Raises:
        ValueError: why the conversation is left out.
    """
    messages, reference = read_prompt(row)
    chat.refuse_special_tokens(tokenizer, messages)
    render = partial(tokenizer.apply_chat_template, tokenize=False)
    try:
        text = render(messages, add_generation_prompt=True)
        # Without a generation prompt, the answer has to follow at once, as after [/INST].
        answered = render([*messages, {"role": "assistant", "content": "answer"}])
        follows = answered.removeprefix(text).lstrip().startswith("answer")
        if text == render(messages) and not follows:
            raise ValueError("have a chat template that does not ask for an answer")
    except jinja2.TemplateError as problem:
        raise ValueError(f"have no place in the chat template: {problem}") from problem
    prompt = encode(tokenizer, text)
    answer = encode(tokenizer, reference)
    tokens = np.array([*prompt, *answer, tokenizer.eos_token_id], np.uint32)
    first = itertools.takewhile(lambda message: message["role"] != "assistant", messages)
    return tokens, np.arange(len(tokens)) >= len(prompt), list(first), 0


def leave_out_long(documents: common.Sequences, config: Config) -> common.Sequences:
    """Return the documents whose prompts leave room for an answer."""
    longest = config.max_length - config.answer_length
    fits = documents.lengths + 1 - documents.num_targets <= longest
    common.say(f"{(~fits).sum():,} prompts are left out, because they exceed {longest:,} tokens")
    if not fits.any():
        common.refuse(f"--max_length {config.max_length} leaves no prompt; use a larger one")
    return common.Sequences(documents.documents, documents.index[fits])


class Answer(NamedTuple):
    """A sampled answer. Its last token ends the turn, unless it reached --answer_length."""

    prompt: np.ndarray  # int64, token ids
    reference: np.ndarray  # int64
    tokens: np.ndarray  # uint32
    log_probs: np.ndarray  # float32 [tokens], from sampling
    reward: float = 0.0


class AnswerBatches(common.Batches):
    """Batches of the answers of one step, with what the loss needs for each target token.

    Args:
        answers: of all ranks.
        advantages: float32 [answers].
    """

    def __init__(
        self, answers: list[Answer], advantages: np.ndarray, config: Config, padding_id: int
    ):
        self.answers = answers
        self.advantages = advantages
        num_targets = np.array([len(answer.tokens) for answer in answers])
        lengths = num_targets + [len(answer.prompt) - 1 for answer in answers]
        sequences = SimpleNamespace(lengths=lengths, num_targets=num_targets, read=self.read)
        super().__init__(sequences, config, padding_id)

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of prompt and answer, and which of them are the answer's."""
        answer = self.answers[index]
        tokens = np.concatenate([answer.prompt, answer.tokens])
        return tokens, np.arange(len(tokens)) >= len(answer.prompt)

    def collate(self, indices: np.ndarray) -> dict[str, Any]:
        """Add to `common.Batches.collate`, for the target tokens of all sequences in order:

        target_positions: int64. A GPU would need a sync to find them.
        loss_arguments: sampled_log_probs and advantages, float32, see `policy_loss`.
        """
        micro_batch = super().collate(indices)
        is_target = micro_batch["labels"].flatten() != common.IGNORED
        log_probs = np.concatenate([self.answers[i].log_probs for i in indices])
        advantages = np.repeat(self.advantages[indices], self.sequences.num_targets[indices])
        micro_batch["target_positions"] = is_target.nonzero().flatten()
        micro_batch["loss_arguments"] = {
            "sampled_log_probs": torch.from_numpy(log_probs),
            "advantages": torch.from_numpy(advantages),
        }
        return micro_batch


# --- Strategy -------------------------------------------------------------------------------------


def init_process_group(config: Config) -> torch.device:
    """Join the process group that torchrun set up; returns the device of this rank."""
    timeout = timedelta(minutes=config.timeout_minutes)
    if not torch.cuda.is_available():
        dist.init_process_group("gloo", timeout=timeout)
        return torch.device("cpu")
    ranks, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
    if ranks > gpus:
        advice = f'--nproc-per-node={gpus}, or CUDA_VISIBLE_DEVICES="" to train on CPUs'
        common.refuse(f"{ranks} ranks cannot share {gpus} GPUs: use {advice}")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    if config.precision == "fp32":
        # Use TF32 matmuls: several times faster, with 10 instead of 23 bits of mantissa.
        torch.set_float32_matmul_precision("high")
    # cuDNN attention builds a plan for each new shape, and while sampling each token has one.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # gloo beside NCCL handles tensors in CPU memory: Python objects and offloaded gradients.
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout, device_id=device)
    return device


def dp_rank_and_size(config: Config) -> tuple:
    """Return this rank's index among the data-parallel ranks, and how many there are.

    Here every rank trains on its own micro-batches of the global batch.
    """
    return dist.get_rank(), dist.get_world_size()


def parallelize(model: nn.Module, config: Config, device: torch.device) -> nn.Module:
    """Shard a model that is on the meta device, and give the shards memory and initial weights.

    `fully_shard` turns the parameters of a module into DTensors and adds hooks to the module. An
    all-gather before forward makes the parameters full, and they are freed after it. Another
    all-gather comes before backward. After backward a reduce-scatter leaves each rank the averaged
    gradient of its shard.

    The order matters: activation checkpointing, then compile (the other way round, the compiled
    block would be recomputed twice), then FSDP, whose hooks the compiler should not see.
    """
    blocks = transformer_blocks(model)
    checkpoint_activations(blocks, config.activation_checkpointing)
    if config.compile:
        compile_blocks(blocks, config)

    # HSDP: shard within a row of the mesh, replicate across rows (one row by default).
    shards = dist.get_world_size() // config.dp_replicate
    if config.dp_replicate == 1:
        mesh = init_device_mesh(device.type, (shards,))
    else:
        mesh = init_device_mesh(
            device.type, (config.dp_replicate, shards), mesh_dim_names=("replicate", "shard")
        )
    options = {"mesh": mesh}
    if config.precision != "fp32":
        # Parameters are cast to bf16 as they are all-gathered, so blocks compute in bf16. The
        # shards and the optimizer state stay fp32. Reduce gradients in fp32 too. The default is
        # bf16 in torch 2.13, and the type of the shards from 2.15 on. Do not cast a block's inputs
        # either: what the model computes in fp32 (rotary embeddings in some types) stays fp32.
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    if config.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")

    initialize(model, modules_outside_blocks(model), config.seed, device)
    model.tie_weights()  # `initialize` gave each module memory of its own, which untied them
    # `fully_shard` claims only parameters that no submodule has claimed yet, so apply it bottom-up:
    # blocks first, then the root. With the root alone, all parameters would be gathered at once.
    for block in blocks:
        # Initialize one block at a time, so that no rank ever holds more than one full block.
        initialize(model, block.modules(), config.seed, device)
        fully_shard(block, reshard_after_forward=config.reshard_after_forward, **options)
    if not model.config.tie_word_embeddings:
        # A tied embedding has to be in the same group as the head. An untied one can be freed
        # during the step. Backward needs no embeddings, so do not all-gather them for it.
        fully_shard(
            model.get_input_embeddings(),
            reshard_after_forward=config.reshard_after_forward,
            **options,
        ).set_unshard_in_backward(False)
    # The root claims the rest. Do not reshard it after forward, because backward starts with it.
    fully_shard(model, reshard_after_forward=False, **options)
    return model


@contextlib.contextmanager
def unsharded_parameters(model: nn.Module, config: Config) -> Iterator[None]:
    """Sample in here: every rank holds all parameters, and a forward communicates nothing.

    NOTE: with shards, each token would all-gather each block. And a rank whose answers have all
    ended would leave the others waiting for its shards.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.unshard()  # an all-gather
    model.set_reshard_after_forward(False)  # otherwise the first forward would free the blocks
    attention = model.config._attn_implementation
    if config.batching == "packed":
        model.set_attn_implementation("sdpa")  # the prompts' padding needs a mask
    # Sequences grow with every token, but compiled blocks need few lengths.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        yield
    model.set_attn_implementation(attention)
    for unit in units:
        unit.reshard()
    model.set_reshard_after_forward(config.reshard_after_forward)  # as in `parallelize`
    model.set_reshard_after_forward(False, recurse=False)


def optimizer_parameters(model: nn.Module) -> list:
    """Return the parameters that this rank's optimizer updates, with their names.

    NOTE: call it after `parallelize`. An optimizer that was built before would hold the unsharded
    parameters, which the model no longer uses.
    """
    return list(model.named_parameters())


@torch.no_grad()
def add_reference(
    reference: nn.Module | None, batch: common.GlobalBatch, device: torch.device
) -> None:
    """Give each micro-batch the log-probabilities that the model of --init_from computes."""
    if reference is None:
        return
    for micro_batch in batch.micro_batches:
        inputs = common.to_device(micro_batch, device)
        loss_arguments = inputs.pop("loss_arguments")
        loss_arguments["reference_log_probs"] = reference(**inputs).cpu()  # all-gathers
    # FSDP would reshard the root in backward, which never comes.
    reference.reset_iter_state()


def forward_backward(
    model: nn.Module,
    batch: common.GlobalBatch,
    old_log_probs: list[torch.Tensor],
    config: Config,
    device: torch.device,
) -> torch.Tensor:
    """Run forward and backward on all micro-batches; returns sums over all ranks, [MEASURED].

    FSDP reduce-scatters the gradients of every micro-batch, overlapped with its backward, so a rank
    accumulates only its shard. With `--reduce_every_micro_batch false` it accumulates unsharded
    gradients and reduce-scatters them once, on the last micro-batch. That saves communication but
    needs memory for a full set of gradients.

    Args:
        old_log_probs: of each micro-batch, at the start of the step. The first inner step fills
            the list.
    """
    # The loss of a step is the sum over all target tokens, divided by their number in the global
    # batch. A mean of micro-batch means would give tokens of small micro-batches more weight.
    # FSDP averages gradients over the ranks, so multiply by their number to get a sum.
    scale = dist.get_world_size() / batch.num_targets
    total = torch.zeros(len(MEASURED), device=device)
    for i, micro_batch in enumerate(batch.micro_batches):
        last = i == len(batch.micro_batches) - 1
        # NOTE: off by one here, and ranks train on their local gradients without an error.
        model.set_requires_gradient_sync(last or config.reduce_every_micro_batch)
        # HSDP only: accumulate shards of gradients, and all-reduce them over the replicas once.
        model.set_requires_all_reduce(last)
        # Without resharding after backward, the next micro-batch needs no all-gather.
        model.set_reshard_after_backward(last or config.reshard_after_forward)
        inputs = common.to_device(micro_batch, device)
        loss_arguments = common.to_device(inputs.pop("loss_arguments"), device)
        log_probs = model(**inputs)  # all-gathers
        if i == len(old_log_probs):
            # NOTE: not those from sampling, which rounds differently. So the ratio is exactly 1.
            old_log_probs.append(log_probs.detach())
        measured = policy_loss(log_probs, old_log_probs[i], **loss_arguments, config=config)
        (measured[0] * scale).backward()  # all-gathers, and reduce-scatters if gradients sync
        total += measured.detach()
    dist.all_reduce(total)
    return total


def clip_grad_norm(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Clip the gradient norm to `max_norm`; returns the norm before clipping."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    # NOTE: the norm is a DTensor, and its local value may cover only this rank's shards.
    return norm.full_tensor()  # a collective, so call it on every rank


def optimizer_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Update the shards of this rank, and free their gradients.

    NOTE: model.zero_grad() would miss some. While a module is unsharded, as the root is after a
    validation, model.parameters() are not the sharded ones that have the gradients.
    """
    optimizer.step()
    optimizer.zero_grad()


# --- Reward and loss ------------------------------------------------------------------------------

# The format of answers in the embedded conversations: a thought, then the docstring.
ANSWER = re.compile(
    r"<\|begin_of_thought\|>\narguments: (?P<arguments>.*)\n<\|end_of_thought\|>\n\n"
    r"<\|begin_of_solution\|>\n(?P<docstring>(?:[^<]|<(?!\|))+)\n<\|end_of_solution\|>"
)
# The words of Python's manual, which comes with every Python.
WORDS = set(re.findall("[a-z]{3,}", " ".join(topics.values()).lower()))


def reward(prompt: str, answer: str, reference: str) -> float:
    """Score an answer, 0 or more. Write your own.

    It is not called for an answer that has not ended, which gets 0. So rewards below 0 are refused:
    the model would learn not to end.

    This one is from 0 to 1, by rules. An answer in the right format gets half a point for naming
    the function's arguments, and half a point for a docstring of words from Python's manual, five
    or more.

    It may run programs, fork, change the working directory, and use any random generator. It may be
    called twice for the same answer. It must leave alone this process's signal handlers, stdout,
    environment, number of threads and GPU settings.

    Args:
        prompt: the conversation before the answer, as the chat template writes it.
        answer: what the model wrote, without the token that ends the turn.
        reference: the answer in the data, empty if there is none.
    """
    given = ANSWER.fullmatch(answer)
    expected = ANSWER.fullmatch(reference)
    if given is None or expected is None:
        return 0.0
    named = set(given["arguments"].split(", "))
    arguments = set(expected["arguments"].split(", "))
    words = set(re.findall("[a-z]{3,}", given["docstring"].lower()))
    named_rightly = len(named & arguments) / len(named | arguments)
    in_manual = len(words & WORDS) / max(5, len(words))
    return (named_rightly + in_manual) / 2


def checked_reward(prompt: str, answer: str, reference: str) -> float:
    """Return what `reward` returns, or end the run in one line if it is not a number, 0 or more."""
    try:
        value = reward(prompt, answer, reference)
    except (Exception, SystemExit) as error:  # code that a model wrote may call exit()
        place = traceback.extract_tb(error.__traceback__)[:2][-1]  # the line of `reward`
        reason = f"{type(error).__name__}: {error}"[:400]
        common.refuse(f"reward() fails in {place.name}, line {place.lineno}: {reason}")
    # Advantages are fp32.
    if not isinstance(value, numbers.Real | np.bool_) or not 0 <= value < 1e30:
        common.refuse(f"reward() has to return a number, 0 or more, not {value!r:.80}")
    return float(value)


# What is measured for each sampled token. Its mean over the global batch is logged.
MEASURED = ["loss", "entropy", "policy_kl", "clip_fraction", "sampling_gap", "reference_kl"]


def policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    sampled_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    config: Config,
    reference_log_probs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return sums over the target tokens of a micro-batch, float32 [MEASURED], the loss first.

    The loss is PPO's (arXiv 1707.06347): the token's ratio, its probability now divided by the one
    at the start of the step, times the advantage of its answer. Once the ratio has left its bounds
    in the direction of the advantage, there is nothing more to gain. The upper bound may be wider,
    because otherwise rare tokens could hardly become more likely (DAPO, arXiv 2503.14476). In the
    first inner step all ratios are 1, and the bounds do nothing.

    Args:
        log_probs: float32 [tokens], of the sampled tokens, from the current model.
        old_log_probs: the same, from the model at the start of the step.
        sampled_log_probs: the same, as computed while sampling.
        advantages: float32 [tokens], of each token's answer.
        reference_log_probs: as `log_probs`, from the model of --init_from.
    """
    log_ratio = log_probs - old_log_probs
    ratio = log_ratio.exp()
    bounded_ratio = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    gain = torch.minimum(ratio * advantages, bounded_ratio * advantages)
    loss = -gain
    reference_kl = torch.zeros_like(loss)
    if reference_log_probs is not None:
        reference_kl = divergence(log_probs, reference_log_probs)
        loss = loss + config.reference_weight * reference_kl
    measured = [
        loss,
        -old_log_probs,  # its mean over sampled tokens is the entropy
        divergence(old_log_probs, log_probs),
        (gain < ratio * advantages).float(),
        (old_log_probs - sampled_log_probs).abs(),
        reference_kl,
    ]
    return torch.stack([values.sum() for values in measured])


def divergence(log_probs: torch.Tensor, other_log_probs: torch.Tensor) -> torch.Tensor:
    """Return values whose mean over tokens sampled from a distribution is its KL to the other.

    This is the estimator k3 of Schulman (2020, Approximating KL Divergence). It is never negative,
    and it varies less than a difference of log-probabilities.

    NOTE: as a loss it does not minimize KL(model || reference), which is its mean. For tokens that
    the model has just sampled, its mean gradient is that of KL(reference || model) (arXiv
    2506.09477). Both are 0 only if the two distributions are equal.
    """
    log_ratio = other_log_probs - log_probs
    return log_ratio.exp() - 1 - log_ratio


# --- Sampling -------------------------------------------------------------------------------------


class AnswerLayer(DynamicLayer):
    """Keys and values of a layer, [sequences, heads, tokens, head size], with room for more tokens.

    A DynamicLayer copies all of them for each token, which is half of the time of sampling.
    """

    length = 0  # tokens in memory

    def get_seq_length(self) -> int:
        return self.length

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple:
        """Store keys and values of the next tokens; returns those of all tokens until then."""
        begin = self.length
        end = begin + keys.shape[2]
        if begin == 0:
            self.keys, self.values = keys, values
        elif end > self.keys.shape[2]:  # make room for 64 more tokens
            self.keys, self.values = (
                nn.functional.pad(states, (0, 0, 0, 64)) for states in (self.keys, self.values)
            )
        self.keys[:, :, begin:end] = keys
        self.values[:, :, begin:end] = values
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]


def sample(
    model: nn.Module,
    prompts: list[np.ndarray],
    draws: np.ndarray,
    end_ids: list[int],
    device: torch.device,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Sample answers to prompts at temperature 1, each up to a token that ends the turn.

    Token t of answer i is where the cumulative probability exceeds draws[i, t]. So an answer does
    not depend on what is sampled beside it (except for rounding), as it would with one random
    generator for all.

    Args:
        prompts: the ids of each prompt.
        draws: float64 [answers, answer length], in [0, 1), with equally many answers to each
            prompt, in the order of `prompts`.

    Returns:
        The tokens (uint32) and their log-probabilities (float32) of each answer.
    """
    # All answers grow in the same column, so pad the prompts on the left.
    ids = nn.utils.rnn.pad_sequence(
        [torch.from_numpy(prompt).long() for prompt in prompts],
        batch_first=True,
        padding_value=-1,
        padding_side="left",
    ).to(device)
    mask = ids >= 0
    ids = ids.clamp(0)
    cache = DynamicCache()
    cache.layer_class_to_replicate = AnswerLayer
    num_answers, longest = draws.shape
    draws = torch.from_numpy(draws).to(device)
    tokens = torch.full(draws.shape, -1, device=device)
    log_probs = torch.zeros(draws.shape, device=device)
    unfinished = torch.arange(num_answers, device=device)
    for t in range(longest):
        positions = (mask.cumsum(1) - 1).clamp(0)[:, -ids.shape[1] :]
        logits = model(input_ids=ids, position_ids=positions, attention_mask=mask, cache=cache)
        if t == 0:  # a prompt is read once for all answers to it
            group = num_answers // len(prompts)
            cache.batch_repeat_interleave(group)
            logits = logits.repeat_interleave(group, 0)
            mask = mask.repeat_interleave(group, 0)
        ids = draw_tokens(logits, draws[unfinished, t])
        tokens[unfinished, t] = ids[:, 0]
        log_probs[unfinished, t] = logits.log_softmax(-1).gather(1, ids)[:, 0]
        kept = torch.stack([ids[:, 0] != end for end in end_ids]).all(0).nonzero()[:, 0]
        if len(kept) == 0:
            break
        if len(kept) < len(unfinished):  # an answer that has ended costs nothing more
            unfinished = unfinished[kept]
            ids = ids[kept]
            mask = mask[kept]
            cache.batch_select_indices(kept)
        mask = nn.functional.pad(mask, (0, 1), value=True)
    return [
        (ids[ids >= 0].astype(np.uint32), of_ids[ids >= 0])
        for ids, of_ids in zip(tokens.cpu().numpy(), log_probs.cpu().numpy())
    ]


def draw_tokens(logits: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Return the first token whose cumulative probability exceeds the draw, [sequences, 1]."""
    distribution = logits.double().softmax(-1).cumsum(-1)
    threshold = draws[:, None] * distribution[:, -1:]  # which is not exactly 1, due to rounding
    ids = torch.searchsorted(distribution, threshold, right=True)
    return ids.clamp(max=logits.shape[-1] - 1)  # for logits of NaN; then the loss is not finite


def sample_groups(
    model: nn.Module,
    documents: common.Sequences,
    chosen: list[int],
    num_answers: int,
    step: int,
    run: common.Run,
) -> list[list[Answer]]:
    """Sample a group of answers to the prompt of each chosen document.

    The random numbers depend on the seed, the step and the document only: neither on the number of
    ranks, nor on what was drawn before.
    """
    config = run.config
    prompts, references, draws = [], [], []
    for index in chosen:
        tokens, in_reference = documents.read(index)
        prompts.append(tokens[~in_reference])
        references.append(tokens[in_reference])
        generator = np.random.default_rng([config.seed, step, 1 + index])
        draws.append(generator.random((num_answers, config.answer_length)))
    sampled = iter(
        sample(model, prompts, np.concatenate(draws), run.model_config.eos_token_id, run.device)
    )
    return [
        [Answer(prompt, reference, *next(sampled)) for _ in range(num_answers)]
        for prompt, reference in zip(prompts, references)
    ]


def judge(run: common.Run, answer: Answer) -> Answer:
    """Return an answer with its reward, 0 if it has not ended."""
    if answer.tokens[-1] not in run.model_config.eos_token_id:
        return answer
    # The last token of answer and reference ends the turn.
    texts = map(run.tokenizer.decode, (answer.prompt, answer.tokens[:-1], answer.reference[:-1]))
    return answer._replace(reward=checked_reward(*texts))


def answer_prompts(
    model: nn.Module,
    documents: common.Sequences,
    chosen: list[int],
    num_answers: int,
    step: int,
    run: common.Run,
) -> list[list[Answer]]:
    """Return a group of answers, with rewards, to the prompt of each chosen document.

    Each rank samples and judges its share of them at its own pace. Then all ranks get all.
    """
    config = run.config
    rank, size = dp_rank_and_size(config)
    own = chosen[rank::size]
    groups = []
    with unsharded_parameters(model, config):
        for first in range(0, len(own), config.sample_prompts):
            some = own[first : first + config.sample_prompts]
            groups += sample_groups(model, documents, some, num_answers, step, run)
    while True:
        signals = run.stop_requested
        with torch.no_grad():  # it also restores this setting if `reward` changes it
            judged = [[judge(run, answer) for answer in group] for group in groups]
        torch.set_default_dtype(torch.float32)  # and this one
        # NOTE: a signal that stops the run also kills programs that `reward` has started, because
        # torchrun, Slurm and Kubernetes send it to all processes of a rank. So judge again.
        if run.stop_requested == signals:
            break
    # Ranks that are late (with a slow reward) are named by the error of this barrier.
    dist.group.WORLD.monitored_barrier(timedelta(minutes=config.timeout_minutes))
    of_ranks = common.gather(judged)
    # Rank r has the prompts r, r + size, ...
    return [of_ranks[i % size][i // size] for i in range(len(chosen))]


def roll_out(
    model: nn.Module, documents: common.Sequences, step: int, run: common.Run
) -> tuple[common.GlobalBatch, dict[str, float]]:
    """Return the answers that a step trains on, to prompts chosen at random, and measurements."""
    started = time.perf_counter()
    config = run.config
    generator = np.random.default_rng([config.seed, step, 0])
    chosen = generator.choice(len(documents.lengths), config.prompts, replace=False).tolist()
    groups = answer_prompts(model, documents, chosen, config.answers, step, run)
    rewards = np.array([[answer.reward for answer in group] for group in groups])
    advantages = (rewards - rewards.mean(1, keepdims=True)).flatten().astype(np.float32)
    answers = sum(groups, [])

    rank, size = dp_rank_and_size(config)
    end_ids = run.model_config.eos_token_id
    batches = AnswerBatches(answers, advantages, config, run.tokenizer.eos_token_id)
    micro_batches = batches.plan(0)
    # A forward all-gathers, so each rank needs equally many micro-batches. There are enough answers
    # to halve, because their number is a multiple of the ranks.
    while len(micro_batches) % size:
        micro_batches.sort(key=len)
        largest = micro_batches.pop()
        micro_batches += np.array_split(largest, 2)
    batch = batches.global_batch(micro_batches, rank, size)
    batch.step, batch.started = step, started
    return batch, {
        "reward": rewards.mean(),
        # The fraction of prompts whose answers differ in reward. Only these have a gradient.
        "mixed": (np.ptp(rewards, 1) > 0).mean(),
        "answer_length": batch.num_targets / len(answers),
        "truncated": np.mean([answer.tokens[-1] not in end_ids for answer in answers]),
        "sample_seconds": time.perf_counter() - started,
    }


# --- Model ----------------------------------------------------------------------------------------
# An ordinary transformers model that returns log-probabilities. It knows nothing of ranks.

# The loss computes the logits of this many tokens at a time: 1.2 GB in fp32 for 150,000 ids.
CHUNK_TOKENS = 2048


def build_model_config(config: Config, tokenizer: common.Tokenizer) -> PreTrainedConfig:
    """Build the architecture of a named shape, or read the config.json that --model points to."""
    vocabulary_size = 1 + max(tokenizer.get_vocab().values())  # some tokenizers skip ids
    if config.model in SHAPES:
        padded_size = math.ceil(vocabulary_size / 64) * 64  # keeps the head's matmul fast
        model_config = AutoConfig.for_model(vocab_size=padded_size, **SHAPES[config.model])
    else:
        model_config = common.read_model_config(config, vocabulary_size)
    model_config.eos_token_id = end_tokens(config, tokenizer)  # where generation stops
    # transformers would keep the embedding of a pad token at zero. Padding is masked by position.
    model_config.pad_token_id = None
    model_config.bos_token_id = None
    return model_config


def end_tokens(config: Config, tokenizer: common.Tokenizer) -> list[int]:
    """Return the ids that end an answer: the end of a turn, and those of the base model."""
    listed = base_generation(config).eos_token_id
    ends = set(listed if isinstance(listed, list) else [listed])
    return sorted((ends | {tokenizer.turn_end, tokenizer.eos_token_id}) - {None})


def base_generation(config: Config) -> GenerationConfig:
    """Return the base model's settings of `generate`, such as its temperature, for hf/."""
    if config.model == config.tokenizer:  # so that the ids mean the same
        with contextlib.suppress(OSError):  # not every model has this file
            return GenerationConfig.from_pretrained(config.model)
    return GenerationConfig()


def build_model(config: Config, model_config: PreTrainedConfig) -> nn.Module:
    """Build the model on the meta device: it has shapes, but no memory and no weights yet."""
    AttentionInterface.register("documents", document_attention)
    # For bucketed batches, transformers picks SDPA, or eager attention where a type lacks it.
    attention = "documents" if config.batching == "packed" else None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            model_config, dtype=torch.float32, attn_implementation=attention
        )
    log_probs = torch.compile(chunk_log_probs) if config.compile else chunk_log_probs
    model.generation_config = base_generation(config)
    model.generation_config.eos_token_id = model_config.eos_token_id
    model.forward = partial(forward_with_log_probs, model, log_probs)
    return model.eval()  # no dropout: train the policy that sampled


def forward_with_log_probs(
    self: nn.Module,
    log_probs: Callable,
    input_ids: torch.Tensor,
    labels: torch.Tensor | None = None,
    target_positions: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Replace the model's forward; returns log-probabilities of the target tokens, [targets].

    The logits of a whole micro-batch, [tokens, vocabulary], would be its largest tensor by far.
    Computing them chunk by chunk, and again in backward, never holds more than one chunk.

    Without labels, it returns the logits of the next token, float32 [sequences, vocabulary].

    NOTE: the head has to be inside the root's forward. FSDP all-gathers the parameters of a module
    for its forward only, and the head belongs to the root.

    Args:
        log_probs: `chunk_log_probs`, or the same compiled.
        input_ids, labels: int64 [sequences, length]. Labels are already shifted.
        target_positions: int64 [targets], which of the flattened positions go through the head.
        kwargs: the other keys of a micro-batch, see `common.Batches.collate`.
    """
    head = self.get_output_embeddings()
    output = self.get_decoder()(input_ids=input_ids, use_cache=labels is None, **kwargs)
    if labels is None:
        return head(output.last_hidden_state[:, -1]).float()
    hidden = output.last_hidden_state.flatten(0, 1)[target_positions]  # [targets, hidden size]
    labels = labels.flatten()[target_positions]  # [targets]
    if len(labels) <= CHUNK_TOKENS:
        return log_probs(hidden, head.weight, head.bias, labels)
    return torch.cat(
        [
            checkpoint(log_probs, chunk, head.weight, head.bias, targets, use_reentrant=False)
            for chunk, targets in zip(hidden.split(CHUNK_TOKENS), labels.split(CHUNK_TOKENS))
        ]
    )


def chunk_log_probs(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor
) -> torch.Tensor:
    """Return the log-probabilities of the labels, computed in fp32."""
    logits = nn.functional.linear(hidden, weight, bias)  # [chunk, vocabulary]
    return -nn.functional.cross_entropy(logits.float(), labels, reduction="none")


def document_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple:
    """Causal attention within each document of a packed sequence, for `AttentionInterface`.

    SDPA would need a [length, length] mask, and would compute what the mask hides.

    Args:
        query: [1, heads, length, head size]; key and value may have fewer heads.
        cu_seq_lens_q: int32 [documents + 1], cumulative sequence lengths.
        max_length_q: the longest a document can be.
        scaling: factor of the scores; None for 1 / sqrt(head size).

    Raises:
        ValueError: the model asks for something that this attention does not apply.
    """
    window = kwargs.get("sliding_window") or max_length_q
    if attention_mask is not None or kwargs.get("s_aux") is not None or window < max_length_q:
        raise ValueError("packed attention has no mask, no sinks and no sliding window")
    # Under autocast (DDP in bf16), rotary embeddings return fp32 queries and keys.
    query, key = query.to(value.dtype), key.to(value.dtype)
    if not query.is_cuda or query.dtype == torch.float32:
        return attend_one_by_one(query, key, value, cu_seq_lens_q, scaling), None
    output = varlen_attn(
        *(tensor[0].transpose(0, 1) for tensor in (query, key, value)),  # [length, heads, size]
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        scale=scaling,
        window_size=(-1, 0),  # all tokens before, none after
        enable_gqa=True,
    )
    return output[None], None  # [1, length, heads, head size]


@torch.compiler.disable  # document lengths differ in every micro-batch
def attend_one_by_one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """Compute the same without the variable-length kernel, which needs CUDA and half precision."""
    lengths = [length for length in boundaries.diff().tolist() if length]
    outputs = [
        nn.functional.scaled_dot_product_attention(
            *document, is_causal=True, scale=scaling, enable_gqa=True
        )
        for document in zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)))
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()  # [1, length, heads, size]


def transformer_blocks(model: nn.Module) -> nn.ModuleList:
    """Return the list of transformer blocks: the first list of modules in the decoder."""
    return next(m for m in model.get_decoder().modules() if isinstance(m, nn.ModuleList))


def modules_outside_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the embedding, the last norm, the head, and the modules that contain them."""
    inside = set(transformer_blocks(model).modules())
    return [module for module in model.modules() if module not in inside]


def checkpoint_activations(blocks: Iterable[nn.Module], mode: str) -> None:
    """Recompute the activations of blocks in backward, so that they need not be kept.

    `full` keeps only a block's input, `selective` also the results that `keep_expensive` chooses. A
    fraction applies `full` to that part of the blocks.
    """
    if mode == "none":
        return
    options = {"use_reentrant": False}
    fraction = 1.0
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, keep_expensive)
    elif mode != "full":
        fraction = float(mode)

    def recompute(forward: Callable) -> Callable:
        # NOTE: not functools.partial, of which torch.compile would ignore the `context_fn`.
        return lambda *args, **kwargs: checkpoint(forward, *args, **options, **kwargs)

    for i, block in enumerate(blocks):
        # Spread the blocks over the depth: 0.5 takes every second one, 0.25 every fourth.
        if int((i + 1) * fraction) > int(i * fraction):
            block.forward = recompute(block.forward)


def keep_expensive(_, operator: Any, *args, **kwargs) -> CheckpointPolicy:
    """Keep the results of matmuls, attention and collectives, and recompute the cheap rest."""
    expensive = ["mm.", "attention", "attn", "c10d"]  # in names such as aten.addmm.default
    if any(part in str(operator) for part in expensive):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def compile_blocks(blocks: Iterable[nn.Module], config: Config) -> None:
    """Compile each block on its own: blocks are alike, so they share the compiled graphs."""
    # With few lengths, compile a graph for each, for training and for validation. Otherwise let the
    # compiler find one graph for all lengths.
    few_lengths = config.pad_to_multiple_of > 1 or config.batching == "packed"
    # After so many graphs, blocks would run in eager mode. The second limit counts all of them.
    torch._dynamo.config.recompile_limit = 10_000
    torch._dynamo.config.accumulated_recompile_limit = 10_000
    for block in blocks:
        block.compile(dynamic=False if few_lengths else None)


@torch.no_grad()
def initialize(
    model: nn.Module, modules: Iterable[nn.Module], seed: int, device: torch.device
) -> None:
    """Give modules of `model` that are on the meta device memory and initial weights.

    The weights depend only on the seed and the module's name, so every strategy and every world
    size starts from the same model.
    """
    names = {module: name for name, module in model.named_modules()}
    for module in reversed(list(modules)):  # children first
        module.to_empty(device=device, recurse=False)
        for parameter in module.parameters(recurse=False):
            parameter.fill_(math.nan)  # a weight that nothing initializes fails in the first step
        torch.manual_seed(zlib.crc32(f"{seed} {names[module]}".encode()))
        # NOTE: this also rebuilds the rotary frequencies. They are a buffer that no checkpoint
        # holds, and `to_empty` leaves garbage in it.
        model._init_weights(module)


# --- Optimizer and schedule -----------------------------------------------------------------------


def weight_decay_names(model: nn.Module) -> set[str]:
    """Return the names of parameters with weight decay: matrices except embeddings.

    NOTE: call it before `parallelize`, because FSDP1 flattens parameters to one dimension.
    """
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim > 1
        and parameter not in embeddings
        and not name.endswith(("bias", "A_log"))  # A_log: decay rates of state-space models
    }


def build_optimizer(model: nn.Module, decayed: set[str], config: Config) -> torch.optim.AdamW:
    """Build AdamW over this rank's parameters; `decayed` are the names with weight decay."""
    trained = [(name, p) for name, p in optimizer_parameters(model) if p.requires_grad]
    with_decay, without_decay = [], []
    for name, parameter in trained:
        (with_decay if name in decayed else without_decay).append(parameter)
    assert len({*with_decay, *without_decay}) == len(trained), "each parameter is in one group"
    groups = [
        {"params": with_decay, "weight_decay": config.weight_decay},
        {"params": without_decay, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)


def set_learning_rates(config: Config, num_parameters: int) -> None:
    """Fill in the learning rates that no flag sets. A high one ruins what a large model knows."""
    if config.learning_rate is None:
        config.learning_rate = 5e-4 if num_parameters < 10_000_000 else 1e-6
    if config.min_learning_rate is None:
        config.min_learning_rate = config.learning_rate / 10
    if config.min_learning_rate > config.learning_rate:
        common.refuse("--min_learning_rate is above --learning_rate")


def learning_rate_at(step: int, config: Config) -> float:
    """Linear warm-up, then cosine decay to the minimum, which the last step reaches.

    With --decay_steps the rate stays at its peak until the decay (WSD, arXiv 2404.06395). So runs
    of different lengths share their steps until the shorter one decays.
    """
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    begin = max(config.warmup_steps, config.steps - (config.decay_steps or config.steps))
    progress = max(0, step - begin) / (config.steps - begin)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return config.min_learning_rate + cosine * (config.learning_rate - config.min_learning_rate)


# --- Training and validation ----------------------------------------------------------------------


def train_step(
    model: nn.Module,
    reference: nn.Module | None,
    optimizer: torch.optim.Optimizer,
    batch: common.GlobalBatch,
    learning_rate: float,
    config: Config,
    device: torch.device,
) -> dict[str, float]:
    """Run the optimizer steps on a step's answers; returns what the last of them measured."""
    add_reference(reference, batch, device)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    old_log_probs: list[torch.Tensor] = []
    for _ in range(config.inner_steps):
        total = forward_backward(model, batch, old_log_probs, config, device)
        grad_norm = clip_grad_norm(model, config.grad_clip or math.inf).item()  # waits for the GPU
        measured = dict(zip(MEASURED, (total / batch.num_targets).tolist()))
        # Before the update: values that are not finite must not reach the weights.
        common.refuse_non_finite(batch.step, measured["loss"], grad_norm)
        optimizer_step(model, optimizer)
    return measured | {"grad_norm": grad_norm}


def evaluate(model: nn.Module, documents: common.Sequences, step: int, run: common.Run) -> float:
    """Log and return the mean reward on held-out prompts, always with the same random numbers."""
    # The file may be sorted by difficulty, so choose at random.
    shuffled = np.random.default_rng(0).permutation(len(documents.lengths))
    chosen = shuffled[: run.config.eval_prompts].tolist()
    groups = answer_prompts(model, documents, chosen, run.config.eval_answers, 0, run)
    mean = np.mean([answer.reward for group in groups for answer in group])
    run.log({"step": step, "validation_reward": mean})
    common.say(f"step {step}: validation reward {mean:.4f}")
    return mean


# --- Main -----------------------------------------------------------------------------------------


def main() -> None:
    config = common.parse_config(Config)

    # Tokenizing can take longer than a collective may wait, so do it before the ranks meet. The
    # first rank of a node does the work, and the others find it in the cache.
    tokenizer = chat_tokenizer(config)
    documents = common.load_documents(config, chat.COLUMNS, tokenize_prompt, tokenizer)
    parts = common.split(documents, math.inf)
    training, validation = (leave_out_long(part, config) for part in parts)
    if config.prompts > len(training.lengths):
        common.refuse(
            f"--prompts {config.prompts} exceeds the {len(training.lengths)} training prompts"
        )
    model_config = build_model_config(config, tokenizer)
    if model_config.model_type not in common.PACKED_TYPES.split():
        # The others have caches or positions with which `sample` would be wrong.
        common.refuse(f"--model {config.model}: type {model_config.model_type} cannot sample here")
    if config.steps == 0:
        print("the data is prepared")
        return

    device = init_process_group(config)
    model = build_model(config, model_config)
    set_learning_rates(config, model.num_parameters())
    run = common.Run(config, model, tokenizer, documents, device)
    checkpoints = common.Checkpoints(run)
    progress = checkpoints.find()

    decayed = weight_decay_names(model)
    model = parallelize(model, config, device)
    optimizer = build_optimizer(model, decayed, config)
    if checkpoints.last:
        common.load_checkpoint(checkpoints.last, model, optimizer)
    elif config.init_from:
        common.load_weights(model, config.init_from)
    reference = None
    if config.reference_weight:
        reference = parallelize(build_model(config, model_config), config, device)
        common.load_weights(reference, config.init_from)

    run.begin(
        progress,
        f"{config.prompts} prompts x {config.answers} answers a step, sampled at "
        f"temperature 1, learning rate {config.learning_rate:g}",
    )
    # Forked children (of a reward) have to die of a signal that stops the run.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.register_at_fork(after_in_child=partial(signal.signal, number, signal.SIG_DFL))
    if not checkpoints.last:
        evaluate(model, validation, 0, run)
    # Prompts and random numbers depend on the step number, so a resumed run needs no other state.
    for step in range(progress["step"] + 1, config.steps + 1):
        batch, of_answers = roll_out(model, training, step, run)
        if of_answers["mixed"] == 0:
            common.say(f"step {step}: no gradient, all answers to a prompt have the same reward")
        learning_rate = learning_rate_at(step, config)
        measured = train_step(model, reference, optimizer, batch, learning_rate, config, device)
        measured |= of_answers | {"learning_rate": learning_rate}
        progress = {"step": step, "tokens": progress["tokens"] + batch.num_targets}
        run.log_step(batch, aim="reward", **progress, **measured)
        if step % config.eval_every == 0 or step == config.steps:
            evaluate(model, validation, step, run)
        if step % config.checkpoint_every == 0 or step == config.steps or run.stopping:
            checkpoints.save(model, optimizer, progress)
        if run.stopping:
            break
    checkpoints.wait()

    # The communication threads can abort at exit while a model is alive, so free it first.
    del model, reference, optimizer
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
    run.finish(progress["step"], checkpoints.last, NEXT_COMMAND)


if __name__ == "__main__":
    common.launch(main)
