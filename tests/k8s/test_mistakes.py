"""Deliberate mistakes in a manifest that is right: each is found, and the message names it."""

from __future__ import annotations

import copy
import re

import pytest

from cimage_dist.deploy import of_kind
from tests.k8s.checkers import (
    ROOT,
    built,
    needs_core,
    needs_kubectl,
    needs_schemas,
    rule_problems,
    schema_problems,
)

pytestmark = needs_kubectl
JOB = "RayJob"
SPEC = "/spec/rayClusterSpec"
HEAD = f"{SPEC}/headGroupSpec/template/spec"
GROUP = f"{SPEC}/workerGroupSpecs/0"
WORKER = f"{GROUP}/template/spec"
GONE = object()


def put(path, value):
    return path, value


def drop(path):
    return path, GONE


def broken(right, kind_or_name, change):
    """A copy of the documents with one field set or removed."""
    documents = copy.deepcopy(right)
    name = RAY if kind_or_name == "NetworkPolicy" else kind_or_name
    place = next(item for item in documents if name in (item["kind"], item["metadata"]["name"]))
    path, value = change
    *parents, last = path[1:].split("/")
    for part in parents:
        place = place[int(part)] if isinstance(place, list) else place[part]
    last = int(last) if isinstance(place, list) else last
    if value is GONE:
        del place[last]
    else:
        place[last] = value
    assert documents != right
    return documents


