"""The one typed configuration: every key with its default, its range and its explanation. `config_loading.py` reads it from files.

The sections up to `eval` are the science: they make the fingerprint. `run` and `resources` say where and on what it runs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Optional

from cimage_dist.errors import UserError


def opt(default: Any, help: str) -> Any:
    """A field with its explanation, shown by `cimage show --keys`."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


def section(cls: type, help: str) -> Any:
    return field(default_factory=cls, metadata={"help": help})


@dataclass
class SbmConfig:
    """A degree-corrected stochastic block model with planted label-driven and nuisance features."""

    num_nodes: int = opt(10_000, "number of nodes")
    num_blocks: int = opt(8, "number of planted blocks; they are the labels")
    avg_degree: float = opt(20.0, "mean number of neighbours")
    homophily: float = opt(0.8, "share of a node's edge ends that stay inside its block")
    degree_exponent: float = opt(2.5, "power-law exponent of the degree propensities; larger is more even")
    label_features: int = opt(16, "features driven by the block, plus noise")
    nuisance_features: int = opt(48, "features driven by factors independent of the block")
    noise: float = opt(1.0, "standard deviation of the feature noise")
    seed: int = opt(0, "seed of the generator, apart from run.seed")


@dataclass
class DataConfig:
    name: str = opt(
        "digits",
        "digits, forum, sbm, cora, citeseer, pubmed, photo, computers, wikics, ogbn-arxiv, ogbn-products, ogbn-papers100m, or any name you give your own graph (with data.path)",
    )
    path: Optional[str] = opt(None, "your own graph: a folder holding edges.* and optionally features.*, labels.*, splits.*; or a graph store")
    root: Optional[str] = opt(None, "where raw files are looked for; unset: the environment variable CIMAGE_DATA_ROOT, else <store_dir>/raw")
    store_dir: str = opt("data", "where prepared graph stores are kept")
    stage_dir: Optional[str] = opt(
        None, "copy the graph store to this local folder of each node first; data.path may then be the URL of a store (s3://bucket/folder, gs://, file://)"
    )
    features: Literal["given", "degree", "hash", "laplacian"] = opt("given", "node features: as given, or made from the graph when there are none")
    made_features: int = opt(64, "width of features made from the graph (hash, laplacian)")
    feature_dtype: Literal["float32", "float16"] = opt("float32", "storage type of features")
    normalize: Literal["unit", "row", "none", "source"] = opt(
        "unit", "each feature row is scaled to length 1 (unit) or sum 1 (row), or kept (none); source: what is usual for this dataset"
    )
    verify: Literal["auto", "always", "never"] = opt("auto", "checksum of store files when opened; auto: stores up to 1 GiB")
    split: Literal["auto", "public", "random", "per_class"] = opt("auto", "node split; auto: the public one where it exists, else random")
    split_index: int = opt(0, "which of several public splits (WikiCS has 20)")
    train_ratio: float = opt(0.1, "training share of a random split")
    val_ratio: float = opt(0.1, "validation share of a random split")
    labels_per_class: int = opt(20, "training nodes per class of a per_class split")
    holdout_edges: Literal["none", "link"] = opt("none", "link: train on 85 % of the edges, keep 5 % and 10 % for validation and test of link prediction")
    link_val_ratio: float = opt(0.05, "share of undirected edges kept for validation")
    link_test_ratio: float = opt(0.10, "share of undirected edges kept for test")
    sbm: SbmConfig = section(SbmConfig, "parameters of the generated graph `sbm`")

    def __post_init__(self) -> None:
        for name in ("store_dir", "stage_dir"):
            folder = getattr(self, name)
            need("://" not in (folder or ""), f"data.{name}", "must be a folder; for a graph store on object storage set data.path to its URL", folder)
        need(0 < self.train_ratio < 1, "data.train_ratio", "must lie strictly between 0 and 1", self.train_ratio)
        need(0 < self.val_ratio < 1, "data.val_ratio", "must lie strictly between 0 and 1", self.val_ratio)
        need(
            self.train_ratio + self.val_ratio < 1,
            "data.train_ratio + data.val_ratio",
            "must leave room for a test set (below 1)",
            self.train_ratio + self.val_ratio,
        )
        need(self.labels_per_class >= 1, "data.labels_per_class", "must be at least 1", self.labels_per_class)
        need(self.made_features >= 1, "data.made_features", "must be at least 1", self.made_features)
        need(self.split_index >= 0, "data.split_index", "must not be negative", self.split_index)
        need(
            0 < self.link_val_ratio < 1 and 0 < self.link_test_ratio < 1,
            "data.link_val_ratio / data.link_test_ratio",
            "must lie strictly between 0 and 1",
            [self.link_val_ratio, self.link_test_ratio],
        )
        need(
            self.link_val_ratio + self.link_test_ratio < 1,
            "data.link_val_ratio + data.link_test_ratio",
            "must leave training edges (below 1)",
            self.link_val_ratio + self.link_test_ratio,
        )
        sbm = self.sbm
        need(sbm.num_nodes >= 2, "data.sbm.num_nodes", "must be at least 2", sbm.num_nodes)
        need(1 <= sbm.num_blocks <= sbm.num_nodes, "data.sbm.num_blocks", "must lie between 1 and data.sbm.num_nodes", sbm.num_blocks)
        need(sbm.avg_degree > 0, "data.sbm.avg_degree", "must be positive", sbm.avg_degree)
        need(0 <= sbm.homophily <= 1, "data.sbm.homophily", "must lie between 0 and 1", sbm.homophily)
        need(sbm.degree_exponent > 1, "data.sbm.degree_exponent", "must be above 1", sbm.degree_exponent)
        need(sbm.label_features + sbm.nuisance_features >= 1, "data.sbm.label_features", "at least one feature is needed", sbm.label_features)
        need(sbm.label_features >= 0 and sbm.nuisance_features >= 0, "data.sbm.nuisance_features", "must not be negative", sbm.nuisance_features)
        need(sbm.noise >= 0, "data.sbm.noise", "must not be negative", sbm.noise)


