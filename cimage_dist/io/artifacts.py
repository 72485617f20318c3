"""Files on disk: write to a temporary name, then commit by rename; manifests with checksums; the
run directory's paths.

Nothing here ever leaves a half-written file under its final name. A killed writer leaves only names
starting with
`.tmp-`, which readers ignore; a later writer that knows itself to be alone removes them
(`remove_leftovers`).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from cimage_dist.errors import UserError

TMP_PREFIX = ".tmp-"
MANIFEST = "manifest.json"
_CHUNK = 1 << 22
_LOCK_POLL_S = 0.2


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_bytes(path: Path, content: bytes) -> None:
    """Atomic: readers see the old content or the new, never a mixture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.parent / f"{TMP_PREFIX}{path.name}-{uuid4().hex[:8]}"
    try:
        with tmp.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        tmp.replace(path)
    finally:
        tmp.unlink(missing_ok=True)
    _fsync(path.parent)


def write_text(path: Path, content: str) -> None:
    write_bytes(path, content.encode())


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, sort_keys=False, allow_nan=False) + "\n")


def read_json(path: Path, what: str) -> Any:
    """Parse a json file, with a readable error that names the file and what it was meant to be."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{what} not found: {path} does not exist.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(
            f"{what} is damaged: {path} is not valid JSON ({error}). Remove it and make it again."
        ) from None


@contextmanager
def renamed(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path` for a file to be written in pieces; on success it is
    renamed into place, on failure removed.
    """
    tmp = path.parent / f"{TMP_PREFIX}{uuid4().hex[:8]}-{path.name}"
    try:
        yield tmp
        _fsync(tmp)
        tmp.replace(path)
    finally:
        tmp.unlink(missing_ok=True)


@contextmanager
def committed_dir(final: Path) -> Iterator[Path]:
    """Yield a temporary directory beside `final`; on success rename it into place, on failure
    remove it.

    An existing `final` is replaced only after the new one is complete.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    tmp = final.parent / f"{TMP_PREFIX}{final.name}-{uuid4().hex[:8]}"
    tmp.mkdir()
    try:
        yield tmp
        for path in sorted(tmp.rglob("*")):
            _fsync(path)
        replace_dir(tmp, final)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def replace_dir(ready: Path, final: Path) -> None:
    """Rename a complete directory into place; an existing one goes afterwards. Both on one file
    system.
    """
    _fsync(ready)
    if final.exists():
        old = final.parent / f"{TMP_PREFIX}old-{final.name}-{uuid4().hex[:8]}"
        final.rename(old)
        ready.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    else:
        ready.rename(final)
    _fsync(final.parent)


@contextmanager
def locked(
    path: Path,
    on_wait: Callable[[], None] = lambda: None,
    patience_s: float = math.inf,
    busy: str = "",
) -> Iterator[None]:
    """Held by one process at a time; the system releases it when the process dies.

    Waits for another holder for `patience_s` seconds, then fails with the message `busy`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + patience_s
    is_waiting = False
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() >= deadline:
                    raise UserError(busy) from None
            if not is_waiting:
                on_wait()
                is_waiting = True
            time.sleep(min(_LOCK_POLL_S, max(0.0, deadline - time.monotonic())))
        yield


