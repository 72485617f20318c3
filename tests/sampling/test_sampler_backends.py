from __future__ import annotations

import builtins
import importlib
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from cimage_dist.errors import UserError
from cimage_dist.sampling import csr_sampler, sampler
from cimage_dist.sampling.hidden import HiddenEdges, hide
from cimage_dist.sampling.sampler import NeighbourSampler, resolve_backend
from tests.sampling.toy_csr import Csr, random_csr, star_csr

COMPILED = ["pyg-lib", "torch-sparse"]


def need(backend: str) -> None:
    if sampler._import_error(backend) is not None:
        pytest.skip(f"{backend} is not installed")


def forbid(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    real = importlib.import_module

    def fake(name: str, *args: Any) -> Any:
        if name in modules:
            raise ImportError(f"no module {name}")
        return real(name, *args)

    monkeypatch.setattr(importlib, "import_module", fake)


def slow_operator(colptr: Tensor, row: Tensor, seeds: Tensor, fanout: int) -> tuple[Tensor, Tensor]:
    """What the compiled operators do for one hop, row by row, from torch's global generator."""
    local, entry = [], []
    for i, v in enumerate(seeds.tolist()):
        begin, end = int(colptr[v]), int(colptr[v + 1])
        drawn = begin + torch.randperm(end - begin)[:fanout]
        local.append(torch.full_like(drawn, i))
        entry.append(drawn)
    return torch.cat(local), torch.cat(entry)


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> str:
    """A backend `torch-sparse` made of `slow_operator`, so that everything around the operator is
    tested without the package.
    """
    monkeypatch.setattr(sampler, "_import_error", lambda name: None)
    monkeypatch.setitem(sampler.ONE_HOP, "torch-sparse", slow_operator)
    return "torch-sparse"


def test_missing_backend_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    forbid(monkeypatch, "pyg_lib", "torch_sparse")
    assert resolve_backend("auto") == "csr"
    assert resolve_backend("csr") == "csr"
    for name in COMPILED:
        with pytest.raises(UserError, match=r"sampler.backend=csr"):
            resolve_backend(name)
    with pytest.raises(UserError, match="does not exist"):
        resolve_backend("dgl")


def test_auto_takes_pyg_lib_unless_it_needs_a_large_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "_import_error", lambda name: None)
    assert resolve_backend("auto") == "pyg-lib"
    assert resolve_backend("auto", copy_bytes=1 << 31) == "csr"
    assert resolve_backend("pyg-lib", copy_bytes=1 << 31) == "pyg-lib"


def test_works_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def fake(name: str, *args: Any, **kwargs: Any) -> Any:
        assert not name.startswith("numba")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(builtins, "__import__", fake)
    assert csr_sampler.resolve_engine() == "numpy"
    out = NeighbourSampler(*random_csr(), [3], seed=0, backend="csr").sample(np.arange(10), 0)
    assert len(out.src) > 0
    with pytest.raises(UserError, match="numba"):
        csr_sampler.resolve_engine("numba")


def counts(
    graph: Csr, backend: str, fanouts: list[int], trials: int, hidden: HiddenEdges | None
) -> np.ndarray:
    """How often each entry of the graph was used as a message, from seeds 0, 1, 2."""
    one = NeighbourSampler(*graph, fanouts, seed=4, backend=backend)
    total = np.zeros(len(graph[1]), dtype=np.int64)
    for step in range(trials):
        total += np.bincount(one.sample(np.arange(3), step, hidden).entry, minlength=len(total))
    return total


def check_same_distribution(
    graph: Csr, backend: str, fanouts: list[int], trials: int, hidden: HiddenEdges | None
) -> None:
    """Usage counts of every entry differ between backends by no more than two binomial samples of
    the same share do.
    """
    ours, theirs = (
        counts(graph, "csr", fanouts, trials, hidden),
        counts(graph, backend, fanouts, trials, hidden),
    )
    share = (ours + theirs) / (2 * trials)
    random = (share > 0) & (share < 1)
    assert np.array_equal(ours[~random], theirs[~random])
    z = (ours - theirs)[random] / np.sqrt(2 * trials * share[random] * (1 - share[random]))
    assert np.abs(z).max() < 4.5  # some hundred normal deviates
    # Counts of a row sum to its fan-out, so z is narrower than a standard normal; wider would mean
    # different shares.
    assert stats.chi2.sf((z**2).sum(), len(z)) > 1e-4


