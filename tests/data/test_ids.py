"""Ids of any kind are mapped once; tables are joined by them; columns are found by name."""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from cimage_dist.config import Config, DataConfig, fingerprint
from cimage_dist.config_loading import load_config
from cimage_dist.data.ids import NodeIds
from cimage_dist.data.ingest import open_graph, store_path
from cimage_dist.data.store import Graph
from cimage_dist.errors import UserError

# a square with one diagonal and a lonely node, by name
NAMES = ["ann", "bob", "cat", "dan", "eve"]
PAIRS = [(0, 1), (1, 2), (2, 3), (3, 0), (2, 0)]
X = np.array([[0.5, 0, 1], [0, 2, 0], [1, 1, 1], [0, 0, 4], [3, 0, 0]], dtype=np.float32)
SHUFFLED = [3, 0, 4, 2, 1]
LARGE = [9_007_199_254_740_993 + 2 * i for i in range(5)]  # not exact as floats

Write = Callable[..., DataConfig]


@pytest.fixture
def folder(tmp_path: Path) -> Write:
    """Writes files given as text, bytes or what writes them; returns their config."""

    def write(columns: dict[str, str] | None = None, **files: object) -> DataConfig:
        mine = tmp_path / "mine"
        mine.mkdir(exist_ok=True)
        for name, content in files.items():
            path = mine / name.replace("__", ".")
            if callable(content):
                content(path)
            else:
                path.write_bytes(content.encode() if isinstance(content, str) else content)
        return DataConfig(
            name="mine",
            path=str(mine),
            normalize="none",
            store_dir=str(tmp_path / "stores"),
            columns=columns or {},
        )

    return write


def edge_text(ids: list[object], head: str = "source,target\n") -> str:
    return head + "".join(f"{ids[a]},{ids[b]}\n" for a, b in PAIRS)


def feature_text(ids: list[object], order: list[int], head: str = "id,f,g,h\n") -> str:
    return head + "".join(f"{ids[i]},{','.join(f'{v:g}' for v in X[i])}\n" for i in order)


def label_text(ids: list[object], order: list[int], head: str = "node_id,label\n") -> str:
    return head + "".join(f"{ids[i]},{'even' if i % 2 == 0 else 'odd'}\n" for i in order)


def neighbours(graph: Graph) -> dict[object, set[object]]:
    names = range(graph.num_nodes) if graph.ids is None else graph.ids.to_numpy().tolist()
    names = list(names)
    ends = zip(graph.indptr[:-1], graph.indptr[1:], strict=True)
    return {
        names[i]: {names[j] for j in graph.indices[a:b].tolist()} for i, (a, b) in enumerate(ends)
    }


def expected(ids: list[object]) -> dict[object, set[object]]:
    out: dict[object, set[object]] = {i: set() for i in ids}
    for a, b in PAIRS:
        out[ids[a]].add(ids[b])
        out[ids[b]].add(ids[a])
    return out


def check_whole(graph: Graph, ids: list[object]) -> None:
    """Edges, features and labels are at their nodes, whatever the order."""
    assert neighbours(graph) == expected(ids)
    names = list(range(5)) if graph.ids is None else graph.ids.to_numpy().tolist()
    rows = [ids.index(name) for name in names]
    np.testing.assert_array_equal(graph.x, X[rows])
    assert graph.y is not None
    np.testing.assert_array_equal(graph.y, [i % 2 for i in rows])


@pytest.mark.parametrize("ids", [NAMES, LARGE, ["7", "007", "1e3", "NA", "a b"], [5, 3, 9, -2, 1]])
def test_shuffled_tables_are_joined_by_their_ids(folder: Write, ids: list[object]) -> None:
    graph = open_graph(
        folder(
            edges__csv=edge_text(ids),
            features__csv=feature_text(ids, SHUFFLED),
            labels__csv=label_text(ids, SHUFFLED[::-1]),
        )
    )
    check_whole(graph, ids)
    assert graph.ids is not None and len(graph.ids) == 5
    assert graph.manifest["files"].keys() >= {"ids.npy"}


def test_ids_that_are_row_numbers_put_rows_in_that_order(folder: Write) -> None:
    ids: list[object] = list(range(5))
    graph = open_graph(
        folder(
            edges__csv=edge_text(ids),
            features__csv=feature_text(ids, SHUFFLED, "node_id,f,g,h\n"),
            labels__csv=label_text(ids, SHUFFLED),
        )
    )
    check_whole(graph, ids)
    assert graph.ids is None and "ids.npy" not in graph.manifest["files"]
    np.testing.assert_array_equal(graph.x, X)


def parquet(**columns: object) -> Callable[[Path], None]:
    return lambda path: pd.DataFrame(columns).to_parquet(path)


