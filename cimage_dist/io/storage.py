"""What a run finds around it: files and folders on a disk or on object storage, opened through
fsspec where a place is named with its kind of storage; and the machine, its memory, packages and
threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import multiprocessing
import multiprocessing.connection
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

from cimage_dist.config import is_url
from cimage_dist.errors import UserError

_LOCK = "LOCK"
_RENEW_S, _SILENT_S = 5.0, 20.0  # a lock not renewed for so long has lost its owner

Files = dict[str, dict[str, Any]]
T = TypeVar("T")
PACKAGES = (
    "cimage-dist",
    "torch",
    "torch-geometric",
    "ray",
    "numpy",
    "scikit-learn",
    "omegaconf",
    "safetensors",
    "pyarrow",
)
# name -> (module, what it is for, how to get it)
OPTIONAL = {
    "pyg-lib": (
        "pyg_lib",
        "fast neighbour sampling on CPU and CUDA",
        "install the pyg-lib wheel that matches your torch",
    ),
    "torch-sparse": (
        "torch_sparse",
        "alternative neighbour sampling",
        "pip install 'cimage-dist[sparse]' (compiles for minutes)",
    ),
    "ogb": (
        "ogb",
        "download of ogbn-* datasets and their evaluators",
        "pip install 'cimage-dist[ogb]'",
    ),
    "optuna": ("optuna", "Bayesian search in sweeps", "pip install 'cimage-dist[tune]'"),
    "numba": ("numba", "compiled sampling and routing loops on a CPU", "pip install numba"),
    "triton": (
        "triton",
        "fused routing on a GPU",
        "comes with CUDA builds of torch; pip install 'cimage-dist[gpu]'",
    ),
}


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from malloc.h


def open_storage(source: str) -> tuple[Any, str]:
    """(file system, folder on it)."""
    if not is_url(source):
        source = str(Path(source).resolve())
    import fsspec

    try:
        return fsspec.core.url_to_fs(source)
    except ImportError as missing:
        # e.g. s3:// without s3fs: pyarrow can read the usual object stores by itself
        from fsspec.implementations.arrow import ArrowFSWrapper
        from pyarrow.fs import FileSystem

        try:
            found, folder = FileSystem.from_uri(source)
        except (ValueError, OSError) as error:
            raise UserError(
                f"Nothing here can read {source}: {missing}; pyarrow: {error}. Install the "
                "package for that storage on every node."
            ) from None
        return ArrowFSWrapper(found), folder
    except (ValueError, OSError) as error:
        raise UserError(
            f"{source} cannot be read: {error}. Give a folder, or a URL such as s3://bucket/folder."
        ) from None


class Commit(NamedTuple):
    number: int
    trainer: str
    files: Files


def key_of(path: str, facts: dict[str, Any]) -> str:
    """Where a file's content is: immutable, and still with a name that tools know."""
    name = PurePosixPath(path)
    held = name.with_name(f"{name.stem}-{facts['blake2b'][:16]}{name.suffix}")
    return f"files/{held}"


