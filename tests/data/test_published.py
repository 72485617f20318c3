"""Published datasets: as PyG and OGB read them, streamed, downloaded, nothing unpickled."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import shutil
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.datasets import Amazon, Planetoid, WikiCS
from torch_geometric.transforms import NormalizeFeatures

from cimage_dist.config import DataConfig
from cimage_dist.data.ingest import open_graph
from cimage_dist.data.sources import raw as raw_module
from cimage_dist.data.sources.published import read_pickle
from cimage_dist.data.splits import node_split
from cimage_dist.errors import UserError
from tests.data.conftest import assert_same_edges


def copy_raw(data_root: Path, folder: str, tmp_path: Path) -> Path:
    if not (data_root / folder).is_dir():
        pytest.skip(f"{folder} is not below {data_root}")
    shutil.copytree(data_root / folder, tmp_path / "pyg" / folder)
    return tmp_path / "pyg"


@pytest.mark.parametrize(
    ("name", "edges", "isolated", "padding"),
    [("Cora", 10_556, 0, 0), ("Citeseer", 9_104, 48, 15), ("Pubmed", 88_648, 0, 0)],
)
def test_planetoid_equals_pyg(
    name: str, edges: int, isolated: int, padding: int, data_root: Path, tmp_path: Path
) -> None:
    root = copy_raw(data_root, f"Planetoid/{name}/raw", tmp_path)
    data = Planetoid(str(root / "Planetoid"), name, transform=NormalizeFeatures())[0]
    graph = open_graph(
        DataConfig(
            name=name.lower(),
            normalize="source",
            root=str(data_root),
            store_dir=str(tmp_path / "stores"),
        )
    )
    assert graph.num_edges == edges and graph.manifest["statistics"]["isolated_nodes"] == isolated
    assert_same_edges(graph, data.edge_index)
    torch.testing.assert_close(graph.features(), data.x)
    labels = graph.labels()
    unknown = labels < 0
    assert int(unknown.sum()) == padding and not bool(data.x[unknown].any())
    torch.testing.assert_close(labels[~unknown], data.y[~unknown])
    for split in ("public", "random", "per_class"):
        parts = node_split(graph, DataConfig(name=name.lower(), split=split), seed=0)
        assert not bool((unknown & (parts.train | parts.val | parts.test)).any())
    for key in ("train", "val", "test"):
        torch.testing.assert_close(torch.tensor(graph.masks[key]), data[f"{key}_mask"])
    assert f"ind.{name.lower()}.graph" in " ".join(graph.manifest["provenance"]["raw_files"])
    plain = open_graph(
        DataConfig(
            name=name.lower(),
            normalize="none",
            root=str(data_root),
            store_dir=str(tmp_path / "stores"),
        )
    )
    torch.testing.assert_close(plain.features(), Planetoid(str(root / "Planetoid"), name)[0].x)


@pytest.mark.parametrize(("name", "edges"), [("Photo", 238_162), ("Computers", 491_722)])
def test_amazon_equals_pyg(name: str, edges: int, data_root: Path, tmp_path: Path) -> None:
    root = copy_raw(data_root, f"Amazon/{name}/raw", tmp_path)
    data = Amazon(str(root / "Amazon"), name)[0]
    graph = open_graph(
        DataConfig(
            name=name.lower(),
            normalize="source",
            root=str(data_root),
            store_dir=str(tmp_path / "stores"),
        )
    )
    assert graph.num_edges == edges and not graph.masks
    assert_same_edges(graph, data.edge_index)
    torch.testing.assert_close(graph.features(), data.x)
    torch.testing.assert_close(graph.labels(), data.y)


def test_real_arxiv_lacks_features_and_says_what_to_do(data_root: Path, tmp_path: Path) -> None:
    if (
        not (data_root / "OGB/ogbn_arxiv/raw/edge.csv.gz").is_file()
        or (data_root / "OGB/ogbn_arxiv/raw/node-feat.csv.gz").is_file()
    ):
        pytest.skip("needs ogbn-arxiv without node features")
    data = DataConfig(
        name="ogbn-arxiv", normalize="source", root=str(data_root), store_dir=str(tmp_path)
    )
    with pytest.raises(
        UserError, match=r"no node features.*node-feat\.csv\.gz.*data\.features=degree"
    ):
        open_graph(data)
    data.features = "degree"
    graph = open_graph(data)
    assert (graph.num_nodes, graph.num_classes) == (169_343, 40)
    assert graph.manifest["statistics"]["edges_read"] == 1_166_243
    assert [int(graph.masks[key].sum()) for key in ("train", "val", "test")] == [
        90_941,
        29_799,
        48_603,
    ]


def test_wikics_layout(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    n, splits = 30, 20
    part = rng.integers(0, 4, size=(splits, n))
    test = rng.random(n) < 0.3
    content = {
        "features": rng.normal(size=(n, 5)).tolist(),
        "labels": rng.integers(0, 3, n).tolist(),
        "links": [sorted(rng.choice(n, 3, replace=False).tolist()) for _ in range(n)],
        "train_masks": ((part == 0) & ~test).tolist(),
        "val_masks": ((part == 1) & ~test).tolist(),
        "stopping_masks": ((part == 2) & ~test).tolist(),
        "test_mask": test.tolist(),
    }
    folder = tmp_path / "root" / "WikiCS" / "raw"
    folder.mkdir(parents=True)
    (folder / "data.json").write_text(json.dumps(content))
    graph = open_graph(
        DataConfig(
            name="wikics",
            normalize="source",
            root=str(tmp_path / "root"),
            store_dir=str(tmp_path / "stores"),
        )
    )
    shutil.copytree(folder, tmp_path / "pyg" / "raw")
    data = WikiCS(str(tmp_path / "pyg"), is_undirected=True)[0]
    assert_same_edges(graph, data.edge_index)
    torch.testing.assert_close(graph.features(), data.x)
    assert graph.num_splits == 20
    torch.testing.assert_close(torch.tensor(graph.masks["train"]), data.train_mask)
    torch.testing.assert_close(torch.tensor(graph.masks["val"]), data.val_mask)
    for i in range(splits):
        torch.testing.assert_close(torch.tensor(graph.masks["test"][:, i]), data.test_mask)
    (folder / "data.json").write_text('{"features": [[1.0]]')
    with pytest.raises(UserError, match=r"data\.json cannot be read"):
        open_graph(
            DataConfig(
                name="wikics",
                normalize="source",
                root=str(tmp_path / "root"),
                store_dir=str(tmp_path / "other"),
            )
        )


def write_csv(path: Path, rows: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        np.savetxt(file, rows, delimiter=",", fmt="%d" if rows.dtype.kind == "i" else "%.6f")


@pytest.mark.parametrize(
    ("name", "split"), [("ogbn-arxiv", "time"), ("ogbn-products", "sales_ranking")]
)
def test_ogb_csv_layout(tmp_path: Path, name: str, split: str) -> None:
    rng = np.random.default_rng(0)
    n = 40
    folder = tmp_path / "root" / "OGB" / name.replace("-", "_")
    edges, x, y, order = (
        rng.integers(0, n, (90, 2)),
        rng.normal(size=(n, 6)),
        rng.integers(0, 4, n),
        rng.permutation(n),
    )
    write_csv(folder / "raw" / "edge.csv.gz", edges)
    write_csv(folder / "raw" / "num-node-list.csv.gz", np.array([n]))
    write_csv(folder / "raw" / "node-label.csv.gz", y)
    write_csv(folder / "raw" / "node-feat.csv.gz", x)
    for part, ids in zip(("train", "valid", "test"), np.split(order, [20, 30]), strict=True):
        write_csv(folder / "split" / split / f"{part}.csv.gz", ids)
    graph = open_graph(
        DataConfig(
            name=name,
            normalize="source",
            root=str(tmp_path / "root"),
            store_dir=str(tmp_path / "stores"),
        )
    )
    assert_same_edges(graph, torch.from_numpy(edges.T.copy()))
    np.testing.assert_allclose(graph.x, x, atol=1e-6)
    np.testing.assert_array_equal(graph.y, y)
    np.testing.assert_array_equal(np.flatnonzero(graph.masks["val"]), np.sort(order[20:30]))


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("order", ["C", "F"])
def test_papers100m_layout_is_streamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compressed: bool, order: str
) -> None:
    from cimage_dist.data.sources import raw as npz

    monkeypatch.setattr(npz, "CHUNK_EDGES", 11)
    monkeypatch.setattr(npz, "CHUNK_VALUES", 13)
    rng = np.random.default_rng(0)
    n = 50
    folder = tmp_path / "root" / "OGB" / "ogbn_papers100M"
    (folder / "raw").mkdir(parents=True)
    edge_index = np.asarray(rng.integers(0, n, (2, 137)), order=order)
    x, y = rng.normal(size=(n, 4)).astype(np.float32), rng.integers(0, 5, (n, 1)).astype(np.float32)
    y[10:] = np.nan
    save = np.savez_compressed if compressed else np.savez
    save(
        folder / "raw" / "data.npz",
        edge_index=edge_index,
        node_feat=x,
        node_year=np.zeros((n, 1), dtype=np.int64),
        num_nodes_list=np.array([n]),
        num_edges_list=np.array([137]),
    )
    save(folder / "raw" / "node-label.npz", node_label=y)
    for part, ids in zip(("train", "valid", "test"), np.split(np.arange(10), [5, 7]), strict=True):
        write_csv(folder / "split" / "time" / f"{part}.csv.gz", ids)
    data = DataConfig(
        name="ogbn-papers100m",
        normalize="source",
        root=str(tmp_path / "root"),
        store_dir=str(tmp_path / "stores"),
        feature_dtype="float16",
    )
    graph = open_graph(data)
    assert_same_edges(graph, torch.from_numpy(np.ascontiguousarray(edge_index)))
    np.testing.assert_array_equal(graph.x, x.astype(np.float16))
    assert graph.y is not None and (graph.y[10:] == -1).all() and (graph.y[:10] == y[:10, 0]).all()
    archive = folder / "raw" / "data.npz"
    archive.write_bytes(archive.read_bytes()[:-200])
    data.store_dir = str(tmp_path / "other")
    with pytest.raises(UserError, match=r"data\.npz cannot be read.*truncated"):
        open_graph(data)


def test_raw_files_that_are_there_are_never_downloaded(
    data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (data_root / "Planetoid/Cora/raw").is_dir():
        pytest.skip("no raw Cora")
    monkeypatch.setattr(
        "torch_geometric.data.download_url", lambda *a, **k: pytest.fail("downloaded")
    )
    monkeypatch.setenv("CIMAGE_DATA_ROOT", str(data_root))
    assert open_graph(DataConfig(name="cora", store_dir=str(tmp_path))).num_nodes == 2708


@pytest.mark.parametrize("name", ["cora", "photo", "wikics"])
def test_failed_download_says_which_files_go_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def broken(url: str, folder: str, log: bool, filename: str) -> None:
        Path(folder, filename).write_text("half")
        raise OSError("no network")

    monkeypatch.setattr("torch_geometric.data.download_url", broken)
    monkeypatch.delenv("CIMAGE_DATA_ROOT", raising=False)
    with pytest.raises(UserError, match=r"no network.*Expected .* in .*raw.*CIMAGE_DATA_ROOT"):
        open_graph(DataConfig(name=name, store_dir=str(tmp_path)))
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and not p.name.startswith(".lock")]


def test_download_goes_below_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A data root may be shared and read-only: what is missing there is fetched into our own
    folder.
    """
    fetched: list[str] = []

    def fake(url: str, folder: str, log: bool, filename: str) -> None:
        fetched.append(url)
        Path(folder, filename).write_text("{}")

    monkeypatch.setattr("torch_geometric.data.download_url", fake)
    monkeypatch.setenv("CIMAGE_DATA_ROOT", str(tmp_path / "shared"))
    data = DataConfig(name="wikics", store_dir=str(tmp_path / "stores"))
    folder = raw_module.find_raw(data, "WikiCS/raw", ["data.json"], raw_module.fetch_pyg("WikiCS"))
    assert (
        folder == tmp_path / "stores" / "raw" / "WikiCS" / "raw"
        and (folder / "data.json").read_text() == "{}"
    )
    assert fetched == [f"{WikiCS.url}/data.json"]
    raw_module.find_raw(data, "WikiCS/raw", ["data.json"], raw_module.fetch_pyg("WikiCS"))
    assert len(fetched) == 1


