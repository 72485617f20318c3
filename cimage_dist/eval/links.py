"""Ranking scores of link prediction (§9.5).

The score that may steer training: computed from training and validation data, never from test data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cimage_dist.comm import Comm
from cimage_dist.config import Config
from cimage_dist.data.sparse import rows_at
from cimage_dist.data.splits import node_split, settled
from cimage_dist.data.store import Graph
from cimage_dist.errors import UserError
from cimage_dist.eval.logistic import unit_rows
from cimage_dist.eval.probe import make_pool, score_rows
from cimage_dist.nn.inference import encode_share
from cimage_dist.nn.model import CimageModel
from cimage_dist.nn.projection import compact
from cimage_dist.types import LinkSplit, Topology

PairScore = Callable[[Tensor], Tensor]


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


def why_unvalidated(cfg: Config, graph: Graph) -> str | None:
    """One line where a graph has nothing to validate on: neither labels nor held-out edges.

    None where validation is asked for: that is refused by `make_validator`.
    """
    if cfg.train.validate_every:
        return None
    if settled(cfg.data, graph).holdout_edges != "none" or graph.num_classes:
        return None
    return (
        f"graph {graph.name} has no labels and no held-out edges: no validation score, the "
        "last step is the result"
    )


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
