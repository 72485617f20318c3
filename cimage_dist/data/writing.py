"""A raw graph -> the files of a store, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cimage_dist import __version__
from cimage_dist.config import DataConfig
from cimage_dist.data.build import CscBuilder, NpyWriter, edge_weights
from cimage_dist.data.checks import (
    Array,
    FeatureScale,
    check_features,
    check_rows,
    clean_labels,
    clean_masks,
    divided,
    with_divisor,
)
from cimage_dist.data.moments import (
    FULL_WIDTH,
    SAMPLED_ROWS,
    MomentAccumulator,
    make_features,
    moments_of,
)
from cimage_dist.data.sources.raw import RawGraph
from cimage_dist.data.sparse import CsrFeatures, FeatureWriter, write_sparse
from cimage_dist.data.store import (
    FORMAT,
    FORMAT_VERSION,
    MOMENT_FILES,
    SPARSE_VERSION,
    count_classes,
)
from cimage_dist.errors import UserError
from cimage_dist.io import artifacts
from cimage_dist.types import FeatureMoments

Progress = Callable[[str], None]
_MOMENT_SHARE = 0.25  # of the size of sparse features, up to which moments are stored beside them


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
    names, warnings = _write_labels(raw, where, out)
    statistics = _write_edges(raw, where, out, progress)
    progress("writing features")
    indptr, indices = (
        np.load(out / "indptr.npy", mmap_mode="r"),
        np.load(out / "indices.npy", mmap_mode="r"),
    )
    if data.path and raw.ids is None and indptr[1] == 0:
        warnings.append(
            f"{where}: node 0 has no edge. If ids count from 1, give the features an id column, or "
            "subtract 1."
        )
    given = raw.features if data.features == "given" else None
    chunks = given() if given else make_features(data.features, data.made_features, indptr, indices)
    written = _write_features(
        chunks,
        raw.num_nodes,
        options["normalize"],
        np.dtype(data.feature_dtype),
        f"features of {where}",
        out,
        given is not None and not raw.are_dense,
    )
    warnings += written.scale.finish(f"features of {where}", data.feature_dtype)
    statistics["feature_nonzeros"] = int(written.scale.nonzeros.sum())
    names += ["indptr.npy", "indices.npy", *written.names]
    if raw.ids is not None:
        names += raw.ids.write(out)
    if raw.weighted_edges is not None:
        progress("adding edge weights")
        weights = edge_weights(indptr, indices, raw.weighted_edges(), f"weights of {where}")
        np.save(out / "edge_weight.npy", weights)
        names.append("edge_weight.npy")
    progress("writing manifest")
    classes = count_classes(np.load(out / "y.npy", mmap_mode="r")) if "y.npy" in names else 0
    manifest = {
        "format": FORMAT,
        "version": FORMAT_VERSION if "x.npy" in names else SPARSE_VERSION,
        "name": data.name,
        "counts": {
            "nodes": raw.num_nodes,
            "edges": len(indices),
            "features": written.width,
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
        "notes": raw.notes | ({"warnings": warnings} if warnings else {}),
    }
    if written.dense_digest is not None:
        manifest["dense_x"] = written.dense_digest
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


def _write_labels(raw: RawGraph, where: str, out: Path) -> tuple[list[str], list[str]]:
    """(files, warnings)."""
    names, warnings = [], []
    if raw.labels is not None:
        y = clean_labels(raw.labels, raw.num_nodes, f"labels of {where}")
        np.save(out / "y.npy", y)
        names.append("y.npy")
        warnings = _label_warnings(y, raw.notes.get("class_names"), f"labels of {where}")
    for name, mask in clean_masks(raw.masks, raw.num_nodes, f"splits of {where}").items():
        np.save(out / f"mask_{name}.npy", mask)
        names.append(f"mask_{name}.npy")
    return names, warnings


def _label_warnings(y: Array, names: list[str] | None, where: str) -> list[str]:
    classes = np.unique(y[y >= 0])
    if len(classes) == 0:
        return [f"{where}: no node has a label, so there is no score by labels."]
    if len(classes) == 1:
        name = repr(names[classes[0]]) if names else int(classes[0])
        return [f"{where}: there is one class only ({name}), so scores by labels say nothing."]
    if len(classes) == int((y >= 0).sum()) > 2:
        return [
            f"{where}: each of the {len(classes):,} labelled nodes has a class of its own, so "
            "scores by labels say nothing. Is this column an id?"
        ]
    return []


class _Written(NamedTuple):
    """What became of the features; `dense_digest`: the checksum of x.npy, had sparse ones one."""

    names: list[str]
    width: int
    scale: FeatureScale
    dense_digest: str | None


def _write_features(
    chunks: Iterator[Array],
    num_nodes: int,
    normalize: str,
    dtype: np.dtype[Any],
    where: str,
    out: Path,
    may_be_sparse: bool,
) -> _Written:
    moments: MomentAccumulator | None = None

    def add(rows: Array) -> None:
        nonlocal moments
        moments = moments or MomentAccumulator(num_nodes, rows.shape[1])
        moments.add(rows)

    def open_writer(width: int) -> FeatureWriter:
        return FeatureWriter(
            (num_nodes, width),
            dtype,
            lambda name, kind, shape: NpyWriter(out / f"{name}.npy", kind, shape),
            add,
            may_be_sparse,
        )

    writer, scale = feed_features(chunks, num_nodes, normalize, where, open_writer)
    found, width = writer.finish(), writer.shape[1]
    if not isinstance(found, CsrFeatures):
        assert moments is not None
        return _Written(["x.npy", *_write_moments(moments.finish(), out)], width, scale, None)
    names = write_sparse(found, out)
    # Computed again from sparse rows in little time, unless there are very many of these.
    size = 4 * width * (width if width <= FULL_WIDTH else min(SAMPLED_ROWS, num_nodes))
    if size <= _MOMENT_SHARE * sum((out / name).stat().st_size for name in names):
        names += _write_moments(moments_of(found), out)
    return _Written(names, width, scale, writer.dense_digest())


def feed_features(
    chunks: Iterator[Array],
    num_nodes: int,
    normalize: str,
    where: str,
    open_writer: Callable[[int], FeatureWriter],
) -> tuple[FeatureWriter, FeatureScale]:
    """Check all rows, normalise them and write them to `open_writer(number of columns)`."""
    scale, writer = FeatureScale(0), None
    try:
        for given in chunks:
            if given.ndim != 2 or given.shape[1] == 0 or given.dtype.kind not in "iufb":
                raise UserError(
                    f"{where} must be a table of numbers with one row per node; got "
                    f"{given.dtype} of shape {given.shape}."
                )
            if writer is None:
                writer = open_writer(given.shape[1])
                scale = FeatureScale(given.shape[1])
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
                kept, divisor = with_divisor(given, normalize)
                stored = divided(kept, divisor).astype(writer.dtype)
            check_features(given, stored, writer.rows, where)
            writer.write(stored, stored if divisor is None else kept, divisor)
            scale.add(given, stored)
        check_rows(writer.rows if writer else 0, num_nodes, "features", where)
    except BaseException:
        if writer is not None:
            writer.close()
        raise
    assert writer is not None
    return writer, scale


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
