"""Where the time of a step goes, and how much memory the process holds.

What a person sees while training: a bar on a terminal, plain lines elsewhere, nothing when quiet.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import psutil
import torch

from cimage_dist.config import Config

Item = TypeVar("Item")

# What two runs of the same experiment need not have in common.
MEASURED = (
    "seconds",
    "edges_per_s",
    "sampling_s",
    "step_s",
    "exchange_s",
    "memory_gb",
    "gpu_memory_gb",
)


class Meter:
    """Seconds waited for batches (sampling), in forward, backward and update (step), in exchanging
    losses and wishes (exchange).

    The gradients' own exchange overlaps the backward pass and counts as step. `edges`: positives
    trained on since the last reading.
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
        """Since the last reading: seconds in all and by kind, edges per second; memory at this
        moment. Starts again.
        """
        now = time.perf_counter()
        seconds = now - self._since
        found = {
            "seconds": seconds,
            "edges_per_s": self.edges / seconds,
            **{f"{name}_s": spent for name, spent in self._spent.items()},
        }
        found["memory_gb"] = self._process.memory_info().rss / 1e9
        if self.device.type == "cuda":
            found["gpu_memory_gb"] = torch.cuda.max_memory_allocated(self.device) / 1e9
        self.edges, self._spent, self._since = 0.0, {}, now
        return found

    def is_checkpoint_due(self) -> bool:
        return self.minutes > 0 and time.perf_counter() - self._saved >= 60 * self.minutes

    def checkpointed(self) -> None:
        self._saved = time.perf_counter()


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and "IPKernelApp" in shell.config


def _short(metrics: dict[str, float]) -> dict[str, str]:
    return {name: f"{value:.4g}" for name, value in metrics.items()}


class Progress:
    """Shows step, loss terms, throughput and remaining time on standard error."""

    def __init__(self, quiet: bool = False, lines: int = 20) -> None:
        self.quiet, self.lines = quiet, lines
        self._stage = ""
        self._bar: Any = None
        self._begin: tuple[float, int] | None = None

    def update(
        self, step: int, total: int, metrics: dict[str, float], stage: str = "pretrain"
    ) -> None:
        """`step` steps of a stage are done out of `total`."""
        if self.quiet:
            return
        if stage != self._stage:
            self.close()
            self._stage, self._begin = stage, None
        if sys.stderr.isatty() or in_notebook():
            self._update_bar(step, total, metrics)
        else:
            self._update_lines(step, total, metrics)

    def _update_bar(self, step: int, total: int, metrics: dict[str, float]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a notebook without ipywidgets has the bar of letters
            from tqdm.auto import tqdm

        if self._bar is None:
            self._bar = tqdm(
                total=total, initial=step - 1, unit="step", desc=self._stage, dynamic_ncols=True
            )
        self._bar.set_postfix(_short(metrics), refresh=False)
        self._bar.update(step - self._bar.n)

    def _update_lines(self, step: int, total: int, metrics: dict[str, float]) -> None:
        now = time.monotonic()
        if self._begin is None:
            self._begin = (now, step)
        every = max(1, total // self.lines)
        if step % every and step != total:
            return
        rate = (step - self._begin[1]) / max(now - self._begin[0], 1e-9)
        left = f"  {rate:.2f} steps/s  eta {(total - step) / rate:.0f} s" if rate > 0 else ""
        terms = "  ".join(f"{name} {value}" for name, value in _short(metrics).items())
        print(f"{self._stage} {step}/{total}  {terms}{left}", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """A line of its own that does not break the bar."""
        if self.quiet:
            return
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
