"""Make one cell: train, evaluate, keep what tables show in a small JSON file."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cimage_dist.config import Config
from cimage_dist.data.ingest import open_graph
from cimage_dist.data.splits import training_graph
from cimage_dist.data.store import Graph
from cimage_dist.eval.score import row_scores
from cimage_dist.io import artifacts, storage
from cimage_dist.pipeline import stages
from cimage_dist.pipeline.evaluation import (
    best_controls,
    evaluate_run,
    score_links,
    score_matrix,
    untrained_rows,
    view_scores,
)
from cimage_dist.train.progress import Progress
from experiments.low_labels import low_label_scores
from experiments.spec import RULER, Cell

Train = Callable[[Config, Progress, Graph], dict[str, Any]]
_KEPT = (
    "node",
    "few_labels",
    "cluster",
    "link",
    "controls_best",
    "graph",
    "fingerprint",
    "seed",
    "step",
    "edges",
    "objective",
)
_KEPT_OF_CONTROLS = (
    "node",
    "few_labels",
    "cluster",
    "link",
    "width",
    "hops",
    "alpha",
    "of",
    "chosen_by",
)
_FEW_LABELS = [5]  # per class: every run is scored with so many, too


def run_cell(
    cell: Cell, results: Path, runs: Path, progress: Progress, train: Train = stages.pretrain
) -> dict[str, Any]:
    """Train and score, unless the result is there; an existing run directory is continued."""
    target = cell.path(results)
    if target.is_file():
        return read_result(target)
    cfg = cell.load(
        f"run.dir={runs / cell.run_folder / f'seed-{cell.seed}'}", "run.tensorboard=false"
    )
    graph = open_graph(cfg.data)
    # The controls are those of the shipped config: once is enough.
    is_shipped = cell.folder.endswith("/as-shipped")
    known = known_controls(cell, results) if is_shipped else {}
    few = cfg.eval.few_labels or _FEW_LABELS
    scoring = dataclasses.replace(cfg.eval, controls=is_shipped and not known, few_labels=few)
    cfg = dataclasses.replace(cfg, eval=scoring)
    storage.forget_peak_memory()
    summary = train(cfg, progress, graph)
    found = evaluate_run(cfg, graph=graph)
    if known:
        found |= with_untrained(cfg, graph, known)
    result = {name: found.get(name) for name in _KEPT}
    result["controls"] = {
        name: {part: scores[part] for part in _KEPT_OF_CONTROLS if part in scores}
        for name, scores in found.get("controls", {}).items()
    }
    if cell.extra == "views":
        result["views"] = view_scores(cfg, graph, read_test=True)
    if cell.extra == "low_labels":
        result["low_labels"] = low_label_scores(cfg, graph)
    facts = storage.describe()
    result |= {
        "command": cell.command(),
        "config": cell.config,
        "overrides": list(cell.overrides),
        "config_fingerprint": cell.config_fingerprint,
        "recipe": cell.recipe,
        "ruler": RULER,
        "steps": summary["steps"],
        "seconds": round(summary["seconds"], 1),
        "peak_rss_gb": round(storage.peak_memory() / 1e9, 2),
        "commit": code_commit(),
        "environment": {
            name: facts[name]
            for name in ("python", "platform", "cpu_count", "torch_threads", "packages")
        },
    }
    artifacts.write_json(target, result)
    return result


def known_controls(cell: Cell, results: Path) -> dict[str, Any]:
    """The controls that do not depend on our encoder, from another result on the same split: they
    are the same matrices under the same probe. Empty where there is none.
    """
    for path in sorted((results / cell.folder).parent.glob(f"*/seed-{cell.seed}.json")):
        other = read_result(path)
        is_alike = other.get("config") == cell.config and other.get("ruler") == RULER
        if is_alike and other.get("controls"):
            return {name: row for name, row in other["controls"].items() if name != "untrained"}
    return {}


def with_untrained(cfg: Config, graph: Graph, known: dict[str, Any]) -> dict[str, Any]:
    """Known controls and our untrained encoder beside them, as `evaluate_run` gives them."""
    topology, links = training_graph(graph, cfg.data, cfg.run.seed)
    model, _ = stages.load_model(cfg, graph)
    used = model.encoder.cfg
    width = used.num_factors * used.factor_dim
    z = untrained_rows(cfg, graph, topology, used)
    scores = score_matrix(z, graph, topology, cfg) | {"width": width}
    scores["link"] = score_links(row_scores(z), links) if links else None
    controls = known | {"untrained": scores}
    return {"controls": controls, "controls_best": best_controls(controls, width)}


def read_result(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = artifacts.read_json(path, "a result")
    return found


def code_commit() -> str | None:
    """The commit of the code, marked when code or configs had changes since; None outside a
    repository.
    """

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(Path(__file__).parents[1]), *words], capture_output=True, text=True
        ).stdout.strip()

    commit = git("describe", "--always")
    return (
        f"{commit}-dirty"
        if commit and git("status", "--porcelain", "--", "cimage_dist", "configs")
        else commit or None
    )


def cell_command(cell: Cell, results: Path, runs: Path) -> list[str]:
    """The command by which another process makes this cell."""
    return [sys.executable, *cell.work(results, runs)]


def shown(cell: Cell) -> str:
    return f"{cell.folder}, seed {cell.seed}"
