"""The confident subset S of pseudo-labelled nodes: a base chosen by confidence inside each cluster,
and its growth by similarity.

Rows may be spread over ranks in any way; the sets chosen are those of one process. Labels are
int64, negative for nodes without one. Shapes: n rows on this rank, D columns, C clusters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cimage_dist import keyed
from cimage_dist.comm import (
    Comm,
    Gids,
    class_quota,
    ids_of,
    num_groups,
    parts_of,
    sizes_in_parts,
    smallest_in_parts,
    smallest_per_group,
)
from cimage_dist.errors import UserError
from cimage_dist.losses import unit_rows

Rule = Literal["any", "mean", "quantile"]

_FIXED_POINT = 2.0**36  # integer sums do not depend on their order; 2^27 unit rows fit into 63 bits
_DOUBT = (
    1e-4  # bound on the float32 rounding of a dot product of unit vectors of a few thousand entries
)
_QUANTILE = 0.01


@dataclass(frozen=True)
class GrowthResult:
    """mask bool [n] of the base and the added rows of this rank, the number added over all ranks,
    and |μ_c| float64 [C].
    """

    mask: Tensor
    added: int
    mu_norms: Tensor


def select_confident(
    labels: Tensor,
    confidence: Tensor,
    gids: Gids,
    *,
    fraction: float = 0.15,
    min_per_cluster: int = 40,
    comm: Comm | None = None,
) -> Tensor:
    """Collective: the most confident rows of each cluster, bool [n] (§6.7).

    Cluster c of n_c nodes keeps `max(⌈fraction n_c⌉, min(min_per_cluster, n_c))` of them, highest
    confidence first, ties by global id. A global cut would starve small clusters. Shapes: labels
    int64, confidence float, gids int64, all [n]; n may be 0.
    """
    comm = comm or Comm()
    if not 0 < fraction <= 1:
        raise UserError(f"The confident fraction must lie in (0, 1]; got {fraction}.")
    missing = sum(int(torch.isnan(confidence[rows]).sum()) for rows in parts_of(len(confidence)))
    if int(comm.sum(torch.tensor(missing))):
        raise UserError(
            "The confidence of the initial labels holds NaN, so nodes cannot be ranked. Give "
            "every node a finite confidence, e.g. 1."
        )
    groups = num_groups(labels, comm)
    sizes = sizes_in_parts(lambda rows: labels[rows], labels.numel(), groups, comm).tolist()
    quotas = [max(math.ceil(fraction * n - 1e-9), min(min_per_cluster, n)) for n in sizes]
    quota = torch.tensor(quotas, dtype=torch.int64)

    def part(rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        return -confidence[rows].to(torch.float64), ids_of(gids, rows), labels[rows]

    return smallest_in_parts(part, labels.numel(), quota.to(labels.device), comm)


def grow_confident(
    z: Tensor,
    labels: Tensor,
    base_mask: Tensor,
    gids: Tensor,
    *,
    rule: Rule = "any",
    threshold: float = 0.99,
    agree: bool = False,
    bank_size: int = 8192,
    seed: int = 0,
    comm: Comm | None = None,
    chunk_rows: int = 1024,
) -> GrowthResult:
    """Collective: S = base and those other labelled rows whose unit embedding ẑ is close to it
    (§6.7). Not cumulative: always from the base.

    "any": `ẑ_i·ẑ_j >= threshold` for some base member i of a bank of at most `bank_size`, drawn
    evenly over clusters by a keyed hash (all members when they fit: then exact, else a subset of
    the exact answer). "mean": `ẑ_j·μ_c >= threshold` for some c, μ_c the mean of ẑ over the base of
    c; bounded by |μ_c|. "quantile": the best 1 % of the rows outside the base in each cluster by
    `ẑ_j·μ_c` (at least one). A row that joins keeps its own label; `agree` asks the match to carry
    the same one. Shapes: z [n, D], others [n]; n may be 0.
    """
    comm = comm or Comm()
    clusters = num_groups(labels, comm)
    base = base_mask & (labels >= 0)
    mu = _class_means(z, labels, base, clusters, comm, chunk_rows)
    rows = torch.nonzero(~base & (labels >= 0)).flatten()
    if rule == "any":
        bank = _bank(z, labels, base, gids, clusters, bank_size, seed, comm)
        joins = _near_bank(z, labels, rows, bank, threshold, agree, chunk_rows)
    elif rule == "mean":
        joins = _near_means(z, labels, rows, mu, threshold, agree, chunk_rows)
    else:
        joins = _best_quantile(z, labels, rows, gids, mu, clusters, comm, chunk_rows)
    mask = base_mask.clone()
    mask[rows[joins]] = True
    added = int(comm.sum(joins.sum()))
    return GrowthResult(mask, added, torch.linalg.vector_norm(mu, dim=1).cpu())


def _cluster_sizes(labels: Tensor, clusters: int, comm: Comm) -> Tensor:
    return comm.sum(torch.bincount(labels[labels >= 0], minlength=clusters)).cpu()


def _class_means(
    z: Tensor, labels: Tensor, base: Tensor, clusters: int, comm: Comm, chunk_rows: int
) -> Tensor:
    """μ_c [C, D] in float64, in fixed-point arithmetic so that every split over ranks gives the
    same bits; zero for a cluster without base.
    """
    rows = torch.nonzero(base).flatten()
    total = torch.zeros(clusters, z.shape[1] + 1, dtype=torch.int64, device=z.device)
    for part in rows.split(chunk_rows):
        fixed = (unit_rows(z[part]).to(torch.float64) * _FIXED_POINT).round().to(torch.int64)
        total[:, :-1].index_add_(0, labels[part], fixed)
    total[:, -1] = torch.bincount(labels[rows], minlength=clusters)
    total = comm.sum(total)
    return total[:, :-1].to(torch.float64) / _FIXED_POINT / total[:, -1:].clamp(min=1)


def _bank(
    z: Tensor,
    labels: Tensor,
    base: Tensor,
    gids: Tensor,
    clusters: int,
    bank_size: int,
    seed: int,
    comm: Comm,
) -> tuple[Tensor, Tensor]:
    """Unit rows and labels of at most `bank_size` base members of all ranks, evenly over
    clusters.
    """
    members = torch.where(base, labels, -1)
    quota = class_quota(_cluster_sizes(members, clusters, comm), bank_size)
    draw = keyed.uniform(keyed.stream(seed, "growth-bank"), gids)
    chosen = smallest_per_group(draw, gids, members, quota.to(labels.device), comm)
    return unit_rows(comm.gather_rows(z.detach()[chosen])), comm.gather_rows(labels[chosen])


def _near_bank(
    z: Tensor,
    labels: Tensor,
    rows: Tensor,
    bank: tuple[Tensor, Tensor],
    threshold: float,
    agree: bool,
    chunk_rows: int,
) -> Tensor:
    """Which rows have a bank member at or above the threshold. Rows within float32 rounding of it
    are decided in float64.
    """
    bank_z, bank_labels = bank
    joins = torch.zeros(rows.numel(), dtype=torch.bool, device=rows.device)
    if bank_z.shape[0] == 0:
        return joins
    for begin in range(0, rows.numel(), chunk_rows):
        part = rows[begin : begin + chunk_rows]
        found, others = unit_rows(z[part]).to(torch.float32), bank_z.to(torch.float32)
        best = _best_match(found, labels[part], others, bank_labels, agree)
        near = best >= threshold
        doubt = torch.nonzero((best.to(torch.float64) - threshold).abs() <= _DOUBT).flatten()
        if doubt.numel():
            again = part[doubt]
            found, others = unit_rows(z[again].to(torch.float64)), bank_z.to(torch.float64)
            exact = _best_match(found, labels[again], others, bank_labels, agree)
            near[doubt] = exact >= threshold
        joins[begin : begin + part.numel()] = near
    return joins


def _best_match(
    x: Tensor, x_labels: Tensor, bank_z: Tensor, bank_labels: Tensor, agree: bool
) -> Tensor:
    similarity = x @ bank_z.T
    if agree:
        similarity.masked_fill_(x_labels.unsqueeze(1) != bank_labels.unsqueeze(0), -math.inf)
    return similarity.amax(dim=1)


def _near_means(
    z: Tensor,
    labels: Tensor,
    rows: Tensor,
    mu: Tensor,
    threshold: float,
    agree: bool,
    chunk_rows: int,
) -> Tensor:
    joins = torch.zeros(rows.numel(), dtype=torch.bool, device=rows.device)
    for begin in range(0, rows.numel() if mu.shape[0] else 0, chunk_rows):
        part = rows[begin : begin + chunk_rows]
        score = unit_rows(z[part].to(torch.float64)) @ mu.T
        best = score.gather(1, labels[part].unsqueeze(1)).squeeze(1) if agree else score.amax(dim=1)
        joins[begin : begin + part.numel()] = best >= threshold
    return joins


def _best_quantile(
    z: Tensor,
    labels: Tensor,
    rows: Tensor,
    gids: Tensor,
    mu: Tensor,
    clusters: int,
    comm: Comm,
    chunk_rows: int,
) -> Tensor:
    direction = unit_rows(mu)
    score = torch.zeros(rows.numel(), dtype=torch.float64, device=rows.device)
    for begin in range(0, rows.numel(), chunk_rows):
        part = rows[begin : begin + chunk_rows]
        score[begin : begin + part.numel()] = (
            unit_rows(z[part].to(torch.float64)) * direction[labels[part]]
        ).sum(dim=1)
    has_base = torch.linalg.vector_norm(mu, dim=1) > 0
    group = torch.where(has_base[labels[rows]], labels[rows], -1) if clusters else labels[rows]
    quota = (
        (_cluster_sizes(group, clusters, comm).to(torch.float64) * _QUANTILE).ceil().to(torch.int64)
    )
    return smallest_per_group(-score, gids[rows], group, quota.to(rows.device), comm)
