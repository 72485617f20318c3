"""A command line without a process, tiny settings, and a trained run to start from."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from cimage_dist.__main__ import main
from tests.conftest import small_sbm_settings

TRAINING = [
    "model.num_factors=3",
    "model.factor_dim=4",
    "model.num_layers=2",
    "model.routing_iterations=2",
    "train.epochs=4",
    "eval.probe_epochs=10",
    "eval.kmeans_restarts=2",
    "run.tensorboard=false",
    "run.log_every=1",
    "resources.threads=1",
    "loss.factor_weight=0",  # no pseudo-labels: most tests are about something else
]


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


Cli = Callable[..., Outcome]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    """`cli("show", ...)` inside this process, in a fresh working directory."""
    monkeypatch.chdir(tmp_path)

    def run(*argv: str) -> Outcome:
        capsys.readouterr()
        code = main(argv)
        return Outcome(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def tiny(store_dir: Path) -> list[str]:
    """Settings of a run of a second on 300 generated nodes; stores are shared between tests."""
    return [*small_sbm_settings(store_dir), *TRAINING]


@pytest.fixture(scope="session")
def trained_once(tmp_path_factory: pytest.TempPathFactory, tiny: list[str]) -> Path:
    root = tmp_path_factory.mktemp("trained") / "run"
    assert main(["pretrain", *tiny, f"run.dir={root}", "--quiet"]) == 0
    return root


@pytest.fixture
def trained(trained_once: Path, tmp_path: Path) -> Path:
    """A trained run of the settings `tiny`, free to be damaged."""
    return Path(shutil.copytree(trained_once, tmp_path / "trained"))


def own_graph(folder: Path, **arrays: np.ndarray | None) -> list[str]:
    """Write an own graph of 120 nodes, the last 20 without edges; None leaves a file out. Returns
    its settings.
    """
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 120)
    edges = rng.integers(0, 100, (1500, 2))
    edges = edges[labels[edges[:, 0]] == labels[edges[:, 1]]]
    usual = {
        "edges": edges,
        "features": rng.normal(size=(120, 5)) + labels[:, None],
        "labels": labels,
    }
    folder.mkdir()
    for name, array in (usual | arrays).items():
        if array is not None:
            np.save(folder / f"{name}.npy", array)
    return [
        "data.name=mine",
        f"data.path={folder}",
        f"data.store_dir={folder.parent / 'stores'}",
        *TRAINING,
    ]


def environment() -> dict[str, str]:
    """One thread, so that results equal those of the test process to the last bit."""
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}


def command(*argv: str) -> list[str]:
    return [sys.executable, "-m", "cimage_dist", *argv]


def process(*argv: str) -> Outcome:
    """The same as a real process."""
    done = subprocess.run(
        command(*argv), capture_output=True, text=True, env=environment(), timeout=300
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


NOTES = (
    "objective: ",
    "length: ",
    "no labels",
    "encoder: ",
    "clusters: ",
)  # what pretrain says before it starts


def assert_complaint(got: Outcome, words: list[str]) -> None:
    assert got.code == 2
    assert got.out == ""
    assert "Traceback" not in got.err
    said = "".join(line for line in got.err.splitlines(keepends=True) if not line.startswith(NOTES))
    assert said.startswith("cimage") and said.endswith("\n")
    assert said.count("\n") == 1, "one paragraph"
    for word in words:
        assert word in got.err


def ok(cli: Cli, *argv: str) -> str:
    got = cli(*argv)
    assert got.code == 0, got.err
    return got.out


def as_json(cli: Cli, *argv: str) -> dict[str, Any]:
    """Standard output is exactly one JSON object (json.loads refuses anything after it), without
    NaN.
    """
    value = json.loads(
        ok(cli, *argv, "--json"), parse_constant=lambda name: pytest.fail(f"{name} is not JSON")
    )
    assert isinstance(value, dict)
    return value
