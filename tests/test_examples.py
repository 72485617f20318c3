"""The examples run as written, shortened."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from cimage_dist import registry

FOLDER = Path(__file__).parents[1] / "examples"


@pytest.fixture
def in_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_LOSSES", {})


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_own_graph(in_a_folder: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert example("own_graph").main(num_nodes=300, epochs=3).shape[0] == 300
    assert "neighbours in the same group" in capsys.readouterr().out


def test_own_loss(in_a_folder: None) -> None:
    example("own_loss").main(epochs=2)


def test_few_labels(in_a_folder: None) -> None:
    assert example("few_labels").main(epochs=2)["few_labels"]["5"]["mean"] > 17


def test_all_examples_are_tested() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == {"own_graph", "own_loss", "few_labels"}
