"""Amazon Photo and Computers from the original npz files (§2.2: random 10/10/80 split)."""

from __future__ import annotations

from cimage_dist.config import DataConfig
from cimage_dist.data.sources.npz import open_npz, read_member
from cimage_dist.data.sources.raw import (
    RawGraph,
    Source,
    edge_chunks,
    fetch_pyg,
    find_raw,
    row_chunks,
)
from cimage_dist.errors import UserError

FOLDERS = {"photo": "Photo", "computers": "Computers"}


def load(data: DataConfig) -> RawGraph:
    """Bag-of-words features made binary, as PyG does."""
    from scipy.sparse import csr_matrix

    name = f"amazon_electronics_{data.name}.npz"
    folder = find_raw(data, f"Amazon/{FOLDERS[data.name]}/raw", [name], fetch_pyg("Amazon"))
    path = folder / name
    with open_npz(path) as archive:
        parts = {
            key: [
                read_member(archive, f"{key}_{field}", path)
                for field in ("data", "indices", "indptr", "shape")
            ]
            for key in ("adj", "attr")
        }
        labels = read_member(archive, "labels", path)
    try:
        matrices = {
            key: csr_matrix((values, indices, indptr), shape=tuple(shape))
            for key, (values, indices, indptr, shape) in parts.items()
        }
        for matrix in matrices.values():
            matrix.check_format(full_check=True)
    except (ValueError, TypeError) as error:
        raise UserError(
            f"Raw file {path} does not hold valid sparse matrices ({error}). Replace it by the "
            "original."
        ) from None
    x, adjacency = matrices["attr"], matrices["adj"].tocoo()
    x.data[x.data > 0] = 1
    return RawGraph(
        num_nodes=x.shape[0],
        edges=lambda: edge_chunks(adjacency.row, adjacency.col),
        features=lambda: row_chunks(x),
        labels=labels,
        files=[path],
    )


SOURCES = {name: Source(load) for name in FOLDERS}
