"""The sweep's record on disk, and its trials as ordinary runs.

Each trial is a run directory with trial.json (what was asked) and, once over, outcome.json (what
came of it). Both are written whole or not at all, the first before the trial starts and the second
when it is over, so that killing everything at any moment leaves finished trials and trials to
continue. Nothing else holds state: what to try next follows from these files.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import statistics
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from cimage_dist.config import Config, OptimConfig
from cimage_dist.config_loading import load_config
from cimage_dist.io import artifacts, checkpoint
from cimage_dist.io.artifacts import RunDir
from cimage_dist.tune import Point, dotlist

Stage = Literal["search", "fresh"]
STAGES: tuple[Stage, ...] = get_args(Stage)

_BEST_FIRST = ("done", "stopped", "failed", "running")


@dataclass(frozen=True)
class Trial:
    """One run of one point."""

    id: str
    point: int
    values: Point
    seed: int
    stage: Stage = "search"
    generation: int = 0  # of population-based training
    parent: str | None = None  # whose weights it starts from
    epochs: int | None = None  # where a trial is a part of a run


@dataclass(frozen=True)
class Outcome:
    """How a trial ended. `score` is the validation score of the checkpoint that would be embedded,
    in percent."""

    status: Literal["done", "stopped", "failed"]
    score: float | None = None
    epochs: float = 0.0
    steps: int = 0
    seconds: float = 0.0  # inside the training loop
    began: float = 0.0  # seconds since 1970
    ended: float = 0.0
    process: str = ""
    is_first: bool = False  # of its process
    reason: str = ""
    views: dict[str, float] | None = None


class Ledger:
    """All trials of a sweep directory, read once and kept up to date by its only writer."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.trials: dict[str, Trial] = {}
        self.outcomes: dict[str, Outcome] = {}
        for path in sorted((root / "trials").glob("*/trial.json")):
            trial = Trial(**artifacts.read_json(path, "the trial's record"))
            self.trials[trial.id] = trial
            self.reread(trial.id)

    def folder(self, trial: str) -> Path:
        return self.root / "trials" / trial

    def add(self, trial: Trial) -> None:
        artifacts.write_json(self.folder(trial.id) / "trial.json", dataclasses.asdict(trial))
        self.trials[trial.id] = trial

    def reread(self, trial: str) -> Outcome | None:
        """What the trial's process has written, if it has."""
        found = read_outcome(self.folder(trial))
        if found is not None:
            self.outcomes[trial] = found
        return found

    def finish(self, trial: str, outcome: Outcome) -> None:
        """For what the process cannot know.

        That it is stopped, or that it died. What it has written itself stays.
        """
        if self.reread(trial) is None:
            write_outcome(self.folder(trial), outcome)
            self.outcomes[trial] = outcome

    def of(self, stage: Stage) -> list[Trial]:
        return [trial for trial in self.trials.values() if trial.stage == stage]

    def unfinished(self, stage: Stage) -> list[Trial]:
        return [trial for trial in self.of(stage) if trial.id not in self.outcomes]

    def points(self) -> dict[int, Point]:
        """The settings of every point; of population-based training the newest."""
        return {t.point: t.values for t in sorted(self.of("search"), key=lambda t: t.generation)}

    @property
    def clock(self) -> float:
        """Seconds the sweep has been at work, over all its commands."""
        path = self.root / "clock.json"
        if not path.is_file():
            return 0.0
        return float(artifacts.read_json(path, "the sweep's clock")["seconds"])

    def set_clock(self, seconds: float) -> None:
        artifacts.write_json(self.root / "clock.json", {"seconds": round(seconds, 1)})


@dataclass(frozen=True)
class Standing:
    """A point with what its trials of one stage say together."""

    point: int
    values: Point
    status: Literal["done", "stopped", "failed", "running"]
    scores: tuple[float, ...]
    epochs: float

    @property
    def mean(self) -> float | None:
        return spread(self.scores)["mean"] if self.scores else None

    @property
    def std(self) -> float:
        return spread(self.scores)["std"] if self.scores else 0.0


def spread(scores: Sequence[float]) -> dict[str, float]:
    """Mean and sample standard deviation, 0 for a single seed."""
    std = statistics.stdev(scores) if len(scores) > 1 else 0.0
    return {"mean": statistics.fmean(scores), "std": std}


def standings(ledger: Ledger, stage: Stage) -> list[Standing]:
    """Every point of a stage, best first.

    Whole ones by mean score, then stopped, failed and running ones.
    """
    groups: dict[int, list[Trial]] = {}
    for trial in ledger.of(stage):
        groups.setdefault(trial.point, []).append(trial)
    rows = []
    for point, trials in groups.items():
        newest = max(t.generation for t in trials)
        trials = [t for t in trials if t.generation == newest]
        found = [ledger.outcomes.get(t.id) for t in trials]
        states = {o.status if o else "running" for o in found}
        status: Any = next(name for name in reversed(_BEST_FIRST) if name in states)
        scores = tuple(o.score for o in found if o and o.score is not None)
        epochs = min((o.epochs for o in found if o), default=0.0)
        rows.append(Standing(point, trials[0].values, status, scores, epochs))

    def place(row: Standing) -> tuple[int, float, int]:
        return _BEST_FIRST.index(row.status), 1e9 if row.mean is None else -row.mean, row.point

    return sorted(rows, key=place)


