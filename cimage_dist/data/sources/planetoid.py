"""Cora, Citeseer and Pubmed from their raw `ind.*` files, without trusting the pickles (§2.2:
public split, row-normalised).
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from cimage_dist.config import DataConfig
from cimage_dist.data.checks import Array
from cimage_dist.data.sources.raw import (
    RawGraph,
    Source,
    edge_chunks,
    fetch_pyg,
    find_raw,
    row_chunks,
)
from cimage_dist.errors import UserError

FOLDERS = {"cora": "Cora", "citeseer": "Citeseer", "pubmed": "Pubmed"}
_PICKLES = ("x", "tx", "allx", "y", "ty", "ally", "graph")
_NUM_VAL = 500

# Everything these files need to rebuild arrays, sparse matrices and one dictionary. Old module
# names map to today's.
_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"): ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"): ("numpy", "ndarray"),
    ("numpy", "dtype"): ("numpy", "dtype"),
    ("scipy.sparse.csr", "csr_matrix"): ("scipy.sparse", "csr_matrix"),
    ("scipy.sparse._csr", "csr_matrix"): ("scipy.sparse", "csr_matrix"),
    ("collections", "defaultdict"): ("collections", "defaultdict"),
    ("__builtin__", "list"): ("builtins", "list"),
    ("builtins", "list"): ("builtins", "list"),
    ("_codecs", "encode"): ("_codecs", "encode"),
}


class _Unpickler(pickle.Unpickler):
    """Admits only the names above, so that a pickle can build data but run nothing."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise UserError(
                f"it asks for {module}.{name}, which no Planetoid file needs; the file is not "
                "what it claims to be and was not loaded"
            )
        return super().find_class(*_ALLOWED[module, name])


def read_pickle(path: Path) -> Any:
    """A Python 2 pickle of arrays, sparse matrices or lists."""
    try:
        with path.open("rb") as file:
            return _Unpickler(file, encoding="latin1").load()
    except UserError as error:
        raise UserError(
            f"Raw file {path} is refused: {error}. Replace it by the original."
        ) from None
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise UserError(
            f"Raw file {path} cannot be read ({type(error).__name__}: {error}). Replace it by "
            "the original."
        ) from None


def _matrix(path: Path) -> Any:
    """A csr matrix with its indices checked, or a dense array."""
    from scipy.sparse import csr_matrix, issparse

    value = read_pickle(path)
    try:
        if issparse(value):
            # Pickles restore the attributes as they are: rebuild, so that indices are checked
            # before compiled code sees them.
            value = csr_matrix((value.data, value.indices, value.indptr), shape=value.shape)
            value.check_format(full_check=True)
        elif not (isinstance(value, np.ndarray) and value.ndim == 2 and value.dtype.kind in "iuf"):
            raise ValueError(f"a matrix was expected, not {type(value).__name__}")
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"Raw file {path} does not hold a valid matrix ({error}). Replace it by the original."
        ) from None
    return value


def _adjacency(path: Path) -> tuple[Array, Array]:
    graph = read_pickle(path)
    if not isinstance(graph, Mapping):
        raise UserError(
            f"Raw file {path} should hold a dictionary of neighbour lists, not "
            f"{type(graph).__name__}. Replace it by the original."
        )
    try:
        ids = np.fromiter(graph.keys(), dtype=np.int64, count=len(graph))
        lengths = np.fromiter(map(len, graph.values()), dtype=np.int64, count=len(graph))
        return np.repeat(ids, lengths), np.fromiter(
            chain.from_iterable(graph.values()), dtype=np.int64, count=int(lengths.sum())
        )
    except (TypeError, ValueError) as error:
        raise UserError(
            f"Raw file {path} holds neighbour lists that are not node ids ({error}). Replace it "
            "by the original."
        ) from None


def load(data: DataConfig) -> RawGraph:
    """Rows of `allx`, then the test rows at the places `test.index` names.

    Citeseer's test range has gaps (15 papers known only by links): these get zero features and no
    label (-1), so that they are in no split.
    """
    from scipy.sparse import csr_matrix, vstack

    name = data.name
    names = [f"ind.{name}.{part}" for part in (*_PICKLES, "test.index")]
    folder = find_raw(data, f"Planetoid/{FOLDERS[name]}/raw", names, fetch_pyg("Planetoid"))
    part = {key: _matrix(folder / f"ind.{name}.{key}") for key in _PICKLES if key != "graph"}
    index_file = folder / f"ind.{name}.test.index"
    try:
        test = np.loadtxt(index_file, dtype=np.int64, ndmin=1)
    except ValueError as error:
        raise UserError(
            f"Raw file {index_file} is not a list of node ids ({error}). Replace it by the "
            "original."
        ) from None
    known = part["allx"].shape[0]
    if (
        test.size != part["tx"].shape[0]
        or test.size == 0
        or test.min() != known
        or part["ally"].shape[0] != known
        or part["ty"].shape[0] != test.size
    ):
        raise UserError(
            f"Raw files in {folder} do not belong together: allx/ally have "
            f"{known}/{part['ally'].shape[0]} rows, "
            f"tx/ty {part['tx'].shape[0]}/{part['ty'].shape[0]}, "
            f"test.index {test.size}. Replace them by the originals."
        )
    num_nodes = int(test.max()) + 1
    # Line i of test.index names the node of test row i, so scattering rows to these places restores
    # the order.
    scatter = csr_matrix(
        (np.ones(test.size, dtype=np.float32), (test - known, np.arange(test.size))),
        shape=(num_nodes - known, test.size),
    )
    x = vstack([csr_matrix(part["allx"]), scatter @ csr_matrix(part["tx"])]).tocsr()
    y = np.full(num_nodes, -1, dtype=np.int64)
    y[:known] = np.asarray(part["ally"]).argmax(axis=1)
    y[test] = np.asarray(part["ty"]).argmax(axis=1)
    src, dst = _adjacency(folder / f"ind.{name}.graph")
    train = part["y"].shape[0]
    masks = {key: np.zeros(num_nodes, dtype=bool) for key in ("train", "val", "test")}
    masks["train"][:train] = True
    masks["val"][train : train + _NUM_VAL] = True
    masks["test"][test] = True
    return RawGraph(
        num_nodes=num_nodes,
        edges=lambda: edge_chunks(src, dst),
        features=lambda: row_chunks(x),
        labels=y,
        masks=masks,
        files=[folder / n for n in names],
    )


# Citeseer, revision 1: its padding nodes have no label.
SOURCES = {
    name: Source(load, normalize="row", revision=int(name == "citeseer")) for name in FOLDERS
}
