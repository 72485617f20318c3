"""The verbs of one run: ingest, pretrain, embed, evaluate, report, show, doctor; and around a
folder of one's own: new, neighbors, export.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from cimage_dist.cli.common import command_of, config_of, progress_of
from cimage_dist.errors import UserError

VERBS = {
    "ingest": "prepare a graph store from raw files (done on first use by the other verbs too)",
    "pretrain": "train; the same command again resumes, a finished run is left alone",
    "embed": "write the embeddings of a trained run",
    "evaluate": "score a run's embeddings (or --embedding FILE) with controls beside them",
    "report": "write a page with charts, report.html, of a run (config or folder) or a sweep",
    "show": "print the resolved config, its fingerprint and what exists on disk",
    "doctor": "list which devices, backends and versions are present and what is missing",
    "new": "write a commented config for a folder with edges.csv, features.csv, ...",
    "neighbors": "list the nodes nearest to some nodes in the embedding, by your own ids",
    "export": "write the embedding for other tools: parquet, csv, npy, TensorBoard, FAISS",
}
WITHOUT_SETTINGS = {"doctor", "new"}
_LARGE_BYTES = 200_000_000  # of an edge file, from which mini-batches are suggested


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    if name == "pretrain":
        parser.add_argument(
            "--on",
            choices=("local", "ray"),
            default="local",
            help="this process, or resources.num_workers Ray workers",
        )
    if name == "embed":
        parser.add_argument(
            "--on",
            choices=("local", "ray"),
            default="local",
            help="this process, or resources.num_workers Ray workers",
        )
        parser.add_argument(
            "--nodes",
            metavar="FILE",
            type=Path,
            help="only these nodes (.npy, or one id a line), by sampled neighbourhoods",
        )
        parser.add_argument(
            "--parquet", action="store_true", help="also write a parquet file for every part"
        )
    if name == "evaluate":
        parser.add_argument(
            "--embedding",
            metavar="FILE",
            type=Path,
            help="score this .npy matrix instead of the run's embeddings",
        )
    if name == "report":
        parser.add_argument(
            "--points",
            metavar="N",
            type=int,
            default=2_000,
            help="dots on the map of the embedding (default 2000)",
        )
        parser.add_argument(
            "--figures",
            metavar="FOLDER",
            type=Path,
            help="also write every chart there as PDF, PNG and SVG",
        )
        parser.add_argument(
            "--no-scores",
            action="store_true",
            help="leave a run that was not evaluated without scores; else it is evaluated first",
        )
    if name == "show":
        parser.add_argument(
            "--keys", action="store_true", help="list every config key with default and meaning"
        )
        parser.add_argument(
            "--plan",
            action="store_true",
            help="check the run and print its steps, memory and communication per worker; starts "
            "nothing",
        )
        parser.add_argument(
            "--memory",
            metavar="GB",
            type=float,
            help="with --plan: memory of a worker (of its GPU, with resources.device=cuda); "
            "exceeding it fails",
        )
    if name == "new":
        parser.add_argument("folder", type=Path, help="the folder with the files of your graph")
        parser.add_argument(
            "--out", metavar="FILE", type=Path, help="the config (default <folder's name>.yaml)"
        )
    if name == "neighbors":
        parser.add_argument(
            "--id",
            action="append",
            default=[],
            dest="ids",
            metavar="ID",
            help="a node, by the id it has in your files; may be repeated",
        )
        parser.add_argument("-k", type=int, default=10, help="how many neighbours (default 10)")
    if name == "export":
        parser.add_argument(
            "--to",
            action="append",
            default=[],
            metavar="FILE",
            type=Path,
            help="what to write, by its ending: .parquet, .csv, .csv.gz (a column for the id and "
            "one for each dimension), .npy, .tsv (TensorBoard's projector), .faiss; may be "
            "repeated (default embeddings.parquet)",
        )


def do_ingest(args: argparse.Namespace) -> Any:
    cfg = config_of(args)  # before the slow imports: a typo is answered at once
    from cimage_dist.data.ingest import describe, ingest, lines_of
    from cimage_dist.data.store import Graph

    path, is_new = ingest(
        cfg.data, None if args.quiet or args.json else lambda text: print(text, file=sys.stderr)
    )
    facts = describe(Graph.open(path, cfg.data.verify))
    if not args.json:
        print(f"{'built' if is_new else 'already there'}: {path}")
        print("\n".join(lines_of(facts)))
    return {"store": str(path), "built_now": is_new, **facts}


def do_pretrain(args: argparse.Namespace) -> Any:
    cfg = config_of(args)  # before the slow imports: a typo is answered at once
    from cimage_dist.pipeline import stages

    if args.on == "ray":
        from cimage_dist.distributed.driver import launch

        summary = launch(cfg, progress_of(args))
    else:
        summary = stages.pretrain(cfg, progress_of(args))
    if not args.json and not args.quiet:
        what = (
            f"trained {summary['steps_now']} steps in {summary['seconds']:.0f} s"
            if summary["steps_now"]
            else "already finished, nothing to do"
        )
        held = (
            f" ({summary['edges_held_out']:,} edges held out for link prediction)"
            if summary["edges_held_out"]
            else ""
        )
        print(f"{what}: {summary['steps']} steps on {summary['edges_trained_on']:,} edges{held}")
        if summary["best"]:
            print(
                f"best validation score {summary['best']['score']:.2f} at step "
                f"{summary['best']['step']}"
            )
        print(f"run directory: {summary['run_dir']}\nnext: {command_of(args, 'embed')}")
    return summary


def do_embed(args: argparse.Namespace) -> Any:
    cfg = config_of(args)
    from cimage_dist.io import artifacts
    from cimage_dist.pipeline import stages

    progress = progress_of(args)
    if args.on == "ray":
        from cimage_dist.distributed.driver import embed

        folder = embed(cfg, progress, args.parquet, args.nodes)
    else:
        folder = stages.embed(
            cfg,
            parquet=args.parquet,
            note=progress.note,
            nodes=args.nodes,
            tick=lambda n, of: progress.update(n, of, {}, "embed"),
        )
        progress.close()
    manifest = artifacts.read_json(folder / artifacts.MANIFEST, "the embedding manifest")
    if not args.json and not args.quiet:
        print(
            f"embeddings: {folder} ({manifest['rows']:,} x {manifest['columns']}, "
            f"{manifest['dtype']}, step {manifest['step']})"
        )
        print(
            f"rows are in the order of {args.nodes}"
            if args.nodes
            else f"next: {command_of(args, 'evaluate')}, or {command_of(args, 'export')} for a "
            "table with your ids"
        )
    return {
        "embeddings": str(folder),
        "rows": manifest["rows"],
        "columns": manifest["columns"],
        "step": manifest["step"],
    }


def do_evaluate(args: argparse.Namespace) -> Any:
    cfg = config_of(args)
    from cimage_dist.pipeline.evaluation import evaluate_run
    from cimage_dist.reporting.terminal import print_scores

    result = evaluate_run(cfg, args.embedding, note=progress_of(args).note)
    if not args.json:
        print_scores(result)
        if args.embedding is None:
            print(f"next: {command_of(args, 'report')}")
    return result


def do_report(args: argparse.Namespace) -> Any:
    if args.points < 3:
        raise UserError(f"--points is {args.points}; a map needs at least 3.")
    if args.figures and args.figures.exists() and not args.figures.is_dir():
        raise UserError(f"--figures {args.figures} is a file. Give a folder, or a new name.")
    if len(args.settings) == 1 and (Path(args.settings[0]) / "trials").is_dir():
        return _sweep_report(Path(args.settings[0]), args)
    cfg = config_of(args)
    from cimage_dist.io import mirror
    from cimage_dist.reporting.page import write_figures
    from cimage_dist.reporting.run import score_run, write_run_page
    from cimage_dist.reporting.terminal import write_report

    run = mirror.open_run(cfg)
    folder = run.root
    if (folder / "trials").is_dir():
        return _sweep_report(folder, args)
    if not args.no_scores:
        score_run(folder, progress_of(args).note)
    with mirror.edited(folder):
        text = write_report(run)
        page, charts = write_run_page(folder, args.points, progress_of(args).note)
    figures = write_figures(charts, args.figures) if args.figures else []
    if not args.json:
        print(text.read_text())
        print(f"written to {text}\npage with charts, for a browser: {page}")
        if figures:
            print(f"{len(figures)} figures in {args.figures}")
    return {"report": str(text), "page": str(page), "figures": [str(path) for path in figures]}


def _sweep_report(folder: Path, args: argparse.Namespace) -> Any:
    """A sweep writes its page itself as trials end."""
    page = folder / "index.html"
    if not page.is_file():
        raise UserError(
            f"The sweep in {folder} has no page yet: no trial has ended. Run `cimage sweep` "
            "with the same files."
        )
    if not args.json:
        print(f"the sweep's page, for a browser: {page}")
    return {"page": str(page)}


def do_show(args: argparse.Namespace) -> Any:
    if args.memory is not None and not args.plan:
        raise UserError("--memory is compared with a plan. Give --plan too.")
    if args.memory is not None and not args.memory > 0:
        raise UserError(f"--memory must be positive, in GB; got {args.memory:g}.")
    if args.keys:
        from cimage_dist.reporting.terminal import show_keys

        return {"keys": show_keys(not args.json)}
    cfg = config_of(args)
    if args.plan:
        from cimage_dist.planning import make_plan, print_plan

        plan = make_plan(cfg, args.memory)
        if not args.json:
            print_plan(plan)
        return plan
    from cimage_dist.reporting.terminal import show_config

    return show_config(cfg, not args.json)


def do_doctor(args: argparse.Namespace) -> Any:
    from cimage_dist.reporting.terminal import doctor

    return doctor(not args.json)


def do_new(args: argparse.Namespace) -> Any:
    from cimage_dist.config_loading import load_config
    from cimage_dist.data.ingest import data_of
    from cimage_dist.data.sources.own import find_files
    from cimage_dist.io import artifacts

    files = find_files(args.folder)
    name = data_of(args.folder).name
    path = args.out or Path(f"{name}.yaml")
    if path.exists():
        raise UserError(f"{path} exists already. Remove it, or choose another --out.")
    artifacts.write_text(path, _config_text(name, args.folder, files))
    load_config(path)
    command = f"cimage pretrain {shlex.quote(str(path))}"
    if not args.json:
        found = ", ".join(file.name for file in files.values())
        print(f"found {found}\nwritten to {path}; read it, change what you like\nnext: {command}")
    return {"config": str(path), "files": {role: str(file) for role, file in files.items()}}


def _config_text(name: str, folder: Path, files: dict[str, Path]) -> str:
    """The settings a person may want to change, with what they mean; all others are left out."""
    found = ", ".join(file.name for file in files.values())
    absent = [role for role in ("features", "labels", "splits") if role not in files]
    lack = f" There is no file of {' or '.join(absent)}." if absent else ""
    is_large = files["edges"].stat().st_size > _LARGE_BYTES
    features = "given" if "features" in files else "degree"
    fanouts = "[10, 10]" if is_large else "[]"
    return f"""\
