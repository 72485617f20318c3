"""Dropout that draws in the loop that multiplies: torch's own draws on the CPU take longer than the layers they stand before."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """x·m/(1-p), m = 1 with probability 1-p; the identity outside training.

    On the CPU m is a hash of (key, position), the key one draw from torch's generator: nothing is stored for the backward pass, and
    the number of threads does not matter.
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
        from cimage_dist.nn.kernels.cpu.dropout import drop

        ctx.p, ctx.key = p, key
        return drop(x, p, key)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        from cimage_dist.nn.kernels.cpu.dropout import drop

        return drop(grads[0], ctx.p, ctx.key), None, None
