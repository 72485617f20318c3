"""Our sampler behind PyG's extension point, for NeighborLoader, NodeLoader and LinkLoader without a
compiled package.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.sampler import NeighborSampler, SamplerOutput
from torch_geometric.sampler.base import DataType, SubgraphType

from cimage_dist import keyed
from cimage_dist.errors import UserError
from cimage_dist.sampling.sampler import NeighbourSampler
from cimage_dist.sampling.seeds import IntArray


class PygNeighbourSampler(NeighborSampler):
    """A homogeneous, directional `NeighborSampler` on our arrays: `NeighborLoader(data, fanouts,
    neighbor_sampler=PygNeighbourSampler(...))`.

    The parent's constructor is not called, because it would sort and copy the whole graph; the
    attributes its methods read are set here. Sampled edge ids are positions in `indices`, so edge
    attributes of `data` must be in that (destination-sorted) order. PyG hands over seeds without a
    step, so the draws are keyed by the set of seeds: repeatable, and the same in every loader
    process.
    """

    def __init__(
        self,
        indptr: IntArray,
        indices: IntArray,
        fanouts: Sequence[int],
        *,
        seed: int = 0,
        backend: str = "auto",
    ) -> None:
        self.data_type = DataType.homogeneous
        self.sample_direction = "forward"
        self.num_nodes = len(indptr) - 1
        self.node_time = self.edge_time = self.edge_weight = self.perm = None
        self.num_neighbors = list(fanouts)
        self.replace = False
        self.subgraph_type = SubgraphType.directional
        self.disjoint = False
        self.temporal_strategy = "uniform"
        self.keep_orig_edges = False
        self._key = keyed.stream(seed, "neighbours")
        self._sampler = NeighbourSampler(indptr, indices, fanouts, seed=seed, backend=backend)

    def _sample(
        self,
        seed: Tensor | dict[str, Tensor],
        seed_time: Tensor | dict[str, Tensor] | None = None,
        **kwargs: Any,
    ) -> SamplerOutput:
        if isinstance(seed, dict) or seed_time is not None:
            raise UserError(
                "This sampler takes one kind of node and no timestamps; heterogeneous and "
                "temporal graphs need PyG's own sampler with pyg-lib."
            )
        content = int(keyed.bits(self._key, seed).sum())
        out = self._sampler.sample_keyed(np.asarray(seed), keyed.derive(self._key, content))
        node, row, col, edge = (
            torch.from_numpy(x) for x in (out.node_gid, out.src, out.dst, out.entry)
        )
        return SamplerOutput(
            node=node,
            row=row,
            col=col,
            edge=edge,
            num_sampled_nodes=list(out.nodes_per_hop),
            num_sampled_edges=list(out.edges_per_hop),
        )
