"""index.html: the sweep as one page that needs nothing but a browser."""

from __future__ import annotations

import html
import json
from importlib.resources import files
from typing import Any

from cimage_dist.io import artifacts
from cimage_dist.tune.checks import BASELINE
from cimage_dist.tune.importance import importance
from cimage_dist.tune.ledger import Ledger, standings
from cimage_dist.tune.space import Choice
from cimage_dist.tune.spec import Sweep
from cimage_dist.tune.trial import epochs_of, reports

_MOST_POINTS_OF_A_CURVE = 60


def page_data(sweep: Sweep, ledger: Ledger, found: dict[str, Any]) -> dict[str, Any]:
    """What the page draws, as plain values."""
    search = standings(ledger, "search")
    axes = [
        {
            "key": d.key,
            "kind": "choice" if isinstance(d, Choice) else "log" if d.is_log else "linear",
            "values": [json.dumps(v) if not isinstance(v, str) else v for v in d.values] if isinstance(d, Choice) else [d.low, d.high],
        }
        for d in sweep.space
    ]
    points = []
    for row in search:
        at = [d.position(row.values.get(d.key)) for d in sweep.space]
        shown = [_text(row.values.get(d.key)) for d in sweep.space]
        points.append({"point": row.point, "at": at, "shown": shown, "status": row.status, "mean": row.mean, "is_given": _is_given(sweep, row.point)})
    curves = []
    for trial in ledger.trials.values():
        found_so_far = reports(ledger.folder(trial.id), epochs_of(sweep.base, trial), sweep.base.train.select)
        curve = _thinned([[round(r["epoch"], 3), round(r["score"], 3)] for r in found_so_far])
        state = ledger.outcomes[trial.id].status if trial.id in ledger.outcomes else "running"
        curves.append({"trial": trial.id, "point": trial.point, "stage": trial.stage, "status": state, "curve": curve})
    order = sorted((o.ended, ledger.trials[t].point, o.score) for t, o in ledger.outcomes.items() if o.score is not None and ledger.trials[t].stage == "search")
    return {
        "name": sweep.name,
        "graph": sweep.base.data.name,
        "search": sweep.settings.search,
        "scheduler": sweep.settings.scheduler,
        "axes": axes,
        "points": points,
        "curves": curves,
        "history": [[point, score] for _, point, score in order],
        "importance": importance(sweep.space, search),
        "fresh": [row | {"is_given": _is_given(sweep, row["point"])} for row in found["fresh"]],
        "winner": found["winner"],
        "gain": found["gain_over_given"],
        "test": found["test"],
        "trials": found["trials"],
        "failures": found["failures"],
        "epochs": found["epochs_trained"],
    }


def _is_given(sweep: Sweep, point: int) -> bool:
    return sweep.settings.baseline and point == BASELINE


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)


def _thinned(curve: list[list[float]]) -> list[list[float]]:
    step = -(-len(curve) // _MOST_POINTS_OF_A_CURVE) if curve else 1
    return curve[::step] + (curve[-1:] if (len(curve) - 1) % step else [])


def write_page(sweep: Sweep, ledger: Ledger, found: dict[str, Any]) -> None:
    template = (files("cimage_dist.tune") / "page.html").read_text()
    # Inside a script element only "</" could end it early.
    data = json.dumps(page_data(sweep, ledger, found), allow_nan=False).replace("</", "<\\/")
    title = html.escape(f"{sweep.name} on {sweep.base.data.name}")
    artifacts.write_text(ledger.root / "index.html", template.replace("__TITLE__", title).replace("__DATA__", data))
