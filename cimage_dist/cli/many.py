"""The verbs of many runs: cluster, compare, sweep."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from cimage_dist.baselines import METHODS
from cimage_dist.cli.common import config_of, on_storage, progress_of, split_settings
from cimage_dist.errors import Interrupted, UserError

VERBS = {
    "cluster": "make pseudo-labels by each method, keep them for later runs, and compare them",
    "compare": "train published methods and ours on one graph and score all by the same probe",
    "sweep": "search hyper-parameters on Ray: a file with a space, a config; the same command "
    "again continues",
}
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

_EPILOG = """\
examples:
  cimage compare configs/demo.yaml --methods cimage,ccassg,gae --seeds 3
  cimage compare data.name=mine data.path=my_graph/ --methods cimage,grace,maskgae
  cimage compare configs/demo.yaml --methods dgi --set dgi.epochs=50     a shorter training

Every method gets the same training edges, node split and probe. Settings of a method are its
authors' (cimage_dist/baselines/*.yaml); those of cimage are the config's. Baselines run in one
process on the whole graph. The same command again makes only what is missing or has other settings.
Without labels, methods are compared by held-out links and by the modularity of clusters. Output: a
table, compare.json and compare.html (a dot for every seed) in --out. Exit code 1: some method
failed, the reason is printed; the other results are there.

methods:
"""


_SWEEP_EPILOG = (
    "example: cimage sweep configs/sweeps/paper_node.yaml configs/node/cora.yaml sweep.trials=40"
)


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    if name == "sweep":
        parser.epilog = _SWEEP_EPILOG
        return
    is_compare = name == "compare"
    known = (
        "names from the list below"
        if is_compare
        else "of rdgae, dinknet, propagated, selfkmeans, file"
    )
    about = f"{known}; default: all that suit the graph"
    add("--methods", default="", metavar="A,B", help=about)
    seeds, verb = (3, "train") if is_compare else (1, "run")
    about = f"{verb} each method with N seeds from run.seed on (default {seeds})"
    add("--seeds", type=int, default=seeds, metavar="N", help=about)
    if not is_compare:
        return
    about = "results (default comparisons/<data.name>, with held-out edges <data.name>-link)"
    add("--out", type=Path, metavar="FOLDER", help=about)
    about = "a setting of a baseline; may be repeated"
    add(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="METHOD.KEY=VALUE",
        help=about,
    )
    about = "cells at a time, sharing the cores (default 1: times and memory are undisturbed)"
    add("--jobs", type=int, default=1, metavar="N", help=about)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG + "\n".join(
        f"  {name:10s} {method.label}: {method.about}" for name, method in METHODS.items()
    )


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def do_cluster(args: argparse.Namespace) -> Any:
    if args.seeds < 1:
        raise UserError(f"--seeds must be at least 1; got {args.seeds}.")
    cfg = config_of(args)
    from cimage_dist.pipeline.clusterings import compare

    seeds = range(cfg.run.seed, cfg.run.seed + args.seeds)
    result = compare(cfg, _names(args.methods), seeds, progress_of(args))
    if not args.json:
        _print_clusterings(result)
    return result


def _print_clusterings(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    graph = result["graph"]
    shown = [name for name in COLUMNS if any(name in found for found in result["methods"].values())]
    size = f"{graph['nodes']:,} nodes, {graph['edges']:,} edges, {result['clusters']} clusters"
    table = Table("method", title=f"{graph['name']}: {size}")
    for heading in ("seeds", *(COLUMNS[name][0] for name in shown)):
        table.add_column(heading, justify="right")
    for method, found in result["methods"].items():
        cells = [_cell(found.get(name), COLUMNS[name][1], found["seeds"]) for name in shown]
        table.add_row(method, str(found["seeds"]), *cells)
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


def do_compare(args: argparse.Namespace) -> Any:
    cfg = config_of(args)
    from cimage_dist.comparison import compare
    from cimage_dist.comparison.summary import as_text, terminal_width

    settings = settings_from(args.overrides)
    given = {"out": args.out, "settings": settings, "jobs": args.jobs}
    found = compare(cfg, _names(args.methods), args.seeds, progress=progress_of(args), **given)
    if not args.json:
        print(as_text(found.summary, terminal_width()))
        print(f"results: {found.folder / 'compare.json'}")
        print(f"page with every seed a dot, for a browser: {found.page}")
    args.exit_code = 1 if found.failed else 0
    return found.summary


def settings_from(texts: list[str]) -> dict[str, dict[str, Any]]:
    """["gae.epochs=50"] -> {"gae": {"epochs": 50}}; values are read as yaml."""
    import yaml

    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        method, dot, name = key.partition(".")
        if not (equals and dot and method and name):
            raise UserError(
                f"--set {text!r} is not of the form METHOD.KEY=VALUE, e.g. --set gae.epochs=50."
            )
        try:
            found.setdefault(method, {})[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UserError(
                f"--set {text!r}: the value cannot be read ({' '.join(str(error).split())})."
            ) from None
    return found


def do_sweep(args: argparse.Namespace) -> Any:
    from cimage_dist.tune.results import print_summary
    from cimage_dist.tune.spec import load_sweep

    sweep = load_sweep(*split_settings(args.settings))
    from cimage_dist.distributed.tune import sweep_on_ray

    root = Path(os.environ.get("CIMAGE_STORAGE", "")) / sweep.root
    try:
        result = sweep_on_ray(sweep, on_storage(sweep.base), root, quiet=args.quiet or args.json)
    except Interrupted:
        if not args.quiet:
            done = f"{root}/index.html"
            print(f"running trials were saved; what is done so far: {done}", file=sys.stderr)
        raise
    if not args.json:
        print_summary(result, [d.key for d in sweep.space])
    return result
