"""Ray jobs through Ray's own SDK: submit once, follow across lost connections, stop, exit code."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from cimage_dist.config import Config, EvalConfig, fingerprint
from cimage_dist.errors import UserError

RUNTIME_ENV = Path("launch") / "runtime_env.yaml"
FIELDS = {"excludes", "env_vars", "pip", "working_dir", "py_modules", "config"}
PATIENCE_S, RETRY_S = 600.0, 2.0  # following ends after so long a silence; the job does not


def dashboard_address(given: str | None) -> str:
    """--address, RAY_API_SERVER_ADDRESS, an http RAY_ADDRESS, else the usual port here."""
    ray_address = os.environ.get("RAY_ADDRESS", "")
    usual = ray_address if ray_address.startswith("http") else "http://127.0.0.1:8265"
    address = given or os.environ.get("RAY_API_SERVER_ADDRESS") or usual
    address = address if "://" in address else f"http://{address}"
    if not address.startswith(("http://", "https://")):
        raise UserError(f"{address} is not a Ray dashboard. Give one like http://head:8265.")
    return address.rstrip("/")


def use_token(file: Path | None) -> None:
    """Token authentication for this process, unless RAY_AUTH_MODE says otherwise."""
    if file is not None:
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(file.resolve())
        os.environ.pop("RAY_AUTH_TOKEN", None)
    is_off = os.environ.setdefault("RAY_AUTH_MODE", "token").lower() != "token"
    if is_off or os.environ.get("RAY_AUTH_TOKEN"):
        return
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if not (path.is_file() and path.read_text().strip()):
        raise UserError(
            f"No authentication token: {path} is absent or empty. Give --token-file FILE, or set "
            "RAY_AUTH_TOKEN_PATH; for a cluster without authentication RAY_AUTH_MODE=disabled."
        )


def connect(address: str, token_file: Path | None) -> Any:
    """A client of the cluster's job server, after one request to it."""
    use_token(token_file)
    os.environ["RAY_API_SERVER_ADDRESS"] = address  # the SDK prefers it to its argument
    from ray.job_submission import JobSubmissionClient

    # Otherwise each ignore file is reported; a file too large to upload is an error all the same.
    for name in ("dashboard.modules.job.sdk", "dashboard.modules.dashboard_sdk"):
        logging.getLogger(f"ray.{name}").setLevel(logging.WARNING)
    for name in ("packaging", "working_dir"):
        logging.getLogger(f"ray._private.runtime_env.{name}").setLevel(logging.ERROR)
    with reported(address):
        return JobSubmissionClient(address)


@contextmanager
def reported(address: str) -> Iterator[None]:
    """A cluster out of reach, or one that refuses the token, as a UserError without the token."""
    import requests
    from ray.exceptions import AuthenticationError

    try:
        yield
    except AuthenticationError as error:
        is_wrong = "invalid or incorrect" in str(error)
        why = "the token is not the cluster's" if is_wrong else "it asks for a token"
        raise UserError(f"{address} refused the request: {why} (--token-file FILE).") from None
    except (ConnectionError, requests.exceptions.RequestException):
        raise UserError(
            f"No Ray dashboard answers at {address}. Is the cluster up, and the port forwarded to "
            "this machine? --address chooses another."
        ) from None


def runtime_env(given: Path | None, folder: Path, storage: str | None) -> dict[str, Any]:
    """The environment of a job that starts in an uploaded copy of `folder`."""
    roots = (folder, Path(__file__).parents[2], Path(sys.prefix) / "share" / "cimage-dist")
    found = next((root / RUNTIME_ENV for root in roots if (root / RUNTIME_ENV).is_file()), None)
    path = given or found or folder / RUNTIME_ENV
    try:
        body = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read: {error}. Give --runtime-env FILE.") from None
    if not isinstance(body, dict) or not set(body) <= FIELDS:
        raise UserError(f"{path} is not a runtime environment: it has {', '.join(sorted(FIELDS))}.")
    env: dict[str, Any] = {"working_dir": str(folder), **body}
    if storage:
        env["env_vars"] = {**(env.get("env_vars") or {}), "CIMAGE_STORAGE": storage}
    return env


def base_id(verb: str, cfg: Config, extras: Sequence[str] = ()) -> str:
    """The same experiment has the same id: verb, data, fingerprint, seed, a digest of the rest."""
    others = [*extras, *([f"run.dir={cfg.run.dir}"] if cfg.run.dir else [])]
    if verb != "pretrain" and cfg.eval != EvalConfig():
        others.append(f"eval={dataclasses.asdict(cfg.eval)}")
    name = re.sub(r"[^A-Za-z0-9_]+", "-", cfg.data.name)
    rest = hashlib.blake2b(repr(sorted(others)).encode(), digest_size=4).hexdigest()
    return f"{verb}-{name}-{fingerprint(cfg)}-s{cfg.run.seed}{f'-{rest}' if others else ''}"


