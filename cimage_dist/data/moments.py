"""Mean, second moment and covariance of the node features in one pass over row chunks (§2.1).

    x̄ = 1/N Σ x,   E[x²] = 1/N Σ x∘x,   Σ_x = 1/N Σ (x − x̄)(x − x̄)ᵀ

Up to `FULL_WIDTH` columns the covariance is exact. Wider features keep a factor of r sampled,
centred rows divided by √r, so that Σ_x ≈ factorᵀ factor without an F×F matrix; with r = N it is
exact too.

Features made from the graph, for graphs that come without (data.features = degree | hash |
laplacian).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from cimage_dist import keyed
from cimage_dist.data.checks import Array
from cimage_dist.data.sparse import CsrFeatures
from cimage_dist.errors import UserError
from cimage_dist.types import SPARSE_SHARE, FeatureMoments

FULL_WIDTH = 4096
SAMPLED_ROWS = 4096
_CHUNK_VALUES = 1 << 22  # values per chunk when features are read once through


def sampled_rows(num_rows: int, count: int, seed: int = 0) -> Array:
    """`count` distinct row ids (all of them if there are no more), ascending, a function of the
    arguments alone.
    """
    if count >= num_rows:
        return np.arange(num_rows)
    key = keyed.stream(seed, "feature-sample")
    if num_rows <= 4 * count:
        return np.sort(
            torch.argsort(keyed.bits(key, torch.arange(num_rows)), stable=True)[:count].numpy()
        )
    drawn = keyed.integers(key, torch.arange(2 * count), num_rows).numpy()
    _, first = np.unique(drawn, return_index=True)
    return np.sort(drawn[np.sort(first)[:count]])


class MomentAccumulator:
    """Feed all rows in order with `add`, then `finish`. Memory: F² float64, or r·F for wide
    features (in single precision, where they are sparse).
    """

    def __init__(self, num_rows: int, num_features: int, seed: int = 0) -> None:
        self.num_rows, self.num_features = num_rows, num_features
        self._seen = 0
        self._shift: Array | None = None
        self._sum = np.zeros(num_features)
        self._square = np.zeros(num_features)
        self._full = num_features <= FULL_WIDTH
        self._gram = np.zeros((num_features, num_features)) if self._full else None
        self._ids = (
            np.empty(0, dtype=np.int64)
            if self._full
            else sampled_rows(num_rows, SAMPLED_ROWS, seed)
        )
        self._rows: list[Any] = []

    def add(self, rows: Any) -> None:
        """rows [n, F], an array or a scipy matrix; as they are stored, so that fp16 rounding is
        part of the moments.
        """
        from scipy.sparse import csr_array, issparse

        rows = rows.astype(np.float64)
        count = rows.shape[0]
        nonzeros = rows.nnz if issparse(rows) else np.count_nonzero(rows)
        density = nonzeros / max(count * self.num_features, 1)
        if self._shift is None:
            # Products are summed about a point near the mean: no cancellation. Sparse rows keep
            # zero, to stay sparse.
            self._shift = (
                np.asarray(rows.mean(axis=0)).reshape(-1)
                if density >= SPARSE_SHARE and count
                else np.zeros(self.num_features)
            )
        self._sum += np.asarray(rows.sum(axis=0)).reshape(-1)
        if issparse(rows):
            self._square += np.asarray(rows.multiply(rows).sum(axis=0)).reshape(-1)
        else:
            self._square += np.einsum("nf,nf->f", rows, rows)
        if self._gram is None:
            low, high = np.searchsorted(self._ids, [self._seen, self._seen + count])
            self._rows.append(rows[self._ids[low:high] - self._seen])
        elif density < SPARSE_SHARE and not self._shift.any():
            sparse = csr_array(rows)
            products = (sparse.T @ sparse).tocoo()
            self._gram[products.row, products.col] += products.data
        else:
            rows = rows.toarray() if issparse(rows) else rows
            rows -= self._shift
            self._gram += rows.T @ rows
        self._seen += count

    def finish(self) -> FeatureMoments:
        assert self._seen == self.num_rows, f"{self._seen} of {self.num_rows} rows were added"
        mean = self._sum / self.num_rows
        cov = factor = None
        if self._gram is not None:
            assert self._shift is not None
            offset = mean - self._shift
            cov = torch.from_numpy(self._gram / self.num_rows - np.outer(offset, offset))
        else:
            factor = self._factor(mean)
        return FeatureMoments(
            torch.from_numpy(mean), torch.from_numpy(self._square / self.num_rows), cov, factor
        )

    def _factor(self, mean: Array) -> torch.Tensor:
        """The sampled rows, centred; sparse ones a chunk at a time, in the stored precision."""
        root = np.sqrt(len(self._ids))
        if all(isinstance(rows, np.ndarray) for rows in self._rows):
            return torch.from_numpy((np.concatenate(self._rows) - mean) / root)
        factor = np.empty((len(self._ids), self.num_features), dtype=np.float32)
        begin = 0
        for rows in self._rows:
            factor[begin : begin + rows.shape[0]] = (rows.toarray() - mean) / root
            begin += rows.shape[0]
        return torch.from_numpy(factor)


def moments_of(x: Array | CsrFeatures) -> FeatureMoments:
    """In one pass over the rows, a few at a time."""
    moments = MomentAccumulator(*x.shape)
    step = max(1, _CHUNK_VALUES // max(1, x.shape[1]))
    for start in range(0, x.shape[0], step):
        end = min(start + step, x.shape[0])
        moments.add(x.block(start, end) if isinstance(x, CsrFeatures) else x[start:end])
    return moments.finish()


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
    """Hashed identity: node i has the signs ±1/√width of its own hash, so that rows are nearly
    orthogonal.
    """
    words = -(-width // 64)
    for start in range(0, num_nodes, _CHUNK_ROWS):
        ids = torch.arange(start, min(start + _CHUNK_ROWS, num_nodes))
        drawn = torch.stack(
            [keyed.bits(keyed.stream(_SEED, "made-features", word), ids) for word in range(words)],
            dim=1,
        )
        signs = (drawn.unsqueeze(-1) >> torch.arange(64)) & 1
        yield ((signs.view(len(ids), -1)[:, :width] * 2 - 1).to(torch.float32) / width**0.5).numpy()


def laplacian_features(indptr: Array, indices: Array, width: int) -> Iterator[Array]:
    """Leading eigenvectors of D^-1/2 A D^-1/2 (the smoothest of the normalised Laplacian), scaled
    to mean square 1.

    The start vector is keyed and each vector's largest entry is made positive, so that the result
    is reproducible.
    """
    from scipy.sparse import csr_array
    from scipy.sparse.linalg import ArpackNoConvergence, eigsh

    n = len(indptr) - 1
    if width >= n:
        raise UserError(
            f"data.made_features={width} Laplacian features need more than {width} nodes, but "
            f"the graph has {n}. "
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
        raise UserError(
            f"Laplacian features did not converge ({error}). Lower data.made_features (now "
            f"{width}), or use data.features=hash."
        ) from None
    vectors = vectors[:, ::-1]
    peak = np.take_along_axis(vectors, np.abs(vectors).argmax(axis=0)[None], axis=0)
    features = (vectors * np.where(peak < 0, -1.0, 1.0) * np.sqrt(n)).astype(np.float32)
    for first in range(0, n, _CHUNK_ROWS):
        yield features[first : first + _CHUNK_ROWS]
