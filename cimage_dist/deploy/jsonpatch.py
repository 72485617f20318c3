"""JSON patches (RFC 6902): the operations that k8s/ uses, applied in place; anything else is refused."""

from __future__ import annotations

import copy
from typing import Any

from cimage_dist.errors import UserError


def apply(document: Any, operations: list[dict[str, Any]], where: str) -> None:
    for operation in operations:
        kind, path = operation.get("op"), operation.get("path", "")
        if kind not in ("add", "replace", "remove"):
            raise UserError(f"{where}: patch operation {kind!r} is not supported; use add, replace or remove.")
        if not path.startswith("/"):
            raise UserError(f"{where}: patch path {path!r} must start with '/'.")
        *parents, last = (part.replace("~1", "/").replace("~0", "~") for part in path[1:].split("/"))
        try:
            target = document
            for part in parents:
                target = target[int(part)] if isinstance(target, list) else target[part]
            _act(target, last, kind, copy.deepcopy(operation.get("value")))
        except (KeyError, IndexError, TypeError, ValueError):
            raise UserError(f"{where}: cannot {kind} {path}: there is no such place.") from None


def _act(target: Any, last: str, kind: str, value: Any) -> None:
    if isinstance(target, list):
        if kind == "add":
            target.insert(len(target) if last == "-" else _index(last, len(target) + 1), value)
        elif kind == "replace":
            target[_index(last, len(target))] = value
        else:
            del target[_index(last, len(target))]
    elif kind == "add":
        target.update({last: value}) if isinstance(target, dict) else _fail()
    elif kind == "replace":
        target[last]  # a missing key is a mistake, not a new one
        target[last] = value
    else:
        del target[last]


def _index(text: str, end: int) -> int:
    if not 0 <= int(text) < end:
        raise IndexError(text)
    return int(text)


def _fail() -> None:
    raise TypeError("not a mapping")
