"""Triton kernels of neighbourhood routing. Only `routing_triton` imports this module, when it
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
def _assign_grad(
    l_EKC: tl.tensor, w_E: tl.tensor, q_KC: tl.tensor, g_KC: tl.tensor, form: tl.constexpr
) -> tl.tensor:
    """p, d = <g, l[u]> and the gradient of the scores ds = p·(w·d − Σ_j p_j·w·d_j) / τ; [E, K]
    each.
    """
    p_EK = _assign(l_EKC, q_KC, form)
    d_EK = tl.sum(l_EKC * g_KC[None, :, :], 2)
    dp_EK = w_E[:, None] * d_EK
    return p_EK, d_EK, p_EK * (dp_EK - tl.sum(p_EK * dp_EK, 1)[:, None]) * form.inv_tau


@triton.jit
def _mass_grad(
    l_EKC: tl.tensor, w_E: tl.tensor, q_KC: tl.tensor, g_KC: tl.tensor, form: tl.constexpr
) -> tl.tensor:
    """dq = Σ_e ds·l[u] of one tile; [K, C]."""
    _p_EK, _d_EK, ds_EK = _assign_grad(l_EKC, w_E, q_KC, g_KC, form)
    return tl.sum(ds_EK[:, :, None] * l_EKC, 0)


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
def _pull_grad(
    l_NKC: tl.tensor,
    indices: tl.tensor,
    weight: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    q_KC: tl.tensor,
    g_KC: tl.tensor,
    form: tl.constexpr,
) -> tl.tensor:
    """dq = Σ ds·l[u] over the messages begin .. end; [K, C]."""
    total_KC = tl.full([form.BK, form.BC], 0.0, form.acc)
    for at in range(begin, end, form.tile):
        l_EKC, w_E = _load_tile(l_NKC, indices, weight, at, end, form)
        total_KC += _mass_grad(l_EKC, w_E, q_KC, g_KC, form)
    return total_KC


@triton.jit
def _unit(a_KC: tl.tensor) -> tl.tensor:
    """a / max(‖a‖, 1e-12) and ‖a‖ per factor."""
    norm_K = tl.sqrt(tl.sum(a_KC * a_KC, 1))
    return a_KC / tl.maximum(norm_K, EPS)[:, None], norm_K


@triton.jit
def _unit_grad(q_KC: tl.tensor, norm_K: tl.tensor, dq_KC: tl.tensor) -> tl.tensor:
    """Gradient of a from that of q = a / max(‖a‖, 1e-12): (dq − q·<q, dq>) / ‖a‖, and dq / 1e-12
    under the floor.
    """
    along_KC = q_KC * tl.sum(q_KC * dq_KC, 1)[:, None]
    return (
        tl.where((norm_K > EPS)[:, None], dq_KC - along_KC, dq_KC)
        / tl.maximum(norm_K, EPS)[:, None]
    )


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


@triton.jit
def _settle_grad(
    q_TSKC: tl.tensor,
    g_TSKC: tl.tensor,
    norm_TSK: tl.tensor,
    row: tl.tensor,
    slots: tl.tensor,
    g_KC: tl.tensor,
    l_NKC: tl.tensor,
    indices: tl.tensor,
    weight: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    own_KC: tl.tensor,
    rounds: tl.tensor,
    is_resident: tl.constexpr,
    self_init: tl.constexpr,
    through_all: tl.constexpr,
    form: tl.constexpr,
) -> tl.tensor:
    """The rounds of one target forwards without the last, then backwards.

    Slot s of the stacks is round t = rounds − slots + s: q_{t-1}, its norm before normalising, and
    g_t. Returns the gradient of l[v] as the target, Σ_t g_t (and dq of round 0 under self_init);
    [K, C].
    """
    if is_resident:
        l_EKC, w_E = _load_tile(l_NKC, indices, weight, begin, end, form)
    k = tl.arange(0, form.BK)
    q_KC = own_KC if self_init else tl.full([form.BK, form.BC], 0.0, form.acc)
    if slots == rounds:
        _store(q_TSKC, row, q_KC, form)
    for t in range(1, rounds):
        a_KC = own_KC + (
            _mass(l_EKC, w_E, q_KC, form)
            if is_resident
            else _pull(l_NKC, indices, weight, begin, end, q_KC, form)
        )
        q_KC, norm_K = _unit(a_KC)
        slot = t - (rounds - slots)
        if slot >= 0:
            _store(q_TSKC, row + slot, q_KC, form)
            tl.store(norm_TSK + (row + slot) * form.K + k, norm_K, mask=k < form.K)
    total_KC = g_KC
    _store(g_TSKC, row + slots - 1, g_KC, form)
    tl.debug_barrier()  # the stacks are read back below, not always by the thread that wrote
    if through_all:
        for back in range(1, slots):
            slot = slots - back
            q_KC = _load(q_TSKC, row + slot, form)
            norm_K = tl.load(norm_TSK + (row + slot) * form.K + k, mask=k < form.K, other=0.0)
            dq_KC = (
                _mass_grad(l_EKC, w_E, q_KC, g_KC, form)
                if is_resident
                else _pull_grad(l_NKC, indices, weight, begin, end, q_KC, g_KC, form)
            )
            g_KC = _unit_grad(q_KC, norm_K, dq_KC)
            _store(g_TSKC, row + slot - 1, g_KC, form)
            total_KC += g_KC
        if self_init:
            total_KC += (
                _mass_grad(l_EKC, w_E, own_KC, g_KC, form)
                if is_resident
                else _pull_grad(l_NKC, indices, weight, begin, end, own_KC, g_KC, form)
            )
    return total_KC


@triton.jit
def _message_grads(
    grad_EKC: tl.tensor,
    grad_weight: tl.tensor,
    q_TSKC: tl.tensor,
    g_TSKC: tl.tensor,
    row: tl.tensor,
    slots: tl.tensor,
    l_NKC: tl.tensor,
    indices: tl.tensor,
    weight: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    first: tl.tensor,
    through_all: tl.constexpr,
    form: tl.constexpr,
) -> None:
    """Gradient of l[u] through each message, Σ_t w·p_t·g_t + ds_t·q_{t-1}, and of its weight, Σ_t
    <p_t, d_t>; message `first` is row 0.
    """
    cell_KC, is_cell_KC = _cells(form)
    for at in range(begin, end, form.tile):
        l_EKC, w_E = _load_tile(l_NKC, indices, weight, at, end, form)
        m_EKC = tl.full([form.tile, form.BK, form.BC], 0.0, form.acc)
        dw_E = tl.full([form.tile], 0.0, form.acc)
        for slot in range(slots):
            q_KC, g_KC = _load(q_TSKC, row + slot, form), _load(g_TSKC, row + slot, form)
            p_EK, d_EK, ds_EK = _assign_grad(l_EKC, w_E, q_KC, g_KC, form)
            m_EKC += (w_E[:, None] * p_EK)[:, :, None] * g_KC[None, :, :]
            if through_all:
                m_EKC += ds_EK[:, :, None] * q_KC[None, :, :]
            dw_E += tl.sum(p_EK * d_EK, 1)
        e = at + tl.arange(0, form.tile)
        at_EKC = (e - first)[:, None, None] * (form.K * form.C) + cell_KC[None, :, :]
        tl.store(grad_EKC + at_EKC, m_EKC, mask=(e < end)[:, None, None] & is_cell_KC[None, :, :])
        if weight is not None:
            tl.store(grad_weight + e, dw_E, mask=e < end)


@triton.jit
def route_targets_grad(
    grad_own_TKC: tl.tensor,
    grad_EKC: tl.tensor,
    grad_weight: tl.tensor,
    q_TSKC: tl.tensor,
    g_TSKC: tl.tensor,
    norm_TSK: tl.tensor,
    grad_TKC: tl.tensor,
    l_NKC: tl.tensor,
    own_TKC: tl.tensor,
    indptr: tl.tensor,
    indices: tl.tensor,
    weight: tl.tensor,
    rounds: tl.tensor,
    slots: tl.tensor,
    hub_degree: tl.tensor,
    self_init: tl.constexpr,
    through_all: tl.constexpr,
    form: tl.constexpr,
) -> None:
    """One program per target: adds the gradient of its own row and writes that of its messages;
    hubs are left to the hub kernels.
    """
    v = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(indptr + v), tl.load(indptr + v + 1)
    if end - begin <= hub_degree:
        own_KC, g_KC, row = _load(own_TKC, v, form), _load(grad_TKC, v, form), v * slots
        if end - begin <= form.tile:
            total_KC = _settle_grad(
                q_TSKC,
                g_TSKC,
                norm_TSK,
                row,
                slots,
                g_KC,
                l_NKC,
                indices,
                weight,
                begin,
                end,
                own_KC,
                rounds,
                True,
                self_init,
                through_all,
                form,
            )
        else:
            total_KC = _settle_grad(
                q_TSKC,
                g_TSKC,
                norm_TSK,
                row,
                slots,
                g_KC,
                l_NKC,
                indices,
                weight,
                begin,
                end,
                own_KC,
                rounds,
                False,
                self_init,
                through_all,
                form,
            )
        _store(grad_own_TKC, v, _load(grad_own_TKC, v, form) + total_KC, form)
        tl.debug_barrier()  # as above
        _message_grads(
            grad_EKC,
            grad_weight,
            q_TSKC,
            g_TSKC,
            row,
            slots,
            l_NKC,
            indices,
            weight,
            begin,
            end,
            tl.load(indptr),
            through_all,
            form,
        )


@triton.jit
def _part(indptr: tl.tensor, hubs: tl.tensor, parts: tl.constexpr) -> tl.tensor:
    """The messages of this program: part `program_id(1)` of hub `program_id(0)`."""
    v = tl.load(hubs + tl.program_id(0))
    begin, end = tl.load(indptr + v), tl.load(indptr + v + 1)
    length = tl.cdiv(end - begin, parts)
    begin += length * tl.program_id(1)
    return begin, tl.minimum(begin + length, end)


@triton.jit
def pull_hubs(
    part_HPKC: tl.tensor,
    q_HKC: tl.tensor,
    g_HKC: tl.tensor,
    l_NKC: tl.tensor,
    indptr: tl.tensor,
    indices: tl.tensor,
    weight: tl.tensor,
    hubs: tl.tensor,
    parts: tl.constexpr,
    form: tl.constexpr,
) -> None:
    """One round of a hub over `parts` programs: the sum of each part of its messages; with g, that
    of dq.
    """
    begin, end = _part(indptr, hubs, parts)
    h = tl.program_id(0).to(tl.int64)
    q_KC = _load(q_HKC, h, form)
    if g_HKC is None:
        total_KC = _pull(l_NKC, indices, weight, begin, end, q_KC, form)
    else:
        total_KC = _pull_grad(l_NKC, indices, weight, begin, end, q_KC, _load(g_HKC, h, form), form)
    _store(part_HPKC, h * parts + tl.program_id(1), total_KC, form)


@triton.jit
def hub_message_grads(
    grad_EKC: tl.tensor,
    grad_weight: tl.tensor,
    q_HSKC: tl.tensor,
    g_HSKC: tl.tensor,
    l_NKC: tl.tensor,
    indptr: tl.tensor,
    indices: tl.tensor,
    weight: tl.tensor,
    hubs: tl.tensor,
    slots: tl.tensor,
    through_all: tl.constexpr,
    parts: tl.constexpr,
    form: tl.constexpr,
) -> None:
    begin, end = _part(indptr, hubs, parts)
    row = tl.program_id(0).to(tl.int64) * slots
    _message_grads(
        grad_EKC,
        grad_weight,
        q_HSKC,
        g_HSKC,
        row,
        slots,
        l_NKC,
        indices,
        weight,
        begin,
        end,
        tl.load(indptr),
        through_all,
        form,
    )


@triton.jit
def sum_runs(
    grad_NKC: tl.tensor,
    grad_EKC: tl.tensor,
    source: tl.tensor,
    order: tl.tensor,
    starts: tl.tensor,
    ends: tl.tensor,
    run: tl.constexpr,
    form: tl.constexpr,
) -> None:
    """grad[u] += Σ of the messages from u, given sorted by source; sources of more than `run`
    messages get a partial sum per run.

    Program i works if a run begins at place i. A partial sum replaces the first message of its run,
    which no other program reads.
    """
    i = tl.program_id(0).to(tl.int64)
    start, end = tl.load(starts + i), tl.load(ends + i)
    if (i - start) % run == 0:
        stop = tl.minimum(i + run, end)
        total_KC = tl.full([form.BK, form.BC], 0.0, form.acc)
        for at in range(i, stop, form.tile):
            j = at + tl.arange(0, form.tile)
            row_E = tl.load(order + j, mask=j < stop, other=0)
            total_KC += tl.sum(_load_rows(grad_EKC, row_E, j < stop, form), 0)
        if end - start <= run:
            u = tl.load(source + i).to(tl.int64)
            _store(grad_NKC, u, _load(grad_NKC, u, form) + total_KC, form)
        else:
            tl.debug_barrier()  # all threads have read the row that is overwritten
            _store(grad_EKC, tl.load(order + i), total_KC, form)


@triton.jit
def sum_partial_runs(
    grad_NKC: tl.tensor,
    grad_EKC: tl.tensor,
    source: tl.tensor,
    order: tl.tensor,
    starts: tl.tensor,
    ends: tl.tensor,
    run: tl.constexpr,
    form: tl.constexpr,
) -> None:
    """grad[u] += Σ of the partial sums that `sum_runs` left for u, in order.

    Program i looks at place i·run: a source of more than `run` messages covers at least one such
    place, and its first one does the work.
    """
    i = tl.program_id(0).to(tl.int64) * run
    start, end = tl.load(starts + i), tl.load(ends + i)
    if (end - start > run) & (i - start < run):
        total_KC = tl.full([form.BK, form.BC], 0.0, form.acc)
        for at in range(start, end, form.tile * run):
            j = at + tl.arange(0, form.tile) * run
            row_E = tl.load(order + j, mask=j < end, other=0)
            total_KC += tl.sum(_load_rows(grad_EKC, row_E, j < end, form), 0)
        u = tl.load(source + i).to(tl.int64)
        _store(grad_NKC, u, _load(grad_NKC, u, form) + total_KC, form)
