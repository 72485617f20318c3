"""Kinds of mistakes in a user's own files and commands: each gives exit code 2 and a message with
the words of the table, no traceback. The 21 cases of a new user's review are at the end.
"""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import scipy.sparse as sp

from cimage_dist.config import DataConfig
from cimage_dist.data.ingest import open_graph
from tests.cli.bad_files import (
    ARRAYS,
    EDGES,
    FEATURES,
    LABELS,
    NAMES,
    PAIRS,
    RING,
    TEXT,
    Files,
    X,
    npy,
    npz,
    parquet,
    sparse,
    table,
    write,
)
from tests.cli.conftest import Cli

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
TIMES = pa.array(range(8), pa.timestamp("s"))
DAMAGED = sp.csr_matrix(X)
DAMAGED.indices = DAMAGED.indices + 5
WEIGHTED = [(*pair, weight) for pair, weight in zip(PAIRS, ["1"] * 7 + ["much"], strict=True)]

# kind: (files beside those of TEXT, settings, words of the message)
TABLES: dict[str, tuple[Files, str, list[str]]] = {
    "semicolons": ({"edges.csv": EDGES.replace(",", ";")}, "", ["commas, not ';'", "ann;bob"]),
    "tabs in csv": ({"edges.csv": EDGES.replace(",", "\t")}, "", ["commas, not '\\t'"]),
    "semicolons in features": (
        {"features.csv": FEATURES.replace(",", ";")},
        "",
        ["features.csv", "commas, not ';'"],
    ),
    "UTF-16": ({"edges.csv": EDGES.encode("utf-16")}, "", ["edges.csv", "save it as UTF-8"]),
    "Latin-1": (
        {"labels.csv": LABELS.replace("x", "é").encode("latin-1")},
        "",
        ["labels.csv", "byte 13", "UTF-8"],
    ),
    "spreadsheet as csv": ({"edges.csv": b"PK\x03\x04\x14\x00\xc8"}, "", ["spreadsheet", "csv"]),
    "spreadsheet": (
        {"edges.csv": None, "edges.xlsx": b"PK\x03\x04"},
        "",
        ["edges.xlsx is of a kind", "edges.csv, edges.tsv"],
    ),
    "zip": ({"edges.csv": None, "edges.csv.zip": b"PK\x03\x04"}, "", ["edges.csv.zip", ".gz"]),
    "json": ({"edges.csv": None, "edges.json": "[]"}, "", ["edges.json is of a kind"]),
    "features in json": ({"features.csv": None, "features.json": ""}, "", ["features.json is of"]),
    "labels as pickle": ({"labels.csv": None, "labels.pkl": b"x"}, "", ["labels.pkl is of a kind"]),
    "gzip without .gz": (
        {"edges.csv": gzip.compress(EDGES.encode())},
        "",
        ["compressed by gzip: add .gz"],
    ),
    ".gz without gzip": ({"edges.csv": None, "edges.csv.gz": EDGES}, "", ["Not a gzipped file"]),
    "gzip cut short": (
        {"edges.csv": None, "edges.csv.gz": gzip.compress(EDGES.encode() * 50)[:-20]},
        "",
        ["edges.csv.gz cannot be read", "truncated"],
    ),
    "parquet as csv": ({"edges.csv": parquet(a=[1])}, "", ["parquet file: name it .parquet"]),
    "array as csv": ({"edges.csv": npy(RING)}, "", ["array of numpy: name it .npy"]),
    "web page": ({"edges.csv": "<!DOCTYPE html>\n<html></html>\n"}, "", ["it is a web page"]),
    "Git LFS pointer": ({"edges.csv": POINTER}, "", ["git lfs pull"]),
    "header and nothing else": ({"edges.csv": "source,target\n"}, "", ["edges.csv is empty"]),
    "comments alone": ({"edges.csv": "# none\n# here\n"}, "", ["edges.csv is empty"]),
    "open quote": ({"edges.csv": EDGES + '"ann,bob\n'}, "", ["line 10 has 1 cells"]),
    "zero byte in an id": ({"edges.csv": EDGES.replace("bob", "b\0b", 1)}, "", ["'b\\x00b'"]),
    "a longer line far down": ({"edges.csv": EDGES * 30 + "ann,bob,cat\n"}, "", ["line 271"]),
    "stranger in an edge": ({"edges.csv": EDGES + "zoe,ann\n"}, "", ["'zoe'", "such as 'ann'"]),
    "other spelling of an id": ({"edges.csv": EDGES.replace("ann", "Ann")}, "", ["'Ann'"]),
    "numbers for names": ({"edges.csv": "source,target\n0,1\n"}, "", ["'0'", "'ann'"]),
    "id twice in features": ({"features.csv": FEATURES + "ann,1,2\n"}, "", ["once", "'ann'"]),
    "features without features": ({"features.csv": "id\nann\n"}, "", ["id column and no features"]),
    "empty features": ({"features.csv": ""}, "", ["features.csv is empty"]),
    "decimal commas": (
        {"features.csv": table("id,age", [(n, f'"{i},5"') for i, n in enumerate(NAMES)])},
        "",
        ["must be numbers", "'age'", "'0,5'"],
    ),
    "question mark": ({"features.csv": FEATURES.replace("0.5", "?")}, "", ["'age'", "'?'"]),
    "empty cell": ({"features.csv": FEATURES.replace("n,0.5", "n,")}, "", ["row 0 column 0 = nan"]),
    "infinite cell": ({"features.csv": FEATURES.replace("n,0.5", "n,inf")}, "", ["0 = inf"]),
    "number beyond float32": (
        {"features.csv": table("id,age", [(n, 10**40 + i) for i, n in enumerate(NAMES)])},
        "",
        ["too large for float32", "row 0 column 0 = 1e+40"],
    ),
    "text in parquet": (
        {"features.csv": None, "features.parquet": parquet(id=NAMES, f=["a"] * 8)},
        "",
        ["'f'", "'a'"],
    ),
    "lists in parquet": (
        {"features.csv": None, "features.parquet": parquet(id=NAMES, f=[[1.0, 2.0]] * 8)},
        "",
        ["must be numbers", "'f'"],
    ),
    "times as features": (
        {"features.csv": None, "features.parquet": parquet(id=NAMES, f=TIMES)},
        "",
        ["'f'", "dates and times"],
    ),
    "times as ids": (
        {"edges.csv": None, "edges.parquet": parquet(source=TIMES, target=TIMES)},
        "",
        ["integers or text", "timestamp"],
    ),
    "truth values as ids": (
        {"edges.csv": None, "edges.parquet": parquet(source=[True], target=[False])},
        "",
        ["integers or text; got bool"],
    ),
    "missing id in parquet": (
        {"edges.csv": None, "edges.parquet": parquet(source=["ann", None], target=["bob", "cat"])},
        "",
        ["1 node ids are missing", "row 2"],
    ),
    "no rows in parquet": (
        {"edges.csv": None, "edges.parquet": parquet(source=NAMES[:0], target=NAMES[:0])},
        "",
        ["no edge"],
    ),
    "label of a stranger": ({"labels.csv": LABELS + "zoe,x\n"}, "", ["labels.csv", "'zoe'"]),
    "labels without labels": ({"labels.csv": "id\nann\nbob\n"}, "", ["id column and no label"]),
    "two columns of labels": (
        {"labels.csv": table("id,colour,taste", [(n, 1, 2) for n in NAMES])},
        "",
        ["it has 3", "id,colour,taste", "data.columns.label"],
    ),
    "labels that are measurements": (
        {"labels.csv": table("id,label", [(n, i / 3) for i, n in enumerate(NAMES)])},
        "",
        ["not whole numbers"],
    ),
    "split of a stranger": ({"splits.csv": "id,split\nann,train\nzoe,test\n"}, "", ["'zoe'"]),
    "node in a split twice": (
        {"splits.csv": "id,split\nann,train\nann,test\n"},
        "",
        ["splits.csv", "more than once", "'ann'"],
    ),
    "columns that are not there": (
        {},
        "data.columns.source=person data.columns.target=target",
        ["no column 'person'", "data.columns.source", "source,target"],
    ),
    "one end named": ({}, "data.columns.source=source", ["name the other", "columns.target="]),
    "one column for both ends": (
        {},
        "data.columns.source=source data.columns.target=source",
        ["the same column", "'source'"],
    ),
    "unknown role of a column": ({}, "data.columns.from=source", ["source, target", "'from'"]),
    "label column not there": ({}, "data.columns.label=colour", ["'colour'", "id,label"]),
    "words as weights": (
        {"edges.csv": table("source,target,weight", WEIGHTED)},
        "data.columns.weight=weight",
        ["weights of graph 'mine'", "no finite numbers", "'1'"],
    ),
    "header that may be": ({}, "data.header.edges=maybe", ["present or absent", "'maybe'"]),
    "header of nothing": ({}, "data.header.nodes=present", ["edges, features", "'nodes'"]),
    "features by an unknown rule": ({}, "data.features=foo", ["'foo'", "degree", "laplacian"]),
    "features twice": ({"features.npy": npy(X)}, "", ["several features", "features.npy"]),
    "edges under another name": (
        {"edges.csv": None, "Edges.csv": EDGES},
        "",
        ["no edges file", "Edges.csv", "rename"],
    ),
    "folder called edges.csv": ({"edges.csv": None, "edges.csv/": None}, "", ["no edges file"]),
}

