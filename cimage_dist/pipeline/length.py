"""How long a run is on its graph, what is said of it before it starts, and what else must stay the
same for it to become longer.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from cimage_dist.config import Config, DataConfig, describe_objective, fingerprint
from cimage_dist.config_loading import settings_of
from cimage_dist.data.splits import num_training_edges, settled
from cimage_dist.data.store import Graph
from cimage_dist.eval.links import why_unvalidated
from cimage_dist.train.progress import Progress
from cimage_dist.train.step import batches_per_epoch

LENGTH = ("train.steps", "train.epochs")  # keys by which a run may become longer


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
