"""Modularity loss without an N x N matrix: the full-batch form over an edge list and the unbiased
form over a batch of edges.

Convention: each function returns the *worker loss* for gradients that are averaged over ranks, as
DistributedDataParallel does. The mean of the returned values over ranks is the loss of the whole,
and the mean of the gradients its exact gradient; at world size 1 both are the plain loss. Sign and
constant are the paper's: minimising the loss maximises modularity, and equal embeddings score 0.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from cimage_dist.comm import Comm
from cimage_dist.types import EdgeList


def unit_rows(z: Tensor) -> Tensor:
    """Rows divided by max(norm, 1e-12); half-precision inputs are raised to float32 first. z [n,
    D].
    """
    z = z if z.dtype in (torch.float32, torch.float64) else z.to(torch.float32)
    return z / torch.linalg.vector_norm(z, dim=1, keepdim=True).clamp(min=1e-12)


class _EdgeProducts(torch.autograd.Function):
    """`Σ_e w_e x_src·x_dst` with sparse products in both directions: nothing of size E x D is ever
    stored.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, edges: EdgeList, is_symmetric: bool) -> Tensor:
        incoming = _adjacency(edges.dst, edges.src, edges, x) @ x
        ctx.edges = edges
        # Where both directions give the same, the backward pass does not need x.
        ctx.save_for_backward(incoming, None if is_symmetric else x)
        return (x * incoming).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        incoming, x = ctx.saved_tensors
        outgoing = (
            incoming if x is None else _adjacency(ctx.edges.src, ctx.edges.dst, ctx.edges, x) @ x
        )
        return grads[0] * (incoming + outgoing), None, None


def modularity_full(
    z: Tensor, edges: EdgeList, comm: Comm | None = None, *, is_symmetric: bool = False
) -> Tensor:
    """Collective: modularity loss over all edges, each directed edge held by exactly one rank
    (§5.4).

    `L = -(1/2m) [ Σ_{(i,j)} ẑ_i·ẑ_j - |s|²/2m ]`, `s = Σ_i d_i ẑ_i`, `2m = Σ_i d_i`, ẑ the unit
    rows. Worker r returns
    `-(W/2m) [ e_r - (2 s_r·sg(s) - sg(s_r·s))/2m ]` with s_r summed over the targets of its own
    edges. An edge weight counts that often. Shapes: z [num_nodes, D] holds every row this rank's
    edges touch, gradients attached. `is_symmetric` promises that each of this rank's edges is here
    in both directions (always so on one process with a symmetric graph) and saves one sparse
    product in backward.
    """
    comm = comm or Comm()
    x = unit_rows(z)
    degree = torch.bincount(edges.dst, weights=edges.weight, minlength=edges.num_nodes).to(x.dtype)
    local_sum = degree @ x
    products = _EdgeProducts.apply(x, edges, is_symmetric)
    volume = degree.sum(dtype=torch.float64)
    reduced = comm.sum(torch.cat([local_sum.detach().to(torch.float64), volume.unsqueeze(0)]))
    total, two_m = reduced[:-1].to(x.dtype), reduced[-1].clamp(min=1.0).to(x.dtype)
    null_model = (2.0 * (local_sum @ total) - (local_sum.detach() @ total)) / two_m
    return -comm.world * (products - null_model) / two_m


def modularity_edges(
    z_u: Tensor, z_v: Tensor, comm: Comm | None = None, *, is_symmetric: bool = False
) -> Tensor:
    """Collective: unbiased modularity loss from a global batch of B edges drawn uniformly, spread
    over the ranks in any way (§5.4).

    `L = -mean ẑ_u·ẑ_v + (|S|² - Σ|a|²)/(B(B-1))`, `S = Σ a`, a = ẑ_u. Worker r returns
    `W [ -e_r/B + (2 sg(S)·s_r - sg(S·s_r) - Σ_local |a|²)/(B(B-1)) ]`. Undirected seed edges have
    no source: with `is_symmetric`, a = (ẑ_u + ẑ_v)/2. A batch of one edge has no pair to estimate
    the second term, which is then left out; an empty batch gives 0. Shapes: z_u, z_v [b_local, D],
    b_local may be 0.
    """
    comm = comm or Comm()
    u, v = unit_rows(z_u), unit_rows(z_v)
    a = (u + v) / 2 if is_symmetric else u
    local_sum = a.sum(dim=0)
    count = torch.full((1,), float(u.shape[0]), dtype=torch.float64, device=u.device)
    reduced = comm.sum(torch.cat([local_sum.detach().to(torch.float64), count]))
    total, batch = reduced[:-1].to(u.dtype), reduced[-1].to(u.dtype)
    products = (u * v).sum() / batch.clamp(min=1.0)
    pairs = (batch * (batch - 1.0)).clamp(min=1.0)
    null_model = (2.0 * (total @ local_sum) - total @ local_sum.detach() - (a * a).sum()) / pairs
    return comm.world * (torch.where(batch > 1, null_model, 0.0) - products)


def _adjacency(rows: Tensor, columns: Tensor, edges: EdgeList, x: Tensor) -> Tensor:
    """CSR matrix with entry w_e at (rows_e, columns_e); rows need not be sorted."""
    weight = (
        torch.ones(rows.numel(), dtype=x.dtype, device=x.device)
        if edges.weight is None
        else edges.weight.to(x.dtype)
    )
    if rows.numel() and bool((rows[1:] < rows[:-1]).any()):
        order = torch.argsort(rows, stable=True)
        rows, columns, weight = rows[order], columns[order], weight[order]
    indptr = torch.zeros(edges.num_nodes + 1, dtype=torch.int64, device=rows.device)
    torch.cumsum(torch.bincount(rows, minlength=edges.num_nodes), 0, out=indptr[1:])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support")
        return torch.sparse_csr_tensor(
            indptr, columns, weight, (edges.num_nodes, edges.num_nodes), check_invariants=False
        )