def test_ogb_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ogb", None)
    monkeypatch.setitem(sys.modules, "ogb.nodeproppred", None)
    with pytest.raises(UserError, match=r"`ogb`.*not installed.*raw/edge\.csv\.gz"):
        open_graph(
            DataConfig(name="ogbn-products", root=str(tmp_path), store_dir=str(tmp_path / "stores"))
        )


class _Hostile:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        import os

        return os.system, ("touch hacked",)


def test_unpickler_admits_data_and_nothing_else(tmp_path: Path) -> None:
    from scipy.sparse import csr_matrix

    graph = defaultdict(list, {0: [1], 1: [0]})
    for value in (np.arange(6.0).reshape(2, 3), csr_matrix(np.eye(3)), graph):
        for protocol in (2, 3):
            (tmp_path / "good").write_bytes(pickle.dumps(value, protocol=protocol))
            again = read_pickle(tmp_path / "good")
            assert type(again) is type(value)
    (tmp_path / "bad").write_bytes(pickle.dumps(_Hostile()))
    with pytest.raises(UserError, match=r"bad is refused: it asks for (posix|nt)\.system"):
        read_pickle(tmp_path / "bad")
    buffer = io.BytesIO(pickle.dumps(graph))
    (tmp_path / "cut").write_bytes(buffer.getvalue()[:-5])
    with pytest.raises(UserError, match="cut cannot be read"):
        read_pickle(tmp_path / "cut")


def test_ogb_archive_is_unpacked_without_a_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ogb", reason="the extra `ogb` is not installed")
    import zipfile

    from cimage_dist.data.sources.published import OGB, fetch_ogb

    def fake(url: str, folder: str, log: bool) -> str:
        assert url.endswith("arxiv.zip")
        path = Path(folder) / "arxiv.zip"
        with zipfile.ZipFile(path, "w") as archive:
            for name in OGB["ogbn-arxiv"].files:
                archive.writestr(f"arxiv/{name}", name)
        return str(path)

    monkeypatch.setattr("ogb.utils.url.download_url", fake)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked a question"))
    dataset = OGB["ogbn-arxiv"]
    data = DataConfig(
        name="ogbn-arxiv",
        normalize="source",
        root=str(tmp_path),
        store_dir=str(tmp_path / "stores"),
    )
    folder = raw_module.find_raw(data, dataset.folder, dataset.files, fetch_ogb(dataset))
    assert all((folder / name).read_text() == name for name in dataset.files)
    assert [p.name for p in folder.parent.iterdir()] == ["ogbn_arxiv"]
