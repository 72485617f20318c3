"""CSC construction against scipy, in memory and through spill files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import coo_array

from cimage_dist.data.build import CscBuilder, NpyWriter, csc_in_memory
from cimage_dist.errors import UserError


def reference(num_nodes: int, src: np.ndarray, dst: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    keep = src != dst
    src, dst = src[keep], dst[keep]
    matrix = coo_array(
        (np.ones(2 * len(src)), (np.r_[dst, src], np.r_[src, dst])), shape=(num_nodes, num_nodes)
    ).tocsr()
    matrix.sum_duplicates()
    matrix.sort_indices()
    return matrix.indptr, matrix.indices


def build(
    num_nodes: int, src: np.ndarray, dst: np.ndarray, folder: Path, budget: int, chunk: int
) -> tuple[np.ndarray, np.ndarray, dict[str, int]]:
    builder = CscBuilder(num_nodes, folder / "work", budget_bytes=budget)
    for start in range(0, len(src), chunk):
        builder.add(src[start : start + chunk], dst[start : start + chunk])
    statistics = builder.finish(folder)
    assert not (folder / "work").exists()
    return np.load(folder / "indptr.npy"), np.load(folder / "indices.npy"), statistics


@settings(max_examples=60, deadline=None)
@given(
    num_nodes=st.integers(1, 40),
    num_edges=st.integers(0, 300),
    skew=st.sampled_from([1.0, 4.0]),
    budget=st.sampled_from([1, 700, 5_000, 1 << 20]),
    chunk=st.integers(1, 120),
    seed=st.integers(0, 2**32 - 1),
)
def test_matches_scipy_on_random_multigraphs(
    tmp_path_factory: pytest.TempPathFactory,
    num_nodes: int,
    num_edges: int,
    skew: float,
    budget: int,
    chunk: int,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    src, dst = (
        (rng.random(num_edges) ** skew * num_nodes).astype(dtype) for dtype in (np.int32, np.uint16)
    )
    folder = tmp_path_factory.mktemp("csc")
    indptr, indices, statistics = build(num_nodes, src, dst, folder, budget, chunk)
    want_indptr, want_indices = reference(num_nodes, src.astype(np.int64), dst.astype(np.int64))
    np.testing.assert_array_equal(indptr, want_indptr)
    np.testing.assert_array_equal(indices, want_indices)
    assert indptr.dtype == np.int64 and indices.dtype == np.int32
    memory = csc_in_memory(num_nodes, src, dst)
    np.testing.assert_array_equal(indptr, memory[0])
    np.testing.assert_array_equal(indices, memory[1])
    assert statistics == memory[2]
    assert statistics["edges_read"] == num_edges
    assert statistics["self_loops_removed"] == int((src == dst).sum())
    assert statistics["isolated_nodes"] == int((np.diff(indptr) == 0).sum())
    assert 2 * (
        num_edges - statistics["self_loops_removed"] - statistics["duplicates_merged"]
    ) == len(indices)


def test_one_pair_repeated_beyond_the_bucket_size(tmp_path: Path) -> None:
    """A single heavy key cannot be split further, yet must come out once."""
    src, dst = np.zeros(5_000, dtype=np.int64), np.ones(5_000, dtype=np.int64)
    indptr, indices, statistics = build(3, src, dst, tmp_path, budget=1, chunk=7)
    assert indptr.tolist() == [0, 1, 2, 2] and indices.tolist() == [1, 0]
    assert statistics["duplicates_merged"] == 4_999


def test_hub_is_cut_into_narrower_ranges(tmp_path: Path) -> None:
    leaves = np.arange(1, 20_001)
    indptr, indices, _ = build(
        20_001, np.zeros_like(leaves), leaves, tmp_path, budget=8_000, chunk=1_000
    )
    np.testing.assert_array_equal(indices[:20_000], leaves)
    assert indptr[1] == 20_000 and (indices[20_000:] == 0).all()


@pytest.mark.parametrize(
    ("src", "dst", "words"),
    [
        ([0, 1, 9], [1, 2, 0], ["1 of the first 8 edges", "outside 0..4", "edge 8 (9 -> 0)"]),
        ([0, -3, 2], [1, 2, 0], ["negative", "edge 7 (-3 -> 2)"]),
        ([0.0, 1.5, 2.0], [1, 2, 0], ["not whole", "edge 7 has 1.5"]),
        ([0.0, float("nan"), 2.0], [1, 2, 0], ["not whole", "edge 7 has nan"]),
        (["0", "a", "2"], [1, 2, 0], ["not integers", "edge 7 has 'a'"]),
        ([0, 1], [1, 2, 0], ["equal length"]),
    ],
)
def test_bad_ids_are_named(
    tmp_path: Path, src: list[object], dst: list[object], words: list[str]
) -> None:
    builder = CscBuilder(5, tmp_path / "work", where="edges.csv")
    builder.add(np.zeros(5, dtype=np.int64), np.ones(5, dtype=np.int64))
    with pytest.raises(UserError, match=r"edges\.csv") as caught:
        builder.add(np.array(src, dtype=object if isinstance(src[0], str) else None), np.array(dst))
    for word in words:
        assert word in str(caught.value)


def test_npy_writer_header_fits_any_length(tmp_path: Path) -> None:
    with NpyWriter(tmp_path / "a.npy", np.float16, (3,)) as writer:
        for rows in (0, 1, 12_345):
            writer.write(np.full((rows, 3), rows, dtype=np.float32))
    array = np.load(tmp_path / "a.npy", mmap_mode="r")
    assert array.shape == (12_346, 3) and array.dtype == np.float16 and array[0, 0] == 1
