"""The verbs around a folder of one's own: a config for it, neighbours of its nodes, embeddings for
other tools.
"""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

from cimage_dist.cli.common import command_of, config_of, progress_of
from cimage_dist.errors import UserError

VERBS = {
    "new": "write a commented config for a folder with edges.csv, features.csv, ...",
    "neighbors": "list the nodes nearest to some nodes in the embedding, by your own ids",
    "export": "write the embedding for other tools: parquet, csv, npy, TensorBoard, FAISS",
}
WITHOUT_SETTINGS = {"new"}
_LARGE_BYTES = 200_000_000  # of an edge file, from which mini-batches are suggested


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
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
                print(
                    f"{row.rank:>4}  {row.cosine:.4f} {'*' if row.linked else ' '} {row.neighbor}"
                )
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
