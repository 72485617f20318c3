"""Every overlay, built by the real kustomize: schemas, rules, real command line, size, example."""

from __future__ import annotations

import copy
import shlex
import shutil
import tomllib

import pytest

from cimage_dist.__main__ import main
from cimage_dist.__main__ import parse as parse_line
from cimage_dist.cli.common import config_for, split_settings
from cimage_dist.deploy import (
    Request,
    cluster_spec,
    containers,
    fit,
    number,
    of_kind,
    parse,
    templates,
)
from tests.k8s.checkers import (
    ROOT,
    all_problems,
    built,
    needs_core,
    needs_kubectl,
    needs_schemas,
    overlays,
    rule_problems,
    schema_problems,
    workload,
)

pytestmark = needs_kubectl
LEAVES = [folder for folder in overlays() if folder.parent.name != "setup"]
JOBS = [folder for folder in LEAVES if folder.name.startswith(("rayjob", "job"))]


def name(folder) -> str:
    return f"{folder.parent.name}-{folder.name}"


def test_what_is_promised_is_there():
    kinds = ("job-ingest", "rayjob-pretrain", "rayjob-sweep", "raycluster-dev")
    sizes = ("cpu-small", "gpu", "gpu-elastic")
    assert {name(folder) for folder in LEAVES} == {f"{a}-{b}" for a in sizes for b in kinds}


@needs_core
@needs_schemas
@pytest.mark.parametrize("folder", overlays(), ids=name)
def test_an_overlay_passes_the_schemas(folder):
    assert schema_problems(built(folder)) == []


@pytest.mark.parametrize("folder", LEAVES, ids=name)
def test_an_overlay_passes_the_rules(folder):
    assert rule_problems(built(folder)) == []


@pytest.mark.parametrize("folder", JOBS, ids=name)
def test_its_command_parses_and_fits_the_pods(folder, monkeypatch):
    """The image holds configs/, so the files are those of the repository."""
    monkeypatch.chdir(ROOT)
    job = workload(built(folder))
    if job["kind"] == "Job":
        (container,) = job["spec"]["template"]["spec"]["containers"]
        assert container["command"] == ["cimage", "ingest"]
        line = shlex.split(workload(built(folder.parent / "rayjob-pretrain"))["spec"]["entrypoint"])
        trained = config_for("pretrain", *split_settings(parse_line(line[1:]).settings))
        ingested = config_for("ingest", *split_settings(container["args"]))
        assert ingested.data == trained.data, "the graph that training opens"
        return
    program, *words = shlex.split(job["spec"]["entrypoint"])
    args = parse_line(words)
    assert program == "cimage" and getattr(args, "on", "ray") == "ray"
    cfg = config_for(args.verb, *split_settings(args.settings))
    if args.verb == "pretrain":
        fitted = copy.deepcopy(cluster_spec(job))
        fit(fitted, cfg, Request("pretrain", (), ()))
        assert fitted == cluster_spec(job), "replicas follow from resources.*"


def test_the_example_is_current():
    expected = built(ROOT / "k8s" / "overlays" / "cpu-small" / "rayjob-pretrain")
    assert parse((ROOT / "k8s" / "example.yaml").read_text()) == expected, "run `make k8s-example`"


# Requests of the pods of a kind cluster (kubeadm's static pods, CoreDNS, kindnet) and of KubeRay.
SYSTEM = {
    "kube-apiserver": ("250m", "0"),
    "kube-controller-manager": ("200m", "0"),
    "kube-scheduler": ("100m", "0"),
    "etcd": ("100m", "100Mi"),
    "coredns, first": ("100m", "70Mi"),
    "coredns, second": ("100m", "70Mi"),
    "kindnet": ("100m", "50Mi"),
    "kuberay-operator": ("100m", "512Mi"),
}
# k8s/README.md asks for 4 CPUs and 12 GiB; the kernel and the eviction threshold take a part.
ALLOCATABLE = {"cpu": 4.0, "memory": 11.5 * 2**30}


def requested(document) -> dict[str, float]:
    """Sum over all pods; init containers run before, so a pod needs the larger of the two."""
    total = dict.fromkeys(ALLOCATABLE, 0.0)
    for role, pod in templates(document).items():
        times = (
            cluster_spec(document)["workerGroupSpecs"][0]["maxReplicas"] if role == "worker" else 1
        )
        for key in total:
            sizes = {
                kind: [
                    number(item["resources"]["requests"][key]) for item in pod["spec"].get(kind, [])
                ]
                for kind in ("initContainers", "containers")
            }
            first = max(sizes["initContainers"], default=0.0)
            total[key] += times * max(first, sum(sizes["containers"]))
    return total


