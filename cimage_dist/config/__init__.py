"""The one typed configuration: every key with its default, its range and its explanation.
`config_loading.py` reads it from files.

The sections up to `eval` are the science: they make the fingerprint. `run` and `resources` say
where and on what it runs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Optional

from cimage_dist.config.model import (
    AT_LEAST_1,
    NOT_NEGATIVE,
    DataConfig,
    MaskConfig,
    ModelConfig,
    Rule,
    SbmConfig,
    check_fields,
    need,
    opt,
    section,
)
from cimage_dist.config.training import (
    EPOCHS,
    SAMPLED_STEPS,
    CIConfig,
    ClusterConfig,
    EvalConfig,
    LossConfig,
    OptimConfig,
    SamplerConfig,
    TrainConfig,
)
from cimage_dist.errors import UserError

__all__ = [
    "SAMPLED_STEPS",
    "CIConfig",
    "ClusterConfig",
    "Config",
    "DataConfig",
    "EvalConfig",
    "LossConfig",
    "MaskConfig",
    "ModelConfig",
    "OptimConfig",
    "ResourcesConfig",
    "RunConfig",
    "SamplerConfig",
    "SbmConfig",
    "TrainConfig",
    "choices",
    "describe_encoder",
    "describe_objective",
    "fingerprint",
    "need",
    "opt",
    "run_dir",
    "section",
]


@dataclass
class RunConfig:
    seed: int = opt(
        0,
        "seed of everything drawn in this run",
        Rule(lambda n: 0 <= n < 2**62, "must not be negative (nor 2^62 or more)"),
    )
    dir: Optional[str] = opt(
        None,
        "run directory, or its URL on object storage (s3://bucket/run, gs://); unset: "
        "runs/<data.name>/<fingerprint>/seed-<seed>",
    )
    log_every: int = opt(10, "steps between lines in metrics.jsonl", AT_LEAST_1)
    checkpoint_every: int = opt(
        50, "steps between checkpoints; the last step is always saved", AT_LEAST_1
    )
    checkpoint_minutes: float = opt(
        0.0,
        "also save when this many minutes have passed since the last checkpoint; 0: never",
        NOT_NEGATIVE,
    )
    keep_checkpoints: int = opt(2, "how many recent checkpoints stay, beside the best", AT_LEAST_1)
    tensorboard: bool = opt(True, "write TensorBoard events")
    mlflow: Optional[str] = opt(
        None,
        "also log to MLflow: its tracking URI, e.g. sqlite:///mlflow.db or http://host:5000 "
        "(needs the mlflow package)",
    )

    def __post_init__(self) -> None:
        check_fields(self, "run")


@dataclass
class ResourcesConfig:
    num_workers: int = opt(1, "training processes with --on ray", AT_LEAST_1)
    min_workers: int = opt(
        0, "fewest workers an elastic run continues with; 0: num_workers, not elastic", NOT_NEGATIVE
    )
    cpus_per_worker: int = opt(1, "CPUs that Ray reserves for each worker", AT_LEAST_1)
    threads: int = opt(
        0,
        "CPU threads of each process; 0: cpus_per_worker with --on ray, else torch's choice",
        NOT_NEGATIVE,
    )
    device: Literal["auto", "cpu", "cuda"] = opt(
        "auto", "where tensors live; auto: CUDA where there is one"
    )
    compile: bool = opt(
        False, "torch.compile the decoders; needs a C++ compiler on a CPU, Triton on a GPU"
    )
    lost_after_s: int = opt(
        20,
        "seconds without a sign of life after which a worker is taken for lost; all start again",
        AT_LEAST_1,
    )
    timeout_s: int = opt(
        600,
        "seconds after which a collective fails though all workers show signs of life",
        AT_LEAST_1,
    )
    max_failures: int = opt(
        3,
        "worker failures after which Ray gives up; each resumes from the last checkpoint",
        NOT_NEGATIVE,
    )

    def __post_init__(self) -> None:
        check_fields(self, "resources")
        need(
            self.min_workers <= self.num_workers,
            "resources.min_workers",
            f"must not exceed resources.num_workers ({self.num_workers})",
            self.min_workers,
        )


def describe_objective(cfg: Config) -> str:
    """What a run trains, in words: "redundancy + 0.2 edges + 0.1 factors (ci)"."""
    loss = cfg.loss
    terms = {
        "redundancy": loss.redundancy_weight,
        "edges": loss.structure_weight,
        "modularity": loss.cluster_weight,
        f"factors ({cfg.ci.partition})": loss.factor_weight,
        **loss.extra,
    }
    shown = [
        name if weight == 1 else f"{weight:g} {name}" for name, weight in terms.items() if weight
    ]
    return " + ".join(shown)


def describe_encoder(asked: ModelConfig, used: ModelConfig, hops: int = 0) -> str:
    """The encoder in words; `used` has what the graph led to where `asked` left it open. `hops`:
    the sampled ones.
    """
    width = f"width {used.num_factors * used.factor_dim}"
    layers = f"{used.num_layers} {used.propagation} layers"
    teleport = f"teleport {used.teleport:g}"
    width += "" if asked.factor_dim else " (by the number of features)"
    layers += "" if asked.num_layers else " (by the graph's size and density)"
    teleport += "" if asked.teleport is not None else " (found without labels)"
    factors = f"{used.num_factors} factors"
    factors += f" ({used.edge_factors} of them nonlinear)" if used.edge_factors else ""
    layers += f", trained over {hops} hops (sampler.fanouts)" if 0 < hops < used.num_layers else ""
    return (
        f"{factors} x {used.factor_dim} channels = {width}, {used.init} start, {layers}, {teleport}"
    )


def choices(asked: ModelConfig, used: ModelConfig) -> dict[str, dict[str, Any]]:
    """{what: {"value", "by"}}: the encoder's settings that a graph may decide, and who did."""

    def choice(value: float | None, key: str, is_given: bool, otherwise: str) -> dict[str, Any]:
        return {"value": value, "by": f"model.{key}" if is_given else otherwise}

    width = used.num_factors * used.factor_dim
    given = asked.teleport is not None
    return {
        "width": choice(width, "factor_dim", asked.factor_dim > 0, "the number of features"),
        "layers": choice(
            used.num_layers, "num_layers", asked.num_layers > 0, "the graph's size and density"
        ),
        "teleport": choice(used.teleport, "teleport", given, "features and edges"),
    }


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
        trained = self.loss.structure_weight > 0 and len(self.sampler.fanouts) != 1
        need(
            not self.model.edge_factors or trained,
            "model.edge_factors",
            "needs loss.structure_weight above 0, and two sampler.fanouts or none; set it to 0",
            self.model.edge_factors,
        )

    @property
    def epochs(self) -> int:
        """Passes of the run. Where `steps` ends it earlier, the unit in which a sweep counts."""
        return self.train.epochs or EPOCHS

    @property
    def steps(self) -> int | None:
        """Most optimiser steps of the run; None where `epochs` alone decide."""
        is_open = self.train.steps is None and self.train.epochs is None
        return SAMPLED_STEPS if is_open and self.sampler.fanouts else self.train.steps

    def total_batches(self, per_epoch: int) -> int:
        """Batches of the whole run, where a pass over the graph has `per_epoch` of them."""
        passes = self.epochs * per_epoch
        if self.steps is None:
            return passes
        most = self.steps * self.train.accumulate
        return most if self.train.epochs is None else min(most, passes)

    def total_steps(self, per_epoch: int) -> int:
        return math.ceil(self.total_batches(per_epoch) / self.train.accumulate)

    def fanout_mismatch(self) -> str | None:
        """Why the sampled hops do not fit the layers, or None; 0 layers: these follow the hops.

        Pretrain, plans and sweeps refuse such a config. GCN layers only average, so they may be
        trained over fewer hops than they have when they embed.
        """
        hops, model = len(self.sampler.fanouts), self.model
        reach = model.num_layers + (model.tail and model.propagation == "routing")
        is_truncated = model.propagation == "gcn" and hops < reach
        if not hops or not model.num_layers or hops == reach or is_truncated:
            return None
        effect = (
            "the outer layers would see no neighbours"
            if hops < reach
            else "the last hops would be sampled for nothing"
        )
        return (
            f"sampler.fanouts has {hops} hops, but model.num_layers={model.num_layers} and "
            f"model.tail={str(model.tail).lower()} reach {reach}: {effect}. Give {reach} fan-outs."
        )

    def check_fanouts(self) -> None:
        if mismatch := self.fanout_mismatch():
            raise UserError(mismatch)

    def unshared_work(self) -> str | None:
        """Why more workers would not shorten a step, or None."""
        if self.resources.num_workers == 1 or self.sampler.fanouts:
            return None
        return (
            "without sampler.fanouts each of the workers encodes the whole graph at every step; "
            "they share the losses and the labels only. Set sampler.fanouts, e.g. [10,10], or "
            "resources.num_workers=1."
        )


