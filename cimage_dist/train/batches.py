"""What one optimiser step works on, and the full-graph way of making it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cimage_dist import keyed
from cimage_dist.comm import Comm
from cimage_dist.config import Config
from cimage_dist.graph.masking import MaskedGraph, PathMasker
from cimage_dist.types import EdgeList, Topology


@dataclass(frozen=True)
class StepBatch:
    """This rank's share of one global batch. `pairs` int64 [p+n, 2]: p masked edges, then n non-edges; counts are global."""

    x: Tensor
    edges: EdgeList
    pairs: Tensor
    num_pos: int
    global_pos: int
    global_neg: int


class FullGraphBatches:
    """Step s of a full-graph run is part s mod P of the mask of epoch s div P.

    P = ceil(most edges a mask can hold / batch_edges), so the step number alone names the batch. Several ranks all encode the
    whole graph and share out the pairs: the same experiment at any world size.
    """

    def __init__(self, x: Tensor, topology: Topology, cfg: Config, comm: Comm) -> None:
        self.x, self.cfg, self.comm = x, cfg, comm
        self.masker = PathMasker(topology, cfg.mask, cfg.run.seed)
        starts = topology.num_nodes if cfg.mask.start == "node" else topology.num_edges
        most = min(topology.num_edges, int(cfg.mask.start_rate * starts) * cfg.mask.walk_length)
        self.steps_per_epoch = max(1, math.ceil(most / cfg.train.batch_edges))
        self._epoch = -1
        self._mask: MaskedGraph | None = None

    def _mask_of(self, epoch: int) -> MaskedGraph:
        if self._mask is None or epoch != self._epoch:
            mask = self.masker.mask(epoch)
            if self.steps_per_epoch > 1:
                draws = keyed.uniform(keyed.stream(self.cfg.run.seed, "batch-order", epoch), torch.arange(mask.masked.shape[0]))
                mask = mask._replace(masked=mask.masked[draws.argsort(stable=True)])
            self._epoch, self._mask = epoch, mask._replace(visible=mask.visible.to(self.x.device))
        return self._mask

    def batch(self, step: int) -> StepBatch:
        epoch, part = divmod(step, self.steps_per_epoch)
        mask = self._mask_of(epoch)
        total = mask.masked.shape[0]
        positives = mask.masked[total * part // self.steps_per_epoch : total * (part + 1) // self.steps_per_epoch]
        negatives = self.masker.negatives(positives.shape[0], step)
        pos, neg = (pairs[slice(*self.comm.slice_of(pairs.shape[0]))] for pairs in (positives, negatives))
        pairs = torch.cat([pos, neg]).to(self.x.device)
        return StepBatch(self.x, mask.visible, pairs, pos.shape[0], positives.shape[0], negatives.shape[0])
