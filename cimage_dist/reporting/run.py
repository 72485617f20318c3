"""report.html of a run: what came out first, then how it came about."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cimage_dist.config import Config
from cimage_dist.config_loading import changed_settings, load_config
from cimage_dist.data.ingest import open_graph
from cimage_dist.data.splits import training_graph
from cimage_dist.data.store import Graph
from cimage_dist.errors import UserError
from cimage_dist.eval.controls import FIXED_HOPS
from cimage_dist.io import artifacts, mirror
from cimage_dist.io.artifacts import RunDir, read_metrics
from cimage_dist.io.checkpoint import open_rows
from cimage_dist.nn.projection import placed
from cimage_dist.nn.routing import normalize_factors
from cimage_dist.pipeline import stages
from cimage_dist.pipeline.evaluation import evaluate_run
from cimage_dist.pipeline.neighbors import nearest
from cimage_dist.pseudo.kmeans import kmeans
from cimage_dist.reporting import insight
from cimage_dist.reporting.charts import Chart, bars, table
from cimage_dist.reporting.page import section, write_page
from cimage_dist.reporting.terminal import footnotes, score_table, winners
from cimage_dist.reporting.training import (
    GLOSSARY,
    cost_charts,
    introduction,
    loss_charts,
    of_kind,
    partition_charts,
)
from cimage_dist.train.progress import duration
from cimage_dist.train.refresh import FullEmbedder, SampledEmbedder

Note = Callable[[str], None]
_HSIC_ROWS = 2_000
_NEAR = 8  # neighbours shown of a node
_ON_DISK = (
    200_000  # nodes up to which the whole embedding is clustered; beyond, the shown sample is
)


class _Run:
    """What is on disk of a run, read once."""

    def __init__(self, folder: Path) -> None:
        self.dir = RunDir(folder)
        if not self.dir.summary.is_file():
            raise UserError(
                f"No finished run in {folder}. Run `cimage pretrain` with the same config first."
            )
        cfg = load_config(self.dir.config)
        # It may have been moved.
        cfg = dataclasses.replace(cfg, run=dataclasses.replace(cfg.run, dir=str(folder)))
        if self.dir.graph.is_dir():
            data = dataclasses.replace(cfg.data, path=str(self.dir.graph))
            cfg = dataclasses.replace(cfg, data=data)
        self.cfg = cfg
        self.summary = artifacts.read_json(self.dir.summary, "the run's summary")
        self.env = artifacts.read_json(self.dir.environment, "the run's environment record")
        self.scores: dict[str, Any] | None = (
            artifacts.read_json(self.dir.evaluation, "the run's scores")
            if self.dir.evaluation.is_file()
            else None
        )
        self.records = read_metrics(self.dir.metrics)
        best = self.summary["best"]
        self.chosen = (
            best["step"] if self.cfg.train.select == "val" and best else self.summary["steps"]
        )


def report(folder: str | Path, points: int = 2_000, note: Note = lambda text: None) -> Path:
    """Write report.html into the folder of a run, which is scored first where it was not; returns
    its path.
    """
    root = mirror.open_place(folder).root
    score_run(root, note)
    with mirror.edited(root):
        return write_run_page(root, points, note)[0]


def score_run(folder: Path, note: Note) -> None:
    """Evaluate a finished run that has no scores yet; where that cannot be done, say why."""
    run = RunDir(folder)
    if not run.summary.is_file() or run.evaluation.is_file():
        return
    cfg = _Run(folder).cfg
    try:
        evaluate_run(cfg, note=note)
    except UserError as error:
        note(f"there are no scores: {error}")


def write_run_page(
    folder: Path, points: int = 2_000, note: Note = lambda text: None
) -> tuple[Path, list[Chart]]:
    """Write report.html into the run's folder; (its path, the charts on it)."""
    run = _Run(folder)
    insights, dependence = _insights(run, points, note)
    env, cfg = run.env, run.cfg
    sections = [
        section("Scores", "", _score_charts(run)),
        section("Embedding", "", insights["embedding"]),
        section(
            "Contexts",
            "CIMAGE parts the factors of a node into two contexts and predicts "
            "the second from the first.",
            [*insights["dependence"], *partition_charts(run.records, cfg.model.num_factors)],
        ),
        section(
            "Training",
            "",
            loss_charts(run.records, run.chosen if run.cfg.train.select == "val" else None),
        ),
        section("Cost", "", cost_charts(run.records)),
        section(
            "Settings",
            "",
            [
                table(
                    "Differences from the defaults",
                    "",
                    ["key", "value", "default"],
                    changed_settings(cfg),
                ),
                table("Environment", "", ["", ""], _environment(env)),
            ],
        ),
    ]
    about = (
        f"{env['graph']['nodes']:,} nodes, {env['graph']['edges'] // 2:,} edges; seed "
        f"{cfg.run.seed}; settings {run.summary['fingerprint']}; {folder}"
    )
    path = run.dir.page
    write_page(
        path,
        f"CIMAGE on {env['graph']['name']}",
        about,
        verdict(run.scores, run.records, dependence),
        _facts(run),
        sections,
        introduction(env["graph"]["name"]),
        GLOSSARY,
    )
    return path, [chart for part in sections for chart in part["charts"]]


