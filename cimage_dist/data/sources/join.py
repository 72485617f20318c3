"""Edges and the rows of nodes, from files or from memory, joined into one graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from cimage_dist.data.checks import Array, check_ids, check_rows
from cimage_dist.data.ids import NodeIds
from cimage_dist.data.sources.edges import EdgeFile, both_ends, row_numbers
from cimage_dist.data.sources.raw import RawGraph, row_chunks
from cimage_dist.data.sources.rows import NodeRows
from cimage_dist.errors import UserError

Masks = Callable[[int, NodeIds | None, bool], dict[str, Array]]


def join(
    edges: EdgeFile,
    features: NodeRows | None,
    labels: NodeRows | None,
    given: NodeIds | None = None,
    read_masks: Masks = lambda num_nodes, nodes, is_ordered: {},
) -> RawGraph:
    """The nodes are those of the ids `given` for all rows, else of the features' ids, else the rows
    of the features, of an adjacency or of the labels, else the ids that occur in edges and labels.
    """
    nodes, num_nodes = given, None if given is None else len(given)
    if nodes is None and features is not None:
        num_nodes = features.count
        nodes = None if features.ids is None else NodeIds(features.ids, str(features.path))
    num_nodes = edges.num_nodes if num_nodes is None else num_nodes
    if num_nodes is None and labels is not None and labels.ids is None:
        num_nodes = labels.count
    if num_nodes is None:
        known = [] if labels is None else [labels.ids]
        nodes = NodeIds.union([*both_ends(edges), *known])
        num_nodes = len(nodes)
    # Ids 0..N-1 are row numbers: rows are put in that order, and the graph needs no ids.
    order = None if nodes is None or given is not None else nodes.order()
    is_ordered = nodes is None or given is not None or _is_ascending(order)
    nodes = nodes if order is None else None
    _check_counts(num_nodes, [features, labels], edges)
    if edges.num_nodes is not None and nodes is not None and given is None:
        assert features is not None
        raise UserError(
            f"{edges.path} is a matrix without ids, but {features.path.name} has ids: which "
            "row is which node is not known. Add an ids file with the id of each row."
        )
    by_name = nodes if edges.num_nodes is None else None
    notes = _notes(edges, [features, labels])
    classes = None
    if labels is not None:
        classes, names = _labels(in_node_order(labels, num_nodes, nodes, is_ordered))
        if names is not None:
            notes["class_names"] = names
    return RawGraph(
        num_nodes=num_nodes,
        edges=lambda: ((src, dst) for src, dst, *_ in row_numbers(edges, by_name)),
        features=None if features is None else _in_order(features, nodes, order),
        labels=classes,
        masks=read_masks(num_nodes, nodes, is_ordered),
        ids=nodes,
        weighted_edges=(lambda: row_numbers(edges, by_name)) if edges.has_weights else None,
        notes=notes,
    )


def in_node_order(
    rows: NodeRows, num_nodes: int, nodes: NodeIds | None, is_ordered: bool, missing: Any = np.nan
) -> Array:
    """Values in node order; nodes that a table with ids leaves out get `missing`."""
    values = rows.values
    assert values is not None
    if rows.ids is None:
        if not is_ordered and rows.count:
            raise UserError(
                f"{rows.path} has no ids, but the nodes of this graph have. Add an id column, so "
                "that each row finds its node."
            )
        return values
    NodeIds(rows.ids, str(rows.path))
    if nodes is None:
        ids = rows.ids.to_numpy(zero_copy_only=False)
        found, _ = check_ids(ids, ids, num_nodes, f"node ids of {rows.path}")
    else:
        found = nodes.rows_of(rows.ids, str(rows.path))
    out = np.full(
        num_nodes, missing, dtype=object if values.dtype.kind not in "iuf" else np.float64
    )
    out[found] = values
    return out


def _labels(values: Array) -> tuple[Array, list[str] | None]:
    """Labels, and the class names when they were words."""
    import pandas as pd

    if values.dtype.kind in "iufb" or values.ndim != 1:
        return values, None
    words = pd.Series(values, dtype=object)
    codes, names = pd.factorize(words.where(words.isna(), words.astype(str)), sort=True)
    return codes.astype(np.int64), [str(name) for name in names]


def _is_ascending(order: Array | None) -> bool:
    return order is not None and bool((order == np.arange(len(order))).all())


def _check_counts(num_nodes: int, tables: list[NodeRows | None], edges: EdgeFile) -> None:
    """Files without ids have one row per node: they must agree on how many there are."""
    counts = {str(rows.path): rows.count for rows in tables if rows and rows.ids is None}
    if edges.num_nodes is not None:
        counts[str(edges.path)] = edges.num_nodes
    if len({num_nodes, *counts.values()}) > 1:
        shown = ", ".join(f"{name} has {count:,}" for name, count in counts.items())
        raise UserError(
            "Row i belongs to node i, so each of these needs one row per node, but "
            f"{shown} rows"
            + (f" for {num_nodes:,} ids" if num_nodes not in counts.values() else "")
            + ". Add the missing rows, or an id column to say which are there."
        )


def _in_order(
    rows: NodeRows, nodes: NodeIds | None, order: Array | None
) -> Callable[[], Iterator[Array]]:
    """The feature rows in node order; rows in another order pass through memory."""
    chunks = rows.chunks
    assert chunks is not None
    if rows.ids is not None and nodes is not None and rows.ids is not nodes.values:
        NodeIds(rows.ids, str(rows.path))
        found = nodes.rows_of(rows.ids, str(rows.path))
        check_rows(len(found), len(nodes), "features", str(rows.path))
        order = np.argsort(found)
    if order is None or rows.ids is None or _is_ascending(order):
        return chunks
    return lambda: row_chunks(np.concatenate(list(chunks()))[order])


def _notes(edges: EdgeFile, tables: list[NodeRows | None]) -> dict[str, Any]:
    """What reading did that the files do not show."""
    notes: dict[str, Any] = {}
    ignored = {rows.path.name: rows.ignored for rows in [edges, *tables] if rows and rows.ignored}
    if ignored:
        notes["ignored_columns"] = ignored
    if edges.drops_weights:
        notes["weights"] = "edge weights are not kept (data.columns.weight keeps them)"
    if edges.has_weights:
        notes["weights"] = "edge weights are kept, but training does not use them"
    return notes
