"""A raw graph -> the files of a store, chunk by chunk.

From a name or a path to an open graph store; the store is built on first use, once, and committed
whole.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cimage_dist import __version__
from cimage_dist.config import DataConfig
from cimage_dist.data.build import CscBuilder, NpyWriter
from cimage_dist.data.checks import (
    Array,
    check_features,
    check_rows,
    clean_labels,
    clean_masks,
    normalize_rows,
)
from cimage_dist.data.moments import MomentAccumulator, make_features
from cimage_dist.data.sources import own
from cimage_dist.data.sources.raw import RawGraph, Source
from cimage_dist.data.sources.registry import SOURCES
from cimage_dist.data.staging import is_url, stage
from cimage_dist.data.store import (
    FORMAT,
    FORMAT_VERSION,
    MOMENT_FILES,
    Graph,
    count_classes,
    read_manifest,
)
from cimage_dist.errors import UNWRITABLE, UserError
from cimage_dist.io import artifacts
from cimage_dist.types import FeatureMoments

Progress = Callable[[str], None]


def write_store(
    raw: RawGraph, data: DataConfig, options: dict[str, Any], out: Path, progress: Progress
) -> None:
    """Check everything, write all files into the empty folder `out`, the manifest last."""
    where = f"graph {data.name!r}"
    if raw.num_nodes < 1:
        raise UserError(f"{where} is empty: it has no nodes.")
    if raw.features is None and data.features == "given":
        raise UserError(
            f"{where} has no node features ({raw.feature_hint}). Provide them, or choose "
            "features made from the graph: "
            "data.features=degree, data.features=hash or data.features=laplacian (width: "
            "data.made_features)."
        )
    names = _write_labels(raw, where, out)
    statistics = _write_edges(raw, where, out, progress)
    progress("writing features")
    indptr, indices = (
        np.load(out / "indptr.npy", mmap_mode="r"),
        np.load(out / "indices.npy", mmap_mode="r"),
    )
    given = raw.features if data.features == "given" else None
    chunks = given() if given else make_features(data.features, data.made_features, indptr, indices)
    moments = _write_features(
        chunks,
        raw.num_nodes,
        options["normalize"],
        np.dtype(data.feature_dtype),
        f"features of {where}",
        out,
    )
    names += ["indptr.npy", "indices.npy", "x.npy", *_write_moments(moments, out)]
    progress("writing manifest")
    classes = count_classes(np.load(out / "y.npy", mmap_mode="r")) if "y.npy" in names else 0
    manifest = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "name": data.name,
        "counts": {
            "nodes": raw.num_nodes,
            "edges": len(indices),
            "features": len(moments.mean),
            "classes": classes,
        },
        "dtypes": {
            "indptr": "int64",
            "indices": str(indices.dtype),
            "x": data.feature_dtype,
            "y": "int64",
        },
        "files": artifacts.describe_files(out, sorted(names)),
        "provenance": {
            "package": f"cimage_dist {__version__}",
            "options": options,
            "raw_files": _describe_raw(raw.files),
        },
        "statistics": statistics,
        "notes": raw.notes,
    }
    artifacts.write_json(out / artifacts.MANIFEST, manifest)


def _describe_raw(files: list[Path]) -> dict[str, Any]:
    return {
        str(path): {"bytes": path.stat().st_size, "blake2b": artifacts.checksum(path)}
        for path in files
    }


def _write_edges(raw: RawGraph, where: str, out: Path, progress: Progress) -> dict[str, int]:
    builder = CscBuilder(raw.num_nodes, out / "work", where=f"edges of {where}")
    reported = 0
    for src, dst in raw.edges():
        builder.add(src, dst)
        if builder.edges_read >= reported + 5_000_000:
            reported = builder.edges_read
            progress(f"read {reported:,} edges")
    if builder.edges_read == builder.self_loops:
        raise UserError(
            f"{where} is empty: it has {raw.num_nodes:,} nodes but no edge between two "
            f"different nodes ({builder.self_loops:,} self-loops)."
        )
    progress(f"sorting {builder.edges_read:,} edges")
    return builder.finish(out)


def _write_labels(raw: RawGraph, where: str, out: Path) -> list[str]:
    names = []
    if raw.labels is not None:
        np.save(out / "y.npy", clean_labels(raw.labels, raw.num_nodes, f"labels of {where}"))
        names.append("y.npy")
    for name, mask in clean_masks(raw.masks, raw.num_nodes, f"splits of {where}").items():
        np.save(out / f"mask_{name}.npy", mask)
        names.append(f"mask_{name}.npy")
    return names


def _write_features(
    chunks: Iterator[Array],
    num_nodes: int,
    normalize: str,
    dtype: np.dtype[Any],
    where: str,
    out: Path,
) -> FeatureMoments:
    moments: MomentAccumulator | None = None
    writer: NpyWriter | None = None
    try:
        for given in chunks:
            if given.ndim != 2 or given.shape[1] == 0 or given.dtype.kind not in "iufb":
                raise UserError(
                    f"{where} must be a table of numbers with one row per node; got "
                    f"{given.dtype} of shape {given.shape}."
                )
            if writer is None or moments is None:
                writer = NpyWriter(out / "x.npy", dtype, (given.shape[1],))
                moments = MomentAccumulator(num_nodes, given.shape[1])
            if writer.rows + len(given) > num_nodes:
                check_rows(
                    writer.rows + len(given) + sum(len(rest) for rest in chunks),
                    num_nodes,
                    "features",
                    where,
                )
            with np.errstate(
                over="ignore"
            ):  # overflow becomes infinite and is reported below, with its place
                stored = normalize_rows(given, normalize).astype(dtype)
            check_features(given, stored, writer.rows, where)
            writer.write(stored)
            moments.add(stored)
    finally:
        if writer is not None:
            writer.close()
    check_rows(writer.rows if writer else 0, num_nodes, "features", where)
    assert moments is not None
    return moments.finish()


def _write_moments(moments: FeatureMoments, out: Path) -> list[str]:
    """Mean and second moment in float64; the covariance, which is the large one, in float32
    (`FeatureMoments.as_stored`).
    """
    parts = (moments.mean, moments.sqmean, moments.cov, moments.cov_factor)
    names = []
    for name, part, dtype in zip(
        MOMENT_FILES, parts, (np.float64, np.float64, np.float32, np.float32), strict=True
    ):
        if part is not None:
            np.save(out / name, part.numpy().astype(dtype))
            names.append(name)
    return names


_LOG = logging.getLogger("cimage")


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
                f"({error.filename}). "
                "Choose another folder with data.store_dir, or make room."
            ) from None
        raise
    progress(f"committed {path}")
    return path, True


def store_place(data: DataConfig) -> str:
    """Where the store lies or will lie: data.path where that names one (a URL does), else below
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
    pattern = re.compile(
        rf"{re.escape(artifacts.TMP_PREFIX)}(?:old-)?({re.escape(name)}-[0-9a-f]{{8}})-[0-9a-f]{{8}}"
    )
    for path in list(folder.iterdir()):
        if match := pattern.fullmatch(path.name):
            artifacts.remove_leftovers(folder, match[1])
