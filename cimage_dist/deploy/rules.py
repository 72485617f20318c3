"""What no schema catches: the rules the KubeRay operator checks, and ours for a careful manifest. Each problem is one sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from cimage_dist.deploy.documents import Document, cluster_spec, of_kind, title
from cimage_dist.deploy.network import network_problems
from cimage_dist.deploy.pods import pod_problems, pods_of

NAME_LENGTH = {"RayJob": 47, "RayCluster": 53}
GROUP_NAME_LENGTH = 53
DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
SUBMISSION_MODES = ("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode")
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"


def problems(documents: Sequence[Document], ray_version: str) -> list[str]:
    """Everything wrong with a set of manifests that are applied together; empty when all is well."""
    found: list[str] = []
    for document in of_kind(documents, "RayJob", "RayCluster"):
        rules = [*_name(document), *_cluster(document, ray_version), *_pods(document, list(documents))]
        rules += _job(document) if document["kind"] == "RayJob" else []
        found += dict.fromkeys(f"{title(document)}: {rule}" for rule in rules)
    for document in of_kind(documents, "PersistentVolumeClaim"):
        is_single_node = document["metadata"].get("labels", {}).get("app.kubernetes.io/component") == "single-node"
        if document["spec"].get("accessModes") != ["ReadWriteMany"] and not is_single_node:
            found.append(f"{title(document)}: accessModes must be [ReadWriteMany]; pods on several nodes write there")
    return found


def name_problem(name: str, longest: int) -> str | None:
    if len(name) > longest:
        return f"the name {name!r} has {len(name)} characters, at most {longest} are allowed"
    return None if DNS_1035.fullmatch(name) else f"the name {name!r} must be lower-case letters, digits and '-', beginning with a letter (DNS-1035)"


def _name(document: Document) -> Iterator[str]:
    problem = name_problem(document["metadata"]["name"], NAME_LENGTH[document["kind"]])
    if problem:
        yield problem
    if document["kind"] == "RayCluster" and document["spec"].get("suspend") and QUEUE_LABEL not in document["metadata"].get("labels", {}):
        yield "suspended, and no queue will wake it"


def _cluster(document: Document, ray_version: str) -> Iterator[str]:
    spec = cluster_spec(document)
    if spec.get("rayVersion") != ray_version:
        yield f"rayVersion {spec.get('rayVersion')} differs from the package's Ray {ray_version}"
    for pod in pods_of(document):
        for container in pod.every_container:
            named = re.search(r"ray(\d+\.\d+\.\d+)", container.get("image", "").rpartition(":")[2])
            if named and named[1] != spec.get("rayVersion"):
                yield f"{pod.where}: image {container['image']} holds Ray {named[1]}, rayVersion says {spec.get('rayVersion')}"
    if spec.get("authOptions", {}).get("mode") != "token":
        yield "authOptions.mode must be token: without it whoever reaches the dashboard runs code"
    if "gcsFaultToleranceOptions" in spec:
        yield "gcsFaultToleranceOptions is meant for serving; training relies on checkpoints"
    names = [group.get("groupName", "") for group in spec.get("workerGroupSpecs") or []]
    if not names:
        yield "no worker group, and the head does not train"
    if len(set(names)) < len(names):
        yield f"worker groups share a name: {', '.join(names)}"
    for group in spec.get("workerGroupSpecs") or []:
        yield from _group(group, bool(spec.get("enableInTreeAutoscaling")))


def _group(group: Document, is_autoscaling: bool) -> Iterator[str]:
    problem = name_problem(group.get("groupName", ""), GROUP_NAME_LENGTH)
    if problem:
        yield f"worker group: {problem}"
    low, now, high = (group.get(key, 0) for key in ("minReplicas", "replicas", "maxReplicas"))
    if not low <= now <= high:
        yield f"worker group {group.get('groupName')}: minReplicas {low} <= replicas {now} <= maxReplicas {high} does not hold"
    if high < 1:
        yield f"worker group {group.get('groupName')}: maxReplicas must be at least 1"
    if not is_autoscaling and low != high:
        yield f"worker group {group.get('groupName')}: minReplicas {low} differs from maxReplicas {high}, but the autoscaler is off"


def _job(document: Document) -> Iterator[str]:
    spec = document["spec"]
    mode = spec.get("submissionMode", "K8sJobMode")
    if mode not in SUBMISSION_MODES:
        yield f"submissionMode {mode!r} is none of {', '.join(SUBMISSION_MODES)}"
    if mode == "SidecarMode":
        for field in ("clusterSelector", "submitterPodTemplate", "submitterConfig"):
            if field in spec:
                yield f"{field} cannot be given in SidecarMode"
    if spec.get("shutdownAfterJobFinishes") is not True:
        uses = [use for use, is_used in (("suspend", spec.get("suspend")), ("Kueue", QUEUE_LABEL in document["metadata"].get("labels", {}))) if is_used]
        yield f"shutdownAfterJobFinishes must be true{' (' + ' and '.join(uses) + ' cannot do without)' if uses else ', or the pods stay for ever'}"
    for field in ("ttlSecondsAfterFinished", "activeDeadlineSeconds", "preRunningDeadlineSeconds", "backoffLimit"):
        if field not in spec:
            yield f"{field} is missing"
    if mode == "K8sJobMode" and spec.get("submitterPodTemplate", {}).get("spec", {}).get("restartPolicy") not in ("Never", "OnFailure"):
        yield "submitterPodTemplate.spec.restartPolicy must be Never or OnFailure, as for every Kubernetes Job"


def _pods(document: Document, documents: list[Document]) -> Iterator[str]:
    is_autoscaling = bool(cluster_spec(document).get("enableInTreeAutoscaling"))
    pods = list(pods_of(document))
    if document["kind"] == "RayJob" and document["spec"].get("submissionMode", "K8sJobMode") == "K8sJobMode" and pods[-1].role != "submitter":
        yield "submitterPodTemplate is missing, so the submitter would run without our security settings"
    for pod in pods:
        yield from pod_problems(pod, is_autoscaling)
    yield from network_problems(documents, {pod.role: pod.labels for pod in pods}, is_autoscaling)
