"""`python -m experiments.work`: one cell of a table, beside others in their own processes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cimage_dist.config import Config
from cimage_dist.data.store import Graph
from cimage_dist.errors import Interrupted, UserError
from cimage_dist.pipeline import stages
from cimage_dist.train.progress import Progress
from experiments.cell import run_cell
from experiments.spec import Cell


def train(cfg: Config, progress: Progress, graph: Graph) -> dict[str, Any]:
    """In this process, or on Ray workers where the cell asks for several."""
    if cfg.resources.num_workers == 1:
        return stages.pretrain(cfg, progress, graph)
    from cimage_dist.distributed.driver import launch

    return launch(cfg, progress)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("dataset")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--extra")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args(words)
    try:
        cell = Cell(args.config, args.dataset, tuple(args.overrides), args.seed, args.extra)
        run_cell(cell, args.results, args.runs, Progress(quiet=True), train)
    except UserError as error:
        print(f"error: {error}", flush=True)
        return 2
    except Interrupted as stop:
        print(f"error: {stop}", flush=True)
        return 128 + stop.signum
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
