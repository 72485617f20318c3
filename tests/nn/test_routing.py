from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cimage_dist.errors import UserError
from cimage_dist.nn.routing import RoutingConv, assignments, normalize_factors
from cimage_dist.types import EdgeList, Topology
from tests.graphs import random_topology, star
from tests.nn.routed import route


def dense_route(
    x: torch.Tensor,
    topology: Topology,
    iterations: int,
    temperature: float,
    init: str,
    final_norm: bool,
) -> torch.Tensor:
    """The specification's loop, one node and one neighbour at a time."""
    unit = lambda v: v / v.norm(dim=-1, keepdim=True).clamp_min(1e-12)  # noqa: E731
    l = unit(x)  # noqa: E741
    out = torch.empty_like(l)
    for v in range(topology.num_nodes):
        neighbours = topology.indices[topology.indptr[v] : topology.indptr[v + 1]].tolist()
        q = l[v]
        for t in range(iterations):
            total = l[v].clone()
            for u in neighbours:
                uniform = t == 0 and init == "uniform"
                p = (
                    torch.full((l.shape[1],), 1.0 / l.shape[1], dtype=l.dtype)
                    if uniform
                    else torch.softmax((l[u] * q).sum(-1) / temperature, 0)
                )
                total = total + p.unsqueeze(-1) * l[u]
            q = unit(total) if t < iterations - 1 or final_norm else total
        out[v] = q
    return out


