"""Initial labels: by k-means on an encoder of our own, or from a file."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from cimage_dist.comm import Comm
from cimage_dist.config import Config
from cimage_dist.data.ingest import open_graph
from cimage_dist.data.store import Graph
from cimage_dist.errors import UserError
from cimage_dist.nn.encoder import Encoder, Encoding
from cimage_dist.pseudo import contingency
from cimage_dist.pseudo import nmi as table_nmi
from cimage_dist.train import initial, loop
from cimage_dist.train.initial import (
    LabelSet,
    initial_labels,
    labels_by_kmeans,
    labels_from_file,
    method_for,
    number_of_clusters,
)
from cimage_dist.train.loop import worker
from cimage_dist.train.sink import MemorySink
from cimage_dist.train.trainer import Trainer
from tests.settings import changed, small_sbm_config

MODEL = [
    "model.num_factors=4",
    "model.factor_dim=4",
    "model.num_layers=2",
    "model.routing_iterations=3",
    "model.dropout=0.2",
]
BLOCKS = [
    "data.name=sbm",
    "data.sbm.num_nodes=600",
    "data.sbm.num_blocks=4",
    "data.sbm.avg_degree=12",
    "data.sbm.label_features=8",
    "data.sbm.nuisance_features=8",
    "cluster.init=selfkmeans",
    "cluster.restarts=3",
]


def planted(store_dir: Path, *overrides: str) -> tuple[Config, Graph]:
    cfg = changed([*BLOCKS, f"data.store_dir={store_dir}", *MODEL], *overrides)
    return cfg, open_graph(cfg.data)


def agreement(labels: torch.Tensor, truth: torch.Tensor) -> float:
    return table_nmi(contingency(labels, truth, int(labels.max()) + 1, int(truth.max()) + 1))


def nmi(labels: torch.Tensor, graph: Graph) -> float:
    truth = graph.labels()
    assert truth is not None
    return agreement(labels, truth)


def made(cfg: Config, graph: Graph) -> tuple[torch.Tensor, torch.Tensor]:
    found = loop.make_labels(cfg, graph, graph.topology(), Comm(), MemorySink())
    return found.labels, found.confidence


@pytest.mark.parametrize(
    "kind",
    [
        ["cluster.init_epochs=15"],
        ["cluster.init_epochs=1", "sampler.fanouts=[5,5,5]", "sampler.batch_edges=256"],
    ],
    ids=["full", "sampled"],
)
def test_selfkmeans_finds_planted_blocks(kind, store_dir):
    """Four blocks; shuffled labels of this size have a normalised mutual information near 0.01."""
    cfg, graph = planted(store_dir, *kind)
    labels, confidence = made(cfg, graph)
    assert (
        labels.shape == confidence.shape == (600,)
        and labels.dtype == torch.int64
        and confidence.dtype == torch.float64
    )
    assert set(labels.tolist()) == {0, 1, 2, 3} and bool((confidence >= 0).all())
    found = nmi(labels, graph)
    chance = nmi(labels[torch.randperm(600, generator=torch.Generator().manual_seed(0))], graph)
    assert chance < 0.05 and found > 0.5
    sure = confidence >= confidence.median()
    truth = graph.labels()
    assert truth is not None
    assert agreement(labels[sure], truth[sure]) > found  # what confidence is for


@pytest.mark.parametrize("method", ["rdgae", "dinknet", "propagated"])
def test_other_methods_serve_training_and_tell_of_their_progress(method, store_dir):
    cfg, graph = planted(store_dir, f"cluster.init={method}")
    ticks = []
    found = initial_labels(
        cfg,
        graph,
        graph.topology(),
        lambda: pytest.fail("no encoder is needed"),
        tick=lambda *args: ticks.append(args),
    )
    labels, confidence = found.labels, found.confidence
    assert (
        labels.shape == confidence.shape == (600,)
        and labels.dtype == torch.int64
        and confidence.dtype == torch.float64
    )
    assert int(labels.min()) >= 0 and int(labels.max()) < 4 and ticks
    assert nmi(labels, graph) > 0.3  # shuffled labels give about 0.01


def test_the_method_goes_by_size():
    assert [method_for("auto", n) for n in (2_708, 25_000, 25_001, 169_343, 111_000_000)] == [
        "rdgae",
        "rdgae",
        "dinknet",
        "dinknet",
        "propagated",
    ]
    assert method_for("selfkmeans", 10**9) == "selfkmeans"


def test_labels_follow_from_the_seed_alone(store_dir):
    cfg, graph = planted(store_dir, "cluster.init_epochs=2")

    graph.path = None  # no label cache

    def run(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(seed)
        return made(cfg, graph)

    (a, ca), (b, cb) = run(1), run(2)
    assert torch.equal(a, b) and torch.equal(ca, cb)


def test_the_edge_only_encoder_is_apart_from_the_main_one(store_dir):
    """Its weights start from another stream, and the run's own first weights do not depend on
    whether labels had to be made.
    """
    cfg, graph = planted(store_dir, "cluster.init_epochs=1", "loss.factor_weight=0.5")
    main = Trainer(cfg, graph, graph.topology(), Comm())
    before = main.model.encoder.linear.weight.clone()
    encoder, _ = loop._edge_only(cfg, graph, graph.topology(), Comm(), MemorySink())
    assert encoder.linear.weight.shape == before.shape and not torch.allclose(
        encoder.linear.weight, before, atol=0.05
    )
    assert torch.equal(main.model.encoder.linear.weight, before)


class TwoWide:
    """Embeddings read off a table; notes how many rows each call asks for."""

    def __init__(self, points: torch.Tensor) -> None:
        self.points = points
        self.calls: list[int] = []

    def __call__(self, encoder: Encoder, gids: torch.Tensor, step: int) -> Encoding:
        self.calls.append(gids.numel())
        rows = self.points[gids].unsqueeze(1)
        return Encoding(rows, rows)


def test_large_graphs_are_fitted_on_a_sample_and_assigned_in_pieces(store_dir, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    truth = torch.randint(0, 3, (2000,), generator=generator)
    points = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])[
        truth
    ] + 0.1 * torch.randn(2000, 3, generator=generator)
    cfg, _ = planted(store_dir)
    whole = TwoWide(points)
    labels, confidence = labels_by_kmeans(None, whole, 2000, 3, cfg, Comm())
    assert whole.calls == [2000]
    monkeypatch.setattr(initial, "_FIT_ROWS", 500)
    monkeypatch.setattr(initial, "_ASSIGN_ROWS", 300)
    pieces = TwoWide(points)
    sampled, sampled_confidence = labels_by_kmeans(None, pieces, 2000, 3, cfg, Comm())
    assert 400 < pieces.calls[0] < 600 and pieces.calls[1:] == [300] * 6 + [200]
    assert agreement(sampled, labels) > 0.99 and agreement(sampled, truth) > 0.95
    assert sampled_confidence.dtype == confidence.dtype == torch.float64
    np.testing.assert_allclose(
        np.corrcoef(sampled_confidence, confidence)[0, 1], 1, atol=0.05
    )  # other centres, nearly the same


def test_the_sampled_fit_runs_in_training(store_dir, monkeypatch):
    monkeypatch.setattr(initial, "_FIT_ROWS", 200)
    monkeypatch.setattr(initial, "_ASSIGN_ROWS", 250)
    overrides = [
        "cluster.init_epochs=1",
        "loss.factor_weight=0.5",
        "train.epochs=1",
        "sampler.fanouts=[5,5,5]",
        "sampler.batch_edges=1024",
        "ci.every_steps=2",
    ]
    cfg, graph = planted(store_dir, *overrides)
    sink = MemorySink()
    worker(cfg, Comm(), sink, graph)
    assert nmi(sink.stored["pseudo-labels"]["labels"], graph) > 0.3
    assert next(r["status"] for r in sink.records if r["kind"] == "ci") == "ok"


def test_number_of_clusters(store_dir):
    cfg, graph = planted(store_dir)
    assert number_of_clusters(cfg, graph, graph.topology()) == 4  # its classes
    cfg.cluster.num_clusters = 5
    assert number_of_clusters(cfg, graph, graph.topology()) == 5
    cfg.cluster.num_clusters = 0
    graph.y = None  # no labels to look at
    assert number_of_clusters(cfg, graph, graph.topology()) == 4
    cfg.cluster.num_clusters = None
    assert number_of_clusters(cfg, graph, graph.topology()) == 4


# ---- kept for later runs


def test_labels_are_made_once_for_all_runs_that_agree(tmp_path, monkeypatch):
    cfg, graph = planted(tmp_path, "cluster.init=propagated", "cluster.fraction=0.2")
    first = loop.make_labels(cfg, graph, graph.topology(), Comm(), MemorySink())
    monkeypatch.setattr(initial, "_make", lambda *args: pytest.fail("made twice"))
    cfg.loss.factor_weight, cfg.cluster.fraction, cfg.optim.lr_max = (
        0.7,
        0.1,
        0.5,
    )  # none of them matters to smoothed features
    again = loop.make_labels(cfg, graph, graph.topology(), Comm(), MemorySink())
    assert (
        torch.equal(first.labels, again.labels)
        and torch.equal(first.confidence, again.confidence)
        and first.facts == again.facts
    )
    folder = Path(first.facts["folder"])
    cfg.cluster.init, cfg.cluster.labels_path = "file", str(folder)
    assert torch.equal(
        loop.make_labels(cfg, graph, graph.topology(), Comm(), MemorySink()).labels, first.labels
    )
    content = bytearray((folder / "labels.npy").read_bytes())
    content[200] ^= 1
    (folder / "labels.npy").write_bytes(bytes(content))
    with pytest.raises(UserError, match=r"cannot be trusted.*checksum"):
        loop.make_labels(cfg, graph, graph.topology(), Comm(), MemorySink())
    monkeypatch.setattr(initial, "_make", lambda *args: (first.labels, first.confidence))
    cfg.cluster.init = "propagated"
    assert (
        loop.make_labels(cfg, graph, graph.topology(), Comm(), MemorySink()).facts["clusters"] == 4
    )  # made again in place of the damaged ones


@pytest.mark.parametrize(
    "change",
    [
        ("run.seed", 1),
        ("cluster.num_clusters", 3),
        ("cluster.init", "dinknet"),
        ("data.holdout_edges", "link"),
    ],
    ids=lambda c: str(c[0]),
)
def test_what_decides_labels_names_them(change, tmp_path, monkeypatch):
    monkeypatch.setattr(
        initial,
        "_make",
        lambda method, settings, cfg, graph, *args: (
            torch.arange(graph.num_nodes) % 2,
            torch.ones(graph.num_nodes),
        ),
    )
    cfg, graph = planted(tmp_path, "cluster.init=propagated")
    before = loop.make_labels(cfg, graph, graph.topology(), Comm(), MemorySink()).facts["folder"]
    section, name = change[0].split(".")
    setattr(getattr(cfg, section), name, change[1])
    assert (
        loop.make_labels(cfg, graph, graph.topology(), Comm(), MemorySink()).facts["folder"]
        != before
    )


def test_labels_of_an_own_encoder_are_shared_by_searches_over_the_other_losses(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(
        initial,
        "_make",
        lambda method, settings, cfg, graph, *args: (
            torch.arange(graph.num_nodes) % 2,
            torch.ones(graph.num_nodes),
        ),
    )
    cfg, graph = planted(tmp_path)

    def folder() -> str:
        return str(
            loop.make_labels(cfg, graph, graph.topology(), Comm(), MemorySink()).facts["folder"]
        )

    before = folder()
    cfg.loss.factor_weight, cfg.ci.target, cfg.train.epochs = 0.9, 2, 7
    assert folder() == before
    cfg.model.dropout = 0.33
    assert folder() != before


def test_a_graph_in_memory_leaves_no_files(store_dir, small_sbm, monkeypatch):
    monkeypatch.setattr(initial, "write_labels", lambda *args: pytest.fail("written"))
    cfg = small_sbm_config(store_dir, "cluster.init=propagated")
    graph = Graph(small_sbm.name, small_sbm.indptr, small_sbm.indices, small_sbm.x, small_sbm.y)
    assert isinstance(
        loop.make_labels(cfg, graph, graph.topology(), Comm(), MemorySink()), LabelSet
    )


# ---- from a file


def test_labels_from_npy_and_npz(tmp_path):
    labels = np.array([0, 2, -1, 1], dtype=np.int16)
    np.save(tmp_path / "labels.npy", labels)
    got, confidence = labels_from_file(tmp_path / "labels.npy", 4)
    assert (
        got.tolist() == [0, 2, -1, 1]
        and got.dtype == torch.int64
        and len(set(confidence.tolist())) == 4
    )
    np.savez(
        tmp_path / "labels.npz",
        labels=labels,
        confidence=np.array([0.5, 0.1, 0.0, 2.0], dtype=np.float32),
    )
    got, confidence = labels_from_file(tmp_path / "labels.npz", 4)
    assert got.tolist() == [0, 2, -1, 1] and confidence.tolist() == pytest.approx(
        [0.5, 0.1, 0.0, 2.0]
    )
    np.savez(tmp_path / "bare.npz", labels=labels)
    bare = labels_from_file(tmp_path / "bare.npz", 4)[1]
    assert len(set(bare.tolist())) == 4 and torch.equal(
        bare, labels_from_file(tmp_path / "bare.npz", 4)[1]
    ), "drawn, always the same"


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"labels": np.array([0, 1, 0])}, r"shape \(3,\).*4 nodes"),
        ({"labels": np.array([[0, 1, 0, 1]])}, r"shape \(1, 4\)"),
        (
            {"labels": np.array([0, 1, 0, 1]), "confidence": np.ones(3)},
            r"confidence of shape \(3,\)",
        ),
        ({"labels": np.array([0.0, 1.0, 0.0, 1.0])}, "float64, not integers"),
        ({"labels": np.array([0, 1, -2, 1])}, "-2 to 1"),
        ({"labels": np.array([0, 0, 0, -1])}, "at least two clusters"),
        ({"labels": np.array([0, 1, 7_000_000, 1])}, "below the number of nodes.*7000000"),
        ({"labels": np.array([-1, -1, -1, -1])}, "at least two clusters"),
        (
            {"labels": np.array([0, 1, 0, 1]), "confidence": np.array([1.0, np.nan, np.inf, 0])},
            "NaN or infinite confidence in 2 rows",
        ),
        (
            {"labels": np.array([0, 1, 0, 1]), "confidence": np.array(["a", "b", "c", "d"])},
            "confidence.*not numbers",
        ),
        ({"other": np.zeros(4)}, "cannot be read.*labels"),
        ({"labels": np.array([0, 1, None, 1], dtype=object)}, "cannot be read"),
    ],
)
def test_bad_label_files_are_explained(arrays, message, tmp_path):
    path = tmp_path / "bad.npz"
    np.savez(path, **arrays)
    with pytest.raises(UserError, match=message) as error:
        labels_from_file(path, 4)
    assert re.search("bad.npz", str(error.value))


def test_missing_truncated_and_foreign_label_files_are_explained(tmp_path):
    with pytest.raises(UserError, match=r"not found.*cluster\.labels_path"):
        labels_from_file(tmp_path / "none.npy", 4)
    np.save(tmp_path / "cut.npy", np.arange(4))
    content = (tmp_path / "cut.npy").read_bytes()
    (tmp_path / "cut.npy").write_bytes(content[:-9])
    (tmp_path / "text.npy").write_text("0\n1\n")
    (tmp_path / "cut.npz").write_bytes(b"PK\x03\x04" + os.urandom(40))
    (tmp_path / "empty.npy").write_bytes(b"")
    for name in ("cut.npy", "text.npy", "cut.npz", "empty.npy", "."):
        with pytest.raises(UserError, match="cannot be read"):
            labels_from_file(tmp_path / name, 4)


def test_a_label_file_drives_training(store_dir, small_sbm, tmp_path):
    truth = small_sbm.labels()
    assert truth is not None
    np.save(tmp_path / "labels.npy", truth.numpy())
    overrides = [
        "loss.factor_weight=0.5",
        "cluster.init=file",
        f"cluster.labels_path={tmp_path / 'labels.npy'}",
        "train.epochs=2",
    ]
    cfg = small_sbm_config(store_dir, *MODEL, *overrides)
    sink = MemorySink()
    worker(cfg, Comm(), sink, small_sbm)
    assert torch.equal(sink.stored["pseudo-labels"]["labels"], truth)
    first = next(record for record in sink.records if record["kind"] == "ci")
    assert first["status"] == "ok"
