"""What a manifest is checked against: KubeRay's schemas, those of the core kinds, our rules."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from cimage_dist.deploy import (
    GPU,
    Document,
    cluster_spec,
    containers,
    kubectl,
    of_kind,
    parse,
    templates,
)
from tests.k8s.network import network_problems

ROOT = Path(__file__).parents[2]
SCHEMAS = Path(os.environ.get("CIMAGE_SCHEMAS") or ROOT.parent / "shared" / "schemas") / "kuberay"
KUBERNETES = "1.31"
HAS_SCHEMAS = SCHEMAS.is_dir()
HAS_CORE = find_spec("kubernetes_validate") is not None
NO_SCHEMAS = "KubeRay's CRDs not found: CIMAGE_SCHEMAS names the folder with kuberay/ray.io_*.yaml"
NO_CORE = "kubernetes-validate is not installed"
needs_kubectl = pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed")
needs_schemas = pytest.mark.skipif(not HAS_SCHEMAS, reason=NO_SCHEMAS)
needs_core = pytest.mark.skipif(not HAS_CORE, reason=NO_CORE)


def pinned(package: str) -> str:
    return re.search(
        rf"^{re.escape(package)}==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.M
    )[1]


def strict(schema: Any) -> Any:
    """A CRD's schema as with strict field validation: unknown fields fail, defaulted may lack."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {
        key: {name: strict(part) for name, part in value.items()}
        if key == "properties"
        else strict(value)
        for key, value in schema.items()
    }
    if made.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
        made["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if isinstance(made.get("properties"), dict):
        if not made.get("x-kubernetes-preserve-unknown-fields"):
            made["additionalProperties"] = False
        if "required" in made:
            made["required"] = [
                name
                for name in made["required"]
                if "default" not in made["properties"].get(name, {})
            ]
    return made


@cache
def crd(plural: str) -> Draft202012Validator:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    document = yaml.load((SCHEMAS / f"ray.io_{plural}.yaml").read_text(), Loader=loader)
    (version,) = [item for item in document["spec"]["versions"] if item["name"] == "v1"]
    schema = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {
        "type": "object"
    }  # the API server checks names and labels itself
    return Draft202012Validator(schema)


CUSTOM = {"RayJob": "rayjobs", "RayCluster": "rayclusters"}
# Kinds of other operators, whose schemas are not at hand.
UNCHECKED = {"PodMonitor"}


def where(path: Any) -> str:
    return ".".join(map(str, path))


def schema_problems(documents: list[Document]) -> list[str]:
    found = []
    for document in documents:
        if document.get("kind") in CUSTOM and HAS_SCHEMAS:
            found += [
                f"RayJob or RayCluster: {where(error.absolute_path)}: {error.message[:200]}"
                for error in crd(CUSTOM[document["kind"]]).iter_errors(document)
            ]
        elif document.get("kind") not in {*CUSTOM, *UNCHECKED} and HAS_CORE:
            import kubernetes_validate

            try:
                kubernetes_validate.validate(document, KUBERNETES, strict=True)
            except kubernetes_validate.ValidationError as error:
                found.append(
                    f"{document['kind']}: {'.'.join(map(str, error.path))}: {error.message[:200]}"
                )
    return found


def overlays() -> list[Path]:
    """Every folder that is applied by itself."""
    leaves = [path for path in (ROOT / "k8s" / "overlays").glob("*/*") if path.name != "size"]
    return [*sorted((ROOT / "k8s" / "setup").iterdir()), *sorted(leaves)]


@cache
def _built(folder: Path) -> str:
    return kubectl("kustomize", str(folder))


def built(folder: Path) -> list[Document]:
    return parse(_built(folder))


def workload(documents: list[Document]) -> Document:
    (found,) = of_kind(documents, "RayJob", "RayCluster", "Job")
    return found


def rule_problems(documents: list[Document]) -> list[str]:
    """What no schema catches: Ray's version, the token, volumes, limits, who reaches whom."""
    document = workload(documents)
    found, pods = [], templates(document)
    if document["kind"] != "Job":
        spec = cluster_spec(document)
        if spec["rayVersion"] != pinned("ray"):
            found.append(f"rayVersion {spec['rayVersion']} differs from the package's Ray")
        if spec.get("authOptions", {}).get("mode") != "token":
            found.append("authOptions.mode must be token: the dashboard runs anybody's code")
        (group,) = spec["workerGroupSpecs"]
        low, now, high = (group[key] for key in ("minReplicas", "replicas", "maxReplicas"))
        if not low <= now <= high or (low != high and not spec["enableInTreeAutoscaling"]):
            found.append(f"replicas {low}, {now}, {high} do not fit together")
    if len({container["image"] for pod in pods.values() for container in containers(pod)}) != 1:
        found.append("several images")
    for role, pod in pods.items():
        found += [f"{role}: {problem}" for problem in pod_problems(pod["spec"])]
    labels = {role: pod["metadata"]["labels"] for role, pod in pods.items()}
    is_elastic = document["kind"] != "Job" and cluster_spec(document)["enableInTreeAutoscaling"]
    return [*found, *network_problems(documents, labels, is_elastic)]


def pod_problems(spec: Document) -> Iterator[str]:
    if spec.get("automountServiceAccountToken") is not False:
        yield "automountServiceAccountToken must be false"
    for volume in spec["volumes"]:
        if "emptyDir" in volume and not volume["emptyDir"].get("sizeLimit"):
            yield f"the emptyDir {volume['name']} has no sizeLimit"
    names = {volume["name"] for volume in spec["volumes"]}
    for container in containers({"spec": spec}):
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        if mounts - names:
            yield f"mounts {', '.join(mounts - names)}, which is not among the pod's volumes"
        if "api-token" in mounts:
            yield f"the container {container['name']} has the API token"
        if (
            container["resources"]["requests"]["memory"]
            != container["resources"]["limits"]["memory"]
        ):
            yield f"memory requests and limits of {container['name']} differ"
        if container["resources"]["limits"].get(GPU) and not any(
            item["key"] == GPU for item in spec.get("tolerations", [])
        ):
            yield "asks for GPUs without a toleration"


def all_problems(documents: list[Document]) -> list[str]:
    return [*schema_problems(documents), *rule_problems(documents)]
