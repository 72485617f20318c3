"""The part of kustomize that k8s/ uses, so that rendering needs no binary: resources, components, JSON patches, replacements, namespace.

Any other field is refused, never skipped. The tests compare the result with the real kustomize where there is one.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cimage_dist.deploy import jsonpatch
from cimage_dist.deploy.documents import Document, parse, read
from cimage_dist.errors import UserError

FILE = "kustomization.yaml"
# A document so marked feeds replacements and is left out of the result.
LOCAL_ONLY = "config.kubernetes.io/local-config"
CLUSTER_WIDE = ("Namespace",)
_FIELDS = {"apiVersion", "kind", "namespace", "resources", "components", "patches", "replacements"}


def build(folder: Path) -> list[Document]:
    """The documents that `kubectl apply -k folder` would send."""
    documents = _accumulate(folder, [])
    return [item for item in documents if item["metadata"].get("annotations", {}).get(LOCAL_ONLY) != "true"]


def _accumulate(folder: Path, above: list[Document]) -> list[Document]:
    """What a folder makes of the documents it is given: a component sees those above it, a kustomization starts afresh."""
    path = folder / FILE
    if not path.is_file():
        raise UserError(f"{folder} has no {FILE}.")
    (layer,) = read(path)
    _only(layer, _FIELDS, str(path))
    documents = list(above) if layer["kind"] == "Component" else []
    for name in layer.get("resources", ()):
        entry = folder / name
        documents += _accumulate(entry, []) if entry.is_dir() else read(entry)
    for name in layer.get("components", ()):
        documents = _accumulate(folder / name, documents)
    for patch in layer.get("patches", ()):
        _patch(documents, patch, folder)
    for document in documents:
        if "namespace" in layer and document["kind"] not in CLUSTER_WIDE:
            document["metadata"]["namespace"] = layer["namespace"]
    for replacement in layer.get("replacements", ()):
        _replace(documents, replacement, str(path))
    return documents


def _only(given: dict[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(set(given) - known)
    if unknown:
        raise UserError(f"{where}: {', '.join(unknown)} not supported by our renderer (it knows {', '.join(sorted(known))}).")


def _select(documents: list[Document], target: dict[str, Any], where: str) -> Iterator[Document]:
    """Documents whose kind, name and API group match; kind may be a regular expression, as in kustomize."""
    _only(target, {"kind", "name", "group"}, where)
    for document in documents:
        group = document["apiVersion"].rpartition("/")[0]
        if (
            re.fullmatch(target.get("kind", ".*"), document["kind"])
            and target.get("name", document["metadata"]["name"]) == document["metadata"]["name"]
            and target.get("group", group) == group
        ):
            yield document


def _patch(documents: list[Document], patch: dict[str, Any], folder: Path) -> None:
    where = str(folder / patch.get("path", FILE))
    _only(patch, {"path", "patch", "target", "options"}, where)
    operations = read(folder / patch["path"])[0] if "path" in patch else parse(patch["patch"])
    if not isinstance(operations, list) or "target" not in patch:
        raise UserError(f"{where}: only JSON patches with a target are supported.")
    for document in _select(documents, patch["target"], where):
        before = document["metadata"]["name"]
        jsonpatch.apply(document, operations, where)
        if before != document["metadata"]["name"] and not patch.get("options", {}).get("allowNameChange"):
            raise UserError(f"{where}: the patch changes a name; kustomize wants options: {{allowNameChange: true}} for that.")


def _replace(documents: list[Document], replacement: dict[str, Any], where: str) -> None:
    _only(replacement, {"source", "targets"}, where)
    source = dict(replacement["source"])
    path = source.pop("fieldPath")
    found = list(_select(documents, source, where))
    if len(found) != 1:
        raise UserError(f"{where}: {len(found)} documents match the replacement source {source}; one is needed.")
    value: Any = found[0]
    for part in path.split("."):
        value = value[int(part)] if isinstance(value, list) else value[part]
    for target in replacement["targets"]:
        _only(target, {"select", "fieldPaths", "options"}, where)
        for document in _select(documents, target["select"], where):
            for field in target["fieldPaths"]:
                *parents, last = field.split(".")
                place: Any = document
                for part in parents:
                    place = place[int(part)] if isinstance(place, list) else place[part]
                if last not in place and not target.get("options", {}).get("create"):
                    raise UserError(f"{where}: {field} is not there to be replaced; kustomize wants options: {{create: true}} for that.")
                place[last] = copy.deepcopy(value)
