"""Decoders: an edge from two embeddings, and hidden factors from visible ones.

The whole trainable model: encoder and structure decoder behind one forward, so that DDP sees every
parameter; and the optimiser of its weights.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cimage_dist import keyed
from cimage_dist.config import Config, ModelConfig
from cimage_dist.nn.encoder import Encoder, decode_reach, start_edge_factors, start_from_pca
from cimage_dist.nn.projection import draw_key, dropout
from cimage_dist.nn.propagate import can_compile
from cimage_dist.nn.routing import normalize_factors
from cimage_dist.types import EdgeList, FeatureMoments, Features, Hops, View


def rows_of(z: Tensor, nodes: Tensor) -> Tensor:
    """z[nodes]; all rows in their order, as a whole graph gives them, are not copied."""
    is_whole = nodes.device.type == "cpu" and nodes.numel() == z.shape[0]
    if is_whole and torch.equal(nodes, torch.arange(z.shape[0])):
        return z
    return z.index_select(0, nodes)


class FactorDecoder(nn.Module):
    """F̂ = MLP(z with the hidden factors set to zero) (§5.3): every layer but the last is dropout
    -> Linear -> ELU, output K·C wide.
    """

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        width = cfg.num_factors * cfg.factor_dim
        sizes = [width] + [cfg.factor_hidden] * (cfg.factor_layers - 1) + [width]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.dropout = cfg.factor_dropout

    def forward(self, z_nKC: Tensor, visible_K: Tensor) -> Tensor:
        """z [n, K, C], visible bool [K]: the factors given as input -> prediction of all factors
        [n, K, C].
        """
        x = (z_nKC * visible_K.to(z_nKC.dtype).unsqueeze(-1)).flatten(1)
        for layer in self.layers[:-1]:
            # In place: the next layer keeps the result, and the gradient follows from it.
            x = F.elu(layer(dropout(x, self.dropout, self.training)), inplace=True)
        return cast(Tensor, self.layers[-1](x)).view_as(z_nKC)


_CHUNK_PAIRS = 8_192  # gathered at a time
_KEPT_PAIRS = 1 << 15  # whose products are kept for the backward pass; of more, they are made again


class _PairProducts(torch.autograd.Function):
    """z[u] ⊙ z[v] of pairs, [n, D]. The rows are gathered again in the backward pass, and a few
    thousand at a time: kept, they are the largest tensors of a step.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, pairs: Tensor) -> Tensor:
        ctx.save_for_backward(z, pairs)
        out = z.new_empty(pairs.shape[0], z.shape[1])
        for part, rows in zip(pairs.split(_CHUNK_PAIRS), out.split(_CHUNK_PAIRS), strict=True):
            torch.mul(z.index_select(0, part[:, 0]), z.index_select(0, part[:, 1]), out=rows)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        z, pairs = ctx.saved_tensors
        ends = []
        for at, other in ((1, 0), (0, 1)):
            end = torch.zeros_like(z)
            for part, grad in zip(
                pairs.split(_CHUNK_PAIRS), grads[0].split(_CHUNK_PAIRS), strict=True
            ):
                end.index_add_(0, part[:, at], grad * z.index_select(0, part[:, other]))
            ends.append(end)
        return ends[0].add_(ends[1]), None


class _PairLayer(torch.autograd.Function):
    """W dropout(z[u] ⊙ z[v]) + b of pairs, [n, H]: the numbers that `_PairProducts`, dropout and
    the layer give one after another, without anything of size n x D kept or made at once.
    """

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, pairs: Tensor, weight_HD: Tensor, bias: Tensor, rate: float
    ) -> Tensor:
        ctx.save_for_backward(z, pairs, weight_HD)
        ctx.rate, ctx.key = rate, draw_key() if rate else 0
        parts = _dropped_products(z, pairs, ctx.rate, ctx.key)
        return torch.cat([torch.addmm(bias, x, weight_HD.t()) for _, x in parts])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from cimage_dist.nn.kernels.cpu.routing import drop

        z, pairs, weight_HD = ctx.saved_tensors
        ends, grad_HD = (torch.zeros_like(z), torch.zeros_like(z)), torch.zeros_like(weight_HD)
        for part, x in _dropped_products(z, pairs, ctx.rate, ctx.key):
            grad = grads[0][part]
            grad_HD.addmm_(grad.t(), x)
            grad_x = grad @ weight_HD
            if ctx.rate:
                grad_x = drop(grad_x, ctx.rate, ctx.key, part.start * z.shape[1])
            u, v = pairs[part].unbind(1)
            ends[0].index_add_(0, v, grad_x * z.index_select(0, u))
            ends[1].index_add_(0, u, grad_x.mul_(z.index_select(0, v)))
        return ends[0].add_(ends[1]), None, grad_HD, grads[0].sum(0), None


