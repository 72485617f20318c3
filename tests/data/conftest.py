"""Where real raw files are found, and small graphs on disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.utils import coalesce, remove_self_loops, to_undirected

from cimage_dist.config import DataConfig, SbmConfig
from cimage_dist.data.store import Graph

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def data_root() -> Path:
    root = Path(os.environ.get("CIMAGE_DATA_ROOT") or REPO.parent / "shared" / "datasets")
    if not root.is_dir():
        pytest.skip("no raw datasets: set CIMAGE_DATA_ROOT")
    return root


@pytest.fixture
def tiny_sbm(tmp_path: Path) -> DataConfig:
    """300 nodes; quick to build."""
    return DataConfig(
        name="sbm",
        normalize="source",
        store_dir=str(tmp_path / "stores"),
        sbm=SbmConfig(
            num_nodes=300, num_blocks=3, avg_degree=8, label_features=4, nuisance_features=6
        ),
    )


@pytest.fixture
def own_folder(tmp_path: Path) -> Callable[..., DataConfig]:
    """Writes arrays as npy files of an own graph (None leaves a file out) and returns its
    config.
    """

    def make(**overrides: object) -> DataConfig:
        folder = tmp_path / "mine"
        folder.mkdir(exist_ok=True)
        arrays: dict[str, object] = {
            "edges": np.array([[0, 1], [1, 2], [2, 3], [3, 0], [0, 2]]),
            "features": np.arange(15, dtype=np.float32).reshape(5, 3),
            "labels": np.array([0, 1, 0, 1, -1]),
        }
        arrays.update(overrides)
        for name, array in arrays.items():
            if array is not None:
                np.save(folder / f"{name}.npy", array)
        return DataConfig(
            name="mine", path=str(folder), normalize="source", store_dir=str(tmp_path / "stores")
        )

    return make


def assert_same_edges(graph: Graph, edge_index: torch.Tensor) -> None:
    want = coalesce(to_undirected(remove_self_loops(edge_index)[0]))
    got = graph.topology().edge_list()
    torch.testing.assert_close(torch.stack([got.dst, got.src]), want)
