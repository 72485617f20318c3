"""A project folder with small tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import small_sbm_settings

MODEL = [
    "model.num_factors=4",
    "model.factor_dim=4",
    "model.num_layers=1",
    "model.routing_iterations=2",
    "eval.probe_epochs=20",
    "train.epochs=4",
]


@pytest.fixture
def project(tmp_path: Path, store_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a config and a table of two rows and two seeds on it."""
    monkeypatch.chdir(tmp_path)
    settings: dict[str, Any] = {}
    for text in [*small_sbm_settings(store_dir), *MODEL]:
        key, _, value = text.partition("=")
        *path, name = key.split(".")
        section = settings
        for part in path:
            section = section.setdefault(part, {})
        section[name] = json.loads(value) if value.isdigit() else value
    for folder in ("configs/node", "experiments/tables", "docs"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "configs/node/blocks.yaml").write_text(json.dumps(settings))
    write(tmp_path)
    (tmp_path / "docs/RESULTS.md").write_text(
        "# Results\n\n<!-- bench: begin (python -m experiments --render) -->\n<!-- bench: end "
        "-->\nafter\n"
    )
    return tmp_path


def write(project: Path, name: str = "small", **changes: Any) -> Path:
    body = {
        "title": "A small table",
        "config": "configs/node/{dataset}.yaml",
        "seeds": {"blocks": 2},
        "rows": {"shipped": [], "with clusters": ["loss.cluster_weight=0.2"]},
        "scores": {"node.test": "test"},
        "against": "shipped",
        "controls": True,
        "published": {"shipped": {"blocks": 12.34}},
    }
    path = project / "experiments" / "tables" / f"{name}.yaml"
    path.write_text(
        json.dumps({key: value for key, value in (body | changes).items() if value is not None})
    )
    return path
