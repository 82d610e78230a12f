"""Renews the parts of README.md and docs/*.md that are made of other files: diffs, flags, tables.

    python bench/readme.py

A part stands between the lines `<!-- begin NAME -->` and `<!-- end NAME -->` of a page; NAME is

    ddp_pretrain fsdp1_pretrain      what changes from script to script, each hunk with its reason
    fsdp1_pretrain fsdp2_pretrain
    fsdp2_pretrain fsdp2_tp_pretrain
    fsdp2_pretrain fsdp2_cp_pretrain
    fsdp2_pretrain fsdp2_pp_pretrain
    fsdp2_pretrain fsdp2_ep_pretrain
    fsdp2_pretrain fsdp2_sft
    fsdp2_sft fsdp2_grpo
    flags                            all flags with default and meaning, from the scripts
    traffic                          what a strategy keeps and moves (bench/strategies.py)
    choosing                         which script fits where, of docs/choosing.json
    inside                           tensor and context parallel, of docs/inside.json
    stages                           pipelines across machines, of docs/stages.json
    experts                          a mixture of experts on many GPUs, of docs/experts.json
    sampling                         what sampling takes beside training (bench/strategies.py)
    bubble                           what stages wait, of docs/bubble.json
    pretraining, fine-tuning, steps  speed beside bare loops and libraries, of docs/compare.json

A hunk of a diff belongs to the first reason below that has one of its pieces of text; one without
a reason is an error, and so is a reason without a hunk: the lesson cannot drift from the scripts.
"""

import dataclasses
import functools
import importlib
import json
import re
import subprocess
from collections.abc import Callable

