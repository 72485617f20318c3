"""A trial as an ordinary run: its config, and the one number the search looks at."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cimage_dist.config import Config
from cimage_dist.config_loading import load_config
from cimage_dist.tune.ledger import Trial, read_records
from cimage_dist.tune.space import dotlist


def trial_config(root: Path, trial: Trial) -> Config:
    """The sweep's base config with the trial's values, seed and directory.

    A trial that is a part of a run follows the learning rate of the whole run.
    """
    folder = (root / "trials" / trial.id).resolve()
    own: dict[str, Any] = {"run.seed": trial.seed, "run.dir": str(folder)}
    if trial.epochs is not None:
        base = load_config(root / "base.yaml")
        own["train.epochs"] = trial.epochs
        own["optim.schedule_epochs"] = base.optim.schedule_epochs or base.train.epochs
    return load_config(root / "base.yaml", overrides=dotlist(trial.values | own))


def objective(scores: Sequence[float], select: str) -> float:
    """The validation score of the checkpoint that would be embedded: the best with
    train.select=val, else the last.
    """
    return max(scores) if select == "val" else scores[-1]


def epochs_of(base: Config, trial: Trial) -> int:
    """How long a trial trains, without loading its config."""
    return int(trial.epochs or trial.values.get("train.epochs", base.train.epochs))


def reports(folder: Path, epochs: int, select: str) -> list[dict[str, Any]]:
    """What a run has reported so far: the objective and the epoch at every validation."""
    records = read_records(folder)
    totals = [record["total_steps"] for record in records if record["kind"] == "train"]
    scored = [record for record in records if record["kind"] == "val"] if totals else []
    scores = [record["score"] for record in scored]
    return [
        {
            "score": objective(scores[: i + 1], select),
            "epoch": epochs * record["step"] / totals[-1],
            "step": record["step"],
        }
        for i, record in enumerate(scored)
    ]
