"""What the sections are made of: a field with its help, and a check that names its key."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from cimage_dist.errors import UserError


def opt(default: Any, help: str) -> Any:
    """A field with its explanation, shown by `cimage show --keys`."""
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


def section(cls: type, help: str) -> Any:
    return field(default_factory=cls, metadata={"help": help})


def need(ok: bool, key: str, rule: str, got: Any) -> None:
    if not ok:
        raise UserError(f"{key} {rule}; got {got!r}.")
