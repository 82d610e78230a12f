"""Learn from a larger model, on-policy and off-policy, in the same CPU seconds.

    python bench/distill.py [--folder FOLDER]

A teacher of 4 million parameters and a student of one million are pretrained, and fine-tuned on the
embedded conversations, with the first line of each docstring. The teacher gets more steps. Then the
student learns from the teacher, starting from the same weights each time:

on-policy: fsdp2_grpo.py with --teacher alone, one answer to each prompt.
off-policy: fsdp2_sft.py on answers that the teacher has sampled to the same prompts.

Each way runs with the script's own learning rate and, for each number in STEPS, so many steps. CPU
seconds are those of the whole command on 2 ranks, from its launch to the files of its model. What
the teacher's answers cost stands apart. Each model is measured by fsdp2_grpo.py: the mean
KL(student || teacher) of a token, on answers to held-out prompts.

With --folder, runs are kept there, and those that have ended are not repeated. Writes
bench/results/distill.json and docs/images/distill.png.
"""

import json
import os
import resource
import shutil
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import losses
import numpy as np
import shared
import torch
from shared import ROOT
from transformers import AutoModelForCausalLM

import common
import conversations
import fsdp2_grpo as script

LENGTH, ANSWER = 320, 80  # tokens of a sequence, and of an answer
PRETRAINING, TUNING = {"teacher": 60, "student": 30}, {"teacher": 30, "student": 10}
STEPS = {"on-policy": (20,), "off-policy": (80,)}
ANSWERS = 512  # of the teacher
COLORS = {"on-policy": "#1d3557", "off-policy": "#e76f51"}


def first_lines() -> list[dict[str, str]]:
    """Return embedded conversations that are short, with the first line of the docstring."""
    kept = []
    for row in conversations.docstring_conversations(common.standard_library_files()):
        thought, mark, docstring = row["completion"].partition("<|begin_of_solution|>\n")
        end = docstring.rindex("\n<|end_of_solution|>")
        line = docstring[:end].split("\n")[0]
        row["completion"] = f"{thought}{mark}{line}\n<|end_of_solution|>"
        if len("".join(row.values()).encode()) < LENGTH:  # marks of turns are few tokens
            kept.append(row)
    return kept


def write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


class Runs:
    """The runs in a folder, and what each of them cost: `costs.json`, name -> CPU seconds."""

    def __init__(self, folder: Path):
        self.folder, self.file = folder, folder / "costs.json"
        self.costs = json.loads(self.file.read_text()) if self.file.exists() else {}

    def note(self, name: str, seconds: float) -> None:
        self.costs[name] = seconds
        self.file.write_text(json.dumps(self.costs))

    def run(self, name: str, program: str, *words: Any) -> float:
        """Run a script on 2 ranks, unless it has ended before; returns its CPU seconds.

        Models to start from may be resumed, because nobody asks what they cost.
        """
        if name not in self.costs:
            if "policy" in name:
                shutil.rmtree(self.folder / name, ignore_errors=True)  # of a run that did not end
            words = (*words, "--run_dir", self.folder / name)
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            command = shared.torchrun(2, ROOT / f"{program}.py", *words)
            subprocess.run(command, cwd=self.folder, check=True, stdout=subprocess.DEVNULL)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            self.note(name, spent)
            print(f"{name}: {spent:.0f} CPU s", flush=True)
        return self.costs[name]

    def prepare(self, who: str, *model: Any) -> None:
        """Pretrain and fine-tune a model: the run of this name."""
        pretraining = [*model, "--steps", PRETRAINING[who], "--eval_tokens", 20_000]
        self.run(f"{who}_base", "fsdp2_pretrain", *pretraining)
        start = ["--init_from", self.folder / f"{who}_base", "--steps", TUNING[who]]
        self.run(who, "fsdp2_sft", *start, *self.tuning("conversations.jsonl"))

    def tuning(self, dataset: str) -> list[Any]:
        words = ["--dataset", self.folder / dataset, "--max_length", LENGTH]
        return [*words, "--micro_batch_tokens", 2048, "--global_batch_tokens", 4096]

    def learning(self, who: str) -> list[Any]:
        """Return flags of fsdp2_grpo.py for a model and its teacher."""
        words = ["--init_from", self.folder / who, "--teacher", self.folder / "teacher"]
        words += ["--dataset", self.folder / "conversations.jsonl", "--max_length", LENGTH]
        return [*words, "--answer_length", ANSWER, "--prompts", 32]

    def measure(self, who: str) -> float:
        """Return the divergence on held-out prompts, before a step that changes nothing."""
        one = ["--steps", 1, "--learning_rate", 1e-12, "--prompts", 2, "--answers", 1]
        held_out = ["--eval_prompts", 57, "--eval_answers", 2]
        self.run(f"{who}_measured", "fsdp2_grpo", *self.learning(who), *one, *held_out)
        return losses.read(self.folder / f"{who}_measured", "validation_kl")[0]


