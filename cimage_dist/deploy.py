"""Kubernetes manifests: built by `kubectl kustomize` from k8s/, fitted to a config, checked.

No Ray here. A RayJob (for ingest, a plain Job) for one command; manifests are plain dictionaries.

As a program, what the pods run first: `python -m cimage_dist.deploy s3://bucket/raw data/raw`
copies a folder of an object store. Any address fsspec or pyarrow knows will do (s3://, gs://,
hdfs://, file://); its keys come from the environment. Files that are there already with the same
size are left alone; each is renamed when complete.
"""

from __future__ import annotations

import copy
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import yaml

from cimage_dist.config import Config, fingerprint
from cimage_dist.errors import UserError
from cimage_dist.io.artifacts import TMP_PREFIX

Document = dict[str, Any]
GPU = "nvidia.com/gpu"
CHECKOUT = Path(__file__).parents[1] / "k8s"
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


QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
INSTANCE_LABEL = "app.kubernetes.io/instance"
LONGEST_NAME = 47  # KubeRay adds a suffix to the names of a RayJob's parts
CONFIGS = "/app/configs"


@dataclass(frozen=True)
class Request:
    """What `cimage k8s render` was asked for; of `settings`, `files` are the yaml files."""

    verb: str
    settings: tuple[str, ...]
    files: tuple[str, ...]
    flags: tuple[str, ...] = ()
    overlay: str = "cpu-small"
    components: tuple[str, ...] = ()
    name: str | None = None
    namespace: str = "cimage"
    image: str | None = None
    storage: str | None = None
    fetch: str | None = None
    queue: str | None = None
    retries: int = 0
    cpus_per_pod: int | None = None
    gpus_per_pod: int | None = None
    memory_per_pod: str | None = None


def render(request: Request, cfg: Config) -> list[Document]:
    """The documents to apply; the last one is the job."""
    is_ray, name = request.verb != "ingest", request.name or default_name(request.verb, cfg)
    if len(name) > LONGEST_NAME or not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        raise UserError(
            f"--name: {name!r} must be lower-case letters, digits and '-', beginning with a letter "
            f"(DNS-1035), at most {LONGEST_NAME} characters; it has {len(name)}."
        )
    if is_ray and request.fetch:
        raise UserError("--fetch belongs to the job that reads raw files: cimage k8s render ingest")
    kind = "components/rayjob-pretrain" if is_ray else "components/job-ingest"
    extra = [f"components/{component}" for component in request.components]
    documents = build([f"overlays/{request.overlay}/size", kind, *extra], request.namespace)
    (job,) = of_kind(documents, "RayJob", "Job")
    (budget,) = of_kind(documents, "PodDisruptionBudget")
    documents = [item for item in documents if item not in (job, budget)]
    job["metadata"]["name"] = name
    if is_ray:
        fit(cluster_spec(job), cfg, request)
        job["spec"]["backoffLimit"] = request.retries
        budget["metadata"]["name"] = f"{name}-head"
        budget["spec"]["selector"]["matchLabels"][INSTANCE_LABEL] = name
        documents.append(budget)
    configs = _set_command(job, request)
    if request.fetch:
        _fetch_first(job["spec"]["template"]["spec"], request.fetch)
    for template in templates(job).values():
        template["metadata"]["labels"][INSTANCE_LABEL] = name
        for container in containers(template) if request.image else ():
            container["image"] = request.image
        for volume in template["spec"]["volumes"] if request.storage else ():
            if "persistentVolumeClaim" in volume:
                volume["persistentVolumeClaim"]["claimName"] = request.storage
    _check_image(job)
    if request.queue:
        job["metadata"].setdefault("labels", {})[QUEUE_LABEL] = request.queue
    return [*documents, *configs, job]


def default_name(verb: str, cfg: Config) -> str:
    """The same experiment gets the same name, so applying it twice does not train twice."""
    data = re.sub(r"[^a-z0-9]+", "-", cfg.data.name.lower()).strip("-")[:16].strip("-")
    return f"cimage-{verb}-{data}-{fingerprint(cfg)[:6]}-s{cfg.run.seed}"


def pod_paths(files: Sequence[str]) -> dict[str, str]:
    """Where the pod sees each yaml file: as in a checkout, else configs/ and its bare name."""
    paths = {}
    for file in files:
        is_ours = file.startswith("configs/") and ".." not in Path(file).parts
        paths[file] = file if is_ours else f"configs/{Path(file).name}"
    twice = [file for file in paths if list(paths.values()).count(paths[file]) > 1]
    if twice:
        raise UserError(f"{' and '.join(twice)} have the same name in the pod. Rename one.")
    return paths


