"""Held-out edges of a large graph: drawn once for all processes, mapped, drawn again when
damaged.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cimage_dist.comm import Comm
from cimage_dist.config import DataConfig
from cimage_dist.data import splits
from cimage_dist.data.ingest import open_graph
from cimage_dist.data.store import Graph
from cimage_dist.types import LinkSplit
from tests.procs import run_ranks
from tests.settings import small_sbm_config


@pytest.fixture
def data(store_dir: Path, small_sbm: Graph, tmp_path: Path) -> DataConfig:
    found = small_sbm_config(store_dir, "data.holdout_edges=link").data
    found.stage_dir = str(tmp_path)
    return found


def tensors(split: LinkSplit) -> list[torch.Tensor]:
    pairs = [split.val_pos, split.val_neg, split.test_pos, split.test_neg]
    return [split.train.indptr, split.train.indices, *pairs]


class Drawn:
    """Counts draws, and has them stored whatever the size of the graph."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.draw = splits.link_split
        monkeypatch.setattr(splits, "_STORED_FROM", 0)
        monkeypatch.setattr(splits, "link_split", self)

    def __call__(self, *args: object) -> LinkSplit:
        self.count += 1
        return self.draw(*args)


def test_the_same_edges_from_disk_drawn_once(data, small_sbm, monkeypatch):
    plain = splits.training_graph(small_sbm, data, 3)[1]
    drawn = Drawn(monkeypatch)
    for _ in range(3):
        topology, found = splits.training_graph(small_sbm, data, 3)
        assert topology is found.train
        for one, other in zip(tensors(found), tensors(plain), strict=True):
            assert one.dtype == other.dtype and torch.equal(one, other)
    assert drawn.count == 1
    file = splits.folder_of(small_sbm, data, 3) / "indices.npy"
    assert str(file) in Path("/proc/self/maps").read_text(), "not mapped but read"


def test_other_settings_are_other_edges(data, small_sbm, monkeypatch):
    drawn = Drawn(monkeypatch)
    for seed, ratio in ((3, 0.05), (4, 0.05), (3, 0.1), (3, 0.05)):
        data.link_val_ratio = ratio
        found = splits.training_graph(small_sbm, data, seed)[1]
        assert torch.equal(found.val_pos, drawn.draw(small_sbm.topology(), data, seed).val_pos)
    assert drawn.count == 3


@pytest.mark.parametrize("how", ["cut", "changed", "manifest"])
def test_damaged_files_are_made_again(how, data, small_sbm, monkeypatch):
    drawn = Drawn(monkeypatch)
    first = splits.training_graph(small_sbm, data, 3)[1]
    folder = splits.folder_of(small_sbm, data, 3)
    file = folder / ("manifest.json" if how == "manifest" else "indices.npy")
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    first = [value.clone() for value in tensors(first)]
    file.unlink()  # maps of the old file stay as they are
    file.write_bytes({"cut": content[:-9], "changed": content, "manifest": b"{"}[how])
    again = splits.training_graph(small_sbm, data, 3)[1]
    assert drawn.count == 2
    for one, other in zip(tensors(again), first, strict=True):
        assert torch.equal(one, other)


def test_no_place_to_write_and_graphs_without_a_store(data, small_sbm, monkeypatch, tmp_path):
    drawn = Drawn(monkeypatch)
    (tmp_path / "file").write_text("")
    data.stage_dir = str(tmp_path / "file" / "below")
    splits.training_graph(small_sbm, data, 3)
    data.stage_dir = str(tmp_path / "memory")
    graph = Graph("g", small_sbm.indptr, small_sbm.indices, small_sbm.x)
    splits.training_graph(graph, data, 3)
    assert drawn.count == 2 and not (tmp_path / "memory").exists()


def ask(comm: Comm, data: DataConfig) -> tuple[int, int]:
    with pytest.MonkeyPatch.context() as patch:
        drawn = Drawn(patch)
        graph = open_graph(small_sbm_config(Path(data.store_dir)).data)
        comm.barrier()
        found = splits.training_graph(graph, data, 5)[1]
        return drawn.count, int(found.val_pos.sum())


def test_processes_that_ask_at_once_draw_once(data):
    drawn, sums = zip(*run_ranks(ask, 3, data), strict=True)
    assert sum(drawn) == 1 and len(set(sums)) == 1
