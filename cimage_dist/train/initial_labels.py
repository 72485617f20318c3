"""Initial labels on disk: made once, checked when read, used by every run that asks for the same ones. N nodes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from cimage_dist import keyed
from cimage_dist.config import CIConfig, ClusterConfig, Config, EvalConfig, TrainConfig, fingerprint
from cimage_dist.errors import UserError
from cimage_dist.io import artifacts

_FORMAT = 1
_FILE = "labels.npz"


@dataclass(frozen=True)
class LabelSet:
    """labels int64 [N] (-1: none), confidence float64 [N], and what is known of how they were made."""

    labels: Tensor
    confidence: Tensor
    facts: dict[str, Any] = field(default_factory=dict)


def write_labels(folder: Path, found: LabelSet) -> None:
    with artifacts.committed_dir(folder) as tmp:
        np.savez(tmp / _FILE, labels=found.labels.numpy(), confidence=found.confidence.numpy())
        body = {"format": _FORMAT, "facts": found.facts, "files": artifacts.describe_files(tmp, [_FILE])}
        artifacts.write_json(tmp / artifacts.MANIFEST, body)


def read_labels(path: Path, num_nodes: int) -> LabelSet:
    """A folder that `cimage cluster` wrote, or a .npy or .npz file from elsewhere."""
    if not path.is_dir():
        return LabelSet(*labels_from_file(path, num_nodes))
    body = artifacts.read_json(path / artifacts.MANIFEST, "the manifest of a set of labels")
    if reason := artifacts.damaged_file(path, body["files"]):
        raise UserError(f"The labels in {path} cannot be trusted: {reason}. Delete the folder and make them again with `cimage cluster`.")
    return LabelSet(*labels_from_file(path / _FILE, num_nodes), body["facts"])


def find_labels(folder: Path, num_nodes: int) -> LabelSet | None:
    """What is there and whole; None where labels must be made (again)."""
    try:
        return read_labels(folder, num_nodes) if folder.is_dir() else None
    except (UserError, KeyError, TypeError):
        return None


def cache_folder(cfg: Config, graph_fingerprint: str, method: str, num_clusters: int, settings: Any) -> Path:
    """Where these labels lie: named by everything that decides them. `settings` is a dataclass of the method's, or None for selfkmeans.

    The labels of selfkmeans come from an encoder of the run's own making, so that the experiment decides them too.
    """
    told = {
        "format": _FORMAT,
        "graph": graph_fingerprint,
        "held_out": [cfg.data.holdout_edges, cfg.run.seed],
        "method": method,
        "clusters": num_clusters,
        "settings": fingerprint(_edge_only_part(cfg)) if settings is None else dataclasses.asdict(settings),
        "type": str(torch.get_default_dtype()),
    }
    name = hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=6).hexdigest()
    return Path(cfg.data.store_dir) / "labels" / f"{cfg.data.name}-{method}-{name}"


def _edge_only_part(cfg: Config) -> Config:
    """What the edge-only encoder and its k-means depend on; the rest as by default, so that searches over it share their labels."""
    return dataclasses.replace(
        cfg,
        loss=cfg.loss.edges_only(),
        cluster=ClusterConfig(init="selfkmeans", init_epochs=cfg.cluster.init_epochs, restarts=cfg.cluster.restarts),
        ci=CIConfig(),
        train=TrainConfig(precision=cfg.train.precision),
        eval=EvalConfig(),
    )


def labels_from_file(path: Path, num_nodes: int) -> tuple[Tensor, Tensor]:
    """labels int64 [N] (-1: none), confidence float64 [N]: .npy, or .npz with `labels`, `confidence`.

    Without a confidence one is drawn. Equal ones would have the lowest numbers trusted first, and often these mean something: public splits begin with their training nodes.
    """
    try:
        found = np.load(path, allow_pickle=False)
        labels = found["labels"] if hasattr(found, "files") else found
        if hasattr(found, "files") and "confidence" in found.files:
            confidence = found["confidence"]
        else:
            confidence = keyed.uniform(keyed.stream(0, "initial-labels", 9), torch.arange(len(labels))).numpy()
    except FileNotFoundError:
        raise UserError(f"Label file not found: {path}. Set cluster.labels_path to a .npy or .npz file, or to a folder that `cimage cluster` made.") from None
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
