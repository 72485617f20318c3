"""Arrays inside .npz archives, whole or streamed, never with pickles."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from cimage_dist.data.checks import Array
from cimage_dist.data.sources.raw import CHUNK_EDGES, CHUNK_VALUES
from cimage_dist.errors import UserError

_BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, OSError)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turns whatever a damaged archive raises into one sentence that names the file."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{path} does not exist.") from None
    except _BROKEN as error:
        raise UserError(
            f"{path} cannot be read ({type(error).__name__}: {' '.join(str(error).split())}); "
            "it is truncated, damaged or not the format its name says. Replace it."
        ) from None


@contextmanager
def open_npz(path: Path) -> Iterator[Any]:
    with readable(path), np.load(path, allow_pickle=False) as archive:
        if not hasattr(archive, "files"):
            raise UserError(f"{path} is not an .npz archive.")
        yield archive


def read_member(archive: Any, key: str, path: Path) -> Array:
    if key not in archive.files:
        raise UserError(
            f"{path} has no array {key!r}; it holds {', '.join(archive.files) or 'nothing'}."
        )
    with readable(path):
        return np.asarray(archive[key])


def load_sparse(path: Path) -> Any:
    """A scipy sparse matrix in csr form, its indices checked."""
    from scipy.sparse import load_npz

    with readable(path):
        matrix = load_npz(path).tocsr()
        matrix.check_format(full_check=True)
    return matrix


def _header(file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    read = (
        np.lib.format.read_array_header_1_0
        if version == (1, 0)
        else np.lib.format.read_array_header_2_0
    )
    shape, fortran, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("arrays of Python objects are not accepted")
    return shape, fortran, dtype


@contextmanager
def _member(
    archive: zipfile.ZipFile, key: str, path: Path
) -> Iterator[tuple[BinaryIO, tuple[int, ...], bool, np.dtype[Any]]]:
    if f"{key}.npy" not in archive.namelist():
        raise UserError(
            f"{path} has no array {key!r}; it holds "
            f"{', '.join(name.removesuffix('.npy') for name in archive.namelist()) or 'nothing'}."
        )
    with archive.open(f"{key}.npy") as file:
        shape, fortran, dtype = _header(file)  # type: ignore[arg-type]
        yield file, shape, fortran, dtype  # type: ignore[misc]


def member_shape(path: Path, key: str) -> tuple[int, ...]:
    with (
        readable(path),
        zipfile.ZipFile(path) as archive,
        _member(archive, key, path) as (_, shape, _, _),
    ):
        return shape


def _read(file: BinaryIO, count: int, dtype: np.dtype[Any]) -> Array:
    content = file.read(count * dtype.itemsize)
    if len(content) != count * dtype.itemsize:
        raise EOFError("the array ends too early")
    return np.frombuffer(content, dtype=dtype)


def stream_rows(path: Path, key: str) -> Iterator[Array]:
    """Row chunks of a two-dimensional member, decompressed as they are needed."""
    with (
        readable(path),
        zipfile.ZipFile(path) as archive,
        _member(archive, key, path) as (file, shape, fortran, dtype),
    ):
        if len(shape) != 2 or (fortran and min(shape) > 1):
            raise UserError(
                f"{path}: array {key!r} must be a table stored row by row; it has shape "
                f"{shape}{' in column order' if fortran else ''}."
            )
        step = max(1, CHUNK_VALUES // max(1, shape[1]))
        for start in range(0, shape[0], step):
            rows = min(step, shape[0] - start)
            yield _read(file, rows * shape[1], dtype).reshape(rows, shape[1])


def stream_edges(path: Path, key: str) -> Iterator[tuple[Array, Array]]:
    """Chunks of a [2, E] member. In row order the sources come first and the targets half a file
    later: two readers, one ahead.
    """
    with (
        readable(path),
        zipfile.ZipFile(path) as archive,
        _member(archive, key, path) as (sources, shape, fortran, dtype),
    ):
        if len(shape) != 2 or shape[0] != 2:
            raise UserError(f"{path}: array {key!r} must have shape [2, edges]; it has {shape}.")
        sizes = [min(CHUNK_EDGES, shape[1] - start) for start in range(0, shape[1], CHUNK_EDGES)]
        if fortran:
            for size in sizes:
                pairs = _read(sources, 2 * size, dtype).reshape(size, 2)
                yield pairs[:, 0], pairs[:, 1]
            return
        with _member(archive, key, path) as (targets, _, _, _):
            targets.seek(shape[1] * dtype.itemsize, 1)
            for size in sizes:
                yield _read(sources, size, dtype), _read(targets, size, dtype)
