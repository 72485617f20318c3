"""Sparse features: the same rows, moments and fingerprint as a dense store holds, in few bytes."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix, save_npz

from cimage_dist.config import DataConfig
from cimage_dist.data import sparse
from cimage_dist.data.ingest import open_graph
from cimage_dist.data.moments import MomentAccumulator, moments_of
from cimage_dist.data.sparse import CsrFeatures, rows_at
from cimage_dist.data.store import Graph
from cimage_dist.errors import UserError

NODES, FEATURES = 120, 300


def words(kind: str = "counts", share: float = 0.03) -> np.ndarray:
    """[N, F] with an empty row and an empty column."""
    draw = np.random.default_rng(0)
    x = draw.integers(1, 6, size=(NODES, FEATURES)).astype(np.float32)
    if kind == "binary":
        x[:] = 1
    elif kind == "real":
        x = draw.normal(size=x.shape).astype(np.float32)
    x[draw.random(x.shape) > share] = 0
    x[7], x[:, 11] = 0, 0
    return x


def folder_of(path: Path, x: Any, **settings: Any) -> DataConfig:
    path.mkdir(parents=True, exist_ok=True)
    ring = np.arange(NODES)
    np.save(path / "edges.npy", np.stack([ring, (ring + 1) % NODES]))
    for old in path.glob("features.*"):
        old.unlink()
    if isinstance(x, np.ndarray):
        np.save(path / "features.npy", x)
    else:
        save_npz(path / "features.npz", x)
    return DataConfig(name="mine", path=str(path), store_dir=str(path / "stores"), **settings)


def dense_store(monkeypatch: pytest.MonkeyPatch, cfg: DataConfig) -> Graph:
    """The store of the same rows as it was before there were sparse ones."""
    with monkeypatch.context() as patch:
        patch.setattr(sparse, "SPARSE_SHARE", -1.0)
        graph = open_graph(cfg)
    assert isinstance(graph.x, np.ndarray)
    return graph


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("normalize", ["none", "unit", "row"])
@pytest.mark.parametrize("kind", ["binary", "counts", "real"])
def test_a_sparse_store_stands_for_the_dense_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, normalize: str, dtype: Any
) -> None:
    x = words(kind)
    settings = {"normalize": normalize, "feature_dtype": dtype}
    dense = dense_store(monkeypatch, folder_of(tmp_path / "a", x, **settings))
    graph = open_graph(folder_of(tmp_path / "b", csr_matrix(x), **settings))
    assert isinstance(graph.x, CsrFeatures) and graph.x.shape == dense.x.shape
    assert graph.x.dtype == dense.x.dtype == dtype
    np.testing.assert_array_equal(np.asarray(graph.x), dense.x)
    assert torch.equal(graph.features(), dense.features())
    assert graph.fingerprint == dense.fingerprint
    assert graph.manifest["version"] == 2 and dense.manifest["version"] == 1
    assert not any(name.startswith("feature_") for name in graph.manifest["files"])
    for one, other in zip(
        vars(graph.feature_moments()).values(), vars(dense.feature_moments()).values(), strict=True
    ):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


def test_rows_are_gathered_in_the_order_named(tmp_path: Path) -> None:
    x = words()
    graph = open_graph(folder_of(tmp_path, x, normalize="none"))
    ids = np.array([5, 7, 5, 119, 0])
    for named in (ids, ids[:0], np.array([7])):
        found = rows_at(graph.x, named)
        assert not isinstance(found, torch.Tensor)
        np.testing.assert_array_equal(found.to_dense(), x[named])
    parts = [part.to_dense() for part in graph.rows().split(50)]
    np.testing.assert_array_equal(torch.cat(parts), x)


@pytest.mark.parametrize(("kind", "bytes_per_entry"), [("binary", 2), ("counts", 3), ("real", 6)])
def test_few_bytes_for_an_entry(tmp_path: Path, kind: str, bytes_per_entry: int) -> None:
    x = words(kind)
    graph = open_graph(folder_of(tmp_path, x, normalize="none"))
    assert isinstance(graph.x, CsrFeatures) and graph.x.nnz == np.count_nonzero(x)
    assert graph.x.nbytes < bytes_per_entry * graph.x.nnz + 4 * (NODES + 1) + 50


def test_one_rule_chooses_and_the_switch_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above a tenth the store is dense, whatever the file was: also where the first chunks were
    sparse, to the bit and with the moments of one dense pass.
    """
    x = words("real", 0.02)
    x[60:] = np.random.default_rng(1).normal(size=(60, FEATURES))
    monkeypatch.setattr("cimage_dist.data.sources.raw.CHUNK_VALUES", 20 * FEATURES)
    monkeypatch.setattr("cimage_dist.data.sources.raw.row_chunks.__defaults__", (20 * FEATURES,))
    graph = open_graph(folder_of(tmp_path / "a", csr_matrix(x), normalize="unit"))
    assert isinstance(graph.x, np.memmap)
    assert not any(name in graph.manifest["files"] for name in sparse.SPARSE_FILES)
    assert not list(graph.path.glob("x_*")) if graph.path else False
    before = dense_store(monkeypatch, folder_of(tmp_path / "b", csr_matrix(x), normalize="unit"))
    np.testing.assert_array_equal(graph.x, before.x)
    assert graph.fingerprint == before.fingerprint
    assert torch.equal(graph.feature_moments().mean, before.feature_moments().mean)


