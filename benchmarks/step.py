"""Seconds of a whole full-graph training step, all three losses, and where they go.

    python benchmarks/step.py [cora] [photo] [--threads 2] [--steps 15] [--backend auto|reference]
    [key=value ...]

Settings are those of configs/paper/node/<name>.yaml; the partition of the factors is a random half,
as its making is timed by benchmarks/ci_refresh.py. Needs the datasets below CIMAGE_DATA_ROOT. The
parts are torch's profiler's, of three further steps.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from hardware import headline
from torch.profiler import ProfilerActivity, profile

from cimage_dist.comm import Comm
from cimage_dist.config_loading import load_config
from cimage_dist.data.ingest import open_graph
from cimage_dist.io.storage import keep_freed_memory
from cimage_dist.train.refresh import random_scores
from cimage_dist.train.trainer import Trainer

ROOT = Path(__file__).parents[1]
GROUPS = {
    "routing, backward": ("cimage::route_backward",),
    "routing, forward": ("GeneratedBackwardFor_cimage_route_default", "cimage::route"),
    "first layer and tail": ("_WeightedSum", "_WeightedSumBackward"),
    "dropout": ("_Dropout", "_DropoutBackward", "aten::bernoulli_"),
    "matrix products": ("aten::mm", "aten::addmm"),
    "optimiser": ("aten::_fused_adam_",),
}


def parts(events: Any) -> dict[str, float]:
    """Share of the processor time of each group, largest first; the rest is elementwise work."""
    own = {event.key: event.self_cpu_time_total for event in events}
    total = sum(own.values())
    shares = {
        group: sum(own.get(name, 0.0) for name in names) / total for group, names in GROUPS.items()
    }
    shares["everything else"] = 1.0 - sum(shares.values())
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def measure(name: str, args: argparse.Namespace, folder: str) -> None:
    overrides = [
        f"model.routing_backend={args.backend}",
        f"data.store_dir={folder}",
        *args.settings,
    ]
    cfg = load_config(ROOT / "configs" / "paper" / "node" / f"{name}.yaml", overrides=overrides)
    graph = open_graph(cfg.data)
    trainer = Trainer(cfg, graph, graph.topology(), Comm())
    trainer.scores = random_scores(cfg.model.num_factors, 0)
    batches = trainer.remaining()
    for _ in range(2):
        trainer.advance(next(batches))
    times = []
    for _ in range(args.steps):
        began = time.perf_counter()
        trainer.advance(next(batches))
        times.append(time.perf_counter() - began)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for _ in range(3):
            trainer.advance(next(batches))
    model = cfg.model
    print(
        f"\n{name}: T {model.routing_iterations}, {model.num_layers} layers, K "
        f"{model.num_factors}, C {model.factor_dim}, backend {args.backend}"
    )
    if cfg.loss.redundancy_weight > 0:
        flops = 8 * graph.num_nodes * (model.num_factors * model.factor_dim) ** 2
        print(f"  two views; products of the redundancy loss: {flops / 1e9:.1f} GFLOP")
    print(
        f"  step: median {statistics.median(times):.3f} s, quickest {min(times):.3f} s, of "
        f"{len(times)}"
    )
    for group, share in parts(seen.key_averages()).items():
        print(f"  {share:6.1%}  {group}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names",
        nargs="*",
        default=["cora", "photo"],
        metavar="name or key=value",
        help="cora, photo (default: both), others in their shipped size; then settings",
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--backend", default="auto", choices=("auto", "reference"))
    args = parser.parse_args()
    args.settings = [name for name in args.names if "=" in name]
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    print(headline(args.threads))
    with tempfile.TemporaryDirectory() as folder:
        for name in args.names:
            if "=" not in name:
                measure(name, args, folder)


if __name__ == "__main__":
    main()
