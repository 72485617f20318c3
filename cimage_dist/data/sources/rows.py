"""Files with one row per node: features, labels, splits, ids. Rows are in node order, or have ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cimage_dist.config import DataConfig
from cimage_dist.data.checks import Array
from cimage_dist.data.ids import NodeIds, alike, read_ids
from cimage_dist.data.sources import headers, npz, tables
from cimage_dist.data.sources.raw import CHUNK_EDGES, CHUNK_VALUES, row_chunks
from cimage_dist.errors import UserError


@dataclass
class NodeRows:
    """A file with one row per node. `ids`: those of its id column, None where it has none."""

    path: Path
    count: int
    ids: Any = None
    chunks: Callable[[], Iterator[Array]] | None = None
    values: Array | None = None
    ignored: list[str] = field(default_factory=list)


def _id_column(table: tables.Table, data: DataConfig) -> int | None:
    asked = data.columns.get("id")
    found = None if asked is None or table.width < 2 else table.named(asked)
    found = table.find(tables.ID_NAMES) if found is None else found
    return table.index() if found is None else found


def _ids_of(table: tables.Table, column: int, blank: bool = False) -> Any:
    import pyarrow as pa

    parts, seen = [], 0
    for (values,) in table.chunks([column], CHUNK_EDGES, ids=[column], blank=blank):
        parts.append(read_ids(values, str(table.path), seen))
        seen += len(values)
    return pa.concat_arrays(alike(parts)) if parts else pa.array([], pa.int64())


def read_ids_file(path: Path, data: DataConfig, num_nodes: int | None) -> Any:
    """The id of each row, an arrow array: the id column, or the only one."""
    if tables.kind_of(path) == "npy":
        return read_ids(np.asarray(tables.load_npy(path)), str(path))
    table = tables.open_table(
        path,
        "ids",
        data.header,
        tables.ID_NAMES,
        lambda plain: False if num_nodes == plain.num_rows() else None,
    )
    column = 0 if table.width == 1 else _id_column(table, data)
    if column is None:
        raise UserError(f"{path} must have one column, the id of each row. {table.describe()}.")
    return _ids_of(table, column)


def read_features(path: Path, data: DataConfig) -> NodeRows:
    kind = tables.kind_of(path)
    if kind == "npy":
        count, chunks = tables.npy_matrix(path)
        return NodeRows(path, count, chunks=chunks)
    if kind == "npz":
        with npz.open_npz(path) as archive:
            members = archive.files
        if "format" in members and "shape" in members:
            matrix = npz.load_sparse(path)
            return NodeRows(path, matrix.shape[0], chunks=lambda: row_chunks(matrix))
        key = "x" if "x" in members else "features"
        shape = npz.member_shape(path, key)
        return NodeRows(path, shape[0] if shape else 0, chunks=lambda: npz.stream_rows(path, key))
    asked = {data.columns["id"].lower()} if "id" in data.columns else set()
    known = {*tables.ID_NAMES, *tables.LABEL_NAMES, *(asked - set("0123456789"))}
    table = tables.open_table(path, "features", data.header, known)
    column = _id_column(table, data)
    label = table.find(tables.LABEL_NAMES)
    if label is not None:
        raise UserError(
            f"{path}: the column {table.label_of(label)!r} looks like labels, which training must "
            "not see. Move it with the ids to labels.csv (splits.csv), or rename it to keep it as "
            "a feature."
        )
    if "id" in data.columns and column is None and table.names:
        raise UserError(
            f"{path} has no column {data.columns['id']!r} (data.columns.id). {table.describe()}."
        )
    used = [j for j in range(table.width) if j != column]
    if not used:
        raise UserError(f"{path} has an id column and no features. {table.describe()}.")
    ids = None if column is None else _ids_of(table, column)
    step = max(1, CHUNK_VALUES // table.width)

    def rows() -> Iterator[Array]:
        for columns in table.chunks(used, step):
            yield tables.numbers(columns, table, used)

    return NodeRows(path, table.num_rows() if ids is None else len(ids), ids, rows)


def read_values(
    path: Path, role: str, data: DataConfig, num_nodes: int | None, nodes: NodeIds | None
) -> NodeRows:
    """A value per node, in node order or with an id column."""
    import pandas as pd

    if tables.kind_of(path) == "npy":
        values = np.asarray(tables.load_npy(path))
        return NodeRows(path, len(values) if values.ndim else 0, values=values)
    if tables.kind_of(path) == "npz":
        with npz.open_npz(path) as archive:
            key = "labels" if "labels" in archive.files else "y"
            values = npz.read_member(archive, key, path)
        return NodeRows(path, len(values) if values.ndim else 0, values=values)
    names = (data.columns.get(role.removesuffix("s"), ""), *tables.LABEL_NAMES)
    table = tables.open_table(
        path,
        role,
        data.header,
        {*tables.ID_NAMES, *(name.lower() for name in names if not name.isdigit())} - {""},
        lambda plain: _decide_values(plain, num_nodes, nodes),
    )
    column = _id_column(table, data)
    asked = data.columns.get(role.removesuffix("s"))
    value = table.find(tables.LABEL_NAMES) if asked is None else table.named(asked)
    if asked is not None and value is None and table.names:
        raise UserError(
            f"{path} has no column {asked!r} (data.columns.{role.removesuffix('s')}). "
            f"{table.describe()}."
        )
    if table.width == 1:
        column, value = None, 0
    elif table.width == 2:
        column = (0 if value != 0 else 1) if column is None else column
        value = 1 - column
    if value is None or (column is None and table.width > 2):
        raise UserError(
            f"{path} must have one column (a value per node, in node order), two (node id, value) "
            f"or names for them (id, {role.removesuffix('s')}); it has {table.width}. "
            f"{table.describe()}. Name them, or say data.columns.id=... and "
            f"data.columns.{role.removesuffix('s')}=...."
        )
    ids = None if column is None else _ids_of(table, column)
    parts = [
        pd.Series(part.to_pandas() if hasattr(part, "null_count") else part)
        for (part,) in table.chunks([value], CHUNK_EDGES, blank=column is None)
    ]
    values = pd.concat(parts).to_numpy() if parts else np.zeros(0)
    ignored = [table.label_of(j) for j in range(table.width) if j not in (column, value)]
    return NodeRows(path, len(values), ids, values=values, ignored=ignored)


def _decide_values(
    table: tables.Table, num_nodes: int | None, nodes: NodeIds | None
) -> bool | None:
    """Whether an open first line names the columns: by the number of nodes, by an id that may come
    once only, or by a class that comes again.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    first = table.lines[0][0]
    if table.width == 1:
        # One row too many is a header or a mistake; other numbers are reported as such later.
        if num_nodes is not None and table.num_rows(blank=True) != num_nodes + 1:
            return False
        if headers.is_number(first):
            return None
    found = _ids_of(table, 0, blank=table.width == 1).cast(pa.large_string())
    again = pc.index(found[1:], first).as_py() >= 0
    if table.width == 1:
        return False if again else True if num_nodes is not None else None
    if again:
        return True
    if nodes is not None and not headers.looks_numbered(table.lines[0]):
        return bool(pc.index(nodes.values.cast(pa.large_string()), first).as_py() < 0)
    return False if num_nodes is not None and len(found) == num_nodes else None
