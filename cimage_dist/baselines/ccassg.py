"""CCA-SSG: two views agree, and the dimensions are uncorrelated.

    A, B = GCN embeddings of two corrupted graphs, columns with mean 0 and variance 1
    L = -tr(A^T B) / N + lambda (||A^T A / N - I||^2 + ||B^T B / N - I||^2)

H. Zhang et al., "From Canonical Correlation Analysis to Self-supervised Graph Neural Networks",
NeurIPS 2021. A, B [N, D]. A corrupted graph lacks some edges and some columns of the features. The
embedding is the encoder's output on the whole graph, not standardised.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cimage_dist.baselines import Fitted, Graph, Step
from cimage_dist.baselines.encoders import GCN, corrupted, minimise, prepared, propagation_of
from cimage_dist.baselines.sparse import Pattern, compact


def standardised(z: Tensor) -> Tensor:
    """Every column with mean 0 and variance 1; [N, D]."""
    return (z - z.mean(0)) / z.std(0)


def loss(a: Tensor, b: Tensor, weight: float) -> Tensor:
    """L; a, b [N, D] are the embeddings of the two views, `weight` is lambda.

    The paper's first term, ||A - B||^2 / N, is
    2 D - 2 tr(A^T B) / N; we take half of it as the released code does, so that its weights hold.
    """
    a, b = standardised(a), standardised(b)
    n, eye = a.shape[0], torch.eye(a.shape[1], dtype=a.dtype, device=a.device)
    decorrelation = (a.T @ a / n - eye).square().sum() + (b.T @ b / n - eye).square().sum()
    return weight * decorrelation - (a * b).sum() / n


def fit(graph: Graph, settings: Mapping[str, Any], seed: int, step: Step) -> Fitted:
    x = compact(prepared(graph.x, settings["normalize"]))
    n, edges = graph.num_nodes, graph.edge_index
    links = Pattern.of_edges(edges, n)
    widths = [x.shape[1]] + [settings["width"]] * settings["layers"]
    rates = (settings["edge_drop"], settings["feature_drop"])
    encoder = GCN(widths, nn.ReLU, last=False).to(x.device)

    def objective() -> Tensor:
        a, b = (corrupted(encoder, x, links, *rates) for _ in range(2))
        return loss(a, b, settings["decorrelation"])

    minimise(encoder, objective, settings, step)
    with torch.no_grad():
        return Fitted(encoder(x, propagation_of(edges, n, x.dtype)))
