"""Routing as one operator, `torch.ops.cimage.route`: one node for autograd, torch.compile and DDP,
with a backend per device.

The backward pass recomputes the iterations, so nothing is kept between the two but the operator's
inputs. README.md in this folder says what a backend is.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

EPS = 1e-12  # lengths of factors are at least this


class Routing(NamedTuple):
    """One call of the operator: the inputs of `cimage::route`, in its order.

    Tensors: x [N, K, C]; the messages into target v are indptr[v] .. indptr[v+1] (int64 [T+1]),
    their sources `indices` [E], their weights `weight` [E] (None: all 1). Target v is row
    first + v of x. The rest is static: T `iterations`, τ `temperature`, `self_init` (the first p
    follows from the target's own row, otherwise it is 1/K), `through_all` (the gradient goes
    through all iterations, otherwise through the last sum only), `unit` (each factor of x is
    divided by its length first, otherwise that has been done).
    """

    x: Tensor
    indptr: Tensor
    indices: Tensor
    weight: Tensor | None
    first: int
    iterations: int
    temperature: float
    self_init: bool
    through_all: bool
    unit: bool

    @property
    def num_targets(self) -> int:
        return self.indptr.shape[0] - 1


_SCHEMA = (
    "Tensor x, Tensor indptr, Tensor indices, Tensor? weight, SymInt first, SymInt iterations, "
    "float temperature, bool self_init, bool through_all, bool unit"
)


class Backend(Protocol):
    def is_available(self, dtype: torch.dtype) -> bool:
        """Whether it can run here, on tensors of this type."""
        ...

    def forward(self, call: Routing) -> Tensor:
        """The routed sums [T, K, C], in the type of x."""
        ...

    def backward(self, grad_TKC: Tensor, call: Routing) -> tuple[Tensor, Tensor | None]:
        """Gradients of x [N, K, C], in its type, and of the weights [E]."""
        ...


_BACKENDS = {
    "cpu": "cimage_dist.nn.kernels.cpu.routing",
    "cuda": "cimage_dist.nn.kernels.triton.routing",
}


def _backend(x: Tensor) -> Backend:
    # Imported on use: numba and Triton take their time, and not every verb routes.
    return cast(Backend, import_module(_BACKENDS[x.device.type]))


def is_fused(x: Tensor) -> bool:
    """Whether a backend serves tensors of this device and type: numba on the CPU, Triton on a
    GPU.
    """
    return x.device.type in _BACKENDS and _backend(x).is_available(x.dtype)


@torch.library.custom_op("cimage::route", mutates_args=(), schema=f"({_SCHEMA}) -> Tensor")
def route_op(*inputs: Any) -> Tensor:
    call = Routing(*inputs)
    return _backend(call.x).forward(call)


@torch.library.custom_op(
    "cimage::route_backward",
    mutates_args=(),
    schema=f"(Tensor grad, {_SCHEMA}) -> (Tensor, Tensor)",
)
def route_backward_op(grad: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the weights; the second is empty where there are none."""
    call = Routing(*inputs)
    grad_x, grad_w = _backend(call.x).backward(grad, call)
    return grad_x, call.x.new_empty(0) if grad_w is None else grad_w


@route_op.register_fake
def _(*inputs: Any) -> Tensor:
    call = Routing(*inputs)
    return call.x.new_empty((call.num_targets, *call.x.shape[1:]))


@route_backward_op.register_fake
def _(grad: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
    x, _, _, weight = inputs[:_TENSORS]
    return x.new_empty(x.shape), x.new_empty(0) if weight is None else weight.new_empty(
        weight.shape
    )


_TENSORS = 4  # the first of the inputs


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:_TENSORS])
    ctx.static = inputs[_TENSORS:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    call = Routing(*ctx.saved_tensors, *ctx.static)
    grad_x, grad_w = route_backward_op(grad.contiguous(), *call)
    given = {"x": grad_x, "weight": None if call.weight is None else grad_w}
    return tuple(given.get(name) for name in Routing._fields)


route_op.register_autograd(_backward, setup_context=_setup_context)
