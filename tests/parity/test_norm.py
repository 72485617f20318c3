"""Batch normalisation over the rows of all ranks: values and gradients as in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cimage_dist.comm import Comm
from cimage_dist.nn.projection import BatchNorm
from tests.procs import run_ranks


def normalised(comm: Comm, reduces: bool) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(23, 5, dtype=torch.float64, generator=generator) * 3 + 100
    target = torch.randn(23, 5, dtype=torch.float64, generator=generator)
    part = slice(*comm.slice_of(23))
    x = rows[part].clone().requires_grad_()
    norm = BatchNorm(5).double()
    torch.nn.init.uniform_(norm.weight, 0.5, 2.0, generator=generator)
    norm.reduce = comm.grad_sum if reduces else None
    out = norm(x)
    (out * target[part]).sum().backward()
    assert x.grad is not None and norm.weight.grad is not None
    return {
        "out": comm.gather_rows(out.detach()).numpy(),
        "grad": comm.gather_rows(x.grad).numpy(),
        "weight": comm.sum(norm.weight.grad).numpy(),
    }


def test_reducing_in_one_process_is_plain_batch_normalisation():
    plain, reduced = normalised(Comm(), False), normalised(Comm(), True)
    for name, value in plain.items():
        np.testing.assert_allclose(reduced[name], value, rtol=0, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_normalise_as_one(world):
    alone = normalised(Comm(), False)
    for result in run_ranks(normalised, world, True):
        for name, value in alone.items():
            np.testing.assert_allclose(result[name], value, rtol=0, atol=1e-9, err_msg=name)
