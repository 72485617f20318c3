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
from cimage_dist.types import SPARSE_SHARE, Features, SparseRows


def dropout(x: Tensor, p: float, training: bool, place: Tensor | None = None) -> Tensor:
    """x·m/(1-p), m = 1 with probability 1-p; the identity outside training.

    On the CPU m is a hash of (key, position), the key one draw from torch's generator: nothing is
    stored for the backward pass, and the number of threads does not matter. `place` int64 like x:
    positions to draw by, where x are entries of a larger matrix; these get no gradient.
    """
    if not training or p == 0.0:
        return x
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64):
        return F.dropout(x, p, training)
    key = int(torch.randint(2**62, (1,), dtype=torch.int64))
    if place is not None:
        from cimage_dist.nn.kernels.cpu.messages import drop_at

        return drop_at(x, place, p, key)
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


def placed(x: Features, device: torch.device, dtype: torch.dtype) -> Features:
    """x on a device in a type. Sparse rows become dense off the CPU, where dense products are
    faster.
    """
    x = x.to(device, dtype)
    return x if isinstance(x, Tensor) or device.type == "cpu" else x.to_dense()


def compact(x_NF: Features) -> Features:
    """Sparse where that is faster: on the CPU, with few non-zeros."""
    if isinstance(x_NF, SparseRows):
        return x_NF
    if (
        x_NF.device.type != "cpu"
        or not x_NF.numel()
        or int(torch.count_nonzero(x_NF)) > SPARSE_SHARE * x_NF.numel()
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
    place = x.row * x.shape[1] + x.column if x.draws_by_place and training and rate else None
    value = dropout(x.value, rate, training, place)
    base = linear.bias.expand(x.shape[0], -1)
    return weighted_sum(base, linear.weight.t(), value, x.column, x.row)
