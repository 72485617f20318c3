"""Features made from the graph, for graphs that come without (data.features = degree | hash | laplacian)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from cimage_dist import keyed
from cimage_dist.data.checks import Array
from cimage_dist.errors import UserError

_CHUNK_ROWS = 1 << 16
_SEED = 0  # made features belong to the dataset, not to a run


def make_features(kind: str, width: int, indptr: Array, indices: Array) -> Iterator[Array]:
    """Row chunks, float32 [n, width] (degree: [n, 2])."""
    if kind == "degree":
        return degree_features(indptr)
    if kind == "hash":
        return hash_features(len(indptr) - 1, width)
    return laplacian_features(indptr, indices, width)


def degree_features(indptr: Array) -> Iterator[Array]:
    """log(1 + deg) and 1 / √(1 + deg)."""
    for start in range(0, len(indptr) - 1, _CHUNK_ROWS):
        degree = np.diff(indptr[start : start + _CHUNK_ROWS + 1]).astype(np.float64)
        yield np.stack([np.log1p(degree), 1 / np.sqrt(1 + degree)], axis=1).astype(np.float32)


def hash_features(num_nodes: int, width: int) -> Iterator[Array]:
    """Hashed identity: node i has the signs ±1/√width of its own hash, so that rows are nearly orthogonal."""
    words = -(-width // 64)
    for start in range(0, num_nodes, _CHUNK_ROWS):
        ids = torch.arange(start, min(start + _CHUNK_ROWS, num_nodes))
        drawn = torch.stack([keyed.bits(keyed.stream(_SEED, "made-features", word), ids) for word in range(words)], dim=1)
        signs = (drawn.unsqueeze(-1) >> torch.arange(64)) & 1
        yield ((signs.view(len(ids), -1)[:, :width] * 2 - 1).to(torch.float32) / width**0.5).numpy()


def laplacian_features(indptr: Array, indices: Array, width: int) -> Iterator[Array]:
    """Leading eigenvectors of D^-1/2 A D^-1/2 (the smoothest of the normalised Laplacian), scaled to mean square 1.

    The start vector is keyed and each vector's largest entry is made positive, so that the result is reproducible.
    """
    from scipy.sparse import csr_array
    from scipy.sparse.linalg import ArpackNoConvergence, eigsh

    n = len(indptr) - 1
    if width >= n:
        raise UserError(
            f"data.made_features={width} Laplacian features need more than {width} nodes, but the graph has {n}. "
            "Lower data.made_features, or use data.features=degree."
        )
    degree = np.diff(indptr)
    scale = 1 / np.sqrt(np.maximum(degree, 1))
    values = np.repeat(scale, degree) * scale[indices]
    adjacency = csr_array((values, np.asarray(indices), np.asarray(indptr)), shape=(n, n))
    start = keyed.uniform(keyed.stream(_SEED, "made-features", 0), torch.arange(n)).numpy() + 0.5
    try:
        _, vectors = eigsh(adjacency, k=width, which="LA", v0=start)
    except ArpackNoConvergence as error:
        raise UserError(f"Laplacian features did not converge ({error}). Lower data.made_features (now {width}), or use data.features=hash.") from None
    vectors = vectors[:, ::-1]
    peak = np.take_along_axis(vectors, np.abs(vectors).argmax(axis=0)[None], axis=0)
    features = (vectors * np.where(peak < 0, -1.0, 1.0) * np.sqrt(n)).astype(np.float32)
    for first in range(0, n, _CHUNK_ROWS):
        yield features[first : first + _CHUNK_ROWS]
