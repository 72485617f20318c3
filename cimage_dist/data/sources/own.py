"""Your own graph: a folder with edges.* and optionally features.*, labels.*, splits.*, ids.* files.

edges      csv, tsv, txt, parquet: two columns, or more with names (source and target, src and dst,
           u and v, or data.columns); npy [E, 2] or [2, E]; npz: edge_index, or a scipy sparse
           adjacency
features   npy, npz (`x`, or a scipy sparse matrix), parquet, csv, tsv, txt
labels     npy, npz (`y`), csv, tsv, txt, parquet; names are numbered in sorted order
splits     npz or json with train / val / test (masks or node ids), or a table with these words
ids        csv, tsv, txt, parquet, npy: the id of each row of tables that have none

Node ids are integers of 64 bits or text. Tables with an id column are joined by it. Where features
(or else labels) have no ids and there is no ids file, the id of a node is the number of its row.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cimage_dist.config import DataConfig
from cimage_dist.data.checks import Array, check_ids
from cimage_dist.data.ids import NodeIds, alike, read_ids
from cimage_dist.data.sources import tables
from cimage_dist.data.sources.edges import NodeRows, in_node_order, join, open_edges
from cimage_dist.data.sources.raw import (
    CHUNK_EDGES,
    CHUNK_VALUES,
    RawGraph,
    Source,
    load_sparse,
    member_shape,
    open_npz,
    read_member,
    row_chunks,
    stream_rows,
)
from cimage_dist.errors import UserError
from cimage_dist.io import artifacts

KINDS = {
    "edges": (*tables.TEXT, "parquet", "npy", "npz"),
    "features": ("npy", "npz", "parquet", *tables.TEXT),
    "labels": ("npy", "npz", *tables.TEXT, "parquet"),
    "splits": ("npz", "json", *tables.TEXT, "parquet"),
    "ids": (*tables.TEXT, "parquet", "npy"),
}
_SHOWN_FILES = 8
_SPLIT_WORDS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}


def find_files(path: Path) -> dict[str, Path]:
    """Role -> file. A path to a file is the edge list; the other files are looked for beside it."""
    if not path.exists():
        raise UserError(
            f"data.path does not exist: {path}. Give a folder with an edges file, or the edges "
            "file itself."
        )
    folder = path if path.is_dir() else path.parent
    found: dict[str, Path] = {}
    for role, kinds in KINDS.items():
        named = [p for p in folder.iterdir() if p.is_file() and p.name.partition(".")[0] == role]
        here = sorted(p for p in named if tables.kind_of(p) in kinds)
        if role == "edges" and path.is_file():
            here = [path]
        if len(here) > 1:
            raise UserError(
                f"{folder} holds several {role} files: {', '.join(p.name for p in here)}. Keep one."
            )
        if here:
            found[role] = here[0]
        elif named:
            raise UserError(
                f"{named[0]} is of a kind this program does not read; {role} are read from "
                f"{', '.join(f'{role}.{kind}' for kind in kinds)} (text also as .gz)."
            )
    if "edges" not in found:
        others = sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))
        more = "" if len(others) <= _SHOWN_FILES else f" and {len(others) - _SHOWN_FILES} more"
        raise UserError(
            f"{folder} has no edges file; expected one of "
            f"{', '.join(f'edges.{kind}' for kind in KINDS['edges'])}. It holds "
            f"{', '.join(others[:_SHOWN_FILES]) or 'nothing'}{more}; rename the edge list, or give "
            "it as data.path."
        )
    if tables.kind_of(found["edges"]) not in KINDS["edges"]:
        raise UserError(
            f"{found['edges']} is not an edge list this program reads "
            f"({', '.join(KINDS['edges'])})."
        )
    return found


def revision_of(path: Path) -> int:
    """Tables are read otherwise than by earlier versions (ids, headers); arrays are not."""
    kinds = {tables.kind_of(file) for file in find_files(path).values()}
    return 1 if kinds & {*tables.TEXT, "parquet"} else 0


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
        ids = np.asarray(tables.load_npy(path))
        if ids.ndim != 1:
            raise UserError(f"{path} must have one id for each row; it has shape {ids.shape}.")
        return read_ids(ids, str(path))

    def decide(plain: tables.Table) -> bool | None:
        # One line more than rows is a header or a mistake; other numbers are reported later.
        return None if num_nodes is None or num_nodes == plain.num_rows() - 1 else False

    table = tables.open_table(path, "ids", data.header, tables.ID_NAMES, decide)
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
        with open_npz(path) as archive:
            members = archive.files
        if "format" in members and "shape" in members:
            matrix = load_sparse(path)
            return NodeRows(path, matrix.shape[0], chunks=lambda: row_chunks(matrix))
        key = "x" if "x" in members else "features"
        shape = member_shape(path, key)
        return NodeRows(path, shape[0] if shape else 0, chunks=lambda: stream_rows(path, key))
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
        with open_npz(path) as archive:
            key = "labels" if "labels" in archive.files else "y"
            values = read_member(archive, key, path)
        return NodeRows(path, len(values) if values.ndim else 0, values=values)
    names = (data.columns.get(role.removesuffix("s"), ""), *tables.LABEL_NAMES)
    known = {*tables.ID_NAMES, *(name.lower() for name in names if not name.isdigit())} - {""}
    decide = partial(_decide_values, num_nodes=num_nodes, nodes=nodes)
    table = tables.open_table(path, role, data.header, known, decide)
    column = _id_column(table, data)
    asked = data.columns.get(role.removesuffix("s"))
    value = table.find(tables.LABEL_NAMES) if asked is None else table.named(asked)
    if asked is not None and value is None and table.names:
        raise UserError(
            f"{path} has no column {asked!r} (data.columns.{role.removesuffix('s')}). "
            f"{table.describe()}."
        )
    if table.width == 1:
        if column is not None and table.names and table.find(tables.ID_NAMES) == 0:
            raise UserError(
                f"{path} has an id column and no {role.removesuffix('s')}. {table.describe()}."
            )
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
        if tables.is_number(first):
            return None
    found = _ids_of(table, 0, blank=table.width == 1).cast(pa.large_string())
    again = pc.index(found[1:], first).as_py() >= 0
    if table.width == 1:
        return False if again else True if num_nodes is not None else None
    if again:
        return True
    if nodes is not None and not tables.looks_numbered(table.lines[0]):
        return bool(pc.index(nodes.values.cast(pa.large_string()), first).as_py() < 0)
    return False if num_nodes is not None and len(found) == num_nodes else None


def _splits(
    path: Path, data: DataConfig, num_nodes: int, nodes: NodeIds | None, is_ordered: bool
) -> dict[str, Array]:
    kind = tables.kind_of(path)
    if kind == "npz":
        with open_npz(path) as archive:
            given = {name: read_member(archive, name, path) for name in archive.files}
    elif kind == "json":
        content = artifacts.read_json(path, "Splits file")
        content = content if isinstance(content, dict) else {}
        given = {name: np.asarray(ids) for name, ids in content.items()}
    else:
        import pandas as pd

        rows = read_values(path, "splits", data, num_nodes, nodes)
        ordered = in_node_order(rows, num_nodes, nodes, is_ordered, None)
        words = pd.Series(ordered, dtype=object).fillna("").astype(str).str.strip().str.lower()
        given = {word: (words == word).to_numpy(dtype=bool) for word in words.unique() if word}
        is_ordered = True
    unknown = sorted(set(given) - set(_SPLIT_WORDS))
    if unknown or not given:
        raise UserError(
            f"{path}: splits are named train, val and test; found "
            f"{', '.join(map(repr, unknown)) or 'none'}."
        )
    masks, rest = {}, (num_nodes, nodes, is_ordered)
    for name, values in given.items():
        masks[_SPLIT_WORDS[name]] = _as_mask(values, *rest, f"{name} split of {path}")
    for name in ("train", "test"):
        if not masks.get(name, np.zeros(1)).any():
            raise UserError(
                f"{path}: no node is in {name}. Give train and test nodes (val is optional), or "
                "leave the file out and let data.split draw."
            )
    return masks


def _as_mask(
    values: Array, num_nodes: int, nodes: NodeIds | None, is_ordered: bool, where: str
) -> Array:
    """Booleans are a mask, others are node ids."""
    if values.dtype.kind == "b":
        if not is_ordered:
            raise UserError(
                f"{where}: a mask is in node order, but the nodes of this graph have ids. List the "
                "ids instead."
            )
        return values
    mask = np.zeros(num_nodes, dtype=bool)
    if values.size and nodes is not None:
        mask[nodes.rows_of(values.ravel(), where)] = True
    elif values.size:
        ids, _ = check_ids(values.ravel(), values.ravel(), num_nodes, where)
        mask[ids] = True
    return mask


def load(data: DataConfig) -> RawGraph:
    """The graph in the folder data.path."""
    assert data.path is not None
    files = find_files(Path(data.path))
    features = read_features(files["features"], data) if "features" in files else None
    count, given, nodes = None if features is None else features.count, None, None
    if "ids" in files:
        nodes = given = NodeIds(read_ids_file(files["ids"], data, count), str(files["ids"]))
    elif features is not None and features.ids is not None:
        nodes = NodeIds(features.ids, str(features.path))
    count = count if given is None else len(given)
    edges = open_edges(files["edges"], data, nodes)
    count = edges.num_nodes if count is None else count
    labels = (
        read_values(files["labels"], "labels", data, count, nodes) if "labels" in files else None
    )

    def masks(num_nodes: int, nodes: NodeIds | None, is_ordered: bool) -> dict[str, Array]:
        if "splits" not in files:
            return {}
        return _splits(files["splits"], data, num_nodes, nodes, is_ordered)

    raw = join(edges, features, labels, given, masks)
    raw.files = list(files.values())
    raw.feature_hint = f"no features.* file beside {files['edges'].name}"
    return raw


SOURCE = Source(load)
