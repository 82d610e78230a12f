"""Reinforcement learning with FSDP2 (GRPO): train on answers that the model samples itself.

    torchrun --standalone --nproc-per-node=2 fsdp2_grpo.py --init_from runs/fsdp2_sft

When to use it: a program can tell good answers from bad ones, and a fine-tuned model already finds
some of the good ones.

In each step the model samples a group of answers to each of several prompts, and `reward` scores
them. The advantage of an answer is its reward minus the mean reward of its group, so no value model
is needed (GRPO, arXiv 2402.03300). Training makes the tokens of better answers more likely, and the
tokens of worse answers less likely. Advantages are not divided by the group's standard deviation,
which would overweight a rare mistake on an easy prompt. The loss of an answer is not divided by its
length (Dr. GRPO, arXiv 2503.20783). The loss of a step is the sum over all target tokens, divided
by their number, so all tokens of the global batch have equal weight (DAPO, arXiv 2503.14476).

With --teacher, the advantage is a larger model's log-probability of a token minus the model's own
(on-policy distillation). --teacher_weight adds this to the reward's advantage.

FSDP2 shards the model: `fully_shard` turns each parameter into a DTensor, a tensor that is spread
over ranks. Its `shape` is the shape of the full tensor, and `to_local()` is this rank's part of it,
for a parameter its shard. Each rank samples its answers with all parameters unsharded, and trains
with shards.

Memory per rank, with N ranks: 1/N of the fp32 parameters, gradients and AdamW moments, 16/N bytes
per parameter. While it trains, also the full parameters and gradients of one or two blocks and of
the root (last norm, head and a tied embedding). While answers are sampled, the full parameters of
the whole model, and the KV cache of --sample_prompts x --answers sequences: 2 x layers x key-value
heads x head size elements per token. --reference_weight and --teacher each add another model: 1/N
of its parameters in compute precision, and one or two full blocks and its root while it computes
log-probabilities.

Communication volume per step, with P the bytes of the parameters in compute precision and G the
bytes of the fp32 gradients: one all-gather of all parameters, P(N-1)/N, and nothing more while a
rank samples, however long its answers are. Then all ranks gather all answers. Training sends (2P +
G)(N-1)/N per micro-batch and inner step: all-gathers for forward and backward, and reduce-scatters.
A reference or teacher all-gathers its own P(N-1)/N per micro-batch, for its forward.
"""

import contextlib
import itertools
import json
import math
import numbers
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import field, replace
from datetime import timedelta
from functools import partial
from pydoc_data.topics import topics
from types import SimpleNamespace
from typing import Annotated, Any, Literal, NamedTuple

import jinja2
import numpy as np
import torch
import torch.distributed as dist
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.optim import AdamW, Optimizer
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache, DynamicLayer

import common
import conversations
from model import (
    CHUNK_TOKENS,
    PACKED_TYPES,
    build_config,
    build_model,
    checkpoint_activations,
    compile_blocks,
    count_flops,
    initialize,
    modules_outside_blocks,
    transformer_blocks,
    weight_decay_names,
    weights_fingerprint,
)
from run import (
    Flags,
    Run,
    flag,
    launch,
    max_over_ranks,
    parse_config,
    refuse_non_finite,
    refuse_untrained,
    set_learning_rates,
    set_up_gpu,
)

NEXT_COMMAND = "docs/rl.md says how to train on a reward of your own"


