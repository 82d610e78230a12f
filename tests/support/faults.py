"""Run a script in which chosen calls go wrong: faults.py SCRIPT FAULTS FLAGS...

FAULTS is a JSON list. With {"call": "run.Run.log_step", "number": 3, "rank": 1, "do": "kill"},
rank 1 kills itself before the third call of run.Run.log_step. With "after", it does so when that
call returns.
"""

import errno
import functools
import gc
import importlib
import json
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from run import launch  # noqa: E402


def limit_file_size() -> None:
    """Let no file grow, as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))


def fail() -> None:
    raise ValueError("a fault on purpose")


def read_only() -> None:
    raise OSError(errno.EROFS, "Read-only file system")


def keep_files() -> None:
    """Remove no file, as NFS while somebody has it open, and sync none, as some FUSE."""

    def busy(*_: Any, **__: Any) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    def unsupported(_: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    os.unlink, os.fsync = busy, unsupported


def stop_a_child() -> None:
    """Fork a child and terminate it, as a `reward` that uses `multiprocessing` does."""
    context = multiprocessing.get_context("fork")
    runs = context.Event()
    child = context.Process(target=lambda: (runs.set(), time.sleep(60)))
    child.start()
    runs.wait(60)
    child.terminate()
    child.join(20)
    if child.exitcode != -signal.SIGTERM:
        child.kill()
        raise ValueError("a forked child ignores SIGTERM")


def send(*signals: int) -> Callable[[], None]:
    return lambda: [os.kill(os.getpid(), number) for number in signals] and None


def say_memory() -> None:
    """Print resident memory, Python's objects, and whether Python collects garbage by itself."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    objects = len(gc.get_objects())
    print(f"memory: {pages} pages, {objects} objects, automatic {gc.isenabled()}", flush=True)


ACTIONS: dict[str, Callable[[], None]] = {
    "kill": send(signal.SIGKILL),
    "freeze": send(signal.SIGSTOP),
    "terminate": send(signal.SIGTERM),
    "interrupt": send(signal.SIGINT),
    "interrupt twice": send(signal.SIGINT, signal.SIGINT),
    "hang up": send(signal.SIGHUP),
    "raise": fail,
    "nap": lambda: time.sleep(2),
    "sleep": lambda: time.sleep(10_000),
    "limit file size": limit_file_size,
    "read only": read_only,
    "keep files": keep_files,
    "change directory": lambda: os.chdir("/"),
    "stop a child": stop_a_child,
    "say memory": say_memory,
    "collect garbage automatically": gc.enable,
}


def plant(fault: dict[str, Any]) -> None:
    """Wrap the function that the fault names."""
    if fault.get("rank", int(os.environ.get("RANK", 0))) != int(os.environ.get("RANK", 0)):
        return
    if "restart" in fault and str(fault["restart"]) != os.environ.get("TORCHELASTIC_RESTART_COUNT"):
        return
    module, *path, name = fault["call"].split(".")
    owner: Any = functools.reduce(getattr, path, importlib.import_module(module))
    function, calls = getattr(owner, name), 0

    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        hit = calls == fault.get("number", 1)
        if hit and not fault.get("after"):
            ACTIONS[fault["do"]]()
        result = function(*arguments, **keywords)
        if hit and fault.get("after"):
            ACTIONS[fault["do"]]()
        return result

    setattr(owner, name, wrapped)


def run_with_faults(script: str, faults: list[dict[str, Any]], words: list[str]) -> None:
    # A shell that starts the tests in the background ignores SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    module = importlib.import_module(script)
    sys.argv = [f"{script}.py", *words]
    for fault in faults:
        plant(fault)
    launch(module.main)


if __name__ == "__main__":
    run_with_faults(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3:])
