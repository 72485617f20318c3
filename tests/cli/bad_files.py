"""Small graphs in files of every kind, for tests of what is said about mistakes in them."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import scipy.sparse as sp

Files = Mapping[str, str | bytes | None]

NAMES = ["ann", "bob", "cat", "dan", "eve", "fay", "gus", "hal"]
PAIRS = list(zip(NAMES, NAMES[1:] + NAMES[:1], strict=True))
RING = np.stack([np.arange(8), (np.arange(8) + 1) % 8], axis=1)
X = np.arange(16.0).reshape(8, 2) * [1, -0.5] + 0.5


def table(header: str, rows: list[tuple[Any, ...]], mark: str = ",") -> str:
    lines = [header.split(","), *(map(str, row) for row in rows)] if header else rows
    return "".join(mark.join(map(str, line)) + "\n" for line in lines)


EDGES = table("source,target", PAIRS)
FEATURES = table("id,age,size", [(n, *row) for n, row in zip(NAMES, X, strict=True)])
LABELS = table("id,label", [(n, "xy"[i % 2]) for i, n in enumerate(NAMES)])


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def npz(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def sparse(matrix: Any) -> bytes:
    file = io.BytesIO()
    sp.save_npz(file, sp.csr_matrix(matrix) if isinstance(matrix, np.ndarray) else matrix)
    return file.getvalue()


def parquet(**columns: Any) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


TEXT: Files = {"edges.csv": EDGES, "features.csv": FEATURES, "labels.csv": LABELS}
ARRAYS: Files = {"edges.npy": npy(RING), "features.npy": npy(X), "labels.npy": npy(RING[:, 0] % 2)}


def write(folder: Path, files: Files) -> None:
    """A name that ends in / is a folder; None leaves a file out."""
    folder.mkdir()
    for name, content in files.items():
        if name.endswith("/"):
            (folder / name).mkdir()
        elif content is not None:
            data = content.encode() if isinstance(content, str) else content
            (folder / name).write_bytes(data)
