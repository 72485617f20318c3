"""A table as yaml: which config, which variants of it, on how many seeds, what is shown beside
which published numbers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from cimage_dist.config import Config, fingerprint
from cimage_dist.config_loading import load_config
from cimage_dist.errors import UserError

EXTRAS = ("views", "low_labels")
# How an extra is made: a higher number makes results of the way before outdated.
_RECIPES = {"views": 1, "low_labels": 3}
# How every run is scored: a higher number makes all results outdated. 2: converged logistic
# regression, chosen controls.
RULER = 2


@dataclass(frozen=True)
class Table:
    """`config` holds `{dataset}`; `configs` names another for some datasets. `rows` maps what the
    document shows to the overrides on each dataset.

    `common` are overrides of all rows. `scores` maps a path into a result (node.test) to its
    heading.
    `published`: {row: {dataset: number or [number for each score]}}. `against`: the row with which
    the others are compared seed by seed.
    """

    name: str
    title: str
    note: str
    config: str
    seeds: dict[str, int]
    rows: dict[str, dict[str, tuple[str, ...]]]
    scores: dict[str, str]
    configs: dict[str, str] = field(default_factory=dict)
    common: tuple[str, ...] = ()
    published: dict[str, dict[str, Any]] = field(default_factory=dict)
    against: str | None = None
    controls: bool = False
    extra: str | None = None
    order: int = 100  # in the document; tables of one number by name

    def config_of(self, dataset: str) -> str:
        return self.configs.get(dataset, self.config).format(dataset=dataset)

    def cell(self, dataset: str, row: str, seed: int) -> Cell:
        overrides = (*self.common, *self.rows[row][dataset])
        return Cell(self.config_of(dataset), dataset, overrides, seed, self.extra)

    def is_same_run(self, dataset: str, row: str, other: str) -> bool:
        """Whether two rows say the same in other words, e.g. a value that is the default, too."""
        return self.cell(dataset, row, 0).folder == self.cell(dataset, other, 0).folder

    def cells(self) -> list[Cell]:
        """All runs of the table, the first seeds of all rows before the second: a table that is cut
        short is a smaller table.
        """
        made = [
            self.cell(dataset, row, seed)
            for dataset, count in self.seeds.items()
            for row in self.rows
            for seed in range(count)
        ]
        return sorted(made, key=lambda cell: cell.seed)


@dataclass(frozen=True)
class Cell:
    """One run. Tables that need the same run share its result."""

    config: str
    dataset: str
    overrides: tuple[str, ...]
    seed: int
    extra: str | None = None

    @property
    def changes(self) -> list[str]:
        """What differs from the config. An override that says what the config says anyway is no
        difference.
        """
        return sorted(text for text in self.overrides if _changes(self.config, text))

    @property
    def folder(self) -> str:
        """Relative to the results: task, dataset, what differs."""
        changes = "+".join(text.replace("/", "-") for text in self.changes) or "as-shipped"
        return f"{self.task}/{self.dataset}/{changes}{f'~{self.extra}' if self.extra else ''}"

    @property
    def task(self) -> str:
        """The config's folder below configs/ as one name: node, link, own, paper-node, ..."""
        parts = Path(self.config).parent.parts
        inside = parts[parts.index("configs") + 1 :] if "configs" in parts else parts[-1:]
        return "-".join(inside)

    @property
    def run_folder(self) -> str:
        """Relative to the runs: an extra looks at the same trained run."""
        return self.folder.partition("~")[0]

    def path(self, results: Path) -> Path:
        return results / self.folder / f"seed-{self.seed}.json"

    def load(self, *more: str) -> Config:
        return load_config(self.config, overrides=[*self.overrides, f"run.seed={self.seed}", *more])

    @property
    def config_fingerprint(self) -> str:
        """The same for all seeds."""
        return fingerprint(_loaded(self.config, self.overrides))

    @property
    def recipe(self) -> int:
        return _RECIPES.get(self.extra or "", 1)

    def command(self) -> str:
        """What makes this run again, apart from the tables."""
        if self.extra:
            return " ".join(["python", *self.work(Path("runs/again"), Path("runs/experiments"))])
        on_ray = (
            [] if _loaded(self.config, self.overrides).resources.num_workers == 1 else ["--on ray"]
        )
        return " ".join(
            ["cimage pretrain", self.config, *self.changes, f"run.seed={self.seed}", *on_ray]
        )

    def work(self, results: Path, runs: Path) -> list[str]:
        """The words that follow `python` for a process that makes this cell alone."""
        flags = [
            f"--results={results}",
            f"--runs={runs}",
            f"--seed={self.seed}",
            *([f"--extra={self.extra}"] if self.extra else []),
        ]
        flags += [f"--set={text}" for text in self.changes]
        return ["-m", "experiments.work", self.config, self.dataset, *flags]


