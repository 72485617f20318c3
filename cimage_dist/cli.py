"""The command line: `cimage <verb> <config.yaml> [more.yaml ...] [key=value ...]`.

Heavy imports happen inside the verbs, so that `cimage --help` answers at once.
"""

from __future__ import annotations

import argparse
import errno
import json
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from cimage_dist import __version__
from cimage_dist.errors import Interrupted, UserError

if TYPE_CHECKING:
    from cimage_dist.config import Config
    from cimage_dist.train.progress import Progress

EPILOG = """\
examples:
  cimage pretrain configs/demo.yaml                          train on the embedded digits graph
  cimage embed configs/demo.yaml                             write its embeddings
  cimage evaluate configs/demo.yaml --json                   score them, beside controls
  cimage pretrain configs/node/cora.yaml train.epochs=50 run.seed=1
  cimage pretrain data.name=mine data.path=my_graph/         your own graph: edges.csv, features.npy, ...
  cimage show --keys                                         every config key with its default and meaning

Later arguments win: defaults, then each yaml in order, then key=value. Exit codes: 0 done, 2 your input needs mending
(the message says how), 1 a fault of ours, 130/143 stopped by Ctrl-C or SIGTERM after saving.
"""

VERBS = {
    "ingest": "prepare a graph store from raw files (done on first use by the other verbs too)",
    "pretrain": "train; the same command again resumes, a finished run is left alone",
    "embed": "write the embeddings of a trained run",
    "evaluate": "score a run's embeddings (or --embedding FILE) with controls beside them",
    "report": "write and print a readable summary of a run",
    "show": "print the resolved config, its fingerprint and what exists on disk",
    "doctor": "tell which devices, backends and versions are present and what is missing",
}


# What the owner of a disk can mend: full, over quota, forbidden, read-only.
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)


class Parser(argparse.ArgumentParser):
    """A wrong flag or verb is told like every other mistake: one message, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}. `{self.prog} --help` tells what can be given.")


def build_parser() -> Parser:
    parser = Parser(
        prog="cimage",
        description="Node embeddings from large unlabelled graphs: a masked graph auto-encoder with conditional-independence masks.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"cimage-dist {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="<verb>", required=True)
    for name, about in VERBS.items():
        verb = verbs.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")
        if name != "doctor":
            verb.add_argument("settings", nargs="*", metavar="config.yaml | key=value", help="yaml files and overrides, later ones win")
        verb.add_argument("--json", action="store_true", help="print one JSON object on standard output")
        verb.add_argument("--quiet", action="store_true", help="no progress, no notes")
        if name == "pretrain":
            verb.add_argument("--on", choices=("local", "ray"), default="local", help="this process, or resources.num_workers Ray workers")
        if name == "embed":
            verb.add_argument("--parquet", action="store_true", help="also write a parquet file")
        if name == "evaluate":
            verb.add_argument("--embedding", metavar="FILE", type=Path, help="score this .npy matrix instead of the run's embeddings")
        if name == "show":
            verb.add_argument("--keys", action="store_true", help="list every config key with default and meaning")
    return parser


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Flags and settings in any order: argparse alone refuses settings that follow a flag."""
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    unknown = [text for text in rest if text.startswith("-")]
    if unknown or (rest and not hasattr(args, "settings")):
        raise UserError(f"unrecognized arguments: {' '.join(unknown or rest)}. `cimage {args.verb} --help` tells what can be given.")
    if rest:
        args.settings += rest
    return args


def split_settings(settings: Sequence[str]) -> tuple[list[str], list[str]]:
    """(yaml paths, overrides): whatever contains '=' is an override, unless a folder's name holds it."""
    overrides = [text for text in settings if "=" in text and "/" not in text.partition("=")[0]]
    return [text for text in settings if text not in overrides], overrides


def config_of(args: argparse.Namespace) -> Config:
    from cimage_dist.config import load_config

    paths, overrides = split_settings(args.settings)
    return load_config(*paths, overrides=overrides)


def command_of(args: argparse.Namespace, verb: str) -> str:
    """The shell command for a verb with the same settings."""
    import shlex

    where = ["--on", "ray"] if verb == "pretrain" and args.on == "ray" else []
    return " ".join(["cimage", verb, *map(shlex.quote, args.settings), *where])


def progress_of(args: argparse.Namespace) -> Progress:
    from cimage_dist.train.progress import Progress

    return Progress(quiet=args.quiet or args.json)


