"""What a sweep is, and whether it may start.

A space and how to search it come from a sweep file and `sweep.key=value` overrides. Before the
first trial the graph is built, there is something to validate on, and the directory is this
sweep's.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from cimage_dist.config import Config, fingerprint
from cimage_dist.config_loading import load_config, to_yaml
from cimage_dist.data.ingest import ingest, open_graph
from cimage_dist.data.splits import node_split, training_graph
from cimage_dist.data.store import Graph
from cimage_dist.errors import UserError
from cimage_dist.eval.score import make_validator
from cimage_dist.io import artifacts
from cimage_dist.tune import (
    Point,
    Space,
    check_points,
    check_population,
    checked_config,
    dotlist,
    grid,
    parse_space,
    random_point,
)
from cimage_dist.tune.ledger import Ledger

SEARCHES = ("grid", "random", "tpe")
_CHECKED, _MOST_CHECKED = 200, 2000  # points loaded before a sweep starts: of a space, of a grid
SCHEDULERS = ("none", "asha", "median", "pbt")
_TYPES = {"str": (str,), "int": (int,), "float": (int, float), "bool": (bool,)}
Rule = tuple[Callable[[Any], bool], str]
_POSITIVE: Rule = (lambda value: value > 0, "must be above 0")
_ONE_UP: Rule = (lambda value: value >= 1, "must be at least 1")
_NOT_NEGATIVE: Rule = (lambda value: value >= 0, "must not be negative")
# What a setting must be, where it is set.
_RULES: dict[str, Rule] = {
    "search": (lambda word: word in SEARCHES, f"must be one of {', '.join(SEARCHES)}"),
    "scheduler": (lambda word: word in SCHEDULERS, f"must be one of {', '.join(SCHEDULERS)}"),
    **dict.fromkeys(("trials", "time_s", "epochs", "interval_epochs", "concurrent"), _POSITIVE),
    "gpus_per_trial": _POSITIVE,
    **dict.fromkeys(("seeds", "fresh_seeds"), _ONE_UP),
    **dict.fromkeys(("top", "seed"), _NOT_NEGATIVE),
    "reduction": (lambda value: value >= 2, "must be at least 2"),
    "grace": (lambda x: 0 < x <= 1, "is a share of train.epochs and must lie in (0, 1]"),
    "quantile": (lambda x: 0 < x <= 0.5, "must lie in (0, 0.5]"),
}
# What does not make another sweep: budgets may be raised and the search continues.
_BUDGETS = {
    "trials",
    "time_s",
    "epochs",
    "top",
    "fresh_seeds",
    "concurrent",
    "gpus_per_trial",
    "dir",
}


@dataclass(frozen=True)
class SweepSettings:
    """The keys of a sweep file beside `space` and `fixed`; also given as sweep.<key>=<value>."""

    search: str = "tpe"
    scheduler: str = "none"
    trials: int | None = None  # points tried; unset: the whole grid, else 20
    time_s: float | None = None  # no new trial starts after so many seconds
    epochs: int | None = None  # no new trial starts once so many epochs are trained or under way
    seeds: int = 1  # runs of each point; their mean is its score
    top: int = 3  # points run again on fresh seeds; 0: none, and no winner is named
    fresh_seeds: int = 3
    baseline: bool = True  # try the given config too
    seed: int = 0  # of the search
    grace: float = 1 / 9  # share of train.epochs before which no trial is stopped
    reduction: int = 3  # ASHA lets one of so many continue at each rung
    # of population-based training; unset: a fifth of train.epochs
    interval_epochs: int | None = None
    quantile: float = 0.25  # of the population that is replaced
    concurrent: int | None = None  # trials at a time; unset: what the cluster holds
    gpus_per_trial: float | None = None  # may be a fraction; unset: 1 per worker, if there are any
    views: bool = False  # score the two groups of factors alone, too
    dir: str | None = None  # unset: sweeps/<data.name>/<file name>-<identity>

    def __post_init__(self) -> None:
        for key, (is_right, rule) in _RULES.items():
            value = getattr(self, key)
            if value is not None and not is_right(value):
                raise UserError(f"sweep.{key} {rule}; got {value!r}.")
        if self.scheduler != "pbt":
            return
        if self.seeds != 1:
            rule = "must be 1 with scheduler pbt, whose members are the repeats"
            raise UserError(f"sweep.seeds {rule}; got {self.seeds!r}.")
        if self.search == "grid":
            rule = "must be random or tpe with scheduler pbt: it only starts the population"
            raise UserError(f"sweep.search {rule}; got {self.search!r}.")


@dataclass(frozen=True)
class Sweep:
    settings: SweepSettings
    space: Space
    name: str
    base: Config
    paths: tuple[str, ...]
    overrides: tuple[str, ...]
    entries: dict[str, Any] = field(repr=False)  # the space as it was written

    @property
    def identity(self) -> str:
        """8 hex digits: the same search of the same space around the same config."""
        settings = dataclasses.asdict(self.settings)
        kept = {name: value for name, value in settings.items() if name not in _BUDGETS}
        body: dict[str, Any] = {
            "settings": kept,
            "space": self.entries,
            "base": fingerprint(self.base),
        }
        body["seed"] = self.base.run.seed
        return hashlib.blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=4).hexdigest()

    @property
    def root(self) -> Path:
        default = Path("sweeps") / self.base.data.name / f"{self.name}-{self.identity}"
        return Path(self.settings.dir) if self.settings.dir else default

    def config(self, values: dict[str, Any]) -> Config:
        """The given config with a point's values."""
        return load_config(*self.paths, overrides=[*self.overrides, *dotlist(values)])

    def is_valid(self, values: dict[str, Any]) -> bool:
        """Whether the config accepts a point; its keys may be valid alone and not together."""
        try:
            checked_config(self.base, values)
        except UserError:
            return False
        return True


