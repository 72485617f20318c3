"""Make the missing cells of tables, several at a time, on this machine or on a Ray cluster."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import multiprocessing.connection
import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from cimage_dist.bench.cell import cell_command, shown
from cimage_dist.bench.spec import Cell, Table

# What makes one cell: (its command) -> (exit code, what it printed).
Execute = Callable[[list[str]], tuple[int, str]]


def missing(tables: Sequence[Table], results: Path) -> list[Cell]:
    """Every run the tables still need, once each, early seeds first."""
    cells = {cell: None for table in tables for cell in table.cells() if not cell.path(results).is_file()}
    return sorted(cells, key=lambda cell: cell.seed)


# Side by side, runs of one thread use the cores better than threads inside one run do.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}


def here(command: list[str]) -> tuple[int, str]:
    """In a process of its own."""
    done = subprocess.run(command, capture_output=True, text=True, env=_ONE_THREAD | os.environ)
    return done.returncode, (done.stdout + done.stderr)[-2000:]


def _end_with_parent() -> None:
    """A kept process must not outlive the command, however that ends. What it was training goes on from its checkpoint the next time."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _in_this_process(words: list[str]) -> tuple[int, str]:
    from cimage_dist.runtime.bench_work import main

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = main(words)
    return code, said.getvalue()[-2000:]


class KeptProcesses:
    """Runs commands of `bench_work` in processes that stay, one for each calling thread: loading the libraries takes as long as a small run.

    A process that dies (out of memory, say) fails its command and is replaced for the next.
    """

    def __init__(self) -> None:
        self._own = threading.local()
        self._all: list[ProcessPoolExecutor] = []
        for name, value in _ONE_THREAD.items():
            os.environ.setdefault(name, value)  # read when a new process loads its libraries

    def __call__(self, command: list[str]) -> tuple[int, str]:
        if any(word.startswith("--set=resources.num_workers=") for word in command):
            return here(command)  # starts Ray, which is to end with the run
        if not hasattr(self._own, "pool"):
            self._own.pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _end_with_parent)
            self._all.append(self._own.pool)
        try:
            found: tuple[int, str] = self._own.pool.submit(_in_this_process, command[3:]).result()
        except BrokenProcessPool:
            del self._own.pool
            return 1, "the process died; the machine may have run out of memory (fewer --jobs need less)"
        return found

    def close(self) -> None:
        for pool in self._all:
            pool.shutdown(wait=False, cancel_futures=True)


def make(cells: Sequence[Cell], results: Path, runs: Path, jobs: int, execute: Execute, tick: Callable[[int, int, str], None]) -> list[tuple[Cell, str]]:
    """Run the cells, `jobs` at a time; those that failed with what they said. A failure does not stop the others."""
    failed, done = [], 0
    groups: dict[tuple[str, int], list[Cell]] = {}
    for cell in cells:  # cells that share a run directory, one after the other: the first trains, the others find it trained
        groups.setdefault((cell.run_folder, cell.seed), []).append(cell)

    def work(group: list[Cell]) -> list[tuple[Cell, int, str]]:
        return [(cell, *execute(cell_command(cell, results, runs))) for cell in group]

    with ThreadPoolExecutor(jobs) as pool:
        waiting = [pool.submit(work, group) for group in groups.values()]
        try:
            for future in as_completed(waiting):
                for cell, code, said in future.result():
                    if code:
                        failed.append((cell, said.strip().splitlines()[-1] if said.strip() else f"exit code {code}"))
                    done += 1
                    tick(done, len(cells), shown(cell))
        except BaseException:
            for later in waiting:
                later.cancel()
            raise
    return failed
