"""The graph, what is hidden of it, and the encoder. First, what all sections are made of: a field
with its help, and a check that names its key.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Optional

from cimage_dist.errors import UserError


class Rule(NamedTuple):
    """What the value of a field must be; null is checked by the field's type."""

    holds: Callable[[Any], bool]
    words: str


AT_LEAST_1 = Rule(lambda x: x >= 1, "must be at least 1")
AT_LEAST_2 = Rule(lambda x: x >= 2, "must be at least 2")
NOT_NEGATIVE = Rule(lambda x: x >= 0, "must not be negative")
POSITIVE = Rule(lambda x: x > 0, "must be positive")
BELOW_1 = Rule(lambda x: 0 <= x < 1, "must lie in [0, 1)")
UP_TO_1 = Rule(lambda x: 0 < x <= 1, "must lie in (0, 1]")
INSIDE_0_1 = Rule(lambda x: 0 < x < 1, "must lie strictly between 0 and 1")
FOLDER = Rule(
    lambda text: "://" not in text,
    "must be a folder; for a graph store on object storage set data.path to its URL",
)


def opt(default: Any, help: str, rule: Rule | None = None) -> Any:
    """A field with its explanation, shown by `cimage show --keys`, and its range."""
    about = {"help": help, "rule": rule}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=about)
    return field(default=default, metadata=about)


def section(cls: type, help: str) -> Any:
    return field(default_factory=cls, metadata={"help": help})


def need(ok: bool, key: str, rule: str, got: Any) -> None:
    if not ok:
        raise UserError(f"{key} {rule}; got {got!r}.")


def check_fields(part: Any, name: str) -> None:
    """Every field of a section by its own rule; `name` of the section, for messages."""
    for item in dataclasses.fields(part):
        rule, value = item.metadata.get("rule"), getattr(part, item.name)
        if rule is not None and value is not None:
            need(rule.holds(value), f"{name}.{item.name}", rule.words, value)


VAL_RATIO, TEST_RATIO = 0.05, 0.10  # of the edges, as usual in link prediction
SMALL_VAL_RATIO, SMALL_TEST_RATIO = 0.02, 0.03  # where links are only there to judge by
_LEAST_EDGES, _MOST_EDGES = 2000, 20_000_000  # undirected, of which holdout_edges=auto keeps some


@dataclass
class SbmConfig:
    """A degree-corrected stochastic block model with planted label-driven and nuisance features."""

    num_nodes: int = opt(10_000, "number of nodes", AT_LEAST_2)
    num_blocks: int = opt(8, "number of planted blocks; they are the labels")
    avg_degree: float = opt(20.0, "mean number of neighbours", POSITIVE)
    homophily: float = opt(
        0.8,
        "share of a node's edge ends that stay inside its block",
        Rule(lambda x: 0 <= x <= 1, "must lie between 0 and 1"),
    )
    degree_exponent: float = opt(
        2.5,
        "power-law exponent of the degree propensities; larger is more even",
        Rule(lambda x: x > 1, "must be above 1"),
    )
    label_features: int = opt(16, "features driven by the block, plus noise", NOT_NEGATIVE)
    nuisance_features: int = opt(
        48, "features driven by factors independent of the block", NOT_NEGATIVE
    )
    noise: float = opt(1.0, "standard deviation of the feature noise", NOT_NEGATIVE)
    seed: int = opt(0, "seed of the generator, apart from run.seed")

    def __post_init__(self) -> None:
        check_fields(self, "data.sbm")
        need(
            1 <= self.num_blocks <= self.num_nodes,
            "data.sbm.num_blocks",
            "must lie between 1 and data.sbm.num_nodes",
            self.num_blocks,
        )
        need(
            self.label_features + self.nuisance_features >= 1,
            "data.sbm.label_features",
            "at least one feature is needed",
            self.label_features,
        )


