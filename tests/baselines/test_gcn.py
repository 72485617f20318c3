"""The supervised reference, feature normalisation, a module per method, settings of GCN methods."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from importlib import resources
from pathlib import Path

import pytest
import torch
import yaml

from cimage_dist import baselines
from cimage_dist.baselines import fit, gcn
from cimage_dist.baselines.encoders import prepared
from cimage_dist.errors import UserError
from tests.baselines.convolution import (
    Small,
    assert_learns,
    assert_same,
    layer,
    planted,
    settings_of,
)

METHODS = ("gae", "vgae", "arga", "arvga", "dgi", "mvgrl", "grace", "ccassg", "gcn")


def test_gcn_loss_and_gradient_match_dense_formula() -> None:
    small, model = Small(), gcn.Model(7, 6, 3, 0.0).double()
    y, rows = torch.arange(20) % 3, torch.arange(20) < 12
    loss = gcn.loss(model(small.x, small.sparse), y, rows)
    logits = layer(small.dense, layer(small.dense, small.x, model.first).relu(), model.second)
    chosen = [logits[i].exp()[y[i]] / logits[i].exp().sum() for i in range(12)]
    assert_same(loss, -torch.stack(chosen).log().mean(), model.parameters())


def test_gcn_learns() -> None:
    fitted = assert_learns("gcn", settings_of("gcn", hidden=16, epochs=40))
    assert fitted.embedding.shape == (150, 3)


def test_gcn_reads_training_labels_alone() -> None:
    graph, settings = planted(), settings_of("gcn", hidden=8, epochs=5)
    assert graph.y is not None and graph.train is not None
    hidden = dataclasses.replace(graph, y=graph.y.where(graph.train, -1))
    blind = dataclasses.replace(graph, val=None)
    fits = [fit("gcn", g, settings, 0, lambda *_: None).embedding for g in (hidden, blind)]
    assert torch.equal(*fits)


def test_gcn_stops_after_patience() -> None:
    seen: list[int] = []
    settings = settings_of("gcn", hidden=16, epochs=300, patience=4, lr=0.05)
    fit("gcn", planted(), settings, 0, lambda done, total, loss: seen.append(done))
    assert len(seen) < 300


def test_gcn_without_labels_is_refused() -> None:
    graph = dataclasses.replace(planted(), y=None)
    with pytest.raises(UserError, match="no labelled training nodes"):
        fit("gcn", graph, settings_of("gcn"), 0, lambda *_: None)


def test_prepared_rows() -> None:
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    assert torch.equal(prepared(x, "none"), x)
    torch.testing.assert_close(prepared(x, "row"), torch.tensor([[3 / 7, 4 / 7], [0.0, 0.0]]))
    torch.testing.assert_close(prepared(x, "unit"), torch.tensor([[0.6, 0.8], [0.0, 0.0]]))
    signed = torch.tensor([[2.0, -4.0], [0.0, 0.0]])
    assert torch.equal(prepared(signed, "max"), torch.tensor([[0.5, -1.0], [0.0, 0.0]]))
    with pytest.raises(UserError, match="median"):
        prepared(x, "median")


def test_max_gives_bags_of_words_back() -> None:
    words = (torch.rand(30, 50, generator=torch.Generator().manual_seed(0)) < 0.1).float()
    words[3] = 0
    assert torch.equal(prepared(words, "max"), words)
    assert not torch.equal(prepared(words, "unit"), words)


@pytest.mark.parametrize("method", ["vgae", "arga", "arvga"])
def test_features_as_they_came(method: str) -> None:
    """Zeros and ones train to the same bits under the authors' setting as without any."""
    usual = baselines.settings_of(method, "cora", "link", {"epochs": 2})
    graph = planted()
    binary = dataclasses.replace(graph, x=(graph.x > graph.x.median()).float())
    ways = (usual, {**usual, "normalize": "none"})
    fits = [fit(method, binary, settings, 0, lambda *_: None).embedding for settings in ways]
    assert usual["normalize"] == "max" and torch.equal(*fits)


@pytest.mark.parametrize("method", [name for name in baselines.METHODS if name != baselines.OWN])
def test_a_module_per_method(method: str) -> None:
    """Its docstring has the equations first, then the source; it has a loss and a fit."""
    module = importlib.import_module(f"cimage_dist.baselines.{method}")
    title, equations, source = (module.__doc__ or "").split("\n\n")[:3]
    assert title.startswith(f"{baselines.METHODS[method].label}: ") and title.endswith(".")
    assert all(line.startswith("    ") for line in equations.splitlines())
    assert "    L = " in equations
    assert re.search(r'"[^"]{10,}",\s[^.]*\b20\d\d\.', source)  # "title", venue and year
    assert callable(module.loss)
    assert [*inspect.signature(module.fit).parameters] == ["graph", "settings", "seed", "step"]


def test_no_other_module_than_the_methods_and_what_they_share() -> None:
    folder = resources.files("cimage_dist.baselines")
    found = {Path(f.name).stem for f in folder.iterdir() if f.name.endswith(".py")}
    shared = {"__init__", "encoders", "sparse"}
    assert found == {*baselines.METHODS, *shared} - {baselines.OWN}


@pytest.mark.parametrize("method", METHODS)
def test_settings_file(method: str) -> None:
    """Overrides name known keys, values name their origin, published figures are in percent."""
    text = resources.files("cimage_dist.baselines").joinpath(f"{method}.yaml").read_text()
    content = yaml.safe_load(text)
    assert set(content) - {"link"} == {"default", "datasets", "published"}
    links = content.get("link", {})
    changed = [content["datasets"], links.get("datasets", {}), {"cora": links.get("default", {})}]
    for name, changes in (item for part in changed for item in part.items()):
        assert name in {"cora", "citeseer", "pubmed", "photo", "computers"}
        assert set(changes) <= set(content["default"])
    indented = [line for line in text.split("published:")[0].splitlines() if line.startswith("  ")]
    assert all("#" in line for line in indented if not line.rstrip().endswith(":"))
    assert all(50 < value < 100 for value in content["published"]["node"].values())
    assert all(50 < v < 100 for pair in content["published"].get("link", {}).values() for v in pair)
