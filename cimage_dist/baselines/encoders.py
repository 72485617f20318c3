"""What the methods share: feature normalisation, sparse propagation, a GCN stack, the loop."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch_geometric.nn import GCNConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import dropout_edge, mask_feature, to_torch_csr_tensor

from cimage_dist.baselines import Step
from cimage_dist.errors import UserError
from cimage_dist.nn.optim import Adam

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


def propagation(
    edge_index: Tensor, num_nodes: int, dtype: torch.dtype, weight: Tensor | None = None
) -> Tensor:
    """P = D^-1/2 (A + I) D^-1/2, D = degrees of A + I (Kipf & Welling, ICLR 2017); CSR [N, N].

    A_vu is the weight [E] of u -> v, default 1. A sparse product is about eight times as fast on a
    CPU as sending messages along edges, and normalising here serves all layers at once.
    """
    index, value = gcn_norm(edge_index, weight, num_nodes, dtype=dtype)
    assert value is not None
    # Row = target, so that P @ h sums over incoming edges also when one direction was dropped.
    return csr(index.flip(0), value, num_nodes)


def csr(index: Tensor, weight: Tensor, size: int) -> Tensor:
    """The matrix [size, size] with `weight` [E] at the pairs `index` [2, E]."""
    with warnings.catch_warnings():
        # torch calls its CSR tensors beta and their checks off, once per process.
        warnings.filterwarnings("ignore", message="Sparse")
        return to_torch_csr_tensor(index, weight, size=(size, size))


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
        self.layers = nn.ModuleList([GCNConv(a, b, normalize=False) for a, b in pairs])
        self.acts = nn.ModuleList([activation() for _ in pairs])
        if not last:
            self.acts[-1] = nn.Identity()

    def forward(self, x: Tensor, p: Tensor) -> Tensor:
        for layer, act in zip(self.layers, self.acts, strict=True):
            x = act(layer(x, p))
        return x


def corrupted(
    encoder: nn.Module, x: Tensor, edges: Tensor, edge_drop: float, feature_drop: float
) -> Tensor:
    """A view [N, D]: some columns of x [N, F] are zero, some edges [2, E] are missing."""
    seen, _ = mask_feature(x, feature_drop, mode="col")
    kept, _ = dropout_edge(edges, edge_drop)
    return encoder(seen, propagation(kept, x.shape[0], x.dtype))


def adam(model: nn.Module, settings: Mapping[str, Any]) -> Adam:
    decay = settings.get("weight_decay", 0.0)
    return Adam(model.parameters(), lr=settings["lr"], weight_decay=decay)


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
