"""Before the first trial: the graph is built, there is something to validate on, and the directory
belongs to this sweep.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from cimage_dist.config import Config
from cimage_dist.config_loading import to_yaml
from cimage_dist.data.ingest import ingest, open_graph
from cimage_dist.data.splits import node_split, training_graph
from cimage_dist.data.store import Graph
from cimage_dist.errors import UserError
from cimage_dist.eval.links import make_validator
from cimage_dist.io import artifacts
from cimage_dist.tune.ledger import Ledger
from cimage_dist.tune.spec import Sweep


def check_validation(cfg: Config, graph: Graph) -> None:
    """A sweep chooses by validation scores, so every run must have one; which, the config decides
    as in training.
    """
    if cfg.train.validate_every == 0:
        raise UserError(
            "A sweep compares validation scores, but train.validate_every is 0. Set e.g. "
            "train.validate_every=10 (and train.select=val)."
        )
    topology, links = training_graph(graph, cfg.data, cfg.run.seed)
    make_validator(cfg, graph, topology, links)
    is_by_node = cfg.train.validate_by == "node" or (
        cfg.train.validate_by == "auto" and links is None
    )
    labels = graph.labels()
    if is_by_node and labels is not None:
        split = node_split(graph, cfg.data, cfg.run.seed)
        if not bool((labels[split.val] >= 0).any()):
            raise UserError(
                f"The node split of graph {graph.name!r} has no labelled validation nodes, so "
                "there is nothing to choose by. "
                "Use another data.split, or link validation with data.holdout_edges=link."
            )


def prepare(sweep: Sweep, cfg: Config, ledger: Ledger, note: Callable[[str], None]) -> None:
    """Check everything, build the graph store that all trials share, and write base.yaml (with
    `cfg`, whose paths are absolute) and sweep.json.
    """
    known = ledger.root / "sweep.json"
    if known.is_file():
        identity = artifacts.read_json(known, "the sweep's settings")["identity"]
        if identity != sweep.identity:
            raise UserError(
                f"{ledger.root} holds another sweep (of another space, config, seed or search). "
                "Choose another sweep.dir, or delete that folder to start afresh."
            )
    elif ledger.trials:
        raise UserError(
            f"{ledger.root} has trials but no sweep.json. Choose another sweep.dir, or delete "
            "that folder to start afresh."
        )
    ingest(cfg.data, note)
    check_validation(cfg, open_graph(cfg.data))
    artifacts.write_text(ledger.root / "base.yaml", to_yaml(cfg))
    body = {
        "identity": sweep.identity,
        "name": sweep.name,
        "settings": dataclasses.asdict(sweep.settings),
        "space": sweep.entries,
    }
    artifacts.write_json(known, body)
