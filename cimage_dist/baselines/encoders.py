"""What the methods share: feature normalisation, sparse propagation, a GCN stack, the loop."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch_geometric.nn import Linear

from cimage_dist.baselines import Step
from cimage_dist.baselines.sparse import Features, Pattern, Sparse, projected, scaled_columns
from cimage_dist.errors import UserError

# The norm that every row is divided by: L1 makes rows of counts sum to one, L2 gives unit length,
# the maximum leaves rows of zeros and ones as they are.
ORDERS = {"row": 1, "unit": 2, "max": math.inf}


def prepared(x: Tensor, how: str) -> Tensor:
    """x_i / ||x_i||_1 (`row`), x_i / ||x_i||_2 (`unit`), x_i / max_j |x_ij| (`max`), x_i (`none`).

    x and result [N, F]. A row of zeros stays zero.
    """
    if how == "none":
        return x
    if how not in ORDERS:
        raise UserError(f"normalize={how!r}: choose one of none, {', '.join(sorted(ORDERS))}")
    return normalize(x, p=ORDERS[how], dim=1)


def propagation(links: Pattern, weight: Tensor) -> Sparse:
    """P = D^-1/2 (A + I) D^-1/2, D = degrees of A + I (Kipf & Welling, ICLR 2017); [N, N].

    `links` are the entries of A + I as `Pattern.of_edges` makes them, and `weight` [E] their
    values: the weight of u -> v in row v, 1 for v itself. An edge of weight 0 is no edge.
    """
    degree = weight.new_zeros(links.shape[0]).index_add(0, links.row, weight)
    scale = degree.rsqrt()
    return Sparse(links, scale[links.row] * weight * scale[links.column])


def propagation_of(edge_index: Tensor, num_nodes: int, dtype: torch.dtype) -> Sparse:
    """P of edges [2, E] that all have weight 1."""
    links = Pattern.of_edges(edge_index, num_nodes)
    return propagation(links, torch.ones(links.row.shape[0], dtype=dtype, device=links.row.device))


class Convolution(nn.Module):
    """P X W + b; X [N, F], result [N, D]."""

    def __init__(self, num_features: int, width: int) -> None:
        super().__init__()
        self.lin = Linear(num_features, width, bias=False, weight_initializer="glorot")
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Features, p: Sparse) -> Tensor:
        return self.spread(projected(x, self.lin.weight), p)

    def spread(self, h: Tensor, p: Sparse) -> Tensor:
        """P H + b for H = X W [N, D]."""
        return p.pattern.times(p.values, h) + self.bias


class GCN(nn.Module):
    """H_l = act(P H_(l-1) W_l + b_l); H_0 [N, widths[0]], result [N, widths[-1]].

    `activation` makes one module per layer (PReLU has a parameter of its own); `last` says whether
    the last layer has one too.
    """

    def __init__(
        self, widths: Sequence[int], activation: Callable[[], nn.Module], last: bool
    ) -> None:
        super().__init__()
        pairs = list(pairwise(widths))
        self.layers = nn.ModuleList([Convolution(a, b) for a, b in pairs])
        self.acts = nn.ModuleList([activation() for _ in pairs])
        if not last:
            self.acts[-1] = nn.Identity()

    def forward(self, x: Features, p: Sparse) -> Tensor:
        h = x
        for layer, act in zip(self.layers, self.acts, strict=True):
            h = act(layer(h, p))
        assert isinstance(h, Tensor)
        return h


def corrupted(
    encoder: nn.Module, x: Features, links: Pattern, edge_drop: float, feature_drop: float
) -> Tensor:
    """A view [N, D]: some columns of x [N, F] are zero, some edges are missing; no loop is."""
    columns = torch.rand(x.shape[1], device=x.device) >= feature_drop
    kept = torch.rand(links.row.shape[0], device=x.device) >= edge_drop
    kept |= links.row == links.column
    seen = scaled_columns(x, columns.to(x.dtype))
    return encoder(seen, propagation(links, kept.to(x.dtype)))


def adam(model: nn.Module, settings: Mapping[str, Any]) -> torch.optim.Adam:
    decay = settings.get("weight_decay", 0.0)
    return torch.optim.Adam(model.parameters(), lr=settings["lr"], weight_decay=decay)


def minimise(
    model: nn.Module,
    objective: Callable[[], Tensor],
    settings: Mapping[str, Any],
    step: Step,
    rate: Callable[[int], float] = lambda epoch: 1.0,
) -> None:
    """Adam with `lr` x rate(epoch) and `weight_decay` on objective() for `epochs` steps.

    With a `patience`, training ends after so many steps in a row without a lower loss, and the
    parameters of the lowest loss are put back.
    """
    epochs, patience = settings["epochs"], settings.get("patience", 0)
    optimizer = adam(model, settings)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    lowest, since, best = float("inf"), 0, {}
    model.train()
    for epoch in range(epochs):
        optimizer.zero_grad()
        loss = objective()
        value = float(loss.detach())
        if patience:
            # The loss belongs to the parameters before the step.
            since = 0 if value < lowest else since + 1
            if since == 0:
                lowest, best = value, copy.deepcopy(model.state_dict())
        loss.backward()
        optimizer.step()
        schedule.step()
        step(epoch + 1, epochs, value)
        if patience and since >= patience:
            break
    if best:
        model.load_state_dict(best)
    model.eval()
