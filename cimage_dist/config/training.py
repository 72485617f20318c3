"""How a run trains: its losses, pseudo-labels, conditional-independence scores, mini-batches,
optimiser and length; and how it is scored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Optional

from cimage_dist import registry
from cimage_dist.config.model import (
    AT_LEAST_1,
    AT_LEAST_2,
    BELOW_1,
    NOT_NEGATIVE,
    POSITIVE,
    UP_TO_1,
    Rule,
    check_fields,
    need,
    opt,
)


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


# How long a run is that says nothing of it. A pass over the whole graph is one step, a sampled one
# may be ten thousand, so the default of sampled runs counts steps.
EPOCHS = 30
SAMPLED_STEPS = 100


@dataclass
class ClusterConfig:
    init: str = opt(
        "propagated",
        "initial labels: k-means on smoothed features (propagated) or on an encoder trained with "
        "the edge loss alone (selfkmeans), rdgae, dinknet, one of these by size (auto), a file "
        "(file), or a registered method",
    )
    labels_path: Optional[str] = opt(
        None,
        "(or cluster.from) labels made before: a folder of `cimage cluster`, a .npy of one "
        "integer per node (-1: none), or .npz with `labels`, `confidence` (drawn where it is "
        "absent)",
    )
    num_clusters: Optional[int] = opt(
        None,
        "number of clusters; unset: the graph's number of classes; 0, or unset without classes: "
        "estimated from the graph",
        Rule(lambda n: n == 0 or n >= 2, "must be 0 or at least 2"),
    )
    init_epochs: int = opt(30, "epochs of the edge-only training of selfkmeans", AT_LEAST_1)
    restarts: int = opt(10, "k-means restarts", AT_LEAST_1)
    fraction: float = opt(0.15, "share of each cluster that is trusted from the start", UP_TO_1)
    growth: Literal["any", "mean", "quantile"] = opt(
        "any", "rule by which nodes join the trusted set at a refresh"
    )
    growth_threshold: float = opt(
        0.99,
        "cosine from which a node joins",
        Rule(lambda x: -1 <= x <= 1, "is a cosine: it must lie in [-1, 1]"),
    )
    growth_agree: bool = opt(False, "a node joins only where the matched member has the same label")
    bank_size: int = opt(8192, "trusted embeddings that others are compared with", AT_LEAST_1)

    def __post_init__(self) -> None:
        check_fields(self, "cluster")
        known = [*registry.clusterer_names(), "selfkmeans", "auto", "file"]
        need(self.init in known, "cluster.init", f"must be one of {', '.join(known)}", self.init)
        need(
            self.init != "file" or self.labels_path is not None,
            "cluster.labels_path",
            "must be set when cluster.init is 'file'",
            self.labels_path,
        )


@dataclass
class CIConfig:
    every_steps: int = opt(
        10,
        "optimiser steps between refreshes of the trusted set, the scores and the partition",
        AT_LEAST_1,
    )
    partition: Literal["ci", "random", "random_redrawn"] = opt(
        "ci",
        "how factors are split: by conditional-independence scores, or (controls, without labels) "
        "into random halves, one for the whole run or a new one at every refresh",
    )
    normalize: bool = opt(
        True, "score factors of unit length (the paper's Z); false: as routing sums them"
    )
    average: float = opt(
        0.5,
        "HSIC statistics are averaged over refreshes, each weighing this much of the next; 0: off",
        BELOW_1,
    )
    features: Literal["channel", "factor_mean"] = opt(
        "channel",
        "HSIC on all K*c channels, averaged per factor afterwards (paper), or on K factor means "
        "(released code)",
    )
    lam: Optional[float] = opt(
        None,
        "L1 weight of the score solver; unset: chosen so that about `target` factors are scored",
        NOT_NEGATIVE,
    )
    target: Optional[int] = opt(
        None, "wanted number of scored factors when lam is unset; unset: K/2", AT_LEAST_1
    )
    solver: Literal["vi", "nnlasso"] = opt(
        "vi", "variational HSIC lasso, or plain non-negative lasso"
    )
    inner: Literal["cd", "jacobi"] = opt(
        "cd", "inner solver of vi: coordinate descent, or the reference's Jacobi"
    )
    pi: float = opt(0.5, "weight of the conditional term", BELOW_1)
    conditional: Literal["constant", "stratified"] = opt(
        "constant",
        "conditional term by the constant pi, or by within-class blocks (needs solver=nnlasso)",
    )
    block_size: int = opt(20, "samples per HSIC block", AT_LEAST_2)
    repeats: Optional[int] = opt(
        None,
        "permutations of the sample; unset: at least 3, and as many as give 500 blocks",
        AT_LEAST_1,
    )
    block_classes: Optional[int] = opt(
        None, "classes per block; unset: all (5 is advised for more than 20 classes)", AT_LEAST_2
    )
    max_samples: int = opt(20_000, "most samples of a refresh")
    diagnose_every: int = opt(
        4, "refreshes between full diagnostics of the partition; fewer in short runs", AT_LEAST_1
    )

    def __post_init__(self) -> None:
        check_fields(self, "ci")
        need(
            self.conditional == "constant" or self.solver == "nnlasso",
            "ci.conditional",
            "is 'stratified', which needs ci.solver=nnlasso",
            self.conditional,
        )
        need(
            self.block_classes is None or self.block_size % self.block_classes == 0,
            "ci.block_classes",
            f"must divide ci.block_size ({self.block_size})",
            self.block_classes,
        )
        need(
            self.max_samples >= 2 * self.block_size,
            "ci.max_samples",
            "must be at least twice ci.block_size",
            self.max_samples,
        )


@dataclass
class SamplerConfig:
    fanouts: list[int] = opt(
        [],
        "neighbours sampled per hop, e.g. [10, 10, 5]; -1: all; empty: train on the full graph",
        Rule(
            lambda hops: all(n == -1 or n >= 1 for n in hops),
            "entries must be at least 1, or -1 for all neighbours",
        ),
    )
    batch_edges: int = opt(
        1024, "seed edges of the global batch, whatever the number of workers", AT_LEAST_2
    )
    backend: Literal["auto", "pyg-lib", "torch-sparse", "csr"] = opt(
        "auto", "neighbour sampler; auto: our own csr, drawn by seed, step and node alone"
    )
    rescale: bool = opt(True, "weight messages by degree / sampled neighbours")
    hide_rate: float = opt(
        0.3, "share of the other edges hidden from message passing, beside the batch's own", BELOW_1
    )
    loader_processes: int = opt(
        0, "processes that prepare batches ahead; 0: in the training process", NOT_NEGATIVE
    )
    prefetch: int = opt(2, "batches each loader process keeps ready", AT_LEAST_1)

    def __post_init__(self) -> None:
        check_fields(self, "sampler")


@dataclass
class OptimConfig:
    lr_max: float = opt(0.003, "learning rate at the start, or after each restart", POSITIVE)
    edge_lr: float = opt(
        0.01, "lr_max of the edge factors and the edge decoder behind them", POSITIVE
    )
    edge_steps: int = opt(
        10,
        "whole graph: how often a step trains the edge factors and their decoder, each time on a "
        "mask of its own",
        AT_LEAST_1,
    )
    lr_min: float = opt(0.0, "learning rate at the end of the run, or of each cosine period")
    schedule: Literal["cosine", "restarts"] = opt(
        "cosine",
        "cosine: once from lr_max to lr_min over the run; restarts: cosine periods (released code)",
    )
    schedule_epochs: int = opt(
        0, "cosine: epochs after which the rate is lr_min; 0: the whole run", NOT_NEGATIVE
    )
    t0_steps: int = opt(10, "restarts: optimiser steps of the first cosine period", AT_LEAST_1)
    t_mult: int = opt(2, "restarts: each period is this many times the one before", AT_LEAST_1)
    weight_decay: float = opt(0.0, "Adam's L2 penalty", NOT_NEGATIVE)
    clip_norm: float = opt(1.0, "gradient norm is clipped here; 0 turns clipping off", NOT_NEGATIVE)

    def __post_init__(self) -> None:
        check_fields(self, "optim")
        is_between = 0 <= self.lr_min <= self.lr_max
        need(is_between, "optim.lr_min", "must lie between 0 and optim.lr_max", self.lr_min)


@dataclass
class TrainConfig:
    steps: Optional[int] = opt(
        None,
        "most optimiser steps of the run, whatever the number of passes; unset: train.epochs "
        f"decides, and where that is unset too, a sampled run takes {SAMPLED_STEPS} steps",
        AT_LEAST_1,
    )
    epochs: Optional[int] = opt(
        None,
        "passes: on the full graph one is one mask, almost always one step; sampled, one is all "
        f"edges, often thousands of steps. Unset: as train.steps says, else {EPOCHS} on the full "
        "graph",
        AT_LEAST_1,
    )
    batch_edges: int = opt(65_536, "masked edges per optimiser step on the full graph", AT_LEAST_1)
    validate_every: int = opt(
        0, "steps between validation scores during training; 0: never", NOT_NEGATIVE
    )
    validate_by: Literal["auto", "node", "link"] = opt(
        "auto",
        "validation score: probe accuracy over draws of train + val, or link AUC; auto: link "
        "when edges are held out",
    )
    select: Literal["last", "val"] = opt(
        "last", "which checkpoint is embedded: the last, or the best by validation score"
    )
    accumulate: int = opt(
        1,
        "batches whose mean gradient makes one optimiser step; for steps larger than memory allows",
        AT_LEAST_1,
    )
    precision: Literal["float32", "bfloat16"] = opt(
        "float32",
        "activations while training; bfloat16 halves their memory, weights and sums stay float32",
    )

    def __post_init__(self) -> None:
        check_fields(self, "train")
        need(
            self.select == "last" or self.validate_every > 0,
            "train.select",
            "is 'val', so train.validate_every must be above 0",
            self.select,
        )


@dataclass
class EvalConfig:
    probe: Literal["logistic", "epochs"] = opt(
        "logistic",
        "linear probe: L2-regularised logistic regression trained to convergence, its strength "
        "chosen on validation from one grid; "
        "or Adam, its epoch chosen on validation (keys probe_*)",
    )
    probe_lr_max: float = opt(0.01, "learning rate of the probe `epochs`", POSITIVE)
    probe_lr_min: float = opt(
        0.01, "learning rate at the end of each cosine period of the probe `epochs`"
    )
    probe_weight_decay: float = opt(0.0, "weight decay of the probe `epochs`", NOT_NEGATIVE)
    probe_epochs: int = opt(300, "epochs of the probe `epochs`", AT_LEAST_1)
    probe_batch: int = opt(20_000, "batch size of the probe `epochs`", AT_LEAST_1)
    few_labels: list[int] = opt(
        [],
        "also probe with this many labels per class, e.g. [2, 5, 18]",
        Rule(lambda counts: all(n >= 1 for n in counts), "entries must be at least 1"),
    )
    few_label_splits: int = opt(5, "split seeds of the few-label probe", AT_LEAST_1)
    kmeans_restarts: int = opt(10, "k-means restarts when clustering is scored", AT_LEAST_1)
    controls: bool = opt(
        True,
        "score controls beside the model: raw features, smoothed ones, PageRank, principal "
        "components, the untrained encoder",
    )

    def __post_init__(self) -> None:
        check_fields(self, "eval")
        need(
            0 <= self.probe_lr_min <= self.probe_lr_max,
            "eval.probe_lr_min",
            "must lie between 0 and eval.probe_lr_max",
            self.probe_lr_min,
        )
