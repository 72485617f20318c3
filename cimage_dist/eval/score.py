"""k-means on embeddings, scored against labels and graph (§6.6, §9.6).

All scores of one embedding matrix, as they are written to eval.json.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from cimage_dist.config import EvalConfig
from cimage_dist.errors import UserError
from cimage_dist.eval.probe import linear_probe, make_pool, pool_score
from cimage_dist.eval.structure import cluster_stability, effective_rank, neighbour_agreement
from cimage_dist.pseudo import cluster_scores, contingency, hard_modularity
from cimage_dist.pseudo.kmeans import kmeans
from cimage_dist.types import NodeSplit, Topology


def score_clustering(
    z: Tensor, y: Tensor | None, num_clusters: int, topology: Topology, seed: int, restarts: int
) -> dict[str, Any]:
    """acc, nmi, ari, f1 in percent and the plain modularity of k-means on row-normalised
    embeddings; without labels the modularity, the stability in percent and the number of clusters.

    z [N, D]; y int64 [N] with -1 for unknown. Nodes of unknown label are clustered too, but not
    scored.
    """
    labels = kmeans(
        F.normalize(z.float(), dim=1, eps=1e-12), num_clusters, seed=seed, restarts=restarts
    ).labels
    scores: dict[str, Any] = {}
    if y is not None and bool((y >= 0).any()):
        table = contingency(labels, y.to(labels.device), num_clusters, 1 + int(y.max()))
        scores = {name: 100.0 * value for name, value in cluster_scores(table).items()}
    else:
        scores = {
            "clusters": num_clusters,
            "stability": cluster_stability(z, num_clusters, seed, restarts),
        }
    return {**scores, "modularity": hard_modularity(labels.to(topology.indices.device), topology)}


FewSplit = Callable[[int, int], NodeSplit]


def score_embedding(
    z: Tensor,
    y: Tensor | None,
    split: NodeSplit | None,
    topology: Topology,
    cfg: EvalConfig,
    seed: int,
    tasks: Sequence[str] = ("node", "cluster"),
    num_clusters: int | None = None,
    few_split: FewSplit | None = None,
) -> dict[str, Any]:
    """Linear probe, few-label probe and clustering of z [N, D] in percent (§9.6, §9.1); a score
    that cannot be had is None with a reason. Without labels its shape too (§9.8).

    y int64 [N] with -1 for unknown. `num_clusters` defaults to the number of classes that occur.
    `few_split(per_class, split_seed)` defaults to the few-label split of the graph layer; its split
    seeds are 0, 1, ..., whatever `seed` is, so that all runs and controls meet the same splits.
    """
    unknown = set(tasks) - {"node", "cluster"}
    if unknown:
        raise UserError(
            f"evaluation: unknown tasks {sorted(unknown)}. An embedding can be scored for: "
            "node, cluster."
        )
    if z.dim() != 2 or z.shape[0] != topology.num_nodes:
        raise UserError(
            f"evaluation: embeddings of shape {list(z.shape)} for a graph of "
            f"{topology.num_nodes} nodes; give a matrix with one row per node, in node order."
        )
    num_bad = sum(int((~chunk.isfinite().all(1)).sum()) for chunk in z.split(65_536))
    if num_bad:
        raise UserError(
            f"evaluation: {num_bad} of {z.shape[0]} embedding rows hold NaN or infinity. Check "
            "the file, or the run that wrote it, for divergence."
        )
    if y is not None and not bool((y >= 0).any()):
        y = None
    scores: dict[str, Any] = {}
    if "node" in tasks:
        scores |= _node_scores(z, y, split, cfg, seed)
        if y is not None and cfg.few_labels:
            scores["few_labels"] = _few_label_scores(z, y, cfg, seed, few_split)
    if "cluster" in tasks:
        scores |= _cluster_scores(z, y, topology, cfg, seed, num_clusters)
        if y is None:
            scores["shape"] = {
                "rank": effective_rank(z),
                "width": z.shape[1],
                "neighbours": neighbour_agreement(z, topology),
            }
    return scores


def _node_scores(
    z: Tensor, y: Tensor | None, split: NodeSplit | None, cfg: EvalConfig, seed: int
) -> dict[str, Any]:
    if y is None:
        return {"node": None, "node_reason": "the graph has no labels"}
    if split is None:
        return {
            "node": None,
            "node_reason": "the graph has no split into training, validation and test nodes",
        }
    if not bool((y[split.train.to(y.device)] >= 0).any()):
        return {"node": None, "node_reason": "no training node has a label"}
    result = linear_probe(z, y, split, cfg, seed, num_classes=1 + int(y.max()))
    found = result.pool
    if found is None and (pool := make_pool(y, split)):
        found = pool_score(z, pool)
    pooled = found.as_dict() if found else {"pool": None, "pool_se": None}
    return {"node": {"val": result.val, "test": result.test, **pooled, "strength": result.strength}}


def _few_label_scores(
    z: Tensor, y: Tensor, cfg: EvalConfig, seed: int, few_split: FewSplit | None
) -> dict[str, Any]:
    """{"2": {"mean", "std", "scores"}, ...}: test accuracies with few labels per class; population
    std over the split seeds.
    """
    if few_split is None:
        from cimage_dist.data.splits import few_label_split

        def few_split(per_class: int, split_seed: int) -> NodeSplit:
            return few_label_split(y, per_class, split_seed)

    table: dict[str, Any] = {}
    for per_class in cfg.few_labels:
        try:
            splits = [
                few_split(per_class, split_seed) for split_seed in range(cfg.few_label_splits)
            ]
        except UserError as error:
            # One class with too few nodes must not cost the other scores.
            table[str(per_class)] = {"mean": None, "std": None, "scores": [], "reason": str(error)}
            continue
        tests = [
            linear_probe(z, y, split, cfg, seed, num_classes=1 + int(y.max())).test
            for split in splits
        ]
        accuracies = [test for test in tests if test is not None]
        mean, std = (
            (statistics.fmean(accuracies), statistics.pstdev(accuracies))
            if accuracies
            else (None, None)
        )
        table[str(per_class)] = {"mean": mean, "std": std, "scores": accuracies}
    return table


def _cluster_scores(
    z: Tensor,
    y: Tensor | None,
    topology: Topology,
    cfg: EvalConfig,
    seed: int,
    num_clusters: int | None,
) -> dict[str, Any]:
    if num_clusters is None:
        if y is None:
            return {
                "cluster": None,
                "cluster_reason": "the graph has no labels, so the number of clusters is unknown",
            }
        num_clusters = int(y[y >= 0].unique().numel())
    return {"cluster": score_clustering(z, y, num_clusters, topology, seed, cfg.kmeans_restarts)}
