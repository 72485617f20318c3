"""Weak and strong scaling of sampled training from one to two single-thread workers, with Ray and without, and what Ray itself costs.

    python benchmarks/scaling.py [--json FILE]

The runs with Ray are the real command, `cimage pretrain`, on a generated graph with the whole objective; rates are medians over the
records of metrics.jsonl after the first. The rows "loop" are the same training steps in processes linked by gloo alone. Ray keeps about ten
idle processes that wake up a hundred times a second each, for some 80 microseconds; where the workers fill all cores these take time from them.
A last row runs the loop beside processes that do just that. The machine should be otherwise idle.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
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


def run(folder: Path, name: str, workers: int, batch: int, steps: int) -> dict[str, Any]:
    """Rates and shares of one run; `workers` 0 stands for --on local."""
    epochs = max(1, round(steps * batch / (NODES * DEGREE / 2)))
    where = ["--on", "ray", f"resources.num_workers={workers}"] if workers else []
    settings = [
        *GRAPH,
        *MODEL,
        *TRAINING,
        f"sampler.batch_edges={batch}",
        f"train.epochs={epochs}",
        f"data.store_dir={folder / 'data'}",
        f"run.dir={folder / name}",
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "RAY_TMPDIR": str(folder / "ray")}
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "cimage_dist.cli", "pretrain", *settings, *where, "--quiet"], env=env, check=True)
    records = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    train, refreshes = [r for r in records if r["kind"] == "train"][1:], [r for r in records if r["kind"] == "ci"]
    # A refresh falls into some records and not into others; it is told apart.
    quiet = [r for r in train if not any(r["step"] - 5 <= c["step"] < r["step"] for c in refreshes)]
    spent = {part: statistics.median(r[f"{part}_s"] / 5 for r in quiet) for part in ("sampling", "step", "exchange")}
    return {
        "workers": workers or "local",
        "batch_edges": batch,
        "steps": train[-1]["step"],
        "edges_per_s": statistics.median(r["edges_per_s"] for r in quiet),
        "seconds_per_step": {name: round(value, 5) for name, value in spent.items()},
        "refresh_s": statistics.median(r["seconds"] for r in refreshes),
        "memory_gb": train[-1]["memory_gb"],
        "whole_command_s": round(time.perf_counter() - began, 1),
    }


IDLE = 12
_WAKING = """
import time
while True:
    until = time.perf_counter() + 8e-5
    while time.perf_counter() < until:
        pass
    time.sleep(0.01)
"""


@contextmanager
def idle_processes() -> Iterator[None]:
    """As many processes as Ray keeps, which wake up as often and do as little."""
    started = [subprocess.Popen([sys.executable, "-c", _WAKING]) for _ in range(IDLE)]
    try:
        yield
    finally:
        for process in started:
            process.kill()


def loop(folder: Path, world: int, batch: int, steps: int) -> float:
    """Edges per second of the training loop without Ray."""
    found = measure(NODES, world, batch, steps, folder)
    return world * batch / found["step_s"]


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1024, help="seed edges of a worker")
    parser.add_argument("--steps", type=int, default=100, help="about; whole epochs are trained")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    args = parser.parse_args()
    print(headline(1))
    with tempfile.TemporaryDirectory(prefix="cs-") as name:
        folder, b = Path(name), args.batch
        (folder / "ray").mkdir()
        cases = {"local": (0, b), "ray 1": (1, b), "ray 2, weak": (2, 2 * b), "ray 2, strong": (2, b)}
        found = {case: run(folder, case.replace(" ", "-").replace(",", ""), *size, args.steps) for case, size in cases.items()}
        alone = {world: loop(folder, world, b, min(args.steps, 40)) for world in (1, 2)}
        with idle_processes():
            disturbed = loop(folder, 2, b, min(args.steps, 40))
        link = reduction(folder)
    rate = {case: r["edges_per_s"] for case, r in found.items()}
    ratios = {
        "one Ray worker / --on local": rate["ray 1"] / rate["local"],
        "weak scaling efficiency, 1 to 2 workers": rate["ray 2, weak"] / (2 * rate["ray 1"]),
        "strong scaling efficiency, 1 to 2 workers": rate["ray 2, strong"] / (2 * rate["ray 1"]),
        "weak scaling efficiency of the loop without Ray": alone[2] / (2 * alone[1]),
        f"weak scaling efficiency of the loop beside {IDLE} idle processes": disturbed / (2 * alone[1]),
    }
    for case, r in found.items():
        parts = ", ".join(f"{name} {1000 * value:.1f} ms" for name, value in r["seconds_per_step"].items())
        print(f"{case:15s} batch {r['batch_edges']:5d}  {r['edges_per_s']:9.0f} edges/s  {parts}; refresh {r['refresh_s']:.2f} s; {r['memory_gb']:.2f} GB")
    for world, edges in alone.items():
        print(f"loop, {world} rank(s), without Ray: {edges:.0f} edges/s")
    for name, value in ratios.items():
        print(f"{name}: {value:.3f}")
    print(f"all-reduce between two processes: {1e6 * link['alpha_s']:.0f} us + {1e9 * link['beta_s_per_byte']:.3f} ns per byte")
    if args.json:
        args.json.write_text(json.dumps({"machine": facts(1), "runs": found, "loop_edges_per_s": alone, "ratios": ratios, "all_reduce": link}, indent=2) + "\n")


if __name__ == "__main__":
    main()
