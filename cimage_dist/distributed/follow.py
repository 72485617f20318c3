"""What the driver does while workers train: progress from their metrics, signals to them."""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, cast

from ray.train.torch import TorchTrainer

from cimage_dist.errors import UserError
from cimage_dist.io import mirror
from cimage_dist.io.artifacts import RunDir, read_metrics
from cimage_dist.train.loop import SHOWN
from cimage_dist.train.progress import Progress, estimate

STOP = "STOP"  # the mark by which the driver asks the workers to save and stop
_PULL_EVERY = 10  # looks at the metrics: of a run on object storage, whose workers are elsewhere


class Follower(threading.Thread):
    """Shows on the driver what rank 0 writes to metrics.jsonl."""

    def __init__(self, run: RunDir, progress: Progress, log_every: int) -> None:
        super().__init__(daemon=True)
        self.files, self.progress, self.log_every = run, progress, log_every
        self._first: int | None = None
        self._is_told = False
        self.is_done = threading.Event()

    def run(self) -> None:
        seen = len(read_metrics(self.files.metrics))
        is_last = False
        for look in itertools.count(1):
            if is_last:
                break
            is_last = self.is_done.wait(0.5)
            if look % _PULL_EVERY == 0:
                with contextlib.suppress(UserError):
                    mirror.refresh(self.files.root)
            records = read_metrics(self.files.metrics)
            for record in records[seen:]:
                if "described" in record:
                    self.progress.note(f"{record['kind']}: {record['described']}")
                elif record["kind"] == "train":
                    self._show(record)
            seen = len(records)
        self.progress.close()

    def _show(self, record: dict[str, Any]) -> None:
        step, total = record["step"], record["total_steps"]
        terms = {name: record[name] for name in SHOWN if name in record}
        self.progress.update(step, total, terms)
        if self._first is None:
            self._first = step  # a start may be in these seconds
        elif not self._is_told and self._first < step < total:
            self._is_told = True
            each = record["seconds"] / min(step - self._first, self.log_every)
            self.progress.note(estimate(total, each, each * (total - step)))


@contextlib.contextmanager
def _signals_to(run: RunDir) -> Iterator[None]:
    """The first SIGINT or SIGTERM asks the workers to save and stop; a second SIGINT does not
    wait.
    """
    mirror.remove_mark(run.root, STOP)
    is_asked = False
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal is_asked
        if is_asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        is_asked = True
        mirror.write_mark(run.root, STOP, str(number))

    old = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
        mirror.remove_mark(run.root, STOP)


def _in_a_thread(trainer: TorchTrainer) -> dict[str, Any]:
    """What rank 0 returned. In the main thread Ray would take SIGINT for itself and kill the
    workers without a checkpoint.
    """
    found: list[Any] = []

    def fit() -> None:
        try:
            found.append(cast(Any, trainer.fit()).return_value)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=fit, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.5)
    if isinstance(found[0], BaseException):
        raise found[0]
    return cast(dict[str, Any], found[0])
