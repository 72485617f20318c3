"""`cimage cluster`: pseudo-labels by several methods, compared and kept."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cimage_dist.config_loading import load_config
from cimage_dist.errors import UserError
from cimage_dist.pipeline import clusterings as clustering
from cimage_dist.pipeline.clusterings import METHODS, methods_for, summarise

GRAPH = [
    "data.name=sbm",
    "data.sbm.num_nodes=400",
    "data.sbm.num_blocks=4",
    "data.sbm.avg_degree=10",
    "data.sbm.label_features=8",
    "cluster.init_epochs=2",
]


def test_methods_are_compared_and_their_labels_can_be_used_again(cli):
    got = cli("cluster", *GRAPH, "--methods", "propagated,selfkmeans", "--json")
    assert got.code == 0, got.err
    result = json.loads(got.out)
    assert result["clusters"] == 4 and [run["method"] for run in result["runs"]] == [
        "propagated",
        "selfkmeans",
    ]
    for run in result["runs"]:
        assert 25 <= run["acc"] <= 100 and run["acc_s"] <= 100 and run["clusters_in_s"] == 4
        assert {
            "nmi",
            "ari",
            "f1",
            "modularity",
            "s",
            "seconds",
            "peak_gb",
            "folder",
        } <= run.keys() and run["peak_gb"] > 0.05
    assert (
        set(result["methods"]) == {"propagated", "selfkmeans"}
        and result["methods"]["propagated"]["acc"]["std"] == 0
    )
    folder = result["runs"][0]["folder"]
    assert (Path(folder) / "manifest.json").is_file()

    shown = cli("cluster", *GRAPH, "--methods", "file", f"cluster.from={folder}")
    assert shown.code == 0, shown.err
    assert (
        "ACC on S" in shown.out
        and "modularity" in shown.out
        and f"{result['runs'][0]['acc']:.1f}" in shown.out
    )
    config = cli("show", *GRAPH, f"cluster.from={folder}")
    assert "init: file" in config.out and folder in config.out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--methods", "kmean"], ["'kmean'", "propagated"]),
        (["--methods", "file"], ["cluster.from"]),
        (["--seeds", "0"], ["--seeds"]),
        (["cluster.num_clusters=1"], ["cluster.num_clusters", "0 or at least 2"]),
        (["cluster.from=nowhere", "--methods", "file"], ["not found", "nowhere"]),
    ],
)
def test_bad_requests_are_told(args, words, cli):
    got = cli("cluster", *GRAPH, *args)
    assert got.code == 2 and "Traceback" not in got.err
    assert all(word in got.err for word in words), got.err


def test_what_suits_a_graph_is_compared_by_default():
    cfg = load_config()
    assert methods_for(cfg, 2_708) == ["rdgae", "dinknet", "propagated", "selfkmeans"]
    assert methods_for(cfg, 1_000_000) == ["dinknet", "propagated", "selfkmeans"]
    assert methods_for(load_config(overrides=["cluster.from=x.npy"]), 100) == list(METHODS)


def test_means_and_spreads_are_over_seeds():
    runs = [
        {"method": "m", "seed": s, "clusters": 3, "acc": acc, "peak_gb": gb, "modularity": None}
        for s, acc, gb in ((0, 60.0, 0.5), (1, 70.0, 0.7))
    ]
    found = summarise(runs)
    assert (
        found["seeds"] == 2
        and found["acc"]["mean"] == 65.0
        and found["acc"]["std"] == pytest.approx(7.0710678)
    )
    assert found["peak_gb"]["mean"] == 0.7 and "seed" not in found


def test_the_alias_reaches_the_labels_path_from_yaml_too(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("cluster:\n  from: labels.npy\n")
    cfg = load_config(path)
    assert cfg.cluster.init == "file" and cfg.cluster.labels_path == "labels.npy"
    with pytest.raises(UserError, match=r"cluster\.form"):
        load_config(overrides=["cluster.form=labels.npy"])


def die(cfg, quiet):
    os._exit(9)


def test_a_killed_method_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(clustering, "score_method", die)
    cfg = load_config(overrides=[*GRAPH, f"data.store_dir={tmp_path}"])
    with pytest.raises(UserError, match=r"propagated, seed 3, was killed.*--methods"):
        clustering._in_own_process(clustering.with_method(cfg, "propagated", 3, 4), True)
