"""Every manifest: rendered files are current and the same as kustomize's, all documents pass schemas, rules and the real command line."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
import yaml

from cimage_dist.cli.main import build_parser, main
from cimage_dist.deploy import build, kustomize
from cimage_dist.deploy.documents import of_kind, read
from cimage_dist.deploy.pods import pods_of
from tests.k8s.checkers import HAS_CORE, HAS_SCHEMAS, NO_CORE, NO_SCHEMAS, ROOT, all_problems, own_problems, schema_problems

RENDERED = sorted((ROOT / "k8s" / "rendered").glob("*.yaml"))
OVERLAYS = sorted((ROOT / "k8s" / "overlays").glob("*/ray*"))
COMPONENTS = ("kueue", "volcano", "podmonitor", "object-store")
needs_schemas = pytest.mark.skipif(not HAS_SCHEMAS, reason=NO_SCHEMAS)
needs_core = pytest.mark.skipif(not HAS_CORE, reason=NO_CORE)


def missing_sweep(documents) -> str | None:
    """Why a sweep's entrypoint cannot be checked in this version: no such verb, or its search space is not in configs/."""
    verbs = build_parser()._subparsers._group_actions[0].choices
    for job in of_kind(documents, "RayJob"):
        verb, *words = job["spec"]["entrypoint"].split()[1:]
        absent = [word for word in words if word.startswith("configs/sweeps/") and not (ROOT / word).is_file()]
        if verb == "sweep" and (absent or verb not in verbs):
            return f"not in this version: {absent or 'the verb sweep'}"
    return None


def test_the_generated_files_are_current():
    files = {**build.generated(ROOT), **build.rendered(ROOT)}
    stale = [str(path.relative_to(ROOT)) for path, text in files.items() if not path.is_file() or path.read_text() != text]
    assert not stale, f"run `make k8s`: {stale}"
    assert set(RENDERED) == {path for path in files if path.parent.name == "rendered"}


def test_what_the_issue_promises_is_there():
    names = {path.stem for path in RENDERED}
    workloads = ("rayjob-pretrain", "rayjob-sweep", "raycluster-dev")
    assert names == {f"{size}-{kind}" for size in ("cpu-small", "gpu", "gpu-elastic") for kind in workloads} | {"setup-shared", "setup-single-node"}


@pytest.mark.parametrize("folder", build.sources(ROOT), ids=lambda p: f"{p.parent.name}-{p.name}")
def test_our_renderer_agrees_with_kustomize(folder):
    documents = kustomize.build(folder)
    assert as_set(kustomize_binary(folder)) == as_set(documents)


def kustomize_binary(folder):
    """The real thing, offline and without any cluster's configuration."""
    tool = [shutil.which("kustomize"), "build"] if shutil.which("kustomize") else [shutil.which("kubectl"), "kustomize"]
    if tool[0] is None:
        pytest.skip("neither kustomize nor kubectl is installed")
    out = subprocess.run([*tool, str(folder)], capture_output=True, text=True, check=True, env={**os.environ, "KUBECONFIG": os.devnull})
    return list(yaml.safe_load_all(out.stdout))


def as_set(documents):
    return {(item["kind"], item["metadata"]["name"]): item for item in documents}


@needs_core
@needs_schemas
@pytest.mark.parametrize("path", RENDERED, ids=lambda p: p.stem)
def test_a_rendered_file_passes_everything(path):
    documents = read(path)
    assert schema_problems(documents) == []
    reason = missing_sweep(documents)
    if reason:
        pytest.skip(f"schemas checked, entrypoint not: {reason}")
    assert own_problems(documents) == []


@needs_core
@needs_schemas
@pytest.mark.parametrize(("component", "overlay"), zip(COMPONENTS, ("cpu-small", "gpu", "gpu-elastic", "gpu-elastic"), strict=True))
def test_a_component_can_be_added(component, overlay, tmp_path):
    shutil.copytree(ROOT / "k8s", tmp_path / "k8s")
    leaf = tmp_path / "k8s" / "overlays" / overlay / "rayjob-pretrain" / "kustomization.yaml"
    mine = leaf.parent.parent / "mine"
    mine.mkdir()
    extra = f"\n  - ../../../components/{component}\npatches:"
    (mine / "kustomization.yaml").write_text(
        leaf.read_text().replace("\npatches:", extra).replace("initContainers/0/args", f"initContainers/{int(component == 'object-store')}/args")
    )
    documents = kustomize.build(mine)
    assert as_set(documents) != as_set(kustomize.build(leaf.parent))
    assert all_problems(documents) == []
    assert as_set(kustomize_binary(mine)) == as_set(documents)


RENDERS = {
    "demo": "pretrain configs/demo.yaml configs/resources/laptop.yaml",
    "no files": "pretrain data.name=sbm --name sbm --namespace graphs --storage nfs",
    "embed": "embed configs/demo.yaml",
    "gpu": "pretrain configs/node/cora.yaml --overlay gpu --workers 12 --image registry.example/cimage@sha256:" + "0" * 64,
    "small gpu pods": "pretrain configs/large/products.yaml --overlay gpu --gpus-per-pod 2 --cpus-per-pod 16 --memory-per-pod 100Gi resources.cpus_per_worker=8 --workers 5",
    "elastic": "pretrain configs/large/papers100m.yaml --overlay gpu-elastic --workers 30 --min-workers 9 --queue team --fetch gs://bucket/raw",
}


@needs_core
@needs_schemas
@pytest.mark.parametrize("line", RENDERS.values(), ids=RENDERS)
def test_the_output_of_render_passes_everything(line, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    assert main(["k8s", "render", *line.split()]) == 0
    (tmp_path / "job.yaml").write_text(capsys.readouterr().out)
    documents = read(tmp_path / "job.yaml")
    assert {item["kind"] for item in documents} == {"ServiceAccount", "ConfigMap", "NetworkPolicy", "RayJob"}
    assert all_problems(documents) == []


def test_the_single_node_claim_is_the_exception_that_says_so():
    shared, single = (next(of_kind(kustomize.build(ROOT / "k8s" / "setup" / name), "PersistentVolumeClaim")) for name in ("shared", "single-node"))
    assert shared["spec"]["accessModes"] == ["ReadWriteMany"]
    assert single["spec"]["accessModes"] == ["ReadWriteOnce"]


@pytest.mark.parametrize("folder", OVERLAYS, ids=lambda p: f"{p.parent.name}-{p.name}")
def test_all_containers_run_the_same_image(folder):
    (document,) = of_kind(kustomize.build(folder), "RayJob", "RayCluster")
    assert len({container["image"] for pod in pods_of(document) for container in pod.every_container}) == 1
