"""Make the missing cells of tables, several at a time, on this machine or on a Ray cluster."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from types import MappingProxyType

from experiments.cell import cell_command, shown
from experiments.spec import Cell, Table

# What makes one cell: (its command) -> (exit code, what it printed).
Execute = Callable[[list[str]], tuple[int, str]]


def missing(tables: Sequence[Table], results: Path) -> list[Cell]:
    """Every run the tables still need, once each, early seeds first."""
    cells = {
        cell: None for table in tables for cell in table.cells() if not cell.path(results).is_file()
    }
    return sorted(cells, key=lambda cell: cell.seed)


# Side by side, runs of one thread use the cores better than threads inside one run do.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}


def wants_workers(command: Sequence[str]) -> bool:
    """Whether the run asks Ray for workers of its own."""
    return any(word.startswith("--set=resources.num_workers=") for word in command)


def here(
    command: list[str], folder: str | None = None, more: Mapping[str, str] = MappingProxyType({})
) -> tuple[int, str]:
    """In a process of its own, in `folder` and with `more` variables."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=folder,
        env={**ONE_THREAD, **os.environ, **more},
    )
    return done.returncode, (done.stdout + done.stderr)[-2000:]


def make(
    cells: Sequence[Cell],
    results: Path,
    runs: Path,
    jobs: int,
    execute: Execute,
    tick: Callable[[int, int, str], None],
) -> list[tuple[Cell, str]]:
    """Run the cells, `jobs` at a time; those that failed with what they said. A failure does not
    stop the others.
    """
    failed, done = [], 0
    groups: dict[tuple[str, int], list[Cell]] = {}
    # cells that share a run directory, one after the other: the first trains, the others find it
    # trained
    for cell in cells:
        groups.setdefault((cell.run_folder, cell.seed), []).append(cell)

    def work(group: list[Cell]) -> list[tuple[Cell, int, str]]:
        return [(cell, *execute(cell_command(cell, results, runs))) for cell in group]

    with ThreadPoolExecutor(jobs) as pool:
        waiting = [pool.submit(work, group) for group in groups.values()]
        try:
            for future in as_completed(waiting):
                for cell, code, said in future.result():
                    if code:
                        failed.append(
                            (
                                cell,
                                said.strip().splitlines()[-1]
                                if said.strip()
                                else f"exit code {code}",
                            )
                        )
                    done += 1
                    tick(done, len(cells), shown(cell))
        except BaseException:
            for later in waiting:
                later.cancel()
            raise
    return failed
