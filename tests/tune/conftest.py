"""A small sweep without Ray: a base config on disk, a space, and trials whose outcomes are made
up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from cimage_dist.config_loading import to_yaml
from cimage_dist.tune.ledger import Ledger, Outcome, Trial, write_outcome
from cimage_dist.tune.spec import Sweep, load_sweep

BASE = """
train: {epochs: 20, validate_every: 5, select: val}
optim: {lr_max: 0.01, lr_min: 0.001}
"""
SPACE = """
search: random
trials: 6
top: 2
fresh_seeds: 2
space:
  model.num_factors: [4, 8, 16]
  optim.lr_max: {low: 2.0e-3, high: 0.1, log: true}
  ci.partition: [ci, random]
"""
MakeSweep = Callable[..., Sweep]


@pytest.fixture(scope="session")
def make_sweep(tmp_path_factory: pytest.TempPathFactory) -> MakeSweep:
    """`make_sweep(space_text, *overrides)`; the same arguments give the same sweep."""
    root = tmp_path_factory.mktemp("spaces")
    (root / "base.yaml").write_text(BASE)

    @functools.cache
    def make(space: str = SPACE, *overrides: str) -> Sweep:
        (root / "space.yaml").write_text(space)
        return load_sweep([str(root / "space.yaml"), str(root / "base.yaml")], overrides)

    return make


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "sweep")


def write_base(sweep: Sweep, ledger: Ledger) -> None:
    ledger.root.mkdir(parents=True, exist_ok=True)
    (ledger.root / "base.yaml").write_text(to_yaml(sweep.base))


def score_of(trial: Trial) -> float:
    """Best near lr_max 0.02; the seed matters little."""
    return 90.0 - 1000 * abs(trial.values["optim.lr_max"] - 0.02) + 0.01 * trial.seed


def end(ledger: Ledger, trial: Trial, status: str = "done", score: float | None = None) -> None:
    """What the trial's process would write."""
    value = score_of(trial) if score is None and status != "failed" else score
    epochs = float(trial.epochs or 20)
    write_outcome(
        ledger.folder(trial.id),
        Outcome(
            status, value, epochs, int(epochs), ended=float(len(ledger.outcomes)), reason="made up"
        ),
    )
    ledger.reread(trial.id)
