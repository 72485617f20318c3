"""`cimage k8s render`: fits the cluster to the config, refuses what cannot run."""

from __future__ import annotations

import json

import pytest

from cimage_dist import deploy as manifests
from cimage_dist.__main__ import main
from cimage_dist.cli import remote as k8s
from cimage_dist.deploy import containers, of_kind, templates
from tests.k8s.checkers import ROOT, needs_kubectl

pytestmark = needs_kubectl


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


def test_every_option_is_applied(rendered):
    result = rendered(
        "pretrain configs/demo.yaml run.seed=3 --overlay gpu --name mine --namespace team "
        "--image r.example/c:1 --storage nfs --queue q --memory-per-pod 90Gi --retries 1"
    )
    job, head, group = parts(result)
    labels = {"kueue.x-k8s.io/queue-name": "q"}
    assert job["metadata"] == {"name": "mine", "namespace": "team", "labels": labels}
    assert {item["metadata"]["namespace"] for item in result["documents"]} == {"team"}
    words = "cimage pretrain configs/demo.yaml run.seed=3 resources.device=cuda --on ray"
    assert job["spec"]["entrypoint"] == words
    pods = templates(job).values()
    assert {item["image"] for pod in pods for item in containers(pod)} == {"r.example/c:1"}
    volumes = [*head["volumes"], *group["template"]["spec"]["volumes"]]
    claims = [v["persistentVolumeClaim"] for v in volumes if "persistentVolumeClaim" in v]
    assert claims == [{"claimName": "nfs"}] * 2
    resources = group["template"]["spec"]["containers"][0]["resources"]
    assert resources["limits"]["memory"] == resources["requests"]["memory"] == "90Gi"
    assert job["spec"]["backoffLimit"] == 1
    (budget,) = of_kind(result["documents"], "PodDisruptionBudget")
    selected = budget["spec"]["selector"]["matchLabels"].items()
    assert selected <= templates(job)["head"]["metadata"]["labels"].items()
    assert not selected <= templates(job)["worker"]["metadata"]["labels"].items()


def test_the_graph_is_prepared_by_a_plain_job(rendered):
    result = rendered(
        "ingest configs/large/products.yaml --overlay gpu --fetch s3://b/raw --name i"
    )
    (job,) = of_kind(result["documents"], "Job")
    assert not list(of_kind(result["documents"], "RayJob", "PodDisruptionBudget"))
    fetch, ingest = containers(templates(job)["ingest"])
    assert fetch["args"] == ["s3://b/raw", "/storage/data/raw"]
    assert fetch["command"] == ["python", "-m", "cimage_dist.deploy"]
    assert ingest["command"] == ["cimage", "ingest"]
    assert ingest["args"] == ["configs/large/products.yaml"]
    assert {"name": "configs", "mountPath": "/app/configs", "readOnly": True} in ingest[
        "volumeMounts"
    ]


def test_a_config_from_elsewhere_travels_in_the_config_map(rendered, tmp_path):
    (tmp_path / "mine.yaml").write_text("data: {name: sbm}\n")
    result = rendered(f"pretrain {tmp_path}/mine.yaml configs/resources/laptop.yaml")
    job, head, _ = parts(result)
    words = "cimage pretrain configs/mine.yaml configs/resources/laptop.yaml --on ray"
    assert job["spec"]["entrypoint"] == words
    (configs,) = of_kind(result["documents"], "ConfigMap")
    assert configs["data"]["mine.yaml"] == "data: {name: sbm}\n"
    (source,) = [item["configMap"] for item in head["volumes"] if "configMap" in item]
    assert source["name"] == configs["metadata"]["name"]
    paths = {item["key"]: item["path"] for item in source["items"]}
    assert paths == {"mine.yaml": "mine.yaml", "resources.laptop.yaml": "resources/laptop.yaml"}
    assert set(configs["data"]) == set(paths)


