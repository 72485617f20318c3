"""What a person sees while training: a bar on a terminal, plain lines elsewhere, nothing when quiet."""

from __future__ import annotations

import sys
import time
from typing import Any


def _short(metrics: dict[str, float]) -> dict[str, str]:
    return {name: f"{value:.4g}" for name, value in metrics.items()}


class Progress:
    """Shows step, loss terms, throughput and remaining time on standard error."""

    def __init__(self, quiet: bool = False, lines: int = 20) -> None:
        self.quiet, self.lines = quiet, lines
        self._stage = ""
        self._bar: Any = None
        self._begin: tuple[float, int] | None = None

    def update(self, step: int, total: int, metrics: dict[str, float], stage: str = "pretrain") -> None:
        """`step` steps of a stage are done out of `total`."""
        if self.quiet:
            return
        if stage != self._stage:
            self.close()
            self._stage, self._begin = stage, None
        if sys.stderr.isatty():
            self._update_bar(step, total, metrics)
        else:
            self._update_lines(step, total, metrics)

    def _update_bar(self, step: int, total: int, metrics: dict[str, float]) -> None:
        from tqdm import tqdm

        if self._bar is None:
            self._bar = tqdm(total=total, initial=step - 1, unit="step", desc=self._stage, dynamic_ncols=True)
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
