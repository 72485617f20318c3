"""Following a job: its log without gaps or repeats across lost connections, and what Ctrl-C means."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cimage_dist.errors import UserError

PATIENCE_S = 600.0
"""How long a cluster may stay silent before following is given up; the job itself goes on."""
RETRY_S = 2.0


class Terminated(KeyboardInterrupt):
    """SIGTERM: nobody is there to be asked."""


class Follower:
    """Prints a job's log until the job has ended."""

    def __init__(self, client: Any, job_id: str, write: Callable[[str], None], note: Callable[[str], None]) -> None:
        self.client, self.job_id, self.write, self.note = client, job_id, write, note
        self.shown = 0  # characters of the log; every connection begins at its start again

    def follow(self) -> Any:
        """The job's details once it has ended."""
        import aiohttp
        import requests

        last_answer = time.monotonic()
        while True:
            lost: Exception | None = None
            try:
                asyncio.run(self._stream())
                job = self.client.get_job_info(self.job_id)
                last_answer = time.monotonic()
                if job.status.is_terminal():
                    self._write_rest()
                    return job
            except (aiohttp.ClientError, requests.exceptions.RequestException, ConnectionError, RuntimeError) as error:
                lost = error
            if lost and time.monotonic() - last_answer > PATIENCE_S:
                raise UserError(f"Lost the cluster {PATIENCE_S:.0f} s ago ({lost}). The job may still run: cimage jobs logs {self.job_id} --follow")
            if lost:
                self.note(f"connection lost, trying again: {type(lost).__name__}")
            time.sleep(RETRY_S)

    async def _stream(self) -> None:
        position = 0
        async for chunk in self.client.tail_job_logs(self.job_id):
            begin, position = position, position + len(chunk)
            if position > self.shown:
                self.write(chunk[max(self.shown - begin, 0) :])
                self.shown = position

    def _write_rest(self) -> None:
        """What came after the stream closed."""
        rest = self.client.get_job_logs(self.job_id)[self.shown :]
        if rest:
            self.write(rest)
            self.shown += len(rest)


def watch(follower: Follower, ask: Callable[[], str] | None) -> Any:
    """Follow to the end and return the job's details, or None when the user detached.

    Ctrl-C stops the job; on a terminal `ask` comes first and answers "stop", "detach" or "watch". While the job is stopping, Ctrl-C detaches.
    """
    is_stopping = False
    with sigterm_raises():
        while True:
            try:
                return follower.follow()
            except KeyboardInterrupt as interrupt:
                choice = "stop" if ask is None or isinstance(interrupt, Terminated) else ask()
                if is_stopping and not isinstance(interrupt, Terminated):
                    choice = "detach"
                if choice == "detach":
                    return None
                if choice == "stop":
                    follower.note("stopping the job; it saves first. Ctrl-C again leaves it to that.")
                    follower.client.stop_job(follower.job_id)
                    is_stopping = True


def ask_on_terminal() -> str:
    """What Ctrl-C was meant to do. A second Ctrl-C stops, an ended input detaches."""
    question = "\nstop the job [s], leave it running and detach [d], or go on watching [Enter]? "
    while True:
        print(question, end="", file=sys.stderr, flush=True)
        try:
            answer = sys.stdin.readline()
        except KeyboardInterrupt:
            return "stop"
        if not answer:
            return "detach"
        meaning = {"s": "stop", "stop": "stop", "d": "detach", "detach": "detach", "": "watch"}.get(answer.strip().lower())
        if meaning:
            return meaning


@contextmanager
def sigterm_raises() -> Iterator[None]:
    def raise_it(signum: int, frame: Any) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, raise_it)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
