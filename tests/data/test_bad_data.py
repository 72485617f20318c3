"""Every kind of bad data gives one readable paragraph: what, where, how to fix it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cimage_dist.config import DataConfig
from cimage_dist.data.ingest import ingest, open_graph
from cimage_dist.errors import UserError

NAN = np.arange(15.0).reshape(5, 3)
NAN[[1, 3], [2, 0]] = [np.nan, np.inf]

Table = list[tuple[str, dict[str, object], list[str]]]
ARRAYS: Table = [
    (
        "id out of range",
        {"edges": np.array([[0, 1], [1, 5], [7, 2]])},
        [
            "2 of the first 3 edges",
            "outside 0..4",
            "edge 2 (1 -> 5)",
            "edge 3 (7 -> 2)",
            "subtract 1",
        ],
    ),
    (
        "negative id",
        {"edges": np.array([[0, 1], [-1, 2]])},
        ["1 of the first 2 edges", "negative", "edge 2 (-1 -> 2)"],
    ),
    (
        "fractional id",
        {"edges": np.array([[0, 1], [1.5, 2]])},
        ["not whole numbers", "edge 2 has 1.5"],
    ),
    (
        "nan and inf features",
        {"features": NAN},
        ["2 values in 2 rows", "NaN or infinite", "row 1 column 2 = nan", "row 3 column 0 = inf"],
    ),
    (
        "too few labels",
        {"labels": np.zeros(4, dtype=int)},
        ["features.npy has 5", "labels.npy has 4 rows"],
    ),
    (
        "too many labels",
        {"labels": np.zeros(9, dtype=int)},
        ["features.npy has 5", "labels.npy has 9 rows"],
    ),
    ("fractional label", {"labels": np.array([0, 1, 0.5, 1, 1])}, ["not whole", "row 2 = 0.5"]),
    ("label below -1", {"labels": np.array([0, 1, -7, 1, 1])}, ["below -1", "row 2 = -7"]),
    ("absurd label", {"labels": np.array([0, 1, 10**12, 1, 1])}, ["far above", "row 2"]),
    ("multi-label", {"labels": np.zeros((5, 3))}, ["one class per node", "(5, 3)"]),
    ("no edges", {"edges": np.zeros((0, 2), dtype=int)}, ["empty", "no edge"]),
    ("only self-loops", {"edges": np.array([[1, 1], [2, 2]])}, ["empty", "2 self-loops"]),
    (
        "no nodes",
        {"edges": np.zeros((0, 2), dtype=int), "features": None, "labels": None},
        ["empty", "no nodes"],
    ),
    (
        "no features",
        {"features": None},
        ["no node features", "data.features=degree", "hash", "laplacian"],
    ),
    ("flat features", {"features": np.zeros(5)}, ["[nodes, columns]", "(5,)"]),
    ("no columns", {"features": np.zeros((5, 0))}, ["table of numbers"]),
    (
        "object edges",
        {"edges": np.array([[0, "a"]], dtype=object)},
        ["edges.npy cannot be read", "Replace"],
    ),
    ("three edge columns", {"edges": np.zeros((4, 3), dtype=int)}, ["[E, 2] or [2, E]", "(4, 3)"]),
]


@pytest.mark.parametrize(
    ("arrays", "words"), [row[1:] for row in ARRAYS], ids=[row[0] for row in ARRAYS]
)
def test_arrays(
    own_folder: Callable[..., DataConfig],
    tmp_path: Path,
    arrays: dict[str, object],
    words: list[str],
) -> None:
    data = own_folder(**arrays)
    with pytest.raises(UserError) as caught:
        open_graph(data)
    message = str(caught.value)
    assert "\n" not in message and "mine" in message
    for word in words:
        assert word in message
    # nothing half-made stays behind
    assert [p.name for p in (tmp_path / "stores").iterdir()] == [".lock-mine"]


def wrong(path: Path, name: str, content: str | bytes) -> None:
    for old in path.glob(f"{name.partition('.')[0]}.*"):
        old.unlink()
    (path / name).write_bytes(content.encode() if isinstance(content, str) else content)


NPZ_HEAD = b"PK\x03\x04" + bytes(40)
FILES: list[tuple[str, str, str | bytes, list[str]]] = [
    (
        "word as id",
        "edges.csv",
        "0,2\n1,x\n2,3\n",
        ["1 node ids are not integers", "edge 2 has 'x'"],
    ),
    ("missing id", "edges.csv", "0,2\n1,\n2,3\n", ["not whole numbers", "edge 2 has nan"]),
    ("one column", "edges.csv", "0\n1\n", ["two columns"]),
    ("ragged rows", "edges.csv", "0,1\n1,2,3,4\n", ["edges.csv cannot be read as csv"]),
    ("binary in csv", "edges.csv", b"\xff\xfe\x00\x01,1\n", ["edges.csv cannot be read"]),
    ("empty text", "edges.txt", "", ["edges.txt is empty"]),
    ("broken gzip", "edges.csv.gz", b"\x1f\x8b\x08broken", ["edges.csv.gz cannot be read"]),
    ("not parquet", "edges.parquet", "hello", ["edges.parquet cannot be read"]),
    ("truncated npy", "edges.npy", b"\x93NUMPY\x01\x00", ["edges.npy cannot be read", "truncated"]),
    ("truncated npz", "edges.npz", NPZ_HEAD, ["edges.npz cannot be read"]),
    ("truncated feature npz", "features.npz", NPZ_HEAD, ["features.npz cannot be read"]),
    (
        "words as features",
        "features.csv",
        "1,2,3\n" * 4 + "1,red,3\n",
        ["features must be numbers", "red"],
    ),
    (
        "wrong feature rows",
        "features.csv",
        "1,2,3\n" * 4,
        ["features.csv has 4", "labels.npy has 5 rows", "id column"],
    ),
    (
        "unknown split word",
        "splits.csv",
        "train\ntrain\nval\nholdout\ntest\n",
        ["train, val and test", "'holdout'"],
    ),
    (
        "split overlap",
        "splits.json",
        '{"train": [0, 1], "val": [2], "test": [1, 3]}',
        ["overlap", "1 nodes are in both train and test", "first: 1"],
    ),
    ("split id", "splits.json", '{"train": [0, 12]}', ["outside 0..4"]),
    ("split json", "splits.json", '{"train": ', ["splits.json is not valid JSON"]),
    ("twice labelled", "labels.csv", "node,label\n1,0\n1,1\n", ["labels.csv", "more than once"]),
    ("three label columns", "labels.csv", "0,1,2\n" * 5, ["one column", "it has 3"]),
]


@pytest.mark.parametrize(
    ("name", "content", "words"), [row[1:] for row in FILES], ids=[row[0] for row in FILES]
)
def test_files(
    own_folder: Callable[..., DataConfig], name: str, content: str | bytes, words: list[str]
) -> None:
    data = own_folder()
    assert data.path is not None
    wrong(Path(data.path), name, content)
    with pytest.raises(UserError) as caught:
        open_graph(data)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_half_precision_overflow(own_folder: Callable[..., DataConfig]) -> None:
    data = own_folder(features=np.full((5, 1), 1e6))
    data.feature_dtype = "float16"
    with pytest.raises(
        UserError, match=r"5 values in 5 rows are too large for float16.*row 0 column 0 = 1000000"
    ):
        open_graph(data)


def test_names_and_paths(tmp_path: Path, own_folder: Callable[..., DataConfig]) -> None:
    stores = str(tmp_path / "stores")
    cases = {
        "Did you mean 'cora'": DataConfig(name="coora", store_dir=stores),
        "letters, digits": DataConfig(name="../x", store_dir=stores),
        "name of its own": DataConfig(name="digits", path=own_folder().path, store_dir=stores),
        "does not exist": DataConfig(name="a", path=str(tmp_path / "nowhere"), store_dir=stores),
        "no edges file": DataConfig(name="a", path=str(tmp_path), store_dir=stores),
    }
    for words, data in cases.items():
        with pytest.raises(UserError, match=words):
            open_graph(data)
    for text, words in {"coora": "Did you mean 'cora'", "no/such/folder": "does not exist"}.items():
        with pytest.raises(UserError, match=words):
            open_graph(text)
    assert own_folder().path is not None
    (tmp_path / "mine" / "edges.csv").write_text("0,1\n")
    with pytest.raises(UserError, match=r"several edges files: edges\.csv, edges\.npy"):
        open_graph(own_folder())


def test_store_folder_that_cannot_be_made(tmp_path: Path, tiny_sbm: DataConfig) -> None:
    (tmp_path / "file").write_text("")
    tiny_sbm.store_dir = str(tmp_path / "file" / "below")
    with pytest.raises(UserError, match=r"Cannot write the graph store.*data\.store_dir"):
        ingest(tiny_sbm)
