"""Several soft clusterings of the same nodes made into one. Shapes: M members, N nodes, C clusters.

One step of gradient descent that all ranks make alike.

R-DGAE (§6.3): a graph auto-encoder whose embedding is clustered while it learns, from trusted nodes
and on a corrected graph.

Shapes: N nodes, F features, H hidden, D width of the embedding, C clusters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from cimage_dist import keyed
from cimage_dist.comm import Comm
from cimage_dist.errors import UserError
from cimage_dist.nn.model import Adam
from cimage_dist.nn.propagate import gcn_smooth
from cimage_dist.pseudo import hard_modularity
from cimage_dist.pseudo.kmeans import kmeans
from cimage_dist.pseudo.propagated import Tick, check_input, project
from cimage_dist.pseudo.rdgae_loss import (
    TargetGraph,
    TrustedNodes,
    clustering_loss,
    log_assignments,
    reconstruction_loss,
    sampled_reconstruction_loss,
    squared_distances,
)
from cimage_dist.registry import Clusterer
from cimage_dist.types import EdgeList, Features, Topology

_ROUNDS = 3


def consensus(members: Sequence[Tensor], reference: int = 0) -> Tensor:
    """The mean of M soft assignments q [N, C] after renumbering each to agree best with the others;
    float64 [N, C], rows sum to 1.

    Clusters carry arbitrary numbers, so each member is matched to a base by the permutation π that
    maximises Σ_i Σ_c base_ic q_i,π(c) (the assignment problem). The base is the reference member at
    first, then the mean so far. A member that found nothing has nearly uniform rows and so hardly a
    vote.
    """
    votes = [q.to(torch.float64) for q in members]
    base_NC = votes[reference]
    for _ in range(_ROUNDS):
        base_NC = torch.stack([q[:, _matching(base_NC, q)] for q in votes]).mean(0)
    return base_NC


def _matching(base_NC: Tensor, q_NC: Tensor) -> Tensor:
    """The cluster of q that stands for each cluster of the base, int64 [C]."""
    agreement = (base_NC.t() @ q_NC).cpu().numpy()
    _, columns = linear_sum_assignment(-agreement)
    return torch.from_numpy(columns.astype(np.int64)).to(q_NC.device)


def step_on(share: Tensor, optimiser: torch.optim.Optimizer, comm: Comm, method: str) -> float:
    """Collective: one step of the optimiser on the sum of all ranks' shares; returns that sum.
    Parameters stay alike everywhere.
    """
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    grads = torch.autograd.grad(share, parameters, materialize_grads=True)
    total = comm.sum(torch.cat([share.detach().reshape(1), *(g.flatten() for g in grads)]))
    if not bool(total.isfinite().all()):
        raise UserError(
            f"{method} diverged: its loss or gradients are no longer finite. Check the features "
            "for huge values, or lower the learning rate."
        )
    for p, grad in zip(parameters, total[1:].split([p.numel() for p in parameters]), strict=True):
        p.grad = grad.view_as(p)
    optimiser.step()
    return float(total[0])


@dataclass(frozen=True)
class RDGAESettings:
    """Defaults are those for a graph without published settings, at C = 7 (§6.3); `settings_for`
    gives the others.
    """

    beta1: float = 2 / 7
    beta2: float = 1 / 7
    cluster_lr: float = 0.01
    sample_every: int = 15  # epochs between two Ω
    correct_every: int = 20  # epochs between two corrections of the target graph ...
    correct_until: int = 120  # ... and the last epoch that may have one
    hidden: int = 32
    width: int = 16
    pretrain_epochs: int = 200
    pretrain_lr: float = 0.01
    pretrain_decay: float = 1e-3
    cluster_epochs: int = 200
    cluster_decay: float = 0.01
    gamma: float = 1e-3
    relabel_every: int = 15  # epochs between two target distributions p
    restarts: int = 20
    members: int = 5  # auto-encoders whose assignments are averaged
    # above, the mean over all pairs is estimated from as many sampled pairs as the target has
    # positives
    exact_nodes: int = 10_000


def settings_for(name: str, num_clusters: int) -> RDGAESettings:
    """The published settings of a dataset, else Cora's with β1 = 2/C and β2 = 1/C (§6.3)."""
    published = {
        "cora": RDGAESettings(0.33, 0.18),
        # β1, β2, cluster_lr, sample_every, correct_every, correct_until
        "citeseer": RDGAESettings(0.20, 0.10, 0.001, 1, 50, 150),
        "pubmed": RDGAESettings(0.30, 0.40, 0.001, 5, 50, 100),
    }
    return published.get(name) or RDGAESettings(2 / num_clusters, 1 / num_clusters)


