"""Training that is stopped, by asking or by force, continues where it was and ends with the same
weights to the last bit.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from cimage_dist.__main__ import main
from cimage_dist.io import checkpoint
from tests.cli.conftest import command, environment
from tests.procs import PATIENCE_S

Item = TypeVar("Item")
STEPS = 120


@pytest.fixture(scope="module")
def settings(tiny: list[str]) -> list[str]:
    """Long enough to be met in the middle; a checkpoint at every fifth step, so that a kill often
    meets one half-written.
    """
    return [*tiny, f"train.epochs={STEPS}", "run.checkpoint_every=5", "run.log_every=1"]


@pytest.fixture(scope="module")
def uninterrupted(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("whole") / "run"
    assert main(["pretrain", *settings, f"run.dir={root}", "--quiet"]) == 0
    return root


def last_step(run: Path) -> int:
    """Of the metrics written so far; 0 before the first."""
    lines = (
        (run / "metrics.jsonl").read_text().splitlines()
        if (run / "metrics.jsonl").is_file()
        else []
    )
    return max((json.loads(line)["step"] for line in lines[:-1]), default=0)


def start(settings: list[str], run: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command("pretrain", *settings, f"run.dir={run}"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )


def wait_for_step(process: subprocess.Popen[str], run: Path, step: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while last_step(run) < step:
        assert process.poll() is None or last_step(run) >= step, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.002)


def met_in_the_middle(attempt: Callable[[Path], Item | None], run: Path) -> Item:
    """What an attempt gives; again from nothing where the run was over before its signal came, as
    may be on a busy machine.
    """
    for _ in range(10):
        if (found := attempt(run)) is not None:
            return found
        shutil.rmtree(run)
    raise AssertionError("the run was over before any signal came")


def assert_same_end(run: Path, whole: Path) -> None:
    a, b = (checkpoint.load_latest(root / "ckpt") for root in (run, whole))
    assert a is not None and b is not None and a.step == b.step == STEPS and a.meta == b.meta
    torch.testing.assert_close(a.tensors, b.tensors, rtol=0, atol=0)
    records, expected = (
        [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
        for root in (run, whole)
    )
    assert [(r["step"], r.get("loss")) for r in records] == [
        (r["step"], r.get("loss")) for r in expected
    ]
    assert not list((run / "ckpt").glob(".tmp-*"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_by_a_signal(
    settings: list[str], uninterrupted: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    run = tmp_path / "run"

    def signalled(run: Path) -> tuple[int, str, str] | None:
        process = start(settings, run)
        wait_for_step(process, run, 7)
        process.send_signal(number)
        out, err = process.communicate(timeout=PATIENCE_S)
        return (process.returncode, out, err) if process.returncode else None

    returned, out, err = met_in_the_middle(signalled, run)
    assert returned == code and out == ""
    saved = checkpoint.load_latest(run / "ckpt")
    assert saved is not None and 7 <= saved.step < STEPS
    message = err.splitlines()[-1]
    assert message.startswith(
        f"stopped after step {saved.step}; everything is saved. Resume with: cimage pretrain "
        "data.name=sbm "
    )
    assert f"run.dir={run}" in message and "Traceback" not in err
    assert not (run / "summary.json").exists()
    assert main(["pretrain", *settings, f"run.dir={run}", "--quiet"]) == 0
    assert json.loads((run / "summary.json").read_text())["steps_now"] == STEPS - saved.step
    assert_same_end(run, uninterrupted)


def kill_and_resume(settings: list[str], kills: int, draw: random.Random, run: Path) -> int | None:
    """Kill -9 at random steps and a random moment within the step; each process continues from what
    the one before left. None where one ended before it was killed.
    """
    for _ in range(kills):
        process = start(settings, run)
        wait_for_step(
            process, run, min(last_step(run) + draw.randint(1, STEPS // (kills + 1)), STEPS - 20)
        )
        time.sleep(draw.uniform(0, 0.02))
        process.kill()
        process.communicate()
        if process.returncode == 0:
            return None
        assert process.returncode == -signal.SIGKILL
        found = checkpoint.load_latest(run / "ckpt")
        if found is not None and found.step == STEPS:
            return None
    return kills


def test_killed(settings: list[str], uninterrupted: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    met_in_the_middle(partial(kill_and_resume, settings, 3, random.Random(0)), run)
    assert main(["pretrain", *settings, f"run.dir={run}", "--quiet"]) == 0
    assert_same_end(run, uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_killed_often(settings: list[str], uninterrupted: Path, tmp_path: Path, seed: int) -> None:
    run = tmp_path / "run"
    met_in_the_middle(partial(kill_and_resume, settings, 10, random.Random(seed)), run)
    assert main(["pretrain", *settings, f"run.dir={run}", "--quiet"]) == 0
    assert_same_end(run, uninterrupted)


@pytest.mark.parametrize(
    ("method", "first"), [("selfkmeans", "initial labels "), ("rdgae", "R-DGAE pre-training ")]
)
def test_stopped_before_the_first_step(
    method: str, first: str, tiny: list[str], tmp_path: Path
) -> None:
    """While initial labels are made there is nothing to save yet, and the message does not claim
    otherwise.
    """
    run = tmp_path / "run"
    settings = [
        *tiny,
        "loss.factor_weight=1",
        f"cluster.init={method}",
        "cluster.init_epochs=20000",
        "run.seed=77",
    ]
    process = start(settings, run)
    assert process.stderr is not None
    notes = ("objective: ", "length: ", "encoder: ")
    said = (line for line in process.stderr if not line.startswith(notes))
    assert next(said).startswith(first)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 143
    assert err.splitlines()[-1].startswith(
        "stopped before the first step. Resume with: cimage pretrain "
    )
    assert not (run / "ckpt").exists()
