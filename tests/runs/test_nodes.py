"""Several nodes: one torchrun for each, in network namespaces of their own where permitted."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from launching import HANGS, ROOT, RUN_FLAGS, arguments, metrics

ADDRESSES = ["10.77.0.1", "10.77.0.2"]


@pytest.fixture(scope="module")
def nodes():
    """Yield for each node how its commands begin, its address and its network device."""
    names = [f"node{i}-{os.getpid()}" for i in range(2)]

    def ip(*words: str) -> bool:
        return subprocess.run(["ip", *words], capture_output=True).returncode == 0

    made = shutil.which("ip") and all(ip("netns", "add", name) for name in names)
    made = made and ip(
        "link", "add", "wire", "netns", names[0], "type", "veth", "peer", "wire", "netns", names[1]
    )
    for name, address in zip(names, ADDRESSES):
        made = made and ip("-n", name, "addr", "add", f"{address}/24", "dev", "wire")
        made = made and ip("-n", name, "link", "set", "wire", "up")
        made = made and ip("-n", name, "link", "set", "lo", "up")
    if made:
        yield [(["ip", "netns", "exec", n], a, "wire") for n, a in zip(names, ADDRESSES)]
    else:
        yield [([], "127.0.0.1", "lo")] * 2
    for name in names:
        ip("netns", "del", name)


class Launch:
    """The launchers of both nodes, each with its own cache."""

    def __init__(
        self,
        nodes,
        ranks: int,
        script: str,
        flags: list[dict],
        folder,
        restarts: int = 0,
        number: str = "2",
    ):
        self.folder, self.endpoint = folder, f"{nodes[0][1]}:{self.free_port()}"
        self.nodes, self.ranks, self.script = nodes, ranks, script
        self.flags, self.restarts, self.number = flags, restarts, number
        self.launchers = [self.start(i) for i in range(2 if number == "2" else 1)]

    @staticmethod
    def free_port() -> int:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            return free.getsockname()[1]

    def start(self, number: int) -> subprocess.Popen:
        prefix, address, device = self.nodes[number]
        cache = str(self.folder / f"cache{number}")
        environment = os.environ | {"HF_HOME": cache, "HF_DATASETS_CACHE": cache}
        environment |= {"GLOO_SOCKET_IFNAME": device}
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        command = [
            *prefix, sys.executable, "-m", "torch.distributed.run",
            f"--nnodes={self.number}",
            f"--nproc-per-node={self.ranks}", "--rdzv-backend=c10d", "--rdzv-id=test",
            f"--rdzv-endpoint={self.endpoint}", f"--local-addr={address}",
            # Host names cannot tell which node it is here. Wait five seconds for another node.
            f"--rdzv-conf=is_host={number == 0},last_call_timeout=5",
            f"--max-restarts={self.restarts}", f"{self.script}.py", *arguments(self.flags[number]),
        ]  # fmt: skip
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, start_new_session=True,
        )  # fmt: skip

    def end(self, limit: float = HANGS) -> list[str]:
        """Wait until both have ended; returns their stderr."""
        try:
            return [launcher.communicate(timeout=limit)[1] for launcher in self.launchers]
        finally:
            for number in range(2):
                if self.launchers[number].poll() is None:
                    self.kill(number)

    def kill(self, number: int) -> None:
        """Kill the launcher and its ranks, which have their own sessions, as without power."""
        launcher = str(self.launchers[number].pid)
        ranks = subprocess.run(["pgrep", "-P", launcher], capture_output=True, text=True).stdout
        for process in [launcher, *ranks.split()]:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(int(process), signal.SIGKILL)


@pytest.mark.parametrize(
    "script, ranks, own",
    [
        pytest.param("ddp_pretrain", 1, {}, marks=pytest.mark.drill),
        pytest.param("fsdp2_pretrain", 2, {"dp_replicate": 2}, marks=pytest.mark.drill),
    ],
)
def test_two_nodes_are_one_run(nodes, run, corpus, tmp_path, script, ranks, own):
    """The losses are those of one launcher. Replicas are on different nodes."""
    flags = RUN_FLAGS | {"dataset": corpus, "run_dir": tmp_path / "run"} | own
    launch = Launch(nodes, ranks, script, [flags, flags], tmp_path)
    errors = launch.end()
    assert [launcher.returncode for launcher in launch.launchers] == [0, 0], errors
    alone = run(script, 2 * ranks, **own)
    losses = [[line["loss"] for line in metrics(path)[0]] for path in (alone, tmp_path / "run")]
    assert losses[0] == losses[1]
    assert all((tmp_path / f"cache{number}").is_dir() for number in range(2))


def wait_for_steps(launch, run_dir, number: int) -> None:
    deadline = time.monotonic() + HANGS
    while time.monotonic() < deadline:
        if (run_dir / "metrics.jsonl").exists() and len(metrics(run_dir)[0]) >= number:
            return
        time.sleep(0.1)
    raise AssertionError(f"no {number} steps in {HANGS} seconds: {launch.end(1)}")


@pytest.mark.drill
def test_a_node_that_dies_ends_or_restarts_the_other(nodes, corpus, tmp_path):
    """Run both cases at the same time: without and with restarts."""

    def lose_a_node(restarts: int) -> None:
        folder = tmp_path / str(restarts)
        flags = RUN_FLAGS | {"dataset": corpus, "run_dir": folder / "run", "steps": 60}
        flags |= {"checkpoint_every": 10, "timeout_minutes": 0.5}
        launch = Launch(nodes, 1, "fsdp2_pretrain", [flags, flags], folder, restarts)
        wait_for_steps(launch, folder / "run", 15)
        launch.kill(1)
        launch.launchers[1].communicate()
        if restarts:
            launch.launchers[1] = launch.start(1)
        errors = launch.end()
        codes = [launcher.returncode for launcher in launch.launchers]
        if restarts:
            assert codes == [0, 0], errors
            assert [line["step"] for line in metrics(folder / "run")[0]] == [*range(1, 61)]
        else:
            assert codes[0] == 1, errors

    with ThreadPoolExecutor() as both:
        assert list(both.map(lose_a_node, [0, 1])) == [None, None]


@pytest.mark.drill
def test_a_number_of_nodes_that_changes(nodes, run, corpus, tmp_path):
    """A second node joins while the first one trains, and dies later. The losses stay the same."""
    own = {"steps": 200, "global_batch_tokens": 1024, "eval_every": 1000, "checkpoint_every": 10}
    changed = tmp_path / "run"
    flags = RUN_FLAGS | {"dataset": corpus, "run_dir": changed} | own
    launch = Launch(nodes, 1, "fsdp2_pretrain", [flags, flags], tmp_path, 9, "1:2")
    wait_for_steps(launch, changed, 10)
    launch.launchers.append(launch.start(1))
    deadline = time.monotonic() + HANGS
    while json.loads((changed / "config.json").read_text())["world_size"] < 2:
        assert time.monotonic() < deadline and launch.launchers[0].poll() is None
        time.sleep(0.1)
    wait_for_steps(launch, changed, len(metrics(changed)[0]) + 25)
    launch.kill(1)
    printed, errors = launch.launchers[0].communicate(timeout=HANGS)
    launch.end()
    assert launch.launchers[0].returncode == 0, errors
    assert re.findall(r"on (\d) rank", printed) == ["1", "2", "1"]
    assert [line["step"] for line in metrics(changed)[0]] == [*range(1, 201)]
    alone = run("fsdp2_pretrain.py", 1, **own)
    losses = [np.array([line["loss"] for line in metrics(each)[0]]) for each in (alone, changed)]
    assert np.abs(losses[1] / losses[0] - 1).max() < 1e-4


@pytest.mark.drill
def test_slurm_script_of_the_pages(corpus, tmp_path):
    """A fake srun starts the command once per node, on this machine."""
    text = (ROOT / "docs/runs.md").read_text()
    script = re.search(r"<!-- slurm -->\n```bash\n(.*?)```", text, re.DOTALL)[1]
    port = Launch.free_port()
    (tmp_path / "train.slurm").write_text(script.replace(":29500", f":{port}"))
    fakes = {
        "scontrol": "echo localhost; echo other",
        "srun": 'for node in $(seq "$SLURM_NNODES"); do "$@" & done; wait -n && wait -n',
    }
    for name, body in fakes.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}
    environment |= {"SLURM_JOB_NODELIST": "a", "SLURM_GPUS_ON_NODE": "1"}
    environment |= {"SLURM_CPUS_PER_TASK": "1", "GLOO_SOCKET_IFNAME": "lo"}
    flags = arguments(RUN_FLAGS | {"dataset": corpus, "run_dir": tmp_path / "run"})
    done = subprocess.run(
        ["bash", str(tmp_path / "train.slurm"), *flags], cwd=ROOT, env=environment,
        capture_output=True, text=True, timeout=HANGS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(metrics(tmp_path / "run")[0]) == RUN_FLAGS["steps"]
