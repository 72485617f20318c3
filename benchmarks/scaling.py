"""Weak and strong scaling of sampled training from one to two single-thread workers, with Ray and without, and what Ray itself costs.

    python benchmarks/scaling.py [--json FILE]

The runs are the real command, `cimage pretrain`, on a generated graph with the whole objective; a rate is the median over the records of
metrics.jsonl after the first. "Apart" is two such commands at once that know nothing of each other: what the two cores give at best, since virtual
cores may share a real one. The rows "loop" are the same training steps in processes linked by gloo alone. All cases take turns, round by
round, because a machine's speed changes: a ratio is taken within a round and the median over rounds is told. Beside it stands the ratio of the
quickest tenth of all records, which a neighbour on the same hardware disturbs least. The machine should be otherwise idle.
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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hardware import facts, headline
from scale_out import measure

NODES, DEGREE = 20_000, 20
GRAPH = ["data.name=sbm", f"data.sbm.num_nodes={NODES}", f"data.sbm.avg_degree={DEGREE}"]
MODEL = ["model.num_factors=8", "model.factor_dim=16", "model.num_layers=2", "loss.factor_weight=0.5", "loss.cluster_weight=0.1", "cluster.init=propagated"]
TRAINING = ["sampler.fanouts=[10,10,5]", "ci.every_steps=40", "run.log_every=5", "run.tensorboard=false", "resources.threads=1"]


def command(folder: Path, name: str, workers: int, batch: int) -> list[str]:
    """A run of its own; `workers` 0 stands for --on local."""
    where = ["--on", "ray", f"resources.num_workers={workers}"] if workers else []
    own = [f"sampler.batch_edges={batch}", f"data.store_dir={folder / 'data'}", f"run.dir={folder / name}"]
    return [sys.executable, "-m", "cimage_dist.cli", "pretrain", *GRAPH, *MODEL, *TRAINING, *own, *where, "--quiet"]


def run(folder: Path, name: str, workers: int, batch: int, steps: int, copies: int = 1) -> list[dict[str, Any]]:
    """Rates and shares of `copies` commands at once, each asked to stop after `steps` steps."""
    names = [f"{name}-{copy}" for copy in range(copies)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "RAY_TMPDIR": str(folder / "ray")}
    began = time.perf_counter()
    started = [subprocess.Popen(command(folder, each, workers, batch), env=env, stderr=subprocess.DEVNULL) for each in names]
    try:
        while any(_last_step(folder / each) < steps for each in names):
            if any(process.poll() is not None for process in started):
                raise SystemExit(f"{name}: the command ended before step {steps}; run it by hand: {' '.join(command(folder, names[0], workers, batch))}")
            time.sleep(0.5)
    finally:
        for process in started:
            process.send_signal(signal.SIGINT)
        for process in started:
            process.wait()
    whole = time.perf_counter() - began
    return [_read(folder / each, steps) | {"workers": workers or "local", "batch_edges": batch, "whole_command_s": round(whole, 1)} for each in names]


def _records(folder: Path) -> list[dict[str, Any]]:
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")] if file.is_file() else []


def _last_step(folder: Path) -> int:
    return max((record["step"] for record in _records(folder) if record["kind"] == "train"), default=0)


def _read(folder: Path, steps: int) -> dict[str, Any]:
    records = [record for record in _records(folder) if record["step"] <= steps]
    train, refreshes = [r for r in records if r["kind"] == "train"][1:], [r for r in records if r["kind"] == "ci"]
    # A refresh falls into some records and not into others; it is told apart.
    quiet = [r for r in train if not any(r["step"] - 5 <= c["step"] < r["step"] for c in refreshes)]
    spent = {part: statistics.median(r[f"{part}_s"] / 5 for r in quiet) for part in ("sampling", "step", "exchange")}
    return {
        "edges_per_s": statistics.median(r["edges_per_s"] for r in quiet),
        "records": [round(r["edges_per_s"]) for r in quiet],
        "seconds_per_step": {name: round(value, 5) for name, value in spent.items()},
        "refresh_s": statistics.median(r["seconds"] for r in refreshes),
        "memory_gb": train[-1]["memory_gb"],
    }


def loop(folder: Path, world: int, batch: int, steps: int) -> dict[str, Any]:
    """Edges per second of the training loop without Ray."""
    rate = world * batch / measure(NODES, world, batch, steps, folder)["step_s"]
    return {"edges_per_s": rate, "records": [round(rate)]}


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
    """Latency α and seconds per byte β of an all-reduce between two processes on this machine, by the line through two sizes."""
    sizes, out = [64, 1 << 20], folder / "reduce.json"
    mp.spawn(_reduce, (29_431, sizes, str(out)), nprocs=2)
    (small, fast), (large, slow) = ((int(k), v) for k, v in json.loads(out.read_text()).items())
    beta = (slow - fast) / (large - small)
    return {"alpha_s": fast - beta * small, "beta_s_per_byte": beta}


def one_round(folder: Path, number: int, batch: int, steps: int) -> dict[str, list[dict[str, Any]]]:
    """Every case once."""
    cases = {"local": (0, batch), "apart": (0, batch), "ray 1": (1, batch), "ray 2, weak": (2, 2 * batch), "ray 2, strong": (2, batch)}
    found = {case: run(folder, f"{case}-{number}".replace(" ", "").replace(",", "-"), *size, steps, 1 + (case == "apart")) for case, size in cases.items()}
    for world in (1, 2):
        found[f"loop {world}"] = [loop(folder, world, batch, steps // 2)]
    for case, rows in found.items():
        print(f"  {case:14s} {sum(row['edges_per_s'] for row in rows):7.0f} edges/s", flush=True)
    return found


def quickest(rounds: list[dict[str, list[dict[str, Any]]]]) -> dict[str, float]:
    """Rate of each case that a tenth of its records reach; of commands apart, the sum over them."""

    def upper(values: list[float]) -> float:
        return statistics.quantiles(values, n=10, method="inclusive")[-1] if len(values) > 1 else values[0]

    return {case: sum(upper([v for found in rounds for v in found[case][copy]["records"]]) for copy in range(len(rows))) for case, rows in rounds[0].items()}


def ratios(rate: dict[str, float]) -> dict[str, float]:
    return {
        "two unlinked commands at once / two alone": rate["apart"] / (2 * rate["local"]),
        "one Ray worker / --on local": rate["ray 1"] / rate["local"],
        "weak scaling under Ray, 1 to 2 workers": rate["ray 2, weak"] / (2 * rate["ray 1"]),
        "two Ray workers / two unlinked commands": rate["ray 2, weak"] / rate["apart"],
        "weak scaling of the loop without Ray": rate["loop 2"] / (2 * rate["loop 1"]),
        "strong scaling under Ray, 1 to 2 workers": rate["ray 2, strong"] / (2 * rate["ray 1"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1024, help="seed edges of a worker")
    parser.add_argument("--steps", type=int, default=60, help="of each run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    args = parser.parse_args()
    print(headline(1))
    rounds = []
    with tempfile.TemporaryDirectory(prefix="cs-") as name:
        folder = Path(name)
        (folder / "ray").mkdir()
        for number in range(args.rounds):
            print(f"round {number + 1} of {args.rounds}", flush=True)
            rounds.append(one_round(folder, number, args.batch, args.steps))
        link = reduction(folder)
    told = [ratios({case: sum(row["edges_per_s"] for row in rows) for case, rows in found.items()}) for found in rounds]
    best = ratios(quickest(rounds))
    middle = {name: statistics.median(each[name] for each in told) for name in told[0]}
    for case in ("local", "ray 1", "ray 2, weak", "ray 2, strong"):
        rows = [found[case][0] for found in rounds]
        parts = ", ".join(f"{part} {1000 * statistics.median(row['seconds_per_step'][part] for row in rows):.1f} ms" for part in rows[0]["seconds_per_step"])
        refresh, memory = (statistics.median(row[key] for row in rows) for key in ("refresh_s", "memory_gb"))
        print(f"{case:14s} of a step: {parts}; refresh {refresh:.2f} s; {memory:.2f} GB")
    for name, value in middle.items():
        print(f"{name}: {value:.3f}   (rounds: {', '.join(f'{each[name]:.3f}' for each in told)}; quickest records: {best[name]:.3f})")
    print(f"all-reduce between two processes: {1e6 * link['alpha_s']:.0f} us + {1e9 * link['beta_s_per_byte']:.3f} ns per byte")
    if args.json:
        found = {"machine": facts(1), "ratios": middle, "ratios_by_round": told, "ratios_of_quickest": best, "all_reduce": link, "rounds": rounds}
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
