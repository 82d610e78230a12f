"""fsdp2_lora.py beside PEFT and TRL: CPU seconds per token, and memory of a rank.

    pip install --no-deps --target .trl trl==1.16.0 accelerate==1.15.0 peft==0.21.2 psutil
    PYTHONPATH=.trl python bench/lora_peer.py [ROUNDS]

TRL's SFTTrainer with `peft_config` trains under DDP, the script shards with FSDP2: the same model
(Qwen2's shape with random weights, 4 million parameters), adapters (rank 16 on all linear layers of
the blocks) and conversations of up to 800 tokens, in fp32 on 2 gloo ranks with one thread each.
The script has its default batches. TRL has the settings that make its work the same (loss on
answers only, no gradient checkpointing), and otherwise its defaults or what the table names:

default: batches of 8 conversations per rank, drawn at random and padded to the longest.
grouped: the same with train_sampling_strategy="group_by_length".
packed: sequences of 4,096 tokens, one per rank. TRL's packing_strategy "bfd" keeps conversations
whole, and is meant for flash attention. On CPUs transformers masks SDPA instead.
wrapped: the same with packing_strategy="wrapped". It splits conversations, and tokens attend to
other conversations that are in the same sequence.

First both train on the same batches from the same adapters: their losses have to be equal. Then a
process of each rank has both programs, and they take turns of STEPS steps, ROUNDS times (5 by
default) after one turn that does not count. Seconds are user and system time of both ranks, without
imports and the preparation of data. Tokens are those that are not padding.

Memory at rest is what parameters, gradients and AdamW's moments of a rank take. The peak is how far
the resident set rises above that after the imports, in processes that run one program only.

Writes bench/results/lora_peer.json. Takes 13 minutes of CPU time, half of that on two free cores.
"""

import contextlib
import io
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _tools  # noqa: F401
import shared
from shared import ROOT

FILE = ROOT / "bench/results/lora_peer.json"
PEERS = "trl==1.16.0 accelerate==1.15.0 peft==0.21.2 psutil"
STEPS = 2  # of a turn
# TRL sorts by length within quarters of an epoch. Each is a turn of 16 conversations a step, so
# that no turn has only long ones.
CONVERSATIONS = 4 * STEPS * 16
RATE = 1e-3
# How TRL batches -> its settings, and how the script batches.
WAYS: dict[str, tuple[dict[str, Any], str]] = {
    "default": ({}, "bucketed"),
    "grouped": ({"train_sampling_strategy": "group_by_length"}, "bucketed"),
    "packed": ({"packing": True}, "packed"),
    "wrapped": ({"packing": True, "packing_strategy": "wrapped"}, "packed"),
}


# --- Both programs, on a rank ---------------------------------------------------------------------


def config_of(folder: Path, batching: str) -> Any:
    import fsdp2_lora

    base = str(folder / "base")
    return fsdp2_lora.Config(
        model=base, tokenizer=base, dataset=str(folder / "conversations.jsonl"), batching=batching,
        run_dir=str(folder / "run"), steps=10**6, max_length=1024, eval_tokens=1, precision="fp32",
        learning_rate=RATE, min_learning_rate=RATE, warmup_steps=0,
    )  # fmt: skip


def load_data(folder: Path, config: Any) -> Any:
    """Return the script's data, with the first CONVERSATIONS that it trains on."""
    import common
    import fsdp2_lora

    data = shared.load_data(fsdp2_lora, config)
    sequences = data.training.sequences
    assert len(sequences.lengths) >= CONVERSATIONS
    chosen = common.Sequences(sequences.documents, sequences.index[:CONVERSATIONS])
    data.training = shared.batches_class(fsdp2_lora)(chosen, config, data.tokenizer.eos_token_id)
    return data


