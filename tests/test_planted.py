"""Do the scores find planted factors? Precision and recall on generated graphs whose label-driven
columns are known.

A trained encoder is free to put anything into any factor, so "the planted factors" of a trained
model are not defined. Here factor k is tied to four feature columns of the store (which its
manifest names label-driven or nuisance), so that the right answer is known:

1. directly: the columns themselves are the factors, raw or smoothed over the graph, with the
   planted blocks as labels;
2. through the encoder: the projection is set to copy columns 4k..4k+3 into factor k, then routing,
   tail, pseudo-labels by k-means on an encoder trained without any label, trusted set, growth,
   statistics and automatic penalty run as in training.

Shown: the scores separate label-driven from nuisance factors when the target is the number of
planted ones, and rank them first when it is not. Not shown: that a trained encoder makes such
factors, or that using them helps downstream. The planted factors are not copies of each other
(every block has its own mean in every column): of near copies the solver keeps few, and recall
would be low by design.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cimage_dist.ci import score_features
from cimage_dist.ci.hsic import block_statistics
from cimage_dist.ci.partition import choose_partition
from cimage_dist.comm import Comm
from cimage_dist.config import Config
from cimage_dist.data.ingest import open_graph
from cimage_dist.data.store import Graph
from cimage_dist.nn.propagate import gcn_smooth
from cimage_dist.train import loop
from cimage_dist.train.refresh import Refresher
from cimage_dist.train.sink import MemorySink
from cimage_dist.train.trainer import Trainer
from cimage_dist.types import CIScores
from tests.settings import ROUTING, changed

WIDTH = 4
SETTINGS = [
    "data.name=sbm",
    "data.sbm.num_nodes=1200",
    "data.sbm.num_blocks=4",
    "data.sbm.avg_degree=10",
    "data.sbm.label_features=16",
    "data.sbm.nuisance_features=48",
    *ROUTING,
    "model.num_factors=16",
    f"model.factor_dim={WIDTH}",
    "model.num_layers=1",
    "model.routing_iterations=3",
    "model.routing_grad=last",
    "model.dropout=0.2",
    "loss.factor_weight=0.5",
    "cluster.init=selfkmeans",
    "cluster.init_epochs=8",
    "cluster.restarts=3",
    "ci.target=4",
]


def planted_graph(store_dir: Path, seed: int) -> tuple[Config, Graph, torch.Tensor]:
    """The graph, and which of its 16 factors of 4 columns are label-driven, from the store's
    manifest.
    """
    cfg = changed(
        [*SETTINGS, f"data.store_dir={store_dir}"], f"data.sbm.seed={seed}", f"run.seed={seed}"
    )
    graph = open_graph(cfg.data)
    first, last = graph.manifest["notes"]["planted"]["label_columns"]
    is_label_driven = torch.zeros(graph.num_features, dtype=torch.bool)
    is_label_driven[first:last] = True
    planted = is_label_driven.view(-1, WIDTH)
    assert bool((planted.all(1) == planted.any(1)).all())  # no factor mixes the two kinds
    return cfg, graph, planted.all(1)


def precision_recall(scores: CIScores, planted: torch.Tensor) -> tuple[float, float]:
    hits = int((scores.in_context & planted).sum())
    return hits / int(scores.in_context.sum()), hits / int(planted.sum())


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("smooth", [False, True], ids=["raw", "smoothed"])
@pytest.mark.parametrize("features", ["channel", "factor_mean"])
def test_scores_find_the_label_driven_columns(features, smooth, seed, store_dir, record_property):
    _, graph, planted = planted_graph(store_dir, seed)
    labels = graph.labels()
    assert labels is not None
    x = graph.features()
    x = gcn_smooth(x, graph.topology().edge_list()) if smooth else x
    h = x.view(graph.num_nodes, -1, WIDTH)
    stats = block_statistics(
        score_features(h, features), labels, torch.arange(graph.num_nodes), seed=seed
    )
    found = choose_partition(
        stats, h.shape[1], features=features, target=int(planted.sum()), seed=seed
    )
    precision, recall = precision_recall(found, planted)
    record_property("precision", precision)
    record_property("recall", recall)
    assert found.status == "ok" and (precision, recall) == (1.0, 1.0)
    # A target twice too large must add nuisance factors, but none may outrank a planted one by
    # much: the best four stay mostly planted.
    wide = choose_partition(stats, h.shape[1], features=features, seed=seed)
    best = wide.scores.argsort(descending=True)[: int(planted.sum())]
    assert int(planted[best].sum()) >= 3


def copying(trainer: Trainer) -> None:
    """Set the projection to the identity: column j of the features becomes channel j."""
    linear = trainer.model.encoder.linear
    with torch.no_grad():
        linear.weight.copy_(torch.eye(linear.out_features, linear.in_features))
        linear.bias.zero_()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_scores_find_them_through_the_encoder_with_pseudo_labels(seed, store_dir, record_property):
    cfg, graph, planted = planted_graph(store_dir, seed)
    topology = graph.topology()
    made = loop.make_labels(cfg, graph, topology, Comm(), MemorySink())
    trainer = Trainer(cfg, graph, topology, Comm())
    copying(trainer)
    refresher = Refresher(
        cfg, made.labels, made.confidence, trainer.embedder, Comm(), trainer.total_steps
    )
    found, record = refresher(trainer.model.encoder, 0, None)
    precision, recall = precision_recall(found, planted)
    record_property("precision", precision)
    record_property("recall", recall)
    assert found.status == "ok" and record["confident"] < 0.3 * graph.num_nodes
    assert (precision, recall) == (1.0, 1.0)
