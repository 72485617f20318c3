"""Nearest neighbours of nodes in an embedding, and the embedding in the files other tools read;
both block by block, so that it need not fit into memory, and by the user's own ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cimage_dist.data.store import Graph
from cimage_dist.errors import UserError
from cimage_dist.io import artifacts
from cimage_dist.io.checkpoint import RowFiles
from cimage_dist.pipeline.embedding import find_nodes
from cimage_dist.pipeline.evaluation import as_graph, check_embedding

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

_BLOCK_VALUES = 1 << 24  # of a block of rows: 64 MB
Matrix = NDArray[np.float32] | RowFiles


def neighbors(z: Any, graph: Any, ids: Any, k: int = 10) -> pd.DataFrame:
    """The `k` nodes nearest to each of `ids` by the cosine of their rows in z [N, D], exactly.

    A frame with the columns id, rank, neighbor, cosine and linked (whether the two share an edge).
    Ids are those of the graph's files, or row numbers where it has none.
    """
    import pandas as pd

    graph = _known(graph)
    z = _matrix(z, graph)
    if k < 1:
        raise UserError(f"k must be at least 1; got {k}.")
    asked = np.atleast_1d(np.asarray(ids))
    if graph.ids is None and asked.dtype.kind == "U":
        try:
            asked = asked.astype(np.int64)
        except ValueError:
            raise UserError(
                f"Nodes of graph {graph.name!r} are numbered from 0 to {graph.num_nodes - 1:,}; "
                f"got {asked.tolist()}."
            ) from None
    rows = find_nodes(asked, graph.num_nodes, graph.ids, "the ids asked for")
    found, cosine = nearest(z, rows, k)
    count = found.shape[1]
    return pd.DataFrame(
        {
            "id": np.repeat(_names(graph, rows), count),
            "rank": np.tile(np.arange(1, count + 1), len(rows)),
            "neighbor": _names(graph, found.ravel()),
            "cosine": cosine.ravel(),
            "linked": np.concatenate(
                [
                    np.isin(near, _adjacent(graph, row))
                    for row, near in zip(rows, found, strict=True)
                ]
            ),
        }
    )


def _known(graph: Any) -> Graph:
    from cimage_dist.config import DataConfig

    return as_graph(graph, DataConfig())


def _adjacent(graph: Graph, row: int) -> NDArray[Any]:
    return np.asarray(graph.indices[graph.indptr[row] : graph.indptr[row + 1]])


def _names(graph: Graph, rows: NDArray[np.int64]) -> NDArray[Any]:
    """What the user calls the nodes of these rows."""
    if graph.ids is None:
        return rows
    return np.asarray(graph.ids.values.take(rows).to_numpy(zero_copy_only=False))


def node_names(graph: Graph, rows: NDArray[np.int64]) -> list[str]:
    """The same as text."""
    return [str(name) for name in _names(graph, rows).tolist()]


def _matrix(z: Any, graph: Graph) -> Matrix:
    return z if isinstance(z, RowFiles) else check_embedding(z, graph).numpy()


def blocks(z: Matrix) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """(number of the first row, rows) of all of z [N, D]."""
    parts: Iterable[tuple[int, NDArray[np.float32]]] = (
        ((z.range_of(i).start, z.part(i)) for i in range(len(z)))
        if isinstance(z, RowFiles)
        else [(0, z)]
    )
    for first, part in parts:
        step = max(1, _BLOCK_VALUES // max(1, part.shape[1]))
        for start in range(0, len(part), step):
            yield first + start, np.asarray(part[start : start + step])


def _unit(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


def nearest(
    z: Matrix, rows: NDArray[np.int64], k: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """(rows int64 [q, k], cosines [q, k]) of the nodes nearest to `rows` [q], the nearest first and
    without the node itself; of equal ones the lower row first.
    """
    total = z.rows if isinstance(z, RowFiles) else len(z)
    k = min(k, total - 1)
    order, back = np.unique(rows, return_inverse=True)
    queries = _unit((z.take(order) if isinstance(z, RowFiles) else z[order])[back])
    best = np.full((len(rows), k + 1), -1, np.int64)
    scores = np.full((len(rows), k + 1), -np.inf, np.float32)
    for first, block in blocks(z):
        near, cosine = _top(queries, _unit(block), min(k + 1, len(block)))
        best = np.concatenate([best, near + first], axis=1)
        scores = np.concatenate([scores, cosine], axis=1)
        scores[best == rows[:, None]] = -np.inf
        kept = np.lexsort((best, -scores), axis=1)[:, : k + 1]
        best = np.take_along_axis(best, kept, axis=1)
        scores = np.take_along_axis(scores, kept, axis=1)
    return best[:, :k], np.clip(scores[:, :k], -1, 1)


def _top(
    queries: NDArray[np.float32], block: NDArray[np.float32], k: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The k rows of a block with the largest products, by FAISS where it is installed."""
    try:
        import faiss
    except ImportError:
        products = queries @ block.T
        near = np.argpartition(-products, k - 1, axis=1)[:, :k]
        return near, np.take_along_axis(products, near, axis=1)
    cosine, near = faiss.knn(queries, block, k, metric=faiss.METRIC_INNER_PRODUCT)
    return near, cosine


