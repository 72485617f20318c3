"""One trial inside its Ray process.

The ordinary training loop with a sink that reports validation scores and waits for leave to
continue.
"""

from __future__ import annotations

import dataclasses
import math
import os
import queue
import signal
import socket
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

from ray import tune

from cimage_dist.comm import Comm
from cimage_dist.config import Config, run_dir
from cimage_dist.data.ingest import open_graph
from cimage_dist.data.store import Graph
from cimage_dist.distributed.driver import launch
from cimage_dist.distributed.worker import STOP
from cimage_dist.errors import Interrupted, UserError
from cimage_dist.io import artifacts, checkpoint
from cimage_dist.io.artifacts import RunDir
from cimage_dist.io.mirror import write_mark
from cimage_dist.pipeline import stages
from cimage_dist.pipeline.evaluation import view_scores
from cimage_dist.train.progress import Progress
from cimage_dist.train.sink import LocalSink
from cimage_dist.tune.ledger import (
    Outcome,
    Trial,
    hand_over,
    objective,
    reports,
    trial_config,
    val_records,
    write_outcome,
)

_LOCK_PATIENCE_S = 120.0  # the processes of a killed sweep may need a moment to die
_POLL_S = 0.5


class TuneSink(LocalSink):
    """A run directory whose validation scores go to `exchange`; training continues when the sweep
    asks for the next one.

    So no trial runs ahead of a decision; one that is stopped takes a last step and saves.
    """

    def __init__(self, run: RunDir, cfg: Config, exchange: Exchange) -> None:
        super().__init__(run, cfg.run, catch_signals=False, lock_patience_s=_LOCK_PATIENCE_S)
        self.select, self.epochs, self.exchange = cfg.train.select, cfg.epochs, exchange
        self.scores: list[float] = []
        self.total = 1
        self.loop_began = 0.0

    def restore(self) -> checkpoint.Checkpoint | None:
        found = super().restore()
        self.scores = [record["score"] for record in val_records(self.run.root)]
        self.loop_began = time.perf_counter()
        return found

    def tick(
        self, step: int, total: int, metrics: dict[str, float], stage: str = "pretrain"
    ) -> None:
        self.total = total

    def log(self, kind: str, step: int, metrics: dict[str, Any]) -> None:
        super().log(kind, step, metrics)
        if kind != "val":
            return
        if not math.isfinite(metrics["score"]):
            raise UserError(f"The validation score at step {step} is not finite.")
        self.scores.append(metrics["score"])
        self.exchange.report(
            {
                "score": objective(self.scores, self.select),
                "epoch": self.epochs * step / self.total,
                "step": step,
            }
        )

    def stop_signal(self) -> int:
        return signal.SIGTERM if self.exchange.is_stopped else 0


class Exchange:
    """Between the training thread and the Ray methods of its process."""

    def __init__(self) -> None:
        self._reports: queue.Queue[dict[str, Any]] = queue.Queue()
        self._leave = threading.Semaphore(0)
        self.is_stopped = False

    def report(self, values: dict[str, Any]) -> None:
        """From the training thread.

        Hand a result over and wait until the next one is asked for, or the trial is stopped.
        """
        self._reports.put(values)
        if not self.is_stopped:
            self._leave.acquire()

    def tell(self, values: dict[str, Any]) -> None:
        """The same without waiting."""
        self._reports.put(values)

    def go_on(self) -> None:
        self._leave.release()

    def take(self) -> dict[str, Any]:
        return self._reports.get()

    def stop(self) -> None:
        self.is_stopped = True
        self._leave.release()


class TrialProcess(tune.Trainable):
    """Runs trials one after the other.

    The process, its imports and its compiled loops serve them all.
    """

    _count = 0

    def setup(self, config: dict[str, Any]) -> None:
        TrialProcess._count += 1
        self.exchange = Exchange()
        job = Job(Path(config["root"]), config["trial"], TrialProcess._count == 1, time.time())
        self.thread = threading.Thread(target=_run, args=(job, self.exchange), daemon=True)
        self.is_parallel = bool(config["is_parallel"])
        self.run_files = RunDir(job.root / "trials" / job.trial)

    def step(self) -> dict[str, Any]:
        if self.thread.ident is None:
            self.thread.start()
        else:
            self.exchange.go_on()
        return self.exchange.take()

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.cleanup()
        self.setup(new_config)
        return True

    def cleanup(self) -> None:
        """A trial that is not over saves a checkpoint first."""
        self.exchange.stop()
        while self.thread.is_alive():
            if (
                self.is_parallel
            ):  # its workers look for this file; a run that is just starting removes it once
                write_mark(self.run_files.root, STOP, str(int(signal.SIGTERM)))
            self.thread.join(1.0)