def _facts(run: _Run) -> list[tuple[str, str]]:
    facts = []
    scores = run.scores or {}
    if scores.get("node") and scores["node"]["test"] is not None:
        facts.append((f"{scores['node']['test']:.2f} %", "test accuracy of the probe"))
    if scores.get("link"):
        facts.append((f"{scores['link']['auc']:.2f} %", "link AUC on held-out edges"))
    if scores.get("cluster") and "nmi" in scores["cluster"]:
        facts.append((f"{scores['cluster']['nmi']:.1f} %", "NMI of k-means with the classes"))
    if run.summary["best"]:
        facts.append(
            (
                f"{run.summary['best']['score']:.2f} %",
                f"best validation score, step {run.summary['best']['step']:,}",
            )
        )
    train = of_kind(run.records, "train")
    facts.append((f"{run.summary['steps']:,}", "steps"))
    if train and all("seconds" in r for r in train):
        facts.append((duration(sum(r["seconds"] for r in train)), "training"))
    if train and "memory_gb" in train[-1]:
        facts.append((f"{max(r['memory_gb'] for r in train):.2f} GB", "memory of the process"))
    return facts


def verdict(
    scores: dict[str, Any] | None,
    records: list[dict[str, Any]],
    dependence: dict[str, float] | None,
) -> list[str]:
    """Sentences a reader needs before any chart, the unwelcome ones too."""
    said = []
    if scores is None:
        said.append(
            "Not scored yet: run `cimage evaluate` with the same config, then the report again."
        )
    else:
        for group, key, what in (
            ("node", "test", "Test accuracy"),
            ("link", "auc", "Link AUC"),
            ("cluster", "nmi", "Clustering NMI"),
        ):
            ours = (scores.get(group) or {}).get(key)
            others = {
                name: (found.get(group) or {}).get(key)
                for name, found in scores.get("controls", {}).items()
            }
            known = {name: value for name, value in others.items() if value is not None}
            if ours is None or not known:
                continue
            chosen = (scores.get("controls_best") or {}).get("any") if group == "node" else None
            best = chosen if chosen in known else max(known, key=lambda name: known[name])
            gap = ours - known[best]
            word = "above" if gap > 0 else "BELOW"
            said.append(
                f"{what} {ours:.2f} %: {abs(gap):.2f} points {word} the best control ({best}, "
                f"{known[best]:.2f} %)."
            )
        if said:
            said.append("This is one seed: look at the spread over seeds before believing a point.")
    if dependence:
        share = dependence["below"]
        word = (
            "less dependent than"
            if share >= 0.95
            else "MORE dependent than"
            if share <= 0.05
            else "about as dependent as"
        )
        said.append(
            f"Given the pseudo-labels, F1 and F2 are {word} random contexts of the same sizes: "
            f"HSIC {dependence['ours']:.3f} against {dependence['random']:.3f}, lower than "
            f"{share:.0%} of them."
        )
    refreshes = of_kind(records, "ci")
    odd = [r for r in refreshes if r.get("status") not in (None, "ok", "kept-previous")]
    if odd:
        said.append(
            f"{len(odd)} of {len(refreshes)} refreshes did not find a partition the usual way "
            f"({', '.join(sorted({r['status'] for r in odd}))})."
        )
    least = [r["variance_f2_min"] for r in refreshes if "variance_f2_min" in r]
    if least and least[-1] < 1e-6:
        said.append(
            "A factor of F2 has collapsed to a constant at the end: its reconstruction teaches "
            "nothing."
        )
    return said


def _score_charts(run: _Run) -> list[Chart]:
    if run.scores is None:
        return []
    columns, rows = score_table(run.scores)
    charts = [
        table(
            "Scores in percent",
            "Higher is better; the best of each row is bold. CIMAGE is the embedding of this run, "
            "the others need no training.",
            columns,
            rows,
            [winners(row) for row in rows],
            footnotes(run.scores),
        )
    ]
    few = run.scores.get("few_labels") or {}
    methods = {"CIMAGE": run.scores, **run.scores.get("controls", {})}
    counts = [n for n, row in few.items() if row["mean"] is not None]
    if counts:
        cells = {
            name: [(found.get("few_labels") or {}).get(n) or {} for n in counts]
            for name, found in methods.items()
        }
        means = {name: [c.get("mean") for c in row] for name, row in cells.items()}
        spread = {name: [c.get("std") or 0.0 for c in row] for name, row in cells.items()}
        charts.append(
            bars(
                "Few labels",
                "Test accuracy by labels per class; lines are the standard deviation over label "
                "draws.",
                "percent",
                [f"{n} a class" for n in counts],
                means,
                spread,
            )
        )
    return charts


