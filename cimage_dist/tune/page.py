"""index.html: the sweep as one page that needs nothing but a browser."""

from __future__ import annotations

import json
from typing import Any

from cimage_dist.reporting import page
from cimage_dist.reporting.charts import (
    Chart,
    category,
    chart,
    dots,
    hover,
    literal,
    number,
    quantity,
    table,
    thinned,
)
from cimage_dist.tune import Choice, Dimension
from cimage_dist.tune.ledger import Ledger, Standing, epochs_of, reports, standings
from cimage_dist.tune.plan import BASELINE, importance
from cimage_dist.tune.spec import Sweep

_MOST_POINTS_OF_A_CURVE = 60
_SCORE = "val score"


def write_page(sweep: Sweep, ledger: Ledger, found: dict[str, Any]) -> None:
    about = (
        f"search: {sweep.settings.search}; scheduler: {sweep.settings.scheduler}; "
        "scores are validation scores in percent unless called test"
    )
    title = f"{sweep.name} on {sweep.base.data.name}"
    path, parts = ledger.root / "index.html", sections(sweep, ledger, found)
    page.write_page(path, title, about, [], _facts(found), parts)


def sections(sweep: Sweep, ledger: Ledger, found: dict[str, Any]) -> list[dict[str, Any]]:
    search = standings(ledger, "search")
    scored = [row for row in search if row.mean is not None]
    charts = [
        _parallel(sweep, scored),
        _by_setting(sweep, scored),
        _best_so_far(ledger),
        _importance(importance(sweep.space, search)),
        _curves(sweep, ledger),
    ]
    fresh = "Seeds the search never saw. Their validation scores alone name the winner."
    failures = [[trial, reason] for trial, reason in found["failures"].items()]
    return [
        page.section("Search", "", charts),
        page.section("Finalists on fresh seeds", fresh, _finalists(sweep, found)),
        page.section("All points", "", [_points(sweep, search)]),
        page.section("Failed trials", "", [table("Reasons", "", ["trial", "reason"], failures)]),
    ]


def _facts(found: dict[str, Any]) -> list[tuple[str, str]]:
    states = ", ".join(f"{count} {name}" for name, count in found["trials"].items() if count)
    facts = [(str(found["points"]), "points"), (states, "trials")]
    facts.append((f"{found['epochs_trained']:g}", "epochs trained"))
    if won := found["winner"]:
        what = f"winner: point {won['point']}, fresh seeds"
        facts.append((f"{won['mean']:.2f} ± {won['std']:.2f}", what))
    if gain := found["gain_over_given"]:
        what = "over the given settings (standard error)"
        facts.append((f"{gain['mean']:+.2f} ± {gain['standard_error']:.2f}", what))
    for name, row in (found["test"] or {"scores": {}})["scores"].items():
        what = f"test {name} of the winner, read once"
        facts.append((f"{row['mean']:.2f} ± {row['std']:.2f}", what))
    return facts


def _label(sweep: Sweep, point: int) -> str:
    return f"{point} (given)" if sweep.settings.baseline and point == BASELINE else str(point)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)


def _row(sweep: Sweep, row: Standing) -> dict[str, Any]:
    """A point as a row of a chart's data; choices are words there, ranges numbers."""
    values = {
        d.key: _text(row.values.get(d.key)) if isinstance(d, Choice) else row.values.get(d.key)
        for d in sweep.space
    }
    about = {"point": _label(sweep, row.point), "state": row.status, _SCORE: number(row.mean)}
    return about | values


def _hints(sweep: Sweep) -> list[dict[str, Any]]:
    names = ["point", "state", _SCORE, *[d.key for d in sweep.space]]
    return [{"field": literal(name), "title": name} for name in names]


