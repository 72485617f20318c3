"""All that the mathematics knows about other processes: collectives, each the identity for one
process; and the exact selection of the smallest keys inside groups over all ranks, by radix search,
in which counts travel and rows do not. Rows may be spread over ranks in any way and are read in
parts, so that mapped files stay on disk. Shapes: n rows on this rank, C groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cimage_dist import keyed
from cimage_dist.errors import UserError

_BITS = 8
_BINS = 1 << _BITS
_PART_ROWS = 1 << 20  # rows in memory at a time


class _SumWithSumBackward(torch.autograd.Function):
    """All-reduce whose backward is also an all-reduce: d(sum over ranks)/dx on every rank.

    A plain all-reduce with the local term re-attached gives the same value but gradients 1/world
    too small.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        out = x.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        out = grads[0].contiguous().clone()
        dist.all_reduce(out, group=ctx.group)
        return out, None


class Comm:
    """Collective operations over a process group; `Comm()` is one process on its own.

    Every method starting with `Collective:` must be called by all ranks in the same order.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.is_distributed = group is not None
        self.rank = dist.get_rank(group) if self.is_distributed else 0
        self.world = dist.get_world_size(group) if self.is_distributed else 1

    @classmethod
    def from_environment(cls) -> Comm:
        """The default process group where one is initialised, else a single process."""
        return cls(dist.group.WORLD) if dist.is_available() and dist.is_initialized() else cls()

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, x: Tensor) -> Tensor:
        """Collective: elementwise sum over ranks, without gradient."""
        if self.world == 1:
            return x.detach()
        out = x.detach().clone()
        dist.all_reduce(out, group=self.group)
        return out

    def grad_sum(self, x: Tensor) -> Tensor:
        """Collective: elementwise sum over ranks whose backward also sums over ranks."""
        return x if self.world == 1 else _SumWithSumBackward.apply(x, self.group)

    def gather_rows(self, x: Tensor) -> Tensor:
        """Collective: concatenate `[n_r, ...]` of all ranks in rank order; the n_r may differ or be
        zero.
        """
        if self.world == 1:
            return x
        count = torch.tensor([x.shape[0]], dtype=torch.int64, device=x.device)
        counts = [torch.empty_like(count) for _ in range(self.world)]
        dist.all_gather(counts, count, group=self.group)
        sizes = [int(c) for c in counts]
        padded = x.new_zeros((max(sizes), *x.shape[1:]))
        padded[: x.shape[0]] = x
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=self.group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def share_rows(self, x: Tensor, total: int) -> Tensor:
        """Collective: `[total, ...]`, of which every rank brings the rows of its `slice_of(total)`;
        nothing but the result is made.
        """
        if self.world == 1:
            return x
        out = x.new_empty((total, *x.shape[1:]))
        for source in range(self.world):
            part = out[total * source // self.world : total * (source + 1) // self.world]
            if source == self.rank:
                part.copy_(x)
            if part.shape[0]:
                dist.broadcast(part, src=dist.get_global_rank(self.group, source), group=self.group)
        return out

    def scatter_rows(self, x: Tensor, total: int) -> Tensor:
        """Collective: this rank's `slice_of(total)` of rank 0's rows `[total, ...]`; others give a
        tensor of the same type and row shape, which need not have rows.
        """
        if self.world == 1:
            return x
        begin, end = self.slice_of(total)
        if not self.is_main:
            own = x.new_empty((end - begin, *x.shape[1:]))
            dist.recv(own, src=dist.get_global_rank(self.group, 0), group=self.group)
            return own
        for rank in range(1, self.world):
            part = x[total * rank // self.world : total * (rank + 1) // self.world]
            dist.send(part.contiguous(), dist.get_global_rank(self.group, rank), group=self.group)
        return x[begin:end]

    def from_main(self, make: Callable[[], Any]) -> Any:
        """Collective: what `make` gives on rank 0, which alone calls it, as a small picklable
        object on every rank. A mistake of the user that rank 0 finds is raised on all of them.
        """
        found: Any = None
        complaint: str | None = None
        if self.is_main:
            try:
                found = make()
            except UserError as error:
                complaint = str(error)
        found, complaint = self.broadcast_object((found, complaint))
        if complaint is not None:
            raise UserError(complaint)
        return found

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Collective: the tensor of rank `source`, on every rank (same shape and dtype
        everywhere).
        """
        if self.world == 1:
            return x
        out = x.detach().clone()
        dist.broadcast(out, src=dist.get_global_rank(self.group, source), group=self.group)
        return out

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """Collective: a small picklable object of rank `source`, on every rank of this same job."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(
            box, src=dist.get_global_rank(self.group, source), group=self.group
        )
        return box[0]

    def barrier(self) -> None:
        """Collective: wait for all ranks."""
        if self.world > 1:
            dist.barrier(group=self.group)

    def slice_of(self, total: int) -> tuple[int, int]:
        """This rank's contiguous share [begin, end) of `total` items; sizes differ by one at
        most.
        """
        return total * self.rank // self.world, total * (self.rank + 1) // self.world

    def __repr__(self) -> str:
        return f"Comm(rank={self.rank}, world={self.world})"


def num_groups(groups: Tensor, comm: Comm) -> int:
    """Collective: one more than the largest group id on any rank; 0 when there is none."""
    local = groups.max().clamp(min=-1).reshape(1) if groups.numel() else groups.new_full((1,), -1)
    return int(comm.gather_rows(local).max()) + 1


def class_quota(sizes: Tensor, budget: int) -> Tensor:
    """Members taken from each group so that at most `budget` are taken, as evenly as the sizes
    allow; first groups get the remainder. int64 [C].
    """
    if int(sizes.sum()) <= budget:
        return sizes.clone()
    low, high = 0, int(sizes.max())
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (
            (middle, high) if int(sizes.clamp(max=middle).sum()) <= budget else (low, middle - 1)
        )
    quota = sizes.clamp(max=low)
    spare = torch.nonzero(sizes > low).flatten()[: budget - int(quota.sum())]
    quota[spare] += 1
    return quota


# keys float64, gids int64 >= 0 and groups int64 of a range of rows, all [r]
Part = Callable[[slice], tuple[Tensor, Tensor, Tensor]]
Columns = Callable[[], Iterable[tuple[Tensor, Tensor]]] | list[tuple[Tensor, Tensor]]
# numbers and the group of each, in parts
Gids = Tensor | range  # a range where rows are many


def parts_of(count: int) -> Iterator[slice]:
    """Ranges of a million rows that together are `count`."""
    for begin in range(0, count, _PART_ROWS):
        yield slice(begin, min(begin + _PART_ROWS, count))


def smallest_per_group(
    keys: Tensor, gids: Tensor, groups: Tensor, quota: Tensor, comm: Comm | None = None
) -> Tensor:
    """Collective: mark the `quota[c]` rows of smallest key in every group c over all ranks, ties by
    smaller gid; bool [n].

    Shapes: keys float64, gids >= 0 and groups int64, all [n] (n may be 0), quota int64 [C]. Groups
    below 0 are ignored.
    """
    return smallest_in_parts(
        lambda rows: (keys[rows], gids[rows], groups[rows]), groups.numel(), quota, comm
    )


def smallest_in_parts(part: Part, count: int, quota: Tensor, comm: Comm | None = None) -> Tensor:
    """Collective: `smallest_per_group` of `count` rows that are read a million at a time; bool
    [count], and nothing else of that size.

    A radix search, 8 bits at a time, finds the key at which each group's quota ends, then the gid
    among equal keys: at most 16 rounds, each an all-reduce of C x 256 counts.
    """
    comm = comm or Comm()

    def rows() -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        for at in parts_of(count):
            keys, gids, groups = part(at)
            yield at, _ordered_bits(keys), gids.to(torch.int64), groups

    def grouped() -> Iterator[tuple[Tensor, Tensor]]:
        for _, bits, _, groups in rows():
            kept = groups >= 0
            yield bits[kept], groups[kept]

    upto, left = _search(grouped, 63, quota, comm)

    def is_tied(bits: Tensor, groups: Tensor) -> Tensor:
        own = groups.clamp(min=0)
        return (groups >= 0) & (bits == upto[own] + 1) & (left[own] > 0)

    def ties() -> Iterator[tuple[Tensor, Tensor]]:
        for _, bits, gids, groups in rows():
            tied = is_tied(bits, groups)
            yield gids[tied], groups[tied]

    last = torch.full_like(quota, -1)
    if bool(left.any()):
        top = max((int(gids.max()) for gids, _ in ties() if gids.numel()), default=0)
        length = int(comm.gather_rows(quota.new_full((1,), top)).max()).bit_length()
        last, _ = _search(ties, max(length, 1), left, comm)
    chosen = torch.zeros(count, dtype=torch.bool, device=quota.device)
    for at, bits, gids, groups in rows() if quota.numel() else ():
        own = groups.clamp(min=0)
        inside = (groups >= 0) & (bits <= upto[own])
        chosen[at] = inside | (is_tied(bits, groups) & (gids <= last[own]))
    return chosen


def _search(columns: Columns, bits: int, quota: Tensor, comm: Comm) -> tuple[Tensor, Tensor]:
    """Collective: (upto, left), int64 [C]: the numbers up to `upto[c]` are the certain ones of
    group c, and of those equal to upto[c] + 1 another `left[c]` are wanted.

    The numbers have at most `bits` bits.
    """
    prefix, upto = torch.zeros_like(quota), torch.full_like(quota, -1)
    is_open = torch.ones_like(quota, dtype=torch.bool)
    clusters, is_short = quota.numel(), False
    for shift in range((bits - 1) // _BITS * _BITS, -1, -_BITS):
        here = quota.new_zeros(clusters * _BINS)
        for column, groups in _near(columns, shift, prefix, is_open):
            digit = (column >> shift) & (_BINS - 1)
            here += torch.bincount(groups * _BINS + digit, minlength=here.numel())
        below = comm.sum(here).view(clusters, _BINS).cumsum(dim=1)
        # First digit that does not fit whole; 256 when all fit.
        edge = (below <= quota.unsqueeze(1)).sum(dim=1)
        fits = is_open & (edge == _BINS)
        before = torch.cat([torch.zeros_like(quota).unsqueeze(1), below], dim=1)
        before = before.gather(1, edge.unsqueeze(1)).squeeze(1)
        end = min((1 << (shift + _BITS)) - 1, torch.iinfo(torch.int64).max)
        whole = (prefix << (shift + _BITS - 1) << 1) | end
        found = torch.where(fits, whole, (((prefix << _BITS) | edge) << shift) - 1)
        upto = torch.where(is_open, found, upto)
        quota = torch.where(is_open, torch.where(fits, 0, quota - before), quota)
        prefix = torch.where(is_open, (prefix << _BITS) | edge, prefix)
        is_open = is_open & ~fits
        if not bool(quota.any()):
            break
        at_edge = here.view(clusters, _BINS).gather(1, edge.clamp(max=_BINS - 1).unsqueeze(1))
        total = int(at_edge[is_open].sum())
        if not is_short and shift and total <= _PART_ROWS:
            # Few are left: they are kept instead of read again. In one place made before: small
            # tensors between large ones that come and go would keep the room of all of these.
            is_short, few, end = True, quota.new_empty((2, total)), 0
            for column, groups in _near(columns, shift - _BITS, prefix, is_open):
                few[0, end : end + len(column)], few[1, end : end + len(column)] = column, groups
                end += len(column)
            columns = [(few[0], few[1])]
    return upto, quota


def _near(
    columns: Columns, shift: int, prefix: Tensor, is_open: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """The numbers that begin as the edge of their group does."""
    for column, groups in columns() if callable(columns) else columns:
        # In two shifts: one by all 64 bits is undefined.
        begins = column >> (shift + _BITS - 1) >> 1
        kept = is_open[groups] & (begins == prefix[groups])
        yield column[kept], groups[kept]


def even_sample(
    groups: Callable[[slice], Tensor],
    gids: Gids,
    clusters: int,
    limit: int,
    key: int,
    comm: Comm | None = None,
) -> Tensor:
    """Collective: at most `limit` rows over all ranks, even over groups, by a keyed draw; bool [n].
    `groups` gives those of a range of rows.
    """
    comm = comm or Comm()
    sizes = sizes_in_parts(groups, len(gids), clusters, comm)

    def part(rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        ids = ids_of(gids, rows)
        return keyed.uniform(key, ids), ids, groups(rows)

    return smallest_in_parts(part, len(gids), class_quota(sizes, limit), comm)


def ids_of(gids: Gids, rows: slice) -> Tensor:
    if isinstance(gids, Tensor):
        return gids[rows]
    return torch.arange(gids[rows].start, gids[rows].stop)


def sizes_in_parts(
    groups: Callable[[slice], Tensor], count: int, clusters: int, comm: Comm
) -> Tensor:
    total = torch.zeros(clusters, dtype=torch.int64)
    for rows in parts_of(count):
        found = groups(rows)
        total += torch.bincount(found[found >= 0], minlength=clusters).cpu()
    return comm.sum(total)


def _ordered_bits(keys: Tensor) -> Tensor:
    """Non-negative int64 in the order of finite or infinite float64 keys (-0 equals 0); the last
    mantissa bit is dropped to make room for the sign.
    """
    raw = (keys.to(torch.float64) + 0.0).contiguous().view(torch.int64)
    ordered = torch.where(raw < 0, ~raw ^ torch.iinfo(torch.int64).min, raw)
    return (ordered >> 1) + (1 << 62)
