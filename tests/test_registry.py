"""A clusterer and a loss term of one's own: one file each, registered from outside the package."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cimage_dist import (
    Clusterer,
    Graph,
    LossInputs,
    UserError,
    load_config,
    register_clusterer,
    register_loss,
    registry,
)
from cimage_dist.comm import Comm
from cimage_dist.config import describe_objective, fingerprint
from cimage_dist.train.loop import worker
from cimage_dist.train.sink import MemorySink
from tests.conftest import small_sbm_settings

SHORT = ["train.epochs=3", "run.log_every=1", "model.num_factors=4", "model.factor_dim=4"]


@dataclass(frozen=True)
class Settings:
    column: int


def by_column(x: Any, topology: Any, count: int, settings: Settings, *_: Any) -> tuple[Tensor, Any]:
    """Nodes in as many groups of equal size by one feature."""
    dense = x if isinstance(x, Tensor) else x.to_dense()
    rank = dense[:, settings.column].argsort().argsort()
    return rank * count // topology.num_nodes, torch.ones(topology.num_nodes, dtype=torch.float64)


def length(seen: LossInputs) -> Tensor:
    """Mean square of the factors: this rank's sum over the global count."""
    square = seen.z.flatten(1).square().mean(1)
    weighted = square if seen.weight is None else square * seen.weight
    return weighted.sum() / seen.total


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_CLUSTERERS", {})
    monkeypatch.setattr(registry, "_LOSSES", {})


def test_a_clusterer_from_outside(store_dir: Path, small_sbm: Graph) -> None:
    settings = [*small_sbm_settings(store_dir), *SHORT, "cluster.init=bycolumn"]
    with pytest.raises(UserError, match=r"cluster\.init must be one of propagated, .*bycolumn"):
        load_config(overrides=settings)
    register_clusterer("bycolumn", Clusterer(by_column, lambda *_: Settings(3)))
    trainer = worker(load_config(overrides=settings), Comm(), MemorySink(), small_sbm)
    assert trainer.total_steps == 3


def test_a_loss_from_outside(store_dir: Path, small_sbm: Graph) -> None:
    settings = [*small_sbm_settings(store_dir), *SHORT]
    with pytest.raises(UserError, match=r"loss\.extra\.length is not registered"):
        load_config(overrides=[*settings, "loss.extra.length=0.5"])
    register_loss("length", length)
    cfg = load_config(overrides=[*settings, "loss.extra.length=0.5"])
    assert describe_objective(cfg).endswith(" + 0.5 length")
    assert fingerprint(cfg) != fingerprint(load_config(overrides=settings))
    sink = MemorySink()
    worker(cfg, Comm(), sink, small_sbm)
    records = [record for record in sink.records if record["kind"] == "train"]
    assert all(record["length"] > 0 for record in records)


@pytest.mark.parametrize("name", ["rdgae", "auto", "two words"])
def test_taken_names(name: str) -> None:
    with pytest.raises(ValueError, match="taken"):
        register_clusterer(name, Clusterer(by_column, lambda *_: Settings(0)))
    with pytest.raises(ValueError, match="taken"):
        register_loss("factor", length)