def rdgae_labels(
    x: Features,
    topology: Topology,
    num_clusters: int,
    settings: RDGAESettings,
    seed: int,
    comm: Comm | None = None,
    tick: Tick = lambda step, total, values, stage: None,
) -> tuple[Tensor, Tensor]:
    """Collective: labels int64 [N] = argmax q and confidence float64 [N] = q⁽¹⁾ - q⁽²⁾; x [N, F]
    (§6.3).

    q is the consensus of several auto-encoders after their last epochs: where one ends depends much
    on its first weights, and nothing without labels shows which of them is right, but what most of
    them agree on is.
    """
    check_input(x, topology, num_clusters, "R-DGAE")
    counts, comm = restored_counts(x), comm or Comm()
    members = []
    for member in range(settings.members):
        own, named = keyed.derive(seed, member) if member else seed, _named(tick, member, settings)
        run = _Run(counts, topology, settings, own, comm, named)
        run.pretrain()
        members.append(run.cluster(num_clusters))
    fits = [hard_modularity(q.argmax(1).cpu(), topology, comm) for q in members]
    q_NC = consensus(members, reference=fits.index(max(fits)))
    best, second = q_NC.topk(2, dim=1).values.unbind(1)
    return q_NC.argmax(1).cpu(), (best - second).cpu()


def _named(tick: Tick, member: int, settings: RDGAESettings) -> Tick:
    which = f" {member + 1}/{settings.members}" if settings.members > 1 else ""
    return lambda step, total, values, stage: tick(step, total, values, stage + which)


def restored_counts(x: Features) -> Features:
    """Row-normalised words (§2.1) as they were before: where all rows sum to 1, each is divided by
    its largest entry. Other features stay as given.

    The auto-encoder wants raw bags of words (§6.3): on normalised rows its embedding stays near
    zero and the clusters collapse.
    """
    if isinstance(x, Tensor):
        sums, largest = x.sum(1), x.amax(1)
        is_normalised = bool((x >= 0).all()) and _are_ones(sums)
        return x / torch.where(sums > 0, largest, 1.0)[:, None] if is_normalised else x
    sums = x.value.new_zeros(x.shape[0]).index_add_(0, x.row, x.value)
    largest = torch.zeros_like(sums).scatter_reduce_(0, x.row, x.value, "amax")
    is_normalised = bool((x.value >= 0).all()) and _are_ones(sums)
    return replace(x, value=x.value / largest[x.row]) if is_normalised else x


def _are_ones(sums: Tensor) -> bool:
    """Sums of rows, up to the rounding of half-precision features; empty rows do not count."""
    return bool(((sums == 0) | ((sums - 1).abs() < 1e-2)).all()) and bool((sums > 0).any())


class Encoder(nn.Module):
    """Z = Â ReLU(Â X W₀) W₁ with Â = D̂^-1/2 (A + I) D̂^-1/2, no biases, Glorot-uniform (§6.3). w0
    [F, H], w1 [H, D].
    """

    def __init__(self, num_features: int, hidden: int, width: int) -> None:
        super().__init__()
        self.w0 = nn.Parameter(nn.init.xavier_uniform_(torch.empty(num_features, hidden)))
        self.w1 = nn.Parameter(nn.init.xavier_uniform_(torch.empty(hidden, width)))

    def forward(self, x: Features, edges: EdgeList) -> Tensor:
        hidden_NH = gcn_smooth(project(x, self.w0), edges).relu()
        return gcn_smooth(hidden_NH @ self.w1, edges)


