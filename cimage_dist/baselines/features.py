"""Feature normalisation shared by the methods: each author's choice is a word in the yaml file."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import normalize

from cimage_dist.errors import UserError

# The norm that every row is divided by: L1 makes rows of counts sum to one, L2 gives unit length.
ORDERS = {"row": 1, "unit": 2}


def prepared(x: Tensor, how: str) -> Tensor:
    """x_i / ||x_i||_1 (`row`), x_i / ||x_i||_2 (`unit`) or x_i (`none`); x and result [N, F].

    A row of zeros stays zero.
    """
    if how == "none":
        return x
    if how not in ORDERS:
        raise UserError(f"normalize={how!r}: choose one of none, {', '.join(sorted(ORDERS))}")
    return normalize(x, p=ORDERS[how], dim=1)
