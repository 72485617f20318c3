"""Who may import whom, how fast the front door opens, how many and how long modules are."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "cimage_dist"
BASE = {"types", "config", "config_loading", "errors", "keyed", "io", "registry"}
MATHS = BASE | {"comm", "nn", "losses", "ci", "pseudo"}
RUNS = MATHS | {"data", "sampling", "train", "eval"}
# layer -> layers it may import besides itself; the tree reads from the mathematics outwards
ALLOWED = {
    "errors": set(),
    "types": set(),
    "keyed": set(),
    "registry": {"comm"},  # as a type
    "config": {"errors", "registry"},
    "config_loading": {"config", "errors"},
    "comm": BASE,
    "io": BASE,
    "nn": BASE,
    "losses": BASE | {"comm"},
    "ci": BASE | {"comm", "losses"},
    "pseudo": MATHS,
    "data": BASE,
    "sampling": BASE | {"data"},
    "baselines": BASE | {"data", "sampling"},
    "train": MATHS | {"data", "sampling"},
    "eval": MATHS | {"data", "sampling"},
    "pipeline": RUNS,
    "api": RUNS | {"pipeline", "distributed"},  # the latter only where workers are asked for
    "planning": RUNS,
    "tune": RUNS | {"pipeline", "reporting"},
    "deploy": BASE | {"data"},
    "reporting": RUNS | {"pipeline"},
    "comparison": RUNS | {"pipeline", "reporting", "baselines"},
}
EVERYTHING = set(ALLOWED)
ALLOWED |= {
    "distributed": EVERYTHING,
    "cli": EVERYTHING | {"distributed"},
    "__main__": {"cli", "errors"},
}
MOST_MODULES = 130  # with content: an empty __init__ is none
MOST_LINES, MOST_COLUMNS = 400, 100
# Results are rendered, with commands as they were given; a table's row is one line.
TEXTS = ("cimage_dist", "tests", "experiments", "benchmarks", "examples", "docs", "configs")
# third-party package -> layers that may name it
CONFINED = {
    "ray": {"distributed"},
    "omegaconf": {"config", "config_loading"},
    "torch_geometric": {"baselines", "data", "nn"},
}


def imports_of(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module)
            if node.module == "cimage_dist":
                names |= {f"cimage_dist.{alias.name}" for alias in node.names}
    return names


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_import_directions(path):
    layer = layer_of(path)
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] == "cimage_dist" and len(parts) > 1 and not parts[1].startswith("__"):
            assert parts[1] == layer or parts[1] in ALLOWED[layer], (
                f"{path}: {layer} must not import {parts[1]}"
            )
        if parts[0] in CONFINED:
            assert layer in CONFINED[parts[0]], (
                f"{path}: {parts[0]} belongs to {CONFINED[parts[0]]}"
            )


def test_the_front_door_loads_nothing_heavy():
    code = (
        "import sys, cimage_dist, cimage_dist.__main__; "
        "cimage_dist.__main__.build_parser().format_help(); print([m for m in ('torch', "
        "'ray', 'torch_geometric', 'sklearn', 'pandas') if m in sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


def test_nothing_is_unpickled():
    """Files may come from anywhere: no call that would run code found in them."""
    forbidden = (
        "allow_pickle=True",
        "weights_only=False",
        "pickle.load(",
        "pickle.loads(",
        "joblib.load",
    )
    for path in MODULES:
        text = path.read_text()
        assert not [word for word in forbidden if word in text], path


def test_modules_are_few_and_short():
    lines = {path: len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert [path for path, count in lines.items() if count > MOST_LINES] == []
    assert sum(count > 0 for count in lines.values()) <= MOST_MODULES


def test_lines_fit_a_screen():
    files = [
        path
        for name in TEXTS
        for end in ("py", "md", "yaml")
        for path in ROOT.glob(f"{name}/**/*.{end}")
    ]
    files += list(ROOT.glob("*.md"))
    too_long = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in files
        if path.name != "RESULTS.md"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > MOST_COLUMNS and not line.lstrip().startswith("|")
    ]
    assert not too_long, too_long
