"""A small finished run."""

from __future__ import annotations

from pathlib import Path

import pytest

from cimage_dist.config_loading import load_config
from cimage_dist.pipeline import stages
from cimage_dist.pipeline.evaluation import evaluate_run
from cimage_dist.train.progress import Progress
from tests.conftest import small_sbm_settings

SETTINGS = [
    "model.num_factors=4",
    "model.factor_dim=4",
    "model.num_layers=1",
    "model.routing_iterations=2",
    "loss.factor_weight=0.5",
    "loss.cluster_weight=0.3",
    "cluster.init=selfkmeans",
    "cluster.init_epochs=2",
    "cluster.restarts=1",
    "ci.every_steps=4",
    "ci.block_size=8",
    "eval.few_labels=[2]",
    "eval.few_label_splits=2",
    "eval.probe_epochs=20",
    "train.epochs=12",
    "train.validate_every=4",
    "train.select=val",
    "data.holdout_edges=link",
    "run.log_every=2",
    "run.tensorboard=false",
]


@pytest.fixture(scope="session")
def finished_run(store_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "run"
    cfg = load_config(overrides=[*small_sbm_settings(store_dir), *SETTINGS, f"run.dir={folder}"])
    stages.pretrain(cfg, Progress(quiet=True))
    evaluate_run(cfg)
    return folder
