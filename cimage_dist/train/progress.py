"""How long a run is on its graph, what is said of it before it starts and while it trains, and what
else must stay the same for it to become longer.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import psutil
import torch

from cimage_dist.config import Config, DataConfig, describe_objective, fingerprint
from cimage_dist.config_loading import settings_of
from cimage_dist.data.splits import num_training_edges, settled
from cimage_dist.data.store import Graph
from cimage_dist.train.step import batches_per_epoch

Item = TypeVar("Item")
Clock = Callable[[], float]

_FIRST_LINE_S, _LINE_EVERY_S = 5.0, 30.0
_MEASURED_STEPS = 3

# What two runs of the same experiment need not have in common.
MEASURED = (
    "seconds",
    "edges_per_s",
    "sampling_s",
    "step_s",
    "exchange_s",
    "memory_gb",
    "gpu_memory_gb",
)
LENGTH = ("train.steps", "train.epochs")  # keys by which a run may become longer


class Meter:
    """Seconds waited for batches (sampling), in forward, backward and update (step), in exchanging
    losses and wishes (exchange).

    The gradients' own exchange overlaps the backward pass and counts as step. `edges`: positives
    trained on since the last reading.
    """

    def __init__(self, cfg: Config, device: torch.device) -> None:
        self.minutes, self.device = cfg.run.checkpoint_minutes, device
        self.edges = 0.0
        self._spent: dict[str, float] = {}
        self._since = self._saved = time.perf_counter()
        self._process = psutil.Process()

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._spent[name] = self._spent.get(name, 0.0) + time.perf_counter() - began

    def timed(self, items: Iterator[Item]) -> Iterator[Item]:
        """The same items; waiting for the next one counts as sampling."""
        while True:
            with self.time("sampling"):
                item = next(items, None)
            if item is None:
                return
            yield item

    def read(self) -> dict[str, Any]:
        """Since the last reading: seconds in all and by kind, edges per second; memory at this
        moment. Starts again.
        """
        now = time.perf_counter()
        seconds = now - self._since
        found = {
            "seconds": seconds,
            "edges_per_s": self.edges / seconds,
            **{f"{name}_s": spent for name, spent in self._spent.items()},
        }
        found["memory_gb"] = self._process.memory_info().rss / 1e9
        if self.device.type == "cuda":
            found["gpu_memory_gb"] = torch.cuda.max_memory_allocated(self.device) / 1e9
        self.edges, self._spent, self._since = 0.0, {}, now
        return found

    def is_checkpoint_due(self) -> bool:
        return self.minutes > 0 and time.perf_counter() - self._saved >= 60 * self.minutes

    def checkpointed(self) -> None:
        self._saved = time.perf_counter()


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and "IPKernelApp" in shell.config


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def ending(seconds: float) -> str:
    """When something ends that takes so long from now: "ends about 14:35, in 12 min"."""
    at = time.localtime(time.time() + seconds)
    shown = time.strftime("%H:%M" if seconds < 43_200 else "%d %b %H:%M", at)
    return f"ends about {shown}, in {duration(seconds)}"


def estimate(total: int, each: float, left: float, refreshes: int = 0, refresh: float = 0.0) -> str:
    """What a run will take: `each` second of a step, `left` seconds of all steps to come, and
    `refreshes` of `refresh` seconds.
    """
    more = f", {refreshes:,} refreshes of {refresh:.2g} s" if refreshes and refresh > each else ""
    taken = left + refreshes * refresh
    return f"{total:,} steps of {each:.2g} s as measured here{more}: {ending(taken)}"


class Pace:
    """An estimate of the run's end from its first steps.

    The first one warms up and is left out. Refreshes of the partition fall on few steps and are
    measured apart: one comes before step 0 and then every `every` steps.
    """

    def __init__(self, total: int, every: int, clock: Clock = time.perf_counter) -> None:
        self.total, self.every, self.clock = total, every, clock
        self._refreshing: list[float] = []
        self._ends: list[float] = []

    @contextmanager
    def refresh(self, is_due: bool) -> Iterator[None]:
        began = self.clock()
        yield
        if is_due:
            self._refreshing.append(self.clock() - began)

    def after(self, step: int) -> str | None:
        """Call after every step; the estimate, once."""
        if len(self._ends) == _MEASURED_STEPS:
            return None
        self._ends.append(self.clock() - sum(self._refreshing))
        if len(self._ends) < _MEASURED_STEPS or step == self.total:
            return None
        each = (self._ends[-1] - self._ends[0]) / (_MEASURED_STEPS - 1)
        count = math.ceil(self.total / self.every) - math.ceil(step / self.every)
        mean = sum(self._refreshing) / max(len(self._refreshing), 1)
        return estimate(self.total, each, each * (self.total - step), count if mean else 0, mean)


def _short(metrics: dict[str, float]) -> dict[str, str]:
    return {name: f"{value:.4g}" for name, value in metrics.items()}


class Progress:
    """Shows step, loss terms, throughput and the estimated end on standard error.

    On a terminal a bar; elsewhere a line after five seconds of a stage, then at most one every half
    minute, and one at its end.
    """

    def __init__(self, quiet: bool = False, clock: Clock = time.monotonic) -> None:
        self.quiet, self.clock = quiet, clock
        self._stage = ""
        self._bar: Any = None
        self._begin: tuple[float, int] | None = None
        self._last = clock()  # of the update before: when a new stage began
        self._due = 0.0

    def update(
        self, step: int, total: int, metrics: dict[str, float], stage: str = "pretrain"
    ) -> None:
        """`step` steps of a stage are done out of `total`."""
        if self.quiet:
            return
        if stage != self._stage:
            self.close()
            self._stage, self._begin = stage, None
            self._due = self._last + _FIRST_LINE_S
        if sys.stderr.isatty() or in_notebook():
            self._update_bar(step, total, metrics)
        else:
            self._update_lines(step, total, metrics)
        self._last = self.clock()

    def _update_bar(self, step: int, total: int, metrics: dict[str, float]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a notebook without ipywidgets has the bar of letters
            from tqdm.auto import tqdm

        if self._bar is None:
            self._bar = tqdm(
                total=total, initial=step - 1, unit="step", desc=self._stage, dynamic_ncols=True
            )
        self._bar.set_postfix(_short(metrics), refresh=False)
        self._bar.update(step - self._bar.n)

    def _update_lines(self, step: int, total: int, metrics: dict[str, float]) -> None:
        now = self.clock()
        if self._begin is None:
            self._begin = (now, step)
        if now < self._due and step != total:
            return
        self._due = now + _LINE_EVERY_S
        rate = (step - self._begin[1]) / max(now - self._begin[0], 1e-9)
        shown = [f"{name} {value}" for name, value in _short(metrics).items()]
        if rate > 0:
            shown.append(f"{rate:.3g} steps/s")
        if rate > 0 and step < total:
            shown.append(ending((total - step) / rate))
        print(f"{self._stage} {step}/{total}", *shown, sep="  ", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """A line of its own that does not break the bar."""
        if self.quiet:
            return
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def why_unvalidated(cfg: Config, graph: Graph) -> str | None:
    """One line where a graph has nothing to validate on: neither labels nor held-out edges.

    None where validation is asked for: that is refused by `make_validator`.
    """
    if cfg.train.validate_every:
        return None
    if settled(cfg.data, graph).holdout_edges != "none" or graph.num_classes:
        return None
    return (
        f"graph {graph.name} has no labels and no held-out edges: no validation score, the "
        "last step is the result"
    )


def _edges_and_batches(cfg: Config, graph: Graph) -> tuple[int, int]:
    """Directed training edges, and batches of a pass over them."""
    edges = num_training_edges(graph.num_edges, settled(cfg.data, graph))
    return edges, batches_per_epoch(cfg, graph.num_nodes, edges)


def steps_on(cfg: Config, graph: Graph) -> int:
    """Optimiser steps of a run on this graph."""
    return cfg.total_steps(_edges_and_batches(cfg, graph)[1])


def announce(cfg: Config, graph: Graph, progress: Progress) -> None:
    """Say what is about to be trained, what was chosen for this graph, and what cannot be
    scored.
    """
    progress.note(f"objective: {describe_objective(cfg)}")
    progress.note(f"length: {describe_length(cfg, graph)}")
    if reason := cfg.unshared_work():
        progress.note(f"warning: {reason}")
    if cfg.data.holdout_edges == "auto" and not graph.num_classes:
        progress.note(_describe_holdout(graph, settled(cfg.data, graph)))
    if reason := why_unvalidated(cfg, graph):
        progress.note(reason)


def describe_length(cfg: Config, graph: Graph) -> str:
    """ "200 steps, 0.6 passes over 340,000 edges (train.steps)"."""
    edges, per_epoch = _edges_and_batches(cfg, graph)
    steps, passes = cfg.total_steps(per_epoch), cfg.total_batches(per_epoch) / per_epoch
    given = [key for key in LENGTH if getattr(cfg.train, key.partition(".")[2]) is not None]
    by = " and ".join(given) or f"the default of {'sampled' if cfg.steps else 'whole-graph'} runs"
    over = "masks of" if not cfg.sampler.fanouts else "passes over"
    return f"{steps:,} steps, {passes:.3g} {over} {edges // 2:,} edges (by {by})"


def _describe_holdout(graph: Graph, data: DataConfig) -> str:
    if data.holdout_edges == "none":
        return (
            f"no labels, and of {graph.num_edges // 2:,} edges none is held out (too few, or so "
            "many that a copy would cost gigabytes): there will be no link scores. "
            "data.holdout_edges=link holds some out"
        )
    return (
        f"no labels: {data.link_val_ratio:.0%} and {data.link_test_ratio:.0%} of the edges are "
        "held out, so that `cimage evaluate` can score the embedding on links it has not seen; "
        "data.holdout_edges=none trains on all"
    )


def science_changes(a: Config, b: Config) -> list[str]:
    """Dotted keys by which two configs are different experiments; the fingerprint (and the seed)
    decides.
    """

    def is_science(key: str) -> bool:
        mixed: Any = copy.deepcopy(a)
        at, source, parts = mixed, b, key.split(".")
        for part in parts[:-1]:
            at, source = getattr(at, part), getattr(source, part)
        setattr(at, parts[-1], getattr(source, parts[-1]))
        return key == "run.seed" or fingerprint(mixed) != fingerprint(a)

    left, right = settings_of(a), settings_of(b)
    return [key for key in left if left[key] != right[key] and is_science(key)]


def changed_training(old: Config, new: Config, graph: Graph) -> list[str]:
    """Keys by which two configs train differently on this graph: what `auto` stands for counts."""
    here = (dataclasses.replace(cfg, data=settled(cfg.data, graph)) for cfg in (old, new))
    return science_changes(*here)
