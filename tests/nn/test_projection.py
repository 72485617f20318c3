"""Sparse input rows and compiled dropout against the dense forms they stand for."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from cimage_dist.nn.inference import encode_graph
from cimage_dist.nn.kernels.cpu.parallel import run_parts
from cimage_dist.nn.projection import compact, dropout, project_rows
from cimage_dist.types import SparseRows
from tests.graphs import random_topology
from tests.nn.test_encoder import make


def words(n: int = 30, f: int = 50, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """About 4 % non-zeros; the first row has none."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(n, f, dtype=dtype, generator=generator) * (
        torch.rand(n, f, generator=generator) < 0.04
    )
    x[0] = 0
    return x


def test_few_non_zeros_become_sparse_and_many_do_not():
    x = words()
    found = compact(x)
    assert isinstance(found, SparseRows)
    back = torch.zeros_like(x)
    back[found.row, found.column] = found.value
    assert torch.equal(back, x)
    assert compact(torch.rand(5, 5)) is not None
    assert isinstance(compact(torch.rand(5, 5)), torch.Tensor)
    assert isinstance(compact(torch.zeros(0, 4)), torch.Tensor)


def test_the_sparse_product_equals_the_dense_one_with_its_gradients():
    x, linear = words(), nn.Linear(50, 12).double()
    results = []
    for rows in (x, compact(x)):
        linear.zero_grad()
        out = project_rows(rows, linear, 0.5, training=False)
        (out * torch.arange(12)).square().sum().backward()
        results.append((out.detach(), linear.weight.grad.clone(), linear.bias.grad.clone()))
    for dense, sparse in zip(*results, strict=True):
        torch.testing.assert_close(sparse, dense, rtol=1e-12, atol=1e-12)


def test_dropout_of_sparse_rows_has_the_same_mean():
    x, linear = words(dtype=torch.float32), nn.Linear(50, 4)
    torch.manual_seed(0)
    mean = torch.stack(
        [project_rows(compact(x), linear, 0.6, training=True).detach() for _ in range(2000)]
    ).mean(0)
    want = linear(x).detach()
    spread = (x.square() @ linear.weight.detach().square().t() * 0.6 / 0.4 / 2000).sqrt()
    assert (
        float(((mean - want).abs() - 5 * spread).max()) < 1e-6
    )  # five standard errors, 120 numbers


def test_the_encoder_takes_both():
    topology, x = random_topology(30, 60), words()
    encoder = make(50).eval()
    dense, sparse = (encode_graph(encoder, rows, topology).z for rows in (x, compact(x)))
    torch.testing.assert_close(sparse, dense, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 7, 8, 1003])
def test_dropout_scales_what_it_keeps(dtype, size):
    torch.manual_seed(0)
    x = torch.rand(size, dtype=dtype) + 1
    x.requires_grad_()
    y = dropout(x, 0.25, training=True)
    kept = y != 0
    torch.testing.assert_close(y[kept], x[kept] / 0.75)
    grad = torch.autograd.grad(y.sum(), x)[0]
    torch.testing.assert_close(grad, kept.to(dtype) / 0.75)  # the same draw backwards
    assert dropout(x, 0.25, training=False) is x
    assert dropout(x, 0.0, training=True) is x


def test_dropout_draws_are_fair_and_unlike_each_other():
    torch.manual_seed(3)
    ones = torch.ones(400, 1000)
    first, second = ((dropout(ones, 0.3, training=True) > 0).float() - 0.7 for _ in range(2))
    sigma = (0.21 / ones.numel()) ** 0.5
    assert abs(float(first.mean())) < 5 * sigma
    assert (
        abs(float((first * second).mean())) < 5 * 0.21 / ones.numel() ** 0.5
    )  # one call says nothing of the next
    assert (
        abs(float((first[:, 1:] * first[:, :-1]).mean())) < 5 * 0.21 / ones.numel() ** 0.5
    )  # nor one position of its neighbour
    # Row and column means spread as independent draws do.
    assert 0.85 < float(first.mean(0).std()) / (0.21 / 400) ** 0.5 < 1.15
    assert 0.85 < float(first.mean(1).std()) / (0.21 / 1000) ** 0.5 < 1.15


def test_dropout_follows_torch_s_seed_and_not_the_threads():
    x, results, threads = torch.ones(5000), [], torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            torch.manual_seed(7)
            results.append(dropout(x, 0.5, training=True))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_failing_part_is_heard_of():
    def work(part: int) -> None:
        if part == 2:
            raise RuntimeError("part 2")

    with pytest.raises(RuntimeError, match="part 2"):
        run_parts(work, 3)


def test_parts_run_in_a_forked_child():
    run_parts(lambda part: None, 2)  # the parent's threads exist now, and do not in the child
    child = os.fork()
    if child == 0:
        done = []
        run_parts(done.append, 2)
        os._exit(0 if sorted(done) == [0, 1] else 1)
    assert os.waitpid(child, 0)[1] == 0