@pytest.mark.parametrize("wide", [False, True])
def test_moments_of_sparse_rows_are_those_of_dense_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wide: bool
) -> None:
    if wide:
        monkeypatch.setattr("cimage_dist.data.moments.FULL_WIDTH", 64)
        monkeypatch.setattr("cimage_dist.data.moments.SAMPLED_ROWS", 50)
    x = words("real")
    monkeypatch.setattr("cimage_dist.data.moments._CHUNK_VALUES", 25 * FEATURES)
    graph = open_graph(folder_of(tmp_path, x, normalize="none"))
    found, whole = moments_of(graph.x), MomentAccumulator(*x.shape)
    whole.add(x)
    want = whole.finish()
    assert (found.cov is None) == wide and (found.cov_factor is None) != wide
    for name in ("mean", "sqmean", "cov", "cov_factor"):
        one, other = getattr(found, name), getattr(want, name)
        if one is not None:
            assert one.shape == other.shape
            atol = 1e-7 if name == "cov_factor" else 1e-12  # kept in single precision
            torch.testing.assert_close(one.double(), other, atol=atol, rtol=0)


@pytest.mark.parametrize("name", ["x_indptr.npy", "x_columns.npy", "x_kept.npy", "x_table.npy"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "corrupted"])
def test_damage_is_found_and_named(tmp_path: Path, name: str, damage: str) -> None:
    graph = open_graph(folder_of(tmp_path, words(), normalize="none"))
    assert graph.path is not None
    file = graph.path / name
    content = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(content[:-1])
    else:
        content[-1] ^= 1
        file.write_bytes(content)
    with pytest.raises(UserError, match=name):
        Graph.open(graph.path)


def test_arrays_that_do_not_fit_each_other_are_damage(tmp_path: Path) -> None:
    """Checksums may be right and the arrays wrong, or left out of the manifest."""
    graph = open_graph(folder_of(tmp_path, words(), normalize="none"))
    assert graph.path is not None
    manifest = json.loads((graph.path / "manifest.json").read_text())
    np.save(graph.path / "x_columns.npy", np.zeros(3, np.uint16))
    manifest["files"] |= sparse_files(graph.path)
    (graph.path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="do not fit"):
        Graph.open(graph.path)
    del manifest["files"]["x_columns.npy"]
    (graph.path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"neither x\.npy nor x_columns\.npy"):
        Graph.open(graph.path)


def sparse_files(path: Path) -> dict[str, Any]:
    from cimage_dist.io import artifacts

    return artifacts.describe_files(path, ["x_columns.npy"])


BAD = {
    "infinite": (np.inf, "NaN or infinite.*row 3 column 4"),
    "missing": (np.nan, "NaN or infinite.*row 3 column 4"),
    "large": (1e300, "too large for float32.*row 3 column 4"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("normalize", ["none", "unit"])
def test_bad_values_of_sparse_matrices_are_named(tmp_path: Path, case: str, normalize: str) -> None:
    value, says = BAD[case]
    x = words().astype(np.float64)
    x[3, 4] = value
    with pytest.raises(UserError, match=says):
        open_graph(folder_of(tmp_path, csr_matrix(x), normalize=normalize))
    assert not list((tmp_path / "stores").glob("mine-*"))


def test_all_zero_and_too_few_rows_are_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="all zero"):
        open_graph(folder_of(tmp_path / "a", csr_matrix((NODES, FEATURES), dtype=np.float32)))
    with pytest.raises(UserError, match=r"outside 0\.\.118"):
        open_graph(folder_of(tmp_path / "b", csr_matrix(words()[:-1])))


def test_values_that_vanish_are_no_entries(tmp_path: Path) -> None:
    x = words("binary")
    x[2, 3] = 1e-12
    cfg = folder_of(tmp_path, csr_matrix(x), normalize="none", feature_dtype="float16")
    graph = open_graph(cfg)
    assert isinstance(graph.x, CsrFeatures) and graph.x.nnz == np.count_nonzero(x) - 1
    assert "too small" in graph.manifest["notes"]["warnings"][0]


def test_in_memory_as_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, ring = words(), np.arange(NODES)
    edges = np.stack([ring, (ring + 1) % NODES])
    found = [Graph.from_edges(edges, given) for given in (x, csr_matrix(x))]
    with monkeypatch.context() as patch:
        patch.setattr(sparse, "SPARSE_SHARE", -1.0)
        dense = Graph.from_edges(edges, x)
    for graph in found:
        assert isinstance(graph.x, CsrFeatures)
        np.testing.assert_array_equal(np.asarray(graph.x), dense.x)
        assert graph.fingerprint == dense.fingerprint
        again = pickle.loads(pickle.dumps(graph))
        np.testing.assert_array_equal(np.asarray(again.x), dense.x)


def test_real_graphs_take_at_most_twice_the_npz(data_root: Path, tmp_path: Path) -> None:
    folder = data_root / "own" / "flickr"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there")
    graph = open_graph(
        DataConfig(name="mine", path=str(folder), store_dir=str(tmp_path), normalize="unit")
    )
    files = graph.manifest["files"]
    stored = sum(f["bytes"] for name, f in files.items() if name.startswith(("x", "feature")))
    assert stored <= 2 * (folder / "features.npz").stat().st_size
