"""Node splits and link splits: sizes, disjointness, seeding, and no leak of held-out edges."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cimage_dist.config import DataConfig
from cimage_dist.data.build import csc_in_memory
from cimage_dist.data.ingest import open_graph
from cimage_dist.data.splits import few_label_split, link_split, node_split
from cimage_dist.data.store import Graph
from cimage_dist.errors import UserError
from cimage_dist.types import NodeSplit, Topology


def toy(y: np.ndarray | None, masks: dict[str, np.ndarray] | None = None) -> Graph:
    n = 200 if y is None else len(y)
    indptr, indices, _ = csc_in_memory(n, np.arange(n - 1), np.arange(1, n))
    return Graph("toy", indptr, indices, np.ones((n, 1), dtype=np.float32), y, masks)


def labels(n: int = 200) -> np.ndarray:
    y = np.random.default_rng(0).integers(0, 4, n)
    y[::10] = -1
    return y


def check(split: NodeSplit, y: np.ndarray) -> None:
    total = split.train.int() + split.val.int() + split.test.int()
    assert int(total.max()) == 1
    assert not total[torch.from_numpy(y) < 0].any()
    assert total[torch.from_numpy(y) >= 0].all()


def test_random_split() -> None:
    y = labels()
    split = node_split(toy(y), DataConfig(), seed=3)
    check(split, y)
    assert [int(m.sum()) for m in (split.train, split.val, split.test)] == [18, 18, 144]
    again = node_split(toy(y), DataConfig(split="random"), seed=3)
    assert torch.equal(split.train, again.train) and torch.equal(split.test, again.test)
    assert not torch.equal(split.train, node_split(toy(y), DataConfig(), seed=4).train)


def test_per_class_split() -> None:
    y = labels()
    split = node_split(toy(y), DataConfig(split="per_class", labels_per_class=5), seed=0)
    check(split, y)
    assert torch.bincount(torch.from_numpy(y)[split.train]).tolist() == [5] * 4
    assert int(split.val.sum()) == round(0.1 * (180 - 20))


def test_few_label_split() -> None:
    y = torch.from_numpy(labels())
    split = few_label_split(y, 2, seed=1)
    assert not split.val.any() and torch.bincount(y[split.train]).tolist() == [2] * 4
    assert torch.equal(split.test, (y >= 0) & ~split.train)
    # a larger budget extends the smaller one, so the study varies labels only
    assert not (split.train & ~few_label_split(y, 5, seed=1).train).any()
    with pytest.raises(UserError, match=r"60 training nodes per class are too many.*class \d has"):
        few_label_split(y, 60, seed=1)


def test_public_split_and_its_columns() -> None:
    y = labels()
    part = np.random.default_rng(1).integers(0, 3, (200, 3))
    masks = {name: part == i for i, name in enumerate(("train", "val", "test"))}
    for index in range(3):
        split = node_split(toy(y, masks), DataConfig(split_index=index), seed=0)
        check(split, y)
        assert torch.equal(split.val, torch.from_numpy((part[:, index] == 1) & (y >= 0)))
    assert int(node_split(toy(y, masks), DataConfig(split="random"), seed=0).train.sum()) == 18
    single = node_split(
        toy(y, {"train": part[:, 0] == 0, "test": part[:, 0] == 2}),
        DataConfig(split="public"),
        seed=0,
    )
    assert not single.val.any() and single.train.any()


def test_node_split_errors() -> None:
    y = labels()
    overlap = {"train": np.arange(200) < 50, "test": np.arange(200) >= 45}
    for graph, data, words in (
        (toy(None), DataConfig(), "no labels"),
        (toy(np.full(200, -1)), DataConfig(), "no labels"),
        (toy(y), DataConfig(split="public"), "without a split"),
        (toy(y, {"train": np.ones(200, dtype=bool)}), DataConfig(split_index=1), "split_index=1"),
        (toy(y, overlap), DataConfig(), "5 nodes are in both train and test"),
        (toy(np.array([0, 1, 0])), DataConfig(), "too few"),
    ):
        with pytest.raises(UserError, match=words):
            node_split(graph, data, seed=0)


def topology(num_nodes: int, num_edges: int, seed: int) -> Topology:
    indptr, indices, _ = csc_in_memory(
        num_nodes, *np.random.default_rng(seed).integers(0, num_nodes, (2, num_edges))
    )
    return Topology(torch.from_numpy(indptr), torch.from_numpy(indices))


def pair_set(pairs: torch.Tensor) -> set[tuple[int, int]]:
    assert (pairs[:, 0] < pairs[:, 1]).all()
    return {(int(u), int(v)) for u, v in pairs}


@settings(max_examples=40, deadline=None)
@given(num_nodes=st.integers(12, 60), density=st.floats(0.05, 3.0), seed=st.integers(0, 1000))
def test_link_split_properties(num_nodes: int, density: float, seed: int) -> None:
    graph = topology(num_nodes, 20 + int(density * num_nodes * num_nodes / 4), seed)
    edges = graph.edge_list()
    every = {(int(u), int(v)) for u, v in zip(edges.src, edges.dst, strict=True)}
    m = len(every) // 2
    num_val, num_test = round(0.05 * m), round(0.10 * m)
    if num_val == 0 or num_nodes * (num_nodes - 1) // 2 - m < num_val + num_test:
        with pytest.raises(UserError):
            link_split(graph, DataConfig(), seed)
        return
    split = link_split(graph, DataConfig(), seed)
    assert [len(p) for p in (split.val_pos, split.val_neg, split.test_pos, split.test_neg)] == [
        num_val,
        num_val,
        num_test,
        num_test,
    ]
    val, test = pair_set(split.val_pos), pair_set(split.test_pos)
    train_edges = split.train.edge_list()
    train = {(int(u), int(v)) for u, v in zip(train_edges.src, train_edges.dst, strict=True)}
    assert train == {(v, u) for u, v in train}
    held = {pair for u, v in val | test for pair in ((u, v), (v, u))}
    assert not train & held and train | held == every and len(train) + len(held) == len(every)
    negatives = [pair_set(split.val_neg), pair_set(split.test_neg)]
    assert len(negatives[0] | negatives[1]) == num_val + num_test
    assert not (negatives[0] | negatives[1]) & every
    assert len(val | test) == num_val + num_test
    again = link_split(graph, DataConfig(), seed)
    assert torch.equal(again.val_neg, split.val_neg) and torch.equal(
        again.train.indices, split.train.indices
    )


def test_link_split_depends_on_the_seed_and_keeps_the_index_type() -> None:
    graph = topology(300, 2_000, 0)
    first, second = link_split(graph, DataConfig(), 0), link_split(graph, DataConfig(), 1)
    assert not torch.equal(first.test_pos, second.test_pos) and not torch.equal(
        first.test_neg, second.test_neg
    )
    assert first.train.indices.dtype == graph.indices.dtype
    rows = torch.repeat_interleave(first.train.degrees())
    assert (torch.diff(rows * 300 + first.train.indices) > 0).all()  # still sorted


def test_negatives_are_spread_evenly() -> None:
    split = link_split(topology(2_000, 60_000, 0), DataConfig(), 0)
    ends = torch.cat([split.val_neg, split.test_neg]).view(-1).double()
    # the mean of 2·9,000 uniform ends has standard error 2000/√12/√18000 = 4.3
    assert abs(float(ends.mean()) - 999.5) < 18


def test_too_few_edges() -> None:
    with pytest.raises(UserError, match="too few"):
        link_split(topology(5, 3, 0), DataConfig(), 0)


def test_splits_of_a_store(tmp_path: Path) -> None:
    graph = open_graph(DataConfig(name="digits", store_dir=str(tmp_path)))
    split = node_split(graph, DataConfig(), seed=0)
    assert [int(m.sum()) for m in (split.train, split.val, split.test)] == [180, 180, 1437]
    links = link_split(graph.topology(), DataConfig(), seed=0)
    assert links.train.num_edges == graph.num_edges - 2 * (len(links.val_pos) + len(links.test_pos))