# The shared flags, such as learning rate and batch sizes, are in run.py.
@dataclass
class Config(Flags):
    """The flags of this script, beside the shared ones."""

    dataset: str | list[str] = flag(
        "stdlib-docstrings",
        "stdlib-docstrings, a hub id, or .parquet or .jsonl files, globs, folders or URLs",
    )
    chat_template: Literal["own", "collection"] = flag(
        "own",
        "own: the tokenizer's. collection: this collection's, if the model was trained with it",
    )
    max_length: PositiveInt = flag(
        512, "longest prompt + answer in tokens; prompts that leave no room are left out"
    )
    answer_length: PositiveInt = flag(
        128, "longest answer in tokens; an answer that has not ended by then gets a reward of 0"
    )
    micro_batch_tokens: PositiveInt = flag(
        4096, "token positions of one forward pass of one rank, padding included"
    )
    prompts: PositiveInt = flag(16, "prompts of one step, over all ranks")
    answers: PositiveInt = flag(8, "answers to each prompt (a group)")
    sample_prompts: PositiveInt = flag(
        16, "prompts that a rank samples answers to at a time; sets the size of the KV cache"
    )
    inner_steps: PositiveInt = flag(1, "optimizer steps on the answers of one step")
    clip_low: Annotated[float, Field(ge=0, le=1)] = flag(
        0.2,
        "a token's ratio (probability now / at the start of the step) is clipped to at least 1 "
        "minus this; no effect with --inner_steps 1",
    )
    clip_high: NonNegativeFloat = flag(0.28, "the ratio is clipped to at most 1 plus this")
    teacher: str | None = flag(
        None,
        "larger model to learn from, with the same tokenizer: a run directory, or a Hugging Face "
        "directory or hub id. Without --teacher_weight it replaces the reward",
    )
    teacher_weight: PositiveFloat | None = flag(
        None, "add the teacher with this weight to the advantages of the reward"
    )
    reference_weight: NonNegativeFloat = flag(
        0.0, "weight of the KL divergence from the --init_from model, which is kept in shards"
    )
    steps: NonNegativeInt = flag(
        80, "steps of the whole run, each with new answers; 0 prepares the data and exits"
    )
    learning_rate: PositiveFloat | None = flag(
        None,
        "peak learning rate of AdamW. The default depends on the model: 5e-4 with fewer than 10 "
        "million parameters, otherwise 1e-6",
    )
    min_learning_rate: NonNegativeFloat | None = flag(
        None, "learning rate at the end of the decay; default: a tenth of the peak"
    )
    warmup_steps: NonNegativeInt = flag(5, "steps of linear warm-up")
    eval_every: PositiveInt = flag(20, "steps between validations; one comes before the first step")
    eval_prompts: PositiveInt = flag(64, "held-out prompts of one validation, over all ranks")
    eval_answers: PositiveInt = flag(4, "answers to each held-out prompt")
    checkpoint_every: NonNegativeInt = flag(
        20, "steps between checkpoints; the last step saves too. 0: no checkpoints and no hf/"
    )
    # These are no flags here: prompts and answers set the size of a step and of a validation.
    global_batch_tokens: int = field(default=0, init=False)
    eval_tokens: int = field(default=0, init=False)
    reshard_after_forward: bool = flag(
        True, "free a block's full parameters after forward and all-gather them for backward"
    )
    dp_replicate: PositiveInt = flag(1, "replicas of the sharded model (HSDP)")
    cpu_offload: bool = flag(False, "keep parameters, gradients and optimizer state in CPU memory")
    reduce_every_micro_batch: bool = flag(
        True,
        "reduce-scatter gradients in every micro-batch. false: once per step, which needs memory "
        "for a full set of gradients",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reference_weight and not self.init_from:
            common.refuse("--reference_weight needs --init_from, which names the reference")
        if self.answer_length >= self.max_length:
            common.refuse("--answer_length leaves no room for a prompt in --max_length")
        if self.teacher_weight and not self.teacher:
            common.refuse("--teacher_weight needs --teacher")
        if self.rewarded and self.answers == 1:
            common.refuse(
                "--answers 1 makes the rewards' advantages 0; use 2 or more, or a teacher alone"
            )

    @property
    def rewarded(self) -> bool:
        """Return whether `reward` scores the answers. It does not with a teacher alone."""
        return bool(self.teacher_weight or not self.teacher)


# --- Prompts --------------------------------------------------------------------------------------


def read_prompt(row: dict) -> tuple:
    """Return the messages of a row that are the prompt, and a reference answer.

    A last message of the assistant is the reference, unless there is a column `answer`. Without
    either, the reference is empty.

    Raises:
        LeftOut: why the row is left out.
    """
    messages, start = conversations.read_conversation(row)
    if conversations.read_tools(row) or any("tool_calls" in message for message in messages):
        raise common.LeftOut("hold tools or calls, which nothing here runs")
    reference = ""
    if messages[start:] and messages[-1]["role"] == "assistant":
        reference = messages.pop()["content"]
    if messages and messages[-1]["role"] == "assistant":
        raise common.LeftOut("have a prompt that begins the answer")
    if row.get("answer") is not None:
        reference = row["answer"]
    # Numbers and dates of a typed column may not be what was written: 1.10 became 1.1.
    if not isinstance(reference, str | int | list | dict):
        raise common.LeftOut("hold an answer that is not text")
    if not isinstance(reference, str):
        reference = json.dumps(reference, ensure_ascii=False, default=str)
    if all(message["role"] == "system" for message in messages):
        raise common.LeftOut("hold no prompt")
    return messages, reference


def tokenize_prompt(row: dict, tokenizer: common.Tokenizer) -> tuple:
    """Tokenize a prompt and its reference; returns the values of `common.tokenize_text`.

    `in_loss` marks the reference. Prompts with the same messages before the first answer go to the
    same side of the split, as in fine-tuning.

    Raises:
        LeftOut: why the conversation is left out.
    """
    messages, reference = read_prompt(row)
    conversations.refuse_special_tokens(tokenizer, messages, tools=[])
    render = partial(tokenizer.apply_chat_template, tokenize=False)
    try:
        text = render(messages, add_generation_prompt=True)
        # Without a generation prompt, the answer has to follow at once, as after [/INST].
        answered = render([*messages, {"role": "assistant", "content": "answer"}])
        follows = answered.removeprefix(text).lstrip().startswith("answer")
        if text == render(messages) and not follows:
            raise common.LeftOut("have a chat template that does not ask for an answer")
    except jinja2.TemplateError as problem:
        raise common.LeftOut(f"have no place in the chat template: {problem}") from problem
    # Special tokens are parsed as tokens.
    prompt = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    answer = tokenizer.backend_tokenizer.encode(reference, add_special_tokens=False).ids
    tokens = np.array([*prompt, *answer, tokenizer.eos_token_id], np.uint32)
    first = itertools.takewhile(lambda message: message["role"] != "assistant", messages)
    return tokens, np.arange(len(tokens)) >= len(prompt), list(first), 0


def leave_out_long(documents: common.Sequences, config: Config) -> common.Sequences:
    """Return the documents whose prompts leave room for an answer."""
    longest = config.max_length - config.answer_length
    fits = documents.lengths + 1 - documents.num_targets <= longest
    if not fits.all():
        number = common.counted((~fits).sum(), "prompt")
        common.say(f"{number} left out, because of more than {longest:,} tokens")
    if not fits.any():
        common.refuse(f"--max_length {config.max_length} leaves no prompt; use a larger one")
    return common.Sequences(documents.documents, documents.index[fits])


# --- Reward ---------------------------------------------------------------------------------------

# The format of answers in the embedded conversations: a thought, then the docstring.
ANSWER = re.compile(
    r"<\|begin_of_thought\|>\narguments: (?P<arguments>.*)\n<\|end_of_thought\|>\n\n"
    r"<\|begin_of_solution\|>\n(?P<docstring>(?:[^<]|<(?!\|))+)\n<\|end_of_solution\|>"
)
# The words of Python's manual, which comes with every Python.
WORDS = set(re.findall("[a-z]{3,}", " ".join(topics.values()).lower()))


def reward(prompt: str, answer: str, reference: str) -> float:
    """Score an answer, 0 or more. Write your own.

    An answer that has not ended gets 0 without a call. Rewards below 0 are refused, because the
    model would learn not to end.

    This one is from 0 to 1. An answer in the right format gets up to half a point for naming the
    function's arguments, and up to half a point for a docstring of words from Python's manual, at
    least five.

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
    """Return what `reward` returns, or end the run if that is not a number, 0 or more."""
    try:
        value = reward(prompt, answer, reference)
    except SystemExit as error:  # code that a model wrote may call exit()
        raise RuntimeError("reward() calls exit()").with_traceback(error.__traceback__) from None
    # Advantages are fp32.
    if not isinstance(value, numbers.Real | np.bool_) or not 0 <= value < 1e30:
        common.refuse(f"reward() has to return a number, 0 or more, not {value!r:.80}")
    return float(value)


def find_teacher(config: Config, tokenizer: common.Tokenizer) -> None:
    """Set the directory of --teacher. Refuses a teacher that means other tokens by the same ids."""
    config.teacher = common.fetch_weights(config.teacher, "--teacher")
    known = common.load_tokenizer(config.teacher).get_vocab()
    if known | tokenizer.get_vocab() != known:
        common.refuse(f"--teacher {config.teacher} has another tokenizer than the model")


# --- Strategy -------------------------------------------------------------------------------------


def init_process_group(config: Config) -> torch.device:
    """Create the process group from torchrun's variables; returns the device of this rank."""
    timeout = timedelta(minutes=config.timeout_minutes)
    if not torch.cuda.is_available():
        dist.init_process_group("gloo", timeout=timeout)
        return torch.device("cpu")
    device = set_up_gpu(config)
    # cuDNN attention builds a plan for each new shape, and while sampling each token has one.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # gloo beside NCCL handles tensors in CPU memory: pickled Python objects, the numbers of
    # `max_over_ranks` and, with --cpu_offload, the norm of the gradients.
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout, device_id=device)
    return device


