"""Does it pay to give each rank the seeds of a batch that are near each other? Nodes and messages
that a rank samples, by the order in which the same global batch is cut into equal slices.

    python benchmarks/locality.py [data.name=... key=value ...] [--ranks 2 4] [--steps 5]

`keyed`: as it is drawn. `ids`: by the smaller end of each pair. `community`: by groups found by
label propagation on the whole graph (twenty rounds), then by ids. `share` is the mean over ranks of
what a rank samples, as a share of what one process samples for the whole batch; 1 / ranks is the
best that any order can reach. Two views, as the default objective has them: the first with
negatives, whose ends are anywhere in the graph, the second with positives alone.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import replace

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from numpy.typing import NDArray

from cimage_dist.config_loading import load_config
from cimage_dist.data.ingest import open_graph
from cimage_dist.sampling.loader import BatchSource
from cimage_dist.sampling.seeds import SeedBatch
from cimage_dist.types import Topology

Key = Callable[[SeedBatch], NDArray[np.int64]]
_ROUNDS = 20


def communities(topology: Topology) -> NDArray[np.int64]:
    """int64 [N]: every node takes the most frequent group among its neighbours, half of the nodes
    in each round.
    """
    indices, rows = topology.indices.numpy(), topology.rows().numpy()
    group = np.arange(topology.num_nodes)
    draw = np.random.default_rng(0)
    for _ in range(_ROUNDS):
        pair = np.unique(rows * topology.num_nodes + group[indices], return_counts=True)
        row, best = pair[0] // topology.num_nodes, pair[0] % topology.num_nodes
        order = np.lexsort((draw.random(len(row)), pair[1], row))
        last = np.flatnonzero(np.diff(row[order], append=-1))
        new = group.copy()
        new[row[order][last]] = best[order][last]
        group = np.where(draw.random(len(group)) < 0.5, new, group)
    return group


def ordered(batch: SeedBatch, key: Key | None) -> SeedBatch:
    if key is None:
        return batch
    order = np.argsort(key(batch), kind="stable")
    return replace(batch, u=batch.u[order], v=batch.v[order], weight=batch.weight[order])


def sampled(source: BatchSource, step: int, part: slice, key: Key | None) -> NDArray[np.float64]:
    """(nodes, messages) of both views of a slice of the batch."""
    whole = source.schedule.batch(step)
    pos = ordered(whole, key).part(part.start, part.stop)
    neg = ordered(source.schedule.negatives(step), key).part(part.start, part.stop)
    views = [
        source._view(step, whole, 0, pos.u, pos.v, neg.u, neg.v),
        source._view(step, whole, 1, pos.u, pos.v),
    ]
    return np.array([[v.x.shape[0], v.edges.src.numel()] for v in views], dtype=np.float64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("settings", nargs="*")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    cfg = load_config(overrides=args.settings)
    graph = open_graph(cfg.data)
    topology = graph.topology()
    source = BatchSource.of(topology, cfg, 0, 1, graph.x)
    group = communities(topology)
    total, batch = graph.num_nodes, cfg.sampler.batch_edges
    keys: dict[str, Key | None] = {
        "keyed": None,
        "ids": lambda b: np.minimum(b.u, b.v),
        "community": lambda b: group[b.u] * total + b.u,
    }
    print(f"{graph.name}: {total:,} nodes, {len(np.unique(group)):,} communities")
    print("order      ranks  first view: nodes  messages  second view: nodes  messages")
    for name, key in keys.items():
        for ranks in args.ranks:
            shares = []
            for step in range(args.steps):
                whole = sampled(source, step, slice(0, batch), None)
                cuts = [slice(batch * r // ranks, batch * (r + 1) // ranks) for r in range(ranks)]
                own = np.mean([sampled(source, step, cut, key) for cut in cuts], axis=0)
                shares.append(own / whole)
            found = np.mean(shares, axis=0).ravel()
            numbers = "  ".join(f"{value:.2f}" for value in found)
            print(f"{name:10} {ranks:5}  {numbers}")


if __name__ == "__main__":
    main()
