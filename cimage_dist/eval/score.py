"""All scores of one embedding matrix, as they are written to eval.json: the probe, k-means clusters
against labels and graph (§6.6, §9.6), ranking scores of link prediction (§9.5), and what needs no
label: do its clusters hold, does it use its width, and are a node's nearest rows its neighbours
(§9.8). And the score that may steer training: of training and validation data, never of test data.

Shapes: N nodes, D columns. The label-free scores work on unit rows; their samples are keyed, the
same for every embedding.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cimage_dist import keyed
from cimage_dist.comm import Comm
from cimage_dist.config import Config, EvalConfig
from cimage_dist.data.sparse import rows_at
from cimage_dist.data.splits import few_label_split, node_split
from cimage_dist.data.store import Graph
from cimage_dist.errors import UserError
from cimage_dist.eval.logistic import unit_rows
from cimage_dist.eval.probe import linear_probe, make_pool, pool_score, score_rows
from cimage_dist.nn.inference import encode_share
from cimage_dist.nn.model import CimageModel
from cimage_dist.nn.projection import compact
from cimage_dist.pseudo import ari, cluster_scores, contingency, hard_modularity
from cimage_dist.pseudo.kmeans import assign, kmeans
from cimage_dist.types import LinkSplit, NodeSplit, Topology

_NEAREST = 10
_RANK_ROWS = 2048
_CLUSTERED_ROWS = 20_000
_HALVINGS = 2
_QUERIES, _LEAST_QUERIES, _PRODUCTS = 2000, 100, 10**11
_QUERIES_AT_A_TIME = 256
PairScore = Callable[[Tensor], Tensor]


def _sample(nodes: Tensor, most: int, number: int) -> Tensor:
    """At most so many of the ids, ascending; `number`: of the sample, whatever the run's seed."""
    if nodes.numel() <= most:
        return nodes
    draws = keyed.bits(keyed.stream(0, "split", -2, number), nodes)
    return nodes[draws.argsort()[:most]].sort().values


def _unit(z: Tensor) -> Tensor:
    return F.normalize(z.float(), dim=1, eps=1e-12)


@torch.no_grad()
def effective_rank(z: Tensor) -> float:
    """exp of the entropy of the singular values, as shares, of centred unit rows of at most 2,048
    nodes: how many directions the embedding really uses (Roy and Vetterli 2007).

    1 to min(D, 2,047) and 0 where all rows are equal.
    """
    rows = _unit(z[_sample(torch.arange(z.shape[0]), _RANK_ROWS, 0)]).double()
    rows = rows - rows.mean(0)
    gram = rows.T @ rows if rows.shape[1] <= rows.shape[0] else rows @ rows.T
    values = torch.linalg.eigvalsh(gram)
    values = values[values > 1e-9 * max(rows.shape)].sqrt()
    if values.numel() == 0:
        return 0.0
    shares = values / values.sum()
    return float((-(shares * shares.log()).sum()).exp())


@torch.no_grad()
def cluster_stability(z: Tensor, num_clusters: int, seed: int, restarts: int) -> float | None:
    """Mean adjusted Rand index, in percent, of two k-means fitted on halves of the nodes that have
    none in common, over all nodes; None where a half has too few. 100: the same clusters from
    either half; 0: as chance would have it.
    """
    rows = _unit(z[_sample(torch.arange(z.shape[0]), _CLUSTERED_ROWS, 1)])
    ids = torch.arange(rows.shape[0])
    found = []
    for number in range(_HALVINGS):
        is_first = keyed.uniform(keyed.stream(seed, "kmeans", -2, number), ids) < 0.5
        if min(int(is_first.sum()), int((~is_first).sum())) < 2 * num_clusters:
            return None
        one, other = (
            assign(rows, kmeans(rows[half], num_clusters, seed=seed, restarts=restarts).centres)[0]
            for half in (is_first, ~is_first)
        )
        found.append(100.0 * ari(contingency(one, other, num_clusters, num_clusters)))
    return sum(found) / len(found)


