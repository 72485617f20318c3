"""The image: linted, sent only what it needs, its install steps run in a clean environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.k8s.checkers import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text()


def tool(name: str) -> str:
    path = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if path is None:
        pytest.skip(f"{name} is not installed; it comes with cimage-dist[dev]")
    return path


def test_the_dockerfile_is_clean():
    result = subprocess.run(
        [tool("hadolint"), str(ROOT / "Dockerfile")], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout


def test_the_linter_would_complain(tmp_path):
    (tmp_path / "Dockerfile").write_text(
        DOCKERFILE.replace("FROM python:3.11.14-slim-bookworm", "FROM python:latest")
    )
    assert (
        "DL3007"
        in subprocess.run(
            [tool("hadolint"), str(tmp_path / "Dockerfile")], capture_output=True, text=True
        ).stdout
    )


def scripts() -> list[Path]:
    files = [
        path
        for path in sorted((ROOT / "launch").rglob("*"))
        if path.is_file() and path.suffix in ("", ".sh", ".sbatch")
    ]
    return [path for path in files if re.match(r"#!.*\b(ba)?sh\b", path.read_text().split("\n")[0])]


@pytest.mark.parametrize("path", scripts(), ids=lambda p: p.name)
def test_shellcheck_is_clean(path):
    result = subprocess.run([tool("shellcheck"), str(path)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_the_image_is_as_the_manifests_expect():
    last = DOCKERFILE.split("\nFROM ")[-1]
    assert re.findall(r"^USER (\S+)$", last, flags=re.M) == ["1000:1000"]
    assert "WORKDIR /app" in last
    assert re.search(r"^ARG VARIANT=cpu$", DOCKERFILE, flags=re.M)
    assert re.search(r"^ARG PYG_INDEX=", DOCKERFILE, flags=re.M)
    assert (
        DOCKERFILE.index("install.sh torch")
        < DOCKERFILE.index("install.sh dependencies")
        < DOCKERFILE.index("COPY cimage_dist")
    )


def test_what_is_copied_is_not_ignored():
    """Every source of a COPY exists and is excepted in .dockerignore, which ignores the rest."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[1] == "*"
    for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, flags=re.M):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert f"!{source}" in lines, f"{source} is copied, but .dockerignore leaves it out"


def test_the_script_says_what_it_can_do():
    script = str(ROOT / "launch" / "install.sh")
    assert subprocess.run([script], capture_output=True, text=True).returncode == 2
    result = subprocess.run([script, "nonsense"], capture_output=True, text=True)
    assert result.returncode == 2
    assert "no step 'nonsense'" in result.stderr


@pytest.mark.slow
def test_the_install_steps_run_in_a_clean_environment(tmp_path):
    """What the Dockerfile runs; `check` renders a manifest away from the sources."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    environment = {
        **os.environ,
        "PYTHON": str(tmp_path / "venv" / "bin" / "python"),
        "TORCH_INDEX": "",
        "VARIANT": "cpu",
    }
    environment.pop("PYTHONPATH", None)
    steps = ["torch", "dependencies", "package", "check"]
    result = subprocess.run(
        [str(ROOT / "launch" / "install.sh"), *steps],
        env=environment,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    assert "ready" in result.stdout