class Job(NamedTuple):
    root: Path
    trial: str
    is_first: bool
    began: float


def _run(job: Job, exchange: Exchange) -> None:
    """The training thread: run the trial and write its outcome, whatever happens inside.

    A stopped one is recorded by the sweep.
    """
    folder = job.root / "trials" / job.trial
    try:
        outcome = _train(job, exchange)
    except Interrupted:
        return
    except Exception as error:  # the sweep continues; the reason is kept
        artifacts.write_text(folder / "failure.txt", traceback.format_exc())
        reason = (
            str(error)
            if isinstance(error, UserError)
            else f"{type(error).__name__}: {error} (failure.txt has the traceback)"
        )
        outcome = Outcome("failed", reason=reason)
    if exchange.is_stopped:
        return
    process = f"{socket.gethostname()}:{os.getpid()}"
    outcome = dataclasses.replace(
        outcome, began=job.began, ended=time.time(), process=process, is_first=job.is_first
    )
    write_outcome(folder, outcome)
    scored = (
        {}
        if outcome.score is None
        else {"score": outcome.score, "epoch": outcome.epochs, "step": outcome.steps}
    )
    exchange.tell(scored | {"done": True})


def _train(job: Job, exchange: Exchange) -> Outcome:
    trial = Trial(
        **artifacts.read_json(job.root / "trials" / job.trial / "trial.json", "the trial's record")
    )
    cfg = trial_config(job.root, trial)
    run = RunDir(run_dir(cfg))
    if trial.parent is not None:
        hand_over(job.root / "trials" / trial.parent, run.root, cfg.optim)
    graph = _graph(cfg)
    seconds = (
        _train_parallel(cfg, run, exchange)
        if cfg.resources.num_workers > 1
        else _train_here(cfg, graph, exchange)
    )
    scores = [record["score"] for record in val_records(run.root)]
    steps = int(artifacts.read_json(run.summary, "the run's summary")["steps"])
    views = view_scores(cfg, graph) if _wants_views(job.root) else None
    return Outcome(
        "done",
        objective(scores, cfg.train.select),
        cfg.epochs,
        steps,
        round(seconds, 3),
        views=views,
    )


def _train_here(cfg: Config, graph: Graph, exchange: Exchange) -> float:
    """The loop in this process.

    Returns its seconds. A stopped run is summarised too, so that it can be reported on, before
    Interrupted is raised again.
    """
    stop: Interrupted | None = None
    with stages.summarised(cfg, graph) as outcome:
        sink = TuneSink(outcome.run, cfg, exchange)
        with sink:
            try:
                stages.train(cfg, Comm(), sink, graph)
            except Interrupted as error:
                if error.step == 0:
                    raise  # nothing is saved yet
                stop = error
            seconds = time.perf_counter() - sink.loop_began
    if stop is not None:
        raise stop
    return seconds


def _wants_views(root: Path) -> bool:
    return bool(
        artifacts.read_json(root / "sweep.json", "the sweep's settings")["settings"]["views"]
    )


_kept: list[tuple[str, Graph]] = []


def _graph(cfg: Config) -> Graph:
    """The graph of the trial before where it is the same: opening checks its files' sums again."""
    name = str(cfg.data)
    if not _kept or _kept[0][0] != name:
        _kept[:] = [(name, open_graph(cfg.data))]
    return _kept[0][1]


def _train_parallel(cfg: Config, run: RunDir, exchange: Exchange) -> float:
    """A Ray Train run of several workers.

    Its validation scores are read from the run directory. Returns its seconds.
    """
    is_over = threading.Event()

    def follow() -> None:
        seen = 0
        while not is_over.wait(_POLL_S):
            found = reports(run.root, cfg.epochs, cfg.train.select)
            for report in found[seen:]:
                exchange.tell(report)
            seen = len(found)

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    began = time.perf_counter()
    try:
        launch(cfg, Progress(quiet=True))
    finally:
        is_over.set()
        follower.join()
    return time.perf_counter() - began
