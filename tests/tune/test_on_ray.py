"""The real command on a Ray of its own: early stopping, failures, kills, and proof that test
labels do not steer. Minutes each.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BUSY = "timed out during startup"  # Ray gives its processes 30 s, which a busy machine may not keep
TINY = """
data:
  name: sbm
  store_dir: data
  sbm: {num_nodes: 300, num_blocks: 3, avg_degree: 8, label_features: 6, nuisance_features: 6}
model: {num_factors: 3, factor_dim: 4, num_layers: 2, routing_iterations: 2}
train: {epochs: 60, validate_every: 6, select: val}
eval: {probe_epochs: 10, kmeans_restarts: 2}
run: {tensorboard: false, checkpoint_every: 3, log_every: 1}
resources: {threads: 1}
"""
SPACE = """
search: tpe
trials: 5
top: 1
fresh_seeds: 2
concurrent: 1
space:
  optim.lr_max: {low: 2.0e-3, high: 3.0e-2, log: true}
  model.dropout: {low: 0.0, high: 0.6}
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: Ray puts sockets below it, and their names may not exceed about 100
    characters.
    """
    path = Path(tempfile.mkdtemp(prefix="cimage-", dir="/tmp"))
    (path / "tiny.yaml").write_text(TINY)
    (path / "space.yaml").write_text(SPACE)
    yield path
    end_all(path)
    shutil.rmtree(path, ignore_errors=True)


def own_environment(folder: Path) -> dict[str, str]:
    """HOME is the test's folder because Ray writes there."""
    own = {
        "RAY_TMPDIR": str(folder / "ray"),
        "HOME": str(folder),
        "OMP_NUM_THREADS": "1",
        "NUMBA_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    return os.environ | own | {"PYTHONPATH": str(ROOT)}


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "cimage_dist", *words]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=own_environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def cimage(folder: Path, *words: str) -> Any:
    for _ in range(10):
        process = start(folder, *words, "--json")
        out, err = process.communicate(timeout=1500)
        if BUSY not in err:
            break
    assert process.returncode == 0, err
    return json.loads(out)


def sweep(folder: Path, name: str, *words: str) -> Any:
    return cimage(folder, "sweep", "space.yaml", "tiny.yaml", f"sweep.dir={name}", *words)


def end_all(folder: Path) -> None:
    """Only what belongs to this test: processes whose environment names its folder."""
    for process in own_processes(folder):
        process.kill()


