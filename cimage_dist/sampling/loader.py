"""Sampled batches, step by step: `BatchSource` makes the batch of any step, `BatchLoader` makes a
range of them ahead of time.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from cimage_dist import keyed
from cimage_dist.config import Config
from cimage_dist.data.sparse import CsrFeatures
from cimage_dist.errors import UserError
from cimage_dist.sampling.csr import expect_scattered
from cimage_dist.sampling.hidden import HiddenEdges, hide
from cimage_dist.sampling.sampler import NeighbourSampler
from cimage_dist.sampling.seeds import IntArray, SeedBatch, SeedSchedule, communities, rank_slice
from cimage_dist.types import Batch, Topology, View


class BatchSource(Dataset[Batch]):
    """`source[step]` is the batch of a step: a function of (seed, step, rank, world) and of nothing
    that happened before.

    The global batch of `batch_edges` undirected edges does not depend on `world`; rank r takes
    positions [B r / W, B (r+1) / W) of it, in an order that puts pairs of one community of the
    graph beside each other: they share neighbours. Message passing sees none of the global batch's
    edges, in either direction, nor the keyed share `hide_rate` of all others (§3.3).
    `features` [N, F], a mapped file as a rule, are read where the batch is made, so that with
    loader processes reading overlaps training as sampling does. `views=2` adds a second,
    independent neighbourhood of the positives, which hides the batch's edges too; without
    `has_negatives` none are drawn.
    """

    def __init__(
        self,
        indptr: IntArray,
        indices: IntArray,
        *,
        fanouts: Sequence[int],
        batch_edges: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
        hide_rate: float = 0.0,
        rescale: bool = True,
        backend: str = "auto",
        features: NDArray[Any] | CsrFeatures | None = None,
        views: int = 1,
        has_negatives: bool = True,
    ) -> None:
        if not 0 <= hide_rate < 1:
            raise UserError(
                f"sampler.hide_rate is {hide_rate}; it is the share of edges hidden besides the "
                "batch's own and must lie in [0, 1)."
            )
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} does not exist in a world of {world}")
        self.schedule = SeedSchedule(indptr, indices, batch_edges, seed)
        self.sampler = NeighbourSampler(indptr, indices, fanouts, backend=backend, rescale=rescale)
        self.features = features
        expect_scattered(features)
        self.seed = seed
        self.hide_rate = hide_rate
        self.views, self.has_negatives = views, has_negatives
        self.begin, self.end = rank_slice(batch_edges, rank, world)
        # Of larger graphs a rank draws its own negatives alone, and seeds seldom share neighbours.
        is_shared = world > 1 and self.schedule.has_rejection
        self.group = communities(self.schedule.indptr, self.schedule.indices) if is_shared else None
        # Compile before loader processes are forked, so that they inherit the machine code instead
        # of each making its own.
        self.sampler.sample(np.empty(0, dtype=np.int64), 0, self.hidden(0, self.schedule.batch(0)))

    @classmethod
    def of(
        cls,
        topology: Topology,
        cfg: Config,
        rank: int,
        world: int,
        features: NDArray[Any] | CsrFeatures | None = None,
    ) -> BatchSource:
        """As a config has it."""
        sampler = cfg.sampler
        return cls(
            topology.indptr.numpy(),
            topology.indices.numpy(),
            fanouts=sampler.fanouts,
            batch_edges=sampler.batch_edges,
            seed=cfg.run.seed,
            rank=rank,
            world=world,
            hide_rate=sampler.hide_rate,
            rescale=sampler.rescale,
            backend=sampler.backend,
            features=features,
            views=2 if cfg.loss.redundancy_weight > 0 else 1,
            has_negatives=cfg.loss.structure_weight > 0,
        )

    def hidden(self, step: int, batch: SeedBatch, view: int = 0) -> HiddenEdges:
        """The edges that message passing must not see in a view of a step, given its global
        batch.
        """
        key = keyed.stream(self.seed, "mask-extra", step, view=view)
        return hide(self.schedule.num_nodes, batch.u, batch.v, self.hide_rate, key)

    def _negatives(self, step: int, whole: SeedBatch) -> tuple[SeedBatch, float]:
        """(this rank's negatives, how many all ranks have)."""
        if not self.has_negatives:
            return whole.part(0, 0), 0.0
        if (
            self.schedule.has_rejection
        ):  # how many negatives could be placed is known only after placing all of them
            all_neg = self.schedule.negatives(step).ordered(self.group)
            return all_neg.part(self.begin, self.end), all_neg.total
        return self.schedule.negatives(step, self.begin, self.end), whole.total

    def _view(self, step: int, whole: SeedBatch, view: int, *ends: NDArray[np.int64]) -> View:
        key = keyed.stream(self.seed, "neighbours", step, view=view)
        hidden = self.hidden(step, whole, view)
        return self.sampler.sample(np.concatenate(ends), key, hidden, self.features)

    def __getitem__(self, step: int) -> Batch:
        whole = self.schedule.batch(step).ordered(self.group)
        pos = whole.part(self.begin, self.end)
        neg, global_neg = self._negatives(step, whole)
        view, second = self._view(step, whole, 0, pos.u, pos.v, neg.u, neg.v), None
        num_pos = len(pos.u)
        positives, negatives = (_pairs(ends) for ends in view.nodes.tensor_split([2 * num_pos]))
        if self.views > 1:
            second = self._view(step, whole, 1, pos.u, pos.v)
            second = replace(second, nodes=_pairs(second.nodes).reshape(-1))
        return Batch(
            x=view.x,
            edges=view.edges,
            nodes=positives.reshape(-1),
            hops=view.hops,
            gids=view.gids,
            pairs=torch.cat([positives, negatives]),
            num_pos=num_pos,
            weight=torch.from_numpy(np.concatenate([pos.weight, neg.weight])),
            node_weight=torch.from_numpy(pos.weight.repeat(2)),
            global_pos=whole.total,
            global_neg=global_neg,
            global_nodes=2 * whole.total,
            second=second,
        )


def _pairs(ends: Tensor) -> Tensor:
    """[b, 2] from all first ends and then all second ones, [2b]."""
    return ends.view(2, -1).t()


class BatchLoader:
    """Iterate over the batches of steps [start_step, end_step) in order, made by `workers`
    processes (0: by this one).

    Batches do not depend on `workers` or `prefetch` (batches made ahead by each process), and
    starting in the middle gives what an uninterrupted run would have given. Processes end with the
    iteration, also when it is left early.
    """

    def __init__(
        self,
        source: BatchSource,
        start_step: int,
        end_step: int,
        *,
        workers: int = 0,
        prefetch: int = 2,
        pin_memory: bool = False,
    ) -> None:
        if workers < 0 or (workers > 0 and prefetch < 1):
            raise UserError(
                f"sampler.loader_processes is {workers} and sampler.prefetch is {prefetch}: use "
                "0 processes or more and, with processes, prefetch 1 or more."
            )
        self.steps = range(start_step, end_step)
        # A generator of its own: the DataLoader draws a base seed, and must not take it from the
        # generator that dropout uses.
        options: dict[str, Any] = {"generator": torch.Generator()}
        if workers > 0:
            # Forked processes share the mapped graph; a spawned one would be sent a copy of it.
            method = "fork" if "fork" in multiprocessing.get_all_start_methods() else None
            options |= {
                "num_workers": workers,
                "prefetch_factor": prefetch,
                "multiprocessing_context": method,
            }
        self._loader: DataLoader[Batch] = DataLoader(
            source, batch_size=None, sampler=self.steps, pin_memory=pin_memory, **options
        )

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[Batch]:
        batches = iter(self._loader)
        try:
            yield from batches
        finally:
            del batches  # the last reference: torch joins the processes here
