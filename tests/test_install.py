"""What is installed for whom."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=; ]", text)[0].lower() for text in requirements}


def test_users_get_no_tools_of_developers() -> None:
    tools = names(PROJECT["optional-dependencies"]["dev"]) - {"cimage-dist"}
    tools |= names(PROJECT["optional-dependencies"]["docs"])
    assert {"mypy", "pytest", "ruff", "playwright", "kubernetes-validate", "mkdocs"} <= tools
    assert not tools & names(PROJECT["dependencies"])


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_the_demo_installs_the_light_set(tmp_path: Path) -> None:
    def plan(target: str) -> str:
        command = ["make", "--no-print-directory", "-n", target, f"VENV={tmp_path / 'v'}"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert "-e .\n" in plan("demo") and "[dev]" not in plan("demo")
    assert "[dev]" in plan("test")
