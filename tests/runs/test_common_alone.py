"""common.py is the file that people copy: alone in a folder, it makes batches and checkpoints."""

import json
import os
import shutil
import subprocess
import sys

from launching import HANGS, ROOT

PROGRAM = """
import copy
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

import common

config = SimpleNamespace(
    dataset="documents.jsonl",
    dataset_config=None,
    dataset_revision=None,
    dataset_split="train",
    max_length=64,
    micro_batch_tokens=256,
    pad_to_multiple_of=1,
    seed=0,
    checkpoint_style="separate",
    async_checkpoint=False,
    keep_checkpoints=1,
)
tokenizer = common.load_tokenizer("bytes")
documents = common.load_documents(config, ["text"], common.tokenize_text, tokenizer)
training, _ = common.train_validation_split(documents, 1000)
for config.batching in ("bucketed", "packed"):
    batches = common.Batches(training.split(64), config, tokenizer.eos_token_id)
    planned = sorted(i for micro_batch in batches.plan(0) for i in micro_batch)
    assert planned == [*range(len(batches.sequences.lengths))]
    batch = next(batches.stream(0, 2, dp_rank=0, dp_size=1))
    assert len(batch.micro_batches) == 2
    targets = [(each["labels"] != common.IGNORED).sum() for each in batch.micro_batches]
    assert sum(targets) == batch.num_targets > 256


def make_checkpoints():
    facts = {"torch": torch.__version__, "checkpoint_style": config.checkpoint_style}
    return common.Checkpoints(
        config,
        Path(config.checkpoint_style),
        facts,
        save_files=lambda directory: directory.mkdir(parents=True),
        device=torch.device("cpu"),
    )


def make_model():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    return model, torch.optim.AdamW(model.parameters())


def step(model, optimizer):
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return copy.deepcopy(model.state_dict())


dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for config.checkpoint_style in ("stateful", "separate"):
    trained = make_model()
    checkpoints = make_checkpoints()
    assert checkpoints.find("auto")[0] is None
    step(*trained)
    checkpoints.save(*trained, {"step": 1, "tokens": 7})
    expected = step(*trained)

    fresh = make_model()
    newest, progress = make_checkpoints().find("auto")
    assert (newest.name, progress["step"], progress["tokens"]) == ("step_00000001", 1, 7)
    common.load_checkpoint(newest, *fresh)
    torch.testing.assert_close(step(*fresh), expected, rtol=0, atol=0)
dist.destroy_process_group()

own = {Path(module.__file__).name for module in sys.modules.values()
       if getattr(module, "__file__", None) and Path(module.__file__).parent == Path.cwd()}
assert own == {"program.py", "common.py"}
"""


def test_common_alone_makes_batches_and_checkpoints(texts, tmp_path):
    """Of a plain model, in a process that finds no other file of ours."""
    shutil.copy(ROOT / "common.py", tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (tmp_path / "documents.jsonl").write_text("".join(lines))
    environment = {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=environment,
        capture_output=True, text=True, timeout=HANGS,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
