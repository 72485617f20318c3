"""Initial labels on 1, 2 and 3 ranks: rank 0 reads them, every rank gets its own nodes', and
labels of all nodes are never pickled.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cimage_dist.comm import Comm
from cimage_dist.data.ingest import open_graph
from cimage_dist.errors import UserError
from cimage_dist.train import loop
from cimage_dist.train.sink import MemorySink
from cimage_dist.train.trainer import Trainer
from tests.procs import run_ranks
from tests.settings import small_sbm_config

SMALL = ["loss.factor_weight=1", "model.num_factors=4", "model.factor_dim=3", "ci.block_size=4"]
NODES = 300


def shares(comm: Comm, store_dir: Path, file: Path, sources: list[str]) -> dict[str, Any]:
    """What the rank's refresher holds, by where the labels come from, and the most bytes that were
    pickled meanwhile.
    """
    sizes, broadcast = [0], comm.broadcast_object

    def watched(value: Any, source: int = 0) -> Any:
        sizes.append(len(pickle.dumps(value)))
        return broadcast(value, source)

    found: dict[str, Any] = {}
    for source in sources:
        where = ["cluster.init=file", f"cluster.labels_path={file}"]
        if source == "cache":
            where = ["cluster.init=propagated"]
        if source == "mistake":
            where[1] = f"cluster.labels_path={file.with_name('short.npy')}"
        cfg = small_sbm_config(store_dir, *SMALL, *where)
        graph = open_graph(cfg.data)
        trainer = Trainer(cfg, graph, graph.topology(), comm)
        sink = MemorySink()
        if source == "run" and comm.is_main:
            loop._prepare_scores(Trainer(cfg, graph, graph.topology(), Comm()), sink, True)
        comm.broadcast_object = watched
        try:
            loop._prepare_scores(trainer, sink, True)
        except UserError as error:
            found[source] = str(error)
            continue
        finally:
            comm.broadcast_object = broadcast
        held = trainer.refresher
        assert held is not None
        found[source] = {
            "gids": held.gids.numpy(),
            "labels": held.labels.numpy(),
            "trusted": held.base.numpy(),
            "clusters": np.array([held.num_clusters] * comm.world),
        }
    return found | {"pickled": max(sizes)}


@pytest.mark.parametrize("world", [2, 3])
def test_every_rank_has_its_nodes_labels(world, store_dir, small_sbm, tmp_path):
    rng = np.random.default_rng(0)
    file = tmp_path / "labels.npz"
    np.savez(file, labels=rng.integers(0, 3, NODES), confidence=rng.random(NODES))
    np.save(tmp_path / "short.npy", np.array([0, 1, 0]))
    sources = ["file", "run", "cache", "mistake"]
    alone = shares(Comm(), store_dir, file, sources)  # fills the cache, too
    assert "shape (3,)" in alone["mistake"]
    ranks = run_ranks(shares, world, store_dir, file, sources)
    for source in sources:
        if source == "mistake":
            assert all(rank[source] == alone[source] for rank in ranks)
            continue
        for name, value in alone[source].items():
            parts = [rank[source][name] for rank in ranks]
            if name == "clusters":
                assert all((part == value[0]).all() for part in parts)
            else:
                assert max(map(len, parts)) <= NODES // world + 1
                np.testing.assert_array_equal(np.concatenate(parts), value, err_msg=name)
    # Labels alone would take eight bytes for each of the nodes.
    assert 0 < max(rank["pickled"] for rank in ranks) < NODES