class _Loader(yaml.SafeLoader):
    """Safe yaml that reads 1e-3 as a number and refuses a key given twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise UserError(f"{twice[0]} is given twice{node.start_mark}.")
        return super().construct_mapping(node, deep)


_NUMBER = re.compile(
    r"[-+]?(?:\d[\d_]*\.?[\d_]*(?:[eE][-+]?\d+)|\d[\d_]*\.[\d_]*|\.\d+(?:[eE][-+]?\d+)?)$"
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+0123456789."))


def _read(path: str) -> Any:
    try:
        return yaml.load(Path(path).read_text(), Loader=_Loader)
    except FileNotFoundError:
        raise UserError(
            f"Config file not found: {path}. Give a sweep file (see configs/sweeps/) and a config."
        ) from None
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as yaml: {' '.join(str(error).split())}") from None


def load_sweep(paths: Sequence[str], overrides: Sequence[str]) -> Sweep:
    """From yaml files (the one with `space:` is the sweep, the others the config) and overrides
    (`sweep.*` are the sweep's)."""
    bodies = {path: _read(path) for path in paths}
    found = [path for path, body in bodies.items() if isinstance(body, dict) and "space" in body]
    if len(found) != 1:
        what = "no file has" if not found else f"{' and '.join(found)} both have"
        raise UserError(
            f"A sweep needs one file with a `space:` section (see configs/sweeps/): {what} one."
        )
    body = dict(bodies[found[0]])
    entries, fixed = body.pop("space"), body.pop("fixed", None) or {}
    if not isinstance(fixed, dict):
        raise UserError(f"{found[0]}: fixed: must map config keys to values; got {fixed!r}.")
    for text in (text for text in overrides if text.startswith("sweep.")):
        key, _, value = text.removeprefix("sweep.").partition("=")
        try:
            body[key] = yaml.load(value, Loader=_Loader)
        except yaml.YAMLError as error:
            why = " ".join(str(error).split())
            raise UserError(f"Override {text!r} cannot be read: {why}") from None
    settings = _settings(body, found[0])
    others = tuple(path for path in paths if path != found[0])
    # What the command line says about a config key wins over the sweep file.
    own = (
        *dotlist({str(key): value for key, value in fixed.items()}),
        *(text for text in overrides if not text.startswith("sweep.")),
    )
    base = load_config(*others, overrides=own)
    space = parse_space(entries, base, lambda more: load_config(*others, overrides=[*own, *more]))
    check_points(_sample(settings, space), base)
    if settings.scheduler == "pbt":
        check_population(space)
        if base.steps is not None:
            raise UserError(
                "scheduler pbt counts its generations in passes, but the run is bounded by "
                f"{base.steps:,} steps. Set train.epochs and leave train.steps unset."
            )
    return Sweep(settings, space, Path(found[0]).stem, base, others, own, entries)


def _sample(settings: SweepSettings, space: Space) -> list[Point]:
    """Points to check before the first trial: of a grid all (evenly chosen, if there are many)."""
    if settings.search == "grid":
        points = grid(space)
        return points[:: -(-len(points) // _MOST_CHECKED)]
    return [random_point(space, settings.seed, number) for number in range(_CHECKED)]


def _settings(body: dict[str, Any], where: str) -> SweepSettings:
    fields = {item.name: item for item in dataclasses.fields(SweepSettings)}
    for key, value in body.items():
        if key not in fields:
            raise UserError(
                f"Unknown sweep setting {key!r} in {where} or as sweep.{key}. Known: "
                f"{', '.join(fields)} (and space, fixed)."
            )
        kinds = str(fields[key].type)
        allowed = _TYPES[kinds.split(" ")[0]]
        if not (type(value) in allowed or (value is None and kinds.endswith("None"))):
            raise UserError(f"sweep.{key} must be of type {kinds}; got {value!r}.")
    return SweepSettings(**body)


def check_validation(cfg: Config, graph: Graph) -> None:
    """A sweep chooses by validation scores, so every run must have one.

    Which, the config decides as in training.
    """
    if cfg.train.validate_every == 0:
        raise UserError(
            "A sweep compares validation scores, but train.validate_every is 0. Set e.g. "
            "train.validate_every=10 (and train.select=val)."
        )
    topology, links = training_graph(graph, cfg.data, cfg.run.seed)
    make_validator(cfg, graph, topology, links)
    labels, by = graph.labels(), cfg.train.validate_by
    is_by_node = by == "node" or (by == "auto" and links is None)
    if is_by_node and labels is not None:
        split = node_split(graph, cfg.data, cfg.run.seed)
        if not bool((labels[split.val] >= 0).any()):
            raise UserError(
                f"The node split of graph {graph.name!r} has no labelled validation nodes, so "
                "there is nothing to choose by. "
                "Use another data.split, or link validation with data.holdout_edges=link."
            )


def prepare(sweep: Sweep, cfg: Config, ledger: Ledger, note: Callable[[str], None]) -> None:
    """Check everything, build the graph store that all trials share, and write base.yaml (with
    `cfg`, whose paths are absolute) and sweep.json."""
    known = ledger.root / "sweep.json"
    if known.is_file():
        identity = artifacts.read_json(known, "the sweep's settings")["identity"]
        if identity != sweep.identity:
            raise UserError(
                f"{ledger.root} holds another sweep (of another space, config, seed or search). "
                "Choose another sweep.dir, or delete that folder to start again."
            )
    elif ledger.trials:
        raise UserError(
            f"{ledger.root} has trials but no sweep.json. Choose another sweep.dir, or delete "
            "that folder to start again."
        )
    ingest(cfg.data, note)
    check_validation(cfg, open_graph(cfg.data))
    artifacts.write_text(ledger.root / "base.yaml", to_yaml(cfg))
    body = {"identity": sweep.identity, "name": sweep.name, "space": sweep.entries}
    body["settings"] = dataclasses.asdict(sweep.settings)
    artifacts.write_json(known, body)
