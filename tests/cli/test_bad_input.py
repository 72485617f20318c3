"""Bad settings, flags and data: one readable complaint each, and nothing is left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.conftest import Cli, assert_complaint, own_graph

# name, text of settings.yaml (None: there is no such file), arguments, words of the message
CONFIG: list[tuple[str, str | None, list[str], list[str]]] = [
    (
        "unknown key in yaml",
        "train:\n  epoch: 3\n",
        ["pretrain", "settings.yaml"],
        ["train.epoch", "settings.yaml", "Did you mean 'train.epochs'"],
    ),
    (
        "unknown key on the line",
        None,
        ["pretrain", "model.factors=3"],
        ["model.factors", "Did you mean", "cimage show --keys"],
    ),
    ("unknown section", None, ["show", "modle.num_factors=3"], ["modle", "cimage show --keys"]),
    ("wrong type", None, ["pretrain", "train.epochs=many"], ["train.epochs", "'many'", "Integer"]),
    (
        "wrong type in yaml",
        "optim:\n  lr_max: fast\n",
        ["pretrain", "settings.yaml"],
        ["optim.lr_max", "settings.yaml", "'fast'", "Float"],
    ),
    (
        "value out of range",
        None,
        ["pretrain", "model.dropout=1.5"],
        ["model.dropout", "[0, 1)", "1.5"],
    ),
    ("not among the choices", None, ["pretrain", "model.norm=group"], ["model.norm", "group"]),
    (
        "negative edge weight",
        None,
        ["pretrain", "loss.structure_weight=-1"],
        ["loss.structure_weight", "must not be negative", "-1"],
    ),
    (
        "negative redundancy weight",
        None,
        ["pretrain", "loss.redundancy_weight=-0.1"],
        ["loss.redundancy_weight", "must not be negative"],
    ),
    (
        "negative decorrelation",
        None,
        ["pretrain", "loss.redundancy_decorrelation=-1"],
        ["loss.redundancy_decorrelation", "must not be negative"],
    ),
    (
        "unknown factor target",
        None,
        ["pretrain", "loss.factor_target=other"],
        ["loss.factor_target", "other", "detached"],
    ),
    ("all edges hidden", None, ["pretrain", "mask.hide_rate=1"], ["mask.hide_rate", "[0, 1)"]),
    (
        "negative column rate",
        None,
        ["pretrain", "mask.feature_rate=-0.2"],
        ["mask.feature_rate", "[0, 1)"],
    ),
    (
        "nothing to train",
        None,
        [
            "pretrain",
            "loss.structure_weight=0",
            "loss.factor_weight=0",
            "loss.cluster_weight=0",
            "loss.redundancy_weight=0",
        ],
        [
            "loss.structure_weight",
            "loss.factor_weight",
            "loss.cluster_weight",
            "loss.redundancy_weight",
            "all be 0",
        ],
    ),
    ("unknown probe", None, ["pretrain", "eval.probe=forest"], ["eval.probe", "forest"]),
    ("average without an end", None, ["pretrain", "ci.average=1"], ["ci.average", "[0, 1)", "1"]),
    ("unknown control", None, ["pretrain", "ci.partition=redrawn"], ["ci.partition", "redrawn"]),
    (
        "settings at odds",
        None,
        ["pretrain", "train.select=val"],
        ["train.select", "train.validate_every"],
    ),
    (
        "yaml absent",
        None,
        ["pretrain", "settings.yaml"],
        ["not found: settings.yaml", "configs/", "key=value"],
    ),
    (
        "yaml broken",
        "train: [1, 2\n",
        ["pretrain", "settings.yaml"],
        ["settings.yaml cannot be read as yaml", "line 2"],
    ),
    (
        "yaml key twice",
        "train:\n  epochs: 1\n  epochs: 2\n",
        ["pretrain", "settings.yaml"],
        ["settings.yaml", "duplicate", "epochs"],
    ),
    (
        "yaml holds a list",
        "- train\n",
        ["pretrain", "settings.yaml"],
        ["settings.yaml", "mapping of sections"],
    ),
    (
        "yaml runs code",
        "train: !!python/object/apply:os.getcwd []\n",
        ["pretrain", "settings.yaml"],
        ["settings.yaml cannot be read", "os.getcwd"],
    ),
    (
        "section as a value",
        None,
        ["pretrain", "train=5"],
        ["train", "is a section", "train.<key>="],
    ),
    ("override without a key", None, ["pretrain", "=5"], ["'=5'", "key=value", "train.epochs=50"]),
    ("override without a value", None, ["pretrain", "train.epochs"], ["train.epochs", "key=value"]),
    (
        "override that is no yaml",
        None,
        ["pretrain", "sampler.fanouts=[5"],
        ["sampler.fanouts=[5", "cannot be read"],
    ),
    ("unknown flag", None, ["pretrain", "--fast"], ["--fast", "cimage pretrain --help"]),
    (
        "flag of another verb",
        None,
        ["pretrain", "--parquet"],
        ["--parquet", "cimage pretrain --help"],
    ),
    (
        "flag without its value",
        None,
        ["evaluate", "--embedding"],
        ["--embedding", "one argument", "cimage evaluate --help"],
    ),
    (
        "flag with a wrong value",
        None,
        ["pretrain", "--on", "slurm"],
        ["--on", "slurm", "local", "ray"],
    ),
    ("unknown verb", None, ["pretrian"], ["pretrian", "pretrain", "cimage --help"]),
    ("no verb", None, [], ["<verb>", "cimage --help"]),
    (
        "settings for doctor",
        None,
        ["doctor", "train.epochs=1"],
        ["train.epochs=1", "cimage doctor --help"],
    ),
    (
        "unknown dataset",
        None,
        ["pretrain", "data.name=coora"],
        ["coora", "Did you mean 'cora'", "data.path"],
    ),
    (
        "data.path absent",
        None,
        ["pretrain", "data.name=mine", "data.path=nowhere"],
        ["data.path", "nowhere", "Give a folder"],
    ),
    (
        "data.path without edges",
        None,
        ["pretrain", "data.name=mine", "data.path=."],
        ["no edges file", "edges.csv"],
    ),
    (
        "name of a built-in for one's own",
        None,
        ["pretrain", "data.path=.", "data.name=cora"],
        ["data.path", "'cora'", "data.name=mygraph"],
    ),
]


@pytest.mark.parametrize(
    ("yaml", "argv", "words"), [row[1:] for row in CONFIG], ids=[row[0] for row in CONFIG]
)
def test_config_and_flags(
    cli: Cli, tmp_path: Path, yaml: str | None, argv: list[str], words: list[str]
) -> None:
    if yaml is not None:
        (tmp_path / "settings.yaml").write_text(yaml)
    assert_complaint(cli(*argv), words)
    assert not (tmp_path / "runs").exists()


NAN = np.zeros((120, 5))

NAN[[3, 7], [1, 2]] = np.nan, np.inf

# name, arrays of the own graph, further settings, words of the message
DATA: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    (
        "ids out of range",
        {"edges": np.array([[0, 1], [5, 120]])},
        [],
        ["edges of graph 'mine'", "0..119", "edge 2 (5 -> 120)", "subtract 1"],
    ),
    (
        "features not finite",
        {"features": NAN},
        [],
        ["features", "mine", "row 3 column 1 = nan", "Replace them"],
    ),
    (
        "rows that do not match",
        {"features": np.zeros((90, 5))},
        [],
        ["mine", "120 rows", "features.npy has 90", "one row per node"],
    ),
    ("empty graph", {"edges": np.zeros((0, 2), dtype=int)}, [], ["mine", "empty"]),
    ("no features", {"features": None}, [], ["no node features", "data.features=degree"]),
    (
        "pickled features",
        {"features": np.array([{}] * 120)},
        [],
        ["features.npy", "cannot be read", "Replace"],
    ),
    (
        "no labels to validate on",
        {"labels": None},
        ["train.validate_every=2"],
        ["'mine'", "no labels", "train.validate_every=0"],
    ),
    (
        "no public split",
        {},
        ["data.split=public"],
        ["'mine'", "without a split", "data.split=random"],
    ),
    (
        "too few edges to hold out",
        {"edges": np.array([[0, 1], [1, 2]])},
        ["data.holdout_edges=link"],
        ["2 undirected edges", "data.link_val_ratio"],
    ),
]


@pytest.mark.parametrize(
    ("arrays", "more", "words"), [row[1:] for row in DATA], ids=[row[0] for row in DATA]
)
def test_data(
    cli: Cli, tmp_path: Path, arrays: dict[str, Any], more: list[str], words: list[str]
) -> None:
    settings = own_graph(tmp_path / "mine", **arrays)
    assert_complaint(cli("pretrain", *settings, *more), words)


def test_split_overlap(cli: Cli, tmp_path: Path) -> None:
    settings = own_graph(tmp_path / "mine")
    (tmp_path / "mine" / "splits.json").write_text(
        json.dumps({"train": [0, 1, 2], "val": [3], "test": [2, 4]})
    )
    assert_complaint(
        cli("pretrain", *settings), ["mine", "overlap", "both train and test", "first: 2"]
    )
