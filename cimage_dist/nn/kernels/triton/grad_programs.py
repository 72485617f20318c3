"""Routing backwards, one program per target: gradients of its messages and of itself. Then programs
for targets of very many messages, and sums of runs of equal sources.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cimage_dist.nn.kernels.triton.programs import (
    EPS,
    _assign,
    _cells,
    _load,
    _load_rows,
    _load_tile,
    _mass,
    _pull,
    _store,
    _unit,
)


@triton.jit
def _assign_grad(
    l_EKC: tl.tensor, w_E: tl.tensor, q_KC: tl.tensor, g_KC: tl.tensor, form: tl.constexpr
) -> tl.tensor:
    """p, d = <g, l[u]> and the scores' gradient ds = p·(w·d − Σ_j p_j·w·d_j) / τ; [E, K] each."""
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
def _unit_grad(q_KC: tl.tensor, norm_K: tl.tensor, dq_KC: tl.tensor) -> tl.tensor:
    """Gradient of a from that of q = a / max(‖a‖, ε): (dq − q·<q, dq>) / ‖a‖, and dq / ε below."""
    along_KC = q_KC * tl.sum(q_KC * dq_KC, 1)[:, None]
    return (
        tl.where((norm_K > EPS)[:, None], dq_KC - along_KC, dq_KC)
        / tl.maximum(norm_K, EPS)[:, None]
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