# Keys that do not change what is trained (where things are, what is scored afterwards): they leave
# the fingerprint alone.
_NOT_TRAINED = {
    "data": ("path", "columns", "header", "root", "store_dir", "stage_dir", "verify"),
    "model": ("routing_backend",),
    "sampler": ("loader_processes", "prefetch"),
    "cluster": ("labels_path",),
    "eval": ("probe", "few_labels", "few_label_splits", "kmeans_restarts", "controls"),
}
_NOT_SCIENCE = ("run", "resources")


def _may_have_edges(cfg: Config) -> bool:
    """Whether model.edge_factors=null can stand for any."""
    return cfg.model.propagation == "gcn" and cfg.loss.structure_weight > 0


def _edges_alone(cfg: Config) -> bool:
    """Whether steps may train edge factors more than once."""
    may = cfg.model.edge_factors or (cfg.model.edge_factors is None and _may_have_edges(cfg))
    return bool(may) and cfg.optim.edge_steps > 1 and not cfg.sampler.fanouts


def fingerprint(cfg: Config) -> str:
    """12 hex digits of the science sections: the same experiment on another machine keeps its
    name.
    """
    text = json.dumps(science(cfg), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def science(cfg: Config) -> dict[str, Any]:
    """What decides the result of a run, by section."""
    tree = dataclasses.asdict(cfg)
    for name in _NOT_SCIENCE:
        del tree[name]
    for name, keys in _NOT_TRAINED.items():
        for key in keys:
            del tree[name][key]
    if not cfg.loss.extra:
        del tree["loss"]["extra"]
    if cfg.steps is None:  # as before steps could be given
        tree["train"]["epochs"] = cfg.epochs
    if cfg.train.steps is None:
        del tree["train"]["steps"]
    if cfg.data.holdout_edges == "auto":  # the graph decides: none wherever it has labels
        tree["data"]["holdout_edges"] = "none"
    if not (cfg.model.edge_factors or (cfg.model.edge_factors is None and _may_have_edges(cfg))):
        del tree["model"]["edge_factors"], tree["optim"]["edge_lr"]
    if not _edges_alone(cfg):
        del tree["optim"]["edge_steps"], tree["mask"]["edge_start_rate"]
    labels = cfg.cluster.labels_path
    if labels is not None:
        # The content counts, not its path.
        names = ("labels.npz", "labels.npy", "confidence.npy")
        places = [Path(labels) / name for name in names] if Path(labels).is_dir() else [labels]
        digest, files = hashlib.blake2b(), [Path(p) for p in places if Path(p).is_file()]
        for path in files:
            with path.open("rb") as file:
                while part := file.read(1 << 20):
                    digest.update(part)
        tree["cluster"]["labels"] = digest.hexdigest() if files else labels
    return tree


def is_url(place: str) -> bool:
    """Whether a place is named with its kind of storage: s3://bucket/folder, gs://...,
    file:///...
    """
    return "://" in place


def working_copy(url: str) -> Path:
    """This machine's copy of a run directory on object storage."""
    cache = os.environ.get("CIMAGE_CACHE") or Path.home() / ".cache" / "cimage-dist"
    digest = hashlib.blake2b(url.rstrip("/").encode(), digest_size=6).hexdigest()
    return Path(cache).absolute() / "runs" / f"{url.rstrip('/').rpartition('/')[2]}-{digest}"


def run_dir(cfg: Config) -> Path:
    """Where this machine reads and writes the run's files."""
    if not cfg.run.dir:
        return Path("runs") / cfg.data.name / fingerprint(cfg) / f"seed-{cfg.run.seed}"
    return working_copy(cfg.run.dir) if is_url(cfg.run.dir) else Path(cfg.run.dir)
