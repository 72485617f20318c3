"""One neighbour sampler over several backends: ours (`csr`), pyg-lib and torch-sparse. All draw
from the same distribution.

The compiled backends are asked for one hop at a time and only choose entries; hidden edges, local
ids and weights are handled here, alike for all. They draw fanout + surplus neighbours of every
target, hidden ones are dropped, and a keyed choice keeps `fanout` of the rest: a uniform subset of
a uniform subset. Rows left with too few are drawn again by `csr`; whether that happens depends on
how many hidden neighbours came up, not on which visible ones, so the draw stays uniform. What
differs from `csr`: draws are seeded per (key, hop), so they depend on the batch they are
made in, and a capped row under a keyed hidden share reports its expected visible degree.
"""

from __future__ import annotations

import importlib
import logging
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cimage_dist import keyed
from cimage_dist.data.sparse import CsrFeatures, rows_at
from cimage_dist.errors import UserError
from cimage_dist.sampling import csr
from cimage_dist.sampling.csr import CsrGraph, Selection
from cimage_dist.sampling.hidden import HiddenEdges, hide
from cimage_dist.sampling.local_ids import LocalIds
from cimage_dist.sampling.seeds import IntArray
from cimage_dist.types import EdgeList, Features, Hops, SparseRows, View

log = logging.getLogger("cimage")

_MODULES = {"pyg-lib": "pyg_lib", "torch-sparse": "torch_sparse"}

# (colptr, row, seeds, fan-out) -> (local target, entry) of the drawn neighbours of one hop
OneHop = Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]


def resolve_backend(name: str) -> str:
    """The backend that will run: `name` itself, for `auto` csr, whose draws are a function of
    (seed, step, node): a run resumes to the bit on any machine.
    """
    if name in ("auto", "csr"):
        return "csr"
    if name not in _MODULES:
        raise UserError(
            f"sampler.backend is {name!r}, which does not exist. Choose one of auto, csr, "
            "pyg-lib, torch-sparse."
        )
    reason = _import_error(name)
    if reason is not None:
        raise UserError(
            f"sampler.backend is {name!r}, but it cannot be imported here ({reason}). Install a "
            f"build of {name} that matches torch {torch.__version__} "
            "on every machine, or set sampler.backend=csr, which needs no compiled package and "
            "draws from the same distribution."
        )
    return name


def _import_error(name: str) -> str | None:
    try:
        importlib.import_module(_MODULES[name])
    except (
        ImportError,
        OSError,
        RuntimeError,
    ) as error:  # a build against another torch fails with any of these
        return f"{type(error).__name__}: {error}"
    return None


def _pyg_lib_hop(colptr: Tensor, row: Tensor, seeds: Tensor, fanout: int) -> tuple[Tensor, Tensor]:
    pyg_lib = importlib.import_module("pyg_lib")
    out = pyg_lib.sampler.neighbor_sample(
        colptr,
        row,
        seeds,
        [fanout],
        csc=True,
        replace=False,
        directed=True,
        disjoint=False,
        return_edge_id=True,
    )
    return out[1], out[3]


def _torch_sparse_hop(
    colptr: Tensor, row: Tensor, seeds: Tensor, fanout: int
) -> tuple[Tensor, Tensor]:
    out = torch.ops.torch_sparse.neighbor_sample(colptr, row, seeds, [fanout], False, True)
    return out[2], out[3]


ONE_HOP: dict[str, OneHop] = {"pyg-lib": _pyg_lib_hop, "torch-sparse": _torch_sparse_hop}


def check_fanouts(fanouts: Sequence[int]) -> list[int]:
    bad = [f for f in fanouts if f != -1 and not 1 <= f <= csr.MAX_FANOUT]
    if bad or not len(fanouts):
        shown = f"holds {bad[0]}" if bad else "is empty"
        raise UserError(
            f"sampler.fanouts {shown}. Give one number per hop, each between 1 and "
            f"{csr.MAX_FANOUT}, or -1 for all neighbours: [10, 5]."
        )
    return [int(f) for f in fanouts]


