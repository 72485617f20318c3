from __future__ import annotations

import mmap
import multiprocessing
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from cimage_dist import keyed
from cimage_dist.errors import UserError
from cimage_dist.sampling import csr
from cimage_dist.sampling import seeds as seeds_module
from cimage_dist.sampling.loader import BatchLoader, BatchSource
from cimage_dist.types import Batch, Hops, View
from tests.procs import wait_for_children
from tests.sampling.toy_csr import make_csr, random_csr, star_csr


def assert_same(first: list[Batch], second: list[Batch]) -> None:
    for a, b in zip(first, second, strict=True):
        for name in ("hops", "num_pos", "global_pos", "global_neg", "global_nodes"):
            assert getattr(a, name) == getattr(b, name), name
        for name in ("x", "nodes", "gids", "pairs", "weight", "node_weight"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name
        for name in ("src", "dst", "weight", "degree"):
            one, other = getattr(a.edges, name), getattr(b.edges, name)
            assert one is other is None or torch.equal(one, other), name


def gids_of(view: View) -> torch.Tensor:
    assert view.gids is not None
    return view.gids


def hops_of(view: View) -> Hops:
    assert view.hops is not None
    return view.hops


def make_source(**options: object) -> BatchSource:
    defaults: dict[str, object] = {
        "fanouts": [4, 3],
        "batch_edges": 64,
        "seed": 2,
        "hide_rate": 0.2,
        "backend": "csr",
    }
    return BatchSource(*random_csr(), **(defaults | options))


def test_a_second_view_sees_the_same_positives_and_none_of_their_edges():
    one, two = make_source(hide_rate=0.3), make_source(hide_rate=0.3, views=2)
    for step in (0, 3):
        plain, batch = one[step], two[step]
        assert plain.second is None and batch.second is not None
        assert_same([plain], [batch])
        view = batch.second
        assert torch.equal(view.node_gids, batch.node_gids)
        listed = two.hidden(step, two.schedule.batch(step), 1)
        src, dst = (gids_of(view)[ends].numpy() for ends in (view.edges.src, view.edges.dst))
        assert len(src) and not listed.is_hidden(dst, src).any()
        assert listed.extra_key != two.hidden(step, two.schedule.batch(step)).extra_key
        moved = batch.to(torch.device("cpu"))
        assert moved.second is not None and torch.equal(moved.second.nodes, view.nodes)


def test_without_negatives_only_the_positives_are_seeds():
    batch = make_source(has_negatives=False)[0]
    assert len(batch.pairs) == batch.num_pos and batch.global_neg == 0
    assert hops_of(batch).nodes[0] == batch.pairs.unique().numel()


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
    assert make_source()[0].x.shape[1] == 0
    for batch in batches:
        assert isinstance(batch.x, torch.Tensor) and batch.x.dtype == torch.float16
        assert torch.equal(batch.x, torch.from_numpy(rows[gids_of(batch).numpy()]))


def test_starting_in_the_middle_gives_the_same_batches() -> None:
    whole = list(BatchLoader(make_source(), 0, 60))
    assert_same(whole[37:], list(BatchLoader(make_source(), 37, 60)))
    assert_same(whole[25:27], list(BatchLoader(make_source(), 25, 27, workers=1)))


def test_leaving_early_ends_the_processes() -> None:
    before = multiprocessing.active_children()  # of other tests of this process
    source = make_source()
    for step, _ in enumerate(BatchLoader(source, 0, 1000, workers=2)):
        if step == 2:
            break
    wait_for_children(before)


def test_empty_range_of_steps() -> None:
    assert list(BatchLoader(make_source(), 5, 5)) == []


@pytest.mark.parametrize("hide_rate", [0.0, 0.3])
def test_no_message_follows_a_hidden_edge(hide_rate: float) -> None:
    source = make_source(hide_rate=hide_rate, fanouts=[-1, -1, 5])
    for step in (0, 3, source.schedule.steps_per_epoch - 1):
        batch = source[step]
        whole = source.schedule.batch(step)
        unseen = {frozenset(pair) for pair in zip(whole.u.tolist(), whole.v.tolist(), strict=True)}
        gids = gids_of(batch)
        source_gid, target_gid = gids[batch.edges.src], gids[batch.edges.dst]
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
            whole = whole.ordered(sources[0].group)
            at = [slice(p.num_pos) if name == "pos" else slice(p.num_pos, None) for p in parts]
            pairs = torch.cat([gids_of(p)[p.pairs[own]] for p, own in zip(parts, at, strict=True)])
            assert torch.equal(pairs, torch.from_numpy(np.stack([whole.u, whole.v], axis=1)))
            weight = np.concatenate([p.weight[own] for p, own in zip(parts, at, strict=True)])
            assert np.array_equal(weight, whole.weight)
            assert {getattr(part, f"global_{name}") for part in parts} == {whole.total}
        ends = torch.cat([part.node_gids for part in parts]).view(-1, 2)
        whole = schedule.batch(step).ordered(sources[0].group)
        assert np.array_equal(ends, np.stack([whole.u, whole.v], axis=1))
        assert np.array_equal(torch.cat([p.node_weight for p in parts]), whole.weight.repeat(2))
        # A node is drawn alike on every rank: what two ranks sampled into it as a seed is the same.
        into: dict[int, list[int]] = {}
        for part in parts:
            is_seed = part.edges.dst < hops_of(part).nodes[0]
            sources_of = gids_of(part)[part.edges.src[is_seed]]
            for gid in gids_of(part)[: hops_of(part).nodes[0]].tolist():
                mine = sources_of[gids_of(part)[part.edges.dst[is_seed]] == gid].tolist()
                assert into.setdefault(gid, mine) == mine


def test_a_rank_without_edges_gets_an_empty_batch() -> None:
    batch = make_source(batch_edges=2, rank=0, world=5)[0]
    assert batch.pairs.shape == (0, 2) and gids_of(batch).numel() == batch.edges.num_nodes == 0
    assert batch.global_pos == 2


def test_weights_only_where_a_fanout_is_capped() -> None:
    assert make_source(fanouts=[-1, -1])[0].edges.weight is None
    assert make_source(rescale=False)[0].edges.weight is None
    batch = make_source()[0]
    assert batch.edges.weight is not None and float(batch.edges.weight.max()) > 1
    batch = make_source(hide_rate=0.0)[0]
    assert batch.edges.weight is not None
    assert batch.edges.degree is not None
    expanded = sum(hops_of(batch).nodes[:-1])
    total = torch.zeros(batch.edges.num_nodes).index_add_(0, batch.edges.dst, batch.edges.weight)
    torch.testing.assert_close(total[:expanded], batch.edges.degree[:expanded])  # float32 sums


def test_negatives_without_rejection_are_counted_without_placing_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(seeds_module, "REJECT_UP_TO_NODES", 10)
    source = make_source(rank=1, world=3)
    last = source.schedule.steps_per_epoch - 1
    assert source[last].global_neg == source[last].global_pos < 64
    whole = source.schedule.negatives(last)
    pairs = gids_of(source[last])[source[last].pairs[source[last].num_pos :]]
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
    assert batch.node_gids.view(-1, 2).min(dim=1).values.tolist() == [0] * 32
    hub = int((gids_of(batch) == 0).nonzero())
    assert float(batch.edges.degree[hub]) == 100_000 - 32
    assert int((batch.edges.dst == hub).sum()) == 10


@pytest.mark.parametrize("large", [False, True])
def test_mapped_read_only_files(
    large: bool, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("graph")
    graph = random_csr()
    x = np.random.default_rng(0).normal(size=(len(graph[0]) - 1, 6)).astype(np.float16)
    for name, array in zip(("indptr", "indices", "x"), (*graph, x), strict=True):
        np.save(folder / f"{name}.npy", array)
    mapped = [np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("indptr", "indices", "x")]
    options = {"fanouts": [4, 3], "batch_edges": 64, "seed": 2, "backend": "csr"}
    first = BatchSource(*graph, features=x, **options)[3]
    monkeypatch.setattr(csr, "LARGE_BYTES", 1 if large else 1 << 30)
    second = BatchSource(*mapped[:2], features=mapped[2], **options)
    assert_same([first], list(BatchLoader(second, 3, 4, workers=1)))
    assert_same([first], [second[3]])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_large_files_are_not_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "x.npy", np.zeros((100, 50)))

    def flags(array: np.ndarray) -> str:
        text = Path("/proc/self/smaps").read_text()
        begin = text.index(f"{array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE:x}-")
        return text[text.index("VmFlags", begin) :].splitlines()[0]

    for large in (False, True):
        monkeypatch.setattr(csr, "LARGE_BYTES", 1 if large else 1 << 30)
        mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
        csr.expect_scattered(mapped)
        assert (" rr " in flags(mapped)) == large


def test_moves_and_bad_options() -> None:
    batch = make_source()[0]
    assert_same([batch], [batch.to(torch.device("cpu"))])
    with pytest.raises(UserError, match="hide_rate"):
        make_source(hide_rate=1.0)
    with pytest.raises(UserError, match="loader_processes"):
        BatchLoader(make_source(), 0, 1, workers=1, prefetch=0)
    with pytest.raises(ValueError, match="rank 2"):
        make_source(rank=2, world=2)