# The same for arrays: beside the files of ARRAYS.
MATRICES: dict[str, tuple[Files, str, list[str]]] = {
    "flat edges": ({"edges.npy": npy(np.arange(8))}, "", ["[E, 2] or [2, E]", "(8,)"]),
    "complex edges": ({"edges.npy": npy(RING * 1j)}, "", ["integers", "complex128"]),
    "truth values as edges": ({"edges.npy": npy(RING > 3)}, "", ["integers", "bool"]),
    "dense adjacency": ({"edges.npy": npy(np.eye(8))}, "", ["(8, 8)", "scipy.sparse.save_npz"]),
    "three rows of edges": ({"edges.npy": npy(RING[:, [0, 1, 1]].T)}, "", ["(3, 8)"]),
    "empty npz": ({"edges.npy": None, "edges.npz": npz()}, "", ["'edges'", "holds nothing"]),
    "other names in npz": (
        {"edges.npy": None, "edges.npz": npz(a=RING)},
        "",
        ["it holds a", "np.savez(file, edges=...)"],
    ),
    "rectangular adjacency": (
        {"edges.npy": None, "edges.npz": sparse(np.ones((8, 5)))},
        "",
        ["as many rows as columns", "8 x 5"],
    ),
    "adjacency of fewer nodes": (
        {"edges.npy": None, "edges.npz": sparse(np.ones((5, 5)))},
        "",
        ["features.npy has 8", "edges.npz has 5"],
    ),
    "adjacency that is not finite": (
        {"edges.npy": None, "edges.npz": sparse(np.full((8, 8), np.nan))},
        "",
        ["edges.npz", "finite"],
    ),
    "complex features": ({"features.npy": npy(X * 1j)}, "", ["table of numbers", "complex128"]),
    "text as features": ({"features.npy": npy(X.astype(str))}, "", ["table of numbers", "<U"]),
    "features in three dimensions": ({"features.npy": npy(X[None])}, "", ["(1, 8, 2)"]),
    "records as features": (
        {"features.npy": npy(np.zeros(8, dtype=[("a", float), ("b", float)]))},
        "",
        ["[nodes, columns]"],
    ),
    "features cut short": ({"features.npy": npy(X)[:-30]}, "", ["features.npy", "truncated"]),
    "pointer as features": ({"features.npy": POINTER}, "", ["git lfs pull"]),
    "sparse features, damaged": (
        {"features.npy": None, "features.npz": sparse(DAMAGED)},
        "",
        ["features.npz cannot be read"],
    ),
    "labels under another name": (
        {"labels.npy": None, "labels.npz": npz(t=RING[:, 0])},
        "",
        ["no array 'y'", "it holds t"],
    ),
    "list as splits": ({"splits.json": "[1, 2]"}, "", ["train, val and test", "none"]),
    "splits by other words": ({"splits.json": '{"training": [0]}'}, "", ["'training'"]),
    "short masks": (
        {"splits.npz": npz(train=np.ones(5, bool), test=np.ones(5, bool))},
        "",
        ["5 rows", "8 nodes"],
    ),
    "no training nodes": (
        {"splits.json": '{"train": [], "test": [1]}'},
        "",
        ["no node is in train"],
    ),
    "no test nodes": ({"splits.json": '{"train": [1], "val": [2]}'}, "", ["no node is in test"]),
    "fewer ids than rows": ({"ids.txt": "\n".join(NAMES[:5])}, "", ["has 8 rows for 5 ids"]),
    "an id twice": ({"ids.txt": "\n".join([*NAMES[:7], "ann"])}, "", ["ids.txt", "'ann'"]),
    "pairs as ids": ({"ids.npy": npy(RING)}, "", ["ids.npy", "one id for each row", "(8, 2)"]),
}


