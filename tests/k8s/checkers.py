"""Everything a manifest is held against: KubeRay's schemas in strict form, the core kinds' schemas, our rules, the real command line."""

from __future__ import annotations

import os
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

from cimage_dist.cli.common import split_settings
from cimage_dist.cli.main import parse
from cimage_dist.deploy.documents import Document, title
from cimage_dist.deploy.entrypoint import entrypoint_problems
from cimage_dist.deploy.rules import problems

ROOT = Path(__file__).parents[2]
SCHEMAS = Path(os.environ.get("CIMAGE_SCHEMAS") or ROOT.parent / "shared" / "schemas") / "kuberay"
KUBERNETES = "1.31"
HAS_SCHEMAS = SCHEMAS.is_dir()
HAS_CORE = find_spec("kubernetes_validate") is not None
NO_SCHEMAS = "KubeRay's CRDs not found: set CIMAGE_SCHEMAS to the folder that holds kuberay/ray.io_rayjobs.yaml"
NO_CORE = "kubernetes-validate is not installed"


def pinned(package: str) -> str:
    return re.search(rf"^{re.escape(package)}==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.M)[1]


def strict(schema: Any) -> Any:
    """A CRD's schema as the API server applies it with strict field validation: unknown fields fail, defaulted ones may be left out."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: {name: strict(part) for name, part in value.items()} if key == "properties" else strict(value) for key, value in schema.items()}
    if made.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
        made["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if isinstance(made.get("properties"), dict):
        if not made.get("x-kubernetes-preserve-unknown-fields"):
            made["additionalProperties"] = False
        if "required" in made:
            made["required"] = [name for name in made["required"] if "default" not in made["properties"].get(name, {})]
    return made


@cache
def crd(plural: str) -> Draft202012Validator:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    document = yaml.load((SCHEMAS / f"ray.io_{plural}.yaml").read_text(), Loader=loader)
    (version,) = [item for item in document["spec"]["versions"] if item["name"] == "v1"]
    schema = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}  # the API server checks names and labels itself
    return Draft202012Validator(schema)


CUSTOM = {"RayJob": "rayjobs", "RayCluster": "rayclusters"}
# Kinds of other operators, whose schemas are not at hand; our tests look at them by eye.
UNCHECKED = {"PodMonitor"}


def schema_problems(documents: list[Document]) -> list[str]:
    found = []
    for document in documents:
        if document.get("kind") in CUSTOM and HAS_SCHEMAS:
            found += [
                f"{title(document)}: {'.'.join(map(str, error.absolute_path))}: {error.message[:200]}"
                for error in crd(CUSTOM[document["kind"]]).iter_errors(document)
            ]
        elif document.get("kind") not in {*CUSTOM, *UNCHECKED} and HAS_CORE:
            import kubernetes_validate

            try:
                kubernetes_validate.validate(document, KUBERNETES, strict=True)
            except kubernetes_validate.ValidationError as error:
                found.append(f"{title(document)}: {'.'.join(map(str, error.path))}: {error.message[:200]}")
    return found


def rule_problems(documents: list[Document]) -> list[str]:
    return problems(documents, pinned("ray"))


def command_problems(documents: list[Document]) -> list[str]:
    return entrypoint_problems(documents, parse, split_settings)


def own_problems(documents: list[Document]) -> list[str]:
    return [*rule_problems(documents), *command_problems(documents)]


def all_problems(documents: list[Document]) -> list[str]:
    return [*schema_problems(documents), *own_problems(documents)]
