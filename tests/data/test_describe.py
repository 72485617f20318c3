"""What `cimage ingest` says about a graph."""

from __future__ import annotations

import json

import numpy as np

from cimage_dist.data.ingest import describe, lines_of, open_graph
from tests.data.test_ids import NAMES, Write, feature_text, folder

__all__ = ["folder"]


def test_facts_and_lines(folder: Write) -> None:
    edges = "u,v,weight\nann,bob,1\nbob,ann,1\nbob,cat,2\ncat,cat,1\ndan,cat,1\ndan,cat,1\n"
    labels = "id,label,since\n" + "".join(f"{n},{n[1]},2020\n" for n in NAMES[:4])
    splits = "id,split\nann,train\nbob,val\ncat,test\ndan,test\n"
    graph = open_graph(
        folder(
            edges__csv=edges,
            features__csv=feature_text(NAMES, [0, 1, 2, 3, 4]),
            labels__csv=labels,
            splits__csv=splits,
        )
    )
    facts = describe(graph)
    assert json.loads(json.dumps(facts)) == facts
    assert facts == facts | {
        "nodes": 5,
        "edges": 3,
        "features": 3,
        "classes": 3,
        "ids": {"type": "large_string", "first": ["ann", "bob", "cat"]},
        "edges_read": 6,
        "self_loops_removed": 1,
        "duplicates_merged": 2,
        "isolated_nodes": 1,
        "components": 2,
        "largest_component": 4,
        "degrees": {"least": 0, "quarter": 1, "median": 1, "three_quarters": 2, "most": 2},
        "feature_density": 8 / 15,
        "class_counts": {"a": 2, "n": 1, "o": 1},
        "unlabelled": 1,
        "splits": {"train": 1, "val": 1, "test": 2},
        "ignored_columns": {"edges.csv": ["weight"], "labels.csv": ["since"]},
        "warnings": [],
    }
    text = "\n".join(lines_of(facts))
    for words in (
        "5 nodes (ids such as 'ann', 'bob', 'cat'), 3 undirected edges",
        "6 rows read, 1 self-loops and 2 duplicates dropped",
        "1 nodes without an edge, 2 components, the largest with 80.0 % of the nodes",
        "degrees: least 0, quarter 1, median 1, three quarters 2, most 2",
        "53.3 % of the values are not zero",
        "labels: a 2, n 1, o 1; 1 without",
        "splits: train 1, val 1, test 2",
        "columns of edges.csv that are not used: weight",
        "edge weights are not kept",
    ):
        assert words in text


def test_without_labels_and_with_several_splits(folder: Write) -> None:
    files = {
        "edges__npy": lambda p: np.save(p, np.array([[0, 1], [1, 2]])),
        "features__npy": lambda p: np.save(p, np.eye(3)),
    }
    assert "labels: none" in lines_of(describe(open_graph(folder(**files))))
    masks = {"train": np.eye(3, dtype=bool)[:, :2], "test": np.array([False, False, True])}
    files |= {
        "labels__npy": lambda p: np.save(p, np.array([0, 1, -1])),
        "splits__npz": lambda p: np.savez(p, **masks),
    }
    lines = lines_of(describe(open_graph(folder(**files))))
    assert "splits: train 1 to 1 (2 splits), test 1 to 1 (2 splits)" in lines
