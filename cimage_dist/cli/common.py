"""What the verbs share: their settings as a config, a command to suggest, a progress bar."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cimage_dist.config import Config
    from cimage_dist.train.progress import Progress


def split_settings(settings: Sequence[str]) -> tuple[list[str], list[str]]:
    """(yaml paths, overrides): what contains '=' is an override, unless a folder's name has it."""
    overrides = [text for text in settings if "=" in text and "/" not in text.partition("=")[0]]
    return [text for text in settings if text not in overrides], overrides


def config_for(verb: str, paths: list[str], overrides: list[str]) -> Config:
    """The config a verb starts from; the first file of a sweep is its search space."""
    from cimage_dist.config_loading import load_config

    if verb != "sweep":
        return load_config(*paths, overrides=overrides)
    from cimage_dist.tune.spec import load_sweep

    return load_sweep(paths, overrides).base


def config_of(args: argparse.Namespace) -> Config:
    from cimage_dist.config_loading import load_config

    paths, overrides = split_settings(args.settings)
    return on_storage(load_config(*paths, overrides=overrides))


def on_storage(cfg: Config) -> Config:
    """Relative paths are below CIMAGE_STORAGE where that is set: Ray deletes a job's folder."""
    from cimage_dist.config import run_dir

    root = os.environ.get("CIMAGE_STORAGE")
    if not root:
        return cfg

    def below(path: str | None) -> str | None:
        return None if path is None else str(Path(root) / path)

    replace, store = dataclasses.replace, str(Path(root) / cfg.data.store_dir)
    data = replace(cfg.data, path=below(cfg.data.path), root=below(cfg.data.root), store_dir=store)
    cluster = replace(cfg.cluster, labels_path=below(cfg.cluster.labels_path))
    run = replace(cfg.run, dir=str(Path(root) / run_dir(cfg)))
    return replace(cfg, data=data, cluster=cluster, run=run)


def command_of(args: argparse.Namespace, verb: str) -> str:
    """The shell command for a verb with the same settings."""
    where = ["--on", "ray"] if verb == "pretrain" and args.on == "ray" else []
    return " ".join(["cimage", verb, *map(shlex.quote, args.settings), *where])


def progress_of(args: argparse.Namespace) -> Progress:
    from cimage_dist.train.progress import Progress

    return Progress(quiet=args.quiet or args.json)
