"""Programs for targets of very many messages, and sums of runs of equal sources."""

from __future__ import annotations

import triton
import triton.language as tl

from cimage_dist.nn.kernels.triton.grad_programs import _message_grads, _pull_grad
from cimage_dist.nn.kernels.triton.programs import _load, _load_rows, _pull, _store


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
