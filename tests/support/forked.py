"""Launch scripts from one process that has imported everything, one after the other.

A launch by torchrun takes seven seconds before anything happens. Ranks that are forked from here
start at once. Each line of stdin is a launch in JSON: {"ranks", "script", "words", "faults",
"orderly", "environment"}. The answer is one line: {"codes", "stdout", "stderr"}. With 0 ranks, it
starts one process as without torchrun.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
import datasets  # noqa: E402, F401
import torch  # noqa: E402
import transformers  # noqa: E402
from launching import HANGS  # noqa: E402


def warm_up() -> None:
    """Do once what every rank would do: import, and fill the caches of model classes."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 8}
    sizes |= {"num_attention_heads": 1, "num_key_value_heads": 1}
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(), torch.no_grad():
        transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes)).save_pretrained(folder)
        transformers.AutoModelForCausalLM.from_pretrained(folder)


def start(
    ranks: int, program: Callable[[], Any], out: int, err: int, orderly: bool = False
) -> list[int]:
    """Fork the ranks with the environment that torchrun would give them; returns process ids."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    gc.freeze()  # the ranks' garbage collector need not search what is here now
    children = []
    for number in range(max(ranks, 1)):
        child = os.fork()
        if child == 0:
            if ranks:
                os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number)}
                os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
                os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(out, 1)
            os.dup2(err, 2)
            program()
            if orderly:
                raise SystemExit  # as at the end of a script: what is still alive may abort
            sys.stdout.flush()
            os._exit(0)  # saves the second that an orderly end takes
        children.append(child)
    return children


def join(ranks: list[int]) -> list[int]:
    """Return exit codes. Once one rank has failed, the others get SIGTERM, as from torchrun.

    They get it again and again, unlike from torchrun, so that ranks which lost another rank end
    before their five seconds of waiting are over.
    """
    codes: dict[int, int] = {}
    deadline = time.monotonic() + HANGS
    while len(codes) < len(ranks):
        for child in set(ranks) - codes.keys():
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                codes[child] = os.waitstatus_to_exitcode(status)
                if codes[child]:
                    deadline = min(deadline, time.monotonic() + 7)
        if any(codes.values()):
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
    from faults import run_with_faults

    for script in Path(__file__).parents[2].glob("*p*_*.py"):
        with contextlib.suppress(Exception):  # one that fails to import fails in its own launches
            importlib.import_module(script.stem)
    warm_up()
    generate = transformers.GenerationMixin.generate
    # The sample at the end of a run is shorter here.
    transformers.GenerationMixin.generate = lambda *words, **options: generate(
        *words, **options | {"max_new_tokens": 8}
    )
    for line in sys.stdin:
        asked = json.loads(line)
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            os.environ.clear()
            os.environ |= asked["environment"]
            program = partial(run_with_faults, asked["script"], asked["faults"], asked["words"])
            descriptors = out.fileno(), err.fileno()
            codes = join(start(asked["ranks"], program, *descriptors, asked["orderly"]))
            out.seek(0)
            err.seek(0)
            print(json.dumps({"codes": codes, "stdout": out.read(), "stderr": err.read()}))
            sys.stdout.flush()


if __name__ == "__main__":
    main()
