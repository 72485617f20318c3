"""A graph in memory from what Python programs hold: arrays, tensors, scipy, pandas, networkx, PyG.

All of it becomes the same edges and rows that files become, and is joined and checked like them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cimage_dist.data.build import csc_in_memory
from cimage_dist.data.checks import Array, clean_labels, clean_masks
from cimage_dist.data.ids import NodeIds, read_ids
from cimage_dist.data.moments import make_features
from cimage_dist.data.sources import tables
from cimage_dist.data.sources.edges import EdgeFile, NodeRows, join
from cimage_dist.data.sources.raw import RawGraph, edge_chunks, row_chunks
from cimage_dist.data.sparse import Collected, CsrFeatures, FeatureWriter
from cimage_dist.data.store import Graph
from cimage_dist.data.writing import feed_features
from cimage_dist.errors import UserError

_ADVICE = (
    "Give an edge index [2, E] or [E, 2], a scipy sparse adjacency, a networkx graph, or a pandas "
    "frame with the columns source and target."
)


def graph_of(
    edges: Any,
    x: Any = None,
    y: Any = None,
    masks: Mapping[str, Any] | None = None,
    num_nodes: int | None = None,
    name: str = "data",
    normalize: str = "unit",
    features: str = "degree",
    width: int = 64,
) -> Graph:
    """What `Graph.from_edges` documents."""
    where = f"graph {name!r}"
    ends, nodes = _edges(edges)
    features_given, labels_given = _rows(x), _values(y)
    order = None if nodes is None else nodes.order()
    if order is not None:  # a networkx graph whose nodes are numbers
        tables_given = [rows for rows in (features_given, labels_given) if rows is not None]
        is_sorted = bool((order == np.arange(len(order))).all())
        if not is_sorted and any(rows.ids is None for rows in tables_given):
            raise UserError(
                f"{where}: the nodes are 0..{len(order) - 1:,}, but networkx lists them in another "
                "order, so row i of x or y may be node i or the i-th of graph.nodes. Give frames "
                "with an id column."
            )
        num_nodes, nodes = len(order), None
    if num_nodes is not None:
        ends.num_nodes = num_nodes
    if not any(len(chunk[0]) for chunk in ends.chunks(False)):
        raise UserError(f"{where}: the graph is empty, it has no edges.")
    raw = join(ends, features_given, labels_given, nodes)
    src, dst = (np.concatenate(parts) for parts in zip(*raw.edges(), strict=True))
    indptr, indices, statistics = csc_in_memory(raw.num_nodes, src, dst, f"edges of {where}")
    if indices.size == 0:
        raise UserError(f"{where}: all {len(src):,} edges are self-loops, so no edge is left.")
    about = f"features of {where}"
    rows: Array | CsrFeatures
    if raw.features is None:
        rows = np.concatenate(list(make_features(features, width, indptr, indices)))
    else:
        writer, scale = feed_features(
            raw.features(),
            raw.num_nodes,
            normalize,
            about,
            lambda columns: FeatureWriter((raw.num_nodes, columns), np.float32, Collected),
        )
        rows = writer.finish()
        scale.finish(about, rows.dtype)
    found = None if raw.labels is None else clean_labels(raw.labels, raw.num_nodes, where)
    given_masks = {key: _array(mask) for key, mask in (masks or {}).items() if mask is not None}
    return Graph(
        name,
        indptr,
        indices,
        rows,
        found,
        clean_masks(given_masks, raw.num_nodes, where),
        {"name": name, "statistics": statistics, "notes": raw.notes},
        ids=raw.ids,
    )


def _array(values: Any) -> Array:
    """numpy from an array, a list or a tensor, dense or sparse, on any device."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = values if str(values.layout) == "torch.strided" else values.to_dense()
    return np.asarray(values)