def complaint(cli: Cli, folder: Path, files: Files, *argv: str) -> str:
    write(folder, files)
    got = cli(*argv)
    assert got.code == 2 and got.out == "", got
    assert "Traceback" not in got.err
    return got.err.splitlines()[-1]


@pytest.mark.parametrize("kind", TABLES)
def test_tables(cli: Cli, tmp_path: Path, kind: str) -> None:
    files, settings, words = TABLES[kind]
    said = complaint(cli, tmp_path / "mine", {**TEXT, **files}, "ingest", "mine", *settings.split())
    for word in words:
        assert word in said


@pytest.mark.parametrize("kind", MATRICES)
def test_matrices(cli: Cli, tmp_path: Path, kind: str) -> None:
    files, settings, words = MATRICES[kind]
    said = complaint(
        cli, tmp_path / "mine", {**ARRAYS, **files}, "ingest", "mine", *settings.split()
    )
    for word in words:
        assert word in said


def test_at_least_sixty_kinds() -> None:
    assert len(TABLES) + len(MATRICES) >= 60


# ---- the review: cases that were misread in silence, answered misleadingly, or thinly

SHUFFLED = [4, 0, 2, 1, 3, 7, 6, 5]
BY_ID = table("node_id,a,b", [(i, *X[i]) for i in SHUFFLED])
RIGHT: dict[str, Files] = {
    "numeric header of pandas": {"features.csv": table("0,1", [tuple(row) for row in X])},
    "ids in shuffled csv": {"features.csv": BY_ID},
    "ids in shuffled parquet": {
        "features.parquet": parquet(id=SHUFFLED, a=X[SHUFFLED, 0], b=X[SHUFFLED, 1])
    },
    "index of pandas": {"features.csv": BY_ID.replace("node_id,a,b", ",0,1")},
}


