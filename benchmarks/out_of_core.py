"""A graph shaped like ogbn-papers100M, larger than memory, on one machine: ingest, training steps,
a refresh, embeddings of a range of nodes.

    python benchmarks/out_of_core.py --scale 0.001                 # seconds
    python benchmarks/out_of_core.py --scale 0.5 --folder big --json out_of_core.json

Scale 1 is 111 million nodes and 1.6 billion undirected edges with 128 half-precision features,
heavy-tailed degrees and planted communities (`data.name=sbm`), ingested by the product in bounded
memory. Beside it stands a graph of the same shape with at most a million nodes: the same batch on
both in the same run. Cold steps begin with none of the store in the page cache; warm ones repeat
the same batches. Every part runs in a process of its own with one thread, and once more under each
memory limit of --limits (a cgroup of its own below the caller's, where one may be made).

Stores stay in --folder and are used again; without it they are made in a temporary one.
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
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hardware import facts, headline
from numpy.typing import NDArray

from cimage_dist import keyed
from cimage_dist.comm import Comm
from cimage_dist.config import Config
from cimage_dist.config_loading import load_config
from cimage_dist.data.ingest import ingest, open_graph, store_path
from cimage_dist.data.store import Graph
from cimage_dist.errors import UserError
from cimage_dist.io.storage import keep_freed_memory
from cimage_dist.pipeline.embedding import here, make_embeddings
from cimage_dist.sampling.loader import BatchLoader
from cimage_dist.train import initial
from cimage_dist.train.loop import _prepare_scores
from cimage_dist.train.sink import MemorySink
from cimage_dist.train.trainer import Trainer

NODES, DEGREE = 111_059_956, 29.3  # of papers100M; a few drawn edges coincide
SMALL_NODES = 1_000_000
CLASSES = 172
LABEL_NOISE = 0.3
PRESET = Path(__file__).parents[1] / "configs" / "large" / "papers100m.yaml"


def config(nodes: int, folder: Path, args: argparse.Namespace) -> Config:
    """The preset of papers100M on the generated graph."""
    return load_config(
        str(PRESET),
        overrides=[
            "data.name=sbm",
            f"data.store_dir={folder / 'stores'}",
            "data.verify=never",
            "data.normalize=none",
            f"data.sbm.num_nodes={nodes}",
            f"data.sbm.num_blocks={min(CLASSES, nodes // 50)}",
            f"data.sbm.avg_degree={DEGREE}",
            "data.sbm.label_features=64",
            "data.sbm.nuisance_features=64",
            f"sampler.batch_edges={args.batch}",
            f"sampler.fanouts={args.fanouts}",
            f"cluster.num_clusters={min(CLASSES, nodes // 50)}",
            "cluster.init=file",
            f"cluster.labels_path={folder / f'labels-{nodes}'}",
            f"ci.max_samples={args.samples}",
            "resources.threads=1",
            "resources.device=cpu",
        ],
    )


def memory_of(pid: int | str = "self") -> dict[str, float]:
    """GB of a process: its own (anonymous) pages, and all that is resident with the mapped ones."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = {name: int(kb) / 1e6 for name, kb in re.findall(r"^(\w+): +(\d+) kB", text, re.M)}
    private = found["Private_Clean"] + found["Private_Dirty"]
    return {"anonymous": found["Anonymous"], "uss": private, "resident": found["Rss"]}


def peak_gb() -> float:
    line = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert line is not None
    return int(line[1]) / 1e6


