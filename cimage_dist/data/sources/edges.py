"""The edge list of an own graph in any of its formats, joined with the rows of its nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cimage_dist.config import DataConfig
from cimage_dist.data.checks import Array, check_ids, check_rows
from cimage_dist.data.ids import NodeIds, read_ids
from cimage_dist.data.sources import tables
from cimage_dist.data.sources.raw import (
    CHUNK_EDGES,
    RawGraph,
    edge_chunks,
    load_sparse,
    open_npz,
    read_member,
    row_chunks,
)
from cimage_dist.errors import UserError

Masks = Callable[[int, NodeIds | None, bool], dict[str, Array]]
_WEIGHTS = ("weight", "weights", "w")


@dataclass
class EdgeFile:
    """`chunks(as_text)` gives sources, targets and, where kept, weights; ids keep their text when
    asked. `num_nodes` is known from an adjacency matrix alone.
    """

    path: Path
    chunks: Callable[[bool], Iterator[list[Any]]]
    has_weights: bool = False
    num_nodes: int | None = None
    ignored: list[str] = field(default_factory=list)

    @property
    def drops_weights(self) -> bool:
        return any(name.lower() in _WEIGHTS for name in self.ignored)


@dataclass
class NodeRows:
    """A file with one row per node. `ids`: those of its id column, None where it has none."""

    path: Path
    count: int
    ids: Any = None
    chunks: Callable[[], Iterator[Array]] | None = None
    values: Array | None = None
    ignored: list[str] = field(default_factory=list)


def open_edges(path: Path, data: DataConfig, nodes: NodeIds | None) -> EdgeFile:
    kind = tables.kind_of(path)
    if kind in (*tables.TEXT, "parquet"):
        return _table(path, data, nodes)
    keep = "weight" in data.columns
    if kind == "npy":
        pairs = tables.load_npy(path)
    else:
        with open_npz(path) as archive:
            if "format" in archive.files:
                return _adjacency(path, keep)
            key = "edge_index" if "edge_index" in archive.files else "edges"
            pairs = read_member(archive, key, path)
    if keep:
        raise UserError(
            f"{path}: data.columns.weight is set, but an array of edges has no weights. Give a "
            "table, or a scipy sparse adjacency."
        )
    if pairs.ndim != 2 or 2 not in pairs.shape:
        is_square = pairs.ndim == 2 and pairs.shape[0] == pairs.shape[1]
        hint = (
            " For an adjacency matrix give edges.npz, written by scipy.sparse.save_npz."
            if is_square
            else ""
        )
        raise UserError(
            f"{path}: edges must be an array [E, 2] or [2, E]; it has shape {pairs.shape}.{hint}"
        )
    src, dst = (pairs[:, 0], pairs[:, 1]) if pairs.shape[1] == 2 else (pairs[0], pairs[1])
    return EdgeFile(path, lambda _: (list(pair) for pair in edge_chunks(src, dst)))


def _adjacency(path: Path, keep: bool) -> EdgeFile:
    matrix = load_sparse(path)
    if matrix.shape[0] != matrix.shape[1]:
        raise UserError(
            f"{path}: an adjacency matrix has as many rows as columns; this one is "
            f"{matrix.shape[0]:,} x {matrix.shape[1]:,}. For other graphs give an edge list."
        )
    entries = matrix.tocoo()
    if entries.data.dtype.kind not in "iufb" or not np.isfinite(entries.data).all():
        raise UserError(
            f"{path}: the entries of an adjacency matrix must be finite numbers. Replace or remove "
            "other values."
        )
    present = entries.data != 0
    columns = [entries.row[present], entries.col[present], *([entries.data[present]] * keep)]

    def chunks(_: bool) -> Iterator[list[Any]]:
        for start in range(0, len(columns[0]), CHUNK_EDGES):
            yield [column[start : start + CHUNK_EDGES] for column in columns]

    is_weighted = bool((columns[0].size and entries.data[present] != 1).any()) and not keep
    ignored = ["weight"] if is_weighted else []
    return EdgeFile(path, chunks, keep, matrix.shape[0], ignored)


def _table(path: Path, data: DataConfig, nodes: NodeIds | None) -> EdgeFile:
    asked = [data.columns[key] for key in ("source", "target", "weight") if key in data.columns]
    known = {name for pair in tables.ENDS for name in pair} | set(_WEIGHTS)
    known |= {name.lower() for name in asked if not name.isdigit()}
    decide = partial(_decide, data=data, nodes=nodes)
    table = tables.open_table(path, "edges", data.header, known, decide)
    ends = _ends(table, data)
    used = [*ends, *(_named(table, data, key) for key in ("weight",) if key in data.columns)]

    def chunks(as_text: bool) -> Iterator[list[Any]]:
        yield from table.chunks(used, CHUNK_EDGES, ids=ends if as_text else ())

    ignored = [
        table.label_of(j) for j in range(table.width) if j not in used and j != table.index()
    ]
    return EdgeFile(path, chunks, len(used) == 3, None, ignored)


def _named(table: tables.Table, data: DataConfig, key: str) -> int:
    found = table.named(data.columns[key])
    if found is None:
        raise UserError(
            f"{table.path} has no column {data.columns[key]!r} (data.columns.{key}). "
            f"{table.describe()}."
        )
    return found


def _ends(table: tables.Table, data: DataConfig) -> list[int]:
    """Positions of the two ends: by data.columns, by usual names, or because there are only two."""
    if "source" in data.columns or "target" in data.columns:
        if absent := {"source", "target"} - set(data.columns):
            raise UserError(
                f"data.columns names one end of an edge only; name the other too: "
                f"data.columns.{absent.pop()}=.... {table.path}: {table.describe()}."
            )
        ends = [_named(table, data, key) for key in ("source", "target")]
        if ends[0] == ends[1]:
            raise UserError(
                f"data.columns.source and data.columns.target name the same column of "
                f"{table.path}, {table.label_of(ends[0])!r}. {table.describe()}."
            )
        return ends
    for pair in tables.ENDS:
        found = [table.find([name]) for name in pair]
        if None not in found:
            return [j for j in found if j is not None]
    columns = [j for j in range(table.width) if j != table.index()]
    if len(columns) == 2:
        return columns
    if len(columns) < 2:
        raise UserError(
            f"{table.path}: an edge needs two columns (source and target node id); found "
            f"{len(columns)}. {table.describe()}."
        )
    names = [table.label_of(j).removeprefix("column ") for j in columns]
    raise UserError(
        f"{table.path} has {len(columns)} columns, and which two are the ends of an edge is not "
        f"known. {table.describe()}. Name them source and target, or say e.g. "
        f"data.columns.source={names[0]} data.columns.target={names[1]}."
    )


def _decide(table: tables.Table, data: DataConfig, nodes: NodeIds | None) -> bool | None:
    """Whether an open first line names the columns. It does not where its cells come again as ids;
    a first line 0,1 changes nothing where that edge comes again.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if table.width != 2 and "source" not in data.columns:
        return False  # an error in any case
    ends = _ends(table, data)
    first = [table.lines[0][j] for j in ends]
    is_numbered = tables.looks_numbered(table.lines[0])
    if nodes is not None and not is_numbered:
        known = nodes.values.cast(pa.large_string())
        return all(pc.index(known, cell).as_py() < 0 for cell in first)
    for number, columns in enumerate(table.chunks(ends, CHUNK_EDGES, ids=ends)):
        a, b = (
            np.asarray(read_ids(column, str(table.path)).cast(pa.large_string()))[number == 0 :]
            for column in columns
        )
        again = np.isin(a, first) | np.isin(b, first)
        if is_numbered:
            one, two = first
            again = ((a == one) & (b == two)) | ((a == two) & (b == one))
        if again.any():
            return False
    return None


