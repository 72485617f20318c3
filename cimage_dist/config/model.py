"""The encoder, its decoders, masks and losses."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal, Optional

from cimage_dist import registry
from cimage_dist.config.data import (
    AT_LEAST_1,
    BELOW_1,
    NOT_NEGATIVE,
    POSITIVE,
    UP_TO_1,
    Rule,
    check_fields,
    need,
    opt,
)

# Undirected edges from which the network behind the edge factors is trained by default.
ENOUGH_EDGES = 20_000


@dataclass
class ModelConfig:
    num_factors: int = opt(16, "K, number of latent factors", AT_LEAST_1)
    factor_dim: int = opt(
        0,
        "c, channels per factor; the embedding has K*c columns; 0: 32, or fewer where that is "
        "more than the features",
        NOT_NEGATIVE,
    )
    init: Literal["random", "pca"] = opt(
        "pca",
        "start of the projection: random, or the principal directions of the features, rotated",
    )
    edge_factors: Optional[int] = opt(
        None,
        "how many of the factors a nonlinear network of two graph convolutions makes, trained by "
        "the edge loss; null: a quarter of them on graphs of at least 20,000 edges, none with "
        "routing, without an edge loss or with one sampled hop",
        Rule(lambda n: n >= 0, "must be at least 0, or be null"),
    )
    hidden: int = opt(
        0,
        "hidden width of the projection, the appendix's 'encoder hidden dim.'; 0: one linear layer",
        NOT_NEGATIVE,
    )
    propagation: Literal["routing", "gcn"] = opt(
        "gcn", "layers after the projection: neighbourhood routing (paper), or plain GCN smoothing"
    )
    teleport: Optional[float] = opt(
        None,
        "alpha, share of the node's own projected factors mixed back in after every layer; "
        "null: found from the graph's features and edges, without labels",
        Rule(BELOW_1.holds, "must lie in [0, 1), or be null"),
    )
    dropout: float = opt(0.0, "dropout on the input features", BELOW_1)
    norm: Literal["auto", "none", "batch", "moments", "layer"] = opt(
        "auto",
        "normalisation of the projection's first layer; auto: none with init=pca, else batch on "
        "the full graph, moments when sampled",
    )
    num_layers: int = opt(
        0,
        "layers after the projection, as many hops; 0: by the graph's size and density, 2 to 6, "
        "no fewer than sampled hops; routing: as the sampled hops ask for",
        NOT_NEGATIVE,
    )
    routing_iterations: int = opt(4, "T, iterations inside a routing layer", AT_LEAST_1)
    routing_temperature: float = opt(1.0, "softmax temperature over factors", POSITIVE)
    routing_init: Literal["uniform", "self"] = opt(
        "uniform", "first assignment: 1/K (released code) or from the node's own factors (paper)"
    )
    routing_final_norm: bool = opt(
        False, "normalise after the last iteration (paper) or not (released code)"
    )
    routing_grad: Literal["full", "last"] = opt(
        "full", "differentiate all iterations, or the final aggregation only"
    )
    routing_backend: Literal["auto", "fused", "reference"] = opt(
        "auto",
        "how routing is computed: fused loops where there are any, or plain tensor operations",
    )
    tail: bool = opt(False, "routing: one GCN smoothing after the last layer (released code)")
    structure_hidden: int = opt(32, "hidden width of the edge decoder", AT_LEAST_1)
    structure_layers: int = opt(2, "linear layers of the edge decoder", AT_LEAST_1)
    structure_dropout: float = opt(0.2, "dropout in the edge decoder", BELOW_1)
    factor_hidden: int = opt(256, "hidden width of the factor decoder", AT_LEAST_1)
    factor_layers: int = opt(2, "linear layers of the factor decoder", AT_LEAST_1)
    factor_dropout: float = opt(0.2, "dropout in the factor decoder", BELOW_1)

    def __post_init__(self) -> None:
        check_fields(self, "model")
        need(
            not (self.tail and self.propagation == "gcn"),
            "model.tail",
            "is for model.propagation=routing; GCN layers smooth already",
            self.tail,
        )
        need(
            self.init == "random" or not self.hidden,
            "model.hidden",
            "must be 0 with model.init=pca, which starts one linear layer",
            self.hidden,
        )
        need(
            not self.edge_factors or (self.propagation == "gcn" and self.num_layers != 1),
            "model.edge_factors",
            "is for model.propagation=gcn with at least two layers; set it to 0",
            self.edge_factors,
        )
        need(
            (self.edge_factors or 0) < self.num_factors,
            "model.edge_factors",
            f"must be below model.num_factors ({self.num_factors})",
            self.edge_factors,
        )

    def sized(
        self,
        num_features: int,
        num_nodes: int,
        num_edges: int,
        hops: int = 0,
        has_edge_loss: bool = True,
    ) -> ModelConfig:
        """With factor_dim, num_layers and edge_factors as they are used on a graph of `num_edges`
        directed edges.

        factor_dim: 32, or as many as keep K*c within the features, at least 4. num_layers:
        ⌊ln N / ln(1 + mean degree)⌋, the hops in which a neighbourhood grows to the size of the
        graph, between 2 and 6, and no fewer than the `hops` that are sampled. Routing layers and
        their tail need one hop each, so that where hops are sampled they decide. edge_factors: a
        quarter, where the two convolutions behind them have their hops, a loss, and as many edges
        to learn from as their hundred thousands of weights need (docs/LOG.md).
        """
        factor_dim = self.factor_dim or max(4, min(32, num_features // self.num_factors))
        growth = math.log(1 + num_edges / max(num_nodes, 1))
        layers = min(max(int(math.log(max(num_nodes, 1)) / growth), 2), 6) if growth else 2
        layers = max(layers, hops)
        if hops and self.propagation == "routing":
            layers = max(1, hops - self.tail)
        layers = self.num_layers or layers
        edge_factors = self.edge_factors
        if edge_factors is None:
            can = self.propagation == "gcn" and has_edge_loss and layers > 1 and hops != 1
            can &= num_edges // 2 >= ENOUGH_EDGES
            edge_factors = self.num_factors // 4 if can else 0
        return dataclasses.replace(
            self, factor_dim=factor_dim, num_layers=layers, edge_factors=edge_factors
        )


@dataclass
class MaskConfig:
    start_rate: float = opt(
        0.2, "share of nodes (or edges) from which a masking walk starts", UP_TO_1
    )
    walk_length: int = opt(3, "steps of each masking walk", AT_LEAST_1)
    start: Literal["node", "edge"] = opt(
        "node", "walks start from nodes, or from the sources of edges"
    )
    symmetric: bool = opt(
        True, "full graph: hide both directions of a masked edge; a sampled step always does"
    )
    hide_rate: float = opt(
        0.5,
        "full graph: share of the edges left visible by the walks that each view hides as well, "
        "drawn at every step; sampled: see sampler.hide_rate",
        BELOW_1,
    )
    feature_rate: float = opt(
        0.2,
        "share of the feature columns that each view sets to zero, drawn at every step",
        BELOW_1,
    )

    def __post_init__(self) -> None:
        check_fields(self, "mask")


@dataclass
class LossConfig:
    structure_weight: float = opt(
        0.1, "weight of the edge loss; 0: there is no edge decoder", NOT_NEGATIVE
    )
    factor_weight: float = opt(
        0.1,
        "lambda1, weight of the factor reconstruction; 0: no pseudo-labels and no "
        "conditional-independence scores are computed",
        NOT_NEGATIVE,
    )
    cluster_weight: float = opt(
        0.01, "lambda2, weight of the modularity loss; negative reverses its sign (ablation)"
    )
    sce_power: int = opt(
        1,
        "tau, power of the scaled cosine error",
        Rule(lambda n: 1 <= n <= 10, "must lie between 1 and 10"),
    )
    factor_direction: Literal["paper", "code"] = opt(
        "paper", "paper: scored factors predict the others; code: the reverse"
    )
    factor_cosine: Literal["flat", "per_factor"] = opt(
        "flat",
        "one cosine per node over all hidden factors (paper), or one per factor (released code)",
    )
    factor_target: Literal["self", "detached"] = opt(
        "self", "what is reconstructed: the masked view's own factors, with or without a gradient"
    )
    redundancy_weight: float = opt(
        1.0, "weight of the redundancy loss; above 0 each step encodes a second view", NOT_NEGATIVE
    )
    redundancy_decorrelation: float = opt(
        1e-3, "mu, weight of the decorrelation of channels in the redundancy loss", NOT_NEGATIVE
    )
    extra: dict[str, float] = opt(
        {}, "weights of registered loss terms by name, e.g. loss.extra.mine=0.5"
    )

    @property
    def uses_partition(self) -> bool:
        return self.factor_weight > 0

    def edges_only(self) -> LossConfig:
        """The edge loss alone: what the encoder behind the first pseudo-labels is trained with."""
        return LossConfig(
            structure_weight=1.0,
            factor_weight=0.0,
            cluster_weight=0.0,
            redundancy_weight=0.0,
            sce_power=self.sce_power,
            factor_direction=self.factor_direction,
            factor_cosine=self.factor_cosine,
            factor_target=self.factor_target,
        )

    def __post_init__(self) -> None:
        check_fields(self, "loss")
        for name in self.extra:
            need(
                name in registry.loss_names(),
                f"loss.extra.{name}",
                "is not registered; call cimage_dist.register_loss before the config is loaded",
                self.extra[name],
            )
        names = ("structure_weight", "factor_weight", "cluster_weight", "redundancy_weight")
        weights = [getattr(self, name) for name in names] + [*self.extra.values()]
        need(
            any(weights),
            "loss.structure_weight, loss.factor_weight, loss.cluster_weight and "
            "loss.redundancy_weight",
            "must not all be 0: nothing would be trained",
            weights,
        )