@pytest.mark.parametrize("case", RIGHT)
def test_what_was_misread_is_right(tmp_path: Path, case: str) -> None:
    write(tmp_path / "mine", {"edges.npy": npy(RING), **RIGHT[case]})
    data = DataConfig("mine", path=str(tmp_path / "mine"), store_dir=str(tmp_path / "stores"))
    data.normalize = "none"
    if case == "numeric header of pandas":
        data.header = {"features": "present"}  # two columns leave it open, and that is said
    np.testing.assert_array_equal(open_graph(data).x, X.astype(np.float32))


TIMED = table("timestamp,user,item", [(9, a, b) for a, b in RING.tolist()])
REFUSED: dict[str, tuple[Files, str, list[str]]] = {
    "edges under 0,1": ({"edges.csv": "0,1\n2,3\n4,5\n6,7\n"}, "", ["data.header.edges"]),
    "features times 1e30": (
        {"features.npy": npy(X * 1e30)},
        "data.normalize=none",
        ["1.45e+31", "data.normalize=unit"],
    ),
    "timestamp,user,item": ({"edges.csv": TIMED}, "", ["3 columns", "data.columns.source="]),
    "weight first, without names": ({"edges.csv": TIMED[20:]}, "", ["3 columns", "9,0,1"]),
    "id beyond 64 bits": ({"edges.csv": f"2,1\n1,{2**70}\n"}, "", ["not integers", str(2**70)]),
    "too few rows of features": (
        {"edges.npy": npy(RING), "features.npy": npy(X[:5])},
        "",
        ["features.npy has 5", "labels.npy has 8"],
    ),
    "zero features": ({"features.npy": npy(X * 0)}, "", ["all zero", "data.features=degree"]),
    "one label twice": ({"labels.csv": "id,label\n3,0\n3,1\n"}, "", ["once", "First: 3"]),
    "fan-outs as text": ({}, "sampler.fanouts=10,10", ["sampler.fanouts", "[10,10]"]),
    "normalize=yes": ({}, "data.normalize=yes", ["data.normalize=yes", "yaml reads yes"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_was_misread_or_blamed_wrongly(cli: Cli, tmp_path: Path, case: str) -> None:
    files, settings, words = REFUSED[case]
    without = {f"{name.partition('.')[0]}.npy": None for name in files}
    given = {**ARRAYS, **without, **files}
    said = complaint(cli, tmp_path / "mine", given, "ingest", "mine", *settings.split())
    for word in words:
        assert word in said


WARNED: dict[str, tuple[Files, str]] = {
    "weights": (
        {"edges.npy": None, "edges.csv": table("source,target,weight", [(0, 1, 2), (1, 2, 3)])},
        "edge weights are not kept (data.columns.weight keeps them)",
    ),
    "one class": ({"labels.npy": npy(np.zeros(8, int))}, "one class only"),
    "a class for each node": ({"labels.npy": npy(np.arange(8))}, "a class of its own"),
    "ids from 1": ({"edges.npy": npy(RING[1:7])}, "If ids count from 1"),
    "equal features": ({"features.npy": npy(np.ones((8, 2)))}, "all rows are the same"),
}


@pytest.mark.parametrize("case", WARNED)
def test_what_is_read_with_a_warning(cli: Cli, tmp_path: Path, case: str) -> None:
    files, words = WARNED[case]
    write(tmp_path / "mine", {**ARRAYS, **files})
    got = cli("ingest", "mine")
    assert got.code == 0 and words in got.out


def test_tab_in_yaml_and_short_fanouts(cli: Cli, tmp_path: Path) -> None:
    write(tmp_path / "mine", ARRAYS)
    (tmp_path / "my.yaml").write_text("train:\n\tepochs: 3\n")
    got = cli("pretrain", "my.yaml")
    assert got.code == 2 and "my.yaml" in got.err and "tab" in got.err
    short = ["sampler.fanouts=[2]", "model.propagation=routing", "model.num_layers=3"]
    got = cli("pretrain", "mine", *short)
    assert got.code == 2 and "sampler.fanouts" in got.err and "model.num_layers" in got.err
    plan = cli("show", "mine", "--plan", *short)
    assert plan.code == 2 and got.err.partition("sampler.")[2] in plan.err