import bubble
import compare
import shared
import strategies
from shared import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [  # in hunks that only name things: they are left out if no reason has them
    '"""Causal-LM', '"""Supervised', "`diff fsdp2_", "A chat template makes", "FSDPModule,",
    "What a rank keeps", "parameters whole. FSDP", "of its gradients, P(N-1)/N",
    "The idea is ZeRO-3's", "Choose ", "torchrun --standalone", "import ", "run_dir: str",
    "NEXT_COMMAND = ",
]  # fmt: skip
LESSONS: dict[tuple[str, str], list[tuple[str, list[str]]]] = {
    ("ddp_pretrain", "fsdp1_pretrain"): [
        (
            "How much to shard is a choice now: everything all the time, everything but the "
            "parameters between forward and backward, or only inside a node.",
            ["sharding_strategy: Literal", "alone = os.environ"],
        ),
        (
            "DDP gives every rank all parameters before it wraps the model. FSDP1 asks for the "
            "parameters of one block at a time (`param_init_fn`), cuts them into shards and goes "
            "on, so no rank ever holds the whole model. A mesh says which ranks share shards. "
            "Mixed precision moves from autocast into the wrapper: parameters are cast as they "
            "are gathered, so bf16 also halves what travels; and the residual stream is bf16 "
            "too, which autocast keeps in fp32.",
            ["Give the model memory", "FSDP1 wraps each block", "initialize(model.modules()",
             "def wrap_policy", "auto_wrap_policy=", "model = model.module"],
        ),
        (
            "FSDP1 puts each block into a module of its own, whose name is taken out again, so "
            "that names are the same in all scripts and checkpoints.",
            ["_fsdp_wrapped_module"],
        ),
        (
            "Under `no_sync` both add up whole gradients without communication: DDP in its "
            "buckets, FSDP1 in memory of their own beside its shards.",
            ["are only added up", "The all-reduce averages", "reduce_every =", "model.no_sync()"],
        ),
        (
            "A rank sees the gradient of its shards, so clipping needs the squares of all ranks.",
            ["clip_grad_norm_"],
        ),
        (
            "Every forward gathers parameters now, in validation too: a rank that ran one more "
            "than its neighbours would wait for ever.",
            ["all ranks have equally many"],
        ),
        (
            "DDP's gradients are views of its buckets as long as they are set to zero and not "
            "dropped: dropped, the next step would add them up beside the buckets. FSDP makes "
            "its gradients anew, so there dropping them frees memory. (It is the one line of the "
            "training loop that a strategy changes.)",
            ["zero_grad("],
        ),
    ],
    ("fsdp1_pretrain", "fsdp2_pretrain"): [
        (
            "What was one enumeration are independent choices, and parameters can stay in CPU "
            "memory.",
            ["reshard_after_forward: bool", "dp_replicate: PositiveInt", "% self.dp_replicate"],
        ),
        (
            "Each script writes either style of checkpoint and reads both; by default, FSDP2 the "
            "other one.",
            ['"separate",'],
        ),
        (
            "No wrapper and no callback: `fully_shard` is called on a block that the script has "
            "just given its parameters, and changes them into DTensors in place. So the script "
            "says in its own order what a unit is, and the rest (embedding, last norm, head) is "
            "the root's unit because it comes last. Replicas are a second dimension of the mesh.",
            ["`fully_shard` turns", "config.dp_replicate", "MixedPrecisionPolicy(param",
             "for block in transformer_blocks"],
        ),
        (
            "The model is still itself: its parameters have their own names.",
            ["DTensors under their own names", "list(model.named_parameters())"],
        ),
        (
            "Whether to reduce is a property of the model, not a context around it, and whether to "
            "free parameters after backward another one (FSDP1's `no_sync` implies that for "
            "`shard_grad_op`). Whole gradients are kept in fp32, the reduction's precision, so "
            "bf16 needs no exception.",
            ["reduce_every =", "set_requires_gradient_sync"],
        ),
        (
            "A DTensor knows that it is sharded, so the plain function computes the whole norm; "
            "`full_tensor` hands it to every rank.",
            ["full_tensor()"],
        ),
    ],
    ("fsdp2_pretrain", "fsdp2_tp_pretrain"): [
        (
            "How a block is cut, one layer a line, and which line is a collective. Ranks have two "
            "numbers now: which group they are in, and which place in it. (Replicas and "
            "offloading are left out here.)",
            ["BLOCK_PLAN = {", "data is dealt over groups", "tensor_parallel: PositiveInt",
             "% self.tensor_parallel", "must divide {world_size}", "torch 2.13 cannot",
             "x {groups} ranks"],
        ),
        (
            "The loss needs three numbers a token of every rank, not the logits. All ranks of a "
            "group end with the same whole loss, and FSDP averages gradients over the groups. (In "
            "backward DTensor makes the embedding's gradient whole on each rank; FSDP takes the "
            "rank's part as it reduces.)",
            ["data_parallel_size", "tp.loss_parallel", "count once", "quotient is right"],
        ),
        (
            "The mesh has a dimension to shard over and one to cut layers over. Each module is "
            "cut once it has its numbers and before it is sharded. Cutting makes new parameters, "
            "which unties the head from the embedding, so it is tied after that.",
            ["Cut layers over groups", "check_model(model, config)", "mesh._flatten",
             '"shard", "tensor"', "shard = partial(", "cut_layers(", "have untied them",
             "set_requires_all_reduce", "forward_with_loss, model, chunk_loss"],
        ),
    ],
    ("fsdp2_pretrain", "fsdp2_cp_pretrain"): [
        (
            "Ranks of a group read the same rows, and each takes its part of every row. Around "
            "attention an all-to-all makes of all heads of a part of the rows some heads of whole "
            "rows, and another one turns the output back; between them is the same attention as "
            "in all scripts. (Replicas and offloading are left out here.)",
            ["context_parallel: PositiveInt", "% self.context_parallel",
             "must divide {world_size}", "groups = max(", "x {groups} ranks",
             "data is dealt over groups", "local_part("],
        ),
        (
            "Parameters are sharded over all ranks, as before: each has gradients of its own "
            "tokens, and averaging over the ranks is right whichever tokens these are.",
            ["check_model(model, config)", "shard = partial(", "not times the groups",
             "set_requires_all_reduce"],
        ),
    ],
    ("fsdp2_pretrain", "fsdp2_pp_pretrain"): [
        (
            "Ranks have two numbers: which stage they are, and which place in it. All stages work "
            "on the same micro-batches, so there must be as many of them as stages. Parameters "
            "stay whole from the first micro-batch to the last, so there is nothing to choose "
            "about gathering and reducing. A stage is the model without the blocks of the others; "
            "names and numbers of what stays are those of the whole model, and so are its "
            "checkpoints'.",
            ["pipeline_parallel: PositiveInt", "must divide {world_size}", "x {groups} ranks",
             "groups = max(", "% self.pipeline_parallel",
             "all stages work on the same", "reduce_every_micro_batch: bool",
             "dp_replicate: PositiveInt"],
        ),
        (
            "The mesh has a dimension more, along which hidden states are sent. The stages at the "
            "ends hold a copy each of a tied embedding, and a group to sum its gradient.",
            ["Cut the model into stages", "check_model(model, config)", '("stage", "shard")',
             '"stage", "replicate"', "mesh_of_stage", "hidden_dtype", "A schedule keeps",
             "PipelineStage(", "own_blocks", "model.stage.is_last", "reshard_after_forward=False",
             "has taken.", "and a reduce-scatter leaves each"],
        ),
        (
            "A schedule says which micro-batch goes forward or back in which turn, in place of the "
            "loop over micro-batches.",
            ["One forward, one backward", "Schedule1F1B", "scaled_loss", "ranks of a stage, hence",
             "ScheduleGPipe", "schedule.eval", "stage's parameters: DTensors"],
        ),
        (
            "Each stage has the gradients of its own parameters, so the norm is taken over the "
            "stages too, and the embedding that is there twice counts once.",
            ["norm of the whole model's", "norms = ["],
        ),
    ],
    ("fsdp2_pretrain", "fsdp2_ep_pretrain"): [
        (
            "The experts of a block are dealt over E neighbouring ranks. Each of them trains on "
            "micro-batches of its own, so every rank counts for the data. (Replicas and "
            "offloading are left out here.)",
            ['"tiny-moe",', "expert_parallel: PositiveInt", "% self.expert_parallel",
             "must divide {world_size}", "dp_replicate: PositiveInt", "compiler has to leave out"],
        ),
        (
            "In place of a layer's own computation of its experts: a token's row is sent to the "
            "ranks that have the experts which its router chose, computed there and sent back. How "
            "many rows will come is not known before, so the numbers are exchanged first, and the "
            "CPU waits for them.",
            ["send_to_experts"],
        ),
        (
            "Two meshes: a rank's experts are sharded over the ranks that have the same ones, "
            "everything else over all ranks.",
            ["Deal experts over", "check_model(model, config)", "all_ranks", "shard = partial(",
             "Experts come before their block", "deal_experts(", "summed gradient of its rows",
             "of experts' those of an E-th"],
        ),
        (
            "An expert has seen the tokens of all ranks of its group. A mean over ranks would "
            "therefore be another one for experts than for the rest, so gradients are sums, and "
            "the loss is divided by the labels alone.",
            ["no mean over ranks", "set_requires_all_reduce", "All-gathers and all-to-alls"],
        ),
        (
            "On whichever mesh: every number of a gradient is on one rank alone, and so the "
            "squares of all ranks add up to the norm's.",
            ["squared_norm"],
        ),
    ],
    ("fsdp2_pretrain", "fsdp2_sft"): [
        (
            "Conversations have their own columns, are longer than functions and are cut rather "
            "than split, and a model that has been trained already wants smaller steps and fewer "
            "of them.",
            ["dataset: str", "max_length: PositiveInt", '"token positions of', '"optimizer steps',
             "learning_rate: PositiveFloat", "1e-3,"],
        ),
        (
            "The text of a conversation: single tokens open and close a turn, and `generation` "
            "marks what the assistant says, for that alone is learned. A tokenizer with a template "
            "that has such marks keeps its own. Whoever spells out a special token could forge a "
            "turn: such a conversation is left out.",
            ["# --- Conversations"],
        ),
        (
            "Only positions with a label go through the head, which is a large part of a small "
            "model with a large vocabulary. Which ones, the CPU tells beside the batch: to take "
            "them by a mask, it would have to wait for the GPU to count them.",
            ["learned: torch.Tensor", "learned: int64", "hidden[learned]", ".flatten(0, 1)  #",
             "ConversationBatches"],
        ),
        (
            "The tokens of the template are new ids. A model that does not know them gets rows for "
            "them, drawn with mean and covariance of the old rows.",
            ["grow_vocabulary", "some leave out ids"],
        ),
        (
            "The data: the same batches, with labels of -100 on all that is not the assistant's. "
            "Nothing in the loop changes, since the loss is a sum over labels divided by their "
            "number in the whole global batch.",
            ["function=chat_rows", "conversations are {note}"],
        ),
    ],
    ("fsdp2_sft", "fsdp2_grpo"): [
        (
            "A step is no longer so many tokens but so many prompts, each with a group of answers. "
            "With several inner steps, bounds on the ratio of a token's probabilities limit how "
            "far they go. Rewards are what is validated.",
            ["max_length: PositiveInt", "# sampling and reward", "steps of the whole",
             "learning_rate: PositiveFloat", "eval_every: PositiveInt", "validation reward stays",
             "self.prompts % world_size", "is no multiple of", "self.reference_weight and"],
        ),
        (
            "The conversations are the same, but what is before the last answer is a prompt now, "
            "written as the template asks for an answer, and the answer is a reference for the "
            "judge. A template has to say no more than that, so a tokenizer keeps its own. Nothing "
            "is cut: a prompt without its end would ask something else.",
            ["common.PLAN +=", "A prompt, of at most", "messages, _ =", "ask=True",
             "A template of its own", "several, by name", "render(tokenizer", "first added token",
             "endings = [", "of_sample", "Ids of a text",
             "max_length - config.answer_length", "prompts are {note}"],
        ),
        (
            "What is learned comes from memory, not from disk, with two numbers more for each "
            "token. Answers differ in length from step to step, so micro-batches are planned anew "
            "for each step, the same number for each rank.",
            ["OF_TOKENS = ", "class AnswerBatches", "sampled_log_probs: float32",
             "self.answers[row].log_probs", "def halve_until_divisible"],
        ),
        (
            "The reward, which is the task; and the loss, which is the same whatever the task. "
            "Both are plain functions, of an answer's text and of numbers a token.",
            ["# --- Reward and loss"],
        ),
        (
            "The loss needs the probability of each token, where cross entropy was one sum. So "
            "forward returns them; and without labels the logits of the next token, to sample.",
            ["chunk_log_probs", "label_log_probs", "log_probs: Callable", "log_probs(hidden",
             "partial(checkpoint, log_probs", "Without labels", "the head belongs",
             "labels is None", "torch.cat(",
             "labels: torch.Tensor | None", "in logits in fp32", "log-probabilities of a micro",
             "Log-probabilities of the labels", "def forward_with_log_probs", "In bf16 the chunks",
             "returns log-probabilities", 'reduction="none"'],
        ),
        (
            "There is no dropout: what is trained is to be the policy that has sampled. So it is "
            "gradients, not training mode, by which forward knows that experts are to be counted.",
            ["return model.eval()", "torch.is_grad_enabled()", "With gradients, add"],
        ),
        (
            "How a model in shards samples: whole. Every rank gathers all parameters once, and its "
            "forwards send nothing until it gives them back. Under FSDP's hooks each token of each "
            "answer would gather each block, and all ranks would have to sample the same number "
            "of tokens.",
            ["def whole_parameters"],
        ),
        (
            "The log-probabilities of the first inner step are kept for the next ones, and sums of "
            "all that is measured take the place of the one loss.",
            ["old_log_probs: list[torch.Tensor],", "[MEASURED]", "len(MEASURED)",
             "OF_TOKENS if name", "fills the list"],
        ),
        (
            "Sampling: a cache of keys and values, prompts padded on the left, and for each token "
            "one random number that depends on seed, step, prompt and place alone. Answers that "
            "have ended leave the batch. Each rank samples and judges for its share of the "
            "prompts; then all learn of all answers, and deal them out by length.",
            ["# --- Sampling"],
        ),
        (
            "A step can be several optimizer steps on the same answers, which is what the ratio "
            "and its bounds are for.",
            ["reference: nn.Module | None,", "Optimizer steps on the answers", "inner_steps):",
             "zip(MEASURED", "* config.inner_steps", "train_step(model, reference"],
        ),
        (
            "Validation samples too, with the same random numbers each time, and before the first "
            "step as well: what counts in a reward is how much it has risen.",
            ["rows: common.Rows, tokenizer", "Mean reward of answers", "def log_validation",
             "validation_reward ="],
        ),
        (
            "The loop takes its batch from `roll_out`. If it is asked for, the model that the run "
            "began with is kept too, in shards, to measure how far this one has gone from it.",
            ["if not resumed:", "config.prompts > len(", "batch, of_answers",
             "if config.reference_weight", "del model, reference", "**of_answers",
             "sample_seconds="],
        ),
    ],
}  # fmt: skip


