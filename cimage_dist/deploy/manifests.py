"""Manifests as plain dictionaries: built by `kubectl kustomize`, read, written, looked into."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from cimage_dist.errors import UserError

Document = dict[str, Any]
GPU = "nvidia.com/gpu"
CHECKOUT = Path(__file__).parents[2] / "k8s"
INSTALLED = Path(sysconfig.get_path("data")) / "share" / "cimage-dist" / "k8s"
_SCALE = {"": 1.0, "m": 1e-3}
_SCALE |= {unit: 1000.0**power for power, unit in enumerate("kMGTPE", 1)}
_SCALE |= {f"{unit}i": 1024.0**power for power, unit in enumerate("KMGTPE", 1)}


class _Dumper(yaml.SafeDumper):
    """Readable output: nothing shared by reference, long texts as blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def parse(text: str) -> list[Document]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return [item for item in yaml.load_all(text, Loader=loader) if item is not None]


def write(documents: Iterable[Document]) -> str:
    return "---\n".join(
        yaml.dump(item, Dumper=_Dumper, sort_keys=False, width=10_000, allow_unicode=True)
        for item in documents
    )


def kubectl(*words: str) -> str:
    """The output of a kubectl command; its own message where it fails."""
    tool = shutil.which("kubectl")
    if tool is None:
        raise UserError(
            "kubectl was not found. Install it (https://kubernetes.io/docs/tasks/tools/), "
            "version 1.27 or newer, and put it on the PATH."
        )
    done = subprocess.run([tool, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"kubectl {words[0]} failed: {done.stderr.strip()}")
    return done.stdout


def build(layers: Sequence[str], namespace: str) -> list[Document]:
    """base with these components of k8s/ on top, in this order, in this namespace."""
    root = CHECKOUT if CHECKOUT.is_dir() else INSTALLED
    missing = [name for name in ("base", *layers) if not (root / name).is_dir()]
    if missing:
        raise UserError(f"{root} has no {' and no '.join(missing)}. Install cimage-dist again.")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        base, *others = (os.path.relpath(root / layer, folder) for layer in ("base", *layers))
        text = {"namespace": namespace, "resources": [base], "components": others}
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(text))
        return parse(kubectl("kustomize", str(folder)))


def of_kind(documents: Iterable[Document], *kinds: str) -> Iterator[Document]:
    return (item for item in documents if item.get("kind") in kinds)


def cluster_spec(document: Document) -> Document:
    """The RayCluster spec of a RayCluster, or inside a RayJob."""
    spec: Document = document["spec"]
    return spec["rayClusterSpec"] if document["kind"] == "RayJob" else spec


def templates(document: Document) -> dict[str, Document]:
    """Pod templates by role: ingest of a Job; head, workers and submitter of a Ray manifest."""
    if document["kind"] == "Job":
        return {"ingest": document["spec"]["template"]}
    spec = cluster_spec(document)
    found = {"head": spec["headGroupSpec"]["template"]}
    (found["worker"],) = (group["template"] for group in spec["workerGroupSpecs"])
    if "submitterPodTemplate" in document["spec"]:
        found["submitter"] = document["spec"]["submitterPodTemplate"]
    return found


def containers(template: Document) -> list[Document]:
    return [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]


def number(quantity: str | int | float) -> float:
    """'500m' is 0.5, '4Gi' is 2^32."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([A-Za-z]*)", str(quantity))
    if match is None or match[2] not in _SCALE:
        raise UserError(f"{quantity!r} is not a Kubernetes quantity such as 500m, 8 or 64Gi.")
    return float(match[1]) * _SCALE[match[2]]


def limit(container: Document, name: str) -> float:
    """What a container may use of a resource, 0 when it does not say."""
    return number(container.get("resources", {}).get("limits", {}).get(name, 0))
