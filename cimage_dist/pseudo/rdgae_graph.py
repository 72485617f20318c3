"""What R-DGAE (§6.3) decides without gradients: which nodes it trusts (Ξ) and which graph it reconstructs (Υ). N nodes, C clusters, P pairs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cimage_dist.errors import UserError
from cimage_dist.types import Topology

_BETA1_DECAY, _BETA2_DECAY, _PATIENCE = 0.95, 0.85, 15


@dataclass(frozen=True)
class TargetGraph:
    """The positives of the reconstruction, A + I at first: `keys` int64 [P] = i·N + j, ascending, without repetition, all (i, i) among them."""

    keys: Tensor
    num_nodes: int

    @classmethod
    def of(cls, topology: Topology, device: torch.device) -> TargetGraph:
        if not topology.num_edges:
            raise UserError("R-DGAE learns from the edges, and this graph has none. Choose other initial labels, for example by k-means or from a file.")
        num_nodes = topology.num_nodes
        edges = topology.rows() * num_nodes + topology.indices.to(torch.int64)
        own = torch.arange(num_nodes) * (num_nodes + 1)
        return cls(torch.cat([edges, own]).sort().values.to(device), num_nodes)

    @property
    def num_pairs(self) -> int:
        return self.keys.numel()

    @property
    def positive_weight(self) -> float:
        """(N² - |A|)/|A|, |A| the directed edges without the self-pairs (§6.3)."""
        num_edges = max(self.num_pairs - self.num_nodes, 1)
        return (self.num_nodes**2 - num_edges) / num_edges

    def pairs(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Rows and columns of the pairs begin .. end-1."""
        keys = self.keys[begin:end]
        return keys // self.num_nodes, keys % self.num_nodes

    def corrected(self, squared_NC: Tensor, omega: Tensor) -> TargetGraph:
        """Υ: every node of Ω is tied to its cluster's hub, the Ω-node nearest the centre, and loses its edges to Ω-nodes of other clusters (§6.3).

        squared_NC squared distances to the centres, omega bool [N].
        """
        labels = squared_NC.argmin(1)
        is_member_NC = omega[:, None] & (labels[:, None] == torch.arange(squared_NC.shape[1], device=labels.device))
        hub_C = squared_NC.masked_fill(~is_member_NC, math.inf).argmin(0)
        trusted = omega.nonzero().squeeze(1)
        ties = trusted * self.num_nodes + hub_C[labels[trusted]]
        first, second = self.pairs(0, self.num_pairs)
        crosses = omega[first] & omega[second] & (labels[first] != labels[second])
        return replace(self, keys=torch.cat([self.keys[~crosses], ties]).unique())


@dataclass
class TrustedNodes:
    """Ξ: Ω = {i : q⁽¹⁾ > β1 and q⁽¹⁾ - q⁽²⁾ > β2}, replaced by larger sets only; β1, β2 shrink when it stops growing (§6.3). omega bool [N]."""

    omega: Tensor
    beta1: float
    beta2: float
    stalled: int = 0

    def after_epoch(self, q_NC: Tensor | None) -> None:
        """Count an epoch. Assignments q_NC are given when a new Ω is due: it is taken if it has more nodes."""
        grew = False
        if q_NC is not None:
            best, second = q_NC.topk(2, dim=1).values.unbind(1)
            found = (best > self.beta1) & (best - second > self.beta2)
            grew = int(found.sum()) > int(self.omega.sum())
            self.omega = found if grew else self.omega
        self.stalled += not grew
        if self.stalled == _PATIENCE:
            self.stalled, self.beta1, self.beta2 = 0, self.beta1 * _BETA1_DECAY, self.beta2 * _BETA2_DECAY
