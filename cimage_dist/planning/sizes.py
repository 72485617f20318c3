"""How large a graph is, without reading it: from its store's manifest, from the settings of a
generated graph, or as published.

How large one rank's share of a step is: read from the store where that is quick, else bounded by
the fan-outs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from cimage_dist.config import Config, DataConfig, is_url
from cimage_dist.data.ingest import store_path
from cimage_dist.data.splits import num_training_edges, training_graph
from cimage_dist.data.store import SPARSE_VERSION, Graph, read_manifest
from cimage_dist.errors import UserError
from cimage_dist.io import artifacts
from cimage_dist.planning.play import SECOND, Rows, hop_rows
from cimage_dist.sampling.hidden import most_masked
from cimage_dist.sampling.loader import BatchSource
from cimage_dist.sampling.seeds import rank_slice

# name -> nodes, directed edges (both directions counted), features, classes. For the two largest
# the edges are the published number doubled: what ingest merges is not known before it has run, so
# this is an upper bound.
PUBLISHED = {
    "digits": (1_797, 24_680, 64, 10),
    "forum": (2_000, 19_884, 2_000, 6),
    "cora": (2_708, 10_556, 1_433, 7),
    "citeseer": (3_327, 9_104, 3_703, 6),
    "pubmed": (19_717, 88_648, 500, 3),
    "photo": (7_650, 238_162, 745, 8),
    "computers": (13_752, 491_722, 767, 10),
    "wikics": (11_701, 431_726, 300, 10),
    "ogbn-arxiv": (169_343, 2_315_598, 128, 40),
    "ogbn-products": (2_449_029, 2 * 61_859_140, 100, 47),
    "ogbn-papers100m": (111_059_956, 2 * 1_615_685_872, 128, 172),
}
# Features that are not zero, of those that ingest stores sparse.
_ENTRIES = {"forum": 66_149, "cora": 49_216, "citeseer": 105_165}
_INT32_NODES = 2**31


@dataclass(frozen=True)
class GraphSize:
    """`edges` counts both directions; `store_bytes` is what every machine keeps on disk once,
    mapped by all its workers. `entries`: non-zero features where they are stored sparse, else None.
    """

    nodes: int
    edges: int
    features: int
    classes: int
    store_bytes: int
    origin: str
    store: Path | None = None
    entries: int | None = None

    @property
    def entries_per_node(self) -> float | None:
        return None if self.entries is None else self.entries / self.nodes


def graph_size(data: DataConfig) -> GraphSize:
    if data.path and is_url(data.path):
        raise UserError(
            f"data.path is the URL {data.path}; a plan reads sizes from a local disk. Point "
            "data.path at a local copy of the store."
        )
    given = Path(data.path) if data.path else None
    is_store = given is not None and (given / artifacts.MANIFEST).is_file()
    store = given if given is not None and is_store else store_path(data)
    if (store / artifacts.MANIFEST).is_file():
        manifest = read_manifest(store)
        counts = {k: manifest["counts"][k] for k in ("nodes", "edges", "features", "classes")}
        stored = sum(facts["bytes"] for facts in manifest["files"].values())
        is_sparse = manifest["version"] == SPARSE_VERSION
        entries = manifest["statistics"]["feature_nonzeros"] if is_sparse else None
        origin = f"store {store}"
        return GraphSize(**counts, store_bytes=stored, origin=origin, store=store, entries=entries)
    if given is not None:
        raise UserError(
            f"data.path={data.path} has not been ingested, so its size is not known. Run "
            "`cimage ingest` with the same data settings first."
        )
    if data.name == "sbm":
        sbm = data.sbm
        edges = 2 * max(1, round(sbm.num_nodes * sbm.avg_degree / 2))
        nodes, classes = sbm.num_nodes, sbm.num_blocks
        features = sbm.label_features + sbm.nuisance_features
        origin = "data.sbm (at most: repeated edges merge)"
    else:
        nodes, edges, features, classes = PUBLISHED[data.name]
        origin = "published size; no store on disk"
    entries = _ENTRIES.get(data.name)
    if data.features != "given":
        entries, features = None, 2 if data.features == "degree" else data.made_features
    stored = _store_bytes(nodes, edges, features, data.feature_dtype, entries)
    return GraphSize(nodes, edges, features, classes, stored, origin, entries=entries)


def training_edges(size: GraphSize, data: DataConfig) -> int:
    """Directed edges that training sees: all, or what the link split leaves."""
    data = data.settled(size.classes > 0, size.edges // 2)
    return num_training_edges(size.edges, data)


def _store_bytes(nodes: int, edges: int, features: int, dtype: str, entries: int | None) -> int:
    """indptr, indices, x, y, three masks, moments: the files that `data/writing.py` makes."""
    index = 4 if nodes < _INT32_NODES else 8
    if entries is None:
        x = nodes * features * np.dtype(dtype).itemsize + 4 * (features * features + 2 * features)
    else:  # pointers, divisors, columns, values; moments are not stored
        x = 12 * nodes + (2 + 4) * entries
    return 8 * (nodes + 1) + index * edges + x + 11 * nodes


_READ_UP_TO_NODES = 5_000_000  # beyond, the pass over all rows that numbers the edges takes minutes


def slices(total: int, world: int) -> tuple[int, int]:
    """Smallest and largest share of `total` items; the last rank has the largest."""
    begin, end = rank_slice(total, world - 1, world)
    return total // world, end - begin


def rows_per_step(
    cfg: Config, size: GraphSize, edges: int, batches_per_epoch: int
) -> tuple[Rows, str]:
    """Rows by kind (as `play.rows_of`) of the rank with the largest share, and how they were found.
    `edges`: directed edges in training.
    """
    world = cfg.resources.num_workers
    if not cfg.sampler.fanouts:
        rows = _full_graph_rows(cfg, size, edges, batches_per_epoch)
        return rows, "the whole graph on every worker"
    share = slices(cfg.sampler.batch_edges, world)[1]
    has_negatives, has_second = cfg.loss.structure_weight > 0, cfg.loss.redundancy_weight > 0
    pairs = (1.0 + has_negatives) * share
    rows = {"pairs": pairs, "positives": float(share), "endpoints": 2.0 * share}
    found_by = "a bound: every node has as many neighbours as the fan-out asks for"
    if size.store is not None and size.nodes <= _READ_UP_TO_NODES:
        rows |= _sampled_rows(cfg, size)
        found_by = "the first batch, sampled from the store"
    else:
        rows |= hop_rows(*neighbourhood(2 * pairs, cfg.sampler.fanouts, size.nodes, edges))
        if has_second:
            ends = neighbourhood(2 * share, cfg.sampler.fanouts, size.nodes, edges)
            rows |= hop_rows(*ends, SECOND)
    if size.entries_per_node is not None:
        for view in ("", SECOND) if has_second else ("",):
            nodes = rows[f"nodes within {len(cfg.sampler.fanouts)}{view}"]
            rows[f"entries{view}"] = nodes * size.entries_per_node
    return rows, found_by


def neighbourhood(
    seeds: float, fanouts: list[int], num_nodes: int, edges: int
) -> tuple[list[float], list[float]]:
    """(new nodes of each hop, messages into each hop), of `seeds` drawn nodes, when each has
    `fanout` neighbours (-1: the mean degree) drawn evenly.

    k draws among N nodes meet N·(1 - exp(-k/N)) different ones. Real neighbours repeat more often,
    and many nodes have fewer than the fan-out: both make real batches smaller. With fan-out -1 hubs
    make them larger.
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
    world = cfg.resources.num_workers
    topology, _ = training_graph(Graph.open(size.store, "never"), cfg.data, cfg.run.seed)
    cfg = replace(cfg, sampler=replace(cfg.sampler, backend="csr"))
    batch = BatchSource.of(topology, cfg, world - 1, world)[0]
    assert batch.hops is not None
    rows = hop_rows(*batch.hops)
    if batch.second is not None and batch.second.hops is not None:
        rows |= hop_rows(*batch.second.hops, SECOND)
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
    if size.entries is not None:
        rows |= {"entries": float(size.entries), f"entries{SECOND}": float(size.entries)}
    if cfg.loss.redundancy_weight > 0:
        rows[f"messages{SECOND}"] = float(edges)
    return rows
