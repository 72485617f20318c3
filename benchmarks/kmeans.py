"""Sharded k-means against scikit-learn, per iteration and per core, on random rows: `python
benchmarks/kmeans.py`.

All run from the same start, one thread, a fixed number of passes; the time of an iteration is the
difference between a long and a short run, so that start-up is not counted. Memory is what a run
adds to the process beyond the data.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable

import numpy as np
import torch
from hardware import facts, headline, peak_while
from sklearn.cluster import KMeans, MiniBatchKMeans
from threadpoolctl import threadpool_limits

from cimage_dist.pseudo.kmeans import CHUNK_ROWS, kmeans

FEW, MANY = 2, 7


def timed(run: Callable[[int], object]) -> float:
    """Seconds of one iteration: of the processor, which other work on the machine hardly disturbs;
    there is one thread.
    """

    def seconds(iterations: int) -> float:
        began = time.process_time()
        run(iterations)
        return time.process_time() - began

    run(FEW)
    return min((seconds(MANY) - seconds(FEW)) / (MANY - FEW) for _ in range(3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--clusters", type=int, nargs="+", default=[10, 64])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    generator = np.random.default_rng(0)
    results = []
    with threadpool_limits(1):
        for clusters in args.clusters:
            centres = generator.normal(size=(clusters, args.width)).astype(np.float32)
            # Overlapping groups: Lloyd's algorithm must not converge within the passes timed.
            x = centres[generator.integers(clusters, size=args.rows)] + 2 * generator.normal(
                size=(args.rows, args.width)
            ).astype(np.float32)
            start, rows = x[:clusters].copy(), torch.from_numpy(x)

            def ours(
                iterations: int, rows: torch.Tensor = rows, start: np.ndarray = start
            ) -> object:
                return kmeans(
                    rows,
                    len(start),
                    seed=0,
                    init=torch.from_numpy(start),
                    max_iterations=iterations,
                    tol=0.0,
                )

            def lloyd(iterations: int, x: np.ndarray = x, start: np.ndarray = start) -> object:
                return KMeans(
                    len(start),
                    init=start,
                    n_init=1,
                    max_iter=iterations,
                    tol=0.0,
                    algorithm="lloyd",
                ).fit(x)

            def minibatch(iterations: int, x: np.ndarray = x, start: np.ndarray = start) -> object:
                # One pass over the data is its iteration here.
                return MiniBatchKMeans(
                    len(start),
                    init=start,
                    n_init=1,
                    max_iter=iterations,
                    tol=0.0,
                    max_no_improvement=None,
                    batch_size=CHUNK_ROWS,
                ).fit(x)

            seconds = {
                "ours": timed(ours),
                "sklearn lloyd": timed(lloyd),
                "sklearn mini-batch": timed(minibatch),
            }
            added = {
                "ours": peak_while(lambda: ours(FEW)),
                "sklearn lloyd": peak_while(lambda: lloyd(FEW)),
            }
            results.append(
                {
                    "rows": args.rows,
                    "width": args.width,
                    "clusters": clusters,
                    "seconds_per_iteration": seconds,
                    "added_mb": added,
                }
            )
    report = {"machine": facts(1), "results": results}
    if args.json:
        print(json.dumps(report, indent=2))
        return
    print(headline(1))
    for result in results:
        seconds, added = result["seconds_per_iteration"], result["added_mb"]
        print(f"\n{args.rows:,} x {args.width}, {result['clusters']} clusters, one thread")
        for name, value in seconds.items():
            memory = (
                f", {added[name]:.0f} MB beyond the data ({x.nbytes / 1e6:.0f} MB)"
                if name in added
                else ""
            )
            print(
                f"  {name:20s} {1000 * value:8.1f} ms per iteration, ours / this = "
                f"{seconds['ours'] / value:.2f}{memory}"
            )


if __name__ == "__main__":
    main()
