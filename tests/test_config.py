from __future__ import annotations

import re
from pathlib import Path

import pytest

from cimage_dist.config import Config, fingerprint, run_dir
from cimage_dist.config_loading import known_keys, load_config, to_yaml
from cimage_dist.errors import UserError

ROOT = Path(__file__).parents[1]
YAMLS = sorted(
    path for path in (ROOT / "configs").rglob("*.yaml") if path.parent.name != "sweeps"
)  # those are checked in tests/tune


def test_later_layers_win(tmp_path):
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("train: {epochs: 5}\nrun: {seed: 1}\n")
    second.write_text("train: {epochs: 6}\n")
    cfg = load_config(first, second, overrides=["run.seed=9"])
    assert (cfg.train.epochs, cfg.run.seed, cfg.train.batch_edges) == (6, 9, 65_536)


@pytest.mark.parametrize("path", YAMLS, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_yaml_loads_and_says_how_to_use_it(path):
    load_config(path)
    assert path.read_text().startswith("# "), "a config opens with what it is for"
    assert "cimage " in path.read_text().splitlines()[0] + path.read_text().splitlines()[1], (
        "its header shows a command"
    )


def test_the_expected_configs_are_there():
    names = {str(path.relative_to(ROOT / "configs")) for path in YAMLS}
    wanted = {
        f"node/{n}.yaml"
        for n in ("cora", "citeseer", "pubmed", "photo", "computers", "wikics", "arxiv")
    }
    wanted |= {f"link/{n}.yaml" for n in ("cora", "citeseer", "pubmed")} | {
        "demo.yaml",
        "large/products.yaml",
        "large/papers100m.yaml",
    }
    assert wanted | {f"resources/{n}.yaml" for n in ("laptop", "gpu8", "cluster")} <= names


def test_fingerprint_ignores_where_and_on_what(tmp_path):
    base = fingerprint(load_config())
    assert (
        fingerprint(
            load_config(
                overrides=[
                    "run.seed=5",
                    "resources.threads=2",
                    "data.store_dir=/elsewhere",
                    "run.dir=x",
                ]
            )
        )
        == base
    )
    assert fingerprint(load_config(overrides=["model.num_layers=9"])) != base
    assert fingerprint(load_config(overrides=["data.name=cora"])) != base


def test_saved_config_reads_back_the_same(tmp_path):
    cfg = load_config(
        ROOT / "configs/node/cora.yaml", overrides=["run.seed=3", "optim.weight_decay=1.0e-07"]
    )
    (tmp_path / "c.yaml").write_text(to_yaml(cfg))
    assert load_config(tmp_path / "c.yaml") == cfg


def test_run_directory():
    cfg = load_config(overrides=["run.seed=4"])
    assert run_dir(cfg) == Path("runs/digits") / fingerprint(cfg) / "seed-4"
    assert run_dir(load_config(overrides=["run.dir=here"])) == Path("here")


def test_daily_keys_are_kept():
    keys = {key for key, _, _ in known_keys()}
    assert {
        "data.name",
        "model.num_factors",
        "model.factor_dim",
        "loss.factor_weight",
        "loss.cluster_weight",
        "train.epochs",
        "sampler.fanouts",
        "run.seed",
        "run.dir",
    } <= keys


def test_every_key_is_explained_and_read_somewhere():
    """A key that nothing reads misleads its user."""
    source = "\n".join(
        path.read_text()
        for path in (ROOT / "cimage_dist").rglob("*.py")
        if path.parent.name != "config"
    )
    for key, _, about in known_keys():
        assert about, key
        assert re.search(rf"\.{key.rsplit('.', 1)[-1]}\b", source), f"{key} is read nowhere"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.epoch=5", ["train.epoch", "train.epochs"]),
        ("epochs=5", ["epochs", "train.epochs"]),
        ("train.epochs=many", ["train.epochs", "Integer"]),
        ("train.epochs=0", ["train.epochs", "at least 1"]),
        ("train.steps=0", ["train.steps", "at least 1"]),
        ("train.steps=-5", ["train.steps", "at least 1"]),
        ("train.steps=2.5", ["train.steps", "Integer"]),
        ("train.steps=[5]", ["train.steps"]),
        ("train.max_steps=5", ["train.max_steps", "train.steps"]),
        ("data.holdout_edges=some", ["data.holdout_edges", "auto"]),
        ("model=3", ["model", "section"]),
        ("model.norm=instance", ["model.norm", "batch"]),
        ("model.dropout=1.0", ["model.dropout", "[0, 1)"]),
        ("optim.lr_max=nan", ["optim.lr_max"]),
        ("optim.lr_min=1", ["optim.lr_min", "optim.lr_max"]),
        ("train.select=val", ["train.validate_every"]),
        ("ci.average=1", ["ci.average", "[0, 1)"]),
        ("ci.average=-0.1", ["ci.average", "[0, 1)"]),
        ("ci.average=nan", ["ci.average", "[0, 1)"]),
        ("ci.repeats=0", ["ci.repeats", "at least 1"]),
        ("ci.normalize=sometimes", ["ci.normalize"]),
        ("ci.partition=redrawn", ["ci.partition", "random_redrawn"]),
        ("data.train_ratio=0.95", ["data.train_ratio"]),
        ("run.seed=-1", ["run.seed"]),
        ("sampler.fanouts=[10,0]", ["sampler.fanouts"]),
        ("sampler.fanouts=10,10", ["sampler.fanouts=[10,10]", "brackets"]),
        ("sampler.fanouts=10", ["sampler.fanouts=[10,10]", "brackets"]),
        ("nonsense", ["nonsense", "key=value"]),
        ("train.epochs=[1", ["train.epochs"]),
    ],
)
def test_bad_values_name_the_key_and_the_fix(override, words):
    with pytest.raises(UserError) as caught:
        load_config(overrides=[override])
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("a: [", "yaml"),
        ("- 1\n- 2\n", "mapping"),
        ("train: 5\n", "section"),
        ("train: {epochs: 1, epochs: 2}\n", "duplicate"),
        ("x: 1\n", "Unknown"),
    ],
)
def test_bad_yaml_names_the_file(tmp_path, text, word):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        load_config(path)
    assert "bad.yaml" in str(caught.value) and word in str(caught.value)


def test_defaults_are_valid():
    assert load_config() == Config()
