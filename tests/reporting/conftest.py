"""A small finished run, and a browser where there is one."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


LOOKS = [(390, "dark"), (1280, "light")]


def looked_at(browser: Any, path: Path, width: int, scheme: str) -> set[str]:
    """Titles of the charts of a page, after checking that it is quiet, needs no network, and that every chart can be seen and read."""
    tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    said: list[str] = []
    asked: list[str] = []
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto(path.as_uri())
    tab.wait_for_selector("body[data-ready]")
    assert said == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    cards = tab.evaluate(
        """[...document.querySelectorAll("figure")].map(f => ({
            title: f.querySelector("h3").textContent, kind: f.dataset.kind, shapes: f.querySelectorAll(".shape").length, rows: f.querySelectorAll("tbody tr").length,
            width: f.getBoundingClientRect().width, height: f.querySelector(".plot").getBoundingClientRect().height,
            small: [...f.querySelectorAll("svg text")].filter(t => t.getBoundingClientRect().height > 0 && t.getBoundingClientRect().height < 8).length }))"""
    )
    for card in cards:
        assert card["rows" if card["kind"] == "table" else "shapes"] > 0, card
        assert card["height"] > 60 and 0 < card["width"] <= width and card["small"] == 0, card
    assert tab.evaluate("document.documentElement.scrollWidth") <= width, "nothing sticks out sideways"
    background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(int(v) for v in re.findall(r"\d+", background)[:3]) < 200) == (scheme == "dark")
    tab.close()
    return {card["title"] for card in cards}
