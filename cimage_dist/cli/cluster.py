"""The verb `cluster`: pseudo-labels by each method, compared."""

from __future__ import annotations

import argparse
from typing import Any

from cimage_dist.cli.common import config_of, progress_of

VERBS = {"cluster": "make pseudo-labels by each method, keep them for later runs, and compare them"}
WITHOUT_SETTINGS: set[str] = set()

# column -> (heading, digits)
COLUMNS = {
    "acc": ("ACC", 1),
    "nmi": ("NMI", 1),
    "ari": ("ARI", 1),
    "f1": ("F1", 1),
    "modularity": ("modularity", 3),
    "s": ("|S|", 0),
    "acc_s": ("ACC on S", 1),
    "clusters_in_s": ("clusters in S", 0),
    "seconds": ("seconds", 0),
    "peak_gb": ("peak GB", 2),
}


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--methods",
        default="",
        metavar="A,B",
        help="of rdgae, dinknet, propagated, selfkmeans, file; default: all that suit the graph",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        default=1,
        metavar="N",
        help="run each method with N seeds from run.seed on (default 1)",
    )


def do_cluster(args: argparse.Namespace) -> Any:
    from cimage_dist.errors import UserError

    if args.seeds < 1:
        raise UserError(f"--seeds must be at least 1; got {args.seeds}.")
    cfg = config_of(args)
    from cimage_dist.pipeline.clusterings import compare

    methods = [name.strip() for name in args.methods.split(",") if name.strip()]
    result = compare(
        cfg, methods, range(cfg.run.seed, cfg.run.seed + args.seeds), progress_of(args)
    )
    if not args.json:
        _print(result)
    return result


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    graph = result["graph"]
    shown = [name for name in COLUMNS if any(name in found for found in result["methods"].values())]
    table = Table(
        title=f"{graph['name']}: {graph['nodes']:,} nodes, {graph['edges']:,} edges, "
        f"{result['clusters']} clusters"
    )
    table.add_column("method")
    table.add_column("seeds", justify="right")
    for name in shown:
        table.add_column(COLUMNS[name][0], justify="right")
    for method, found in result["methods"].items():
        table.add_row(
            method,
            str(found["seeds"]),
            *(_cell(found.get(name), COLUMNS[name][1], found["seeds"]) for name in shown),
        )
    console = Console()
    # A pipe has no width: nothing is cut there.
    (console if console.is_terminal else Console(width=180)).print(table)
    print(
        "ACC, NMI, ARI, F1 in percent against the classes, which no method looks at. S: the "
        "nodes trusted from the start."
    )
    for run in result["runs"]:
        if run.get("folder"):
            print(f"{run['method']} seed {run['seed']}: cluster.from={run['folder']}")


def _cell(value: dict[str, float] | None, digits: int, seeds: int) -> str:
    if value is None:
        return "-"
    spread = f" ± {value['std']:.{digits}f}" if seeds > 1 and value["std"] > 0 else ""
    return f"{value['mean']:.{digits}f}{spread}"