def _parallel(sweep: Sweep, scored: list[Standing]) -> Chart:
    """One line a point through its place in the range of every key and of the scores."""
    means = [row.mean for row in scored if row.mean is not None]
    low, high = min(means, default=0.0), max(means, default=1.0)
    data = []
    for row in scored:
        places = {d.key: d.position(row.values.get(d.key)) for d in sweep.space}
        assert row.mean is not None
        places[_SCORE] = (row.mean - low) / (high - low) if high > low else 1.0
        shown = _row(sweep, row)
        data += [
            shown | {"axis": key, "at": number(at)} for key, at in places.items() if at is not None
        ]
    ends = {d.key: [_text(value) for value in (d.at(0.0), d.at(1.0))] for d in sweep.space}
    ends[_SCORE] = [f"{low:.2f}", f"{high:.2f}"]
    labels = [
        {"axis": key, "at": at, "label": text}
        for key, texts in ends.items()
        for at, text in zip((-0.06, 1.06), texts, strict=True)
    ]
    bright: dict[str, Any] = {"field": literal(_SCORE), "type": "quantitative", "legend": None}
    bright |= {"scale": {"range": [0.15, 1]}}
    is_stopped = {"test": "datum.state == 'stopped'", "value": [4, 4]}
    lit = {"condition": {"param": "lit", "empty": False, "value": 3.5}, "value": 1.6}
    encoding = {
        "x": category("axis", scale={"domain": list(ends)}, axis={"labelAngle": -30, "grid": True}),
        "y": quantity("at", axis=None, scale={"domain": [-0.1, 1.1], "nice": False}),
    }
    line = {
        "params": [hover("lit", "point")],
        "mark": {"type": "line", "interpolate": "monotone"},
        "encoding": {
            "detail": {"field": "point"},
            "opacity": bright,
            "strokeWidth": lit,
            "strokeDash": {"condition": is_stopped, "value": [1, 0]},
            "tooltip": _hints(sweep),
        },
    }
    ticks = {
        "data": {"values": labels},
        "mark": {"type": "text", "fontSize": 10},
        "encoding": {"text": {"field": "label"}},
    }
    note = "Each line is a point, stronger is better; stopped points are dashed."
    drawn: dict[str, Any] = {"is_wide": True, "layer": [line, ticks], "encoding": encoding}
    return chart("parallel", "Settings and scores", note, data, 300, **drawn)


def _by_setting(sweep: Sweep, scored: list[Standing]) -> Chart:
    keys = {d.key: {"x": _axis(d)} for d in sweep.space}
    colour = category("state", scale={"domain": ["done", "stopped", "failed", "running"]})
    encoding = {"y": quantity(literal(_SCORE), _SCORE), "color": colour, "tooltip": _hints(sweep)}
    note = "Every point by one of its settings."
    data = [_row(sweep, row) for row in scored]
    mark = {"type": "circle", "size": 60, "opacity": 0.75}
    drawn: dict[str, Any] = {"is_wide": True, "mark": mark, "encoding": encoding}
    return chart("settings", "Score by setting", note, data, 240, [("setting", keys)], **drawn)


def _axis(d: Dimension) -> dict[str, Any]:
    if isinstance(d, Choice):
        domain = {"domain": [_text(value) for value in d.values]}
        axis = {"field": literal(d.key), "type": "ordinal", "title": d.key, "scale": domain}
        return axis | {"axis": {"labelAngle": 0}}
    return quantity(literal(d.key), d.key, scale={"type": "log"} if d.is_log else {})


