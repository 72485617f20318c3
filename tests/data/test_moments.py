"""Streamed moments against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from cimage_dist.data import moments
from cimage_dist.data.moments import MomentAccumulator, sampled_rows
from cimage_dist.types import FeatureMoments


def streamed(x: np.ndarray, chunk: int) -> FeatureMoments:
    accumulator = MomentAccumulator(*x.shape)
    for start in range(0, len(x), chunk):
        accumulator.add(x[start : start + chunk])
    return accumulator.finish()


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("kind", ["dense", "sparse", "offset"])
def test_match_numpy(chunk: int, kind: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 9)).astype(np.float32)
    if kind == "sparse":
        x *= rng.random(x.shape) < 0.05
    if kind == "offset":
        x += 1000.0
    got = streamed(x, chunk)
    exact = x.astype(np.float64)
    # float64 sums; the offset case loses about (1000/1)² · 1e-16
    np.testing.assert_allclose(got.mean, exact.mean(0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(got.sqmean, (exact**2).mean(0), rtol=1e-12)
    assert got.cov is not None and got.cov_factor is None
    np.testing.assert_allclose(got.cov, np.cov(exact.T, bias=True), atol=1e-9)


def test_wide_features_keep_a_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments, "FULL_WIDTH", 4)
    x = np.random.default_rng(1).normal(size=(500, 6))
    got = streamed(x, 64)
    assert got.cov is None and got.cov_factor is not None
    # fewer rows than the sample: exact
    np.testing.assert_allclose(
        got.cov_factor.T @ got.cov_factor, np.cov(x.T, bias=True), atol=1e-12
    )
    monkeypatch.setattr(moments, "SAMPLED_ROWS", 250)
    sampled = streamed(x, 64)
    assert sampled.cov_factor is not None and sampled.cov_factor.shape == (250, 6)
    # 250 of 500 rows: entries are within a few 1/√250 of the truth
    np.testing.assert_allclose(
        sampled.cov_factor.T @ sampled.cov_factor, np.cov(x.T, bias=True), atol=0.3
    )
    np.testing.assert_allclose(
        sampled.cov_factor, streamed(x, 17).cov_factor, atol=1e-14
    )  # same rows; the mean rounds differently


@pytest.mark.parametrize(("rows", "count"), [(10, 20), (10, 10), (30, 10), (10_000, 100)])
def test_sampled_rows_are_distinct_and_reproducible(rows: int, count: int) -> None:
    ids = sampled_rows(rows, count)
    assert len(ids) == min(rows, count) == len(np.unique(ids))
    assert ids.min() >= 0 and ids.max() < rows and (np.diff(ids) > 0).all()
    np.testing.assert_array_equal(ids, sampled_rows(rows, count))
