"""A folder of csv files with text ids, from the first command to neighbours, tables and a page; and
how the front door answers.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import cimage_dist
from cimage_dist.config_loading import load_config
from cimage_dist.pipeline import neighbors as module
from cimage_dist.pipeline.neighbors import export, nearest, neighbors
from tests.cli.conftest import TRAINING, Cli

CLASSES = np.array(["bird", "cat", "dog"])


def csv_graph(folder: Path, num_nodes: int = 90) -> pd.DataFrame:
    """Three groups that link among themselves; rows of the features are shuffled. The features."""
    rng = np.random.default_rng(0)
    names = np.array(["alice", *(f"user-{i:02d}" for i in range(1, num_nodes))])
    group = rng.integers(0, 3, num_nodes)
    ends = rng.integers(0, num_nodes, (12 * num_nodes, 2))
    ends = ends[(group[ends[:, 0]] == group[ends[:, 1]]) & (ends[:, 0] != ends[:, 1])]
    folder.mkdir()
    pd.DataFrame(names[ends], columns=["source", "target"]).to_csv(
        folder / "edges.csv", index=False
    )
    x = 0.5 * np.eye(3)[group] @ rng.normal(size=(3, 8)) + rng.normal(size=(num_nodes, 8))
    features = pd.DataFrame(x, columns=[f"f{i}" for i in range(8)])
    features.insert(0, "id", names)
    features.sample(frac=1, random_state=1).to_csv(folder / "features.csv", index=False)
    pd.DataFrame({"id": names, "label": CLASSES[group]}).to_csv(folder / "labels.csv", index=False)
    return features


@pytest.fixture
def trained_folder(cli: Cli, tmp_path: Path) -> list[str]:
    """The settings of a run on my_graph."""
    csv_graph(tmp_path / "my_graph")
    settings = ["my_graph", *TRAINING]
    got = cli("pretrain", *settings)
    assert got.code == 0 and "runs/my_graph/" in got.out, got.err
    return settings


def test_tables_and_neighbours_carry_the_ids(
    cli: Cli, trained_folder: list[str], tmp_path: Path
) -> None:
    files = ["a.parquet", "a.csv", "a.csv.gz", "a.npy", "board/a.tsv"]
    got = cli("export", *trained_folder, *(f"--to={name}" for name in files), "--json")
    assert got.code == 0, got.err
    z = np.load("a.npy")
    ids = pd.read_csv("a-ids.csv")["id"]
    assert json.loads(got.out)["rows"] == len(z) == 90
    assert set(ids) == {"alice", *(f"user-{i:02d}" for i in range(1, 90))}
    wide = pd.read_parquet("a.parquet")
    assert wide.columns.tolist() == ["id", *(f"z{i}" for i in range(z.shape[1]))]
    assert wide["id"].tolist() == ids.tolist()
    np.testing.assert_array_equal(wide.drop(columns="id").to_numpy(), z)
    for name in ("a.csv", "a.csv.gz"):
        table = pd.read_csv(name)
        assert table["id"].tolist() == ids.tolist()
        np.testing.assert_allclose(table.drop(columns="id"), z, rtol=1e-6)
    np.testing.assert_allclose(np.loadtxt("board/a.tsv"), z, rtol=1e-4, atol=1e-6)
    about = pd.read_csv("board/a-metadata.tsv", sep="\t")
    assert about["id"].tolist() == ids.tolist() and set(about["label"]) == set(CLASSES)
    config = (tmp_path / "board" / "projector_config.pbtxt").read_text()
    assert "a.tsv" in config and "a-metadata.tsv" in config
    assert not list(tmp_path.rglob(".tmp-*"))

    got = cli("neighbors", *trained_folder, "--id", "user-07", "--id=user-03", "-k", "4", "--json")
    rows = pd.DataFrame(json.loads(got.out)["neighbors"])
    assert rows["id"].tolist() == ["user-07"] * 4 + ["user-03"] * 4
    unit = z / np.linalg.norm(z, axis=1, keepdims=True)
    at = ids.tolist().index("user-07")
    cosine = unit @ unit[at]
    cosine[at] = -2
    order = np.argsort(-cosine)[:4]
    assert rows["neighbor"][:4].tolist() == ids[order].tolist()
    np.testing.assert_allclose(rows["cosine"][:4], cosine[order], atol=1e-5)
    edges = pd.read_csv("my_graph/edges.csv").to_numpy().tolist()
    linked = [["user-07", n] in edges or [n, "user-07"] in edges for n in rows["neighbor"][:4]]
    assert rows["linked"][:4].tolist() == linked
    shown = cli("neighbors", *trained_folder, "--id", "user-07", "-k", "2").out
    assert "nearest to user-07" in shown and rows["neighbor"][0] in shown


@pytest.mark.parametrize(
    "argv, words",
    [
        (["neighbors", "--id", "nobody"], "'nobody'"),
        (["neighbors"], "Give --id"),
        (["neighbors", "--id", "user-07", "-k", "0"], "k must be at least 1"),
        (["export", "--to", "a.doc"], "end it with one of .parquet, .csv"),
    ],
)
def test_mistakes(cli: Cli, trained_folder: list[str], argv: list[str], words: str) -> None:
    got = cli(argv[0], *trained_folder, *argv[1:])
    assert got.code == 2 and words in got.err


def test_nearest_is_exact_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    z = rng.normal(size=(50, 4)).astype(np.float32)
    z[7] = z[3]  # a tie
    z[9] = 0
    whole = nearest(z, np.array([3, 20, 3]), 60)
    monkeypatch.setattr(module, "_BLOCK_VALUES", 4 * 6)
    parts = nearest(z, np.array([3, 20, 3]), 60)
    np.testing.assert_array_equal(whole[0], parts[0])
    np.testing.assert_allclose(whole[1], parts[1], atol=1e-6)
    assert whole[0].shape == (3, 49) and whole[0][0, 0] == 7
    for row, found in zip([3, 20, 3], whole[0], strict=True):
        assert sorted([row, *found]) == list(range(50))


def test_an_index_for_faiss(cli: Cli, trained_folder: list[str]) -> None:
    try:
        import faiss
    except ImportError:
        got = cli("export", *trained_folder, "--to", "a.faiss")
        assert got.code == 2 and "pip install faiss-cpu" in got.err
        return
    assert cli("export", *trained_folder, "--to=a.faiss", "--to=a.parquet").code == 0
    index, table = faiss.read_index("a.faiss"), pd.read_parquet("a.parquet")
    unit = table.drop(columns="id").to_numpy(copy=True)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    _, found = index.search(unit[:3], 1)
    assert found[:, 0].tolist() == [0, 1, 2]


def test_the_same_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    csv_graph(tmp_path / "my_graph")
    graph = cimage_dist.open_graph("my_graph")
    z = np.random.default_rng(0).normal(size=(90, 3))
    assert export(z, graph, "deep/er/z.parquet") == [Path("deep/er/z.parquet")]
    found = neighbors(z, graph, "user-01", k=2)
    assert found.columns.tolist() == ["id", "rank", "neighbor", "cosine", "linked"]
    numbered = cimage_dist.Graph.from_edges(np.array([[0, 1, 2], [1, 2, 3]]))
    assert neighbors(z[:4], numbered, [2, 0], k=1)["id"].tolist() == [2, 0]
    with pytest.raises(cimage_dist.UserError, match="numbered from 0 to 3"):
        neighbors(z[:4], numbered, ["a"])
    with pytest.raises(cimage_dist.UserError, match="outside the graph"):
        neighbors(z[:4], numbered, [4])


def test_a_config_for_a_folder(cli: Cli, tmp_path: Path) -> None:
    csv_graph(tmp_path / "my graph")
    got = cli("new", "my graph")
    assert got.code == 0 and "edges.csv, features.csv, labels.csv" in got.out
    cfg = load_config("my-graph.yaml")
    assert cfg.data.path == "my graph" and cfg.data.features == "given"
    assert cli("pretrain", "my-graph.yaml", *TRAINING, "--quiet").code == 0
    assert cli("new", "my graph").code == 2
    (tmp_path / "my graph" / "features.csv").unlink()
    (tmp_path / "my graph" / "labels.csv").unlink()
    assert cli("new", "my graph", "--out", "other.yaml").code == 0
    bare = load_config("other.yaml")
    assert bare.data.features == "degree" and bare.data.holdout_edges == "auto"
    assert cli("new", "nowhere").code == 2


@pytest.mark.parametrize("verb", ["ingest", "pretrain", "embed", "evaluate", "report", "neighbors"])
def test_a_verb_alone_explains_itself(cli: Cli, verb: str) -> None:
    got = cli(verb)
    assert got.code == 2 and f"cimage {verb} my_graph/" in got.err and "show --keys" in got.err


def test_a_path_alone_names_the_graph(cli: Cli, tmp_path: Path) -> None:
    csv_graph(tmp_path / "digits")  # the name of a built-in graph
    assert "name: own-digits" in cli("show", "data.path=digits").out
    assert "name: mine" in cli("show", "data.path=digits", "data.name=mine").out


@pytest.mark.parametrize(
    "argv",
    [
        ["pretrian"],
        ["pretrain", "train.epoch=3"],
        ["embed", "nosuch.yaml"],
        ["compare", "data.nam=x"],
        ["neighbors"],
        ["show", "--keys"],
    ],
)
def test_a_typo_is_answered_without_loading_torch(argv: list[str]) -> None:
    """What takes seconds is the import of torch, ray, pandas and the like."""
    code = (
        "import sys; from cimage_dist.__main__ import main; main(sys.argv[1:]); "
        "print([m for m in ('torch', 'ray', 'pandas', 'sklearn', 'numba') if m in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, *argv], capture_output=True, text=True, check=True
    )
    assert found.stdout.splitlines()[-1] == "[]"


def test_keys_in_a_pipe_are_one_line_each(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cimage_dist", "show", "--keys"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"COLUMNS": "80"},
    )
    lines = done.stdout.splitlines()
    found = {line.split()[0]: line for line in lines[1:]}
    assert len(found) == len(lines) - 1 > 100
    assert "unit | row | none | source" in found["data.normalize"]
    assert (
        "true | false" in found["run.tensorboard"] and "number or null" in found["model.teleport"]
    )


def blocks_of_the_readme(language: str) -> list[str]:
    text = (Path(__file__).parents[2] / "README.md").read_text()
    return [b for b in re.findall(rf"```{language}\n(.*?)```", text, re.S) if "alice" in b]


def test_the_four_commands_of_the_readme(cli: Cli, tmp_path: Path) -> None:
    csv_graph(tmp_path / "my_graph")
    (block,) = blocks_of_the_readme("bash")
    commands = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert len(commands) == 4
    for command in commands:
        assert command[0] == "cimage"
        got = cli(*command[1:])
        assert got.code == 0, got.err
        if command[1] == "neighbors":
            assert got.out.count("user-") == 5
    table = pd.read_parquet("embeddings.parquet")
    assert "alice" in table["id"].tolist() and len(table) == 90
    page = next(tmp_path.glob("runs/**/report.html")).read_text()
    assert "alice" in page and "Test accuracy" in page and "bird" in page


def test_the_eight_lines_of_the_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    csv_graph(tmp_path / "my_graph")
    (block,) = blocks_of_the_readme("python")
    assert len([line for line in block.splitlines() if line.strip()]) <= 8
    exec(block, {})
    assert capsys.readouterr().out.count("user-") >= 5
    assert "alice" in pd.read_parquet("embeddings.parquet")["id"].tolist()
    page = (tmp_path / "runs" / "mine" / "report.html").read_text()
    assert "alice" in page and "Test accuracy" in page
