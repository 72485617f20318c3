"""k-means on embeddings, scored against labels and graph (§6.6, §9.6)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from cimage_dist.pseudo.kmeans import kmeans
from cimage_dist.pseudo.metrics import cluster_scores, contingency, hard_modularity
from cimage_dist.types import Topology


def score_clustering(z: Tensor, y: Tensor | None, num_clusters: int, topology: Topology, seed: int, restarts: int) -> dict[str, float]:
    """acc, nmi, ari, f1 in percent and the plain modularity of k-means on row-normalised embeddings; without labels the modularity alone.

    z [N, D]; y int64 [N] with -1 for unknown. Nodes of unknown label are clustered too, but not scored.
    """
    labels = kmeans(F.normalize(z.float(), dim=1, eps=1e-12), num_clusters, seed=seed, restarts=restarts).labels
    scores: dict[str, float] = {}
    if y is not None and bool((y >= 0).any()):
        table = contingency(labels, y.to(labels.device), num_clusters, 1 + int(y.max()))
        scores = {name: 100.0 * value for name, value in cluster_scores(table).items()}
    return {**scores, "modularity": hard_modularity(labels.to(topology.indices.device), topology)}
