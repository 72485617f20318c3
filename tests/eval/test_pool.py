"""The validation score over draws from training and validation nodes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cimage_dist.eval.probe import MOST_DRAWS, make_pool, pool_score
from cimage_dist.types import NodeSplit

NUM_NODES = 400


def labels() -> Tensor:
    return torch.arange(NUM_NODES) % 4


def split(num_train: int, num_val: int) -> NodeSplit:
    ids = torch.arange(NUM_NODES)
    return NodeSplit(
        ids < num_train,
        (ids >= num_train) & (ids < num_train + num_val),
        ids >= num_train + num_val,
    )


def embedding(noise: float) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.nn.functional.one_hot(labels(), 8).float() + noise * torch.randn(
        NUM_NODES, 8, generator=generator
    )


def test_draws_have_the_class_counts_of_a_small_training_set() -> None:
    y = labels()
    y[0] = 1  # class 0 has one training node fewer, class 1 one more
    pool = make_pool(y, split(40, 160))
    assert pool.nodes.tolist() == list(range(200)) and torch.equal(pool.labels, y[:200])
    assert pool.fitted.shape == (MOST_DRAWS, 200)
    for fitted in pool.fitted:
        assert torch.bincount(pool.labels[fitted]).tolist() == [9, 11, 10, 10]
    assert len({tuple(row.tolist()) for row in pool.fitted}) == MOST_DRAWS


def test_draws_take_no_more_than_half_of_a_class() -> None:
    pool = make_pool(labels(), split(100, 100))
    assert all(torch.bincount(pool.labels[fitted]).tolist() == [25] * 4 for fitted in pool.fitted)
    small = make_pool(labels(), split(40, 20))
    assert all(torch.bincount(small.labels[fitted]).tolist() == [8] * 4 for fitted in small.fitted)


def test_large_draws_are_fewer() -> None:
    y = torch.arange(8000) % 4
    ids = torch.arange(8000)
    large = NodeSplit(ids < 1500, (ids >= 1500) & (ids < 3000), ids >= 3000)
    assert make_pool(y, large).fitted.shape[0] == 3


def test_only_labels_of_training_and_validation_nodes_are_read() -> None:
    y = labels()
    y[5] = -1
    poisoned = y.clone()
    poisoned[200:] = 99
    a, b = (make_pool(found, split(40, 160)) for found in (y, poisoned))
    assert 5 not in a.nodes and torch.equal(a.fitted, b.fitted)
    z = embedding(0.5)
    assert pool_score(z, a) == pool_score(z, b)


def test_the_same_draws_every_time_and_no_global_state() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    a, b = make_pool(labels(), split(40, 160)), make_pool(labels(), split(40, 160))
    assert torch.equal(a.fitted, b.fitted) and torch.equal(state, torch.get_rng_state())


def test_score_is_the_mean_over_draws_at_one_strength() -> None:
    pool = make_pool(labels(), split(40, 160))
    good, bad = pool_score(embedding(0.01), pool), pool_score(embedding(0.6), pool)
    assert (good.mean, good.error) == (100.0, 0.0)
    assert 40 < bad.mean < 100 and 0 < bad.error < 5
    assert bad.as_dict() == {"pool": bad.mean, "pool_se": bad.error}


def test_a_large_pool_is_cut_by_a_keyed_draw() -> None:
    pool = make_pool(labels(), split(40, 160), most=80)
    assert pool.nodes.numel() == 80 and torch.equal(pool.nodes, pool.nodes.sort().values)
    assert not torch.equal(pool.nodes, torch.arange(80))


@pytest.mark.parametrize("known", [0, 1])
def test_without_enough_labels_there_is_no_pool(known: int) -> None:
    y = torch.full((NUM_NODES,), -1)
    y[:known] = 0
    assert make_pool(y, split(40, 160)) is None


def test_training_nodes_alone_can_be_a_pool() -> None:
    pool = make_pool(labels(), split(80, 0))
    assert all(torch.bincount(pool.labels[fitted]).tolist() == [10] * 4 for fitted in pool.fitted)
