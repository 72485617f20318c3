"""Slow references on dense matrices and toy graphs, for tests of the masked auto-encoders."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor, nn

from cimage_dist.baselines import Fitted, Graph, fit
from tests.graphs import planted_blocks, random_topology


def small(seed: int = 0) -> tuple[Tensor, Tensor]:
    """(x float64 [20, 6], edge_index [2, E]) of a random symmetric graph."""
    edges = random_topology(20, 40, seed).edge_list()
    x = torch.randn(20, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return x, torch.stack([edges.src, edges.dst])


def planted(num_nodes: int = 120) -> tuple[Graph, Tensor]:
    """A graph of three planted classes, and the classes."""
    x, topology, y = planted_blocks(num_nodes, 3)
    edges = topology.edge_list()
    return Graph(x.float(), torch.stack([edges.src, edges.dst])), y


def gcn_matrix(edge_index: Tensor, num_nodes: int, weight: Tensor | float = 1.0) -> Tensor:
    """D^-1/2 (A + I) D^-1/2 with A_vu the weight of u -> v."""
    a = torch.eye(num_nodes, dtype=torch.float64)
    a[edge_index[1], edge_index[0]] = torch.as_tensor(weight, dtype=torch.float64)
    scale = a.sum(1).rsqrt()
    return scale[:, None] * a * scale


def batch_norm(norm: nn.BatchNorm1d, h: Tensor) -> Tensor:
    spread = h.var(0, unbiased=False) + norm.eps
    return (h - h.mean(0)) / spread.sqrt() * norm.weight + norm.bias


def gcn_layers(encoder: nn.Module, x: Tensor, matrices: list[Tensor]) -> list[Tensor]:
    """The layers of `maskgae.Encoder` without dropout."""
    outputs = []
    for conv, norm, matrix in zip(encoder.convs, encoder.norms, matrices, strict=True):
        x = nn.functional.elu(batch_norm(norm, matrix @ x @ conv.lin.weight.t() + conv.bias))
        outputs.append(x)
    return outputs


def attention(conv: nn.Module, x: Tensor, edge_index: Tensor) -> Tensor:
    """Graph attention as a softmax over all nodes, minus infinity where there is no edge."""
    num_nodes = x.shape[0]
    linked = torch.eye(num_nodes, dtype=torch.bool)
    linked[edge_index[1], edge_index[0]] = True
    h = (x @ conv.lin.weight.t()).view(num_nodes, conv.heads, conv.out_channels)
    sent, received = (h * conv.att_src).sum(-1), (h * conv.att_dst).sum(-1)
    logits = nn.functional.leaky_relu(received[:, None] + sent[None], 0.2)
    share = logits.masked_fill(~linked[..., None], -torch.inf).softmax(1)
    out = torch.einsum("vuh,uhc->vhc", share, h)
    return (out.flatten(1) if conv.concat else out.mean(1)) + conv.bias


def attention_encoder(encoder: nn.Module, x: Tensor, edge_index: Tensor) -> Tensor:
    for conv, activation in zip(encoder.convs, encoder.activations, strict=True):
        x = activation(attention(conv, x, edge_index))
    return x


def mlp(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers[:-1]:
        x = (x @ layer.weight.t() + layer.bias).clamp_min(0)
    return x @ layers[-1].weight.t() + layers[-1].bias


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """cos of every row of a with every row of b."""
    return (a / a.norm(dim=1, keepdim=True)) @ (b / b.norm(dim=1, keepdim=True)).t()


def assert_same(ours: Tensor, reference: Tensor, parameters: list[Tensor]) -> None:
    """Equal values and equal gradients, to rounding in float64."""
    torch.testing.assert_close(ours, reference, rtol=0, atol=1e-8)
    options = {"retain_graph": True, "allow_unused": True}
    grads = [torch.autograd.grad(value, parameters, **options) for value in (ours, reference)]
    assert any(grad is not None and grad.abs().max() > 1e-6 for grad in grads[0])
    for parameter, *pair in zip(parameters, *grads, strict=True):
        a, b = (torch.zeros_like(parameter) if grad is None else grad for grad in pair)
        torch.testing.assert_close(a, b, rtol=0, atol=1e-8)


def accuracy(z: Tensor, y: Tensor) -> float:
    """Nearest class mean of the first half, on the second half."""
    z = nn.functional.normalize(z, dim=1)
    half = len(y) // 2
    means = torch.stack([z[:half][y[:half] == c].mean(0) for c in y.unique()])
    return (torch.cdist(z[half:], means).argmin(1) == y[half:]).float().mean().item()


def check_yaml(method: str, settings: Mapping[str, Any]) -> None:
    """The yaml file beside the method sets what the method reads and nothing else."""
    text = (resources.files("cimage_dist.baselines") / f"{method}.yaml").read_text()
    content = yaml.safe_load(text)
    assert set(content["default"]) == set(settings)
    assert set(content) <= {"default", "datasets", "link", "published"}
    link = content.get("link", {"default": {}, "datasets": {}})
    for override in (*content["datasets"].values(), link["default"], *link["datasets"].values()):
        assert set(override) <= set(settings)
        words = [value for value in override.values() if isinstance(value, str)]
        assert not any(word[0].isdigit() for word in words)  # 5e-5 is text to yaml, 5.0e-5 is not
    assert all(50 < score < 100 for score in content["published"]["node"].values())


def check_fit(method: str, settings: Mapping[str, Any]) -> tuple[Graph, Fitted]:
    """The loss falls, classes come apart, a seed decides everything and disturbs nothing."""
    graph, y = planted()
    losses: list[float] = []
    before = torch.get_rng_state()
    fitted = fit(method, graph, settings, 0, lambda done, total, loss: losses.append(loss))
    assert torch.equal(before, torch.get_rng_state())
    assert len(losses) == settings["epochs"]  # a report of every epoch
    fifth = len(losses) // 5
    assert np.mean(losses[-fifth:]) < np.mean(losses[:fifth])
    assert accuracy(fitted.embedding, y) > 0.6  # chance: 0.33
    short = {**settings, "epochs": 2}
    fits = [fit(method, graph, short, seed, lambda *_: None) for seed in (1, 1, 2)]
    first, again, other = (one.embedding for one in fits)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    return graph, fitted


def auc(fitted: Fitted, graph: Graph) -> float:
    """How often the method scores an edge above a random pair."""
    assert fitted.score_links is not None
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randint(0, graph.num_nodes, graph.edge_index.shape, generator=generator)
    edges, others = fitted.score_links(graph.edge_index), fitted.score_links(pairs)
    return (edges[:, None] > others).float().mean().item()
