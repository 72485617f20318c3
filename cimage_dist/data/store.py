"""The graph store: one folder of .npy files and a manifest, memory-mapped and read-only.

manifest.json  indptr.npy  indices.npy  x.npy  [y.npy]  [mask_train.npy mask_val.npy mask_test.npy]
feature_mean.npy  feature_sqmean.npy  feature_cov.npy | feature_cov_factor.npy
[ids.npy [ids_offsets.npy]]  [edge_weight.npy]

Features of which at most a tenth is not zero are in the files of `data/sparse.py` instead of x.npy
(format version 2), with moments only where these are small beside them.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from cimage_dist.data.checks import Array
from cimage_dist.data.ids import ID_FILES, NodeIds
from cimage_dist.data.moments import moments_of
from cimage_dist.data.sparse import NEEDED_FILES, SPARSE_FILES, CsrFeatures
from cimage_dist.errors import UserError
from cimage_dist.io import artifacts
from cimage_dist.types import FeatureMoments, Features, Topology

if TYPE_CHECKING:
    from torch_geometric.data import Data

FORMAT = "cimage-graph"
FORMAT_VERSION, SPARSE_VERSION = 1, 2
MASKS = ("train", "val", "test")
MOMENT_FILES = (
    "feature_mean.npy",
    "feature_sqmean.npy",
    "feature_cov.npy",
    "feature_cov_factor.npy",
)
_AUTO_VERIFY_BYTES = 1 << 30


def _shared(array: Array) -> Tensor:
    """A tensor on the same memory. Nobody writes to it, so torch's warning about read-only arrays
    is beside the point.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.from_numpy(array)


