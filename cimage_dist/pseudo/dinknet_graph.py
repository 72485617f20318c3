"""What Dink-Net takes from the graph: batches of nodes, Â X W for the nodes of a batch, and the embedding H (§6.4).

A global batch does not depend on the number of ranks; each rank works on its slice of it. Shapes: N nodes, F features, D width,
b nodes of the global batch, n of them on this rank, M messages (own loops among them), Z non-zero entries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from cimage_dist import keyed
from cimage_dist.comm import Comm
from cimage_dist.losses.modularity import unit_rows
from cimage_dist.nn.features import Features, SparseRows
from cimage_dist.nn.messages import weighted_sum
from cimage_dist.nn.tail import gcn_smooth
from cimage_dist.pseudo.dinknet_model import DinkNet
from cimage_dist.pseudo.propagated import columns_of, columns_to_rows, compute_dtype, gcn_scale, project, smooth
from cimage_dist.types import EdgeList, Topology

_CHUNK_VALUES = 1 << 24


@dataclass(frozen=True)
class Batch:
    """gids int64 [b] of the global batch and the part [begin, end) of this rank.

    src int64 [M] global ids, dst int64 [M] positions in the batch, ascending: the messages into all nodes of the batch, without own loops.
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
        """src and dst of the messages into this rank's nodes, dst counted from the first of them."""
        first, last = torch.searchsorted(self.dst, torch.tensor([self.begin, self.end], device=self.dst.device)).tolist()
        return self.src[first:last], self.dst[first:last] - self.begin

    def induced(self) -> EdgeList:
        """The edges with both ends in the batch, in positions."""
        ordered, at = self.gids.sort()
        found = torch.searchsorted(ordered, self.src).clamp_(max=ordered.numel() - 1)
        inside = ordered[found] == self.src
        return EdgeList(at[found[inside]], self.dst[inside], self.gids.numel())


