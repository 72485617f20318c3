"""What every method of the comparison takes and gives.

A method is a module with one function, `fit(graph, settings, seed, step) -> Fitted`; settings come
from the yaml file of the same name beside it. Methods run in one process on the whole graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

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


@dataclass(frozen=True)
class Fitted:
    """An embedding [N, D], and the method's own score of pairs [2, P] -> [P] where it has one."""

    embedding: Tensor
    score_links: Callable[[Tensor], Tensor] | None = None
