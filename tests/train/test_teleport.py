"""What the encoder takes from the graph where the config leaves it open: layers and teleport."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.utils import to_undirected

from cimage_dist.comm import Comm
from cimage_dist.config import ModelConfig
from cimage_dist.data.store import Graph
from cimage_dist.io import checkpoint
from cimage_dist.nn.model import model_from_weights
from cimage_dist.train import teleport
from cimage_dist.train.loop import worker
from cimage_dist.train.sink import MemorySink
from cimage_dist.train.teleport import FALLBACK, HIGHEST, LOWEST, choose_teleport, explained, peak
from cimage_dist.train.trainer import Trainer
from tests.procs import run_ranks
from tests.settings import small_sbm_config


def blocks(
    homophily: float, noise: float, nodes: int = 900, degree: int = 6, seed: int = 0
) -> Graph:
    """Three blocks; 60 columns, each the mean of its block plus noise; that share of edges inside a
    block.
    """
    draw = torch.Generator().manual_seed(seed)
    y = torch.arange(nodes) % 3
    source = torch.arange(nodes).repeat_interleave(degree // 2)
    inside = torch.rand(len(source), generator=draw) < homophily
    any_node = torch.randint(nodes, (len(source),), generator=draw)
    target = torch.where(inside, (any_node // 3) * 3 + y[source], any_node).clamp(max=nodes - 1)
    means = torch.randn(3, 60, generator=draw)
    x = means[y] + noise * torch.randn(nodes, 60, generator=draw)
    edges = to_undirected(torch.stack([source, target])[:, source != target])
    return Graph.from_data(Data(x=x, edge_index=edges, num_nodes=nodes), normalize="none")


def test_explained_is_that_of_a_ridge_regression_written_out() -> None:
    draw = torch.Generator().manual_seed(0)
    power = torch.randn(3, 40, 5, generator=draw, dtype=torch.float64)
    target = torch.randn(40, 4, generator=draw, dtype=torch.float64)
    fits = torch.arange(40) % 2 == 0
    found = explained(power, target, fits)
    for at, alpha in enumerate(teleport._GRID):
        z = alpha * power[0] + alpha * (1 - alpha) * power[1] + (1 - alpha) ** 2 * power[2]
        a, b = (z - z[fits].mean(0)).numpy(), (target - target[fits].mean(0)).numpy()
        seen, hidden = fits.numpy(), ~fits.numpy()
        gram = a[seen].T @ a[seen]
        errors = []
        for ridge in teleport._RIDGES:
            weight = np.linalg.solve(
                gram + ridge * np.trace(gram) / 5 * np.eye(5), a[seen].T @ b[seen]
            )
            errors.append(((b[hidden] - a[hidden] @ weight) ** 2).sum())
        assert float(found[at]) == pytest.approx(
            1 - min(errors) / (b[hidden] ** 2).sum(), abs=1e-10
        )


def test_peak_is_the_vertex_between_grid_points() -> None:
    odds = torch.tensor(teleport._GRID, dtype=torch.float64).logit()
    vertex = torch.tensor(0.27, dtype=torch.float64).logit()
    assert peak(-((odds - vertex) ** 2)) == pytest.approx(0.27)
    assert peak(torch.arange(len(odds)).double()) == teleport._GRID[-1]
    assert peak(-torch.arange(len(odds)).double()) == teleport._GRID[0]


def test_noisy_features_of_alike_neighbours_ask_for_much_smoothing() -> None:
    graph = blocks(homophily=0.9, noise=4.0)
    assert choose_teleport(graph, graph.topology()).alpha == LOWEST


def test_columns_that_share_nothing_but_their_scale_ask_for_much_smoothing() -> None:
    """Counts of twelve independent words: in unit rows, much of one means little of the others."""
    draw = np.random.default_rng(0)
    made = blocks(homophily=0.9, noise=1.0)
    rates = 1 + draw.random((3, 12))
    x = torch.from_numpy(draw.poisson(rates[np.arange(made.num_nodes) % 3])).float()
    edges = made.topology().edge_list()
    data = Data(x=x, edge_index=torch.stack([edges.src, edges.dst]), num_nodes=made.num_nodes)
    graph = Graph.from_data(data, normalize="unit")
    assert choose_teleport(graph, graph.topology()).alpha == LOWEST


def test_neighbours_that_tell_nothing_ask_for_little() -> None:
    graph = blocks(homophily=0.0, noise=0.5)
    found = choose_teleport(graph, graph.topology())
    assert found.alpha == HIGHEST and found.best is not None and found.best > 0.5


def test_between_the_two_lies_what_is_between() -> None:
    found = [
        choose_teleport(g, g.topology()).best
        for g in (blocks(0.8, noise) for noise in (4.0, 1.5, 0.5))
    ]
    assert all(value is not None for value in found)
    assert found == sorted(found) and found[0] != found[-1]


@pytest.mark.parametrize("graph", ["unrelated columns", "few nodes", "few columns", "constant"])
def test_where_nothing_can_be_learnt_the_fallback_says_so(graph: str) -> None:
    made = blocks(0.8, 1.0, nodes=90 if graph == "few nodes" else 900)
    x = made.features()
    if graph == "unrelated columns":
        x = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    if graph == "few columns":
        x = x[:, :5]
    if graph == "constant":
        x = torch.ones_like(x)
    edges = made.topology().edge_list()
    data = Data(x=x, edge_index=torch.stack([edges.src, edges.dst]), num_nodes=x.shape[0])
    other = Graph.from_data(data, normalize="none")
    found = choose_teleport(other, other.topology())
    assert found.alpha == FALLBACK and found.best is None and "fallback" in str(found)


def test_sampled_neighbourhoods_that_hold_all_neighbours_give_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = blocks(homophily=0.7, noise=1.0, degree=2)
    whole = choose_teleport(graph, graph.topology())
    monkeypatch.setattr(teleport, "_WHOLE_BELOW", 100)
    monkeypatch.setattr(teleport, "_SAMPLED_NODES", graph.num_nodes)
    monkeypatch.setattr(teleport, "_FANOUTS", (-1, -1, -1, -1))
    sampled = choose_teleport(graph, graph.topology())
    assert whole.best is not None and sampled.best == pytest.approx(whole.best, rel=1e-4)


def test_a_large_graph_is_sampled_and_comes_close(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = blocks(homophily=0.7, noise=1.0, nodes=3000)
    whole = choose_teleport(graph, graph.topology())
    monkeypatch.setattr(teleport, "_WHOLE_BELOW", 1000)
    sampled = choose_teleport(graph, graph.topology())
    assert abs(sampled.alpha - whole.alpha) <= 0.08


@pytest.mark.parametrize(
    ("nodes", "edges", "layers"),
    [
        (2708, 10556, 4),
        (13752, 491722, 2),
        (10**8, 3 * 10**9, 5),
        (10**6, 10**6, 6),
        (50, 2400, 2),
        (10, 0, 2),
    ],
)
def test_layers_by_size_and_density(nodes: int, edges: int, layers: int) -> None:
    assert ModelConfig().sized(100, nodes, edges).num_layers == layers
    assert ModelConfig().sized(100, nodes, edges, hops=7).num_layers == 7
    assert ModelConfig(num_layers=3).sized(100, nodes, edges, hops=7).num_layers == 3


def test_weights_alone_tell_how_far_they_reach(store_dir: Path, small_sbm: Graph) -> None:
    cfg = small_sbm_config(store_dir)
    assert cfg.model.teleport is None and cfg.model.num_layers == 0
    trainer = Trainer(cfg, small_sbm, small_sbm.topology(), Comm())
    used = trainer.model.encoder.cfg
    weights = checkpoint.model_weights(checkpoint.pack_model(trainer.model))
    assert model_from_weights(cfg, weights).encoder.cfg == used
    # A resumed run follows its weights, whatever this machine would choose.
    other = replace(cfg, model=replace(cfg.model, teleport=0.3721, num_layers=5))
    far = Trainer(other, small_sbm, small_sbm.topology(), Comm())
    far.model.load_state_dict(trainer.model.state_dict())
    far.model.encoder.follow_weights()
    assert far.model.encoder.cfg == used
    assert (
        model_from_weights(
            cfg, dict(Trainer(other, small_sbm, small_sbm.topology(), Comm()).model.state_dict())
        ).encoder.alpha
        == 0.3721
    )


def test_what_was_chosen_is_recorded(store_dir: Path, small_sbm: Graph) -> None:
    sink = MemorySink()
    trainer = worker(small_sbm_config(store_dir, "train.epochs=2"), Comm(), sink, small_sbm)
    record = next(r for r in sink.records if r["kind"] == "encoder")
    assert record["teleport"] == trainer.model.encoder.alpha
    assert (
        "found without labels" in record["described"] and "size and density" in record["described"]
    )


def _reach(comm: Comm, store_dir: Path) -> dict[str, np.ndarray]:
    graph = blocks(0.7, 1.0)
    cfg = small_sbm_config(store_dir)
    return {"reach": Trainer(cfg, graph, graph.topology(), comm).model.encoder.reach.numpy()}


def test_all_ranks_have_what_one_has(store_dir: Path) -> None:
    alone = _reach(Comm(), store_dir)["reach"]
    for found in run_ranks(_reach, 2, store_dir):
        assert (found["reach"] == alone).all()
