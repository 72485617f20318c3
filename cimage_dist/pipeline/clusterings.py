"""Initial labels by several methods, side by side: how well they fit the graph, its classes where
known, and what they cost.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, cast

import torch

from cimage_dist.ci.pseudolabels import select_confident
from cimage_dist.comm import Comm
from cimage_dist.config import Config
from cimage_dist.data.ingest import open_graph
from cimage_dist.data.splits import training_graph
from cimage_dist.data.store import Graph
from cimage_dist.errors import UserError
from cimage_dist.io.storage import peak_gb
from cimage_dist.pseudo import cluster_scores, contingency, hard_modularity, matched_labels
from cimage_dist.train.initial import SMALL, LabelSet, method_for, number_of_clusters
from cimage_dist.train.loop import make_labels
from cimage_dist.train.progress import Progress
from cimage_dist.train.sink import MemorySink
from cimage_dist.types import Topology

METHODS = ("rdgae", "dinknet", "propagated", "selfkmeans", "file")


def methods_for(cfg: Config, num_nodes: int) -> list[str]:
    """All that can be had: R-DGAE looks at all pairs of nodes, so not on large graphs; a file only
    where one is named.
    """
    absent = {"rdgae"} if num_nodes > SMALL else set()
    return [
        name
        for name in METHODS
        if name not in absent and (name != "file" or cfg.cluster.labels_path)
    ]


def with_method(cfg: Config, method: str, seed: int, num_clusters: int) -> Config:
    cluster = dataclasses.replace(cfg.cluster, init=cast(Any, method), num_clusters=num_clusters)
    return dataclasses.replace(cfg, cluster=cluster, run=dataclasses.replace(cfg.run, seed=seed))


def compare(
    cfg: Config, methods: Sequence[str], seeds: Sequence[int], progress: Progress
) -> dict[str, Any]:
    """Every method with every seed, each in a process of its own so that its peak memory is its
    own. Labels made before are read, with what they cost then.

    Returns {"graph": ..., "runs": one row per method and seed, "methods": means and spreads over
    the seeds}.
    """
    if unknown := [name for name in methods if name not in (*METHODS, "auto")]:
        raise UserError(
            f"Unknown clustering method {unknown[0]!r}. Choose among {', '.join(METHODS)}."
        )
    if "file" in methods and not cfg.cluster.labels_path:
        raise UserError(
            "The method 'file' needs labels: set cluster.from to a folder of `cimage cluster`, "
            "a .npy or a .npz file."
        )
    graph = open_graph(cfg.data)
    topology, _ = training_graph(graph, cfg.data, cfg.run.seed)
    wanted = list(
        dict.fromkeys(method_for(name, graph.num_nodes) for name in methods)
    ) or methods_for(cfg, graph.num_nodes)
    count = number_of_clusters(cfg, graph, topology, tick=progress.update)
    runs = []
    for method in wanted:
        for seed in seeds[:1] if method == "file" else seeds:
            progress.note(f"{method}, seed {seed}")
            runs.append(_in_own_process(with_method(cfg, method, seed, count), progress.quiet))
    facts = {
        "name": graph.name,
        "fingerprint": graph.fingerprint,
        "nodes": graph.num_nodes,
        "edges": graph.num_edges // 2,
        "classes": graph.num_classes,
    }
    return {
        "graph": facts,
        "clusters": count,
        "runs": runs,
        "methods": {name: summarise([r for r in runs if r["method"] == name]) for name in wanted},
    }


def _in_own_process(cfg: Config, quiet: bool) -> dict[str, Any]:
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return pool.submit(score_method, cfg, quiet).result()
    except BrokenProcessPool:
        raise UserError(
            f"The process of {cfg.cluster.init}, seed {cfg.run.seed}, was killed, most likely "
            "for lack of memory. Labels made so far are kept; "
            "leave the method out with --methods, or run on a machine with more memory."
        ) from None


def score_method(cfg: Config, quiet: bool) -> dict[str, Any]:
    """Make (or find) the labels of a config in this process and score them."""
    if cfg.resources.threads:
        torch.set_num_threads(cfg.resources.threads)
    graph = open_graph(cfg.data)
    topology, _ = training_graph(graph, cfg.data, cfg.run.seed)
    progress = Progress(quiet=quiet)
    found = make_labels(cfg, graph, topology, Comm(), MemorySink(progress))
    progress.close()
    return (
        {"peak_gb": peak_gb()}
        | found.facts
        | {"method": cfg.cluster.init, "seed": cfg.run.seed}
        | score_labels(found, graph, topology, cfg)
    )


def score_labels(found: LabelSet, graph: Graph, topology: Topology, cfg: Config) -> dict[str, Any]:
    """Modularity, sizes and the confident set S (§6.7) from the graph alone; acc, nmi, ari, f1 and
    the accuracy on S, in percent, where classes are known.

    The accuracy on S uses the matching of clusters to classes found on all nodes, as does the
    accuracy over all nodes.
    """
    labels = found.labels
    num_clusters = 1 + int(labels.max())
    confident = select_confident(
        labels,
        found.confidence,
        torch.arange(labels.numel()),
        fraction=cfg.cluster.fraction,
        min_per_cluster=2 * cfg.ci.block_size,
    )
    scores: dict[str, Any] = {
        "clusters_used": int(labels[labels >= 0].unique().numel()),
        "clusters_in_s": int(labels[confident].unique().numel()),
        "s": int(confident.sum()),
        "modularity": hard_modularity(labels, topology) if bool((labels >= 0).all()) else None,
    }
    y = graph.labels()
    known = (y >= 0) & (labels >= 0) if y is not None else torch.zeros_like(confident)
    if y is not None and bool(known.any()):
        table = contingency(labels[known], y[known], num_clusters, graph.num_classes)
        scores |= {name: 100.0 * value for name, value in cluster_scores(table).items()}
        right = matched_labels(table)[labels] == y
        scores["acc_s"] = 100.0 * float(right[confident & known].double().mean())
    return scores


def summarise(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean and standard deviation over seeds of everything numeric; the largest peak."""
    names = [
        name
        for name, value in runs[0].items()
        if isinstance(value, (int, float)) and name not in ("seed", "clusters")
    ]
    values = {name: [run[name] for run in runs if run.get(name) is not None] for name in names}
    body = {
        name: {"mean": statistics.fmean(v), "std": statistics.stdev(v) if len(v) > 1 else 0.0}
        for name, v in values.items()
    }
    body["peak_gb"] = {"mean": max(values["peak_gb"]), "std": 0.0}
    return {"seeds": len(runs), **body}
