"""The single-view ablation.

How well each group of factors alone predicts the labels (paper, table of single views).
"""

from __future__ import annotations

from cimage_dist.config import Config
from cimage_dist.data.splits import training_graph
from cimage_dist.data.store import Graph
from cimage_dist.eval.probe import linear_probe
from cimage_dist.nn.inference import embed_graph
from cimage_dist.pipeline import stages


def view_scores(cfg: Config, graph: Graph, read_test: bool = False) -> dict[str, float] | None:
    """Validation accuracy of a linear probe on F1, on F2 and on both, in percent, with the number
    of factors in F1; test accuracy with `read_test`.

    None where there is nothing to compare: no labels to validate on, or no partition
    (loss.factor_weight=0, or all factors on one side).
    """
    split, _ = stages.node_split_or_reason(graph, cfg)
    labels = graph.labels()
    model, saved = stages.load_model(cfg, graph)
    chosen = saved.tensors.get("scores.in_context")
    if split is None or labels is None or chosen is None:
        return None
    if not 0 < int(chosen.sum()) < chosen.numel():
        return None
    topology, _ = training_graph(graph, cfg.data, cfg.run.seed)
    z = embed_graph(model.encoder, graph.rows(), topology).view(
        graph.num_nodes, cfg.model.num_factors, -1
    )
    found: dict[str, float] = {"f1_factors": float(chosen.sum())}
    for name, part in (("f1", z[:, chosen]), ("f2", z[:, ~chosen]), ("both", z)):
        result = linear_probe(
            part.flatten(1),
            labels,
            split,
            cfg.eval,
            cfg.run.seed,
            graph.num_classes,
            read_test=read_test,
        )
        score = result.test if read_test else result.val
        if score is None:
            return None
        found[name] = score
    return found
