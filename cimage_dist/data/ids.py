"""Node ids as the user writes them (64-bit integers or text), and the row each one has in the
graph.

ids.npy                    int64 [N], or the UTF-8 bytes of all ids one after the other with
ids_offsets.npy            int64 [N+1], where each begins
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cimage_dist.data.checks import Array
from cimage_dist.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa

ID_FILES = ("ids.npy", "ids_offsets.npy")
_SHOWN = 3
# Ids that a program would write for an integer; 007 is a name that 7 must not replace.
_INTEGER = r"^(0|-?[1-9][0-9]{0,18})$"


def read_ids(values: Any, where: str, first: int = 0) -> pa.Array:
    """Ids of any kind as an arrow array of int64 or of text, without missing ones.

    Text that is written like an integer of 64 bits counts as one, if all of it is; whole floats
    too. `first` is the number of rows read before these.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    is_numpy = isinstance(values, np.ndarray) and values.dtype.kind in "OU"
    found = pa.array(values.tolist() if is_numpy else values, from_pandas=True)
    if isinstance(found, pa.ChunkedArray):
        found = found.combine_chunks()
    if len(found) == 0:
        return pa.array([], pa.int64())
    if pa.types.is_dictionary(found.type):
        found = found.dictionary_decode()
    if pa.types.is_floating(found.type):
        bad = np.flatnonzero(~(pc.equal(found, pc.trunc(found)).fill_null(False).to_numpy(False)))
    else:
        bad = np.flatnonzero(found.is_null().to_numpy(zero_copy_only=False))
    if bad.size:
        raise UserError(
            f"{where}: {bad.size:,} node ids are missing or not whole numbers, the first in row "
            f"{first + int(bad[0]) + 1:,}. Every row needs an id."
        )
    if pa.types.is_integer(found.type) or pa.types.is_floating(found.type):
        try:
            return found.cast(pa.int64())
        except pa.ArrowInvalid:  # beyond 64 bits with a sign: kept as text, digit by digit
            return found.cast(pa.large_string())
    if not (pa.types.is_string(found.type) or pa.types.is_large_string(found.type)):
        raise UserError(f"{where}: node ids must be integers or text; got {found.type}.")
    text = pc.utf8_trim_whitespace(found.cast(pa.large_string()))
    if pc.all(pc.match_substring_regex(text, _INTEGER)).as_py():
        try:
            return text.cast(pa.int64())
        except pa.ArrowInvalid:
            pass
    return text


def alike(parts: list[pa.Array]) -> list[pa.Array]:
    """The same ids in one type: integers where all parts are, else text."""
    import pyarrow as pa

    if all(pa.types.is_integer(part.type) for part in parts):
        return parts
    return [part.cast(pa.large_string()) for part in parts]


class NodeIds:
    """The ids of all nodes: row i belongs to `values[i]`."""

    def __init__(self, values: pa.Array, where: str = "node ids") -> None:
        import pyarrow.compute as pc

        self.values = values
        if len(pc.unique(values)) != len(values):
            counts = pc.value_counts(values)
            twice = counts.filter(pc.greater(counts.field("counts"), 1)).field("values")
            raise UserError(
                f"{where}: {len(twice):,} node ids occur more than once. First: "
                f"{_show(twice)}. Keep one row of each."
            )

    @classmethod
    def union(cls, parts: Iterable[pa.Array]) -> NodeIds:
        """All ids that occur, each once, ascending."""
        import pyarrow as pa
        import pyarrow.compute as pc

        found = alike([pc.unique(part) for part in parts])
        together = pa.concat_arrays(found) if found else pa.array([], pa.int64())
        return cls(pc.unique(together).sort())

    def __len__(self) -> int:
        return len(self.values)

    def to_numpy(self) -> Array:
        """int64 [N], or the text of each id."""
        return np.asarray(self.values.to_numpy(zero_copy_only=False))

    def order(self) -> Array | None:
        """Where ids are the numbers 0..N-1 in any order: the position of each number, so that rows
        can be put in that order and need no ids. None for other ids.
        """
        import pyarrow as pa

        if not pa.types.is_integer(self.values.type):
            return None
        ids = self.to_numpy()
        if not len(ids) or ids.min() != 0 or ids.max() != len(ids) - 1:
            return None
        return np.argsort(ids, kind="stable")

    def rows_of(self, values: Any, where: str, first: int = 0) -> Array:
        """int64: the row of each id; unknown ones are an error that shows them."""
        import pyarrow.compute as pc

        asked, known = alike([read_ids(values, where, first), self.values])
        rows = pc.index_in(asked, value_set=known)
        if rows.null_count:
            missing = pc.unique(asked.filter(rows.is_null()))
            raise UserError(
                f"{where}: {len(missing):,} ids are not nodes of this graph. First: "
                f"{_show(missing)}. Nodes have ids such as {_show(self.values)}."
            )
        return np.asarray(rows.to_numpy(zero_copy_only=False), dtype=np.int64)

    def write(self, out: Path) -> list[str]:
        """Names of the files written into a store."""
        import pyarrow as pa

        if pa.types.is_integer(self.values.type):
            np.save(out / "ids.npy", self.to_numpy())
            return ["ids.npy"]
        text = self.values
        _, begins, content = text.buffers()
        offsets = np.frombuffer(begins, np.int64)[text.offset : text.offset + len(text) + 1]
        np.save(out / "ids.npy", np.frombuffer(content, np.uint8)[offsets[0] : offsets[-1]])
        np.save(out / "ids_offsets.npy", offsets - offsets[0])
        return ["ids.npy", "ids_offsets.npy"]

    @classmethod
    def of_store(cls, arrays: Mapping[str, Array]) -> NodeIds:
        """What `write` wrote, on the mapped memory. Ids of a store are known to be unique."""
        import pyarrow as pa

        ids = cls.__new__(cls)
        content, offsets = arrays["ids.npy"], arrays.get("ids_offsets.npy")
        ids.values = (
            pa.array(content)
            if offsets is None
            else pa.LargeStringArray.from_buffers(
                len(offsets) - 1, pa.py_buffer(offsets), pa.py_buffer(content)
            )
        )
        return ids


def _show(values: pa.Array) -> str:
    return ", ".join(repr(value.as_py()) for value in values[:_SHOWN])
