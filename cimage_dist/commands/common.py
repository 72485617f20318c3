"""What the verbs share: their settings as a config, a command to suggest, a progress bar."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cimage_dist.config import Config
    from cimage_dist.train.progress import Progress


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
    where = ["--on", "ray"] if verb == "pretrain" and args.on == "ray" else []
    return " ".join(["cimage", verb, *map(shlex.quote, args.settings), *where])


def progress_of(args: argparse.Namespace) -> Progress:
    from cimage_dist.train.progress import Progress

    return Progress(quiet=args.quiet or args.json)
