"""What it saves to give each rank the seeds of a batch that are near each other: nodes and messages
that a rank samples, by the order in which the same global batch is cut into equal slices.

    python benchmarks/locality.py [data.name=... key=value ...] [--ranks 2 4] [--steps 5]

`keyed`: as it is drawn. `ids`: by the first end of each pair. `community`, as in training: by
groups found by label propagation on the whole graph, then by ids. `share` is the mean over ranks of
what a rank samples, as a share of what one process samples for the whole batch; 1 / ranks is the
best that any order can reach. Two views, as the default objective has them: the first with
negatives, whose ends are anywhere in the graph, the second with positives alone.
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from numpy.typing import NDArray

from cimage_dist.config_loading import load_config
from cimage_dist.data.ingest import open_graph
from cimage_dist.sampling.loader import BatchSource
from cimage_dist.sampling.seeds import communities

Groups = NDArray[np.int64] | None


def sampled(source: BatchSource, step: int, part: slice, group: Groups) -> NDArray[np.float64]:
    """(nodes, messages) of both views of a slice of the batch."""
    whole = source.schedule.batch(step)
    pos = whole.ordered(group).part(part.start, part.stop)
    neg = source.schedule.negatives(step).ordered(group).part(part.start, part.stop)
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
    indptr, indices = topology.indptr.numpy(), topology.indices.numpy()
    communities(indptr[:1], indices[:0])  # compiles
    began = time.process_time()
    group = communities(indptr, indices)
    seconds = time.process_time() - began
    total, batch = graph.num_nodes, cfg.sampler.batch_edges
    orders = {"keyed": None, "ids": np.zeros_like(group), "community": group}
    found = len(np.unique(group))
    print(f"{graph.name}: {total:,} nodes, {found:,} communities in {seconds:.2f} s of CPU time")
    print("order      ranks  first view: nodes  messages  second view: nodes  messages")
    for name, order in orders.items():
        for ranks in args.ranks:
            shares = []
            for step in range(args.steps):
                whole = sampled(source, step, slice(0, batch), None)
                cuts = [slice(batch * r // ranks, batch * (r + 1) // ranks) for r in range(ranks)]
                own = np.mean([sampled(source, step, cut, order) for cut in cuts], axis=0)
                shares.append(own / whole)
            found = np.mean(shares, axis=0).ravel()
            numbers = "  ".join(f"{value:.2f}" for value in found)
            print(f"{name:10} {ranks:5}  {numbers}")


if __name__ == "__main__":
    main()
