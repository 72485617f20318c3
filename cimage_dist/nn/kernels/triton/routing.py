"""Neighbourhood routing on the GPU: all rounds of a target in one program, no atomics, nothing kept
from forward to backward.

A hub is split over several programs per round, so that it does not hold up the batch. Gradients go
in chunks of targets with bounded scratch: the rounds are computed again, the gradient through each
message of the chunk is written down, and one program per source (or per run of a long list) adds
them up in the order of the messages.

Shapes: N nodes, T targets, E messages, K factors, C channels per factor, S slots (rounds kept for
the gradient), H hubs, P parts of a hub.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cimage_dist.nn.routing import EPS, Routing

_HUB_DEGREE = 1024  # a target of more messages is a hub
_HUB_PARTS = 64  # programs per hub and round
_RUN = 256  # messages of one source that one program adds up
_SCRATCH_CELLS = 2**26  # numbers of scratch per chunk; a single target that needs more gets it
# Of the tile of messages that a program holds in registers: at most 64 numbers per thread, 16 of
# one message; more would spill.
_TILE_MESSAGES = 16
_TILE_CELLS = 8192  # messages x padded factors x padded channels
_WARP_TILE_CELLS = 2048
_WARP_MESSAGE_CELLS = 512


def is_available(dtype: torch.dtype) -> bool:
    """For any type: Triton can be imported and has a CUDA device or its interpreter to run on."""
    # Each torch brings its own triton; before 3.4 it does not take `Form` as a constant.
    is_recent = torch.__version__ >= "2.8"
    return (
        is_recent
        and find_spec("triton") is not None
        and (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1")
    )


def forward(call: Routing) -> Tensor:
    """The routing (§4.4) of the targets; [T, K, C], not normalised after the last round. With l the
    unit rows of x:

    a = l[v] + Σ_u w·p·l[u];  q = a / ‖a‖;  p = softmax_k(<l[u], q> / τ)
    """
    case = _prepare(call)
    out_TKC = torch.empty_like(case.own_TKC)
    case.launch(
        "route_targets",
        (len(out_TKC),),
        out_TKC,
        *case.tensors,
        case.rounds,
        _HUB_DEGREE,
        case.self_init,
    )
    for hubs in case.hubs().split(max(1, _SCRATCH_CELLS // (_HUB_PARTS * case.width))):
        if len(hubs):
            out_TKC[hubs] = _settle_hubs(case, hubs, case.rounds)[0].to(out_TKC.dtype)
    return out_TKC


def backward(grad_TKC: Tensor, call: Routing) -> tuple[Tensor, Tensor | None]:
    """Gradients of x [N, K, C] and of the weights [E] from that of `forward`'s result (§4.4);
    through the last p only unless `call.through_all`.
    """
    case, x = _prepare(call), call.x
    grad_TKC, slots = grad_TKC.contiguous(), case.rounds if case.through_all else 1
    grad_NKC = torch.zeros_like(case.l_NKC, dtype=case.acc)
    grad_weight = None if case.weight is None else torch.zeros_like(case.weight)
    hubs = case.hubs()
    for targets, messages, some in _chunks(case, hubs, slots):
        chunk = replace(
            case,
            own_TKC=case.own_TKC[targets],
            indptr=case.indptr[targets.start : targets.stop + 1],
        )
        grad_EKC = grad_NKC.new_empty((messages.stop - messages.start, *x.shape[1:]))
        grads = _Grads(
            grad_NKC[call.first + targets.start : call.first + targets.stop], grad_EKC, grad_weight
        )
        _target_grads(chunk, grad_TKC[targets], grads, slots)
        if some.stop > some.start:
            _hub_grads(chunk, hubs[some] - targets.start, grad_TKC[targets], grads)
        _add_by_source(chunk, grad_NKC, grad_EKC, case.indices[messages])
    grad_x = grad_NKC.to(x.dtype)
    if call.unit:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        grad_x = _unit_grad(grad_x, case.l_NKC, norm)
    return grad_x.to(x.dtype), grad_weight


def _unit_grad(grad: Tensor, unit: Tensor, norm: Tensor) -> Tensor:
    """From the gradient g of u = a / max(‖a‖, ε) to that of a: (g - u<u,g>)/‖a‖, and g/ε below
    ε.
    """
    along = unit * (unit * grad).sum(-1, keepdim=True)
    return torch.where(norm > EPS, grad - along, grad) / norm.clamp_min(EPS)


@dataclass(frozen=True)
class _Case:
    """One call, or one chunk of its targets: own = l[v] of the targets; `form` is what the kernels
    are compiled for.
    """

    l_NKC: Tensor
    own_TKC: Tensor
    indptr: Tensor
    indices: Tensor
    weight: Tensor | None
    rounds: int
    self_init: bool
    through_all: bool
    form: Any

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.l_NKC, self.own_TKC, self.indptr, self.indices, self.weight

    @property
    def width(self) -> int:
        return self.form.K * self.form.C

    @property
    def acc(self) -> torch.dtype:
        """The type of sums and of scratch."""
        return torch.float64 if self.l_NKC.dtype == torch.float64 else torch.float32

    def hubs(self) -> Tensor:
        return (self.indptr.diff() > _HUB_DEGREE).nonzero().squeeze(1)

    def launch(
        self, kernel: str, grid: tuple[int, ...], *args: Any, tile: int | None = None
    ) -> None:
        form = self.form if tile is None else replace(self.form, tile=tile)
        cells = form.BK * form.BC
        warps = min(max(form.tile * cells // _WARP_TILE_CELLS, cells // _WARP_MESSAGE_CELLS, 1), 8)
        with torch.cuda.device_of(self.l_NKC):
            getattr(_kernels(), kernel)[grid](*args, form, num_warps=warps)


@dataclass(frozen=True)
class _Grads:
    """Where the gradients of a chunk go: its targets' own rows, its messages, the weights of all
    messages.
    """

    own_TKC: Tensor
    message_EKC: Tensor
    weight: Tensor | None


@cache
def _kernels() -> Any:
    """All programs by name. Not imported at the top: they import triton."""
    names = ("programs", "grad_programs")
    parts = [import_module(f"cimage_dist.nn.kernels.triton.{name}") for name in names]
    return SimpleNamespace(**{key: value for part in parts for key, value in vars(part).items()})


def _prepare(call: Routing) -> _Case:
    kernels, (num_factors, channels) = _kernels(), call.x.shape[1:]
    pad_K, pad_C = (1 << (size - 1).bit_length() for size in (num_factors, channels))
    tile = min(max(_TILE_CELLS // (pad_K * pad_C), 1), _TILE_MESSAGES)
    acc = kernels.tl.float64 if call.x.dtype == torch.float64 else kernels.tl.float32
    l_NKC = (F.normalize(call.x, dim=-1, eps=EPS) if call.unit else call.x).contiguous()
    return _Case(
        l_NKC=l_NKC,
        own_TKC=l_NKC[call.first : call.first + call.num_targets],
        indptr=call.indptr.contiguous(),
        indices=call.indices.contiguous(),
        weight=None if call.weight is None else call.weight.contiguous(),
        rounds=call.iterations,
        self_init=call.self_init,
        through_all=call.through_all,
        form=kernels.Form(num_factors, channels, pad_K, pad_C, tile, 1.0 / call.temperature, acc),
    )


def _chunks(case: _Case, hubs: Tensor, slots: int) -> list[tuple[slice, slice, slice]]:
    """Targets, their messages and their hubs, in chunks of about _SCRATCH_CELLS numbers of scratch;
    waits for the device once.
    """
    num_targets, message_cells, target_cells = len(case.own_TKC), case.width, 2 * slots * case.width
    num_marks = (
        1 + (case.indices.numel() * message_cells + num_targets * target_cells) // _SCRATCH_CELLS
    )
    place, marks = (
        torch.arange(size, device=case.indptr.device) for size in (num_targets + 1, num_marks)
    )
    cells = (case.indptr - case.indptr[0]) * message_cells + place * target_cells
    cuts = torch.cat(
        [torch.searchsorted(cells, marks * _SCRATCH_CELLS).clamp_max(num_targets), place[-1:]]
    )
    table = torch.stack([cuts, case.indptr[cuts], torch.searchsorted(hubs, cuts)], 1).tolist()
    return [
        (slice(v, v_end), slice(e, e_end), slice(h, h_end))
        for (v, e, h), (v_end, e_end, h_end) in pairwise(table)
        if v_end > v
    ]


def _pull_hubs(case: _Case, hubs: Tensor, q_HKC: Tensor, g_HKC: Tensor | None = None) -> Tensor:
    """Σ w·p·l[u] of each hub, or with g the gradient dq of its centre; [H, K, C]. The parts are
    added in their order.
    """
    part_HPKC = q_HKC.new_empty((len(hubs), _HUB_PARTS, *q_HKC.shape[1:]))
    l_NKC, _, indptr, indices, weight = case.tensors
    case.launch(
        "pull_hubs",
        (len(hubs), _HUB_PARTS),
        part_HPKC,
        q_HKC,
        g_HKC,
        l_NKC,
        indptr,
        indices,
        weight,
        hubs,
        _HUB_PARTS,
    )
    return part_HPKC.sum(1)


def _settle_hubs(
    case: _Case, hubs: Tensor, rounds: int
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The result a of `rounds` rounds; q before each and after the last; ‖a‖ of each. [H, K, C],
    the norms [H, K, 1].
    """
    own_HKC = case.own_TKC[hubs].to(case.acc)
    a_HKC, centres, norms = own_HKC, [own_HKC if case.self_init else torch.zeros_like(own_HKC)], []
    for _ in range(rounds):
        a_HKC = own_HKC + _pull_hubs(case, hubs, centres[-1])
        norms.append(a_HKC.norm(dim=-1, keepdim=True))
        centres.append(a_HKC / norms[-1].clamp_min(EPS))
    return a_HKC, centres, norms


