"""Features made from the graph."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cimage_dist.config import DataConfig
from cimage_dist.data import moments as features
from cimage_dist.data.build import csc_in_memory
from cimage_dist.data.ingest import open_graph
from cimage_dist.errors import UserError


def ring(n: int) -> tuple[np.ndarray, np.ndarray]:
    indptr, indices, _ = csc_in_memory(
        n + 1, np.arange(n), (np.arange(n) + 1) % n
    )  # node n is isolated
    return indptr, indices


def test_degree() -> None:
    indptr, _ = ring(6)
    x = np.concatenate(list(features.degree_features(indptr)))
    np.testing.assert_allclose(x[:, 0], [np.log(3)] * 6 + [0], rtol=1e-6)
    np.testing.assert_allclose(x[:, 1], [3**-0.5] * 6 + [1], rtol=1e-6)


def test_hash_rows_are_distinct_signs_whatever_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.concatenate(list(features.hash_features(500, 100)))
    assert x.shape == (500, 100) and len(np.unique(x, axis=0)) == 500
    np.testing.assert_allclose(np.abs(x), 0.1, rtol=1e-6)
    gram = x @ x.T
    assert (
        np.abs(gram - np.eye(500)).max() < 0.6
    )  # 1/√100 each, the largest of 125k pairs near 5 of these
    monkeypatch.setattr(features, "_CHUNK_ROWS", 33)
    np.testing.assert_array_equal(x, np.concatenate(list(features.hash_features(500, 100))))


def test_laplacian_are_eigenvectors() -> None:
    indptr, indices, _ = csc_in_memory(
        30, *np.random.default_rng(0).integers(0, 29, (2, 90))
    )  # node 29 is isolated
    x = np.concatenate(list(features.laplacian_features(indptr, indices, 5))).astype(np.float64)
    adjacency = np.zeros((30, 30))
    adjacency[np.repeat(np.arange(30), np.diff(indptr)), indices] = 1
    scale = 1 / np.sqrt(np.maximum(adjacency.sum(1), 1))
    normal = scale[:, None] * adjacency * scale
    values = np.linalg.eigvalsh(normal)[::-1][:5]
    np.testing.assert_allclose(normal @ x, x * values, atol=1e-4)  # float32 storage
    np.testing.assert_allclose((x**2).mean(0), 1, atol=1e-5)
    assert (x[np.abs(x).argmax(0), range(5)] > 0).all()
    np.testing.assert_array_equal(
        x, np.concatenate(list(features.laplacian_features(indptr, indices, 5)))
    )
    with pytest.raises(UserError, match="made_features=30"):
        list(features.laplacian_features(indptr, indices, 30))


@pytest.mark.parametrize(("kind", "width"), [("degree", 2), ("hash", 3), ("laplacian", 3)])
def test_graph_without_features(
    own_folder: Callable[..., DataConfig], kind: str, width: int
) -> None:
    data = own_folder(features=None)
    with pytest.raises(UserError, match=r"no node features.*data\.features=degree"):
        open_graph(data)
    data.features, data.made_features = kind, 3
    graph = open_graph(data)
    assert graph.x.shape == (5, width) and np.isfinite(graph.x).all()
    assert graph.manifest["statistics"]["isolated_nodes"] == 1