@dataclass
class DataConfig:
    name: str = opt(
        "digits",
        "digits, forum, sbm, cora, citeseer, pubmed, photo, computers, wikics, ogbn-arxiv, "
        "ogbn-products, ogbn-papers100m, or any name you give your own graph (with data.path)",
    )
    path: Optional[str] = opt(
        None,
        "your own graph: a folder holding edges.* and optionally features.*, labels.*, "
        "splits.*; or a graph store",
    )
    root: Optional[str] = opt(
        None,
        "where raw files are looked for; unset: the environment variable CIMAGE_DATA_ROOT, else "
        "<store_dir>/raw",
    )
    store_dir: str = opt("data", "where prepared graph stores are kept", FOLDER)
    stage_dir: Optional[str] = opt(
        None,
        "copy the graph store to this local folder of each node first; data.path may then be "
        "the URL of a store (s3://bucket/folder, gs://, file://)",
        FOLDER,
    )
    columns: dict[str, str] = opt(
        {},
        "which columns of your tables are what, by name or number from 0, where their names do not "
        "say it: source, target, weight, id, label, split; e.g. data.columns.source=user. A weight "
        "is kept, but not used in training",
    )
    header: dict[str, str] = opt(
        {},
        "whether the first line of a text table names its columns, where that is in doubt: "
        "data.header.edges=present or absent; also features, labels, splits, ids",
    )
    features: Literal["given", "degree", "hash", "laplacian"] = opt(
        "given", "node features: as given, or made from the graph when there are none"
    )
    made_features: int = opt(
        64, "width of features made from the graph (hash, laplacian)", AT_LEAST_1
    )
    feature_dtype: Literal["float32", "float16"] = opt("float32", "storage type of features")
    normalize: Literal["unit", "row", "none", "source"] = opt(
        "unit",
        "each feature row is scaled to length 1 (unit) or sum 1 (row), or kept (none); source: "
        "what is usual for this dataset",
    )
    verify: Literal["auto", "always", "never"] = opt(
        "auto", "checksum of store files when opened; auto: stores up to 1 GiB"
    )
    split: Literal["auto", "public", "random", "per_class"] = opt(
        "auto", "node split; auto: the public one where it exists, else random"
    )
    split_index: int = opt(0, "which of several public splits (WikiCS has 20)", NOT_NEGATIVE)
    train_ratio: float = opt(0.1, "training share of a random split", INSIDE_0_1)
    val_ratio: float = opt(0.1, "validation share of a random split", INSIDE_0_1)
    labels_per_class: int = opt(20, "training nodes per class of a per_class split", AT_LEAST_1)
    holdout_edges: Literal["auto", "none", "link"] = opt(
        "auto",
        "link: train on 85 % of the edges, keep 5 % and 10 % for validation and test of link "
        "prediction; auto: where no node has a label, keep 2 % and 3 % (unless the two ratios say "
        "otherwise), else none",
    )
    link_val_ratio: float = opt(
        VAL_RATIO, "share of undirected edges kept for validation", INSIDE_0_1
    )
    link_test_ratio: float = opt(TEST_RATIO, "share of undirected edges kept for test", INSIDE_0_1)
    sbm: SbmConfig = section(SbmConfig, "parameters of the generated graph `sbm`")

    def settled(self, has_labels: bool, num_edges: int) -> DataConfig:
        """With what holdout_edges=auto stands for on a graph of `num_edges` undirected edges.

        Where no node has a label, held-out edges are all there is to judge by. Graphs too small
        to hold out some tens, or so large that the copy of the training edges costs gigabytes in
        every worker, keep all edges.
        """
        if self.holdout_edges != "auto":
            return self
        if has_labels or not _LEAST_EDGES <= num_edges <= _MOST_EDGES:
            return dataclasses.replace(self, holdout_edges="none")
        val, test = self.link_val_ratio, self.link_test_ratio
        if (val, test) == (VAL_RATIO, TEST_RATIO):
            val, test = SMALL_VAL_RATIO, SMALL_TEST_RATIO
        return dataclasses.replace(
            self, holdout_edges="link", link_val_ratio=val, link_test_ratio=test
        )

    def __post_init__(self) -> None:
        check_fields(self, "data")
        for name, given, known in (
            ("columns", self.columns, ("source", "target", "weight", "id", "label", "split")),
            ("header", self.header, ("edges", "features", "labels", "splits", "ids")),
        ):
            for key in given:
                need(key in known, f"data.{name}", f"names one of {', '.join(known)}", key)
        for role, value in self.header.items():
            is_known = value in ("present", "absent")
            need(is_known, f"data.header.{role}", "must be present or absent", value)
        for parts, rule in (
            (("train_ratio", "val_ratio"), "must leave room for a test set (below 1)"),
            (("link_val_ratio", "link_test_ratio"), "must leave training edges (below 1)"),
        ):
            total = sum(getattr(self, name) for name in parts)
            need(total < 1, " + ".join(f"data.{name}" for name in parts), rule, total)


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
    edge_start_rate: float = opt(
        0.7, "start_rate of the masks that train edge factors alone (optim.edge_steps)", UP_TO_1
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
