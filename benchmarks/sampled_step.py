"""CPU time of a sampled training step on 20,000 nodes, where it goes, the least each part could
take on this machine, and the same step by another version of the code.

    python benchmarks/sampled_step.py [--baseline FOLDER] [--steps 7] [--threads 1] [key=value ...]

The graph of benchmarks/memory.py (5,000 features, of which 0.8 % are not zero) at the default width
and objective; 1,024 seed edges, fan-out [10, 10], two views: the neighbourhood is the whole graph.
--baseline names a folder with another version (`git worktree add FOLDER COMMIT`): processes of its
own take the same steps with it, in turn with ours. The bound of a part is the larger of its
operations over the speed of a matrix product and its tables, read and written once, over the speed
of a copy, both measured in this run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

SETTINGS = ["data.name=words", "sampler.fanouts=[10,10]", "sampler.batch_edges=1024"]
PARTS = {
    "features into channels": ("_WeightedSum", "_WeightedSumBackward"),
    "smoothing": ("_Propagate", "_PropagateBackward"),
    "matrix products": ("aten::mm", "aten::addmm"),
    "optimiser": ("aten::_fused_adam_",),
}


def take_steps(folder: Path, steps: int, threads: int, settings: list[str]) -> dict[str, Any]:
    """Medians over steps; with this version of the package the parts, too."""
    from cimage_dist.comm import Comm
    from cimage_dist.config_loading import load_config
    from cimage_dist.data.ingest import open_graph
    from cimage_dist.train.refresh import random_scores
    from cimage_dist.train.trainer import Trainer

    torch.set_num_threads(threads)
    store = folder / f"stores-{os.getpid()}"  # each version makes its own kind
    where = [f"data.path={folder / 'words'}", f"data.store_dir={store}"]
    cfg = load_config(overrides=[*SETTINGS, *where, f"resources.threads={threads}", *settings])
    graph = open_graph(cfg.data)
    trainer = Trainer(cfg, graph, graph.topology(), Comm())
    trainer.scores = random_scores(cfg.model.num_factors, 0)
    batches: Any = trainer.batches

    def step(number: int) -> tuple[float, float]:
        began = time.process_time()
        batch = batches.convert(batches.source[number], number)
        made = time.process_time()
        trainer.advance([batch])
        return made - began, time.process_time() - made

    for number in range(2):
        step(number)
    data, rest = zip(*(step(2 + number) for number in range(steps)), strict=True)
    found: dict[str, Any] = {
        "data path": statistics.median(data),
        "the rest": statistics.median(rest),
    }
    if "CIMAGE_BASELINE" not in os.environ:
        found["parts"] = parts_of(step, 2 + steps)
    return found


@contextmanager
def counted(into: dict[str, list[float]]) -> Iterator[None]:
    """Operations and bytes of the sums along messages, by the name of their part."""
    from cimage_dist.nn import propagate

    plain = propagate.add_weighted

    def add(out: Any, to: Any, x: Any, by: Any, weight: Any, grouped: Any = None) -> Any:
        name = "features into channels" if grouped is None else "smoothing"
        into[name][0] += 2.0 * by.numel() * x.shape[1]
        into[name][1] += x.element_size() * (x.numel() + 2 * out.numel())
        return plain(out, to, x, by, weight, grouped)

    propagate.add_weighted = add
    try:
        yield
    finally:
        propagate.add_weighted = plain


def parts_of(step: Any, first: int) -> dict[str, dict[str, float]]:
    """CPU seconds of each part and the least they could be, of three steps, for one."""
    from hardware import memory_gbytes, peak_gflops

    work = {name: [0.0, 0.0] for name in PARTS}
    with counted(work), profile(activities=[ProfilerActivity.CPU], with_flops=True) as seen:
        for number in range(3):
            step(first + number)
    events = {event.key: event for event in seen.key_averages()}
    work["matrix products"][0] = sum(
        float(events[name].flops) for name in PARTS["matrix products"] if name in events
    )
    speed, copy = peak_gflops() * 1e9, memory_gbytes() * 1e9
    found = {}
    for name, keys in PARTS.items():
        used = sum(events[key].self_cpu_time_total for key in keys if key in events) / 1e6
        found[name] = {
            "s": used / 3,
            "least_s": max(work[name][0] / speed, work[name][1] / copy) / 3,
        }
    total = sum(event.self_cpu_time_total for event in events.values()) / 3e6
    found["the rest"] = {"s": total - sum(part["s"] for part in found.values())}
    return found


def elsewhere(package: Path, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The steps of another version, by a process of its own."""
    words = ["--folder", str(folder), "--steps", str(args.steps), "--threads", str(args.threads)]
    here = os.environ | {"PYTHONPATH": str(package), "CIMAGE_BASELINE": "1"}
    command = [sys.executable, __file__, *words, *args.settings]
    done = subprocess.run(command, env=here, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("settings", nargs="*", metavar="key=value")
    parser.add_argument("--baseline", type=Path, metavar="FOLDER")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder:
        print(json.dumps(take_steps(args.folder, args.steps, args.threads, args.settings)))
        return
    from hardware import headline
    from memory import write_words

    print(headline(args.threads))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_words(folder / "words")
        versions = {"now": Path(__file__).resolve().parents[1]}
        if args.baseline:
            versions = {"before": args.baseline.resolve(), **versions}
        rounds = [
            {name: elsewhere(package, folder, args) for name, package in versions.items()}
            for _ in range(3)
        ]
        ours = take_steps(folder, args.steps, args.threads, args.settings)
    print(f"{'CPU ms of a step':24} {'data path':>10} {'the rest':>10} {'ratio':>7}")
    for name in versions:
        data, rest = (
            statistics.median(1e3 * found[name][part] for found in rounds)
            for part in ("data path", "the rest")
        )
        whole = statistics.median(
            sum(found[name].values()) / sum(found["now"].values()) for found in rounds
        )
        print(f"{name:24} {data:>10.0f} {rest:>10.0f} {whole:>7.2f}")
    print(f"\n{'part (profiled)':24} {'ms':>10} {'least ms':>10}")
    for name, part in ours["parts"].items():
        least = f"{1e3 * part['least_s']:.1f}" if "least_s" in part else ""
        print(f"{name:24} {1e3 * part['s']:>10.1f} {least:>10}")


if __name__ == "__main__":
    main()
