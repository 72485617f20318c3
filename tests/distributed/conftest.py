"""Training on real Ray nodes that are hurt on purpose: clusters of one machine, commands against
them, and what a run left behind.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from cimage_dist.io import checkpoint

BIN = Path(sys.executable).parent
PATIENCE_S = 900.0  # against a hang only: a start of the workers takes minutes on a busy machine
CHECKPOINT_EVERY = 5
STEPS = 60
# The whole objective, sampled neighbours, dropout. 3,800 edges or so: 15 steps of 255 in an epoch.
SETTINGS = (
    "data.name=sbm",
    "data.sbm.num_nodes=1000",
    "data.sbm.num_blocks=4",
    "data.sbm.avg_degree=8",
    "data.store_dir=data",
    "model.num_factors=4",
    "model.factor_dim=8",
    "model.num_layers=2",
    "model.dropout=0.2",
    "sampler.fanouts=[5,5]",
    "sampler.batch_edges=260",
    "loss.factor_weight=0.5",
    "loss.cluster_weight=0.4",
    "cluster.init=selfkmeans",
    "cluster.init_epochs=1",
    "cluster.restarts=2",
    "ci.every_steps=10",
    "optim.lr_max=0.003",
    "train.epochs=4",
    f"run.checkpoint_every={CHECKPOINT_EVERY}",
    "run.log_every=1",
    "run.keep_checkpoints=3",
    "run.tensorboard=false",
    "resources.num_workers=2",
    "resources.lost_after_s=600",  # on a busy machine a worker may be silent for long
)


def wait_until(is_true: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not is_true():
        assert time.monotonic() < deadline, f"waited {patience_s:.0f} s for {what}"
        time.sleep(0.05)


class Run:
    """`cimage pretrain --on ray` as a process, and the run directory it writes."""

    def __init__(self, root: Path, process: subprocess.Popen[str]) -> None:
        self.root, self.process = root, process

    def records(self) -> list[dict[str, Any]]:
        return train_records(self.root)

    def step(self) -> int:
        return max((record["step"] for record in self.records()), default=0)

    def attempts(self) -> list[dict[str, Any]]:
        return read_lines(self.root / "attempts.jsonl")

    def wait(self, is_true: Callable[[], bool], what: str) -> None:
        def seen() -> bool:
            assert self.process.poll() is None, (
                f"ended with {self.process.returncode} before {what}: "
                f"{self.process.communicate()[1][-3000:]}"
            )
            return is_true()

        wait_until(seen, what)

    def wait_for_step(self, step: int) -> None:
        self.wait(lambda: self.step() >= step, f"step {step}")

    def finish(self, code: int = 0) -> str:
        """What was written to standard error, after the process ended as expected."""
        _, err = self.process.communicate(timeout=PATIENCE_S)
        assert self.process.returncode == code, (
            f"exit code {self.process.returncode}, {code} expected: {err[-4000:]}"
        )
        return err


def train_records(root: Path) -> list[dict[str, Any]]:
    return [record for record in read_lines(root / "metrics.jsonl") if record["kind"] == "train"]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines; the last one may be half-written."""
    found = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        with suppress(ValueError):
            found.append(json.loads(line))
    return found


