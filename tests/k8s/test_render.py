"""`cimage k8s render`: fits the cluster to the config, refuses what cannot run."""

from __future__ import annotations

import json

import pytest

from cimage_dist.cli.main import main
from cimage_dist.deploy import render
from cimage_dist.deploy.documents import of_kind
from tests.k8s.checkers import ROOT


@pytest.fixture
def rendered(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)

    def run(line):
        code = main(["k8s", "render", *line.split(), "--json"])
        out, err = capsys.readouterr()
        return json.loads(out) if code == 0 else (code, err)

    return run


def parts(result):
    (job,) = of_kind(result["documents"], "RayJob")
    spec = job["spec"]["rayClusterSpec"]
    return job, spec["headGroupSpec"]["template"]["spec"], spec["workerGroupSpecs"][0]


@pytest.mark.parametrize(
    ("line", "low", "high"),
    [
        ("pretrain configs/demo.yaml --workers 3", 3, 3),
        ("pretrain configs/demo.yaml --workers 3 --cpus-per-pod 2", 2, 2),
        ("pretrain configs/demo.yaml configs/resources/laptop.yaml", 2, 2),
        ("pretrain configs/demo.yaml --overlay gpu --workers 17", 3, 3),
        ("pretrain configs/demo.yaml --overlay gpu --workers 8 resources.cpus_per_worker=16", 2, 2),
        ("pretrain configs/demo.yaml --overlay gpu-elastic --workers 17 --min-workers 8", 1, 3),
    ],
)
def test_replicas_follow_from_the_workers(rendered, line, low, high):
    _, _, group = parts(rendered(line))
    assert (group["minReplicas"], group["replicas"], group["maxReplicas"]) == (low, low, high)


def test_every_wish_is_honoured(rendered):
    result = rendered(
        "pretrain configs/demo.yaml run.seed=3 --overlay gpu --name mine --namespace team --image r.example/c:1 --storage nfs --fetch s3://b/raw --queue q --memory-per-pod 90Gi"
    )
    job, head, group = parts(result)
    assert job["metadata"] == {"name": "mine", "namespace": "team", "labels": {"kueue.x-k8s.io/queue-name": "q"}}
    assert {item["metadata"]["namespace"] for item in result["documents"]} == {"team"}
    assert job["spec"]["entrypoint"] == "cimage pretrain configs/demo.yaml run.seed=3 resources.device=cuda --on ray"
    assert [item["name"] for item in head["initContainers"]] == ["fetch", "stage"]
    assert head["initContainers"][0]["args"] == ["s3://b/raw", "/storage/data/raw"]
    assert head["initContainers"][1]["args"] == ["configs/demo.yaml", "run.seed=3", "resources.device=cuda"]
    containers = [
        *head["initContainers"],
        *head["containers"],
        *group["template"]["spec"]["containers"],
        *job["spec"]["submitterPodTemplate"]["spec"]["containers"],
    ]
    assert {item["image"] for item in containers} == {"r.example/c:1"}
    claims = [v["persistentVolumeClaim"]["claimName"] for spec in (head, group["template"]["spec"]) for v in spec["volumes"] if "persistentVolumeClaim" in v]
    assert claims == ["nfs", "nfs"]
    assert group["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"] == "90Gi"


def test_a_config_from_elsewhere_travels_in_the_config_map(rendered, tmp_path):
    (tmp_path / "mine.yaml").write_text("data: {name: sbm}\n")
    result = rendered(f"pretrain {tmp_path}/mine.yaml configs/resources/laptop.yaml")
    assert result["entrypoint"] == "cimage pretrain configs/mine.yaml configs/resources/laptop.yaml --on ray"
    (configs,) = of_kind(result["documents"], "ConfigMap")
    assert configs["data"]["mine.yaml"] == "data: {name: sbm}\n"
    assert set(configs["data"]) == {"mine.yaml", "resources.laptop.yaml"}


def test_the_name_follows_from_the_experiment(rendered):
    names = [rendered(f"pretrain configs/node/arxiv.yaml {more}")["name"] for more in ("", "resources.num_workers=2", "run.seed=1")]
    assert names[0] == names[1] != names[2]
    assert all(name.startswith("cimage-pretrain-ogbn-arxiv-") and len(name) <= 47 for name in names)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("pretrian configs/demo.yaml", "invalid choice: 'pretrian'"),
        ("pretrain configs/gone.yaml", "Config file not found"),
        ("pretrain configs/demo.yaml trian.epochs=3", "Unknown config key"),
        ("pretrain configs/demo.yaml --name Mine", "DNS-1035"),
        ("pretrain configs/demo.yaml --name " + "x" * 48, "at most 47"),
        ("pretrain configs/demo.yaml resources.device=cuda", "have no GPU. Use --overlay gpu"),
        ("pretrain configs/demo.yaml --gpus-per-pod 1", "has no GPUs; use --overlay gpu"),
        ("pretrain configs/demo.yaml --overlay gpu --gpus-per-pod 0", "needs some nvidia.com/gpu; got 0"),
        ("pretrain configs/demo.yaml --overlay gpu resources.device=cpu", "have 8 GPUs"),
        ("pretrain configs/demo.yaml resources.cpus_per_worker=4", "A worker needs 4 CPUs, a pod has 1 CPUs"),
        ("pretrain configs/demo.yaml --memory-per-pod 4GB", "not a Kubernetes quantity"),
        ("pretrain configs/demo.yaml --overlay gpu-elastic --workers 8 --min-workers 9", "must not exceed resources.num_workers"),
        ("pretrain configs/demo.yaml --overlay gpu-elastic --workers 8", "needs a range of workers"),
        ("pretrain configs/demo.yaml --image cimage-dist", "not pinned"),
        ("pretrain configs/demo.yaml --image cimage-dist:0.1.0-ray2.59.0-cpu", "holds Ray 2.59.0"),
        ("pretrain configs/node/cora.yaml ./configs/link/cora.yaml configs/../configs/link/cora.yaml", "same name in the pod"),
        ("pretrain configs/demo.yaml --overlay huge", "invalid choice: 'huge'"),
    ],
)
def test_impossible_wishes_are_refused(rendered, line, message):
    code, err = rendered(line)
    assert code == 2
    assert message in err
    assert "Traceback" not in err


def test_without_the_rendered_files_the_message_says_what_to_do(rendered, monkeypatch, tmp_path):
    monkeypatch.setattr(render, "CHECKOUT", tmp_path)
    monkeypatch.setattr(render, "INSTALLED", tmp_path)
    code, err = rendered("pretrain configs/demo.yaml")
    assert code == 2
    assert "make k8s" in err
