"""The encoder: features -> K latent factors per node, by projection and weight-free layers."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cimage_dist.config import ModelConfig
from cimage_dist.nn.dropout import dropout
from cimage_dist.nn.features import Features, project_rows
from cimage_dist.nn.messages import Hops
from cimage_dist.nn.norm import make_norm
from cimage_dist.nn.propagate import propagate
from cimage_dist.nn.routing import normalize_factors, route
from cimage_dist.nn.tail import gcn_smooth
from cimage_dist.types import EdgeList, FeatureMoments


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
            raise ValueError("the encoder needs a width, layers and a teleport: fit_to_graph finds them")
        self.cfg = cfg
        width = cfg.num_factors * cfg.factor_dim
        self.linear = nn.Linear(num_features, cfg.hidden or width)
        self.norm = make_norm(norm, self.linear, cfg.dropout, moments)
        self.output = nn.Linear(cfg.hidden, width) if cfg.hidden else None
        # Weights alone must tell how far they reach where the graph decided it. Bits of a double,
        # since a change of the weights' type must not round it.
        alpha = torch.tensor([cfg.teleport], dtype=torch.float64).view(torch.int64)
        self.register_buffer("reach", torch.cat([torch.tensor([cfg.num_layers]), alpha]))

    def follow_weights(self) -> None:
        """Take layers and teleport from loaded weights: where they were made, the graph may have
        led to others.
        """
        layers, alpha = decode_reach(self.reach)
        self.cfg = dataclasses.replace(self.cfg, num_layers=layers, teleport=alpha)

    @property
    def alpha(self) -> float:
        """The teleport."""
        assert self.cfg.teleport is not None
        return self.cfg.teleport

    @property
    def starts_unit(self) -> bool:
        """Whether `project` gives unit factors: where they are mixed in, or smoothed as they are."""
        return self.cfg.propagation == "gcn" or self.alpha > 0

    def project(self, x_NF: Features) -> Tensor:
        """dropout -> Linear -> norm [-> ELU -> dropout -> Linear], factor-major [N, K, C] (§4.1)."""
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
            out = route(
                x_NKC,
                edges,
                cfg.routing_iterations,
                cfg.routing_temperature,
                cfg.routing_init,
                cfg.routing_final_norm or self.alpha > 0,
                cfg.routing_grad,
                targets,
                cfg.routing_backend,
                is_unit,
            )
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
        still reaches a seed (§11.2), so h and z have fewer rows than x: the seeds come first and are
        all there, equal to what the whole subgraph gives.
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
