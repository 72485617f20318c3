"""Time per sampled batch of every installed backend, called in turn so that other load on the
machine hits all of them alike.

    python benchmarks/sampling.py [--nodes 200000] [--degree 15] [--fanouts 15 10] [--batch 1024]
    [--rounds 20] [--threads 1]

Prints hardware, versions, median wall and CPU milliseconds, and ratios to `csr`. The second table
is the whole data path of one step: seed edges, negatives, hidden edges, subgraph.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from cimage_dist.errors import UserError
from cimage_dist.sampling.loader import BatchSource
from cimage_dist.sampling.sampler import NeighbourSampler


def random_graph(
    num_nodes: int, degree: int, seed: int = 0
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """A uniform random symmetric graph of about `degree` neighbours per node."""
    rng = np.random.default_rng(seed)
    u, v = rng.integers(0, num_nodes, (2, num_nodes * degree // 2))
    keys = np.concatenate([u * num_nodes + v, v * num_nodes + u])
    keys.sort()
    keys = keys[
        np.concatenate([[True], keys[1:] != keys[:-1]]) & (keys // num_nodes != keys % num_nodes)
    ]
    indptr = np.zeros(num_nodes + 1, dtype=np.int64)
    np.cumsum(np.bincount(keys // num_nodes, minlength=num_nodes), out=indptr[1:])
    return indptr, keys % num_nodes


def describe(threads: int) -> str:
    names = ("numpy", "torch", "torch-geometric", "numba", "pyg-lib", "torch-sparse")
    versions = []
    for name in names:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{name} absent")
    model = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):  # noqa: PTH110
        with open("/proc/cpuinfo") as file:  # noqa: PTH123
            model = next(
                (line.split(":", 1)[1].strip() for line in file if line.startswith("model name")),
                model,
            )
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    machine = (
        f"{datetime.date.today()}  {model}, {os.cpu_count()} cores, {threads} thread(s), "
        f"load {load:.1f}"
    )
    return f"{machine}\nPython {platform.python_version()}, {', '.join(versions)}"


def interleave(
    calls: dict[str, Callable[[int], object]], rounds: int
) -> dict[str, tuple[float, float]]:
    """Median (wall, CPU) milliseconds of each call over `rounds`, after two unmeasured ones."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for i in range(rounds + 2):
        for name, call in calls.items():
            wall, cpu = time.perf_counter(), time.process_time()
            call(i)
            if i >= 2:
                times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {
        name: (1e3 * float(np.median([w for w, _ in t])), 1e3 * float(np.median([c for _, c in t])))
        for name, t in times.items()
    }


def show(title: str, results: dict[str, tuple[float, float]]) -> None:
    base = results[next(iter(results))][1]
    print(f"\n{title}\n{'':32}{'wall ms':>10}{'CPU ms':>10}{'CPU ratio':>11}")
    for name, (wall, cpu) in results.items():
        print(f"{name:32}{wall:10.1f}{cpu:10.1f}{cpu / base:11.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (
        ("nodes", 200_000),
        ("degree", 15),
        ("batch", 1024),
        ("rounds", 20),
        ("threads", 1),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--fanouts", type=int, nargs="+", default=[15, 10])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    indptr, indices = random_graph(args.nodes, args.degree)
    print(describe(args.threads))
    print(
        f"{args.nodes} nodes, {len(indices)} directed edges, fan-out {args.fanouts}, batch "
        f"{args.batch}, median of {args.rounds}"
    )

    rng = np.random.default_rng(1)
    seeds = rng.integers(0, args.nodes, (args.rounds + 2, args.batch))
    samplers: dict[str, NeighbourSampler] = {}
    for backend in ("csr", "pyg-lib", "torch-sparse"):
        try:
            samplers[backend] = NeighbourSampler(indptr, indices, args.fanouts, backend=backend)
        except UserError:
            print(f"{backend}: not installed, left out")
    first = samplers["csr"].sample(seeds[0], 0)
    print(f"first batch: {first.x.shape[0]} nodes, {len(first.edges.src)} messages")

    def sampling(one: NeighbourSampler) -> Callable[[int], object]:
        return lambda i: one.sample(seeds[i], i)

    show(
        "neighbour sampling of seed nodes",
        interleave({name: sampling(one) for name, one in samplers.items()}, args.rounds),
    )

    sources = {
        f"batch of edges, hide_rate {rate}": BatchSource(
            indptr, indices, fanouts=args.fanouts, batch_edges=args.batch, seed=0, hide_rate=rate
        )
        for rate in (0.0, 0.3)
    }
    show(
        "whole data path of a step (4 seed nodes per edge)",
        interleave({name: source.__getitem__ for name, source in sources.items()}, args.rounds),
    )


if __name__ == "__main__":
    main()
