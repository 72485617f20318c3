"""One graph from everything Python programs hold."""

from __future__ import annotations

from collections.abc import Callable

import networkx as nx
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch
from torch_geometric.data import Data

from cimage_dist import Graph, UserError
from tests.data.test_ids import NAMES, PAIRS, SHUFFLED, X, expected, neighbours

INDEX = np.array(PAIRS).T
Y = np.array([0, 1, 0, 1, 2])
FRAME = pd.DataFrame(X, index=NAMES).iloc[SHUFFLED]
NAMED = pd.DataFrame([(NAMES[a], NAMES[b]) for a, b in PAIRS], columns=["source", "target"])


def network() -> nx.Graph:
    graph = nx.Graph([(NAMES[a], NAMES[b]) for a, b in PAIRS])
    graph.add_node("eve")
    return graph


ADJACENCY = sp.coo_array((np.ones(5), (INDEX[0], INDEX[1])), shape=(5, 5))
NUMBERED: dict[str, tuple[object, object, object]] = {
    "arrays": (INDEX, X, Y),
    "rows of pairs": (INDEX.T.tolist(), X.tolist(), Y.tolist()),
    "tensors": (torch.tensor(INDEX), torch.tensor(X), torch.tensor(Y)),
    "sparse tensor": (INDEX, torch.tensor(X).to_sparse(), Y),
    "scipy": (ADJACENCY.tocsc(), sp.coo_array(X), Y),
    "pandas": (pd.DataFrame({"v": INDEX[1], "w": 1, "u": INDEX[0]}), pd.DataFrame(X), pd.Series(Y)),
    "networkx": (nx.from_scipy_sparse_array(ADJACENCY), X, Y),
    "networkx, any order": (nx.Graph([(4, 4), *PAIRS]), pd.DataFrame(X, [*range(5)]), None),
    "shuffled frame": (INDEX, pd.DataFrame(X).iloc[SHUFFLED], pd.Series(Y).iloc[::-1]),
}


@pytest.mark.parametrize("form", NUMBERED)
def test_numbered_nodes(form: str) -> None:
    want = Graph.from_data(Data(torch.tensor(X), torch.tensor(INDEX), y=torch.tensor(Y)))
    graph = Graph.from_edges(*NUMBERED[form])
    assert neighbours(graph) == expected(list(range(5)))
    assert graph.fingerprint == want.fingerprint or graph.y is None
    np.testing.assert_allclose(np.linalg.norm(graph.x, axis=1), 1, rtol=1e-6)
    if graph.y is not None:
        np.testing.assert_array_equal(graph.y, Y)


@pytest.mark.parametrize(
    ("edges", "y"), [(NAMED, pd.Series(Y, NAMES)), (NAMED.to_numpy(dtype=str), None)]
)
def test_named_nodes(edges: object, y: object) -> None:
    graph = Graph.from_edges(edges, FRAME, y, normalize="none")
    assert neighbours(graph) == expected(NAMES)
    np.testing.assert_array_equal(graph.x, X[SHUFFLED])
    if graph.y is not None:
        np.testing.assert_array_equal(graph.y, Y[SHUFFLED])


def test_networkx_with_names_and_made_features() -> None:
    graph = Graph.from_edges(network())
    assert neighbours(graph) == expected(NAMES) and graph.x.shape == (5, 2)
    assert graph.ids is not None and graph.ids.to_numpy().tolist() == NAMES
    joined = Graph.from_edges(network(), FRAME, normalize="none")
    np.testing.assert_array_equal(joined.x, X)


def test_data_without_features() -> None:
    data = Data(edge_index=torch.tensor(INDEX), num_nodes=5)
    assert Graph.from_data(data).x.shape == (5, 2)
    assert Graph.from_data(data, features="hash", width=3).x.shape == (5, 3)


def test_words_as_classes_and_masks() -> None:
    masks = {"train": torch.tensor([1, 0, 0, 0, 0], dtype=torch.bool)}
    graph = Graph.from_edges(INDEX, X, ["b", "a", "b", "a", "c"], masks=masks, name="toy")
    assert graph.y is not None and graph.y.tolist() == [1, 0, 1, 0, 2] and graph.name == "toy"
    assert graph.manifest["notes"]["class_names"] == ["a", "b", "c"]
    assert graph.masks["train"].tolist() == [True, False, False, False, False]


BAD: dict[str, tuple[Callable[[], object], str]] = {
    "shape": (lambda: Graph.from_edges(np.zeros((3, 3)), X), r"shape \(3, 3\).*networkx"),
    "adjacency": (lambda: Graph.from_edges(sp.eye_array(3, 4), X), r"\(3, 4\)"),
    "sizes": (lambda: Graph.from_edges(sp.eye_array(4), X), "x has 5, edges has 4 rows"),
    "columns": (lambda: Graph.from_edges(NAMED.assign(t=1)[["t", "source"]].assign(z=2)), "ends"),
    "empty": (lambda: Graph.from_edges(nx.Graph()), "empty"),
    "tuples": (lambda: Graph.from_edges(nx.grid_2d_graph(2, 2)), "integers or text"),
    "networkx order": (lambda: Graph.from_edges(nx.Graph([(1, 0)]), X[:2]), "another order"),
    "names without ids": (lambda: Graph.from_edges(NAMED, X), "not integers from 0"),
    "unknown name": (lambda: Graph.from_edges(NAMED, FRAME.iloc[1:]), "'dan'"),
    "flat": (lambda: Graph.from_edges(INDEX, X[0]), r"x must be \[N, F\]"),
    "words": (lambda: Graph.from_edges(INDEX, X.astype(str)), "must be a table of numbers"),
    "large": (lambda: Graph.from_edges(INDEX, X * 1e30, normalize="none"), "largest value"),
}


@pytest.mark.parametrize("case", BAD)
def test_mistakes(case: str) -> None:
    act, words = BAD[case]
    with pytest.raises(UserError, match=words):
        act()
