"""ogbn-arxiv, ogbn-products and ogbn-papers100M from OGB's raw files, read directly and
streamed.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cimage_dist.config import DataConfig
from cimage_dist.data.checks import Array, check_ids
from cimage_dist.data.sources import npz, tables
from cimage_dist.data.sources.raw import CHUNK_EDGES, CHUNK_VALUES, RawGraph, Source, find_raw
from cimage_dist.errors import UserError


@dataclass(frozen=True)
class _Dataset:
    ogb_name: str
    split: str
    binary: bool = False

    @property
    def folder(self) -> str:
        return f"OGB/{self.ogb_name.replace('-', '_')}"

    @property
    def files(self) -> list[str]:
        """Needed files; node features in csv form are looked for separately."""
        raw = (
            ["data.npz", "node-label.npz"]
            if self.binary
            else ["edge.csv.gz", "num-node-list.csv.gz", "node-label.csv.gz"]
        )
        return [
            *(f"raw/{name}" for name in raw),
            *(f"split/{self.split}/{part}.csv.gz" for part in ("train", "valid", "test")),
        ]


DATASETS = {
    "ogbn-arxiv": _Dataset("ogbn-arxiv", "time"),
    "ogbn-products": _Dataset("ogbn-products", "sales_ranking"),
    "ogbn-papers100m": _Dataset("ogbn-papers100M", "time", binary=True),
}


def _fetch(dataset: _Dataset) -> Callable[[str, Path], None]:
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

        facts = pd.read_csv(
            Path(ogb.nodeproppred.__file__).with_name("master.csv"),
            index_col=0,
            keep_default_na=False,
        )[dataset.ogb_name]
        with tempfile.TemporaryDirectory(dir=into.parent, prefix=".tmp-download-") as tmp:
            archive = download_url(facts["url"], tmp, log=False)
            extract_zip(archive, tmp, log=False)
            shutil.copytree(
                Path(tmp) / facts["download_name"],
                into,
                dirs_exist_ok=True,
                copy_function=shutil.move,
            )

    return fetch


def _column(path: Path) -> Array:
    """A csv without header, first column."""
    return np.concatenate(
        [
            frame.iloc[:, 0].to_numpy()
            for frame in tables.text_frames(path, CHUNK_EDGES, usecols=[0])
        ]
    )


def _csv_edges(path: Path) -> Iterator[tuple[Array, Array]]:
    for frame in tables.text_frames(path, CHUNK_EDGES):
        yield frame.iloc[:, 0].to_numpy(), frame.iloc[:, 1].to_numpy()


def _csv_features(path: Path) -> Iterator[Array]:
    for frame in tables.text_frames(path, CHUNK_VALUES // 128, dtype=np.float32):
        yield frame.to_numpy()


def load(data: DataConfig) -> RawGraph:
    """Official split as boolean masks (§2.2); papers100M labels most nodes with NaN, which means
    unlabelled.
    """
    dataset = DATASETS[data.name]
    folder = find_raw(data, dataset.folder, dataset.files, _fetch(dataset))
    raw = folder / "raw"
    files = [folder / name for name in dataset.files]
    features: Callable[[], Iterator[Array]] | None = None
    if dataset.binary:
        archive = raw / "data.npz"
        with npz.open_npz(archive) as opened:
            num_nodes = int(npz.read_member(opened, "num_nodes_list", archive).sum())
        with npz.open_npz(raw / "node-label.npz") as opened:
            labels = npz.read_member(opened, "node_label", raw / "node-label.npz")
        edges: Callable[[], Iterator[tuple[Array, Array]]] = lambda: npz.stream_edges(  # noqa: E731
            archive, "edge_index"
        )
        features = lambda: npz.stream_rows(archive, "node_feat")  # noqa: E731
    else:
        num_nodes = int(_column(raw / "num-node-list.csv.gz").sum())
        labels = _column(raw / "node-label.csv.gz")
        edges = lambda: _csv_edges(raw / "edge.csv.gz")  # noqa: E731
        table = raw / "node-feat.csv.gz"
        if table.is_file():
            features = lambda: _csv_features(table)  # noqa: E731
            files.append(table)
    masks = {}
    for name, part in (("train", "train"), ("val", "valid"), ("test", "test")):
        path = folder / "split" / dataset.split / f"{part}.csv.gz"
        ids = _column(path)
        ids, _ = check_ids(ids, ids, num_nodes, f"node ids of {path}")
        masks[name] = np.zeros(num_nodes, dtype=bool)
        masks[name][ids] = True
    return RawGraph(
        num_nodes,
        edges,
        features,
        labels,
        masks,
        files,
        feature_hint=f"{raw / 'node-feat.csv.gz'} is not there",
    )


SOURCES = {name: Source(load) for name in DATASETS}
