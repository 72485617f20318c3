"""The command line: `cimage <verb> <config.yaml> [more.yaml ...] [key=value ...]`, or
`python -m cimage_dist` without the installed script.

Heavy imports happen inside the verbs, so that `cimage --help` answers at once.
"""

import argparse
import contextlib
import difflib
import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from cimage_dist import __version__
from cimage_dist.cli import many, remote, runs
from cimage_dist.cli.common import command_of
from cimage_dist.errors import UNWRITABLE, Interrupted, UserError

EPILOG = """\
examples:
  cimage pretrain configs/demo.yaml                     train on a small generated graph
  cimage embed configs/demo.yaml                        write its embeddings
  cimage evaluate configs/demo.yaml --json              score them, beside controls
  cimage pretrain configs/node/cora.yaml train.epochs=50 run.seed=1
  cimage pretrain my_graph/                             your own graph: edges.csv, features.csv, ...
  cimage neighbors my_graph/ --id alice -k 5            who is near alice in its embedding
  cimage compare configs/demo.yaml --methods cimage,gae ours beside published methods on one graph
  cimage show --keys                                    every config key with default and meaning

Later arguments win: defaults, then each yaml in order, then key=value. Exit codes: 0 done, 2 the
input needs a correction (the message says which), 1 an internal error, 130/143 stopped by Ctrl-C or
SIGTERM after saving.
"""

# Each has VERBS (name -> one line of help), WITHOUT_SETTINGS, add_arguments(name, parser) and
# do_<name>(args).
FAMILIES = (runs, many, remote)


class Parser(argparse.ArgumentParser):
    """A wrong flag or verb is reported like every other mistake: one message, exit code 2."""

    def error(self, message: str) -> NoReturn:
        given, *known = re.findall(r"'([^']*)'", message) or [""]
        raise UserError(
            f"{message}.{near(given, known)} `{self.prog} --help` lists what can be given."
        )


def near(given: str, known: Sequence[str]) -> str:
    """A suggestion, where something known is spelt much like what was given."""
    found = difflib.get_close_matches(given, known, n=1)
    return f" Did you mean {found[0]!r}?" if found else ""


def build_parser() -> Parser:
    parser = Parser(
        prog="cimage",
        description="Node embeddings from large unlabelled graphs: a masked graph auto-encoder "
        "with conditional-independence masks.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"cimage-dist {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="<verb>", required=True)
    for family in FAMILIES:
        for name, about in family.VERBS.items():
            verb = verbs.add_parser(
                name, help=about, description=about[0].upper() + about[1:] + "."
            )
            family.add_arguments(name, verb)
            if name not in family.WITHOUT_SETTINGS:
                verb.add_argument(
                    "settings",
                    nargs="*",
                    metavar="config.yaml | key=value",
                    help="yaml files and overrides, later ones win",
                )
            verb.add_argument(
                "--json", action="store_true", help="print one JSON object on standard output"
            )
            verb.add_argument("--quiet", action="store_true", help="no progress, no notes")
            verb.set_defaults(do=getattr(family, f"do_{name}"), parse=parse, exit_code=0)
    return parser


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Flags and settings in any order: argparse alone refuses settings that follow a flag."""
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    unknown = [text for text in rest if text.startswith("-")]
    if unknown or (rest and not hasattr(args, "settings")):
        flags = [f"--{name.replace('_', '-')}" for name in vars(args)]
        hint = near(unknown[0].partition("=")[0], flags) if unknown else ""
        if not hint and unknown and hasattr(args, "settings"):
            hint = " Settings are written without dashes, as train.epochs=50."
        raise UserError(
            f"unrecognized arguments: {' '.join(unknown or rest)}.{hint} "
            f"`cimage {args.verb} --help` lists what can be given."
        )
    if rest:
        args.settings += rest
    return args


def main(argv: Sequence[str] | None = None) -> int:
    try:
        args = parse(argv)
    except UserError as error:
        print(f"cimage: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(
        format="%(levelname)s: %(message)s", level=logging.ERROR if args.quiet else logging.WARNING
    )
    try:
        # Libraries print what they like (Ray: that a worker died); with --json standard output is
        # for the object alone.
        with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
            result = args.do(args)
        if args.json:
            print(json.dumps(result, indent=2))
        sys.stdout.flush()
    except UserError as error:
        print(f"cimage {args.verb}: {error}", file=sys.stderr)
        return 2
    except Interrupted as stop:
        when = (
            f"after step {stop.step}; everything is saved" if stop.step else "before the first step"
        )
        when = "with every running trial saved" if args.verb == "sweep" else when
        print(f"\nstopped {when}. Resume with: {command_of(args, args.verb)}", file=sys.stderr)
        return 128 + stop.signum
    except KeyboardInterrupt:
        again = (
            f" Continue from the last checkpoint with: {command_of(args, args.verb)}"
            if args.verb == "pretrain"
            else ""
        )
        again = (
            " Finished cells are kept; the same command again makes the rest."
            if args.verb == "compare"
            else again
        )
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
            print(
                f"cimage {args.verb}: {error.strerror}: {error.filename}. Make room or get "
                "access there, or choose another run.dir.",
                file=sys.stderr,
            )
            return 2
        traceback.print_exc()
        print(
            f"cimage {args.verb}: internal error (above). This is a bug of cimage-dist; "
            "please report it with the command and `cimage doctor --json`.",
            file=sys.stderr,
        )
        return 1
    return int(args.exit_code)


if __name__ == "__main__":
    sys.exit(main())
