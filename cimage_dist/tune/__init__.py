"""Hyper-parameter sweeps without Ray.

Spaces, points, the ledger on disk, plans, rankings, results. The runtime executes them.

Search spaces over config keys: lists of choices, or ranges, checked by the config itself.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cimage_dist import keyed
from cimage_dist.config import Config
from cimage_dist.config_loading import known_keys
from cimage_dist.errors import UserError

Point = dict[str, Any]
_DRAW = 1  # stream of the search's seed

# Keys that decide on which data a score is computed, or where a run is stored: trials that differ
# here cannot be compared.
_NOT_SEARCHED = ("run.", "resources.")
_SPLIT = ("split", "split_index", "train_ratio", "val_ratio", "labels_per_class")
_LINKS = ("holdout_edges", "link_val_ratio", "link_test_ratio")
_VALIDATION = {f"train.{name}" for name in ("validate_every", "validate_by", "select")}
_VALIDATION |= {f"data.{n}" for n in ("name", "path", "root", "store_dir", *_SPLIT, *_LINKS)}
# Settings that may change while the weights stay.
_OPTIM = ("lr_max", "lr_min", "weight_decay", "clip_norm")
_MODEL = ("dropout", "structure_dropout", "factor_dropout", "num_layers", "routing_iterations")
_CHANGEABLE: tuple[str, ...] = ("loss.", "mask.", "ci.", "cluster.growth", "sampler.hide_rate")
_CHANGEABLE += tuple(f"optim.{name}" for name in _OPTIM)
_CHANGEABLE += tuple(f"model.{name}" for name in (*_MODEL, "routing_temperature"))


@dataclass(frozen=True)
class Choice:
    """One of several values."""

    key: str
    values: tuple[Any, ...]

    @property
    def is_ordered(self) -> bool:
        """Numbers in ascending order: neighbours are alike."""
        is_numeric = all(type(v) in (int, float) for v in self.values)
        return is_numeric and list(self.values) == sorted(self.values)

    def at(self, u: float) -> Any:
        return self.values[min(int(u * len(self.values)), len(self.values) - 1)]

    def corners(self) -> tuple[Any, ...]:
        return self.values

    def position(self, value: Any) -> float | None:
        """The place of a value in [0, 1]; None outside the space."""
        if value not in self.values:
            return None
        return self.values.index(value) / max(1, len(self.values) - 1)


@dataclass(frozen=True)
class Range:
    """A number between two bounds, both included; evenly spread, or by its logarithm."""

    key: str
    low: float
    high: float
    is_log: bool = False
    is_int: bool = False

    def at(self, u: float) -> Any:
        if self.is_int and not self.is_log:
            return min(int(self.low + u * (self.high - self.low + 1)), int(self.high))
        if self.is_log:
            return self.clip(self.low * (self.high / self.low) ** u)
        return self.clip(self.low + u * (self.high - self.low))

    def clip(self, value: float) -> Any:
        value = min(max(value, self.low), self.high)
        # Six digits: what is written in a yaml file is what was run.
        return round(value) if self.is_int else min(max(float(f"{value:.6g}"), self.low), self.high)

    def corners(self) -> tuple[Any, ...]:
        return (int(self.low), int(self.high)) if self.is_int else (self.low, self.high)

    def position(self, value: Any) -> float | None:
        if type(value) not in (int, float) or not self.low <= value <= self.high:
            return None
        scale = math.log if self.is_log else float
        low, high, at = scale(self.low), scale(self.high), scale(value)
        return (at - low) / (high - low) if high > low else 0.0


Dimension = Choice | Range
Space = tuple[Dimension, ...]
Load = Callable[[Sequence[str]], Config]


def dotlist(values: Mapping[str, Any]) -> list[str]:
    """`key=value` overrides as a shell or `load_config` reads them."""
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def value_of(cfg: Config, key: str) -> Any:
    at: Any = cfg
    for part in key.split("."):
        at = getattr(at, part)
    return at


def parse_space(entries: Any, base: Config, load: Load) -> Space:
    """A checked space from the `space:` mapping of a sweep file.

    `load` reads the base config with further overrides.
    """
    if not isinstance(entries, dict) or not entries:
        raise UserError(
            "space: must map config keys to choices or ranges, e.g. `model.dropout: "
            "{low: 0.2, high: 0.8}`; it is empty."
        )
    space = [_dimension(str(key), entry, base, load) for key, entry in entries.items()]
    found = _check_values(space, load)
    for i, dimension in enumerate(space):
        if isinstance(dimension, Choice):
            values = tuple(found[dimension.key])
            if len({json.dumps(value) for value in values}) < len(values):
                raise UserError(f"space: {dimension.key} lists a choice twice: {list(values)}.")
            # As the config holds them: a 1 for a float key is 1.0.
            space[i] = Choice(dimension.key, values)
    return tuple(space)


def with_values(cfg: Any, values: Mapping[str, Any]) -> Any:
    """A config, or a section of one, with other values, which are of its types.

    Every rule is checked.
    """
    own = {key: value for key, value in values.items() if "." not in key}
    inner: dict[str, dict[str, Any]] = {}
    for key in values.keys() - own.keys():
        name, _, rest = key.partition(".")
        inner.setdefault(name, {})[rest] = values[key]
    own |= {name: with_values(getattr(cfg, name), changes) for name, changes in inner.items()}
    return dataclasses.replace(cfg, **own)


def checked_config(base: Config, point: Point) -> Config:
    cfg: Config = with_values(base, point)
    cfg.check_fanouts()
    return cfg


def check_points(points: Sequence[Point], base: Config) -> None:
    """Every point must be a config: keys that are valid alone may not be together."""
    for point in points:
        try:
            checked_config(base, point)
        except UserError as error:
            shown = ", ".join(f"{key}={value!r}" for key, value in point.items())
            raise UserError(
                f"space: the point {shown} is no valid config: {error} "
                "Narrow the space, or set the key that does not fit under `fixed:`."
            ) from None


def _check_values(space: Sequence[Dimension], load: Load) -> dict[str, list[Any]]:
    """Every choice and every bound as the config holds it.

    Several keys are tried at once; where that fails, each is tried alone to find the wrong one.
    """
    found: dict[str, list[Any]] = {d.key: [] for d in space}
    for i in range(max(len(d.corners()) for d in space)):
        column = {d.key: d.corners()[i] for d in space if i < len(d.corners())}
        try:
            cfg = load(dotlist(column))
            for key in column:
                found[key].append(value_of(cfg, key))
        except UserError:
            for key, value in column.items():
                found[key].append(_checked(key, value, [d for d in space if d.key != key], load))
    return found


def _dimension(key: str, entry: Any, base: Config, load: Load) -> Dimension:
    if key not in {known for known, _, _ in known_keys()}:
        load([f"{key}=0"])  # complains of an unknown key, with the nearest known one
        raise UserError(f"space: {key} is a section, not a key.")
    if key.startswith(_NOT_SEARCHED) or key in _VALIDATION:
        raise UserError(
            f"space: {key} cannot be searched: trials that differ in it have scores that do not "
            "compare, or lie elsewhere. Fix it in the config."
        )
    if isinstance(entry, list):
        if not entry:
            raise UserError(f"space: {key} has an empty list of choices. Give at least one value.")
        return Choice(key, tuple(entry))
    if isinstance(entry, dict):
        return _range(key, entry, base)
    raise UserError(
        f"space: {key} must be a list of choices or a range {{low: ..., high: ...}}; got "
        f"{entry!r}. To fix a value put it under `fixed:`."
    )


def _range(key: str, entry: dict[Any, Any], base: Config) -> Range:
    usage = "a range is {low: ..., high: ..., log: true|false} or {around: factor}"
    if unknown := sorted(set(map(str, entry)) - {"low", "high", "log", "around"}):
        raise UserError(f"space: {key} has an unknown entry {unknown[0]!r}; {usage}.")
    if "around" in entry:
        return _around(key, entry, base)
    if not {"low", "high"} <= set(entry):
        raise UserError(f"space: {key} needs both bounds; {usage}.")
    is_log = entry.get("log", False)
    if not isinstance(is_log, bool):
        raise UserError(f"space: {key}.log must be true or false; got {is_log!r}.")
    low, high = entry["low"], entry["high"]
    for name, bound in (("low", low), ("high", high)):
        if type(bound) not in (int, float) or not math.isfinite(bound):
            raise UserError(
                f"space: {key}.{name} must be a number; got {bound!r}. For words give a list of "
                "choices."
            )
    kind = next(str(item.type) for known, item, _ in known_keys() if known == key)
    if not ("int" in kind or "float" in kind) or "list" in kind:
        raise UserError(f"space: {key} is no number, so it takes a list of choices, not a range.")
    is_int = "int" in kind
    if is_int and (low != int(low) or high != int(high)):
        raise UserError(f"space: {key} takes whole numbers; got the bounds {low!r} and {high!r}.")
    if low >= high:
        raise UserError(
            f"space: {key} has contradictory bounds: low {low:g} is not below high {high:g}."
        )
    if is_log and low <= 0:
        raise UserError(
            f"space: {key} has log: true, so its low bound must be above 0; got {low:g}."
        )
    return Range(key, low, high, is_log, is_int)


def _around(key: str, entry: dict[Any, Any], base: Config) -> Range:
    factor, centre = entry["around"], value_of(base, key)
    if set(entry) != {"around"} or type(factor) not in (int, float) or factor <= 1:
        raise UserError(
            f"space: {key} with `around` takes that entry alone, a factor above 1; got {entry!r}."
        )
    if type(centre) not in (int, float) or centre <= 0:
        raise UserError(
            f"space: {key} is {centre!r} in the given config, and `around` needs a number above "
            "0. Give low and high."
        )
    if type(centre) is int:
        return Range(key, max(1, round(centre / factor)), round(centre * factor), True, True)
    return Range(key, float(f"{centre / factor:.6g}"), float(f"{centre * factor:.6g}"), True)


def _checked(key: str, value: Any, others: Sequence[Dimension], load: Load) -> Any:
    """The value as the config holds it.

    It must be accepted with the given config, or with the other keys at one end of what is
    searched.
    """
    mates: list[Point] = [{}, *({d.key: d.corners()[end] for d in others} for end in (0, -1))]
    complaint: UserError | None = None
    for mate in mates:
        try:
            return value_of(load(dotlist(mate | {key: value})), key)
        except UserError as error:
            complaint = complaint or error
    raise UserError(f"space: {key} = {value!r} is no valid setting: {complaint}")


def check_population(space: Space) -> None:
    for d in space:
        if not d.key.startswith(_CHANGEABLE):
            raise UserError(
                f"space: {d.key} changes the model's shape or its data, so population-based "
                "training cannot hand weights over. Search it by asha."
            )
        decoder = {"loss.factor_weight": "factor", "loss.structure_weight": "edge"}.get(d.key)
        if decoder and 0 in d.corners():
            raise UserError(
                f"space: {d.key} reaches 0, where there is no {decoder} decoder to hand over. Let "
                "it start above 0 with scheduler: pbt."
            )


def draw(seed: int, *keys: int) -> float:
    """In [0, 1)."""
    return (keyed.derive(seed, *keys) & (2**53 - 1)) / 2**53


def grid(space: Space) -> list[Point]:
    """Every combination, the last key running fastest."""
    for dimension in space:
        if not isinstance(dimension, Choice):
            raise UserError(
                f"space: {dimension.key} is a range, and search: grid needs lists of choices. Use "
                "search: random or tpe, or list its values."
            )
    return [
        dict(zip([d.key for d in space], values, strict=True))
        for values in itertools.product(*[d.corners() for d in space])
    ]


def random_point(space: Space, seed: int, number: int, attempt: int = 0) -> Point:
    return {d.key: d.at(draw(seed, _DRAW, number, attempt, i)) for i, d in enumerate(space)}