# what is wrong: (where, change, the message)
BY_SCHEMA = {
    "typo in a field": (
        JOB,
        put("/spec/shutdownAfterJobFinish", True),
        r"'shutdownAfterJobFinish' was unexpected",
    ),
    "typo inside a container": (
        JOB,
        put(f"{WORKER}/containers/0/resource", {}),
        r"containers\.0: .*'resource' was unexpected",
    ),
    "text instead of a number": (
        JOB,
        put("/spec/backoffLimit", "two"),
        r"backoffLimit: 'two' is not of type 'integer'",
    ),
    "number instead of text": (
        JOB,
        put("/spec/rayClusterSpec/headGroupSpec/rayStartParams/num-cpus", 0),
        r"num-cpus: 0 is not of type 'string'",
    ),
    "unknown authentication": (
        JOB,
        put("/spec/rayClusterSpec/authOptions/mode", "password"),
        r"mode: 'password' is not one of",
    ),
}
BY_CORE_SCHEMA = {
    "typo in a network rule": (
        "NetworkPolicy",
        put("/spec/policyType", ["Egress"]),
        r"NetworkPolicy.*policyType",
    ),
    "a port as a list": (
        "NetworkPolicy",
        put("/spec/ingress/1/ports", 8265),
        r"NetworkPolicy.*ports",
    ),
    "a budget in words": ("PodDisruptionBudget", put("/spec/minAvailable", []), r"minAvailable"),
}
BY_RULES = {
    "min above max": (JOB, put(f"{GROUP}/minReplicas", 9), r"replicas 9, 2, 8"),
    "no autoscaler": (JOB, put(f"{SPEC}/enableInTreeAutoscaling", False), r"replicas 2, 2, 8"),
    "another Ray": (JOB, put(f"{SPEC}/rayVersion", "2.59.0"), r"rayVersion 2\.59\.0 differs"),
    "another image": (JOB, put(f"{WORKER}/containers/0/image", "x:1"), r"several images"),
    "no authentication": (JOB, put(f"{SPEC}/authOptions/mode", "disabled"), r"must be token"),
    "a token": (JOB, put(f"{WORKER}/automountServiceAccountToken", True), r"worker: automount"),
    "a token on the head": (
        JOB,
        put(f"{HEAD}/containers/0/volumeMounts/0/name", "api-token"),
        r"ray-head has the API token",
    ),
    "memory limit above request": (
        JOB,
        put(f"{WORKER}/containers/0/resources/limits/memory", "800Gi"),
        r"memory requests and limits of ray-worker differ",
    ),
    "no toleration": (JOB, drop(f"{WORKER}/tolerations"), r"GPUs without a toleration"),
    "mount without a volume": (JOB, drop(f"{WORKER}/volumes/2"), r"mounts storage, which is not"),
    "an unlimited disk": (JOB, put(f"{WORKER}/volumes/0/emptyDir", {}), r"tmp has no sizeLimit"),
}
RAY, SUBMIT, SCALER = "cimage-ray", "cimage-submitter", "cimage-autoscaler"
BY_NETWORK = {
    "pods among themselves, in": (
        RAY,
        drop("/spec/ingress/0"),
        r"the head cannot reach the worker on every port",
    ),
    "pods among themselves, out": (
        RAY,
        drop("/spec/egress/0"),
        r"the worker cannot reach the head on every port",
    ),
    "pods among themselves, one port": (
        RAY,
        put("/spec/ingress/0/ports", [{"port": 6379}]),
        r"the worker cannot reach the worker on every port",
    ),
    "operator": (
        RAY,
        drop("/spec/ingress/1/from/0"),
        r"the KubeRay operator \(Helm\) cannot reach the head on 8265",
    ),
    "operator of this namespace only": (
        RAY,
        drop("/spec/ingress/1/from/0/namespaceSelector"),
        r"the KubeRay operator \(kustomize\) cannot reach",
    ),
    "submitter, in": (
        RAY,
        drop("/spec/ingress/1/from/1"),
        r"the submitter cannot reach the head on 8265",
    ),
    "submitter, out": (
        SUBMIT,
        drop("/spec/egress/1"),
        r"the submitter cannot reach the head on 8265",
    ),
    "Prometheus": (RAY, drop("/spec/ingress/2"), r"Prometheus cannot reach the worker on 8080"),
    "DNS": (RAY, drop("/spec/egress/1"), r"the head cannot reach DNS"),
    "DNS over UDP": (
        RAY,
        drop("/spec/egress/1/ports/0"),
        r"the worker cannot reach DNS on 53, UDP and TCP",
    ),
    "DNS of the submitter": (SUBMIT, drop("/spec/egress/0"), r"the submitter cannot reach DNS"),
    "storage": (RAY, drop("/spec/egress/2"), r"the worker cannot reach storage on 443"),
    "API server": (SCALER, drop("/spec/egress/0/ports/1"), r"the head cannot reach the API server"),
    "metadata service": (
        RAY,
        drop("/spec/egress/2/to/0/ipBlock/except"),
        r"can reach the cloud's metadata service",
    ),
    "open dashboard": (
        RAY,
        put("/spec/ingress/1/from", [{"namespaceSelector": {}}]),
        r"a pod of another namespace can reach the head",
    ),
    "policy that selects nothing": (
        RAY,
        put("/spec/podSelector", {"matchLabels": {"app": "typo"}}),
        r"another pod of the namespace can reach the worker; no policy selects it",
    ),
}


@pytest.fixture(scope="module")
def right():
    return built(ROOT / "k8s" / "overlays" / "gpu-elastic" / "rayjob-pretrain")


def found(problems, message):
    assert any(re.search(message, problem) for problem in problems), problems


@needs_schemas
@pytest.mark.parametrize(("kind", "change", "message"), BY_SCHEMA.values(), ids=BY_SCHEMA)
def test_found_by_kuberays_schema(right, kind, change, message):
    found(schema_problems(list(of_kind(broken(right, kind, change), JOB))), message)


@needs_core
@pytest.mark.parametrize(("kind", "change", "message"), BY_CORE_SCHEMA.values(), ids=BY_CORE_SCHEMA)
def test_found_by_kubernetes_schema(right, kind, change, message):
    documents = broken(right, kind, change)
    found(schema_problems([item for item in documents if item["kind"] == kind]), message)


@pytest.mark.parametrize(("kind", "change", "message"), BY_RULES.values(), ids=BY_RULES)
def test_found_by_our_rules(right, kind, change, message):
    found(rule_problems(broken(right, kind, change)), message)


@pytest.mark.parametrize(("policy", "change", "message"), BY_NETWORK.values(), ids=BY_NETWORK)
def test_a_forgotten_network_rule_is_found(right, policy, change, message):
    found(rule_problems(broken(right, policy, change)), message)
