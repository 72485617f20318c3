"""Training on CUDA: NCCL against one process, bfloat16, torch.compile, pinned prefetch, and an
epoch of ogbn-products. `make test-gpu`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cimage_dist.comm import Comm
from cimage_dist.train.step import SampledBatches
from cimage_dist.train.trainer import Trainer
from tests.parity import test_training as parity
from tests.procs import run_ranks
from tests.settings import small_sbm_config

pytestmark = pytest.mark.gpu


def train(comm: Comm, kind: str, store_dir: Path, dtype: torch.dtype, *more: str) -> dict[str, Any]:
    """Losses and weights after the steps of the parity tests, on this rank's GPU."""
    torch.cuda.set_device(comm.rank)
    return parity.train(comm, kind, store_dir, dtype, "resources.device=cuda", *more)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind", ["full", "sampled"])
def test_two_ranks_of_nccl_equal_one_gpu(kind, store_dir, small_sbm):
    alone = train(Comm(), kind, store_dir, torch.float64)
    for result in run_ranks(train, 2, kind, store_dir, torch.float64, backend="cpu:gloo,cuda:nccl"):
        assert result["context"] == alone["context"]
        np.testing.assert_allclose(result["loss"], alone["loss"], rtol=0, atol=1e-9)
        for name, value in alone["weights"].items():
            np.testing.assert_allclose(
                result["weights"][name], value, rtol=0, atol=1e-9, err_msg=name
            )


@pytest.mark.parametrize("kind", ["full", "sampled"])
def test_a_gpu_equals_the_cpu(kind, store_dir, small_sbm):
    """Draws are keyed by content, so both devices see the same experiment."""
    on_gpu, on_cpu = (
        train(Comm(), kind, store_dir, torch.float64, f"resources.device={device}")
        for device in ("cuda", "cpu")
    )
    np.testing.assert_allclose(on_gpu["loss"], on_cpu["loss"], rtol=0, atol=1e-8)


def test_bfloat16_follows_float32(store_dir, small_sbm):
    exact, rounded = (
        train(Comm(), "sampled", store_dir, torch.float32, f"train.precision={precision}")
        for precision in ("float32", "bfloat16")
    )
    np.testing.assert_allclose(rounded["loss"], exact["loss"], rtol=0.05)


def test_compiled_decoders_follow_plain_ones(store_dir, small_sbm):
    plain, compiled = (
        train(Comm(), "full", store_dir, torch.float32, f"resources.compile={on}")
        for on in ("false", "true")
    )
    np.testing.assert_allclose(compiled["loss"], plain["loss"], rtol=1e-3)


def test_batches_are_prefetched_through_pinned_memory(store_dir, small_sbm):
    cfg = small_sbm_config(
        store_dir,
        *parity.SETTINGS["sampled"],
        "resources.device=cuda",
        "sampler.loader_processes=2",
    )
    trainer = Trainer(cfg, small_sbm, small_sbm.topology(), Comm())
    batches = trainer.batches
    assert isinstance(batches, SampledBatches)
    seen = []
    convert = batches.convert
    batches.convert = lambda batch, step: (
        seen.append(batch.x.is_pinned() and batch.edges.src.is_pinned()),
        convert(batch, step),
    )[1]
    first = [batch.x.cpu() for batch in batches.iterate(0, 5)]
    assert seen == [True] * 5
    expected = [convert(batches.source[step], step).x.cpu() for step in range(5)]
    assert all(torch.equal(a, b) for a, b in zip(first, expected, strict=True))


def test_an_epoch_of_products(tmp_path):
    """The shipped config as it is but for one epoch; the data is read from
    CIMAGE_DATA_ROOT/ogbn_products and never downloaded here.
    """
    root = Path(os.environ.get("CIMAGE_DATA_ROOT", "data/raw"))
    if not (root / "ogbn_products").is_dir():
        pytest.skip(
            "ogbn-products not found: set CIMAGE_DATA_ROOT to the folder that holds ogbn_products/"
        )
    config = Path(__file__).parents[2] / "configs" / "large" / "products.yaml"
    settings = [
        f"data.root={root}",
        f"data.store_dir={tmp_path / 'data'}",
        f"run.dir={tmp_path / 'run'}",
        "train.epochs=1",
        "resources.device=cuda",
    ]
    subprocess.run(
        [sys.executable, "-m", "cimage_dist", "pretrain", str(config), *settings, "--quiet"],
        check=True,
    )
    records = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    losses = [r["loss"] for r in records if r["kind"] == "train"]
    assert np.isfinite(losses).all() and np.mean(losses[-5:]) < np.mean(losses[:5])
