"""Checks every graph passes before it is stored: one readable error each, with counts and the first
offending rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cimage_dist.errors import UserError

Array = np.ndarray[Any, Any]
_SHOWN = 3
# Squares of values beyond these are not finite, or zero, in float32.
_LARGE, _SMALL = 1e18, 1e-18


def check_ids(
    src: Array, dst: Array, num_nodes: int, where: str = "the edge list", first: int = 0
) -> tuple[Array, Array]:
    """Both ends of each edge as integers in [0, num_nodes). `first` is the number of edges read
    before this chunk.
    """
    src, dst = np.asarray(src), np.asarray(dst)
    if src.ndim != 1 or src.shape != dst.shape:
        raise UserError(
            f"{where}: sources and targets must be two columns of equal length; got shapes "
            f"{src.shape} and {dst.shape}."
        )
    src, dst = _integers(src, where, first), _integers(dst, where, first)
    if src.size == 0:
        return src, dst
    low, high = min(int(src.min()), int(dst.min())), max(int(src.max()), int(dst.max()))
    if low >= 0 and high < num_nodes:
        return src, dst
    seen = f"of the first {first + src.size:,} edges"
    if low < 0:
        bad = np.flatnonzero((src < 0) | (dst < 0))
        raise UserError(
            f"{where}: {bad.size:,} {seen} have a negative node id. First: "
            f"{_show(bad, src, dst, first)}. Node ids count from 0; remove or renumber these rows."
        )
    bad = np.flatnonzero((src >= num_nodes) | (dst >= num_nodes))
    raise UserError(
        f"{where}: {bad.size:,} {seen} name a node outside 0..{num_nodes - 1:,} (the graph has "
        f"{num_nodes:,} nodes; highest id seen {high:,}). "
        f"First: {_show(bad, src, dst, first)}. Node ids count from 0 and must match the rows "
        "of the features or labels; if yours count from 1, subtract 1."
    )


def _show(bad: Array, src: Array, dst: Array, first: int) -> str:
    return ", ".join(f"edge {first + int(i) + 1:,} ({src[i]} -> {dst[i]})" for i in bad[:_SHOWN])


def _integers(ids: Array, where: str, first: int) -> Array:
    if ids.dtype.kind in "iu":
        return ids
    if ids.dtype.kind == "f":
        whole = np.isfinite(ids) & (ids == np.trunc(ids))
        if whole.all():
            return ids.astype(np.int64)
        bad = np.flatnonzero(~whole)
        shown = ", ".join(f"edge {first + int(i) + 1:,} has {ids[i]}" for i in bad[:_SHOWN])
        raise UserError(
            f"{where}: {bad.size:,} node ids are not whole numbers. First: {shown}. Node ids "
            "are integers counted from 0; missing values are not allowed."
        )
    if ids.dtype.kind not in "OUS":
        raise UserError(
            f"{where}: node ids must be integers; got values of type {ids.dtype}. Give one row "
            "for each edge, the ids of its two ends."
        )
    import pandas as pd

    # Integers beyond 64 bits are text or Python objects here, so numbers alone are no proof.
    values = pd.to_numeric(pd.Series(ids), errors="coerce")
    bad = np.flatnonzero(((values != np.trunc(values)) | (values.abs() >= 2**63)).to_numpy())
    bad = bad if bad.size else np.arange(len(ids))
    shown = ", ".join(f"edge {first + int(i) + 1:,} has {ids[i]!r}" for i in bad[:_SHOWN])
    raise UserError(
        f"{where}: {bad.size:,} node ids are not integers from 0 to N-1. First: {shown}. Where "
        "files have no id column, ids are row numbers; for other ids give the features (or labels) "
        "an id column, or add ids.txt with the id of each row."
    )


def check_features(rows: Array, stored: Array, first: int, where: str) -> None:
    """`stored` is `rows` in its storage type and must be finite everywhere. `first` is the node id
    of row 0.
    """
    finite = np.isfinite(stored)
    if finite.all():
        return
    at = np.argwhere(~finite)
    bad_rows = np.unique(at[:, 0]).size
    shown = ", ".join(
        f"row {first + int(i):,} column {int(j):,} = {rows[i, j]}" for i, j in at[:_SHOWN]
    )
    if np.isfinite(rows[~finite].astype(np.float64)).all():
        raise UserError(
            f"{where}: {len(at):,} values in {bad_rows:,} rows are too large for "
            f"{stored.dtype}. First: {shown}. Scale the features"
            + (", or set data.feature_dtype=float32." if stored.dtype == np.float16 else ".")
        )
    raise UserError(
        f"{where}: {len(at):,} values in {bad_rows:,} rows among rows "
        f"0..{first + len(rows) - 1:,} are NaN or infinite. "
        f"First: {shown}. Replace them (e.g. by column means) and try again."
    )


class FeatureScale:
    """Whether features are of a size that training can work with; feed all rows with `add`."""

    def __init__(self, width: int) -> None:
        self.nonzeros = np.zeros(width, dtype=np.int64)
        self.vanished = 0
        self.largest = 0.0
        self.rows = 0
        self.is_constant = True
        self._first: Array | None = None

    def add(self, given: Array, stored: Array) -> None:
        """Rows as given and as stored; both [n, F]."""
        self._first = stored[0].copy() if self._first is None and len(stored) else self._first
        self.is_constant = self.is_constant and bool((stored == self._first).all())
        self.rows += len(stored)
        self.nonzeros += np.count_nonzero(stored, axis=0)
        self.vanished += int(np.count_nonzero(given)) - int(np.count_nonzero(stored))
        self.largest = max(self.largest, float(np.abs(stored).max(initial=0)))

    def finish(self, where: str, dtype: Any) -> list[str]:
        """What to warn of; features without any use are an error."""
        lost = f"{self.vanished:,} values are too small for {dtype} and became zero"
        if self.largest == 0:
            raise UserError(
                f"{where} are all zero{f': {lost}' if self.vanished else ''}, so there is nothing "
                "to learn from. Check the file, or choose features made from the graph: "
                "data.features=degree, hash or laplacian."
            )
        if not _SMALL < self.largest < _LARGE:
            raise UserError(
                f"{where}: the largest value is {self.largest:.3g}, and training multiplies values "
                f"in float32, which {'overflows' if self.largest > 1 else 'gives zero'}. Scale the "
                "features, e.g. by data.normalize=unit."
            )
        empty = np.flatnonzero(self.nonzeros == 0)
        warnings = [f"{where}: {lost}."] if self.vanished > 0 else []
        if self.is_constant and self.rows > 1:
            warnings.append(
                f"{where}: all rows are the same, so they do not distinguish nodes. Check the file "
                "and data.normalize, or choose features made from the graph (data.features)."
            )
        if empty.size:
            shown = ", ".join(str(j) for j in empty[:_SHOWN])
            warnings.append(
                f"{where}: {empty.size:,} of {len(self.nonzeros):,} columns are zero for every "
                f"node (the first: {shown})."
            )
        return warnings


def check_rows(count: int, num_nodes: int, what: str, where: str) -> None:
    if count != num_nodes:
        raise UserError(
            f"{where}: {what} have {count:,} rows, but the graph has {num_nodes:,} nodes. Row i "
            "belongs to node i, so there must be one row per node."
        )


def clean_labels(y: Array, num_nodes: int, where: str) -> Array:
    """int64 [N] with -1 for unlabelled. NaN counts as unlabelled, a column [N, 1] is flattened."""
    y = np.asarray(y)
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1:
        raise UserError(
            f"{where}: labels must be one class per node, but have shape {y.shape}. "
            "Multi-label targets are not supported; leave labels out to pre-train without them."
        )
    check_rows(len(y), num_nodes, "labels", where)
    if y.dtype.kind == "f":
        missing = np.isnan(y)
        bad = np.flatnonzero(~missing & ~(np.isfinite(y) & (y == np.trunc(y))))
        if bad.size:
            raise UserError(
                f"{where}: {bad.size:,} labels are not whole numbers. First: {_rows(bad, y)}. "
                "Classes are 0..C-1; an empty cell or -1 means unlabelled."
            )
        y = np.where(missing, -1, y)
    elif y.dtype.kind not in "iub":
        raise UserError(f"{where}: labels must be numbers, but have type {y.dtype}.")
    y = np.ascontiguousarray(y, dtype=np.int64)
    bad = np.flatnonzero(y < -1)
    if bad.size:
        raise UserError(
            f"{where}: {bad.size:,} labels are below -1. First: {_rows(bad, y)}. Classes are "
            "0..C-1; -1 means unlabelled."
        )
    if y.size and int(y.max()) >= max(2 * num_nodes, 1024):
        bad = np.flatnonzero(y >= max(2 * num_nodes, 1024))
        raise UserError(
            f"{where}: labels reach {int(y.max()):,}, far above the {num_nodes:,} nodes. First: "
            f"{_rows(bad, y)}. Renumber the classes to 0..C-1."
        )
    return y


def _rows(bad: Array, values: Array) -> str:
    return ", ".join(f"row {int(i):,} = {values[i]}" for i in bad[:_SHOWN])


def clean_masks(masks: Mapping[str, Array], num_nodes: int, where: str) -> dict[str, Array]:
    """bool [N], or [N, S] for S splits, for train / val / test; disjoint. A single test set is
    repeated for every split.
    """
    if not masks:
        return {}
    out = {name: np.asarray(mask, dtype=bool) for name, mask in masks.items()}
    for name, mask in out.items():
        check_rows(len(mask), num_nodes, f"{name} masks", where)
    widths = {mask.shape[1] for mask in out.values() if mask.ndim == 2}
    if len(widths) > 1:
        raise UserError(
            f"{where}: the split masks have different numbers of splits: {sorted(widths)}."
        )
    if widths:
        width = widths.pop()
        out = {
            name: mask if mask.ndim == 2 else np.repeat(mask[:, None], width, axis=1)
            for name, mask in out.items()
        }
    names = list(out)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            both = out[a] & out[b]
            if both.any():
                nodes = np.flatnonzero(both if both.ndim == 1 else both.any(axis=1))
                shown = ", ".join(f"{int(n):,}" for n in nodes[:_SHOWN])
                raise UserError(
                    f"{where}: the splits overlap: {nodes.size:,} nodes are in both {a} and {b} "
                    f"(first: {shown}). "
                    "Every node may be in one of train, val, test only."
                )
    return out


def with_divisor(rows: Array, kind: str) -> tuple[Array, Array | None]:
    """(rows, what normalising divides each by): its length (unit) or the sum of its absolute values
    (row), 1 for zero rows, float64 [n]; None for other kinds, which change nothing.
    """
    if kind not in ("unit", "row"):
        return rows, None
    rows = rows.astype(np.float32)
    size = np.abs(rows.astype(np.float64))
    total = size.sum(axis=1) if kind == "row" else np.sqrt(np.square(size).sum(axis=1))
    return rows, np.where(total > 0, total, 1)


def divided(rows: Array, divisor: Array | None) -> Array:
    """The rows normalised, in single precision."""
    if divisor is None:
        return rows
    with np.errstate(invalid="ignore"):  # infinite values are reported by check_features
        return (rows / divisor[:, None]).astype(np.float32)
