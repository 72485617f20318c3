"""Sums of messages without a tensor of messages, and layers that stop where their output no longer
reaches a seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cimage_dist.comm import Comm
from cimage_dist.nn import propagate
from cimage_dist.nn.kernels.cpu import routing
from cimage_dist.nn.propagate import weighted_sum
from cimage_dist.train.step import SampledBatches
from cimage_dist.train.trainer import Trainer
from cimage_dist.types import Hops
from tests.settings import ROUTING, small_sbm_config


@pytest.fixture
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def case(dtype: torch.dtype = torch.float64, order: str = "sorted") -> tuple[torch.Tensor, ...]:
    """9 nodes, messages into the first 5 of them; target 3 gets none."""
    generator = torch.Generator().manual_seed(0)
    dst = torch.tensor([0, 0, 0, 1, 2, 2, 4, 4, 4, 4])
    src = torch.randint(0, 9, (10,), generator=generator)
    if order == "mixed":
        dst = dst[torch.randperm(10, generator=generator)]
    base, x = (
        torch.randn(5, 6, dtype=dtype, generator=generator),
        torch.randn(9, 6, dtype=dtype, generator=generator),
    )
    return base, x, torch.rand(10, dtype=dtype, generator=generator), src, dst


def plain(
    base: torch.Tensor, x: torch.Tensor, p: torch.Tensor, src: torch.Tensor, dst: torch.Tensor
) -> torch.Tensor:
    return base.index_add(0, dst, p.unsqueeze(-1) * x[src])


@pytest.fixture(params=["compiled", "two rows at a time", "chunks"])
def path(request, monkeypatch):
    if request.param == "two rows at a time":
        monkeypatch.setattr(routing, "_rows_at_a_time", lambda *args: 2)
    if request.param == "chunks":
        monkeypatch.setattr(propagate, "can_compile", lambda *args: False)
        monkeypatch.setattr(propagate, "_CHUNK_FLOATS", 18)


@pytest.mark.parametrize("order", ["sorted", "mixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_and_gradients_equal_index_add(path, dtype, order):
    base, x, p, src, dst = case(dtype, order)
    leaves = [(base.clone().requires_grad_(), x.clone().requires_grad_()) for _ in range(2)]
    out, want = weighted_sum(*leaves[0], p, src, dst), plain(*leaves[1], p, src, dst)
    # One addition order on both sides; a compiler may fuse multiply and add, which changes the last
    # bits.
    tolerance = {"rtol": 0, "atol": 1e-6 if dtype == torch.float32 else 1e-14}
    torch.testing.assert_close(out, want, **tolerance)
    weight = torch.randn(out.shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
    for result in (out, want):
        (result * weight).sum().backward()
    for got, expected in zip(leaves[0], leaves[1], strict=True):
        torch.testing.assert_close(got.grad, expected.grad, **tolerance)


def test_gradcheck(path):
    base, x, p, src, dst = case(order="mixed")
    assert torch.autograd.gradcheck(
        lambda *leaves: weighted_sum(*leaves, p, src, dst),
        (base.requires_grad_(), x.requires_grad_()),
    )


def test_nothing_to_add_and_half_precision(path):
    base, x, p, src, dst = case()
    none = torch.empty(0, dtype=torch.int64)
    assert torch.equal(weighted_sum(base, x, p[:0], none, none), base)
    assert weighted_sum(base[:0], x[:0], p[:0], none, none).shape == (0, 6)
    half = weighted_sum(base.bfloat16(), x.bfloat16(), p.bfloat16(), src, dst)
    torch.testing.assert_close(
        half.double(), plain(base, x, p, src, dst), rtol=0, atol=0.1
    )  # 8 bits of mantissa


def test_large_tables_are_read_a_part_at_a_time_to_the_same_bits(monkeypatch):
    base, x, p, src, dst = case(torch.float32, "mixed")
    whole = weighted_sum(base, x, p, src, dst)
    for rows in (1, 2, 4):
        monkeypatch.setattr(routing, "_rows_at_a_time", lambda *args, rows=rows: rows)
        assert torch.equal(weighted_sum(base, x, p, src, dst), whole)


def test_only_large_tables_with_many_messages_a_target_are_read_in_parts():
    large, small = torch.empty(20_000, 384), torch.empty(2000, 384)
    assert 1 <= routing._rows_at_a_time(large, 800_000, 5000) < 1000
    assert routing._rows_at_a_time(large, 200_000, 20_000) == 20_000
    assert routing._rows_at_a_time(small, 800_000, 5000) == 2000


def test_the_number_of_threads_does_not_change_the_bits():
    generator = torch.Generator().manual_seed(0)
    dst = torch.randint(0, 50, (3000,), generator=generator).sort().values
    src = torch.randint(0, 80, (3000,), generator=generator)
    base, x, p = (
        torch.randn(50, 32, generator=generator),
        torch.randn(80, 32, generator=generator),
        torch.rand(3000, generator=generator),
    )
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(weighted_sum(base, x, p, src, dst))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*results)


@pytest.mark.parametrize("grad", ["full", "last"])
@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize(
    ("layers", "fanouts"),
    [(1, [3, 3]), (2, [4, 3, 2]), (2, [3]), (3, [2, 2]), (2, [-1, -1, -1, 2])],
)
def test_seeds_do_not_notice_that_layers_stop_early(
    layers, fanouts, tail, grad, store_dir: Path, small_sbm, double
):
    """Values on the seeds and gradients of the projection, with fewer hops than layers, as many,
    and more.
    """
    settings = [
        *ROUTING,
        "model.num_factors=3",
        "model.factor_dim=4",
        "model.dropout=0",
        f"model.num_layers={layers}",
        "model.routing_iterations=2",
    ]
    settings += [
        f"model.tail={tail}",
        f"model.routing_grad={grad}",
        f"sampler.fanouts={fanouts}",
        "sampler.batch_edges=6",
    ]
    cfg = small_sbm_config(store_dir, *settings)
    trainer = Trainer(cfg, small_sbm, small_sbm.topology(), Comm())
    assert isinstance(trainer.batches, SampledBatches)
    batch = next(trainer.remaining())[0]
    assert isinstance(batch.hops, Hops)
    seeds = batch.pairs.unique()
    encoder = trainer.model.encoder
    found = []
    for hops in (None, batch.hops):
        h, z, _ = encoder(batch.x, batch.edges, hops)
        encoder.zero_grad()
        z[seeds].square().sum().backward()
        found.append((h[seeds].detach(), z[seeds].detach(), encoder.linear.weight.grad.clone()))
    for whole, trimmed in zip(*found, strict=True):
        torch.testing.assert_close(trimmed, whole, rtol=0, atol=1e-12)
    if tail:
        assert z.shape[0] == batch.hops.nodes[0] < batch.x.shape[0]
