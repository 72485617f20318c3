"""A small finished run, and a browser where there is one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cimage_dist import stages
from cimage_dist.config_loading import load_config
from cimage_dist.evaluation import evaluate_run
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


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    path = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("no Chromium on this machine")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()