FORMS: dict[str, dict[str, object]] = {
    "gzip": {
        "edges__csv__gz": gzip.compress(edge_text(NAMES).encode()),
        "features__tsv__gz": gzip.compress(
            feature_text(NAMES, SHUFFLED).replace(",", "\t").encode()
        ),
    },
    "parquet": {
        "edges__parquet": parquet(
            src=[NAMES[a] for a, _ in PAIRS], dst=pd.Categorical([NAMES[b] for _, b in PAIRS])
        ),
        "features__parquet": parquet(
            f=X[SHUFFLED, 0], g=X[SHUFFLED, 1], id=[NAMES[i] for i in SHUFFLED], h=X[SHUFFLED, 2]
        ),
    },
    "pandas index": {
        "edges__csv": lambda p: pd.DataFrame(
            [(NAMES[a], NAMES[b]) for a, b in PAIRS], columns=["u", "v"]
        ).to_csv(p),
        "features__csv": lambda p: (
            pd.DataFrame(X, index=NAMES).loc[[NAMES[i] for i in SHUFFLED]].to_csv(p)
        ),
    },
    "parquet index": {
        "edges__txt": edge_text(NAMES, "").replace(",", " "),
        "features__parquet": lambda p: pd.DataFrame(X, index=NAMES, columns=list("fgh")).to_parquet(
            p
        ),
    },
    "ids beside arrays": {
        "edges__npy": lambda p: np.save(p, np.array([(NAMES[a], NAMES[b]) for a, b in PAIRS])),
        "features__npz": lambda p: sp.save_npz(p, sp.csr_array(X)),
        "ids__txt": "\n".join(NAMES) + "\n",
    },
    "ids and a shuffled table": {
        "edges__csv": edge_text(NAMES),
        "features__csv": feature_text(NAMES, SHUFFLED),
        "ids__csv": "id\n" + "\n".join(NAMES) + "\n",
    },
    "ids and an adjacency": {
        "edges__npz": lambda p: sp.save_npz(
            p, sp.coo_array((np.ones(5), tuple(zip(*PAIRS, strict=True))), shape=(5, 5))
        ),
        "features__npy": lambda p: np.save(p, X),
        "ids__npy": lambda p: np.save(p, np.array(NAMES)),
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_every_format_carries_ids(folder: Write, form: str) -> None:
    labels = label_text(NAMES, SHUFFLED)
    check_whole(open_graph(folder(labels__csv=labels, **FORMS[form])), NAMES)


def test_without_features_the_nodes_are_those_that_occur(folder: Write) -> None:
    data = folder(edges__csv=edge_text(NAMES), labels__csv="id,label\neve,1\nann,0\n")
    data.features = "degree"
    graph = open_graph(data)
    assert graph.ids is not None and graph.ids.to_numpy().tolist() == NAMES
    assert neighbours(graph) == expected(NAMES)
    np.testing.assert_array_equal(graph.y, [0, -1, -1, -1, 1])


def test_ids_from_one_make_no_phantom_node(folder: Write) -> None:
    data = folder(edges__txt="1 2\n2 3\n3 1\n")
    data.features = "degree"
    graph = open_graph(data)
    assert graph.num_nodes == 3 and graph.ids is not None
    assert graph.ids.to_numpy().tolist() == [1, 2, 3]


def test_an_adjacency_says_how_many_nodes_there_are(folder: Write) -> None:
    matrix = sp.csr_array(
        (np.array([2.0, 0.0]), (np.array([0, 1]), np.array([2, 2]))), shape=(6, 6)
    )
    data = folder(edges__npz=lambda p: sp.save_npz(p, matrix))
    data.features = "degree"
    graph = open_graph(data)
    assert graph.num_nodes == 6 and graph.num_edges == 2  # a stored zero is no edge
    assert graph.manifest["notes"]["ignored_columns"] == {"edges.npz": ["weight"]}


def test_splits_name_nodes_by_id(folder: Write) -> None:
    files: dict[str, object] = {
        "edges__csv": edge_text(NAMES),
        "features__csv": feature_text(NAMES, SHUFFLED),
        "labels__csv": label_text(NAMES, SHUFFLED),
    }
    split = json.dumps({"train": ["ann", "bob"], "val": ["cat"], "test": ["eve"]})
    graph = open_graph(folder(**files, splits__json=split))
    assert graph.ids is not None
    names = graph.ids.to_numpy()
    found = {key: sorted(names[mask].tolist()) for key, mask in graph.masks.items()}
    assert found == {"train": ["ann", "bob"], "val": ["cat"], "test": ["eve"]}


def test_ids_survive_reopening_pickling_and_staging(folder: Write, tmp_path: Path) -> None:
    data = folder(edges__csv=edge_text(NAMES), features__csv=feature_text(NAMES, SHUFFLED))
    graph = open_graph(data)
    data.stage_dir = str(tmp_path / "cache")
    for again in (pickle.loads(pickle.dumps(graph)), open_graph(data)):
        assert again.ids is not None and again.fingerprint == graph.fingerprint
        assert again.ids.to_numpy().tolist() == [NAMES[i] for i in SHUFFLED]
    ids = store_path(data) / "ids.npy"
    ids.write_bytes(ids.read_bytes()[:-1] + b"!")
    with pytest.raises(UserError, match=r"ids\.npy"):
        Graph.open(store_path(data))


def test_graphs_without_ids_keep_their_fingerprints_and_places(folder: Write) -> None:
    """Stores and results made before there were ids stay valid: these digests are of that time."""
    data = folder(
        edges__npy=lambda p: np.save(p, np.array(PAIRS)), features__npy=lambda p: np.save(p, X)
    )
    assert open_graph(data).fingerprint == "f05a9d4daaa36041"
    assert set(open_graph(data).manifest["provenance"]["options"]) == {
        "version", "source", "features", "made_features", "feature_dtype", "normalize", "path",
        "files",
    }  # fmt: skip
    named = load_config(overrides=["data.columns.source=a", "data.header.edges=absent"])
    assert fingerprint(named) == fingerprint(Config())


def test_unicode_ids_of_many_lengths(tmp_path: Path) -> None:
    import pyarrow as pa

    names = ["", "ä", "x" * 300, "日本", "7"]
    ids = NodeIds(pa.array(["skipped", *names], pa.large_string())[1:])
    files = ids.write(tmp_path)
    again = NodeIds.of_store({name: np.load(tmp_path / name, mmap_mode="r") for name in files})
    assert again.to_numpy().tolist() == names
    assert again.rows_of(["日本", "7"], "here").tolist() == [3, 4]


# ---- columns

TRIPLE = "12,ann,bob\n13,bob,cat\n14,cat,dan\n"


def test_more_columns_without_names_are_an_error_that_says_how(folder: Write) -> None:
    for head, shown in (("timestamp,user,item\n", "timestamp,user,item"), ("", "12,ann,bob |")):
        data = folder(edges__csv=head + TRIPLE)
        data.features = "degree"
        with pytest.raises(UserError, match="3 columns, and which two") as caught:
            open_graph(data)
        assert shown in str(caught.value) and "data.columns.source=" in str(caught.value)


@pytest.mark.parametrize(
    ("head", "columns"),
    [("timestamp,user,item\n", {"source": "user", "target": "item"}),
     ("", {"source": "1", "target": "2"}), ("w,v,u\n", {})],
)  # fmt: skip
def test_named_columns(folder: Write, head: str, columns: dict[str, str]) -> None:
    data = folder(columns, edges__csv=head + TRIPLE)
    data.features = "degree"
    graph = open_graph(data)
    assert graph.ids is not None and graph.ids.to_numpy().tolist() == NAMES[:4]
    ignored = graph.manifest["notes"]["ignored_columns"]["edges.csv"]
    assert ignored == [head.partition(",")[0] or "column 0"]
    assert store_path(data) != store_path(DataConfig(name="mine", path=data.path))


def test_weights_are_kept_when_asked_and_said_to_be_unused(folder: Write) -> None:
    text = "u,v,weight\nann,bob,2\nbob,ann,0.5\nbob,cat,3\ncat,cat,9\n"
    data = folder({"weight": "weight"}, edges__csv=text)
    data.features = "degree"
    graph = open_graph(data)
    assert graph.edge_weight is not None
    # ann: bob; bob: ann, cat; cat: bob
    np.testing.assert_array_equal(graph.edge_weight, [2.5, 2.5, 3, 3])
    assert "training does not use them" in graph.manifest["notes"]["weights"]
    data.columns = {}
    graph = open_graph(data)
    assert graph.edge_weight is None and "not kept" in graph.manifest["notes"]["weights"]
    assert graph.manifest["notes"]["ignored_columns"] == {"edges.csv": ["weight"]}


def test_labels_by_name_among_other_columns(folder: Write) -> None:
    graph = open_graph(
        folder(
            edges__csv=edge_text(NAMES),
            features__csv=feature_text(NAMES, SHUFFLED),
            labels__csv="since,label,id\n" + "".join(f"2020,{n[0]},{n}\n" for n in NAMES),
        )
    )
    assert graph.manifest["notes"]["class_names"] == list("abcde")
    assert graph.manifest["notes"]["ignored_columns"] == {"labels.csv": ["since"]}


# ---- mistakes

GOOD: dict[str, object] = {
    "edges__csv": edge_text(NAMES),
    "features__csv": feature_text(NAMES, SHUFFLED),
}
FEATURE_HEAD = "id,f,g,h\n"
MISTAKES: dict[str, tuple[dict[str, object], dict[str, str], list[str]]] = {
    "edge to a node without features": (
        {"edges__csv": edge_text(NAMES) + "ann,zoe\n"}, {}, ["edges.csv", "1 ids", "'zoe'", "'dan'"]
    ),
    "id twice in the features": (
        {"features__csv": feature_text(NAMES, [*SHUFFLED, 0])}, {}, ["more than once", "'ann'"]
    ),
    "id twice in the labels": (
        {"labels__csv": "id,label\nann,1\neve,2\nann,2\n"}, {},
        ["labels.csv", "1 node ids occur more than once", "'ann'"],
    ),
    "unknown id in the labels": (
        {"labels__csv": "id,label\nzoe,1\n"}, {}, ["labels.csv", "'zoe'"]
    ),
    "missing id": (
        {"features__csv": FEATURE_HEAD + "ann,1,2,3\n,1,2,3\n"}, {}, ["missing", "row 2"]
    ),
    "labels without ids": (
        {"labels__npy": lambda p: np.save(p, np.arange(5))}, {}, ["labels.npy has no ids"]
    ),
    "mask without ids": (
        {"splits__npz": lambda p: np.savez(p, train=np.ones(5, bool))}, {}, ["mask", "List the ids"]
    ),
    "adjacency without ids": (
        {"edges__csv": None, "edges__npz": lambda p: sp.save_npz(p, sp.eye_array(5))}, {},
        ["matrix without ids", "ids file"],
    ),
    "names but rows without ids": (
        {"features__csv": None, "features__npy": lambda p: np.save(p, X)}, {},
        ["not integers", "'ann'", "ids.txt"],
    ),
    "ids and too few rows": (
        {"features__csv": None, "features__npy": lambda p: np.save(p, X[:4]),
         "ids__txt": "id\n" + "\n".join(NAMES)}, {},
        ["features.npy has 4 rows for 5 ids"],
    ),
    "no such source column": (
        {}, {"source": "user", "target": "v"}, ["no column 'user'", "source"],
    ),
    "no such id column": (
        {"features__csv": feature_text(NAMES, SHUFFLED, "a,f,g,h\n")}, {"id": "key"},
        ["no column 'key'", "a,f,g,h"],
    ),
    "text feature": (
        {"features__csv": "id,age,town\n" + "".join(f"{n},1,Rome\n" for n in NAMES)}, {},
        ["'town'", "Rome"],
    ),
    "label among the features": (
        {"features__csv": "id,f,label\nann,1,0\nbob,2,1\n"}, {}, ["'label'", "must not see"]
    ),
    "ids only": ({"features__csv": "id\nann\nbob\n"}, {}, ["id column and no features"]),
    "rectangular adjacency": (
        {"edges__csv": None, "edges__npz": lambda p: sp.save_npz(p, sp.csr_array((3, 5)))}, {},
        ["3 x 5"],
    ),
    "weights of an array": (
        {"edges__csv": None, "edges__npy": lambda p: np.save(p, np.array(PAIRS))}, {"weight": "w"},
        ["data.columns.weight", "no weights"],
    ),
    "weights that are no numbers": (
        {"edges__csv": "u,v,w\nann,bob,heavy\n"}, {"weight": "w"}, ["finite numbers"]
    ),
    "semicolons": ({"edges__csv": "a;b\nann;bob\n"}, {}, ["separated by commas", "';'"]),
    "hash tags": ({"edges__csv": "#ai,#ml\nann,bob\n"}, {}, ["begins with #", "comment"]),
    "ragged": ({"edges__csv": "u,v\nann,bob\nann,bob,cat\n"}, {}, ["line 3 has 3 cells"]),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes(folder: Write, case: str) -> None:
    files, columns, words = MISTAKES[case]
    chosen = {name: content for name, content in (GOOD | files).items() if content is not None}
    with pytest.raises(UserError) as caught:
        open_graph(folder(columns, **chosen))
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_id_beyond_64_bits_with_row_numbers(folder: Write) -> None:
    data = folder(
        edges__csv="source,target\n0,1\n1,99999999999999999999\n",
        features__npy=lambda p: np.save(p, X),
    )
    with pytest.raises(UserError, match=r"1 node ids.*edge 2 has 99999999999999999999"):
        open_graph(data)
    del data
    graph = open_graph(
        folder(
            edges__csv="source,target\n0,1\n1,99999999999999999999\n",
            features__npy=lambda p: np.save(p, X[:3]),
            ids__txt="0\n1\n99999999999999999999\n",
        )
    )
    assert graph.ids is not None and graph.ids.to_numpy().tolist()[2] == "99999999999999999999"


@pytest.mark.parametrize(
    ("setting", "words"),
    [("data.columns.souce=a", "source, target"), ("data.header.edges=yes", "present or absent")],
)
def test_settings_are_checked(setting: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        load_config(overrides=[setting])
