"""Block HSIC between features and pseudo-labels as sufficient statistics: a D x D matrix, a vector
and a scalar, whatever n is.

Shapes: n sampled nodes over all ranks, D features, B rows per block, M repeats, nb blocks, T =
B(B+1)/2 packed entries per block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cimage_dist import keyed
from cimage_dist.ci import NORM_EPS, centred_delta, centred_gaussian, packed_size
from cimage_dist.comm import Comm
from cimage_dist.errors import UserError

# Of packed kernels at a time: bounds memory whatever n is; smaller ones pay in thread
# synchronisation.
_CHUNK_BYTES = 16 << 20
_GROUP_BLOCKS = 16  # of block_statistics: 7 MB of packed kernels in single precision at D = 512
# Columns per GEMM of the upper triangle: 5/8 of the work of the full product at D = 512.
_PANEL = 128
_STD_EPS = 1e-19
_ROWS = 4096
MIN_BLOCKS = 500
_MIN_REPEATS = 3


@dataclass(frozen=True)
class HsicStats:
    """Everything the solvers need (§7.4), identical on every rank; tensors are float64 on the CPU.

    G [D, D] mean normalised HSIC between features, b [D] with the labels, y2 of the labels with
    themselves. `coverage` [D] is the share of blocks in which the feature varies, i.e. diag(G) of
    the unconditional form; `repeats` is M after the single-block rule.
    `weight` is the total weight of the refreshes averaged here, 1 for the newest (see `averaged`).
    """

    G: Tensor
    b: Tensor
    y2: float
    num_blocks: int
    n: int
    zero_label_fraction: float
    num_classes: int
    block_size: int
    repeats: int
    coverage: Tensor
    num_nonfinite: int = 0
    is_conditional: bool = False
    weight: float = 1.0


def averaged(past: HsicStats | None, new: HsicStats, decay: float) -> HsicStats:
    """Exponential average over refreshes, `A_t = Σ_i decay^(t-i) S_i / Σ_i decay^(t-i)`.

    Recursion: `W_t = 1 + decay·W_{t-1}`, `A_t = A_{t-1} + (S_t - A_{t-1}) / W_t`, for the means
    G [D, D], b [D], y2, coverage [D] and the share of single-class blocks. Counts: of `new`.
    """
    if past is None or decay == 0:
        return new
    weight = 1.0 + decay * past.weight

    def mean(name: str) -> Any:
        old, now = getattr(past, name), getattr(new, name)
        return old + (now - old) / weight

    names = ("G", "b", "y2", "coverage", "zero_label_fraction")
    return replace(new, weight=weight, **{name: mean(name) for name in names})


def repeats_for(n: int, block_size: int, repeats: int | None = None) -> int:
    """Permutations of n rows: as given, else at least 3 and as many as give MIN_BLOCKS blocks.

    The noise of a permutation falls with the number of blocks: a small sample needs more of them.
    """
    if repeats is not None:
        return repeats
    return max(_MIN_REPEATS, -(-MIN_BLOCKS // max(n // block_size, 1)))


class Sample(NamedTuple):
    """The rows of all ranks in the order of their global ids. x [n, D], labels int64 [n], gids
    int64 [n].
    """

    x: Tensor
    labels: Tensor
    gids: Tensor


def gather_sample(
    features: Tensor, labels: Tensor, gids: Tensor, comm: Comm | None = None
) -> Sample:
    """Collective: the union of the ranks' rows, sorted by global id, on every rank (20,000 x 512
    float32 are 41 MB).
    """
    comm = comm or Comm()
    x = comm.gather_rows(features.detach())
    labels, gids = comm.gather_rows(labels.to(torch.int64)), comm.gather_rows(gids.to(torch.int64))
    order = torch.argsort(gids)
    return Sample(x[order], labels[order], gids[order])


def draw_blocks(
    labels: Tensor,
    gids: Tensor,
    *,
    seed: int,
    block_size: int,
    repeats: int,
    block_classes: int | None = None,
) -> Tensor:
    """Row numbers [nb, B] of all blocks of all repeats, a function of (seed, repeat, global id)
    only (§7.3).

    Each repeat orders the sample by a keyed hash of the global id, cuts it and drops the remainder.
    With `block_classes` (§7.3, for many classes) the pieces that are shuffled are runs of
    B/block_classes rows of one class, so that a block holds about that many classes.
    """
    _check_blocks(block_size, repeats, block_classes)
    run = block_size if block_classes is None else block_size // block_classes
    blocks: list[Tensor] = []
    for repeat in range(repeats):
        order = torch.argsort(keyed.bits(keyed.stream(seed, "ci-blocks", repeat), gids))
        if block_classes is not None:
            by_class, _ = _class_runs(labels, order, run)
            key = keyed.stream(seed, "ci-blocks", repeat, 1)
            shuffle = torch.argsort(keyed.bits(key, gids[by_class[:, 0]]))
            order = by_class[shuffle].flatten()
        count = order.numel() // block_size
        blocks.append(order[: count * block_size].view(count, block_size))
        if count <= 1:
            break  # a single block would only be repeated in another order
    return torch.cat(blocks)


def block_statistics(
    features: Tensor,
    labels: Tensor,
    gids: Tensor,
    *,
    seed: int,
    block_size: int = 20,
    repeats: int | None = 3,
    block_classes: int | None = None,
    dtype: torch.dtype | None = None,
    comm: Comm | None = None,
) -> HsicStats:
    """Collective: the HSIC statistics of the union of all ranks' rows.

    `G = (1/nb) Σ KᵀK`, `b = (1/nb) Σ Kᵀl`, `y2 = (1/nb) Σ lᵀl` over blocks, K and l the centred
    unit-norm kernels (§7.4), features divided by their standard deviation over the whole sample
    (ddof 0). One all-reduce of D² + D + 2 doubles. Kernels and their products are computed in the
    features' precision (or `dtype`) for a fixed number of blocks at a time, whose sums are added in
    double: each rank takes every W-th such group, so a group's sum does not depend on W.
    `repeats` None: see `repeats_for`.
    Shapes: features [n_local, D], labels and gids int64 [n_local]; n_local may be 0.
    """
    comm = comm or Comm()
    sample = gather_sample(features, labels, gids, comm)
    num_rows, width = sample.x.shape
    num_classes = int(sample.labels.unique().numel())
    repeats = repeats_for(num_rows, block_size, repeats)
    size: dict[str, Any] = {"block_size": block_size, "repeats": repeats}
    drawn = size | {"seed": seed, "block_classes": block_classes}
    blocks = draw_blocks(sample.labels, sample.gids, **drawn)
    num_blocks = blocks.shape[0]
    num_nonfinite = int((~torch.isfinite(sample.x)).sum())
    local = torch.zeros(width * width + width + 2, dtype=torch.float64, device=sample.x.device)
    gram, cross, scalars = _parts(local, width)
    if num_nonfinite == 0:
        mean, scale = _moments(sample.x)
        dtype = dtype or (torch.float64 if sample.x.dtype == torch.float64 else torch.float32)
        for index in blocks.split(_GROUP_BLOCKS)[comm.rank :: comm.world]:
            packed, _ = centred_gaussian(_standardised(sample.x, index, mean, scale, dtype))
            label_packed, label_norm = centred_delta(sample.labels[index])
            flat = packed.view(-1, width)
            _add_gram(gram, flat)
            cross += (flat.T @ label_packed.flatten().to(dtype)).to(torch.float64)
            scalars[0] += label_packed.square().sum()
            scalars[1] += (label_norm == 0).sum()
    gram, cross, scalars = _parts(comm.sum(local).cpu() / max(num_blocks, 1), width)
    g = _mirror(gram)
    return HsicStats(
        G=g,
        b=cross.clone(),
        y2=float(scalars[0]),
        num_blocks=num_blocks,
        n=num_rows,
        zero_label_fraction=float(scalars[1]),
        num_classes=num_classes,
        block_size=block_size,
        repeats=repeats if num_blocks > 1 else 1,
        coverage=g.diagonal().clone(),
        num_nonfinite=num_nonfinite,
    )


def _parts(packed: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of the reduced values: [D, D], [D] and what follows."""
    square = width * width
    vector, rest = packed[square:].tensor_split([width])
    return packed[:square].view(width, width), vector, rest


