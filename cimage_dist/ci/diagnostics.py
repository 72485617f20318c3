"""What a partition of the factors looks like: numbers to log at a refresh, none of which training
uses.

Shapes: n sampled nodes over all ranks, K factors of c channels, C clusters, F1 and F2 the two
contexts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cimage_dist import keyed
from cimage_dist.ci import u_centred_gaussian
from cimage_dist.ci.hsic import class_blocks, gather_sample
from cimage_dist.comm import Comm
from cimage_dist.types import CIScores

RANK_TOL = 1e-3
_RIDGE = 1e-3
_NUM_RANDOM = 4
_MIN_BLOCK = 4  # the unbiased estimate divides by B - 3
_CHUNK = 512
_MAX_ROWS = 4096  # a keyed sample of that size is enough to look at, and bounds the cost of looking


def describe_partition(
    h: Tensor,
    labels: Tensor,
    gids: Tensor,
    scores: CIScores,
    *,
    block_size: int = 20,
    repeats: int = 1,
    seed: int = 0,
    comm: Comm | None = None,
) -> dict[str, float]:
    """Collective: the diagnostics of a partition over the union of all ranks' rows, computed on
    rank 0 and the same on every rank; of more than 4,096 rows a keyed sample is taken.

    Keys: `ci/f1_size`, `ci/lam`, `ci/sigma2`, `ci/num_solves`;
    `ci/variance/<k>` per factor and `ci/variance_f2_min`, the collapse alarm;
    `ci/hsic_given_labels` and `ci/hsic_random` (see `conditional_hsic`; the second is the mean over
    random partitions of the same sizes); `ci/rank_f2` (see `mean_rank`) beside `ci/num_classes`;
    `ci/accuracy_f1`, `_f2`, `_both` (see `label_accuracy`) beside `ci/accuracy_majority`;
    `ci/silhouette` and `ci/own_centre` (see `separation`). Shapes: h [n_local, K, c], labels and
    gids [n_local].
    """
    comm = comm or Comm()
    num_factors, width = h.shape[1:]
    sample = gather_sample(h.flatten(1), labels, gids, comm)
    out: dict[str, float] = {}
    if comm.is_main:
        chosen = (
            torch.argsort(keyed.bits(keyed.stream(seed, "diagnostics", 2), sample.gids))[:_MAX_ROWS]
            .sort()
            .values
        )
        rows = sample.x[chosen].to(torch.float64).view(-1, num_factors, width)
        labels, gids = sample.labels[chosen], sample.gids[chosen]
        out = _describe(rows, labels, gids, scores, block_size, repeats, seed)
    return comm.broadcast_object(out)


def _describe(
    h: Tensor,
    labels: Tensor,
    gids: Tensor,
    scores: CIScores,
    block_size: int,
    repeats: int,
    seed: int,
) -> dict[str, float]:
    first = scores.in_context.to(h.device)
    variance = h.var(dim=0, correction=0).mean(dim=1) if h.shape[0] else h.new_zeros(h.shape[1])
    classes, counts = labels.unique(return_counts=True)
    split = keyed.uniform(keyed.stream(seed, "diagnostics", 0), gids) < 0.5
    blocks = {"block_size": block_size, "repeats": repeats, "seed": seed}
    draws = [_shuffled(first, seed, i) for i in range(_NUM_RANDOM)]
    out = {
        "ci/f1_size": float(first.sum()),
        "ci/lam": scores.lam,
        "ci/sigma2": scores.sigma2,
        "ci/num_solves": float(scores.num_solves),
        "ci/variance_f2_min": float(variance[~first].min()) if bool((~first).any()) else 0.0,
        "ci/hsic_given_labels": conditional_hsic(h, labels, gids, first, **blocks),
        "ci/hsic_random": sum(conditional_hsic(h, labels, gids, draw, **blocks) for draw in draws)
        / _NUM_RANDOM,
        "ci/rank_f2": float(mean_rank(h[:, ~first].flatten(1), labels)),
        "ci/num_classes": float(classes.numel()),
        "ci/accuracy_f1": label_accuracy(h[:, first].flatten(1), labels, split),
        "ci/accuracy_f2": label_accuracy(h[:, ~first].flatten(1), labels, split),
        "ci/accuracy_both": label_accuracy(h.flatten(1), labels, split),
        "ci/accuracy_majority": float(counts.max()) / labels.numel() if labels.numel() else 0.0,
    }
    out["ci/silhouette"], out["ci/own_centre"] = separation(h.flatten(1), labels)
    return out | {f"ci/variance/{k}": float(value) for k, value in enumerate(variance)}


def jaccard(a: Tensor, b: Tensor) -> float:
    """|A ∩ B| / |A ∪ B| of two boolean masks; 1 for two empty sets."""
    union = int((a | b).sum())
    return int((a & b).sum()) / union if union else 1.0


def jaccard_chance(size_a: int, size_b: int, total: int) -> float:
    """Expected Jaccard index of random subsets of the given sizes of a set of `total` elements.

    `Σ_i P(i) i / (a + b - i)`, P the hypergeometric probability of i common elements; 1 for two
    empty sets.
    """
    both = size_a + size_b
    if both == 0:
        return 1.0
    expected = 0.0
    for common in range(max(0, both - total), min(size_a, size_b) + 1):
        ways = math.comb(size_a, common) * math.comb(total - size_a, size_b - common)
        expected += ways / math.comb(total, size_b) * common / (both - common)
    return expected


def overlap(name: str, a: Tensor, b: Tensor) -> dict[str, float]:
    """To log: `jaccard_<name>` of two contexts and its chance level. a, b bool [K]."""
    chance = jaccard_chance(int(a.sum()), int(b.sum()), a.numel())
    return {f"jaccard_{name}": jaccard(a, b), f"jaccard_{name}_chance": chance}


def conditional_hsic(
    h: Tensor,
    labels: Tensor,
    gids: Tensor,
    first: Tensor,
    *,
    block_size: int = 20,
    repeats: int = 1,
    seed: int = 0,
) -> float:
    """Normalised HSIC(F1, F2 | Ĉ): 0 in expectation when the contexts are independent inside each
    class, 1 when one determines the other's kernel.

    `<U1,U2> / sqrt(<U1,U1> <U2,U2>)`, each a class-weighted mean (n_y/n) over blocks drawn inside
    classes, U the U-centred Gaussian kernels of the standardised contexts with bandwidth
    sqrt(dimension). Unbiased products, so small values may be negative; 0 when a context is empty
    or no class fills a block. Shapes: h [n, K, c] float64, first bool [K].
    """
    if block_size < _MIN_BLOCK or not bool(first.any()) or bool(first.all()):
        return 0.0
    blocks, weight = class_blocks(labels, gids, seed=seed, block_size=block_size, repeats=repeats)
    if blocks.shape[0] == 0:
        return 0.0
    scaled = (h - h.mean(dim=0)) / (h.std(dim=0, correction=0) + 1e-19)
    contexts = scaled[:, first].flatten(1), scaled[:, ~first].flatten(1)
    products = torch.zeros(3, dtype=torch.float64, device=h.device)
    for index, share in zip(blocks.split(_CHUNK), weight.split(_CHUNK), strict=True):
        u1, u2 = (u_centred_gaussian(context[index]) for context in contexts)
        for i, (left, right) in enumerate(((u1, u2), (u1, u1), (u2, u2))):
            products[i] += share @ (left * right).sum(dim=(1, 2))
    scale = float((products[1] * products[2]).clamp(min=0.0).sqrt())
    return float(products[0]) / scale if scale > 0 else 0.0


def mean_rank(x: Tensor, labels: Tensor, tol: float = RANK_TOL) -> int:
    """Numerical rank of E[F2|Ĉ]: singular values of the C x d matrix of class means above `tol`
    times the largest. x [n, d].
    """
    if x.shape[1] == 0 or x.shape[0] == 0:
        return 0
    _, position, count = labels.unique(return_inverse=True, return_counts=True)
    mean = x.new_zeros(count.numel(), x.shape[1]).index_add_(0, position, x) / count.unsqueeze(1)
    values = torch.linalg.svdvals(mean)
    return int((values > tol * values[0]).sum()) if float(values[0]) > 0 else 0


def separation(x: Tensor, labels: Tensor) -> tuple[float, float]:
    """How well clusters stand apart: (mean of `(b - a) / max(a, b)`, share of rows with a < b).

    a is a row's distance to the centre of its own cluster, b to the nearest other one: the
    silhouette with centres in place of all pairs. (0, 0) with fewer than two clusters. x [n, d],
    labels [n].
    """
    classes, position, count = labels.unique(return_inverse=True, return_counts=True)
    if classes.numel() < 2:
        return 0.0, 0.0
    centre = x.new_zeros(classes.numel(), x.shape[1]).index_add_(0, position, x) / count.unsqueeze(
        1
    )
    distance = torch.cdist(x, centre)
    own = distance.gather(1, position.unsqueeze(1)).squeeze(1)
    other = distance.scatter(1, position.unsqueeze(1), float("inf")).min(dim=1).values
    apart = (other - own) / torch.maximum(own, other).clamp(min=1e-12)
    return float(apart.mean()), float((own < other).double().mean())


def label_accuracy(x: Tensor, labels: Tensor, split: Tensor) -> float:
    """Accuracy of Ĉ on the rows outside `split`, predicted by ridge regression on one-hot labels
    fitted on the rows inside.

    Columns are standardised on the fitted half and a constant is added; ridge 1e-3 of the fitted
    count. x [n, d] float64, split bool [n].
    """
    if x.shape[1] == 0 or not bool(split.any()) or bool(split.all()):
        return 0.0
    classes, position = labels.unique(return_inverse=True)
    fit = x[split]
    mean, std = fit.mean(dim=0), fit.std(dim=0, correction=0)
    design = (x - mean) / torch.where(std > 0, std, 1.0)
    target = torch.nn.functional.one_hot(position[split], classes.numel()).to(x.dtype)
    prior = target.mean(dim=0)
    inside = design[split]
    gram = inside.T @ inside
    gram.diagonal().add_(_RIDGE * inside.shape[0])
    weight = torch.linalg.solve(gram, inside.T @ (target - prior))
    predicted = (design[~split] @ weight + prior).argmax(dim=1)
    return float((predicted == position[~split]).to(torch.float64).mean())


def _shuffled(first: Tensor, seed: int, draw: int) -> Tensor:
    """A random mask with as many ones as `first`."""
    ids = torch.arange(first.numel(), device=first.device)
    return first[torch.argsort(keyed.bits(keyed.stream(seed, "diagnostics", 1, draw), ids))]
