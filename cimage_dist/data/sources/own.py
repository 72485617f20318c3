"""Your own graph: a folder with edges.* and optionally features.*, labels.*, splits.* files.

edges     csv, tsv, txt (two columns), parquet, npy ([E, 2] or [2, E]), npz (edge_index, or a scipy
sparse adjacency) features  npy, npz (`x`, or a scipy sparse matrix), parquet, csv, tsv, txt; row i
is node i labels    npy, csv, tsv, txt, parquet; a class per node, or two columns (node id, class);
names are numbered in sorted order splits    npz or json with train / val / test (masks or node
ids), or csv with one of these words per node
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cimage_dist.config import DataConfig
from cimage_dist.data.checks import Array, check_ids
from cimage_dist.data.sources import npz, tables
from cimage_dist.data.sources.raw import RawGraph, Source, edge_chunks, row_chunks
from cimage_dist.errors import UserError
from cimage_dist.io import artifacts

_TEXT = ("csv", "tsv", "txt")
KINDS = {
    "edges": (*_TEXT, "parquet", "npy", "npz"),
    "features": ("npy", "npz", "parquet", *_TEXT),
    "labels": ("npy", *_TEXT, "parquet"),
    "splits": ("npz", "json", *_TEXT, "parquet"),
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


def _edges(path: Path) -> Iterator[tuple[Array, Array]]:
    kind = tables.kind_of(path)
    if kind in _TEXT:
        return tables.text_edges(path)
    if kind == "parquet":
        return tables.parquet_edges(path)
    if kind == "npy":
        pairs = tables.load_npy(path)
    else:
        with npz.open_npz(path) as archive:
            if "indptr" in archive.files:
                adjacency = _sparse(path).tocoo()
                return edge_chunks(adjacency.row, adjacency.col)
            pairs = npz.read_member(
                archive, "edge_index" if "edge_index" in archive.files else "edges", path
            )
    if pairs.ndim != 2 or 2 not in pairs.shape:
        raise UserError(
            f"{path}: edges must be an array [E, 2] or [2, E]; it has shape {pairs.shape}."
        )
    src, dst = (pairs[:, 0], pairs[:, 1]) if pairs.shape[1] == 2 else (pairs[0], pairs[1])
    return edge_chunks(src, dst)


def _sparse(path: Path) -> Any:
    """A scipy sparse matrix in csr form, its indices checked."""
    from scipy.sparse import load_npz

    with npz.readable(path):
        matrix = load_npz(path).tocsr()
        matrix.check_format(full_check=True)
    return matrix


def _features(path: Path) -> tuple[int, Callable[[], Iterator[Array]]]:
    """(rows, chunks) of the feature table."""
    kind = tables.kind_of(path)
    if kind == "npy":
        return tables.npy_matrix(path)
    if kind == "parquet":
        return tables.parquet_matrix(path)
    if kind in _TEXT:
        return tables.text_matrix(path)
    with npz.open_npz(path) as archive:
        members = archive.files
    if "format" in members and "shape" in members:
        matrix = _sparse(path)
        return matrix.shape[0], lambda: row_chunks(matrix)
    key = "x" if "x" in members else "features"
    shape = npz.member_shape(path, key)
    return (shape[0] if shape else 0), lambda: npz.stream_rows(path, key)


def _by_node(path: Path, num_nodes: int, missing: Any) -> Array:
    """Values in node order; nodes that a two-column table leaves out get `missing`."""
    ids, values = tables.read_node_values(path)
    if ids is None:
        return values
    nodes, _ = check_ids(ids, ids, num_nodes, f"node ids of {path}")
    if len(np.unique(nodes)) != len(nodes):
        raise UserError(
            f"{path}: {len(nodes) - len(np.unique(nodes)):,} nodes occur more than once."
        )
    out = np.full(
        num_nodes, missing, dtype=object if values.dtype.kind not in "iuf" else np.float64
    )
    out[nodes] = values
    return out


def _labels(path: Path, num_nodes: int) -> tuple[Array, list[str] | None]:
    """Labels, and the class names when they were words."""
    import pandas as pd

    values = _by_node(path, num_nodes, np.nan)
    if values.dtype.kind in "iufb" or values.ndim != 1:
        return values, None
    words = pd.Series(values, dtype=object)
    codes, names = pd.factorize(words.where(words.isna(), words.astype(str)), sort=True)
    return codes.astype(np.int64), [str(name) for name in names]


def _splits(path: Path, num_nodes: int) -> dict[str, Array]:
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

        words = (
            pd.Series(_by_node(path, num_nodes, None), dtype=object)
            .fillna("")
            .astype(str)
            .str.strip()
            .str.lower()
        )
        given = {word: (words == word).to_numpy(dtype=bool) for word in words.unique() if word}
    unknown = sorted(set(given) - set(_SPLIT_WORDS))
    if unknown or not given:
        raise UserError(
            f"{path}: splits are named train, val and test; found "
            f"{', '.join(map(repr, unknown)) or 'none'}."
        )
    return {
        _SPLIT_WORDS[name]: _as_mask(values, num_nodes, f"{name} split of {path}")
        for name, values in given.items()
    }


def _as_mask(values: Array, num_nodes: int, where: str) -> Array:
    """Booleans are a mask, integers are node ids."""
    if values.dtype.kind == "b":
        return values
    mask = np.zeros(num_nodes, dtype=bool)
    if values.size:
        ids, _ = check_ids(values.ravel(), values.ravel(), num_nodes, where)
        mask[ids] = True
    return mask


def load(data: DataConfig) -> RawGraph:
    """The number of nodes is the number of feature rows, else of labels, else the highest id in the
    edges + 1.
    """
    assert data.path is not None
    files = find_files(Path(data.path))
    features: Callable[[], Iterator[Array]] | None = None
    num_nodes: int | None = None
    if "features" in files:
        num_nodes, features = _features(files["features"])
    elif "labels" in files:
        ids, values = tables.read_node_values(files["labels"])
        num_nodes = len(values) if ids is None else None
    if num_nodes is None:
        num_nodes = 1 + max(
            (int(max(src.max(), dst.max())) for src, dst in _checked(files["edges"]) if len(src)),
            default=-1,
        )
    notes: dict[str, Any] = {}
    labels = None
    if "labels" in files:
        labels, names = _labels(files["labels"], num_nodes)
        if names is not None:
            notes["class_names"] = names
    masks = _splits(files["splits"], num_nodes) if "splits" in files else {}
    return RawGraph(
        num_nodes=num_nodes,
        edges=lambda: _edges(files["edges"]),
        features=features,
        labels=labels,
        masks=masks,
        files=list(files.values()),
        notes=notes,
        feature_hint=f"no features.* file beside {files['edges'].name}",
    )


def _checked(path: Path) -> Iterator[tuple[Array, Array]]:
    """Edges of a graph whose size is not known yet: ids must be integers and not negative."""
    seen = 0
    for src, dst in _edges(path):
        yield check_ids(src, dst, 2**62, f"edges in {path}", seen)
        seen += len(src)


SOURCE = Source(load)
