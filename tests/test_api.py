"""The Python interface, used as its readers will use it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data

import cimage_dist
from cimage_dist import Config, Graph, Pretrainer, UserError, evaluate, load_config, open_graph
from cimage_dist.cli.main import main
from tests.conftest import small_sbm_settings

TINY = [
    "model.num_factors=3",
    "model.factor_dim=4",
    "model.num_layers=2",
    "model.routing_iterations=2",
    "train.epochs=4",
    "eval.probe_epochs=10",
    "eval.kmeans_restarts=2",
    "cluster.init=selfkmeans",
    "cluster.init_epochs=3",
    "cluster.restarts=2",
    "ci.every_steps=2",
    "run.log_every=1",
    "run.tensorboard=false",
]
ROUTED = ["model.init=random", "model.propagation=routing", "model.teleport=0", "model.tail=true"]
# Large steps, and a schedule that does not depend on the number of epochs.
BUSY = [*ROUTED, "optim.lr_max=0.5", "optim.schedule=restarts"]
VARIANTS = {
    "plain": [],
    "moments": ["model.norm=moments"],
    "layer": ["model.norm=layer"],
    "factor loss": ["loss.factor_weight=1", "loss.cluster_weight=0.1"],
    "held-out edges": ["data.holdout_edges=link"],
    "routing": ROUTED,
    "best by validation": [*BUSY, "train.validate_every=1", "train.select=val"],
}


@pytest.fixture
def settings(store_dir: Path) -> list[str]:
    return [*small_sbm_settings(store_dir), *TINY]


@pytest.fixture
def cfg(settings: list[str]) -> Config:
    return load_config(overrides=settings)


def test_sample(settings: list[str], tmp_path: Path) -> None:
    """The sample of the README, on a smaller graph."""
    cfg = load_config(overrides=settings)
    graph = open_graph(cfg.data)
    pretrainer = Pretrainer(cfg).fit(graph)
    z = pretrainer.embed(graph)
    scores = evaluate(z, graph, cfg)
    pretrainer.save(tmp_path / "model")
    again = Pretrainer.load(tmp_path / "model").embed(graph)

    assert (
        z.shape == (300, 12)
        and z.dtype == torch.float32
        and bool(z.isfinite().all())
        and not z.requires_grad
    )
    assert torch.equal(again, z)
    assert 0 <= scores["node"]["test"] <= 100 and 0 <= scores["cluster"]["nmi"] <= 100
    assert scores["link"] is None and scores["link_reason"]


@pytest.mark.parametrize("name", VARIANTS)
def test_saved_and_loaded_equals_fitted_and_the_command_line(
    name: str, settings: list[str], tmp_path: Path
) -> None:
    settings = [*settings, *VARIANTS[name]]
    cfg = load_config(overrides=settings)
    graph = open_graph(cfg.data)
    fitted = Pretrainer(cfg).fit(graph)
    z = fitted.embed(graph)
    loaded = Pretrainer.load(fitted.save(tmp_path / "model"))
    assert torch.equal(loaded.embed(graph), z)
    assert loaded.cfg == cfg and loaded.step_ == fitted.step_

    run = tmp_path / "run"
    for verb in ("pretrain", "embed"):
        assert main([verb, *settings, f"run.dir={run}", "--quiet"]) == 0
    assert np.array_equal(np.load(run / "embeddings" / "part-00000.npy"), z.numpy())


def test_learned_attributes(cfg: Config, small_sbm: Graph, tmp_path: Path) -> None:
    cfg.loss.factor_weight = 0.0
    plain = Pretrainer(cfg)
    assert not hasattr(plain, "model_") and repr(plain) == "Pretrainer(not fitted)"
    assert plain.fit(small_sbm) is plain and repr(plain) == "Pretrainer(fitted, step 4)"
    assert plain.ci_scores_ is None and plain.step_ == 4 and not plain.model_.training
    assert [r["step"] for r in plain.history_ if r["kind"] == "train"] == [1, 2, 3, 4]
    assert Pretrainer.load(plain.save(tmp_path / "plain")).ci_scores_ is None

    cfg.loss.factor_weight = 1.0
    scored = Pretrainer(cfg).fit(small_sbm)
    scores = scored.ci_scores_
    assert scores is not None and scores.scores.shape == scores.in_context.shape == (3,)
    assert (
        bool(((scores.scores >= 0) & (scores.scores <= 1)).all())
        and 1 <= int(scores.in_context.sum()) <= 2
    )
    assert [r["step"] for r in scored.history_ if r["kind"] == "ci"] == [0, 2]
    kept = Pretrainer.load(scored.save(tmp_path / "scored")).ci_scores_
    assert kept is not None
    for field in dataclasses.fields(scores):
        a, b = getattr(scores, field.name), getattr(kept, field.name)
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


def test_best_by_validation_is_the_model_kept(settings: list[str], small_sbm: Graph) -> None:
    fitted = Pretrainer(load_config(overrides=[*settings, *VARIANTS["best by validation"]])).fit(
        small_sbm
    )
    scores = {r["step"]: r["score"] for r in fitted.history_ if r["kind"] == "val"}
    assert fitted.step_ == max(scores, key=lambda step: (scores[step], -step))
    stopped = Pretrainer(
        load_config(overrides=[*settings, *BUSY, f"train.epochs={fitted.step_}"])
    ).fit(small_sbm)
    assert torch.equal(stopped.embed(small_sbm), fitted.embed(small_sbm))


def test_pyg_data(cfg: Config, small_sbm: Graph) -> None:
    """The same graph as a Data, one direction of each edge and in another order, gives the same
    embedding and scores.
    """
    data = small_sbm.to_data()
    assert isinstance(data, Data)
    z = Pretrainer(cfg).fit(small_sbm).embed(small_sbm)
    assert torch.equal(Pretrainer(cfg).fit(data).embed(data), z)
    upper = data.edge_index[:, data.edge_index[0] < data.edge_index[1]]
    other = Data(x=data.x, edge_index=upper.flip(1), y=data.y)
    assert torch.equal(Pretrainer(cfg).fit(other).embed(other), z)
    assert evaluate(z, other, cfg) == evaluate(z.numpy(), small_sbm, cfg)


def test_embedding_of_another_graph(cfg: Config, small_sbm: Graph) -> None:
    fitted = Pretrainer(cfg).fit(small_sbm)
    alone = Data(x=small_sbm.features()[:5], edge_index=torch.tensor([[0, 1, 2], [1, 2, 3]]))
    z = fitted.embed(alone)
    assert z.shape == (5, 12) and bool(z.isfinite().all())
    with pytest.raises(UserError, match=r"trained on 12 features.*'data' has 3"):
        fitted.embed(Data(x=torch.ones(5, 3), edge_index=alone.edge_index))


def test_misuse(cfg: Config, small_sbm: Graph, tmp_path: Path) -> None:
    for act in (
        lambda: Pretrainer(cfg).embed(small_sbm),
        lambda: Pretrainer(cfg).save(tmp_path / "model"),
    ):
        with pytest.raises(UserError, match=r"not fitted yet.*fit\(graph\)"):
            act()
    with pytest.raises(UserError, match=r"Expected a graph from open_graph.*got str"):
        Pretrainer(cfg).fit("digits")
    with pytest.raises(UserError, match=r"config\.yaml"):
        Pretrainer.load(tmp_path / "nothing")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("train: {epochs: 1}\n")
    with pytest.raises(UserError, match="No saved model"):
        Pretrainer.load(run)


BAD = {
    "rows": (torch.zeros(7, 2), "7 rows"),
    "nan": (torch.full((300, 2), float("nan")), r"NaN.*first: \[0, 1, 2, 3, 4\]"),
    "integers": (torch.zeros(300, 2, dtype=torch.int64), "matrix of floats"),
    "vector": (np.zeros(300), "matrix of floats"),
    "words": (np.full((300, 2), "a"), "matrix of floats"),
    "nothing": (None, "matrix of floats"),
}


@pytest.mark.parametrize("kind", BAD)
def test_evaluate_refuses(kind: str, cfg: Config, small_sbm: Graph) -> None:
    z, words = BAD[kind]
    with pytest.raises(UserError, match=words):
        evaluate(z, small_sbm, cfg)  # type: ignore[arg-type]


def test_evaluate_options(cfg: Config, small_sbm: Graph) -> None:
    z = torch.nn.functional.one_hot(small_sbm.labels()).double()  # type: ignore[arg-type]
    scores = evaluate(z.half(), small_sbm, cfg)
    assert scores["cluster"]["acc"] == scores["cluster"]["nmi"] == pytest.approx(100)
    assert "cluster" not in evaluate(z, small_sbm, cfg, tasks=["node"]) and "node" not in evaluate(
        z, small_sbm, cfg, tasks=["cluster"]
    )
    assert evaluate(z, small_sbm, tasks=["cluster"])["cluster"]["acc"] == pytest.approx(
        100
    )  # the config may be left out
    with pytest.raises(UserError, match=r"Unknown evaluation task 'nodes'.*node, link, cluster"):
        evaluate(z, small_sbm, cfg, tasks=["nodes"])


def test_fit_and_embed_leave_the_callers_state_alone(cfg: Config, small_sbm: Graph) -> None:
    before = torch.get_rng_state()
    untouched = dataclasses.asdict(cfg)
    fitted = Pretrainer(cfg).fit(small_sbm)
    fitted.embed(small_sbm)
    assert torch.equal(torch.get_rng_state(), before) and torch.is_grad_enabled()
    assert dataclasses.asdict(cfg) == untouched


def test_progress_is_shown_when_asked_for(
    cfg: Config, small_sbm: Graph, capsys: pytest.CaptureFixture[str]
) -> None:
    Pretrainer(cfg).fit(small_sbm)
    assert capsys.readouterr() == ("", "")
    Pretrainer(cfg, progress=True).fit(small_sbm)
    out, err = capsys.readouterr()
    assert out == "" and "pretrain 4/4" in err


def test_public_names() -> None:
    assert (
        set(dir(cimage_dist))
        == set(cimage_dist.__all__)
        >= {"Pretrainer", "evaluate", "load_config", "open_graph", "Config", "Graph", "UserError"}
    )
    for name in cimage_dist.__all__:
        assert getattr(cimage_dist, name) is not None
    with pytest.raises(AttributeError, match="Pretraner"):
        cimage_dist.Pretraner  # noqa: B018
