"""Toy graphs, generated."""

from __future__ import annotations

import numpy as np
import torch

from cimage_dist.types import Topology


def topology_from_pairs(pairs: np.ndarray | list[tuple[int, int]], num_nodes: int) -> Topology:
    """Symmetric, coalesced, without self-loops."""
    pairs = np.asarray(pairs, dtype=np.int64).reshape(-1, 2)
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    keys = np.unique(np.concatenate([pairs[:, 0] * num_nodes + pairs[:, 1], pairs[:, 1] * num_nodes + pairs[:, 0]]))
    rows, cols = keys // num_nodes, keys % num_nodes
    return Topology(torch.from_numpy(np.searchsorted(rows, np.arange(num_nodes + 1))), torch.from_numpy(cols))


def random_topology(num_nodes: int, num_pairs: int, seed: int = 0) -> Topology:
    rng = np.random.default_rng(seed)
    return topology_from_pairs(rng.integers(0, num_nodes, (num_pairs, 2)), num_nodes)


def star(leaves: int) -> Topology:
    return topology_from_pairs([(0, i) for i in range(1, leaves + 1)], leaves + 1)