def hunks(before: str, after: str) -> list[str]:
    """Changed lines of `diff`, a string a hunk, with - and + in front."""
    command = ["diff", "-U0", f"{before}.py", f"{after}.py"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    return [part.split("\n", 1)[1].rstrip("\n") for part in re.split(r"(?m)^@@", output)[1:]]


def lesson(pair: tuple[str, str]) -> str:
    """Reasons and hunks in the order of the reasons, as Markdown."""
    chosen: dict[str, list[str]] = {reason: [] for reason, _ in LESSONS[pair]}
    for hunk in hunks(*pair):
        fitting = [reason for reason, pieces in LESSONS[pair] if any(p in hunk for p in pieces)]
        if fitting:
            chosen[fitting[0]].append(hunk)
        elif not any(name in hunk for name in NAMES):
            raise SystemExit(f"no reason for this hunk of {' and '.join(pair)}:\n{hunk}")
    lines = []
    for reason, found in chosen.items():
        if not found:
            raise SystemExit(f"no hunk of {' and '.join(pair)} for: {reason}")
        lines += [f"{reason}\n", "```diff", *"\n \n".join(found).splitlines(), "```\n"]
    return "\n".join(lines).rstrip()


def default_of(field: dataclasses.Field, script: str) -> str:
    """A flag's default as it would be given on the command line."""
    value = field.default
    word = str(value).lower() if isinstance(value, bool | None) else str(value)
    return f"`{word.replace(script, 'SCRIPT')}`"


def flags() -> str:
    """All flags of the scripts: default (of each script that has another one) and meaning."""
    lines = ["| flag | default | |", "| --- | --- | --- |"]
    scripts = ["fsdp2_pretrain", "fsdp1_pretrain", "ddp_pretrain", "fsdp2_tp_pretrain"]
    scripts += ["fsdp2_cp_pretrain", "fsdp2_pp_pretrain", "fsdp2_ep_pretrain", "fsdp2_sft"]
    scripts += ["fsdp2_grpo"]
    configs = {script: importlib.import_module(script).Config for script in scripts}
    fields = {
        script: {f.name: f for f in dataclasses.fields(configs[script])} for script in scripts
    }
    for name in dict.fromkeys(name for script in scripts for name in fields[script]):
        having = [script for script in scripts if name in fields[script]]
        by_default: dict[str, list[str]] = {}  # the default of most is said without their names
        for script in having:
            by_default.setdefault(default_of(fields[script][name], script), []).append(script)
        defaults = [*by_default][0] if len(by_default) == 1 else ", ".join(
            default if len(same) > 3 else f"{default} ({', '.join(same)})"
            for default, same in by_default.items()
        )  # fmt: skip
        meaning = fields[having[0]][name].metadata["help"]
        lacking = ", ".join(script for script in scripts if script not in having)
        few = len(having) < 4
        meaning += f" ({', '.join(having)} only)" if few else f" (not {lacking})" if lacking else ""
        lines.append(f"| `--{name}` | {defaults} | {meaning} |")
    return "\n".join(lines)


def parts() -> dict[str, Callable[[], str]]:
    """What stands between which markers."""
    compared = json.loads((ROOT / "docs/compare.json").read_text())
    made: dict[str, Callable[[], str]] = {
        "flags": flags,
        "traffic": strategies.traffic_table,
        "choosing": strategies.choosing_table,
        "inside": strategies.inside_table,
        "stages": strategies.stages_table,
        "bubble": bubble.bubble_table,
        "experts": strategies.experts_table,
        "sampling": strategies.sampling_table,
        "steps": lambda: compare.steps_table(compared),
    }
    for work in ("pretraining", "fine-tuning"):
        made[work] = functools.partial(compare.markdown, compared, work)
    for pair in LESSONS:
        made[" ".join(pair)] = functools.partial(lesson, pair)
    return made


def renewed(text: str) -> str:
    """A page's text with its generated parts as they are now."""
    known = parts()
    for name in re.findall(r"(?m)^<!-- begin (.*) -->$", text):
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->\n"
        if name not in known or text.count(begin) != 1 or text.count(end) != 1:
            raise SystemExit(f"no part of a page is called {name}, or its markers are no pair")
        head, rest = text.split(begin)
        text = f"{head}{begin}\n{known[name]()}\n\n{end}{rest.split(end)[1]}"
    return text


def main() -> None:
    shared.read(__doc__)
    for page in PAGES:
        page.write_text(renewed(page.read_text()))


if __name__ == "__main__":
    main()
