"""What a source hands over, where raw files are found, and arrays inside .npz archives, whole or
streamed, never with pickles.
"""

from __future__ import annotations

import os
import socket
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cimage_dist.config import DataConfig
from cimage_dist.data.checks import Array
from cimage_dist.data.ids import NodeIds
from cimage_dist.errors import UserError

ROOT_VARIABLE = "CIMAGE_DATA_ROOT"
CHUNK_VALUES = 1 << 22
"""Values per feature chunk (16 MB of float32)."""
CHUNK_EDGES = 1 << 21
"""Edges per chunk."""
_TIMEOUT_SECONDS = 30.0


@dataclass
class RawGraph:
    """A graph as its source gives it: edges and features come in chunks, so that neither need fit
    into memory.
    """

    num_nodes: int
    edges: Callable[[], Iterator[tuple[Array, Array]]]
    features: Callable[[], Iterator[Array]] | None = None
    labels: Array | None = None
    masks: dict[str, Array] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)
    """Raw files; their checksums go into the manifest."""
    notes: dict[str, Any] = field(default_factory=dict)
    """Facts about the data for the manifest, e.g. which columns are planted."""
    are_dense: bool = False
    """Whether features are known to be dense, so that nothing needs to be kept to find out."""
    feature_hint: str = "this source has none"
    """Why there are no features, for the error message."""
    ids: NodeIds | None = None
    """What the user calls the nodes; None: by their row numbers."""
    weighted_edges: Callable[[], Iterator[tuple[Array, ...]]] | None = None
    """The edges once more with a weight each, where weights are to be kept."""


def in_memory(src: Array, dst: Array, x: Any, labels: Array, **more: Any) -> RawGraph:
    """A graph that fits into memory; x [N, F] may be a scipy sparse matrix."""
    edges, features = (lambda: edge_chunks(src, dst)), (lambda: row_chunks(x))
    return RawGraph(x.shape[0], edges, features, labels, **more)


@dataclass(frozen=True)
class Source:
    """A registered dataset: how to load it and whether rows are normalised unless data.normalize
    says otherwise.
    """

    load: Callable[[DataConfig], RawGraph]
    normalize: str = "none"
    revision: int = 0
    """Raised when the same raw files give another graph than before: stores made earlier are then
    built again.
    """


def row_chunks(matrix: Any, values: int = CHUNK_VALUES) -> Iterator[Array]:
    """Dense row blocks of an array or scipy sparse matrix."""
    step = max(1, values // max(1, int(matrix.shape[1])))
    for start in range(0, matrix.shape[0], step):
        block = matrix[start : start + step]
        yield block.toarray() if hasattr(block, "toarray") else np.asarray(block)


def edge_chunks(src: Array, dst: Array, size: int = CHUNK_EDGES) -> Iterator[tuple[Array, Array]]:
    for start in range(0, len(src), size):
        yield src[start : start + size], dst[start : start + size]


def raw_roots(data: DataConfig) -> list[Path]:
    """Folders searched for raw files, in order; downloads go into the last one."""
    if data.root:
        return [Path(data.root)]
    own = Path(data.store_dir) / "raw"
    variable = os.environ.get(ROOT_VARIABLE)
    return [Path(variable), own] if variable else [own]


def find_raw(
    data: DataConfig,
    folder: str,
    names: Sequence[str],
    fetch: Callable[[str, Path], None] | None = None,
) -> Path:
    """The folder that holds all raw files `names`; with none, `fetch(name, into)` gets each of
    them, once and whole.

    Raw files that are already there are never downloaded again.
    """
    roots = raw_roots(data)
    for root in roots:
        if all((root / folder / name).is_file() for name in names):
            return root / folder
    target = roots[-1] / folder
    expected = f"Expected {', '.join(names)} in {' or '.join(str(root / folder) for root in roots)}"
    where = f"point {ROOT_VARIABLE} (or data.root) at a folder that has {folder}/"
    how = f"Put the files there, or {where}."
    if fetch is None:
        raise UserError(f"Raw files of {data.name!r} not found. {expected}. {how}")
    patience = socket.getdefaulttimeout()
    try:
        socket.setdefaulttimeout(_TIMEOUT_SECONDS)  # the download helpers wait for ever otherwise
        target.mkdir(parents=True, exist_ok=True)
        for name in names:
            if not (target / name).is_file():
                fetch(name, target)
    except UserError:
        raise
    # Network libraries raise many types; all mean that the file could not be had.
    except Exception as error:
        raise UserError(
            f"Raw files of {data.name!r} are not here and the download failed "
            f"({type(error).__name__}: {error}). {expected}. {how}"
        ) from None
    finally:
        socket.setdefaulttimeout(patience)
    return target


def fetch_pyg(dataset: str) -> Callable[[str, Path], None]:
    """A fetcher of the raw files of a PyG dataset class; a broken download leaves no file under the
    final name.
    """

    def fetch(name: str, into: Path) -> None:
        import torch_geometric.datasets
        from torch_geometric.data import download_url

        base = getattr(torch_geometric.datasets, dataset).url.rstrip("/")
        partial = f"{name}.part-{os.getpid()}"
        try:
            download_url(f"{base}/{name}", str(into), log=False, filename=partial)
            (into / partial).replace(into / name)
        finally:
            (into / partial).unlink(missing_ok=True)

    return fetch


_BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, OSError)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turns whatever a damaged archive raises into one sentence that names the file."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{path} does not exist.") from None
    except _BROKEN as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise UserError(
            f"{path} cannot be read ({_known_content(path) or reason}); it is truncated, damaged "
            "or not the format its name says. Replace it."
        ) from None


