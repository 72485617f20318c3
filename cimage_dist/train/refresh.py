"""Embeddings of chosen nodes on the unmasked graph, in eval mode, while training: for refreshes and
initial labels (§8.2).

The refresh: every few steps the trusted set is rebuilt and factors are scored (§8.2, §7, §6.7).
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from cimage_dist import keyed
from cimage_dist.ci import random_half, score_features
from cimage_dist.ci.diagnostics import describe_partition, overlap
from cimage_dist.ci.hsic import HsicStats, averaged, block_statistics, conditional_statistics
from cimage_dist.ci.partition import choose_partition, refusal
from cimage_dist.ci.pseudolabels import grow_confident, select_confident
from cimage_dist.comm import Comm, even_sample, num_groups
from cimage_dist.config import Config
from cimage_dist.data.sparse import CsrFeatures
from cimage_dist.errors import UserError
from cimage_dist.nn.encoder import Encoder, Encoding
from cimage_dist.nn.inference import encode_graph
from cimage_dist.nn.projection import placed
from cimage_dist.nn.routing import normalize_factors
from cimage_dist.sampling.sampler import NeighbourSampler
from cimage_dist.types import CIScores, Features, Topology

_CHUNK_NODES = 2048


class Embedder(Protocol):
    def __call__(self, encoder: Encoder, gids: Tensor, step: int) -> Encoding:
        """h, z [n, K, C] of the nodes `gids` [n], without gradient."""
        ...


class FullEmbedder:
    """One exact pass over the whole graph, then the rows asked for."""

    def __init__(self, x: Features, topology: Topology) -> None:
        self.x, self.topology = x, topology

    def __call__(self, encoder: Encoder, gids: Tensor, step: int) -> Encoding:
        h, z, _ = encode_graph(encoder, self.x, self.topology)
        at = gids.to(h.device)
        return Encoding(h[at], z[at])


class SampledEmbedder:
    """Sampled neighbourhoods keyed by (seed, step, node), a few thousand nodes at a time: memory
    does not grow with the graph.
    """

    def __init__(
        self,
        features: np.ndarray | CsrFeatures,
        topology: Topology,
        cfg: Config,
        device: torch.device,
    ) -> None:
        self.features, self.device, self.seed = features, device, cfg.run.seed
        sampler = cfg.sampler
        self.sampler = NeighbourSampler(
            topology.indptr.numpy(),
            topology.indices.numpy(),
            sampler.fanouts,
            backend=sampler.backend,
            rescale=sampler.rescale,
        )

    @torch.no_grad()
    def __call__(self, encoder: Encoder, gids: Tensor, step: int) -> Encoding:
        was_training = encoder.training
        encoder.eval()
        key = keyed.stream(self.seed, "refresh-neighbours", step)
        parts = [self._chunk(encoder, part.numpy(), key) for part in gids.cpu().split(_CHUNK_NODES)]
        encoder.train(was_training)
        width = (encoder.cfg.num_factors, encoder.cfg.factor_dim)
        empty = torch.empty((0, *width), dtype=encoder.linear.weight.dtype, device=self.device)
        return Encoding(
            torch.cat([p.h for p in parts] or [empty]), torch.cat([p.z for p in parts] or [empty])
        )

    def _chunk(self, encoder: Encoder, gids: np.ndarray, key: int) -> Encoding:
        view = self.sampler.sample(gids, key, features=self.features).to(self.device)
        x = placed(view.x, self.device, encoder.linear.weight.dtype)
        h, z, _ = encoder(x, view.edges, view.hops)
        return Encoding(h[view.nodes], z[view.nodes])


_MAX_FAILURES = 3
_LOOKS = 5  # diagnoses that a curve over time takes


def random_scores(num_factors: int, seed: int) -> CIScores:
    """The control: a random half of the factors as the first context, for the whole run."""
    chosen = random_half(num_factors, seed)
    return CIScores(chosen.double(), chosen, 0.0, 0.0, chosen.double(), 0, "random-half", "control")


def redrawn_scores(
    cfg: Config, step: int, previous: CIScores | None
) -> tuple[CIScores, dict[str, Any]]:
    """The other control: a new random half, keyed by seed and step, and what to log."""
    scores = random_scores(cfg.model.num_factors, keyed.derive(cfg.run.seed, step))
    return scores, {"status": scores.status} | _context(scores, previous)


def _context(scores: CIScores, previous: CIScores | None) -> dict[str, Any]:
    """The factors of F1, and their overlap with those of the refresh before."""
    found = {} if previous is None else overlap("previous", scores.in_context, previous.in_context)
    return {"context": scores.in_context.nonzero().squeeze(-1).tolist()} | found


def diagnosis_interval(cfg: Config, num_steps: int) -> int:
    """Refreshes from one diagnosis to the next: as configured, fewer where a run is too short for a
    curve.
    """
    return min(cfg.ci.diagnose_every, max(1, -(-num_steps // cfg.ci.every_steps) // _LOOKS))


class Refresher:
    """Holds this rank's share of the nodes with their initial labels, and makes the partition from
    the current encoder.

    labels int64 [n] (-1: none) and confidence float [n] are those of this rank's nodes, which are
    consecutive from first_node on; num_steps is the length of the run.
    """

    def __init__(
        self,
        cfg: Config,
        labels: Tensor,
        confidence: Tensor,
        embedder: Embedder,
        comm: Comm,
        num_steps: int,
        first_node: int = 0,
    ) -> None:
        self.cfg, self.embedder, self.comm = cfg, embedder, comm
        self.diagnose_every = diagnosis_interval(cfg, num_steps)
        nodes = range(first_node, first_node + labels.numel())
        base = select_confident(
            labels,
            confidence,
            nodes,
            fraction=cfg.cluster.fraction,
            min_per_cluster=2 * cfg.ci.block_size,
            comm=comm,
        )
        self.num_clusters = num_groups(labels, comm)
        self.failures = 0
        self.average: HsicStats | None = None  # over the refreshes that decided something
        kept = self._looked_at(labels, base, nodes)
        self.gids, self.labels, self.base = kept + first_node, labels[kept], base[kept]

    def _looked_at(self, labels: Tensor, base: Tensor, nodes: range) -> Tensor:
        """Collective: which of this rank's nodes a refresh looks at, int64 [m]: all; in the sampled
        regime no more than max_samples members and as many candidates, so that it does not grow
        with N.
        """
        if not self.cfg.sampler.fanouts:
            return torch.arange(len(nodes))
        key = keyed.stream(self.cfg.run.seed, "refresh-sample")
        rest = self.num_clusters, self.cfg.ci.max_samples, key, self.comm

        def members(rows: slice) -> Tensor:
            return torch.where(base[rows], labels[rows], -1)

        def others(rows: slice) -> Tensor:
            return torch.where(~base[rows] & (labels[rows] >= 0), 0, -1)

        kept = even_sample(members, nodes, *rest) | even_sample(others, nodes, *rest)
        return kept.nonzero().squeeze(-1)

    def __call__(
        self, encoder: Encoder, step: int, previous: CIScores | None
    ) -> tuple[CIScores, dict[str, Any]]:
        """Collective: (scores and partition, what to log). Embeddings that are not finite change
        nothing; three times in a row is an error (§12.1).

        Logged at every refresh: `jaccard_previous` of F1 with the one before. When diagnosing also
        `jaccard_permutations`: F1 is solved again with blocks drawn independently at this step
        (earlier refreshes in the average are shared). Each with its chance level for these sizes.
        """
        cfg, comm = self.cfg, self.comm
        began = time.perf_counter()
        h, z, _ = self.embedder(encoder, self.gids, step)
        h, z = h.cpu(), z.cpu()
        bad = int(comm.sum((~torch.isfinite(h)).sum() + (~torch.isfinite(z)).sum()))
        if bad:
            return self._skip(step, previous, bad)
        self.failures = 0
        cluster = cfg.cluster
        grown = grow_confident(
            z.flatten(1),
            self.labels,
            self.base,
            self.gids,
            rule=cluster.growth,
            threshold=cluster.growth_threshold,
            agree=cluster.growth_agree,
            bank_size=cluster.bank_size,
            seed=cfg.run.seed,
            comm=comm,
        )
        sample = even_sample(
            lambda rows: torch.where(grown.mask[rows], self.labels[rows], -1),
            self.gids,
            self.num_clusters,
            cfg.ci.max_samples,
            keyed.stream(cfg.run.seed, "refresh-sample", step),
            comm,
        )
        rows, labels, gids = h[sample], self.labels[sample], self.gids[sample]
        if cfg.ci.normalize:
            rows = normalize_factors(rows)
        past, fresh = self.average, self._statistics(rows, labels, gids, step)
        is_decided = refusal(fresh) is None
        stats = averaged(past, fresh, cfg.ci.average) if is_decided else fresh
        if is_decided and cfg.ci.average:
            self.average = stats
        scores = self._partition(stats, previous)
        metrics: dict[str, Any] = {
            "confident": int(comm.sum(grown.mask.sum())),
            "grown": grown.added,
            "status": scores.status,
        }
        metrics |= {f"mu_norm/{c}": value for c, value in enumerate(grown.mu_norms.tolist())}
        metrics |= _context(scores, previous)
        metrics["scores"] = scores.scores.tolist()
        metrics["seconds"] = time.perf_counter() - began
        if (step // cfg.ci.every_steps) % self.diagnose_every == 0:
            options: dict[str, Any] = {"block_size": cfg.ci.block_size, "seed": cfg.run.seed}
            found = describe_partition(rows, labels, gids, scores, comm=comm, **options)
            metrics |= {name.removeprefix("ci/"): value for name, value in found.items()}
            if is_decided:
                fresh = self._statistics(rows, labels, gids, step, draw=1)
                again = self._partition(averaged(past, fresh, cfg.ci.average), previous)
                metrics |= overlap("permutations", scores.in_context, again.in_context)
        return scores, metrics

    def _skip(
        self, step: int, previous: CIScores | None, bad: int
    ) -> tuple[CIScores, dict[str, Any]]:
        self.failures += 1
        if self.failures >= _MAX_FAILURES:
            raise UserError(
                f"The factor scores could not be refreshed {_MAX_FAILURES} times in a row: "
                f"{bad:,} values of the embeddings are NaN or infinite at step {step}. "
                f"Lower optim.lr_max (now {self.cfg.optim.lr_max:g})."
            )
        kept = previous or random_scores(self.cfg.model.num_factors, self.cfg.run.seed)
        scores = replace(
            kept,
            num_solves=0,
            status="skipped-nonfinite",
            notes=f"{bad} values of the embeddings are NaN or infinite",
        )
        context = scores.in_context.nonzero().squeeze(-1).tolist()
        return scores, {
            "status": scores.status,
            "failures": self.failures,
            "nonfinite": bad,
            "context": context,
        }

    def _statistics(
        self, rows: Tensor, labels: Tensor, gids: Tensor, step: int, draw: int = 0
    ) -> HsicStats:
        """Collective: HSIC of the rows [n, K, c] in blocks of this step, others for each `draw`."""
        ci, key = self.cfg.ci, keyed.derive(self.cfg.run.seed, step, *([draw] if draw else []))
        features = score_features(rows, ci.features)
        common: dict[str, Any] = {"seed": key, "repeats": ci.repeats, "comm": self.comm}
        common["block_size"] = ci.block_size
        if ci.conditional == "stratified":
            return conditional_statistics(features, labels, gids, **common)
        return block_statistics(features, labels, gids, block_classes=ci.block_classes, **common)

    def _partition(self, stats: HsicStats, previous: CIScores | None) -> CIScores:
        cfg = self.cfg
        return choose_partition(
            stats,
            cfg.model.num_factors,
            features=cfg.ci.features,
            lam="auto" if cfg.ci.lam is None else cfg.ci.lam,
            target=cfg.ci.target,
            solver=cfg.ci.solver,
            inner=cfg.ci.inner,
            pi=cfg.ci.pi,
            previous=previous,
            seed=cfg.run.seed,
            comm=self.comm,
        )