def read_metrics(path: Path, skip_damaged: bool = False) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl. A last line still being written, or cut short by a kill, is
    left out; any other that is no JSON is an error, or left out too.
    """
    if not path.is_file():
        return []
    text = path.read_text()
    records = []
    for line in text[: text.rfind("\n") + 1].splitlines():
        try:
            records.append(json.loads(line))
        except ValueError as error:
            if not skip_damaged:
                raise UserError(
                    f"{path} is damaged: a line is not valid JSON ({error}). Remove that line; "
                    "resuming the run cleans the file too."
                ) from None
    return records


def remove_dir(path: Path) -> None:
    """Remove a directory so that a kill halfway leaves no partial one under its name."""
    doomed = path.parent / f"{TMP_PREFIX}{path.name}-{uuid4().hex[:8]}"
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def remove_leftovers(parent: Path, name: str) -> None:
    """Remove what killed writers of `parent/name` left behind. Call only while holding the writer's
    lock.
    """
    if parent.is_dir():
        for path in parent.iterdir():
            if path.name.startswith((f"{TMP_PREFIX}{name}-", f"{TMP_PREFIX}old-{name}-")):
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(
                    missing_ok=True
                )


def checksum(path: Path) -> str:
    """BLAKE2b (128 bit) of a file's content."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def describe_files(directory: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The manifest's `files` entry: size and checksum of each file."""
    return {
        name: {"bytes": (directory / name).stat().st_size, "blake2b": checksum(directory / name)}
        for name in names
    }


def damaged_file(
    directory: Path, files: dict[str, dict[str, Any]], verify_content: bool = True
) -> str | None:
    """Why the directory cannot be trusted (naming the first bad file), or None when all is well."""
    for name, facts in files.items():
        path = directory / name
        if not path.is_file():
            return f"{path} is missing"
        size = path.stat().st_size
        if size != facts["bytes"]:
            return (
                f"{path} has {size:,} bytes, its manifest says {facts['bytes']:,} "
                "(truncated or overwritten)"
            )
        if verify_content and checksum(path) != facts["blake2b"]:
            return (
                f"{path} has the right size but its checksum differs from the manifest (corrupted)"
            )
    return None


def write_safetensors(path: Path, tensors: dict[str, Any]) -> None:
    """A failure is an OSError like that of any other file: the writer, which is not Python, reports
    the system's number in its text only.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path)
    except SafetensorError as error:
        code = re.search(r"os error (\d+)", str(error))
        raise (
            OSError(int(code[1]), os.strerror(int(code[1])), str(path))
            if code
            else OSError(f"cannot write {path}: {error}")
        ) from error


def write_tensors(folder: Path, tensors: dict[str, Any]) -> None:
    """A folder with one safetensors file and its manifest, committed as a whole."""
    with committed_dir(folder) as tmp:
        write_safetensors(tmp / "tensors.safetensors", tensors)
        write_json(tmp / MANIFEST, {"files": describe_files(tmp, ["tensors.safetensors"])})


def read_tensors(folder: Path) -> dict[str, Any] | None:
    """What `write_tensors` wrote; None where it is absent or damaged."""
    from safetensors.torch import load_file

    if not (folder / MANIFEST).is_file() or damaged_file(
        folder, read_json(folder / MANIFEST, "the manifest")["files"]
    ):
        return None
    return load_file(folder / "tensors.safetensors")


class RunDir:
    """Paths of one run. Only this class knows them."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def environment(self) -> Path:
        return self.root / "env.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tb"

    @property
    def checkpoints(self) -> Path:
        return self.root / "ckpt"

    @property
    def graph(self) -> Path:
        """A store of the graph, where `Pretrainer.save` was given one that was in memory."""
        return self.root / "graph"

    @property
    def splits(self) -> Path:
        return self.root / "splits"

    @property
    def embeddings(self) -> Path:
        return self.root / "embeddings"

    @property
    def node_embeddings(self) -> Path:
        """Of chosen nodes: one folder for every list of them."""
        return self.root / "node-embeddings"

    @property
    def evaluation(self) -> Path:
        return self.root / "eval.json"

    @property
    def report(self) -> Path:
        return self.root / "report.md"

    @property
    def page(self) -> Path:
        return self.root / "report.html"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    def __repr__(self) -> str:
        return f"RunDir({str(self.root)!r})"


def value_at(result: dict[str, Any], path: str) -> float | None:
    """`node.test` of a result, None where it is absent."""
    found: Any = result
    for part in path.split("."):
        found = (found or {}).get(part)
    return found