class Graph:
    """A symmetric simple graph with node features and, when known, labels and split masks.

    indptr int64 [N+1], indices int32 (int64 from 2³¹ nodes) [E], x float32 or float16 [N, F] or
    sparse rows of that type and shape, y int64 [N] (-1: unlabelled) or None, masks {"train", "val",
    "test"} bool [N] or [N, S] for S given splits. `ids` are the user's names of the nodes (None:
    their row numbers), `edge_weight` float32 [E] where weights were kept.
    """

    def __init__(
        self,
        name: str,
        indptr: Array,
        indices: Array,
        x: Array | CsrFeatures,
        y: Array | None = None,
        masks: Mapping[str, Array] | None = None,
        manifest: dict[str, Any] | None = None,
        path: Path | None = None,
        ids: NodeIds | None = None,
        edge_weight: Array | None = None,
    ) -> None:
        self.name, self.path, self.ids, self.edge_weight = name, path, ids, edge_weight
        self.indptr, self.indices, self.x, self.y = indptr, indices, x, y
        self.masks: dict[str, Array] = dict(masks or {})
        self.manifest: dict[str, Any] = manifest or {}
        known = self.manifest.get("counts", {}).get("classes")
        self.num_classes: int = int(known) if known is not None else count_classes(y)

    @property
    def num_nodes(self) -> int:
        return len(self.indptr) - 1

    @property
    def num_edges(self) -> int:
        """Both directions counted."""
        return len(self.indices)

    @property
    def num_features(self) -> int:
        return int(self.x.shape[1])

    @property
    def num_splits(self) -> int:
        """How many node splits came with the data."""
        shapes = {mask.shape[1] if mask.ndim == 2 else 1 for mask in self.masks.values()}
        return max(shapes, default=0)

    def topology(self) -> Topology:
        """The structure as tensors on the mapped memory."""
        return Topology(_shared(self.indptr), _shared(self.indices))

    def features(self) -> Tensor:
        """float32 [N, F]; on the mapped memory when stored so, else a converted copy (use `x` rows
        for graphs larger than memory, `rows` to keep sparse features sparse).
        """
        found = self.stored_rows()
        return (found if isinstance(found, Tensor) else found.to_dense()).to(torch.float32)

    def rows(self) -> Features:
        """The features of all nodes as the encoder takes them, float32 [N, F]: sparse where they
        are kept so, else as `features`.
        """
        return self.stored_rows().to(torch.float32)

    def stored_rows(self) -> Features:
        """`rows` in the type they are stored in; dense ones on the mapped memory."""
        return self.x[:] if isinstance(self.x, CsrFeatures) else _shared(self.x)

    def labels(self) -> Tensor | None:
        """int64 [N], -1 where unlabelled; None for a graph without labels."""
        return None if self.y is None else _shared(self.y)

    def feature_moments(self) -> FeatureMoments:
        """Mean, second moment and covariance of the features over all nodes (§2.1), float64, a
        factor of the covariance float32; read from the store, or computed. Not kept: they are
        large.
        """
        if self.path is None or MOMENT_FILES[0] not in self.manifest["files"]:
            return moments_of(self.x).as_stored()
        mean, sqmean, cov, factor = (self._moment_file(name) for name in MOMENT_FILES)
        assert mean is not None and sqmean is not None
        cov = None if cov is None else cov.double()
        return FeatureMoments(mean, sqmean, cov, factor)

    def _moment_file(self, name: str) -> Tensor | None:
        assert self.path is not None
        if name not in self.manifest["files"]:
            return None
        return torch.from_numpy(_load(self.path / name, mapped=False))

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits of the content (structure, features, labels, masks); where the store is
        plays no part.
        """
        files = self.manifest.get("files")
        if files is not None:
            return fingerprint_of(self.manifest)
        arrays: dict[str, Array | CsrFeatures | None] = {
            "indptr": self.indptr,
            "indices": self.indices,
            "x": self.x,
            "y": self.y,
            "ids": None if self.ids is None else self.ids.to_numpy().astype("U"),
            "edge_weight": self.edge_weight,
            **{f"mask_{k}": v for k, v in self.masks.items()},
        }
        return _digest(
            {
                k: _content_digest(v.blocks() if isinstance(v, CsrFeatures) else [v])
                for k, v in arrays.items()
                if v is not None
            }
        )

    @staticmethod
    def open(path: str | Path, verify: Literal["auto", "always", "never"] = "auto") -> Graph:
        """Map a store. verify: "always" compares checksums, "never" sizes only, "auto" checksums up
        to 1 GiB.
        """
        path = Path(path)
        manifest = read_manifest(path)
        files = manifest["files"]
        if damage := artifacts.damaged_file(path, files, should_verify(files, verify)):
            raise UserError(f"Graph store {path} is damaged: {damage}. {_rebuild(path)}")
        y = _load(path / "y.npy") if "y.npy" in files else None
        masks = {
            name: _load(path / f"mask_{name}.npy") for name in MASKS if f"mask_{name}.npy" in files
        }
        graph = Graph(
            manifest["name"],
            _load(path / "indptr.npy"),
            _load(path / "indices.npy"),
            _load_features(path, manifest),
            y,
            masks,
            manifest,
            path,
            NodeIds.of_store({name: _load(path / name) for name in ID_FILES if name in files})
            if "ids.npy" in files
            else None,
            _load(path / "edge_weight.npy") if "edge_weight.npy" in files else None,
        )
        counts = manifest["counts"]
        if (graph.num_nodes, graph.num_edges, graph.x.shape) != (
            counts["nodes"],
            counts["edges"],
            (counts["nodes"], counts["features"]),
        ):
            raise UserError(
                f"Graph store {path} is damaged: its arrays do not have the sizes its manifest "
                f"states. {_rebuild(path)}"
            )
        return graph

    @staticmethod
    def from_edges(edges: Any, x: Any = None, y: Any = None, **options: Any) -> Graph:
        """A graph in memory: symmetrised, without duplicates and self-loops, checked like files.

        edges: array or tensor [2, E] or [E, 2], scipy sparse adjacency, networkx graph, or pandas
        frame with source and target; ids may be text. x: [N, F] array, tensor, scipy matrix or
        frame; y: a class per node. Frames are joined by their id column or index. Without x,
        features are made from the graph.

        Options: num_nodes, masks {"train", "val", "test"}, name, normalize (data.normalize of the
        config), features (degree, hash or laplacian) and width where x is None.
        """
        from cimage_dist.data.memory import graph_of

        return graph_of(edges, x, y, **options)

    @staticmethod
    def from_data(data: Data, name: str = "data", normalize: str = "unit", **options: Any) -> Graph:
        """`from_edges` of a PyG `Data`, with its labels and masks."""
        if data.edge_index is None:
            raise UserError(
                f"the PyG data {name!r} has no edge_index; give a [2, E] tensor of node ids."
            )
        masks = {key: getattr(data, f"{key}_mask", None) for key in MASKS}
        options |= {"num_nodes": data.num_nodes, "name": name, "normalize": normalize}
        return Graph.from_edges(data.edge_index, data.x, data.y, masks=masks, **options)

    def to_data(self) -> Data:
        """The same graph as a PyG `Data` (edge_index sorted by target, both directions)."""
        from torch_geometric.data import Data

        edges = self.topology().edge_list()
        data = Data(
            x=self.features(),
            edge_index=torch.stack([edges.src, edges.dst]),
            y=self.labels(),
            num_nodes=self.num_nodes,
        )
        for name, mask in self.masks.items():
            data[f"{name}_mask"] = _shared(mask)
        return data

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process maps the files itself instead of receiving a copy of them.
        if self.path is not None:
            return Graph.open, (self.path.resolve(), "never")
        return Graph, (
            self.name,
            self.indptr,
            self.indices,
            self.x,
            self.y,
            self.masks,
            self.manifest,
            None,
            self.ids,
            self.edge_weight,
        )

    def __repr__(self) -> str:
        labels = f"{self.num_classes} classes" if self.y is not None else "no labels"
        splits = (
            f", {self.num_splits} given split{'s' * (self.num_splits > 1)}" if self.masks else ""
        )
        where = f" at {self.path}" if self.path else " in memory"
        return (
            f"Graph({self.name!r}: {self.num_nodes:,} nodes, {self.num_edges // 2:,} undirected "
            "edges, "
            f"{self.num_features:,} features {self.x.dtype}, {labels}{splits}{where})"
        )


def count_classes(y: Array | None) -> int:
    return int(y.max()) + 1 if y is not None and y.size else 0


def should_verify(files: Mapping[str, Mapping[str, Any]], verify: str) -> bool:
    """Whether checksums are compared, beside sizes."""
    return verify == "always" or (
        verify == "auto" and sum(facts["bytes"] for facts in files.values()) <= _AUTO_VERIFY_BYTES
    )


def fingerprint_of(manifest: Mapping[str, Any]) -> str:
    """The fingerprint of a store by its manifest."""
    # Moments follow from the features, up to rounding that may differ between machines.
    content = {
        name: facts["blake2b"]
        for name, facts in manifest["files"].items()
        if name not in MOMENT_FILES
    }
    # Sparse features count as the dense ones they stand for, so that the same graph has the same
    # name, and the same labels and runs, however it is stored.
    if dense := manifest.get("dense_x"):
        content = {name: digest for name, digest in content.items() if name not in SPARSE_FILES}
        content["x.npy"] = dense
    return _digest(content)


def _content_digest(parts: Iterable[Array]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(np.ascontiguousarray(part).data)
    return digest.hexdigest()


def _digest(content: dict[str, str]) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=8).hexdigest()


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a store, or a readable error when there is none or it is of another
    format.
    """
    if not (path / artifacts.MANIFEST).is_file():
        raise UserError(
            f"{path} is not a graph store: it has no {artifacts.MANIFEST}. "
            "Give a registered name, a store made by `cimage ingest`, or a folder with edges.* "
            "files."
        )
    manifest = artifacts.read_json(path / artifacts.MANIFEST, "Manifest of the graph store")
    return check_manifest(manifest, str(path), _rebuild(path))


