"""Block HSIC statistics against a dense float64 version, and their conventions."""

from __future__ import annotations

import pytest
import torch

from cimage_dist.ci import centred_delta, centred_gaussian
from cimage_dist.ci.hsic import (
    HsicStats,
    averaged,
    block_statistics,
    class_blocks,
    conditional_statistics,
    draw_blocks,
    repeats_for,
)
from cimage_dist.errors import UserError
from tests import reference


def toy(
    n: int = 130, width: int = 5, classes: int = 3, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (n,), generator=generator)
    x = torch.randn(n, width, generator=generator, dtype=torch.float64)
    x[:, 0] += labels
    gids = torch.randperm(10 * n, generator=generator)[:n].sort().values
    return (
        x * torch.tensor([1.0, 3.0, 0.1, 50.0, 1.0], dtype=torch.float64)[:width] + 7.0,
        labels,
        gids,
    )


@pytest.mark.parametrize("block_size", [5, 8])
def test_equals_dense_reference(block_size: int) -> None:
    x, labels, gids = toy()
    stats = block_statistics(x, labels, gids, seed=3, block_size=block_size)
    blocks = draw_blocks(labels, gids, seed=3, block_size=block_size, repeats=3)
    g, b, y2 = reference.dense_statistics(x.numpy(), labels.numpy(), blocks.numpy())
    # Both are float64; the sums have about 1e5 terms.
    torch.testing.assert_close(stats.G, torch.from_numpy(g), rtol=0, atol=1e-12)
    torch.testing.assert_close(stats.b, torch.from_numpy(b), rtol=0, atol=1e-12)
    assert abs(stats.y2 - y2) < 1e-12
    assert stats.num_blocks == 3 * (130 // block_size) and stats.n == 130 and stats.num_classes == 3


def test_many_chunks_equal_one(monkeypatch: pytest.MonkeyPatch) -> None:
    x, labels, gids = toy(400)
    whole = block_statistics(x, labels, gids, seed=0)
    monkeypatch.setattr("cimage_dist.ci.hsic._CHUNK_BYTES", 1)
    monkeypatch.setattr("cimage_dist.ci.hsic._PANEL", 2)
    single = block_statistics(x, labels, gids, seed=0)
    torch.testing.assert_close(single.G, whole.G, rtol=0, atol=1e-13)
    torch.testing.assert_close(single.b, whole.b, rtol=0, atol=1e-13)


def test_unit_diagonal_and_single_precision() -> None:
    x, labels, gids = toy(600)
    stats = block_statistics(x, labels, gids, seed=1)
    # The 1e-9 added to each norm keeps the diagonal just below one.
    torch.testing.assert_close(
        stats.G.diagonal(), torch.ones(5, dtype=torch.float64), rtol=0, atol=1e-7
    )
    assert abs(stats.y2 - 1) < 1e-7
    assert torch.equal(stats.G, stats.G.T)
    single = block_statistics(x, labels, gids, seed=1, dtype=torch.float32)
    torch.testing.assert_close(single.G, stats.G, rtol=0, atol=1e-5)
    torch.testing.assert_close(single.b, stats.b, rtol=0, atol=1e-5)


def test_row_order_and_affine_maps_do_not_matter() -> None:
    x, labels, gids = toy(200)
    stats = block_statistics(x, labels, gids, seed=0)
    order = torch.randperm(200)
    shuffled = block_statistics(x[order] * -4 + 2, labels[order] + 5, gids[order], seed=0)
    torch.testing.assert_close(shuffled.G, stats.G, rtol=0, atol=1e-10)
    torch.testing.assert_close(shuffled.b, stats.b, rtol=0, atol=1e-10)
    assert not torch.allclose(block_statistics(x, labels, gids, seed=1).G, stats.G, atol=1e-4)


def test_constant_feature_and_single_class_blocks_add_nothing() -> None:
    x, labels, gids = toy(200)
    x[:, 2] = 0.1
    stats = block_statistics(x, torch.zeros_like(labels), gids, seed=0)
    assert float(stats.G[2].abs().max()) == 0.0
    assert (
        float(stats.b.abs().max()) == 0.0 and stats.y2 == 0.0 and stats.zero_label_fraction == 1.0
    )
    packed, norm = centred_gaussian(torch.full((1, 6, 2), 0.3, dtype=torch.float64))
    assert float(packed.abs().max()) == 0.0 and float(norm.max()) == 0.0
    packed, norm = centred_delta(torch.full((1, 6), 4))
    assert float(packed.abs().max()) == 0.0 and float(norm.max()) == 0.0


def test_packed_kernels_keep_the_inner_product() -> None:
    x = torch.randn(1, 7, 2, dtype=torch.float64)
    packed, _ = centred_gaussian(x)
    full = [
        torch.from_numpy(reference.normalised_centred(reference.gaussian(x[0, :, d].numpy())))
        for d in range(2)
    ]
    assert abs(float(packed[0, :, 0] @ packed[0, :, 1]) - float((full[0] * full[1]).sum())) < 1e-13


def test_blocks_are_disjoint_within_a_repeat_and_single_block_is_not_repeated() -> None:
    _, labels, gids = toy(101)
    blocks = draw_blocks(labels, gids, seed=0, block_size=20, repeats=3)
    assert blocks.shape == (15, 20)
    for repeat in blocks.view(3, -1):
        assert repeat.unique().numel() == 100
    assert not torch.equal(blocks[:5], blocks[5:10])
    assert draw_blocks(labels[:39], gids[:39], seed=0, block_size=20, repeats=3).shape == (1, 20)
    assert draw_blocks(labels[:19], gids[:19], seed=0, block_size=20, repeats=3).shape == (0, 20)


def test_block_classes_limits_classes_per_block() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 100, (4000,), generator=generator)
    gids = torch.arange(4000)
    blocks = draw_blocks(labels, gids, seed=0, block_size=20, repeats=2, block_classes=5)
    per_block = torch.tensor([labels[rows].unique().numel() for rows in blocks])
    assert int(per_block.max()) <= 5 and float(per_block.to(torch.float64).mean()) > 4.5
    for repeat in blocks.chunk(2):
        assert repeat.unique().numel() == repeat.numel()
    with pytest.raises(UserError, match="divide the block size"):
        draw_blocks(labels, gids, seed=0, block_size=20, repeats=1, block_classes=3)


