"""What one optimiser step works on: made from the whole graph, or from sampled neighbourhoods of
seed edges.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from cimage_dist import keyed
from cimage_dist.comm import Comm
from cimage_dist.config import Config
from cimage_dist.nn.features import Features, drop_columns
from cimage_dist.nn.messages import Hops
from cimage_dist.nn.model import View
from cimage_dist.sampling.loader import BatchLoader, BatchSource
from cimage_dist.sampling.masking import MaskedGraph, PathMasker, most_masked
from cimage_dist.types import EdgeList, SampledBatch, SampledView, Topology


@dataclass(frozen=True)
class StepBatch:
    """This rank's share of one global batch; counts are global.

    x [n, F] and `edges`: what the encoder sees. `pairs` int64 [p+q, 2]: p positives, then q
    non-edges, with `weight` [p+q] 0 for padding (None: all 1). `nodes` int64: whose factors are
    reconstructed, with `node_weight`. `modularity`: edges of the full-graph form of the clustering
    loss, or None for the form that uses the positives. `hops`: the order of a sampled subgraph,
    whose seeds are all nodes that the losses look at. `gids` int64: global ids of `nodes`.
    `second`: another view of `nodes`, for the redundancy loss.
    """

    x: Features
    edges: EdgeList
    pairs: Tensor
    num_pos: int
    weight: Tensor | None
    nodes: Tensor
    node_weight: Tensor | None
    modularity: EdgeList | None
    global_pos: float
    global_neg: float
    global_nodes: float
    hops: Hops | None = None
    gids: Tensor | None = None
    second: View | None = None


def _columns(x: Features, cfg: Config, step: int, view: int) -> Features:
    """x as a view of a step sees it: without the columns drawn for it, the same on all ranks."""
    return drop_columns(
        x, cfg.mask.feature_rate, keyed.stream(cfg.run.seed, "view-columns", step, view)
    )


class Batches(Protocol):
    steps_per_epoch: int

    def iterate(self, start: int, end: int) -> Iterator[StepBatch]:
        """The batches of steps [start, end); each is a function of the step number alone."""
        ...


class FullGraphBatches:
    """Step s of a full-graph run is part s mod P of the mask of epoch s div P.

    P = ceil(most edges a mask can hold / batch_edges), so the step number alone names the batch.
    Several ranks all encode the whole graph and share out the pairs, nodes and edges of the losses:
    the same experiment at any world size.
    """

    def __init__(self, x: Features, topology: Topology, cfg: Config, comm: Comm) -> None:
        self.x, self.cfg, self.comm = x, cfg, comm
        self.masker = PathMasker(topology, cfg.mask, cfg.run.seed)
        most = most_masked(cfg.mask, topology.num_nodes, topology.num_edges)
        self.steps_per_epoch = max(1, math.ceil(most / cfg.train.batch_edges))
        self._masks: dict[
            int, tuple[int, MaskedGraph]
        ] = {}  # of each view: the epoch, and its mask

    def _mask_of(self, epoch: int, view: int = 0) -> MaskedGraph:
        if view not in self._masks or self._masks[view][0] != epoch:
            mask = self.masker.mask(epoch, view)
            if self.steps_per_epoch > 1:
                draws = keyed.uniform(
                    keyed.stream(self.cfg.run.seed, "batch-order", epoch),
                    torch.arange(mask.masked.shape[0]),
                )
                mask = mask._replace(masked=mask.masked[draws.argsort(stable=True)])
            self._masks[view] = epoch, mask._replace(visible=mask.visible.to(self.x.device))
        return self._masks[view][1]

    def _view(self, step: int, view: int) -> tuple[Features, EdgeList]:
        """Features and edges that the encoder sees in a view of a step."""
        mask = self._mask_of(step // self.steps_per_epoch, view)
        return _columns(self.x, self.cfg, step, view), self.masker.hide_more(
            mask.visible, step, view
        )

    def batch(self, step: int) -> StepBatch:
        epoch, part = divmod(step, self.steps_per_epoch)
        mask = self._mask_of(epoch)
        total = mask.masked.shape[0]
        positives = mask.masked[
            total * part // self.steps_per_epoch : total * (part + 1) // self.steps_per_epoch
        ]
        # Without an edge decoder nobody looks at non-edges.
        wanted = positives.shape[0] if self.cfg.loss.structure_weight > 0 else 0
        negatives = self.masker.negatives(wanted, step)
        pos, neg = (
            pairs[slice(*self.comm.slice_of(pairs.shape[0]))] for pairs in (positives, negatives)
        )
        num_nodes = self.x.shape[0]
        x, visible = self._view(step, 0)
        nodes = torch.arange(*self.comm.slice_of(num_nodes), device=self.x.device)
        return StepBatch(
            x=x,
            edges=visible,
            pairs=torch.cat([pos, neg]).to(self.x.device),
            num_pos=pos.shape[0],
            weight=None,
            nodes=nodes,
            node_weight=None,
            modularity=_share_of_edges(visible, self.comm),
            global_pos=positives.shape[0],
            global_neg=negatives.shape[0],
            global_nodes=num_nodes,
            gids=nodes,
            second=View(*self._view(step, 1), nodes)
            if self.cfg.loss.redundancy_weight > 0
            else None,
        )

    def iterate(self, start: int, end: int) -> Iterator[StepBatch]:
        for step in range(start, end):
            yield self.batch(step)


def _share_of_edges(edges: EdgeList, comm: Comm) -> EdgeList:
    begin, end = comm.slice_of(edges.src.numel())
    return (
        edges
        if comm.world == 1
        else replace(edges, src=edges.src[begin:end], dst=edges.dst[begin:end])
    )


class SampledBatches:
    """Seed edges with their sampled neighbourhoods; an epoch is one pass over all undirected edges
    (§3.3, §11.1).

    `features` [N, F] is the store's array as it is: a mapped file stays on disk, in its own type,
    and only the rows of a batch are read.
    """

    def __init__(
        self,
        features: np.ndarray,
        topology: Topology,
        cfg: Config,
        comm: Comm,
        device: torch.device,
    ) -> None:
        self.cfg, self.device = cfg, device
        sampler = cfg.sampler
        self.source = BatchSource(
            topology.indptr.numpy(),
            topology.indices.numpy(),
            fanouts=sampler.fanouts,
            batch_edges=sampler.batch_edges,
            seed=cfg.run.seed,
            rank=comm.rank,
            world=comm.world,
            hide_rate=sampler.hide_rate,
            rescale=sampler.rescale,
            backend=sampler.backend,
            features=features,
            views=2 if cfg.loss.redundancy_weight > 0 else 1,
            has_negatives=cfg.loss.structure_weight > 0,
        )
        self.steps_per_epoch = self.source.schedule.steps_per_epoch

    def convert(self, batch: SampledBatch) -> StepBatch:
        batch = batch.to(self.device, non_blocking=True)
        nodes = batch.pos.reshape(-1)
        second = None if batch.second is None else View(*self._view(batch.second, batch.step, 1))
        x, edges, _, hops = self._view(batch, batch.step, 0)
        return StepBatch(
            x=x,
            edges=edges,
            pairs=torch.cat([batch.pos, batch.neg]),
            num_pos=batch.pos.shape[0],
            weight=torch.cat([batch.pos_weight, batch.neg_weight]),
            nodes=nodes,
            node_weight=batch.pos_weight.repeat_interleave(2),
            modularity=None,
            global_pos=batch.global_pos,
            global_neg=batch.global_neg,
            global_nodes=2 * batch.global_pos,
            hops=hops,
            gids=batch.node_gid[nodes],
            second=second,
        )

    def _view(
        self, sample: SampledBatch | SampledView, step: int, view: int
    ) -> tuple[Features, EdgeList, Tensor, Hops]:
        """Features, messages, rows of the positives' endpoints, and hops of a view."""
        assert sample.x is not None
        x = _columns(sample.x.to(torch.get_default_dtype()), self.cfg, step, view)
        edges = replace(sample.edges, degree=sample.degree)
        return x, edges, sample.pos.reshape(-1), Hops(sample.nodes_per_hop, sample.edges_per_hop)

    def iterate(self, start: int, end: int) -> Iterator[StepBatch]:
        sampler = self.cfg.sampler
        loader = BatchLoader(
            self.source,
            start,
            end,
            workers=sampler.loader_processes,
            prefetch=sampler.prefetch,
            pin_memory=self.device.type == "cuda",
        )
        for batch in loader:
            yield self.convert(batch)
