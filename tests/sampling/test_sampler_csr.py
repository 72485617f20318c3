from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from cimage_dist import keyed
from cimage_dist.errors import UserError
from cimage_dist.sampling import csr_select
from cimage_dist.sampling.csr_sampler import Engine, SampledSubgraph, sample
from cimage_dist.sampling.csr_select import CsrGraph
from cimage_dist.sampling.hidden import HiddenEdges, hide
from tests.sampling.toy_csr import Csr, directed_pairs, make_csr, random_csr, star_csr

ENGINES: list[Engine] = ["numpy", "numba"]


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Engine:
    if request.param == "numba":
        pytest.importorskip("numba", reason="numba is not installed, so only the numpy engine runs")
    return request.param


def messages(sub: SampledSubgraph) -> dict[int, list[int]]:
    """Sources (gids) of the messages into every expanded node (gid)."""
    out: dict[int, list[int]] = {int(g): [] for g in sub.node_gid[: sum(sub.nodes_per_hop[:-1])]}
    for s, d in zip(sub.node_gid[sub.src].tolist(), sub.node_gid[sub.dst].tolist(), strict=True):
        out[d].append(s)
    return out


def neighbours(graph: Csr, v: int) -> list[int]:
    return graph[1][graph[0][v] : graph[0][v + 1]].tolist()


def test_layout_of_the_record(engine: Engine) -> None:
    graph = random_csr()
    seeds = np.array([7, 3, 7, 250, 3, 299])
    sub = sample(*graph, seeds, [4, 3], key=1, engine=engine)
    assert sub.node_gid[:4].tolist() == [7, 3, 250, 299]
    assert np.array_equal(sub.node_gid[sub.seed_bid], seeds)
    assert len(set(sub.node_gid.tolist())) == len(sub.node_gid) == sum(sub.nodes_per_hop)
    assert (np.diff(sub.dst) >= 0).all()
    assert sub.edges_per_hop == tuple(
        np.histogram(sub.dst, bins=np.cumsum([0, *sub.nodes_per_hop[:-1]]) - 0.5)[0].tolist()
    )
    assert np.array_equal(graph[1][sub.entry], sub.node_gid[sub.src])
    first = sub.nodes_per_hop[0] + sub.nodes_per_hop[1]
    assert (np.diff(sub.node_gid[4:first]) > 0).all() and (np.diff(sub.node_gid[first:]) > 0).all()
    for v, sources in messages(sub).items():
        fanout = 4 if v in seeds else 3
        assert len(set(sources)) == len(sources) == min(fanout, len(neighbours(graph, v)))
        assert set(sources) <= set(neighbours(graph, v))
    assert np.array_equal(sub.degree, np.diff(graph[0])[sub.node_gid])
    sampled = np.bincount(sub.dst, minlength=len(sub.node_gid))
    assert np.allclose(sub.weight, sub.degree[sub.dst] / sampled[sub.dst])
    assert (sample(*graph, seeds, [4, 3], key=1, engine=engine, rescale=False).weight == 1).all()


def test_unlimited_fanout_gives_complete_neighbourhoods(engine: Engine) -> None:
    graph = random_csr()
    sub = sample(*graph, np.array([0, 5]), [-1, -1, -1], key=1, engine=engine)
    got = messages(sub)
    reached, frontier = {0, 5}, {0, 5}
    for _ in range(2):
        frontier = {u for v in frontier for u in neighbours(graph, v)} - reached
        reached |= frontier
    assert set(got) == reached
    assert all(sources == neighbours(graph, v) for v, sources in got.items())
    assert (sub.weight == 1).all()


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
    h = x[sub.node_gid]
    for nonlinear in (False, True):
        out = x[sub.node_gid].copy()
        np.add.at(out, sub.dst, sub.weight[:, None] * (np.tanh(h) if nonlinear else h)[sub.src])
        h = out
    np.testing.assert_allclose(
        h[sub.seed_bid], full[seeds], rtol=1e-12
    )  # the same sums in the same order