def _dropped_products(
    z: Tensor, pairs: Tensor, rate: float, key: int
) -> Iterator[tuple[slice, Tensor]]:
    """(some of the pairs, dropout(z[u] ⊙ z[v]) of them), until all have had their turn."""
    from cimage_dist.nn.kernels.cpu.routing import drop

    for begin in range(0, pairs.shape[0], _CHUNK_PAIRS):
        part = slice(begin, min(begin + _CHUNK_PAIRS, pairs.shape[0]))
        u, v = pairs[part].unbind(1)
        x = z.index_select(0, u).mul_(z.index_select(0, v))
        yield part, drop(x, rate, key, begin * z.shape[1]) if rate else x


class StructureDecoder(nn.Module):
    """logit(u, v) = MLP(z_u ⊙ z_v) (§5.2): every layer but the last is dropout -> Linear -> ReLU,
    the last is Linear to 1. Where the encoder has edge factors, it reads these alone, scaled
    to the length √C so that the products are not tiny.
    """

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.width = width = (cfg.edge_factors or cfg.num_factors) * cfg.factor_dim
        self.edge_factors = cfg.edge_factors
        sizes = [width] + [cfg.structure_hidden] * (cfg.structure_layers - 1) + [1]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.dropout = cfg.structure_dropout

    def forward(self, z: Tensor, pairs: Tensor) -> Tensor:
        """z [N, ...] flattened per node, of which the last columns count; pairs int64 [n, 2] ->
        logits [n].
        """
        flat, first = z.flatten(1)[:, -self.width :], cast(nn.Linear, self.layers[0])
        if self.edge_factors:
            factors = flat.unflatten(1, (self.edge_factors, -1))
            flat = normalize_factors(factors).flatten(1) * factors.shape[2] ** 0.5
        can_fuse = can_compile(flat, first.weight) and not torch.is_autocast_enabled("cpu")
        if pairs.shape[0] > _KEPT_PAIRS and len(self.layers) > 1 and can_fuse:
            rate = self.dropout if self.training else 0.0
            out = cast(Tensor, _PairLayer.apply(flat, pairs, first.weight, first.bias, rate))
            x, rest = torch.relu(out), self.layers[1:-1]
        else:
            x, rest = cast(Tensor, _PairProducts.apply(flat, pairs)), self.layers[:-1]
        for layer in rest:
            x = torch.relu(layer(dropout(x, self.dropout, self.training)))
        return cast(Tensor, self.layers[-1](x)).squeeze(-1)


class ModelOutput(NamedTuple):
    """h, z [N, K, C] (with `hops`: of the seeds and perhaps more) as in Encoding; logits [p] of the
    pairs; predicted [n, K, C] factors of the nodes asked for, or None.

    logits is None without an edge decoder. second [n, K', C]: the linear factors, which come
    first, of the rows `nodes` of the second view.
    """

    h: Tensor
    z: Tensor
    logits: Tensor | None
    predicted: Tensor | None
    second: Tensor | None = None


def norm_kind(cfg: Config) -> str:
    """What `model.norm=auto` stands for: sampled rows have no moments worth trusting, so the closed
    form is used for them.
    """
    if cfg.model.norm != "auto":
        return cfg.model.norm
    if cfg.model.init == "pca":
        return "none"  # the start is centred, and its channels deviate alike
    return "moments" if cfg.sampler.fanouts else "batch"


def needs_moments(cfg: Config) -> bool:
    """Whether the model is built from the moments of the graph's features."""
    return cfg.model.init == "pca" or norm_kind(cfg) == "moments"


