"""What this machine and installation offer: recorded with every run, shown by `cimage doctor`."""

from __future__ import annotations

import ctypes
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import platform
import sys
import threading
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

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
