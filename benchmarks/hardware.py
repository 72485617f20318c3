"""What a benchmark ran on, and how fast that machine is at its best."""

from __future__ import annotations

import datetime
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cimage_dist import environment


def facts(threads: int) -> dict[str, Any]:
    """Date, processor, load, threads and versions."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        model = next((line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")), model)
    load = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None
    return {"date": str(datetime.date.today()), "cpu": model, "load": load, "threads": threads} | environment.describe()


def headline(threads: int) -> str:
    found = facts(threads)
    packages = ", ".join(f"{name} {version}" for name, version in found["packages"].items() if version)
    return f"{found['date']}  {found['cpu']}, {found['cpu_count']} cores, {threads} thread(s), load {found['load']}; Python {found['python']}, {packages}"


def best_seconds(call: Callable[[], object], repeats: int) -> float:
    """The quickest of several calls, after one to warm up: other load on the machine can only add."""
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


def cache_gbytes() -> float:
    """Read bandwidth within the cache a core has to itself: the sum of 256 KB per thread, over and over."""
    x = torch.randn((1 << 16) * torch.get_num_threads())
    repeats = 2000

    def call() -> None:
        for _ in range(repeats):
            x.sum()

    return repeats * x.numel() * 4 / best_seconds(call, 3) / 1e9
