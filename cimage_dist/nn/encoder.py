"""The encoder: features -> K latent factors per node, by projection and weight-free layers.

Start of the projection from the principal directions of the features.

A random projection discards information that training does not recover; the principal directions
keep most of it from the first step. Shapes: F features, D = K·C channels, r directions.
"""

from __future__ import annotations

import dataclasses
import math
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
    z: after the tail, the embedding. Both have the edge factors without gradient; `edges` are
    these with it, for the edge loss.
    """

    h: Tensor
    z: Tensor
    edges: Tensor | None = None


def decode_reach(reach: Tensor) -> tuple[int, float]:
    """(layers, teleport) of the buffer that an encoder keeps them in."""
    layers, alpha = reach.cpu().split(1)
    return int(layers), float(alpha.view(torch.float64))


class EdgeFactors(nn.Module):
    """The factors of a nonlinear network, which the edge loss alone trains (§4.6):

        y = unit factors of ELU(P(W2 g + b2)),   g = ELU(P(W1 x + b1)),   P(h) = (1-α) Â h + α h

    Linear factors say what features agree on; these say which nodes are joined. Cut in stages like
    the layers of the encoder, each of the width of the result: `first` before the first smoothing,
    `after(·, 1)` and `after(·, 2)` behind the first two.
    """

    LAYERS = 2

    def __init__(self, num_features: int, num_factors: int, factor_dim: int, alpha: float) -> None:
        super().__init__()
        width = num_factors * factor_dim
        self.shape, self.alpha = (num_factors, factor_dim), alpha
        self.linear = nn.Linear(num_features, width)
        self.output = nn.Linear(width, width)

    def first(self, x_NF: Features) -> Tensor:
        """[N, K, C]"""
        return project_rows(x_NF, self.linear, 0.0, False).view(-1, *self.shape)

    def after(self, smoothed_TKC: Tensor, own_TKC: Tensor, layer: int) -> Tensor:
        """From Â h and h of the same nodes."""
        rows = F.elu(((1 - self.alpha) * smoothed_TKC + self.alpha * own_TKC).flatten(1))
        rows = self.output(rows) if layer == 1 else rows
        factors = rows.view(-1, *self.shape)
        return factors if layer == 1 else normalize_factors(factors)

    def forward(self, x_NF: Features, edges: EdgeList, hops: Hops | None = None) -> Tensor:
        """Of all nodes, or with `hops` of the seeds."""
        out = self.first(x_NF)
        for layer in range(1, self.LAYERS + 1):
            near, rows = edges, slice(None)
            if hops is not None:
                near, rows = hops.within(edges, self.LAYERS - layer)
            degree = None if near.degree is None else near.degree[: out.shape[0]] + 1
            targets = None if hops is None else rows
            out = self.after(gcn_smooth(out, near, degree, targets), out[rows], layer)
        return out


_EDGE_LENGTH = 2 / 3  # of edge factors while they are trained
_FULL_LENGTH = 3.0  # of edge factors that know all edges; such are rare: half is much (docs/LOG.md)


def beside(linear_NKC: Tensor, edges_NKC: Tensor, share: float | Tensor) -> Tensor:
    """Linear factors and unit edge factors as one embedding, [N, K, C] (§4.6); an edge factor has
    `share` of the length of the node's mean linear factor.
    """
    length = torch.linalg.vector_norm(linear_NKC.flatten(1), dim=1) / linear_NKC.shape[1] ** 0.5
    return torch.cat([linear_NKC, share * length.view(-1, 1, 1) * edges_NKC], dim=1)


class Encoder(nn.Module):
    """projection -> `num_layers` layers P -> tail (§4). No weights beyond the projection.

    With teleport α every layer mixes the projected factors back in (§4.3):

        h⁰ = per-factor unit rows of the projection,   h ← (1-α)·P(h) + α·h⁰

    P is a routing layer (with teleport: its output per factor of unit length), or one GCN
    smoothing. The last `cfg.edge_factors` of the K factors are made by `EdgeFactors` instead.
    """

    reach: Tensor
    edge_length: Tensor

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
        edge_factors = cfg.edge_factors or 0
        self.num_linear = cfg.num_factors - edge_factors
        width = self.num_linear * cfg.factor_dim
        self.linear = nn.Linear(num_features, cfg.hidden or width)
        self.norm = make_norm(norm, self.linear, cfg.dropout, moments)
        self.output = nn.Linear(cfg.hidden, width) if cfg.hidden else None
        self.edges = (
            EdgeFactors(num_features, edge_factors, cfg.factor_dim, cfg.teleport)
            if edge_factors
            else None
        )
        if self.edges is not None:
            self.register_buffer("edge_length", torch.tensor(_EDGE_LENGTH, dtype=torch.float64))
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
        if self.edges is not None:
            self.edges.alpha = alpha

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
        """What the first layer smooths, [N, K, C]: the projected factors, then what the edge
        factors begin with.
        """
        factors = self._project(x_NF)
        if self.edges is None:
            return factors
        return torch.cat([factors, self.edges.first(x_NF)], dim=1)

    def _project(self, x_NF: Features) -> Tensor:
        """dropout -> Linear -> norm [-> ELU -> dropout -> Linear], factor-major [N, K, C]
        (§4.1).
        """
        cfg = self.cfg
        rows: Tensor = self.norm(project_rows(x_NF, self.linear, cfg.dropout, self.training))
        if self.output is not None:
            rows = self.output(dropout(F.elu(rows), cfg.dropout, self.training))
        factors = rows.view(-1, self.num_linear, cfg.factor_dim)
        return normalize_factors(factors) if self.starts_unit else factors

    def layer(
        self,
        x_NKC: Tensor,
        edges: EdgeList,
        number: int,
        start_TKC: Tensor | None = None,
        targets: slice | None = None,
        is_unit: bool = False,
        degree: Tensor | None = None,
    ) -> Tensor:
        """Layer `number`, from 1: (1-α)·P(x) + α·start [T, K, C]; `start` are the targets' rows of
        h⁰. Edge factors are complete after their two layers and pass the others as they are.

        `targets` restricts the result to a range of rows; `edges.dst` then counts from its start.
        `degree` [N] of A + I is for GCN smoothing, as in `gcn_weights`.
        """
        cut, is_complete = self.num_linear, self.edges is None or number > self.edges.LAYERS
        if self.cfg.propagation == "gcn":
            # Complete edge factors are not smoothed.
            rows = x_NKC[:, :cut] if is_complete else x_NKC
            out = gcn_smooth(rows, edges, degree, targets)
        else:
            out = self.routing.route(x_NKC, edges, targets, is_unit)
        if self.edges is None:
            return self._mixed(out, start_TKC)
        own = x_NKC[slice(None) if targets is None else targets, cut:]
        if not is_complete:
            own = self.edges.after(out[:, cut:], own, number)
        linear = self._mixed(out[:, :cut], None if start_TKC is None else start_TKC[:, :cut])
        return self.join(linear, own, number)

    def join(self, linear: Tensor, edges: Tensor, number: int) -> Tensor:
        """What layer `number` gives of linear and of edge factors."""
        is_last = number == self.cfg.num_layers
        return self._beside(linear, edges) if is_last else torch.cat([linear, edges], dim=1)

    def _beside(self, linear: Tensor, edges: Tensor) -> Tensor:
        """Training steps do not read the length, which is measured between them."""
        return beside(linear, edges, _EDGE_LENGTH if self.training else self.edge_length)

    def weigh_edge_factors(self, loss: float) -> None:
        """Set their length in an embedding by the share of the edge loss that they explain (§4.6):
        they help where edges can be predicted, and cost where they cannot.
        """
        explained = max(0.1, 1.0 - loss / (2 * math.log(2)))  # knowing nothing, 2 ln 2 is left
        self.edge_length.fill_(_FULL_LENGTH * explained**2)

    def _mixed(self, out: Tensor, start: Tensor | None) -> Tensor:
        if self.alpha == 0:
            return out
        assert start is not None
        return (1 - self.alpha) * out + self.alpha * start

    def _stored(self, h_NKC: Tensor) -> Tensor:
        """Under autocast the layers' inputs, all that is kept of them for the backward pass, are
        held in its type.
        """
        device = h_NKC.device.type
        if not torch.is_autocast_enabled(device):
            return h_NKC
        return h_NKC.to(torch.get_autocast_dtype(device))

    def forward(
        self, x_NF: Features, edges: EdgeList, hops: Hops | None = None, is_whole: bool = True
    ) -> Encoding:
        """(h, z) of all nodes; without the edge factors where not `is_whole`.

        With `hops` each layer stops at the nodes from which its output still reaches a seed
        (§11.2), so h and z have fewer rows than x: the seeds come first and are all there, equal to
        what the whole subgraph gives.
        """
        cfg = self.cfg
        start = self._project(x_NF)
        if cfg.propagation == "gcn":
            start = start.to(self.linear.weight.dtype)  # sums stay in single precision
            h = propagate(start, edges, self.alpha, cfg.num_layers, hops)
            if self.edges is None or not is_whole:
                return Encoding(h, h)
            found = self.edges(x_NF, edges, hops).to(h.dtype)
            h = self._beside(h, found.detach())
            return Encoding(h, h, found)
        h_NKC = start = self._stored(start)
        if hops is None:
            for number in range(1, cfg.num_layers + 1):
                h_NKC = self.layer(h_NKC, edges, number, start)
            h_NKC = h_NKC.to(self.linear.weight.dtype)
            return Encoding(h_NKC, gcn_smooth(h_NKC, edges) if cfg.tail else h_NKC)
        reach = cfg.num_layers + cfg.tail
        for number in range(1, cfg.num_layers + 1):
            near, rows = hops.within(edges, reach - number)
            h_NKC = self.layer(h_NKC, near, number, start[rows], rows)
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
    rotation = _rotation(keyed.derive(key, 2), width)[: directions.shape[0]]
    weight = rotation.t() @ directions
    linear.weight.copy_(weight)
    linear.bias.copy_(-(weight @ moments.mean))


def _rotation(key: int, width: int) -> Tensor:
    """A keyed random rotation, float64 [width, width]."""
    q, r = torch.linalg.qr(_gaussian(key, width, width))
    return (q * r.diagonal().sign()).t()


_EDGE_GAINS = 2.0, 1.5  # of the two layers: smoothing shrinks what ELU is to bend


@torch.no_grad()
def start_edge_factors(edges: EdgeFactors, moments: FeatureMoments, seed: int) -> None:
    """W1 as `start_from_pca` has it, scaled so that its channels deviate by the first gain in the
    mean (root of the mean variance); W2 a keyed rotation times the second, b2 zero.
    """
    key = keyed.stream(seed, "init", 2)
    start_from_pca(edges.linear, moments, key)
    weight = edges.linear.weight.double()
    cov, factor = moments.cov, moments.cov_factor
    if cov is not None:
        variance = ((weight @ cov.double()) * weight).sum()
    else:
        assert factor is not None
        variance = (factor.double() @ weight.t()).square().sum()
    spread = (variance / weight.shape[0]).sqrt().clamp_min(1e-12)
    scale = (_EDGE_GAINS[0] / spread).to(edges.linear.weight.dtype)
    edges.linear.weight.mul_(scale)
    edges.linear.bias.mul_(scale)
    edges.output.weight.copy_(
        _EDGE_GAINS[1] * _rotation(keyed.derive(key, 1), edges.output.in_features)
    )
    edges.output.bias.zero_()
