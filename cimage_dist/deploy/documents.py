"""Manifests as plain dictionaries: read from and written to yaml."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from cimage_dist.errors import UserError

Document = dict[str, Any]
# The C parser where PyYAML has it: ten times faster.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Dumper(yaml.SafeDumper):
    """Readable output: nothing shared by reference, long texts as blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def read(path: Path) -> list[Document]:
    """Every document of a file that is not empty."""
    try:
        return [item for item in yaml.load_all(path.read_text(), Loader=_Loader) if item is not None]
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read as yaml: {' '.join(str(error).split())}") from None


def parse(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)


def write(documents: Iterable[Document]) -> str:
    return "---\n".join(yaml.dump(item, Dumper=_Dumper, sort_keys=False, width=10_000, allow_unicode=True) for item in documents)


def of_kind(documents: Iterable[Document], *kinds: str) -> Iterator[Document]:
    return (item for item in documents if item.get("kind") in kinds)


def title(document: Document) -> str:
    """Kind and name, for messages."""
    return f"{document.get('kind', 'a document without kind')} {document.get('metadata', {}).get('name', 'without name')}"


def cluster_spec(document: Document) -> Document:
    """The RayCluster spec of a RayCluster, or inside a RayJob; empty when there is none."""
    spec = document.get("spec") or {}
    return (spec.get("rayClusterSpec") or {}) if document.get("kind") == "RayJob" else spec
