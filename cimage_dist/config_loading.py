"""Read the typed configuration from yaml and `key=value`. Unknown key, wrong type or bad range
fails here, naming the key and the fix.

Precedence, lowest first: the defaults of `config.py`, yaml files in the order given, `key=value`
overrides.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Sequence
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
    from omegaconf.errors import OmegaConfBaseException

    layers = [(str(path), _load_yaml(str(path))) for path in paths]
    for text in overrides:
        key, equals, _ = text.partition("=")
        if not equals or not key.strip():
            raise UserError(
                f"Override {text!r} is not of the form key=value, e.g. train.epochs=50."
            )
        try:
            layers.append((f"the override {text!r}", OmegaConf.from_dotlist([text])))
        except Exception as error:  # yaml inside a value: the parser's own exception types vary
            raise UserError(
                f"Override {text!r} cannot be read: {' '.join(str(error).split())}"
            ) from None
    merged = OmegaConf.structured(Config)
    for where, layer in layers:
        _check_keys(_without_aliases(layer), where)
        try:
            merged = OmegaConf.merge(merged, layer)
        except OmegaConfBaseException as error:
            key = getattr(error, "full_key", None) or "a value"
            message = str(getattr(error, "msg", None) or error).split("\n")[0]
            if "is not a ListConfig" in message:
                message = f"a list is written in brackets, e.g. {key}=[10,10]"
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
