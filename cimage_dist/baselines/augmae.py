"""AUG-MAE: a second network learns which nodes are hard to rebuild, and embeddings are spread out.

    k = straight-through Gumbel softmax of the mask network, in {0, 1}^N, 1: keep
    L = mean_{v in V} (1 - cos(x_v, d(W h)_v))^gamma + U(relu(A h); lambda * (1 - a))
    U(f; t) = log mean_{u,v} exp(2 t (cos(f_u, f_v) - 1))
    L_mask = -mean_{v in V} (1 - cos(x_v, d(W h)_v))^gamma + beta / sin(pi * m / N),  m = sum(1 - k)

L. Wang et al., "Rethinking Graph Masked Autoencoders through Alignment and Uniformity", AAAI 2024.
x [N, F], h = f(x~) [N, D]; f and d as in GraphMAE2. The share a of adversarial masking grows with
the epoch e of E: a = a_0 + (e / E)^g (a_T - a_0). V joins a random set of (1 - a) * mask_rate * N
nodes and the nodes with k = 0, of which a random share 1 - a is kept after all. In x~ the rows of V
hold a learned token, a few of them another node's features; other rows are k_v x_v, and only there
does a gradient reach the mask network. W h is zero in the rows of V.

As in the authors' program, lambda * (1 - a) is the t of the uniformity term and no factor before it
(nearly the same, as t is small), and each epoch has a step of the mask network, then one of the
model on a new draw.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cimage_dist.baselines import Fitted, Graph, Step
from cimage_dist.baselines.encoders import adam, minimise, prepared
from cimage_dist.baselines.graphmae2 import (
    AttentionEncoder,
    Autoencoder,
    cosine_decay,
    scaled_cosine_error,
)
from cimage_dist.baselines.sparse import Features, Pattern, compact, scaled_rows

WHOLE = 25_000  # up to this many nodes U runs over all pairs, beyond it over pairs within parts
PART = 10_000  # nodes of a part, as in the authors' program
ROWS = 2048  # rows of the N x N similarities held at a time


class Model(Autoencoder):
    def __init__(self, num_features: int, settings: Mapping[str, Any]) -> None:
        super().__init__(num_features, settings)
        self.spread = nn.Linear(settings["hidden"], settings["uniformity_width"], bias=False)  # A
        self.token = nn.Parameter(torch.zeros(1, num_features))


class MaskNet(nn.Module):
    def __init__(self, num_features: int, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.encoder = AttentionEncoder(num_features, settings)
        self.out = nn.Linear(settings["hidden"], 2)

    def forward(self, x: Features, links: Pattern) -> Tensor:
        """k [N], zeros and ones with the gradient of the Gumbel softmax."""
        return F.gumbel_softmax(self.out(self.encoder(x, links)), hard=True)[:, 1]


@dataclass(frozen=True)
class Draw:
    """Node sets of one draw, int64: V = token and noise rows; `spared` are kept whatever k is."""

    spared: Tensor
    token: Tensor
    noise: Tensor
    noise_from: Tensor  # whose features stand in the noise rows

    @property
    def masked(self) -> Tensor:
        return torch.cat([self.token, self.noise])


def draw(keep: Tensor, share: float, mask_rate: float, replace_rate: float) -> Draw:
    """The random sets around k [N]; `share` is a."""
    num_nodes, device = keep.shape[0], keep.device
    spared = torch.randperm(num_nodes, device=device)[: int(num_nodes * (1 - share))]
    hidden = keep.detach() < 0.5
    hidden[spared] = False
    at_random = int(mask_rate * num_nodes * (1 - share))
    hidden[torch.randperm(num_nodes, device=device)[:at_random]] = True
    rows = hidden.nonzero().squeeze(1)
    rows = rows[torch.randperm(rows.numel(), device=device)]
    noise = int(replace_rate * rows.numel())
    others = torch.randperm(num_nodes, device=device)[:noise]
    return Draw(spared, rows[noise:], rows[:noise], others)


def reconstruction(
    model: Model,
    x: Tensor,
    compact_x: Features,
    links: Pattern,
    keep: Tensor,
    drawn: Draw,
    power: float,
) -> tuple[Tensor, Tensor]:
    """(scaled cosine error over V, h [N, D]) for k = keep [N]; compact_x is x as `compact` stores
    it.
    """
    spared = torch.zeros_like(keep, dtype=torch.bool)
    spared[drawn.spared] = True
    seen, masked = scaled_rows(compact_x, keep.masked_fill(spared, 1.0)), drawn.masked
    content = torch.cat([model.token.expand(drawn.token.numel(), -1), x[drawn.noise_from]])
    h = model.encoder(seen, links, masked, content)
    rebuilt = model.decode_hidden(h, links, masked)
    return scaled_cosine_error(rebuilt, x[masked], power), h


class _LogMeanExp(torch.autograd.Function):
    """log mean_{u,v} exp(2 t (f_u . f_v - 1)) for unit rows f [N, D].

    Its gradient 4 t sum_v e_uv f_v / sum(e) is made along with the value, a block of rows at a
    time: no N x N is held, and nothing is computed twice.
    """

    @staticmethod
    def forward(ctx: Any, unit: Tensor, t: float) -> Tensor:
        total, slopes = unit.new_zeros(()), []
        for rows in unit.split(ROWS):
            table = torch.addmm(unit.new_full((), -2 * t), rows, unit.t(), alpha=2 * t).exp_()
            total += table.sum()
            slopes.append(table @ unit)
        ctx.save_for_backward(torch.cat(slopes).mul_(4 * t / total))
        return (total / unit.shape[0] ** 2).log()

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0] * slopes[0], None


def uniformity(features: Tensor, t: float) -> Tensor:
    """U(f; t), features [N, D]."""
    return _LogMeanExp.apply(F.normalize(features, dim=1), t)


def loss(error: Tensor, spread: Tensor, t: float) -> Tensor:
    """L of the model from the reconstruction error and spread = relu(A h) [N, D]."""
    if t == 0:  # U is 0 and has no gradient
        return error
    if spread.shape[0] <= WHOLE:
        return error + uniformity(spread, t)
    parts = spread[torch.randperm(spread.shape[0], device=spread.device)].split(PART)
    return error + torch.stack([uniformity(part, t) for part in parts]).mean()


def mask_loss(error: Tensor, keep: Tensor, beta: float) -> Tensor:
    """L_mask for k = keep [N] as the network gives it; m is held in [1, N - 1], away from 1 / 0."""
    num_nodes = keep.shape[0]
    masked = (1 - keep).sum().clamp(1, num_nodes - 1)
    return beta / torch.sin(math.pi * masked / num_nodes) - error


def adversarial_share(progress: float, first: float, last: float, gamma: float) -> float:
    """a = a_0 + progress^gamma (a_T - a_0), progress = e / E."""
    return first + progress**gamma * (last - first)


def fit(graph: Graph, settings: Mapping[str, Any], seed: int, step: Step) -> Fitted:
    x = prepared(graph.x, settings["normalize"])
    compact_x, links = compact(x), Pattern.of_edges(graph.edge_index, graph.num_nodes)
    model = Model(x.shape[1], settings).to(x.device)
    mask_net = MaskNet(x.shape[1], settings).to(x.device)
    mask_optimizer = adam(mask_net, {**settings, "lr": settings["mask_lr"]})
    mask_parameters = list(mask_net.parameters())
    ends = (settings["share_first"], settings["share_last"], settings["share_gamma"])
    shares = iter(
        [adversarial_share(e / settings["epochs"], *ends) for e in range(settings["epochs"])]
    )

    def error_of(keep: Tensor, share: float) -> tuple[Tensor, Tensor]:
        drawn = draw(keep, share, settings["mask_rate"], settings["replace_rate"])
        return reconstruction(model, x, compact_x, links, keep, drawn, settings["power"])

    def objective() -> Tensor:
        """A step of the mask network; then the loss of the model."""
        share, keep = next(shares), mask_net(compact_x, links)
        value = mask_loss(error_of(keep, share)[0], keep, settings["beta"])
        slopes = torch.autograd.grad(value, mask_parameters)
        for parameter, slope in zip(mask_parameters, slopes, strict=True):
            parameter.grad = slope
        mask_optimizer.step()

        with torch.no_grad():
            keep = mask_net(compact_x, links)
        error, h = error_of(keep, share)
        return loss(error, F.relu(model.spread(h)), settings["uniformity"] * (1 - share))

    minimise(model, objective, settings, step, cosine_decay(settings["epochs"]))
    with torch.no_grad():
        return Fitted(model.encoder(compact_x, links))
