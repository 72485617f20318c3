"""What the terminal shows: settings and machine before a run (`cimage show`, `cimage doctor`), and
its scores as a table and a readable Markdown page afterwards.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cimage_dist.config import Config, fingerprint
from cimage_dist.config_loading import (
    accepted_values,
    changed_settings,
    known_keys,
    load_config,
    to_yaml,
)
from cimage_dist.errors import UserError
from cimage_dist.io import artifacts, storage
from cimage_dist.io.artifacts import RunDir, read_metrics, value_at
from cimage_dist.io.mirror import open_run
from cimage_dist.reporting import training


def show_keys(is_printed: bool) -> list[dict[str, Any]]:
    """Every config key with default, accepted values and meaning; one line each in a pipe."""
    rows: list[dict[str, Any]] = []
    for (key, item, about), (_, values) in zip(known_keys(), accepted_values(), strict=True):
        default = (
            item.default_factory()
            if item.default is dataclasses.MISSING and callable(item.default_factory)
            else item.default
        )
        rows.append(
            {"key": key, "default": default, "type": str(item.type)}
            | {"accepted": values, "meaning": about}
        )
    if not is_printed:
        return rows
    names = ("key", "default", "accepted", "meaning")
    cells = [[row["key"], _yaml(row["default"]), row["accepted"], row["meaning"]] for row in rows]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        table = Table(*names, box=None, pad_edge=False)
        for row in cells:
            table.add_row(*map(escape, row))
        Console().print(table)
    else:
        widths = [max(len(row[i]) for row in [*cells, names]) for i in range(3)] + [0]
        for row in [list(names), *cells]:
            line = "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True))
            print(line.rstrip())
    return rows


def _yaml(value: Any) -> str:
    """A value as it is written in a setting."""
    training = {None: "null", True: "true", False: "false"}
    return training[value] if value is None or isinstance(value, bool) else str(value)


def show_config(cfg: Config, is_printed: bool) -> dict[str, Any]:
    """The resolved config, its fingerprint, and which artifacts exist."""
    from cimage_dist.data.ingest import store_place
    from cimage_dist.io import checkpoint

    run = open_run(cfg)
    store = store_place(cfg.data)
    steps = checkpoint.steps(run.checkpoints)
    places: dict[str, tuple[Any, bool]] = {
        "graph store": (store, (Path(store) / artifacts.MANIFEST).is_file()),
        "run": (run.root, run.config.is_file()),
        "checkpoints": (run.checkpoints, bool(steps)),
        "embeddings": (run.embeddings, (run.embeddings / artifacts.MANIFEST).is_file()),
        "scores": (run.evaluation, run.evaluation.is_file()),
    }
    exists: dict[str, dict[str, Any]] = {
        name: {"path": str(path), "exists": is_there} for name, (path, is_there) in places.items()
    }
    exists["checkpoints"]["steps"] = steps
    if is_printed:
        print(to_yaml(cfg))
        print(f"fingerprint: {fingerprint(cfg)}")
        for name, facts in exists.items():
            print(f"{'present' if facts['exists'] else 'absent ':8} {name}: {facts['path']}")
    return {"config": dataclasses.asdict(cfg), "fingerprint": fingerprint(cfg), "exists": exists}


def doctor(is_printed: bool) -> dict[str, Any]:
    """Versions, devices, optional packages, and the data root."""
    facts = storage.describe()
    optional = storage.optional_packages()
    root = os.environ.get("CIMAGE_DATA_ROOT")
    facts |= {"optional": optional, "data_root": root}
    facts["data_root_exists"] = bool(root and Path(root).is_dir())
    missing = [name for name, version in facts["packages"].items() if version is None]
    facts["healthy"] = not missing
    if is_printed:
        print(
            f"python {facts['python']} on {facts['platform']}, {facts['cpu_count']} CPUs, torch "
            f"uses {facts['torch_threads']} threads"
        )
        print(f"devices: {', '.join(facts['cuda']) or 'CPU only (no CUDA device seen)'}")
        for name, version in facts["packages"].items():
            print(f"  {'ok     ' if version else 'MISSING'} {name} {version or ''}")
        for item in optional:
            state = f"absent  {item['name']}: would add {item['adds']}; {item['install']}"
            if item["present"]:
                state = f"ok      {item['name']} {item['version'] or ''}"
            print(f"  {state}")
        unset = "not set (CIMAGE_DATA_ROOT); raw files are looked for under <data.store_dir>/raw"
        is_lost = root and not facts["data_root_exists"]
        print(f"data root: {root or unset}{' (does not exist)' if is_lost else ''}")
        print("ready" if facts["healthy"] else f"not ready: install {', '.join(missing)}")
    return facts


OURS = "CIMAGE"
_WIDE = 130  # columns of a terminal that has room for the standard errors
SCORES = {
    "node": {
        "pool": "node probe, draws of train + val",
        "val": "node probe, val",
        "test": "node probe, test",
    },
    "cluster": {"acc": "clustering ACC", "nmi": "clustering NMI"},
    "link": {"auc": "link AUC", "ap": "link AP"},
}


def score_table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """(column names, rows): one row a score, one column a method, ours last. Percent; ± is the
    population standard deviation.
    """
    methods = {
        **result.get("controls", {}),
        OURS if "run_dir" in result else "this embedding": result,
    }
    rows = []
    for n in result.get("few_labels") or {}:
        cells = [(scores.get("few_labels") or {}).get(n) for scores in methods.values()]
        rows.append(
            [
                f"{n} labels per class",
                *[
                    f"{c['mean']:.1f} ± {c['std']:.1f}" if c and c["mean"] is not None else "-"
                    for c in cells
                ],
            ]
        )
    if training.is_label_free(result):
        for path, score in training.SCORES.items():
            found = [value_at(scores, path) for scores in methods.values()]
            if any(value is not None for value in found):
                shown = ["-" if value is None else f"{value:.{score.digits}f}" for value in found]
                rows.append([score.label, *shown])
        return ["", *methods], rows
    for group, keys in SCORES.items():
        for key, label in keys.items():
            values = [(scores.get(group) or {}).get(key) for scores in methods.values()]
            errors = [(scores.get(group) or {}).get(f"{key}_se") for scores in methods.values()]
            if any(value is not None for value in values):
                rows.append(
                    [
                        label,
                        *[_cell(value, error) for value, error in zip(values, errors, strict=True)],
                    ]
                )
    return ["", *methods], rows


def _cell(value: float | None, error: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if error is None else f"{value:.2f} ± {error:.2f}"


def winners(row: Sequence[str]) -> set[int]:
    """Columns of the highest score of a row of `score_table`, where there is something to win."""
    values = {i: float(text.split()[0]) for i, text in enumerate(row) if i and text != "-"}
    return {i for i, value in values.items() if value == max(values.values()) and len(values) > 1}


def about_controls(controls: dict[str, dict[str, Any]]) -> str:
    """What every control is, and what was chosen for it."""
    smoothed, pagerank, pca = (controls.get(name) or {} for name in ("smoothed", "pagerank", "pca"))
    said = {
        "raw": "node features",
        "smoothed": f"features averaged over {smoothed.get('hops', 2)} hops",
        "pagerank": f"{pagerank.get('steps')} steps of h = (1-a)·A·h + a·x with a = "
        f"{pagerank.get('alpha')}",
        "pca": f"{pca.get('width')} principal components of {pca.get('of')}",
        "untrained": "our encoder before training",
    }
    return "; ".join(f"{name}: {text}" for name, text in said.items() if name in controls)


def _choice_notes(result: dict[str, Any]) -> list[str]:
    """How hops and a were chosen, and which control is the best by validation."""
    by = (result["controls"].get("pagerank") or {}).get("chosen_by")
    how = {
        "pool": "hops and a: chosen on the draws of train + val, each control for itself",
        "links": "hops and a: chosen on the validation edges, each control for itself",
        "fixed": "hops and a: fixed, as neither labels nor held-out edges can choose",
    }
    notes = [how[by]] if by in how else []
    best = result.get("controls_best") or {}
    if best.get("any"):
        narrow = f", of our width or less {best['same_width']}" if best.get("same_width") else ""
        judge = "the validation edges" if by == "links" else "the draws of train + val"
        notes.append(f"best control by {judge}: {best['any']}{narrow}")
    return notes


def footnotes(result: dict[str, Any]) -> list[str]:
    notes = training.meanings(result) if training.is_label_free(result) else []
    notes += [
        f"graph {result.get('graph', '?')}, seed {result.get('seed', '?')}, "
        f"{result.get('edges', '')}"
    ]
    if result.get("run_dir"):
        notes.append(f"trained: {result.get('objective', '?')}")
    if result.get("link") is None:
        notes.append(f"no link scores: {result.get('link_reason', 'not asked for')}")
    elif result.get("controls"):
        notes.append(
            "link scores: a pair by the dot product, cosine or centred cosine of its rows, ours "
            "also by the "
            "edge decoder, whichever ranks the validation edges best"
        )
    if result.get("controls"):
        notes.append(about_controls(result["controls"]))
        notes += _choice_notes(result)
    if (result.get("node") or {}).get("pool") is not None:
        notes.append(
            "draws of train + val: fitted on a draw, scored on the other labelled training and "
            "validation nodes; mean ± standard error over the draws"
        )
    if result.get("node") is None:
        notes.append(f"no node scores: {result.get('node_reason', 'not asked for')}")
    few = result.get("few_labels") or {}
    if count := max((len(row["scores"]) for row in few.values()), default=0):
        notes.append(
            f"few labels: test accuracy, mean ± std over {count} random label draws, without a "
            "validation set"
        )
    notes += [
        f"no score with {n} labels per class: {row['reason']}"
        for n, row in few.items()
        if row.get("reason")
    ]
    if clusters := result.get("clusters"):
        notes.append(f"clusters: {clusters['value']}, by {clusters['by']}")
    if training.is_label_free(result):
        notes += [f"next: {text}" for text in training.next_steps(result)]
    return notes


def print_scores(result: dict[str, Any]) -> None:
    from rich.box import HEAVY_HEAD, SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    columns, rows = score_table(result)
    is_free = training.is_label_free(result)
    title = "scores without labels (below: what they mean)" if is_free else "scores in percent"
    console = Console()
    is_narrow = console.width < _WIDE and any("±" in cell for row in rows for cell in row)
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD if is_narrow else HEAVY_HEAD)
    table.add_column("")
    for name in columns[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        best = winners(row)
        cells = [cell.partition(" ±")[0] if is_narrow else cell for cell in row]
        table.add_row(*[Text(cell, "bold" if i in best else "") for i, cell in enumerate(cells)])
    console.print(table)
    if is_narrow:
        console.print(f"standard errors: with --json, or {_WIDE} columns wide")
    for note in footnotes(result):
        console.print(note, highlight=False, markup=False)
    if "run_dir" in result:
        console.print(f"run directory: {result['run_dir']}", highlight=False, markup=False)


def _markdown_table(columns: list[str], rows: list[list[str]]) -> list[str]:
    return [
        f"| {' | '.join(columns)} |",
        "|" + "---|" * len(columns),
        *[f"| {' | '.join(row)} |" for row in rows],
    ]


def write_report(run: RunDir) -> Path:
    """report.md: scores, how training went, and which of the run's settings differ from the
    defaults.
    """
    if not run.summary.is_file():
        raise UserError(
            f"No finished run in {run.root}. Run `cimage pretrain` with the same config first."
        )
    cfg = load_config(run.config)
    summary = artifacts.read_json(run.summary, "the run's summary")
    env = artifacts.read_json(run.environment, "the run's environment record")
    lines = [f"# Run {run.root}", ""]
    lines += [
        f"Graph **{env['graph']['name']}**: {env['graph']['nodes']:,} nodes, "
        f"{env['graph']['edges'] // 2:,} undirected edges. "
    ]
    lines[-1] += (
        f"{summary['steps']} steps, fingerprint `{summary['fingerprint']}`, seed {cfg.run.seed}."
    )
    if summary["edges_held_out"]:
        lines += [
            "",
            f"{summary['edges_held_out']:,} edges were held out of training for link prediction.",
        ]
    lines += ["", "## Scores", ""]
    if run.evaluation.is_file():
        result = artifacts.read_json(run.evaluation, "the run's scores")
        lines += [
            *_markdown_table(*score_table(result)),
            "",
            *[f"- {note}" for note in footnotes(result)],
        ]
        chosen = (
            summary["best"]["step"]
            if cfg.train.select == "val" and summary["best"]
            else summary["steps"]
        )
        if result["step"] != chosen:
            lines.append(
                f"- these are scores of step {result['step']}, but step {chosen} is the run's "
                "result now: run `cimage evaluate` again"
            )
    else:
        lines.append("Not evaluated yet: `cimage evaluate` with the same config.")
    lines += ["", "## Training", ""]
    records = read_metrics(run.metrics)
    train = [r for r in records if r["kind"] == "train"]
    shown = train[:: max(1, len(train) // 10)] if train else []
    if shown and shown[-1] is not train[-1]:
        shown.append(train[-1])
    names = [
        name
        for name in (shown[-1] if shown else {})
        if name not in ("kind", "step", "total_steps", "seconds")
    ]
    lines += _markdown_table(
        ["step", *names],
        [
            [str(r["step"]), *[f"{r[name]:.4g}" if name in r else "-" for name in names]]
            for r in shown
        ],
    )
    scores = [r for r in records if r["kind"] == "val"]
    if scores:
        best = max(scores, key=lambda r: r["score"])
        lines += [
            "",
            f"Validation: best {best['score']:.2f} at step {best['step']}, last "
            f"{scores[-1]['score']:.2f}.",
        ]
    lines += [
        "",
        "## Settings that differ from the defaults",
        "",
        *_markdown_table(
            ["key", "value", "default"],
            [[f"`{key}`", *rest] for key, *rest in changed_settings(cfg)],
        ),
        "",
    ]
    versions = ", ".join(
        f"{name} {version}" for name, version in env["packages"].items() if version
    )
    lines += [
        "## Environment",
        "",
        f"Python {env['python']}, {env['platform']}, {env['cpu_count']} CPUs; {versions}.",
        "",
    ]
    artifacts.write_text(run.report, "\n".join(lines))
    return run.report
