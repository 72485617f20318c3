"""Graphs from elsewhere than the folder of their store.

In memory, from what Python programs hold: arrays, tensors, scipy, pandas, networkx, PyG. All of it
becomes the same edges and rows that files become, and is joined and checked like them.

Staged, a machine's own copy of a store: from a shared folder or object storage into a local cache,
once for all processes of the machine.

<cache>/<fingerprint>/             the store, committed whole
<cache>/.tmp-<fingerprint>/        a copy under way; the next process continues with what a killed
one left <cache>/.lock-<fingerprint>
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, Literal

import numpy as np

from cimage_dist.data.build import csc_in_memory
from cimage_dist.data.checks import Array, clean_labels, clean_masks
from cimage_dist.data.ids import NodeIds, read_ids
from cimage_dist.data.moments import make_features
from cimage_dist.data.sources import tables
from cimage_dist.data.sources.edges import EdgeFile, NodeRows, join
from cimage_dist.data.sources.raw import RawGraph, edge_chunks, row_chunks
from cimage_dist.data.sparse import Collected, CsrFeatures, FeatureWriter
from cimage_dist.data.store import Graph, check_manifest, fingerprint_of, should_verify
from cimage_dist.data.writing import feed_features
from cimage_dist.errors import UNWRITABLE, UserError
from cimage_dist.io import artifacts
from cimage_dist.io.storage import open_storage

_ADVICE = (
    "Give an edge index [2, E] or [E, 2], a scipy sparse adjacency, a networkx graph, or a pandas "
    "frame with the columns source and target."
)
_BLOCK = 1 << 22
_MAKE_AGAIN = "Make it again with `cimage ingest` and copy the whole folder to its place."


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


def stage(
    source: str,
    cache: Path,
    note: Callable[[str], None] = lambda text: None,
    verify: Literal["auto", "always", "never"] = "auto",
) -> Path:
    """The folder of the local copy of the store at `source`, a path or a URL that fsspec or pyarrow
    can read.

    Every file is compared with the manifest's checksum while it is copied; `verify` says how a
    copy that is there already is looked at, as in Graph.open. Files of a broken-off or damaged copy
    that are right stay; a file copied in part is continued.
    """
    storage, folder = open_storage(source)
    manifest_bytes, manifest = _read_manifest(storage, folder, source)
    files = manifest["files"]
    final = cache / fingerprint_of(manifest)
    partial = cache / f"{artifacts.TMP_PREFIX}{final.name}"
    try:
        with artifacts.locked(
            cache / f".lock-{final.name}",
            lambda: note(f"another process is copying {source}; waiting for it"),
        ):
            if final.is_dir():
                damage = _why_unusable(final, files, should_verify(files, verify))
                if damage is None:
                    return final
                note(f"{damage}; what is wrong is copied again")
                shutil.rmtree(partial, ignore_errors=True)
                final.rename(partial)
            _copy(storage, folder, source, files, partial, note)
            artifacts.write_bytes(partial / artifacts.MANIFEST, manifest_bytes)
            artifacts.replace_dir(partial, final)
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        raise UserError(
            f"Cannot copy graph store {source} to {cache}: {error.strerror} "
            f"({error.filename or cache}). "
            "Make room or get access there, or choose another data.stage_dir; what is copied is "
            "kept."
        ) from None
    return final


def _read_manifest(storage: Any, folder: str, source: str) -> tuple[bytes, dict[str, Any]]:
    try:
        content: bytes = storage.cat_file(f"{folder}/{artifacts.MANIFEST}")
        manifest = json.loads(content)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"No graph store at {source}: it has no {artifacts.MANIFEST}. {_MAKE_AGAIN}"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(
            f"Graph store {source} is damaged: its {artifacts.MANIFEST} is not valid JSON "
            f"({error}). {_MAKE_AGAIN}"
        ) from None
    # every kind of storage has exceptions of its own for a missing bucket, credentials or network
    except Exception as error:
        raise UserError(
            f"Graph store {source} cannot be read ({type(error).__name__}: {error}). Check the "
            "address and this node's access to it."
        ) from error
    check_manifest(manifest, source, _MAKE_AGAIN)
    if strange := [name for name in manifest["files"] if PurePath(name).name != name]:
        raise UserError(
            f"Graph store {source} is damaged: its {artifacts.MANIFEST} names the file "
            f"{strange[0]!r}. {_MAKE_AGAIN}"
        )
    return content, manifest


def _why_unusable(folder: Path, files: dict[str, Any], verify_content: bool) -> str | None:
    try:
        known = json.loads((folder / artifacts.MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{folder / artifacts.MANIFEST} cannot be read ({error})"
    # The fingerprint leaves feature moments out: all nodes must have those of the source, to the
    # bit.
    return (
        f"{folder} is of another build of the store"
        if known != files
        else artifacts.damaged_file(folder, files, verify_content)
    )


def _copy(
    storage: Any,
    folder: str,
    source: str,
    files: dict[str, Any],
    partial: Path,
    note: Callable[[str], None],
) -> None:
    partial.mkdir(exist_ok=True)
    there = {path.name: path.stat().st_size for path in partial.iterdir() if path.name in files}
    missing = sum(
        facts["bytes"] - min(there.get(name, 0), facts["bytes"]) for name, facts in files.items()
    )
    free = shutil.disk_usage(partial).free
    if missing > free:
        raise UserError(
            f"Graph store {source} needs {missing / 1e9:,.2f} GB more below {partial.parent}, "
            f"where {free / 1e9:,.2f} GB are free. Make room, or choose another data.stage_dir."
        )
    note(
        f"copying graph store {source} to {partial.parent}: {missing / 1e9:,.2f} GB"
        + (f" ({sum(there.values()) / 1e9:,.2f} GB are there)" if there else "")
    )
    for name, facts in files.items():
        _fetch(storage, f"{folder}/{name}", partial / name, facts, f"{source}/{name}")


def _fetch(storage: Any, place: str, target: Path, facts: dict[str, Any], shown: str) -> None:
    """Copy one file, from where an earlier copy broke off. A beginning that was not that of this
    file is found by the checksum.
    """
    for is_fresh in (not target.exists(), True):
        if is_fresh or target.stat().st_size > facts["bytes"]:
            target.unlink(missing_ok=True)
        digest = hashlib.blake2b(digest_size=16)
        with target.open("a+b") as local:
            local.seek(0)
            while block := local.read(_BLOCK):
                digest.update(block)
            if local.tell() < facts["bytes"]:
                for block in _blocks(storage, place, local.tell(), shown):
                    digest.update(block)
                    local.write(block)
            local.flush()
            os.fsync(local.fileno())
        if target.stat().st_size == facts["bytes"] and digest.hexdigest() == facts["blake2b"]:
            return
    target.unlink()
    raise UserError(
        f"Graph store file {shown} is damaged: its content does not have the checksum its "
        f"manifest states. {_MAKE_AGAIN}"
    )


def _blocks(storage: Any, place: str, begin: int, shown: str) -> Iterator[bytes]:
    """The file from a position on."""
    try:
        with storage.open(place, "rb") as remote:
            remote.seek(begin)
            while block := remote.read(_BLOCK):
                yield block
    except FileNotFoundError:
        raise UserError(
            f"Graph store file {shown} is missing, though its manifest lists it. {_MAKE_AGAIN}"
        ) from None
    except Exception as error:  # see _read_manifest
        raise UserError(
            f"Copying {shown} broke off ({type(error).__name__}: {error}). What is copied is "
            "kept: start again to continue."
        ) from error
