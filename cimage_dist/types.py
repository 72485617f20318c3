"""Frozen records passed between stages. Ids: `gid` global node id, `bid` position in a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Topology:
    """A symmetric graph without self-loops, destination-sorted: neighbours of v are
    `indices[indptr[v]:indptr[v+1]]`, ascending.

    indptr int64 [N+1], indices int32 or int64 [E]; E counts both directions. Because the graph is
    symmetric, entry e of row v stands for the directed edge v -> indices[e] as well as for the
    message indices[e] -> v.
    """

    indptr: Tensor
    indices: Tensor

    @property
    def num_nodes(self) -> int:
        return self.indptr.numel() - 1

    @property
    def num_edges(self) -> int:
        return self.indices.numel()

    def degrees(self) -> Tensor:
        return self.indptr.diff()

    def rows(self) -> Tensor:
        """Row id v of every entry, int64 [E]."""
        return torch.repeat_interleave(self.degrees())

    def edge_list(self) -> EdgeList:
        return EdgeList(self.indices.to(torch.int64), self.rows(), self.num_nodes)


@dataclass(frozen=True)
class EdgeList:
    """Directed messages src -> dst, usually sorted by dst. src, dst int64 [E]; weight float [E] or
    None for all ones.

    `degree` float [N] is given where the messages do not tell it: nodes at the rim of a sampled
    subgraph have fewer messages here than neighbours in the graph.
    """

    src: Tensor
    dst: Tensor
    num_nodes: int
    weight: Tensor | None = None
    degree: Tensor | None = None

    def by_target(self) -> EdgeList:
        """The same messages sorted by target; itself where they are. Kept, as every layer asks."""
        kept: EdgeList | None = self.__dict__.get("_sorted")
        if kept is None:
            kept = self
            if bool((self.dst[1:] < self.dst[:-1]).any()):
                order = self.dst.argsort(stable=True)
                weight = None if self.weight is None else self.weight[order]
                kept = EdgeList(
                    self.src[order], self.dst[order], self.num_nodes, weight, self.degree
                )
            self.__dict__["_sorted"] = kept
        return kept

    def pointers(self, num_targets: int) -> Tensor:
        """int64 [T+1]: the messages into target v are pointers[v] .. pointers[v+1], once sorted by
        target. Kept, as every layer asks.
        """
        kept: dict[int, Tensor] = self.__dict__.setdefault("_pointers", {})
        if num_targets not in kept:
            kept[num_targets] = torch.searchsorted(
                self.dst, torch.arange(num_targets + 1, device=self.dst.device)
            )
        return kept[num_targets]

    def to(self, device: torch.device) -> EdgeList:
        weight, degree = (None if t is None else t.to(device) for t in (self.weight, self.degree))
        return EdgeList(self.src.to(device), self.dst.to(device), self.num_nodes, weight, degree)


@dataclass(frozen=True)
class NodeSplit:
    """Boolean masks [N]; pairwise disjoint. Nodes in none of them are unused."""

    train: Tensor
    val: Tensor
    test: Tensor


@dataclass(frozen=True)
class LinkSplit:
    """Undirected edges held out of training. Pairs are int64 [n, 2]; `train` holds the remaining
    edges, both directions.
    """

    train: Topology
    val_pos: Tensor
    val_neg: Tensor
    test_pos: Tensor
    test_neg: Tensor


@dataclass(frozen=True)
class FeatureMoments:
    """Moments of the node features over all nodes (§2.1), float64: `mean` and `sqmean` = E[x²] are
    [F].

    The (population) covariance is either `cov` [F, F], or, for wide features, `cov_factor` [r, F]
    with cov ≈ cov_factorᵀ cov_factor.
    """

    mean: Tensor
    sqmean: Tensor
    cov: Tensor | None
    cov_factor: Tensor | None

    def as_stored(self) -> FeatureMoments:
        """With the covariance in the precision that a store keeps it in, single."""
        kept = [
            None if part is None else part.float().double() for part in (self.cov, self.cov_factor)
        ]
        return FeatureMoments(self.mean, self.sqmean, *kept)


@dataclass(frozen=True)
class Mean:
    """A mean in two halves, so that it can be summed over processes before it is divided."""

    total: Tensor
    count: float

    def value(self) -> Tensor:
        """total / count; an empty mean is 0, still attached to the autograd graph."""
        return self.total / (self.count or 1)


@dataclass(frozen=True)
class SampledView:
    """A second, independent neighbourhood of a batch's positives; fields as in SampledBatch, `pos`
    in this view's local ids."""

    node_gid: Tensor
    edges: EdgeList
    degree: Tensor
    nodes_per_hop: tuple[int, ...]
    edges_per_hop: tuple[int, ...]
    pos: Tensor
    x: Tensor | None = None

    def _map(self, fn: Callable[[Tensor], Tensor]) -> SampledView:
        tensors: dict[str, Any] = {
            name: fn(getattr(self, name)) for name in ("node_gid", "degree", "pos")
        }
        x = None if self.x is None else fn(self.x)
        return replace(self, edges=_map_edges(self.edges, fn), x=x, **tensors)


