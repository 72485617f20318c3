"""Frozen records passed between stages. Ids: `gid` global node id, `bid` position in a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor


def _map_tensors(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """`value` with `fn` applied to every tensor of it and of the records inside."""
    if isinstance(value, Tensor):
        return fn(value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    return replace(
        value, **{f.name: _map_tensors(getattr(value, f.name), fn) for f in fields(value)}
    )


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

    `degree` float [N] is given where the messages do not give it: nodes at the rim of a sampled
    subgraph have fewer messages here than neighbours in the graph.
    """

    src: Tensor
    dst: Tensor
    num_nodes: int
    weight: Tensor | None = None
    degree: Tensor | None = None

    @cached_property
    def by_target(self) -> EdgeList:
        """The same messages sorted by target; itself where they are. Kept, as every layer asks."""
        if not bool((self.dst[1:] < self.dst[:-1]).any()):
            return self
        order = self.dst.argsort(stable=True)
        weight = None if self.weight is None else self.weight[order]
        return replace(self, src=self.src[order], dst=self.dst[order], weight=weight)

    @cached_property
    def _pointers(self) -> dict[int, Tensor]:
        return {}

    def pointers(self, num_targets: int) -> Tensor:
        """int64 [T+1]: the messages into target v are pointers[v] .. pointers[v+1], once sorted by
        target. Kept, as every layer asks.
        """
        if num_targets not in self._pointers:
            every = torch.arange(num_targets + 1, device=self.dst.device)
            self._pointers[num_targets] = torch.searchsorted(self.dst, every)
        return self._pointers[num_targets]

    def to(self, device: torch.device) -> Self:
        moved: Self = _map_tensors(self, lambda tensor: tensor.to(device))
        return moved


class Hops(NamedTuple):
    """A sampled subgraph in order: the number of seeds, of new nodes of each hop, and of messages
    into the seeds, the first hop, ...
    """

    nodes: tuple[int, ...]
    messages: tuple[int, ...]

    def within(self, edges: EdgeList, depth: int) -> tuple[EdgeList, slice]:
        """The messages into nodes at most `depth` hops from a seed, and the rows of those nodes:
        prefixes of both.
        """
        end = sum(self.messages[: depth + 1])
        weight = None if edges.weight is None else edges.weight[:end]
        near = replace(edges, src=edges.src[:end], dst=edges.dst[:end], weight=weight)
        return near, slice(0, sum(self.nodes[: depth + 1]))


SPARSE_SHARE = 0.1
"""Features are sparse where at most this share of their values is not zero: above it the dense
product is faster on a CPU.
"""


@dataclass(frozen=True)
class SparseRows:
    """The non-zero entries of a matrix [N, F], row by row: `row` and `column` int64 [Z], `value`
    [Z].

    Dropout draws for each entry by its number, or, with `draws_by_place`, by its place in the dense
    matrix, as it does for dense rows.
    """

    row: Tensor
    column: Tensor
    value: Tensor
    shape: tuple[int, int]
    draws_by_place: bool = False

    @property
    def device(self) -> torch.device:
        return self.value.device

    def to(self, *target: torch.device | torch.dtype) -> SparseRows:
        """On a device, with values of a type, as `Tensor.to`."""
        value: Tensor = self.value.to(*target)  # type: ignore[call-overload]
        row, column = (part.to(value.device) for part in (self.row, self.column))
        return replace(self, row=row, column=column, value=value)

    def to_dense(self) -> Tensor:
        """[N, F]."""
        out = self.value.new_zeros(self.shape)
        out[self.row, self.column] = self.value
        return out

    def split(self, rows: int) -> Iterator[SparseRows]:
        """`rows` rows at a time, as `Tensor.split`."""
        for begin in range(0, self.shape[0], rows):
            end = min(begin + rows, self.shape[0])
            first, last = torch.searchsorted(self.row, torch.tensor([begin, end])).tolist()
            yield replace(
                self,
                row=self.row[first:last] - begin,
                column=self.column[first:last],
                value=self.value[first:last],
                shape=(end - begin, self.shape[1]),
            )


Features: TypeAlias = Tensor | SparseRows


@dataclass(frozen=True)
class View:
    """What the encoder sees: the whole graph, or the sampled neighbourhoods of some nodes. n nodes.

    x [n, F]; `edges`: messages between rows of x. `nodes` int64 [s]: the rows asked for, in the
    order asked for, repeats included. `hops`: the order of a sampled subgraph, whose seeds are all
    nodes that the losses look at. `gids` int64 [n]: global ids of the rows; None: row i is node i.
    """

    x: Features
    edges: EdgeList
    nodes: Tensor
    hops: Hops | None = None
    gids: Tensor | None = None

    @property
    def node_gids(self) -> Tensor:
        """Global ids of `nodes`."""
        return self.nodes if self.gids is None else self.gids[self.nodes]

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        moved: Self = _map_tensors(self, lambda x: x.to(device, non_blocking=non_blocking))
        return moved

    def pin_memory(self) -> Self:
        """Page-locked tensors, for asynchronous copies to a GPU; called by torch's DataLoader."""
        pinned: Self = _map_tensors(self, lambda x: x.pin_memory())
        return pinned


@dataclass(frozen=True, kw_only=True)
class Batch(View):
    """This rank's share of the global batch of a step; counts are global. `nodes`: whose factors
    are reconstructed. A share may be empty.

    `pairs` int64 [p+q, 2], rows of x: p positives, then q non-edges, with `weight` float32 [p+q],
    0 for padding (None: all 1); `node_weight` [s] likewise. global_pos, global_neg, global_nodes:
    sums of those weights over all ranks, by which losses are divided. `modularity`: edges of the
    full-graph form of the clustering loss, or None for the form that uses the positives. `second`:
    another view of `nodes`, for the redundancy loss.
    """

    pairs: Tensor
    num_pos: int
    weight: Tensor | None = None
    node_weight: Tensor | None = None
    modularity: EdgeList | None = None
    global_pos: float
    global_neg: float
    global_nodes: float
    second: View | None = None


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
    with cov ≈ cov_factorᵀ cov_factor, in single precision once stored.
    """

    mean: Tensor
    sqmean: Tensor
    cov: Tensor | None
    cov_factor: Tensor | None

    def as_stored(self) -> FeatureMoments:
        """With the covariance in the precision that a store keeps it in, single."""
        cov = None if self.cov is None else self.cov.float().double()
        factor = None if self.cov_factor is None else self.cov_factor.float()
        return FeatureMoments(self.mean, self.sqmean, cov, factor)


@dataclass(frozen=True)
class Mean:
    """A mean in two halves, so that it can be summed over processes before it is divided."""

    total: Tensor
    count: float

    def value(self) -> Tensor:
        """total / count; an empty mean is 0, still attached to the autograd graph."""
        return self.total / (self.count or 1)


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
