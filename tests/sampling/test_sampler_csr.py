from __future__ import annotations

import numba
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from cimage_dist import keyed
from cimage_dist.errors import UserError
from cimage_dist.sampling import csr
from cimage_dist.sampling.csr import CsrGraph
from cimage_dist.sampling.hidden import HiddenEdges, hide
from cimage_dist.sampling.local_ids import LocalIds
from cimage_dist.sampling.sampler import NeighbourSampler
from cimage_dist.types import View
from tests.sampling import oracle
from tests.sampling.toy_csr import Csr, directed_pairs, make_csr, random_csr, star_csr


def sample(
    indptr: NDArray[np.int64],
    indices: NDArray[np.integer],
    seeds: NDArray[np.int64],
    fanouts: list[int],
    *,
    key: int,
    hidden: HiddenEdges | None = None,
    rescale: bool = True,
) -> View:
    one = NeighbourSampler(indptr, indices, fanouts, backend="csr", rescale=rescale)
    return one.sample(seeds, key, hidden)


def ends(view: View) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sources and targets of the messages, gids."""
    assert view.gids is not None
    return view.gids[view.edges.src].numpy(), view.gids[view.edges.dst].numpy()


def messages(view: View) -> dict[int, list[int]]:
    """Sources (gids) of the messages into every expanded node (gid)."""
    assert view.gids is not None and view.hops is not None
    out: dict[int, list[int]] = {g: [] for g in view.gids[: sum(view.hops.nodes[:-1])].tolist()}
    for s, d in zip(*(part.tolist() for part in ends(view)), strict=True):
        out[d].append(s)
    return out


def neighbours(graph: Csr, v: int) -> list[int]:
    return graph[1][graph[0][v] : graph[0][v + 1]].tolist()


def test_layout_of_the_record() -> None:
    graph = random_csr()
    seeds = np.array([7, 3, 7, 250, 3, 299])
    view = sample(*graph, seeds, [4, 3], key=1)
    gids, edges, hops = view.gids, view.edges, view.hops
    assert gids is not None and hops is not None and edges.weight is not None
    assert edges.degree is not None
    assert gids[:4].tolist() == [7, 3, 250, 299]
    assert view.node_gids.tolist() == seeds.tolist()
    assert len(set(gids.tolist())) == len(gids) == sum(hops.nodes) == view.x.shape[0]
    assert bool((edges.dst.diff() >= 0).all())
    bins = np.cumsum([0, *hops.nodes[:-1]]) - 0.5
    assert hops.messages == tuple(np.histogram(edges.dst, bins=bins)[0].tolist())
    first = hops.nodes[0] + hops.nodes[1]
    assert bool((gids[4:first].diff() > 0).all()) and bool((gids[first:].diff() > 0).all())
    for v, sources in messages(view).items():
        fanout = 4 if v in seeds else 3
        assert len(set(sources)) == len(sources) == min(fanout, len(neighbours(graph, v)))
        assert sources == sorted(set(sources) & set(neighbours(graph, v)))
    assert np.array_equal(edges.degree, np.diff(graph[0])[gids])
    sampled = torch.bincount(edges.dst, minlength=len(gids))
    assert np.allclose(edges.weight, edges.degree[edges.dst] / sampled[edges.dst])
    assert sample(*graph, seeds, [4, 3], key=1, rescale=False).edges.weight is None


def test_unlimited_fanout_gives_complete_neighbourhoods() -> None:
    graph = random_csr()
    sub = sample(*graph, np.array([0, 5]), [-1, -1, -1], key=1)
    got = messages(sub)
    reached, frontier = {0, 5}, {0, 5}
    for _ in range(2):
        frontier = {u for v in frontier for u in neighbours(graph, v)} - reached
        reached |= frontier
    assert set(got) == reached
    assert all(sources == neighbours(graph, v) for v, sources in got.items())
    assert sub.edges.weight is None


def test_message_passing_on_the_subgraph_equals_the_full_graph() -> None:
    """Two rounds of neighbour sums, nonlinear in between, with two hops: seeds come out as on the
    full graph.
    """
    graph = random_csr()
    x = np.random.default_rng(0).normal(size=(300, 3))
    dense = np.zeros((300, 300))
    rows = np.repeat(np.arange(300), np.diff(graph[0]))
    dense[rows, graph[1]] = 1
    full = x + dense @ np.tanh(x + dense @ x)
    seeds = np.arange(0, 40, 3)
    sub = sample(*graph, seeds, [-1, -1], key=0)
    h = x[sub.gids]
    for nonlinear in (False, True):
        out = x[sub.gids].copy()
        np.add.at(out, sub.edges.dst, (np.tanh(h) if nonlinear else h)[sub.edges.src])
        h = out
    # The same sums in the same order.
    np.testing.assert_allclose(h[sub.nodes], full[seeds], rtol=1e-12)


@pytest.mark.parametrize("rate", [0.0, 0.4])
@pytest.mark.parametrize("fanouts", [[-1, -1], [3, 2], [6]])
def test_hidden_edges_are_never_seen_in_either_direction(fanouts: list[int], rate: float) -> None:
    graph = random_csr(200, 2000)
    rng = np.random.default_rng(1)
    rows = np.repeat(np.arange(200), np.diff(graph[0]))
    chosen = rng.permutation(len(rows))[:300]
    u, v = rows[chosen], graph[1][chosen].astype(np.int64)
    hidden = hide(200, u, v, rate, keyed.stream(0, "mask-extra", 4))
    listed = set(zip(u.tolist(), v.tolist(), strict=True)) | set(
        zip(v.tolist(), u.tolist(), strict=True)
    )
    pairs = rows * 200 + graph[1]
    smaller, larger = np.minimum(pairs // 200, pairs % 200), np.maximum(pairs // 200, pairs % 200)
    extra = keyed.uniform(hidden.extra_key, torch.from_numpy(smaller * 200 + larger)).numpy() < rate
    unseen = listed | set(zip(rows[extra].tolist(), graph[1][extra].tolist(), strict=True))
    assert all((b, a) in unseen for a, b in unseen)
    sub = sample(*graph, np.arange(60), fanouts, key=2, hidden=hidden)
    visible = directed_pairs(*graph) - unseen
    for target, sources in messages(sub).items():
        allowed = [s for s in neighbours(graph, target) if (target, s) in visible]
        fanout = fanouts[0] if target < 60 else fanouts[-1]
        assert set(sources) <= set(allowed)
        # The fan-out counts visible neighbours: hiding takes nothing away from a row that has
        # enough left.
        assert len(sources) == (len(allowed) if fanout < 0 else min(fanout, len(allowed)))
    # One degree for a node wherever it stands in a subgraph: that without listed edges, times the
    # visible share.
    assert sub.gids is not None
    unlisted = [
        sum((gid, s) not in listed for s in neighbours(graph, gid)) for gid in sub.gids.tolist()
    ]
    np.testing.assert_allclose(sub.edges.degree, (1 - rate) * np.array(unlisted), rtol=1e-6)


def inclusion(
    graph: Csr, target: int, fanout: int, trials: int, hidden: HiddenEdges | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """How often each neighbour, and each pair of the first ten, was drawn."""
    degree = len(neighbours(graph, target))
    single, double = np.zeros(degree, dtype=np.int64), np.zeros((10, 10), dtype=np.int64)
    place = {u: i for i, u in enumerate(neighbours(graph, target))}
    for key in range(trials):
        sub = sample(*graph, np.array([target]), [fanout], key=key, hidden=hidden)
        drawn = np.array([place[u] for u in ends(sub)[0].tolist()])
        assert len(np.unique(drawn)) == len(drawn)
        single[drawn] += 1
        few = drawn[drawn < 10]
        double[few[:, None], few[None, :]] += 1
    return single, double


@pytest.mark.parametrize(
    ("degree", "fanout", "num_hidden"),
    [(12, 4, 0), (40, 5, 20), (200, 20, 0), (200, 8, 60), (400, 4, 390)],
)
def test_draws_are_uniform_without_replacement(degree: int, fanout: int, num_hidden: int) -> None:
    """Listed rows, drawn rows, and (last case) rows in which almost everything is hidden."""
    graph = star_csr(degree)
    trials = 1500
    unseen = np.arange(degree - num_hidden + 1, degree + 1)
    hidden = hide(degree + 1, np.zeros_like(unseen), unseen) if num_hidden else None
    single, double = inclusion(graph, 0, fanout, trials, hidden)
    left = degree - num_hidden
    assert single[left:].sum() == 0 and single.sum() == trials * fanout
    share = fanout / left
    z = (single[:left] - trials * share) / np.sqrt(trials * share * (1 - share))
    # Counts of one draw sum to the fan-out, hence left - 1 degrees of freedom and the factor (left
    # - 1) / left.
    assert stats.chi2.sf((z**2).sum() * (left - 1) / left, left - 1) > 1e-4
    pair_share = fanout * (fanout - 1) / (left * (left - 1))
    pairs = double[np.triu_indices(min(10, left), 1)]
    z = (pairs - trials * pair_share) / np.sqrt(trials * pair_share * (1 - pair_share))
    assert np.abs(z).max() < 4.5  # 45 normal deviates


def test_rescaled_sum_is_unbiased_with_a_keyed_hidden_share() -> None:
    """E[sum of weights over sampled messages] is the visible degree, whose mean over keys is degree
    * (1 - rate).
    """
    graph = star_csr(500)
    totals = []
    for key in range(300):
        sub = sample(
            *graph, np.array([0]), [10], key=key, hidden=hide(501, extra_rate=0.3, extra_key=key)
        )
        assert sub.edges.weight is not None and len(sub.edges.weight) == 10
        totals.append(sub.edges.weight.sum())
    assert np.allclose(totals, 350)


def test_draws_do_not_depend_on_the_batch() -> None:
    graph = random_csr(400, 8000)
    alone = messages(sample(*graph, np.array([11]), [5], key=9))[11]
    together = sample(*graph, np.array([300, 11, 4, 250]), [5, 3], key=9)
    reverse = sample(*graph, np.array([250, 4, 11, 300]), [5, 3], key=9)
    assert messages(together)[11] == alone
    assert messages(together) == {v: messages(reverse)[v] for v in messages(together)}
    assert messages(sample(*graph, np.array([11]), [5], key=10))[11] != alone


def test_smaller_fanouts_keep_subsets() -> None:
    graph = star_csr(1000)
    large = sample(*graph, np.array([0]), [20, 1], key=3)
    small = sample(*graph, np.array([0]), [7, 20], key=3)
    assert set(messages(small)[0]) < set(messages(large)[0])


@pytest.mark.parametrize("width", [np.int32, np.int64])
def test_compiled_rows_are_those_of_the_oracle(width: type) -> None:
    rng = np.random.default_rng(3)
    hubs = rng.integers(0, 5, 4000), rng.integers(0, 2000, 4000)
    indptr, indices = make_csr(
        2000,
        np.concatenate([hubs[0], rng.integers(0, 2000, 9000)]),
        np.concatenate([hubs[1], rng.integers(0, 2000, 9000)]),
    )
    graph = CsrGraph(indptr, indices.astype(width))
    rows = np.repeat(np.arange(2000), np.diff(indptr))
    assert np.diff(indptr).max() > 500
    listed = rng.permutation(len(rows))[:700]
    all_of_a_hub = np.arange(indptr[1], indptr[2] - 3)
    hidings = [
        hide(2000),
        hide(2000, rows[listed], indices[listed].astype(np.int64)),
        hide(2000, rows[listed], indices[listed].astype(np.int64), 0.5, 11),
        hide(2000, rows[all_of_a_hub], indices[all_of_a_hub].astype(np.int64), 0.2, 12),
    ]
    targets, keys = rng.permutation(300), csr.draw_keys(5)
    for hidden in hidings:
        for fanout in (-1, 1, 7, 60):
            given = graph, targets, fanout, csr.list_bound([fanout, 3]), keys, hidden
            got, want = csr.select(*given), oracle.select(*given)
            for name in csr.Selection._fields:
                np.testing.assert_array_equal(getattr(got, name), getattr(want, name), name)


@pytest.mark.parametrize("num_nodes", [2000, 10**12])
def test_local_ids_by_table_and_by_hash(num_nodes: int) -> None:
    rng = np.random.default_rng(4)
    ids, gids = LocalIds(num_nodes), rng.integers(0, 2000, (3, 700)) * (num_nodes // 2000)
    first = ids.add(gids[0], ascending=False)
    assert ids.nodes.tolist() == list(dict.fromkeys(gids[0].tolist()))
    assert np.array_equal(ids.nodes[first], gids[0])
    for columns in gids[1:]:
        known = ids.nodes
        found = ids.add(columns.astype(np.int32) if num_nodes == 2000 else columns)
        fresh, expected = oracle.relabel(known, columns)
        assert np.array_equal(found, expected)
        assert np.array_equal(ids.nodes, np.concatenate([known, fresh]))


def test_compiled_words_are_the_keyed_ones() -> None:
    key = keyed.derive(1, 2)
    ids = torch.tensor([0, 1, 12345, 2**62, -1])
    compiled = numba.njit(lambda key, item: keyed.word(key, item))
    expected = keyed.bits(key, ids).tolist()
    assert [compiled(key, i) for i in ids.tolist()] == expected
    assert keyed.word(key, ids.numpy()).tolist() == expected
    low = (1 << 64) - 1  # of a Python integer the lower 64 bits count
    assert [keyed.word(key, i) & low for i in ids.tolist()] == [x & low for x in expected]


def test_hub_of_a_large_star_costs_its_fanout(tmp_path_factory: pytest.TempPathFactory) -> None:
    """From a read-only mapped file; the hub's 100,000 entries are not listed."""
    folder = tmp_path_factory.mktemp("star")
    for name, array in zip(("indptr", "indices"), star_csr(100_000), strict=True):
        np.save(folder / f"{name}.npy", array)
    indptr, indices = (
        np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("indptr", "indices")
    )
    sub = sample(indptr, indices, np.array([5]), [10, 10, 10], key=0)
    assert sub.hops is not None and sub.edges.weight is not None
    assert sub.hops.messages == (1, 10, sub.hops.nodes[2])
    assert sub.edges.weight[1:11].tolist() == [10_000.0] * 10
    graph = CsrGraph(np.asarray(indptr), np.asarray(indices))
    selection = csr.select(graph, np.array([0]), 10, 128, csr.draw_keys(0), hide(100_001))
    assert selection.visible.tolist() == [100_000.0]


