"""The encoder: features -> K latent factors per node, by projection, routing layers and a smoothing tail."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from cimage_dist.config import ModelConfig
from cimage_dist.nn.features import Features, project_rows
from cimage_dist.nn.messages import Hops
from cimage_dist.nn.norm import make_norm
from cimage_dist.nn.routing import route
from cimage_dist.nn.tail import gcn_smooth
from cimage_dist.types import EdgeList, FeatureMoments


class Encoding(NamedTuple):
    """h: routing output [N, K, C], from which the conditional-independence scores are taken; z: after the tail, the embedding."""

    h: Tensor
    z: Tensor


class Encoder(nn.Module):
    """projection -> `num_layers` routing layers -> tail (§2). No weights beyond the projection."""

    def __init__(self, num_features: int, cfg: ModelConfig, norm: str = "batch", moments: FeatureMoments | None = None) -> None:
        super().__init__()
        self.cfg = cfg
        width = cfg.num_factors * cfg.factor_dim
        self.linear = nn.Linear(num_features, width)
        self.norm = make_norm(norm, self.linear, cfg.dropout, moments)

    def project(self, x_NF: Features) -> Tensor:
        """dropout -> Linear -> norm, factor-major view [N, K, C]; no activation (§2)."""
        projected = project_rows(x_NF, self.linear, self.cfg.dropout, self.training)
        normed: Tensor = self.norm(projected)
        return normed.view(-1, self.cfg.num_factors, self.cfg.factor_dim)

    def route_layer(self, x_NKC: Tensor, edges: EdgeList, targets: slice | None = None, is_unit: bool = False) -> Tensor:
        cfg = self.cfg
        options = (cfg.routing_iterations, cfg.routing_temperature, cfg.routing_init, cfg.routing_final_norm, cfg.routing_grad, targets, cfg.routing_backend)
        return route(x_NKC, edges, *options, is_unit)

    def _stored(self, h_NKC: Tensor) -> Tensor:
        """Under autocast the layers' inputs, all that is kept of them for the backward pass, are held in its type."""
        device = h_NKC.device.type
        return h_NKC.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else h_NKC

    def forward(self, x_NF: Features, edges: EdgeList, hops: Hops | None = None) -> Encoding:
        """(h, z) of all nodes. With `hops` each layer stops at the nodes from which its output still reaches a seed (§20), so h and z
        have fewer rows than x: the seeds come first and are all there, equal to what the whole subgraph gives.
        """
        h_NKC = self._stored(self.project(x_NF))
        if hops is None:
            for _ in range(self.cfg.num_layers):
                h_NKC = self.route_layer(h_NKC, edges)
            h_NKC = h_NKC.to(self.linear.weight.dtype)
            return Encoding(h_NKC, gcn_smooth(h_NKC, edges) if self.cfg.tail else h_NKC)
        reach = self.cfg.num_layers + self.cfg.tail
        for layer in range(1, self.cfg.num_layers + 1):
            h_NKC = self.route_layer(h_NKC, *hops.within(edges, reach - layer))
        h_NKC = h_NKC.to(self.linear.weight.dtype)
        if not self.cfg.tail:
            return Encoding(h_NKC, h_NKC)
        near, seeds = hops.within(edges, 0)
        degree = None if edges.degree is None else edges.degree[: h_NKC.shape[0]] + 1
        return Encoding(h_NKC, gcn_smooth(h_NKC, near, degree, seeds))
