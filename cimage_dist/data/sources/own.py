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

from pathlib import Path

import numpy as np

from cimage_dist.config import DataConfig
from cimage_dist.data.checks import Array, check_ids
from cimage_dist.data.ids import NodeIds
from cimage_dist.data.sources import npz, tables
from cimage_dist.data.sources.edges import open_edges
from cimage_dist.data.sources.join import in_node_order, join
from cimage_dist.data.sources.raw import RawGraph, Source
from cimage_dist.data.sources.rows import read_features, read_ids_file, read_values
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
            pd.Series(in_node_order(rows, num_nodes, nodes, is_ordered, None), dtype=object)
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
