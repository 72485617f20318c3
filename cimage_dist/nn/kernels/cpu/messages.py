"""Sums along messages on the CPU, compiled: torch's index_add takes several times as long there."""

from __future__ import annotations

from functools import partial
from typing import Any

import numba
import numpy as np
from torch import Tensor

from cimage_dist.nn.kernels.cpu.threads import num_parts, run_parts


@numba.njit(cache=True, nogil=True)
def group(to: Any, num_targets: int) -> Any:
    """Messages by target: order[indptr[v]:indptr[v+1]] are those into v, in their order (counting
    sort).
    """
    indptr = np.zeros(num_targets + 1, np.int64)
    for v in to:
        indptr[v + 1] += 1
    for v in range(num_targets):
        indptr[v + 1] += indptr[v]
    place, order = indptr[:-1].copy(), np.empty(to.size, np.int64)
    for e in range(to.size):
        order[place[to[e]]] = e
        place[to[e]] += 1
    return indptr, order


@numba.njit(cache=True, nogil=True)
def _sum_rows(
    out_TD: Any, indptr: Any, order: Any, x_ND: Any, by: Any, weight: Any, bounds: Any, part: int
) -> None:
    """out[v] += Σ_e weight[e]·x[by[e]] over the messages into v, for the targets of a part."""
    for v in range(bounds[part], bounds[part + 1]):
        for i in range(indptr[v], indptr[v + 1]):
            e = order[i]
            u, w = by[e], weight[e]
            for c in range(x_ND.shape[1]):
                out_TD[v, c] += w * x_ND[u, c]


def add_messages(
    out_TD: Tensor, by_target: Any, x_ND: Tensor, by: Tensor, weight: Tensor
) -> Tensor:
    """out[to[e]] += weight[e]·x[by[e]] in place, `by_target` = group(to, T).

    Each target adds its messages in their order, so the bits do not depend on the threads.
    """
    indptr, order = by_target
    parts = num_parts()
    # Shares of about equal load: a target costs as much as a message.
    load = indptr + np.arange(indptr.size)
    bounds = np.searchsorted(load, load[-1] * np.arange(parts + 1) // parts)
    bounds[-1] = out_TD.shape[0]
    run_parts(
        partial(
            _sum_rows,
            out_TD.numpy(),
            indptr,
            order,
            x_ND.contiguous().numpy(),
            by.numpy(),
            weight.contiguous().numpy(),
            bounds,
        ),
        parts,
    )
    return out_TD