def parallelize(model: nn.Module, config: Config, device: torch.device) -> nn.Module:
    """Shard a model that is on the meta device, and give the shards memory and initial weights.

    `fully_shard(module)` makes one unit of the module's parameters: they are gathered and freed
    together. Parameters that an earlier call on a submodule has claimed stay in the submodule's
    unit. The call turns the parameters into DTensors, gives the module a class with the methods of
    `FSDPModule`, and adds these hooks:

    - Before forward, one all-gather makes the unit's parameters full. After forward they are freed.
    - Before backward, another all-gather makes them full again. After backward, one reduce-scatter
      leaves each rank the averaged gradient of its shard, and the full tensors are freed.

    On GPUs this communication runs on its own streams and overlaps with compute. In forward, the
    CPU runs ahead and starts the next block's all-gather while the GPU still computes this block.
    In backward, the hook before a block's backward also starts the all-gather of the preceding
    block, whose backward comes next.
    """
    blocks = transformer_blocks(model)
    # Recomputation replaces a block's `forward`. FSDP's hooks run around `forward`, so a recomputed
    # forward uses the parameters that were gathered for backward. The compiler takes the block's
    # whole call, recomputation included, but leaves FSDP's hooks as they are.
    checkpoint_activations(blocks, config.activation_checkpointing)
    if config.compile:
        compile_blocks(blocks, config)

    ranks = dist.get_world_size()
    mesh = init_device_mesh(device.type, (ranks,))
    if config.dp_replicate > 1:
        # HSDP (hybrid sharding): the mesh arranges the ranks in a grid. Shard over the ranks of a
        # row, such as the GPUs of one machine, and replicate across rows. Then all-gathers stay in
        # a row. After a row's reduce-scatter, an all-reduce across rows averages the shards of the
        # gradients.
        mesh = init_device_mesh(
            device.type,
            (config.dp_replicate, ranks // config.dp_replicate),
            mesh_dim_names=("replicate", "shard"),
        )
    options = {"mesh": mesh}
    if config.precision != "fp32":
        # Shards and optimizer state stay fp32. Parameters are cast to bf16 before they are
        # gathered, so blocks compute in bf16 and their full gradients are bf16. These are cast to
        # fp32 before they are reduced. FSDP would also cast the inputs of each unit. Leave them,
        # because some types (OLMo 2) pass rotary embeddings in fp32 on purpose.
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    if config.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")

    # On the meta device the model has shapes but no memory. Each rank draws the same full weights,
    # because a module is seeded by its name, and keeps its shards: nothing is broadcast.
    initialize(model, modules_outside_blocks(model), config.seed, device)
    model.tie_weights()  # `initialize` gave each module memory of its own, which untied them
    # From the inside out: blocks first, then the root, which gets the rest. (The other order raises
    # an error in torch 2.13.) With the root alone, one all-gather would bring all parameters at
    # once, and overlap with nothing.
    for block in blocks:
        # One block at a time, so that a rank never holds more than one full block.
        initialize(model, block.modules(), config.seed, device)
        fully_shard(block, reshard_after_forward=config.reshard_after_forward, **options)
    if not model.config.tie_word_embeddings:
        # A tied embedding is the head's weight too, and stays in the root's unit. An untied one can
        # be a unit of its own, which is freed after its forward. Its backward needs no weights, so
        # do not gather them.
        fully_shard(
            model.get_input_embeddings(),
            reshard_after_forward=config.reshard_after_forward,
            **options,
        ).set_unshard_in_backward(False)
    # Do not free the root's parameters after forward, because backward begins with the head.
    fully_shard(model, reshard_after_forward=False, **options)
    return model


@contextlib.contextmanager
def unsharded_parameters(model: nn.Module, config: Config) -> Iterator[None]:
    """Unshard all parameters on every rank, so that sampling needs no communication.

    NOTE: with shards, each token would all-gather each block, and a rank whose answers have all
    ended would leave the other ranks waiting.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.unshard()  # an all-gather
    model.set_reshard_after_forward(False)  # otherwise the first forward would free the blocks
    attention = model.config._attn_implementation
    if config.batching == "packed":
        model.set_attn_implementation("sdpa")  # the prompts' padding needs a mask
    # Run in eager mode: each token makes sequences longer, and a new length could compile again.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        yield
    model.set_attn_implementation(attention)
    for unit in units:
        unit.reshard()
    model.set_reshard_after_forward(config.reshard_after_forward)  # as in `parallelize`
    model.set_reshard_after_forward(False, recurse=False)


def load_frozen(directory: str, run: Run) -> nn.Module:
    """Load a reference or teacher: sharded like the model, but never trained.

    Its shards are kept in compute precision, because no optimizer needs them in fp32.
    """
    config = replace(run.config, model=directory)
    # The vocabulary must cover the trained model's padding ids, too, because they may be sampled.
    model = build_policy(build_config(config, run.model_config.vocab_size, None), config)
    if config.precision != "fp32":
        # NOTE: not model.bfloat16(), which would round buffers, too, such as rotary frequencies.
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    model = parallelize(model, config, run.device)
    common.load_weights(model, directory)
    return model


@torch.no_grad()
def add_log_probs(frozen: dict, micro_batches: list, device: torch.device) -> None:
    """Give `policy_loss` the log-probabilities of other models, by the names of its arguments."""
    for name, model in frozen.items():
        for micro_batch in micro_batches:
            inputs = common.to_device(micro_batch, device)
            loss_arguments = inputs.pop("loss_arguments")
            loss_arguments[name] = model(**inputs).cpu()  # [targets]; all-gathers
        # FSDP would reshard the root in backward, which never comes.
        model.reset_iter_state()


def train_step(
    model: nn.Module,
    optimizer: Optimizer,
    batch: common.GlobalBatch,
    step: int,
    config: Config,
    device: torch.device,
) -> dict:
    """Run --inner_steps optimizer steps on a step's answers; returns what the last one measured.

    `model(**micro_batch)` returns the log-probabilities of the micro-batch's target tokens
    (`forward_with_log_probs`). The root's forward computes them, because only there is the head's
    weight sure to be full. `policy_loss` sums the loss.

    FSDP reduce-scatters the gradients of every micro-batch, overlapped with its backward, so a rank
    accumulates only its shards. With `--reduce_every_micro_batch false` it casts each micro-batch's
    full gradients to fp32, adds them up, and reduce-scatters the sum once, on the last micro-batch.
    That saves communication but needs memory for a full set of gradients.
    """
    old_log_probs = []  # of each micro-batch, from the model at the start of the step
    # The loss of a step is the sum over all target tokens, divided by their number in the global
    # batch, which every rank counts by itself. A mean of micro-batch means would give tokens of
    # small micro-batches more weight.
    # FSDP averages gradients over the ranks, so multiply by their number to get a sum. (AdamW would
    # hide a missing factor: its updates hardly depend on gradients' scale. The norm shows it.)
    scale = dist.get_world_size() / batch.num_targets
    for inner_step in range(config.inner_steps):
        total = 0
        for i, micro_batch in enumerate(batch.micro_batches):
            last = i == len(batch.micro_batches) - 1
            # The setters reach all units in the model.
            # NOTE: with --reduce_every_micro_batch false, a `last` that is one micro-batch early
            # would leave full gradients in FSDP, where `zero_grad` does not reach them. The next
            # step would add them, without an error.
            model.set_requires_gradient_sync(last or config.reduce_every_micro_batch)
            # HSDP only: accumulate shards of gradients, and all-reduce them across rows once. (The
            # call above sets this flag, too, so keep this order.)
            model.set_requires_all_reduce(last)
            # With --reshard_after_forward false, parameters stay full from the first micro-batch's
            # forward to the last one's backward, so only the first forward gathers them.
            model.set_reshard_after_backward(last or config.reshard_after_forward)
            inputs = common.to_device(micro_batch, device)
            loss_arguments = common.to_device(inputs.pop("loss_arguments"), device)
            log_probs = model(**inputs)  # all-gathers
            if inner_step == 0:
                # NOTE: not those from sampling, which rounds differently. The ratio has to be 1.
                old_log_probs.append(log_probs.detach())
            sums = policy_loss(log_probs, old_log_probs[i], **loss_arguments, config=config)
            (sums[0] * scale).backward()  # all-gathers, and reduce-scatters if gradients sync
            total += sums.detach()
        dist.all_reduce(total)

        # Each rank sums the squares of its shards, and one all-reduce adds up the sums. So call it
        # on every rank. If the norm exceeds --grad_clip, all gradients are scaled down to it.
        norm = nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
        norm = norm.full_tensor()  # unwraps a replicated DTensor: each rank has it

        # `.item()` waits for the GPU. Do it here, not after the update, because non-finite values
        # must not reach the weights.
        measured = dict(zip(MEASURED, (total / batch.num_targets).tolist()))
        measured["grad_norm"] = norm.item()
        refuse_non_finite(step, measured["loss"], measured["grad_norm"])
        measured["learning_rate"] = learning_rate_at(step, config)
        for group in optimizer.param_groups:
            group["lr"] = measured["learning_rate"]
        optimizer.step()  # of this rank's shards, without communication
        optimizer.zero_grad()
    return measured


def evaluate(
    model: nn.Module, frozen: dict, documents: common.Sequences, step: int, run: Run
) -> None:
    """Log the mean reward on held-out prompts, always with the same random numbers.

    With a teacher, also the mean KL(model || teacher) of the answers' tokens. Nothing is logged if
    a signal asks to stop.
    """
    config = run.config
    # The file may be sorted by difficulty, so choose at random.
    shuffled = np.random.default_rng(0).permutation(len(documents.lengths))
    chosen = shuffled[: config.eval_prompts].tolist()
    number = config.sample_prompts * run.world_size
    answers = []
    for first in range(0, len(chosen), number):
        some = chosen[first : first + number]
        groups = answer_prompts(model, documents, some, config.eval_answers, 0, run)
        answers += sum(groups, [])
        if run.stops_validation():  # a small all-reduce in CPU memory
            return
    found = {}
    if config.rewarded:
        found["validation_reward"] = np.mean([answer.reward for answer in answers])
    if config.teacher:
        batches = AnswerBatches(answers, np.zeros(len(answers)), run)  # advantages play no role
        micro_batches = [*batches.evaluation(run.rank, run.world_size)]
        add_log_probs(frozen, micro_batches, run.device)
        # A rank that repeats a micro-batch of another one has no labels there, which adds 0.
        total = sum(m["loss_arguments"]["teacher_log_probs"].sum().item() for m in micro_batches)
        # As `teacher_kl` of `policy_loss`, but with log-probabilities from sampling.
        drawn = np.concatenate([answer.log_probs for answer in answers])
        found["validation_kl"] = drawn.mean(dtype=float) - sum(common.gather(total)) / len(drawn)
    run.log({"step": step} | found)
    for name, value in found.items():
        common.say(f"step {step}: {name.replace('_', ' ')} {value:.4f}")


# --- Model and loss -------------------------------------------------------------------------------


def build_policy(model_config: PreTrainedConfig, config: Config) -> nn.Module:
    """Build the model on the meta device, with a forward that returns log-probabilities."""
    model = build_model(model_config, config)
    log_probs = torch.compile(chunk_log_probs) if config.compile else chunk_log_probs
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

    NOTE: the head is inside the model's forward, because a sharded model has its full weights only
    there.

    Args:
        log_probs: `chunk_log_probs`, or the same compiled.
        input_ids, labels: int64 [sequences, length]. Labels are already shifted.
        target_positions: int64 [targets], the flattened positions that go through the head.
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
    # An fp32 copy, so that autograd sums the chunks' gradients in fp32.
    weight = head.weight.float()
    return torch.cat(
        [
            checkpoint(log_probs, chunk, weight, head.bias, targets, use_reentrant=False)
            for chunk, targets in zip(hidden.split(CHUNK_TOKENS), labels.split(CHUNK_TOKENS))
        ]
    )


def chunk_log_probs(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor
) -> torch.Tensor:
    """Return the log-probabilities of the labels, computed in fp32."""
    logits = nn.functional.linear(hidden, weight.to(hidden.dtype), bias)  # [chunk, vocabulary]
    return -nn.functional.cross_entropy(logits.float(), labels, reduction="none")


# What is measured for each sampled token. Its mean over the global batch is logged.
MEASURED = "loss entropy policy_kl clip_fraction sampling_gap reference_kl teacher_kl".split()


def policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    sampled_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    config: Config,
    reference_log_probs: torch.Tensor | None = None,
    teacher_log_probs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return sums over the target tokens of a micro-batch, float32 [MEASURED], the loss first.

    Without a teacher, teacher_kl is left out.

    The loss is PPO's (arXiv 1707.06347): minus the token's ratio, its probability now divided by
    the probability at the start of the step, times the advantage of its answer. Once the ratio has
    passed its bound in the direction of the advantage, the gradient is 0. The upper bound may be
    wider, because otherwise rare tokens could hardly become more likely (DAPO, arXiv 2503.14476).
    In the first inner step all ratios are 1, and the bounds do nothing.

    Args:
        log_probs: float32 [tokens], of the sampled tokens, from the current model.
        old_log_probs: as `log_probs`, from the model at the start of the step.
        sampled_log_probs: as `log_probs`, from sampling.
        advantages: float32 [tokens], of each token's answer.
        reference_log_probs: as `log_probs`, from the model of --init_from.
        teacher_log_probs: as `log_probs`, from --teacher.
    """
    if teacher_log_probs is not None:
        # An estimate (k1) of each token's KL(model || teacher), the reverse KL. As the advantage,
        # its negative gives in expectation the exact gradient of this KL at a sampled prefix, with
        # the prefix held fixed: discount 0 (arXiv 2306.13649, and
        # thinkingmachines.ai/blog/on-policy-distillation). The gradient of the KL between whole
        # answers would add the log ratios of later tokens (arXiv 2306.08543).
        teacher_kl = old_log_probs - teacher_log_probs  # [tokens]
        advantages = advantages - (config.teacher_weight or 1) * teacher_kl
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
        -old_log_probs,  # its mean over tokens estimates the entropy
        divergence(old_log_probs, log_probs),
        (gain < ratio * advantages).float(),
        (old_log_probs - sampled_log_probs).abs(),
        reference_kl,
    ]
    if teacher_log_probs is not None:
        measured.append(teacher_kl)
    return torch.stack([values.sum() for values in measured])


