"""One local Ray in every run of the tests: two sampled workers of which one is killed, a resumed
run, a sweep, a job that embeds. Under 90 s on two idle cores; the long matrix of failures is in
`test_chaos.py` and `test_nodes.py`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cimage_dist.comm import Comm
from cimage_dist.config import Config
from cimage_dist.config_loading import load_config
from cimage_dist.data.ingest import open_graph
from cimage_dist.io import checkpoint
from cimage_dist.io.artifacts import RunDir
from cimage_dist.io.checkpoint import load_rows
from cimage_dist.pipeline import stages
from cimage_dist.train.sink import LocalSink
from tests.distributed.conftest import (
    CHECKPOINT_EVERY,
    PATIENCE_S,
    SETTINGS,
    STEPS,
    Cluster,
    Expected,
    Run,
    cluster_of,
)
from tests.procs import run_ranks

SWEEP = """
search: grid
trials: 2
top: 0
baseline: false
space:
  optim.lr_max: [0.003, 0.01]
"""
# A start of the workers may take long on a busy machine, and giving it up makes it no faster.
PATIENT = {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300"}


@pytest.fixture(scope="module")
def ray() -> Iterator[Cluster]:
    """Room for the workers and the sweep at once, whatever the machine has; it stops after this
    module.
    """
    with cluster_of(1, 3, has_dashboard=True) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def sweep(ray: Cluster) -> subprocess.Popen[str]:
    """A sweep of two trials, under way while the others wait for their processes to start."""
    (ray.folder / "space.yaml").write_text(SWEEP)
    words = ["train.epochs=1", "train.validate_every=15", "train.select=val"]
    words = [*SETTINGS, *words, "resources.num_workers=1", "sweep.dir=sweep"]
    return ray.cimage("sweep", "space.yaml", *words, "--json")


def config(folder: Path, name: str, *more: str) -> Config:
    places = [f"data.store_dir={folder / 'data'}", f"run.dir={folder / name}"]
    return load_config(overrides=[*SETTINGS, *places, "resources.threads=1", *more])


def train_here(comm: Comm, folder: Path, name: str) -> None:
    """A rank of plain processes, without Ray."""
    cfg = config(folder, name)
    run = RunDir(folder / name)
    with LocalSink(run, cfg.run, is_main=comm.is_main, catch_signals=False) as sink:
        stages.train(cfg, comm, sink, open_graph(cfg.data))


def ended(process: subprocess.Popen[str]) -> Any:
    """What the command answered, after it ended well."""
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, f"{out[-2000:]}\n{err[-4000:]}"
    return json.loads(out)


@pytest.fixture(scope="module")
def trained(ray: Cluster, sweep: subprocess.Popen[str]) -> Run:
    """A run of two workers: one is killed and the driver is asked to stop, which the workers that
    Ray starts again hear at their first step; then the same command continues.
    """
    run = ray.pretrain("run", **PATIENT)
    run.wait_for_step(CHECKPOINT_EVERY + 1)
    ray.workers()[1].kill()
    run.process.terminate()
    assert "everything is saved" in run.finish(143)
    again = ray.pretrain("run", **PATIENT)
    again.finish()
    return again


def test_a_killed_and_resumed_run_of_two_workers_ends_bit_equal(ray: Cluster, trained: Run) -> None:
    """To two processes that knew nothing of Ray and that nobody disturbed."""
    cfg = config(ray.folder, "plain")
    stages.prepare_run(cfg, open_graph(cfg.data))
    run_ranks(train_here, 2, ray.folder, "plain", timeout=PATIENCE_S)
    first, killed, resumed = trained.attempts()
    assert [start["workers"] for start in (first, killed, resumed)] == [2, 2, 2]
    assert 0 == first["after_step"] < killed["after_step"] < resumed["after_step"] < STEPS
    Expected.of_folder(ray.folder / "plain").check(trained)


def test_rays_own_result_has_the_last_checkpoint(trained: Run) -> None:
    """Our files under Ray's name, and the newest alone."""
    from ray.train import Result

    result = Result.from_path(str(trained.root / "ray"))
    assert result.checkpoint is not None and result.metrics is not None
    assert result.metrics["step"] == STEPS and len(result.best_checkpoints) == 1
    found = checkpoint.load(Path(result.checkpoint.path))
    newest = checkpoint.load_latest(trained.root / "ckpt")
    assert newest is not None and (found.step, found.meta) == (STEPS, newest.meta)
    torch.testing.assert_close(found.tensors, newest.tensors, rtol=0, atol=0)


def test_a_job_embeds_on_ray(ray: Cluster, trained: Run) -> None:
    """The rows of this process, and the job is known by its name."""
    words = [*SETTINGS, f"data.store_dir={ray.folder / 'data'}", f"run.dir={trained.root}"]
    told = ended(ray.cimage("submit", "embed", *words, "--name", "rows", "--json"))
    assert (told["status"], told["exit_code"]) == ("SUCCEEDED", 0)
    (job,) = ended(ray.cimage("jobs", "list", "--json"))["jobs"]
    assert job["name"] == "rows" and job["entrypoint"].endswith("--on ray")
    shutil.copytree(trained.root, ray.folder / "copy")
    shutil.rmtree(ray.folder / "copy" / "embeddings")
    here = stages.embed(config(ray.folder, "copy"))
    np.testing.assert_allclose(
        load_rows(trained.root / "embeddings"), load_rows(here), rtol=0, atol=1e-5
    )


def test_a_sweep_of_two_trials(ray: Cluster, sweep: subprocess.Popen[str]) -> None:
    told = ended(sweep)
    assert told["trials"]["done"] == 2 and not told["failures"], told
    found = [
        json.loads(path.read_text()) for path in ray.folder.glob("sweep/trials/*/outcome.json")
    ]
    assert len(found) == 2 and all(outcome["score"] > 0 for outcome in found)