def prepare(folder: Path) -> int:
    """Write a base model with its tokenizer, and conversations; returns their target tokens."""
    import torch
    from transformers import Qwen2ForCausalLM

    import common
    import conversations
    import fsdp2_lora

    torch.manual_seed(0)
    Qwen2ForCausalLM(shared.qwen2(256, 1024, 4, 4, 2, 320)).save_pretrained(folder / "base")
    config = fsdp2_lora.Config(tokenizer="bytes")
    tokenizer, *_ = conversations.chat_tokenizer(config, "text")
    common.save_tokenizer(tokenizer, folder / "base")
    rows = shared.short_conversations(common.standard_library_files()[::4], 700)
    lines = [json.dumps({"messages": messages}) + "\n" for messages in rows]
    lines = lines[:: len(lines) // (2 * CONVERSATIONS)]
    (folder / "conversations.jsonl").write_text("".join(lines))
    with contextlib.redirect_stdout(io.StringIO()):  # the script prints what it shortens
        sequences = load_data(folder, config_of(folder, "bucketed")).training.sequences
    chosen = [lines[i] for i in sequences.index.document.tolist()]
    (folder / "trained.jsonl").write_text("".join(chosen))
    return int(sequences.num_targets.sum())


def make_session(folder: Path, batching: str) -> shared.Session:
    """Return the script's part: data, adapted model and optimizer."""
    import fsdp2_lora

    config = config_of(folder, batching)
    session = shared.Session(fsdp2_lora, config, load_data(folder, config))
    config.init_from = config.model
    fsdp2_lora.load_weights(session.model, config.init_from)
    return session


def make_trainer(folder: Path, **settings: Any) -> Any:
    """Return TRL's trainer. Its `read` gets the tokens of each step on this rank."""
    import torch
    from datasets import load_dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    class Counting(SFTTrainer):
        read: list[int] = []

        def training_step(self, model: Any, inputs: dict, *more: Any) -> Any:
            mask = inputs.get("attention_mask")
            self.read.append(int(inputs["input_ids"].numel() if mask is None else mask.sum()))
            return super().training_step(model, inputs, *more)

    sizes = {"per_device_train_batch_size": 8, "max_length": 1024}
    if settings.get("packing"):
        sizes = {"per_device_train_batch_size": 1, "max_length": 4096}
    arguments = SFTConfig(
        output_dir=str(folder / "trl"), report_to=[], use_cpu=True, bf16=False, save_strategy="no",
        disable_tqdm=True, gradient_checkpointing=False, assistant_only_loss=True,
        learning_rate=RATE, lr_scheduler_type="constant", adam_beta2=0.95, **sizes, **settings,
    )  # fmt: skip
    layers = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()
    return Counting(
        AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32), arguments,
        train_dataset=load_dataset("json", data_files=str(folder / "trained.jsonl"), split="train"),
        processing_class=AutoTokenizer.from_pretrained(folder / "base"),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=layers, task_type="CAUSAL_LM"),
    )  # fmt: skip


def check(folder: Path) -> dict[str, Any]:
    """Train on the same batches, from the same adapters; returns the losses of both."""
    import torch
    import torch.distributed as dist

    steps, per_rank = 4, 8
    session = make_session(folder, "bucketed")
    adapters = {
        name: parameter.full_tensor().clone()
        for name, parameter in session.model.named_parameters()
        if parameter.requires_grad
    }
    ours = []
    for first in range(0, steps * per_rank * 2, per_rank * 2):
        parts = torch.arange(first, first + per_rank * 2).view(2, per_rank).numpy()
        batch = session.data.training.global_batch([*parts], dist.get_rank(), 2)
        ours.append(session.train_step(batch))
    trainer = make_trainer(
        folder, max_steps=steps, logging_steps=1, train_sampling_strategy="sequential"
    )
    for name, parameter in trainer.model.named_parameters():
        if parameter.requires_grad:
            name = name.removeprefix("base_model.model.").replace(".default.", ".")
            parameter.data.copy_(adapters.pop(name))
    assert not adapters, "both have the same adapters"
    labels = trainer.train_dataset["labels"]
    trainer.train()
    theirs = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    num_targets = sum(label >= 0 for row in labels for label in row[1:])
    return {"ours": ours, "theirs": theirs, "num_targets": num_targets}


def run_steps(steps: Iterator, number: int) -> int:
    """Run some steps of the script; returns their tokens, of all ranks."""
    return sum(batch.num_tokens for batch, _ in itertools.islice(steps, number))


def take_turns(folder: Path, way: str, rounds: int) -> dict[str, Any]:
    """Run TRL's trainer, with a turn of the script after each of its own."""
    import torch
    import torch.distributed as dist
    from transformers import TrainerCallback

    settings, batching = WAYS[way]
    session = make_session(folder, batching)
    trainer = make_trainer(folder, max_steps=STEPS * (1 + rounds), **settings)
    steps = session.steps()
    turns: dict[str, list[list[float]]] = {"ours": [], "theirs": []}  # seconds, tokens

    class Turns(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.process_time()

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if state.global_step % STEPS:
                return
            between = time.process_time()
            turns["theirs"].append([between - self.began, sum(trainer.read)])
            trainer.read.clear()
            tokens = run_steps(steps, STEPS)
            self.began = time.process_time()
            turns["ours"].append([self.began - between, tokens / 2])  # a rank's half

    trainer.add_callback(Turns())
    trainer.train()
    del turns["ours"][0], turns["theirs"][0]  # they warm up
    noted = torch.tensor([turns["ours"], turns["theirs"]])
    dist.all_reduce(noted)
    rest = {"ours": at_rest(session.model, session.optimizer)}
    rest["theirs"] = at_rest(trainer.model, trainer.optimizer)
    return dict(zip(turns, noted.tolist())) | {"rest": rest}


def at_rest(model: Any, optimizer: Any) -> int:
    """Return the bytes of parameters, gradients and optimizer state of this rank."""
    parameters = [*model.parameters()]
    tensors = parameters + [p for p in parameters if p.requires_grad]  # gradients are as large
    inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
    tensors += [x for state in inner.state.values() for x in state.values()]
    local = [x.to_local() if hasattr(x, "to_local") else x for x in tensors]
    return sum(x.numel() * x.element_size() for x in local)


def resident(name: str) -> float:
    """Return MiB of /proc's status: VmRSS now, VmHWM the most so far."""
    [line] = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name)]
    return int(line.split()[1]) / 1024


