"""Slow, obvious float64 versions of the statistics, written from the formulas with plain loops."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def normalised_centred(kernel: Array, norm: float | None = None) -> Array:
    """H K H / (‖H K H‖_F + 1e-9), or divided by a given norm."""
    size = len(kernel)
    h = np.eye(size) - np.ones((size, size)) / size
    centred = h @ kernel @ h
    return centred / ((np.linalg.norm(centred) if norm is None else norm) + 1e-9)


def gaussian(column: Array) -> Array:
    return np.exp(-((column[:, None] - column[None, :]) ** 2) / 2)


def delta(labels: NDArray[np.int64]) -> Array:
    out = np.zeros((len(labels), len(labels)))
    for i, a in enumerate(labels):
        for j, b in enumerate(labels):
            if a == b:
                out[i, j] = 1.0 / np.sum(labels == a)
    return out


def dense_statistics(
    x: Array, labels: NDArray[np.int64], blocks: NDArray[np.int64]
) -> tuple[Array, Array, float]:
    """G, b, y2 by stacking the flattened kernels of all blocks as rows of one tall matrix."""
    x = x / (x.std(axis=0) + 1e-19)
    size = blocks.shape[1]
    tall = np.zeros((len(blocks) * size * size, x.shape[1]))
    target = np.zeros(len(tall))
    for r, rows in enumerate(blocks):
        part = slice(r * size * size, (r + 1) * size * size)
        target[part] = normalised_centred(delta(labels[rows])).ravel()
        for d in range(x.shape[1]):
            tall[part, d] = normalised_centred(gaussian(x[rows, d])).ravel()
    return (
        tall.T @ tall / len(blocks),
        tall.T @ target / len(blocks),
        float(target @ target) / len(blocks),
    )


def dense_conditional(
    x: Array, free: NDArray[np.int64], inside: NDArray[np.int64], weight: Array
) -> Array:
    """Σ_y (n_y/n) G_y with the within-class kernels divided by the mean norm over unconditional
    blocks.
    """
    x = x / (x.std(axis=0) + 1e-19)
    size = free.shape[1]
    h = np.eye(size) - np.ones((size, size)) / size
    norm = [
        np.mean([np.linalg.norm(h @ gaussian(x[rows, d]) @ h) for rows in free])
        for d in range(x.shape[1])
    ]
    out = np.zeros((x.shape[1], x.shape[1]))
    for rows, share in zip(inside, weight, strict=True):
        stack = np.stack(
            [normalised_centred(gaussian(x[rows, d]), norm[d]).ravel() for d in range(x.shape[1])],
            axis=1,
        )
        out += share * stack.T @ stack
    return out


def dense_modularity(z: Array, adjacency: Array) -> float:
    """-(1/2m) Tr((A - d dᵀ/2m) Ẑ Ẑᵀ)."""
    unit = z / np.maximum(np.linalg.norm(z, axis=1, keepdims=True), 1e-12)
    degree = adjacency.sum(axis=0)
    two_m = degree.sum()
    return float(-np.trace((adjacency - np.outer(degree, degree) / two_m) @ unit @ unit.T) / two_m)


def cyclic_descent(matrix: Array, linear: Array, sweeps: int) -> Array:
    """argmin ½wᵀPw - qᵀw, w >= 0, by many plain coordinate updates."""
    w = np.zeros(len(linear))
    for _ in range(sweeps):
        for i in range(len(w)):
            w[i] = max(linear[i] - matrix[i] @ w + matrix[i, i] * w[i], 0.0) / matrix[i, i]
    return w


def confident(
    labels: NDArray[np.int64],
    confidence: Array,
    gids: NDArray[np.int64],
    fraction: float,
    minimum: int,
) -> NDArray[np.bool_]:
    """Best rows of each cluster by a full sort."""
    out = np.zeros(len(labels), dtype=bool)
    for c in np.unique(labels[labels >= 0]):
        rows = np.flatnonzero(labels == c)
        quota = max(int(np.ceil(fraction * len(rows) - 1e-9)), min(minimum, len(rows)))
        out[rows[np.lexsort((gids[rows], -confidence[rows]))[:quota]]] = True
    return out
