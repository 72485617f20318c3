"""The held-out edges of a large graph on disk: drawn by the first process that asks for them,
mapped by all.

<data.stage_dir, else data.store_dir>/holdouts/<graph>-<hash of all that decides the draw>/
manifest.json  indptr.npy  indices.npy  val_pos.npy  val_neg.npy  test_pos.npy  test_neg.npy
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from torch import Tensor

from cimage_dist.config import DataConfig
from cimage_dist.data.store import Graph, _load, _shared, should_verify
from cimage_dist.errors import UNWRITABLE, UserError
from cimage_dist.io import artifacts
from cimage_dist.types import LinkSplit, Topology

_FORMAT = 1
_STORED_FROM = 1 << 20  # directed edges; fewer are drawn again in less than a tenth of a second
_PAIRS = ("val_pos", "val_neg", "test_pos", "test_neg")


def stored(graph: Graph, data: DataConfig, seed: int, make: Callable[[], LinkSplit]) -> LinkSplit:
    """What `make` gives, from disk where it is there or can be put there; of a graph in memory, a
    small one, or without a place to write, as it is made.
    """
    if graph.path is None or graph.num_edges < _STORED_FROM:
        return make()
    folder = folder_of(graph, data, seed)
    found = _read(folder)
    if found is not None:
        return found
    try:
        # Workers ask at once: one draws, the others wait and find it.
        with artifacts.locked(folder.parent / f".lock-{folder.name}"):
            if (found := _read(folder)) is None:
                _write(folder, make())
                found = _read(folder)
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
    return make() if found is None else found


def folder_of(graph: Graph, data: DataConfig, seed: int) -> Path:
    """Named by the graph's content and everything that decides the draw."""
    facts = {
        "format": _FORMAT,
        "graph": graph.fingerprint,
        "ratios": [data.link_val_ratio, data.link_test_ratio],
        "seed": seed,
    }
    name = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=6).hexdigest()
    return Path(data.stage_dir or data.store_dir) / "holdouts" / f"{data.name}-{name}"


def _write(folder: Path, split: LinkSplit) -> None:
    arrays: dict[str, Tensor] = {name: getattr(split, name) for name in _PAIRS}
    arrays |= {"indptr": split.train.indptr, "indices": split.train.indices}
    with artifacts.committed_dir(folder) as tmp:
        for name, value in arrays.items():
            np.save(tmp / f"{name}.npy", value.numpy(), allow_pickle=False)
        files = artifacts.describe_files(tmp, [f"{name}.npy" for name in arrays])
        artifacts.write_json(tmp / artifacts.MANIFEST, {"format": _FORMAT, "files": files})


def _read(folder: Path) -> LinkSplit | None:
    """None where it is absent or damaged and must be made (again)."""
    if not (folder / artifacts.MANIFEST).is_file():
        return None
    try:
        files = artifacts.read_json(folder / artifacts.MANIFEST, "the manifest")["files"]
        if artifacts.damaged_file(folder, files, should_verify(files, "auto")):
            return None
        indptr, indices, *pairs = (
            _shared(_load(folder / f"{name}.npy")) for name in ("indptr", "indices", *_PAIRS)
        )
    except (UserError, KeyError, TypeError, AttributeError):
        return None
    return LinkSplit(Topology(indptr, indices), *pairs)
