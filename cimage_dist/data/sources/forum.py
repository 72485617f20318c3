"""A generated forum, small enough for a demonstration: posts, the words they use, who answers whom.

A post has a topic, its class, and a habit of its writer, which has nothing to do with the topic.
Each of its words comes from the language all share (ranks by Zipf's law), from its topic or from
its habit; each topic and each habit prefers few words. An answer goes to a post of the same topic
with probability `_SAME_TOPIC`, else to any post. So words alone say little, neighbours agree
rarely, and common words outweigh both: a graph on which averaging alone does not do.
"""

from __future__ import annotations

import numpy as np

from cimage_dist import keyed
from cimage_dist.config import DataConfig
from cimage_dist.data.checks import Array
from cimage_dist.data.sources.raw import RawGraph, Source, edge_chunks, row_chunks

POSTS, ANSWERS, WORDS, TOPICS, HABITS = 2000, 5, 2000, 6, 5
_LENGTH = 40  # words of a post
_TOPIC_SHARE = _HABIT_SHARE = 0.1
_SAME_TOPIC = 0.4
_CONCENTRATION = 0.02  # of the Dirichlet draw of a topic's words: small, so few words


def _counts(rng: np.random.Generator, topic: Array, habit: Array) -> Array:
    """Word counts, float32 [posts, words]."""
    common = rng.permutation(1 / np.arange(1, WORDS + 1))
    preferred = rng.gamma(_CONCENTRATION, size=(TOPICS + HABITS, WORDS))
    sources = np.vstack([common, preferred])
    upto = np.cumsum(sources / sources.sum(1, keepdims=True), axis=1)
    draw = rng.random((POSTS, _LENGTH))
    source = np.where(
        draw < _TOPIC_SHARE,
        1 + topic[:, None],
        np.where(draw < _TOPIC_SHARE + _HABIT_SHARE, 1 + TOPICS + habit[:, None], 0),
    )
    # One sorted axis for all sources: source s covers (s, s + 1].
    at = np.searchsorted(
        (upto + np.arange(len(upto))[:, None]).ravel(), source + rng.random(source.shape)
    )
    word = np.minimum(at - source * WORDS, WORDS - 1)
    cell = np.arange(POSTS)[:, None] * WORDS + word
    return (
        np.bincount(cell.ravel(), minlength=POSTS * WORDS).reshape(POSTS, WORDS).astype(np.float32)
    )


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


def load(data: DataConfig) -> RawGraph:
    """One fixed graph: the generator takes no settings."""
    rng = np.random.Generator(np.random.PCG64(keyed.stream(0, "forum") & ((1 << 64) - 1)))
    topic, habit = rng.integers(TOPICS, size=POSTS), rng.integers(HABITS, size=POSTS)
    x = _counts(rng, topic, habit)
    source, destination = _answers(rng, topic)
    return RawGraph(
        num_nodes=POSTS,
        edges=lambda: edge_chunks(source, destination),
        features=lambda: row_chunks(x),
        labels=topic,
        notes={"origin": "generated: words of posts, answers between them"},
    )


SOURCES = {"forum": Source(load)}