def own_processes(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("RAY_TMPDIR") == str(
                folder / "ray"
            ):
                found.append(process)
        except psutil.Error:
            continue
    return found


def outcomes(root: Path) -> dict[str, dict[str, Any]]:
    return {
        path.parent.name: json.loads(path.read_text())
        for path in sorted((root / "trials").glob("*/outcome.json"))
    }


def search_of(root: Path) -> dict[str, Any]:
    """What was tried and how it scored, without times and processes."""
    trials = {
        path.parent.name: json.loads(path.read_text())
        for path in sorted((root / "trials").glob("*/trial.json"))
    }
    found = outcomes(root)
    return {
        name: (
            trial["values"],
            trial["seed"],
            found[name]["status"],
            found[name]["score"],
            found[name]["steps"],
        )
        for name, trial in trials.items()
    }


def start_until(folder: Path, is_reached: Callable[[], bool], *words: str) -> subprocess.Popen[str]:
    """A command under way that has come so far."""
    process = start(folder, *words)
    deadline = time.monotonic() + 1200  # against a hang only
    while not is_reached():
        if process.poll() is not None:
            err = process.communicate()[1]
            assert BUSY in err, err
            process = start(folder, *words)
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process


def test_asha_on_the_demo(folder: Path) -> None:
    """Eight trials, poor ones stopped; its trials are ordinary runs, and best.yaml gives the
    winner again to the last digit.
    """
    began = time.monotonic()
    result = cimage(
        folder,
        "sweep",
        str(ROOT / "configs/sweeps/demo.yaml"),
        str(ROOT / "configs/demo.yaml"),
        "sweep.dir=s",
    )
    print(f"eight trials and two finalists on two seeds: {time.monotonic() - began:.0f} s")
    assert (
        result["points"] == 8
        and result["trials"]["stopped"] >= 1
        and not result["failures"]
        and not result["trials"]["unfinished"]
    )
    root = folder / "s"
    assert {
        "index.html",
        "results.csv",
        "results.parquet",
        "best.yaml",
        "summary.json",
        "test.json",
    } <= {path.name for path in root.iterdir()}
    tested = {path.parent.name for path in (root / "trials").glob("*/eval.json")}
    won = f"p{result['winner']['point']:04d}-fresh"
    assert len(tested) == 2 and all(name.startswith(won) for name in tested), (
        "only the winner's test score is read"
    )
    stopped = next(name for name, found in outcomes(root).items() if found["status"] == "stopped")
    config = str(root / "trials" / stopped / "config.yaml")
    assert cimage(folder, "show", config)["exists"]["run"]["exists"]
    assert Path(cimage(folder, "report", config)["report"]).is_file()
    assert cimage(folder, "evaluate", config, "eval.controls=false")["node"]["test"] > 50
    again = cimage(
        folder, "pretrain", str(root / "best.yaml"), "data.store_dir=data", "resources.threads=1"
    )
    assert again["best"]["score"] == result["winner"]["scores"][0]
    before = outcomes(root)
    assert sweep_again(folder)["winner"] == result["winner"] and outcomes(root) == before, (
        "a finished sweep is left alone"
    )


def sweep_again(folder: Path) -> Any:
    return cimage(
        folder,
        "sweep",
        str(ROOT / "configs/sweeps/demo.yaml"),
        str(ROOT / "configs/demo.yaml"),
        "sweep.dir=s",
    )


def test_killed_at_three_moments(folder: Path) -> None:
    """Kill -9 while the first trial trains, in the middle of the search, and among the
    finalists: the sweep ends as if nothing had happened.
    """
    sweep(folder, "whole")
    root = folder / "killed"

    def has_trained(names: str, count: int) -> bool:
        """`count` trials are over and the next has a checkpoint."""
        over = set(outcomes(root))
        under_way = [
            path.parent.parent.name for path in (root / "trials").glob(f"{names}/ckpt/step-*")
        ]
        return len(over) >= count and any(name not in over for name in under_way)

    for names, count in (("p0000-s0", 0), ("p*-s0", 2), ("*-fresh-*", 5)):
        words = ("sweep", "space.yaml", "tiny.yaml", "sweep.dir=killed", "--quiet")
        process = start_until(folder, functools.partial(has_trained, names, count), *words)
        process.kill()
        process.communicate()
        kept = {path: path.read_bytes() for path in (root / "trials").glob("*/outcome.json")}
        print(f"killed with {len(kept)} trials over")
    sweep(folder, "killed")
    assert {path: path.read_bytes() for path in kept} == kept, "a finished trial ran again"
    assert search_of(root) == search_of(folder / "whole")
    resumed = [json.loads(path.read_text()) for path in (root / "trials").glob("*/summary.json")]
    assert any(run["steps_now"] < run["steps"] for run in resumed), (
        "no run went on from its checkpoint"
    )


def test_stopped_by_ctrl_c(folder: Path) -> None:
    root = folder / "s"
    words = ("sweep", "space.yaml", "tiny.yaml", "sweep.dir=s")
    process = start_until(
        folder,
        lambda: (
            len(outcomes(root)) == 1 and bool(list((root / "trials").glob("p0001-s0/ckpt/step-*")))
        ),
        *words,
    )
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert (
        process.returncode == 130
        and "Resume with: cimage sweep space.yaml tiny.yaml sweep.dir=s" in err
    ), err
    assert (root / "index.html").is_file() and "p0001-s0" not in outcomes(root)
    result = sweep(folder, "s")
    assert not result["failures"] and result["trials"]["done"] == len(outcomes(root))


def test_shuffled_test_labels_give_the_same_search(folder: Path) -> None:
    """The same points, scores and winner; only the winner's test score differs."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 240)
    edges = rng.integers(0, 240, (4000, 2))
    edges = edges[(labels[edges[:, 0]] == labels[edges[:, 1]]) | (rng.random(4000) < 0.1)]
    features = rng.normal(size=(240, 8)) + np.eye(3, 8)[labels]
    part = rng.permutation(240)
    masks = {
        name: np.isin(np.arange(240), part[begin:end])
        for name, begin, end in (("train", 0, 60), ("val", 60, 140), ("test", 140, 240))
    }
    shuffled = labels.copy()
    shuffled[masks["test"]] = rng.permutation(shuffled[masks["test"]])
    results = []
    for name, given in (("true", labels), ("shuffled", shuffled)):
        graph = folder / name
        graph.mkdir()
        np.save(graph / "edges.npy", edges)
        np.save(graph / "features.npy", features)
        np.save(graph / "labels.npy", given)
        np.savez(graph / "splits.npz", **masks)
        words = [
            "data.name=mine",
            f"data.path={graph}",
            "sweep.scheduler=asha",
            "sweep.grace=0.1",
            "loss.factor_weight=0.3",
            "cluster.num_clusters=3",
        ]
        results.append(sweep(folder, f"sweep-{name}", *words))
    assert search_of(folder / "sweep-true") == search_of(folder / "sweep-shuffled")
    true, other = results
    assert true["search"] == other["search"] and true["winner"] == other["winner"]
    scores = [row["test"]["scores"]["node accuracy"]["mean"] for row in results]
    assert scores[0] > scores[1] + 10, "shuffling does reach the test score"


def test_a_diverging_and_a_killed_trial_do_not_stop_the_sweep(folder: Path) -> None:
    (folder / "space.yaml").write_text(
        "search: grid\nbaseline: false\ntop: 1\nfresh_seeds: 1\nconcurrent: 1\nspace:\n  "
        "optim.lr_max: [1.0e+30, 0.01, 0.02]\n"
    )
    root = folder / "s"
    words = ("sweep", "space.yaml", "tiny.yaml", "sweep.dir=s", "--json")
    process = start_until(
        folder, lambda: bool(list((root / "trials").glob("p0001-s0/ckpt/step-*"))), *words
    )
    trial = next(
        process
        for process in own_processes(folder)
        if any("Trainable" in word for word in process.cmdline())
    )
    trial.kill()
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    result = json.loads(out)
    assert set(result["failures"]) == {"p0000-s0", "p0001-s0"}
    assert (
        "Training diverged" in result["failures"]["p0000-s0"]
        and "process died" in result["failures"]["p0001-s0"]
    )
    assert result["winner"]["point"] == 2


def test_a_population(folder: Path) -> None:
    space = (
        "search: random\nscheduler: pbt\ntrials: 4\ninterval_epochs: 20\ntop: "
        "1\nfresh_seeds: 1\nspace:\n  optim.lr_max: {low: 2.0e-3, high: 3.0e-2, log: true}\n"
    )
    (folder / "space.yaml").write_text(space)
    result = sweep(folder, "s")
    assert result["trials"]["done"] == 12 + len(result["fresh"]) and not result["failures"]
    last = folder / "s" / "trials" / "p0001-g02"
    assert json.loads((last / "summary.json").read_text())["steps"] == 60
    steps = [
        json.loads(line)["step"]
        for line in (last / "metrics.jsonl").read_text().splitlines()
        if '"val"' in line
    ]
    assert steps[-1] == 60 and steps == sorted(set(steps)) and steps[0] == 6, (
        "one curve from the first step, through every hand-over"
    )
    moved = [
        t
        for t in (json.loads(p.read_text()) for p in (folder / "s" / "trials").glob("*/trial.json"))
        if t["parent"] and t["parent"][:5] != t["id"][:5]
    ]
    assert moved, "someone took over another's weights"


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two workers need two CPUs")
def test_a_trial_of_two_workers(folder: Path) -> None:
    result = sweep(
        folder,
        "s",
        "sweep.trials=2",
        "sweep.fresh_seeds=1",
        "resources.num_workers=2",
        "train.epochs=12",
    )
    assert result["trials"]["done"] == len(outcomes(folder / "s")) >= 3 and not result["failures"]
    assert (folder / "s" / "trials" / "p0001-s0" / "ray").is_dir(), "a Ray Train run"