def hidings(graph: Csr) -> list[HiddenEdges | None]:
    rows = np.repeat(np.arange(len(graph[0]) - 1), np.diff(graph[0]))
    listed = np.random.default_rng(0).permutation(len(rows))[: len(rows) // 6]
    u, v = rows[listed], graph[1][listed].astype(np.int64)
    n = len(graph[0]) - 1
    return [None, hide(n, u, v), hide(n, u, v, 0.3, 5)]


@pytest.mark.parametrize("fanouts", [[4], [4, 2]])
def test_reference_operator_draws_as_csr(reference: str, fanouts: list[int]) -> None:
    graph = random_csr(40, 250)
    for hidden in hidings(graph):
        check_same_distribution(graph, reference, fanouts, 400, hidden)


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("fanouts", [[4], [4, 2]])
def test_compiled_backend_draws_as_csr(backend: str, fanouts: list[int]) -> None:
    need(backend)
    graph = random_csr(40, 250)
    for hidden in hidings(graph):
        check_same_distribution(graph, backend, fanouts, 1000, hidden)


@pytest.mark.parametrize("backend", COMPILED)
def test_compiled_backend_equals_csr_without_a_cap(backend: str) -> None:
    need(backend)
    graph = random_csr()
    for fanouts in ([-1, -1], [1000, 1000]):
        a, b = (
            NeighbourSampler(*graph, fanouts, seed=0, backend=name).sample(np.arange(5), 3)
            for name in ("csr", backend)
        )
        assert (
            np.array_equal(a.entry, b.entry)
            and np.array_equal(a.node_gid, b.node_gid)
            and np.array_equal(a.weight, b.weight)
        )


def test_operator_record_and_hidden_edges(reference: str) -> None:
    graph = random_csr(60, 600)
    for hidden in hidings(graph):
        for fanouts in ([-1, -1], [1000, 1000]):
            a, b = (
                NeighbourSampler(*graph, fanouts, seed=0, backend=name).sample(
                    np.array([4, 4, 9]), 3, hidden
                )
                for name in ("csr", reference)
            )
            for name in csr_sampler.SampledSubgraph.__dataclass_fields__:
                np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
        capped = NeighbourSampler(*graph, [5, 3], seed=0, backend=reference).sample(
            np.arange(10), 3, hidden
        )
        assert np.bincount(capped.dst).max() <= 5
        if hidden is not None:
            assert not hidden.is_hidden(
                capped.node_gid[capped.dst], capped.node_gid[capped.src]
            ).any()


def test_operator_rows_short_of_visible_neighbours_are_drawn_again(reference: str) -> None:
    unseen = np.arange(1, 391)
    sub = NeighbourSampler(*star_csr(400), [6], seed=0, backend=reference).sample(
        np.array([0]), 0, hide(401, np.zeros_like(unseen), unseen)
    )
    assert sub.edges_per_hop == (6,) and sub.degree[0] == 10


def test_operator_is_seeded_per_step_and_leaves_the_generator_alone(reference: str) -> None:
    one = NeighbourSampler(*random_csr(), [3, 3], seed=0, backend=reference)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = one.sample(np.arange(10), 3)
    assert torch.equal(before, torch.get_rng_state())
    one.sample(np.arange(10), 4)
    assert np.array_equal(one.sample(np.arange(10), 3).entry, first.entry)
    assert not np.array_equal(one.sample(np.arange(10), 5).entry, first.entry)


def pyg_data(graph: Csr) -> Any:
    from torch_geometric.data import Data

    rows = torch.from_numpy(np.repeat(np.arange(len(graph[0]) - 1), np.diff(graph[0])))
    columns = torch.from_numpy(graph[1].astype(np.int64))
    return Data(
        x=torch.arange(len(graph[0]) - 1.0)[:, None],
        edge_index=torch.stack([columns, rows]),
        edge_attr=10_000 * columns + rows,
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_pyg_neighbor_loader(workers: int) -> None:
    from torch_geometric.loader import NeighborLoader

    from cimage_dist.sampling.pyg_sampler import PygNeighbourSampler

    graph = random_csr()
    one = PygNeighbourSampler(*graph, [4, 2], seed=1, backend="csr")
    loader = NeighborLoader(
        pyg_data(graph),
        [4, 2],
        input_nodes=torch.arange(100),
        batch_size=32,
        neighbor_sampler=one,
        num_workers=workers,
    )
    batches = list(loader)
    assert [b.batch_size for b in batches] == [32, 32, 32, 4]
    for i, batch in enumerate(batches):
        assert batch.n_id[: batch.batch_size].tolist() == list(
            range(32 * i, 32 * i + batch.batch_size)
        )
        source, target = batch.n_id[batch.edge_index]
        assert torch.equal(
            batch.edge_attr, 10_000 * source + target
        )  # edge ids point at the right edges
        assert torch.equal(batch.x[:, 0].long(), batch.n_id)
        assert (
            sum(batch.num_sampled_nodes) == batch.num_nodes
            and sum(batch.num_sampled_edges) == batch.num_edges
        )
    again = list(
        NeighborLoader(
            pyg_data(graph),
            [4, 2],
            input_nodes=torch.arange(100),
            batch_size=32,
            neighbor_sampler=one,
        )
    )
    assert all(torch.equal(a.e_id, b.e_id) for a, b in zip(batches, again, strict=True))


def test_pyg_link_loader() -> None:
    from torch_geometric.loader import LinkLoader

    from cimage_dist.sampling.pyg_sampler import PygNeighbourSampler

    graph = random_csr()
    data = pyg_data(graph)
    loader = LinkLoader(
        data,
        PygNeighbourSampler(*graph, [-1], backend="csr"),
        edge_label_index=data.edge_index[:, :50],
        neg_sampling="binary",
        batch_size=25,
    )
    seen = []
    for batch in loader:
        positive = batch.edge_label_index[:, batch.edge_label == 1]
        seen.append(batch.n_id[positive])
        target = batch.edge_label_index.unique()
        degree = torch.bincount(batch.edge_index[1], minlength=batch.num_nodes)[target]
        assert torch.equal(degree, torch.from_numpy(np.diff(graph[0]))[batch.n_id[target]])
    assert torch.equal(torch.cat(seen, dim=1), data.edge_index[:, :50])
