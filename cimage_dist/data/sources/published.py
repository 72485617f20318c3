"""Published graphs from their raw files: Cora, Citeseer and Pubmed (Planetoid's `ind.*` files,
without trusting the pickles; §2.2: public split, row-normalised), Amazon Photo and Computers (npz;
random 10/10/80 split), WikiCS (json: 20 training/validation splits and one test set), and OGB's
arxiv, products and papers100M, streamed.
"""

from __future__ import annotations

import json
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from cimage_dist.config import DataConfig
from cimage_dist.data.checks import Array, check_ids
from cimage_dist.data.sources import tables
from cimage_dist.data.sources.raw import (
    CHUNK_EDGES,
    CHUNK_VALUES,
    RawGraph,
    Source,
    fetch_pyg,
    find_raw,
    in_memory,
    open_npz,
    read_member,
    stream_edges,
    stream_rows,
)
from cimage_dist.errors import UserError

PLANETOID = {"cora": "Cora", "citeseer": "Citeseer", "pubmed": "Pubmed"}
AMAZON = {"photo": "Photo", "computers": "Computers"}
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


@contextmanager
def _original(path: Path, problem: str, *errors: type[Exception]) -> Iterator[None]:
    """`errors` mean that a raw file is not what it should be."""
    try:
        yield
    except UserError as error:
        raise UserError(
            f"Raw file {path} is refused: {error}. Replace it by the original."
        ) from None
    except errors as error:
        why = f"{type(error).__name__}: {error}"
        raise UserError(f"Raw file {path} {problem} ({why}). Replace it by the original.") from None


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
    # A damaged pickle can raise nearly anything.
    with _original(path, "cannot be read", Exception), path.open("rb") as file:
        return _Unpickler(file, encoding="latin1").load()


def _matrix(path: Path) -> Any:
    """A csr matrix with its indices checked, or a dense array."""
    from scipy.sparse import csr_matrix, issparse

    value = read_pickle(path)
    with _original(path, "does not hold a valid matrix", ValueError, TypeError, AttributeError):
        if issparse(value):
            # Pickles restore the attributes as they are: rebuild, so that indices are checked
            # before compiled code sees them.
            value = csr_matrix((value.data, value.indices, value.indptr), shape=value.shape)
            value.check_format(full_check=True)
        elif not (isinstance(value, np.ndarray) and value.ndim == 2 and value.dtype.kind in "iuf"):
            raise ValueError(f"a matrix was expected, not {type(value).__name__}")
    return value


def _adjacency(path: Path) -> tuple[Array, Array]:
    graph = read_pickle(path)
    if not isinstance(graph, Mapping):
        raise UserError(
            f"Raw file {path} should hold a dictionary of neighbour lists, not "
            f"{type(graph).__name__}. Replace it by the original."
        )
    with _original(path, "holds neighbour lists that are not node ids", TypeError, ValueError):
        ids = np.fromiter(graph.keys(), dtype=np.int64, count=len(graph))
        lengths, ends = _flat(list(graph.values()))
        return np.repeat(ids, lengths), ends


def _flat(lists: list[Any]) -> tuple[Array, Array]:
    """(length of each list, all their numbers one after another)."""
    lengths = np.fromiter(map(len, lists), dtype=np.int64, count=len(lists))
    total = int(lengths.sum())
    return lengths, np.fromiter(chain.from_iterable(lists), dtype=np.int64, count=total)


