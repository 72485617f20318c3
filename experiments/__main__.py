"""`python -m experiments [table ...]`: make the runs of our tables and render docs/RESULTS.md.

Run it in the project's folder, with the package installed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from cimage_dist.errors import UserError
from experiments.document import render_document
from experiments.page import write_tables_page
from experiments.render import outdated
from experiments.run import Execute, make, missing
from experiments.spec import Table, load_table, load_tables

TABLES = Path("experiments/tables")


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m experiments",
        description="Make the runs of tables and render them beside the published numbers; runs "
        "that exist are skipped.",
        epilog="example: python -m experiments node parts --seeds 3",
    )
    add = found.add_argument
    about = "names of experiments/tables/*.yaml, or files; none: all"
    add("tables", nargs="*", metavar="table", help=about)
    about = "print which tables exist and what they still need; run nothing"
    add("--list", action="store_true", help=about)
    about = "only write docs/RESULTS.md, headline and figure of README.md from existing results"
    add("--render", action="store_true", help=about)
    add("--page", action="store_true", help="only write report.html with charts beside the results")
    about = "with --page: every chart as PDF, PNG and SVG too"
    add("--figures", type=Path, metavar="FOLDER", help=about)
    about = "no more than the first N seeds of every row"
    add("--seeds", type=int, metavar="N", help=about)
    about = "runs at a time (default: one per core, or per CPU of the cluster)"
    add("--jobs", type=int, default=0, metavar="N", help=about)
    about = "this machine, or the cluster RAY_ADDRESS names"
    add("--on", choices=("local", "ray"), default="local", help=about)
    places = {
        "--results": ("experiments/results", "FOLDER", "one small file per run"),
        "--runs": ("runs/experiments", "FOLDER", "run directories"),
        "--document": ("docs/RESULTS.md", "FILE", "where tables are rendered"),
    }
    for flag, (place, kind, about) in places.items():
        add(flag, type=Path, default=Path(place), metavar=kind, help=about)
    add("--json", action="store_true", help="print one JSON object on standard output")
    add("--quiet", action="store_true", help="no progress, no notes")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        result = _run(args)
    except UserError as error:
        print(f"experiments: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            "\nstopped. Finished runs are kept; the same command makes the rest.", file=sys.stderr
        )
        return 130
    if args.json:
        print(json.dumps(result, indent=2))
    return 0


def _run(args: argparse.Namespace) -> dict[str, Any]:
    every = load_tables(TABLES)
    named = [name if name.endswith(".yaml") else f"{TABLES}/{name}.yaml" for name in args.tables]
    files = [Path(name) for name in named]
    tables = [load_table(path) for path in files] or every
    if not tables:
        raise UserError(
            f"There is no table in {TABLES}. Run this in the project's folder, or give a yaml file."
        )
    if args.seeds is not None and args.seeds < 1:
        raise UserError(f"--seeds is {args.seeds}; give at least 1.")
    if args.jobs < 0:
        raise UserError(f"--jobs is {args.jobs}; give at least 1, or 0 for one run per core.")
    if args.page:
        return _page(tables, args)
    every_cell = [cell for table in tables for cell in table.cells()]
    old = sorted({cell.folder for cell in every_cell if outdated(cell, args.results)})
    if args.list:
        return _list(tables, old, args)
    cells = [] if args.render else missing(tables, args.results)
    cells = [cell for cell in cells if args.seeds is None or cell.seed < args.seeds]
    failed = _make(cells, args) if cells else []
    if args.document.is_file():
        render_document(args.document, every or tables, args.results)
    if not args.json:
        print(
            f"{len(cells) - len(failed)} runs made, {len(failed)} failed; tables: {args.document}"
        )
    if not args.quiet:
        for name in old:
            print(
                f"made with other settings or another probe than now: {args.results / name}; "
                "delete it to make it again",
                file=sys.stderr,
            )
        for cell, said in failed:
            print(f"failed: {cell.folder}, seed {cell.seed}: {said}", file=sys.stderr)
    if failed:
        raise UserError(
            f"{len(failed)} of {len(cells)} runs failed; the last: {failed[-1][1]} Fix it and "
            "run the same command again."
        )
    return {"made": len(cells), "document": str(args.document), "outdated": old}


def _list(tables: Sequence[Table], old: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    state: dict[str, dict[str, Any]] = {
        t.name: {
            "title": t.title,
            "runs": len(t.cells()),
            "missing": len(missing([t], args.results)),
        }
        for t in tables
    }
    if not args.json:
        for name, found in state.items():
            print(
                f"{name:24s} {found['runs'] - found['missing']:4d} of {found['runs']:4d} runs   "
                f"{found['title']}"
            )
        for name in old:
            print(f"made with other settings or another probe than now: {args.results / name}")
    return {"tables": state, "outdated": old}


def _page(tables: Sequence[Table], args: argparse.Namespace) -> dict[str, Any]:
    from cimage_dist.reporting.page import write_figures

    page, charts = write_tables_page(tables, args.results)
    figures = write_figures(charts, args.figures) if args.figures else []
    if not args.json:
        print(f"page of the tables, for a browser: {page}")
    return {"page": str(page), "figures": [str(path) for path in figures]}


def _make(cells: Sequence[Any], args: argparse.Namespace) -> list[tuple[Any, str]]:
    from cimage_dist.train.progress import Progress

    progress = Progress(quiet=args.quiet or args.json)
    execute: Execute
    with ExitStack() as closing:
        closing.callback(progress.close)
        if args.on == "ray":
            from experiments.on_ray import on_ray

            execute, room = on_ray()
        else:
            from experiments.processes import KeptProcesses

            kept, room = KeptProcesses(), os.cpu_count() or 1
            closing.callback(kept.close)
            execute = kept
        jobs = args.jobs or room
        progress.note(f"{len(cells)} runs, {jobs} at a time")

        def tick(done: int, total: int, what: str) -> None:
            progress.update(done, total, {}, f"runs, last {what}")

        return make(cells, args.results, args.runs, jobs, execute, tick)


if __name__ == "__main__":
    sys.exit(main())
