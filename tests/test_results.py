"""What docs/RESULTS.md shows is what the result files hold."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield
    for name in ("clusters", "hardware"):
        sys.modules.pop(name, None)


def test_the_document_matches_the_files(benchmarks):
    import clusters

    shown = (
        (ROOT / "docs" / "RESULTS.md")
        .read_text()
        .split(clusters.BEGIN)[1]
        .split(clusters.END)[0]
        .strip()
    )
    assert shown == clusters.table().strip(), f"python {clusters.__file__} render"
