from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from cimage_dist import keyed
from cimage_dist.errors import UserError
from cimage_dist.sampling import sampler
from cimage_dist.sampling.hidden import HiddenEdges, hide
from cimage_dist.sampling.sampler import NeighbourSampler, resolve_backend
from cimage_dist.types import View
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


def test_auto_is_the_keyed_sampler_wherever_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run must not depend on which packages a machine has."""
    monkeypatch.setattr(sampler, "_import_error", lambda name: None)
    assert resolve_backend("auto") == "csr"
    assert resolve_backend("pyg-lib") == "pyg-lib"


def messages(view: View) -> np.ndarray:
    """(source, target) of every message, gids [e, 2]."""
    assert view.gids is not None
    return view.gids[torch.stack([view.edges.src, view.edges.dst], 1)].numpy()


def assert_same(first: View, second: View) -> None:
    assert first.hops == second.hops
    for name in ("gids", "nodes"):
        assert torch.equal(getattr(first, name), getattr(second, name)), name
    for name in ("src", "dst", "weight", "degree"):
        one, other = getattr(first.edges, name), getattr(second.edges, name)
        assert one is other is None or torch.equal(one, other), name


def counts(
    graph: Csr, backend: str, fanouts: list[int], trials: int, hidden: HiddenEdges | None
) -> np.ndarray:
    """How often each pair of nodes had a message, from seeds 0, 1, 2."""
    one = NeighbourSampler(*graph, fanouts, backend=backend)
    total = np.zeros(one.num_nodes**2, dtype=np.int64)
    for step in range(trials):
        view = one.sample(np.arange(3), keyed.stream(4, "neighbours", step), hidden)
        total += np.bincount(messages(view) @ [one.num_nodes, 1], minlength=len(total))
    return total


def check_same_distribution(
    graph: Csr, backend: str, fanouts: list[int], trials: int, hidden: HiddenEdges | None
) -> None:
    """Usage counts of every pair differ between backends by no more than two binomial samples of
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
            NeighbourSampler(*graph, fanouts, backend=name).sample(np.arange(5), 3)
            for name in ("csr", backend)
        )
        assert_same(a, b)


def test_operator_record_and_hidden_edges(reference: str) -> None:
    graph = random_csr(60, 600)
    for hidden in hidings(graph):
        for fanouts in ([-1, -1], [1000, 1000]):
            a, b = (
                NeighbourSampler(*graph, fanouts, backend=name).sample(
                    np.array([4, 4, 9]), 3, hidden
                )
                for name in ("csr", reference)
            )
            assert_same(a, b)
        capped = NeighbourSampler(*graph, [5, 3], backend=reference).sample(
            np.arange(10), 3, hidden
        )
        assert np.bincount(capped.edges.dst).max() <= 5
        if hidden is not None:
            assert not hidden.is_hidden(*messages(capped).T).any()


def test_operator_rows_short_of_visible_neighbours_are_drawn_again(reference: str) -> None:
    unseen = np.arange(1, 391)
    sub = NeighbourSampler(*star_csr(400), [6], backend=reference).sample(
        np.array([0]), 0, hide(401, np.zeros_like(unseen), unseen)
    )
    assert sub.hops is not None and sub.edges.degree is not None
    assert sub.hops.messages == (6,) and sub.edges.degree[0] == 10


def test_operator_is_seeded_per_key_and_leaves_the_generator_alone(reference: str) -> None:
    one = NeighbourSampler(*random_csr(), [3, 3], backend=reference)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = one.sample(np.arange(10), 3)
    assert torch.equal(before, torch.get_rng_state())
    one.sample(np.arange(10), 4)
    assert np.array_equal(messages(one.sample(np.arange(10), 3)), messages(first))
    assert not np.array_equal(messages(one.sample(np.arange(10), 5)), messages(first))
