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

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cimage_dist.config import DataConfig
from cimage_dist.data.checks import Array, check_ids, check_rows
from cimage_dist.data.ids import NodeIds
from cimage_dist.data.sources import npz, tables
from cimage_dist.data.sources.edges import EdgeFile, both_ends, open_edges, row_numbers
from cimage_dist.data.sources.raw import RawGraph, Source, row_chunks
from cimage_dist.data.sources.rows import NodeRows, read_features, read_ids_file, read_values
from cimage_dist.errors import UserError
from cimage_dist.io import artifacts

KINDS = {
    "edges": (*tables.TEXT, "parquet", "npy", "npz"),
    "features": ("npy", "npz", "parquet", *tables.TEXT),
    "labels": ("npy", "npz", *tables.TEXT, "parquet"),
    "splits": ("npz", "json", *tables.TEXT, "parquet"),
    "ids": (*tables.TEXT, "parquet", "npy"),
}
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
        here = sorted(
            p
            for p in folder.iterdir()
            if p.is_file() and p.name.partition(".")[0] == role and tables.kind_of(p) in kinds
        )
        if role == "edges" and path.is_file():
            here = [path]
        if len(here) > 1:
            raise UserError(
                f"{folder} holds several {role} files: {', '.join(p.name for p in here)}. Keep one."
            )
        if here:
            found[role] = here[0]
    if "edges" not in found:
        raise UserError(
            f"{folder} has no edges file; expected one of "
            f"{', '.join(f'edges.{kind}' for kind in KINDS['edges'])}."
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


def _in_node_order(
    rows: NodeRows, num_nodes: int, nodes: NodeIds | None, is_ordered: bool, missing: Any
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


def _splits(
    path: Path, data: DataConfig, num_nodes: int, nodes: NodeIds | None, is_ordered: bool
) -> dict[str, Array]:
    kind = tables.kind_of(path)
    if kind == "npz":
        with npz.open_npz(path) as archive:
            given = {name: npz.read_member(archive, name, path) for name in archive.files}
    elif kind == "json":
        content = artifacts.read_json(path, "Splits file")
        given = (
            {name: np.asarray(ids) for name, ids in content.items()}
            if isinstance(content, dict)
            else {}
        )
    else:
        import pandas as pd

        rows = read_values(path, "splits", data, num_nodes, nodes)
        words = (
            pd.Series(_in_node_order(rows, num_nodes, nodes, is_ordered, None), dtype=object)
            .fillna("")
            .astype(str)
            .str.strip()
            .str.lower()
        )
        given = {word: (words == word).to_numpy(dtype=bool) for word in words.unique() if word}
        is_ordered = True
    unknown = sorted(set(given) - set(_SPLIT_WORDS))
    if unknown or not given:
        raise UserError(
            f"{path}: splits are named train, val and test; found "
            f"{', '.join(map(repr, unknown)) or 'none'}."
        )
    return {
        _SPLIT_WORDS[name]: _as_mask(
            values, num_nodes, nodes, is_ordered, f"{name} split of {path}"
        )
        for name, values in given.items()
    }


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
    """The nodes are those of the ids file, else of the features' id column, else the rows of the
    features, of an adjacency or of the labels, else the ids that occur in edges and labels.
    """
    assert data.path is not None
    files = find_files(Path(data.path))
    features = read_features(files["features"], data) if "features" in files else None
    nodes: NodeIds | None = None
    if "ids" in files:
        count = None if features is None else features.count
        nodes = NodeIds(read_ids_file(files["ids"], data, count), str(files["ids"]))
    elif features is not None and features.ids is not None:
        nodes = NodeIds(features.ids, str(features.path))
    num_nodes = len(nodes) if nodes is not None else features.count if features else None
    edges = open_edges(files["edges"], data, nodes)
    num_nodes = edges.num_nodes if num_nodes is None else num_nodes
    labels = None
    if "labels" in files:
        labels = read_values(files["labels"], "labels", data, num_nodes, nodes)
        if num_nodes is None and labels.ids is None:
            num_nodes = labels.count
    if num_nodes is None:
        known = [] if labels is None or labels.ids is None else [labels.ids]
        nodes = NodeIds.union([*both_ends(edges), *known])
        num_nodes = len(nodes)
    # Ids 0..N-1 are row numbers: rows are put in that order, and the graph needs no ids.
    order = None if nodes is None or "ids" in files else nodes.order()
    is_ordered = nodes is None or "ids" in files or _is_ascending(order)
    nodes = nodes if order is None else None
    _check_counts(num_nodes, [features, labels], edges)
    if edges.num_nodes is not None and not is_ordered:
        raise UserError(
            f"{edges.path} is a matrix without ids, but {files['features'].name} has ids: which "
            "row is which node is not known. Add an ids file with the id of each row."
        )
    by_name = nodes if edges.num_nodes is None else None
    notes = _notes(edges, [features, labels], nodes)
    classes, masks = None, {}
    if labels is not None:
        classes, names = _labels(_in_node_order(labels, num_nodes, nodes, is_ordered, np.nan))
        if names is not None:
            notes["class_names"] = names
    if "splits" in files:
        masks = _splits(files["splits"], data, num_nodes, nodes, is_ordered)
    return RawGraph(
        num_nodes=num_nodes,
        edges=lambda: ((src, dst) for src, dst, *_ in row_numbers(edges, by_name)),
        features=None if features is None else _in_order(features, nodes, order),
        labels=classes,
        masks=masks,
        ids=nodes,
        weighted_edges=(lambda: row_numbers(edges, by_name)) if edges.has_weights else None,
        files=list(files.values()),
        notes=notes,
        feature_hint=f"no features.* file beside {files['edges'].name}",
    )


def _is_ascending(order: Array | None) -> bool:
    return order is not None and bool((order == np.arange(len(order))).all())


def _check_counts(num_nodes: int, tables: list[NodeRows | None], edges: EdgeFile) -> None:
    """Files without ids have one row per node: they must agree on how many there are."""
    counts = {rows.path.name: rows.count for rows in tables if rows and rows.ids is None}
    if edges.num_nodes is not None:
        counts[edges.path.name] = edges.num_nodes
    if len({num_nodes, *counts.values()}) > 1:
        shown = ", ".join(f"{name} has {count:,}" for name, count in counts.items())
        raise UserError(
            f"{edges.path.parent}: row i belongs to node i, so each of these files needs one row "
            f"per node, but {shown} rows"
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


def _notes(edges: EdgeFile, tables: list[NodeRows | None], nodes: NodeIds | None) -> dict[str, Any]:
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


SOURCE = Source(load)
