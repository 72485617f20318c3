"""The store: round trip, mapping, damage, PyG conversion."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.utils import coalesce, remove_self_loops, to_undirected

from cimage_dist.config import DataConfig
from cimage_dist.data.ingest import ingest, open_graph
from cimage_dist.data.store import Graph
from cimage_dist.errors import UserError


@pytest.fixture
def store(tiny_sbm: DataConfig) -> Path:
    path, built = ingest(tiny_sbm)
    assert built
    return path


def test_arrays_are_mapped_and_shared(store: Path) -> None:
    graph = Graph.open(store, verify="always")
    assert isinstance(graph.x, np.memmap) and not graph.x.flags.writeable
    assert (
        graph.indptr.dtype == np.int64
        and graph.indices.dtype == np.int32
        and graph.y is not None
        and graph.y.dtype == np.int64
    )
    topology = graph.topology()
    assert topology.indices.data_ptr() == graph.indices.ctypes.data
    assert graph.features().data_ptr() == graph.x.ctypes.data
    assert topology.num_nodes == graph.num_nodes == 300 and topology.num_edges == graph.num_edges
    edges = topology.edge_list()
    assert (edges.src != edges.dst).all()
    forward = torch.stack([edges.src, edges.dst])
    torch.testing.assert_close(coalesce(to_undirected(forward)), forward.flip(0))
    assert graph.num_classes == 3 and graph.num_features == 10
    assert "300 nodes" in repr(graph)


def test_manifest_tells_the_whole_story(store: Path) -> None:
    manifest = json.loads((store / "manifest.json").read_text())
    assert manifest["version"] == 1
    assert set(manifest["files"]) == {p.name for p in store.iterdir()} - {"manifest.json"}
    assert manifest["counts"]["nodes"] == 300
    assert manifest["provenance"]["options"]["sbm"]["num_nodes"] == 300
    assert manifest["notes"]["planted"]["label_columns"] == [0, 4]
    assert {"isolated_nodes", "self_loops_removed", "duplicates_merged"} <= set(
        manifest["statistics"]
    )


def test_moments_are_those_of_the_stored_features(store: Path) -> None:
    graph = Graph.open(store)
    moments = graph.feature_moments()
    x = np.asarray(graph.x, dtype=np.float64)
    assert (
        moments.mean.dtype == torch.float64
        and moments.cov is not None
        and moments.cov_factor is None
    )
    np.testing.assert_allclose(moments.mean, x.mean(0), atol=1e-12)
    np.testing.assert_allclose(moments.sqmean, (x**2).mean(0), atol=1e-12)
    np.testing.assert_allclose(moments.cov, np.cov(x.T, bias=True), atol=1e-6)  # stored as float32


def test_half_precision_features(tiny_sbm: DataConfig) -> None:
    full = open_graph(tiny_sbm)
    tiny_sbm.feature_dtype = "float16"
    half = open_graph(tiny_sbm)
    assert half.path != full.path and half.x.dtype == np.float16
    assert half.features().dtype == torch.float32
    torch.testing.assert_close(half.features(), full.features(), atol=4e-3, rtol=1e-3)  # 11 bits
    np.testing.assert_allclose(
        half.feature_moments().mean, np.asarray(half.x, dtype=np.float64).mean(0), atol=1e-12
    )


def test_fingerprint_follows_content_not_place(
    store: Path, tmp_path: Path, tiny_sbm: DataConfig
) -> None:
    tiny_sbm.store_dir = str(tmp_path / "elsewhere")
    assert open_graph(tiny_sbm).fingerprint == Graph.open(store).fingerprint
    tiny_sbm.sbm.seed = 1
    assert open_graph(tiny_sbm).fingerprint != Graph.open(store).fingerprint


def test_pickling_passes_the_path(store: Path) -> None:
    graph = Graph.open(store)
    blob = pickle.dumps(graph)
    assert len(blob) < 1_000
    again = pickle.loads(blob)
    assert again.fingerprint == graph.fingerprint and isinstance(again.x, np.memmap)


@pytest.mark.parametrize("name", ["indptr.npy", "indices.npy", "x.npy", "y.npy", "feature_cov.npy"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "corrupted"])
def test_damage_is_found_and_named(
    store: Path, name: str, damage: str, tiny_sbm: DataConfig
) -> None:
    path = store / name
    whole = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(whole[:-1])
    else:
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(UserError, match=name) as caught:
        Graph.open(store)
    assert "cimage ingest" in str(caught.value) and str(store) in str(caught.value)
    with pytest.raises(UserError, match=name):
        open_graph(tiny_sbm)
    # `ingest` repairs what `open` refuses
    assert ingest(tiny_sbm) == (store, True)
    assert path.read_bytes() == whole


def test_sizes_only_when_asked(store: Path) -> None:
    whole = (store / "x.npy").read_bytes()
    (store / "x.npy").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    Graph.open(store, verify="never")
    with pytest.raises(UserError, match="checksum"):
        Graph.open(store, verify="always")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (None, "no manifest.json"),
        ({"version": 99}, "format version 99"),
        ({"format": "other"}, "not the manifest"),
        ({"files": None}, "lacks files"),
        ("{", "not valid JSON"),
    ],
)
def test_manifest_problems(store: Path, change: object, words: str) -> None:
    path = store / "manifest.json"
    if change is None:
        path.unlink()
    elif isinstance(change, str):
        path.write_text(change)
    else:
        assert isinstance(change, dict)
        manifest = {
            k: v for k, v in {**json.loads(path.read_text()), **change}.items() if v is not None
        }
        path.write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=words):
        Graph.open(store)
    with pytest.raises(UserError, match=words):
        open_graph(store)


def toy_data() -> Data:
    edge_index = torch.tensor([[0, 1, 1, 2, 2, 3, 0], [1, 0, 2, 2, 3, 2, 3]])
    return Data(
        x=torch.randn(6, 4, generator=torch.Generator().manual_seed(0)),
        edge_index=edge_index,
        y=torch.tensor([0, 1, 0, 1, 2, 2]),
        num_nodes=6,
    )


def test_from_data_round_trip() -> None:
    data = toy_data()
    data.train_mask, data.val_mask, data.test_mask = (
        torch.arange(6) < 2,
        torch.arange(6) == 2,
        torch.arange(6) > 2,
    )
    graph = Graph.from_data(data, "toy", normalize="none")
    assert (
        graph.path is None
        and graph.num_nodes == 6
        and graph.num_classes == 3
        and graph.num_splits == 1
    )
    assert np.diff(graph.indptr).tolist() == [2, 2, 2, 2, 0, 0]
    back = graph.to_data()
    want = coalesce(to_undirected(remove_self_loops(data.edge_index)[0]))
    torch.testing.assert_close(back.edge_index.flip(0), want)
    torch.testing.assert_close(back.x, data.x)
    torch.testing.assert_close(back.test_mask, data.test_mask)
    np.testing.assert_allclose(graph.feature_moments().mean, data.x.double().mean(0), atol=1e-12)
    again = pickle.loads(pickle.dumps(graph))
    assert (
        again.fingerprint
        == graph.fingerprint
        == Graph.from_data(back, normalize="none").fingerprint
    )
    data.x[0, 0] += 1
    assert Graph.from_data(data).fingerprint != graph.fingerprint


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("x", torch.full((6, 4), float("nan")), "NaN"),
        ("x", torch.ones(5, 4), "x has 5, y has 6, edges has 6 rows"),
        ("edge_index", torch.tensor([[0], [6]]), "outside 0..5"),
        ("edge_index", torch.zeros(2, 0, dtype=torch.long), "empty"),
        ("edge_index", torch.tensor([[0, 1], [0, 1]]), "self-loops"),
        ("y", torch.zeros(6, 3), "one class per node"),
        ("y", torch.zeros(5, dtype=torch.long), "y has 5"),
    ],
)
def test_from_data_checks_like_any_source(field: str, value: object, words: str) -> None:
    data = toy_data()
    data[field] = value
    data.num_nodes = 6
    with pytest.raises(UserError, match=words):
        Graph.from_data(data)
