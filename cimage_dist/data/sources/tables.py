"""Text, parquet and npy tables read in chunks, their columns by name.

Whether the first line of a text table names its columns: doubt is an error, never a guess.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np

from cimage_dist.data.checks import Array
from cimage_dist.data.sources.raw import check_text, readable, row_chunks
from cimage_dist.errors import UserError

Lines = Sequence[Sequence[str]]
TEXT = ("csv", "tsv", "txt")
ENDS = (("source", "target"), ("src", "dst"), ("u", "v"), ("from", "to"), ("row", "col"))
INDEX = "__index_level_0__"  # how pandas writes an index without a name into parquet
ID_NAMES = ("id", "node_id", "node", "nodeid", INDEX)
LABEL_NAMES = ("label", "labels", "y", "class", "split", "splits")
_SAMPLE = 100  # lines looked at before a table is read
_SEPARATORS = {"csv": ",", "tsv": "\t"}
# Cells that mean "no value" in a column of numbers or classes; an id may be any word.
_MISSING = ["", "NA", "N/A", "#N/A", "<NA>", "NaN", "nan", "null", "NULL", "None"]


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def looks_numbered(line: Sequence[str]) -> bool:
    """Whether a line is 0, 1, 2, ...: the names pandas gives to columns without names."""
    return list(line) == [str(i) for i in range(len(line))]


def has_header(lines: Lines, known: Collection[str]) -> bool | None:
    """From the first lines; None: they leave it open. `known` are names a header might use."""
    first, rest = lines[0], lines[1:]
    if any(cell.lower() in known for cell in first if cell):
        return True
    if first[0] == "" and len(first) > 1 and looks_numbered(first[1:]):
        return True  # pandas wrote its index too
    columns = [[line[j] for line in rest if line[j]] for j in range(len(first))]
    numeric = [bool(cells) and all(map(is_number, cells)) for cells in columns]
    if any(
        cell and not is_number(cell) and all_numbers
        for cell, all_numbers in zip(first, numeric, strict=True)
    ):
        return True
    # Columns of text (ids, class names) say nothing; those of numbers do.
    cells = [cell for cell, numbers in zip(first, numeric, strict=True) if numbers] or first
    if not all(is_number(cell) for cell in cells if cell):
        return None
    named = sum(1 for _ in takewhile(lambda cell: not is_number(cell), first))
    if not looks_numbered(first[named:]):
        return False
    # Whole numbers over a column of fractions: 0,1,2 is then no row of the table.
    has_fractions = any(found and not any(map(_is_whole, found)) for found in columns)
    return True if has_fractions and len(cells) > 2 else None


def _is_whole(text: str) -> bool:
    return text.lstrip("-").isdigit()


def show(lines: Lines) -> str:
    return " | ".join(",".join(line) for line in lines[:3])


def doubt(path: Path, lines: Lines, role: str) -> UserError:
    return UserError(
        f"{path}: the first line may name the columns or be data. First lines: {show(lines)}. Say "
        f"which: data.header.{role}=present or data.header.{role}=absent."
    )


def kind_of(path: Path) -> str:
    """csv, tsv, txt, parquet, npy or npz; a trailing .gz does not count."""
    return path.name.removesuffix(".gz").rpartition(".")[2].lower()


@contextmanager
def readable_table(path: Path) -> Iterator[None]:
    from pandas.errors import EmptyDataError, ParserError
    from pyarrow import ArrowException

    with readable(path):
        try:
            yield
        except EmptyDataError:
            raise UserError(f"{path} is empty: it has no rows.") from None
        except (ParserError, ArrowException) as error:
            raise UserError(
                f"{path} cannot be read as {kind_of(path)} ({' '.join(str(error).split())}). "
                "Repair or replace it."
            ) from None


def text_frames(path: Path, rows: int, **options: Any) -> Iterator[Any]:
    """pandas frames of at most `rows` rows, the columns by number; the first line is data."""
    import pandas as pd

    separator = _SEPARATORS.get(kind_of(path), r"\s+")
    options |= {"sep": separator, "header": None, "chunksize": rows, "low_memory": False}
    with readable_table(path), pd.read_csv(path, **options) as reader:
        yield from reader


@dataclass(frozen=True)
class Table:
    """A text or parquet table. `names` has "" for a column without a name, None: there is no
    header. `skip` lines come before the data.
    """

    path: Path
    width: int
    names: tuple[str, ...] | None
    lines: list[list[str]]
    skip: int = 0

    def find(self, wanted: Sequence[str]) -> int | None:
        """The position of the first of these names, whatever their case."""
        lower = [name.lower() for name in self.names or ()]
        return next((lower.index(name) for name in wanted if name in lower), None)

    def named(self, column: str) -> int | None:
        """The position of a column by the name or the number (from 0) that data.columns gives."""
        if self.names and column in self.names:
            return self.names.index(column)
        return int(column) if column.isdigit() and int(column) < self.width else None

    def index(self) -> int | None:
        """The unnamed first column pandas writes for its index."""
        return 0 if self.names and self.width > 1 and self.names[0] == "" else None

    def describe(self) -> str:
        shown = show([list(self.names)] if self.names else self.lines)
        return f"{'Columns' if self.names else 'First lines'}: {shown}"

    def label_of(self, column: int) -> str:
        return (self.names[column] if self.names else "") or f"column {column}"

    def chunks(
        self, columns: Sequence[int], rows: int, ids: Collection[int] = (), blank: bool = False
    ) -> Iterator[list[Any]]:
        """These columns, at most `rows` rows at a time: pandas series or arrow arrays. Columns of
        `ids` keep their text as it is. `blank`: an empty line of a text table is a row.
        """
        if kind_of(self.path) == "parquet":
            import pyarrow.parquet as pq

            assert self.names is not None
            wanted = [self.names[column] for column in columns]
            with readable_table(self.path), pq.ParquetFile(self.path) as file:
                for batch in file.iter_batches(rows, columns=wanted):
                    yield [batch.column(name) for name in wanted]
            return
        frames = text_frames(
            self.path,
            rows,
            skiprows=self.skip,
            # Where all columns are read, a line that is longer than the others is an error.
            usecols=None if len(columns) == self.width else sorted(columns),
            dtype=dict.fromkeys(ids, str),
            keep_default_na=False,
            na_values={c: [""] if c in ids else _MISSING for c in columns},
            skip_blank_lines=not blank,
            skipinitialspace=True,
            encoding="utf-8-sig",
            comment=None if ids or blank else "#",
        )
        for frame in frames:
            yield [frame[column] for column in columns]

    def num_rows(self, blank: bool = False) -> int:
        if kind_of(self.path) == "parquet":
            import pyarrow.parquet as pq

            with readable_table(self.path), pq.ParquetFile(self.path) as file:
                return int(file.metadata.num_rows)
        return sum(len(part[0]) for part in self.chunks([0], 1 << 20, [0], blank))


def open_table(
    path: Path,
    role: str,
    header: Mapping[str, str],
    known: Collection[str] = (),
    decide: Callable[[Table], bool | None] = lambda table: None,
) -> Table:
    """A table, its header separated from its data: by data.header, else by the first lines, else by
    `decide`, which sees the table without a header and may leave it open too.
    """
    if kind_of(path) == "parquet":
        import pyarrow.parquet as pq

        with readable_table(path), pq.ParquetFile(path) as file:
            names = tuple(file.schema_arrow.names)
        return Table(path, len(names), names, [])
    check_text(path)
    skip, lines = _first_lines(path)
    if not lines:
        raise UserError(f"{path} is empty.")
    width = len(lines[0])
    if width == 1 and (other := _other_separator(path, lines)):
        raise UserError(
            f"{path}: cells must be separated by {'tabs' if kind_of(path) == 'tsv' else 'commas'}, "
            f"not {other!r}. First lines: {show(lines)}."
        )
    for number, line in enumerate(lines):
        if len(line) != width:
            raise UserError(
                f"{path} cannot be read as {kind_of(path)}: line {skip + number + 1} has "
                f"{len(line)} cells, line {skip + 1} has {width}. Repair or replace it."
            )
    plain = Table(path, width, None, lines, skip)
    if role in header:
        is_named: bool | None = header[role] == "present"
    else:
        is_named = has_header(lines, known)
        is_named = decide(plain) if is_named is None else is_named
    if is_named is None:
        raise doubt(path, lines, role)
    return Table(path, width, tuple(lines[0]), lines, skip + 1) if is_named else plain


def _other_separator(path: Path, lines: Lines) -> str | None:
    """What separates the cells of a table that seems to have one column, if it is in each line."""
    marks = () if kind_of(path) == "txt" else (";", "\t", "|", ",")
    return next((mark for mark in marks if all(mark in line[0] for line in lines)), None)


def _first_lines(path: Path) -> tuple[int, list[list[str]]]:
    """(comment lines before the table, its first lines as cells)."""
    opener: Callable[..., Any] = gzip.open if path.name.endswith(".gz") else open
    separator = _SEPARATORS.get(kind_of(path))
    with readable(path), opener(path, "rt", encoding="utf-8-sig", newline="") as file:
        raw = [line.rstrip("\r\n") for line in islice(file, _SAMPLE)]
    is_wide = any(len(line.split(separator)) > 1 for line in raw if not line.startswith("#"))
    # In a table of one column an empty line is a row: a node without a label.
    skip = 0
    while skip < len(raw) and (raw[skip].startswith("#") or (is_wide and not raw[skip].strip())):
        skip += 1
    body = [line for line in raw[skip:] if line.strip() or not is_wide]
    if separator is None:
        return skip, [line.split() or [""] for line in body]
    cut = [[cell.strip() for cell in line] for line in csv.reader(body, delimiter=separator)]
    lines = [line or [""] for line in cut]
    comments = [line for line in csv.reader(raw[:skip], delimiter=separator) if line]
    tags = [line for line in comments if lines and len(line) == len(lines[0]) > 1]
    if tags and not tags[-1][0][1:2].isspace():
        raise UserError(
            f"{path}: line {skip} ({separator.join(tags[-1])}) begins with # and may be a comment, "
            "the names of the columns or data. Remove the #, or put a blank after it to make it a "
            "comment; ids that begin with # must not come first."
        )
    return skip, lines


def load_npy(path: Path) -> Array:
    """Memory-mapped where possible (an empty array cannot be)."""
    with readable(path):
        try:
            return np.load(path, mmap_mode="r", allow_pickle=False)
        except ValueError:
            return np.load(path, allow_pickle=False)


def npy_matrix(path: Path) -> tuple[int, Callable[[], Iterator[Array]]]:
    matrix = load_npy(path)
    if matrix.ndim != 2:
        raise UserError(
            f"{path}: features must be a table [nodes, columns]; the array has shape "
            f"{matrix.shape}."
        )
    return len(matrix), lambda: row_chunks(matrix)


def numbers(columns: Sequence[Any], table: Table, positions: Sequence[int]) -> Array:
    """Columns of a chunk side by side [rows, columns]; other things than numbers are an error that
    names them.
    """
    out = []
    for values, position in zip(columns, positions, strict=True):
        is_arrow = hasattr(values, "null_count")
        column = values.to_numpy(zero_copy_only=False) if is_arrow else values.to_numpy()
        if column.dtype.kind not in "iufb":
            try:
                if column.dtype.kind in "mM":
                    raise TypeError("dates and times")
                column = column.astype(np.float64)
            except (ValueError, TypeError) as error:
                raise UserError(
                    f"{table.path}: features must be numbers, but {table.label_of(position)!r} has "
                    f"others ({error}). Remove the column, or make numbers of it; node ids are "
                    f"found by the name {' or '.join(ID_NAMES[:2])}, or say data.columns.id="
                    f"{table.label_of(position).removeprefix('column ')}."
                ) from None
        out.append(column)
    return np.stack(out, axis=1)
