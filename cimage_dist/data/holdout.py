"""Which edges training may see."""

from __future__ import annotations

from cimage_dist.config import DataConfig
from cimage_dist.data.splits import link_split
from cimage_dist.data.store import Graph
from cimage_dist.types import LinkSplit, Topology


def training_graph(graph: Graph, data: DataConfig, seed: int) -> tuple[Topology, LinkSplit | None]:
    """The topology that message passing, positives and embeddings use, and the held-out edges when there are any.

    With data.holdout_edges=link no validation or test edge is in that topology, in either direction (§2.3).
    """
    topology = graph.topology()
    if data.holdout_edges == "none":
        return topology, None
    split = link_split(topology, data, seed)
    return split.train, split
