"""Where the time of a step goes, and how much memory the process holds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import psutil
import torch

from cimage_dist.config import Config

Item = TypeVar("Item")

# What two runs of the same experiment need not have in common.
MEASURED = ("seconds", "edges_per_s", "sampling_s", "step_s", "exchange_s", "memory_gb", "gpu_memory_gb")


class Meter:
    """Seconds waited for batches (sampling), in forward, backward and update (step), in exchanging losses and wishes (exchange).

    The gradients' own exchange overlaps the backward pass and counts as step. `edges`: positives trained on since the last reading.
    """

    def __init__(self, cfg: Config, device: torch.device) -> None:
        self.minutes, self.device = cfg.run.checkpoint_minutes, device
        self.edges = 0.0
        self._spent: dict[str, float] = {}
        self._since = self._saved = time.perf_counter()
        self._process = psutil.Process()

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._spent[name] = self._spent.get(name, 0.0) + time.perf_counter() - began

    def timed(self, items: Iterator[Item]) -> Iterator[Item]:
        """The same items; waiting for the next one counts as sampling."""
        while True:
            with self.time("sampling"):
                item = next(items, None)
            if item is None:
                return
            yield item

    def read(self) -> dict[str, Any]:
        """Since the last reading: seconds in all and by kind, edges per second; memory at this moment. Starts anew."""
        now = time.perf_counter()
        seconds = now - self._since
        found = {"seconds": seconds, "edges_per_s": self.edges / seconds, **{f"{name}_s": spent for name, spent in self._spent.items()}}
        found["memory_gb"] = self._process.memory_info().rss / 1e9
        if self.device.type == "cuda":
            found["gpu_memory_gb"] = torch.cuda.max_memory_allocated(self.device) / 1e9
        self.edges, self._spent, self._since = 0.0, {}, now
        return found

    def is_checkpoint_due(self) -> bool:
        return self.minutes > 0 and time.perf_counter() - self._saved >= 60 * self.minutes

    def checkpointed(self) -> None:
        self._saved = time.perf_counter()
