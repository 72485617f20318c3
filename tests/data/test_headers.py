"""Headers are detected, numeric ones too; doubt is an error. Values that overflow or vanish are
named.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from cimage_dist.config import DataConfig
from cimage_dist.data.ingest import open_graph
from cimage_dist.data.sources.tables import has_header
from cimage_dist.errors import UserError
from tests.data.test_ids import Write, folder

__all__ = ["folder"]

PAIRS = [[0, 2], [1, 2], [2, 3], [3, 4]]
X = np.array([[0.5, 0, 1], [0, 2.5, 0], [1, 1, 1], [0.25, 0, 4], [3, 0, 0]])


@pytest.mark.parametrize(
    ("lines", "known", "found"),
    [
        (["a,b", "1,2"], (), True),
        (["1,2", "3,4"], (), False),
        (["SRC,dst", "x,y"], ("src",), True),
        (["0,1", "3,4"], (), None),
        (["0,1,2", "3,4,5"], (), None),
        (["0,1,2", "3,0.5,5", "1,1.0,2"], (), True),
        ([",0,1", "0,3,4"], (), True),
        ([",1,2", "0,3,4"], (), False),
        (["x,y", "a,b"], (), None),
        (["ann,1,5", "bob,3,4"], (), False),
        (["name,f,g", "bob,3,4"], (), True),
        (["name,0,1", "bob,3,4"], (), None),
        (["0,fox", "1,ape"], (), False),
        (["nan,inf", "1,2"], (), False),
        (["0"], (), None),
        (["5"], (), False),
    ],
)
def test_first_lines(lines: list[str], known: tuple[str, ...], found: bool | None) -> None:
    assert has_header([line.split(",") for line in lines], known) is found


def test_features_with_the_numeric_header_of_pandas(folder: Write) -> None:
    data = folder(
        edges__npy=lambda p: np.save(p, PAIRS),
        features__csv=lambda p: pd.DataFrame(X).to_csv(p, index=False),
    )
    np.testing.assert_array_equal(open_graph(data).x, X.astype(np.float32))


def test_features_with_the_index_of_pandas(folder: Write) -> None:
    shuffled = pd.DataFrame(X).iloc[[4, 0, 2, 1, 3]]
    data = folder(edges__npy=lambda p: np.save(p, PAIRS), features__csv=shuffled.to_csv)
    graph = open_graph(data)
    np.testing.assert_array_equal(graph.x, X.astype(np.float32))
    assert graph.ids is None


def test_whole_features_under_a_numeric_line_are_in_doubt(folder: Write) -> None:
    rows = np.arange(15).reshape(5, 3)
    data = folder(
        edges__npy=lambda p: np.save(p, PAIRS),
        features__csv=lambda p: np.savetxt(p, rows, "%d", ","),
    )
    with pytest.raises(UserError, match=r"0,1,2 \| 3,4,5.*data\.header\.features=present"):
        open_graph(data)
    data.header = {"features": "absent"}
    np.testing.assert_array_equal(open_graph(data).x, rows)
    np.save(Path(str(data.path)) / "edges.npy", PAIRS[:3])
    data.header = {"features": "present"}
    np.testing.assert_array_equal(open_graph(data).x, rows[1:])


def edges(pairs: list[list[int]], header: str = "") -> str:
    return header + "".join(f"{a},{b}\n" for a, b in pairs)


def test_edges_under_0_1_are_in_doubt_unless_that_edge_comes_again(folder: Write) -> None:
    data = folder(edges__csv=edges(PAIRS, "0,1\n"), features__npy=lambda p: np.save(p, X))
    with pytest.raises(UserError, match=r"edges\.csv: the first line.*0,1 \| 0,2.*header\.edges"):
        open_graph(data)
    data.header = {"edges": "present"}
    assert open_graph(data).num_edges == 8
    data.header = {"edges": "absent"}
    assert open_graph(data).num_edges == 10
    data = folder(edges__csv=edges([*PAIRS, [1, 0]], "0,1\n"))
    assert open_graph(data).num_edges == 10  # the same with and without the first line


def test_edges_with_index_and_numeric_header(folder: Write) -> None:
    data = folder(edges__csv=pd.DataFrame(PAIRS).to_csv, features__npy=lambda p: np.save(p, X))
    graph = open_graph(data)
    assert graph.num_edges == 8 and "ignored_columns" not in graph.manifest["notes"]


def test_edges_by_name_under_an_unknown_line(folder: Write) -> None:
    """A first line of words is data where they come again, or where features know them."""
    data = folder(edges__csv="ann,bob\ncat,dan\ndan,ann\n")
    data.features = "degree"
    assert open_graph(data).num_nodes == 4
    data = folder(edges__csv="person,friend\ncat,dan\ndan,ann\n")
    data.features = "degree"
    with pytest.raises(UserError, match=r"person,friend \| cat,dan.*data\.header\.edges"):
        open_graph(data)
    data = folder(features__csv="id,f\ncat,1\ndan,2\nann,3\n")
    assert open_graph(data).num_edges == 4


LABELS: dict[str, tuple[str, list[int] | str]] = {
    "as many as nodes": ("0\n1\n0\n1\n1\n", [0, 1, 0, 1, 1]),
    "one more, and a number": ("0\n1\n0\n1\n1\n0\n", "data.header.labels"),
    "one more, and a word": ("animal\nfox\nape\nfox\nfox\nape\n", [1, 0, 1, 1, 0]),
    "one more, a word that comes again": ("fox\nape\nfox\nfox\nape\nfox\n", "labels.csv has 6"),
    "two columns, the id again": ("0,1\n1,0\n0,2\n", [2, 0, -1, -1, -1]),
    "two columns, every node": ("0,1\n1,0\n2,1\n3,1\n4,0\n", [1, 0, 1, 1, 0]),
    "two columns, some nodes": ("0,1\n1,0\n", "data.header.labels"),
    "two columns, no doubt": ("0,3\n1,0\n", [3, 0, -1, -1, -1]),
    "words by number": ("0,fox\n1,ape\n", [1, 0, -1, -1, -1]),
    "series with its index": (",0\n0,3\n1,0\n", [3, 0, -1, -1, -1]),
}


@pytest.mark.parametrize("case", LABELS)
def test_labels(folder: Write, case: str) -> None:
    content, want = LABELS[case]
    data = folder(
        edges__npy=lambda p: np.save(p, PAIRS),
        features__npy=lambda p: np.save(p, X),
        labels__csv=content,
    )
    if isinstance(want, str):
        with pytest.raises(UserError, match=want):
            open_graph(data)
    else:
        np.testing.assert_array_equal(open_graph(data).y, want)


# ---- values that overflow or vanish

Own = Callable[..., DataConfig]


@pytest.mark.parametrize("size", [1e30, 1e-30])
def test_sizes_that_float32_cannot_multiply(own_folder: Own, size: float) -> None:
    data = own_folder(features=X * size)
    data.normalize = "none"
    with pytest.raises(UserError, match=rf"largest value is 4e.{30}.*data\.normalize=unit"):
        open_graph(data)
    data.normalize = "unit"
    graph = open_graph(data)
    np.testing.assert_allclose(np.linalg.norm(graph.x, axis=1), 1, rtol=1e-6)


def test_all_zero_features(own_folder: Own) -> None:
    with pytest.raises(UserError, match=r"features of graph 'mine' are all zero, so"):
        open_graph(own_folder(features=np.zeros((5, 3))))
    data = own_folder(features=np.full((5, 3), 1e-9))
    data.normalize, data.feature_dtype = "none", "float16"
    with pytest.raises(UserError, match=r"all zero: 15 values are too small for float16"):
        open_graph(data)


def warnings_of(data: DataConfig, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "cimage"):
        graph = open_graph(data)
    logged = [record.message for record in caplog.records]
    assert logged == graph.manifest["notes"].get("warnings", [])
    open_graph(data)
    assert len(caplog.records) == len(logged), "said once, when the store is built"
    return logged


def test_warnings(own_folder: Own, caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of(own_folder(), caplog) == []
    x = X.copy()
    x[:, 1] = 0
    (text,) = warnings_of(own_folder(features=x), caplog)
    assert "1 of 3 columns are zero for every node (the first: 1)" in text
    x[0, 1] = 1e-9
    data = own_folder(features=x)
    data.normalize, data.feature_dtype = "none", "float16"
    small, _ = warnings_of(data, caplog)
    assert "1 values are too small for float16" in small
    (text,) = warnings_of(own_folder(features=X, labels=np.array([2, 2, -1, 2, 2])), caplog)
    assert "one class only (2)" in text
    (text,) = warnings_of(own_folder(labels=np.full(5, -1)), caplog)
    assert "no node has a label" in text
    (text,) = warnings_of(
        own_folder(labels=np.arange(5) % 2, edges=np.array([[1, 2], [2, 3], [3, 4]])), caplog
    )
    assert "node 0 has no edge. If ids count from 1" in text
