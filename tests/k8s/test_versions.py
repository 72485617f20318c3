"""One version of everything, wherever it is written."""

from __future__ import annotations

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from cimage_dist import __version__
from cimage_dist.deploy import cluster_spec, containers, templates
from tests.k8s.checkers import ROOT, built, needs_kubectl, pinned, workload

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
INSTALL = (ROOT / "launch" / "install.sh").read_text()
RAY = pinned("ray")
KUBERAY = "1.7.0"


def test_constraints_meet_what_pyproject_asks_for():
    wanted = [
        *PROJECT["dependencies"],
        *(
            line
            for extra in ("tune", "ogb", "dev")
            for line in PROJECT["optional-dependencies"][extra]
        ),
    ]
    pins = dict(
        re.findall(
            r"^([\w.-]+)==(\S+)$",
            (ROOT / "constraints.txt").read_text().lower().replace("_", "-"),
            flags=re.M,
        )
    )
    for text in wanted:
        need = Requirement(text)
        name = need.name.lower().replace("_", "-")
        if name not in ("torch", "cimage-dist"):
            assert name in pins, f"{text} is not pinned in constraints.txt"
            assert need.specifier.contains(pins[name], prereleases=True), (
                f"{text}, but constraints.txt pins {pins[name]}"
            )


@needs_kubectl
@pytest.mark.parametrize("size", ["cpu-small", "gpu", "gpu-elastic"])
@pytest.mark.parametrize("kind", ["rayjob-pretrain", "raycluster-dev"])
def test_manifests_name_this_version_and_its_ray(size, kind):
    document = workload(built(ROOT / "k8s" / "overlays" / size / kind))
    assert cluster_spec(document)["rayVersion"] == RAY
    images = {item["image"] for pod in templates(document).values() for item in containers(pod)}
    variant = "cpu" if size == "cpu-small" else "cu130"
    assert images == {f"cimage-dist:{__version__}-ray{RAY}-{variant}"}
    assert f"docker build -t {images.pop()} " in DOCKERFILE


def test_torch_is_the_same_everywhere():
    versions = {
        "Makefile": re.search(
            r"^TORCH \?= torch==(\S+)$", (ROOT / "Makefile").read_text(), flags=re.M
        )[1],
        "install.sh": re.search(r"^TORCH_VERSION=(\S+)$", INSTALL, flags=re.M)[1],
        "Dockerfile": re.search(r"torch-([\d.]+)\+", DOCKERFILE)[1],
    }
    assert len(set(versions.values())) == 1, versions
    (need,) = [
        Requirement(text) for text in PROJECT["dependencies"] if Requirement(text).name == "torch"
    ]
    assert need.specifier.contains(versions["Makefile"])


def test_the_image_has_one_python_that_the_project_accepts():
    pythons = set(re.findall(r"^FROM python:([\d.]+)-", DOCKERFILE, flags=re.M))
    assert len(pythons) == 1
    assert Version(pythons.pop()) in Requirement(f"python{PROJECT['requires-python']}").specifier
    assert f'image.version="{__version__}"' in DOCKERFILE


def test_whatever_else_names_a_version_of_ray_means_the_same():
    """In launch/, k8s/ and the image: `Ray 2.60.0`, ray==2.60.0, ray[default]==2.60.0, ..."""
    found = 0
    for path in [
        ROOT / "Dockerfile",
        *sorted((ROOT / "launch").rglob("*")),
        *sorted((ROOT / "k8s").rglob("*")),
    ]:
        if path.is_file() and path.suffix in ("", ".yaml", ".sh", ".md", ".sbatch", ".txt"):
            for version in re.findall(
                r"\b[Rr]ay(?:\[[\w,]+\])?(?:==|Version: | )?(\d+\.\d+\.\d+)\b", path.read_text()
            ):
                found += 1
                assert version == RAY, (
                    f"{path.relative_to(ROOT)} says Ray {version}, constraints.txt {RAY}"
                )
    assert found > 10


def test_one_version_of_the_operator():
    text = (ROOT / "k8s" / "README.md").read_text()
    assert set(re.findall(r"(?:--version |KubeRay v?)(\d+\.\d+\.\d+)", text)) == {KUBERAY}
