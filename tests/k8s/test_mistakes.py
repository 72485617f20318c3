"""Deliberate mistakes in a manifest that is right: each is caught, and the message names it."""

from __future__ import annotations

import copy
import re

import pytest

from cimage_dist.deploy import jsonpatch
from cimage_dist.deploy.documents import of_kind, read
from tests.k8s.checkers import HAS_CORE, HAS_SCHEMAS, NO_CORE, NO_SCHEMAS, ROOT, command_problems, own_problems, rule_problems, schema_problems

JOB = "RayJob"
HEAD = "/spec/rayClusterSpec/headGroupSpec/template/spec"
GROUP = "/spec/rayClusterSpec/workerGroupSpecs/0"
WORKER = f"{GROUP}/template/spec"
SUBMITTER = "/spec/submitterPodTemplate"


def put(path, value):
    """Set a field, whether it is there or not."""
    return [{"op": "add", "path": path, "value": value}]


def drop(path):
    return [{"op": "remove", "path": path}]


# what is wrong: (where, patch, the message)
BY_SCHEMA = {
    "typo in a field": (JOB, put("/spec/shutdownAfterJobFinish", True), r"'shutdownAfterJobFinish' was unexpected"),
    "typo inside a container": (JOB, put(f"{WORKER}/containers/0/resource", {}), r"containers\.0: .*'resource' was unexpected"),
    "text instead of a number": (JOB, put("/spec/backoffLimit", "two"), r"backoffLimit: 'two' is not of type 'integer'"),
    "number instead of text": (JOB, put("/spec/rayClusterSpec/headGroupSpec/rayStartParams/num-cpus", 0), r"num-cpus: 0 is not of type 'string'"),
    "unknown authentication": (JOB, put("/spec/rayClusterSpec/authOptions/mode", "password"), r"mode: 'password' is not one of"),
}
BY_CORE_SCHEMA = {
    "typo in a network rule": ("NetworkPolicy", put("/spec/policyType", ["Egress"]), r"NetworkPolicy cimage-ray.*policyType"),
    "a port as a list": ("NetworkPolicy", put("/spec/ingress/1/ports", 8265), r"NetworkPolicy cimage-ray.*ports"),
    "a ConfigMap with a number": ("ConfigMap", put("/data/seed", 3), r"ConfigMap cimage-configs.*seed"),
}
BY_RULES = {
    "name too long": (JOB, put("/metadata/name", "cimage-" + "x" * 41), r"48 characters, at most 47"),
    "name with capitals": (JOB, put("/metadata/name", "Cimage"), r"DNS-1035"),
    "group name with a dot": (JOB, put(f"{GROUP}/groupName", "gpu.workers"), r"worker group: .*DNS-1035"),
    "min above max": (JOB, put(f"{GROUP}/minReplicas", 9), r"minReplicas 9 <= replicas 2 <= maxReplicas 8 does not hold"),
    "replicas below min": (JOB, put(f"{GROUP}/replicas", 1), r"minReplicas 2 <= replicas 1"),
    "a range without the autoscaler": (JOB, put("/spec/rayClusterSpec/enableInTreeAutoscaling", False), r"autoscaler is off"),
    "no container": (JOB, put(f"{WORKER}/containers", []), r"worker group workers: no container"),
    "no worker group": (JOB, put("/spec/rayClusterSpec/workerGroupSpecs", []), r"no worker group"),
    "another Ray": (JOB, put("/spec/rayClusterSpec/rayVersion", "2.59.0"), r"rayVersion 2\.59\.0 differs from the package's Ray"),
    "another Ray in the image": (JOB, put(f"{WORKER}/containers/0/image", "cimage-dist:0.1.0-ray2.9.0-cpu"), r"holds Ray 2\.9\.0"),
    "image without a tag": (JOB, put(f"{HEAD}/containers/0/image", "registry:5000/cimage-dist"), r"not pinned"),
    "image latest": (JOB, put(f"{SUBMITTER}/spec/containers/0/image", "cimage-dist:latest"), r"submitterPodTemplate.*not pinned"),
    "unknown submission mode": (JOB, put("/spec/submissionMode", "Job"), r"submissionMode 'Job' is none of"),
    "sidecar with a submitter": (JOB, put("/spec/submissionMode", "SidecarMode"), r"submitterPodTemplate cannot be given in SidecarMode"),
    "suspended but kept": (
        JOB,
        [*put("/spec/suspend", True), *put("/spec/shutdownAfterJobFinishes", False)],
        r"shutdownAfterJobFinishes must be true \(suspend",
    ),
    "queued but kept": (JOB, [*put("/metadata/labels", {"kueue.x-k8s.io/queue-name": "q"}), *put("/spec/shutdownAfterJobFinishes", False)], r"\(Kueue cannot"),
    "no time limit": (JOB, drop("/spec/activeDeadlineSeconds"), r"activeDeadlineSeconds is missing"),
    "pods left for ever": (JOB, drop("/spec/ttlSecondsAfterFinished"), r"ttlSecondsAfterFinished is missing"),
    "authentication off": (JOB, put("/spec/rayClusterSpec/authOptions/mode", "disabled"), r"authOptions\.mode must be token"),
    "privileged": (JOB, put(f"{WORKER}/containers/0/securityContext/privileged", True), r"container ray-worker: privileged"),
    "runs as root": (JOB, put(f"{HEAD}/securityContext/runAsNonRoot", False), r"headGroupSpec: securityContext\.runAsNonRoot"),
    "writable root": (JOB, put(f"{HEAD}/initContainers/0/securityContext/readOnlyRootFilesystem", False), r"container stage: .*readOnlyRootFilesystem"),
    "capabilities kept": (JOB, put(f"{WORKER}/containers/0/securityContext/capabilities", {"drop": []}), r"must drop ALL"),
    "no seccomp": (JOB, drop(f"{SUBMITTER}/spec/securityContext/seccompProfile"), r"submitterPodTemplate: .*seccompProfile"),
    "host network": (JOB, put(f"{WORKER}/hostNetwork", True), r"hostNetwork must not be set"),
    "token on a worker": (JOB, put(f"{WORKER}/automountServiceAccountToken", True), r"worker group workers: automountServiceAccountToken must be false"),
    "autoscaler without a token": (JOB, put(f"{HEAD}/automountServiceAccountToken", False), r"headGroupSpec: automountServiceAccountToken must be true"),
    "memory limit above request": (JOB, put(f"{WORKER}/containers/0/resources/limits/memory", "800Gi"), r"memory requests and limits .* 400Gi and 800Gi"),
    "no toleration": (JOB, drop(f"{WORKER}/tolerations"), r"GPUs without a toleration"),
    "no affinity": (JOB, drop(f"{WORKER}/affinity"), r"GPUs without a node affinity"),
    "killed while saving": (JOB, put(f"{WORKER}/terminationGracePeriodSeconds", 5), r"terminationGracePeriodSeconds"),
    "mount without a volume": (JOB, drop(f"{WORKER}/volumes/2"), r"mounts storage, which is not among"),
    "nowhere to write": (JOB, drop(f"{WORKER}/containers/0/volumeMounts/0"), r"no writable /tmp"),
    "GCS fault tolerance": (JOB, put("/spec/rayClusterSpec/gcsFaultToleranceOptions", {"redisAddress": "r"}), r"meant for serving"),
    "submitter restarts always": (JOB, put(f"{SUBMITTER}/spec/restartPolicy", "Always"), r"restartPolicy must be Never or OnFailure"),
}
ENTRYPOINT = "cimage pretrain configs/large/papers100m.yaml configs/resources/cluster.yaml resources.min_workers=16 --on ray"
BY_ENTRYPOINT = {
    "unknown verb": (JOB, put("/spec/entrypoint", ENTRYPOINT.replace("pretrain", "pretrian")), r"invalid choice: 'pretrian'"),
    "unknown flag": (JOB, put("/spec/entrypoint", ENTRYPOINT.replace("--on", "--at")), r"unrecognized arguments: --at"),
    "unknown key": (JOB, put("/spec/entrypoint", f"{ENTRYPOINT} train.epoch=3"), r"Unknown config key 'train\.epoch'"),
    "unknown key in the ConfigMap": ("ConfigMap", put("/data/resources.cluster.yaml", "resources: {workers: 3}"), r"Unknown config key 'resources\.workers'"),
    "another program": (JOB, put("/spec/entrypoint", "python train.py"), r"must begin with `cimage`"),
    "a config that is not mounted": (
        JOB,
        put("/spec/entrypoint", ENTRYPOINT.replace("papers100m", "mine")),
        r"configs/large/mine\.yaml is not in the ConfigMap",
    ),
    "a mount without its key": ("ConfigMap", drop("/data/large.papers100m.yaml"), r"has no key large\.papers100m\.yaml"),
    "configs mounted elsewhere": (JOB, put(f"{HEAD}/containers/0/volumeMounts/3/mountPath", "/configs"), r"no ConfigMap is mounted at /app/configs"),
    "the head trains alone": (JOB, put("/spec/entrypoint", ENTRYPOINT.replace(" --on ray", "")), r"lacks `--on ray`"),
    "another graph staged": (JOB, put(f"{HEAD}/initContainers/0/args", ["configs/demo.yaml"]), r"stage container prepares another graph"),
    "more workers than pods": (JOB, put("/spec/entrypoint", f"{ENTRYPOINT} resources.num_workers=65"), r"65 workers need 9 pods of 8, maxReplicas is 8"),
    "pods that idle": (JOB, put(f"{GROUP}/maxReplicas", 20), r"64 workers fill 8 pods of 8, maxReplicas is 20"),
    "range not tied to the workers": (JOB, put(f"{GROUP}/minReplicas", 1), r"minReplicas is 1"),
    "min above max workers": (
        JOB,
        put("/spec/entrypoint", f"{ENTRYPOINT} resources.num_workers=8"),
        r"resources\.min_workers must not exceed resources\.num_workers",
    ),
    "more GPUs per worker than per pod": (JOB, drop(f"{WORKER}/containers/0/resources/limits/nvidia.com~1gpu"), r"device is cuda, but a worker pod has no GPU"),
    "a worker larger than its pod": (JOB, put("/spec/entrypoint", f"{ENTRYPOINT} resources.cpus_per_worker=65"), r"a worker needs 65 CPUs"),
    "GPUs that nobody uses": (JOB, put("/spec/entrypoint", f"{ENTRYPOINT} resources.device=auto"), r"resources\.device is auto; say cuda"),
}
RAY, SUBMIT, SCALER = "cimage-ray", "cimage-submitter", "cimage-autoscaler"
BY_NETWORK = {
    "pods among themselves, in": (RAY, drop("/spec/ingress/0"), r"the head cannot reach the worker on every port"),
    "pods among themselves, out": (RAY, drop("/spec/egress/0"), r"the worker cannot reach the head on every port"),
    "pods among themselves, one port": (RAY, put("/spec/ingress/0/ports", [{"port": 6379}]), r"the worker cannot reach the worker on every port"),
    "operator": (RAY, drop("/spec/ingress/1/from/0"), r"the KubeRay operator \(Helm\) cannot reach the head on 8265"),
    "operator of this namespace only": (RAY, drop("/spec/ingress/1/from/0/namespaceSelector"), r"the KubeRay operator \(kustomize\) cannot reach"),
    "submitter, in": (RAY, drop("/spec/ingress/1/from/1"), r"the submitter cannot reach the head on 8265"),
    "submitter, out": (SUBMIT, drop("/spec/egress/1"), r"the submitter cannot reach the head on 8265"),
    "Prometheus": (RAY, drop("/spec/ingress/2"), r"Prometheus cannot reach the worker on 8080"),
    "DNS": (RAY, drop("/spec/egress/1"), r"the head cannot reach DNS"),
    "DNS over UDP": (RAY, drop("/spec/egress/1/ports/0"), r"the worker cannot reach DNS on 53, UDP and TCP"),
    "DNS of the submitter": (SUBMIT, drop("/spec/egress/0"), r"the submitter cannot reach DNS"),
    "storage": (RAY, drop("/spec/egress/2"), r"the worker cannot reach storage on 443"),
    "API server": (SCALER, drop("/spec/egress/0/ports/1"), r"the head cannot reach the API server"),
    "metadata service": (RAY, drop("/spec/egress/2/to/0/ipBlock/except"), r"can reach the cloud's metadata service"),
    "open dashboard": (RAY, put("/spec/ingress/1/from", [{"namespaceSelector": {}}]), r"a pod of another namespace can reach the head"),
    "policy that selects nothing": (
        RAY,
        put("/spec/podSelector", {"matchLabels": {"app": "typo"}}),
        r"another pod of the namespace can reach the worker; no policy selects it",
    ),
}