def forget(path: Path) -> None:
    """Take the files of a folder out of the page cache."""
    for file in path.iterdir():
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def build(nodes: int, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Generate and ingest; what a store that is there cost is in a file beside it."""
    cfg = config(nodes, folder, args)
    note = folder / f"ingest-{nodes}.json"
    if note.is_file() and store_path(cfg.data).is_dir():
        found: dict[str, Any] = json.loads(note.read_text())
        return found
    phases: list[tuple[float, str]] = []
    began = time.perf_counter()
    path, _ = ingest(
        cfg.data, lambda text: phases.append((round(time.perf_counter() - began, 1), text))
    )
    seconds, peak = time.perf_counter() - began, peak_gb()
    graph = Graph.open(path, "never")
    sizes = {file.name: file.stat().st_size for file in path.iterdir()}
    found = {
        "nodes": graph.num_nodes,
        "undirected_edges": graph.num_edges // 2,
        "features": graph.num_features,
        "most_neighbours": int(np.diff(graph.indptr).max()),
        "seconds": seconds,
        "cpu_seconds": time.process_time(),
        "edges_per_s": graph.num_edges // 2 / seconds,
        "peak_gb": peak,
        "store_gb": sum(sizes.values()) / 1e9,
        "files_gb": {name: round(size / 1e9, 3) for name, size in sorted(sizes.items())},
        "phases": [p for p in phases if not p[1].startswith(("read ", "committed "))],
        "machine": facts(1),
    }
    note.write_text(json.dumps(found, indent=2) + "\n")
    return found


def label(nodes: int, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    cfg = config(nodes, folder, args)
    write_labels(cfg, open_graph(cfg.data))
    return {}


def write_labels(cfg: Config, graph: Graph) -> None:
    """The planted communities, 30 % of them drawn again, and a random confidence: what a clustering
    would give.
    """
    folder = Path(cfg.cluster.labels_path or "")
    if folder.is_dir():
        return
    assert graph.y is not None
    labels = torch.from_numpy(np.array(graph.y))
    confidence = torch.empty(graph.num_nodes, dtype=torch.float64)
    key = keyed.stream(0, "initial-labels", 7)
    for first in range(0, graph.num_nodes, 1 << 20):
        gids = torch.arange(first, min(first + (1 << 20), graph.num_nodes))
        other = keyed.integers(key, 3 * gids, graph.num_classes)
        is_wrong = keyed.uniform(key, 3 * gids + 1) < LABEL_NOISE
        labels[gids] = torch.where(is_wrong, other, labels[gids])
        confidence[gids] = keyed.uniform(key, 3 * gids + 2)
    initial.write_labels(folder, initial.LabelSet(labels, confidence))


def train(nodes: int, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Cold steps, the same again warm, a refresh, steps fed by a loader process, embeddings."""
    torch.set_num_threads(1)
    cfg = config(nodes, folder, args)
    load = os.getloadavg()[0]
    started = memory_of()
    path = store_path(cfg.data)
    forget(path)
    began = time.perf_counter()
    graph = open_graph(cfg.data)
    trainer = Trainer(cfg, graph, graph.topology(), Comm())
    opened = time.perf_counter() - began
    began = time.perf_counter()
    _prepare_scores(trainer, MemorySink(), is_new=False)
    prepared = time.perf_counter() - began
    keep_freed_memory()
    began = time.perf_counter()
    refreshed = trainer.refresh()
    refresh = {"first_s": time.perf_counter() - began, "confident": (refreshed or {})["confident"]}
    source = trainer.batches.source  # type: ignore[attr-defined]
    forget(path)

    def steps() -> dict[str, float]:
        rows = []
        for number in range(args.steps):
            before = clocks()
            batch = trainer.batches.convert(source[number], number)  # type: ignore[attr-defined]
            made = clocks()
            trainer.advance([batch])
            rows.append(np.concatenate([made - before, clocks() - before]))
        names = ("data_ms", "data_cpu_ms", "step_ms", "step_cpu_ms")
        return dict(zip(names, (1e3 * np.median(rows, axis=0)).tolist(), strict=True))

    found: dict[str, Any] = {"cold": steps(), "first_again": steps(), "warm": steps()}
    batch = source[0]
    found["batch"] = {"nodes": batch.x.shape[0], "messages": batch.edges.src.numel()}
    refresh["again_s"] = timed(lambda: trainer.refresher(trainer.model.encoder, 1, trainer.scores))
    found["loader"] = loader_memory(source, args.steps)
    trainer.settle()
    first = graph.num_nodes // 2
    chosen = np.arange(first, min(first + args.rows, graph.num_nodes))
    with tempfile.TemporaryDirectory(dir=folder) as out:
        seconds = timed(
            lambda: make_embeddings(
                cfg, trainer.model, 1, graph, Path(out) / "z", here(cfg, graph), nodes=chosen
            )
        )
    found |= {
        "load": load,
        "open_s": opened,
        "labels_s": prepared,
        "refresh": refresh,
        "embed_rows_per_s": len(chosen) / seconds,
        "memory_at_start": started,
        "memory": memory_of(),
        "peak_gb": peak_gb(),
    }
    return found


def clocks() -> NDArray[np.float64]:
    """Seconds of the clock and of this process's CPU time."""
    return np.array([time.perf_counter(), time.process_time()])


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def loader_memory(source: Any, steps: int) -> dict[str, float]:
    """GB of a loader process in the middle of its work."""
    before = children()
    for number, _ in enumerate(BatchLoader(source, steps, 2 * steps, workers=1)):
        if number == steps // 2:
            return memory_of(next(iter(children() - before)))
    raise AssertionError("no step was made")


def children() -> set[int]:
    pid = os.getpid()
    return {int(i) for i in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


PARTS: dict[str, Callable[[int, Path, argparse.Namespace], dict[str, Any]]] = {
    "build": build,
    "label": label,
    "train": train,
}


class Limit:
    """A cgroup of a size (version 1 or 2), a child of the one this process is in."""

    def __init__(self, gigabytes: float) -> None:
        self.folder, names = None, ("memory.limit_in_bytes", "memory.max")
        self.reason = "this process is in no memory cgroup"
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            root = Path("/sys/fs/cgroup") / ("memory" if kinds == "memory" else "")
            if kinds not in ("", "memory") or self.folder is not None:
                continue
            folder = root / path.lstrip("/") / f"cimage-{os.getpid()}"
            try:
                folder.mkdir()
                file = next(folder / name for name in names if (folder / name).exists())
                file.write_text(str(int(gigabytes * 1e9)))
                self.folder = folder
            except (OSError, StopIteration) as error:
                self.reason = f"{type(error).__name__}: {error}"
                with suppress(OSError):
                    folder.rmdir()

    def enter(self) -> None:
        """Called in the child, before its program starts."""
        assert self.folder is not None
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def facts(self) -> dict[str, Any]:
        """The most memory the group held, its page cache included, and how often it was full."""
        assert self.folder is not None
        found: dict[str, Any] = {}
        for name, key in (
            ("memory.max_usage_in_bytes", "peak_with_cache_gb"),
            ("memory.peak", "peak_with_cache_gb"),
            ("memory.failcnt", "times_full"),
        ):
            if (self.folder / name).exists():
                value = int((self.folder / name).read_text())
                found[key] = value / 1e9 if key.endswith("gb") else value
        return found

    def close(self) -> None:
        if self.folder is not None:
            self.folder.rmdir()


def run(part: str, nodes: int, args: argparse.Namespace, limit: float = 0) -> dict[str, Any]:
    """A part in a process of its own; what it found, or why it could not."""
    group = Limit(limit) if limit else None
    if group is not None and group.folder is None:
        return {"not_possible": group.reason}
    command = [sys.executable, __file__, *args.given, "--folder", str(args.folder)]
    try:
        done = subprocess.run(
            [*command, "--part", part, "--part-nodes", str(nodes)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            preexec_fn=group.enter if group else None,  # one thread, nothing locked
        )
        if done.returncode and not limit:
            raise UserError(f"{part} of {nodes:,} nodes ended with {done.returncode}; see above.")
        found: dict[str, Any] = (
            {"killed_or_failed": done.returncode}
            if done.returncode
            else json.loads(done.stdout.splitlines()[-1])
        )
        return found | ({"cgroup": group.facts()} if group else {})
    finally:
        if group is not None:
            group.close()


def show(result: dict[str, Any]) -> str:
    lines = [result["headline"], result["command"]]
    for name in ("small", "large"):
        made, used = result[name]["build"], result[name].get("train")
        lines.append(
            f"{name}: {made['nodes']:,} nodes, {made['undirected_edges']:,} undirected edges, "
            f"most neighbours {made['most_neighbours']:,}; ingest {made['seconds']:.0f} s "
            f"({made['cpu_seconds']:.0f} s of CPU), {made['edges_per_s']:,.0f} edges/s, peak "
            f"{made['peak_gb']:.2f} GB, store {made['store_gb']:.2f} GB"
        )
        if used:
            lines.append(f"  {describe(used)}")
    if "ratios" in result:
        shown = ", ".join(f"{name} {value:.2f}" for name, value in result["ratios"].items())
        lines.append(f"large / small, warm: {shown}")
    for name, found in result.get("limits", {}).items():
        shown = describe(found) if "warm" in found else json.dumps(found)
        lines.append(f"within {name} GB: {shown}")
        if "cgroup" in found:
            lines.append(f"  {json.dumps(found['cgroup'])}")
    return "\n".join(lines)


def describe(used: dict[str, Any]) -> str:
    cold, warm, refresh = used["cold"], used["warm"], used["refresh"]
    return (
        f"step {cold['step_ms']:.0f} ms cold, {warm['step_ms']:.0f} warm, of CPU "
        f"{cold['step_cpu_ms']:.0f} and {warm['step_cpu_ms']:.0f}; its data path "
        f"{cold['data_ms']:.0f} and {warm['data_ms']:.0f}, of CPU {cold['data_cpu_ms']:.0f} and "
        f"{warm['data_cpu_ms']:.0f}; open {used['open_s']:.1f} s, labels "
        f"{used['labels_s']:.1f} s, refresh {refresh['first_s']:.1f} s, again "
        f"{refresh['again_s']:.1f} s; {used['embed_rows_per_s']:,.0f} embedding rows/s; own memory "
        f"{used['memory']['anonymous']:.2f} GB, loader process "
        f"{used['loader']['anonymous']:.2f} GB, peak resident {used['peak_gb']:.2f} GB"
    )


def measure(args: argparse.Namespace) -> dict[str, Any]:
    nodes = round(NODES * args.scale)
    sizes = {"small": min(SMALL_NODES, max(nodes // 10, 1000)), "large": nodes}
    result: dict[str, Any] = {
        "headline": headline(1),
        "command": " ".join(["python benchmarks/out_of_core.py", *args.given]),
        "scale": args.scale,
    }
    result |= {name: {"build": run("build", size, args)} for name, size in sizes.items()}
    if args.only == "build":
        return result
    for name, size in sizes.items():
        run("label", size, args)
        result[name]["train"] = run("train", size, args)
    small, large = (result[name]["train"]["warm"] for name in ("small", "large"))
    result["ratios"] = {name: large[name] / small[name] for name in small}
    result["limits"] = {}
    for gb in args.limits:
        keep(result, args)  # a limit may take long
        result["limits"][f"{gb:g}"] = run("train", nodes, args, gb)
    return result


def keep(result: dict[str, Any], args: argparse.Namespace) -> None:
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", type=float, default=0.001)
    parser.add_argument("--batch", type=int, default=128, help="seed edges")
    parser.add_argument("--fanouts", default="[10,5,5]")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--samples", type=int, default=2000, help="ci.max_samples of the refresh")
    parser.add_argument("--rows", type=int, default=8192, help="nodes to embed")
    parser.add_argument("--limits", type=float, nargs="*", default=[8, 4], metavar="GB")
    parser.add_argument("--only", choices=["build"], help="make the stores and stop")
    parser.add_argument("--folder", type=Path, help="keep the stores here")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--part-nodes", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(given)
    args.given = [
        word
        for name in ("scale", "batch", "fanouts", "steps", "samples", "rows")
        for word in (f"--{name}", str(getattr(args, name)))
    ] + ["--limits", *(f"{limit:g}" for limit in args.limits)]
    if args.part:
        print(json.dumps(PARTS[args.part](args.part_nodes, args.folder, args)))
        return
    with tempfile.TemporaryDirectory(prefix="cimage-out-of-core-") as temporary:
        args.folder = (args.folder or Path(temporary)).resolve()
        args.folder.mkdir(parents=True, exist_ok=True)
        result = measure(args)
    print(show(result))
    keep(result, args)


if __name__ == "__main__":
    main()
