"""CCA-SSG: two views agree, dimensions are uncorrelated (Zhang et al., NeurIPS 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.utils import dropout_edge, mask_feature

from cimage_dist.baselines.base import Fitted, Graph, Step
from cimage_dist.baselines.encoders import GCN, minimise, prepared, propagation, seeded


def standardised(z: Tensor) -> Tensor:
    """Every column with mean 0 and variance 1; [N, D]."""
    return (z - z.mean(0)) / z.std(0)


def loss(a: Tensor, b: Tensor, weight: float) -> Tensor:
    """-tr(A^T B) / N + weight (||A^T A / N - I||^2 + ||B^T B / N - I||^2); A, B standardised a, b.

    a, b [N, D] are the embeddings of the two views. The paper's first term, ||A - B||^2 / N, is
    2 D - 2 tr(A^T B) / N; we take half of it as the released code does, so that its weights hold.
    """
    a, b = standardised(a), standardised(b)
    n, eye = a.shape[0], torch.eye(a.shape[1], dtype=a.dtype, device=a.device)
    decorrelation = (a.T @ a / n - eye).square().sum() + (b.T @ b / n - eye).square().sum()
    return weight * decorrelation - (a * b).sum() / n


def fit(graph: Graph, settings: Mapping[str, Any], seed: int, step: Step) -> Fitted:
    """The embedding is the encoder's output on the whole graph, not standardised."""
    x = prepared(graph.x, settings["normalize"])
    n, edges = graph.num_nodes, graph.edge_index
    widths = [x.shape[1]] + [settings["width"]] * settings["layers"]

    def view() -> Tensor:
        seen, _ = mask_feature(x, settings["feature_drop"], mode="col")
        kept, _ = dropout_edge(edges, settings["edge_drop"])
        return encoder(seen, propagation(kept, n, x.dtype))

    with seeded(seed):
        encoder = GCN(widths, nn.ReLU, last=False).to(x.device)
        minimise(encoder, lambda: loss(view(), view(), settings["decorrelation"]), settings, step)
    with torch.no_grad():
        return Fitted(encoder(x, propagation(edges, n, x.dtype)))