class Nodes:
    """Features and graph, with what is asked again and again: D̂^-1/2 and the factors that make rows of non-negative features sum to 1."""

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
        """All nodes once, in an order given by the key and the global ids alone; one batch of all nodes where they fit."""
        if size >= self.num_nodes:
            yield self.everything
            return
        for gids in keyed.bits(key, torch.arange(self.num_nodes, device=self.x.device)).argsort().split(size):
            yield self.batch(gids)

    def batch(self, gids: Tensor) -> Batch:
        first = self.topology.indptr[gids]
        degrees = self.topology.indptr[gids + 1] - first
        dst, entry = _entries(first, degrees)
        return Batch(gids, *self.comm.slice_of(gids.numel()), self.topology.indices[entry].to(torch.int64), dst)

    def real_and_fake(self, batch: Batch, weight_FD: Tensor, key: int) -> tuple[Tensor, Tensor]:
        """Â X W and Â X'' W of this rank's nodes, [n, D] each; X'' has the rows of the batch and its neighbours permuted by the key (§6.4).

        All nodes at once: W first, as both share that product. Else Â first, as only the nodes of the batch are then multiplied by W.
        """
        if batch.gids.numel() == self.num_nodes:
            q_ND = project(self.x, weight_FD) * self.row_factor_N.unsqueeze(1)
            src, dst = batch.messages()
            edges, rows, degree_N = EdgeList(src, dst, self.num_nodes), slice(batch.begin, batch.end), self.topology.degrees() + 1
            fake_ND = q_ND[keyed.bits(key, batch.gids).argsort()]
            return gcn_smooth(q_ND, edges, degree_N, rows), gcn_smooth(fake_ND, edges, degree_N, rows)
        inputs = torch.cat([batch.gids, batch.src]).unique()
        permuted = inputs[keyed.bits(key, inputs).argsort()]
        src, _ = batch.messages()
        src = torch.cat([src, batch.mine])
        return project(self._smoothed(batch, src), weight_FD), project(self._smoothed(batch, permuted[torch.searchsorted(inputs, src)]), weight_FD)

    @torch.no_grad()
    def embedding(self, model: DinkNet, hops: int) -> Tensor:
        """Collective: this rank's rows, those of `comm.slice_of(N)`, of H = normalise(F(X) + Â^p F(X)) on the whole graph (§6.4); [n, D]."""
        blocks = columns_of(model.bias.numel(), self.comm)
        slab_ND = self.scale_N.new_empty(self.num_nodes, sum(b.stop - b.start for b in blocks))
        for block in blocks:
            q = project(self.x, model.weight[:, block]) * self.row_factor_N.unsqueeze(1)
            local = model.activate(smooth(q, self.topology, self.scale_N), block)
            spread = local
            for _ in range(hops):
                spread = smooth(spread, self.topology, self.scale_N)
            slab_ND[:, block.start - blocks[0].start : block.stop - blocks[0].start] = local + spread
        rows_nD = columns_to_rows(slab_ND, self.comm)
        return rows_nD.div_(torch.linalg.vector_norm(rows_nD, dim=1, keepdim=True).clamp_(min=1e-12))

    @torch.no_grad()
    def batch_embedding(self, model: DinkNet, batch: Batch, hops: int) -> Tensor:
        """Collective: H of this rank's nodes of the batch, the hops taken inside the subgraph induced by the batch (§6.4); [n, D]."""
        src, _ = batch.messages()
        local_nD = model.activate(project(self._smoothed(batch, torch.cat([src, batch.mine])), model.weight))
        local_bD = self.comm.gather_rows(local_nD)
        spread_bD, edges = local_bD, batch.induced()
        for _ in range(hops):
            spread_bD = gcn_smooth(spread_bD, edges)
        return unit_rows(local_nD + spread_bD[batch.begin : batch.end])

    def _smoothed(self, batch: Batch, rows: Tensor) -> Features:
        """Â X of this rank's nodes, [n, F]; `rows` [M + n] names the row of X that each message and then each own loop carries."""
        src, dst = batch.messages()
        num_mine = batch.end - batch.begin
        dst = torch.cat([dst, torch.arange(num_mine, device=dst.device)])
        weight = self.scale_N[torch.cat([src, batch.mine])] * self.scale_N[batch.mine][dst] * self.row_factor_N[rows]
        if isinstance(self.x, Tensor):
            return weighted_sum(self.x.new_zeros(num_mine, self.x.shape[1]), self.x, weight, rows, dst)
        message, entry = _entries(self._first_entry[rows], self._first_entry[rows + 1] - self._first_entry[rows])
        return SparseRows(dst[message], self.x.column[entry], self.x.value[entry] * weight[message], (num_mine, self.x.shape[1]))

    @cached_property
    def _first_entry(self) -> Tensor:
        """Where each sparse row begins, int64 [N+1]."""
        assert isinstance(self.x, SparseRows)
        return torch.searchsorted(self.x.row, torch.arange(self.num_nodes + 1, device=self.x.device))


def row_factors(x: Features) -> Tensor:
    """[N]: 1/Σ_f x_f where all features are non-negative, as the release scales bags of words; 1 where some are negative, and for zero rows."""
    if isinstance(x, SparseRows):
        lowest = x.value.min() if x.value.numel() else x.value.new_zeros(())
        sums = x.value.new_zeros(x.shape[0]).index_add_(0, x.row, x.value)
    else:
        parts = x.split(max(1, _CHUNK_VALUES // max(x.shape[1], 1)))
        lowest = torch.stack([part.amin() for part in parts]).amin()
        sums = torch.cat([part.sum(1) for part in parts])
    return torch.where((sums > 0) & (lowest >= 0), 1 / sums, 1.0)


def _entries(first: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """For ranges first[i] .. first[i] + counts[i] - 1 one after the other: i, and the element, of every element."""
    which = torch.repeat_interleave(counts)
    return which, torch.arange(which.numel(), device=which.device) + (first - counts.cumsum(0) + counts)[which]
