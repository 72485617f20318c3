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
    found.add_argument(
        "tables",
        nargs="*",
        metavar="table",
        help="names of experiments/tables/*.yaml, or files; none: all",
    )
    found.add_argument(
        "--list",
        action="store_true",
        help="print which tables exist and what they still need; run nothing",
    )
    found.add_argument(
        "--render",
        action="store_true",
        help="only write docs/RESULTS.md and the headline and figure of README.md from the existing results",
    )
    found.add_argument(
        "--page", action="store_true", help="only write report.html with charts beside the results"
    )
    found.add_argument(
        "--figures",
        type=Path,
        metavar="FOLDER",
        help="with --page: every chart as PDF, PNG and SVG too",
    )
    found.add_argument(
        "--seeds", type=int, metavar="N", help="no more than the first N seeds of every row"
    )
    found.add_argument(
        "--jobs",
        type=int,
        default=0,
        metavar="N",
        help="runs at a time (default: one per core, or per CPU of the cluster)",
    )
    found.add_argument(
        "--on",
        choices=("local", "ray"),
        default="local",
        help="this machine, or the cluster RAY_ADDRESS names",
    )
    found.add_argument(
        "--results",
        type=Path,
        default=Path("experiments/results"),
        metavar="FOLDER",
        help="one small file per run",
    )
    found.add_argument(
        "--runs",
        type=Path,
        default=Path("runs/experiments"),
        metavar="FOLDER",
        help="run directories",
    )
    found.add_argument(
        "--document",
        type=Path,
        default=Path("docs/RESULTS.md"),
        metavar="FILE",
        help="where tables are rendered",
    )
    found.add_argument(
        "--json", action="store_true", help="print one JSON object on standard output"
    )
    found.add_argument("--quiet", action="store_true", help="no progress, no notes")
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
    files = [
        Path(name) if name.endswith(".yaml") else TABLES / f"{name}.yaml" for name in args.tables
    ]
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
    old = sorted(
        {cell.folder for t in tables for cell in t.cells() if outdated(cell, args.results)}
    )
    if args.list:
        return _list(tables, old, args)
    cells = (
        []
        if args.render
        else [c for c in missing(tables, args.results) if args.seeds is None or c.seed < args.seeds]
    )
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
    from cimage_dist.reporting.figures import write_figures

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
        return make(
            cells,
            args.results,
            args.runs,
            jobs,
            execute,
            lambda done, total, what: progress.update(done, total, {}, f"runs, last {what}"),
        )


if __name__ == "__main__":
    sys.exit(main())