@pytest.mark.parametrize(
    "kind", ["job-ingest", "rayjob-pretrain", "rayjob-sweep", "raycluster-dev"]
)
def test_cpu_small_fits_the_machine_of_the_walk_through(kind):
    readme = (ROOT / "k8s" / "README.md").read_text()
    assert "4 CPUs and 12 GiB" in readme
    ours = requested(workload(built(ROOT / "k8s" / "overlays" / "cpu-small" / kind)))
    for position, key in enumerate(("cpu", "memory")):
        system = sum(number(sizes[position]) for sizes in SYSTEM.values())
        assert ours[key] + system <= ALLOCATABLE[key], (key, ours[key], system)


def test_only_the_autoscaler_has_the_api_token():
    spec = cluster_spec(
        workload(built(ROOT / "k8s" / "overlays" / "gpu-elastic" / "rayjob-pretrain"))
    )
    assert "api-token" in {mount["name"] for mount in spec["autoscalerOptions"]["volumeMounts"]}
    head = spec["headGroupSpec"]["template"]["spec"]
    assert head["automountServiceAccountToken"] is False
    assert "api-token" in {volume["name"] for volume in head["volumes"]}


def test_user_errors_are_not_retried_and_gpus_do_not_wait_for_ingest():
    for size in ("cpu-small", "gpu", "gpu-elastic"):
        folder = ROOT / "k8s" / "overlays" / size
        job = workload(built(folder / "rayjob-pretrain"))
        assert job["spec"]["backoffLimit"] == 0
        (head,) = containers(templates(job)["head"])
        assert {"name": "CIMAGE_INGEST", "value": "never"} in head["env"]
        ingest = workload(built(folder / "job-ingest"))
        (rule,) = ingest["spec"]["podFailurePolicy"]["rules"]
        assert rule["action"] == "FailJob" and rule["onExitCodes"]["values"] == [2]
        (container,) = containers(templates(ingest)["ingest"])
        assert "nvidia.com/gpu" not in container["resources"]["limits"]


@needs_core
@needs_schemas
@pytest.mark.parametrize(
    ("component", "overlay"),
    [
        ("kueue", "cpu-small/rayjob-pretrain"),
        ("volcano", "gpu/rayjob-pretrain"),
        ("podmonitor", "gpu-elastic/rayjob-sweep"),
        ("object-store", "gpu-elastic/job-ingest"),
        ("rdma", "gpu/rayjob-pretrain"),
        ("priority", "gpu-elastic/rayjob-pretrain"),
    ],
)
def test_a_component_can_be_added(component, overlay, tmp_path):
    shutil.copytree(ROOT / "k8s", tmp_path / "k8s")
    mine = tmp_path / "k8s" / "overlays" / "mine"
    mine.mkdir()
    (mine / "kustomization.yaml").write_text(
        f"resources: [../{overlay}]\ncomponents: [../../components/{component}]\n"
    )
    documents = built(mine)
    assert documents != built(ROOT / "k8s" / "overlays" / overlay)
    assert all_problems(documents) == []


RENDERS = {
    "demo": "pretrain configs/demo.yaml configs/resources/laptop.yaml",
    "no files": "pretrain data.name=sbm --name sbm --namespace graphs --storage nfs",
    "embed": "embed configs/demo.yaml",
    "ingest": "ingest configs/large/papers100m.yaml --overlay gpu --fetch gs://bucket/raw",
    "gpu": "pretrain configs/node/cora.yaml --overlay gpu --workers 12 --retries 2 "
    "--image registry.example/cimage@sha256:" + "0" * 64,
    "small gpu pods": "pretrain configs/large/products.yaml --overlay gpu --gpus-per-pod 2 "
    "--workers 5 --cpus-per-pod 16 --memory-per-pod 100Gi resources.cpus_per_worker=8",
    "elastic": "pretrain configs/large/papers100m.yaml --overlay gpu-elastic --workers 30 "
    "--min-workers 9 --queue team --with rdma --with priority",
}


@needs_core
@needs_schemas
@pytest.mark.parametrize("line", RENDERS.values(), ids=RENDERS)
def test_the_output_of_render_passes_everything(line, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["k8s", "render", *line.split()]) == 0
    assert all_problems(parse(capsys.readouterr().out)) == []


def test_the_claims():
    def modes(folder):
        (claim,) = of_kind(built(ROOT / "k8s" / "setup" / folder), "PersistentVolumeClaim")
        return claim["spec"]["accessModes"]

    assert modes("shared") == ["ReadWriteMany"], "pods on several nodes write there"
    assert modes("single-node") == ["ReadWriteOnce"]


def test_what_render_needs_is_installed():
    """Folders of the wheel: all but the overlays' examples, which name files of a checkout."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    shipped = project["tool"]["setuptools"]["data-files"]
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "k8s").rglob("*.yaml")}
    examples = {folder.relative_to(ROOT) for folder in LEAVES}
    wanted = {str(folder) for folder in folders - examples if folder.name != "k8s"}
    assert {place.removeprefix("share/cimage-dist/") for place in shipped} == {*wanted, "launch"}
    for place, patterns in shipped.items():
        assert patterns == [f"{place.removeprefix('share/cimage-dist/')}/*.yaml"]
