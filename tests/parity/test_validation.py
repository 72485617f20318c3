"""Validation on 1, 2 and 3 ranks: the score of one process, from features of which every rank has
its own nodes' only.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from cimage_dist.comm import Comm
from cimage_dist.data.ingest import open_graph
from cimage_dist.data.splits import training_graph
from cimage_dist.data.store import Graph
from cimage_dist.errors import UserError
from cimage_dist.eval.logistic import is_divided, logistic_path
from cimage_dist.eval.score import make_validator
from cimage_dist.pipeline.stages import untrained_model
from tests.procs import run_ranks
from tests.settings import ROUTING, small_sbm_config

KINDS = {
    "nodes": ["model.factor_dim=4"],
    "edges": ["model.factor_dim=4", "data.holdout_edges=link"],
    "routing": [*ROUTING, "model.num_factors=4", "model.factor_dim=4"],
    "reference": [*ROUTING, "model.factor_dim=4", "model.routing_backend=reference"],
}


def own_features(graph: Graph, comm: Comm) -> Graph:
    """The graph as this rank may see it: features of other ranks' nodes are not numbers."""
    begin, end = comm.slice_of(graph.num_nodes)
    x = np.full_like(graph.x, np.nan)
    x[begin:end] = graph.x[begin:end]
    return Graph(graph.name, graph.indptr, graph.indices, x, graph.y, graph.masks)


def validate(comm: Comm, store_dir: Path, kind: str, is_broken: bool = False) -> dict[str, float]:
    cfg = small_sbm_config(store_dir, *KINDS[kind], "train.validate_every=1")
    graph = open_graph(cfg.data)
    model = untrained_model(cfg, graph)
    if is_broken:
        torch.nn.init.constant_(model.encoder.linear.weight, float("nan"))
    topology, links = training_graph(graph, cfg.data, cfg.run.seed)
    found = make_validator(cfg, own_features(graph, comm), topology, links, comm)
    assert found is not None
    try:
        return found(model)
    except UserError as error:
        return {str(error): 0.0}


def validate_all(comm: Comm, store_dir: Path) -> dict[str, dict[str, float]]:
    found = {kind: validate(comm, store_dir, kind) for kind in KINDS}
    return found | {"broken": validate(comm, store_dir, "edges", is_broken=True)}


def test_world_size_does_not_change_the_score(store_dir, small_sbm):
    """Nor whether it is refused: what rank 0 refuses all refuse."""
    alone = validate_all(Comm(), store_dir)
    assert "are NaN or infinite" in next(iter(alone["broken"]))
    assert all(30 < alone[kind]["score"] < 100 for kind in KINDS), "scores that could differ"
    for world in (2, 3):
        for found in run_ranks(validate_all, world, store_dir):
            for kind, scores in alone.items():
                assert found[kind] == pytest.approx(scores, abs=1e-4), kind


def fit_large(comm: Comm) -> tuple[np.ndarray, np.ndarray]:
    """A fit of 9,000 rows: five blocks, of which three ranks have one or two."""
    draw = np.random.default_rng(0)
    x, direction = draw.standard_normal((9000, 12)), draw.standard_normal((12, 4))
    y = (x @ direction + draw.standard_normal((9000, 4))).argmax(1)
    assert is_divided(*x.shape)
    found = logistic_path(x.astype(np.float32), y, 4, (0.01, 1.0, 100.0), comm=comm)
    return found.weight, found.bias


def test_ranks_that_share_a_fit_find_the_same_bits():
    alone = fit_large(Comm())
    for world in (2, 3):
        for found in run_ranks(fit_large, world):
            np.testing.assert_array_equal(found[0], alone[0])
            np.testing.assert_array_equal(found[1], alone[1])
