"""Triton kernels of neighbourhood routing. Only `routing.py` imports this module, when it
launches one: triton may be missing.

Shapes: N nodes, T targets, E messages of a tile, K factors, C channels per factor, S slots (rounds
kept for the gradient), H hubs, P parts. Arithmetic is in `form.acc` whatever the tensors are stored
in. Before round 0, q is zero unless `self_init`: the softmax of zeros is the uniform 1/K, so that
round needs no case of its own. No atomics: every sum has one owner and one order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

EPS = tl.constexpr(1e-12)


@dataclass(frozen=True)
class Form:
    """What a kernel is compiled for: K factors of C channels, padded to the powers of two BK and
    BC, in tiles of `tile` messages.
    """

    K: int
    C: int
    BK: int
    BC: int
    tile: int
    inv_tau: float
    acc: Any


@triton.jit
def _cells(form: tl.constexpr) -> tl.tensor:
    """Offsets of the cells [K, C] inside a row, and which of them are not padding."""
    k, c = tl.arange(0, form.BK)[:, None], tl.arange(0, form.BC)[None, :]
    return k * form.C + c, (k < form.K) & (c < form.C)


@triton.jit
def _load(x: tl.tensor, row: tl.tensor, form: tl.constexpr) -> tl.tensor:
    """Row [K, C] of x, zero in the padding."""
    cell_KC, is_cell_KC = _cells(form)
    return tl.load(x + row * (form.K * form.C) + cell_KC, mask=is_cell_KC, other=0.0).to(form.acc)


@triton.jit
def _store(x: tl.tensor, row: tl.tensor, value_KC: tl.tensor, form: tl.constexpr) -> None:
    cell_KC, is_cell_KC = _cells(form)
    tl.store(x + row * (form.K * form.C) + cell_KC, value_KC, mask=is_cell_KC)


@triton.jit
def _load_rows(
    x: tl.tensor, row_E: tl.tensor, is_row_E: tl.tensor, form: tl.constexpr
) -> tl.tensor:
    """Rows [E, K, C] of x, zero in the padding."""
    cell_KC, is_cell_KC = _cells(form)
    at_EKC = row_E.to(tl.int64)[:, None, None] * (form.K * form.C) + cell_KC[None, :, :]
    return tl.load(x + at_EKC, mask=is_row_E[:, None, None] & is_cell_KC[None, :, :], other=0.0).to(
        form.acc
    )


@triton.jit
def _load_tile(
    l_NKC: tl.tensor,
    indices: tl.tensor,
    weight: tl.tensor,
    at: tl.tensor,
    end: tl.tensor,
    form: tl.constexpr,
) -> tl.tensor:
    """The neighbours l[u] [E, K, C] and weights [E] of the messages at .. min(at + tile, end);
    weight 0 beyond.
    """
    e = at + tl.arange(0, form.tile)
    is_message_E = e < end
    u = tl.load(indices + e, mask=is_message_E, other=0)
    w_E = (
        is_message_E.to(form.acc)
        if weight is None
        else tl.load(weight + e, mask=is_message_E, other=0.0).to(form.acc)
    )
    return _load_rows(l_NKC, u, is_message_E, form), w_E


@triton.jit
def _assign(l_EKC: tl.tensor, q_KC: tl.tensor, form: tl.constexpr) -> tl.tensor:
    """p = softmax over k of <l[u,k], q[k]> / τ; [E, K], zero in the padding."""
    s_EK = tl.sum(l_EKC * q_KC[None, :, :], 2) * form.inv_tau
    s_EK = tl.where((tl.arange(0, form.BK) < form.K)[None, :], s_EK, float("-inf"))
    p_EK = tl.exp(s_EK - tl.max(s_EK, 1)[:, None])
    return p_EK / tl.sum(p_EK, 1)[:, None]


@triton.jit
def _mass(l_EKC: tl.tensor, w_E: tl.tensor, q_KC: tl.tensor, form: tl.constexpr) -> tl.tensor:
    """Σ_e w·p·l[u] of one tile; [K, C]."""
    p_EK = w_E[:, None] * _assign(l_EKC, q_KC, form)
    return tl.sum(p_EK[:, :, None] * l_EKC, 0)


@triton.jit
def _pull(
    l_NKC: tl.tensor,
    indices: tl.tensor,
    weight: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    q_KC: tl.tensor,
    form: tl.constexpr,
) -> tl.tensor:
    """Σ w·p·l[u] over the messages begin .. end; [K, C]."""
    total_KC = tl.full([form.BK, form.BC], 0.0, form.acc)
    for at in range(begin, end, form.tile):
        l_EKC, w_E = _load_tile(l_NKC, indices, weight, at, end, form)
        total_KC += _mass(l_EKC, w_E, q_KC, form)
    return total_KC


@triton.jit
def _unit(a_KC: tl.tensor) -> tl.tensor:
    """a / max(‖a‖, 1e-12) and ‖a‖ per factor."""
    norm_K = tl.sqrt(tl.sum(a_KC * a_KC, 1))
    return a_KC / tl.maximum(norm_K, EPS)[:, None], norm_K


@triton.jit
def _settle(
    l_NKC: tl.tensor,
    indices: tl.tensor,
    weight: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    own_KC: tl.tensor,
    rounds: tl.tensor,
    is_resident: tl.constexpr,
    self_init: tl.constexpr,
    form: tl.constexpr,
) -> tl.tensor:
    """All rounds of one target; `is_resident`: its messages fit in one tile, which then stays in
    registers. Returns a [K, C].
    """
    if is_resident:
        l_EKC, w_E = _load_tile(l_NKC, indices, weight, begin, end, form)
    q_KC = own_KC if self_init else tl.full([form.BK, form.BC], 0.0, form.acc)
    a_KC = own_KC
    for _ in range(rounds):
        a_KC = own_KC + (
            _mass(l_EKC, w_E, q_KC, form)
            if is_resident
            else _pull(l_NKC, indices, weight, begin, end, q_KC, form)
        )
        q_KC, _norm_K = _unit(a_KC)
    return a_KC


@triton.jit
def route_targets(
    out_TKC: tl.tensor,
    l_NKC: tl.tensor,
    own_TKC: tl.tensor,
    indptr: tl.tensor,
    indices: tl.tensor,
    weight: tl.tensor,
    rounds: tl.tensor,
    hub_degree: tl.tensor,
    self_init: tl.constexpr,
    form: tl.constexpr,
) -> None:
    """One program per target; hubs are left to `pull_hubs`."""
    v = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(indptr + v), tl.load(indptr + v + 1)
    if end - begin <= hub_degree:
        own_KC = _load(own_TKC, v, form)
        if end - begin <= form.tile:
            _store(
                out_TKC,
                v,
                _settle(l_NKC, indices, weight, begin, end, own_KC, rounds, True, self_init, form),
                form,
            )
        else:
            _store(
                out_TKC,
                v,
                _settle(l_NKC, indices, weight, begin, end, own_KC, rounds, False, self_init, form),
                form,
            )
