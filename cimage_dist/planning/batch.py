"""How large one rank's share of a step is: read from the store where that is quick, else bounded by the fan-outs."""

from __future__ import annotations

import math

from cimage_dist.config import Config
from cimage_dist.data.holdout import training_graph
from cimage_dist.data.store import Graph
from cimage_dist.planning.play import SECOND, Rows, hop_rows
from cimage_dist.planning.sizes import GraphSize
from cimage_dist.sampling.loader import BatchSource
from cimage_dist.sampling.masking import most_masked
from cimage_dist.sampling.seeds import rank_slice

_READ_UP_TO_NODES = 5_000_000  # beyond, the pass over all rows that numbers the edges takes minutes


def slices(total: int, world: int) -> tuple[int, int]:
    """Smallest and largest share of `total` items; the last rank has the largest."""
    begin, end = rank_slice(total, world - 1, world)
    return total // world, end - begin


def rows_per_step(cfg: Config, size: GraphSize, edges: int, batches_per_epoch: int) -> tuple[Rows, str]:
    """Rows by kind (as `play.rows_of`) of the rank with the largest share, and how they were found. `edges`: directed edges in training."""
    world = cfg.resources.num_workers
    if not cfg.sampler.fanouts:
        return _full_graph_rows(cfg, size, edges, batches_per_epoch), "the whole graph on every worker"
    share = slices(cfg.sampler.batch_edges, world)[1]
    has_negatives, has_second = cfg.loss.structure_weight > 0, cfg.loss.redundancy_weight > 0
    pairs = (1.0 + has_negatives) * share
    rows: Rows = {"pairs": pairs, "positives": float(share), "endpoints": 2.0 * share}
    if size.store is not None and size.nodes <= _READ_UP_TO_NODES:
        return rows | _sampled_rows(cfg, size), "the first batch, sampled from the store"
    rows |= hop_rows(*neighbourhood(2 * pairs, cfg.sampler.fanouts, size.nodes, edges))
    if has_second:
        rows |= hop_rows(*neighbourhood(2 * share, cfg.sampler.fanouts, size.nodes, edges), SECOND)
    return rows, "a bound: every node has as many neighbours as the fan-out asks for"


def neighbourhood(seeds: float, fanouts: list[int], num_nodes: int, edges: int) -> tuple[list[float], list[float]]:
    """(new nodes of each hop, messages into each hop), of `seeds` drawn nodes, when each has `fanout` neighbours (-1: the mean degree) drawn evenly.

    k draws among N nodes meet N·(1 - exp(-k/N)) different ones. Real neighbours repeat more often, and many nodes have fewer than
    the fan-out: both make real batches smaller. With fan-out -1 hubs make them larger.
    """
    drawn, found = seeds, num_nodes * -math.expm1(-seeds / num_nodes)
    nodes, messages = [found], []
    for fanout in fanouts:
        messages.append(nodes[-1] * (edges / num_nodes if fanout == -1 else fanout))
        drawn += messages[-1]
        reached = num_nodes * -math.expm1(-drawn / num_nodes)
        nodes.append(reached - found)
        found = reached
    return nodes, messages


def _sampled_rows(cfg: Config, size: GraphSize) -> Rows:
    assert size.store is not None
    world, sampler = cfg.resources.num_workers, cfg.sampler
    topology, _ = training_graph(Graph.open(size.store, "never"), cfg.data, cfg.run.seed)
    source = BatchSource(
        topology.indptr.numpy(),
        topology.indices.numpy(),
        fanouts=sampler.fanouts,
        batch_edges=sampler.batch_edges,
        seed=cfg.run.seed,
        rank=world - 1,
        world=world,
        hide_rate=sampler.hide_rate,
        rescale=sampler.rescale,
        backend="csr",
        views=2 if cfg.loss.redundancy_weight > 0 else 1,
        has_negatives=cfg.loss.structure_weight > 0,
    )
    batch = source[0]
    rows = hop_rows(batch.nodes_per_hop, batch.edges_per_hop)
    if batch.second is not None:
        rows |= hop_rows(batch.second.nodes_per_hop, batch.second.edges_per_hop, SECOND)
    return rows


def masked_edges(cfg: Config, num_nodes: int, edges: int) -> int:
    """The most edges that the walks of one mask can hide (§3.1)."""
    return most_masked(cfg.mask, num_nodes, edges)


def _full_graph_rows(cfg: Config, size: GraphSize, edges: int, batches_per_epoch: int) -> Rows:
    world = cfg.resources.num_workers
    positives = slices(masked_edges(cfg, size.nodes, edges) // batches_per_epoch, world)[1]
    rows = {
        "pairs": (1.0 + (cfg.loss.structure_weight > 0)) * positives,
        "positives": float(positives),
        "endpoints": float(slices(size.nodes, world)[1]),
        "nodes": float(size.nodes),
        "messages": float(edges),
        "own messages": float(slices(edges, world)[1]),
    }
    if cfg.loss.redundancy_weight > 0:
        rows[f"messages{SECOND}"] = float(edges)
    return rows
