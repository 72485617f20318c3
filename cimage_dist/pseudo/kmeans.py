"""Sharded k-means (§6.6): k-means++ on a keyed sample of all ranks, then assign locally, add up.

Shapes: N local rows, n rows of a chunk, D width, C clusters, S sampled rows, L candidates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numba
import torch
import torch.nn.functional as F
from torch import Tensor

from cimage_dist import keyed
from cimage_dist.comm import Comm
from cimage_dist.errors import UserError

# Rows, scores and float64 rows of a chunk stay in a processor's cache at usual widths.
CHUNK_ROWS = 4_096
_IDS_PER_CHUNK, _SAMPLE_PER_CLUSTER = 1 << 16, 256
# Rows are finite by the time they are added; sums over a row may be taken in vector order.
_FAST = {"nnan", "ninf", "nsz", "reassoc", "contract"}
_VECTOR, _SUM_COLUMNS = 16, 512
_FAR = 3e38
_TIE = 1e-9  # relative difference of inertia below which the earlier start is kept


@dataclass(frozen=True)
class KMeansResult:
    """`labels[i]` is the centre nearest to local row i; inertia and centres are of all ranks.

    labels int64 [N]; centres float64 [C, D]; confidence [N] = d2 - d1, the gap between the two
    smallest squared distances.
    """

    labels: Tensor
    centres: Tensor
    inertia: float
    confidence: Tensor
    iterations: int


@torch.no_grad()
def kmeans(
    x: Tensor,
    num_clusters: int,
    *,
    seed: int,
    comm: Comm | None = None,
    gids: Tensor | None = None,
    max_iterations: int = 100,
    tol: float = 1e-4,
    restarts: int = 1,
    spherical: bool = False,
    chunk_rows: int = CHUNK_ROWS,
    init: Tensor | None = None,
) -> KMeansResult:
    """Collective: Lloyd's algorithm on the union of all ranks' rows, min Σ_i min_c ‖x_i - μ_c‖².

    x [N, D] of any float type, N may be 0 on some ranks; gids int64 [N] global row ids, by default
    counted on in rank order. The result depends on the sharding through the order of summation
    only. `restarts` runs from different starts keep the lowest inertia; `init` [C, D] replaces the
    start and makes one run. A run stops when the inertia falls by less than `tol` of itself.
    `spherical` puts rows and centres on the unit sphere.
    """
    comm = comm or Comm()
    if min(max_iterations, restarts, chunk_rows) < 1:
        raise UserError(
            f"k-means: iterations ({max_iterations}), restarts ({restarts}) and rows per chunk "
            f"({chunk_rows}) must each be at least 1."
        )
    if x.dim() != 2 or not x.is_floating_point():
        raise UserError(
            f"k-means: rows must be a floating-point matrix [rows, width]; got {x.dtype} of "
            f"shape {list(x.shape)}."
        )
    if init is not None and tuple(init.shape) != (num_clusters, x.shape[1]):
        raise UserError(
            f"k-means: the start centres have shape {list(init.shape)}, but {num_clusters} "
            f"clusters of width {x.shape[1]} are wanted."
        )
    if gids is not None and gids.numel() != x.shape[0]:
        raise UserError(
            f"k-means: {gids.numel()} global ids were given for {x.shape[0]} rows; there must "
            "be one per row."
        )
    given = None if gids is None else gids.to(x.device, torch.int64)
    ids = _Ids(0, given)
    if given is None:
        sizes = comm.gather_rows(torch.tensor([x.shape[0]], dtype=torch.int64, device=x.device))
        ids = _Ids(int(sizes[: comm.rank].sum()), None)
    num_rows, origin = _count_and_origin(x, num_clusters, comm, chunk_rows)
    shard = _Shard(x, torch.zeros_like(origin) if spherical else origin, chunk_rows, spherical)
    best: tuple[float, Tensor, int] | None = None
    for restart in range(1 if init is not None else restarts):
        if init is None:
            key = keyed.stream(seed, "kmeans", restart)
            centres = _draw_start(shard, ids, num_rows, num_clusters, key, comm)
        else:
            centres = comm.broadcast(shard.moved(init))
        run = _lloyd(shard, ids, centres, comm, max_iterations, tol)
        # Starts often end in the same clusters, numbered otherwise: rounding, which depends on the
        # sharding, must not choose between them.
        if best is None or run[0] < best[0] * (1 - _TIE):
            best = run
    assert best is not None
    _, centres, iterations = best
    labels, confidence, distance = _assign(shard, centres)
    inertia = float(comm.sum(distance.sum(dtype=torch.float64)))
    return KMeansResult(labels, centres + shard.origin, inertia, confidence, iterations)


@torch.no_grad()
def assign(
    x: Tensor, centres: Tensor, chunk_rows: int = CHUNK_ROWS, spherical: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Nearest centre of every row: (labels int64 [N], confidence d2 - d1 [N], squared distance d1
    [N]); ties go to the lowest id.

    With a single centre there is no second distance and the confidence is 0.
    """
    origin = _origin(_sums(x, chunk_rows) / max(x.shape[0], 1), x)
    shard = _Shard(x, torch.zeros_like(origin) if spherical else origin, chunk_rows, spherical)
    return _assign(shard, shard.moved(centres))


