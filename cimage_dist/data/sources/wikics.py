"""WikiCS from its data.json: 20 training/validation splits and one test set."""

from __future__ import annotations

import json
from itertools import chain

import numpy as np

from cimage_dist.config import DataConfig
from cimage_dist.data.sources.raw import (
    RawGraph,
    Source,
    edge_chunks,
    fetch_pyg,
    find_raw,
    row_chunks,
)
from cimage_dist.errors import UserError


def load(data: DataConfig) -> RawGraph:
    """Features, labels and links as PyG reads them; the early-stopping masks of the original are
    not used.
    """
    folder = find_raw(data, "WikiCS/raw", ["data.json"], fetch_pyg("WikiCS"))
    path = folder / "data.json"
    try:
        with path.open() as file:
            given = json.load(file)
        links = given["links"]
        src = np.repeat(
            np.arange(len(links)), np.fromiter(map(len, links), dtype=np.int64, count=len(links))
        )
        dst = np.fromiter(chain.from_iterable(links), dtype=np.int64, count=len(src))
        x = np.asarray(given["features"], dtype=np.float32)
        labels = np.asarray(given["labels"], dtype=np.int64)
        masks = {
            "train": np.asarray(given["train_masks"], dtype=bool).T,
            "val": np.asarray(given["val_masks"], dtype=bool).T,
            "test": np.asarray(given["test_mask"], dtype=bool),
        }
    except (ValueError, TypeError, KeyError, UnicodeDecodeError, OSError) as error:
        raise UserError(
            f"Raw file {path} cannot be read as WikiCS ({type(error).__name__}: {error}). "
            "Replace it by the original."
        ) from None
    return RawGraph(
        num_nodes=len(x),
        edges=lambda: edge_chunks(src, dst),
        features=lambda: row_chunks(x),
        labels=labels,
        masks=masks,
        files=[path],
    )


SOURCES = {"wikics": Source(load)}