class NeighbourSampler:
    """Sampled neighbourhoods on a fixed graph; arrays are used as they are, mapped files stay on
    disk.

    indptr int64 [N+1], indices int32 or int64 [E], ascending in a row, both directions of every
    edge, no self-loops.
    """

    def __init__(
        self,
        indptr: IntArray,
        indices: IntArray,
        fanouts: Sequence[int],
        *,
        backend: str = "auto",
        rescale: bool = True,
    ) -> None:
        self.graph = CsrGraph(np.asarray(indptr), np.asarray(indices))
        self.num_nodes = len(self.graph.indptr) - 1
        for array in self.graph:
            csr.expect_scattered(array)
        self.fanouts = check_fanouts(fanouts)
        # Whether messages can have a weight other than 1.
        self.is_weighted = rescale and any(fanout >= 0 for fanout in self.fanouts)
        is_wide = self.graph.indices.dtype == np.int64
        self.backend = resolve_backend(backend)
        self._columns: tuple[Tensor, Tensor] | None = None
        if self.backend != "csr":
            if not is_wide:
                log.warning(
                    "%s reads 64-bit columns only: %.1f MB are copied in this process",
                    self.backend,
                    8e-6 * len(self.graph.indices),
                )
            with warnings.catch_warnings():
                # torch warns that a mapped file is read-only; nobody writes to it
                warnings.simplefilter("ignore", UserWarning)
                self._columns = (
                    torch.from_numpy(self.graph.indptr),
                    torch.from_numpy(self.graph.indices.astype(np.int64, copy=False)),
                )

    def sample(
        self,
        seeds: NDArray[np.int64],
        key: int,
        hidden: HiddenEdges | None = None,
        features: NDArray[Any] | CsrFeatures | None = None,
    ) -> View:
        """The neighbourhoods of `seeds` (gids, repeats allowed), fanouts[h] neighbours without
        replacement in hop h, -1 for all.

        The view's nodes: the seeds without repeats in the order given, then each hop's new nodes,
        ascending inside a hop; `nodes` are the seeds as given. Its messages are sorted by target,
        hence also grouped by hop, and by gid of the source for one target; they weigh visible
        degree / sampled of their target (§11.1). Its degrees are expected visible degrees: listed
        hidden edges taken off, of the others the visible share.

        `key` holds (seed, step): the draw of a node is a function of the key, its gid and the
        hidden edges, so it is the same whichever batch, rank or process asks. Hidden edges are
        taken away before the draw, so a fan-out counts visible neighbours; `csr` states the
        distribution and when a degree is exact. x are the rows of `features`, if given, in their
        own type, sparse where these are.
        """
        seeds, graph = np.asarray(seeds, dtype=np.int64), self.graph
        hidden = hide(self.num_nodes) if hidden is None else hidden
        self._check(seeds)
        ids = LocalIds(self.num_nodes)
        places = ids.add(seeds, ascending=False)
        nodes_per_hop, edges_per_hop = [len(ids.nodes)], []
        src, dst, weight = [], [], []
        begin = 0
        for hop, fanout in enumerate(self.fanouts, start=1):
            # Every node is a target once, in the hop after its first appearance.
            end = len(ids.nodes)
            self._fetch(ids.nodes[begin:])
            chosen = self._select(ids.nodes[begin:], fanout, key, hop, hidden)
            src.append(ids.add(graph.indices[chosen.entry]))
            dst.append(np.repeat(np.arange(begin, end), chosen.kept))
            if self.is_weighted:
                shares = chosen.visible / np.maximum(chosen.kept, 1)
                weight.append(np.repeat(shares.astype(np.float32), chosen.kept))
            begin = end
            nodes_per_hop.append(len(ids.nodes) - end)
            edges_per_hop.append(len(src[-1]))
        # The rows of the last hop are not read, so their visible degree is an expectation. So is
        # that of all others: a node must have one degree whether it is at the rim of a rank's
        # subgraph or inside another's.
        nodes = ids.nodes
        csr.fetch(graph.indptr, nodes[begin:])
        degree = csr.expected_visible(graph, nodes, hidden)
        weights = np.concatenate(weight) if self.is_weighted else None
        return View(
            x=_rows_of(features, nodes),
            edges=EdgeList(
                torch.from_numpy(np.concatenate(src)),
                torch.from_numpy(np.concatenate(dst)),
                len(nodes),
                None if weights is None else torch.from_numpy(weights),
                torch.from_numpy(degree),
            ),
            nodes=torch.from_numpy(places),
            hops=Hops(tuple(nodes_per_hop), tuple(edges_per_hop)),
            gids=torch.from_numpy(nodes),
        )

    def _fetch(self, targets: NDArray[np.int64]) -> None:
        indptr, indices = self.graph
        csr.fetch(indptr, targets, targets + 1)
        if csr.is_large(indices):
            first, last = indptr[targets], indptr[targets + 1] - 1
            csr.fetch(indices, first[first <= last], last[first <= last])

    def _check(self, seeds: NDArray[np.int64]) -> None:
        bad = seeds[(seeds < 0) | (seeds >= self.num_nodes)]
        if bad.size:
            raise UserError(
                f"{bad.size} of {seeds.size} seed nodes are outside the graph of "
                f"{self.num_nodes} nodes, the first is {bad[0]}. Node ids run from 0."
            )

    def _select(
        self, targets: NDArray[np.int64], fanout: int, key: int, hop: int, hidden: HiddenEdges
    ) -> Selection:
        # Keeping every neighbour involves no draw.
        if self._columns is None or fanout < 0 or not len(targets):
            return self._by_csr(targets, fanout, key, hidden)
        return self._by_operator(self._columns, targets, fanout, key, hop, hidden)

    def _by_csr(
        self, targets: NDArray[np.int64], fanout: int, key: int, hidden: HiddenEdges
    ) -> Selection:
        bound = csr.list_bound(self.fanouts)
        return csr.select(self.graph, targets, fanout, bound, csr.draw_keys(key), hidden)

    def _by_operator(
        self,
        columns: tuple[Tensor, Tensor],
        targets: NDArray[np.int64],
        fanout: int,
        key: int,
        hop: int,
        hidden: HiddenEdges,
    ) -> Selection:
        begin, hop_key = self.graph.indptr[targets], keyed.derive(key, 3, hop)
        degree = self.graph.indptr[targets + 1] - begin
        wanted = fanout + _surplus(targets, fanout, hidden)
        # The operators draw from torch's global CPU generator: seed it for this hop and give it
        # back as it was.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(hop_key)
            drawn = ONE_HOP[self.backend](*columns, torch.from_numpy(targets), wanted)
        row, entry = (part.numpy().astype(np.int64, copy=False) for part in drawn)
        seen = ~hidden.is_hidden(targets[row], self.graph.indices[entry].astype(np.int64))
        row, entry = row[seen], entry[seen]
        count = np.bincount(row, minlength=len(targets))
        expected = hidden.expected_visible(targets, degree)
        visible = np.where(degree <= wanted, count, np.maximum(expected, np.minimum(count, fanout)))
        # Every row keeps its `fanout` smallest hashes.
        first = keyed.word(hop_key, targets)
        order = np.lexsort((csr.tied_hash(hop_key, first[row], entry - begin[row]), row))
        place = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
        kept = np.minimum(count, fanout)
        row, entry = row[order][place < fanout], entry[order][place < fanout]
        # Rows with too few visible ones are drawn again.
        short = np.flatnonzero((count < fanout) & (degree > wanted))
        again = self._by_csr(targets[short], fanout, key, hidden)
        stays = ~np.isin(row, short)
        row = np.concatenate([row[stays], np.repeat(short, again.kept)])
        entry = np.concatenate([entry[stays], again.entry])
        kept[short], visible[short] = again.kept, again.visible
        return Selection(entry[np.lexsort((entry, row))], kept, visible)


def _rows_of(features: NDArray[Any] | CsrFeatures | None, nodes: NDArray[np.int64]) -> Features:
    if features is None:
        return torch.empty(len(nodes), 0)
    if csr.is_large(features):
        return torch.from_numpy(csr.rows_of_pages(features, nodes))
    found = rows_at(features, nodes)
    # A sampled run is the same run whether its features are stored sparse or dense.
    return replace(found, draws_by_place=True) if isinstance(found, SparseRows) else found


def _surplus(targets: NDArray[np.int64], fanout: int, hidden: HiddenEdges) -> int:
    """Neighbours to draw beyond the fan-out so that enough visible ones are left in nearly every
    row.
    """
    listed = min(int(hidden.listed_per_row(targets).max()), fanout)
    share = math.ceil((fanout + listed) / (1.0 - hidden.extra_rate)) - fanout - listed
    return listed + (2 * share + 4 if hidden.extra_rate > 0 else 0)
