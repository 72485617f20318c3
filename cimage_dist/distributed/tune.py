"""Ray Tune around a sweep: it places trials on the cluster, reuses their processes and decides whom
to stop.

What to try and what has been tried is ours, on disk (cimage_dist.tune). Tune's own record is
written every few seconds and at its end, so a
killed driver loses what ended since and its restored searchers and schedulers forget it; here a new
Tune run is shown all that came before.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, MedianStoppingRule, TrialScheduler
from ray.tune.search import Searcher

from cimage_dist.config import Config
from cimage_dist.distributed.driver import absolute
from cimage_dist.distributed.session import start_ray
from cimage_dist.distributed.tune_trial import TrialProcess
from cimage_dist.errors import Interrupted
from cimage_dist.tune.ledger import (
    Ledger,
    Outcome,
    Trial,
    epochs_of,
    locked,
    reports,
    trial_metrics,
)
from cimage_dist.tune.plan import Plan
from cimage_dist.tune.results import Board, finish, write_pages
from cimage_dist.tune.spec import Sweep, prepare

_PAGE_EVERY_S, _LOOK_EVERY_S = 10.0, 2.0
_NO_LIMIT = str(10**6)
# Tune neither logs, nor prints, nor saves on its own, nor moves into other directories: run
# directories hold it all.
_QUIET = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "86400",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}


class Steward:
    """What Tune's searcher, scheduler and callback share.

    The plan, the ledger, the board and the clock.
    """

    def __init__(self, sweep: Sweep, ledger: Ledger, board: Board) -> None:
        self.sweep, self.ledger, self.board = sweep, ledger, board
        self.plan = Plan(sweep, ledger)
        self.names: dict[str, str] = {}  # Tune's trial ids -> ours
        self._before, self._began, self._page = ledger.clock, time.monotonic(), time.monotonic()

    @property
    def elapsed(self) -> float:
        return self._before + time.monotonic() - self._began

    def ended(self, name: str) -> None:
        outcome = self.ledger.reread(name)
        if outcome is None:
            return
        self.board.ended(self.ledger.trials[name], outcome)
        self.ledger.set_clock(self.elapsed)
        if time.monotonic() - self._page > _PAGE_EVERY_S:
            write_pages(self.sweep, self.ledger)
            self._page = time.monotonic()


class PlanSearcher(Searcher):
    """Hands the plan's trials to Tune, as many at a time as `room` says when it is asked: the
    search then knows all that ended, and follows a cluster that grows or shrinks.
    """

    def __init__(self, steward: Steward, room: Callable[[], int]) -> None:
        super().__init__(metric="score", mode="max")
        self.steward, self.room = steward, room

    def suggest(self, trial_id: str) -> Any:
        under_way = self.steward.plan.running - self.steward.ledger.outcomes.keys()
        if len(under_way) >= self.room():
            return None
        found = self.steward.plan.next(self.steward.elapsed)
        if found is None:
            return Searcher.FINISHED
        if found == "wait":
            return None
        self.steward.names[trial_id] = found.id
        is_parallel = self.steward.sweep.base.resources.num_workers > 1
        return {
            "root": str(self.steward.ledger.root),
            "trial": found.id,
            "is_parallel": is_parallel,
        }

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        return None

    def save(self, checkpoint_path: str) -> None:
        return None

    def restore(self, checkpoint_path: str) -> None:
        return None


class Past:
    """A trial of an earlier command, as a stopping rule sees it."""

    def __init__(self, trial_id: str) -> None:
        self.trial_id = trial_id


class Judge(FIFOScheduler):
    """One of Tune's stopping rules, shown first what earlier commands saw.

    Trials on fresh seeds are never stopped.
    """

    def __init__(self, steward: Steward, rule: Any) -> None:
        super().__init__()
        self.steward, self.rule = steward, rule
        ledger = steward.ledger
        for trial in ledger.of("search"):
            outcome = ledger.outcomes.get(trial.id)
            if outcome is not None and outcome.status != "failed":
                self._show(Past(trial.id), trial, is_over=True)

    def _show(self, seen: Any, trial: Trial, is_over: bool = False) -> None:
        """Earlier reports of a trial.

        What the rule answers was heeded, or is asked again at the next report.
        """
        self.rule.on_trial_add(None, seen)
        base = self.steward.sweep.base
        records = reports(
            self.steward.ledger.folder(trial.id), epochs_of(base, trial), base.train.select
        )
        for record in records:
            self.rule.on_trial_result(None, seen, record)
        if is_over and records:
            self.rule.on_trial_complete(None, seen, records[-1])

    def _of(self, trial: Any) -> Trial:
        return self.steward.ledger.trials[self.steward.names[trial.trial_id]]

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        own = self._of(trial)
        if own.stage == "search":
            self._show(trial, own)

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        own = self._of(trial)
        if (
            own.stage != "search"
            or "score" not in result
            or result["epoch"] >= epochs_of(self.steward.sweep.base, own)
        ):
            return TrialScheduler.CONTINUE
        decision: str = self.rule.on_trial_result(tune_controller, trial, result)
        if decision == TrialScheduler.STOP:
            scheduler = self.steward.sweep.settings.scheduler
            reason = f"stopped by {scheduler} after {result['epoch']:g} epochs"
            ledger = self.steward.ledger
            spent = sum(
                record.get("seconds", 0.0)
                for record in trial_metrics(ledger.folder(own.id))
                if record["kind"] == "train"
            )
            ledger.finish(
                own.id,
                Outcome(
                    "stopped",
                    result["score"],
                    result["epoch"],
                    result["step"],
                    round(spent, 3),
                    ended=time.time(),
                    reason=reason,
                ),
            )
        return decision

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        if self._of(trial).stage == "search" and "score" in result:
            self.rule.on_trial_complete(tune_controller, trial, result)


def make_rule(sweep: Sweep) -> Any:
    """ASHA or median stopping over epochs, or None."""
    settings, epochs = sweep.settings, sweep.base.epochs
    grace = max(1, round(settings.grace * epochs))
    common: dict[str, Any] = {
        "time_attr": "epoch",
        "metric": "score",
        "mode": "max",
        "grace_period": grace,
    }
    if settings.scheduler == "asha":
        # Beyond the last epoch, where there is nothing to stop.
        return ASHAScheduler(
            max_t=max(epochs, grace) + 1, reduction_factor=settings.reduction, **common
        )
    if settings.scheduler == "median":
        # An endless time slice: by default the rule would pause trials, whose threads cannot be
        # moved.
        endless: Any = float("inf")
        return MedianStoppingRule(min_samples_required=3, min_time_slice=endless, **common)
    return None


class Reporter(tune.Callback):
    """Keeps the board and the ledger up to date."""

    def __init__(self, steward: Steward) -> None:
        self.steward = steward

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self.steward.board.started(self.steward.ledger.trials[self.steward.names[trial.trial_id]])

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        self.steward.board.reported(self.steward.names[trial.trial_id], result)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self.steward.ended(self.steward.names[trial.trial_id])

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        name = self.steward.names[trial.trial_id]
        lines = (
            Path(trial.error_file).read_text().strip().splitlines()
            if trial.error_file and Path(trial.error_file).is_file()
            else []
        )
        reason = (
            f"the trial's process died: {lines[-1].strip()[:300]}"
            if lines
            else "the trial's process died"
        )
        self.steward.ledger.finish(name, Outcome("failed", ended=time.time(), reason=reason))
        self.steward.ended(name)


def sweep_on_ray(sweep: Sweep, cfg: Config, root: Path, quiet: bool = False) -> dict[str, Any]:
    """Run a sweep into `root`, or continue it.

    `cfg` is the given config with its paths on storage. Returns the summary.
    """
    with locked(root):
        ledger = Ledger(root.resolve())
        with Board(sweep, ledger, quiet) as board:
            prepare(sweep, absolute(cfg), ledger, board.note)
            steward = Steward(sweep, ledger, board)
            if _has_work(steward):
                board.note(
                    f"sweep {sweep.name} in {root}: {len(ledger.outcomes)} trials over, "
                    f"{len(ledger.unfinished('search'))} to continue"
                )
                _run(steward, absolute(cfg))
        return finish(sweep, ledger, board.note)


def _has_work(steward: Steward) -> bool:
    """Whether the plan has another trial.

    Asking makes it, which is what the run does next anyway.
    """
    found = steward.plan.next(steward.elapsed)
    steward.plan.running.clear()
    return found is not None


def _run(steward: Steward, cfg: Config) -> None:
    os.environ.update(_QUIET)
    logging.getLogger("ray.tune").setLevel(logging.ERROR)
    start_ray(cfg)
    rule = make_rule(steward.sweep)
    os.environ["TUNE_MAX_PENDING_TRIALS_PG"] = _NO_LIMIT  # the searcher has its own
    storage = steward.ledger.root / ".tune"
    tuner = tune.Tuner(
        tune.with_resources(TrialProcess, _resources(steward.sweep, cfg)),
        tune_config=tune.TuneConfig(
            num_samples=-1,
            search_alg=PlanSearcher(steward, Room(steward.sweep, cfg)),
            scheduler=FIFOScheduler() if rule is None else Judge(steward, rule),
            reuse_actors=cfg.resources.num_workers
            == 1,  # a Train run costs more than a new process, and leaves its traces in one
        ),
        run_config=tune.RunConfig(
            name=uuid.uuid4().hex[:8],
            storage_path=str(storage),
            callbacks=[Reporter(steward)],
            checkpoint_config=tune.CheckpointConfig(
                checkpoint_frequency=0, checkpoint_at_end=False
            ),  # runs have their own
            verbose=0,
        ),
    )
    try:
        with _signals() as caught:
            tuner.fit()
    finally:
        shutil.rmtree(storage, ignore_errors=True)
    if caught:
        write_pages(steward.sweep, steward.ledger)
        raise Interrupted(caught[0], 0)


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM end Tune in good order (by the signal it listens to), so that running
    trials save; which one came is returned."""
    caught: list[int] = []

    def stop(number: int, frame: Any) -> None:
        if (caught and number == signal.SIGINT) or signal.getsignal(
            signal.SIGUSR1
        ) == signal.SIG_DFL:
            # a second Ctrl-C does not wait; nor does one that comes before Tune listens
            raise KeyboardInterrupt
        caught.append(number)
        os.kill(os.getpid(), signal.SIGUSR1)

    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"
    old = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _gpus(sweep: Sweep, cfg: Config) -> float:
    if cfg.resources.device == "cpu" or ray.cluster_resources().get("GPU", 0) == 0:
        return 0.0
    return 1.0 if sweep.settings.gpus_per_trial is None else sweep.settings.gpus_per_trial