@torch.no_grad()
def neighbour_agreement(z: Tensor, topology: Topology) -> float | None:
    """Of a node's nearest rows by cosine, as many as it has neighbours but at most ten, the share
    that are its neighbours, in percent; mean over at most 2,000 nodes. None without edges.
    """
    degrees = topology.degrees()
    size = max(z.shape[0] * z.shape[1], 1)
    most = min(_QUERIES, max(_LEAST_QUERIES, _PRODUCTS // size))
    nodes = _sample(degrees.nonzero().squeeze(1).cpu(), most, 2)
    if nodes.numel() == 0:
        return None
    rows = _unit(z)
    shares = []
    for part in nodes.split(_QUERIES_AT_A_TIME):
        cosine = rows[part] @ rows.T
        cosine[torch.arange(len(part)), part] = -torch.inf
        near = cosine.topk(min(_NEAREST, rows.shape[0] - 1), dim=1).indices
        for node, row in zip(part.tolist(), near, strict=True):
            begin, end = int(topology.indptr[node]), int(topology.indptr[node + 1])
            row = row[: end - begin]
            hits = torch.isin(row, topology.indices[begin:end].to(torch.int64)).sum()
            shares.append(float(hits) / len(row))
    return 100.0 * sum(shares) / len(shares)


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


def score_embedding(
    z: Tensor,
    y: Tensor | None,
    split: NodeSplit | None,
    topology: Topology,
    cfg: EvalConfig,
    seed: int,
    tasks: Sequence[str] = ("node", "cluster"),
    num_clusters: int | None = None,
) -> dict[str, Any]:
    """Linear probe, few-label probe and clustering of z [N, D] in percent (§9.6, §9.1); a score
    that cannot be computed is None with a reason. Without labels its shape too (§9.8).

    y int64 [N] with -1 for unknown. `num_clusters` defaults to the number of classes that occur.
    The splits with few labels have the seeds 0, 1, ..., whatever `seed` is, so that all runs and
    controls meet the same.
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
            scores["few_labels"] = _few_label_scores(z, y, cfg, seed)
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
        reason = "the graph has no split into training, validation and test nodes"
        return {"node": None, "node_reason": reason}
    if not bool((y[split.train.to(y.device)] >= 0).any()):
        return {"node": None, "node_reason": "no training node has a label"}
    result = linear_probe(z, y, split, cfg, seed, num_classes=1 + int(y.max()))
    found = result.pool
    if found is None and (pool := make_pool(y, split)):
        found = pool_score(z, pool)
    pooled = found.as_dict() if found else {"pool": None, "pool_se": None}
    return {"node": {"val": result.val, "test": result.test, **pooled, "strength": result.strength}}


def _few_label_scores(z: Tensor, y: Tensor, cfg: EvalConfig, seed: int) -> dict[str, Any]:
    """{"2": {"mean", "std", "scores"}, ...}: test accuracies with few labels per class; population
    std over the split seeds.
    """
    table: dict[str, Any] = {}
    for per_class in cfg.few_labels:
        found: dict[str, Any] = {"mean": None, "std": None, "scores": []}
        try:
            splits = [few_label_split(y, per_class, i) for i in range(cfg.few_label_splits)]
        except UserError as error:
            # One class with too few nodes must not cost the other scores.
            table[str(per_class)] = found | {"reason": str(error)}
            continue
        num_classes = 1 + int(y.max())
        probes = (linear_probe(z, y, split, cfg, seed, num_classes) for split in splits)
        if scores := [probe.test for probe in probes if probe.test is not None]:
            mean, std = statistics.fmean(scores), statistics.pstdev(scores)
            found = {"mean": mean, "std": std, "scores": scores}
        table[str(per_class)] = found
    return table


def _cluster_scores(
    z: Tensor,
    y: Tensor | None,
    topology: Topology,
    cfg: EvalConfig,
    seed: int,
    num_clusters: int | None,
) -> dict[str, Any]:
    if num_clusters is None and y is not None:
        num_clusters = int(y[y >= 0].unique().numel())
    if num_clusters is None:
        reason = "the graph has no labels, so the number of clusters is unknown"
        return {"cluster": None, "cluster_reason": reason}
    return {"cluster": score_clustering(z, y, num_clusters, topology, seed, cfg.kmeans_restarts)}


@torch.no_grad()
def link_scores(
    score: PairScore, pos: Tensor, neg: Tensor, chunk: int = 262_144
) -> dict[str, float]:
    """Area under the ROC curve and average precision, in percent, of edges `pos` against non-edges
    `neg` (§9.5).

    `score` maps int64 pairs [n, 2] to n logits, higher for likelier edges; pos, neg int64 [n, 2].
    """
    from sklearn.metrics import average_precision_score, roc_auc_score

    if pos.shape[0] == 0 or neg.shape[0] == 0:
        raise UserError(
            f"link scores need edges and non-edges; got {pos.shape[0]} and {neg.shape[0]}. Hold "
            "out a larger share of the edges."
        )
    logits = torch.cat(
        [score(part).reshape(-1).float() for pairs in (pos, neg) for part in pairs.split(chunk)]
    ).cpu()
    if not bool(logits.isfinite().all()):
        raise UserError(
            f"link scores: {int((~logits.isfinite()).sum())} of {logits.numel()} pair scores "
            "are NaN or infinite. The model or the embeddings diverged."
        )
    truth = torch.cat([torch.ones(pos.shape[0]), torch.zeros(neg.shape[0])])
    return {
        "auc": 100.0 * float(roc_auc_score(truth.numpy(), logits.numpy())),
        "ap": 100.0 * float(average_precision_score(truth.numpy(), logits.numpy())),
    }


def row_scores(z: Tensor) -> dict[str, PairScore]:
    """The scores that any embedding z [N, D] offers: of rows as they are, of unit rows, and of
    unit rows after their mean is taken off.
    """
    z = z.float()
    return {
        "dot product": dot_score(z),
        "cosine": dot_score(F.normalize(z, dim=1)),
        "centred cosine": dot_score(F.normalize(z - z.mean(0), dim=1)),
    }


def pick_score(scores: Mapping[str, PairScore], links: LinkSplit) -> tuple[str, dict[str, float]]:
    """(name, validation AUC and AP) of the score that ranks the validation edges best."""
    found = {
        name: link_scores(score, links.val_pos, links.val_neg) for name, score in scores.items()
    }
    name = max(found, key=lambda name: found[name]["auc"])
    return name, found[name]


def dot_score(z: Tensor) -> PairScore:
    """Pairs [n, 2] -> z_u·z_v, for embeddings that come without a decoder. z [N, D]."""

    def score(pairs: Tensor) -> Tensor:
        pairs = pairs.to(z.device)
        return (z[pairs[:, 0]].float() * z[pairs[:, 1]].float()).sum(1)

    return score


def model_scores(model: CimageModel, z: Tensor) -> dict[str, PairScore]:
    """Scores of pairs by the embedding z [N, D], and by the trained edge decoder where there is
    one.
    """
    decoder = model.structure
    if decoder is None:
        return row_scores(z)
    device = next(decoder.parameters()).device

    def score(pairs: Tensor) -> Tensor:
        out: Tensor = decoder.eval()(z.to(device), pairs.to(device))
        return out.detach().cpu()

    return {"decoder": score, **row_scores(z)}


def make_validator(
    cfg: Config, graph: Graph, topology: Topology, links: LinkSplit | None, comm: Comm | None = None
) -> Callable[[CimageModel], dict[str, float]] | None:
    """A collective function model -> {"score": ..., ...} in percent, or None when validation is
    off.

    By link AUC when edges were held out (or train.validate_by=link), else by accuracy over the
    draws from training and validation nodes (`eval/probe.py`). A rank reads the features of its
    own nodes and makes their rows of every layer; ranks share the draws, rank 0 ranks the edges.
    """
    comm = comm or Comm()
    if cfg.train.validate_every == 0:
        return None
    by = cfg.train.validate_by
    if by == "auto":
        by = "link" if links is not None else "node"
    own = slice(*comm.slice_of(graph.num_nodes))
    x = compact(rows_at(graph.x, np.arange(own.start, own.stop)).to(torch.float32))

    def share(rows: Tensor) -> Tensor:
        return comm.share_rows(rows, graph.num_nodes)

    def own_rows(model: CimageModel) -> Tensor:
        return encode_share(model.encoder, x, topology, own, share).z.flatten(1).float()

    if by == "link":
        if links is None:
            raise UserError(
                "train.validate_by is 'link', but no edges are held out. Set "
                "data.holdout_edges=link."
            )

        def validate_links(model: CimageModel) -> dict[str, float]:
            z = share(own_rows(model)).cpu()
            _, scores = comm.from_main(lambda: pick_score(model_scores(model, z), links))
            return {"score": scores["auc"], "link_auc": scores["auc"], "link_ap": scores["ap"]}

        return validate_links
    labels = graph.labels()
    if labels is None:
        raise UserError(
            f"Graph {graph.name!r} has no labels to validate on. Set train.validate_every=0 and "
            "train.select=last, or hold out edges with data.holdout_edges=link."
        )
    pool = make_pool(labels, node_split(graph, cfg.data, cfg.run.seed))
    if pool is None:
        raise UserError(
            f"The node split of graph {graph.name!r} has too few labelled training and "
            "validation nodes to validate on (at least two of one class). Set "
            "train.validate_every=0 and train.select=last, or another data.split."
        )
    pooled = pool.nodes[(pool.nodes >= own.start) & (pool.nodes < own.stop)] - own.start

    def validate_nodes(model: CimageModel) -> dict[str, float]:
        z = comm.gather_rows(own_rows(model).cpu()[pooled])
        found = score_rows(unit_rows(z), pool, comm)
        return {"score": found.mean, "node_pool": found.mean, "node_pool_se": found.error}

    return validate_nodes
