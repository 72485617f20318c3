"""From a name or a path to an open graph store; the store is built on first use, once, and
committed whole. What it holds and what was done to get there, as facts and as lines to print.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from cimage_dist.config import DataConfig, is_url
from cimage_dist.data.memory import stage
from cimage_dist.data.sources import generated, own, published
from cimage_dist.data.sources.raw import Source
from cimage_dist.data.sparse import CsrFeatures
from cimage_dist.data.store import FORMAT_VERSION, MASKS, Graph, read_manifest
from cimage_dist.data.writing import write_store
from cimage_dist.errors import UNWRITABLE, UserError
from cimage_dist.io import artifacts

_LOG = logging.getLogger("cimage")
_MOST_EDGES = 200_000_000  # beyond this, components are not counted
_SHOWN_CLASSES = 20
_QUANTILES = {"least": 0.0, "quarter": 0.25, "median": 0.5, "three_quarters": 0.75, "most": 1.0}
SOURCES: dict[str, Source] = {**generated.SOURCES, **published.SOURCES}


def open_graph(data: DataConfig | str | Path) -> Graph:
    """A registered name, a store folder, a folder with edges.* files, or a data section: an open
    graph, built if need be.
    """
    if isinstance(data, str | Path):
        data = data_of(data)
    place = store_place(data)
    if data.stage_dir is None and is_url(place):
        raise UserError(
            f"data.path is the URL {place}, and graphs are mapped from a local disk. Set "
            "data.stage_dir to a local folder for its copy."
        )
    if not is_url(place) and not _is_store(Path(place)):
        ingest(data)
        for warning in read_manifest(Path(place))["notes"].get("warnings", []):
            _LOG.warning("%s", warning)
    if data.stage_dir is None:
        return Graph.open(place, data.verify)
    return Graph.open(stage(place, Path(data.stage_dir), _LOG.info, data.verify), "never")


def ingest(data: DataConfig, progress: Callable[[str], None] | None = None) -> tuple[Path, bool]:
    """(path of the store, whether it was built now). A store that is already there and whole is
    left alone.
    """
    progress = progress or (lambda message: None)
    if data.path and is_url(data.path):
        raise UserError(
            f"data.path is the URL {data.path}: a store there is copied when it is used. To "
            "make one, ingest from a local folder and upload the result."
        )
    if data.path and _is_store(Path(data.path)):
        Graph.open(data.path, data.verify)
        return Path(data.path), False
    source, options, path = _source(data), _options(data), store_path(data)
    try:
        with artifacts.locked(path.parent / f".lock-{data.name}"):
            if _is_store(path):
                try:
                    Graph.open(path, data.verify)
                    return path, False
                except UserError as error:
                    _LOG.warning("%s Building it again.", error)
            if os.environ.get("CIMAGE_INGEST") == "never":
                raise UserError(
                    f"The graph {data.name} is not prepared: there is no store {path}. "
                    "Here it must be made before (CIMAGE_INGEST=never), by the job that "
                    "`cimage k8s render ingest` prints with the same config."
                )
            _remove_leftovers(path.parent, data.name)
            progress(f"reading {data.name}")
            raw = source.load(data)
            with artifacts.committed_dir(path) as tmp:
                write_store(raw, data, options, tmp, progress)
    except OSError as error:
        if error.errno in UNWRITABLE:
            raise UserError(
                f"Cannot write the graph store below {path.parent}: {error.strerror} "
                f"({error.filename or path.parent}). "
                "Choose another folder with data.store_dir, or make room."
            ) from None
        raise
    progress(f"committed {path}")
    return path, True


def store_place(data: DataConfig) -> str:
    """Where the store is or will be: data.path where that names one (a URL does), else below
    data.store_dir.
    """
    return (
        data.path
        if data.path and (is_url(data.path) or _is_store(Path(data.path)))
        else str(store_path(data))
    )


def store_path(data: DataConfig) -> Path:
    """`<store_dir>/<name>-<8 hex of everything that decides the content>`."""
    digest = hashlib.blake2b(
        json.dumps(_options(data), sort_keys=True).encode(), digest_size=4
    ).hexdigest()
    return Path(data.store_dir) / f"{data.name}-{digest}"


def _options(data: DataConfig) -> dict[str, Any]:
    """The settings that decide what the store holds; for an own graph also which files, of which
    size and age.
    """
    source = _source(data)
    options: dict[str, Any] = {
        "version": FORMAT_VERSION,
        "source": "own" if data.path else data.name,
        "features": data.features,
        "made_features": data.made_features if data.features in ("hash", "laplacian") else None,
        "feature_dtype": data.feature_dtype,
        "normalize": "none"
        if data.features != "given"
        else source.normalize
        if data.normalize == "source"
        else data.normalize,
    }
    if source.revision:
        options["revision"] = source.revision
    if data.path:
        options |= {
            key: value
            for key, value in {
                "revision": own.revision_of(Path(data.path)),
                "columns": data.columns,
                "header": data.header,
            }.items()
            if value
        }
        options["path"] = str(Path(data.path).resolve())
        options["files"] = [
            [path.name, path.stat().st_size, path.stat().st_mtime_ns]
            for path in own.find_files(Path(data.path)).values()
        ]
    elif data.name == "sbm":
        options["sbm"] = dataclasses.asdict(data.sbm)
    return options


def _source(data: DataConfig) -> Source:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", data.name):
        raise UserError(
            "data.name must be letters, digits, '.', '_' or '-' (it names folders); got "
            f"{data.name!r}."
        )
    if data.path:
        if data.name in SOURCES:
            raise UserError(
                f"data.path is set, but data.name={data.name!r} is a built-in dataset. Give "
                "your graph a name of its own, e.g. data.name=mygraph."
            )
        return own.SOURCE
    if data.name in SOURCES:
        return SOURCES[data.name]
    near = difflib.get_close_matches(data.name.lower(), list(SOURCES), n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise UserError(
        f"Unknown dataset {data.name!r}.{hint} Known: {', '.join(SOURCES)}. For your own graph "
        "set data.path to a folder with edges.* files."
    )


def data_of(text: str | Path) -> DataConfig:
    """The data section for a registered name, a store folder or a folder with edges.* files."""
    path = Path(text)
    if isinstance(text, str) and text in SOURCES:
        return DataConfig(name=text)
    if path.exists():
        if (path / "indptr.npy").is_file():
            read_manifest(path)  # a store, or what is left of one
        stem = (
            re.sub(
                r"[^A-Za-z0-9._-]+",
                "-",
                path.resolve().name if path.is_dir() else path.resolve().parent.name,
            ).strip("-._")
            or "graph"
        )
        return DataConfig(name=f"own-{stem}" if stem in SOURCES else stem, path=str(path))
    if isinstance(text, Path) or "/" in text:
        raise UserError(
            f"{path} does not exist. Give a registered name ({', '.join(SOURCES)}), a graph "
            "store, or a folder with edges.* files."
        )
    _source(DataConfig(name=text))
    raise AssertionError("an unknown name raises")


def _is_store(path: Path) -> bool:
    return (path / artifacts.MANIFEST).is_file()


def _remove_leftovers(folder: Path, name: str) -> None:
    """Temporary folders of killed ingests of this name, whatever their options were."""
    prefix, store = re.escape(artifacts.TMP_PREFIX), rf"{re.escape(name)}-[0-9a-f]{{8}}"
    pattern = re.compile(rf"{prefix}(?:old-)?({store})-[0-9a-f]{{8}}")
    for path in list(folder.iterdir()):
        if match := pattern.fullmatch(path.name):
            artifacts.remove_leftovers(folder, match[1])


def describe(graph: Graph) -> dict[str, Any]:
    """Counts are of the stored graph, `statistics` of what was read; what is not known (a store of
    an older version, a very large graph) is None.
    """
    statistics, notes = graph.manifest.get("statistics", {}), graph.manifest.get("notes", {})
    degrees = np.diff(graph.indptr)
    values = graph.num_nodes * graph.num_features
    nonzeros = statistics.get("feature_nonzeros")
    ids = graph.ids
    return {
        "nodes": graph.num_nodes,
        "edges": graph.num_edges // 2,
        "features": graph.num_features,
        "classes": graph.num_classes,
        "ids": None if ids is None else {"type": str(ids.values.type), "first": _first(ids)},
        "edges_read": statistics.get("edges_read"),
        "self_loops_removed": statistics.get("self_loops_removed"),
        "duplicates_merged": statistics.get("duplicates_merged"),
        "isolated_nodes": int((degrees == 0).sum()),
        **_components(graph),
        "degrees": {
            name: float(np.quantile(degrees, share, method="nearest"))
            for name, share in _QUANTILES.items()
        },
        "feature_density": None if nonzeros is None else nonzeros / values,
        "features_stored": "sparse" if isinstance(graph.x, CsrFeatures) else "dense",
        "class_counts": _class_counts(graph, notes.get("class_names")),
        "unlabelled": None if graph.y is None else int((graph.y < 0).sum()),
        "splits": {
            name: np.asarray(graph.masks[name]).sum(axis=0).tolist()
            for name in MASKS
            if name in graph.masks
        },
        "ignored_columns": notes.get("ignored_columns", {}),
        "weights": notes.get("weights"),
        "warnings": notes.get("warnings", []),
    }


def _first(ids: Any) -> list[Any]:
    found: list[Any] = ids.values[:3].to_pylist()
    return found


def _components(graph: Graph) -> dict[str, Any]:
    if graph.num_edges > _MOST_EDGES:
        return {"components": None, "largest_component": None}
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    n = graph.num_nodes
    ones = np.ones(graph.num_edges, dtype=np.int8)
    matrix = csr_array((ones, graph.indices, graph.indptr), shape=(n, n))
    count, labels = connected_components(matrix, directed=False)
    return {"components": int(count), "largest_component": int(np.bincount(labels).max())}


def _class_counts(graph: Graph, names: list[str] | None) -> dict[str, int] | None:
    if graph.y is None:
        return None
    counts = np.bincount(graph.y[graph.y >= 0], minlength=graph.num_classes).tolist()
    return dict(zip(names or map(str, range(len(counts))), counts, strict=True))


def lines_of(facts: dict[str, Any]) -> list[str]:
    """The facts of `describe` for a person."""
    nodes = facts["nodes"]
    ids = f" (ids such as {', '.join(map(repr, facts['ids']['first']))})" if facts["ids"] else ""
    lines = [
        f"{nodes:,} nodes{ids}, {facts['edges']:,} undirected edges, {facts['features']:,} "
        f"features, {facts['classes']} classes"
    ]
    if facts["edges_read"] is not None:
        lines.append(
            f"edges: {facts['edges_read']:,} rows read, {facts['self_loops_removed']:,} self-loops "
            f"and {facts['duplicates_merged']:,} duplicates dropped (a pair in both directions "
            "counts as one)"
        )
    parts = [f"{facts['isolated_nodes']:,} nodes without an edge"]
    if facts["components"] is not None:
        parts.append(
            f"{facts['components']:,} components, the largest with "
            f"{100 * facts['largest_component'] / nodes:.1f} % of the nodes"
        )
    degrees = ", ".join(
        f"{name.replace('_', ' ')} {value:,.0f}" for name, value in facts["degrees"].items()
    )
    lines += [f"structure: {', '.join(parts)}", f"degrees: {degrees}"]
    if facts["feature_density"] is not None:
        lines.append(
            f"features: {100 * facts['feature_density']:.3g} % of the values are not zero, stored "
            f"{facts['features_stored']}"
        )
    lines.append(f"labels: {_labels(facts)}")
    splits = ", ".join(f"{name} {_counts(count)}" for name, count in facts["splits"].items())
    if facts["class_counts"]:
        lines.append(f"splits: {splits or 'none given, so drawn at random (data.split)'}")
    for name, columns in facts["ignored_columns"].items():
        lines.append(f"columns of {name} that are not used: {', '.join(columns)}")
    if facts["weights"]:
        lines.append(facts["weights"])
    return lines + [f"warning: {text}" for text in facts["warnings"]]


def _counts(count: int | list[int]) -> str:
    if isinstance(count, int):
        return f"{count:,}"
    return f"{min(count):,} to {max(count):,} ({len(count)} splits)"


def _labels(facts: dict[str, Any]) -> str:
    counts = facts["class_counts"]
    if counts is None:
        return "none"
    shown = ", ".join(f"{name} {count:,}" for name, count in list(counts.items())[:_SHOWN_CLASSES])
    more = f", and {len(counts) - _SHOWN_CLASSES} more classes"
    return shown + more * (len(counts) > _SHOWN_CLASSES) + f"; {facts['unlabelled']:,} without"
