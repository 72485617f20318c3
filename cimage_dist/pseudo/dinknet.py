"""Dink-Net (§6.4): an encoder learns to distinguish nodes from shuffled ones, then centres shrink
towards nodes and repel each other.

Shapes: N nodes, F features, D width, C clusters, n rows of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cimage_dist import keyed
from cimage_dist.comm import Comm
from cimage_dist.nn.model import Adam
from cimage_dist.pseudo import hard_modularity
from cimage_dist.pseudo.dinknet_model import (
    Batch,
    DinkNet,
    Nodes,
    clustering_loss,
    discrimination_loss,
    masked_columns,
    project_to_ball,
)
from cimage_dist.pseudo.kmeans import assign, kmeans
from cimage_dist.pseudo.propagated import Tick, check_input, sampled
from cimage_dist.pseudo.rdgae import step_on
from cimage_dist.registry import Clusterer
from cimage_dist.types import Features, Topology

_FULL_BATCH_NODES = 25_000
_LARGE_BATCH = 8_192
_PRETRAIN_STEPS = 200
_NOISE = 1e-3  # of modularity between two starts of k-means on the same embedding
# Uses of the "dinknet" stream.
_WEIGHTS, _ORDER, _MASK, _SHUFFLE, _READING_ORDER = range(5)


@dataclass(frozen=True)
class DinkNetSettings:
    """Defaults are those of a small graph without published settings: Cora's, with p = 10
    (§6.4).
    """

    width: int = 512
    hops: int = 10  # p
    pretrain_epochs: int = 200  # of a round
    pretrain_lr: float = 1e-3
    # of pre-training, at most 1,000 epochs in all; the one after which k-means on H cuts the graph
    # best is kept
    rounds: int = 5
    finetune_epochs: int = 200
    finetune_lr: float = 1e-2
    batch: int = _FULL_BATCH_NODES  # nodes; full batch where they are no more
    tradeoff: float = 1e-10  # α, weight of the discrimination while fine-tuning
    mask_rate: float = 0.2
    stop_below: float = 1e-3  # share of nodes that change cluster in an epoch
    restarts: int = 20
    fit_rows: int = 100_000  # of k-means, about; more nodes are sampled
    # N·D up to which H is kept; beyond, it is made batch by batch whenever it is read
    whole_values: int = 1 << 30


def settings_for(name: str, num_nodes: int) -> DinkNetSettings:
    """The published settings of a dataset, else one rule by size (§6.4). Mini-batches make one
    round of pre-training.

    Up to 25,000 nodes Cora's with p = 10. Beyond: d = 256 as for the largest published graph, as
    many epochs as make 200 steps, and centres that move in an epoch as far as in one step of a full
    batch.
    """
    large = partial(DinkNetSettings, restarts=1)
    published = {
        "cora": DinkNetSettings(hops=5),
        "citeseer": DinkNetSettings(width=1536, hops=5, pretrain_epochs=100, pretrain_lr=5e-4),
        "photo": DinkNetSettings(pretrain_epochs=500, rounds=2, finetune_epochs=100),
        # width, hops, pre-training (epochs, rate, rounds), fine-tuning (epochs, rate), batch
        "ogbn-arxiv": large(1500, 10, 1, 1e-4, 1, 100, 1e-4, 8192),
        "ogbn-products": large(1024, 10, 10, 1e-3, 1, 10, 1e-2, 8192),
        "ogbn-papers100m": large(256, 10, 1, 1e-4, 1, 1, 1e-5, 10_240),
    }
    if name in published or num_nodes <= _FULL_BATCH_NODES:
        return published.get(name, DinkNetSettings())
    steps = math.ceil(num_nodes / _LARGE_BATCH)
    epochs = math.ceil(_PRETRAIN_STEPS / steps)
    # α = 1e-10 moves the encoder by less than rounding (Adam's ε is 1e-8), but H would have to be
    # made again after every epoch.
    return large(256, 10, epochs, 1e-3, 1, 2, 1e-2 / steps, _LARGE_BATCH, tradeoff=0.0)


def dinknet_labels(
    x: Features,
    topology: Topology,
    num_clusters: int,
    settings: DinkNetSettings,
    seed: int,
    comm: Comm | None = None,
    tick: Tick = lambda step, total, values, stage: None,
) -> tuple[Tensor, Tensor]:
    """Collective: labels int64 [N] = nearest centre, confidence float64 [N] = d₂ - d₁ of the
    squared distances; x [N, F] (§6.4).

    Modularity, which sees the graph alone, decides twice. Pre-training makes several rounds of the
    published length, and the one is kept after which the clusters that k-means finds on H have the
    highest. Of the assignments after k-means and after each epoch of fine-tuning, the one of the
    highest is returned: nothing stops the loss from driving centres away from the data, so the last
    epoch need not be a good one. A fine-tuned one must be better by more than two starts of k-means
    differ.
    """
    comm = comm or Comm()
    check_input(x, topology, num_clusters, "Dink-Net")
    run = _Run(x, topology, settings, seed, comm, tick)
    return run.finetune(run.pretrain(num_clusters))


class _Run:
    def __init__(
        self,
        x: Features,
        topology: Topology,
        settings: DinkNetSettings,
        seed: int,
        comm: Comm,
        tick: Tick,
    ) -> None:
        self.nodes, self.settings, self.seed = Nodes(x, topology, comm), settings, seed
        self.comm, self.tick = comm, tick
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._key(_WEIGHTS))
            model = DinkNet(x.shape[1], settings.width)
        self.model = model.to(x.device, self.nodes.scale_N.dtype)
        self.step = 0
        self.keeps_h = self.nodes.num_nodes * settings.width <= settings.whole_values
        self.h_nD: Tensor | None = None

    def _key(self, use: int, *keys: int) -> int:
        return keyed.stream(self.seed, "dinknet", use, *keys)

    def discrimination(self, batch: Batch) -> Tensor:
        """This rank's share of L_disc."""
        nodes, rate = self.nodes, self.settings.mask_rate
        mask, shuffle = (self._key(use, self.step) for use in (_MASK, _SHUFFLE))
        keep_F1 = masked_columns(nodes.x.shape[1], rate, mask, nodes.scale_N)
        pre = nodes.real_and_fake(batch, self.model.weight * keep_F1, shuffle)
        real, fake = map(self.model.logits, pre)
        return discrimination_loss(real, fake, batch.gids.numel())

    def pretrain(self, num_clusters: int) -> Tensor:
        """Collective: the discrimination alone, round by round; leaves the model of the best round
        and returns k-means centres on its H, [C, D].
        """
        s = self.settings
        optimiser = Adam(self.model.parameters(), lr=s.pretrain_lr)
        best, highest = None, -math.inf
        for number in range(s.rounds):
            self._pretrain_round(number, optimiser)
            centres_CD = self.first_centres(num_clusters)
            if s.rounds == 1:
                return centres_CD
            found = hard_modularity(self.assignments(centres_CD)[0], self.nodes.topology, self.comm)
            if found > highest:
                state = {name: value.clone() for name, value in self.model.state_dict().items()}
                best, highest = (centres_CD, state), found
        assert best is not None
        self.model.load_state_dict(best[1])
        self.h_nD = None
        return best[0]

    def _pretrain_round(self, number: int, optimiser: torch.optim.Optimizer) -> None:
        s = self.settings
        which = f", round {number + 1} of {s.rounds}" if s.rounds > 1 else ""
        name = f"Dink-Net pre-training{which}"
        for epoch in range(s.pretrain_epochs):
            losses, key = [], self._key(_ORDER, number * s.pretrain_epochs + epoch)
            for batch in self.nodes.batches(s.batch, key):
                losses.append(step_on(self.discrimination(batch), optimiser, self.comm, "Dink-Net"))
                self.step += 1
            self.tick(epoch + 1, s.pretrain_epochs, {"loss": sum(losses) / len(losses)}, name)
        self.h_nD = None

    def pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Collective: (global ids [m], their rows of H [m, D]) until every node has come up on one
        rank.
        """
        if self.keeps_h:
            mine = self.comm.slice_of(self.nodes.num_nodes)
            yield torch.arange(*mine, device=self.nodes.x.device), self._kept()
            return
        for batch in self.nodes.batches(self.settings.batch, self._key(_READING_ORDER)):
            yield batch.mine, self.nodes.batch_embedding(self.model, batch, self.settings.hops)

    def rows_of(self, batch: Batch) -> Tensor:
        """Collective: some rows of H for this rank, those of all ranks making up the batch; [m,
        D].
        """
        if not self.keeps_h:
            return self.nodes.batch_embedding(self.model, batch, self.settings.hops)
        begin, end = self.comm.slice_of(self.nodes.num_nodes)
        return self._kept()[batch.gids[(batch.gids >= begin) & (batch.gids < end)] - begin]

    def _kept(self) -> Tensor:
        if self.h_nD is None:
            self.h_nD = self.nodes.embedding(self.model, self.settings.hops)
        return self.h_nD

    def first_centres(self, num_clusters: int) -> Tensor:
        """Collective: k-means on H, [C, D]."""
        s, found = self.settings, []
        for gids, h_mD in self.pieces():
            chosen = sampled(gids, self.nodes.num_nodes, s.fit_rows, self.seed)
            found.append((gids[chosen], h_mD[chosen]))
        gids, rows = (torch.cat(parts) for parts in zip(*found, strict=True))
        rest: dict[str, Any] = {"comm": self.comm, "gids": gids, "restarts": s.restarts}
        return kmeans(rows, num_clusters, seed=self.seed, **rest).centres.to(rows.dtype)

    def assignments(self, centres_CD: Tensor) -> tuple[Tensor, Tensor]:
        """Collective: the nearest centre of all nodes, int64 [N], and d₂ - d₁, float64 [N]."""
        labels = torch.zeros(self.nodes.num_nodes, dtype=torch.int64, device=centres_CD.device)
        confidence = torch.zeros_like(labels, dtype=torch.float64)
        for gids, h_mD in self.pieces():
            labels[gids], gap, _ = assign(h_mD, centres_CD.detach())
            confidence[gids] = gap.to(torch.float64)
        return self.comm.sum(labels), self.comm.sum(confidence)

    def finetune(self, first_CD: Tensor) -> tuple[Tensor, Tensor]:
        """Collective: labels and confidence of the epoch of highest modularity; those of k-means
        where none is clearly better.
        """
        s, comm = self.settings, self.comm
        centres_CD = nn.Parameter(first_CD)
        moving = [centres_CD, *self.model.parameters()] if s.tradeoff else [centres_CD]
        optimiser = Adam(moving, lr=s.finetune_lr)
        labels, confidence = self.assignments(centres_CD)
        best = labels, confidence
        modularity = hard_modularity(labels, self.nodes.topology, comm) + _NOISE
        for epoch in range(s.finetune_epochs):
            losses, key = [], self._key(_ORDER, s.rounds * s.pretrain_epochs + epoch)
            for batch in self.nodes.batches(s.batch, key):
                share = clustering_loss(self.rows_of(batch), centres_CD, batch.gids.numel(), comm)
                if s.tradeoff:
                    share = share + s.tradeoff * self.discrimination(batch)
                losses.append(step_on(share, optimiser, comm, "Dink-Net"))
                project_to_ball(centres_CD)
                self.step += 1
            if s.tradeoff:
                self.h_nD = None
            previous = labels
            labels, confidence = self.assignments(centres_CD)
            changed = float((labels != previous).double().mean())
            found = hard_modularity(labels, self.nodes.topology, comm)
            if found > modularity:
                best, modularity = (labels, confidence), found
            values = {"loss": sum(losses) / len(losses), "changed": changed, "modularity": found}
            self.tick(epoch + 1, s.finetune_epochs, values, "Dink-Net fine-tuning")
            if changed < s.stop_below:
                break
        return best[0].cpu(), best[1].cpu()


CLUSTERER = Clusterer(dinknet_labels, lambda name, nodes, clusters: settings_for(name, nodes))
