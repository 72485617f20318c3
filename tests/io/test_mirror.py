"""Runs on object storage: a file URL, and a real S3 server in this process."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from cimage_dist.config import Config, working_copy
from cimage_dist.config_loading import load_config
from cimage_dist.errors import UserError
from cimage_dist.io import checkpoint, mirror, storage
from cimage_dist.io.artifacts import RunDir
from cimage_dist.io.checkpoint import load_rows
from cimage_dist.pipeline import stages
from cimage_dist.train.progress import Progress

SETTINGS = (
    "data.name=sbm",
    "data.sbm.num_nodes=200",
    "data.sbm.num_blocks=4",
    "model.num_factors=4",
    "model.factor_dim=4",
    "model.num_layers=2",
    "sampler.fanouts=[4,4]",
    "sampler.batch_edges=200",
    "ci.every_steps=5",
    "cluster.restarts=1",
    "train.steps=20",
    "run.checkpoint_every=4",
    "run.log_every=1",
    "run.keep_checkpoints=2",
    "run.tensorboard=false",
    "resources.threads=1",
)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of an S3 server with a bucket."""
    moto = pytest.importorskip("moto.server", reason="the S3 server of the tests needs moto")
    s3fs = pytest.importorskip("s3fs", reason="s3:// needs s3fs")
    import boto3

    running = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    running.start()
    host, port = running.get_host_and_port()
    address = f"http://{host}:{port}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", address)
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        s3fs.S3FileSystem.clear_instance_cache()  # one made without these keys is no use
        boto3.client("s3").create_bucket(Bucket="bucket")
        yield "s3://bucket"
    s3fs.S3FileSystem.clear_instance_cache()
    running.stop()


