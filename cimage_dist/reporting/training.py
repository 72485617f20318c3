"""Charts of how training went, from metrics.jsonl alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cimage_dist.reporting.charts import Chart, Point, heat, lines, thinned

Records = Sequence[dict[str, Any]]
_MOST_REFRESHES = 60


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