def _best_so_far(ledger: Ledger) -> Chart:
    ended = sorted(
        (outcome.ended, ledger.trials[name].point, outcome.score)
        for name, outcome in ledger.outcomes.items()
        if outcome.score is not None and ledger.trials[name].stage == "search"
    )
    data = [
        {"trial": i + 1, "point": point, "score": number(score)}
        for i, (_, point, score) in enumerate(ended)
    ]
    largest = [{"op": "max", "field": "score", "as": "best"}]
    best = [{"window": largest, "sort": [{"field": "trial"}]}]
    hints = [{"field": name} for name in ("trial", "point", "score")]
    each, steps = {"type": "circle", "style": "soft", "size": 40}, "step-after"
    layers = [
        {"mark": each, "encoding": {"y": quantity("score", "percent"), "tooltip": hints}},
        {
            "transform": best,
            "mark": {"type": "line", "interpolate": steps},
            "encoding": {"y": quantity("best")},
        },
    ]
    note = "Validation score of each search trial as it ended, and the best until then."
    x = quantity("trial", "trials that ended", axis={"tickMinStep": 1, "format": "d"})
    return chart("best", "Best so far", note, data, 220, layer=layers, encoding={"x": x})


def _importance(shares: dict[str, float]) -> Chart:
    data = [{"key": key, "share": number(share)} for key, share in shares.items()]
    data.sort(key=lambda row: -(row["share"] or 0.0))  # type: ignore[operator]
    axis = {"format": "%", "tickCount": 4}
    encoding = {
        "x": {"field": "share", "type": "quantitative", "title": None, "axis": axis},
        "y": category("key", scale={"domain": [row["key"] for row in data]}),
        "tooltip": [{"field": "key"}, {"field": "share", "type": "quantitative", "format": ".1%"}],
    }
    note = "Share of each setting in the variance of the scores (fANOVA). A hint, not a proof."
    drawn: dict[str, Any] = {"mark": "bar", "encoding": encoding}
    return chart("importance", "What mattered", note, data, 28 * len(data), **drawn)


def _curves(sweep: Sweep, ledger: Ledger) -> Chart:
    data = []
    for trial in ledger.trials.values():
        folder, epochs = ledger.folder(trial.id), epochs_of(sweep.base, trial)
        found = reports(folder, epochs, sweep.base.train.select)
        about = {"trial": trial.id, "stage": trial.stage}
        for report in thinned(found, _MOST_POINTS_OF_A_CURVE):
            data.append(about | {key: number(report[key]) for key in ("epoch", "score")})
    dim = {"condition": {"param": "lit", "empty": False, "value": 1}, "value": 0.45}
    encoding = {
        "x": quantity("epoch", "epoch"),
        "y": quantity("score", "percent"),
        "detail": {"field": "trial"},
        "color": category("stage", scale={"domain": ["search", "fresh"]}),
        "opacity": dim,
        "tooltip": [{"field": name} for name in ("trial", "epoch", "score")],
    }
    note = "Validation score that selection sees, one line a trial."
    drawn: dict[str, Any] = {"is_wide": True, "params": [hover("lit", "trial")]}
    drawn |= {"mark": {"type": "line", "point": {"size": 16}}, "encoding": encoding}
    return chart("curves", "Training curves", note, data, 260, **drawn)


def _finalists(sweep: Sweep, found: dict[str, Any]) -> list[Chart]:
    won = (found["winner"] or {}).get("point")
    rows, drawn = [], []
    for row in found["fresh"]:
        name = _label(sweep, row["point"]) + (" ★" if row["point"] == won else "")
        mean = "-" if row["mean"] is None else f"{row['mean']:.2f}"
        each = "  ".join(f"{score:.2f}" for score in row["scores"])
        rows.append([name, mean, f"{row['std']:.2f}", each, row["status"]])
        drawn.append((f"point {name}", row["scores"], None))
    return [
        dots("Every seed", "", "percent", drawn),
        table("Finalists", "", ["point", "mean", "± std", "each seed", "state"], rows),
    ]


def _points(sweep: Sweep, search: list[Standing]) -> Chart:
    keys = [d.key for d in sweep.space]
    rows = []
    for row in search:
        mean = "-" if row.mean is None else f"{row.mean:.2f}"
        values = [_text(row.values.get(key)) for key in keys]
        rows.append([_label(sweep, row.point), mean, row.status, *values])
    return table("Best first", "", ["point", _SCORE, "state", *keys], rows)
