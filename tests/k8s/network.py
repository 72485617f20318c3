"""Which connections the NetworkPolicies of a set of manifests let through, and which they must.

A RayJob behind a policy that forgets one of these hangs without an error; a missing policy leaves
the dashboard open to all.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from cimage_dist.deploy import Document, of_kind

DASHBOARD, METRICS, SOME_PORT = 8265, 8080, 40_123


@dataclass(frozen=True)
class End:
    """One end of a connection: a pod here, of another namespace, or an address outside."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)
    is_elsewhere: bool = False
    address: str | None = None


OPERATORS = (
    End(
        "the KubeRay operator (Helm)",
        {
            "app.kubernetes.io/name": "kuberay-operator",
            "app.kubernetes.io/component": "kuberay-operator",
        },
        is_elsewhere=True,
    ),
    End(
        "the KubeRay operator (kustomize)",
        {"app.kubernetes.io/name": "kuberay", "app.kubernetes.io/component": "kuberay-operator"},
        is_elsewhere=True,
    ),
)
PROMETHEUS = End("Prometheus", {"app.kubernetes.io/name": "prometheus"}, is_elsewhere=True)
DNS = End("DNS", {"k8s-app": "kube-dns"}, is_elsewhere=True)
STORAGE = End("storage (https)", address="203.0.113.7")
API_SERVER = End("the API server", address="203.0.113.8")
METADATA = End("the cloud's metadata service", address="169.254.169.254")
STRANGERS = (
    End("a pod of another namespace", {"app": "other"}, is_elsewhere=True),
    End("another pod of the namespace", {"app": "other"}),
)


def _selects(selector: Document, labels: dict[str, str]) -> bool:
    if any(labels.get(key) != value for key, value in (selector.get("matchLabels") or {}).items()):
        return False
    for rule in selector.get("matchExpressions") or []:
        is_among = labels.get(rule["key"]) in (rule.get("values") or [])
        matches = {
            "In": is_among,
            "NotIn": not is_among,
            "Exists": rule["key"] in labels,
            "DoesNotExist": rule["key"] not in labels,
        }
        if not matches[rule["operator"]]:
            return False
    return True


def _is_peer(peer: Document, end: End) -> bool:
    if "ipBlock" in peer:
        if end.address is None:
            return False
        inside = [
            ipaddress.ip_address(end.address) in ipaddress.ip_network(net)
            for net in (peer["ipBlock"]["cidr"], *peer["ipBlock"].get("except", []))
        ]
        return inside[0] and not any(inside[1:])
    if end.address is not None or (end.is_elsewhere and "namespaceSelector" not in peer):
        return False
    # Labels of namespaces belong to the cluster: only the selector of all of them is understood.
    return peer.get("namespaceSelector", {}) == {} and _selects(
        peer.get("podSelector") or {}, end.labels
    )


def _passes(
    policies: list[Document], pod: End, other: End, port: int, protocol: str, direction: str
) -> bool:
    """Whether the policies of `pod` let a connection with `other` through in one direction."""
    key, peers = ("ingress", "from") if direction == "Ingress" else ("egress", "to")
    on_pod = [
        policy["spec"]
        for policy in policies
        if _selects(policy["spec"].get("podSelector") or {}, pod.labels)
    ]
    isolating = [spec for spec in on_pod if direction in spec.get("policyTypes", ["Ingress"])]
    if not isolating:
        return True
    rules: list[Any] = [rule for spec in isolating for rule in spec.get(key) or []]
    return any(
        (not rule.get(peers) or any(_is_peer(peer, other) for peer in rule[peers]))
        and (
            not rule.get("ports")
            or any(
                item.get("port") in (None, port) and item.get("protocol", "TCP") == protocol
                for item in rule["ports"]
            )
        )
        for rule in rules
    )


def network_problems(
    documents: list[Document], labels: dict[str, dict[str, str]], is_autoscaling: bool
) -> Iterator[str]:
    """Connections that must pass and do not, or must not and do; `labels` by role."""
    policies = list(of_kind(documents, "NetworkPolicy"))
    pods = {role: End(f"the {role}", marks) for role, marks in labels.items()}
    inside = [pods[role] for role in ("head", "worker") if role in pods]

    def into(pod: End, other: End, port: int) -> bool:
        return _passes(policies, pod, other, port, "TCP", "Ingress")

    def out(pod: End, other: End, port: int, protocol: str = "TCP") -> bool:
        return _passes(policies, pod, other, port, protocol, "Egress")

    for one in inside:
        for two in inside:
            if not (out(one, two, SOME_PORT) and into(two, one, SOME_PORT)):
                yield f"{one.name} cannot reach {two.name} on every port"
    for operator in OPERATORS if "head" in pods else ():
        if not into(pods["head"], operator, DASHBOARD):
            yield f"{operator.name} cannot reach the head on {DASHBOARD}; the RayJob waits for ever"
    if "submitter" in pods and not (
        out(pods["submitter"], pods["head"], DASHBOARD)
        and into(pods["head"], pods["submitter"], DASHBOARD)
    ):
        yield f"the submitter cannot reach the head on {DASHBOARD}"
    for pod in inside:
        if not into(pod, PROMETHEUS, METRICS):
            yield f"Prometheus cannot reach {pod.name} on {METRICS}"
    for pod in [*inside, *([pods["ingest"]] if "ingest" in pods else [])]:
        if not out(pod, STORAGE, 443):
            yield f"{pod.name} cannot reach storage on 443"
        if out(pod, METADATA, 443) or out(pod, METADATA, 80):
            yield f"{pod.name} can reach the cloud's metadata service and the node's credentials"
    for pod in pods.values():
        if not all(out(pod, DNS, 53, protocol) for protocol in ("UDP", "TCP")):
            yield f"{pod.name} cannot reach DNS on 53, UDP and TCP"
        for stranger in STRANGERS:
            if any(into(pod, stranger, port) for port in (DASHBOARD, 6379, METRICS)):
                yield f"{stranger.name} can reach {pod.name}; no policy selects it"
    if is_autoscaling and not (
        out(pods["head"], API_SERVER, 443) and out(pods["head"], API_SERVER, 6443)
    ):
        yield "the head cannot reach the API server on 443 and 6443"
