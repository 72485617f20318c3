"""What docs/RESULTS.md shows is what the result files hold."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield
    for name in ("clusters", "seeds", "hardware"):
        sys.modules.pop(name, None)


def test_the_document_matches_the_files(benchmarks):
    import clusters
    import seeds

    text = (ROOT / "docs" / "RESULTS.md").read_text()
    for module, made in ((clusters, clusters.table()), (seeds, seeds.tables())):
        shown = text.split(module.BEGIN)[1].split(module.END)[0].strip()
        assert shown == made.strip(), f"python {module.__file__} render"