class Cluster:
    """Real Ray nodes on this machine, each a session of processes of its own, with a token. A
    dashboard only where jobs are submitted: it is slow to start.
    """

    def __init__(self, folder: Path, has_dashboard: bool = False) -> None:
        self.folder = folder
        self.dashboard_port = free_ports(1)[0] if has_dashboard else None
        self.files = folder / "c"
        self.files.mkdir()
        (self.files / "token").write_text(secrets.token_hex(32))
        self._nodes: list[subprocess.Popen[bytes]] = []

    def start(self, nodes: int, cpus: int, **changes: str) -> None:
        dashboard = ["--include-dashboard=false"]
        if self.dashboard_port:
            dashboard = ["--dashboard-host=127.0.0.1", f"--dashboard-port={self.dashboard_port}"]
        self._start_node(
            cpus,
            "--head",
            f"--port={free_ports(1)[0]}",
            f"--temp-dir={self.files / 'ray'}",
            "--disable-usage-stats",
            *dashboard,
            **changes,
        )
        for _ in range(1, nodes):
            self.add_node(cpus)

    def stop(self) -> None:
        for node in reversed(self._nodes):
            kill_node(node.pid)
            node.wait(30)

    def _clean(self) -> dict[str, str]:
        env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("RAY_", "CIMAGE_"))
        }
        return env | {
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "HOME": str(self.folder),
            "OMP_NUM_THREADS": "1",
            "NUMBA_NUM_THREADS": "1",
            "RAY_worker_niceness": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.files / "token"),
            "RAY_TMPDIR": str(self.files),
        }

    def environment(self, **changes: str) -> dict[str, str]:
        """Failures are noticed within half a second, and a group of workers that cannot start is
        given up after 20 s, not 60.
        """
        return self._clean() | {
            "RAY_ADDRESS": self._address(),
            "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{self.dashboard_port}",
            "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
            "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "20",
            **changes,
        }

    def cimage(self, *words: str, **changes: str) -> subprocess.Popen[str]:
        """A command under way, in the cluster's folder."""
        return subprocess.Popen(
            [sys.executable, "-m", "cimage_dist", *words],
            cwd=self.folder,
            env=self.environment(**changes),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def pretrain(self, name: str, *settings: str, **changes: str) -> Run:
        words = [*SETTINGS, f"run.dir={name}", *settings, "--on", "ray", "--json"]
        return Run(self.folder / name, self.cimage("pretrain", *words, **changes))

    def nodes(self) -> list[int]:
        """The session of each node alive, the head first."""
        return [node.pid for node in self._nodes if processes_of(node.pid)]

    def workers(self) -> list[psutil.Process]:
        """Training processes, on any node."""
        found = []
        for node in self.nodes():
            for process in processes_of(node):
                with suppress(psutil.NoSuchProcess):
                    if "RayTrainWorker" in " ".join(process.cmdline()):
                        found.append(process)
        return sorted(found, key=lambda process: process.pid)

    def holder(self, run: Path) -> psutil.Process:
        """Rank 0: the process that has the run directory's lock open."""
        for process in self.workers():
            with suppress(psutil.Error):
                if any(
                    link.readlink() == run / ".lock"
                    for link in Path(f"/proc/{process.pid}/fd").iterdir()
                ):
                    return process
        raise AssertionError(f"no worker holds {run}/.lock")

    def add_node(self, cpus: int = 1, **changes: str) -> None:
        self._start_node(cpus, f"--address={self._address()}", **changes)

    def _address(self) -> str:
        return (self.files / "ray" / "ray_current_cluster").read_text().strip()

    def _start_node(self, cpus: int, *argv: str, **changes: str) -> None:
        """Ray gives a node 30 s to come up, which a busy machine can exceed: it is tried again. Its
        agents' ports are given, so that it need not wait for them.
        """
        log = self.files / f"node-{len(self._nodes)}.log"
        kinds = (
            "dashboard-agent-listen-port",
            "dashboard-agent-grpc-port",
            "metrics-export-port",
            "runtime-env-agent-port",
        )
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            ports = [f"--{kind}={port}" for kind, port in zip(kinds, free_ports(4), strict=True)]
            command = [
                str(BIN / "ray"),
                "start",
                "--block",
                "--node-ip-address=127.0.0.1",
                f"--num-cpus={cpus}",
                "--object-store-memory=268435456",
            ]
            with log.open("w") as out:
                node = subprocess.Popen(
                    [*command, *ports, *argv],
                    cwd=self.folder,
                    env=self._clean() | changes,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                )
            while node.poll() is None:
                if "Ray runtime started" in log.read_text():
                    self._nodes.append(node)
                    return
                time.sleep(0.2)
            kill_node(node.pid)
        raise AssertionError(log.read_text()[-3000:])


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [int(sock.getsockname()[1]) for sock in sockets]


def processes_of(session: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, ProcessLookupError, PermissionError):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def kill_node(session: int) -> None:
    """A machine that is gone: all its processes at once."""
    for process in processes_of(session):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)


@contextmanager
def cluster_of(nodes: int, cpus: int, has_dashboard: bool = False) -> Iterator[Cluster]:
    """Short paths: Ray's sockets lie below. Without nodes the caller starts them."""
    folder = Path(tempfile.mkdtemp(prefix="cim-", dir="/tmp"))
    cluster = Cluster(folder, has_dashboard)
    try:
        if nodes:
            cluster.start(nodes, cpus)
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


@dataclasses.dataclass
class Expected:
    """What the uninterrupted run ended with."""

    tensors: dict[str, torch.Tensor]
    meta: dict[str, Any]
    losses: list[float]

    @classmethod
    def of(cls, run: Run) -> Expected:
        run.finish()
        return cls.of_folder(run.root)

    @classmethod
    def of_folder(cls, root: Path) -> Expected:
        saved = checkpoint.load_latest(root / "ckpt")
        records = train_records(root)
        assert saved is not None and saved.step == STEPS
        assert [record["step"] for record in records] == list(range(1, STEPS + 1))
        return cls(saved.tensors, saved.meta, [record["loss"] for record in records])

    def check(self, run: Run) -> None:
        """Weights, optimiser, partition and every loss, to the bit; every step recorded once."""
        found = Expected.of(run)
        assert found.meta == self.meta
        torch.testing.assert_close(found.tensors, self.tensors, rtol=0, atol=0)
        assert found.losses == self.losses


@pytest.fixture(scope="module")
def one_node() -> Iterator[Cluster]:
    """One node for two workers, for all tests of a module: a Ray of its own for every command would
    take most of the time.
    """
    with cluster_of(1, 2) as cluster:
        yield cluster
