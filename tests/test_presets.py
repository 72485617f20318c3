"""The paper's presets hold the appendix's numbers and do not lean on defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from cimage_dist.config import Config, fingerprint
from cimage_dist.config_loading import known_keys, load_config
from cimage_dist.errors import UserError

ROOT = Path(__file__).parents[1]
PRESETS = sorted((ROOT / "configs" / "paper").rglob("*.yaml"))
PLAIN = sorted(
    path for name in ("node", "link", "own") for path in (ROOT / "configs" / name).glob("*.yaml")
)
# K, factor dim., lambda1, encoder hidden, structure hidden, factor hidden, lambda2
APPENDIX = {
    "node/cora": (16, 32, 0.86, 512, 32, 256, 0.4),
    "node/citeseer": (16, 32, 0.77, 512, 32, 256, 0.4),
    "node/pubmed": (16, 32, 0.63, 512, 32, 256, 0.2),
    "node/photo": (32, 16, 0.70, 512, 32, 256, 0.1),
    "node/computers": (32, 16, 0.32, 512, 64, 256, 0.2),
    "node/wikics": (32, 16, 0.60, 512, 32, 256, 0.1),
    "node/arxiv": (16, 32, 0.82, 256, 128, 128, 0.1),
    "link/cora": (16, 32, 0.138, 512, 32, 256, 0.1),
    "link/citeseer": (32, 32, 0.61, 512, 64, 256, 0.2),
    "link/pubmed": (32, 32, 0.25, 512, 32, 256, 0.2),
}
# Without effect in these files: parts that are off, how a thing is computed, what is only logged.
IDLE = {
    "model.routing_backend",
    "loss.extra",
    "loss.redundancy_decorrelation",
    "cluster.labels_path",
    "cluster.init_epochs",
    "cluster.restarts",
    "cluster.bank_size",
    "ci.diagnose_every",
    "train.steps",  # train.epochs says how long
    "optim.schedule_epochs",  # set by sweeps of a population alone
}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT / "configs" / "paper").with_suffix(""))


def stated(path: Path) -> set[str]:
    body = yaml.safe_load(path.read_text())
    return {f"{section}.{key}" for section, keys in body.items() for key in keys}


def test_there_is_one_for_every_column_of_the_appendix():
    assert {name_of(path) for path in PRESETS} == set(APPENDIX)


@pytest.mark.parametrize("path", PRESETS, ids=name_of)
def test_the_numbers_of_the_appendix(path):
    cfg = load_config(path)
    model, loss = cfg.model, cfg.loss
    found = (
        model.num_factors,
        model.factor_dim,
        loss.factor_weight,
        model.hidden,
        model.structure_hidden,
        model.factor_hidden,
        loss.cluster_weight,
    )
    assert found == APPENDIX[name_of(path)] and cfg.mask.start_rate == 0.7
    assert cfg.cluster.init == ("dinknet" if "arxiv" in name_of(path) else "rdgae")
    assert cfg.data.holdout_edges == ("link" if "link" in name_of(path) else "none")


@pytest.mark.parametrize("path", PRESETS, ids=name_of)
def test_every_setting_is_stated_with_its_source(path):
    """Other defaults must not change what a preset means: a new key belongs into these files, or
    into IDLE.
    """
    sections = ("model.", "mask.", "loss.", "cluster.", "ci.", "optim.", "train.", "eval.probe")
    wanted = {key for key, _, _ in known_keys() if key.startswith(sections)} - IDLE
    assert wanted - stated(path) == set()
    assert {"data.normalize", "data.split", "data.features", "sampler.fanouts"} <= stated(path)
    values = [
        line
        for line in path.read_text().splitlines()
        if line.startswith("  ") and " name: " not in line
    ]
    assert all(any(f"# [{tag}]" in line for tag in "PYD") for line in values), (
        "a value without its source"
    )


@pytest.mark.parametrize("path", PLAIN, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_other_configs_name_the_dataset_and_leave_the_rest_to_the_recipe(path):
    for_links = {
        "model.edge_factors",
        "model.teleport",
        "loss.factor_weight",
        "optim.lr_max",
        "train.epochs",
    }
    more = for_links if path.parent.name == "link" else set()
    assert stated(path) - more <= {"data.name", "data.path", "data.holdout_edges"}


def test_links_have_one_recipe():
    paths = [path for path in PLAIN if path.parent.name == "link"]
    found = {fingerprint(load_config(path, overrides=["data.name=cora"])) for path in paths}
    assert len(paths) == 3 and len(found) == 1


def test_own_graphs_are_found_below_the_data_root(monkeypatch):
    own: dict[str, Any] = {path.stem: path for path in PLAIN if path.parent.name == "own"}
    assert set(own) == {"acm", "cora_ml", "dblp", "flickr", "blogcatalog"}
    for name, path in own.items():
        monkeypatch.setenv("CIMAGE_DATA_ROOT", "/elsewhere")
        assert load_config(path).data.path == f"/elsewhere/own/{name}"
        monkeypatch.delenv("CIMAGE_DATA_ROOT")
        assert load_config(path).data.path == f"data/raw/own/{name}"


def test_fewer_factors_are_wanted_in_the_first_context_than_there_are():
    with pytest.raises(
        UserError, match=r"ci\.target must be below model\.num_factors \(8\).*got 8"
    ):
        load_config(overrides=["model.num_factors=8", "ci.target=8"])
    assert load_config(overrides=["model.num_factors=8", "ci.target=7"]).ci.target == 7
    assert Config().ci.target is None
