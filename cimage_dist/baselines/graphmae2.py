"""GraphMAE2: reconstruct the features of masked nodes, and the embedding of a slow copy.

    x~ = x, with a learned token in the rows of a random node set V;  h = f(x~)
    L = sum_j mean_{v in V} (1 - cos(x_v, d(remask_j(W h))_v))^gamma
        + lambda * mean_v (1 - cos(q(p(h))_v, p'(f'(x))_v))

Z. Hou et al., "GraphMAE2: A Decoding-Enhanced Masked Self-Supervised Graph Learner", WWW 2023.
x [N, F], h [N, D]. f is a graph attention network with PReLU, d one attention layer with one head,
p and q small MLPs. f', p' are running means of f, p and have no gradient. `remask: fixed` sets the
rows of V to zero once, as in the authors' settings for small graphs; `random` puts a second token
into a random share of rows, `remasks` times. The embedding is f(x).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cimage_dist.baselines import Fitted, Graph, Step
from cimage_dist.baselines.encoders import minimise, prepared
from cimage_dist.baselines.sparse import (
    Attention,
    Features,
    Pattern,
    compact,
    dropout,
    projected,
    projected_with_rows,
)

PROJECTOR_WIDTH = 256  # hidden width of p, fixed in the authors' program


def attention_layer(width: int, out: int, heads: int, dropout: float) -> Attention:
    """`heads` outputs of width `out`. Weights as the authors draw them: normal with the gain of
    ReLU.
    """
    conv = Attention(width, out, heads, dropout)
    for weight in (conv.lin.weight, conv.att_src, conv.att_dst):
        nn.init.xavier_normal_(weight, gain=math.sqrt(2))
    return conv


class AttentionEncoder(nn.Module):
    """Layers of: dropout, graph attention, PReLU."""

    def __init__(self, num_features: int, settings: Mapping[str, Any]) -> None:
        super().__init__()
        width, heads, attention = (settings[k] for k in ("hidden", "heads", "attention_dropout"))
        ins = [num_features] + [width] * (settings["layers"] - 1)
        convs = [attention_layer(size, width // heads, heads, attention) for size in ins]
        self.convs = nn.ModuleList(convs)
        self.activations = nn.ModuleList([nn.PReLU() for _ in ins])
        self.dropout = settings["dropout"]

    def forward(
        self, x: Features, links: Pattern, rows: Tensor | None = None, content: Tensor | None = None
    ) -> Tensor:
        """f of x [N, F], with `content` [n, F] in its `rows` [n] where they are given."""
        first, drop = self.convs[0], (self.dropout, self.training)
        assert isinstance(first, Attention)
        weight = first.lin.weight
        if rows is None or content is None:
            h = projected(dropout(x, *drop), weight)
        else:
            h = projected_with_rows(x, weight, rows, content, *drop)
        h = self.activations[0](first.attend(h, links))
        for conv, activation in zip(self.convs[1:], self.activations[1:], strict=True):
            h = activation(conv(F.dropout(h, *drop), links))
        return h


class Autoencoder(nn.Module):
    """f, W and d: what both methods train."""

    def __init__(self, num_features: int, settings: Mapping[str, Any]) -> None:
        super().__init__()
        width = settings["hidden"]
        self.encoder = AttentionEncoder(num_features, settings)
        self.bridge = nn.Linear(width, width, bias=False)  # W
        self.decoder = attention_layer(width, num_features, 1, settings["attention_dropout"])
        self.dropout = settings["dropout"]

    def decode(self, h: Tensor, links: Pattern) -> Tensor:
        return self.decoder(F.dropout(h, self.dropout, self.training), links)

    def decode_hidden(self, h: Tensor, links: Pattern, masked: Tensor) -> Tensor:
        """d(W h, zero in the rows of V)_v for v in V = masked [n]; h [N, D], result [n, F].

        A row of zeros stays zero under W and the decoder's weight, so the others alone are
        multiplied; and only the rows of V are summed over their neighbours.
        """
        is_masked = torch.zeros(h.shape[0], dtype=torch.bool, device=h.device)
        is_masked[masked] = True
        kept = (~is_masked).nonzero().squeeze(1)
        bridged = F.dropout(self.bridge(h.index_select(0, kept)), self.dropout, self.training)
        weighted = projected(bridged, self.decoder.lin.weight)
        weighted = weighted.new_zeros(h.shape[0], weighted.shape[1]).index_copy(0, kept, weighted)
        rebuilt = self.decoder.attend(weighted, links.only(is_masked[links.row]))
        return rebuilt.index_select(0, masked)


class Model(Autoencoder):
    def __init__(self, num_features: int, settings: Mapping[str, Any]) -> None:
        super().__init__(num_features, settings)
        width = settings["hidden"]
        self.projector = projector_of(width)
        self.predictor = nn.Sequential(nn.PReLU(), nn.Linear(width, width))
        self.token = nn.Parameter(torch.empty(1, num_features))
        self.second_token = nn.Parameter(torch.empty(1, width))
        nn.init.xavier_normal_(self.token)
        nn.init.xavier_normal_(self.second_token)
        nn.init.xavier_normal_(self.bridge.weight, gain=math.sqrt(2))


def projector_of(width: int) -> nn.Sequential:
    inner = PROJECTOR_WIDTH
    return nn.Sequential(nn.Linear(width, inner), nn.PReLU(), nn.Linear(inner, width))


class Teacher(nn.Module):
    """f' and p': copies of the model's encoder and projector that follow it slowly."""

    def __init__(self, model: Model, num_features: int, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.encoder = AttentionEncoder(num_features, settings)
        self.projector = projector_of(settings["hidden"])
        self.requires_grad_(False)
        self.follow(model, 0.0)

    @torch.no_grad()
    def follow(self, model: Model, momentum: float) -> None:
        """w' <- momentum * w' + (1 - momentum) * w."""
        for ours, theirs in ((self.encoder, model.encoder), (self.projector, model.projector)):
            for old, new in zip(ours.parameters(), theirs.parameters(), strict=True):
                old.lerp_(new, 1.0 - momentum)

    @torch.no_grad()
    def forward(self, x: Features, links: Pattern) -> Tensor:
        return self.projector(self.encoder(x, links))


def scaled_cosine_error(predicted: Tensor, target: Tensor, power: float) -> Tensor:
    """mean_v (1 - cos(predicted_v, target_v))^power; both [n, D]."""
    cosine = (F.normalize(predicted, dim=1) * F.normalize(target, dim=1)).sum(1)
    return (1.0 - cosine).clamp_min(0.0).pow(power).mean()


def with_rows(x: Tensor, rows: Tensor, value: Tensor) -> Tensor:
    """A copy of x [N, D] whose `rows` int64 [n] hold `value` [1, D]; gradient reaches the value."""
    hidden = torch.zeros(x.shape[0], 1, dtype=torch.bool, device=x.device)
    hidden[rows] = True
    return torch.where(hidden, value, x)


def loss(
    model: Model,
    target: Tensor,
    x: Tensor,
    compact_x: Features,
    links: Pattern,
    masked: Tensor,
    remasked: Sequence[Tensor] | None,
    power: float,
    weight: float,
) -> Tensor:
    """L for one draw: `masked` int64 [n] is V, target [N, D] the output of the teacher, compact_x
    is x as `compact` stores it.

    `remasked`: the rows of each random re-masking; None re-masks V with zeros, once.
    """
    content = model.token.expand(masked.numel(), -1)
    h = model.encoder(compact_x, links, masked, content)
    latent = scaled_cosine_error(model.predictor(model.projector(h)), target, 1)
    if remasked is None:
        rebuilt = [model.decode_hidden(h, links, masked)]
    else:
        bridged = model.bridge(h)
        inputs = [with_rows(bridged, rows, model.second_token) for rows in remasked]
        rebuilt = [model.decode(rows, links)[masked] for rows in inputs]
    total = weight * latent
    for one in rebuilt:
        total = total + scaled_cosine_error(one, x[masked], power)
    return total


def share_of(num_nodes: int, rate: float, device: torch.device) -> Tensor:
    """A random share of the nodes, int64 [int(rate * N)], at least one."""
    return torch.randperm(num_nodes, device=device)[: max(1, int(rate * num_nodes))]


def cosine_decay(epochs: int) -> Callable[[int], float]:
    """epoch -> (1 + cos(pi * epoch / epochs)) / 2, the factor of the learning rate."""
    return lambda epoch: (1 + math.cos(epoch * math.pi / epochs)) / 2


def fit(graph: Graph, settings: Mapping[str, Any], seed: int, step: Step) -> Fitted:
    x = prepared(graph.x, settings["normalize"])
    compact_x, num_nodes = compact(x), graph.num_nodes
    links = Pattern.of_edges(graph.edge_index, num_nodes)
    model = Model(x.shape[1], settings).to(x.device)
    teacher = Teacher(model, x.shape[1], settings).to(x.device)

    def objective() -> Tensor:
        masked = share_of(num_nodes, settings["mask_rate"], x.device)
        remasked = None
        if settings["remask"] == "random":
            rate = settings["remask_rate"]
            remasked = [share_of(num_nodes, rate, x.device) for _ in range(settings["remasks"])]
        weights = (settings["power"], settings["latent_weight"])
        target = teacher(compact_x, links)
        return loss(model, target, x, compact_x, links, masked, remasked, *weights)

    def after(done: int, total: int, value: float) -> None:
        teacher.follow(model, settings["momentum"])
        step(done, total, value)

    minimise(model, objective, settings, after, cosine_decay(settings["epochs"]))
    with torch.no_grad():
        return Fitted(model.encoder(compact_x, links))
