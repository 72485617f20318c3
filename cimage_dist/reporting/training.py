"""What a page shows and says of a run. Charts of how training went, from metrics.jsonl alone; for a
reader who knows neither the method nor its terms a glossary, and for a graph without labels what
its scores mean and what to do next.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from cimage_dist.io.artifacts import value_at
from cimage_dist.reporting.charts import Chart, Point, heat, lines, thinned

Records = Sequence[dict[str, Any]]
_MOST_REFRESHES = 60
GLOSSARY = {
    "Embedding": "A row of numbers for each node, learned so that nodes in similar surroundings "
    "have similar rows. Any ordinary method can work on them: classification, search, clustering.",
    "Control": "What costs no training: the node features themselves (raw), averaged over "
    "neighbours (smoothed, pagerank), their principal components (pca), and our encoder before "
    "training (untrained). An embedding that does not beat them was not worth its time here.",
    "Probe": "A linear classifier fitted on the embedding and the labels of training nodes. Its "
    "accuracy on test nodes, which it never saw, says how much the embedding knows of the classes.",
    "Link AUC, AP": "How well held-out edges are distinguished from pairs without an edge; 50 % "
    "is chance for the AUC.",
    "NMI": "Agreement of clusters found in the embedding with the classes, from 0 to 100 %.",
    "CIMAGE": "The method: it hides edges and features, and learns an encoder that predicts what "
    "is hidden, whose output agrees between two such views, and whose parts can be predicted from "
    "each other.",
    "Factor, F1, F2": "The embedding consists of factors, groups of columns. CIMAGE parts them "
    "into two contexts, F1 and F2, and predicts F2 from F1.",
    "Pseudo-label": "A cluster number that stands in for the class, which training does not know.",
    "HSIC": "A measure of dependence: 0 means that two sets of numbers are independent. CIMAGE "
    "looks for contexts that are independent among nodes with the same pseudo-label.",
}


def of_kind(records: Records, kind: str) -> list[dict[str, Any]]:
    return [record for record in records if record["kind"] == kind]


def curve(records: Records, name: str) -> list[Point]:
    return [(record["step"], record[name]) for record in records if record.get(name) is not None]


def curves(records: Records, names: dict[str, str]) -> dict[str, list[Point]]:
    """{shown name: points} of those that were logged; `names` maps keys of records to what a reader
    should see.
    """
    return {shown: found for name, shown in names.items() if (found := curve(records, name))}


def loss_charts(records: Records, best_step: int | None) -> list[Chart]:
    train, val = of_kind(records, "train"), of_kind(records, "val")
    marks = [(best_step, "selected")] if best_step else []
    terms = curves(
        train,
        {
            "structure": "edges",
            "factor": "factors",
            "redundancy": "redundancy",
            "loss": "objective",
        },
    )
    return [
        lines(
            "Loss terms",
            "The objective is edges + λ1 · factors + λ2 · clusters; each term as it enters, "
            "before its weight.",
            "step",
            "loss",
            terms,
            marks,
        ),
        lines(
            "Cluster term",
            "Minus the soft modularity of the graph under the similarity of embeddings: lower "
            "is a better cut.",
            "step",
            "loss",
            curves(train, {"cluster": "clusters"}),
            marks,
        ),
        lines(
            "Validation",
            "What selection sees: validation nodes or held-out validation edges, never test data.",
            "step",
            "percent",
            curves(val, {"score": "validation score"}),
            marks,
        ),
        lines(
            "Gradient norm",
            "Of all weights, after the exchange between workers.",
            "step",
            "norm",
            curves(train, {"grad_norm": "gradient norm"}),
        ),
    ]


def partition_charts(records: Records, num_factors: int) -> list[Chart]:
    """|F1|, the trusted set, scores by refresh, and dependence of the two contexts over time."""
    refreshes = of_kind(records, "ci")
    scored = [r for r in refreshes if r.get("scores")]
    few = thinned(scored, _MOST_REFRESHES)
    values = [[r["scores"][k] for r in few] for k in range(num_factors)] if few else []
    sizes = {"|F1|": [(r["step"], len(r["context"])) for r in refreshes if "context" in r]}
    return [
        lines(
            "Size of the first context",
            f"Factors in F1 at each refresh, of {num_factors}.",
            "step",
            "factors",
            sizes if sizes["|F1|"] else {},
        ),
        lines(
            "Clustering quality",
            "Of the trusted nodes: silhouette of their pseudo-labels in the embedding, and the "
            "share nearest to the centre of its own cluster.",
            "step",
            "",
            curves(
                refreshes, {"silhouette": "silhouette", "own_centre": "nearest to the own centre"}
            ),
        ),
        lines(
            "Trusted nodes",
            "Nodes whose pseudo-label is trusted at each refresh (the scores are computed on "
            "them), and how many of these were not in the initial set.",
            "step",
            "nodes",
            curves(refreshes, {"confident": "trusted", "grown": "added since the start"}),
        ),
        heat(
            "Scores of the factors",
            "Strong: the factor explains the pseudo-labels and stands in F1. A steady pattern "
            "is a settled partition.",
            "step",
            "factor",
            [r["step"] for r in few],
            range(num_factors),
            values,
        ),
        lines(
            "Dependence of F1 and F2 given the labels",
            "Normalised HSIC inside the classes; 0 is conditional independence. Random: "
            "partitions of the same sizes.",
            "step",
            "HSIC",
            curves(
                refreshes,
                {"hsic_given_labels": "this partition", "hsic_random": "random partitions"},
            ),
        ),
        lines(
            "Pseudo-labels from each side",
            "Accuracy of a ridge classifier on held-out trusted nodes.",
            "step",
            "accuracy",
            curves(
                refreshes,
                {
                    "accuracy_f1": "from F1",
                    "accuracy_f2": "from F2",
                    "accuracy_both": "from both",
                    "accuracy_majority": "majority",
                },
            ),
        ),
        lines(
            "Stability and collapse",
            "Overlap of F1 with the one before (Jaccard), and the smallest variance of a factor "
            "in F2: near 0 it has collapsed.",
            "step",
            "",
            curves(
                refreshes,
                {
                    "jaccard_previous": "overlap",
                    "jaccard_previous_chance": "overlap of random sets",
                    "variance_f2_min": "least variance in F2",
                },
            ),
        ),
    ]


def cost_charts(records: Records) -> list[Chart]:
    train = of_kind(records, "train")
    shares = {}
    for name, shown in {
        "sampling_s": "waiting for batches",
        "step_s": "forward, backward, update",
        "exchange_s": "exchange",
    }.items():
        if points := [
            (r["step"], 100 * r[name] / r["seconds"])
            for r in train
            if r.get("seconds") and name in r
        ]:
            shares[shown] = points
    return [
        lines(
            "Speed",
            "Edges to predict per second, of all workers together.",
            "step",
            "edges/s",
            curves(train, {"edges_per_s": "edges/s"}),
        ),
        lines(
            "Where the time goes",
            "Share of the time between two records; the rest is refreshes, validation and "
            "checkpoints.",
            "step",
            "percent",
            shares,
        ),
        lines(
            "Memory",
            "Of the first worker's process.",
            "step",
            "GB",
            curves(train, {"memory_gb": "process", "gpu_memory_gb": "GPU, peak"}),
        ),
    ]


def introduction(graph: str) -> str:
    return (
        f"What was learned about the graph {graph}: for each node a row of numbers, its embedding, "
        "such that nodes in similar surroundings have similar rows. It was trained without labels: "
        "parts of the graph were hidden and predicted from the rest. Below: how useful the "
        "embedding is beside simple alternatives, a map of it, and how training went."
    )


class Score(NamedTuple):
    """`digits` after the point; `meaning` in a few words, with what is good and what is chance."""

    label: str
    digits: int
    meaning: str


SCORES = {
    "link.auc": Score(
        "link AUC",
        2,
        "how often a held-out edge is ranked above a random pair without one; 50 is chance, 100 "
        "perfect",
    ),
    "link.ap": Score(
        "link AP",
        2,
        "the same as average precision, which counts the top of the ranking; 50 is chance",
    ),
    "cluster.modularity": Score(
        "modularity",
        3,
        "how many more edges lie inside the k-means clusters than chance would put there, as a "
        "share; 0 is chance, above 0.3 the clusters follow the graph",
    ),
    "cluster.stability": Score(
        "stability",
        1,
        "agreement (adjusted Rand index) of clusters found on two halves of the nodes; 0 is "
        "chance, 100 the same clusters",
    ),
    "shape.rank": Score(
        "effective rank",
        1,
        "how many directions the rows really use; far below the width they have collapsed",
    ),
    "shape.neighbours": Score(
        "neighbours",
        1,
        "of a node's nearest rows (at most ten) the share that are its neighbours in the "
        "graph; embeddings that only repeat the edges score high too",
    ),
}
_UNSTABLE, _FEW_DIRECTIONS, _NO_GROUPS = 50.0, 0.05, 0.1
LINK_RECIPE = "model.teleport=0.3 optim.lr_max=0.01 loss.factor_weight=0 train.epochs=100"


def is_label_free(result: Mapping[str, Any]) -> bool:
    return bool(result.get("shape"))


def meanings(result: dict[str, Any]) -> list[str]:
    return [
        f"{score.label}: {score.meaning}"
        for path, score in SCORES.items()
        if value_at(result, path) is not None
    ]


def next_steps(result: dict[str, Any]) -> list[str]:
    """What the numbers advise; the control that counts is the best by validation edges."""
    return [*_about_links(result), *_about_clusters(result), *_about_rank(result), *_beyond(result)]


def _about_links(result: dict[str, Any]) -> Iterator[str]:
    best = (result.get("controls_best") or {}).get("any")
    ours = value_at(result, "link.val_auc")
    other = value_at(result, f"controls.{best}.link.val_auc") if best else None
    if ours is None or other is None:
        return
    gap, count = ours - other, int(value_at(result, "link.val_edges") or 1)
    noise = max(1.0, 2 * auc_error(ours, count))
    said = f"on {count:,} validation links the embedding is {abs(gap):.1f} points"
    if gap > noise:
        yield f"{said} above the best control ({best}): training has paid"
    elif gap >= -noise:
        yield (
            f"{said} {'above' if gap > 0 else 'below'} the best control ({best}), within the noise "
            f"of so many ({noise:.1f} points). If links are what you want, try the recipe for "
            f"them: {LINK_RECIPE}"
        )
    else:
        yield (
            f"{said} BELOW {best}, which needs no training. Use that one, or try the recipe for "
            f"links: {LINK_RECIPE}"
        )


def auc_error(auc: float, count: int) -> float:
    """Standard error of an AUC in percent from `count` edges and as many non-edges (Hanley and
    McNeil 1982).
    """
    a = auc / 100
    q1, q2 = a / (2 - a), 2 * a * a / (1 + a)
    variance = a * (1 - a) + (count - 1) * (q1 + q2 - 2 * a * a)
    return 100 * math.sqrt(max(variance, 0.0)) / count


def _about_clusters(result: dict[str, Any]) -> Iterator[str]:
    stability, modularity = (value_at(result, f"cluster.{k}") for k in ("stability", "modularity"))
    if stability is not None and stability < _UNSTABLE:
        yield (
            "the clusters change with the nodes they are found on: do not read them as groups; "
            "try fewer (cluster.num_clusters)"
        )
    if modularity is not None and modularity < _NO_GROUPS:
        yield "the clusters hardly follow the edges: this graph may have no groups of that number"


def _about_rank(result: dict[str, Any]) -> Iterator[str]:
    rank, width = value_at(result, "shape.rank"), value_at(result, "shape.width")
    if rank is not None and width and rank < max(2.0, _FEW_DIRECTIONS * width):
        yield (
            f"the embedding uses {rank:.1f} of {width} directions: it is close to collapse; lower "
            "optim.lr_max, or raise loss.redundancy_decorrelation"
        )


def _beyond(result: dict[str, Any]) -> Iterator[str]:
    yield (
        "a few labels say more than all of these: put labels.csv (id and class of some hundred "
        "nodes) beside the edges, and the scores become accuracy; one run is one seed, so look at "
        "run.seed=1 and 2 before believing a point"
    )
