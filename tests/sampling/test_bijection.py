from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from cimage_dist.sampling.seeds import Bijection


@pytest.mark.parametrize(
    "size", [1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 63, 64, 65, 97, 256, 1000, 4096, 4099, 20_011]
)
def test_is_a_permutation_with_inverse(size: int) -> None:
    positions = torch.arange(size)
    for key in (0, 1, -(2**63)):
        pi = Bijection(size, key)
        ids = pi(positions)
        assert torch.equal(ids.sort().values, positions)
        assert torch.equal(pi.inverse(ids), positions)


def test_any_part_can_be_evaluated_alone() -> None:
    pi = Bijection(10**12 + 39, 5)
    positions = torch.tensor([[0, 10**12], [7, 10**9]])
    ids = pi(positions)
    assert ids.shape == positions.shape
    assert torch.equal(pi(positions[1]), ids[1])
    assert torch.equal(pi.inverse(ids), positions)
    assert int(ids.min()) >= 0 and int(ids.max()) < pi.size


def test_keys_give_unrelated_orders_without_fixed_structure() -> None:
    size = 10_000
    positions = torch.arange(size)
    first, second = Bijection(size, 1)(positions), Bijection(size, 2)(positions)
    # A random permutation has 1 fixed point, agrees with another in 1 place and has 1 preserved
    # step, each Poisson(1): above 8 is a 1e-6 event.
    assert int((first == positions).sum()) <= 8
    assert int((first == second).sum()) <= 8
    assert int((first.diff() == 1).sum()) <= 8
    # Spearman correlation with the identity has standard deviation 1/sqrt(n).
    assert abs(np.corrcoef(first.numpy(), positions.numpy())[0, 1]) < 4 / np.sqrt(size)


@pytest.mark.parametrize("size", [3, 6, 11, 16])
def test_first_two_outputs_are_uniform_over_keys(size: int) -> None:
    trials = 60 * size
    drawn = torch.stack([Bijection(size, key)(torch.tensor([0, 1])) for key in range(trials)])
    for column in drawn.T:
        assert stats.chisquare(np.bincount(column.numpy(), minlength=size)).pvalue > 1e-4
    pairs = np.bincount((drawn[:, 0] * size + drawn[:, 1]).numpy(), minlength=size * size).reshape(
        size, size
    )
    assert np.diag(pairs).sum() == 0
    assert stats.chisquare(pairs[~np.eye(size, dtype=bool)]).pvalue > 1e-4


def test_rejects_bad_input() -> None:
    with pytest.raises(ValueError, match="size"):
        Bijection(0, 1)
    with pytest.raises(ValueError, match="positions"):
        Bijection(5, 1)(torch.tensor([5]))
    assert Bijection(5, 1)(torch.empty(0, dtype=torch.int64)).numel() == 0
