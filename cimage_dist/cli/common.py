"""What the verbs share: their settings as a config, a command to suggest, a progress bar."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cimage_dist.errors import UserError

if TYPE_CHECKING:
    from cimage_dist.config import Config
    from cimage_dist.train.progress import Progress


def split_settings(settings: Sequence[str]) -> tuple[list[str], list[str]]:
    """(yaml paths, overrides): what contains '=' is an override, unless a folder's name has it."""
    overrides = [text for text in settings if "=" in text and "/" not in text.partition("=")[0]]
    return [text for text in settings if text not in overrides], overrides


def config_for(verb: str, paths: list[str], overrides: list[str]) -> Config:
    """The config a verb starts from; the first file of a sweep is its search space.

    A run's folder stands for its config, the folder of a graph for `data.path`.
    """
    from cimage_dist.config_loading import load_config

    if verb == "sweep":
        from cimage_dist.tune.spec import load_sweep

        return load_sweep(paths, overrides).base
    urls = [path for path in paths if "://" in path]
    folders = [path for path in paths if Path(path).is_dir()]
    files = [path for path in paths if path not in (*folders, *urls)]
    for path in map(Path, files):
        if path.suffix not in (".yaml", ".yml") and verb != "sweep":
            _check_config(path)
    given = []
    for url in urls:
        files.insert(0, str(_run_at(url)))
        given.append(f"run.dir={url}")
    for folder in map(Path, folders):
        if (folder / "config.yaml").is_file():
            files.insert(0, str(folder / "config.yaml"))
            given += [f"run.dir={folder}", *_graph_beside(folder)]
        else:
            given.append(f"data.path={folder}")
    return named(load_config(*files, overrides=[*given, *overrides]))


def _check_config(path: Path) -> None:
    """What is no folder and is not called as yaml files are."""
    if not path.is_file():
        raise UserError(
            f"There is no file or folder {path}. Give the folder of a graph or of a run, a yaml "
            "file, or key=value."
        )
    raise UserError(
        f"{path} is not a config: that is a .yaml file. For a graph of your own give the folder "
        f"its files are in: {path.parent}/"
    )


def _run_at(url: str) -> Path:
    """The config of a run on object storage."""
    from cimage_dist.io.mirror import open_place

    config = open_place(url).config
    if not config.is_file():
        raise UserError(f"No run at {url}. To train into it, give a config and run.dir={url}.")
    return config


def config_of(args: argparse.Namespace) -> Config:
    if not args.settings and args.verb != "show":
        raise UserError(f"Which graph? {_examples(args.verb)}")
    return on_storage(config_for("", *split_settings(args.settings)))


def _graph_beside(folder: Path) -> list[str]:
    """The graph that `Pretrainer.save` kept in a run's folder, as a setting."""
    if (folder / "graph" / "manifest.json").is_file():
        return [f"data.path={folder / 'graph'}"]
    env = folder / "env.json"
    if env.is_file() and json.loads(env.read_text()).get("graph", {}).get("in_memory"):
        raise UserError(
            f"{folder} was fitted on a graph in memory and saved without it. Save it again with "
            "Pretrainer.save(folder, graph), or use it from Python: Pretrainer.load(folder)."
        )
    return []


def named(cfg: Config) -> Config:
    """A graph of one's own without a name is called after its folder."""
    from cimage_dist.config import DataConfig

    if cfg.data.path is None or cfg.data.name != DataConfig().name or "://" in cfg.data.path:
        return cfg
    from cimage_dist.data.ingest import data_of

    if (Path(cfg.data.path) / "manifest.json").is_file():
        return cfg  # a store, which has its name
    return dataclasses.replace(
        cfg, data=dataclasses.replace(cfg.data, name=data_of(Path(cfg.data.path)).name)
    )


def _examples(verb: str) -> str:
    return (
        "Give the folder of your graph, a config or the folder of a run:\n"
        f"  cimage {verb} my_graph/               a folder with edges.csv, features.csv, ...\n"
        f"  cimage {verb} my_graph.yaml           a config; `cimage new my_graph/` writes one\n"
        f"  cimage {verb} runs/mine               a run, with the settings it has\n"
        f"  cimage {verb} data.name=digits        a graph that comes with the program\n"
        "Settings follow as key=value, e.g. train.epochs=50; `cimage show --keys` lists them, and "
        f"`cimage {verb} --help` the flags."
    )


def on_storage(cfg: Config) -> Config:
    """Relative paths are below CIMAGE_STORAGE where that is set: Ray deletes a job's folder."""
    from cimage_dist.config import is_url, run_dir

    root = os.environ.get("CIMAGE_STORAGE")
    if not root:
        return cfg

    def below(path: str | None) -> str | None:
        return None if path is None else str(Path(root) / path)

    replace, store = dataclasses.replace, str(Path(root) / cfg.data.store_dir)
    data = replace(cfg.data, path=below(cfg.data.path), root=below(cfg.data.root), store_dir=store)
    cluster = replace(cfg.cluster, labels_path=below(cfg.cluster.labels_path))
    is_remote = cfg.run.dir is not None and is_url(cfg.run.dir)
    run = cfg.run if is_remote else replace(cfg.run, dir=str(Path(root) / run_dir(cfg)))
    return replace(cfg, data=data, cluster=cluster, run=run)


def command_of(args: argparse.Namespace, verb: str) -> str:
    """The shell command for a verb with the same settings."""
    where = ["--on", "ray"] if verb == "pretrain" and args.on == "ray" else []
    return " ".join(["cimage", verb, *map(shlex.quote, args.settings), *where])


def progress_of(args: argparse.Namespace) -> Progress:
    from cimage_dist.train.progress import Progress

    return Progress(quiet=args.quiet or args.json)