def read_outcome(folder: Path) -> Outcome | None:
    path = folder / "outcome.json"
    return Outcome(**artifacts.read_json(path, "the trial's outcome")) if path.is_file() else None


def write_outcome(folder: Path, outcome: Outcome) -> None:
    artifacts.write_json(folder / "outcome.json", dataclasses.asdict(outcome))


def trial_metrics(folder: Path) -> list[dict[str, Any]]:
    return artifacts.read_metrics(RunDir(folder).metrics, skip_damaged=True)


def val_records(folder: Path) -> list[dict[str, Any]]:
    return [record for record in trial_metrics(folder) if record["kind"] == "val"]


def locked(root: Path) -> AbstractContextManager[None]:
    """One command at a time works on a sweep directory."""
    busy = (
        f"Another command is running the sweep in {root}. Wait for it, or choose another sweep.dir."
    )
    return artifacts.locked(root / ".lock", patience_s=0.0, busy=busy)


def trial_config(root: Path, trial: Trial) -> Config:
    """The sweep's base config with the trial's values, seed and directory.

    A trial that is a part of a run follows the learning rate of the whole run.
    """
    folder = (root / "trials" / trial.id).resolve()
    own: dict[str, Any] = {"run.seed": trial.seed, "run.dir": str(folder)}
    if trial.epochs is not None:
        base = load_config(root / "base.yaml")
        own["train.epochs"] = trial.epochs
        own["optim.schedule_epochs"] = base.optim.schedule_epochs or base.epochs
    return load_config(root / "base.yaml", overrides=dotlist(trial.values | own))


def objective(scores: Sequence[float], select: str) -> float:
    """The validation score of the checkpoint that would be embedded.

    The best with train.select=val, else the last.
    """
    return max(scores) if select == "val" else scores[-1]


def epochs_of(base: Config, trial: Trial) -> int:
    """How long a trial trains, without loading its config."""
    return int(trial.epochs or trial.values.get("train.epochs") or base.epochs)


def reports(folder: Path, epochs: int, select: str) -> list[dict[str, Any]]:
    """What a run has reported so far: the objective and the epoch at every validation."""
    records = trial_metrics(folder)
    totals = [record["total_steps"] for record in records if record["kind"] == "train"]
    scored = [record for record in records if record["kind"] == "val"] if totals else []
    scores = [record["score"] for record in scored]
    found = []
    for i, record in enumerate(scored, 1):
        score, step = objective(scores[:i], select), record["step"]
        found.append({"score": score, "epoch": epochs * step / totals[-1], "step": step})
    return found


def hand_over(source: Path, target: Path, optim: OptimConfig) -> None:
    """Copy the newest checkpoint of `source`, the best one, its pseudo-labels and its records into
    `target`; once.

    The checkpoint carries the optimiser's settings, so they are replaced by those of `optim`.
    """
    old, new, done = RunDir(source), RunDir(target), target / "handover.json"
    if done.is_file():
        return
    saved = checkpoint.load_selected(old.checkpoints, "last")
    best = checkpoint.load_selected(old.checkpoints, "val")
    for folder in sorted(source.iterdir()):
        if folder.is_dir() and (folder / artifacts.MANIFEST).is_file() and folder != old.embeddings:
            with artifacts.committed_dir(target / folder.name) as tmp:
                shutil.copytree(folder, tmp, dirs_exist_ok=True)
    if old.metrics.is_file():
        artifacts.write_bytes(new.metrics, old.metrics.read_bytes())
    checkpoint.save(new.checkpoints, best.step, best.tensors, best.meta)
    checkpoint.point(new.checkpoints, "BEST", best.step)
    checkpoint.save(new.checkpoints, saved.step, saved.tensors, _with_settings(saved.meta, optim))
    artifacts.write_json(done, {"from": source.name, "step": saved.step})


def _with_settings(meta: dict[str, Any], optim: OptimConfig) -> dict[str, Any]:
    """The cosine's place in its period stays; its ends are the new ones.

    Without restarts the rate is a function of the step, which training sets when it continues.
    """
    count = len(meta["scheduler"]["base_lrs"])
    schedule = meta["scheduler"] | {"base_lrs": [optim.lr_max] * count}
    fixed = {"initial_lr": optim.lr_max, "weight_decay": optim.weight_decay}
    if optim.schedule == "cosine":
        groups = [group | fixed for group in meta["optimizer"]]
        return meta | {"scheduler": schedule, "optimizer": groups}
    schedule["eta_min"] = optim.lr_min
    share = (1 + math.cos(math.pi * schedule["T_cur"] / schedule["T_i"])) / 2
    now = optim.lr_min + (optim.lr_max - optim.lr_min) * share
    groups = [group | fixed | {"lr": now} for group in meta["optimizer"]]
    return meta | {"scheduler": schedule | {"_last_lr": [now] * len(groups)}, "optimizer": groups}