def both_ends(edges: EdgeFile) -> Iterator[Any]:
    """All ids of the edge list, for finding out which there are."""
    seen = 0
    for src, dst, *_ in edges.chunks(True):
        for column in (src, dst):
            yield read_ids(column, f"edges in {edges.path}", seen)
        seen += len(src)


def row_numbers(edges: EdgeFile, nodes: NodeIds | None) -> Iterator[tuple[Array, ...]]:
    """Sources, targets and weights; ends as rows of the graph (checked later without `nodes`)."""
    where, seen = f"edges in {edges.path}", 0
    for src, dst, *weight in edges.chunks(nodes is not None):
        ends = [
            np.asarray(column) if nodes is None else nodes.rows_of(column, where, seen)
            for column in (src, dst)
        ]
        seen += len(src)
        yield (*ends, *(np.asarray(column) for column in weight))


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


def _check_counts(num_nodes: int, rows_of_nodes: list[NodeRows | None], edges: EdgeFile) -> None:
    """Files without ids have one row per node: they must agree on how many there are."""
    counts = {str(rows.path): rows.count for rows in rows_of_nodes if rows and rows.ids is None}
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


def _notes(edges: EdgeFile, rows_of_nodes: list[NodeRows | None]) -> dict[str, Any]:
    """What reading did that the files do not show."""
    notes: dict[str, Any] = {}
    ignored = {
        rows.path.name: rows.ignored for rows in [edges, *rows_of_nodes] if rows and rows.ignored
    }
    if ignored:
        notes["ignored_columns"] = ignored
    if edges.drops_weights:
        notes["weights"] = "edge weights are not kept (data.columns.weight keeps them)"
    if edges.has_weights:
        notes["weights"] = "edge weights are kept, but training does not use them"
    return notes
