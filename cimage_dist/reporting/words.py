"""What a reader who knows neither the method nor its terms is told on the page of a run."""

from __future__ import annotations

GLOSSARY = {
    "Embedding": "A row of numbers for each node, learned so that nodes in similar surroundings "
    "have similar rows. Any ordinary method can work on them: classification, search, clustering.",
    "Control": "What costs no training: the node features themselves (raw), averaged over "
    "neighbours (smoothed, pagerank), their principal components (pca), and our encoder before "
    "training (untrained). An embedding that does not beat them was not worth its time here.",
    "Probe": "A linear classifier fitted on the embedding and the labels of training nodes. Its "
    "accuracy on test nodes, which it never saw, says how much the embedding knows of the classes.",
    "Link AUC, AP": "How well held-out edges are told from pairs without an edge; 50 % is chance "
    "for the AUC.",
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


def introduction(graph: str) -> str:
    return (
        f"What was learned about the graph {graph}: for each node a row of numbers, its embedding, "
        "such that nodes in similar surroundings have similar rows. It was trained without labels: "
        "parts of the graph were hidden and predicted from the rest. Below: how useful the "
        "embedding is beside simple alternatives, a map of it, and how training went."
    )
