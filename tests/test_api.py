"""The Python interface, used as its readers will use it."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data

import cimage_dist
from cimage_dist import Config, Graph, Pretrainer, UserError, evaluate, load_config, open_graph
from cimage_dist.__main__ import main
from cimage_dist.config_loading import with_settings
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


def test_settings_as_keywords(cfg: Config) -> None:
    named = Pretrainer(
        cfg, epochs=7, model__num_factors=5, **{"sampler.fanouts": [4, 4], "seed": 2}
    )
    assert (named.cfg.train.epochs, named.cfg.model.num_factors) == (7, 5)
    assert named.cfg.sampler.fanouts == [4, 4] and named.cfg.run.seed == 2
    assert cfg.train.epochs == 4 and named.cfg.data == cfg.data
    assert Pretrainer(epochs=np.int64(3)).cfg.train.epochs == 3
    for settings, words in (
        ({"epoch": 3}, "Unknown config key 'epoch'.*'train.epochs'"),
        ({"init": "pca"}, "could be model.init or cluster.init. Write model__init"),
        ({"epochs": "many"}, "train.epochs in epochs='many'"),
        ({"epochs": 0}, "train.epochs must be at least 1"),
        ({"train": 3}, "train in train=3 is a section"),
        ({"fanouts": object()}, "fanouts"),
    ):
        with pytest.raises(UserError, match=words):
            Pretrainer(**settings)


def test_habits_of_scikit_learn(cfg: Config, small_sbm: Graph) -> None:
    from sklearn.base import clone
    from sklearn.model_selection import ParameterGrid
    from sklearn.utils.validation import check_is_fitted

    model = Pretrainer(cfg, epochs=3)
    z = model.fit_transform(small_sbm, y=None)
    check_is_fitted(model)
    assert isinstance(z, np.ndarray) and np.array_equal(z, model.embed(small_sbm).numpy())
    assert np.array_equal(z, model.transform(small_sbm))
    assert model.get_feature_names_out().tolist() == [f"z{i}" for i in range(z.shape[1])]
    twin = clone(model)
    assert not hasattr(twin, "model_") and twin.cfg == model.cfg and twin.cfg is not model.cfg
    assert np.array_equal(twin.fit_transform(small_sbm), z)
    found = model.get_params()
    assert found["train.epochs"] == 3 and found["workers"] is None and found["cfg"] is model.cfg
    for point in ParameterGrid({"epochs": [2], "run__seed": [1], "progress": [False]}):
        other = clone(model).set_params(**point)
        assert other.cfg.train.epochs == 2 and other.cfg.run.seed == 1 and other.progress is False
    assert model.cfg.train.epochs == 3
    with pytest.raises(UserError, match="Unknown config key"):
        model.set_params(epoch=3)


def test_what_a_notebook_shows(cfg: Config, small_sbm: Graph) -> None:
    model = Pretrainer(cfg)
    assert "not fitted" in model._repr_html_() and "train.epochs" in model._repr_html_()
    shown = model.fit(small_sbm)._repr_html_()
    assert "300 nodes" in shown and "redundancy" in shown and "at step 4" in shown
    assert "defaults" in Pretrainer()._repr_html_()
    escaped = Pretrainer(data__name="a<b>")._repr_html_()
    assert "a&lt;b&gt;" in escaped and "<b>" not in escaped.replace("<b>Pretrainer</b>", "")


def test_progress_is_on_in_a_notebook(
    cfg: Config,
    small_sbm: Graph,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shell = SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    Pretrainer(cfg).fit(small_sbm)
    assert "4/4" in capsys.readouterr().err
    Pretrainer(cfg, progress=False).fit(small_sbm)
    assert capsys.readouterr().err == ""


def test_a_run_of_the_command_line_is_loaded(settings: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    for verb in ("pretrain", "embed"):
        assert main([verb, *settings, f"run.dir={run}", "--quiet"]) == 0
    model = Pretrainer.load(run)
    graph = open_graph(model.cfg.data)
    assert np.array_equal(model.transform(graph), np.load(run / "embeddings" / "part-00000.npy"))
    assert model.step_ == 4 and model.ci_scores_ is not None and model.summary_["steps"] == 4
    assert [r["step"] for r in model.history_ if r["kind"] == "train"] == [1, 2, 3, 4]


@pytest.mark.parametrize("is_in_memory", [False, True])
def test_the_command_line_reads_what_was_saved(
    is_in_memory: bool, settings: list[str], small_sbm: Graph, tmp_path: Path
) -> None:
    """Embeddings, scores, a page, and more training; the graph is not the one the config names."""
    graph = Graph.from_data(small_sbm.to_data(), name="mine") if is_in_memory else small_sbm
    tiny = with_settings(Config(), dict(text.split("=", 1) for text in TINY))
    model = Pretrainer(tiny, run__seed=3).fit(graph)
    folder = model.save(tmp_path / "saved", graph)
    moved = str(folder.rename(tmp_path / "moved"))
    for verb in ("embed", "evaluate", "report"):
        assert main([verb, moved, "--quiet", "--json"]) == 0
    z = np.load(f"{moved}/embeddings/part-00000.npy")
    assert np.array_equal(z, model.transform(graph))
    assert Path(moved, "report.html").is_file()

    assert main(["pretrain", moved, "train.epochs=6", "--quiet"]) == 0
    longer = Pretrainer.load(moved)
    assert longer.step_ == 6
    again = Pretrainer.load(longer.save(moved, graph))  # over itself, its graph included
    assert np.array_equal(again.transform(graph), longer.transform(graph))
    assert main(["embed", moved, "--quiet"]) == 0


def test_saved_without_the_graph_in_memory(
    cfg: Config, small_sbm: Graph, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = small_sbm.to_data()
    model = Pretrainer(cfg).fit(data)
    folder = model.save(tmp_path / "saved")
    assert torch.equal(Pretrainer.load(folder).embed(data), model.embed(data))
    assert main(["embed", str(folder)]) == 2
    assert "Pretrainer.save(folder, graph)" in capsys.readouterr().err
    other = small_sbm.to_data()
    other.x = other.x + 1
    with pytest.raises(UserError, match="another graph"):
        model.save(folder, other)


def test_a_saved_model_replaces_the_one_before(
    cfg: Config, small_sbm: Graph, tmp_path: Path
) -> None:
    folder = Pretrainer(cfg, epochs=6).fit(small_sbm).save(tmp_path / "saved")
    assert main(["evaluate", str(folder), "--quiet", "--json"]) == 0
    short = Pretrainer(cfg, epochs=2).fit(small_sbm)
    short.save(folder)
    assert Pretrainer.load(folder).step_ == 2 and not (folder / "eval.json").exists()


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two workers need two CPUs")
def test_two_workers_fit_what_one_process_does(tmp_path: Path) -> None:
    """All neighbours and no dropout: nothing depends on how many there are but rounding. In a
    process of its own, which starts and ends a Ray of its own.
    """
    code = """
