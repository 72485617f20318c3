"""Ingest is idempotent, exclusive, and all or nothing."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path

import pytest

from cimage_dist.config import DataConfig, SbmConfig
from cimage_dist.data.ingest import ingest, open_graph, store_path
from cimage_dist.data.store import Graph
from cimage_dist.io import artifacts

REPO = Path(__file__).resolve().parents[2]
SIZES = {"num_nodes": 120_000, "avg_degree": 20.0}
SCRIPT = """
import sys, time
from cimage_dist.config import DataConfig, SbmConfig
from cimage_dist.data.ingest import ingest
print("ready", flush=True)
sys.stdin.readline()
sbm = SbmConfig(num_nodes=int(sys.argv[2]), avg_degree=float(sys.argv[3]))
data = DataConfig(name="sbm", store_dir=sys.argv[1], sbm=sbm)
began = time.monotonic()
print(ingest(data)[1], time.monotonic() - began, flush=True)
"""


def config(store_dir: Path) -> DataConfig:
    return DataConfig(name="sbm", store_dir=str(store_dir), sbm=SbmConfig(**SIZES))


def start(store_dir: Path, count: int) -> list[subprocess.Popen[str]]:
    """Processes that have imported everything and wait for a line before they ingest."""
    environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, str(store_dir), *(str(v) for v in SIZES.values())]
    processes = [
        subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(count)
    ]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return processes


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def answer(process: subprocess.Popen[str]) -> tuple[str, float]:
    """Whether the process built the store, and the seconds this took."""
    assert process.stdout is not None
    built, seconds = process.stdout.readline().split()
    assert process.wait(timeout=120) == 0
    return built, float(seconds)


def temporaries(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.startswith(artifacts.TMP_PREFIX)]


def test_second_ingest_leaves_the_store_alone(tiny_sbm: DataConfig) -> None:
    messages: list[str] = []
    path, built = ingest(tiny_sbm, messages.append)
    before = {p.name: p.stat().st_mtime_ns for p in path.iterdir()}
    assert built and path == store_path(tiny_sbm) and any("committed" in m for m in messages)
    assert ingest(tiny_sbm) == (path, False)
    assert open_graph(tiny_sbm).path == path
    assert {p.name: p.stat().st_mtime_ns for p in path.iterdir()} == before


def test_only_settings_that_change_the_content_change_the_name(tiny_sbm: DataConfig) -> None:
    path = store_path(tiny_sbm)
    (
        tiny_sbm.split,
        tiny_sbm.train_ratio,
        tiny_sbm.holdout_edges,
        tiny_sbm.verify,
        tiny_sbm.made_features,
    ) = "random", 0.3, "link", "never", 7
    tiny_sbm.normalize = "none"  # what `source` means for this graph
    assert store_path(tiny_sbm) == path
    names = {path}
    for key, value in {"feature_dtype": "float16", "normalize": "row", "features": "hash"}.items():
        setattr(tiny_sbm, key, value)
        names.add(store_path(tiny_sbm))
    tiny_sbm.sbm.seed = 5
    names.add(store_path(tiny_sbm))
    assert len(names) == 5 and all(name.name.startswith("sbm-") for name in names)


def test_leftovers_of_this_name_are_removed_and_others_kept(tiny_sbm: DataConfig) -> None:
    folder = Path(tiny_sbm.store_dir)
    ours = [
        folder / f".tmp-{store_path(tiny_sbm).name}-00112233",
        folder / ".tmp-old-sbm-01234567-00112233",
        folder / ".tmp-sbm-deadbeef-00112233",
    ]
    others = [
        folder / ".tmp-sbm-big-deadbeef-00112233",
        folder / ".tmp-cora-deadbeef-00112233",
        folder / "sbm-deadbeef",
    ]
    for path in ours + others:
        path.mkdir(parents=True)
        (path / "x.npy").write_text("half")
    ingest(tiny_sbm)
    assert not any(path.exists() for path in ours) and all(path.exists() for path in others)


def test_store_without_manifest_is_built_again(tiny_sbm: DataConfig) -> None:
    path, _ = ingest(tiny_sbm)
    (path / artifacts.MANIFEST).unlink()
    assert open_graph(tiny_sbm).num_nodes == 300
    assert not temporaries(path.parent)


def test_two_processes_build_once(tmp_path: Path) -> None:
    processes = start(tmp_path, 2)
    for process in processes:
        go(process)
    assert sorted(answer(process)[0] for process in processes) == ["False", "True"]
    assert Graph.open(store_path(config(tmp_path)), verify="always").num_nodes == SIZES["num_nodes"]
    assert not temporaries(tmp_path)


def wait_for_a_file(process: subprocess.Popen[str], folder: Path) -> None:
    known = set(folder.glob(f"{artifacts.TMP_PREFIX}*"))
    while process.poll() is None and not any(
        any(tmp.iterdir()) for tmp in set(folder.glob(f"{artifacts.TMP_PREFIX}*")) - known
    ):
        time.sleep(0.001)


def kill_at_random_moments(tmp_path: Path, repeats: int) -> None:
    """kill -9 during ingest: the store is absent or whole, and the next ingest makes it whole."""
    (whole,) = start(tmp_path / "whole", 1)
    go(whole)
    built, duration = answer(whole)
    assert built == "True"
    want = Graph.open(store_path(config(tmp_path / "whole"))).fingerprint
    rng = random.Random(0)
    folder = tmp_path / "killed"
    path = store_path(config(folder))
    interrupted = 0
    for number, process in enumerate(
        chain.from_iterable(start(folder, 4) for _ in range(repeats // 4))
    ):
        go(process)
        if number % 4:
            time.sleep(rng.uniform(0, 1) * duration)
        else:  # whatever the speed of the machine: when the first file of the store is there
            wait_for_a_file(process, folder)
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
        if path.exists():
            assert Graph.open(path, verify="always").fingerprint == want
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
        elif folder.exists() and temporaries(folder):
            interrupted += 1
    assert interrupted, "every kill came too early or too late to show anything"
    ingest(config(folder))
    assert open_graph(config(folder)).fingerprint == want
    assert not temporaries(folder)


def test_killed_ingest_leaves_nothing_half_made(tmp_path: Path) -> None:
    kill_at_random_moments(tmp_path, 4)


@pytest.mark.slow
def test_killed_ingest_twenty_times(tmp_path: Path) -> None:
    kill_at_random_moments(tmp_path, 20)


@pytest.mark.slow
def test_five_million_nodes_stay_under_three_gigabytes(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    out = tmp_path / "result.json"
    command = [
        sys.executable,
        str(REPO / "benchmarks" / "ingest.py"),
        "--nodes",
        "5000000",
        "--tmp",
        str(tmp_path),
        "--out",
        str(out),
    ]
    subprocess.run(command, env=environment, check=True)
    result = json.loads(out.read_text())
    assert result["undirected_edges"] >= 50_000_000 and result["peak_rss_gb"] < 3
