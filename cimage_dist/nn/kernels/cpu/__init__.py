"""Share compiled work out among threads: as many as torch uses, waiting without burning a core.

The compiled loops release the interpreter, so plain threads run them side by side. An OpenMP team
would be a little quicker to start, but its threads wait for each other spinning, which on a shared
machine costs many times the work itself, and starting numba's own team changes the number of
threads torch works with.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch


@lru_cache(maxsize=1)
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    # Threads do not survive a fork: the process number makes a child start its own.
    return ThreadPoolExecutor(threads, thread_name_prefix="cimage-parts")


def num_parts() -> int:
    return torch.get_num_threads()


def run_parts(work: Callable[[int], object], parts: int) -> None:
    """work(0), ..., work(parts - 1), side by side; returns when all are done."""
    if parts > 1:
        others = [_pool(parts - 1, os.getpid()).submit(work, part) for part in range(1, parts)]
        work(0)
        for other in others:
            other.result()
    else:
        work(0)