def submit_once(client: Any, base: str, again: bool, **job: Any) -> tuple[str, str | None]:
    """(id, status of the same job that is under way or has succeeded; None: submitted now)."""
    while True:
        known = {job.submission_id: job.status.value for job in client.list_jobs()}
        tried = [
            re.fullmatch(re.escape(base) + r"(?:-try(\d+))?", job_id or "") for job_id in known
        ]
        last = max((int(match[1] or 1) for match in tried if match), default=0)
        job_id = base if last < 2 else f"{base}-try{last}"
        status = known.get(job_id)
        if status in ("PENDING", "RUNNING") or (status == "SUCCEEDED" and not again):
            return job_id, status
        job_id = f"{base}-try{last + 1}" if last else base
        try:
            client.submit_job(submission_id=job_id, **job)
            return job_id, None
        except RuntimeError as error:
            if "already exists" not in str(error):  # else somebody submitted the same just now
                raise UserError(f"The cluster did not accept the job: {error}") from None
        except ValueError as error:
            raise UserError(f"Working directory or runtime environment: {error}") from None


def describe(job: Any) -> dict[str, Any]:
    """What may be shown of a job; not its runtime environment, which can hold secrets."""
    code = {"SUCCEEDED": 0, "STOPPED": 143}.get(job.status.value, job.driver_exit_code)
    code = 1 if code is None else code if code >= 0 else 128 - code
    return {
        "id": job.submission_id,
        "name": (job.metadata or {}).get("job_name", job.submission_id),
        "status": job.status.value,
        "exit_code": code if job.status.is_terminal() else None,
        "entrypoint": job.entrypoint,
        "started": job.start_time,
        "ended": job.end_time,
        "message": (job.message or "").split("\n")[0],
    }


def list_jobs(client: Any) -> list[dict[str, Any]]:
    """Submitted jobs, the newest first; drivers that connected by themselves are not jobs."""
    jobs = [describe(job) for job in client.list_jobs() if job.submission_id]
    return sorted(jobs, key=lambda job: job["started"] or 0, reverse=True)


def find_job(client: Any, given: str) -> str:
    """The job of this id, or the only one whose id begins so."""
    ids = [str(job["id"]) for job in list_jobs(client)]
    found = [given] if given in ids else [job_id for job_id in ids if job_id.startswith(given)]
    if not found:
        raise UserError(f"This cluster has no job {given!r}. `cimage jobs list` shows them all.")
    if len(found) > 1:
        raise UserError(f"Several jobs begin with {given!r}: {', '.join(found)}. Give more of it.")
    return found[0]


class Terminated(KeyboardInterrupt):
    """SIGTERM: nobody is there to be asked."""


class Follower:
    """Writes a job's log until the job has ended, without gap or repeat."""

    def __init__(self, client: Any, job_id: str, write: Callable[[str], Any], note: Any) -> None:
        self.client, self.job_id, self.write, self.note = client, job_id, write, note
        self.shown = 0  # characters; every connection begins at the start of the log again

    async def _stream(self) -> None:
        position = 0
        async for chunk in self.client.tail_job_logs(self.job_id):
            self.write(chunk[max(self.shown - position, 0) :])
            position += len(chunk)
            self.shown = max(self.shown, position)

    def follow(self) -> Any:
        """The job's details once it has ended; a lost connection is made again."""
        import aiohttp
        import requests

        lost = (aiohttp.ClientError, requests.exceptions.RequestException, OSError, RuntimeError)
        last_answer = time.monotonic()
        while True:
            try:
                asyncio.run(self._stream())
                job = self.client.get_job_info(self.job_id)
                last_answer = time.monotonic()
                if job.status.is_terminal():
                    self.write(self.client.get_job_logs(self.job_id)[self.shown :])
                    return job
            except lost as error:
                if time.monotonic() - last_answer > PATIENCE_S:
                    again = f"cimage jobs logs {self.job_id} --follow"
                    raise UserError(
                        f"Lost the cluster ({error}). The job may run: {again}"
                    ) from None
                self.note(f"connection lost, trying again: {type(error).__name__}")
            time.sleep(RETRY_S)

    def watch(self, ask: Callable[[], str]) -> Any:
        """Follow to the end; None when the user detached. `ask` says what Ctrl-C does."""

        def terminate(signum: int, frame: Any) -> None:
            raise Terminated

        before, is_stopping = signal.signal(signal.SIGTERM, terminate), False
        try:
            while True:
                try:
                    return self.follow()
                except KeyboardInterrupt as interrupt:
                    is_signal = isinstance(interrupt, Terminated)
                    choice = "stop" if is_signal else "detach" if is_stopping else ask()
                    if choice == "detach":
                        return None
                    if choice == "stop":
                        self.note("stopping the job; it saves first. Ctrl-C again detaches.")
                        self.client.stop_job(self.job_id)
                        is_stopping = True
        finally:
            signal.signal(signal.SIGTERM, before)
