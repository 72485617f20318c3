"""A degree-corrected stochastic block model with planted features, generated in chunks at any size.

Structure: an edge picks a block uniformly and a node in it by its propensity; the other end stays
in the block with probability
`homophily`, else goes to one of the other blocks. Within a block the node at relative rank t in [0,
1) has propensity θ(t) ∝ (t + q)^(-a), a = 1 / (exponent − 1): a power law of the degrees, with q
set so that no expected degree exceeds the structural cut-off √(N · mean degree). Sampling θ is a
closed-form inverse, so no table of weights is needed.

Features: column j of the first `label_features` is μ[block, j] + noise; each of the
`nuisance_features` is driven by one of a few Gaussian factors per node that are independent of the
block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from cimage_dist import keyed
from cimage_dist.config import DataConfig, SbmConfig
from cimage_dist.data.build import index_dtype
from cimage_dist.data.checks import Array
from cimage_dist.data.sources.raw import RawGraph, Source

_CHUNK_EDGES = 1 << 20
_CHUNK_ROWS = 1 << 16
_COLUMNS_PER_FACTOR = 8
_PERMUTE, _EDGES, _MEANS, _ROWS = range(4)


def _rng(sbm: SbmConfig, part: int, chunk: int = 0) -> np.random.Generator:
    return np.random.Generator(
        np.random.PCG64(keyed.stream(sbm.seed, "sbm", part, chunk) & ((1 << 64) - 1))
    )


def _mass(t: float, q: float, a: float) -> float:
    """∫ from 0 to t of (s + q)^(-a) ds."""
    return math.log1p(t / q) if abs(a - 1) < 1e-9 else ((t + q) ** (1 - a) - q ** (1 - a)) / (1 - a)


def _offset(a: float, peak: float) -> float:
    """q for which the largest propensity is `peak` times the mean one (bisection; the ratio falls
    with q).
    """
    low, high = 1e-12, 1e12
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (
            (middle, high) if middle ** (-a) / _mass(1.0, middle, a) > peak else (low, middle)
        )
    return high


def _draw_rank(u: Array, q: float, a: float) -> Array:
    """Inverse distribution function of θ at u in [0, 1)."""
    if abs(a - 1) < 1e-9:
        return q * np.expm1(u * math.log1p(1 / q))
    u *= (1 + q) ** (1 - a) - q ** (1 - a)
    u += q ** (1 - a)
    np.power(u, 1 / (1 - a), out=u)
    u -= q
    return u


def _edges(sbm: SbmConfig, order: Array) -> Iterator[tuple[Array, Array]]:
    n, blocks = sbm.num_nodes, sbm.num_blocks
    starts = np.arange(blocks + 1, dtype=np.int64) * n // blocks
    total = max(1, round(n * sbm.avg_degree / 2))
    a = 1 / (sbm.degree_exponent - 1)
    q = _offset(a, max(math.sqrt(n / sbm.avg_degree), 1.0 + 1e-6))

    def nodes(block: Array, u: Array) -> Array:
        size = starts[block + 1] - starts[block]
        rank = np.minimum((_draw_rank(u, q, a) * size).astype(np.int64), size - 1)
        return order[starts[block] + np.maximum(rank, 0)]

    for chunk, first in enumerate(range(0, total, _CHUNK_EDGES)):
        count = min(_CHUNK_EDGES, total - first)
        rng = _rng(sbm, _EDGES, chunk)
        head = rng.integers(blocks, size=count)
        leaves = rng.random(count) >= sbm.homophily
        tail = (
            (head + leaves * rng.integers(1, blocks, size=count)) % blocks if blocks > 1 else head
        )
        yield nodes(head, rng.random(count)), nodes(tail, rng.random(count))


def _features(sbm: SbmConfig, labels: Array) -> Iterator[Array]:
    signal, nuisance = sbm.label_features, sbm.nuisance_features
    factors = num_nuisance_factors(sbm)
    means = _rng(sbm, _MEANS).standard_normal((sbm.num_blocks, signal), dtype=np.float32)
    for chunk, first in enumerate(range(0, sbm.num_nodes, _CHUNK_ROWS)):
        rng = _rng(sbm, _ROWS, chunk)
        y = labels[first : first + _CHUNK_ROWS]
        x = rng.standard_normal((len(y), signal + nuisance), dtype=np.float32)
        x *= np.float32(sbm.noise)
        x[:, :signal] += means[y]
        if nuisance:
            x[:, signal:] += rng.standard_normal((len(y), factors), dtype=np.float32)[
                :, np.arange(nuisance) % factors
            ]
        yield x


def num_nuisance_factors(sbm: SbmConfig) -> int:
    return max(1, math.ceil(sbm.nuisance_features / _COLUMNS_PER_FACTOR))


def load(data: DataConfig) -> RawGraph:
    """Blocks of equal size; node ids are shuffled, so an id reveals neither block nor degree."""
    sbm = data.sbm
    n, blocks = sbm.num_nodes, sbm.num_blocks
    shuffled = torch.argsort(
        keyed.bits(keyed.stream(sbm.seed, "sbm", _PERMUTE), torch.arange(n)), stable=True
    )
    order = shuffled.numpy().astype(index_dtype(n))
    del shuffled
    labels = np.empty(n, dtype=np.int64)
    starts = np.arange(blocks + 1, dtype=np.int64) * n // blocks
    labels[order] = np.repeat(np.arange(blocks), np.diff(starts))
    columns = {
        "label_columns": [0, sbm.label_features],
        "nuisance_columns": [sbm.label_features, sbm.label_features + sbm.nuisance_features],
        "nuisance_factors": num_nuisance_factors(sbm) if sbm.nuisance_features else 0,
        "nuisance_rule": "column j of the nuisance range is driven by factor j modulo "
        "nuisance_factors",
    }
    return RawGraph(
        num_nodes=n,
        edges=lambda: _edges(sbm, order),
        features=lambda: _features(sbm, labels),
        labels=labels,
        notes={"planted": columns},
    )


SOURCES = {"sbm": Source(load)}
