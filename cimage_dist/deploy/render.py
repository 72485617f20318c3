"""A RayJob for one command: the rendered overlay, fitted to the config that the command loads.

The starting point is k8s/rendered/<overlay>-rayjob-<verb>.yaml, the very file that `kubectl apply -f` takes, so kustomize users and others run the same
thing. In a checkout it is read from k8s/, in an installation from the package's data files.
"""

from __future__ import annotations

import copy
import math
import re
import shlex
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cimage_dist.config import Config, fingerprint
from cimage_dist.deploy.documents import Document, cluster_spec, of_kind, read
from cimage_dist.deploy.entrypoint import workers_per_pod
from cimage_dist.deploy.pods import GPU, limit, pods_of
from cimage_dist.deploy.quantities import number
from cimage_dist.deploy.rules import NAME_LENGTH, QUEUE_LABEL, name_problem
from cimage_dist.errors import UserError

OVERLAYS = ("cpu-small", "gpu", "gpu-elastic")
VERBS = ("pretrain", "embed", "evaluate", "sweep")
CHECKOUT = Path(__file__).parents[2] / "k8s" / "rendered"
INSTALLED = Path(sysconfig.get_path("data")) / "share" / "cimage-dist" / "k8s"


@dataclass(frozen=True)
class Request:
    """What `cimage k8s render` was asked for. `words`: verb, settings and flags; `settings` among them, and of these the yaml `files`."""

    words: tuple[str, ...]
    settings: tuple[str, ...]
    files: tuple[str, ...]
    overlay: str = "cpu-small"
    name: str | None = None
    namespace: str | None = None
    image: str | None = None
    storage: str | None = None
    fetch: str | None = None
    queue: str | None = None
    cpus_per_pod: int | None = None
    gpus_per_pod: int | None = None
    memory_per_pod: str | None = None


def rendered_file(name: str) -> Path:
    for folder in (CHECKOUT, INSTALLED):
        if (folder / name).is_file():
            return folder / name
    raise UserError(f"{name} is neither in {CHECKOUT} nor in {INSTALLED}. Install cimage-dist again, or run `make k8s` in a checkout.")


def render(request: Request, cfg: Config) -> list[Document]:
    """The documents to apply: accounts, config, network rules, RayJob."""
    verb = request.words[0]
    documents = read(rendered_file(f"{request.overlay}-rayjob-{'sweep' if verb == 'sweep' else 'pretrain'}.yaml"))
    (job,) = of_kind(documents, "RayJob")
    name = request.name or default_name(verb, cfg)
    problem = name_problem(name, NAME_LENGTH["RayJob"])
    if problem:
        raise UserError(f"--name: {problem}.")
    job["metadata"]["name"] = name
    _fit(cluster_spec(job), cfg, request)
    _configure(documents, job, request)
    for pod in pods_of(job):
        for container in pod.every_container if request.image else ():
            container["image"] = request.image
        for volume in pod.spec["volumes"]:
            if "persistentVolumeClaim" in volume and request.storage:
                volume["persistentVolumeClaim"]["claimName"] = request.storage
    if request.fetch:
        _fetch_first(cluster_spec(job)["headGroupSpec"]["template"]["spec"], request.fetch)
    if request.queue:
        job["metadata"].setdefault("labels", {})[QUEUE_LABEL] = request.queue
    for document in documents:
        document["metadata"]["namespace"] = request.namespace or document["metadata"]["namespace"]
    return documents


def default_name(verb: str, cfg: Config) -> str:
    """The same experiment gets the same name, so applying it twice does not train twice."""
    dataset = re.sub(r"[^a-z0-9]+", "-", cfg.data.name.lower()).strip("-")[:16].strip("-")
    return f"cimage-{verb}-{dataset}-{fingerprint(cfg)[:6]}-s{cfg.run.seed}"


def pod_paths(files: Sequence[str]) -> dict[str, str]:
    """Where each yaml file is seen in the pod: below configs/ as in a checkout, by its bare name if it comes from elsewhere."""
    paths = {file: file if file.startswith("configs/") and ".." not in Path(file).parts else f"configs/{Path(file).name}" for file in files}
    twice = [file for file in paths if list(paths.values()).count(paths[file]) > 1]
    if twice:
        raise UserError(f"{' and '.join(twice)} would have the same name in the pod. Rename one.")
    return paths


