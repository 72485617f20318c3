from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from cimage_dist.errors import UserError
from cimage_dist.io import artifacts, checkpoint


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"model.w": torch.full((3, 2), value), "optim.0.step": torch.tensor(value)}


def test_round_trip_and_pointers(tmp_path):
    checkpoint.save(tmp_path, 5, tensors(5), {"lr": 0.1 + 0.2})
    checkpoint.save(tmp_path, 10, tensors(10), {"lr": 1e-300})
    checkpoint.point(tmp_path, "BEST", 5)
    newest = checkpoint.load_latest(tmp_path)
    assert newest is not None and newest.step == 10 and newest.meta == {"lr": 1e-300}
    torch.testing.assert_close(newest.tensors, tensors(10), rtol=0, atol=0)
    best = checkpoint.load_selected(tmp_path, "val")
    assert best.step == 5 and best.meta["lr"] == 0.1 + 0.2
    assert checkpoint.load_selected(tmp_path, "last").step == 10


def damage_truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def damage_flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (checkpoint.TENSORS, damage_truncate),
        (checkpoint.TENSORS, damage_flip),
        (checkpoint.TENSORS, Path.unlink),
        (checkpoint.META, damage_truncate),
        (checkpoint.META, Path.unlink),
    ],
)
def test_a_damaged_checkpoint_is_named_and_passed_over(tmp_path, caplog, name, damage):
    checkpoint.save(tmp_path, 5, tensors(5), {})
    path = checkpoint.save(tmp_path, 10, tensors(10), {})
    if name == checkpoint.META and damage is damage_truncate:
        (path / name).write_text((path / name).read_text()[: len((path / name).read_text()) // 2])
    else:
        damage(path / name)
    found = checkpoint.load_latest(tmp_path)
    assert found is not None and found.step == 5
    assert name in caplog.text
    with pytest.raises(UserError, match=name):
        checkpoint.load(path)


def test_unknown_format_is_refused(tmp_path):
    path = checkpoint.save(tmp_path, 5, tensors(5), {})
    body = json.loads((path / checkpoint.META).read_text())
    (path / checkpoint.META).write_text(json.dumps(body | {"format": 99}))
    with pytest.raises(UserError, match="format 99"):
        checkpoint.load(path)


def test_prune_keeps_the_newest_and_the_best(tmp_path):
    for step in range(1, 7):
        checkpoint.save(tmp_path, step, tensors(step), {})
    checkpoint.point(tmp_path, "BEST", 2)
    (tmp_path / f"{artifacts.TMP_PREFIX}step-00000099-dead").mkdir()
    for pointer in ("LATEST", "BEST"):  # a kill while a pointer was written
        (tmp_path / f"{artifacts.TMP_PREFIX}{pointer}-dead").touch()
    checkpoint.prune(tmp_path, keep=2)
    assert checkpoint.steps(tmp_path) == [2, 5, 6]
    assert not list(tmp_path.glob(f"{artifacts.TMP_PREFIX}*"))


def test_no_checkpoint_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="pretrain"):
        checkpoint.load_selected(tmp_path, "last")


def test_a_failed_writer_leaves_the_old_directory(tmp_path):
    target = tmp_path / "thing"
    with artifacts.committed_dir(target) as tmp:
        (tmp / "a").write_text("old")
    with pytest.raises(RuntimeError), artifacts.committed_dir(target) as tmp:
        (tmp / "a").write_text("new")
        raise RuntimeError
    assert (target / "a").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["thing"]


def test_optimizer_state_round_trip():
    weights = [torch.nn.Parameter(torch.randn(3)), torch.nn.Parameter(torch.randn(2, 2))]
    optimizer = torch.optim.Adam(weights, lr=0.1)
    for _ in range(3):
        sum(w.square().sum() for w in weights).backward()
        optimizer.step()
    slots, groups = checkpoint.pack_optimizer(optimizer)
    other = torch.optim.Adam([torch.nn.Parameter(w.detach().clone()) for w in weights], lr=0.5)
    checkpoint.unpack_optimizer(other, slots, json.loads(json.dumps(groups)))
    assert json.dumps(other.state_dict()["param_groups"]) == json.dumps(groups)
    for a, b in zip(
        optimizer.state_dict()["state"].values(), other.state_dict()["state"].values(), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


WRITER = """
import sys, torch
from pathlib import Path
from cimage_dist.io import checkpoint
for step in range(1, 100000):
    tensors = {"model.w": torch.full((200, 200), float(step))}
    checkpoint.save(Path(sys.argv[1]), step, tensors, {"step": step})
    checkpoint.prune(Path(sys.argv[1]), keep=2)
"""


def kill_while_writing(folder: Path, delay: float) -> None:
    """SIGKILL a process that writes checkpoints without pause, some time after it began to, then
    see what it left.
    """
    before = checkpoint.steps(folder)
    child = subprocess.Popen([sys.executable, "-c", WRITER, str(folder)])
    while checkpoint.steps(folder) == before:
        assert child.poll() is None, "the writer failed"
        time.sleep(0.001)
    time.sleep(delay)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    found = checkpoint.load_latest(folder)
    assert found is not None
    for step in checkpoint.steps(folder):
        assert checkpoint.why_invalid(folder / f"step-{step:08d}") is None
    assert float(found.tensors["model.w"][0, 0]) == found.step == found.meta["step"]


@pytest.mark.parametrize("delay", [0.01, 0.05, 0.123])
def test_kill_during_checkpointing_leaves_only_whole_checkpoints(tmp_path, delay):
    kill_while_writing(tmp_path, delay)


@pytest.mark.slow
def test_kill_during_checkpointing_twenty_times(tmp_path):
    for i in range(20):
        kill_while_writing(
            tmp_path / str(i % 3), 0.003 + 0.017 * i
        )  # some folders already hold leftovers of earlier kills
