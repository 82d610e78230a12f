"""Record what mistakes do that cannot be written as an edit of a plain loop.

    python tests/support/record_reference.py

It trains copies of our scripts with the mistakes of mistakes.py on 2 ranks, and writes
reference/recorded.json. Then run reference/make.py, which copies the logs into the folders.
"""

import json
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import launching
import mistakes

RECORDED = launching.ROOT / "reference/recorded.json"
LONGEST, POSITIONS = 31, 48  # predictions of a sequence, and positions of a micro-batch


@dataclass
class Planted:
    """A mistake to record.

    Args:
        name: in reference/known_mistakes.py and in tests/support/mistakes.py.
        folder: on which reference run.
        own: flags of the script.
    """

    name: str
    folder: str
    own: dict[str, Any] = field(default_factory=dict)


JOINED = "CP: parts of a sequence joined along the wrong dimension"
NORM = "TP: `to_local` of a norm's weight, so that its gradients are not summed over the group"
STREAM = "TP: data by rank and not by group"
TIED = "PP: gradients of a tied embedding not summed over the two stages that hold it"
PLANTED = [
    Planted(name, folder) for name in (JOINED, NORM) for folder in ("dense", "packed", "chat")
]
# Micro-batches of one length, because collectives would fail on others.
PLANTED += [Planted(STREAM, "packed")]
PLANTED += [Planted(TIED, folder) for folder in ("dense", "packed")]


def flags(folder: Path) -> dict:
    """Return the flags with which a script trains as batches.json says."""
    hyper = json.loads((folder / "batches.json").read_text())["hyper"]
    assert (hyper["betas"], hyper["eps"]) == ([0.9, 0.95], 1e-8)  # those of every script
    names = ["learning_rate", "min_learning_rate", "warmup_steps", "steps", "weight_decay"]
    chosen = {name: hyper[name] for name in [*names, "grad_clip"]}
    chosen |= {"init_from": folder, "tokenizer": "reference", "precision": "fp32"}
    chosen |= {"max_length": LONGEST, "micro_batch_tokens": POSITIONS}
    chosen |= {"global_batch_tokens": 4 * POSITIONS, "eval_every": hyper["steps"]}
    return chosen | {"batching": "packed" if hyper["packed"] else "bucketed"}


def train(
    script: str, ranks: int, folder: Path, run: Path, mistake: Any = None, **own: Any
) -> list[dict]:
    """Train a copy of a script on a reference run, perhaps with a mistake; returns its log.

    Args:
        mistake: an object whose `apply` edits the text of its `file`, the script or a shared one.
    """
    copies = run.with_name(f"{run.name}_copy")
    copies.mkdir(parents=True)
    shutil.copy(launching.ROOT / script, copies)
    if mistake:
        text = (launching.ROOT / mistake.file).read_text()
        (copies / mistake.file).write_text(mistake.apply(text))
    os.environ |= {"REFERENCE": str(folder), "COPIED": str(copies / script)}
    done = launching.launch(ranks, "reference_script", flags(folder) | {"run_dir": run} | own)
    alone = ranks == 1 and script.startswith("fsdp1")  # FSDP1 warns that it shards nothing
    if done.returncode or done.stderr and not alone:
        raise RuntimeError(done.stderr)
    keys = ["step", "loss", "grad_norm", "learning_rate"]
    return [{key: line[key] for key in keys} for line in launching.metrics(run)[0]]


def record(planted: Planted, run: Path) -> list[dict]:
    """Return the log of a copy with the mistake."""
    [mistake] = [each for each in mistakes.MISTAKES if each.name == planted.name]
    folder = launching.ROOT / "reference" / planted.folder
    return train(mistake.file, 2, folder, run, mistake, **planted.own)


def main() -> None:
    """Write the file, and print a line per recording."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    found = []
    for planted in PLANTED:
        with tempfile.TemporaryDirectory() as directory:
            log = record(planted, Path(directory) / "run")
        about = {"name": planted.name, "folder": planted.folder, "ranks": [2]}
        found.append(about | {"steps": log})
        print(f"{planted.folder}: {planted.name}: loss {log[0]['loss']:.4f} in step 1")
    lines = ",\n".join(json.dumps(one) for one in found)
    RECORDED.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
