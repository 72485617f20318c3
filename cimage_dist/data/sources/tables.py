"""Text, parquet and npy tables read in chunks."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from cimage_dist.data.checks import Array
from cimage_dist.data.sources.npz import readable
from cimage_dist.data.sources.raw import CHUNK_EDGES, CHUNK_VALUES, row_chunks
from cimage_dist.errors import UserError

_ENDS = (("src", "dst"), ("source", "target"), ("from", "to"), ("u", "v"), ("row", "col"))
_NODE_COLUMNS = {"node", "id", "node_id", "label", "labels", "y", "class", "split", "splits"}


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
            raise UserError(f"{path} is empty.") from None
        except (ParserError, ArrowException) as error:
            raise UserError(
                f"{path} cannot be read as {kind_of(path)} ({' '.join(str(error).split())}). "
                "Repair or replace it."
            ) from None


def _first_lines(path: Path, count: int = 1, comments: bool = False) -> list[list[str]]:
    """The first lines, split into cells; with `comments`, lines that start with # do not count."""
    opener: Callable[..., Any] = gzip.open if path.name.endswith(".gz") else open
    separator = {"csv": ",", "tsv": "\t"}.get(kind_of(path))
    lines: list[list[str]] = []
    with readable(path), opener(path, "rt") as file:
        for line in file:
            if not (comments and line.startswith("#")):
                lines.append(
                    [cell.strip().strip('"') for cell in line.rstrip("\r\n").split(separator)]
                )
            if len(lines) == count:
                break
    return lines


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def text_frames(
    path: Path, header: bool, rows: int, columns: list[int] | None = None, **options: Any
) -> Iterator[Any]:
    """pandas frames of at most `rows` rows."""
    import pandas as pd

    separator = {"csv": ",", "tsv": "\t"}.get(kind_of(path), r"\s+")
    with (
        readable_table(path),
        pd.read_csv(
            path,
            sep=separator,
            header=0 if header else None,
            chunksize=rows,
            usecols=columns,
            low_memory=False,
            **options,
        ) as reader,
    ):
        yield from reader


def _edge_columns(names: Sequence[str], path: Path) -> tuple[int, int]:
    """Positions of the two ends: by usual names, else the first two columns."""
    if len(names) < 2:
        raise UserError(
            f"{path}: an edge needs two columns (source and target node id); found {len(names)}."
        )
    lower = [str(name).lower() for name in names]
    for a, b in _ENDS:
        if a in lower and b in lower:
            return lower.index(a), lower.index(b)
    return 0, 1


def text_edges(path: Path) -> Iterator[tuple[Array, Array]]:
    """csv, tsv or blank-separated txt; a header is recognised, `#` starts a comment, further
    columns are ignored.
    """
    lines = _first_lines(path, comments=True)
    if not lines:
        return
    header = not all(map(_is_number, lines[0][:2]))
    a, b = _edge_columns(lines[0] if header else [""] * len(lines[0]), path)
    # With two columns all are read, so that a longer line is an error and not cut short.
    columns = [a, b] if len(lines[0]) > 2 else None
    first, second = (0, 1) if a < b else (1, 0)
    for frame in text_frames(path, header, CHUNK_EDGES, columns, comment="#"):
        yield frame.iloc[:, first].to_numpy(), frame.iloc[:, second].to_numpy()


def parquet_edges(path: Path) -> Iterator[tuple[Array, Array]]:
    import pyarrow.parquet as pq

    with readable_table(path), pq.ParquetFile(path) as file:
        names = file.schema_arrow.names
        a, b = _edge_columns(names, path)
        for batch in file.iter_batches(CHUNK_EDGES, columns=[names[a], names[b]]):
            yield (
                batch.column(names[a]).to_numpy(zero_copy_only=False),
                batch.column(names[b]).to_numpy(zero_copy_only=False),
            )


def load_npy(path: Path) -> Array:
    """Memory-mapped where possible (an empty array cannot be)."""
    with readable(path):
        try:
            return np.load(path, mmap_mode="r", allow_pickle=False)
        except ValueError:
            return np.load(path, allow_pickle=False)


def text_matrix(path: Path) -> tuple[int, Callable[[], Iterator[Array]]]:
    """(rows, chunks) of a table of numbers, counted in a first pass."""
    lines = _first_lines(path)
    if not lines:
        raise UserError(f"{path} is empty.")
    header = not all(map(_is_number, filter(None, lines[0])))
    step = max(1, CHUNK_VALUES // max(1, len(lines[0])))
    rows = sum(len(frame) for frame in text_frames(path, header, step, [0]))

    def chunks() -> Iterator[Array]:
        for frame in text_frames(path, header, step):
            yield _numbers(frame.to_numpy(), path)

    return rows, chunks


def parquet_matrix(path: Path) -> tuple[int, Callable[[], Iterator[Array]]]:
    import pyarrow.parquet as pq

    with readable_table(path), pq.ParquetFile(path) as file:
        rows, names = file.metadata.num_rows, file.schema_arrow.names

    def chunks() -> Iterator[Array]:
        with readable_table(path), pq.ParquetFile(path) as file:
            for batch in file.iter_batches(max(1, CHUNK_VALUES // max(1, len(names)))):
                yield _numbers(
                    np.stack(
                        [column.to_numpy(zero_copy_only=False) for column in batch.columns], axis=1
                    ),
                    path,
                )

    return rows, chunks


def npy_matrix(path: Path) -> tuple[int, Callable[[], Iterator[Array]]]:
    matrix = load_npy(path)
    if matrix.ndim != 2:
        raise UserError(
            f"{path}: features must be a table [nodes, columns]; the array has shape "
            f"{matrix.shape}."
        )
    return len(matrix), lambda: row_chunks(matrix)


def _numbers(rows: Array, path: Path) -> Array:
    if rows.dtype.kind == "O":
        try:
            return rows.astype(np.float64)
        except (ValueError, TypeError) as error:
            raise UserError(f"{path}: features must be numbers ({error}).") from None
    return rows


def read_node_values(path: Path) -> tuple[Array | None, Array]:
    """(node ids or None, values) of a labels or splits table: one column in node order, or two
    columns (node id, value).
    """
    import pandas as pd

    if kind_of(path) == "npy":
        return None, np.asarray(load_npy(path))
    if kind_of(path) == "parquet":
        with readable_table(path):
            frame = pd.read_parquet(path)
    else:
        lines = _first_lines(path, 2)
        if not lines:
            raise UserError(f"{path} is empty.")
        named = lines[0][0].lower() in _NODE_COLUMNS
        header = named or (
            len(lines) > 1 and not _is_number(lines[0][-1]) and _is_number(lines[1][-1])
        )
        frame = pd.concat(text_frames(path, header, CHUNK_EDGES, skip_blank_lines=False))
    if frame.shape[1] not in (1, 2):
        raise UserError(
            f"{path} must have one column (a value per node, in node order) or two (node id, "
            f"value); it has {frame.shape[1]}."
        )
    values = frame.iloc[:, -1].to_numpy()
    return (None if frame.shape[1] == 1 else frame.iloc[:, 0].to_numpy()), values
