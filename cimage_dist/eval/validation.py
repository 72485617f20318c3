"""The score that may steer training: computed from training and validation data, never from test data."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from cimage_dist.config import Config
from cimage_dist.data.splits import node_split
from cimage_dist.data.store import Graph
from cimage_dist.errors import UserError
from cimage_dist.eval.links import PairScore, pick_score, row_scores
from cimage_dist.eval.pool import make_pool, pool_score
from cimage_dist.nn.features import compact
from cimage_dist.nn.inference import embed_graph
from cimage_dist.nn.model import CimageModel
from cimage_dist.types import LinkSplit, Topology


def model_scores(model: CimageModel, z: Tensor) -> dict[str, PairScore]:
    """Scores of pairs by the embedding z [N, D], and by the trained edge decoder where there is one."""
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
    labels = graph.labels()
    if cfg.data.holdout_edges != "none" or (labels is not None and bool((labels >= 0).any())):
        return None
    return f"graph {graph.name} has no labels and no held-out edges: no validation score, the last step is the result"


def make_validator(cfg: Config, graph: Graph, topology: Topology, links: LinkSplit | None) -> Callable[[CimageModel], dict[str, float]] | None:
    """A function model -> {"score": ..., ...} in percent, or None when validation is off.

    By link AUC when edges were held out (or train.validate_by=link), else by accuracy over the draws
    from training and validation nodes (`eval/pool.py`).
    """
    if cfg.train.validate_every == 0:
        return None
    by = cfg.train.validate_by
    if by == "auto":
        by = "link" if links is not None else "node"
    x = compact(graph.features())
    if by == "link":
        if links is None:
            raise UserError("train.validate_by is 'link', but no edges are held out. Set data.holdout_edges=link.")

        def validate_links(model: CimageModel) -> dict[str, float]:
            z = embed_graph(model.encoder, x, topology)
            _, scores = pick_score(model_scores(model, z), links)
            return {"score": scores["auc"], "link_auc": scores["auc"], "link_ap": scores["ap"]}

        return validate_links
    labels = graph.labels()
    if labels is None:
        raise UserError(
            f"Graph {graph.name!r} has no labels to validate on. Set train.validate_every=0 and train.select=last, or hold out edges with data.holdout_edges=link."
        )
    pool = make_pool(labels, node_split(graph, cfg.data, cfg.run.seed))
    if pool is None:
        raise UserError(
            f"The node split of graph {graph.name!r} has too few labelled training and validation nodes to validate on "
            "(at least two of one class). Set train.validate_every=0 and train.select=last, or another data.split."
        )

    def validate_nodes(model: CimageModel) -> dict[str, float]:
        found = pool_score(embed_graph(model.encoder, x, topology), pool)
        return {"score": found.mean, "node_pool": found.mean, "node_pool_se": found.error}

    return validate_nodes
