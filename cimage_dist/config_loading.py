"""Read the typed configuration from yaml and `key=value`. Unknown key, wrong type or bad range
fails here, naming the key and the fix.

Precedence, lowest first: the defaults of `config/`, yaml files in the order given, `key=value`
overrides.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cimage_dist.config import Config
from cimage_dist.errors import UserError


def known_keys(
    cls: type = Config, prefix: str = ""
) -> Iterator[tuple[str, dataclasses.Field[Any], str]]:
    """Every dotted key with its field and explanation."""
    for item in dataclasses.fields(cls):
        key = f"{prefix}{item.name}"
        factory = item.default_factory
        if isinstance(factory, type) and dataclasses.is_dataclass(factory):
            yield from known_keys(factory, f"{key}.")
        else:
            yield key, item, item.metadata.get("help", "")


def accepted(kind: Any) -> str:
    """What a field of this type may be set to, in words."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("null" if part is type(None) else accepted(part) for part in parts)
    if origin is typing.Literal:
        return " | ".join(map(str, parts))
    if origin is list:
        return f"list of {accepted(parts[0])}s, as [a,b]"
    if origin is dict:
        return f"<name>={accepted(parts[1])}"
    words = {bool: "true | false", int: "integer", float: "number", str: "text"}
    return words[kind]


def accepted_values(cls: type = Config, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every dotted key with what it may be set to."""
    for name, kind in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(kind):
            yield from accepted_values(typing.cast(type, kind), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", accepted(kind)


def dotted_key(name: str) -> str:
    """The key that `name` stands for: `train.epochs` itself, `train__epochs` (which Python accepts
    as a keyword), or `epochs` where no other key of a section is called so.
    """
    name = name.replace("__", ".")
    if "." in name:
        return name
    found = [key for key, _, _ in known_keys() if key.rsplit(".", 1)[-1] == name]
    nearest = min((key.count(".") for key in found), default=0)
    found = [key for key in found if key.count(".") == nearest]
    if len(found) > 1:
        ways = " or ".join(key.replace(".", "__") for key in found)
        raise UserError(f"{name!r} could be {' or '.join(found)}. Write {ways}.")
    return found[0] if found else name


def _check_keys(layer: Any, where: str, cls: type = Config, prefix: str = "") -> None:
    """Fail on the first unknown key of a layer, with the nearest known one as a suggestion."""
    names = {item.name: item for item in dataclasses.fields(cls)}
    for key in layer:
        dotted = f"{prefix}{key}"
        if key not in names:
            every = [k for k, _, _ in known_keys()]
            near = difflib.get_close_matches(
                dotted, every, n=1, cutoff=0.5
            ) or difflib.get_close_matches(str(key), [k.rsplit(".", 1)[-1] for k in every], n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise UserError(
                f"Unknown config key {dotted!r} in {where}.{hint} `cimage show --keys` lists "
                "all keys."
            )
        factory = names[key].default_factory
        nested = isinstance(factory, type) and dataclasses.is_dataclass(factory)
        value = layer._get_node(key)
        if str(value) == "???":
            raise UserError(
                f"{dotted} in {where} is '???', which stands for a missing value. Give it one."
            )
        if nested and isinstance(factory, type):
            if not hasattr(value, "items"):
                raise UserError(
                    f"{dotted} in {where} is a section, not a value; write {dotted}.<key>=... "
                    "or a nested mapping."
                )
            _check_keys(value, where, factory, f"{dotted}.")


def _load_yaml(path: str) -> Any:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    if not Path(path).is_file():
        raise UserError(
            f"Config file not found: {path}. Give a yaml file (see configs/) or key=value "
            "overrides."
        )
    try:
        layer = OmegaConf.load(path)
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        raise UserError(
            f"Config file {path} cannot be read as yaml: {' '.join(str(error).split())}"
        ) from None
    if not hasattr(layer, "items"):
        raise UserError(
            f"Config file {path} must hold a mapping of sections (data:, model:, ...), not a "
            "list or a single value."
        )
    return layer


def _without_aliases(layer: Any) -> Any:
    """`cluster.from`, a word Python keeps for itself, stands for the labels' path and for using
    them.
    """
    part = layer.get("cluster")
    if hasattr(part, "items") and "from" in part:
        part["labels_path"], part["init"] = part.pop("from"), "file"
    return layer


def load_config(*paths: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Defaults, then each yaml in order, then `key=value` overrides; checked, as plain
    dataclasses.
    """
    from omegaconf import OmegaConf

    layers = [(str(path), _load_yaml(str(path))) for path in paths]
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise UserError(
                f"Override {text!r} is not of the form key=value, e.g. train.epochs=50."
            )
        if not value.strip():
            raise UserError(f"Override {text!r} has no value. Give one, or null for none.")
        try:
            layers.append((f"the override {text!r}", OmegaConf.from_dotlist([text])))
        except Exception as error:  # yaml inside a value: the parser's own exception types vary
            raise UserError(
                f"Override {text!r} cannot be read: {' '.join(str(error).split())}"
            ) from None
    return _merged(OmegaConf.structured(Config), layers)


def with_settings(cfg: Config, settings: Mapping[str, Any]) -> Config:
    """A config with some keys changed, checked as those of files are; names as `dotted_key` reads
    them. The given one stays as it is.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    layers = []
    for name, value in settings.items():
        plain = str(value) if isinstance(value, Path) else value
        if hasattr(value, "item"):  # a number of numpy or torch
            plain = value.item()
        layer = OmegaConf.create({})
        try:
            OmegaConf.update(layer, dotted_key(name), plain, force_add=True)
        except OmegaConfBaseException as error:
            raise UserError(f"{name}: {str(error).splitlines()[0]}.") from None
        layers.append((f"{name}={value!r}", layer))
    return _merged(OmegaConf.structured(cfg), layers)


def _merged(merged: Any, layers: Sequence[tuple[str, Any]]) -> Config:
    """`merged` with (what to call it, keys) on top of each other, checked."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for where, layer in layers:
        _check_keys(_without_aliases(layer), where)
        try:
            merged = OmegaConf.merge(merged, layer)
        except OmegaConfBaseException as error:
            key = getattr(error, "full_key", None) or "a value"
            message = str(getattr(error, "msg", None) or error).split("\n")[0]
            if "is not a ListConfig" in message:
                message = f"a list is written in brackets, e.g. {key}=[10,10]"
            if "Invalid value 'True'" in message or "Invalid value 'False'" in message:
                message += " (yaml reads yes, no, on and off as true and false)"
            raise UserError(f"{key} in {where}: {message.rstrip('.')}.") from None
        except (
            TypeError,
            ValueError,
        ) as error:  # e.g. an index into a list: lists are replaced whole
            raise UserError(
                f"{where} does not fit the config: {error}. Lists are given whole, e.g. "
                "sampler.fanouts=[10,5]."
            ) from None
    try:
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        cause = error.__cause__ if isinstance(error.__cause__, UserError) else None
        raise cause or UserError(
            f"Config cannot be resolved: {str(error).splitlines()[0]}"
        ) from None
    assert isinstance(config, Config)
    return config


def to_yaml(cfg: Config) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.structured(cfg))


def changed_settings(cfg: Config) -> list[list[str]]:
    """[key, value, default] of every setting that is not the default."""
    now, usual = settings_of(cfg), settings_of(Config())
    return [[key, str(now[key]), str(usual[key])] for key in usual if now[key] != usual[key]]


def settings_of(cfg: Config) -> dict[str, Any]:
    """{dotted key: value} of a whole config."""
    return {key: functools.reduce(getattr, key.split("."), cfg) for key, _, _ in known_keys()}
