"""Confident subset and its growth on one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cimage_dist import comm
from cimage_dist.ci.pseudolabels import (
    class_quota,
    grow_confident,
    select_confident,
    smallest_per_group,
)
from cimage_dist.errors import UserError
from tests import reference


def clusters(
    n: int = 500, classes: int = 5, width: int = 8, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Embeddings around class centres, labels with a few -1, confidences with many ties, sparse
    global ids.
    """
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (n,), generator=generator)
    z = torch.randn(classes, width, generator=generator)[labels] + 0.25 * torch.randn(
        n, width, generator=generator
    )
    confidence = (torch.rand(n, generator=generator) * 20).floor() / 10 - 1
    labels[torch.randperm(n, generator=generator)[: n // 20]] = -1
    gids = torch.randperm(3 * n, generator=generator)[:n]
    return z, labels, confidence, gids


@pytest.mark.parametrize("rows", [7, 64, 1 << 20])
@pytest.mark.parametrize(("fraction", "minimum"), [(0.15, 40), (0.5, 3), (1.0, 1), (0.01, 1000)])
def test_confident_equals_a_full_sort(
    fraction: float, minimum: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether rows are read in parts or at once."""
    monkeypatch.setattr(comm, "_PART_ROWS", rows)
    _, labels, confidence, gids = clusters()
    mask = select_confident(labels, confidence, gids, fraction=fraction, min_per_cluster=minimum)
    assert np.array_equal(
        mask.numpy(),
        reference.confident(
            labels.numpy(), confidence.double().numpy(), gids.numpy(), fraction, minimum
        ),
    )


def test_small_clusters_are_not_starved() -> None:
    labels = torch.tensor([0] * 1000 + [1] * 30 + [2] * 3)
    confidence = torch.cat([torch.ones(1000), torch.zeros(33)])
    mask = select_confident(labels, confidence, torch.arange(1033))
    assert torch.bincount(labels[mask]).tolist() == [150, 30, 3]


def test_extreme_confidences_are_ordered() -> None:
    values = torch.tensor(
        [0.0, -0.0, float("inf"), -float("inf"), 1e-310, -1e300, 5.0], dtype=torch.float64
    )
    for quota in range(8):
        chosen = smallest_per_group(
            values, torch.arange(7), torch.zeros(7, dtype=torch.int64), torch.tensor([quota])
        )
        order = np.lexsort((np.arange(7), values.numpy()))
        assert sorted(chosen.nonzero().flatten().tolist()) == sorted(order[:quota].tolist())


def test_nan_confidence_and_bad_fraction_are_explained() -> None:
    labels, gids = torch.zeros(3, dtype=torch.int64), torch.arange(3)
    with pytest.raises(UserError, match="NaN"):
        select_confident(labels, torch.tensor([1.0, float("nan"), 0.0]), gids)
    with pytest.raises(UserError, match="fraction"):
        select_confident(labels, torch.ones(3), gids, fraction=0.0)


def test_class_quota_is_even_and_within_budget() -> None:
    assert class_quota(torch.tensor([100, 2, 50]), 22).tolist() == [10, 2, 10]
    assert class_quota(torch.tensor([100, 2, 50]), 23).tolist() == [11, 2, 10]
    assert class_quota(torch.tensor([3, 4]), 100).tolist() == [3, 4]
    assert class_quota(torch.tensor([3, 4, 5]), 2).tolist() == [1, 1, 0]


@pytest.mark.parametrize("agree", [False, True])
def test_any_rule_equals_all_pairs(agree: bool) -> None:
    z, labels, confidence, gids = clusters()
    base = select_confident(labels, confidence, gids, min_per_cluster=5)
    grown = grow_confident(z, labels, base, gids, threshold=0.97, agree=agree, chunk_rows=37)
    unit = torch.nn.functional.normalize(z.double(), dim=1)
    close = unit @ unit[base].T >= 0.97
    if agree:
        close &= labels.unsqueeze(1) == labels[base].unsqueeze(0)
    expected = base | (close.any(dim=1) & (labels >= 0))
    assert torch.equal(grown.mask, expected)
    assert grown.added == int((expected & ~base).sum()) > 0


def test_small_bank_gives_a_subset_and_is_stratified() -> None:
    z, labels, confidence, gids = clusters()
    base = select_confident(labels, confidence, gids, min_per_cluster=5)
    exact = grow_confident(z, labels, base, gids, threshold=0.97)
    small = grow_confident(z, labels, base, gids, threshold=0.97, bank_size=10, seed=1)
    assert bool((exact.mask | ~small.mask).all()) and 0 < small.added < exact.added
    one_each = grow_confident(z, labels, base, gids, threshold=-1.0, bank_size=5, agree=True)
    assert bool(one_each.mask[labels >= 0].all())  # every class has a member in the bank


def test_doubtful_rows_are_decided_in_double_precision() -> None:
    """Cosines within 1e-12 of the threshold, on both sides: float32 cannot distinguish them."""
    angle = torch.acos(torch.tensor([0.99 + 1e-12, 0.99 - 1e-12], dtype=torch.float64))
    z = torch.stack(
        [
            torch.cat([torch.ones(1).double(), angle.cos()]),
            torch.cat([torch.zeros(1).double(), angle.sin()]),
        ],
        dim=1,
    )
    grown = grow_confident(
        z,
        torch.zeros(3, dtype=torch.int64),
        torch.tensor([True, False, False]),
        torch.arange(3),
        threshold=0.99,
    )
    assert grown.mask.tolist() == [True, True, False]


@pytest.mark.parametrize("agree", [False, True])
def test_mean_rule_equals_its_formula_and_is_bounded(agree: bool) -> None:
    z, labels, confidence, gids = clusters()
    base = select_confident(labels, confidence, gids, min_per_cluster=5)
    grown = grow_confident(z, labels, base, gids, rule="mean", threshold=0.93, agree=agree)
    unit = torch.nn.functional.normalize(z.double(), dim=1)
    mu = torch.stack([unit[base & (labels == c)].mean(dim=0) for c in range(5)])
    score = unit @ mu.T
    best = (
        score.gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1) if agree else score.amax(dim=1)
    )
    assert torch.equal(grown.mask, base | ((best >= 0.93) & (labels >= 0)))
    torch.testing.assert_close(
        grown.mu_norms, mu.norm(dim=1), rtol=0, atol=1e-7
    )  # float32 embeddings, unit rows in float32
    assert (
        grow_confident(
            z, labels, base, gids, rule="mean", threshold=float(grown.mu_norms.max()) + 1e-6
        ).added
        == 0
    )


def test_quantile_rule_takes_the_best_percent_of_each_class() -> None:
    z, labels, confidence, gids = clusters(2000)
    base = select_confident(labels, confidence, gids, min_per_cluster=5)
    grown = grow_confident(z, labels, base, gids, rule="quantile")
    unit = torch.nn.functional.normalize(z.double(), dim=1)
    added = grown.mask & ~base
    for c in range(5):
        outside = ~base & (labels == c)
        assert int((added & (labels == c)).sum()) == int(np.ceil(0.01 * int(outside.sum())))
        score = unit @ torch.nn.functional.normalize(unit[base & (labels == c)].mean(dim=0), dim=0)
        assert float(score[added & (labels == c)].min()) >= float(score[outside & ~added].max())


def test_growth_restarts_from_the_base_and_empty_inputs_pass() -> None:
    z, labels, confidence, gids = clusters()
    base = select_confident(labels, confidence, gids, min_per_cluster=5)
    once = grow_confident(z, labels, base, gids, threshold=0.97)
    assert torch.equal(grow_confident(z, labels, base, gids, threshold=0.97).mask, once.mask)
    for rule in ("any", "mean", "quantile"):
        nothing = grow_confident(z, labels, torch.zeros_like(base), gids, rule=rule)
        assert nothing.added == 0 and not bool(nothing.mask.any())
        empty = grow_confident(z[:0], labels[:0], base[:0], gids[:0], rule=rule)
        assert empty.added == 0 and empty.mask.shape == (0,)
