"""Sums and inner products along messages on the CPU, compiled: torch's index_add takes most of a training step there."""

from __future__ import annotations

from typing import Any, cast

import numba
import numpy as np
import torch
from torch import Tensor


@numba.njit(cache=True)
def _group(to: Any, num_targets: int) -> Any:
    """Messages by target: order[indptr[v]:indptr[v+1]] are those into v, in their order (counting sort)."""
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


@numba.njit(parallel=True, cache=True)
def _sum_rows(out_TKC: Any, indptr: Any, order: Any, x_NKC: Any, by: Any, p_EK: Any) -> None:
    """out[v] += Σ_e p[e,k]·x[by[e],k] over the messages into v."""
    num_factors, width = x_NKC.shape[1], x_NKC.shape[2]
    for v in numba.prange(indptr.size - 1):
        for i in range(indptr[v], indptr[v + 1]):
            e = order[i]
            u = by[e]
            for k in range(num_factors):
                p = p_EK[e, k]
                for c in range(width):
                    out_TKC[v, k, c] += p * x_NKC[u, k, c]


@numba.njit(parallel=True, cache=True, fastmath={"reassoc", "contract", "nsz"})
def _dots(out_EK: Any, a_TKC: Any, to: Any, x_NKC: Any, by: Any) -> None:
    """out[e,k] = <a[to[e],k], x[by[e],k]>."""
    num_factors, width = x_NKC.shape[1], x_NKC.shape[2]
    for e in numba.prange(to.size):
        v, u = to[e], by[e]
        for k in range(num_factors):
            total = x_NKC.dtype.type(0)
            for c in range(width):
                total += a_TKC[v, k, c] * x_NKC[u, k, c]
            out_EK[e, k] = total


def use_threads() -> None:
    """As many compiled threads as torch has, and torch keeps its own number.

    Starting numba's pool sets the thread count of the OpenMP runtime they share; with it the last bits of torch's sums would change
    in the middle of a run.
    """
    threads = torch.get_num_threads()
    numba.set_num_threads(max(1, min(threads, cast(Any, numba.config).NUMBA_NUM_THREADS)))
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


def can_compile(*tensors: Tensor) -> bool:
    """On the CPU, all in single or all in double precision."""
    return all(x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64) and x.dtype == tensors[0].dtype for x in tensors)


def add_messages(out_TKC: Tensor, to: Tensor, x_NKC: Tensor, by: Tensor, p_EK: Tensor) -> Tensor:
    """out[to[e]] += p[e]·x[by[e]] in place. Each target adds its messages in their order, so the bits do not depend on the threads."""
    indptr, order = _group(to.numpy(), out_TKC.shape[0])
    use_threads()
    _sum_rows(out_TKC.numpy(), indptr, order, x_NKC.contiguous().numpy(), by.numpy(), p_EK.contiguous().numpy())
    return out_TKC


def dot_messages(a_TKC: Tensor, to: Tensor, x_NKC: Tensor, by: Tensor) -> Tensor:
    """<a[to[e],k], x[by[e],k]> for every message; [E, K]."""
    out = x_NKC.new_empty((to.numel(), x_NKC.shape[1]))
    use_threads()
    _dots(out.numpy(), a_TKC.contiguous().numpy(), to.numpy(), x_NKC.contiguous().numpy(), by.numpy())
    return out
