"""Your own graph in every file format."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from cimage_dist.config import DataConfig
from cimage_dist.data.ingest import open_graph
from cimage_dist.data.sources import own, raw

EDGES = np.array([[0, 1], [1, 2], [2, 3], [3, 0], [2, 0], [2, 2], [0, 1]])
X = np.array([[0.5, 0, 1], [0, 2, 0], [1, 1, 1], [0, 0, 0], [3, 0, 0]], dtype=np.float32)
LABELS = np.array([0, 2, 1, 0, -1])


def text(rows: np.ndarray, separator: str, header: str = "") -> str:
    return header + "".join(separator.join(f"{v:g}" for v in row) + "\n" for row in rows)


EDGE_FILES: dict[str, Callable[[Path], object]] = {
    "edges.csv": lambda p: p.write_text(text(EDGES, ",")),
    "edges.csv ": lambda p: p.write_text(text(EDGES, ",", "src,dst\n")),
    "edges.csv  ": lambda p: p.write_text(
        "weight,target,source\n" + "".join(f"1.5,{b},{a}\n" for a, b in EDGES)
    ),
    "edges.csv.gz": lambda p: p.write_bytes(gzip.compress(text(EDGES, ",").encode())),
    "edges.tsv": lambda p: p.write_text(text(EDGES, "\t", "# a comment\n")),
    "edges.txt": lambda p: p.write_text(text(EDGES, "  ", "# a comment\n# another\n")),
    "edges.parquet": lambda p: pd.DataFrame(
        {"u": EDGES[:, 0], "w": 1.0, "v": EDGES[:, 1]}
    ).to_parquet(p),
    "edges.npy": lambda p: np.save(p, EDGES.astype(np.int32)),
    "edges.npy ": lambda p: np.save(p, EDGES.T),
    "edges.npy  ": lambda p: np.save(p, EDGES.astype(np.float64)),
    "edges.npz": lambda p: np.savez(p, edge_index=EDGES.T),
    "edges.npz ": lambda p: sp.save_npz(
        p, sp.coo_array((np.ones(7), (EDGES[:, 0], EDGES[:, 1])), shape=(5, 5)).tocsr()
    ),
}
FEATURE_FILES: dict[str, Callable[[Path], object]] = {
    "features.npy": lambda p: np.save(p, X.astype(np.float64)),
    "features.npz": lambda p: np.savez_compressed(p, x=X),
    "features.npz ": lambda p: sp.save_npz(p, sp.csr_array(X)),
    "features.npz  ": lambda p: sp.save_npz(p, sp.coo_array(X)),
    "features.parquet": lambda p: pd.DataFrame(X, columns=list("abc")).to_parquet(p),
    "features.csv": lambda p: p.write_text(text(X, ",")),
    "features.csv ": lambda p: p.write_text(text(X, ",", "a,b,c\n")),
    "features.tsv": lambda p: p.write_text(text(X, "\t")),
}
LABEL_FILES: dict[str, Callable[[Path], object]] = {
    "labels.npy": lambda p: np.save(p, LABELS),
    "labels.npy ": lambda p: np.save(p, np.where(LABELS < 0, np.nan, LABELS)[:, None]),
    "labels.csv": lambda p: p.write_text("label\n0\n2\n1\n0\n-1\n"),
    "labels.csv ": lambda p: p.write_text("0\n2\n1\n0\n\n"),
    "labels.csv  ": lambda p: p.write_text("node,label\n3,0\n1,2\n2,1\n0,0\n"),
    "labels.txt": lambda p: p.write_text("0\n2\n1\n0\n-1\n"),
    "labels.parquet": lambda p: pd.DataFrame({"y": LABELS}).to_parquet(p),
}
SPLIT_FILES: dict[str, Callable[[Path], object]] = {
    "splits.npz": lambda p: np.savez(
        p, train=np.array([True, True, False, False, False]), val=np.array([2]), test=np.array([3])
    ),
    "splits.json": lambda p: p.write_text(json.dumps({"train": [0, 1], "valid": [2], "test": [3]})),
    "splits.csv": lambda p: p.write_text("split\ntrain\ntrain\nval\ntest\n\n"),
    "splits.csv ": lambda p: p.write_text("node,split\n3,test\n0,train\n1,train\n2,validation\n"),
}


def config(tmp_path: Path, **writers: tuple[str, Callable[[Path], object]]) -> DataConfig:
    folder = tmp_path / "mine"
    folder.mkdir()
    files = {
        "edges": ("edges.npy", EDGE_FILES["edges.npy"]),
        "features": ("features.npy", FEATURE_FILES["features.npy"]),
        **writers,
    }
    for name, write in files.values():
        write(folder / name.strip())
    return DataConfig(
        name="mine", path=str(folder), normalize="source", store_dir=str(tmp_path / "stores")
    )


@pytest.mark.parametrize("name", EDGE_FILES)
def test_edges(tmp_path: Path, name: str) -> None:
    graph = open_graph(config(tmp_path, edges=(name, EDGE_FILES[name])))
    assert graph.indptr.tolist() == [0, 3, 5, 8, 10, 10]
    assert graph.indices.tolist() == [1, 2, 3, 0, 2, 0, 1, 3, 0, 2]
    assert graph.manifest["statistics"]["isolated_nodes"] == 1
    assert (
        graph.y is None and graph.num_classes == 0 and graph.labels() is None and graph.masks == {}
    )


@pytest.mark.parametrize("name", FEATURE_FILES)
def test_features(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (raw, own):
        monkeypatch.setattr(module, "CHUNK_VALUES", 6)  # two rows at a time
    graph = open_graph(config(tmp_path, features=(name, FEATURE_FILES[name])))
    np.testing.assert_array_equal(graph.x, X)


@pytest.mark.parametrize("name", LABEL_FILES)
def test_labels(tmp_path: Path, name: str) -> None:
    graph = open_graph(config(tmp_path, labels=(name, LABEL_FILES[name])))
    np.testing.assert_array_equal(graph.y, LABELS)
    assert graph.num_classes == 3


def test_class_names_are_numbered_in_order(tmp_path: Path) -> None:
    graph = open_graph(
        config(
            tmp_path, labels=("labels.csv", lambda p: p.write_text("label\nfox\nape\n\nfox\ncat\n"))
        )
    )
    np.testing.assert_array_equal(graph.y, [2, 0, -1, 2, 1])
    assert graph.manifest["notes"]["class_names"] == ["ape", "cat", "fox"]


@pytest.mark.parametrize("name", SPLIT_FILES)
def test_splits(tmp_path: Path, name: str) -> None:
    graph = open_graph(
        config(
            tmp_path,
            labels=("labels.npy", LABEL_FILES["labels.npy"]),
            splits=(name, SPLIT_FILES[name]),
        )
    )
    assert {key: np.flatnonzero(mask).tolist() for key, mask in graph.masks.items()} == {
        "train": [0, 1],
        "val": [2],
        "test": [3],
    }


def test_row_normalisation(tmp_path: Path) -> None:
    data = config(tmp_path)
    data.normalize = "row"
    graph = open_graph(data)
    np.testing.assert_allclose(np.asarray(graph.x).sum(1), [1, 1, 1, 0, 1], rtol=1e-6)


def test_size_from_labels_then_from_edges(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    np.save(folder / "edges.npy", EDGES)
    data = DataConfig(
        name="mine", path=str(folder), store_dir=str(tmp_path / "stores"), features="degree"
    )
    assert open_graph(data).num_nodes == 4
    np.save(folder / "labels.npy", LABELS)
    assert open_graph(data).num_nodes == 5


def test_path_may_be_text_a_folder_or_the_edge_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = config(tmp_path)
    assert data.path is not None
    first = open_graph(data.path)
    assert first.name == "mine" and first.path is not None and first.path.parent == Path("data")
    assert open_graph(Path(data.path)).path == first.path
    assert open_graph(Path(data.path) / "edges.npy").fingerprint == first.fingerprint
    assert open_graph(str(first.path)).fingerprint == first.fingerprint
    assert open_graph(DataConfig(name="any", path=str(first.path))).fingerprint == first.fingerprint


def test_changed_file_is_read_again(tmp_path: Path) -> None:
    data = config(tmp_path)
    first = open_graph(data)
    assert open_graph(data).path == first.path
    np.save(tmp_path / "mine" / "features.npy", X + 1)
    second = open_graph(data)
    assert second.path != first.path
    np.testing.assert_array_equal(second.x, X + 1)
