"""What a run is given: where the graph comes from and how it is split, where the run is kept and
what it runs on. First, what all sections are made of: a field with its help, and a check that
names its key.
"""

from __future__ import annotations

import dataclasses
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
