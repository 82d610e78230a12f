"""Run the loop of reference/README.md, with and without edits; test_reference.py checks its logs.

For launching.launch_cases. A case is {"folder": a reference run, "edits": pairs of a text of the
loop and its replacement, "trained": where to save the model, or ""}.
"""

import json
import sys
from pathlib import Path

import cases  # also adds the root to sys.path
import torch.distributed as dist
import transformers
from reference_loops import Real, loop

START = 'dist.init_process_group("gloo")\n'


def train(case: str, flags: dict) -> list[dict]:
    """Return the log that the loop writes on rank 0."""
    log = Path(cases.given()["--out"]).with_suffix(f".{dist.get_rank()}.jsonl")
    text = Real(case, [(START, ""), *flags["edits"]]).apply(loop())
    sys.argv = ["loop.py", flags["folder"], str(log)]
    names = {"__name__": "__main__"}
    exec(compile(text, case, "exec"), names)
    names["log"].close()
    if flags["trained"] and dist.get_rank() == 0:
        names["model"].save_pretrained(flags["trained"])
    dist.barrier()
    return [json.loads(line) for line in log.read_text().splitlines()]


def main() -> None:
    given = sys.argv
    transformers.logging.disable_progress_bar()
    dist.init_process_group("gloo")
    seen = {}
    for case, flags in json.loads(cases.given()["--cases"]).items():
        seen[case] = train(case, flags)
        sys.argv = given
    cases.leave(seen)


if __name__ == "__main__":
    main()
