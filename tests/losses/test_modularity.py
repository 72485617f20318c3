"""Modularity loss: sparse equals dense, unbiased in mini-batches, gradients by finite
differences.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cimage_dist.losses import modularity_edges, modularity_full, unit_rows
from cimage_dist.types import EdgeList
from tests import reference


def symmetric_edges(num_nodes: int = 40, probability: float = 0.15, seed: int = 0) -> EdgeList:
    generator = torch.Generator().manual_seed(seed)
    upper = (torch.rand(num_nodes, num_nodes, generator=generator) < probability).triu(1)
    dst, src = (upper | upper.T).nonzero().unbind(1)
    return EdgeList(src, dst, num_nodes)


def embeddings(num_nodes: int = 40, width: int = 6, seed: int = 1) -> torch.Tensor:
    z = torch.randn(
        num_nodes, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    z[3] = 0.0  # a zero row stays zero
    return z


def dense(edges: EdgeList) -> np.ndarray:
    out = np.zeros((edges.num_nodes, edges.num_nodes))
    weight = np.ones(edges.src.numel()) if edges.weight is None else edges.weight.numpy()
    np.add.at(out, (edges.dst.numpy(), edges.src.numpy()), weight)
    return out


def test_sparse_equals_dense_trace() -> None:
    edges, z = symmetric_edges(), embeddings()
    assert (
        abs(float(modularity_full(z, edges)) - reference.dense_modularity(z.numpy(), dense(edges)))
        < 1e-10
    )


def test_edge_weights_count_as_multiplicity() -> None:
    edges, z = symmetric_edges(), embeddings()
    weighted = EdgeList(
        edges.src, edges.dst, 40, 1.0 + ((edges.src + edges.dst) % 3).to(torch.float64)
    )
    assert (
        abs(
            float(modularity_full(z, weighted))
            - reference.dense_modularity(z.numpy(), dense(weighted))
        )
        < 1e-10
    )


@pytest.mark.parametrize("is_symmetric", [False, True])
def test_gradient_of_the_full_form(is_symmetric: bool) -> None:
    edges = symmetric_edges(12, 0.3)
    z = torch.randn(12, 4, dtype=torch.float64, requires_grad=True)
    # The value holds sg() terms, so compare with the plain autograd of the dense trace and not with
    # finite differences of the worker loss.
    (got,) = torch.autograd.grad(modularity_full(z, edges, is_symmetric=is_symmetric), z)
    adjacency = torch.from_numpy(dense(edges))
    degree, unit = adjacency.sum(0), unit_rows(z)
    (expected,) = torch.autograd.grad(
        -((adjacency - torch.outer(degree, degree) / degree.sum()) * (unit @ unit.T)).sum()
        / degree.sum(),
        z,
    )
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-14)


def test_unsorted_one_sided_edges_have_the_right_gradient() -> None:
    """A rank may hold one direction only: the share of edges is then not symmetric."""
    edges = symmetric_edges(12, 0.3)
    order = torch.randperm(edges.src.numel(), generator=torch.Generator().manual_seed(0))[
        : edges.src.numel() // 2
    ]
    part = EdgeList(edges.src[order], edges.dst[order], 12)
    z = torch.randn(12, 4, dtype=torch.float64, requires_grad=True)
    unit = unit_rows(z)
    s = unit[part.dst].sum(0)
    two_m = part.src.numel()
    plain = -((unit[part.src] * unit[part.dst]).sum() - s @ s / two_m) / two_m
    torch.testing.assert_close(modularity_full(z, part), plain)
    torch.testing.assert_close(
        torch.autograd.grad(modularity_full(z, part), z)[0],
        torch.autograd.grad(plain, z)[0],
        rtol=0,
        atol=1e-14,
    )


def test_equal_embeddings_score_zero() -> None:
    edges = symmetric_edges()
    z = torch.ones(40, 6, dtype=torch.float64)
    assert abs(float(modularity_full(z, edges))) < 1e-12
    assert abs(float(modularity_edges(z[edges.src], z[edges.dst]))) < 1e-12


@pytest.mark.parametrize("is_symmetric", [False, True])
def test_edge_batches_are_unbiased(is_symmetric: bool) -> None:
    edges, z = symmetric_edges(), embeddings()
    truth = float(modularity_full(z, edges))
    generator = torch.Generator().manual_seed(0)
    draws = torch.tensor(
        [
            float(modularity_edges(z[edges.src[e]], z[edges.dst[e]], is_symmetric=is_symmetric))
            for e in (
                torch.randint(0, edges.src.numel(), (32,), generator=generator) for _ in range(4000)
            )
        ],
        dtype=torch.float64,
    )
    assert abs(float(draws.mean()) - truth) < 3 * float(draws.std()) / 4000**0.5


def test_edge_batch_gradient_equals_plain_autograd() -> None:
    u, v = (torch.randn(9, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    x, y = unit_rows(u), unit_rows(v)
    total = x.sum(0)
    plain = -(x * y).sum(1).mean() + (total @ total - (x * x).sum()) / (9 * 8)
    torch.testing.assert_close(modularity_edges(u, v), plain)
    for got, expected in zip(
        torch.autograd.grad(modularity_edges(u, v), (u, v)),
        torch.autograd.grad(plain, (u, v)),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("size", [0, 1])
def test_tiny_batches_stay_finite_and_attached(size: int) -> None:
    u, v = (torch.randn(size, 4, requires_grad=True) for _ in range(2))
    loss = modularity_edges(u, v)
    loss.backward()
    assert bool(torch.isfinite(loss)) and u.grad is not None and bool(torch.isfinite(u.grad).all())


def test_no_edges_and_half_precision() -> None:
    none = EdgeList(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), 5)
    z = torch.randn(5, 3, requires_grad=True)
    loss = modularity_full(z, none)
    loss.backward()
    assert float(loss.detach()) == 0.0 and z.grad is not None
    edges = symmetric_edges()
    exact = float(modularity_full(embeddings(), edges))
    assert abs(float(modularity_full(embeddings().to(torch.bfloat16), edges)) - exact) < 1e-2
