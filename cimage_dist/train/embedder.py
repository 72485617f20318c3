"""Embeddings of chosen nodes on the unmasked graph, in eval mode, while training: for refreshes and initial labels (§8.2)."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from cimage_dist import keyed
from cimage_dist.config import Config
from cimage_dist.nn.encoder import Encoder, Encoding
from cimage_dist.nn.features import Features
from cimage_dist.nn.inference import encode_graph
from cimage_dist.nn.messages import Hops
from cimage_dist.sampling.sampler import NeighbourSampler
from cimage_dist.types import EdgeList, Topology

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
        h, z = encode_graph(encoder, self.x, self.topology)
        at = gids.to(h.device)
        return Encoding(h[at], z[at])


class SampledEmbedder:
    """Sampled neighbourhoods keyed by (seed, step, node), a few thousand nodes at a time: memory does not grow with the graph."""

    def __init__(self, features: np.ndarray, topology: Topology, cfg: Config, device: torch.device) -> None:
        self.features, self.device, self.seed = features, device, cfg.run.seed
        sampler = cfg.sampler
        self.sampler = NeighbourSampler(
            topology.indptr.numpy(), topology.indices.numpy(), sampler.fanouts, seed=cfg.run.seed, backend=sampler.backend, rescale=sampler.rescale
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
        return Encoding(torch.cat([p.h for p in parts] or [empty]), torch.cat([p.z for p in parts] or [empty]))

    def _chunk(self, encoder: Encoder, gids: np.ndarray, key: int) -> Encoding:
        sub = self.sampler.sample_keyed(gids, key)
        weight = torch.from_numpy(sub.weight) if self.sampler.is_weighted else None
        edges = EdgeList(torch.from_numpy(sub.src), torch.from_numpy(sub.dst), len(sub.node_gid), weight, torch.from_numpy(sub.degree)).to(self.device)
        x = torch.from_numpy(self.features[sub.node_gid]).to(self.device, encoder.linear.weight.dtype)
        h, z = encoder(x, edges, Hops(sub.nodes_per_hop, sub.edges_per_hop))
        at = torch.from_numpy(sub.seed_bid).to(self.device)
        return Encoding(h[at], z[at])
