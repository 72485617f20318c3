"""Pseudo-labels compared: keep what `cimage cluster --json` printed, and render it all as the table
in docs/RESULTS.md.

python benchmarks/clusters.py run cora-rdgae configs/node/cora.yaml --methods rdgae --seeds 5
python benchmarks/clusters.py render
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from hardware import facts

from experiments.cell import code_commit

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments" / "results" / "clusters"
DOCUMENT = ROOT / "docs" / "RESULTS.md"
BEGIN, END = "<!-- clusters: begin -->", "<!-- clusters: end -->"
COLUMNS = {
    "acc": "ACC",
    "nmi": "NMI",
    "ari": "ARI",
    "f1": "F1",
    "modularity": "modularity",
    "acc_s": "ACC on S",
}


def run(name: str, arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cimage_dist", "cluster", *arguments, "--json"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    body = {
        "command": f"cimage cluster {' '.join(arguments)}",
        "commit": code_commit(),
        "machine": facts(1),
    } | json.loads(done.stdout)
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(body, indent=2) + "\n")


def spread(values: list[float]) -> str:
    return f"{np.mean(values):.2f} ± {np.std(values):.2f}"


def rows(body: dict[str, Any]) -> list[str]:
    out = []
    for method in body["methods"]:
        runs = [r for r in body["runs"] if r["method"] == method]
        cells = [
            spread([100 * r[key] if key == "modularity" else r[key] for r in runs])
            if key in runs[0]
            else "-"
            for key in COLUMNS
        ]
        size = f"{min(r['s'] for r in runs):,} to {max(r['s'] for r in runs):,}"
        every = "all" if all(r["clusters_in_s"] == body["clusters"] for r in runs) else "not all"
        peaks = [r["peak_gb"] for r in runs if r["peak_gb"] is not None]
        cost = (
            f"{min(r['seconds'] for r in runs):.0f} to "
            f"{max(r['seconds'] for r in runs):.0f} | {f'{max(peaks):.2f}' if peaks else '-'}"
        )
        out.append(
            f"| {body['graph']['name']} | {method} | {len(runs)} | {' | '.join(cells)} | {size} "
            f"| {every} | {cost} |"
        )
    return out


def table() -> str:
    bodies = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    head = (
        f"| graph | method | seeds | {' | '.join(COLUMNS.values())} | size of S | clusters "
        "in S | seconds | peak GB |"
    )
    lines = [head, "|" + "---|" * (head.count("|") - 1)]
    for body in bodies:
        lines += rows(body)
    commands = [f"- `{body['command']}` (commit `{body['commit']}`)" for body in bodies]
    return "\n".join(
        [
            *lines,
            "",
            "Scores and modularity times 100; mean and standard deviation over seeds. Commands:",
            "",
            *commands,
        ]
    )


def render() -> None:
    head, rest = DOCUMENT.read_text().split(BEGIN)
    _, tail = rest.split(END)
    DOCUMENT.write_text(f"{head}{BEGIN}\n\n{table()}\n\n{END}{tail}")


def main() -> int:
    if sys.argv[1:2] == ["render"]:
        render()
    elif sys.argv[1:2] == ["run"] and len(sys.argv) > 3:
        run(sys.argv[2], sys.argv[3:])
    else:
        print(__doc__)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
