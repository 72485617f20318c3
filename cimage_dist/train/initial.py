"""Initial labels behind one interface: a cluster id for every node and how sure we are of it (§1)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cimage_dist import keyed
from cimage_dist.cluster import dinknet, propagated, rdgae
from cimage_dist.comm import Comm
from cimage_dist.config import Config
from cimage_dist.errors import UserError
from cimage_dist.graph.store import Graph
from cimage_dist.nn.encoder import Encoder
from cimage_dist.nn.features import compact
from cimage_dist.stats.kmeans import assign, kmeans
from cimage_dist.train.embedder import Embedder
from cimage_dist.types import Topology

# step, total, values, stage: what a progress bar shows
Tick = Callable[[int, int, dict[str, float], str], None]

_SMALL, _LARGE = 25_000, 5_000_000
_FIT_ROWS = 100_000
_ASSIGN_ROWS = 50_000


def _no_tick(step: int, total: int, values: dict[str, float], stage: str) -> None:
    return None


def number_of_clusters(cfg: Config, num_classes: int) -> int:
    count = cfg.cluster.num_clusters or num_classes
    if count < 2:
        raise UserError("The number of clusters is unknown: this graph has no labels to count classes from. Set cluster.num_clusters.")
    return count


def labels_from_file(path: Path, num_nodes: int) -> tuple[Tensor, Tensor]:
    """labels int64 [N] (-1: none), confidence float64 [N] (1 where the file has none): .npy, or .npz with `labels`, `confidence`."""
    try:
        found = np.load(path, allow_pickle=False)
        labels = found["labels"] if hasattr(found, "files") else found
        confidence = found["confidence"] if hasattr(found, "files") and "confidence" in found.files else np.ones(len(labels))
    except FileNotFoundError:
        raise UserError(f"Label file not found: {path}. Set cluster.labels_path to a .npy or .npz file.") from None
    except (ValueError, OSError, EOFError, KeyError, TypeError, BadZipFile) as error:
        raise UserError(f"Label file {path} cannot be read: {error}. Expected integers in a .npy, or a .npz with `labels` (and `confidence`).") from None
    if labels.shape != (num_nodes,) or confidence.shape != (num_nodes,):
        raise UserError(f"Label file {path} has labels of shape {labels.shape} and confidence of shape {confidence.shape}; the graph has {num_nodes:,} nodes.")
    if not np.issubdtype(labels.dtype, np.integer):
        raise UserError(f"Label file {path} holds {labels.dtype}, not integers.")
    if not (np.issubdtype(confidence.dtype, np.number) or confidence.dtype == np.bool_):
        raise UserError(f"Label file {path} has a confidence of type {confidence.dtype}, not numbers.")
    if (labels < -1).any() or not 1 <= labels.max(initial=-1) < num_nodes:
        raise UserError(
            f"Label file {path} must number at least two clusters from 0, below the number of nodes, with -1 for unlabelled nodes; found {labels.min()} to {labels.max()}."
        )
    if not np.isfinite(confidence).all():
        raise UserError(f"Label file {path} has NaN or infinite confidence in {(~np.isfinite(confidence)).sum():,} rows.")
    return torch.from_numpy(labels.astype(np.int64)), torch.from_numpy(confidence.astype(np.float64))


def labels_by_kmeans(encoder: Encoder, embedder: Embedder, num_nodes: int, num_clusters: int, cfg: Config, comm: Comm) -> tuple[Tensor, Tensor]:
    """Collective: k-means on unit embeddings; confidence is the gap between the two nearest squared distances (§11).

    Up to 100,000 nodes are clustered as they are; beyond that k-means is fitted on a keyed sample and the rest is assigned in pieces.
    """
    begin, end = comm.slice_of(num_nodes)
    seed = keyed.derive(cfg.run.seed, keyed.STREAM["initial-labels"])
    gids = torch.arange(begin, end)

    def rows(at: Tensor) -> Tensor:
        return F.normalize(embedder(encoder, at, 0).z.flatten(1).float(), dim=1, eps=1e-12)

    if num_nodes <= _FIT_ROWS:
        found = kmeans(rows(gids), num_clusters, seed=seed, comm=comm, gids=gids, restarts=cfg.cluster.restarts)
        labels, confidence = found.labels, found.confidence.double()
    else:
        chosen = gids[keyed.uniform(keyed.stream(seed, "kmeans", 1), gids) < _FIT_ROWS / num_nodes]
        centres = kmeans(rows(chosen), num_clusters, seed=seed, comm=comm, gids=chosen, restarts=cfg.cluster.restarts).centres
        parts = [assign(rows(at), centres)[:2] for at in gids.split(_ASSIGN_ROWS)]
        labels, confidence = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]).double()
    return comm.gather_rows(labels.cpu()), comm.gather_rows(confidence.cpu())


def method_for(init: str, num_nodes: int) -> str:
    """What `cluster.init=auto` stands for: R-DGAE, whose loss looks at all pairs of nodes, on small graphs; Dink-Net beyond (§1); smoothed features
    on graphs where even that takes hours.
    """
    if init != "auto":
        return init
    return "rdgae" if num_nodes <= _SMALL else "dinknet" if num_nodes <= _LARGE else "propagated"


def initial_labels(
    cfg: Config, graph: Graph, topology: Topology, edge_only: Callable[[], tuple[Encoder, Embedder]], comm: Comm | None = None, tick: Tick = _no_tick
) -> tuple[Tensor, Tensor]:
    """Collective: (label int64 [N], confidence float64 [N]) by `cluster.init`, on the edges of `topology` only.

    `edge_only` trains an encoder with the edge loss alone and returns it with an embedder: the released way to first labels.
    """
    comm = comm or Comm()
    if cfg.cluster.init == "file":
        assert cfg.cluster.labels_path is not None
        return labels_from_file(Path(cfg.cluster.labels_path), graph.num_nodes)
    count, name, seed = number_of_clusters(cfg, graph.num_classes), cfg.data.name, cfg.run.seed
    method = method_for(cfg.cluster.init, graph.num_nodes)
    if method == "selfkmeans":
        return labels_by_kmeans(*edge_only(), graph.num_nodes, count, cfg, comm)
    x = compact(graph.features().to(torch.get_default_dtype()))
    if method == "rdgae":
        return rdgae.rdgae_labels(x, topology, count, rdgae.settings_for(name, count), seed, comm, tick)
    if method == "dinknet":
        return dinknet.dinknet_labels(x, topology, count, dinknet.settings_for(name, graph.num_nodes), seed, comm, tick)
    return propagated.propagated_labels(x, topology, count, propagated.settings_for(graph.num_nodes), seed, comm, tick)
