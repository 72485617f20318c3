"""The whole graph against sampled mini-batches: seconds, memory and accuracy of `cimage pretrain`.

    python benchmarks/sampled.py [--steps 30] [--sampled-steps 100] [--threads 1] [--out FILE]

The folder of benchmarks/memory.py (20,000 nodes, 100,000 edges, 5,000 sparse features) is trained
at width 256 by the command itself, in a process each: the whole graph, and sampled neighbours. Peak
is the most memory the command held, reading the files and initial labels included. The printed
estimate, made after three steps, is set against what the steps after them took. Accuracy is that of
`cimage evaluate`; its control is the features smoothed over neighbours.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hardware import headline
from memory import write_words

CIMAGE = [sys.executable, "-m", "cimage_dist"]
WIDTH = ["model.num_factors=8", "model.factor_dim=32"]
RUNS = {"whole": [], "sampled": ["sampler.fanouts=[10,10]", "sampler.batch_edges=1024"]}
UNITS = {"s": 1, "min": 60, "h": 3600}


def command(arguments: list[str], folder: Path) -> tuple[dict[str, Any], str, float]:
    """(what it printed as JSON, its messages, peak GB) of a command."""
    with (folder / "messages").open("w") as messages, (folder / "answer").open("w") as answer:
        child = subprocess.Popen([*CIMAGE, *arguments], stdout=answer, stderr=messages, cwd=folder)
        _, status, used = os.wait4(child.pid, 0)
    text = (folder / "messages").read_text()
    if os.waitstatus_to_exitcode(status):
        raise SystemExit(text)
    found = (folder / "answer").read_text()
    unit = 1 if sys.platform == "darwin" else 1024
    return json.loads(found) if "--json" in arguments else {}, text, used.ru_maxrss * unit / 1e9


def estimated(messages: str) -> float:
    """Seconds from the third step to the end, by the line that was printed after it."""
    found = re.search(r"as measured here.*, in ([\d.]+) (s|min|h)", messages)
    assert found is not None, messages
    return float(found[1]) * UNITS[found[2]]


def measure(name: str, steps: int, threads: int, folder: Path) -> dict[str, Any]:
    run = folder / name
    given = ["words", *WIDTH, *RUNS[name], f"train.steps={steps}", f"run.dir={run}"]
    given += [f"resources.threads={threads}", "run.log_every=1", f"data.store_dir={run}-data"]
    began = time.perf_counter()
    _, messages, peak = command(["pretrain", *given], folder)
    seconds = time.perf_counter() - began
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    taken = [r["seconds"] for r in records if r["kind"] == "train"]
    scores, _, _ = command(["evaluate", *given, "--json"], folder)
    store = next(Path(f"{run}-data").glob("words-*"))
    return {
        "steps": steps,
        "passes": round(steps * (1 if name == "whole" else 1024 / 100_000), 2),
        "seconds_of_command": round(seconds, 1),
        "seconds_per_step": round(sorted(taken[3:])[len(taken[3:]) // 2], 3),
        "estimated_seconds": round(estimated(messages)),
        "real_seconds": round(sum(taken[3:]), 1),
        "peak_gb": round(peak, 3),
        "accuracy": scores["node"]["test"],
        "smoothed": scores["controls"]["smoothed"]["node"]["test"],
        "store_by_npz": round(
            sum(file.stat().st_size for file in store.glob("x*.npy"))
            / (folder / "words" / "features.npz").stat().st_size,
            2,
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=30, help="of the whole graph")
    parser.add_argument("--sampled-steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the numbers here as JSON")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    found: dict[str, Any] = {"machine": headline(args.threads)}
    print(found["machine"])
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_words(folder / "words")
        for name, steps in (("whole", args.steps), ("sampled", args.sampled_steps)):
            found[name] = measure(name, steps, args.threads, folder)
    print(f"{'':20} {'whole graph':>14} {'sampled':>14}")
    for key in found["whole"]:
        print(f"{key:20} {found['whole'][key]:>14} {found['sampled'][key]:>14}")
    if args.out:
        args.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
