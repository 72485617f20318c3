"""Run a config on several seeds, keep one small JSON per seed, and render them all as docs/RESULTS.md.

    python benchmarks/seeds.py run cora-structure --seeds 5 configs/node/cora.yaml loss.factor_weight=0 loss.cluster_weight=0
    python benchmarks/seeds.py render

A seed that is already there is skipped, so the work can be spread over days. Selection is by validation inside each run; the test
score of the selected checkpoint is read once, when the run is evaluated. Results live in benchmarks/results/<name>/seed-<s>.json.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENT = ROOT / "docs" / "RESULTS.md"
BEGIN, END = "<!-- tables: begin (python benchmarks/seeds.py render) -->", "<!-- tables: end -->"
# column -> (section of eval.json, key)
COLUMNS = {
    "probe val": ("node", "val"),
    "probe test": ("node", "test"),
    "cluster ACC": ("cluster", "acc"),
    "NMI": ("cluster", "nmi"),
    "link AUC": ("link", "auc"),
    "AP": ("link", "ap"),
}


def commit() -> str | None:
    """The commit that made a result, marked when the tree had changes."""
    found = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True)
    return found.stdout.strip() or None


def run_seed(settings: list[str], seed: int, target: Path, command: str) -> None:
    """Train, embed and evaluate one seed, and write its result."""
    import resource

    from cimage_dist import environment, stages
    from cimage_dist.artifacts import write_json
    from cimage_dist.commands.common import split_settings
    from cimage_dist.config import load_config
    from cimage_dist.evaluation import evaluate_run
    from cimage_dist.train.progress import Progress

    paths, overrides = split_settings(settings)
    # A directory of its own: settings that leave the fingerprint alone (the routing backend) would share one.
    cfg = load_config(*paths, overrides=[f"run.dir=runs/tables/{target.parent.name}/seed-{seed}", *overrides, f"run.seed={seed}"])
    began = time.perf_counter()
    summary = stages.pretrain(cfg, Progress(lines=4))
    seconds = time.perf_counter() - began
    result = evaluate_run(cfg)
    facts = environment.describe()
    # Of the few-label and control scores only what the tables show is kept: the file stays small.
    kept = {name: result.get(name) for name in ("node", "cluster", "link", "graph", "fingerprint", "seed", "step", "edges")}
    kept["controls"] = {name: {part: scores.get(part) for part in ("node", "cluster", "link")} for name, scores in result.get("controls", {}).items()}
    kept |= {
        "command": command,
        "steps": summary["steps"],
        "seconds": round(seconds, 1),
        "peak_rss_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
    }
    kept["commit"] = commit()
    kept["environment"] = {name: facts[name] for name in ("python", "platform", "cpu_count", "torch_threads", "packages")}
    write_json(target, kept)


def run(name: str, seeds: list[int], settings: list[str]) -> None:
    command = f"python benchmarks/seeds.py run {name} --seeds {len(seeds)} {' '.join(map(shlex.quote, settings))}"
    for seed in seeds:
        target = RESULTS / name / f"seed-{seed}.json"
        if target.is_file():
            print(f"{target.relative_to(ROOT)}: there already")
            continue
        run_seed(settings, seed, target, command)
        print(f"{target.relative_to(ROOT)}: {json.loads(target.read_text())['node']}", flush=True)


def spread(values: list[float | None]) -> str:
    known = [v for v in values if v is not None]
    return f"{np.mean(known):.2f} ± {np.std(known):.2f}" if known else "-"


def read(name: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((RESULTS / name).glob("seed-*.json"))]


def table(name: str) -> list[str]:
    """One row per method: controls, then ours; mean ± population standard deviation over seeds."""
    results = read(name)
    rows = {control: [r["controls"].get(control, {}) for r in results] for control in results[0]["controls"]}
    rows["**CIMAGE**"] = results
    columns = {label: key for label, key in COLUMNS.items() if any((r.get(key[0]) or {}).get(key[1]) is not None for r in results)}
    lines = [f"### {name}", "", f"`{results[0]['command']}`", ""]
    lines += [f"| | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    for label, items in rows.items():
        cells = [spread([(item.get(group) or {}).get(key) for item in items]) for group, key in columns.values()]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    first = results[0]
    seeds = ", ".join(str(r["seed"]) for r in results)
    tests = " / ".join(f"{r['node']['test']:.1f}" for r in results if r.get("node"))
    lines += [
        "",
        f"Seeds {seeds}; test accuracies {tests}; selected steps {' / '.join(str(r['step']) for r in results)} of {first['steps']}; {first['edges']}; fingerprint `{first['fingerprint']}`, commit `{first['commit']}`; ",
    ]
    lines[-1] += f"about {np.mean([r['seconds'] for r in results]):.0f} s a run, peak memory {max(r['peak_rss_gb'] for r in results):.1f} GB."
    return [*lines, ""]


def overview(names: list[str]) -> list[str]:
    """All tables at a glance: the rows of our own method."""
    lines = ["### All at a glance", "", f"| | seeds | {' | '.join(COLUMNS)} |", "|---|---|" + "---|" * len(COLUMNS)]
    for name in names:
        results = read(name)
        cells = [spread([(result.get(group) or {}).get(key) for result in results]) for group, key in COLUMNS.values()]
        lines.append(f"| {name} | {len(results)} | {' | '.join(cells)} |")
    return [*lines, ""]


def tables() -> str:
    names = sorted(path.name for path in RESULTS.iterdir() if any(path.glob("seed-*.json"))) if RESULTS.is_dir() else []
    lines = overview(names) + [line for name in names for line in table(name)]
    if names:
        first = json.loads(next((RESULTS / names[0]).glob("seed-*.json")).read_text())["environment"]
        versions = ", ".join(f"{name} {version}" for name, version in first["packages"].items() if version)
        lines += [f"Measured with Python {first['python']}, {versions}, on {first['cpu_count']} CPU cores."]
    return "\n".join(lines)


def render() -> None:
    """Replace the generated part of docs/RESULTS.md."""
    text = DOCUMENT.read_text()
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    DOCUMENT.write_text(f"{head}{BEGIN}\n\n{tables()}\n\n{END}{tail}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    runner = verbs.add_parser("run")
    runner.add_argument("name")
    runner.add_argument("--seeds", type=int, default=5, help="seeds 0 to n-1")
    runner.add_argument("settings", nargs="*")
    verbs.add_parser("render")
    args, rest = parser.parse_known_args()
    if args.verb == "run":
        run(args.name, list(range(args.seeds)), [*args.settings, *rest])
    else:
        render()
    return 0


if __name__ == "__main__":
    sys.exit(main())