class _Run:
    def __init__(
        self,
        x: Features,
        topology: Topology,
        settings: RDGAESettings,
        seed: int,
        comm: Comm,
        tick: Tick,
    ) -> None:
        self.x, self.settings, self.seed, self.comm, self.tick = x, settings, seed, comm, tick
        self.edges = topology.edge_list().to(x.device)
        self.target = TargetGraph.of(topology, x.device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(keyed.stream(seed, "rdgae"))
            encoder = Encoder(x.shape[1], settings.hidden, settings.width)
        self.encoder = encoder.to(x.device, (x if isinstance(x, Tensor) else x.value).dtype)

    def embed(self) -> Tensor:
        z_ND: Tensor = self.encoder(self.x, self.edges)
        return z_ND

    def reconstruction(self, z_ND: Tensor, step: int) -> Tensor:
        """This rank's share."""
        if self.target.num_nodes <= self.settings.exact_nodes:
            return reconstruction_loss(z_ND, self.target, self.comm)
        key, pairs = keyed.stream(self.seed, "rdgae", step), self.target.num_pairs
        return sampled_reconstruction_loss(z_ND, self.target, pairs, key, self.comm)

    def pretrain(self) -> None:
        """Collective: the auto-encoder alone."""
        s, weights = self.settings, self.encoder.parameters()
        optimiser = Adam(weights, lr=s.pretrain_lr, weight_decay=s.pretrain_decay)
        for epoch in range(s.pretrain_epochs):
            loss = step_on(self.reconstruction(self.embed(), epoch), optimiser, self.comm, "R-DGAE")
            self.tick(epoch + 1, s.pretrain_epochs, {"loss": loss}, "R-DGAE pre-training")

    def cluster(self, num_clusters: int) -> Tensor:
        """Collective: k-means centres, then the joint objective; returns the last assignments q,
        [N, C].
        """
        s, comm = self.settings, self.comm
        centres_CD = nn.Parameter(self._first_centres(num_clusters))
        weights = [*self.encoder.parameters(), centres_CD]
        optimiser = Adam(weights, lr=s.cluster_lr, weight_decay=s.cluster_decay)
        schedule = torch.optim.lr_scheduler.StepLR(optimiser, step_size=10, gamma=0.9)
        none = torch.zeros(self.target.num_nodes, dtype=torch.bool, device=centres_CD.device)
        trusted = TrustedNodes(none, s.beta1, s.beta2)
        for epoch in range(s.cluster_epochs):
            z_ND = self.embed()
            with torch.no_grad():
                squared_NC = squared_distances(z_ND, centres_CD)
                is_due = epoch % s.sample_every == 0
                trusted.after_epoch(log_assignments(squared_NC).exp() if is_due else None)
                if epoch % s.relabel_every == 0:
                    labels = squared_NC.argmin(1)
                if epoch % s.correct_every == 0 and epoch <= s.correct_until:
                    self.target = self.target.corrected(squared_NC, trusted.omega)
            rebuilt = self.reconstruction(z_ND, s.pretrain_epochs + epoch)
            clustered = clustering_loss(z_ND, centres_CD, labels, trusted.omega, comm)
            value = step_on(rebuilt + s.gamma * clustered, optimiser, comm, "R-DGAE")
            schedule.step()
            values = {"loss": value, "trusted": float(trusted.omega.sum())}
            self.tick(epoch + 1, s.cluster_epochs, values, "R-DGAE clustering")
        with torch.no_grad():
            return log_assignments(squared_distances(self.embed(), centres_CD)).exp()

    @torch.no_grad()
    def _first_centres(self, num_clusters: int) -> Tensor:
        """Collective: k-means on the embedding, [C, D]."""
        z_ND = self.embed()
        begin, end = self.comm.slice_of(z_ND.shape[0])
        gids = torch.arange(begin, end, device=z_ND.device)
        key, restarts = keyed.stream(self.seed, "rdgae", -1), self.settings.restarts
        rest: dict[str, Any] = {"comm": self.comm, "gids": gids, "restarts": restarts}
        return kmeans(z_ND[begin:end], num_clusters, seed=key, **rest).centres.to(z_ND.dtype)


CLUSTERER = Clusterer(rdgae_labels, lambda name, nodes, clusters: settings_for(name, clusters))
