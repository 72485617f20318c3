"""The real command line on two Ray workers, against one process. Each command starts a Ray of its
own and takes about a minute.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cimage_dist.config_loading import load_config
from cimage_dist.io import artifacts, checkpoint
from cimage_dist.io.artifacts import RunDir, read_metrics
from cimage_dist.train.sink import LocalSink

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two workers need two CPUs"),
]

DIGITS = Path(__file__).parents[1] / "digits.yaml"
# 10,489 training edges: ten steps of 1,049 in an epoch. All neighbours, no dropout: nothing is left
# that depends on the world size.
SETTINGS = [
    str(DIGITS),
    "data.store_dir=data",
    "model.num_factors=4",
    "model.factor_dim=8",
    "model.num_layers=2",
    "model.dropout=0",
    "model.structure_dropout=0",
    "model.factor_dropout=0",
    "sampler.fanouts=[-1,-1,-1]",
    "sampler.batch_edges=1049",
    "loss.factor_weight=0.5",
    "loss.cluster_weight=0.4",
    "cluster.init=selfkmeans",
    "cluster.init_epochs=1",
    "cluster.restarts=2",
    "ci.every_steps=3",
    "optim.lr_max=0.003",
    "run.log_every=1",
]
ON_RAY = ["--on", "ray", "resources.num_workers=2"]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A short path: Ray puts sockets below it, and their names may not exceed about 100
    characters.
    """
    path = Path(tempfile.mkdtemp(prefix="cimage-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def cimage(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """`cimage pretrain` as a user runs it. HOME is the test's folder because Ray writes there."""
    own = {
        "RAY_TMPDIR": str(folder / "ray"),
        "HOME": str(folder),
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | own
    (folder / "ray").mkdir(exist_ok=True)
    command = [sys.executable, "-m", "cimage_dist", "pretrain", *SETTINGS, *args, "--json"]
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=400, check=False
    )


def summary(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def losses(run: Path) -> list[float]:
    records = [r for r in read_metrics(RunDir(run).metrics) if r["kind"] == "train"]
    assert [r["step"] for r in records] == list(range(1, len(records) + 1))
    return [r["loss"] for r in records]


def contexts(run: Path) -> list[tuple[int, list[int]]]:
    return [
        (r["step"], r["context"]) for r in read_metrics(RunDir(run).metrics) if r["kind"] == "ci"
    ]


def kinds_of_files(run: Path) -> set[str]:
    paths = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    return {
        "tb/events" if path.startswith("tb/") else path
        for path in paths
        if not path.startswith("ray/") and path != "attempts.jsonl"
    }


def weights(run: Path) -> dict[str, np.ndarray]:
    saved = checkpoint.load_latest(run / "ckpt")
    assert saved is not None
    return {
        name: value.double().numpy()
        for name, value in checkpoint.model_weights(saved.tensors).items()
    }


def test_two_workers_agree_with_one_process_and_resume(folder):
    for args, name in (([], "one"), (ON_RAY, "two")):
        assert summary(cimage(folder, *args, f"run.dir={name}", "train.epochs=1"))["steps"] == 10
    one, two = folder / "one", folder / "two"
    assert contexts(one) == contexts(two) and [step for step, _ in contexts(two)] == [0, 3, 6, 9]
    # float32. At a learning rate of 0.01 losses differed by 1.5e-7 and weights by 6.5e-7; the lower
    # one here leaves room for other machines.
    np.testing.assert_allclose(losses(two), losses(one), rtol=0, atol=1e-6)
    for key, value in weights(one).items():
        np.testing.assert_allclose(weights(two)[key], value, rtol=0, atol=1e-6, err_msg=key)
    assert (
        kinds_of_files(two)
        == kinds_of_files(one)
        >= {
            "config.yaml",
            "env.json",
            "metrics.jsonl",
            "summary.json",
            "pseudo-labels/manifest.json",
        }
    )

    labels_made = (two / "pseudo-labels" / "manifest.json").stat().st_mtime_ns
    for args, name in (([], "one"), (ON_RAY, "two")):
        done = summary(cimage(folder, *args, f"run.dir={name}", "train.epochs=2"))
        assert (done["steps"], done["steps_now"]) == (20, 10)
    assert (two / "pseudo-labels" / "manifest.json").stat().st_mtime_ns == labels_made
    assert len(losses(two)) == 20
    np.testing.assert_allclose(
        losses(two), losses(one), rtol=0, atol=1e-5
    )  # twice as many steps for rounding to grow


def test_a_mistake_of_the_user_comes_back_from_the_workers(folder):
    """Exit code 2 and the message, not a traceback after several attempts."""
    np.save(folder / "short.npy", np.array([0, 1, 0]))
    done = cimage(
        folder,
        *ON_RAY,
        "run.dir=bad",
        "cluster.init=file",
        "cluster.labels_path=short.npy",
        "resources.max_failures=3",
    )
    assert done.returncode == 2, done.stderr[-3000:]
    assert "short.npy has labels of shape (3,)" in done.stderr and "1,797 nodes" in done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""


def test_a_mistake_that_only_the_first_worker_sees_does_not_hang_the_others(folder):
    run = RunDir(folder / "locked")
    artifacts.write_text(run.root / "note", "")
    with LocalSink(run, load_config().run, catch_signals=False):
        done = cimage(folder, *ON_RAY, "run.dir=locked", "resources.timeout_s=300")
    assert done.returncode == 2, done.stderr[-3000:]
    assert "Another process is training" in done.stderr


def test_more_workers_than_cpus_are_refused_at_once(folder):
    done = cimage(folder, "--on", "ray", "run.dir=many", "resources.num_workers=999")
    assert done.returncode == 2, done.stderr[-3000:]
    assert "999 workers need 999 CPUs" in done.stderr and "resources.num_workers" in done.stderr
    assert not (folder / "many" / "ckpt").exists()
