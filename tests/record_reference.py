"""Record what mistakes do that cannot be written as an edit of a plain loop.

    python tests/record_reference.py

It trains copies of our scripts with the mistakes of tests/mistakes.py on 2 ranks, and writes
reference/recorded.json. Then run reference/make.py, which copies the logs into the folders.
"""

import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import conftest
import mistakes
from reference_script import flags

RECORDED = conftest.ROOT / "reference/recorded.json"


@dataclass
class Planted:
    """A mistake to record.

    Args:
        name: in reference/known_mistakes.py and in tests/mistakes.py.
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


def train(
    script: str, ranks: int, folder: Path, run: Path, mistake: Any = None, **own: Any
) -> list[dict]:
    """Train a copy of a script on a reference run, perhaps with a mistake; returns its log.

    Args:
        mistake: an object whose `apply` edits the text of the script.
    """
    copy = run.with_name(f"{run.name}_copy") / script
    copy.parent.mkdir(parents=True)
    text = (conftest.ROOT / script).read_text()
    copy.write_text(mistake.apply(text) if mistake else text)
    os.environ |= {"REFERENCE": str(folder), "COPIED": str(copy)}
    done = conftest.launch(ranks, "reference_script", flags(folder) | {"run_dir": run} | own)
    alone = ranks == 1 and script.startswith("fsdp1")  # FSDP1 warns that it shards nothing
    assert done.returncode == 0 and (alone or done.stderr == ""), done.stderr
    keys = ["step", "loss", "grad_norm", "learning_rate"]
    return [{key: line[key] for key in keys} for line in conftest.metrics(run)[0]]


def record(planted: Planted, run: Path) -> list[dict]:
    """Return the log of a copy with the mistake."""
    [mistake] = [each for each in mistakes.MISTAKES if each.name == planted.name]
    folder = conftest.ROOT / "reference" / planted.folder
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
