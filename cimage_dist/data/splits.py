"""Which nodes and edges are learned from and which are kept back (§2.2, §2.3). Every draw is keyed
by (seed, id).

The held-out edges of a large graph are on disk: drawn by the first process that asks for them,
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
import torch
from torch import Tensor

from cimage_dist import keyed
from cimage_dist.config import DataConfig
from cimage_dist.data.store import Graph, _load, _shared, should_verify
from cimage_dist.errors import UNWRITABLE, UserError
from cimage_dist.io import artifacts
from cimage_dist.types import LinkSplit, NodeSplit, Topology

_LINKS_FORMAT = 1
_STORED_FROM = 1 << 20  # directed edges; fewer are drawn again in less than a tenth of a second
_PAIRS = ("val_pos", "val_neg", "test_pos", "test_neg")


def training_graph(graph: Graph, data: DataConfig, seed: int) -> tuple[Topology, LinkSplit | None]:
    """The topology that message passing, positives and embeddings use, and the held-out edges when
    there are any.

    With data.holdout_edges=link (or auto, see `settled`) no validation or test edge is in that
    topology, in either direction (§2.3). All processes of a machine map one copy of a large one
    (`on_disk`).
    """
    topology, data = graph.topology(), settled(data, graph)
    if data.holdout_edges == "none":
        return topology, None
    split = on_disk(graph, data, seed, lambda: link_split(topology, data, seed))
    return split.train, split


def settled(data: DataConfig, graph: Graph) -> DataConfig:
    """The data settings with what holdout_edges=auto stands for on this graph."""
    return data.settled(graph.num_classes > 0, graph.num_edges // 2)


def num_training_edges(num_edges: int, data: DataConfig) -> int:
    """Directed edges that `training_graph` leaves of so many, without making the split."""
    if data.holdout_edges == "none":
        return num_edges
    undirected = num_edges // 2
    held = round(data.link_val_ratio * undirected) + round(data.link_test_ratio * undirected)
    return 2 * (undirected - held)


def node_split(graph: Graph, data: DataConfig, seed: int) -> NodeSplit:
    """The node split that `data.split` asks for; unlabelled nodes are in no mask.

    auto: the split that came with the data, else random. public: column `data.split_index` of the
    given ones. random: `train_ratio` and `val_ratio` of the labelled nodes, the rest is the test
    set. per_class: `labels_per_class` training nodes of each class, then `val_ratio` of the other
    labelled nodes, then test.
    """
    y = graph.labels()
    if y is None or not bool((y >= 0).any()):
        raise UserError(
            f"Graph {graph.name!r} has no labels, so nodes cannot be split for evaluation. Add "
            "a labels file, or leave node scores out."
        )
    if data.split == "public" or (data.split == "auto" and graph.masks):
        return _given_split(graph, y, data.split_index)
    if data.split == "per_class":
        train = _per_class(y, data.labels_per_class, seed)
        rest = _shuffled(torch.nonzero((y >= 0) & ~train).view(-1), seed)
        num_val = round(data.val_ratio * len(rest))
        return NodeSplit(train, _mask(rest[:num_val], len(y)), _mask(rest[num_val:], len(y)))
    nodes = _shuffled(torch.nonzero(y >= 0).view(-1), seed)
    num_train, num_val = round(data.train_ratio * len(nodes)), round(data.val_ratio * len(nodes))
    if num_train == 0 or num_val == 0 or num_train + num_val >= len(nodes):
        raise UserError(
            f"Graph {graph.name!r} has {len(nodes)} labelled nodes, too few for a random split "
            "with "
            f" data.train_ratio={data.train_ratio} and data.val_ratio={data.val_ratio}. "
            "Raise the ratios, or give splits with the data."
        )
    parts = nodes[:num_train], nodes[num_train : num_train + num_val], nodes[num_train + num_val :]
    return NodeSplit(*(_mask(part, len(y)) for part in parts))


def few_label_split(y: Tensor, per_class: int, seed: int) -> NodeSplit:
    """`per_class` training nodes of each class, no validation nodes, all other labelled nodes for
    test.
    """
    train = _per_class(y, per_class, seed)
    return NodeSplit(train, torch.zeros_like(train), (y >= 0) & ~train)


def _given_split(graph: Graph, y: Tensor, index: int) -> NodeSplit:
    if not graph.masks:
        raise UserError(
            f"Graph {graph.name!r} comes without a split. Use data.split=random or "
            "data.split=per_class, or add a splits file."
        )
    if index >= graph.num_splits:
        raise UserError(
            f"data.split_index={index}, but graph {graph.name!r} has {graph.num_splits} given "
            "split(s), counted from 0."
        )
    given = {}
    for name in ("train", "val", "test"):
        mask = graph.masks.get(name)
        column = (
            torch.zeros(len(y), dtype=torch.bool)
            if mask is None
            else torch.tensor(mask if mask.ndim == 1 else mask[:, index])
        )
        given[name] = column & (y >= 0)
    for a, b in (("train", "val"), ("train", "test"), ("val", "test")):
        if both := int((given[a] & given[b]).sum()):
            raise UserError(
                f"The given splits of graph {graph.name!r} overlap: {both:,} nodes are in both "
                f"{a} and {b}."
            )
    return NodeSplit(**given)


def _mask(ids: Tensor, size: int) -> Tensor:
    mask = torch.zeros(size, dtype=torch.bool)
    mask[ids] = True
    return mask


def _shuffled(ids: Tensor, seed: int) -> Tensor:
    # The 64-bit hash is a bijection of the id, so there are no ties.
    return ids[keyed.bits(keyed.stream(seed, "split"), ids).argsort()]


def _per_class(y: Tensor, per_class: int, seed: int) -> Tensor:
    """Mask of `per_class` nodes of every class, the first ones in shuffled order."""
    nodes = _shuffled(torch.nonzero(y >= 0).view(-1), seed)
    counts = torch.bincount(y[nodes])
    small = torch.nonzero((counts > 0) & (counts <= per_class)).view(-1)
    if len(small):
        shown = ", ".join(f"class {int(c)} has {int(counts[c])}" for c in small[:3])
        raise UserError(
            f"{per_class} training nodes per class are too many: {len(small)} class(es) would have "
            f"no node left to score ({shown}). Lower the number of labels per class."
        )
    by_class = nodes[y[nodes].argsort(stable=True)]
    first = counts.cumsum(0) - counts
    rank = torch.arange(len(by_class)) - first[y[by_class]]
    return _mask(by_class[rank < per_class], len(y))


def link_split(topology: Topology, data: DataConfig, seed: int) -> LinkSplit:
    """Hold out `link_val_ratio` and `link_test_ratio` of the undirected edges and as many non-edges
    (§2.3: 85/5/10).

    An edge {u < v} is ranked by the hash of u·N + v; the smallest are the test edges, the next the
    validation edges. Non-edges are pairs u < v without an edge in the whole graph, distinct within
    and across the two sets.
    """
    n = topology.num_nodes
    rows, columns = topology.rows(), topology.indices.to(torch.int64)
    upper = rows < columns
    pairs = rows[upper] * n + columns[upper]
    num_val, num_test = (
        round(data.link_val_ratio * len(pairs)),
        round(data.link_test_ratio * len(pairs)),
    )
    if num_val == 0 or num_test == 0 or num_val + num_test >= len(pairs):
        raise UserError(
            f"The graph has {len(pairs)} undirected edges, too few to hold out "
            f"data.link_val_ratio={data.link_val_ratio} and "
            f"data.link_test_ratio={data.link_test_ratio} of them."
        )
    key = keyed.stream(seed, "link-split")
    order = keyed.bits(key, pairs).argsort()
    test, val = pairs[order[:num_test]], pairs[order[num_test : num_test + num_val]]
    held = torch.cat([test, val]).sort().values
    keep = ~_contains(held, torch.minimum(rows, columns) * n + torch.maximum(rows, columns))
    indptr = torch.zeros(n + 1, dtype=torch.int64)
    indptr[1:] = torch.bincount(rows[keep], minlength=n).cumsum(0)
    train = Topology(indptr, topology.indices[keep])
    negatives = _non_edges(pairs, n, num_val + num_test, keyed.stream(seed, "link-negatives"))
    return LinkSplit(
        train,
        _unpack(val, n),
        _unpack(negatives[:num_val], n),
        _unpack(test, n),
        _unpack(negatives[num_val:], n),
    )


def _contains(ordered: Tensor, values: Tensor) -> Tensor:
    """Which values occur in the ascending, non-empty `ordered`."""
    at = torch.searchsorted(ordered, values).clamp_(max=len(ordered) - 1)
    return ordered[at] == values


def _unpack(pairs: Tensor, n: int) -> Tensor:
    return torch.stack([pairs // n, pairs % n], dim=1)


def _non_edges(pairs: Tensor, n: int, count: int, key: int) -> Tensor:
    """`count` distinct keys u·N + v (u < v) not among the ascending `pairs`, in random order."""
    free = n * (n - 1) // 2 - len(pairs)
    if free < count:
        raise UserError(
            f"Link prediction needs {count:,} non-edges, but the graph is so dense that it has "
            f"only {free:,}. "
            "Lower data.link_val_ratio and data.link_test_ratio."
        )
    if free < 2 * count:
        # Nearly complete graph: all pairs are no more than a few times its edges, so list them.
        u, v = torch.triu_indices(n, n, offset=1)
        every = u * n + v
        every = every[~_contains(pairs, every)]
        return every[keyed.bits(key, every).argsort()[:count]]
    found = torch.empty(0, dtype=torch.int64)
    drawn = 0
    while len(found) < count:
        ids = torch.arange(drawn, drawn + 2 * (count - len(found)) + 16)
        drawn += len(ids)
        u, v = keyed.integers(key, 2 * ids, n), keyed.integers(key, 2 * ids + 1, n)
        fresh = (torch.minimum(u, v) * n + torch.maximum(u, v))[u != v]
        found = _first_seen(torch.cat([found, fresh[~_contains(pairs, fresh)]]))
    return found[:count]


def _first_seen(values: Tensor) -> Tensor:
    """Distinct values in the order of their first occurrence."""
    ordered, where = values.sort(stable=True)
    first = torch.ones(len(values), dtype=torch.bool)
    first[1:] = ordered[1:] != ordered[:-1]
    return values[where[first].sort().values]


def on_disk(graph: Graph, data: DataConfig, seed: int, make: Callable[[], LinkSplit]) -> LinkSplit:
    """What `make` gives, from disk where it is there or can be put there; of a graph in memory, a
    small one, or without a place to write, as it is made.
    """
    if graph.path is None or graph.num_edges < _STORED_FROM:
        return make()
    folder = folder_of(graph, data, seed)
    found = _read_links(folder)
    if found is not None:
        return found
    try:
        # Workers ask at once: one draws, the others wait and find it.
        with artifacts.locked(folder.parent / f".lock-{folder.name}"):
            if (found := _read_links(folder)) is None:
                _write_links(folder, make())
                found = _read_links(folder)
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
    return make() if found is None else found


def folder_of(graph: Graph, data: DataConfig, seed: int) -> Path:
    """Named by the graph's content and everything that decides the draw."""
    facts = {
        "format": _LINKS_FORMAT,
        "graph": graph.fingerprint,
        "ratios": [data.link_val_ratio, data.link_test_ratio],
        "seed": seed,
    }
    name = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=6).hexdigest()
    return Path(data.stage_dir or data.store_dir) / "holdouts" / f"{data.name}-{name}"


def _write_links(folder: Path, split: LinkSplit) -> None:
    arrays: dict[str, Tensor] = {name: getattr(split, name) for name in _PAIRS}
    arrays |= {"indptr": split.train.indptr, "indices": split.train.indices}
    with artifacts.committed_dir(folder) as tmp:
        for name, value in arrays.items():
            np.save(tmp / f"{name}.npy", value.numpy(), allow_pickle=False)
        files = artifacts.describe_files(tmp, [f"{name}.npy" for name in arrays])
        artifacts.write_json(tmp / artifacts.MANIFEST, {"format": _LINKS_FORMAT, "files": files})


def _read_links(folder: Path) -> LinkSplit | None:
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
