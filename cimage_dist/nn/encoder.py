"""The encoder: features -> K latent factors per node, by projection and weight-free layers.

Start of the projection from the principal directions of the features.

A random projection discards information that training does not recover; the principal directions
keep most of it from the first step. Shapes: F features, D = K·C channels, r directions.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cimage_dist import keyed
from cimage_dist.config import ModelConfig
from cimage_dist.nn.projection import dropout, make_norm, project_rows
from cimage_dist.nn.propagate import gcn_smooth, propagate
from cimage_dist.nn.routing import RoutingConv, normalize_factors
from cimage_dist.types import EdgeList, FeatureMoments, Features, Hops


class Encoding(NamedTuple):
    """h: output of the layers [N, K, C], which the conditional-independence scores look at;
    z: after the tail, the embedding.
    """

    h: Tensor
    z: Tensor


def decode_reach(reach: Tensor) -> tuple[int, float]:
    """(layers, teleport) of the buffer that an encoder keeps them in."""
    layers, alpha = reach.cpu().split(1)
    return int(layers), float(alpha.view(torch.float64))


class Encoder(nn.Module):
    """projection -> `num_layers` layers P -> tail (§4). No weights beyond the projection.

    With teleport α every layer mixes the projected factors back in (§4.3):

        h⁰ = per-factor unit rows of the projection,   h ← (1-α)·P(h) + α·h⁰

    P is a routing layer (with teleport: its output per factor of unit length), or one GCN
    smoothing.
    """

    reach: Tensor

    def __init__(
        self,
        num_features: int,
        cfg: ModelConfig,
        norm: str = "batch",
        moments: FeatureMoments | None = None,
    ) -> None:
        super().__init__()
        if not cfg.factor_dim or not cfg.num_layers or cfg.teleport is None:
            raise ValueError(
                "the encoder needs a width, layers and a teleport: fit_to_graph finds them"
            )
        self.cfg = cfg
        width = cfg.num_factors * cfg.factor_dim
        self.linear = nn.Linear(num_features, cfg.hidden or width)
        self.norm = make_norm(norm, self.linear, cfg.dropout, moments)
        self.output = nn.Linear(cfg.hidden, width) if cfg.hidden else None
        self.routing = self._make_routing()
        # Weights alone must show how far they reach where the graph decided it. Bits of a double,
        # since a change of the weights' type must not round it.
        alpha = torch.tensor([cfg.teleport], dtype=torch.float64).view(torch.int64)
        self.register_buffer("reach", torch.cat([torch.tensor([cfg.num_layers]), alpha]))

    def follow_weights(self) -> None:
        """Take layers and teleport from loaded weights: where they were made, the graph may have
        led to others.
        """
        layers, alpha = decode_reach(self.reach)
        self.cfg = dataclasses.replace(self.cfg, num_layers=layers, teleport=alpha)
        self.routing = self._make_routing()

    def _make_routing(self) -> RoutingConv:
        cfg = self.cfg
        return RoutingConv(
            cfg.num_factors,
            cfg.routing_iterations,
            cfg.routing_temperature,
            init=cfg.routing_init,
            final_norm=cfg.routing_final_norm or self.alpha > 0,
            grad=cfg.routing_grad,
            backend=cfg.routing_backend,
        )

    @property
    def alpha(self) -> float:
        """The teleport."""
        assert self.cfg.teleport is not None
        return self.cfg.teleport

    @property
    def starts_unit(self) -> bool:
        """Whether `project` gives unit factors: where they are mixed in, or smoothed as they
        are.
        """
        return self.cfg.propagation == "gcn" or self.alpha > 0

    def project(self, x_NF: Features) -> Tensor:
        """dropout -> Linear -> norm [-> ELU -> dropout -> Linear], factor-major [N, K, C]
        (§4.1).
        """
        cfg = self.cfg
        rows: Tensor = self.norm(project_rows(x_NF, self.linear, cfg.dropout, self.training))
        if self.output is not None:
            rows = self.output(dropout(F.elu(rows), cfg.dropout, self.training))
        factors = rows.view(-1, cfg.num_factors, cfg.factor_dim)
        return normalize_factors(factors) if self.starts_unit else factors

    def layer(
        self,
        x_NKC: Tensor,
        edges: EdgeList,
        start_TKC: Tensor | None = None,
        targets: slice | None = None,
        is_unit: bool = False,
        degree: Tensor | None = None,
    ) -> Tensor:
        """One layer: (1-α)·P(x) + α·start [T, K, C]; `start` are the targets' rows of h⁰.

        `targets` restricts the result to a range of rows; `edges.dst` then counts from its start.
        `degree` [N] of A + I is for GCN smoothing, as in `gcn_weights`.
        """
        cfg = self.cfg
        if cfg.propagation == "gcn":
            out = gcn_smooth(x_NKC, edges, degree, targets)
        else:
            out = self.routing.route(x_NKC, edges, targets, is_unit)
        if self.alpha == 0:
            return out
        assert start_TKC is not None
        return (1 - self.alpha) * out + self.alpha * start_TKC

    def _stored(self, h_NKC: Tensor) -> Tensor:
        """Under autocast the layers' inputs, all that is kept of them for the backward pass, are
        held in its type.
        """
        device = h_NKC.device.type
        if not torch.is_autocast_enabled(device):
            return h_NKC
        return h_NKC.to(torch.get_autocast_dtype(device))

    def forward(self, x_NF: Features, edges: EdgeList, hops: Hops | None = None) -> Encoding:
        """(h, z) of all nodes. With `hops` each layer stops at the nodes from which its output
        still reaches a seed (§11.2), so h and z have fewer rows than x: the seeds come first and
        are all there, equal to what the whole subgraph gives.
        """
        cfg = self.cfg
        start = self.project(x_NF)
        if cfg.propagation == "gcn":
            start = start.to(self.linear.weight.dtype)  # sums stay in single precision
            h = propagate(start, edges, self.alpha, cfg.num_layers, hops)
            return Encoding(h, h)
        h_NKC = start = self._stored(start)
        if hops is None:
            for _ in range(cfg.num_layers):
                h_NKC = self.layer(h_NKC, edges, start)
            h_NKC = h_NKC.to(self.linear.weight.dtype)
            return Encoding(h_NKC, gcn_smooth(h_NKC, edges) if cfg.tail else h_NKC)
        reach = cfg.num_layers + cfg.tail
        for number in range(1, cfg.num_layers + 1):
            near, rows = hops.within(edges, reach - number)
            h_NKC = self.layer(h_NKC, near, start[rows], rows)
        h_NKC = h_NKC.to(self.linear.weight.dtype)
        if not cfg.tail:
            return Encoding(h_NKC, h_NKC)
        near, seeds = hops.within(edges, 0)
        degree = None if edges.degree is None else edges.degree[: h_NKC.shape[0]] + 1
        return Encoding(h_NKC, gcn_smooth(h_NKC, near, degree, seeds))


_EXACT_BELOW = 1024  # features up to which the eigenvectors are computed exactly
_OVERSAMPLE, _POWER = 64, 6
_RANK = 1e-10  # share of the largest variance below which a direction counts as absent


def _gaussian(key: int, rows: int, columns: int) -> Tensor:
    """Keyed normal draws, float64 [rows, columns] (Box-Muller)."""
    ids = torch.arange(rows * columns)
    radius = (-2 * (1 - keyed.uniform(keyed.derive(key, 0), ids)).log()).sqrt()
    return (radius * (2 * torch.pi * keyed.uniform(keyed.derive(key, 1), ids)).cos()).view(
        rows, columns
    )


def principal_directions(
    moments: FeatureMoments, count: int, key: int, power: int = _POWER
) -> Tensor:
    """At most `count` eigenvectors of the feature covariance, largest first; float64 [r, F].

    Directions without variance are left out. Wide covariances take a randomised subspace
    iteration (Halko, Martinsson & Tropp 2011). Signs: the entry of largest size is positive.
    """
    cov, factor = moments.cov, moments.cov_factor
    num_features = moments.mean.numel()
    if cov is None and num_features <= _EXACT_BELOW:
        assert factor is not None
        cov = factor.t() @ factor
    if cov is not None and num_features <= _EXACT_BELOW:
        values, vectors = torch.linalg.eigh(cov)
    else:
        # Single precision: the iteration orthonormalises after every product.
        wide = (cov if cov is not None else factor).float()  # type: ignore[union-attr]

        def apply(q: Tensor) -> Tensor:
            return wide @ q if cov is not None else wide.t() @ (wide @ q)

        columns = min(count + _OVERSAMPLE, num_features)
        q = _gaussian(key, num_features, columns).float()
        for _ in range(power):
            q = torch.linalg.qr(apply(q)).Q
        values, inner = torch.linalg.eigh((q.t() @ apply(q)).double())
        vectors = q.double() @ inner
    values, vectors = values.flip(0)[:count], vectors.flip(1)[:, :count].t()
    vectors = vectors[values > _RANK * values[:1].clamp_min(0)]
    peak = vectors.gather(1, vectors.abs().argmax(1, keepdim=True))
    return vectors * torch.where(peak < 0, -1.0, 1.0)


@torch.no_grad()
def start_from_pca(linear: nn.Linear, moments: FeatureMoments, seed: int) -> None:
    """W = (V R)ᵀ, b = -W x̄: the D leading directions V [F, r], rotated by a keyed random R.

    R [r, D] holds the first r rows of a random D x D rotation, so that every channel, and so every
    factor, carries a share of every direction in proportion to its deviation; with D above the
    rank r the channels are linearly dependent, and no direction is counted twice. A function of
    the moments and the seed, so equal on all ranks.
    """
    width = linear.out_features
    key = keyed.stream(seed, "init", 1)
    directions = principal_directions(moments, width, key)
    q, r = torch.linalg.qr(_gaussian(keyed.derive(key, 2), width, width))
    rotation = (q * r.diagonal().sign()).t()[: directions.shape[0]]
    weight = rotation.t() @ directions
    linear.weight.copy_(weight)
    linear.bias.copy_(-(weight @ moments.mean))
