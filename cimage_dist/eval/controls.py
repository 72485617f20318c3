"""What an embedding must beat: features smoothed over the graph, without any training."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cimage_dist.types import Topology

_COLUMNS = 64


@torch.no_grad()
def smooth_features(x: Tensor, topology: Topology, hops: int = 2) -> Tensor:
    """S^hops x with S = D^-1/2 (A + I) D^-1/2, D the degrees of A + I; float32 [N, F].

    Works on 64 feature columns at a time, so beside the result only N×64 values are held. An isolated node keeps its features.
    """
    scale = (topology.degrees() + 1).to(torch.float32).rsqrt()[:, None]
    indices, offsets = topology.indices, topology.indptr[:-1].to(topology.indices.dtype)
    smoothed = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    for begin in range(0, x.shape[1], _COLUMNS):
        columns = x[:, begin : begin + _COLUMNS].float()
        for _ in range(hops):
            scaled = columns * scale
            # A bag per row of the adjacency sums its neighbours without gathering E×64 values.
            columns = (F.embedding_bag(indices, scaled, offsets, mode="sum") + scaled) * scale
        smoothed[:, begin : begin + _COLUMNS] = columns
    return smoothed
