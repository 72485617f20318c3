"""Neighbourhood routing: each neighbour spreads one unit of mass over the K factors of its target.

`RoutingConv` is the layer. It runs as one operator, `torch.ops.cimage.route`: one node for
autograd, torch.compile and DDP, with compiled loops per device (`kernels/`, whose README says what
a backend is). The operator's backward pass recomputes the iterations, so nothing is kept between
the two but its inputs.

Shapes: N nodes, T targets (all nodes, or a range of them), E directed messages, K factors, C
channels per factor.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Literal, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cimage_dist.errors import UserError
from cimage_dist.types import EdgeList

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


class Kernels(Protocol):
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


def _backend(x: Tensor) -> Kernels:
    # Imported on use: numba and Triton take their time, and not every verb routes.
    return cast(Kernels, import_module(_BACKENDS[x.device.type]))


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


Backend = Literal["auto", "fused", "reference"]


def normalize_factors(x_NKC: Tensor) -> Tensor:
    """x / max(‖x‖, 1e-12) over the channels of each factor; zero rows stay zero."""
    return F.normalize(x_NKC, p=2.0, dim=-1, eps=EPS)


def use_fused(x: Tensor, backend: Backend) -> bool:
    """Whether routing runs as the fused operator here; asking for it where there is none is an
    error.
    """
    if backend == "fused" and not is_fused(x):
        raise UserError(
            f"model.routing_backend is 'fused', but nothing serves {x.dtype} on "
            f"{x.device.type}. Install triton for a GPU, or use routing_backend=auto."
        )
    return backend != "reference" and is_fused(x)


def assignments(l_EKC: Tensor, q_TKC: Tensor, dst: Tensor, temperature: float) -> Tensor:
    """p[v,u,:] = softmax over k of <l[u,k], q[v,k]> / τ for every message u -> v; [E, K], rows sum
    to 1 (§4.4).
    """
    return torch.softmax((l_EKC * q_TKC.index_select(0, dst)).sum(-1) / temperature, dim=-1)


class RoutingConv(nn.Module):
    """One layer of neighbourhood routing (METHOD.md §4.4; DisenGCN's form, with the target's centre
    in the softmax). No weights.

        l = x / ‖x‖ per factor;  p⁰ = 1/K  (init="self": p⁰ from q = l, as the paper has it)
        repeat T times:  q = l + Σ_u w·p·l[u];  normalise q except after the last;
                         p = softmax_k(<l[u], q[v]> / τ)

    K `num_factors`, T `iterations`, τ `temperature`; `final_norm` normalises the last q as well;
    grad="last" takes p for a constant and differentiates the final aggregation only; `backend`
    "auto" takes the compiled loops where there are any, "reference" plain tensor operations.

        conv = RoutingConv(num_factors=8)
        h = conv(x, edge_index)  # x [N, 8·C] -> [N, 8·C]
    """

    def __init__(
        self,
        num_factors: int,
        iterations: int = 4,
        temperature: float = 1.0,
        *,
        init: Literal["uniform", "self"] = "uniform",
        final_norm: bool = False,
        grad: Literal["full", "last"] = "full",
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        if num_factors < 1 or iterations < 1 or temperature <= 0:
            raise UserError(
                f"RoutingConv got num_factors={num_factors}, iterations={iterations} and "
                f"temperature={temperature}; the first two must be at least 1, the last above 0."
            )
        self.num_factors, self.iterations, self.temperature = num_factors, iterations, temperature
        self.init, self.final_norm, self.grad, self.backend = init, final_norm, grad, backend

    def extra_repr(self) -> str:
        return f"{self.num_factors}, iterations={self.iterations}, temperature={self.temperature}"

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        """x [N, K·C]; edge_index int [2, E], sources and targets; edge_weight [E] -> [N, K·C]."""
        num_nodes = x.shape[0]
        if x.dim() != 2 or x.shape[1] % self.num_factors:
            raise UserError(
                f"RoutingConv got x of shape {tuple(x.shape)}; it takes [nodes, channels], and the "
                f"channels must be a multiple of its {self.num_factors} factors."
            )
        if edge_index.dim() != 2 or edge_index.shape[0] != 2 or edge_index.is_floating_point():
            raise UserError(
                f"RoutingConv got edge_index of shape {tuple(edge_index.shape)} and type "
                f"{edge_index.dtype}; it takes integers [2, edges], sources and targets."
            )
        if (
            edge_index.numel()
            and not 0 <= int(edge_index.min()) <= int(edge_index.max()) < num_nodes
        ):
            raise UserError(
                f"RoutingConv got edges between nodes {int(edge_index.min())} to "
                f"{int(edge_index.max())}, but x has {num_nodes} rows. Node ids run from 0."
            )
        src, dst = edge_index.to(torch.int64)
        edges = EdgeList(src, dst, num_nodes, edge_weight)
        return self.route(x.view(num_nodes, self.num_factors, -1), edges).flatten(1)

    def route(
        self, x_NKC: Tensor, edges: EdgeList, targets: slice | None = None, is_unit: bool = False
    ) -> Tensor:
        """The same on factors; [T, K, C].

        `targets` restricts the result to a range of rows; `edges.dst` then counts from its start,
        `edges.src` stays global. `is_unit`: the factors of x are normalised already (done once for
        all ranges).
        """
        if use_fused(x_NKC, self.backend):
            edges, rows = edges.by_target, range(x_NKC.shape[0])[targets or slice(None)]
            call = Routing(
                x_NKC,
                edges.pointers(len(rows)),
                edges.src,
                edges.weight,
                first=rows.start,
                iterations=self.iterations,
                temperature=self.temperature,
                self_init=self.init == "self",
                through_all=self.grad == "full",
                unit=not is_unit,
            )
            q_TKC: Tensor = route_op(*call)
        else:
            l_NKC = x_NKC if is_unit else normalize_factors(x_NKC)
            l_TKC = l_NKC if targets is None else l_NKC[targets]
            q_TKC = self._reference(l_TKC, l_NKC, edges)
        return normalize_factors(q_TKC) if self.final_norm else q_TKC

    def _reference(self, l_TKC: Tensor, l_NKC: Tensor, edges: EdgeList) -> Tensor:
        """The same in plain tensor operations on unit rows: the oracle for the fused backends, and
        the form for devices without one.

        Keeps tensors of E·K·C numbers, with grad="full" several for each iteration.
        """
        l_EKC = l_NKC.index_select(0, edges.src)
        weight = None if edges.weight is None else edges.weight.unsqueeze(-1).to(l_NKC.dtype)

        def aggregate(p_EK: Tensor) -> Tensor:
            scaled = p_EK if weight is None else p_EK * weight
            return l_TKC.index_add(0, edges.dst, scaled.unsqueeze(-1) * l_EKC)

        def assign(q_TKC: Tensor) -> Tensor:
            return assignments(l_EKC, q_TKC, edges.dst, self.temperature)

        with torch.set_grad_enabled(torch.is_grad_enabled() and self.grad == "full"):
            if self.init == "self":
                p_EK = assign(l_TKC)
            else:
                p_EK = l_NKC.new_full((edges.src.numel(), l_NKC.shape[1]), 1.0 / l_NKC.shape[1])
            for _ in range(self.iterations - 1):
                p_EK = assign(normalize_factors(aggregate(p_EK)))
        return aggregate(p_EK)
