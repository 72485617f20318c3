"""One neighbour sampler over several backends: ours (`csr`), pyg-lib and torch-sparse. All draw
from the same distribution.

The compiled backends are asked for one hop at a time and only choose entries; hidden edges, local
ids and weights are handled here, alike for all. They draw fanout + surplus neighbours of every
target, hidden ones are dropped, and a keyed choice keeps `fanout` of the rest: a uniform subset of
a uniform subset. Rows left with too few are drawn again by `csr`; whether that happens depends on
how many hidden neighbours came up, not on which visible ones, so the draw stays uniform. What
differs from `csr`: draws are seeded per (seed, step, hop), so they depend on the batch they are
made in, and a capped row under a keyed hidden share reports its expected visible degree.
"""

from __future__ import annotations

import importlib
import logging
import math
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cimage_dist import keyed
from cimage_dist.errors import UserError
from cimage_dist.sampling import csr_select
from cimage_dist.sampling.csr_sampler import (
    Engine,
    SampledSubgraph,
    check_fanouts,
    engine_functions,
    expand,
)
from cimage_dist.sampling.csr_select import CsrGraph, Selection
from cimage_dist.sampling.hidden import HiddenEdges
from cimage_dist.sampling.seeds import IntArray

log = logging.getLogger("cimage")

_MODULES = {"pyg-lib": "pyg_lib", "torch-sparse": "torch_sparse"}
_MAX_PRIVATE_COPY = 1 << 30

# (colptr, row, seeds, fan-out) -> (local target, entry) of the drawn neighbours of one hop
OneHop = Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]


def resolve_backend(name: str, copy_bytes: int = 0) -> str:
    """The backend that will run: `name` itself, or for `auto` pyg-lib where it can be imported,
    else csr.

    The compiled backends read int64 columns only; `copy_bytes` is what a converted private copy
    would take in every process. Above 1 GiB `auto` prefers csr, which reads the mapped file as it
    is.
    """
    if name == "csr":
        return name
    if name == "auto":
        is_usable = copy_bytes <= _MAX_PRIVATE_COPY and _import_error("pyg-lib") is None
        return "pyg-lib" if is_usable else "csr"
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


class NeighbourSampler:
    """`sample(seeds, step, hidden)` on a fixed graph; arrays are used as they are, mapped files
    stay on disk.

    indptr int64 [N+1], indices int32 or int64 [E], ascending in a row, both directions of every
    edge, no self-loops.
    """

    def __init__(
        self,
        indptr: IntArray,
        indices: IntArray,
        fanouts: Sequence[int],
        *,
        seed: int,
        backend: str = "auto",
        rescale: bool = True,
        engine: Engine = "auto",
    ) -> None:
        self.graph = CsrGraph(np.asarray(indptr), np.asarray(indices))
        self.fanouts = check_fanouts(fanouts)
        self.seed = seed
        self.rescale = rescale
        self._select, self._relabel = engine_functions(engine)
        is_wide = self.graph.indices.dtype == np.int64
        self.backend = resolve_backend(backend, 0 if is_wide else 8 * len(self.graph.indices))
        self._columns: tuple[Tensor, Tensor] | None = None
        if self.backend != "csr":
            if not is_wide:
                log.warning(
                    "%s reads 64-bit columns only: %.1f MB are copied in this process",
                    self.backend,
                    8e-6 * len(self.graph.indices),
                )
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", UserWarning
                )  # torch warns that a mapped file is read-only; nobody writes to it
                self._columns = (
                    torch.from_numpy(self.graph.indptr),
                    torch.from_numpy(self.graph.indices.astype(np.int64, copy=False)),
                )

    @property
    def is_weighted(self) -> bool:
        """Whether messages can have a weight other than 1."""
        return self.rescale and any(fanout >= 0 for fanout in self.fanouts)

    def sample(
        self, seeds: NDArray[np.int64], step: int, hidden: HiddenEdges | None = None
    ) -> SampledSubgraph:
        """The sampled neighbourhood of `seeds` (gids) at a step; see `csr_sampler.sample`."""
        return self.sample_keyed(seeds, keyed.stream(self.seed, "neighbours", step), hidden)

    def sample_keyed(
        self, seeds: NDArray[np.int64], key: int, hidden: HiddenEdges | None = None
    ) -> SampledSubgraph:
        """As `sample`, for a key of one's own."""
        keys, bound = csr_select.draw_keys(key), csr_select.list_bound(self.fanouts)
        hop = 0

        def by_csr(targets: NDArray[np.int64], fanout: int) -> Selection:
            return self._select(self.graph, targets, fanout, bound, keys, hidden)

        def by_operator(targets: NDArray[np.int64], fanout: int) -> Selection:
            nonlocal hop
            hop += 1
            # Keeping every neighbour involves no draw.
            return (
                by_csr(targets, fanout)
                if fanout < 0 or not len(targets)
                else self._by_operator(targets, fanout, keyed.derive(key, 3, hop), hidden, by_csr)
            )

        select = by_csr if self.backend == "csr" else by_operator
        return expand(
            self.graph,
            np.asarray(seeds, dtype=np.int64),
            self.fanouts,
            select,
            self._relabel,
            hidden,
            self.rescale,
        )

    def _by_operator(
        self,
        targets: NDArray[np.int64],
        fanout: int,
        key: int,
        hidden: HiddenEdges | None,
        by_csr: Callable[[NDArray[np.int64], int], Selection],
    ) -> Selection:
        assert self._columns is not None
        begin = self.graph.indptr[targets]
        degree = self.graph.indptr[targets + 1] - begin
        wanted = fanout + _surplus(targets, fanout, hidden)
        # The operators draw from torch's global CPU generator: seed it for this hop and give it
        # back as it was.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(key)
            local, drawn = ONE_HOP[self.backend](*self._columns, torch.from_numpy(targets), wanted)
        row, entry = (
            local.numpy().astype(np.int64, copy=False),
            drawn.numpy().astype(np.int64, copy=False),
        )
        order = np.lexsort((entry, row))
        row, entry = row[order], entry[order]
        visible = degree.astype(np.float64)
        if hidden is not None:
            keep = ~hidden.is_hidden(targets[row], self.graph.indices[entry].astype(np.int64))
            row, entry = row[keep], entry[keep]
            count = np.bincount(row, minlength=len(targets))
            visible = np.where(
                degree <= wanted,
                count,
                np.maximum(hidden.expected_visible(targets, degree), np.minimum(count, fanout)),
            )
        keep = csr_select.thin(row, entry - begin[row], targets, fanout, key)
        row, entry = row[keep], entry[keep]
        count = np.bincount(row, minlength=len(targets))
        short = np.flatnonzero((count < fanout) & (degree > wanted))
        selection = Selection(entry, count, visible)
        return (
            csr_select.replace_rows(selection, short, by_csr(targets[short], fanout))
            if short.size
            else selection
        )


def _surplus(targets: NDArray[np.int64], fanout: int, hidden: HiddenEdges | None) -> int:
    """Neighbours to draw beyond the fan-out so that enough visible ones are left in nearly every
    row.
    """
    if hidden is None:
        return 0
    listed = min(int(hidden.listed_per_row(targets).max()), fanout)
    share = math.ceil((fanout + listed) / (1.0 - hidden.extra_rate)) - fanout - listed
    return listed + (2 * share + 4 if hidden.extra_rate > 0 else 0)
