"""Kills a run again and again, at chosen and at random moments, until it is allowed to end.

    python tests/storm.py SCRIPT KILLS SEED FLAGS...

Every start is the same command on 2 ranks. They are forked from this process, which has imported
everything: that saves the seconds in which nothing can be lost. Prints where each rank was killed.
"""

import importlib
import json
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import datasets  # noqa: E402, F401
from faults import run  # noqa: E402

RANKS = 2
PLACES = [  # calls while a checkpoint is written and published: how often on rank 0, on rank 1
    ("Checkpoints.begin", 1, 0),
    ("torch.distributed.checkpoint.FileSystemWriter.write_data", 2, 2),
    ("torch.distributed.checkpoint.FileSystemWriter.finish", 1, 0),
    ("sync", 12, 1),
    ("Path.rename", 2, 0),
    ("Checkpoints.remove_old", 1, 0),
    ("shutil.rmtree", 2, 0),
    ("Run.log_step", 3, 3),
]


def start(script: str, words: list[str], faults: list[dict]) -> list[int]:
    """Fork the ranks; returns their process ids."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    ranks = []
    for number in range(RANKS):
        child = os.fork()
        if child == 0:
            os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number)}
            os.environ |= {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
            os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            if faults:  # what the killed ones and their neighbours say is no news
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            run(script, faults, words)
            os._exit(0)
        ranks.append(child)
    return ranks


def join(ranks: list[int], limit: float) -> list[int]:
    """Exit codes. Once one rank has ended badly the others get SIGTERM, as from torchrun."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + limit
    while len(codes) < len(ranks):
        for child in set(ranks) - codes.keys():
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                codes[child] = os.waitstatus_to_exitcode(status)
                if codes[child]:
                    deadline = min(deadline, time.monotonic() + 20)
                    time.sleep(0.2)
                    for other in set(ranks) - codes.keys():
                        os.kill(other, signal.SIGTERM)
        if time.monotonic() > deadline:
            for child in set(ranks) - codes.keys():
                os.kill(child, signal.SIGKILL)
            deadline += 10
        time.sleep(0.02)
    return [codes[child] for child in ranks]


def main() -> None:
    script, kills, seed, *words = sys.argv[1:]
    importlib.import_module(script)
    chance = random.Random(int(seed))
    for number in range(int(kills)):
        victim = chance.choice([0, 0, 1])
        if number % 2:  # at a place, of one rank
            call, *times = chance.choice([place for place in PLACES if place[1 + victim]])
            fault = {"call": call, "number": chance.randint(1, times[victim]), "rank": victim}
            fault |= {"do": "kill", "after": chance.random() < 0.5}
            codes = join(start(script, words, [fault]), 120)
            print(json.dumps(fault), codes, flush=True)
        else:  # at a time, of one rank or of all
            ranks = start(script, words, [{"call": "Run.finish", "do": "kill"}])
            delay = chance.uniform(1.5, 3.3)
            time.sleep(delay)
            everyone = chance.random() < 0.5
            for child in ranks if everyone else [ranks[victim]]:
                os.kill(child, signal.SIGKILL)
            codes = join(ranks, 60)
            print(
                f"after {delay:.1f} s, {'all' if everyone else f'rank {victim}'}", codes, flush=True
            )
    codes = join(start(script, words, []), 240)
    print("end", codes)
    sys.exit(any(codes))


if __name__ == "__main__":
    main()
