"""Kill a run again and again, at chosen and at random moments, until it may end.

    python tests/support/storm.py SCRIPT KILLS SEED FLAGS...

Every start is the same command on 2 forked ranks (see forked.py). It prints where each rank was
killed.
"""

import importlib
import json
import os
import random
import signal
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from faults import run_with_faults  # noqa: E402
from forked import join, start, warm_up  # noqa: E402

RANKS = 2
# Calls while a run begins or writes a checkpoint, and how often rank 0 and rank 1 make them.
PLACES = [
    ("common.Checkpoints.write", 1, 1),
    ("torch.distributed.checkpoint.FileSystemWriter.write_data", 2, 2),
    ("torch.distributed.checkpoint.FileSystemWriter.finish", 1, 0),
    ("common.sync_to_disk", 11, 0),
    ("pathlib.Path.rename", 2, 0),
    ("shutil.rmtree", 2, 0),
    ("run.Run.open_files", 1, 0),
    ("run.Run.log_step", 3, 3),
]


def launch(script: str, words: list[str], faults: list[dict]) -> list[int]:
    """Start the ranks. Killed ranks and their neighbors print nothing."""
    with open(os.devnull, "w") as nowhere:
        err = nowhere if faults else sys.stderr
        program = partial(run_with_faults, script, faults, words)
        return start(RANKS, program, nowhere.fileno(), err.fileno())


def main() -> None:
    script, kills, seed, *words = sys.argv[1:]
    importlib.import_module(script)
    warm_up()
    chance = random.Random(int(seed))
    no_end = {"call": "run.Run.finish", "do": "kill"}
    for number in range(int(kills)):
        victim = chance.choice([0, 0, 1])
        if number % 2:  # one rank, at a call
            call, *times = chance.choice([place for place in PLACES if place[1 + victim]])
            fault = {"call": call, "number": chance.randint(1, times[victim]), "rank": victim}
            fault |= {"do": "kill", "after": chance.random() < 0.5}
            codes = join(launch(script, words, [fault, no_end]))
            print(json.dumps(fault), codes, flush=True)
        else:  # one rank or all, at a time
            ranks = launch(script, words, [no_end])
            delay = chance.uniform(1.5, 3.3)
            time.sleep(delay)
            everyone = chance.random() < 0.5
            for child in ranks if everyone else [ranks[victim]]:
                os.kill(child, signal.SIGKILL)
            codes = join(ranks)
            print(
                f"after {delay:.1f} s, {'all' if everyone else f'rank {victim}'}", codes, flush=True
            )
    codes = join(launch(script, words, []))
    print("end", codes)
    sys.exit(any(codes))


if __name__ == "__main__":
    main()
