"""Initial-label methods: a cluster id and a confidence for every node, from features and graph
alone (§6.1, §6.3, §6.4).

Scores of a hard clustering, from its contingency table (§9.6). Shapes: N nodes, C clusters, M
classes, E directed edges.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from cimage_dist.comm import Comm
from cimage_dist.errors import UserError
from cimage_dist.types import Topology

_EDGES_PER_CHUNK = 1 << 24


def contingency(
    pred: Tensor, true: Tensor, num_pred: int, num_true: int, comm: Comm | None = None
) -> Tensor:
    """Collective: T[c, m] = number of nodes in cluster c and class m over all ranks, int64 [C, M];
    nodes with `true` < 0 are left out.

    pred, true int64 [N] of this rank. Empty clusters stay as zero rows.
    """
    known = true >= 0
    pred, true = pred[known], true[known]
    for name, ids, count in (("cluster", pred, num_pred), ("class", true, num_true)):
        wrong = (ids < 0) | (ids >= count)
        if bool(wrong.any()):
            raise UserError(
                f"contingency table: {int(wrong.sum())} {name} ids lie outside 0..{count - 1}, "
                f"the first is {int(ids[wrong][0])}."
            )
    counts = torch.bincount(pred * num_true + true, minlength=num_pred * num_true)
    return (comm or Comm()).sum(counts.view(num_pred, num_true))


def matched_accuracy(table: Tensor) -> float:
    """Share of nodes in their cluster's class under the best one-to-one matching; unmatched
    clusters and classes count as wrong.
    """
    t_CM = _counts(table)
    clusters, classes = _match(t_CM)
    return int(t_CM[clusters, classes].sum()) / int(t_CM.sum())


def matched_labels(table: Tensor) -> Tensor:
    """The class that the best one-to-one matching gives each cluster, int64 [clusters]; -1 where it
    gives none.
    """
    t_CM = _counts(table)
    clusters, classes = _match(t_CM)
    found = np.full(t_CM.shape[0], -1, dtype=np.int64)
    found[clusters] = classes
    return torch.from_numpy(found)


def nmi(table: Tensor) -> float:
    """Mutual information over the arithmetic mean of the two entropies; two trivial partitions
    agree fully (1).
    """
    p_CM = _counts(table).astype(np.float64)
    p_CM /= p_CM.sum()
    p_C, p_M = p_CM.sum(1), p_CM.sum(0)
    mean_entropy = (_entropy(p_C) + _entropy(p_M)) / 2
    if mean_entropy == 0.0:
        return 1.0
    information = _entropy(p_C) + _entropy(p_M) - _entropy(p_CM.ravel())
    return float(min(max(information / mean_entropy, 0.0), 1.0))


def ari(table: Tensor) -> float:
    """Adjusted Rand index 2(tp·tn - fn·fp) / ((tp+fn)(fn+tn) + (tp+fp)(fp+tn)) over ordered pairs
    of nodes; 1 for equal partitions.

    Squares fit int64 up to 3·10⁹ nodes; the products do not, so they are Python integers.
    """
    t_CM = _counts(table)
    n = int(t_CM.sum())
    both, clusters, classes = (int((t * t).sum()) for t in (t_CM, t_CM.sum(1), t_CM.sum(0)))
    tp, fp, fn = both - n, clusters - both, classes - both
    tn = n * n - both - fp - fn
    if fp == 0 and fn == 0:
        return 1.0
    return 2 * (tp * tn - fn * fp) / ((tp + fn) * (fn + tn) + (tp + fp) * (fp + tn))


def macro_f1(table: Tensor) -> float:
    """Mean over the classes that occur of F1 = 2tp / (size of the matched cluster + size of the
    class); 0 for a class without a cluster.
    """
    t_CM = _counts(table)
    t_CM = t_CM[:, t_CM.sum(0) > 0]
    clusters, classes = _match(t_CM)
    f1_M = np.zeros(t_CM.shape[1])
    f1_M[classes] = 2.0 * t_CM[clusters, classes] / (t_CM.sum(1)[clusters] + t_CM.sum(0)[classes])
    return float(f1_M.mean())


def cluster_scores(table: Tensor) -> dict[str, float]:
    """The four scores of a contingency table as fractions (ari may be slightly negative)."""
    scores = {"acc": matched_accuracy, "nmi": nmi, "ari": ari, "f1": macro_f1}
    return {name: score(table) for name, score in scores.items()}


def hard_modularity(labels: Tensor, topology: Topology, comm: Comm | None = None) -> float:
    """Collective: Q = Σ_c [E_cc/2m - (vol_c/2m)²] of a partition, E_cc the directed edges inside c,
    2m all directed edges (§9.6).

    labels int64 [N] for all nodes and the whole topology on every rank; each rank counts its own
    share of the edges, in bounded memory.
    """
    comm = comm or Comm()
    if labels.numel() != topology.num_nodes:
        raise UserError(
            f"modularity: {labels.numel()} labels for a graph of {topology.num_nodes} nodes; "
            "every node needs one."
        )
    if labels.numel() == 0 or topology.num_edges == 0:
        return 0.0
    if int(labels.min()) < 0:
        raise UserError(
            f"modularity: {int((labels < 0).sum())} nodes have no cluster (negative label); "
            "every node needs one."
        )
    num_clusters = 1 + int(labels.max())
    inside = torch.zeros(1, dtype=torch.int64, device=labels.device)
    volume = torch.zeros(num_clusters, dtype=torch.int64, device=labels.device)
    first, last = comm.slice_of(topology.num_edges)
    for begin in range(first, last, _EDGES_PER_CHUNK):
        row_labels = labels[_rows_of(topology.indptr, begin, min(begin + _EDGES_PER_CHUNK, last))]
        column_labels = labels[topology.indices[begin : begin + row_labels.numel()].to(torch.int64)]
        inside += (row_labels == column_labels).sum()
        volume += torch.bincount(row_labels, minlength=num_clusters)
    total = float(topology.num_edges)
    shares = comm.sum(volume).to(torch.float64) / total
    return int(comm.sum(inside)) / total - float(shares.square().sum())


def _rows_of(indptr: Tensor, begin: int, end: int) -> Tensor:
    """Row of each entry begin..end-1 of a compressed matrix, int64 [end - begin], without looking
    at the other entries.
    """
    ends = torch.tensor([begin, end - 1], device=indptr.device)
    first, last = (torch.searchsorted(indptr, ends, right=True) - 1).tolist()
    counts = indptr[first : last + 2].clamp(begin, end).diff()
    return torch.repeat_interleave(counts) + first


def _counts(table: Tensor) -> Any:
    counts = table.cpu().numpy()
    if counts.ndim != 2 or counts.sum() == 0:
        raise UserError(
            "clustering scores need at least one node with a known label; the contingency table "
            "is empty."
        )
    return counts


def _match(t_CM: Any) -> tuple[Any, Any]:
    from scipy.optimize import linear_sum_assignment

    clusters, classes = linear_sum_assignment(t_CM, maximize=True)
    return clusters, classes


def _entropy(p: Any) -> float:
    p = p[p > 0]
    return float(-(p * np.log(p)).sum())
