"""Runs on sparse features give what they give on the same features stored dense."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from cimage_dist.comm import Comm
from cimage_dist.config import Config
from cimage_dist.config_loading import load_config
from cimage_dist.data.sparse import CsrFeatures
from cimage_dist.data.store import Graph
from cimage_dist.eval import controls
from cimage_dist.nn.inference import embed_graph, encode_rows
from cimage_dist.nn.projection import dropout, placed, project_rows
from cimage_dist.train.refresh import SampledEmbedder
from cimage_dist.train.teleport import choose_teleport
from cimage_dist.train.trainer import Trainer
from cimage_dist.types import NodeSplit, SparseRows

NODES, FEATURES, CLASSES = 240, 200, 3
BASE = [
    "model.num_factors=4",
    "model.factor_dim=4",
    "model.num_layers=2",
    "model.dropout=0.3",
    "mask.feature_rate=0.2",
    "loss.factor_weight=0",
    "train.epochs=3",
]
SAMPLED = ["sampler.fanouts=[4,3]", "sampler.batch_edges=64", "sampler.backend=csr"]


@pytest.fixture(scope="module")
def pair() -> tuple[Graph, Graph]:
    """(dense, sparse): three blocks that prefer words of their own."""
    draw = np.random.default_rng(0)
    y = np.arange(NODES) % CLASSES
    near = draw.random((NODES, NODES)) < np.where(y[:, None] == y, 0.06, 0.01)
    own = np.arange(FEATURES)[None] % CLASSES == y[:, None]
    x = (draw.random((NODES, FEATURES)) < np.where(own, 0.12, 0.02)).astype(np.float32)
    graph = Graph.from_edges(np.stack(np.nonzero(np.triu(near, 1))), x, y, num_nodes=NODES)
    assert isinstance(graph.x, CsrFeatures)
    dense = Graph("data", graph.indptr, graph.indices, np.asarray(graph.x), graph.y)
    return dense, graph


@pytest.fixture
def double() -> Iterator[None]:
    """In double precision the two differ by rounding alone, which optimisers do not blow up."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def trained(graph: Graph, cfg: Config, steps: int = 3) -> tuple[Trainer, list[dict[str, float]]]:
    trainer, terms = Trainer(cfg, graph, graph.topology(), Comm()), []
    for batch, _ in zip(trainer.remaining(), range(steps), strict=False):
        assert isinstance(batch[0].x, SparseRows) or isinstance(graph.x, np.ndarray)
        terms.append({name: float(value) for name, value in trainer.advance(batch).items()})
    trainer.settle()
    return trainer, terms


@pytest.mark.parametrize("norm", ["auto", "moments", "batch"])
@pytest.mark.parametrize("mode", [[], SAMPLED], ids=["whole", "sampled"])
def test_training_and_embedding(
    pair: tuple[Graph, Graph], double: None, mode: list[str], norm: str
) -> None:
    cfg = load_config(overrides=[*BASE, *mode, f"model.norm={norm}"])
    (a, terms), (b, others) = (trained(graph, cfg) for graph in pair)
    for one, other in zip(terms, others, strict=True):
        assert one == pytest.approx(other, abs=1e-9)
    topology, gids = pair[0].topology(), torch.tensor([5, 0, 239, 17])
    z = [embed_graph(t.model.encoder, t.graph.rows(), topology) for t in (a, b)]
    torch.testing.assert_close(z[0], z[1], atol=1e-6, rtol=0)
    sampled = load_config(overrides=[*BASE, *SAMPLED])
    found = []
    for trainer in (a, b):
        embedder = SampledEmbedder(trainer.graph.x, topology, sampled, torch.device("cpu"))
        found.append(embedder(trainer.model.encoder, gids, 3).z)
    torch.testing.assert_close(found[0], found[1], atol=1e-9, rtol=0)


