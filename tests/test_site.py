"""The site builds without a warning, and its pages are true: tutorials run, quoted messages exist,
the notebook's cells run.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import cimage_dist
from cimage_dist import registry
from cimage_dist.__main__ import main
from cimage_dist.tune.spec import load_sweep
from tests.test_docs import check

ROOT = Path(__file__).parents[1]
TUTORIALS = sorted((ROOT / "docs/tutorials").glob("*.md"))
SHOWN_ONLY = {"cluster", "sweep"}  # they start clusters, which tests/launch and tests/tune do


@pytest.fixture
def in_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_LOSSES", {})
    monkeypatch.setattr(registry, "_CLUSTERERS", {})
    return tmp_path


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in tmp_path.rglob("*.html"):
        text = page.read_text()
        assert "arithmatex" not in text, f"{page}: a formula was not converted"
        assert not re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="?https?:', text), page


def test_the_reference_has_every_public_name() -> None:
    shown = re.findall(r"^::: cimage_dist\.(\w+)$", (ROOT / "docs/API.md").read_text(), flags=re.M)
    assert sorted(shown) == sorted(set(cimage_dist.__all__) - {"__version__"})


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, text) of the fenced blocks."""
    return re.findall(r"^ *```(\w+)\n(.*?)^ *```", page.read_text(), flags=re.M | re.S)


def cimage_lines(text: str) -> list[str]:
    return [line.split("  #")[0].strip() for line in text.splitlines() if line.startswith("cimage")]


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_tutorial(page: Path, in_a_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every block in its order: Python runs, a yaml file is written, command lines run or parse."""
    (in_a_folder / "configs").symlink_to(ROOT / "configs")
    names: dict[str, Any] = {"__name__": "tutorial"}
    seen = 0
    for language, text in blocks(page):
        if language == "python":
            exec(compile(text, page.name, "exec", dont_inherit=True), names)
        elif language == "yaml":
            Path(text.split()[1]).write_text(text)
        for command in cimage_lines(text) if language == "bash" else []:
            words = command.split()
            if page.stem not in SHOWN_ONLY:
                assert main(words[1:]) == 0, capsys.readouterr().err
            elif words[1] == "sweep":
                files = [word for word in words[2:] if "=" not in word]
                load_sweep(files, [word for word in words[2:] if "=" in word])
            elif "best.yaml" not in command:  # which the sweep would have written
                check(command)
        seen += 1
    assert seen >= 2


def test_tutorials_are_short() -> None:
    assert len(TUTORIALS) == 5
    assert [p.name for p in TUTORIALS if len(p.read_text().splitlines()) > 100] == []


def messages() -> list[str]:
    """Every string of the package that may be shown, with "\\0" for the parts filled in."""
    found = []
    for path in (ROOT / "cimage_dist").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [v.value if isinstance(v, ast.Constant) else "\0" for v in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_every_quoted_message_is_in_the_source() -> None:
    quoted = re.findall(r"^### `(.+)`$", (ROOT / "docs/FAQ.md").read_text(), flags=re.M)
    assert len(quoted) >= 15
    known = [text.replace("`", "") for text in messages()]
    for message in quoted:
        parts = [re.escape(part.strip()) for part in message.split("...")]
        pattern = re.compile(".*".join(parts), flags=re.S)
        assert any(pattern.search(text) for text in known), message


def notebook() -> list[dict[str, Any]]:
    body = json.loads((ROOT / "examples/first_hour.ipynb").read_text())
    return [cell for cell in body["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_runs(in_a_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "notebook"}
    text = "\n".join("".join(cell["source"]) for cell in notebook())
    short = text.replace("train.epochs=30", "train.epochs=2")
    assert short != text
    exec(compile(short, "first_hour.ipynb", "exec", dont_inherit=True), names)
    assert names["z"].shape[0] == names["graph"].num_nodes
    assert "5 a topic" in capsys.readouterr().out


def test_the_notebook_is_stored_with_its_output() -> None:
    found = [output for cell in notebook() for output in cell["outputs"]]
    assert all(cell["outputs"] for cell in notebook())
    assert not [output for output in found if output["output_type"] == "error"]
    assert any("image/png" in output.get("data", {}) for output in found)