@pytest.mark.parametrize("rate", [0.0, 0.4])
@pytest.mark.parametrize("fanouts", [[-1, -1], [3, 2], [6]])
def test_hidden_edges_are_never_seen_in_either_direction(
    engine: Engine, fanouts: list[int], rate: float
) -> None:
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
    sub = sample(*graph, np.arange(60), fanouts, key=2, hidden=hidden, engine=engine)
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
    unlisted = [
        sum((gid, s) not in listed for s in neighbours(graph, gid)) for gid in sub.node_gid.tolist()
    ]
    np.testing.assert_allclose(sub.degree, (1 - rate) * np.array(unlisted), rtol=1e-6)


def inclusion(
    graph: Csr,
    target: int,
    fanout: int,
    trials: int,
    engine: Engine,
    hidden: HiddenEdges | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """How often each neighbour, and each pair of the first ten, was drawn."""
    degree = len(neighbours(graph, target))
    single, double = np.zeros(degree, dtype=np.int64), np.zeros((10, 10), dtype=np.int64)
    place = {u: i for i, u in enumerate(neighbours(graph, target))}
    for key in range(trials):
        sub = sample(*graph, np.array([target]), [fanout], key=key, hidden=hidden, engine=engine)
        drawn = np.array([place[int(u)] for u in sub.node_gid[sub.src]])
        assert len(np.unique(drawn)) == len(drawn)
        single[drawn] += 1
        few = drawn[drawn < 10]
        double[few[:, None], few[None, :]] += 1
    return single, double


@pytest.mark.parametrize(
    ("degree", "fanout", "num_hidden"),
    [(12, 4, 0), (40, 5, 20), (200, 20, 0), (200, 8, 60), (400, 4, 390)],
)
def test_draws_are_uniform_without_replacement(
    engine: Engine, degree: int, fanout: int, num_hidden: int
) -> None:
    """Listed rows, drawn rows, and (last case) rows in which almost everything is hidden."""
    graph = star_csr(degree)
    trials = 1500
    unseen = np.arange(degree - num_hidden + 1, degree + 1)
    hidden = hide(degree + 1, np.zeros_like(unseen), unseen) if num_hidden else None
    single, double = inclusion(graph, 0, fanout, trials, engine, hidden)
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


def test_rescaled_sum_is_unbiased_with_a_keyed_hidden_share(engine: Engine) -> None:
    """E[sum of weights over sampled messages] is the visible degree, whose mean over keys is degree
    * (1 - rate).
    """
    graph = star_csr(500)
    totals = []
    for key in range(300):
        sub = sample(
            *graph,
            np.array([0]),
            [10],
            key=key,
            hidden=hide(501, extra_rate=0.3, extra_key=key),
            engine=engine,
        )
        assert sub.edges_per_hop == (10,)
        totals.append(sub.weight.sum())
    assert np.allclose(totals, 350)


def test_draws_do_not_depend_on_the_batch(engine: Engine) -> None:
    graph = random_csr(400, 8000)
    alone = messages(sample(*graph, np.array([11]), [5], key=9, engine=engine))[11]
    together = sample(*graph, np.array([300, 11, 4, 250]), [5, 3], key=9, engine=engine)
    reverse = sample(*graph, np.array([250, 4, 11, 300]), [5, 3], key=9, engine=engine)
    assert messages(together)[11] == alone
    assert messages(together) == {v: messages(reverse)[v] for v in messages(together)}
    assert messages(sample(*graph, np.array([11]), [5], key=10, engine=engine))[11] != alone


def test_smaller_fanouts_keep_subsets(engine: Engine) -> None:
    graph = star_csr(1000)
    large = sample(*graph, np.array([0]), [20, 1], key=3, engine=engine)
    small = sample(*graph, np.array([0]), [7, 20], key=3, engine=engine)
    assert set(messages(small)[0]) < set(messages(large)[0])


@pytest.mark.parametrize("width", [np.int32, np.int64])
def test_numba_and_numpy_agree(width: type) -> None:
    pytest.importorskip("numba", reason="numba is not installed, so there is nothing to compare")
    rng = np.random.default_rng(3)
    hubs = rng.integers(0, 5, 4000), rng.integers(0, 2000, 4000)
    indptr, indices = make_csr(
        2000,
        np.concatenate([hubs[0], rng.integers(0, 2000, 9000)]),
        np.concatenate([hubs[1], rng.integers(0, 2000, 9000)]),
    )
    indices = indices.astype(width)
    rows = np.repeat(np.arange(2000), np.diff(indptr))
    assert np.diff(indptr).max() > 500
    listed = rng.permutation(len(rows))[:700]
    all_of_a_hub = np.arange(indptr[1], indptr[2] - 3)
    hidings = [
        None,
        hide(2000, rows[listed], indices[listed].astype(np.int64)),
        hide(2000, rows[listed], indices[listed].astype(np.int64), 0.5, 11),
        hide(2000, rows[all_of_a_hub], indices[all_of_a_hub].astype(np.int64), 0.2, 12),
    ]
    for hidden in hidings:
        for fanouts in ([7, 3], [-1, 2], [60], [1, 1, 1]):
            a, b = (
                sample(
                    indptr, indices, np.arange(0, 300, 2), fanouts, key=5, hidden=hidden, engine=e
                )
                for e in ENGINES
            )
            for name in SampledSubgraph.__dataclass_fields__:
                np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


def test_compiled_bits_are_the_keyed_ones() -> None:
    pytest.importorskip("numba", reason="numba is not installed")
    from cimage_dist.sampling import csr_numba

    key = keyed.derive(1, 2)
    ids = torch.tensor([0, 1, 12345, 2**62, -1])
    expected = keyed.bits(key, ids).numpy().astype(np.uint64)
    assert [
        int(csr_numba.bits(np.uint64(key & (2**64 - 1)), np.uint64(int(i) & (2**64 - 1))))
        for i in ids
    ] == expected.tolist()


def test_hub_of_a_large_star_costs_its_fanout(
    engine: Engine, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """From a read-only mapped file; the hub's 100,000 entries are not listed."""
    folder = tmp_path_factory.mktemp("star")
    for name, array in zip(("indptr", "indices"), star_csr(100_000), strict=True):
        np.save(folder / f"{name}.npy", array)
    indptr, indices = (
        np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("indptr", "indices")
    )
    sub = sample(indptr, indices, np.array([5]), [10, 10, 10], key=0, engine=engine)
    assert sub.edges_per_hop == (1, 10, sub.nodes_per_hop[2])
    assert sub.weight[1:11].tolist() == [10_000.0] * 10
    selection = csr_select.select(
        CsrGraph(np.asarray(indptr), np.asarray(indices)),
        np.array([0]),
        10,
        128,
        csr_select.draw_keys(0),
        None,
    )
    assert selection.visible.tolist() == [100_000.0]


def test_tiny_and_empty_graphs(engine: Engine) -> None:
    edge = make_csr(4, np.array([1]), np.array([2]))
    sub = sample(*edge, np.array([3, 1, 0]), [5, 5, 5], key=0, engine=engine)
    assert sub.node_gid.tolist() == [3, 1, 0, 2]
    assert messages(sub) == {3: [], 1: [2], 0: [], 2: [1]}
    assert sub.nodes_per_hop == (3, 1, 0, 0) and sub.edges_per_hop == (1, 1, 0)
    hidden = sample(
        *edge,
        np.array([1, 2]),
        [-1],
        key=0,
        hidden=hide(4, np.array([2]), np.array([1])),
        engine=engine,
    )
    assert len(hidden.src) == 0 and hidden.degree.tolist() == [0, 0]
    nothing = sample(*edge, np.empty(0, dtype=np.int64), [2, 2], key=0, engine=engine)
    assert len(nothing.node_gid) == len(nothing.src) == 0 and nothing.nodes_per_hop == (0, 0, 0)


def test_bad_input_is_explained() -> None:
    graph = random_csr()
    for fanouts in ([], [0], [5, -2]):
        with pytest.raises(UserError, match="fanouts"):
            sample(*graph, np.array([0]), fanouts, key=0)
    with pytest.raises(UserError, match="1 of 2 seed nodes"):
        sample(*graph, np.array([0, 300]), [2], key=0)