# How files begin that are often found under another name.
_BEGINNINGS = (
    (b"\x1f\x8b", ".gz", "it is compressed by gzip: add .gz to its name"),
    (b"PK\x03\x04", ".npz", "it is a zip archive or a spreadsheet, not text: save it as csv"),
    (b"\xff\xfe", "", "its text is UTF-16: save it as UTF-8"),
    (b"\xfe\xff", "", "its text is UTF-16: save it as UTF-8"),
    (b"version https://git-lfs", "", "it is a pointer of Git LFS: run git lfs pull"),
    (b"<!DOCTYPE", "", "it is a web page"),
    (b"<html", "", "it is a web page"),
    (b"PAR1", ".parquet", "it is a parquet file: name it .parquet"),
    (b"\x93NUMPY", ".npy", "it is an array of numpy: name it .npy"),
)


def _known_content(path: Path) -> str | None:
    """What the file is instead of what its name says, where its first bytes show it."""
    try:
        with path.open("rb") as file:
            first = file.read(4096)
    except OSError:
        return None
    for beginning, ending, what in _BEGINNINGS:
        if first.startswith(beginning) and not (ending and path.name.endswith(ending)):
            return what
    if path.name.endswith((".csv", ".tsv", ".txt")):
        try:
            first.decode("utf-8", "strict")
        except UnicodeDecodeError as error:
            if error.start < len(first) - 3:  # else a character is cut in two
                return f"byte {error.start:,} is no UTF-8 text: save it as UTF-8"
    return None


def check_text(path: Path) -> None:
    """Refuse a text table that is known to be something else, before its cells are looked at."""
    if found := _known_content(path):
        raise UserError(f"{path} cannot be read as a table: {found}.")


@contextmanager
def open_npz(path: Path) -> Iterator[Any]:
    with readable(path), np.load(path, allow_pickle=False) as archive:
        if not hasattr(archive, "files"):
            raise UserError(f"{path} is not an .npz archive.")
        yield archive


def read_member(archive: Any, key: str, path: Path) -> Array:
    if key not in archive.files:
        raise _no_member(path, key, archive.files)
    with readable(path):
        return np.asarray(archive[key])


def load_sparse(path: Path) -> Any:
    """A scipy sparse matrix in csr form, its indices checked."""
    from scipy.sparse import load_npz

    with readable(path):
        matrix = load_npz(path).tocsr()
        matrix.check_format(full_check=True)
    return matrix


def _header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version, form = np.lib.format.read_magic(file), np.lib.format
    read = form.read_array_header_1_0 if version == (1, 0) else form.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("arrays of Python objects are not accepted")
    return shape, fortran, dtype


def _no_member(path: Path, key: str, names: list[str]) -> UserError:
    return UserError(
        f"{path} has no array {key!r}; it holds {', '.join(names) or 'nothing'}. Save the array "
        f"under that name: np.savez(file, {key}=...)."
    )


@contextmanager
def _open_member(path: Path, key: str) -> Iterator[tuple[Any, ...]]:
    """(archive, file at the first value, shape, whether in column order, dtype) of an array."""
    with readable(path), zipfile.ZipFile(path) as archive:
        if f"{key}.npy" not in archive.namelist():
            names = [name.removesuffix(".npy") for name in archive.namelist()]
            raise _no_member(path, key, names)
        with archive.open(f"{key}.npy") as file:
            yield archive, file, *_header(file)


def member_shape(path: Path, key: str) -> tuple[int, ...]:
    with _open_member(path, key) as (_, _, shape, _, _):
        return shape


def _read(file: Any, count: int, dtype: np.dtype[Any]) -> Array:
    content = file.read(count * dtype.itemsize)
    if len(content) != count * dtype.itemsize:
        raise EOFError("the array ends too early")
    return np.frombuffer(content, dtype=dtype)


def stream_rows(path: Path, key: str) -> Iterator[Array]:
    """Row chunks of a two-dimensional member, decompressed as they are needed."""
    with _open_member(path, key) as (_, file, shape, fortran, dtype):
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
    with _open_member(path, key) as (archive, sources, shape, fortran, dtype):
        if len(shape) != 2 or shape[0] != 2:
            raise UserError(f"{path}: array {key!r} must have shape [2, edges]; it has {shape}.")
        sizes = [min(CHUNK_EDGES, shape[1] - start) for start in range(0, shape[1], CHUNK_EDGES)]
        if fortran:
            for size in sizes:
                pairs = _read(sources, 2 * size, dtype).reshape(size, 2)
                yield pairs[:, 0], pairs[:, 1]
            return
        with archive.open(f"{key}.npy") as targets:
            _header(targets)
            targets.seek(shape[1] * dtype.itemsize, 1)
            for size in sizes:
                yield _read(sources, size, dtype), _read(targets, size, dtype)
