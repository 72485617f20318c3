"""Every method with every seed on one graph; finished cells are kept."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from cimage_dist import baselines
from cimage_dist.baselines import OWN
from cimage_dist.comparison.cell import Cell, Result, finished, in_own_process
from cimage_dist.comparison.summary import as_text, summarise, write_compare_page
from cimage_dist.config import Config, fingerprint
from cimage_dist.config_loading import load_config
from cimage_dist.data.ingest import data_of, open_graph
from cimage_dist.data.splits import training_graph
from cimage_dist.data.store import Graph
from cimage_dist.errors import UserError
from cimage_dist.io import artifacts, storage
from cimage_dist.pipeline import stages
from cimage_dist.pipeline.evaluation import as_graph
from cimage_dist.train.initial import number_of_clusters
from cimage_dist.train.progress import Progress

Execute = Callable[[Cell, bool, str], Result]
MakeRaw = Callable[[], tuple[Graph, bool]]
Settings = Mapping[str, Mapping[str, Any]]  # method -> its settings that differ from the yaml
NO_LABELS = "no classes to probe: methods are compared by held-out links and by modularity"
HOLD_OUT = "; data.holdout_edges=link is set for it"
AS_STORED = (
    "the features are those of the store, scaled already: methods whose settings ask for raw "
    "features (normalize: none) get them scaled. Give the folder of the raw files as data.path, or "
    "a store made with data.normalize=none, to let them have raw ones"
)


@dataclass(frozen=True)
class Comparison:
    """`summary` is what compare.json holds; print the comparison for its table."""

    summary: dict[str, Any]
    folder: Path

    @property
    def page(self) -> Path:
        return self.folder / "compare.html"

    @property
    def failed(self) -> list[Result]:
        found: list[Result] = self.summary["failed"]
        return found

    def __str__(self) -> str:
        return as_text(self.summary)


class _Graphs(NamedTuple):
    """Ours and the controls get the features as data.normalize says, the methods raw ones."""

    ours: Graph
    raw: Graph
    is_raw: bool


def compare(
    source: Any,
    methods: Sequence[str] | None = None,
    seeds: int = 3,
    *,
    cfg: Config | None = None,
    out: str | Path | None = None,
    settings: Settings | None = None,
    progress: Progress | None = None,
    execute: Execute = in_own_process,
    jobs: int = 1,
) -> Comparison:
    """Train `methods` (None: all that suit the graph) with seeds from run.seed on; score all alike.

    `source`: a Config, a yaml file, a dataset's name, a folder, a Graph or a torch_geometric Data
    (these with `cfg` for everything but the graph). `settings`: {"gae": {"epochs": 50}}. Results
    are one file per cell, compare.json and compare.html in `out` (comparisons/<name>, with held-out
    edges comparisons/<name>-link; below CIMAGE_STORAGE where that is set); the same call again
    makes what is missing. `execute` runs a cell, by default in a process of its own; `jobs` of them
    at a time share the cores, which makes their times comparable among each other only.
    """
    progress = progress or Progress()
    prepared = prepare(
        source, methods, seeds, cfg=cfg, out=out, settings=settings, progress=progress
    )
    if OWN not in prepared.names:
        progress.note(f"no controls: they come with the method {OWN}")
    results = run_cells(prepared.cells, prepared.folder, progress, execute, jobs)
    summary = summarise(prepared.facts, prepared.names, results)
    comparison = Comparison(summary, prepared.folder)
    artifacts.write_json(comparison.folder / "compare.json", summary)
    write_compare_page(comparison.page, summary)
    return comparison


class Prepared(NamedTuple):
    """Cells seed by seed, the methods' names, what the summary says of the graph, and where the
    results belong.
    """

    cells: list[Cell]
    names: list[str]
    facts: dict[str, Any]
    folder: Path


def prepare(
    source: Any,
    methods: Sequence[str] | None,
    seeds: int,
    *,
    cfg: Config | None = None,
    out: str | Path | None = None,
    runs: str | Path | None = None,
    settings: Settings | None = None,
    progress: Progress,
) -> Prepared:
    """All that `compare` checks and reads before anything trains; `runs`: run directories of our
    method (default: below `out`).
    """
    if seeds < 1:
        raise UserError(f"The number of seeds must be at least 1; got {seeds}.")
    _check_names(methods or [], settings or {})
    cfg, ours, make_raw = _open(source, cfg or Config())
    cfg, has_labels = _with_links_or_labels(cfg, ours, progress)
    names = _chosen(methods, ours, has_labels, progress)
    graphs = _Graphs(ours, *((ours, True) if names == [OWN] else make_raw()))
    if not graphs.is_raw:
        progress.note(AS_STORED)
    folder = Path(os.environ.get("CIMAGE_STORAGE", "")) / (out or _folder(cfg))
    runs = Path(runs or folder / "runs")
    cells = _cells(cfg, graphs, names, seeds, runs, settings or {}, has_labels)
    facts = _facts(cfg, graphs, cells[0].num_clusters)
    facts["changed"] = {method: dict(part) for method, part in (settings or {}).items()}
    return Prepared(cells, names, facts, folder)


def _check_names(methods: Sequence[str], settings: Settings) -> None:
    baselines.check_names([*methods, *settings])
    if OWN in settings:
        how = "give them as config keys, e.g. train.epochs=50"
        raise UserError(f"Settings of {OWN} are those of the config: {how}.")
    if unused := [name for name in settings if methods and name not in methods]:
        raise UserError(f"There are settings for {unused[0]}, which is not among the methods.")


def _open(source: Any, cfg: Config) -> tuple[Config, Graph, MakeRaw]:
    """(config, graph with the features as data.normalize says, what opens it with raw ones)."""
    if isinstance(source, str | Path) and str(source).endswith((".yaml", ".yml")):
        source = load_config(source)
    elif isinstance(source, str | Path):
        found = data_of(source)
        data = dataclasses.replace(cfg.data, name=found.name, path=found.path)
        source = dataclasses.replace(cfg, data=data)
    if isinstance(source, Config):
        plain = dataclasses.replace(source.data, normalize="none")
        return source, open_graph(source.data), lambda: _with_state(open_graph(plain))
    if not isinstance(source, Graph) and not hasattr(source, "edge_index"):
        kinds = "a config, a graph, a torch_geometric Data, a dataset's name or a folder"
        raise UserError(f"compare takes {kinds}; got {type(source).__name__}.")
    ours = as_graph(source, cfg.data)
    cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, name=ours.name))
    if isinstance(source, Graph):
        return cfg, ours, lambda: _with_state(source)
    return cfg, ours, lambda: (Graph.from_data(source, normalize="none"), True)


def _with_state(graph: Graph) -> tuple[Graph, bool]:
    """The graph, and whether its store says that feature rows were kept as given."""
    options = graph.manifest.get("provenance", {}).get("options", {})
    return graph, options.get("normalize") == "none"


def _with_links_or_labels(cfg: Config, graph: Graph, progress: Progress) -> tuple[Config, bool]:
    """(config, whether there is a node split); without one, edges are held out."""
    split, _ = stages.node_split_or_reason(graph, cfg)
    if split is not None:
        return cfg, True
    is_held = cfg.data.holdout_edges == "link"
    progress.note(NO_LABELS + ("" if is_held else HOLD_OUT))
    data = dataclasses.replace(cfg.data, holdout_edges="link")
    return dataclasses.replace(cfg, data=data), False


def _chosen(
    methods: Sequence[str] | None, graph: Graph, has_labels: bool, progress: Progress
) -> list[str]:
    """Those asked for, once each, if all suit the graph; else all that do."""
    if methods:
        baselines.check(methods, graph.num_nodes, has_labels)
        return list(dict.fromkeys(methods))
    names = []
    for name in baselines.METHODS:
        reason = baselines.why_not(name, graph.num_nodes, has_labels)
        if reason:
            progress.note(f"left out: {reason}")
        else:
            names.append(name)
    return names


def _folder(cfg: Config) -> Path:
    return Path("comparisons") / f"{cfg.data.name}{'-link' * (_task(cfg) == 'link')}"


def _task(cfg: Config) -> Literal["node", "link"]:
    return "link" if cfg.data.holdout_edges == "link" else "node"


def _cells(
    cfg: Config,
    graphs: _Graphs,
    names: Sequence[str],
    seeds: int,
    runs: Path,
    settings: Settings,
    has_labels: bool,
) -> list[Cell]:
    """Seed by seed, so that an interrupted comparison has whole seeds."""
    clusters = None
    if not has_labels:
        topology, _ = training_graph(graphs.ours, cfg.data, cfg.run.seed)
        clusters = number_of_clusters(cfg, graphs.ours, topology)
    name, task = cfg.data.name, _task(cfg)
    others = [method for method in names if method != OWN]
    given = {m: baselines.settings_of(m, name, task, settings.get(m)) for m in others}
    cells = []
    for seed in range(cfg.run.seed, cfg.run.seed + seeds):
        place = str(runs / fingerprint(cfg) / f"seed-{seed}")
        run = dataclasses.replace(cfg.run, seed=seed, dir=place)
        seeded = dataclasses.replace(cfg, run=run)
        for method in names:
            graph = graphs.ours if method == OWN else graphs.raw
            cells.append(Cell(method, seeded, graph, given.get(method, {}), clusters))
    return cells


def run_cells(
    cells: Sequence[Cell],
    folder: Path,
    progress: Progress,
    execute: Execute = in_own_process,
    jobs: int = 1,
) -> list[Result]:
    """Results in the order of the cells; one that failed has its reason under `error`."""
    if jobs < 1:
        raise UserError(f"The number of cells at a time must be at least 1; got {jobs}.")
    kept = [finished(cell, folder) for cell in cells]
    missing = [at for at, there in enumerate(kept) if there is None]
    progress.note(f"{len(cells)} cells in {folder}, {len(missing)} to be made")

    def make(done: int, cell: Cell) -> Result:
        stage = f"{cell.method}, seed {cell.seed}"
        progress.note(f"{stage} ({done} of {len(missing)})")
        result = _attempt(_sharing(cell, jobs), stage, progress, execute)
        artifacts.write_json(cell.path(folder), result)
        return result

    if jobs == 1:  # in the calling thread, where a cell may handle signals
        new = {at: make(done, cells[at]) for done, at in enumerate(missing, 1)}
    else:
        with ThreadPoolExecutor(jobs) as pool:
            made = [pool.submit(make, done, cells[at]) for done, at in enumerate(missing, 1)]
            try:
                new = dict(zip(missing, [future.result() for future in made], strict=True))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return [there if there is not None else new[at] for at, there in enumerate(kept)]


def _sharing(cell: Cell, jobs: int) -> Cell:
    """The cell with its share of the cores, where several run at a time."""
    if jobs == 1 or cell.cfg.resources.threads:
        return cell
    threads = max(1, (os.cpu_count() or 1) // jobs)
    resources = dataclasses.replace(cell.cfg.resources, threads=threads)
    return dataclasses.replace(cell, cfg=dataclasses.replace(cell.cfg, resources=resources))


def _attempt(cell: Cell, stage: str, progress: Progress, execute: Execute) -> Result:
    try:
        return execute(cell, progress.quiet, stage)
    except Exception as error:  # of one method: the others continue
        text = " ".join(str(error).split())
        reason = text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"
        progress.note(f"failed: {reason}")
        facts = {"method": cell.method, "seed": cell.seed, "fingerprint": cell.fingerprint}
        return facts | {"error": reason}


def _facts(cfg: Config, graphs: _Graphs, clusters: int | None) -> dict[str, Any]:
    graph = graphs.ours
    return {
        "graph": {
            "name": cfg.data.name,
            "fingerprint": graph.fingerprint,
            "nodes": graph.num_nodes,
            "edges": graph.num_edges // 2,
            "features": graph.num_features,
            "classes": graph.num_classes,
        },
        "task": _task(cfg),
        "has_labels": clusters is None,
        "clusters": clusters,
        "raw_features": graphs.is_raw,
        "config_fingerprint": fingerprint(cfg),
        "environment": storage.describe(),
    }
