"""Initial-label methods and loss terms by name: ours, and those a program registers.

Nothing heavy is imported here, since the config is checked against these names. Workers on Ray
must register too: do it in an installed module that Ray's runtime environment imports
(`worker_process_setup_hook`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from cimage_dist.comm import Comm


@dataclass(frozen=True)
class Clusterer:
    """An initial-label method (METHOD §6.1).

    make: Collective. (x, topology, num_clusters, settings, seed, comm, tick) -> labels int64 [N],
    confidence float64 [N], the same on all ranks.
    settings: (name of the dataset, number of nodes, number of clusters) -> a dataclass that, with
    graph and seed, decides the labels: it names them in the cache.
    """

    make: Callable[..., tuple[Tensor, Tensor]]
    settings: Callable[[str, int, int], Any]


class LossInputs(NamedTuple):
    """What a registered loss term sees of a step, on this rank.

    z [n, K, C]: factors of the nodes the losses look at (all nodes, or the endpoints of the
    batch's positives) in the masked view; second: the same in the other view, None without the
    redundancy loss; gids int64 [n]; weight [n] or None for ones; total: sum of the weights over
    all ranks.
    """

    z: Tensor
    second: Tensor | None
    gids: Tensor
    weight: Tensor | None
    total: float
    comm: Comm


# This rank's share of the term: shares add up to the global value.
LossTerm = Callable[[LossInputs], "Tensor"]

_BUILT_IN = {name: f"cimage_dist.pseudo.{name}" for name in ("propagated", "rdgae", "dinknet")}
_CLUSTERERS: dict[str, Clusterer] = {}
_LOSSES: dict[str, LossTerm] = {}


def register_clusterer(name: str, clusterer: Clusterer) -> None:
    """Make `cluster.init=<name>` mean this method."""
    _CLUSTERERS[_checked(name, {*_BUILT_IN, "selfkmeans", "auto", "file"})] = clusterer


def register_loss(name: str, term: LossTerm) -> None:
    """Make `loss.extra.<name>=<weight>` add this term to the objective."""
    _LOSSES[_checked(name, {"structure", "factor", "cluster", "redundancy"})] = term


def _checked(name: str, taken: set[str]) -> str:
    if not name.isidentifier() or name in taken:
        raise ValueError(f"{name!r} is taken or not a plain name")
    return name


def clusterer_names() -> list[str]:
    return [*_BUILT_IN, *_CLUSTERERS]


def loss_names() -> list[str]:
    return list(_LOSSES)


def clusterer(name: str) -> Clusterer:
    if name in _CLUSTERERS:
        return _CLUSTERERS[name]
    found: Clusterer = import_module(_BUILT_IN[name]).CLUSTERER
    return found


def loss(name: str) -> LossTerm:
    return _LOSSES[name]
