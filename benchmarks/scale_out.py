"""Does the cost of a step grow with the graph? The same batch and fan-outs on sbm graphs of 1M and
10M nodes.

    python benchmarks/scale_out.py [--nodes 1000000 10000000] [--workers 1 2]

Each case trains a few dozen steps in single-thread processes that share the memory-mapped store,
and reports time per step and memory: what a worker has for itself (anonymous pages) and, beside it,
what is resident with the mapped pages of the store, which all workers share.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hardware import facts, headline

from cimage_dist.comm import Comm
from cimage_dist.config import Config
from cimage_dist.config_loading import load_config
from cimage_dist.data.ingest import ingest, open_graph
from cimage_dist.io.storage import keep_freed_memory
from cimage_dist.train.refresh import random_scores
from cimage_dist.train.trainer import Trainer

MODEL = [
    "model.num_factors=8",
    "model.factor_dim=16",
    "model.num_layers=2",
    "loss.factor_weight=0.5",
    "loss.cluster_weight=0.1",
    "ci.partition=random",
]


def config(nodes: int, batch: int, store: str) -> Config:
    graph = [
        "data.name=sbm",
        f"data.sbm.num_nodes={nodes}",
        "data.sbm.avg_degree=20",
        f"data.store_dir={store}",
        "data.verify=never",
    ]
    return load_config(
        overrides=[
            *graph,
            *MODEL,
            "sampler.fanouts=[10,10,5]",
            f"sampler.batch_edges={batch}",
            "resources.threads=1",
        ]
    )


def _worker(rank: int, world: int, port: int, cfg: Config, steps: int, out: str) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()  # as the real worker does
    if world > 1:
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
        )
    comm = Comm.from_environment()
    graph = open_graph(cfg.data)
    trainer = Trainer(cfg, graph, graph.topology(), comm)
    trainer.scores = random_scores(cfg.model.num_factors, 0)
    batches, times = trainer.remaining(), []
    for step in range(steps):
        began = time.perf_counter()
        trainer.advance(next(batches))
        comm.barrier()
        if step >= steps // 4:
            times.append(time.perf_counter() - began)
    memory = psutil.Process().memory_info()
    private = (
        memory.rss - memory.shared
    )  # Linux counts file-backed pages as shared, whoever has them mapped
    Path(f"{out}-{rank}").write_text(
        json.dumps(
            {
                "step_s": statistics.median(times),
                "private_gb": private / 1e9,
                "resident_gb": memory.rss / 1e9,
            }
        )
    )


def measure(nodes: int, world: int, batch: int, steps: int, folder: Path) -> dict[str, Any]:
    cfg = config(nodes, batch * world, str(folder / "data"))
    began = time.perf_counter()
    path, _ = ingest(cfg.data, None)
    built = time.perf_counter() - began
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out = str(folder / f"{nodes}-{world}")
    mp.spawn(_worker, (world, port, cfg, steps, out), nprocs=world)
    found = [json.loads(Path(f"{out}-{rank}").read_text()) for rank in range(world)]
    store = sum(file.stat().st_size for file in path.iterdir()) / 1e9
    return {
        "nodes": nodes,
        "workers": world,
        "batch_per_worker": batch,
        "step_s": max(f["step_s"] for f in found),
        "private_gb": max(f["private_gb"] for f in found),
        "resident_gb": max(f["resident_gb"] for f in found),
        "store_gb": store,
        "ingest_s": round(built, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batch", type=int, default=128, help="seed edges of a worker")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    print(headline(1))
    rows = []
    with tempfile.TemporaryDirectory(prefix="cimage-scale-") as name:
        for nodes in args.nodes:
            for world in args.workers:
                rows.append(measure(nodes, world, args.batch, args.steps, Path(name)))
                r = rows[-1]
                print(
                    f"{nodes:>11,} nodes, {world} worker(s): {1000 * r['step_s']:.0f} ms per "
                    f"step of {args.batch} edges each, "
                    f"{r['private_gb']:.2f} GB private, {r['resident_gb']:.2f} GB resident, "
                    f"store {r['store_gb']:.2f} GB",
                    flush=True,
                )
    first, last = rows[0], next(r for r in rows if r["nodes"] == args.nodes[-1])
    ratio = last["step_s"] / first["step_s"]
    print(
        f"time per step, {args.nodes[-1]:,} against {args.nodes[0]:,} nodes, one worker: "
        f"{ratio:.2f}"
    )
    if args.json:
        args.json.write_text(
            json.dumps({"machine": facts(1), "rows": rows, "step_ratio": ratio}, indent=2) + "\n"
        )


if __name__ == "__main__":
    sys.exit(main())
