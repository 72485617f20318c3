"""What R-DGAE (§6.3) decides without gradients: which nodes it trusts (Ξ) and which graph it
reconstructs (Υ). N nodes, C clusters, P pairs.

The two losses of R-DGAE (§6.3), each as the share of one rank: the shares of all ranks add up to
the loss, and so do their gradients.

Shapes: N nodes, D width of the embedding, C clusters, P listed pairs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from cimage_dist import keyed
from cimage_dist.comm import Comm
from cimage_dist.errors import UserError
from cimage_dist.nn.propagate import weighted_sum
from cimage_dist.types import Topology

_BETA1_DECAY, _BETA2_DECAY, _PATIENCE = 0.95, 0.85, 15


@dataclass(frozen=True)
class TargetGraph:
    """The positives of the reconstruction, A + I at first: `keys` int64 [P] = i·N + j, ascending,
    without repetition, all (i, i) among them.
    """

    keys: Tensor
    num_nodes: int

    @classmethod
    def of(cls, topology: Topology, device: torch.device) -> TargetGraph:
        if not topology.num_edges:
            raise UserError(
                "R-DGAE learns from the edges, and this graph has none. Choose other initial "
                "labels, for example by k-means or from a file."
            )
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
        """Υ: every node of Ω is tied to its cluster's hub, the Ω-node nearest the centre, and loses
        its edges to Ω-nodes of other clusters (§6.3).

        squared_NC squared distances to the centres, omega bool [N].
        """
        labels = squared_NC.argmin(1)
        clusters = torch.arange(squared_NC.shape[1], device=labels.device)
        is_member_NC = omega[:, None] & (labels[:, None] == clusters)
        hub_C = squared_NC.masked_fill(~is_member_NC, math.inf).argmin(0)
        trusted = omega.nonzero().squeeze(1)
        ties = trusted * self.num_nodes + hub_C[labels[trusted]]
        first, second = self.pairs(0, self.num_pairs)
        crosses = omega[first] & omega[second] & (labels[first] != labels[second])
        return replace(self, keys=torch.cat([self.keys[~crosses], ties]).unique())


@dataclass
class TrustedNodes:
    """Ξ: Ω = {i : q⁽¹⁾ > β1 and q⁽¹⁾ - q⁽²⁾ > β2}, replaced by larger sets only; β1, β2 shrink when
    it stops growing (§6.3). omega bool [N].
    """

    omega: Tensor
    beta1: float
    beta2: float
    stalled: int = 0

    def after_epoch(self, q_NC: Tensor | None) -> None:
        """Count an epoch. Assignments q_NC are given when a new Ω is due: it is taken if it has
        more nodes.
        """
        grew = False
        if q_NC is not None:
            best, second = q_NC.topk(2, dim=1).values.unbind(1)
            found = (best > self.beta1) & (best - second > self.beta2)
            grew = int(found.sum()) > int(self.omega.sum())
            self.omega = found if grew else self.omega
        self.stalled += not grew
        if self.stalled == _PATIENCE:
            self.stalled = 0
            self.beta1, self.beta2 = self.beta1 * _BETA1_DECAY, self.beta2 * _BETA2_DECAY


_TILE = 512  # a tile of logits, 1 MB in single precision, stays in a processor's cache
_PAIRS_PER_CHUNK = 1 << 20
# σ and its logarithm are normal numbers down to here in single precision; softplus is 0 to rounding
_LOWEST_LOGIT = -80.0


def reconstruction_loss(z_ND: Tensor, target: TargetGraph, comm: Comm) -> Tensor:
    """This rank's share of 1/N² Σ_ij BCE(σ(z_i·z_j), T_ij) over all N² pairs, positives weighted w
    = (N² - |A|)/|A| (§6.3).

    With s = z_i·z_j it is 1/N² [Σ_all softplus(s) + Σ_positives (w-1)·softplus(s) - w·s]: the first
    sum by tiles of the upper triangle, the second along the target's pairs.
    """
    num_nodes = z_ND.shape[0]
    starts = torch.arange(0, num_nodes, _TILE)
    upper = torch.triu_indices(starts.numel(), starts.numel())
    begin, end = comm.slice_of(upper.shape[1])
    everything = _TileSum.apply(z_ND, starts[upper[:, begin:end]].t().tolist())
    return cast(Tensor, (everything + _positives(z_ND, target, comm)) / num_nodes**2)


def sampled_reconstruction_loss(
    z_ND: Tensor, target: TargetGraph, num_samples: int, key: int, comm: Comm
) -> Tensor:
    """This rank's share of the same loss with the mean over all pairs estimated, without bias, from
    `num_samples` uniform pairs (§6.3).
    """
    num_nodes = z_ND.shape[0]
    ids = torch.arange(*comm.slice_of(num_samples), device=z_ND.device)
    first, second = (keyed.integers(keyed.derive(key, end), ids, num_nodes) for end in (0, 1))
    drawn = _PairSum.apply(z_ND, first, second, 1.0, 0.0)
    return cast(Tensor, drawn / num_samples + _positives(z_ND, target, comm) / num_nodes**2)


def clustering_loss(
    z_ND: Tensor, centres_CD: Tensor, labels: Tensor, omega: Tensor, comm: Comm
) -> Tensor:
    """This rank's share of Σ_{i∈Ω} KL(p_i‖q_i) with p_i the one-hot `labels[i]`, i.e. -Σ_{i∈Ω} log
    q_i,labels[i] (§6.3); omega bool [N].
    """
    begin, end = comm.slice_of(z_ND.shape[0])
    gids = omega[begin:end].nonzero().squeeze(1) + begin
    log_q = log_assignments(squared_distances(z_ND[gids], centres_CD))
    return -log_q.gather(1, labels[gids, None]).sum()


def squared_distances(z_ND: Tensor, centres_CD: Tensor) -> Tensor:
    """‖z_i - μ_j‖², [N, C]."""
    squares = z_ND.square().sum(1, keepdim=True) + centres_CD.square().sum(1)
    return (squares - 2 * z_ND @ centres_CD.t()).clamp(min=0)


def log_assignments(squared_NC: Tensor) -> Tensor:
    """log q, [N, C]: Student-t assignments q_ij ∝ (1 + ‖z_i - μ_j‖²)^-1 (§6.3)."""
    return F.log_softmax(-squared_NC.log1p(), dim=1)


def _positives(z_ND: Tensor, target: TargetGraph, comm: Comm) -> Tensor:
    first, second = target.pairs(*comm.slice_of(target.num_pairs))
    weight = target.positive_weight
    return cast(Tensor, _PairSum.apply(z_ND, first, second, weight - 1.0, weight))


class _TileSum(torch.autograd.Function):
    """Σ softplus(z_i·z_j) over tiles of the symmetric matrix ZZᵀ, a tile off the diagonal standing
    for its mirror image too.

    The gradient is made along with the value, so no tile is computed twice and only [N, D] is kept.
    """

    @staticmethod
    def forward(ctx: Any, z_ND: Tensor, tiles: list[tuple[int, int]]) -> Tensor:
        total, grad_ND = z_ND.new_zeros((), dtype=torch.float64), torch.zeros_like(z_ND)
        for row, column in tiles:
            rows, columns = z_ND[row : row + _TILE], z_ND[column : column + _TILE]
            logits = (rows @ columns.t()).clamp_(min=_LOWEST_LOGIT)
            copies = 1 if row == column else 2
            total += copies * logits.sum()
            slope = logits.sigmoid_()
            grad_ND[row : row + _TILE].addmm_(slope, columns, alpha=2)
            if row != column:
                grad_ND[column : column + _TILE].addmm_(slope.t(), rows, alpha=2)
            total -= copies * slope.log_().sum()  # softplus(s) = s - log σ(s)
        ctx.save_for_backward(grad_ND)
        return total.to(z_ND.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.saved_tensors[0], None


class _PairSum(torch.autograd.Function):
    """Σ_p a·softplus(s_p) - b·s_p with s_p = z[first_p]·z[second_p]; nothing of size P x D is
    kept.
    """

    @staticmethod
    def forward(
        ctx: Any, z_ND: Tensor, first: Tensor, second: Tensor, a: float, b: float
    ) -> Tensor:
        logits = z_ND.new_empty(first.numel())
        for begin in range(0, first.numel(), _PAIRS_PER_CHUNK):
            part = slice(begin, begin + _PAIRS_PER_CHUNK)
            logits[part] = (z_ND[first[part]] * z_ND[second[part]]).sum(1)
        slope = a * logits.sigmoid() - b
        grad_ND = weighted_sum(torch.zeros_like(z_ND), z_ND, slope, second, first)
        ctx.save_for_backward(weighted_sum(grad_ND, z_ND, slope, first, second))
        return (a * torch.logaddexp(logits, logits.new_zeros(())) - b * logits).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0] * ctx.saved_tensors[0], None, None, None, None
