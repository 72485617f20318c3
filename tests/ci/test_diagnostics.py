"""Diagnostics on data whose answers are known."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import pytest
import torch

from cimage_dist.ci.diagnostics import (
    conditional_hsic,
    describe_partition,
    jaccard,
    jaccard_chance,
    label_accuracy,
    mean_rank,
    separation,
)
from cimage_dist.types import CIScores


def sample(n: int = 1200) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, CIScores]:
    """4 factors of 3 channels: 0 and 1 carry the label, 2 is a noisy copy of 0's noise, 3 is
    constant.
    """
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (n,), generator=generator)
    noise = torch.randn(n, 4, 3, generator=generator)
    h = noise.clone()
    h[:, :2] += 3.0 * torch.randn(3, 2, 3, generator=generator)[labels]
    h[:, 2] = noise[:, 0] + 0.1 * noise[:, 2]
    h[:, 3] = 0.5
    first = torch.tensor([True, True, False, False])
    scores = CIScores(
        first.double(), first, 1e-3, 1e-6, torch.zeros(12, dtype=torch.float64), 3, "ok"
    )
    return h, labels, torch.arange(n), scores


def test_report_of_a_known_partition() -> None:
    h, labels, gids, scores = sample()
    out = describe_partition(h, labels, gids, scores)
    assert all(isinstance(value, float) for value in out.values())
    assert out["ci/f1_size"] == 2 and out["ci/num_classes"] == 3 and out["ci/num_solves"] == 3
    assert (
        out["ci/variance/0"]
        == pytest.approx(float(h[:, 0].double().var(dim=0, correction=0).mean()))
        and out["ci/variance_f2_min"] == 0.0
    )
    assert out["ci/accuracy_f1"] > 0.95 and out["ci/accuracy_both"] > 0.95
    assert (
        abs(out["ci/accuracy_f2"] - 1 / 3) < 0.08
        and abs(out["ci/accuracy_majority"] - 1 / 3) < 0.05
    )
    assert out["ci/hsic_given_labels"] > 0.2  # factor 2 repeats the noise of factor 0
    assert out == describe_partition(h.flip(0), labels.flip(0), gids.flip(0), scores)


def test_conditional_hsic_is_zero_for_conditionally_independent_contexts() -> None:
    """Both contexts carry the label, and nothing else in common; wide contexts are no exception."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 3, (2000,), generator=generator)
    h = (
        torch.randn(2000, 4, 32, generator=generator, dtype=torch.float64)
        + 2.0 * torch.randn(3, 4, 32, generator=generator, dtype=torch.float64)[labels]
    )
    first = torch.tensor([True, True, False, False])
    assert abs(conditional_hsic(h, labels, torch.arange(2000), first)) < 0.05
    copy = torch.cat([h[:, :2], h[:, :2]], dim=1)
    assert conditional_hsic(copy, labels, torch.arange(2000), first) == pytest.approx(1.0, abs=1e-9)


def test_empty_contexts_and_too_few_rows() -> None:
    h, labels, gids, scores = sample(60)
    for first in (torch.zeros(4, dtype=torch.bool), torch.ones(4, dtype=torch.bool)):
        out = describe_partition(h, labels, gids, replace(scores, in_context=first))
        assert out["ci/hsic_given_labels"] == 0.0
    assert conditional_hsic(h[:10].double(), labels[:10], gids[:10], scores.in_context) == 0.0
    assert describe_partition(h[:0], labels[:0], gids[:0], scores)["ci/accuracy_majority"] == 0.0


def test_rank_of_class_means() -> None:
    labels = torch.arange(90) % 3
    means = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [1.0, 1.0, 0.0]], dtype=torch.float64)
    assert mean_rank(means[labels], labels) == 2
    assert mean_rank(torch.eye(3, dtype=torch.float64)[labels], labels) == 3
    assert (
        mean_rank(torch.zeros(90, 4, dtype=torch.float64), labels) == 0
        and mean_rank(torch.zeros(90, 0), labels) == 0
    )


def test_accuracy_uses_held_out_rows() -> None:
    """More columns than fitted rows: the fit is perfect, the held-out half is at chance."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(400, 300, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 4, (400,), generator=generator)
    split = torch.arange(400) % 2 == 0
    assert label_accuracy(x, labels, split) < 0.45
    assert label_accuracy(torch.nn.functional.one_hot(labels).double(), labels, split) == 1.0
    assert label_accuracy(x[:, :0], labels, split) == 0.0


def test_jaccard() -> None:
    a, b = torch.tensor([True, True, False]), torch.tensor([False, True, True])
    assert (
        jaccard(a, b) == pytest.approx(1 / 3)
        and jaccard(a, a) == 1.0
        and jaccard(~(a | ~a), ~(a | ~a)) == 1.0
    )


def test_chance_level_of_jaccard_is_the_mean_over_all_pairs_of_sets() -> None:
    for size_a, size_b in ((2, 3), (4, 4), (1, 5), (0, 2)):
        pairs = list(product(combinations(range(6), size_a), combinations(range(6), size_b)))
        overlaps = [len(set(a) & set(b)) / len(set(a) | set(b)) for a, b in pairs]
        assert jaccard_chance(size_a, size_b, 6) == pytest.approx(sum(overlaps) / len(pairs))
    assert jaccard_chance(0, 0, 6) == 1.0 and jaccard_chance(6, 6, 6) == 1.0


def test_separation_of_clusters():
    x = torch.tensor([[0.0, 0.0], [0.0, 2.0], [9.0, 1.0], [11.0, 1.0]], dtype=torch.float64)
    labels = torch.tensor([3, 3, 8, 8])
    silhouette, own = separation(x, labels)
    far, near = 101**0.5, 1.0
    expected = (2 * (far - near) / far + (9 - 1) / 9 + (11 - 1) / 11) / 4
    assert silhouette == pytest.approx(expected) and own == 1.0
    assert separation(x, torch.tensor([3, 8, 3, 8]))[1] < 1
    assert separation(x, torch.zeros(4, dtype=torch.int64)) == (0.0, 0.0)
    reference = sum(silhouette_samples_by_centres(x, labels)) / 4
    assert silhouette == pytest.approx(reference)


def silhouette_samples_by_centres(x, labels):
    """Written out node by node."""
    centres = {int(c): x[labels == c].mean(dim=0) for c in labels.unique()}
    for row, label in zip(x, labels.tolist(), strict=True):
        a = float((row - centres[label]).norm())
        b = min(float((row - centre).norm()) for c, centre in centres.items() if c != label)
        yield (b - a) / max(a, b)
