"""Weak and strong scaling of sampled training from one to two single-thread workers under Ray, and
what Ray itself costs.

    python benchmarks/scaling.py [--json FILE]

The runs are the real command, `cimage pretrain`, on a generated graph with the whole objective.
"Apart" is two local commands at once that know nothing of each other: what the two cores give at
best, since virtual cores may share a real one. A machine's speed changes from minute to minute, so
the cases take turns of a few seconds: all commands are started once, then all are suspended but the
one whose turn it is (a Ray run with all its processes). A ratio is taken within a round of turns;
the median over the rounds is reported, with the middle half beside it. The machine should be
otherwise idle.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hardware import facts, headline

GRAPH = ["data.name=sbm", "data.sbm.avg_degree=20"]
MODEL = [
    "model.num_factors=8",
    "model.factor_dim=16",
    "model.num_layers=2",
    "loss.factor_weight=0.5",
    "loss.cluster_weight=0.1",
    "cluster.init=propagated",
]
LOGGED = 2  # steps to a record
TRAINING = [
    "sampler.fanouts=[10,10,5]",
    "ci.every_steps=100",
    f"run.log_every={LOGGED}",
    "run.tensorboard=false",
    "resources.threads=1",
    "train.epochs=1000",
]
WARM_STEPS = 20
FEWEST = 4  # records of a turn
PARTS = ("sampling", "step", "exchange")


class Case:
    """A command that is suspended except in its turns."""

    def __init__(self, folder: Path, name: str, nodes: int, workers: int, batch: int) -> None:
        """`workers` 0 stands for --on local."""
        self.root, self.seen = folder / name, 0
        self.records: list[dict[str, Any]] = []
        where = ["--on", "ray", f"resources.num_workers={workers}"] if workers else []
        own = [
            f"data.sbm.num_nodes={nodes}",
            f"sampler.batch_edges={batch}",
            f"data.store_dir={folder / 'data'}",
            f"run.dir={self.root}",
        ]
        words = [
            sys.executable,
            "-m",
            "cimage_dist",
            "pretrain",
            *GRAPH,
            *MODEL,
            *TRAINING,
            *own,
            *where,
            "--quiet",
        ]
        env = os.environ | {
            "OMP_NUM_THREADS": "1",
            "NUMBA_NUM_THREADS": "1",
            "RAY_TMPDIR": str(folder / "ray"),
        }
        self.process = subprocess.Popen(
            words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while not any(record["step"] >= WARM_STEPS for record in self.read("train")):
            if self.process.poll() is not None:
                raise SystemExit(
                    f"{name}: the command ended before step {WARM_STEPS}; run it by hand: "
                    f"{' '.join(words)}"
                )
            time.sleep(0.2)
        self.send(signal.SIGSTOP)

    def read(self, kind: str) -> list[dict[str, Any]]:
        file = self.root / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
        return [
            record
            for record in map(json.loads, (line for line in lines if line.endswith("\n")))
            if record["kind"] == kind
        ]

    def send(self, signum: int) -> None:
        top = psutil.Process(self.process.pid)
        for process in [top, *top.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signum)

    def go(self) -> None:
        self.seen = len(self.read("train"))
        self.send(signal.SIGCONT)

    def of_turn(self) -> list[dict[str, Any]]:
        """The records of this turn that count: the first spans the pause, those with a refresh are
        distinguished.
        """
        refreshed = {record["step"] for record in self.read("ci")}
        return [
            r
            for r in self.read("train")[self.seen + 1 :]
            if not any(r["step"] - LOGGED <= step < r["step"] for step in refreshed)
        ]

    def halt(self) -> float:
        """Suspend; seed edges per second of this turn."""
        self.send(signal.SIGSTOP)
        found = self.of_turn()
        self.records += found
        return sum(r["edges_per_s"] * r["seconds"] for r in found) / sum(
            r["seconds"] for r in found
        )

    def report(self) -> dict[str, Any]:
        spent = {
            part: statistics.median(r[f"{part}_s"] / LOGGED for r in self.records) for part in PARTS
        }
        return {
            "seconds_per_step": {name: round(value, 5) for name, value in spent.items()},
            "refresh_s": min(
                r["seconds"] for r in self.read("ci")
            ),  # a longer one may span a pause
            "memory_gb": self.records[-1]["memory_gb"],
            "records": len(self.records),
        }

    def end(self) -> None:
        self.send(signal.SIGCONT)
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.send(signal.SIGKILL)
            self.process.wait()


def turn(cases: Sequence[Case], seconds: float) -> float:
    """Edges per second of these commands at once."""
    for case in cases:
        case.go()
    time.sleep(seconds)
    while any(len(case.of_turn()) < FEWEST for case in cases):  # a refresh took the time
        time.sleep(0.5)
    return sum(case.halt() for case in cases)


def _reduce(rank: int, port: int, sizes: list[int], out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    found = {}
    for size in sizes:
        x = torch.ones(size)
        for _ in range(5):
            dist.all_reduce(x)
        times = []
        for _ in range(30):
            began = time.perf_counter()
            dist.all_reduce(x)
            times.append(time.perf_counter() - began)
        found[size * 4] = statistics.median(times)
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()


def reduction(folder: Path) -> dict[str, float]:
    """Latency α and seconds per byte β of an all-reduce between two processes on this machine, by
    the line through two sizes.
    """
    sizes, out = [64, 1 << 20], folder / "reduce.json"
    mp.spawn(_reduce, (29_431, sizes, str(out)), nprocs=2)
    (small, fast), (large, slow) = ((int(k), v) for k, v in json.loads(out.read_text()).items())
    beta = (slow - fast) / (large - small)
    return {"alpha_s": fast - beta * small, "beta_s_per_byte": beta}


def ratios(rate: dict[str, float]) -> dict[str, float]:
    return {
        "two unlinked commands at once / two alone": rate["apart"] / (2 * rate["local"]),
        "one Ray worker / --on local": rate["ray 1"] / rate["local"],
        "weak scaling under Ray, 1 to 2 workers": rate["ray 2, weak"] / (2 * rate["ray 1"]),
        "two Ray workers / two unlinked commands": rate["ray 2, weak"] / rate["apart"],
        "strong scaling under Ray, 1 to 2 workers": rate["ray 2, strong"] / (2 * rate["ray 1"]),
    }


def summary(values: Sequence[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": middle, "lower_quartile": low, "upper_quartile": high}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--nodes",
        type=int,
        default=200_000,
        help="of the graph; with few, the neighbourhood of a batch is all of it",
    )
    parser.add_argument("--batch", type=int, default=128, help="seed edges of a worker")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=6.0, help="of a turn")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    args = parser.parse_args()
    print(headline(1))
    sizes = {
        "local": (0, args.batch),
        "other": (0, args.batch),
        "ray 1": (1, args.batch),
        "ray 2, weak": (2, 2 * args.batch),
        "ray 2, strong": (2, args.batch),
    }
    rounds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="cs-") as name:
        folder = Path(name)
        (folder / "ray").mkdir()
        link = reduction(folder)
        cases: dict[str, Case] = {}
        try:
            for case, size in sizes.items():
                cases[case] = Case(
                    folder, case.replace(" ", "").replace(",", "-"), args.nodes, *size
                )
                print(f"  {case} runs", flush=True)
            turns = {
                "local": ["local"],
                "apart": ["local", "other"],
                "ray 1": ["ray 1"],
                "ray 2, weak": ["ray 2, weak"],
                "ray 2, strong": ["ray 2, strong"],
            }
            for number in range(args.rounds):
                rounds.append(
                    {
                        what: turn([cases[case] for case in who], args.seconds)
                        for what, who in turns.items()
                    }
                )
                print(
                    f"round {number + 1:2d}: "
                    + ", ".join(f"{what} {rate:.0f}" for what, rate in rounds[-1].items())
                    + " edges/s",
                    flush=True,
                )
            shares = {
                case: cases[case].report()
                for case in ("local", "ray 1", "ray 2, weak", "ray 2, strong")
            }
        finally:
            for running in cases.values():
                running.end()
    found = [ratios(rate) for rate in rounds]
    middle = {name: summary([each[name] for each in found]) for name in found[0]}
    for case, found in shares.items():
        parts = ", ".join(
            f"{part} {1000 * value:.1f} ms" for part, value in found["seconds_per_step"].items()
        )
        print(
            f"{case:14s} of a step: {parts}; refresh {found['refresh_s']:.2f} s; "
            f"{found['memory_gb']:.2f} GB"
        )
    for name, found in middle.items():
        print(
            f"{name}: {found['median']:.3f} (middle half of {args.rounds} rounds: "
            f"{found['lower_quartile']:.3f} to {found['upper_quartile']:.3f})"
        )
    print(
        f"all-reduce between two processes: {1e6 * link['alpha_s']:.0f} us + "
        f"{1e9 * link['beta_s_per_byte']:.3f} ns per byte"
    )
    if args.json:
        body = {
            "machine": facts(1),
            "nodes": args.nodes,
            "batch": args.batch,
            "turn_s": args.seconds,
            "ratios": middle,
            "ratios_by_round": found,
        }
        args.json.write_text(
            json.dumps(
                body | {"edges_per_s": rounds, "cases": shares, "all_reduce": link}, indent=2
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
