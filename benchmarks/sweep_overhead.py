"""Seconds a sweep adds to the training time of each single-worker trial.

    python benchmarks/sweep_overhead.py [--trials 8] [--concurrent 2] [--epochs 45] [key=value ...]

A random search on the embedded digits graph, without early stopping. Training time is the time
inside the training loop, validation and checkpoints included. Everything else between the end of
one trial and the end of the next in the same process is overhead: choosing the point, Tune's
scheduling, loading the config, opening the graph, building the model, finding the initial labels,
the summary. Labels come from smoothed features here, made once for all trials; with
cluster.init=selfkmeans every trial first trains an encoder for its own labels, which depend on its
settings, and that training counts as overhead too. The first trial of each process also pays for
starting Ray's worker, imports and compiled loops; it is reported apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from hardware import headline

from cimage_dist.distributed.tune import sweep_on_ray
from cimage_dist.tune.ledger import Ledger
from cimage_dist.tune.spec import load_sweep

ROOT = Path(__file__).parents[1]
SPACE = """
search: random
baseline: false
top: 0
space:
  model.dropout: {low: 0.0, high: 0.6}
  optim.lr_max: {low: 2.0e-3, high: 3.0e-2, log: true}
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--concurrent", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=45)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        space = Path(folder) / "space.yaml"
        space.write_text(SPACE)
        own = [
            f"sweep.trials={args.trials}",
            f"sweep.concurrent={args.concurrent}",
            f"train.epochs={args.epochs}",
            "train.validate_every=5",
            "train.select=val",
            "cluster.init=propagated",
        ]
        sweep = load_sweep(
            [str(space), str(ROOT / "configs/demo.yaml")],
            [*own, f"data.store_dir={folder}/data", *args.overrides],
        )
        began = time.time()
        sweep_on_ray(sweep, sweep.base, Path(folder) / "sweep", quiet=True)
        wall = time.time() - began
        outcomes = sorted(Ledger(Path(folder) / "sweep").outcomes.values(), key=lambda o: o.ended)
    last: dict[str, float] = {}
    first, later = [], []
    for found in outcomes:
        since = last.get(found.process, began)
        (later if found.process in last else first).append(found.ended - since - found.seconds)
        last[found.process] = found.ended
    print(headline(1))
    training = [found.seconds for found in outcomes]
    print(
        f"{len(outcomes)} trials in {len(last)} processes, {wall:.1f} s in all; training "
        f"{statistics.median(training):.1f} s each (median)"
    )
    print(
        "first trial of each process, overhead with Ray's start: "
        + ", ".join(f"{seconds:.1f} s" for seconds in first)
    )
    if later:
        print(
            f"later trials, overhead: median {statistics.median(later):.2f} s, most "
            f"{max(later):.2f} s"
        )
    print(json.dumps({"first": first, "later": later, "training": training, "wall": wall}))


if __name__ == "__main__":
    main()
