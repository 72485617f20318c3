"""k-means in one process, against scikit-learn and on degenerate input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from sklearn.datasets import make_blobs
from sklearn.metrics import adjusted_rand_score

from cimage_dist.errors import UserError
from cimage_dist.pseudo.kmeans import assign, kmeans


def blobs(
    num_rows: int = 600, dim: int = 6, centres: int = 5, offset: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    x, y = make_blobs(num_rows, dim, centers=centres, cluster_std=0.7, random_state=3)
    return x + offset, y


def test_finds_the_partition_of_blobs_like_sklearn() -> None:
    x, y = blobs()
    ours = kmeans(torch.tensor(x), 5, seed=0, restarts=3)
    theirs = KMeans(5, n_init=10, random_state=0).fit(x)
    assert adjusted_rand_score(y, ours.labels.numpy()) == 1.0
    assert adjusted_rand_score(theirs.labels_, ours.labels.numpy()) == 1.0
    assert ours.inertia == pytest.approx(theirs.inertia_, rel=1e-8)
    assert ours.centres.dtype == torch.float64


def test_inertia_on_structureless_data_is_within_one_percent_of_sklearn() -> None:
    x = torch.randn(1500, 8, generator=torch.Generator().manual_seed(1))
    ours = kmeans(x, 12, seed=0, restarts=5)
    theirs = KMeans(12, n_init=10, random_state=0).fit(x.numpy())
    assert ours.inertia <= 1.01 * theirs.inertia_


def test_one_update_equals_sklearn_from_the_same_start() -> None:
    x, _ = blobs(300)
    start = x[:5]
    ours = kmeans(torch.tensor(x), 5, seed=0, init=torch.tensor(start), max_iterations=2, tol=0.0)
    theirs = KMeans(5, init=start, n_init=1, max_iter=1, tol=0.0).fit(x)
    np.testing.assert_allclose(ours.centres.numpy(), theirs.cluster_centers_, rtol=1e-9)


def test_labels_distances_and_confidence_belong_to_the_returned_centres() -> None:
    x = torch.randn(400, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    result = kmeans(x, 6, seed=1, max_iterations=3, chunk_rows=37)
    d = torch.cdist(x, result.centres).square()
    two = d.topk(2, largest=False)
    assert torch.equal(result.labels, two.indices[:, 0])
    torch.testing.assert_close(
        result.confidence, two.values[:, 1] - two.values[:, 0], rtol=0, atol=1e-12
    )
    assert result.inertia == pytest.approx(float(two.values[:, 0].sum()), rel=1e-12)
    labels, confidence, distance = assign(x, result.centres)
    assert torch.equal(labels, result.labels)
    torch.testing.assert_close(distance, two.values[:, 0], rtol=0, atol=1e-12)
    torch.testing.assert_close(confidence, result.confidence, rtol=0, atol=1e-12)


def test_ties_go_to_the_lowest_cluster() -> None:
    x = torch.tensor(
        [[0.0], [2.0], [1.0]]
    )  # small integers around their mean: all distances are exact
    labels, confidence, distance = assign(x, torch.tensor([[0.0], [2.0], [2.0]]))
    assert labels.tolist() == [0, 1, 0]
    assert confidence.tolist() == [4.0, 0.0, 0.0]
    assert distance.tolist() == [0.0, 0.0, 1.0]


def test_same_seed_same_result_and_row_order_does_not_matter() -> None:
    x = torch.randn(500, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    state = torch.get_rng_state()
    a, b, other = (kmeans(x, 7, seed=s) for s in (5, 5, 6))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(a.labels, b.labels) and a.inertia == b.inertia
    assert not torch.equal(a.labels, other.labels)
    order = torch.randperm(500, generator=torch.Generator().manual_seed(0))
    shuffled = kmeans(x[order], 7, seed=5, gids=order)
    assert torch.equal(shuffled.labels, a.labels[order])


def test_restarts_keep_the_lowest_inertia() -> None:
    x = torch.randn(400, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    one, many = kmeans(x, 15, seed=0), kmeans(x, 15, seed=0, restarts=8)
    assert many.inertia < one.inertia


def test_empty_clusters_recover() -> None:
    x, y = blobs(200, centres=2)
    # The second centre is so far off that no row is its own; the farthest row is in the other
    # blob.
    start = torch.stack(
        [torch.tensor(x[y == 0].mean(0)), torch.full((x.shape[1],), 1e4, dtype=torch.float64)]
    )
    result = kmeans(torch.tensor(x), 2, seed=0, init=start)
    assert adjusted_rand_score(y, result.labels.numpy()) == 1.0


def test_several_empty_clusters_take_the_farthest_rows_in_order() -> None:
    x = torch.tensor([[0.0], [0.0], [10.0], [-10.0], [5.0]], dtype=torch.float64)  # mean 1: exact
    start = torch.tensor([[0.0], [1e4], [2e4], [3e4]], dtype=torch.float64)
    result = kmeans(x, 4, seed=0, init=start)
    assert result.labels.tolist() == [
        0,
        0,
        1,
        2,
        3,
    ]  # rows 2 and 3 tie at distance 10: the lower id comes first
    assert result.inertia == 0.0


def test_empty_clusters_recover_far_from_the_origin_in_single_precision() -> None:
    x = torch.tensor(blobs(200, centres=4, offset=3e3)[0], dtype=torch.float32)
    start = torch.cat([x[:1], torch.full((3, x.shape[1]), 1e5)])
    assert kmeans(x, 4, seed=0, init=start).labels.bincount(minlength=4).min() > 0


def test_single_precision_survives_a_large_offset() -> None:
    near, far = blobs(), blobs(offset=1e4)
    a = kmeans(torch.tensor(near[0], dtype=torch.float32), 5, seed=0, restarts=3)
    b = kmeans(torch.tensor(far[0], dtype=torch.float32), 5, seed=0, restarts=3)
    assert adjusted_rand_score(a.labels.numpy(), b.labels.numpy()) == 1.0
    assert b.inertia == pytest.approx(
        a.inertia, rel=1e-3
    )  # rows at 1e4 are themselves rounded to 1e-3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_duplicates_of_one_point_make_one_cluster(dtype: torch.dtype) -> None:
    result = kmeans(torch.full((50, 3), 1.7, dtype=dtype), 4, seed=0)
    assert result.labels.unique().tolist() == [0]
    assert result.inertia == 0.0 and result.iterations < 5


def test_fewer_distinct_points_than_clusters() -> None:
    points = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    result = kmeans(points.repeat(30, 1), 8, seed=0)
    assert adjusted_rand_score(np.tile([0, 1, 2], 30), result.labels.numpy()) == 1.0
    assert result.inertia < 1e-12
    assert result.centres.isfinite().all()


def test_one_cluster_is_the_mean() -> None:
    x = torch.randn(90, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 5.0
    result = kmeans(x, 1, seed=0)
    torch.testing.assert_close(result.centres[0], x.mean(0))
    assert result.labels.eq(0).all() and result.confidence.eq(0).all()


def test_as_many_clusters_as_rows() -> None:
    x = torch.randn(40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    result = kmeans(x, 40, seed=0)
    assert result.labels.unique().numel() == 40
    assert result.inertia < 1e-12


def test_spherical_ignores_length_and_returns_unit_centres() -> None:
    generator = torch.Generator().manual_seed(0)
    directions = torch.eye(4, dtype=torch.float64).repeat(25, 1) + 0.05 * torch.randn(
        100, 4, dtype=torch.float64, generator=generator
    )
    x = directions * torch.rand(100, 1, dtype=torch.float64, generator=generator).mul(100).add(0.01)
    result = kmeans(x, 4, seed=0, restarts=3, spherical=True)
    assert adjusted_rand_score(np.tile(np.arange(4), 25), result.labels.numpy()) == 1.0
    torch.testing.assert_close(result.centres.norm(dim=1), torch.ones(4, dtype=torch.float64))
    unit = torch.nn.functional.normalize(x, dim=1)
    assert result.inertia == pytest.approx(
        float((2 - 2 * (unit * result.centres[result.labels]).sum(1)).sum()), rel=1e-9
    )


def test_spherical_with_opposite_and_zero_rows_stays_finite() -> None:
    x = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]])
    result = kmeans(x, 1, seed=0, spherical=True)
    assert result.centres.isfinite().all() and np.isfinite(result.inertia)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rows(dtype: torch.dtype) -> None:
    x, y = blobs()
    result = kmeans(torch.tensor(x).to(dtype), 5, seed=0, restarts=3)
    assert adjusted_rand_score(y, result.labels.numpy()) == 1.0


@pytest.mark.parametrize(
    ("x", "num_clusters", "options", "words"),
    [
        (torch.zeros(3, 2), 4, {}, "4 clusters from 3 rows"),
        (torch.zeros(3, 2), 0, {}, "0 clusters"),
        (torch.zeros(0, 2), 1, {}, "from 0 rows"),
        (torch.tensor([[0.0], [float("nan")], [float("inf")]]), 1, {}, "2 of 3 rows hold NaN"),
        (torch.zeros(3), 1, {}, "matrix"),
        (torch.zeros(3, 2, dtype=torch.int64), 1, {}, "floating-point"),
        (torch.zeros(3, 2), 2, {"init": torch.zeros(2, 3)}, r"shape \[2, 3\]"),
        (torch.zeros(3, 2), 2, {"gids": torch.arange(2)}, "2 global ids"),
        (torch.zeros(3, 2), 2, {"restarts": 0}, "at least 1"),
    ],
)
def test_bad_input_is_explained(
    x: torch.Tensor, num_clusters: int, options: dict, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        kmeans(x, num_clusters, seed=0, **options)
