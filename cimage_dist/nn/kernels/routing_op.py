"""Routing as one operator, `torch.ops.cimage.route`: one node for autograd, torch.compile and DDP,
with a backend per device.

The backward pass recomputes the iterations, so nothing is kept between the two but the operator's
inputs.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

_EPS = 1e-12
_CPU_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def is_fused(x: Tensor) -> bool:
    """Whether a backend serves tensors of this device and type: numba on the CPU, Triton on a
    GPU.
    """
    if x.device.type == "cpu":
        return x.dtype in _CPU_TYPES
    if x.device.type != "cuda":
        return False
    from cimage_dist.nn.kernels.triton import routing as routing_triton

    return routing_triton.is_available()


def _wide(x: Tensor) -> Tensor:
    """Half precision is storage only on the CPU; the loops compute in single."""
    return (
        x.float() if x.device.type == "cpu" and x.dtype not in (torch.float32, torch.float64) else x
    )


def _unit_grad(grad_l: Tensor, x: Tensor, l: Tensor) -> Tensor:  # noqa: E741
    """From the gradient of l = x / max(‖x‖, ε) to that of x: (g - l<l,g>)/‖x‖, and g/ε below ε."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    along = torch.where(norm > _EPS, (l * grad_l).sum(-1, keepdim=True), 0.0)
    return (grad_l - l * along) / norm.clamp_min(_EPS)


# The schema is read from the annotations, and knows Optional but not `| None`.
@torch.library.custom_op("cimage::route", mutates_args=())
def route_op(
    x: Tensor,
    first: int,
    indptr: Tensor,
    indices: Tensor,
    weight: Optional[Tensor],
    iterations: int,
    temperature: float,
    self_init: bool,
    through_all: bool,
    unit: bool,
) -> Tensor:
    """The routed sums of targets first .. first + T: x [N, K, C], indptr int64 [T+1], indices [E],
    weight [E] -> [T, K, C].

    `unit` divides each factor of x by its length first; otherwise that has been done. `through_all`
    chooses the gradient: through all iterations, or through the last sum only.
    """
    # Backends are imported on use: numba and Triton take their time, and not every verb routes.
    if x.device.type == "cpu":
        from cimage_dist.nn.kernels.cpu import routing as routing_cpu

        return routing_cpu.forward(
            _wide(x), first, indptr, indices, weight, iterations, temperature, self_init, unit
        ).to(x.dtype)
    from cimage_dist.nn.kernels.triton import routing as routing_triton

    l = F.normalize(x, dim=-1, eps=_EPS) if unit else x  # noqa: E741
    return routing_triton.forward(
        l, first, indptr, indices, weight, iterations, temperature, self_init
    )


@torch.library.custom_op("cimage::route_backward", mutates_args=())
def route_backward_op(
    grad: Tensor,
    x: Tensor,
    first: int,
    indptr: Tensor,
    indices: Tensor,
    weight: Optional[Tensor],
    iterations: int,
    temperature: float,
    self_init: bool,
    through_all: bool,
    unit: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the weights; the second is empty where there are none."""
    options = (first, indptr, indices, weight, iterations, temperature, self_init, through_all)
    if x.device.type == "cpu":
        from cimage_dist.nn.kernels.cpu import routing as routing_cpu

        grad_x, grad_w = routing_cpu.backward(_wide(grad), _wide(x), *options, unit)
    else:
        from cimage_dist.nn.kernels.triton import routing as routing_triton

        l = F.normalize(x, dim=-1, eps=_EPS) if unit else x  # noqa: E741
        grad_x, grad_w = routing_triton.backward(grad, l, *options)
        grad_x = _unit_grad(grad_x, x, l) if unit else grad_x
    return grad_x.to(x.dtype), x.new_empty(0) if grad_w is None else grad_w


@route_op.register_fake
def _(x: Tensor, first: int, indptr: Tensor, *_: Any) -> Tensor:
    return x.new_empty((indptr.shape[0] - 1, x.shape[1], x.shape[2]))


@route_backward_op.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    first: int,
    indptr: Tensor,
    indices: Tensor,
    weight: Tensor | None,
    *_: Any,
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(0) if weight is None else weight.new_empty(
        weight.shape
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, first, indptr, indices, weight, *options = inputs
    ctx.save_for_backward(x, indptr, indices, weight)
    ctx.first, ctx.options = first, options


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, indptr, indices, weight = ctx.saved_tensors
    grad_x, grad_w = route_backward_op(
        grad.contiguous(), x, ctx.first, indptr, indices, weight, *ctx.options
    )
    return grad_x, None, None, None, None if weight is None else grad_w, *[None] * len(ctx.options)


route_op.register_autograd(_backward, setup_context=_setup_context)
