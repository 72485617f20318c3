"""Who may import whom, and how fast the front door opens."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "cimage_dist"
BASE = {"types", "config", "config_loading", "errors", "keyed"}
# layer -> layers it may import besides itself; the tree reads from the mathematics outwards
ALLOWED = {
    "errors": set(),
    "types": set(),
    "keyed": set(),
    "config": {"errors"},
    "deploy": {"config", "config_loading", "errors", "sweep"},
    "environment": set(),
    "comm": BASE,
    "artifacts": BASE,
    "rows": BASE | {"artifacts"},
    "stats": BASE | {"comm"},
    "nn": BASE,
    "cluster": BASE | {"comm", "stats", "nn"},
    "losses": BASE,
    "baselines": BASE | {"graph"},
    "graph": BASE | {"artifacts"},
    "checkpoint": BASE | {"artifacts"},
    "train": BASE | {"comm", "artifacts", "stats", "nn", "cluster", "losses", "graph", "checkpoint", "environment"},
    "eval": BASE | {"comm", "artifacts", "stats", "nn", "losses", "graph", "checkpoint"},
    "embedding": BASE | {"artifacts", "nn", "graph", "rows", "train"},
    "stages": BASE | {"embedding", "rows"} | {"comm", "artifacts", "stats", "nn", "losses", "graph", "checkpoint", "train", "eval", "environment"},
    "evaluation": BASE | {"comm", "artifacts", "stats", "nn", "losses", "graph", "checkpoint", "train", "eval", "environment", "stages"},
    "clustering": BASE | {"comm", "environment", "stats", "graph", "train"},
    "api": BASE | {"comm", "artifacts", "stats", "nn", "losses", "graph", "checkpoint", "train", "eval", "environment", "stages", "evaluation"},
    "plan": BASE | {"comm", "artifacts", "stats", "nn", "graph", "train"},
    "overview": BASE | {"artifacts", "environment", "checkpoint", "graph"},
    "sweep": BASE | {"artifacts", "stats", "nn", "graph", "checkpoint", "train", "eval", "stages", "evaluation"},
}
ALLOWED["bench"] = ALLOWED["evaluation"] | {"rows", "evaluation", "sweep"}
ALLOWED["report"] = ALLOWED["bench"] | {"bench"}
ALLOWED["comparison"] = ALLOWED["report"] | {"report", "baselines"}
ALLOWED["config_loading"] = {"config", "errors"}
for outer in ("api", "bench", "comparison", "embedding", "overview", "plan", "report", "stages", "sweep"):
    ALLOWED[outer] = ALLOWED[outer] | {"config_loading"}
EVERYTHING = set(ALLOWED) | {"runtime"}
ALLOWED |= {"runtime": EVERYTHING, "commands": EVERYTHING, "cli": EVERYTHING | {"commands"}}
# third-party package -> layers that may name it
CONFINED = {"ray": {"runtime"}, "omegaconf": {"config", "config_loading"}, "torch_geometric": {"baselines", "bench", "graph", "nn"}}


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
            assert parts[1] == layer or parts[1] in ALLOWED[layer], f"{path}: {layer} must not import {parts[1]}"
        if parts[0] in CONFINED:
            assert layer in CONFINED[parts[0]], f"{path}: {parts[0]} belongs to {CONFINED[parts[0]]}"


def test_the_front_door_loads_nothing_heavy():
    code = "import sys, cimage_dist, cimage_dist.cli; cimage_dist.cli.build_parser().format_help(); print([m for m in ('torch', 'ray', 'torch_geometric', 'sklearn', 'pandas') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_nothing_is_unpickled():
    """Files may come from anywhere: no call that would run code found in them."""
    forbidden = ("allow_pickle=True", "weights_only=False", "pickle.load(", "pickle.loads(", "joblib.load")
    for path in MODULES:
        text = path.read_text()
        assert not [word for word in forbidden if word in text], path
