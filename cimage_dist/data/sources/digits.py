"""The embedded real graph: scikit-learn's 1,797 handwritten digits joined to their ten nearest
neighbours.
"""

from __future__ import annotations

from cimage_dist.config import DataConfig
from cimage_dist.data.sources.raw import RawGraph, Source, edge_chunks, row_chunks

NEIGHBOURS = 10


def load(data: DataConfig) -> RawGraph:
    """8×8 pixels scaled to [0, 1]; an edge where either end is among the other's ten nearest by
    Euclidean distance.
    """
    from sklearn.datasets import load_digits
    from sklearn.neighbors import kneighbors_graph

    pixels, labels = load_digits(return_X_y=True)
    x = pixels / 16.0
    # Exact search on one thread: ties and summation order are the same everywhere.
    near = kneighbors_graph(x, NEIGHBOURS, include_self=False, n_jobs=1).tocoo()
    return RawGraph(
        num_nodes=len(x),
        edges=lambda: edge_chunks(near.row, near.col),
        features=lambda: row_chunks(x),
        labels=labels,
        notes={"origin": "sklearn.datasets.load_digits, symmetric 10-nearest-neighbour graph"},
    )


SOURCES = {"digits": Source(load)}
