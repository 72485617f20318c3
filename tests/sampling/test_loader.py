from __future__ import annotations

import multiprocessing

import numpy as np
import pytest
import torch

from cimage_dist import keyed
from cimage_dist.errors import UserError
from cimage_dist.sampling import seeds as seeds_module
from cimage_dist.sampling.loader import BatchLoader, BatchSource
from cimage_dist.types import SampledBatch
from tests.sampling.toy_csr import make_csr, random_csr, star_csr

TENSORS = ("node_gid", "degree", "pos", "pos_weight", "neg", "neg_weight")


def flatten(batch: SampledBatch) -> list[torch.Tensor]:
    edges = [batch.edges.src, batch.edges.dst] + (
        [] if batch.edges.weight is None else [batch.edges.weight]
    )
    return [getattr(batch, name) for name in TENSORS] + edges


def assert_same(first: list[SampledBatch], second: list[SampledBatch]) -> None:
    assert [b.step for b in first] == [b.step for b in second]
    for a, b in zip(first, second, strict=True):
        assert (a.nodes_per_hop, a.edges_per_hop, a.global_pos, a.global_neg) == (
            b.nodes_per_hop,
            b.edges_per_hop,
            b.global_pos,
            b.global_neg,
        )
        assert len(flatten(a)) == len(flatten(b)) and all(
            torch.equal(x, y) for x, y in zip(flatten(a), flatten(b), strict=True)
        )


def make_source(**options: object) -> BatchSource:
    defaults: dict[str, object] = {
        "fanouts": [4, 3],
        "batch_edges": 64,
        "seed": 2,
        "hide_rate": 0.2,
        "backend": "csr",
    }
    return BatchSource(*random_csr(), **(defaults | options))  # type: ignore[arg-type]


def test_a_second_view_sees_the_same_positives_and_none_of_their_edges():
    one, two = make_source(hide_rate=0.3), make_source(hide_rate=0.3, views=2)
    for step in (0, 3):
        plain, batch = one[step], two[step]
        assert plain.second is None and batch.second is not None
        assert torch.equal(plain.node_gid, batch.node_gid) and torch.equal(
            plain.edges.src, batch.edges.src
        )
        view = batch.second
        assert torch.equal(view.node_gid[view.pos], batch.node_gid[batch.pos])
        listed = two.hidden(step, two.schedule.batch(step), 1)
        src, dst = (view.node_gid[ends].numpy() for ends in (view.edges.src, view.edges.dst))
        assert len(src) and not listed.is_hidden(dst, src).any()
        assert listed.extra_key != two.hidden(step, two.schedule.batch(step)).extra_key
        moved = batch.to(torch.device("cpu"))
        assert moved.second is not None and torch.equal(moved.second.pos, view.pos)


def test_without_negatives_only_the_positives_are_seeds():
    batch = make_source(has_negatives=False)[0]
    assert batch.neg.shape == (0, 2) and batch.global_neg == 0
    assert batch.nodes_per_hop[0] == batch.pos.unique().numel()


def test_worker_processes_do_not_change_the_batches() -> None:
    source = make_source()
    state = torch.get_rng_state()
    alone = list(BatchLoader(source, 0, 9))
    assert_same(alone, list(BatchLoader(source, 0, 9, workers=2, prefetch=1)))
    assert torch.equal(state, torch.get_rng_state())
    assert len(BatchLoader(source, 0, 9)) == 9


@pytest.mark.parametrize("workers", [0, 2])
def test_features_are_read_with_the_batch(workers: int) -> None:
    """In the type they are stored in."""
    rows = np.arange(3 * make_source().schedule.num_nodes, dtype=np.float16).reshape(-1, 3)
    batches = list(BatchLoader(make_source(features=rows), 0, 4, workers=workers))
    assert make_source()[0].x is None
    for batch in batches:
        assert batch.x is not None and batch.x.dtype == torch.float16
        assert torch.equal(batch.x, torch.from_numpy(rows[batch.node_gid.numpy()]))


def test_starting_in_the_middle_gives_the_same_batches() -> None:
    whole = list(BatchLoader(make_source(), 0, 60))
    assert_same(whole[37:], list(BatchLoader(make_source(), 37, 60)))
    assert_same(whole[25:27], list(BatchLoader(make_source(), 25, 27, workers=1)))


def test_leaving_early_ends_the_processes() -> None:
    before = multiprocessing.active_children()  # of other tests of this process
    source = make_source()
    for batch in BatchLoader(source, 0, 1000, workers=2):
        if batch.step == 2:
            break
    assert set(multiprocessing.active_children()) <= set(before)


def test_empty_range_of_steps() -> None:
    assert list(BatchLoader(make_source(), 5, 5)) == []