@pytest.mark.parametrize("init", ["uniform", "self"])
@pytest.mark.parametrize("final_norm", [False, True])
@pytest.mark.parametrize("iterations", [1, 2, 5])
def test_star_graph_equals_the_dense_loop(iterations, final_norm, init):
    torch.manual_seed(0)
    topology = star(6)
    x = torch.randn(7, 3, 4, dtype=torch.float64)
    got = route(x, topology.edge_list(), iterations, 0.7, init=init, final_norm=final_norm)
    torch.testing.assert_close(
        got, dense_route(x, topology, iterations, 0.7, init, final_norm), rtol=0, atol=1e-12
    )


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 12),
    pairs=st.integers(0, 40),
    k=st.integers(1, 5),
    c=st.integers(1, 4),
    t=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_random_graphs_equal_the_dense_loop(n, pairs, k, c, t, seed):
    topology = random_topology(n, pairs, seed)
    x = torch.randn(n, k, c, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    x[0] = 0  # a zero row stays finite
    got = route(x, topology.edge_list(), t)
    # Normalising a sum that nearly cancels amplifies its rounding.
    torch.testing.assert_close(
        got, dense_route(x, topology, t, 1.0, "uniform", False), rtol=0, atol=1e-10
    )


@pytest.mark.parametrize("backend", ["fused", "reference"])
def test_the_layer_equals_a_dense_form_of_the_equation(backend):
    """Directed edges in any order, with weights, on [N, K·C] rows."""
    generator = torch.Generator().manual_seed(0)
    n, k, c, iterations, tau = 9, 3, 4, 3, 0.6
    x = torch.randn(n, k * c, dtype=torch.float64, generator=generator, requires_grad=True)
    a = torch.rand(n, n, dtype=torch.float64, generator=generator)  # a[v, u]: message u -> v
    a[a < 0.6] = 0
    dst, src = a.nonzero(as_tuple=True)
    order = torch.randperm(len(src), generator=generator)
    src, dst = src[order], dst[order]
    conv = RoutingConv(k, iterations, tau, backend=backend)
    got = conv(x, torch.stack([src, dst]), a[dst, src])

    l = normalize_factors(x.view(n, k, c))  # noqa: E741
    p = torch.full((n, n, k), 1 / k, dtype=torch.float64)
    for t in range(iterations):
        q = l + torch.einsum("vu,vuk,ukc->vkc", a, p, l)
        if t < iterations - 1:
            p = torch.softmax(torch.einsum("ukc,vkc->vuk", l, normalize_factors(q)) / tau, -1)
    torch.testing.assert_close(got, q.flatten(1), rtol=0, atol=1e-12)
    grads = [torch.autograd.grad(out.square().sum(), x)[0] for out in (got, q)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-10)


def test_the_layer_explains_bad_input():
    conv, x, edges = RoutingConv(2), torch.randn(4, 6), torch.tensor([[0, 1], [1, 3]])
    assert conv(x, edges).shape == (4, 6) and not list(conv.parameters())
    for rows, index, match in (
        (x[:, :5], edges, "multiple of its 2 factors"),
        (x[:3], edges, "nodes 0 to 3, but x has 3 rows"),
        (x, -edges, "nodes -3 to 0"),
        (x, edges.t()[:1], "integers"),
        (x, edges.float(), "integers"),
    ):
        with pytest.raises(UserError, match=match):
            conv(rows, index)
    with pytest.raises(UserError, match="at least 1"):
        RoutingConv(0)


def test_assignments_sum_to_one_over_factors():
    topology = random_topology(20, 60)
    l = normalize_factors(torch.randn(20, 5, 4))  # noqa: E741
    edges = topology.edge_list()
    p = assignments(l[edges.src], l, edges.dst, 1.0)
    torch.testing.assert_close(
        p.sum(1), torch.ones(p.shape[0]), rtol=0, atol=1e-6
    )  # float32 softmax


def test_padded_form_agrees_with_the_edge_list():
    """Neighbour tables padded with a zero row, as the released code has them, give the same
    result.
    """
    topology = random_topology(15, 40, seed=3)
    torch.manual_seed(1)
    x = torch.randn(15, 4, 3, dtype=torch.float64)
    l = torch.cat([normalize_factors(x), torch.zeros(1, 4, 3, dtype=torch.float64)])  # noqa: E741
    table = torch.full((15, int(topology.degrees().max())), 15)
    for v in range(15):
        row = topology.indices[topology.indptr[v] : topology.indptr[v + 1]]
        table[v, : row.numel()] = row
    near = l[table]  # [N, deg, K, C]
    p = torch.full((15, table.shape[1], 4), 0.25, dtype=torch.float64)
    for t in range(3):
        q = l[:15] + (p.unsqueeze(-1) * near).sum(1)
        if t < 2:
            q = normalize_factors(q)
            p = torch.softmax((near * q.unsqueeze(1)).sum(-1), dim=-1)
    torch.testing.assert_close(route(x, topology.edge_list(), 3), q, rtol=0, atol=1e-6)


def test_last_gradient_keeps_the_value_and_stops_the_assignments():
    topology = random_topology(10, 30, seed=2)
    x = torch.randn(
        10,
        3,
        2,
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(0),
        requires_grad=True,
    )
    full, last = (route(x, topology.edge_list(), 4, grad=mode) for mode in ("full", "last"))
    torch.testing.assert_close(full, last, rtol=0, atol=1e-12)
    g_full, g_last = (torch.autograd.grad(out.square().sum(), x)[0] for out in (full, last))
    assert not torch.allclose(g_full, g_last)
    # With p held fixed the gradient is that of the plain weighted sum.
    edges = topology.edge_list()
    l = normalize_factors(x)  # noqa: E741
    aggregate = lambda p: l.index_add(0, edges.dst, p.unsqueeze(-1) * l[edges.src])  # noqa: E731
    with torch.no_grad():
        p = torch.full((edges.src.numel(), 3), 1 / 3, dtype=torch.float64)
        for _ in range(3):
            p = assignments(l[edges.src], normalize_factors(aggregate(p)), edges.dst, 1.0)
    fixed = torch.autograd.grad(aggregate(p).square().sum(), x)[0]
    torch.testing.assert_close(g_last, fixed, rtol=0, atol=1e-12)


def test_full_gradient_passes_gradcheck():
    topology = random_topology(6, 12, seed=5)
    x = torch.randn(
        6, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True
    )
    assert torch.autograd.gradcheck(lambda v: route(v, topology.edge_list(), 3), (x,))


def test_weights_stand_for_repeated_neighbours():
    edges = star(3).edge_list()
    x = torch.randn(4, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    twice = EdgeList(edges.src.repeat_interleave(2), edges.dst.repeat_interleave(2), 4)
    weighted = EdgeList(
        edges.src, edges.dst, 4, torch.full((edges.src.numel(),), 2.0, dtype=torch.float64)
    )
    torch.testing.assert_close(route(x, weighted, 3), route(x, twice, 3), rtol=0, atol=1e-12)


def test_compiled_loops_leave_the_thread_count_of_torch_alone():
    """In a new process, where the compiled thread pool is not running yet."""
    code = (
        "import torch; torch.set_num_threads(1)\n"
        "from cimage_dist import RoutingConv\n"
        "RoutingConv(2)(torch.randn(5, 6), torch.tensor([[0, 1], [1, 0]]))\n"
        "print(torch.get_num_threads())"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert out.stdout.strip() == "1"
