"""Toy graphs, generated."""

from __future__ import annotations

import numpy as np
import torch

from cimage_dist.types import Topology


def topology_from_pairs(pairs: np.ndarray | list[tuple[int, int]], num_nodes: int) -> Topology:
    """Symmetric, coalesced, without self-loops."""
    pairs = np.asarray(pairs, dtype=np.int64).reshape(-1, 2)
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    keys = np.unique(
        np.concatenate(
            [pairs[:, 0] * num_nodes + pairs[:, 1], pairs[:, 1] * num_nodes + pairs[:, 0]]
        )
    )
    rows, cols = keys // num_nodes, keys % num_nodes
    return Topology(
        torch.from_numpy(np.searchsorted(rows, np.arange(num_nodes + 1))), torch.from_numpy(cols)
    )


def random_topology(num_nodes: int, num_pairs: int, seed: int = 0) -> Topology:
    rng = np.random.default_rng(seed)
    return topology_from_pairs(rng.integers(0, num_nodes, (num_pairs, 2)), num_nodes)


def star(leaves: int) -> Topology:
    return topology_from_pairs([(0, i) for i in range(1, leaves + 1)], leaves + 1)


def planted_blocks(
    num_nodes: int, num_blocks: int, seed: int = 0
) -> tuple[torch.Tensor, Topology, torch.Tensor]:
    """(features, graph, block): about ten neighbours inside the block and one outside; features
    hint at the block through noise.
    """
    rng = np.random.default_rng(seed)
    y = np.arange(num_nodes) % num_blocks
    size = num_nodes // num_blocks
    ends = np.arange(num_nodes).repeat(6)
    inside = ends % num_blocks + num_blocks * rng.integers(0, size, ends.size)
    others = np.where(rng.random(ends.size) < 0.1, rng.integers(0, num_nodes, ends.size), inside)
    pairs = np.stack([ends, others], 1)
    hint = rng.normal(size=(num_blocks, 16))[y]
    x = hint + 2.0 * rng.normal(size=(num_nodes, 16))
    return (
        torch.from_numpy(x),
        topology_from_pairs(pairs[ends != others], num_nodes),
        torch.from_numpy(y),
    )
