"""A node's copy of a store: exact, made once, gone on with after a kill, fixed after damage."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from cimage_dist.config import Config, DataConfig, fingerprint
from cimage_dist.data import memory
from cimage_dist.data.ingest import ingest, open_graph
from cimage_dist.data.memory import stage
from cimage_dist.data.store import Graph
from cimage_dist.errors import UserError


@pytest.fixture
def store(tiny_sbm: DataConfig) -> Path:
    return ingest(tiny_sbm)[0]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_copy_equals_the_store_and_is_made_once(store, cache):
    notes = list[str]()
    copy = stage(str(store), cache, notes.append)
    assert copy == cache / Graph.open(store).fingerprint and content(copy) == content(store)
    assert "copying graph store" in notes[0] and len(notes) == 1
    made = (copy / "x.npy").stat().st_mtime_ns
    assert stage(store.as_uri(), cache, notes.append) == copy  # another name of the same store
    assert len(notes) == 1 and (copy / "x.npy").stat().st_mtime_ns == made
    assert {path.name for path in cache.iterdir()} == {copy.name, f".lock-{copy.name}"}


@pytest.fixture
def in_memory(store: Path) -> str:
    """The store as an object storage would hold it."""
    storage, url = fsspec.filesystem("memory"), "memory://bucket/stores/tiny"
    for path in store.iterdir():
        storage.pipe_file(f"/bucket/stores/tiny/{path.name}", path.read_bytes())
    return url


def test_from_a_url(store, cache, in_memory):
    assert content(stage(in_memory, cache)) == content(store)


def copy_and_die(source: str, cache: Path, block: int, after: int) -> None:
    """Copy in blocks, and be killed at one of them."""
    memory._BLOCK = block
    real, seen = memory._blocks, 0

    def blocks(*args: Any) -> Any:
        nonlocal seen
        for data in real(*args):
            seen += 1
            if seen > after:
                os.kill(os.getpid(), signal.SIGKILL)
            yield data

    memory._blocks = blocks
    stage(source, cache)


def run_and_wait(*args: Any) -> int | None:
    child = multiprocessing.get_context("fork").Process(target=copy_and_die, args=args)
    child.start()
    child.join()
    return child.exitcode


def test_a_copy_that_was_killed_goes_on(store, cache, monkeypatch):
    """Only what is missing is read again, from the middle of a file on."""
    assert run_and_wait(str(store), cache, 9000, 4) == -signal.SIGKILL
    (partial,) = cache.glob(".tmp-*")
    there = {path.name: path.stat().st_size for path in partial.iterdir()}
    assert sum(there.values()) >= 9000 and not (partial / "manifest.json").exists()
    read = dict[str, int]()
    real = memory._blocks

    def counting(storage: Any, place: str, begin: int, shown: str) -> Any:
        for block in real(storage, place, begin, shown):
            read[Path(place).name] = read.get(Path(place).name, 0) + len(block)
            yield block

    monkeypatch.setattr(memory, "_blocks", counting)
    notes = list[str]()
    copy = stage(str(store), cache, notes.append)
    assert content(copy) == content(store) and not partial.exists() and "are there" in notes[0]
    files = json.loads((store / "manifest.json").read_text())["files"]
    assert {name: there.get(name, 0) + read.get(name, 0) for name in files} == {
        name: facts["bytes"] for name, facts in files.items()
    }
    assert any(0 < there.get(name, 0) < facts["bytes"] for name, facts in files.items()), (
        "a file was cut in the middle"
    )


def test_a_beginning_of_something_else_is_not_built_upon(store, cache):
    assert run_and_wait(str(store), cache, 9000, 4) == -signal.SIGKILL
    (partial,) = cache.glob(".tmp-*")
    for name in ("x.npy", "indices.npy"):
        (partial / name).write_bytes(b"\0" * 5000)
    (partial / "indptr.npy").write_bytes(b"\0" * 10_000_000)
    assert content(stage(str(store), cache)) == content(store)


def test_two_processes_copy_once(store, cache):
    lock = cache / f".lock-{Graph.open(store).fingerprint}"
    with multiprocessing.get_context("fork").Pool(2) as pool:
        with memory.artifacts.locked(lock):  # both meet at it
            results = [pool.apply_async(stage_and_tell, (str(store), cache)) for _ in range(2)]
        notes = [result.get(60) for result in results]
    assert sum("copying graph store" in text for found in notes for text in found) == 1
    (copy,) = (path for path in cache.iterdir() if path.is_dir())
    assert content(copy) == content(store)


def stage_and_tell(source: str, cache: Path) -> list[str]:
    notes = list[str]()
    stage(source, cache, notes.append)
    return notes


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest"])
def test_a_damaged_copy_is_mended(damage, store, cache):
    copy = stage(str(store), cache)
    target = copy / ("manifest.json" if damage == "manifest" else "x.npy")
    kept = (copy / "indices.npy").stat().st_ino
    if damage == "remove":
        target.unlink()
    else:
        raw = bytearray(target.read_bytes())
        raw[len(raw) // 2] ^= 0xFF
        target.write_bytes(raw[:200] if damage == "truncate" else raw)
    notes = list[str]()
    assert stage(str(store), cache, notes.append) == copy
    assert content(copy) == content(store) and target.name in notes[0]
    assert (copy / "indices.npy").stat().st_ino == kept, "files that are right stay"


def test_another_build_with_other_moments_replaces_the_copy(store, cache):
    """The fingerprint leaves moments out, but all nodes must compute with the same."""
    copy = stage(str(store), cache)
    mean = np.load(store / "feature_mean.npy")
    np.save(store / "feature_mean.npy", np.nextafter(mean, 9))
    manifest = json.loads((store / "manifest.json").read_text())
    manifest["files"] |= memory.artifacts.describe_files(store, ["feature_mean.npy"])
    (store / "manifest.json").write_text(json.dumps(manifest))
    assert stage(str(store), cache) == copy and content(copy) == content(store)


def test_a_damaged_source_is_told(store, cache):
    raw = bytearray((store / "x.npy").read_bytes())
    raw[-1] ^= 1
    (store / "x.npy").write_bytes(raw)
    with pytest.raises(
        UserError, match=r"x\.npy is damaged: its content does not have the checksum"
    ):
        stage(str(store), cache)
    (store / "x.npy").unlink()
    with pytest.raises(UserError, match=r"x\.npy is missing"):
        stage(str(store), cache)
    assert not [path for path in cache.iterdir() if not path.name.startswith(".")]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("nowhere", "No graph store at nowhere"),
        ("memory://bucket/nothing", "No graph store at memory://bucket/nothing"),
        ("strange://bucket/x", "cannot be read: Protocol not known"),
    ],
)
def test_no_store_there(source, reason, cache):
    with pytest.raises(UserError, match=reason):
        stage(source, cache)
    assert not cache.exists()


def test_a_manifest_cannot_name_files_outside(store, cache):
    manifest = json.loads((store / "manifest.json").read_text())
    manifest["files"]["../../escaped.npy"] = manifest["files"]["x.npy"]
    (store / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="names the file"):
        stage(str(store), cache)


def test_a_full_disk_is_told_and_what_is_copied_stays(store, cache, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(memory.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10})())
        with pytest.raises(UserError, match=r"GB more below .* data\.stage_dir"):
            stage(str(store), cache)
    real = memory._blocks

    def full(storage: Any, place: str, begin: int, shown: str) -> Any:
        if place.endswith("x.npy"):
            raise OSError(28, "No space left on device", place)
        return real(storage, place, begin, shown)

    with monkeypatch.context() as patch:
        patch.setattr(memory, "_blocks", full)
        with pytest.raises(UserError, match=r"No space left on device .* what is copied is kept"):
            stage(str(store), cache)
    (partial,) = cache.glob(".tmp-*")
    assert (partial / "indices.npy").is_file()
    assert content(stage(str(store), cache)) == content(store)


def test_graphs_open_from_the_copy(tiny_sbm, tmp_path, in_memory):
    """data.stage_dir alone makes the difference, and none to the experiment; a URL needs it."""
    plain = open_graph(tiny_sbm)
    tiny_sbm.stage_dir = str(tmp_path / "cache")
    staged = open_graph(tiny_sbm)
    assert (
        staged.path == tmp_path / "cache" / plain.fingerprint
        and staged.fingerprint == plain.fingerprint
    )
    assert np.array_equal(staged.x, plain.x)
    assert fingerprint(Config(data=tiny_sbm)) == fingerprint(
        Config(data=DataConfig(name="sbm", normalize="source", sbm=tiny_sbm.sbm))
    )
    shutil.rmtree(tmp_path / "cache")
    remote = DataConfig(name="mine", path=in_memory, stage_dir=str(tmp_path / "cache"))
    assert open_graph(remote).path == staged.path
    with pytest.raises(UserError, match=r"Set data\.stage_dir"):
        open_graph(DataConfig(name="mine", path=in_memory))
    with pytest.raises(UserError, match="ingest from a local folder"):
        ingest(remote)
    with pytest.raises(UserError, match=r"data\.store_dir must be a folder"):
        DataConfig(store_dir="s3://bucket/stores")