def _resources(sweep: Sweep, cfg: Config) -> Any:
    """Of a trial's process.

    One that starts a Train run only waits: a CPU for it would be taken from the workers, and none
    at all is refused.
    """
    if cfg.resources.num_workers > 1:
        return tune.PlacementGroupFactory([{"memory": 2**20}])
    return {"cpu": cfg.resources.cpus_per_worker, "gpu": _gpus(sweep, cfg)}


class Room:
    """Trials at a time: as asked, else what the cluster's CPUs and GPUs hold now."""

    def __init__(self, sweep: Sweep, cfg: Config) -> None:
        self.sweep, self.cfg = sweep, cfg
        self._found, self._looked = 0, -math.inf

    def __call__(self) -> int:
        if self.sweep.settings.concurrent is not None:
            return self.sweep.settings.concurrent
        now = time.monotonic()
        if now - self._looked > _LOOK_EVERY_S:
            self._found, self._looked = self._look(), now
        return self._found

    def _look(self) -> int:
        have, res = ray.cluster_resources(), self.cfg.resources
        fitting = have.get("CPU", 0) // (res.num_workers * res.cpus_per_worker)
        if gpus := _gpus(self.sweep, self.cfg):
            each = gpus if res.num_workers == 1 else res.num_workers
            fitting = min(fitting, have["GPU"] // each)
        return max(1, int(fitting))
