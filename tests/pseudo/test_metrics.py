"""Clustering scores from contingency tables, against scikit-learn and networkx."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from sklearn.metrics import adjusted_rand_score, f1_score, normalized_mutual_info_score

from cimage_dist import pseudo as metrics
from cimage_dist.errors import UserError
from cimage_dist.pseudo import (
    ari,
    cluster_scores,
    contingency,
    hard_modularity,
    macro_f1,
    matched_accuracy,
    nmi,
)
from cimage_dist.types import Topology


def mapped(pred: np.ndarray, true: np.ndarray, table: torch.Tensor) -> np.ndarray:
    """Predictions in class ids under the matching; -1 where a cluster has no class."""
    clusters, classes = linear_sum_assignment(table.numpy(), maximize=True)
    lookup = np.full(table.shape[0], -1)
    lookup[clusters] = classes
    return lookup[pred]


def check_against_sklearn(pred: np.ndarray, true: np.ndarray, num_pred: int, num_true: int) -> None:
    table = contingency(torch.tensor(pred), torch.tensor(true), num_pred, num_true)
    known = true >= 0
    pred, true = pred[known], true[known]
    assert nmi(table) == pytest.approx(normalized_mutual_info_score(true, pred), abs=1e-9)
    assert ari(table) == pytest.approx(adjusted_rand_score(true, pred), abs=1e-12)
    guess = mapped(pred, true, table)
    assert matched_accuracy(table) == pytest.approx((guess == true).mean(), abs=1e-12)
    occurring = np.unique(true)
    occurring_table = table[:, torch.tensor(occurring)]
    guess = np.append(occurring, -1)[mapped(pred, true, occurring_table)]
    assert macro_f1(table) == pytest.approx(
        f1_score(true, guess, labels=occurring, average="macro", zero_division=0), abs=1e-12
    )


@pytest.mark.parametrize(("num_pred", "num_true"), [(5, 5), (8, 3), (3, 8), (1, 4), (4, 1), (1, 1)])
def test_scores_match_sklearn(num_pred: int, num_true: int) -> None:
    rng = np.random.default_rng(num_pred * 10 + num_true)
    true = rng.integers(0, num_true, 300)
    pred = np.where(rng.random(300) < 0.6, true % num_pred, rng.integers(0, num_pred, 300))
    check_against_sklearn(pred, true, num_pred, num_true)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-1, 3)), min_size=1, max_size=40))
@settings(max_examples=150, deadline=None)
def test_scores_match_sklearn_on_any_labels(pairs: list[tuple[int, int]]) -> None:
    pred, true = np.array(pairs).T
    if (true >= 0).any():
        check_against_sklearn(pred, true, 5, 4)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=40),
    st.permutations(range(5)),
)
@settings(max_examples=60, deadline=None)
def test_scores_do_not_depend_on_cluster_names_and_stay_in_range(
    pairs: list[tuple[int, int]], names: list[int]
) -> None:
    pred, true = torch.tensor(pairs).T
    a = cluster_scores(contingency(pred, true, 5, 4))
    b = cluster_scores(contingency(torch.tensor(names)[pred], true, 5, 4))
    for name in ("acc", "nmi", "ari"):  # f1 may differ between equally good matchings
        assert a[name] == pytest.approx(b[name], abs=1e-12)
    assert all(0 <= a[name] <= 1 for name in ("acc", "nmi", "f1")) and -1 <= a["ari"] <= 1


def test_relabelled_truth_is_perfect_with_an_empty_cluster() -> None:
    true = torch.tensor([0, 0, 1, 1, 2])
    table = contingency(torch.tensor([3, 0, 1])[true], true, 5, 3)
    assert table.sum(1).tolist() == [2, 1, 0, 2, 0]
    assert cluster_scores(table) == {"acc": 1.0, "nmi": pytest.approx(1.0), "ari": 1.0, "f1": 1.0}


def test_unmatched_clusters_are_wrong() -> None:
    table = torch.tensor([[6], [3], [1]])
    assert matched_accuracy(table) == 0.6
    assert macro_f1(table) == pytest.approx(2 * 6 / (6 + 10))


def test_ari_of_a_table_too_large_for_64_bit_products() -> None:
    table = torch.tensor([[50_000_000, 1_000], [2_000, 60_000_000]])
    n = 1.1e8
    assert ari(table) == pytest.approx(1 - 2 * 3_000 / (n / 2), abs=1e-5)


def test_unknown_labels_are_left_out_and_wrong_ids_named() -> None:
    table = contingency(torch.tensor([0, 1, 7]), torch.tensor([1, 0, -1]), 2, 2)
    assert table.dtype == torch.int64 and table.tolist() == [[0, 1], [1, 0]]
    with pytest.raises(UserError, match=r"1 cluster ids lie outside 0..1, the first is 7"):
        contingency(torch.tensor([0, 7]), torch.tensor([1, 0]), 2, 2)
    with pytest.raises(UserError, match="at least one node with a known label"):
        cluster_scores(contingency(torch.tensor([0]), torch.tensor([-1]), 2, 2))


def topology_of(graph: nx.Graph) -> Topology:
    adjacency = nx.to_scipy_sparse_array(graph, nodelist=sorted(graph), format="csr")
    return Topology(
        torch.tensor(adjacency.indptr, dtype=torch.int64),
        torch.tensor(adjacency.indices, dtype=torch.int32),
    )


@pytest.mark.parametrize("edges_per_chunk", [1, 7, 1 << 20])
def test_modularity_matches_networkx(edges_per_chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_EDGES_PER_CHUNK", edges_per_chunk)
    graph = nx.gnm_random_graph(40, 70, seed=1)
    graph.add_nodes_from(range(40, 44))  # isolated, at the end
    labels = torch.tensor(np.random.default_rng(0).integers(0, 5, 44))
    labels[labels == 2] = 3  # an empty cluster
    parts = [set(np.flatnonzero(labels.numpy() == c)) for c in range(5)]
    assert hard_modularity(labels, topology_of(graph)) == pytest.approx(
        nx.community.modularity(graph, parts), abs=1e-12
    )


def test_modularity_of_trivial_partitions() -> None:
    graph = nx.karate_club_graph()
    graph = nx.Graph(graph.edges)
    assert hard_modularity(torch.zeros(34, dtype=torch.int64), topology_of(graph)) == 0.0
    edgeless = Topology(torch.zeros(4, dtype=torch.int64), torch.zeros(0, dtype=torch.int32))
    assert hard_modularity(torch.tensor([0, 1, 2]), edgeless) == 0.0
    with pytest.raises(UserError, match="2 labels for a graph of 3"):
        hard_modularity(torch.tensor([0, 1]), edgeless)
    with pytest.raises(UserError, match="1 nodes have no cluster"):
        hard_modularity(torch.tensor([-1] + [0] * 33), topology_of(graph))
