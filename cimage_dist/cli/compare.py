"""The verb `compare`: published methods and ours on one graph, under one protocol."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from cimage_dist.baselines.registry import METHODS
from cimage_dist.cli.common import config_of, progress_of

VERBS = {"compare": "train published methods and ours on one graph and score all by the same probe"}
WITHOUT_SETTINGS: set[str] = set()

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


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--methods",
        default="",
        metavar="A,B",
        help="names from the list below; default: all that suit the graph",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        default=3,
        metavar="N",
        help="train each method with N seeds from run.seed on (default 3)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="results (default comparisons/<data.name>, with held-out edges <data.name>-link)",
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="METHOD.KEY=VALUE",
        help="a setting of a baseline; may be repeated",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="cells at a time, sharing the cores (default 1: times and memory are undisturbed)",
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG + "\n".join(
        f"  {name:10s} {method.label}: {method.about}" for name, method in METHODS.items()
    )


def do_compare(args: argparse.Namespace) -> Any:
    cfg = config_of(args)
    from cimage_dist.comparison.run import compare
    from cimage_dist.comparison.table import as_text, terminal_width

    settings = settings_from(args.overrides)
    names = [name.strip() for name in args.methods.split(",") if name.strip()]
    found = compare(
        cfg,
        names,
        args.seeds,
        out=args.out,
        settings=settings,
        progress=progress_of(args),
        jobs=args.jobs,
    )
    if not args.json:
        print(as_text(found.summary, terminal_width()))
        print(
            f"results: {found.folder / 'compare.json'}\npage with every seed a dot, for a "
            f"browser: {found.page}"
        )
    args.exit_code = 1 if found.failed else 0
    return found.summary


def settings_from(texts: list[str]) -> dict[str, dict[str, Any]]:
    """["gae.epochs=50"] -> {"gae": {"epochs": 50}}; values are read as yaml."""
    import yaml

    from cimage_dist.errors import UserError

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