def _set_command(job: Document, request: Request) -> list[Document]:
    """Entrypoint or arguments; the ConfigMap of the yaml files, mounted over the image's own."""
    paths, name = pod_paths(request.files), job["metadata"]["name"]
    words = [paths.get(word, word) for word in request.settings]
    if job["kind"] == "Job":
        job["spec"]["template"]["spec"]["containers"][0]["args"] = words
    else:
        job["spec"]["entrypoint"] = shlex.join(["cimage", request.verb, *words, *request.flags])
    if not paths:
        return []
    texts = {path.removeprefix("configs/"): Path(file).read_text() for file, path in paths.items()}
    keys = {path: path.replace("/", ".") for path in sorted(texts)}  # a key cannot contain '/'
    items = [{"key": key, "path": path} for path, key in keys.items()]
    pod = next(iter(templates(job).values()))["spec"]  # ingest, or the head: the driver runs there
    source = {"name": f"{name}-configs", "items": items}
    pod["volumes"].append({"name": "configs", "configMap": source})
    mount = {"name": "configs", "mountPath": CONFIGS, "readOnly": True}
    pod["containers"][0]["volumeMounts"].append(mount)
    metadata = {"name": f"{name}-configs", "namespace": request.namespace}
    data = {key: texts[path] for path, key in keys.items()}
    return [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}]


def fit(spec: Document, cfg: Config, request: Request) -> None:
    """Pod size as asked, replicas from resources.*; refuses what cannot run."""
    (group,) = spec["workerGroupSpecs"]
    container = group["template"]["spec"]["containers"][0]
    wishes = {"cpu": request.cpus_per_pod, "memory": request.memory_per_pod}
    for key, wish in {**wishes, GPU: request.gpus_per_pod}.items():
        if wish is None:
            continue
        if number(wish) <= 0:
            raise UserError(f"A worker pod needs some {key}; got {wish}.")
        if key == GPU and not limit(container, GPU):
            raise UserError(f"--gpus-per-pod: {request.overlay} has no GPUs; use --overlay gpu.")
        for part in ("requests", "limits"):
            container["resources"][part][key] = str(wish)
    res, gpus = cfg.resources, int(limit(container, GPU))
    if res.device == "cuda" and not gpus:
        raise UserError(
            f"resources.device is cuda, but pods of the overlay {request.overlay} have no GPU. "
            "Use --overlay gpu."
        )
    if res.device != "cuda" and gpus:
        raise UserError(
            f"resources.device is {res.device}, but pods of the overlay {request.overlay} have "
            f"{gpus} GPUs. Use --overlay cpu-small or resources.device=cuda."
        )
    per_pod = int(limit(container, "cpu")) // res.cpus_per_worker
    per_pod = min(per_pod, gpus) if gpus else per_pod
    if per_pod < 1:
        raise UserError(
            f"A worker needs {res.cpus_per_worker} CPUs, a pod has {limit(container, 'cpu'):g} "
            "CPUs. Raise --cpus-per-pod or lower resources.cpus_per_worker."
        )
    least = most = math.ceil(res.num_workers / per_pod)
    if spec.get("enableInTreeAutoscaling"):
        if not res.min_workers:
            raise UserError(
                "The overlay gpu-elastic needs a range of workers: give --min-workers "
                "(resources.min_workers) beside resources.num_workers."
            )
        least = math.ceil(res.min_workers / per_pod)
    group.update(replicas=least, minReplicas=least, maxReplicas=most)


def _check_image(job: Document) -> None:
    """Pinned, and with the Ray that the manifest names: driver and workers refuse another."""
    image = containers(next(iter(templates(job).values())))[0]["image"]
    tag = image.rpartition("/")[2].partition(":")[2]
    if "@sha256:" not in image and tag in ("", "latest"):
        raise UserError(f"The image {image!r} is not pinned; give it a tag or a digest.")
    named = re.search(r"ray(\d+\.\d+\.\d+)", tag)
    version = cluster_spec(job)["rayVersion"] if job["kind"] == "RayJob" else None
    if named and version and named[1] != version:
        raise UserError(f"The image {image} holds Ray {named[1]}; this needs Ray {version}.")


def _fetch_first(pod: Document, address: str) -> None:
    """An init container that copies raw files from an object store (components/object-store)."""
    container = copy.deepcopy(pod["containers"][0])
    command = ["python", "-m", "cimage_dist.deploy"]
    container.update(name="fetch", command=command, args=[address, "/storage/data/raw"])
    container["envFrom"] = [{"secretRef": {"name": "cimage-object-store", "optional": True}}]
    pod["initContainers"] = [container]


def fetch(address: str, folder: Path) -> int:
    """Number of files copied now."""
    from cimage_dist.io.storage import open_storage

    try:
        store, root = open_storage(address)
        entries = store.find(root, detail=True)
        if not entries:
            raise FileNotFoundError(f"no file at {root}")
    # every kind of storage has exceptions of its own for a missing bucket, credentials or network
    except Exception as error:
        raise UserError(
            f"{address} cannot be listed: {error} Give a folder such as s3://bucket/raw, and its "
            "keys through the environment."
        ) from None
    copied = 0
    for place, facts in entries.items():
        target = folder / Path(place).relative_to(root)
        if target.is_file() and target.stat().st_size == facts["size"]:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{TMP_PREFIX}{target.name}-{uuid4().hex[:8]}")
        try:
            store.get_file(place, str(part))
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
        copied += 1
    return copied


def main(argv: Sequence[str]) -> int:
    if len(argv) != 2:
        print("usage: python -m cimage_dist.deploy ADDRESS FOLDER", file=sys.stderr)
        return 2
    try:
        print(f"{fetch(argv[0], Path(argv[1]))} files copied to {argv[1]}")
    except UserError as error:
        print(f"fetch: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