# {name}: cimage pretrain {name}.yaml, then cimage evaluate, export, neighbors or report with it.
# Found in {folder}: {found}.{lack}
# `cimage ingest` with this file says what was read; `cimage show --keys` lists all settings.
data:
  name: {name}
  path: {json.dumps(str(folder), ensure_ascii=False)}
  # The features of the nodes: as given in features.*, or made from the graph: degree, hash,
  # laplacian.
  features: {features}
  # Rows of features are scaled to length 1 (unit), to sum 1 (row), or kept (none).
  normalize: unit
  # auto keeps 5 % of the edges out of training where there are no labels, so that `evaluate` can
  # judge by predicted links; link keeps 15 % out in any case, none trains on all.
  holdout_edges: auto
  # Shares of the labelled nodes that train and validate the probe of `evaluate`; the rest tests it.
  # Embeddings are trained without labels.
  train_ratio: 0.1
  val_ratio: 0.1
  # Tables whose columns have other names: which column is what.
  # columns: {{source: from, target: to, id: key, label: group}}
model:
  # The embedding has num_factors x factor_dim columns; 0: 32, or fewer where there are few
  # features.
  num_factors: 16
  factor_dim: 0
sampler:
  # [] trains on the whole graph at once. For graphs that do not fit: neighbours sampled at each
  # hop, e.g. [10, 10].
  fanouts: {fanouts}
