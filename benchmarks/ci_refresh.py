"""Seconds of each part of a refresh of the factor scores: statistics, automatic penalty, one solve,
diagnostics.

    python benchmarks/ci_refresh.py [--width 512] [--factors 16] [--samples 20000] [--classes 7]
    [--threads 2] [--float64] [--reference]

Synthetic embeddings: a quarter of the factors is label-driven, the others are noise. Where
pyHSICLasso can be imported its classification path is timed on the same sample with the same block
size, otherwise that line says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from hardware import facts, headline

from cimage_dist.ci.diagnostics import describe_partition
from cimage_dist.ci.hsic import block_statistics
from cimage_dist.ci.partition import choose_partition


def synthetic(
    samples: int, width: int, factors: int, classes: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """h [n, K, c] float32, labels, gids; factors 0 .. K/4 - 1 depend on the label."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (samples,), generator=generator)
    h = torch.randn(samples, factors, width // factors, generator=generator)
    driven = max(1, factors // 4)
    h[:, :driven] += torch.randn(classes, driven, width // factors, generator=generator)[labels]
    return h, labels, torch.arange(samples)


def timed(call: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    wall, cpu = time.perf_counter(), time.process_time()
    out = call()
    return out, {
        "wall_s": round(time.perf_counter() - wall, 3),
        "cpu_s": round(time.process_time() - cpu, 3),
    }


def reference(
    h: torch.Tensor, labels: torch.Tensor, block_size: int, wanted: int
) -> dict[str, Any]:
    """pyHSICLasso on the same rows, where it is installed."""
    if importlib.util.find_spec("pyHSICLasso") is None:
        return {"note": "pyHSICLasso is not installed; not compared"}
    from pyHSICLasso import HSICLasso

    def run() -> list[int]:
        lasso = HSICLasso()
        lasso.input(h.flatten(1).numpy(), labels.numpy())
        lasso.classification(wanted, B=block_size, M=3, n_jobs=1)
        return [int(i) for i in lasso.get_index()]

    chosen, seconds = timed(run)
    return seconds | {"chosen": len(chosen)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (
        ("width", 512),
        ("factors", 16),
        ("samples", 20_000),
        ("classes", 7),
        ("threads", 2),
        ("block-size", 20),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--float64", action="store_true", help="kernels and products in double precision"
    )
    parser.add_argument(
        "--reference",
        action="store_true",
        help="also time pyHSICLasso, where it is installed: minutes, and about 20 GB at the "
        "default size",
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    h, labels, gids = synthetic(args.samples, args.width, args.factors, args.classes)
    planted = set(range(max(1, args.factors // 4)))
    dtype = torch.float64 if args.float64 else torch.float32
    parts: dict[str, dict[str, Any]] = {}
    stats, parts["statistics G, b, y2"] = timed(
        lambda: block_statistics(
            h.flatten(1), labels, gids, seed=0, block_size=args.block_size, dtype=dtype
        )
    )
    scores, parts["automatic penalty, cold"] = timed(
        lambda: choose_partition(stats, args.factors, target=len(planted))
    )
    parts["automatic penalty, cold"]["solves"] = scores.num_solves
    warm, parts["automatic penalty, warm"] = timed(
        lambda: choose_partition(stats, args.factors, target=len(planted), previous=scores)
    )
    parts["automatic penalty, warm"]["solves"] = warm.num_solves
    _, parts["one solve at that penalty"] = timed(
        lambda: choose_partition(stats, args.factors, lam=scores.lam)
    )
    _, parts["diagnostics"] = timed(
        lambda: describe_partition(h, labels, gids, scores, block_size=args.block_size)
    )
    if args.reference:
        parts["pyHSICLasso"] = reference(h, labels, args.block_size, args.width // 8)
    found = set(scores.in_context.nonzero().flatten().tolist())
    print(headline(args.threads))
    print(
        f"D = {args.width}, K = {args.factors}, n = {args.samples}, {args.classes} classes, "
        f"{stats.num_blocks} blocks of {args.block_size}, {dtype}"
    )
    for name, part in parts.items():
        print(f"  {name:28}" + "  ".join(f"{key} {value}" for key, value in part.items()))
    print(f"  planted factors {sorted(planted)}, found {sorted(found)}")
    print(
        json.dumps(
            {
                "machine": facts(args.threads),
                "settings": {**vars(args)},
                "parts": parts,
                "lam": scores.lam,
                "found": sorted(found),
            }
        )
    )


if __name__ == "__main__":
    main()
