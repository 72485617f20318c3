"""A run directory on object storage: every machine works in a local copy, and what is done there is
published in commits.

    <url>/manifests/00000007.json     commit 7: {"trainer", "files": {path: {"bytes", "blake2b"}}}
    <url>/files/ckpt/LATEST-<hash>    a file's content under its path and hash, never overwritten
    <url>/LOCK                        who trains here; renewed every few seconds

    <copy>/.origin.json               the url, and the files as they were when last in step with it
    <copy>/.pull, .edit               held while the copy is brought in step / worked in

A commit uploads new content first and then creates the manifest of the next number, which the
storage grants to one writer only (a conditional write: If-None-Match on S3, a generation match on
GCS). Readers take the highest number, so they see a commit whole or not at all. Two writers of
different files both succeed, one number after the other; a trainer whose place was taken by another
is refused. The lock is for a clear message before any work; safety rests on the numbers alone.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from uuid import uuid4

from cimage_dist.config import Config, is_url, run_dir, working_copy
from cimage_dist.errors import UserError
from cimage_dist.io import artifacts, storage
from cimage_dist.io.artifacts import RunDir
from cimage_dist.io.storage import Commit, Files, Remote, key_of

_ORIGIN, _PULL, _EDIT = ".origin.json", ".pull", ".edit"
_KEPT_MANIFESTS = 100
_TRIES = 5  # of a pull whose files a newer commit removed meanwhile


def _is_shared(path: Path) -> bool:
    """What belongs to the run, not to this machine."""
    return not any(part.startswith(".") or part.endswith("-work") for part in path.parts)


class Copy:
    """The local side. `files` of its record have the modification time too: what has not changed
    since is not read again.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        record = artifacts.read_json(root / _ORIGIN, "the record of the working copy")
        self.known: Files = record["files"]
        self.remote = Remote(record["url"])

    def _save(self, files: Files) -> None:
        self.known = files
        artifacts.write_json(self.root / _ORIGIN, {"url": self.remote.url, "files": files})

    def _visible(self) -> dict[str, Path]:
        found = (path.relative_to(self.root) for path in sorted(self.root.rglob("*")))
        return {
            path.as_posix(): self.root / path
            for path in found
            if _is_shared(path) and (self.root / path).is_file()
        }

    def _facts(self, name: str) -> dict[str, Any] | None:
        """None where the file has gone meanwhile."""
        with contextlib.suppress(FileNotFoundError):
            stat = (self.root / name).stat()
            known = self.known.get(name)
            if known and (known["bytes"], known["mtime"]) == (stat.st_size, stat.st_mtime_ns):
                return known
            digest = artifacts.checksum(self.root / name)
            return {"bytes": stat.st_size, "blake2b": digest, "mtime": stat.st_mtime_ns}
        return None

    def pull(self) -> None:
        """Make the copy equal to the newest commit. Call only where nobody works in it."""
        for attempt in range(_TRIES):
            newest = self.remote.newest()
            try:
                fetched = {name: self._fetch(name, facts) for name, facts in newest.files.items()}
                break
            except FileNotFoundError:
                if attempt == _TRIES - 1:
                    raise UserError(
                        f"A file of {self.remote.url} is missing though its manifest lists it. "
                        "Delete the newest manifest there to go back by one commit."
                    ) from None
        for name, path in self._visible().items():
            if name not in fetched:
                path.unlink()
        for folder in sorted(self.root.rglob("*"), reverse=True):
            if folder.is_dir() and _is_shared(folder.relative_to(self.root)):
                with contextlib.suppress(OSError):  # not empty
                    folder.rmdir()
        self._save(fetched)

    def _fetch(self, name: str, facts: dict[str, Any]) -> dict[str, Any]:
        path = self.root / name
        if not path.resolve().is_relative_to(self.root.resolve()):
            raise UserError(f"{self.remote.url} is damaged: a manifest names the file {name!r}.")
        here = self._facts(name)
        if here is None or _content(here) != _content(facts):
            path.parent.mkdir(parents=True, exist_ok=True)
            with artifacts.renamed(path) as tmp:
                self.remote.download(key_of(name, facts), tmp)
                if artifacts.checksum(tmp) != facts["blake2b"]:
                    raise UserError(
                        f"{self.remote.url}/{key_of(name, facts)} is damaged: its content does not "
                        "have the checksum its manifest states."
                    )
        return _content(facts) | {"mtime": path.stat().st_mtime_ns}

    def publish(self, trainer: str = "", is_claim: bool = False) -> None:
        """Commit what changed here since the copy was last in step."""
        here = {name: self._upload(name) for name in self._visible()}
        files = {name: facts for name, facts in here.items() if facts is not None}
        old = {name: _content(facts) for name, facts in self.known.items()}
        new = {name: _content(facts) for name, facts in files.items()}
        changed = {name: facts for name, facts in new.items() if old.get(name) != facts}
        removed = old.keys() - new.keys()
        while changed or removed or is_claim:
            newest = self.remote.newest()
            if trainer and not is_claim and newest.trainer != trainer:
                raise UserError(
                    f"Another process has taken over training in {self.remote.url}. Let it go on, "
                    "or give this run another run.dir or run.seed."
                )
            kept = {name: facts for name, facts in newest.files.items() if name not in removed}
            made = Commit(newest.number + 1, trainer or newest.trainer, kept | changed)
            if self.remote.commit(made):
                self._clean(newest, made)
                break
        self._save(files)

    def _upload(self, name: str) -> dict[str, Any] | None:
        """Content first, and again where it was being written meanwhile."""
        while facts := self._facts(name):
            known = self.known.get(name)
            if known is None or _content(known) != _content(facts):
                try:
                    self.remote.upload(self.root / name, key_of(name, facts))
                except FileNotFoundError:
                    return None
                stat = (self.root / name).stat() if (self.root / name).is_file() else None
                if stat and (stat.st_size, stat.st_mtime_ns) != (facts["bytes"], facts["mtime"]):
                    continue
            return facts
        return None

    def _clean(self, before: Commit, now: Commit) -> None:
        """Remove contents that only the commit before names. Not after others have committed: a
        process that slept for long must not remove what they use again.
        """
        numbers = self.remote.numbers()
        if numbers and numbers[-1] == now.number:
            used = {key_of(name, facts) for name, facts in now.files.items()}
            for name, facts in before.files.items():
                if key_of(name, facts) not in used:
                    self.remote.remove(key_of(name, facts))
            for number in numbers[:-_KEPT_MANIFESTS]:
                self.remote.remove(f"manifests/{number:08d}.json")