def test_the_name_follows_from_the_experiment(rendered):
    names = [
        rendered(f"pretrain configs/node/arxiv.yaml {more}")["name"]
        for more in ("", "resources.num_workers=2", "run.seed=1")
    ]
    assert names[0] == names[1] != names[2]
    assert all(name.startswith("cimage-pretrain-ogbn-arxiv-") and len(name) <= 47 for name in names)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("pretrian configs/demo.yaml", "No job for 'pretrian'"),
        ("pretrain configs/gone.yaml", "Config file not found"),
        ("pretrain configs/demo.yaml trian.epochs=3", "Unknown config key"),
        ("pretrain configs/demo.yaml --name Mine", "DNS-1035"),
        ("pretrain configs/demo.yaml --name " + "x" * 48, "at most 47"),
        ("pretrain configs/demo.yaml resources.device=cuda", "have no GPU. Use --overlay gpu"),
        ("pretrain configs/demo.yaml --gpus-per-pod 1", "has no GPUs; use --overlay gpu"),
        (
            "pretrain configs/demo.yaml --overlay gpu --gpus-per-pod 0",
            "needs some nvidia.com/gpu; got 0",
        ),
        ("pretrain configs/demo.yaml --overlay gpu resources.device=cpu", "have 8 GPUs"),
        (
            "pretrain configs/demo.yaml resources.cpus_per_worker=4",
            "A worker needs 4 CPUs, a pod has 1 CPUs",
        ),
        ("pretrain configs/demo.yaml --memory-per-pod 4GB", "not a Kubernetes quantity"),
        (
            "pretrain configs/demo.yaml --overlay gpu-elastic --workers 8 --min-workers 9",
            "must not exceed resources.num_workers",
        ),
        (
            "pretrain configs/demo.yaml --overlay gpu-elastic --workers 8",
            "needs a range of workers",
        ),
        ("pretrain configs/demo.yaml --image cimage-dist", "not pinned"),
        ("pretrain configs/demo.yaml --image cimage-dist:0.1.0-ray2.59.0-cpu", "holds Ray 2.59.0"),
        (
            "pretrain ./configs/link/cora.yaml configs/../configs/link/cora.yaml",
            "same name in the pod",
        ),
        ("pretrain configs/demo.yaml --overlay huge", "invalid choice: 'huge'"),
        ("pretrain configs/demo.yaml --with nothing", "no components/nothing"),
        ("pretrain configs/demo.yaml --fetch s3://b/raw", "cimage k8s render ingest"),
    ],
)
def test_impossible_wishes_are_refused(rendered, line, message):
    code, err = rendered(line)
    assert code == 2
    assert message in err
    assert "Traceback" not in err


def test_without_the_sources_or_kubectl_the_message_says_what_to_do(
    rendered, monkeypatch, tmp_path
):
    monkeypatch.setenv("PATH", str(tmp_path))
    code, err = rendered("pretrain configs/demo.yaml")
    assert code == 2 and "kubectl was not found. Install it" in err
    monkeypatch.setattr(manifests, "CHECKOUT", tmp_path / "no")
    monkeypatch.setattr(manifests, "INSTALLED", tmp_path)
    code, err = rendered("pretrain configs/demo.yaml")
    assert code == 2 and "Install cimage-dist again" in err


RAYJOB = [{}, {"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"}]
JOB = [{}, {"active": 1}]


@pytest.mark.parametrize(
    ("job", "states", "code"),
    [
        ("rayjob/a", [*RAYJOB, {"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}], 0),
        ("rayjob/a", [*RAYJOB, {"jobDeploymentStatus": "Failed", "reason": "DeadlineExceeded"}], 1),
        ("rayjob/a", [{"jobDeploymentStatus": "Complete", "jobStatus": "FAILED"}], 1),
        ("job/a", [*JOB, {"conditions": [{"type": "Complete", "status": "True"}]}], 0),
        (
            "job/a",
            [*JOB, {"conditions": [{"type": "Failed", "status": "True", "message": "m"}]}],
            1,
        ),
    ],
)
def test_waiting_ends_with_the_job_well_or_not(job, states, code, monkeypatch):
    left = [*states]
    monkeypatch.setattr(k8s, "POLL_S", 0.0)
    monkeypatch.setattr(manifests, "kubectl", lambda *words: json.dumps({"status": left.pop(0)}))
    assert main(["k8s", "wait", job, "--quiet"]) == code and not left


def test_waiting_for_nothing_is_refused(capsys):
    assert main(["k8s", "wait", "mine"]) == 2
    assert "rayjob/NAME" in capsys.readouterr().err
