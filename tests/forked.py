"""Runs a script's main once for each command line of a JSON list, in forked children.

Importing torch and transformers takes seconds; forking after it makes many short runs cheap.
Prints a JSON list of [exit code, stderr].
"""

import importlib
import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import common  # noqa: E402


def main() -> None:
    scripts = {
        n: importlib.import_module(n) for n in ("ddp_pretrain", "fsdp1_pretrain", "fsdp2_pretrain")
    }
    results = []
    for name, *words in json.loads(sys.argv[1]):
        with tempfile.TemporaryFile("w+") as err:
            child = os.fork()
            if child == 0:
                os.dup2(err.fileno(), 2)
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                sys.argv = [f"{name}.py", *words]
                common.launch(scripts[name].main)
                os._exit(0)
            _, status = os.waitpid(child, 0)
            err.seek(0)
            results.append([os.waitstatus_to_exitcode(status), err.read()])
    print(json.dumps(results))


if __name__ == "__main__":
    main()
