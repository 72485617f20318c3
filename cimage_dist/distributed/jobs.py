"""Ray jobs: submit once, follow through lost connections, stop, and bring back the job's own exit code."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cimage_dist.distributed.job_env import use_token
from cimage_dist.distributed.job_ids import attempt_id, last_attempt
from cimage_dist.errors import UserError

STOPPED_CODE = 143
"""What a job that was asked to stop returns: 128 + SIGTERM, which is what Ray sends it."""
# Ray tells each ignore file it reads and that .git is left out; a file too large to upload is still worth a warning.
QUIETER = {
    "ray.dashboard.modules.job.sdk": logging.WARNING,
    "ray.dashboard.modules.dashboard_sdk": logging.WARNING,
    "ray._private.runtime_env.packaging": logging.WARNING,
    "ray._private.runtime_env.working_dir": logging.ERROR,
}


@dataclass
class Submission:
    """Which job stands for the experiment now, and whether it had to be started."""

    job_id: str
    is_new: bool
    status: str


def connect(address: str, token_file: Path | None) -> Any:
    """A client of the cluster's job server, after one question to it."""
    use_token(token_file)
    # The SDK lets this variable overrule its argument; here the argument has been chosen with care.
    os.environ["RAY_API_SERVER_ADDRESS"] = address
    from ray.job_submission import JobSubmissionClient

    for name, level in QUIETER.items():
        logging.getLogger(name).setLevel(level)
    with told(address):
        return JobSubmissionClient(address)


@contextmanager
def told(address: str) -> Iterator[None]:
    """A cluster that cannot be reached or refuses the token is told as what it is; nothing of the token is repeated."""
    import requests
    from ray.exceptions import AuthenticationError

    try:
        yield
    except AuthenticationError as error:
        why = "the token is not the cluster's" if "invalid or incorrect" in str(error) else "it asks for a token"
        raise UserError(f"The Ray cluster at {address} refused the request: {why}. Give the right one with --token-file or RAY_AUTH_TOKEN_PATH.") from None
    except (ConnectionError, requests.exceptions.RequestException):
        raise UserError(
            f"No Ray dashboard answers at {address}. Is the cluster up, and the port forwarded to this machine? --address or RAY_API_SERVER_ADDRESS chooses another."
        ) from None


def submit_once(client: Any, base: str, entrypoint: str, runtime_env: dict[str, Any], metadata: dict[str, str], again: bool) -> Submission:
    """Start the job unless one of the same name is under way or has succeeded. A failed or stopped one is followed by a new attempt."""
    while True:
        known = {job.submission_id: job.status.value for job in client.list_jobs() if job.submission_id}
        last = last_attempt(base, known)
        job_id = attempt_id(base, last)
        if last and (known[job_id] in ("PENDING", "RUNNING") or (known[job_id] == "SUCCEEDED" and not again)):
            return Submission(job_id, is_new=False, status=known[job_id])
        job_id = attempt_id(base, last + 1)
        try:
            client.submit_job(entrypoint=entrypoint, submission_id=job_id, runtime_env=runtime_env, metadata=metadata)
        except RuntimeError as error:
            if "already exists" in str(error):
                continue  # somebody submitted the same in this very moment
            raise UserError(f"The cluster did not take the job: {error}") from None
        except ValueError as error:
            raise UserError(f"The working directory or the runtime environment cannot be used: {error}") from None
        return Submission(job_id, is_new=True, status="PENDING")


def exit_code(status: str, driver_exit_code: int | None) -> int:
    """The job's own: 0, what its command returned, 128 + n when signal n ended it, 143 when it was stopped, 1 when it never ran."""
    if status == "SUCCEEDED":
        return 0
    if status == "STOPPED":
        return STOPPED_CODE
    if driver_exit_code is None:
        return 1
    return driver_exit_code if driver_exit_code >= 0 else 128 - driver_exit_code


def describe(job: Any) -> dict[str, Any]:
    """What may be shown of a job. Its runtime environment may not: variables can hold secrets."""
    return {
        "id": job.submission_id,
        "name": (job.metadata or {}).get("job_name", job.submission_id),
        "status": job.status.value,
        "exit_code": exit_code(job.status.value, job.driver_exit_code) if job.status.is_terminal() else None,
        "entrypoint": job.entrypoint,
        "started": job.start_time,
        "ended": job.end_time,
        "message": (job.message or "").split("\n")[0],
    }


def list_jobs(client: Any) -> list[dict[str, Any]]:
    """Submitted jobs, the newest first; drivers that connected by themselves are not jobs."""
    jobs = [job for job in client.list_jobs() if job.submission_id]
    return [describe(job) for job in sorted(jobs, key=lambda job: job.start_time or 0, reverse=True)]


def find_job(client: Any, given: str) -> str:
    """The job of this id, or the only one whose id begins so."""
    ids = [job["id"] for job in list_jobs(client)]
    found = [given] if given in ids else [job_id for job_id in ids if job_id.startswith(given)]
    if not found:
        raise UserError(f"This cluster has no job {given!r}. `cimage jobs list` shows them all.")
    if len(found) > 1:
        raise UserError(f"Several jobs begin with {given!r}: {', '.join(found)}. Give more of the id.")
    return found[0]
