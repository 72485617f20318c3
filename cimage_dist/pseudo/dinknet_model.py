"""What Dink-Net takes from the graph: batches of nodes, Â X W for the nodes of a batch, and the
embedding H (§6.4).

A global batch does not depend on the number of ranks; each rank works on its slice of it. Shapes: N
nodes, F features, D width, b nodes of the global batch, n of them on this rank, M messages (own
loops among them), Z non-zero entries.

The network of Dink-Net and its losses (§6.4). Shapes: N nodes, F features, D width, C clusters, n
rows of this rank.

Every loss here is this rank's share: the sum over ranks of values is the loss, the sum of gradients
its gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cimage_dist import keyed
from cimage_dist.comm import Comm
from cimage_dist.losses import unit_rows
from cimage_dist.nn.propagate import gcn_smooth, weighted_sum
from cimage_dist.pseudo.propagated import (
    columns_of,
    columns_to_rows,
    compute_dtype,
    gcn_scale,
    project,
    smooth,
)
from cimage_dist.types import EdgeList, Features, SparseRows, Topology

_CHUNK_VALUES = 1 << 24


@dataclass(frozen=True)
class Batch:
    """gids int64 [b] of the global batch and the part [begin, end) of this rank.

    src int64 [M] global ids, dst int64 [M] positions in the batch, ascending: the messages into all
    nodes of the batch, without own loops.
    """

    gids: Tensor
    begin: int
    end: int
    src: Tensor
    dst: Tensor

    @property
    def mine(self) -> Tensor:
        return self.gids[self.begin : self.end]

    def messages(self) -> tuple[Tensor, Tensor]:
        """src and dst of the messages into this rank's nodes, dst counted from the first of
        them.
        """
        ends = torch.tensor([self.begin, self.end], device=self.dst.device)
        first, last = torch.searchsorted(self.dst, ends).tolist()
        return self.src[first:last], self.dst[first:last] - self.begin

    def induced(self) -> EdgeList:
        """The edges with both ends in the batch, in positions."""
        ordered, at = self.gids.sort()
        found = torch.searchsorted(ordered, self.src).clamp_(max=ordered.numel() - 1)
        inside = ordered[found] == self.src
        return EdgeList(at[found[inside]], self.dst[inside], self.gids.numel())


class Nodes:
    """Features and graph, with what is asked again and again: D̂^-1/2 and the factors that make
    rows of non-negative features sum to 1.
    """

    def __init__(self, x: Features, topology: Topology, comm: Comm) -> None:
        self.x = x.to(compute_dtype(x))
        self.topology = Topology(topology.indptr.to(x.device), topology.indices.to(x.device))
        self.comm = comm
        self.scale_N = gcn_scale(self.topology, x)
        self.row_factor_N = row_factors(self.x)

    @property
    def num_nodes(self) -> int:
        return self.topology.num_nodes

    @cached_property
    def everything(self) -> Batch:
        return self.batch(torch.arange(self.num_nodes, device=self.x.device))

    def batches(self, size: int, key: int) -> Iterator[Batch]:
        """All nodes once, in an order given by the key and the global ids alone; one batch of all
        nodes where they fit.
        """
        if size >= self.num_nodes:
            yield self.everything
            return
        order = keyed.bits(key, torch.arange(self.num_nodes, device=self.x.device)).argsort()
        yield from map(self.batch, order.split(size))

    def batch(self, gids: Tensor) -> Batch:
        first = self.topology.indptr[gids]
        degrees = self.topology.indptr[gids + 1] - first
        dst, entry = _entries(first, degrees)
        src = self.topology.indices[entry].to(torch.int64)
        return Batch(gids, *self.comm.slice_of(gids.numel()), src, dst)

    def real_and_fake(self, batch: Batch, weight_FD: Tensor, key: int) -> tuple[Tensor, Tensor]:
        """Â X W and Â X'' W of this rank's nodes, [n, D] each; X'' has the rows of the batch and
        its neighbours permuted by the key (§6.4).

        All nodes at once: W first, as both share that product. Else Â first, as only the nodes of
        the batch are then multiplied by W.
        """
        if batch.gids.numel() == self.num_nodes:
            q_ND = project(self.x, weight_FD) * self.row_factor_N.unsqueeze(1)
            edges, rows = EdgeList(*batch.messages(), self.num_nodes), slice(batch.begin, batch.end)
            degree_N = self.topology.degrees() + 1
            fake_ND = q_ND[keyed.bits(key, batch.gids).argsort()]
            real, fake = (gcn_smooth(q, edges, degree_N, rows) for q in (q_ND, fake_ND))
            return real, fake
        inputs = torch.cat([batch.gids, batch.src]).unique()
        permuted = inputs[keyed.bits(key, inputs).argsort()]
        src, _ = batch.messages()
        src = torch.cat([src, batch.mine])
        carried = (src, permuted[torch.searchsorted(inputs, src)])
        real, fake = (project(self._smoothed(batch, rows), weight_FD) for rows in carried)
        return real, fake

    @torch.no_grad()
    def embedding(self, model: DinkNet, hops: int) -> Tensor:
        """Collective: this rank's rows, those of `comm.slice_of(N)`, of H = normalise(F(X) + Â^p
        F(X)) on the whole graph (§6.4); [n, D].
        """
        blocks = columns_of(model.bias.numel(), self.comm)
        slab_ND = self.scale_N.new_empty(self.num_nodes, sum(b.stop - b.start for b in blocks))
        for block in blocks:
            q = project(self.x, model.weight[:, block]) * self.row_factor_N.unsqueeze(1)
            local = model.activate(smooth(q, self.topology, self.scale_N), block)
            spread = local
            for _ in range(hops):
                spread = smooth(spread, self.topology, self.scale_N)
            first = blocks[0].start
            slab_ND[:, block.start - first : block.stop - first] = local + spread
        rows_nD = columns_to_rows(slab_ND, self.comm)
        norms = torch.linalg.vector_norm(rows_nD, dim=1, keepdim=True)
        return rows_nD.div_(norms.clamp_(min=1e-12))

    @torch.no_grad()
    def batch_embedding(self, model: DinkNet, batch: Batch, hops: int) -> Tensor:
        """Collective: H of this rank's nodes of the batch, the hops taken inside the subgraph
        induced by the batch (§6.4); [n, D].
        """
        src, _ = batch.messages()
        smoothed = self._smoothed(batch, torch.cat([src, batch.mine]))
        local_nD = model.activate(project(smoothed, model.weight))
        local_bD = self.comm.gather_rows(local_nD)
        spread_bD, edges = local_bD, batch.induced()
        for _ in range(hops):
            spread_bD = gcn_smooth(spread_bD, edges)
        return unit_rows(local_nD + spread_bD[batch.begin : batch.end])

    def _smoothed(self, batch: Batch, rows: Tensor) -> Features:
        """Â X of this rank's nodes, [n, F]; `rows` [M + n] names the row of X that each message and
        then each own loop carries.
        """
        src, dst = batch.messages()
        num_mine = batch.end - batch.begin
        dst = torch.cat([dst, torch.arange(num_mine, device=dst.device)])
        weight = self.scale_N[torch.cat([src, batch.mine])] * self.scale_N[batch.mine][dst]
        weight, shape = weight * self.row_factor_N[rows], (num_mine, self.x.shape[1])
        if isinstance(self.x, Tensor):
            return weighted_sum(self.x.new_zeros(shape), self.x, weight, rows, dst)
        first = self._first_entry[rows]
        message, entry = _entries(first, self._first_entry[rows + 1] - first)
        value = self.x.value[entry] * weight[message]
        return SparseRows(dst[message], self.x.column[entry], value, shape)

    @cached_property
    def _first_entry(self) -> Tensor:
        """Where each sparse row begins, int64 [N+1]."""
        assert isinstance(self.x, SparseRows)
        rows = torch.arange(self.num_nodes + 1, device=self.x.device)
        return torch.searchsorted(self.x.row, rows)


def row_factors(x: Features) -> Tensor:
    """[N]: 1/Σ_f x_f where all features are non-negative, as the release scales bags of words; 1
    where some are negative, and for zero rows.
    """
    if isinstance(x, SparseRows):
        lowest = x.value.min() if x.value.numel() else x.value.new_zeros(())
        sums = x.value.new_zeros(x.shape[0]).index_add_(0, x.row, x.value)
    else:
        parts = x.split(max(1, _CHUNK_VALUES // max(x.shape[1], 1)))
        lowest = torch.stack([part.amin() for part in parts]).amin()
        sums = torch.cat([part.sum(1) for part in parts])
    return torch.where((sums > 0) & (lowest >= 0), 1 / sums, 1.0)


def _entries(first: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """For ranges first[i] .. first[i] + counts[i] - 1 one after the other: i, and the element, of
    every element.
    """
    which, shift = torch.repeat_interleave(counts), first - counts.cumsum(0) + counts
    return which, torch.arange(which.numel(), device=which.device) + shift[which]


class DinkNet(nn.Module):
    """F(X) = PReLU(Â X W + b) and the discriminating head Linear(D -> D) summed over its outputs
    (§6.4). weight [F, D], bias [D].

    Glorot-uniform W, b = 0, one slope for all channels. The caller multiplies by Â, before or after
    W, whichever is cheaper.
    """

    def __init__(self, num_features: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.xavier_uniform_(torch.empty(num_features, width)))
        self.bias = nn.Parameter(torch.zeros(width))
        self.slope = nn.Parameter(torch.tensor(0.25))
        self.head = nn.Linear(width, width)

    def activate(self, pre_ND: Tensor, columns: slice = slice(None)) -> Tensor:
        """F(X) from Â X W, for some of the columns."""
        return F.prelu(pre_ND + self.bias[columns], self.slope.unsqueeze(0))

    def logits(self, pre_ND: Tensor) -> Tensor:
        """Σ_k (V F(x) + v)_k, [N]. Summed over the rows of V first: the same number with D times
        less work.
        """
        return self.activate(pre_ND) @ self.head.weight.sum(0) + self.head.bias.sum()


def masked_columns(num_features: int, rate: float, key: int, like: Tensor) -> Tensor:
    """1 for a kept feature and 0 for a masked one, [F, 1]; ⌊rate F⌋ are masked, chosen by the
    key.
    """
    keep = torch.ones(num_features, 1, dtype=like.dtype, device=like.device)
    order = keyed.bits(key, torch.arange(num_features, device=like.device)).argsort()
    keep[order[: int(rate * num_features)]] = 0
    return keep


def discrimination_loss(real: Tensor, fake: Tensor, batch: int) -> Tensor:
    """Binary cross-entropy of the logits with real = 1 and fake = 0, mean over the 2·batch of all
    ranks (§6.4). real, fake [n].
    """
    return (F.softplus(-real).sum() + F.softplus(fake).sum()) / (2 * batch)


def clustering_loss(h_nD: Tensor, centres_CD: Tensor, batch: int, comm: Comm) -> Tensor:
    """`mean_{i,j} |H_i - c_j|² - (1/(C(C-1))) Σ_{i≠j} |c_i - c_j|²`: shrink and dilation (§6.4),
    over the `batch` rows of all ranks.

    Squares are multiplied out, so that only sums of H and of the centres are needed: O((n + C)·D),
    nothing of size n x C.
    """
    count = centres_CD.shape[0]
    squares, total_D = centres_CD.square().sum(), centres_CD.sum(0)
    shrink = count * h_nD.square().sum() - 2 * (h_nD.sum(0) @ total_D) + h_nD.shape[0] * squares
    dilation = 2 * (count * squares - total_D.square().sum()) / (count * (count - 1))
    return shrink / (batch * count) - dilation / comm.world


@torch.no_grad()
def project_to_ball(centres_CD: Tensor) -> None:
    """In place: centres longer than 1 are shortened to 1. The loss is unbounded below without it
    (§6.4).
    """
    centres_CD.div_(torch.linalg.vector_norm(centres_CD, dim=1, keepdim=True).clamp(min=1.0))
