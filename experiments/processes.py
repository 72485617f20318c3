"""Cells of a benchmark on this machine, in processes that stay between runs."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import threading
import traceback
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from cimage_dist.io.storage import end_with_parent
from experiments.run import ONE_THREAD, here, wants_workers
from experiments.work import main


def _in_this_process(words: list[str]) -> tuple[int, str]:
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            code = main(words)
    except Exception:  # an error of one run: the others continue, and the last line reports it
        code, _ = 1, said.write(traceback.format_exc())
    return code, said.getvalue()[-2000:]


class KeptProcesses:
    """Runs commands of `work` in processes that stay, one for each calling thread: loading the
    libraries takes as long as a small run.

    A process that dies (out of memory, say) fails its command and is replaced for the next.
    """

    def __init__(self) -> None:
        self._own = threading.local()
        self._all: list[ProcessPoolExecutor] = []
        for name, value in ONE_THREAD.items():
            os.environ.setdefault(name, value)  # read when a new process loads its libraries

    def __call__(self, command: list[str]) -> tuple[int, str]:
        if wants_workers(command):
            return here(command)  # starts Ray, which is to end with the run
        if not hasattr(self._own, "pool"):
            self._own.pool = ProcessPoolExecutor(
                1, multiprocessing.get_context("spawn"), end_with_parent
            )
            self._all.append(self._own.pool)
        try:
            found: tuple[int, str] = self._own.pool.submit(_in_this_process, command[3:]).result()
        except BrokenProcessPool:
            del self._own.pool
            return (
                1,
                "the process died; the machine may have run out of memory (fewer --jobs need less)",
            )
        return found

    def close(self) -> None:
        for pool in self._all:
            pool.shutdown(wait=False, cancel_futures=True)