def _target_grads(case: _Case, grad_TKC: Tensor, grads: _Grads, slots: int) -> None:
    """Gradients of the targets' own rows (added) and through their messages (written), of all but
    the hubs.
    """
    q_TSKC, g_TSKC = (
        grads.own_TKC.new_empty((len(grad_TKC), slots, *grad_TKC.shape[1:])) for _ in range(2)
    )
    norm_TSK = grads.own_TKC.new_empty(q_TSKC.shape[:3])
    places = grads.own_TKC, grads.message_EKC, grads.weight, q_TSKC, g_TSKC, norm_TSK
    counts = case.rounds, slots, _HUB_DEGREE
    case.launch(
        "route_targets_grad",
        (len(grad_TKC),),
        *places,
        grad_TKC,
        *case.tensors,
        *counts,
        case.self_init,
        case.through_all,
    )


def _hub_grads(case: _Case, hubs: Tensor, grad_TKC: Tensor, grads: _Grads) -> None:
    """As `route_targets_grad`, for hubs: g of every round from the last, then the gradients of the
    messages.
    """
    _, centres, norms = _settle_hubs(case, hubs, case.rounds - 1)
    g_HKC = grad_TKC[hubs].to(case.acc)
    stack = [g_HKC]
    if case.through_all:
        for q_HKC, norm_HK1 in zip(centres[:0:-1], norms[::-1], strict=True):
            dq_HKC = _pull_hubs(case, hubs, q_HKC, g_HKC)
            g_HKC = _unit_grad(dq_HKC, q_HKC, norm_HK1)
            stack.insert(0, g_HKC)
    g_HSKC, q_HSKC = torch.stack(stack, 1), torch.stack(centres[-len(stack) :], 1)
    grads.own_TKC[hubs] += g_HSKC.sum(1)
    if case.through_all and case.self_init:
        grads.own_TKC[hubs] += _pull_hubs(case, hubs, centres[0], g_HKC)
    l_NKC, _, indptr, indices, weight = case.tensors
    stacks = grads.message_EKC, grads.weight, q_HSKC, g_HSKC
    case.launch(
        "hub_message_grads",
        (len(hubs), _HUB_PARTS),
        *stacks,
        l_NKC,
        indptr,
        indices,
        weight,
        hubs,
        len(stack),
        case.through_all,
        _HUB_PARTS,
    )


def _add_by_source(case: _Case, grad_NKC: Tensor, grad_EKC: Tensor, indices: Tensor) -> None:
    """grad[u] += the gradients of the messages from u, in their order."""
    source, order = indices.sort(stable=True)
    starts, ends = (
        torch.searchsorted(source, source),
        torch.searchsorted(source, source, right=True),
    )
    runs = grad_NKC, grad_EKC, source, order, starts, ends, _RUN
    tile = max(case.form.tile // 4, 1)  # most sources have few messages in a chunk
    case.launch("sum_runs", (len(source),), *runs, tile=tile)
    case.launch("sum_partial_runs", (-(-len(source) // _RUN),), *runs, tile=tile)
