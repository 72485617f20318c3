"""The routing assignments of one layer without gradient, compiled: each target's iterations run in cache, nothing of size E x D is made."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from cimage_dist.nn.messages_cpu import can_compile, use_threads

_EPS = 1e-12


@numba.njit(parallel=True, cache=True, fastmath={"reassoc", "contract", "nsz"})
def _iterate(l_TKC: Any, l_NKC: Any, indptr: Any, src: Any, weight: Any, rounds: int, inv_tau: float, p_EK: Any) -> None:
    """`rounds` times for every target v: q = l[v] + Σ w·p·l[u], normalised per factor; p = softmax_k(<l[u,k], q[k]> / τ)."""
    num_factors, width = l_NKC.shape[1], l_NKC.shape[2]
    for v in numba.prange(indptr.size - 1):
        begin, end = indptr[v], indptr[v + 1]
        if begin == end:
            continue
        q = np.empty((num_factors, width), l_NKC.dtype)
        for _ in range(rounds):
            for k in range(num_factors):
                for c in range(width):
                    q[k, c] = l_TKC[v, k, c]
            for e in range(begin, end):
                u = src[e]
                for k in range(num_factors):
                    p = p_EK[e, k] * weight[e] if weight.size else p_EK[e, k]
                    for c in range(width):
                        q[k, c] += p * l_NKC[u, k, c]
            for k in range(num_factors):
                total = l_NKC.dtype.type(0)
                for c in range(width):
                    total += q[k, c] * q[k, c]
                scale = 1 / max(np.sqrt(total), _EPS)
                for c in range(width):
                    q[k, c] *= scale
            for e in range(begin, end):
                u = src[e]
                top = -np.inf
                for k in range(num_factors):
                    dot = l_NKC.dtype.type(0)
                    for c in range(width):
                        dot += l_NKC[u, k, c] * q[k, c]
                    p_EK[e, k] = dot * inv_tau
                    top = max(top, p_EK[e, k])
                total = l_NKC.dtype.type(0)
                for k in range(num_factors):
                    p_EK[e, k] = np.exp(p_EK[e, k] - top)
                    total += p_EK[e, k]
                for k in range(num_factors):
                    p_EK[e, k] /= total


def can_iterate(l_NKC: Tensor, dst: Tensor) -> bool:
    """On the CPU, in single or double precision, with messages sorted by target."""
    return can_compile(l_NKC) and not bool((dst[1:] < dst[:-1]).any())


def iterate_assignments(l_TKC: Tensor, l_NKC: Tensor, src: Tensor, dst: Tensor, weight: Tensor | None, p_EK: Tensor, rounds: int, temperature: float) -> Tensor:
    """p [E, K] after `rounds` rounds of aggregation and assignment, starting from `p_EK`, which is overwritten.

    Targets are independent, so the result does not depend on the number of threads.
    """
    use_threads()
    indptr = torch.searchsorted(dst, torch.arange(l_TKC.shape[0] + 1))
    factor = np.empty(0, dtype=np.float32) if weight is None else weight.numpy()
    _iterate(l_TKC.contiguous().numpy(), l_NKC.contiguous().numpy(), indptr.numpy(), src.numpy(), factor, rounds, 1.0 / temperature, p_EK.numpy())
    return p_EK