def test_tiny_and_empty_graphs() -> None:
    edge = make_csr(4, np.array([1]), np.array([2]))
    sub = sample(*edge, np.array([3, 1, 0]), [5, 5, 5], key=0)
    assert sub.gids is not None and sub.gids.tolist() == [3, 1, 0, 2]
    assert messages(sub) == {3: [], 1: [2], 0: [], 2: [1]}
    assert sub.hops == ((3, 1, 0, 0), (1, 1, 0))
    hidden = sample(
        *edge, np.array([1, 2]), [-1], key=0, hidden=hide(4, np.array([2]), np.array([1]))
    )
    assert hidden.edges.degree is not None
    assert len(hidden.edges.src) == 0 and hidden.edges.degree.tolist() == [0, 0]
    nothing = sample(*edge, np.empty(0, dtype=np.int64), [2, 2], key=0)
    assert nothing.hops is not None and nothing.hops.nodes == (0, 0, 0)
    assert nothing.x.shape[0] == len(nothing.edges.src) == 0


def test_bad_input_is_explained() -> None:
    graph = random_csr()
    for fanouts in ([], [0], [5, -2]):
        with pytest.raises(UserError, match="fanouts"):
            sample(*graph, np.array([0]), fanouts, key=0)
    with pytest.raises(UserError, match="1 of 2 seed nodes"):
        sample(*graph, np.array([0, 300]), [2], key=0)