def check_manifest(manifest: Any, store: str, advice: str) -> dict[str, Any]:
    """The manifest itself where it is that of a graph store this program can read."""
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise UserError(
            f"{store}/{artifacts.MANIFEST} is not the manifest of a graph store. {advice}"
        )
    if manifest.get("version") not in (FORMAT_VERSION, SPARSE_VERSION):
        raise UserError(
            f"Graph store {store} has format version {manifest.get('version')}, this program "
            f"reads versions {FORMAT_VERSION} and {SPARSE_VERSION}. {advice}"
        )
    if missing := [key for key in ("name", "counts", "files") if key not in manifest]:
        raise UserError(
            f"{store}/{artifacts.MANIFEST} is damaged: it lacks {', '.join(missing)}. {advice}"
        )
    return manifest


def _rebuild(path: Path) -> str:
    return (
        "Run `cimage ingest` with the same data settings to make it again, or delete the "
        f"folder {path}: it is rebuilt on next use."
    )


def _load_features(path: Path, manifest: Mapping[str, Any]) -> Array | CsrFeatures:
    files = manifest["files"]
    if "x.npy" in files:
        return _load(path / "x.npy")
    if missing := [name for name in NEEDED_FILES if name not in files]:
        raise UserError(
            f"Graph store {path} is damaged: its manifest names neither x.npy nor {missing[0]}. "
            f"{_rebuild(path)}"
        )
    parts = {name: _load(path / name) for name in SPARSE_FILES if name in files}
    try:
        return CsrFeatures.of_store(parts, manifest["counts"]["features"], manifest["dtypes"]["x"])
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise UserError(f"Graph store {path} is damaged: {error}. {_rebuild(path)}") from None


def _load(path: Path, mapped: bool = True) -> Array:
    try:
        return np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise UserError(
            f"Graph store file {path} cannot be read ({error}). {_rebuild(path.parent)}"
        ) from None
