"""The sum of weighted messages on the CPU, compiled: torch's index_add takes most of a training step there."""

from __future__ import annotations

from typing import Any, cast

import numba
import torch
from torch import Tensor


@numba.njit(parallel=True, cache=True)
def _sum_rows(out_TKC: Any, indptr: Any, x_NKC: Any, by: Any, p_EK: Any) -> None:
    """out[v] += Σ_e p[e,k]·x[by[e],k] over the messages indptr[v] <= e < indptr[v+1], in order."""
    num_factors, width = x_NKC.shape[1], x_NKC.shape[2]
    for v in numba.prange(indptr.size - 1):
        for e in range(indptr[v], indptr[v + 1]):
            u = by[e]
            for k in range(num_factors):
                p = p_EK[e, k]
                for c in range(width):
                    out_TKC[v, k, c] += p * x_NKC[u, k, c]


def use_threads() -> None:
    """As many compiled threads as torch has."""
    numba.set_num_threads(max(1, min(torch.get_num_threads(), cast(Any, numba.config).NUMBA_NUM_THREADS)))


def is_ascending(ids: Tensor) -> bool:
    return not bool((ids[1:] < ids[:-1]).any())


def can_sum(x: Tensor, p: Tensor) -> bool:
    """On the CPU, in single or double precision."""
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64) and p.dtype == x.dtype


def add_messages(out_TKC: Tensor, to: Tensor, x_NKC: Tensor, by: Tensor, p_EK: Tensor) -> Tensor:
    """out[to[e]] += p[e]·x[by[e]] in place. Each target adds its messages in their order, so the bits do not depend on the threads."""
    if not is_ascending(to):
        order = torch.argsort(to, stable=True)
        to, by, p_EK = to[order], by[order], p_EK[order]
    indptr = torch.searchsorted(to, torch.arange(out_TKC.shape[0] + 1))
    use_threads()
    _sum_rows(out_TKC.numpy(), indptr.numpy(), x_NKC.contiguous().numpy(), by.numpy(), p_EK.contiguous().numpy())
    return out_TKC