train:
  # Optimiser steps; null: 30 on the whole graph, 100 with sampled neighbours.
  steps: null
run:
  seed: 0
  # Where everything is written; without it runs/{name}/<fingerprint>/seed-0.
  # dir: runs/{name}
"""


def do_neighbors(args: argparse.Namespace) -> Any:
    cfg = config_of(args)
    if not args.ids:
        raise UserError("Whose neighbours? Give --id, once or several times.")
    if args.k < 1:
        raise UserError(f"-k must be at least 1; got {args.k}.")
    from cimage_dist.pipeline import stages
    from cimage_dist.pipeline.neighbors import neighbors

    graph, z = stages.embedded(cfg, progress_of(args).note)
    found = neighbors(z, graph, args.ids, args.k)
    if not args.json:
        for name, rows in found.groupby("id", sort=False):
            print(f"nearest to {name} (* shares an edge with it)")
            for row in rows.itertuples():
                mark = "*" if row.linked else " "
                print(f"{row.rank:>4}  {row.cosine:.4f} {mark} {row.neighbor}")
    return {"neighbors": json.loads(found.to_json(orient="records", double_precision=7))}


def do_export(args: argparse.Namespace) -> Any:
    cfg = config_of(args)
    from cimage_dist.pipeline import stages
    from cimage_dist.pipeline.neighbors import check_ending, export

    for path in args.to:
        check_ending(path)
    graph, z = stages.embedded(cfg, progress_of(args).note)
    files = [
        file for path in args.to or [Path("embeddings.parquet")] for file in export(z, graph, path)
    ]
    if not args.json and not args.quiet:
        print("\n".join(f"written: {file}" for file in files))
        print(f"next: {command_of(args, 'report')}")
    return {"files": [str(file) for file in files], "rows": z.rows, "columns": z.width}
