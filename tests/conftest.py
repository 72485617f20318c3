"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from cimage_dist.config_loading import load_config
from cimage_dist.data.ingest import open_graph
from cimage_dist.data.store import Graph
from tests.pages import browser  # noqa: F401 (a fixture)

torch.set_num_threads(
    1
)  # several processes share two cores in some tests; spinning threads would starve each other


@pytest.fixture(scope="session")
def data_root() -> Path:
    """Folder of the real benchmark datasets; tests that need it are skipped where it is absent."""
    root = Path(
        os.environ.get("CIMAGE_DATA_ROOT") or Path(__file__).parents[2] / "shared" / "datasets"
    )
    if not (root / "Planetoid").is_dir():
        pytest.skip(
            "real datasets not found: set CIMAGE_DATA_ROOT to the folder that holds Planetoid/, "
            "Amazon/, ..."
        )
    return root


@pytest.fixture(scope="session")
def store_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stores")


@pytest.fixture(scope="session")
def digits(store_dir: Path) -> Graph:
    return open_graph(load_config(overrides=[f"data.store_dir={store_dir}"]).data)


@pytest.fixture(scope="session")
def small_sbm(store_dir: Path) -> Graph:
    """300 nodes, 3 blocks: large enough to learn from, small enough for many runs."""
    return open_graph(load_config(overrides=small_sbm_settings(store_dir)).data)


def small_sbm_settings(store_dir: Path) -> list[str]:
    return [
        "data.name=sbm",
        "data.sbm.num_nodes=300",
        "data.sbm.num_blocks=3",
        "data.sbm.avg_degree=8",
        "data.sbm.label_features=6",
        "data.sbm.nuisance_features=6",
        f"data.store_dir={store_dir}",
    ]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of several ranks and of Ray take longest and come first, so that parallel test
    processes end together; without CUDA those of a GPU are skipped.
    """
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs CUDA"))
    items.sort(key=lambda item: not {"parity", "test_on_ray.py"} & set(item.path.parts))