@pytest.fixture(params=["file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty place for a run; `on_another_machine` changes where the copy is."""
    monkeypatch.setenv("CIMAGE_CACHE", str(tmp_path / "here"))
    if request.param == "file":
        return f"file://{tmp_path}/storage/run"
    return f"{request.getfixturevalue('server')}/{tmp_path.name}/run"


@contextlib.contextmanager
def on_another_machine(name: str = "there") -> Iterator[None]:
    before = os.environ["CIMAGE_CACHE"]
    os.environ["CIMAGE_CACHE"] = str(Path(before).parent / name)
    try:
        yield
    finally:
        os.environ["CIMAGE_CACHE"] = before


def put(url: str, name: str, text: str) -> None:
    run = mirror.open_place(url)
    with mirror.edited(run.root):
        (run.root / name).parent.mkdir(parents=True, exist_ok=True)
        (run.root / name).write_text(text)


def names(run: RunDir) -> dict[str, str]:
    return {
        path.relative_to(run.root).as_posix(): path.read_text()
        for path in sorted(run.root.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }


def test_what_one_machine_commits_another_sees(url):
    put(url, "a/b.txt", "1")
    put(url, "c", "2")
    with on_another_machine():
        assert names(mirror.open_place(url)) == {"a/b.txt": "1", "c": "2"}
        root = mirror.open_place(url).root
        with mirror.edited(root):
            shutil.rmtree(root / "a")
            (root / "c").write_text("3")
    assert names(mirror.open_place(url)) == {"c": "3"}
    contents = [name for name in contents_of(url) if "/files/" in name]
    assert len(contents) == 1, "contents that no commit needs are removed"


def contents_of(url: str) -> list[str]:
    found, folder = storage.open_storage(url)
    found.invalidate_cache()
    return list(found.find(folder))


def test_only_committed_files_are_seen(url, monkeypatch):
    """A writer dies after its uploads and before its manifest; what it left locally goes too."""
    put(url, "a", "old")
    with monkeypatch.context() as patch:
        patch.setattr(storage.Remote, "commit", lambda self, found: sys.exit("killed"))
        with pytest.raises(SystemExit):
            put(url, "a", "new")
    assert working_copy(url).joinpath("a").read_text() == "new"
    with on_another_machine():
        assert names(mirror.open_place(url)) == {"a": "old"}
    assert names(mirror.open_place(url)) == {"a": "old"}
    put(url, "b", "1")
    assert names(mirror.open_place(url)) == {"a": "old", "b": "1"}


def test_a_number_is_granted_once(url):
    remote = storage.Remote(url)
    assert remote.commit(storage.Commit(1, "first", {}))
    assert not remote.commit(storage.Commit(1, "second", {}))
    assert remote.newest() == storage.Commit(1, "first", {})


def test_commits_of_two_machines_both_count(url):
    put(url, "base", "0")
    here = mirror.open_place(url)
    with mirror.edited(here.root):
        (here.root / "mine").write_text("1")
        with on_another_machine():
            put(url, "theirs", "2")
    with on_another_machine("third"):
        assert names(mirror.open_place(url)) == {"base": "0", "mine": "1", "theirs": "2"}


def test_a_trainer_whose_place_was_taken_cannot_commit(url):
    here = mirror.open_place(url)
    first = mirror.claim(here.root)
    (here.root / "a").write_text("1")
    mirror.publish(here.root, first)
    with on_another_machine():
        there = mirror.open_place(url)
        second = mirror.claim(there.root)
        put(url, "report", "an editor may commit meanwhile")
        (there.root / "a").write_text("2")
        mirror.publish(there.root, second)
    (here.root / "a").write_text("3")
    with pytest.raises(UserError, match="taken over"):
        mirror.publish(here.root, first)
    with on_another_machine("third"):
        assert names(mirror.open_place(url))["a"] == "2"


def test_the_lock(url, monkeypatch):
    monkeypatch.setattr(storage, "_RENEW_S", 0.05)
    root = mirror.open_place(url).root
    busy = pytest.raises(UserError, match="Another process is training")
    with mirror.leased(root), busy, mirror.leased(root):
        pass
    with mirror.leased(root):  # it was given back
        pass
    remote = storage.Remote(url)
    gone = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    remote.write("LOCK", f"{storage.socket.gethostname()} {gone} x 0".encode())
    with mirror.leased(root):  # its owner has ended
        pass
    monkeypatch.setattr(storage, "_SILENT_S", 0.1)
    remote.write("LOCK", b"another-machine 1 x 0")
    with mirror.leased(root):  # its owner is silent
        pass


def test_a_damaged_content_is_named(url):
    put(url, "a", "1")
    (content,) = [name for name in contents_of(url) if "/files/" in name]
    storage.open_storage(url)[0].pipe_file(content, b"2")
    with on_another_machine(), pytest.raises(UserError, match="damaged"):
        mirror.open_place(url)


def test_storage_that_cannot_be_reached_is_a_clear_error(monkeypatch, tmp_path, server):
    monkeypatch.setenv("CIMAGE_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="s3://no-such-bucket/run failed"):
        put("s3://no-such-bucket/run", "a", "1")


def config(place: str, tmp_path: Path, *more: str) -> Config:
    store = f"data.store_dir={tmp_path / 'data'}"
    return load_config(overrides=[*SETTINGS, store, f"run.dir={place}", *more])


@pytest.mark.parametrize("url", ["s3"], indirect=True)
def test_killed_on_one_machine_and_resumed_on_another_ends_bit_equal(url, tmp_path):
    """Killed at a step between checkpoints; then evaluated, embedded and read by a third."""
    plain = config(str(tmp_path / "plain"), tmp_path)
    stages.pretrain(plain, Progress(quiet=True))
    code = (
        "import os, sys\n"
        "from cimage_dist.train.sink import LocalSink\n"
        "log = LocalSink.log\n"
        "def killed(self, kind, step, metrics):\n"
        "    log(self, kind, step, metrics)\n"
        "    if kind == 'train' and step == 10: os.kill(os.getpid(), 9)\n"
        "LocalSink.log = killed\n"
        "from cimage_dist.__main__ import main\n"
        "main(sys.argv[1:])\n"
    )
    cfg = config(url, tmp_path)
    words = [*SETTINGS, f"data.store_dir={cfg.data.store_dir}", f"run.dir={url}"]
    ended = subprocess.run(
        [sys.executable, "-c", code, "pretrain", *words], capture_output=True, text=True
    )
    assert ended.returncode == -9, ended.stderr
    assert (RunDir(working_copy(url)).metrics).is_file()
    with on_another_machine():
        summary = stages.pretrain(cfg, Progress(quiet=True))
        assert (summary["run_dir"], summary["steps_now"]) == (url, 12)
        stages.embed(cfg)
    with on_another_machine("third"):
        run = mirror.open_place(url)
        found, expected = (
            checkpoint.load_selected(r.checkpoints, "last")
            for r in (run, RunDir(tmp_path / "plain"))
        )
        assert (found.step, found.meta) == (20, expected.meta)
        torch.testing.assert_close(found.tensors, expected.tensors, rtol=0, atol=0)
        steps = [json.loads(line) for line in run.metrics.read_text().splitlines()]
        assert [r["step"] for r in steps if r["kind"] == "train"] == list(range(1, 21))
        np.testing.assert_array_equal(load_rows(run.embeddings), load_rows(stages.embed(plain)))
        again = stages.pretrain(cfg, Progress(quiet=True))
        assert again["steps_now"] == 0
