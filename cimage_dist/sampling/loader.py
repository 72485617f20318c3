"""Sampled batches, step by step: `BatchSource` makes the batch of any step, `BatchLoader` makes a
range of them ahead of time.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from cimage_dist import keyed
from cimage_dist.errors import UserError
from cimage_dist.sampling.csr_sampler import SampledSubgraph
from cimage_dist.sampling.hidden import HiddenEdges, hide
from cimage_dist.sampling.sampler import NeighbourSampler
from cimage_dist.sampling.seeds import IntArray, SeedBatch, SeedSchedule, rank_slice
from cimage_dist.types import EdgeList, SampledBatch, SampledView


class BatchSource(Dataset[SampledBatch]):
    """`source[step]` is the batch of a step: a function of (seed, step, rank, world) and of nothing
    that happened before.

    The global batch of `batch_edges` undirected edges does not depend on `world`; rank r takes
    positions [B r / W, B (r+1) / W). Message passing sees none of the global batch's edges, in
    either direction, nor the keyed share `hide_rate` of all others (§3.3).
    `upper_ptr` may come from a file; without it one O(N log degree) pass makes it here. `features`
    [N, F], a mapped file as a rule, are read where the batch is made, so that with loader processes
    reading overlaps training as sampling does. `views=2` adds a second, independent neighbourhood
    of the positives, which hides the batch's edges too; without `has_negatives` none are drawn.
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
        upper_ptr: NDArray[np.int64] | None = None,
        features: NDArray[Any] | None = None,
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
        self.schedule = SeedSchedule(indptr, indices, batch_edges, seed, upper_ptr)
        self.sampler = NeighbourSampler(
            indptr, indices, fanouts, seed=seed, backend=backend, rescale=rescale
        )
        self.features = features
        self.seed = seed
        self.hide_rate = hide_rate
        self.views, self.has_negatives = views, has_negatives
        self.begin, self.end = rank_slice(batch_edges, rank, world)
        # Compile before loader processes are forked, so that they inherit the machine code instead
        # of each making its own.
        self.sampler.sample(np.empty(0, dtype=np.int64), 0, self.hidden(0, self.schedule.batch(0)))

    def hidden(self, step: int, batch: SeedBatch, view: int = 0) -> HiddenEdges:
        """The edges that message passing must not see in a view of a step, given its global
        batch.
        """
        key = keyed.stream(self.seed, "mask-extra", step, *([view] if view else []))
        return hide(self.schedule.num_nodes, batch.u, batch.v, self.hide_rate, key)

    def _negatives(self, step: int, whole: SeedBatch) -> tuple[SeedBatch, float]:
        """(this rank's negatives, how many all ranks have)."""
        if not self.has_negatives:
            return whole.part(0, 0), 0.0
        if (
            self.schedule.has_rejection
        ):  # how many negatives could be placed is known only after placing all of them
            all_neg = self.schedule.negatives(step)
            return all_neg.part(self.begin, self.end), all_neg.total
        return self.schedule.negatives(step, self.begin, self.end), whole.total

    def _parts(self, sub: SampledSubgraph) -> dict[str, Any]:
        """The fields of a batch that describe its neighbourhood."""
        weight = torch.from_numpy(sub.weight) if self.sampler.is_weighted else None
        return {
            "node_gid": torch.from_numpy(sub.node_gid),
            "edges": EdgeList(
                torch.from_numpy(sub.src), torch.from_numpy(sub.dst), len(sub.node_gid), weight
            ),
            "degree": torch.from_numpy(sub.degree),
            "nodes_per_hop": sub.nodes_per_hop,
            "edges_per_hop": sub.edges_per_hop,
            "x": None if self.features is None else torch.from_numpy(self.features[sub.node_gid]),
        }

    def _second_view(self, step: int, whole: SeedBatch, pos: SeedBatch) -> SampledView:
        key = keyed.stream(self.seed, "neighbours", step, 1)
        sub = self.sampler.sample_keyed(
            np.concatenate([pos.u, pos.v]), key, self.hidden(step, whole, 1)
        )
        pairs = torch.from_numpy(sub.seed_bid).reshape(2, len(pos.u)).t().contiguous()
        return SampledView(pos=pairs, **self._parts(sub))

    def __getitem__(self, step: int) -> SampledBatch:
        whole = self.schedule.batch(step)
        pos = whole.part(self.begin, self.end)
        neg, global_neg = self._negatives(step, whole)
        seeds = np.concatenate([pos.u, pos.v, neg.u, neg.v])
        sub = self.sampler.sample(seeds, step, self.hidden(step, whole))
        pairs = torch.from_numpy(sub.seed_bid)
        num_pos = len(pos.u)
        return SampledBatch(
            step=step,
            pos=pairs[: 2 * num_pos].reshape(2, num_pos).t().contiguous(),
            pos_weight=torch.from_numpy(pos.weight.copy()),
            neg=pairs[2 * num_pos :].reshape(2, len(neg.u)).t().contiguous(),
            neg_weight=torch.from_numpy(neg.weight.copy()),
            global_pos=whole.total,
            global_neg=global_neg,
            second=self._second_view(step, whole, pos) if self.views > 1 else None,
            **self._parts(sub),
        )


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
        self._loader: DataLoader[SampledBatch] = DataLoader(
            source, batch_size=None, sampler=self.steps, pin_memory=pin_memory, **options
        )

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[SampledBatch]:
        batches = iter(self._loader)
        try:
            yield from batches
        finally:
            del batches  # the last reference: torch joins the processes here
