"""Every mistake gives exit code 2 and one paragraph on standard error that names the culprit and
the remedy; nothing on standard output.
"""

from __future__ import annotations

import fcntl
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.cli.conftest import Cli, Outcome, own_graph, process

NOTES = (
    "objective: ",
    "length: ",
    "no labels",
    "encoder: ",
    "clusters: ",
)  # what pretrain says before it starts


def assert_complaint(got: Outcome, words: list[str]) -> None:
    assert got.code == 2
    assert got.out == ""
    assert "Traceback" not in got.err
    said = "".join(line for line in got.err.splitlines(keepends=True) if not line.startswith(NOTES))
    assert said.startswith("cimage") and said.endswith("\n")
    assert said.count("\n") == 1, "one paragraph"
    for word in words:
        assert word in got.err


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


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "corrupted": (flip, "x.npy", "corrupted"),
    "truncated": (cut, "indices.npy", "truncated"),
    "missing": (Path.unlink, "indptr.npy", "missing"),
    "no json": (cut, "manifest.json", "not valid JSON"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_graph_store(cli: Cli, tmp_path: Path, kind: str) -> None:
    settings = own_graph(tmp_path / "mine")
    assert cli("ingest", *settings).code == 0
    damage, name, word = DAMAGE[kind]
    (store,) = (tmp_path / "stores").glob("mine-*")
    damage(store / name)
    assert_complaint(cli("pretrain", *settings), [str(store / name), word])


@pytest.mark.parametrize("verb", ["embed", "evaluate", "report"])
def test_before_pretrain(cli: Cli, tiny: list[str], verb: str) -> None:
    assert_complaint(cli(verb, *tiny, "run.dir=none-yet"), ["none-yet", "cimage pretrain"])


def test_directory_of_another_experiment(cli: Cli, tiny: list[str], trained: Path) -> None:
    here = f"run.dir={trained}"
    for change, key in [
        ("model.num_layers=1", "model.num_layers"),
        ("run.seed=1", "run.seed"),
        ("train.epochs=2", "train.epochs"),
    ]:
        got = cli("pretrain", *tiny, here, change, "run.log_every=7", "data.verify=always")
        assert_complaint(got, [str(trained), f"(different: {key})", "another run.dir"])


@pytest.mark.parametrize("verb", ["embed", "evaluate"])
def test_other_settings_than_the_training(
    cli: Cli, tiny: list[str], trained: Path, verb: str
) -> None:
    """Above all: a run that saw all edges never gets link scores."""
    got = cli(verb, *tiny, f"run.dir={trained}", "data.holdout_edges=link")
    assert_complaint(
        got, [str(trained), "(different: data.holdout_edges)", str(trained / "config.yaml")]
    )
    assert not (trained / "eval.json").exists()


def test_graph_that_changed_after_training(cli: Cli, tmp_path: Path) -> None:
    settings = [*own_graph(tmp_path / "mine"), "run.dir=run"]
    assert cli("pretrain", *settings).code == 0
    np.save(tmp_path / "mine" / "features.npy", np.ones((120, 5)))
    for verb in ("pretrain", "embed", "evaluate"):
        assert_complaint(
            cli(verb, *settings),
            ["run was trained on another version of graph 'mine'", "delete the run"],
        )


def test_run_dir_is_a_file(cli: Cli, tiny: list[str], tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert_complaint(cli("pretrain", *tiny, "run.dir=notes.txt"), ["notes.txt", "another run.dir"])
    assert_complaint(
        cli("pretrain", *tiny, "run.dir=notes.txt/run"), ["notes.txt/run", "another run.dir"]
    )


def test_directory_in_use(cli: Cli, tiny: list[str], trained: Path) -> None:
    with (trained / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert_complaint(
            cli("pretrain", *tiny, f"run.dir={trained}"),
            ["Another process", str(trained), "another run.dir"],
        )


class Bomb:
    """Leaves a file behind where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path("exploded").touch, ()


def npy_bytes(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


EMBEDDINGS: list[tuple[str, Callable[[Path], object], list[str]]] = [
    ("absent", lambda p: None, ["not found", "numpy.save"]),
    (
        "wrong rows",
        lambda p: np.save(p, np.zeros((7, 4))),
        ["7 rows", "300 nodes", "Row i must be node i"],
    ),
    (
        "not finite",
        lambda p: np.save(p, np.full((300, 2), np.nan)),
        ["NaN", "300 rows", "first: [0, 1, 2, 3, 4]"],
    ),
    ("one column of numbers", lambda p: np.save(p, np.zeros(300)), ["matrix of floats", "[300]"]),
    (
        "integers",
        lambda p: np.save(p, np.zeros((300, 2), dtype=int)),
        ["matrix of floats", "int64"],
    ),
    ("words", lambda p: np.save(p, np.full((300, 2), "a")), ["matrix of floats", "<U1"]),
    (
        "not npy",
        lambda p: p.write_text("0.5 0.5\n"),
        ["cannot be read as a .npy matrix", "numpy.save"],
    ),
    (
        "an archive",
        lambda p: p.write_bytes(b"PK\x03\x04" + bytes(40)),
        ["cannot be read as a .npy matrix", "numpy.save"],
    ),
    (
        "truncated",
        lambda p: p.write_bytes(npy_bytes(np.zeros((300, 4)))[:-10]),
        ["cannot be read as a .npy matrix"],
    ),
    (
        "pickle inside",
        lambda p: np.save(p, np.array([Bomb()] * 300)),
        ["cannot be read as a .npy matrix", "no object arrays"],
    ),
    ("a folder", lambda p: p.mkdir(), ["cannot be read as a .npy matrix"]),
]


@pytest.mark.parametrize(
    ("write", "words"), [row[1:] for row in EMBEDDINGS], ids=[row[0] for row in EMBEDDINGS]
)
def test_embedding_file(
    cli: Cli, tiny: list[str], tmp_path: Path, write: Callable[[Path], object], words: list[str]
) -> None:
    path = tmp_path / "z.npy"
    write(path)
    assert_complaint(cli("evaluate", *tiny, "--embedding", str(path)), [str(path), *words])
    assert not (tmp_path / "exploded").exists()


LABELS: list[tuple[str, Callable[[Path], object], list[str]]] = [
    ("absent", lambda p: None, ["not found", "cluster.labels_path"]),
    ("wrong length", lambda p: np.save(p, np.zeros(7, dtype=int)), ["(7,)", "300 nodes"]),
    ("fractions", lambda p: np.save(p, np.zeros(300)), ["float64", "not integers"]),
    ("one cluster", lambda p: np.save(p, np.zeros(300, dtype=int)), ["at least two clusters"]),
    (
        "pickle inside",
        lambda p: np.save(p, np.array([Bomb()] * 300)),
        ["cannot be read", "Expected integers"],
    ),
]


@pytest.mark.parametrize(
    ("write", "words"), [row[1:] for row in LABELS], ids=[row[0] for row in LABELS]
)
def test_label_file(
    cli: Cli, tiny: list[str], tmp_path: Path, write: Callable[[Path], object], words: list[str]
) -> None:
    path = tmp_path / "labels.npy"
    write(path)
    got = cli(
        "pretrain",
        *tiny,
        "loss.factor_weight=1",
        "cluster.init=file",
        f"cluster.labels_path={path}",
        "run.dir=run",
    )
    assert_complaint(got, [str(path), *words])
    assert not (tmp_path / "exploded").exists()


def test_label_file_not_given(cli: Cli, tiny: list[str]) -> None:
    assert_complaint(
        cli("pretrain", *tiny, "cluster.init=file"), ["cluster.labels_path", "must be set"]
    )


def test_no_cuda(cli: Cli, tiny: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert_complaint(
        cli("pretrain", *tiny, "resources.device=cuda"),
        ["resources.device", "CUDA", "resources.device=cpu", "cimage doctor"],
    )


@pytest.mark.parametrize(
    ("backend", "module"), [("torch-sparse", "torch_sparse"), ("pyg-lib", "pyg_lib")]
)
def test_sampler_not_installed(
    cli: Cli, tiny: list[str], monkeypatch: pytest.MonkeyPatch, backend: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    got = cli("pretrain", *tiny, "sampler.fanouts=[3,3]", f"sampler.backend={backend}")
    assert_complaint(got, ["sampler.backend", backend, "Install", "sampler.backend=csr"])


def test_validation_by_links_without_held_out_edges(cli: Cli, tiny: list[str]) -> None:
    got = cli("pretrain", *tiny, "train.validate_every=2", "train.validate_by=link")
    assert_complaint(got, ["train.validate_by", "data.holdout_edges=link"])


@pytest.mark.parametrize("verb", ["embed", "evaluate"])
def test_only_checkpoint_damaged(cli: Cli, tiny: list[str], trained: Path, verb: str) -> None:
    cut(trained / "ckpt" / "step-00000004" / "state.safetensors")
    assert_complaint(
        cli(verb, *tiny, f"run.dir={trained}"),
        [str(trained / "ckpt"), "No usable checkpoint", "cimage pretrain"],
    )


def test_damaged_records_of_a_run(cli: Cli, tiny: list[str], trained: Path) -> None:
    for name in ("metrics.jsonl", "summary.json", "env.json"):
        whole = (trained / name).read_text()
        (trained / name).write_text("{broken}\n")
        assert_complaint(
            cli("report", f"run.dir={trained}"), [str(trained / name), "not valid JSON"]
        )
        (trained / name).write_text(whole)
    assert cli("report", f"run.dir={trained}").code == 0


def test_a_failed_start_does_not_claim_the_directory(
    cli: Cli, tiny: list[str], trained: Path, tmp_path: Path
) -> None:
    """The second try with fixed settings runs, and equals a run in a fresh directory."""
    wrong = ["loss.factor_weight=1", "cluster.init=file", "cluster.labels_path=absent.npy"]
    assert cli("pretrain", *tiny, "run.dir=run", *wrong).code == 2
    assert cli("pretrain", *tiny, "run.dir=run").code == 0
    a, b = (
        [path.read_bytes() for path in root.rglob("state.safetensors")]
        for root in (trained, tmp_path / "run")
    )
    assert a == b and len(a) == 1
    assert not (tmp_path / "run" / "pseudo-labels").exists()


def test_a_failed_start_spares_the_run_of_another_process(
    cli: Cli, tiny: list[str], tmp_path: Path
) -> None:
    """Two processes begin at once; the one that finds the directory locked must not tidy up the
    other's files.
    """
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert_complaint(cli("pretrain", *tiny, "run.dir=run"), ["Another process", "run"])
    assert {"config.yaml", "env.json", "splits"} <= {
        path.name for path in (tmp_path / "run").iterdir()
    }


def test_a_failure_after_the_first_checkpoint_keeps_the_run(
    cli: Cli, tiny: list[str], trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert (
        cli("pretrain", *tiny, f"run.dir={trained}", "train.epochs=9", "resources.device=cuda").code
        == 2
    )
    assert (trained / "config.yaml").is_file() and (trained / "splits").is_dir()
    assert cli("embed", *tiny, f"run.dir={trained}").code == 0


def test_full_disk(cli: Cli, tiny: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*args: Any) -> None:
        raise OSError(28, "No space left on device", "run/ckpt")

    monkeypatch.setattr("cimage_dist.pipeline.stages.pretrain", no_room)
    assert_complaint(cli("pretrain", *tiny), ["No space left on device", "run/ckpt", "run.dir"])


def test_our_own_faults_are_told_apart(
    cli: Cli, tiny: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cimage_dist.pipeline.stages.pretrain", lambda *args: 1 / 0)
    got = cli("pretrain", *tiny, "--json")
    assert got.code == 1 and got.out == ""
    assert (
        "ZeroDivisionError" in got.err
        and "internal error" in got.err
        and "cimage doctor --json" in got.err
    )


def test_real_processes(tiny: list[str], trained: Path) -> None:
    """Exit codes as a shell sees them. Warnings (here of the damaged checkpoint) may stand above
    the message, one line each.
    """
    assert_complaint(process("pretrian"), ["pretrian"])
    assert_complaint(process("evaluate", "train.epochs=many"), ["train.epochs"])
    flip(trained / "ckpt" / "step-00000004" / "state.safetensors")
    got = process("embed", *tiny, f"run.dir={trained}")
    first, last = got.err.splitlines()
    assert_complaint(
        Outcome(got.code, got.out, last + "\n"), [str(trained / "ckpt"), "cimage pretrain"]
    )
    assert first.startswith("WARNING: ") and "state.safetensors" in first and "corrupted" in first
