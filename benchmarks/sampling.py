"""Milliseconds of one core for sampled batches: every installed backend, the whole data path of a
step, the same by another version of the code, and the least that memory allows.

    python benchmarks/sampling.py [--nodes 200000] [--degree 15] [--fanouts 15 10] [--batch 1024]
    [--rounds 20] [--features 128] [--baseline FOLDER]

All are called in turn, so that other load on the machine hits them alike; CPU milliseconds count.
The data path is seed edges, negatives, hidden edges, two neighbourhoods, half-precision features.
--baseline names a folder with another version (`git worktree add FOLDER COMMIT`): a process of its
own makes the same batches with it and compares their bits. The bound is the bytes of the rows,
columns and features that a batch must read, and of its tensors, which it must write, over the
bandwidth of a copy measured in the same run.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hardware import headline
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


def digest(record: Any, into: Any) -> None:
    """Add every tensor of a batch to a hash."""
    if isinstance(record, torch.Tensor):
        into.update(f"{record.dtype}{tuple(record.shape)}".encode())
        into.update(record.contiguous().numpy().tobytes())
    elif dataclasses.is_dataclass(record):
        for field in dataclasses.fields(record):
            digest(getattr(record, field.name), into)


def sizes(record: Any) -> int:
    """Bytes of all tensors of a batch."""
    if isinstance(record, torch.Tensor):
        return record.numel() * record.element_size()
    if not dataclasses.is_dataclass(record):
        return 0
    return sum(sizes(getattr(record, field.name)) for field in dataclasses.fields(record))


def bytes_of(batch: Any, indptr: NDArray[np.int64], indices: NDArray[Any]) -> int:
    """The least a batch moves: two pointers of each node, the columns of each node that is not at
    the rim, its features, read; its own tensors, written.
    """
    total = sizes(batch)
    for view in (batch, batch.second):
        nodes = view.gids.numpy()
        inner = nodes[: len(nodes) - view.hops.nodes[-1]]
        columns = int((indptr[inner + 1] - indptr[inner]).sum()) * indices.itemsize
        total += 16 * len(nodes) + columns + sizes(view.x)
    return total


def copied_per_s() -> float:
    """Bytes read and written in a CPU second of a copy larger than any cache; the best of five."""
    source = np.ones(1 << 25)
    target, seconds = np.empty_like(source), []
    for _ in range(5):
        began = time.process_time()
        np.copyto(target, source)
        seconds.append(time.process_time() - began)
    return 2 * source.nbytes / min(seconds)


def make_source(args: argparse.Namespace, hide_rate: float) -> BatchSource:
    indptr, indices = random_graph(args.nodes, args.degree)
    rng = np.random.default_rng(2)
    x = rng.standard_normal((args.nodes, args.features), dtype=np.float32).astype(np.float16)
    return BatchSource(
        indptr,
        indices.astype(np.int32),
        fanouts=args.fanouts,
        batch_edges=args.batch,
        seed=0,
        hide_rate=hide_rate,
        features=x,
        views=2,
    )


def serve(args: argparse.Namespace) -> None:
    """Make the batch of each step that is asked for; say how long it took and what it holds."""
    source = make_source(args, args.hide_rate)
    for line in sys.stdin:
        cpu, wall = time.process_time(), time.perf_counter()
        batch = source[int(line)]
        took = time.perf_counter() - wall, time.process_time() - cpu
        found = hashlib.blake2b(digest_size=8)
        digest(batch, found)
        print(json.dumps({"took": took, "digest": found.hexdigest()}), flush=True)


def against(args: argparse.Namespace) -> None:
    """The data path here and by the code in args.baseline, batch by batch in turn."""
    given = [f"--{n}={getattr(args, n)}" for n in ("nodes", "degree", "batch", "features")]
    given += ["--fanouts", *map(str, args.fanouts), "--hide-rate", str(args.hide_rate), "--serve"]
    trees = {"here": str(Path(__file__).resolve().parents[1]), "baseline": args.baseline}
    runs = {
        name: subprocess.Popen(
            [sys.executable, __file__, *given],
            env=os.environ | {"PYTHONPATH": tree, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name, tree in trees.items()
    }
    took: dict[str, list[list[float]]] = {name: [] for name in runs}
    for step in range(args.rounds + 2):
        digests = set()
        for name, run in runs.items():
            assert run.stdin is not None and run.stdout is not None
            print(step, file=run.stdin, flush=True)
            answer = json.loads(run.stdout.readline())
            digests.add(answer["digest"])
            if step >= 2:
                took[name].append(answer["took"])
        assert len(digests) == 1, f"step {step}: the batches differ"
    for run in runs.values():
        run.communicate()
    medians = {name: 1e3 * np.median(rows, axis=0) for name, rows in took.items()}
    show(
        f"data path against {args.baseline}, the same bits, hide_rate {args.hide_rate}",
        {name: (float(row[0]), float(row[1])) for name, row in medians.items()},
    )


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
        ("features", 128),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--fanouts", type=int, nargs="+", default=[15, 10])
    parser.add_argument("--baseline", metavar="FOLDER")
    parser.add_argument("--hide-rate", type=float, default=0.3)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.serve:
        serve(args)
        return
    indptr, indices = random_graph(args.nodes, args.degree)
    print(headline(1))
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
        except UserError as error:
            print(f"{backend}: left out. {error}")
    first = samplers["csr"].sample(seeds[0], 0)
    print(f"first batch: {first.x.shape[0]} nodes, {len(first.edges.src)} messages")

    def sampling(one: NeighbourSampler) -> Callable[[int], object]:
        return lambda i: one.sample(seeds[i], i)

    show(
        "neighbour sampling of seed nodes",
        interleave({name: sampling(one) for name, one in samplers.items()}, args.rounds),
    )

    source = make_source(args, args.hide_rate)
    show(
        f"whole data path of a step, two views, hide_rate {args.hide_rate}",
        interleave({"csr": source.__getitem__}, args.rounds),
    )
    batch = source[0]
    moved = bytes_of(batch, indptr, source.sampler.graph.indices)
    rate = copied_per_s()
    print(
        f"bound: {moved / 1e6:.1f} MB at {rate / 1e9:.1f} GB/s (a copy, read and written): "
        f"{1e3 * moved / rate:.1f} ms"
    )
    if args.baseline:
        against(args)


if __name__ == "__main__":
    main()
