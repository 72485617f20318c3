"""What the methods share: feature normalisation, sparse propagation, a GCN stack, the loop; and
what GAE, VGAE, ARGA and ARVGA share besides: encoders, non-edges, the adversary, the fit.

x [N, F], p [N, N] sparse, edges and others (non-edges) [2, any], z [N, D].
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch_geometric.nn import ARGA, GAE, InnerProductDecoder, Linear

from cimage_dist.baselines import Fitted, Graph, Step
from cimage_dist.baselines.sparse import (
    Features,
    Pattern,
    Sparse,
    compact,
    projected,
    scaled_columns,
)
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


Loss = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


def encoder(num_features: int, hidden: int, width: int) -> GCN:
    """Z = P ReLU(P X W_0) W_1, with biases; X [N, F], Z [N, width]."""
    return GCN([num_features, hidden, width], nn.ReLU, last=False)


class VariationalEncoder(nn.Module):
    """H = ReLU(P X W_0); mu = P H W_1, log sigma = P H W_2; X [N, F], both results [N, width]."""

    def __init__(self, num_features: int, hidden: int, width: int) -> None:
        super().__init__()
        self.shared = GCN([num_features, hidden], nn.ReLU, last=True)
        self.mean = Convolution(hidden, width)
        self.logstd = Convolution(hidden, width)

    def forward(self, x: Features, p: Sparse) -> tuple[Tensor, Tensor]:
        h = self.shared(x, p)
        return self.mean(h, p), self.logstd(h, p)


def discriminator(widths: Sequence[int]) -> nn.Sequential:
    """A perceptron [N, widths[0]] -> [N, 1] with ReLU between layers; the result is a logit."""
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 1))


def edge_keys(edge_index: Tensor, num_nodes: int) -> Tensor:
    """u N + v of every edge, sorted: what `non_edges` looks pairs up in; [E]."""
    return (edge_index[0] * num_nodes + edge_index[1]).sort().values


def non_edges(keys: Tensor, num_nodes: int, count: int) -> Tensor:
    """Uniform pairs [2, <= count] that are neither edges nor loops.

    Pairs that happen to be edges are dropped, not drawn again: in a sparse graph these are few, and
    the loss takes a mean. (torch_geometric's own sampler draws from Python's global generator.)
    """
    pairs = torch.randint(num_nodes, (2, count), device=keys.device)
    wanted = pairs[0] * num_nodes + pairs[1]
    at = torch.searchsorted(keys, wanted).clamp_max(keys.numel() - 1)
    return pairs[:, (keys[at] != wanted) & (pairs[0] != pairs[1])]


def dot_products(z: Tensor) -> Callable[[Tensor], Tensor]:
    """Pairs [2, P] -> z_u . z_v [P]: the decoder without its sigmoid, which would make ties."""
    decoder = InnerProductDecoder()
    return lambda pairs: decoder(z, pairs, sigmoid=False)


def adversary_loss(model: ARGA, z: Tensor) -> Tensor:
    """-E[log D(a)] - E[log(1 - D(z))], a ~ N(0, I): L_D of ARGA."""
    return model.discriminator_loss(z)


def train_adversary(model: ARGA, optimizer: torch.optim.Optimizer, z: Tensor, steps: int) -> None:
    """Several steps of the discriminator on a fixed embedding."""
    for _ in range(steps):
        optimizer.zero_grad()
        adversary_loss(model, z.detach()).backward()
        optimizer.step()


def fit_autoencoder(
    make: Callable[[int, int, int], nn.Module],
    kind: type[GAE],
    loss: Loss,
    graph: Graph,
    settings: Mapping[str, Any],
    step: Step,
) -> Fitted:
    """`make` builds the encoder of `kind`; the embedding is z, of a variational method mu."""
    x = compact(prepared(graph.x, settings["normalize"]))
    n, edges = graph.num_nodes, graph.edge_index
    p, keys = propagation_of(edges, n, x.dtype), edge_keys(edges, n)
    sizes = (x.shape[1], settings["hidden"], settings["width"])
    is_adversarial = issubclass(kind, ARGA)
    if is_adversarial:
        adversary = discriminator([settings["width"], *settings["discriminator"]])
        model = kind(make(*sizes), adversary).to(x.device)
        optimizer = torch.optim.Adam(adversary.parameters(), lr=settings["discriminator_lr"])
    else:
        model = kind(make(*sizes)).to(x.device)

    def objective() -> Tensor:
        # Non-edges are drawn before the noise of z, or after the adversary's: recorded results
        # depend on the order.
        if not is_adversarial:
            others = non_edges(keys, n, edges.shape[1])
        z = model.encode(x, p)
        if is_adversarial:
            train_adversary(model, optimizer, z, settings["discriminator_steps"])
            others = non_edges(keys, n, edges.shape[1])
        return loss(model, z, edges, others)

    minimise(model.encoder, objective, settings, step)
    model.eval()  # encode gives mu, not a draw
    with torch.no_grad():
        z = model.encode(x, p)
    return Fitted(z, dot_products(z))