def load_planetoid(data: DataConfig) -> RawGraph:
    """Rows of `allx`, then the test rows at the places `test.index` names.

    Citeseer's test range has gaps (15 papers known only by links): these get zero features and no
    label (-1), so that they are in no split.
    """
    from scipy.sparse import csr_matrix, vstack

    name = data.name
    names = [f"ind.{name}.{part}" for part in (*_PICKLES, "test.index")]
    folder = find_raw(data, f"Planetoid/{PLANETOID[name]}/raw", names, fetch_pyg("Planetoid"))
    part = {key: _matrix(folder / f"ind.{name}.{key}") for key in _PICKLES if key != "graph"}
    index_file = folder / f"ind.{name}.test.index"
    with _original(index_file, "is not a list of node ids", ValueError):
        test = np.loadtxt(index_file, dtype=np.int64, ndmin=1)
    known, ally, tx, ty = (part[key].shape[0] for key in ("allx", "ally", "tx", "ty"))
    if not (test.size == tx == ty > 0 and test.min() == known == ally):
        raise UserError(
            f"Raw files in {folder} do not belong together: allx/ally have {known}/{ally} rows, "
            f"tx/ty {tx}/{ty}, test.index {test.size}. Replace them by the originals."
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
    return in_memory(src, dst, x, y, masks=masks, files=[folder / n for n in names])


def load_amazon(data: DataConfig) -> RawGraph:
    """Bag-of-words features made binary, as PyG does."""
    from scipy.sparse import csr_matrix

    name = f"amazon_electronics_{data.name}.npz"
    folder = find_raw(data, f"Amazon/{AMAZON[data.name]}/raw", [name], fetch_pyg("Amazon"))
    path = folder / name
    with open_npz(path) as archive:
        fields = ("data", "indices", "indptr", "shape")
        parts = {
            key: [read_member(archive, f"{key}_{field}", path) for field in fields]
            for key in ("adj", "attr")
        }
        labels = read_member(archive, "labels", path)
    with _original(path, "does not hold valid sparse matrices", ValueError, TypeError):
        matrices = {key: csr_matrix(tuple(p[:3]), shape=tuple(p[3])) for key, p in parts.items()}
        for matrix in matrices.values():
            matrix.check_format(full_check=True)
    x, adjacency = matrices["attr"], matrices["adj"].tocoo()
    x.data[x.data > 0] = 1
    return in_memory(adjacency.row, adjacency.col, x, labels, files=[path])


def load_wikics(data: DataConfig) -> RawGraph:
    """Features, labels and links as PyG reads them; the early-stopping masks of the original are
    not used.
    """
    folder = find_raw(data, "WikiCS/raw", ["data.json"], fetch_pyg("WikiCS"))
    path = folder / "data.json"
    wrong = (ValueError, TypeError, KeyError, OSError)
    with _original(path, "cannot be read as WikiCS", *wrong):
        given = json.loads(path.read_text())
        lengths, dst = _flat(given["links"])
        src = np.repeat(np.arange(len(lengths)), lengths)
        x = np.asarray(given["features"], dtype=np.float32)
        labels = np.asarray(given["labels"], dtype=np.int64)
        masks = {
            "train": np.asarray(given["train_masks"], dtype=bool).T,
            "val": np.asarray(given["val_masks"], dtype=bool).T,
            "test": np.asarray(given["test_mask"], dtype=bool),
        }
    return in_memory(src, dst, x, labels, masks=masks, files=[path])


@dataclass(frozen=True)
class OgbDataset:
    ogb_name: str
    split: str
    binary: bool = False

    @property
    def folder(self) -> str:
        return f"OGB/{self.ogb_name.replace('-', '_')}"

    @property
    def files(self) -> list[str]:
        """Needed files; node features in csv form are looked for separately."""
        raw = ["edge.csv.gz", "num-node-list.csv.gz", "node-label.csv.gz"]
        raw = ["data.npz", "node-label.npz"] if self.binary else raw
        parts = [f"split/{self.split}/{part}.csv.gz" for part in ("train", "valid", "test")]
        return [*(f"raw/{name}" for name in raw), *parts]


OGB = {
    "ogbn-arxiv": OgbDataset("ogbn-arxiv", "time"),
    "ogbn-products": OgbDataset("ogbn-products", "sales_ranking"),
    "ogbn-papers100m": OgbDataset("ogbn-papers100M", "time", binary=True),
}


def fetch_ogb(dataset: OgbDataset) -> Callable[[str, Path], None]:
    """Download and unpack OGB's archive without its interactive question; the first call brings all
    files.
    """

    def fetch(name: str, into: Path) -> None:
        try:
            import ogb.nodeproppred
            from ogb.utils.url import download_url, extract_zip
        except ImportError:
            raise UserError(
                f"Raw file {into / name} is not here and the package `ogb`, which downloads it, "
                "is not installed. Install cimage-dist[ogb], or put "
                f"{', '.join(dataset.files)} into {into}, or point CIMAGE_DATA_ROOT at a folder "
                f"that has {dataset.folder}/."
            ) from None
        import pandas as pd

        master = Path(ogb.nodeproppred.__file__).with_name("master.csv")
        facts = pd.read_csv(master, index_col=0, keep_default_na=False)[dataset.ogb_name]
        with tempfile.TemporaryDirectory(dir=into.parent, prefix=".tmp-download-") as tmp:
            archive = download_url(facts["url"], tmp, log=False)
            extract_zip(archive, tmp, log=False)
            unpacked = Path(tmp) / facts["download_name"]
            shutil.copytree(unpacked, into, dirs_exist_ok=True, copy_function=shutil.move)

    return fetch


def _column(path: Path) -> Array:
    """A csv without header, first column."""
    frames = tables.text_frames(path, CHUNK_EDGES, usecols=[0])
    return np.concatenate([frame.iloc[:, 0].to_numpy() for frame in frames])


def _csv_edges(path: Path) -> Iterator[tuple[Array, Array]]:
    for frame in tables.text_frames(path, CHUNK_EDGES):
        yield frame.iloc[:, 0].to_numpy(), frame.iloc[:, 1].to_numpy()


def _csv_features(path: Path) -> Iterator[Array]:
    for frame in tables.text_frames(path, CHUNK_VALUES // 128, dtype=np.float32):
        yield frame.to_numpy()


def load_ogb(data: DataConfig) -> RawGraph:
    """Official split as boolean masks (§2.2); papers100M labels most nodes with NaN, which means
    unlabelled.
    """
    dataset = OGB[data.name]
    folder = find_raw(data, dataset.folder, dataset.files, fetch_ogb(dataset))
    raw = folder / "raw"
    files = [folder / name for name in dataset.files]
    features: Callable[[], Iterator[Array]] | None = None
    if dataset.binary:
        archive = raw / "data.npz"
        with open_npz(archive) as opened:
            num_nodes = int(read_member(opened, "num_nodes_list", archive).sum())
        with open_npz(raw / "node-label.npz") as opened:
            labels = read_member(opened, "node_label", raw / "node-label.npz")
        edges: Callable[[], Iterator[tuple[Array, Array]]]
        edges = partial(stream_edges, archive, "edge_index")
        features = partial(stream_rows, archive, "node_feat")
    else:
        num_nodes = int(_column(raw / "num-node-list.csv.gz").sum())
        labels = _column(raw / "node-label.csv.gz")
        edges = partial(_csv_edges, raw / "edge.csv.gz")
        table = raw / "node-feat.csv.gz"
        if table.is_file():
            features = partial(_csv_features, table)
            files.append(table)
    masks = {}
    for name, part in (("train", "train"), ("val", "valid"), ("test", "test")):
        path = folder / "split" / dataset.split / f"{part}.csv.gz"
        ids = _column(path)
        ids, _ = check_ids(ids, ids, num_nodes, f"node ids of {path}")
        masks[name] = np.zeros(num_nodes, dtype=bool)
        masks[name][ids] = True
    hint = f"{raw / 'node-feat.csv.gz'} is not there"
    return RawGraph(num_nodes, edges, features, labels, masks, files, feature_hint=hint)


SOURCES = {
    # Citeseer, revision 1: its padding nodes have no label.
    **{n: Source(load_planetoid, "row", revision=int(n == "citeseer")) for n in PLANETOID},
    **dict.fromkeys(AMAZON, Source(load_amazon)),
    "wikics": Source(load_wikics),
    **dict.fromkeys(OGB, Source(load_ogb)),
}
