"""A job server in memory, and a real cluster of two nodes from launch/local_cluster.sh."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "launch" / "local_cluster.sh"
BIN = Path(sys.executable).parent
RAY_VARIABLES = (
    "RAY_ADDRESS",
    "RAY_API_SERVER_ADDRESS",
    "RAY_AUTH_MODE",
    "RAY_AUTH_TOKEN",
    "RAY_AUTH_TOKEN_PATH",
    "CIMAGE_STORAGE",
    "CIMAGE_CLUSTER_DIR",
)


class FakeJob(SimpleNamespace):
    """What the job server reports of a job."""

    def __init__(self, job_id: str, status: str, code: int | None = None) -> None:
        state = SimpleNamespace(
            value=status, is_terminal=lambda: status in ("SUCCEEDED", "FAILED", "STOPPED")
        )
        details = {
            "metadata": None,
            "entrypoint": "cimage show",
            "start_time": 1,
            "end_time": None,
            "message": "",
            "runtime_env": {"env_vars": {"A": "secret"}},
        }
        super().__init__(submission_id=job_id, status=state, driver_exit_code=code, **details)


class FakeClient:
    """Jobs by id; `streams` is what each connection to the log yields, an exception where it
    breaks.
    """

    def __init__(
        self,
        jobs: dict[str, str] | None = None,
        streams: list[list[str | BaseException]] | None = None,
        log: str = "",
    ) -> None:
        self.jobs = jobs or {}
        self.streams = streams or []
        self.log = log
        self.submitted: list[dict[str, Any]] = []
        self.stopped: list[str] = []

    def list_jobs(self) -> list[FakeJob]:
        return [FakeJob(job_id, status) for job_id, status in self.jobs.items()]

    def submit_job(self, **what: Any) -> str:
        self.submitted.append(what)
        self.jobs[what["submission_id"]] = "PENDING"
        return str(what["submission_id"])

    def get_job_info(self, job_id: str) -> FakeJob:
        return FakeJob(job_id, self.jobs[job_id])

    def get_job_logs(self, job_id: str) -> str:
        return self.log

    def stop_job(self, job_id: str) -> bool:
        self.stopped.append(job_id)
        self.jobs[job_id] = "STOPPED"
        return True

    async def tail_job_logs(self, job_id: str) -> AsyncIterator[str]:
        for item in self.streams.pop(0):
            if isinstance(item, BaseException):
                raise item
            yield item


class Cluster:
    """A running local cluster: its folder, what its jobs write, and commands run against it."""

    def __init__(self, folder: Path, storage: Path) -> None:
        self.folder, self.storage = folder, storage

    @property
    def token(self) -> str:
        return (self.folder / "token").read_text()

    @property
    def address(self) -> str:
        return (self.folder / "address").read_text().strip()

    def environment(self, **changes: str) -> dict[str, str]:
        """RAY_API_SERVER_ADDRESS and the token's file, as `local_cluster.sh env` prints them; HOME
        is the test's because Ray writes there.
        """
        return clean_environment() | {
            "HOME": str(self.storage),
            "RAY_API_SERVER_ADDRESS": self.address,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.folder / "token"),
            **changes,
        }

    def start(self, *argv: str, **changes: str) -> subprocess.Popen[str]:
        env = self.environment(**changes)
        return subprocess.Popen(
            argv,
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *argv: str, **changes: str) -> subprocess.CompletedProcess[str]:
        env = self.environment(**changes)
        return subprocess.run(
            argv,
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )

    def cimage(self, *argv: str, **changes: str) -> subprocess.CompletedProcess[str]:
        return self.run(str(BIN / "cimage"), *argv, **changes)

    def jobs(self) -> dict[str, dict[str, Any]]:
        done = self.cimage("jobs", "list", "--json")
        assert done.returncode == 0, done.stderr
        return {job["id"]: job for job in json.loads(done.stdout)["jobs"]}

    def script(self, action: str, *argv: str) -> subprocess.CompletedProcess[str]:
        return run_script(action, "--dir", str(self.folder), *argv)


def clean_environment() -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if name not in RAY_VARIABLES}
    return env | {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "NUMBA_NUM_THREADS": "1",
    }


def run_script(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPT), *argv],
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Head and one worker node with a CPU each, token on. Short paths: Ray's sockets lie below."""
    folder = Path(tempfile.mkdtemp(prefix="cim-", dir="/tmp"))
    running = Cluster(folder / "c", folder / "s")
    running.storage.mkdir()
    started = running.script("start", "--nodes", "2", "--storage", str(running.storage))
    try:
        assert started.returncode == 0, started.stderr
        yield running
    finally:
        running.script("stop")
        shutil.rmtree(folder, ignore_errors=True)