class Remote:
    """The storage's side of a run: commits, contents, small marks. Storage has exceptions of its
    own kinds for a missing bucket, credentials or network: all become a UserError.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.storage, self.folder = open_storage(self.url)
        if "file" in self.storage.protocol:  # alone among them in needing folders
            self.storage = type(self.storage)(auto_mkdir=True)

    def _try(self, what: str, act: Callable[[], T], *expected: type[Exception]) -> T:
        try:
            return act()
        except expected:
            raise
        except Exception as error:
            raise UserError(
                f"{what} {self.url} failed ({type(error).__name__}: {error}). Check the address "
                "and this machine's access to it; what was committed is whole, and the same "
                "command continues from there."
            ) from error

    def _at(self, name: str) -> str:
        return f"{self.folder}/{name}"

    def numbers(self) -> list[int]:
        """Of the commits, ascending."""

        def find() -> list[str]:
            self.storage.invalidate_cache()
            return list(self.storage.ls(self._at("manifests"), detail=False))

        try:
            names = self._try("Listing", find, FileNotFoundError)
        except FileNotFoundError:
            return []
        found = (PurePosixPath(name).stem for name in names if name.endswith(".json"))
        return sorted(int(name) for name in found if name.isdigit())

    def newest(self) -> Commit:
        """The last one that can be read: a plain file system may hold one cut short."""
        numbers = self.numbers()
        for number in reversed(numbers):
            with contextlib.suppress(ValueError, KeyError, FileNotFoundError):
                body = json.loads(self.read(f"manifests/{number:08d}.json"))
                return Commit(numbers[-1], body["trainer"], body["files"])
        return Commit(numbers[-1] if numbers else 0, "", {})

    def commit(self, found: Commit) -> bool:
        """Whether the number was free."""
        body = json.dumps({"trainer": found.trainer, "files": found.files}).encode()
        return self.create(f"manifests/{found.number:08d}.json", body)

    def create(self, name: str, content: bytes) -> bool:
        """Whether the name was free. Where a storage has no conditional write (fsspec then looks
        before it writes), two writers at the same moment can both succeed.
        """
        try:
            self._try(
                "Writing to",
                lambda: self.storage.pipe_file(self._at(name), content, mode="create"),
                FileExistsError,
            )
        except FileExistsError:
            return False
        return True

    def write(self, name: str, content: bytes) -> None:
        self._try("Writing to", lambda: self.storage.pipe_file(self._at(name), content))

    def read(self, name: str) -> bytes:
        content: bytes = self._try(
            "Reading", lambda: self.storage.cat_file(self._at(name)), FileNotFoundError
        )
        return content

    def upload(self, source: Path, name: str) -> None:
        """A FileNotFoundError is of the source, which has gone."""
        try:
            self._try("Writing to", lambda: self.storage.put_file(str(source), self._at(name)))
        except UserError:
            if source.is_file():
                raise
            raise FileNotFoundError(source) from None

    def download(self, name: str, target: Path) -> None:
        self._try(
            "Reading", lambda: self.storage.get_file(self._at(name), str(target)), FileNotFoundError
        )

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._try("Writing to", lambda: self.storage.rm_file(self._at(name)), FileNotFoundError)


@contextlib.contextmanager
def leased(remote: Remote) -> Iterator[None]:
    """Held by one process at a time, on whichever machine, as long as it renews its sign of
    life.
    """
    owner = f"{socket.gethostname()} {os.getpid()} {uuid4().hex}"
    while not remote.create(_LOCK, f"{owner} 0".encode()):
        if _is_left(remote):
            remote.remove(_LOCK)
    is_over = threading.Event()

    def renew() -> None:
        beats = 0
        while not is_over.wait(_RENEW_S):
            beats += 1
            with contextlib.suppress(UserError):  # the next commit reports it
                remote.write(_LOCK, f"{owner} {beats}".encode())

    thread = threading.Thread(target=renew, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        remote.remove(_LOCK)


def _is_left(remote: Remote) -> bool:
    """Whether the lock's owner is gone: its process has ended, or it is silent. Otherwise a
    UserError. Only this machine's clock is used.
    """
    deadline = time.monotonic() + _SILENT_S
    first = b""
    while True:
        try:
            content = remote.read(_LOCK)
        except FileNotFoundError:
            return False
        first = first or content
        host, pid, *_ = content.decode().split()
        if host == socket.gethostname() and not Path(f"/proc/{pid}").exists():
            return True
        if content != first:
            raise UserError(
                f"Another process is training in {remote.url} (process {pid} on {host}). Wait for "
                "it, or give this run another run.dir or run.seed."
            )
        if time.monotonic() > deadline:
            return True
        time.sleep(0.5)


def return_freed_memory() -> None:
    """Hand freed blocks back to the system: after a stage that needed more than the next ones will.

    Does nothing where the C library is not glibc.
    """
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)


def keep_freed_memory() -> None:
    """Let the C library keep freed blocks for the next step instead of handing them back to the
    system; what was freed before goes back.

    By default glibc maps every block above 32 MB (and many smaller ones) again, and each page of it
    costs a fault at first touch: on the CPU that is a good part of a training step. Does nothing
    where the C library is another one.
    """
    return_freed_memory()
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "mallopt"):
        library.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        library.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)  # the argument is a C int


def forget_peak_memory() -> None:
    """Start the process's peak of resident memory again, where the system can (Linux)."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """Most resident memory of this process so far, or since it was last forgotten, in bytes."""
    with suppress(OSError):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def end_with_parent() -> None:
    """Called in a process of `multiprocessing`: it must not outlive the command, however that
    ends.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def describe() -> dict[str, Any]:
    """Versions and hardware, for env.json."""
    import torch

    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": {name: package_version(name) for name in PACKAGES},
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "cuda": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if torch.cuda.is_available()
        else [],
    }


def optional_packages() -> list[dict[str, Any]]:
    """Each optional package: whether it is there, what it would add, how to get it."""
    return [
        {
            "name": name,
            "present": importlib.util.find_spec(module) is not None,
            "version": package_version(name),
            "adds": adds,
            "install": how,
        }
        for name, (module, adds, how) in OPTIONAL.items()
    ]


def peak_gb() -> float:
    """The most memory this process has held, in GB."""
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
