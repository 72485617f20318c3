"""Routing as a function, for tests that vary its options."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cimage_dist.nn.routing import RoutingConv
from cimage_dist.types import EdgeList


def route(
    x_NKC: Tensor,
    edges: EdgeList,
    iterations: int,
    temperature: float = 1.0,
    targets: slice | None = None,
    **options: Any,
) -> Tensor:
    conv = RoutingConv(x_NKC.shape[1], iterations, temperature, **options)
    return conv.route(x_NKC, edges, targets)
