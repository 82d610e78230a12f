"""Run the pages' commands without the seconds that torchrun and imports take.

A server imports the libraries once, and forks the ranks of each command that it is asked for:

    quick.py serve SOCKET
    quick.py ask SOCKET torchrun WORDS...
    quick.py ask SOCKET python WORDS...
"""

import json
import os
import runpy
import socket
import sys
from functools import partial
from pathlib import Path


def ask(path: str, program: str, *words: str) -> int:
    """Return the exit code of a command. It writes to this process's stdout and stderr."""
    ranks = 0
    if program == "torchrun":
        standalone, number, *words = words
        if standalone != "--standalone" or "--nproc-per-node=" not in number:
            raise ValueError(f"torchrun {standalone} {number} is not known here")
        ranks = int(number.partition("=")[2])
    elif not words[0].endswith(".py"):  # `python -`, with the code in stdin
        os.execv(sys.executable, [sys.executable, *words])
    asked = {"ranks": ranks, "folder": os.getcwd(), "words": words, "environment": {**os.environ}}
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        socket.send_fds(server, [json.dumps(asked).encode()], [1, 2])
        return int(server.recv(8))


def run(script: str) -> None:
    sys.stdout = open(1, "w", closefd=False)  # the server's may have been a file, and not a pipe
    runpy.run_path(script, run_name="__main__")


def serve(path: str) -> None:
    from forked import join, start, warm_up

    warm_up()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        while True:
            client, _ = listener.accept()
            message, (out, err), _, _ = socket.recv_fds(client, 2**20, 2)
            asked = json.loads(message)
            os.environ.clear()
            os.environ |= asked["environment"]
            os.chdir(asked["folder"])
            script, *_ = sys.argv = asked["words"]
            sys.path[0] = str(Path(script).parent.absolute())
            codes = join(start(asked["ranks"], partial(run, script), out, err))
            client.send(str(int(any(codes))).encode())
            for descriptor in (out, err):
                os.close(descriptor)
            client.close()


if __name__ == "__main__":
    sys.exit({"serve": serve, "ask": ask}[sys.argv[1]](*sys.argv[2:]))