def _map_edges(edges: EdgeList, fn: Callable[[Tensor], Tensor]) -> EdgeList:
    weight, degree = (None if t is None else fn(t) for t in (edges.weight, edges.degree))
    return EdgeList(fn(edges.src), fn(edges.dst), edges.num_nodes, weight, degree)


@dataclass(frozen=True)
class SampledBatch:
    """This rank's part of the global batch of a step, with the neighbourhood needed to encode it. n
    nodes, b positives, c negatives.

    node_gid int64 [n]: seeds (endpoints of the pairs) first, then hop by hop. edges: messages in
    local ids (bid), used by every routing layer; weight None where all are 1. degree float32 [n]:
    visible degree, of nodes without messages here too. nodes_per_hop: seeds, then new nodes of each
    hop; edges_per_hop: messages into the seeds, into the first hop, and so on. pos int64 [b, 2],
    neg int64 [c, 2]: pairs in local ids, with float32 weights, 0 for padding. global_pos,
    global_neg: sums of those weights over all ranks, the counts by which losses are divided. b, c
    and n may be 0 on a rank. x [n, F]: features of the nodes in the store's own type, where the
    source was given them. `second`: the same positives seen again, where two views are asked for.
    """

    step: int
    node_gid: Tensor
    edges: EdgeList
    degree: Tensor
    nodes_per_hop: tuple[int, ...]
    edges_per_hop: tuple[int, ...]
    pos: Tensor
    pos_weight: Tensor
    neg: Tensor
    neg_weight: Tensor
    global_pos: float
    global_neg: float
    x: Tensor | None = None
    second: SampledView | None = None

    def _map(self, fn: Callable[[Tensor], Tensor]) -> SampledBatch:
        x = None if self.x is None else fn(self.x)
        second = None if self.second is None else self.second._map(fn)
        tensors: dict[str, Any] = {
            name: fn(getattr(self, name))
            for name in ("node_gid", "degree", "pos", "pos_weight", "neg", "neg_weight")
        }
        return replace(self, edges=_map_edges(self.edges, fn), x=x, second=second, **tensors)

    def to(self, device: torch.device, non_blocking: bool = False) -> SampledBatch:
        return self._map(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> SampledBatch:
        """Page-locked tensors, for asynchronous copies to a GPU; called by torch's DataLoader."""
        return self._map(lambda x: x.pin_memory())


@dataclass(frozen=True)
class CIScores:
    """The partition of K factors into contexts F1 (`in_context` True, non-zero score) and F2, with
    where it came from.

    scores float64 [K] in [0, 1], in_context bool [K], omega float64 [D] the feature weights behind
    the scores, lam the penalty used (0 when no solve took place). status: "ok", "kept-previous",
    "random-half", "fallback-top-b", "fallback-smallest", "single-factor" or "skipped-nonfinite";
    the caller counts the last one and gives up after three in a row. All tensors live on the CPU.
    """

    scores: Tensor
    in_context: Tensor
    lam: float
    sigma2: float
    omega: Tensor
    num_solves: int
    status: str
    notes: str = ""
