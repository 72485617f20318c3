"""Initial labels on disk: made once, checked when read, used by every run that asks for the same
ones. N nodes.

Initial labels behind one interface: a cluster id for every node and how sure we are of it (§6.1).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from zipfile import BadZipFile

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cimage_dist import keyed
from cimage_dist.comm import Comm
from cimage_dist.config import CIConfig, ClusterConfig, Config, EvalConfig, TrainConfig, fingerprint
from cimage_dist.config.model import TEST_RATIO, VAL_RATIO
from cimage_dist.config.training import EPOCHS
from cimage_dist.data.splits import settled
from cimage_dist.data.store import Graph
from cimage_dist.errors import UserError
from cimage_dist.io import artifacts
from cimage_dist.io.storage import peak_gb
from cimage_dist.nn.encoder import Encoder
from cimage_dist.nn.projection import compact
from cimage_dist.pseudo import propagated
from cimage_dist.pseudo.kmeans import assign, kmeans
from cimage_dist.pseudo.propagated import estimate_clusters
from cimage_dist.registry import clusterer
from cimage_dist.train.refresh import Embedder
from cimage_dist.types import Features, Topology

_FORMAT = 1
_FILES = ("labels.npy", "confidence.npy")
_ARCHIVE = "labels.npz"  # one file, as folders made earlier have it


@dataclass(frozen=True)
class LabelSet:
    """labels int64 [N] (-1: none), confidence float64 [N], and what is known of how they were
    made.
    """

    labels: Tensor
    confidence: Tensor
    facts: dict[str, Any] = field(default_factory=dict)


NO_LABELS = LabelSet(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.float64))


def write_labels(folder: Path, found: LabelSet) -> None:
    with artifacts.committed_dir(folder) as tmp:
        for name, part in zip(_FILES, (found.labels, found.confidence), strict=True):
            np.save(tmp / name, part.numpy())
        body = {
            "format": _FORMAT,
            "facts": found.facts,
            "files": artifacts.describe_files(tmp, list(_FILES)),
        }
        artifacts.write_json(tmp / artifacts.MANIFEST, body)


def read_labels(path: Path, num_nodes: int) -> LabelSet:
    """A folder that `cimage cluster` wrote, whose files are mapped, or a .npy or .npz file from
    elsewhere.
    """
    if not path.is_dir():
        return LabelSet(*labels_from_file(path, num_nodes))
    body = artifacts.read_json(path / artifacts.MANIFEST, "the manifest of a set of labels")
    if reason := artifacts.damaged_file(path, body["files"]):
        raise UserError(
            f"The labels in {path} cannot be trusted: {reason}. Delete the folder and make them "
            "again with `cimage cluster`."
        )
    labels, confidence = (path / name for name in _FILES)
    if _ARCHIVE in body["files"]:
        return LabelSet(*labels_from_file(path / _ARCHIVE, num_nodes), body["facts"])
    return LabelSet(*labels_from_file(labels, num_nodes, confidence), body["facts"])


def find_labels(folder: Path, num_nodes: int) -> LabelSet | None:
    """What is there and whole; None where labels must be made (again)."""
    try:
        return read_labels(folder, num_nodes) if folder.is_dir() else None
    except (UserError, KeyError, TypeError):
        return None


def cache_folder(
    cfg: Config, graph_fingerprint: str, method: str, num_clusters: int, settings: Any
) -> Path:
    """Where these labels lie: named by everything that decides them. `settings` is a dataclass of
    the method's, or None for selfkmeans.

    The labels of selfkmeans come from an encoder of the run's own making, so that the experiment
    decides them too.
    """
    facts = {
        "format": _FORMAT,
        "graph": graph_fingerprint,
        "held_out": _held_out(cfg),
        "method": method,
        "clusters": num_clusters,
        "settings": fingerprint(_edge_only_part(cfg))
        if settings is None
        else dataclasses.asdict(settings),
        "type": str(torch.get_default_dtype()),
    }
    name = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=6).hexdigest()
    return Path(cfg.data.store_dir) / "labels" / f"{cfg.data.name}-{method}-{name}"


def _held_out(cfg: Config) -> list[Any]:
    data = cfg.data
    shares = (data.link_val_ratio, data.link_test_ratio)
    is_usual = data.holdout_edges == "none" or shares == (VAL_RATIO, TEST_RATIO)
    return [data.holdout_edges, cfg.run.seed, *(() if is_usual else shares)]


def _edge_only_part(cfg: Config) -> Config:
    """What the edge-only encoder and its k-means depend on; the rest as by default, so that
    searches over it share their labels.
    """
    return dataclasses.replace(
        cfg,
        loss=cfg.loss.edges_only(),
        cluster=ClusterConfig(
            init="selfkmeans", init_epochs=cfg.cluster.init_epochs, restarts=cfg.cluster.restarts
        ),
        ci=CIConfig(),
        train=TrainConfig(steps=cfg.steps, epochs=EPOCHS, precision=cfg.train.precision),
        eval=EvalConfig(),
    )


def labels_from_file(
    path: Path, num_nodes: int, confidence_path: Path | None = None
) -> tuple[Tensor, Tensor]:
    """labels int64 [N] (-1: none), confidence float64 [N]: .npy, each in a file of its own, or .npz
    with `labels`, `confidence`. Files .npy of these types are mapped.

    Without a confidence one is drawn. Equal ones would have the lowest numbers trusted first, and
    often these mean something: public splits begin with their training nodes.
    """
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
        labels = found["labels"] if hasattr(found, "files") else found
        if hasattr(found, "files") and "confidence" in found.files:
            confidence = found["confidence"]
        elif confidence_path is not None:
            confidence = np.load(confidence_path, mmap_mode="r", allow_pickle=False)
        else:
            confidence = keyed.uniform(
                keyed.stream(0, "initial-labels", 9), torch.arange(len(labels))
            ).numpy()
    except FileNotFoundError:
        raise UserError(
            f"Label file not found: {path}. Set cluster.labels_path to a .npy or .npz file, or "
            "to a folder that `cimage cluster` made."
        ) from None
    except (ValueError, OSError, EOFError, KeyError, TypeError, BadZipFile) as error:
        raise UserError(
            f"Label file {path} cannot be read: {error}. Expected integers in a .npy, or a .npz "
            "with `labels` (and `confidence`)."
        ) from None
    if labels.shape != (num_nodes,) or confidence.shape != (num_nodes,):
        raise UserError(
            f"Label file {path} has labels of shape {labels.shape} and confidence of shape "
            f"{confidence.shape}; the graph has {num_nodes:,} nodes."
        )
    if not np.issubdtype(labels.dtype, np.integer):
        raise UserError(f"Label file {path} holds {labels.dtype}, not integers.")
    if not (np.issubdtype(confidence.dtype, np.number) or confidence.dtype == np.bool_):
        raise UserError(
            f"Label file {path} has a confidence of type {confidence.dtype}, not numbers."
        )
    if (labels < -1).any() or not 1 <= labels.max(initial=-1) < num_nodes:
        raise UserError(
            f"Label file {path} must number at least two clusters from 0, below the number of "
            f"nodes, with -1 for unlabelled nodes; found {labels.min()} to {labels.max()}."
        )
    if not np.isfinite(confidence).all():
        raise UserError(
            f"Label file {path} has NaN or infinite confidence in "
            f"{(~np.isfinite(confidence)).sum():,} rows."
        )
    with warnings.catch_warnings():
        # torch warns that a mapped file is read-only; nobody writes to it.
        warnings.simplefilter("ignore", UserWarning)
        return (
            torch.from_numpy(labels.astype(np.int64, copy=False)),
            torch.from_numpy(confidence.astype(np.float64, copy=False)),
        )


# step, total, values, stage: what a progress bar shows
Tick = Callable[[int, int, dict[str, float], str], None]

SMALL, _LARGE = 25_000, 5_000_000
_FIT_ROWS = 100_000
_ASSIGN_ROWS = 50_000


def _no_tick(step: int, total: int, values: dict[str, float], stage: str) -> None:
    return None


def number_of_clusters(
    cfg: Config, graph: Graph, topology: Topology, comm: Comm | None = None, tick: Tick = _no_tick
) -> int:
    """Collective: as configured; else the graph's number of classes; else, or with 0, estimated
    from features and edges alone.
    """
    if cfg.cluster.num_clusters:
        return cfg.cluster.num_clusters
    if graph.num_classes >= 2 and cfg.cluster.num_clusters is None:
        return graph.num_classes
    x = compact(_rows_for("propagated", graph))
    return estimate_clusters(
        x, topology, propagated.settings_for(graph.num_nodes), cfg.run.seed, comm, tick
    )


def labels_by_kmeans(
    encoder: Encoder, embedder: Embedder, num_nodes: int, num_clusters: int, cfg: Config, comm: Comm
) -> tuple[Tensor, Tensor]:
    """Collective: k-means on unit embeddings; confidence is the gap between the two nearest squared
    distances (§6.6).

    Up to 100,000 nodes are clustered as they are; beyond that k-means is fitted on a keyed sample
    and the rest is assigned in pieces.
    """
    begin, end = comm.slice_of(num_nodes)
    seed = keyed.derive(cfg.run.seed, keyed.STREAM["initial-labels"])

    def rows(at: Tensor) -> Tensor:
        return F.normalize(embedder(encoder, at, 0).z.flatten(1).float(), dim=1, eps=1e-12)

    if num_nodes <= _FIT_ROWS:
        gids = torch.arange(begin, end)
        found = kmeans(
            rows(gids), num_clusters, seed=seed, comm=comm, gids=gids, restarts=cfg.cluster.restarts
        )
        labels, confidence = found.labels, found.confidence.double()
    else:
        chosen = keyed.below(keyed.stream(seed, "kmeans", 1), _FIT_ROWS / num_nodes, begin, end)
        centres = kmeans(
            rows(chosen),
            num_clusters,
            seed=seed,
            comm=comm,
            gids=chosen,
            restarts=cfg.cluster.restarts,
        ).centres
        parts = [
            assign(rows(torch.arange(at, min(at + _ASSIGN_ROWS, end))), centres)[:2]
            for at in range(begin, end, _ASSIGN_ROWS)
        ]
        labels, confidence = (
            torch.cat([p[0] for p in parts]),
            torch.cat([p[1] for p in parts]).double(),
        )
    return comm.gather_rows(labels.cpu()), comm.gather_rows(confidence.cpu())


def method_for(init: str, num_nodes: int) -> str:
    """What `cluster.init=auto` stands for: R-DGAE, whose loss looks at all pairs of nodes, on small
    graphs; Dink-Net beyond (§6.1); smoothed features on graphs where even that takes hours.
    """
    if init != "auto":
        return init
    return "rdgae" if num_nodes <= SMALL else "dinknet" if num_nodes <= _LARGE else "propagated"


def initial_labels(
    cfg: Config,
    graph: Graph,
    topology: Topology,
    edge_only: Callable[[], tuple[Encoder, Embedder]],
    comm: Comm | None = None,
    tick: Tick = _no_tick,
) -> LabelSet:
    """Collective: a label and a confidence for every node by `cluster.init`, on the edges of
    `topology` only.

    `edge_only` trains an encoder with the edge loss alone and returns it with an embedder: the
    released way to first labels. Labels made before for the same graph, method, settings and seed
    are read from the label cache beside the graph stores, by rank 0 alone: the others then return
    NO_LABELS, and get their nodes' share of them from rank 0.
    """
    comm = comm or Comm()
    cfg = replace(cfg, data=settled(cfg.data, graph))
    if cfg.cluster.init == "file":
        assert cfg.cluster.labels_path is not None
        return _of_main(partial(read_labels, Path(cfg.cluster.labels_path), graph.num_nodes), comm)
    count = number_of_clusters(cfg, graph, topology, comm, tick)
    method = method_for(cfg.cluster.init, graph.num_nodes)
    settings = None  # selfkmeans takes the whole config
    if method != "selfkmeans":
        settings = clusterer(method).settings(cfg.data.name, graph.num_nodes, count)
    folder = cache_folder(cfg, graph.fingerprint, method, count, settings) if graph.path else None

    def look() -> LabelSet | None:
        return _of_main(lambda: find_labels(folder, graph.num_nodes) if folder else None, comm)

    found = look()
    if found is None:
        # Trials of a sweep ask for the same labels at once: one makes them, the others wait and
        # find them.
        with (
            artifacts.locked(folder.parent / f".lock-{folder.name}")
            if folder and comm.is_main
            else nullcontext()
        ):
            found = look()
            if found is None:
                began = time.perf_counter()
                labels, confidence = _make(
                    method, settings, cfg, graph, topology, count, edge_only, comm, tick
                )
                facts = {
                    "method": method,
                    "clusters": count,
                    "seed": cfg.run.seed,
                    "seconds": time.perf_counter() - began,
                    "peak_gb": peak_gb(),
                }
                found = LabelSet(labels, confidence, facts)
                if folder and comm.is_main:
                    write_labels(folder, found)
    return replace(found, facts={**found.facts, "folder": str(folder)}) if folder else found


Found = TypeVar("Found", LabelSet, LabelSet | None)


def _of_main(find: Callable[[], Found], comm: Comm) -> Found:
    """Collective: what `find` gives, on rank 0; NO_LABELS on others where it found any. Labels of
    all nodes do not travel.
    """
    found: list[Found] = []

    def look() -> bool:
        found.append(find())
        return found[0] is not None

    is_found = comm.from_main(look)
    return found[0] if found else NO_LABELS if is_found else None  # type: ignore[return-value]


def _rows_for(method: str, graph: Graph) -> Features:
    """The features as a method takes them: k-means on propagated ones reads a few columns at a
    time in single precision, from the mapped file.
    """
    if method == "propagated" and torch.get_default_dtype() == torch.float32:
        return graph.stored_rows()
    return graph.rows().to(torch.get_default_dtype())


def _make(
    method: str,
    settings: Any,
    cfg: Config,
    graph: Graph,
    topology: Topology,
    count: int,
    edge_only: Callable[[], tuple[Encoder, Embedder]],
    comm: Comm,
    tick: Tick,
) -> tuple[Tensor, Tensor]:
    if method == "selfkmeans":
        return labels_by_kmeans(*edge_only(), graph.num_nodes, count, cfg, comm)
    x = compact(_rows_for(method, graph))
    return clusterer(method).make(x, topology, count, settings, cfg.run.seed, comm, tick)