def divergence(log_probs: torch.Tensor, other_log_probs: torch.Tensor) -> torch.Tensor:
    """Estimate KL(p || q) per token, from log p and log q of tokens sampled from p.

    This is the estimator k3 of Schulman (2020, Approximating KL Divergence). It is never negative,
    and it varies less than a difference of log-probabilities.

    NOTE: as a loss it does not minimize KL(model || reference), which is its mean. For tokens that
    the model has just sampled, its mean gradient is that of KL(reference || model) (arXiv
    2506.09477). Both are 0 only if the two distributions are equal.
    """
    log_ratio = other_log_probs - log_probs
    return log_ratio.exp() - 1 - log_ratio


# --- Sampling -------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """A sampled answer. Its last token ends the turn, unless it reached --answer_length."""

    prompt: np.ndarray  # int64, token ids
    reference: np.ndarray  # int64
    tokens: np.ndarray  # uint32
    log_probs: np.ndarray  # float32 [tokens], from sampling
    reward: float = 0.0


class AnswerBatches(conversations.ConversationBatches):
    """Batches of the answers of one step, with what the loss needs for each target token.

    Args:
        answers: of all ranks.
        advantages: float32 [answers].
    """

    def __init__(self, answers: list[Answer], advantages: np.ndarray, run: Run):
        self.answers = answers
        self.advantages = advantages
        num_targets = np.array([len(answer.tokens) for answer in answers])
        lengths = num_targets + [len(answer.prompt) - 1 for answer in answers]
        sequences = SimpleNamespace(lengths=lengths, num_targets=num_targets, read=self.read)
        super().__init__(sequences, run.config, run.tokenizer.eos_token_id)

    def read(self, index: int) -> tuple:
        """Return the tokens of prompt and answer, and which of them are the answer's."""
        answer = self.answers[index]
        tokens = np.concatenate([answer.prompt, answer.tokens])
        return tokens, np.arange(len(tokens)) >= len(answer.prompt)

    def collate(self, indices: np.ndarray) -> dict:
        """Add `loss_arguments` for `policy_loss`, of all target tokens in order.

        These are sampled_log_probs and advantages, float32.
        """
        micro_batch = super().collate(indices)
        log_probs = np.concatenate([self.answers[i].log_probs for i in indices])
        advantages = np.repeat(self.advantages[indices], self.sequences.num_targets[indices])
        micro_batch["loss_arguments"] = {
            "sampled_log_probs": torch.from_numpy(log_probs),
            "advantages": torch.from_numpy(advantages),
        }
        return micro_batch