def conditional_statistics(
    features: Tensor,
    labels: Tensor,
    gids: Tensor,
    *,
    seed: int,
    block_size: int = 20,
    repeats: int | None = 3,
    comm: Comm | None = None,
) -> HsicStats:
    """Collective: statistics of the stratified ablation, `G_eff = 2 (G - G_cond)`, for the
    non-negative lasso only (§7.5).

    `G_cond = Σ_y (n_y/n) G_y` with G_y from blocks inside class y, their kernels divided by the
    feature's mean norm over unconditional blocks: with per-block norms both diagonals would be one
    and half the spectrum negative. What stays negative is clipped at 1e-6 of the largest
    eigenvalue. Classes below B rows have no block; the weights are spread over the others.
    Arguments as `block_statistics`.
    """
    comm = comm or Comm()
    stats = block_statistics(
        features, labels, gids, seed=seed, block_size=block_size, repeats=repeats, comm=comm
    )
    repeats = repeats_for(stats.n, block_size, repeats)
    if stats.num_nonfinite or stats.num_blocks == 0:
        return replace(stats, is_conditional=True)
    sample = gather_sample(features, labels, gids, comm)
    width = sample.x.shape[1]
    mean, scale = _moments(sample.x)
    chunk = _chunk_blocks(block_size, width, torch.float64)
    local = torch.zeros(width * width + width, dtype=torch.float64, device=sample.x.device)
    gram, norms, _ = _parts(local, width)
    drawn: dict[str, Any] = {"seed": seed, "block_size": block_size, "repeats": repeats}
    mine = slice(comm.rank, None, comm.world)

    def rows(index: Tensor) -> Tensor:
        return _standardised(sample.x, index, mean, scale, torch.float64)

    free = draw_blocks(sample.labels, sample.gids, **drawn)
    for index in free[mine].split(chunk):
        norms += centred_gaussian(rows(index))[1].sum(dim=0)
    inside, weight = class_blocks(sample.labels, sample.gids, **drawn)
    pieces = (inside[mine].split(chunk), weight[mine].split(chunk))
    for index, block_weight in zip(*pieces, strict=True):
        packed, _ = centred_gaussian(rows(index), normalise=False)
        packed *= block_weight.sqrt().view(-1, 1, 1)
        _add_gram(gram, packed.view(-1, width))
    gram, norms, _ = _parts(comm.sum(local).cpu(), width)
    unit = 1.0 / (norms / free.shape[0] + NORM_EPS)
    within = _mirror(gram) * unit.unsqueeze(0) * unit.unsqueeze(1)
    values, vectors = torch.linalg.eigh(2.0 * (stats.G - within))
    clipped = values.clamp(min=1e-6 * max(float(values[-1]), 0.0))
    return replace(stats, G=(vectors * clipped) @ vectors.T, is_conditional=True)


