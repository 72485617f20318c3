"""From csv files with string ids to embeddings, nodes and a page with those ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch

from cimage_dist.config_loading import load_config
from cimage_dist.data.ingest import open_graph
from cimage_dist.data.store import Graph
from cimage_dist.errors import UserError
from cimage_dist.io.checkpoint import load_rows
from cimage_dist.pipeline import stages
from cimage_dist.reporting.insight import Shown, map_chart
from cimage_dist.train.progress import Progress
from tests.test_api import TINY


def test_outputs_carry_the_ids(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    names = np.array([f"user-{i}" for i in rng.permutation(40)])
    ends = rng.integers(0, 40, (160, 2))
    mine = tmp_path / "mine"
    mine.mkdir()
    pd.DataFrame(names[ends], columns=["source", "target"]).to_csv(mine / "edges.csv", index=False)
    features = pd.DataFrame(rng.normal(size=(40, 6)), index=pd.Index(names, name="id"))
    features.sample(frac=1, random_state=0).to_csv(mine / "features.csv")
    places = [f"data.path={mine}", f"data.store_dir={tmp_path / 's'}", f"run.dir={tmp_path / 'r'}"]
    cfg = load_config(overrides=["data.name=mine", *places, *TINY])
    stages.pretrain(cfg, Progress(quiet=True))

    stages.embed(cfg)
    whole = stages.embed(cfg, parquet=True)
    graph = open_graph(cfg.data)
    assert graph.ids is not None
    ids = graph.ids.to_numpy()
    np.testing.assert_allclose(
        graph.x, features.loc[ids] / np.linalg.norm(features.loc[ids], axis=1)[:, None], rtol=1e-5
    )
    table = pq.read_table(next(whole.glob("*.parquet"))).to_pydict()
    assert table["node"] == ids.tolist()
    np.testing.assert_array_equal(np.array(table["z"], np.float32), load_rows(whole))

    (tmp_path / "some.txt").write_text("user-7\nuser-3\n")
    some = stages.embed(cfg, parquet=True, nodes=tmp_path / "some.txt")
    assert pq.read_table(next(some.glob("*.parquet")))["node"].to_pylist() == ["user-7", "user-3"]
    (tmp_path / "some.txt").write_text("user-7\nuser-99\n")
    with pytest.raises(UserError, match=r"some\.txt: 1 ids are not nodes.*'user-99'"):
        stages.embed(cfg, nodes=tmp_path / "some.txt")


def test_the_map_shows_ids_and_class_names() -> None:
    edges = pd.DataFrame({"source": ["ann", "bob", "cat"], "target": ["bob", "cat", "dan"]})
    y = pd.Series([1, 0, 1, 0], index=["ann", "bob", "cat", "dan"])
    graph = Graph.from_edges(edges, y=y)
    graph.manifest["notes"] = {"class_names": ["staff", "guest"]}
    rows = torch.tensor([1, 2, 3])
    shown = Shown(
        rows,
        torch.randn(3, 4),
        torch.tensor([0, 1, 0]),
        np.array([[0], [1], [2]]),
        np.ones((3, 1), np.float32),
        known=torch.tensor([True, True, False, True]),
    )
    chart = map_chart(graph, graph.topology().degrees(), shown, 0)
    assert [row["id"] for row in chart["data"]] == ["bob", "cat", "dan"]
    assert [row["label"] for row in chart["data"]] == ["staff", None, "staff"]
    assert "node dan" in chart["data"][2]["about"] and "label staff" in chart["data"][2]["about"]
    near = chart["near"]
    found = [[near["names"][i] for i in places] for places in near["rows"]]
    assert found == [["ann"], ["bob"], ["cat"]]
