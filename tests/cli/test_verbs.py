"""Every verb from end to end on a tiny graph, in one working directory, as a person would type
them.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from cimage_dist.config import Config
from cimage_dist.config_loading import load_config
from cimage_dist.eval.controls import ALPHAS, HOPS
from tests.cli.conftest import TRAINING, Cli, as_json, ok, own_graph

SBM = [
    "data.name=sbm",
    "data.sbm.num_nodes=200",
    "data.sbm.num_blocks=2",
    "data.sbm.avg_degree=6",
    "data.sbm.label_features=4",
    "data.sbm.nuisance_features=4",
]


def is_percent(value: Any) -> bool:
    return isinstance(value, float) and 0 <= value <= 100


def test_ingest_builds_once(cli: Cli, tmp_path: Path) -> None:
    first = ok(cli, "ingest", *SBM)
    assert (
        first.startswith("built: data/sbm-")
        and "200 nodes" in first
        and "8 features" in first
        and "2 classes" in first
    )
    for text in ("self-loops and", "components, the largest", "degrees: least", "labels: 0 "):
        assert text in first
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "data").rglob("*.npy")}
    assert ok(cli, "ingest", *SBM).startswith("already there: data/sbm-")
    facts = as_json(cli, "ingest", *SBM)
    assert (
        facts["built_now"] is False
        and facts["nodes"] == 200
        and facts["classes"] == 2
        and Path(facts["store"]).is_dir()
    )
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "data").rglob("*.npy")} == before
    assert not list((tmp_path / "data").glob(".tmp-*"))


def test_ingest_repairs_a_damaged_store(cli: Cli, tmp_path: Path) -> None:
    ok(cli, "ingest", *SBM)
    (damaged,) = (tmp_path / "data").rglob("x.npy")
    damaged.write_bytes(damaged.read_bytes()[:-4])
    assert as_json(cli, "ingest", *SBM)["built_now"] is True
    assert as_json(cli, "ingest", *SBM)["built_now"] is False


def test_the_whole_way(cli: Cli, tmp_path: Path) -> None:
    """Settings from two yaml files and the line; run directory left to its default."""
    (tmp_path / "graph.yaml").write_text(
        "data:\n  name: sbm\n  sbm: {num_nodes: 200, num_blocks: 2, avg_degree: 6}\ntrain: "
        "{epochs: 7}\n"
    )
    (tmp_path / "short.yaml").write_text("train: {epochs: 4}\n")
    settings = [
        "graph.yaml",
        "short.yaml",
        *(text for text in TRAINING if not text.startswith(("train.epochs", "run.tensorboard"))),
        "run.seed=3",
    ]
    facts = as_json(cli, "show", *settings)
    assert facts["config"]["train"]["epochs"] == 4 and not any(
        item["exists"] for item in facts["exists"].values()
    )
    run = tmp_path / "runs" / "sbm" / facts["fingerprint"] / "seed-3"

    got = cli("pretrain", *settings)
    assert (
        got.code == 0
        and "trained 4 steps" in got.out
        and f"run directory: {run.relative_to(tmp_path)}" in got.out
    )
    assert "next: cimage embed graph.yaml short.yaml" in got.out
    assert "pretrain 4/4  loss " in got.err and "structure " in got.err
    assert "length: 4 steps" in got.err and "4 steps of " in got.err and "ends about" in got.err
    assert load_config(run / "config.yaml") == load_config(
        tmp_path / "graph.yaml", tmp_path / "short.yaml", overrides=settings[2:]
    )
    env = json.loads((run / "env.json").read_text())
    assert (
        env["graph"]["nodes"] == 200
        and env["packages"]["torch"] == torch.__version__
        and env["fingerprint"] == facts["fingerprint"]
    )
    described, *records = [
        json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    assert described["kind"] == "encoder" and described["described"] in got.err
    assert [r["step"] for r in records] == [1, 2, 3, 4] and all(
        math.isfinite(r["loss"]) and r["edges_per_s"] > 0 for r in records
    )
    assert list((run / "tb").glob("events.out.tfevents.*"))
    newest = run / "ckpt" / (run / "ckpt" / "LATEST").read_text().strip()
    assert newest.name == "step-00000004" and {path.name for path in newest.iterdir()} == {
        "state.json",
        "state.safetensors",
    }
    masks = [np.load(run / "splits" / f"node_{name}.npy") for name in ("train", "val", "test")]
    assert np.array_equal(np.sum(masks, axis=0), np.ones(200)) and [
        int(m.sum()) for m in masks
    ] == [20, 20, 160]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == summary["steps_now"] == 4 and summary["edges_held_out"] == 0

    again = cli("pretrain", *settings)
    assert (
        again.code == 0
        and "already finished, nothing to do" in again.out
        and f"resuming {run.relative_to(tmp_path)} from step 4" in again.err
    )
    assert json.loads((run / "summary.json").read_text()) == summary
    assert (run / "metrics.jsonl").read_text().count("\n") == 5

    assert "200 x 12, float32, step 4" in ok(cli, "embed", *settings)
    z = np.load(run / "embeddings" / "part-00000.npy")
    manifest = json.loads((run / "embeddings" / "manifest.json").read_text())
    assert (
        z.shape == (200, 12) == (manifest["rows"], manifest["columns"])
        and z.dtype == np.float32
        and np.isfinite(z).all()
    )
    assert manifest["parts"] == [{"file": "part-00000.npy", "first_row": 0, "rows": 200}] and list(
        manifest["files"]
    ) == ["part-00000.npy"]
    assert "there already" in cli("embed", *settings).err
    assert as_json(cli, "embed", *settings, "--parquet") == {
        "embeddings": str(run.relative_to(tmp_path) / "embeddings"),
        "rows": 200,
        "columns": 12,
        "step": 4,
    }
    import pyarrow.parquet as pq

    table = pq.read_table(run / "embeddings" / "part-00000.parquet")
    assert table.column("node").to_pylist() == list(range(200))
    assert np.array_equal(np.array(table.column("z").to_pylist(), dtype=np.float32), z)
    assert np.array_equal(np.load(run / "embeddings" / "part-00000.npy"), z)

    scores = as_json(cli, "evaluate", *settings)
    assert_scores(scores, with_links=False)
    assert scores == json.loads((run / "eval.json").read_text())
    assert (scores["graph"], scores["seed"], scores["step"], scores["fingerprint"]) == (
        "sbm",
        3,
        4,
        facts["fingerprint"],
    )
    shown = cli("evaluate", *settings)
    assert (
        "CIMAGE" in shown.out
        and f"{scores['node']['test']:.2f}" in shown.out
        and "no link scores" in shown.out
    )
    assert "scoring the control: untrained" in shown.err

    # an embedding from a file: the run's own gets the same scores, and leaves eval.json alone
    foreign = as_json(
        cli, "evaluate", *settings, "--embedding", str(run / "embeddings" / "part-00000.npy")
    )
    assert (foreign["node"], foreign["cluster"]) == (scores["node"], scores["cluster"])
    assert (
        foreign["link"] is None and "file" in foreign["link_reason"] and "controls" not in foreign
    )
    assert json.loads((run / "eval.json").read_text()) == scores

    text = ok(cli, "report", *settings)
    assert (
        text.startswith(f"# Run {run.relative_to(tmp_path)}")
        and f"| `train.epochs` | 4 | {Config().train.epochs} |" in text
        and "node probe, test" in text
    )
    assert (run / "report.md").read_text() in text and "report.html" in text
    found = as_json(cli, "report", str(run), "--figures", "figures")
    assert (
        found["report"] == str(run / "report.md")
        and Path(found["page"]).is_file()
        and len(found["figures"]) == len(list(Path("figures").iterdir())) > 5
    )
    facts = as_json(cli, "show", *settings)
    assert all(item["exists"] for item in facts["exists"].values()) and facts["exists"][
        "checkpoints"
    ]["steps"] == [4]
    shown_text = ok(cli, "show", *settings)
    assert (
        "epochs: 4" in shown_text
        and facts["fingerprint"] in shown_text
        and "absent" not in shown_text
    )
    assert not list(run.rglob(".tmp-*"))


def assert_scores(scores: dict[str, Any], with_links: bool) -> None:
    assert list(scores["controls"]) == ["raw", "smoothed", "pagerank", "pca", "untrained"]
    assert (
        scores["controls"]["smoothed"]["hops"] in HOPS
        and scores["controls"]["pagerank"]["alpha"] in ALPHAS
    )
    assert scores["controls"]["pca"]["of"] in ("raw", "smoothed", "pagerank")
    assert (
        scores["controls_best"]["any"] in scores["controls"]
        and scores["controls_best"]["same_width"] in scores["controls"]
    )
    assert {"val", "test", "pool", "pool_se"} <= set(scores["node"])
    for row in (scores, *scores["controls"].values()):
        assert is_percent(row["node"]["val"]) and is_percent(row["node"]["test"])
        assert is_percent(row["cluster"]["acc"]) and is_percent(row["cluster"]["nmi"])
        if with_links:
            assert is_percent(row["link"]["auc"]) and is_percent(row["link"]["ap"])
        else:
            assert row["link"] is None
    assert with_links or "data.holdout_edges=link" in scores["link_reason"]


def test_held_out_edges(cli: Cli, tiny: list[str], tmp_path: Path) -> None:
    settings = [
        *tiny,
        "data.holdout_edges=link",
        "train.validate_every=2",
        "train.select=val",
        "run.dir=run",
    ]
    summary = as_json(cli, "pretrain", *settings)
    held = summary["edges_held_out"]
    assert (
        held
        == sum(
            len(np.load(tmp_path / "run" / "splits" / f"link_{name}_pos.npy"))
            for name in ("val", "test")
        )
        > 0
    )
    assert summary["best"]["step"] in (2, 4) and is_percent(summary["best"]["score"])
    scores = as_json(cli, "evaluate", *settings)  # embeds on its own
    assert_scores(scores, with_links=True)
    assert (
        scores["step"] == summary["best"]["step"]
        and "5% and 10% of the edges were held out" in scores["edges"]
    )
    out = ok(cli, "report", *settings)
    assert (
        f"{held:,} edges were held out" in out and "link AUC" in out and "Validation: best" in out
    )


def test_settings_of_scoring_may_change_after_training(
    cli: Cli, tiny: list[str], trained: Path
) -> None:
    scores = as_json(
        cli,
        "evaluate",
        *tiny,
        f"run.dir={trained}",
        "eval.few_labels=[2,500]",
        "eval.few_label_splits=2",
        "eval.controls=false",
    )
    assert len(scores["few_labels"]["2"]["scores"]) == 2 and is_percent(
        scores["few_labels"]["2"]["mean"]
    )
    assert (
        scores["few_labels"]["500"]["mean"] is None
        and "too many" in scores["few_labels"]["500"]["reason"]
    )
    assert "controls" not in scores
    text = ok(cli, "report", f"run.dir={trained}")
    assert "| 500 labels per class | - |" in text and "no score with 500 labels per class" in text
    assert (
        "| `data.sbm.num_nodes` | 300 | 10000 |" in text
    )  # the run's own settings, though the line did not repeat them


def test_more_epochs_make_old_scores_old(cli: Cli, tiny: list[str], trained: Path) -> None:
    here = f"run.dir={trained}"
    assert as_json(cli, "evaluate", *tiny, here, "eval.controls=false")["step"] == 4
    assert "run `cimage evaluate` again" not in ok(cli, "report", here)
    assert as_json(cli, "pretrain", *tiny, here, "train.epochs=6")["steps_now"] == 2
    assert "scores of step 4, but step 6" in ok(cli, "report", here)
    assert (
        as_json(cli, "evaluate", *tiny, here, "train.epochs=6", "eval.controls=false")["step"] == 6
    )
    assert json.loads((trained / "embeddings" / "manifest.json").read_text())["step"] == 6


def test_isolated_nodes(cli: Cli, tmp_path: Path) -> None:
    """20 of 120 nodes have no edge: they are trained beside, embedded, scored, and kept apart from
    one another by their features.
    """
    settings = [*own_graph(tmp_path / "mine"), "data.holdout_edges=link", "run.dir=run"]
    assert as_json(cli, "ingest", *settings)["nodes"] == 120
    ok(cli, "pretrain", *settings)
    ok(cli, "embed", *settings)
    z = np.load(tmp_path / "run" / "embeddings" / "part-00000.npy")
    assert (
        np.isfinite(z).all()
        and len(np.unique(z[100:], axis=0)) == 20
        and (np.abs(z).sum(axis=1) > 0).all()
    )
    assert_scores(as_json(cli, "evaluate", *settings), with_links=True)


LABELS = {
    "none": None,
    "all unknown": np.full(120, -1),
    "too few to split": np.r_[[0, 1, 1], np.full(117, -1)],
}


@pytest.mark.parametrize("kind", LABELS)
def test_labels_are_optional(cli: Cli, tmp_path: Path, kind: str) -> None:
    settings = [*own_graph(tmp_path / "mine", labels=LABELS[kind]), "run.dir=run"]
    trained = cli("pretrain", *settings)
    assert trained.code == 0 and (
        "no validation score, the last step is the result" in trained.err
    ) == ("few" not in kind)
    ok(cli, "embed", *settings)
    assert not (tmp_path / "run" / "splits").exists()
    scores = as_json(cli, "evaluate", *settings)
    for row in (scores, *scores["controls"].values()):
        assert (
            row["node"] is None
            and ("3 labelled nodes" if "few" in kind else "no labels") in row["node_reason"]
        )
    assert ("stability" in scores["cluster"]) == ("few" not in kind)
    assert "no node scores" in ok(cli, "evaluate", *settings) and "no node scores" in ok(
        cli, "report", *settings
    )


def test_labels_of_an_own_split(cli: Cli, tmp_path: Path) -> None:
    """A given split is used as it is; without validation nodes the validation score is null."""
    settings = [*own_graph(tmp_path / "mine"), "run.dir=run"]
    (tmp_path / "mine" / "splits.json").write_text(
        json.dumps({"train": list(range(30)), "test": list(range(60, 120))})
    )
    ok(cli, "pretrain", *settings)
    assert [
        int(np.load(tmp_path / "run" / "splits" / f"node_{name}.npy").sum())
        for name in ("train", "val", "test")
    ] == [30, 0, 60]
    scores = as_json(cli, "evaluate", *settings)
    assert scores["node"]["val"] is None and is_percent(scores["node"]["test"])


def test_seeds_change_the_run_and_nothing_else_does(
    cli: Cli, tiny: list[str], trained: Path, tmp_path: Path
) -> None:
    def weights(root: Path) -> dict[str, torch.Tensor]:
        return load_file(root / "ckpt" / "step-00000004" / "state.safetensors")

    ok(cli, "pretrain", *tiny, "run.dir=same", "run.log_every=3", "run.checkpoint_every=1")
    ok(cli, "pretrain", *tiny, "run.dir=other", "run.seed=1")
    torch.testing.assert_close(weights(tmp_path / "same"), weights(trained), rtol=0, atol=0)
    name = "model.encoder.linear.weight"
    assert not torch.equal(weights(tmp_path / "other")[name], weights(trained)[name])


@pytest.mark.slow
def test_the_demo_pays(cli: Cli, store_dir: Path) -> None:
    """What `make demo` runs: the trained embedding is ahead of every control where the table
    compares them.
    """
    demo = [
        str(Path(__file__).parents[2] / "configs/demo.yaml"),
        f"data.store_dir={store_dir}",
        "run.dir=demo",
        "resources.threads=1",
    ]
    as_json(cli, "pretrain", *demo, "--quiet")
    scores = as_json(cli, "evaluate", *demo, "eval.few_labels=[18]")
    best = max(control["node"]["test"] for control in scores["controls"].values())
    assert scores["node"]["test"] > best + 3
    best_few = max(control["few_labels"]["18"]["mean"] for control in scores["controls"].values())
    assert scores["few_labels"]["18"]["mean"] > best_few + 8
    assert (
        scores["link"]["auc"]
        > max(control["link"]["auc"] for control in scores["controls"].values()) + 4
    )