def do_ingest(args: argparse.Namespace) -> Any:
    from cimage_dist.graph.ingest import ingest
    from cimage_dist.graph.store import Graph

    cfg = config_of(args)
    path, is_new = ingest(cfg.data, None if args.quiet or args.json else lambda text: print(text, file=sys.stderr))
    graph = Graph.open(path, cfg.data.verify)
    facts = {
        "store": str(path),
        "built_now": is_new,
        "nodes": graph.num_nodes,
        "edges": graph.num_edges // 2,
        "features": graph.num_features,
        "classes": graph.num_classes,
    }
    if not args.json:
        print(
            f"{'built' if is_new else 'already there'}: {path}\n{graph.num_nodes:,} nodes, {graph.num_edges // 2:,} undirected edges, {graph.num_features:,} features, {graph.num_classes} classes"
        )
    return facts


def do_pretrain(args: argparse.Namespace) -> Any:
    from cimage_dist import stages

    cfg = config_of(args)
    if args.on == "ray":
        from cimage_dist.runtime.ray_train import launch

        summary = launch(cfg, progress_of(args))
    else:
        summary = stages.pretrain(cfg, progress_of(args))
    if not args.json and not args.quiet:
        what = f"trained {summary['steps_now']} steps in {summary['seconds']:.0f} s" if summary["steps_now"] else "already finished, nothing to do"
        held = f" ({summary['edges_held_out']:,} edges held out for link prediction)" if summary["edges_held_out"] else ""
        print(f"{what}: {summary['steps']} steps on {summary['edges_trained_on']:,} edges{held}")
        if summary["best"]:
            print(f"best validation score {summary['best']['score']:.2f} at step {summary['best']['step']}")
        print(f"run directory: {summary['run_dir']}\nnext: {command_of(args, 'embed')}")
    return summary


def do_embed(args: argparse.Namespace) -> Any:
    from cimage_dist import artifacts, stages

    cfg = config_of(args)
    folder = stages.embed(cfg, parquet=args.parquet, note=progress_of(args).note)
    manifest = artifacts.read_json(folder / artifacts.MANIFEST, "the embedding manifest")
    if not args.json and not args.quiet:
        print(
            f"embeddings: {folder} ({manifest['rows']:,} x {manifest['columns']}, {manifest['dtype']}, step {manifest['step']})\nnext: {command_of(args, 'evaluate')}"
        )
    return {"embeddings": str(folder), "rows": manifest["rows"], "columns": manifest["columns"], "step": manifest["step"]}


def do_evaluate(args: argparse.Namespace) -> Any:
    from cimage_dist.eval.report import print_scores
    from cimage_dist.evaluation import evaluate_run

    result = evaluate_run(config_of(args), args.embedding, note=progress_of(args).note)
    if not args.json:
        print_scores(result)
    return result


def do_report(args: argparse.Namespace) -> Any:
    from cimage_dist.artifacts import RunDir
    from cimage_dist.config import run_dir
    from cimage_dist.eval.report import write_report

    path = write_report(RunDir(run_dir(config_of(args))))
    if not args.json:
        print(path.read_text())
        print(f"written to {path}")
    return {"report": str(path)}


def do_show(args: argparse.Namespace) -> Any:
    from cimage_dist.overview import show_config, show_keys

    if args.keys:
        return {"keys": show_keys(not args.json)}
    return show_config(config_of(args), not args.json)


def do_doctor(args: argparse.Namespace) -> Any:
    from cimage_dist.overview import doctor

    return doctor(not args.json)


def main(argv: Sequence[str] | None = None) -> int:
    try:
        args = parse(argv)
    except UserError as error:
        print(f"cimage: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.ERROR if args.quiet else logging.WARNING)
    try:
        result = globals()[f"do_{args.verb}"](args)
        if args.json:
            print(json.dumps(result, indent=2))
        sys.stdout.flush()
    except UserError as error:
        print(f"cimage {args.verb}: {error}", file=sys.stderr)
        return 2
    except Interrupted as stop:
        when = f"after step {stop.step}; everything is saved" if stop.step else "before the first step"
        print(f"\nstopped {when}. Resume with: {command_of(args, args.verb)}", file=sys.stderr)
        return 128 + stop.signum
    except KeyboardInterrupt:
        again = f" Go on from the last checkpoint with: {command_of(args, args.verb)}" if args.verb == "pretrain" else ""
        print(f"\nstopped.{again}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (head, a pager) has left; what is still buffered must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SystemExit:  # the table printer ends so in the same case
        return 0
    except Exception as error:
        if isinstance(error, OSError) and error.errno in UNWRITABLE:
            print(f"cimage {args.verb}: {error.strerror}: {error.filename}. Make room or get access there, or choose another run.dir.", file=sys.stderr)
            return 2
        traceback.print_exc()
        print(
            f"cimage {args.verb}: internal error (above). This is a fault of cimage-dist; please report it with the command and `cimage doctor --json`.",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
