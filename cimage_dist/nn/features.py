"""Dropout that draws in the loop that multiplies: torch's own draws on the CPU take longer than the
layers they stand before.

Input features, dense or sparse: bag-of-words rows are about 1 % full, and the first layer need not
multiply the zeros.

Shapes: N nodes, F features, D outputs, Z non-zero entries.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cimage_dist import keyed
from cimage_dist.nn.messages import weighted_sum
from cimage_dist.types import Features, SparseRows


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """x·m/(1-p), m = 1 with probability 1-p; the identity outside training.

    On the CPU m is a hash of (key, position), the key one draw from torch's generator: nothing is
    stored for the backward pass, and the number of threads does not matter.
    """
    if not training or p == 0.0:
        return x
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64):
        return F.dropout(x, p, training)
    key = int(torch.randint(2**62, (1,), dtype=torch.int64))
    return cast(Tensor, _Dropout.apply(x, p, key))


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, key: int) -> Tensor:
        from cimage_dist.nn.kernels.cpu.messages import drop

        ctx.p, ctx.key = p, key
        return drop(x, p, key)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        from cimage_dist.nn.kernels.cpu.messages import drop

        return drop(grads[0], ctx.p, ctx.key), None, None


_SPARSE_BELOW = 0.1  # share of non-zeros; above it the dense product is faster on a CPU


def compact(x_NF: Tensor) -> Features:
    """Sparse where that is faster: on the CPU, with few non-zeros."""
    if (
        x_NF.device.type != "cpu"
        or not x_NF.numel()
        or int(torch.count_nonzero(x_NF)) > _SPARSE_BELOW * x_NF.numel()
    ):
        return x_NF
    row, column = x_NF.nonzero(as_tuple=True)
    return SparseRows(row, column, x_NF[row, column], (x_NF.shape[0], x_NF.shape[1]))


def drop_columns(x: Features, rate: float, key: int) -> Features:
    """x with the keyed share `rate` of its columns set to zero; [N, F]."""
    if rate == 0:
        return x
    kept = keyed.uniform(key, torch.arange(x.shape[1], device=x.device)) >= rate
    if isinstance(x, Tensor):
        return x * kept.to(x.dtype)
    return replace(x, value=x.value * kept[x.column].to(x.value.dtype))


def project_rows(x: Features, linear: nn.Linear, rate: float, training: bool) -> Tensor:
    """W dropout(x) + b, [N, D]. Dropout of a zero changes nothing, so sparse rows draw for their
    entries only.
    """
    if isinstance(x, Tensor):
        out: Tensor = linear(dropout(x, rate, training))
        return out
    value = dropout(x.value, rate, training)
    base = linear.bias.expand(x.shape[0], -1)
    return weighted_sum(base, linear.weight.t(), value, x.column, x.row)
