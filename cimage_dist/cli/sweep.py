"""The verb of many runs: sweep."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from cimage_dist.cli.common import on_storage, split_settings

VERBS = {
    "sweep": "search hyper-parameters on Ray: a file with a space, a config; the same command "
    "again continues"
}
WITHOUT_SETTINGS: set[str] = set()


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "example: cimage sweep configs/sweeps/paper_node.yaml "
        "configs/node/cora.yaml sweep.trials=40"
    )


def do_sweep(args: argparse.Namespace) -> Any:
    from cimage_dist.errors import Interrupted
    from cimage_dist.tune.live import print_summary
    from cimage_dist.tune.spec import load_sweep

    sweep = load_sweep(*split_settings(args.settings))
    from cimage_dist.distributed.tune import sweep_on_ray

    root = Path(os.environ.get("CIMAGE_STORAGE", "")) / sweep.root
    try:
        result = sweep_on_ray(sweep, on_storage(sweep.base), root, quiet=args.quiet or args.json)
    except Interrupted:
        if not args.quiet:
            print(
                f"running trials were saved; what is done so far: {root}/index.html",
                file=sys.stderr,
            )
        raise
    if not args.json:
        print_summary(result, [d.key for d in sweep.space])
    return result
