"""One method with one seed: train, score, and what it cost."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from cimage_dist import baselines
from cimage_dist.baselines import OWN
from cimage_dist.config import Config, science
from cimage_dist.data.splits import training_graph
from cimage_dist.data.store import Graph
from cimage_dist.errors import UserError
from cimage_dist.eval.score import PairScore, row_scores
from cimage_dist.io import artifacts, storage
from cimage_dist.pipeline import stages
from cimage_dist.pipeline.evaluation import evaluate_run, score_links, score_matrix
from cimage_dist.train.progress import Progress
from cimage_dist.train.trainer import pick_device
from cimage_dist.types import Topology

Result = dict[str, Any]
T = TypeVar("T")
_KEPT = ("node", "node_reason", "few_labels", "cluster", "link")
_HIDING = threading.Lock()  # of the main module, by one thread at a time
_OF_CONTROLS = (*_KEPT, "width", "hops", "alpha", "of", "chosen_by")


@dataclass(frozen=True)
class Cell:
    """`cfg` has the seed, and for our method its run directory; `settings` are a baseline's.

    `num_clusters` is None where the classes give it.
    """

    method: str
    cfg: Config
    graph: Graph
    settings: dict[str, Any]
    num_clusters: int | None

    @property
    def seed(self) -> int:
        return self.cfg.run.seed

    @property
    def fingerprint(self) -> str:
        """Of everything that decides the result: 12 hex digits. A baseline reads no setting of
        our training, so a change of those leaves it alone.
        """
        trained = science(self.cfg)
        parts = {
            "method": self.method,
            "settings": self.settings,
            "science": trained if self.method == OWN else trained["data"],
            "eval": dataclasses.asdict(self.cfg.eval),
            "graph": self.graph.fingerprint,
            "clusters": self.num_clusters,
            "seed": self.seed,
        }
        text = json.dumps(parts, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()

    def path(self, folder: Path) -> Path:
        return folder / self.method / f"seed-{self.seed}.json"


def finished(cell: Cell, folder: Path) -> Result | None:
    """The result that is there, when it was made with the same settings and did not fail."""
    path = cell.path(folder)
    if not path.is_file():
        return None
    found: Result = artifacts.read_json(path, "a result of the comparison")
    is_same = found.get("fingerprint") == cell.fingerprint
    return found if is_same and "error" not in found else None


def run_cell(cell: Cell, progress: Progress, stage: str) -> Result:
    """Train and score in this process."""
    if cell.cfg.resources.threads:
        torch.set_num_threads(cell.cfg.resources.threads)
    made = _ours(cell, progress) if cell.method == OWN else _baseline(cell, progress, stage)
    progress.close()
    return {
        "method": cell.method,
        "seed": cell.seed,
        "fingerprint": cell.fingerprint,
        "graph": cell.graph.fingerprint,
        "settings": cell.settings,
        **made,
    }


def _ours(cell: Cell, progress: Progress) -> Result:
    cfg, graph = cell.cfg, cell.graph

    def train() -> Result:
        summary = stages.pretrain(cfg, progress, graph)
        stages.embed(cfg, graph)
        return summary

    summary, cost = _measured(train)
    is_whole = summary["steps_now"] == summary["steps"]  # else resumed: only the rest was timed
    found = evaluate_run(cfg, graph=graph, note=progress.note, num_clusters=cell.num_clusters)
    controls = found.get("controls", {})
    return _only(_KEPT, found) | {
        **cost,
        **({} if is_whole else {"seconds": None, "cpu_seconds": None}),
        "objective": found["objective"],
        "run_dir": found["run_dir"],
        "controls": {name: _only(_OF_CONTROLS, scores) for name, scores in controls.items()},
    }


def _only(names: Sequence[str], scores: Result) -> Result:
    return {name: scores[name] for name in names if name in scores}


def _baseline(cell: Cell, progress: Progress, stage: str) -> Result:
    cfg, graph = cell.cfg, cell.graph
    topology, links = training_graph(graph, cfg.data, cell.seed)
    given = method_graph(graph, topology, cfg)

    def step(done: int, total: int, loss: float) -> None:
        progress.update(done, total, {"loss": loss}, stage)

    fitted, cost = _measured(
        lambda: baselines.fit(cell.method, given, cell.settings, cell.seed, step)
    )
    z = fitted.embedding.detach().float().cpu()
    scores = score_matrix(z, graph, topology, cfg, num_clusters=cell.num_clusters)
    if links is not None:
        ways = row_scores(z)
        if fitted.score_links is not None:
            ways["its own"] = _by_columns(fitted.score_links, given.x.device)
        scores["link"] = score_links(ways, links)
    return scores | {"width": z.shape[1]} | cost


def method_graph(graph: Graph, topology: Topology, cfg: Config) -> baselines.Graph:
    """What a method is trained on: no held-out edge; classes under the training and validation
    masks alone, so that no test label can be read.
    """
    device, edges = pick_device(cfg), topology.edge_list()
    y, train, val = graph.labels(), None, None
    split, _ = stages.node_split_or_reason(graph, cfg)
    if y is None or split is None:
        y = None
    else:
        y = torch.where(split.train | split.val, y, -1).to(device)
        train, val = split.train.to(device), split.val.to(device)
    index = torch.stack([edges.src, edges.dst]).to(device)
    # A copy: the store is mapped read-only, and a method may change its input in place.
    return baselines.Graph(graph.features().clone().to(device), index, y, train, val)


def _by_columns(score: Callable[[Tensor], Tensor], device: torch.device) -> PairScore:
    """A method scores pairs [2, n]; link scores are asked for pairs [n, 2]."""
    return lambda pairs: score(pairs.T.to(device))


def _measured(train: Callable[[], T]) -> tuple[T, dict[str, float]]:
    """What `train` made, and its cost: unlike the time that passed, the seconds of all threads
    together hardly depend on what else the machine does.
    """
    storage.forget_peak_memory()
    began, cpu_began = time.perf_counter(), time.process_time()
    made = train()
    return made, {
        "seconds": round(time.perf_counter() - began, 2),
        "cpu_seconds": round(time.process_time() - cpu_began, 2),
        "peak_gb": round(storage.peak_memory() / 1e9, 3),
    }


def in_own_process(cell: Cell, quiet: bool, stage: str) -> Result:
    """So that the peak of memory is the cell's own, and its death harms no other."""
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(1, context, storage.end_with_parent) as pool:
            with _without_main():
                running = pool.submit(in_this_process, cell, quiet, stage)
            return running.result()
    except BrokenProcessPool:
        raise UserError("the process was killed, most likely for lack of memory") from None


@contextmanager
def _without_main() -> Iterator[None]:
    """A process spawned now does not run the calling script again: it needs nothing of it, and a
    script without `if __name__ == "__main__"` would start the comparison again there.
    """
    with _HIDING:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def in_this_process(cell: Cell, quiet: bool, stage: str) -> Result:
    return run_cell(cell, Progress(quiet), stage)