import torch
from cimage_dist import Graph, Pretrainer, load_config, open_graph
cfg = load_config(overrides=SETTINGS)
stored = open_graph(cfg.data)
graph = Graph.from_data(stored.to_data(), name="mine")  # in memory: the workers need its copy
here = Pretrainer(cfg).fit(graph)
there = Pretrainer(cfg, workers=2, progress=True).fit(graph)
assert there.step_ == here.step_ and len(there.history_) == len(here.history_)
torch.testing.assert_close(there.embed(graph), here.embed(graph), rtol=1e-3, atol=1e-4)
there.save("saved", graph)
assert torch.equal(Pretrainer.load("saved").embed(graph), there.embed(graph))
print("equal")
"""
    settings = [
        *small_sbm_settings(tmp_path / "stores"),
        *TINY,
        "cluster.init=propagated",
        "model.structure_dropout=0",
        "model.factor_dropout=0",
        "sampler.fanouts=[-1,-1]",
        "sampler.batch_edges=300",
        "train.epochs=2",
    ]
    folder = Path(tempfile.mkdtemp(prefix="cim-", dir="/tmp"))  # Ray's sockets need a short path
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env |= {"HOME": str(folder), "RAY_TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code.replace("SETTINGS", repr(settings))],
            cwd=folder,
            env=env | {"RAY_USAGE_STATS_ENABLED": "0"},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert done.stdout.strip() == "equal", done.stderr[-3000:]


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
        evaluate(z, small_sbm, cfg)


def test_evaluate_options(cfg: Config, small_sbm: Graph) -> None:
    z = torch.nn.functional.one_hot(small_sbm.labels()).double()
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