def measure_peak(folder: Path, way: str, program: str) -> dict[str, Any]:
    """Run one program; returns by how many MiB the resident set has risen, the most of a rank."""
    import torch
    import torch.distributed as dist
    import trl.trainer.sft_trainer  # noqa: F401

    import fsdp2_lora  # noqa: F401

    settings, batching = WAYS[way]
    before = resident("VmRSS")
    if program == "ours":
        run_steps(make_session(folder, batching).steps(), 2 * STEPS)
    else:
        make_trainer(folder, max_steps=2 * STEPS, **settings).train()
    risen = torch.tensor(resident("VmHWM") - before)
    dist.all_reduce(risen, dist.ReduceOp.MAX)
    return {"peak": risen.item()}


def be_a_rank(task: str, out: str, *more: str) -> None:
    """Run a task of `launch` on this rank."""
    folder = Path(out).parent
    if task == "check":
        found = check(folder)
    elif task == "turns":
        found = take_turns(folder, more[0], int(more[1]))
    else:
        found = measure_peak(folder, *more)
    if os.environ["RANK"] == "0":
        Path(out).write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # models are alive


# --- The comparison -------------------------------------------------------------------------------


def launch(folder: Path, *words: Any) -> dict[str, Any]:
    """Run a task on 2 ranks; returns what rank 0 found."""
    task, *more = words
    command = shared.torchrun(2, ROOT / "bench/lora_peer.py", task, folder / "out.json", *more)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, env=environment, text=True, capture_output=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))}: {done.stderr[-8000:]}")
    return json.loads((folder / "out.json").read_text())


def compare(folder: Path, rounds: int) -> dict[str, Any]:
    num_targets = prepare(folder)
    found = launch(folder, "check")
    differences = [abs(a - b) for a, b in zip(found["ours"], found["theirs"], strict=True)]
    if max(differences) > 1e-3 or found["num_targets"] != num_targets:
        sys.exit(f"they do different work: {num_targets} target tokens and {found}")
    first, *_, last = found["ours"]
    print(
        f"losses of {len(differences)} steps on the same batches: {first:.4f} ... {last:.4f}, "
        f"the largest difference is {max(differences):.1e}",
        flush=True,
    )
    result: dict[str, Any] = {"losses": found}
    for way in WAYS:
        result[way] = launch(folder, "turns", way, rounds)
        if way in ("default", "packed"):
            peaks = {who: launch(folder, "peak", way, who)["peak"] for who in ("ours", "theirs")}
            result[way]["peak"] = peaks
        print(f"{way} is done", flush=True)
    return result


def lora_peer_table() -> str:
    """Return Markdown: tokens per CPU second of both with best and median, and MiB of a rank."""
    result = json.loads(FILE.read_text())
    titles = "TRL | tokens per CPU s, best, median | script | the same | ratio | at rest | peak"
    lines = [f"| {titles} |", "| --- " * 7 + "|"]
    for way, (_, batching) in WAYS.items():
        found = result[way]
        speeds = {}
        for who in ("theirs", "ours"):
            each = [tokens / seconds for seconds, tokens in found[who]]
            speeds[who] = max(each), statistics.median(each)
        cells = {who: f"{best:,.0f}, {median:,.0f}" for who, (best, median) in speeds.items()}
        ratios = ", ".join(f"{a / b:.2f}" for a, b in zip(speeds["ours"], speeds["theirs"]))
        memory = []
        for kind, unit, digits in (("rest", 2**20, 1), ("peak", 1, 0)):
            if one := found.get(kind):
                theirs, ours = one["theirs"] / unit, one["ours"] / unit
                memory.append(f"{theirs:,.{digits}f}, {ours:,.{digits}f} MiB: {ours / theirs:.2f}")
        row = [way, cells["theirs"], batching, cells["ours"], ratios, *memory, ""]
        lines.append(f"| {' | '.join(row[:7])} |")
    return "\n".join(lines)


def main() -> None:
    if "TORCHELASTIC_RUN_ID" in os.environ:  # under torchrun
        be_a_rank(*sys.argv[1:])
    [rounds] = shared.read(__doc__, rounds=5)
    try:
        import peft  # noqa: F401
        from trl import SFTTrainer  # noqa: F401
    except (ImportError, RuntimeError) as problem:
        reason = str(problem).splitlines()[-1]
        sys.exit(f"error: {reason}: pip install --no-deps --target .trl {PEERS}; see --help")
    with tempfile.TemporaryDirectory() as folder:
        result = compare(Path(folder), rounds)
    FILE.write_text(json.dumps(result, indent=1) + "\n")
    print(lora_peer_table())


if __name__ == "__main__":
    main()