@pytest.mark.parametrize("hide_rate", [0.0, 0.3])
def test_no_message_follows_a_hidden_edge(hide_rate: float) -> None:
    source = make_source(hide_rate=hide_rate, fanouts=[-1, -1, 5])
    for step in (0, 3, source.schedule.steps_per_epoch - 1):
        batch = source[step]
        whole = source.schedule.batch(step)
        unseen = {frozenset(pair) for pair in zip(whole.u.tolist(), whole.v.tolist(), strict=True)}
        source_gid, target_gid = batch.node_gid[batch.edges.src], batch.node_gid[batch.edges.dst]
        assert not unseen & {
            frozenset(pair) for pair in zip(source_gid.tolist(), target_gid.tolist(), strict=True)
        }
        pair_id = torch.minimum(source_gid, target_gid) * 300 + torch.maximum(
            source_gid, target_gid
        )
        assert (keyed.uniform(keyed.stream(2, "mask-extra", step), pair_id) >= hide_rate).all()


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("batch_edges", [2, 64])
def test_ranks_together_hold_the_global_batch(world: int, batch_edges: int) -> None:
    sources = [
        make_source(rank=rank, world=world, batch_edges=batch_edges) for rank in range(world)
    ]
    schedule = sources[0].schedule
    for step in (0, schedule.steps_per_epoch - 1):
        parts = [source[step] for source in sources]
        for name, whole in (("pos", schedule.batch(step)), ("neg", schedule.negatives(step))):
            pairs = torch.cat([part.node_gid[getattr(part, name)] for part in parts])
            assert torch.equal(pairs, torch.from_numpy(np.stack([whole.u, whole.v], axis=1)))
            assert torch.equal(
                torch.cat([getattr(part, f"{name}_weight") for part in parts]),
                torch.from_numpy(whole.weight),
            )
            assert {getattr(part, f"global_{name}") for part in parts} == {whole.total}
        # A node is drawn alike on every rank: what two ranks sampled into it as a seed is the same.
        into: dict[int, list[int]] = {}
        for part in parts:
            is_seed = part.edges.dst < part.nodes_per_hop[0]
            sources_of = part.node_gid[part.edges.src[is_seed]]
            for gid in part.node_gid[: part.nodes_per_hop[0]].tolist():
                mine = sources_of[part.node_gid[part.edges.dst[is_seed]] == gid].tolist()
                assert into.setdefault(gid, mine) == mine


def test_a_rank_without_edges_gets_an_empty_batch() -> None:
    batch = make_source(batch_edges=2, rank=0, world=5)[0]
    assert (
        batch.pos.shape == batch.neg.shape == (0, 2)
        and batch.node_gid.numel() == 0
        and batch.edges.num_nodes == 0
    )
    assert batch.global_pos == 2


def test_weights_only_where_a_fanout_is_capped() -> None:
    assert make_source(fanouts=[-1, -1])[0].edges.weight is None
    assert make_source(rescale=False)[0].edges.weight is None
    batch = make_source()[0]
    assert batch.edges.weight is not None and float(batch.edges.weight.max()) > 1
    batch = make_source(hide_rate=0.0)[0]
    assert batch.edges.weight is not None
    expanded = sum(batch.nodes_per_hop[:-1])
    total = torch.zeros(batch.edges.num_nodes).index_add_(0, batch.edges.dst, batch.edges.weight)
    torch.testing.assert_close(total[:expanded], batch.degree[:expanded])  # float32 sums


def test_negatives_without_rejection_are_counted_without_placing_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(seeds_module, "REJECT_UP_TO_NODES", 10)
    source = make_source(rank=1, world=3)
    last = source.schedule.steps_per_epoch - 1
    assert source[last].global_neg == source[last].global_pos < 64
    whole = source.schedule.negatives(last)
    pairs = source[last].node_gid[source[last].neg]
    assert torch.equal(
        pairs, torch.from_numpy(np.stack([whole.u, whole.v], axis=1)[source.begin : source.end])
    )


def test_one_edge_and_a_star() -> None:
    edge = BatchSource(
        *make_csr(3, np.array([0]), np.array([2])),
        fanouts=[2, 2],
        batch_edges=4,
        seed=0,
        backend="csr",
    )
    batch = edge[5]
    assert edge.schedule.steps_per_epoch == 1 and batch.global_pos == 1
    assert batch.edges.src.numel() == 0  # the only edge is the positive, so nothing may be seen
    star = BatchSource(*star_csr(100_000), fanouts=[10, 10], batch_edges=32, seed=0, backend="csr")
    batch = star[0]
    assert batch.node_gid[batch.pos].min(dim=1).values.tolist() == [0] * 32
    hub = int((batch.node_gid == 0).nonzero())
    assert float(batch.degree[hub]) == 100_000 - 32
    assert int((batch.edges.dst == hub).sum()) == 10


def test_mapped_read_only_files(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("graph")
    graph = random_csr()
    for name, array in zip(("indptr", "indices"), graph, strict=True):
        np.save(folder / f"{name}.npy", array)
    mapped = [np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("indptr", "indices")]
    options = {"fanouts": [4, 3], "batch_edges": 64, "seed": 2, "backend": "csr"}
    first, second = (BatchSource(*arrays, **options) for arrays in (graph, mapped))  # type: ignore[arg-type]
    assert_same([first[3]], list(BatchLoader(second, 3, 4, workers=1)))


def test_moves_and_bad_options() -> None:
    batch = make_source()[0]
    assert_same([batch], [batch.to(torch.device("cpu"))])
    with pytest.raises(UserError, match="hide_rate"):
        make_source(hide_rate=1.0)
    with pytest.raises(UserError, match="loader_processes"):
        BatchLoader(make_source(), 0, 1, workers=1, prefetch=0)
    with pytest.raises(ValueError, match="rank 2"):
        make_source(rank=2, world=2)
