"""GCN: the supervised reference.

    Z = P ReLU(P X W_0 + b_0) W_1 + b_1,  P = D^-1/2 (A + I) D^-1/2
    L = -mean over training nodes i of log softmax(Z_i)_(y_i)

T. N. Kipf & M. Welling, "Semi-Supervised Classification with Graph Convolutional Networks", ICLR
2017. X [N, F], Z [N, classes], D the degrees of A + I. X and the hidden layer have dropout in
training.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cimage_dist.baselines import Fitted, Graph, Step
from cimage_dist.baselines.encoders import Convolution, prepared, propagation_of
from cimage_dist.baselines.sparse import Features, Sparse, compact, dropout


class Model(nn.Module):
    """P drop(ReLU(P drop(X) W_0 + b_0)) W_1 + b_1: logits [N, classes]; drop in training alone."""

    def __init__(self, num_features: int, hidden: int, classes: int, rate: float) -> None:
        super().__init__()
        self.first = Convolution(num_features, hidden)
        self.second = Convolution(hidden, classes)
        self.rate = rate

    def forward(self, x: Features, p: Sparse) -> Tensor:
        h = self.first(dropout(x, self.rate, self.training), p).relu()
        return self.second(dropout(h, self.rate, self.training), p)


def loss(logits: Tensor, y: Tensor, rows: Tensor) -> Tensor:
    """L over the nodes in `rows`, bool [N]; logits [N, classes], y [N]."""
    return cross_entropy(logits[rows], y[rows])


def fit(graph: Graph, settings: Mapping[str, Any], seed: int, step: Step) -> Fitted:
    """The embedding is the logits at the epoch of highest validation accuracy (then lowest loss).

    `patience` epochs without a better one end the training; without validation rows it runs on.
    """
    y, train, val = graph.y, graph.train, graph.val
    assert y is not None and train is not None
    train = train & (y >= 0)
    rows = None if val is None or not bool((val & (y >= 0)).any()) else val & (y >= 0)
    x = compact(prepared(graph.x, settings["normalize"]))
    p = propagation_of(graph.edge_index, graph.num_nodes, x.dtype)
    epochs, best, score, since = settings["epochs"], {}, (-1.0, 0.0), 0
    sizes = (x.shape[1], settings["hidden"], int(y.max()) + 1)
    model = Model(*sizes, settings["dropout"]).to(x.device)
    # Kipf & Welling: the first layer alone is decayed.
    decayed = {"params": model.first.parameters(), "weight_decay": settings["weight_decay"]}
    free = {"params": model.second.parameters()}
    optimizer = torch.optim.Adam([decayed, free], lr=settings["lr"])
    for epoch in range(epochs):
        model.train()
        optimizer.zero_grad()
        value = loss(model(x, p), y, train)
        value.backward()
        optimizer.step()
        step(epoch + 1, epochs, float(value.detach()))
        if rows is None:
            continue
        now = _validation(model, x, p, y, rows)
        since = 0 if now > score else since + 1
        if since == 0:
            score, best = now, copy.deepcopy(model.state_dict())
        if since >= settings["patience"]:
            break
    if best:
        model.load_state_dict(best)
    model.eval()
    with torch.no_grad():
        return Fitted(model(x, p))


def _validation(
    model: Model, x: Features, p: Sparse, y: Tensor, rows: Tensor
) -> tuple[float, float]:
    """(accuracy, -loss) on `rows`, without dropout: larger is better."""
    model.eval()
    with torch.no_grad():
        logits = model(x, p)
    accuracy = (logits[rows].argmax(1) == y[rows]).float().mean()
    return float(accuracy), -float(loss(logits, y, rows))
