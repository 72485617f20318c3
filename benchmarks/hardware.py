"""What a benchmark ran on, and how fast that machine is at its best."""

from __future__ import annotations

import datetime
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import torch

from cimage_dist.io import storage
from cimage_dist.nn.kernels.cpu.parallel import (
    LANES,
    add,
    lane_sum,
    load,
    num_parts,
    pointer,
    run_parts,
    spread,
)


def facts(threads: int) -> dict[str, Any]:
    """Date, processor, load, threads and versions."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        model = next(
            (
                line.split(":", 1)[1].strip()
                for line in info.read_text().splitlines()
                if line.startswith("model name")
            ),
            model,
        )
    load = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None
    return {
        "date": str(datetime.date.today()),
        "cpu": model,
        "load": load,
        "threads": threads,
    } | storage.describe()


def headline(threads: int) -> str:
    found = facts(threads)
    packages = ", ".join(
        f"{name} {version}" for name, version in found["packages"].items() if version
    )
    return (
        f"{found['date']}  {found['cpu']}, {found['cpu_count']} cores, {threads} thread(s), "
        f"load {found['load']}; Python {found['python']}, {packages}"
    )


def best_seconds(call: Callable[[], object], repeats: int) -> float:
    """The quickest of several calls, after one to warm up: other load on the machine can only
    add.
    """
    call()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)


def peak_gflops() -> float:
    """Of a matrix product in single precision, with torch's threads."""
    a = torch.randn(2048, 2048)
    return 2 * 2048**3 / best_seconds(lambda: a @ a, 5) / 1e9


def memory_gbytes() -> float:
    """Read plus write, of a copy far larger than any cache."""
    source = torch.randn(1 << 27)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / best_seconds(lambda: target.copy_(source), 3) / 1e9


@numba.njit(nogil=True)
def _read(x: Any, repeats: int) -> Any:
    """Sum all numbers again and again, four vectors at a time."""
    data = pointer(x)
    a = b = c = d = spread(data, 0)
    for _ in range(repeats):
        for i in range(0, x.size, 4 * LANES):
            a, b = add(a, load(data, i)), add(b, load(data, i + LANES))
            c, d = add(c, load(data, i + 2 * LANES)), add(d, load(data, i + 3 * LANES))
    return lane_sum(add(add(a, b), add(c, d)))


def cache_gbytes() -> float:
    """Read bandwidth of all threads, each from 128 KB of its own: the cache that holds a target's
    neighbourhood.
    """
    parts, repeats = num_parts(), 4000
    rows = [torch.randn(1 << 15).numpy() for _ in range(parts)]
    seconds = best_seconds(lambda: run_parts(lambda part: _read(rows[part], repeats), parts), 3)
    return parts * repeats * rows[0].nbytes / seconds / 1e9


def peak_while(call: Callable[[], object]) -> float:
    """Megabytes by which the process grew at most during the call (Linux)."""

    def status(name: str) -> float:
        line = next(
            line
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith(name)
        )
        return int(line.split()[1]) / 1e3

    Path("/proc/self/clear_refs").write_text("5")  # the kernel's high-water mark starts again
    before = status("VmRSS")
    call()
    return status("VmHWM") - before
