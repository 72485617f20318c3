"""Time and memory of building a generated graph store in a process of its own.

    python benchmarks/ingest.py                      # 5M nodes, 50M edges
    python benchmarks/ingest.py --nodes 1000000      # 1M nodes, 10M edges
    python benchmarks/ingest.py --out result.json

Peak memory is the kernel's maximum resident set of the building process, interpreter and libraries
included.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def build(nodes: int, avg_degree: float, store_dir: str) -> dict[str, Any]:
    """Ingest once and measure; runs in the child."""
    from cimage_dist.config import DataConfig, SbmConfig
    from cimage_dist.data.ingest import ingest
    from cimage_dist.data.store import Graph

    imported = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    phases: list[tuple[float, str]] = []
    began = time.perf_counter()
    path, built = ingest(
        DataConfig(
            name="sbm", store_dir=store_dir, sbm=SbmConfig(num_nodes=nodes, avg_degree=avg_degree)
        ),
        lambda message: phases.append((round(time.perf_counter() - began, 2), message)),
    )
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    graph = Graph.open(path, verify="always")
    return {
        "built": built,
        "seconds": round(seconds, 2),
        "peak_rss_gb": round(peak * 1024 / 1e9, 3),
        "rss_after_imports_gb": round(imported * 1024 / 1e9, 3),
        "nodes": graph.num_nodes,
        "undirected_edges": graph.num_edges // 2,
        "features": graph.num_features,
        "store_gb": round(sum(p.stat().st_size for p in path.iterdir()) / 1e9, 3),
        "statistics": graph.manifest["statistics"],
        "phases": phases,
    }


def environment() -> dict[str, Any]:
    import numpy
    import psutil
    import torch

    import cimage_dist

    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )
    return {
        "cpu": model,
        "cores": psutil.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "torch": torch.__version__,
        "cimage_dist": cimage_dist.__version__,
        "date": datetime.date.today().isoformat(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Build a generated graph store; report time and peak memory."
    )
    parser.add_argument("--nodes", type=int, default=5_000_000)
    parser.add_argument(
        "--avg-degree",
        type=float,
        default=20.5,
        help="slightly above 20, because a few drawn edges coincide",
    )
    parser.add_argument("--tmp", default=None, help="folder for the temporary store")
    parser.add_argument("--out", default=None, help="write the result here as JSON")
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        json.dump(build(args.nodes, args.avg_degree, args.child), sys.stdout)
        return
    with tempfile.TemporaryDirectory(dir=args.tmp) as folder:
        command = [
            sys.executable,
            __file__,
            "--nodes",
            str(args.nodes),
            "--avg-degree",
            str(args.avg_degree),
            "--child",
            folder,
        ]
        result = json.loads(
            subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        )
    result["environment"] = environment()
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=2) + "\n")
    facts = result["environment"]
    print(
        f"{result['nodes']:,} nodes, {result['undirected_edges']:,} undirected edges, "
        f"{result['features']} features, store {result['store_gb']} GB"
    )
    print(
        f"{result['seconds']} s, peak memory {result['peak_rss_gb']} GB (of which "
        f"{result['rss_after_imports_gb']} GB after imports)"
    )
    print(
        f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gb']} GB; Python "
        f"{facts['python']}, numpy {facts['numpy']}, torch {facts['torch']}"
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
