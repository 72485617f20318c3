"""Validation on one and on several ranks: seconds, and what a rank has for itself.

    python benchmarks/validation.py [--nodes 200000] [--features 256] [--ranks 1 2] [--by node]
        [--out validation.json]

A generated graph with half-precision features, an untrained encoder of the default recipe,
processes of one thread. `cpu_s` is the CPU time of rank 0 in one validation, the second of two
(other programs do not change it); `private_mb` what its private memory grew by, from before the
validator was made to after the first validation, `peak_mb` the most it grew by meanwhile, and
`planned_mb` what `cimage show --plan` counts for it. All features in single precision would take
`features_mb`.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hardware import facts


def private_mb() -> float:
    import psutil

    return float(psutil.Process().memory_full_info().uss / 1e6)


class Peak(threading.Thread):
    """The most memory of its own, in MB, that this process has while the thread runs."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self.is_over = 0.0, threading.Event()

    def run(self) -> None:
        while not self.is_over.wait(0.002):
            lines = Path("/proc/self/status").read_text().splitlines()
            own = next(line for line in lines if line.startswith("RssAnon"))
            self.most = max(self.most, int(own.split()[1]) * 1024 / 1e6)


def planned_mb(cfg: Any, world: int) -> float:
    from cimage_dist.config_loading import with_settings
    from cimage_dist.planning import make_plan

    plan = make_plan(with_settings(cfg, {"resources.num_workers": world}))
    return sum(
        part["size"] / 1e6
        for part in plan["memory"]["parts"]
        if part["phase"] == "validation" or "to validate" in part["name"]
    )


def rank_main(rank: int, world: int, folder: str, args: argparse.Namespace) -> None:
    from cimage_dist.comm import Comm
    from cimage_dist.data.ingest import open_graph
    from cimage_dist.data.splits import training_graph
    from cimage_dist.eval.score import make_validator
    from cimage_dist.pipeline.stages import untrained_model

    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", f"file://{folder}/meet-{world}", None, world, rank)
    cfg, comm = settings(args, folder), Comm.from_environment()
    graph = open_graph(cfg.data)
    topology, links = training_graph(graph, cfg.data, cfg.run.seed)
    model = untrained_model(cfg, graph)
    before, peak = private_mb(), Peak()
    peak.start()
    validate = make_validator(cfg, graph, topology, links, comm)
    assert validate is not None
    validate(model)
    peak.is_over.set()
    peak.join()
    grown = private_mb() - before
    comm.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    found = validate(model)
    result = {
        "ranks": world,
        "score": found["score"],
        "cpu_s": round(time.process_time() - cpu, 2),
        "wall_s": round(time.perf_counter() - wall, 2),
        "private_mb": round(grown),
        "peak_mb": round(peak.most - before),
    }
    if comm.is_main:
        Path(folder, f"{world}.json").write_text(json.dumps(result))


def settings(args: argparse.Namespace, folder: str) -> Any:
    from cimage_dist.config_loading import load_config

    return load_config(
        overrides=[
            "data.name=sbm",
            f"data.sbm.num_nodes={args.nodes}",
            "data.sbm.avg_degree=20",
            f"data.sbm.nuisance_features={args.features - 16}",
            "data.sbm.label_features=16",
            "data.feature_dtype=float16",
            f"data.store_dir={folder}/data",
            f"data.holdout_edges={'link' if args.by == 'link' else 'none'}",
            "model.teleport=0.1",
            "model.num_layers=3",
            "train.validate_every=1",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=200_000)
    parser.add_argument("--features", type=int, default=256)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--by", choices=["node", "link"], default="node")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    from cimage_dist.data.ingest import open_graph

    with tempfile.TemporaryDirectory() as folder:
        open_graph(settings(args, folder).data)
        runs = []
        for world in args.ranks:
            mp.spawn(rank_main, (world, folder, args), nprocs=world)
            found = json.loads(Path(folder, f"{world}.json").read_text())
            runs.append(found | {"planned_mb": round(planned_mb(settings(args, folder), world))})
    body = facts(threads=1) | {
        "nodes": args.nodes,
        "features_mb": round(args.nodes * args.features * 4 / 1e6),
        "by": args.by,
        "runs": runs,
    }
    print(json.dumps(body, indent=2))
    if args.out:
        args.out.write_text(json.dumps(body, indent=2) + "\n")


if __name__ == "__main__":
    main()