def teach(runs: Runs, rows: list[dict[str, str]]) -> float:
    """Write answers of the teacher to training prompts; returns the part of them that had ended."""
    path, directory = runs.folder / "answers.jsonl", str(runs.folder / "teacher/hf")
    if "answers" not in runs.costs:
        began = time.process_time()
        config = script.Config(
            dataset=str(runs.folder / "conversations.jsonl"), model=directory, tokenizer=directory,
            max_length=LENGTH, answer_length=ANSWER,
        )  # fmt: skip
        tokenizer, turn_end, _ = conversations.chat_tokenizer(config, "known tokens")
        documents = common.load_documents(
            config, conversations.COLUMNS, script.tokenize_prompt, tokenizer
        )
        training, _ = common.train_validation_split(documents, 0)
        training = script.leave_out_long(training, config)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        model.forward = partial(script.forward_with_log_probs, model, script.chunk_log_probs)
        rng = np.random.default_rng(0)
        chosen = rng.permutation(len(training.lengths))[:ANSWERS]
        kept = []
        for some in np.array_split(chosen, len(chosen) // 32):
            prompts = []
            for i in some.tolist():
                tokens, in_reference = training.read(i)
                prompts.append(tokens[~in_reference])
            draws, ends = rng.random((len(some), ANSWER)), [turn_end]
            with torch.no_grad():
                made = script.sample(model, prompts, draws, ends, torch.device("cpu"))
            for i, (tokens, _) in zip(some.tolist(), made):
                if tokens[-1] == turn_end:
                    row = rows[training.index.document[i]]
                    kept.append(row | {"completion": tokenizer.decode(tokens[:-1])})
        write(path, kept)
        runs.note("answers", time.process_time() - began)
    return len(path.read_text().splitlines()) / ANSWERS


def distill_table() -> str:
    """Return Markdown of bench/results/distill.json."""
    result = json.loads((ROOT / "bench/results/distill.json").read_text())
    lines = [
        "| | steps | CPU seconds | KL(student \\|\\| teacher) |",
        "| --- | --- | --- | --- |",
        f"| before | | | {result['before']:.2f} |",
    ]
    for way in STEPS:
        more = f" + {result['answers']['cpu_s']:.0f} for the teacher's answers"
        for point in result[way]:
            seconds = f"{point['cpu_s']:.0f}" + more * (way == "off-policy")
            lines.append(f"| {way} | {point['steps']} | {seconds} | {point['validation_kl']:.2f} |")
    return "\n".join(lines)


def draw(result: dict[str, Any]) -> None:
    figure, axes = shared.plotting().subplots(figsize=(7, 3), dpi=150)
    for way in STEPS:
        begin = result["answers"]["cpu_s"] if way == "off-policy" else 0
        seconds = [begin, *(begin + point["cpu_s"] for point in result[way])]
        values = [result["before"], *(point["validation_kl"] for point in result[way])]
        axes.plot(seconds, values, "o:", color=COLORS[way], label=way)
    axes.set_xlabel("CPU seconds (off-policy begins with the teacher's answers)")
    axes.set_ylabel("KL(student || teacher),\nnats per token, held out")
    axes.set_xlim(0, None)
    axes.set_ylim(0, None)
    axes.legend(frameon=False)
    shared.finish(figure, ROOT / "docs/images/distill.png")


def main() -> None:
    reader = shared.parser(__doc__)
    reader.add_argument("--folder", type=Path, help="keep the runs here")
    given = reader.parse_args()
    os.environ.setdefault("RANK", "0")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        runs = Runs((given.folder or Path(temporary)).absolute())
        runs.folder.mkdir(exist_ok=True)
        rows = first_lines()
        write(runs.folder / "conversations.jsonl", rows)
        shape = shared.qwen2(384, 1280, 2, 8, 4, 320)
        shape.save_pretrained(runs.folder / "shape")
        runs.prepare("teacher", "--model", runs.folder / "shape")
        runs.prepare("student")
        ended = teach(runs, rows)
        before = runs.measure("student")
        seen: dict[str, list[dict[str, float]]] = {}
        for way, every in STEPS.items():
            for steps in every:
                name = f"{way}_{steps}"
                words = [*runs.learning("student"), "--answers", 1]
                words += ["--eval_prompts", 2, "--eval_answers", 1]  # measured apart
                program = "fsdp2_grpo"
                if way == "off-policy":
                    words = ["--init_from", runs.folder / "student", *runs.tuning("answers.jsonl")]
                    program = "fsdp2_sft"
                spent = runs.run(name, program, *words, "--steps", steps)
                point = {"steps": steps, "cpu_s": round(spent, 1)}
                seen.setdefault(way, []).append(point | {"validation_kl": runs.measure(name)})
        answers = {"sampled": ANSWERS, "ended": ended, "cpu_s": round(runs.costs["answers"], 1)}
    result = {"before": before, **seen, "answers": answers}
    (ROOT / "bench/results/distill.json").write_text(json.dumps(result, indent=2) + "\n")
    draw(result)
    for way, points in seen.items():
        for point in points:
            print(way, point)


if __name__ == "__main__":
    main()
