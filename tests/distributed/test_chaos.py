"""Training on Ray is hurt in every way we know of: it continues by itself, or stops with a clear
message, and loses nothing that was saved.

Each run takes one to two minutes on a small machine, the whole file about half an hour.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from cimage_dist.comm import Comm
from cimage_dist.config_loading import load_config
from cimage_dist.errors import UserError
from cimage_dist.io import checkpoint
from cimage_dist.io.artifacts import RunDir
from tests.distributed.conftest import (
    CHECKPOINT_EVERY,
    PATIENCE_S,
    STEPS,
    Cluster,
    Expected,
    Run,
    wait_until,
)
from tests.procs import run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two workers need two CPUs"),
]

KILLS = 10


@pytest.fixture(scope="module")
def expected(one_node: Cluster) -> Expected:
    return Expected.of(one_node.pretrain("whole"))


def wait_for_workers(cluster: Cluster, run: Run) -> None:
    run.wait(lambda: len(cluster.workers()) == 2, "two workers")


def next_attempt(run: Run, count: int) -> dict[str, Any]:
    """The start of the workers that follows the first `count` ones."""
    run.wait(lambda: len(run.attempts()) > count, "another start of the workers")
    return run.attempts()[count]


def moment(index: int) -> tuple[int, float]:
    """(step after which, seconds later) to kill. The first kills come before the first step and
    before the first checkpoint.
    """
    draw = random.Random(index)
    step = (
        (0, draw.randint(1, CHECKPOINT_EVERY - 1))[index]
        if index < 2
        else draw.randint(1, STEPS - 5)
    )
    return step, draw.uniform(0, 4 if step == 0 else 0.3)


@pytest.mark.parametrize("index", range(KILLS))
def test_a_worker_is_killed(
    index: int, one_node: Cluster, expected: Expected, record_property: Any
) -> None:
    step, delay = moment(index)
    run = one_node.pretrain(f"kill-{index}")
    wait_for_workers(one_node, run)
    run.wait_for_step(step)
    time.sleep(delay)
    victim = one_node.workers()[random.Random(index).randrange(2)]
    count = len(run.attempts())
    victim.kill()
    killed = time.time()
    victim.wait(10)
    reached = run.step()  # the other worker cannot continue without this one
    assert reached < STEPS, "the kill came too late"
    attempt = next_attempt(run, count)
    lost = reached - attempt["after_step"]
    expected.check(run)
    assert 0 <= lost <= CHECKPOINT_EVERY
    assert len(run.attempts()) == count + 1 and attempt["workers"] == 2
    facts = {
        "killed_at": reached,
        "steps_lost": lost,
        "seconds_to_go_on": round(attempt["unix_time"] - killed, 1),
    }
    print(f"kill {index}: {facts}")
    for name, value in facts.items():
        record_property(name, value)


def test_workers_die_too_often(one_node: Cluster, expected: Expected) -> None:
    """A message, not a traceback; the same command continues."""
    run = one_node.pretrain("often", "resources.max_failures=0")
    run.wait_for_step(CHECKPOINT_EVERY + 1)
    one_node.workers()[0].kill()
    told = run.finish(2)
    assert "resources.max_failures (0)" in told and "Traceback" not in told
    again = one_node.pretrain("often")
    assert next_attempt(again, 1)["after_step"] >= CHECKPOINT_EVERY
    expected.check(again)


def newest(run: Path) -> checkpoint.Checkpoint:
    found = checkpoint.load_latest(run / "ckpt")
    assert found is not None
    return found


def test_the_driver_is_killed_and_the_newest_checkpoint_damaged(
    one_node: Cluster, expected: Expected
) -> None:
    """Its workers end with it. The same command continues; with the newest checkpoint cut short,
    from the one before.
    """
    run = one_node.pretrain("driver")
    run.wait_for_step(3 * CHECKPOINT_EVERY + 2)
    run.process.kill()
    run.finish(-signal.SIGKILL)
    wait_until(lambda: not one_node.workers(), "the end of the workers of a killed driver")
    last = newest(run.root).step
    assert run.step() - last <= CHECKPOINT_EVERY
    shutil.copytree(run.root, one_node.folder / "damaged")

    again = one_node.pretrain("driver")
    assert next_attempt(again, 1)["after_step"] == last
    expected.check(again)

    state = one_node.folder / "damaged" / "ckpt" / f"step-{last:08d}" / checkpoint.TENSORS
    state.write_bytes(state.read_bytes()[:-1])
    other = one_node.pretrain("damaged")
    assert next_attempt(other, 1)["after_step"] == last - CHECKPOINT_EVERY
    expected.check(other)


def test_the_driver_is_asked_to_stop(one_node: Cluster, expected: Expected) -> None:
    run = one_node.pretrain("asked")
    run.wait_for_step(CHECKPOINT_EVERY + 2)
    run.process.send_signal(signal.SIGTERM)
    told = run.finish(143)
    last = newest(run.root).step
    assert CHECKPOINT_EVERY + 2 <= last < STEPS and run.step() == last
    assert f"stopped after step {last}; everything is saved" in told and "Traceback" not in told
    again = one_node.pretrain("asked")
    assert next_attempt(again, 1)["after_step"] == last
    expected.check(again)


def test_a_loss_that_is_not_finite_is_not_tried_again(one_node: Cluster) -> None:
    run = one_node.pretrain(
        "diverged", "cluster.init=propagated", "optim.lr_max=1e30", "run.checkpoint_every=1"
    )
    told = run.finish(2)
    assert (
        "Training diverged at step 2" in told and "optim.lr_max" in told and "Traceback" not in told
    )
    assert len(run.attempts()) == 1
    saved = newest(run.root)
    assert saved.step == 1 and all(
        bool(value.isfinite().all()) for value in checkpoint.model_weights(saved.tensors).values()
    )


def unmounted(folder: Path) -> bool:
    """False where a small file system of our own cannot be had: that needs root."""
    folder.mkdir()
    return (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(folder)],
            capture_output=True,
            check=False,
        ).returncode
        != 0
    )


def fill(folder: Path) -> Path:
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(bytes(4096))
    return ballast


def test_storage_is_full(one_node: Cluster, expected: Expected) -> None:
    small = one_node.folder / "small"
    if unmounted(small):
        pytest.skip("mounting a small file system needs root")
    try:
        run = one_node.pretrain("small/run")
        run.wait_for_step(2 * CHECKPOINT_EVERY + 1)
        ballast = fill(small)
        told = run.finish(2)
        assert "No space left on device" in told and "Make room" in told and "Traceback" not in told
        assert len(run.attempts()) == 1
        steps = checkpoint.steps(run.root / "ckpt")
        assert len(steps) >= 2 and all(
            checkpoint.why_invalid(run.root / "ckpt" / f"step-{step:08d}") is None for step in steps
        )
        ballast.unlink()
        again = one_node.pretrain("small/run")
        assert next_attempt(again, 1)["after_step"] == steps[-1]
        expected.check(again)
    finally:
        subprocess.run(["umount", "-l", str(small)], check=False)


def save_on_full_storage(comm: Comm, root: str, failing: str) -> tuple[str, list[int]]:
    """What a rank is told at the second checkpoint, and the checkpoints that are whole then."""
    from cimage_dist.distributed import worker as ray_worker

    def no_room(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "ckpt")

    ray_worker.ray.train.report = lambda metrics, **more: None
    run = RunDir(root)
    with ray_worker.RaySink(run, load_config(overrides=["run.tensorboard=false"]), comm) as sink:
        sink.save(5, {"model.w": torch.ones(3)}, {}, False)
        if failing == "checkpoint":
            checkpoint.save = no_room
        else:
            sink._file = SimpleNamespace(write=no_room, close=lambda: None)
        sink.log("train", 6, {})
        try:
            sink.save(10, {"model.w": torch.zeros(3)}, {}, False)
        except UserError as error:
            return str(error), checkpoint.steps(run.checkpoints)
    return "", []


@pytest.mark.parametrize(
    ("failing", "what"),
    [("checkpoint", "The checkpoint of step 10"), ("metrics", "The metrics of step 6")],
)
def test_all_ranks_stop_where_rank_0_cannot_write(failing: str, what: str, tmp_path: Path) -> None:
    """Without Ray, and without a full disk."""
    told = run_ranks(save_on_full_storage, 2, str(tmp_path), failing, timeout=PATIENCE_S)
    assert told[0] == told[1] and told[0][1] == [5]
    assert what in told[0][0] and "No space left on device: ckpt" in told[0][0]


@pytest.mark.parametrize("is_main", [False, True])
def test_a_worker_hangs(is_main: bool, one_node: Cluster, expected: Expected) -> None:
    """It is silent, so all are started again, also where the lock's holder hangs; no collective of
    the others has failed by then.
    """
    run = one_node.pretrain(f"hang-{is_main}", "resources.lost_after_s=20")
    run.wait_for_step(CHECKPOINT_EVERY + 2)
    main = one_node.holder(run.root)
    victim = (
        main if is_main else next(worker for worker in one_node.workers() if worker.pid != main.pid)
    )
    victim.suspend()
    began = time.time()
    try:
        run.wait(lambda: victim not in one_node.workers(), "the end of the worker that hangs")
        noticed = time.time() - began
        assert noticed < 45, "27 s, and 30 s more if it is asked to leave the process group"
        attempt = next_attempt(run, 1)
        print(
            f"hang of rank {0 if is_main else 1}: noticed after {noticed:.0f} s, went on after "
            f"{attempt['unix_time'] - began:.0f} s"
        )
        assert 0 <= run.step() - attempt["after_step"] <= CHECKPOINT_EVERY
        expected.check(run)
    finally:
        with suppress(psutil.NoSuchProcess):
            victim.kill()
