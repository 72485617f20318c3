"""Feature rows with few non-zeros, kept sparse: in memory, or mapped from the files of a store.

x_indptr.npy   int32 or int64 [N+1]: the entries of row i are indptr[i] .. indptr[i+1]
x_columns.npy  uint16 or int32 [Z], ascending inside a row
x_kept.npy     [Z], or [1] where all are the same: float16 where that is exact, else float32; uint8
               where there is a table
x_table.npy    float32 [2 .. 256]: the numbers that x_kept.npy points at, where there are so few
x_divisor.npy  float64 [N], where rows were normalised

An entry is kept / divisor of its row in single precision, then in the type of the store: bit for
bit what a dense store holds of the same rows. Shapes: N nodes, F features, Z non-zero entries.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from cimage_dist.data.build import write_header
from cimage_dist.data.checks import Array
from cimage_dist.types import SPARSE_SHARE, Features, SparseRows

SPARSE_FILES = ("x_indptr.npy", "x_columns.npy", "x_kept.npy", "x_table.npy", "x_divisor.npy")
NEEDED_FILES = SPARSE_FILES[:3]
_TABLE = 256  # entries of a table at most
_BLOCK_VALUES = 1 << 22  # of a dense matrix made at a time
# Dense values up to which the content is named by what a dense store would hold (a minute or two).
_MOST_NAMED = 1 << 35


class CsrFeatures:
    """Rows [N, F] of `dtype`; arrays as in the module's head. `x[ids]` gives `SparseRows`,
    `np.asarray(x)` all rows dense.
    """

    ndim = 2

    def __init__(
        self,
        indptr: Array,
        columns: Array,
        kept: Array,
        table: Array | None,
        divisor: Array | None,
        num_columns: int,
        dtype: Any,
    ) -> None:
        self.indptr, self.columns, self.kept = indptr, columns, kept
        self.table, self.divisor = table, divisor
        self.shape, self.dtype = (len(indptr) - 1, num_columns), np.dtype(dtype)

    @staticmethod
    def of_store(files: Mapping[str, Array], num_columns: int, dtype: Any) -> CsrFeatures:
        """From the arrays of SPARSE_FILES; ValueError where they do not fit each other."""
        indptr, columns, kept, table, divisor = (files.get(name) for name in SPARSE_FILES)
        assert indptr is not None and columns is not None and kept is not None
        if (
            indptr[0] != 0
            or indptr[-1] != len(columns)
            or len(kept) not in (1, len(columns))
            or (divisor is not None and len(divisor) != len(indptr) - 1)
        ):
            raise ValueError("the arrays of its sparse features do not fit each other")
        return CsrFeatures(indptr, columns, kept, table, divisor, num_columns, dtype)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nnz(self) -> int:
        return len(self.columns)

    @property
    def nbytes(self) -> int:
        parts = (self.indptr, self.columns, self.kept, self.table, self.divisor)
        return sum(part.nbytes for part in parts if part is not None)

    def _values(self, row: Array, entry: Array | slice) -> Array:
        """The entries in the type of the store; `row` of each."""
        kept = self.kept[entry] if len(self.kept) == self.nnz else np.repeat(self.kept, len(row))
        if self.table is not None:
            kept = self.table[kept]
        if self.divisor is not None:
            kept = (kept / self.divisor[row]).astype(np.float32)
        return kept.astype(self.dtype)

    def __getitem__(self, rows: slice | Array) -> SparseRows:
        """The named rows, in the order named."""
        ids = np.asarray(
            np.arange(*rows.indices(self.shape[0])) if isinstance(rows, slice) else rows
        )
        begin = self.indptr[ids].astype(np.int64)
        count = self.indptr[ids + 1] - begin
        local = np.repeat(np.arange(len(ids)), count)
        first = np.cumsum(count) - count
        entry = np.arange(len(local)) + np.repeat(begin - first, count)
        return SparseRows(
            torch.from_numpy(local),
            torch.from_numpy(self.columns[entry].astype(np.int64)),
            torch.from_numpy(self._values(ids[local], entry)),
            (len(ids), self.shape[1]),
        )

    def block(self, begin: int, end: int) -> Any:
        """Rows begin .. end as a scipy matrix in float64."""
        from scipy.sparse import csr_array

        pointers = np.asarray(self.indptr[begin : end + 1], dtype=np.int64)
        entry = slice(int(pointers[0]), int(pointers[-1]))
        row = np.repeat(np.arange(begin, begin + len(pointers) - 1), np.diff(pointers))
        values = self._values(row, entry).astype(np.float64)
        columns = self.columns[entry].astype(np.int64)
        shape = (len(pointers) - 1, self.shape[1])
        return csr_array((values, columns, pointers - pointers[0]), shape=shape)

    def blocks(self) -> Iterator[Array]:
        """All rows dense, a few at a time."""
        step = max(1, _BLOCK_VALUES // max(1, self.shape[1]))
        for begin in range(0, self.shape[0], step):
            yield self[begin : begin + step].to_dense().numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError("sparse features have no dense array to share")
        out = np.empty(self.shape, dtype=dtype or self.dtype)
        begin = 0
        for rows in self.blocks():
            out[begin : begin + len(rows)] = rows
            begin += len(rows)
        return out


def rows_at(features: Array | CsrFeatures, ids: Array) -> Features:
    """The named rows of mapped or other features, sparse where they are kept so."""
    found = features[ids]
    return found if isinstance(found, SparseRows) else torch.from_numpy(np.asarray(found))


class Sink(Protocol):
    """Takes an array row by row and gives it back whole."""

    def write(self, rows: Array) -> None: ...
    def close(self) -> None: ...
    def read(self) -> Array: ...
    def remove(self) -> None: ...


class Collected:
    """A sink in memory."""

    def __init__(self, name: str, dtype: Any, row_shape: tuple[int, ...] = ()) -> None:
        self._parts: list[Array] = [np.empty((0, *row_shape), dtype=dtype)]

    def write(self, rows: Array) -> None:
        self._parts.append(np.ascontiguousarray(rows, dtype=self._parts[0].dtype))

    def close(self) -> None:
        self._parts = [np.concatenate(self._parts)]

    def read(self) -> Array:
        return self._parts[0]

    def remove(self) -> None:
        self._parts.clear()


class FeatureWriter:
    """Chunks of rows -> sparse features, as long as at most a tenth of all values is not zero
    (`types.SPARSE_SHARE`); beyond that what came so far becomes dense, and so does the rest.

    `open_sink(name, dtype, row_shape)` says where arrays go. `on_dense` sees all dense rows, in the
    chunks they came in. Without `may_be_sparse` rows are dense from the start.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: Any,
        open_sink: Callable[[str, Any, tuple[int, ...]], Sink],
        on_dense: Callable[[Array], None] = lambda rows: None,
        may_be_sparse: bool = True,
    ) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)
        self._open, self._on_dense = open_sink, on_dense
        self.rows = self.nonzeros = 0
        self._bounds = [0]
        self._counts, self._divisors = [np.zeros(1, np.int64)], [np.empty(0)]
        # All values so far, while they are few; whether half precision holds them.
        self._table: Array | None = np.empty(0, np.float32)
        self._are_short = True
        self._sinks: list[Sink] = []
        self._digest: Any = None
        if may_be_sparse:
            small = shape[1] <= 1 << 16
            self._sinks = [
                open_sink("x_columns", np.uint16 if small else np.int32, ()),
                open_sink("x_kept", np.float32, ()),
            ]
            if shape[0] * shape[1] <= _MOST_NAMED:
                header = BytesIO()
                write_header(header, self.dtype, shape)
                self._digest = hashlib.blake2b(header.getvalue(), digest_size=16)
            self._dense = None
        else:
            self._dense = self._open_dense()

    def _open_dense(self) -> Sink:
        return self._open("x", self.dtype, (self.shape[1],))

    def write(self, stored: Array, kept: Array, divisor: Array | None) -> None:
        """Rows as they are stored [n, F]; stored = kept / divisor, in the type of the store."""
        self.rows += len(stored)
        if self._dense is not None:
            self._write_dense(stored)
            return
        row, column = stored.nonzero()
        self.nonzeros += len(row)
        values = kept[row, column].astype(np.float32)
        self._note_values(values)
        columns, entries = self._sinks
        columns.write(column)
        entries.write(values)
        self._counts.append(np.bincount(row, minlength=len(stored)))
        if divisor is not None:
            self._divisors.append(divisor)
        self._bounds.append(self.rows)
        if self._digest is not None:
            self._digest.update(np.ascontiguousarray(stored).data)
        if self.nonzeros > SPARSE_SHARE * self.shape[0] * self.shape[1]:
            self._become_dense()

    def _note_values(self, values: Array) -> None:
        if self._table is not None:
            found = np.union1d(self._table, values)
            self._table = found if len(found) <= _TABLE else None
        with np.errstate(over="ignore"):
            self._are_short &= bool((values.astype(np.float16) == values).all())

    def _write_dense(self, rows: Array) -> None:
        assert self._dense is not None
        self._dense.write(rows)
        self._on_dense(rows)

    def _become_dense(self) -> None:
        self._dense = self._open_dense()
        so_far = self._sparse()
        for begin, end in pairwise(self._bounds):
            self._write_dense(so_far[begin:end].to_dense().numpy())
        for sink in self._sinks:
            sink.remove()
        self._sinks = []

    def _sparse(self) -> CsrFeatures:
        """What was written so far."""
        for sink in self._sinks:
            sink.close()
        columns, kept = (sink.read() for sink in self._sinks)
        pointers = np.cumsum(np.concatenate(self._counts))
        indptr = pointers.astype(np.int32 if pointers[-1] < 2**31 else np.int64)
        divisor = np.concatenate(self._divisors) if len(self._divisors) > 1 else None
        return CsrFeatures(indptr, columns, kept, None, divisor, self.shape[1], self.dtype)

    def finish(self) -> Array | CsrFeatures:
        """All rows; where sinks are files, mapped."""
        if self._dense is not None:
            self._dense.close()
            return self._dense.read()
        found = self._sparse()
        if self._table is not None and len(self._table) == 1:
            found.kept = self._table
        elif self._table is not None:
            found.table = self._table
            found.kept = np.searchsorted(self._table, found.kept).astype(np.uint8)
        elif self._are_short:
            found.kept = np.array(found.kept, dtype=np.float16)
        return found

    def dense_digest(self) -> str | None:
        """The checksum that x.npy of a dense store would have; None for matrices too large."""
        return None if self._digest is None else self._digest.hexdigest()

    def close(self) -> None:
        """After an error."""
        for sink in (*self._sinks, *([self._dense] if self._dense is not None else [])):
            sink.close()


def write_sparse(found: CsrFeatures, folder: Path) -> list[str]:
    """The files of a store that `FeatureWriter.finish` has not made yet; the names of all."""
    parts = (found.indptr, None, found.kept, found.table, found.divisor)
    for name, part in zip(SPARSE_FILES, parts, strict=True):
        if part is not None and not isinstance(part, np.memmap):
            np.save(folder / name, part)
    return [name for name in SPARSE_FILES if (folder / name).is_file()]
