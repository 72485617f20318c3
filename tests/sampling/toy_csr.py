"""Small graphs as row pointers and columns, and what the full graph says about them, for the
sampling tests.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Csr = tuple[NDArray[np.int64], NDArray[np.int32]]


def make_csr(num_nodes: int, u: NDArray[np.int64], v: NDArray[np.int64]) -> Csr:
    keys = np.unique(np.concatenate([u * num_nodes + v, v * num_nodes + u]))
    row, column = keys // num_nodes, keys % num_nodes
    row, column = row[row != column], column[row != column]
    indptr = np.zeros(num_nodes + 1, dtype=np.int64)
    np.cumsum(np.bincount(row, minlength=num_nodes), out=indptr[1:])
    return indptr, column.astype(np.int32)


def random_csr(num_nodes: int = 300, num_pairs: int = 1500, seed: int = 0) -> Csr:
    """A random graph; the last tenth of the nodes is isolated."""
    rng = np.random.default_rng(seed)
    high = max(2, num_nodes - num_nodes // 10)
    return make_csr(num_nodes, rng.integers(0, high, num_pairs), rng.integers(0, high, num_pairs))


def star_csr(num_leaves: int) -> Csr:
    """Node 0 is joined to all others."""
    leaves = np.arange(1, num_leaves + 1)
    return make_csr(num_leaves + 1, np.zeros_like(leaves), leaves)


def directed_pairs(indptr: NDArray[np.int64], indices: NDArray[np.int32]) -> set[tuple[int, int]]:
    """All (row, column)."""
    rows = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    return set(zip(rows.tolist(), indices.tolist(), strict=True))