@pytest.fixture(scope="module")
def right():
    return read(ROOT / "k8s" / "rendered" / "gpu-elastic-rayjob-pretrain.yaml")


def broken(right, kind_or_name, patch):
    documents = copy.deepcopy(right)
    name = RAY if kind_or_name == "NetworkPolicy" else kind_or_name
    target = next(item for item in documents if name in (item["kind"], item["metadata"]["name"]))
    jsonpatch.apply(target, copy.deepcopy(patch), "the mistake")
    assert documents != right
    return documents


def test_the_manifest_is_right_to_begin_with(right):
    assert own_problems(right) == []


def caught(found, message):
    assert any(re.search(message, problem) for problem in found), found


@pytest.mark.skipif(not HAS_SCHEMAS, reason=NO_SCHEMAS)
@pytest.mark.parametrize(("kind", "patch", "message"), BY_SCHEMA.values(), ids=BY_SCHEMA)
def test_caught_by_kuberays_schema(right, kind, patch, message):
    caught(schema_problems(list(of_kind(broken(right, kind, patch), JOB))), message)


@pytest.mark.skipif(not HAS_CORE, reason=NO_CORE)
@pytest.mark.parametrize(("kind", "patch", "message"), BY_CORE_SCHEMA.values(), ids=BY_CORE_SCHEMA)
def test_caught_by_kubernetes_schema(right, kind, patch, message):
    caught(schema_problems([item for item in broken(right, kind, patch) if item["kind"] == kind]), message)


@pytest.mark.parametrize(("kind", "patch", "message"), BY_RULES.values(), ids=BY_RULES)
def test_caught_by_our_rules(right, kind, patch, message):
    caught(rule_problems(broken(right, kind, patch)), message)


@pytest.mark.parametrize(("kind", "patch", "message"), BY_ENTRYPOINT.values(), ids=BY_ENTRYPOINT)
def test_caught_by_the_real_command_line_and_config(right, kind, patch, message):
    caught(command_problems(broken(right, kind, patch)), message)


@pytest.mark.parametrize(("policy", "patch", "message"), BY_NETWORK.values(), ids=BY_NETWORK)
def test_a_forgotten_network_rule_is_caught(right, policy, patch, message):
    caught(rule_problems(broken(right, policy, patch)), message)


def test_a_claim_for_one_node_is_caught():
    documents = read(ROOT / "k8s" / "rendered" / "setup-shared.yaml")
    jsonpatch.apply(next(of_kind(documents, "PersistentVolumeClaim")), put("/spec/accessModes", ["ReadWriteOnce"]), "the mistake")
    caught(rule_problems(documents), "ReadWriteMany")