@dataclass
class ModelConfig:
    num_factors: int = opt(16, "K, number of latent factors")
    factor_dim: int = opt(0, "c, channels per factor; the embedding has K*c columns; 0: 32, or fewer where that is more than the features")
    init: Literal["random", "pca"] = opt("pca", "start of the projection: random, or the principal directions of the features, rotated")
    hidden: int = opt(0, "hidden width of the projection, the appendix's 'encoder hidden dim.'; 0: one linear layer")
    propagation: Literal["routing", "gcn"] = opt("gcn", "layers after the projection: neighbourhood routing (paper), or plain GCN smoothing")
    teleport: Optional[float] = opt(
        None,
        "alpha, share of the node's own projected factors mixed back in after every layer; null: found from the graph's features and edges, without labels",
    )
    dropout: float = opt(0.0, "dropout on the input features")
    norm: Literal["auto", "none", "batch", "moments", "layer"] = opt(
        "auto", "normalisation of the projection's first layer; auto: none with init=pca, else batch on the full graph, moments when sampled"
    )
    num_layers: int = opt(0, "layers after the projection, as many hops; 0: by the graph's size and density, 2 to 6")
    routing_iterations: int = opt(4, "T, iterations inside a routing layer")
    routing_temperature: float = opt(1.0, "softmax temperature over factors")
    routing_init: Literal["uniform", "self"] = opt("uniform", "first assignment: 1/K (released code) or from the node's own factors (paper)")
    routing_final_norm: bool = opt(False, "normalise after the last iteration (paper) or not (released code)")
    routing_grad: Literal["full", "last"] = opt("full", "differentiate all iterations, or the final aggregation only")
    routing_backend: Literal["auto", "fused", "reference"] = opt("auto", "how routing is computed: fused loops where there are any, or plain tensor operations")
    tail: bool = opt(False, "routing: one GCN smoothing after the last layer (released code)")
    structure_hidden: int = opt(32, "hidden width of the edge decoder")
    structure_layers: int = opt(2, "linear layers of the edge decoder")
    structure_dropout: float = opt(0.2, "dropout in the edge decoder")
    factor_hidden: int = opt(256, "hidden width of the factor decoder")
    factor_layers: int = opt(2, "linear layers of the factor decoder")
    factor_dropout: float = opt(0.2, "dropout in the factor decoder")

    def __post_init__(self) -> None:
        for name in ("num_factors", "routing_iterations", "structure_hidden", "structure_layers", "factor_hidden", "factor_layers"):
            need(getattr(self, name) >= 1, f"model.{name}", "must be at least 1", getattr(self, name))
        for name in ("dropout", "structure_dropout", "factor_dropout"):
            need(0 <= getattr(self, name) < 1, f"model.{name}", "must lie in [0, 1)", getattr(self, name))
        need(self.teleport is None or 0 <= self.teleport < 1, "model.teleport", "must lie in [0, 1), or be null", self.teleport)
        for name in ("factor_dim", "num_layers"):
            need(getattr(self, name) >= 0, f"model.{name}", "must not be negative", getattr(self, name))
        need(not (self.tail and self.propagation == "gcn"), "model.tail", "is for model.propagation=routing; GCN layers smooth already", self.tail)
        need(self.hidden >= 0, "model.hidden", "must not be negative", self.hidden)
        need(self.init == "random" or not self.hidden, "model.hidden", "must be 0 with model.init=pca, which starts one linear layer", self.hidden)
        need(self.routing_temperature > 0, "model.routing_temperature", "must be positive", self.routing_temperature)

    def sized(self, num_features: int, num_nodes: int, num_edges: int, hops: int = 0) -> ModelConfig:
        """With factor_dim and num_layers as they are used on a graph of `num_edges` directed edges.

        factor_dim: 32, or as many as keep K*c within the features, at least 4. num_layers:
        ⌊ln N / ln(1 + mean degree)⌋, the hops in which a neighbourhood grows to the size of the
        graph, between 2 and 6, and no fewer than the `hops` that are sampled.
        """
        factor_dim = self.factor_dim or max(4, min(32, num_features // self.num_factors))
        growth = math.log(1 + num_edges / max(num_nodes, 1))
        layers = min(max(int(math.log(max(num_nodes, 1)) / growth), 2), 6) if growth else 2
        return dataclasses.replace(self, factor_dim=factor_dim, num_layers=self.num_layers or max(layers, hops))


@dataclass
class MaskConfig:
    start_rate: float = opt(0.2, "share of nodes (or edges) from which a masking walk starts")
    walk_length: int = opt(3, "steps of each masking walk")
    start: Literal["node", "edge"] = opt("node", "walks start from nodes, or from the sources of edges")
    symmetric: bool = opt(True, "hide both directions of a masked edge; recommended for large graphs")
    hide_rate: float = opt(
        0.5,
        "full graph: share of the edges left visible by the walks that each view hides as well, drawn at every step; sampled: see sampler.hide_rate",
    )
    feature_rate: float = opt(0.2, "share of the feature columns that each view sets to zero, drawn at every step")

    def __post_init__(self) -> None:
        need(0 < self.start_rate <= 1, "mask.start_rate", "must lie in (0, 1]", self.start_rate)
        for name in ("hide_rate", "feature_rate"):
            rate = getattr(self, name)
            need(0 <= rate < 1, f"mask.{name}", "must lie in [0, 1)", rate)
        need(self.walk_length >= 1, "mask.walk_length", "must be at least 1", self.walk_length)


@dataclass
class LossConfig:
    structure_weight: float = opt(0.1, "weight of the edge loss; 0: there is no edge decoder")
    factor_weight: float = opt(0.1, "lambda1, weight of the factor reconstruction; 0: no pseudo-labels and no conditional-independence scores are computed")
    cluster_weight: float = opt(0.01, "lambda2, weight of the modularity loss; negative reverses its sign (ablation)")
    sce_power: int = opt(1, "tau, power of the scaled cosine error")
    factor_direction: Literal["paper", "code"] = opt("paper", "paper: scored factors predict the others; code: the reverse")
    factor_cosine: Literal["flat", "per_factor"] = opt("flat", "one cosine per node over all hidden factors (paper), or one per factor (released code)")
    factor_target: Literal["self", "detached", "teacher"] = opt(
        "self",
        "what is reconstructed: the masked view's own factors, the same without a gradient, or the "
        "factors that an averaged copy of the encoder makes of the whole graph",
    )
    teacher_momentum: float = opt(0.99, "share of the averaged copy that a step keeps (factor_target=teacher)")
    redundancy_weight: float = opt(1.0, "weight of the redundancy loss; above 0 each step encodes a second view")
    redundancy_decorrelation: float = opt(1e-3, "mu, weight of the decorrelation of channels in the redundancy loss")
    redundancy: Literal["plain", "conditional"] = opt(
        "plain",
        "which channels are decorrelated: all pairs, or one in F1 with one in F2 given the pseudo-labels",
    )

    @property
    def is_conditional(self) -> bool:
        """Whether the redundancy loss looks at pseudo-labels and at the partition."""
        return self.redundancy_weight > 0 and self.redundancy == "conditional"

    @property
    def uses_partition(self) -> bool:
        return self.factor_weight > 0 or self.is_conditional

    def edges_only(self) -> LossConfig:
        """The edge loss alone: what the encoder behind the first pseudo-labels is trained with."""
        target: Any = "self" if self.factor_target == "teacher" else self.factor_target
        return LossConfig(
            structure_weight=1.0,
            factor_weight=0.0,
            cluster_weight=0.0,
            redundancy_weight=0.0,
            sce_power=self.sce_power,
            factor_direction=self.factor_direction,
            factor_cosine=self.factor_cosine,
            factor_target=target,
        )

    def __post_init__(self) -> None:
        for name in (
            "structure_weight",
            "factor_weight",
            "redundancy_weight",
            "redundancy_decorrelation",
        ):
            value = getattr(self, name)
            need(value >= 0, f"loss.{name}", "must not be negative", value)
        need(
            0 <= self.teacher_momentum < 1,
            "loss.teacher_momentum",
            "must lie in [0, 1)",
            self.teacher_momentum,
        )
        weights = [
            self.structure_weight,
            self.factor_weight,
            self.cluster_weight,
            self.redundancy_weight,
        ]
        need(
            any(weights),
            "loss.structure_weight, loss.factor_weight, loss.cluster_weight and loss.redundancy_weight",
            "must not all be 0: nothing would be trained",
            weights,
        )
        need(1 <= self.sce_power <= 10, "loss.sce_power", "must lie between 1 and 10", self.sce_power)


@dataclass
class ClusterConfig:
    init: Literal["selfkmeans", "rdgae", "dinknet", "propagated", "auto", "file"] = opt(
        "propagated",
        "initial labels: k-means on smoothed features, on an encoder trained with the edge loss alone (selfkmeans), R-DGAE, Dink-Net, "
        "R-DGAE or Dink-Net by size (auto), or a file",
    )
    labels_path: Optional[str] = opt(
        None,
        "(or cluster.from) labels made before: a folder of `cimage cluster`, a .npy of one integer per node (-1: none), or .npz with `labels`, `confidence` (drawn where it is absent)",
    )
    num_clusters: Optional[int] = opt(None, "number of clusters; unset: the graph's number of classes; 0, or unset without classes: estimated from the graph")
    init_epochs: int = opt(30, "epochs of the edge-only training of selfkmeans")
    restarts: int = opt(10, "k-means restarts")
    fraction: float = opt(0.15, "share of each cluster that is trusted from the start")
    growth: Literal["any", "mean", "quantile"] = opt("any", "rule by which nodes join the trusted set at a refresh")
    growth_threshold: float = opt(0.99, "cosine from which a node joins")
    growth_agree: bool = opt(False, "a node joins only where the matched member has the same label")
    bank_size: int = opt(8192, "trusted embeddings that others are compared with")

    def __post_init__(self) -> None:
        need(self.init != "file" or self.labels_path is not None, "cluster.labels_path", "must be set when cluster.init is 'file'", self.labels_path)
        need(
            self.num_clusters is None or self.num_clusters == 0 or self.num_clusters >= 2, "cluster.num_clusters", "must be 0 or at least 2", self.num_clusters
        )
        need(0 < self.fraction <= 1, "cluster.fraction", "must lie in (0, 1]", self.fraction)
        need(-1 <= self.growth_threshold <= 1, "cluster.growth_threshold", "is a cosine: it must lie in [-1, 1]", self.growth_threshold)
        for name in ("init_epochs", "restarts", "bank_size"):
            need(getattr(self, name) >= 1, f"cluster.{name}", "must be at least 1", getattr(self, name))


@dataclass
class CIConfig:
    every_steps: int = opt(10, "optimiser steps between refreshes of the trusted set, the scores and the partition")
    partition: Literal["ci", "random", "random_redrawn"] = opt(
        "ci",
        "how factors are split: by conditional-independence scores, or (controls, without labels) "
        "into random halves, one for the whole run or a new one at every refresh",
    )
    normalize: bool = opt(
        True,
        "score factors of unit length (the paper's Z); false: as routing sums them",
    )
    average: float = opt(
        0.5,
        "HSIC statistics are averaged over refreshes, each weighing this much of the next; 0: off",
    )
    features: Literal["channel", "factor_mean"] = opt(
        "channel", "HSIC on all K*c channels, averaged per factor afterwards (paper), or on K factor means (released code)"
    )
    lam: Optional[float] = opt(None, "L1 weight of the score solver; unset: chosen so that about `target` factors are scored")
    target: Optional[int] = opt(None, "wanted number of scored factors when lam is unset; unset: K/2")
    solver: Literal["vi", "nnlasso"] = opt("vi", "variational HSIC lasso, or plain non-negative lasso")
    inner: Literal["cd", "jacobi"] = opt("cd", "inner solver of vi: coordinate descent, or the reference's Jacobi")
    pi: float = opt(0.5, "weight of the conditional term")
    conditional: Literal["constant", "stratified"] = opt("constant", "conditional term by the constant pi, or by within-class blocks (needs solver=nnlasso)")
    block_size: int = opt(20, "samples per HSIC block")
    repeats: Optional[int] = opt(
        None,
        "permutations of the sample; unset: at least 3, and as many as give 500 blocks",
    )
    block_classes: Optional[int] = opt(None, "classes per block; unset: all (5 is advised for more than 20 classes)")
    max_samples: int = opt(20_000, "most samples of a refresh")
    diagnose_every: int = opt(4, "refreshes between full diagnostics of the partition; fewer in short runs")

    def __post_init__(self) -> None:
        for name in ("every_steps", "diagnose_every"):
            need(getattr(self, name) >= 1, f"ci.{name}", "must be at least 1", getattr(self, name))
        if self.repeats is not None:
            need(self.repeats >= 1, "ci.repeats", "must be at least 1", self.repeats)
        need(0 <= self.average < 1, "ci.average", "must lie in [0, 1)", self.average)
        need(self.block_size >= 2, "ci.block_size", "must be at least 2", self.block_size)
        need(self.lam is None or self.lam >= 0, "ci.lam", "must not be negative", self.lam)
        need(self.target is None or self.target >= 1, "ci.target", "must be at least 1", self.target)
        need(0 <= self.pi < 1, "ci.pi", "must lie in [0, 1)", self.pi)
        need(self.conditional == "constant" or self.solver == "nnlasso", "ci.conditional", "is 'stratified', which needs ci.solver=nnlasso", self.conditional)
        need(self.block_classes is None or self.block_classes >= 2, "ci.block_classes", "must be at least 2", self.block_classes)
        need(
            self.block_classes is None or self.block_size % self.block_classes == 0,
            "ci.block_classes",
            f"must divide ci.block_size ({self.block_size})",
            self.block_classes,
        )
        need(self.max_samples >= 2 * self.block_size, "ci.max_samples", "must be at least twice ci.block_size", self.max_samples)


@dataclass
class SamplerConfig:
    fanouts: list[int] = opt([], "neighbours sampled per hop, e.g. [10, 10, 5]; -1: all; empty: train on the full graph")
    batch_edges: int = opt(1024, "seed edges of the global batch, whatever the number of workers")
    backend: Literal["auto", "pyg-lib", "torch-sparse", "csr"] = opt("auto", "neighbour sampler; auto: pyg-lib where present, else our own csr")
    rescale: bool = opt(True, "weight messages by degree / sampled neighbours")
    hide_rate: float = opt(0.3, "share of the other edges hidden from message passing, beside the batch's own")
    loader_processes: int = opt(0, "processes that prepare batches ahead; 0: in the training process")
    prefetch: int = opt(2, "batches each loader process keeps ready")

    def __post_init__(self) -> None:
        need(all(n == -1 or n >= 1 for n in self.fanouts), "sampler.fanouts", "entries must be at least 1, or -1 for all neighbours", self.fanouts)
        need(self.batch_edges >= 2, "sampler.batch_edges", "must be at least 2", self.batch_edges)
        need(0 <= self.hide_rate < 1, "sampler.hide_rate", "must lie in [0, 1)", self.hide_rate)
        need(self.loader_processes >= 0, "sampler.loader_processes", "must not be negative", self.loader_processes)
        need(self.prefetch >= 1, "sampler.prefetch", "must be at least 1", self.prefetch)


@dataclass
class OptimConfig:
    lr_max: float = opt(0.003, "learning rate at the start, or after each restart")
    lr_min: float = opt(0.0, "learning rate at the end of the run, or of each cosine period")
    schedule: Literal["cosine", "restarts"] = opt("cosine", "cosine: once from lr_max to lr_min over the run; restarts: cosine periods (released code)")
    schedule_epochs: int = opt(0, "cosine: epochs after which the rate is lr_min; 0: train.epochs")
    t0_steps: int = opt(10, "restarts: optimiser steps of the first cosine period")
    t_mult: int = opt(2, "restarts: each period is this many times the one before")
    weight_decay: float = opt(0.0, "Adam's L2 penalty")
    clip_norm: float = opt(1.0, "gradient norm is clipped here; 0 turns clipping off")

    def __post_init__(self) -> None:
        need(self.lr_max > 0, "optim.lr_max", "must be positive", self.lr_max)
        need(0 <= self.lr_min <= self.lr_max, "optim.lr_min", "must lie between 0 and optim.lr_max", self.lr_min)
        epochs = self.schedule_epochs
        need(epochs >= 0, "optim.schedule_epochs", "must not be negative", epochs)
        need(self.t0_steps >= 1, "optim.t0_steps", "must be at least 1", self.t0_steps)
        need(self.t_mult >= 1, "optim.t_mult", "must be at least 1", self.t_mult)
        need(self.weight_decay >= 0, "optim.weight_decay", "must not be negative", self.weight_decay)
        need(self.clip_norm >= 0, "optim.clip_norm", "must not be negative", self.clip_norm)


@dataclass
class TrainConfig:
    epochs: int = opt(30, "passes; on the full graph one epoch is one mask, almost always one step")
    batch_edges: int = opt(65_536, "masked edges per optimiser step on the full graph")
    validate_every: int = opt(0, "steps between validation scores during training; 0: never")
    validate_by: Literal["auto", "node", "link"] = opt("auto", "validation score: probe accuracy or link AUC; auto: link when edges are held out")
    select: Literal["last", "val"] = opt("last", "which checkpoint is embedded: the last, or the best by validation score")
    accumulate: int = opt(1, "batches whose mean gradient makes one optimiser step; for steps larger than memory allows")
    precision: Literal["float32", "bfloat16"] = opt("float32", "activations while training; bfloat16 halves their memory, weights and sums stay float32")

    def __post_init__(self) -> None:
        need(self.epochs >= 1, "train.epochs", "must be at least 1", self.epochs)
        need(self.batch_edges >= 1, "train.batch_edges", "must be at least 1", self.batch_edges)
        need(self.accumulate >= 1, "train.accumulate", "must be at least 1", self.accumulate)
        need(self.validate_every >= 0, "train.validate_every", "must not be negative", self.validate_every)
        need(self.select == "last" or self.validate_every > 0, "train.select", "is 'val', so train.validate_every must be above 0", self.select)


@dataclass
class EvalConfig:
    probe: Literal["logistic", "epochs"] = opt(
        "logistic",
        "linear probe: L2-regularised logistic regression trained to convergence, its strength chosen on validation from one grid; "
        "or Adam, its epoch chosen on validation (keys probe_*)",
    )
    probe_lr_max: float = opt(0.01, "learning rate of the probe `epochs`")
    probe_lr_min: float = opt(0.01, "learning rate at the end of each cosine period of the probe `epochs`")
    probe_weight_decay: float = opt(0.0, "weight decay of the probe `epochs`")
    probe_epochs: int = opt(300, "epochs of the probe `epochs`")
    probe_batch: int = opt(20_000, "batch size of the probe `epochs`")
    few_labels: list[int] = opt([], "also probe with this many labels per class, e.g. [2, 5, 18]")
    few_label_splits: int = opt(5, "split seeds of the few-label probe")
    kmeans_restarts: int = opt(10, "k-means restarts when clustering is scored")
    controls: bool = opt(True, "score controls beside the model: raw features, smoothed ones, PageRank, principal components, the untrained encoder")

    def __post_init__(self) -> None:
        need(self.probe_lr_max > 0, "eval.probe_lr_max", "must be positive", self.probe_lr_max)
        need(0 <= self.probe_lr_min <= self.probe_lr_max, "eval.probe_lr_min", "must lie between 0 and eval.probe_lr_max", self.probe_lr_min)
        need(self.probe_weight_decay >= 0, "eval.probe_weight_decay", "must not be negative", self.probe_weight_decay)
        for name in ("probe_epochs", "probe_batch", "few_label_splits", "kmeans_restarts"):
            need(getattr(self, name) >= 1, f"eval.{name}", "must be at least 1", getattr(self, name))
        need(all(n >= 1 for n in self.few_labels), "eval.few_labels", "entries must be at least 1", self.few_labels)


@dataclass
class RunConfig:
    seed: int = opt(0, "seed of everything drawn in this run")
    dir: Optional[str] = opt(None, "run directory; unset: runs/<data.name>/<fingerprint>/seed-<seed>")
    log_every: int = opt(10, "steps between lines in metrics.jsonl")
    checkpoint_every: int = opt(50, "steps between checkpoints; the last step is always saved")
    checkpoint_minutes: float = opt(0.0, "also save when this many minutes have passed since the last checkpoint; 0: never")
    keep_checkpoints: int = opt(2, "how many recent checkpoints stay, beside the best")
    tensorboard: bool = opt(True, "write TensorBoard events")
    mlflow: Optional[str] = opt(None, "also log to MLflow: its tracking URI, e.g. sqlite:///mlflow.db or http://host:5000 (needs the mlflow package)")

    def __post_init__(self) -> None:
        need(0 <= self.seed < 2**62, "run.seed", "must not be negative (nor 2^62 or more)", self.seed)
        need(self.checkpoint_minutes >= 0, "run.checkpoint_minutes", "must not be negative", self.checkpoint_minutes)
        for name in ("log_every", "checkpoint_every", "keep_checkpoints"):
            need(getattr(self, name) >= 1, f"run.{name}", "must be at least 1", getattr(self, name))


@dataclass
class ResourcesConfig:
    num_workers: int = opt(1, "training processes with --on ray")
    min_workers: int = opt(0, "fewest workers an elastic run goes on with; 0: num_workers, not elastic")
    cpus_per_worker: int = opt(1, "CPUs that Ray reserves for each worker")
    threads: int = opt(0, "CPU threads of each process; 0: cpus_per_worker with --on ray, else torch's choice")
    device: Literal["auto", "cpu", "cuda"] = opt("auto", "where tensors live; auto: CUDA where there is one")
    compile: bool = opt(False, "torch.compile the decoders; needs a C++ compiler on a CPU, Triton on a GPU")
    timeout_s: int = opt(600, "seconds after which a hanging collective fails")
    max_failures: int = opt(3, "worker failures after which Ray gives up; each resumes from the last checkpoint")

    def __post_init__(self) -> None:
        for name in ("num_workers", "cpus_per_worker", "timeout_s"):
            need(getattr(self, name) >= 1, f"resources.{name}", "must be at least 1", getattr(self, name))
        for name in ("min_workers", "threads", "max_failures"):
            need(getattr(self, name) >= 0, f"resources.{name}", "must not be negative", getattr(self, name))
        need(self.min_workers <= self.num_workers, "resources.min_workers", f"must not exceed resources.num_workers ({self.num_workers})", self.min_workers)


def describe_objective(cfg: Config) -> str:
    """What a run trains, in words: "redundancy + 0.2 edges + 0.1 factors (ci)"."""
    loss = cfg.loss
    given = "" if loss.redundancy == "plain" else " given pseudo-labels"
    terms = {
        f"redundancy{given}": loss.redundancy_weight,
        "edges": loss.structure_weight,
        "modularity": loss.cluster_weight,
        f"factors ({cfg.ci.partition})": loss.factor_weight,
    }
    shown = [name if weight == 1 else f"{weight:g} {name}" for name, weight in terms.items() if weight]
    return " + ".join(shown)


def describe_encoder(asked: ModelConfig, used: ModelConfig) -> str:
    """The encoder in words; `used` has what the graph led to where `asked` left it open."""
    width = f"width {used.num_factors * used.factor_dim}"
    layers = f"{used.num_layers} {used.propagation} layers"
    teleport = f"teleport {used.teleport:g}"
    width += "" if asked.factor_dim else " (by the number of features)"
    layers += "" if asked.num_layers else " (by the graph's size and density)"
    teleport += "" if asked.teleport is not None else " (found without labels)"
    return f"{used.num_factors} factors x {used.factor_dim} channels = {width}, {used.init} start, {layers}, {teleport}"


@dataclass
class Config:
    data: DataConfig = section(DataConfig, "the graph")
    model: ModelConfig = section(ModelConfig, "encoder and decoders")
    mask: MaskConfig = section(MaskConfig, "edge masking")
    sampler: SamplerConfig = section(SamplerConfig, "neighbour-sampled mini-batches")
    loss: LossConfig = section(LossConfig, "weights of the objective")
    cluster: ClusterConfig = section(ClusterConfig, "pseudo-labels")
    ci: CIConfig = section(CIConfig, "conditional-independence scores")
    optim: OptimConfig = section(OptimConfig, "optimiser and schedule")
    train: TrainConfig = section(TrainConfig, "length, validation, selection")
    eval: EvalConfig = section(EvalConfig, "scores")
    run: RunConfig = section(RunConfig, "seed, directory, logging")
    resources: ResourcesConfig = section(ResourcesConfig, "machines")

    def __post_init__(self) -> None:
        target, factors = self.ci.target, self.model.num_factors
        need(
            target is None or target < factors,
            "ci.target",
            f"must be below model.num_factors ({factors}), or no factor is left to predict",
            target,
        )

    def fanout_mismatch(self) -> str | None:
        """Why the sampled hops do not fit the layers, or None; 0 layers: the graph decides.

        Such a config can be trained, which tests do; plans warn of it and sweeps refuse it.
        """
        hops, model = len(self.sampler.fanouts), self.model
        reach = model.num_layers + (model.tail and model.propagation == "routing")
        is_truncated = model.propagation == "gcn" and hops < reach
        if not hops or not model.num_layers or hops == reach or is_truncated:
            return None
        is_short = hops < reach
        effect = "the outer layers would see no neighbours" if is_short else "the last hops would be sampled for nothing"
        return (
            f"sampler.fanouts has {hops} hops, but model.num_layers={model.num_layers} and "
            f"model.tail={str(model.tail).lower()} reach {reach}: {effect}. Give {reach} fan-outs."
        )


def need(ok: bool, key: str, rule: str, got: Any) -> None:
    if not ok:
        raise UserError(f"{key} {rule}; got {got!r}.")


# Keys that do not change what is trained (where things are, what is scored afterwards): they leave the fingerprint alone.
_NOT_TRAINED = {
    "data": ("path", "root", "store_dir", "stage_dir", "verify"),
    "model": ("routing_backend",),
    "sampler": ("loader_processes", "prefetch"),
    "cluster": ("labels_path",),
    "eval": ("probe", "few_labels", "few_label_splits", "kmeans_restarts", "controls"),
}
_NOT_SCIENCE = ("run", "resources")


# Keys younger than the first fingerprints: at these values they leave a fingerprint as it was.
def fingerprint(cfg: Config) -> str:
    """12 hex digits of the science sections: the same experiment on another machine keeps its name."""
    tree = dataclasses.asdict(cfg)
    for name in _NOT_SCIENCE:
        del tree[name]
    for name, keys in _NOT_TRAINED.items():
        for key in keys:
            del tree[name][key]
    labels = cfg.cluster.labels_path
    if labels is not None:
        # The content counts, not where it lies.
        file = Path(labels) / "labels.npz" if Path(labels).is_dir() else Path(labels)
        tree["cluster"]["labels"] = hashlib.blake2b(file.read_bytes()).hexdigest() if file.is_file() else labels
    return hashlib.blake2b(json.dumps(tree, sort_keys=True).encode(), digest_size=6).hexdigest()


def run_dir(cfg: Config) -> Path:
    return Path(cfg.run.dir) if cfg.run.dir else Path("runs") / cfg.data.name / fingerprint(cfg) / f"seed-{cfg.run.seed}"
