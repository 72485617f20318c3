"""What a source hands over, and where raw files are found."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
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
    feature_hint: str = "this source has none"
    """Why there are no features, for the error message."""
    ids: NodeIds | None = None
    """What the user calls the nodes; None: by their row numbers."""
    weighted_edges: Callable[[], Iterator[tuple[Array, ...]]] | None = None
    """The edges once more with a weight each, where weights are to be kept."""


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
    how = (
        f"Put the files there, or point {ROOT_VARIABLE} (or data.root) at a folder that has "
        f"{folder}/."
    )
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
    except (
        Exception
    ) as error:  # network libraries raise many types; all mean that the file could not be had
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