def _configure(documents: list[Document], job: Document, request: Request) -> None:
    """Entrypoint, staging command and ConfigMap from the given files."""
    paths = pod_paths(request.files)
    words = [paths.get(word, word) for word in request.words]
    job["spec"]["entrypoint"] = shlex.join(["cimage", *words])
    head = cluster_spec(job)["headGroupSpec"]["template"]["spec"]
    settings = [paths.get(word, word) for word in request.settings]
    if request.words[0] == "sweep":  # its space and its own keys say nothing about the data
        settings = [word for word in settings if word != paths[request.files[0]] and not word.startswith("sweep.")]
    (stage,) = [item for item in head["initContainers"] if item["name"] == "stage"]
    stage["args"] = settings
    (configs,) = of_kind(documents, "ConfigMap")
    configs["metadata"]["name"] = f"{job['metadata']['name']}-configs"
    config_map, items = config_entries({path: Path(file).read_text() for file, path in paths.items()})
    configs["data"] = config_map
    (volume,) = [item["configMap"] for item in head["volumes"] if "configMap" in item]
    volume.update(name=configs["metadata"]["name"], items=items)


def config_entries(texts: dict[str, str]) -> tuple[dict[str, str], list[dict[str, str]]]:
    """ConfigMap data and volume items for files named configs/...: keys cannot hold '/', paths can."""
    inside = {path.removeprefix("configs/"): text for path, text in sorted(texts.items())}
    return {path.replace("/", "."): text for path, text in inside.items()}, [{"key": path.replace("/", "."), "path": path} for path in inside]


def _fit(spec: Document, cfg: Config, request: Request) -> None:
    """Pod size as asked, replicas from resources.num_workers and min_workers; impossible wishes are refused."""
    (group,) = spec["workerGroupSpecs"]
    container = group["template"]["spec"]["containers"][0]
    for key, wish in (("cpu", request.cpus_per_pod), ("memory", request.memory_per_pod), (GPU, request.gpus_per_pod)):
        if wish is None:
            continue
        if number(wish) <= 0:
            raise UserError(f"A worker pod needs some {key}; got {wish}.")
        if key == GPU and not limit(container, GPU):
            raise UserError(f"--gpus-per-pod: the overlay {request.overlay} has no GPUs; use --overlay gpu.")
        for part in ("requests", "limits"):
            container["resources"][part][key] = str(wish)
    res = cfg.resources
    gpus = int(limit(container, GPU))
    if res.device == "cuda" and not gpus:
        raise UserError(f"resources.device is cuda, but pods of the overlay {request.overlay} have no GPU. Use --overlay gpu.")
    if res.device == "cpu" and gpus:
        raise UserError(
            f"resources.device is cpu, but pods of the overlay {request.overlay} have {gpus} GPUs. Use --overlay cpu-small or resources.device=cuda."
        )
    per_pod = workers_per_pod(cfg, container)
    if per_pod < 1:
        needs = f"{res.cpus_per_worker} CPUs{' and 1 GPU' if gpus else ''}"
        raise UserError(
            f"A worker needs {needs}, a pod has {limit(container, 'cpu'):g} CPUs{f' and {gpus} GPUs' if gpus else ''}. Raise --cpus-per-pod or lower resources.cpus_per_worker."
        )
    most = math.ceil(res.num_workers / per_pod)
    least = most
    if spec.get("enableInTreeAutoscaling"):
        if not res.min_workers:
            raise UserError("The overlay gpu-elastic needs a range of workers: give --min-workers (resources.min_workers) beside resources.num_workers.")
        least = math.ceil(res.min_workers / per_pod)
    group.update(replicas=least, minReplicas=least, maxReplicas=most)


def _fetch_first(head: Document, address: str) -> None:
    """An init container before staging that copies raw files from an object store; see k8s/components/object-store."""
    container: dict[str, Any] = copy.deepcopy(next(item for item in head["initContainers"] if item["name"] == "stage"))
    container.update(name="fetch", command=["python", "-m", "cimage_dist.deploy.fetch"], args=[address, "/storage/data/raw"])
    container["envFrom"] = [{"secretRef": {"name": "cimage-object-store", "optional": True}}]
    head["initContainers"].insert(0, container)
