"""How large a graph is, without reading it: from its store's manifest, from the settings of a generated graph, or as published."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cimage_dist.config import DataConfig
from cimage_dist.data.ingest import store_path
from cimage_dist.data.staging import is_url
from cimage_dist.data.store import read_manifest
from cimage_dist.errors import UserError
from cimage_dist.io import artifacts

# name -> nodes, directed edges (both directions counted), features, classes. For the two largest the edges are the published number
# doubled: what ingest merges is not known before it has run, so this is an upper bound.
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
_INT32_NODES = 2**31


@dataclass(frozen=True)
class GraphSize:
    """`edges` counts both directions; `store_bytes` is what every machine keeps on disk once, mapped by all its workers."""

    nodes: int
    edges: int
    features: int
    classes: int
    store_bytes: int
    origin: str
    store: Path | None = None


def graph_size(data: DataConfig) -> GraphSize:
    if data.path and is_url(data.path):
        raise UserError(f"data.path is the URL {data.path}; a plan reads sizes from a local disk. Point data.path at a local copy of the store.")
    given = Path(data.path) if data.path else None
    is_store = given is not None and (given / artifacts.MANIFEST).is_file()
    store = given if given is not None and is_store else store_path(data)
    if (store / artifacts.MANIFEST).is_file():
        manifest = read_manifest(store)
        counts = manifest["counts"]
        stored = sum(facts["bytes"] for facts in manifest["files"].values())
        return GraphSize(counts["nodes"], counts["edges"], counts["features"], counts["classes"], stored, f"store {store}", store)
    if given is not None:
        raise UserError(f"data.path={data.path} has not been ingested, so its size is not known. Run `cimage ingest` with the same data settings first.")
    if data.name == "sbm":
        sbm = data.sbm
        edges = 2 * max(1, round(sbm.num_nodes * sbm.avg_degree / 2))
        nodes, features, classes, origin = sbm.num_nodes, sbm.label_features + sbm.nuisance_features, sbm.num_blocks, "data.sbm (at most: repeated edges merge)"
    else:
        nodes, edges, features, classes = PUBLISHED[data.name]
        origin = "published size; no store on disk"
    if data.features != "given":
        features = 2 if data.features == "degree" else data.made_features
    return GraphSize(nodes, edges, features, classes, _store_bytes(nodes, edges, features, data.feature_dtype), origin)


def training_edges(size: GraphSize, data: DataConfig) -> int:
    """Directed edges that training sees: all, or what the link split leaves."""
    if data.holdout_edges == "none":
        return size.edges
    undirected = size.edges // 2
    return 2 * (undirected - round(data.link_val_ratio * undirected) - round(data.link_test_ratio * undirected))


def _store_bytes(nodes: int, edges: int, features: int, dtype: str) -> int:
    """indptr, indices, x, y, three masks, moments: the files that `graph/write.py` makes."""
    index = 4 if nodes < _INT32_NODES else 8
    return 8 * (nodes + 1) + index * edges + nodes * features * np.dtype(dtype).itemsize + 8 * nodes + 3 * nodes + 4 * (features * features + 2 * features)
