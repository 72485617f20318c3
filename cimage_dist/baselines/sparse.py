"""Products with sparse matrices whose values may have a gradient, features stored that way, and
graph attention as such products, which GraphMAE2, AUG-MAE and GiGaMAE share.

A sparse product is about ten times as fast on a CPU as messages along edges; features of a bag of
words have one entry in a hundred, so their product with a weight hardly costs anything.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import Linear
from torch_geometric.nn.inits import glorot
from torch_geometric.utils import softmax

# Features with a smaller share of entries are stored sparse: a dense product is some five times as
# fast per entry.
SPARSE_BELOW = 0.15
SLOPE = 0.2  # of LeakyReLU below zero, as in the paper


def _csr(begins: Tensor, column: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    with warnings.catch_warnings():
        # torch calls its CSR tensors beta, once per process.
        warnings.filterwarnings("ignore", message="Sparse")
        return torch.sparse_csr_tensor(begins, column, values, shape, check_invariants=False)


def _begins(index: Tensor, count: int) -> Tensor:
    """Where each of `count` rows begins among sorted entries with the rows `index`; [count + 1]."""
    ends = torch.bincount(index, minlength=count).cumsum(0)
    return F.pad(ends, (1, 0)).int()


@dataclass(frozen=True)
class Pattern:
    """Where a matrix [R, C] has its E entries, row by row; and the same of its transpose."""

    row: Tensor  # int64 [E], sorted
    column: Tensor  # int64 [E]
    begins: Tensor  # int32 [R + 1]: the entries of row i are begins[i] to begins[i + 1]
    turned: Tensor  # int64 [E]: the entries column by column
    turned_begins: Tensor  # int32 [C + 1]
    shape: tuple[int, int]

    @staticmethod
    def of_sorted(row: Tensor, column: Tensor, shape: tuple[int, int]) -> Pattern:
        turned = column.argsort(stable=True)
        begins = (_begins(row, shape[0]), _begins(column, shape[1]))
        return Pattern(row, column, begins[0], turned, begins[1], shape)

    @staticmethod
    def of_edges(edge_index: Tensor, num_nodes: int, loops: bool = True) -> Pattern:
        """Row v has an entry for every edge u -> v of edge_index [2, E], and with `loops` for v."""
        source, target = edge_index
        if loops:
            own = torch.arange(num_nodes, device=source.device)
            source, target = torch.cat([source, own]), torch.cat([target, own])
        order = (target * num_nodes + source).argsort()
        return Pattern.of_sorted(target[order], source[order], (num_nodes, num_nodes))

    def only(self, kept: Tensor) -> Pattern:
        """Without the entries that are False in `kept`, bool [E]."""
        place = kept.cumsum(0) - 1  # of an entry among those that stay
        turned = place[self.turned[kept[self.turned]]]
        row, column = self.row[kept], self.column[kept]
        begins = (_begins(row, self.shape[0]), _begins(column, self.shape[1]))
        return Pattern(row, column, begins[0], turned, begins[1], self.shape)

    def times(self, values: Tensor, dense: Tensor) -> Tensor:
        """M B [R, D] for M with `values` [E], B = dense [C, D]; gradients reach both."""
        return _Product.apply(values, dense, self)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, dense: Tensor, pattern: Pattern) -> Tensor:
        ctx.save_for_backward(values, dense)
        ctx.pattern = pattern
        return _csr(pattern.begins, pattern.column.int(), values, pattern.shape) @ dense

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """dL/dM_ij = g_i . b_j where M has an entry; dL/dB = M^T g, for g = dL/d(M B) [R, D]."""
        (values, dense), pattern, slope = ctx.saved_tensors, ctx.pattern, slopes[0].contiguous()
        of_values = of_dense = None
        if ctx.needs_input_grad[0]:
            matrix = _csr(pattern.begins, pattern.column.int(), values, pattern.shape)
            of_values = torch.sparse.sampled_addmm(matrix, slope, dense.t(), beta=0.0).values()
        if ctx.needs_input_grad[1]:
            turned, (rows, columns) = pattern.turned, pattern.shape
            back = (pattern.turned_begins, pattern.row[turned].int(), values[turned])
            of_dense = _csr(*back, (columns, rows)) @ slope
        return of_values, of_dense, None


@dataclass(frozen=True)
class Sparse:
    """Features [N, F] by their entries."""

    pattern: Pattern
    values: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.pattern.shape

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype


Features = Tensor | Sparse


def compact(x: Tensor) -> Features:
    """x [N, F], stored sparse where most of it is zero."""
    at = x.nonzero()
    if at.shape[0] >= SPARSE_BELOW * x.numel():
        return x
    row, column = at.t().contiguous()
    return Sparse(Pattern.of_sorted(row, column, (x.shape[0], x.shape[1])), x[row, column])


def projected(x: Features, weight: Tensor) -> Tensor:
    """x W^T [N, D]; x [N, F], weight [D, F]."""
    if isinstance(x, Sparse):
        return x.pattern.times(x.values, weight.t())
    return x @ weight.t()


def dropout(x: Features, rate: float, training: bool) -> Features:
    """Zeros stay zero, so only entries are drawn for."""
    if isinstance(x, Sparse):
        return Sparse(x.pattern, F.dropout(x.values, rate, training))
    return F.dropout(x, rate, training)


def scaled_rows(x: Features, factor: Tensor) -> Features:
    """factor_i x_i; factor [N], whose gradient is made."""
    if isinstance(x, Sparse):
        return Sparse(x.pattern, x.values * factor[x.pattern.row])
    return x * factor[:, None]


def scaled_columns(x: Features, factor: Tensor) -> Features:
    """x_ij factor_j; factor [F]."""
    if isinstance(x, Sparse):
        return Sparse(x.pattern, x.values * factor[x.pattern.column])
    return x * factor


def projected_with_rows(
    x: Features, weight: Tensor, rows: Tensor, content: Tensor, rate: float, training: bool
) -> Tensor:
    """dropout(x') W^T [N, D], where x' is x [N, F] with `content` [n, F] in its `rows` [n]."""
    if not isinstance(x, Sparse):
        return F.dropout(x.index_copy(0, rows, content), rate, training) @ weight.t()
    others = projected(dropout(x, rate, training), weight)
    return others.index_copy(0, rows, F.dropout(content, rate, training) @ weight.t())


class Attention(nn.Module):
    """Per head: out_v = sum_u a_vu h_u,  a_vu = softmax over u of LeakyReLU(r . h_v + s . h_u).

    h = X W, u runs over the entries of row v: the sources of its edges and v itself. The heads
    [N, out] are put side by side, or with `concat` False averaged; then a bias is added. P.
    Velickovic et al., "Graph Attention Networks", ICLR 2018. `dropout` is that of the shares a.
    """

    def __init__(
        self, num_features: int, out: int, heads: int, dropout: float, concat: bool = True
    ) -> None:
        super().__init__()
        self.heads, self.out_channels, self.concat, self.dropout = heads, out, concat, dropout
        self.lin = Linear(num_features, heads * out, bias=False, weight_initializer="glorot")
        self.att_src = nn.Parameter(torch.empty(1, heads, out))  # s
        self.att_dst = nn.Parameter(torch.empty(1, heads, out))  # r
        self.bias = nn.Parameter(torch.zeros(heads * out if concat else out))
        glorot(self.att_src)
        glorot(self.att_dst)

    def forward(self, x: Features, links: Pattern) -> Tensor:
        return self.attend(projected(x, self.lin.weight), links)

    def attend(self, h: Tensor, links: Pattern) -> Tensor:
        """The layer for h = X W [N, heads * out]; rows without entries hold the bias alone."""
        by_head = h.view(-1, self.heads, self.out_channels).transpose(0, 1)  # [heads, N, out]
        sent, received = (
            torch.bmm(by_head, vector.view(self.heads, -1, 1)).squeeze(2).t()
            for vector in (self.att_src, self.att_dst)
        )
        # index_select, unlike [...], has a fast gradient; [E, heads].
        logits = F.leaky_relu(
            sent.index_select(0, links.column) + received.index_select(0, links.row), SLOPE
        )
        share = softmax(logits, ptr=links.begins.long())
        share = F.dropout(share, self.dropout, self.training)
        outs = [links.times(a, one) for a, one in zip(share.t(), by_head, strict=True)]
        joined = torch.cat(outs, 1) if self.concat else torch.stack(outs).mean(0)
        return joined + self.bias
