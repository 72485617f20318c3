"""The pods a Ray manifest makes, and what each of them must look like."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cimage_dist.deploy.documents import Document, cluster_spec
from cimage_dist.deploy.quantities import number

GPU = "nvidia.com/gpu"


@dataclass(frozen=True)
class Pod:
    """A pod template with the role it plays: head, worker or submitter."""

    role: str
    where: str
    template: Document

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.template.get("metadata", {}).get("labels", {}))

    @property
    def spec(self) -> Document:
        return self.template.get("spec") or {}

    @property
    def containers(self) -> list[Document]:
        return self.spec.get("containers") or []

    @property
    def every_container(self) -> list[Document]:
        return [*(self.spec.get("initContainers") or []), *self.containers]


def pods_of(document: Document) -> Iterator[Pod]:
    """Head, one per worker group, and the submitter where it is spelled out."""
    spec = cluster_spec(document)
    yield Pod("head", "headGroupSpec", spec.get("headGroupSpec", {}).get("template") or {})
    for group in spec.get("workerGroupSpecs") or []:
        yield Pod("worker", f"worker group {group.get('groupName')}", group.get("template") or {})
    submitter = document["spec"].get("submitterPodTemplate") if document["kind"] == "RayJob" else None
    if submitter is not None:
        yield Pod("submitter", "submitterPodTemplate", submitter)


def limit(container: Document, name: str) -> float:
    """What a container may use of a resource, 0 when it does not say."""
    return number(container.get("resources", {}).get("limits", {}).get(name, 0))


def pod_problems(pod: Pod, is_autoscaling: bool) -> Iterator[str]:
    spec, security = pod.spec, pod.spec.get("securityContext") or {}
    if not pod.containers:
        yield f"{pod.where}: no container; KubeRay needs one, the first is the Ray container"
    if security.get("runAsNonRoot") is not True:
        yield f"{pod.where}: securityContext.runAsNonRoot must be true"
    if security.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield f"{pod.where}: securityContext.seccompProfile.type must be RuntimeDefault"
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(field):
            yield f"{pod.where}: {field} must not be set"
    needs_api = pod.role == "head" and is_autoscaling
    if spec.get("automountServiceAccountToken") is not needs_api:
        yield f"{pod.where}: automountServiceAccountToken must be {str(needs_api).lower()}: {'the autoscaler asks' if needs_api else 'nothing here asks'} the API server"
    if not spec.get("serviceAccountName"):
        yield f"{pod.where}: serviceAccountName is missing, so the namespace's default account would be used"
    if pod.role != "submitter" and spec.get("terminationGracePeriodSeconds", 30) < 60:
        yield f"{pod.where}: terminationGracePeriodSeconds must be at least 60, long enough to finish a checkpoint"
    if pod.role == "worker" and any(limit(container, GPU) for container in pod.containers):
        if not any(item.get("key") == GPU for item in spec.get("tolerations") or []):
            yield f"{pod.where}: asks for GPUs without a toleration for {GPU}"
        if not spec.get("affinity", {}).get("nodeAffinity"):
            yield f"{pod.where}: asks for GPUs without a node affinity"
    for container in pod.every_container:
        yield from (f"{pod.where}, container {container.get('name')}: {problem}" for problem in _container_problems(container, spec))


def _container_problems(container: Document, spec: Document) -> Iterator[str]:
    security = container.get("securityContext") or {}
    if security.get("privileged"):
        yield "privileged"
    if security.get("allowPrivilegeEscalation") is not False:
        yield "securityContext.allowPrivilegeEscalation must be false"
    if security.get("readOnlyRootFilesystem") is not True:
        yield "securityContext.readOnlyRootFilesystem must be true"
    if "ALL" not in security.get("capabilities", {}).get("drop", []) or security.get("capabilities", {}).get("add"):
        yield "securityContext.capabilities must drop ALL and add none"
    if security.get("runAsNonRoot") is False or security.get("runAsUser") == 0:
        yield "runs as root"
    resources = container.get("resources") or {}
    for name in ("memory", "cpu"):
        wanted, most = (resources.get(part, {}).get(name) for part in ("requests", "limits"))
        if wanted is None or wanted != most:
            yield f"{name} requests and limits must be given and equal; got {wanted} and {most}"
    yield from _image_problems(container.get("image", ""))
    volumes = {volume["name"] for volume in spec.get("volumes") or []}
    mounts: list[Any] = container.get("volumeMounts") or []
    for mount in mounts:
        if mount["name"] not in volumes:
            yield f"mounts {mount['name']}, which is not among the pod's volumes"
    if "/tmp" not in {mount["mountPath"] for mount in mounts}:
        yield "has a read-only root but no writable /tmp"


def _image_problems(image: str) -> Iterator[str]:
    tag = image.rpartition("/")[2].partition(":")[2]
    if "@sha256:" not in image and tag in ("", "latest"):
        yield f"image {image!r} is not pinned; give it a tag or a digest"