def test_conditional_statistics_equal_dense_reference() -> None:
    x, labels, gids = toy(150, width=4)
    stats = conditional_statistics(x, labels, gids, seed=2, block_size=8, repeats=2)
    plain = block_statistics(x, labels, gids, seed=2, block_size=8, repeats=2)
    free = draw_blocks(labels, gids, seed=2, block_size=8, repeats=2)
    inside, weight = class_blocks(labels, gids, seed=2, block_size=8, repeats=2)
    assert abs(float(weight.sum()) - 1) < 1e-12
    assert all(labels[rows].unique().numel() == 1 for rows in inside)
    within = torch.from_numpy(
        reference.dense_conditional(x.numpy(), free.numpy(), inside.numpy(), weight.numpy())
    )
    values, vectors = torch.linalg.eigh(2 * (plain.G - within))
    expected = vectors @ torch.diag(values.clamp(min=1e-6 * float(values[-1]))) @ vectors.T
    torch.testing.assert_close(stats.G, expected, rtol=0, atol=1e-11)
    assert stats.is_conditional and float(torch.linalg.eigvalsh(stats.G)[0]) > 0
    torch.testing.assert_close(stats.coverage, plain.coverage)


def test_small_classes_are_left_out_of_class_blocks() -> None:
    labels = torch.tensor([0] * 30 + [1] * 5 + [2] * 10)
    inside, weight = class_blocks(labels, torch.arange(45), seed=0, block_size=10, repeats=1)
    of_block = labels[inside[:, 0]]
    assert sorted(of_block.tolist()) == [0, 0, 0, 2]
    assert abs(float(weight[of_block == 0].sum()) - 30 / 40) < 1e-12


def test_nonfinite_and_empty_samples_are_reported() -> None:
    x, labels, gids = toy(100)
    x[3, 1] = float("nan")
    assert block_statistics(x, labels, gids, seed=0).num_nonfinite == 1
    empty = block_statistics(x[:0], labels[:0], gids[:0], seed=0)
    assert (
        isinstance(empty, HsicStats)
        and empty.n == 0
        and empty.num_blocks == 0
        and float(empty.G.abs().max()) == 0.0
    )


def test_average_over_refreshes_weighs_them_by_powers_of_the_decay() -> None:
    generator = torch.Generator().manual_seed(3)
    labels, x = torch.arange(100) % 3, torch.randn(100, 4, generator=generator)
    gids = torch.arange(100)
    found = [block_statistics(x + i * labels[:, None], labels, gids, seed=i) for i in range(4)]
    average = None
    for stats in found:
        average = averaged(average, stats, 0.5)
    assert average is not None and average.weight == 1.875
    weight = torch.tensor([0.125, 0.25, 0.5, 1.0], dtype=torch.float64) / 1.875
    for name in ("G", "b", "coverage"):
        expected = (torch.stack([getattr(s, name) for s in found], dim=-1) * weight).sum(-1)
        torch.testing.assert_close(getattr(average, name), expected, rtol=0, atol=1e-12)
    expected_y2 = sum(w * s.y2 for w, s in zip(weight.tolist(), found, strict=True))
    assert average.y2 == pytest.approx(expected_y2)
    assert (average.n, average.num_blocks) == (found[-1].n, found[-1].num_blocks)
    assert averaged(found[0], found[1], 0.0) is found[1]


@pytest.mark.parametrize(("n", "expected"), [(400, 25), (450, 23), (20_000, 3), (10, 500)])
def test_small_samples_are_permuted_more_often(n: int, expected: int) -> None:
    assert repeats_for(n, 20) == expected and repeats_for(n, 20, 7) == 7


def test_unset_repeats_give_enough_blocks() -> None:
    x = torch.randn(210, 2, generator=torch.Generator().manual_seed(0))
    stats = block_statistics(x, torch.arange(210) % 3, torch.arange(210), seed=0, repeats=None)
    assert (stats.repeats, stats.num_blocks) == (50, 500)