class AnswerLayer(DynamicLayer):
    """KV cache of a layer, [sequences, heads, tokens, head size], with room for more tokens.

    A DynamicLayer copies the whole cache for each token, which is half of the sampling time.
    """

    length = 0  # tokens in memory

    def get_seq_length(self) -> int:
        return self.length

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple:
        """Store keys and values of the next tokens; returns both of all tokens so far."""
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
    prompts: list,
    draws: np.ndarray,
    end_ids: list,
    device: torch.device,
) -> list[tuple]:
    """Sample answers to prompts at temperature 1, each up to a token that ends the turn.

    Token t of answer i is the first whose cumulative probability exceeds draws[i, t]. So an answer
    does not depend on the other answers of its batch, except for rounding.

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
        if t == 0:  # prefill each prompt once for its group
            group = num_answers // len(prompts)
            cache.batch_repeat_interleave(group)
            logits = logits.repeat_interleave(group, 0)
            mask = mask.repeat_interleave(group, 0)
        ids = draw_tokens(logits, draws[unfinished, t])
        tokens[unfinished, t] = ids[:, 0]
        log_probs[unfinished, t] = logits.log_softmax(-1).gather(1, ids)[:, 0]
        ended = sum(ids[:, 0] == end for end in end_ids)
        kept = (ended == 0).nonzero()[:, 0]
        if len(kept) == 0:
            break
        if len(kept) < len(unfinished):  # drop ended answers from the batch
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
    chosen: list,
    num_answers: int,
    step: int,
    run: Run,
) -> list:
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


def judge(run: Run, answer: Answer) -> Answer:
    """Return an answer with its reward: 0 if it has not ended, or with a teacher alone."""
    if not run.config.rewarded or answer.tokens[-1] not in run.model_config.eos_token_id:
        return answer
    # The last token of answer and reference ends the turn.
    texts = map(run.tokenizer.decode, (answer.prompt, answer.tokens[:-1], answer.reference[:-1]))
    return answer._replace(reward=checked_reward(*texts))


def answer_prompts(
    model: nn.Module,
    documents: common.Sequences,
    chosen: list,
    num_answers: int,
    step: int,
    run: Run,
) -> list:
    """Return a group of answers, with rewards, to the prompt of each chosen document.

    Each rank samples and judges its share of the groups. Then all ranks gather all groups.
    """
    config = run.config
    own = chosen[run.rank :: run.world_size]
    groups = []
    with unsharded_parameters(model, config):
        for first in range(0, len(own), config.sample_prompts):
            some = own[first : first + config.sample_prompts]
            groups += sample_groups(model, documents, some, num_answers, step, run)
    while True:
        signals = run.stop_signals
        with torch.no_grad():  # also restores grad mode if `reward` changes it
            judged = [[judge(run, answer) for answer in group] for group in groups]
        torch.set_default_dtype(torch.float32)  # likewise
        # NOTE: to stop, torchrun signals the Unix process group of each rank. This also kills
        # programs that `reward` has started. Judge again.
        if run.stop_signals == signals:
            break
    # If a rank is late (with a slow reward), the error of this barrier names it.
    dist.group.WORLD.monitored_barrier(timedelta(minutes=config.timeout_minutes))
    of_ranks = common.gather(judged)
    size = len(of_ranks)  # rank r has the prompts r, r + size, ...
    return [of_ranks[i % size][i // size] for i in range(len(chosen))]


def roll_out(model: nn.Module, documents: common.Sequences, step: int, run: Run) -> tuple:
    """Return the answers that a step trains on, to prompts chosen at random, and measurements."""
    started = time.perf_counter()
    config = run.config
    generator = np.random.default_rng([config.seed, step, 0])
    chosen = generator.choice(len(documents.lengths), config.prompts, replace=False).tolist()
    groups = answer_prompts(model, documents, chosen, config.answers, step, run)
    rewards = np.array([[answer.reward for answer in group] for group in groups])
    advantages = (rewards - rewards.mean(1, keepdims=True)).flatten().astype(np.float32)
    answers = sum(groups, [])

    batches = AnswerBatches(answers, advantages, run)
    micro_batches = batches.plan(0)
    # A forward all-gathers, so each rank needs equally many micro-batches. There are enough answers
    # to halve, because their number is a multiple of the ranks.
    while len(micro_batches) % run.world_size:
        micro_batches.sort(key=len)
        micro_batches += np.array_split(micro_batches.pop(), 2)  # the largest one
    batch = batches.global_batch(micro_batches, run.rank, run.world_size)
    measured = {
        "answer_length": batch.num_targets / len(answers),
        "truncated": np.mean(
            [answer.tokens[-1] not in run.model_config.eos_token_id for answer in answers]
        ),
        "sample_seconds": time.perf_counter() - started,
    }
    if config.rewarded:
        # mixed: the fraction of prompts whose answers differ in reward. For all other prompts, the
        # advantages are 0.
        measured |= {"reward": rewards.mean(), "mixed": (np.ptp(rewards, 1) > 0).mean()}
    return batch, measured


# --- Optimizer and schedule -----------------------------------------------------------------------


def build_optimizer(model: nn.Module, config: Config) -> AdamW:
    """Build AdamW over this rank's shards; matrices decay, embeddings, norms and biases do not.

    NOTE: call it after `parallelize`, which replaces all parameters. The old parameters never get
    gradients, so an optimizer over them would change nothing.
    """
    decayed = weight_decay_names(model)
    with_decay, without_decay = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (with_decay if name in decayed else without_decay).append(parameter)
    groups = [
        {"params": with_decay, "weight_decay": config.weight_decay},
        {"params": without_decay, "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)


def learning_rate_at(step: int, config: Config) -> float:
    """Linear warm-up, then cosine decay to the minimum, which the last step reaches.

    With --decay_steps the rate stays at its peak until the decay (WSD, arXiv 2404.06395). So runs
    of different lengths have the same rates until the shorter one decays.
    """
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    begin = max(config.warmup_steps, config.steps - (config.decay_steps or config.steps))
    progress = max(0, step - begin) / (config.steps - begin)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return config.min_learning_rate + cosine * (config.learning_rate - config.min_learning_rate)


# --- Main -----------------------------------------------------------------------------------------


def main() -> partial | None:
    config = parse_config(Config)
    ranks = int(os.environ["WORLD_SIZE"])
    if config.steps and ranks % config.dp_replicate:
        common.refuse(f"--dp_replicate {config.dp_replicate} does not divide {ranks} ranks")
    if config.prompts % ranks:
        common.refuse(f"--prompts {config.prompts} is not a multiple of {ranks} ranks")

    # Tokenizing can take longer than the timeout of collectives, so do it before they begin.
    tokenizer, turn_end, known_ids = conversations.chat_tokenizer(config, "known tokens")
    documents = common.load_documents(
        config, conversations.COLUMNS, tokenize_prompt, tokenizer, conversations.CORPORA
    )
    # Split before leaving prompts out, so that the split does not depend on --max_length.
    training, validation = (
        leave_out_long(part, config) for part in common.train_validation_split(documents, math.inf)
    )
    if config.prompts > len(training.lengths):
        common.refuse(
            f"--prompts {config.prompts} exceeds the {len(training.lengths)} training prompts"
        )
    generation = conversations.base_generation(config, tokenizer, turn_end)
    model_config = build_config(config, known_ids, generation.eos_token_id)
    if model_config.model_type not in PACKED_TYPES.split():
        # The others have caches or positions with which `sample` would be wrong.
        common.refuse(f"--model {config.model}: type {model_config.model_type} cannot sample here")
    if config.teacher:
        find_teacher(config, tokenizer)
    if config.steps == 0:
        return common.say("the data is prepared; python tools/rows.py FILE shows what is trained")

    device = init_process_group(config)
    model = build_policy(model_config, config)
    model.generation_config = generation
    # Count parameters and FLOPs before the model is sharded.
    default = 5e-4 if model.num_parameters() < 10_000_000 else 1e-6
    set_learning_rates(config, default, ratio=10)  # a high rate ruins pretrained weights
    run = Run(config, model, count_flops(model), tokenizer, documents, device)
    run.facts["teacher_hash"] = config.teacher and weights_fingerprint(config.teacher)
    # A resumed run samples the same answers, and has the same reference and teacher.
    own = "prompts answers answer_length reference_weight teacher_weight teacher_hash"
    # Check whether this run may start before the model takes memory and time.
    checkpoints = common.Checkpoints(config, run.directory, run.facts, run.save_files, device)
    checkpoint, progress = checkpoints.find(config.resume, common.PLAN + own.split())
    model = parallelize(model, config, device)
    optimizer = build_optimizer(model, config)
    # Load last: model and optimizer are sharded now, and each rank reads its shards only.
    if checkpoint:
        common.load_checkpoint(checkpoint, model, optimizer)
    elif config.init_from:
        common.load_weights(model, config.init_from)
    frozen = {}
    if config.reference_weight:
        frozen["reference_log_probs"] = load_frozen(config.init_from, run)
    if config.teacher:
        frozen["teacher_log_probs"] = load_frozen(config.teacher, run)
    mesh = f"{config.dp_replicate} x {ranks // config.dp_replicate} shards"
    work = f"{config.prompts} prompts x {config.answers} answers per step, temperature 1"
    run.begin(checkpoints, progress, mesh, work)
    # Children that `reward` forks have to die of a signal that stops the run.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.register_at_fork(after_in_child=partial(signal.signal, number, signal.SIG_DFL))

    # Prompts and random numbers depend on the step number, so a resumed run needs no other state.
    step, tokens = progress["step"], progress["tokens"]
    if step == 0 or run.unvalidated:  # a signal has stopped the validation of this step
        evaluate(model, frozen, validation, step, run)
    while step < config.steps and not run.stopping:
        step += 1
        started = time.perf_counter()
        batch, sampled = roll_out(model, training, step, run)
        if not config.teacher and sampled["mixed"] == 0:
            common.say(f"step {step}: no gradient from rewards, which are equal in each group")
        add_log_probs(frozen, batch.micro_batches, device)
        measured = train_step(model, optimizer, batch, step, config, device)
        if step == 1:
            refuse_untrained(model, optimizer)  # a collective
        tokens += batch.num_targets
        # `max_over_ranks` returns whether any rank got a signal to stop.
        [run.stopping] = max_over_ranks(run.stop_signals)
        aim = "reward" if config.rewarded else "teacher_kl"
        run.log_step(step, batch, started, 0.0, aim, tokens=tokens, **sampled, **measured)
        if step % config.eval_every == 0 or step == config.steps:
            evaluate(model, frozen, validation, step, run)
        last = step == config.steps or run.stopping
        if config.checkpoint_every and (last or step % config.checkpoint_every == 0):
            checkpoints.save(model, optimizer, run.position(step, tokens))
    checkpoints.wait()
    # `launch` calls it once the model is gone and the ranks have left the process group.
    return partial(run.finish, step, NEXT_COMMAND)


if __name__ == "__main__":
    launch(main)
