"""Scores, automatic penalty, and every degenerate case of the partition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cimage_dist.ci import factor_scores, random_half, score_features
from cimage_dist.ci.hsic import HsicStats, block_statistics, conditional_statistics
from cimage_dist.ci.partition import choose_partition
from cimage_dist.errors import UserError
from cimage_dist.types import CIScores
from tests.ci.test_selection import planted


def made_up(gram: torch.Tensor, cross: torch.Tensor, **changes: object) -> HsicStats:
    gram, cross = gram.to(torch.float64), cross.to(torch.float64)
    stats = HsicStats(
        G=gram,
        b=cross,
        y2=1.0,
        num_blocks=120,
        n=800,
        zero_label_fraction=0.0,
        num_classes=4,
        block_size=20,
        repeats=3,
        coverage=gram.diagonal().clone(),
    )
    return replace(stats, **changes)


def before(num_factors: int = 16) -> CIScores:
    chosen = torch.arange(num_factors) < 3
    return CIScores(
        chosen.to(torch.float64),
        chosen,
        1e-4,
        1e-6,
        torch.ones(num_factors, dtype=torch.float64),
        4,
        "ok",
    )


@pytest.mark.parametrize("solver", ["vi", "nnlasso"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_planted_features_are_found(seed: int, solver: str) -> None:
    scores = choose_partition(planted(seed), 16, target=2, solver=solver)
    assert scores.in_context.nonzero().flatten().tolist() == [0, 1]
    assert scores.status == "ok" and 1 <= scores.num_solves <= 25
    assert float(scores.scores.max()) == 1.0 and torch.equal(scores.scores > 0, scores.in_context)


def test_planted_channels_mark_their_factors() -> None:
    """8 factors of 4 channels, one label-driven channel in each of two factors."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 4, (800,), generator=generator)
    h = torch.randn(800, 8, 4, generator=generator)
    h[:, 5, 2] += 2.0 * labels
    h[:, 1, 0] -= 2.0 * (labels % 2)
    stats = block_statistics(score_features(h), labels, torch.arange(800), seed=0)
    assert choose_partition(stats, 8, target=2).in_context.nonzero().flatten().tolist() == [1, 5]


def test_factor_scores_average_channels_and_scale_to_one() -> None:
    omega = torch.tensor([0.0, 0.2, 0.0, 0.0, 0.4, 0.4], dtype=torch.float64)
    assert factor_scores(omega, 3).tolist() == pytest.approx([0.25, 0.0, 1.0])
    assert factor_scores(omega, 6, "factor_mean").tolist() == pytest.approx([0, 0.5, 0, 0, 1, 1])
    assert factor_scores(torch.zeros(4), 2).tolist() == [0, 0]


def test_score_features_layout_is_factor_major() -> None:
    h = torch.arange(12.0).view(2, 3, 2)
    assert score_features(h).shape == (2, 6) and score_features(h)[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert score_features(h, "factor_mean")[0].tolist() == [0.5, 2.5, 4.5]


def test_pi_changes_weights_but_not_the_partition() -> None:
    stats = planted(1, good=5)
    half, high = (choose_partition(stats, 16, target=5, pi=pi) for pi in (0.5, 0.8))
    torch.testing.assert_close(
        high.omega, 2.5 * half.omega
    )  # 1 / (2 (1 - 0.8)), the ratio noted in the specification
    assert (
        torch.equal(high.in_context, half.in_context)
        and torch.equal(high.scores, half.scores)
        and high.lam == half.lam
    )


def test_previous_penalty_saves_solves() -> None:
    stats = planted(0, good=6)
    cold = choose_partition(stats, 16, target=4)
    warm = choose_partition(stats, 16, target=4, previous=cold)
    assert (
        warm.num_solves == 1
        and warm.lam == pytest.approx(cold.lam)
        and torch.equal(warm.in_context, cold.in_context)
    )
    for far in (1e-8, 1.0):
        other = choose_partition(stats, 16, target=4, previous=replace(cold, lam=far))
        assert abs(int(other.in_context.sum()) - 4) <= 1 and other.num_solves <= 25


def test_unreachable_target_takes_the_nearest_and_says_so() -> None:
    """Labels explained by one column: the non-negative weights of the others vanish for any
    penalty.
    """
    gram = torch.full((8, 8), 0.9) + 0.1 * torch.eye(8)
    cross = torch.full((8,), 0.4)
    cross[2] = 0.9
    scores = choose_partition(made_up(gram, cross), 8, target=6)
    assert scores.in_context.nonzero().flatten().tolist() == [2] and scores.status == "ok"
    assert "nearest is 1" in scores.notes and scores.num_solves <= 25


def test_conditional_statistics_use_the_lasso() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 4, (800,), generator=generator)
    x = torch.randn(800, 8, generator=generator)
    x[:, :2] += 3 * torch.randn(4, 2, generator=generator)[labels]
    stats = conditional_statistics(x, labels, torch.arange(800), seed=0)
    scores = choose_partition(stats, 8, target=2, solver="vi")
    assert (
        scores.in_context.nonzero().flatten().tolist() == [0, 1] and scores.sigma2 != scores.sigma2
    )


# ---- the degenerate cases, in the order of the table ----