@dataclass(frozen=True)
class _Ids:
    """Global ids of the local rows: as given, or counted on from `first` without keeping them."""

    first: int
    given: Tensor | None

    def __call__(self, lids: Tensor) -> Tensor:
        return lids + self.first if self.given is None else self.given[lids]


@dataclass(frozen=True)
class _Shard:
    """This rank's rows, read in the compute type with `origin` (float64 [D]) as the zero point.

    ‖x‖² - 2x·c + ‖c‖² cancels in single precision when the data lie far from zero, so rows and
    centres are then moved near it.
    """

    x: Tensor
    origin: Tensor
    chunk_rows: int
    is_spherical: bool

    @cached_property
    def is_moved(self) -> bool:
        return bool((self.origin != 0).any())

    def moved(self, points: Tensor) -> Tensor:
        """Given points as centres: float64, on the sphere or relative to the origin."""
        points = points.to(self.x.device, torch.float64)
        return F.normalize(points, dim=1, eps=1e-12) if self.is_spherical else points - self.origin

    def rows(self, lids: Tensor | slice, out: Tensor | None = None) -> Tensor:
        """Moved rows, in `out` where it is given and something is to be done to them."""
        rows = self.x[lids].to(_compute_dtype(self.x))
        if self.is_spherical:
            return F.normalize(rows, dim=1, eps=1e-12, out=out)
        if not self.is_moved:
            return rows.contiguous()
        return torch.sub(rows, self.origin.to(rows.dtype), out=out)

    def scores(self, centres: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """(which rows, rows x [n, D], ‖c‖² - 2x·c [n, C']) chunk by chunk: squared distances up to
        the ‖x‖² all centres share.

        The tensors are good until the next chunk: all chunks use the same memory, which then stays
        in the cache. C' rounds C up to a whole number of vectors, without which a product of few
        columns takes three times as long; no row is near what is added.
        """
        centres = centres.to(_compute_dtype(self.x))
        missing, size = -centres.shape[0] % _VECTOR, min(self.chunk_rows, self.x.shape[0])
        norms = F.pad(centres.square().sum(1), (0, missing), value=_FAR)
        centres = F.pad(centres, (0, 0, 0, missing))
        row_buffer, score_buffer = (centres.new_empty(size, centres.shape[i]) for i in (1, 0))
        for begin in range(0, self.x.shape[0], self.chunk_rows):
            chunk = slice(begin, min(begin + self.chunk_rows, self.x.shape[0]))
            rows = self.rows(chunk, row_buffer[: chunk.stop - begin])
            out = score_buffer[: chunk.stop - begin]
            yield chunk, rows, torch.addmm(norms, rows, centres.T, alpha=-2.0, out=out)


def _assign(shard: _Shard, centres: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    labels = torch.empty(shard.x.shape[0], dtype=torch.int64, device=shard.x.device)
    nearest = torch.empty(shard.x.shape[0], dtype=_compute_dtype(shard.x), device=shard.x.device)
    confidence = torch.zeros_like(nearest)
    for chunk, rows, score_NC in shard.scores(centres):
        lowest, labels[chunk] = score_NC.min(1)
        nearest[chunk] = _squared_distance(rows, lowest)
        if centres.shape[0] > 1:
            confidence[chunk] = score_NC.scatter_(1, labels[chunk, None], math.inf).amin(1) - lowest
    return labels, confidence, nearest


def _draw_start(
    shard: _Shard, ids: _Ids, num_rows: int, num_clusters: int, key: int, comm: Comm
) -> Tensor:
    """Collective: k-means++ centres float64 [C, D] from 256·C rows, sampled by a hash of gids."""
    sample_size = min(num_rows, _SAMPLE_PER_CLUSTER * num_clusters)
    chunks = torch.arange(shard.x.shape[0], device=shard.x.device).split(_IDS_PER_CHUNK)
    lowest = torch.empty(0, dtype=torch.int64, device=shard.x.device)
    for lids in chunks:
        seen = torch.cat([lowest, keyed.bits(key, ids(lids))])
        lowest = seen.topk(min(sample_size, seen.numel()), largest=False).values
    # The hash is a bijection of the id, so exactly sample_size rows lie at or below the threshold.
    threshold = comm.gather_rows(lowest).sort().values[sample_size - 1]
    lids = torch.cat([lids[keyed.bits(key, ids(lids)) <= threshold] for lids in chunks])
    sample, sample_gids = comm.gather_rows(shard.rows(lids)), comm.gather_rows(ids(lids))
    centres = shard.origin.new_zeros((num_clusters, shard.x.shape[1]))
    if comm.is_main:
        centres = _plus_plus(sample[sample_gids.argsort()], num_clusters, key)
    return comm.broadcast(centres)


def _plus_plus(sample: Tensor, num_clusters: int, key: int) -> Tensor:
    """Greedy k-means++ on sample [S, D]: of L = 2 + ln C draws ∝ d² keep that of lowest Σd²."""
    draws = torch.arange(2 + int(math.log(num_clusters)), device=sample.device)
    norms = sample.square().sum(1)

    def distances_from(bids: Tensor) -> Tensor:
        d_LS = torch.addmm(norms, sample[bids], sample.T, alpha=-2.0).add_(norms[bids, None])
        return d_LS.clamp_(min=0.0).to(torch.float64).scatter_(1, bids[:, None], 0.0)

    chosen = [keyed.integers(keyed.derive(key, 0), draws[:1], sample.shape[0])]
    closest = distances_from(chosen[0])[0]
    for step in range(1, num_clusters):
        mass = closest.cumsum(0)
        drawn = keyed.uniform(keyed.derive(key, step), draws) * mass[-1]
        candidates = torch.searchsorted(mass, drawn, right=True).clamp_(max=sample.shape[0] - 1)
        left = torch.minimum(closest, distances_from(candidates))
        best = left.sum(1).argmin()
        closest = left[best]
        chosen.append(candidates[best : best + 1])
    return sample[torch.cat(chosen)].to(torch.float64)


def _lloyd(
    shard: _Shard, ids: _Ids, centres: Tensor, comm: Comm, max_iterations: int, tol: float
) -> tuple[float, Tensor, int]:
    """Collective: (inertia of the returned centres, centres float64 [C, D], assignment passes)."""
    num_clusters, dim = centres.shape
    previous = math.inf
    for iteration in range(1, max_iterations + 1):
        sums, counts, total = _parts(comm.sum(_local_sums(shard, centres)), num_clusters, dim)
        inertia = float(total)
        empty = (counts == 0).nonzero().squeeze(1)
        offers = _farthest(shard, ids, centres, empty.numel(), comm)
        has_stopped = math.isfinite(previous) and previous - inertia <= tol * previous
        is_settled = inertia == 0.0 or has_stopped
        if (is_settled and offers.shape[0] == 0) or iteration == max_iterations:
            break
        updated = sums / counts.clamp(min=1.0)[:, None]
        has_centre = counts > 0
        if shard.is_spherical:
            has_centre &= updated.norm(dim=1) > 1e-12
            updated = shard.moved(updated)
        # A cluster that is empty without an offer, or whose rows cancel out on the sphere, keeps
        # its centre.
        centres, previous = torch.where(has_centre[:, None], updated, centres), inertia
        centres[empty[: offers.shape[0]]] = offers
    return inertia, centres, iteration


@numba.njit(nogil=True, cache=True, fastmath=_FAST)
def _add_chunk(
    rows_nD: Any, score_nC: Any, labels_n: Any, nearest_n: Any, sums_CD: Any, counts_C: Any
) -> float:
    """Fill labels (lowest score, ties to the lowest id) and nearest = ‖x‖² + score; add the rows to
    `sums`, 1 to `counts`; returns Σ nearest.
    """
    total = 0.0
    for i in range(rows_nD.shape[0]):
        lowest = score_nC[i, 0]
        for c in range(1, score_nC.shape[1]):
            lowest = min(lowest, score_nC[i, c])
        label = 0
        while score_nC[i, label] != lowest:
            label += 1
        row, kept = rows_nD[i], sums_CD[label]
        square = rows_nD.dtype.type(0)
        for j in range(row.size):
            square += row[j] * row[j]
        for j in range(row.size):
            kept[j] += row[j]
        labels_n[i] = label
        nearest_n[i] = max(square + lowest, rows_nD.dtype.type(0))
        counts_C[label] += 1.0
        total += nearest_n[i]
    return total


def _local_sums(shard: _Shard, centres: Tensor) -> Tensor:
    """Sums, counts and inertia of this rank's rows, packed: float64 [C·(D+1)+1]."""
    num_clusters, dim = centres.shape
    packed = torch.zeros(num_clusters * (dim + 1) + 1, dtype=torch.float64, device=shard.x.device)
    sums, counts, total = _parts(packed, num_clusters, dim)
    labels = torch.empty(shard.chunk_rows, dtype=torch.int64, device=shard.x.device)
    nearest = torch.empty(shard.chunk_rows, dtype=_compute_dtype(shard.x), device=shard.x.device)
    for _, rows, score_NC in shard.scores(centres):
        if rows.device.type == "cpu":
            at = slice(0, rows.shape[0])
            arrays = (rows, score_NC, labels[at], nearest[at], sums, counts)
            total += _add_chunk(*(a.numpy() for a in arrays))
        else:
            lowest, found = score_NC.min(1)
            sums.index_add_(0, found, rows.to(torch.float64))
            counts += torch.bincount(found, minlength=num_clusters)
            total += _squared_distance(rows, lowest).sum(dtype=torch.float64)
    return packed


def _parts(packed: Tensor, num_clusters: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of the C·(D+1)+1 reduced values: sums [C, D], counts [C], inertia [1]."""
    sums = packed[: num_clusters * dim].view(num_clusters, dim)
    return sums, packed[num_clusters * dim : -1], packed[-1:]


def _farthest(shard: _Shard, ids: _Ids, centres: Tensor, num_empty: int, comm: Comm) -> Tensor:
    """Collective: rows farthest from their centres, float64 [at most num_empty, D], by falling
    distance and rising gid; the same on all ranks.

    Rows within rounding error of their centre are not offered: moving a centre there gains nothing.
    """
    if num_empty == 0:
        return shard.origin.new_empty((0, shard.x.shape[1]))
    _, _, nearest = _assign(shard, centres)
    lids = torch.arange(shard.x.shape[0], device=shard.x.device)
    if shard.x.shape[0] > num_empty:
        lids = (nearest >= nearest.topk(num_empty).values[-1]).nonzero().squeeze(1)
        lids = lids[_order(nearest[lids], ids(lids))[:num_empty]]
    rows = shard.rows(lids)
    keep = nearest[lids] > 16 * torch.finfo(rows.dtype).eps * rows.square().sum(1)
    offers = torch.cat([nearest[lids, None], rows], dim=1)[keep].to(torch.float64)
    all_offers, all_gids = comm.gather_rows(offers), comm.gather_rows(ids(lids)[keep])
    return all_offers[_order(all_offers[:, 0], all_gids)[:num_empty], 1:]


def _order(distance: Tensor, gids: Tensor) -> Tensor:
    """Positions by falling distance, equal distances by rising gid."""
    by_gid = gids.argsort()
    return by_gid[distance[by_gid].argsort(descending=True, stable=True)]


def _count_and_origin(
    x: Tensor, num_clusters: int, comm: Comm, chunk_rows: int
) -> tuple[int, Tensor]:
    """Collective: rows of all ranks and their zero point, float64 [D]; all reject bad rows."""
    count = x.new_full((1,), x.shape[0], dtype=torch.float64)
    packed = comm.sum(torch.cat([_sums(x, chunk_rows), count]))
    num_rows = int(packed[-1])
    if not 1 <= num_clusters <= num_rows:
        raise UserError(
            f"k-means: cannot make {num_clusters} clusters from {num_rows} rows. Choose between "
            f"1 and {num_rows} clusters."
        )
    if not bool(packed.isfinite().all()):
        num_bad = int(comm.sum((~x.isfinite().all(1)).sum()))
        raise UserError(
            f"k-means: {num_bad} of {num_rows} rows hold NaN or infinity. Check the embeddings, "
            "or the run that made them, for divergence."
        )
    return num_rows, _origin(packed[:-1] / num_rows, x)


def _sums(x: Tensor, chunk_rows: int) -> Tensor:
    """Sum of the rows and, last, of their squared norms: float64 [D + 1]."""
    total = torch.zeros(x.shape[1] + 1, dtype=torch.float64, device=x.device)
    for chunk in x.split(chunk_rows):
        # A few columns at a time: torch converts all that it is to sum in another type.
        sums = [part.sum(0, dtype=torch.float64) for part in chunk.split(_SUM_COLUMNS, dim=1)]
        total[:-1] += torch.cat(sums)
        norms = torch.linalg.vector_norm(chunk.to(_compute_dtype(x)), dim=1)
        total[-1] += norms.square().sum(dtype=torch.float64)
    return total


def _origin(means: Tensor, x: Tensor) -> Tensor:
    """The mean of the rows in the compute type; 0 where the rows are no nearer to it than to 0."""
    mean, square = means[:-1].to(_compute_dtype(x)).to(torch.float64), means[-1]
    is_near = mean.square().sum() <= square - mean.square().sum()
    return torch.where(is_near, torch.zeros_like(mean), mean)


def _squared_distance(rows: Tensor, score: Tensor) -> Tensor:
    return (torch.linalg.vector_norm(rows, dim=1).square_() + score).clamp_(min=0.0)


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
