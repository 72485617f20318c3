"""The verb `bench`: the paper's tables and ours."""

from __future__ import annotations

import argparse
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from cimage_dist.commands.common import progress_of

VERBS = {"bench": "make the runs of a table and render it beside the published numbers; runs that are there are skipped"}
WITHOUT_SETTINGS = {"bench"}


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tables", nargs="*", metavar="table", help="names of configs/bench/*.yaml, or files; none: all of them")
    parser.add_argument("--list", action="store_true", help="tell which tables there are and what they still need; run nothing")
    parser.add_argument("--render", action="store_true", help="only write docs/RESULTS.md from the results there are")
    parser.add_argument("--seeds", type=int, metavar="N", help="no more than the first N seeds of every row")
    parser.add_argument("--jobs", type=int, default=0, metavar="N", help="runs at a time (default: one for each core, or as many as the Ray cluster has CPUs)")
    parser.add_argument("--on", choices=("local", "ray"), default="local", help="this machine, or the Ray cluster that RAY_ADDRESS names")
    parser.add_argument(
        "--results", type=Path, default=Path("benchmarks/results"), metavar="FOLDER", help="one small file for each run (default benchmarks/results)"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/bench"), metavar="FOLDER", help="run directories (default runs/bench)")
    parser.add_argument("--document", type=Path, default=Path("docs/RESULTS.md"), metavar="FILE", help="where tables are rendered (default docs/RESULTS.md)")
    parser.epilog = "example: cimage bench node parts --seeds 3"


def do_bench(args: argparse.Namespace) -> Any:
    from cimage_dist.bench.document import render_document
    from cimage_dist.bench.render import outdated
    from cimage_dist.bench.run import Execute, make, missing
    from cimage_dist.bench.spec import load_table, load_tables
    from cimage_dist.errors import UserError

    folder = Path("configs/bench")
    every = load_tables(folder)
    files = [Path(name) if name.endswith(".yaml") else folder / f"{name}.yaml" for name in args.tables]
    tables = [load_table(path) for path in files] or every
    if not tables:
        raise UserError("There is no table in configs/bench/. Run this in the project's folder, or give a yaml file.")
    if args.seeds is not None and args.seeds < 1:
        raise UserError(f"--seeds is {args.seeds}; at least 1.")
    if args.jobs < 0:
        raise UserError(f"--jobs is {args.jobs}; at least 1, or 0 for one run a core.")
    cells = [cell for cell in missing(tables, args.results) if args.seeds is None or cell.seed < args.seeds]
    state: dict[str, dict[str, Any]] = {t.name: {"title": t.title, "runs": len(t.cells()), "missing": len(missing([t], args.results))} for t in tables}
    old = sorted({cell.folder for t in tables for cell in t.cells() if outdated(cell, args.results)})
    if args.list:
        if not args.json:
            for name, found in state.items():
                print(f"{name:24s} {found['runs'] - found['missing']:4d} of {found['runs']:4d} runs   {found['title']}")
            for name in old:
                print(f"made with other settings, or scored in another way, than now: {args.results / name}")
        return {"tables": state, "outdated": old}
    failed = []
    if cells and not args.render:
        progress = progress_of(args)
        execute: Execute
        with ExitStack() as closing:
            closing.callback(progress.close)
            if args.on == "ray":
                from cimage_dist.runtime.ray_bench import on_ray

                execute, room = on_ray()
            else:
                from cimage_dist.runtime.bench_processes import KeptProcesses

                kept, room = KeptProcesses(), os.cpu_count() or 1
                closing.callback(kept.close)
                execute = kept
            jobs = args.jobs or room
            progress.note(f"{len(cells)} runs, {jobs} at a time")
            failed = make(cells, args.results, args.runs, jobs, execute, lambda done, total, what: progress.update(done, total, {}, f"bench, last {what}"))
    if args.document.is_file():
        render_document(args.document, every or tables, args.results)
    for name in old:
        progress_of(args).note(f"made with other settings, or scored in another way, than now: {args.results / name}; remove it to make it again")
    if not args.json:
        print(f"{len(cells) - len(failed) if not args.render else 0} runs made, {len(failed)} failed; tables: {args.document}")
    for cell, said in failed:
        progress_of(args).note(f"failed: {cell.folder}, seed {cell.seed}: {said}")
    if failed:
        raise UserError(f"{len(failed)} of {len(cells)} runs failed; the last: {failed[-1][1]} Run the same command again after mending it.")
    return {"made": len(cells) if not args.render else 0, "document": str(args.document), "outdated": old}