class CimageModel(nn.Module):
    """Encoder, and a decoder of edges and one of factors where the objective has their terms."""

    def __init__(
        self, num_features: int, cfg: Config, moments: FeatureMoments | None = None
    ) -> None:
        super().__init__()
        self.encoder = Encoder(num_features, cfg.model, norm_kind(cfg), moments)
        self.structure = (
            StructureDecoder(self.encoder.cfg) if cfg.loss.structure_weight > 0 else None
        )
        self.factors = FactorDecoder(self.encoder.cfg) if cfg.loss.factor_weight > 0 else None

    def forward(
        self,
        x: Features,
        edges: EdgeList,
        pairs: Tensor,
        nodes: Tensor | None = None,
        visible_K: Tensor | None = None,
        hops: Hops | None = None,
        second: View | None = None,
    ) -> ModelOutput:
        """Encode, score `pairs` [p, 2], and predict the factors of `nodes` [n] from those in
        `visible_K`.

        `second`, where given, is encoded in the same call, so that DDP sees one forward pass.
        """
        h, z, found = self.encoder(x, edges, hops)
        predicted = None
        if self.factors is not None and nodes is not None and visible_K is not None:
            predicted = self.factors(rows_of(z, nodes), visible_K)
        logits = (
            None if self.structure is None else self.structure(z if found is None else found, pairs)
        )
        other = None
        if second is not None:
            seen = self.encoder(second.x, second.edges, second.hops, is_whole=False)
            other = rows_of(seen.z, second.nodes)
        return ModelOutput(h, z, logits, predicted, other)

    def edge_parameters(self) -> list[nn.Parameter]:
        """What the edge loss alone trains: the edge factors and the decoder behind them."""
        edges, decoder = self.encoder.edges, self.structure
        if edges is None or decoder is None:
            return []
        return [*edges.parameters(), *decoder.parameters()]

    def edge_logits(
        self, x: Features, edges: EdgeList, pairs: Tensor, hops: Hops | None = None
    ) -> Tensor:
        """Logits [p] of `pairs` by the edge factors; the linear ones are not made."""
        assert self.encoder.edges is not None and self.structure is not None
        return cast(Tensor, self.structure(self.encoder.edges(x, edges, hops), pairs))


def build_model(
    num_features: int, cfg: Config, moments: FeatureMoments | None = None
) -> CimageModel:
    """Initial weights are a function of run.seed (and, with model.init=pca, of the moments) alone;
    the caller's random state is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(keyed.stream(cfg.run.seed, "init"))
        model = CimageModel(num_features, cfg, moments)
    if cfg.model.init == "pca":
        if moments is None:
            raise ValueError("model.init=pca needs the feature moments of the graph")
        start_from_pca(model.encoder.linear, moments, cfg.run.seed)
        if model.encoder.edges is not None:
            start_edge_factors(model.encoder.edges, moments, cfg.run.seed)
    return model


def model_from_weights(cfg: Config, weights: dict[str, Tensor]) -> CimageModel:
    """A model of the shapes found in a state dict, filled with it; needs no graph."""
    num_features = weights["encoder.linear.weight"].shape[1]
    width = weights["encoder.output.weight" if cfg.model.hidden else "encoder.linear.weight"].shape[
        0
    ]
    nonlinear = weights.get("encoder.edges.output.bias")
    width += 0 if nonlinear is None else nonlinear.numel()
    factor_dim = width // cfg.model.num_factors
    layers, alpha = decode_reach(weights["encoder.reach"])
    used = replace(
        cfg.model,
        factor_dim=factor_dim,
        num_layers=layers,
        teleport=alpha,
        edge_factors=0 if nonlinear is None else nonlinear.numel() // factor_dim,
    )
    cfg = replace(cfg, model=used)
    moments = None
    if norm_kind(cfg) == "moments":
        cov = weights["encoder.norm.cov"]
        full = cov.shape[0] == cov.shape[1]
        moments = FeatureMoments(
            weights["encoder.norm.mean"],
            weights["encoder.norm.sqmean"],
            cov if full else None,
            None if full else cov,
        )
    with torch.random.fork_rng(devices=[]):  # the caller's random state is left as it was
        model = CimageModel(num_features, cfg, moments)
    model.load_state_dict(weights)
    return model.eval()


class Adam(torch.optim.Adam):
    """torch.optim.Adam to the bit, without `import torch._dynamo`.

    torch wraps these methods so that its compiler leaves them alone, and the wrappers import the
    compiler to say so: 150 MB of memory and seconds of every run, most of which compile nothing.
    """

    add_param_group = inspect.unwrap(torch.optim.Adam.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Adam.zero_grad)
    state_dict = inspect.unwrap(torch.optim.Adam.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Adam.load_state_dict)
    step = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))
