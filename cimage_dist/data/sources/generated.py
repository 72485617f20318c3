"""Graphs that need no files: a block model of any size, a forum, handwritten digits.

`sbm`: a degree-corrected stochastic block model with planted features, generated in chunks at any
size.

Structure: an edge picks a block uniformly and a node in it by its propensity; the other end stays
in the block with probability `homophily`, else goes to one of the other blocks. Within a block the
node at relative rank t in [0, 1) has propensity θ(t) ∝ (t + q)^(-a), a = 1 / (exponent − 1): a
power law of the degrees, with q set so that no expected degree exceeds the structural cut-off √(N ·
mean degree). Sampling θ is a closed-form inverse, so no table of weights is needed.

Features: column j of the first `label_features` is μ[block, j] + noise; each of the
`nuisance_features` is driven by one of a few Gaussian factors per node that are independent of the
block.

`forum`: small enough for a demonstration: posts, the words they use, who answers whom.

A post has a topic, its class, and a habit of its writer, which has nothing to do with the topic.
Each of its words comes from the language all share (ranks by Zipf's law), from its topic or from
its habit; each topic and each habit prefers few words. An answer goes to a post of the same topic
with probability `_SAME_TOPIC`, else to any post. So words alone say little, neighbours agree
rarely, and common words outweigh both: a graph on which averaging alone does not do.
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
from cimage_dist.data.sources.raw import RawGraph, Source, in_memory

_CHUNK_EDGES = 1 << 20
_CHUNK_ROWS = 1 << 16
_COLUMNS_PER_FACTOR = 8
_PERMUTE, _EDGES, _MEANS, _ROWS = range(4)
POSTS, ANSWERS, WORDS, TOPICS, HABITS = 2000, 5, 2000, 6, 5
_LENGTH = 40  # words of a post
_TOPIC_SHARE = _HABIT_SHARE = 0.1
_SAME_TOPIC = 0.4
_CONCENTRATION = 0.02  # of the Dirichlet draw of a topic's words: small, so few words
NEIGHBOURS = 10


def _generator(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed & ((1 << 64) - 1)))


def _sbm_rng(sbm: SbmConfig, part: int, chunk: int = 0) -> np.random.Generator:
    return _generator(keyed.stream(sbm.seed, "sbm", part, chunk))


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
        is_above = middle ** (-a) / _mass(1.0, middle, a) > peak
        low, high = (middle, high) if is_above else (low, middle)
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


def _sbm_edges(sbm: SbmConfig, order: Array) -> Iterator[tuple[Array, Array]]:
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
        rng = _sbm_rng(sbm, _EDGES, chunk)
        head = rng.integers(blocks, size=count)
        leaves = rng.random(count) >= sbm.homophily
        tail = head
        if blocks > 1:
            tail = (head + leaves * rng.integers(1, blocks, size=count)) % blocks
        yield nodes(head, rng.random(count)), nodes(tail, rng.random(count))


def _sbm_features(sbm: SbmConfig, labels: Array) -> Iterator[Array]:
    signal, nuisance = sbm.label_features, sbm.nuisance_features
    factors = num_nuisance_factors(sbm)
    means = _sbm_rng(sbm, _MEANS).standard_normal((sbm.num_blocks, signal), dtype=np.float32)
    for chunk, first in enumerate(range(0, sbm.num_nodes, _CHUNK_ROWS)):
        rng = _sbm_rng(sbm, _ROWS, chunk)
        y = labels[first : first + _CHUNK_ROWS]
        x = rng.standard_normal((len(y), signal + nuisance), dtype=np.float32)
        x *= np.float32(sbm.noise)
        x[:, :signal] += means[y]
        if nuisance:
            driven = rng.standard_normal((len(y), factors), dtype=np.float32)
            x[:, signal:] += driven[:, np.arange(nuisance) % factors]
        yield x


def num_nuisance_factors(sbm: SbmConfig) -> int:
    return max(1, math.ceil(sbm.nuisance_features / _COLUMNS_PER_FACTOR))


def load_sbm(data: DataConfig) -> RawGraph:
    """Blocks of equal size; node ids are shuffled, so an id reveals neither block nor degree."""
    sbm = data.sbm
    n, blocks = sbm.num_nodes, sbm.num_blocks
    keys = keyed.bits(keyed.stream(sbm.seed, "sbm", _PERMUTE), torch.arange(n))
    order = torch.argsort(keys, stable=True).numpy().astype(index_dtype(n))
    del keys
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
    edges, features = (lambda: _sbm_edges(sbm, order)), (lambda: _sbm_features(sbm, labels))
    notes = {"planted": columns}
    return RawGraph(n, edges, features, labels, notes=notes, are_dense=True)


def _counts(rng: np.random.Generator, topic: Array, habit: Array) -> Array:
    """Word counts, float32 [posts, words]."""
    common = rng.permutation(1 / np.arange(1, WORDS + 1))
    preferred = rng.gamma(_CONCENTRATION, size=(TOPICS + HABITS, WORDS))
    sources = np.vstack([common, preferred])
    upto = np.cumsum(sources / sources.sum(1, keepdims=True), axis=1)
    draw = rng.random((POSTS, _LENGTH))
    others = np.where(draw < _TOPIC_SHARE + _HABIT_SHARE, 1 + TOPICS + habit[:, None], 0)
    source = np.where(draw < _TOPIC_SHARE, 1 + topic[:, None], others)
    # One sorted axis for all sources: source s covers (s, s + 1].
    axis = (upto + np.arange(len(upto))[:, None]).ravel()
    at = np.searchsorted(axis, source + rng.random(source.shape))
    word = np.minimum(at - source * WORDS, WORDS - 1)
    cell = np.arange(POSTS)[:, None] * WORDS + word
    counts = np.bincount(cell.ravel(), minlength=POSTS * WORDS).reshape(POSTS, WORDS)
    return counts.astype(np.float32)


def _answers(rng: np.random.Generator, topic: Array) -> tuple[Array, Array]:
    """Each post answers `ANSWERS` others: source and destination [posts * answers]."""
    source = np.repeat(np.arange(POSTS), ANSWERS)
    by_topic = np.argsort(topic, kind="stable")
    size = np.bincount(topic, minlength=TOPICS)
    first = np.cumsum(size) - size
    own = topic[source]
    inside = by_topic[first[own] + (rng.random(len(source)) * size[own]).astype(np.int64)]
    anywhere = rng.integers(POSTS, size=len(source))
    return source, np.where(rng.random(len(source)) < _SAME_TOPIC, inside, anywhere)


def load_forum(data: DataConfig) -> RawGraph:
    """One fixed graph: the generator takes no settings."""
    rng = _generator(keyed.stream(0, "forum"))
    topic, habit = rng.integers(TOPICS, size=POSTS), rng.integers(HABITS, size=POSTS)
    x = _counts(rng, topic, habit)
    source, destination = _answers(rng, topic)
    notes = {"origin": "generated: words of posts, answers between them"}
    return in_memory(source, destination, x, topic, notes=notes)


def load_digits_graph(data: DataConfig) -> RawGraph:
    """scikit-learn's 1,797 handwritten digits joined to their ten nearest neighbours: 8×8 pixels
    scaled to [0, 1]; an edge where either end is among the other's ten nearest by Euclidean
    distance.
    """
    from sklearn.datasets import load_digits
    from sklearn.neighbors import kneighbors_graph

    pixels, labels = load_digits(return_X_y=True)
    x = pixels / 16.0
    # Exact search on one thread: ties and summation order are the same everywhere.
    near = kneighbors_graph(x, NEIGHBOURS, include_self=False, n_jobs=1).tocoo()
    notes = {"origin": "sklearn.datasets.load_digits, symmetric 10-nearest-neighbour graph"}
    return in_memory(near.row, near.col, x, labels, notes=notes)


LOADERS = {"digits": load_digits_graph, "forum": load_forum, "sbm": load_sbm}
SOURCES = {name: Source(load) for name, load in LOADERS.items()}
