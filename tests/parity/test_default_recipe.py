"""The default recipe on 1, 2 and 3 gloo ranks in float64: the same losses, weights and
embedding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cimage_dist.comm import Comm
from cimage_dist.config_loading import load_config
from cimage_dist.data.ingest import open_graph
from cimage_dist.nn.inference import encode_graph
from cimage_dist.train.loop import worker
from cimage_dist.train.sink import MemorySink
from tests.conftest import small_sbm_settings
from tests.procs import run_ranks

# Dropout in the decoders is the one draw that depends on the rank.
COMMON = ["model.dropout=0", "model.structure_dropout=0", "model.factor_dropout=0"]
COMMON += ["run.log_every=1"]
# The small graph is below the size from which edge factors are the default.
COMMON += ["model.edge_factors=4"]
KINDS = {
    "full": [*COMMON, "train.epochs=15"],
    # Fewer hops than layers; one cap for all hops, so that draws do not depend on who samples.
    "sampled": [
        *COMMON,
        "train.epochs=1",
        "sampler.fanouts=[4,4]",
        "sampler.batch_edges=97",
        "sampler.backend=csr",
        "sampler.hide_rate=0.5",
    ],
}


def train(comm: Comm, kind: str, store_dir: Path) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    try:
        cfg = load_config(overrides=[*small_sbm_settings(store_dir), *KINDS[kind]])
        graph, sink = open_graph(cfg.data), MemorySink()
        trainer = worker(cfg, comm, sink, graph)
        x = graph.features().double()
        z = encode_graph(trainer.model.encoder.eval(), x, graph.topology()).z
    finally:
        torch.set_default_dtype(torch.float32)
    return {
        "loss": [record["loss"] for record in sink.records if record["kind"] == "train"],
        "z": z.numpy(),
        "weights": {
            name: value.numpy()
            for name, value in trainer.model.state_dict().items()
            if value.is_floating_point()
        },
    }


@pytest.mark.parametrize("kind", KINDS)
def test_the_world_size_does_not_change_the_default_recipe(
    kind: str, store_dir: Path, small_sbm: object
) -> None:
    alone = train(Comm(), kind, store_dir)
    assert len(alone["loss"]) >= 10
    for world in (2, 3):
        for result in run_ranks(train, world, kind, store_dir):
            # Sums over ranks differ in their last bits, and Adam divides by small numbers.
            np.testing.assert_allclose(result["loss"], alone["loss"], rtol=0, atol=1e-9)
            np.testing.assert_allclose(result["z"], alone["z"], rtol=0, atol=1e-9)
            for name, value in alone["weights"].items():
                np.testing.assert_allclose(
                    result["weights"][name], value, rtol=0, atol=1e-9, err_msg=name
                )
