"""Many small configs, quickly: a checked base is loaded once, and each test changes a copy of
it.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cimage_dist.config import Config
from cimage_dist.config_loading import load_config
from tests.conftest import small_sbm_settings

# The routing encoder of the paper, its mask and its schedule, for tests that are about them.
ROUTING = [
    "model.init=random",
    "model.propagation=routing",
    "model.teleport=0",
    "model.num_layers=3",
    "model.factor_dim=32",
    "model.tail=true",
    "model.dropout=0.5",
    "mask.start_rate=0.7",
    "mask.symmetric=false",
    "mask.hide_rate=0",
    "mask.feature_rate=0",
    "loss.structure_weight=1",
    "loss.redundancy_weight=0",
    "optim.schedule=restarts",
    "optim.lr_max=0.01",
    "optim.lr_min=0.001",
    "optim.weight_decay=5e-5",
    "train.epochs=100",
]


@functools.cache
def _loaded(overrides: tuple[str, ...]) -> Config:
    return load_config(overrides=overrides)


def _value(text: str) -> Any:
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except ValueError:
        return text


def changed(base: Sequence[str], *overrides: str) -> Config:
    """The config of `base`, with further `key=value` set on a copy without the checks of
    `load_config`.
    """
    cfg = copy.deepcopy(_loaded(tuple(base)))
    for text in overrides:
        key, _, value = text.partition("=")
        *path, name = key.split(".")
        section = functools.reduce(getattr, path, cfg)
        assert hasattr(section, name), f"no config key {key}"
        setattr(section, name, _value(value))
    return cfg


def small_sbm_config(store_dir: Path, *overrides: str) -> Config:
    """The small graph of the fixtures, with changes."""
    return changed(small_sbm_settings(store_dir), *overrides)