def _environment(env: dict[str, Any]) -> list[list[str]]:
    versions = [[name, str(version)] for name, version in env["packages"].items() if version]
    return [
        ["Python", env["python"]],
        ["platform", env["platform"]],
        ["CPUs", str(env["cpu_count"])],
        *versions,
    ]


def _insights(
    run: _Run, points: int, note: Note
) -> tuple[dict[str, list[Chart]], dict[str, float] | None]:
    """What needs the graph and the model; left out with a note where the graph cannot be opened any
    more.
    """
    found: dict[str, list[Chart]] = {"embedding": [], "dependence": []}
    try:
        graph = open_graph(run.cfg.data)
        model, saved = stages.load_model(run.cfg, graph)
        if stages.embedded_step(run.dir) != saved.step:
            stages.embed(run.cfg, graph, note=note)
    except UserError as error:
        note(f"the map and the contexts are left out: {error}")
        return found, None
    topology, _ = training_graph(graph, run.cfg.data, run.cfg.run.seed)
    kept = (
        artifacts.read_tensors(run.dir.root / "pseudo-labels")
        if (run.dir.root / "pseudo-labels").is_dir()
        else None
    )
    note("drawing the map of the embedding")
    found["embedding"] = _embedding_charts(run, graph, topology, kept, points)
    dependence = None
    if kept is not None and saved.meta["scores"] and "scores.in_context" in saved.tensors:
        note("measuring the dependence of the contexts")
        in_context = saved.tensors["scores.in_context"].bool()
        chosen = torch.nonzero(kept["labels"] >= 0).squeeze(1)
        chosen = chosen[insight.sample(chosen.numel(), _HSIC_ROWS, run.cfg.run.seed)]
        h = _factors(run.cfg, graph, topology, model.encoder, chosen)
        found["dependence"], dependence = insight.dependence_charts(
            h, kept["labels"][chosen].long(), chosen, in_context, run.cfg
        )
    return found, dependence


def _factors(cfg: Config, graph: Graph, topology: Any, encoder: Any, gids: Tensor) -> Tensor:
    """Disentangled factors of some nodes, [n, K, c], as a refresh sees them."""
    device = next(encoder.parameters()).device
    embedder = (
        SampledEmbedder(graph.x, topology, cfg, device)
        if cfg.sampler.fanouts
        else FullEmbedder(placed(graph.rows(), device, torch.float32), topology)
    )
    h = embedder(encoder, gids, 0).h.cpu()
    return normalize_factors(h) if cfg.ci.normalize else h


def _embedding_charts(
    run: _Run, graph: Graph, topology: Any, kept: dict[str, Tensor] | None, points: int
) -> list[Chart]:
    cfg, y = run.cfg, graph.labels()
    gids = insight.sample(graph.num_nodes, points, cfg.run.seed)
    rows = open_rows(run.dir.embeddings)
    shown = torch.from_numpy(rows.take(gids.numpy()))
    count = graph.num_classes or cfg.cluster.num_clusters or 8
    whole = stages.load_embeddings(run.dir) if graph.num_nodes <= _ON_DISK else None
    basis = F.normalize(shown if whole is None else whole, dim=1, eps=1e-12)
    labels = kmeans(basis, min(count, basis.shape[0]), seed=cfg.run.seed, restarts=3).labels.cpu()
    clusters = labels if whole is None else labels[gids]
    split, _ = stages.node_split_or_reason(graph, cfg)
    known = None if y is None or split is None else (split.train | split.val) & (y >= 0)
    if whole is None:  # neighbours among the dots: those among all nodes would take too long
        near, cosines = nearest(shown.numpy(), np.arange(len(shown)), _NEAR)
        near, near_note = gids.numpy()[near], " among the dots"
    else:
        near, cosines = nearest(rows, gids.numpy(), _NEAR)
        near_note = ""
    nodes = insight.Shown(
        gids,
        shown,
        clusters,
        near,
        cosines,
        kept["labels"] if kept else None,
        kept["confidence"] if kept else None,
        known,
    )
    charts = [insight.map_chart(graph, topology.degrees(), nodes, cfg.run.seed, near_note)]
    if (
        whole is not None
        and split is not None
        and y is not None
        and bool((y[split.train] >= 0).any())
    ):
        hops = (((run.scores or {}).get("controls") or {}).get("smoothed") or {}).get(
            "hops", FIXED_HOPS
        )
        charts += insight.mistake_charts(whole, graph, topology, split, cfg, hops)
    return charts
