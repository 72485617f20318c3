"""Published methods to compare with: their names, settings, and what a graph must offer them.

A method is the module <name>.py with its `loss` and `fit(graph, settings, seed, step) -> Fitted`;
settings come from <name>.yaml beside it. Methods run in one process on the whole graph.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module, resources
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from cimage_dist.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

OWN, SUPERVISED = "cimage", "gcn"
Step = Callable[[int, int, float], None]  # (steps done, steps in all, loss), after every step


@dataclass(frozen=True)
class Graph:
    """The graph a method trains on: no test edge, no label except for the supervised reference."""

    x: Tensor  # float32 [N, F], dense
    edge_index: Tensor  # int64 [2, E], both directions, no self-loops, no duplicates
    y: Tensor | None = None  # int64 [N], -1 where unknown; read by the supervised reference alone
    train: Tensor | None = None  # bool [N]; likewise
    val: Tensor | None = None  # bool [N]; likewise

    @property
    def num_nodes(self) -> int:
        return self.x.shape[0]

    @property
    def has_labels(self) -> bool:
        """Whether some training node has a class."""
        y, train = self.y, self.train
        return y is not None and train is not None and bool(((y >= 0) & train).any())


@dataclass(frozen=True)
class Fitted:
    """An embedding [N, D], and the method's own score of pairs [2, P] -> [P] where it has one."""

    embedding: Tensor
    score_links: Callable[[Tensor], Tensor] | None = None


class Method(NamedTuple):
    label: str
    about: str
    most_nodes: int | None = None  # of the largest graph it takes; None: nothing limits it


METHODS = {
    OWN: Method("CIMAGE", "ours, with the settings of the config; brings the controls along"),
    "gae": Method("GAE", "graph auto-encoder, inner products predict edges"),
    "vgae": Method("VGAE", "variational graph auto-encoder"),
    "arga": Method("ARGA", "GAE with an adversarial prior"),
    "arvga": Method("ARVGA", "VGAE with an adversarial prior"),
    "dgi": Method("DGI", "nodes against a summary of the graph"),
    # The diffusion is dense: 2.5 GB there, and its inversion needs three times that.
    "mvgrl": Method("MVGRL", "adjacency and diffusion as two views; up to 25,000 nodes", 25_000),
    "grace": Method("GRACE", "contrast of two corrupted views"),
    "ccassg": Method("CCA-SSG", "two views agree, channels are uncorrelated"),
    "maskgae": Method("MaskGAE", "predicts masked edges"),
    "graphmae2": Method("GraphMAE2", "reconstructs masked features, decoded from re-masked codes"),
    # The contrast costs N^2 time in every epoch; memory stays at some rows x N.
    "gigamae": Method(
        "GiGaMAE", "reconstructs embeddings of other methods; up to 25,000 nodes", 25_000
    ),
    "augmae": Method("AUG-MAE", "masked features with a learned mask and uniformity"),
    "bandana": Method("Bandana", "predicts a continuous mask of the edges"),
    SUPERVISED: Method("GCN", "supervised reference, trained with labels; not ranked"),
}


def fit(name: str, graph: Graph, settings: Mapping[str, Any], seed: int, step: Step) -> Fitted:
    """Train a method. Draws depend on `seed` alone; generators outside continue as if nothing had
    happened.
    """
    import torch

    check([name], graph.num_nodes, graph.has_labels)
    method = import_module(f"cimage_dist.baselines.{name}")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return method.fit(graph, settings, seed, step)


def settings_of(
    name: str, dataset: str, task: str, overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """default, then datasets.<dataset>; for the task `link` then link.default and
    link.datasets.<dataset>; then `overrides`, which may only name known settings.
    """
    text = (resources.files("cimage_dist.baselines") / f"{name}.yaml").read_text()
    tree = yaml.safe_load(text)
    settings: dict[str, Any] = {}
    parts = [tree, tree.get("link") or {}] if task == "link" else [tree]
    for part in parts:
        settings |= part.get("default") or {}
        settings |= (part.get("datasets") or {}).get(dataset) or {}
    overrides = overrides or {}
    for key in overrides:
        if key not in settings:
            hint = _hint(key, settings)
            raise UserError(f"{name} has no setting {key!r}.{hint} Known: {', '.join(settings)}.")
        settings[key] = _like(settings[key], overrides[key], f"{name}.{key}")
    return settings


def _like(usual: Any, given: Any, where: str) -> Any:
    """`given` as the type of the usual value; yaml reads 1e-3 as a text, so texts are tried."""
    try:
        if isinstance(usual, bool) or isinstance(given, bool):
            fits = type(usual) is type(given)
        elif isinstance(usual, int | float):
            given = float(given)
            fits = isinstance(usual, float) or given.is_integer()
            given = given if isinstance(usual, float) else int(given)
        else:
            fits = isinstance(given, type(usual))
    except (TypeError, ValueError, OverflowError):
        fits = False
    if not fits:
        kind = type(usual).__name__
        raise UserError(f"{where} must be of type {kind}, such as {usual!r}; got {given!r}.")
    return given


def why_not(name: str, num_nodes: int, has_labels: bool) -> str | None:
    """Why a method cannot be trained on a graph, or None."""
    most = METHODS[name].most_nodes
    if most is not None and num_nodes > most:
        return f"{name} takes graphs of at most {most:,} nodes, this one has {num_nodes:,}"
    if name == SUPERVISED and not has_labels:
        return f"{name} is trained with labels, and this graph has no labelled training nodes"
    return None


def check_names(names: Sequence[str]) -> None:
    for name in names:
        if name not in METHODS:
            known = ", ".join(METHODS)
            raise UserError(f"Unknown method {name!r}.{_hint(name, METHODS)} Known: {known}.")


def check(names: Sequence[str], num_nodes: int, has_labels: bool = True) -> None:
    """A UserError for the first method that is unknown or cannot be trained on such a graph."""
    check_names(names)
    for name in names:
        if reason := why_not(name, num_nodes, has_labels):
            raise UserError(f"{reason}. Leave {name} out of --methods.")


def _hint(word: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(word.lower().replace("-", ""), list(known), n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""