def class_blocks(
    labels: Tensor, gids: Tensor, *, seed: int, block_size: int, repeats: int
) -> tuple[Tensor, Tensor]:
    """Blocks [nb, B] drawn inside single classes and their weights [nb], which give class y the
    total weight n_y / Σ n_y (float64).
    """
    _check_blocks(block_size, repeats, None)
    blocks, classes = [], []
    for repeat in range(repeats):
        order = torch.argsort(keyed.bits(keyed.stream(seed, "ci-blocks", repeat, 2), gids))
        runs, run_labels = _class_runs(labels, order, block_size)
        blocks.append(runs)
        classes.append(run_labels)
    chosen, of_block = torch.cat(blocks), torch.cat(classes)
    present, position, count = of_block.unique(return_inverse=True, return_counts=True)
    size = (labels.unsqueeze(0) == present.unsqueeze(1)).sum(dim=1).to(torch.float64)
    return chosen, (size / size.sum().clamp(min=1.0) / count)[position]


def _class_runs(labels: Tensor, order: Tensor, run: int) -> tuple[Tensor, Tensor]:
    """Cut each class, in the given order, into runs of `run` rows, dropping remainders: rows [runs,
    run] and the class of each run.
    """
    order = order[torch.argsort(labels[order], stable=True)]
    ordered = labels[order]
    _, count = torch.unique_consecutive(ordered, return_counts=True)
    begin = torch.repeat_interleave(count.cumsum(0) - count, count)
    room = torch.repeat_interleave(count // run * run, count)
    kept = torch.arange(order.numel(), device=order.device) - begin < room
    return order[kept].view(-1, run), ordered[kept].view(-1, run)[:, 0]


def _check_blocks(block_size: int, repeats: int, block_classes: int | None) -> None:
    if block_size < 2 or repeats < 1:
        raise UserError(
            "Block HSIC needs at least 2 rows per block and 1 repeat; got block size "
            f"{block_size} and {repeats} repeats."
        )
    if block_classes is not None and (block_classes < 2 or block_size % block_classes):
        raise UserError(
            "The classes per HSIC block must be at least 2 and divide the block size "
            f"{block_size}; got {block_classes}."
        )


def _chunk_blocks(block_size: int, width: int, dtype: torch.dtype) -> int:
    return max(1, _CHUNK_BYTES // (packed_size(block_size) * width * dtype.itemsize))


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and 1 / (std + 1e-19) per column in float64, two passes over row chunks."""
    parts, none = x.split(_ROWS), x.new_zeros(x.shape[1], dtype=torch.float64)
    mean = sum((part.to(torch.float64).sum(dim=0) for part in parts), none) / max(x.shape[0], 1)
    square = sum(((part.to(torch.float64) - mean).square().sum(dim=0) for part in parts), none)
    return mean, 1.0 / ((square / max(x.shape[0], 1)).sqrt() + _STD_EPS)


def _standardised(
    x: Tensor, index: Tensor, mean: Tensor, scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Rows of the blocks [m, B] as [m, B, D], minus the mean (which no difference sees) and divided
    by the standard deviation.
    """
    rows = x[index.flatten()].to(torch.float64).sub_(mean).mul_(scale)
    return rows.to(dtype).view(*index.shape, x.shape[1])


def _add_gram(gram: Tensor, rows: Tensor) -> None:
    """gram += rowsᵀ rows, upper panels only, accumulated in float64."""
    for begin in range(0, rows.shape[1], _PANEL):
        panel = slice(begin, begin + _PANEL)
        left, right, out = rows[:, panel], rows[:, begin:], gram[panel, begin:]
        if rows.dtype == gram.dtype:
            out.addmm_(left.T, right)
        else:
            out += left.T @ right


def _mirror(upper: Tensor) -> Tensor:
    """The symmetric matrix whose upper triangle is given; the lower one holds nothing or
    rounding.
    """
    return upper.triu() + upper.triu(1).T
