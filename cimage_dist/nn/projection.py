"""The first layer: input rows (dense or sparse), dropout, the projection and the normalisation of
its output.

Bag-of-words rows are about 1 % full, and the projection need not multiply the zeros. Dropout draws
in the loop that multiplies: torch's own draws on the CPU take longer than the layers they precede.

Shapes: N nodes, F features, D outputs, Z non-zero entries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cimage_dist import keyed
from cimage_dist.nn.propagate import weighted_sum
from cimage_dist.types import SPARSE_SHARE, FeatureMoments, Features, SparseRows


def draw_key() -> int:
    """What `dropout` draws by, from torch's generator."""
    return int(torch.randint(2**62, (1,), dtype=torch.int64))


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
    key = draw_key()
    if place is not None:
        from cimage_dist.nn.kernels.cpu.routing import drop_at

        return drop_at(x, place, p, key)
    return cast(Tensor, _Dropout.apply(x, p, key))


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, key: int) -> Tensor:
        from cimage_dist.nn.kernels.cpu.routing import drop

        ctx.p, ctx.key = p, key
        return drop(x, p, key)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        from cimage_dist.nn.kernels.cpu.routing import drop

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


class MomentsNorm(nn.Module):
    """Batch normalisation of Linear(dropout(x)) with the moments of the *whole graph*, in closed
    form (§4.2):

        mean = W x̄ + b,    variance = diag(W (Σ_x + p/(1-p)·diag(E[x²])) Wᵀ)

    No communication and no dependence on which rows were sampled; gradients flow through W and b as
    in batch normalisation. In eval mode p = 0. `linear` is the projection whose output is
    normalised; it is not registered again here.
    """

    mean: Tensor
    sqmean: Tensor
    cov: Tensor

    def __init__(
        self, linear: nn.Linear, moments: FeatureMoments, dropout: float, eps: float = 1e-5
    ) -> None:
        super().__init__()
        self._linear = [linear]  # in a list, so that its parameters are not listed twice
        cov = moments.cov_factor if moments.cov is None else moments.cov
        assert cov is not None
        # Saved with the weights: a trained model embeds other graphs with the moments it was
        # trained with.
        self.register_buffer("mean", moments.mean.float())
        self.register_buffer("sqmean", moments.sqmean.float())
        self.register_buffer("cov", cov.float())
        self.is_factor = moments.cov is None
        self.dropout = dropout
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(linear.out_features))
        self.bias = nn.Parameter(torch.zeros(linear.out_features))

    def forward(self, y: Tensor) -> Tensor:
        w = self._linear[0].weight
        dtype = w.dtype
        mean = w @ self.mean.to(dtype) + self._linear[0].bias
        cov = self.cov.to(dtype)
        variance = (w @ cov.t()).square().sum(1) if self.is_factor else ((w @ cov) * w).sum(1)
        if self.training and self.dropout > 0:
            variance = variance + self.dropout / (1 - self.dropout) * (
                w.square() @ self.sqmean.to(dtype)
            )
        scale = (
            variance.clamp_min(0) + self.eps
        ).rsqrt() * self.weight  # first, so that one pass over the rows is enough
        return (y - mean) * scale + self.bias


class BatchNorm(nn.BatchNorm1d):
    """Batch normalisation whose moments may be those of all ranks' rows together, on CPU and GPU
    alike (§4.2).

    Training normalises by the moments of the rows at hand and stores nothing. Eval mode uses the
    moments that `settle` stored: an average over training steps would mix old weights and dropped
    inputs into them. `reduce` sums a tensor over ranks with a gradient that sums too; None: this
    process's rows only. y [n, D].
    """

    reduce: Callable[[Tensor], Tensor] | None = None

    def forward(self, y: Tensor) -> Tensor:
        if not self.training:
            return super().forward(y)
        if self.reduce is None:
            return F.batch_norm(y, None, None, self.weight, self.bias, training=True, eps=self.eps)
        wide = y.to(torch.float64)
        packed = self.reduce(
            torch.cat([wide.sum(0), wide.square().sum(0), wide.new_full((1,), y.shape[0])])
        )
        mean, square = packed[:-1].view(2, -1) / packed[-1]
        variance = (square - mean.square()).clamp_min(0)
        scale = (variance + self.eps).rsqrt().to(y.dtype) * self.weight
        return (y - mean.to(y.dtype)) * scale + self.bias


@torch.no_grad()
def settle(norm: nn.Module, linear: nn.Linear, x: Features, rows: int = 1 << 14) -> None:
    """Store in batch normalisation the moments of y = W x + b over the rows of x.

    `mean = (1/N) Σ_i y_i`, `variance = (1/(N-1)) Σ_i (y_i - mean)²`, without dropout, in double
    precision. Other kinds of norm store no moments and are left alone. x [N, F], dense or sparse.
    """
    if not isinstance(norm, BatchNorm):
        return
    count, weight = x.shape[0], linear.weight
    total, square = (weight.new_zeros(linear.out_features, dtype=torch.float64) for _ in range(2))
    is_whole = not isinstance(x, Tensor) and weight.device.type == "cpu"
    for part in [x] if is_whole else x.split(rows):
        wide = project_rows(placed(part, weight.device, weight.dtype), linear, 0.0, False).double()
        total += wide.sum(0)
        square += wide.square().sum(0)
    mean = total / count
    variance = (square / count - mean.square()).clamp_min(0) * count / max(1, count - 1)
    for stored, found in ((norm.running_mean, mean), (norm.running_var, variance)):
        assert stored is not None
        stored.copy_(found)


def make_norm(
    kind: str, linear: nn.Linear, dropout: float, moments: FeatureMoments | None
) -> nn.Module:
    if kind == "none":
        return nn.Identity()
    if kind == "batch":
        return BatchNorm(linear.out_features)
    if kind == "layer":
        return nn.LayerNorm(linear.out_features)
    if moments is None:
        raise ValueError("norm 'moments' needs the feature moments of the graph")
    return MomentsNorm(linear, moments, dropout)
