from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from cimage_dist.errors import UserError
from cimage_dist.sampling import seeds as seeds_module
from cimage_dist.sampling.seeds import (
    SeedBatch,
    SeedSchedule,
    UpperEntries,
    communities,
    has_edge,
    rank_slice,
)
from tests.sampling.toy_csr import Csr, directed_pairs, make_csr, random_csr, star_csr


def undirected(graph: Csr) -> set[tuple[int, int]]:
    return {(u, v) for u, v in directed_pairs(*graph) if u < v}


def epoch_edges(schedule: SeedSchedule, epoch: int) -> list[tuple[int, int]]:
    """(min, max) of every pair of weight 1, in order."""
    out = []
    for step in range(epoch * schedule.steps_per_epoch, (epoch + 1) * schedule.steps_per_epoch):
        batch = schedule.batch(step)
        assert len(batch.u) == schedule.batch_edges
        real = batch.weight > 0
        out += list(
            zip(
                np.minimum(batch.u, batch.v)[real].tolist(),
                np.maximum(batch.u, batch.v)[real].tolist(),
                strict=True,
            )
        )
    return out


@pytest.mark.parametrize("batch_edges", [1, 2, 3, 7, 64, 10_000])
@pytest.mark.parametrize(
    "graph",
    [
        random_csr(40, 60),
        star_csr(11),
        make_csr(2, np.array([0]), np.array([1])),
        make_csr(9, np.array([5, 6]), np.array([6, 7])),
    ],
)
def test_every_undirected_edge_once_an_epoch(graph: Csr, batch_edges: int) -> None:
    schedule = SeedSchedule(*graph, batch_edges=batch_edges, seed=3)
    assert schedule.num_edges == len(graph[1]) // 2
    for epoch in (0, 1, 5):
        edges = epoch_edges(schedule, epoch)
        assert len(edges) == schedule.num_edges
        assert set(edges) == undirected(graph)


def test_epochs_and_seeds_differ_and_steps_repeat() -> None:
    graph = random_csr()
    schedule = SeedSchedule(*graph, batch_edges=64, seed=3)
    assert epoch_edges(schedule, 0) != epoch_edges(schedule, 1)
    assert epoch_edges(schedule, 0) != epoch_edges(SeedSchedule(*graph, batch_edges=64, seed=4), 0)
    again = SeedSchedule(*graph, batch_edges=64, seed=3)
    assert np.array_equal(schedule.batch(17).u, again.batch(17).u)


def test_padding_repeats_an_edge_of_the_batch_with_weight_zero() -> None:
    graph = random_csr()
    schedule = SeedSchedule(*graph, batch_edges=100, seed=0)
    batch = schedule.batch(schedule.steps_per_epoch - 1)
    real = schedule.num_edges % 100
    assert 0 < real < 100 and batch.total == real
    assert (batch.u[real:] == batch.u[real - 1]).all() and (
        batch.v[real:] == batch.v[real - 1]
    ).all()
    assert schedule.negatives(schedule.steps_per_epoch - 1).total == real


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("total", [1, 2, 3, 7, 64])
def test_slices_of_all_ranks_make_the_whole(total: int, world: int) -> None:
    slices = [rank_slice(total, rank, world) for rank in range(world)]
    assert [i for begin, end in slices for i in range(begin, end)] == list(range(total))
    sizes = [end - begin for begin, end in slices]
    assert max(sizes) - min(sizes) <= 1


def test_first_endpoint_is_degree_distributed() -> None:
    graph = star_csr(2000)
    schedule = SeedSchedule(*graph, batch_edges=2000, seed=0)
    hub_first = int((schedule.batch(0).u == 0).sum())
    assert abs(hub_first - 1000) < 4 * np.sqrt(500)  # binomial(2000, 1/2)


def test_upper_entries_are_numbered_row_by_row() -> None:
    indptr, indices = random_csr(101, 400)
    rows = np.repeat(np.arange(101), np.diff(indptr))
    above = indices > rows
    for rows_apart in (1, 7, 101, 1000):
        upper = UpperEntries(indptr, indices, rows_apart)
        assert upper.total == above.sum()
        row, column = upper.ends(np.arange(upper.total))
        assert np.array_equal(row, rows[above]) and np.array_equal(column, indices[above])


def test_half_a_byte_is_kept_for_a_node() -> None:
    assert SeedSchedule(*random_csr(3200, 9000), batch_edges=8, seed=0).upper.before.nbytes == 1608