@pytest.mark.parametrize("change", [{"n": 39}, {"num_classes": 1}, {"zero_label_fraction": 0.51}])
def test_undecided_data_keep_the_previous_partition_or_draw_a_half(
    change: dict[str, float],
) -> None:
    stats = replace(planted(0), **change)
    kept = choose_partition(stats, 16, previous=before())
    assert (
        kept.status == "kept-previous"
        and torch.equal(kept.in_context, before().in_context)
        and kept.lam == 1e-4
        and kept.notes
    )
    drawn = choose_partition(stats, 16, seed=5)
    assert (
        drawn.status == "random-half"
        and int(drawn.in_context.sum()) == 8
        and torch.equal(drawn.in_context, random_half(16, 5))
    )
    assert not torch.equal(drawn.in_context, choose_partition(stats, 16, seed=6).in_context)


def test_half_of_single_class_blocks_is_still_enough() -> None:
    assert choose_partition(replace(planted(0), zero_label_fraction=0.5), 16).status == "ok"


def test_empty_first_context_halves_a_fixed_penalty() -> None:
    scores = choose_partition(planted(0), 16, lam=1.0)
    assert (
        scores.status == "ok"
        and int(scores.in_context.sum()) >= 1
        and scores.lam < 1.0
        and "halved" in scores.notes
    )
    assert scores.lam == 2.0 ** -(scores.num_solves - 1)


@pytest.mark.parametrize("lam", [1e12, "auto"])
def test_hopeless_weights_fall_back_to_the_most_dependent_factors(lam: float | str) -> None:
    """Twenty halvings of 1e12 leave a penalty that allows nothing; with labels unrelated to
    anything, no penalty does.
    """
    cross = torch.linspace(0.1, 0.2, 10) if lam != "auto" else -torch.linspace(0.2, 0.1, 10)
    scores = choose_partition(made_up(torch.eye(10), cross), 10, lam=lam)
    assert scores.status == "fallback-top-b" and scores.in_context.nonzero().flatten().tolist() == [
        7,
        8,
        9,
    ]
    assert scores.num_solves == (21 if lam != "auto" else scores.num_solves)


def test_full_first_context_doubles_a_fixed_penalty() -> None:
    scores = choose_partition(planted(0), 16, lam=1e-8)
    assert (
        scores.status == "ok"
        and 0 < int(scores.in_context.sum()) < 16
        and "doubled" in scores.notes
        and scores.lam > 1e-8
    )


def test_weights_that_never_vanish_leave_out_the_smallest() -> None:
    """Twenty doublings of 1e-20 change nothing: F2 is the quarter of smallest mean weight."""
    scores = choose_partition(made_up(torch.eye(10), torch.linspace(0.2, 0.4, 10)), 10, lam=1e-20)
    assert scores.status == "fallback-smallest" and (
        ~scores.in_context
    ).nonzero().flatten().tolist() == [0, 1, 2]
    assert scores.num_solves == 21 and torch.equal(scores.scores > 0, scores.in_context)


def test_constant_features_are_dropped_and_all_constant_is_undecided() -> None:
    gram = torch.eye(8)
    gram[2, 2] = 0.4
    scores = choose_partition(made_up(gram, torch.full((8,), 0.5)), 8, lam=1e-6)
    assert float(scores.omega[2]) == 0 and scores.in_context.sum() == 7
    assert choose_partition(made_up(0.1 * torch.eye(8), torch.zeros(8)), 8).status == "random-half"


def test_singular_statistics_give_a_partition() -> None:
    stats = planted(0)
    double = torch.cat([torch.arange(16), torch.arange(16)])
    scores = choose_partition(
        replace(
            stats, G=stats.G[double][:, double], b=stats.b[double], coverage=stats.coverage[double]
        ),
        32,
        target=4,
    )
    assert scores.status == "ok" and set(scores.in_context.nonzero().flatten().tolist()) <= {
        0,
        1,
        16,
        17,
    } | set(range(2, 16))
    assert bool(torch.isfinite(scores.omega).all()) and bool(
        scores.in_context[[0, 1, 16, 17]].any()
    )


def test_nonfinite_embeddings_skip_the_refresh() -> None:
    x = torch.randn(100, 16)
    x[0, 0] = float("inf")
    stats = block_statistics(x, torch.arange(100) % 3, torch.arange(100), seed=0)
    kept = choose_partition(stats, 16, previous=before())
    assert kept.status == "skipped-nonfinite" and torch.equal(kept.in_context, before().in_context)
    first = choose_partition(stats, 16)
    assert first.status == "skipped-nonfinite" and int(first.in_context.sum()) == 8
    assert (
        choose_partition(made_up(torch.full((4, 4), float("nan")), torch.zeros(4)), 4).status
        == "skipped-nonfinite"
    )


def test_single_factor() -> None:
    scores = choose_partition(made_up(torch.eye(4), torch.full((4,), 0.5)), 1)
    assert scores.status == "single-factor" and scores.in_context.tolist() == [True]


def test_bad_arguments_are_explained() -> None:
    stats = made_up(torch.eye(4), torch.full((4,), 0.5))
    for arguments in (
        {"pi": 1.0},
        {"target": 4},
        {"lam": -1.0},
        {"features": "factor_mean", "num_factors": 2},
        {"num_factors": 3},
    ):
        with pytest.raises(UserError):
            choose_partition(stats, **{"num_factors": 4} | arguments)