def test_whole_graph_training_has_the_same_bits(pair: tuple[Graph, Graph]) -> None:
    """Few non-zeros were multiplied sparsely before they were stored so."""
    cfg = load_config(overrides=BASE)
    dense, graph = pair
    steps = [Trainer(cfg, g, g.topology(), Comm()) for g in (dense, graph)]
    for batches in zip(*(t.remaining() for t in steps), strict=True):
        terms = [t.advance(batch) for t, batch in zip(steps, batches, strict=True)]
        assert terms[0] == terms[1]


def test_rows_are_projected_in_pieces_as_at_once(pair: tuple[Graph, Graph]) -> None:
    trainer, _ = trained(pair[1], load_config(overrides=BASE), 1)
    encoder = trainer.model.encoder.eval()
    whole = encoder.project(pair[0].features()).flatten(1)
    parts = encode_rows(
        encoder,
        0,
        slice(10, 100),
        pair[0].topology(),
        lambda gids: pair[1].x[gids.numpy()],
        max_floats=20 * FEATURES,
    )
    torch.testing.assert_close(torch.cat(list(parts)), whole[10:100], atol=1e-6, rtol=0)


def test_dropout_by_place_is_that_of_dense_rows(pair: tuple[Graph, Graph]) -> None:
    linear = torch.nn.Linear(FEATURES, 5)
    x = replace(pair[1].rows(), draws_by_place=True)
    found = []
    for rows in (pair[0].features(), x):
        torch.manual_seed(3)
        found.append(project_rows(rows, linear, 0.4, True))
    torch.testing.assert_close(found[0], found[1], atol=1e-6, rtol=0)
    for dtype in (torch.float32, torch.float64):
        every = torch.rand(1003, dtype=dtype)
        torch.manual_seed(4)
        want = dropout(every, 0.3, True)
        torch.manual_seed(4)
        assert torch.equal(
            dropout(every.flip(0), 0.3, True, torch.arange(1003).flip(0)).flip(0), want
        )


def test_teleport_is_chosen_alike(
    pair: tuple[Graph, Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in (200_000, 100):  # the whole graph, and sampled neighbourhoods
        monkeypatch.setattr("cimage_dist.train.teleport._WHOLE_BELOW", limit)
        monkeypatch.setattr("cimage_dist.train.teleport._SAMPLED_NODES", 200)
        a, b = (choose_teleport(graph, graph.topology()) for graph in pair)
        assert a.alpha == b.alpha and a.best == pytest.approx(b.best, abs=1e-5)


def test_controls_are_alike(pair: tuple[Graph, Graph]) -> None:
    topology, y = pair[0].topology(), pair[0].labels()
    gids = torch.arange(NODES)
    split = NodeSplit(gids % 4 == 0, gids % 4 == 1, gids % 4 > 1)
    dense, sparse = (graph.rows() for graph in pair)
    assert controls.choose(dense, topology, y, split) == controls.choose(sparse, topology, y, split)
    for smoothed in (controls.smooth_features, controls.pagerank_features):
        assert torch.equal(smoothed(dense, topology), smoothed(sparse, topology))


def test_sparse_rows_are_placed_as_tensors_are(pair: tuple[Graph, Graph]) -> None:
    x = placed(pair[1].rows(), torch.device("cpu"), torch.float64)
    assert isinstance(x, SparseRows) and x.value.dtype == torch.float64
    away = placed(pair[1].rows(), torch.device("meta"), torch.float32)  # as a GPU: dense
    assert isinstance(away, torch.Tensor) and away.shape == (NODES, FEATURES)


def test_bfloat16_batches_are_dense(pair: tuple[Graph, Graph]) -> None:
    cfg = load_config(overrides=[*BASE, *SAMPLED, "train.precision=bfloat16"])
    trainer = Trainer(cfg, pair[1], pair[1].topology(), Comm())
    assert isinstance(next(trainer.remaining())[0].x, torch.Tensor)
