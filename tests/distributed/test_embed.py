"""Embedding on real Ray workers: the same bits whatever their number, through kills of workers and
of the driver. About two minutes.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cimage_dist.config import Config
from cimage_dist.config_loading import load_config
from cimage_dist.io.checkpoint import load_rows
from cimage_dist.pipeline import stages
from cimage_dist.train.progress import Progress

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two workers need two CPUs"),
]

ROOT = Path(__file__).parents[2]
PART_ROWS = 700  # 12 parts of 8,000 rows, in four passes
SETTINGS = [
    "data.name=sbm",
    "data.sbm.num_nodes=8000",
    "data.sbm.num_blocks=4",
    "model.num_factors=4",
    "model.factor_dim=16",
    "model.num_layers=2",
    "train.epochs=2",
    "run.tensorboard=false",
    "resources.threads=1",
    "resources.max_failures=5",
]


def config(folder: Path, name: str, *more: str) -> Config:
    return load_config(
        overrides=[
            *SETTINGS,
            f"data.store_dir={folder / 'data'}",
            f"run.dir={folder / name}",
            *more,
        ]
    )


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A trained run and its embedding by this process. A short path: Ray puts sockets below it."""
    path = Path(tempfile.mkdtemp(prefix="cimage-", dir="/tmp"))
    cfg = config(path, "local")
    stages.pretrain(cfg, Progress(quiet=True))
    for name in ("kills", "driver", *[f"workers-{n}" for n in (1, 2, 3)]):
        shutil.copytree(path / "local", path / name)
    stages.embed(cfg, part_rows=PART_ROWS)
    yield path
    shutil.rmtree(path, ignore_errors=True)


def kill_workers(count: int) -> None:
    """Kill processes of this one's Ray while they make a part."""
    import psutil

    while count:
        time.sleep(0.3)
        for process in psutil.Process().children(recursive=True):
            try:
                if count and process.cmdline()[:1] == ["ray::_make"]:
                    process.kill()
                    count -= 1
                    break
            except (psutil.NoSuchProcess, IndexError):
                continue


def drive(folder: str, name: str, workers: int, kills: int) -> None:
    """What the processes started below do: embed on a Ray of their own."""
    import ray

    from cimage_dist.distributed.driver import embed

    ray.init(address="local", num_cpus=workers, include_dashboard=False, log_to_driver=False)
    killer = threading.Thread(target=kill_workers, args=(kills,), daemon=True)
    killer.start()
    embed(
        config(Path(folder), name, f"resources.num_workers={workers}"),
        Progress(quiet=True),
        part_rows=PART_ROWS,
    )
    killer.join(5)
    print("kills left:", 0 if not killer.is_alive() else "some")
    ray.shutdown()


def start(folder: Path, name: str, workers: int, kills: int = 0) -> subprocess.Popen[str]:
    (folder / "ray").mkdir(exist_ok=True)
    own = {
        "RAY_TMPDIR": str(folder / "ray"),
        "HOME": str(folder),
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": str(ROOT),
    }
    env = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"} | own
    code = (
        f"from tests.distributed.test_embed import drive; drive({str(folder)!r}, {name!r}, "
        f"{workers}, {kills})"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err[-3000:]
    return out


def content(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run / "embeddings").iterdir()}


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_number_of_workers_does_not_change_a_bit(workers, folder):
    finish(start(folder, f"workers-{workers}", workers))
    assert content(folder / f"workers-{workers}") == content(folder / "local")
    assert len(content(folder / "local")) == 1 + 12
    assert not (folder / f"workers-{workers}" / "embeddings-work").exists()


def test_parts_equal_the_embedding_in_memory(folder):
    cfg = config(folder, "workers-1")
    shutil.rmtree(folder / "workers-1" / "embeddings", ignore_errors=True)
    np.testing.assert_allclose(
        load_rows(stages.embed(cfg)), load_rows(folder / "local" / "embeddings"), rtol=0, atol=1e-5
    )


def test_killed_workers_are_replaced(folder):
    assert "kills left: 0" in finish(start(folder, "kills", 2, kills=3))
    assert content(folder / "kills") == content(folder / "local")


def test_a_killed_driver_goes_on(folder):
    process = start(folder, "driver", 2)
    work = folder / "driver" / "embeddings-work"
    deadline = time.monotonic() + 200
    while len(list(work.glob("pass-1/part-*.npy"))) < 3:
        assert process.poll() is None, process.communicate()[1][-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (folder / "driver" / "embeddings").exists()
    made = {path: path.stat().st_mtime_ns for path in work.glob("pass-*/part-*.npy")}
    finish(start(folder, "driver", 2))
    assert made and content(folder / "driver") == content(folder / "local")