def export(z: Any, graph: Any, path: str | Path) -> list[Path]:
    """Write an embedding z [N, D] for other tools; the ending of `path` says how.

    .parquet, .csv, .csv.gz: a table of id, z0, z1, ...; .npy: the matrix; .tsv: TensorBoard's
    projector; .faiss: an index of the cosines. Returns the files written: where a format has no
    room for ids, they are in a csv file beside it.
    """
    graph, path = _known(graph), Path(path)
    kind = check_ending(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return _WRITERS[kind](_matrix(z, graph), graph, path)


def check_ending(path: Path) -> str:
    """The ending of a file that `export` can write."""
    kind = next((kind for kind in _WRITERS if path.name.endswith(kind)), None)
    if kind is None:
        raise UserError(
            f"{path} does not say what to write; end it with one of {', '.join(_WRITERS)}."
        )
    if path.is_dir():
        raise UserError(f"{path} is a folder. Choose another name for the file.")
    return kind


def _tables(z: Matrix, graph: Graph) -> Iterator[pa.Table]:
    import pyarrow as pa

    for first, rows in blocks(z):
        ids = _names(graph, np.arange(first, first + len(rows)))
        columns = {f"z{i}": pa.array(column) for i, column in enumerate(rows.T.copy())}
        yield pa.table({"id": pa.array(ids)} | columns)


def _write_tables(z: Matrix, graph: Graph, path: Path, open_writer: Callable[..., Any]) -> None:
    tables = _tables(z, graph)
    first = next(tables)
    with open_writer(path, first.schema) as writer:
        writer.write_table(first)
        for table in tables:
            writer.write_table(table)


def _parquet(z: Matrix, graph: Graph, path: Path) -> list[Path]:
    from pyarrow.parquet import ParquetWriter

    with artifacts.renamed(path) as tmp:
        _write_tables(z, graph, tmp, ParquetWriter)
    return [path]


def _csv(z: Matrix, graph: Graph, path: Path) -> list[Path]:
    import pyarrow as pa
    from pyarrow.csv import CSVWriter

    kind = "gzip" if path.suffix == ".gz" else None
    with artifacts.renamed(path) as tmp, pa.output_stream(tmp, compression=kind) as out:
        _write_tables(z, graph, out, CSVWriter)
    return [path]


def _npy(z: Matrix, graph: Graph, path: Path) -> list[Path]:
    shape = (z.rows, z.width) if isinstance(z, RowFiles) else z.shape
    with artifacts.renamed(path) as tmp:
        out = np.lib.format.open_memmap(tmp, "w+", np.float32, shape)
        for first, rows in blocks(z):
            out[first : first + len(rows)] = rows
        out.flush()
    return [path, *_ids(graph, path)]


def _ids(graph: Graph, path: Path) -> list[Path]:
    """The id of every row in a csv file beside `path`; none for a graph that has no ids."""
    if graph.ids is None:
        return []
    beside = path.with_name(f"{path.stem}-ids.csv")
    return _text(beside, ["id"], [graph.ids.to_numpy().tolist()])


def _text(path: Path, names: Sequence[str], columns: Sequence[Sequence[Any]]) -> list[Path]:
    import pandas as pd

    frame = pd.DataFrame(dict(zip(names, columns, strict=True)))
    with artifacts.renamed(path) as tmp:
        frame.to_csv(tmp, index=False, sep="\t" if path.suffix == ".tsv" else ",")
    return [path]


def _projector(z: Matrix, graph: Graph, path: Path) -> list[Path]:
    """Vectors, what is known of each node, and the file by which TensorBoard finds both."""
    facts = {
        "id": _names(graph, np.arange(graph.num_nodes)).tolist(),
        "degree": np.diff(graph.indptr).tolist(),
    }
    if graph.y is not None:
        names = class_names(graph)
        facts["label"] = [names[v] if v >= 0 else "" for v in graph.y.tolist()]
    about = path.with_name(f"{path.stem}-metadata.tsv")
    with artifacts.renamed(path) as tmp, tmp.open("w") as out:
        for _, rows in blocks(z):
            np.savetxt(out, rows, fmt="%.6g", delimiter="\t")
    _text(about, list(facts), list(facts.values()))
    board = path.with_name("projector_config.pbtxt")
    lines = (
        f'tensor_name: "{graph.name}"\ntensor_path: "{path.name}"\nmetadata_path: "{about.name}"'
    )
    artifacts.write_text(board, f"embeddings {{\n{lines}\n}}\n")
    return [path, about, board]


def class_names(graph: Graph) -> list[str]:
    """What the user's files call the classes, else their numbers."""
    known = graph.manifest.get("notes", {}).get("class_names")
    return [str(name) for name in known or range(graph.num_classes)]


def _faiss(z: Matrix, graph: Graph, path: Path) -> list[Path]:
    try:
        import faiss
    except ImportError:
        raise UserError(
            f"{path} needs FAISS, which is not installed: `pip install faiss-cpu`, or write "
            ".parquet, .csv, .npy or .tsv."
        ) from None
    index = faiss.IndexFlatIP(z.width if isinstance(z, RowFiles) else z.shape[1])
    for _, rows in blocks(z):
        index.add(_unit(rows))
    with artifacts.renamed(path) as tmp:
        faiss.write_index(index, str(tmp))
    return [path, *_ids(graph, path)]


_WRITERS: dict[str, Callable[[Matrix, Graph, Path], list[Path]]] = {
    ".parquet": _parquet,
    ".csv": _csv,
    ".csv.gz": _csv,
    ".npy": _npy,
    ".tsv": _projector,
    ".faiss": _faiss,
}