def _loaded(config: str, overrides: tuple[str, ...] = ()) -> Config:
    """Tables ask for the same few configs thousands of times: read once, and again when the file
    changes.
    """
    path = Path(config).resolve()
    return _read(path, path.stat().st_mtime_ns if path.is_file() else 0, overrides)


@functools.cache
def _read(path: Path, changed_ns: int, overrides: tuple[str, ...]) -> Config:
    return load_config(path, overrides=list(overrides))


def _changes(config: str, override: str) -> bool:
    if override.startswith(
        "resources.num_workers="
    ):  # no change of the experiment, but what a table of workers is about
        return True
    try:
        return fingerprint(_loaded(config, (override,))) != fingerprint(_loaded(config))
    except (
        UserError
    ):  # refused by itself, e.g. the only loss turned off: the row's others make it valid
        return True


def load_table(path: Path) -> Table:
    try:
        body = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise UserError(
            f"No table {path}. Those there are: {', '.join(table_names(path.parent)) or 'none'}."
        ) from None
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as yaml: {' '.join(str(error).split())}") from None
    if not isinstance(body, dict):
        raise UserError(f"{path} must map keys to values.")
    known = {item.name for item in dataclasses.fields(Table)} - {"name"}
    if unknown := sorted(set(body) - known):
        raise UserError(f"{path}: unknown key {unknown[0]!r}. Known: {', '.join(sorted(known))}.")
    if missing := [
        key for key in ("title", "config", "seeds", "rows", "scores") if not body.get(key)
    ]:
        raise UserError(f"{path}: {missing[0]} is missing.")
    rows = body.pop("rows")
    if not all(isinstance(part, dict) for part in (rows, body["seeds"], body.get("configs", {}))):
        raise UserError(f"{path}: rows, seeds and configs must map names to values.")
    common = _overrides(path, "common", body.pop("common", []))
    given: dict[str, Any] = {"note": "", "common": common} | body
    table = Table(
        name=path.stem,
        rows={
            str(name): _by_dataset(path, name, value, body["seeds"]) for name, value in rows.items()
        },
        **given,
    )
    _check(path, table)
    return table


def _by_dataset(
    path: Path, name: Any, value: Any, datasets: Mapping[str, Any]
) -> dict[str, tuple[str, ...]]:
    """A list of overrides is for all datasets; a mapping names each dataset."""
    if isinstance(value, dict) and (
        absent := [dataset for dataset in datasets if dataset not in value]
    ):
        raise UserError(f"{path}: rows.{name} has nothing for {absent[0]}.")
    return {
        dataset: _overrides(path, name, value[dataset] if isinstance(value, dict) else value)
        for dataset in datasets
    }


def _overrides(path: Path, name: Any, value: Any) -> tuple[str, ...]:
    texts = value if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(text, str) and "=" in text for text in texts):
        raise UserError(f"{path}: rows.{name} must be a list of key=value; got {value!r}.")
    return tuple(texts)


def _check(path: Path, table: Table) -> None:
    for name in table.published:
        if name not in table.rows:
            raise UserError(f"{path}: published.{name} is no row. Rows: {', '.join(table.rows)}.")
    if unknown := sorted(set(table.configs) - set(table.seeds)):
        raise UserError(f"{path}: configs.{unknown[0]} is no dataset of seeds.")
    if table.against is not None and table.against not in table.rows:
        raise UserError(
            f"{path}: against is {table.against!r}, which is no row. Rows: {', '.join(table.rows)}."
        )
    if table.extra is not None and table.extra not in EXTRAS:
        raise UserError(f"{path}: extra is {table.extra!r}; known: {', '.join(EXTRAS)}.")
    if bad := [
        f"{name}={count!r}"
        for name, count in table.seeds.items()
        if not isinstance(count, int) or count < 1
    ]:
        raise UserError(f"{path}: seeds.{bad[0]} must be a whole number of at least 1.")
    for cell in table.cells():
        if cell.seed == 0:
            cell.load()


def table_names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))


def load_tables(folder: Path) -> list[Table]:
    """All tables of a folder in the order of the document."""
    return sorted(
        (load_table(folder / f"{name}.yaml") for name in table_names(folder)),
        key=lambda table: (table.order, table.name),
    )
