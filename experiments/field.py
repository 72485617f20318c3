"""`python -m experiments.field [node_field|link_field]`: published methods and ours, one probe.

Cells are those of `cimage compare`, one file each in experiments/results/field/, so that a table
grows method by method; `python -m experiments --render` puts what is there into docs/RESULTS.md.
Our own row is made of the runs of the tables `node` and `link` (`python -m experiments node link`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from cimage_dist.baselines import METHODS, OWN, SUPERVISED
from cimage_dist.comparison import prepare, run_cells
from cimage_dist.comparison.cell import Cell, in_own_process
from cimage_dist.comparison.summary import controls_of
from cimage_dist.config_loading import load_config
from cimage_dist.errors import UserError
from cimage_dist.eval.controls import CONTROLS, Comparison, Paired, paired, stands_out
from cimage_dist.io import artifacts
from cimage_dist.io.artifacts import value_at
from cimage_dist.train.progress import Progress
from experiments import spec
from experiments.cell import code_commit

FIELDS = Path("experiments/fields")
CHANGED = "†"  # beside scores of settings that are not the authors'
FAR = 1.5  # points below the published number that ask for a cause
Result = dict[str, Any]


@dataclass(frozen=True)
class Field:
    """`settings`: {dataset: {method: {key: value}}} that differ from the authors', named in the
    table; `left_out`: {dataset: {method: why}}, whose cells have a letter for the reason.
    """

    name: str
    title: str
    note: str
    config: str
    score: str
    seeds: dict[str, int]
    published: dict[str, dict[str, float]] = field(default_factory=dict)
    settings: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    left_out: dict[str, dict[str, str]] = field(default_factory=dict)

    def folder(self, results: Path, dataset: str) -> Path:
        return results / "field" / self.name / dataset

    def own_folder(self, results: Path, dataset: str) -> Path:
        """Where the tables `node` and `link` keep our runs: the same splits, probe and controls."""
        return results / spec.Cell(self.config.format(dataset=dataset), dataset, (), 0).folder

    def files(self, results: Path, dataset: str, method: str) -> list[Path]:
        """As many seeds of ours as of the others."""
        own = method == OWN
        folder = self.own_folder(results, dataset) if own else self.folder(results, dataset)
        paths = [
            (folder if own else folder / method) / f"seed-{seed}.json"
            for seed in range(self.seeds[dataset])
        ]
        return [path for path in paths if path.is_file()]

    def methods(self, dataset: str) -> list[str]:
        is_link = self.score.startswith("link")
        return [
            name
            for name in METHODS
            if name not in self.left_out.get(dataset, {}) and not (is_link and name == SUPERVISED)
        ]

    def reasons(self) -> list[str]:
        """Why cells are left out, each reason once; the first is (a) in the table."""
        parts = self.left_out.values()
        return list(dict.fromkeys(why for methods in parts for why in methods.values()))


def load_fields(folder: Path = FIELDS) -> list[Field]:
    paths = sorted(folder.glob("*.yaml"), reverse=True)  # nodes before links
    return [Field(name=path.stem, **yaml.safe_load(path.read_text())) for path in paths]


def results_of(table: Field, results: Path, dataset: str) -> dict[str, list[Result]]:
    """{method or control: its results by seed}; cells that failed are left out."""
    found: dict[str, list[Result]] = {}
    for name in table.methods(dataset):
        files = table.files(results, dataset, name)
        cells = [_cell(artifacts.read_json(path, "a result")) for path in files]
        if done := [cell for cell in cells if "error" not in cell]:
            found[name] = done
    return found | {k: v for k, v in controls_of(found.get(OWN, [])).items() if v}


def _cell(found: Result) -> Result:
    """Our runs have one thread, whose seconds are those of the CPU."""
    known = {"cpu_seconds": found.get("seconds"), "peak_gb": found.get("peak_rss_gb")}
    return known | found


def make(
    table: Field,
    results: Path,
    runs: Path,
    datasets: Sequence[str],
    methods: Sequence[str],
    seeds: int | None,
    jobs: int,
    progress: Progress,
) -> list[Result]:
    """Make what is missing; the failed cells. Ours are made by `python -m experiments`."""
    failed = []
    for dataset in datasets:
        others = [m for m in table.methods(dataset) if m != OWN]
        names = [m for m in others if not methods or m in methods]
        if not names:
            continue
        given = {m: s for m, s in table.settings.get(dataset, {}).items() if m in names}
        prepared = prepare(
            load_config(table.config.format(dataset=dataset)),
            names,
            min(seeds or table.seeds[dataset], table.seeds[dataset]),
            out=table.folder(results, dataset),
            runs=runs / table.name / dataset,
            settings=given,
            progress=progress,
        )
        made = run_cells(prepared.cells, prepared.folder, progress, _with_commit, jobs)
        failed += [cell for cell in made if "error" in cell]
    return failed


def _with_commit(cell: Cell, quiet: bool, stage: str) -> Result:
    return in_own_process(cell, quiet, stage) | {"commit": code_commit()}


def render_field(table: Field, results: Path) -> list[str]:
    """The table in Markdown with average ranks, its cost, and what follows from it."""
    found = {dataset: results_of(table, results, dataset) for dataset in table.seeds}
    begun = [dataset for dataset in table.seeds if found[dataset]]
    if not begun:
        return []
    lines = [f"### {table.title}", "", f"`python -m experiments.field {table.name}`. {table.note}"]
    ranks, ranked = average_ranks(table, found)
    heads = [f"{dataset} | pub" for dataset in begun]
    lines += ["", f"| | {' | '.join(heads)} | rank |", "|---|" + "---|---|" * len(begun) + "---|"]
    rows = sorted(METHODS, key=lambda name: ranks.get(name, len(METHODS)))
    for name in [*rows, *CONTROLS]:
        if not any(name in found[d] or name in table.left_out.get(d, {}) for d in begun):
            continue
        label = METHODS[name].label if name in METHODS else CONTROLS[name]
        shown = f"**{label}**" if name == OWN else label
        cells = [_score_cell(table, found[d], name, d) for d in begun]
        rank = f"{ranks[name]:.1f}" if name in ranks else ""
        lines.append(f"| {shown} | {' | '.join(cells)} | {rank} |")
    over = ", ".join(ranked) or "none yet"
    lines += ["", f"Rank: mean over the graphs on which all ranked methods ran ({over}).", ""]
    lines += _cost(found, begun, rows)
    said = _second(table, found, begun, ranks) + _unranked(table, found, begun, ranked)
    said += _far_below(table, found, begun)
    said += _remarks(table)
    done = [r for dataset in begun for cells in found[dataset].values() for r in cells]
    commits = sorted({str(r["commit"]) for r in done if "commit" in r})
    said.append(
        f"In brackets the number of seeds. Files: `experiments/results/field/{table.name}/`; "
        f"commits {', '.join(commits)}."
    )
    return [*lines, *(f"- {sentence}" for sentence in said), ""]


def _score_cell(table: Field, found: Mapping[str, Any], name: str, dataset: str) -> str:
    values = [value_at(r, table.score) for r in found.get(name, [])]
    known = [v for v in values if v is not None]
    text = "-"
    if known:
        text = f"{np.mean(known):.2f} ± {np.std(known):.2f} ({len(known)})"
        text += CHANGED if name in table.settings.get(dataset, {}) else ""
    elif name in table.left_out.get(dataset, {}):
        text = _letter(table.reasons().index(table.left_out[dataset][name]))
    pub = table.published.get(name, {}).get(dataset)
    return f"{text} | {'' if pub is None else f'{pub:.2f}'}"


def _letter(at: int) -> str:
    return f"({'abcdefghijklmnopqrstuvwxyz'[at]})"


def _means(table: Field, found: Mapping[str, Sequence[Result]]) -> dict[str, float]:
    """Mean score of every method that a rank is given to."""
    return {
        name: float(np.mean([value_at(r, table.score) for r in cells]))
        for name, cells in found.items()
        if name in METHODS and name != SUPERVISED
    }


def average_ranks(
    table: Field, found: Mapping[str, Mapping[str, Sequence[Result]]]
) -> tuple[dict[str, float], list[str]]:
    """({method: mean rank of its mean score}, the graphs it is taken over): those on which every
    method that ran on any graph ran. 1 is best; the supervised reference has none.
    """
    from scipy.stats import rankdata

    by_graph = {dataset: _means(table, found[dataset]) for dataset in found}
    names = sorted({name for scores in by_graph.values() for name in scores})
    graphs = [d for d, scores in by_graph.items() if names and set(scores) == set(names)]
    if not graphs:
        return {}, []
    scores = np.array([[by_graph[d][name] for name in names] for d in graphs])
    ranks = rankdata(-scores, axis=1).mean(0)
    return dict(zip(names, map(float, ranks), strict=True)), graphs


def _cost(
    found: Mapping[str, Mapping[str, Sequence[Result]]], begun: Sequence[str], rows: Sequence[str]
) -> list[str]:
    lines = [
        f"| CPU seconds of training, peak GB | {' | '.join(begun)} |",
        "|---|" + "---|" * len(begun),
    ]
    for name in rows:
        cells = []
        for dataset in begun:
            done = found[dataset].get(name, [])
            times = [r["cpu_seconds"] for r in done if r.get("cpu_seconds")]
            peak = max((r["peak_gb"] for r in done if r.get("peak_gb")), default=0.0)
            cells.append(f"{np.mean(times):.0f}, {peak:.2f}" if times else "-")
        if set(cells) != {"-"}:
            lines.append(f"| {METHODS[name].label} | {' | '.join(cells)} |")
    return [*lines, ""]


def _second(
    table: Field,
    found: Mapping[str, Mapping[str, Sequence[Result]]],
    begun: Sequence[str],
    ranks: Mapping[str, float],
) -> list[str]:
    """Ours against the method of the best average rank among the others, seed by seed."""
    if OWN not in ranks or len(ranks) < 2:
        return []
    order = sorted(ranks, key=lambda name: ranks[name])
    other = next(name for name in order if name != OWN)
    gaps: dict[str, Paired] = {}
    for dataset in begun:
        ours, theirs = (list(found[dataset].get(name, [])) for name in (OWN, other))
        gap = paired(ours, theirs, table.score)
        if gap is not None:
            gaps[dataset] = gap
    clear = stands_out([Comparison(dataset, other, gap) for dataset, gap in gaps.items()])
    parts = [
        f"{dataset} {gap.mean:+.2f} [{gap.interval[0]:+.2f}, {gap.interval[1]:+.2f}]"
        f"{' (differs)' if is_clear else ''}"
        for (dataset, gap), is_clear in zip(gaps.items(), clear, strict=True)
    ]
    first, place = METHODS[order[0]].label, order.index(OWN) + 1
    said = [
        f"Best average rank: {first} ({ranks[order[0]]:.1f}); {METHODS[OWN].label} is number "
        f"{place} of {len(order)} ({ranks[OWN]:.1f})."
    ]
    if parts:
        said.append(
            f"{METHODS[OWN].label} minus {METHODS[other].label}, seed by seed, with 95 % intervals:"
            f" {'; '.join(parts)}. Differs: Holm's test over these graphs at 5 %."
        )
    return said


def _unranked(
    table: Field,
    found: Mapping[str, Mapping[str, Sequence[Result]]],
    begun: Sequence[str],
    ranked: Sequence[str],
) -> list[str]:
    """Who is ahead where not every method ran."""
    parts = []
    for dataset in begun:
        means = _means(table, found[dataset])
        if dataset in ranked or not means:
            continue
        best = max(means, key=lambda name: means[name])
        ours = f", {METHODS[OWN].label} {means[OWN]:.2f}" if OWN in means and best != OWN else ""
        parts.append(f"{dataset} {METHODS[best].label} {means[best]:.2f}{ours}")
    return [f"Not ranked, the best of those that ran: {'; '.join(parts)}."] * bool(parts)


def _far_below(
    table: Field, found: Mapping[str, Mapping[str, Sequence[Result]]], begun: Sequence[str]
) -> list[str]:
    parts = []
    for name in METHODS:
        for dataset in begun:
            pub = table.published.get(name, {}).get(dataset)
            done = found[dataset].get(name, [])
            if pub is None or not done:
                continue
            mean = float(np.mean([value_at(r, table.score) for r in done]))
            if mean < pub - FAR:
                parts.append(f"{METHODS[name].label} on {dataset} ({mean - pub:+.1f})")
    return [f"More than {FAR} points below the published number: {', '.join(parts)}."] * bool(parts)


def _remarks(table: Field) -> list[str]:
    said = [
        f"{CHANGED} on {dataset}: "
        + "; ".join(
            f"{METHODS[name].label} {', '.join(f'{key} {value}' for key, value in given.items())}"
            for name, given in methods.items()
        )
        for dataset, methods in table.settings.items()
    ]
    if said:
        why = f"{CHANGED}: not its authors' settings; with those it may score and rank higher."
        said.insert(0, why)
    return said + [f"{_letter(at)}: not run, {why}." for at, why in enumerate(table.reasons())]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.field", description=__doc__)
    parser.add_argument("tables", nargs="*", metavar="table", help="none: both")
    parser.add_argument("--datasets", default="", metavar="A,B", help="only these graphs")
    parser.add_argument("--methods", default="", metavar="A,B", help="only these methods")
    parser.add_argument("--seeds", type=int, metavar="N", help="no more than the first N seeds")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="cells at a time")
    parser.add_argument("--results", type=Path, default=Path("experiments/results"))
    parser.add_argument("--runs", type=Path, default=Path("runs/field"))
    args = parser.parse_args(argv)
    failed = []
    try:
        known = {table.name: table for table in load_fields()}
        for name in args.tables or known:
            if name not in known:
                raise UserError(f"There is no table {name!r}. Known: {', '.join(known)}.")
            table = known[name]
            datasets = args.datasets.split(",") if args.datasets else list(table.seeds)
            if strange := set(datasets) - set(table.seeds):
                raise UserError(f"{name} has no graph {strange.pop()!r}: {', '.join(table.seeds)}.")
            methods = args.methods.split(",") if args.methods else []
            failed += make(
                table,
                args.results,
                args.runs,
                datasets,
                methods,
                args.seeds,
                args.jobs,
                Progress(quiet=False),
            )
    except UserError as error:
        print(f"experiments: {error}", file=sys.stderr)
        return 2
    for cell in failed:
        print(f"failed: {cell['method']}, seed {cell['seed']}: {cell['error']}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
