"""Edges in any order -> destination-sorted CSC on disk, in bounded memory.

Every edge becomes two keys `row * N + column` (one per direction). Sorted keys are exactly the CSC
order, and equal keys are duplicates. Keys are spilled to files by key range, so each file can be
sorted alone, by digits in compiled passes, and written out in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numba
import numpy as np
from numpy.typing import NDArray

from cimage_dist.data.checks import Array, check_ids
from cimage_dist.errors import UserError

_DIGIT = 11  # bits; the counts of a digit stay in the first-level cache
_SIZE = 1 << _DIGIT

Keys = NDArray[np.int64]


@numba.njit(nogil=True, cache=True)
def _scatter(keys, out, low, shift, place):  # type: ignore[no-untyped-def]
    """Each key to where the keys of its digit go next, in the order they come."""
    mask = len(place) - 1
    for i in range(len(keys)):
        digit = ((keys[i] - low) >> shift) & mask
        out[place[digit]] = keys[i]
        place[digit] += 1


@numba.njit(nogil=True, cache=True)
def _count(keys, low, shift, counts):  # type: ignore[no-untyped-def]
    mask = len(counts) - 1
    for i in range(len(keys)):
        counts[((keys[i] - low) >> shift) & mask] += 1


@numba.njit(nogil=True, cache=True)
def _drop_repeats(keys):  # type: ignore[no-untyped-def]
    """Move the first of equal neighbours forward; returns how many there are."""
    size = 0
    for i in range(len(keys)):
        if size == 0 or keys[i] != keys[size - 1]:
            keys[size] = keys[i]
            size += 1
    return size


def by_range(keys: Keys, low: int, shift: int, parts: int) -> list[Keys]:
    """The keys in `parts` (a power of two) ranges of width 2^shift from `low` on, unsorted."""
    counts = np.zeros(parts, dtype=np.int64)
    _count(keys, low, shift, counts)
    end = np.cumsum(counts)
    out = np.empty_like(keys)
    _scatter(keys, out, low, shift, end - counts)
    return np.split(out, end[:-1])


def sort_unique(keys: Keys) -> Keys:
    """Ascending without repeats. Stable passes from the lowest digit to the highest that differs,
    from one buffer to the other; `keys` is one of them.
    """
    low = int(keys.min())
    spread, other = int(keys.max()) - low, np.empty_like(keys)
    for shift in range(0, spread.bit_length(), _DIGIT):
        counts = np.zeros(_SIZE, dtype=np.int64)
        _count(keys, low, shift, counts)
        _scatter(keys, other, low, shift, np.cumsum(counts) - counts)
        keys, other = other, keys
    found: Any = keys[: _drop_repeats(keys)]
    return found


DEFAULT_BUDGET = 512 << 20
MAX_NODES = 3_000_000_000  # N * N must fit into a signed 64-bit key
_BITS = 8  # ranges of keys are cut into 2^8 narrower ones
_COMPILED_FROM = 1 << 20  # keys; fewer are sorted before compiled code is loaded


def index_dtype(num_nodes: int) -> np.dtype[Any]:
    return np.dtype(np.int32 if num_nodes < 2**31 else np.int64)


def write_header(file: IO[bytes], dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    """What a .npy file of an array in row order begins with."""
    facts = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, facts)


class NpyWriter:
    """A .npy file written row by row; the number of rows enters the header on close."""

    def __init__(self, path: Path, dtype: Any, row_shape: tuple[int, ...] = ()) -> None:
        self.path, self.dtype, self.row_shape, self.rows = path, np.dtype(dtype), row_shape, 0
        self._file: IO[bytes] = path.open("wb")
        self._header()

    def _header(self) -> None:
        # numpy pads the header for a growing first axis, so the final header has the length of the
        # first one.
        self._file.seek(0)
        write_header(self._file, self.dtype, (self.rows, *self.row_shape))

    def write(self, rows: Array) -> None:
        assert rows.shape[1:] == self.row_shape
        self._file.write(np.ascontiguousarray(rows, dtype=self.dtype).data)
        self.rows += len(rows)

    def close(self) -> None:
        if not self._file.closed:
            self._header()
            self._file.close()

    def read(self) -> Array:
        """The closed file, mapped."""
        return np.load(self.path, mmap_mode="r", allow_pickle=False)

    def remove(self) -> None:
        self.path.unlink()

    def __enter__(self) -> NpyWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _both_directions(src: Array, dst: Array, num_nodes: int) -> Array:
    """Keys of both directions of the edges."""
    keys = np.empty(2 * len(src), dtype=np.int64)
    np.multiply(dst, num_nodes, out=keys[: len(src)], dtype=np.int64)
    keys[: len(src)] += src
    np.multiply(src, num_nodes, out=keys[len(src) :], dtype=np.int64)
    keys[len(src) :] += dst
    return keys


def _sort_unique(keys: Array) -> Array:
    """Ascending without repeats; `keys` is overwritten."""
    if keys.size >= _COMPILED_FROM:
        from cimage_dist.data import build

        return build.sort_unique(keys)
    keys.sort()
    if keys.size < 2:
        return keys
    new = np.empty(keys.size, dtype=bool)
    new[0] = True
    np.not_equal(keys[1:], keys[:-1], out=new[1:])
    return keys if new.all() else keys[new]


def csc_in_memory(
    num_nodes: int, src: Array, dst: Array, where: str = "edge_index"
) -> tuple[Array, Array, dict[str, int]]:
    """(indptr, indices, statistics) of the symmetric simple graph, for graphs that are in memory
    anyway.
    """
    src, dst = check_ids(src, dst, num_nodes, where)
    keep = src != dst
    keys = _sort_unique(
        _both_directions(src[keep].astype(np.int64), dst[keep].astype(np.int64), num_nodes)
    )
    rows = keys // num_nodes
    indptr = np.zeros(num_nodes + 1, dtype=np.int64)
    np.cumsum(np.bincount(rows, minlength=num_nodes), out=indptr[1:])
    indices = (keys - rows * num_nodes).astype(index_dtype(num_nodes))
    return (
        indptr,
        indices,
        _statistics(len(src), int((~keep).sum()), len(keys), int((np.diff(indptr) == 0).sum())),
    )


def _statistics(read: int, loops: int, directed: int, isolated: int) -> dict[str, int]:
    """A pair that the source lists in both directions counts as merged once."""
    return {
        "edges_read": read,
        "self_loops_removed": loops,
        "duplicates_merged": read - loops - directed // 2,
        "isolated_nodes": isolated,
    }


def edge_weights(
    indptr: Array, indices: Array, chunks: Iterator[tuple[Array, ...]], where: str
) -> Array:
    """float32 [E], one for each entry of `indices`: the sum over all rows of the edge list that
    name this pair, in either direction. `chunks` are sources, targets and weights.
    """
    n = len(indptr) - 1
    keys = np.repeat(np.arange(n, dtype=np.int64) * n, np.diff(indptr)) + indices
    weights = np.zeros(len(keys), dtype=np.float64)
    for src, dst, values in chunks:
        is_number = values.dtype.kind in "iufb"
        bad = np.flatnonzero(~np.isfinite(values)) if is_number else np.arange(len(values))
        if bad.size:
            raise UserError(
                f"{where}: {bad.size:,} are no finite numbers. First: row {int(bad[0]) + 1:,} has "
                f"'{values[bad[0]]}'. Replace or remove them."
            )
        keep = src != dst
        a, b = src[keep].astype(np.int64), dst[keep].astype(np.int64)
        for pair in (a * n + b, b * n + a):
            np.add.at(weights, np.searchsorted(keys, pair), values[keep])
    return weights.astype(np.float32)


class CscBuilder:
    """Collects edge chunks, then writes `indptr.npy` (int64) and `indices.npy` (int32 when ids
    fit).

    Memory stays near `budget_bytes` plus one row pointer array, whatever the number of edges. Files
    under `work_dir` are removed.
    """

    def __init__(
        self,
        num_nodes: int,
        work_dir: Path,
        budget_bytes: int = DEFAULT_BUDGET,
        where: str = "the edge list",
    ) -> None:
        if num_nodes < 1:
            raise UserError(f"{where}: the graph is empty, it has no nodes.")
        if num_nodes > MAX_NODES:
            raise UserError(
                f"{where}: {num_nodes:,} nodes are more than the {MAX_NODES:,} this store can hold."
            )
        self.num_nodes, self.work_dir, self.where = num_nodes, work_dir, where
        self.edges_read = self.self_loops = 0
        # Sorting keys needs about four times their size.
        self._bucket_bytes = max(budget_bytes // 4, 64)
        self._chunk = max(budget_bytes // 128, 4)
        self._shift = max((num_nodes**2 - 1).bit_length() - _BITS, 0)
        self._pending: list[Array] = []
        self._pending_bytes = 0
        self._spilled = False

    def add(self, src: Array, dst: Array) -> None:
        """A chunk of edges of any size and integer type; both directions are added, self-loops
        dropped.
        """
        src, dst = check_ids(src, dst, self.num_nodes, self.where, self.edges_read)
        self.edges_read += len(src)
        for start in range(0, len(src), self._chunk):
            s, d = (
                src[start : start + self._chunk].astype(np.int64),
                dst[start : start + self._chunk].astype(np.int64),
            )
            keep = s != d
            loops = len(s) - int(np.count_nonzero(keep))
            if loops:
                s, d = s[keep], d[keep]
                self.self_loops += loops
            keys = _both_directions(s, d, self.num_nodes)
            self._pending.append(keys)
            self._pending_bytes += keys.nbytes
            if self._pending_bytes > self._bucket_bytes:
                self._spill_pending()

    def _spill_pending(self) -> None:
        self.work_dir.mkdir(parents=True, exist_ok=True)
        for keys in self._pending:
            self._spill(keys, 0, self._shift, "bucket")
        self._pending, self._pending_bytes, self._spilled = [], 0, True

    def _spill(self, keys: Array, low: int, shift: int, prefix: str) -> None:
        """Append keys to one file for each range of 2^shift from `low` on."""

        for i, part in enumerate(by_range(keys, low, shift, 1 << _BITS)):
            if part.size:
                with (self.work_dir / f"{prefix}-{i:03d}").open("ab") as file:
                    file.write(part.data)

    def _runs(self) -> Iterator[Array]:
        """Sorted, unique, ascending runs of keys that together are the whole graph."""
        if not self._spilled:
            pending, self._pending = self._pending, []
            if pending:
                yield _sort_unique(np.concatenate(pending))
            return
        self._spill_pending()
        yield from self._ranges(0, self._shift, "bucket")

    def _ranges(self, low: int, shift: int, prefix: str) -> Iterator[Array]:
        for i in range(1 << _BITS):
            path, first = self.work_dir / f"{prefix}-{i:03d}", low + (i << shift)
            if not path.exists():
                continue
            if path.stat().st_size <= self._bucket_bytes:
                keys = np.fromfile(path, dtype=np.int64)
                path.unlink()
                yield _sort_unique(keys)
            elif shift == 0:
                path.unlink()
                yield np.array([first], dtype=np.int64)
            else:
                # Hubs make some ranges heavy: cut these into narrower ranges until each fits.
                inner = max(shift - _BITS, 0)
                for keys in _read_keys(path, self._bucket_bytes // 8 + 1):
                    self._spill(_sort_unique(keys), first, inner, f"{prefix}-{i:03d}")
                path.unlink()
                yield from self._ranges(first, inner, f"{prefix}-{i:03d}")

    def finish(self, out_dir: Path) -> dict[str, int]:
        """Write the two files into `out_dir`; returns the statistics of the manifest."""
        n = self.num_nodes
        indptr = np.lib.format.open_memmap(
            out_dir / "indptr.npy", mode="w+", dtype=np.int64, shape=(n + 1,)
        )
        with NpyWriter(out_dir / "indices.npy", index_dtype(n)) as indices:
            for keys in self._runs():
                if keys.size == 0:
                    continue
                rows = keys // n
                low, high = int(rows[0]), int(rows[-1])
                keys -= rows * n
                indices.write(keys)
                rows -= low
                indptr[low + 1 : high + 2] += np.bincount(rows)
            directed = indices.rows
        isolated = int(np.count_nonzero(indptr[1:] == 0))
        np.cumsum(indptr, out=indptr)
        indptr.flush()
        if self.work_dir.exists():
            self.work_dir.rmdir()
        return _statistics(self.edges_read, self.self_loops, directed, isolated)


def _read_keys(path: Path, count: int) -> Iterator[Array]:
    with path.open("rb") as file:
        while (keys := np.fromfile(file, dtype=np.int64, count=count)).size:
            yield keys