def test_has_edge_agrees_with_the_edge_set() -> None:
    graph = random_csr(60, 200)
    u, v = (x.reshape(-1) for x in np.meshgrid(np.arange(60), np.arange(60), indexing="ij"))
    known = directed_pairs(*graph)
    expected = np.array([pair in known for pair in zip(u.tolist(), v.tolist(), strict=True)])
    assert np.array_equal(has_edge(*graph, u, v), expected)


def all_negatives(
    schedule: SeedSchedule, steps: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    batches = [schedule.negatives(step) for step in range(steps)]
    return (
        np.concatenate([b.u for b in batches]),
        np.concatenate([b.v for b in batches]),
        np.concatenate([b.weight for b in batches]),
    )


def test_negatives_are_uniform_non_edges() -> None:
    graph = random_csr(20, 60)
    schedule = SeedSchedule(*graph, batch_edges=1, seed=1)
    schedule = SeedSchedule(*graph, batch_edges=schedule.num_edges, seed=1)
    u, v, weight = all_negatives(schedule, 300)
    assert (weight == 1).all() and (u != v).all()
    known = directed_pairs(*graph)
    counts = np.bincount(u * 20 + v, minlength=400)
    allowed = np.array([i != j and (i, j) not in known for i in range(20) for j in range(20)])
    assert counts[~allowed].sum() == 0
    assert stats.chisquare(counts[allowed]).pvalue > 1e-4


def test_negatives_of_a_complete_graph_have_weight_zero() -> None:
    i, j = np.triu_indices(5, 1)
    schedule = SeedSchedule(*make_csr(5, i, j), batch_edges=8, seed=0)
    batch = schedule.negatives(0)
    assert batch.total == 0 and (batch.u != batch.v).all()


def test_negatives_are_keyed_by_position(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeds_module, "REJECT_UP_TO_NODES", 10)
    schedule = SeedSchedule(*random_csr(), batch_edges=64, seed=0)
    assert not schedule.has_rejection
    whole, part = schedule.negatives(3), schedule.negatives(3, 10, 20)
    assert np.array_equal(whole.u[10:20], part.u) and np.array_equal(whole.v[10:20], part.v)
    assert (whole.u != whole.v).all() and whole.total == 64
    assert not np.array_equal(whole.u, schedule.negatives(4).u)


def test_bad_input_is_explained() -> None:
    with pytest.raises(UserError, match="no edges"):
        SeedSchedule(np.zeros(4, dtype=np.int64), np.empty(0, dtype=np.int32), 4, 0)
    with pytest.raises(UserError, match="batch_edges is 0"):
        SeedSchedule(*random_csr(), batch_edges=0, seed=0)
    with pytest.raises(UserError, match="not symmetric"):
        SeedSchedule(np.array([0, 1, 1]), np.array([1], dtype=np.int32), 4, 0)


def two_cliques(size: int) -> Csr:
    """Node i is in clique i % 2; one edge joins the two."""
    pairs = [(u, v) for u in range(2 * size) for v in range(u) if (u - v) % 2 == 0] + [(0, 1)]
    u, v = np.array(pairs).T
    return make_csr(2 * size, u, v)


def test_cliques_are_communities() -> None:
    group = communities(*two_cliques(12))
    assert len(set(group[::2].tolist())) == len(set(group[1::2].tolist())) == 1
    assert group[0] != group[1]


def test_a_node_without_neighbours_is_a_community() -> None:
    indptr, indices = np.array([0, 1, 2, 2]), np.array([1, 0])
    assert communities(indptr, indices)[2] == 2


def test_pairs_of_a_community_are_on_one_rank() -> None:
    """The order changes neither the pairs nor their weights, and ranks touch fewer nodes."""
    graph = two_cliques(12)
    whole = SeedSchedule(*graph, batch_edges=40, seed=3).batch(0)
    ordered = whole.ordered(communities(*graph))

    def pairs(batch: SeedBatch) -> list[tuple[int, int, float]]:
        return sorted(zip(batch.u.tolist(), batch.v.tolist(), batch.weight.tolist(), strict=True))

    def touched(batch: SeedBatch) -> int:
        halves = [batch.part(*rank_slice(40, rank, 2)) for rank in (0, 1)]
        return sum(len(np.union1d(half.u, half.v)) for half in halves)

    assert pairs(ordered) == pairs(whole)
    assert touched(ordered) < touched(whole)
    assert whole.ordered(None) is whole