def _content(facts: dict[str, Any]) -> dict[str, Any]:
    return {"bytes": facts["bytes"], "blake2b": facts["blake2b"]}


def is_copy(root: Path) -> bool:
    """Whether a run directory is the working copy of one on object storage."""
    return (root / _ORIGIN).is_file()


def shown(root: Path) -> str:
    """What a user calls this run directory."""
    return Copy(root).remote.url if is_copy(root) else str(root)


def open_place(place: str | Path) -> RunDir:
    """A run directory by its path, or by its URL: its working copy, in step with the storage."""
    if not is_url(str(place)):
        return RunDir(place)
    root = working_copy(str(place))
    root.mkdir(parents=True, exist_ok=True)
    with artifacts.locked(root / _PULL):
        if not is_copy(root):
            artifacts.write_json(root / _ORIGIN, {"url": str(place).rstrip("/"), "files": {}})
        _in_step(root)
    return RunDir(root)


def open_run(cfg: Config) -> RunDir:
    return open_place(cfg.run.dir if cfg.run.dir and is_url(cfg.run.dir) else run_dir(cfg))


def _in_step(root: Path) -> None:
    """Pull, unless somebody works in the copy: then it is ahead of the storage."""
    with (root / _EDIT).open("a") as file, contextlib.suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        Copy(root).pull()


def refresh(root: Path) -> None:
    """Bring a working copy in step with its storage; nothing for other run directories."""
    if is_copy(root):
        with artifacts.locked(root / _PULL):
            _in_step(root)


@contextlib.contextmanager
def working(root: Path) -> Iterator[None]:
    """In step at the beginning; while files are made inside, no process pulls."""
    if not is_copy(root):
        yield
        return
    with (root / _EDIT).open("a") as file:
        with artifacts.locked(root / _PULL):
            _in_step(root)
            fcntl.flock(file, fcntl.LOCK_SH)  # a pull needs the other lock too
        yield


def publish(root: Path, trainer: str = "") -> None:
    """Commit what was made in a working copy; nothing for other run directories."""
    if is_copy(root):
        with artifacts.locked(root / _PULL):
            Copy(root).publish(trainer)


@contextlib.contextmanager
def edited(root: Path) -> Iterator[None]:
    """Files made inside are committed at the end."""
    with working(root):
        yield
        publish(root)


def claim(root: Path) -> str:
    """A trainer's name, by which it commits until another one claims the run."""
    name = uuid4().hex if is_copy(root) else ""
    if name:
        with artifacts.locked(root / _PULL):
            Copy(root).publish(name, is_claim=True)
    return name


def leased(root: Path) -> AbstractContextManager[None]:
    """One command trains in a run on object storage. Other run directories have the system's
    lock.
    """
    return storage.leased(Copy(root).remote) if is_copy(root) else contextlib.nullcontext()


def write_mark(root: Path, name: str, text: str) -> None:
    """A small note for processes of the run on any machine, no part of it."""
    if is_copy(root):
        Copy(root).remote.write(name, text.encode())
    else:
        artifacts.write_text(root / name, text)


def read_mark(root: Path, name: str) -> str | None:
    with contextlib.suppress(OSError, UserError):
        if is_copy(root):
            return Copy(root).remote.read(name).decode()
        return (root / name).read_text()
    return None


def remove_mark(root: Path, name: str) -> None:
    if is_copy(root):
        Copy(root).remote.remove(name)
    else:
        (root / name).unlink(missing_ok=True)