def _edges(edges: Any) -> tuple[EdgeFile, NodeIds | None]:
    """The edges, and the ids of all nodes where the object has them."""
    path = Path("edges")
    if hasattr(edges, "tocoo"):
        if edges.shape[0] != edges.shape[1]:
            raise UserError(
                f"An adjacency matrix has as many rows as columns; got {edges.shape}. {_ADVICE}"
            )
        entries = edges.tocoo()
        present = entries.data != 0
        pairs = [entries.row[present], entries.col[present]]
        return EdgeFile(path, lambda _: iter([pairs]), num_nodes=edges.shape[0]), None
    if hasattr(edges, "nodes") and hasattr(edges, "edges"):
        try:
            nodes = NodeIds(read_ids(list(edges.nodes), "nodes of the networkx graph"))
        except (TypeError, ValueError) as error:  # names of several types, tuples
            raise UserError(
                f"Nodes of a networkx graph must be integers or text ({error}); rename them with "
                "networkx.convert_node_labels_to_integers."
            ) from None
        sources, targets = zip(*edges.edges(), strict=True) if edges.number_of_edges() else ((), ())
        return EdgeFile(path, lambda _: iter([[list(sources), list(targets)]])), nodes
    if hasattr(edges, "columns"):
        names = tuple(map(str, edges.columns))
        table = tables.Table(path, len(names), names, [])
        found = [[table.find([end]) for end in pair] for pair in tables.ENDS]
        known = next((pair for pair in found if None not in pair), None)
        if known is None and len(names) != 2:
            raise UserError(f"Which two columns are the ends of an edge? {names}. {_ADVICE}")
        a, b = known or (0, 1)
        return EdgeFile(path, lambda _: iter([[edges.iloc[:, a], edges.iloc[:, b]]])), None
    array = _array(edges)
    if array.ndim != 2 or 2 not in array.shape:
        raise UserError(f"Edges of shape {array.shape} cannot be read. {_ADVICE}")
    pair = list(array if array.shape[0] == 2 else array.T)
    return EdgeFile(path, lambda _: iter([pair])), None


def _index(table: Any) -> tuple[Any, Any]:
    """(ids, the rest) of a pandas table: an id column, else an index that is not 0, 1, 2, ..."""
    import pandas as pd

    named = [c for c in getattr(table, "columns", ()) if str(c).lower() in tables.ID_NAMES]
    if named:
        return read_ids(table[named[0]], "x"), table.drop(columns=named[0])
    is_plain = isinstance(table.index, pd.RangeIndex) and table.index.equals(
        pd.RangeIndex(len(table))
    )
    return None if is_plain else read_ids(table.index.to_series(), "index"), table


def _rows(x: Any) -> NodeRows | None:
    if x is None:
        return None
    ids = None
    if hasattr(x, "iloc"):
        ids, x = _index(x)
        x = x.to_numpy()
    matrix = x.tocsr() if hasattr(x, "tocsr") else _array(x)
    if matrix.ndim != 2:
        raise UserError(f"x must be [N, F]; got shape {matrix.shape}.")

    def chunks() -> Iterator[Array]:
        return row_chunks(matrix)

    return NodeRows(Path("x"), matrix.shape[0], ids, chunks)


def _values(y: Any) -> NodeRows | None:
    if y is None:
        return None
    ids = None
    if hasattr(y, "iloc"):
        ids, y = _index(y)
        y = y.to_numpy()
        y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    values = _array(y)
    return NodeRows(Path("y"), len(values) if values.ndim else 0, ids, values=values)


def write_graph(graph: Graph, folder: Path) -> Path:
    """A graph in memory as a store, for other processes and for the command line."""
    from cimage_dist.config import DataConfig
    from cimage_dist.data.writing import write_store
    from cimage_dist.io import artifacts

    edges = graph.topology().edge_list()
    once = (edges.src < edges.dst).numpy()
    ends = edges.src.numpy()[once], edges.dst.numpy()[once]
    weight = None if graph.edge_weight is None else graph.edge_weight[once]
    raw = RawGraph(
        graph.num_nodes,
        lambda: edge_chunks(*ends),
        lambda: row_chunks(graph.x),
        graph.y,
        graph.masks,
        notes=graph.manifest.get("notes", {}),
        ids=graph.ids,
        weighted_edges=None if weight is None else lambda: iter([(*ends, weight)]),
    )
    data = DataConfig(name=graph.name, normalize="none", feature_dtype=graph.x.dtype.name)
    with artifacts.committed_dir(folder) as tmp:
        write_store(raw, data, {"normalize": "none"}, tmp, lambda text: None)
    return folder
